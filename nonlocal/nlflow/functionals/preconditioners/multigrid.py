"""Algebraic multigrid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, over_channels
from nlflow.affinities import Affinity
from nlflow.affinities.graph import Sparse

DAMPING = 2 / 3  # of Jacobi's method; below 2 / (largest eigenvalue of D^-1 A), which is at most 2
_STRONG = 0.25  # an edge is strong from this part of the strongest of its node
_KEPT = 0.2  # part of the strongest weight below which an interpolation leaves an edge out
_DOMINANT = 3.0  # a diagonal this much above the sum beside it needs no coarse grid
_STRIP = 2**16  # edges that are looked at at a time


def graph_of(affinity: Affinity) -> tuple[Sparse, Floats]:
    """Return m_i P_ij for i != j, 0 on the diagonal, and its row sums; a pair may be listed twice."""
    graph = affinity._edges()
    # Scaled by what makes the row sums those of P: sum_j m_i P_ij = m_i.
    weights = affinity.domain.weights.ravel()
    factor = weights * math.exp(affinity._log_scale - affinity.log_total())
    for strip, rows, columns, values in _strips(graph):
        scale = factor[rows] * weights[columns]
        graph.data[strip] = np.where(rows == columns, 0, values * scale)
    return graph, _row_sums(graph)


def _strips(graph: Sparse) -> Iterator[tuple[slice, NDArray[np.int64], NDArray[np.int32], NDArray[Any]]]:
    """Yield the entries in strips of rows: where they lie, their rows and columns, and themselves."""
    size = graph.shape[0]
    step = max(1, int(_STRIP * size / max(graph.nnz, 1)))
    for start in range(0, size, step):
        ends = graph.indptr[start : start + step + 1]
        strip = slice(int(ends[0]), int(ends[-1]))
        rows = np.repeat(np.arange(start, start + len(ends) - 1), np.diff(ends))
        yield strip, rows, graph.indices[strip], graph.data[strip]


def _row_sums(graph: Sparse) -> Floats:
    return np.asarray(graph @ np.ones(graph.shape[1]), dtype=np.float64)


def _largest(graph: Sparse) -> Floats:
    result = np.zeros(graph.shape[0])
    full = np.diff(graph.indptr) > 0
    if full.any():
        result[full] = np.maximum.reduceat(graph.data, graph.indptr[:-1][full])
    return result


def split(matrix: Sparse) -> tuple[Floats, Sparse]:
    diagonal = matrix.diagonal()
    graph = -matrix
    for strip, rows, columns, _ in _strips(graph):
        graph.data[strip][rows == columns] = 0
    graph.eliminate_zeros()
    return np.where(diagonal > 0, diagonal, 1.0), graph


def jacobi(matrix: Sparse, diagonal: Floats) -> Floats:
    size = _row_sums(abs(matrix)) / diagonal
    return np.asarray(DAMPING * min(1.0, 2 / float(size.max())) / diagonal[:, None])


def _coarse_nodes(graph: Sparse, diagonal: Floats, beside: Floats) -> NDArray[np.bool_]:
    """Return which nodes go to the coarse grid: independent in the graph of strong edges, and no more fit in."""
    count = len(diagonal)
    largest = _largest(graph)
    left = (diagonal <= _DOMINANT * beside) & (beside > 0)
    order = np.random.default_rng(0).random(count)
    ends = []
    for _, rows, columns, weights in _strips(graph):
        strong = (weights >= _STRONG * largest[rows]) & (weights > 0)
        order += np.bincount(columns[strong], minlength=count)
        strong |= (weights >= _STRONG * largest[columns]) & (weights > 0)
        strong &= left[rows] & left[columns] & (rows < columns)  # each pair once
        ends.append((rows[strong].astype(np.int32), columns[strong]))
    here, there = (np.concatenate(side) for side in zip(*ends, strict=True))
    del ends
    coarse = np.zeros(count, bool)
    while left.any():
        highest = np.zeros(count)
        np.maximum.at(highest, here, order[there])
        np.maximum.at(highest, there, order[here])
        new = left & (order > highest)
        coarse |= new
        left &= ~new
        left[here[new[there]]] = False
        left[there[new[here]]] = False
        live = left[here] & left[there]
        here, there = here[live], there[live]
    return coarse


def interpolation(graph: Sparse, diagonal: Floats) -> Sparse:
    from scipy.sparse import csr_array

    count = len(diagonal)
    beside = _row_sums(graph)
    coarse = _coarse_nodes(graph, diagonal, beside)
    number = np.cumsum(coarse, dtype=np.int32) - 1
    own = np.flatnonzero(coarse).astype(np.int32)
    # The rows sum to what Jacobi's method makes of a constant: to 1 where there is no fidelity.
    share = np.clip(beside / diagonal, 0, 1)
    parts = [(own, number[own], np.ones(len(own)))]
    for _, rows, columns, weights in _strips(graph):
        used = coarse[columns] & ~coarse[rows] & (weights > 0)
        here, there, given = rows[used], number[columns[used]], weights[used].astype(np.float64)
        if not len(here):
            continue
        here = here - rows[0]
        largest = np.zeros(here[-1] + 1)
        np.maximum.at(largest, here, given)
        kept = given >= _KEPT * largest[here]
        here, there, given = here[kept], there[kept], given[kept]
        given *= share[here + rows[0]] / np.bincount(here, weights=given)[here]
        parts.append(((here + rows[0]).astype(np.int32), there, given))
    at, to, entries = (np.concatenate(part) for part in zip(*parts, strict=True))
    return csr_array((entries, (at, to)), shape=(count, len(own)))


def galerkin(graph: Sparse, diagonal: Floats, up: Sparse) -> Sparse:
    from scipy.sparse import csr_array, diags_array

    down = up.T.tocsr()
    result = down @ (diags_array(diagonal) @ up)
    step = max(1, int(_STRIP * up.shape[0] / max(graph.nnz, 1)))
    for start in range(0, up.shape[0], step):
        strip = slice(start, start + step)
        result = result - up[strip].T.tocsr() @ (graph[strip] @ up)
    return cast(Sparse, csr_array(result))


def inverse(matrix: Floats) -> Floats:
    # The pseudo-inverse, without LAPACK, whose sums depend on the threads.
    result = matrix.copy()
    original = matrix.diagonal().copy()
    for k in range(len(result)):
        pivot = result[k, k]
        if pivot <= 1e-14 * original[k]:
            result[k], result[:, k] = 0, 0
            continue
        row = result[k] / pivot
        column = result[:, k].copy()
        result -= column[:, None] * row
        result[k] = row
        result[:, k] = -column / pivot
        result[k, k] = 1 / pivot
    return (result + result.T) / 2


Operator: TypeAlias = Callable[[Array], Array]

_COARSEST = 100  # nodes
_SLOW = 0.8  # part of the nodes above which a coarser grid is not worth having


@dataclass(frozen=True)
class _Level:
    """A coarse grid: its matrix, Jacobi's step (n, 1), interpolation to the finer grid and back."""

    matrix: Sparse
    step: Floats
    up: Sparse
    down: Sparse


