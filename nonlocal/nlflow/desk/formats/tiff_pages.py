"""TIFF pages."""

from __future__ import annotations

import io
import logging
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.desk.formats.media import Array
from nlflow.domains.samples import has_value
from nlflow.errors import file_error

# Tags that stay true of a result: texts (with the camera's name, date, author and rights), what GDAL and GeoTIFF say of
# the place on Earth and of bands, what microscopes say of each page. What describes the layout of the samples is
# written anew.
_KEPT_TAGS = (269, 270, 271, 272, 285, 306, 315, 316, 33432, 33550, 33922, 34264, 34735, 34736, 34737, 42112, 42113,
              51123)  # fmt: skip
_DESCRIPTION, _XMP, NODATA = 270, 700, 42113
_BLOCKS = {33723: "IPTC", 34377: "Photoshop", 34665: "EXIF", 34853: "GPS"}
LAYOUTS = ('{"shape"', "ImageJ=", "<?xml")  # how descriptions begin that tell programs the layout of the samples
# Compressions whose decoders make no more than they are told to: none, faxes, LZW, JPEG, deflate, PackBits, LZMA, ZSTD.
_COMPRESSIONS = (1, 2, 3, 4, 5, 7, 8, 32773, 32946, 34925, 50000)
_JPEG = 7  # its strips and tiles have headers of their own, which are looked at
_FRAME = re.compile(rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf]...(..)(..)", re.DOTALL)  # height and width of a JPEG
_OTHERS = re.compile(r"""FileName\s*=\s*["']([^"']+)["']""")  # of the parts of an OME set
_CENTIMETRES = {2: 2.54, 3: 1.0}  # of the units of resolution that are lengths


