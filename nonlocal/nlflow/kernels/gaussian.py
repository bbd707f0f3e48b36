"""The Gaussian kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from nlflow._array import Array, underflowing
from nlflow.errors import checked_call
from nlflow.kernels.base import RadialKernel, fall


@checked_call
@underflowing
@dataclass(frozen=True)
class Gaussian(RadialKernel):
    """Gaussian kernel, ``k = exp(-|x - y|^2 / (2 width^2))``; positive definite.

    The kernel of kernel attention (NeuTRENO, arXiv 2312.00751, Table 8).

    Parameters
    ----------
    width : float
        Standard deviation, in the units of what is compared; > 0.
    """

    width: float
    positive: ClassVar[tuple[str, ...]] = ("width",)
    formula: ClassVar[str] = "exp(-|x-y|^2 / (2 width^2))"
    positive_semidefinite: ClassVar[bool] = True
    smoothness: ClassVar[float | None] = math.inf

    def log_profile(self, squared: Array) -> Array:
        """Return log k."""
        return squared / self.width / self.width * -0.5  # in two steps: width**2 could underflow

    @property
    def gaussian_width(self) -> float:
        """The width of the kernel."""
        return self.width

    def support(self, rtol: float) -> float:
        return self.width * math.sqrt(2 * fall(rtol))
