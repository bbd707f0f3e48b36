"""Dask arrays, block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square, underflowing
from nlflow.backends.threads import one_loop_thread
from nlflow.denoising.frame import Frame, Part, Spread, is_by_pixels, live_of, units_of
from nlflow.denoising.given import (
    Known,
    as_given,
    refuse_unordered,
)
from nlflow.denoising.info import DenoiseInfo, check_units
from nlflow.denoising.large.survey import Blocks, Statistics, estimated, place, surveyed
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise.models.base import Noise, NoiseEstimate
from nlflow.denoising.noise.models.gaussian import GaussianNoise
from nlflow.denoising.noise.models.intensities import Poisson
from nlflow.denoising.noise.names import choose_noise
from nlflow.denoising.options import OPTIONS, Options
from nlflow.denoising.pixelwise import MOST_STEPS, Pixels, enough
from nlflow.denoising.residual import Figures, Looked, figures_in, milder, places_of
from nlflow.denoising.sigmas import numbers_of
from nlflow.domains.samples import rounded
from nlflow.errors import InputError, check_memory, checked_call, not_installed, warn_caller
from nlflow.store.encoding import digest
from nlflow.store.identity import described

Array = NDArray[Any]
_BLOCKS = "an array in blocks"
# Blocks whose residuals are asked for at a time: enough for many workers, few beside all.
_BATCH = 64
# Samples around a place whose residual is looked at, by the number of axes: fewer than the flow looks at, which
# changes its estimate by little.
_AROUND = {1: 512, 2: 32, 3: 8}


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
    """Denoise a Dask array block by block; for given noise the result is that of `nlflow.denoise` on the whole.

    What depends on the whole image (mean, range, noise, number of steps) is computed before this returns, on the
    scheduler that is in force; the result is lazy.

    Parameters
    ----------
    image : dask.array.Array
        (N,) signal, (H, W) image or (Z, H, W) volume; with channels (N, C), (H, W, C) or (Z, H, W, C). Integers and
        floats, with chunks of known sizes.
    sigma : float or array_like of shape (C,), optional
        Standard deviation of the noise in the units of the input: one number, or one a channel. Estimated by default:
        from windows of the whole image, of a volume or clip from nine planes (the median); with 'auto' less where its
        middle or what is removed shows less.
    noise : str or Poisson
        'white', 'poisson', or a `Poisson`; other noise is refused. With 'auto' the noise counts as white, and a warning
        tells if the middle of the image shows another kind.
    quality, channel_axis, axes, spacing
        As in `nlflow.denoise`.
    return_info : bool
        Return ``(result, info)`` with a `DenoiseInfo`, whose residual is NaN, since nothing has been denoised yet.
    options, **more
        As in `nlflow.denoise`, without `separate`, `stopping` and `device`. `max_memory` is that of one block.

    Returns
    -------
    dask.array.Array
        Shape, units and dtype of the input; integers are rounded and clipped.

    Raises
    ------
    InputError
        For what is no Dask array, booleans, chunks of unknown sizes, and as in `nlflow.denoise`.
    MemoryLimitError
        When the largest block with its halo does not fit `max_memory`.
    MissingPackageError
        Without Dask.

    Warns
    -----
    NlflowWarning
        When blocks are smaller than the halo and are joined, and for images of fewer than 2 counts a sample.

    Notes
    -----
    For given noise the result has the bits of ``denoise(image.compute(), ..., preserve_range=True)`` in the dtype of
    the input, with three exceptions: with 2 or more than 3 channels it agrees up to rounding; images with fewer than 2
    counts a sample on average are not summed in cells first; and beside NaN and values that stand for "no data", which
    stay, it differs by a part of the noise. There is no ``mask``, no ``keep`` and no map of sigma.

    The image is read several times. In images the halo is at most 45 samples wide
    for ``pixels`` and one step, 60 for ``fast``, 314 for ``balanced`` and 707 for ``best``, for the strongest noise (26
    less in colours): blocks of 2048 to 4096 keep what is computed twice small. In volumes it is 16, 88 and 124 along
    each axis; where samples lie farther apart along some axes, less along these and more along the others. In clips it
    is 8, 50 and 58 frames, and blocks hold whole frames.

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
    channel_axis: int | None = None, axes: str | None = None, spacing: Any = None, nodata: Any = None,
) -> tuple[Any, DenoiseInfo, str]:  # fmt: skip
    """Return what `denoise_array` does, and a digest of all that the result depends on; `nodata` means "no data"."""
    need_dask()
    blocks, placed = _blocks(image, channel_axis, axes, spacing)
    options.refuse(("separate", "stopping", "device"), _BLOCKS)
    options.check(quality, len(placed.letters))
    model = counts_only(noise, sigma, options.strength, _BLOCKS)
    placed.check_patch(options.patch_size)
    levels = None if sigma is None else levels_of(sigma, placed)
    check_units(blocks.image.dtype, levels)
    found, known, guessed = surveyed(blocks, model, nodata)
    if guessed:
        warn_caller(guessed)
    live = found.high > found.low
    if isinstance(model, Poisson) and live.any() and len(placed.letters) == 2 and not is_by_pixels(quality, placed):
        mean = float(found.totals[live].mean()) / found.count
        if model.are_few(mean):
            warn_caller(
                f"noise: got {(mean - model.offset) / model.gain:.2g} counts a sample on average, so few that "
                "nlflow.denoise sums them in cells first, which blocks do not: their result is another one; denoise "
                "the image as a whole where it fits the memory"
            )
    verdict = None
    if levels is None and model is None:
        levels = estimated(blocks, found, known)
        if noise == "auto":
            levels, verdict = examined(blocks.middle(), placed, found, known, levels)
    wanted = Wanted(placed, blocks.image.dtype, found, known, quality, model, options, sigma is None and model is None)
    frame, texts = wanted.checked(levels, verdict, lambda frame: _figures(blocks, found, frame))
    for text in texts:
        warn_caller(text)
    frame, why = (frame, "") if not isinstance(frame.flow, Pixels) else settled(blocks, frame, found.count)
    if text := frame.too_strong(float(found.high.max() - found.low.min())):
        warn_caller(text)
    blocks = _wide_enough(blocks, frame.halo)
    sides = (
        min(max(sizes) + 2 * halo, n) for sizes, halo, n in zip(blocks.chunks, frame.halo, blocks.shape, strict=True)
    )
    memory, limit, into = frame.bytes_needed(tuple(sides)), options.max_memory, blocks.image.dtype
    if not frame.idle:
        check_memory(f"the largest block, of {_size(blocks)} samples with a halo of {_said(frame.halo)},", memory,
                     "use smaller chunks, quality='fast', or raise max_memory", limit)  # fmt: skip
    result = blocks.with_halo(frame.halo).map_blocks(
        _denoised, cut=blocks.chunks, frame=frame, memory_limit=limit, into=into, dtype=into,
        chunks=blocks.image.chunks, meta=np.empty((0,) * blocks.image.ndim, image.dtype),
    )  # fmt: skip
    info = info_of(frame, why, memory, math.prod(map(len, blocks.chunks)))
    words = [value for name, value in vars(frame).items() if name != "options"]  # which say more than results depend on
    return result, info, digest(f"{found.digest} {described(words)}")


