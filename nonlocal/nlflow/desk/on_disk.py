"""Images on the disk, opened in blocks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.large.arrays import need_dask
from nlflow.denoising.layout import Axes
from nlflow.desk.apart import call, reason_of
from nlflow.desk.foreign import check_links, links_in, strange_codecs
from nlflow.desk.formats.axes import in_blocks
from nlflow.desk.formats.media import Media
from nlflow.desk.formats.ngff import is_group
from nlflow.desk.formats.tiff_pages import NODATA, check_compression, check_own, no_data_value, opened
from nlflow.domains.samples import check_axis
from nlflow.errors import (
    FileFormatError,
    InputError,
    NlflowError,
    check_integer,
    check_path,
    file_error,
    memory_limit,
    shortened,
)

Array = NDArray[Any]
_TIFF = (".tif", ".tiff")
_MOST_BLOCKS = 10**6  # of which each is a task


def open_array(path: Path) -> Any:
    """Return the zarr array in a folder; `FileFormatError` for anything else, and for unknown codecs."""
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
    """Open an image on the disk as a Dask array, which reads samples when they are needed.

    Parameters
    ----------
    path : path
        A zarr array (a folder), or a TIFF file of one grey or RGB image, tiled or in strips.
    channel_axis : int, optional
        Axis of channels in a zarr array. A TIFF file and the OME-Zarr group of an array tell it by themselves.
    block : int
        Wanted side of the blocks, rounded up to whole chunks of the file; of a line its square.

    Returns
    -------
    image : dask.array.Array
    channel_axis : int or None

    Raises
    ------
    FileFormatError
        For anything else.
    InputError
        For a `channel_axis` that is not that of the image, a `block` below 1, and without Dask.
    """
    place = check_path("path", path)
    axes, _, _ = told_axes(place, channel_axis, None, None)
    image, axis, _ = open_stack(place, channel_axis, axes, block, "fast")
    return image, axis


def told_axes(
    path: Path, channel_axis: int | None, axes: str | None, spacing: Any
) -> tuple[str | None, Any, tuple[str, ...]]:
    """Return axes and spacing, as given or as the OME-Zarr group of an array says, and notes."""
    if not path.is_dir() or (axes is not None and spacing is not None):
        return axes, spacing, ()
    array = open_array(path)
    shape = tuple(map(int, array.shape))
    media = Media(path, "zarr", "volume", np.broadcast_to(np.zeros((), array.dtype), shape))
    told = _told_by_group(path)
    if told is None:
        if axes is not None or channel_axis is not None or not _fits(shape, None):
            return axes, spacing, ()
        return None, spacing, _bare_notes(array, in_blocks(replace(media, axes="ZYX"), spacing))
    found, scale = told
    said = found.replace("?", "_")
    if axes is not None and axes != found:
        return axes, spacing, (f"{path}: its OME-Zarr group says {said}; read as {axes}, as given",)
    own = found.index("C") if "C" in found else None
    if channel_axis is not None and check_axis(len(shape), channel_axis) != own:
        got = f"channel_axis: got {channel_axis} for {path}, which is {said} by its OME-Zarr group"
        raise InputError(f"{got}; leave it out, or give axes")
    if not _fits(shape, found):
        raise file_error(path, f"the axes {said} of {' x '.join(map(str, shape))} by its OME-Zarr group",
                         "Y and X, and at most C and one of Z and T beside them, for blocks",
                         "name the group, which is denoised as a whole, or give axes")  # fmt: skip
    media = in_blocks(replace(media, axes=found, scale=scale), spacing)
    return found, media.spacing if spacing is None else spacing, media.notes


def _told_by_group(path: Path) -> Any:
    if not is_group(Path(os.path.realpath(path)).parent):
        return None
    try:
        return call("nlflow.desk.formats.ngff:told_by_group", path, memory_limit())
    except NlflowError:
        raise
    # A damaged description makes zarr fail in any way.
    except Exception as error:
        got = f"a group around it that cannot be read ({reason_of(error)})"
        raise file_error(path, got, "one that says its axes", "copy it anew, or give axes and spacing") from error


def _fits(shape: tuple[int, ...], axes: str | None) -> bool:
    """Return whether blocks take these axes, or without axes whether they take the array for a volume."""
    if axes is None and len(shape) != 3:
        return False
    try:
        Axes.of(shape, None, axes)
    except InputError:
        return False
    return axes is None or {*"YX"} <= {*axes}


def _bare_notes(array: Any, media: Media) -> tuple[str, ...]:
    first, *rest = media.notes
    names = ", ".join(map(str, getattr(array.metadata, "dimension_names", None) or ()))
    if not names:
        first += "; --axes TYX takes them for frames"
    elif names.upper() != ", ".join(media.axes):
        first += f", though its axes are named {names}; --axes says otherwise"
    return first, *rest


def open_stack(
    path: Path, channel_axis: int | None, axes: str | None, block: int | None, quality: str
) -> tuple[Any, int | None, str | None]:
    """Return an image or a stack on the disk as a Dask array, the axis of its channels, and its axes."""
    need_dask()
    import dask.array as da

    if not path.exists():
        raise FileFormatError(f"{path}: got no such file or folder, expected a zarr array or a TIFF file; check it")
    if path.suffix.lower() in _TIFF and path.is_file():
        shape, dtype, stored, own = _tiff(path, axes)
        if axes is None and channel_axis is not None and check_axis(len(shape), channel_axis) != own:
            found = "has no channels" if own is None else f"has its channels along axis {own}"
            raise InputError(f"channel_axis: got {channel_axis} for {path}, which {found}; leave it out")
        channel_axis = own
        reader = _read_tiff
    elif path.is_dir():
        array = open_array(path)
        shape, dtype, stored = tuple(map(int, array.shape)), array.dtype, tuple(map(int, array.chunks))
        reader = _read_zarr
    else:
        raise FileFormatError(f"{path}: got a file of another format, expected a zarr array or a TIFF file; convert it")
    if 0 in stored:
        raise FileFormatError(f"{path}: got chunks of shape {stored}, expected at least one sample; write it anew")
    if 0 in shape or not 1 <= len(shape) <= (3 if axes is None else 4):
        expected = "one to three axes" if axes is None else f"the axes {axes}"
        raise FileFormatError(f"{path}: got an array of shape {shape}, expected {expected}; name a part of it")
    axis = check_axis(len(shape), channel_axis)
    moving = False
    if axes is not None:
        placed = Axes.of(shape, axis, axes)
        axis, moving = placed.channel, placed.moving
    if block is None:
        flat = len(shape) - (axis is not None) < 3
        block = ((1024, 2048) if flat else (256, 192))[quality != "fast"]
    sides = block_sides(shape, stored, axis, check_integer("block", block, minimum=1), moving)
    if (count := math.prod(-(-size // side) for size, side in zip(shape, sides, strict=True))) > _MOST_BLOCKS:
        got = f"an array of shape {shape}, which is {count} blocks"
        raise file_error(path, got, f"at most {_MOST_BLOCKS} blocks", "name a part of it, or a larger block")
    chunks = da.core.normalize_chunks(sides, shape, dtype=dtype)
    image = da.map_blocks(reader, str(path), chunks=chunks, dtype=dtype, meta=np.empty((0,) * len(shape), dtype))
    return image, axis, axes


def block_sides(
    shape: tuple[int, ...], stored: tuple[int, ...], channel_axis: int | None, block: int, moving: bool = False
) -> tuple[int, ...]:
    """Return the sides of blocks of whole chunks, at least `block` and with all channels; of clips, of whole frames."""
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


def _block(path: str, block_info: Any, read: Callable[[Path, list[tuple[int, int]]], Array]) -> Array:
    """Return a block; what is wrong with it is an error that names the file: decoders fail in any way."""
    place = [(part.start, part.stop) for part in _place(block_info)]
    try:
        return read(Path(path), place)
    except NlflowError:
        raise
    except Exception as error:
        got = f"a damaged block at {' x '.join(f'{start}:{stop}' for start, stop in place)} ({shortened(error)})"
        raise file_error(Path(path), got, "whole ones", "copy or export it again") from error


def _read_zarr(path: str, block_info: Any = None) -> Array:
    def read(path: Path, place: list[tuple[int, int]]) -> Array:
        block: Array = call("nlflow.desk.formats.ngff:part", path, memory_limit(), place=place)
        return block

    return _block(path, block_info, read)


def _tiff(path: Path, wanted: str | None) -> tuple[tuple[int, ...], np.dtype[Any], tuple[int, ...], int | None]:
    """Return shape, dtype, chunks and axis of the channels of a TIFF file; of a stack where its axes are told."""
    try:
        with opened(path) as tif:
            check_own(path, tif)
            page: Any = tif.pages[0]
            series, count = tif.series[0], len(tif.series)
            axes, shape, dtype = series.axes, tuple(map(int, series.shape)), np.dtype(series.dtype.str)
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


def nodata_of(path: Path, dtype: np.dtype[Any]) -> Any:
    """Return the value that a TIFF file says stands for "no data", where it says one."""
    if not path.is_file():
        return None
    with opened(path) as tif:
        tags: Any = tif.pages[0].tags
        return no_data_value(tags[NODATA].value if NODATA in tags else None, dtype)


def _read_tiff(path: str, block_info: Any = None) -> Array:
    def read(path: Path, place: list[tuple[int, int]]) -> Array:
        import zarr

        with opened(path) as tif, tif.aszarr() as store:
            array: Any = zarr.open(store, mode="r")
            return np.asarray(array[tuple(slice(*part) for part in place)])

    return _block(path, block_info, read)
