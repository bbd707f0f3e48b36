"""Films and clips."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from nlflow.desk.apart import call, stream
from nlflow.desk.formats.axes import arranged, in_unit
from nlflow.desk.formats.media import Array, Media, Writing, extension, installed
from nlflow.errors import FileFormatError, check_memory, file_error, memory_limit

#: The quality of a film that is written: constant rate factor of H.264 and VP9, where 0 is best.
QUALITY = 12
CONTAINERS = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska", ".webm": "webm", ".avi": "avi"}


_need_av = partial(installed, "video", "PyAV", "av")


def _open_film(path: Path) -> Any:
    """Return a film, open for reading.

    Its demuxer is that of its name: a playlist that is called a film would open other files.
    """
    av = _need_av(path)
    form = CONTAINERS[extension(path)]
    try:
        return av.open(str(path), "r", format=form, options={"protocol_whitelist": "file"}, metadata_errors="replace")
    except av.error.FFmpegError as error:
        got = f"no {form} film ({error.strerror})"
        raise file_error(path, got, "a film as its name says", "copy or export it again, or rename it") from error


@dataclass(frozen=True)
class VideoInfo:
    """What describes a film."""

    path: Path  # the film, from which sound is copied
    shape: tuple[int, ...]  # of a frame: (H, W) or (H, W, 3)
    dtype: np.dtype[Any]  # uint8 or uint16
    bits: int  # of a sample
    rate: Fraction  # frames a second, on average
    time_base: Fraction  # seconds of one unit of a frame's time
    count: int = 0  # frames that the header tells of, 0 if it does not
    duration: float = 0.0  # seconds that the header tells of, 0 if it does not
    pixels: str = "yuv420p"  # the format of pixels, as FFmpeg calls it
    codec: str = ""
    colours: tuple[int, int, int, int] = (0, 2, 2, 2)  # range, matrix, primaries and transfer, as FFmpeg counts them
    aspect: Fraction | None = None  # of a pixel
    matrix: tuple[int, ...] = ()  # how the film is turned when it is shown; empty if it is not
    # metadata, words: of the file, and of its pictures.
    metadata: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    others: tuple[tuple[str, str], ...] = ()  # kind and codec of each stream beside the pictures
    interlaced: bool = False


def choose(writing: Writing, info: VideoInfo) -> tuple[str, str, dict[str, str], str]:
    path, quality = writing.path, QUALITY if writing.quality is None else writing.quality
    av = _need_av(path)
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
        tried.append((x264, {"qp": "0"} if lossless else {"crf": str(quality)}, "H.264 by x264"))
    if ending == ".mkv" or (ending == ".avi" and lossless):
        tried.append(("ffv1", {"level": "3"}, "FFV1"))
    for codec, options, name in tried:
        if codec not in av.codecs_available:
            continue
        known = [one.name for one in av.codec.Codec(codec, "w").video_formats or ()]
        fitting = _fitting(pixels, known, colours, info.bits)
        plain = _PLANAR.get(fitting, fitting)
        if codec.startswith("libx264") and _odd(plain, info.shape):  # others hold a part of a pixel's colours
            whole = plain.replace("420", "444").replace("422", "444")
            fitting = whole if whole in known else ""
        if not fitting:
            continue
        exact = lossless or codec == "ffv1"
        return codec, fitting, options, f"{name}, lossless" if exact else f"{name} at a rate factor of {quality}"
    what = f"{info.shape[1]} x {info.shape[0]} pixels of {info.pixels}"
    words = "lossless" if lossless else f"at a quality of {quality}"
    remedy = "name it .mkv" if ending != ".mkv" else "write .npy or .tif"
    remedy += "" if ending != ".avi" or lossless else ", or give --write quality=lossless"
    raise FileFormatError(f"{path}: {ending} files cannot hold {what} {words}; {remedy}")


# The same pixels with the two colours in planes of their own.
_PLANAR = {"nv12": "yuv420p", "nv21": "yuv420p", "nv16": "yuv422p", "nv20le": "yuv422p10le", "p010le": "yuv420p10le",
           "p210le": "yuv422p10le"}  # fmt: skip


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
    return ("420" in pixels and bool(shape[0] % 2 or shape[1] % 2)) or ("422" in pixels and bool(shape[1] % 2))


def copied(path: Path, info: VideoInfo) -> tuple[list[int], list[str]]:
    """Return the numbers of the streams beside the pictures that a film can keep, and the names of others."""
    av = _need_av(path)
    with av.open(io.BytesIO(), "w", format=CONTAINERS[extension(path)]) as container:
        known = container.supported_codecs
    kept, lost = [], []
    for place, (kind, codec) in enumerate(info.others):
        if kind == "audio" and codec in known:
            kept.append(place)
        else:
            lost.append(f"{'sound' if kind == 'audio' else f'a stream of {kind}'}{f' ({codec})' if codec else ''}")
    return kept, lost


_USUAL = (5, 1)  # the matrix and the range of a film that names none, as FFmpeg counts them: BT.601, of video
_FULL = 2  # the range of samples that use all their numbers
_MATRIX = 9  # numbers of a display matrix


def _array_format(channels: int, bits: int) -> str:
    if bits == 8:
        return "gray" if channels == 1 else "rgb24"
    return f"gray{bits}le" if channels == 1 else f"gbrp{bits}le"


def _flags() -> Any:
    """Return how colours are converted, so that they move little there and back again."""
    from av.video.reformatter import Interpolation

    return (Interpolation.LANCZOS | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT
            | Interpolation.FULL_CHR_H_INP)  # fmt: skip


def _bare(av: Any, frame: Any) -> Any:
    """Return the samples of a frame of any size, odd ones too, without what it says of them."""
    made = av.VideoFrame(frame.width, frame.height, frame.format.name)
    for new, old in zip(made.planes, frame.planes, strict=True):
        rows = np.frombuffer(old, np.uint8).reshape(old.height, old.line_size)
        content, wide = np.zeros((new.height, new.line_size), np.uint8), min(old.line_size, new.line_size)
        content[:, :wide] = rows[:, :wide]
        new.update(content)
    return made


def _is_full(pixels: str) -> bool:
    """Return whether samples of a format of pixels use all their numbers, whatever a film says of its range.

    Grey and RGB do: swscale reads them so, and with it all players that use FFmpeg.
    """
    return pixels.startswith(("gray", "rgb", "bgr", "gbr", "yuvj"))


class VideoReader:
    """Read a film frame by frame: (time in units of ``info.time_base``, duration in them or 0, frame).

    `FileFormatError` for what is no film, for a damaged one and, at its end, for one that was cut off.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.info: VideoInfo = call(f"{__name__}:info_of", path, memory_limit())

    def __iter__(self) -> Iterator[tuple[int, int, Array]]:
        return stream(f"{__name__}:frames_of", self.path, memory_limit(), info=self.info)


