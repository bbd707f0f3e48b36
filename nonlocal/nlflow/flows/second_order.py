"""Flows of second order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from nlflow._array import Array, Floats
from nlflow.flows.flow import Flow


class SecondOrder(Flow):
    """Flow of x'' = a(x, t) - r(v) v, whose state holds x and v = x'."""

    @property
    def inertial(self) -> bool:
        """Whether there is a velocity in the state."""
        return True

    def parts(self, state: Array) -> tuple[Array, Array]:
        """Return the displacement and the velocity of a state, 0 at held nodes."""
        raise NotImplementedError  # pragma: no cover - abstract

    def joined(self, displacement: Array, velocity: Array) -> Array:
        """Return the state of a displacement and a velocity."""
        raise NotImplementedError  # pragma: no cover - abstract

    def placed(self, displacement: Array) -> Array:
        """Return a displacement with the held values at the flow's time."""
        return displacement

    def acceleration(self, displacement: Array) -> Array:
        """Return a(x, t)."""
        raise NotImplementedError  # pragma: no cover - abstract

    def kicked(self, velocity: Array, acceleration: Array, dt: float) -> Array:
        """Return the velocity after dt of a constant acceleration and of damping, to order 2."""
        raise NotImplementedError  # pragma: no cover - abstract

    def fastest(self) -> float:
        """Return a bound of the frequencies, or NaN."""
        return math.nan

    def surely_below(self) -> float:
        """Return `fastest` at no cost, or infinity."""
        return math.inf

    def leaps(self, state: Array, dt: float, memory: dict[str, Any]) -> Callable[[Array, int], Array] | None:
        """Return a function of state and count that takes many steps at once, or None."""
        del state, dt, memory
        return None


def response(rate: Any, dt: float) -> tuple[Any, Any]:
    """Return exp(-gamma h) and (1 - exp(-gamma h)) / gamma for gamma >= 0."""
    turned: Floats = np.asarray(rate, dtype=np.float64) * dt
    clear = turned > 1e-12
    safe = np.where(clear, turned, 1.0)
    kept, gained = np.exp(-turned), dt * np.where(clear, -np.expm1(-safe) / safe, 1.0)
    return (float(kept), float(gained)) if turned.ndim == 0 else (kept, gained)
