"""Kernels of a linear map."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np

from nlflow._array import Array, Floats, kept_like, underflowing
from nlflow.errors import InputError, check_floats, kind_of
from nlflow.kernels.base import Kernel, RadialKernel


@underflowing
@dataclass(frozen=True, eq=False)
class Anisotropic(Kernel):
    """A radial kernel of a linear map of the difference, ``k(x, y) = kernel(|A (x - y)|)``.

    On a grid with the boundary ``reflect`` A^T A has to be diagonal.

    Parameters
    ----------
    kernel : RadialKernel
        Of the mapped distance, such as ``Gaussian(1.0)``.
    widths : sequence of float, optional
        Factor > 0 of the kernel's own width along each axis, A = diag(1 / widths).
    matrix : array of shape (m, m), optional
        A itself, not singular.
    covariance : array of shape (m, m), optional
        C, symmetric and positive definite: |A z|^2 = z^T C^-1 z.

    Raises
    ------
    InputError
        Unless exactly one of widths, matrix and covariance is given, and is as above.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Anisotropic, Gaussian, Grid, affinity
    >>> p = affinity(Anisotropic(Gaussian(1.0), widths=(0.2, 0.05)), Grid((40, 40), spacing=1 / 40))
    >>> u = np.sin(6 * p.domain.nodes).T.reshape(2, 40, 40)
    >>> bool(np.std(p.average(u[0])) < np.std(p.average(u[1])))  # it smooths more along the first axis
    True
    """

    kernel: RadialKernel
    widths: Sequence[float] | None = None
    matrix: Array | None = field(default=None, kw_only=True)
    covariance: Array | None = field(default=None, kw_only=True)
    linear_map: Floats = field(init=False, repr=False)
    formula: ClassVar[str] = "kernel(|A (x - y)|)"

    def __eq__(self, other: object) -> bool:
        """Whether another kernel is the same function; arrays have no truth value, so their bits are compared."""
        return type(other) is type(self) and _compared(other) == _compared(self)

    def __hash__(self) -> int:
        """Return the hash of what is compared."""
        return hash(_compared(self))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.kernel, RadialKernel):
            raise InputError(f"kernel: got {kind_of(self.kernel)}, expected a radial one, such as Gaussian(1.0)")
        given = {n: getattr(self, n) for n in ("widths", "matrix", "covariance") if getattr(self, n) is not None}
        if len(given) != 1:
            raise InputError(
                f"widths: got {' and '.join(given) or 'none'}, expected exactly one of widths, matrix and covariance"
            )
        name, value = next(iter(given.items()))
        # One amplitude, so that nothing has to look for the other.
        self._set("amplitude", self.amplitude * self.kernel.amplitude)
        self._set("kernel", replace(self.kernel, amplitude=1.0))
        self._set("linear_map", _map(name, check_floats(name, value)))
        self._set("positive_semidefinite", self.kernel.positive_semidefinite)

    @cached_property
    def compared(self) -> RadialKernel:
        """The radial kernel of the mapped features."""
        return replace(self.kernel, amplitude=self.amplitude)

    def is_definite(self, dimensions: int) -> bool:
        return self.kernel.is_definite(dimensions)

    @property
    def diagonal(self) -> bool:
        """Whether the kernel is even along each axis."""
        gram = self.linear_map.T @ self.linear_map
        return bool(np.all(np.abs(gram - np.diag(np.diag(gram))) <= 1e-14 * np.abs(gram).max()))

    def map_features(self, features: Array, queries: Array | None = None) -> tuple[Array, Array]:
        """Return A x."""
        mapped = self._mapped(features)
        return (mapped if queries is None else self._mapped(queries)), mapped

    def _mapped(self, features: Array) -> Array:
        if features.shape[-1] != len(self.linear_map):
            raise InputError(
                f"kernel: got a map of {len(self.linear_map)} coordinates, expected {features.shape[-1]}, as many as "
                "what is compared has"
            )
        return features @ kept_like(self.linear_map, features).T

    def log_matrix(self, x: Array, y: Array) -> Array:
        """Return log k of mapped features."""
        return self.kernel.log_matrix(x, y)

    def supports(self, rtol: float, axes: int) -> tuple[float, ...]:
        """See `RadialKernel.supports`."""
        self._mapped(np.zeros((1, axes)))  # raises where there are others
        inverse = np.linalg.inv(self.linear_map)
        radius = self.kernel.support(rtol)
        return tuple(radius * float(np.sqrt(np.sum(row * row))) for row in inverse)

    def squared(self, offsets: Sequence[Floats]) -> Floats:
        """Return |A z|^2."""
        rows = (sum(a * z for a, z in zip(row, offsets, strict=True)) for row in self.linear_map)
        return np.asarray(sum(np.square(row) for row in rows))


PositionKernel: TypeAlias = RadialKernel | Anisotropic
"""A kernel that compares positions of nodes."""


def _map(name: str, value: Floats) -> Floats:
    if name == "widths":
        if value.ndim != 1 or value.min() <= 0:
            raise InputError(f"widths: got {value.tolist()}, expected a number > 0 for each axis")
        return np.diag(1 / value)
    if value.ndim != 2 or value.shape[0] != value.shape[1]:
        raise InputError(f"{name}: got shape {value.shape}, expected a square matrix")
    if name == "covariance":
        if not np.allclose(value, value.T, rtol=1e-12, atol=0):
            raise InputError("covariance: got a matrix that is not symmetric, expected (C + C^T) / 2")
        try:
            return np.asarray(np.linalg.inv(np.linalg.cholesky(value)))
        except np.linalg.LinAlgError as error:
            raise InputError("covariance: got a matrix that is not positive definite, expected one that is") from error
    if not np.linalg.cond(value) < 1 / math.sqrt(np.finfo(np.float64).eps):
        raise InputError("matrix: got a singular one, under which points that are apart fall together")
    return value


def _compared(kernel: Any) -> tuple[Any, ...]:
    return kernel.kernel, kernel.amplitude, kernel.linear_map.shape, kernel.linear_map.tobytes()