def info_of(path: Path) -> VideoInfo:
    av = _need_av(path)
    with _open_film(path) as container:
        try:
            return _look(path, container)
        except av.error.FFmpegError as error:
            got = f"a damaged film ({error.strerror})"
            raise file_error(path, got, "a whole film", "copy or export it again") from error


def _look(path: Path, container: Any) -> VideoInfo:
    videos = container.streams.video
    if not videos:
        raise file_error(path, "no pictures", "a film", "check the name")
    stream = videos[0]
    frame = next(iter(container.decode(stream)), None)
    if frame is None:
        raise file_error(path, "no frame that can be decoded", "a whole film", "copy or export it again")
    parts = frame.format.components
    depth = max(part.bits for part in parts)
    bits = next(known for known in (8, 10, 12, 14, 16, 32) if known >= depth)
    if bits > 16:
        raise file_error(path, f"pixels of {depth} bits", "at most 16", "convert it")
    channels = 1 if len(parts) == 1 or frame.format.name.startswith("ya") else 3
    shape = (frame.height, frame.width) if channels == 1 else (frame.height, frame.width, 3)
    matrix: tuple[int, ...] = ()
    for entry in frame.side_data:
        if str(entry.type).endswith("DISPLAYMATRIX"):
            matrix = tuple(np.frombuffer(bytes(entry), np.int32)[:_MATRIX].tolist())
    context = stream.codec_context
    rate = stream.average_rate or stream.guessed_rate or stream.base_rate
    base = stream.time_base or Fraction(1, 90000)
    others = [(one.type, one.codec_context.name if one.type in ("audio", "video") else "")
              for one in container.streams if one is not stream]  # fmt: skip
    return VideoInfo(
        path, shape, np.dtype(np.uint8 if bits == 8 else np.uint16), bits, Fraction(rate or 25), base,
        count=stream.frames, duration=_duration(container, stream, others), pixels=frame.format.name,
        codec=context.name, colours=(context.color_range, context.colorspace, context.color_primaries,
                                     context.color_trc),
        aspect=stream.sample_aspect_ratio or None, matrix=matrix, metadata=dict(container.metadata),
        words=dict(stream.metadata), others=tuple(others), interlaced=bool(frame.interlaced_frame),
    )  # fmt: skip


