"""The transform that diagonalizes a translation-invariant P, as a preconditioner."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from nlflow.affinities import Affinity
from nlflow.backends.threads import cores
from nlflow.domains import Grid


class Transform:
    """The inverse of (I - P) + phi_0 for a translation-invariant P, by the transform that diagonalizes it.

    On a periodic grid the real Fourier transform, on a reflecting one the cosine transform of type 2; O(N log N). With
    a uniform fidelity phi_0 the inverse is exact; between phi_0 / a and a phi_0 the condition number is at most a^2.

    Parameters
    ----------
    affinity : Affinity
        For which `offered` is true.
    phi : float
        phi_0 > 0.
    """

    name = "transform"

    def __init__(self, affinity: Affinity, phi: float) -> None:
        grid, spectrum = affinity.domain, affinity.known_spectrum()
        if not isinstance(grid, Grid) or spectrum is None:  # not reached: callers have asked
            raise TypeError("affinity: no transform diagonalizes it")
        self._axes = tuple(range(grid.ndim))
        self._shape = grid.shape
        self._cosine = grid.boundary == "reflect"
        symbol = spectrum.reshape(_symbol_shape(grid))
        self._gains = 1 / (1 - np.minimum(symbol, 1.0) + phi)

    @staticmethod
    def offered(affinity: Affinity) -> bool:
        """Tell whether a transform diagonalizes P."""
        grid = affinity.domain
        if affinity.method not in ("stencil", "convolution") or not isinstance(grid, Grid):
            return False
        return grid.boundary != "isolated" and affinity.known_spectrum() is not None

    def __call__(self, r: NDArray[Any]) -> NDArray[Any]:
        """Return the preconditioned residual, of the shape and dtype of `r`."""
        gains = self._gains.reshape(self._gains.shape + (1,) * (r.ndim - self._gains.ndim))
        # In float64: rounding of the large parts must not get into those that are multiplied by 1 / phi.
        r64 = r.astype(np.float64, copy=False)
        options: dict[str, Any] = {"axes": self._axes, "workers": cores()}
        if self._cosine:
            back = fft.idctn(gains * fft.dctn(r64, **options), **options)
        else:
            back = fft.irfftn(gains * fft.rfftn(r64, **options), s=self._shape, **options)
        return np.asarray(back, dtype=r.dtype)


def _symbol_shape(grid: Grid) -> tuple[int, ...]:
    if grid.boundary == "reflect":
        return grid.shape
    return (*grid.shape[:-1], grid.shape[-1] // 2 + 1)
