"""Denoising of Dask arrays, with the bits of `nlflow.denoise`: what the whole decides first, then block by block."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square, underflowing
from nlflow.backends.threads import one_loop_thread
from nlflow.denoising.frame import Frame, Part, Spread, in_units, live_of, numbers_of, units_of
from nlflow.denoising.given import (
    SOME,
    Beside,
    Known,
    as_given,
    candidates,
    guess,
    refuse_unordered,
    some_of,
    told_of,
)
from nlflow.denoising.info import DenoiseInfo, check_units
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise.finding.sigma import (
    PART_HALO,
    PartWindows,
    channel_levels,
    sigma_of_parts,
    window_sides,
    windows_of_part,
)
from nlflow.denoising.noise.models.base import Noise, NoiseEstimate
from nlflow.denoising.noise.models.gaussian import GaussianNoise
from nlflow.denoising.noise.names import choose_noise
from nlflow.denoising.options import OPTIONS, Options
from nlflow.denoising.pixelwise import MOST_STEPS, Pixels, enough
from nlflow.denoising.residual import Figures, Looked, figures_in, milder, places_of
from nlflow.domains.samples import exact_sums, mean_of_sums, rounded
from nlflow.errors import InputError, NlflowWarning, check_memory, checked_call, install_command
from nlflow.store.encoding import digest, encode
from nlflow.store.identity import described

Array = NDArray[Any]
_BLOCKS = "an array in blocks"
# Blocks whose residuals are asked for at a time: enough for many workers, few beside all.
_BATCH = 64
NO_SAMPLE = "image: got no sample that is a number (all are NaN or masked), expected at least one"
_MIDDLE = {1: 2**20, 2: 1024, 3: 64}  # samples along each axis of the middle, by whose noise the kind is told
# Samples around a place whose residual is looked at, by the number of axes: fewer than the flow looks at, which
# changes its estimate by little.
_AROUND = {1: 512, 2: 32, 3: 8}
_PLANES = 9  # of a volume, from which its noise is estimated


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

    Every block is denoised with a halo as wide as the flow looks, so blocks leave no seams; a recording whose noise is
    found out is looked at on several scales as a whole, but not in blocks. What the whole image
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
        White noise, ``'poisson'``, or a `Poisson`. Other noise is not for blocks. With ``'auto'`` the noise counts as
        white, and a warning tells where the middle of the image shows another kind. In some places the difference of
        input and result is compared with that noise, and less is taken out where the two disagree.
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
        Without Dask; for what is no Dask array, for chunks of unknown sizes, and as `nlflow.denoise`. Infinity is found
        before this returns.
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

    NaN and a value that stands for "no data" stay as they are, as those of `nlflow.denoise` do; what lies beside them
    agrees with its result to a part of the noise, as holes are filled in block by block.

    The image is read once for its statistics (three times where a value may stand for "no data"), once more to estimate
    sigma, in some places to look at what would be removed, and by ``pixels`` up to where the residual is enough (mostly
    a sixth of the image, which is also denoised; ``steps=1`` spares it). The halo is 19 samples wide for ``pixels`` and
    one step, 60 for ``fast``, 314 for ``balanced`` and 707 for ``best`` (26 less in colours, in which no isolated peaks
    are looked for): blocks of 2048 to 4096 keep what is computed twice small. In volumes it is 16, 88 and 124 along
    each axis, less along those whose samples lie farther apart, and sigma is estimated from nine planes (the median).
    In clips it is 8, 50 and 58 frames, and blocks hold whole frames.
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
    channel_axis: int | None = None, axes: str | None = None, spacing: Any = None, nodata: Any = None,
) -> tuple[Any, DenoiseInfo, str]:  # fmt: skip
    """Return what `denoise_array` does, and a digest of the input's samples and of all that the result depends on.

    `nodata` is the value that stands for "no data", where a file says it.
    """
    need_dask()
    blocks, placed = _blocks(image, channel_axis, axes, spacing)
    options.refuse(("separate", "stopping", "device"), _BLOCKS)
    options.check(quality, len(placed.letters))
    model = counts_only(noise, sigma, options.strength, _BLOCKS)
    placed.check_patch(options.patch_size)
    levels = None if sigma is None else levels_of(sigma, placed)
    check_units(blocks.image.dtype, levels, stacklevel=4)
    found, known, guessed = surveyed(blocks, model, nodata)
    if guessed:
        warnings.warn(guessed, NlflowWarning, stacklevel=4)
    verdict = None
    if levels is None and model is None:
        levels = estimated(blocks, found, known)
        if noise == "auto":
            levels, verdict = examined(blocks.middle(), placed, found, known, levels)
    wanted = Wanted(placed, blocks.image.dtype, found, known, quality, model, options, sigma is None and model is None)
    frame, texts = wanted.checked(levels, verdict, lambda frame: _figures(blocks, found, frame))
    for text in texts:
        warnings.warn(text, NlflowWarning, stacklevel=4)
    frame, why = (frame, "") if not isinstance(frame.flow, Pixels) else settled(blocks, frame, found.count)
    if text := frame.too_strong(float(found.high.max() - found.low.min())):
        warnings.warn(text, NlflowWarning, stacklevel=4)
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
    """Return the noise of each channel that a sigma says; maps of it are refused."""
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
    """Return what parts have to know of the whole, with noise of these levels; None for counts, whose noise is 1."""
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


def place(
    chunks: Sequence[tuple[int, ...]], halos: tuple[int, ...], index: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """Return where the halo of a block begins in the image, and where the block lies in its halo; without channels."""
    corner, inner = [], []
    for sizes, halo, k in zip(chunks, halos, index, strict=True):
        start = sum(sizes[:k])
        corner.append(max(start - halo, 0) if len(sizes) > 1 else 0)
        inner.append(slice(start - corner[-1], start - corner[-1] + sizes[k]))
    return tuple(corner), tuple(inner)


@dataclass(frozen=True)
class Blocks:
    """An image as a Dask array, its channels in one chunk."""

    image: Any
    channel_axis: int | None

    def without_channels(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the entries of the axes that are no channels."""
        return tuple(value for axis, value in enumerate(values) if axis != self.channel_axis)

    @property
    def axes(self) -> Axes:
        """The axes of the image as those of space."""
        letters = "ZYX"[-len(self.shape) :]
        return Axes(self.image.shape, letters, (1.0,) * len(letters), self.channel_axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without channels."""
        return self.without_channels(self.image.shape)

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the blocks without channels."""
        return self.without_channels(self.image.chunks)

    def middle(self) -> Array:
        """Return the middle of the image."""
        cut = middle_of(self.shape, _MIDDLE[len(self.shape)])
        if self.channel_axis is not None:
            cut.insert(self.channel_axis, slice(None))
        return np.asarray(self.image[tuple(cut)].compute())

    def even(self, size: int) -> tuple[int, ...]:
        """Return a number for each axis that is no channel."""
        return (size,) * len(self.shape)

    def _with_channels(self, values: Sequence[int]) -> list[int]:
        """Return numbers of the axes that are no channels with a 0 for the channels."""
        found = list(values)
        if self.channel_axis is not None:
            found.insert(self.channel_axis, 0)
        return found

    def at_least(self, size: tuple[int, ...]) -> Blocks:
        """Return the same image with neighbouring blocks joined until none is smaller than this, if need be."""
        wanted = self._with_channels(size)
        chunks = tuple(_joined(sizes, n) for sizes, n in zip(self.image.chunks, wanted, strict=True))
        return self if chunks == self.image.chunks else Blocks(self.image.rechunk(chunks), self.channel_axis)

    def with_halo(self, halo: tuple[int, ...]) -> Any:
        """Return the array whose blocks are these with a halo, except where the image ends."""
        from dask.array.overlap import overlap

        wanted = zip(self.image.chunks, self._with_channels(halo), strict=True)
        depth = {axis: 0 if len(sizes) == 1 else n for axis, (sizes, n) in enumerate(wanted)}
        return overlap(self.image, depth, boundary="none", allow_rechunk=False)

    def each(self, halo: tuple[int, ...], function: Callable[..., Any], **words: Any) -> list[Any]:
        """Return ``function(block, corner, inner, **words)`` of every block as a delayed value; see `place`."""
        from dask import delayed

        later, array = delayed(function, pure=False), self.with_halo(halo)
        pairs = zip(array.to_delayed().ravel().tolist(), np.ndindex(*array.numblocks), strict=True)
        return [
            later(block, *place(self.chunks, halo, self.without_channels(index)), **words) for block, index in pairs
        ]


def _joined(sizes: tuple[int, ...], least: int) -> tuple[int, ...]:
    result: list[int] = []
    for size in sizes:
        if result and result[-1] < least:
            result[-1] += size
        else:
            result.append(size)
    if len(result) > 1 and result[-1] < least:
        last = result.pop()
        result[-1] += last
    return tuple(result)


@dataclass(frozen=True)
class Statistics:
    """Of the samples of an image or a part of it, counts stabilized."""

    count: int  # samples of a channel
    low: Array  # (C,)
    high: Array  # (C,)
    sums: list[int]  # by `exact_sums`: they do not depend on the blocks
    moments: Array  # (C, C), sums of products about the mean
    #: Of the statistics of all parts: images that differ in a sample differ in it, but for changes that keep every sum.
    digest: str = ""
    size: int = 0  # samples of a channel, the missing ones too
    empty: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))  # (C,), channels without any sample
    some: Array = field(default_factory=lambda: np.zeros(0))  # some of the samples that are present, as they were given
    ends: tuple[Any, Any] = (math.inf, -math.inf)  # the lowest and the highest of these

    @property
    def mean(self) -> Array:
        """Of each channel, correctly rounded."""
        return mean_of_sums(self.sums, self.count)

    def ends_in(self, frame: Frame) -> tuple[Array, Array]:
        """Return the lowest and the highest sample of the channels that vary (C,), in units of the noise."""
        live = slice(None) if frame.live is None else frame.live
        # With the bits that the samples have, which are compared with these.
        low, high = (in_units(one[live], frame.offset, frame.level) for one in (self.low, self.high))
        return low, high

    def of_channels(self, which: NDArray[np.bool_]) -> Statistics:
        """Return those of some channels."""
        sums = [self.sums[c] for c in np.flatnonzero(which)]
        return replace(self, low=self.low[which], high=self.high[which], sums=sums,
                       moments=self.moments[np.ix_(which, which)])  # fmt: skip


