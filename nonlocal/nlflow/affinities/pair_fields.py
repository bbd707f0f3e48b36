"""Sums of a formula of the distance over all pairs of points, times weights of any sign or differences of the points.

What `nlflow.affinities.pair_sums` is for averages, relative to the largest weight of a row, this is for forces, and for
derivatives of sums by positions. The loops are in `nlflow.backends.numba.forces`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities.regions import BLOCK, Frame, Regions, along_axes
from nlflow.errors import check_memory
from nlflow.kernels.expressions import Expression, structure

_FEW_BLOCKS = 4  # up to which none is left out: to sort them costs more


class PairFields:
    """The sums sum_j g(|x_i - y_j|^2) v_j, and sum_j g(|x_i - y_j|^2) v_j (x_i - y_j), of points in float32 or float64.

    O((M + N) (d + C)) memory, O(M N (d + C)) time; blocks of 64 points that are farther apart than `reach` are left
    out. Terms are added up in the precision of the points, 128 at a time, and these sums in float64. The bits do not
    depend on the number of threads.

    Parameters
    ----------
    formula : Expression
        g as an expression of the squared distance, in powers of two (`nlflow.kernels.forms.base_two`).
    reach : float
        Distance beyond which g is taken for 0.
    periods : array of shape (d,), optional
        Of a box in which distances are those to the nearest image; 0 for a coordinate without one. Differences of
        coordinates have to be less than some thousand periods.
    """

    def __init__(self, formula: Expression, reach: float = math.inf, periods: Floats | None = None) -> None:
        from nlflow.backends.numba.pairwise import PERIODIC

        form, self._numbers = structure(formula)
        self._form = form if periods is None else PERIODIC + form
        self._reach, self._periods = reach, periods

    def sums(self, x: NDArray[Any], y: NDArray[Any], values: NDArray[Any]) -> Floats:
        """Return sum_j g_ij v_j for values (N, C); shape (M, C)."""
        return self._summed(x, y, values, pulls=False)

    def pulls(self, x: NDArray[Any], y: NDArray[Any], weights: NDArray[Any]) -> Floats:
        """Return sum_j g_ij w_j (x_i - y_j) for weights (N,); shape (M, d)."""
        return self._summed(x, y, weights[:, None], pulls=True)

    def _summed(self, x: NDArray[Any], y: NDArray[Any], values: NDArray[Any], *, pulls: bool) -> Floats:
        from nlflow.backends.numba.forces import loop
        from nlflow.backends.numba.pairwise import SOURCES, group, weigher

        f, d, same = x.dtype, x.shape[1], x is y
        channels = d if pulls else values.shape[1]
        check_memory(
            f"sums over {len(x)} x {len(y)} points", (len(x) + len(y)) * (2 * d + values.shape[1] + channels) * 8,
            "use fewer points or channels",
        )  # fmt: skip
        frame = self._frame(y)
        place = None if frame is None else self._places(frame)
        order_y = np.arange(len(y)) if place is None else along_axes(place(y))
        order_x = order_y if same else np.arange(len(x)) if place is None else along_axes(place(x))
        sources = y[order_y]
        queries = sources if same else x[order_x]
        if place is None:
            seen, others, limit = Regions.without_end(len(x)), Regions.without_end(len(y)), 0.0
        else:
            others = Regions.of(place(sources), 0.0)
            seen = others if same else Regions.of(place(queries), 0.0)
            slack = 0.0 if not isinstance(frame, Frame) else frame.slack
            limit = min((self._reach + slack) ** 2 * (1 + 1e-6), 1e300)
        weighted = np.zeros((len(y) + -len(y) % SOURCES, values.shape[1]), f)
        weighted[: len(y)] = values[order_y]
        left = np.ascontiguousarray(np.pad(queries.T, ((0, 0), (0, -len(x) % group(f))), "edge"))
        right = np.ascontiguousarray(np.pad(sources, ((0, -len(y) % SOURCES), (0, 0)), "edge"))
        box = np.zeros(d) if self._periods is None else self._periods
        inverses = np.divide(1, box, out=np.zeros(d), where=box > 0)
        axes = box if self._periods is not None else np.zeros(seen.lows.shape[1])
        sums = np.empty((left.shape[1], channels))
        loop("pair_fields", f.name)(
            weigher(self._form, f.name), pulls, self._periods is not None, np.array([*self._numbers, 0], f),
            np.concatenate([box, inverses]).astype(f), axes, BLOCK, left, right, seen.lows, seen.highs, others.lows,
            others.highs, limit, weighted, sums,
        )  # fmt: skip
        result = np.empty((len(x), channels))
        result[order_x] = sums[: len(x)]
        return result

    def _frame(self, y: NDArray[Any]) -> Any:
        """Return the axes along which there are boxes; None where no block is left out."""
        if not math.isfinite(self._reach) or len(y) <= _FEW_BLOCKS * BLOCK:
            return None
        if self._periods is not None:
            return self._periods
        sides = np.asarray(y.max(axis=0), np.float64) - y.min(axis=0)
        return Frame(y) if float(np.linalg.norm(sides)) > self._reach else None

    @staticmethod
    def _places(frame: Any) -> Any:
        if isinstance(frame, Frame):
            return frame.place
        return lambda points: np.asarray(points, np.float64)
