"""Films frame by frame: a reader and a writer that hold one frame, for clips in memory and for streams.

Frames are RGB or grey, of 8 bits, or of 10 to 16 bits in numbers of 16. Times of frames are those of the file. A film
that is written has the colours, the aspect, the rotation, the sound and the words of the one that was read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from nlflow.desk.formats.film_coding import CONTAINERS, QUALITY, VideoInfo, choose, copied, need_av, open_film
from nlflow.desk.formats.media import Array, extension
from nlflow.errors import file_error

_USUAL = (5, 1)  # the matrix and the range of a film that names none, as FFmpeg counts them: BT.601, of video
_FULL = 2  # the range of samples that use all their numbers
_MATRIX = 9  # numbers of a display matrix


def _array_format(channels: int, bits: int) -> str:
    """Return the format of pixels in which frames are arrays."""
    if bits == 8:
        return "gray" if channels == 1 else "rgb24"
    return f"gray{bits}le" if channels == 1 else f"gbrp{bits}le"


def _flags() -> Any:
    """Return how colours are converted: there and back again samples move by a tenth of a level, on average."""
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
    """Read a film frame by frame.

    Parameters
    ----------
    path : Path

    Attributes
    ----------
    info : VideoInfo

    Raises
    ------
    FileFormatError
        For what is no film, for a damaged one and, when its end is reached, for one that was cut off.

    Notes
    -----
    An iteration gives (time in units of ``info.time_base``, duration in them or 0, frame), from the first frame on,
    each time anew. Memory is that of a few frames.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._av = need_av(path)
        with open_film(path) as container:
            try:
                self.info = self._look(container)
            except self._av.error.FFmpegError as error:
                got = f"a damaged film ({error.strerror})"
                raise file_error(path, got, "a whole film", "copy or export it again") from error

    def _look(self, container: Any) -> VideoInfo:
        videos = container.streams.video
        if not videos:
            raise file_error(self.path, "no pictures", "a film", "check the name")
        stream = videos[0]
        frame = next(iter(container.decode(stream)), None)
        if frame is None:
            raise file_error(self.path, "no frame that can be decoded", "a whole film", "copy or export it again")
        parts = frame.format.components
        depth = max(part.bits for part in parts)
        bits = next(known for known in (8, 10, 12, 14, 16, 32) if known >= depth)
        if bits > 16:
            raise file_error(self.path, f"pixels of {depth} bits", "at most 16", "convert it")
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
            self.path, shape, np.dtype(np.uint8 if bits == 8 else np.uint16), bits, Fraction(rate or 25), base,
            count=stream.frames, duration=self._duration(container, stream, others), pixels=frame.format.name,
            codec=context.name, colours=(context.color_range, context.colorspace, context.color_primaries,
                                         context.color_trc),
            aspect=stream.sample_aspect_ratio or None, matrix=matrix, metadata=dict(container.metadata),
            words=dict(stream.metadata), others=tuple(others), interlaced=bool(frame.interlaced_frame),
        )  # fmt: skip

    @staticmethod
    def _duration(container: Any, stream: Any, others: list[tuple[str, str]]) -> float:
        """Return the seconds that the header tells of the pictures; 0 if it does not."""
        if stream.duration and stream.time_base:
            return float(stream.duration * stream.time_base)
        told = stream.metadata.get("DURATION", "")
        with suppress(ValueError):
            hours, minutes, seconds = map(float, told.split(":"))
            return 3600 * hours + 60 * minutes + seconds
        return float(container.duration or 0) / 1e6 if not others else 0.0

    def __iter__(self) -> Iterator[tuple[int, int, Array]]:
        info = self.info
        form = _array_format(3 if len(info.shape) == 3 else 1, info.bits)
        flags, packets, frames, last, damaged, longest, end, first = _flags(), 0, 0, 0, False, 0, 0, 0
        with open_film(self.path) as container:
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
                            raise file_error(self.path, got, "frames of one size", "convert it")
                        time = frame.pts if frame.pts is not None else last + step * (frames > 0)
                        if frames and time <= last:
                            got = f"frame {frames + 1} at a time that is not after the one before"
                            raise file_error(self.path, got, "frames in the order of time", "convert it")
                        first = time if not frames else first
                        longest = max(longest, time - last if frames else step)
                        frames, last, end = frames + 1, time, time + int(frame.duration or step)
                        yield time, int(frame.duration or 0), self._array(frame, form, flags)
            except self._av.error.FFmpegError as error:
                raise file_error(self.path, f"{frames} frames and damage behind them ({error.strerror})",
                                 "a whole film", "copy or export it again") from error  # fmt: skip
        lost = info.duration - (end - first) * float(info.time_base)  # seconds; times may be rounded to milliseconds
        short = packets < info.count if info.count else lost > 1.5 * longest * float(info.time_base) + 0.002
        if damaged or short:
            told = f" of {info.count}" if info.count else f", {lost:.2f} s less than its header says"
            got = f"{frames} frames{told}{', some of them damaged' if damaged else ''}: it is cut off"
            raise file_error(self.path, got, "a whole film", "copy or export it again")

    def _array(self, frame: Any, form: str, flags: Any) -> Array:
        """Return a frame as an array."""
        words = {}
        if "420" in frame.format.name or "422" in frame.format.name:
            # A frame that is written does not say where its colours lie between the pixels. So that they do not move,
            # the one that is read is not asked either.
            words = {"src_colorspace": frame.colorspace, "src_color_range": frame.color_range}
            frame = _bare(self._av, frame)
        array: Array = frame.reformat(format=form, interpolation=flags, **words).to_ndarray()
        return array


class VideoWriter:
    """Write a film frame by frame, in the way of another.

    Parameters
    ----------
    stream : file
        Open for writing; it can seek.
    path : Path
        The name, whose extension decides the container.
    info : VideoInfo
        What the film is like; its sound is copied from ``info.path``.
    quality : int or "lossless"
        See `QUALITY`.
    """

    def __init__(self, stream: BinaryIO, path: Path, info: VideoInfo, quality: str | int = QUALITY) -> None:
        self._av = need_av(path)
        codec, pixels, options, _ = choose(path, info, quality)
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
            self._source = open_film(info.path)
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
