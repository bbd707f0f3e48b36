"""Splittings."""

from __future__ import annotations

from nlflow._array import Array, underflowing
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.exponential import ExponentialStep
from nlflow.flows.linear import LinearFlow, as_linear


class SplitFlows(ExponentialStep):
    """Base of splittings."""

    reach = 2.78

    def diffused(self, flow: LinearFlow, u: Array, dt: float) -> Array:
        """Return the solution of du/dt = -A u + F after dt, F being that at the middle."""
        force = flow.when(flow.time + dt / 2).toward(u)
        return u + self.back(flow, self.applied(flow, force - flow.on_free(u), (1, dt))[0], u)

    @staticmethod
    def reacted(flow: LinearFlow, u: Array, dt: float) -> Array:
        """Return the solution of du/dt = R(u, t) + g(t) after dt, by Kutta's step of order 4."""
        if flow.split and not flow.terms.drives:
            return u
        middle, end = flow.when(flow.time + dt / 2), flow.when(flow.time + dt)
        first = flow.rest(u)
        second = middle.rest(u + dt / 2 * first)
        third = middle.rest(u + dt / 2 * second)
        return u + dt / 6 * (first + 2 * (second + third) + end.rest(u + dt * third))


@underflowing
class Lie(SplitFlows):
    """Lie splitting, u' = S_A(h) S_R(h) u: the reaction, then the linear part; order 1.

    (Trotter 1959, doi 10.1090/S0002-9939-1959-0108732-6.)

    Parameters
    ----------
    dt : float
        Step; see `Strang`.
    """

    order = 1.0

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        linear = as_linear(flow)
        return self.diffused(linear, self.reacted(linear, linear.free(u), dt), dt)


@underflowing
class Strang(SplitFlows):
    """Strang splitting, u' = S_A(h / 2) S_R(h) S_A(h / 2) u; order 2.

    (Strang 1968, doi 10.1137/0705041.) S_A is exact, as in `ETD2RK`, and S_R is a step of order 4. States of rest are
    those of the flow up to O(h^2).

    Parameters
    ----------
    dt : float
        Step, at most 2.78 / b with a reaction whose slope is bounded by b.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import AllenCahn, Gaussian, GradientFlow, Grid, J, affinity, solve
    >>> from nlflow.flows import Strang
    >>> flow = GradientFlow(J(affinity(Gaussian(width=2.0), Grid(40))), reaction=AllenCahn())
    >>> found = solve(flow, np.sin(np.arange(40.0)), t=3.0, integrator=Strang(0.1))
    >>> found.success, found.stats["order"]
    (True, 2.0)
    """

    order = 2.0

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        linear = as_linear(flow)
        half = self.diffused(linear, linear.free(u), dt / 2)
        return self.diffused(linear.when(flow.time + dt / 2), self.reacted(linear, half, dt), dt / 2)
