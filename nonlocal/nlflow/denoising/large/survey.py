"""The first pass over blocks of an image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.frame import Frame, in_units
from nlflow.denoising.given import (
    NO_SAMPLE,
    SOME,
    Beside,
    Known,
    as_given,
    candidates,
    guess,
    some_of,
    told_of,
)
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise.finding.sigma import (
    PART_HALO,
    PartWindows,
    channel_levels,
    sigma_of_parts,
    window_sides,
    windows_of_part,
)
from nlflow.denoising.noise.models.base import Noise
from nlflow.domains.samples import exact_sums, has_value, mean_of_sums
from nlflow.errors import InputError
from nlflow.store.encoding import digest, encode

Array = NDArray[Any]
_MIDDLE = {1: 2**20, 2: 1024, 3: 64}  # samples along each axis of the middle, by whose noise the kind is told
_PLANES = 9  # of a volume, from which its noise is estimated


def place(
    chunks: Sequence[tuple[int, ...]], halos: tuple[int, ...], index: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[slice, ...]]:
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
        return tuple(value for axis, value in enumerate(values) if axis != self.channel_axis)

    @property
    def axes(self) -> Axes:
        letters = "ZYX"[-len(self.shape) :]
        return Axes(self.image.shape, letters, (1.0,) * len(letters), self.channel_axis)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.without_channels(self.image.shape)

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        return self.without_channels(self.image.chunks)

    def middle(self) -> Array:
        cut = middle_of(self.shape, _MIDDLE[len(self.shape)])
        if self.channel_axis is not None:
            cut.insert(self.channel_axis, slice(None))
        return np.asarray(self.image[tuple(cut)].compute())

    def even(self, size: int) -> tuple[int, ...]:
        return (size,) * len(self.shape)

    def _with_channels(self, values: Sequence[int]) -> list[int]:
        """Return numbers of the axes that are no channels with a 0 for the channels."""
        found = list(values)
        if self.channel_axis is not None:
            found.insert(self.channel_axis, 0)
        return found

    def at_least(self, size: tuple[int, ...]) -> Blocks:
        wanted = self._with_channels(size)
        chunks = tuple(_joined(sizes, n) for sizes, n in zip(self.image.chunks, wanted, strict=True))
        return self if chunks == self.image.chunks else Blocks(self.image.rechunk(chunks), self.channel_axis)

    def with_halo(self, halo: tuple[int, ...]) -> Any:
        from dask.array.overlap import overlap

        wanted = zip(self.image.chunks, self._with_channels(halo), strict=True)
        depth = {axis: 0 if len(sizes) == 1 else n for axis, (sizes, n) in enumerate(wanted)}
        return overlap(self.image, depth, boundary="none", allow_rechunk=False)

    def each(self, halo: tuple[int, ...], function: Callable[..., Any], **words: Any) -> list[Any]:
        """Return ``function(block, corner, inner, **words)`` of every block as a delayed value."""
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
    """Statistics of the samples of an image or a part; of counts, after their variance was stabilized."""

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
    totals: Array = field(default_factory=lambda: np.zeros(0))  # (C,), of the samples as they were given

    @property
    def mean(self) -> Array:
        return mean_of_sums(self.sums, self.count)

    def ends_in(self, frame: Frame) -> tuple[Array, Array]:
        live = slice(None) if frame.live is None else frame.live
        # With the bits that the samples have, which are compared with these.
        low, high = (in_units(one[live], frame.offset, frame.level) for one in (self.low, self.high))
        return low, high

    def of_channels(self, which: NDArray[np.bool_]) -> Statistics:
        sums = [self.sums[c] for c in np.flatnonzero(which)]
        return replace(self, low=self.low[which], high=self.high[which], sums=sums,
                       moments=self.moments[np.ix_(which, which)])  # fmt: skip


def surveyed(blocks: Blocks, model: Noise | None, nodata: Any = None) -> tuple[Statistics, Known, str]:
    import dask

    known, guessed, told = Known(nodata, nodata is not None), "", list[str]()
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
            guessed = guess(told[-1], "denoise parts that fit the memory by nlflow.denoise, which has a mask")
            break
    return found, replace(known, told=tuple(told)), guessed


def _beside(
    block: Array, corner: tuple[int, ...], inner: tuple[slice, ...], axes: Axes, value: Any, known: Known
) -> Beside:
    return Beside.of(value, block, axes.channel, as_given(block, replace(axes, shape=block.shape), known=known).missing)


def statistics(blocks: Blocks, model: Noise | None, known: Known) -> Statistics:
    import dask

    count = math.prod(len(sizes) for sizes in blocks.image.chunks)
    tasks = blocks.each(
        blocks.even(0), statistics_of, axes=blocks.axes, model=model, known=known, some=max(SOME // count, 64)
    )
    parts: tuple[Statistics, ...] = dask.compute(*tasks)
    told = [[p.count, p.low.tolist(), p.high.tolist(), [hex(n) for n in p.sums], p.moments.tolist()] for p in parts]
    return replace(merged(parts), digest=digest(encode(told)))


def merged(parts: Sequence[Statistics]) -> Statistics:
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
        ends=ends, totals=np.sum([part.totals for part in parts], axis=0),
    )  # fmt: skip


def statistics_of(
    block: Array, corner: tuple[int, ...], inner: tuple[slice, ...], axes: Axes, model: Noise | None, known: Known,
    some: int = SOME,
) -> Statistics:  # fmt: skip
    try:
        looked = as_given(block, replace(axes, shape=block.shape), known=known)
        signal = looked.samples if model is None else model.reduce(looked.samples, looked.missing).samples
    except InputError as error:
        raise InputError(f"{error} (in the block that begins at {corner})") from error
    there = slice(None) if looked.missing is None else ~looked.missing
    flat, given = signal[there].reshape(-1, signal.shape[-1]), _last(block, axes.channel)[there]
    nan = np.isnan(_last(block, axes.channel)) if block.dtype.kind == "f" else np.zeros(signal.shape, bool)
    if known.said and known.nodata is not None:
        nan = nan | has_value(_last(block, axes.channel), known.nodata).reshape(nan.shape)
    empty = np.asarray(nan.reshape(-1, signal.shape[-1]).all(axis=0))
    size = math.prod(signal.shape[:-1])
    if not len(flat):
        nothing = np.full(signal.shape[-1], math.inf)
        zero = np.zeros((len(empty), len(empty)))
        return Statistics(0, nothing, -nothing, [0] * len(empty), zero, size=size, empty=empty,
                          some=given.ravel(), totals=np.zeros(len(empty)))  # fmt: skip
    sums = exact_sums(flat)
    about = flat - mean_of_sums(sums, len(flat))
    return Statistics(
        len(flat), flat.min(axis=0), flat.max(axis=0), sums, about.T @ about, size=size, empty=empty,
        some=some_of(given, some), ends=(given.min().item(), given.max().item()),
        totals=given.reshape(-1, signal.shape[-1]).sum(axis=0, dtype=np.float64),
    )  # fmt: skip


def _last(block: Array, channel: int | None) -> Array:
    return block if channel is None else np.moveaxis(block, channel, -1)


def middle_of(shape: Sequence[int], side: int) -> list[slice]:
    starts = [max((n - side) // 2, 0) for n in shape]
    return [slice(start, start + side) for start in starts]


def estimated(blocks: Blocks, found: Statistics, known: Known) -> Array:
    """Return the noise of each channel (C,), from windows; of a volume or a clip the median over nine planes."""
    return for_all(_levels(blocks, found, known), found)


def for_all(levels: Array, found: Statistics) -> Array:
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
