"""Positive semidefinite kernels of low rank."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, middle_of_range
from nlflow.affinities.base import Affinity
from nlflow.affinities.cholesky import BLOCK, TILE, Bound, Sum, degrees, factorize, gram_product
from nlflow.domains import Domain
from nlflow.errors import (
    InputError,
    check_generator,
    check_integer,
    check_memory,
    check_number,
    check_numpy,
    kind_of,
    memory_limit,
)
from nlflow.kernels import ExpDotProduct, Gaussian, Kernel, RadialKernel

_SMALLEST_RTOL = {"float64": 1e-10, "float32": 1e-5}
_STORED = {"float64": 0.0, "float32": 2.0**-24}
_EPS = float(np.finfo(np.float64).eps)
_SMALL_RANK = 64  # a factor of this rank is small for any number of nodes
_LARGE_RANK = 4096  # beyond, a factor takes longer to find than sums over all pairs take
_REMEDY = "use method='pairwise', fewer nodes, or raise memory_limit"


class _Problem(NamedTuple):
    """k_ij = exp(row_i + column_j + constant) g(p_i, q_j) with g positive definite, g(x, x) = 1.

    Attributes
    ----------
    core : Kernel
        Of g.
    points : array of shape (N, d) or (2 N, d)
        p and q, once when they are the same.
    row, column : array of shape (N,)
    constant : float
    logits : float
        Relative error that rounding leaves in exp(row + column).
    reach : float
        Length of the longest point where points were computed with rounding; 0 where they are as given.
    """

    core: Kernel
    points: Floats
    row: Floats
    column: Floats
    constant: float = 0.0
    logits: float = 0.0
    reach: float = 0.0

    @property
    def nodes(self) -> int:
        return len(self.row)

    @property
    def symmetric(self) -> bool:
        return len(self.points) == self.nodes

    @property
    def nbytes(self) -> int:
        return self.points.nbytes + self.row.nbytes + self.column.nbytes


class LowRankAffinity(Affinity):
    """An affinity k ~ F F^T of rank r, with a bound of its error; O(N r) memory, O(N r D) time an average."""

    # For kernels of features that are positive semidefinite, and for dot products, which are Gaussians between factors
    # of rows and columns: exp(s q.k) = exp(s |q|^2 / 2) exp(-s |q - k|^2 / 2) exp(s |k|^2 / 2). Queries unlike keys are
    # factorized together, 2 N points. `error_estimate` bounds |^Pu - Pu| over max|u - c| for every constant c, not
    # counting the rounding of the result to its dtype (`nlflow.affinities.cholesky.Bound`). ^P is self-adjoint in its
    # own degree, and constants stay; where P is almost 0 entries of ^P may be negative.

    method = "lowrank"

    def __init__(
        self, domain: Domain, kernel: Kernel | None, problem: _Problem, dtype: Any, *, both: bool = False, **given: Any
    ) -> None:
        symmetric = problem.symmetric or both
        super().__init__(
            domain, kernel, symmetric=symmetric, positive_semidefinite=problem.symmetric, dtype=np.dtype(dtype)
        )
        self._problem = None if symmetric else problem  # only K = k + k^T asks for it again
        self._options = given  # rtol, max_rank, limit and seed
        self._sums, tops = _sums(problem, domain.weights.ravel(), both)
        stored = _STORED[self.dtype.name]
        factor = factorize(
            problem.core.log_matrix, problem.points, self._sums, rtol=given["rtol"], stored=stored,
            max_rank=_rank_limit(problem, given["max_rank"], given["limit"]), seed=given["seed"],
            logits=problem.logits, reach=problem.reach,
        )  # fmt: skip
        factor.stored_as(self.dtype)
        self._columns = factor.columns
        degree = degrees(self._columns, self._sums)
        self.rank = factor.rank
        self.error_estimate = Bound.of(factor, self._sums, degree, stored, problem.logits).value
        total = np.asarray(sum(s.scale * d for s, d in zip(self._sums, degree, strict=True)))
        self._logs: Floats = (tops + np.log(total)).reshape(domain.shape)
        self._shares = [s.scale / total for s in self._sums]

    @classmethod
    def from_features(
        cls, kernel: Kernel, domain: Domain, queries: Array, keys: Array, *, rtol: float,
        memory_limit: float | None = None, max_rank: int | None = None, rng: int | np.random.Generator | None = 0,
    ) -> LowRankAffinity:  # fmt: skip
        """Compare queries (N, d) with keys (N, d), to a bound of `rtol`; O(N r^2 + N r d) time."""
        # The factor is found in float64 and kept in the precision of the keys. `NumericalError` when the highest rank,
        # or rounding, leaves a larger bound.
        radial = isinstance(kernel, RadialKernel) and kernel.is_definite(int(np.shape(keys)[-1]))
        if not radial and not isinstance(kernel, ExpDotProduct):
            raise InputError(
                f"kernel: got {kind_of(kernel)}, expected one that is positive definite, such as Gaussian, "
                "Laplace or ExpDotProduct; use method='pairwise' or 'dense'"
            )
        same = queries is keys
        k = _features("features", keys, domain)
        q = k if same else _features("queries", queries, domain)
        if q.dtype != k.dtype or q.shape != k.shape:
            raise InputError(
                f"queries: got shape {q.shape} of {q.dtype}, expected {k.shape} of {k.dtype}, as the keys have"
            )
        rtol = check_number("rtol", rtol, minimum=0, strict=True, below=1)
        if rtol < _SMALLEST_RTOL[k.dtype.name]:
            remedy = "pass float64 features" if k.dtype == np.float32 else "use method='pairwise'"
            raise InputError(
                f"rtol: got {rtol:g}, expected at least {_SMALLEST_RTOL[k.dtype.name]:g} for features of {k.dtype}; "
                f"{remedy}"
            )
        if max_rank is not None:
            max_rank = check_integer("max_rank", max_rank, minimum=1)
        seed = int(check_generator(rng).integers(2**63))
        problem = _problem(kernel, q.astype(np.float64), None if same else k.astype(np.float64))
        return cls(domain, kernel, problem, k.dtype, rtol=rtol, max_rank=max_rank, limit=memory_limit, seed=seed)

    # ---- contract

    def _average(self, u: Array) -> Array:
        flat = self.flatten(u).astype(np.float64)
        # About the middle of its range, where constants are 0 and stay what they are, and of size 1 at most, so that
        # sums of weights far above their degree stay in range.
        centre = middle_of_range(flat)
        size = np.maximum(flat.max(axis=0) / 2 - flat.min(axis=0) / 2, np.finfo(np.float64).tiny)
        flat = (flat - centre) / size
        result = np.zeros_like(flat)
        for s, share in zip(self._sums, self._shares, strict=True):
            result += share[:, None] * gram_product(self._columns, s.rows, s.columns, s.weights[:, None] * flat)
        return (result * size + centre).astype(u.dtype).reshape(u.shape)

    def _push(self, law: Array) -> Array:
        flat = self.flatten(law).astype(np.float64)
        result = np.zeros_like(flat)
        for s, share in zip(self._sums, self._shares, strict=True):
            result += s.weights[:, None] * gram_product(self._columns, s.columns, s.rows, share[:, None] * flat)
        return result.astype(law.dtype).reshape(law.shape)

    def _log_degree(self) -> Array:
        return self._logs

    def _symmetrized(self) -> Affinity:
        problem: Any = self._problem  # kept for k that is not symmetric, and only that is asked here
        # Keys look for queries too, which asks for other pivots: the bound is kept, the rank may differ.
        result = LowRankAffinity(self.domain, self.kernel, problem, self.dtype, both=True, **self._options)
        result.reason = self.reason
        return result


def _features(name: str, value: Any, domain: Domain) -> NDArray[Any]:
    array = check_numpy(name, value, ndim=2, remedy="; convert it (.cpu().numpy()), or use another method")
    if len(array) != domain.size:
        raise InputError(f"{name}: got shape {array.shape}, expected {domain.size} rows, one for each node")
    return np.asarray(array)


def _problem(kernel: Kernel, queries: Floats, keys: Floats | None) -> _Problem:
    """Return what is to be factorized, for queries and keys (None for the same)."""
    nodes, width = queries.shape
    if not isinstance(kernel, ExpDotProduct):
        if keys is not None:
            raise InputError("queries: a radial kernel compares features with themselves; pass the same array")
        return _Problem(kernel, queries, np.zeros(nodes), np.zeros(nodes))
    scale = 1 / math.sqrt(width) if kernel.scale is None else kernel.scale
    if scale < 0:
        raise InputError(
            f"scale: got {scale:g}, expected >= 0, for which the dot product is positive definite; use "
            "method='pairwise'"
        )
    root = math.sqrt(scale)
    with np.errstate(over="ignore", invalid="ignore"):
        # Neither a shift of all queries, nor one of all keys, nor a factor that moves from one to the other changes P:
        # they are chosen so that queries and keys meet, and near 0, where rounding is least.
        centres = queries.mean(axis=0), (queries if keys is None else keys).mean(axis=0)
        q = queries - centres[0]
        k = q if keys is None else keys - centres[1]
        lengths = float((q**2).mean()), float((k**2).mean())
        balance = (lengths[1] / lengths[0]) ** 0.25 if min(lengths) > 0 and max(lengths) < math.inf else 1.0
        points = root * q if keys is None else np.concatenate((root * balance * q, root / balance * k))
        squares = (points**2).sum(axis=1) / 2
        row = squares[:nodes] + scale * (q * centres[1]).sum(axis=1)
        column = squares[-nodes:] + scale * (k * centres[0]).sum(axis=1)
        constant = scale * float((centres[0] * centres[1]).sum())
        shifts = scale * max(_longest(q) * _longest(centres[1]), _longest(k) * _longest(centres[0]))
        rounding = 8 * _EPS * (float(squares.max()) + shifts)
    if not (np.isfinite(row).all() and np.isfinite(column).all() and math.isfinite(constant + rounding)):
        raise InputError("affinity: logits overflow; scale the features or the kernel")
    # The kernel of width 1 on points that the scale has been moved into, so that scale 0 is no exception.
    return _Problem(Gaussian(width=1.0), points, row, column, constant, rounding, _longest(points))


def _longest(vectors: Floats) -> float:
    return math.sqrt(float((np.atleast_2d(vectors) ** 2).sum(axis=1).max()))


def _sums(problem: _Problem, weights: Floats, both: bool) -> tuple[tuple[Sum, ...], Floats]:
    """Return the sums whose total is the degree of k, or with `both` of k + k^T, and the logarithm taken out of it."""
    first, last = slice(0, problem.nodes), slice(len(problem.points) - problem.nodes, len(problem.points))
    terms = [(first, last, problem.row, problem.column)]
    if both:
        terms.append((last, first, problem.column, problem.row))
    logs = [np.log(weights) + column for *_, column in terms]
    rows = [row + log.max() for (_, _, row, _), log in zip(terms, logs, strict=True)]
    top = np.max(rows, axis=0)  # one for each node
    with np.errstate(under="ignore"):
        return tuple(
            Sum(term[0], term[1], np.exp(row - top), np.exp(log - log.max()))
            for term, row, log in zip(terms, rows, logs, strict=True)
        ), top + problem.constant


def _rank_limit(problem: _Problem, max_rank: int | None, limit: float | None) -> int:
    count = len(problem.points)
    needed = problem.nbytes + 8 * count * (BLOCK + 12) + 8 * TILE * BLOCK * 8  # beside the factor: a block, and vectors
    check_memory(f"a low-rank affinity of {problem.nodes} nodes", needed + 8 * count * 8, _REMEDY, limit)
    highest = min(max(problem.nodes // 4, _SMALL_RANK), _LARGE_RANK) if max_rank is None else max_rank
    highest = min(highest, count)
    column = 8 * (count + highest + 4 * min(TILE, count))  # of the factor, its triangle, and what a tile works with
    fits = (min(memory_limit() if limit is None else limit, 2.0**62) - needed) / column
    return min(highest, max(8, int(fits)))
