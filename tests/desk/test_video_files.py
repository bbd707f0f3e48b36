"""Films: frames, times, sound and what else they hold, before and after, as FFmpeg sees them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from nlflow.desk import files
from nlflow.desk.formats.film import VideoReader, VideoWriter
from nlflow.errors import FileFormatError

av = pytest.importorskip("av")

pytestmark = pytest.mark.skipif("libx264" not in av.codecs_available, reason="PyAV was built without H.264")
RATE = Fraction(30000, 1001)


def scene(count: int = 8, height: int = 48, width: int = 64) -> Any:
    """Return a smooth picture that moves, in RGB."""
    y, x = np.mgrid[:height, :width]
    frames = [128 + 90 * np.sin((x + 3 * t) / 9)[..., None] * np.cos((y - t) / 7)[..., None] * [1, 0.6, -0.7]
              for t in range(count)]  # fmt: skip
    return np.stack(frames).clip(0, 255).astype(np.uint8)


def film(
    path: Path, frames: Any, *, codec: str = "libx264", pixels: str = "yuv420p", times: Iterable[int] | None = None,
    sound: bool = False, colours: tuple[int, int, int, int] = (1, 1, 1, 1), turned: int = 0, **metadata: str,
) -> None:  # fmt: skip
    """Write a film with PyAV alone."""
    deep = pixels.endswith("10le")
    with av.open(str(path), "w") as out:
        out.metadata.update(metadata)
        video = out.add_stream(codec, rate=RATE)
        video.height, video.width = frames.shape[1:3]
        video.pix_fmt = pixels
        video.options = {"crf": "4"} if codec == "libx264" else {}
        context = video.codec_context
        context.color_range, context.colorspace, context.color_primaries, context.color_trc = colours
        if codec == "libx264":
            context.sample_aspect_ratio = Fraction(4, 3)
        if turned:
            video.set_display_rotation(turned)
        voice = out.add_stream("aac", rate=48000) if sound else None
        for time, frame in zip(times or range(len(frames)), frames, strict=True):
            form = "gray" if frame.ndim == 2 else "gbrp10le" if deep else "rgb24"
            made = av.VideoFrame.from_ndarray(frame, format=form).reformat(
                format=pixels, dst_colorspace=colours[1], dst_color_range=colours[0])  # fmt: skip
            made.pts, made.time_base = time, 1 / RATE
            out.mux(video.encode(made))
        out.mux(video.encode())
        if voice is not None:
            tone = np.sin(np.arange(1024) / 10, dtype=np.float32)[None].repeat(2, 0)
            for number in range(12):
                part = av.AudioFrame.from_ndarray(tone, format="fltp", layout="stereo")
                part.rate, part.pts = 48000, 1024 * number
                out.mux(voice.encode(part))
            out.mux(voice.encode())


def probe(path: Path) -> dict[str, Any]:
    """Return what FFmpeg says of a film."""
    with av.open(str(path)) as container:
        video = container.streams.video[0]
        frames = list(container.decode(video))
        context = video.codec_context
        found = {
            "times": [float(frame.pts * frame.time_base) for frame in frames], "aspect": video.sample_aspect_ratio,
            "colours": (context.color_range, context.colorspace, context.color_primaries, context.color_trc),
            "turned": frames[0].rotation, "pixels": context.pix_fmt, "codec": context.name, "rate": video.average_rate,
            "duration": float(video.duration * video.time_base) if video.duration else None,
            "metadata": {key.lower(): text for key, text in container.metadata.items()},
        }  # fmt: skip
        found["shape"] = frames[0].height, frames[0].width
    with av.open(str(path)) as container:
        found["sound"] = [bytes(packet) for packet in container.demux(audio=0)] if container.streams.audio else []
    return found


def written(path: Path, target: str, quality: Any = None, **words: Any) -> tuple[files.Media, Path, tuple[str, ...]]:
    media = files.read(path, **words)
    place = path.with_name(target)
    writing = files.Writing(place, quality)
    notes = files.check_output(writing, media)
    files.write(writing, media.data, media)
    return media, place, notes


def rms(one: Any, other: Any) -> float:
    return float(np.sqrt(np.mean((one.astype(np.float64) - other) ** 2)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["out.mp4", "out.mov", "out.mkv", "out.m4v"])
def test_a_film_keeps_all_but_its_codec(tmp_path: Path, name: str) -> None:
    film(tmp_path / "a.mp4", scene(), sound=True, turned=90, title="a film", artist="nobody")
    media, place, notes = written(tmp_path / "a.mp4", name)
    assert (media.kind, media.axes, media.data.shape, media.data.dtype) == ("clip", "TYXC", (8, 48, 64, 3), np.uint8)
    assert media.spacing is None
    assert "read as TYXC, 8 frames, 3 channels of 48 x 64, 29.97 frames a second" in media.notes[0]
    assert notes == (f"{place}: coded as H.264 by x264 at a rate factor of 12",)
    before, after = probe(tmp_path / "a.mp4"), probe(place)
    assert before["sound"] == after["sound"] != []
    near = 0 if name != "out.mkv" else 1e-3  # Matroska counts milliseconds
    # Sound that begins before 0 moves all of a file whose times cannot be negative.
    shift = after["times"][0] - before["times"][0]
    np.testing.assert_allclose(np.array(after["times"]) - shift, before["times"], atol=near + 1e-12)
    for key in ("aspect", "colours", "turned", "pixels", "shape"):
        assert before[key] == after[key], key
    for key in ("title", "artist"):
        assert before["metadata"][key] == after["metadata"][key]
    if name != "out.mkv":
        assert before["duration"] == after["duration"]
    assert rms(media.data, files.read(place).data) < 2.5


@pytest.mark.parametrize("colours", [(1, 1, 1, 1), (1, 5, 5, 6), (2, 1, 1, 1), (0, 2, 2, 2)])
@pytest.mark.parametrize("name", ["out.mkv", "out.mp4", "out.avi"])
@pytest.mark.sampled(3)
def test_without_loss_but_for_the_rounding_of_colours(tmp_path: Path, name: str, colours: Any) -> None:
    film(tmp_path / "a.mp4", scene(), colours=colours)
    media, place, notes = written(tmp_path / "a.mp4", name, "lossless")
    assert "lossless" in notes[-1] or "lossless" in notes[0]
    with av.open(str(tmp_path / "a.mp4")) as one, av.open(str(place)) as other:
        pairs = zip(one.decode(video=0), other.decode(video=0), strict=True)
        for frame, copy in () if name == "out.avi" else pairs:  # AVI has no word for another matrix
            for plane, again in zip(frame.planes, copy.planes, strict=True):
                rows = [np.frombuffer(p, np.uint8).reshape(p.height, p.line_size)[:, : p.width] for p in (plane, again)]
                assert rms(*rows) < 1.0  # of 255: to RGB and back
    found = files.read(place)
    assert rms(found.data, media.data) < 1.5
    # The colours are those that went in, whatever the matrix and the range.
    assert rms(media.data, scene()) < 4


def test_ten_bits_stay_ten_bits(tmp_path: Path) -> None:
    deep = (scene().astype(np.uint16) * 4).clip(0, 1023)
    film(tmp_path / "a.mp4", deep, pixels="yuv420p10le")
    media, place, _ = written(tmp_path / "a.mp4", "out.mp4", 2)
    assert (media.data.dtype, media.bits) == (np.uint16, 10)
    assert any("10 of 16 bits are used" in note for note in media.notes)
    assert rms(media.data, deep) < 16
    assert probe(place)["pixels"] == "yuv420p10le"
    assert rms(files.read(place).data, media.data) < 8


def test_grey_films(tmp_path: Path) -> None:
    grey = scene()[..., 0]
    film(tmp_path / "a.mkv", grey, codec="ffv1", pixels="gray", colours=(0, 2, 2, 2))
    media, place, _ = written(tmp_path / "a.mkv", "out.mkv", "lossless")
    assert (media.axes, media.data.shape) == ("TYX", (8, 48, 64))
    np.testing.assert_array_equal(media.data, grey)
    np.testing.assert_array_equal(files.read(place).data, grey)


def test_opacity_is_told_to_be_left_out(tmp_path: Path) -> None:
    frames = np.concatenate([scene(), np.full_like(scene()[..., :1], 128)], axis=-1)
    with av.open(str(tmp_path / "a.mkv"), "w") as out:
        video = out.add_stream("ffv1", rate=25)
        video.height, video.width, video.pix_fmt = 48, 64, "bgra"
        for frame in frames:
            out.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgba")))
        out.mux(video.encode())
    media = files.read(tmp_path / "a.mkv")
    assert media.data.shape == (8, 48, 64, 3)
    assert "a.mkv: its opacity is left out; films are written without" in media.notes[0]
    film(tmp_path / "b.mkv", scene())
    assert not any("its opacity" in note for note in files.read(tmp_path / "b.mkv").notes)


def test_times_that_vary_are_kept(tmp_path: Path) -> None:
    times = [0, 1, 2, 5, 6, 9, 10, 14]
    film(tmp_path / "a.mp4", scene(), times=times)
    media, place, _ = written(tmp_path / "a.mp4", "out.mp4")
    assert "the frame rate varies (7.493 to 29.97 a second); each frame keeps its time" in media.notes[0]
    assert probe(place)["times"] == pytest.approx([float(time / RATE) for time in times])
    with pytest.raises(FileFormatError, match="cannot hold frames at unequal times"):
        files.check_output(files.Writing(tmp_path / "out.avi", "lossless"), media)


def test_streams_that_have_no_place_are_named(tmp_path: Path) -> None:
    film(tmp_path / "a.mp4", scene(4), sound=True)
    media = files.read(tmp_path / "a.mp4")
    told = files.check_output(tmp_path / "out.webm", media)
    assert "sound (aac)" in told[-1]
    assert "the shape of its pixels (4:3) are left out" in told[-1]
    told = files.check_output(tmp_path / "out.npy", media)
    assert "what else the film holds (sound, times of frames)" in told[0]


# --- frame by frame --------------------------------------------------------------------------------------------------


def test_frame_by_frame(tmp_path: Path) -> None:
    film(tmp_path / "a.mp4", scene(), sound=True)
    reader = VideoReader(tmp_path / "a.mp4")
    info = reader.info
    assert (info.shape, info.dtype, info.bits, info.count, info.rate) == ((48, 64, 3), np.uint8, 8, 8, RATE)
    with (
        (tmp_path / "out.mp4").open("xb") as stream,
        VideoWriter(stream, info, files.Writing(tmp_path / "out.mp4", 12)) as writer,
    ):
        for time, duration, frame in reader:
            writer.write(time, duration, frame)
    one, other = probe(tmp_path / "a.mp4"), probe(tmp_path / "out.mp4")
    assert (one["times"], one["sound"]) == (other["times"], other["sound"])
    assert len(list(reader)) == 8  # an iteration begins anew


@pytest.mark.parametrize("sound", [True, False])
def test_nothing_is_left_of_a_film_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sound: bool) -> None:
    film(tmp_path / "a.mp4", scene(), sound=sound)
    media, write, done = files.read(tmp_path / "a.mp4"), VideoWriter.write, []

    def failing(writer: VideoWriter, *words: Any) -> None:
        done.append(0)
        if len(done) == 4:
            raise RuntimeError("halfway")
        write(writer, *words)

    monkeypatch.setattr(VideoWriter, "write", failing)
    with pytest.raises(FileFormatError, match=r"encoder failure \(halfway\)"):
        files.write(tmp_path / "out.mp4", media.data, media)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4"]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4", "fast.mp4"])
def test_truncated_films(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (20, 48, 64, 3), dtype=np.uint8)
    if name == "fast.mp4":  # its list of frames comes first
        film(tmp_path / "b.mp4", frames)
        with (
            av.open(str(tmp_path / "b.mp4")) as source,
            av.open(str(tmp_path / name), "w", options={"movflags": "faststart"}) as out,
        ):
            copy = out.add_stream_from_template(source.streams.video[0])
            for packet in source.demux(video=0):
                if packet.dts is not None:
                    packet.stream = copy
                    out.mux(packet)
    else:
        film(tmp_path / name, frames)
    whole = (tmp_path / name).read_bytes()
    for part in (0.02, 0.3, 0.6, 0.9):
        (tmp_path / name).write_bytes(whole[: int(part * len(whole))])
        with pytest.raises(FileFormatError, match="export it again"):
            files.read(tmp_path / name)
    (tmp_path / name).write_bytes(whole)
    assert len(files.read(tmp_path / name).data) == 20


def test_films_without_pictures_and_no_films(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "sound.mp4"), "w") as out:
        voice = out.add_stream("aac", rate=48000)
        part = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
        part.rate = 48000
        out.mux(voice.encode(part))
        out.mux(voice.encode())
    with pytest.raises(FileFormatError, match="no pictures"):
        files.read(tmp_path / "sound.mp4")
    (tmp_path / "text.mp4").write_text("no film\n" * 100)
    with pytest.raises(FileFormatError, match="export it again"):
        files.read(tmp_path / "text.mp4")


def test_a_playlist_is_no_film(tmp_path: Path) -> None:
    film(tmp_path / "secret.ts", scene(2))
    lines = ["#EXTM3U", "#EXT-X-VERSION:3", "#EXT-X-TARGETDURATION:1", "#EXTINF:1,", "secret.ts", "#EXT-X-ENDLIST"]
    for name in ("a.mp4", "a.mkv", "a.avi"):
        (tmp_path / name).write_text("\n".join(lines))
        with pytest.raises(FileFormatError, match="export it again"):
            files.read(tmp_path / name)


def test_without_pyav_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film(tmp_path / "a.mp4", scene(2))
    media = files.read(tmp_path / "a.mp4")
    monkeypatch.setenv("NLFLOW_DECODE", "here")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(FileFormatError, match=r"PyAV.*pip install 'nlflow\[video\]'"):
        files.read(tmp_path / "a.mp4")
    with pytest.raises(FileFormatError, match=r"PyAV.*pip install 'nlflow\[video\]'"):
        files.check_output(tmp_path / "b.mp4", media)


# --- from and to other formats ---------------------------------------------------------------------------------------


def test_a_film_as_a_stack_and_back(tmp_path: Path) -> None:
    film(tmp_path / "a.mp4", scene())
    media, place, _ = written(tmp_path / "a.mp4", "stack.tif")
    with tifffile.TiffFile(place) as tif:
        assert tif.series[0].axes == "TYXS"
        assert tif.imagej_metadata is not None
        assert tif.imagej_metadata["finterval"] == pytest.approx(float(1 / RATE))
    stack, again, notes = written(place, "back.mp4", 4)
    np.testing.assert_array_equal(stack.data, media.data)
    assert any("colours at half resolution" in note for note in notes)
    assert rms(files.read(again).data, media.data) < 4
    assert float(probe(again)["rate"]) == pytest.approx(float(RATE))


@pytest.mark.parametrize(("dtype", "name", "pixels"), [("u1", "b.mp4", "yuv420p"), ("u2", "b.mkv", "gray16le")])
def test_arrays_as_films(tmp_path: Path, dtype: str, name: str, pixels: str) -> None:
    data = scene()[..., 0].astype(dtype) * (1 if dtype == "u1" else 257)
    np.save(tmp_path / "a.npy", data)
    _, place, notes = written(tmp_path / "a.npy", name, "lossless", axes="TYX")
    assert any("25 frames a second, since" in note for note in notes)
    found = files.read(place).data
    found = found[..., 1] if found.ndim == 4 else found
    assert probe(place)["pixels"] == pixels
    assert rms(found, data) < (1.5 if dtype == "u1" else 1e-9)


@pytest.mark.parametrize(
    ("shape", "dtype", "name", "message"),
    [
        ((4, 8, 8), "u2", "b.mp4", "cannot hold samples of 16 bits"),
        ((4, 8, 8), "f4", "b.mp4", "float32 samples"),
        ((4, 8, 8, 2), "u1", "b.mp4", "2 channels"),
        ((4, 8, 8), "u1", "b.avi", "name it .mkv"),
    ],
)
def test_what_films_cannot_hold(tmp_path: Path, shape: Any, dtype: str, name: str, message: str) -> None:
    np.save(tmp_path / "a.npy", np.zeros(shape, dtype))
    with pytest.raises(FileFormatError, match=message):
        files.check_output(tmp_path / name, files.read(tmp_path / "a.npy", axes="TYXC"[: len(shape)]))


# --- the same grey levels for other programs ------------------------------------------------------------------------


def levels(bits: int, odd: int = 0) -> Any:
    """Return frames whose grey levels use all numbers, from black to white."""
    ramp = np.linspace(0, 1, 96 - odd)[None, None] * np.ones((3, 48 - odd, 1))
    return np.rint(ramp * (2**bits - 1)).astype(np.uint8 if bits == 8 else np.uint16)


def filmed(path: Path, frames: Any, pixels: str, said: int) -> None:
    """Write a film of grey levels with PyAV alone, which says this of its range; x264 for what FFV1 does not hold."""
    form = "gray" if frames.dtype == np.uint8 else f"gray{max(10, int(frames.max()).bit_length())}le"
    with av.open(str(path), "w") as out:
        video = out.add_stream("libx264" if pixels == "yuvj420p" else "ffv1", rate=25)
        video.height, video.width = frames.shape[1:]
        video.pix_fmt, video.options = pixels, {"qp": "0"} if pixels == "yuvj420p" else {}
        video.codec_context.color_range = said
        for number, frame in enumerate(frames):
            made = av.VideoFrame.from_ndarray(frame, format=form)
            if pixels != form:
                made = made.reformat(format=pixels, src_color_range=2, dst_color_range=said)
            made.pts, made.time_base = number, Fraction(1, 25)
            out.mux(video.encode(made))
        out.mux(video.encode())


def seen(path: Path) -> Any:
    """Return the grey levels from 0 to 1 that a player shows: the conversion of swscale, by what the film says."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24")[..., 1] for frame in container.decode(video=0)]) / 255


