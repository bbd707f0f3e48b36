"""Hum: a few sinusoids of constant frequency that lie on a recording, as mains and their harmonics do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.denoising.noise.base import Noise, Reduction
from nlflow.denoising.noise.figures import OfHum
from nlflow.denoising.noise.signals import (
    channel_of,
    check_recording,
    prediction_filter,
    recording_of,
    robust_weights,
)
from nlflow.errors import InputError, check_array, check_number

Array = NDArray[Any]


@underflowing
@dataclass(frozen=True)
class Hum(Noise):
    """Sinusoids of constant frequency: ``Σ_k a_k cos(2π f_k t + φ_k)``, t the number of the sample.

    Parameters
    ----------
    frequencies : sequence of float
        In cycles a sample, > 0 and < 1/2: 50 / 360 for mains of 50 Hz in a recording of 360 samples a second. The
        harmonics are to be named too.
    amplitudes : sequence of float, optional
        In the units of the input, >= 0, one for each frequency. Not known when not given.
    phases : sequence of float, optional
        In radians, at the first sample. Not known when not given; they need `amplitudes`.

    Raises
    ------
    InputError
        For no frequency, for one out of range or given twice, and for sequences of different lengths.

    Notes
    -----
    `reduce` subtracts the hum where amplitudes and phases are known, and fits both to each channel otherwise. The fit
    is that of generalized least squares with the weights of Huber: the recording is filtered by the error of its own
    linear prediction, so that what a signal is made of counts little, and outliers of that error, as jumps and heart
    beats, do not pull. Errors of the fit are those of 2 parameters a frequency in the noise and the structure near it.

    Where samples are missing the filter is shortened, so that enough of its windows touch no gap.

    Cost O(N (p² + m²)) for N samples, p <= 16 and m frequencies.

    References
    ----------
    Huber 1964 (doi 10.1214/aoms/1177703732); prediction errors as white noise: Makhoul 1975
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
    undone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the numbers."""
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
        """Return the hum itself, shape (size,), from amplitudes and phases that are known."""
        if self.amplitudes is None or self.phases is None:
            raise InputError("phases: got none, so that the hum is not known; give amplitudes and phases")
        basis = waves(self.frequencies, size)
        return np.asarray(basis @ _coefficients(self.amplitudes, self.phases))

    def sample(self, clean: Any, *, rng: Any = None, channel_axis: int | None = None) -> Array:
        """Return the recording with the hum on each channel; with phases from `rng` where they are not known."""
        signal, restore = recording_of("clean", clean, channel_axis, self.kind)
        if self.amplitudes is None:
            raise InputError("amplitudes: got none, so that there is no hum to add; give them")
        known = self
        if self.phases is None:
            phases = np.random.default_rng(rng).uniform(-math.pi, math.pi, len(self.frequencies))
            known = Hum(self.frequencies, self.amplitudes, tuple(phases.tolist()))
        return restore(signal + known.wave(len(signal))[:, None])

    def describe(self) -> str:
        """Return the frequencies, and how strong the hum is where that is known."""
        shown = ", ".join(f"{f:.6g}" for f in self.frequencies[:4]) + (", ..." if len(self.frequencies) > 4 else "")
        strength = "" if self.amplitudes is None else f", amplitude {math.hypot(*self.amplitudes):.4g}"
        return f"hum at {shown} cycles a sample{strength}"

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Subtract the hum; what it was is found for each channel where amplitudes or phases are not known.

        Raises
        ------
        InputError
            For images, and for fewer samples than the fit has unknowns.
        """
        signal = check_recording("samples", samples, self.kind)
        if self.phases is not None:
            hum = np.broadcast_to(self.wave(len(signal))[:, None], signal.shape)
        else:
            hum = np.stack([self.fitted(channel, missing).wave(len(signal)) for channel in signal.T], axis=1)
        return Reduction((signal - hum).astype(samples.dtype), missing=missing)

    def scaled(self, factor: float) -> Hum:
        """Return hum of other amplitudes; the same where they are not known."""
        factor = check_number("factor", factor, minimum=0)
        amplitudes = None if self.amplitudes is None else tuple(factor * a for a in self.amplitudes)
        return Hum(self.frequencies, amplitudes, self.phases)

    def fitted(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Hum:
        """Return the hum of these frequencies that a recording of shape (N,) has, with amplitudes and phases."""
        values, present = channel_of(samples, missing)
        needed = 8 * len(self.frequencies)
        if len(values) < needed:
            raise InputError(f"samples: got {len(values)}, expected {needed} at least to fit {self.describe()}")
        basis = waves(self.frequencies, len(values))
        return _named(self.frequencies, fit(values, basis, present))


def _numbers(
    name: str, values: Any, count: int | None = None, minimum: float = 0.0, **bounds: Any
) -> tuple[float, ...]:
    """Return checked numbers of a sequence."""
    array = check_array(name, values, ndim=1, hint="a sequence of numbers")
    if count is not None and len(array) != count:
        raise InputError(f"{name}: got {len(array)} numbers, expected {count}, one for each frequency")
    return tuple(check_number(name, value, minimum=minimum, **bounds) for value in array.tolist())


def waves(frequencies: Any, size: int) -> Floats:
    """Return cosines, then sines, of frequencies in cycles a sample: shape (size, 2 m)."""
    turns = np.outer(np.arange(size), np.asarray(frequencies, np.float64))
    angle = 2 * math.pi * (turns - np.rint(turns))  # a few digits more for long recordings
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)


def _coefficients(amplitudes: Any, phases: Any) -> Floats:
    """Return what cosines and sines are multiplied by."""
    a, phi = np.asarray(amplitudes), np.asarray(phases)
    return np.concatenate([a * np.cos(phi), -a * np.sin(phi)])


def _named(frequencies: tuple[float, ...], coefficients: Floats) -> Hum:
    cosine, sine = coefficients.reshape(2, -1)
    return Hum(
        frequencies, tuple(np.hypot(cosine, sine).tolist()), tuple(np.arctan2(-sine, cosine).tolist())
    )  # fmt: skip


def fit(values: Floats, basis: Floats, present: NDArray[np.bool_]) -> Floats:
    """Return the coefficients of a basis (N, m) that lies on a recording (N,): robust generalized least squares."""
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
