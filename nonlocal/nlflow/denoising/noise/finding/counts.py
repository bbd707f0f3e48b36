"""Counts in an image."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import OfCounts, OfLooks, OfTransfer
from nlflow.denoising.noise.finding.transfer import is_square, line_through
from nlflow.denoising.noise.models.base import Array
from nlflow.denoising.noise.models.intensities import Poisson

Values = NDArray[np.float64]


def find_whole_counts(samples: Array, missing: NDArray[np.bool_] | None = None) -> Poisson | None:
    """Find counts in samples (H, W, C) that came as whole numbers, by variance and third cumulant over the mean."""
    found = _lattice(samples if missing is None else samples[~missing]) if samples.ndim == 3 else None
    levels = None if found is None else _Levels.of(samples, missing)
    return None if found is None or levels is None else levels.whole(*found)


def find_counts(samples: Array, missing: NDArray[np.bool_] | None = None) -> Poisson | None:
    """Find whole counts in samples (H, W, C), or such as a detector amplified and added noise to.

    The law of third cumulants is that of counts, or of a register of random gain (Robbins and Hadwen 2003,
    doi 10.1109/TED.2003.813462).
    """
    found = find_whole_counts(samples, missing)
    levels = None if found is not None or samples.ndim != 3 else _Levels.of(samples, missing)
    return found if levels is None else levels.amplified()


@dataclass(frozen=True)
class _Levels:
    """Means, variances and third cumulants of the noise, and errors of both, by level."""

    mean: Values
    variance: Values
    error: Values
    third: Values
    third_error: Values
    white: NDArray[np.bool_]  # middle frequencies have the power of the highest
    blue: NDArray[np.bool_]  # they have less: so do dithered pictures, and neither counts nor structure

    @classmethod
    def of(cls, samples: Array, missing: NDArray[np.bool_] | None) -> Self | None:
        """Measure quiet blocks; None where they are too few."""
        blocks = np.concatenate([_blocks(part) for part in _parts(samples, missing)], axis=1)
        level, apart, *moments = blocks[:, np.isfinite(blocks).all(axis=0)]
        count = min(OfCounts.levels, len(level) // OfCounts.in_level)
        if count == 0:
            return None
        order = np.argsort(level, kind="stable")
        found = []
        for part in np.array_split(order, count):
            size = max(int(OfCounts.quiet * len(part)), OfCounts.in_level // 3)
            chosen = part[np.argsort(apart[part], kind="stable")[:size]]
            mean, fine, coarse, third = (moment[chosen] for moment in moments)
            errors = (np.std(one) / math.sqrt(len(chosen)) for one in (fine, third))
            found.append((mean.mean(), fine.mean(), third.mean(), *errors, coarse.mean()))
        mean, variance, third, error, third_error, coarse = np.array(found).T
        blue = coarse < OfCounts.white[0] * variance
        white = ~blue & (coarse <= OfCounts.white[1] * variance)
        least = variance / math.sqrt(OfCounts.in_level * 4)  # few blocks may be alike by chance
        return cls(mean, variance, np.maximum(error, least), third, third_error, white, blue)

    def whole(self, step: float, low: float) -> Poisson | None:
        """Return whole counts, whose only unknown is where they begin; None where moments are others."""
        if self.blue.sum() > self.white.sum():
            return None
        on_zero = low > 0 and abs(low / step - round(low / step)) < OfCounts.whole
        for offset in (0.0, low) if on_zero else (low,):
            # Where there is no light, there is nothing to tell. The least value is a guess of what no count has: if it
            # is not 0, most levels have to be white; otherwise those with structure do not count.
            told = self.white & ((self.mean > offset) | (self.variance > 0))
            mean, variance, error, third, third_error, *_ = (one[told] for one in astuple(self))
            expected = step * (mean - offset)
            if (offset and self.white.mean() < 0.5) or not told.any() or min(expected.min(), variance.min()) <= 0:
                continue
            # Errors of variances that are low by chance are too small.
            spread = error / np.minimum(variance, expected)
            weights = np.where(spread < OfCounts.uneven, spread**-2, 0.0)
            if not weights.any():
                continue
            ratio = float(np.average(variance / expected, weights=weights))
            off = float(np.median(np.abs(variance / expected - 1) / spread))
            telling = np.square(step * expected / third_error)
            skewness = float(np.average(third / (step * expected), weights=telling))
            grown = 0.0 if offset else float(np.sum(weights * np.square(1 - expected.mean() / expected)))
            sure = float(telling.sum()) + grown > OfTransfer.significant**2
            allowed = OfCounts.alike + 3 / math.sqrt(float(weights.sum()))
            alike = abs(ratio - 1) < allowed and off < OfCounts.off
            if alike and sure and abs(skewness - 1) < max(OfCounts.uneven, 3 / math.sqrt(float(telling.sum()))):
                return Poisson(step, 0.0, offset)
        return None

    def amplified(self) -> Poisson | None:
        """Return counts whose variances are on a line, and third cumulants on one through the same place."""
        enough = self.white.mean() >= 0.5 and len(self.mean) >= OfTransfer.least_bins
        if not enough or not (self.variance * self.third * self.third_error).all():
            return None
        points = (self.mean, self.variance, self.error, 0.0)
        gain, at_zero, covariance = line_through(*points)
        error = math.sqrt(covariance[0, 0])
        off = (self.variance - gain * self.mean - at_zero) / self.error
        if gain < OfTransfer.significant * error or is_square(*points) or float(np.median(np.abs(off))) > OfCounts.off:
            return None
        # The third cumulant is c gain (variance - read²): c = 1 for counts, 1.5 after a register of random gain.
        slope, _, spread = line_through(self.variance, self.third, self.third_error, 0.0)
        ratio, unsure = slope / gain, 2 * math.sqrt(spread[0, 0]) / gain
        pulsed = OfCounts.pulses[0] - unsure < ratio < OfCounts.pulses[1] + unsure
        if slope < OfTransfer.significant * math.sqrt(spread[0, 0]) or not pulsed:
            return None
        dark = int(np.argmin(self.mean))
        light = float(self.third[dark] / slope)
        read = float(np.clip(self.variance[dark] - light, 0, self.variance[dark]))
        offset = min((read - at_zero) / gain, float(self.mean[dark]))
        return Poisson(float(gain), math.sqrt(max(read, (0.1 * gain) ** 2)), float(offset))


def _parts(samples: Array, missing: NDArray[np.bool_] | None) -> list[Values]:
    """Return the channels of bands of rows, NaN where samples are missing; all rows of a small image."""
    side = OfLooks.band
    rows = samples.shape[0]
    most = max(OfLooks.most // (side * samples.shape[1] * samples.shape[2]), 2)
    tops = [0] if rows <= side * most else [k * (rows - side) // (most - 1) for k in range(most)]
    high = rows if len(tops) == 1 else side
    parts: list[Values] = []
    for top in tops:
        band = samples[top : top + high].astype(np.float64)
        if missing is not None:
            band[missing[top : top + high]] = np.nan
        parts.extend(np.moveaxis(band, -1, 0))
    return parts


def _blocks(plane: Values) -> Values:
    """Return of blocks of 4 x 4: the mean of their neighbours, how these differ, and four moments of their own.

    Mean, variance by the diagonal differences of cells of 2 x 2 and by the others, and the third cumulant.
    """
    rows, columns = (n // 4 for n in plane.shape)
    cells = plane[: 4 * rows, : 4 * columns].reshape(2 * rows, 2, 2 * columns, 2)
    a, b, c, d = (cells[:, i, :, j] for i in (0, 1) for j in (0, 1))
    mean = (a + b + c + d) / 4
    fine = np.square(a - b - c + d) / 4
    coarse = (np.square(a + b - c - d) + np.square(a - b + c - d)) / 8
    third = np.sum([(one - mean) ** 3 for one in (a, b, c, d)], axis=0) * (2 / 3)  # the k-statistic of four samples
    own = [one.reshape(rows, 2, columns, 2).mean(axis=(1, 3)) for one in (mean, fine, coarse, third)]
    left, right, above, below = own[0][1:-1, :-2], own[0][1:-1, 2:], own[0][:-2, 1:-1], own[0][2:, 1:-1]
    around = [(left + right + above + below) / 4, np.square(left - right) + np.square(above - below)]
    return np.stack([one.ravel() for one in (*around, *(one[1:-1, 1:-1] for one in own))])


def common_step(levels: Values) -> float:
    """Return the number of which increasing levels > 0 are multiples, if they are, to the digits of all of them."""
    if (levels == np.rint(levels)).all() and levels[-1] < 2**53:
        return float(np.gcd.reduce(levels.astype(np.int64)))
    step = float(min(levels[0], np.diff(levels).min(initial=np.inf)))
    for values in (levels[1:] - levels[0], levels):
        most = 4.0
        while len(values) and most < 4 * values[-1] / step:  # of large multiples it is not known which they are before
            most *= 4
            multiples = np.rint(values[values <= most * step] / step)
            if len(multiples):
                step = float(values[: len(multiples)] @ multiples / np.square(multiples).sum())
    return step


def _lattice(present: Array) -> tuple[float, float] | None:
    """Return the step that samples are multiples of, above the least; None where there is none."""
    flat = present.reshape(-1)
    if flat.size == 0:
        return None
    some = flat[:: max(1, flat.size // OfCounts.values)]
    # Counts begin at the least of all samples, not of some.
    values = np.unique(np.append(some, flat.min())).astype(np.float64)
    if not 3 <= len(values) <= OfCounts.values:
        return None
    step = common_step(np.unique(values[1:] - values[0]))  # differences of unlike values may be alike
    steps = (values - values[0]) / step
    unit = np.finfo(present.dtype if present.dtype.kind == "f" else np.float64).eps
    rounding = max(4 * float(unit * np.abs(values).max()) / step, OfCounts.whole)
    if not np.abs(steps - np.rint(steps)).max() <= rounding:
        return None
    low = float(values[0])
    on_zero = round(low / step) * step
    return step, on_zero if abs(low - on_zero) <= rounding * step else low
