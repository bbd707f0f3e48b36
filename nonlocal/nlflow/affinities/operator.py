"""Sums between two sets of points."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator

from nlflow._array import Floats, is_tensor, on_host, same_kind, underflowing
from nlflow.affinities.pair_fields import PairFields
from nlflow.affinities.pair_sums import PairSums
from nlflow.errors import InputError, NumericalError, check_array, checked_call, kind_of
from nlflow.kernels import ExpDotProduct, Kernel, RadialKernel
from nlflow.kernels.differentiation import PARAMETER, away_from_zero, derivative, substituted
from nlflow.kernels.expressions import Expression, number
from nlflow.kernels.forms import base_two, traced
from nlflow.kernels.rewriting import multiply, simplified

ROUNDING = {"float32": 4e-6, "float64": 2e-13}
"""By the type of points: the error of a sum, relative to sum_j k_ij |w_j| + k(0) sum_j |w_j| / N."""


@dataclass(frozen=True)
class Gradients:
    """Derivatives by `KernelOperator.gradients`.

    Attributes
    ----------
    x : array of shape (M, d)
    y : array of shape (N, d)
        By the second points, also where they are the first.
    weights : array like w
    parameters : dict of float
        By the amplitude, and by those parameters of the kernel that are named in `KernelOperator.parameters`.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    weights: NDArray[Any]
    parameters: dict[str, float]


@checked_call
@underflowing
def kernel_operator(kernel: Kernel, x: Any, y: Any = None) -> KernelOperator:
    """Return the sums (Kw)_i = sum_j k(x_i, y_j) w_j as an operator, without a matrix.

    Weights have any sign; rounding is relative to sum_j (k_ij + k(0) / N) |w_j|. O((M + N) d) memory, O(M N d) time a
    product.

    Parameters
    ----------
    kernel : RadialKernel, Anisotropic or ExpDotProduct
    x : array_like or tensor of shape (M, d)
    y : array_like or tensor of shape (N, d), optional
        Of the kind of `x`; `x` itself by default.

    Returns
    -------
    KernelOperator
        A SciPy ``LinearOperator`` of shape (M, N).

    Raises
    ------
    InputError
        For another kernel, points of other kinds or widths, and NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Gaussian
    >>> from nlflow.affinities import kernel_operator
    >>> x, y = np.linspace(0, 1, 4)[:, None], np.linspace(0, 1, 3)[:, None]
    >>> k = kernel_operator(Gaussian(width=0.5), x, y)
    >>> k.shape, np.round(k @ np.array([1.0, -2.0, 1.0]), 4).tolist()
    ((4, 3), [-0.0777, -0.6801, -0.6801, -0.0777])
    >>> k.gradients(np.array([1.0, -2.0, 1.0]), np.ones(4)).x.shape
    (4, 1)
    """
    return KernelOperator(kernel, x, x if y is None else y)


