"""The verdict on recordings: counts, hum, spikes, and the spectrum of the noise that is left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow._array import Floats, root_mean_square, underflowing
from nlflow.denoising.noise import spectra
from nlflow.denoising.noise.figures import MEDIAN_SQUARE, OfDispersion, OfHum, OfRecordings, OfTransfer
from nlflow.denoising.noise.finding.finders import find_impulses
from nlflow.denoising.noise.finding.sigma import channel_levels, estimate_sigmas, sigmas_at_half
from nlflow.denoising.noise.finding.speckle import find_speckle
from nlflow.denoising.noise.models.base import Mixture, Noise, NoiseEstimate, Reduction
from nlflow.denoising.noise.models.gaussian import GaussianNoise
from nlflow.denoising.noise.models.intensities import Poisson
from nlflow.denoising.noise.models.recordings import Hum, channel_of, fit, interpolated, spread_of, waves
from nlflow.denoising.noise.models.spikes import Spikes, rough_of, spikes_in
from nlflow.domains.samples import range_of
from nlflow.errors import check_number

Array = NDArray[Any]


def examine_recording(samples: Array, missing: NDArray[np.bool_] | None = None) -> NoiseEstimate:
    """Return the verdict on finite samples (N, C) of a recording whose channels vary.

    Counts are looked for first, then impulses, speckle, hum of mains and spikes, and then the spectrum of the rest, of
    each channel by itself. A slow drift stays: nothing tells it from the signal.
    """
    parts: list[Noise] = []
    reasons: list[str] = []
    rest = Reduction(samples, missing=missing)
    for find in (_counts_of, _impulses_of, _speckle_of, _hum_of, _spikes_of):
        if parts and isinstance(parts[0], Poisson) and find is not _spikes_of:
            continue  # the law of counts leaves no room for them
        found, why = find(rest.samples, rest.missing)
        reasons += [why] if why else []
        if found is not None:
            parts.append(found)
            rest = found.reduce(rest.samples, rest.missing)
            if find is _speckle_of:
                break
    if rest.rest is not None or any(isinstance(part, Poisson) for part in parts):
        sure, whole = "high", True
    else:
        verdict = _of_rest(rest.samples, rest.missing)
        sure, whole = verdict.confidence, verdict.whole
        parts.append(verdict.model)
        reasons = [*verdict.reasons, *reasons]
    return NoiseEstimate(parts[0] if len(parts) == 1 else Mixture(parts), sure, tuple(reasons), whole=whole)


def _impulses_of(samples: Array, missing: NDArray[np.bool_] | None) -> tuple[Noise | None, str]:
    found = find_impulses(samples, missing)
    if found is None or found.low == found.high:  # one value alone may be that of peaks, or of a baseline
        return None, ""
    return found, "values at both ends of the range are strewn evenly"


def _speckle_of(samples: Array, missing: NDArray[np.bool_] | None) -> tuple[Noise | None, str]:
    found = find_speckle(samples, missing)
    return found, "" if found is None else "the local spread is proportional to the local mean"


def _hum_of(samples: Array, missing: NDArray[np.bool_] | None) -> tuple[Noise | None, str]:
    """Return the strongest hum of all channels; mains have one frequency, and each channel an amplitude of its own.

    Other lines are not taken for hum where nobody asks.
    """
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


def _spikes_of(samples: Array, missing: NDArray[np.bool_] | None) -> tuple[Noise | None, str]:
    present = np.ones(len(samples), bool) if missing is None else ~missing
    found, why = spikes_in(np.asarray(samples, np.float64), present)
    count = int(np.count_nonzero(found))
    if count == 0:
        return None, why
    why = f"{count} samples in runs of a few stick out as no line does that an instrument resolves"
    return Spikes(count / samples.size), why


def _counts_of(samples: Array, missing: NDArray[np.bool_] | None) -> tuple[Noise | None, str]:
    """Return counts where all channels have the same step and the law of Poisson.

    Of two counts of the same mean the difference d has, given their sum m, a binomial law of variance m, whatever the
    mean is. So the mean of d^2 / m is 1, with an error that follows from the sums alone, for counts of any size. It is
    taken over pairs where the recording is even by the sums of the pairs beside them, which say nothing of d.
    """
    steps = {_step_of(channel if missing is None else channel[~missing]) for channel in samples.T}
    step = steps.pop()
    if steps or not step:
        return None, ""
    ratios = []
    for channel in samples.T:
        counts = np.rint(np.asarray(channel, np.float64) / step)
        ratios.append(_dispersion(counts if missing is None else counts[~missing]))
    if not all(fits for _, _, fits in ratios):
        return None, ""
    ratio, error, _ = max(ratios, key=lambda found: abs(found[0] - 1))
    return Poisson(
        step
    ), f"samples are multiples of {step:.4g}, of variance {ratio:.2f} +- {error:.2f} times their mean"


def _step_of(values: Array) -> float:
    """Return the number of which all samples are multiples, none of them negative; 0 where there is none."""
    if values.min() < 0:
        return 0.0
    levels = np.unique(values).astype(np.float64)
    levels = levels[levels > 0]
    if len(levels) == 0:
        return 0.0
    if (levels == np.rint(levels)).all() and levels[-1] < 2**53:
        return float(np.gcd.reduce(levels.astype(np.int64)))
    step = float(min(levels[0], np.diff(levels, prepend=0.0)[1:].min(initial=np.inf)))
    exact = np.finfo(values.dtype).eps if values.dtype.kind == "f" else 0.0
    multiples = levels / step
    step = float(levels @ np.rint(multiples) / np.square(np.rint(multiples)).sum())  # to the digits of all of them
    near = np.abs(levels / step - np.rint(levels / step)) <= 4 * exact * levels / step + OfDispersion.whole
    return step if near.all() and levels[-1] / step < OfDispersion.most else 0.0


def _dispersion(counts: Floats) -> tuple[float, float, bool]:
    """Return the variance of counts over their mean, its error, and whether it is 1 for few and for many of them."""
    while counts.mean() < 1 and len(counts) > 8 * OfDispersion.least:
        counts = counts[: len(counts) // 2 * 2].reshape(-1, 2).sum(axis=1)  # sums of counts have the law too
    pairs = counts[: len(counts) // 2 * 2].reshape(-1, 2)
    total, off = pairs.sum(axis=1), pairs[:, 0] - pairs[:, 1]
    beside = np.pad(total, 1, mode="edge")
    slope = np.abs(beside[2:] - beside[:-2]) / np.sqrt(np.maximum(beside[2:] + beside[:-2], 1))
    even = total > 1
    if np.count_nonzero(even) >= 2 * OfDispersion.least:
        even &= slope <= np.median(slope[even])
    total, off = total[even], off[even]
    if len(total) < OfDispersion.least:
        return 0.0, math.inf, False
    ratio, spread = off**2 / total, np.sqrt(2 - 2 / total)
    fits = True
    for part in (slice(None), *np.array_split(np.argsort(total, kind="stable"), OfDispersion.parts)):
        error = OfTransfer.significant * root_mean_square(spread[part]) / math.sqrt(len(spread[part]))
        fits &= bool(-error < ratio[part].mean() - 1 < error + OfDispersion.structure)
    return float(ratio.mean()), root_mean_square(spread) / math.sqrt(len(ratio)), fits


def _of_rest(samples: Array, missing: NDArray[np.bool_] | None) -> NoiseEstimate:
    """Return the verdict on Gaussian noise of recordings, white or not, of each channel by itself."""
    if _is_held(samples, missing):
        reason = "most samples are equal to the one before: values are held, or rounded, and nothing counts as noise"
        return NoiseEstimate(GaussianNoise(0.0), "medium", (reason,), whole=False)
    sigmas = channel_levels(estimate_sigmas(samples, missing))
    white = _alike(sigmas)
    found = [spectrum_of_signal(channel, missing) for channel in samples.T]
    told = [one for one in found if one is not None]
    if not told:
        return _of_white(samples, missing, sigmas)
    size = min(len(power) for power, _ in told)
    flat = np.ones(size)
    grid = np.concatenate(
        [
            spectra.on_grid((sigma**2 * flat if one is None else one[0])[None, None])
            for sigma, one in zip(sigmas, found, strict=True)
        ]
    )
    sure = min(share for _, share in told)
    model = GaussianNoise(np.sqrt(grid.mean(axis=(1, 2))), grid)
    strength, level = model.strength(samples, missing), root_mean_square(sigmas)
    if sure <= OfRecordings.certain and strength > OfRecordings.disagree * level:
        reason = (f"slow parts have the law of noise of {strength:.3g}, but may be the signal: white noise of "
                  f"{level:.3g}, as strong as the highest frequencies, is taken out")  # fmt: skip
        return NoiseEstimate(white, "low", (reason,))
    reason = f"{sure:.0%} of the power at {size} frequencies is distributed as noise"
    return NoiseEstimate(model, "high" if sure > OfRecordings.certain else "medium", (reason,))


def _is_held(samples: Array, missing: NDArray[np.bool_] | None) -> bool:
    """Tell whether most samples of each channel are equal to the one before."""
    both = slice(None) if missing is None else ~(missing[1:] | missing[:-1])
    same = (samples[1:] == samples[:-1])[both]
    return bool(len(same) and (same.mean(axis=0) > 0.5).all())


def _alike(sigmas: Floats) -> GaussianNoise:
    return GaussianNoise(float(sigmas[0]) if (sigmas == sigmas[0]).all() else sigmas)


def _of_white(samples: Array, missing: NDArray[np.bool_] | None, sigmas: Floats) -> NoiseEstimate:
    """Return the verdict on white noise of these strengths: what third differences leave must have the same law.

    Windows with least structure told the strengths. If all of the recording tells them too, by three quantiles of what
    the neighbours of a sample do not predict, it is not structure that was measured. Structure only adds to these:
    where the lowest quantile tells less, there is less noise.
    """
    from scipy.special import ndtri

    white, present = _alike(sigmas), np.ones(len(samples), bool) if missing is None else ~missing
    if np.count_nonzero(present) < OfRecordings.least:
        reason = f"fewer than {OfRecordings.least} samples tell little: noise is taken as white"
        return NoiseEstimate(white, "medium", (reason,))
    apart, least = 0.0, sigmas.copy()
    laws = ndtri((1 + np.array(OfRecordings.quantiles)) / 2)
    for c, (channel, sigma) in enumerate(zip(samples.T, sigmas, strict=True)):
        scale = float(np.abs(channel[present]).max()) or 1.0
        rough = np.abs(rough_of(interpolated(np.where(present, channel / scale, 0.0), present)))[present]
        told = np.quantile(rough, OfRecordings.quantiles) / laws * scale
        apart = max(apart, float(np.abs(np.log(np.maximum(told, 1e-300) / max(sigma, 1e-300))).max()))
        varied = rough[rough > 0]  # what is constant, as a pause that was cut out, tells nothing
        if len(varied):
            least[c] = min(sigma, float(np.quantile(varied, OfRecordings.quantiles[0])) / laws[0] * scale)
    if (least < (1 - 2 * OfRecordings.agree) * sigmas).any():
        reason = ("structure is everywhere: a quarter of the samples tell less noise than the quietest windows, and "
                  "that is taken out")  # fmt: skip
        harmless = float(least.max()) < OfRecordings.harmless * range_of(samples[present])
        return NoiseEstimate(_alike(least), "medium" if harmless else "low", (reason,))
    slower = float((sigmas_at_half(samples, ~present) / np.maximum(sigmas, np.finfo(float).tiny)).max())
    if slower > OfRecordings.slower:
        reason = (f"noise is measured at the highest frequencies; at half the rate there is {slower:.2g} times as "
                  "much, which is structure, or noise that is not white")  # fmt: skip
        return NoiseEstimate(white, "medium" if apart <= OfRecordings.agree else "low", (reason,))
    if apart <= OfRecordings.agree:
        reason = f"the quietest parts and all of the recording tell the same white noise within {apart:.0%}"
        return NoiseEstimate(white, "high", (reason,))
    return NoiseEstimate(
        white, "medium", ("noise is measured in the quietest parts; elsewhere structure is as fast as it",)
    )


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
        Samples a second. Only lines on multiples of 50 or 60 Hz are hum then, folded ones too, and they may be strong.
        Where it is not given, lines that are mains at a usual rate (such as 250, 256, 360, 1000) may be strong as well.

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
    - It is there in most windows of two cycles, and not in beats alone.
    - All lines lie on multiples of one frequency, and there is no slower line: a signal of tones keeps them all. Lines
      of mains may have weaker ones beside them, if these are not all of the signal.
    - The rest is a signal: beyond white noise it has structure from an eighth of the lowest frequency on, of four
      times the energy of the hum at least (a hundredth, where the line is mains). A lone tone, a chord, a test signal
      of sines and a yearly cycle on a trend are kept.

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
    middle = np.arange(max(OfRecordings.slow + 1, int(OfRecordings.hump * len(power) / 2)), len(power))
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
