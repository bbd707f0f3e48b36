"""Windows of small parts of a picture: how strong the noise is in those with the least structure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import OfWindows


def limits_of(size: int, at_low: int, at_high: int) -> tuple[float, float]:
    """Return the values that samples from 0 to 1 were clipped to, minus and plus infinity where they were not."""
    least = max(OfWindows.clipped * size, 2)
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
        """How many windows it takes to know sigma to `OfWindows.first_error`."""
        frequencies = int(self.high.shape[1])
        return math.ceil(self.repeats / (2 * frequencies * OfWindows.first_error**2))


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
        sigma = _while_consistent(windows, order[margin >= min(OfWindows.clipped_margin * sigma, farthest)], share)
    return sigma


def _while_consistent(windows: Windows, order: NDArray[np.intp], share: float) -> float:
    """Return sigma from the first windows and from ever more of them, as long as these agree with the fewer ones."""
    count = max(math.ceil(share * len(order)), windows.first)
    seen: list[tuple[float, float]] = []
    while len(order):
        part = windows.high[order[:count]]
        variance = float(np.median(np.square(part))) / OfWindows.median
        error = 2 * windows.repeats / part.size  # variance of the estimate over its square
        if any(variance - v > v * math.sqrt(max(e - error, 0.0)) for v, e in seen):
            break
        seen.append((variance, error))
        if count >= len(order) or math.sqrt(error) / 2 < OfWindows.last_error:
            break
        count *= 2
    return math.sqrt(seen[-1][0]) if seen else 0.0
