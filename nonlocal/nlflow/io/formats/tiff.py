"""TIFF files, read and written by tifffile, whose decoders of compressed samples are those of imagecodecs.

What is here beside it: files that this package has no place for are refused before any memory is taken, colours become
RGB, and what comes with the samples is kept.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from nlflow.io.formats.media import Array, Media, check_declared, file_error
from nlflow.io.formats.pictures import from_pillow, with_alpha

# Tags that stay true of a result: texts (with the camera's name, date, author and rights), what GDAL and GeoTIFF say of
# the place on Earth and of bands. What describes the layout of the samples is written anew.
_KEPT_TAGS = (269, 270, 271, 272, 285, 306, 315, 316, 33432, 33550, 33922, 34264, 34735, 34736, 34737, 42112, 42113)
_DESCRIPTION, _ORIENTATION, _XMP = 270, 274, 700
_BLOCKS = {33723: "IPTC", 34377: "Photoshop", 34665: "EXIF", 34853: "GPS"}
_LAYOUTS = ('{"shape"', "ImageJ=", "<?xml")  # how descriptions begin that tell programs the layout of the samples
_MOST_PAGES = 1000
# Compressions whose decoders make no more than they are told to: none, faxes, LZW, JPEG, deflate, PackBits, LZMA, ZSTD.
_COMPRESSIONS = (1, 2, 3, 4, 5, 7, 8, 32773, 32946, 34925, 50000)
_JPEG = 7  # its strips and tiles have headers of their own, which are looked at
_FRAME = re.compile(rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf]...(..)(..)", re.DOTALL)  # height and width of a JPEG
_CONVERTED = {(5, 4): "CMYK", (6, 3): "YCbCr"}  # by Pillow to RGB, from a photometric and the samples of a pixel
_CENTIMETRES = {2: 2.54, 3: 1.0}  # of the units of resolution that are lengths


@contextmanager
def _silent(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def decode(path: Path) -> Media:
    """Read a TIFF file of one image."""
    import tifffile

    with _silent("tifffile"), tifffile.TiffFile(path) as tif:
        if len(tif.pages) > _MOST_PAGES:  # a series is looked for among all of them
            raise file_error(path, f"{len(tif.pages)} pages", "one image", "save the pages one by one")
        page, series = cast("tifffile.TiffPage", tif.pages[0]), tif.series[0]
        if len(tif.series) > 1 or series.axes not in ("YX", "YXS", "SYX"):
            got = f"{len(tif.pages)} page(s), the array of shape {series.shape}"
            raise file_error(path, got, "one image", "save the pages one by one, or .npy with a channel axis")
        _check_layout(path, page, series)
        check_compression(path, page)
        if int(page.compression) == _JPEG:
            _check_parts(path, page)
        stored = series.asarray()
        stored = np.moveaxis(stored, 0, -1) if series.axes == "SYX" else stored  # planes one after the other
        data, alpha, notes = _in_colours(stored, page, path)
        extras, more = _extras(page, path)
        turn = _orientation(page)
    notes += more
    data = np.ascontiguousarray(data)
    return Media(path, "tiff", "image", data, alpha=alpha, orientation=turn, extras=extras, notes=tuple(notes))


def _in_colours(data: Array, page: Any, path: Path) -> tuple[Array, Array | None, list[str]]:
    """Return grey levels or RGB, opacity and notes of the samples of a page."""
    kind = int(page.photometric)
    if kind in (0, 1, 2) or (kind == 6 and int(page.compression) == _JPEG):  # the decoder of JPEG returns RGB
        return _plain(data, page, path)
    if kind == 3 and data.ndim == 2 and data.dtype == np.uint8:
        colours = (np.asarray(page.colormap).T >> 8).astype(np.uint8)
        return colours[data], None, [f"{path}: palette colours converted to RGB"]
    count = data.shape[-1] if data.ndim == 3 else 1
    if (kind, count) not in _CONVERTED or data.dtype != np.uint8:
        got = f"{data.dtype} samples, {count} a pixel, photometric {page.photometric!r}"
        raise file_error(path, got, "a plain TIFF file", "save it uncompressed, as grey or RGB")
    from PIL import Image

    mode = _CONVERTED[kind, count]
    return from_pillow(Image.frombytes(mode, data.shape[1::-1], data.tobytes()), path)


def _check_layout(path: Path, page: Any, series: Any) -> None:
    """Refuse what a header declares and the file cannot hold, before anything is decoded."""
    samples = max(math.prod(series.shape), math.prod(page.shape))
    size = path.stat().st_size
    check_declared(path, samples * series.dtype.itemsize, size, copies=2)
    longest = max(page.databytecounts, default=0)
    if longest > size:
        got = f"a strip or tile of {longest:.0f} bytes in a file of {size}"
        raise file_error(path, got, "a whole file", "copy or export it again")
    parts = math.prod(page.chunked)
    if not page.is_contiguous and parts > len(page.dataoffsets):
        got = f"{len(page.dataoffsets)} of the {parts} strips or tiles that its header declares"
        raise file_error(path, got, "all of them", "copy or export it again")


def check_compression(path: Path, page: Any) -> None:
    """Refuse a page whose decoder may take more memory than the header of the file tells of."""
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


def _orientation(page: Any) -> int:
    tag = page.tags.get(_ORIENTATION)
    return int(tag.value) if tag is not None and 1 <= tag.value <= 8 else 1


def _plain(data: Array, page: Any, path: Path) -> tuple[Array, Array | None, list[str]]:
    """Return samples, opacity and notes of a page in grey or RGB."""
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
    if not opacity or opacity[-1] != 2 or data.ndim != 3:
        return data, None, notes
    colours, alpha = data[..., :-1], data[..., -1].copy()
    return colours[..., 0] if colours.shape[-1] == 1 else colours, alpha, notes


def _extras(page: Any, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return what comes with the pixels of a TIFF page, and notes of what is left out."""
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
    kept = []
    for code in _KEPT_TAGS:
        for tag in (tags[code],) if code in tags else ():
            if code == _DESCRIPTION and str(tag.value).startswith(_LAYOUTS):
                if not str(tag.value).startswith(_LAYOUTS[0]):  # that of tifffile holds nothing but the shape
                    notes.append(f"{path}: the description, which tells the layout of the file, is left out")
                continue
            value = tag.value.encode() if isinstance(tag.value, str) else tag.value
            kept.append((code, int(tag.dtype), 0 if isinstance(value, bytes) else tag.count, value, True))
    if kept:
        extras["tags"] = kept
    extras |= _resolution(tags)
    lost = [name for code, name in _BLOCKS.items() if code in tags]
    if lost:
        notes.append(f"{path}: the {' and '.join(lost)} block{'s are' if len(lost) > 1 else ' is'} left out")
    return extras, notes


