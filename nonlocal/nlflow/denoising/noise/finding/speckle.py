"""Finders of speckle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import OfSpeckle
from nlflow.denoising.noise.models.base import Array, check_samples
from nlflow.denoising.noise.models.speckle import LogSpeckle, Speckle
from nlflow.domains.samples import range_of

Floats = NDArray[np.float64]


def find_speckle(samples: Array, missing: NDArray[np.bool_] | None = None) -> Speckle | LogSpeckle | None:
    """Find speckle, and its looks, without knowing the clean picture.

    Parameters
    ----------
    samples : array of shape (..., C)
        Finite; one to three axes besides that of the channels. Negative values are no intensities, but may be decibels.
    missing : bool array of shape (...), optional
        Samples that are missing; their values do not matter.

    Returns
    -------
    Speckle or LogSpeckle or None
        None where there is none, and in less than about 72 x 72 samples of an image, or 536 of a signal.

    Raises
    ------
    InputError
        For other shapes and types.

    Notes
    -----
    O(N).
    """
    check_samples(samples, missing)
    absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
    present = samples if missing is None else samples[~missing]
    if present.size == 0 or not 0 < range_of(present) < math.inf:
        return None
    low, high = float(present.min()), float(present.max())
    windows = windows_of(samples, absent, (low, high))
    if len(windows) < OfSpeckle.least_windows:
        return None
    scale = max(abs(low), abs(high))
    found = _compressed(windows / scale, scale) or (_linear(windows / scale) if low >= 0 else None)
    return None if found is None else _with_spectrum(found, samples, absent)


def _compressed(windows: Floats, scale: float) -> LogSpeckle | None:
    """Return log-compressed speckle where windows have its law at once."""
    flat = _Flat.of(windows)
    skewness = float((flat.relative**3).mean())
    if not skewness < OfSpeckle.skewed or not flat.even:
        return None
    looks = _root(lambda one: _polygamma(2, one) / _polygamma(1, one) ** 1.5 - skewness)
    if flat.distance(1.0) < OfSpeckle.law:  # fully developed speckle, unless something speaks against it
        looks = 1.0
    if looks is None or flat.distance(looks) > OfSpeckle.law:
        return None
    compression = scale * flat.sigma / math.sqrt(_polygamma(1, looks))
    return LogSpeckle(compression, looks)


def _linear(windows: Floats) -> Speckle | None:
    """Return speckle where the logarithms of windows have its law, or are as noisy at all intensities."""
    # What became 0 by rounding is somewhere below half a step.
    level, least = windows.mean(axis=(1, 2)), float(windows[windows > 0].min())
    positive = windows[level > max(OfSpeckle.dim * float(level.mean()), OfSpeckle.counted * least)]
    if len(positive) < OfSpeckle.least_windows:
        return None
    logs = np.log(np.maximum(positive, OfSpeckle.rounded * least))
    flat = _Flat.of(logs)
    law = [(flat.distance(looks), looks, bool(root - 1))
           for root in (1, 2) if (looks := _looks_of(root * flat.sigma)) is not None]  # fmt: skip
    bins = _bins(logs)
    # Noise that is weaker somewhere, beside the intensity, is none: that of magnitudes, whose background has the law.
    everywhere = flat.even and OfSpeckle.even * min(one.fine for one in bins) > flat.fine
    if law and everywhere:
        distance, looks, amplitude = min(law)
        if distance < OfSpeckle.law and (not amplitude or looks < OfSpeckle.amplitudes):
            # At high frequencies there is less structure.
            fine = _looks_of((1 + amplitude) * flat.fine) if flat.white else looks
            return Speckle(fine or looks, amplitude)
    sigma = _as_noisy_everywhere(bins)
    looks = None if sigma is None else _looks_of(sigma)
    return None if looks is None or looks > OfSpeckle.most_looks else Speckle(looks)


def _bins(logs: Floats) -> list[_Flat]:
    """Return the flat ones among windows of alike levels, from dark to light."""
    order = np.argsort(logs.mean(axis=(1, 2)))
    return [_Flat.of(logs[part]) for part in np.array_split(order, OfSpeckle.bins)]


def _as_noisy_everywhere(flats: list[_Flat]) -> float | None:
    """Return the standard deviation of white noise that is the same at all levels, which differ enough."""
    levels, noise = ([value(flat) for flat in flats] for value in (lambda f: float(f.level.mean()), lambda f: f.fine))
    if levels[-1] - levels[0] < math.log(OfSpeckle.range) or not 0 < max(noise) < OfSpeckle.even * min(noise):
        return None
    (slope, _), ((variance, _), _) = np.polyfit(levels, np.log(noise), 1, cov=True)
    steepest = abs(slope) + 2 * math.sqrt(variance)
    white = np.median([flat.middle / flat.fine for flat in flats]) < OfSpeckle.white
    return float(np.median(noise)) if white and steepest < OfSpeckle.slope else None


@dataclass(frozen=True)
class _Flat:
    """What the flattest windows hold beside a plane."""

    rest: Floats  # (windows, a, b)
    level: Floats  # of each

    @classmethod
    def of(cls, windows: Floats) -> Self:
        """Choose a share of windows by the energy of coarse means, which hold little of the noise."""
        count, rows, columns = windows.shape
        level = windows.mean(axis=(1, 2))
        planes = _planes((rows, columns)).reshape(-1, rows * columns)
        flat = windows.reshape(count, -1)
        rest = (flat - flat @ planes.T @ planes).reshape(windows.shape)
        size = min(rows, OfSpeckle.coarse), OfSpeckle.coarse
        means = rest.reshape(count, rows // size[0], size[0], columns // size[1], size[1]).mean(axis=(2, 4))
        chosen = np.argsort(np.square(means).mean(axis=(1, 2)))[: max(int(OfSpeckle.flat * count), 2)]
        return cls(rest[chosen], level[chosen])

    @property
    def sigma(self) -> float:
        return math.sqrt(float(np.square(self.rest).mean()))

    @property
    def relative(self) -> Floats:
        return np.asarray(self.rest / (self.sigma or 1.0))

    @property
    def fine(self) -> float:
        """The strength of white noise by its highest frequencies."""
        return self._at(1)

    @property
    def middle(self) -> float:
        """The same by lower ones."""
        return self._at(0)

    def _at(self, which: int) -> float:
        if self.rest.shape[1] == 1:
            pairs = self.rest if which else self.rest.reshape(len(self.rest), 1, -1, 2).sum(axis=-1) / math.sqrt(2)
            return math.sqrt(float(np.square(pairs[..., ::2] - pairs[..., 1::2]).mean()) / 2)
        a, b, c, d = (self.rest[:, i::2, j::2] for i in (0, 1) for j in (0, 1))
        if which:
            return math.sqrt(float(np.square(a - b - c + d).mean())) / 2
        return math.sqrt(float(np.square(a + b - c - d).mean() + np.square(a - b + c - d).mean()) / 8)

    @property
    def white(self) -> bool:
        """Whether the noise is as strong at middle frequencies as at high ones."""
        return self.middle < OfSpeckle.white * self.fine

    @property
    def even(self) -> bool:
        """Whether the darker half is as noisy as the lighter one."""
        order = np.argsort(self.level)
        dark, light = (float(np.square(self.rest[half]).mean()) for half in np.array_split(order, 2))
        return min(dark, light) > 0 and max(dark, light) < OfSpeckle.alike**2 * min(dark, light)

    def distance(self, looks: float) -> float:
        """Return how far the law of log g is from what windows hold, in parts of how far a Gaussian law is from it."""
        from scipy.special import digamma, gammainc, ndtr

        ordered = np.sort(self.relative, axis=None)
        share = (np.arange(OfSpeckle.quantiles) + 0.5) / OfSpeckle.quantiles
        found = ordered[(share * len(ordered)).astype(int)]
        law = gammainc(looks, np.exp(found * math.sqrt(_polygamma(1, looks)) + float(digamma(looks))))
        return float(np.abs(law - share).max() / np.abs(ndtr(found) - share).max())


def _planes(size: tuple[int, int]) -> Floats:
    """Return what planes over a window are made of, orthonormal (2 or 3, a, b)."""
    places = [np.broadcast_to(a, size) for a in np.ogrid[: size[0], : size[1]]]
    parts = np.stack([np.ones(size), *(a - a.mean() for a in places if np.ptp(a))])
    return np.asarray(parts / np.linalg.norm(parts, axis=(1, 2), keepdims=True))


def windows_of(samples: Array, absent: NDArray[np.bool_], ends: tuple[float, float], *, double: bool = False) -> Floats:
    """Return windows (n, a, b) of all channels and slices, none of which is missing, and hardly any at an end."""
    shape = [n for n in absent.shape if n > 1] or [1]
    rows, columns = (1, shape[0]) if len(shape) == 1 else shape[-2:]
    side = OfSpeckle.side[1 if rows == 1 else 2] * (1 + double)
    size = (1 if rows == 1 else side, side)
    if rows < size[0] or columns < size[1]:
        return np.empty((0, *size))
    planes = np.moveaxis(samples.reshape(-1, rows, columns, samples.shape[-1]), -1, 1)
    hidden = absent.reshape(-1, rows, columns)
    every = max(1, len(planes) // OfSpeckle.slices)
    most = OfSpeckle.most_windows // max(planes[::every].shape[0] * planes.shape[1], 1)
    free = max((rows - size[0] + 1) * (columns - size[1] + 1) / max(most, 1), 1)
    step = max(OfSpeckle.side[2] // 2, math.ceil(free if rows == 1 else math.sqrt(free)))
    steps = np.s_[:: 1 if rows == 1 else step, ::step]
    found = []
    for slices, gone in zip(planes[::every], hidden[::every], strict=True):
        seen = ~sliding_window_view(gone, size)[steps].any(axis=(-1, -2))
        found += [sliding_window_view(plane, size)[steps][seen] for plane in slices]
    windows = np.concatenate(found).astype(np.float64)
    at_end = ((windows == ends[0]) | (windows == ends[1])).mean(axis=(1, 2))
    return np.asarray(windows[at_end <= OfSpeckle.at_end])


def _with_spectrum(noise: Any, samples: Array, absent: NDArray[np.bool_]) -> Any:
    """Return speckle with the spectrum of its noise where that is not white; of pictures and signals.

    Of flat windows whose noise was made even, tapered. Low frequencies, which hold most of the structure, count as the
    lowest ones that a window tells.
    """
    even = noise.reduce(samples, absent).samples
    if absent.ndim > 2 or min(absent.shape) < 2:
        return noise
    windows = windows_of(even, absent, (-math.inf, math.inf), double=True)
    flat = _Flat.of(windows) if len(windows) >= OfSpeckle.least_windows else None
    if flat is None or flat.white:
        return noise
    taper = math.prod(np.ix_(*(np.sin(np.pi * (np.arange(n) + 0.5) / n) for n in flat.rest.shape[1:])))
    power = np.square(np.abs(np.fft.fft2(flat.rest * taper))).mean(axis=0)
    known = np.hypot(*np.ix_(*(np.fft.fftfreq(n) * n for n in power.shape))) >= OfSpeckle.lowest
    lowest = known & (np.hypot(*np.ix_(*(np.fft.fftfreq(n) * n for n in power.shape))) < OfSpeckle.lowest + 1)
    power[~known] = power[lowest].mean()
    found = replace(noise, spectrum=power if power.shape[0] > 1 else power[0])
    # Windows that are flat by chance hold less of it, as such noise where nothing else is shows.
    drawn = LogSpeckle(1.0, found.looks, found.spectrum).sample(np.zeros(absent.shape), rng=0)[..., None]
    seen = _Flat.of(windows_of(drawn, np.zeros_like(absent), (-math.inf, math.inf))).sigma
    factor = math.sqrt(_polygamma(1, found.looks)) / seen
    if isinstance(found, LogSpeckle):
        return found.scaled(factor)
    return replace(found, looks=_looks_of(factor * math.sqrt(_polygamma(1, found.looks))) or found.looks)


def _polygamma(order: int, looks: float) -> float:
    from scipy.special import polygamma

    return float(polygamma(order, looks))


def _looks_of(sigma: float) -> float | None:
    """Return the looks whose logarithms have this standard deviation; it falls with them."""
    return None if not sigma > 0 else _root(lambda looks: math.log(sigma**2 / _polygamma(1, looks)))


def _root(function: Callable[[float], float]) -> float | None:
    """Return the looks at which a growing function is 0; None beyond those that are looked for."""
    from scipy.optimize import brentq

    least, most = (math.log(looks) for looks in OfSpeckle.looks)
    if not function(math.exp(least)) < 0 < function(math.exp(most)):
        return None
    return math.exp(brentq(lambda t: function(math.exp(t)), least, most))
