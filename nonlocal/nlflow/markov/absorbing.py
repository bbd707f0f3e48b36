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
from nlflow.markov.moves import to_dense
from nlflow.markov.reduction import eliminated

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

Solver = Callable[[Floats], Floats]


class Killed:
    """A = diag(left) - rates of walks that end, applied as sum_j rates_ij (x_i - x_j) + killed_i x_i.

    The diagonal of the rates does not count. `rounded` is the size of what `killed` >= 0 is the difference of.
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
    """I - P between free states, by averages of signals of all N states, which `single` says are rounded to float32."""

    def __init__(self, average: Solver, free: NDArray[np.bool_], single: bool) -> None:
        self._average, self._free = average, free
        self._eps = 16 * (_EPS_SINGLE if single else _EPS)

    def __call__(self, x: Floats) -> Floats:
        """Return A x."""
        return x - self._moved(x)

    def _moved(self, x: Floats) -> Floats:
        values = np.zeros(len(self._free))
        values[self._free] = x
        return self._average(values)[self._free]

    def rounding(self, x: Floats, b: Floats) -> Floats:
        """Return a bound of what rounding leaves of b - (I - P) x."""
        return self._eps * (np.abs(x) + np.abs(self._moved(np.abs(x))) + np.abs(b))


def refined(a: Killed | Averaged, b: Floats, solve: Solver, exact: float = EXACT) -> Floats | None:
    """Return the x >= 0 with A x = b >= 0 by refinement with about A^-1, `solve`; None where its digits are not proved.

    A is an M-matrix, A^-1 >= 0, so the error is at most A^-1 |r| of the residual r, rounding included, and at most w
    where A w >= |r|. x is kept as a sum of two floats, since the rounding of one moves r by more than it moves x. The
    relative error is at most `exact`, that of entries below 1e-3 of the largest relative to this.
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
    """Return the x of `eliminated` for one b. Sparse rates of more than `small` states go by iteration.

    The solvers `first` are tried first; without any, GMRES is.
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
    return eliminated(to_dense(rates), killed, b)
