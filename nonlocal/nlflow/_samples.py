"""Images and signals as denoising computes with them, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import InputError, check_array, check_integer

__all__ = ["as_signal", "finish", "range_of"]


def as_signal(image: Any, channel_axis: int | None) -> tuple[NDArray[Any], Any]:
    """Return the input as (..., C) in its computing precision, and how to give a result the input's shape."""
    array = check_array("image", image)
    if not isinstance(array, np.ndarray):
        raise InputError(f"image: got {type(array).__name__}, expected a NumPy array; convert it (.cpu().numpy())")
    given = np.asarray(image).dtype
    if given.kind in "biu" and given.itemsize <= 2:  # wider integers do not fit single precision
        array = array.astype(np.float32)
    spatial = array.ndim - (channel_axis is not None)
    if spatial not in (1, 2):
        hint = "; is the last axis colour? then pass channel_axis=-1" if array.ndim == 3 else ""
        raise InputError(
            f"image: got {array.ndim} dimension(s) (shape {array.shape}) with channel_axis={channel_axis}, expected "
            "a 1-D "
            f"signal or a 2-D image{' besides the channel axis' if channel_axis is not None else ''}{hint}"
        )
    if channel_axis is None:
        return np.ascontiguousarray(array)[..., None], lambda result: result[..., 0]
    axis = check_integer("channel_axis", channel_axis)
    if not -array.ndim <= axis < array.ndim:
        raise InputError(f"channel_axis: got {axis}, expected an axis of an array of {array.ndim} dimensions")
    return np.ascontiguousarray(np.moveaxis(array, axis, -1)), lambda result: np.moveaxis(result, -1, axis)


def finish(image: Any, result: NDArray[Any], preserve_range: bool) -> NDArray[Any]:
    """Give the result the dtype and range that scikit-image gives a float version of the input."""
    given = np.asarray(image).dtype
    if given.kind in "biu":
        result = result.astype(np.float64)
        if not preserve_range and given.kind != "b":
            result = np.maximum(result / float(np.iinfo(given).max), -1)  # the lowest signed integer is -1 too
    return np.array(result)  # never a view of the input


def range_of(signal: NDArray[Any]) -> float:
    """Return the range of a signal; infinity, without a warning, when that overflows."""
    return float(signal.max()) - float(signal.min())