def _duration(container: Any, stream: Any, others: list[tuple[str, str]]) -> float:
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    told = stream.metadata.get("DURATION", "")
    with suppress(ValueError):
        hours, minutes, seconds = map(float, told.split(":"))
        return 3600 * hours + 60 * minutes + seconds
    return float(container.duration or 0) / 1e6 if not others else 0.0


def frames_of(path: Path, info: VideoInfo) -> Iterator[tuple[int, int, Array]]:
    av = _need_av(path)
    form = _array_format(3 if len(info.shape) == 3 else 1, info.bits)
    flags, packets, frames, last, damaged, longest, end, first = _flags(), 0, 0, 0, False, 0, 0, 0
    with _open_film(path) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        step = round(1 / (info.rate * info.time_base)) or 1
        try:
            for packet in container.demux(stream):
                packets += packet.size > 0
                damaged = damaged or packet.is_corrupt
                for frame in packet.decode():
                    damaged = damaged or frame.is_corrupt
                    if (frame.height, frame.width) != info.shape[:2]:
                        got = f"a frame of {frame.height} x {frame.width} after some of {info.shape[:2]}"
                        raise file_error(path, got, "frames of one size", "convert it")
                    time = frame.pts if frame.pts is not None else last + step * (frames > 0)
                    if frames and time <= last:
                        got = f"frame {frames + 1} at a time that is not after the one before"
                        raise file_error(path, got, "frames in the order of time", "convert it")
                    first = time if not frames else first
                    longest = max(longest, time - last if frames else step)
                    frames, last, end = frames + 1, time, time + int(frame.duration or step)
                    yield time, int(frame.duration or 0), _array(av, frame, form, flags)
        except av.error.FFmpegError as error:
            raise file_error(path, f"{frames} frames and damage behind them ({error.strerror})",
                             "a whole film", "copy or export it again") from error  # fmt: skip
    lost = info.duration - (end - first) * float(info.time_base)  # seconds; times may be rounded to milliseconds
    short = packets < info.count if info.count else lost > 1.5 * longest * float(info.time_base) + 0.002
    if damaged or short:
        told = f" of {info.count}" if info.count else f", {lost:.2f} s less than its header says"
        got = f"{frames} frames{told}{', some of them damaged' if damaged else ''}: it is cut off"
        raise file_error(path, got, "a whole film", "copy or export it again")


def _array(av: Any, frame: Any, form: str, flags: Any) -> Array:
    words = {}
    if "420" in frame.format.name or "422" in frame.format.name:
        # A frame that is written does not say where its colours lie between the pixels. So that they do not move,
        # the one that is read is not asked either.
        words = {"src_colorspace": frame.colorspace, "src_color_range": frame.color_range}
        frame = _bare(av, frame)
    array: Array = frame.reformat(format=form, interpolation=flags, **words).to_ndarray()
    return array


