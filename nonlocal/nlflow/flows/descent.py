"""Checks of the energy and the mean of a run."""

from __future__ import annotations

import math

import numpy as np

from nlflow._array import Array, namespace, numbers
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.base import Integrator
from nlflow.flows.linear import LinearFlow

_FIRST = 16  # steps, after which the energy is looked at between outputs: then at 32, 64 and so on
_OF_FALL = 1e-2  # of what the energy has fallen by may be errors of steps that are right
_OF_VALUE = 1e-6  # and of its value
_OF_SIZE = 1e-8  # and of what a signal of this size can have
_OF_MEAN = 1e-2  # of the size of a signal: by how much a mean may move that is conserved
_ROUNDED = 0.05  # eps t rho, from which on rounding can move it so far


class Descent:
    """Watches for an energy that rises, and a conserved mean that moves."""

    def __init__(self, flow: Flow, integrator: Integrator) -> None:
        self.watched = isinstance(flow, LinearFlow) and flow.has_energy and flow.plain
        self.watched = self.watched and not (flow.evolving or flow.timed or flow.noise is not None)
        self._integrator = integrator
        self._start = self._lowest = math.nan
        self._mean: Array | None = None  # at the start, where it is conserved

    def due(self, steps: int) -> bool:
        power_of_two = steps >= _FIRST and steps & (steps - 1) == 0
        return self.watched and power_of_two and not self._integrator.keeps_limit

    def rose(self, flow: Flow, u: Array, t: float, energy: float) -> str | None:
        if not self.watched or math.isnan(energy):
            return None
        if strayed := self._strayed(flow, u, t):
            return strayed
        if not math.isfinite(self._lowest):  # the first, or one that no float holds
            self._start = self._lowest = energy
            return None
        lowest = self._lowest
        self._lowest = min(lowest, energy)
        allowed = _OF_FALL * (self._start - lowest) + _OF_VALUE * abs(lowest)
        if energy <= lowest + allowed or energy <= lowest + (allowed + _OF_SIZE * _most(flow, u)):
            return None
        return (
            f"the energy rose from {lowest:.6g} to {energy:.6g} at t={t:.6g}, though the flow descends it: the steps "
            f"of {self._integrator!r} are unstable or wrong for this flow; use a smaller dt, RungeKutta() or "
            "Exponential(), or look at the method with nlflow.testing.check_integrator"
        )

    def _strayed(self, flow: Flow, u: Array, t: float) -> str | None:
        """Return what to say where a conserved mean has moved, of which the energy of a J-flow knows nothing.

        What rounding leaves of the mean of du/dt is multiplied by the step: about eps dt rate of the signal.
        """
        if not (isinstance(flow, LinearFlow) and flow.conserves_mean):
            return None
        xp = namespace(u)
        if self._mean is None:
            self._mean, self._size = flow.mean(u), xp.max(xp.abs(u))
        if not t * float(xp.finfo(u.dtype).eps) * flow.spectral_bounds()[1] > _ROUNDED:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            moved, size = numbers(xp.max(xp.abs(flow.mean(u) - self._mean)), self._size)
        if not moved > _OF_MEAN * size:
            return None
        return (
            f"the mean moved by {moved:.3g} up to t={t:.6g}, though the flow conserves it, of a signal of size "
            f"{size:.3g}: rounding of du/dt times the step is that large; use a smaller dt, or Exponential()"
        )


def _most(flow: Flow, u: Array) -> float:
    """Return sum w d |u|^2 of a signal as large as u everywhere; infinity where no float holds it."""
    xp = namespace(u)
    largest, highest, mass = numbers(xp.max(xp.abs(u)), *flow.affinity.total_parts())
    channels = math.prod(u.shape) / flow.affinity.domain.size
    exponent = highest + math.log(mass) + math.log(channels) + 2 * math.log(max(largest, 1e-150))
    return math.exp(exponent) if exponent < 700 else math.inf
