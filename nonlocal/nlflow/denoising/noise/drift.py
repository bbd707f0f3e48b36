"""Drift: a baseline that wanders slowly under a recording."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.denoising.noise.base import Noise, Reduction
from nlflow.denoising.noise.figures import OfDrift
from nlflow.denoising.noise.signals import check_recording, recording_of, robust_weights
from nlflow.errors import InputError, check_number

Array = NDArray[Any]


@underflowing
@dataclass(frozen=True)
class Drift(Noise):
    """A baseline of mean 0 that wanders more slowly than `scale` samples.

    Parameters
    ----------
    scale : float
        In samples, >= 8. Of a wave of this period half counts as drift, of one of half the period 6 %, and of one of
        twice the period 94 %.
    sigma : float, optional
        Standard deviation of the drift, in the units of the input, >= 0: for `sample` alone.

    Raises
    ------
    InputError
        For a scale that is not >= 8, and a sigma that is not >= 0.

    Notes
    -----
    Nothing in a recording tells drift from slow parts of the signal. It is never looked for: who names it says that
    nothing of interest is slower than `scale`. The mean of a recording stays what it is.

    `reduce` finds the baseline b of samples y that minimizes ``Σ w (y - b)² + (scale / 2π)⁴ Σ (b'')²``, w Huber's
    weights for y - b, so that heart beats and spikes pull it little. Beyond an end nothing is assumed but that the
    baseline has no bend there: it goes on along its slope, as in a gap. Where the weights are equal, a wave of period P
    keeps the share 1 / (1 + (scale / P)⁴) in the baseline. Long scales are solved on means of neighbouring samples, 64
    for each scale. Cost O(N).

    References
    ----------
    Whittaker 1923 (doi 10.1017/S0013091500077853); Eilers 2003 (doi 10.1021/ac034173t); Huber 1964
    (doi 10.1214/aoms/1177703732).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import Drift
    >>> t = np.arange(2000)
    >>> beats = (t % 100 < 4) * 5.0
    >>> noisy = beats + np.sin(2 * np.pi * t / 1500)
    >>> rest = Drift(scale=400).reduce(noisy[:, None]).samples[:, 0]
    >>> bool(np.std(rest - beats) < 0.05)
    True
    """

    scale: float
    sigma: float | None = None

    kind: ClassVar[str] = "drift"
    undone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        hint = "samples; nothing of interest is slower"
        object.__setattr__(self, "scale", check_number("scale", self.scale, minimum=OfDrift.least_scale, hint=hint))
        if self.sigma is not None:
            object.__setattr__(self, "sigma", check_number("sigma", self.sigma, minimum=0))

    def sample(self, clean: Any, *, rng: Any = None, channel_axis: int | None = None) -> Array:
        """Return the recording on a Gaussian process of covariance ``sigma² exp(-2 τ² / scale²)``, another a channel.

        Of its variance 0.2 % lies in periods below `scale`.
        """
        signal, restore = recording_of("clean", clean, channel_axis, self.kind)
        if self.sigma is None:
            raise InputError("sigma: got none, so that it is not known how strong the drift is; give it")
        draws = np.random.default_rng(rng)
        drift = [self._process(len(signal), draws) for _ in range(signal.shape[1])]
        return restore(signal + self.sigma * np.stack(drift, axis=1))

    def _process(self, size: int, rng: np.random.Generator) -> Floats:
        """Return a stationary process of variance 1, cut from a periodic one so long that its ends do not touch."""
        cell = max(1, int(self.scale / (2 * OfDrift.cells)))
        length = math.ceil(size / cell) + 1 + math.ceil(3 * self.scale / cell)
        frequency = np.fft.rfftfreq(length)
        gain = np.exp(-((math.pi * frequency * self.scale / (2 * cell)) ** 2))
        white = np.fft.rfft(rng.normal(size=length))
        # The variance of the filtered noise: each frequency but 0 (and 1/2) stands for two.
        twice = np.full(len(gain), 2.0)
        twice[0] = 1.0
        if length % 2 == 0:
            twice[-1] = 1.0
        coarse = np.fft.irfft(white * gain, length) / math.sqrt(float(twice @ gain**2) / length)
        return np.interp(np.arange(size) / cell, np.arange(length), coarse)

    def describe(self) -> str:
        """Return the scale, and the strength where that is known."""
        strength = "" if self.sigma is None else f", sigma {self.sigma:.4g}"
        return f"drift slower than {self.scale:.4g} samples{strength}"

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Subtract the baseline less its mean.

        Raises
        ------
        InputError
            For images.
        """
        signal = check_recording("samples", samples, self.kind)
        present = np.ones(len(signal), bool) if missing is None else ~missing
        drift = np.stack([self.baseline(channel, present) for channel in signal.T], axis=1)
        return Reduction((signal - drift).astype(samples.dtype), missing=missing)

    def scaled(self, factor: float) -> Drift:
        """Return drift of another strength; the same where it is not known."""
        factor = check_number("factor", factor, minimum=0)
        return Drift(self.scale, None if self.sigma is None else factor * self.sigma)

    def baseline(self, samples: Floats, present: NDArray[np.bool_]) -> Floats:
        """Return the drift of one recording (N,), of mean 0 over the samples that are present."""
        count = int(np.count_nonzero(present))
        if count < 2:
            return np.zeros(len(samples))
        values = np.where(present, samples, 0.0)
        size = max(float(np.abs(values).max()), 1e-300)
        values = np.where(present, values / size - float(np.mean(values[present] / size)), 0.0)
        # No baseline bends where a straight line does not: without it cells of unequal sizes do no harm.
        time = np.arange(len(values)) / len(values)
        line = np.polynomial.polynomial.polyval(
            time, np.polynomial.polynomial.polyfit(time[present], values[present], 1)
        )
        values = np.where(present, values - line, 0.0)
        cells = _Cells.of(len(values), self.scale)
        weights = present.astype(np.float64)
        baseline = cells.smooth(values, weights)
        for _ in range(OfDrift.rounds):
            rest = values - baseline
            weights = robust_weights(rest, present)
            before, baseline = baseline, cells.smooth(values, weights)
            if np.abs(baseline - before).max() <= OfDrift.settled * float(np.std(rest[present])):
                break
        baseline = baseline + line
        return (baseline - float(np.mean(baseline[present]))) * size


