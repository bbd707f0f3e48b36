"""Masks, maps and references beside an input."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from nlflow.denoising.layout import marks_of
from nlflow.desk.files import Array, Media, as_stored, load, upright
from nlflow.desk.formats.media import ARRAYS, PICTURES, TABLES
from nlflow.errors import FileFormatError, InputError


def _matched(media: Media, found: Media, data: Array) -> Array:
    """Return the samples of a picture that belongs to `media`, turned as that one is stored.

    So a mask that was drawn upright fits a photograph that is stored on its side.
    """
    if found.kind != "image" or found.format in ARRAYS or media.format in ARRAYS:
        return data
    return as_stored(upright(data, found.orientation), media.orientation)


def _opened(path: Path, media: Media, shapes: Collection[tuple[int, ...]]) -> Media:
    """Read a file that belongs to `media`, in one of these shapes if it can be.

    The first column of a table may be monotone in one file and not in the other, by noise or by chance.
    """
    found = load(path)
    if found.axes and found.data.shape not in shapes:  # axes of one sample are those of the input only
        found = replace(found, data=found.data.squeeze())
    if found.format in TABLES and media.format in TABLES and found.data.shape not in shapes:
        with suppress(FileFormatError):
            other = load(path, first_column="keep" if found.time is None else "denoise")
            if other.data.shape in shapes:
                found = other
    if found.format in TABLES and media.format in TABLES and (found.time is None) == (media.time is None):
        found = replace(found, notes=())  # of the first column, which are those of the input
    return found


def _misfit(option: str, path: Path, shape: tuple[int, ...], expected: str, media: Media) -> InputError:
    return InputError(f"{option}: got {path} of shape {shape}, expected {expected} as in {media.path}; crop or redo it")


def read_mask(option: str, path: Path, media: Media) -> tuple[Array, list[str]]:
    """Return where a mask is not 0, in the spatial shape of `media` (or in its full shape), and notes.

    In pictures with colours a pixel counts if any channel is not 0; pixels that are transparent do not count.
    """
    found = _opened(path, media, (media.spatial_shape, media.data.shape))
    data, notes = found.data, list(found.notes)
    marked, told = marks_of(f"{option}: {path}", data)
    notes += [told] if told else []
    marked = _matched(media, found, marked)
    if found.format in PICTURES and not found.axes and marked.ndim == 3:
        marked = np.asarray(marked.any(axis=-1))
    if found.alpha is not None:
        marked = marked & _matched(media, found, found.alpha != 0)
    shape = media.spatial_shape
    if marked.shape not in (shape, media.data.shape):
        raise _misfit(option, path, marked.shape, str(shape), media)
    if option == "--keep" and marked.shape != shape and not media.separate:
        marked = np.asarray(marked.any(axis=media.channel_axis))
    return np.ascontiguousarray(marked), notes


def read_map(option: str, path: Path, media: Media) -> tuple[Array, list[str]]:
    """Return one number for each node of `media`, or for each cell of a table, and notes."""
    shape = media.spatial_shape
    shapes = (shape, media.data.shape) if media.separate else (shape,)
    found = _opened(path, media, shapes)
    values = _matched(media, found, found.data)
    if values.shape not in shapes:
        node = {"image": "pixel", "volume": "voxel", "clip": "pixel"}.get(media.kind, "sample")
        raise _misfit(option, path, values.shape, f"{shape}, one number for each {node}", media)
    return np.ascontiguousarray(values, dtype=np.float64), list(found.notes)


def read_reference(option: str, path: Path, media: Media) -> tuple[Array, list[str]]:
    found = _opened(path, media, (media.data.shape,))
    values, notes = _matched(media, found, found.data), list(found.notes)
    if values.shape != media.data.shape:
        raise _misfit(option, path, values.shape, str(media.data.shape), media)
    kinds = values.dtype.kind + media.data.dtype.kind
    if values.dtype != media.data.dtype and set(kinds) <= {"i", "u"}:
        notes.append(f"{path}: {values.dtype} samples are compared with {media.data.dtype} ones as they stand")
    return values, notes


def measures(media: Media) -> tuple[str, ...]:
    return ("psnr",) if media.stacked else ("psnr", "snr" if media.kind == "signal" else "ssim")


def nearness(media: Media, clean: Array, noisy: Array, result: Array) -> dict[str, float | None]:
    from nlflow.denoising.quality import psnr, snr, ssim

    kinds: dict[str, Callable[..., float | None]] = {
        "psnr": psnr, "snr": snr, "ssim": partial(ssim, channel_axis=media.channel_axis)
    }  # fmt: skip
    figures: dict[str, float | None] = {}
    for name, data in (("input", noisy), ("output", result)):
        for measure in measures(media):
            pairs = [(clean[:, c], data[:, c]) for c in range(data.shape[1])] if media.separate else [(clean, data)]
            known = name == "output" or bool(np.isfinite(data).all())
            found = [kinds[measure](*pair) if known else None for pair in pairs]
            numbers = [one for one in found if one is not None]
            figures[f"{measure}_{name}"] = float(np.mean(numbers)) if len(numbers) == len(found) else None
    return figures
