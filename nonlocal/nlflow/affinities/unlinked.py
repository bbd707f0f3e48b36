"""Nodes that see only themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow._array import Array, Floats, is_numpy, namespace, underflowing
from nlflow.affinities.base import Affinity
from nlflow.affinities.graph import Sparse
from nlflow.domains import Domain
from nlflow.domains.base import check_domain


@underflowing
class Unlinked(Affinity):
    """Nodes that see only themselves: P = I, d = 1 and J = 0.

    For particles, and for reactions at each node by itself.

    Parameters
    ----------
    domain : Domain
    like : tensor, optional
        Of the dtype and device of signals; NumPy arrays by default.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import FisherKPP, GradientFlow, J, Points, solve
    >>> from nlflow.affinities import Unlinked
    >>> flow = GradientFlow(J(Unlinked(Points([0.0, 1.0]))), reaction=FisherKPP(rate=1.0))
    >>> np.round(solve(flow, np.array([0.5, 0.1]), t=1.0).final, 5).tolist()  # 1 / (1 + (1 / u_0 - 1) exp(-t))
    [0.73106, 0.23197]
    """

    method = "unlinked"
    reason = "no node sees another"

    def __init__(self, domain: Domain, like: Array | None = None) -> None:
        check_domain(domain)
        own = None if like is None or is_numpy(like) else like
        super().__init__(
            domain, None, symmetric=True, positive_semidefinite=True, dtype=None if own is None else own.dtype
        )
        self.device = None if own is None else own.device
        self._zeros: Array = np.zeros(domain.shape)
        if own is not None:
            xp = namespace(own)
            self._zeros = xp.zeros(domain.shape, dtype=own.dtype, device=own.device)

    def _average(self, u: Array) -> Array:
        return namespace(u).astype(u, u.dtype, copy=True)

    def _log_degree(self) -> Array:
        return self._zeros

    def _item(self, index: tuple[int, ...]) -> Affinity:
        result = Unlinked(self.domain.item, self._zeros)
        result._log_scale = self._log_scale
        return result

    def known_spectrum(self) -> Floats:
        return np.ones(1)

    def _edge_bound(self) -> int:
        return 0

    def _edges(self) -> Sparse:
        from scipy.sparse import csr_array

        return csr_array((self.domain.size, self.domain.size), dtype=np.float64)

    def _transitions(self) -> Any:
        from scipy.sparse import eye_array

        return eye_array(self.domain.size, format="csr")
