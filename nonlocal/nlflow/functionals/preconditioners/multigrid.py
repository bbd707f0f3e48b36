"""Algebraic multigrid on the graph of K, as a preconditioner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, over_channels
from nlflow.affinities import Affinity
from nlflow.affinities.graph import Sparse
from nlflow.functionals.preconditioners.coarsening import (
    DAMPING,
    PAIRS,
    galerkin,
    graph_of,
    interpolation,
    inverse,
    jacobi,
    split,
)

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
    """One cycle of algebraic multigrid for A = diag(m) ((I - P) + phi), whose graph is that of K.

    The coarse nodes are an independent set of the graph of strong edges, which is found in rounds (PMIS, De Sterck,
    Yang and Heys 2006, doi 10.1137/040615729); each other node is interpolated from the coarse ones beside it in
    proportion to the weights of its edges (direct interpolation, Stueben 2001, doi 10.1016/S0377-0427(00)00516-1), so
    edges of next to no weight are respected wherever they run. Coarse matrices are those of Galerkin. Coarse grids are
    visited twice from each finer one (W-cycle), with a step of damped Jacobi before and after. A cycle takes two
    products with the finest operator, which is applied through averages, so that its matrix is not kept. What remains
    are O(N) numbers; the edges of K, 8 bytes each in float32 and 12 in float64, are held during the set-up alone.

    Parameters
    ----------
    affinity : Affinity
        Symmetric (of K), for which `offered` is true.
    operator : callable
        v to ((I - P) + phi) v.
    measure : array of shape (N,)
        m, float64.
    phi : array of shape (N,)
        The fidelity lambda~ at each node, float64.

    Notes
    -----
    No part depends on the number of threads. Ties between nodes are broken by fixed pseudo-random numbers.
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

    @staticmethod
    def offered(affinity: Affinity) -> bool:
        """Tell whether the graph of K is listed, and has few enough edges to be worth it."""
        if affinity.method not in ("stencil", "sparse"):
            return False
        return affinity.symmetric and affinity._edge_bound() <= PAIRS * affinity.domain.size

    @staticmethod
    def setup_bytes(affinity: Affinity) -> int:
        """Return an estimate of the peak memory of the set-up; 19 to 30 bytes an edge were measured in float64."""
        return 30 * affinity._edge_bound()

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