class VideoWriter:
    """Write a film like `info` frame by frame to an open file that can seek."""

    def __init__(self, stream: BinaryIO, info: VideoInfo, writing: Writing) -> None:
        path = writing.path
        self._av = _need_av(path)
        codec, pixels, options, _ = choose(writing, info)
        self.info, self._pixels = info, pixels
        self._form = _array_format(3 if len(info.shape) == 3 else 1, info.bits)
        self._source: Any = None
        self._waiting: Any = None  # a packet of sound of a later time
        self._container = self._av.open(stream, "w", format=CONTAINERS[extension(path)])
        try:
            self._begin(path, codec, options)
        except BaseException:
            self.__exit__(ValueError, None, None)
            raise

    def _begin(self, path: Path, codec: str, options: dict[str, str]) -> None:
        info = self.info
        own = ("major_brand", "minor_version", "compatible_brands", "encoder")
        self._container.metadata.update({key: text for key, text in info.metadata.items() if key not in own})
        video = self._container.add_stream(codec, rate=info.rate.limit_denominator(2**16))
        video.height, video.width = info.shape[:2]
        video.pix_fmt, video.options = self._pixels, options
        # AVI counts frames and knows no times.
        self._base = 1 / info.rate if extension(path) == ".avi" else info.time_base
        video.time_base = video.codec_context.time_base = self._base
        context = video.codec_context
        # The range that is said is that of what is written: H.264 makes grey a film of yuv420p, which players stretch
        # where it does not say that it uses all numbers.
        ranged = _FULL if _is_full(self._pixels) or info.pixels.startswith("yuvj") else info.colours[0]
        if extension(path) == ".avi":  # which does not tell what players take for granted
            self._target = _USUAL
        else:
            self._target = info.colours[1], ranged
            context.color_range, context.colorspace = ranged, info.colours[1]
            context.color_primaries, context.color_trc = info.colours[2:]
        if info.aspect is not None:
            context.sample_aspect_ratio = info.aspect
        if info.matrix:
            video.set_display_matrix(info.matrix)
        video.metadata.update({k: v for k, v in info.words.items() if k in ("language", "handler_name", "title")})
        self._video = video
        self._sound: list[tuple[Any, Any]] = []
        places, _ = copied(path, info)
        if places:
            self._source = _open_film(info.path)
            beside = [one for one in self._source.streams if one is not self._source.streams.video[0]]
            chosen = [beside[place] for place in places]
            outs = {one.index: self._container.add_stream_from_template(one) for one in chosen}
            for one in chosen:
                outs[one.index].metadata.update(one.metadata)
            self._packets = self._source.demux(*chosen)
            self._outs = outs

    def _copy_sound(self, until: float) -> None:
        """Copy sound up to a time in seconds, so that the file needs no long memory of either."""
        while self._source is not None:
            packet = self._waiting or next(self._packets, None)
            self._waiting = None
            if packet is None:
                self._source.close()
                self._source = None
            elif packet.dts is None:
                continue
            elif float(packet.dts * packet.time_base) > until:
                self._waiting = packet
                return
            else:
                packet.stream = self._outs[packet.stream.index]
                self._container.mux(packet)

    def write(self, time: int, duration: int, frame: Array) -> None:
        """Write a frame of ``info.shape`` and ``info.dtype`` at a time in units of ``info.time_base``."""
        made = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format=self._form)
        words = {} if _is_full(self._pixels) else {
            "dst_colorspace": self._target[0], "dst_color_range": self._target[1]}  # fmt: skip
        if words and self._form.startswith("gray"):
            words["src_color_range"] = _FULL  # an array uses all its numbers
        made = made.reformat(format=self._pixels, interpolation=_flags(), **words)
        made.pts = round(time * self.info.time_base / self._base)
        made.time_base = self._base
        made.duration = round(duration * self.info.time_base / self._base)
        self._copy_sound(float(time * self.info.time_base))
        self._container.mux(self._video.encode(made))

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._container.mux(self._video.encode())
                self._copy_sound(float("inf"))
        finally:
            if self._source is not None:
                self._source.close()
            with suppress(*(() if kind is None else (Exception,))):  # a film that failed has no end to write
                self._container.close()


# ---- clips in memory

_RATE = Fraction(25)
_DEEP = 10  # bits that H.264 holds
_WITH_ALPHA = ("yuva", "ya", "gbrap", "rgba", "bgra", "argb", "abgr")  # names of pixels begin so


