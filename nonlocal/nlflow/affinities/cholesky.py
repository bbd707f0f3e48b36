"""Randomly pivoted Cholesky, K = F F^T + R, and what R does to averages."""

# R is positive semidefinite, so |R_pq| <= sqrt(R_pp R_qq), and its diagonal falls out of the factorization: the error
# of every average is bounded by numbers that are at hand (Chen, Epperly, Tropp and Webber, arXiv 2207.06503; blocks by
# rejection: Epperly, Tropp and Webber, arXiv 2410.03969).

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.backends.threads import in_order, one_blas_thread
from nlflow.errors import NumericalError

T = TypeVar("T")

TILE = 2048
"""Points of one piece of work; sums over points are cut here whatever the number of threads."""


def over_tiles(function: Callable[[slice], T], size: int, tile: int = TILE) -> list[T]:
    tiles = [slice(start, min(start + tile, size)) for start in range(0, size, tile)]
    with one_blas_thread() as threads:
        workers = min(threads, len(tiles) // 4)  # to start a thread costs more than a few tiles
        return list(in_order(function, tiles, workers))


LogMatrix = Callable[[Floats, Floats], Floats]
Columns = list[NDArray[Any]]

BLOCK = 128  # most pivots of one block
_EPS = float(np.finfo(np.float64).eps)


class Sum(NamedTuple):
    """One sum for each node, scale_i sum_j weights_j k(p_i, q_j)."""

    # - rows, columns : slices of the points, which are p_i and q_j
    # - scale, weights : (N,), in [0, 1]; factors of the size of exp(logit) are taken out, in log space

    rows: slice
    columns: slice
    scale: Floats
    weights: Floats


class Factor:
    """F of K ~ F F^T, (M, rank), as blocks of columns, and what is known of R = K - F F^T."""

    # In exact arithmetic R is positive semidefinite. With rounding let gamma bound the errors of F F^T in the columns
    # of the pivots S, which is what Cholesky's method keeps small, and let W = F F_S^-1 be the weights with which the
    # pivots interpolate the other points. Then Q_pq = (e_p - W_p) K (e_q - W_q)^T, which is positive semidefinite for
    # any W and 0 at pivots, differs from R_pq by W_p E W_q^T - W_p e_q^T - e_p W_q^T with entries of E and e below
    # gamma, so that
    #
    #     |R_pq| <= sqrt(Q_pp Q_qq) + gamma g_p g_q,     Q_pp <= R_pp + gamma g_p^2,     g_p = 1 + sum_s |W_ps|.
    #
    # - residual : (M,), the diagonal of R
    # - growth : (M,), g for the pivots of the last `interpolate`; 1 before
    # - pivots : S, in the order of the columns; F_S is lower triangular

    def __init__(self, points: int, reach: float) -> None:
        self.columns: Columns = []
        self.residual: Floats = np.ones(points)
        self.growth: Floats = np.ones(points)
        self.pivots: list[int] = []
        self._reach = reach

    @property
    def rank(self) -> int:
        return len(self.pivots)

    @property
    def rounding(self) -> float:
        return _EPS * (4 + math.sqrt(self.rank) + 4 * self._reach)

    @property
    def root(self) -> Floats:
        root = np.sqrt(self.residual + self.rounding * self.growth**2)
        root[self.pivots] = 0
        return root

    def rows(self, points: NDArray[np.int64]) -> list[Floats]:
        return [block[points] for block in self.columns]

    def remainder(self, kernel: Floats, left: list[Floats] | slice, right: list[Floats]) -> Floats:
        pieces = [block[left] for block in self.columns] if isinstance(left, slice) else left
        for a, b in zip(pieces, right, strict=True):
            kernel -= a @ b.T
        return kernel

    def interpolate(self) -> None:
        """Find 1 + sum |W|, how much interpolation from the pivots amplifies rounding; O(M rank^2)."""
        from scipy.linalg import solve_triangular

        triangle = np.concatenate(self.rows(np.array(self.pivots, dtype=np.int64)), axis=1)

        def growth(tile: slice) -> Floats:
            weights = np.concatenate([block[tile] for block in self.columns], axis=1).T
            weights = solve_triangular(triangle, weights, lower=True, trans=1, overwrite_b=True, check_finite=False)
            return np.asarray(1 + np.abs(weights).sum(axis=0))

        self.growth = np.concatenate(over_tiles(growth, len(self.residual)))

    def append(self, block: Floats, pivots: NDArray[np.int64], triangle: Floats) -> None:
        block[self.pivots] = 0
        block[pivots] = triangle
        self.columns.append(block)
        self.pivots += pivots.tolist()
        square = np.concatenate(over_tiles(lambda tile: (block[tile] ** 2).sum(axis=1), len(block)))
        self.residual = np.maximum(self.residual - square, 0)
        self.residual[pivots] = 0

    def stored_as(self, dtype: Any) -> None:
        for number, block in enumerate(self.columns):
            self.columns[number] = block.astype(dtype, copy=False)


def gram_product(columns: Columns, left: slice, right: slice, v: Floats) -> Floats:
    def inner(tile: slice) -> list[Floats]:
        return [block[right][tile].astype(np.float64, copy=False).T @ v[tile] for block in columns]

    parts = over_tiles(inner, len(v))
    sums = [sum(part[1:], start=part[0]) for part in zip(*parts, strict=True)]

    def outer(tile: slice) -> Floats:
        result = np.zeros((tile.stop - tile.start, v.shape[1]))
        for block, coefficients in zip(columns, sums, strict=True):
            result += block[left][tile].astype(np.float64, copy=False) @ coefficients
        return result

    return np.concatenate(over_tiles(outer, len(v)))


def degrees(columns: Columns, sums: tuple[Sum, ...]) -> list[Floats]:
    return [gram_product(columns, s.rows, s.columns, s.weights[:, None])[:, 0] for s in sums]


@dataclass(frozen=True)
class Bound:
    """What R can do to the averages (Pu)_i = sum_j w_j K_ij u_j / d_i of a matrix K = F F^T + R."""

    # With the average ^P of F F^T and its degree ^d,
    #
    #     (^Pu - Pu)_i = -sum_j w_j R_ij (u_j - (Pu)_i) / ^d_i,
    #
    # and |u_j - (Pu)_i| <= max u - min u = 2 max|u - c| with c halfway between them, so that
    #
    #     |(^Pu - Pu)_i| <= 2 a_i / ^d_i max|u - c|,     a_i >= sum_j w_j |R_ij|.
    #
    # By Cauchy and Schwarz a_i = sqrt(R_ii) sum_j w_j sqrt(R_jj), with what rounding adds (`Factor`). The exact degree
    # is nowhere needed; it lies within ^d_i -+ a_i. The same number bounds sum_j |^P_ij - P_ij|.
    #
    # - value : max_i 2 a_i / ^d_i with what rounding adds; infinite while a degree is not positive
    # - least : what rounding alone leaves at any rank
    # - upper : (N,), ^d_i + a_i >= d_i

    value: float
    least: float
    upper: Floats

    @classmethod
    def of(cls, factor: Factor, sums: tuple[Sum, ...], degree: list[Floats], stored: float, logits: float) -> Bound:
        # - sums : added up they are the degree; `degree` is that of F F^T for each of them
        # - stored : relative rounding of the entries of F where it is kept; twice that is the error of an inner product
        #   of rows, since none is longer than 1
        # - logits : relative error of scales and weights: how exact the logarithms are
        root, growth = factor.root, factor.growth
        truncated = rounded = total = np.zeros_like(degree[0])
        for s, d in zip(sums, degree, strict=True):
            truncated = truncated + s.scale * root[s.rows] * float((s.weights * root[s.columns]).sum())
            products = factor.rounding * growth[s.rows] * float((s.weights * growth[s.columns]).sum())
            rounded = rounded + s.scale * (products + 2 * stored * float(s.weights.sum()))
            total = total + s.scale * d
        upper = total + truncated + rounded
        with np.errstate(over="ignore", divide="ignore"):
            least = 2 * float((rounded / upper).max()) + 2 * logits
            if total.min() <= 0:
                return cls(np.inf, least, upper)
            return cls(2 * float(((truncated + rounded) / total).max()) + 2 * logits, least, upper)


def _pivot_law(
    factor: Factor, sums: tuple[Sum, ...], upper: Floats, floor: float
) -> tuple[Callable[[NDArray[np.int64], Floats], Floats], Floats]:
    """Return how a point's chance to become a pivot depends on its residual, and the chances of all points."""
    # The bound is a largest row factor, sqrt(R_ii) / d_i, times a sum over columns, S = sum_j w_j sqrt(R_jj). Half of
    # the pivots are drawn for the sum: S^2 <= sum w sum w R, the trace of the weighted residual, which chances in
    # proportion to w_j R_jj bring down (arXiv 2207.06503). The other half are drawn for the maximum, in proportion to
    # the fourth power of the row factor, which leads to the worst rows without the ties of a greedy choice, where
    # rounding would decide.
    for_sum, for_most = np.zeros_like(factor.residual), np.zeros_like(factor.residual)
    root = factor.root
    for s in sums:
        for_sum[s.columns] += s.weights
        for_most[s.rows] += s.scale / upper * float((s.weights * root[s.columns]).sum())
    residual = np.where(factor.residual > floor, factor.residual, 0.0)
    for_most = (for_most / max(float((for_most * np.sqrt(residual)).max()), np.finfo(float).tiny)) ** 4
    total, most = float((for_sum * residual).sum()), float((for_most * residual**2).sum())
    for_sum = for_sum / total if total > 0 else for_sum
    for_most = for_most / most if most > 0 else for_most

    def chance(points: NDArray[np.int64], left: Floats) -> Floats:
        return np.asarray((for_sum[points] + for_most[points] * left) * left)

    return chance, chance(np.arange(len(residual)), residual)


def _accepted(
    matrix: Floats, chance: Callable[[int, float], float], uniform: Floats, floor: float
) -> tuple[list[int], Floats]:
    """Return which of the drawn points become pivots, and the Cholesky factor of their residual matrix."""
    # A point is kept with the ratio of its chance now, after those before it, to its chance when it was drawn: then the
    # pivots have the law of those that are drawn one at a time (arXiv 2410.03969, algorithm 2).
    drawn = matrix.diagonal().copy()
    kept: list[int] = []
    columns = []
    for i in range(len(matrix)):
        left = float(matrix[i, i])
        if left > floor and uniform[i] * chance(i, float(drawn[i])) < chance(i, left):
            column = matrix[:, i] / np.sqrt(left)
            matrix = matrix - column[:, None] * column
            kept.append(i)
            columns.append(column)
    return kept, np.tril(np.array(columns).reshape(len(kept), len(matrix))[:, kept].T)


def factorize(
    log_matrix: LogMatrix,
    points: Floats,
    sums: tuple[Sum, ...],
    *,
    rtol: float,
    max_rank: int,
    seed: int,
    stored: float = 0.0,
    logits: float = 0.0,
    reach: float = 0.0,
) -> Factor:
    """Return a factor whose averages are within `rtol`, or raise; O(M r^2 + M r d) time, O(M r) memory."""
    # - log_matrix : points (M, d) and (b, d) to log k, (M, b); k(x, x) = 1 and k positive definite
    # - sums : added up they are the degree of the averages that are wanted
    # - stored, logits : see `Bound.of`
    # - reach : length of the longest point where points were computed with rounding; 0 where they are as given
    rng = np.random.default_rng(seed)
    factor = Factor(len(points), reach)
    degree = [np.zeros_like(s.scale) for s in sums]
    checked = -1
    while True:
        bound = Bound.of(factor, sums, degree, stored, logits)
        # With a margin for the degree, which changes by less than rtol when the columns are rounded to a dtype.
        if bound.value * (1 + rtol) <= rtol:
            if checked == factor.rank:
                return factor
            factor.interpolate()
            checked = factor.rank
            continue
        # A pivot that has far less left than other points amplifies their rounding.
        floor = max(4 * factor.rounding, 1e-6 * float(factor.residual.max()))
        chance, chances = _pivot_law(factor, sums, bound.upper, floor)
        alive = bool(chances.any())
        if bound.least > rtol or not alive:
            raise NumericalError(
                f"lowrank: rounding alone leaves an error bound of {bound.least if alive else bound.value:.2g}, more "
                f"than rtol={rtol:g}; use {'float64 features, ' if stored else ''}method='pairwise' or a larger rtol"
            )
        if factor.rank >= max_rank:
            raise NumericalError(
                f"lowrank: rank {factor.rank} for {len(sums[0].scale)} nodes leaves an error bound of "
                f"{bound.value:.2g}, more than rtol={rtol:g}, and no higher rank is allowed; use method='pairwise', a "
                "larger rtol, a wider kernel (features that lie closer in units of its width), or raise memory_limit"
            )
        count = min(max(8, factor.rank // 4), BLOCK, max_rank - factor.rank)
        ladder = np.cumsum(chances)
        drawn = np.minimum(np.searchsorted(ladder, rng.random(count) * ladder[-1], side="right"), len(points) - 1)
        if _extend(factor, log_matrix, points, drawn, rng.random(count), chance, floor):
            degree = [old + new for old, new in zip(degree, degrees(factor.columns[-1:], sums), strict=True)]


def _extend(
    factor: Factor,
    log_matrix: LogMatrix,
    points: Floats,
    drawn: NDArray[np.int64],
    uniform: Floats,
    chance: Callable[[NDArray[np.int64], Floats], Floats],
    floor: float,
) -> bool:
    """Append a block with pivots chosen among the points that were drawn, and tell whether there were any."""
    from scipy.linalg import solve_triangular

    def kernel(x: Floats, y: Floats) -> Floats:
        with np.errstate(over="ignore", under="ignore"):  # far apart means exp(-inf) = 0
            return np.asarray(np.exp(log_matrix(x, y)))

    with one_blas_thread():
        rows = factor.rows(drawn)
        matrix = factor.remainder(kernel(points[drawn], points[drawn]), rows, rows)
        # What was followed by subtraction is corrected by what was just computed, so that no point that has nothing
        # left is drawn for ever.
        factor.residual[drawn] = np.maximum(matrix.diagonal(), 0)
        kept, triangle = _accepted(
            matrix, lambda i, left: float(chance(drawn[i : i + 1], np.array([left]))[0]), uniform, floor
        )
    if not kept:
        return False
    pivots = drawn[kept]
    rows = factor.rows(pivots)
    block = np.empty((len(points), len(kept)))

    def fill(tile: slice) -> None:
        residual = factor.remainder(kernel(points[tile], points[pivots]), tile, rows)
        block[tile] = solve_triangular(triangle, residual.T, lower=True, overwrite_b=True, check_finite=False).T

    over_tiles(fill, len(points))
    factor.append(block, pivots, triangle)
    return True
