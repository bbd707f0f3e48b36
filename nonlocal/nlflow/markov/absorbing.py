"""What a walk does until it ends, x = b + P x, without the diagonal 1 - P_ii, which would lose digits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities.graph import Sparse
from nlflow.errors import NumericalError
from nlflow.markov.aggregation import Aggregation
from nlflow.markov.moves import to_dense, upstream
from nlflow.markov.reduction import eliminated

EXACT = 1e-10
"""Largest relative error that iteration may leave."""
REDUCED_STATES = 4096
"""Up to so many states state reduction is taken where iteration fails."""
_PAIR_BYTES = 40  # of each pair of states in state reduction
_SMALL = 1e-3  # below, errors are relative to this: iteration leaves small probabilities few digits of their own
_LEAST = 1e-30  # of a law that is a first guess, which has some noise
_EPS, _EPS_SINGLE = float(np.finfo(np.float64).eps), float(np.finfo(np.float32).eps)
_ROUNDS, _GAIN = 12, 0.5  # of refinement, and by how much each has to lessen the residual
_SUFFICES = {"float32": 1e-4, "float64": 1e-9}  # of a residual, for one round
# Of the bound of an error: to what part of the largest residuals are raised, and the residual of a round for it.
_PARTS, _ROUGH = (1e-3, 1e-5, 0.0), 1e-4
_FAR = 100.0  # a bound so many times too large is that of a residual which is too large


@dataclass(frozen=True)
class Way:
    """A solver of A x = r to a relative residual."""

    name: str
    solve: Callable[[Floats, float], Floats]
    suffices: float = _SUFFICES["float64"]


@dataclass(frozen=True)
class Found:
    """x (N, k), how it was found, its relative error (0 for state reduction), and max |b - A x| over max x."""

    x: Floats
    method: str
    error: float = 0.0
    residual: float = 0.0


class Killed:
    """A = diag(left) - rates of walks that end, applied as sum_j rates_ij (x_i - x_j) + killed_i x_i."""

    def __init__(self, rates: Sparse, killed: Floats, rounded: Floats | None = None) -> None:
        from scipy.sparse import csr_array

        listed = rates.tocoo()
        apart = listed.row != listed.col
        self.rates = csr_array((listed.data[apart], (listed.row[apart], listed.col[apart])), shape=rates.shape)
        del listed, apart
        self.rates.sort_indices()
        self.killed = killed
        self._edges = self.rates.indptr.astype(np.int64), self.rates.indices.astype(np.int32), self.rates.data
        self._rounded = np.abs(killed) if rounded is None else rounded
        self.left = killed + np.asarray(self.rates.sum(axis=1), np.float64).ravel()
        self._terms = 3 + int(np.diff(self.rates.indptr).max(initial=0))

    def __call__(self, x: Floats) -> Floats:
        return self._over_edges("edge_flux", x) + self.killed[:, None] * x

    def _over_edges(self, name: str, x: Floats) -> Floats:
        from nlflow.backends.numba.edges import loop

        x = np.ascontiguousarray(x)
        out = np.empty_like(x)
        loop(name)(*self._edges, x, out)
        return out

    def rounding(self, x: Floats, b: Floats) -> Floats:
        flows = self._over_edges("edge_changes", x) + self._rounded[:, None] * np.abs(x)
        return _EPS * self._terms * (flows + np.abs(b))

    # ---- ways to solve, the cheapest first

    def iterated(self) -> Iterator[Way]:
        for dtype in ("float32", "float64"):
            with contextlib.suppress(NumericalError):  # walks of the coarsest chain end too seldom
                solve = Aggregation(self.rates, self.killed, self.left, dtype).solve
                yield Way(f"multigrid in {dtype}", solve, _SUFFICES[dtype])

    def direct(self) -> Iterator[Way]:
        from scipy.sparse import csc_array, diags_array
        from scipy.sparse.linalg import splu

        with contextlib.suppress(RuntimeError, MemoryError):  # a pivot of 0, or too much fill
            factors = splu(csc_array(diags_array(self.left) - self.rates))
            yield Way("elimination", lambda r, rtol: np.asarray(factors.solve(r)))


class Averaged:
    """I - P between free states, by averages of signals of all states."""

    def __init__(
        self, average: Callable[[Floats], Floats], states: int, inside: NDArray[np.integer], single: bool
    ) -> None:
        self._average, self._states, self._inside = average, states, inside
        self._eps = 16 * (_EPS_SINGLE if single else _EPS)

    def __call__(self, x: Floats) -> Floats:
        return x - self._moved(x)

    def _moved(self, x: Floats) -> Floats:
        values = np.zeros((self._states, *x.shape[1:]))
        values[self._inside] = x
        return np.asarray(self._average(values)[self._inside])

    def rounding(self, x: Floats, b: Floats) -> Floats:
        return self._eps * (np.abs(x) + np.abs(self._moved(np.abs(x))) + np.abs(b))


def refined(a: Killed | Averaged, b: Floats, way: Way, exact: float = EXACT) -> Found | None:
    """Return the x >= 0 with A x = b >= 0, (N, k), by refinement with about A^-1; None where its digits are not proved.

    A^-1 >= 0, so the error is at most A^-1 |r| of the residual r, rounding included, and at most w where A w >= |r|.
    """
    high, low = np.zeros_like(b), np.zeros_like(b)
    left, size = b.copy(), np.abs(b).max(axis=0)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what diverges is told by the residual
        for _ in range(_ROUNDS):
            change = way.solve(left, way.suffices)
            step = change + low
            total = high + step
            low = step - (total - high)
            high, left, before = total, b - a(total) - a(low), size
            floor, size = a.rounding(total, b), np.abs(left).max(axis=0)
            ended = bool(np.all(~(size <= _GAIN * before) | np.all(np.abs(left) <= floor, axis=0)))
            # What is left of x after as many digits again as the last round brought is too little to be seen.
            seen = np.abs(change) * (size / before) > exact * _scales(high)
            if not ended and np.any(seen):
                continue
            if not np.isfinite(size).all():
                return None
            found = _proved(a, way, exact, (high + low, left, floor))
            if ended or found is not None:
                return found
    return None


def _scales(x: Floats) -> Floats:
    return np.asarray(np.maximum(x, x.max(axis=0) * (_SMALL if x.shape[1] == 1 else 1.0)))


def _proved(a: Killed | Averaged, way: Way, exact: float, known: tuple[Floats, Floats, Floats]) -> Found | None:
    """Return the x of x, b - A x and its rounding, where A w >= |b - A x| of a small enough w.

    A first w lacks that in a few states: what is lacking is solved for in turn.
    """
    x, left, floor = known
    largest = x.max(axis=0)
    if not largest.min() > 0:
        return None
    most = ((np.abs(left) + floor) / largest).max(axis=1, keepdims=True)  # one w for all columns
    scale = (_scales(x) / largest).min(axis=1, keepdims=True)
    for part in _PARTS:
        doubt = np.maximum(most, most.max() * part)
        bound, lacking = np.zeros_like(doubt), doubt
        for _ in range(_ROUNDS):
            bound += 2 * way.solve(lacking, _ROUGH)
            if not float((bound / scale).max()) <= _FAR * exact:
                return None
            if np.any(bound > exact * scale):  # which further rounds only raise
                break
            lacking = np.maximum(doubt - a(bound) + a.rounding(bound, doubt), 0)
            if not lacking.any():
                break
        if not lacking.any():
            residual = float((np.abs(left).max(axis=0) / largest).max())
            return Found(x, way.name, float((bound / scale).max()), residual)
    return None


def balanced_law(moves: Any, law: Floats) -> Floats:
    """Return the stationary law of an irreducible chain from one that is near it."""
    from scipy.sparse import csr_array

    listed = csr_array(moves).tocoo()
    apart = (listed.row != listed.col) & (listed.data > 0)
    rows, columns, data = listed.row[apart], listed.col[apart], listed.data[apart]
    leaving = np.asarray(np.bincount(rows, data, len(law)), np.float64)
    law = np.maximum(law, law.max() * _LEAST)
    back = csr_array((data * law[rows] / law[columns], (columns, rows)), shape=listed.shape)
    del listed, apart, rows, columns, data  # copies of the moves are most of the memory
    likeliest = int(np.argmax(law))
    rest = upstream(back, np.arange(len(law)) == likeliest)[1:]
    back = back[rest]
    inside, b = back[:, rest], back[:, [likeliest]].toarray()
    del back
    killed: Floats = leaving[rest] - np.asarray(inside.sum(axis=1), np.float64).ravel()
    a = Killed(inside, killed, leaving[rest])
    del inside
    for way in chain(a.iterated(), a.direct()):
        found = refined(a, b, way)
        if found is not None:
            law[rest] *= found.x[:, 0]
            return np.asarray(law / law.sum())
    raise NumericalError(
        f"affinity: the stationary law of {len(law)} states was not reached to {EXACT:g} relative; use at most "
        f"{REDUCED_STATES} states, where state reduction keeps all digits"
    )


def ended(rates: Any, killed: Floats, b: Floats, small: int, check_room: Callable[[int], None]) -> Found:
    n = len(killed)
    some = b.any(axis=0)
    if not isinstance(rates, np.ndarray) and n > small and some.any():
        a, right = Killed(rates, killed), np.ascontiguousarray(b[:, some])
        for way in chain(a.iterated(), a.direct()):
            found = refined(a, right, way)
            if found is not None:
                x = np.zeros_like(b)
                x[:, some] = found.x
                return replace(found, x=x)
        if n > REDUCED_STATES:
            raise NumericalError(
                f"affinity: neither iteration nor elimination reached a relative error of {EXACT:g} for {n} states, as "
                f"walks end too seldom; use at most {REDUCED_STATES} states, where state reduction keeps all digits"
            )
    check_room(_PAIR_BYTES * n * n)
    return Found(eliminated(to_dense(rates), killed, b), "state reduction")
