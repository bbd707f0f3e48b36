"""Steps that follow an estimate of their error: tolerances, and a proportional-integral controller."""

from __future__ import annotations

import math
from typing import Any

from nlflow._array import Array, namespace
from nlflow.errors import InputError, check_number
from nlflow.flows.integrators.base import StepFailureError


class Tolerances:
    """A relative and an absolute tolerance of the local error.

    Parameters
    ----------
    rtol, atol : float
        >= 0, one of them > 0.
    power : float
        The error of a step of length h is proportional to h^power.
    """

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
