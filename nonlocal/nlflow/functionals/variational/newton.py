"""Newton's method for minimizers of E_p, 1 < p <= 10, on a smoothed functional."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nlflow._array import Floats
from nlflow.functionals.krylov import conjugate_gradients
from nlflow.functionals.misfits import Misfit
from nlflow.functionals.variational.certificate import bounding_box, misfit_slack
from nlflow.functionals.variational.jp import Jp

_FIRST, _SHRINK, _LAST = 0.1, 0.25, 1e-16  # the smoothing, of the size of f
_STEPS = 12  # Newton steps at most before it shrinks
_RELATIVE, _INNER = 1e-2, 300  # residual and iterations of a linear problem


@dataclass(frozen=True)
class Found:
    """A signal (N, D), its value and its duality gap."""

    u: Floats
    value: float
    gap: float


@dataclass
class Problem:
    """a J_p(u) + sum_i r_i g(u_i, f_i) for an f (N, D) of size about 1; `dual` is a field for `Misfit.bent`."""

    jp: Jp
    f: Floats
    rigid: Floats
    misfit: Misfit
    factor: float = 1.0
    dual: Any = 0.0

    @cached_property
    def sums(self) -> Any:
        """See `Graph.summation`."""
        return self.jp.graph.summation()

    @property
    def stiff(self) -> Floats:
        return self.rigid[:, None]

    def _curves(self, x: Floats, smoothing: float) -> tuple[Floats, Floats]:
        """Return psi'(x) / x and psi''(x) of psi(x) = (x^2 + s^2)^(p / 2) / p, 0 for p > 2 where x and s are."""
        p, length = self.jp.p, self.jp.smooth(x, smoothing if self.jp.p < 2 else 0.0)
        safe = np.where(length > 0, length, 1.0)
        lagged = np.where(length > 0, safe ** (p - 2), 1.0 if p == 2 else 0.0)
        return self.factor * lagged, self.factor * lagged * (1 + (p - 2) * (x / safe) ** 2)

    def value(self, u: Floats, smoothing: float) -> float:
        dirichlet = self.factor * self.jp.smoothed(self.jp.slopes(u), smoothing if self.jp.p < 2 else 0.0)
        return dirichlet + float(np.sum(self.stiff * self.misfit.value(u, self.f, smoothing)))

    def gradient(self, u: Floats, smoothing: float) -> Floats:
        lagged = self._curves(self.jp.slopes(u), smoothing)[0]
        return (
            self.jp.graph.flux(self.jp.on_edges(lagged), u) + self.stiff * self.misfit.slopes(u, self.f, smoothing)[0]
        )

    def hessian(self, u: Floats, smoothing: float) -> tuple[Callable[[Floats], Floats], Floats]:
        jp, graph = self.jp, self.jp.graph
        x = jp.slopes(u)
        lagged, curved = self._curves(x, smoothing)
        stiff = self.stiff * self.misfit.bent(u, self.f, smoothing, self.dual)
        along = lagged + (curved - lagged) / u.shape[1]
        slope = graph.row_sums(jp.on_edges(along))
        # What neither differences nor the misfit curve is held, by rounding only, where it is.
        least = 1e-14 * (float(slope.max()) + float(stiff.max())) + 1e-300
        stiff = stiff + least
        diagonal = slope[:, None] + stiff
        if u.shape[1] == 1 and not jp.isotropic:
            weights = jp.on_edges(curved)
            return lambda v: graph.flux(weights, v) + stiff * v, diagonal
        heads = graph.heads
        d = u[heads] - u[graph.ends]
        squares = np.where(x > 0, x, 1.0) ** 2 * jp.measure
        cell: Any = heads if jp.isotropic else slice(None)
        weights, bend = graph.weights[:, None] * lagged[cell][:, None], (curved - lagged) / squares

        def product(v: Floats) -> Floats:
            dv = v[heads] - v[graph.ends]
            turned = graph.weights * np.sum(d * dv, axis=1)
            turned = self.sums @ turned if jp.isotropic else turned
            y = weights * dv + (graph.weights * (bend * turned)[cell])[:, None] * d
            both = (y - y[graph.reverse]) / 2 if jp.isotropic else y
            return np.asarray(self.sums @ both + stiff * v)

        return product, diagonal

    def follow(self, u: Floats, step: Floats, smoothing: float) -> None:
        slope = self.misfit.slopes(u, self.f, smoothing)[0]
        self.dual = np.clip(slope + self.misfit.bent(u, self.f, smoothing, self.dual) * step, -1, 1)

    def gap(self, u: Floats, smoothing: float) -> float:
        jp, x, box = self.jp, self.jp.slopes(u), bounding_box(u, self.f, self.rigid)
        found = math.inf
        for s in {0.0, smoothing if jp.p < 2 else 0.0}:
            lagged = self._curves(x, s)[0]
            flow = jp.graph.flux(jp.on_edges(lagged), u)
            y, conjugate = lagged / self.factor * x if self.factor else 0 * x, jp.p / (jp.p - 1)
            with np.errstate(over="ignore"):
                terms = x**jp.p / jp.p + y**conjugate / conjugate - x * y if s else 0 * x
            cells = 0.5 * self.factor * float(np.sum(jp.measure * np.maximum(terms, 0)))
            found = min(found, cells + misfit_slack(self.misfit, u, flow, self.rigid, self.f, box))
        return found


