"""The top-hat kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from nlflow._array import Array, namespace, underflowing
from nlflow.kernels.base import RadialKernel


@underflowing
@dataclass(frozen=True)
class TopHat(RadialKernel):
    """Top-hat kernel, ``k = 1 where |x - y| <= radius, else 0``.

    Not positive definite, so the averaging operator can have negative eigenvalues.

    Parameters
    ----------
    radius : float
        In the units of what is compared; > 0. The comparison allows for rounding (1e-12 relative).
    """

    radius: float
    positive: ClassVar[tuple[str, ...]] = ("radius",)
    formula: ClassVar[str] = "1 if |x-y| <= radius else 0"

    def log_profile(self, squared: Array) -> Array:
        """Return log k."""
        xp = namespace(squared)
        distance = xp.sqrt(squared)  # a float where the square is an integer
        inside = distance <= self.radius * (1 + 1e-12)
        return xp.where(inside, xp.zeros_like(distance), xp.full_like(distance, -math.inf))

    def support(self, rtol: float) -> float:
        return self.radius * (1 + 1e-12)