class KernelOperator(LinearOperator):
    """The sums (Kw)_i = sum_j k(x_i, y_j) w_j, of shape (M, N); `kernel_operator` makes it.

    ``k @ w`` takes arrays (N,) and (N, C), or tensors where points are tensors, with first derivatives by points and
    weights. ``k.T`` is the sum over the first points.

    Attributes
    ----------
    kernel : Kernel
    """

    def __init__(self, kernel: Any, x: Any, y: Any) -> None:
        if not isinstance(kernel, Kernel) or not isinstance(kernel.compared, RadialKernel | ExpDotProduct):
            raise InputError(
                f"kernel: got {kind_of(kernel)}, expected a kernel of points: a radial one, Anisotropic or "
                "ExpDotProduct"
            )
        first = check_array("x", x, ndim=2, hint="for one dimension a column, x[:, None]")
        second = first if y is x else check_array("y", y, ndim=2, hint="for one dimension a column, y[:, None]")
        same_kind("y", second, first)
        if first.shape[1] != second.shape[1]:
            raise InputError(f"y: got {second.shape[1]} coordinates, expected {first.shape[1]}, as many as x has")
        self.kernel, self._points = kernel, (first, second)
        self._on_device = is_tensor(first) and str(first.device) != "cpu"
        self._x, self._y = np.empty((0, 0)), np.empty((0, 0))
        if not self._on_device:
            host = np.array(on_host(first))  # a copy, since the points may change later
            self._y, self._x = self._mapped(host if second is first else np.array(on_host(second)), host)
        dtype = np.dtype(str(first.dtype).removeprefix("torch."))
        super().__init__(dtype, (int(first.shape[0]), int(second.shape[0])))  # type: ignore[call-arg]  # it has no types

    def _mapped(self, y: NDArray[Any], x: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return what is compared of y and x; one array where they are the same and are mapped alike."""
        queries, keys = self.kernel.map_features(y, None if x is y else x)
        return keys, queries

    @cached_property
    def _compared(self) -> Any:
        return self.kernel.compared

    @cached_property
    def _forward(self) -> PairSums:
        return PairSums(self._compared, self._x, self._y, np.ones(len(self._y)))

    @cached_property
    def _backward(self) -> PairSums:
        if self._x is self._y:
            return self._forward
        return PairSums(self._compared, self._y, self._x, np.ones(len(self._x)))

    def _product(self, pairs: PairSums, values: NDArray[Any]) -> NDArray[Any]:
        given = values.reshape(len(values), -1).astype(self.dtype)
        sums, _, peaks = pairs(given, degrees=False, weighted=False)
        with np.errstate(over="ignore", invalid="ignore"):
            result = sums * (self.kernel.amplitude * np.exp(peaks - pairs.log_unit))[:, None]
            result = result.astype(self.dtype)
        if not np.isfinite(result).all():
            raise NumericalError(
                f"kernel: a sum with {self.kernel!r} overflows {self.dtype}; scale points or weights, or use float64"
            )
        return np.asarray(result.reshape(len(result), *values.shape[1:]))

    def _matmat(self, weights: NDArray[Any]) -> NDArray[Any]:
        self._check_host()
        return self._product(self._forward, check_array("weights", weights))

    def _rmatmat(self, values: NDArray[Any]) -> NDArray[Any]:
        self._check_host()
        return self._product(self._backward, check_array("values", values))

    def _matvec(self, weights: NDArray[Any]) -> NDArray[Any]:
        return self._matmat(weights.reshape(-1))

    def _rmatvec(self, values: NDArray[Any]) -> NDArray[Any]:
        return self._rmatmat(values.reshape(-1))

    def _check_host(self) -> None:
        if self._on_device:
            raise InputError("weights: got an array, expected a tensor on the device of the points")

    def __matmul__(self, weights: Any) -> Any:
        """Return K w; a tensor for points that are tensors and weights that are one."""
        if not is_tensor(weights):
            return super().__matmul__(weights)
        if not is_tensor(self._points[0]):
            raise InputError("weights: got a tensor, expected an array, as the points are")
        given = check_array("weights", weights, ndim=(1, 2))
        same_kind("weights", given, self._points[0])
        if int(given.shape[0]) != self.shape[1]:
            raise InputError(f"weights: got shape {tuple(given.shape)}, expected {self.shape[1]} rows")
        from nlflow.backends.torch.operator import applied

        return applied(self, *self._points, given)

    # ---- derivatives

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the kernel's parameters by which `gradients` derives."""
        kernel = self._compared
        own = ("scale",) if isinstance(kernel, ExpDotProduct) and kernel.scale is not None else kernel.positive
        return ("amplitude", *(name for name in own if isinstance(kernel, ExpDotProduct) or self._by(name) is not None))

    def gradients(self, weights: Any, values: Any) -> Gradients:
        """Return the derivatives of sum_ic g_ic (Kw)_ic by points, weights and parameters of the kernel.

        Parameters
        ----------
        weights : array of shape (N,) or (N, C)
            w.
        values : array of shape (M,) or (M, C)
            g.

        Raises
        ------
        InputError
            For a kernel that jumps to 0 at its radius, and for arrays of other shapes.
        """
        self._check_host()
        w, g = check_array("weights", weights, ndim=(1, 2)), check_array("values", values, ndim=(1, 2))
        for name, array, count in (("weights", w, self.shape[1]), ("values", g, self.shape[0])):
            if array.shape[0] != count or array.shape[1:] != w.shape[1:]:
                raise InputError(f"{name}: got shape {array.shape}, expected {(count, *w.shape[1:])}")
        transposed = self._rmatmat(g)
        columns = w.reshape(len(w), -1).astype(self.dtype), g.reshape(len(g), -1).astype(self.dtype)
        first, second, parameters = (
            self._of_products(*columns) if isinstance(self._compared, ExpDotProduct) else self._of_distances(*columns)
        )
        parameters["amplitude"] = float(np.vdot(transposed, w)) / self.kernel.amplitude
        left, right = self._unmapped(first, second)
        return Gradients(left.astype(self.dtype), right.astype(self.dtype), transposed, parameters)

    def _unmapped(self, first: Floats, second: Floats) -> tuple[Floats, Floats]:
        """Return derivatives by points, of those by what is compared."""
        if isinstance(self.kernel, ExpDotProduct):
            maps = self.kernel.query_map, self.kernel.key_map
            one, other = (f if m is None else f @ on_host(m).T for f, m in zip((first, second), maps, strict=True))
            return one, other
        linear = getattr(self.kernel, "linear_map", None)
        return (first, second) if linear is None else (first @ linear, second @ linear)

    def _of_products(self, w: Floats, g: Floats) -> tuple[Floats, Floats, dict[str, float]]:
        kernel = self._compared
        scale = 1 / math.sqrt(self._y.shape[1]) if kernel.scale is None else kernel.scale
        first, second = np.zeros(self._x.shape), np.zeros(self._y.shape)
        for c in range(w.shape[1]):
            first += scale * g[:, c : c + 1] * self._product(self._forward, w[:, c : c + 1] * self._y)
            second += scale * w[:, c : c + 1] * self._product(self._backward, g[:, c : c + 1] * self._x)
        by_scale = {} if kernel.scale is None or scale == 0 else {"scale": float(np.vdot(first, self._x)) / scale}
        return first, second, by_scale

    def _of_distances(self, w: Floats, g: Floats) -> tuple[Floats, Floats, dict[str, float]]:
        kernel = self._compared
        if math.isinf(kernel.steepness) and _jumps(kernel):
            raise InputError(f"kernel: {kernel!r} jumps, expected one that has a derivative, such as Wendland(radius)")
        unit, amplitude = kernel.unit, kernel.amplitude
        x = self._x * self._x.dtype.type(unit)
        y = x if self._x is self._y else self._y * self._y.dtype.type(unit)
        slope = PairFields(self._slope, self._reach)
        first, second = np.zeros(x.shape), np.zeros(y.shape)
        for c in range(w.shape[1]):
            first += g[:, c : c + 1] * slope.pulls(x, y, w[:, c])
            second += w[:, c : c + 1] * slope.pulls(y, x, g[:, c])
        parameters = {}
        for name in self.parameters[1:]:
            sums = PairFields(self._by(name), self._reach).sums(x, y, w)  # type: ignore[arg-type]  # it is among them
            parameters[name] = amplitude * float(np.vdot(g, sums))
        return first * amplitude * unit, second * amplitude * unit, parameters

    @cached_property
    def _reach(self) -> float:
        """Distance, times the unit, beyond which neither the kernel nor its slopes are seen."""
        kernel = self._compared
        radius = float(kernel.support(float(np.finfo(self.dtype).eps) ** 2 / 1e4))
        return radius * float(kernel.unit) * (1 + 1e-9)

    @cached_property
    def _slope(self) -> Expression:
        """2 dk/ds of the squared distance s times unit^2."""
        k = self._compared.weight(self._compared.unit)
        return away_from_zero(simplified(multiply(derivative(k), number(2))))

    def _by(self, name: str) -> Expression | None:
        """Return dk / d parameter as an expression of s times unit^2; None where the formula does not tell it."""
        kernel = self._compared
        symbolic = copy.copy(kernel)
        for kept in ("_weights", "scale", "steepness"):  # what was found of the kernel with a number
            vars(symbolic).pop(kept, None)
        object.__setattr__(symbolic, name, PARAMETER)
        try:
            log = traced(symbolic.log_profile, kernel.unit)
            slope = simplified(substituted(derivative(log, PARAMETER), getattr(kernel, name)))
        except InputError:
            return None
        return away_from_zero(simplified(multiply(kernel.weight(kernel.unit), base_two(slope))))


def _jumps(kernel: RadialKernel) -> bool:
    """Whether k falls from what is seen to 0 at the end of its support."""
    end = kernel.support(0.0)
    if math.isinf(end):
        return False
    with np.errstate(all="ignore"):
        return bool(np.exp(kernel.log_profile(np.array([(end * (1 - 1e-6)) ** 2])))[0] > 1e-2)
