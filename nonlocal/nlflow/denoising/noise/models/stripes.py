"""Stripes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square, underflowing
from nlflow.denoising.noise.figures import TO_SIGMA, OfHum, OfStripes
from nlflow.denoising.noise.models.base import Array, Mixture, Noise, Subtracted
from nlflow.denoising.noise.models.gaussian import GaussianNoise
from nlflow.errors import InputError, check_integer


@underflowing
@dataclass(frozen=True)
class Stripes(Subtracted):
    """Each row or column of an image has a random offset: the line noise of sensors and scanners.

    Parameters
    ----------
    sigma : float
        Standard deviation of the offsets, in the units of the input; they are Gaussian and independent.
    axis : {0, 1}
        0: each row (an index along axis 0) has an offset; 1: each column.
    shared : bool
        Whether all channels of a row have the same offset.

    Raises
    ------
    InputError
        For a negative sigma, numbers that are not finite, and another axis.

    Notes
    -----
    `reduce` subtracts the offsets o that, for robust differences d of rows i and i + k (Welsch's estimate), k = 1, 2,
    minimize

        Σ ρ((o[i + k] - o[i] - d[i, k])² / v[i, k]) + Σ o[i]² / sigma²

    with ρ of Student's law, and v from the spread of the differences. The mean and most of the low frequencies of the
    offsets stay in the image, as they may be shading. O(N).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import Stripes
    >>> clean = np.tile(np.sin(np.arange(200) / 9), (100, 1))
    >>> noise = Stripes(0.5, axis=0)
    >>> noisy = noise.sample(clean, rng=0)
    >>> better = noise.reduce(noisy[..., None]).samples[..., 0]
    >>> bool(np.std(better - clean) < 0.1 * np.std(noisy - clean))
    True
    """

    kind: ClassVar[str] = "stripes"

    sigma: float = field(metadata={"minimum": 0, "hint": "of the offsets, in the units of the input"})
    axis: int = 0
    shared: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        axis = check_integer("axis", self.axis)
        if axis not in (0, 1):
            raise InputError(f"axis: got {axis}, expected 0 for an offset of each row, or 1 for one of each column")
        object.__setattr__(self, "axis", axis)

    def _noisy(self, samples: Array, rng: np.random.Generator) -> Array:
        shape = [1, 1, 1 if self.shared else samples.shape[-1]]
        shape[self.axis] = samples.shape[self.axis]
        return np.asarray(samples + rng.normal(0, self.sigma, shape))

    def describe(self) -> str:
        line = "row" if self.axis == 0 else "column"
        return f"stripes: each {line} has an offset, of standard deviation {self.sigma:.3g}"

    def _lies_on(self, samples: Array, missing: NDArray[np.bool_] | None) -> Array:
        """Return the offsets. O(N): a few passes over the samples, and a banded system of one unknown a row."""
        if self.sigma == 0 or samples.shape[self.axis] == 1:
            return np.zeros((1, 1, 1))
        offsets = [solve(*differences(rows, self.sigma), self.sigma) for rows in lines(samples, missing, self)]
        found = np.stack(offsets, axis=-1)[:, None]
        return found if self.axis == 0 else found.transpose(1, 0, 2)

    def _check(self, samples: Array, name: str = "image") -> None:
        """Refuse signals, and volumes, of which nobody says how stripes go through them."""
        if samples.ndim == 4:
            raise InputError(f"{name}: got a volume of shape {samples.shape[:-1]}, expected an image: stripes are the "
                             "rows or columns of one; take them out slice by slice, Stripes(...).reduce")  # fmt: skip
        if samples.ndim != 3:
            raise InputError(
                f"{name}: got a signal of shape {samples.shape[:-1]}, expected an image: stripes need rows"
            )


def lines(samples: Array, missing: NDArray[np.bool_] | None, noise: Stripes) -> list[NDArray[np.float64]]:
    """Return arrays (rows, samples of a row), each with offsets of its own; NaN where samples are missing."""
    values = samples.astype(np.float64)
    if missing is not None:
        values = np.where(missing[..., None], np.nan, values)
    values = np.moveaxis(values, noise.axis, 0)
    if noise.shared:
        return [values.reshape(len(values), -1)]
    return [values[..., c] for c in range(values.shape[-1])]


def differences(
    rows: NDArray[np.float64], sigma: float, lags: int = OfStripes.lags
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
    """Return by how much rows differ from the k-th next one, and the variance of that, for k = 1...lags."""
    found = [_location(rows[k:] - rows[:-k], sigma) for k in range(1, min(lags, len(rows) - 1) + 1)]
    return [centre for centre, _ in found], [variance for _, variance in found]


def _location(values: NDArray[np.float64], sigma: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return Welsch's estimate of each row's location, and its variance; infinity where nothing is known."""
    known = np.isfinite(values)
    count = known.sum(axis=1)
    filled = np.where(known, values, 0.0)
    centre = _medians(values, count)
    spread = TO_SIGMA * _medians(np.abs(values - centre[:, None]), count)
    width = OfStripes.width * np.maximum(spread, OfStripes.least_spread * sigma)
    for _ in range(OfStripes.reweightings):
        weights = known * np.exp(-0.5 * ((filled - centre[:, None]) / width[:, None]) ** 2)
        total = weights.sum(axis=1)
        centre = np.where(total > 0, (weights * filled).sum(axis=1) / np.where(total > 0, total, 1), centre)
    with np.errstate(divide="ignore"):
        return centre, (width / OfStripes.width) ** 2 * OfStripes.dependent / count


def _medians(values: NDArray[np.float64], count: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the median of each row without NaN; 0 for rows that have nothing else."""
    if count.min() == values.shape[1]:
        return np.asarray(np.median(values, axis=1))
    ordered, rows = np.sort(values, axis=1), np.arange(len(values))
    middle = ordered[rows, np.maximum(count - 1, 0) // 2] + ordered[rows, np.minimum(count // 2, values.shape[1] - 1)]
    return np.where(count > 0, middle / 2, 0.0)


def solve(
    centres: list[NDArray[np.float64]], variances: list[NDArray[np.float64]], sigma: float
) -> NDArray[np.float64]:
    from scipy.linalg import solveh_banded

    size, count = len(centres[0]) + 1, len(centres)
    offsets = np.zeros(size)
    weights = [1 / v for v in variances]
    for _ in range(OfHum.rounds):
        banded, right = np.zeros((count + 1, size)), np.zeros(size)
        banded[0] = 1 / sigma**2
        for k, (centre, weight) in enumerate(zip(centres, weights, strict=True), start=1):
            part = weight / count  # differences over several rows tell the same thing again
            banded[k, :-k] = -part
            banded[0, :-k] += part
            banded[0, k:] += part
            right[k:] += part * centre
            right[:-k] -= part * centre
        offsets = solveh_banded(banded, right, lower=True)
        weights = [
            1 / (v + (c - offsets[k:] + offsets[:-k]) ** 2 / OfStripes.degrees)
            for k, (c, v) in enumerate(zip(centres, variances, strict=True), start=1)
        ]
    return np.asarray(offsets)


def with_stripes(noise: GaussianNoise) -> Noise:
    """Return noise whose spectrum has a line of no extent along an axis as stripes and the rest."""
    if noise.spectrum is None or noise.spectrum.shape[1] == 1 or noise.opponent or noise.intensities is not None:
        return noise
    for axis in (0, 1):
        power = np.moveaxis(noise.spectrum, axis + 1, 1)  # frequencies across the stripes, then along them
        line, beside = power[:, :, 0], (power[:, :, 1] + power[:, :, -1]) / 2
        share = float((line - beside).sum() / power.sum())
        if share < OfStripes.line or beside.sum() > OfStripes.beside * line.sum():
            continue
        rest = power.copy()
        rest[:, :, 0] = beside
        level = root_mean_square(np.atleast_1d(noise.sigma))
        stripes = Stripes(level * math.sqrt(share), axis=axis, shared=False)
        sigma = level * math.sqrt(max(1 - share, 0.0))
        left = (
            GaussianNoise(sigma, np.moveaxis(rest, 1, axis + 1))
            if sigma > OfStripes.weak * level
            else GaussianNoise(0.0)
        )
        return Mixture([stripes, left])
    return noise
