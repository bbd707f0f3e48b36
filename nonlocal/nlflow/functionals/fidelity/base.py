"""The contract of a fidelity operator, and the one that multiplies by numbers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlflow._array import Array, constant_like, namespace, over_channels, scalar
from nlflow.errors import InputError, NlflowError, NumericalError


class Fidelity(ABC):
    """Contract of a fidelity operator Lambda: at each node symmetric and positive semidefinite.

    Signals that it gets may hold several vectors of `width` channels side by side in their last axis, as those of
    `Exponential` do, which integrates u and f at once.

    The abstract methods are all that a subclass has to define. `nlflow.testing.check_fidelity` runs what they promise.
    """

    @property
    def width(self) -> int:
        """How many channels it mixes; 1 where each channel is a problem of its own."""
        return 1

    @property
    def uniform(self) -> float | None:
        """The number that it multiplies by, where that is known to be one for all nodes and channels."""
        return None

    @property
    def tracked(self) -> bool:
        """Whether what it is made of asks for a gradient."""
        return any(getattr(value, "requires_grad", False) for value in vars(self).values())

    def stated(self, like: Array) -> Array | float:
        """Return what it multiplies by: one number, one for each node, or a matrix for each node.

        By default what `times` makes of unit vectors, O(N D^2) memory; `like` is a signal.
        """
        xp, width = namespace(like), self.width
        if width == 1:
            return self.times(xp.ones_like(like))
        units = constant_like(np.eye(width).ravel(), like)
        nodes = tuple(like.shape)[:-1]
        return xp.reshape(self.times(xp.broadcast_to(units, (*nodes, width * width)) + 0), (*nodes, width, width))

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

    @property
    def uniform(self) -> float | None:
        """The number that it multiplies by; None for one for each node."""
        return self.values if isinstance(self.values, float) else None

    def stated(self, like: Array) -> Array | float:
        """Return the numbers; see `Fidelity.stated`."""
        del like
        return self.values

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


def checked_method(fidelity: Fidelity, method: str, *arguments: Any) -> Fidelity:
    """Return the fidelity that a method makes of another, or raise `InputError` where a class of one's own has none."""
    try:
        made = getattr(fidelity, method)(*arguments)
    except NlflowError:
        raise
    except Exception as error:
        raise InputError(
            f"fidelity: {type(fidelity).__name__}.{method}() failed for a factor for each node "
            f"({type(error).__name__}: {error}), expected Lambda times one number for each node; mend it "
            "(nlflow.testing.check_fidelity shows what is promised), or use the measure of the flow's metric"
        ) from error
    if not isinstance(made, Fidelity):
        raise InputError(f"fidelity: {type(fidelity).__name__}.{method}() returned {made!r}, expected a Fidelity")
    return made


def check_exponent(exponent: float, like: Array) -> None:
    """Raise `NumericalError` when the exponential of a fidelity over a degree overflows."""
    if exponent > math.log(float(namespace(like).finfo(like.dtype).max)):
        raise NumericalError(
            "degree: so small at some node that fidelity / degree overflows; use measure='degree', or scale the "
            "kernel's amplitude or logits"
        )
