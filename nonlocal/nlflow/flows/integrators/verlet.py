"""Symplectic steps."""

from __future__ import annotations

import math
from typing import Any

from nlflow._array import Array, underflowing
from nlflow.errors import InputError, check_integer, checked_call, kind_of
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.fixed_step import FixedStep
from nlflow.flows.second_order import SecondOrder


def as_second_order(flow: Flow, name: str) -> SecondOrder:
    if not isinstance(flow, SecondOrder):
        raise InputError(
            f"integrator: {name} is for a WaveFlow, or a ParticleFlow with inertia, got {kind_of(flow)}; {flow.advice}"
        )
    if not flow.inertial:
        raise InputError(
            f"integrator: {name} is for particles with inertia, got {flow!r}; give friction=0.0, or use RungeKutta()"
        )
    return flow


@checked_call
@underflowing
class StoermerVerlet(FixedStep):
    """The method of Störmer and Verlet for waves and particles: half a drift, a kick, half a drift; order 2.

    With c = exp(-gamma h)::

        x1 = x + h / 2 v,    v' = c v + (1 - c) / gamma a(x1, t + h / 2),    x' = x1 + h / 2 v'

    Without damping it is symplectic: the energy of a linear flow stays within about (h omega)^2 / 4 of its
    value for small h omega (Hairer, Lubich and Wanner 2003, doi 10.1017/S0962492902000144). One force a step.

    Parameters
    ----------
    dt : float
        For waves below 2 / omega, omega being the largest frequency, with a reaction of slope b (omega^2 + b /
        rho)^1/2. For particles, and waves whose A is not self-adjoint, no limit is known beforehand.
    stride : int
        How many steps are taken at once: trackers and ``stats["steps"]`` count them as one.
    """

    order = 2.0
    takes_time = True
    takes_constraint = True
    called = "the step of Störmer and Verlet"
    longer = "WaveExponential(), which has no limit, or RungeKutta()"

    def __init__(self, dt: float, stride: int = 1) -> None:
        super().__init__(dt)
        self.stride = check_integer("stride", stride, minimum=1)

    def stability_limit(self, flow: Flow) -> float:
        fastest = self._moving(flow).fastest()
        return math.inf if fastest == 0 else 2 / fastest

    def surely_stable(self, flow: Flow) -> bool:
        return self.dt * self._moving(flow).surely_below() < 2

    def check_kind(self, flow: Flow) -> None:
        self._moving(flow)

    def _moving(self, flow: Flow) -> SecondOrder:
        return as_second_order(flow, type(self).__name__)

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        moving = self._moving(flow)
        middle = moving.when(moving.time + dt / 2) if moving.timed else moving
        x, v = moving.parts(u)
        x = middle.placed(x + dt / 2 * v)
        v = middle.kicked(v, middle.acceleration(x), dt)
        return moving.joined(x + dt / 2 * v, v)

    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        count = min(self.stride, math.floor((target - t) / self.dt * (1 + 1e-9)))
        if count < 2:
            return super().advance(flow, u, t, target, memory)
        moving = self._moving(flow)
        end = t + count * self.dt
        end = target if abs(target - end) <= 1e-9 * self.dt else end
        if (leaps := moving.leaps(u, self.dt, memory)) is not None:
            moving.applications += count
            return leaps(u, count), end
        for k in range(count):
            now = moving.when(t + k * self.dt) if moving.timed else moving
            u = self.step(now, u, self.dt)
            u = (now.when(t + (k + 1) * self.dt) if moving.timed else moving).held(u)
        return u, end
