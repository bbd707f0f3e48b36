"""Flows of groups of the items of a tensor: those that are alike lie side by side in one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nlflow._array import constant_like, to_numpy
from nlflow.backends.devices import Device
from nlflow.denoising.groupwise import SINGLE, problem
from nlflow.denoising.inputs import channels_for
from nlflow.denoising.layout import Layout
from nlflow.denoising.patches import Grouping, TensorFilter
from nlflow.denoising.patches.lattice import three
from nlflow.denoising.presets import GroupPreset, preset_for, ratio_of
from nlflow.denoising.runs import Watch, unrolled
from nlflow.denoising.tensors.axes import Axes
from nlflow.denoising.tensors.units import Units
from nlflow.denoising.tiles import bytes_needed, in_tiles
from nlflow.errors import InputError, check_memory

_TRACKED = 8  # planes that a step keeps for its derivative


@dataclass(frozen=True)
class Alike:
    """Items with the same groupings and precision: one flow, in which they lie side by side.

    Attributes
    ----------
    which : list of int
        Their numbers among all items.
    offset, level, colours : float64 tensors of shape (b, 1, ..., C), (b, 1, ..., C) and (b, C, C)
        What is subtracted and divided by, and the channels that are not correlated, as rows.
    variance : tensor of shape (b, ...), or None
    """

    which: list[int]
    preset: GroupPreset
    groupings: tuple[Grouping, ...]
    precision: torch.dtype
    offset: Tensor
    level: Tensor
    colours: Tensor
    variance: Tensor | None

    def observe(self, items: Tensor) -> Tensor:
        """Return samples (b, ..., C) in units of their noise."""
        return ((items - self.offset) / self.level).to(items.dtype)

    def flow(self, f: Tensor) -> tuple[Tensor, Tensor | None, tuple[Grouping, ...]]:
        """Return samples in units of noise as the signal of a flow, its variance, and its groupings.

        Several images lie in a volume as slices that know nothing of each other, several signals in an image as rows.
        """
        mixed = self._mixed(f, self.colours.mT).to(self.precision)
        variance = None
        if self.variance is not None:
            variance = self.variance[..., None].to(self.precision).expand(mixed.shape)
        if len(mixed) == 1:
            return mixed[0], None if variance is None else variance[0], self.groupings
        signals = mixed.ndim == 3
        groupings = tuple(_apart(grouping, signals) for grouping in self.groupings)
        if signals:
            mixed, variance = mixed[None], None if variance is None else variance[None]
        return mixed, variance, groupings

    def back(self, u: Tensor, like: Tensor) -> Tensor:
        """Return a signal of the flow as samples (b, ..., C) in units of noise, in the precision of `like`."""
        return self._mixed(u.reshape(like.shape), self.colours).to(like.dtype)

    def _mixed(self, f: Tensor, matrices: Tensor) -> Tensor:
        # One channel after the other: a caller may have allowed products of matrices to lose digits.
        flat, columns = f.flatten(1, -2), matrices.to(f.dtype)
        parts = [flat[..., c : c + 1] * columns[:, c : c + 1] for c in range(f.shape[-1])]
        return torch.stack(parts).sum(dim=0).view(f.shape) if len(parts) > 1 else parts[0].view(f.shape)

    def paths(self, f: Tensor, watch: Watch, filter: TensorFilter | None = None) -> tuple[list[Tensor], int, int]:
        """Return estimates in units of noise (the last alone, or all), the tiles of the flow, and the bytes of one.

        With a filter the steps are unrolled, so that they have derivatives in f.
        """
        signal, variance, groupings = self.flow(f)
        options = {} if variance is None else {"variance": variance}
        limit = free_bytes(f) if watch.limit is None else watch.limit
        chunked, working = TensorFilter.within(signal, limit)
        if filter is None:
            make = partial(problem, filter=chunked)
            path, tiles, memory = in_tiles(
                signal, self.preset, groupings, variance, None, make, replace(watch, limit=limit), working
            )
        else:
            memory = _bytes(signal, groupings, self.preset.steps, working)
            memory += _TRACKED * self.preset.steps * signal.nbytes
            check_memory("image: its flow with derivatives", memory, "denoise smaller parts, or detach it", limit)
            path, tiles = unrolled(problem(signal, self.preset, groupings, filter=filter, **options)), 1
        return [self.back(u, f) for u in (path if watch.every else path[-1:])], tiles, memory

    def bytes_needed(self, f: Tensor, limit: float) -> tuple[int, float]:
        """Return the working memory of the flow of samples as a whole, and what it grows by with a sample."""
        signal, _, groupings = self.flow(f)
        working = TensorFilter.within(signal, limit)[1]
        needed = _bytes(signal, groupings, self.preset.steps, working)
        return needed, (needed - working) / f.numel()


def _bytes(signal: Tensor, groupings: tuple[Grouping, ...], steps: int, working: int) -> int:
    shape = (signal.shape[-1], *three(tuple(signal.shape[:-1])))
    return bytes_needed(shape, groupings, steps, signal.itemsize, working)


def free_bytes(like: Tensor) -> int:
    """Return the bytes that a computation may take where a tensor lies."""
    with torch.cuda.device(like.device) if like.is_cuda else nullcontext():
        return Device(like.device.type, torch=str(torch.__version__)).free_bytes()


def _apart(grouping: Grouping, signals: bool) -> Grouping:
    """Return a grouping that has no extent along the axis of the items."""

    def along(name: str, least: int) -> tuple[int, int, int]:
        _, b, c = grouping.along(name)
        return (least, least, c) if signals else (least, b, c)

    means = None if grouping.means is None else _apart(grouping.means, signals)
    return Grouping(along("patch", 1), grouping.neighbours, along("radius", 0), along("stride", 1), means)


def alike(items: Tensor, units: Units, quality: str, layout: Layout) -> list[Alike]:
    """Return the flows of all items that are not idle."""
    preset = preset_for(quality, layout)
    if preset is None:
        raise InputError(
            f"quality: got {quality!r} for a tensor, a flow of pixels on the CPU alone, expected 'balanced' or 'best'; "
            "or denoise the NumPy array (.cpu().numpy())"
        )
    if preset.moving:
        raise InputError("axes: got a clip for a tensor, whose search follows no motion, expected images or volumes; "
                         "denoise the NumPy array (.cpu().numpy()), or name its first axis Z")  # fmt: skip
    inner = tuple(range(1, items.ndim - 1))
    shape = (len(items), *(1 for _ in inner), items.shape[-1])
    dimension = sum(n > 1 for n in items.shape[1:-1])
    given = items.detach().double()
    offset = given.mean(dim=inner, keepdim=True)
    level = torch.from_numpy(units.level).to(items.device).view(shape)
    f = (given - offset) / level
    variances = to_numpy(f.var(dim=tuple(range(1, f.ndim)), correction=0))
    spans = to_numpy(f.flatten(1).amax(dim=1) - f.flatten(1).amin(dim=1))
    weakest = np.ones(len(items))
    if units.variance is not None:
        weakest = to_numpy(units.variance.flatten(1).amin(dim=1).sqrt())
    kinds: dict[Any, list[int]] = {}
    for number, reason in enumerate(units.idle):
        if not reason:
            groupings = preset.groupings(ratio_of(float(variances[number]), items.shape[-1]), dimension)
            precision = torch.float32 if spans[number] < SINGLE * weakest[number] else torch.float64
            alone = number if len(layout.letters) == 3 else -1  # a volume has no axis left to lie beside another
            kinds.setdefault((groupings, precision, alone), []).append(number)

    def colours(number: int) -> Tensor:
        flat = f[number].flatten(0, -2)
        rows: Tensor = constant_like(channels_for(items.shape[-1], lambda: to_numpy(flat.T @ flat)).copy(), flat)
        return rows

    return [
        Alike(
            which, preset, groupings, precision, offset[which], level[which],
            torch.stack([colours(number) for number in which]),
            None if units.variance is None else units.variance[which],
        )
        for (groupings, precision, _), which in kinds.items()
    ]  # fmt: skip


@dataclass(frozen=True)
class TensorTask:
    """What is to be denoised: the items of a tensor, their noise, and what is known of them.

    Attributes
    ----------
    axes : Axes
    units : Units
    flows : list of Alike
    kept : bool tensor (B, ..., C), or None
        Where the result is the input.
    """

    axes: Axes
    units: Units
    flows: list[Alike]
    kept: Tensor | None

    @classmethod
    def of(cls, image: Tensor, sigma: Any, axes: Axes, quality: str, strength: float, keep: Any) -> TensorTask:
        """Observe a tensor."""
        items = axes.items(image.detach())
        units = Units.of(sigma, items, axes, strength)
        kept = None
        if keep is not None:
            if keep.dtype != torch.bool:
                raise InputError(f"keep: got values of type {keep.dtype}, expected booleans; compare first")
            kept = axes.spread("keep", keep).any(dim=-1, keepdim=True)
        task = cls(axes, units, alike(items, units, quality, axes.layout), kept)
        if image.requires_grad and torch.is_grad_enabled():
            task.check_moves()
        return task

    def check_moves(self) -> None:
        """Raise `InputError` where an item is returned unchanged, so that there is no flow to differentiate."""
        for number, reason in enumerate(self.units.idle):
            if reason:
                item = f", item {number}" if self.axes.batch is not None else ""
                raise InputError(
                    f"image: {reason}{item}, so that it is returned unchanged and has no derivative; detach it, or "
                    "leave it out"
                )

    def parts(self, image: Tensor) -> list[tuple[Alike, Tensor]]:
        """Return each flow with its samples in units of their noise."""
        items = self.axes.items(image)
        return [(one, one.observe(items[one.which])) for one in self.flows]

    def differentiable(self, image: Tensor, filters: Sequence[TensorFilter], limit: float | None) -> Tensor:
        """Return the estimate with its derivatives; each flow has a filter, whose groups are constants."""
        found = [
            (one, one.paths(f, Watch(limit=limit), filter)[0][-1])
            for (one, f), filter in zip(self.parts(image), filters, strict=True)
        ]
        return self.assembled(image, found)

    def assembled(self, image: Tensor, found: list[tuple[Alike, Tensor]]) -> Tensor:
        """Return estimates of all flows, in units of noise, in the units and the shape of the tensor."""
        items = self.axes.items(image)
        rows: list[Tensor] = list(items)
        for one, u in found:
            back = (u * one.level + one.offset).to(items.dtype)
            for number, row in zip(one.which, back, strict=True):
                rows[number] = row
        whole = torch.stack(rows)
        for where in (self.units.exact, self.kept):
            whole = whole if where is None else torch.where(where, items, whole)
        return self.axes.back(whole)
