"""State reduction, by which nothing is subtracted."""

from __future__ import annotations

import numpy as np

from nlflow._array import Floats
from nlflow.errors import NumericalError

SMALLEST = float(np.finfo(np.float64).tiny)
_BLOCK = 64  # states that are removed before the rest of the matrix is brought up to date
_FEW = 24  # states of which passages are found one by one, as fast as by halves


def reduce_states(rates: Floats, killed: Floats) -> Floats:
    """Remove states, the last first, in place, and return the rates at which each was left, O(N^3).

    Below the diagonal of `rates` stay rates, above it the shares rate_ik / left_k (Grassmann, Taksar and Heyman 1985,
    doi 10.1287/opre.33.5.1107; O'Cinneide 1993, doi 10.1007/BF01385743).
    """
    n = len(rates)
    left = np.empty(n)
    for high in range(n, 0, -_BLOCK):
        low = max(high - _BLOCK, 0)
        for k in range(high - 1, low - 1, -1):
            left[k] = killed[k] + rates[k, :k].sum()
            if k == 0:
                break
            if left[k] < SMALLEST:
                raise NumericalError(f"affinity: the probabilities of leaving state {k} underflow")
            rates[:k, k] /= left[k]
            killed[:k] += rates[:k, k] * killed[k]
            rates[low:k, :k] += np.outer(rates[low:k, k], rates[k, :k])
            rates[:low, low:k] += np.outer(rates[:low, k], rates[k, low:k])
        rates[:low, :low] += rates[:low, low:high] @ rates[low:high, :low]
    return left


def state_reduction(matrix: Floats) -> Floats:
    """Return the stationary law of an irreducible chain, O(N^3)."""
    a = np.array(matrix, dtype=np.float64)
    n = len(a)
    advice = "so the stationary law is not determined in float64; use a wider kernel or a smaller scale of the logits"
    try:
        reduce_states(a, np.zeros(n))
    except NumericalError as error:
        raise NumericalError(f"{error}, {advice}") from error
    # pi_k = sum of pi_i rate_ik / left_k over i < k, as mantissas and exponents: between two states of some size there
    # may lie some whose probability no float can hold.
    law, power = np.ones(n), np.zeros(n, np.int64)
    for k in range(1, n):
        shares, powers = np.frexp(a[:k, k])
        powers = powers + power[:k]
        inside = shares > 0
        if not np.any(inside):
            raise NumericalError(f"affinity: the probabilities of reaching state {k} underflow, {advice}")
        highest = int(powers[inside].max())
        total = law[:k] @ (shares * np.exp2(np.where(inside, powers - highest, 0).astype(np.float64)))
        law[k], exponent = np.frexp(total)
        power[k] = highest + exponent
    law *= np.exp2((power - power.max()).astype(np.float64))
    return np.asarray(law / law.sum())


def log_state_reduction(logs: Floats) -> Floats:
    a = np.array(logs, dtype=np.float64)
    n = len(a)
    for k in range(n - 1, 0, -1):
        a[:k, k] -= np.logaddexp.reduce(a[k, :k])
        a[:k, :k] = np.logaddexp(a[:k, :k], a[:k, k, None] + a[k, :k])
    law = np.zeros(n)
    for k in range(1, n):
        law[k] = np.logaddexp.reduce(law[:k] + a[:k, k])
    return np.asarray(law - np.logaddexp.reduce(law))


def eliminated(rates: Floats, killed: Floats, b: Floats) -> Floats:
    """Return x with sum_j rates_ij (x_i - x_j) + killed_i x_i = b_i, b >= 0, O(N^3 + N^2 k)."""
    from scipy.linalg import solve_triangular

    rates = np.array(rates, dtype=np.float64)
    np.fill_diagonal(rates, 0.0)
    left = reduce_states(rates, np.array(killed, dtype=np.float64))
    if left[0] < SMALLEST:
        raise NumericalError("affinity: the probabilities by which walks end underflow")
    upper, lower = -np.triu(rates, 1), np.diag(left) - np.tril(rates, -1)
    x = solve_triangular(lower, solve_triangular(upper, b, unit_diagonal=True), lower=True)
    return _finite(x)


def _finite(x: Floats) -> Floats:
    if not np.isfinite(x).all():
        raise NumericalError("affinity: the times overflow, some are above 1e308 moves; use a wider kernel")
    return np.asarray(x)


def passage_times(rates: Floats, spent: Floats) -> Floats:
    """Return the mean times between all pairs of states of an irreducible chain, from row to column, O(N^3).

    ``spent[i]`` is the time in state i over the probability with which rates leave it in that time.
    """
    n = len(rates)
    if n <= _FEW:
        return _finite(_passages_of_few(rates, spent))
    times = np.zeros((n, n))
    low, high = slice(0, n // 2), slice(n // 2, n)
    for kept, out in ((low, high), (high, low)):
        ends = rates[out, kept]
        ways = eliminated(rates[out, out], ends.sum(axis=1), np.column_stack([ends, spent[out]]))
        entered, before = ways[:, :-1], ways[:, -1]
        reduced = rates[kept, kept] + rates[kept, out] @ entered
        np.fill_diagonal(reduced, 0.0)
        times[kept, kept] = passage_times(reduced, spent[kept] + rates[kept, out] @ before)
        times[out, kept] = entered @ times[kept, kept] + before[:, None]
    return _finite(times)


def _passages_of_few(rates: Floats, spent: Floats) -> Floats:
    n = len(rates)
    apart = ~np.eye(n, dtype=np.bool_)
    # Of each target a chain of its own, which ends there. The target itself ends at once.
    moves = np.where(apart[:, :, None] & apart[:, None, :], rates, 0.0)
    killed, b = np.where(apart, rates.T, 1.0), np.where(apart, spent, 0.0)
    left, times = np.empty((n, n)), np.zeros((n, n))
    for k in range(n - 1, -1, -1):
        left[:, k] = killed[:, k] + moves[:, k, :k].sum(axis=1)
        if left[:, k].min() < SMALLEST:
            raise NumericalError(f"affinity: the probabilities of leaving state {k} underflow")
        shares = moves[:, :k, k] / left[:, k, None]
        killed[:, :k] += shares * killed[:, k, None]
        b[:, :k] += shares * b[:, k, None]
        moves[:, :k, :k] += shares[:, :, None] * moves[:, k, None, :k]
    for k in range(n):
        times[:, k] = (b[:, k] + np.sum(moves[:, k, :k] * times[:, :k], axis=1)) / left[:, k]
    return times.T
