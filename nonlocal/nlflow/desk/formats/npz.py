"""NPZ archives of NumPy: one array is read, the others are written back as they are."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nlflow.desk.formats.containers import MOST, Entry, choose, entry_of, media_of, name_of
from nlflow.desk.formats.media import Array, Media, check_declared
from nlflow.errors import file_error
from nlflow.store.npy import read_array, read_header

_REMEDY = "save numbers with numpy.savez; pickled objects are never loaded"


def decode(path: Path, array: str | None = None) -> Media:
    """Read one array of an archive; pickled objects are refused.

    Parameters
    ----------
    path : Path
    array : str, optional
        Its name; not needed where there is one array.
    """
    with zipfile.ZipFile(path) as archive:
        members = _members(path, archive)
        found = {name: _entry(archive, member) for name, member in members.items()}
        name = choose(path, array, found, _REMEDY)
        member = members[name]
        check_declared(path, member.file_size, member.compress_size)
        with archive.open(member) as stream:
            data = read_array(stream, member.file_size, what=f"{path}: {name}")  # type: ignore[arg-type]  # a file
            if stream.read(1):
                raise ValueError("more values than its header tells of")
    return media_of(path, "npz", name, data, found)


def _members(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the arrays of an archive by their names."""
    members = archive.infolist()
    if len(members) > MOST or len({member.filename for member in members}) < len(members):
        got = f"an archive of {len(members)} members, some of them of one name or too many"
        raise file_error(path, got, f"at most {MOST} arrays with names of their own", "write it again")
    # Others unfold so far that a small block of them fills memory.
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        raise file_error(path, "an archive with another compression", "that of NumPy", "write it with numpy.savez")
    return {member.filename.removesuffix(".npy"): member for member in members if member.filename.endswith(".npy")}


def _entry(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Entry:
    try:
        with archive.open(member) as stream:
            shape, _, dtype = read_header(stream)  # type: ignore[arg-type]  # a file
    except (ValueError, RuntimeError, zipfile.BadZipFile, zipfile.zlib.error):  # type: ignore[attr-defined]
        return Entry((), "damaged", False)
    return entry_of(shape, dtype)


def encode(stream: BinaryIO, values: Array, media: Media) -> None:
    """Write an archive: that of the input with this array in the place of the old one, or a new one."""
    name = name_of(media)
    with zipfile.ZipFile(stream, "w") as written:
        if media.format != "npz":
            _write(written, zipfile.ZipInfo(f"{name.rpartition('/')[2]}.npy"), values)
            return
        with zipfile.ZipFile(media.path) as archive:
            for member in archive.infolist():
                if member.filename == f"{name}.npy":
                    fresh = zipfile.ZipInfo(member.filename, member.date_time)
                    fresh.compress_type = member.compress_type
                    _write(written, fresh, values)
                else:
                    with archive.open(member) as source, written.open(member, "w", force_zip64=True) as place:
                        shutil.copyfileobj(source, place)


def _write(archive: zipfile.ZipFile, member: zipfile.ZipInfo, values: Array) -> None:
    with archive.open(member, "w", force_zip64=True) as place:
        np.lib.format.write_array(place, values, allow_pickle=False)
