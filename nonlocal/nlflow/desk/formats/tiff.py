"""TIFF files, read and written by tifffile, whose decoders of compressed samples are those of imagecodecs.

What is here beside it: files that this package has no place for are refused before any memory is taken, colours become
RGB, and what comes with the samples is kept. Stacks are the matter of `nlflow.desk.formats.tiff_stacks`.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nlflow.desk.formats.media import Array, Media, check_declared
from nlflow.desk.formats.pictures import from_pillow, with_alpha
from nlflow.desk.formats.tiff_pages import check_own, check_page, extras_of, opened, plain
from nlflow.desk.formats.tiff_stacks import becomes_ome, decode_stack, encode_stack, has_metadata
from nlflow.errors import file_error

__all__ = ["becomes_ome", "decode", "encode", "has_metadata", "is_stack"]

_MOST_PAGES = 100_000
_ORIENTATION, _XMP, _JPEG = 274, 700, 7
_CONVERTED = {(5, 4): "CMYK", (6, 3): "YCbCr"}  # by Pillow to RGB, from a photometric and the samples of a pixel


def decode(path: Path) -> Media:
    """Read a TIFF file of one image, or of a stack."""
    with opened(path) as tif:
        count = _count_pages(path, tif)
        check_own(path, tif)
        page, series = tif.pages[0], tif.series[0]
        if len(tif.series) > 1 or series.axes not in ("YX", "YXS", "SYX"):
            return decode_stack(path, tif, count)
        check_layout(path, page, series)
        stored = series.asarray()
        stored = np.moveaxis(stored, 0, -1) if series.axes == "SYX" else stored  # planes one after the other
        data, alpha, notes = _in_colours(stored, page, path)
        extras, more = extras_of(page, path)
        turn = _orientation(page)
    notes += more
    data = np.ascontiguousarray(data)
    return Media(path, "tiff", "image", data, alpha=alpha, orientation=turn, extras=extras, notes=tuple(notes))


def is_stack(path: Path) -> bool:
    """Return whether a TIFF file holds more than one picture; of a damaged one its reader will say more."""
    try:
        with opened(path) as tif:
            return len(tif.pages) <= _MOST_PAGES and tif.series[0].axes not in ("YX", "YXS", "SYX")
    except Exception:  # a damaged file makes tifffile fail in any way
        return False


def _count_pages(path: Path, tif: Any) -> int:
    """Return how many pages there are; a series is looked for among all of them."""
    count = len(tif.pages)
    if count > _MOST_PAGES:
        raise file_error(path, f"{count} pages", f"at most {_MOST_PAGES}", "split it")
    form, stream = tif.tiff, tif.filehandle
    stream.seek(tif.pages[-1].offset)
    entries = struct.unpack(form.tagnoformat, stream.read(form.tagnosize))[0]
    stream.seek(entries * form.tagsize, 1)
    following = stream.read(form.offsetsize)
    if len(following) < form.offsetsize or any(following):  # tifffile takes such a page for the last
        got = f"{count} page(s) and more behind its end"
        raise file_error(path, got, "a whole file", "copy or export it again")
    return count


def _in_colours(data: Array, page: Any, path: Path) -> tuple[Array, Array | None, list[str]]:
    """Return grey levels or RGB, opacity and notes of the samples of a page."""
    kind = int(page.photometric)
    if kind in (0, 1, 2) or (kind == 6 and int(page.compression) == _JPEG):  # the decoder of JPEG returns RGB
        return plain(data, page, path)
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


def check_layout(path: Path, page: Any, series: Any) -> None:
    """Refuse what a header declares and the file cannot hold, before anything is decoded."""
    samples = max(math.prod(series.shape), math.prod(page.shape))
    check_declared(path, samples * series.dtype.itemsize, path.stat().st_size, copies=2)
    check_page(path, page)


def _orientation(page: Any) -> int:
    tag = page.tags.get(_ORIENTATION)
    return int(tag.value) if tag is not None and 1 <= tag.value <= 8 else 1


def encode(stream: BinaryIO, values: Array, media: Media) -> None:
    """Write samples of any real type as one image, uncompressed; those of a stack as one."""
    import tifffile

    if media.axes:
        encode_stack(stream, values, media)
        return
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
