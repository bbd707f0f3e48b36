"""Windows of small parts of a picture: how strong the noise is in those with the least structure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_FIRST_ERROR: Final = 0.09  # relative uncertainty of sigma that the first windows must reach; more are taken if need be
_LAST_ERROR: Final = 0.01  # relative uncertainty from which on more windows are not worth the structure in them
_MEDIAN: Final = 0.4549364231195724  # of a chi-squared variable with one degree of freedom
_CLIPPED: Final = 0.001  # of the samples at one end of the range: from here on the end is a limit that was clipped to
_CLIPPED_MARGIN: Final = 2.0  # in sigma: a window whose mean is farther from the limit loses 3 % of sigma at most

#: Windows that count as one independent window, per sample of a window: they overlap.
REPEATS: Final = 0.65


def limits_of(size: int, at_low: int, at_high: int) -> tuple[float, float]:
    """Return the values that samples from 0 to 1 were clipped to, minus and plus infinity where they were not."""
    least = max(_CLIPPED * size, 2)
    return 0.0 if at_low > least else -math.inf, 1.0 if at_high > least else math.inf


def at_ends(present: NDArray[np.float64]) -> tuple[int, int, int]:
    """Return how many samples from 0 to 1 there are, how many are 0, and how many 1."""
    return present.size, int(np.count_nonzero(present == 0)), int(np.count_nonzero(present == 1))


@dataclass(frozen=True)
class Windows:
    """Windows that touch no missing sample."""

    structure: NDArray[np.float64]  # energy at low frequencies
    high: NDArray[np.float32]  # coefficients at high frequencies (windows, frequencies)
    mean: NDArray[np.float64]
    repeats: float  # windows that count as one

    @property
    def first(self) -> int:
        """How many windows it takes to know sigma to `_FIRST_ERROR`."""
        frequencies = int(self.high.shape[1])
        return math.ceil(self.repeats / (2 * frequencies * _FIRST_ERROR**2))


def from_windows(windows: Windows, limits: tuple[float, float], share: float) -> float:
    """Return sigma for samples from 0 to 1."""
    order = np.argsort(windows.structure)
    sigma = _while_consistent(windows, order, share)
    if len(order) == 0 or (math.isinf(limits[0]) and math.isinf(limits[1])):
        return sigma
    # Near the limits noise is cut off; how near depends on sigma, so that it takes two rounds. The means are
    # independent of what is measured.
    margin = np.minimum(windows.mean - limits[0], limits[1] - windows.mean)[order]
    farthest = np.sort(margin)[-min(windows.first, len(margin))]
    for _ in range(2):
        sigma = _while_consistent(windows, order[margin >= min(_CLIPPED_MARGIN * sigma, farthest)], share)
    return sigma


def _while_consistent(windows: Windows, order: NDArray[np.intp], share: float) -> float:
    """Return sigma from the first windows and from ever more of them, as long as these agree with the fewer ones."""
    count = max(math.ceil(share * len(order)), windows.first)
    seen: list[tuple[float, float]] = []
    while len(order):
        part = windows.high[order[:count]]
        variance = float(np.median(np.square(part))) / _MEDIAN
        error = 2 * windows.repeats / part.size  # variance of the estimate over its square
        if any(variance - v > v * math.sqrt(max(e - error, 0.0)) for v, e in seen):
            break
        seen.append((variance, error))
        if count >= len(order) or math.sqrt(error) / 2 < _LAST_ERROR:
            break
        count *= 2
    return math.sqrt(seen[-1][0]) if seen else 0.0
