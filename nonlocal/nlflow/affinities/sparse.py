"""Affinities of graphs."""

from __future__ import annotations

import copy
import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, far_unit, power_of_two
from nlflow.affinities.base import Affinity
from nlflow.affinities.graph import Sparse
from nlflow.affinities.pair_sums import relative_weights
from nlflow.domains import Domain
from nlflow.errors import InputError, check_choice
from nlflow.kernels import Kernel

LAPLACIANS = ("combinatorial", "random walk", "symmetric")


class Kept(dict[str, Any]):
    """What was made of edges and can be made again; empty in a deep copy and in another process."""

    def __reduce__(self) -> tuple[type[Kept], tuple[()]]:
        """Leave all out: factors of SuperLU can neither be copied nor sent."""
        return Kept, ()


class SparseAffinity(Affinity):
    """The affinity of a graph; O(edges) memory and O(edges D) time an average.

    Parameters
    ----------
    domain : Domain
    edges : scipy.sparse.csr_array of shape (N, N)
        W_ij = w_i w_j k_ij >= 0; not copied. A node without edges keeps its value in averages, and its w_i d_i is the
        mean over nodes with edges.
    kernel : Kernel, optional
        That the weights come from; `edges` are without its amplitude.
    dtype : dtype, optional
        Of signals; float32 or float64 by default.
    symmetric : bool
        Whether W_ij = W_ji.
    """

    method = "sparse"

    def __init__(
        self,
        domain: Domain,
        edges: Sparse,
        *,
        kernel: Kernel | None = None,
        dtype: Any = None,
        symmetric: bool = True,
    ) -> None:
        super().__init__(domain, kernel, symmetric=symmetric, positive_semidefinite=False, dtype=dtype)
        self.reason = "the edges were given"
        self._log_unit = 0.0  # of the edges
        self._weights: Floats = domain.weights.reshape(-1)  # w in the edges' own unit
        self._unit = 1.0  # of k in the edges
        self._take(edges)

    def _take(self, edges: Sparse) -> None:
        self._graph = edges
        self.kept = Kept()
        sums = np.asarray(edges.sum(axis=1, dtype=np.float64)).ravel()
        self._alone = sums == 0
        self._some_alone = bool(self._alone.any())
        self._sums = np.where(self._alone, sums[~self._alone].mean() if not self._alone.all() else 1.0, sums)

    def _average(self, u: NDArray[Any]) -> NDArray[Any]:
        flat, size = self.flatten(u), far_unit(u)  # a small edge times a small signal would be 0
        total = self._product(flat if size == 1 else flat / u.dtype.type(size))
        total /= self._sums[:, None]
        if self._some_alone:
            total = np.where(self._alone[:, None], flat / size, total)
        return np.asarray((total if size == 1 else total * size).astype(u.dtype, copy=False).reshape(u.shape))

    def _push(self, law: NDArray[Any]) -> NDArray[Any]:
        # p P = W^T (p / sums), so that no degree is multiplied by again.
        flat = np.asarray(self.flatten(law), dtype=np.float64)
        size = power_of_two(float(np.abs(flat).max()))
        least = self._sums.min()  # what the quotients are relative to: they stay within the size of the law
        shares = flat / size * (least / self._sums)[:, None]
        arrived = self._product(shares) if self.symmetric else np.asarray(self._graph.T @ shares)
        # Walkers stay at nodes that no edge leaves; by edges of one direction others come there.
        result = np.where(self._alone[:, None], flat, 0.0) + arrived / least * size
        return np.asarray(result.astype(law.dtype).reshape(law.shape))

    def _product(self, flat: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(self._graph @ flat)

    def _log_degree(self) -> NDArray[Any]:
        return np.asarray(self._log_degree_wide().astype(self.dtype or np.float64, copy=False))

    def _log_degree_wide(self) -> NDArray[Any]:
        logs = np.log(self._sums) - np.log(self.domain.weights.reshape(-1)) + self._log_unit
        return np.asarray(logs.reshape(self.domain.shape))

    def _symmetrized(self) -> Affinity:
        result = copy.copy(self)
        result.symmetric = True
        result._take(type(self._graph)(self._graph + self._graph.T))
        return result

    def without_loops(self) -> SparseAffinity:
        """Return the graph without self-loops if some node's outweighs its other edges, else this one."""
        # Loops cancel from D - W, and so from the minimizers of J, but hide the digits of lighter edges in averages. It
        # is kept.
        loops = self._graph.diagonal()
        if not np.any(2 * loops > np.asarray(self._graph.sum(axis=1)).ravel()):
            return self
        if "without loops" not in self.kept:
            edges = self._graph.copy()
            edges.data[np.repeat(np.arange(len(loops)), np.diff(edges.indptr)) == edges.indices] = 0
            edges.eliminate_zeros()
            result = copy.copy(self)
            result._take(edges)
            self.kept["without loops"] = result
        found: SparseAffinity = self.kept["without loops"]
        return found

    def _edge_bound(self) -> int:
        return int(self._graph.nnz)

    def _by_nodes(self) -> Sparse:
        """Return a copy of W in float64, rows and columns numbered as the nodes are."""
        return self._graph.astype(np.float64)

    def _edges(self) -> Sparse:
        result = self._by_nodes()
        result.data /= np.repeat(self._weights, np.diff(result.indptr)) * self._weights[result.indices]
        result.data *= self._unit
        return result

    def _transitions(self) -> Sparse:
        from scipy.sparse import diags_array

        result = self._by_nodes()
        result.data /= np.repeat(self._sums, np.diff(result.indptr))
        return type(result)(result + diags_array(self._alone.astype(np.float64))) if self._some_alone else result

    # ---- what graphs are asked for

    @cached_property
    def components(self) -> NDArray[np.int32]:
        """Number of the connected component of each node, shape ``domain.shape``; edges join their ends both ways."""
        from scipy.sparse.csgraph import connected_components

        labels = connected_components(self._by_nodes(), directed=True, connection="weak")[1]
        return np.asarray(labels, dtype=np.int32).reshape(self.domain.shape)

    @cached_property
    def component_count(self) -> int:
        """How many there are."""
        return int(self.components.max()) + 1

    def laplacian(self, normalization: str = "combinatorial") -> Sparse:
        """Return a Laplacian of the graph; signals are columns of N nodes in C order.

        Parameters
        ----------
        normalization : {'combinatorial', 'random walk', 'symmetric'}
            D - W, I - D^-1 W = I - P, or I - D^-1/2 W D^-1/2 with W_ij = k_ij and D = diag(d), of k and not of
            K = k + k^T, for quadrature weights of 1. With weights w they are D (I - P), I - P and
            (w d)^1/2 (I - P) (w d)^-1/2.

        Returns
        -------
        scipy.sparse.csr_array of shape (N, N)

        Raises
        ------
        InputError
            For the symmetric one of an affinity that is not symmetric.
        NumericalError
            When the degrees of the combinatorial one overflow.
        """
        from scipy.sparse import csr_array, diags_array

        check_choice("normalization", normalization, LAPLACIANS)
        if normalization == "symmetric" and not self.symmetric:
            raise InputError(
                "normalization: got 'symmetric' for a graph whose edges i -> j and j -> i differ, expected "
                "'combinatorial' or 'random walk'; symmetrized() has the graph of k + k^T"
            )
        walk = diags_array(np.ones(self.domain.size)) - self._transitions()
        if normalization == "random walk":
            return csr_array(walk)
        if normalization == "combinatorial":
            return csr_array(diags_array(self.degree.ravel().astype(np.float64)) @ walk)
        root = np.sqrt(self._sums)
        return csr_array(diags_array(root) @ walk @ diags_array(1 / root))

    # ---- built from k

    @classmethod
    def from_weights(cls, domain: Domain, k: Sparse, *, symmetric: bool) -> SparseAffinity:
        """Return the affinity of the weights k_ij >= 0, float64, which are changed in place."""
        largest = float(k.data.max(initial=0.0))
        # Only where sums of products could overflow, or lose digits: other weights stay the numbers they are.
        unit = 1.0 if 1e-150 < largest < 1e150 else power_of_two(largest)
        weights, log_unit = relative_weights(domain.weights.reshape(-1), 1e-140)
        k.data /= unit
        if np.any(weights != 1):
            k.data *= np.repeat(weights, np.diff(k.indptr))
            k.data *= weights[k.indices]
            if k.nnz and k.data.min() < np.finfo(np.float64).tiny:
                raise InputError(
                    "graph: got light edges between light nodes, whose w_i w_j k_ij underflow beside the others; "
                    "leave these edges out, or use a domain with weights of one size"
                )
        result = cls(domain, k, symmetric=symmetric)
        result._weights, result._unit = weights, unit
        result._log_unit = 2 * log_unit + math.log(unit)
        return result
