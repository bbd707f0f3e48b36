"""Films as clips in memory; `nlflow.desk.formats.film` reads and writes them frame by frame."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nlflow.desk.formats.axes import arranged, in_unit
from nlflow.desk.formats.film import VideoReader, VideoWriter
from nlflow.desk.formats.film_coding import QUALITY, VideoInfo, choose, copied
from nlflow.desk.formats.media import Array, Media
from nlflow.errors import check_memory

_RATE = Fraction(25)
_DEEP = 10  # bits that H.264 holds
_WITH_ALPHA = ("yuva", "ya", "gbrap", "rgba", "bgra", "argb", "abgr")  # names of pixels begin so


def decode(path: Path) -> Media:
    """Read all frames of a film."""
    reader = VideoReader(path)
    info = reader.info
    count = length(info) or 1
    remedy = "cut it, or use a machine with more memory"
    room = info.dtype.itemsize * int(np.prod(info.shape))
    check_memory(f"{path}: {count} frames", 2 * count * room, remedy)
    times, lengths, frames = [], [], []
    for time, span, frame in reader:
        times.append(time)
        lengths.append(span)
        frames.append(frame)
        if len(frames) > count:
            check_memory(f"{path}: {len(frames)} frames", 2 * len(frames) * room, remedy)
    return clip(info, np.stack(frames), times, lengths)


def length(info: VideoInfo) -> int:
    """Return how many frames a film has by its header; 0 if that does not tell."""
    return info.count or round(info.duration * info.rate)


def clip(info: VideoInfo, data: Array, times: Sequence[int], lengths: Sequence[int]) -> Media:
    """Return the frames of a film, shape (T, H, W) or (T, H, W, C), with their times and durations."""
    path, notes = info.path, []
    if _varies(times, info):
        steps = np.diff(times)
        low, high = (1 / (float(step) * float(info.time_base)) for step in (steps.max(), steps.min()))
        notes.append(f"{path}: the frame rate varies ({low:.4g} to {high:.4g} a second); each frame keeps its time")
    if info.interlaced:
        notes.append(f"{path}: is interlaced; its frames are denoised, and written, as whole pictures")
    if info.pixels.startswith(_WITH_ALPHA):
        notes.append(f"{path}: its opacity is left out; films are written without")
    extras = {"video": {"info": info, "times": times, "lengths": lengths}}
    axes = "TYXC" if data.ndim == 4 else "TYX"
    bits = info.bits if info.bits not in (8, 16) else None
    rate = {"T": (float(1 / info.rate), "s")}
    return Media(path, "video", "clip", data, extras=extras, notes=tuple(notes), axes=axes, scale=rate, bits=bits)


def _info(path: Path, media: Media) -> VideoInfo | str:
    """Return what the film of a clip is like, or what of the clip no film can hold."""
    own = media.extras.get("video")
    if own is not None:
        return own["info"]  # type: ignore[no-any-return]
    sizes = dict(zip(media.axes, media.data.shape, strict=True))
    channels = sizes.get("C", 1)
    if channels not in (1, 3):
        return f"{channels} channels"
    bits = 8 if media.data.dtype == np.uint8 else media.bits or 16
    if bits > _DEEP and not path.name.lower().endswith(".mkv"):
        return "samples of 16 bits"
    seconds = in_unit(media.scale.get("T"), "s")
    rate = Fraction(1 / seconds).limit_denominator(1001) if seconds else _RATE
    even = not (sizes["Y"] % 2 or sizes["X"] % 2)
    deep = "" if bits == 8 else f"{next(known for known in (10, 12, 14, 16) if known >= bits)}le"
    grey = f"gray{deep}" if path.name.lower().endswith(".mkv") else f"yuv420p{deep}" if even else f"yuv444p{deep}"
    colour = f"gbrp{deep}" if bits > _DEEP else f"yuv420p{deep}" if even else f"yuv444p{deep}"
    pixels = grey if channels == 1 else colour
    shape = (sizes["Y"], sizes["X"], 3) if channels == 3 else (sizes["Y"], sizes["X"])
    width = 8 if bits == 8 else int(deep[:-2])
    return VideoInfo(media.path, shape, media.data.dtype, width, rate, 1 / rate, pixels=pixels, colours=(1, 2, 2, 2))


def _quality(media: Media) -> str | int:
    quality: str | int = media.extras.get("video_quality", QUALITY)
    return quality


def check(path: Path, media: Media) -> str:
    """Return what of a clip no film can hold; empty if all is well."""
    info = _info(path, media)
    if isinstance(info, str):
        return info
    choose(path, info, _quality(media))
    own = media.extras.get("video", {})
    if path.suffix.lower() == ".avi" and _varies(own.get("times", ()), info):
        return "frames at unequal times"
    return ""


def _varies(times: Sequence[int], info: VideoInfo) -> bool:
    """Return whether frames are unequally far apart, by more than the rounding of times to milliseconds."""
    steps = np.diff(times)
    return bool(steps.size and steps.max() - steps.min() > max(1, 1.5e-3 / float(info.time_base)))


def notes(path: Path, media: Media) -> list[str]:
    """Return how a film is coded, and what of its input it lacks."""
    info: Any = _info(path, media)
    _, pixels, _, words = choose(path, info, _quality(media))
    found = [f"{path}: coded as {words}" + ("" if pixels == info.pixels else f", with pixels of {pixels}")]
    if "video" not in media.extras:
        if "T" not in media.scale:
            found.append(f"{path}: {_RATE} frames a second, since {media.path} does not say how many")
        if media.channel_axis is not None and "420" in pixels:
            found.append(f"{path}: colours at half resolution, as players want them")
        return found
    codec, *_ = choose(path, info, _quality(media))
    _, lost = copied(path, info)
    if info.aspect not in (None, 1) and codec in ("ffv1", "libvpx-vp9"):
        lost.append(f"the shape of its pixels ({info.aspect.numerator}:{info.aspect.denominator})")
    if lost:
        found.append(f"{path}: {' and '.join(lost)} {'are' if len(lost) > 1 else 'is'} left out")
    return found


def encode(stream: BinaryIO, values: Array, media: Media) -> None:
    """Write a clip as a film."""
    path = Path(media.extras["target"])
    info: Any = _info(path, media)
    own = media.extras.get("video", {})
    values = arranged(values, media.axes, "TYXC" if len(info.shape) == 3 else "TYX")
    times = own.get("times", range(len(values)))
    lengths = own.get("lengths", [1] * len(values))
    with VideoWriter(stream, path, info, _quality(media)) as writer:
        for time, span, frame in zip(times, lengths, values, strict=True):
            writer.write(time, span, frame)
