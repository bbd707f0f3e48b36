"""Sparse affinities: a given graph of edges."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import power_of_two
from nlflow.affinities.base import Affinity
from nlflow.affinities.graph import Sparse
from nlflow.domains import Domain
from nlflow.kernels import Kernel


class SparseAffinity(Affinity):
    """The affinity of a symmetric graph; O(edges) memory and O(edges D) time an average.

    Parameters
    ----------
    domain : Domain
    edges : scipy.sparse.csr_array of shape (N, N)
        W_ij = w_i w_j k_ij >= 0, symmetric, as `Affinity.edges` returns them, with or without a diagonal. Shared, not
        copied. A node without edges keeps its value in averages; its degree is then the mean of the others.
    kernel : Kernel, optional
        That the weights come from; `edges` are without its amplitude.
    dtype : dtype, optional
        What signals must be; either precision by default.
    """

    method = "sparse"

    def __init__(self, domain: Domain, edges: Sparse, *, kernel: Kernel | None = None, dtype: Any = None) -> None:
        super().__init__(domain, kernel, symmetric=True, positive_semidefinite=False, dtype=dtype)
        self.reason = "the edges were given"
        self._graph = edges
        self._log_unit = 0.0  # of the edges
        sums = np.asarray(edges.sum(axis=1, dtype=np.float64)).ravel()
        self._alone = sums == 0
        self._sums = np.where(self._alone, sums[~self._alone].mean() if not self._alone.all() else 1.0, sums)

    def _average(self, u: NDArray[Any]) -> NDArray[Any]:
        size = u.dtype.type(power_of_two(float(np.abs(u).max())))  # small edges times a small signal would be 0
        flat = self.flatten(u / size)
        total = self._product(flat)
        result = np.where(self._alone[:, None], flat, total / self._sums[:, None])
        return np.asarray((result.astype(u.dtype, copy=False) * size).reshape(u.shape))

    def _push(self, law: NDArray[Any]) -> NDArray[Any]:
        # W is symmetric, so that p P = W (p / sums): no degree is multiplied by again.
        flat = np.asarray(self.flatten(law), dtype=np.float64)
        size = power_of_two(float(np.abs(flat).max()))
        least = self._sums.min()  # what the quotients are relative to: they stay within the size of the law
        arrived = self._product(flat / size * (least / self._sums)[:, None]) / least
        result = np.where(self._alone[:, None], flat, arrived * size)
        return np.asarray(result.astype(law.dtype).reshape(law.shape))

    def _product(self, flat: NDArray[Any]) -> NDArray[Any]:
        """Return W u for a signal (N, D)."""
        return np.asarray(self._graph @ flat)

    def _log_degree(self) -> NDArray[Any]:
        return np.asarray(self._log_degree_wide().astype(self.dtype or np.float64, copy=False))

    def _log_degree_wide(self) -> NDArray[Any]:
        logs = np.log(self._sums) - np.log(self.domain.weights.reshape(-1)) + self._log_unit
        return np.asarray(logs.reshape(self.domain.shape))

    def _edge_bound(self) -> int:
        return int(self._graph.nnz)

    def _edges(self) -> Sparse:
        w = self.domain.weights.ravel()
        result = self._graph.astype(np.float64)
        result.data /= np.repeat(w, np.diff(result.indptr)) * w[result.indices]
        return result
