"""Hum and drift."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.denoising.noise.figures import TO_SIGMA, OfDrift, OfHum, OfRecordings, OfTransfer
from nlflow.denoising.noise.models.base import Subtracted, check_missing
from nlflow.errors import InputError, as_numpy, check_array, check_floats, check_number, listed

Array = NDArray[Any]


def check_recording(samples: Array, kind: str, name: str) -> None:
    if np.ndim(samples) != 2:
        raise InputError(
            f"{name}: got shape {np.shape(samples)[:-1]}, expected a 1-D signal: {kind} is a noise of recordings; "
            "choose another noise for images"
        )


def channel_of(samples: Any, missing: Any) -> tuple[Floats, NDArray[np.bool_]]:
    """Return one recording (N,) in double precision, 0 where it is missing, and where it is present."""
    if missing is None:
        values = check_floats("samples", samples, ndim=1)
        return values, np.ones(len(values), bool)
    mask = as_numpy("missing", missing, "expected booleans")
    check_missing(mask, np.shape(samples))
    known = np.where(mask, 0, np.asarray(samples))
    return check_floats("samples", known, ndim=1), ~mask


def interpolated(values: Floats, present: NDArray[np.bool_]) -> Floats:
    if present.all():
        return values
    t = np.arange(len(values))
    return np.interp(t, t[present], values[present])


def spread_of(values: Floats) -> float:
    return TO_SIGMA * float(np.median(np.abs(values))) if values.size else 0.0


def robust_weights(error: Floats, used: NDArray[np.bool_]) -> Floats:
    size = np.abs(error)
    # Without noise most errors are 0 but for rounding, and the fit becomes one of least absolute values.
    limit = max(OfRecordings.huber * spread_of(error[used]), 1e-12 * float(size.max(initial=0.0)), 1e-300)
    return np.where(used, limit / np.maximum(size, limit), 0.0)


def prediction_filter(values: Floats, present: NDArray[np.bool_], order: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the filter (order + 1,) that leaves the error of linear prediction, and where it meets no gap."""
    from numpy.lib.stride_tricks import sliding_window_view

    if order == 0:
        return np.ones(1), present
    windows = sliding_window_view(values, order + 1)
    whole = np.asarray(sliding_window_view(present, order + 1).all(axis=1))
    past, now = windows[:, :-1], windows[:, -1]
    weights = whole.astype(np.float64)
    coefficients = np.zeros(order)
    for _ in range(3):
        weighted = past * weights[:, None]
        moments = weighted.T @ past
        ridge = 1e-9 * np.trace(moments) / order + 1e-300
        coefficients = np.linalg.solve(moments + ridge * np.eye(order), weighted.T @ now)
        weights = robust_weights(now - past @ coefficients, whole)
    # The most recent sample comes first in a convolution.
    return np.concatenate([[1.0], -coefficients[::-1]]), whole


