"""Inputs of the tab "Denoise": a file or the built-in example. Results as files of the same kind, of stacks as NPY."""

from __future__ import annotations

import io
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from nlflow.desk import files
from nlflow.desk.companions import read_reference
from nlflow.desk.explorer import stacks
from nlflow.desk.formats import written_extension
from nlflow.desk.formats.media import Array, Media

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


@dataclass(frozen=True)
class Source:
    """A noisy image, signal, volume or clip.

    Attributes
    ----------
    media : Media
        Its samples, in the units of the file.
    name : str
        How it is called on the page, in texts and in commands: the path that was given, or the name of an upload.
    clean : array of the same shape, or None
        The same without noise.
    clean_name : str
        How that file is called; empty where there is none.
    built_in : bool
        Whether it is the example.
    notes : tuple of str
        What was converted on reading, for the user.
    reading : dict
        What the reader was told, by its words ``axes``, ``spacing`` and ``array``.
    """

    media: Media
    name: str
    clean: Array | None = None
    clean_name: str = ""
    built_in: bool = False
    notes: tuple[str, ...] = ()
    reading: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Samples along each axis but that of the channels."""
        return self.media.spatial_shape

    def with_clean(self, path: str | os.PathLike[str], name: str) -> Source:
        """Return the same with the file of a reference, which must have its shape; see `companions.read_reference`."""
        clean, notes = read_reference("clean", Path(path), self.media)
        return replace(self, clean=clean, clean_name=name, notes=(*self.notes, *notes))


def example() -> Source:
    """Return what `EXAMPLE` makes: a photograph of 256 x 256 grey levels with noise of standard deviation 25."""
    from skimage import data

    photograph: Array = data.camera()
    clean = np.rint(photograph.reshape(256, 2, 256, 2).mean(axis=(1, 3))).astype(np.uint8)
    noise = np.random.default_rng(0).normal(0, 25, clean.shape)
    noisy = np.clip(np.rint(clean + noise), 0, 255).astype(np.uint8)
    return Source(Media(Path("camera.png"), "png", "image", noisy), "camera.png", clean, built_in=True)


def open_source(
    path: str | os.PathLike[str],
    name: str | None = None,
    *,
    axes: str | None = None,
    spacing: Sequence[float] | None = None,
    array: str | None = None,
) -> Source:
    """Read a file; see `nlflow.desk.files.read` for what is raised, and `InputError` for slices at several times.

    Parameters
    ----------
    path : path
    name : str, optional
        How it is called; the path by default.
    axes, spacing, array : optional
        As for `nlflow.desk.files.read`.
    """
    media = files.read(path, axes=axes, spacing=spacing, array=array)
    stacks.check_stack(name or os.fspath(path), media)
    told = {"axes": axes, "spacing": spacing, "array": array}
    reading = {word: value for word, value in told.items() if value is not None}
    return Source(media, os.fspath(path) if name is None else name, notes=media.notes, reading=reading)


def preview(source: Source, place: tuple[float, ...] = (), at: int | None = None) -> Crop | None:
    """Return the part that is computed while settings move; None if that is the whole input.

    It is a part in full resolution, not a reduced picture: a mean of pixels has less noise than they have.

    Parameters
    ----------
    source : Source
    place : tuple of float
        Where the part lies along each axis, of a stack along rows and columns: 0 for the start, 1 for the end; in the
        middle by default.
    at : int, optional
        Of a stack, the slice or frame that is shown, from 0; the middle one by default.
    """
    if source.media.stacked:
        return stacks.part(source.media, place, at)
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
    """Return the index of a part in the data of a source."""
    parts = [slice(low, high) for low, high in crop]
    if source.media.channel_axis is not None:
        parts.insert(source.media.channel_axis, slice(None))
    return tuple(parts)


def saved(source: Source, crop: Crop | None, result: Array) -> tuple[str, bytes]:
    """Return the name and the content of a file that stores a result as its input is stored, a stack as NPY.

    Parameters
    ----------
    source : Source
    crop : Crop or None
        The part that the result is of.
    result : array
        In the units of the file.

    Raises
    ------
    FileFormatError
        As `nlflow.desk.files.write`.
    """
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
        )
    name = PurePath(source.name)
    suffix = written_extension(Path(source.name)) or name.suffix.lower()
    with tempfile.TemporaryDirectory(prefix="nlflow-") as folder:
        path = Path(folder) / f"result{suffix}"
        files.write(path, result, media)
        return f"{name.stem}-denoised{suffix}", path.read_bytes()
