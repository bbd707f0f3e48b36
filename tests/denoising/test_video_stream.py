"""Films that are too long for the memory: some frames at a time, the bits of the whole, nothing half written."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.denoising.frame import Frame
from nlflow.denoising.groupwise import CLIPS, GroupPreset
from nlflow.denoising.large import stream
from nlflow.denoising.large.stream import denoise_frames, surveyed, window
from nlflow.denoising.patches import Grouping
from tests.commands import fails, listing, run

av = pytest.importorskip("av")

pytestmark = pytest.mark.skipif("libx264" not in av.codecs_available, reason="PyAV was built without H.264")

SMALL = Grouping((2, 3, 3), 6, (1, 2, 2), (1, 3, 3))
MARGIN = 4


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that are quickly found, and look 4 frames far."""
    preset = GroupPreset(0, ((9e9, SMALL),), ((9e9, SMALL),), cosine=True, moving=True)
    for quality in CLIPS:
        monkeypatch.setitem(CLIPS, quality, preset)


def scene(count: int = 20, height: int = 24, width: int = 32, colours: bool = True) -> Any:
    """Return a noisy picture that moves, in 8 bits."""
    y, x = np.mgrid[:height, :width]
    clean = np.stack([128 + 80 * np.sin((x + 2 * t) / 5) * np.cos((y - t) / 6) for t in range(count)])
    if colours:
        clean = 128 + (clean[..., None] - 128) * [1, 0.6, -0.7]
    return np.clip(np.rint(clean + np.random.default_rng(3).normal(0, 12, clean.shape)), 0, 255).astype(np.uint8)


