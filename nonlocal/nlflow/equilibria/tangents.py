"""The Jacobian of equations at a point, and linear systems of it with rows and columns beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nlflow._array import Floats, to_numpy
from nlflow.equilibria.equations import DENSE, RESTART, Equations, Neutral
from nlflow.flows.integrators.exponential import modes_of
from nlflow.flows.linear import LinearFlow
from nlflow.functionals.krylov import gmres

_SINGULAR, _BLURRED = 1e-13, 1e-7  # reciprocal condition numbers of singular matrices; of those by differences
_MOST = 2000  # products of one linear system


@dataclass(frozen=True)
class Border:
    """Rows and columns beside a Jacobian: J v + columns c = b, rows v + corner c = d."""

    columns: Floats
    rows: Floats
    corner: Floats

    @classmethod
    def of(cls, neutral: Neutral) -> Border:
        return cls(neutral.columns, neutral.rows, np.zeros((neutral.count, neutral.count)))

    def and_parameter(self, column: Floats, row: Floats, corner: float) -> Border:
        k = len(self.corner)
        wide = np.zeros((k + 1, k + 1))
        wide[:k, :k], wide[k, k] = self.corner, corner
        return Border(np.column_stack([self.columns, column]), np.vstack([self.rows, row]), wide)


@dataclass(frozen=True)
class Answer:
    """Solution v, c of a bordered system, its relative residual, and its rank."""

    v: Floats
    c: Floats
    residual: float
    singular: bool = False


def _scaled(matrix: Floats) -> tuple[Floats, Floats, Floats]:
    """Return factors that make rows and columns of one size, so that small units do not look singular."""
    rows = 1 / np.maximum(np.abs(matrix).max(axis=1), 1e-300)
    columns = 1 / np.maximum(np.abs(rows[:, None] * matrix).max(axis=0), 1e-300)
    return rows, columns, rows[:, None] * matrix * columns


def left_alone(matrix: Floats) -> Floats:
    """Return rows l with l @ matrix = 0 up to rounding, (k, n)."""
    rows, _, scaled = _scaled(matrix)
    vectors, sizes, _ = np.linalg.svd(scaled)
    laws = vectors.T[sizes <= 100 * _SINGULAR * sizes.max(initial=0.0)] * rows
    return np.asarray(laws / np.abs(laws).max(axis=1, keepdims=True))


class Tangent:
    """The Jacobian at x less `shift`: a matrix up to `DENSE` unknowns, products beyond."""

    def __init__(self, equations: Equations, x: Floats, shift: float = 0.0) -> None:
        self.equations, self.x, self.shift = equations, x, shift
        self.dense = len(x) <= DENSE

    @cached_property
    def matrix(self) -> Floats:
        return self.equations.matrix(self.x)

    def times(self, v: Floats) -> Floats:
        return self.matrix @ v if self.dense else self.equations.times(self.x, v)

    def solve(self, b: Floats, border: Border, d: Floats, rtol: float = 1e-10) -> Answer:
        """Solve the bordered system; of a singular matrix the solution of least squares and length."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self._directly(b, border, d) if self.dense else self._iterated(b, border, d, rtol)

    def _directly(self, b: Floats, border: Border, d: Floats) -> Answer:
        from scipy.linalg import lapack, lu_solve

        n, k = len(b), len(d)
        whole = np.zeros((n + k, n + k))
        whole[:n, :n] = self.matrix - self.shift * np.eye(n)
        whole[:n, n:], whole[n:, :n], whole[n:, n:] = border.columns, border.rows, border.corner
        right = np.concatenate([b, d])
        if not (np.isfinite(whole).all() and np.isfinite(right).all()):
            return Answer(np.full(n, np.nan), np.full(k, np.nan), math.inf)
        rows, columns, scaled = _scaled(whole)
        norm = float(np.abs(scaled).sum(axis=0).max())
        lu, pivots, failed = lapack.dgetrf(scaled)
        known = 0.0 if failed else float(lapack.dgecon(lu, norm)[0])
        least = _BLURRED if self.equations.flow.evolving else _SINGULAR
        singular = not known > least
        if singular:
            found = columns * np.linalg.lstsq(scaled, rows * right, rcond=100 * least)[0]
        else:
            found = columns * lu_solve((lu, pivots), rows * right, check_finite=False)
        size = float(np.abs(right).max())  # in units of which squares stay in range
        left = np.linalg.norm((whole @ found - right) / size) / np.linalg.norm(right / size) if size > 0 else 0.0
        return Answer(found[:n], found[n:], float(left), singular)

    def _iterated(self, b: Floats, border: Border, d: Floats, rtol: float) -> Answer:
        n, root = len(b), self.equations.root
        precondition = self._preconditioner()

        def whole(y: Floats) -> Floats:
            # In units in which the measure of nodes is that of the Euclidean inner product.
            v, c = precondition(y[:n, 0] / root), y[n:, 0]
            top = self.times(v) - self.shift * v + border.columns @ c
            return np.concatenate([root * top, border.rows @ v + border.corner @ c])[:, None]

        right = np.concatenate([root * b, d])[:, None]
        solved = gmres(whole, right, np.zeros_like(right), rtol=rtol, maxiter=_MOST, restart=RESTART)
        return Answer(precondition(solved.x[:n, 0] / root), solved.x[n:, 0], solved.residual)

    def _preconditioner(self) -> Callable[[Floats], Floats]:
        """Return -(A + s)^-1 by the transform that diagonalizes A, or by its diagonal; s is the slope of the terms."""
        flow, equations = self.equations.flow, self.equations
        if not isinstance(flow, LinearFlow) or flow.evolving:
            return lambda v: v
        high = flow.spectral_bounds()[1]
        lift = abs(self.shift) + max(flow.terms.bound, 1e-2 * high)
        if equations.free.all() and (modes := modes_of(flow, equations.like)):
            shape, found = equations.free.shape, modes

            def inverse(v: Floats) -> Floats:
                image = found.inverse(1 / lift, 0.0, found.forward(v.reshape(shape)))  # (1 + A / s)^-1
                return np.asarray(found.back(image, np.float64)).ravel() / -lift

            return inverse
        if isinstance(flow.rate, float):
            return lambda v: v
        rate = np.asarray(to_numpy(flow.rate), np.float64)
        rate = np.broadcast_to(
            rate.reshape(rate.shape + (1,) * (equations.free.ndim - rate.ndim)), equations.free.shape
        )
        diagonal = -1 / (rate[equations.free] + lift)
        return lambda v: diagonal * v
