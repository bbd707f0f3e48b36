"""Truncated neighbourhoods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities.graph import Sparse
from nlflow.affinities.logits import check_sums
from nlflow.affinities.pair_sums import WIDEST, relative_weights, warn_isolated
from nlflow.affinities.regions import BLOCK, LARGEST, Frame, Regions, along_axes, places_in, squared_limit
from nlflow.affinities.sparse import SparseAffinity
from nlflow.domains import Domain
from nlflow.errors import InputError, check_memory, kind_of
from nlflow.kernels import Kernel, RadialKernel

_PAIR_BYTES = 12  # of the matrix
_SURE = 2.0  # times the memory limit: an estimate of so many pairs is not counted any more
_LIGHTEST = 1e-140  # of the weights over the largest: products of two stay in range
_CHUNK = 2**20  # pairs whose weights are computed at a time
_NEAR = 0.5  # of k(0): neighbours with at least this much of it give a lower bound of the degree at little cost


class NeighbourAffinity(SparseAffinity):
    """A radial kernel between scattered nodes, cut off where it is negligible; O(pairs) memory and time an average."""

    # The radius is chosen so that what is left out of a row is, whatever the nodes, at most ``rtol / 2`` of its degree,
    # hence averages are off by at most ``rtol`` times the largest deviation of the signal from its middle.

    def __init__(
        self, kernel: Kernel, domain: Domain, features: NDArray[Any], *, rtol: float, memory_limit: float | None = None
    ) -> None:
        if not isinstance(kernel, RadialKernel):
            raise InputError(
                f"kernel: got {kind_of(kernel)}, expected a radial one for method='sparse': a dot product does "
                "not decay; use method='lowrank' or 'pairwise'"
            )
        if features.shape[1] > WIDEST:
            raise InputError(
                f"features: got {features.shape[1]} dimensions, expected at most {WIDEST} for method='sparse': in "
                "more, few blocks of nodes are too far apart to hold neighbours; use method='lowrank' or 'pairwise'"
            )
        kernel.check_squares()
        weights, log_unit = relative_weights(domain.weights.reshape(-1), _LIGHTEST)
        # In blocks, so that the neighbours of a node are near it in memory too: from a million nodes on, products in a
        # random order take almost three times as long.
        points = np.ascontiguousarray(features, dtype=np.float64)
        frame = Frame(points)
        places = frame.place(points)
        self._order = along_axes(places)
        self._places = places_in(self._order)
        points, weights = points[self._order], weights[self._order]
        nodes = _Nodes(points, frame, places[self._order])
        radius, cut = kernel.support(0.0), 0.0
        if math.isinf(radius):
            near = _graph(kernel, nodes, weights, kernel.support(_NEAR), memory_limit)
            least = float((np.asarray(near.sum(axis=1)).ravel() / weights).min())
            cut = min(0.5 * rtol * least / float(weights.sum()), 0.5)
            radius = kernel.support(cut)
        many = count_neighbours(points, [radius])[0] * len(points)
        _check_pairs(f"about {many:.2g}", many / _SURE, len(points), memory_limit)  # before they are looked for
        graph = _graph(kernel, nodes, weights, radius, memory_limit)
        super().__init__(domain, graph, kernel=kernel, dtype=features.dtype)
        self._log_unit = 2 * log_unit
        self._weights = relative_weights(domain.weights.reshape(-1), _LIGHTEST)[0]
        self.radius = radius
        self.positive_semidefinite = kernel.is_definite(features.shape[1])
        degrees = self._sums[self._order] / weights
        check_sums(degrees)
        self.error_estimate = 2 * cut * float(weights.sum()) / float(degrees.min())
        warn_isolated(degrees, weights * (1 + 1e-12), kernel)

    def _take(self, edges: Sparse) -> None:
        super()._take(edges)
        self._sums, self._alone = self._sums[self._places], self._alone[self._places]

    def _product(self, flat: NDArray[Any]) -> NDArray[Any]:
        return super()._product(flat[self._order])[self._places]

    def _by_nodes(self) -> Sparse:
        from scipy.sparse import csr_array

        graph = self._graph.tocoo()
        order = self._order.astype(graph.row.dtype)  # or each edge would have 8 bytes more
        return csr_array((graph.data, (order[graph.row], order[graph.col])), shape=graph.shape)


def count_neighbours(points: NDArray[Any], radii: Sequence[float], samples: int = 256) -> list[float]:
    # From pairs of a few nodes with more of them, evenly spread over their numbers. A node is among its own.
    from scipy.spatial.distance import cdist

    n = len(points)
    rows, columns = (np.linspace(0, n - 1, min(count, n)).astype(np.intp) for count in (samples, 64 * samples))
    distances = cdist(points[rows], points[columns])
    apart = rows[:, None] != columns
    share = (n - 1) / max(int(np.count_nonzero(apart)), 1)
    return [1 + share * int(np.count_nonzero((distances <= r) & apart)) for r in radii]


def _graph(kernel: RadialKernel, nodes: _Nodes, weights: Floats, radius: float, memory_limit: float | None) -> Sparse:
    """Return w_i w_j k(x_i, x_j), the diagonal included, for all pairs within a radius."""
    from scipy.sparse import csr_array

    counts = nodes.counts(radius)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    _check_pairs(str(indptr[-1]), int(indptr[-1]), len(counts), memory_limit)
    indices, values = nodes.within(radius, indptr)
    uniform, step = bool((weights == 1).all()), max(1, _CHUNK * len(counts) // int(indptr[-1]))
    for start in range(0, len(counts), step):
        rows = slice(start, start + step)
        some = slice(indptr[start], indptr[min(start + step, len(counts))])
        with np.errstate(under="ignore", over="ignore"):  # sums are looked at
            values[some] = np.exp(kernel.log_profile(values[some]))
            if not uniform:
                values[some] *= np.repeat(weights[rows], counts[rows]) * weights[indices[some]]
    ends = indptr.astype(np.int32 if indptr[-1] < 2**31 else np.int64)
    return csr_array((values, indices, ends), shape=(len(counts),) * 2)


def _check_pairs(said: str, count: float, nodes: int, memory_limit: float | None) -> None:
    check_memory(
        f"{said} pairs of neighbours among {nodes} nodes", int(_PAIR_BYTES * count),
        "use a narrower kernel, fewer nodes, a larger rtol or method='pairwise', which stores no pairs, or raise "
        "memory_limit", memory_limit,
    )  # fmt: skip


class _Nodes:
    """Points (N, d) in order, and the boxes of their blocks."""

    def __init__(self, points: Floats, frame: Frame, places: Floats) -> None:
        # NaN is near nothing.
        self._columns = np.full((points.shape[1], -(-len(points) // BLOCK) * BLOCK), np.nan)
        self._columns[:, : len(points)] = points.T
        self._count, self._slack = len(points), frame.slack
        boxes = Regions.of(places, 0.0)
        starts = np.arange(0, len(boxes.lows), BLOCK)
        parents = np.minimum.reduceat(boxes.lows, starts), np.maximum.reduceat(boxes.highs, starts)
        self._boxes = boxes.lows, boxes.highs, *parents

    def counts(self, radius: float) -> NDArray[np.int64]:
        """Return how many nodes, itself among them, are within a radius of each."""
        counts = np.zeros(self._count, np.int64)
        self._loop(radius, counts, np.zeros(1, np.int64), np.empty(0, np.int32), np.empty(0))
        return counts

    def within(self, radius: float, indptr: NDArray[np.int64]) -> tuple[NDArray[np.int32], Floats]:
        """Return these nodes row by row, and their squared distances."""
        indices, squares = np.empty(indptr[-1], np.int32), np.empty(indptr[-1])
        self._loop(radius, np.zeros(self._count, np.int64), indptr, indices, squares)
        return indices, squares

    def _loop(self, radius: float, *arrays: NDArray[Any]) -> None:
        from nlflow.backends.numba.near import loop

        loop("near_pairs")(
            self._columns, *self._boxes, squared_limit(radius, self._slack), min(radius * radius, LARGEST), *arrays
        )
