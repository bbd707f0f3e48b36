"""Checks of logits, and affinities of k + k^T."""

from __future__ import annotations

import numpy as np

from nlflow._array import Array, Floats, namespace, over_channels, to_numpy
from nlflow.affinities.base import Affinity
from nlflow.domains.mask import Mask
from nlflow.errors import InputError
from nlflow.kernels import Kernel

_LARGEST = 1e290
_SAMPLED = 32  # nodes between which symmetry is looked at


def properties(kernel: Kernel, queries: Array, keys: Array, mask: Mask | None = None) -> dict[str, bool]:
    same = queries is keys
    # Of a definite matrix what lies between nodes that are there is definite; what is left of it by windows may not be.
    whole = mask is None or not (mask.causal or mask.window is not None or mask.rule is not None)
    return {
        "symmetric": same and kernel.symmetric and not (mask is not None and mask.causal),
        "positive_semidefinite": same and kernel.is_definite(int(keys.shape[-1])) and whole,
    }


def check_symmetric(kernel: Kernel, queries: Array, keys: Array) -> None:
    if queries is not keys or not kernel.symmetric:
        return
    few = keys[:: max(1, len(keys) // _SAMPLED)]
    logs = to_numpy(kernel.log_matrix(few, few)).astype(np.float64)
    same = np.isclose(logs, logs.T, rtol=1e-3, atol=1e-3) | (logs == logs.T)
    if not same.all():
        i, j = np.argwhere(~same)[0]
        raise InputError(
            f"kernel: {type(kernel).__name__} has log k = {logs[i, j]:.6g} between two nodes and {logs[j, i]:.6g} "
            "back, though it says that it is symmetric; set symmetric = False in its class, or average both"
        )


def check_rows(highest: Array, start: int = 0) -> None:
    xp = namespace(highest)
    wrong = ~xp.isfinite(highest)
    if not bool(xp.any(wrong)):
        return
    row = int(xp.argmax(xp.astype(wrong, xp.int32)))
    if float(highest[row]) == -np.inf:
        what = "is zero or not finite; every node needs a neighbour (itself, say)"
    else:
        what = "has logits that overflow; scale the features or the kernel"
    raise InputError(f"affinity: row {start + row} {what}")


def check_sums(totals: Floats) -> None:
    wrong = np.flatnonzero(~((totals > 0) & (totals < _LARGEST)))
    if len(wrong):
        raise InputError(
            f"affinity: row {wrong[0]} has weights whose sum is {totals[wrong[0]]:.4g}, expected one > 0 and < "
            f"{_LARGEST:g}; use method='dense', whose rows are relative to their largest weight, or scale the features"
        )


def log_transitions(logits: Array, weights: Floats) -> Floats:
    logs = to_numpy(logits) + np.log(weights.ravel())
    return np.asarray(logs - np.logaddexp.reduce(logs, axis=1, keepdims=True))


class MixedAffinity(Affinity):
    """The affinity of k + k^T from those of k and of k^T, weighted with their degrees."""

    def __init__(self, first: Affinity, second: Affinity) -> None:
        super().__init__(first.domain, first.kernel, symmetric=True, positive_semidefinite=False, dtype=first.dtype)
        self.method, self.reason, self.device = first.method, first.reason, first.device
        self._parts = first, second

    @property
    def tracked(self) -> bool:
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
