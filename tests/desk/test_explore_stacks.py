"""The explorer with volumes and clips, without a browser: the slice that is shown, and what is denoised with it."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image
from typer.testing import CliRunner

from nlflow import InputError, denoise
from nlflow.denoising.noise import GaussianNoise
from nlflow.denoising.quality import psnr
from nlflow.desk.commands import main as cli
from nlflow.desk.explorer import denoising_view, pictures, sources, uploads
from nlflow.desk.explorer.denoise_tab import DenoiseTab
from nlflow.desk.explorer.denoising_view import DenoiseSettings
from nlflow.desk.explorer.desk import Desk
from nlflow.desk.explorer.drawings import Drawn, Look, Stills
from nlflow.desk.explorer.worker import Job
from nlflow.desk.files import read
from nlflow.desk.formats.axes import plane_channels, through

RNG = np.random.default_rng(7)
SHAPES = {"ZYX": (12, 20, 24), "TYX": (6, 22, 26), "TCYX": (6, 2, 20, 22)}


def stored(path: Path, axes: str, shape: tuple[int, ...]) -> Path:
    """Write a smooth stack with noise, and beside it the same without."""
    clean = 120 + sum(60 * np.sin(one / 5) for one in np.indices(shape, dtype=np.float32)) / len(shape)
    noisy = clean + RNG.normal(0, 12, shape)
    for name, values in ((path.name, noisy), (f"clean-{path.name}", clean)):
        data = np.clip(np.rint(values), 0, 255).astype(np.uint8)
        tifffile.imwrite(path.with_name(name), data, ome=True, metadata={"axes": axes})
    return path


def executed(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "copied", "exec"), names)
    return names


class AtOnce:
    """A worker that computes where it is asked."""

    def submit(self, key: object, job: Job) -> None:
        job.result = job.work(lambda share: None)
        job.done(job)

    def cancel_all(self, belongs: object) -> None:
        """Nothing waits."""


def tab_of(source: sources.Source) -> DenoiseTab:
    tab = DenoiseTab(Desk(AtOnce(), uploads.Limits(), None), source)  # type: ignore[arg-type]
    tab.start()
    return tab


def seen(tab: DenoiseTab, name: str) -> Any:
    """Return the pixels of a picture of the tab."""
    import base64

    item = next(one for one in tab.pictures.shown["items"] if one["name"] == name)
    address = item["src"] or tab.pictures.still[name]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))))


@pytest.mark.slow
@pytest.mark.parametrize("axes", SHAPES)
def test_python_and_command_of_a_stack(axes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = stored(Path("a.ome.tif"), axes, SHAPES[axes])
    source = sources.open_source(path, str(path)).with_clean(f"clean-{path}", f"clean-{path}")
    settings = DenoiseSettings(sigma=12.0, width=3.0, steps=2)  # the last two belong to pixels
    result = denoising_view.compute(settings, source)
    media = source.media
    expected = denoise(media.data, 12.0, quality="fast", axes=axes, spacing=media.spacing, preserve_range=True)
    assert np.array_equal(result.result, expected)
    assert result.figures == {"psnr_input": psnr(source.clean, media.data), "psnr_output": psnr(source.clean, expected)}
    assert np.array_equal(executed(denoising_view.as_python(settings, source))["result"], expected)
    words = denoising_view.as_command(settings, source).split()
    done = CliRunner().invoke(cli.app, [*words[1:], "--json"], prog_name="nonlocal", catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["denoise"]["residual"] == result.info.residual
    assert read(words[3]).axes == axes
    name, content = sources.saved(source, None, result.result)
    assert name == "a.ome-denoised.npy"
    assert np.array_equal(np.load(io.BytesIO(content), allow_pickle=False), expected)


def test_slices_around_the_one_that_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path / "a.tif", "ZYX", (60, 20, 24))
    source = sources.open_source(path)
    assert sources.preview(source) is None  # small: the whole stack
    monkeypatch.setattr(sources, "_SAMPLES", 60 * 20 * 24 - 1)
    around = sources.reach(source.media)
    assert around == 2 * (5 + 4 - 1)  # to references of groups, and on to their members
    assert sources.preview(source, (), 30) == ((30 - around, 31 + around), (0, 20), (0, 24))
    assert sources.preview(source, (), 0) == ((0, 1 + around), (0, 20), (0, 24))
    assert sources.preview(source, (), 59) == ((59 - around, 60), (0, 20), (0, 24))
    monkeypatch.setattr(sources, "_SAMPLES", (2 * around + 1) * 100)
    cut = ((30 - around, 31 + around), (5, 15), (14, 24))
    assert sources.preview(source, (0.5, 1.0), 30) == cut
    assert sources.preview(source, (0.5, 1.0), 0) == ((0, 1 + around), *cut[1:])
    told = sources.told_stack(source.media, 30, cut)
    assert told == (
        "Shown: slice 31 of 60, denoised together with slices 15 to 47; "
        "in full resolution, pixels 5–14 × 14–23 of 20 × 24."
    )  # fmt: skip


def test_far_slices_do_not_change_the_one_that_is_shown(tmp_path: Path) -> None:
    """``fast`` looks at no more frames than are denoised together: with a given sigma the frame is that of the whole.

    The samples are centred by another mean before the flow, so a few roundings differ.
    """
    source = sources.open_source(stored(tmp_path / "a.tif", "TYX", (44, 18, 20)))
    at, around = 22, sources.reach(source.media)
    assert 2 * around + 1 < 44
    crop = ((at - around, at + around + 1), (0, 18), (0, 20))
    whole = denoising_view.compute(DenoiseSettings(sigma=12.0), source).result
    part = denoising_view.compute(DenoiseSettings(sigma=12.0, crop=crop), source).result
    assert part.shape == (2 * around + 1, 18, 20)
    np.testing.assert_allclose(part[around], whole[at], atol=16 * 255 * float(np.finfo(np.float32).eps))


@pytest.mark.slow
def test_the_slider_of_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = denoising_view.compute
    monkeypatch.setattr(
        denoising_view, "compute", lambda *given, **more: (calls.append(given[0]), real(*given, **more))[1]
    )
    source = sources.open_source(stored(tmp_path / "a.tif", "ZYX", (40, 20, 24)))
    tab = tab_of(source)
    tab.undo()
    assert tab.quality.value == "fast"  # a stack has no flow of pixels
    assert tab.slice.visible
    assert (tab.slice.shown["low"], tab.slice.shown["high"], tab.slice.shown["value"]) == (1, 40, 21)
    assert not any(tab.knobs[name].visible for name in ("fidelity", "steps", "width", "patch_size"))
    assert not tab.knobs["sigma"].shown["disabled"]
    assert "Shown: slice 21 of 40, denoised together with the whole stack." in tab.part.object

    def shows(at: int) -> None:
        levels = pictures.grey_scale(source.media.data).levels
        low = 0 if calls[-1].crop is None else calls[-1].crop[0][0]
        assert np.array_equal(seen(tab, "noisy"), levels(source.media.data[at]))
        assert tab._result is not None
        assert np.array_equal(seen(tab, "result"), levels(tab._result.result[at - low]))

    shows(20)
    before = len(calls)
    tab.slice._take({"value": 4, "automatic": False, "move": 1})
    shows(3)
    assert len(calls) == before  # the result is there already
    monkeypatch.setattr(sources, "_SAMPLES", 40 * 20 * 24 - 1)
    tab.slice._take({"value": 40, "automatic": False, "move": 2})
    tab.start()
    shows(39)
    assert "slice 40 of 40, denoised together with slices 24 to 40." in tab.part.object
    tab.slice._take({"value": 2, "automatic": False, "move": 3})
    shows(1)
    assert calls[-1].crop[0] == (0, 18)
    assert "[0:18, 0:20, 0:24]" in tab.code.shown["python"]


@pytest.mark.slow
@pytest.mark.parametrize("axes", SHAPES)
def test_a_coarse_answer_is_of_the_picture_that_is_shown(axes: str, tmp_path: Path) -> None:
    """It is the flow of pixels on that one picture, with a narrow window and the noise that was found in the stack."""
    source = sources.open_source(stored(tmp_path / "a.tif", axes, SHAPES[axes]))
    known = denoising_view.compute(DenoiseSettings(strength=2.0), source)
    coarse = denoising_view.coarse(DenoiseSettings(strength=3.0), source, 2, known)
    assert coarse is not None
    assert coarse.coarse
    along = through(source.media, channels=True)
    flat = np.take(source.media.data, 2, along)
    channels = plane_channels(source.media)
    words: dict[str, Any] = {"quality": "pixels", "search_radius": 3, "preserve_range": True, "channel_axis": channels}
    expected = denoise(flat, noise=GaussianNoise(known.info.sigma / 2), strength=3.0, **words)
    np.testing.assert_allclose(np.take(coarse.result, 0, along), expected, rtol=1e-5)
    drawn = Drawn(coarse, source, Stills(), Look(at=2))
    assert [item["name"] for item in drawn.items] == ["noisy", "result", "removed"]
    # What is quick has none, and neither has what the last result says nothing about.
    assert denoising_view.coarse(DenoiseSettings(quality="best"), source, 2, known) is None
    assert denoising_view.coarse(DenoiseSettings(noise="white"), source, 2, known) is None
    assert denoising_view.coarse(DenoiseSettings(), source, 2, None) is None


@pytest.mark.slow
def test_an_image_after_a_stack(tmp_path: Path) -> None:
    tab = tab_of(sources.open_source(stored(tmp_path / "a.tif", "TCYX", (6, 2, 20, 22))))
    assert tab.slice.shown["label"] == "frame"
    assert tab.download.shown["label"] == "Download result (NPY)"
    assert seen(tab, "result").shape == (20, 22)
    tab._open(sources.example())
    assert not tab.slice.visible
    assert tab.knobs["width"].visible
    assert seen(tab, "result").shape == (256, 256)


def test_pages_of_an_upload_are_counted_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = stored(tmp_path / "a.tif", "ZYX", (12, 20, 24)).read_bytes()
    limits = uploads.Limits(samples=12 * 20 * 24)
    assert uploads.received_source("a.tif", content, limits).media.axes == "ZYX"
    monkeypatch.setattr(uploads, "open_source", lambda path, name: pytest.fail("it was read"))
    with pytest.raises(InputError, match=re.escape("got 5760 samples, expected at most 5759")):
        uploads.received_source("a.tif", content, uploads.Limits(samples=5759))


def test_commands_keep_both_parts_of_an_extension(tmp_path: Path) -> None:
    stack = sources.open_source(stored(tmp_path / "a.tif", "ZYX", (12, 20, 24)))
    for name in ("my.scan.nii.gz", "B.NII.GZ", "film.mp4"):
        words = denoising_view.as_command(DenoiseSettings(), replace(stack, name=name)).split()
        stem, dot, rest = name.rpartition(".nii" if "nii" in name else ".NII" if "NII" in name else ".mp4")
        assert words[3] == f"{stem}-denoised{dot}{rest}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the noise was hard to find out")  # of so few samples
@pytest.mark.parametrize("form", ["npy", "npz", "mat", "h5"])
def test_arrays_are_opened_as_the_command_opens_them(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which array, which axes and how far apart is told to the same reader, and stands in the texts that are copied."""
    stored(tmp_path / "a.tif", "ZYX", SHAPES["ZYX"])
    data = tifffile.imread(tmp_path / "a.tif").astype(np.float32)
    other = np.zeros(3, np.float32)
    path, told = tmp_path / f"scan.{form}", {"axes": "ZYX", "spacing": [2.0, 1.0, 1.0]}
    if form == "npy":
        np.save(path, data)
    elif form == "npz":
        np.savez(path, raw=data, other=other)
        told["array"] = "raw"
    elif form == "mat":
        from scipy.io import savemat

        savemat(path, {"raw": data, "other": other})
        told["array"] = "raw"
    else:
        h5py = pytest.importorskip("h5py", reason="h5py is optional: pip install 'nlflow[hdf5]'")
        with h5py.File(path, "w") as file:
            file["scan/raw"], file["other"] = data, other
        told["array"] = "/scan/raw"
    monkeypatch.chdir(tmp_path)
    source = sources.open_source(path.name, **told)  # type: ignore[arg-type]
    assert source.media.spacing == (2.0, 1.0, 1.0)
    tab = tab_of(source)
    copied = executed(tab.code.shown["python"])
    np.testing.assert_array_equal(copied["noisy"], data)
    assert tab._result is not None
    np.testing.assert_array_equal(copied["result"], tab._result.result)
    words = re.split(r"\s+", tab.code.shown["command"])
    assert words[4:] == [
        *("--quality", "fast", "--axes", "ZYX:2.0,1.0,1.0"),
        *(("--array", told["array"]) if "array" in told else ()),
    ]
    done = CliRunner().invoke(cli.app, words[1:])
    assert done.exit_code == 0, done.output
    written = read(words[3], axes="ZYX", array=told.get("array")).data  # type: ignore[arg-type]
    np.testing.assert_array_equal(written, tab._result.result.astype(np.float32))


def test_what_cannot_be_sent_says_how_it_is_opened() -> None:
    with pytest.raises(InputError, match=r"by its name: nonlocal explore 'my scan\.h5' --array NAME --axes ZYX$"):
        uploads.received_source("my scan.h5", b"x", uploads.Limits())
    with pytest.raises(InputError, match=r"by its name: nonlocal explore brain\.nii\.gz$"):
        uploads.received_source("brain.nii.gz", b"x", uploads.Limits())
    with pytest.raises(InputError, match=r"expected one of [^;]+$"):
        uploads.received_source("a.exe", b"x", uploads.Limits())


def test_words_about_a_file_belong_to_one() -> None:
    for option, value in (("--axes", "ZYX"), ("--spacing", "2,1,1"), ("--array", "raw")):
        done = CliRunner().invoke(cli.app, ["explore", option, value])
        assert done.exit_code == 2
        assert "belongs to a FILE" in done.output
