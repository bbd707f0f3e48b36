"""The capacitance matrix of a domain inside a periodic box, as a preconditioner of fractional operators."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft, linalg, ndimage

from nlflow._array import Floats
from nlflow.affinities.fractional import Region
from nlflow.affinities.lattice import Lattice
from nlflow.affinities.table import wrap
from nlflow.backends.threads import cores

LARGEST, DEAR = 8192, 1e6
"""The matrix is formed for at most this many nodes of the strip (512 MiB), whose cube is at most 1e6 N."""

_HEAVY = 0.1  # of the sum of weights: diagonal entries from which a node belongs to the matrix
_WIDTH = {1: 64, 2: 1, 3: 1}  # of the strip in nodes; on a line a wide one costs nothing


class Capacitance:
    """The inverse of the operator on a periodic box, corrected so that it is 0 in a strip around the domain.

    With G the inverse on the box, S the strip of nodes next to the domain: G - G_S (G_SS)^-1 G_S^T (Buzbee, Dorr,
    George and Golub 1971, doi 10.1137/0708066). The trace in the strip is what the box alone gets wrong; without it
    iterations grow like h^(1/2 - s). Nodes whose diagonal is much larger than that of the others belong to the strip,
    with their diagonals. O(N log N + |S|^3) time; where |S| > 8192 or |S|^3 > 1e6 N, as in three dimensions, the
    strip is left out.

    Parameters
    ----------
    region : Region
    lattice : Lattice
    extra : array of shape (N,) or ``grid.shape``
        What the diagonal has beside the sum of weights.
    """

    def __init__(self, region: Region, lattice: Lattice, extra: Floats) -> None:
        shape = region.grid.shape
        self._room = 2 * _WIDTH[len(shape)]  # nodes between the box of the domain and the edge of the periodic box
        self._lengths = tuple(fft.next_fast_len(n + n // 2 + 2 * self._room, real=True) for n in shape)
        self._axes = tuple(range(len(shape)))
        symbol = lattice.total - fft.rfftn(wrap(lattice.table(shape), self._lengths), workers=cores()).real
        # That of constants is 0 where the horizon is small: a constant is what the strip takes away.
        others = symbol.ravel()[1:]
        symbol.flat[0] = max(float(symbol.flat[0]), 0.5 * float(others.min()))
        self._gains = 1 / symbol
        inside = np.ones(shape, bool) if region.inside is None else region.inside
        places = np.argwhere(inside) + self._room
        self._nodes: NDArray[np.intp] = np.asarray(np.ravel_multi_index(tuple(places.T), self._lengths))
        extra = extra.ravel()
        heavy = extra > _HEAVY * lattice.total
        self._set_strip(inside, self._nodes[heavy], extra[heavy])
        self._root = np.sqrt(lattice.total / (lattice.total + np.where(heavy, 0.0, extra)))

    def _set_strip(self, inside: NDArray[np.bool_], heavy: NDArray[np.intp], diagonal: Floats) -> None:
        """Form the matrix of the nodes next to the domain, and of those with a large diagonal."""
        room, width = self._room, 2 * _WIDTH[inside.ndim] + 1
        box = np.pad(inside, [(room, length - n - room) for n, length in zip(inside.shape, self._lengths, strict=True)])
        strip = np.flatnonzero(ndimage.maximum_filter(box, width, mode="constant") & ~box)
        self._strip = np.concatenate([strip, heavy])
        self._factor: Any = None
        count = len(self._strip)
        if not 0 < count <= LARGEST or count**3 > DEAR * len(self._nodes):
            return
        green = fft.irfftn(self._gains, s=self._lengths, workers=cores())
        places = np.stack(np.unravel_index(self._strip, self._lengths), axis=1)
        lengths = np.array(self._lengths)
        matrix = np.empty((len(places), len(places)))
        for row, place in enumerate(places):
            matrix[row] = green[tuple(((place - places) % lengths).T)]
        added = np.arange(len(strip), len(places))
        matrix[added, added] += 1 / diagonal
        self._factor = linalg.cho_factor(matrix, overwrite_a=True)

    @property
    def size(self) -> int:
        """Number of nodes of the strip whose matrix is used; 0 where it would be too large."""
        return 0 if self._factor is None else len(self._strip)

    def _green(self, values: NDArray[Any], nodes: NDArray[np.intp]) -> NDArray[Any]:
        field = np.zeros((math.prod(self._lengths), *values.shape[1:]))
        field[nodes] = values
        field = field.reshape(*self._lengths, *values.shape[1:])
        image = fft.rfftn(field, axes=self._axes, workers=cores())
        image *= self._gains.reshape(self._gains.shape + (1,) * (image.ndim - self._gains.ndim))
        back = fft.irfftn(image, s=self._lengths, axes=self._axes, workers=cores())
        return np.asarray(back).reshape(-1, *values.shape[1:])

    def __call__(self, r: NDArray[Any]) -> NDArray[Any]:
        """Return the preconditioned residual, of the shape and dtype of `r`, computed in double precision."""
        flat = r.reshape(len(self._nodes), -1).astype(np.float64)
        root = self._root[:, None]
        image = self._green(root * flat, self._nodes)
        if self._factor is not None:
            charges = linalg.cho_solve(self._factor, image[self._strip])
            image -= self._green(charges, self._strip)
        return np.asarray(root * image[self._nodes], dtype=r.dtype).reshape(r.shape)
