"""Forms of sigma."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import is_tensor, on_host
from nlflow.denoising.layout import Axes, shape_of
from nlflow.errors import InputError, check_floats, check_number

Array = NDArray[Any]
Mask = NDArray[np.bool_]
_HINT = "the noise in the units of the input"
#: A sample that is told to be free of noise counts as one with this part of the mean variance, so that all is regular.
LEAST_VARIANCE = 1e-4


def check_sigma(sigma: Any) -> None:
    if sigma is not None and shape_of("sigma", sigma) == ():
        check_number("sigma", sigma, minimum=0, hint=_HINT)
    elif sigma is not None:
        _check_levels(check_floats("sigma", sigma))


def numbers_of(sigma: Any, spatial: tuple[int, ...], channels: int, named: bool, batch: int | None = None) -> Any:
    """Return the noise of each channel (C,), or of each item and channel (B, C); None if `sigma` is a map."""
    shape = shape_of("sigma", sigma)
    whole = (channels,) if batch is None else (batch, channels)
    if shape == ():
        return np.full(whole, check_number("sigma", sigma, minimum=0, hint=_HINT))
    if (named and shape == (channels,) and shape != spatial) or (batch is not None and shape == whole):
        levels = check_floats("sigma", on_host(sigma) if is_tensor(sigma) else sigma)
        _check_levels(levels)
        return levels if batch is None else np.broadcast_to(levels.astype(np.float64), whole)
    return None


def strengthened(sigma: Any, strength: float) -> Array:
    with np.errstate(over="ignore"):
        levels = np.asarray(sigma) * strength
    if not np.isfinite(levels).all():
        raise InputError(f"strength: got {strength:g}, with which sigma overflows; give a smaller one")
    return levels


def _check_levels(levels: Array) -> None:
    if levels.min() < 0:
        raise InputError(f"sigma: got {levels.min():g}, expected values >= 0, {_HINT}")


def levels_in(
    sigma: Any, signal: Array, missing: Mask | None, channel_axis: int | None
) -> tuple[Array, Array | None, Mask | None]:
    """Return the noise of each channel (root mean square), its relative variance where it varies, and where it is 0."""
    channels, spatial = signal.shape[-1], signal.shape[:-1]
    numbers = numbers_of(sigma, spatial, channels, channel_axis is not None)
    if numbers is not None:
        return numbers, None, numbers == 0 if shape_of("sigma", sigma) else None
    levels = check_floats("sigma", sigma)
    _check_levels(levels)
    if len(spatial) == 3 and levels.shape == spatial[:1]:  # of each slice or frame
        levels = levels[:, None, None]
    if levels.ndim == len(spatial) and levels.shape in (spatial, (spatial[0], 1, 1)):
        levels = np.broadcast_to(levels[..., None], signal.shape)
    elif channel_axis is not None and levels.ndim == signal.ndim:
        levels = np.moveaxis(levels, channel_axis, -1)
    if levels.shape != signal.shape:
        each = f", ({channels},) for one number a channel" if channel_axis is not None else ""
        one = f", ({spatial[0]},) for one number a slice or frame" if len(spatial) == 3 else ""
        raise InputError(
            f"sigma: got an array of shape {np.shape(sigma)}, expected a number, {spatial} for a map{each}{one}"
        )
    present = levels.reshape(-1, channels) if missing is None else levels[~missing]
    if present.min() == present.max():
        return present[0].astype(np.float64), None, present[0] == 0
    squares = (present.astype(np.float64) ** 2).mean(axis=0)
    relative = np.mean(levels**2 / np.where(squares > 0, squares, 1), axis=-1)
    if missing is not None:
        relative = np.where(missing, 1.0, relative)
    return np.sqrt(squares), np.maximum(relative, LEAST_VARIANCE), levels == 0


def of_channels(sigma: Any, which: Mask, axes: Axes) -> Any:
    given = () if sigma is None else shape_of("sigma", sigma)
    if given == (len(which),) and axes.channel is not None and given != axes.spatial:
        return np.asarray(sigma)[which]
    return np.compress(which, np.asarray(sigma), axes.channel) if given == axes.shape else sigma
