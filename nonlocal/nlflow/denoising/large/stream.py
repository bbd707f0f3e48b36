"""Clips frame by frame: read twice, once for what the whole decides and once to be denoised a window at a time."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.frame import Frame
from nlflow.denoising.info import DenoiseInfo
from nlflow.denoising.large.arrays import (
    Statistics,
    counts_only,
    denoise_part,
    for_all,
    frame_for,
    info_of,
    levels_of,
    merged,
    statistics_of,
    typical,
)
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise.finding.sigma import estimate_sigmas
from nlflow.denoising.options import Options
from nlflow.domains.samples import as_signal
from nlflow.errors import InputError, MemoryLimitError, format_bytes, memory_limit

Array = NDArray[Any]
Timed = tuple[int, int, Array]
#: Frames from whose noise that of all is estimated.
FIRST = 16
_FILM = "a clip that is read in parts"
_LONG = 8  # times the margin: longer parts save little
_COPIES = 6  # of the samples of a part in single precision, beside the work of the flow


def surveyed(
    frames: Iterable[Array],
    sigma: Any = None,
    *,
    quality: str = "balanced",
    noise: Any = "auto",
    options: Options | None = None,
    **more: Any,
) -> Frame:
    """Read a clip once, and find what its parts have to know of the whole.

    Parameters
    ----------
    frames : iterable of array
        Of shape (H, W) or (H, W, C), all alike.
    sigma, quality, noise, options, **more
        As `nlflow.denoising.large.denoise_array`; sigma is estimated from the first `FIRST` frames, the median.

    Raises
    ------
    InputError
        As `denoise_array`, and for an empty clip.
    """
    chosen = Options.of(options, more)
    chosen.refuse(("separate", "stopping"), _FILM)
    chosen.check(quality, 3)
    model = counts_only(noise, sigma, chosen.strength, _FILM)
    whole: Statistics | None = None
    shape: tuple[int, ...] = ()
    dtype, count, sigmas = np.dtype(np.uint8), 0, []
    for one in frames:
        axis = 3 if one.ndim == 3 else None
        inner = (slice(0, 1), slice(0, one.shape[0]), slice(0, one.shape[1]))
        part = statistics_of(one[None], (count, 0, 0), inner, axis, model)
        whole = part if whole is None else merged([whole, part])
        if sigma is None and model is None and count < FIRST:
            sigmas.append(estimate_sigmas(as_signal(one, None if axis is None else 2)[0]))
        shape, dtype, count = one.shape, one.dtype, count + 1
    if whole is None:
        raise InputError("image: got a clip without frames, expected at least one")
    axes = Axes.of((count, *shape), None, "TYXC" if len(shape) == 3 else "TYX")
    levels = None
    if model is None:
        levels = for_all(typical(sigmas), whole) if sigma is None else levels_of(sigma, axes)
    frame = frame_for(axes, dtype, whole, levels, quality, model, chosen)
    return replace(frame, estimated=sigma is None and model is None)


def window(frame: Frame, max_memory: float | None = None) -> tuple[int, int]:
    """Return how many frames are denoised at a time, and the bytes that takes with the frames around them.

    Raises
    ------
    MemoryLimitError
        When one frame with those that it looks at does not fit.
    """
    count, height, width = frame.shape
    allowed = memory_limit() if max_memory is None else max_memory
    margin = frame.halo[0]

    def needed(core: int) -> int:
        part = (min(core + 2 * margin, count), height, width)
        copies = _COPIES * math.prod(part) * frame.axes.channels * 4
        return copies + frame.bytes_needed(part)

    if needed(1) > allowed:
        raise MemoryLimitError(
            f"max_memory: {min(1 + 2 * margin, count)} frames of {width} x {height}, which one frame needs, take "
            f"{format_bytes(needed(1))} ({needed(1)} bytes), the limit is {format_bytes(allowed)}; raise max_memory, "
            "take quality='fast', or make the pictures smaller"
        )
    low, high = 1, min(count, max(_LONG * margin, 1))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needed(middle) <= allowed else (low, middle - 1)
    return low, needed(low)


def denoise_frames(
    frames: Iterable[Timed], frame: Frame, max_memory: float | None = None, tell: Callable[[int], Any] = lambda n: None
) -> Iterator[tuple[Timed, Array]]:
    """Denoise the frames of a clip in its second reading, with the bits of `nlflow.denoise` on the whole clip.

    Parameters
    ----------
    frames : iterable of (time, duration, array)
    frame : Frame
        Of the first reading of the same clip.
    max_memory : float, optional
        Bytes; half of the physical memory by default. It holds a window with the frames that it looks at, whatever the
        length of the clip.
    tell : callable
        Gets the number of frames that are done.

    Yields
    ------
    (time, duration, array), array
        A frame as it was read, and its estimate in the units of the input, float32 for integers of up to 16 bits.

    Raises
    ------
    InputError
        When there are other frames than in the first reading.
    MemoryLimitError
        As `window`.
    """
    count, margin = frame.shape[0], frame.halo[0]
    core, _ = window(frame, max_memory)
    source, held = iter(frames), deque[Timed]()
    inside = tuple(slice(0, n) for n in frame.shape[1:])
    for start in range(0, count, core):
        stop, low = min(start + core, count), max(start - margin, 0)
        for _ in range(low - max(start - core - margin, 0) if start else 0):
            held.popleft()
        held.extend(itertools.islice(source, min(stop + margin, count) - low - len(held)))
        if len(held) != min(stop + margin, count) - low:
            raise InputError(f"image: got {low + len(held)} frames in the second reading after {count} in the first; "
                             "do not change the film while it is read")  # fmt: skip
        part = np.stack([one for _, _, one in held])
        inner = (slice(start - low, stop - low), *inside)
        result = denoise_part(part, (low, 0, 0), inner, frame, math.inf, alone=True)
        yield from zip(itertools.islice(held, start - low, stop - low), result, strict=True)
        tell(stop)


def told(frame: Frame, max_memory: float | None, residual: float) -> DenoiseInfo:
    """Return how a clip was denoised."""
    core, memory = window(frame, max_memory)
    return replace(info_of(frame, "", memory, -(-frame.shape[0] // core)), residual=residual)
