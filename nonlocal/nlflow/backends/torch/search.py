"""The search for groups of alike patches on tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nlflow.backends.threads import in_order
from nlflow.backends.torch.workers import exact_products, share, workers_for

_MOST = 32  # references of a tile along an axis
_CACHED = 2**18  # numbers of a product of matrices that caches hold
_PART = 10  # distances of which the least is taken first

Three = tuple[int, int, int]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """Places of the references of a lattice, in tiles whose windows are mostly the same."""

    # All tiles are alike: a x b x e references at one distance along each axis, of which the last ones may be none of
    # the lattice, and an extent of samples that holds the windows of all.
    # - shape, patch, radii : of the images, of a patch, and the largest offsets along the three axes
    # - wide, stride, lengths : references of a tile, their distance, and the candidates that they have together
    # - starts : (tiles,), first samples of the tiles' windows, in planes that are padded
    # - corners, numbers : (tiles, T), first samples of the references, and which these are in the lattice; the number
    #   of all where they are none
    # - block : (samples,), how far the samples of a tile lie behind its first, in planes that are padded
    # - shift, rank : (offsets,), how far the offsets of a window lead in an image, and which of them is the first, the
    #   second, ... by its length
    # - count : references of the lattice that differ
    # - again : (G,), which of these each group has, where a lattice holds some of them several times

    shape: Three
    patch: Three
    radii: Three
    wide: Three
    stride: Three
    lengths: Three
    starts: Tensor
    corners: Tensor
    numbers: Tensor
    block: Tensor
    shift: Tensor
    rank: Tensor
    count: int
    again: Tensor | None

    @classmethod
    def of(
        cls, references: Sequence[Integers], patch: Three, radii: Three, shape: Three, order: NDArray[np.integer],
        device: torch.device,
    ) -> Windows:  # fmt: skip
        """Return the windows of a lattice; `order` sorts the offsets of a window by their length."""
        own = [np.unique(one, return_inverse=True) for one in references]
        axes = [_Axis.of(one, radius) for (one, _), radius in zip(own, radii, strict=True)]
        wide, stride = three([one.wide for one in axes]), three([one.stride for one in axes])
        lengths = three([(w - 1) * s + 2 * r + 1 for w, s, r in zip(wide, stride, radii, strict=True)])
        padded = _padded(shape, radii, wide, stride)
        sides = [len(one) for one, _ in own]
        count = math.prod(sides)
        tiles = [len(one.starts) for one in axes]
        starts = combined([one.starts[None] for one in axes], padded)[0]
        corners = _of_tiles([one.places for one in axes], shape)
        outside = np.logical_or.reduce(np.broadcast_arrays(*_spread([one.numbers < 0 for one in axes])))
        numbers = np.where(
            outside.reshape(math.prod(tiles), -1), count, _of_tiles([one.numbers for one in axes], sides)
        )
        block = combined([np.arange(n + p - 1)[None] for n, p in zip(lengths, patch, strict=True)], padded)[0]
        shift = combined([np.arange(-r, r + 1)[None] for r in radii], shape)[0]
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        again = np.empty(0, np.int64)
        if any(len(one) != len(given) for (one, _), given in zip(own, references, strict=True)):
            again = combined([which[None] for _, which in own], sides)[0]
        made = starts, corners, numbers, block, shift, rank, again
        whole = torch.from_numpy(np.concatenate([one.ravel() for one in made])).to(device)
        parts: Any = [
            part.view(one.shape) for part, one in zip(torch.split(whole, [one.size for one in made]), made, strict=True)
        ]
        return cls(
            shape, patch, radii, wide, stride, lengths, parts[0], parts[1], parts[2], parts[3], parts[4],
            parts[5].float(), count, parts[6] if again.size else None,
        )  # fmt: skip

    def planes(self, guide: Tensor) -> Tensor:
        """Return a guide (C, Z, H, W), and the sums of the squares of its patches, as padded planes (C + 1, P)."""
        wide = guide.double()
        squares = wide.square().sum(0, keepdim=True)
        norms = torch.nn.functional.avg_pool3d(squares[None], self.patch, 1, divisor_override=1)[0]
        padded = _padded(self.shape, self.radii, self.wide, self.stride)
        made = torch.zeros(len(guide) + 1, *padded, dtype=torch.float64, device=guide.device)
        made[-1] = torch.inf  # where no patch is
        for part, whole in ((wide, made[:-1]), (norms, made[-1:])):
            a, b, c = (slice(r, r + n) for r, n in zip(self.radii, part.shape[1:], strict=True))
            whole[:, a, b, c] = part
        return made.flatten(1)


def find_groups(guide: Tensor, windows: Windows, members: int, numbers: int) -> tuple[Tensor, Tensor]:
    # - guide : (C, Z, H, W)
    # - windows : Windows
    # - members : int; n, wanted in a group; at most the number of offsets.
    # - numbers : int; How many numbers a worker holds at a time, about.
    # Returns:
    # - members : (G, n) int32; Corners of the patches, the reference first, then in C order; the reference again where
    #   there are too few.
    # - counts : (G,) int32
    # Squared distances are |a|^2 + |b|^2 - 2 a.b, a product of matrices for each tile of references, in float64. Of
    # patches that are equally near, within the rounding of the guide and of this sum, those are taken whose offset
    # comes first by its length. No number is asked of the device, and none depends on how many tiles are looked at
    # together.
    device, count = guide.device, windows.count
    found = torch.empty((count + 1, members), dtype=torch.int32, device=device)
    counts = torch.empty(count + 1, dtype=torch.int32, device=device)
    candidates, own, offsets = math.prod(windows.lengths), windows.corners.shape[1], len(windows.shift)
    length = len(guide) * math.prod(windows.patch)
    tiles = len(windows.starts)
    product = (length + 1 + own) * candidates
    most = max(1, numbers // (product + 3 * own * offsets))
    few = max(1, _CACHED // product) if device.type == "cpu" else most  # tiles that are multiplied at a time
    planes = windows.planes(guide)

    @torch.no_grad()
    def search(which: slice) -> tuple[slice, Tensor, Tensor]:
        distance, largest, norm = _distances(windows, planes, windows.starts[which], few)
        place, count = _nearest(distance, largest, norm, windows.rank, members - 1, length, guide.dtype)
        corners = windows.corners[which].reshape(-1, 1)
        return which, torch.cat((corners, corners + windows.shift[place]), 1), count + 1

    with exact_products(device), workers_for(device) as workers:
        together = share(tiles, most, workers)
        parts = (slice(first, min(first + together, tiles)) for first in range(0, tiles, together))
        for which, corners, count_of in in_order(search, parts, workers):
            numbered = windows.numbers[which].flatten()
            found[numbered] = corners.int()
            counts[numbered] = count_of.int()
    if windows.again is not None:
        return found[windows.again], counts[windows.again]
    return found[:count], counts[:count]


def _distances(windows: Windows, planes: Tensor, starts: Tensor, few: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return squared distances (K T, offsets) of some tiles, the largest sample of each reference, and its norm.

    A distance is infinite where there is no patch, and of the reference itself. A few tiles are multiplied at a time.
    """
    patch, radii, wide, lengths = windows.patch, windows.radii, windows.wide, windows.lengths
    tiles, channels, own = len(starts), len(planes) - 1, math.prod(wide)
    length, candidates = channels * math.prod(patch), math.prod(lengths)
    held = planes.index_select(1, (starts[:, None] + windows.block).flatten())
    block = len(windows.block)
    plane = tiles * block
    sides = [n + p - 1 for n, p in zip(lengths, patch, strict=True)]
    steps = sides[1] * sides[2], sides[2], 1
    apart = [s * step for s, step in zip(windows.stride, steps, strict=True)]
    middle = sum(r * step for r, step in zip(radii, steps, strict=True))
    a = torch.full((tiles, own, length + 1), -0.5, dtype=planes.dtype, device=planes.device)
    references = a[..., :length]
    references.copy_(
        held.as_strided((tiles, *wide, channels, *patch), (block, *apart, plane, *steps), middle).reshape(
            tiles, own, length
        )
    )
    squares = held.as_strided((tiles, *wide), (block, *apart), channels * plane + middle).reshape(tiles, own, 1)
    around = [2 * r + 1 for r in radii]
    inner = lengths[1] * lengths[2], lengths[2], 1
    moved = [
        step * candidates + s * side
        for step, s, side in zip((wide[1] * wide[2], wide[2], 1), windows.stride, inner, strict=True)
    ]
    distance = torch.empty((tiles, *wide, *around), dtype=planes.dtype, device=planes.device)
    room = torch.empty((min(few, tiles), length + 1, candidates), dtype=planes.dtype, device=planes.device)
    for first in range(0, tiles, few):
        part = slice(first, min(first + few, tiles))
        count, start = part.stop - first, first * block
        b = room[:count]
        b[:, :length].view(count, channels, *patch, *lengths).copy_(
            held.as_strided((count, channels, *patch, *lengths), (block, plane, *steps, *steps), start)
        )
        b[:, length].view(count, *lengths).copy_(
            held.as_strided((count, *lengths), (block, *steps), start + channels * plane)
        )
        between = torch.baddbmm(squares[part], a[part], b, alpha=-2)
        distance[part] = between.as_strided((count, *wide, *around), (own * candidates, *moved, *inner))
    whole = distance.view(tiles * own, -1)
    whole[:, whole.shape[1] // 2] = torch.inf
    return whole, references.abs().amax(-1).flatten(), squares.flatten().sqrt()


def _nearest(
    distance: Tensor, largest: Tensor, norm: Tensor, rank: Tensor, wanted: int, samples: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return which candidates (R, wanted) are the nearest in C order, the middle where there are none; and how many."""
    middle = len(rank) // 2
    if wanted == 0:
        return rank.new_empty((len(distance), 0), dtype=torch.int64), torch.zeros_like(largest)

    def slack(limit: Tensor) -> Tensor:
        """Return by how much distances may differ from a limit and count as equal to it.

        `nlflow.backends.numba.search` derives what the rounding of the guide makes equal. To it comes that of
        |a|^2 + |b|^2 - 2 a.b: samples + 2 roundings of what is at most (|a| + |b|)^2, where |b| <= |a| + d.
        """
        root = limit.sqrt()
        return (
            torch.finfo(dtype).eps * ((samples + 3) * limit + 4 * (largest + root) * math.sqrt(samples) * root)
            + torch.finfo(torch.float64).eps * (samples + 3) * (2 * norm + root).square()
        )

    def limits(distance: Tensor) -> tuple[Tensor, Tensor]:
        limit = distance.topk(wanted, largest=False, sorted=False).values.amax(-1).clamp_(min=0)
        apart = slack(limit)
        return (limit - apart)[:, None], (limit + apart)[:, None]

    if distance.device.type != "cpu":
        return _by_rank(distance, *limits(distance), rank, wanted)
    # There sorting takes longer than anything else.
    bound = _bound(distance, wanted)
    distance, places = _compacted(distance, bound + slack(bound), wanted, middle)
    low, high = limits(distance)
    near = (distance <= high) & (distance < torch.inf)
    several = torch.from_numpy(np.flatnonzero(near.sum(-1).numpy() > wanted))
    if len(several):  # than are wanted
        place, _ = _by_rank(distance[several], low[several], high[several], rank[places[several]], wanted)
        near[several] = torch.zeros_like(near[several]).scatter_(1, place, True)
    row, column = np.nonzero(near.numpy())
    counts = np.bincount(row, minlength=len(near))
    chosen = np.full((len(near), wanted), middle)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    chosen[row, within] = places.numpy()[row, column]
    return torch.from_numpy(chosen), torch.from_numpy(counts)


def _by_rank(distance: Tensor, low: Tensor, high: Tensor, rank: Tensor, wanted: int) -> tuple[Tensor, Tensor]:
    """Return which distances (R, wanted) are below `low`, or up to `high` and first by their rank; and how many."""
    middle, last = distance.shape[1] // 2, distance.shape[1]
    key = torch.where(distance <= high, rank, torch.inf).masked_fill_(distance < low, -1)
    near, chosen = key.masked_fill_(distance == torch.inf, torch.inf).topk(wanted, largest=False, sorted=False)
    place = torch.where(near.isfinite(), chosen, last).sort(-1).values
    there = place < last
    return torch.where(there, place, middle), there.sum(-1)


def _bound(distance: Tensor, wanted: int) -> Tensor:
    """Return for each row a number at or above its `wanted`-th smallest, from the least numbers of its parts."""
    parts = min(_PART, distance.shape[1] // wanted)
    if parts < 2:
        return distance.amax(-1).clamp_(min=0)
    length = distance.shape[1] // parts
    least = distance[:, : length * parts].view(len(distance), parts, length).amin(1)
    return least.topk(wanted, largest=False, sorted=False).values.amax(-1).clamp_(min=0)


def _compacted(distance: Tensor, reach: Tensor, wanted: int, middle: int) -> tuple[Tensor, Tensor]:
    """Return the distances within reach, infinity behind them, and which they are, in rows as long as the longest."""
    near = np.flatnonzero((distance <= reach[:, None].clamp(max=torch.finfo(reach.dtype).max)).numpy())
    rows, length = distance.shape
    starts = np.searchsorted(near, length * np.arange(rows + 1))
    counts = np.diff(starts)
    most = max(int(counts.max()), wanted)
    # Where each of them goes, and where it comes from.
    target = np.arange(len(near)) + np.repeat(most * np.arange(rows) - starts[:-1], counts)
    values, places = np.full(rows * most, np.inf), np.full(rows * most, middle)
    values[target] = distance.numpy().ravel()[near]
    places[target] = near - np.repeat(length * np.arange(rows), counts)
    found: Any = [torch.from_numpy(one.reshape(rows, most)) for one in (values, places)]
    return found[0], found[1]


@dataclass(frozen=True)
class _Axis:
    """References along an axis in tiles of `wide`, a stride apart."""

    # - wide, stride : int
    # - starts : (tiles,); First references.
    # - places, numbers : (tiles, wide); First samples of references, and which these are, -1 where they are none.

    wide: int
    stride: int
    starts: Integers
    places: Integers
    numbers: Integers

    @classmethod
    def of(cls, references: Integers, radius: int) -> _Axis:
        """Return the tiles of references along an axis, so wide that their windows are mostly the same."""
        gaps = np.diff(references)
        stride = int(np.bincount(gaps).argmax()) if len(gaps) else 1
        wide = min(1 + radius // stride, _MOST, len(references))
        # Runs of references a stride apart, each in tiles.
        ends = [0, *(np.flatnonzero(gaps != stride) + 1).tolist(), len(references)]
        first = np.concatenate([np.arange(begin, end, wide) for begin, end in pairwise(ends)])
        last = np.concatenate([np.full(-(-(end - begin) // wide), end) for begin, end in pairwise(ends)])
        numbers = first[:, None] + np.arange(wide)
        starts = references[first].astype(np.int64)
        places = starts[:, None] + stride * np.arange(wide)
        return cls(wide, stride, starts, places, np.where(numbers < last[:, None], numbers, -1))


def three(values: Sequence[int]) -> Three:
    a, b, c = values
    return a, b, c


def _padded(shape: Three, radii: Three, wide: Three, stride: Three) -> Three:
    """Return the shape of planes with room for the windows of all tiles."""
    return three([n + 2 * r + (w - 1) * s for n, r, w, s in zip(shape, radii, wide, stride, strict=True)])


def _spread(along: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return what belongs to tiles and their references along three axes, ready to be combined, (a, b, e, t, u, v)."""
    z, y, x = along
    return [
        z[:, None, None, :, None, None],
        y[None, :, None, None, :, None],
        x[None, None, :, None, None, :],
    ]


def _of_tiles(along: Sequence[Integers], shape: Sequence[int]) -> Integers:
    """Return flat indices (tiles, T) into a shape, from those of tiles along its axes."""
    z, y, x = _spread(along)
    whole = np.asarray((z * shape[1] + y) * shape[2] + x)
    return whole.reshape(math.prod(len(one) for one in along), -1)


def combined(along: Sequence[Integers], shape: Sequence[int]) -> Integers:
    z, y, x = along
    whole = (z[:, :, None, None] * shape[1] + y[:, None, :, None]) * shape[2] + x[:, None, None, :]
    return np.asarray(whole.reshape(len(z), -1))


def patch_offsets(patch: Three, shape: Sequence[int]) -> Integers:
    offsets: Integers = combined([np.arange(n)[None] for n in patch], shape)[0]
    return offsets
