"""Sparse elimination on the graph of K, as a preconditioner."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities import Affinity, SparseAffinity
from nlflow.affinities.graph import Sparse
from nlflow.backends.threads import one_blas_thread
from nlflow.errors import NumericalError
from nlflow.functionals.preconditioners.multigrid import graph_of

_LOST = 1e-10  # of a diagonal entry: a pivot below has too few digits left
_FEW = 64  # held nodes up to which the factor of the whole graph is used, which other constraints share


class LostDigitsError(NumericalError):
    """Elimination loses the digits of a pivot."""


class Elimination:
    """The inverse of A = diag(m) ((I - P) + phi) on the free nodes of a graph, by the factors L U of SuperLU.

    Rows are ordered by minimum degree (Liu 1985, doi 10.1145/214392.214398). Up to 64 held nodes become charges
    (Buzbee, Dorr, George and Golub 1971, doi 10.1137/0708066), so that the factor for phi = 0 serves other constraints.
    """

    name = "direct"

    def __init__(self, affinity: Affinity, phi: Floats, held: NDArray[np.bool_] | None = None) -> None:
        assert isinstance(affinity, SparseAffinity)
        size, parts = affinity.domain.size, affinity.components.ravel()
        self._measure = affinity.measure("degree", np.empty(0)).reshape(size, 1)
        out = np.zeros(size, bool) if held is None else held
        self._charged: _Charges | None = None
        if phi[~out].any() or out.sum() > _FEW:
            graph, beside = graph_of(affinity)
            self._factor = _Factor(graph, beside + self._measure[:, 0] * phi, out | _grounds(parts, out | (phi > 0)))
            return
        if "elimination" not in affinity.kept:
            graph, beside = graph_of(affinity)
            affinity.kept["elimination"] = _Factor(graph, beside, _grounds(parts, np.zeros(size, bool)))
        self._factor = affinity.kept["elimination"]
        if out.any():
            self._charged = _Charges(self._factor, parts, np.flatnonzero(out))

    def __call__(self, r: NDArray[Any]) -> NDArray[Any]:
        """Return the solution v of ((I - P) + phi) v = r, of the shape and dtype of `r`."""
        right = self._measure * r.reshape(len(self._measure), -1)
        v = self._factor.solved(right)
        if self._charged is not None:
            v = self._charged.balanced(v, right)
        return v.reshape(r.shape).astype(r.dtype, copy=False)


class _Factor:
    """The factor of diag(diagonal) - graph without the rows and columns of grounded nodes."""

    def __init__(self, graph: Sparse, diagonal: Floats, grounded: NDArray[np.bool_]) -> None:
        from scipy.sparse import csc_array, diags_array
        from scipy.sparse.linalg import splu

        self._inside = np.flatnonzero(~grounded)
        self._lu: Any = None
        if not len(self._inside):
            return
        matrix = csc_array((diags_array(diagonal) - graph).tocsr()[self._inside][:, self._inside])
        with one_blas_thread():
            try:
                lu = splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
                left = lu.U.diagonal()[lu.perm_c] / matrix.diagonal()
            except RuntimeError:  # a pivot of 0
                left = np.zeros(1)
        if not left.min() > _LOST:
            raise LostDigitsError(
                "affinity: parts of the graph are tied to each other by edges that are nothing beside those within "
                "them, so elimination loses its digits; use preconditioner='auto'"
            )
        self._lu = lu

    def solved(self, right: Floats) -> Floats:
        """Return the solution, (N, D), 0 at grounded nodes."""
        v = np.zeros(right.shape)
        if self._lu is not None:
            with one_blas_thread():
                v[self._inside] = self._lu.solve(np.ascontiguousarray(right[self._inside], np.float64))
        return v


class _Charges:
    """Charges at the held nodes of a grounded factor that make its solutions 0 there."""

    def __init__(self, factor: _Factor, parts: NDArray[np.int32], nodes: NDArray[np.intp]) -> None:
        from scipy.linalg import lu_factor

        count, self._parts, self._nodes = len(nodes), parts, nodes
        units = np.zeros((len(parts), count))
        units[nodes, np.arange(count)] = 1
        self._responses = factor.solved(units)
        self._number = int(parts.max()) + 1
        inside = (parts[nodes][:, None] == np.arange(self._number)).astype(np.float64)
        # In units in which the responses are about 1, as the constants are.
        self._unit = float(np.abs(self._responses[nodes]).max()) or 1.0
        system = np.block(
            [[self._responses[nodes] / self._unit, inside], [inside.T, np.zeros((self._number, self._number))]]
        )
        with one_blas_thread():
            self._system = lu_factor(system, check_finite=False)

    def balanced(self, v: Floats, right: Floats) -> Floats:
        """Return the solution `v` for a right-hand side with the charges that make it 0 at held nodes."""
        from scipy.linalg import lu_solve

        totals = np.stack([np.bincount(self._parts, column, self._number) for column in right.T], axis=1)
        wanted = -np.concatenate([v[self._nodes] / self._unit, totals])
        with one_blas_thread():
            found = lu_solve(self._system, wanted, check_finite=False)
        charges, constants = found[: len(self._nodes)], found[len(self._nodes) :] * self._unit
        v = v + self._responses @ charges + constants[self._parts]
        v[self._nodes] = 0
        return v


def _grounds(parts: NDArray[np.int32], anchored: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the first node of each component in which no node is anchored."""
    first = np.unique(parts, return_index=True)[1]
    alive = np.zeros(len(first), bool)
    alive[parts[anchored]] = True
    grounded = np.zeros(len(parts), bool)
    grounded[first[~alive]] = True
    return grounded
