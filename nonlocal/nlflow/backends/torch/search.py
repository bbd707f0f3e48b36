"""The search for groups of alike patches on tensors; `nlflow.backends.numba.search` finds the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nlflow.backends.threads import in_order
from nlflow.backends.torch.workers import workers_for

_MOST = 32  # references of a tile along an axis

Three = tuple[int, int, int]


def find_groups(
    guide: Tensor, references: Sequence[Tensor], patch: Three, radii: Three, order: Tensor, members: int, numbers: int
) -> tuple[Tensor, Tensor]:
    """Find the patches nearest to each reference patch in its window.

    Squared distances are |a|^2 + |b|^2 - 2 a.b, a product of matrices for each tile of references, in float64 whatever
    the guide is in. Of patches that are equally near, within the rounding of the guide and of this sum, those are taken
    whose offset comes first in `order`. No number is asked of the device.

    Parameters
    ----------
    guide : (C, Z, H, W)
    references : (A,), (B,), (E,)
        First samples of the patches of reference along the three axes, on the host.
    patch, radii
        Along the three axes.
    order : (offsets,)
        The offsets of a window (in C order), by their length.
    members : int
        n, wanted in a group; at most as many as there are offsets.
    numbers : int
        How many numbers a worker holds at a time, about.

    Returns
    -------
    members : (A B E, n) int32
        Corners of the patches, the reference first, then in C order; the reference again where there are too few.
    counts : (A B E,) int32
    """
    device, shape, sides = guide.device, guide.shape[1:], [len(one) for one in references]
    axes = [_Axis.of(*given, device) for given in zip(references, radii, patch, shape, strict=True)]
    found = torch.empty((math.prod(sides), members), dtype=torch.int32, device=device)
    counts = torch.empty(math.prod(sides), dtype=torch.int32, device=device)
    offsets = [torch.arange(-radius, radius + 1, device=device)[None] for radius in radii]
    shift = combined(offsets, shape)[0]
    rank = torch.empty(len(order), dtype=torch.float64, device=device)
    rank[order] = torch.arange(len(order), dtype=torch.float64, device=device)
    flat, within = guide.reshape(len(guide), -1).double(), patch_offsets(patch, shape, device)
    lengths = [one.length for one in axes]
    own = math.prod(one.places.shape[1] for one in axes)
    length = len(guide) * len(within)
    together = max(1, numbers // (2 * (3 * math.prod(lengths) * length + 4 * own * len(order))))
    tiles = torch.cartesian_prod(*(torch.arange(len(one.places), device=device) for one in axes))

    @torch.no_grad()
    def search(which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = [one.at(index) for one, index in zip(axes, which.T, strict=True)]
        centres = combined([one.places for one in parts], shape)
        a, b = (_patches(flat, one, within) for one in (centres, combined([one.window for one in parts], shape)))
        z, y, x = (one.inside for one in parts)
        there = z[:, :, None, None] & y[:, None, :, None] & x[:, None, None, :]
        norms = b.square().sum(-1).masked_fill_(~there.flatten(1), torch.inf)
        squares = a.square().sum(-1)
        distance = torch.baddbmm(norms[:, None], a, b.mT, alpha=-2)
        middle = combined([one.within for one in parts], lengths)
        distance = distance.gather(-1, middle[..., None] + combined(offsets, lengths)[0]).add_(squares[..., None])
        chosen, alike = _nearest(distance, a.abs().amax(-1), squares.sqrt(), rank, members, length, guide.dtype)
        corners = centres[..., None] + torch.where(alike, shift[chosen], 0)
        return combined([one.numbers for one in parts], sides), corners.int(), alike.sum(-1, dtype=torch.int32)

    with workers_for(device) as workers:
        for numbered, corners, count in in_order(search, torch.split(tiles, together), workers):
            found[numbered] = corners
            counts[numbered] = count
    return found, counts


@dataclass(frozen=True)
class _Axis:
    """References along an axis in tiles of t, and the window that those of a tile have together.

    Attributes
    ----------
    places, numbers : (tiles, t)
        First samples of references, and which these are; the last tile may hold its last one several times.
    window, inside : (tiles, length)
        First samples of candidates, cut off at the ends, and whether they are patches of the image.
    within : (tiles, t)
        Where references lie in the window.
    """

    places: Tensor
    numbers: Tensor
    window: Tensor
    inside: Tensor
    within: Tensor

    @classmethod
    def of(cls, references: Tensor, radius: int, patch: int, samples: int, device: torch.device) -> _Axis:
        """Return the tiles of references along an axis, so wide that their windows are mostly the same."""
        stride = int((references[1:] - references[:-1]).max()) if len(references) > 1 else 1
        wide = min(1 + radius // max(stride, 1), _MOST, len(references))
        count = -(-len(references) // wide)
        numbers = torch.arange(count * wide).clamp_(max=len(references) - 1).view(count, wide)
        places = references[numbers]
        start = places[:, :1] - radius
        length = int((places[:, -1] - places[:, 0]).max()) + 2 * radius + 1
        window = start + torch.arange(length)
        last = samples - patch
        made = (places, numbers, window.clamp(0, last), (window >= 0) & (window <= last), places - start)
        return cls(*(one.to(device) for one in made))

    @property
    def length(self) -> int:
        return self.window.shape[1]

    def at(self, index: Tensor) -> _Axis:
        """Return some of the tiles."""
        return _Axis(*(one[index] for one in (self.places, self.numbers, self.window, self.inside, self.within)))


def combined(along: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Return flat indices (K, a b c) into a shape in C order, from indices (K, a), (K, b), (K, c) along its axes."""
    z, y, x = along
    return ((z[:, :, None, None] * shape[1] + y[:, None, :, None]) * shape[2] + x[:, None, None, :]).flatten(1)


