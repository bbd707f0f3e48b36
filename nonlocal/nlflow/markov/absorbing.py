"""What a walk does until it ends, x = b + P x: by state reduction, or by iteration with a bound of the error.

Only rates between different states and rates of ending are taken, of which the rows need not sum to 1. So the chain
that is solved is the one that these numbers say, however slow it is, and no diagonal 1 - P_ii loses its digits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities.graph import Sparse
from nlflow.errors import NumericalError
from nlflow.functionals.krylov import gmres
from nlflow.markov.stationary import SMALLEST, dense, reduce_states

EXACT = 1e-10
"""Largest relative error that iteration may leave."""
REDUCED_STATES = 4096
"""State reduction of as many takes a few seconds."""
_SMALL = 1e-3  # below, errors are relative to this: iteration leaves small probabilities few digits of their own
_LEAST = 1e-30  # of a law that is a first guess, which has some noise
_EPS, _EPS_SINGLE = float(np.finfo(np.float64).eps), float(np.finfo(np.float32).eps)
_ROUNDS, _GAIN = 12, 0.5  # of refinement, and by how much each has to lessen the residual
_SUFFICES = 1e-9  # of a residual, for one round
_ITERATIONS = 200
_FEW = 24  # states of which passages are found one by one, as fast as by halves

Solver = Callable[[Floats], Floats]


def eliminated(rates: Floats, killed: Floats, b: Floats) -> Floats:
    """Return x with sum_j rates_ij (x_i - x_j) + killed_i x_i = b_i, for b >= 0 of shape (N,) or (N, k).

    By state reduction: nothing is subtracted, so each entry keeps its digits. O(N^3 + N^2 k) time.

    Raises
    ------
    NumericalError
        Where rates underflow, or x overflows.
    """
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
    """Return the mean times between all pairs of states of an irreducible chain, (N, N), from row to column.

    ``spent[i]`` is the time in state i over the probability with which rates leave it in that time: 1 for moves of a
    chain. One half of the states is removed for the passages within the other, and the other way round; times from the
    removed ones follow from where walks come in. Nothing is subtracted. O(N^3) time, half of it in the first step.
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
    """Return `passage_times` by one state reduction for each state that is reached, all side by side: O(N^4) time."""
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


class Killed:
    """A = diag(left) - rates of walks that end, applied as sum_j rates_ij (x_i - x_j) + killed_i x_i.

    Parameters
    ----------
    rates : scipy.sparse.csr_array of shape (N, N)
        The diagonal does not count.
    killed : array of shape (N,)
        >= 0.
    rounded : array of shape (N,), optional
        The size of what `killed` is the difference of; nothing where it is exact.
    """

    def __init__(self, rates: Sparse, killed: Floats, rounded: Floats | None = None) -> None:
        from scipy.sparse import csr_array

        listed = rates.tocoo()
        apart = listed.row != listed.col
        self._rows, self._columns, self._data = listed.row[apart], listed.col[apart], listed.data[apart]
        self.killed, self.size = killed, len(killed)
        self._rounded = np.abs(killed) if rounded is None else rounded
        self.rates = csr_array((self._data, (self._rows, self._columns)), shape=rates.shape)
        self.left = killed + self._summed(self._data)
        self._terms = 3 + int(np.diff(self.rates.indptr).max(initial=0))

    def _summed(self, values: Floats) -> Floats:
        return np.asarray(np.bincount(self._rows, values, self.size), np.float64)

    def __call__(self, x: Floats) -> Floats:
        """Return A x."""
        return self._summed(self._data * (x[self._rows] - x[self._columns])) + self.killed * x

    def rounding(self, x: Floats, b: Floats) -> Floats:
        """Return a bound of what rounding leaves of b - A x, for an x that is given exactly."""
        flows = self._summed(self._data * np.abs(x[self._rows] - x[self._columns])) + self._rounded * np.abs(x)
        return _EPS * self._terms * (flows + np.abs(b))

    # ---- ways to solve, the cheapest first

    def iterated(self) -> Iterator[Solver]:
        """Yield functions that return about A^-1 r: GMRES with the diagonal and with incomplete factors."""
        from scipy.sparse.linalg import spilu

        yield self._by_gmres(lambda r: r / self.left)
        for solve in self._factored(spilu, drop_tol=1e-4, fill_factor=10):
            yield self._by_gmres(solve)

    def direct(self) -> Iterator[Solver]:
        """Yield elimination."""
        from scipy.sparse.linalg import splu

        yield from self._factored(splu)

    def _factored(self, factor: Callable[..., Any], **options: float) -> Iterator[Solver]:
        from scipy.sparse import csc_array, diags_array

        with contextlib.suppress(RuntimeError, MemoryError):  # a pivot of 0, or too much fill
            yield factor(csc_array(diags_array(self.left) - self.rates), **options).solve

    def _by_gmres(self, precondition: Solver) -> Solver:
        def product(x: Floats) -> Floats:
            return precondition(self.left * x[:, 0] - self.rates @ x[:, 0])[:, None]

        def solve(r: Floats) -> Floats:
            right = precondition(r)[:, None]
            return np.asarray(gmres(product, right, 0 * right, rtol=_SUFFICES, maxiter=_ITERATIONS).x[:, 0])

        return solve


