"""How strong the noise of magnitudes is: from a background without signal, or as the fixed point of a stabilizer."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise.base import Array
from nlflow.denoising.noise.chi import mean_magnitude, stabilizer
from nlflow.denoising.noise.estimation import estimate_sigmas
from nlflow.denoising.noise.figures import OfMagnitudes


def strength_of(samples: Array, absent: NDArray[np.bool_], coils: float) -> float | None:
    """Return the strength of the noise in magnitudes (..., C) >= 0, None where no noise is seen.

    In a background without signal mean and spread are in a known ratio. Without one, the samples that are well above
    the noise have noise of that strength once they are stabilized with it. The two are apart, as a background would
    stay consistent with ever smaller strengths: its law hardly changes with a little signal.
    """
    absent = absent | _cut_out(samples, absent)
    values = np.where(absent[..., None], samples.dtype.type(0), samples)
    first = float(np.mean(estimate_sigmas(values, absent)))
    if not OfMagnitudes.smallest < first < OfMagnitudes.largest:
        return None
    near = _local_mean(values, absent)
    found = _background(values, absent, near, first, coils)
    if found is not None:
        return found[0]
    mean, spread = _of_nothing(coils)
    above = absent | (near < OfMagnitudes.above * (mean / spread) * first)
    return _fixed_point(
        values, above if np.count_nonzero(~above) > OfMagnitudes.few * above.size else absent, first, coils
    )


def rayleigh_of(samples: Array, absent: NDArray[np.bool_]) -> float | None:
    """Return the strength of Rician noise where magnitudes (..., C) >= 0 have a background of Rayleigh's law."""
    absent = absent | _cut_out(samples, absent)
    values = np.where(absent[..., None], samples.dtype.type(0), samples)
    first = float(np.mean(estimate_sigmas(values, absent)))
    if not OfMagnitudes.smallest < first < OfMagnitudes.largest:
        return None
    found = _background(values, absent, _local_mean(values, absent), first, 1.0)
    if found is None:
        return None
    sigma, inside = found
    background = np.sort(values[inside].ravel().astype(np.float64) / sigma)
    law = -np.expm1(-np.square(background) / 2)
    # Both sides of a step: values that are whole numbers of something come in high steps.
    steps = [np.searchsorted(background, background, side) / len(background) for side in ("left", "right")]
    apart = float(np.maximum(np.abs(law - steps[0]), np.abs(law - steps[1])).max())
    return sigma if apart < OfMagnitudes.law + 2 / math.sqrt(len(background)) else None


def _of_nothing(coils: float) -> tuple[float, float]:
    """Return mean and standard deviation of pure noise of strength 1."""
    mean = float(mean_magnitude(0.0, coils))
    return mean, math.sqrt(2 * coils - mean**2)


def _background(
    values: Array, absent: NDArray[np.bool_], near: NDArray[np.float64], first: float, coils: float
) -> tuple[float, NDArray[np.bool_]] | None:
    """Return the strength where there is a background of nothing but noise, and where that is."""
    mean, spread = _of_nothing(coils)
    sigma = first / spread
    for _ in range(OfMagnitudes.rounds):
        inside = ~absent & (np.abs(near / (mean * sigma) - 1) < OfMagnitudes.alike)
        if np.count_nonzero(inside) < OfMagnitudes.few * inside.size:
            return None
        before, sigma = sigma, float(np.median(near[inside])) / mean
        if abs(sigma / before - 1) < OfMagnitudes.agreed:
            break
    noise = float(np.mean(estimate_sigmas(values, ~inside)))
    return (sigma, inside) if abs(noise / (spread * sigma) - 1) < OfMagnitudes.same_ratio else None


def _fixed_point(values: Array, absent: NDArray[np.bool_], first: float, coils: float) -> float:
    """Return the strength that stabilized samples have again, by secants between logarithms."""
    law = stabilizer(coils)

    def excess(log_sigma: float) -> float:
        # In units of the strength that is tried, in which the noise should have strength 1.
        return math.log(
            max(float(np.mean(estimate_sigmas(law(values / math.exp(log_sigma)), absent))), OfMagnitudes.smallest)
        )

    before, here = math.log(first), math.log(1.05 * first)
    last, rest = excess(before), excess(here)
    for _ in range(OfMagnitudes.rounds):
        slope = (rest - last) / (here - before) if here != before else -1.0
        slope = min(max(slope, -2.0), -0.2)
        here, before, last = here - min(max(rest / slope, -0.3), 0.3), here, rest
        if abs(here - before) < OfMagnitudes.agreed:
            break
        rest = excess(here)
    return math.exp(here)


def _local_mean(values: Array, absent: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the mean over the neighbourhood and the channels, of what is not absent; infinity where all is."""
    from scipy.ndimage import uniform_filter

    size = [OfMagnitudes.local[max(sum(n > 1 for n in absent.shape), 1)] if n > 1 else 1 for n in absent.shape]
    total = uniform_filter(np.where(absent, 0.0, values.mean(axis=-1, dtype=np.float64)), size)
    share = uniform_filter((~absent).astype(np.float64), size)
    return np.asarray(np.where(share > 0.5 / math.prod(size), total / np.maximum(share, 1e-12), np.inf))


def _cut_out(samples: Array, absent: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return where areas are 0, as surroundings that somebody took away: noise has no such areas."""
    from scipy.ndimage import maximum_filter

    size = [3 if n > 1 else 1 for n in absent.shape]
    nothing = maximum_filter(np.where(absent, 0, samples.max(axis=-1)), size) == 0
    return np.asarray(maximum_filter(nothing, size))
