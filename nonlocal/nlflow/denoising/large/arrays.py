"""Denoising of Dask arrays, with the bits of `nlflow.denoise`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising import DenoiseInfo, groupwise, pixelwise
from nlflow.denoising.doubts import check_units
from nlflow.denoising.inputs import (
    channels_for,
    check_patch,
    idle_for,
    noiseless,
    scale_for,
    shape_of,
    spatial_shape,
)
from nlflow.denoising.large.parts import Frame, bytes_for, denoise_part
from nlflow.denoising.large.survey import Blocks, Layout, Statistics, estimated, settled, statistics
from nlflow.denoising.layout import Layout as Axes
from nlflow.denoising.layout import layout_of
from nlflow.denoising.noise import Noise
from nlflow.denoising.noise.names import choose_noise
from nlflow.denoising.options import OPTIONS, Options
from nlflow.denoising.presets import preset_for, ratio_of
from nlflow.domains.samples import rounded
from nlflow.errors import (
    InputError,
    NlflowWarning,
    check_floats,
    check_memory,
    check_number,
    checked_call,
    install_command,
)
from nlflow.store.encoding import digest
from nlflow.store.identity import described

Array = NDArray[Any]
_BLOCKS = "an array in blocks"


@partial(checked_call, more=OPTIONS)
def denoise_array(
    image: Any,
    sigma: Any = None,
    *,
    quality: str = "balanced",
    noise: Any = "auto",
    channel_axis: int | None = None,
    axes: str | None = None,
    spacing: Any = None,
    return_info: bool = False,
    options: Options | None = None,
    **more: Any,
) -> Any:
    """Denoise a Dask array, block by block, with the result of `nlflow.denoise` on the whole.

    Every block is denoised with a halo as wide as the flow looks, so blocks leave no seams. What the whole image
    decides (its mean and range, how noisy it is, after how many steps the flow stops) is computed before this returns,
    on the scheduler that is in force; the result itself is lazy.

    Parameters
    ----------
    image : dask.array.Array
        (N,) signal, (H, W) image or (Z, H, W) volume; with channels (N, C), (H, W, C) or (Z, H, W, C). Integers and
        floats, with chunks of known sizes.
    sigma : float or array_like of shape (C,), optional
        Standard deviation of the noise in the units of the input: one number, or one a channel. Estimated, from
        windows of the whole image, when not given.
    noise : str or Poisson
        White noise, which ``'auto'`` means here too, ``'poisson'``, or a `Poisson`. Other noise is not for blocks.
    quality, channel_axis, axes, spacing
        As `nlflow.denoise`.
    return_info : bool
        Return ``(result, info)`` with a `DenoiseInfo`, whose residual is NaN, as nothing has been denoised yet.
    options, **more
        As `nlflow.denoise`; `max_memory` is that of one block, which is not cut further. No `separate`, `stopping` and
        `device`.

    Returns
    -------
    dask.array.Array
        Shape, units and dtype of the input. Integers are rounded and clipped; for a result in floats convert the input
        first (``image.astype("float32")``, which changes no other bit for integers of up to 16 bits).

    Raises
    ------
    InputError
        Without Dask; for what is no Dask array, for chunks of unknown sizes, and as `nlflow.denoise`. NaN and infinity
        are found before this returns.
    MemoryLimitError
        When the largest block with its halo does not fit `max_memory`.

    Warns
    -----
    NlflowWarning
        When blocks are smaller than the halo and are joined.

    Notes
    -----
    The result has the bits of ``denoise(image.compute(), ..., preserve_range=True)``, rounded for integers. (Two things
    hold to rounding only: the estimate of sigma, and the principal axes of images of 2 or more than 3 channels, which
    are sums over the whole.) ``mask``, ``keep``, maps of sigma and ``stopping`` of `nlflow.denoise` are decided by the
    whole image, or not by blocks alone, and are left to it; to keep samples, use ``dask.array.where``.

    The image is read once for its statistics, once more to estimate sigma, and by ``fast`` up to where the residual is
    enough (mostly a sixth of the image, which is also denoised; ``steps=1`` spares it). The halo is 19 samples wide for
    ``fast``, 288 for ``balanced`` and 681 for ``best``: blocks of 2048 to 4096 keep what is computed twice small. In
    volumes it is 16, 88 and 124 along each axis, less along those whose samples lie farther apart, and sigma is
    estimated from nine planes (the median); in clips 8, 50 and 58 frames, and blocks hold whole frames.
    A block takes one thread, and working memory as `DenoiseInfo.memory_bytes` says.

    Examples
    --------
    >>> import numpy as np
    >>> import dask.array as da
    >>> from nlflow import denoise
    >>> from nlflow.denoising.large import denoise_array
    >>> noisy = np.random.default_rng(0).normal(100, 20, (200, 150)).astype("float32")
    >>> lazily = denoise_array(da.from_array(noisy, chunks=(64, 80)), 20.0, quality="fast")
    >>> bool((lazily.compute() == denoise(noisy, 20.0, quality="fast")).all())
    True
    """
    result, info, _ = denoised(
        image, sigma, Options.of(options, more), quality=quality, noise=noise, channel_axis=channel_axis, axes=axes,
        spacing=spacing,
    )  # fmt: skip
    return (result, info) if return_info else result


def denoised(
    image: Any, sigma: Any, options: Options, *, quality: str = "balanced", noise: Any = "auto",
    channel_axis: int | None = None, axes: str | None = None, spacing: Any = None,
) -> tuple[Any, DenoiseInfo, str]:  # fmt: skip
    """Return what `denoise_array` does, and a digest of the input's samples and of all that the result depends on."""
    need_dask()
    blocks, layout = _blocks(image, channel_axis, axes, spacing)
    options.refuse(("separate", "stopping", "device"), _BLOCKS)
    options.check(quality, len(layout.letters))
    strength, max_memory = options.strength, options.max_memory
    model = counts_only(noise, sigma, strength, _BLOCKS)
    check_patch(options.patch_size, blocks.shape)
    levels = None if sigma is None else levels_of(sigma, blocks.image.shape, blocks.channel_axis)
    check_units(blocks.image.dtype, levels, stacklevel=4)
    found = statistics(blocks, model)
    if model is not None:
        levels = np.ones(len(found.mean))
    elif levels is None:
        levels = estimated(blocks, found)
    shape, dtype = blocks.shape, blocks.image.dtype
    frame, why = frame_for(shape, blocks.channel_axis, dtype, layout, found, levels * strength, quality, model, options,
                           lambda frame_of: settled(blocks, frame_of))  # fmt: skip
    blocks = _wide_enough(blocks, frame.halo)
    cut = blocks.layout(frame.halo)
    memory = _memory(blocks, frame)
    if not frame.idle:
        check_memory(f"the largest block, of {_size(blocks)} samples with a halo of {_said(frame.halo)},", memory,
                     "use smaller chunks, quality='fast', or raise max_memory", max_memory)  # fmt: skip
    result = blocks.with_halo(frame.halo).map_blocks(
        _denoised, layout=cut, frame=frame, memory_limit=max_memory, into=blocks.image.dtype,
        dtype=blocks.image.dtype, chunks=blocks.image.chunks, meta=np.empty((0,) * blocks.image.ndim, image.dtype),
    )  # fmt: skip
    info = info_of(frame, sigma is None and model is None, why, memory, math.prod(map(len, cut.chunks)))
    return result, info, digest(f"{found.digest} {_described(frame)}")


