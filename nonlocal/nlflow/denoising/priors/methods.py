"""The methods of reconstruction: each a map of one state, whose fixed points are what it looks for."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
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


class Method(ABC):
    """Contract of a method: a state, a step, and the estimate that belongs to a state."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    @staticmethod
    def limit(problem: Problem) -> float:
        """Return the strength that must not be reached."""
        del problem
        return math.inf

    def begin(self, u: Array, strength: float) -> Array:
        """Return the first state."""
        del strength
        return u

    @abstractmethod
    def step(self, state: Array, strength: float) -> tuple[Array, Array]:
        """Return the next state and its estimate."""


class HalfQuadratic(Method):
    """The state is z."""

    def step(self, state: Array, strength: float) -> tuple[Array, Array]:
        z = self.problem.denoise(self.problem.near(state, strength), strength)
        return z, z


class Red(Method):
    """The state is x."""

    def begin(self, u: Array, strength: float) -> Array:
        return self.problem.near(u, strength)

    def step(self, state: Array, strength: float) -> tuple[Array, Array]:
        x = self.problem.near(self.problem.denoise(state, strength), strength)
        return x, x


class DouglasRachford(Method):
    """The state is v = x + y, y being the multiplier of ADMM over its penalty."""

    def begin(self, u: Array, strength: float) -> Array:
        return self.problem.near(u, strength)

    def step(self, state: Array, strength: float) -> tuple[Array, Array]:
        z = self.problem.denoise(state, strength)
        return state + self.problem.near(2 * z - state, strength) - z, z


class ForwardBackward(Method):
    """The state is u."""

    @staticmethod
    def limit(problem: Problem) -> float:
        return problem.sigma * math.sqrt(2 * problem.weight / problem.forward.squared_norm)

    def step(self, state: Array, strength: float) -> tuple[Array, Array]:
        length = strength**2 / (self.problem.weight * self.problem.sigma**2)
        u = self.problem.denoise(state - length * self.problem.slope(state), strength)
        return u, u


METHODS: dict[str, type[Method]] = {
    "hqs": HalfQuadratic,
    "admm": DouglasRachford,
    "forward-backward": ForwardBackward,
    "red": Red,
}
