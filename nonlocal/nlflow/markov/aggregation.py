"""Multigrid for walks that end, by aggregates of states."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities.graph import Sparse
from nlflow.functionals.krylov import gmres
from nlflow.markov.reduction import eliminated

_STRONG = 0.1  # a move is strong from this part of the likeliest of its state
_COARSEST = 500  # states that are left to state reduction
_SLOW = 0.8  # part of the states above which their aggregates are not worth having
_VISITS, _SHARE = 8, 0.25  # how often a coarse chain is visited at most; what part of the moves more than two may cost
_RESTART, _ITERATIONS = 24, 200  # of GMRES around the cycles

_MOVE_BYTES, _BESIDE, _OWN = 68, 8, 16  # of each move; vectors beside those of GMRES, and beside each column
_THREADS = 2**22  # bytes that threads and their buffers hold: up to 5 MB were seen, whatever the chain


def needed_bytes(moves: int, states: int, columns: int) -> int:
    from nlflow.backends.numba.chains import width_of

    vectors = (_RESTART + _BESIDE) * width_of(columns) + _OWN * columns
    return _THREADS + _MOVE_BYTES * moves + 8 * states * vectors


class Aggregation:
    """A preconditioner of A = diag(left) - rates for walks that end (Notay 2012, doi 10.1137/110835347).

    Put those states first that are near the ends of walks: sweeps are quick then.
    """

    def __init__(self, rates: Sparse, killed: Floats, left: Floats, dtype: str) -> None:
        from nlflow.backends.numba.chains import loop

        self.dtype, self.left, self._loop = dtype, left, loop
        self._levels: list[_Level] = []
        self._coarsest: NDArray[Any] | None = None
        while len(killed) > _COARSEST:
            level = _Level(rates, left, dtype)
            self._levels.append(level)
            if level.count > _SLOW * len(killed):
                return
            rates, killed, left = level.aggregated(rates, killed, left)
        found = eliminated(rates.toarray(), killed, np.diag(left))
        self._coarsest = np.asarray(found, dtype)

    def solve(self, r: Floats, rtol: float) -> Floats:
        """Return about A^-1 r, residuals of the preconditioned system being `rtol` at most."""
        from nlflow.backends.numba.chains import COLUMNS, width_of

        x = np.empty_like(r)
        size = np.abs(r).max(axis=0)
        size = np.where(size > 0, size, 1.0)
        for start in range(0, r.shape[1], COLUMNS):
            some = slice(start, start + COLUMNS)
            count = len(size[some])
            right = np.zeros((len(r), width_of(count)), self.dtype)
            right[:, :count] = r[:, some] / size[some] / self.left[:, None]
            right = self._cycled(0, right)
            found = gmres(
                self._product, right, None, rtol=rtol, maxiter=_ITERATIONS, restart=_RESTART, inner=self._products,
                subtract=self._subtract,
            )  # fmt: skip
            x[:, some] = found.x[:, :count] * size[some]
        return x

    def _products(self, v: NDArray[Any], w: NDArray[Any]) -> Floats:
        out = np.empty(v.shape[1])
        self._loop("products", self.dtype)(v, w, out)
        return out

    def _subtract(self, w: NDArray[Any], shares: Floats, v: NDArray[Any]) -> NDArray[Any]:
        self._loop("subtract", self.dtype)(w, shares.astype(self.dtype), v)
        return w

    def _product(self, x: NDArray[Any]) -> NDArray[Any]:
        if not self._levels:
            return x.copy()
        moved = self._levels[0].left_over(x, x)
        return self._cycled(0, np.subtract(x, moved, out=moved))

    def _cycled(self, depth: int, r: NDArray[Any]) -> NDArray[Any]:
        """Return what a cycle makes of the residual of a level, whose rows are divided by the rates of leaving."""
        if depth == len(self._levels) and self._coarsest is not None:
            # A plain sum: the order of a product of matrices depends on the number of threads.
            return np.asarray(np.einsum("ij,jc->ic", self._coarsest, r))
        level = self._levels[depth]
        x = level.swept_from_zero(r)
        if depth + 1 < len(self._levels) or self._coarsest is not None:  # else no aggregates were worth having
            right = level.down(level.left_by_sweep(x))
            coarse = self._cycled(depth + 1, right)
            if depth + 1 < len(self._levels):
                below = self._levels[depth + 1]
                for _ in range(1, max(2, min(_VISITS, int(_SHARE * level.size / below.size)))):
                    coarse += self._cycled(depth + 1, below.left_over(right, coarse))
            level.spread(coarse, x)
        return level.swept(r, x)


class _Level:
    """A chain of a hierarchy: its moves for the loops, and to which aggregate each state belongs."""

    def __init__(self, rates: Sparse, left: Floats, dtype: str) -> None:
        from nlflow.backends.numba.chains import loop

        rates.sort_indices()
        starts, ends = rates.indptr.astype(np.int64), rates.indices.astype(np.int32)
        rows = np.repeat(np.arange(len(left)), np.diff(starts))
        shares = (rates.data / left[rows]).astype(dtype)
        self.size = len(ends)
        self._starts, self._stops, self._moves = starts[:-1].copy(), starts[1:].copy(), (ends, shares)
        self._halves = self._starts + np.bincount(rows[ends < rows], minlength=len(left))  # moves to earlier states
        self._sweep, self._left_over, self._spread = (loop(name, dtype) for name in ("sweep", "left_over", "spread"))
        self.group = np.empty(len(left), np.int32)
        loop("aggregate", dtype)(starts, *self._moves, _STRONG, self.group)
        self.count = int(self.group.max()) + 1
        self._down: Any = None
        self._rest: NDArray[Any] | None = None  # memory that is asked for each time costs as much as a sweep

    def aggregated(self, rates: Sparse, killed: Floats, left: Floats) -> tuple[Sparse, Floats, Floats]:
        from scipy.sparse import csr_array

        n, m = len(left), self.count
        up = csr_array((np.ones(n), self.group, np.arange(n + 1)), shape=(n, m))
        down = up.T.tocsr()
        listed = (down @ (rates @ up)).tocoo()
        apart = listed.row != listed.col
        coarse: Sparse = csr_array((listed.data[apart], (listed.row[apart], listed.col[apart])), shape=(m, m))
        ended = np.asarray(np.bincount(self.group, killed, m), np.float64)
        leaving = ended + np.asarray(coarse.sum(axis=1), np.float64).ravel()
        down.data = left[down.indices] / np.repeat(leaving, np.diff(down.indptr))
        self._down = down.astype(self._moves[1].dtype)
        return coarse, ended, leaving

    def swept(self, b: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
        """Return x after a sweep, in place."""
        self._sweep(self._starts, self._stops, *self._moves, b, x)
        return x

    def swept_from_zero(self, b: NDArray[Any]) -> NDArray[Any]:
        """Return what a sweep makes of 0, by the moves to earlier states: later ones are still 0."""
        x = np.empty_like(b)
        self._sweep(self._starts, self._halves, *self._moves, b, x)
        return x

    def left_by_sweep(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return the residual of that, which only moves to later states leave; the next call writes over it."""
        if self._rest is None or self._rest.shape != x.shape:
            self._rest = np.empty_like(x)
        self._left_over(self._halves, self._stops, *self._moves, x, x, self._rest)
        return self._rest

    def left_over(self, b: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
        r = np.empty_like(x)
        self._left_over(self._starts, self._stops, *self._moves, b, x, r)
        return r

    def spread(self, coarse: NDArray[Any], x: NDArray[Any]) -> None:
        """Add to x what the aggregates have."""
        self._spread(self.group, coarse, x)

    def down(self, r: NDArray[Any]) -> NDArray[Any]:
        """Return the residual of the aggregates."""
        return np.asarray(self._down @ r)
