"""The methods of reconstruction: each maps a state to the next one and its estimate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import NumericalError
from nlflow.functionals.forward import nearest
from nlflow.functionals.operators import Forward

Array = NDArray[Any]

_SYSTEMS = 2000  # iterations of conjugate gradients


@dataclass(frozen=True)
class Problem:
    """Data f = A u + noise, and the prior that is to help.

    Attributes
    ----------
    data : array
    forward : Forward
    sigma, weight : float
        Of the noise, and mu of the prior.
    denoise : callable
        A checked denoiser.
    rtol : float
        Of linear systems.
    """

    data: Array
    forward: Forward
    sigma: float
    weight: float
    denoise: Callable[[Array, float], Array]
    rtol: float

    def near(self, u: Array, strength: float) -> Array:
        """Return argmin_x |A x - f|^2 / (2 sigma^2) + mu |x - u|^2 / (2 s^2)."""
        pull = self.weight * (self.sigma / strength) ** 2
        found = nearest(self.forward, self.data, u, pull, self.rtol, _SYSTEMS)
        if not found.success:
            raise NumericalError(
                f"operator: the linear system of the misfit is not solved: {found.message}; lower the strength, raise "
                "the weight, or ask for less accuracy (rtol)"
            )
        return np.asarray(found.u)

    def limit(self) -> float:
        """Return the strength that ``forward-backward`` must not reach: its step is s^2 / (mu sigma^2) < 2 / |A|^2."""
        return self.sigma * math.sqrt(2 * self.weight / self.forward.squared_norm)

    def slope(self, u: Array) -> Array:
        """Return A'(A u - f)."""
        return self.forward.adjoint(self.forward.apply(u) - self.data)

    def misfit(self, u: Array) -> float:
        """Return |A u - f| / (sigma sqrt(M))."""
        residual = self.forward.apply(u) - self.data
        return float(np.linalg.norm(residual)) / (self.sigma * math.sqrt(self.data.size))

    def constant(self) -> Array:
        """Return the constant signal that fits the data best, 0 where A maps constants to 0."""
        ones = np.ones(self.forward.shape)
        seen = self.forward.apply(ones)
        mass = float(np.sum(seen * seen))
        return ones * (float(np.sum(seen * self.data)) / mass if mass > 0 else 0.0)

    def spread(self, first: Array) -> float:
        """Return about the standard deviation of the signal: that of a rough solution without prior."""
        rough = nearest(self.forward, self.data, first, 0.01 * self.forward.squared_norm, 0.01, _SYSTEMS)
        return float(np.std(rough.u))


def half_quadratic(problem: Problem, z: Array, strength: float) -> tuple[Array, Array]:
    """Fit the data near z, then denoise; the state is z."""
    z = problem.denoise(problem.near(z, strength), strength)
    return z, z


def douglas_rachford(problem: Problem, v: Array, strength: float) -> tuple[Array, Array]:
    """Denoise, then fit the data near the reflection; the state is v = x + y, y the multiplier of ADMM."""
    z = problem.denoise(v, strength)
    return v + problem.near(2 * z - v, strength) - z, z


def forward_backward(problem: Problem, u: Array, strength: float) -> tuple[Array, Array]:
    """Take a gradient step of the misfit, then denoise; the state is u."""
    length = strength**2 / (problem.weight * problem.sigma**2)
    u = problem.denoise(u - length * problem.slope(u), strength)
    return u, u


def red(problem: Problem, x: Array, strength: float) -> tuple[Array, Array]:
    """Denoise, then fit the data near the result; the state is x."""
    x = problem.near(problem.denoise(x, strength), strength)
    return x, x


Method = Callable[[Problem, Array, float], tuple[Array, Array]]
METHODS: dict[str, Method] = {
    "hqs": half_quadratic,
    "admm": douglas_rachford,
    "forward-backward": forward_backward,
    "red": red,
}
