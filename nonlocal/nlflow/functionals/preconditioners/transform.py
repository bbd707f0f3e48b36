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
    """Functions of a translation-invariant P, by the transform that diagonalizes it.

    On a periodic grid the real Fourier transform, on a reflecting one the cosine transform of type 2; O(N log N).

    Parameters
    ----------
    affinity : Affinity
        For which `offered` is true.
    """

    def __init__(self, affinity: Affinity) -> None:
        grid, spectrum = affinity.domain, affinity.known_spectrum()
        if not isinstance(grid, Grid) or spectrum is None:  # not reached: callers have asked
            raise TypeError("affinity: no transform diagonalizes it")
        self._axes = tuple(range(grid.ndim))
        self._shape = grid.shape
        self._cosine = grid.boundary == "reflect"
        self.rest = 1 - np.minimum(spectrum.reshape(_symbol_shape(grid)), 1.0)  # eigenvalues of I - P

    @staticmethod
    def offered(affinity: Affinity) -> bool:
        """Tell whether a transform diagonalizes P."""
        grid = affinity.domain
        if affinity.method not in ("stencil", "convolution") or not isinstance(grid, Grid):
            return False
        return grid.boundary != "isolated" and affinity.known_spectrum() is not None

    def applied(self, v: NDArray[Any], *functions: Floats) -> list[NDArray[Any]]:
        """Return functions of P times `v`, of its shape and dtype; each is known by its values, as `rest` is."""
        gains = [values.reshape(values.shape + (1,) * (v.ndim - values.ndim)) for values in functions]
        # In float64: rounding of the large parts must not get into those that are multiplied by 1 / phi.
        v64 = v.astype(np.float64, copy=False)
        options: dict[str, Any] = {"axes": self._axes, "workers": cores()}
        if self._cosine:
            moved = fft.dctn(v64, **options)
            back = [fft.idctn(gain * moved, **options) for gain in gains]
        else:
            moved = fft.rfftn(v64, **options)
            back = [fft.irfftn(gain * moved, s=self._shape, **options) for gain in gains]
        return [np.asarray(one, dtype=v.dtype) for one in back]


class Transform(Diagonal):
    """The inverse of (I - P) + phi_0 for a translation-invariant P, by the transform that diagonalizes it.

    With a uniform fidelity phi_0 the inverse is exact; between phi_0 / a and a phi_0 the condition number is at most
    a^2.

    Parameters
    ----------
    affinity : Affinity
        For which `offered` is true.
    phi : float
        phi_0 > 0.
    """

    name = "transform"

    def __init__(self, affinity: Affinity, phi: float) -> None:
        super().__init__(affinity)
        self._gains = 1 / (self.rest + phi)

    def __call__(self, r: NDArray[Any]) -> NDArray[Any]:
        """Return the preconditioned residual, of the shape and dtype of `r`."""
        return self.applied(r, self._gains)[0]


def _symbol_shape(grid: Grid) -> tuple[int, ...]:
    if grid.boundary == "reflect":
        return grid.shape
    return (*grid.shape[:-1], grid.shape[-1] // 2 + 1)