@contextmanager
def silent(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class _Alone(io.BufferedReader):
    """A file that tells nobody its number, so that tifffile takes it for a stream and looks for no files beside it."""

    def fileno(self) -> int:
        raise io.UnsupportedOperation("this file is read alone")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a TIFF file with tifffile.

    Names of other files in it are not followed.
    """
    import tifffile

    # tifffile has no public word for one file; the stream alone would leave zeros in the place of parts of an OME set.
    with (
        silent("tifffile"), _Alone(io.FileIO(os.path.realpath(path))) as stream,
        tifffile.TiffFile(stream, _multifile=False) as tif,
    ):  # fmt: skip
        yield tif


def check_own(path: Path, tif: Any) -> None:
    """Refuse a file that describes other pages than it contains."""
    told = str(tif.ome_metadata or "") if tif.is_ome else ""
    others = sorted(set(_OTHERS.findall(told)) - {tif.filename})
    if others and all(one.kind != "ome" for one in tif.series):
        remedy = "join its parts in the program that made them, or give a file its own name back"
        raise file_error(path, f"a part of a set of files, with {others[0]!r}", "a stack in one file", remedy)
    for series in tif.series:
        pages = [page for page in series.pages if page is not None]
        if len(pages) < len(series.pages):
            got = f"{len(pages)} of {len(series.pages)} pages that its description tells of"
            raise file_error(path, got, "all of them", "copy or export it again")
    described, held = _planes(path, tif)
    if described != held:
        remedy = "export it again, or remove its description (TIFF tag 270), which contradicts its pages"
        raise file_error(path, f"{held} page(s) and a description that tells of {described}", f"{described}", remedy)


def _planes(path: Path, tif: Any) -> tuple[int, int]:
    """Return how many planes of the size of a page descriptions of tifffile and ImageJ tell of, and how many exist."""
    series, count = tif.series[0], len(tif.pages)
    page = series.keyframe
    samples = math.prod(page.shape)
    if len(tif.series) > 1 or series.kind not in ("shaped", "imagej") or samples == 0:
        return 0, 0
    shape, images = series.shape, count
    if series.kind == "shaped":
        shape = (tif.shaped_metadata or ({"shape": shape},))[0]["shape"]
    elif count == 1:
        images = int((tif.imagej_metadata or {}).get("images", 1))
    told = math.prod(shape) // samples
    if count > 1 or not page.is_contiguous:
        # A pyramid has its smaller pictures among the pages.
        return told, told if series.is_pyramidal and told <= count else count
    # All planes may lie behind the header of the first.
    fitting = (path.stat().st_size - page.dataoffsets[0]) // max(1, page.nbytes)
    return told, images if told < images <= fitting else told


def check_page(path: Path, page: Any) -> None:
    """Refuse a page with missing strips or tiles, or with some that unfold to more than they declare."""
    size = path.stat().st_size
    longest = max(page.databytecounts, default=0)
    if longest > size:
        got = f"a strip or tile of {longest:.0f} bytes in a file of {size}"
        raise file_error(path, got, "a whole file", "copy or export it again")
    parts = math.prod(page.chunked)
    if not page.is_contiguous and parts > len(page.dataoffsets):
        got = f"{len(page.dataoffsets)} of the {parts} strips or tiles that its header declares"
        raise file_error(path, got, "all of them", "copy or export it again")
    check_compression(path, page)
    if int(page.compression) == _JPEG:
        _check_parts(path, page)


def check_compression(path: Path, page: Any) -> None:
    """Refuse a page whose decoder may take more memory than the header declares."""
    if int(page.compression) not in _COMPRESSIONS:
        got = f"compression {page.compression!r}"
        raise file_error(path, got, "a plain TIFF file", "save it uncompressed, or with LZW, deflate or ZSTD")


def _check_parts(path: Path, page: Any) -> None:
    """Refuse JPEG parts that unfold to more pixels than their place in the page has."""
    most = math.prod(page.chunks[-2:] if page.axes.startswith("S") else page.chunks[:2])
    with path.open("rb") as stream:
        for offset, count in zip(page.dataoffsets, page.databytecounts, strict=False):
            stream.seek(offset)
            for height, width in _FRAME.findall(stream.read(count) + bytes(page.jpegtables or b"")):
                declared = int.from_bytes(height) * int.from_bytes(width)
                if declared > 2 * most + 2**16:  # a part may be filled up to whole blocks
                    got = f"a JPEG part of {declared} pixels in the place of {most}"
                    raise file_error(path, got, "a whole file", "copy or export it again")


def plain(data: Array, page: Any, path: Path) -> tuple[Array, Array | None, list[str]]:
    notes = []
    if int(page.photometric) == 0 and data.dtype.kind in "bu":
        data = ~data
        notes.append(f"{path}: inverted, since the file stores white as 0")
    if data.dtype == np.bool_:
        data = data.astype(np.uint8) * np.uint8(255)
        notes.append(f"{path}: 1-bit image converted to 8-bit grey, 0 and 255")
    opacity = [int(sample) for sample in page.extrasamples]
    if 1 in opacity:
        raise file_error(path, "colours multiplied by alpha", "unassociated alpha", "export it without alpha")
    if not opacity or opacity[-1] != 2 or data.ndim < 3:
        return data, None, notes
    colours, alpha = data[..., :-1], data[..., -1].copy()
    return colours[..., 0] if colours.shape[-1] == 1 else colours, alpha, notes


def extras_of(page: Any, path: Path, *, layout_kept: bool = False) -> tuple[dict[str, Any], list[str]]:
    extras: dict[str, Any] = {}
    notes, tags = [], page.tags
    profile = tags.get("InterColorProfile")
    if profile is not None:
        if int(page.photometric) in (5, 8, 9, 10):  # CMYK and Lab, which it describes, are converted
            notes.append(f"{path}: the colour profile, which is not one of RGB colours, is left out")
        else:
            extras["icc_profile"] = profile.value
    if _XMP in tags and isinstance(tags[_XMP].value, bytes):
        extras["xmp"] = tags[_XMP].value
    texts = str(tags[_DESCRIPTION].value) if _DESCRIPTION in tags else ""
    told = texts.startswith(LAYOUTS)
    if told and not layout_kept and not texts.startswith(LAYOUTS[0]):  # that of tifffile holds nothing but the shape
        notes.append(f"{path}: the description, which tells the layout of the file, is left out")
    kept = kept_tags(tags, without=_DESCRIPTION if told else 0)
    if kept:
        extras["tags"] = kept
    extras |= _resolution(tags)
    lost = [name for code, name in _BLOCKS.items() if code in tags]
    if lost:
        notes.append(f"{path}: the {' and '.join(lost)} block{'s are' if len(lost) > 1 else ' is'} left out")
    return extras, notes


def kept_tags(tags: Any, without: int = 0) -> list[tuple[Any, ...]]:
    kept = []
    for code in _KEPT_TAGS:
        for tag in (tags[code],) if code in tags and code != without else ():
            value = tag.value.encode() if isinstance(tag.value, str) else tag.value
            kept.append((code, int(tag.dtype), 0 if isinstance(value, bytes) else tag.count, value, True))
    return kept


def no_data(tags: list[tuple[Any, ...]], data: Array, channel: int | None = None) -> Array | None:
    """Return where pixels have the value of GDAL's tag for missing data in a channel; None without it, and for NaN."""
    value = no_data_value(next((value for code, _, _, value, _ in tags if code == NODATA), None), data.dtype)
    if value is None:
        return None
    at = has_value(data, value)
    return at if channel is None else np.broadcast_to(at.any(axis=channel, keepdims=True), at.shape)


def no_data_value(told: Any, dtype: np.dtype[Any]) -> Any:
    """Return the value of a tag in the dtype of the samples, None for NaN; of floats the nearest finite one."""
    text = (told.decode("latin-1") if isinstance(told, bytes) else str(told)).strip("\0 ")
    if dtype.kind in "iu":  # of which no value but its own stands for anything
        value, ends = _whole(text), np.iinfo(dtype)
        return None if value is None or not ends.min <= value <= ends.max else dtype.type(value)
    number = _number(text)
    if dtype.kind != "f":
        return dtype.type(number) if number in (0, 1) else None
    # 15 digits of the lowest float64 are below it.
    return None if math.isnan(number) else dtype.type(np.clip(number, np.finfo(dtype).min, np.finfo(dtype).max))


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        number = _number(text)
    return int(number) if number.is_integer() else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _resolution(tags: Any) -> dict[str, Any]:
    if not all(code in tags for code in (282, 283)):
        return {}
    pair = tuple(tuple(map(int, tags[code].value)) for code in (282, 283))
    if not all(len(part) == 2 and part[0] > 0 and part[1] > 0 for part in pair):
        return {}
    unit = int(tags[296].value) if 296 in tags else 2
    extras: dict[str, Any] = {"resolution": (*pair, unit)}
    if unit in _CENTIMETRES:
        extras["dpi"] = tuple(2.54 * part[0] / part[1] / _CENTIMETRES[unit] for part in pair)
    return extras
