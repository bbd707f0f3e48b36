"""Means over blocks of an image, which have groups of their own: noise that is too smooth for a patch is seen there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.patches.lattice import Grouping, Lattice, Three, three

Array = NDArray[Any]
_LEAST = 3  # patches of the means fit side by side into an image that has some
_SHIFTS = ((0, 0), (1, 1), (0, 1), (1, 0))  # of blocks along rows and columns, so that no edge of theirs stays


@dataclass(frozen=True)
class Blocks:
    """The blocks of 2 x 2 samples of an image (2 of a signal) that lie in this part of it.

    They are shifted from search to search (Coifman and Donoho 1995, doi 10.1007/978-1-4612-2544-7_9).

    Attributes
    ----------
    sides : triple of int
        Of a block: 2, or 1 along axes of one sample.
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
        """Return the blocks of a part of an image, which begin where those of the whole do; None for a small image.

        Parameters are those of `Lattice.of`, and the number of the search.
        """
        own, large = three(shape), three(shape if whole is None else whole)
        sides = three(tuple(min(n, 2) for n in large))
        first = [k % s for k, s in zip((0, *_SHIFTS[search % 4]), sides, strict=True)]
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
        """Samples of a block; the variance of white noise is so many times smaller in the means."""
        return self.sides[1] * self.sides[2]

    def _inside(self, planes: Array) -> Array:
        """Return what the blocks cover, a view."""
        rows, columns = (
            slice(a, a + s * n) for a, s, n in zip(self.start[1:], self.sides[1:], self.lattice.shape[1:], strict=True)
        )
        return planes[:, :, rows, columns]

    def mean(self, planes: Array) -> Array:
        """Return the means over the blocks of planes (C, 1, H, W), whatever their layout with the same bits."""
        inside, (_, rows, columns) = self._inside(planes), self.sides
        above = sum(inside[:, :, ::rows, k::columns] for k in range(columns))
        below = sum(inside[:, :, rows - 1 :: rows, k::columns] for k in range(columns)) if rows > 1 else 0
        return np.ascontiguousarray((above + below) * planes.dtype.type(1 / self.size))

    def spread(self, means: Array, like: Array) -> Array:
        """Return planes that hold the low frequencies of means, with 0 beside all blocks.

        The means are smoothed first, and are linear between the middles of the blocks: what is fine for blocks is left
        to the samples themselves (Facciolo, Pierazzo and Morel 2017, doi 10.1137/17M1111826).
        """
        found = np.zeros_like(like)
        for axis in (2, 3):
            if self.sides[axis - 1] == 2:
                means = _between(means, axis)
        self._inside(found)[...] = means
        return found


def _between(means: Array, axis: int) -> Array:
    """Return (1, 2, 1)/4 of the means along an axis, at a fourth and three fourths of each block; constant beyond."""
    near, far = means.dtype.type(0.75), means.dtype.type(0.25)
    values = np.moveaxis(means, axis, 0)
    padded = np.concatenate([values[:1], values, values[-1:]])
    values = far * (padded[:-2] + padded[2:]) + 2 * far * values
    padded = np.concatenate([values[:1], values, values[-1:]])
    found = np.empty((2 * len(values), *values.shape[1:]), means.dtype)
    found[::2] = near * values + far * padded[:-2]
    found[1::2] = near * values + far * padded[2:]
    return np.moveaxis(found, 0, axis)
