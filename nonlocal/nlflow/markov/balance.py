"""Detailed balance of listed moves, along a spanning tree: O(edges), where the stationary law itself is O(N^3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities.graph import Sparse
from nlflow.affinities.sparse import SparseAffinity
from nlflow.domains import Domain
from nlflow.markov.stationary import SMALLEST

ROUNDING = 1e-11
"""Relative difference of fluxes pi_i P_ij and pi_j P_ji that rounding of the moves may leave on long ways."""
_RANGE = 1e-280  # of fluxes: beyond, light ones have lost digits beside heavy ones


@dataclass(frozen=True)
class Balance:
    """The law that detailed balance along a tree gives to each class of states that communicate.

    Attributes
    ----------
    logs : array of shape (N,)
        Its logarithm; each class has the share of its states of the sum 1.
    misfit : float
        Largest relative difference of pi_i P_ij and pi_j P_ji over all edges; infinite where some move has no way back.
    parts : array of int of shape (N,)
        The class of each state.
    """

    logs: Floats
    misfit: float
    parts: NDArray[np.int32]

    def fluxes(self, moves: Sparse, domain: Domain) -> SparseAffinity | None:
        """Return pi_i P_ij, symmetric, as an affinity with the domain's nodes; None where floats do not hold it."""
        from scipy.sparse import csr_array

        rows = np.repeat(np.arange(len(self.logs)), np.diff(moves.indptr))
        with np.errstate(divide="ignore"):
            logs = np.log(moves.data) + self.logs[rows]
        if logs.min() < math.log(_RANGE):
            return None
        flux = csr_array((np.exp(logs), moves.indices, moves.indptr), shape=moves.shape)
        flux = csr_array((flux + flux.T) / 2)
        return SparseAffinity(domain, flux)


def balance(moves: Any) -> Balance:
    """Return what detailed balance says of the moves of a chain, listed as a sparse matrix.

    log pi_j = log pi_i + log P_ij - log P_ji along the edges of a breadth-first tree. Sums run over ways that double
    their length, so that a way of n edges has log2 n roundings.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, connected_components

    listed = csr_array(moves)
    listed.sort_indices()
    back = listed.T.tocsr()
    back.sort_indices()
    size = listed.shape[0]
    parts = connected_components(listed, directed=True, connection="weak")[1]
    alike = np.array_equal(listed.indptr, back.indptr) and np.array_equal(listed.indices, back.indices)
    if not alike or not listed.nnz or min(listed.data.min(), back.data.min()) < SMALLEST:
        return Balance(np.zeros(size), math.inf, parts)
    rises = np.log(listed.data) - np.log(back.data)
    # One more state, tied to one of each class, makes a single tree.
    first = np.unique(parts, return_index=True)[1]
    starts = np.append(listed.indptr, listed.nnz + len(first))
    graph = csr_array(
        (np.ones(listed.nnz + len(first)), np.append(listed.indices, first), starts), shape=(size + 1, size + 1)
    )
    parents = np.append(breadth_first_order(graph, size, directed=True)[1][:size], size)
    inner = np.flatnonzero(parents[:size] < size)
    edge = csr_array((np.arange(1, listed.nnz + 1), listed.indices, listed.indptr), shape=listed.shape)
    logs = np.zeros(size + 1)
    logs[inner] = rises[np.asarray(edge[parents[inner], inner]).ravel().astype(np.int64) - 1]
    while np.any(parents != size):
        logs += logs[parents]
        parents = parents[parents]
    logs = logs[:size]
    highest = np.full(len(first), -np.inf)
    np.maximum.at(highest, parts, logs)
    logs -= highest[parts]
    logs += np.log(np.bincount(parts) / size / np.bincount(parts, np.exp(logs)))[parts]
    rows = np.repeat(np.arange(size), np.diff(listed.indptr))
    misfit = float(np.abs(np.expm1(rises + logs[rows] - logs[listed.indices])).max())
    return Balance(logs, misfit, parts)
