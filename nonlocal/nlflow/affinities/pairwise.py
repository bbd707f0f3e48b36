"""Affinities without a matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, power_of_two
from nlflow.affinities.base import Affinity
from nlflow.affinities.logits import MixedAffinity, check_sums, log_transitions, properties
from nlflow.affinities.pair_sums import PairSums, warn_isolated
from nlflow.affinities.regions import BLOCK
from nlflow.domains import Domain
from nlflow.kernels import ExpDotProduct, Kernel


class PairwiseAffinity(Affinity):
    """The weights between all pairs of nodes, computed at each average: O(N d) memory and O(N^2 (d + D)) time."""

    # Accurate to rounding; blocks of nodes that are so far apart that their weights cannot be seen are skipped. With
    # `rtol` more blocks of a radial kernel are skipped: what is left out of a row is at most ``rtol / 2`` of its
    # degree, hence averages are off by at most ``rtol`` times the largest deviation of the signal from its middle, and
    # by rounding. It is left out for both nodes of a pair, so P stays self-adjoint, and constants stay.

    method = "pairwise"
    terms = BLOCK
    kernel: Kernel

    def __init__(
        self,
        kernel: Kernel,
        domain: Domain,
        queries: NDArray[Any],
        keys: NDArray[Any],
        *,
        rtol: float = 0.0,
        memory_limit: float | None = None,
    ) -> None:
        same = queries is keys
        super().__init__(domain, kernel, dtype=keys.dtype, **properties(kernel, queries, keys))
        # A copy, since the features may change later; of one array where both are one.
        keys = np.array(keys)
        self._queries, self._keys = (keys if same else np.array(queries)), keys
        self._limit = memory_limit
        self._weights = domain.weights.reshape(-1)
        self.pairs = PairSums(kernel, self._queries, self._keys, self._weights, rtol=rtol)
        self.error_estimate = rtol if self.pairs.approximates else 0.0
        self._backward: PairSums | None = None
        self._degrees: dict[str, tuple[Floats, Floats]] = {}

    @property
    def _to_keep(self) -> int:
        # Tables in float64, and the degrees.
        tables = 0 if self._degrees else 8 * self._keys.shape[0] * (2 * self._keys.shape[1] + 4)
        return self.memory_bytes + tables

    def _average(self, u: NDArray[Any]) -> NDArray[Any]:
        name = self.pairs.precision(u.dtype)
        known = self._degrees.get(name)
        size = u.dtype.type(power_of_two(float(np.abs(u).max())))  # small weights times a small signal would be 0
        sums, totals, peaks = self.pairs(self.flatten(u / size), degrees=known is None, memory_limit=self._limit)
        if known is None:
            self._learn(name, totals, peaks)
        else:
            totals, _ = known  # relative to the same logits, which depend on the features alone
        return np.asarray(((sums / totals[:, None]).astype(u.dtype) * size).reshape(u.shape))

    def _learn(self, precision: str, totals: Floats, peaks: Floats) -> None:
        """Keep the degrees, which come with the sums of any signal."""
        if precision in self._degrees:
            return
        check_sums(totals)
        if not self._degrees:
            rounding = float(np.finfo(precision).eps)
            warn_isolated(totals, self._weights / self._weights.max() * (1 + rounding), self.kernel)
        self._degrees[precision] = (totals, peaks)

    def logarithm(self, dtype: Any) -> Floats:
        name = self.pairs.precision(dtype)
        if name not in self._degrees:
            _, totals, peaks = self.pairs(np.empty((self.domain.size, 0), dtype), memory_limit=self._limit)
            self._learn(name, totals, peaks)
        totals, peaks = self._degrees[name]
        return np.asarray(np.log(totals) + peaks)

    def _log_degree(self) -> NDArray[Any]:
        dtype = np.dtype(self.dtype or np.float64)
        return np.asarray(self.logarithm(dtype).astype(dtype).reshape(self.domain.shape))

    def _log_degree_for(self, u: NDArray[Any]) -> NDArray[Any]:
        return self.logarithm(u.dtype).reshape(self.domain.shape)

    def _push(self, law: NDArray[Any]) -> NDArray[Any]:
        # In float64: the rounding of a logit in float32, and of a log degree, is a share of the mass.
        flat = np.asarray(self.flatten(law), dtype=np.float64)
        if not isinstance(self.kernel, ExpDotProduct):
            return self._push_near(flat).astype(law.dtype).reshape(law.shape)
        # (p P)_j = w_j sum_i exp(logit_ij - log d_i) p_i: a sum over queries, whose log degrees are a bias. For queries
        # equal to keys too, where P is self-adjoint, but between scalings that span more decades than a float has.
        if self._backward is None:
            ones = np.ones(self.domain.size)
            self._backward = PairSums(self.kernel, self._keys, self._queries, ones, bias=-self.logarithm(np.float64))
        sums, _, peaks = self._backward(flat, memory_limit=self._limit)
        result = sums * np.exp(np.log(self._weights) + peaks)[:, None]  # one of the two alone may be out of range
        return np.asarray(result.astype(law.dtype).reshape(law.shape))

    def _push_near(self, flat: Floats) -> Floats:
        """Return p P for a radial kernel, w_j sum_i k_ij p_i / d_i, of a law (N, D); such a k is symmetric."""
        self.logarithm(np.float64)
        # In units of the largest weight, without logarithms, in which small weights have lost digits.
        totals, peaks = self._degrees["float64"]
        unit = self.pairs.log_unit
        degrees = totals * np.exp(peaks - unit)
        least = float(degrees.min())
        sums, _, peaks = self.pairs(
            flat * (least / degrees)[:, None], degrees=False, weighted=False, memory_limit=self._limit
        )
        return np.asarray(sums * (self.pairs.weights / least * np.exp(peaks - unit))[:, None])

    def _log_degree_wide(self) -> NDArray[Any]:
        return self.logarithm(self.dtype or np.float64).reshape(self.domain.shape)

    def _log_transitions(self) -> Floats | None:
        q, k = (np.asarray(a, dtype=np.float64) for a in (self._queries, self._keys))
        return log_transitions(self.kernel.log_matrix(q, k), self._weights)

    def _symmetrized(self) -> Affinity:
        other = PairwiseAffinity(self.kernel, self.domain, self._keys, self._queries, memory_limit=self._limit)
        return MixedAffinity(self, other)
