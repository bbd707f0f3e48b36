"""Hum of recordings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.denoising.noise.figures import OfHum, OfRecordings
from nlflow.denoising.noise.finding.sigma import estimate_sigmas
from nlflow.denoising.noise.models.base import Noise
from nlflow.denoising.noise.models.recordings import Hum, channel_of, fit, interpolated, spread_of, waves
from nlflow.errors import check_number

Array = NDArray[Any]


def hum_of_mains(samples: Array, missing: NDArray[np.bool_] | None) -> tuple[Noise | None, str]:
    """Return the strongest hum of mains among all channels."""
    each = [find_hum(channel, missing) for channel in samples.T]
    found = [
        hum for hum in each
        if hum and any(_is_mains(one, None) and all(_are_multiples(hum.frequencies, one, len(samples)))
                       for one in hum.frequencies)
    ]  # fmt: skip
    if not found:
        return None, ""
    hum = max(found, key=lambda hum: max(hum.amplitudes or (0.0,)))
    why = f"{len(hum.frequencies)} line(s) have the same amplitude and phase all the time, as mains have"
    return hum if samples.shape[1] == 1 else Hum(hum.frequencies), why


def _are_multiples(lines: Sequence[float], base: float, size: int) -> list[bool]:
    """Tell which lines are multiples of a frequency, seen where they are folded to."""
    orders = np.arange(1, OfHum.most_harmonics + 1)
    folded = np.abs(orders * base - np.rint(orders * base))
    return [bool(np.abs(folded - f).min() * size <= OfHum.harmonic) for f in lines]


@underflowing
def find_hum(samples: Any, missing: NDArray[np.bool_] | None = None, *, rate: float | None = None) -> Hum | None:
    """Find mains hum and its harmonics in a recording; None where there is none, or where it may be the signal.

    A weak steady tone beside a richer signal may be taken for hum: give `rate` where such tones matter. A tone with
    nothing beside it but noise, slow waves or other tones is None, even at 50 Hz: it is all the signal there is. Where
    you know that it is hum, take ``Hum([50 / rate])``.

    Parameters
    ----------
    samples : array_like of shape (N,)
        One recording.
    missing : bool array of shape (N,), optional
        True where a sample is missing; its value does not matter.
    rate : float, optional
        Samples a second. With it only lines at multiples of 50 or 60 Hz count, aliased ones too. Such lines, without it
        those that would be mains at 250, 256, 360, 1000 and other usual rates, may have up to 100 times the energy that
        the signal has above an eighth of their frequency; others a quarter of it.

    Returns
    -------
    Hum or None
        With frequencies, amplitudes and phases; None too for fewer than 256 samples, and if more than a quarter is
        missing.

    Raises
    ------
    InputError
        For anything but one recording of finite samples, and a rate that is not > 0.

    Notes
    -----
    A line counts as hum if it is narrow and has one amplitude and phase in all parts of the recording by an F test
    (Thomson 1982, doi 10.1109/PROC.1982.12433, with parts in place of tapers). A signal with other lines is searched
    for mains alone. O(N log N).
    """
    values, present = channel_of(samples, missing)
    if rate is not None:
        rate = check_number("rate", rate, minimum=0, strict=True, hint="samples a second")
    if len(values) < OfRecordings.least or np.count_nonzero(present) < 3 * len(values) / 4:
        return None
    values = interpolated(values, present)
    scale = float(np.abs(values).max())
    if scale == 0:
        return None
    values = values / scale
    values = values - np.median(values)
    steady = [f for f in _candidates(values) if _is_steady(values, f)]
    series = _series(steady, len(values), rate)
    others: list[float] = []
    if series is None and steady and _is_mains(steady[0], rate):
        # Beside other lines, such as those of even beats, mains count if they stand out most.
        on = _are_multiples(steady, steady[0], len(values))
        series = _series([f for f, is_one in zip(steady, on, strict=True) if is_one], len(values), rate)
        others = [f for f, is_one in zip(steady, on, strict=True) if not is_one]
    lines = None if series is None else _refined(values, *series, present)
    if series is None or lines is None:
        return None
    hum = Hum(lines).fitted(values, ~present)
    if not _lasts(values, hum):
        return None
    share = OfHum.share_mains if _is_mains(series[0], rate) else OfHum.share
    tones = Hum(tuple(others)).fitted(values, ~present) if others else None
    if tones is not None and max(tones.amplitudes or ()) > max(hum.amplitudes or ()):
        return None
    if len(others) > OfHum.tones:
        tones = None
    if not _lies_on_a_signal(values, hum, tones, present, share):
        return None
    return hum.scaled(scale)


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
    level = math.log(len(ratio) / OfRecordings.false) / math.log(2)
    peaks = (ratio > level) & (power == maximum_filter1d(power, 2 * OfHum.near - 1))
    index = np.flatnonzero(peaks)
    index = index[(index >= OfHum.cycles * OfHum.parts / 4) & (index < len(ratio) - OfHum.near)]
    index = index[np.argsort(-ratio[index])][: OfHum.most_lines]
    return [_from_phases(white, k / size) for k in index.tolist()]


def _parts(white: Floats, frequency: float, count: int) -> NDArray[np.complex128]:
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
    count = OfHum.parts if _is_fast(frequency, len(values)) else OfHum.parts // 2
    z = _parts(white, frequency, count)
    mean = z.mean()
    spread = float(np.sum(np.abs(z - mean) ** 2))
    ratio = count * abs(mean) ** 2 / max(spread, 1e-300)
    # F with 2 and 2 (n - 1) degrees of freedom is (n - 1) times the ratio; its tail is a power.
    chance = -(count - 1) * math.log1p(ratio)
    return chance < math.log(OfRecordings.false / (len(values) / 2))


def _is_fast(frequency: float, size: int) -> bool:
    """Tell whether a line has so many cycles in a part that it can be hum."""
    return frequency * (size // OfHum.parts) >= OfHum.cycles


def _series(lines: list[float], size: int, rate: float | None) -> tuple[float, Floats] | None:
    """Return the frequency of which all lines are multiples, and which ones; None where there is none.

    Multiples of mains beyond half of the sampling rate are seen where they are folded to.
    """
    if not lines or not all(_is_fast(f, size) for f in lines):
        return None
    found = np.sort(lines)
    for number in range(1, OfHum.missing_harmonics + 1):
        base = float(found[0]) / number
        mains = _is_mains(base, rate)
        orders = np.arange(1.0, OfHum.most_harmonics + 1 if mains else min(OfHum.most_harmonics, 0.5 / base) + 1)
        for _ in range(2):
            turns = np.rint(orders * base) if mains else np.zeros(len(orders))
            miss = np.abs(np.abs(orders * base - turns) - found[:, None])
            nearest = np.argmin(miss, axis=1)
            multiples, turn = orders[nearest], turns[nearest]
            seen = turn + np.where(multiples * base < turn, -found, found)
            base = float(multiples @ seen / (multiples @ multiples))
        fits = miss.min(axis=1).max() * size <= OfHum.harmonic
        if fits and len(set(multiples)) == len(multiples) and (mains or rate is None):
            return base, multiples
    return None


def _is_mains(base: float, rate: float | None) -> bool:
    """Tell whether a frequency is that of mains, at the sampling rate or, where it is not known, at a usual one."""
    rates, error = ((rate,), OfHum.mains_error) if rate else (OfHum.rates, OfHum.rates_error)
    return any(abs(base * r / mains - 1) <= error for mains in OfHum.mains for r in rates)


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
    lines = np.sort(np.abs(multiples * base - np.rint(multiples * base)))
    return tuple(lines.tolist()) if base > 0 and lines[0] > 0 and lines[-1] < 0.5 else None


def _lasts(values: Floats, hum: Hum) -> bool:
    """Tell whether the strongest line is there in most windows; a harmonic of beats is there in the beats alone."""
    amplitude, frequency, phase = max(zip(hum.amplitudes or (), hum.frequencies, hum.phases or (), strict=True))
    side = max(int(OfHum.quiet / frequency), 8)
    count = len(values) // side
    windows = values[: count * side].reshape(count, side)
    t = np.arange(side)
    taper = _taper(side)
    line = np.polynomial.polynomial.polyfit(t, windows.T, 1)
    flat = windows - (line[0][:, None] + line[1][:, None] * t)
    turn = np.exp(-1j * (2 * math.pi * frequency * np.arange(count * side) + phase)).reshape(count, side)
    strength = 2 * ((flat * turn).real @ taper) / taper.sum()
    return float(np.median(strength)) >= amplitude / 2


def _lies_on_a_signal(values: Floats, hum: Hum, tones: Hum | None, present: NDArray[np.bool_], share: float) -> bool:
    """Tell whether the rest has structure beside which the hum is small, beyond other steady tones."""
    known = hum.wave(len(values)) + (0.0 if tones is None else tones.wave(len(values)))
    rest = interpolated(np.where(present, values - known, 0.0), present)
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
