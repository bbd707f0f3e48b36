"""The functionals J and E: value, gradient and minimiser, from averages and degrees alone.

With d, P and L = D (I - P) taken from the symmetrised affinity K = k + k^T (arXiv 2312.00751, eq. 5-8 and 30-31)::

    J(u) = 1/2 sum_ij w_i w_j k_ij |u_i - u_j|^2  =  1/2 sum_i w_i d_i u_i . (u_i - (Pu)_i)
    E(u) = J(u) + 1/2 sum_i m_i lambda_i |u_i - f_i|^2

The measure m of the fidelity is w (``measure='l2'``, fidelity lambda) or w d (``measure='degree'``, fidelity
lambda~ = lambda / d, the constant of a NeuTRENO layer).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from nlflow._array import Array, constant_like, namespace, over_channels, same_kind
from nlflow.affinities import Affinity
from nlflow.errors import InputError, NumericalError, check_array, check_choice, check_integer, check_number
from nlflow.krylov import conjugate_gradients

__all__ = ["METRICS", "E", "J", "Minimizer", "NodeFidelity"]

METRICS = ("l2", "degree")


@dataclass(frozen=True)
class NodeFidelity:
    """A fidelity operator that multiplies each node's vector by one number, the same for all or one for each node.

    Flows and integrators use only these methods, so a fidelity with one matrix for each node can take its place.
    """

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
        return float(xp.min(self.values)), float(xp.max(self.values))


@dataclass(frozen=True)
class Minimizer:
    """A minimiser and how well it was reached.

    Attributes
    ----------
    u : array
        The minimiser, shaped like the observed signal.
    residual : float
        Norm of the residual relative to that of the right-hand side, recomputed from `u`.
    iterations : int
    success : bool
        Whether the residual is within the tolerance.
    message : str
    """

    u: Array
    residual: float
    iterations: int
    success: bool
    message: str


class J:
    """Nonlocal Dirichlet energy, J(u) = 1/2 sum_ij w_i w_j k_ij |u_i - u_j|^2 (arXiv 2312.00751, eq. 5).

    Parameters
    ----------
    affinity : Affinity
        Of k; it is symmetrised to K = k + k^T here.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Gaussian, J, Points, affinity
    >>> j = J(affinity(Gaussian(width=1.0), Points([0.0, 1.0], weights=[1.0, 1.0])))
    >>> round(j.value(np.array([0.0, 2.0])), 6), round(4 * np.exp(-0.5), 6)
    (2.426123, 2.426123)
    """

    def __init__(self, affinity: Affinity) -> None:
        if not isinstance(affinity, Affinity):
            raise InputError(
                f"affinity: got {type(affinity).__name__}, expected an Affinity; build one with affinity()"
            )
        self.given = affinity
        self.affinity = affinity.symmetrised()

    def with_affinity(self, affinity: Affinity) -> J:
        """Return the same functional with another affinity of k (an evolving kernel)."""
        return type(self)(affinity)

    def _half_form(self, u: Array, average: Array | None) -> float:
        """Return J / sum(w d): 1/2 sum_i pi_i u_i . (u_i - (Pu)_i), formed about the mean so that nothing cancels."""
        xp = namespace(u)
        average = self.affinity.average(u) if average is None else average
        measure = over_channels(self.affinity.measure("degree", u), u)
        centred = u - self.affinity.mean(u, "degree")
        # P 1 = 1, so u - Pu needs no second average for the centred signal.
        return max(0.5 * float(xp.sum(measure * centred * (u - average), dtype=xp.float64)), 0.0)

    def _log_total(self) -> float:
        log_degree = self.affinity.log_degree
        xp = namespace(log_degree)
        highest = float(xp.max(log_degree))
        weights = constant_like(self.affinity.domain.weights, log_degree)
        return highest + math.log(float(xp.sum(weights * xp.exp(log_degree - highest), dtype=xp.float64)))

    def _scaled(self, value: float, normalise: bool) -> float:
        if normalise:
            return value
        log_total = self._log_total()
        if value > 0 and math.log(value) + log_total > 700:
            raise NumericalError(
                f"value: the sum of degrees is exp({log_total:.4g}), too large for a float; ask for "
                "value(u, normalise=True), which divides by it"
            )
        return value * math.exp(log_total) if value > 0 else 0.0

    def value(self, u: Array, *, normalise: bool = False, average: Array | None = None) -> float:
        """Return the functional's value.

        Parameters
        ----------
        u : array of shape ``domain.shape`` or ``domain.shape + (D,)``
        normalise : bool
            Divide by sum_i w_i d_i, which keeps the value in range for large logits.
        average : array, optional
            Pu, where it is known already; saves the one average that the value costs.

        Raises
        ------
        InputError
            For a wrong shape, NaN or infinity.
        NumericalError
            When the value overflows.
        """
        return self._scaled(self._half_form(self.affinity.check_signal("u", u), average), normalise)

    def gradient(self, u: Array, metric: str = "l2") -> Array:
        """Return the gradient in a metric: Lu (``l2``) or u - Pu (``degree``), plus the fidelity's part.

        In the inner product sum_i w_i a_i . b_i, or sum_i w_i d_i a_i . b_i. One average.
        """
        check_choice("metric", metric, METRICS)
        u = self.affinity.check_signal("u", u)
        gradient = u - self.affinity.average(u)
        return gradient if metric == "degree" else over_channels(self.affinity.degree, u) * gradient

    def fidelity_in(self, metric: str) -> NodeFidelity | None:
        """Return the fidelity's operator in the gradient for a metric; None for J."""
        check_choice("metric", metric, METRICS)
        return None

    @property
    def observed(self) -> Array | None:
        """The signal that the fidelity draws to; None for J."""
        return None


