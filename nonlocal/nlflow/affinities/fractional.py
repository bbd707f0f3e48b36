"""The affinity of fractional operators."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft, special

from nlflow._array import Floats
from nlflow.affinities.base import Affinity
from nlflow.affinities.convolution import ConvolutionAffinity
from nlflow.affinities.lattice import Lattice, epstein, normalization, sphere, window
from nlflow.affinities.table import wrap
from nlflow.backends.threads import cores
from nlflow.domains import Grid, Points
from nlflow.errors import InputError, check_memory


@dataclass(frozen=True)
class Region:
    """Grid nodes inside a domain."""

    # - inside : bool, ``grid.shape``, or None where all are
    # - distance : to the edge of the domain, positive inside, in units of the spacing; None where it is not known

    grid: Grid
    inside: NDArray[np.bool_] | None = None
    distance: Floats | None = None

    @property
    def numbers(self) -> NDArray[np.intp]:
        return np.arange(self.grid.size) if self.inside is None else np.flatnonzero(self.inside)

    def domain(self) -> Grid | Points:
        if self.inside is None:
            return self.grid
        nodes = self.grid.nodes[self.numbers]
        return Points(nodes, np.full(len(nodes), self.grid.cell))

    def embed(self, u: NDArray[Any], outside: float = 0.0) -> NDArray[Any]:
        if self.inside is None:
            return u
        field = np.full((self.grid.size, *u.shape[1:]), outside, u.dtype)
        field[self.numbers] = u
        return field.reshape(*self.grid.shape, *u.shape[1:])

    def restrict(self, field: NDArray[Any]) -> NDArray[Any]:
        if self.inside is None:
            return field
        flat = field.reshape(self.grid.size, *field.shape[self.grid.ndim :])
        return np.ascontiguousarray(flat[self.numbers])


class FractionalAffinity(ConvolutionAffinity):
    """The affinity of a lattice of weights between the nodes of a region, K_ij times the cell being w_{i-j}."""

    # O(N log N) time an average, by zero padding; on a periodic grid the weights are summed over all images.

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
        return self._convolve(u) * (self._degrees.flat[0] if self._grid.boundary == "periodic" else 1)

    def sums_from(self, field: NDArray[Any]) -> NDArray[Any]:
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
    """Return what is added to the diagonal at the nodes inside, so that dist^s has no error near straight edges."""
    # Where the whole grid is inside the edges are those of the box; in one dimension they are the ends of each run of
    # nodes; in two a node within `BAND` of the edge sees it as a straight line.
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


BAND = 8.0
"""Nodes farther than this from an edge that is not along an axis are left as they are."""

_SUMMED = 48.0  # distances up to which tau is summed over nodes; from there its expansion is used
_TERMS = 4096  # nodes of such a sum, beyond which it is an integral
_HALF = 20  # half side of the window of a slanted edge
_BLOCK = 2**21  # powers that are computed at once


def along_axis(ndim: int, s: float, distances: Floats) -> Floats:
    # The nodes of the line through them are at ``distance + integer``. O(4096) time for each distance below 48.
    result = np.empty(distances.shape)
    near = distances < _SUMMED
    values, places = np.unique(distances[near], return_inverse=True)
    result[near] = np.array([_summed(ndim, s, float(x)) for x in values])[places]
    result[~near] = _expanded(ndim, s, distances[~near])
    return -result / distances**s


def slanted(s: float, distances: Floats, normals: Floats) -> Floats:
    # Distances (N,) are in (0, `BAND`); normals (N, 2) are unit vectors into the domain.
    offsets, weights = _near_weights(s)
    result = np.empty(len(distances))
    rows = max(1, _BLOCK // len(weights))
    for first in range(0, len(distances), rows):
        d, normal = distances[first : first + rows], normals[first : first + rows]
        there = np.maximum(d[:, None] + normal @ offsets, 0.0)
        tau = d**s * weights.sum() - there**s @ weights + _far(s, d)
        result[first : first + rows] = -tau / d**s
    return result


@lru_cache(maxsize=8)
def _line_weights(ndim: int, s: float) -> Floats:
    """Return the sums of weights over the layers n = 1, 2, ... across an axis; exact to rounding."""
    lattice = Lattice(ndim, s, math.inf, 0.0, normalization(ndim, s))
    n = np.arange(1.0, _TERMS + 1)
    result = normalization(1, s) * n ** (-1 - 2 * s)
    across = ndim - 1
    if across:  # Poisson summation over a layer; beyond a few layers the terms are below rounding
        power = (ndim + 2 * s) / 2
        waves = np.meshgrid(*(np.arange(-4.0, 5.0),) * across, indexing="ij")
        k = np.sqrt(sum(w * w for w in waves)).ravel()
        k = k[k > 0][:, None]
        order, few = power - across / 2, n[:8]
        terms = (k / few) ** order * special.kv(order, 2 * math.pi * k * few)
        result[:8] += lattice.constant * 2 * math.pi**power / math.gamma(power) * terms.sum(axis=0)
    result[0] += lattice.nearest
    return result


def _summed(ndim: int, s: float, x: float) -> float:
    """Return tau at a distance, from 4096 nodes to either side and an integral beyond."""
    weights, c = _line_weights(ndim, s), normalization(1, s)
    n = np.arange(1.0, _TERMS + 1)
    sums = weights @ (2 * x**s - (x + n) ** s - np.maximum(x - n, 0.0) ** s)
    edge = _TERMS + 0.5
    beyond = c * edge**-s / s * special.hyp2f1(-s, s, 1 + s, -x / edge)
    slope = c * (x + edge) ** s * edge ** (-1 - 2 * s) * (s / (x + edge) - (1 + 2 * s) / edge)
    return float(sums + 2 * x**s * c * special.zeta(1 + 2 * s, edge + 0.5) - (beyond + slope / 24))


def _expanded(ndim: int, s: float, x: Floats) -> Floats:
    """Return tau far from the edge: what the sums miss at the edge, and at the singularity of the kernel."""
    c = normalization(1, s)
    offset = x - np.floor(x)
    # Few for the nodes of a line; to 1e-9, which is that much of tau.
    offset, places = np.unique(np.round(np.where(offset == 0, 1.0, offset), 9), return_inverse=True)
    result = np.zeros(x.shape)
    for k in range(4):
        factor = special.poch(1 + 2 * s, k) / math.factorial(k)
        result -= c * factor * _hurwitz(-s - k, offset)[places] * x ** (-1 - 2 * s - k)
    n = np.arange(1.0, 9.0)
    extra = _line_weights(ndim, s)[:8] - c * n ** (-1 - 2 * s)
    for order in (4, 6):
        moment = c * epstein(1, 1 + 2 * s - order) + 2 * float(extra @ n**order)
        slope = math.prod(s - j for j in range(order))
        result -= slope * x ** (s - order) * moment / math.factorial(order)
    return result


def _hurwitz(power: float, offset: Floats) -> Floats:
    """Return the Hurwitz zeta function at a negative power, by Euler and Maclaurin from the 20th term."""
    end = offset + 20
    result = (
        np.asarray(sum((offset + k) ** -power for k in range(20))) - end ** (1 - power) / (1 - power) + end**-power / 2
    )
    factor = power
    for k, bernoulli in ((2, 1 / 6), (4, -1 / 30), (6, 1 / 42), (8, -1 / 30)):
        result += bernoulli / math.factorial(k) * factor * end ** (-power - k + 1)
        factor *= (power + k - 1) * (power + k)
    return np.asarray(result)


@lru_cache(maxsize=8)
def _near_weights(s: float) -> tuple[Floats, Floats]:
    """Return the offsets, shape (2, K), and weights of a smooth window of the plane."""
    table = Lattice(2, s, math.inf, 0.0, normalization(2, s)).table((_HALF, _HALF))
    line = np.arange(1.0 - _HALF, _HALF)
    offsets = np.stack([v.ravel() for v in np.meshgrid(line, line, indexing="ij")])
    weights = table.ravel() * window(np.hypot(*offsets) / _HALF)
    return offsets[:, weights > 0], weights[weights > 0]


@lru_cache(maxsize=8)
def _far_fit(s: float) -> tuple[float, Floats]:
    """Return K and the Chebyshev coefficients of q in the integral beyond the window, K b^s + q(b) for b < BAND."""
    c = normalization(2, s)
    points, weights = np.polynomial.legendre.leggauss(120)
    x, w = (points + 1) / 2, weights / 2
    shell = _HALF * (1 + x) / 2
    # A substitution after which the integrand is smooth at infinity; what is cut off for small s is below rounding.
    tail = _HALF * np.exp(np.minimum(-2 / s * np.log(x), 500.0))
    r = np.concatenate([shell, tail])
    measure = np.concatenate(
        [w * _HALF / 2 * shell ** (-1 - 2 * s) * (1 - window(shell / _HALF)), w * 2 / s * _HALF ** (-2 * s) * x**3]
    )
    places = np.cos(math.pi * (np.arange(14) + 0.5) / 14)
    b = BAND * (places + 1) / 2
    ends = np.arccos(-b[:, None] / r)  # the angles at which the circle leaves the domain
    angles = ends[..., None] * (1 - (1 - x) ** 4)
    jacobian = ends[..., None] * 4 * (1 - x) ** 3 * w
    heights = np.maximum(b[:, None, None] + r[:, None] * np.cos(angles), 0.0) ** s
    q = -2 * c * np.einsum("brx,brx,r->b", heights, jacobian, measure)
    whole = c * sphere(2) * float(measure.sum())
    return whole, np.polynomial.chebyshev.chebfit(places, q, 13)


def _far(s: float, d: Floats) -> Floats:
    whole, q = _far_fit(s)
    return np.asarray(d**s * whole + np.polynomial.chebyshev.chebval(2 * d / BAND - 1, q))
