"""Heavy-tailed kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nlflow._array import Array, namespace, underflowing
from nlflow.errors import InputError, check_number
from nlflow.kernels.base import RadialKernel, fall


@underflowing
@dataclass(frozen=True)
class RationalQuadratic(RadialKernel):
    """Rational quadratic kernel, ``k = (1 + |x - y|^2 / (2 alpha width^2))^-alpha``; Cauchy's for alpha = 1.

    Positive definite; its tails fall as ``r^(-2 alpha)`` (Rasmussen and Williams 2006, eq. 4.19).

    Parameters
    ----------
    width : float
        In the units of what is compared; > 0.
    alpha : float
        Half of the power by which it falls; > 0.
    """

    width: float
    alpha: float = 1.0
    positive: ClassVar[tuple[str, ...]] = ("width", "alpha")
    formula: ClassVar[str] = "(1 + |x-y|^2 / (2 alpha width^2))^-alpha"
    positive_semidefinite: ClassVar[bool] = True
    smoothness: ClassVar[float | None] = math.inf

    @np.errstate(over="ignore", invalid="ignore")  # far beyond narrow widths
    def log_profile(self, squared: Array) -> Array:
        """Return log k."""
        return namespace(squared).log1p(squared / self.width / self.width / (2 * self.alpha)) * -self.alpha

    def support(self, rtol: float) -> float:
        return math.sqrt(2 * self.alpha) * self.width * _root_of_growth(rtol, self.alpha)


@underflowing
@dataclass(frozen=True)
class InverseMultiquadric(RadialKernel):
    """Inverse multiquadric, ``k = (1 + |x - y|^2 / width^2)^(-1/2)``.

    Positive definite; its tails fall as 1/r (Hardy 1971, doi 10.1029/JB076i008p01905; Micchelli 1986, doi
    10.1007/BF01893414).

    Parameters
    ----------
    width : float
        In the units of what is compared; > 0.
    """

    width: float
    positive: ClassVar[tuple[str, ...]] = ("width",)
    formula: ClassVar[str] = "(1 + |x-y|^2 / width^2)^(-1/2)"
    positive_semidefinite: ClassVar[bool] = True
    smoothness: ClassVar[float | None] = math.inf

    @np.errstate(over="ignore", invalid="ignore")  # far beyond narrow widths
    def log_profile(self, squared: Array) -> Array:
        """Return log k."""
        return namespace(squared).log1p(squared / self.width / self.width) * -0.5

    def support(self, rtol: float) -> float:
        return self.width * _root_of_growth(rtol, 0.5)


@underflowing
@dataclass(frozen=True)
class TruncatedPower(RadialKernel):
    """Power of the distance between two radii, ``k = (max(|x - y|, core) / core)^-power``, and 0 beyond the horizon.

    With ``amplitude=c * core**-power`` it is ``c |x - y|^-power`` between the two, as in peridynamics (Silling 2000,
    doi 10.1016/S0022-5096(99)00029-0). Not positive definite in general.

    Parameters
    ----------
    power : float
        > 0; m + 2 s for a fractional Laplacian of order s in m dimensions, here without its singularity.
    core : float
        Radius within which the kernel is 1, in the units of what is compared; > 0.
    horizon : float
        Radius beyond which it is 0; > core, infinity for none.
    """

    power: float
    core: float
    horizon: float = math.inf
    positive: ClassVar[tuple[str, ...]] = ("power", "core")
    formula: ClassVar[str] = "(max(|x-y|, core) / core)^-power if |x-y| <= horizon else 0"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("horizon", check_number("horizon", self.horizon, minimum=0, strict=True, finite=False))
        if not self.horizon > self.core:
            raise InputError(f"horizon: got {self.horizon:g}, expected more than the core, {self.core:g}")

    @np.errstate(over="ignore", invalid="ignore")  # far beyond narrow widths
    def log_profile(self, squared: Array) -> Array:
        """Return log k."""
        xp = namespace(squared)
        over = squared / self.core / self.core
        log = xp.log(xp.where(over > 1, over, xp.ones_like(over))) * (-0.5 * self.power)
        if self.horizon == math.inf:
            return log
        farthest = self.horizon / self.core * (1 + 1e-12)
        inside = over <= farthest * farthest  # infinite for the least cores, where powers of floats are refused
        return xp.where(inside, log, xp.full_like(log, -math.inf))

    def support(self, rtol: float) -> float:
        falls = fall(rtol) / self.power
        return min(self.horizon * (1 + 1e-12), self.core * math.exp(falls) if falls < 700 else math.inf)


def _root_of_growth(rtol: float, power: float) -> float:
    """Return s with (1 + s^2)^-power = rtol."""
    exponent = fall(rtol) / power
    return math.sqrt(math.expm1(exponent)) if exponent < 700 else math.inf
