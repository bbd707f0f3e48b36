"""The verdict."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.denoising.given import signals_of
from nlflow.denoising.noise.figures import OfImpulses, OfSpeckle, OfSpectra, OfStacks, OfVerdict
from nlflow.denoising.noise.finding.counts import find_counts, find_whole_counts
from nlflow.denoising.noise.finding.enlarged import Enlarged, find_enlarged
from nlflow.denoising.noise.finding.evidence import SIDE, SIZES, are_unlike
from nlflow.denoising.noise.finding.finders import (
    are_drawn,
    find_hot_pixels,
    find_impulses,
    find_rician,
    find_stripes,
)
from nlflow.denoising.noise.finding.flat import checked_part, noise_of_part
from nlflow.denoising.noise.finding.mosaics import find_mosaic
from nlflow.denoising.noise.finding.pictures import noise_of_picture
from nlflow.denoising.noise.finding.places import find_places, is_uneven
from nlflow.denoising.noise.finding.recordings import examine_recording
from nlflow.denoising.noise.finding.sigma import (
    blocks_of,
    chance_of_sizes,
    channel_levels,
    estimate_sigmas,
    in_unit,
    sigmas_at_half,
    sigmas_of_sizes,
)
from nlflow.denoising.noise.finding.speckle import find_speckle
from nlflow.denoising.noise.finding.transfer import magnitudes_of, transfer_of
from nlflow.denoising.noise.models.base import Array, Mixture, Noise, NoiseEstimate, Reduction
from nlflow.denoising.noise.models.gaussian import GaussianNoise, constant
from nlflow.denoising.noise.models.intensities import Evened
from nlflow.denoising.noise.models.stripes import Stripes
from nlflow.domains.samples import range_of, varying
from nlflow.errors import InputError, checked_call


def _find_map(samples: Array, missing: NDArray[np.bool_] | None) -> GaussianNoise | None:
    """Return noise that differs from place to place; None where that follows the light of slices."""
    found = find_places(samples, missing)
    if found is not None and samples.ndim == 4 and isinstance(of_volume(samples, missing).model, Evened):
        return None
    return found


_LOCAL: Final = (find_impulses, find_speckle)  # what looks at neighbourhoods, and need not see all of what is large
#: Finders whose noise leaves none to look for, and why they are believed.
_WHOLE: Final[dict[Any, str]] = {
    find_whole_counts: "samples are whole counts: their variance is in proportion to their mean, as of single events",
    find_counts: "the variance grows with the mean along a line, and the noise is skewed as amplified counts are",
    find_speckle: "flat parts have the law of speckle, or as much of it at all intensities",
    _find_map: "flat parts say that white noise differs from place to place, and not as the intensity does",
    find_rician: "a background without signal has the law of magnitudes of complex noise",
}
_MOSAIC: Final = (
    "neighbouring samples differ all over, as the colours of a mosaic do: noise is measured between samples of one "
    "colour"
)
_DRAWN: Final = "offsets of rows or columns without any other noise are drawn, as those of a grating, and stay"
_MAGNITUDES: Final = "the variance grows with the mean as that of magnitudes of complex samples does"
_NEARLY_COUNTS: Final = "the line of counts meets the variances nearly as well"
_SO_FEW: Final = "so few samples, or rows of them, do not tell whether noise is white"
_FEW: Final = 16  # samples: fewer, of one value, say nothing of noise
_TOO_SMALL: Final = "the picture is too small, or too much of it is missing, to tell how its noise varies"
_DIFFER: Final = "the channels differ in their noise, and each is looked at by itself"
_UNLIKE: Final = "the channels hold pictures that are not alike, and each is looked at by itself"
_STRUCTURE: Final = (
    "structure is everywhere: most samples tell less noise than the quietest blocks do, and the least of it counts"
)
_SLOWER: Final = (
    "noise is measured at the highest frequencies; at half the size there is {:.2g} times as much, which is structure, "
    "or noise that is not white"
)
_UNEVEN: Final = (
    "what the flattest parts tell differs from place to place, and not as the intensity does: there is structure, or "
    "noise of which no law is found"
)
#: Why what has two values stays.
TWO_VALUES: Final = "there are two values alone, as masks, drawings and dithered pictures have; nothing counts as noise"


@checked_call
@underflowing
def estimate_noise(
    image: Any, *, channel_axis: int | None = None, axes: str | None = None, mask: Any = None, flat: Any = None
) -> NoiseEstimate:
    """Find out which noise a picture or recording has, from itself alone.

    Parameters
    ----------
    image : array_like
        1-D signal, 2-D image, or volume or clip of three axes, with a channel axis where there is one.
    channel_axis : int, optional
    axes : str, optional
        What each axis is, as `denoise` takes it: needed for a volume or clip of fewer than 8 samples along an axis.
    mask : array_like of bool, optional
        True where samples are missing.
    flat : pair of slice, optional
        Rows and columns of a part of the image that holds nothing but noise, such as ``np.s_[20:84, 300:400]``: at
        least 32 x 32 samples of one level, apart from light that falls off smoothly. Only this part is measured, and
        its noise counts as that of all intensities. ``measured`` then holds the `level`, the standard deviation
        (`sigma`) and the `correlation` with the next row and column, for each channel.

    Returns
    -------
    NoiseEstimate

    Raises
    ------
    InputError
        As `denoise`; for a `flat` part that is outside the image, too small, clipped or not flat, or has missing
        samples; for `flat` with anything but an image, or together with `mask`.
    """
    samples, missing, told = signals_of(image, channel_axis, axes, mask)
    if flat is not None:
        if mask is not None:
            raise InputError("mask: got one beside flat, of which all samples are measured; leave one of them out")
        return noise_of_part(samples, checked_part(samples, flat), missing)
    found = examine(samples, missing)
    return replace(found, reasons=(*found.reasons, *told))


def examine(samples: Array, missing: NDArray[np.bool_] | None = None) -> NoiseEstimate:
    """See `estimate_noise`."""
    live = varying(samples, missing)
    if 0 < np.count_nonzero(live) < len(live):
        return examine(samples[..., live], missing)
    volume = samples.ndim == 4 and min(samples.shape[:-1]) > 1
    present = samples if missing is None else samples[~missing]
    span = range_of(present) if present.size else 0.0
    if span == 0 or not live.any():
        few = present.size // samples.shape[-1] < _FEW
        reasons = ("the input is constant", *(["so few samples say nothing of noise"] if few else []))
        return NoiseEstimate(GaussianNoise(0.0), "low" if few else "high", reasons)
    if not OfVerdict.least_range < span < 1 / OfVerdict.least_range:
        return NoiseEstimate(GaussianNoise(_white(samples, missing)), "low", ("its squares leave the range of floats",))
    if two_valued(samples, missing):
        return of_two_values()
    if samples.ndim == 2:
        return examine_recording(samples, missing)
    if missing is not None and samples.ndim == 3:
        samples, missing = _mirrored(samples, missing)
    if samples.ndim == 3 and min(samples.shape[:-1]) < OfVerdict.smallest:
        return _of_few(samples, missing)
    enlarged = find_enlarged(samples, missing)
    if enlarged is not None:
        return _of_enlarged(samples, enlarged)
    mosaic = find_mosaic(samples, missing)
    if (
        mosaic is not None and find_stripes(samples, missing) is None
    ):  # rows of offsets differ from their neighbours too
        return NoiseEstimate(mosaic, "medium", (_MOSAIC,))
    parts: list[Noise] = []
    rest = Reduction(samples, missing=missing)
    finders: tuple[Any, ...] = (find_impulses, find_speckle, find_rician, find_hot_pixels)
    if not volume:
        finders = (find_whole_counts, *finders, find_stripes, find_counts)
    for find in (*finders, _find_map):
        seen = rest.samples, rest.missing
        if find in _LOCAL and (volume or find is find_impulses):
            seen = _slabs(*seen, OfVerdict.slab if volume else SIDE)
        found: Noise | None = find(*seen)
        if found is not None:
            parts.append(found)
            rest = found.reduce(rest.samples, rest.missing)
            if find in _WHOLE:
                return NoiseEstimate(_together(parts), "high", (_WHOLE[find],))
    verdict = (of_volume if volume else _gaussian)(rest.samples, rest.missing)
    offsets = parts[0] if len(parts) == 1 and isinstance(parts[0], Stripes) else None
    clean = verdict.is_white and not np.any(verdict.model.white_sigma)
    if offsets is not None and clean and are_drawn(samples, rest.samples, missing, offsets.axis):
        return replace(verdict, reasons=(*verdict.reasons, _DRAWN))
    if not parts:
        return verdict
    return replace(verdict, model=_together([*parts, verdict.model]))


def _of_enlarged(samples: Array, found: Enlarged) -> NoiseEstimate:
    """Return the verdict on an image (H, W, C) of cells: noise within them; or none, as what lies below is enlarged."""
    side = found.side
    if found.noise is not None:
        return NoiseEstimate(found.noise, "high", (f"cells of {side} x {side} samples differ within by white noise",))
    small = examine(found.small(samples))
    if np.any(small.model.white_sigma) or not small.is_white:
        reason = (f"cells of {side} x {side} samples have one value each: denoise the picture as it was before it was "
                  "enlarged, as one sample of each cell has it")  # fmt: skip
        small = NoiseEstimate(GaussianNoise(0.0), "low", (reason,), whole=False)
    return small


def _mirrored(samples: Array, missing: NDArray[np.bool_]) -> tuple[Array, NDArray[np.bool_] | None]:
    """Return an image (H, W, C) whose holes hold what lies on the other side of their borders, and what is left.

    What is mirrored about a sample, along a row or a column, has the strength and the spectrum of the noise, and the
    places of a mosaic. Holes of a block and more stay, and all where enough windows are whole.
    """
    tiles = [np.arange(0, n, SIDE) for n in missing.shape]
    whole = ~np.logical_or.reduceat(np.logical_or.reduceat(missing, tiles[0], axis=0), tiles[1], axis=1)
    if np.count_nonzero(whole) >= OfSpeckle.least_windows:
        return samples, missing
    samples, missing = samples.copy(), missing.copy()
    for axis in (1, 0):
        values, gone = (np.moveaxis(array, axis, 0) for array in (samples, missing))
        known, size, place = ~gone, len(gone), np.arange(len(gone))[:, None]
        before = np.maximum.accumulate(np.where(known, place, -size), axis=0)
        after = np.minimum.accumulate(np.where(known, place, 2 * size)[::-1], axis=0)[::-1]
        for border in (before, after):
            other = 2 * border - place
            rows, columns = np.nonzero(gone & (after - before <= min(SIZES)) & (other >= 0) & (other < size))
            there = known[other[rows, columns], columns]
            rows, columns = rows[there], columns[there]
            values[rows, columns] = values[other[rows, columns], columns]
            gone[rows, columns] = False
    return samples, missing if missing.any() else None


def _slabs(
    samples: Array, missing: NDArray[np.bool_] | None, slab: int = OfVerdict.slab
) -> tuple[Array, NDArray[np.bool_] | None]:
    """Return some slices of what is large, or rows of an image, `slab` of them side by side."""
    most = max(OfVerdict.most * len(samples) // samples.size // slab, 2)
    count = len(samples) // slab
    if samples.size <= OfVerdict.most or count <= most:
        return samples, missing
    first = (np.arange(most) * (count - 1) // (most - 1)) * slab
    index = (first[:, None] + np.arange(slab)).ravel()
    return samples[index], None if missing is None else missing[index]


def _together(parts: list[Noise]) -> Noise:
    return parts[0] if len(parts) == 1 else Mixture(parts)


def _gaussian(samples: Array, missing: NDArray[np.bool_] | None) -> NoiseEstimate:
    """Return the verdict on what finders left of samples (H, W, C)."""
    if samples.shape[-1] not in (1, 3) and np.ndim(_white(samples, missing)):  # colours have planes of their own
        return _of_channels(samples, missing, _DIFFER)
    white = partial(_white, samples, missing)
    found = noise_of_picture(samples, missing, white) if min(samples.shape[:-1]) >= SIDE else None
    if found is None:
        return _of_few(samples, missing)
    noisy = not found.is_white or np.any(found.model.white_sigma)
    if noisy and is_uneven(samples, missing):
        found = replace(found, confidence="low", reasons=(*found.reasons, _UNEVEN))
    unlike = samples.shape[-1] > 1 and are_unlike(samples, missing)
    return _of_channels(samples, missing, _UNLIKE) if unlike else found


def _of_few(samples: Array, missing: NDArray[np.bool_] | None) -> NoiseEstimate:
    """Return the verdict on white noise in an image (H, W, C) of which no windows are seen.

    Structure only adds to noise: where most differences along diagonals tell less than the quietest blocks, there is
    less.
    """
    sigmas, sizes = estimate_sigmas(samples, missing), _diagonals(samples, missing)
    noisy = sigmas > 0
    if len(sizes) and noisy.any():
        rounded = 0.25 if np.array_equal(samples, np.rint(samples)) else 0.0  # half of a step of the sizes of integers
        less = max(OfVerdict.errors * chance_of_sizes(int(np.count_nonzero(noisy)) * len(sizes)), OfVerdict.less)
        if _of_most(((sizes + rounded)[:, noisy] / sigmas[noisy]).ravel()) < 1 - less:
            least = np.array([min(_of_most(own), sigma) for own, sigma in zip(sizes.T, sigmas, strict=True)])
            return NoiseEstimate(GaussianNoise(_one_or_each(channel_levels(least))), "low", (_STRUCTURE,))
    model = GaussianNoise(_one_or_each(channel_levels(sigmas)))
    at_half = sigmas_at_half(samples, missing)
    if len(sizes) < OfVerdict.fewest or not np.isfinite(at_half).all():
        return NoiseEstimate(model, "low", (_SO_FEW,))
    slower = float((at_half[noisy] / sigmas[noisy]).max(initial=0.0))
    if slower > OfVerdict.slower:
        return NoiseEstimate(model, "low", (_SLOWER.format(slower),))
    return NoiseEstimate(model, "medium", (_TOO_SMALL,))


def _diagonals(samples: Array, missing: NDArray[np.bool_] | None) -> NDArray[np.float64]:
    """Return the sizes (M, C) of differences along diagonals, in units in which they have the strength of the noise."""
    a, b, c, d = (samples[i : n - 1 + i, j : m - 1 + j].astype(np.float64) for n, m in [samples.shape[:2]]
                  for i in (0, 1) for j in (0, 1))  # fmt: skip
    sizes = np.abs(a - b - c + d) / 2
    if missing is None:
        return sizes.reshape(-1, samples.shape[-1])
    gone = missing[1:] | missing[:-1]
    return np.asarray(sizes[~(gone[:, 1:] | gone[:, :-1])])


def _of_most(sizes: NDArray[np.float64]) -> float:
    """Return the strength of Gaussian noise that the sizes (M,) tell which are at most three times as large."""
    sigma = math.inf
    for _ in range(OfVerdict.rounds):
        before, sigma = sigma, float(sigmas_of_sizes(sizes[sizes <= 3 * sigma]).min())
        if sigma == before:
            break
    return sigma


def _of_channels(samples: Array, missing: NDArray[np.bool_] | None, why: str) -> NoiseEstimate:
    """Return the verdict on an image whose channels differ: that of each by itself, put together."""
    each = [_gaussian(samples[..., c : c + 1], missing) for c in range(samples.shape[-1])]
    models: list[Any] = [one.model for one in each]
    sigma = np.array([one.strength(samples[..., c : c + 1], missing) for c, one in enumerate(models)])
    if all(one.is_white for one in models):
        sigma = _one_or_each(channel_levels(sigma))
    shape = None
    if any(one.spectrum is not None for one in models):
        flat = np.ones((1, OfSpectra.frequencies, OfSpectra.frequencies))
        shape = np.concatenate([flat if one.spectrum is None else one.spectrum for one in models])
    sure = min((one.confidence for one in each), key=["low", "medium", "high"].index)
    first = next(one for one in each if one.confidence == sure)
    reasons = (*first.reasons, why)
    return NoiseEstimate(GaussianNoise(sigma, shape), sure, reasons, whole=shape is None and first.whole)


def _white(samples: Array, missing: NDArray[np.bool_] | None) -> Any:
    """Return the strength of white noise: one number where channels are alike, otherwise one a channel."""
    return _one_or_each(channel_levels(estimate_sigmas(samples, missing)))


def _one_or_each(levels: NDArray[np.float64]) -> Any:
    return float(levels[0]) if (levels == levels[0]).all() else levels


def two_valued(samples: Array, missing: NDArray[np.bool_] | None) -> bool:
    present = samples.reshape(-1, samples.shape[-1]) if missing is None else samples[~missing]
    some = present[:: max(len(present) // OfImpulses.looked, 1) | 1]
    for seen in (some, present):  # a look at few is mostly enough
        low, high = seen.min(axis=0), seen.max(axis=0)
        if not ((seen == low) | (seen == high)).all():
            return False
    return True


def of_two_values() -> NoiseEstimate:
    return NoiseEstimate(GaussianNoise(0.0), "low", (TWO_VALUES,), whole=False)


def of_volume(samples: Array, missing: NDArray[np.bool_] | None) -> NoiseEstimate:
    """Return the verdict on samples (D, H, W, C); correlated noise is met as white noise."""
    sigmas = estimate_sigmas(samples, missing)
    strongest = float(sigmas.max())
    levels = channel_levels(sigmas)
    white = GaussianNoise(_one_or_each(levels))
    measured: dict[str, Any] = {"white": float(np.mean(sigmas))}
    if strongest == 0:
        return NoiseEstimate(white, "medium", ("no noise is seen",), measured)
    falling = _falling(samples[..., int(np.argmax(sigmas))], missing)
    measured["falling"] = falling.tolist()
    if falling.min() < OfStacks.falling:
        axes = ", ".join(str(axis) for axis in np.flatnonzero(falling < OfStacks.falling))
        ratio = float(np.mean(sigmas_at_half(samples, missing))) / float(np.mean(sigmas))
        model = white.scaled(float(np.clip(ratio, 1.0, OfStacks.most)))
        reason = (f"noise of neighbouring samples is alike along axis {axes} (compression, interpolation or a filter), "
                  "and only white noise is known for volumes")  # fmt: skip
        return NoiseEstimate(model, "low", (reason,), measured)
    if samples.shape[-1] == 1:
        try:
            found = transfer_of(samples, missing)
        except InputError as error:
            why = str(error)
        else:
            figures = {"gain": found.gain, "gain_error": found.gain_error, "intercept": found.intercept}
            if found.variances.max() > OfStacks.varying * found.variances.min():
                least = float((samples if missing is None else samples[~missing]).min())
                magnitudes = magnitudes_of(found) if least >= 0 else None
                if magnitudes is not None:
                    law, by_far = magnitudes
                    reasons = (_MAGNITUDES,) if by_far else (_MAGNITUDES, _NEARLY_COUNTS)
                    return NoiseEstimate(law, "medium" if by_far else "low", reasons, measured | figures)
                reason = f"the variance grows with the intensity along a line: {found}"
                sure = "medium" if found.model.sigma or found.model.offset else "high"  # one pair of many
                return NoiseEstimate(found.model, sure, (reason,), measured | figures)
            why = "the variance hardly changes over the intensities"
        measured["transfer"] = why
    ratio = float(np.mean(sigmas_at_half(samples, missing))) / float(np.mean(sigmas))
    if ratio < OfStacks.structure:
        return NoiseEstimate(white, "high", ("noise is as strong at low frequencies as at high ones",), measured)
    reason, sure = "noise is measured at high frequencies; structure is below them", "medium"
    if ratio > OfStacks.doubtful:
        reason, sure = f"{reason}, or noise that was compressed or smoothed, and is stronger", "low"
    return NoiseEstimate(white, sure, (reason,), measured)


def _falling(volume: Array, missing: NDArray[np.bool_] | None) -> NDArray[np.float64]:
    """Return for each axis the power of flat blocks at its highest frequency over that at the second of four.

    At high frequencies of the other axes, where structure is weak; 1 for white noise.
    """
    absent = np.zeros(volume.shape, bool) if missing is None else missing
    unit, span = in_unit(volume, absent)
    if span == 0 or min(volume.shape) < 4:
        return np.ones(volume.ndim)
    hidden = absent | constant(unit[..., None])
    windows = blocks_of(unit, hidden, every=True)
    if len(windows.high) == 0:
        return np.ones(volume.ndim)
    # Chosen by frequencies that are not compared, so that white noise falls nowhere.
    low = np.add.outer(np.add.outer(range(4), range(4)), range(4)).ravel()
    structure = np.square(windows.high[:, (low > 0) & (low < OfStacks.low)], dtype=np.float64).sum(axis=1)
    order = np.argsort(structure)[: max(int(OfStacks.flat * len(structure)), windows.first)]
    power = np.square(windows.high[order], dtype=np.float64).mean(axis=0).reshape(4, 4, 4)
    ratios = [power.swapaxes(0, axis)[:, 2:, 2:].sum(axis=(1, 2)) for axis in range(3)]
    return np.array([found[3] / found[1] if found[1] > 0 else 1.0 for found in ratios])
