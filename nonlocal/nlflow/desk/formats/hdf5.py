"""HDF5 files."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nlflow.desk.apart import stream as apart
from nlflow.desk.formats.containers import MOST, Entry, choose, entry_of, media_of, name_of
from nlflow.desk.formats.media import Array, Media, Writing, check_declared, installed, most_for
from nlflow.errors import command, file_error
from nlflow.store.series.hdf5 import check_own

# Deflate, shuffle, checksums, szip, n-bit, scale and offset, LZF: no others, which are programs of their own.
_FILTERS = (1, 2, 3, 4, 5, 6, 32000)
_REMEDY = "save an array of numbers as a dataset"
_BLOCK = 2**24  # bytes of values that are read at a time


_need_h5py = partial(installed, "hdf5", "h5py", "h5py")


def decode(path: Path, array: str | None = None) -> Media:
    """See `Format.decode`."""
    found, name, data, attributes = read(path, None if array is None else f"/{array.strip('/')}", _REMEDY)
    media = media_of(path, "hdf5", name, data, found, keeps=False)
    media.extras["array"]["attributes"] = attributes
    return media


def read(
    path: Path, array: str | None, remedy: str, *, matlab: bool = False
) -> tuple[dict[str, Entry], str, Array, dict[str, Any]]:
    blocks = apart(f"{__name__}:blocks", path, most_for(path), array=array, remedy=remedy, matlab=matlab)
    entries, name, shape, dtype, attributes, place = next(blocks)
    found = {key: Entry(*entry) for key, entry in entries.items()}
    data: Array = np.empty(shape, dtype)
    at = 0
    for block in blocks:
        data.reshape(-1)[at : at + block.size] = block.reshape(-1)
        at += block.size
    if place is not None:
        with path.open("rb") as stream:
            stream.seek(place)
            if stream.readinto(data.reshape(-1).view(np.uint8).data) != data.nbytes:
                raise file_error(path, f"{name}, which ends behind the file", "a whole file", "copy it again")
    return found, name, data, attributes


def blocks(path: Path, array: str | None, remedy: str, matlab: bool) -> Iterator[Any]:
    """Yield the entries of all datasets; name, shape, dtype, attributes and place of the one; then its values."""
    with _need_h5py(path).File(path, "r") as file:
        found = datasets(path, file)
        if matlab:
            found = {key[1:]: _of_matlab(file[key], entry) for key, entry in found.items() if key[:2] != "/#"}
        name = choose(path, array, found, remedy)
        dataset = file[name]
        _check_values(path, dataset)
        place = _place(dataset)
        entries = {key: (entry.shape, entry.kind, entry.numbers) for key, entry in found.items()}
        yield entries, name, dataset.shape, dataset.dtype, _attributes(dataset), place
        if place is not None or not dataset.size:
            return
        if not dataset.shape:
            yield dataset[()]
            return
        chunk = 1 if dataset.chunks is None else dataset.chunks[0]
        rows = chunk * max(1, _BLOCK * dataset.shape[0] // (chunk * dataset.dtype.itemsize * dataset.size))
        for at in range(0, dataset.shape[0], rows):
            yield dataset[at : at + rows]


def _place(dataset: Any) -> int | None:
    """Return where the values of a dataset begin in its file; None where they lie otherwise than in memory."""
    h5py = _need_h5py(Path())
    plain = dataset.chunks is None and dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype)
    plain = plain and dataset.id.get_storage_size() == dataset.dtype.itemsize * dataset.size > 0
    return dataset.id.get_offset() if plain else None


def _of_matlab(dataset: Any, entry: Entry) -> Entry:
    """Return what a variable of MATLAB is, whose axes have the reverse order."""
    kind = dataset.attrs.get("MATLAB_class", b"")
    kind = kind.decode("ascii", "replace") if isinstance(kind, bytes) else str(kind)
    numbers = entry.numbers and kind not in ("char", "cell", "struct") and "MATLAB_empty" not in dataset.attrs
    return Entry(entry.shape[::-1], entry.kind if numbers else f"a {kind or entry.kind}", numbers)


def datasets(path: Path, file: Any) -> dict[str, Entry]:
    """Return the datasets of an open file by their paths.

    Only hard links are followed: others could lead to any file of this machine.
    """
    h5py = _need_h5py(path)
    found: dict[str, Entry] = {}
    seen = 0

    def walk(group: Any, name: str, above: frozenset[int]) -> None:
        nonlocal seen
        for key in group:
            if (seen := seen + 1) > MOST:
                raise file_error(path, f"more than {MOST} objects", "fewer", "copy the dataset into a file of its own")
            if not isinstance(group.get(key, getlink=True), h5py.HardLink):
                continue
            thing = group[key]
            place = h5py.h5o.get_info(thing.id).addr
            if isinstance(thing, h5py.Group) and place not in above:  # else it holds itself
                walk(thing, f"{name}/{key}", above | {place})
            elif isinstance(thing, h5py.Dataset) and thing.shape is not None:
                found[f"{name}/{key}"] = entry_of(thing.shape, thing.dtype)

    walk(file, "", frozenset([h5py.h5o.get_info(file.id).addr]))
    return found


def _check_values(path: Path, dataset: Any) -> None:
    """Refuse a dataset whose values lie elsewhere, need other programs, or are more than the file can hold."""
    name, count = dataset.name, math.prod(dataset.shape)
    check_own(path, dataset)
    settings = dataset.id.get_create_plist()
    filters = {settings.get_filter(number)[0] for number in range(settings.get_nfilters())}
    if not filters <= set(_FILTERS):
        got = f"{name} with the compression {', '.join(map(str, sorted(filters - set(_FILTERS))))} of a plugin"
        way = command("h5repack", "-f", "GZIP=4", path, "plain.h5")
        raise file_error(path, got, "that of HDF5", f"unpack it first: {way}")
    chunk = math.prod(dataset.chunks or (1,))
    check_declared(path, dataset.dtype.itemsize * max(count, chunk), path.stat().st_size, copies=2)


def check(media: Media, writing: Writing) -> str:
    """See `Format.check`."""
    _need_h5py(writing.path)
    return ""


def _attributes(dataset: Any) -> dict[str, Any]:
    """Return the attributes of a dataset that are numbers and texts; others refer to places in the file.

    A type alone stands for an attribute without values.
    """
    h5py, found = _need_h5py(Path()), {}
    for key in dataset.attrs:
        kind = dataset.attrs.get_id(key).dtype
        if kind.kind in "biufSU" or (kind.kind == "O" and h5py.check_string_dtype(kind) is not None):
            value = dataset.attrs[key]
            found[key] = value.dtype if isinstance(value, h5py.Empty) else value
    return found


def encode(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """See `Format.encode`."""
    buffer = io.BytesIO()
    h5py = _need_h5py(media.path)
    with h5py.File(buffer, "w") as file:
        dataset = file.create_dataset(name_of(media), data=values)
        for key, value in media.extras.get("array", {}).get("attributes", {}).items():
            dataset.attrs[key] = h5py.Empty(value) if isinstance(value, np.dtype) else value
    stream.write(buffer.getbuffer())
