"""HDF5 files: one dataset is read by its path, and written to a new file with its path and attributes.

The file of the input is not copied and changed: HDF5 crashes where such a copy is damaged. A dataset is found by
walking along hard links alone: soft and external ones, virtual datasets and values in other files, which could name any
file of this machine, are not followed.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, BinaryIO

from nlflow.desk.formats.containers import MOST, Entry, choose, entry_of, media_of, name_of
from nlflow.desk.formats.media import Array, Media, Writing, check_declared, lacking
from nlflow.errors import command, file_error, install_command
from nlflow.store.series.hdf5 import check_own

# Deflate, shuffle, checksums, szip, n-bit, scale and offset, LZF: no others, which are programs of their own.
_FILTERS = (1, 2, 3, 4, 5, 6, 32000)
_REMEDY = "save an array of numbers as a dataset"


def need_h5py(path: Path) -> Any:
    """Return h5py, or raise `FileFormatError` where it is not installed."""
    try:
        import h5py
    except ImportError as error:
        raise lacking(path, "h5py", install_command("hdf5")) from error
    return h5py


def decode(path: Path, array: str | None = None) -> Media:
    """Read the dataset of this path in the file, such as ``/group/dataset``, or the only one."""
    with need_h5py(path).File(path, "r") as file:
        found = datasets(path, file)
        wanted = None if array is None else f"/{array.strip('/')}"
        name = choose(path, wanted, found, _REMEDY)
        data = values_of(path, file[name])
        attributes = _attributes(file[name])
    media = media_of(path, "hdf5", name, data, found, keeps=False)
    media.extras["array"]["attributes"] = attributes
    return media


def datasets(path: Path, file: Any) -> dict[str, Entry]:
    """Return the datasets of an open file by their paths."""
    h5py = need_h5py(path)
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


def values_of(path: Path, dataset: Any) -> Array:
    """Return the values of a dataset whose storage was looked at before."""
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
    values: Array = dataset[()]
    return values


def check(media: Media, writing: Writing) -> str:
    """Return what keeps a result from being written; empty if all is well."""
    need_h5py(writing.path)
    return ""


def _attributes(dataset: Any) -> dict[str, Any]:
    """Return the attributes of a dataset that are numbers and texts; others refer to places in the file."""
    found = {}
    for key in dataset.attrs:
        kind = dataset.attrs.get_id(key).dtype
        if kind.kind in "biufSU" or (kind.kind == "O" and need_h5py(Path()).check_string_dtype(kind) is not None):
            found[key] = dataset.attrs[key]
    return found


def encode(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """Write a file of one dataset."""
    buffer = io.BytesIO()
    with need_h5py(media.path).File(buffer, "w") as file:
        dataset = file.create_dataset(name_of(media), data=values)
        for key, value in media.extras.get("array", {}).get("attributes", {}).items():
            dataset.attrs[key] = value
    stream.write(buffer.getbuffer())
