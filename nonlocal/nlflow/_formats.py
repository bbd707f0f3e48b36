"""Decoders and encoders, one pair per file format; `nlflow.files` is the way in.

A decoder returns the samples as the file stores them and notes every conversion. An encoder gets samples that fit its
format, with the channels on the last axis: `nlflow.files` has checked that before any work began.
"""

from __future__ import annotations

import csv
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import FileFormatError

__all__ = ["DECODERS", "ENCODERS", "EXTENSIONS", "JPEG_EXIF_LIMIT", "Array", "Kind", "Media", "file_error"]

Array: TypeAlias = NDArray[Any]
Kind: TypeAlias = Literal["image", "signal"]

#: The known file name extensions and their formats.
EXTENSIONS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".tif": "tiff", ".tiff": "tiff"}
EXTENSIONS |= {".npy": "npy", ".wav": "wav", ".csv": "csv"}
# Names of a first CSV column that numbers the samples, with or without a unit: "t", "# time", "Time (s)"; an empty one
# is that of a written-out row index.
_TIME = re.compile(
    r"#?\s*(t|times?|timestamps?|date|datetime|sec|seconds?|ms|milliseconds?|minutes?|hours?|samples?|index|)"
    r"\s*([_\[(].*)?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Media:
    """What a file holds.

    Attributes
    ----------
    path : Path
        The file that was read.
    format : str
        Its format, a value of `EXTENSIONS`.
    kind : {"image", "signal"}
        What the samples are.
    data : numpy.ndarray
        The samples in the dtype of the file: an image (H, W) or (H, W, C), a signal (N,) or (N, C); in an .npy file
        the channels may lie on any axis.
    channel_axis : int or None
        Axis of the channels, counted from 0, or None for one channel without an axis of its own.
    alpha : numpy.ndarray or None
        The opacity (H, W) of an image, kept aside and written back unchanged.
    sample_rate : int or None
        Samples per second of a WAV file.
    header : tuple of str or None
        Column names of a CSV file as they stand there, that of the time column included.
    time : tuple of str or None
        The cells of a CSV file's time column, written back unchanged.
    delimiter : str
        What separates the columns of a CSV file.
    extras : dict
        Colour profile, resolution and EXIF block of an image, by Pillow's names.
    notes : tuple of str
        The conversions made while reading, for the user.
    """

    path: Path
    format: str
    kind: Kind
    data: Array
    channel_axis: int | None = None
    alpha: Array | None = None
    sample_rate: int | None = None
    header: tuple[str, ...] | None = None
    time: tuple[str, ...] | None = None
    delimiter: str = ","
    extras: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


#: Size in bytes beyond which a JPEG file cannot hold an EXIF block.
JPEG_EXIF_LIMIT = 65533


def file_error(path: Path, got: str, expected: str, remedy: str) -> FileFormatError:
    """Return the exception that says what `path` holds, what it should hold and what to do."""
    return FileFormatError(f"{path}: got {got}, expected {expected}; {remedy}")


def _from_pillow(image: Any, path: Path) -> tuple[Array, Array | None, list[str]]:
    """Return samples, opacity and notes of a Pillow image."""
    notes, mode = [], image.mode
    see_through = "transparency" in image.info
    if mode in ("P", "PA"):
        image = image.convert("RGBA" if see_through or mode == "PA" else "RGB")
        notes.append(f"{path}: palette colours converted to {image.mode}")
    elif mode == "1":
        image = image.convert("L")
        notes.append(f"{path}: 1-bit image converted to 8-bit grey, 0 and 255")
    elif mode in ("CMYK", "YCbCr", "LAB"):
        image = image.convert("RGB")
        notes.append(f"{path}: {mode} colours converted to RGB")
    elif see_through and mode in ("L", "RGB"):
        image = image.convert("LA" if mode == "L" else "RGBA")
        notes.append(f"{path}: transparent colour converted to an alpha channel")
    if see_through and image.mode[-1] != "A":
        notes.append(f"{path}: transparent colour dropped")
    if image.mode not in ("L", "LA", "RGB", "RGBA", "F", "I") and not image.mode.startswith("I;16"):
        raise file_error(path, f"samples of Pillow mode {mode}", "grey or RGB", "convert it to one of them")
    data = np.array(image)
    if image.mode in ("LA", "RGBA"):
        colours = data[..., 0] if image.mode == "LA" else data[..., :3]
        return colours.copy(), data[..., -1].copy(), notes
    return data, None, notes


def _decode_pillow(path: Path) -> Media:
    from PIL import Image, ImageOps, UnidentifiedImageError

    with path.open("rb") as stream:
        head = stream.read(26)
    is_png = head.startswith(b"\x89PNG\r\n\x1a\n")
    if is_png and len(head) == 26 and head[24] == 16 and head[25] != 0:  # Pillow would keep 8 of the 16 bits
        got = "a 16-bit PNG with colour or alpha, of which 8 bits would be read"
        raise file_error(path, got, "16-bit grey or 8 bits", "convert it to 16-bit TIFF")
    try:
        opened = Image.open(path, formats=("PNG", "JPEG"))
    except UnidentifiedImageError as error:
        raise file_error(path, "content that is no PNG or JPEG image", "an image", "export it again") from error
    except Image.DecompressionBombError as error:
        got = f"an image of more than {2 * (Image.MAX_IMAGE_PIXELS or 0)} pixels"
        raise file_error(path, got, "a smaller one", "crop it, or convert it to TIFF or NPY") from error
    with opened:
        frames, notes = getattr(opened, "n_frames", 1), []
        if opened.format == "MPO":  # a photograph with previews or a depth map behind it
            notes.append(f"{path}: the first of {frames} pictures is read")
        elif frames > 1:
            raise file_error(path, f"{frames} frames", "one image", "save the frames one by one and give each")
        opened.load()
        upright = ImageOps.exif_transpose(opened)
        if opened.getexif().get(0x0112, 1) != 1:
            notes.append(f"{path}: turned upright as its EXIF orientation says")
        data, alpha, more = _from_pillow(upright, path)
        # The colour profile of a CMYK image does not describe its RGB conversion.
        kept = ("dpi", "exif") if upright.mode == "CMYK" else ("dpi", "exif", "icc_profile")
        extras = {key: upright.info[key] for key in kept if upright.info.get(key)}
    if data.dtype == np.int32:  # older versions of Pillow hold 16-bit grey in 32 bits
        data = data.astype(np.uint16)
    form = "png" if is_png else "jpeg"
    if form != EXTENSIONS[path.suffix.lower()]:
        notes.append(f"{path}: the content is {form.upper()}, whatever its name says")
    return Media(path, form, "image", data, alpha=alpha, extras=extras, notes=(*notes, *more))


@contextmanager
def _silent(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _decode_tiff(path: Path) -> Media:
    import tifffile
    from PIL import Image

    alpha: Array | None = None
    with _silent("tifffile"), tifffile.TiffFile(path) as tif:
        page, series = cast("tifffile.TiffPage", tif.pages[0]), tif.series[0]
        if len(tif.series) > 1 or series.axes not in ("YX", "YXS", "SYX"):
            got = f"{len(tif.pages)} page(s), the array of shape {series.shape}"
            raise file_error(path, got, "one image", "save the pages one by one, or .npy with a channel axis")
        tag = page.tags.get("InterColorProfile")
        plain = int(page.photometric) in (0, 1, 2)  # white is 0, black is 0, RGB
        extras = {"icc_profile": tag.value} if tag is not None and plain else {}
        data = None
        try:
            data = series.asarray() if plain else None
        except ValueError as error:  # tifffile decodes LZW, JPEG and others with a package that need not be there
            if "imagecodecs" not in str(error):
                raise
        if data is not None:
            data, alpha, notes = _from_tiff(data, page, path)
        else:
            # From a stream, since Pillow scrambles the pixels of a turned image that it maps into memory by name.
            with path.open("rb") as stream, Image.open(stream, formats=("TIFF",)) as image:
                image.load()
                data, alpha, notes = _from_pillow(image, path)
            if data.dtype != page.dtype and page.dtype != np.bool_:  # Pillow reduces some files to 8 bits
                got = f"{page.dtype} samples, photometric {page.photometric!r}, compression {page.compression!r}"
                raise file_error(path, got, "a plain TIFF file", "save it uncompressed, as grey or RGB")
        if _orientation(page) != 1:
            notes.append(f"{path}: turned upright as its orientation tag says")
    return Media(path, "tiff", "image", np.ascontiguousarray(data), alpha=alpha, extras=extras, notes=tuple(notes))


def _orientation(page: Any) -> int:
    tag = page.tags.get("Orientation")
    return int(tag.value) if tag is not None and 1 <= tag.value <= 8 else 1


def _from_tiff(data: Array, page: Any, path: Path) -> tuple[Array, Array | None, list[str]]:
    """Return samples, opacity and notes of a TIFF page that tifffile decoded."""
    notes = []
    if data.ndim == 3 and int(page.planarconfig) == 2:
        data = np.moveaxis(data, 0, -1)
    turn = _orientation(page)
    data = data.swapaxes(0, 1) if turn >= 5 else data
    data = data[:, ::-1] if turn in (2, 3, 6, 7) else data
    data = data[::-1] if turn in (3, 4, 7, 8) else data
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


def _decode_npy(path: Path) -> Media:
    with path.open("rb") as stream:
        if stream.read(6) != b"\x93NUMPY":
            raise file_error(path, "content that is no NPY array", "an NPY file", "write it with numpy.save")
        stream.seek(0)
        try:
            data = np.load(stream, allow_pickle=False)
        except ValueError as error:
            if "allow_pickle" not in str(error):
                raise
            remedy = "save array.astype(float) instead; pickled objects are never loaded"
            raise file_error(path, "an array of Python objects", "numbers", remedy) from error
    return Media(path, "npy", "image", data)


def _decode_wav(path: Path) -> Media:
    from scipy.io import wavfile

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*EOF prematurely")  # otherwise the missing samples go unnoticed
        rate, data = wavfile.read(path)
    with path.open("rb") as stream:
        head = stream.read(4096)
    at = head.find(b"fmt ")
    bits = int.from_bytes(head[at + 22 : at + 24], "little") if at >= 0 else 0
    notes = (f"{path}: 24-bit samples are held as 32-bit ones, that is times 256",) if bits == 24 else ()
    return Media(path, "wav", "signal", data, sample_rate=int(rate), notes=notes)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _decode_csv(path: Path) -> Media:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        remedy = "export it as plain CSV"
        raise file_error(path, "bytes that are no UTF-8 text", "columns of numbers", remedy) from error
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = next((mark for mark in ";\t," if mark in first), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(cell.strip() for cell in row)]
    header, notes = None, []
    if rows and not any(map(_is_number, rows[0][1])):
        header = tuple(rows.pop(0)[1])
    if not rows:
        raise file_error(path, "no row of numbers", "columns of numbers", "export it again")
    width = len(header or rows[0][1])
    start = int(header is not None and width > 1 and _TIME.fullmatch(header[0]) is not None)
    values = np.empty((len(rows), width - start))
    for number, (line, row) in enumerate(rows):
        if len(row) != width:
            got = f"{len(row)} cell(s) in line {line}"
            raise file_error(path, got, f"{width} as in the first line", "give every line as many cells")
        for column in range(start, width):
            if not _is_number(row[column]):
                name = f" (column {header[column]!r})" if header else ""
                got = f"{row[column]!r} in line {line}, cell {column + 1}{name}"
                remedy = "correct the cell, write nan for a missing number, or remove the column"
                raise file_error(path, got, "a number with a decimal point", remedy)
            values[number, column - start] = float(row[column])
    time = tuple(row[0] for _, row in rows) if start else None
    if time is not None and header is not None:
        notes.append(f"{path}: column {header[0]!r} is kept as it is")
        steps = np.diff([float(cell) for cell in time]) if all(map(_is_number, time)) else np.ones(1)
        if len(steps) and not np.allclose(steps, steps[0], rtol=0.01, atol=0):
            notes.append(f"{path}: the steps of {header[0]!r} are unequal; the samples count as equally spaced")
    data = values[:, 0] if values.shape[1] == 1 else values
    told = tuple(notes)
    return Media(path, "csv", "signal", data, header=header, time=time, delimiter=delimiter, notes=told)


def _with_alpha(values: Array, media: Media) -> Array:
    values = values[..., 0] if values.ndim == 3 and values.shape[-1] == 1 else values
    return values if media.alpha is None else np.dstack([values, media.alpha])


def _encode_png(stream: BinaryIO, values: Array, media: Media) -> None:
    from PIL import Image

    Image.fromarray(_with_alpha(values, media)).save(stream, format="PNG", **media.extras)


def _encode_jpeg(stream: BinaryIO, values: Array, media: Media) -> None:
    from PIL import Image

    extras = dict(media.extras)
    if len(extras.get("exif", b"")) > JPEG_EXIF_LIMIT:
        del extras["exif"]
    # High quality at full colour resolution: compression must not put new noise in the place of the old.
    image = Image.fromarray(_with_alpha(values, media))
    image.save(stream, format="JPEG", quality=95, subsampling=0, **extras)


def _encode_tiff(stream: BinaryIO, values: Array, media: Media) -> None:
    import tifffile

    values = _with_alpha(values, media)
    count = values.shape[-1] - (media.alpha is not None) if values.ndim == 3 else 1
    extra = (values.shape[-1] if values.ndim == 3 else 1) - (3 if count >= 3 else 1)
    kinds = ["unspecified"] * extra
    if media.alpha is not None:
        kinds[-1] = "unassalpha"
    tifffile.imwrite(
        stream,
        values,
        photometric="rgb" if count >= 3 else "minisblack",
        planarconfig="contig" if values.ndim == 3 else None,
        extrasamples=kinds or None,
        iccprofile=media.extras.get("icc_profile"),
        metadata=None,
        software="nlflow",
    )


def _encode_npy(stream: BinaryIO, values: Array, media: Media) -> None:
    np.save(stream, values, allow_pickle=False)


def _encode_wav(stream: BinaryIO, values: Array, media: Media) -> None:
    from scipy.io import wavfile

    buffer = io.BytesIO()  # scipy wants to seek, and closes what it cannot
    wavfile.write(buffer, media.sample_rate or 0, values)
    stream.write(buffer.getbuffer())


def _encode_csv(stream: BinaryIO, values: Array, media: Media) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=media.delimiter, lineterminator="\n")
    if media.header is not None:
        writer.writerow(media.header)
    # The shortest digits that give back the same number; str of a float32 has fewer of them than that of a float64.
    cells = [[str(value) for value in row] for row in values.reshape(len(values), -1)]
    for number, row in enumerate(cells):
        writer.writerow(row if media.time is None else [media.time[number], *row])
    stream.write(text.getvalue().encode())


#: From a format to the function that reads a file of it.
DECODERS: dict[str, Callable[[Path], Media]] = {
    "png": _decode_pillow,
    "jpeg": _decode_pillow,
    "tiff": _decode_tiff,
    "npy": _decode_npy,
    "wav": _decode_wav,
    "csv": _decode_csv,
}
#: From a format to the function that writes samples to an open file.
ENCODERS: dict[str, Callable[[BinaryIO, Array, Media], None]] = {
    "png": _encode_png,
    "jpeg": _encode_jpeg,
    "tiff": _encode_tiff,
    "npy": _encode_npy,
    "wav": _encode_wav,
    "csv": _encode_csv,
}
