"""WAV files."""

from __future__ import annotations

import io
import warnings
import wave
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nlflow._formats.media import Array, Media

__all__ = ["decode", "encode"]

# Chunks that hold the samples and how they are stored, fill space, or repeat what the samples say.
_OWN = (b"fmt ", b"data", b"fact", b"PEAK", b"JUNK", b"junk", b"PAD ", b"FLLR")


def decode(path: Path) -> Media:
    """Read the samples of a WAV file as they are stored, and what its chunks say of them."""
    from scipy.io import wavfile

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*EOF prematurely")  # otherwise the missing samples go unnoticed
        rate, data = wavfile.read(path)
    bits, others = _chunks(path)
    notes, extras = [], {}
    if bits == 24:
        notes.append(f"{path}: 24-bit samples are held as 32-bit ones, that is times 256")
        extras["bits"] = bits
    if others:
        notes.append(f"{path}: what its chunks {', '.join(others)} say beside the samples is left out")
    return Media(path, "wav", "signal", data, sample_rate=int(rate), extras=extras, notes=tuple(notes))


def _chunks(path: Path) -> tuple[int, list[str]]:
    """Return the bits of a sample, and the names of chunks that hold neither samples nor their format."""
    bits, others = 0, []
    with path.open("rb") as stream:
        stream.seek(12)
        while len(head := stream.read(8)) == 8:
            name, size = head[:4], int.from_bytes(head[4:], "little")
            if name == b"fmt ":
                bits = int.from_bytes(stream.read(16)[14:], "little")
                size -= 16
            elif name not in _OWN and name.isascii() and name.decode().isprintable():
                others.append(name.decode().strip())
            stream.seek(size + size % 2, io.SEEK_CUR)
    return bits, sorted(set(others))


def encode(stream: BinaryIO, values: Array, media: Media) -> None:
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
