"""NumPy's files."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from nlflow.errors import check_memory, shortened

_LONGEST = 2**16  # bytes of a header; NumPy itself trusts 10 000
_HEADERS: dict[tuple[int, int], Callable[[BinaryIO], tuple[Any, ...]]] = {
    (1, 0): npy.read_array_header_1_0,
    (2, 0): npy.read_array_header_2_0,
    # Like the one before in UTF-8, which only names of fields need; NumPy has no public function for it.
    (3, 0): npy.read_array_header_2_0,
}


def read_array(stream: BinaryIO, length: int, *, what: str = "the array") -> NDArray[Any]:
    """Return the array at the start of an open .npy file of `length` bytes; arrays of objects are refused."""
    start = stream.tell()
    shape, by_columns, dtype = read_header(stream)
    if dtype.itemsize == 0:
        raise ValueError(f"values of {dtype}, which have no size")
    if dtype.hasobject:
        raise ValueError("an array of Python objects, which only a pickle holds")
    if any(isinstance(size, bool) or size < 0 for size in shape):
        raise ValueError(f"the shape {shape}")
    count = math.prod(shape)  # whole numbers of Python, which do not overflow
    needed, there = count * dtype.itemsize, length - (stream.tell() - start)
    if needed > there:
        raise ValueError(f"a header that tells of {needed} bytes of values, of which there are {there}")
    if len(shape) > 64 or (count == 0 and max(shape, default=0) > np.iinfo(np.intp).max):
        raise ValueError(f"{len(shape)} dimensions of at most {max(shape, default=0)} values")
    check_memory(what, needed, "take a part of it, or use a machine with more memory")
    array: NDArray[Any] = np.empty(count, dtype)
    block = 2**22
    for place in range(0, needed, block):
        into = array.view(np.uint8)[place : place + block]
        if stream.readinto(into) != into.size:  # type: ignore[attr-defined]  # BinaryIO lacks it, files have it
            raise ValueError("fewer values than its header tells of")
    return array.reshape(shape, order="F" if by_columns else "C")


def read_header(stream: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    try:
        with warnings.catch_warnings():  # an odd header is read or refused; nobody can mend it
            warnings.simplefilter("ignore")
            version = npy.read_magic(stream)
            if version not in _HEADERS:
                raise ValueError(f"version {version[0]}.{version[1]} of the format")
            start = stream.read(2 if version == (1, 0) else 4)
            length = int.from_bytes(start, "little")
            if length > _LONGEST:
                raise ValueError(f"a header of {length} bytes")
            shape, by_columns, dtype = _HEADERS[version](io.BytesIO(start + stream.read(length)))
    except Exception as error:  # a header is a text of Python, which fails to parse in many ways
        raise ValueError(shortened(error)) from error
    return shape, by_columns, dtype
