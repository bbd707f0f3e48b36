"""Pictures."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nlflow.desk.formats.content import HEAD, by_content
from nlflow.desk.formats.media import EXTENSIONS, JPEG_EXIF_LIMIT, Array, Media, Writing, check_declared, installed
from nlflow.errors import file_error

_JPEG_QUALITY = 95  # of what was no JPEG file
_ORIENTATION = 0x0112  # the number of this tag in EXIF and TIFF
_WITHOUT_GREY = ("gif", "webp", "avif")  # formats that write grey levels as colours
_XMP = "XML:com.adobe.xmp"  # the key of PNG texts under which an XMP block stands


def from_pillow(image: Any, path: Path) -> tuple[Array, Array | None, list[str]]:
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


def _pixel_bytes(mode: str) -> int:
    return {"I": 4, "F": 4, "P": 4}.get(mode, 2 if mode.startswith("I;16") else len(mode))


def decode(path: Path) -> Media:
    """See `Format.decode`."""
    from PIL import Image, UnidentifiedImageError

    with path.open("rb") as stream:
        head = stream.read(HEAD)
    form = EXTENSIONS.get(by_content(head)) or EXTENSIONS[path.suffix.lower()]
    _check_head(path, form, head)
    kind = form.upper()
    try:
        opened = Image.open(path, formats=(kind,))
    except UnidentifiedImageError as error:
        raise file_error(path, f"content that is no {kind} image", "an image", "export it again") from error
    except Image.DecompressionBombError as error:
        got = f"an image of more than {2 * (Image.MAX_IMAGE_PIXELS or 0)} pixels"
        raise file_error(path, got, "a smaller one", "crop it, or convert it to TIFF or NPY") from error
    with opened:
        # Colours are held in four bytes by Pillow, and copied twice on their way into an array.
        deep = form == "png" and len(head) > 25 and head[24] == 16 and head[25] != 0  # Pillow would read 8 bits
        width = 2 ** int(deep) * _pixel_bytes(opened.mode)
        check_declared(path, math.prod(opened.size) * width, path.stat().st_size, copies=4)
        frames, notes = getattr(opened, "n_frames", 1), []
        if form == "png" and frames > 1:
            raise file_error(path, f"{frames} frames", "one image", "save the frames one by one and give each")
        if frames > 1:  # of a JPEG file a photograph with previews or a depth map behind it
            notes.append(f"{path}: the first of {frames} {'pictures' if form == 'jpeg' else 'frames'} is read")
        opened.load()
        data, alpha, more = _of_16_bits(opened, path) if deep else from_pillow(opened, path)
        extras, orientation = _extras(opened)
        if form == "jpeg" and (quality := _quality_of(opened)):
            extras["quality"] = quality
        if opened.mode == "CMYK" and extras.pop("icc_profile", None):  # it does not describe the RGB conversion
            more.append(f"{path}: the colour profile, which is one of CMYK colours, is left out")
        if opened.info.get("photoshop"):
            more.append(f"{path}: the IPTC block is left out")
    if form in _WITHOUT_GREY and data.ndim == 3 and bool((data == data[..., :1]).all()):
        data = data[..., 0].copy()
        more.append(f"{path}: its three channels are equal, and are read as grey")
    if data.dtype == np.int32:  # older versions of Pillow hold 16-bit grey in 32 bits
        data = data.astype(np.uint16)
    notes += more
    return Media(path, form, "image", data, alpha=alpha, orientation=orientation, extras=extras, notes=tuple(notes))


def _check_head(path: Path, form: str, head: bytes) -> None:
    """Refuse what Pillow would read with fewer bits than there are, or take memory for at once."""
    if form == "avif":
        from PIL import features

        if not features.check("avif"):
            got = "an AVIF picture, which needs Pillow 11.3 or newer"
            raise file_error(path, got, "what is installed", "pip install --upgrade pillow")
        place = head.find(b"av1C")
        if place >= 0 and head[place + 6 : place + 7] and head[place + 6] & 0x40:
            got = "an AVIF picture of more than 8 bits, of which 8 would be read"
            raise file_error(path, got, "8 bits", f"convert it first: avifdec -d 8 {path} {path.stem}.png")
    if form == "webp" and head[12:16] == b"VP8X":
        width, height = (1 + int.from_bytes(head[at : at + 3], "little") for at in (24, 27))
        check_declared(path, 4 * width * height, path.stat().st_size, copies=4)


def _of_16_bits(opened: Any, path: Path) -> tuple[Array, Array | None, list[str]]:
    """Return samples, opacity and notes of a PNG file with colours or opacity of 16 bits, of which Pillow reads 8."""
    import imagecodecs

    content = path.read_bytes()
    pixels = b"".join(chunk for name, chunk in _chunks(content) if name[:1].isupper())
    data = imagecodecs.png_decode(content[:_SIGNATURE] + pixels)  # which would print what is wrong with the others
    if data.shape[-1] in (2, 4):
        return (data[..., 0] if data.shape[-1] == 2 else data[..., :3]).copy(), data[..., -1].copy(), []
    return data, None, [f"{path}: transparent colour dropped"] if "transparency" in opened.info else []


_SIGNATURE, _PNG_HEAD = 8, 33  # bytes of a PNG file before its first chunk, and with that


def _chunks(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the chunks of a PNG file with their names; names of those that are needed begin with a capital."""
    at = _SIGNATURE
    while at + 12 <= len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4])
        yield content[at + 4 : at + 8], content[at:end]
        at = end


