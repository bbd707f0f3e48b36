"""Images on the disk, opened block by block: zarr arrays and TIFF files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.large.arrays import need_dask
from nlflow.denoising.layout import Axes
from nlflow.desk.formats.tiff_pages import check_compression, check_own, opened
from nlflow.errors import FileFormatError, InputError, shortened
from nlflow.store.codecs import strange_codecs
from nlflow.store.links import check_links, links_in

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
    check_links(path, links_in(path), expected)
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
    image, axis, _ = open_stack(Path(path), channel_axis, None, block, "fast")
    return image, axis


def open_stack(
    path: Path, channel_axis: int | None, axes: str | None, block: int | None, quality: str
) -> tuple[Any, int | None, str | None]:
    """Open an image or a stack on the disk as a Dask array; return the axis of its channels and its axes too.

    Parameters
    ----------
    path, channel_axis
        As `open_image`.
    axes : str, optional
        Which axis is which, as `nlflow.denoise` takes it; of a TIFF file of pages, whose own word is heard where there
        is one.
    block : int, optional
        Wanted side of the blocks, that which suits the quality by default.
    quality : str
    """
    need_dask()
    import dask.array as da

    if not path.exists():
        raise FileFormatError(f"{path}: got no such file or folder, expected a zarr array or a TIFF file; check it")
    if path.suffix.lower() in _TIFF and path.is_file():
        shape, dtype, stored, channel_axis = _tiff(path, axes)
        reader = _read_tiff
    elif path.is_dir():
        array = open_array(path)
        shape, dtype, stored = tuple(map(int, array.shape)), array.dtype, tuple(map(int, array.chunks))
        reader = _read_zarr
    else:
        raise FileFormatError(f"{path}: got a file of another format, expected a zarr array or a TIFF file; convert it")
    if 0 in shape or not 1 <= len(shape) <= (3 if axes is None else 4):
        expected = "one to three axes" if axes is None else f"the axes {axes}"
        raise FileFormatError(f"{path}: got an array of shape {shape}, expected {expected}; name a part of it")
    if channel_axis is not None and not -len(shape) <= channel_axis < len(shape):
        raise InputError(f"channel_axis: got {channel_axis}, expected an axis of an array of shape {shape}")
    axis = None if channel_axis is None else channel_axis % len(shape)
    moving = False
    if axes is not None:
        placed = Axes.of(shape, axis, axes)
        axis, moving = placed.channel, placed.moving
    if block is None:
        flat = len(shape) - (axis is not None) < 3
        block = ((1024, 2048) if flat else (256, 192))[quality != "fast"]
    sides = block_sides(shape, stored, axis, block, moving)
    chunks = da.core.normalize_chunks(sides, shape, dtype=dtype)
    image = da.map_blocks(reader, str(path), chunks=chunks, dtype=dtype, meta=np.empty((0,) * len(shape), dtype))
    return image, axis, axes


def block_sides(
    shape: tuple[int, ...], stored: tuple[int, ...], channel_axis: int | None, block: int, moving: bool = False
) -> tuple[int, ...]:
    """Return the sides of blocks: at least `block`, whole chunks as they are stored, all channels; or whole frames."""
    spatial = [axis for axis in range(len(shape)) if axis != channel_axis]
    longest = [block * block if len(spatial) == 1 else block] * len(spatial)
    if moving:
        rows, columns = (shape[axis] for axis in spatial[1:])
        longest = [max(1, block**3 // (rows * columns)), rows, columns]
    sides = list(shape)
    for axis, wanted in zip(spatial, longest, strict=True):
        sides[axis] = min(shape[axis], math.ceil(wanted / stored[axis]) * stored[axis])
    return tuple(sides)


def _place(block_info: Any) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in block_info[None]["array-location"])


def _read_zarr(path: str, block_info: Any = None) -> Array:
    import zarr

    array: Any = zarr.open(path, mode="r")
    return np.asarray(array[_place(block_info)])


def _tiff(path: Path, wanted: str | None) -> tuple[tuple[int, ...], np.dtype[Any], tuple[int, ...], int | None]:
    """Return shape, dtype, chunks and axis of the channels of a TIFF file; of a stack where its axes are told."""
    try:
        with opened(path) as tif:
            check_own(path, tif)
            page: Any = tif.pages[0]
            series, count = tif.series[0], len(tif.series)
            axes, shape, dtype = series.axes, tuple(map(int, series.shape)), np.dtype(series.dtype)
            plain = int(page.photometric) in (1, 2) and not any(map(int, page.extrasamples))
            stored = tuple(map(int, page.chunks))
    except FileFormatError:
        raise
    # A damaged file makes the decoder fail in any way: IndexError, struct.error, TiffFileError.
    except Exception as error:
        raise FileFormatError(
            f"{path}: got no TIFF file that can be read ({shortened(error)}), expected one; export it again"
        ) from error
    check_compression(path, page)
    own = axes.replace("S", "C").translate({ord(letter): None for letter in "IQ"})  # pages that say nothing
    stack = wanted is not None and len(axes) == len(wanted) > 2
    if stack and set(own) - {*"YX"} and (len(own) != len(axes) or own != wanted):
        raise FileFormatError(f"{path}: says {own} of {' x '.join(map(str, shape))}; got axes {wanted}; leave axes out")
    if count != 1 or (axes not in ("YX", "YXS", "SYX") and not stack) or dtype.kind not in "iuf" or not plain:
        raise FileFormatError(
            f"{path}: got {count} image(s) of axes {axes}, {dtype}, photometric {page.photometric!r}, expected one "
            "grey or RGB image without an alpha channel; convert it, or leave OUT a .tif, which is done in memory"
        )
    channel = {"YX": None, "YXS": 2, "SYX": 0}.get(axes)
    if len(stored) != len(shape):  # planes apart: chunks are those of one plane
        stored = (1,) * (len(shape) - len(stored)) + stored if len(stored) < len(shape) else (1, *stored[-2:])
    return shape, dtype, stored, channel


def _read_tiff(path: str, block_info: Any = None) -> Array:
    import zarr

    with opened(Path(path)) as tif, tif.aszarr() as store:
        array: Any = zarr.open(store, mode="r")
        return np.asarray(array[_place(block_info)])
