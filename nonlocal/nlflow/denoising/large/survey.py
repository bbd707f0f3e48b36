"""What of an image in blocks has to be known as a whole before a block can be denoised as it is in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.large.parts import Frame, residual_squares
from nlflow.denoising.noise import Noise
from nlflow.denoising.noise.estimation import (
    PART_HALO,
    PartWindows,
    channel_levels,
    sigma_of_parts,
    window_sides,
    windows_of_part,
)
from nlflow.denoising.pixelwise import MOST_STEPS, enough
from nlflow.domains.samples import as_signal, exact_sums, mean_of_sums
from nlflow.errors import InputError
from nlflow.store.encoding import digest, encode

Array = NDArray[Any]
# Blocks whose residuals are asked for at a time: enough for many workers, few beside all.
_BATCH = 64
_PLANES = 9  # of a volume, from which its noise is estimated


@dataclass(frozen=True)
class Layout:
    """Where the blocks of an image lie, each with a halo around it except where the image ends; without channels.

    Attributes
    ----------
    chunks : tuple of tuple of int
        Sizes of the blocks along each axis.
    halo : tuple of int
        Along each axis.
    """

    chunks: tuple[tuple[int, ...], ...]
    halo: tuple[int, ...]

    def place(self, index: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[slice, ...]]:
        """Return where the halo of a block begins in the image, and where the block lies in its halo."""
        corner, inner = [], []
        for sizes, halo, k in zip(self.chunks, self.halo, index, strict=True):
            start = sum(sizes[:k])
            corner.append(max(start - halo, 0) if len(sizes) > 1 else 0)
            inner.append(slice(start - corner[-1], start - corner[-1] + sizes[k]))
        return tuple(corner), tuple(inner)


@dataclass(frozen=True)
class Blocks:
    """An image as a Dask array, its channels in one chunk.

    Attributes
    ----------
    image : dask.array.Array
    channel_axis : int or None
    """

    image: Any
    channel_axis: int | None

    def without_channels(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return the entries of the axes that are no channels."""
        return tuple(value for axis, value in enumerate(values) if axis != self.channel_axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without channels."""
        return self.without_channels(self.image.shape)

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of the blocks without channels."""
        return self.without_channels(self.image.chunks)

    def even(self, size: int) -> tuple[int, ...]:
        """Return a number for each axis that is no channel."""
        return (size,) * len(self.shape)

    def layout(self, halo: tuple[int, ...]) -> Layout:
        """Return where the blocks lie."""
        return Layout(self.chunks, halo)

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
        """Return ``function(block, corner, inner, **words)`` of every block as a delayed value; see `Layout.place`."""
        from dask import delayed

        later, layout = delayed(function, pure=False), self.layout(halo)
        array = self.with_halo(halo)
        places = map(layout.place, map(self.without_channels, itertools.product(*map(range, array.numblocks))))
        return [
            later(block, *place, **words)
            for block, place in zip(array.to_delayed().ravel().tolist(), places, strict=True)
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
    """Of the samples, counts stabilized.

    Attributes
    ----------
    count : int
        Samples of a channel.
    low, high, mean : array of shape (C,)
        The means are correctly rounded, whatever the blocks.
    moments : array of shape (C, C)
        Sums of products about the mean.
    digest : str
        Of the sums, ranges and second moments of all blocks: two images that differ in a sample differ in it, but for
        changes that keep every sum.
    """

    count: int
    low: Array
    high: Array
    mean: Array
    moments: Array
    digest: str


@dataclass(frozen=True)
class Part:
    """Statistics of a part of an image, or of the parts that are joined in it; see `Statistics`."""

    count: int
    low: Array
    high: Array
    sums: list[int]
    moments: Array  # about its own mean


def statistics(blocks: Blocks, model: Noise | None) -> Statistics:
    """Return the statistics of an image, in one pass over it."""
    import dask

    tasks = blocks.each(blocks.even(0), part_of, channel_axis=blocks.channel_axis, model=model)
    return gathered(dask.compute(*tasks))


def gathered(parts: Sequence[Part]) -> Statistics:
    """Return the statistics of an image from those of its parts."""
    one = merged(parts)
    told = [[p.count, p.low.tolist(), p.high.tolist(), [hex(n) for n in p.sums], p.moments.tolist()] for p in parts]
    mean = mean_of_sums(one.sums, one.count)
    return Statistics(one.count, one.low, one.high, mean, one.moments, digest(encode(told)))


def merged(parts: Sequence[Part]) -> Part:
    """Return the statistics of several parts as those of one."""
    count = sum(part.count for part in parts)
    channels = range(len(parts[0].low))
    sums = [sum(part.sums[c] for part in parts) for c in channels]
    mean = mean_of_sums(sums, count)
    moments = np.zeros_like(parts[0].moments)
    for part in parts:  # in the order of the blocks
        shift = mean_of_sums(part.sums, part.count) - mean
        moments += part.moments + part.count * np.outer(shift, shift)
    low = np.min([part.low for part in parts], axis=0)
    return Part(count, low, np.max([part.high for part in parts], axis=0), sums, moments)


def part_of(
    block: Array, corner: tuple[int, ...], inner: tuple[slice, ...], channel_axis: int | None, model: Noise | None
) -> Part:
    """Return the statistics of a block."""
    try:
        signal, _ = as_signal(block, channel_axis)
        signal = signal if model is None else model.reduce(signal).samples
    except InputError as error:
        raise InputError(f"{error} (in the block that begins at {corner})") from error
    flat = signal.reshape(-1, signal.shape[-1])
    sums = exact_sums(flat)
    about = flat - mean_of_sums(sums, len(flat))
    return Part(len(flat), flat.min(axis=0), flat.max(axis=0), sums, about.T @ about)


def estimated(blocks: Blocks, found: Statistics) -> Array:
    """Return the noise of each channel (C,) as `nlflow.denoise` estimates it, from windows of the whole, in a pass.

    A second pass, and a third, are made where too few windows are left, as in memory. Of a volume or a clip some planes
    are looked at, evenly far apart, each as an image; the median counts.
    """
    import dask

    if len(blocks.shape) == 3:
        return _of_planes(blocks)

    limits = {c: (float(low), float(high)) for c, (low, high) in enumerate(zip(found.low, found.high, strict=True))}
    pending = {c: pair for c, pair in limits.items() if 0 < pair[1] - pair[0] < math.inf}
    sigmas = dict.fromkeys(limits, 0.0)
    halo = blocks.even(PART_HALO)
    blocks = blocks.at_least(halo)
    for side in window_sides(blocks.shape):
        if not pending:
            break
        tasks = blocks.each(
            halo, _windows, channel_axis=blocks.channel_axis, whole=blocks.shape, limits=pending, side=side
        )
        parts: tuple[dict[int, PartWindows], ...] = dask.compute(*tasks)
        for c, pair in list(pending.items()):
            sigma = sigma_of_parts([part[c] for part in parts], blocks.shape, pair, side)
            if sigma is not None:
                sigmas[c] = sigma
                del pending[c]
    return channel_levels(np.array(list(sigmas.values())))


def _of_planes(blocks: Blocks) -> Array:
    """Return the median of the estimates for planes across the first axis; planes without noise, as of air, aside."""
    count = blocks.shape[0]
    first = 1 if blocks.channel_axis == 0 else 0
    axis = None if blocks.channel_axis is None else max(blocks.channel_axis - (blocks.channel_axis > first), 0)
    places = sorted({(2 * k + 1) * count // (2 * _PLANES) for k in range(_PLANES)})
    planes = [Blocks(blocks.image[(slice(None),) * first + (place,)], axis) for place in places]
    return typical([estimated(plane, statistics(plane, None)) for plane in planes])


def typical(sigmas: Sequence[Array]) -> Array:
    """Return the median of the estimates (C,) of each channel, but for zeros; 0 if there are no others."""
    found = [of_channel[of_channel > 0] for of_channel in np.array(sigmas).T]
    return channel_levels(np.array([float(np.median(one)) if one.size else 0.0 for one in found]))


def _windows(
    block: Array,
    corner: tuple[int, ...],
    inner: tuple[slice, ...],
    channel_axis: int | None,
    whole: tuple[int, ...],
    limits: dict[int, tuple[float, float]],
    side: int,
) -> dict[int, PartWindows]:
    signal, _ = as_signal(block, channel_axis)
    return {c: windows_of_part(signal[..., c], corner, inner, whole, pair, side) for c, pair in limits.items()}


def settled(blocks: Blocks, frame_of: Callable[[int], Frame]) -> tuple[int, str]:
    """Return after how many steps the flow of pixels stops, and why: when the residual holds its share of the noise.

    For each number of steps that is tried the residual is summed over the blocks until it is enough, which it mostly
    is after one step and a sixth of the image.
    """
    count = math.prod(blocks.image.shape)
    for steps in range(1, MOST_STEPS):
        frame = frame_of(steps)
        tasks = blocks.at_least(frame.halo).each(frame.halo, residual_squares, frame=frame)
        squares = 0.0
        for part in _in_order(tasks):
            squares += part
            if enough(squares, count):
                return steps, f"discrepancy: the residual of the whole image is enough after {steps} step(s)"
    return MOST_STEPS, f"all of {MOST_STEPS} steps were taken"


def _in_order(tasks: list[Any]) -> Iterator[float]:
    """Compute delayed values a batch at a time, so that what is not asked for is not computed."""
    import dask

    for start in range(0, len(tasks), _BATCH):
        yield from dask.compute(*tasks[start : start + _BATCH])
