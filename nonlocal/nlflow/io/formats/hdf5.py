"""HDF5 files: one dataset is read by its path, all else is written back as it is.

A dataset is found by walking along hard links alone: soft and external ones, virtual datasets and values in other
files, which could name any file of this machine, are not followed.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any, BinaryIO

from nlflow.errors import check_memory
from nlflow.io.formats.containers import MOST, Entry, choose, entry_of, media_of, name_of
from nlflow.io.formats.media import Array, Media, check_declared, file_error

# Deflate, shuffle, checksums, szip, n-bit, scale and offset, LZF: no others, which are programs of their own.
_FILTERS = (1, 2, 3, 4, 5, 6, 32000)
_REMEDY = "save an array of numbers as a dataset"


def need_h5py(path: Path) -> Any:
    """Return h5py, or raise `FileFormatError` where it is not installed."""
    try:
        import h5py
    except ImportError as error:
        got = "an HDF5 file, which needs h5py, which is not installed"
        raise file_error(path, got, "what is installed", "pip install 'nlflow[hdf5]'") from error
    return h5py


def decode(path: Path, array: str | None = None) -> Media:
    """Read one dataset.

    Parameters
    ----------
    path : Path
    array : str, optional
        Its path in the file, such as ``/group/dataset``; not needed where there is one.
    """
    with need_h5py(path).File(path, "r") as file:
        found = datasets(path, file)
        wanted = None if array is None else f"/{array.strip('/')}"
        name = choose(path, wanted, found, _REMEDY)
        data = values_of(path, file[name])
    return media_of(path, "hdf5", name, data, data.shape, found)


def datasets(path: Path, file: Any) -> dict[str, Entry]:
    """Return the datasets of an open file by their paths."""
    h5py = need_h5py(path)
    found: dict[str, Entry] = {}
    seen = 0

    def look(name: str, thing: Any) -> bool | None:
        nonlocal seen
        seen += 1
        if isinstance(thing, h5py.Dataset) and thing.shape is not None:
            found[f"/{name}"] = entry_of(thing.shape, thing.dtype)
        return True if seen > MOST else None

    if file.visititems(look):
        raise file_error(path, f"more than {MOST} objects", "fewer", "copy the dataset into a file of its own")
    return found


def values_of(path: Path, dataset: Any) -> Array:
    """Return the values of a dataset whose storage was looked at before."""
    name, count = dataset.name, math.prod(dataset.shape)
    if dataset.is_virtual or dataset.external:
        raise file_error(
            path, f"{name}, whose values are in other files", "values in this file", "copy it with h5repack"
        )
    settings = dataset.id.get_create_plist()
    filters = {settings.get_filter(number)[0] for number in range(settings.get_nfilters())}
    if not filters <= set(_FILTERS):
        got = f"{name} with the compression {', '.join(map(str, sorted(filters - set(_FILTERS))))} of a plugin"
        raise file_error(path, got, "that of HDF5", f"unpack it first: h5repack -f GZIP=4 {path} plain.h5")
    chunk = math.prod(dataset.chunks or (1,))
    check_declared(path, dataset.dtype.itemsize * max(count, chunk), path.stat().st_size, copies=2)
    values: Array = dataset[()]
    return values


def check(path: Path, media: Media) -> str:
    """Return what keeps a result from being written; empty if all is well."""
    need_h5py(path)
    return ""


def encode(stream: BinaryIO, values: Array, media: Media) -> None:
    """Write a file: that of the input with this dataset in the place of the old one, or a new one."""
    buffer = io.BytesIO()
    name = name_of(media)
    if media.format != "hdf5":
        with need_h5py(media.path).File(buffer, "w") as file:
            file.create_dataset(name, data=values)
    else:
        replaced(buffer, values, media, name)
    stream.write(buffer.getbuffer())


def replaced(buffer: io.BytesIO, values: Array, media: Media, name: str) -> None:
    """Fill a buffer with the file of an input in which a dataset has other values; its type and attributes stay."""
    size = media.path.stat().st_size + 2 * values.nbytes
    check_memory(f"{media.path}: a copy of it", size, "name the output .npy")
    buffer.write(media.path.read_bytes())
    with need_h5py(media.path).File(buffer, "r+") as file:
        file[name][...] = values
