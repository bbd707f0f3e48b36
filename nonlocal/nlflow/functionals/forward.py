"""E with a linear forward operator: signals that are seen through blur, projections or samples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import over_channels, underflowing
from nlflow.affinities import Affinity
from nlflow.errors import InputError, NumericalError, check_array, check_integer, check_number
from nlflow.functionals.energies import J
from nlflow.functionals.krylov import Solved, conjugate_gradients, default_rtol, verdict
from nlflow.functionals.metrics import Metric, as_metric
from nlflow.functionals.minimizer import Minimizer, check_shape
from nlflow.functionals.operators import Forward

Array = NDArray[Any]


@underflowing
class EA(J):
    r"""Nonlocal Dirichlet energy with a forward operator, E_A(u) = J(u) + |A u - f|^2 / (2 sigma^2).

    Quadratic, with the gradient L u + A'(A u - f) / sigma^2 for nodes of weight 1: nonlocal Tikhonov regularization.

    Parameters
    ----------
    affinity : Affinity
        Of k, frozen; it is symmetrized to K = k + k^T here. Of NumPy features.
    data : array of the data's shape
        What was measured, f.
    forward : Forward
        A, from signals of shape ``domain.shape`` or ``domain.shape + (D,)``.
    sigma : float
        Standard deviation of the noise in the data, in their units.

    Raises
    ------
    InputError
        For signals of `forward` that are none of the domain, data of another shape, sigma <= 0, NaN or infinity.

    References
    ----------
    Gilboa and Osher 2008 (doi 10.1137/070698592); Lou, Zhang, Osher and Bertozzi 2010 (doi 10.1007/s10915-009-9320-2)
    for deblurring and tomography with nonlocal operators.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Gaussian, Grid, affinity
    >>> from nlflow.functionals.forward import EA
    >>> from nlflow.functionals.operators import Forward
    >>> every_third = Forward(np.eye(60)[::3], 60)
    >>> x = np.sin(np.arange(60) / 8)
    >>> energy = EA(affinity(Gaussian(1.0), Grid(60)), x[::3], every_third, sigma=0.01)
    >>> bool(np.abs(energy.minimizer().u - x)[:58].max() < 0.05)  # the last sample is node 57
    True
    """

    def __init__(self, affinity: Affinity, data: Any, forward: Forward, sigma: float) -> None:
        super().__init__(affinity)
        if not isinstance(forward, Forward):
            raise InputError(f"forward: got {type(forward).__name__}, expected a Forward, which tests the adjoint")
        nodes = self.affinity.domain.shape
        if forward.shape not in (nodes, (*nodes, forward.shape[-1])):
            raise InputError(
                f"forward: got signals of shape {forward.shape}, expected {nodes} or {nodes} + (channels,)"
            )
        self.forward = forward
        self.data = forward.check_data(data).copy()
        self.sigma = check_number("sigma", sigma, minimum=0, strict=True)

    def with_affinity(self, affinity: Affinity) -> EA:
        """Return the same functional with another affinity of k."""
        return EA(affinity, self.data, self.forward, self.sigma)

    def _signal(self, u: Any) -> Array:
        u = self.affinity.check_signal("u", u)
        if tuple(u.shape) != self.forward.shape:
            raise InputError(f"u: got shape {tuple(u.shape)}, expected {self.forward.shape}, that of the operator")
        return np.asarray(u)

    def value(self, u: Array, *, normalize: bool = False, average: Array | None = None) -> float:
        """Return the functional's value; see `nlflow.J.value`. One average and one application of A."""
        u = self._signal(u)
        misfit = (self.forward.apply(u) - self.data) / self.sigma
        half = 0.5 * float(np.sum(misfit * misfit, dtype=np.float64))
        if normalize:
            half *= math.exp(-self.affinity.log_total())
        found = super().value(u, normalize=normalize, average=average) + half
        if not math.isfinite(found):
            raise NumericalError("value: the misfit over sigma overflows; scale the data down or give a larger sigma")
        return found

    def gradient(self, u: Array, metric: str | Metric = "l2", *, average: Array | None = None) -> Array:
        """Return the gradient in a metric; see `nlflow.J.gradient`. One application of A and of A' beside."""
        inner = as_metric(metric)
        u = self._signal(u)
        pull = self.forward.adjoint(self.forward.apply(u) - self.data) / self.sigma**2
        measure = over_channels(self._measure(inner.measure), u)
        return np.asarray(super().gradient(u, inner, average=average) + self._moved(inner, pull / measure))

    def _measure(self, name: str) -> Array:
        """Return w or w d."""
        weights = np.asarray(self.affinity.domain.weights)
        return weights if name == "l2" else weights * np.asarray(self.affinity.degree)

    def minimizer(  # type: ignore[override]  # there are no constraints, and one preconditioner
        self, *, rtol: float | None = None, maxiter: int = 10_000, start: Any = None
    ) -> Minimizer:
        """Return the minimizer, (w d (I - P) + A'A / sigma^2) u = A'f / sigma^2, by preconditioned conjugate gradients.

        Parameters
        ----------
        rtol : float, optional
            Residual relative to the right-hand side; 1e-10 in float64 and 1e-5 in float32 by default.
        maxiter : int
            Each iteration costs one average, one application of A and one of A'.
        start : array, optional
            First guess; the constant that fits the data best by default.

        Raises
        ------
        InputError
            Where A maps constants to 0, so that the minimizer is one of many.
        NumericalError
            When the iteration breaks down.
        """
        dtype = np.dtype(self.affinity.dtype or np.float64)
        ones = np.ones(self.forward.shape, dtype)
        seen = self.forward.apply(ones)
        mass = float(np.sum(seen * seen, dtype=np.float64))
        rounding = len(seen.ravel()) * float(np.finfo(dtype).eps) ** 2
        if mass <= rounding * self.forward.squared_norm * ones.size:
            raise InputError("forward: it maps constants to 0, so that the minimizer is one of many; add a measurement")
        rtol = check_number("rtol", default_rtol(ones) if rtol is None else rtol, minimum=0, strict=True)
        maxiter = check_integer("maxiter", maxiter, minimum=1)
        if start is None:
            guess = ones * dtype.type(np.sum(seen * self.data, dtype=np.float64) / mass)
        else:
            guess = check_shape("start", self.affinity.check_signal("start", start), ones)
        degree = over_channels(self._measure("degree"), ones)
        # The mean of the diagonal of A'A, from one random signal of signs (Hutchinson).
        signs = np.random.default_rng(0).choice(np.array([-1, 1], dtype), ones.shape)
        diagonal = degree + dtype.type(np.mean(self.forward.apply(signs) ** 2) * seen.size / ones.size / self.sigma**2)

        def operator(v: Array) -> Array:
            pulled = self.forward.adjoint(self.forward.apply(v)) / self.sigma**2
            return np.asarray(degree * (v - self.affinity.average(v)) + pulled)

        found = conjugate_gradients(
            operator, self.forward.adjoint(self.data.astype(dtype)) / self.sigma**2, guess, inner=total,
            precondition=lambda r: r / diagonal, rtol=rtol, maxiter=maxiter,
        )  # fmt: skip
        return told(found, rtol)


