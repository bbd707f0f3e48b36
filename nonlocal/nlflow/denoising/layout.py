"""What the axes of an array are: time or space, channels, and how far apart samples lie along them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.domains.samples import as_signal
from nlflow.errors import InputError, check_array, check_floats, check_integer

_LETTERS = "TZYX"
_LEAST = 8  # samples along each axis of an array that is taken for a volume without being told


@dataclass(frozen=True)
class Layout:
    """The axes of samples (..., C) before their channels.

    Attributes
    ----------
    letters : str
        T (time), Z, Y, X in the order of the axes.
    spacing : tuple of float
        Distance of samples along each, in one unit.
    """

    letters: str
    spacing: tuple[float, ...]

    @property
    def moving(self) -> bool:
        """Whether the samples are the frames of a clip."""
        return len(self.letters) == 3 and self.letters[0] == "T"


def check_axis(ndim: int, channel_axis: Any) -> int | None:
    """Return the axis of the channels counted from 0, or raise `InputError`."""
    if channel_axis is None:
        return None
    axis = check_integer("channel_axis", channel_axis)
    if not -ndim <= axis < ndim:
        raise InputError(f"channel_axis: got {axis}, expected an axis of an array of {ndim} dimensions")
    return axis % ndim


def layout_of(
    shape: tuple[int, ...], channel_axis: Any, axes: str | None = None, spacing: Any = None
) -> tuple[Layout, int | None]:
    """Return the layout of an array, and the axis of its channels.

    Raises
    ------
    InputError
        For letters that do not fit the shape, more than three axes of time and space, time that is not the first of
        them, and arrays of three axes that may be images with colours.
    """
    channel = check_axis(len(shape), channel_axis)
    count = len(shape) - (channel is not None)
    if axes is not None:
        channel, letters = _told(axes, shape, channel_axis)
    else:
        letters = "ZYX"[-count:] if 1 <= count <= 3 else ""  # refused where samples are looked at
        if len(shape) == 3 == count and min(shape) < _LEAST:
            raise InputError(
                f"image: got shape {shape} with channel_axis={channel_axis}; is the last axis colour? then pass "
                "channel_axis=-1; for a volume of few slices give axes='ZYX', for a clip axes='TYX'"
            )
    return Layout(letters, _distances(spacing, letters)), channel


def samples_of(image: Any, channel_axis: Any, axes: str | None = None) -> NDArray[Any]:
    """Return an array as samples (..., C), its axes looked at as `layout_of` does."""
    check_array("image", image)
    return as_signal(image, layout_of(np.shape(image), channel_axis, axes)[1])[0]


def _told(axes: Any, shape: tuple[int, ...], channel_axis: Any) -> tuple[int | None, str]:
    """Return the axis of the channels and the letters of the others, as a word says."""
    expected = f"one letter for each of the {len(shape)} axes of shape {shape}, such as 'ZYX', 'TYX', 'YXC' or 'CZYX'"
    known = isinstance(axes, str) and len(axes) == len(shape) and len(set(axes)) == len(axes)
    if not known or set(axes) - {*_LETTERS, "C"}:
        raise InputError(f"axes: got {axes!r}, expected {expected}: T (time), Z, Y, X, C (channels), each at most once")
    letters = axes.replace("C", "")
    if not 1 <= len(letters) <= 3:
        raise InputError(f"axes: got {axes!r}, expected one to three of T, Z, Y and X; denoise the volumes of a longer "
                         "array one by one")  # fmt: skip
    if letters.find("T") > 0:
        raise InputError(f"axes: got {axes!r}, expected time before the axes of space; move it with numpy.moveaxis")
    channel = axes.find("C") if "C" in axes else None
    if channel_axis is not None and channel != check_axis(len(shape), channel_axis):
        raise InputError(
            f"axes: got {axes!r} beside channel_axis={channel_axis}, which disagree; leave one of them out"
        )
    return channel, letters


def _distances(spacing: Any, letters: str) -> tuple[float, ...]:
    """Return how far apart samples lie along each axis."""
    if spacing is None:
        return (1.0,) * len(letters)
    given = check_floats("spacing", spacing, ndim=1)
    if given.shape != (len(letters),) or not given.min() > 0:
        raise InputError(f"spacing: got {spacing!r}, expected {len(letters)} number(s) > 0, one for each of the axes "
                         f"{letters}")  # fmt: skip
    return tuple(given.tolist())
