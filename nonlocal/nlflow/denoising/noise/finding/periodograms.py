"""Spectra of recordings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.denoising.noise.figures import MEDIAN_SQUARE, OfRecordings
from nlflow.denoising.noise.finding.sigma import constant_areas, limits_of
from nlflow.denoising.noise.models.recordings import channel_of
from nlflow.errors import NumericalError


@underflowing
def spectrum_of_signal(samples: Any, missing: NDArray[np.bool_] | None = None) -> tuple[Floats, float] | None:
    """Estimate the power spectrum of stationary Gaussian noise in a recording; None where white noise fits.

    A steady signal with a broad spectrum counts as noise, and noise as steep as 1 / f often counts as structure.

    Parameters
    ----------
    samples : array_like of shape (N,)
        One recording.
    missing : bool array of shape (N,), optional
        True where a sample is missing; its value does not matter.

    Returns
    -------
    power : array of shape (n,)
        At frequencies k / n cycles a sample, in the order of `numpy.fft.fft`; its mean is the variance of the noise, in
        squared units of the input. n is 32, and 64 from 4096 samples on.
    sure : float
        From 1/2 to 1: the share of the measured variance that is distributed as noise.

    Or None: where the spectrum is flat within its error, for fewer than 256 samples, where nothing can be measured, and
    where `sure` would be less than 1/2.

    Raises
    ------
    InputError
        For anything but one recording of finite samples.

    Notes
    -----
    The medians of squared coefficients of tapered windows give the noise at each frequency, from the windows with the
    least energy at the others (the rule of Lepski 1991, doi 10.1137/1135065). Below the frequency 2 / n the
    spectrum is continued as a power of the frequency. O(N).

    References
    ----------
    Welch 1967 (doi 10.1109/TAU.1967.1161901), with medians in place of means.
    """
    found = look_at_spectrum(samples, missing)
    return None if found is None or not found.is_told else (found.power, found.sure)


@dataclass(frozen=True)
class Spectrum:
    """Noise of a recording."""

    power: Floats  # (n,) as `spectrum_of_signal` returns it
    sure: float  # the share of the measured variance that is distributed as noise
    is_white: bool  # flat within its error
    white: float  # standard deviation of white noise: by the level of a flat spectrum, else by the lowest frequency
    fast: Floats  # (n,) the power without what stands out below an eighth of a cycle a sample

    @property
    def rise(self) -> float:
        """The share of the variance that `fast` leaves out."""
        return 1.0 - float(self.fast.sum() / self.power.sum())

    @property
    def is_told(self) -> bool:
        """Whether it tells noise that is not white."""
        return not self.is_white and self.sure >= OfRecordings.sure


def look_at_spectrum(samples: Any, missing: NDArray[np.bool_] | None = None) -> Spectrum | None:
    """Look at a recording (N,); None where nothing can be measured."""
    values, present = channel_of(samples, missing)
    size = float(np.abs(values[present]).max(initial=0.0))
    if len(values) < OfRecordings.least or size == 0:
        return None
    if math.isinf(size * size):
        raise NumericalError(f"samples: got values up to {size:g}, whose powers overflow; divide them by that")
    values = np.where(present, values / size, 0.0)
    known = present & ~constant_areas(values[None], 1)[0]  # what was filled in has no noise
    if not known.any():
        return None
    squares, each = _squares(values - float(values[known].mean()), known, cut_off(values, present))
    if len(squares) < OfRecordings.least_windows * each:
        return None
    power, error, alike = _measured(squares, each)
    if power.max() < 1e-28:  # rounding
        return None
    kept = _kept(np.log(power), error)
    smooth, blur = _smoothed(np.log(power), error, kept)
    middle = np.arange(max(OfRecordings.slow + 1, int(OfRecordings.hump * len(power) / 2)), len(power))
    level = np.average(smooth[middle], weights=blur[middle] ** -2)
    off = np.abs(smooth[middle] - level) > np.maximum(OfRecordings.white * blur[middle], OfRecordings.flat)
    told = (kept & alike)[OfRecordings.slow :]
    found = np.exp(_continued(smooth, len(values)))
    slow = slice(0, OfRecordings.slow)
    found[slow] = np.minimum(found[slow], squares[:, slow].mean(axis=0))  # noise has no more than noise and structure
    sure = float(found[OfRecordings.slow :][told].sum() / found[OfRecordings.slow :].sum())
    least = float((smooth + blur)[OfRecordings.slow :].min()) if off.any() else float(level)
    whole = np.concatenate([found, found[-2:0:-1]])
    fast, eighth = whole.copy(), len(whole) // 8
    low = np.r_[:eighth, 1 - eighth : 0]
    fast[low] = np.minimum(whole[low], np.median(whole[eighth : 2 * eighth + 1]))
    return Spectrum(whole * size**2, sure, not off.any(), math.exp(least / 2) * size, fast * size**2)


def cut_off(values: Floats, present: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tell which samples (N,) are at an end of the range where so many are that noise was cut off there."""
    at_ends = [present & (values == end) for end in (values[present].min(), values[present].max())]
    limits = limits_of(*(int(np.count_nonzero(one)) for one in (present, *at_ends)))
    return np.asarray(sum(one & math.isfinite(limit) for one, limit in zip(at_ends, limits, strict=True)) > 0)