def total(a: Array, b: Array) -> Array:
    """Return the inner product of two arrays as one system, broadcastable to them."""
    return np.asarray(np.sum(a * b, dtype=np.float64, keepdims=True))


def told(found: Solved, rtol: float) -> Minimizer:
    """Return the record of what conjugate gradients found, or raise `NumericalError`."""
    if not math.isfinite(found.residual):
        raise NumericalError("operator: conjugate gradients broke down; scale the operator, the data or sigma")
    success, advice = verdict(found.residual, rtol)
    message = f"residual {found.residual:.3g} after {found.iterations} iterations{advice}"
    return Minimizer(found.x, found.residual, found.iterations, success, message)


def nearest(forward: Forward, data: Array, near: Array, pull: float, rtol: float, maxiter: int) -> Minimizer:
    """Return the minimizer u of |A u - f|^2 / 2 + pull |u - near|^2 / 2, the proximal map of a misfit.

    (A'A + pull) (u - near) = A'(f - A near), by conjugate gradients from 0; `rtol` is relative to the right-hand side.
    The condition number is at most 1 + |A|^2 / pull.
    """
    check_array("near", near)
    right = forward.adjoint(data - forward.apply(near))
    found = conjugate_gradients(
        lambda v: forward.adjoint(forward.apply(v)) + v * near.dtype.type(pull), right, 0 * near, inner=total,
        precondition=lambda r: r, rtol=rtol, maxiter=maxiter,
    )  # fmt: skip
    return replace(told(found, rtol), u=near + found.x)