def film(path: Path, frames: Any, sound: bool = False) -> Path:
    """Write a film with PyAV alone."""
    with av.open(str(path), "w") as out:
        video = out.add_stream("libx264", rate=25)
        video.height, video.width = frames.shape[1:3]
        video.pix_fmt, video.options = "yuv420p", {"crf": "2"}
        voice = out.add_stream("aac", rate=48000) if sound else None
        for frame in frames:
            out.mux(video.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(video.encode())
        if voice is not None:
            tone = np.sin(np.arange(1024) / 10, dtype=np.float32)[None].repeat(2, 0)
            for number in range(20):
                part = av.AudioFrame.from_ndarray(tone, format="fltp", layout="stereo")
                part.rate, part.pts = 48000, 1024 * number
                out.mux(voice.encode(part))
            out.mux(voice.encode())
    return path


def decoded(path: Path) -> tuple[Any, list[float], int]:
    """Return frames, their times, and how many packets of sound there are."""
    with av.open(str(path)) as found:
        frames = [(frame.to_ndarray(format="rgb24"), float(frame.time)) for frame in found.decode(video=0)]
    with av.open(str(path)) as found:
        sounds = sum(packet.size > 0 for packet in found.demux() if packet.stream.type == "audio")
    return np.stack([frame for frame, _ in frames]), [time for _, time in frames], sounds


def timed(frames: Any) -> Iterator[tuple[int, int, Any]]:
    return ((number, 1, frame) for number, frame in enumerate(frames))


def least(found: Frame, core: int) -> float:
    """Return the memory that parts of so many frames take."""
    frames = min(core + 2 * MARGIN, found.shape[0])
    shape = (frames, *found.shape[1:])
    return found.bytes_needed(shape) + stream._COPIES * 4 * math.prod(shape) * found.axes.channels


@pytest.mark.slow
@pytest.mark.parametrize("case", ["colours", "grey", "counts", "single", "deep"])
@pytest.mark.parametrize("core", [1, 7])
@pytest.mark.sampled(2)
def test_parts_have_the_bits_of_the_whole(case: str, core: int) -> None:
    clip, options = scene(17, colours=case != "grey"), {"noise": "poisson"} if case == "counts" else {"sigma": 12.0}
    if case == "single":
        clip = clip.astype(np.float32) * 100  # a range beyond single precision of groups
    if case == "deep":
        clip = clip.astype(np.uint16) * 4
    found = surveyed(iter(clip), **options)
    limit = least(found, core)
    assert window(found, limit)[0] == core
    parts = [u for _, u in denoise_frames(timed(clip), found, limit)]
    axis = -1 if clip.ndim == 4 else None
    axes = "TYXC" if clip.ndim == 4 else "TYX"
    whole = nl.denoise(clip, channel_axis=axis, axes=axes, preserve_range=True, **options)
    np.testing.assert_array_equal(np.stack(parts), whole.astype(np.float32))


def test_a_margin_that_is_smaller_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = scene(17)
    found = surveyed(iter(clip), 12.0)
    assert found.halo[0] == MARGIN
    monkeypatch.setattr(type(found), "halo", (1, 99, 99))
    parts = [u for _, u in denoise_frames(timed(clip), found, least(found, 1) / 2)]
    assert (np.stack(parts) != nl.denoise(clip, 12.0, axes="TYXC", preserve_range=True)).any()


def test_memory_does_not_grow_with_the_clip() -> None:
    clip = scene(60, 16, 16)
    found = surveyed(iter(clip), 12.0)
    limit, alive, most = least(found, 4), [0], 0

    def gone() -> None:
        alive[0] -= 1

    def frames() -> Iterator[tuple[int, int, Any]]:
        nonlocal most
        for time, span, frame in timed(clip):
            own = frame.copy()
            weakref.finalize(own, gone)
            alive[0] += 1
            most = max(most, alive[0])
            yield time, span, own
            del own

    assert sum(1 for _ in denoise_frames(frames(), found, limit)) == 60
    assert most <= 4 + 2 * MARGIN + 2
    longer = surveyed(iter(np.concatenate([clip] * 3)), 12.0)
    assert window(longer, limit) == window(found, limit)


def test_noise_is_that_of_the_first_frames() -> None:
    clip = scene(24)
    found = surveyed(iter(clip))
    assert found.estimated
    assert float(found.level[0]) == pytest.approx(12, rel=0.1)
    later = clip.copy()
    later[stream.FIRST :] = 7
    assert surveyed(iter(later)).level[0] == found.level[0]


def test_what_is_refused() -> None:
    clip = scene(17)
    found = surveyed(iter(clip), 12.0)
    with pytest.raises(nl.MemoryLimitError, match=r"max_memory: 9 frames of 32 x 24, which one frame needs, take"):
        window(found, 1000)
    with pytest.raises(nl.InputError, match="got 12 frames in the second reading after 17 in the first"):
        list(denoise_frames(timed(clip[:12]), found))
    with pytest.raises(nl.InputError, match="a clip without frames"):
        surveyed(iter([]))
    with pytest.raises(nl.InputError, match="got GaussianNoise for a clip that is read in parts"):
        surveyed(iter(clip), noise=nl.GaussianNoise(3.0))


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    film(Path("in.mp4"), scene(100), sound=True)
    # Without loss: on frames of a few macroblocks libx264's loops choose other bits each time (all but "asm=0" do).
    given = ("--sigma", "12", "--video-quality", "lossless")
    run("denoise", "in.mp4", "whole.mp4", *given, "--quiet")
    told = run("denoise", "in.mp4", "parts.mp4", *given, "--max-memory", "5000000", "--json")
    report = json.loads(told.stdout)
    assert report["denoise"]["tiles"] > 1
    assert any("is denoised in parts of" in note for note in report["notes"])
    frames, times, sounds = decoded(Path("parts.mp4"))
    whole = decoded(Path("whole.mp4"))
    np.testing.assert_array_equal(frames, whole[0])
    assert (times, sounds) == whole[1:]
    assert sounds > 15
    found = run("denoise", "in.mp4", "last.mp4", "--max-memory", "5000000").stderr
    assert "taken to be white, and as strong as in the first 16 frames" in found


@pytest.mark.slow
def test_nothing_is_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    film(Path("in.mkv"), scene(100))
    content = Path("in.mkv").read_bytes()
    Path("cut.mkv").write_bytes(content[: len(content) // 2])
    given = ("--sigma", "12", "--max-memory", "5000000")
    assert "cut.mkv: got" in fails("denoise", "cut.mkv", "out.mkv", *given)
    assert "max_memory: 9 frames of" in fails("denoise", "in.mkv", "out.mkv", "--sigma", "12", "--max-memory", "1000")
    before, calls, denoise_part = listing(), [], stream.denoise_part

    def ended(*words: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return denoise_part(*words, **more)

    monkeypatch.setattr(stream, "denoise_part", ended)
    assert run("denoise", "in.mkv", "out.mkv", *given, code=130).stdout == ""
    assert len(calls) == 2
    assert listing() == before


@pytest.mark.slow
def test_a_film_that_is_left_alone_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    film(Path("in.mp4"), scene(30), sound=True)
    for words in ((), ("--max-memory", "1400000")):
        told = run("denoise", "in.mp4", "out.mp4", "--sigma", "0", *words)
        assert ("in parts of" in told.stderr) == bool(words)
        assert "OUT is a copy of IN" in told.stdout
        assert "coded as" not in told.stderr
        assert Path("out.mp4").read_bytes() == Path("in.mp4").read_bytes()
        Path("out.mp4").unlink()
    told = run("denoise", "in.mp4", "out.mkv", "--sigma", "0")
    assert "OUT is IN coded anew, as films are" in told.stdout
    assert "coded as" in told.stderr
