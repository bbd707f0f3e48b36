"""Averages in the continuum."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import InputError, NumericalError
from nlflow.kernels import RadialKernel

Floats = NDArray[np.float64]
Signal = Callable[[Floats], Floats]

_CUT = 1e-18  # of k(0): what a kernel leaves out beyond
_TARGET = 3e-14  # relative change between two resolutions that counts as converged
_ROUNDING = 1e-12  # relative: a change below this may be rounding
_MOST_NODES = 512  # quadrature nodes of one panel
_MOST_REACH = 400  # periods that a ray may cross
_BLOCK = 2**20  # positions at a time


def continuum_average(kernel: RadialKernel, signal: Signal, x: Floats, boundary: str) -> tuple[Floats, float]:
    """Return averages (T, D) int k(x, y) u(y) dy / int k(x, y) dy about positions x (T, m), and their error."""
    found = [_converged(kernel, signal, point, boundary) for point in np.asarray(x, dtype=np.float64)]
    return np.concatenate([average for average, _ in found]), max(error for _, error in found)


def _converged(kernel: RadialKernel, signal: Signal, point: Floats, boundary: str) -> tuple[Floats, float]:
    """Return the average about one position, doubling the quadrature nodes until that changes no more."""
    average = _about(kernel, signal, point, boundary, 8)
    nodes, error = 16, math.inf
    while True:
        finer = _about(kernel, signal, point, boundary, nodes)
        before, error = error, float(np.abs(finer - average).max())
        average, size = finer, float(np.abs(finer).max())
        # Rounding, which grows with the number of nodes, is reached where more of them change no less.
        flat = error <= _ROUNDING * size and error > before / 4
        if error <= _TARGET * size or flat or nodes >= _MOST_NODES // len(point):
            return average, error
        nodes *= 2


def _about(kernel: RadialKernel, signal: Signal, point: Floats, boundary: str, count: int) -> Floats:
    """Return the average about one position, shape (1, D), with `count` nodes in each panel."""
    reach = kernel.support(_CUT)
    if boundary == "isolated":
        reach = min(reach, math.sqrt(len(point)))
    elif reach > _MOST_REACH:
        raise InputError(
            f"kernel: got {kernel!r}, which reaches over {reach:.3g} periods of the domain, expected at most "
            f"{_MOST_REACH}; use a smaller width, or boundary='isolated'"
        )
    directions, weights = _directions(point, reach, boundary, count)
    unit, unit_weights = np.polynomial.legendre.leggauss(count)
    total, mass = None, 0.0
    rays = max(1, _BLOCK // (count * (8 + 2 * math.ceil(reach))))
    for first in range(0, len(directions), rays):
        chosen, share = directions[first : first + rays], weights[first : first + rays]
        edges = _panels(kernel, point, chosen, reach, boundary)
        half = np.diff(edges, axis=1)[:, :, None] / 2
        radius = edges[:, :-1, None] + half * (unit + 1)
        values = np.exp(kernel.log_profile(radius**2)) * half * unit_weights * share[:, None, None]
        if len(point) == 2:
            values = values * radius
        where = point + radius[..., None] * chosen[:, None, None, :]
        u = signal(_inside(where.reshape(-1, len(point)), boundary))
        part = values.reshape(-1) @ u.reshape(values.size, -1)
        total = part if total is None else total + part
        mass += float(values.sum())
    if total is None or not 0 < mass < math.inf or not np.all(np.isfinite(total)):
        raise NumericalError(f"the integral over {kernel!r} about {point.tolist()} is {mass:g}; choose another width")
    return np.asarray(total / mass)[None]


def _directions(point: Floats, reach: float, boundary: str, count: int) -> tuple[Floats, Floats]:
    """Return unit vectors and their weights; in the plane by panels that end where rays change the edge they meet."""
    if len(point) == 1:
        return np.array([[1.0], [-1.0]]), np.ones(2)
    breaks = {quarter * math.pi / 2 for quarter in range(5)}
    if boundary == "isolated":
        corners = [(a, b) for a in (0, 1) for b in (0, 1)]
        breaks |= {math.atan2(b - point[1], a - point[0]) % (2 * math.pi) for a, b in corners}
        for axis, side in corners:  # where the rim of the kernel crosses the edge x[axis] = side
            distance = abs(side - float(point[axis]))
            if 0 < distance < reach:
                middle = axis * math.pi / 2 + (0.0 if side else math.pi)
                spread = math.acos(distance / reach)
                breaks |= {(middle + sign * spread) % (2 * math.pi) for sign in (-1, 1)}
    edges = np.unique(np.array(sorted(breaks)))
    half = np.diff(edges)[:, None] / 2
    unit, unit_weights = np.polynomial.legendre.leggauss(count)
    angles = (edges[:-1, None] + half * (unit + 1)).ravel()
    return np.stack([np.cos(angles), np.sin(angles)], axis=1), (half * unit_weights).ravel()


def _panels(kernel: RadialKernel, point: Floats, directions: Floats, reach: float, boundary: str) -> Floats:
    """Return the radii at which each ray is cut, (rays, panels + 1): at the scale of the kernel, and at the edges."""
    with np.errstate(divide="ignore"):  # a ray along an edge never meets it
        slope = 1 / directions
    if boundary == "isolated":
        ends = np.where(directions > 0, (1 - point) * slope, np.where(directions < 0, -point * slope, np.inf))
        length = np.minimum(ends.min(axis=1), reach)
        crossings = np.empty((len(directions), 0))
    else:
        length = np.full(len(directions), reach)
        lines = np.arange(math.ceil(reach) + 1)
        # A signal may be continued with a kink (or a jump) at every edge: no panel goes across one.
        with np.errstate(invalid="ignore"):
            met = np.where(
                directions[:, :, None] > 0,
                (1 + lines - point[:, None]) * slope[:, :, None],
                (point[:, None] + lines) * -slope[:, :, None],
            )
        crossings = np.where(np.isfinite(met), met, np.inf).reshape(len(directions), -1)
    # Most of a kernel's mass lies near x: half of the panels within an eighth of its reach.
    inner = np.array([0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0]) * kernel.support(_CUT)
    cuts = np.concatenate([np.broadcast_to(inner, (len(directions), inner.size)), crossings], axis=1)
    return np.sort(np.minimum(cuts, length[:, None]), axis=1)


def _inside(x: Floats, boundary: str) -> Floats:
    """Return the positions in the unit box at which a signal continued beyond its edge has its values."""
    if boundary == "periodic":
        return np.asarray(x % 1.0)
    if boundary == "reflect":
        return np.asarray(1 - np.abs(1 - x % 2.0))
    return np.asarray(np.clip(x, 0.0, 1.0))  # rounding at the end of a ray
