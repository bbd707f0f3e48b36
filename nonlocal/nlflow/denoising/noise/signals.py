"""What models of recordings share: checks of 1-D samples, prediction errors, robust weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.denoising.noise.figures import OfRecordings
from nlflow.errors import InputError, check_floats

Array = NDArray[Any]


def check_recording(name: str, samples: Array, kind: str) -> Floats:
    """Return samples (N, C) in double precision, or raise `InputError` for images."""
    if np.ndim(samples) != 2:
        raise InputError(
            f"{name}: got samples of shape {np.shape(samples)[:-1]}, expected a 1-D signal: {kind} is a noise of "
            "recordings; choose another noise for images"
        )
    return np.asarray(samples, np.float64)


def recording_of(
    name: str, value: Any, channel_axis: int | None, kind: str
) -> tuple[Floats, Callable[[Floats], Floats]]:
    """Return a recording as samples (N, C) in double precision, and what gives them the shape they had."""
    array = check_floats(name, value)
    if channel_axis is None:
        return check_recording(name, array[..., None], kind), lambda samples: samples[..., 0]
    if not -array.ndim <= channel_axis < array.ndim:
        raise InputError(f"channel_axis: got {channel_axis}, expected an axis of an array of {array.ndim} dimensions")
    moved = np.moveaxis(array, channel_axis, -1)
    return check_recording(name, moved, kind), lambda samples: np.moveaxis(samples, -1, channel_axis)


def channel_of(samples: Any, missing: Any) -> tuple[Floats, NDArray[np.bool_]]:
    """Return one recording (N,) in double precision, 0 where it is missing, and where it is present.

    Raises
    ------
    InputError
        For anything but one recording of samples that are finite or missing, and a mask that does not fit.
    """
    if missing is None:
        values = check_floats("samples", samples, ndim=1)
        return values, np.ones(len(values), bool)
    mask = np.asarray(missing)
    if mask.dtype.kind != "b" or mask.shape != np.shape(samples):
        raise InputError(
            f"missing: got {mask.dtype} of shape {mask.shape}, expected booleans of shape {np.shape(samples)}"
        )
    known = np.where(mask, 0, np.asarray(samples))
    return check_floats("samples", known, ndim=1), ~mask


def spread_of(values: Floats) -> float:
    """Return the standard deviation of the bulk of values about 0, whatever their outliers are."""
    return OfRecordings.to_sigma * float(np.median(np.abs(values))) if values.size else 0.0


def robust_weights(error: Floats, used: NDArray[np.bool_]) -> Floats:
    """Return Huber's weights for residuals about 0: 1 for the bulk of them, 0 for those that are not used."""
    size = np.abs(error)
    # Without noise most errors are 0 but for rounding, and the fit becomes one of least absolute values.
    limit = max(OfRecordings.huber * spread_of(error[used]), 1e-12 * float(size.max(initial=0.0)), 1e-300)
    return np.where(used, limit / np.maximum(size, limit), 0.0)


def prediction_filter(values: Floats, present: NDArray[np.bool_], order: int) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the filter (order + 1,) that leaves the error of linear prediction, and where it meets no gap.

    A robust fit: outliers of the error, such as jumps, have little weight. Order 0 leaves the values as they are.
    """
    from numpy.lib.stride_tricks import sliding_window_view

    if order == 0:
        return np.ones(1), present
    windows = sliding_window_view(values, order + 1)
    whole = np.asarray(sliding_window_view(present, order + 1).all(axis=1))
    past, now = windows[:, :-1], windows[:, -1]
    weights = whole.astype(np.float64)
    coefficients = np.zeros(order)
    for _ in range(3):
        weighted = past * weights[:, None]
        moments = weighted.T @ past
        ridge = 1e-9 * np.trace(moments) / order + 1e-300
        coefficients = np.linalg.solve(moments + ridge * np.eye(order), weighted.T @ now)
        weights = robust_weights(now - past @ coefficients, whole)
    # The most recent sample comes first in a convolution.
    return np.concatenate([[1.0], -coefficients[::-1]]), whole