@dataclass(frozen=True)
class _Cells:
    """Means of neighbouring samples, on which a slow baseline is solved for."""

    number: NDArray[np.intp]  # of each sample's cell
    centre: Floats
    penalty: Floats  # of second differences, in the form of `scipy.linalg.solveh_banded`: upper bands (3, cells)

    @classmethod
    def of(cls, size: int, scale: float) -> _Cells:
        """Cut `size` samples into cells that are short against `scale`."""
        side = max(1, min(int(scale / OfDrift.cells), size // 4))
        number = np.minimum(np.arange(size) // side, max(size // side, 1) - 1)
        count = int(number[-1]) + 1
        centre = np.bincount(number, np.arange(size)) / np.bincount(number)
        strength = side * (min(scale, OfDrift.straight * size) / (2 * math.pi * side)) ** 4
        return cls(number, centre, strength * _second_differences(count))

    def smooth(self, values: Floats, weights: Floats) -> Floats:
        """Return the baseline at all samples."""
        from scipy.interpolate import CubicSpline
        from scipy.linalg import solveh_banded

        weight = np.bincount(self.number, weights)
        if len(self.centre) < 3:
            return np.full(len(values), float(weights @ values / weights.sum()))
        bands = self.penalty.copy()
        bands[2] += weight + 1e-12 * weight.max()
        coarse = solveh_banded(bands, np.bincount(self.number, weights * values))
        if len(self.centre) == len(values):
            return np.asarray(coarse)
        return np.asarray(CubicSpline(self.centre, coarse, bc_type="natural")(np.arange(len(values))))


def _second_differences(count: int) -> Floats:
    """Return the upper bands (3, count) of D^T D, D the second differences of `count` values."""
    bands = np.zeros((3, count))
    if count < 3:
        return bands
    rows = np.arange(count - 2)
    for i, a in enumerate((1.0, -2.0, 1.0)):
        for j, b in enumerate((1.0, -2.0, 1.0)):
            if j >= i:
                np.add.at(bands[2 - (j - i)], rows + j, a * b)
    return bands