@cache
def _tables_by_quality() -> list[dict[int, list[int]]]:
    """Return the quantization tables of JPEG files that Pillow writes, of qualities 1 to 100."""
    from PIL import Image

    found = []
    for quality in range(1, 101):
        stream = io.BytesIO()
        Image.new("RGB", (8, 8)).save(stream, "JPEG", quality=quality)
        with Image.open(stream, formats=("JPEG",)) as image:
            found.append(getattr(image, "quantization"))  # noqa: B009 (of JPEG files alone, which types do not tell)
    return found


def _quality_of(image: Any) -> int:
    """Return the quality whose quantization tables are nearest to those of a JPEG picture; 0 where it has none."""
    own = [(number, table) for number, table in image.quantization.items() if number < 2]
    far = [sum(np.abs(np.subtract(table, known[number])).sum() for number, table in own)
           for known in _tables_by_quality()]  # fmt: skip
    return 1 + int(np.argmin(far)) if own else 0


def _extras(image: Any) -> tuple[dict[str, Any], int]:
    kept = ("dpi", "exif", "icc_profile", "xmp", "comment", "gamma")
    extras = {key: image.info[key] for key in kept if image.info.get(key)}
    if getattr(image, "text", None):
        extras["text"] = dict(image.text)
        if _XMP in extras["text"]:  # as older versions of Pillow give it
            extras.setdefault("xmp", str(extras["text"].pop(_XMP)).encode())
    exif = image.getexif()
    turn = exif.get(_ORIENTATION, 1)
    if "exif" not in extras and len(exif):  # in a text of a PNG file, or the orientation alone, from an XMP block
        extras["exif"] = exif.tobytes()
    return extras, turn if isinstance(turn, int) and 1 <= turn <= 8 else 1


def with_alpha(values: Array, media: Media) -> Array:
    values = values[..., 0] if values.ndim == 3 and values.shape[-1] == 1 else values
    return values if media.alpha is None else np.dstack([values, media.alpha])


def _options(media: Media, *names: str) -> dict[str, Any]:
    """Return what Pillow is to write beside the pixels: the extras of these names, and the orientation in any case."""
    from PIL import Image

    options = {name: media.extras[name] for name in names if name in media.extras}
    if "exif" not in options and media.orientation != 1:
        exif = Image.Exif()
        exif[_ORIENTATION] = media.orientation
        options["exif"] = exif.tobytes()
    return options


