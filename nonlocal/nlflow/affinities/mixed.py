"""The affinity of k + k^T where only averages by k and by k^T are known."""

from __future__ import annotations

from nlflow._array import Array, namespace, over_channels
from nlflow.affinities.base import Affinity


class MixedAffinity(Affinity):
    """The affinity of k + k^T: averages by k and by k^T, weighted with their degrees.

    Parameters
    ----------
    first, second : Affinity
        Of k and of k^T, on one domain.
    """

    def __init__(self, first: Affinity, second: Affinity) -> None:
        super().__init__(first.domain, first.kernel, symmetric=True, positive_semidefinite=False, dtype=first.dtype)
        self.method, self.reason, self.device = first.method, first.reason, first.device
        self._parts = first, second

    @property
    def tracked(self) -> bool:
        """Whether it was made from tensors that require a gradient."""
        return any(part.tracked for part in self._parts)

    def _average(self, u: Array) -> Array:
        xp = namespace(u)
        first, second = self._parts
        one, two = first._average(u), second._average(u)
        logs = second._log_degree_for(u) - first._log_degree_for(u)
        share = over_channels(xp.exp(-xp.logaddexp(xp.zeros_like(logs), logs)), u)  # d / (d + d')
        return share * one + (1 - share) * two

    def _push(self, law: Array) -> Array:
        # The rows of P are those of both parts in these shares, so that nothing is divided by a degree that underflows.
        first, second = self._parts
        logs = second._log_degree_wide() - first._log_degree_wide()
        xp = namespace(logs)
        share, rest = (over_channels(xp.exp(-xp.logaddexp(xp.zeros_like(logs), r)), law) for r in (logs, -logs))
        return first._push(share * law) + second._push(rest * law)

    def _log_degree(self) -> Array:
        first, second = (part._log_degree() for part in self._parts)
        return namespace(first).logaddexp(first, second)

    def _log_degree_wide(self) -> Array:
        first, second = (part._log_degree_wide() for part in self._parts)
        return namespace(first).logaddexp(first, second)

    def _item(self, index: tuple[int, ...]) -> Affinity:
        result = MixedAffinity(*(part._item(index) for part in self._parts))
        result._log_scale = self._log_scale
        return result
