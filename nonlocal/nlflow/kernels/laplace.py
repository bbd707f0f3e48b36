"""The exponential kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nlflow._array import Array, root, underflowing
from nlflow.errors import checked_call
from nlflow.kernels.base import RadialKernel, fall


@checked_call
@underflowing
@dataclass(frozen=True)
class Laplace(RadialKernel):
    """Exponential (Laplace) kernel, ``k = exp(-|x - y| / width)``; positive definite.

    Rasmussen and Williams 2006, eq. 4.18.

    Parameters
    ----------
    width : float
        Decay length, in the units of what is compared; > 0.
    """

    width: float
    positive: ClassVar[tuple[str, ...]] = ("width",)
    formula: ClassVar[str] = "exp(-|x-y| / width)"
    positive_semidefinite: ClassVar[bool] = True
    smoothness: ClassVar[float | None] = 1.0

    @np.errstate(over="ignore", invalid="ignore")  # far beyond narrow widths
    def log_profile(self, squared: Array) -> Array:
        """Return log k."""
        return -(root(squared) / self.width)

    def support(self, rtol: float) -> float:
        return self.width * fall(rtol)
