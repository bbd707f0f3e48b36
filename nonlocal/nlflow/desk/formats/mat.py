"""MAT files of MATLAB (MathWorks, "MAT-File Format", chapter 1)."""

from __future__ import annotations

import io
import math
import re
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nlflow.desk.formats import hdf5
from nlflow.desk.formats.containers import MOST, Entry, choose, entry_of, media_of, name_of
from nlflow.desk.formats.media import Array, Media, Writing, check_declared
from nlflow.errors import file_error

_HEADER = 128
_MATRIX, _PACKED = 14, 15  # types of elements
_LONGEST = 2**16  # bytes of an element before its values: flags, shape and name
_CLASSES = {1: "cell array", 2: "struct", 3: "object", 4: "text", 5: "sparse matrix", 16: "function", 17: "object"}
_DTYPES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_COMPLEX, _LOGICAL = 0x08, 0x02
_REMEDY = "save numbers in MATLAB: x = double(full(x)); save('x.mat', 'x'); of a cell array x = cell2mat(x)"


@dataclass(frozen=True)
class _Variable:
    """One element of a file: where it lies, what it says of itself, and where its values begin in it."""

    name: str
    start: int
    stop: int
    packed: bool
    entry: Entry
    dtype: str = ""
    stored: str = ""
    values: int = 0


def decode(path: Path, array: str | None = None) -> Media:
    """See `Format.decode`."""
    if _is_hdf5(path):
        return _decode_hdf5(path, array)
    order, variables = _scan(path)
    found = {name: variable.entry for name, variable in variables.items()}
    name = choose(path, array, found, _REMEDY)
    data = _values(path, variables[name], order)
    return media_of(path, "mat", name, _flat(data), found)


def _is_hdf5(path: Path) -> bool:
    with path.open("rb") as stream:
        head = stream.read(1024)
    return b"\x89HDF\r\n\x1a\n" in (head[:8], head[512:520])


def _flat(data: Array) -> Array:
    """Return an array without the axis of one sample that MATLAB gives to signals."""
    return data.reshape(-1) if data.ndim == 2 and 1 in data.shape else data


def _scan(path: Path) -> tuple[str, dict[str, _Variable]]:
    """Return the byte order of a file of level 5, and its variables, of which no value was read."""
    size = path.stat().st_size
    found: dict[str, _Variable] = {}
    with path.open("rb") as stream:
        head = stream.read(_HEADER)
        mark = head[126:128]
        if mark not in (b"IM", b"MI"):
            got = "content that is no MAT file of level 5 or 7.3"
            raise file_error(
                path, got, "one", "save it with scipy.io.savemat, or in MATLAB with save('x.mat', 'x', '-v7')"
            )
        order = "<" if mark == b"IM" else ">"
        place = _HEADER
        while len(tag := stream.read(8)) == 8:
            kind, length = struct.unpack(f"{order}II", tag)
            stop = place + 8 + length
            if kind not in (_MATRIX, _PACKED) or stop > size or len(found) >= MOST:
                raise ValueError(f"an element of type {kind} and {length} bytes at byte {place} of {size}")
            start = stream.read(min(length, _LONGEST))
            if kind == _PACKED:
                start = zlib.decompressobj().decompress(start, _LONGEST)
                if struct.unpack(f"{order}I", start[:4])[0] != _MATRIX:
                    raise ValueError("a packed element that is no array")
                start = start[8:]
            variable = _described(start, place, stop, kind == _PACKED, order)
            found[variable.name] = variable
            stream.seek(stop)
            place = stop
    return order, found


