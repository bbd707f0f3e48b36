"""A folder of pictures as one stack: frames of a clip or slices of a volume, by the order of their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from nlflow.desk.formats import FORMATS
from nlflow.desk.formats.media import Array, Media, format_of
from nlflow.desk.loading import load
from nlflow.errors import FileFormatError, check_memory
from nlflow.store.atomic import make_folder, write_atomic
from nlflow.store.links import check_links

_KINDS = ("png", "jpeg", "tiff", "bmp", "webp")


def natural(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts names as people count: frame 9 before frame 10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), part) if part.isdecimal() else (1, 0, part.lower()) for part in parts if part]


def pictures_in(folder: Path) -> list[Path]:
    """Return the pictures of a folder in the order of their names, without hidden ones and those in folders inside."""
    found = [path for path in folder.iterdir()
             if path.is_file() and not path.name.startswith(".") and format_of(path) in _KINDS]  # fmt: skip
    return sorted(found, key=lambda path: natural(path.name))


def load_frames(folder: Path, paths: Sequence[Path]) -> Media:
    """Read pictures of one size and type, in this order, as one stack whose first axis the user has to name.

    Raises
    ------
    FileFormatError
        If there is none, or if a picture differs from the first in size, type, orientation or format.
    """
    if not paths:
        raise FileFormatError(f"{folder}: got no pictures, expected at least one; check the name")
    check_links(folder, paths, "a folder of pictures")
    kept: list[Media] = []
    data: Array | None = None
    for number, path in enumerate(paths):
        one = load(path)
        if one.format not in _KINDS or one.kind != "image":
            got = "a stack" if one.stacked else f"a {one.format.upper()} file"
            expected = "a picture that is written as well, PNG, JPEG, TIFF, BMP or WebP"
            raise FileFormatError(f"{path}: got {got}, expected {expected}; take it out of {folder}")
        if data is None:
            needed = 2 * len(paths) * one.data.nbytes
            check_memory(f"{folder}: {len(paths)} frames", needed, "denoise it in parts")
            data = np.empty((len(paths), *one.data.shape), one.data.dtype)
        first = kept[0] if kept else one
        for name, mine, theirs in (
            ("size", one.data.shape, data.shape[1:]), ("type", one.data.dtype, data.dtype),
            ("orientation", one.orientation, first.orientation),
            ("alpha channel", one.alpha is not None, first.alpha is not None),
        ):  # fmt: skip
            if mine != theirs:
                raise FileFormatError(
                    f"{path}: got the {name} {mine}, expected {theirs} as in {paths[0]}; frames of one clip are "
                    "alike: convert it, or take it out"
                )
        data[number] = one.data
        kept.append(replace(one, data=data[number], channel_axis=2 if one.data.ndim == 3 else None))
    assert data is not None
    notes = list(dict.fromkeys(note for one in kept for note in one.notes))
    if len(notes) > 1:
        notes = [notes[0] + f"; of other frames there are {len(notes) - 1} more such notes"]
    axes = "?YX" + ("C" if data.ndim == 4 else "")
    return Media(folder, "frames", "volume", data, orientation=kept[0].orientation, extras={"frames": tuple(kept)},
                 notes=tuple(notes), axes=axes)  # fmt: skip


def check_frames(folder: Path, media: Media) -> None:
    """Raise `FileFormatError` where frames cannot be written into a folder."""
    if folder.exists() and not folder.is_dir():
        raise FileFormatError(f"{folder}: got a file, expected a folder for the frames; choose another name")
    if "frames" not in media.extras:
        raise FileFormatError(f"{folder}: got a name without extension, expected a file name; add .tif or .npy")


def write_frames(folder: Path, values: Array, media: Media) -> None:
    """Write a stack as pictures of the names and formats of the input, each complete or not at all."""
    frames = media.extras["frames"]
    make_folder(folder)
    for frame, one in zip(values.reshape(len(frames), *frames[0].data.shape), frames, strict=True):
        encode = FORMATS[one.format].encode
        assert encode is not None  # as of all `_KINDS`
        write_atomic(folder / one.path.name, lambda stream, f=frame, m=one, e=encode: e(stream, f, m))  # type: ignore[misc]