def counts_only(noise: Any, sigma: Any, strength: float, what: str) -> Noise | None:
    model, _ = choose_noise(noise, sigma)
    if isinstance(model, str):
        return None
    if not model.in_blocks:
        raise InputError(
            f"noise: got {type(model).__name__} for {what}, expected 'white', 'poisson' or a Poisson; give "
            "sigma for white noise, or use nlflow.denoise on parts that fit the memory"
        )
    return model.scaled(strength) if strength != 1 else model  # which is refused


def need_dask() -> None:
    try:
        import dask.array  # noqa: F401
    except ImportError as error:
        raise not_installed("image: an array in blocks", "Dask", "distributed") from error


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
    placed = Axes.of(image.shape, channel_axis, axes, spacing)
    placed.check_count()
    if any(math.isnan(n) for sizes in image.chunks for n in sizes):
        raise InputError("image: got chunks of unknown sizes, expected known ones; call image.compute_chunk_sizes()")
    if image.size == 0:
        raise InputError(f"image: got an empty array of shape {image.shape}, expected at least one element")
    if any(0 in sizes for sizes in image.chunks):
        image = image.rechunk(tuple(tuple(n for n in sizes if n) for sizes in image.chunks))
    blocks = Blocks(image if placed.channel is None else image.rechunk({placed.channel: -1}), placed.channel)
    # Motion is that of whole frames.
    return (blocks.at_least((1, *blocks.shape[1:])) if placed.moving else blocks), placed


