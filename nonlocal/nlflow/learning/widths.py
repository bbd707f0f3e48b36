"""The width of a Gaussian between points, by the growth of its sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlflow._array import Floats, to_numpy

SAMPLES = 1000  # points of which all pairs are looked at
_FINEST, _COARSEST, _STEPS = -9, 4, 53  # powers of two of the median distance, and widths between them


@dataclass(frozen=True)
class WidthCurve:
    """How the sums of a Gaussian grow with its width.

    Attributes
    ----------
    widths : array of shape (W,)
        sigma of exp(-|x - y|^2 / (2 sigma^2)), increasing.
    sums : array of shape (W,)
        Mean of the kernel over all pairs of points, 1 / M for the narrowest widths and 1 for the widest.
    slopes : array of shape (W,)
        d log(sums) / d log(widths): 0 at both ends, and the dimension of the data where the Gaussian sees a flat part.
    """

    widths: Floats
    sums: Floats
    slopes: Floats

    @property
    def best(self) -> float:
        """The width of the steepest slope."""
        return float(self.widths[int(np.argmax(self.slopes))])

    @property
    def dimension(self) -> float:
        """The steepest slope, an estimate of the dimension of the data."""
        return float(self.slopes.max())

    @property
    def gamma(self) -> float:
        """1 / (2 best^2), of exp(-gamma |x - y|^2)."""
        return 1 / (2 * self.best**2)


def width_curve(points: Any, samples: int = SAMPLES) -> WidthCurve:
    """Return the curve of checked points."""
    squared, count = _pairs(points, samples)
    middle = float(np.median(squared)) if len(squared) else 0.0
    if not middle > 0:  # more than half of the points lie at one place
        there = squared[squared > 0]
        middle = float(np.median(there)) if len(there) else 1.0
    logs = np.linspace(_FINEST, _COARSEST, _STEPS) * math.log(2)
    widths = math.sqrt(middle) * np.exp(logs)
    with np.errstate(under="ignore"):
        sums = np.array([(count + 2 * np.exp(-squared / (2 * w * w)).sum()) / count**2 for w in widths])
    return WidthCurve(widths, sums, np.gradient(np.log(sums), logs))


def median_rate(points: Any, samples: int = 200) -> float:
    """Return 1 over the median squared distance of a few points, or 1 where that is 0."""
    squared, _ = _pairs(points, samples)
    middle = float(np.median(squared)) if len(squared) else 0.0
    return 1 / middle if middle > 0 else 1.0


def _pairs(points: Any, samples: int) -> tuple[Floats, int]:
    """Return the squared distances of all pairs of some points, and how many points these are."""
    from scipy.spatial.distance import pdist

    few = np.linspace(0, len(points) - 1, min(samples, len(points))).astype(np.intp)
    return pdist(np.asarray(to_numpy(points[few]), np.float64), "sqeuclidean"), len(few)
