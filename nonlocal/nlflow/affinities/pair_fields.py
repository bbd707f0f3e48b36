"""Sums of a formula of the distance over all pairs of points."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, is_numpy, namespace
from nlflow.affinities.regions import BLOCK, Frame, Regions, along_axes, squared_limit
from nlflow.errors import check_memory
from nlflow.kernels.expressions import Expression, structure, value

_FEW_BLOCKS = 4  # up to which none is left out: to sort them costs more
_SHARES = 16  # of the work, whatever the number of threads
_TILE = 2**22  # numbers, on tensors


class PairFields:
    """The sums over j of g(|x_i - y_j|^2) v_j, and of g(|x_i - y_j|^2) v_j (x_i - y_j), in float32 or float64."""

    # O((M + N) (d + C)) memory, O(M N (d + C)) time; blocks of 64 points that are farther apart than `reach` are left
    # out. Terms are added up in the precision of the points, 128 at a time, and these sums in float64. The bits do not
    # depend on the number of threads. Tensors take tiles of rows on their device, all pairs, in their own precision.
    # - formula : g as an expression of the squared distance, in powers of two (`nlflow.kernels.forms.base_two`)
    # - periods : (d,), of a box in which distances are those to the nearest image; 0 for a coordinate without one.
    #   Differences of coordinates have to be less than some thousand periods.

    def __init__(self, formula: Expression, reach: float = math.inf, periods: Floats | None = None) -> None:
        from nlflow.backends.numba.pairwise import PERIODIC

        form, self._numbers = structure(formula)
        self._formula = formula
        self._form = form if periods is None else PERIODIC + form
        self._reach, self._periods = reach, periods

    def sums(self, x: Array, y: Array, values: Array) -> Array:
        if not is_numpy(x):
            return self._tiled(x, y, lambda g, gaps: g @ values)
        return self._summed(x, y, values, pulls=False)

    def pulls(self, x: Array, y: Array, weights: Array) -> Array:
        # Where `x` is `y`, g of a pair is computed once, and what its points do to each other has the same bits.
        if not is_numpy(x):
            xp = namespace(x)
            return self._tiled(x, y, lambda g, gaps: xp.stack([(g * gap) @ weights for gap in gaps], axis=1))
        return self._mutual(x, weights) if x is y else self._summed(x, y, weights[:, None], pulls=True)

    def _tiled(self, x: Array, y: Array, reduced: Callable[[Array, list[Array]], Array]) -> Array:
        """Return what is made of g and of the differences along each axis, for a block of rows at a time."""
        xp, rows = namespace(x), []
        step = max(1, _TILE // (len(y) * (x.shape[1] + 4)))
        for start in range(0, len(x), step):
            gaps = [x[start : start + step, c, None] - y[None, :, c] for c in range(x.shape[1])]
            if self._periods is not None:
                gaps = [
                    g - p * xp.round(g / p) if p > 0 else g for g, p in zip(gaps, self._periods.tolist(), strict=True)
                ]
            squared = gaps[0] * gaps[0]
            for gap in gaps[1:]:
                squared = squared + gap * gap
            rows.append(reduced(value(self._formula, squared), gaps))
        return xp.concat(rows, axis=0)

    def _summed(self, x: NDArray[Any], y: NDArray[Any], values: NDArray[Any], *, pulls: bool) -> Floats:
        from nlflow.backends.numba.forces import loop
        from nlflow.backends.numba.pairwise import SOURCES, group, weigher

        f, d = x.dtype, x.shape[1]
        channels = d if pulls else values.shape[1]
        _check_room(len(x) + len(y), d + values.shape[1] + channels)
        frame = self._frame(y)
        own, others = _Ordered(x, frame, group(f)), _Ordered(y, frame, SOURCES)
        sums = np.empty((len(own.points), channels))
        loop("pair_fields", f.name)(
            weigher(self._form, f.name), pulls, self._periods is not None, *self._constants(f, d), self._axes(own),
            BLOCK, np.ascontiguousarray(own.points.T), others.points, *own.boxes, *others.boxes, self._limit(frame),
            others.filled(values), sums,
        )  # fmt: skip
        return own.back(sums)

    def _mutual(self, x: NDArray[Any], weights: NDArray[Any]) -> Floats:
        from nlflow.backends.numba.forces import loop
        from nlflow.backends.numba.pairwise import weigher

        f, d = x.dtype, x.shape[1]
        _check_room(len(x), (2 + _SHARES) * d)
        frame = self._frame(x)
        own = _Ordered(x, frame, BLOCK)
        sums = np.zeros((min(_SHARES, len(own.points) // BLOCK), *own.points.shape))
        loop("mutual_fields", f.name)(
            weigher(self._form, f.name), self._periods is not None, *self._constants(f, d), self._axes(own), BLOCK,
            np.ascontiguousarray(own.points.T), own.points, *own.boxes, self._limit(frame),
            own.filled(weights[:, None]), sums,
        )  # fmt: skip
        return own.back(sums.sum(axis=0))

    def _constants(self, f: np.dtype[Any], d: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the numbers of the formula, and the periods with their inverses."""
        box = np.zeros(d) if self._periods is None else self._periods
        inverses = np.divide(1, box, out=np.zeros(d), where=box > 0)
        return np.array([*self._numbers, 0], f), np.concatenate([box, inverses]).astype(f)

    def _axes(self, own: _Ordered) -> Floats:
        """Return periods along the axes of the boxes."""
        return np.zeros(own.boxes[0].shape[1]) if self._periods is None else self._periods[: own.boxes[0].shape[1]]

    def _limit(self, frame: Frame | Floats | None) -> float:
        slack = frame.slack if isinstance(frame, Frame) else 0.0
        return squared_limit(self._reach, slack) if frame is not None else 0.0

    def _frame(self, y: NDArray[Any]) -> Frame | Floats | None:
        """Return the axes along which there are boxes, the periods for those of space; None for no boxes."""
        if not math.isfinite(self._reach) or len(y) <= _FEW_BLOCKS * BLOCK:
            return None
        if self._periods is not None:
            return self._periods
        sides = np.asarray(y.max(axis=0), np.float64) - y.min(axis=0)
        return Frame(y) if float(np.linalg.norm(sides)) > self._reach else None


class _Ordered:
    """Points in an order in which blocks of them are compact, filled up to a multiple, and boxes around the blocks."""

    def __init__(self, points: NDArray[Any], frame: Frame | Floats | None, multiple: int) -> None:
        self._count, self._order = len(points), np.arange(len(points))
        places = np.empty((len(points), 0))
        if frame is not None:
            places = frame.place(points) if isinstance(frame, Frame) else points.astype(np.float64)
            self._order = along_axes(places)
        more = -len(points) % multiple
        regions = Regions.of(np.pad(places[self._order], ((0, more), (0, 0)), "edge"), 0.0)
        self.boxes = regions.lows, regions.highs
        self.points = np.ascontiguousarray(np.pad(points[self._order], ((0, more), (0, 0)), "edge"))

    def filled(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values in this order, 0 where points fill up."""
        result = np.zeros((len(self.points), values.shape[1]), self.points.dtype)
        result[: self._count] = values[self._order]
        return result

    def back(self, sums: Floats) -> Floats:
        """Return sums in the order in which the points were given."""
        result = np.empty((self._count, sums.shape[1]))
        result[self._order] = sums[: self._count]
        return result


def _check_room(points: int, numbers: int) -> None:
    check_memory(f"sums over all pairs of {points} points", points * numbers * 16, "use fewer points or channels")