def counts_only(noise: Any, sigma: Any, strength: float, what: str) -> Noise | None:
    """Return the model of counts, or None for white noise; blocks know no other."""
    model, _ = choose_noise(noise, sigma)
    if isinstance(model, str):
        return None
    if not model.in_blocks:
        raise InputError(
            f"noise: got {type(model).__name__} for {what}, expected 'white', 'poisson' or a Poisson; give "
            "sigma for white noise, or use nlflow.denoise on parts that fit the memory"
        )
    return model.scaled(strength) if strength != 1 else model  # which is refused


def _described(frame: Frame) -> str:
    """Return all of a frame as text, to the last bit."""
    return described(list(vars(frame).values()))


def need_dask() -> None:
    """Raise `InputError` without Dask."""
    try:
        import dask.array  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"image: arrays in blocks need Dask, which is not installed ({error}); {install_command('distributed')}"
        ) from error


def _blocks(image: Any, channel_axis: Any, axes: Any, spacing: Any) -> tuple[Blocks, Axes]:
    """Check an image, and put its channels, and each frame of a clip, into one chunk."""
    import dask.array

    if not isinstance(image, dask.array.Array):
        raise InputError(
            f"image: got {type(image).__name__}, expected a dask.array.Array; use nlflow.denoise, or "
            "dask.array.from_array"
        )
    if image.dtype.kind not in "iuf":
        raise InputError(f"image: got dtype {image.dtype}, expected integers or floats; convert it with astype")
    layout, axis = layout_of(image.shape, channel_axis, axes, spacing)
    if not layout.letters:
        raise InputError(
            f"image: got shape {image.shape} with channel_axis={channel_axis}, expected a signal, an image or a volume "
            "besides the channel axis; denoise its volumes one by one"
        )
    if any(math.isnan(n) for sizes in image.chunks for n in sizes):
        raise InputError("image: got chunks of unknown sizes, expected known ones; call image.compute_chunk_sizes()")
    if image.size == 0:
        raise InputError(f"image: got an empty array of shape {image.shape}, expected at least one element")
    if any(0 in sizes for sizes in image.chunks):
        image = image.rechunk(tuple(tuple(n for n in sizes if n) for sizes in image.chunks))
    blocks = Blocks(image if axis is None else image.rechunk({axis: -1}), axis)
    # Motion is that of whole frames.
    return (blocks.at_least((1, *blocks.shape[1:])) if layout.moving else blocks), layout


