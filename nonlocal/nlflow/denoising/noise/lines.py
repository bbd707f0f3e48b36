"""Lines of a spectrum that are hum and no part of the signal: `find_hum`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.denoising.noise.estimation import estimate_sigmas
from nlflow.denoising.noise.figures import OfHum
from nlflow.denoising.noise.hum import Hum, fit, waves
from nlflow.denoising.noise.signals import channel_of, spread_of
from nlflow.errors import check_number

Array = NDArray[Any]


@underflowing
def find_hum(samples: Any, missing: NDArray[np.bool_] | None = None, *, rate: float | None = None) -> Hum | None:
    """Find mains hum and its harmonics in a recording; None where there is none, or where it may be the signal.

    Parameters
    ----------
    samples : array_like of shape (N,)
        One recording.
    missing : bool array of shape (N,), optional
        True where a sample is missing; its value does not matter.
    rate : float, optional
        Samples a second. Only lines on multiples of 50 or 60 Hz are hum then, and they may be stronger.

    Returns
    -------
    Hum or None
        With frequencies, amplitudes and phases.

    Raises
    ------
    InputError
        For anything but one recording of finite samples, and a rate that is not > 0.

    Notes
    -----
    A steady sinusoid may be what was to be recorded, so that a line counts as hum only if all of this is true.

    - It is as narrow as the recording allows, and rises above the median of its neighbours by more than white noise
      does once in a thousand recordings.
    - Its amplitude and phase are those of the whole in each of 8 parts: an F test of their mean against their spread,
      on the recording after a first-order prediction and with outliers cut off. It has 4 cycles in a part at least.
    - All lines lie on multiples of one frequency, and there is no slower line: a signal of tones keeps them all.
    - The rest is a signal: beyond white noise it has structure from an eighth of the lowest frequency on, of four
      times the energy of the hum at least (a quarter, where the rate tells that the line is mains). A lone tone, a
      chord, a test signal of sines and a yearly cycle on a trend are kept.

    A weak steady tone that accompanies a richer signal meets all of them: give `rate`, or do not ask, where such tones
    matter. Hum whose phase wanders by a radian over the recording is not found. Cost O(N log N). Deterministic.

    References
    ----------
    An F test of lines on independent estimates of their amplitude: Thomson 1982 (doi 10.1109/PROC.1982.12433), there
    from tapers, here from parts of the recording.
    """
    values, present = channel_of(samples, missing)
    if rate is not None:
        rate = check_number("rate", rate, minimum=0, strict=True, hint="samples a second")
    if len(values) < OfHum.least or np.count_nonzero(present) < 3 * len(values) / 4:
        return None
    values = _interpolated(values, present)
    scale = float(np.abs(values).max())
    if scale == 0:
        return None
    values = values / scale
    values = values - np.median(values)
    series = _series([f for f in _candidates(values) if _is_steady(values, f)], len(values), rate)
    lines = None if series is None else _refined(values, *series, present)
    if lines is None:
        return None
    hum = Hum(lines).fitted(values, ~present)
    if not _lies_on_a_signal(values, hum, present, OfHum.share if rate is None else OfHum.share_mains):
        return None
    return hum.scaled(scale)


def _interpolated(values: Floats, present: NDArray[np.bool_]) -> Floats:
    if present.all():
        return values
    t = np.arange(len(values))
    return np.interp(t, t[present], values[present])


def _whitened(values: Floats) -> Floats:
    """Return what two predictions from the sample before leave, without outliers; they cannot take out a line."""
    for _ in range(2):
        before, now = values[:-1], values[1:]
        energy = float(before @ before)
        values = now - (float(before @ now) / energy if energy > 0 else 0.0) * before
    limit = OfHum.clipped * spread_of(values)
    return np.clip(values, -limit, limit)


def _taper(size: int) -> Floats:
    return np.hanning(size + 2)[1:-1]


def _candidates(values: Floats) -> list[float]:
    """Return frequencies of narrow peaks, the strongest first."""
    from scipy.ndimage import maximum_filter1d, median_filter

    white = _whitened(values)
    size = len(white)
    power = np.abs(np.fft.rfft(_taper(size) * white)) ** 2
    if power.max() < 1e-290:  # nothing but rounding is left
        return []
    background = median_filter(power, OfHum.background, mode="reflect")
    ratio = power / np.maximum(background, 1e-24 * power.max())
    # In white noise the ratio is exponential, of median 1.
    level = math.log(len(ratio) / OfHum.false) / math.log(2)
    peaks = (ratio > level) & (power == maximum_filter1d(power, 2 * OfHum.near - 1))
    index = np.flatnonzero(peaks)
    index = index[(index >= OfHum.cycles * OfHum.few_parts / 2) & (index < len(ratio) - OfHum.near)]
    index = index[np.argsort(-ratio[index])][: OfHum.most_lines]
    return [_from_phases(white, k / size) for k in index.tolist()]


def _parts(white: Floats, frequency: float, count: int) -> NDArray[np.complex128]:
    """Return the complex amplitude of a line in each part of the recording."""
    length = len(white) // count
    t = np.arange(count * length)
    turned = white[: count * length] * np.exp(-2j * math.pi * frequency * t)
    taper = _taper(length)
    return np.asarray(2 * turned.reshape(count, length) @ taper / taper.sum())


def _from_phases(white: Floats, frequency: float) -> float:
    """Return a frequency near a given one by which the phases of the parts agree."""
    for _ in range(3):
        z = _parts(white, frequency, OfHum.parts)
        turn = np.angle(np.sum(z[1:] * z[:-1].conj()))
        frequency += float(turn) / (2 * math.pi * (len(white) // OfHum.parts))
    return frequency


def _is_steady(values: Floats, frequency: float) -> bool:
    """Tell by an F test whether a line has one amplitude and phase in all parts."""
    white = _whitened(values)
    count = OfHum.parts if _is_fast(frequency, len(values)) else OfHum.few_parts
    z = _parts(white, frequency, count)
    mean = z.mean()
    spread = float(np.sum(np.abs(z - mean) ** 2))
    ratio = count * abs(mean) ** 2 / max(spread, 1e-300)
    # F with 2 and 2 (n - 1) degrees of freedom is (n - 1) times the ratio; its tail is a power.
    chance = -(count - 1) * math.log1p(ratio)
    return chance < math.log(OfHum.false / (len(values) / 2))


def _is_fast(frequency: float, size: int) -> bool:
    """Tell whether a line has so many cycles in a part that it can be hum."""
    return frequency * (size // OfHum.parts) >= OfHum.cycles


def _series(lines: list[float], size: int, rate: float | None) -> tuple[float, Floats] | None:
    """Return the frequency of which all lines are multiples, and which ones; None where there is none."""
    if not lines or not all(_is_fast(f, size) for f in lines):
        return None
    found = np.sort(lines)
    for number in range(1, OfHum.missing_harmonics + 1):
        multiples = np.rint(found / (found[0] / number))
        base = float(multiples @ found / (multiples @ multiples))
        fits = np.abs(found - multiples * base).max() * size <= OfHum.harmonic
        if (
            fits
            and multiples.max() <= OfHum.most_harmonics
            and (np.diff(multiples) > 0).all()
            and _is_mains(base, rate)
        ):
            return base, multiples
    return None


def _is_mains(base: float, rate: float | None) -> bool:
    return rate is None or any(abs(base * rate / mains - 1) <= OfHum.mains_error for mains in OfHum.mains)


def _refined(values: Floats, base: float, multiples: Floats, present: NDArray[np.bool_]) -> tuple[float, ...] | None:
    """Return the lines at the frequency that fits best; None where the hum grows or falls.

    To first order ``a exp(i d t)`` is ``a + i d t a``, so that the coefficients of t tell both.
    """
    size = len(values)
    time = (np.arange(size) / size - (size - 1) / (2 * size))[:, None]
    for _ in range(2):
        basis = waves(multiples * base, size)
        both = fit(values, np.concatenate([basis, time * basis], axis=1), present)
        cosine, sine, slope_cosine, slope_sine = both.reshape(4, -1)
        amplitude, slope = cosine - 1j * sine, slope_cosine - 1j * slope_sine
        energy, change = np.abs(amplitude) ** 2, slope * amplitude.conj()
        if abs(change.real.sum()) >= 2 * OfHum.growth * energy.sum():
            return None
        base += float(multiples @ change.imag / (multiples**2 @ energy)) / (2 * math.pi * size)
    return tuple((multiples * base).tolist()) if base > 0 and multiples.max() * base < 0.5 else None


def _lies_on_a_signal(values: Floats, hum: Hum, present: NDArray[np.bool_], share: float) -> bool:
    """Tell whether the rest has structure beside which the hum is small."""
    rest = _interpolated(np.where(present, values - hum.wave(len(values)), 0.0), present)
    sigma = float(estimate_sigmas(rest[:, None], ~present)[0])
    t = np.linspace(-1, 1, len(rest))
    taper = _taper(len(rest))
    level = rest - np.polynomial.polynomial.polyval(t, np.polynomial.polynomial.polyfit(t, rest, 1))
    power = 2 * np.abs(np.fft.rfft(taper * level)) ** 2 / (len(rest) * float(taper @ taper))
    first = math.ceil(hum.frequencies[0] / OfHum.below * len(rest))
    noise = sigma**2 * (1 - 2 * first / len(rest))
    structure = float(power[first:].sum()) - noise
    strength = sum(a**2 for a in hum.amplitudes or ()) / 2
    return structure >= OfHum.structure * noise and strength <= share * structure
