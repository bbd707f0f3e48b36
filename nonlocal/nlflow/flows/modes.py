"""Modes of a flow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities import Affinity
from nlflow.functionals.preconditioners.choice import has_transform
from nlflow.functionals.preconditioners.transform import Diagonal

_TERMS = 20  # of the Taylor series of phi_k on [0, 1]: the next is 1 / 20!, below the rounding of a float64
_GAINS = 16  # functions of a spectrum that are kept, each as large as a signal


def phi(k: int, z: NDArray[Any]) -> Floats:
    """Return phi_k(-z) for z >= 0: phi_0(x) = exp(x), phi_{k+1}(x) = (phi_k(x) - 1 / k!) / x."""
    z = np.asarray(z, dtype=np.float64)
    if k == 0:
        return np.asarray(np.exp(-z))
    large = np.maximum(z, 1.0)
    value = -np.expm1(-large) / large
    for j in range(1, k):
        value = (1 / math.factorial(j) - value) / large
    near = np.minimum(z, 1.0)
    series = np.full_like(near, 1 / math.factorial(_TERMS + k))
    for j in range(_TERMS - 1, -1, -1):
        series = 1 / math.factorial(j + k) - near * series
    return np.asarray(np.where(z < 1, series, value))


def deviation(h: float, a: Any) -> Floats:
    """Return ((1 - exp(-2 h a)) / (2 a))^1/2, h^1/2 at a = 0."""
    return np.asarray(np.sqrt(h * phi(1, 2 * h * np.maximum(a, 0.0))))


def phi_of_matrices(k: int, z: Floats) -> Floats:
    """Return phi_k(-Z) of square matrices Z, shape (..., D, D), whose eigenvalues have real parts >= 0.

    By scaling, Taylor series and doubling (Skaflestad and Wright 2009, doi 10.1016/j.apnum.2008.07.013)::

        phi_k(2 x) = 2^-k (phi_0(x) phi_k(x) + sum_{j=1}^k phi_j(x) / (k - j)!)
    """
    size = np.abs(z).sum(axis=-1).max(axis=-1)
    doublings = int(max(np.ceil(np.log2(max(float(size.max(initial=0.0)), 1e-300))) + 1, 0))
    # Each matrix is scaled by itself: to double a small one often would lose its digits.
    own = np.clip(np.ceil(np.log2(np.maximum(size, 1e-300))) + 1, 0, doublings).astype(np.int64)
    x = -z / np.exp2(own)[..., None, None]
    unit = np.broadcast_to(np.eye(z.shape[-1]), z.shape)
    values = [_taylor(j, x, unit) for j in range(k + 1)]
    for step in range(doublings):
        left = (own > step)[..., None, None]
        doubled = [values[0] @ values[0]]
        for j in range(1, k + 1):
            rest = sum((values[i] / math.factorial(j - i) for i in range(1, j + 1)), 0 * unit)
            doubled.append((values[0] @ values[j] + rest) / 2**j)
        values = [np.where(left, new, old) for new, old in zip(doubled, values, strict=True)]
    return np.asarray(values[k])


def _taylor(k: int, x: Floats, unit: Floats) -> Floats:
    series = unit / math.factorial(_TERMS + k)
    for j in range(_TERMS - 1, -1, -1):
        series = unit / math.factorial(j + k) + x @ series
    return series


class Modes:
    """A of a flow in the modes of a transform.

    Parameters
    ----------
    basis : Diagonal
    values : array of the shape of its images, or with an axis of D channels or two of D x D matrices beside
        Eigenvalues of A, or what A does to the channels of a mode.
    moving : array of the shape of images, optional
        Eigenvalues of B of the metric, 1 by default.
    """

    def __init__(self, basis: Diagonal, values: Floats, moving: Floats | None = None) -> None:
        self.basis = basis
        beside = values.ndim - basis.rest.ndim
        self._values = values[..., None] if beside == 0 else values
        self._mixed = beside == 2
        self._moving: Floats | float = 1.0 if moving is None else moving[..., None]
        self._gains: dict[tuple[Any, ...], Floats] = {}

    @property
    def alike(self) -> Floats | None:
        """The eigenvalues of A, or None where channels differ."""
        return None if self._mixed or self._values.shape[-1] > 1 else self._values[..., 0]

    def forward(self, v: NDArray[Any]) -> NDArray[Any]:
        return self.basis.forward(v)

    def back(self, image: NDArray[Any], dtype: Any) -> NDArray[Any]:
        return self.basis.back(image, dtype)

    def linear(self, image: NDArray[Any]) -> NDArray[Any]:
        return self._times(self._values, image)

    def moved(self, image: NDArray[Any]) -> NDArray[Any]:
        return image if isinstance(self._moving, float) else self._times(self._moving, image)

    def phi(self, k: int, h: float, image: NDArray[Any]) -> NDArray[Any]:
        """Apply h phi_k(-h A)."""
        of = phi_of_matrices if self._mixed else phi
        return self._times(self._gain(("phi", k, h), lambda: h * of(k, h * self._values)), image)

    def deviation(self, h: float, image: NDArray[Any]) -> NDArray[Any]:
        """Apply `deviation` of A, where no channel is mixed."""
        return self._times(self._gain(("deviation", 0, h), lambda: deviation(h, self._values)), image)

    def root_of_metric(self, image: NDArray[Any]) -> NDArray[Any]:
        return self._times(self._gain(("root", 0, 0), lambda: np.sqrt(self._moving + 0 * self._values)), image)

    def inverse(self, s: float, shift: float, image: NDArray[Any]) -> NDArray[Any]:
        """Apply (1 + s (A + shift B))^-1."""

        def gain() -> Floats:
            if not self._mixed:
                return np.asarray(1 / (1 + s * (self._values + shift * self._moving)))
            unit = (1 + s * shift) * np.eye(self._values.shape[-1])
            return np.asarray(np.linalg.inv(unit + s * self._values), np.float64)

        return self._times(self._gain(("inverse", s, shift), gain), image)

    def eigenvalues(self) -> NDArray[Any]:
        return np.asarray(np.linalg.eigvals(self._values) if self._mixed else self._values).ravel()

    def _gain(self, key: tuple[Any, ...], made: Callable[[], Floats]) -> Floats:
        if key not in self._gains:
            if len(self._gains) >= _GAINS:
                self._gains.pop(next(iter(self._gains)))  # the oldest
            self._gains[key] = made()
        return self._gains[key]

    def _times(self, gain: Floats, image: NDArray[Any]) -> NDArray[Any]:
        if not self._mixed:
            return np.asarray((gain[..., 0] if image.ndim < gain.ndim else gain) * image)
        result = np.empty_like(image)
        for i in range(gain.shape[-1]):
            result[..., i] = sum(gain[..., i, j] * image[..., j] for j in range(gain.shape[-1]))
        return result


_bases: WeakKeyDictionary[Affinity, list[Diagonal]] = WeakKeyDictionary()


def bases_of(*affinities: Affinity) -> list[Diagonal] | None:
    """Return transforms in which all affinities are diagonal, or None."""
    found = []
    for one in affinities:
        if one not in _bases:  # to find out whether a stencil has a transform takes one
            _bases[one] = [Diagonal(one)] if has_transform(one) else []
        if not _bases[one] or one.domain != affinities[0].domain:
            return None
        found += _bases[one]
    return found
