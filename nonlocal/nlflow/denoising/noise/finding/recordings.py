"""Noise of recordings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, root_mean_square
from nlflow.denoising.noise import spectra
from nlflow.denoising.noise.figures import OfDispersion, OfRecordings, OfTransfer
from nlflow.denoising.noise.finding.counts import common_step
from nlflow.denoising.noise.finding.finders import find_impulses
from nlflow.denoising.noise.finding.hum import hum_of_mains
from nlflow.denoising.noise.finding.periodograms import Spectrum, cut_off, look_at_spectrum
from nlflow.denoising.noise.finding.sigma import (
    channel_levels,
    estimate_sigmas,
    sigmas_at_half,
    sigmas_of_sizes,
)
from nlflow.denoising.noise.finding.speckle import find_speckle
from nlflow.denoising.noise.models.base import Mixture, Noise, NoiseEstimate, Reduction
from nlflow.denoising.noise.models.gaussian import GaussianNoise
from nlflow.denoising.noise.models.intensities import Poisson
from nlflow.denoising.noise.models.recordings import interpolated
from nlflow.denoising.noise.models.spikes import Spikes, rough_of, spikes_in
from nlflow.domains.samples import range_of

Array = NDArray[Any]


def examine_recording(samples: Array, missing: NDArray[np.bool_] | None = None) -> NoiseEstimate:
    parts: list[Noise] = []
    reasons: list[str] = []
    rest = Reduction(samples, missing=missing)
    for find in (_counts_of, _impulses_of, _speckle_of, hum_of_mains, _spikes_of):
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
    step = _step_of(samples if missing is None else samples[~missing])
    if not step:
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
    step = common_step(levels)
    exact = np.finfo(values.dtype).eps if values.dtype.kind == "f" else 0.0
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
    found = [look_at_spectrum(channel, missing) for channel in samples.T]
    sigmas = channel_levels(estimate_sigmas(samples, missing))
    told = [one for one in found if one is not None and one.is_told]
    if not told:
        return _of_white(samples, missing, sigmas, found)
    size = min(len(one.power) for one in told)
    each = [
        (sigma, one if one is not None and one.is_told else None)
        for sigma, one in zip(_bounded(sigmas, found), found, strict=True)
    ]
    model = _coloured([np.full(size, sigma**2) if one is None else one.power for sigma, one in each])
    sure, rise = min(one.sure for one in told), max(one.rise for one in told)
    if rise > OfRecordings.rising:
        fast = _coloured([np.full(size, sigma**2) if one is None else one.fast for sigma, one in each])
        reason = (f"slow parts have the law of noise of {model.strength(samples, missing):.3g}, but may be the signal: "
                  f"{fast.strength(samples, missing):.3g}, as fast parts show it, is taken out")  # fmt: skip
        return NoiseEstimate(fast, "low", (reason,))
    reason = f"{sure:.0%} of the power at {size} frequencies is distributed as noise"
    return NoiseEstimate(model, "high" if sure > OfRecordings.certain else "medium", (reason,))


def _coloured(powers: Sequence[Floats]) -> GaussianNoise:
    """Return noise whose channels have these spectra."""
    grid = np.concatenate([spectra.on_grid(power[None, None]) for power in powers])
    return GaussianNoise(np.sqrt(grid.mean(axis=(1, 2))), grid)


def _bounded(sigmas: Floats, found: Sequence[Spectrum | None]) -> Floats:
    """Return strengths of white noise of channels, none beyond what all frequencies leave room for."""
    most = np.array([math.inf if one is None else one.white for one in found])
    return np.where(most < (1 - OfRecordings.agree) * sigmas, most, sigmas)


def _is_held(samples: Array, missing: NDArray[np.bool_] | None) -> bool:
    """Tell whether most samples of each channel are equal to the one before."""
    both = slice(None) if missing is None else ~(missing[1:] | missing[:-1])
    same = (samples[1:] == samples[:-1])[both]
    return bool(len(same) and (same.mean(axis=0) > 0.5).all())


def _beside(cut: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Tell which samples (N,) have one that was cut off among their neighbours, where not most have."""
    from scipy.ndimage import maximum_filter1d

    beside = np.asarray(maximum_filter1d(cut, 5))  # `rough_of` looks at two neighbours on each side
    return beside if 2 * np.count_nonzero(beside) <= len(cut) else np.zeros_like(beside)


