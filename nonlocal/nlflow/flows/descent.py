"""Whether the energy of a gradient flow falls, as it does in every step that is stable."""

from __future__ import annotations

import math

from nlflow._array import Array, namespace
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.base import Integrator
from nlflow.flows.linear import LinearFlow

_FIRST = 16  # steps, after which the energy is looked at between outputs: then at 32, 64 and so on
_OF_FALL = 1e-2  # of what the energy has fallen by may be errors of steps that are right
_OF_VALUE = 1e-6  # and of its value
_OF_SIZE = 1e-8  # and of what a signal of this size can have


class Descent:
    """Looks whether an energy rises without reason, at outputs and after 16, 32, 64, ... steps.

    Of linear flows with a frozen kernel that are given by it, their fidelity and terms that do not depend on time:
    of others the energy may rise.
    """

    def __init__(self, flow: Flow, integrator: Integrator) -> None:
        self.watched = isinstance(flow, LinearFlow) and flow.has_energy and flow.plain
        self.watched = self.watched and not (flow.evolving or flow.timed)
        self._integrator = integrator
        self._start = self._lowest = math.nan

    def due(self, steps: int) -> bool:
        """Whether to look after this step, beside outputs."""
        power_of_two = steps >= _FIRST and steps & (steps - 1) == 0
        return self.watched and power_of_two and not self._integrator.keeps_limit

    def rose(self, flow: Flow, u: Array, t: float, energy: float) -> str | None:
        """Take up the energy at t; return what to say where it has risen, None where it has not."""
        if not self.watched or math.isnan(energy):
            return None
        if not math.isfinite(self._lowest):  # the first, or one that no float holds
            self._start = self._lowest = energy
            return None
        lowest = self._lowest
        self._lowest = min(lowest, energy)
        allowed = _OF_FALL * (self._start - lowest) + _OF_VALUE * abs(lowest) + _OF_SIZE * _most(flow, u)
        if energy <= lowest + allowed:
            return None
        return (
            f"the energy rose from {lowest:.6g} to {energy:.6g} at t={t:.6g}, though the flow descends it: the steps "
            f"of {self._integrator!r} are unstable or wrong for this flow; use a smaller dt, RungeKutta() or "
            "Exponential(), or look at the method with nlflow.testing.check_integrator"
        )


def _most(flow: Flow, u: Array) -> float:
    """Return sum w d |u|^2 of a signal as large as u everywhere; infinity where no float holds it."""
    largest = float(namespace(u).max(namespace(u).abs(u)))
    channels = math.prod(u.shape) / flow.affinity.domain.size
    exponent = flow.affinity.log_total() + math.log(channels) + 2 * math.log(max(largest, 1e-150))
    return math.exp(exponent) if exponent < 700 else math.inf