def decode(path: Path) -> Media:
    """See `Format.decode`."""
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
    # The opacity of VP8 and VP9 is a film of its own, which FFmpeg's decoder passes over.
    if info.pixels.startswith(_WITH_ALPHA) or info.words.get("alpha_mode") == "1":
        notes.append(f"{path}: its opacity is left out; films are written without")
    extras = {"video": {"info": info, "times": times, "lengths": lengths}}
    axes = "TYXC" if data.ndim == 4 else "TYX"
    bits = info.bits if info.bits not in (8, 16) else None
    rate = {"T": (float(1 / info.rate), "s")}
    return Media(path, "video", "clip", data, extras=extras, notes=tuple(notes), axes=axes, scale=rate, bits=bits)


def _info(media: Media, writing: Writing) -> VideoInfo | str:
    """Return what the film of a clip is like, or what of the clip no film can hold."""
    own = media.extras.get("video")
    if own is not None:
        return own["info"]  # type: ignore[no-any-return]
    sizes = dict(zip(media.axes, media.data.shape, strict=True))
    channels = sizes.get("C", 1)
    if channels not in (1, 3):
        return f"{channels} channels"
    bits = 8 if media.data.dtype == np.uint8 else media.bits or 16
    if bits > _DEEP and not writing.name.endswith(".mkv"):
        return "samples of 16 bits"
    seconds = in_unit(media.scale.get("T"), "s")
    rate = Fraction(1 / seconds).limit_denominator(1001) if seconds else _RATE
    even = not (sizes["Y"] % 2 or sizes["X"] % 2)
    deep = "" if bits == 8 else f"{next(known for known in (10, 12, 14, 16) if known >= bits)}le"
    grey = f"gray{deep}" if writing.name.endswith(".mkv") else f"yuv420p{deep}" if even else f"yuv444p{deep}"
    colour = f"gbrp{deep}" if bits > _DEEP else f"yuv420p{deep}" if even else f"yuv444p{deep}"
    pixels = grey if channels == 1 else colour
    shape = (sizes["Y"], sizes["X"], 3) if channels == 3 else (sizes["Y"], sizes["X"])
    width = 8 if bits == 8 else int(deep[:-2])
    return VideoInfo(media.path, shape, media.data.dtype, width, rate, 1 / rate, pixels=pixels, colours=(1, 2, 2, 2))


def check(media: Media, writing: Writing) -> str:
    """See `Format.check`."""
    info = _info(media, writing)
    if isinstance(info, str):
        return info
    choose(writing, info)
    own = media.extras.get("video", {})
    if writing.path.suffix.lower() == ".avi" and _varies(own.get("times", ()), info):
        return "frames at unequal times (MKV files can)"
    return ""


def _varies(times: Sequence[int], info: VideoInfo) -> bool:
    """Return whether frames are unequally far apart, by more than the rounding of times to milliseconds."""
    steps = np.diff(times)
    return bool(steps.size and steps.max() - steps.min() > max(1, 1.5e-3 / float(info.time_base)))


def notes(media: Media, writing: Writing) -> list[str]:
    """See `Format.notes`."""
    path = writing.path
    info: Any = _info(media, writing)
    codec, pixels, _, words = choose(writing, info)
    found = [f"{path}: coded as {words}" + ("" if pixels == info.pixels else f", with pixels of {pixels}")]
    if "video" not in media.extras:
        if "T" not in media.scale:
            found.append(f"{path}: {_RATE} frames a second, since {media.path} does not say how many")
        if media.channel_axis is not None and "420" in pixels:
            found.append(f"{path}: colours at half resolution, as players want them")
        return found
    _, lost = copied(path, info)
    if info.aspect not in (None, 1) and codec in ("ffv1", "libvpx-vp9"):
        lost.append(f"the shape of its pixels ({info.aspect.numerator}:{info.aspect.denominator})")
    if lost:
        found.append(f"{path}: {' and '.join(lost)} {'are' if len(lost) > 1 else 'is'} left out")
    return found


def encode(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """See `Format.encode`."""
    info: Any = _info(media, writing)
    own = media.extras.get("video", {})
    values = arranged(values, media.axes, "TYXC" if len(info.shape) == 3 else "TYX")
    times = own.get("times", range(len(values)))
    lengths = own.get("lengths", [1] * len(values))
    with VideoWriter(stream, info, writing) as writer:
        for time, span, frame in zip(times, lengths, values, strict=True):
            writer.write(time, span, frame)
