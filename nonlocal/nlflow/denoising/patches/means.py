"""Means over blocks, with groups of their own, for noise that is too smooth for a patch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from array_api_compat import device

from nlflow._array import Array, contiguous, namespace
from nlflow.denoising.patches.lattice import Grouping, Lattice, Three, three

_LEAST = 3  # patches of the means fit side by side into an image that has some
#: Shifts of blocks along rows and columns alike, so that no edge of theirs stays, and a turned image has turned blocks.
_SHIFTS = (0, 1, 1, 0)


@dataclass(frozen=True)
class Blocks:
    """The blocks of 2 x 2 samples (2 of a signal) of a part of an image.

    Each search shifts them (Coifman and Donoho 1995, doi 10.1007/978-1-4612-2544-7_9).

    Attributes
    ----------
    sides : triple of int
        Of a block: 2, or 1 along axes of one sample and axes that are not mixed.
    start : triple of int
        First sample of the first block.
    lattice : Lattice
        Of the groups of the means.
    """

    sides: Three
    start: Three
    lattice: Lattice

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        grouping: Grouping,
        origin: tuple[int, ...],
        whole: tuple[int, ...] | None,
        search: int = 0,
    ) -> Blocks | None:
        own, large = three(shape), three(shape if whole is None else whole)
        alone = (p == 1 and r == 0 for p, r in zip(grouping.along("patch"), grouping.along("radius"), strict=True))
        sides = three(tuple(1 if apart else min(n, 2) for n, apart in zip(large, alone, strict=True)))
        first = [k % s for k, s in zip((0, *(_SHIFTS[search % 4],) * 2), sides, strict=True)]
        fitting = tuple((n - a) // s for n, a, s in zip(large, first, sides, strict=True))
        if any(n < _LEAST * p for n, p, s in zip(fitting, grouping.along("patch"), sides, strict=True) if s > 1):
            return None
        begin = three(origin, 0)
        start = three(tuple((a - o) % s for a, o, s in zip(first, begin, sides, strict=True)))
        count = tuple((n - a) // s for n, a, s in zip(own, start, sides, strict=True))
        before = tuple((o + a) // s for o, a, s in zip(begin, start, sides, strict=True))
        return cls(sides, start, Lattice.of(count, grouping, before, fitting))

    @property
    def size(self) -> int:
        return self.sides[1] * self.sides[2]

    def _inside(self, planes: Array) -> Array:
        rows, columns = (
            slice(a, a + s * n) for a, s, n in zip(self.start[1:], self.sides[1:], self.lattice.shape[1:], strict=True)
        )
        return planes[:, :, rows, columns]

    def mean(self, planes: Array) -> Array:
        inside, (_, rows, columns) = self._inside(planes), self.sides
        above: Any = sum(inside[:, :, ::rows, k::columns] for k in range(columns))
        below: Any = sum(inside[:, :, rows - 1 :: rows, k::columns] for k in range(columns)) if rows > 1 else 0
        return contiguous((above + below) * (1 / self.size))

    def spread(self, means: Array, like: Array) -> Array:
        """Return smoothed means as planes, linear between the middles of blocks, and 0 outside of all blocks.

        Facciolo, Pierazzo and Morel 2017 (doi 10.1137/17M1111826).
        """
        for axis in (2, 3):
            if self.sides[axis - 1] == 2:
                means = _between(means, axis)
            means = _beside(means, self.start[axis - 1], like.shape[axis], axis)
        return means


def _between(means: Array, axis: int) -> Array:
    """Return (1, 2, 1)/4 of the means along an axis, at a fourth and three fourths of each block; constant beyond."""
    xp = namespace(means)
    values = xp.moveaxis(means, axis, 0)
    padded = xp.concat([values[:1], values, values[-1:]])
    values = 0.25 * (padded[:-2] + padded[2:]) + 0.5 * values
    padded = xp.concat([values[:1], values, values[-1:]])
    pairs = xp.stack([0.75 * values + 0.25 * padded[:-2], 0.75 * values + 0.25 * padded[2:]], axis=1)
    return xp.moveaxis(pairs.reshape(2 * len(values), *values.shape[1:]), 0, axis)


def _beside(values: Array, start: int, length: int, axis: int) -> Array:
    """Return values with zeros before and behind them along an axis, to a length."""
    xp = namespace(values)
    parts = []
    for more in (start, length - start - values.shape[axis]):
        shape = [*values.shape]
        shape[axis] = more
        parts.append(xp.zeros(tuple(shape), dtype=values.dtype, device=device(values)))
    return xp.concat([parts[0], values, parts[1]], axis=axis)
