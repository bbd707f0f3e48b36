"""Truncated neighbourhoods of scattered nodes: a decaying kernel, as the sparse matrix of what counts of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities.graph import Sparse
from nlflow.affinities.pair_sums import WIDEST, relative_weights, warn_isolated
from nlflow.affinities.regions import along_tree, places_in
from nlflow.affinities.sparse import SparseAffinity
from nlflow.domains import Domain
from nlflow.errors import InputError, check_memory
from nlflow.kernels import Kernel, RadialKernel

_PAIR_BYTES = 64  # at the moment when pairs, distances, weights and the matrix are there
_LIGHTEST = 1e-140  # of the weights over the largest: products of two stay in range
_CHUNK = 2**22  # pairs whose weights are computed at a time
_NEAR = 0.5  # of k(0): neighbours with at least this much of it give a lower bound of the degree at little cost


class NeighbourAffinity(SparseAffinity):
    """A radial kernel between scattered nodes, cut off where it is negligible; O(pairs) memory and time an average.

    The neighbours come from `scipy.spatial.cKDTree`. The radius is chosen so that what is left out of a row is,
    whatever the nodes, at most ``rtol / 2`` of its degree, hence averages are off by at most ``rtol`` times the largest
    deviation of the signal from its middle; ``error_estimate`` is that bound.

    Parameters
    ----------
    kernel : RadialKernel
    domain : Grid or Points
    features : array of shape (N, d)
        What is compared.
    rtol : float
        Of averages; kernels of compact support are exact.
    memory_limit : float, optional
        Bytes.

    Raises
    ------
    InputError
        For another kernel, or more dimensions than trees are good for.
    MemoryLimitError
        Before the pairs are listed.
    """

    def __init__(
        self, kernel: Kernel, domain: Domain, features: NDArray[Any], *, rtol: float, memory_limit: float | None = None
    ) -> None:
        if not isinstance(kernel, RadialKernel):
            raise InputError(
                f"kernel: got {type(kernel).__name__}, expected a radial one for method='sparse': a dot product does "
                "not decay; use method='lowrank' or 'pairwise'"
            )
        if features.shape[1] > WIDEST:
            raise InputError(
                f"features: got {features.shape[1]} dimensions, expected at most {WIDEST} for method='sparse': in "
                "more, trees find no neighbours faster than all pairs do; use method='lowrank' or 'pairwise'"
            )
        from scipy.spatial import cKDTree

        weights, log_unit = relative_weights(domain.weights.reshape(-1), _LIGHTEST)
        # Along a tree, so that the neighbours of a node are near it in memory too: from a million nodes on, products in
        # a random order take almost three times as long.
        points = np.ascontiguousarray(features, dtype=np.float64)
        self._order = along_tree(points)
        points, weights = points[self._order], weights[self._order]
        tree = cKDTree(points)
        radius, cut = kernel.support(0.0), 0.0
        if math.isinf(radius):
            near = _graph(kernel, tree, points, weights, kernel.support(_NEAR), memory_limit)
            least = float((np.asarray(near.sum(axis=1)).ravel() / weights).min())
            cut = min(0.5 * rtol * least / float(weights.sum()), 0.5)
            radius = kernel.support(cut)
        graph = _graph(kernel, tree, points, weights, radius, memory_limit)
        super().__init__(domain, graph, kernel=kernel, dtype=features.dtype)
        self._log_unit = 2 * log_unit
        self._weights = relative_weights(domain.weights.reshape(-1), _LIGHTEST)[0]
        self.radius = radius
        self.positive_semidefinite = kernel.is_definite(features.shape[1])
        degrees = self._sums / weights
        self._places = places_in(self._order)
        self._sums, self._alone = self._sums[self._places], self._alone[self._places]
        self.error_estimate = 2 * cut * float(weights.sum()) / float(degrees.min())
        warn_isolated(degrees, weights * (1 + 1e-12), kernel)

    def _product(self, flat: NDArray[Any]) -> NDArray[Any]:
        return super()._product(flat[self._order])[self._places]

    def _by_nodes(self) -> Sparse:
        from scipy.sparse import csr_array

        graph = self._graph.tocoo()
        return csr_array((graph.data, (self._order[graph.row], self._order[graph.col])), shape=graph.shape)


def count_neighbours(points: NDArray[Any], radii: Sequence[float], samples: int = 256) -> list[float]:
    """Return estimates of how many nodes, itself among them, are within each radius of a node; O(samples d) time.

    From pairs of a few nodes with more of them, evenly spread over their numbers.
    """
    from scipy.spatial.distance import cdist

    n = len(points)
    rows, columns = (np.linspace(0, n - 1, min(count, n)).astype(np.intp) for count in (samples, 64 * samples))
    distances = cdist(points[rows], points[columns])
    apart = rows[:, None] != columns
    share = (n - 1) / max(int(np.count_nonzero(apart)), 1)
    return [1 + share * int(np.count_nonzero((distances <= r) & apart)) for r in radii]


def _graph(
    kernel: RadialKernel, tree: Any, points: Floats, weights: Floats, radius: float, memory_limit: float | None
) -> Sparse:
    """Return w_i w_j k(x_i, x_j), the diagonal included, for all pairs within a radius."""
    from scipy.sparse import coo_array, csr_array, diags_array

    n = len(points)
    count = int(tree.count_neighbors(tree, radius))
    check_memory(
        f"{count} pairs of neighbours among {n} nodes", _PAIR_BYTES * count,
        "use a narrower kernel, fewer nodes, a larger rtol or method='pairwise', which stores no pairs, or raise "
        "memory_limit", memory_limit,
    )  # fmt: skip
    pairs = tree.query_pairs(radius, output_type="ndarray")
    values = np.empty(len(pairs))
    for start in range(0, len(pairs), _CHUNK):
        i, j = pairs[start : start + _CHUNK].T
        with np.errstate(under="ignore"):
            logs = kernel.log_profile(np.sum((points[i] - points[j]) ** 2, axis=1))
            values[start : start + _CHUNK] = np.exp(logs) * weights[i] * weights[j]
    ends = pairs.astype(np.int32 if n < 2**31 else np.int64)
    half = csr_array(coo_array((values, (ends[:, 0], ends[:, 1])), shape=(n, n)))
    result = csr_array(half + half.T + diags_array(weights * weights))
    result.sort_indices()
    return result
