"""Noise of pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square
from nlflow.denoising.noise.figures import OfBelief, OfSpectra
from nlflow.denoising.noise.finding.evidence import BANDS, SIZES, Evidence, look, looked_at
from nlflow.denoising.noise.finding.learned import Belief, believe
from nlflow.denoising.noise.models.base import NoiseEstimate
from nlflow.denoising.noise.models.gaussian import GaussianNoise

Array = NDArray[Any]
_EVERYWHERE: Final = "structure is everywhere, so that the strength is uncertain, which a flat part would tell"
_HARM: Final = 2.0  # what it costs to take structure for noise, where noise that stays costs 1
_MORE: Final = 1.15  # times the noise of the highest frequencies: more is in lower ones, and noise is not white
_VARIES: Final = 1.5  # ratio of standard deviations at two intensities from which on noise follows the light
_ERRORS: Final = 3.0  # up to which the law of quiet blocks may be that of noise
_UNLIKE: Final = (10.0, 100.0)  # times as often as noisy pictures clean ones are beyond, and far beyond (Bayes factors)
_STAYS: Final = "hardly any of what quiet parts show need be noise, and all of it stays (clean with probability {:.0%})"
_LAW: Final = (
    "what quiet parts show has the spectrum of noise (probability {:.0%}), but not its law, and all of it stays"
)
#: Up to which frequency, in units of the highest, each size of blocks is asked, the largest first.
_REACH: Final = {32: 0.2, 16: 0.42, 8: 2.0}
_FILLED: Final = 0.3  # `GaussianNoise.compressed` of colours: 0.2 to 0.4 are best on PolyU and simulated cameras


def noise_of_picture(
    samples: Array, missing: NDArray[np.bool_] | None, white: Callable[[], Any]
) -> NoiseEstimate | None:
    """Return the verdict on samples (H, W, C) of at least 32 along both axes; None where windows tell nothing."""
    found = look(samples, missing)
    if found is None:
        return None
    belief = believe(found.features, 1 if found.grey else len(found.powers))
    unit = found.reference
    low, strength, high = unit * belief.limits
    strong = strength > OfBelief.strong * found.span
    # Structure that leaks into quiet parts makes the tails of strong noise heavy; that they are light, it does not.
    odds, sure = revised(belief.probabilities, min(found.tails, 0.0) if strong else found.tails), belief.confidence
    goes_on = Continued.of(found, belief) if strong and len(belief.shares) == 1 else Continued(belief.shares)
    if goes_on.falls:
        odds |= {"white": 0.0, "correlated": odds["white"] + odds["correlated"]}
    shares = np.broadcast_to(goes_on.shares, found.powers.shape)
    measured: dict[str, Any] = {
        "probabilities": odds, "interval": (low, high), "strength": strength, "intensities": found.intensities,
        "strengths": np.sqrt(found.strengths), "light": belief.light,
    }  # fmt: skip
    if not acts(odds["clean"]):
        by_spectrum = belief.probabilities["clean"]
        sure = "medium" if acts(1 - by_spectrum) else "low"
        why = _STAYS.format(odds["clean"]) if not acts(by_spectrum) else _LAW.format(1 - by_spectrum)
        return NoiseEstimate(GaussianNoise(0.0), sure, (why,), measured)
    kind = max(("white", "correlated"), key=lambda name: odds[name])
    places, relative = _light(found, belief)
    reasons = [_EVERYWHERE] if sure == "low" else []
    reasons += [f"{kind} noise with probability {odds[kind]:.0%}, its sigma between {low:.3g} and {high:.3g}"]
    level = white() if kind == "white" else 0.0
    # What compression took from white noise is missing at the highest frequencies, which `white` tells.
    if kind == "white" and (sure == "low" or strength <= _MORE * root_mean_square(np.atleast_1d(level))):
        if relative is None or np.ptp(np.log(relative)) < math.log(_VARIES):
            return NoiseEstimate(GaussianNoise(level), sure, tuple(reasons), measured)
        level = math.sqrt(float(np.mean(_variances(found, shares))))
        reasons.append("it follows the intensity")
        model = GaussianNoise(level, intensities=places, strengths=relative)
        return NoiseEstimate(model, sure, tuple(reasons), measured, whole=False)
    return NoiseEstimate(coloured(found, shares, places, relative, goes_on.slope), sure, tuple(reasons), measured)


@dataclass(frozen=True)
class Continued:
    """The spectrum of strong noise in grey, continued to low frequencies with the slope that it has above them."""

    shares: Array  # (1, B) of the measured standard deviation, that is noise
    falls: bool = False  # towards the highest frequencies
    slope: float = 0.0  # power of the frequency by which it grows below the lowest band

    @classmethod
    def of(cls, found: Evidence, belief: Belief) -> Continued:
        measured = 0.5 * np.log(found.powers[0])
        noise = measured + np.log(belief.shares[0])
        apart = -np.diff(np.log(_middles()))
        steps = (np.diff(noise) / apart)[: OfBelief.told]
        filtered = [k for k in OfBelief.filtered if measured[k] - measured[k - 2] > math.log(OfBelief.falling)]
        unknown = belief.limits[-1] > OfBelief.wide * belief.limits[0]
        last = OfBelief.told
        if filtered and unknown and belief.probabilities["white"] < OfBelief.white:
            last = max(filtered)
            noise[last - 2 : last + 1] = measured[last - 2 : last + 1]
        elif steps.max() > OfBelief.steepest:
            return cls(belief.shares)
        before, slope = (np.diff(noise) / apart)[last - 2 : last]
        changes = min(max(slope, 0.0) / before, 1.0) if before > 0 else 0.0
        for band in range(last + 1, len(BANDS)):
            slope *= changes
            noise[band] = max(noise[band], min(measured[band], noise[band - 1] + slope * apart[band - 1]))
        return cls(np.exp(noise - measured)[None], bool(steps.min() > OfBelief.sloped), float(slope * changes**2))


@lru_cache(maxsize=1)
def _middles() -> Array:
    """Return a frequency in the middle of each band."""
    return np.array([math.sqrt(low * min(high, 1.2)) for _, low, high in BANDS])


def acts(clean: float) -> bool:
    return _HARM * clean < 1 - clean


def revised(odds: dict[str, float], tails: float) -> dict[str, float]:
    """Return the probabilities of kinds, given how many standard errors quiet blocks are off the law of noise."""
    factor = float(np.clip((tails / _ERRORS) ** 2, *_UNLIKE)) if abs(tails) > _ERRORS else 1.0
    weighed = odds | {"clean": factor * odds["clean"]}
    return {kind: one / sum(weighed.values()) for kind, one in weighed.items()}


def coloured(
    found: Evidence, shares: Array, places: Array | None = None, relative: Array | None = None, slope: float = 0.0
) -> GaussianNoise:
    """Return the noise that is so large a share of what was measured, and grows as this power of frequencies below."""
    spectrum = np.stack([composed(found, shares, p, slope) for p in range(len(found.powers))])
    levels = np.sqrt(spectrum.mean(axis=(1, 2)))
    colours = len(spectrum) == 3
    filled = _FILLED if colours else 0.0
    return GaussianNoise(levels if colours else float(levels[0]), spectrum, places, relative, colours, filled)


def _variances(found: Evidence, shares: Array) -> Array:
    """Return the variance of the noise in each plane."""
    return np.asarray((found.powers * shares**2 * areas()).sum(axis=1))


@lru_cache(maxsize=1)
def areas() -> Array:
    """Return the share of all frequencies that each band stands for."""
    place = (np.arange(256) + 0.5) / 256
    far = np.hypot(place[:, None], place)
    lows = [low for _, low, _ in BANDS[:-1]] + [0.0]
    return np.array([((far >= low) & (far < high)).mean() for low, (_, _, high) in zip(lows, BANDS, strict=True)])


def _light(found: Evidence, belief: Belief) -> tuple[Array, Array] | tuple[None, None]:
    """Return intensities and relative standard deviations where the noise follows the light."""
    places, first = np.unique(found.intensities, return_index=True)
    each = found.strengths[first] ** belief.light
    if len(places) < 2:
        return None, None
    return places, np.sqrt(each / each.mean())


def composed(found: Evidence, shares: Array, plane: int, slope: float = 0.0) -> Array:
    from scipy.ndimage import gaussian_filter, map_coordinates

    share = 2 * np.abs(np.fft.fftfreq(OfSpectra.frequencies))
    farthest, far = np.maximum(share[:, None], share), np.hypot(share[:, None], share)
    middles = _middles()[::-1]
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
    below = np.log(middles[0] / np.clip(far, 1 / OfSpectra.frequencies, middles[0]))
    return np.asarray(np.exp(result + 2 * told + 2 * slope * below))
