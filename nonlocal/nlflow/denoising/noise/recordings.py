"""The power spectrum of the noise of a recording, from the recording itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.denoising.noise.figures import OfRecordings
from nlflow.denoising.noise.signals import channel_of


@underflowing
def spectrum_of_signal(samples: Any, missing: NDArray[np.bool_] | None = None) -> tuple[Floats, float] | None:
    """Estimate the power spectrum of stationary Gaussian noise in a recording; None where white noise fits.

    Parameters
    ----------
    samples : array_like of shape (N,)
        One recording.
    missing : bool array of shape (N,), optional
        True where a sample is missing; windows that touch one are left out.

    Returns
    -------
    power : array of shape (n,)
        On the grid of a discrete Fourier transform, at frequencies k / n cycles a sample, symmetric; its mean is the
        variance of the noise, in squared units of the input. n is 32, or 64 for long recordings.
    sure : float
        From 1/2 to 1: of the variance at frequencies that were measured, the share that is distributed as noise and was
        not bridged where a tone stands out. Nothing of it tells how well low frequencies are continued.

    Or None: where the spectrum is flat within its error, for fewer than 256 samples, where nothing can be measured, and
    where the share would be less than 1/2: that is the signal.

    Raises
    ------
    InputError
        For anything but one recording of finite samples.

    Notes
    -----
    Tapered windows are transformed. For each frequency they are sorted by their energy at the others, each relative to
    the noise there; in Gaussian noise these are independent of the frequency itself. The median of its square over the
    first eighth of the windows gives the noise, then over twice as many, and so on while that does not raise it beyond
    its own error (the rule of Lepski 1991, doi 10.1137/1135065). Some rounds make the noise consistent.

    Structure is slow in most windows of most signals. Below two steps (1/16 of a cycle a sample, 1/32 in long
    recordings) the spectrum is therefore continued as a power of the frequency where less is measured by that. A hump
    of less than half of the frequencies is taken for a tone of the signal. Neighbouring frequencies are averaged, so
    that a cliff in the spectrum is seen blurred.

    A rise towards an end of the spectrum within less than half of the frequencies counts as a hump too, for it is what
    slow structure looks like: with noise as steep as 1 / f `sure` stays near 2/3, and steeper noise is often not told
    from structure.

    What is steady over the whole recording and has a broad spectrum counts as noise. Cost O(N), with 32768 windows at
    most. Deterministic.

    References
    ----------
    Windows with least structure: see `nlflow.estimate_sigma`. Medians of periodograms: Welch 1967
    (doi 10.1109/TAU.1967.1161901) with medians in place of means.
    """
    values, present = channel_of(samples, missing)
    size = float(np.abs(values[present]).max(initial=0.0))
    if len(values) < OfRecordings.least or size == 0:
        return None
    values = np.where(present, values / size, 0.0)
    squares, each = _squares(values - float(values[present].mean()), present)
    if len(squares) < OfRecordings.least_windows * each:
        return None
    power, error, alike = _measured(squares, each)
    if power.max() < 1e-28:  # rounding
        return None
    kept = _kept(np.log(power), error)
    smooth, blur = _smoothed(np.log(power), error, kept)
    middle = np.arange(OfRecordings.slow + 1, len(power))
    deviation = np.abs(smooth[middle] - np.average(smooth[middle], weights=blur[middle] ** -2))
    if not (deviation > np.maximum(OfRecordings.white * blur[middle], OfRecordings.flat)).any():
        return None
    told = (kept & alike)[OfRecordings.slow :]
    found = np.exp(_continued(smooth, len(values)))
    sure = float(found[OfRecordings.slow :][told].sum() / found[OfRecordings.slow :].sum())
    if sure < OfRecordings.sure:
        return None
    return np.concatenate([found, found[-2:0:-1]]) * size**2, sure


def _squares(values: Floats, present: NDArray[np.bool_]) -> tuple[Floats, float]:
    """Return squared coefficients of windows (windows, frequencies), and how many windows count as one."""
    side = OfRecordings.side if len(values) < OfRecordings.long else 2 * OfRecordings.side
    step = max(side // OfRecordings.overlap, math.ceil(len(values) / OfRecordings.most_windows))
    windows = sliding_window_view(values, side)[::step]
    windows = windows[sliding_window_view(present, side)[::step].all(axis=1)]
    taper = math.sqrt(2 / 3) * (1 - np.cos(2 * math.pi * (np.arange(side) + 0.5) / side))  # of mean square 1
    # Under this taper windows that are half a window apart are all but independent.
    return np.abs(np.fft.rfft(windows * taper, axis=1)) ** 2 / side, max(1.0, side / (2 * step))


def _measured(squares: Floats, each: float) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return the noise at each frequency, its relative error, and whether the squares are distributed as noise."""
    count = squares.shape[1]
    index = np.arange(count)
    others = (np.abs(index[:, None] - index) > OfRecordings.reach) & (index > 0)
    median = np.full(count, OfRecordings.median)
    median[[0, -1]] = OfRecordings.median_real
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
        value, error = float(np.median(squares[:count])) / median, OfRecordings.error * math.sqrt(each / count)
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
    kept = np.asarray(logarithm - level < np.maximum(OfRecordings.outlier * error, OfRecordings.stands_out))
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