def encode_png(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    chunks = PngInfo()
    for key, text in media.extras.get("text", {}).items():
        chunks.add_text(key, text)
    if "xmp" in media.extras:
        chunks.add_itxt(_XMP, media.extras["xmp"].decode("utf-8", "replace"))
    if "gamma" in media.extras:
        chunks.add(b"gAMA", struct.pack(">I", round(media.extras["gamma"] * 100000)))
    options = _options(media, "dpi", "exif", "icc_profile")
    whole = with_alpha(values, media)
    if whole.ndim == 2 or whole.dtype == np.uint8:
        Image.fromarray(whole).save(stream, format="PNG", pnginfo=chunks, **options)
        return
    import imagecodecs  # Pillow writes no colours of 16 bits, but all that stands beside them

    frame = io.BytesIO()
    Image.new("L", (1, 1)).save(frame, format="PNG", pnginfo=chunks, **options)
    content = imagecodecs.png_encode(np.ascontiguousarray(whole))
    beside = b"".join(chunk for name, chunk in _chunks(frame.getvalue()) if not name[:1].isupper())
    stream.write(content[:_PNG_HEAD] + beside + content[_PNG_HEAD:])


def encode_jpeg(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    from PIL import Image

    names = ["dpi", "icc_profile", "xmp", "comment"]
    if len(media.extras.get("exif", b"")) <= JPEG_EXIF_LIMIT:
        names.append("exif")
    # The quality of the input, at full colour resolution.
    image = Image.fromarray(with_alpha(values, media))
    quality = media.extras.get("quality", _JPEG_QUALITY) if writing.quality is None else writing.quality
    image.save(stream, format="JPEG", quality=quality, subsampling=0, **_options(media, *names))


def encode_bmp(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    from PIL import Image

    Image.fromarray(with_alpha(values, media)).save(stream, format="BMP", **_options(media, "dpi"))


def encode_webp(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    from PIL import Image

    values = with_alpha(values, media)
    if values.ndim == 2 or values.shape[-1] == 2:  # the format has no grey
        values = np.dstack([values[..., 0] if values.ndim == 3 else values] * 3 + [values[..., 1:]] * (values.ndim - 2))
    options = _options(media, "exif", "icc_profile", "xmp")
    Image.fromarray(values).save(stream, format="WEBP", lossless=True, exact=True, **options)


_WEBP_MOST = 16383  # pixels of a side


def check_webp(media: Media, writing: Writing) -> str:
    """See `Format.check`."""
    return f"a side of {max(media.data.shape[:2])} pixels" if max(media.data.shape[:2]) > _WEBP_MOST else ""


def notes_webp(media: Media, writing: Writing) -> list[str]:
    """See `Format.notes`."""
    return [] if media.data.ndim == 3 else [f"{writing.path}: grey levels are written as RGB, since WebP has no grey"]


# ---- camera raws: 16-bit sRGB, the camera's own white balance, no brightening, the gamma of Rec. 709, turned upright


_need_rawpy = partial(
    installed, "raw", "rawpy", "rawpy",
    otherwise=", or develop it to a 16-bit TIFF: darktable-cli {path} {path.stem}.tif",
)  # fmt: skip


def develop(path: Path) -> Media:
    rawpy = _need_rawpy(path)
    try:
        data = _developed(path, rawpy)
    except rawpy.LibRawError as error:
        raise ValueError(f"LibRaw says: {error.args[0].decode()}") from error
    data = data[..., 0] if data.shape[-1] == 1 else data  # of a camera without colours
    note = f"{path}: developed with the camera's white balance to 16-bit sRGB; the EXIF block is left out"
    return Media(path, "raw", "image", data, notes=(note,))


def _developed(path: Path, rawpy: Any) -> Array:
    with rawpy.imread(str(path)) as raw:
        pixels = raw.sizes.raw_width * raw.sizes.raw_height
        # LibRaw holds four colours of 16 bits beside the mosaic, and three of what it returns.
        check_declared(path, 2 * pixels, path.stat().st_size, copies=1 + 4 + 3)
        data: Array = raw.postprocess(use_camera_wb=True, no_auto_bright=True, output_bps=16)
    return data
