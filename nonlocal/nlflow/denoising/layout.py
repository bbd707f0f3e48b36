"""Axes of arrays and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import is_tensor, on_host
from nlflow.domains.samples import check_axis
from nlflow.errors import InputError, as_numpy, check_array, check_dense, check_floats, warn_caller

_LETTERS = "TZYX"
_LEAST = 8  # samples along each axis of an array that is taken for a volume without being told


def marks_of(name: str, values: NDArray[Any]) -> tuple[NDArray[np.bool_], str]:
    if values.dtype.kind == "b":
        return values, ""
    if values.dtype.kind not in "iuf":
        raise InputError(f"{name}: got values of type {values.dtype}, expected booleans, or numbers that are not 0 "
                         "where a sample is marked")  # fmt: skip
    if not np.isfinite(values).all():
        raise InputError(f"{name}: got NaN or infinite values, expected numbers; write 0 or 1 instead")
    levels = len(np.unique(values))
    told = f"{name}: got {levels} different values; all but 0 count as marked" if levels > 2 else ""
    return values != 0, told


@dataclass(frozen=True)
class Axes:
    """The axes of time and space, of channels, and of a batch of tensors."""

    shape: tuple[int, ...]  # of the whole array
    letters: str  # T (time), Z, Y, X in the order of the axes of an item
    spacing: tuple[float, ...]  # distance of samples along each of these, in one unit
    channel: int | None = None
    batch: int | None = None

    @classmethod
    def of(
        cls, shape: Sequence[int], channel_axis: Any = None, axes: Any = None, spacing: Any = None, *,
        batches: bool = False,
    ) -> Axes:  # fmt: skip
        shape = tuple(shape)
        if batches and isinstance(axes, str) and axes.count("B") == 1 and len(axes) == len(shape):
            batch = axes.index("B")
            if channel_axis is not None:
                raise InputError(f"channel_axis: got {channel_axis!r} beside axes={axes!r}, expected None; name the "
                                 "channels by C")  # fmt: skip
            item = cls.of(shape[:batch] + shape[batch + 1 :], None, axes.replace("B", ""), spacing)
            channel = None if item.channel is None else item.channel + (item.channel >= batch)
            return cls(shape, item.letters, item.spacing, channel, batch)
        channel = check_axis(len(shape), channel_axis)
        count = len(shape) - (channel is not None)
        if axes is not None:
            channel, letters = _named(axes, shape, channel_axis)
        else:
            letters = "ZYX"[-count:] if 1 <= count <= 3 else ""  # refused where samples are looked at
            if len(shape) == 3 == count and min(shape) < _LEAST:
                raise InputError(
                    f"image: got shape {shape} with channel_axis={channel_axis}; is the last axis colour? then pass "
                    "channel_axis=-1; for a volume of few slices give axes='ZYX', for a clip axes='TYX'"
                )
        return cls(shape, letters, _distances(spacing, letters), channel)

    @property
    def moving(self) -> bool:
        return len(self.letters) == 3 and self.letters[0] == "T"

    @property
    def channels(self) -> int:
        return 1 if self.channel is None else self.shape[self.channel]

    @property
    def spatial(self) -> tuple[int, ...]:
        return self.without(self.shape)

    @property
    def dimension(self) -> int:
        """Number of axes of time and space with more than one sample."""
        return sum(n > 1 for n in self.spatial)

    @property
    def word(self) -> str:
        letters = iter(self.letters)
        named = {self.batch: "B", self.channel: "C"}
        return "".join(named[axis] if axis in named else next(letters) for axis in range(len(self.shape)))

    def without(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(value for axis, value in enumerate(values) if axis not in (self.channel, self.batch))

    def place(self, name: str, value: Any) -> NDArray[np.bool_]:
        """Return a mask of the spatial shape, True where at least one channel is not 0."""
        shape_of(name, value)
        mask, told = marks_of(name, on_host(value, name))
        if told:
            warn_caller(told)
        if mask.shape == self.spatial:
            return mask
        if self.channel is not None and mask.shape == self.shape:
            return np.asarray(mask.any(axis=self.channel))
        raise InputError(f"{name}: got shape {mask.shape}, expected {self.spatial}, one boolean for each sample")

    def check_patch(self, patch_size: int | None) -> None:
        most = 2 * max(self.spatial, default=1) - 1
        if patch_size is not None and patch_size > most:
            raise InputError(
                f"patch_size: got {patch_size} for a shape of {self.spatial}, expected at most {most}, which holds all "
                "of it"
            )

    def check_count(self) -> None:
        if not self.letters:
            raise InputError(
                f"image: got {len(self.shape)} dimension(s) (shape {self.shape}) with channel_axis={self.channel}, "
                "expected one to three besides the channels: a signal, an image or a volume; denoise its volumes one "
                "by one, as a tensor with a batch (axes='BCYX')"
            )

    def items(self, tensor: Any) -> Any:
        ends = [self.batch] if self.batch is not None else []
        rest = [axis for axis in range(tensor.ndim) if axis not in (self.batch, self.channel)]
        moved = tensor.permute(*ends, *rest, *([self.channel] if self.channel is not None else []))
        moved = moved if self.batch is not None else moved[None]
        return moved if self.channel is not None else moved[..., None]

    def back(self, items: Any) -> Any:
        whole = items if self.channel is not None else items[..., 0]
        if self.channel is not None:
            whole = whole.movedim(-1, self.channel + (self.batch is None or self.channel < self.batch))
        whole = whole.movedim(0, self.batch) if self.batch is not None else whole[0]
        return whole.contiguous()

    def spread(self, name: str, given: Any) -> Any:
        """Return a tensor of the shape of space, of an item or of the whole as (B, ..., C)."""
        for absent in ((), (self.batch,), (self.channel,), (self.batch, self.channel)):
            axes = sorted(axis for axis in absent if axis is not None)
            rest = tuple(n for axis, n in enumerate(self.shape) if axis not in axes)
            if len(axes) == len(absent) and tuple(given.shape) == rest:
                for axis in axes:
                    given = given.unsqueeze(axis)
                return self.items(given.expand(self.shape))
        raise InputError(
            f"{name}: got shape {tuple(given.shape)}, expected {self.spatial}, that of an item without channels, or "
            f"{self.shape}"
        )


def shape_of(name: str, value: Any) -> tuple[int, ...]:
    if is_tensor(value):
        check_dense(name, value)
    return tuple(value.shape) if hasattr(value, "shape") else as_numpy(name, value).shape


def shape_of_image(image: Any) -> tuple[int, ...]:
    """Return the shape of an image; what is none is refused before what lies beside it is compared with it."""
    shape = shape_of("image", image)
    if not is_tensor(image):
        dtype = image.dtype if hasattr(image, "dtype") else as_numpy("image", image).dtype
        if getattr(dtype, "kind", "f") not in "biuf" or isinstance(image, str | bool) or 0 in shape:
            check_array("image", np.ma.getdata(image) if isinstance(image, np.ma.MaskedArray) else image)
    return shape


def _named(axes: Any, shape: tuple[int, ...], channel_axis: Any) -> tuple[int | None, str]:
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
    if spacing is None:
        return (1.0,) * len(letters)
    given = check_floats("spacing", spacing, ndim=1)
    if given.shape != (len(letters),) or not given.min() > 0:
        raise InputError(f"spacing: got {spacing!r}, expected {len(letters)} number(s) > 0, one for each of the axes "
                         f"{letters}")  # fmt: skip
    return tuple(given.tolist())
