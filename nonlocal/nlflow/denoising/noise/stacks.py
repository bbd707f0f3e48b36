"""Which noise a volume or clip has, once impulses and the like are taken out: counts, or white noise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise.base import Array, NoiseEstimate
from nlflow.denoising.noise.estimation import channel_levels, estimate_sigmas
from nlflow.denoising.noise.figures import OfStacks
from nlflow.denoising.noise.gaussian import GaussianNoise
from nlflow.denoising.noise.photon import transfer_of
from nlflow.denoising.noise.volumes import blocks_of, constant, in_unit
from nlflow.errors import InputError


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
