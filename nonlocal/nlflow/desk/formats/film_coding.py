"""What a film is beside its frames, and how one like it is coded."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.desk.formats.media import extension, lacking
from nlflow.errors import FileFormatError, file_error, install_command

#: The quality of a film that is written: constant rate factor of H.264 and VP9, where 0 is best.
QUALITY = 12
CONTAINERS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska", ".webm": "webm", ".avi": "avi"}


def need_av(path: Path) -> Any:
    """Return PyAV, or raise `FileFormatError` where it is not installed."""
    try:
        import av
    except ImportError as error:
        raise lacking(path, "PyAV", install_command("video")) from error
    return av


def open_film(path: Path) -> Any:
    """Return a film, open for reading.

    Its demuxer is that of its name: a playlist that is called a film would open other files.
    """
    av = need_av(path)
    form = CONTAINERS[extension(path)]
    try:
        return av.open(str(path), "r", format=form, options={"protocol_whitelist": "file"}, metadata_errors="replace")
    except av.error.FFmpegError as error:
        got = f"no {form} film ({error.strerror})"
        raise file_error(path, got, "a film as its name says", "copy or export it again, or rename it") from error


@dataclass(frozen=True)
class VideoInfo:
    """What a film is beside its frames.

    Attributes
    ----------
    path : Path
        The film, from which sound is copied.
    shape : tuple of int
        Of a frame: (H, W) or (H, W, 3).
    dtype : numpy.dtype
        uint8 or uint16.
    bits : int
        Of a sample.
    rate : Fraction
        Frames a second, on average.
    time_base : Fraction
        Seconds of one unit of a frame's time.
    count : int
        Frames that the header tells of, 0 if it does not.
    duration : float
        Seconds that the header tells of, 0 if it does not.
    pixels : str
        The format of pixels, as FFmpeg calls it.
    codec : str
    colours : tuple of int
        Range, matrix, primaries and transfer, as FFmpeg counts them.
    aspect : Fraction or None
        Of a pixel.
    matrix : tuple of int
        How the film is turned when it is shown; empty if it is not.
    metadata, words : dict
        Of the file, and of its pictures.
    others : tuple of (str, str)
        Kind and codec of each stream beside the pictures.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    bits: int
    rate: Fraction
    time_base: Fraction
    count: int = 0
    duration: float = 0.0
    pixels: str = "yuv420p"
    codec: str = ""
    colours: tuple[int, int, int, int] = (0, 2, 2, 2)
    aspect: Fraction | None = None
    matrix: tuple[int, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    others: tuple[tuple[str, str], ...] = ()
    interlaced: bool = False


def choose(path: Path, info: VideoInfo, quality: str | int) -> tuple[str, str, dict[str, str], str]:
    """Return the codec of a film to write, its format of pixels, its options, and words for the user.

    Raises
    ------
    FileFormatError
        If no codec that is installed fits the file's name, its pixels and the quality.
    """
    av = need_av(path)
    ending, pixels = extension(path), info.pixels.replace("yuvj", "yuv")
    if pixels.startswith(("yuva", "ya", "gbra", "rgba", "bgra", "argb", "abgr")):  # opacity is not denoised
        pixels = "gray" if pixels.startswith("ya") else f"yuv{pixels[4:]}" if pixels.startswith("yuva") else "rgb24"
    colours = pixels.startswith(("rgb", "bgr", "gbr", "0rgb", "pal", "abgr"))
    lossless = quality == "lossless"
    tried: list[tuple[str, dict[str, str], str]] = []
    x264, vp9 = "libx264rgb" if colours and info.bits == 8 else "libx264", "libvpx-vp9"
    if ending == ".webm":
        tried.append((vp9, {"lossless": "1"} if lossless else {"crf": str(quality), "b": "0"}, "VP9"))
    elif ending != ".avi" and not (lossless and ending == ".mkv"):
        tried.append((x264, {"qp": "0"} if lossless else {"crf": str(quality)}, "H.264"))
    if ending == ".mkv" or (ending == ".avi" and lossless):
        tried.append(("ffv1", {"level": "3"}, "FFV1"))
    for codec, options, name in tried:
        if codec not in av.codecs_available:
            continue
        known = [one.name for one in av.codec.Codec(codec, "w").video_formats or ()]
        fitting = _fitting(pixels, known, colours, info.bits)
        if codec.startswith("libx264") and _odd(fitting, info.shape):  # others hold a part of a pixel's colours
            whole = fitting.replace("420", "444").replace("422", "444")
            fitting = whole if whole in known else ""
        if not fitting:
            continue
        exact = lossless or codec == "ffv1"
        return codec, fitting, options, f"{name}, lossless" if exact else f"{name} at a rate factor of {quality}"
    what = f"{info.shape[1]} x {info.shape[0]} pixels of {info.pixels}"
    words = "lossless" if lossless else f"at a quality of {quality}"
    remedy = "name it .mkv" if ending != ".mkv" else "write .npy or .tif"
    remedy += "" if ending != ".avi" or lossless else ", or give --video-quality lossless"
    raise FileFormatError(f"{path}: {ending} files cannot hold {what} {words}; {remedy}")


def _fitting(pixels: str, known: list[str], colours: bool, bits: int) -> str:
    """Return the format of pixels of a codec that holds these without loss; empty if there is none."""
    candidates = [pixels]
    if colours:
        candidates += ["rgb24", "bgr24", "bgr0"] if bits == 8 else [f"gbrp{bits}le"]
    elif pixels.startswith("gray"):
        candidates += [f"gray{bits}le"] if bits > 8 else []
    elif pixels.startswith(("nv12", "nv21", "yuyv", "uyvy", "p010", "p210")):
        wide = "10le" if bits == 10 else ""
        candidates += [f"yuv420p{wide}" if pixels.startswith(("nv", "p010")) else f"yuv422p{wide}"]
    return next((one for one in candidates if one in known), "")


def _odd(pixels: str, shape: tuple[int, ...]) -> bool:
    """Return whether colours at half resolution do not fit the sides of a frame."""
    return ("420" in pixels and bool(shape[0] % 2 or shape[1] % 2)) or ("422" in pixels and bool(shape[1] % 2))


def copied(path: Path, info: VideoInfo) -> tuple[list[int], list[str]]:
    """Return which streams beside the pictures a film can take over, by their places, and the names of others."""
    av = need_av(path)
    with av.open(io.BytesIO(), "w", format=CONTAINERS[extension(path)]) as container:
        known = container.supported_codecs
    kept, lost = [], []
    for place, (kind, codec) in enumerate(info.others):
        if kind == "audio" and codec in known:
            kept.append(place)
        else:
            lost.append(f"{'sound' if kind == 'audio' else f'a stream of {kind}'}{f' ({codec})' if codec else ''}")
    return kept, lost
