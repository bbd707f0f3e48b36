"""WAV files."""

from __future__ import annotations

import io
import warnings
import wave
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from nlflow.desk.formats.media import Array, Media, Writing, check_declared
from nlflow.errors import file_error

# Chunks that hold the samples and how they are stored, fill space, or repeat what the samples say.
_OWN = (b"fmt ", b"data", b"fact", b"PEAK", b"JUNK", b"junk", b"PAD ", b"FLLR")


def decode(path: Path) -> Media:
    """Read the samples of a WAV file as they are stored, and what its chunks say of them."""
    from scipy.io import wavfile

    bits, wide, others = _chunks(path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*EOF prematurely")  # otherwise the missing samples go unnoticed
        rate, data = wavfile.read(path)
    notes, extras = [], {}
    if wide and (data & 0xFF).any():
        notes.append(f"{path}: samples of which the header names 24 bits have up to 32; all of them are kept")
    elif bits == 24:
        notes.append(f"{path}: 24-bit samples are held as 32-bit ones, that is times 256")
        extras["bits"] = bits
    if others:
        notes.append(f"{path}: what its chunks {', '.join(others)} say beside the samples is left out")
    return Media(path, "wav", "signal", data, sample_rate=int(rate), extras=extras, notes=tuple(notes))


def _chunks(path: Path) -> tuple[int, bool, list[str]]:
    """Return the bits of a sample, whether 24 are stored in 32, and what chunks there are beside samples and format.

    Raises
    ------
    FileFormatError
        If the header tells of more samples than the file has; no memory has been taken for them.
    """
    bits, wide, others, long, length = 0, False, [], 0, path.stat().st_size
    with path.open("rb") as stream:
        form = stream.read(12)[:4]
        order: Literal["little", "big"] = "big" if form == b"RIFX" else "little"
        while len(head := stream.read(8)) == 8:
            name, size = head[:4], int.from_bytes(head[4:], order)
            if form == b"RF64" and name == b"data":
                size = long
            body = stream.tell()
            if name == b"data":
                if body + size > length:
                    got = f"a header that tells of {size} bytes of samples, of which there are {length - body}"
                    raise file_error(path, got, "a whole WAV file", "copy or export it again")
                check_declared(path, size, length, copies=3)  # of 24 bits there are two, one of them with 32
            elif name == b"fmt ":
                fields = stream.read(16)
                channels, block, bits = (int.from_bytes(fields[at : at + 2], order) for at in (2, 12, 14))
                wide = bits == 24 and block == 4 * channels
            elif form == b"RF64" and name == b"ds64":  # the sizes of files beyond 4 GiB: of all, of the samples
                long = int.from_bytes(stream.read(16)[8:], order)
            elif name not in _OWN and name.isascii() and name.decode().isprintable():
                others.append(name.decode().strip())
            stream.seek(body + size + size % 2)  # counted from its beginning: a chunk may be shorter than its header
    return bits, wide, sorted(set(others))


def encode(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """Write samples that fit a WAV file, with 24 bits where the input had so many."""
    from scipy.io import wavfile

    buffer = io.BytesIO()  # both writers want to seek, and close what they cannot
    if media.extras.get("bits") == 24 and values.dtype == np.int32:
        _write_24_bits(buffer, values, media.sample_rate or 0)
    else:
        wavfile.write(buffer, media.sample_rate or 0, values)
    stream.write(buffer.getbuffer())


def _write_24_bits(buffer: Any, values: Array, rate: int) -> None:
    rounded = np.clip((values.astype(np.int64) + 128) >> 8, -(2**23), 2**23 - 1).astype("<i4")
    with wave.open(buffer, "wb") as sound:
        sound.setparams((1 if values.ndim == 1 else values.shape[1], 3, rate, 0, "NONE", ""))
        sound.writeframes(np.ascontiguousarray(rounded)[..., np.newaxis].view(np.uint8)[..., :3].tobytes())
