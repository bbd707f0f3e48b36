"""Affinities of changing tokens."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from nlflow._array import Array, is_numpy, namespace, underflowing
from nlflow.affinities.base import Affinity
from nlflow.affinities.logits import check_rows, properties
from nlflow.affinities.pair_sums import PairSums
from nlflow.domains import Domain
from nlflow.domains.mask import Mask, Sight
from nlflow.errors import InputError
from nlflow.kernels import ExpDotProduct

_BLOCK_BYTES = 2**25
_COMPILED = 512  # tokens, from which on compiled sums are faster than rows


@underflowing
class RowAffinity(Affinity):
    """Exponential dot products of tokens (N, d) by blocks of rows, in O(N d) memory and O(N^2 (d + D)) time."""

    method = "rows"
    reason = "the kernel changes with every stage, so its rows are formed once and not kept"

    def __init__(self, kernel: ExpDotProduct, domain: Domain, tokens: Array, mask: Mask | None = None) -> None:
        if not (domain.weights == domain.weights.flat[0]).all():
            raise InputError("domain: got nodes of different weights, expected tokens that count the same")
        tags = properties(kernel, *kernel.map_features(tokens), mask)
        self._sight = None if mask is None else Sight(mask, (), domain.size, tokens)
        tags["symmetric"] = tags["symmetric"] and (self._sight is None or self._sight.symmetric)
        super().__init__(domain, kernel, dtype=tokens.dtype, **tags)
        self.device = None if is_numpy(tokens) else tokens.device
        self._log_weight = math.log(float(domain.weights.flat[0]))
        # What overflows is a matter of the kernel, for tokens of one length: of tensors the first are looked at, not
        # those of each stage, for which a device would have to wait. One place for all that come of this one.
        self._looked = [False]
        self._take(tokens)

    def _take(self, tokens: Array) -> None:
        xp, kernel = namespace(tokens), self.kernel
        queries, keys = kernel.map_features(tokens)  # type: ignore[union-attr]  # it has one
        self.tokens = tokens
        # In float64 whatever the tokens are: rounding in a logit is multiplied by its size.
        self._keys = xp.astype(keys, xp.float64, copy=False)
        self._queries = self._keys if queries is keys else xp.astype(queries, xp.float64, copy=False)
        self._log_degrees: Array | None = None

    @property
    def evolves(self) -> bool:
        return True

    def update(self, u: Array) -> RowAffinity:
        result = copy.copy(self)
        result._take(u)
        return result

    @property
    def takes_unsound(self) -> bool:
        return self._looked[0]

    @property
    def tracked(self) -> bool:
        return bool(getattr(self.tokens, "requires_grad", False))

    def log_rows(self) -> Iterator[tuple[slice, Array]]:
        kernel: Any = self.kernel
        step = max(1, _BLOCK_BYTES // (8 * self.domain.size))
        for start in range(0, self.domain.size, step):
            rows = slice(start, min(start + step, self.domain.size))
            logits = kernel.log_matrix(self._queries[rows, :], self._keys)
            yield rows, logits if self._sight is None else self._sight.applied(logits, rows)

    def sums(self, values: Array) -> tuple[Array, Array]:
        xp = namespace(values)
        if is_numpy(values) and self._sight is None and self.domain.size >= _COMPILED:
            pairs = PairSums(cast(ExpDotProduct, self.kernel), self._queries, self._keys, np.ones(self.domain.size))
            sums, totals, peaks = pairs(values)
            self._log_degrees = np.log(totals) + peaks + self._log_weight
            return sums / totals[:, None], self._log_degrees
        values = xp.astype(values, xp.float64, copy=False)
        averages, logs = [], []
        for rows, logits in self.log_rows():
            highest = xp.max(logits, axis=1, keepdims=True)
            if not self._looked[0]:
                check_rows(highest[:, 0], rows.start)
            weights = xp.exp(logits - highest)
            total = xp.sum(weights, axis=1, keepdims=True)
            averages.append(weights @ values / total)
            logs.append((highest + xp.log(total))[:, 0] + self._log_weight)
        one, self._looked[0] = len(logs) == 1, not is_numpy(values)
        self._log_degrees = logs[0] if one else xp.concat(logs)
        return averages[0] if one else xp.concat(averages), self._log_degrees

    def _average(self, u: Array) -> Array:
        xp = namespace(u)
        return xp.reshape(xp.astype(self.sums(self.flatten(u))[0], u.dtype, copy=False), u.shape)

    def _log_degree_wide(self) -> Array:
        return self.sums(self._keys[:, :1])[1] if self._log_degrees is None else self._log_degrees

    def _log_degree(self) -> Array:
        return namespace(self.tokens).astype(self._log_degree_wide(), self.tokens.dtype, copy=False)