#: Pixels of a source (or the type of an array), what it says of its range, and the bits of its samples.
SOURCES = (
    *(("gray", said, 8) for said in (0, 1, 2)), ("gray10le", 0, 10), ("gray12le", 0, 12), ("gray16le", 1, 16),
    ("yuv420p", 0, 8), ("yuv420p", 1, 8), ("yuv420p", 2, 8), ("yuvj420p", 2, 8), ("yuv444p", 1, 8),
    ("yuv444p", 2, 8), ("bgr0", 0, 8), ("npy", 0, 8), ("npy", 0, 16), ("tif", 0, 8),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("pixels", "said", "bits"), SOURCES)
def test_other_programs_see_the_levels_that_were_in_memory(tmp_path: Path, pixels: str, said: int, bits: int) -> None:
    frames = levels(bits)
    if pixels in ("npy", "tif"):
        source, words = tmp_path / f"a.{pixels}", {"axes": "TYX"}
        np.save(source, frames) if pixels == "npy" else tifffile.imwrite(source, frames, photometric="minisblack")
    else:
        source, words = tmp_path / "a.mkv", {}
        filmed(source, frames, pixels, said)
    held = files.read(source, **words).data / (2.0**bits - 1)
    held = held[..., 1] if held.ndim == 4 else held
    assert np.abs(held - levels(bits) / (2.0**bits - 1)).max() < 2.5 / 255
    written_to = 0
    for name in ("b.mkv", "b.mp4", "b.mov", "b.webm", "b.avi"):
        for quality in (0, "lossless"):
            try:
                _, place, _ = written(source, name, quality, **words)
            except FileFormatError:  # which says that it holds no such pixels
                continue
            written_to += 1
            shown = seen(place)
            assert np.abs(shown - held).max() < 3.5 / 255, (name, quality)
            assert np.polyfit(held.ravel(), shown.ravel(), 1)[0] == pytest.approx(1, abs=0.005), (name, quality)
    assert written_to >= (2 if bits > 8 else 5)


