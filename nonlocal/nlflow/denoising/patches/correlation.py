"""Noise that is correlated within a patch: its matrices."""

from __future__ import annotations

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
    def of(cls, function: Array | None, patch: tuple[int, int], planes: int) -> Correlation:
        """Return the matrices of patches (height, width), in double precision.

        Parameters
        ----------
        function : array of shape (C, 2a+1, 2b+1), or None
            Correlation of two samples by their offset, 0 in the middle, where it is 1; 0 beyond a and b.
        patch, planes
            Sides of a patch, and C.
        """
        if function is None:
            empty = np.zeros((planes, 0, 0))
            return cls(empty, empty, empty, np.ones((planes, 2)))
        reach = np.array(function.shape[1:]) // 2
        rows, columns = (i.ravel() for i in np.indices(patch))
        down, along = np.subtract.outer(rows, rows), np.subtract.outer(columns, columns)
        inside = (np.abs(down) <= reach[0]) & (np.abs(along) <= reach[1])
        places = np.where(inside, down, 0) + reach[0], np.where(inside, along, 0) + reach[1]
        values, vectors = np.linalg.eigh(np.where(inside, function[:, places[0], places[1]], 0.0))
        values = np.maximum(values, LEAST)
        turned = np.swapaxes(vectors, 1, 2)

        def raised(power: float) -> Array:
            return np.asarray((vectors * values[:, None] ** power) @ turned)

        extremes = np.stack([values.min(axis=1), values.max(axis=1)], axis=1)
        return cls(raised(1), raised(0.5), raised(-0.5), extremes)
