"""Linear forward operators A, and E with one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import over_channels, underflowing
from nlflow.affinities import Affinity
from nlflow.errors import (
    InputError,
    NumericalError,
    check_array,
    check_flag,
    check_integer,
    check_number,
    check_numpy,
    kind_of,
)
from nlflow.functionals.constraint import components_of
from nlflow.functionals.energies import J, check_shape
from nlflow.functionals.krylov import Solved, conjugate_gradients, default_rtol
from nlflow.functionals.metrics import Metric, as_metric
from nlflow.functionals.minimizer import Minimizer, told

Array = NDArray[Any]
Map = Callable[[Array], Any]

_DRAWS = 3
_POWER_STEPS = 30
# Rounding errors of a sum of n terms are at most 6 sqrt(n) units of rounding but for a probability of 2 exp(-18)
# (Higham and Mary 2019, doi 10.1137/18M1226312, theorem 3.1).
_LAMBDA = 6.0


class Forward:
    """A linear operator A from signals to data, with its adjoint, which is tested.

    Parameters
    ----------
    operator : array of shape (M, N), sparse matrix, linear operator, or pair of functions
        A matrix; an object with ``shape``, ``matvec`` and ``rmatvec``; or ``(apply, adjoint)``, functions of arrays of
        the shapes of signal and data. The first two act on what ``ravel`` makes of a signal.
    shape : int or tuple of int
        Of the signals, with N values.
    data_shape : int or tuple of int, optional
        Of the data: (M,), or what the function returns, by default.
    rtol : float, optional
        Mismatch that the test allows; by default 6 sqrt(M + N) units of rounding of the dtype that the operator
        returns.

    Raises
    ------
    InputError
        For complex operators, sizes that do not fit, an operator that maps everything to 0, and a wrong adjoint.
    NumericalError
        For NaN and infinity from the operator.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.priors import Forward
    >>> halves = Forward((lambda u: u[:, ::2], lambda v: np.repeat(v, 2, axis=1) * [1, 0, 1, 0]), (3, 4))
    >>> halves.data_shape
    (3, 2)
    """

    def __init__(
        self,
        operator: Any,
        shape: int | tuple[int, ...],
        *,
        data_shape: int | tuple[int, ...] | None = None,
        rtol: float | None = None,
    ) -> None:
        self.shape = checked_shape("shape", shape)
        given = None if data_shape is None else checked_shape("data_shape", data_shape)
        rtol = None if rtol is None else check_number("rtol", rtol, minimum=0, strict=True)
        if isinstance(operator, tuple | list) and len(operator) == 2 and all(map(callable, operator)):
            self._apply, self._adjoint = operator
            found = np.shape(self._apply(np.ones(self.shape)))
            self.data_shape = found if given is None else given
        else:
            rows = self._take_matrix(operator)
            self.data_shape = (rows,) if given is None else given
            if math.prod(self.data_shape) != rows:
                raise InputError(f"data_shape: got {self.data_shape}, expected sizes that multiply to {rows}, the rows")
        self.size, self.data_size = math.prod(self.shape), math.prod(self.data_shape)
        self._test(rtol)

    def _take_matrix(self, operator: Any) -> int:
        if hasattr(operator, "matvec") and hasattr(operator, "rmatvec"):
            forth, back = operator.matvec, operator.rmatvec
        elif hasattr(operator, "tocsr"):
            matrix = operator.tocsr()
            check_array("operator", matrix.data if matrix.nnz else np.zeros(1, matrix.dtype))
            forth, back = matrix.__matmul__, matrix.T.tocsr().__matmul__
        else:
            hint = "or a sparse matrix, a linear operator (shape, matvec, rmatvec), or a pair of functions"
            matrix = check_numpy("operator", operator, ndim=2, hint=hint, remedy=f", {hint}")
            forth, back = matrix.__matmul__, matrix.T.__matmul__
        if np.dtype(getattr(operator, "dtype", None) or np.float64).kind == "c":
            raise InputError(f"operator: got a complex one ({operator.dtype}), expected real numbers; stack real and "
                             "imaginary parts as rows")  # fmt: skip
        rows, columns = getattr(operator, "shape", np.shape(operator))
        if columns != math.prod(self.shape):
            raise InputError(
                f"operator: got {rows} x {columns}, expected {math.prod(self.shape)} columns, one for each sample of "
                f"signals of shape {self.shape}"
            )
        self._apply = lambda u: np.reshape(forth(np.ravel(u)), self.data_shape)
        self._adjoint = lambda v: np.reshape(back(np.ravel(v)), self.shape)
        return int(rows)

    # ---- what it does

    def apply(self, u: Array) -> Array:
        """Return A u in the dtype of `u`; `NumericalError` when it is not finite."""
        u = _fitting("u", u, self.shape)
        return self._forth(u).astype(u.dtype, copy=False)

    def adjoint(self, v: Array) -> Array:
        """Return A' v, as `apply` does A u."""
        v = _fitting("v", v, self.data_shape)
        return self._back(v).astype(v.dtype, copy=False)

    def check_data(self, data: Any) -> Array:
        """Return data that fit, or raise `InputError`."""
        return _shaped("data", check_numpy("data", data), self.data_shape, ", that of A u")

    @cached_property
    def squared_norm(self) -> float:
        """The largest eigenvalue of A'A from below, by 30 steps of the power method.

        On average it is short by at most a share of 0.871 log(N) / 29 (Kuczynski and Wozniakowski 1992, doi
        10.1137/0613066).
        """
        u = np.random.default_rng(0).standard_normal(self.shape)
        size = 0.0
        for _ in range(_POWER_STEPS):
            u = self.adjoint(self.apply(u / np.linalg.norm(u)))
            size = float(np.linalg.norm(u))
        return size

    def __repr__(self) -> str:
        return f"<Forward from {self.shape} to {self.data_shape}>"

    # ---- tests

    def _forth(self, u: Array) -> Array:
        return _checked(self._apply(u), self.data_shape, "A u")

    def _back(self, v: Array) -> Array:
        return _checked(self._adjoint(v), self.shape, "A'v")

    def _test(self, rtol: float | None) -> None:
        """Raise `InputError` unless <Au, v> = <u, A'v> for random u and v, within rtol (|Au| |v| + |u| |A'v|).

        v = Au / rms(Au) + w lies along Au in part, so that a wrong factor shows in full.
        """
        draws = [self._draw(np.random.default_rng(seed)) for seed in range(_DRAWS)]
        roughest = max(float(np.finfo(a.dtype).eps) for a in draws[0] if a.dtype.kind == "f")
        allowed = _LAMBDA * math.sqrt(self.size + self.data_size) * roughest / 2 if rtol is None else rtol
        for u, forth, v, back in draws:
            left, right = _inner(forth, v), _inner(u, back)
            scale = float(np.linalg.norm(forth) * np.linalg.norm(v) + np.linalg.norm(u) * np.linalg.norm(back))
            if not abs(left - right) <= allowed * scale:
                raise InputError(
                    f"operator: its adjoint is none: <Au, v> = {left:.6g} but <u, A'v> = {right:.6g} for random u and "
                    f"v, a mismatch of {abs(left - right) / scale:.2g}, expected at most {allowed:.2g}; give the "
                    "transpose of a linear A (without an offset), or rtol= for an operator of lower precision"
                )

    def _draw(self, rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
        """Return a random u, Au, a v that lies along Au in part, and A'v."""
        u, w = rng.standard_normal(self.shape), rng.standard_normal(self.data_shape)
        forth = self._forth(u)
        size = float(np.linalg.norm(forth))
        if size == 0:
            raise InputError("operator: it maps a random signal to 0, expected one that measures something")
        v = forth * (math.sqrt(self.data_size) / size) + w
        try:
            return u, forth, v, self._back(v)
        except NotImplementedError as error:
            raise InputError("operator: it has no adjoint (rmatvec), expected one; give the transpose of A") from error


def _inner(a: Array, b: Array) -> float:
    return float(np.sum(a * b, dtype=np.float64))


def _fitting(name: str, value: Any, shape: tuple[int, ...]) -> Array:
    """Return a signal or data; floats of NumPy are not looked through again at each step of a method."""
    known = type(value) is np.ndarray and value.dtype.kind == "f"
    return _shaped(name, value if known else check_numpy(name, value), shape)


def _shaped(name: str, array: Array, shape: tuple[int, ...], of: str = "") -> Array:
    if array.shape != shape:
        raise InputError(f"{name}: got shape {array.shape}, expected {shape}{of}")
    return array


def _checked(result: Any, shape: tuple[int, ...], what: str) -> Array:
    array = np.asarray(result)
    if array.dtype.kind not in "biuf":
        raise InputError(f"operator: {what} has dtype {array.dtype}, expected real numbers; stack real and imaginary "
                         "parts")  # fmt: skip
    if array.shape != shape:
        raise InputError(f"operator: {what} has shape {array.shape}, expected {shape}")
    if not np.isfinite(array).all():
        count = int((~np.isfinite(array)).sum())
        raise NumericalError(f"operator: {what} has {count} NaN or infinite value(s), expected finite ones")
    return array


def checked_shape(name: str, value: Any) -> tuple[int, ...]:
    sizes = value if isinstance(value, tuple | list) else (value,)
    try:
        shape = tuple(int(n.__index__()) for n in sizes)
    except (AttributeError, TypeError):
        shape = ()
    if not shape or min(shape) < 1 or any(isinstance(n, bool) for n in sizes):
        raise InputError(f"{name}: got {value!r}, expected a tuple of integers >= 1")
    return shape


@underflowing
class EA(J):
    """Nonlocal Dirichlet energy with a forward operator, E_A(u) = J(u) + |A u - f|^2 / (2 sigma^2).

    (Gilboa and Osher 2008, doi 10.1137/070698592; Lou, Zhang, Osher and Bertozzi 2010, doi 10.1007/s10915-009-9320-2.)

    Parameters
    ----------
    affinity : Affinity
        Of k, frozen, of NumPy features; it is symmetrized to K = k + k^T here.
    data : array of the data's shape
        The measured f.
    forward : Forward
        A, from signals of shape ``domain.shape`` or ``domain.shape + (D,)``.
    sigma : float
        Standard deviation of the noise in the data, in their units.

    Raises
    ------
    InputError
        For a `forward` for other signals, data of another shape, sigma <= 0, NaN or infinity.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Gaussian, Grid, affinity
    >>> from nlflow.functionals.forward import EA
    >>> from nlflow.functionals.forward import Forward
    >>> every_third = Forward(np.eye(60)[::3], 60)
    >>> x = np.sin(np.arange(60) / 8)
    >>> energy = EA(affinity(Gaussian(1.0), Grid(60)), x[::3], every_third, sigma=0.01)
    >>> bool(np.abs(energy.minimizer().u - x)[:58].max() < 0.05)  # the last sample is node 57
    True
    """

    def __init__(self, affinity: Affinity, data: Any, forward: Forward, sigma: float) -> None:
        super().__init__(affinity)
        if not isinstance(forward, Forward):
            raise InputError(f"forward: got {kind_of(forward)}, expected a Forward, which tests the adjoint")
        nodes = self.affinity.domain.shape
        if forward.shape not in (nodes, (*nodes, forward.shape[-1])):
            raise InputError(
                f"forward: got signals of shape {forward.shape}, expected {nodes} or {nodes} + (channels,)"
            )
        self.forward = forward
        self.data = forward.check_data(data).copy()
        self.sigma = check_number("sigma", sigma, minimum=0, strict=True)

    def with_affinity(self, affinity: Affinity) -> EA:
        return EA(affinity, self.data, self.forward, self.sigma)

    def _signal(self, u: Any) -> Array:
        u = self.affinity.check_signal("u", u)
        if tuple(u.shape) != self.forward.shape:
            raise InputError(f"u: got shape {tuple(u.shape)}, expected {self.forward.shape}, that of the operator")
        return np.asarray(u)

    def value(self, u: Array, *, normalize: bool = False, average: Array | None = None) -> float:
        u = self._signal(u)
        misfit = (self.forward.apply(u) - self.data) / self.sigma
        half = 0.5 * float(np.sum(misfit * misfit, dtype=np.float64))
        if check_flag("normalize", normalize):
            half *= math.exp(-self.affinity.log_total())
        found = super().value(u, normalize=normalize, average=average) + half
        if not math.isfinite(found):
            raise NumericalError("value: the misfit over sigma overflows; scale the data down or give a larger sigma")
        return found

    def gradient(self, u: Array, metric: str | Metric = "l2", *, average: Array | None = None) -> Array:
        inner = as_metric(metric)
        u = self._signal(u)
        pull = self.forward.adjoint(self.forward.apply(u) - self.data) / self.sigma**2
        measure = over_channels(self._measure(inner.measure), u)
        return np.asarray(super().gradient(u, inner, average=average) + self._moved(inner, pull / measure))

    def _measure(self, name: str) -> Array:
        weights = np.asarray(self.affinity.domain.weights)
        return weights if name == "l2" else weights * np.asarray(self.affinity.degree)

    def minimizer(  # type: ignore[override]  # there are no constraints, and one preconditioner
        self, *, rtol: float | None = None, maxiter: int = 10_000, start: Any = None
    ) -> Minimizer:
        """Return the minimizer, (w d (I - P) + A'A / sigma^2) u = A'f / sigma^2, by preconditioned conjugate gradients.

        Each iteration costs one average, one application of A and one of A'.

        Parameters
        ----------
        rtol : float, optional
            Residual relative to the right-hand side; 1e-10 in float64 and 1e-5 in float32 by default.
        maxiter : int
        start : array, optional
            First guess; the constant that fits the data best by default.

        Raises
        ------
        InputError
            Where A maps a constant to 0, so that the minimizer is one of many.
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
        self._check_seen(dtype)
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
        return _told(found, rtol)

    def _check_seen(self, dtype: np.dtype[Any]) -> None:
        """Raise `InputError` where A maps the constants of one channel on one connected component to 0."""
        shape = self.affinity.domain.shape
        labels = components_of(self.affinity)
        labels = np.zeros(shape, int) if labels is None else labels
        # <A'w, 1> = <w, A 1> for a random w: one application of A' shows all of them.
        w = np.random.default_rng(0).standard_normal(self.data.shape).astype(dtype)
        pulled = self.forward.adjoint(w).astype(np.float64).reshape(labels.size, -1)
        usual = float(np.mean(pulled**2))
        count = np.bincount(labels.ravel())
        for channel, own in enumerate(pulled.T):
            sums, squares = (np.bincount(labels.ravel(), v) for v in (own, own**2))
            unseen = np.abs(sums) <= 16 * float(np.finfo(dtype).eps) * np.sqrt(squares + count * usual)
            if unseen.any():
                first = int(np.argmax(unseen[labels.ravel()]))
                raise InputError(
                    f"forward: it maps constants on {int(count[unseen].sum())} of {labels.size} nodes (the first is "
                    f"node {first}, channel {channel}) to 0, so that the minimizer is one of many; add a measurement "
                    "there"
                )


def total(a: Array, b: Array) -> Array:
    return np.asarray(np.sum(a * b, dtype=np.float64, keepdims=True))


def _told(found: Solved, rtol: float) -> Minimizer:
    if not math.isfinite(found.residual):
        raise NumericalError("operator: conjugate gradients broke down; scale the operator, the data or sigma")
    return told(found, rtol)


def nearest(forward: Forward, data: Array, near: Array, pull: float, rtol: float, maxiter: int) -> Minimizer:
    """Return the minimizer u of |A u - f|^2 / 2 + pull |u - near|^2 / 2."""
    check_array("near", near)
    right = forward.adjoint(data - forward.apply(near))
    found = conjugate_gradients(
        lambda v: forward.adjoint(forward.apply(v)) + v * near.dtype.type(pull), right, 0 * near, inner=total,
        precondition=lambda r: r, rtol=rtol, maxiter=maxiter,
    )  # fmt: skip
    return replace(_told(found, rtol), u=near + found.x)
