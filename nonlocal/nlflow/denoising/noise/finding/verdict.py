"""The verdict: which noise a picture, recording, volume or clip has, and whether the picture bears it out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow._array import root_mean_square, underflowing
from nlflow.denoising.given import signals_of
from nlflow.denoising.noise.figures import OfBlocks, OfEvidence, OfRules, OfSpectra, OfStacks, OfVerdict
from nlflow.denoising.noise.finding.blocks import BlockNoise, Rules, block_noise, in_units, looks_white, planes_of
from nlflow.denoising.noise.finding.counts import find_counts, find_whole_counts
from nlflow.denoising.noise.finding.finders import (
    find_hot_pixels,
    find_impulses,
    find_rician,
    find_stripes,
)
from nlflow.denoising.noise.finding.flat import FlatParts, checked_part, flat_parts, noise_of_part
from nlflow.denoising.noise.finding.mosaics import find_mosaic
from nlflow.denoising.noise.finding.places import find_places
from nlflow.denoising.noise.finding.recordings import examine_recording
from nlflow.denoising.noise.finding.sigma import (
    at_ends,
    blocks_of,
    channel_levels,
    constant,
    estimate_sigmas,
    in_unit,
    limits_of,
)
from nlflow.denoising.noise.finding.speckle import find_speckle
from nlflow.denoising.noise.finding.transfer import transfer_of
from nlflow.denoising.noise.models.base import Array, Mixture, Noise, NoiseEstimate, Reduction
from nlflow.denoising.noise.models.gaussian import GaussianNoise, smoothed
from nlflow.denoising.noise.spectra import down
from nlflow.domains.samples import range_of, varying
from nlflow.errors import InputError, checked_call

_LOCAL: Final = (find_impulses, find_speckle)  # what looks at neighbourhoods, and need not see all of a large volume
#: Finders whose noise leaves none to look for, and why they are believed.
_WHOLE: Final[dict[Any, str]] = {
    find_whole_counts: "samples are whole counts: their variance is in proportion to their mean, as of single events",
    find_counts: "the variance grows with the mean along a line, and the noise is skewed as amplified counts are",
    find_speckle: "flat parts have the law of speckle, or as much of it at all intensities",
    find_places: "flat parts say that white noise differs from place to place, and not as the intensity does",
    find_rician: "a background without signal has the law of magnitudes of complex noise",
}
_MOSAIC: Final = (
    "neighbouring samples differ all over, as the colours of a mosaic do: noise is measured between samples of one "
    "colour"
)
_TOO_SMALL: Final = (
    "the picture is too small to tell noise that is not white from structure: only the highest frequencies were "
    "counted as noise; where it is flat, flat=np.s_[:, :] measures all of it (flat=np.s_[20:84, 300:400] a part), "
    "best in the whole photograph"
)
_UNLIKE: Final = (
    "the quietest parts are not distributed as Gaussian noise: what was found may be structure, or few counts (noise "
    "'poisson')"
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
        Rows and columns of a part of the image that holds nothing but noise, such as ``np.s_[20:84, 300:400]``, or
        ``np.s_[:, :]`` where all of it does: at least 32 x 32 samples of one level, apart from light that falls off
        like a plane. The noise is measured there alone: its strength in each channel, and its correlation. ``measured``
        holds the `level`, the standard deviation (`sigma`) and the `correlation` with the next row and column, for each
        channel. One level cannot tell how noise follows the intensity: it counts as the same everywhere. A texture that
        repeats cannot be told from noise.

    Returns
    -------
    NoiseEstimate

    Raises
    ------
    InputError
        As `denoise`. For `flat` where the part is outside the image, too small, clipped or not flat, for anything but
        an image, and together with `mask`.
    """
    samples, missing, told = signals_of(image, channel_axis, axes, mask)
    if flat is not None:
        if mask is not None:
            raise InputError("mask: got one beside flat, of which all samples are measured; leave one of them out")
        return noise_of_part(samples, checked_part(samples, flat))
    found = examine(samples, missing)
    return replace(found, reasons=(*found.reasons, *told))


