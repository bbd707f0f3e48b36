"""The noise of a picture: what its windows show, how much of that is noise, and the model that follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square
from nlflow.denoising.noise.figures import OfSpectra
from nlflow.denoising.noise.finding.evidence import BANDS, SIZES, Evidence, look, looked_at
from nlflow.denoising.noise.finding.learned import Belief, believe
from nlflow.denoising.noise.models.base import NoiseEstimate
from nlflow.denoising.noise.models.gaussian import GaussianNoise

Array = NDArray[Any]
_ADVICE: Final = (
    "structure is everywhere, so that the strength is uncertain; where the picture is flat, flat=np.s_[:, :] measures "
    "all of it (flat=np.s_[20:84, 300:400] a part), best in the whole photograph"
)
_ON_PAPER: Final = "structure is everywhere but in flat parts, which hold white noise"
_NOT_BORNE_OUT: Final = (
    "no flat part shows noise as Gaussian noise is distributed: what looks like noise may be structure, such as "
    "letters or texture, and stays"
)
#: `Evidence.spread` of what is noise, and of what is none. Of 170 drawings 90 % of those with white noise are below the
#: second, 90 % of the clean ones above it, and none below the first.
_LIKE_NOISE: Final = 1.25
_UNLIKE_NOISE: Final = 1.75
#: `Evidence.tails` of noise, whose standard error is 0.02 to 0.03: pages and stripes not taken for clean are 0.14
#: and more away, a photograph with its own grain 0.07.
_TAILS: Final = 0.06
_PERHAPS: Final = (0.07, 0.25)  # probability that a picture is clean, grey or of colours, that leaves unlikely noise in
_MORE: Final = 1.15  # times the noise of the highest frequencies: more is in lower ones, and noise is not white
_CERTAIN: Final = 0.9
_NARROW: Final = (math.log(1.16), math.log(2.0))  # limits of the strength that are so narrow are sure, and fairly sure
_VARIES: Final = 1.5  # ratio of standard deviations at two intensities from which on noise follows the light
#: Up to which frequency, in units of the highest, each size of blocks is asked, the largest first.
_REACH: Final = {32: 0.2, 16: 0.42, 8: 2.0}
_FILLED: Final = 0.3  # `GaussianNoise.compressed` of colours: 0.2 to 0.4 are best on PolyU and simulated cameras


def noise_of_picture(
    samples: Array, missing: NDArray[np.bool_] | None, white: Callable[[], Any]
) -> NoiseEstimate | None:  # fmt: skip
    """Return the verdict on samples (H, W, C) of at least 32 along both axes; None where windows tell nothing.

    `white` tells the strength of their highest frequencies, one number or one a channel: where noise is white, it is
    that, and is asked for.
    """
    found = look(samples, missing)
    if found is None:
        return None
    belief = believe(found.features, 1 if found.grey else len(found.powers))
    shares = np.broadcast_to(belief.shares, found.powers.shape)
    odds = belief.probabilities
    kind = max(odds, key=lambda name: odds[name])
    unit = found.reference
    strength = unit * belief.limits[1]
    measured: dict[str, Any] = {
        "probabilities": odds, "interval": (unit * belief.limits[0], unit * belief.limits[2]), "strength": strength,
        "intensities": found.intensities, "strengths": np.sqrt(found.strengths), "light": belief.light,
    }  # fmt: skip
    wide = float(np.log(belief.limits[1:] / belief.limits[:-1]).max())
    sure = "high" if wide < _NARROW[0] else "medium" if wide < _NARROW[1] else "low"
    if kind == "clean" and found.spread < _LIKE_NOISE:
        return NoiseEstimate(GaussianNoise(white()), "medium", (_ON_PAPER,), measured)
    doubtful = (kind == "white" and odds["white"] < _CERTAIN) or odds["clean"] > _PERHAPS[len(found.powers) == 3]
    # Blocks that are noise by themselves may differ, as the noise does from place to place.
    by_blocks = kind != "clean" and abs(found.tails - 1) < _TAILS
    unlike = sure == "low" and found.spread > _UNLIKE_NOISE and doubtful and not by_blocks
    if kind == "clean" or unlike:
        reason = _NOT_BORNE_OUT if unlike else "hardly any of what quiet parts show is noise"
        sure = "high" if odds["clean"] > _CERTAIN and not unlike else "medium"
        return NoiseEstimate(GaussianNoise(0.0), sure, (f"{reason} (probability {odds['clean']:.0%})",), measured)
    places, relative = _light(found, belief)
    advice = [] if sure != "low" else [_ADVICE]
    low, high = measured["interval"]
    reasons = [*advice, f"{kind} noise (probability {odds[kind]:.0%}), of {low:.3g} to {high:.3g}"]
    level = white() if kind == "white" else 0.0
    # What compression took from white noise is missing at the highest frequencies, which `white` tells.
    if kind == "white" and (sure == "low" or strength <= _MORE * root_mean_square(np.atleast_1d(level))):
        if relative is None:
            return NoiseEstimate(GaussianNoise(level), sure, tuple(reasons), measured)
        level = math.sqrt(float(np.mean(_variances(found, shares))))
        reasons.append("it follows the intensity")
        model = GaussianNoise(level, intensities=places, strengths=relative)
        return NoiseEstimate(model, sure, tuple(reasons), measured, whole=False)
    return NoiseEstimate(coloured(found, shares, places, relative), sure, tuple(reasons), measured)


def coloured(
    found: Evidence, shares: Array, places: Array | None = None, relative: Array | None = None
) -> GaussianNoise:
    """Return the noise that is so large a share of what was measured."""
    spectrum = np.stack([composed(found, shares, p) for p in range(len(found.powers))])
    levels = np.sqrt(spectrum.mean(axis=(1, 2)))
    colours = len(spectrum) == 3
    filled = _FILLED if colours else 0.0
    return GaussianNoise(levels if colours else float(levels[0]), spectrum, places, relative, colours, filled)


def _variances(found: Evidence, shares: Array) -> Array:
    """Return the variance of the noise in each plane."""
    return np.asarray((found.powers * shares**2 * areas()).sum(axis=1))


@lru_cache(maxsize=1)
def areas() -> Array:
    """Return the share of all frequencies that each band stands for; the lowest stands for those below it too."""
    place = (np.arange(256) + 0.5) / 256
    far = np.hypot(place[:, None], place)
    lows = [low for _, low, _ in BANDS[:-1]] + [0.0]
    shares = np.array([((far >= low) & (far < high)).mean() for low, (_, _, high) in zip(lows, BANDS, strict=True)])
    return np.asarray(shares / shares.sum())


def _light(found: Evidence, belief: Belief) -> tuple[Array, Array] | tuple[None, None]:
    """Return intensities and relative standard deviations where the noise follows the light."""
    places, first = np.unique(found.intensities, return_index=True)
    each = found.strengths[first] ** belief.light
    if len(places) < 2 or each.max() < _VARIES**2 * each.min():
        return None, None
    return places, np.sqrt(each / each.mean())


def composed(found: Evidence, shares: Array, plane: int) -> Array:
    """Return the spectrum of the noise of a plane on the grid of frequencies."""
    from scipy.ndimage import gaussian_filter, map_coordinates

    share = 2 * np.abs(np.fft.fftfreq(OfSpectra.frequencies))
    farthest, far = np.maximum(share[:, None], share), np.hypot(share[:, None], share)
    middles = np.array([math.sqrt(low * min(high, 1.2)) for _, low, high in BANDS])[::-1]
    band = np.log(found.powers[plane])[::-1]
    result = np.full_like(far, np.nan)
    for size in reversed(SIZES):
        seen = looked_at(size).reshape(size, size)
        place = np.arange(size) / size
        radius = np.hypot(place[:, None], place)
        smooth = np.interp(np.log(np.maximum(radius, 1e-3)), np.log(middles), band)
        logs = np.where(seen, np.log(np.maximum(found.tables[SIZES.index(size)][plane], 1e-300)) - smooth, 0.0)
        logs = gaussian_filter(logs, 1.0 if size > 8 else 0.5) + smooth
        where = np.isnan(result) & (farthest <= _REACH[size])
        grid = np.meshgrid(*(np.minimum(share * size, size - 1),) * 2, indexing="ij")
        result[where] = map_coordinates(logs, grid, order=1, mode="nearest")[where]
    told = np.interp(np.log(np.maximum(far, 1e-3)), np.log(middles), np.log(shares[plane])[::-1])
    return np.asarray(np.exp(result + 2 * told))
