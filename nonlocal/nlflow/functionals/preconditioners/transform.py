"""The transform that diagonalizes a translation-invariant P."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from nlflow._array import Floats
from nlflow.affinities import Affinity
from nlflow.backends.threads import cores
from nlflow.domains import Grid


class Diagonal:
    """Functions of a translation-invariant P, O(N log N)."""

    def __init__(self, affinity: Affinity) -> None:
        grid, spectrum = affinity.domain, affinity.known_spectrum()
        if not isinstance(grid, Grid) or spectrum is None:  # not reached: callers have asked
            raise TypeError("affinity: no transform diagonalizes it")
        self._axes = tuple(range(grid.ndim))
        self._shape = grid.shape
        self._cosine = grid.boundary == "reflect"
        self.rest = 1 - np.minimum(spectrum.reshape(_symbol_shape(grid)), 1.0)  # eigenvalues of I - P

    def forward(self, v: NDArray[Any]) -> NDArray[Any]:
        # Rounding of the large parts must not get into those that are multiplied by 1 / phi.
        v64 = v.astype(np.float64, copy=False)
        options: dict[str, Any] = {"axes": self._axes, "workers": cores()}
        return np.asarray(fft.dctn(v64, **options) if self._cosine else fft.rfftn(v64, **options))

    @staticmethod
    def times(gains: Floats, image: NDArray[Any]) -> NDArray[Any]:
        """Multiply a transform by a function of P, given by its values at `rest`."""
        return np.asarray(gains.reshape(gains.shape + (1,) * (image.ndim - gains.ndim)) * image)

    def back(self, image: NDArray[Any], dtype: Any) -> NDArray[Any]:
        options: dict[str, Any] = {"axes": self._axes, "workers": cores()}
        if self._cosine:
            return np.asarray(fft.idctn(image, **options), dtype=dtype)
        return np.asarray(fft.irfftn(image, s=self._shape, **options), dtype=dtype)

    @property
    def multiplicities(self) -> Floats:
        """Eigenvectors of each of `rest`: 2 where a wave is told by its conjugate."""
        if self._cosine:
            return np.ones(1)
        n = self._shape[-1]
        counts = np.full(n // 2 + 1, 2.0)
        counts[0] = 1.0
        if n % 2 == 0:
            counts[-1] = 1.0
        return counts

    def power(self, image: NDArray[Any]) -> Floats:
        power = np.abs(image) ** 2 / math.prod(self._shape)
        if not self._cosine:
            counts = self.multiplicities
            return np.asarray(power * counts.reshape(counts.shape + (1,) * (image.ndim - len(self._shape))))
        for axis in self._axes:  # waves of frequency 0 have twice the norm of the others
            power = power / 2
            np.moveaxis(power, axis, 0)[0] /= 2
        return np.asarray(power)

    def diagonal(self, gains: Floats) -> Floats:
        if not self._cosine:
            return np.full(self._shape, float(np.sum(gains * self.multiplicities)) / math.prod(self._shape))
        for axis in self._axes:
            gains = np.moveaxis(_squared_waves(np.moveaxis(gains, axis, -1)), -1, axis)
        return gains


def _squared_waves(gains: Floats) -> Floats:
    """Return sum_k g_k phi_k(i)^2 along the last axis, phi_k being the orthonormal waves of the cosine transform.

    phi_k^2 = (1 + cos(2 pi k (i + 1/2) / n)) / n for k > 0: waves of twice the frequency, which n folds back.
    """
    n = gains.shape[-1]
    folded = np.zeros_like(gains)
    below, above = np.arange(1, (n + 1) // 2), np.arange(n // 2 + 1, n)
    folded[..., 2 * below] = gains[..., below]
    folded[..., 2 * n - 2 * above] -= gains[..., above]
    waves = fft.dct(folded, type=3, axis=-1, workers=cores()) / 2
    return np.asarray((np.sum(gains, axis=-1, keepdims=True) + waves) / n)


class Transform(Diagonal):
    """The inverse of (I - P) + phi_0 with phi_0 > 0."""

    name = "transform"

    def __init__(self, affinity: Affinity, phi: float) -> None:
        super().__init__(affinity)
        self._gains = 1 / (self.rest + phi)

    def __call__(self, r: NDArray[Any]) -> NDArray[Any]:
        """Return the preconditioned residual, of the shape and dtype of `r`."""
        return self.back(self.times(self._gains, self.forward(r)), r.dtype)


def _symbol_shape(grid: Grid) -> tuple[int, ...]:
    if grid.boundary == "reflect":
        return grid.shape
    return (*grid.shape[:-1], grid.shape[-1] // 2 + 1)