def levels_of(sigma: Any, axes: Axes) -> Array:
    levels: Array | None = numbers_of(sigma, axes.spatial, axes.channels, axes.channel is not None)
    if levels is None:
        raise InputError(
            f"sigma: got an array of shape {np.shape(sigma)}, expected a number, or one a channel; noise that varies "
            "in space is left to nlflow.denoise"
        )
    return levels


def frame_for(
    axes: Axes, given: np.dtype[Any], found: Statistics, levels: Array | None, quality: str, model: Noise | None,
    options: Options,
) -> Frame:  # fmt: skip
    live = live_of(found.high > found.low)
    if live is not None:
        found, levels = found.of_channels(live), None if levels is None else levels[live]
    levels = np.ones(len(found.mean)) if levels is None else levels * options.strength
    spans = np.array([float(high) - float(low) for low, high in zip(found.low, found.high, strict=True)])
    levels, level, _, idle = units_of(levels, spans)
    exact = levels == 0
    frame = Frame(axes, quality, options, found.mean, level, idle, exact=exact if exact.any() else None, live=live,
                  model=model, sigma=root_mean_square(level))  # fmt: skip
    if idle:
        return frame
    dtype = np.dtype(np.float32 if given.itemsize <= 2 or given == np.float32 else np.float64)  # as `as_signal` has it
    # Of the whole in units of the noise: its range in the precision that samples have, and its variance.
    with np.errstate(all="ignore"):
        low, high = (((x - found.mean) / level).astype(dtype) for x in (found.low, found.high))
        variance = float((np.diag(found.moments) / level**2).mean() / found.count)
    extent, moments = float(high.max() - low.min()), found.moments / np.outer(level, level)
    return frame.with_flow(Spread(extent, variance, len(level), dtype, lambda: moments))


def _wide_enough(blocks: Blocks, halo: tuple[int, ...]) -> Blocks:
    """Return the image in blocks that are as wide as the halo, with a warning where they are joined for that."""
    joined = blocks.at_least(halo)
    # What is left over at the end of an axis is nobody's choice.
    least_of = [min(sizes[:-1], default=n) for sizes, n in zip(blocks.chunks, halo, strict=True)]
    small = [(least, n) for least, n in zip(least_of, halo, strict=True) if least < n]
    if small:
        least, wanted = min(small)
        warn_caller(
            f"image: blocks of {least} samples are smaller than the halo of {wanted} and are joined to blocks of "
            f"{_size(joined)}",
        )
    return joined


def _size(blocks: Blocks) -> str:
    return " x ".join(str(max(sizes)) for sizes in blocks.chunks)


def _said(halo: tuple[int, ...]) -> str:
    return str(halo[0]) if len(set(halo)) == 1 else " x ".join(map(str, halo))


def examined(
    middle: Array, axes: Axes, found: Statistics, known: Known, levels: Array
) -> tuple[Array, NoiseEstimate | None]:
    """Return noise levels (C,), at most those that the middle of an image shows, and the verdict on the middle."""
    from nlflow.denoising.noise.finding.verdict import examine

    live = found.high > found.low
    looked = as_given(middle, replace(axes, shape=middle.shape), known=known)
    if not live.any() or (looked.missing is not None and looked.missing.all()):
        return levels, None
    refuse_unordered(looked.samples, middle.dtype, looked.missing)
    verdict, levels = examine(looked.samples[..., live], looked.missing), levels.copy()
    if verdict.model.white_sigma is not None:
        levels[live] = np.minimum(levels[live], verdict.model.white_sigma)
    return levels, verdict


