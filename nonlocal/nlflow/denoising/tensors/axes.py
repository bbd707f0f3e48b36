"""Tensors that `denoise` takes, and how items lie in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nlflow._array import is_tensor
from nlflow.denoising.inputs import TELL_MISSING
from nlflow.denoising.layout import Layout, layout_of
from nlflow.errors import InputError, check_array


def check_tensor(image: Tensor) -> Tensor:
    """Return a tensor in its computing precision, or raise `InputError`.

    float32 and float64 are kept, float16 becomes float32 as that of arrays does.
    """
    if image.layout is not torch.strided:
        raise InputError(f"image: got a tensor of layout {image.layout}, expected a dense one; use .to_dense()")
    if image.device.type not in ("cpu", "cuda"):
        raise InputError(
            f"image: it is on {image.device}, expected a tensor on cpu or cuda (mps has no float64, in which sums are "
            "formed); move it with .cpu()"
        )
    if image.dtype == torch.bfloat16:
        raise InputError("image: got bfloat16, whose 8 binary digits are fewer than a grey level has, expected float32 "
                         "or float64; convert it with .float()")  # fmt: skip
    if not (image.is_floating_point() or image.is_complex()):
        raise InputError(f"image: got a tensor of {image.dtype}, expected float32 or float64; convert it with .float()")
    checked: Tensor = check_array("image", image, missing=TELL_MISSING)
    return checked


def beside(name: str, value: Any, image: Tensor) -> None:
    """Refuse an argument that does not lie where the image does, or asks for a gradient."""
    if is_tensor(value) and value.device != image.device:
        raise InputError(f"{name}: it is on {value.device}, expected {image.device}, as the image; move one of them")
    if isinstance(value, np.ndarray) and value.ndim:
        raise InputError(
            f"{name}: got an array beside a tensor on {image.device}, expected a tensor there; use torch.as_tensor"
        )
    if getattr(value, "requires_grad", False):
        raise InputError(f"{name}: got a tensor that requires a gradient, expected a constant one; detach it")


@dataclass(frozen=True)
class Axes:
    """How items (B, ..., C) lie in a tensor.

    Attributes
    ----------
    layout : Layout
        Of an item.
    batch, channel : int or None
        Axes of the tensor.
    shape : tuple of int
        Of the tensor.
    """

    layout: Layout
    batch: int | None
    channel: int | None
    shape: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], channel_axis: Any, axes: str | None, spacing: Any) -> Axes:
        """Return the axes of a tensor; the letter B names a batch, whose items are denoised one by one."""
        if not (isinstance(axes, str) and axes.count("B") == 1 and len(axes) == len(shape)):
            layout, channel = layout_of(shape, channel_axis, axes, spacing)
            if not 1 <= len(shape) - (channel is not None) <= 3:
                raise InputError(
                    f"image: got {len(shape)} dimension(s) (shape {tuple(shape)}) with channel_axis={channel_axis}, "
                    "expected one to three: a signal, an image or a volume; name a batch and channels, as axes='BCYX'"
                )
            return cls(layout, None, channel, shape)
        batch = axes.index("B")
        if channel_axis is not None:
            raise InputError(f"channel_axis: got {channel_axis!r} beside axes={axes!r}, expected None; name the "
                             "channels by C")  # fmt: skip
        layout, channel = layout_of(shape[:batch] + shape[batch + 1 :], None, axes.replace("B", ""), spacing)
        return cls(layout, batch, None if channel is None else channel + (channel >= batch), shape)

    @property
    def spatial(self) -> tuple[int, ...]:
        """The shape of an item without its channels."""
        return tuple(n for axis, n in enumerate(self.shape) if axis not in (self.batch, self.channel))

    @property
    def word(self) -> str:
        """The letters of all axes."""
        letters = iter(self.layout.letters)
        named = {self.batch: "B", self.channel: "C"}
        return "".join(named[axis] if axis in named else next(letters) for axis in range(len(self.shape)))

    def items(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the whole shape as (B, ..., C)."""
        ends = [self.batch] if self.batch is not None else []
        rest = [axis for axis in range(tensor.ndim) if axis not in (self.batch, self.channel)]
        moved = tensor.permute(*ends, *rest, *([self.channel] if self.channel is not None else []))
        moved = moved if self.batch is not None else moved[None]
        return moved if self.channel is not None else moved[..., None]

    def back(self, items: Tensor) -> Tensor:
        """Return (B, ..., C) as a tensor of the whole shape."""
        whole = items if self.channel is not None else items[..., 0]
        if self.channel is not None:
            item = self.channel + (self.batch is None or self.channel < self.batch)
            whole = whole.movedim(-1, item)
        whole = whole.movedim(0, self.batch) if self.batch is not None else whole[0]
        return whole.contiguous()

    def spread(self, name: str, given: Tensor) -> Tensor:
        """Return a map of the spatial shape, of an item's shape, with the batch or without, as (B, ..., C)."""
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
