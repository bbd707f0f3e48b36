"""Implicit-explicit steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from nlflow._array import Array, namespace, over_channels, power_of_two, scalar, underflowing
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.base import StepFailureError
from nlflow.flows.integrators.exponential import modes_of
from nlflow.flows.integrators.fixed_step import SplitStep
from nlflow.flows.integrators.runge_kutta import Tableau, combine
from nlflow.flows.linear import LinearFlow, as_linear
from nlflow.functionals.accuracy import Rows
from nlflow.functionals.krylov import error_allowed

_MOST = 10_000  # averages for one linear system
_GAMMA = 1 - math.sqrt(0.5)
_DELTA = 1 - 1 / (2 * _GAMMA)
_WIDENINGS = 20  # of the interval of a reaction in one step


class ImplicitStep(SplitStep):
    """Base of steps that solve (I + s A) x = b, by a transform, conjugate gradients or GMRES."""

    longer = "ConvexSplitting(dt) or RungeKutta()"

    @staticmethod
    def solved(flow: LinearFlow, b: Array, s: float, shift: float, guess: Array) -> Array:
        """Return x with x + s (A + shift B) x = b, B being that of the metric; x and b are 0 at held nodes.

        Raises
        ------
        StepFailureError
            When the system is not solved.
        """
        xp = namespace(b)
        if modes := modes_of(flow, b):
            return modes.back(modes.inverse(s, shift, modes.forward(b)), b.dtype)
        lift = 1 + (s * shift if flow.inner.by_nodes else 0.0)
        rtol = 1e-6 if b.dtype == xp.float32 else 1e-11
        size = power_of_two(scalar(xp.max(xp.abs(b))))  # squares of very large and very small values have no float
        # Over the diagonal: a node of a large degree or fidelity is stiff by itself, and hides the others.
        outer, relative = lift + s * flow.spectral_bounds()[1], None
        if flow.inner.by_nodes and not flow.mixes:
            outer = lift + s * over_channels(flow.rate, b)
            relative = None if flow.fidelity is None else flow.fidelity.scaled(s / (lift + s * flow.rate))
        axes = tuple(range(len(flow.affinity.domain.shape)))
        operator = _operator(flow, s, shift)
        if near := modes_of(flow.evened, b):
            exact, outer = operator, 1.0

            def operator(v: Array) -> Array:
                return near.back(near.inverse(s, shift, near.forward(exact(v))), v.dtype)

            b = near.back(near.inverse(s, shift, near.forward(b)), b.dtype)
        rows = Rows.of(operator, relative, b, axes, outer=outer, stopped=lift / outer, free=flow.free)
        run = rows.by_gmres(_MOST, _over_all if flow.mixes else None)
        if flow.symmetric and not flow.mixes:
            run = rows.by_conjugate_gradients(over_channels(flow.measure(b), b), _MOST, measured=rows.scaled)
        # What bounds the error by the residual holds for walkers alone, which go from node to node.
        enough, allowed = 100 * rtol, error_allowed(rtol) if flow.inner.by_nodes and not flow.mixes else math.inf
        found = rows.solved(lambda b, x, left: run(b, x, left / 100), b / size, guess / size, enough, allowed=allowed)
        if not found.residual <= enough or not found.error <= allowed:
            raise StepFailureError(
                f"the linear system of a step was solved to {found.residual:.3g} alone, with an error of up to "
                f"{found.error:.3g} of its largest value; use a smaller dt, or ETD4RK(dt)"
            )
        return size * found.x


def _over_all(v: Array, w: Array) -> Array:
    """Return the inner product of two signals whose channels are one system."""
    return namespace(v).reshape(namespace(v).sum(v * w, dtype=namespace(v).float64), (1,))


def _operator(flow: LinearFlow, s: float, shift: float) -> Callable[[Array], Array]:
    """Return 1 + s (A + shift B)."""
    if flow.inner.by_nodes:
        return lambda v: (1 + s * shift) * v + s * flow.on_free(v)
    if shift == 0:
        return lambda v: v + s * flow.on_free(v)
    return lambda v: v + s * (flow.on_free(v) + shift * flow.free(flow.moved(v)))


@underflowing
class IMEX(ImplicitStep):
    """Implicit-explicit Runge-Kutta step of order 2: diffusion and fidelity implicit, reactions and sources explicit.

    ARS(2,2,2) of Ascher, Ruuth and Spiteri (1997, doi 10.1016/S0168-9274(97)00056-1), L-stable in the linear part.
    With N = R(u) + g(t), F = phi f(t), g = 1 - 2^-1/2 and d = 1 - 1 / (2 g)::

        (1 + h g A) a  = u + h g (N(u, t) + F(t + g h))
        (1 + h g A) u' = u + h (1 - g) (F(t + g h) - A a) + h g F(t + h) + h (d N(u, t) + (1 - d) N(a, t + g h))

    P need not be symmetric. A step solves two linear systems, by transforms or by O(sqrt(h rho)) averages for
    a symmetric P.

    Parameters
    ----------
    dt : float
        Step, at most 2 / b with a reaction whose slope is bounded by b.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import IMEX, AllenCahn, Gaussian, GradientFlow, Grid, J, affinity, solve
    >>> flow = GradientFlow(J(affinity(Gaussian(width=2.0), Grid(40))), reaction=AllenCahn())
    >>> found = solve(flow, np.sin(np.arange(40.0)), t_eval=[0.0, 1.0, 2.0, 3.0], integrator=IMEX(0.1))
    >>> bool(np.all(np.diff(found.energy) < 0))
    True
    """

    tableau: ClassVar[Tableau] = Tableau(
        stages=((_GAMMA,), (_DELTA, 1 - _DELTA)),
        shares=(_GAMMA, 1.0),
        order=2.0,
        reach=2.0,
        implicit=((_GAMMA,), (1 - _GAMMA, _GAMMA)),
    )
    order, reach = tableau.order, tableau.reach

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.order, cls.reach = cls.tableau.order, cls.tableau.reach

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        linear, table = as_linear(flow), self.tableau
        part = stage = linear.free(u)
        rests, slopes = [linear.rest(part)], list[Array]()
        for row, share, own in zip(table.stages, table.shares, table.implicit, strict=True):
            here = linear.when(flow.time + share * dt)
            pull = here.toward(part)
            if slopes:
                b = part
                for weight, slope in zip(own, slopes, strict=False):
                    b = b + dt * weight * slope
                b = b + dt * own[-1] * pull if own[-1] else b
                b = b + dt * combine(row, rests)
            else:
                b = part + dt * own[-1] * (rests[0] + pull)
            stage = self.solved(linear, b, dt * own[-1], 0.0, stage) if own[-1] else b
            if len(rests) < len(table.stages):
                slopes.append(pull - linear.on_free(stage))
                rests.append(here.rest(stage))
        return linear.with_mean_of(part, stage)


@underflowing
class ConvexSplitting(ImplicitStep):
    """Implicit step by which the energy falls however long it is, where no term depends on time; order 1.

    (1 + h (A + b)) (u' - u) = h (F + N - A u), where b bounds the slope of the reaction (Eyre 1998, doi
    10.1557/PROC-529-39). With h b above 1 the signal moves too little. In a `ConservedMetric` b M takes the place of b,
    with a mobility m(u) at the start of the step.

    Parameters
    ----------
    dt : float
    """

    order = 1.0
    reach = math.inf

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        linear: Any = as_linear(flow).metric_at(u)
        part, reaction, bound = linear.free(u), linear.terms.reaction, linear.terms.bound
        b = dt * (linear.when(flow.time + dt).toward(part) + linear.rest(part) - linear.on_free(part))
        change = 0 * part
        for _ in range(_WIDENINGS):
            change = self.solved(linear, b, dt, bound, change)
            moved = linear.with_mean_of(part, part + change)
            steep = bound if reaction is None else reaction.bound_between(*_range_of(linear.held(u), moved))
            if steep <= bound:
                return moved
            bound = steep * (1 + 1e-3)
        raise StepFailureError(
            f"the signal leaves the interval of {reaction!r} in each step, however steep it is taken to be there; use "
            "a smaller dt, or give the reaction a wider interval"
        )


def _range_of(*signals: Array) -> tuple[float, float]:
    xp = namespace(signals[0])
    return min(scalar(xp.min(u)) for u in signals), max(scalar(xp.max(u)) for u in signals)


_ROUNDS = 100  # of a fixed-point iteration
_NODES, _WEIGHTS = (tuple(map(float, column)) for column in np.polynomial.legendre.leggauss(5))


@underflowing
class AverageVectorField(ImplicitStep):
    r"""Implicit step of order 2 that loses as much energy as the flow does.

    u' = u + h B (F - A_0 (u + u') / 2 + g + int_0^1 R(u + s (u' - u)) ds), B being that of the metric, at (u + u') / 2
    for a mobility m(u). So E(u') - E(u) = -|u' - u|^2 / h in the metric, for a polynomial R of degree 9 at most
    (Celledoni et al. 2012, doi 10.1016/j.jcp.2012.06.022).

    Parameters
    ----------
    dt : float
        Step, solved by an iteration. It converges for dt <= 1 / b, b being the bound of the slope of R (times that of B
        in the conserved metric), and mostly for longer steps; otherwise the run ends with status ``step failed``.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import AllenCahn, Gaussian, GradientFlow, Grid, J, affinity, solve
    >>> from nlflow.flows import AverageVectorField
    >>> flow = GradientFlow(J(affinity(Gaussian(width=2.0), Grid(40))), "conserved", reaction=AllenCahn())
    >>> start = 0.9 * np.sin(np.arange(40.0))
    >>> found = solve(flow, start, t_eval=[0.0, 0.5, 1.0, 1.5], integrator=AverageVectorField(0.5))
    >>> bool(np.all(np.diff(found.energy) < 0)), found.stats["order"]
    (True, 2.0)
    """

    order = 2.0
    reach = math.inf
    longer = "ConvexSplitting(dt)"

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        linear: Any = as_linear(flow).when(flow.time + dt / 2)
        xp, part = namespace(u), linear.free(u)
        rounding, largest = (1e-6 if u.dtype == xp.float32 else 1e-14), scalar(xp.max(xp.abs(u)))
        change, before, enough = 0 * part, math.inf, 0.0
        for _ in range(_ROUNDS):
            left = dt * self._slope(linear, part, change) - change
            size = scalar(xp.max(xp.abs(left)))
            enough = enough or rounding * max(largest, size)
            if size <= enough or (before <= 1e3 * enough and size >= 0.5 * before):  # rounding is all that is left
                return linear.with_mean_of(part, part + change)
            if not size < 1e3 * before:
                break
            before = size
            change = change + self.solved(linear.evened, left, dt / 2, linear.terms.bound, 0 * left)
        raise StepFailureError(
            f"the equation of a step of {dt:g} was not solved in {_ROUNDS} rounds (left over: {before:.3g}); use a "
            "smaller dt, or ConvexSplitting(dt)"
        )

    @staticmethod
    def _slope(linear: Any, part: Array, change: Array) -> Array:
        """Return du/dt at the middle, with the mean of the reaction along the way in place of that at the middle."""
        middle = part + change / 2
        now = linear.metric_at(linear.held(middle))
        slope = now.velocity(middle)
        if now.terms.reaction is None:
            return slope
        force = -now.terms.driving(now.time, now.held(middle))
        for node, weight in zip(_NODES, _WEIGHTS, strict=True):
            along = now.held(part + (1 + node) / 2 * change)
            force = force + weight / 2 * now.terms.driving(now.time, along)
        return slope + now.free(now.moved(force))
