"""What content says."""

from __future__ import annotations

import codecs
import re
import zlib
from pathlib import Path
from typing import Literal

from nlflow.errors import quoted

#: How many bytes from the start of a file tell what it is.
HEAD = 4096
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", ".png"), (b"\xff\xd8\xff", ".jpg"), (b"GIF87a", ".gif"), (b"GIF89a", ".gif"),
    (b"II*\0", ".tif"), (b"MM\0*", ".tif"), (b"II+\0", ".tif"), (b"MM\0+", ".tif"), (b"\x93NUMPY", ".npy"),
    (b"MATLAB 5.0", ".mat"), (b"MATLAB 7.3", ".mat"), (b"\x89HDF\r\n\x1a\n", ".h5"), (b"\x1a\x45\xdf\xa3", ".mkv"),
    (b"FUJIFILMCCD-RAW", ".raf"), (b"IIU\0", ".rw2"), (b"IIRO", ".orf"), (b"IIRS", ".orf"), (b"%PDF-", ".pdf"),
    (b"8BPS", ".psd"), (b"SIMPLE  =", ".fits"), (b"\xff\x0a", ".jxl"), (b"\0\0\0\x0cJXL ", ".jxl"),
    (b"\0\0\0\x0cjP  ", ".jp2"), (b"\xff\x4f\xff\x51", ".jp2"), (b"\x76\x2f\x31\x01", ".exr"), (b"#?RADIANCE", ".hdr"),
    (b"fLaC", ".flac"), (b"OggS", ".ogg"), (b"ID3", ".mp3"),
    (b"PAR1", ".parquet"), (b".snd\0\0", ".au"),
)  # fmt: skip
_RIFF = {b"WAVE": ".wav", b"WEBP": ".webp", b"AVI ": ".avi"}
_HEIF = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
_BMP_HEADERS = (12, 40, 52, 56, 64, 108, 124)
_REDUCED, _MAKER, _INNER, _DNG_VERSION = 254, 271, 330, 50706  # numbers of tags
_NUMBERS = set(b"0123456789+-.,;eE \t\r\n")

_CONVERT = "convert it first, with ImageMagick (before version 7 its command is convert): magick {name} {stem}.png"
_EXPORT = "export it as .png or .tif from the program that made it"
#: Formats that are not read: from an extension to what a file is and what to do with it.
FOREIGN = {
    ".heic": ("a HEIC picture", "convert it first: heif-convert {name} {stem}.png"),
    ".jxl": ("a JPEG XL picture", "convert it first: djxl {name} {stem}.png"),
    ".jp2": ("a JPEG 2000 picture", "convert it first: opj_decompress -i {name} -o {stem}.tif"),
    ".psd": ("a Photoshop document", _EXPORT),
    ".xcf": ("a GIMP document", _EXPORT),
    ".pdf": ("a PDF document", "draw its pages as pictures first: pdftoppm -r 300 -png {name} {stem}"),
    ".svg": ("an SVG drawing", "draw it as a picture first: rsvg-convert -o {stem}.png {name}"),
    ".exr": ("an OpenEXR picture", "convert it first: oiiotool {name} -o {stem}.tif"),
    ".hdr": ("a Radiance picture", "convert it first: oiiotool {name} -o {stem}.tif"),
    ".pam": ("a PAM picture", _CONVERT),
    ".tga": ("a Targa picture", _CONVERT),
    ".dcm": ("a DICOM file", "convert the folder of the series to NIfTI first: dcm2niix -o . FOLDER"),
    ".fits": ("a FITS file", 'save its array first: python -c "import sys, numpy; from astropy.io import fits; '
              'numpy.save(sys.argv[2], fits.getdata(sys.argv[1]))" {name} {stem}.npy'),
    ".mp3": ("compressed sound", "decode it first: ffmpeg -i {name} {stem}.wav"),
    ".xlsx": ("an Excel sheet", "save it as CSV from the program that made it"),
    ".zip": ("a ZIP archive", "unpack it first: unzip {name}"),
    ".html": ("a web page", "save the picture itself: right click it, Save Image As"),
}  # fmt: skip
_SAME = {".heif": ".heic", ".hif": ".heic", ".j2k": ".jp2", ".jpx": ".jp2", ".psb": ".psd", ".fit": ".fits",
         ".fts": ".fits", ".pfm": ".pam", ".dicom": ".dcm", ".flac": ".mp3",
         ".ogg": ".mp3", ".m4a": ".mp3", ".xls": ".xlsx", ".htm": ".html"}  # fmt: skip


def foreign(path: Path, extension: str) -> tuple[str, str]:
    got, way = FOREIGN.get(_SAME.get(extension, extension), ("", ""))
    return got, way.format(name=quoted(path), stem=quoted(Path(path.stem)))


