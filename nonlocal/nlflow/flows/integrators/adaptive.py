"""Steps that follow an estimate of their error, and any method of steps of one length with such steps."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np

from nlflow._array import Array, namespace, underflowing
from nlflow.errors import InputError, NumericalError, StabilityError, check_number
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.base import Integrator, StepFailureError
from nlflow.flows.integrators.fixed_step import FixedStep
from nlflow.flows.terms import TermError


class Tolerances:
    """Tolerances of the local error, relative and absolute, which is proportional to h^power for a step h."""

    def __init__(self, rtol: float, atol: float, power: float, *, needed: bool = True) -> None:
        self.rtol = check_number("rtol", rtol, minimum=0)
        self.atol = check_number("atol", atol, minimum=0)
        self.power = power
        if needed and self.rtol == 0 and self.atol == 0:
            raise InputError("rtol: got 0 with atol 0, expected at least one of them > 0")

    def measured(self, error: Array, before: Array, after: Array) -> float:
        """Return the root mean square of an error over the tolerances, between two signals."""
        xp = namespace(error)
        return weighted(error, self.atol + self.rtol * xp.maximum(xp.abs(before), xp.abs(after)))

    def check(self, u: Array, t: float) -> None:
        """Raise `StepFailureError` where to round the signal once is already more than the tolerances allow."""
        xp = namespace(u)
        unit = float(xp.finfo(u.dtype).eps) / 2
        rounding = weighted(unit * xp.abs(u), self.atol + self.rtol * xp.abs(u))
        if rounding > 1:
            raise StepFailureError(
                f"rtol={self.rtol:g}, atol={self.atol:g}: no step can meet them at t={t:.6g}, where to round the "
                f"signal to {u.dtype} is an error of {rounding:.3g} times the tolerances; raise the tolerances "
                f"(rtol={unit:.2g} is enough), or use float64"
            )

    def check_step(self, h: float, t: float, target: float, failure: str) -> None:
        """Raise `StepFailureError` where a step is too short to go on."""
        if h < 1e-14 * max(abs(t), abs(target)) or not math.isfinite(h):
            raise StepFailureError(
                f"the step fell to {h:.3g} at t={t:.6g} without meeting rtol={self.rtol:g}, atol={self.atol:g}: "
                "raise the tolerances, use float64, or check the signal for values that overflow"
                + (f"; the last stage that failed: {failure}" if failure else "")
            )

    def accepted(self, memory: dict[str, Any], h: float, clipped: float, error: float) -> None:
        """Remember the next step after one of length `clipped`, which a target may have cut short from h."""
        factor = 0.9 * max(error, 1e-10) ** (-0.7 / self.power) * memory.get("error", 1.0) ** (0.4 / self.power)
        grown = clipped * min(5.0, max(0.2, factor))
        # A step cut short by a target says little about the step to come.
        memory["h"] = max(grown, h) if clipped < h else grown
        memory["error"] = max(error, 1e-4)

    def rejected(self, memory: dict[str, Any], clipped: float, error: float) -> float:
        """Return a shorter step."""
        memory["rejected"] = memory.get("rejected", 0) + 1
        shrink = 0.9 * error ** (-1 / self.power) if math.isfinite(error) else 0.1
        return clipped * min(0.9, max(0.1, shrink))


def weighted(error: Array, scale: Array) -> float:
    """Return the root mean square of error / scale."""
    xp = namespace(error)
    # A scale of 0 belongs to a value that is 0 before and after: it has no error either.
    ratio = xp.where(scale > 0, error / xp.where(scale > 0, scale, xp.ones_like(scale)), 0 * scale)
    return float(xp.sqrt(xp.mean(ratio**2)))


@underflowing
class Adaptive(Integrator):
    """A method of order p whose steps follow an estimate of their error, by two half steps beside each.

    A step h gives u, two steps h / 2 give v, and (v - u) / (2^p - 1) estimates the error of v, with which the run goes
    on (Hairer, Norsett and Wanner 1993, section II.4, doi 10.1007/978-3-540-78862-1). It sees the error of every part
    of the right-hand side. Three steps of the method for each accepted one, within its stability limit.

    Parameters
    ----------
    integrator : FixedStep
        Such as ``ETD4RK(dt)``, whose dt is the first step.
    rtol, atol : float
        Tolerances of the error of each step, per node, root mean square.

    Notes
    -----
    Errors of steps add up, so that at the end goes with tol^(p / (p + 1)). To a time of 1 it was 0.002 to 7 times
    tolerances from 1e-3 to 1e-11 with `ETD4RK`, and 0.2 to 30 times those from 1e-3 to 1e-7 with `ETD2RK` and `IMEX`,
    growing as they are tightened: take a method of high order for tight ones.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import ETD4RK, Adaptive, AllenCahn, Gaussian, GradientFlow, Grid, J, affinity, solve
    >>> flow = GradientFlow(J(affinity(Gaussian(width=2.0), Grid(40))), reaction=AllenCahn())
    >>> found = solve(flow, np.sin(np.arange(40.0)), t=5.0, integrator=Adaptive(ETD4RK(0.1), rtol=1e-6))
    >>> found.success, found.stats["order"]
    (True, 4.0)
    """

    keeps_limit = True

    def __init__(self, integrator: FixedStep, rtol: float = 1e-6, atol: float = 1e-9) -> None:
        if not isinstance(integrator, FixedStep):
            raise InputError(
                f"integrator: got {type(integrator).__name__}, expected one with steps of one length, such as "
                "ETD4RK(dt); RungeKutta() follows its error itself"
            )
        self.integrator = integrator
        tolerances = Tolerances(rtol, atol, integrator.order + 1)
        self.rtol, self.atol, self._tolerances = tolerances.rtol, tolerances.atol, tolerances

    @property
    def order(self) -> float:  # type: ignore[override]  # a field in the contract, that of the method here
        """That of the method."""
        return self.integrator.order

    @property
    def takes_time(self) -> bool:  # type: ignore[override]
        """That of the method."""
        return self.integrator.takes_time

    @property
    def takes_constraint(self) -> bool:  # type: ignore[override]
        """That of the method."""
        return self.integrator.takes_constraint

    def stability_limit(self, flow: Flow) -> float:
        """Return that of the method, within which steps stay."""
        return self.integrator.stability_limit(flow)

    def check_kind(self, flow: Flow) -> None:
        """Raise what the method raises for the flow; the first step is shortened to the limit of stable ones."""
        with suppress(StabilityError):
            self.integrator.check(flow)

    def velocity_of(self, flow: Flow, u: Array) -> Array:
        """Return that of the method."""
        return self.integrator.velocity_of(flow, u)

    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        """Return the signal after one accepted step and the time reached; see `Integrator.advance`."""
        flow, remaining = flow.when(t), target - t
        self._tolerances.check(u, t)
        if "_limit" not in memory or flow.evolving:
            limit = self.stability_limit(flow)
            memory["_limit"] = math.inf if math.isnan(limit) else 0.99 * limit
        h, failure = min(memory.get("h", self.integrator.dt), memory["_limit"]), ""
        while True:
            clipped = remaining if remaining <= h * (1 + 1e-9) else h
            self._tolerances.check_step(h, t, target, failure)
            try:
                after, error = self._try(flow, u, t, clipped)
            except TermError:
                raise
            except (InputError, NumericalError, StepFailureError) as refusal:
                after, error, failure = u, math.inf, str(refusal)
            if math.isfinite(error) and error <= 1:
                self._tolerances.accepted(memory, h, clipped, error)
                return after, target if clipped == remaining else t + clipped
            h = self._tolerances.rejected(memory, clipped, error)

    def _try(self, flow: Flow, u: Array, t: float, h: float) -> tuple[Array, float]:
        step, middle, end = self.integrator.step, flow.when(t + h / 2), flow.when(t + h)
        with np.errstate(over="ignore", invalid="ignore"):
            whole = step(flow, u, h)
            half = middle.held(step(flow, u, h / 2))
            twice = end.held(step(middle.at(half), half, h / 2))
            change = (twice - end.held(whole)) / (2**self.order - 1)
            error = self._tolerances.measured(change, u, twice)
        finite = bool(namespace(twice).all(namespace(twice).isfinite(twice)))
        return twice, error if finite else math.inf

    def __repr__(self) -> str:
        return f"Adaptive({self.integrator!r}, rtol={self.rtol!r}, atol={self.atol!r})"
