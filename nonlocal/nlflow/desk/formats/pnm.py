"""PNM files."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nlflow.desk.formats.media import Array, Media, Writing, check_declared
from nlflow.errors import file_error

_SPACE = rb"(?:\s|#[^\n\r]*[\n\r])"  # between the numbers of a header, with comments
_HEADER = re.compile(rb"P([1-6])" + _SPACE + rb"+(\d{1,9})" + _SPACE + rb"+(\d{1,9})")
_MOST = re.compile(_SPACE + rb"+(\d{1,5})")
_COMMENT = re.compile(rb"#[ \t]?([^\n\r]*)")
_TEXT = (1, 2, 3)  # kinds that hold their samples as text


def decode(path: Path) -> Media:
    """See `Format.decode`."""
    content = path.read_bytes()
    head = _HEADER.match(content)
    if head is None:
        raise file_error(path, "no header of a PBM, PGM or PPM file", "one", "export it again")
    kind, width, height = (int(number) for number in head.groups())
    end, most = head.end(), 1
    if kind not in (1, 4):
        found = _MOST.match(content, end)
        if found is None or not 0 < int(found[1]) < 2**16:
            raise file_error(path, "no largest value in the header", "one from 1 to 65535", "export it again")
        end, most = found.end(), int(found[1])
    samples = width * height * (3 if kind in (3, 6) else 1)
    dtype = np.dtype(np.uint8 if most < 256 else ">u2")
    check_declared(path, samples * dtype.itemsize, len(content), copies=8 if kind in _TEXT else 2)
    bits = kind == 4
    if kind in _TEXT:
        values, rest = _of_text(path, content[end:], samples, kind), b""
    else:
        body = content[end + 1 :]  # one white space ends the header
        length = height * ((width + 7) // 8) if bits else samples * dtype.itemsize
        if len(body) < length:
            got = f"a header that tells of {length} bytes of samples, of which there are {len(body)}"
            raise file_error(path, got, "a whole picture", "copy or export it again")
        values, rest = np.frombuffer(body[:length], np.uint8 if bits else dtype), body[length:].strip()
    if bits:
        values = np.unpackbits(values.reshape(height, -1), axis=1)[:, :width]
    if values.size and not 0 <= int(values.min()) <= int(values.max()) <= most:
        got = f"values from {int(values.min())} to {int(values.max())}"
        raise file_error(path, got, f"0 to {most}, as the header says", "export it again")
    data = values.reshape((height, width, 3) if kind in (3, 6) else (height, width))
    notes = [f"{path}: the first of several pictures is read"] if rest[:1] == b"P" else []
    if kind in (1, 4):  # 1 is black
        data = 255 * (1 - data)
        notes.append(f"{path}: 1-bit image converted to 8-bit grey, 0 and 255")
    comments = b"\n".join(_COMMENT.findall(content, 0, end))
    extras = {"netpbm": (kind in _TEXT, most)} | ({"comment": comments} if comments else {})
    form = "pbm" if kind in (1, 4) else "pnm"
    data = np.ascontiguousarray(data, np.uint8 if most < 256 else np.uint16)
    return Media(path, form, "image", data, extras=extras, notes=tuple(notes))


def _of_text(path: Path, body: bytes, samples: int, kind: int) -> Array:
    body = re.sub(rb"#[^\n\r]*", b"", body)
    words = list(re.sub(rb"\s", b"", body)) if kind == 1 else body.split()  # bits need no space between them
    if len(words) < samples:
        raise file_error(path, f"{len(words)} of {samples} samples", "a whole picture", "copy or export it again")
    values = np.array(words[:samples], np.int64 if kind != 1 else np.uint8)
    return np.asarray(values - ord("0") if kind == 1 else values, np.int64)


def check(media: Media, writing: Writing) -> str:
    """See `Format.check`."""
    return "3 channels" if writing.name.endswith(".pgm") and media.data.ndim == 3 and media.data.shape[-1] == 3 else ""


def encode(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """See `Format.encode`."""
    as_text, most = media.extras.get("netpbm", (False, 1))
    if most == 1 or (most < 256) != (values.dtype == np.uint8):  # another format, or bits
        most = 2 ** (media.bits or 8 * values.dtype.itemsize) - 1
    values = np.minimum(values.reshape(*values.shape[:2], -1), most)
    channels = values.shape[-1]
    kind = (2 if as_text else 5) + (channels == 3)
    comments = media.extras.get("comment", b"").splitlines()
    head = [b"P%d" % kind, *(b"# " + line for line in comments), b"%d %d" % values.shape[1::-1], b"%d" % most]
    stream.write(b"\n".join(head) + b"\n")
    if not as_text:
        stream.write(values.astype(np.uint8 if most < 256 else ">u2").tobytes())
        return
    words = np.char.mod("%d", values.reshape(-1)).tolist()
    row = max(70 // (1 + math.ceil(math.log10(most + 1))), 1)  # no line has more than 70 characters
    lines = (" ".join(words[at : at + row]) for at in range(0, len(words), row))
    stream.write(("\n".join(lines) + "\n").encode())