class E(J):
    """Nonlocal Dirichlet energy with a fidelity term, E = J + 1/2 sum_i m_i lambda_i |u_i - f_i|^2.

    (arXiv 2312.00751, eq. 21 and Proposition 1.)

    Parameters
    ----------
    affinity : Affinity
        Of k; it is symmetrised to K = k + k^T here.
    observed : array of shape ``domain.shape`` or ``domain.shape + (D,)``
        The signal f.
    fidelity : float or array of shape ``domain.shape``
        lambda >= 0 (``measure='l2'``) or lambda~ >= 0 (``measure='degree'``); 0 where data is missing (inpainting).
    measure : {'l2', 'degree'}
        Whether the fidelity is weighted by w or by w d. In the degree metric the second gives a constant lambda~, as in
        a NeuTRENO layer.

    Raises
    ------
    InputError
        For a negative fidelity, a wrong shape, NaN or infinity.
    """

    def __init__(self, affinity: Affinity, observed: Any, fidelity: float | Array, *, measure: str = "l2") -> None:
        super().__init__(affinity)
        self._observed = self.affinity.check_signal("observed", observed)
        self.measure = check_choice("measure", measure, METRICS)
        self.fidelity = check_fidelity(fidelity, self._observed, self.affinity)

    def with_affinity(self, affinity: Affinity) -> E:
        """Return the same functional with another affinity of k (an evolving kernel)."""
        return E(affinity, self._observed, self.fidelity, measure=self.measure)

    @property
    def observed(self) -> Array:
        """The signal f that the fidelity draws to."""
        return self._observed

    def fidelity_in(self, metric: str) -> NodeFidelity:
        """Return the fidelity's operator in the gradient for a metric: lambda, lambda / d, lambda~ d or lambda~."""
        check_choice("metric", metric, METRICS)
        if metric == self.measure:
            return NodeFidelity(self.fidelity)
        if metric == "l2":
            return NodeFidelity(self.affinity.degree * self.fidelity)
        xp = namespace(self.affinity.log_degree)
        return NodeFidelity(xp.exp(-self.affinity.log_degree) * self.fidelity)

    def value(self, u: Array, *, normalise: bool = False, average: Array | None = None) -> float:
        """Return the functional's value; see `J.value`."""
        u = self.affinity.check_signal("u", u)
        self._check_observed(u)
        xp = namespace(u)
        misfit = u - self._observed
        weighted = over_channels(self.fidelity, u) * misfit * misfit
        measure = over_channels(self.affinity.measure(self.measure, u), u)
        fidelity = 0.5 * float(xp.sum(measure * weighted, dtype=xp.float64))
        dirichlet = self._half_form(u, average)
        if self.measure == "degree":
            return self._scaled(dirichlet + fidelity, normalise)
        if normalise:
            return dirichlet + fidelity * math.exp(-self._log_total())
        return self._scaled(dirichlet, normalise) + fidelity

    def gradient(self, u: Array, metric: str = "l2") -> Array:
        """Return the gradient in a metric; see `J.gradient`."""
        dirichlet = super().gradient(u, metric)
        self._check_observed(u)
        return dirichlet + self.fidelity_in(metric).times(u - self._observed)

    def minimizer(self, *, rtol: float | None = None, maxiter: int = 10_000, start: Array | None = None) -> Minimizer:
        """Return the minimiser u*, (L + lambda) u* = lambda f, by preconditioned conjugate gradients.

        Matrix-free; one average an iteration, about sqrt((2 + lambda~) / lambda~) log(1 / rtol) iterations where the
        fidelity is uniform. Where the fidelity is 0 the minimiser interpolates.

        Parameters
        ----------
        rtol : float, optional
            Residual relative to the right-hand side; 1e-10 in float64 and 1e-5 in float32 by default.
        maxiter : int
        start : array, optional
            First guess; f by default.

        Raises
        ------
        InputError
            When the fidelity is 0 everywhere: then every constant is a minimiser.
        """
        f = self._observed
        xp = namespace(f)
        single = f.dtype == xp.float32
        rtol = check_number("rtol", (1e-5 if single else 1e-10) if rtol is None else rtol, minimum=0, strict=True)
        maxiter = check_integer("maxiter", maxiter, minimum=1)
        fidelity = self.fidelity_in("degree")
        if fidelity.bounds()[1] == 0:
            raise InputError(
                "fidelity: got 0 at every node, so every constant minimises the functional; set it > 0 somewhere, or "
                "follow the J-flow to its limit"
            )
        measure = over_channels(self.affinity.measure("degree", f), f)
        # Only differences from a constant matter; taking it out keeps small fidelities well scaled.
        weight = fidelity.times(xp.ones_like(f)) * measure
        axes = tuple(range(len(self.affinity.domain.shape)))
        shift = xp.sum(weight * f, axis=axes, keepdims=True) / xp.sum(weight, axis=axes, keepdims=True)
        centred = f - shift
        guess = centred if start is None else self.affinity.check_signal("start", start) - shift

        def operator(v: Array) -> Array:
            return v - self.affinity._average(v) + fidelity.times(v)

        result = conjugate_gradients(
            operator,
            fidelity.times(centred),
            guess,
            inner=lambda a, b: xp.sum(measure * a * b, axis=axes, keepdims=True),
            precondition=lambda v: fidelity.damped(v, 1.0),
            rtol=rtol,
            maxiter=maxiter,
        )
        success = result.residual <= rtol * 1.0001
        message = f"residual {result.residual:.3g} after {result.iterations} iterations" + (
            "" if success else f", above rtol={rtol:g}: raise maxiter or rtol, or use a larger fidelity"
        )
        return Minimizer(result.x + shift, result.residual, result.iterations, success, message)

    def _check_observed(self, u: Array) -> None:
        if tuple(u.shape) != tuple(self._observed.shape):
            raise InputError(
                f"u: got shape {tuple(u.shape)}, expected {tuple(self._observed.shape)}, that of the observed signal"
            )


def check_fidelity(fidelity: Any, observed: Array, affinity: Affinity) -> Array | float:
    """Return a fidelity as a float or as an array with one value for each node, or raise `InputError`."""
    if not hasattr(fidelity, "shape") or tuple(fidelity.shape) == ():
        return check_number("fidelity", fidelity, minimum=0, hint="0 switches the term off")
    values = check_array("fidelity", fidelity)
    if tuple(values.shape) != affinity.domain.shape:
        raise InputError(
            f"fidelity: got shape {tuple(values.shape)}, expected a number or {affinity.domain.shape}, one for each "
            "node"
        )
    xp = namespace(values)
    lowest = float(xp.min(values))
    if lowest < 0:
        raise InputError(f"fidelity: got {lowest:g} at some node, expected values >= 0 (0 where data is missing)")
    values = xp.astype(values, observed.dtype)
    same_kind("fidelity", values, observed)
    return values