def examine(samples: Array, missing: NDArray[np.bool_] | None = None) -> NoiseEstimate:
    """Return the verdict on finite samples (..., C), of which some are missing.

    Impulses are looked for first, then speckle, then stripes in what is left, and then the spectrum of the rest. In
    volumes and clips Rician noise and hot pixels take the place of stripes, and counts that of the spectrum. Channels
    that are constant tell nothing of the others and are left out; what has two values stays.
    """
    live = varying(samples, missing)
    if 0 < np.count_nonzero(live) < len(live):
        return examine(samples[..., live], missing)
    volume = samples.ndim == 4 and min(samples.shape[:-1]) > 1
    present = samples if missing is None else samples[~missing]
    span = range_of(present) if present.size else 0.0
    if not OfVerdict.least_range < span < 1 / OfVerdict.least_range:
        reason = "the picture is constant" if span == 0 else "its squares leave the range of floats"
        return NoiseEstimate(GaussianNoise(_white(samples, missing)), "low" if span else "high", (reason,))
    if not live.any():
        return NoiseEstimate(GaussianNoise(0.0), "high", ("the picture is constant",))
    if two_valued(samples, missing):
        return of_two_values()
    if samples.ndim == 2:
        return examine_recording(samples, missing)
    if samples.ndim == 3 and min(samples.shape[:-1]) < 2 * OfBlocks.side:
        return _of_small(samples, missing, GaussianNoise(_white(samples, missing)))
    mosaic = find_mosaic(samples, missing)
    if mosaic is not None:
        return NoiseEstimate(mosaic, "medium", (_MOSAIC,))
    parts: list[Noise] = []
    rest = Reduction(samples, missing=missing)
    finders: tuple[Any, ...] = (find_impulses, find_speckle, find_rician, find_hot_pixels)
    if not volume:
        finders = (find_whole_counts, *finders, find_stripes, find_counts)
    for find in (*finders, find_places):
        seen = _slabs(rest.samples, rest.missing) if volume and find in _LOCAL else (rest.samples, rest.missing)
        found: Noise | None = find(*seen)
        if found is not None:
            parts.append(found)
            rest = found.reduce(rest.samples, rest.missing)
            if find in _WHOLE:
                return NoiseEstimate(_together(parts), "high", (_WHOLE[find],))
    verdict = (of_volume if volume else _gaussian)(rest.samples, rest.missing)
    if not parts:
        return verdict
    return replace(verdict, model=_together([*parts, verdict.model]))