@dataclass(frozen=True)
class Wanted:
    """What parts need to know of the whole, without the strength of its noise."""

    axes: Axes
    dtype: np.dtype[Any]
    found: Statistics
    known: Known
    quality: str
    model: Noise | None
    options: Options
    estimated: bool

    def frame(self, levels: Array | None, verdict: NoiseEstimate | None = None) -> Frame:
        """See `frame_for`."""
        frame = frame_for(self.axes, self.dtype, self.found, levels, self.quality, self.model, self.options)
        if verdict is not None and levels is not None:
            own = levels if frame.live is None else levels[frame.live]
            white = GaussianNoise(own if np.ptp(own) else float(own[0]))
            verdict = replace(verdict, model=white, confidence=verdict.confidence if verdict.is_white else "low")
        return replace(frame, known=self.known, given=self.known.told, found=verdict, estimated=self.estimated)

    def checked(
        self, levels: Array | None, verdict: NoiseEstimate | None, figures: Callable[[Frame], Figures | None]
    ) -> tuple[Frame, list[str]]:
        """Return a frame whose residual is the noise, if that was found out, and warnings."""
        frame, texts = self.frame(levels, verdict), list[str]()
        judged = verdict is not None and self.options.strength == 1
        if verdict is not None and not verdict.is_white:
            texts.append(
                f"noise: the middle seems to have {verdict.model.describe()}; parts of a whole know white noise and "
                "counts, and as much white noise is taken out as there is; give noise='poisson' for counts, or use "
                "nlflow.denoise on what fits the memory"
            )
        while judged and not frame.idle and (seen := figures(frame)) is not None:
            less = milder(frame, seen)
            if less is None:
                break
            levels = np.zeros(len(self.found.low))
            levels[slice(None) if frame.live is None else frame.live] = less.model.white_sigma
            frame = replace(self.frame(levels), found=less)
            texts = [f"noise: {less.reasons[0]}"]
        return frame, texts


def _figures(blocks: Blocks, found: Statistics, frame: Frame) -> Figures | None:
    """Return what the residual of an image shows in some places, each with some of what the flow looks at."""
    import dask
    from dask import delayed

    tasks = []
    around: list[int | None] = [min(max(frame.halo, default=0), _AROUND[len(blocks.shape)])] * len(blocks.shape)
    if frame.axes.moving:  # motion is that of whole frames
        around[1:] = [None] * 2
    for where in places_of(blocks.shape):
        wide, corner, inner = widened(where, around)
        if blocks.channel_axis is not None:
            wide.insert(blocks.channel_axis, slice(None))
        tasks.append(delayed(looked_at, pure=False)(blocks.image[tuple(wide)], where, corner, inner, frame))
    return figures_in(dask.compute(*tasks), frame, *found.ends_in(frame))


def widened(
    place: tuple[slice, ...], around: Sequence[int | None]
) -> tuple[list[slice], tuple[int, ...], tuple[slice, ...]]:
    wide = [
        slice(None) if by is None else slice(max(s.start - by, 0), s.stop + by)
        for s, by in zip(place, around, strict=True)
    ]
    corner = tuple(w.start or 0 for w in wide)
    return wide, corner, tuple(slice(s.start - c, s.stop - c) for s, c in zip(place, corner, strict=True))


@underflowing
def looked_at(
    block: Array, place: tuple[slice, ...], corner: tuple[int, ...], inner: tuple[slice, ...], frame: Frame
) -> Looked:
    part = frame.part(block)
    u = _estimate(part, corner, frame, math.inf)
    return Looked(place, part.f[inner], u[inner], None if part.missing is None else part.missing[inner])