def surveyed(blocks: Blocks, model: Noise | None, nodata: Any = None) -> tuple[Statistics, Known, str]:
    """Return the statistics of what is present in an image, what says nothing, and a warning where that is a guess.

    In one pass over the image; in three where a value may stand for "no data", unless that is told.
    """
    import dask

    known, guessed, told = Known(nodata), "", list[str]()
    found = statistics(blocks, model, known)
    if found.empty.any() and not found.empty.all():
        known = replace(known, empty=found.empty)
        found = statistics(blocks, model, known)
    if not found.count:
        raise InputError(NO_SAMPLE)
    if found.count < found.size:
        what = "NaN" if nodata is None else f"{nodata:g} or NaN"
        told.append(told_of((found.size - found.count, found.size), what))
    for value in candidates(found.some, *found.ends) if nodata is None else ():
        parts = dask.compute(*blocks.each(blocks.even(0), _beside, axes=blocks.axes, value=value, known=known))
        if why := Beside.of_parts(parts).why(found.some):
            known, present = replace(known, nodata=value), found.count
            found = statistics(blocks, model, known)
            told.append(told_of((present - found.count, found.size), why))
            guessed = guess(told[-1])
            break
    return found, replace(known, told=tuple(told)), guessed


def _beside(
    block: Array, corner: tuple[int, ...], inner: tuple[slice, ...], axes: Axes, value: Any, known: Known
) -> Beside:
    return Beside.of(value, block, axes.channel, as_given(block, replace(axes, shape=block.shape), known=known).missing)