def levels_of(sigma: Any, whole: tuple[int, ...], channel_axis: int | None) -> Array:
    """Return the noise of each channel of an image of this shape."""
    channels = 1 if channel_axis is None else int(whole[channel_axis])
    shape = shape_of("sigma", sigma)
    if shape == ():
        hint = "the noise in the units of the input"
        return np.full(channels, check_number("sigma", sigma, minimum=0, hint=hint))
    if channel_axis is None or shape != (channels,) or shape == spatial_shape(whole, channel_axis):
        raise InputError(
            f"sigma: got an array of shape {shape}, expected a number, or one a channel; noise that varies in "
            "space is left to nlflow.denoise"
        )
    levels = check_floats("sigma", sigma)
    if levels.min() < 0:
        raise InputError(f"sigma: got {levels.min():g}, expected values >= 0, the noise in the units of the input")
    return levels


def frame_for(
    shape: tuple[int, ...], channel_axis: int | None, given: np.dtype[Any], layout: Axes, found: Statistics,
    levels: Array, quality: str, model: Noise | None, options: Options,
    settle: Callable[[Callable[[int], Frame]], tuple[int, str]],
) -> tuple[Frame, str]:  # fmt: skip
    """Return what parts have to know of the whole, and why the flow stops where it does.

    `settle` finds, for the flow of pixels, after how many steps that is.
    """
    dtype = np.dtype(np.float32 if _single(given) else np.float64)
    spans = np.array([float(high) - float(low) for low, high in zip(found.low, found.high, strict=True)])
    levels, _ = noiseless(levels, spans)
    idle = idle_for(float(spans.max()), float(levels.max()))
    channels = len(levels)
    dimension = sum(n > 1 for n in shape)
    scale = levels if idle else scale_for(levels)
    # Of the whole in units of the noise: its range in the precision that samples have, and its variance.
    with np.errstate(all="ignore"):
        ends = [((x - found.mean) / scale).astype(dtype) for x in (found.low, found.high)]
        variance = float((np.diag(found.moments) / scale**2).mean() / found.count)
    extent = 0.0 if idle else float(ends[1].max() - ends[0].min())
    exact = levels == 0
    preset = preset_for(quality, layout)
    if not idle and preset is not None:
        colours = channels_for(channels, lambda: found.moments / np.outer(scale, scale))
        precision = np.dtype(np.float32 if extent < groupwise.SINGLE else np.float64)
        groupings = preset.groupings(ratio_of(variance, channels), dimension)
        frame = Frame(shape, channel_axis, model, found.mean, scale, exact, precision, None, 0, None,
                      quality, preset, groupings, colours, "")  # fmt: skip
        return frame, "all steps of the preset were taken"
    precision = np.dtype(np.float32) if extent < pixelwise.SINGLE else dtype
    kernel = None
    if not idle:
        # The root mean square, as the width is one number for all channels.
        unit = 1.0 if model is not None else float(np.sqrt(np.mean(np.square(scale))))
        width = None if options.width is None else options.width / unit
        kernel = pixelwise.kernel_for(
            ratio_of(variance, channels), dimension, channels, width, options.patch_size, options.search_radius
        )

    def frame_of(steps: int) -> Frame:
        return Frame(shape, channel_axis, model, found.mean, scale, exact, precision, kernel, steps,
                     options.fidelity, quality, None, None, np.eye(channels), idle)  # fmt: skip

    if idle:
        return frame_of(0), f"returned unchanged: {idle}"
    if options.steps is not None:
        return frame_of(options.steps), f"{options.steps} step(s) were asked for"
    steps, why = settle(frame_of)
    return frame_of(steps), why