def _resolution(tags: Any) -> dict[str, Any]:
    """Return the resolution as TIFF stores it, and in dots per inch if it has a unit."""
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


def encode(stream: BinaryIO, values: Array, media: Media) -> None:
    """Write samples of any real type as one image, uncompressed."""
    import tifffile

    values = with_alpha(values, media)
    count = values.shape[-1] - (media.alpha is not None) if values.ndim == 3 else 1
    extra = (values.shape[-1] if values.ndim == 3 else 1) - (3 if count >= 3 else 1)
    kinds = ["unspecified"] * extra
    if media.alpha is not None:
        kinds[-1] = "unassalpha"
    extras = media.extras
    horizontal, vertical, unit = extras.get("resolution") or (*extras.get("dpi", (0, 0)), 2)
    tags = list(extras.get("tags", ()))
    if media.orientation != 1:
        tags.append((_ORIENTATION, 3, 1, media.orientation, True))
    if "xmp" in extras:
        tags.append((_XMP, 1, len(extras["xmp"]), extras["xmp"], True))
    tifffile.imwrite(
        stream,
        values,
        photometric="rgb" if count >= 3 else "minisblack",
        planarconfig="contig" if values.ndim == 3 else None,
        extrasamples=kinds or None,
        iccprofile=extras.get("icc_profile"),
        resolution=(horizontal, vertical) if horizontal else None,
        resolutionunit=unit if horizontal else None,
        extratags=tags,
        metadata=None,
        software="nlflow",
    )
