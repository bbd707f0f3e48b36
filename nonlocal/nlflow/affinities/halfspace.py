"""What the weights of a lattice miss at the edge of a domain, where solutions behave like a power of the distance.

The function dist(x)^s has the fractional Laplacian 0 in a half space (Ros-Oton and Serra 2014, doi
10.1016/j.matpur.2013.06.003). A sum over nodes gives something else there, tau; the number -tau / dist^s, added to the
diagonal, makes it 0. All in units of the spacing.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import special

from nlflow._array import Floats
from nlflow.affinities.lattice import Lattice, epstein, normalization, sphere, window

BAND = 8.0
"""Nodes farther than this from an edge that is not along an axis are left as they are."""

_SUMMED = 48.0  # distances up to which tau is summed over nodes; from there its expansion is used
_TERMS = 4096  # nodes of such a sum, beyond which it is an integral
_HALF = 20  # half side of the window of a slanted edge
_BLOCK = 2**21  # powers that are computed at once


def along_axis(ndim: int, s: float, distances: Floats) -> Floats:
    """Return what is to be added to the diagonal at distances from an edge that is normal to an axis.

    The nodes of the line through them are at ``distance + integer``. O(4096) time for each distance below 48.
    """
    result = np.empty(distances.shape)
    near = distances < _SUMMED
    values, places = np.unique(distances[near], return_inverse=True)
    result[near] = np.array([_summed(ndim, s, float(x)) for x in values])[places]
    result[~near] = _expanded(ndim, s, distances[~near])
    return -result / distances**s


def slanted(s: float, distances: Floats, normals: Floats) -> Floats:
    """Return what is to be added to the diagonal at nodes of the plane near straight edges of any direction.

    Parameters
    ----------
    s : float
    distances : array of shape (N,)
        0 < distance < `BAND`.
    normals : array of shape (N, 2)
        Unit vectors into the domain.
    """
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