def _described(start: bytes, place: int, stop: int, packed: bool, order: str) -> _Variable:
    """Return what the start of an array says of it; raise `ValueError` where that is damaged."""
    flags, at = _part(start, 0, order)
    kind, more = flags[0 if order == "<" else 3], flags[1 if order == "<" else 2]
    sizes, at = _part(start, at, order)
    shape = tuple(int(size) for size in np.frombuffer(sizes, f"{order}i4"))
    name, at = _part(start, at, order)
    text = name.decode("ascii")
    if min(shape, default=-1) < 0 or len(shape) > 32:
        raise ValueError(f"an array {text!r} of shape {shape}")
    if kind not in _DTYPES:
        return _Variable(text, place, stop, packed, Entry(shape, f"a {_CLASSES.get(kind, 'foreign value')}", False))
    if more & _COMPLEX:
        return _Variable(text, place, stop, packed, Entry(shape, "complex numbers", False))
    dtype = "?" if more & _LOGICAL else _DTYPES[kind]
    stored = struct.unpack_from(f"{order}I", start, at)[0]
    if stored >> 16:  # a small element: type and length in four bytes, values in the next four
        length, stored, values = stored >> 16, stored & 0xFFFF, at + 4
    else:
        length, values = struct.unpack_from(f"{order}I", start, at + 4)[0], at + 8
    if stored not in _STORED or length != math.prod(shape) * np.dtype(_STORED[stored]).itemsize:
        raise ValueError(f"an array {text!r} of shape {shape} with {length} bytes of values of type {stored}")
    entry = entry_of(shape, np.dtype(dtype))
    return _Variable(text, place, stop, packed, entry, dtype, f"{order}{_STORED[stored]}", values)


def _part(content: bytes, at: int, order: str) -> tuple[bytes, int]:
    """Return the content of a part of an element, and where the next part begins."""
    kind, length = struct.unpack_from(f"{order}II", content, at)
    if kind >> 16:
        length, begin, following = kind >> 16, at + 4, at + 8
    else:
        begin = at + 8
        following = begin + length + -length % 8
    if begin + length > len(content) or (kind >> 16 and length > 4):
        raise ValueError("an array whose description is not all there")
    return content[begin : begin + length], following


def _values(path: Path, variable: _Variable, order: str) -> Array:
    shape, stored = variable.entry.shape, np.dtype(variable.stored)
    count = math.prod(shape)
    needed = 8 + variable.values + count * stored.itemsize
    most = count * max(stored.itemsize, np.dtype(variable.dtype).itemsize)
    check_declared(path, most, variable.stop - variable.start, copies=3)
    with path.open("rb") as stream:
        stream.seek(variable.start)
        content = stream.read(variable.stop - variable.start)
    if variable.packed:
        content = zlib.decompressobj().decompress(content[8:], needed)
    if len(content) < needed:
        raise ValueError(f"fewer values of {variable.name!r} than its header tells of")
    values = np.frombuffer(content, stored, count, 8 + variable.values)
    return np.ascontiguousarray(values.reshape(shape, order="F").astype(variable.dtype))


def check(media: Media, writing: Writing) -> str:
    """See `Format.check`."""
    if media.format != "mat" or _is_hdf5(media.path):
        return ""
    with media.path.open("rb") as stream:
        head = stream.read(_HEADER)
    if head[126:128] != b"IM":
        return "a MAT file of a processor with the other byte order"
    return "a MAT file with objects" if head[116:124].strip(b" \0") else ""


def encode(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    from scipy.io import savemat

    name, buffer = name_of(media), io.BytesIO()
    if media.format == "mat":
        values = values.reshape(media.extras["array"]["shape"])
    variables: dict[str, _Variable] = {}
    if media.format == "mat" and not _is_hdf5(media.path):
        _, variables = _scan(media.path)
    else:
        name = re.sub(r"\W", "_", name.rpartition("/")[2], flags=re.ASCII)
        name = name if name[:1].isalpha() else f"x{name}"  # as MATLAB wants names of variables
    packed = name in variables and variables[name].packed
    savemat(buffer, {name: values}, do_compression=packed, oned_as="row")  # type: ignore[arg-type]  # a file too
    fresh = buffer.getvalue()
    if not variables:
        stream.write(fresh)
        return
    with media.path.open("rb") as source:
        stream.write(source.read(_HEADER))
        for other in variables.values():
            source.seek(other.start)
            stream.write(fresh[_HEADER:] if other.name == name else source.read(other.stop - other.start))


def _decode_hdf5(path: Path, array: str | None) -> Media:
    found, name, data, attributes = hdf5.read(path, array, _REMEDY, matlab=True)
    data = np.ascontiguousarray(data.T)
    data = data.astype(np.bool_) if attributes.get("MATLAB_class") == b"logical" else data
    return media_of(path, "mat", name, _flat(data), found, keeps=False)
