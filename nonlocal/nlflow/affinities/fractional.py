"""The affinity of fractional operators, and what is added to its diagonal near the edge of the domain."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from nlflow._array import Floats
from nlflow.affinities.base import Affinity
from nlflow.affinities.convolution import ConvolutionAffinity
from nlflow.affinities.halfspace import BAND, along_axis, slanted
from nlflow.affinities.lattice import Lattice, normalization
from nlflow.affinities.table import wrap
from nlflow.backends.threads import cores
from nlflow.domains import Grid, Points
from nlflow.errors import InputError, check_memory


@dataclass(frozen=True)
class Region:
    """The nodes of a grid that are inside a domain.

    Attributes
    ----------
    grid : Grid
    inside : array of bool, shape ``grid.shape``, or None
        None where all are.
    distance : array of shape ``grid.shape``, or None
        To the edge of the domain, positive inside, in units of the spacing; None where it is not known.
    """

    grid: Grid
    inside: NDArray[np.bool_] | None = None
    distance: Floats | None = None

    @property
    def numbers(self) -> NDArray[np.intp]:
        """The numbers of the nodes inside, in C order."""
        return np.arange(self.grid.size) if self.inside is None else np.flatnonzero(self.inside)

    def domain(self) -> Grid | Points:
        """Return the domain of signals: the grid, or the nodes inside as points."""
        if self.inside is None:
            return self.grid
        nodes = self.grid.nodes[self.numbers]
        return Points(nodes, np.full(len(nodes), self.grid.cell))

    def embed(self, u: NDArray[Any], outside: float = 0.0) -> NDArray[Any]:
        """Return values at the nodes inside as a signal on the grid."""
        if self.inside is None:
            return u
        field = np.full((self.grid.size, *u.shape[1:]), outside, u.dtype)
        field[self.numbers] = u
        return field.reshape(*self.grid.shape, *u.shape[1:])

    def restrict(self, field: NDArray[Any]) -> NDArray[Any]:
        """Return the values of a signal on the grid at the nodes inside."""
        if self.inside is None:
            return field
        flat = field.reshape(self.grid.size, *field.shape[self.grid.ndim :])
        return np.ascontiguousarray(flat[self.numbers])


class FractionalAffinity(ConvolutionAffinity):
    """The affinity of a lattice of weights between the nodes of a region: K_ij times the cell is w_{i-j}.

    O(N log N) time an average, by zero padding; on a periodic grid the weights are summed over all images.

    Parameters
    ----------
    region : Region
    lattice : Lattice
    memory_limit : float, optional
        Bytes.

    Raises
    ------
    InputError
        When a node sees no other, since the horizon is too small for the region.
    MemoryLimitError
        When the transforms would pass the limit.
    """

    def __init__(self, region: Region, lattice: Lattice, memory_limit: float | None = None) -> None:
        grid = region.grid
        Affinity.__init__(self, region.domain(), None, symmetric=True, positive_semidefinite=False)
        check_memory(
            f"a fractional operator on {grid.size} nodes", 8 * grid.size * (2 ** (grid.ndim + 1) + 2),
            "use fewer nodes or raise memory_limit", memory_limit,
        )  # fmt: skip
        self._grid, self._region = grid, region
        self._axes = tuple(range(grid.ndim))
        self._symbols: dict[Any, NDArray[Any]] = {}
        if grid.boundary == "periodic":
            self._lengths = grid.shape
            symbol = _periodic_symbol(lattice, grid.shape, memory_limit)
            total = float(symbol.flat[0])
            self._symbol = symbol / total
            self._degrees = np.full(grid.shape, total)
            return
        self._lengths = tuple(fft.next_fast_len(2 * n - 1, real=True) for n in grid.shape)
        self._symbol = fft.rfftn(wrap(lattice.table(grid.shape), self._lengths), workers=cores()).real.copy()
        self._degrees = self._convolve(np.ones(self.domain.shape))
        if self._degrees.min() < 1e-10 * lattice.total:
            raise InputError(
                f"inside: node {int(self._degrees.argmin())} of those inside sees no other within the horizon; leave "
                "such nodes out, or choose a larger horizon"
            )

    def _convolve(self, u: NDArray[Any]) -> NDArray[Any]:
        return self._region.restrict(super()._convolve(self._region.embed(u)))

    def sums(self, u: NDArray[Any]) -> NDArray[Any]:
        """Return sum_j w_{i-j} u_j at the nodes inside."""
        return self._convolve(u) * (self._degrees.flat[0] if self._grid.boundary == "periodic" else 1)

    def sums_from(self, field: NDArray[Any]) -> NDArray[Any]:
        """Return the sums at the nodes inside over a signal on the whole grid."""
        return self._region.restrict(super()._convolve(field))

    def _log_degree(self) -> Floats:
        # Functionals take K = k + k^T: the weights are those of K.
        return np.asarray(np.log(self._degrees / 2))


def _periodic_symbol(lattice: Lattice, shape: tuple[int, ...], memory_limit: float | None) -> Floats:
    """Return the eigenvalues of the sum with the weights of all images, that of constants first."""
    if math.isinf(lattice.horizon) and lattice.tempering == 0:
        return lattice.symbol(shape)
    # Beyond 40 / tempering the exponential is below rounding.
    reach = min(lattice.horizon, 40 / lattice.tempering if lattice.tempering else math.inf)
    sides = (math.ceil(reach) + 2,) * lattice.ndim
    check_memory(
        f"the images of a kernel that reaches {reach:.4g} nodes", 24 * math.prod(2 * n for n in sides),
        "use a smaller horizon, a larger tempering or none of both, or raise memory_limit", memory_limit,
    )  # fmt: skip
    return np.asarray(fft.rfftn(wrap(lattice.table(sides), shape), workers=cores()).real)


def edge_correction(region: Region, lattice: Lattice) -> Floats:
    """Return what is added to the diagonal so that dist^s has no error near straight edges; at the nodes inside.

    Where the whole grid is inside the edges are those of the box; in one dimension they are the ends of each run of
    nodes; in two a node within `BAND` of the edge sees it as a straight line.
    """
    scale = lattice.constant / normalization(lattice.ndim, lattice.s)
    if region.inside is None:
        result = np.zeros(region.grid.shape)
        for axis, n in enumerate(region.grid.shape):
            places = np.asarray(np.arange(n) + 0.5, np.float64)
            line = _reaching(lattice, places, along_axis(lattice.ndim, lattice.s, places))
            result += (line + line[::-1]).reshape([-1 if a == axis else 1 for a in range(region.grid.ndim)])
        return scale * result
    if region.grid.ndim == 1:
        return scale * _runs(region, lattice)
    distance = np.asarray(region.distance)
    slopes = np.stack([region.restrict(slope) for slope in np.gradient(distance)], axis=-1)
    d = region.restrict(distance)
    near = d < BAND
    lengths = np.linalg.norm(slopes[near], axis=1)
    if lengths.size and not (lengths.min() > 0.5 and lengths.max() < 1.5):
        raise InputError(
            f"inside: the distances change by {lengths.min():.3g} to {lengths.max():.3g} times the way near the edge, "
            "expected 1: give the distance to the edge in units of length, negative outside, or a mask of bool"
        )
    result = np.zeros(len(d))
    result[near] = slanted(lattice.s, d[near], slopes[near] / lengths[:, None])
    return scale * _reaching(lattice, d, result)


def _runs(region: Region, lattice: Lattice) -> Floats:
    """Return the corrections of each run of nodes of a line, from both of its ends."""
    d, numbers = region.restrict(np.asarray(region.distance)), region.numbers
    result = np.zeros(len(d))
    for run in np.split(np.arange(len(d)), np.flatnonzero(np.diff(numbers) > 1) + 1):
        for start, here in ((d[run[0]], run), (d[run[-1]], run[::-1])):
            places = np.asarray(start + np.arange(len(run)), np.float64)
            result[here] += _reaching(lattice, places, along_axis(1, lattice.s, places))
    return result


def _reaching(lattice: Lattice, distance: Floats, values: Floats) -> Floats:
    """Return corrections in proportion to what is left of the kernel at the edge."""
    return np.where(distance < lattice.horizon, values * np.exp(-lattice.tempering * distance), 0.0)
