"""The transform that diagonalizes a translation-invariant P, as a preconditioner."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from nlflow._array import Floats
from nlflow.affinities import Affinity
from nlflow.backends.threads import cores
from nlflow.domains import Grid


class Diagonal:
    """Functions of a translation-invariant P (`choice.has_transform`), by the transform that diagonalizes it.

    On a periodic grid the real Fourier transform, on a reflecting one the cosine transform of type 2; O(N log N).
    """

    def __init__(self, affinity: Affinity) -> None:
        grid, spectrum = affinity.domain, affinity.known_spectrum()
        if not isinstance(grid, Grid) or spectrum is None:  # not reached: callers have asked
            raise TypeError("affinity: no transform diagonalizes it")
        self._axes = tuple(range(grid.ndim))
        self._shape = grid.shape
        self._cosine = grid.boundary == "reflect"
        self.rest = 1 - np.minimum(spectrum.reshape(_symbol_shape(grid)), 1.0)  # eigenvalues of I - P

    def forward(self, v: NDArray[Any]) -> NDArray[Any]:
        """Return the transform of `v`, in double precision: P times `v` is ``(1 - rest)`` times it."""
        # Rounding of the large parts must not get into those that are multiplied by 1 / phi.
        v64 = v.astype(np.float64, copy=False)
        options: dict[str, Any] = {"axes": self._axes, "workers": cores()}
        return np.asarray(fft.dctn(v64, **options) if self._cosine else fft.rfftn(v64, **options))

    @staticmethod
    def times(gains: Floats, image: NDArray[Any]) -> NDArray[Any]:
        """Return a function of P, whose values belong to those of `rest`, times what has this transform."""
        return np.asarray(gains.reshape(gains.shape + (1,) * (image.ndim - gains.ndim)) * image)

    def back(self, image: NDArray[Any], dtype: Any) -> NDArray[Any]:
        """Return what has this transform."""
        options: dict[str, Any] = {"axes": self._axes, "workers": cores()}
        if self._cosine:
            return np.asarray(fft.idctn(image, **options), dtype=dtype)
        return np.asarray(fft.irfftn(image, s=self._shape, **options), dtype=dtype)


class Transform(Diagonal):
    """The inverse of (I - P) + phi_0 with phi_0 > 0, by the transform that diagonalizes P.

    With a uniform fidelity phi_0 it is exact; between phi_0 / a and a phi_0 the condition number is at most a^2.
    """

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
