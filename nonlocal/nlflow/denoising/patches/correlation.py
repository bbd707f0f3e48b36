"""Matrices of patches: of noise that is correlated within a patch, and the cosines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
#: Eigenvalues of a correlation count as this at least: no direction of a patch is free of noise (8 bits are rounded).
LEAST: Final = 3e-3


@dataclass(frozen=True)
class Correlation:
    """The correlation R of the noise in a patch of D samples, for each plane.

    Attributes
    ----------
    matrices, roots, whitening : array of shape (C, D, D)
        R, R^1/2 and R^-1/2, symmetric; of shape (C, 0, 0) for noise that is not correlated.
    extremes : array of shape (C, 2)
        Least and largest eigenvalue of R.
    """

    matrices: Array
    roots: Array
    whitening: Array
    extremes: Array

    @classmethod
    def of(cls, function: Array | None, patch: tuple[int, ...], planes: int) -> Correlation:
        """Return the matrices of patches (height, width) or (depth, height, width), in double precision.

        Parameters
        ----------
        function : array of shape (C, 2a+1, 2b+1), or None
            Correlation of two samples of a slice by their offset, 0 in the middle, where it is 1; 0 beyond a and b, and
            between slices.
        patch, planes
            Sides of a patch, and C.
        """
        if function is None:
            empty = np.zeros((planes, 0, 0))
            return cls(empty, empty, empty, np.ones((planes, 2)))
        reach = np.array(function.shape[1:]) // 2
        across, down, along = (
            np.subtract.outer(i.ravel(), i.ravel()) for i in np.indices((1,) * (3 - len(patch)) + patch)
        )
        inside = (across == 0) & (np.abs(down) <= reach[0]) & (np.abs(along) <= reach[1])
        places = np.where(inside, down, 0) + reach[0], np.where(inside, along, 0) + reach[1]
        values, vectors = np.linalg.eigh(np.where(inside, function[:, places[0], places[1]], 0.0))
        values = np.maximum(values, LEAST)
        turned = np.swapaxes(vectors, 1, 2)

        def raised(power: float) -> Array:
            return np.asarray((vectors * values[:, None] ** power) @ turned)

        extremes = np.stack([values.min(axis=1), values.max(axis=1)], axis=1)
        return cls(raised(1), raised(0.5), raised(-0.5), extremes)


def cosines(patch: tuple[int, int, int]) -> Array:
    """Return the orthonormal cosines of a patch of D samples as columns, shape (D, D)."""
    from scipy.fft import dctn

    size = math.prod(patch)
    basis = dctn(np.eye(size).reshape(size, *patch), axes=(1, 2, 3), norm="ortho")
    return np.asarray(basis.reshape(size, size))