def _squares(values: Floats, present: NDArray[np.bool_], cut: NDArray[np.bool_]) -> tuple[Floats, float]:
    """Return squared coefficients of windows (windows, frequencies), and how many windows count as one."""
    side = OfRecordings.side if len(values) < OfRecordings.long else 2 * OfRecordings.side
    step = max(side // OfRecordings.overlap, math.ceil(len(values) / OfRecordings.most_windows))
    windows = sliding_window_view(values, side)[::step]
    few = sliding_window_view(cut, side)[::step].mean(axis=1) <= OfRecordings.cut
    windows = windows[few & sliding_window_view(present, side)[::step].all(axis=1)]
    taper = math.sqrt(2 / 3) * (1 - np.cos(2 * math.pi * (np.arange(side) + 0.5) / side))  # of mean square 1
    # Under this taper windows that are half a window apart are all but independent.
    return np.abs(np.fft.rfft(windows * taper, axis=1)) ** 2 / side, max(1.0, side / (2 * step))


def _measured(squares: Floats, each: float) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return the noise at each frequency, its relative error, and whether the squares are distributed as noise."""
    count = squares.shape[1]
    index = np.arange(count)
    others = (np.abs(index[:, None] - index) > OfRecordings.reach) & (index > 0)
    median = np.full(count, math.log(2))  # of the square of a complex normal variable
    median[[0, -1]] = MEDIAN_SQUARE  # and of a real one
    power = np.quantile(squares, 0.25, axis=0) / median
    error, alike = np.empty(count), np.empty(count, bool)
    for _ in range(OfRecordings.rounds):
        energy = (squares / np.maximum(power, 1e-14 * power.max() + 1e-300)) @ others.T
        order = np.argsort(energy, axis=0)
        for k in range(count):
            power[k], error[k], alike[k] = _while_consistent(squares[order[:, k], k], float(median[k]), each)
    return np.maximum(power, 1e-14 * power.max() + 1e-300), error, alike


def _while_consistent(squares: Floats, median: float, each: float) -> tuple[float, float, bool]:
    """Return the noise from ever more of the windows, as long as they agree with the fewer ones."""
    seen: list[tuple[float, float]] = []
    used = 0
    for share in OfRecordings.shares:
        count = min(max(math.ceil(share * len(squares)), math.ceil(OfRecordings.least_windows * each)), len(squares))
        value, error = float(np.median(squares[:count])) / median, 1 / math.log(2) * math.sqrt(each / count)
        if any(value - v > v * math.sqrt(max(e**2 - error**2, 0.0)) for v, e in seen):
            break
        seen.append((value, error))
        used = count
    value, error = seen[-1]
    # Of exponential variables the upper quartile is twice the median; of a steady tone it is the same, of structure
    # much more.
    upper = float(np.quantile(squares[:used], 0.75)) / max(value * median, 1e-300)
    return value, error, abs(math.log(max(upper, 1e-300) / 2)) < max(2 * error, 0.35)


def _kept(logarithm: Floats, error: Floats) -> NDArray[np.bool_]:
    """Return the frequencies that do not belong to a hump that stands out."""
    from scipy.ndimage import grey_opening, uniform_filter1d

    side = 2 * int(OfRecordings.hump * len(logarithm) / 2) + 1
    level = uniform_filter1d(grey_opening(logarithm, (side,), mode="nearest"), 3, mode="nearest")
    kept = np.asarray(logarithm - level < np.maximum(OfRecordings.outlier * error, math.log(2)))
    kept[: OfRecordings.slow] = False
    return kept if np.count_nonzero(kept) > len(kept) // 3 else np.arange(len(kept)) >= OfRecordings.slow


def _smoothed(logarithm: Floats, error: Floats, kept: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Return straight lines through the neighbours of each frequency, and their error."""
    index = np.arange(len(logarithm), dtype=np.float64)
    place = np.log(np.maximum(index, 0.5))  # in which powers of the frequency are straight lines
    smooth, blur = np.empty(len(index)), np.empty(len(index))
    for k in range(len(index)):
        reach = OfRecordings.neighbours
        while np.count_nonzero(near := kept & (np.abs(index - k) <= reach)) < 4:
            reach += 1
        weight = (1 - ((index[near] - k) / (reach + 1)) ** 2) / error[near] ** 2
        design = np.stack([np.ones(int(near.sum())), place[near] - place[k]], axis=1)
        inverse = np.linalg.inv(design.T @ (weight[:, None] * design))
        row = inverse[0] @ (design * weight[:, None]).T
        smooth[k] = row @ logarithm[near]
        # Neighbours share what the taper mixes: about one and a half count as one.
        blur[k] = math.sqrt(1.5 * float(row**2 @ error[near] ** 2))
    return smooth, blur


def _continued(smooth: Floats, size: int) -> Floats:
    """Return a spectrum whose lowest frequencies follow the power law of those above them."""
    index = np.arange(len(smooth), dtype=np.float64)
    # A cliff in reach must not tilt the continuation: the flatter of two slopes counts.
    slopes = [
        float(np.polyfit(np.log(index[OfRecordings.slow : end + 1]), smooth[OfRecordings.slow : end + 1], 1)[0])
        for end in OfRecordings.continued
    ]
    slope = min(max(*slopes, -OfRecordings.steepest), 0.0)
    # Power at 0 stands for all frequencies below half a step, down to that of the recording.
    step = size / (2 * (len(smooth) - 1))
    below = np.mean((np.arange(1, max(int(step / 2), 1) + 1) / step) ** slope)
    low = (
        smooth[OfRecordings.slow]
        + np.log(np.array([below, *(index[1 : OfRecordings.slow] ** slope)]))
        - slope * math.log(OfRecordings.slow)
    )
    return np.concatenate([low, smooth[OfRecordings.slow :]])