def _alike(sigmas: Floats) -> GaussianNoise:
    return GaussianNoise(float(sigmas[0]) if (sigmas == sigmas[0]).all() else sigmas)


def _of_white(
    samples: Array, missing: NDArray[np.bool_] | None, sigmas: Floats, found: Sequence[Spectrum | None]
) -> NoiseEstimate:
    """Return the verdict on white noise of these strengths, where no spectrum is told.

    Windows with least structure told the strengths. Structure only adds to noise: where a frequency of the spectrum, or
    the lowest quantile of what the neighbours of a sample do not predict, tells less, there is less. It is sure where
    three quantiles, all frequencies and half the rate tell the same.
    """
    present = np.ones(len(samples), bool) if missing is None else ~missing
    if np.count_nonzero(present) < OfRecordings.least:
        reason = f"fewer than {OfRecordings.least} samples tell little: noise is taken as white"
        return NoiseEstimate(_alike(sigmas), "medium", (reason,))
    flat = all(one is not None and one.is_white for one in found)
    bounded = _bounded(sigmas, found)
    apart, least = 0.0, bounded.copy()
    for c, channel in enumerate(samples.T):
        scale = float(np.abs(channel[present]).max()) or 1.0
        rough = np.abs(rough_of(interpolated(np.where(present, channel / scale, 0.0), present)))[present]
        rough = rough[~_beside(cut_off(channel, present))[present]]
        told = sigmas_of_sizes(rough) * scale
        apart = max(apart, float(np.abs(np.log(np.maximum(told, 1e-300) / max(least[c], 1e-300))).max()))
        varied = rough[rough > 0]  # what is constant, as a pause that was cut out, tells nothing
        quarter = float(sigmas_of_sizes(varied)[0]) * scale if len(varied) else math.inf
        if quarter < (1 - 2 * OfRecordings.agree) * least[c]:
            least[c] = quarter
    if (least < sigmas).any():
        if (least < bounded).any() or flat:
            reason = ("structure is everywhere: a quarter of the samples, or the spectrum, tells less noise than the "
                      "quietest windows, and that is taken out")  # fmt: skip
        else:
            reason = ("some frequencies have less power than white noise would: the rest is structure, or noise that "
                      "is not white, and as much as they leave room for is taken out")  # fmt: skip
        harmless = float(least.max()) < OfRecordings.harmless * range_of(samples[present])
        return NoiseEstimate(_alike(least), "medium" if harmless or flat else "low", (reason,))
    white, agrees = _alike(sigmas), apart <= OfRecordings.agree
    slower = float((sigmas_at_half(samples, ~present) / np.maximum(sigmas, np.finfo(float).tiny)).max())
    if flat and agrees and slower <= OfRecordings.slower:
        reason = f"the quietest parts and all of the recording tell the same white noise within {apart:.0%}"
        return NoiseEstimate(white, "high", (reason,))
    if slower > OfRecordings.slower or (not flat and slower > 1 + OfRecordings.agree):
        reason = (f"noise is measured at the highest frequencies; at half the rate there is {slower:.2g} times as "
                  "much, which is structure, or noise that is not white")  # fmt: skip
    else:
        reason = "noise is measured in the quietest parts; elsewhere structure is as fast as it"
    sure = flat or (agrees and slower <= 1 + OfRecordings.agree)
    return NoiseEstimate(white, "medium" if sure else "low", (reason,))
