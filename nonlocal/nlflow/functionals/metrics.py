"""Metrics: the inner products in which gradients are taken."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np

from nlflow._array import Array, constant_like, kept_like, namespace, over_channels, scalar, underflowing
from nlflow.affinities import Affinity
from nlflow.affinities.checks import check_affinity
from nlflow.errors import (
    InputError,
    NumericalError,
    check_choice,
    check_floats,
    check_number,
    checked_call,
    is_function,
    is_number,
)
from nlflow.functionals.fidelity import Fidelity


class Metric:
    """Inner product of signals; the flow of E in it is du/dt = B (r (Pu - u) + phi (f - u) + R(u) + g).

    B is 1 where `by_nodes`; else a metric overrides `moved` and the bounds. `conserves` says that B keeps the mean,
    `varies` that B is that of ``at(u)``.
    """

    name: ClassVar[str]
    measure: ClassVar[str]
    by_nodes: ClassVar[bool] = True
    conserves: ClassVar[bool] = False
    varies: bool = False

    @property
    def normalized(self) -> bool:
        """Whether r = 1."""
        return self.measure == "degree"

    def rate(self, affinity: Affinity) -> Array | float:
        """Return r: the degree, or 1."""
        return 1.0 if self.normalized else affinity.degree

    def moved(self, force: Array, diffusion: Callable[[Array], Array]) -> Array:
        """Return B times a force; `diffusion` applies I - P."""
        del diffusion
        return force

    def at(self, u: Array) -> Self:
        """Return the metric at u."""
        del u
        return self

    def check(self, affinity: Affinity) -> None:  # a hook: most metrics fit every affinity
        """Raise `InputError` for other nodes."""

    def self_adjoint(self, affinity: Affinity, fidelity: Fidelity | None) -> bool:
        """Whether B (r (I - P) + phi) is self-adjoint where r (I - P) is."""
        del affinity
        return self.by_nodes or fidelity is None or fidelity.uniform is not None

    def given(self) -> list[Any]:
        """Return what tells the metric from others of its name."""
        return []

    def force_bound(self, bound: float) -> float:
        """Return a bound of the spectrum of B, from one of r (I - P); NaN where it is not known."""
        del bound
        return 1.0 if self.by_nodes else math.nan

    def diffusion_bound(self, bound: float) -> float:
        """Return a bound of the spectrum of B r (I - P)."""
        return bound

    def bounds(self, bound: float, fidelity: tuple[float, float]) -> tuple[float, float]:
        """Return bounds of the spectrum of B (r (I - P) + phi)."""
        return fidelity[0], fidelity[1] + bound


class L2Metric(Metric):
    """sum_i w_i a_i . b_i."""

    name = measure = "l2"


class DegreeMetric(Metric):
    """sum_i w_i d_i a_i . b_i."""

    name = measure = "degree"


@checked_call
@underflowing
class ConservedMetric(Metric):
    """<a, M^-1 b> of signals with mean 0: du/dt = -M mu with mu = dE/du, which conserves sum_i w_i u_i.

    M is the operator L of an affinity times a mobility m >= 0, with K = k + k^T::

        (M mu)_i = sum_j w_j K_ij (m_i + m_j) / 2 (mu_i - mu_j)

    With `J` and `AllenCahn` this is the nonlocal Cahn-Hilliard equation (Gajewski and Zacharias 2003, doi
    10.1016/S0022-247X(02)00425-0; Du, Ju, Li and Qiao 2018, doi 10.1016/j.jcp.2018.02.023). A constraint does not
    conserve the sum.

    Parameters
    ----------
    affinity : Affinity, optional
        Of M, between the same nodes; that of the flow by default.
    mobility : float, array of shape ``domain.shape``, or callable
        m >= 0: a number, one for each node, or a function m(u) of the signal, element by element.
    largest : float, optional
        The largest value of a mobility m(u) that is a callable, which needs it.

    Raises
    ------
    InputError
        For a mobility that is negative or 0 everywhere.
    NumericalError
        Where m(u) is negative or above `largest`.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import AllenCahn, ConservedMetric, ConvexSplitting, Gaussian, GradientFlow, Grid, J, affinity, solve
    >>> weights = affinity(Gaussian(width=2.0), Grid(40, boundary="periodic"))
    >>> flow = GradientFlow(J(weights), ConservedMetric(mobility=0.5), reaction=AllenCahn(8.0))
    >>> start = 0.1 + 0.1 * np.sin(np.arange(40.0) ** 2)
    >>> found = solve(flow, start, t_eval=[0.0, 1.0, 10.0], integrator=ConvexSplitting(0.1))
    >>> bool(np.all(np.diff(found.energy) < 0)), bool(abs(found.final.mean() - start.mean()) < 1e-13)
    (True, True)
    """

    name, measure, by_nodes, conserves = "conserved", "l2", False, True

    def __init__(
        self,
        affinity: Affinity | None = None,
        *,
        mobility: float | Array | Callable[[Array], Array] = 1.0,
        largest: float | None = None,
    ) -> None:
        self.affinity = None if affinity is None else check_affinity(affinity).symmetrized()
        self.varies = is_function(mobility)
        self.mobility = mobility
        self._values: Array | None = None
        if is_function(mobility):
            if largest is None:
                raise InputError("largest: needed for a mobility m(u), expected its largest value")
            self.factor = check_number("largest", largest, minimum=0, strict=True)
        elif is_number(mobility):
            self.factor = self.mobility = check_number("mobility", mobility, minimum=0, strict=True)
        else:
            self._values = self.mobility = check_floats("mobility", mobility)
            self.factor = _largest_of(self._values)
        if not self.varies and largest is not None:
            raise InputError("largest: got a number beside a mobility whose values are known, expected none")

    def check(self, affinity: Affinity) -> None:
        ours, shape = self.affinity, affinity.domain.shape
        if ours is not None and not (
            ours.domain.shape == shape and np.array_equal(ours.domain.weights, affinity.domain.weights)
        ):
            raise InputError(
                f"metric: its affinity is between nodes of shape {ours.domain.shape}, or of other weights, expected "
                f"those of the flow, {shape}"
            )
        if self._values is not None and not self.varies and tuple(self._values.shape) != tuple(shape):
            raise InputError(
                f"mobility: got shape {tuple(self._values.shape)}, expected a number, a callable, or one value for "
                f"each node, {shape}"
            )

    def at(self, u: Array) -> Self:
        if not callable(self.mobility):
            return self
        values = self.mobility(u)
        if tuple(getattr(values, "shape", ())) != tuple(u.shape):
            raise InputError(f"mobility: m(u) has another shape than u, {tuple(u.shape)}; expected a value for each")
        if "complex" in str(values.dtype) or "object" in str(values.dtype):
            raise InputError(f"mobility: m(u) has the dtype {values.dtype}, expected real numbers")
        xp = namespace(u)
        low, high = scalar(xp.min(values)), scalar(xp.max(values))
        if not (low >= 0 and high <= self.factor * (1 + 1e-6)):
            raise NumericalError(
                f"mobility: got m(u) from {low:.4g} to {high:.4g} for u from {scalar(xp.min(u)):.4g} to "
                f"{scalar(xp.max(u)):.4g}, expected values from 0 to largest = {self.factor:g}; clip it, or tell a "
                "larger one"
            )
        result = copy.copy(self)
        result.varies, result._values, result.mobility = False, values, values
        return result

    @property
    def even(self) -> bool:
        """Whether the mobility is one number, or m(u)."""
        return self._values is None

    def evened(self) -> Self:
        """Return the metric with the largest mobility everywhere."""
        result = copy.copy(self)
        result.varies, result._values, result.mobility = False, None, self.factor
        return result

    def self_adjoint(self, affinity: Affinity, fidelity: Fidelity | None) -> bool:
        alike = super().self_adjoint(affinity, fidelity) and self._values is None
        return alike and (self.affinity is None or self.transformed(affinity))

    def transformed(self, affinity: Affinity) -> bool:
        """Whether one transform diagonalizes both M without its mobility and an affinity."""
        from nlflow.functionals.preconditioners.choice import has_transform

        if self.affinity is None:
            return has_transform(affinity)
        one, other = self.affinity.domain, affinity.domain
        alike = one.shape == other.shape and getattr(one, "boundary", None) == getattr(other, "boundary", None)
        return alike and has_transform(self.affinity) and has_transform(affinity)

    def moved(self, force: Array, diffusion: Callable[[Array], Array]) -> Array:
        apply = diffusion if self.affinity is None else self._diffusion
        if self._values is None:
            return self.factor * apply(force)
        # (m_i + m_j) / 2 (mu_i - mu_j), summed over j, by L alone.
        per_node = kept_like(self._values, force)
        m: Any = over_channels(per_node, force)
        return 0.5 * (m * apply(force) + apply(m * force) - force * over_channels(apply(per_node), force))

    def _diffusion(self, v: Array) -> Array:
        assert self.affinity is not None
        return over_channels(self.affinity.degree, v) * (v - self.affinity._average(v))

    def force_bound(self, bound: float) -> float:
        if self.affinity is not None:
            degree = self.affinity.degree
            bound = 2 * scalar(namespace(degree).max(degree))
        return self.factor * bound

    def diffusion_bound(self, bound: float) -> float:
        return self.force_bound(bound) * bound

    def bounds(self, bound: float, fidelity: tuple[float, float]) -> tuple[float, float]:
        return 0.0, self.force_bound(bound) * (bound + fidelity[1])

    def given(self) -> list[Any]:
        own: list[Any] = []
        if callable(self.mobility):
            values = np.ravel(self.mobility(np.linspace(-2.0, 2.0, 257)))
            own.append(f"m(u) {self.factor!r} {hashlib.sha256(values.tobytes()).hexdigest()}")
        else:
            own.append(repr(self.factor) if self._values is None else self._values)
        if self.affinity is not None:
            logs = self.affinity.log_degree
            noise = constant_like(np.random.default_rng(0).standard_normal(self.affinity.domain.shape), logs)
            own += [repr(self.affinity), logs, self.affinity._average(noise)]
        return own

    def __repr__(self) -> str:
        words = [] if self.affinity is None else [repr(self.affinity)]
        plain = isinstance(self.mobility, int | float)
        if not (plain and self.mobility == 1):
            words.append(f"mobility={self.factor!r}" if plain else "mobility m(u)" if self.varies else "mobility m")
        return f"{type(self).__name__}({', '.join(words)})"


def _largest_of(values: Array) -> float:
    xp = namespace(values)
    low, high = scalar(xp.min(values)), scalar(xp.max(values))
    if not (low >= 0 and 0 < high < math.inf):
        raise InputError(f"mobility: got values from {low:.6g} to {high:.6g}, expected values >= 0, and some above 0")
    return high


_KNOWN: dict[str, Metric] = {metric.name: metric for metric in (L2Metric(), DegreeMetric(), ConservedMetric())}
METRICS = MEASURES = ("l2", "degree")


def as_metric(given: str | Metric) -> Metric:
    return given if isinstance(given, Metric) else _KNOWN[check_choice("metric", given, tuple(_KNOWN))]