def minimize(problem: Problem, start: Floats | None, rtol: float, maxiter: int) -> tuple[Floats, float, float, int]:
    best: Found | None = None
    at_f = problem.value(problem.f, 0.0)
    if at_f <= float(np.finfo(np.float64).eps) ** problem.misfit.degree * float(problem.rigid.sum()):
        return problem.f, at_f, 0.0, 0  # a minimum of 0, near which no gap is small beside the value
    for count, found in enumerate(iterates(problem, start), start=1):
        if best is None or found.gap < best.gap:
            best = found
        if best.gap <= rtol * best.value or count == maxiter:
            break
    assert best is not None
    return best.u, best.value, best.gap, count


def iterates(problem: Problem, start: Floats | None) -> Iterator[Found]:
    smoothing, steps = _FIRST, 0
    constant = 0 * problem.f + np.average(problem.f, axis=0, weights=problem.rigid)
    # Where J_p weighs so much that it has to be flat, the way there from f is long.
    u = min([problem.f, constant] if start is None else [start], key=lambda u: problem.value(u, smoothing)).copy()
    floor = problem.misfit.floor(u)
    if floor is not None:  # inside, where the logarithm has a value
        u = np.maximum(u, floor + 1e-3)
    while True:
        gradient = problem.gradient(u, smoothing)
        step = _newton_step(problem, u, gradient, smoothing)
        fall = -float(np.sum(gradient * step))
        problem.follow(u, step, smoothing)
        u, value, moved = _searched(problem, u, step, fall, smoothing, floor)
        true = problem.value(u, 0.0)
        yield Found(u, true, problem.gap(u, smoothing))
        if not moved and smoothing <= _LAST:  # rounding is all that is left
            return
        steps += 1
        if steps >= _STEPS or not moved or fall <= 1e-2 * smoothing * abs(value):
            smoothing, steps = max(smoothing * _SHRINK, _LAST), 0


def _newton_step(problem: Problem, u: Floats, gradient: Floats, smoothing: float) -> Floats:
    product, diagonal = problem.hessian(u, smoothing)
    # In units in which the diagonal is 1: entries may span hundreds of decades.
    root = np.sqrt(diagonal)
    size = float(np.abs(gradient / root).max())
    if size == 0:
        return 0 * u
    right = -gradient / root / size
    solved = conjugate_gradients(
        lambda v: product(v / root) / root, right, 0 * u,
        inner=lambda a, b: np.sum(a * b, keepdims=True), precondition=lambda r: r, rtol=_RELATIVE, maxiter=_INNER,
    )  # fmt: skip
    # Where the iteration broke down, the way is that of the gradient.
    way = solved.x if 0 < np.vdot(solved.x, right) < math.inf else right
    return np.asarray(way / root * size)


def _searched(
    problem: Problem, u: Floats, step: Floats, fall: float, smoothing: float, floor: Floats | None
) -> tuple[Floats, float, bool]:
    """Return the signal after the first of the steps 1, 1/2, 1/4, ... that lowers the value, and whether one did."""
    before, length = problem.value(u, smoothing), 1.0
    if floor is not None:
        inward = np.where(step < 0, (u - floor) / np.where(step < 0, -step, 1.0), math.inf)
        length = min(1.0, 0.95 * float(inward.min()))
    for _ in range(200):
        tried = u + length * step
        with np.errstate(over="ignore", invalid="ignore"):
            value = problem.value(tried, smoothing)
        if value <= before - 1e-4 * length * fall:
            return tried, value, bool((tried != u).any())
        length /= 2
    return u, before, False
