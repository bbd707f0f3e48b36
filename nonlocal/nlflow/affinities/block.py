"""Affinities of groups of nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow._array import Array, Floats, is_numpy, kept_like, namespace, over_channels
from nlflow.affinities.base import Affinity
from nlflow.affinities.graph import Sparse
from nlflow.domains import Domain
from nlflow.errors import InputError, check_floats, check_integer


class Blocks(Domain):
    """Groups of nodes without places: node (g, i) is member i of group g.

    Parameters
    ----------
    groups, members : int
        G and n.
    weights : array_like of shape (G, n), optional
        Quadrature weights, all > 0; 1 by default.
    """

    def __init__(self, groups: int, members: int, weights: Any = None) -> None:
        self.shape = check_integer("groups", groups, minimum=1), check_integer("members", members, minimum=1)
        self._weights: Floats | None = None
        if weights is None:
            return
        given = check_floats("weights", weights)
        if given.shape != self.shape:
            raise InputError(f"weights: got shape {given.shape}, expected {self.shape}, one for each member")
        if given.min() <= 0:
            raise InputError(f"weights: got {given.min():g}, expected every weight > 0; leave such members out")
        self._weights = given

    @property
    def nodes(self) -> Floats:
        return np.stack([i.ravel() for i in np.indices(self.shape)], axis=1).astype(np.float64)

    @property
    def weights(self) -> Floats:
        return np.ones(self.shape) if self._weights is None else self._weights


class BlockAffinity(Affinity):
    """Groups of n nodes, in which P replaces each member by the (weighted) mean of its group.

    Parameters
    ----------
    groups, members : int
        G and n; signals have shape ``(G, n)`` or ``(G, n, D)``.
    weights : array_like or tensor of shape (G, n), optional
        w_i > 0; a torch tensor for signals of its dtype and device.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.affinities import BlockAffinity
    >>> BlockAffinity(2, 3).average(np.array([[0.0, 0, 3], [1, 2, 3]])).tolist()
    [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    """

    method = "block"

    def __init__(self, groups: int, members: int, weights: Any = None) -> None:
        domain = Blocks(groups, members, weights)
        foreign = weights is not None and not is_numpy(weights) and hasattr(weights, "device")
        super().__init__(
            domain, None, symmetric=True, positive_semidefinite=True, dtype=weights.dtype if foreign else None
        )
        self.reason = "the groups were given"
        self._uniform = weights is None
        self._zeros = (
            namespace(weights).zeros(domain.shape, dtype=weights.dtype, device=weights.device) if foreign else None
        )
        self._shares = domain.weights / domain.weights.max()  # whatever their unit

    def _weights(self, u: Array) -> Array:
        return over_channels(kept_like(self._shares, u), u)

    def _mean(self, weighted: Array, weights: Array | None) -> Array:
        """Return sums over groups divided by those of weights, in float64."""
        xp = namespace(weighted)
        total = xp.sum(weighted, axis=1, keepdims=True, dtype=xp.float64)
        if weights is None:
            return total / self.domain.shape[1]
        return total / xp.sum(weights, axis=1, keepdims=True, dtype=xp.float64)

    def _average(self, u: Array) -> Array:
        weights = None if self._uniform else self._weights(u)
        mean = self._mean(u if weights is None else weights * u, weights)
        xp = namespace(u)
        return xp.asarray(xp.broadcast_to(xp.astype(mean, u.dtype), u.shape), copy=True)

    def _push(self, law: Array) -> Array:
        weights = self._weights(law)
        return namespace(law).astype(self._mean(law, weights) * weights, law.dtype)

    def _log_degree(self) -> Array:
        return np.zeros(self.domain.shape) if self._zeros is None else self._zeros

    def known_spectrum(self) -> Floats | None:
        groups, members = self.domain.shape
        return np.array([1.0] + [1.0] * (groups > 1) + [0.0] * (members > 1))

    def _edge_bound(self) -> int:
        groups, members = self.domain.shape
        return groups * members**2

    def _edges(self) -> Sparse:
        from scipy import sparse

        groups, members = self.domain.shape
        total = self.domain.weights.sum(axis=1)
        columns = np.broadcast_to(np.arange(self.domain.size).reshape(groups, 1, members), (groups, members, members))
        starts = np.arange(0, groups * members**2 + 1, members)
        values = np.repeat(1 / total, members**2)
        return sparse.csr_array((values, columns.ravel(), starts), shape=(self.domain.size,) * 2)
