"""Distances to a reference."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import InputError, not_installed

Array: TypeAlias = NDArray[Any]

_SSIM_WINDOW = 7  # nodes, that of scikit-image


def _peak(clean: Array) -> float:
    return float(np.iinfo(clean.dtype).max) if clean.dtype.kind == "u" else float(np.ptp(clean.astype(np.float64)))


def _mean_squared_error(clean: Array, estimate: Array) -> float:
    if clean.shape != estimate.shape:
        raise InputError(f"estimate: got shape {estimate.shape}, expected {clean.shape} as in clean")
    return float(np.mean((clean.astype(np.float64) - estimate) ** 2))


def _decibels(power: float, error: float) -> float:
    if error == 0:
        return math.inf
    return 10 * math.log10(power / error) if power > 0 else -math.inf


def psnr(clean: Array, estimate: Array) -> float:
    """Return the peak signal-to-noise ratio in decibels, ``10 log10(peak² / mean((clean - estimate)²))``.

    The peak is the largest number of the dtype of `clean` for unsigned integers, otherwise the range of its values.
    Infinite for equal arrays.
    """
    error = _mean_squared_error(clean, estimate)
    return _decibels(_peak(clean) ** 2, error)


def snr(clean: Array, estimate: Array) -> float:
    """Return the signal-to-noise ratio in decibels, ``10 log10(var(clean) / mean((clean - estimate)²))``."""
    error = _mean_squared_error(clean, estimate)
    return _decibels(float(np.var(clean, dtype=np.float64)), error)


def ssim(clean: Array, estimate: Array, channel_axis: int | None = None) -> float | None:
    """Return the structural similarity in windows of 7 × 7 pixels (Wang et al. 2004, doi 10.1109/TIP.2003.819861).

    The range of the data is the peak of `psnr`. None for smaller images, and for a range of 0.
    """
    _mean_squared_error(clean, estimate)
    sides = [size for axis, size in enumerate(clean.shape) if channel_axis is None or axis != channel_axis % clean.ndim]
    peak = _peak(clean)
    if min(sides) < _SSIM_WINDOW or peak == 0:
        return None
    try:
        from skimage.metrics import structural_similarity
    except ImportError as error:
        raise not_installed("the structural similarity", "scikit-image", "desk") from error

    pair = (clean.astype(np.float64), estimate.astype(np.float64))
    value = structural_similarity(*pair, win_size=_SSIM_WINDOW, data_range=peak, channel_axis=channel_axis)
    return float(value)