def _single(dtype: np.dtype[Any]) -> bool:
    """Tell whether samples are computed with in single precision, as `nlflow.domains.samples.as_signal` decides."""
    return dtype.itemsize <= 2 or dtype == np.float32


def _wide_enough(blocks: Blocks, halo: tuple[int, ...]) -> Blocks:
    joined = blocks.at_least(halo)
    # What is left over at the end of an axis is nobody's choice.
    least_of = [min(sizes[:-1], default=n) for sizes, n in zip(blocks.chunks, halo, strict=True)]
    small = [(least, n) for least, n in zip(least_of, halo, strict=True) if least < n]
    if small:
        least, wanted = min(small)
        warnings.warn(
            f"image: blocks of {least} samples are smaller than the halo of {wanted} and are joined to blocks of "
            f"{_size(joined)}",
            NlflowWarning,
            stacklevel=5,
        )
    return joined


def _size(blocks: Blocks) -> str:
    return " x ".join(str(max(sizes)) for sizes in blocks.chunks)


def _said(halo: tuple[int, ...]) -> str:
    return str(halo[0]) if len(set(halo)) == 1 else " x ".join(map(str, halo))


def _memory(blocks: Blocks, frame: Frame) -> int:
    """Return the working memory of the largest block."""
    sizes = (
        min(max(sizes) + 2 * halo, n) for sizes, halo, n in zip(blocks.chunks, frame.halo, blocks.shape, strict=True)
    )
    return 0 if frame.idle else bytes_for(frame, tuple(sizes))


def info_of(frame: Frame, estimated_sigma: bool, why: str, memory: int, tiles: int) -> DenoiseInfo:
    """Return what is told of the parts of a whole."""
    told: dict[str, Any] = {"functional": "none", "parameters": {}}
    if frame.kernel is not None:
        unit = 1.0 if frame.model is not None else float(np.sqrt(np.mean(np.square(frame.scale))))
        told = {"functional": pixelwise.FUNCTIONAL, "parameters": pixelwise.parameters(frame.kernel, unit),
                "method": "stencil: weights are computed anew at each average"}  # fmt: skip
    elif frame.groupings is not None:
        told = groupwise.described(frame.groupings)
    return DenoiseInfo(
        sigma=float(np.sqrt(np.mean(np.square(frame.scale)))),
        sigma_estimated=estimated_sigma,
        noise="white noise" if frame.model is None else frame.model.describe(),
        model=None if frame.model is None else frame.model.as_dict(),
        quality=frame.quality,
        steps=frame.steps if frame.preset is None else frame.preset.steps + 1,
        stopped_by=why,
        residual=math.nan,
        tiles=tiles,
        memory_bytes=memory,
        **told,
    )


def _denoised(
    block: Array,
    layout: Layout,
    frame: Frame,
    memory_limit: float | None,
    into: np.dtype[Any],
    block_id: tuple[int, ...],
) -> Array:
    """Return a block of the result."""
    index = tuple(k for axis, k in enumerate(block_id) if axis != frame.channel_axis)
    corner, inner = layout.place(index)
    result = denoise_part(block, corner, inner, frame, memory_limit)
    return rounded(result, into) if into.kind in "iu" else result.astype(into, copy=False)
