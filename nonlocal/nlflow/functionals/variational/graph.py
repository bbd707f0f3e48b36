"""The graph of an affinity: its edges by rows, and sums over them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities import Affinity, SparseAffinity
from nlflow.domains import Domain


def edge_loop(name: str, dtype: Any = np.float64) -> Any:
    """Return a compiled loop over edges; imported here so that numba is loaded only where a loop is needed."""
    from nlflow.backends.numba.edges import loop

    return loop(name, np.dtype(dtype).name)


class Graph:
    """Edges i -> j with weights W_ij = w_i w_j K_ij, each kept at both of its ends.

    Parameters
    ----------
    affinity : Affinity
        Of k; its edges are listed by `Affinity.edges`.
    memory_limit : float, optional
        Bytes.

    Attributes
    ----------
    starts : array of shape (N + 1,)
        The edges of node i are starts[i] ... starts[i + 1] - 1.
    ends : array of shape (edges,)
        The node j that an edge leads to.
    weights : array of shape (edges,)
    """

    def __init__(self, affinity: Affinity, memory_limit: float | None = None) -> None:
        self.domain: Domain = affinity.domain
        self._sparse = affinity.edges(memory_limit)
        self.starts = self._sparse.indptr.astype(np.int64)
        self.ends = self._sparse.indices.astype(np.int32, copy=False)
        self.weights: NDArray[Any] = self._sparse.data

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def heads(self) -> NDArray[Any]:
        """The node i of each edge i -> j."""
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    @cached_property
    def reverse(self) -> NDArray[np.int64]:
        """Number of the edge j -> i for each edge i -> j."""
        return np.asarray(self._with(np.arange(len(self))).T.tocsr().data)

    @cached_property
    def degree(self) -> Floats:
        """sum_j W_ij, shape (N,)."""
        return np.asarray(self._sparse.sum(axis=1, dtype=np.float64)).ravel()

    def lengths(self, u: Floats) -> Floats:
        """Return |u_i - u_j| for each edge; u is (N, D), norms are Euclidean over channels."""
        out = np.empty(len(self))
        edge_loop("edge_lengths")(self.starts, self.ends, u, out)
        return out

    def flux(self, weights: Floats, u: Floats) -> Floats:
        """Return sum_j weights_ij (u_i - u_j), shape (N, D)."""
        out = np.empty_like(u)
        edge_loop("edge_flux")(self.starts, self.ends, weights, u, out)
        return out

    def row_sums(self, values: Floats) -> Floats:
        """Return the sum of an edge function over the edges of each node, shape (N,)."""
        return np.asarray(self._with(values).sum(axis=1)).ravel()

    def summation(self, dtype: Any = np.float64) -> Any:
        """Return the matrix that sums over the edges of each node, shape (N, edges)."""
        from scipy.sparse import csr_array

        edges = len(self)
        return csr_array((np.ones(edges, dtype), np.arange(edges), self.starts), shape=(len(self.starts) - 1, edges))

    def over_edges(self, values: Floats) -> Floats:
        """Return (v_i + v_j) / 2 for each edge i -> j of a node function v."""
        return np.asarray((np.repeat(values, np.diff(self.starts)) + values[self.ends]) / 2)

    def affinity(self, weights: Floats) -> SparseAffinity:
        """Return the affinity k with w_i w_j (k_ij + k_ji) = weights_ij."""
        return SparseAffinity(self.domain, self._with(weights / 2))

    def _with(self, values: NDArray[Any]) -> Any:
        return type(self._sparse)((values, self._sparse.indices, self._sparse.indptr), shape=self._sparse.shape)
