"""Parts of an image that is too large for one memory, each denoised as it is in the whole.

What the whole image decides (its mean, its range, how noisy it is, when the flow stops) is told once, in a `Frame`;
what remains of `denoise` looks no farther than a halo, and the order of all its sums is that of the whole image.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.backends.threads import one_loop_thread
from nlflow.denoising import groupwise, pixelwise
from nlflow.denoising.inputs import in_units
from nlflow.denoising.noise import Noise
from nlflow.denoising.patches import Grouping
from nlflow.denoising.patches.lattice import three
from nlflow.denoising.presets import GroupPreset
from nlflow.denoising.runs import ALONE, run
from nlflow.denoising.tiles import bytes_needed, margins
from nlflow.domains.samples import as_signal
from nlflow.errors import check_memory
from nlflow.kernels import Patch

Array = NDArray[Any]
# Bytes a sample and channel of a part in the flow of pixels, in double precision; half of them in single precision.
_PIXEL_BYTES = 100


@dataclass(frozen=True)
class Frame:
    """What a part has to know of the whole.

    Attributes
    ----------
    shape : tuple of int
        Of the whole image without its channels.
    channel_axis : int or None
    model : Noise or None
        Noise of counts.
    offset, scale : array of shape (C,)
        What is subtracted, and the noise that is divided by.
    exact : bool array of shape (C,)
        Channels that are free of noise and kept.
    precision : dtype
        Of the flow.
    kernel : Patch or None
        Of the flow of pixels, in units of the noise.
    steps : int
        Of the flow of pixels.
    fidelity : float or None
        A constant for the flow of pixels.
    quality : str
    preset : GroupPreset or None
        The flow of groups; None for the flow of pixels.
    groupings : tuple of Grouping, or None
        Of the flow of groups.
    colours : array of shape (C, C)
        The channels of the flow of groups, as rows.
    idle : str
        Why nothing is done; empty when something is.
    """

    shape: tuple[int, ...]
    channel_axis: int | None
    model: Noise | None
    offset: Array
    scale: Array
    exact: NDArray[np.bool_]
    precision: np.dtype[Any]
    kernel: Patch | None
    steps: int
    fidelity: float | None
    quality: str
    preset: GroupPreset | None
    groupings: tuple[Grouping, ...] | None
    colours: Array
    idle: str

    @property
    def halo(self) -> tuple[int, ...]:
        """How far a sample of the result looks, along each axis."""
        axes = len(self.shape)
        if self.idle:
            return (0,) * axes
        if self.groupings is not None and self.preset is not None:
            return margins(self.groupings, self.preset.steps)[-axes:]
        assert self.kernel is not None
        return (pixelwise.reach(self.kernel, self.steps),) * axes


def bytes_for(frame: Frame, shape: tuple[int, ...]) -> int:
    """Return the working memory for a part of this shape, without its channels."""
    channels = len(frame.scale)
    if frame.groupings is None or frame.preset is None:
        return _PIXEL_BYTES * channels * math.prod(shape)
    return bytes_needed((channels, *three(shape)), frame.groupings, frame.preset.steps, frame.precision.itemsize)


@underflowing
def denoise_part(
    part: Array, corner: tuple[int, ...], inner: tuple[slice, ...], frame: Frame, memory_limit: float | None = None,
    alone: bool = False,
) -> Array:  # fmt: skip
    """Return the estimate for a part of an image, in the units of the input.

    Parameters
    ----------
    part : array
        A block of the image with `Frame.halo` more samples around it where the image goes on, channels included; of a
        clip whole frames.
    corner : tuple of int
        Where the array begins in the image, without channels.
    inner : tuple of slice
        The block in the array, without channels.
    frame : Frame
    memory_limit : float, optional
        Bytes; half of the physical memory by default.
    alone : bool
        Whether this part is the only one at this time, and takes all threads.

    Returns
    -------
    array
        Of the block's shape; float32 for integers of up to 16 bits, float16 and float32, otherwise float64.

    Raises
    ------
    InputError
        As `nlflow.denoise`.
    MemoryLimitError
        When the part does not fit the limit.

    Notes
    -----
    One part of many takes one thread. Weights of the flow of pixels are computed anew at each average:
    that takes no memory, and has the bits of weights that are stored.
    """
    samples, restore = as_signal(part, frame.channel_axis)
    if frame.idle:
        return np.array(restore(samples[inner]))
    f, u = _estimate(samples, corner, frame, memory_limit, alone)
    estimate = (u[inner] * frame.scale + frame.offset).astype(f.dtype)
    if frame.model is not None:
        estimate = frame.model.reduce(samples[inner]).back(estimate)
    return np.array(restore(np.where(frame.exact, samples[inner], estimate)))


@underflowing
def residual_squares(
    part: Array, corner: tuple[int, ...], inner: tuple[slice, ...], frame: Frame, memory_limit: float | None = None
) -> float:
    """Return the sum of squares of input minus result over a block, in units of the noise; see `denoise_part`."""
    samples, _ = as_signal(part, frame.channel_axis)
    f, u = _estimate(samples, corner, frame, memory_limit)
    return float(np.sum(np.square(u[inner] - f[inner]), dtype=np.float64))


def _estimate(
    samples: Array, corner: tuple[int, ...], frame: Frame, memory_limit: float | None, alone: bool = False
) -> tuple[Array, Array]:
    """Return samples (..., C) and their estimate in units of the noise."""
    spatial = samples.shape[:-1]
    check_memory(f"a block of {' x '.join(map(str, spatial))} samples with its halo", bytes_for(frame, spatial),
                 "use smaller chunks, or raise max_memory", memory_limit)  # fmt: skip
    signal = samples if frame.model is None else frame.model.reduce(samples).samples
    f = in_units(signal, frame.offset, frame.scale)
    with nullcontext() if alone else one_loop_thread():
        return f, _pixels(frame, f) if frame.groupings is None else _groups(frame, f, frame.groupings, corner)


def _pixels(frame: Frame, f: Array) -> Array:
    kernel = frame.kernel
    assert kernel is not None
    outcome = pixelwise.solved(
        f.astype(frame.precision, copy=False), width=kernel.width, patch_size=kernel.patch_size,
        search_radius=kernel.search_radius, fidelity=frame.fidelity, steps=frame.steps, store=False,
    )  # fmt: skip
    return outcome.path[-1].astype(f.dtype, copy=False)


def _groups(frame: Frame, f: Array, groupings: tuple[Grouping, ...], corner: tuple[int, ...]) -> Array:
    signal = groupwise.channels_of(f, frame.colours, frame.precision)
    assert frame.preset is not None
    problem = groupwise.problem(signal, frame.preset, groupings, origin=corner, whole=frame.shape)
    return groupwise.back_from(run(problem, ALONE)[0][-1], frame.colours, f)
