"""Sound."""

from __future__ import annotations

import io
import struct
import warnings
import wave
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from nlflow.desk.formats.media import Array, Media, Writing, check_declared
from nlflow.errors import file_error

# Chunks that hold the samples and how they are stored, fill space, or repeat what the samples say.
_OWN = (b"fmt ", b"data", b"fact", b"PEAK", b"JUNK", b"junk", b"PAD ", b"FLLR")


def decode(path: Path) -> Media:
    """See `Format.decode`."""
    from scipy.io import wavfile

    bits, wide, others, law, place = _chunks(path)
    if law:
        data, channels, rate = _of_law(path, law, place)
        note = f"{path}: what its chunks {', '.join(others)} say beside the samples is left out"
        told = (note,) if others else ()
        return Media(
            path, "wav", "signal", _by_channels(data, channels), sample_rate=rate, extras={"law": law}, notes=told
        )
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


# ---- the laws of telephones (ITU-T G.711): a byte is sign, exponent and mantissa

_LAWS = {"A-law": 6, "mu-law": 7}  # numbers of them in WAV files


def _levels(law: str) -> NDArray[np.int16]:
    """Return the 16-bit sample that each of the 256 bytes stands for."""
    byte = np.arange(256)
    code = byte ^ (0x55 if law == "A-law" else 0xFF)
    exponent, mantissa = code >> 4 & 7, code & 15
    if law == "A-law":
        size = np.where(exponent == 0, (mantissa << 4) + 8, ((mantissa << 4) + 0x108) << np.maximum(exponent - 1, 0))
        return np.where(code & 0x80, size, -size).astype(np.int16)
    size = (((mantissa << 3) + 0x84) << exponent) - 0x84
    return np.where(code & 0x80, -size, size).astype(np.int16)


def _to_bytes(values: Array, law: str) -> bytes:
    """Return samples as bytes of a law, each the nearest."""
    levels, last = np.unique(_levels(law)[::-1], return_index=True)
    code = 255 - last  # of the two zeros of mu-law that above
    middle = (levels[1:].astype(np.int32) + levels[:-1]) / 2
    return code[np.searchsorted(middle, values)].astype(np.uint8).tobytes()


def _of_law(path: Path, law: str, place: tuple[int, int]) -> tuple[Array, int, int]:
    with path.open("rb") as stream:
        head = stream.read(place[0])
        at = head.index(b"fmt ") + 8
        channels, rate = (
            int.from_bytes(head[at + 2 : at + 4], "little"),
            int.from_bytes(head[at + 4 : at + 8], "little"),
        )
        return _levels(law)[np.frombuffer(stream.read(place[1]), np.uint8)], channels, rate


