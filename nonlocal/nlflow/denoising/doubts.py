"""What a user should know of a result, or of the noise that was given: nearly unchanged, too smooth, unsure."""

from __future__ import annotations

import math
import warnings
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square
from nlflow.denoising.noise import NoiseEstimate
from nlflow.denoising.noise.evidence import TWO_VALUES
from nlflow.domains.samples import range_of
from nlflow.errors import NlflowWarning

_NOTHING: Final = 1 / 2000  # of the range: what was removed is then less than an eighth of a grey level
_CLEAN: Final = 1e-6  # of the range: there is no noise at all
_TORN: Final = 2.5  # ratio of what was removed near edges to that in flat parts, in excess of the noise's own
_ROUNDING: Final = 1 / math.sqrt(12)  # the standard deviation of a number that is anywhere in an interval of length 1
_TAIL: Final = 0.05  # of the samples, at each end, that do not count for the range
_FEW: Final = 16  # different values, of which a drawing is made
_SOME: Final = 100_000  # samples that are looked at for them
_PARTS: Final = 5  # flat parts, and edges, are this share of the samples


def check_units(dtype: np.dtype[Any], sigma: Any, stacklevel: int) -> None:
    """Warn of a sigma that is less than what rounding to integers adds: it may be meant for values from 0 to 1."""
    if dtype.kind not in "iu" or sigma is None:
        return
    level, top = float(np.max(sigma)), np.iinfo(dtype).max
    if 0 < level < _ROUNDING:
        text = (
            f"sigma: got {level:.3g} for integers, less than their rounding adds ({_ROUNDING:.3g}), so that next to "
            f"nothing is removed; it is in the units of the input: {level:.3g} of the range of {dtype} is "
            f"{level * top:.4g}"
        )
        warnings.warn(text, NlflowWarning, stacklevel=stacklevel + 1)


def doubts(samples: NDArray[Any], u: NDArray[Any], found: NoiseEstimate) -> list[str]:
    """Return warnings about the result u of samples, both of shape (..., C), with noise that was found out."""
    span, removed = _bulk_of(samples), root_mean_square(samples - u)
    if span == 0:
        return []
    if found.reasons == (TWO_VALUES,):
        return [f"the result is the input: {TWO_VALUES}; if they hold noise, give sigma or noise"]
    if removed < _NOTHING * span and found.confidence != "high" and not _drawn(samples):
        kept = "the result is the input" if removed < _CLEAN * span else "the result is nearly the input"
        why = f"; {found.reasons[0]}" if found.confidence == "low" and found.reasons else ""
        return [
            f"{kept}: {found}{why}; if you see noise, measure it in a flat part, by rows and columns "
            "(estimate_noise(image, flat=np.s_[20:84, 300:400]).model), or give a model from another "
            "picture of the same camera (estimate_noise(other).model), or its standard deviation (sigma)"
        ]
    if removed < _CLEAN * span:
        return []
    if found.confidence == "low":
        return [f"the noise was hard to find out: {found}; {found.reasons[0]}; look at the result, and give sigma or "
                "noise where it is wrong"]  # fmt: skip
    if found.confidence == "medium" and _torn(samples, u):
        return [f"what was removed follows the edges of the picture: {found}; a strength below 1 keeps more of it"]
    return []


def _bulk_of(samples: NDArray[Any]) -> float:
    """Return the range of most samples, which a star or a peak does not widen; of all where most are alike."""
    some = samples.reshape(-1)[:: max(samples.size // _SOME, 1)]
    low, high = np.quantile(some, [_TAIL, 1 - _TAIL])
    return float(high) - float(low) or range_of(samples)


def _drawn(samples: NDArray[Any]) -> bool:
    """Tell whether samples take so few values that nobody would look for noise."""
    some = samples.ravel()[:: max(samples.size // _SOME, 1)]
    return len(np.unique(some)) <= _FEW


def _torn(samples: NDArray[Any], u: NDArray[Any]) -> bool:
    """Tell whether much more was removed near edges than in flat parts of the same intensity."""
    if u.ndim != 3 or min(u.shape[:2]) < 32:
        return False
    lightness = u.mean(axis=-1, dtype=np.float64)
    removed = np.square((samples - u).mean(axis=-1, dtype=np.float64))
    steep = np.hypot(*np.gradient(lightness))
    ratios = []
    for part in np.array_split(np.argsort(lightness, axis=None, kind="stable"), _PARTS):
        own = part[np.argsort(steep.ravel()[part], kind="stable")]
        few = max(len(own) // _PARTS, 1)
        flat, edges = removed.ravel()[own[:few]].mean(), removed.ravel()[own[-few:]].mean()
        ratios.append(float(np.sqrt(edges / max(flat, 1e-30))))
    return float(np.median(ratios)) > _TORN