@underflowing
@dataclass(frozen=True)
class Hum(Subtracted):
    """Sinusoids of constant frequency, ``Σ_k a_k cos(2π f_k t + φ_k)``, t the number of the sample.

    Parameters
    ----------
    frequencies : sequence of float
        In cycles a sample, > 0 and < 1/2, harmonics too: 50 / 360 for mains of 50 Hz in a recording of 360 samples a
        second.
    amplitudes : sequence of float, optional
        In the units of the input, >= 0, one for each frequency.
    phases : sequence of float, optional
        In radians, at the first sample; they need `amplitudes`.

    Raises
    ------
    InputError
        For no frequencies, frequencies out of range or given twice, sequences of different lengths, and phases without
        amplitudes.

    Notes
    -----
    `reduce` subtracts the hum. Without phases it fits amplitudes and phases to each channel, by generalized least
    squares with Huber's weights on the error of linear prediction, in O(N m²) for N samples and m frequencies.

    References
    ----------
    Huber 1964 (doi 10.1214/aoms/1177703732); prediction errors as white noise, Makhoul 1975
    (doi 10.1109/PROC.1975.9792).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import Hum
    >>> clean = np.sign(np.sin(np.arange(1000) / 70))
    >>> hum = Hum((0.12,), (0.3,), (1.0,))
    >>> noisy = hum.sample(clean)
    >>> left = Hum((0.12,)).reduce(noisy[:, None]).samples[:, 0] - clean
    >>> bool(np.abs(left).max() < 0.01)
    True
    """

    frequencies: tuple[float, ...]
    amplitudes: tuple[float, ...] | None = None
    phases: tuple[float, ...] | None = None

    kind: ClassVar[str] = "hum"
    amount: ClassVar[str] = "amplitudes"

    def __post_init__(self) -> None:
        frequencies = _numbers("frequencies", self.frequencies, strict=True, below=0.5)
        if len(set(frequencies)) < len(frequencies):
            raise InputError(f"frequencies: got {frequencies}, expected each of them once")
        object.__setattr__(self, "frequencies", frequencies)
        if self.amplitudes is not None:
            object.__setattr__(self, "amplitudes", _numbers("amplitudes", self.amplitudes, count=len(frequencies)))
        if self.phases is not None:
            if self.amplitudes is None:
                raise InputError("phases: got them without amplitudes; give both, or leave both out")
            phases = _numbers("phases", self.phases, minimum=-math.inf, count=len(frequencies))
            object.__setattr__(self, "phases", phases)

    def wave(self, size: int) -> Floats:
        """The hum at the samples."""
        if self.amplitudes is None or self.phases is None:
            raise InputError("phases: got none, so that the hum is not known; give amplitudes and phases")
        basis = waves(self.frequencies, size)
        return np.asarray(basis @ _coefficients(self.amplitudes, self.phases))

    def _noisy(self, samples: Array, rng: np.random.Generator) -> Array:
        """Add the hum to each channel, with phases at random where they are not known."""
        if self.amplitudes is None:
            raise InputError("amplitudes: got none, so that there is no hum to add; give them")
        phases = self.phases or tuple(rng.uniform(-math.pi, math.pi, len(self.frequencies)).tolist())
        return np.asarray(samples + replace(self, phases=phases).wave(len(samples))[:, None])

    def describe(self) -> str:
        shown = listed(self.frequencies, 4, ".6g")
        strength = "" if self.amplitudes is None else f", amplitude {math.hypot(*self.amplitudes):.4g}"
        return f"hum at {shown} cycles a sample{strength}"

    def _check(self, samples: Array, name: str = "image") -> None:
        check_recording(samples, self.kind, name)

    def _lies_on(self, samples: Array, missing: NDArray[np.bool_] | None) -> Array:
        if self.phases is not None:
            return self.wave(len(samples))[:, None]
        return np.stack([self.fitted(channel, missing).wave(len(samples)) for channel in samples.T], axis=1)

    def completed(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Self:
        """Fit the hum of a single channel; several have each another, and it stays open."""
        self._check(samples)
        if self.phases is not None or samples.shape[1] > 1:
            return self
        found = self.fitted(samples[:, 0].astype(np.float64), missing)
        return replace(self, amplitudes=found.amplitudes, phases=found.phases)

    def fitted(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Hum:
        """Return the hum of these frequencies that lies on a recording (N,)."""
        values, present = channel_of(samples, missing)
        needed = 8 * len(self.frequencies)
        if len(values) < needed:
            raise InputError(f"samples: got {len(values)}, expected {needed} at least to fit {self.describe()}")
        basis = waves(self.frequencies, len(values))
        return _named(self.frequencies, fit(values, basis, present))


def _numbers(
    name: str, values: Any, count: int | None = None, minimum: float = 0.0, **bounds: Any
) -> tuple[float, ...]:
    array = check_array(name, values, ndim=1, hint="a sequence of numbers")
    if count is not None and len(array) != count:
        raise InputError(f"{name}: got {len(array)} numbers, expected {count}, one for each frequency")
    return tuple(check_number(name, value, minimum=minimum, **bounds) for value in array.tolist())


def waves(frequencies: Any, size: int) -> Floats:
    turns = np.outer(np.arange(size), np.asarray(frequencies, np.float64))
    angle = 2 * math.pi * (turns - np.rint(turns))  # a few digits more for long recordings
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)


def _coefficients(amplitudes: Any, phases: Any) -> Floats:
    a, phi = np.asarray(amplitudes), np.asarray(phases)
    return np.concatenate([a * np.cos(phi), -a * np.sin(phi)])


def _named(frequencies: tuple[float, ...], coefficients: Floats) -> Hum:
    cosine, sine = coefficients.reshape(2, -1)
    return Hum(
        frequencies, tuple(np.hypot(cosine, sine).tolist()), tuple(np.arctan2(-sine, cosine).tolist())
    )  # fmt: skip


def fit(values: Floats, basis: Floats, present: NDArray[np.bool_]) -> Floats:
    scale = float(np.abs(values[present]).max(initial=0.0))
    if scale == 0:
        return np.zeros(basis.shape[1])
    centred = np.where(present, values / scale, 0.0)
    centred = np.where(present, centred - np.median(centred[present]), 0.0)
    order = _order_for(present)
    # A taper keeps the first fit from what leaks of other frequencies.
    taper = np.where(present, np.hanning(len(values) + 2)[1:-1], 0.0)
    coefficients = _least_squares(basis, centred, taper)
    for _ in range(OfHum.rounds):
        rest = np.where(present, centred - basis @ coefficients, 0.0)
        error_filter, whole = prediction_filter(rest, present, order)
        error = np.convolve(rest, error_filter, "valid")
        weights = robust_weights(error, whole)
        filtered = np.stack([np.convolve(column, error_filter, "valid") for column in basis.T], axis=1)
        target = np.convolve(centred, error_filter, "valid")
        coefficients = _least_squares(filtered, target, weights)
    return coefficients * scale


def _order_for(present: NDArray[np.bool_]) -> int:
    """Return an order so low that half of the samples that are present have a whole past."""
    order = max(1, min(OfHum.order, len(present) // 64))
    while order > 0:
        since = np.convolve(present, np.ones(order + 1), "valid") > order + 0.5
        if 2 * np.count_nonzero(since) >= np.count_nonzero(present):
            break
        order //= 2
    return order


def _least_squares(basis: Floats, values: Floats, weights: Floats) -> Floats:
    root = np.sqrt(weights)
    return np.asarray(np.linalg.lstsq(basis * root[:, None], values * root, rcond=1e-10)[0])


@underflowing
@dataclass(frozen=True)
class Drift(Subtracted):
    """A baseline that wanders with periods mostly longer than `scale` samples.

    Parameters
    ----------
    scale : float
        In samples, >= 8: the period of which about half counts as drift.
    sigma : float, optional
        Standard deviation of the drift in `sample`, in the units of the input, >= 0; `reduce` ignores it.

    Raises
    ------
    InputError
        For a scale < 8, and a negative sigma.

    Notes
    -----
    Slow parts of the signal are taken out with the drift, so `estimate_noise` never looks for it.

    `reduce` subtracts the baseline b of samples y that minimizes ``Σ w (y - b)² + (scale / 2π)⁴ Σ (b'')²``, w Huber's
    weights for y - b, less its mean. With equal weights about 1 / (1 + (scale / P)⁴) of a wave of period P is in the
    baseline. O(N).

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

    scale: float = field(metadata={"minimum": OfDrift.least_scale, "hint": "samples; nothing of interest is slower"})
    sigma: float | None = field(default=None, metadata={"minimum": 0})

    kind: ClassVar[str] = "drift"

    def _noisy(self, samples: Array, rng: np.random.Generator) -> Array:
        """Add a Gaussian process of covariance ``sigma² exp(-2 τ² / scale²)``, another to each channel.

        Of its variance 0.2 % lies in periods below `scale`.
        """
        if self.sigma is None:
            raise InputError("sigma: got none, so that it is not known how strong the drift is; give it")
        drift = [self._process(len(samples), rng) for _ in range(samples.shape[1])]
        return np.asarray(samples + self.sigma * np.stack(drift, axis=1))

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
        strength = "" if self.sigma is None else f", sigma {self.sigma:.4g}"
        return f"drift slower than {self.scale:.4g} samples{strength}"

    def _check(self, samples: Array, name: str = "image") -> None:
        check_recording(samples, self.kind, name)

    def _lies_on(self, samples: Array, missing: NDArray[np.bool_] | None) -> Array:
        """Return the baseline less its mean."""
        present = np.ones(len(samples), bool) if missing is None else ~missing
        return np.stack([self.baseline(channel, present) for channel in samples.T], axis=1)

    def baseline(self, samples: Floats, present: NDArray[np.bool_]) -> Floats:
        """Drift of a recording."""
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
        for _ in range(OfTransfer.sweeps):
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