def statistics(blocks: Blocks, model: Noise | None, known: Known) -> Statistics:
    """Return the statistics of an image, in one pass over it."""
    import dask

    count = math.prod(len(sizes) for sizes in blocks.image.chunks)
    tasks = blocks.each(
        blocks.even(0), statistics_of, axes=blocks.axes, model=model, known=known, some=max(SOME // count, 64)
    )
    parts: tuple[Statistics, ...] = dask.compute(*tasks)
    told = [[p.count, p.low.tolist(), p.high.tolist(), [hex(n) for n in p.sums], p.moments.tolist()] for p in parts]
    return replace(merged(parts), digest=digest(encode(told)))


def merged(parts: Sequence[Statistics]) -> Statistics:
    """Return the statistics of several parts as those of one."""
    count = sum(part.count for part in parts)
    sums = [sum(column) for column in zip(*(part.sums for part in parts), strict=True)]
    moments = np.zeros_like(parts[0].moments)
    for part in parts:  # in the order of the blocks
        if part.count:
            shift = part.mean - mean_of_sums(sums, count)
            moments += part.moments + part.count * np.outer(shift, shift)
    low, high = (f([getattr(part, name) for part in parts], axis=0) for f, name in ((np.min, "low"), (np.max, "high")))
    ends = min(part.ends[0] for part in parts), max(part.ends[1] for part in parts)
    return Statistics(
        count, low, high, sums, moments, size=sum(part.size for part in parts),
        empty=np.all([part.empty for part in parts], axis=0), some=np.concatenate([part.some for part in parts]),
        ends=ends,
    )  # fmt: skip


def statistics_of(
    block: Array, corner: tuple[int, ...], inner: tuple[slice, ...], axes: Axes, model: Noise | None, known: Known,
    some: int = SOME,
) -> Statistics:  # fmt: skip
    """Return the statistics of a block."""
    try:
        looked = as_given(block, replace(axes, shape=block.shape), known=known)
        signal = looked.samples if model is None else model.reduce(looked.samples, looked.missing).samples
    except InputError as error:
        raise InputError(f"{error} (in the block that begins at {corner})") from error
    there = slice(None) if looked.missing is None else ~looked.missing
    flat, given = signal[there].reshape(-1, signal.shape[-1]), _last(block, axes.channel)[there]
    nan = np.isnan(_last(block, axes.channel)) if block.dtype.kind == "f" else np.zeros(signal.shape, bool)
    empty = np.asarray(nan.reshape(-1, signal.shape[-1]).all(axis=0))
    size = math.prod(signal.shape[:-1])
    if not len(flat):
        nothing = np.full(signal.shape[-1], math.inf)
        zero = np.zeros((len(empty), len(empty)))
        return Statistics(0, nothing, -nothing, [0] * len(empty), zero, size=size, empty=empty, some=given.ravel())
    sums = exact_sums(flat)
    about = flat - mean_of_sums(sums, len(flat))
    return Statistics(
        len(flat), flat.min(axis=0), flat.max(axis=0), sums, about.T @ about, size=size, empty=empty,
        some=some_of(given, some), ends=(given.min().item(), given.max().item()),
    )  # fmt: skip


def _last(block: Array, channel: int | None) -> Array:
    return block if channel is None else np.moveaxis(block, channel, -1)


def examined(
    middle: Array, axes: Axes, found: Statistics, known: Known, levels: Array
) -> tuple[Array, NoiseEstimate | None]:
    """Return the milder of noise levels (C,) and what the verdict on the middle of an image says, and the verdict.

    Raises `InputError` for phases and labels.
    """
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
    """What parts have to know of the whole, but for the strength of its noise."""

    axes: Axes
    dtype: np.dtype[Any]
    found: Statistics
    known: Known
    quality: str
    model: Noise | None
    options: Options
    estimated: bool

    def frame(self, levels: Array | None, verdict: NoiseEstimate | None = None) -> Frame:
        """Return the frame for noise of these levels; None for counts, whose noise is 1."""
        frame = frame_for(self.axes, self.dtype, self.found, levels, self.quality, self.model, self.options)
        if verdict is not None and levels is not None:
            own = levels if frame.live is None else levels[frame.live]
            white = GaussianNoise(own if np.ptp(own) else float(own[0]))
            verdict = replace(verdict, model=white, confidence=verdict.confidence if verdict.is_white else "low")
        return replace(frame, known=self.known, given=self.known.told, found=verdict, estimated=self.estimated)

    def checked(
        self, levels: Array | None, verdict: NoiseEstimate | None, figures: Callable[[Frame], Figures | None]
    ) -> tuple[Frame, list[str]]:
        """Return a frame whose residual is the noise, and what to warn of; what was given is not held against it."""
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
    for place in places_of(blocks.shape):
        wide, corner, inner = widened(place, around)
        if blocks.channel_axis is not None:
            wide.insert(blocks.channel_axis, slice(None))
        tasks.append(delayed(looked_at, pure=False)(blocks.image[tuple(wide)], place, corner, inner, frame))
    return figures_in(dask.compute(*tasks), frame, *found.ends_in(frame))


def middle_of(shape: Sequence[int], side: int) -> list[slice]:
    """Return where the middle of an array lies, of so many samples along each axis."""
    starts = [max((n - side) // 2, 0) for n in shape]
    return [slice(start, start + side) for start in starts]


def widened(
    place: tuple[slice, ...], around: Sequence[int | None]
) -> tuple[list[slice], tuple[int, ...], tuple[slice, ...]]:
    """Return a place with so many samples around it along each axis, or all, its corner, and the place in that."""
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
    """Return a place of a whole with its estimate; the other words are those of `denoise_part`."""
    part = frame.part(block)
    u = _estimate(part, corner, frame, math.inf)
    return Looked(place, part.f[inner], u[inner], None if part.missing is None else part.missing[inner])


def estimated(blocks: Blocks, found: Statistics, known: Known) -> Array:
    """Return the noise of each channel (C,) as `nlflow.denoise` estimates it, from windows of the whole, in a pass.

    A second pass, and a third, are made where too few windows are left, as in memory. Of a volume or a clip some planes
    are looked at, evenly far apart, each as an image; the median counts. A channel that is constant has none.
    """
    return for_all(_levels(blocks, found, known), found)


def for_all(levels: Array, found: Statistics) -> Array:
    """Return one number for all channels that vary where their levels are near each other, and 0 for the others."""
    live = found.high > found.low
    result = np.zeros(len(live))
    if live.any():
        result[live] = channel_levels(levels[live])
    return result


def _levels(blocks: Blocks, found: Statistics, known: Known) -> Array:
    """Return the noise of each channel by itself; 0 of one that is constant."""
    import dask

    if len(blocks.shape) == 3:
        return _of_planes(blocks, known)
    limits = {c: (float(low), float(high)) for c, (low, high) in enumerate(zip(found.low, found.high, strict=True))}
    pending = {c: pair for c, pair in limits.items() if 0 < pair[1] - pair[0] < math.inf}
    sigmas = dict.fromkeys(limits, 0.0)
    halo = blocks.even(PART_HALO)
    blocks = blocks.at_least(halo)
    for side in window_sides(blocks.shape):
        if not pending:
            break
        tasks = blocks.each(
            halo, _windows, axes=blocks.axes, whole=blocks.shape, limits=pending, side=side, known=known
        )
        parts: tuple[dict[int, PartWindows], ...] = dask.compute(*tasks)
        for c, pair in list(pending.items()):
            sigma = sigma_of_parts([part[c] for part in parts], blocks.shape, pair, side)
            if sigma is not None:
                sigmas[c] = sigma
                del pending[c]
    return np.array(list(sigmas.values()))


def _of_planes(blocks: Blocks, known: Known) -> Array:
    """Return the median of the estimates for planes across the first axis; planes without noise, as of air, aside."""
    count = blocks.shape[0]
    first = 1 if blocks.channel_axis == 0 else 0
    axis = None if blocks.channel_axis is None else max(blocks.channel_axis - (blocks.channel_axis > first), 0)
    places = sorted({(2 * k + 1) * count // (2 * _PLANES) for k in range(_PLANES)})
    planes = [Blocks(blocks.image[(slice(None),) * first + (place,)], axis) for place in places]
    return typical([estimated(plane, statistics(plane, None, known), known) for plane in planes])


def typical(sigmas: Sequence[Array]) -> Array:
    """Return the median of the estimates of each channel (C,), but for zeros; 0 if there are no others."""
    found = [of_channel[of_channel > 0] for of_channel in np.array(sigmas).T]
    return np.array([float(np.median(one)) if one.size else 0.0 for one in found])


def _windows(
    block: Array,
    corner: tuple[int, ...],
    inner: tuple[slice, ...],
    axes: Axes,
    whole: tuple[int, ...],
    limits: dict[int, tuple[float, float]],
    side: int,
    known: Known,
) -> dict[int, PartWindows]:
    looked = as_given(block, replace(axes, shape=block.shape), known=known)
    return {
        c: windows_of_part(looked.samples[..., c], corner, inner, whole, pair, side, looked.missing)
        for c, pair in limits.items()
    }


def settled(blocks: Blocks, frame: Frame, present: int) -> tuple[Frame, str]:
    """Return the frame with the steps after which the flow of pixels stops, and why: the residual of the whole.

    For each number of steps that is tried the residual is summed over the blocks until it is enough, which it mostly
    is after one step and a sixth of the image.
    """
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
    """Return what is told of the parts of a whole, of which nothing has been denoised yet."""
    told = {**frame.told(), "residual": math.nan, "tiles": tiles, "memory_bytes": memory}
    return DenoiseInfo(**(told | ({"stopped_by": why} if why else {})))


def _denoised(
    block: Array, cut: tuple[tuple[int, ...], ...], frame: Frame, memory_limit: float | None, into: np.dtype[Any],
    block_id: tuple[int, ...],
) -> Array:  # fmt: skip
    """Return a block of the result, from it with its halo."""
    result = denoise_part(block, *place(cut, frame.halo, frame.axes.without(block_id)), frame, memory_limit)
    return rounded(result, into) if into.kind in "iu" else result.astype(into, copy=False)


@underflowing
def denoise_part(
    block: Array, corner: tuple[int, ...], inner: tuple[slice, ...], frame: Frame, memory_limit: float | None = None,
    alone: bool = False,
) -> Array:  # fmt: skip
    """Return the estimate for a part of an image, in the units of the input, with the bits of the whole.

    The block has `Frame.halo` more samples around it where the image goes on (of a clip whole frames), begins at a
    corner of the image, and gives what is `inner` in it, both without channels. It takes all threads if it is `alone`
    at this time. The result is float32 for integers of up to 16 bits, float16 and float32, otherwise float64. Raises
    `MemoryLimitError` when the part does not fit.
    """
    part = frame.part(block)
    result = part.samples
    if not frame.idle:
        result = part.result(_estimate(part, corner, frame, memory_limit, alone), frame)
    own = list(inner)
    if frame.axes.channel is not None:
        own.insert(frame.axes.channel, slice(None))
    return np.array(part.restore(result)[tuple(own)])


@underflowing
def residual_squares(
    block: Array, corner: tuple[int, ...], inner: tuple[slice, ...], frame: Frame, memory_limit: float | None = None
) -> float:
    """Return the sum of squares of input minus result over a block, in units of the noise; see `denoise_part`."""
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
