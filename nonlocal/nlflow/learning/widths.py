"""Widths of Gaussians."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Brief, Floats, power_of_two, to_numpy
from nlflow.affinities.nearest import Neighbours, positive
from nlflow.errors import InputError

SAMPLES = 1000  # points of which all pairs are looked at
_CLOSEST = 1e-74  # median distance, of which rates of Gaussians have floats, and its inverse
_NEAR = 8  # points whose distances say how dense others lie
_FINEST, _COARSEST, _STEPS = -9, 4, 53  # powers of two of the median distance, and widths between them


@dataclass(frozen=True, repr=False)
class WidthCurve(Brief):
    """How the sums of a Gaussian grow with its width.

    Attributes
    ----------
    widths : array of shape (W,)
        sigma of exp(-|x - y|^2 / (2 sigma^2)), increasing.
    sums : array of shape (W,)
        Mean of the kernel over all pairs of points, each with itself too.
    slopes : array of shape (W,)
        d log(sums) / d log(widths).
    """

    widths: Floats
    sums: Floats
    slopes: Floats

    @property
    def best(self) -> float:
        """Width of the steepest slope."""
        return float(self.widths[int(np.argmax(self.slopes))])

    @property
    def dimension(self) -> float:
        """Steepest slope, an estimate of the dimension of the data."""
        return float(self.slopes.max())

    @property
    def gamma(self) -> float:
        """1 / (2 best^2), of exp(-gamma |x - y|^2)."""
        return 1 / (2 * self.best**2)


def width_curve(points: Any, samples: int = SAMPLES) -> WidthCurve:
    squared, count = _pairs(points, samples)
    return _grown(squared, 1 / count, 2 / count**2)


def _grown(squared: Floats, own: float, share: float) -> WidthCurve:
    """Return the curve of sums own + share sum exp(-s / (2 sigma^2)) over squared distances s."""
    middle = float(np.median(squared)) if len(squared) else 0.0
    if not middle > 0:  # more than half of the points lie at one place
        there = squared[squared > 0]
        middle = float(np.median(there)) if len(there) else 1.0
    logs = np.linspace(_FINEST, _COARSEST, _STEPS) * math.log(2)
    widths = math.sqrt(middle) * np.exp(logs)
    with np.errstate(under="ignore"):
        sums = np.array([own + share * float(np.exp(-squared / (2 * w * w)).sum()) for w in widths])
    return WidthCurve(widths, sums, np.gradient(np.log(sums), logs))


class VariableWidths:
    """Widths s_i = s q_i^beta of exp(-|x_i - x_j|^2 / (s_i s_j)), q being the density of points."""

    def __init__(self, search: Neighbours, beta: float, gamma: float | None = None) -> None:
        self._beta, self._unit = beta, search.unit
        distances, ends = search.found
        if not distances.max() > 0:
            raise InputError("X: got points that lie at one place, expected points apart, of which widths follow")
        self._near = _nearest_mean(distances)
        first = self._curve_of(distances, ends, self._near)
        self._factor, self.dimension = first.best, max(round(first.dimension), 1)
        logs = self._log_density(distances, ends, self._near)
        self._middle = float(logs.mean())
        relative = np.exp(beta * (logs - self._middle))
        self.curve = self._curve_of(distances * self._unit, ends, relative)
        self._scale = math.sqrt(2) * self.curve.best if gamma is None else 1 / math.sqrt(gamma)
        self.points = self._scale * relative

    def at(self, distances: Floats, ends: NDArray[Any]) -> Floats:
        known = distances[:, :1] == 0
        apart = np.where(known, distances[:, 1:], distances[:, :-1])
        there = np.where(known, ends[:, 1:], ends[:, :-1])
        logs = self._log_density(apart, there, _nearest_mean(apart))
        return np.asarray(self._scale * np.exp(self._beta * (logs - self._middle)))

    def _log_density(self, distances: Floats, ends: NDArray[Any], near: Floats) -> Floats:
        """Return log q at points, up to a constant, from the distances to others."""
        with np.errstate(under="ignore"):
            scaled = distances**2 / (near[:, None] * self._near[ends])
            sums = 1 + np.exp(-scaled / (2 * self._factor**2)).sum(axis=1)
        return np.asarray(np.log(sums) - self.dimension * np.log(near))

    @staticmethod
    def _curve_of(distances: Floats, ends: NDArray[Any], widths: Floats) -> WidthCurve:
        few = np.linspace(0, len(ends) - 1, min(SAMPLES, len(ends))).astype(np.intp)
        squared = distances[few] ** 2 / (widths[few, None] * widths[ends[few]])
        return _grown(squared.ravel(), 1 / len(ends), 1 / (len(few) * len(ends)))


def _nearest_mean(distances: Floats) -> Floats:
    """Return the root mean square of the distances to the nearest of some neighbours."""
    return positive(np.sqrt((distances[:, :_NEAR] ** 2).mean(axis=1)))


def median_rate(points: Any, samples: int = 200) -> float:
    """Return 1 over the median squared distance of `samples` points, or 1 where that is 0."""
    squared, _ = _pairs(points, samples)
    middle = float(np.median(squared)) if len(squared) else 0.0
    return 1 / middle if middle > 0 else 1.0


def _pairs(points: Any, samples: int) -> tuple[Floats, int]:
    """Return the squared distances of all pairs of some points, and how many points these are."""
    from scipy.spatial.distance import pdist

    few = np.linspace(0, len(points) - 1, min(samples, len(points))).astype(np.intp)
    x = np.asarray(to_numpy(points[few]), np.float64)
    unit = power_of_two(float(np.abs(x).max()))  # squares could overflow, and be 0
    squared = pdist(x / unit, "sqeuclidean")
    apart = unit * math.sqrt(float(np.median(squared[squared > 0]))) if squared.any() else 1.0
    if not _CLOSEST <= apart <= 1 / _CLOSEST:
        raise InputError(
            f"X: got points at distances of about {apart:.2g}, expected {_CLOSEST:g} to {1 / _CLOSEST:g}, of which "
            "floats hold the squares; scale them"
        )
    return squared * unit * unit, len(few)
