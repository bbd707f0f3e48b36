"""Whether a picture bears out the noise that was found in it; where it does not, less is taken for noise.

Letters, masks, screens and drawings fill a picture as evenly as noise does, and seen from afar they look like it. Two
things tell them apart. Nothing is quieter than the noise: a picture whose quietest parts hold far less than noise of
that strength leaves anywhere has not that noise, nor has a mosaic of colours, which holds far less in every second row
and column. And noise in the quietest parts that were not clipped is Gaussian, whereas ink on paper is skewed, and what
has two values is the opposite of a bell.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow._array import root_mean_square
from nlflow.denoising.noise.base import Array, NoiseEstimate
from nlflow.denoising.noise.figures import OfBlocks, OfEvidence
from nlflow.denoising.noise.gaussian import GaussianNoise, smoothed
from nlflow.denoising.noise.rules import planes_of
from nlflow.denoising.noise.windows import at_ends, limits_of
from nlflow.domains.samples import range_of

_UNLIKE: Final = (
    "the quietest parts are not distributed as Gaussian noise: what was found may be structure, or few counts (noise "
    "'poisson')"
)
#: Why what has two values stays.
TWO_VALUES: Final = "there are two values alone, as masks, drawings and dithered pictures have; nothing counts as noise"


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
