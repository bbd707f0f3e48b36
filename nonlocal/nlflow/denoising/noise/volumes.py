"""Small blocks of volumes and clips, put through the cosine transform: how strong their noise is."""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import OfVolumes, OfWindows
from nlflow.denoising.noise.windows import Windows, at_ends, from_windows, limits_of
from nlflow.domains.samples import range_of


def sigma_of_volume(volume: NDArray[np.floating], absent: NDArray[np.bool_]) -> float:
    """Return the standard deviation of white noise in one channel (D, H, W) of finite samples.

    The rule of `estimate_sigma` on blocks of 4×4×4: sorted by their energy at low frequencies, measured at high ones.
    Parts that are constant to the last bit, such as the surroundings of a brain that was cut out, are left out.
    """
    unit, span = in_unit(volume, absent)
    if span == 0:
        return 0.0
    empty = absent | constant(unit)
    for hidden in (empty, absent):  # of a drawing nothing else may be left
        for side in OfVolumes.sides:
            windows = blocks_of(unit, hidden, side)
            if len(windows.structure) >= windows.first / 2:
                return from_windows(windows, limits_of(*at_ends(unit[~hidden])), OfVolumes.first) * span
    return from_windows(windows, limits_of(*at_ends(unit[~absent])), OfVolumes.first) * span


def in_unit(volume: NDArray[np.floating], absent: NDArray[np.bool_]) -> tuple[NDArray[np.float64], float]:
    """Return samples from 0 to 1, 0 where they are absent, and their range; a range of 0 where there is none."""
    present = volume[~absent]
    span = range_of(present) if present.size else 0.0
    if span == 0 or math.isinf(span):
        return np.zeros(volume.shape), 0.0
    low = float(present.min())
    return np.where(absent, 0.0, (np.where(absent, low, volume).astype(np.float64) - low) / span), span


def constant(unit: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return where samples belong to a neighbourhood that is constant to the last bit."""
    from scipy.ndimage import maximum_filter, minimum_filter

    if not (np.diff(unit, axis=-1) == 0).any():
        return np.zeros(unit.shape, bool)
    same = maximum_filter(unit, OfVolumes.constant) == minimum_filter(unit, OfVolumes.constant)
    return np.asarray(maximum_filter(same, OfVolumes.constant))


def blocks_of(
    unit: NDArray[np.float64], absent: NDArray[np.bool_], side: int = OfVolumes.sides[0], *, every: bool = False
) -> Windows:
    """Put overlapping blocks of side³ (fewer along an axis that has no more) through the orthonormal cosine transform.

    Blocks that touch an absent sample are left out. At most some 130 000, on a lattice. `every`: all coefficients are
    given in place of those at high frequencies.
    """
    from scipy.fft import dct

    shape = tuple(min(side, n) for n in unit.shape)
    step = max(1, math.ceil((unit.size / OfVolumes.most) ** (1 / 3)))
    bases = [dct(np.eye(n), norm="ortho", axis=0) for n in shape]
    frequency = np.sum(np.meshgrid(*(np.arange(n) / (n - 1) / 3 for n in shape), indexing="ij"), axis=0).ravel()
    is_high = frequency >= OfVolumes.high - 1e-9
    is_low = (~is_high & (frequency > 0)).astype(float)
    whole = sliding_window_view(unit, shape)[::step, ::step, ::step]
    touched = np.asarray(sliding_window_view(absent, shape)[::step, ::step, ::step].any(axis=(-3, -2, -1)))
    samples = math.prod(shape)
    # One basis function a row; a block as one row of samples takes one product of matrices.
    basis = np.einsum("ai,bj,ck->abcijk", *bases).reshape(samples, samples).T
    planes = max(1, OfVolumes.at_a_time // math.prod(whole.shape[1:3]))
    structure, high, mean = [], [], []
    for first in range(0, len(whole), planes):
        near = slice(first, first + planes)
        values = whole[near][~touched[near]].reshape(-1, samples) @ basis
        structure.append(np.square(values) @ is_low)
        high.append((values if every else values[:, is_high]).astype(np.float32))
        mean.append(values[:, 0] / math.sqrt(samples))
    return Windows(np.concatenate(structure), np.concatenate(high), np.concatenate(mean), OfWindows.repeats * samples)
