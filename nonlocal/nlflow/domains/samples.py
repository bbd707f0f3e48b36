"""Samples of signals, images and volumes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, is_tensor, pieces_of
from nlflow.errors import InputError, check_integer, check_numpy

_UNIT = 1126  # sums are whole numbers of 2^-1126: the last of the 53 binary digits of 2^-1074
_NARROW = 2**16  # values below it fit 16 bits
_EVEN = 8  # numbers from which on equal steps are none by chance
_PIECE = 2**20  # samples at a time; up to 2^26 are summed without rounding


def check_axis(ndim: int, channel_axis: Any) -> int | None:
    if channel_axis is None:
        return None
    axis = check_integer("channel_axis", channel_axis)
    if not -ndim <= axis < ndim:
        raise InputError(f"channel_axis: got {axis}, expected an axis of an array of {ndim} dimensions")
    return axis % ndim


def as_signal(image: Any, channel_axis: int | None, missing: str = "", name: str = "image") -> tuple[NDArray[Any], Any]:
    """Return the input as floats (..., C), and a function that gives a result the input's axes."""
    array = check_numpy(name, image, missing=missing)
    given = np.asarray(image).dtype
    if given.kind in "biu" and given.itemsize <= 2:  # wider integers do not fit single precision
        array = array.astype(np.float32)
    spatial = array.ndim - (channel_axis is not None)
    if spatial not in (1, 2, 3):
        besides = " besides the channel axis" if channel_axis is not None else ""
        raise InputError(
            f"{name}: got {array.ndim} dimension(s) (shape {array.shape}) with channel_axis={channel_axis}, expected "
            f"one to three{besides}: a signal, an image or a volume; denoise its volumes one by one"
        )
    axis = check_axis(array.ndim, channel_axis)
    if axis is None:
        return np.ascontiguousarray(array)[..., None], lambda result: result[..., 0]
    return np.ascontiguousarray(np.moveaxis(array, axis, -1)), lambda result: np.moveaxis(result, -1, axis)


def check_scale(image: Any, preserve_range: bool) -> None:
    """Refuse wide integers with the values of narrow ones, which `finish` would divide by their range."""
    if is_tensor(image):  # of floats
        return
    # Lists of whole numbers are such: NumPy makes int64 of them, whose range is 2^63.
    array = image.compressed() if isinstance(image, np.ma.MaskedArray) else np.asarray(image)
    if preserve_range or array.dtype.kind not in "iu" or array.dtype.itemsize <= 2 or array.size == 0:
        return
    low, high = int(array.min()), int(array.max())
    if (low, high) != (0, 0) and low >= -_NARROW and high < _NARROW:
        raise InputError(
            f"image: got values from {low} to {high} as {array.dtype}, whose range of {np.iinfo(array.dtype).max:.2g} "
            "becomes 0...1, expected values on that scale; convert them to float, uint8 or uint16, or give "
            "preserve_range=True"
        )


def finish(image: Any, result: NDArray[Any], preserve_range: bool) -> NDArray[Any]:
    """Give the result the range that scikit-image gives a float version of the input, in float64 or float32."""
    given = np.asarray(image).dtype
    values = np.array(result, np.float64 if given.kind in "biu" else None)  # never a view of the input
    if given.kind in "iu" and not preserve_range:
        values /= float(np.iinfo(given).max)
        np.maximum(values, -1, out=values)  # the lowest signed integer is -1 too
    if isinstance(result, np.ma.MaskedArray):
        return np.ma.array(values, mask=result.mask, fill_value=result.fill_value)
    return values


def has_value(samples: NDArray[Any], value: Any) -> NDArray[np.bool_]:
    """Return which samples have a value; the largest floats of either sign stand for the infinities too."""
    if samples.dtype.kind == "f":
        ends = np.finfo(samples.dtype)
        if value in (ends.min, ends.max):
            return np.asarray(samples <= value if value < 0 else samples >= value)
    return np.asarray(samples == value)


def rounded(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    limits = np.iinfo(dtype)
    # The float next to 2^63 - 1 is 2^63, which would wrap: the largest float that fits is the one below.
    top = float(limits.max) if float(limits.max) <= limits.max else np.nextafter(float(limits.max), 0)
    whole = values.astype(np.float64)
    return np.clip(np.rint(whole, out=whole), float(limits.min), top, out=whole).astype(dtype)


def exact_sums(signal: NDArray[Any]) -> list[int]:
    """Return the sum over each channel of finite samples (..., C), a whole number of 2^-1126."""
    # Whole numbers add up alike in any order, so that the mean of an image does not depend on how it is cut.
    return [_exact_sum(signal[..., c].ravel()) for c in range(signal.shape[-1])]


def _exact_sum(values: NDArray[Any]) -> int:
    total = 0
    for start in range(0, values.size, _PIECE):
        piece = values[start : start + _PIECE].astype(np.float64)
        if (np.abs(piece) < _NARROW).all() and (piece == np.rint(piece)).all():
            total += int(piece.sum()) << _UNIT  # whole numbers below 2^16 lose no digit
            continue
        fraction, exponent = np.frexp(piece)
        # 27 and 26 binary digits, summed by their exponents: floats hold these sums to the last digit.
        scaled = fraction * 2.0**27
        high = np.trunc(scaled)
        least = int(exponent.min(initial=0))
        for digits, shift in ((high, 26), ((scaled - high) * 2.0**26, 0)):
            by_exponent = np.bincount(exponent - least, weights=digits)
            for k in np.flatnonzero(by_exponent).tolist():
                total += int(by_exponent[k]) << (k + least - 53 + _UNIT + shift)
    return total


def mean_of_sums(sums: list[int], count: int) -> Floats:
    return np.array([total / (count << _UNIT) for total in sums])


def exact_means(signal: NDArray[Any]) -> Floats:
    return mean_of_sums(exact_sums(signal), math.prod(signal.shape[:-1]))


def by_rows(convert: Callable[[NDArray[Any]], NDArray[Any]], values: NDArray[Any], dtype: Any) -> NDArray[Any]:
    result = np.empty(values.shape, dtype)
    rows = max(_PIECE * len(values) // max(values.size, 1), 1)
    for first in range(0, len(values), rows):
        result[first : first + rows] = convert(values[first : first + rows])
    return result


def variance_of(values: NDArray[Any]) -> float:
    """Return the variance of all samples in double precision, without a copy of them."""
    pieces = pieces_of(values)
    mean = sum(float(piece.sum(dtype=np.float64)) for piece in pieces) / values.size
    return sum(float(np.square(piece.astype(np.float64) - mean).sum()) for piece in pieces) / values.size


def is_ruled(values: NDArray[Any]) -> bool:
    """Tell whether at least 8 numbers are in equal steps, as those of a scale or an index."""
    if len(values) < _EVEN or not np.isfinite(values).all():
        return False
    steps = np.diff(np.asarray(values, np.float64))
    return bool(steps[0] != 0 and np.allclose(steps, steps[0], rtol=0.01, atol=0))


def varying(signal: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    present = signal.reshape(-1, signal.shape[-1]) if missing is None else signal[~missing]
    some = present[:: max(len(present) // _NARROW, 1)]
    for seen in (some, present):  # a look at few is mostly enough
        found = np.asarray((seen != seen[:1]).any(axis=0))
        if found.all():
            break
    return found


def range_of(signal: NDArray[Any]) -> float:
    return float(signal.max()) - float(signal.min())