def patch_offsets(patch: Three, shape: Sequence[int], device: torch.device) -> Tensor:
    """Return how far the D samples of a patch lie behind its first, in a volume of a shape."""
    return combined([torch.arange(n, device=device)[None] for n in patch], shape)[0]


def _patches(flat: Tensor, corners: Tensor, within: Tensor) -> Tensor:
    """Return patches (K, L, C D) of planes (C, N) at corners (K, L)."""
    places = (corners[..., None] + within).flatten()
    found = flat.index_select(1, places).view(len(flat), *corners.shape, len(within))
    return found.permute(1, 2, 0, 3).flatten(2)


def _nearest(
    distance: Tensor, largest: Tensor, norm: Tensor, rank: Tensor, members: int, samples: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return which candidates (K, T, n) are the nearest, the middle one first and the others in order; and if they are.

    `nlflow.backends.numba.search` derives what the rounding of the guide makes equal. To it comes that of
    |a|^2 + |b|^2 - 2 a.b: samples + 2 roundings of what is at most (|a| + |b|)^2, where |b| <= |a| + d.
    """
    middle = distance.shape[-1] // 2
    distance[..., middle] = -1
    limit = distance.topk(members, largest=False, sorted=False).values.amax(-1, keepdim=True).clamp_(min=0)
    root = limit.sqrt()
    slack = (
        torch.finfo(dtype).eps * ((samples + 3) * limit + 4 * (largest[..., None] + root) * math.sqrt(samples) * root)
        + torch.finfo(torch.float64).eps * (samples + 3) * (2 * norm[..., None] + root).square()
    )
    key = torch.where(distance <= limit + slack, rank, torch.inf).masked_fill_(distance < limit - slack, -1)
    key.masked_fill_(distance == torch.inf, torch.inf)[..., middle] = -2
    near, chosen = key.topk(members, largest=False, sorted=False)
    place = torch.where(near.isfinite(), chosen, len(rank)).masked_fill_(chosen == middle, -1).sort(-1).values
    return torch.where(place < 0, middle, place.clamp(max=len(rank) - 1)), place < len(rank)
