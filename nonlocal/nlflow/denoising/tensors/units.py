"""The white noise of items of a tensor, and where there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nlflow._array import is_tensor, to_numpy
from nlflow.denoising.inputs import LEAST_VARIANCE, idle_for, noiseless, scale_for
from nlflow.denoising.tensors.axes import Axes
from nlflow.errors import InputError, check_array, check_number

Levels = NDArray[np.float64]


@dataclass(frozen=True)
class Units:
    """The noise of items (B, ..., C): how strong it is, and where there is none.

    Attributes
    ----------
    level : float64 array of shape (B, C)
        What samples are divided by.
    told : float64 array of shape (B, C)
        The noise, root mean square.
    variance : tensor of shape (B, ...), or None
        Relative variance of the noise where it varies, of mean 1.
    exact : bool tensor that broadcasts to (B, ..., C), or None
        Where samples are free of noise, and are kept.
    idle : list of str
        Why there is nothing to do about an item; empty where there is.
    """

    level: Levels
    told: Levels
    variance: Tensor | None
    exact: Tensor | None
    idle: list[str]

    @classmethod
    def of(cls, sigma: Any, items: Tensor, axes: Axes, strength: float) -> Units:
        """Return what a number, one number a channel, one an item and channel (B, C), or a map says of items."""
        batch, channels, inner = len(items), items.shape[-1], tuple(range(1, items.ndim - 1))
        shape = (batch, *(1 for _ in inner), channels)
        varying, exact, none = None, None, None
        numbers = _numbers(sigma, batch, channels, axes)
        if numbers is None:
            levels = axes.spread("sigma", check_array("sigma", sigma).double()) * strength
            if float(levels.min()) < 0:
                raise InputError(f"sigma: got {float(levels.min()):g}, expected values >= 0")
            squares = levels.square().mean(dim=inner)
            numbers = to_numpy(squares.sqrt())
            none = levels == 0
            if bool((levels.amax(dim=inner) > levels.amin(dim=inner)).any()):
                relative = (levels.square() / torch.where(squares > 0, squares, 1).view(shape)).mean(dim=-1)
                varying = relative.clamp(min=LEAST_VARIANCE)
        else:
            numbers = numbers * strength
            if is_tensor(sigma) or np.ndim(sigma):
                none = torch.from_numpy(numbers == 0).to(items.device).view(shape)
        spans = to_numpy(items.detach().double().amax(dim=inner) - items.detach().double().amin(dim=inner))
        given = [noiseless(level, span) for level, span in zip(numbers, spans, strict=True)]
        told = np.stack([level for level, _ in given])
        hidden = np.stack([np.zeros(channels, bool) if lost is None else lost for _, lost in given])
        if hidden.any():
            lost = torch.from_numpy(hidden).to(items.device).view(shape)
            none = lost if none is None else none | lost
        if none is not None and bool(none.any()):
            exact = none
        idle = [idle_for(float(span.max()), float(level.max())) for span, level in zip(spans, told, strict=True)]
        return cls(np.stack([scale_for(level) for level in told]), told, varying, exact, idle)


def _numbers(sigma: Any, batch: int, channels: int, axes: Axes) -> Levels | None:
    """Return the noise as numbers (B, C), or None for a map of it."""
    shape = tuple(sigma.shape) if is_tensor(sigma) else np.shape(sigma)
    if shape == ():
        return np.full((batch, channels), check_number("sigma", sigma, minimum=0))
    if shape not in ((channels,), (batch, channels)) or (axes.channel is None and shape != (batch, channels)):
        if is_tensor(sigma):
            return None
        raise InputError(f"sigma: got numbers of shape {shape}, expected one, or ({channels},) for one a channel")
    values = np.asarray(to_numpy(check_array("sigma", sigma)), np.float64)
    if values.min() < 0:
        raise InputError(f"sigma: got {values.min():g}, expected values >= 0")
    return np.broadcast_to(values, (batch, channels))
