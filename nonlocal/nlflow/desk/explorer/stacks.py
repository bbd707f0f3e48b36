"""Volumes and clips on the page: which slice or frame is shown, and what is denoised together with it."""

from __future__ import annotations

import math
from typing import Any

from nlflow.denoising.groupwise import margins, preset_for
from nlflow.denoising.layout import Axes
from nlflow.desk.formats.media import Array, Media
from nlflow.errors import InputError

_SAMPLES = 2**19  # that are denoised while settings move, channels not counted


def check_stack(name: str, media: Media) -> None:
    """Refuse by name what is no single volume or clip: times beside slices, and a picture of a reader of stacks."""
    if not media.axes:
        return
    if {"T", "Z"} <= set(media.axes):
        raise InputError(
            f"{name}: got a stack of slices at several times ({media.axes}), expected slices or frames alone; "
            "store one time, or use nonlocal denoise"
        )
    if not media.stacked or len(media.spatial_shape) != 3:
        raise InputError(f"{name}: got a stack ({media.axes}), expected slices or frames; use nonlocal denoise")


def word(media: Media) -> str:
    """Return what one picture of a stack is called."""
    return "frame" if "T" in media.axes else "slice"


def through(media: Media, *, channels: bool = False) -> int:
    """Return the axis along which pictures follow each other, with the axis of channels counted or not."""
    axes = media.axes if channels else media.axes.replace("C", "")
    return axes.index("T" if "T" in axes else "Z")


def layout(media: Media) -> dict[str, Any]:
    """Return the words by which `nlflow.denoise` knows the axes."""
    return {"axes": media.axes} | ({} if media.spacing is None else {"spacing": media.spacing})


def reach(media: Media) -> int:
    """Return over how many pictures to each side a sample of a result of ``fast`` looks."""
    preset = preset_for("fast", Axes.of(media.data.shape, None, media.axes, media.spacing))
    assert preset is not None  # three axes have groups in all qualities
    # The grouping of the largest noise; the presets of stacks have one alone.
    groupings = preset.first[-1][1], preset.later[-1][1]
    return margins(groupings, preset.steps)[through(media)]


def part(media: Media, place: tuple[float, ...], at: int | None) -> tuple[tuple[int, int], ...] | None:
    """Return what is denoised to show one picture of a stack; None if that is the whole stack.

    Parameters
    ----------
    media : Media
    place : tuple of float
        Where the part lies in the picture, along rows and columns, from 0 to 1; in the middle by default.
    at : int, optional
        Number of the picture, from 0; the middle one by default.
    """
    shape, axis = media.spatial_shape, through(media)
    if math.prod(shape) <= _SAMPLES:
        return None
    at = shape[axis] // 2 if at is None else at
    around = max(at - reach(media), 0), min(at + reach(media) + 1, shape[axis])
    rows, columns = (n for number, n in enumerate(shape) if number != axis)
    # As many slices are counted at both ends: the part keeps its size while the slice moves.
    pixels = _SAMPLES // min(2 * reach(media) + 1, shape[axis])
    # Where one side is short, the other may be longer.
    width = min(columns, max(math.isqrt(pixels), pixels // rows))
    sizes = min(rows, pixels // width), width
    shares = place or (0.5, 0.5)
    starts = [round((n - size) * share) for n, size, share in zip((rows, columns), sizes, shares, strict=True)]
    crop = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    crop.insert(axis, around)
    return None if all(high - low == n for (low, high), n in zip(crop, shape, strict=True)) else tuple(crop)


def plane(values: Array, media: Media, at: int) -> Array:
    """Return one picture of samples with all axes of a stack."""
    picture: Array = values.take(at, axis=through(media, channels=True))
    return picture


def plane_channels(media: Media) -> int | None:
    """Return the axis of channels of one picture."""
    axes = media.axes.replace("T", "").replace("Z", "")
    return axes.index("C") if "C" in axes else None


def told(media: Media, at: int, crop: tuple[tuple[int, int], ...] | None) -> str:
    """Return in words which picture is shown, and what was denoised together with it."""
    one, axis, shape = word(media), through(media), media.spatial_shape
    text = f"Shown: {one} {at + 1} of {shape[axis]}, denoised together with "
    if crop is None:
        return f"{text}the whole stack."
    low, high = crop[axis]
    text += f"{one}s {low + 1} to {high}"
    across = [(pair, n) for number, (pair, n) in enumerate(zip(crop, shape, strict=True)) if number != axis]
    if all(pair == (0, n) for pair, n in across):
        return f"{text}."
    ranges = " × ".join(f"{pair[0]}–{pair[1] - 1}" for pair, _ in across)
    return f"{text}; in full resolution, pixels {ranges} of {' × '.join(str(n) for _, n in across)}."