def _slabs(samples: Array, missing: NDArray[np.bool_] | None) -> tuple[Array, NDArray[np.bool_] | None]:
    most = max(OfVerdict.most * len(samples) // samples.size // OfVerdict.slab, 2)
    count = len(samples) // OfVerdict.slab
    if samples.size <= OfVerdict.most or count <= most:
        return samples, missing
    first = (np.arange(most) * (count - 1) // (most - 1)) * OfVerdict.slab
    index = (first[:, None] + np.arange(OfVerdict.slab)).ravel()
    return samples[index], None if missing is None else missing[index]


def _together(parts: list[Noise]) -> Noise:
    return parts[0] if len(parts) == 1 else Mixture(parts)


def _gaussian(samples: Array, missing: NDArray[np.bool_] | None) -> NoiseEstimate:
    white = GaussianNoise(_white(samples, missing))
    if min(samples.shape[:-1]) < 2 * OfVerdict.least_side:
        return _of_small(samples, missing, white)
    if np.max(white.sigma) == 0 and missing is not None:
        return NoiseEstimate(white, "medium", ("samples are missing, and the others show no noise",))
    if missing is not None and np.count_nonzero(missing) > OfVerdict.few * missing.size:
        return NoiseEstimate(white, "medium", ("too many samples are missing for more than one white strength",))
    if np.ndim(white.sigma) and samples.shape[-1] != 3:  # colours have planes of their own
        return _of_channels(samples, missing)
    axes = planes_of(samples.shape[-1])
    span = range_of(samples if missing is None else samples[~missing])
    if span == 0:
        return NoiseEstimate(white, "high", ("the picture is constant",))
    # In parts of the range, so that no square leaves the range of floats.
    scaled = samples.astype(np.float64) / span
    planes, intensity = scaled @ axes.T, scaled.mean(axis=-1)
    if missing is not None:  # coarser pictures look through holes
        holes = missing[..., None]
        planes, intensity = _filled(planes, holes), _filled(intensity[..., None], holes)[..., 0]
    found = _at_sizes(planes, intensity, missing)
    if len(found) < 2 or found[0][0] is None or found[1][0] is None:
        return NoiseEstimate(white, "low", ("hardly any part of the picture varies",))
    rules = Rules(white.scaled(1 / span), found, samples.shape[-1] == 3, _light(intensity))
    verdict = _of_flat_parts(scaled, planes, intensity, missing, span) if rules.doubtful else None
    return verdict or borne_out(in_units(rules.estimate(), span), white, samples, missing)


def _light(intensity: Array) -> float:
    """Return the range of intensities in parts of that of the samples; of colours that are equally light not 0."""
    return max(range_of(intensity), OfVerdict.least_light)


def _of_channels(samples: Array, missing: NDArray[np.bool_] | None) -> NoiseEstimate:
    """Return the verdict on an image whose channels differ in their noise: that of each by itself, put together."""
    each = [_gaussian(samples[..., c : c + 1], missing) for c in range(samples.shape[-1])]
    models: list[Any] = [one.model for one in each]
    sigma = np.array([one.strength(samples[..., c : c + 1], missing) for c, one in enumerate(models)])
    shape = None
    if any(one.spectrum is not None for one in models):
        flat = np.ones((1, OfSpectra.frequencies, OfSpectra.frequencies))
        shape = np.concatenate([flat if one.spectrum is None else one.spectrum for one in models])
    sure = min((one.confidence for one in each), key=["low", "medium", "high"].index)
    first = next(one for one in each if one.confidence == sure)
    reasons = (*first.reasons, "the channels differ in their noise, and each is looked at by itself")
    return NoiseEstimate(GaussianNoise(sigma, shape), sure, reasons, whole=shape is None and first.whole)


def _of_small(samples: Array, missing: NDArray[np.bool_] | None, white: GaussianNoise) -> NoiseEstimate:
    """Return the verdict on a picture that is too small for the rules: white noise, sure where its blocks show that."""
    if looks_white(samples, missing):
        return NoiseEstimate(white, "medium", ("the picture is too small to tell how its noise varies",))
    return NoiseEstimate(white, "low", (_TOO_SMALL,))


def _of_flat_parts(
    scaled: Array, planes: Array, intensity: Array, missing: NDArray[np.bool_] | None, span: float
) -> NoiseEstimate | None:
    """Return the verdict on the flat parts of samples (H, W, C); None where they do not tell noise from structure.

    In the units of the samples, which were divided by `span`.

    What is white there is noise, unless it is as weak as the grain of clean photographs: no structure is as strong at
    the highest frequencies. What compression cut off looks like smooth texture. So most of the flat parts must agree
    on it, and grey pictures, of which no colours tell, keep the first verdict.
    """
    half = down(planes[..., :1])[..., 0]
    absent = None if missing is None else _halved(missing)
    parts = flat_parts(half, _light(intensity) / 255 / 4, absent)
    if parts is None:
        return None
    found = _at_sizes(planes, intensity, missing, parts)
    if len(found) < 2 or found[0][0] is None or found[1][0] is None:
        return None
    outside = parts.at(0, intensity.shape)
    unseen = outside if missing is None else outside | missing
    white = GaussianNoise(_white(scaled, unseen))
    rules = Rules(white, found, scaled.shape[-1] == 3, _light(intensity))
    white_there = rules.kind == "white" and rules.seen
    cut_there = rules.colour and rules.kind in ("cut", "trusted") and parts.agreed > OfVerdict.majority
    if not (white_there or cut_there):
        return None
    # The other parts may be without noise, and bear nothing out.
    verdict = borne_out(in_units(rules.estimate(), span), white.scaled(span), span * scaled, unseen)
    share = 1 - float(outside.mean())
    reasons = (*verdict.reasons, f"measured in flat parts, {share:.0%} of the picture; elsewhere is structure")
    return replace(verdict, reasons=reasons, whole=False)


def _filled(values: Array, holes: NDArray[np.bool_]) -> Array:
    """Return values (H, W, C) with a weighted mean of the neighbours where there are holes."""
    from scipy.ndimage import gaussian_filter

    weights = gaussian_filter((~holes).astype(np.float64), (1, 1, 0)) + 1e-6
    smooth = gaussian_filter(np.where(holes, 0.0, values), (1, 1, 0)) / weights
    return np.where(holes, smooth, values)


def _white(samples: Array, missing: NDArray[np.bool_] | None) -> Any:
    """Return the strength of white noise: one number where channels are alike, otherwise one a channel."""
    levels = channel_levels(estimate_sigmas(samples, missing))
    return float(levels[0]) if (levels == levels[0]).all() else levels


def _halved(missing: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which samples of a picture of half the size have a missing one in their place."""
    rows, columns = missing.shape
    even = np.pad(missing, ((0, rows % 2), (0, columns % 2)))
    return np.asarray(even.reshape((rows + 1) // 2, 2, -1, 2).any(axis=(1, 3)))


def _at_sizes(
    planes: Array, intensity: Array, missing: NDArray[np.bool_] | None, parts: FlatParts | None = None
) -> list[list[BlockNoise | None]]:
    """Return the noise in the blocks of each plane, for the picture, and for ever coarser ones; in flat parts alone."""
    found: list[list[BlockNoise | None]] = []
    floor = _light(intensity) / 255
    for level in range(OfRules.levels):
        if min(intensity.shape) < OfVerdict.least_side:
            break
        absent = missing
        if parts is not None:
            outside = parts.at(level, intensity.shape)
            absent = outside if missing is None else outside | missing
        share = OfBlocks.share if parts is None else OfBlocks.of_flat
        own = [block_noise(planes[..., c], intensity, floor, absent, share) for c in range(planes.shape[-1])]
        if own[0] is None and parts is not None:
            break
        found.append(own)
        if level < OfRules.levels - 1:
            missing = None if missing is None else np.zeros(tuple((n + 1) // 2 for n in missing.shape), bool)
            planes, intensity = down(planes), down(intensity[..., None])[..., 0]
    return found


def two_valued(samples: Array, missing: NDArray[np.bool_] | None) -> bool:
    """Tell whether no channel of samples (..., C) has more than two values, so that none of them can be noise."""
    present = samples.reshape(-1, samples.shape[-1]) if missing is None else samples[~missing]
    low, high = present.min(axis=0), present.max(axis=0)
    return bool(((present == low) | (present == high)).all())


def of_two_values() -> NoiseEstimate:
    """Return the verdict on what has two values: it stays."""
    return NoiseEstimate(GaussianNoise(0.0), "low", (TWO_VALUES,), whole=False)


def borne_out(
    found: NoiseEstimate, white: GaussianNoise, samples: Array, missing: NDArray[np.bool_] | None
) -> NoiseEstimate:
    """Return a verdict on samples (H, W, C), or a more careful one where the picture does not bear it out.

    Where the noise that was found is more than twice the white noise of the highest frequencies, and the quietest parts
    do not show it, the smaller of the two counts. O(N).
    """
    model = found.model
    if not isinstance(model, GaussianNoise):
        return found
    strength, level = model.strength(samples, missing), root_mean_square(np.atleast_1d(white.sigma))
    if strength <= OfEvidence.nothing * range_of(samples if missing is None else samples[~missing]):
        return found
    clipped = _clipped(samples, missing)
    quiet, moments = _quiet_parts(_luminance(samples), missing, clipped)
    gaussian = (
        abs(moments[0]) < OfEvidence.skewed + _shot_skewness(model, quiet)
        and OfEvidence.bell[0] < moments[1] < OfEvidence.bell[1]
    )
    if strength <= OfEvidence.disagree * level:
        return found if gaussian else replace(found, confidence="low", reasons=(_UNLIKE, *found.reasons))
    clean = smoothed(samples)[..., None] * np.ones(samples.shape[-1])
    noise = model.sample(clean, rng=0, channel_axis=-1) - clean
    least = min(quiet, _quiet_of_phases(_luminance(samples), missing, clipped))
    if gaussian and OfEvidence.disagree * least >= _quiet_parts(_luminance(noise), missing, clipped)[0]:
        return found
    return smaller(found, strength, white, level)


def _shot_skewness(model: GaussianNoise, quiet: float) -> float:
    """Return the skewness of counts in parts of a standard deviation: the gain over it; 0 where counts are too few.

    Of some six counts and more, which are nearly Gaussian.
    """
    if model.intensities is None or not quiet > 0:
        return 0.0
    places = np.asarray(model.intensities[[0, -1]], np.float64)
    variances = np.square(model.relative(places) * root_mean_square(np.atleast_1d(model.sigma)))
    skewness = float((variances[1] - variances[0]) / (places[1] - places[0])) / quiet
    return skewness if 0 < skewness < OfEvidence.skewed else 0.0


def smaller(found: NoiseEstimate, strength: float, white: GaussianNoise, level: float) -> NoiseEstimate:
    """Return white noise in place of a stronger one that nothing confirms."""
    reason = (
        f"neighbouring samples are related as under noise of {strength:.3g}, but no flat part shows that much: it may "
        f"be structure, such as letters or a mosaic, and white noise of {level:.3g} alone is taken out"
    )
    return replace(found, model=white, confidence="low", reasons=(reason,), whole=True)


def _luminance(samples: Array) -> Array:
    return np.asarray((samples.astype(np.float64) @ planes_of(samples.shape[-1]).T)[..., 0])


def _clipped(samples: Array, missing: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Return where a channel of samples (H, W, C) is at an end of the range that was clipped to: noise is skewed."""
    found = np.zeros(samples.shape[:-1], bool)
    for plane in np.moveaxis(samples, -1, 0).astype(np.float64):
        present = plane if missing is None else plane[~missing]
        unit = (plane - present.min()) / (range_of(present) or 1.0)
        low, high = limits_of(*at_ends(unit if missing is None else unit[~missing]))
        found |= (unit <= low) | (unit >= high)
    return found


def _quiet_of_phases(plane: Array, missing: NDArray[np.bool_] | None, clipped: NDArray[np.bool_]) -> float:
    """Return the least of what the quietest blocks hold in every second row and column: noise is as strong there.

    A mosaic of colours is not: its steps are in every block of the whole, and hardly in those of one colour.
    """
    phases = [np.s_[i::2, j::2] for i in (0, 1) for j in (0, 1)]
    return min(_quiet_parts(plane[p], None if missing is None else missing[p], clipped[p])[0] for p in phases)


def _quiet_parts(
    plane: Array, missing: NDArray[np.bool_] | None, clipped: NDArray[np.bool_]
) -> tuple[float, tuple[float, float]]:
    """Return the standard deviation within the quietest blocks of a plane (H, W), and their skewness and kurtosis."""
    step = max(1, int(np.ceil(np.sqrt(plane.size / OfEvidence.most))))

    def blocks(values: Array) -> Array:
        return sliding_window_view(values, (OfBlocks.side, OfBlocks.side))[::step, ::step].reshape(
            -1, OfBlocks.side * OfBlocks.side
        )

    own = blocks(plane)
    whole: NDArray[np.bool_] = np.asarray(~blocks(clipped).any(axis=1))
    if missing is not None:
        there = ~blocks(missing).any(axis=1)
        own, whole = own[there], whole[there]
    if np.count_nonzero(whole) > OfEvidence.least * len(whole):
        own = own[whole]
    own = own - own.mean(axis=1, keepdims=True)
    variance = np.square(own).mean(axis=1)
    there = variance > OfEvidence.nothing * variance.max(initial=0.0)  # what was clipped, or filled in, has no noise
    own, variance = own[there], variance[there]
    if not len(own):
        return 0.0, (0.0, 3.0)
    order = np.argsort(variance, kind="stable")
    first, last = (int(share * len(order)) for share in OfEvidence.quietest)
    chosen = order[first : max(last, first + 1)]
    relative = own[chosen] / np.sqrt(variance[chosen].mean())
    return float(np.sqrt(np.quantile(variance, OfEvidence.flat))), (
        float((relative**3).mean()),
        float((relative**4).mean()),
    )


def of_volume(samples: Array, missing: NDArray[np.bool_] | None) -> NoiseEstimate:
    """Return the verdict on samples (D, H, W, C) of a volume or clip.

    Counts where the variance grows with the mean along a line, otherwise white noise. Noise whose neighbouring samples
    are alike is met as white noise of about its strength at low frequencies, and the verdict says so.
    """
    sigmas = estimate_sigmas(samples, missing)
    strongest = float(sigmas.max())
    levels = channel_levels(sigmas)
    white = GaussianNoise(float(levels[0]) if (levels == levels[0]).all() else levels)
    measured: dict[str, Any] = {"white": float(np.mean(sigmas))}
    if strongest == 0:
        return NoiseEstimate(white, "medium", ("no noise is seen",), measured)
    falling = _falling(samples[..., int(np.argmax(sigmas))], missing)
    measured["falling"] = falling.tolist()
    if falling.min() < OfStacks.falling:
        axes = ", ".join(str(axis) for axis in np.flatnonzero(falling < OfStacks.falling))
        ratio = _coarser(samples, missing) / float(np.mean(sigmas))
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
                reason = f"the variance grows with the intensity along a line: {found}"
                return NoiseEstimate(found.model, "high", (reason,), measured | figures)
            why = "the variance hardly changes over the intensities"
        measured["transfer"] = why
    ratio = _coarser(samples, missing) / float(np.mean(sigmas))
    if ratio < OfStacks.structure:
        return NoiseEstimate(white, "high", ("noise is as strong at low frequencies as at high ones",), measured)
    return NoiseEstimate(white, "medium", ("noise is measured at high frequencies; structure is below them",), measured)


def _falling(volume: Array, missing: NDArray[np.bool_] | None) -> NDArray[np.float64]:
    """Return for each axis the power of flat blocks at its highest frequency over that at the second of four.

    At high frequencies of the other axes, where structure is weak; 1 for white noise.
    """
    absent = np.zeros(volume.shape, bool) if missing is None else missing
    unit, span = in_unit(volume, absent)
    if span == 0 or min(volume.shape) < 4:
        return np.ones(volume.ndim)
    hidden = absent | constant(unit)
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


def _coarser(samples: Array, missing: NDArray[np.bool_] | None) -> float:
    """Return the strength that white noise would have in the volume for what a volume of half the size shows."""
    whole = tuple(slice(0, n - n % 2) for n in samples.shape[:-1])
    parts = [(n - n % 2) // 2 for n in samples.shape[:-1]]
    if min(parts) < 2:
        return math.inf
    shape = tuple(length for n in parts for length in (n, 2))
    halves = samples[whole].astype(np.float64).reshape(*shape, -1).mean(axis=(1, 3, 5))
    absent = None if missing is None else np.asarray(missing[whole].reshape(shape).any(axis=(1, 3, 5)))
    return math.sqrt(8) * float(np.mean(estimate_sigmas(halves, absent)))
