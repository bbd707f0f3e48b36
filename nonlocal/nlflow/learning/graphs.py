"""Graphs of points."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, constant_like, is_numpy, namespace, to_numpy, underflowing
from nlflow.affinities import Affinity, DenseAffinity, SparseAffinity, affinity, affinity_from_graph
from nlflow.affinities.nearest import Neighbours, nearest_neighbours
from nlflow.affinities.pair_sums import PairSums
from nlflow.backends.threads import one_blas_thread
from nlflow.domains import Points
from nlflow.errors import InputError, check_detached, renamed, shortened
from nlflow.kernels import Gaussian, RadialKernel
from nlflow.learning.inputs import is_precomputed, on_host, symmetrized, weights_of
from nlflow.learning.widths import VariableWidths, median_rate, width_curve

DENSE_NODES = 4096
"""Up to here all pairs are kept as a matrix without its diagonal."""
_ROWS = 2**22  # pairs of new and old points at a time
_EXACT = 1e-10  # relative error of k up to which distances come from a product of matrices
_ALONE = 1e-9  # of a degree: what a node sees of others is rounding below
_LEAST = math.log(np.finfo(np.float64).smallest_subnormal)  # of a weight: below it is 0
_FAINT = 1e-100  # weights among all pairs, beside 1 for a point itself
_NARROW = 10  # over the median squared distance: a gamma that tells near from far
SELF_TUNING = Gaussian(width=math.sqrt(0.5))
"""exp(-r^2), of distances over local widths."""


@dataclass(frozen=True)
class Recipe:
    """How a graph is made of points; with `loops` nodes see themselves."""

    affinity: Any = "knn"
    gamma: float | None = None
    n_neighbors: int | None = None
    accuracy: float | None = 1e-6
    memory_limit: float | None = None
    metric: str = "euclidean"
    search: str = "auto"
    keep: str = "either"
    loops: bool = False
    usual: int = 10  # neighbours where no number is given
    beta: float | None = None  # widths follow the density to this power

    def __post_init__(self) -> None:
        for name in ("gamma", "n_neighbors", "accuracy", "memory_limit"):
            check_detached(name, getattr(self, name))  # also those that this graph has no use for
        varying = ("rbf",) if self.beta is None else ("rbf", "knn")
        searched = ("knn",) if self.beta is None else varying
        for name, value, kinds, remedy in (
            ("gamma", self.gamma, varying, "leave it out, or pass affinity='rbf'"),
            ("metric", None if self.metric == "euclidean" else self.metric, ("knn",), "pass affinity='knn'"),
            ("beta", self.beta, ("rbf", "knn"), "leave it out, or pass affinity='knn'"),
            ("n_neighbors", self.n_neighbors, ("knn",), "leave it out, or pass affinity='knn'"),
            ("search", None if self.search == "auto" else self.search, searched, "pass affinity='knn'"),
            ("keep", None if self.keep == "either" else self.keep, ("knn",), "pass affinity='knn'"),
        ):
            if value is not None and not (isinstance(self.affinity, str) and self.affinity in kinds):
                raise InputError(
                    f"{name}: got {value!r} with affinity={shortened(repr(self.affinity), 60)}, in which it has no "
                    f"part; {remedy}"
                )

    def neighbours_of(self, size: int) -> int:
        others = size - 1
        if self.affinity == "rbf":
            return others
        if self.n_neighbors is None:
            return min(self.usual, others)
        if self.n_neighbors > others:
            raise InputError(
                f"n_neighbors: got {self.n_neighbors} for {size} samples, expected at most {others}, the number of "
                "others"
            )
        return self.n_neighbors


@dataclass(frozen=True)
class AtOthers:
    """Averages at other points."""

    averages: Array
    seen: NDArray[np.bool_]  # points that see any
    far: NDArray[np.bool_]  # points whose weights are all 0 in floats
    widths: Floats | None = None


@underflowing
class PointGraph:
    """The affinity of N points, with what learning asks of it."""

    def __init__(self, recipe: Recipe, points: Any, weights: Floats | None = None) -> None:
        self._recipe, self._points = recipe, points
        count = points.shape[0]
        self.weights = np.ones(count) if weights is None else weights
        self._domain = Points(np.arange(float(count)), self.weights)
        self._edges: Any = None
        self._kernel: RadialKernel | None = None
        self._search: Neighbours | None = None
        self.widths: VariableWidths | None = None
        given = recipe.affinity
        if isinstance(given, Affinity):
            if recipe.loops:
                raise InputError(
                    "affinity: got an Affinity, expected 'rbf', 'knn', 'precomputed' or a radial kernel here"
                )
            self.affinity = self._checked(given)
        elif isinstance(given, RadialKernel):
            self.affinity = self._all_pairs(given)
        elif isinstance(given, str) and given == "rbf" and recipe.beta is None:
            self._check_several()
            gamma = width_curve(points).gamma if recipe.gamma is None else recipe.gamma
            self.affinity = self._all_pairs(Gaussian(width=1 / math.sqrt(2 * gamma)))
        elif isinstance(given, str) and given in ("rbf", "knn"):
            self._points = on_host(points)  # neighbours are found, and their few edges kept, on the CPU
            self.affinity = self._nearest()
        else:
            self.affinity = self._given() if is_precomputed(given) else self._called(given)

    def weighted(self, weights: Floats) -> PointGraph:
        if self._edges is None:
            return PointGraph(self._recipe, self._points, weights)
        result = copy.copy(self)
        result.__dict__.pop("own", None)
        result.weights, result._domain = weights, Points(np.arange(float(self.size)), weights)
        result.affinity = affinity_from_graph(self._edges, result._domain, memory_limit=self._recipe.memory_limit)
        return result

    def slowed(self, times: Floats) -> PointGraph:
        from scipy.sparse import diags_array

        result, sums = copy.copy(self), self._edges @ self.weights
        result.__dict__.pop("own", None)
        result._edges = (self._edges + diags_array(sums * (times - 1) / self.weights)).tocsr()
        result.affinity = affinity_from_graph(result._edges, self._domain, memory_limit=self._recipe.memory_limit)
        return result

    @property
    def size(self) -> int:
        return self.affinity.domain.size

    def _checked(self, given: Affinity) -> Affinity:
        count = self._points.shape[0]
        if given.domain.size != count:
            raise InputError(f"affinity: got one of {given.domain.size} nodes for {count} points")
        if not given.symmetric or given.domain.leading:
            raise InputError("affinity: got one that is not symmetric, or of a batch; take its symmetrized()")
        return given

    def _all_pairs(self, kernel: RadialKernel) -> Affinity:
        points, recipe = self._points, self._recipe
        self._kernel, count, domain = kernel, len(points), self._domain
        self._check_several()
        if count <= DENSE_NODES:
            dense = _dense(kernel, domain, points, recipe)
            dense.reason = f"no more than {DENSE_NODES} points: all pairs as a matrix"
            return dense
        accuracy = recipe.accuracy if is_numpy(points) else None
        return affinity(kernel, domain, points, rtol=accuracy, memory_limit=recipe.memory_limit)

    def _check_several(self) -> None:
        if self._points.shape[0] == 1:
            raise InputError("X: got 1 sample, expected at least 2, between which there are edges")

    def _nearest(self) -> Affinity:
        from scipy.sparse import eye_array

        self._check_several()
        recipe, size = self._recipe, self._points.shape[0]
        count = recipe.neighbours_of(size)
        if recipe.affinity == "rbf" and count > DENSE_NODES:
            raise InputError(
                f"X: got {size} samples for widths between all pairs, expected at most {DENSE_NODES + 1}; pass "
                "affinity='knn' with n_neighbors"
            )
        with renamed("points", "X"):
            self._search = nearest_neighbours(
                self._points, count, recipe.search, recipe.memory_limit, metric=recipe.metric
            )
            if recipe.beta is None:
                graph = self._search.graph(SELF_TUNING, recipe.keep, local=True)
            else:
                self.widths = VariableWidths(self._search, recipe.beta, recipe.gamma)
                graph = self._search.graph(SELF_TUNING, recipe.keep, local=self.widths.points, faintest=_FAINT)
        if recipe.loops:
            graph = graph + eye_array(size, format="csr")
        self._edges = graph
        result = affinity_from_graph(graph, self._domain)
        result.reason = f"{result.reason}; {self._search.reason}"
        return result

    def _given(self) -> Affinity:
        self._edges = self._between(symmetrized(on_host(self._points)))
        try:
            return affinity_from_graph(self._edges, self._domain, memory_limit=self._recipe.memory_limit)
        except InputError as error:  # which calls them a graph
            raise InputError(
                f"X: {str(error).removeprefix('graph: ')}; affinity='precomputed' takes weights"
            ) from error

    def _called(self, kernel: Any) -> Affinity:
        """Return the affinity of the weights that a function of two sets of points returns."""
        count = self._points.shape[0]
        weights = weights_of(kernel, self._points, self._points)
        self._edges = self._between(weights / 2 + weights.T / 2)
        try:
            result = affinity_from_graph(self._edges, self._domain, memory_limit=self._recipe.memory_limit)
        except InputError as error:  # which calls them a graph
            raise InputError(f"affinity: of {count} samples, {str(error).removeprefix('graph: ')}") from error
        result.reason = f"{result.reason}; weights of {getattr(kernel, '__name__', type(kernel).__name__)}"
        return result

    def _between(self, weights: Any) -> Any:
        """Return weights without those of loops, which have no part here: beside a loop others lose their digits."""
        from scipy.sparse import csr_array, diags_array

        own = np.asarray(weights.diagonal())
        if self._recipe.loops or not own.any() or not own.min() >= 0:  # negative ones and NaN are refused as edges
            return weights
        return csr_array(weights) - diags_array(own)

    # ---- what nodes see

    @cached_property
    def own(self) -> Floats:
        """Share of each node's degree that is its own loop, 0 for an affinity that was given and keeps no matrix."""
        p = self.affinity
        if isinstance(p, DenseAffinity):
            return np.asarray(np.diagonal(to_numpy(p.matrix)), np.float64)
        if isinstance(p, SparseAffinity) and self._kernel is None:
            return np.asarray(p._transitions().diagonal(), np.float64)
        if self._kernel is None:
            return np.zeros(self.size)
        logs = np.asarray(to_numpy(p._log_degree_wide()), np.float64).ravel()  # k(x, x) = 1, and so are the weights
        return np.minimum(np.exp(-logs), 1.0)

    def parts(self, *, weakest: float = 0.0) -> NDArray[np.int64]:
        """Return the number of each node's component; of all pairs those with P_ij > `weakest` are connected."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components

        p = self.affinity
        if isinstance(p, SparseAffinity):
            return np.asarray(p.components.ravel(), np.int64)
        if isinstance(p, DenseAffinity):
            there = to_numpy(p.matrix) > weakest
            if _all_from_first(there):
                return np.zeros(self.size, np.int64)
            edges: Any = csr_array(there)
            return np.asarray(connected_components(edges, directed=True, connection="weak")[1], np.int64)
        alone = self.own > 1 - _ALONE
        return np.where(alone, 1 + np.cumsum(alone), 0)

    def remedy(self) -> str:
        """Return advice for labels that do not reach all nodes."""
        given, recipe = self._recipe.affinity, self._recipe
        if isinstance(given, RadialKernel):
            return "pass a kernel with a larger width, or affinity='knn', whose widths are local"
        if isinstance(given, str) and given == "knn":
            count = recipe.neighbours_of(self.size)
            more = f"pass more neighbours: n_neighbors={2 * count} in place of {count}"
            return f"{more}, or keep='either'" if recipe.keep == "both" else more
        if isinstance(given, str) and given == "rbf":
            rate = median_rate(self._points)
            used = width_curve(self._points).gamma if recipe.gamma is None else recipe.gamma
            return (
                f"the Gaussian of gamma={used:g} has the width {1 / math.sqrt(2 * used):.2g}, and the median distance "
                f"of two points is {1 / math.sqrt(rate):.2g}: pass affinity='knn', whose widths are local, or gamma="
                f"{_NARROW * rate:.2g}, a width of a quarter of that"
            )
        return "join the parts by edges"

    # ---- averages at other points

    def average_at(self, points: Any, values: Array, known: NDArray[np.bool_]) -> AtOthers:
        """Return averages sum_j k(x, x_j) v_j / sum_j k(x, x_j) over the `known` training points."""
        if self._search is not None:
            return self._average_of_neighbours(self._search, points, values, known)
        xp, there = namespace(values), constant_like(known * self.weights, values)[:, None]
        sums, far = self._sums_at(points, xp.concat([values * there, there], axis=1))
        return AtOthers(*_over_total(sums), far)

    def _average_of_neighbours(
        self, search: Neighbours, points: Any, values: Array, known: NDArray[np.bool_]
    ) -> AtOthers:
        """As `average_at`, without a look at points that are nobody's neighbours."""
        from scipy.sparse import csr_array

        with renamed("points", "X"):
            rows, highest, widths = search.rows(on_host(points), SELF_TUNING, self.widths)
        seen, places = np.unique(rows.indices, return_inverse=True)
        there = (known[seen] * self.weights[seen]).astype(values.dtype)[:, None]
        signal = np.concatenate([values[seen] * there, there], axis=1)
        few = csr_array((rows.data, places, rows.indptr), shape=(rows.shape[0], len(seen)))
        return AtOthers(*_over_total(few @ signal), highest < _LEAST, widths)

    def _sums_at(self, points: Any, signal: Array) -> tuple[Array, NDArray[np.bool_]]:
        """Return weighted sums of a signal at other points, each row in its own unit, and which points are far."""
        if is_precomputed(self._recipe.affinity):
            return np.asarray(points @ signal), np.zeros(points.shape[0], np.bool_)
        if self._kernel is None and callable(self._recipe.affinity):
            rows = weights_of(self._recipe.affinity, self._points, points).T  # as scikit-learn calls it
            return np.asarray(rows @ signal), np.zeros(points.shape[0], np.bool_)
        if self._kernel is None:
            raise InputError(
                "X: got points to predict at with an Affinity that was given, which says nothing about other points; "
                "use transduction_, or fit with affinity='rbf', 'knn' or a kernel"
            )
        if not is_numpy(signal):
            return self._by_rows(points, signal)
        sums, totals, _ = PairSums(self._kernel, points, self._points, np.ones(self.size))(signal)
        far = totals < 1e-200
        if far.any():  # from all points: in log space the nearest still count
            sums[far], far[far] = self._by_rows(points[far], signal)
        return sums.astype(signal.dtype, copy=False), far

    def _by_rows(self, points: Any, signal: Array) -> tuple[Array, NDArray[np.bool_]]:
        kernel, xp = self._kernel, namespace(signal)
        assert kernel is not None
        step, rows, far = max(1, _ROWS // self.size), [], []
        for start in range(0, len(points), step):
            logs = kernel.log_matrix(points[start : start + step], self._points)
            highest = xp.max(logs, axis=1, keepdims=True)
            rows.append(xp.astype(xp.exp(logs - highest), signal.dtype) @ signal)
            far.append(to_numpy(highest)[:, 0] < _LEAST)
        return xp.concat(rows, axis=0), np.concatenate(far)

    def as_signal(self, values: Floats) -> Array:
        if is_numpy(self._points) or not hasattr(self._points, "detach"):
            dtype = self.affinity.dtype or (np.float32 if getattr(self._points, "dtype", None) == np.float32 else None)
            return np.asarray(values, dtype or np.float64)
        return constant_like(values, self._points)


def _over_total(sums: Array) -> tuple[Array, NDArray[np.bool_]]:
    xp, total = namespace(sums), sums[:, -1:]
    some = total > 0
    return sums[:, :-1] / xp.where(some, total, xp.ones_like(total)), to_numpy(some)[:, 0]


def _dense(kernel: RadialKernel, domain: Points, points: Any, recipe: Recipe) -> DenseAffinity:
    """Return the affinity of all pairs as a matrix; distances of Gaussians by one product where it has the digits."""
    width = kernel.gaussian_width
    if not is_numpy(points) or width is None:
        return DenseAffinity.from_features(kernel, domain, points, points, recipe.memory_limit, loops=recipe.loops)
    with np.errstate(over="ignore", invalid="ignore"):  # such points have no digits to spare
        x = points.astype(np.float64)
        x = (x - x.mean(axis=0)) / (math.sqrt(2) * width)  # so that log k = -|x - y|^2
        squares = (x * x).sum(axis=1)
        # Each logarithm is a sum of d + 2 products, whose moduli are below 4 max |x|^2 in all.
        rounding = 4 * (x.shape[1] + 2) * float(np.finfo(np.float64).eps) * float(squares.max())
    if not rounding < _EXACT:
        return DenseAffinity.from_features(kernel, domain, points, points, recipe.memory_limit, loops=recipe.loops)
    left = np.column_stack([2 * x, -squares, -np.ones(len(x))])
    right = np.column_stack([x, np.ones(len(x)), squares]).T

    def logs(start: int, stop: int) -> Floats:
        block: Floats = np.minimum(left[start:stop] @ right, 0)
        if not recipe.loops:
            own = np.arange(start, stop)
            block[own - start, own] = -math.inf
        return block

    with one_blas_thread():
        return DenseAffinity(
            domain, kernel, logs, points, symmetric=True, memory_limit=recipe.memory_limit,
            positive_semidefinite=recipe.loops and kernel.is_definite(x.shape[1]),
        )  # fmt: skip


def _all_from_first(there: NDArray[np.bool_]) -> bool:
    """Tell whether walks along the entries of a matrix come from the first node to all others; reads a row once."""
    seen = there[0].copy()
    seen[0] = True
    new = np.flatnonzero(seen)[1:]
    while len(new) and not seen.all():
        found = there[new].any(axis=0) & ~seen
        seen |= found
        new = np.flatnonzero(found)
    return bool(seen.all())
