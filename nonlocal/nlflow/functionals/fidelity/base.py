"""The contract of a fidelity operator, and the one that multiplies by numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from nlflow._array import Array, namespace, over_channels, scalar
from nlflow.errors import NumericalError


class Fidelity(ABC):
    """Contract of a fidelity operator Lambda: at each node symmetric and positive semidefinite.

    Signals that it gets may hold several vectors of `width` channels side by side in their last axis, as those of
    `Exponential` do, which integrates u and f at once.

    Attributes
    ----------
    values : float or array
        One number, one for each node, or a matrix for each node.
    """

    values: Array | float

    @property
    def width(self) -> int:
        """How many channels it mixes; 1 where each channel is a problem of its own."""
        return 1

    @abstractmethod
    def times(self, v: Array) -> Array:
        """Return Lambda v."""

    @abstractmethod
    def damped(self, v: Array, step: float) -> Array:
        """Return (I + step Lambda)^-1 v."""

    def implicit_step(self, v: Array, observed: Array, step: float) -> Array:
        """Return (I + step Lambda)^-1 (v + step Lambda f), a step of implicit Euler towards f."""
        return self.damped(v + step * self.times(observed), step)

    @abstractmethod
    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest eigenvalue over all nodes."""

    @abstractmethod
    def scaled(self, factor: Array | float) -> Fidelity:
        """Return factor Lambda, the factor being one number or one for each node."""

    @abstractmethod
    def over_degree(self, log_degree: Array, like: Array) -> Fidelity:
        """Return Lambda / d in the precision of `like`, formed in log space and exactly 0 where Lambda is.

        Raises
        ------
        NumericalError
            When it overflows.
        """

    @abstractmethod
    def centre(self, f: Array, measure: Array, axes: tuple[int, ...]) -> Array:
        """Return the constant c with sum_i m_i Lambda_i (f_i - c) = 0, broadcastable to f; float64.

        The minimizer of E tends to it as Lambda tends to 0. `measure` has the axes of `f`, `axes` are those of nodes.
        """


@dataclass(frozen=True)
class NodeFidelity(Fidelity):
    """A fidelity operator that multiplies each node's vector by one number, the same for all or one for each node."""

    values: Array | float

    def times(self, v: Array) -> Array:
        """Return Lambda v."""
        return over_channels(self.values, v) * v

    def damped(self, v: Array, step: float) -> Array:
        """Return (I + step Lambda)^-1 v."""
        return v / (over_channels(self.values, v) * step + 1)

    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest eigenvalue."""
        if isinstance(self.values, float):
            return self.values, self.values
        xp = namespace(self.values)
        return scalar(xp.min(self.values)), scalar(xp.max(self.values))

    def scaled(self, factor: Array | float) -> NodeFidelity:
        """Return factor Lambda; see `Fidelity.scaled`."""
        return NodeFidelity(factor * self.values)

    def over_degree(self, log_degree: Array, like: Array) -> NodeFidelity:
        """Return Lambda / d; see `Fidelity.over_degree`."""
        xp = namespace(like)
        log_degree = xp.astype(log_degree, xp.float64)
        given = self.values + 0 * log_degree
        inside = given > 0
        exponent = xp.log(xp.where(inside, given, xp.ones_like(given))) - log_degree
        check_exponent(scalar(xp.max(xp.where(inside, exponent, 0 * exponent))), like)
        # 0 where the fidelity is, and still with the slope 1 / d there, which is what a tensor's gradient follows.
        nothing = xp.where(inside, xp.zeros_like(given), given) * xp.exp(-xp.clip(log_degree, -700, 700))
        ratio = xp.where(inside, xp.exp(xp.where(inside, exponent, 0 * exponent)), nothing)
        return NodeFidelity(xp.astype(ratio, like.dtype))

    def centre(self, f: Array, measure: Array, axes: tuple[int, ...]) -> Array:
        """Return the constant that f is centred by, a mean of f for each channel; see `Fidelity.centre`."""
        xp = namespace(f)
        weight = self.times(xp.ones_like(f)) * measure
        total = xp.sum(weight * f, axis=axes, keepdims=True, dtype=xp.float64)
        return total / xp.sum(weight, axis=axes, keepdims=True, dtype=xp.float64)


def check_exponent(exponent: float, like: Array) -> None:
    """Raise `NumericalError` when the exponential of a fidelity over a degree overflows."""
    if exponent > math.log(float(namespace(like).finfo(like.dtype).max)):
        raise NumericalError(
            "degree: so small at some node that fidelity / degree overflows; use measure='degree', or scale the "
            "kernel's amplitude or logits"
        )