def by_content(head: bytes) -> str:
    """Return the extension for a file that begins with these bytes, `HEAD` of them or all; empty if unknown."""
    for magic, extension in _MAGIC:
        if head.startswith(magic):
            return _by_tags(head) if extension == ".tif" else extension
    if head[:4] in (b"RIFF", b"RIFX", b"RF64"):
        return _RIFF.get(head[8:12], "")
    if head[4:8] == b"ftyp":
        return _by_brand(head[8 : 8 + 64])
    if head[:2] == b"BM" and int.from_bytes(head[14:18], "little") in _BMP_HEADERS:
        return ".bmp"
    if head[344:347] in (b"n+1", b"ni1") or head[4:7] == b"n+2":
        return ".nii"
    if head[128:132] == b"DICM":
        return ".dcm"
    if head[:2] == b"\x1f\x8b":
        return ".nii.gz" if by_content(_unpacked(head)) == ".nii" else ""
    if head[:4] == b"PK\x03\x04":
        return _by_first_member(head)
    if re.match(rb"P[1-6]\s+[0-9#]", head):
        return ".pbm" if head[1:2] in b"14" else ".ppm"
    if re.match(rb"P7\n(#|WIDTH)|P[fF]\n[0-9]", head):
        return ".pam"
    return _by_text(head)


_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def encoding_of(head: bytes) -> tuple[bytes, str]:
    """Return the byte order mark of a text and its encoding, from the mark or from zeros between letters."""
    for bom, encoding in _BOMS:
        if head.startswith(bom):
            return bom, encoding
    if b"\0" in head[:64]:
        return b"", "utf-16-le" if head[1:2] == b"\0" else "utf-16-be"
    return b"", "utf-8"


def is_table(path: Path) -> bool:
    """Return whether at least half of the first lines of a text hold numbers only."""
    with path.open("rb") as stream:
        head = stream.read(2**16)
    bom, encoding = encoding_of(head)
    lines = [line.encode() for line in head[len(bom) :].decode(encoding, "replace").splitlines() if line.strip()]
    numbers = [line for line in lines if set(line) <= _NUMBERS and set(line) & set(b"0123456789")]
    return 2 * len(numbers) >= max(len(lines), 2)


def is_text(head: bytes) -> bool:
    """Return whether a file begins with printable characters in UTF-8; the last may be cut off."""
    try:
        start = codecs.getincrementaldecoder("utf-8-sig")().decode(head)
    except UnicodeDecodeError:
        return False
    return len(head) >= 8 and all(character.isprintable() or character in "\t\n\r\f" for character in start)


def _by_tags(head: bytes) -> str:
    """Return what a TIFF file is by the tags of its first page: a camera raw, or a picture.

    The first page of a camera raw is a small picture of the maker's, with the mosaic in another place.
    """
    order: Literal["little", "big"] = "little" if head[:1] == b"I" else "big"
    if head[8:10] == b"CR":
        return ".cr2"
    place = int.from_bytes(head[4:8], order)
    entries = head[place + 2 : place + 2 + 12 * int.from_bytes(head[place : place + 2], order)]
    tags = {int.from_bytes(entries[at : at + 2], order): int.from_bytes(entries[at + 8 : at + 12], order)
            for at in range(0, len(entries) - 11, 12)}  # fmt: skip
    if _DNG_VERSION in tags:
        return ".dng"
    return ".nef" if tags.get(_REDUCED) == 1 and {_MAKER, _INNER} <= set(tags) else ".tif"


def _by_brand(brands: bytes) -> str:
    if b"avif" in brands or b"avis" in brands:
        return ".avif"
    if brands.startswith(b"crx "):
        return ".cr3"
    return ".heic" if brands.startswith(_HEIF) else ".mp4"


def _by_first_member(head: bytes) -> str:
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if name.endswith(b".npy"):
        return ".npz"
    return ".xlsx" if name.startswith((b"[Content_Types]", b"xl/")) else ".zip"


def _unpacked(head: bytes) -> bytes:
    """Return the first bytes of what gzip has packed, as far as they are there."""
    try:
        return zlib.decompressobj(31).decompress(head, 1024)
    except zlib.error:
        return b""


def _by_text(head: bytes) -> str:
    bom, encoding = encoding_of(head)
    if encoding != "utf-8":
        head = head[len(bom) :].decode(encoding, "replace").encode()
    start = head[:1024].removeprefix(codecs.BOM_UTF8).lstrip().lower()
    if start.startswith((b"<svg", b"<?xml")) and b"<svg" in head.lower():
        return ".svg"
    if start.startswith((b"<!doctype html", b"<html")):
        return ".html"
    lines = [line for line in head.splitlines() if line.strip() and not line.lstrip().startswith((b"#", b"%"))]
    # The first line may hold names, the last one may be cut off.
    rows = lines[1:-1] or lines[1:] or lines
    numbers = all(set(row.lower().replace(b"nan", b"").replace(b"inf", b"")) <= _NUMBERS for row in rows)
    return ".csv" if rows and numbers and any(48 <= byte < 58 for byte in rows[0]) else ""