def settled(blocks: Blocks, frame: Frame, present: int) -> tuple[Frame, str]:
    flow = frame.flow
    assert isinstance(flow, Pixels)
    if flow.steps is not None:
        return frame, f"{flow.steps} step(s) were asked for"
    count = present * len(frame.level)
    for steps in range(1, MOST_STEPS):
        tried = replace(frame, flow=replace(flow, steps=steps))
        tasks = blocks.at_least(tried.halo).each(tried.halo, residual_squares, frame=tried)
        squares = 0.0
        for part in _in_order(tasks):
            squares += part
            if enough(squares, count):
                return tried, f"discrepancy: the residual of the whole image is enough after {steps} step(s)"
    return replace(frame, flow=replace(flow, steps=MOST_STEPS)), f"all of {MOST_STEPS} steps were taken"


def _in_order(tasks: list[Any]) -> Iterator[float]:
    """Compute delayed values a batch at a time, so that what is not asked for is not computed."""
    import dask

    for start in range(0, len(tasks), _BATCH):
        yield from dask.compute(*tasks[start : start + _BATCH])


def info_of(frame: Frame, why: str, memory: int, tiles: int) -> DenoiseInfo:
    told = {**frame.told(), "residual": math.nan, "tiles": tiles, "memory_bytes": memory}
    return DenoiseInfo(**(told | ({"stopped_by": why} if why else {})))


def _denoised(
    block: Array, cut: tuple[tuple[int, ...], ...], frame: Frame, memory_limit: float | None, into: np.dtype[Any],
    block_id: tuple[int, ...],
) -> Array:  # fmt: skip
    """Return a block of the result, from it with its halo."""
    corner, inner = place(cut, frame.halo, frame.axes.without(block_id))
    result = denoise_part(block, corner, inner, frame, memory_limit)
    if into.kind not in "iu":
        return result.astype(into, copy=False)
    result = rounded(result, into)
    if frame.known is not None and frame.known.nodata is not None:  # which floats may not hold
        own, channel = _cut(block, inner, frame.axes), frame.axes.channel
        at = frame.known.lacking(own, channel)
        result = np.where(at if channel is None else np.expand_dims(at, channel), own, result)
    return result


@underflowing
def denoise_part(
    block: Array, corner: tuple[int, ...], inner: tuple[slice, ...], frame: Frame, memory_limit: float | None = None,
    alone: bool = False,
) -> Array:  # fmt: skip
    """Return the estimate for the `inner` part of a block in the units of the input, with the bits of the whole.

    The block has `Frame.halo` more samples around it where the image goes on (in clips whole frames), and begins at a
    `corner` of the image, which like `inner` has no channels. It takes all threads if it is `alone`.
    """
    part = frame.part(block)
    result = part.samples
    if not frame.idle:
        result = part.result(_estimate(part, corner, frame, memory_limit, alone), frame)
    return np.array(_cut(part.restore(result), inner, frame.axes))


def _cut(values: Array, inner: tuple[slice, ...], axes: Axes) -> Array:
    own = list(inner)
    if axes.channel is not None:
        own.insert(axes.channel, slice(None))
    return values[tuple(own)]


@underflowing
def residual_squares(
    block: Array, corner: tuple[int, ...], inner: tuple[slice, ...], frame: Frame, memory_limit: float | None = None
) -> float:
    part = frame.part(block)
    u = _estimate(part, corner, frame, memory_limit)
    present = ... if part.missing is None else ~part.missing[inner]
    return float(np.sum(np.square(u[inner] - part.f[inner])[present], dtype=np.float64))


def _estimate(
    part: Part, corner: tuple[int, ...], frame: Frame, memory_limit: float | None, alone: bool = False
) -> Array:
    """Return the estimate of a part in units of the noise."""
    shape, flow = part.f.shape[:-1], frame.flow
    if part.missing is not None and part.missing.all():
        return part.f
    assert flow is not None
    check_memory(f"a block of {' x '.join(map(str, shape))} samples with its halo", frame.bytes_needed(shape),
                 "use smaller chunks, or raise max_memory", memory_limit)  # fmt: skip
    with nullcontext() if alone else one_loop_thread():
        return flow.of_part(part.f, corner, frame.shape, part.missing)