class Multigrid:
    """One W-cycle of algebraic multigrid for A = diag(m) ((I - P) + phi).

    Coarse nodes by PMIS (De Sterck, Yang and Heys 2006, doi 10.1137/040615729), direct interpolation (Stueben 2001, doi
    10.1016/S0377-0427(00)00516-1), Galerkin's coarse matrices, damped Jacobi.
    """

    name = "multigrid"

    def __init__(self, affinity: Affinity, operator: Operator, measure: Floats, phi: Floats) -> None:
        self._operator = operator
        self._nodes = affinity.domain.shape
        self._measure = measure[:, None]
        graph, beside = graph_of(affinity)
        diagonal = beside + measure * phi
        # A node that sees no other and no fidelity: any value solves its equation.
        safe = np.where(diagonal > 0, diagonal, 1.0)
        self._step = DAMPING * np.where(diagonal > 0, measure, 1.0) / safe
        self.levels: list[_Level] = []
        last = safe
        while len(last) > _COARSEST:
            up = interpolation(graph, last)
            if not 0 < up.shape[1] < _SLOW * len(last):
                break
            matrix = galerkin(graph, last, up)
            del graph
            last, graph = split(matrix)
            self.levels.append(_Level(matrix, jacobi(matrix, last), up, up.T.tocsr()))
        self._coarsest = inverse(self.levels[-1].matrix.toarray()) if self.levels and len(last) <= _COARSEST else None

    def __call__(self, r: NDArray[Any]) -> NDArray[Any]:
        """Return the preconditioned residual, of the shape and dtype of `r`."""
        shape = (len(self._measure), -1)
        step = over_channels(self._step.reshape(self._nodes), r)
        z = step * r
        if self.levels:
            left = self._measure * (r - self._operator(z)).reshape(shape)
            correction = self.levels[0].up @ self._cycle(0, self.levels[0].down @ left)
            z += correction.reshape(r.shape).astype(r.dtype, copy=False)
        z += step * (r - self._operator(z))
        return np.asarray(z)

    def _cycle(self, depth: int, r: Floats) -> Floats:
        level = self.levels[depth]
        last = depth + 1 == len(self.levels)
        if last and self._coarsest is not None:
            # A plain sum: the order of a product of matrices depends on the number of threads.
            return np.asarray(np.einsum("ij,jc->ic", self._coarsest, r))
        z = level.step * r
        if not last:
            finer = self.levels[depth + 1]
            for turn in range(2):
                z += finer.up @ self._cycle(depth + 1, finer.down @ (r - level.matrix @ z))
                if turn == 0:  # the end of the first cycle and the beginning of the second, which keeps it self-adjoint
                    z += level.step * (r - level.matrix @ z)
                    z += level.step * (r - level.matrix @ z)
        z += level.step * (r - level.matrix @ z)
        return z
