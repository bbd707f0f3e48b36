"""How strong the noise is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._samples import as_signal, range_of

__all__ = ["estimate_sigma", "wavelet_sigma"]


def estimate_sigma(image: Any, *, channel_axis: int | None = None) -> float:
    """Estimate the standard deviation of white Gaussian noise, in the units of the input.

    Median of the finest wavelet coefficients (Donoho and Johnstone 1994, doi 10.1093/biomet/81.3.425), by
    `skimage.restoration.estimate_sigma`; the mean over channels. Biased up where the noise is low (texture counts as
    noise) and down on clipped data.

    Parameters
    ----------
    image : array_like
        1-D signal or 2-D image, with a channel axis where there is one.
    channel_axis : int, optional

    Raises
    ------
    InputError
        As `denoise`.
    """
    signal, _ = as_signal(image, channel_axis)
    return wavelet_sigma(signal)


def wavelet_sigma(signal: NDArray[Any]) -> float:
    """Return the estimate for samples (..., C); 0 where there are too few, or where their range is 0 or overflows."""
    from skimage.restoration import estimate_sigma as median_of_wavelets

    estimator: Any = median_of_wavelets  # not annotated there

    # The wavelet needs two samples along each axis; an axis of one sample carries no detail.
    squeezed = signal.reshape([n for n in signal.shape[:-1] if n > 1] + [signal.shape[-1]])
    if squeezed.ndim == 1 or min(squeezed.shape[:-1]) < 2:
        return 0.0
    # float64 and scaled to its range: the estimate does not depend on the units then.
    span = range_of(squeezed)
    if span == 0 or math.isinf(span):
        return 0.0
    scaled = (squeezed.astype(np.float64) - float(squeezed.min())) / span
    return float(estimator(scaled, channel_axis=-1, average_sigmas=True)) * span
