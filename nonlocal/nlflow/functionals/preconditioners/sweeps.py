"""Conjugate gradients over edges, compiled and in float32, as a preconditioner."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities import Affinity, SparseAffinity
from nlflow.functionals.preconditioners.multigrid import graph_of

_LEFT, _MUCH = 3e-6, 0.1  # of the residual: what float32 reaches, and the most that a call leaves
_PART = 0.25  # of the tolerance of the iterations around it: the largest entry has to be below as well
_LOOK = 16  # iterations between two looks at their rate
_PATIENCE = 500  # iterations without a smaller residual, after which float32 has no digits left


class Sweeps:
    """The inverse of A = diag(m) ((I - P) + phi) on the free nodes of a graph, up to a small relative residual.

    Conjugate gradients with a symmetric Gauss-Seidel sweep (Eisenstat 1981, doi 10.1137/0902001).
    """

    name = "sweeps"

    def __init__(
        self, affinity: Affinity, phi: Floats, rtol: float, maxiter: int, held: NDArray[np.bool_] | None = None
    ) -> None:
        assert isinstance(affinity, SparseAffinity)
        self._measure = affinity.measure("degree", np.empty(0)).reshape(affinity.domain.size)
        self._rtol, self._pays, self._most = rtol, math.inf, maxiter
        self._first: Floats | None = None  # norms of the first residual, of which the tolerance is a part
        self.iterations, self.slow = 0, False
        phi = phi if held is None else np.where(held, 0, phi)
        if phi.any():
            self._edges, self._root = _scaled(affinity, self._measure * phi)
        else:
            if "sweeps" not in affinity.kept:
                affinity.kept["sweeps"] = _scaled(affinity, 0 * phi)
            self._edges, self._root = affinity.kept["sweeps"]
        self._free = np.ascontiguousarray((self._root > 0) if held is None else (self._root > 0) & ~held)

    def again(self) -> None:
        self._first, self._pays = None, math.inf

    def limit(self, ahead: float) -> None:
        self._pays = ahead

    def __call__(self, r: NDArray[Any]) -> NDArray[Any]:
        """Return the solution v of ((I - P) + phi) v = r, of the shape and dtype of `r`."""
        from nlflow.backends.numba.sweeps import COLUMNS

        scaled = np.where(self._free, self._measure * self._root, 0)[:, None] * r.reshape(len(self._measure), -1)
        size = np.sqrt(np.einsum("nc,nc->c", scaled, scaled, dtype=np.float64))
        self._first = size if self._first is None else self._first
        size = np.where(size > 0, size, 1.0)
        left = np.clip(_PART * self._rtol * self._first / size, _LEFT, _MUCH)
        v = np.empty_like(scaled)
        deepest = 0
        for start in range(0, v.shape[1], COLUMNS):
            some = slice(start, start + COLUMNS)
            count = len(size[some])
            right, wanted = np.zeros((len(v), COLUMNS), np.float32), np.zeros(COLUMNS)
            right[:, :count], wanted[:count] = scaled[:, some] / size[some], left[some] ** 2
            x, done = self._solved(right, wanted)
            deepest = max(deepest, done)
            v[:, some] = self._root[:, None] * (x[:, :count] * size[some])
        self.iterations += deepest
        self._most -= deepest
        return np.asarray(v.reshape(r.shape).astype(r.dtype, copy=False))

    def _solved(self, b: NDArray[np.float32], wanted: Floats) -> tuple[NDArray[np.float32], int]:
        """Return the solution of the scaled system, (N, 16), up to squared residuals, and the iterations."""
        from nlflow.backends.numba.sweeps import loop

        x, r, p, t, q = (np.zeros_like(b) for _ in range(5))
        squares, beta = np.zeros(b.shape[1]), np.zeros(b.shape[1], np.float32)
        graph = (*self._edges, self._free)
        loop("begin", "float32")(*graph, b, x, r, squares)
        done, taken = 0, np.zeros(1, np.int64)
        before = best = _above(squares, wanted)
        at = 0
        while before > 1 and done < self._most and done - at < _PATIENCE:
            count = min(_LOOK, self._most - done)
            loop("iterate", "float32")(*graph, x, r, p, t, q, squares, beta, count, wanted, taken)
            done += int(taken[0])
            left = _above(squares, wanted)
            fall = math.log(before / left) if 1 < left < before else 0.0
            if left > 1 and self._pays < math.inf and _LOOK * math.log(left) > self._pays * fall:
                self.slow = True
                break
            before = left
            if left < 0.9 * best:
                best, at = left, done
        return x, done


def _above(squares: Floats, wanted: Floats) -> float:
    return math.sqrt(float(np.max(np.where(wanted > 0, squares / np.where(wanted > 0, wanted, 1), 0))))


def _scaled(affinity: Affinity, added: Floats) -> tuple[tuple[Any, ...], Floats]:
    """Return the edges of A for the loops, scaled so that its diagonal is 1, and the square roots of their scales."""
    graph, beside = graph_of(affinity)
    graph.sum_duplicates()  # sorts the rows as well
    diagonal = beside + added
    root = 1 / np.sqrt(np.where(diagonal > 0, diagonal, np.inf))
    rows = np.repeat(np.arange(len(root)), np.diff(graph.indptr))
    lower = np.bincount(rows[graph.indices < rows], minlength=len(root))
    # Each row in two halves, which are filled up to even numbers by edges of weight 0 to the node itself.
    counts = np.stack([lower, np.diff(graph.indptr) - lower], axis=1).ravel()
    full = counts + counts % 2
    starts = np.concatenate([[0], np.cumsum(full)])
    shift = starts[:-1] - np.concatenate([[0], np.cumsum(counts)[:-1]])
    places = np.arange(len(rows)) + np.repeat(shift, counts)
    indices = np.repeat(np.arange(len(root), dtype=np.int32), full[::2] + full[1::2])
    weights = np.zeros(len(indices), np.float32)
    indices[places], weights[places] = graph.indices, graph.data * root[rows] * root[graph.indices]
    return (np.ascontiguousarray(starts[::2]), np.ascontiguousarray(starts[1::2]), indices, weights), root