class Averaged:
    """I - P between free states, by averages of signals of all N states.

    Parameters
    ----------
    average : callable
        P v for v of shape (N,).
    free : array of bool of shape (N,)
    single : bool
        Whether averages are rounded to float32.
    """

    def __init__(self, average: Solver, free: NDArray[np.bool_], single: bool) -> None:
        self._average, self._free = average, free
        self._eps = 16 * (_EPS_SINGLE if single else _EPS)

    def __call__(self, x: Floats) -> Floats:
        """Return (I - P) x."""
        return x - self._moved(x)

    def _moved(self, x: Floats) -> Floats:
        values = np.zeros(len(self._free))
        values[self._free] = x
        return self._average(values)[self._free]

    def rounding(self, x: Floats, b: Floats) -> Floats:
        """Return a bound of what rounding leaves of b - (I - P) x."""
        return self._eps * (np.abs(x) + np.abs(self._moved(np.abs(x))) + np.abs(b))


def refined(a: Killed | Averaged, b: Floats, solve: Solver, exact: float = EXACT) -> Floats | None:
    """Return the x >= 0 with A x = b >= 0 by refinement, or None where its digits are not proved.

    A is an M-matrix, A^-1 >= 0, so the error is at most A^-1 |r| of the residual r, rounding included, and at most w
    where A w >= |r|. x is kept as a sum of two floats, since the rounding of one moves r by more than it moves x.

    Parameters
    ----------
    a : Killed or Averaged
    solve : callable
        About A^-1 r.
    exact : float
        Largest relative error; for entries below 1e-3 times the largest it is relative to that.
    """
    high, low = np.zeros(len(b)), np.zeros(len(b))
    left, size = b.copy(), float(np.abs(b).max())
    with np.errstate(over="ignore", invalid="ignore"):  # what diverges is told by the residual
        for _ in range(_ROUNDS):
            step = solve(left) + low
            total = high + step
            low = step - (total - high)
            high, left, before = total, b - a(total) - a(low), size
            floor, size = a.rounding(total, b), float(np.abs(left).max())
            if not size <= _GAIN * before or np.all(np.abs(left) <= floor):
                break
        if not np.isfinite(size):
            return None
        x = high + low
        scale = np.maximum(x, x.max() * _SMALL)
        # Raised to a part of the largest, since what iteration leaves is nowhere less.
        for part in (0.0, _SMALL):
            doubt = np.abs(left) + floor
            doubt = np.maximum(doubt, doubt.max() * part)
            bound = 2 * solve(doubt)
            if np.all(bound <= exact * scale) and np.all(a(bound) - a.rounding(bound, doubt) >= doubt):
                return x
    return None


def balanced_law(moves: Any, law: Floats) -> Floats:
    """Return the stationary law of an irreducible chain, to `EXACT` relative, from one that is near it.

    The shares pi_i / law_i are 1 in the likeliest state and solve x = b + R x elsewhere, R being the moves of the chain
    in reversed time, law_j P_ji / law_i.

    Raises
    ------
    NumericalError
        Where this is not reached.
    """
    from scipy.sparse import csr_array

    listed = csr_array(moves).tocoo()
    apart = (listed.row != listed.col) & (listed.data > 0)
    rows, columns, data = listed.row[apart], listed.col[apart], listed.data[apart]
    leaving = np.asarray(np.bincount(rows, data, len(law)), np.float64)
    law = np.maximum(law, law.max() * _LEAST)
    back = csr_array((data * law[rows] / law[columns], (columns, rows)), shape=listed.shape)
    rest = np.flatnonzero(np.arange(len(law)) != np.argmax(law))
    inside = back[rest][:, rest]
    killed: Floats = leaving[rest] - np.asarray(inside.sum(axis=1), np.float64).ravel()
    a, b = Killed(inside, killed, leaving[rest]), back[rest][:, [int(np.argmax(law))]].toarray().ravel()
    for solve in chain(a.iterated(), a.direct()):
        shares = refined(a, b, solve)
        if shares is not None:
            law[rest] *= shares
            return np.asarray(law / law.sum())
    raise NumericalError(
        f"affinity: the stationary law of {len(law)} states was not reached to {EXACT:g} relative; use at most "
        f"{REDUCED_STATES} states, where state reduction keeps all digits"
    )


def ended(rates: Any, killed: Floats, b: Floats, first: Iterator[Solver], small: int) -> Floats:
    """Return the x of `eliminated` for one b, where rates may be sparse: iteration beyond `small` states.

    Parameters
    ----------
    first : iterator of callables
        Solvers that are tried first; without any, GMRES is.

    Raises
    ------
    NumericalError
        Where neither iteration nor elimination proves the digits, and there are too many states for state reduction.
    """
    n = len(killed)
    if not isinstance(rates, np.ndarray) and n > small:
        a = Killed(rates, killed)
        known = next(first, None)
        for solve in chain(a.iterated() if known is None else [known], a.direct()):
            found = refined(a, b, solve)
            if found is not None:
                return found
        if n > REDUCED_STATES:
            raise NumericalError(
                f"affinity: neither iteration nor elimination reached a relative error of {EXACT:g} for {n} states, as "
                f"walks end too seldom; use at most {REDUCED_STATES} states, where state reduction keeps all digits"
            )
    return eliminated(dense(rates), killed, b)
