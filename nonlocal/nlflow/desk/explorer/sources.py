"""Inputs of "Denoise"."""

from __future__ import annotations

import io
import math
import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from nlflow.denoising.groupwise import margins, preset_for
from nlflow.denoising.layout import Axes
from nlflow.desk import files
from nlflow.desk.companions import read_reference
from nlflow.desk.formats import written_extension
from nlflow.desk.formats.axes import through
from nlflow.desk.formats.media import Array, Media
from nlflow.errors import InputError

# ---- volumes and clips: which picture is shown, and what is denoised together with it


_SAMPLES = 2**19  # that are denoised while settings move, channels not counted


def _check_stack(name: str, media: Media) -> None:
    """Refuse what is no single volume or clip."""
    if not media.axes:
        return
    if {"T", "Z"} <= set(media.axes):
        raise InputError(
            f"{name}: got a stack of slices at several times ({media.axes}), expected slices or frames alone; "
            "store one time, or use nonlocal denoise"
        )
    if not media.stacked or len(media.spatial_shape) != 3:
        raise InputError(f"{name}: got a stack ({media.axes}), expected slices or frames; use nonlocal denoise")


def picture_word(media: Media) -> str:
    return "frame" if "T" in media.axes else "slice"


def reach(media: Media) -> int:
    """Return how many pictures before and after one influence its result with ``fast``."""
    preset = preset_for("fast", Axes.of(media.data.shape, None, media.axes, media.spacing))
    # The grouping of the largest noise; the presets of stacks have one alone.
    groupings = preset.first[-1][1], preset.later[-1][1]
    return margins(groupings, preset.steps)[through(media)]


def _stack_part(media: Media, place: tuple[float, ...], at: int | None) -> tuple[tuple[int, int], ...] | None:
    """Return what is denoised to show the picture `at` of a stack; None if that is the whole stack.

    `place` says where the part lies along rows and columns, from 0 to 1.
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


def told_stack(media: Media, at: int, crop: tuple[tuple[int, int], ...] | None) -> str:
    one, axis, shape = picture_word(media), through(media), media.spatial_shape
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


# ---- a file or the example


Crop = tuple[tuple[int, int], ...]
"""First and last (excluded) sample along each axis but that of the channels."""

#: The program that makes the built-in example.
EXAMPLE = """import numpy as np
from skimage import data

clean = np.rint(data.camera().reshape(256, 2, 256, 2).mean(axis=(1, 3))).astype(np.uint8)
noise = np.random.default_rng(0).normal(0, 25, clean.shape)
noisy = np.clip(np.rint(clean + noise), 0, 255).astype(np.uint8)"""

#: Of an image, denoised while settings move: 256 x 256.
PREVIEW_PIXELS = 2**16
_PREVIEW_SAMPLES = 2**15
MOST_HEARD = 2**23  # about a minute and a half of stereo; three such files are sent to the page


@dataclass(frozen=True)
class Source:
    """A noisy input."""

    media: Media  # its samples, in the units of the file
    # How it is called on the page, in texts and in commands: the path that was given, or the name of an upload.
    name: str
    clean: Array | None = None  # the same without noise
    clean_name: str = ""  # how that file is called; empty where there is none
    built_in: bool = False  # whether it is the example
    notes: tuple[str, ...] = ()  # what was converted on reading, for the user
    reading: dict[str, Any] = field(default_factory=dict)  # words of `nlflow.desk.files.read` that the reader was told

    @property
    def shape(self) -> tuple[int, ...]:
        return self.media.spatial_shape

    def with_clean(self, path: str | os.PathLike[str], name: str) -> Source:
        clean, notes = read_reference("clean", Path(path), self.media)
        return replace(self, clean=clean, clean_name=name, notes=(*self.notes, *notes))


def example() -> Source:
    from skimage import data

    photograph: Array = data.camera()
    clean = np.rint(photograph.reshape(256, 2, 256, 2).mean(axis=(1, 3))).astype(np.uint8)
    noise = np.random.default_rng(0).normal(0, 25, clean.shape)
    noisy = np.clip(np.rint(clean + noise), 0, 255).astype(np.uint8)
    return Source(Media(Path("camera.png"), "png", "image", noisy), "camera.png", clean, built_in=True)


def open_source(path: str | os.PathLike[str], name: str | None = None, **reading: Any) -> Source:
    media = files.read(path, **reading)
    _check_stack(name or os.fspath(path), media)
    return Source(media, os.fspath(path) if name is None else name, notes=media.notes, reading=reading)


def preview(source: Source, place: tuple[float, ...] = (), at: int | None = None) -> Crop | None:
    """Return the part that is computed while settings move, in full resolution; None for all of the input.

    `place` says where it lies along each axis, of a stack along rows and columns, from 0 to 1; `at` is the picture of
    one.
    """
    if source.media.stacked:
        return _stack_part(source.media, place, at)
    shape = source.shape
    sizes: tuple[int, ...]
    if len(shape) == 1:
        sizes = (min(shape[0], _PREVIEW_SAMPLES),)
    else:
        # Where one side is short, the other may be longer.
        columns = min(shape[1], max(math.isqrt(PREVIEW_PIXELS), PREVIEW_PIXELS // shape[0]))
        sizes = (min(shape[0], PREVIEW_PIXELS // columns), columns)
    if sizes == shape:
        return None
    where = place or (0.5,) * len(shape)
    starts = [round((n - size) * share) for n, size, share in zip(shape, sizes, where, strict=True)]
    return tuple((start, start + size) for start, size in zip(starts, sizes, strict=True))


def slices(source: Source, crop: Crop) -> tuple[slice, ...]:
    parts = [slice(low, high) for low, high in crop]
    if source.media.channel_axis is not None:
        parts.insert(source.media.channel_axis, slice(None))
    return tuple(parts)


def saved(source: Source, crop: Crop | None, result: Array) -> tuple[str, bytes]:
    media = source.media
    if media.stacked:
        stream = io.BytesIO()
        np.save(stream, result, allow_pickle=False)
        return f"{PurePath(source.name).stem}-denoised.npy", stream.getvalue()
    if crop is not None:
        part = tuple(slice(low, high) for low, high in crop)
        media = replace(
            media,
            data=media.data[slices(source, crop)],
            alpha=None if media.alpha is None else media.alpha[part],
            time=None if media.time is None else media.time[part[0]],
            absent=None if media.absent is None else media.absent[slices(source, crop)],
        )
        if "sheet" in media.extras:
            media = replace(media, extras={**media.extras, "sheet": media.extras["sheet"].part(part[0])})
    name = PurePath(source.name)
    suffix = written_extension(Path(source.name)) or name.suffix.lower()
    with tempfile.TemporaryDirectory(prefix="nlflow-") as folder:
        path = Path(folder) / f"result{suffix}"
        files.write(path, result, media)
        return f"{name.stem}-denoised{suffix}", path.read_bytes()


def sounds(source: Source, crop: Crop | None, result: Array) -> dict[str, bytes]:
    if source.media.format != "wav" or result.size > MOST_HEARD:
        return {}
    given = source.media.data if crop is None else source.media.data[slices(source, crop)]
    removed = given.astype(np.float64) - result
    return {
        name: saved(source, crop, one)[1] for name, one in (("noisy", given), ("result", result), ("removed", removed))
    }
