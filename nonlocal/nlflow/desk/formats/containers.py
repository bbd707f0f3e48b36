"""Files with several arrays."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nlflow.desk.formats.media import Array, Media, Writing, check_declared
from nlflow.errors import command, file_error
from nlflow.store.npy import read_array, read_header

#: More members of a file are not looked at.
MOST = 10_000
_SHOWN = 12


@dataclass(frozen=True)
class Entry:
    """An array's entry."""

    shape: tuple[int, ...]
    kind: str  # its dtype, or what else it is
    numbers: bool  # whether it holds real numbers

    @property
    def signal(self) -> bool:
        return self.numbers and len(self.shape) > 0 and any(size > 1 for size in self.shape) and 0 not in self.shape

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape)) or 'one value'} {self.kind}"


def entry_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Entry:
    return Entry(shape, str(dtype) if dtype.kind != "O" else "objects", dtype.kind in "biuf")


def choose(path: Path, array: str | None, found: Mapping[str, Entry], remedy: str) -> str:
    """Return the name of the array to read: the user's, or the only one that fits; else `FileFormatError`."""
    listed = ", ".join(f"{name} ({entry})" for name, entry in list(found.items())[:_SHOWN])
    listed += f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    if array is not None:
        if array not in found:
            raise file_error(path, f"no array {array!r}; it holds {listed or 'none'}", "one of them", "correct --array")
        if not found[array].numbers:
            raise file_error(path, f"{array!r}, which holds {found[array].kind}", "real numbers", remedy)
        return array
    signals = [name for name, entry in found.items() if entry.signal]
    if not signals:
        raise file_error(path, f"no array of numbers ({listed or 'it is empty'})", "at least one", remedy)
    if len(signals) > 1:
        got = f"{len(signals)} arrays: {listed}"
        way = f"say: {command('nonlocal', 'denoise', path, 'OUT', '--array', signals[0])}, or save one alone as .npy"
        raise file_error(path, got, "the name of one", way)
    return signals[0]


def media_of(path: Path, form: str, name: str, data: Array, found: Mapping[str, Entry], *, keeps: bool = True) -> Media:
    note = f"{path}: the array {name} is read, one of {len(found)}"
    lost = len(found) > 1 and not keeps
    about = {"name": name, "shape": found[name].shape, "others": len(found) > 1, "lost": lost}
    return Media(path, form, "image", data, extras={"array": about}, notes=(note,) if len(found) > 1 else ())


def name_of(media: Media) -> str:
    return str(media.extras.get("array", {"name": "data"})["name"])


# ---- NPZ

_REMEDY = "save numbers with numpy.savez; pickled objects are never loaded"


def decode(path: Path, array: str | None = None) -> Media:
    """See `Format.decode`."""
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


def encode(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
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