@pytest.mark.parametrize("pixels", ["yuv420p", "gray"])
def test_films_of_odd_size(tmp_path: Path, pixels: str) -> None:
    filmed(tmp_path / "a.mkv", levels(8, odd=1), pixels, 0)
    for name in ("b.mkv", "b.mp4", "b.webm") if pixels == "yuv420p" else ("b.mkv", "b.mp4"):
        media, place, _ = written(tmp_path / "a.mkv", name, 0)
        assert media.data.shape[1:3] == (47, 95)
        assert probe(place)["shape"] == (47, 95)
        held = media.data[..., 1] if media.data.ndim == 4 else media.data
        assert np.abs(seen(place) - held / 255).max() < 3.5 / 255


def test_opacity_of_vp9_is_told(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.webm"), "w") as out:
        video = out.add_stream("libvpx-vp9", rate=25)
        video.height, video.width, video.pix_fmt = 48, 64, "yuva420p"
        for number, frame in enumerate(scene(2)):
            made = av.VideoFrame.from_ndarray(frame, format="rgb24").reformat(format="yuva420p")
            made.pts, made.time_base = number, Fraction(1, 25)
            out.mux(video.encode(made))
        out.mux(video.encode())
    assert any("its opacity is left out" in note for note in files.read(tmp_path / "a.webm").notes)
    film(tmp_path / "b.webm", scene(2), codec="libvpx-vp9")
    assert not any("its opacity is left out" in note for note in files.read(tmp_path / "b.webm").notes)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.webm"])
def test_a_film_of_one_frame_comes_back_as_one(name: str, tmp_path: Path) -> None:
    film(tmp_path / name, scene(1), codec="libvpx-vp9" if name == "a.webm" else "libx264")
    media = files.read(tmp_path / name)
    assert media.kind == "image"
    out = tmp_path / f"b{Path(name).suffix}"
    files.write(out, media.data, media)
    with av.open(str(out)) as found:
        assert len(list(found.decode(video=0))) == 1
    assert np.abs(files.read(out).data.astype(float) - media.data).mean() < 4


@pytest.mark.parametrize("pixels", ["nv12", "yuv420p", "yuv410p", "yuv411p"])
def test_films_of_odd_size_are_read_and_written(pixels: str, tmp_path: Path) -> None:
    codec = "rawvideo" if pixels == "nv12" else "ffv1"
    film(tmp_path / "a.mkv", scene(2, 47, 63), codec=codec, pixels=pixels)
    media = files.read(tmp_path / "a.mkv")
    assert media.data.shape == (2, 47, 63, 3)
    files.write(tmp_path / "b.mkv", media.data, media)
    assert files.read(tmp_path / "b.mkv").data.shape == (2, 47, 63, 3)