def _by_channels(data: Array, channels: int) -> Array:
    return data if channels == 1 else data[: len(data) // channels * channels].reshape(-1, channels)


def _write_law(stream: Any, values: Array, rate: int, law: str) -> None:
    channels = 1 if values.ndim == 1 else values.shape[1]
    body = _to_bytes(np.ascontiguousarray(values), law)
    form = struct.pack("<HHIIHHH", _LAWS[law], channels, rate, rate * channels, channels, 8, 0)
    fact = struct.pack("<I", len(values))
    chunks = [(b"fmt ", form), (b"fact", fact), (b"data", body)]
    packed = b"".join(name + struct.pack("<I", len(part)) + part + bytes(len(part) % 2) for name, part in chunks)
    stream.write(b"RIFF" + struct.pack("<I", 4 + len(packed)) + b"WAVE" + packed)


# ---- AU: a header of six numbers, words, and samples

_AU = {2: "i1", 3: ">i2", 5: ">i4", 6: ">f4", 7: ">f8"}  # how samples are stored, by its number
_AU_LAWS = {1: "mu-law", 27: "A-law"}
_UNKNOWN = 2**32 - 1  # of a length


def decode_au(path: Path) -> Media:
    """See `Format.decode`."""
    content = path.read_bytes()
    if len(content) < 24:
        raise file_error(path, "a header that is cut off", "a whole AU file", "copy or export it again")
    start, length, kind, rate, channels = struct.unpack(">IIIII", content[4:24])
    law = _AU_LAWS.get(kind, "")
    if not law and kind not in _AU:
        raise file_error(path, f"samples of kind {kind}", "linear or mu-law or A-law ones", "convert it to WAV")
    body = content[start:]
    if length == _UNKNOWN:
        length = len(body)
    if not 24 <= start <= len(content) or length > len(body) or channels < 1:
        got = f"a header that tells of {length} bytes of samples, of which there are {len(body)}"
        raise file_error(path, got, "a whole AU file", "copy or export it again")
    stored = np.dtype("u1" if law else _AU[kind])
    data = np.frombuffer(body[: length // stored.itemsize * stored.itemsize], stored)
    data = _levels(law)[data] if law else data.astype(stored.newbyteorder("="))
    extras = {"au": (kind, content[24:start])} | ({"law": law} if law else {})
    return Media(path, "au", "signal", _by_channels(data, channels), sample_rate=rate, extras=extras)


def encode_au(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """See `Format.encode`."""
    own = {number: law for number, law in _AU_LAWS.items() if law == media.extras.get("law")}
    like = {number: name for number, name in _AU.items() if np.dtype(name).newbyteorder("=") == values.dtype}
    law = own if values.dtype == np.int16 else {}
    kind = next(iter(law or like))
    body = _to_bytes(np.ascontiguousarray(values), law[kind]) if law else values.astype(like[kind]).tobytes()
    words = media.extras.get("au", (0, bytes(8)))[1]
    channels = 1 if values.ndim == 1 else values.shape[1]
    head = struct.pack(">IIIII", 24 + len(words), min(len(body), _UNKNOWN), kind, media.sample_rate or 0, channels)
    stream.write(b".snd" + head + words + body)


def _chunks(path: Path) -> tuple[int, bool, list[str], str, tuple[int, int]]:
    """Return the bits of a sample, whether 24 are stored in 32, and what chunks there are beside samples and format.

    And the law of the samples, empty for linear ones, with the place of the samples and their length.
    """
    bits, wide, others, long, length = 0, False, list[str](), 0, path.stat().st_size
    law, place = "", (0, 0)
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
                place = (body, size)
                check_declared(path, size, length, copies=3)  # of 24 bits there are two, one of them with 32
            elif name == b"fmt ":
                fields = stream.read(16)
                channels, block, bits = (int.from_bytes(fields[at : at + 2], order) for at in (2, 12, 14))
                wide = bits == 24 and block == 4 * channels
                number = int.from_bytes(fields[:2], order)
                law = next((name for name, known in _LAWS.items() if known == number and bits == 8), "")
            elif form == b"RF64" and name == b"ds64":  # the sizes of files beyond 4 GiB: of all, of the samples
                long = int.from_bytes(stream.read(16)[8:], order)
            elif name not in _OWN and name.isascii() and name.decode().isprintable():
                others.append(name.decode().strip())
            stream.seek(body + size + size % 2)  # counted from its beginning: a chunk may be shorter than its header
    return bits, wide, sorted(set(others)), law, place


def encode(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """See `Format.encode`."""
    from scipy.io import wavfile

    buffer = io.BytesIO()  # both writers want to seek, and close what they cannot
    if media.extras.get("bits") == 24 and values.dtype == np.int32:
        _write_24_bits(buffer, values, media.sample_rate or 0)
    elif "law" in media.extras and values.dtype == np.int16:
        _write_law(buffer, values, media.sample_rate or 0, media.extras["law"])
    else:
        wavfile.write(buffer, media.sample_rate or 0, values)
    stream.write(buffer.getbuffer())


def _write_24_bits(buffer: Any, values: Array, rate: int) -> None:
    rounded = np.clip((values.astype(np.int64) + 128) >> 8, -(2**23), 2**23 - 1).astype("<i4")
    with wave.open(buffer, "wb") as sound:
        sound.setparams((1 if values.ndim == 1 else values.shape[1], 3, rate, 0, "NONE", ""))
        sound.writeframes(np.ascontiguousarray(rounded)[..., np.newaxis].view(np.uint8)[..., :3].tobytes())
