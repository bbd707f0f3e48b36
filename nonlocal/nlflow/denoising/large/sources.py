"""Images on the disk, opened block by block: zarr arrays and TIFF files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.large.arrays import need_dask
from nlflow.errors import FileFormatError, InputError, shortened
from nlflow.io.formats.codecs import strange_codecs
from nlflow.io.formats.tiff import check_compression

Array = NDArray[Any]
_TIFF = (".tif", ".tiff")


def open_array(path: Path) -> Any:
    """Return the zarr array in a folder; nothing of it is read but its description.

    Raises
    ------
    FileFormatError
        For what is no zarr array of numbers, and for codecs that could do more than decode.
    """
    need_dask()
    import zarr

    expected = "a zarr array of numbers"
    try:
        found = zarr.open(path, mode="r")
        if not isinstance(found, zarr.Array):
            names = ", ".join(sorted(name for name, _ in found.arrays())[:5]) or "none"
            raise FileFormatError(f"{path}: got a zarr group (arrays in it: {names}), expected {expected}; name one")
        meta: Any = found.metadata.to_dict()
    except FileFormatError:
        raise
    # A damaged or hostile description makes zarr fail in any way: KeyError, TypeError, ValueError of its own.
    except Exception as error:
        raise FileFormatError(
            f"{path}: got no array that zarr reads ({shortened(error)}), expected {expected}; check it"
        ) from error
    if found.dtype.kind not in "iuf":
        raise FileFormatError(f"{path}: got values of {found.dtype}, expected {expected}; convert them")
    strange = strange_codecs(meta)
    if strange:
        raise FileFormatError(
            f"{path}: got the codec(s) {', '.join(strange)}, expected those that only turn bytes into numbers "
            "(zstd, blosc, gzip and the like); write it anew with one of them"
        )
    return found


def open_image(path: str | Path, *, channel_axis: int | None = None, block: int = 1024) -> tuple[Any, int | None]:
    """Open an image on the disk as a Dask array; nothing of it is read but its description.

    Parameters
    ----------
    path : path
        A zarr array (a folder), or a TIFF file of one image, tiled or in strips, compressed or not.
    channel_axis : int, optional
        Of a zarr array. A TIFF file of three axes tells it by itself.
    block : int
        Wanted side of the blocks, rounded up to whole chunks of the file.

    Returns
    -------
    image : dask.array.Array
    channel_axis : int or None

    Raises
    ------
    FileFormatError
        For what is neither.
    InputError
        Without Dask.
    """
    need_dask()
    import dask.array as da

    path = Path(path)
    if not path.exists():
        raise FileFormatError(f"{path}: got no such file or folder, expected a zarr array or a TIFF file; check it")
    if path.suffix.lower() in _TIFF and path.is_file():
        shape, dtype, stored, channel_axis = _tiff(path)
        reader = _read_tiff
    elif path.is_dir():
        array = open_array(path)
        shape, dtype, stored = tuple(map(int, array.shape)), array.dtype, tuple(map(int, array.chunks))
        reader = _read_zarr
    else:
        raise FileFormatError(f"{path}: got a file of another format, expected a zarr array or a TIFF file; convert it")
    if 0 in shape or not 1 <= len(shape) <= 3:
        raise FileFormatError(f"{path}: got an array of shape {shape}, expected one to three axes; name a part of it")
    if channel_axis is not None and not -len(shape) <= channel_axis < len(shape):
        raise InputError(f"channel_axis: got {channel_axis}, expected an axis of an array of shape {shape}")
    axis = None if channel_axis is None else channel_axis % len(shape)
    sides = block_sides(shape, stored, axis, block)
    chunks = da.core.normalize_chunks(sides, shape, dtype=dtype)
    image = da.map_blocks(reader, str(path), chunks=chunks, dtype=dtype, meta=np.empty((0,) * len(shape), dtype))
    return image, axis


def block_sides(
    shape: tuple[int, ...], stored: tuple[int, ...], channel_axis: int | None, block: int
) -> tuple[int, ...]:
    """Return the sides of blocks: at least `block`, whole chunks as they are stored, all channels."""
    longest = block if len(shape) - (channel_axis is not None) == 2 else block * block
    return tuple(
        n if axis == channel_axis else min(n, math.ceil(longest / c) * c)
        for axis, (n, c) in enumerate(zip(shape, stored, strict=True))
    )


def _place(block_info: Any) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in block_info[None]["array-location"])


def _read_zarr(path: str, block_info: Any = None) -> Array:
    import zarr

    array: Any = zarr.open(path, mode="r")
    return np.asarray(array[_place(block_info)])


def _tiff(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], tuple[int, ...], int | None]:
    """Return shape, dtype, chunks and axis of the channels of a TIFF file."""
    import tifffile

    try:
        with tifffile.TiffFile(path) as tif:
            page: Any = tif.pages[0]
            series, count = tif.series[0], len(tif.series)
            axes, shape, dtype = series.axes, tuple(map(int, series.shape)), np.dtype(series.dtype)
            plain = int(page.photometric) in (1, 2) and not any(map(int, page.extrasamples))
            stored = tuple(map(int, page.chunks))
    # A damaged file makes the decoder fail in any way: IndexError, struct.error, TiffFileError.
    except Exception as error:
        raise FileFormatError(
            f"{path}: got no TIFF file that can be read ({shortened(error)}), expected one; export it again"
        ) from error
    check_compression(path, page)
    if count != 1 or axes not in ("YX", "YXS", "SYX") or dtype.kind not in "iuf" or not plain:
        raise FileFormatError(
            f"{path}: got {count} image(s) of axes {axes}, {dtype}, photometric {page.photometric!r}, expected one "
            "grey or RGB image without an alpha channel; convert it, or leave OUT a .tif, which is done in memory"
        )
    channel = {"YX": None, "YXS": 2, "SYX": 0}[axes]
    if len(stored) != len(shape):  # planes apart: chunks are those of one plane
        stored = (1, *stored[-2:])
    return shape, dtype, stored, channel


def _read_tiff(path: str, block_info: Any = None) -> Array:
    import tifffile
    import zarr

    store: Any = tifffile.imread(path, aszarr=True)
    with store:
        array: Any = zarr.open(store, mode="r")
        return np.asarray(array[_place(block_info)])
