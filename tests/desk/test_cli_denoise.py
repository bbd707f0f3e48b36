"""The command `nonlocal denoise` for one file: what it passes on, prints, writes, and how it fails.

The denoiser is replaced by a stand-in, so that these tests see the command alone.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image
from scipy.io import wavfile

import nlflow
from nlflow.denoising import options as denoising_options
from nlflow.denoising.quality import psnr
from nlflow.desk import files, terminal
from nlflow.desk.commands import denoise_file, reports
from nlflow.desk.commands.reports import summary
from nlflow.desk.terminal import json_text
from nlflow.errors import InputError
from tests.commands import IMAGE, OPTIONS, RNG, Denoiser, fails, listing, run

Clock = Callable[[float], None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(IMAGE).save("in.png")
    np.save("in.npy", RNG.standard_normal((40, 2)))
    return tmp_path


def test_the_real_one_takes_these_options() -> None:
    parameters = inspect.signature(nlflow.denoise).parameters
    known = {name: one.default for name, one in parameters.items()} | denoising_options.OPTIONS
    defaults = {name: known[name] for name in OPTIONS}
    assert defaults == OPTIONS | {"preserve_range": False, "return_info": False}


def test_image(folder: Path, denoiser: Denoiser) -> None:
    result = run("denoise", "in.png", "out.png")
    ((image, sigma, options),) = denoiser.calls
    np.testing.assert_array_equal(image, IMAGE)
    assert image.dtype == np.uint8
    assert sigma is None
    assert options == OPTIONS
    np.testing.assert_array_equal(files.read("out.png").data, np.rint(IMAGE * 0.5))
    assert result.stderr == ""
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    table = {name.strip(): value.strip() for name, value in lines.items()}
    assert table == {
        "input": "in.png, image of 12 x 16, uint8",
        "noise": "white (confidence high)",
        "sigma": "12.5 (estimated): standard deviation of the noise, in grey levels",
        "time": "0.12 s",
        "written": "out.png",
    }
    more = [line.split("  ", 1) for line in run("denoise", "in.png", "more.png", "--verbose").stdout.splitlines()]
    how = {"removed": "nan: root mean square of input minus result, in grey levels"}
    how |= {"quality": "balanced", "functional": "E", "steps": "4", "stopped by": "converged"}
    assert {name: value.strip() for name, value in more} == table | how | {"written": "more.png"}
    Path("more.png").unlink()
    assert listing() == ["in.npy", "in.png", "out.png"]


@pytest.mark.parametrize(
    ("image", "words", "said"),
    [
        (np.repeat(np.arange(16.0), 16).reshape(16, 16), (), "no noise was found"),
        (np.full((16, 16), 3.0), (), "the input is constant"),
        (IMAGE / 1.0, ("--sigma", "0"), "there is no noise to remove (sigma=0)"),
    ],
)
def test_what_is_only_copied_says_so_first(
    folder: Path, image: np.ndarray[Any, Any], words: tuple[str, ...], said: str
) -> None:
    Path("in").mkdir()
    np.save("in/a.npy", image)
    result = run("denoise", "in/a.npy", "out.npy", "--kind", "image", "--quality", "fast", *words)
    assert result.stdout.splitlines()[0].split(None, 1) == ["result", f"{said}: OUT has the samples of IN"]
    np.testing.assert_array_equal(np.load("out.npy"), image)
    result = run("denoise", "in", "many", "--kind", "image", "--quality", "fast", *words)
    assert f"{said}: OUT has the samples of IN; sigma" in result.stdout


@pytest.mark.parametrize(("name", "other"), [("in.jpg", "out.jpeg"), ("in.png", "out.png"), ("in.wav", "out.wav")])
def test_a_file_that_is_left_alone_is_copied(folder: Path, name: str, other: str) -> None:
    if name == "in.wav":
        wavfile.write(name, 8000, IMAGE.ravel().astype(np.int16))
    elif name == "in.jpg":
        Image.fromarray(np.dstack([IMAGE] * 3)).save(name, subsampling="4:2:0", quality=60)
    told = run("denoise", name, other, "--sigma", "0", "--quality", "fast").stdout
    assert "there is no noise to remove (sigma=0): OUT is a copy of IN" in told
    assert Path(other).read_bytes() == Path(name).read_bytes()
    assert "if the result looks wrong" not in told
    assert json.loads(run("denoise", name, "again" + Path(name).suffix, "--sigma", "0", "--json").stdout)["copied"]


def test_a_file_that_is_left_alone_is_coded_anew_where_that_is_asked_for(folder: Path) -> None:
    Image.fromarray(IMAGE).save("in.jpg")
    given = ("--sigma", "0", "--quality", "fast")
    told = run("denoise", "in.jpg", "out.jpg", *given, "--write", "quality=40").stdout
    assert "OUT is IN coded anew, as JPEG loses digits" in told
    assert Path("out.jpg").stat().st_size < Path("in.jpg").stat().st_size
    assert "OUT has the samples of IN" in run("denoise", "in.png", "out.tif", *given).stdout
    Image.fromarray(IMAGE).convert("P").save("palette.png")
    palette = run("denoise", "palette.png", "colours.png", *given)
    assert "palette colours converted" in palette.stderr
    assert "OUT has the samples of IN" in palette.stdout


def test_how_the_output_is_coded_is_told_where_it_is_no_copy(folder: Path) -> None:
    tifffile.imwrite("in.tif", IMAGE, compression="deflate")
    told = "is written in strips without compression; the input has compression DEFLATE"
    for sigma, anew in (("20", True), ("0", False)):
        report = run("denoise", "in.tif", f"{sigma}.tif", "--sigma", sigma, "--quality", "fast", "--json")
        notes = json.loads(report.stdout)["notes"]
        assert [note for note in notes if told in note] == [f"{sigma}.tif: {told}"] * anew
        assert report.stderr.count(told) == anew
    assert Path("0.tif").read_bytes() == Path("in.tif").read_bytes()


def test_options_are_passed_on(folder: Path, denoiser: Denoiser) -> None:
    result = run(
        "denoise", "in.npy", "out.npy", "--sigma", "0.5", "--kind", "signal", "--channel-axis", "1",
        "--max-memory", "2GiB", "--quality", "best", "--stopping", "sure", "--noise", "poisson",
    )  # fmt: skip
    ((image, sigma, options),) = denoiser.calls
    assert image.shape == (40, 2)
    assert sigma == 0.5
    chosen = {"channel_axis": 1, "max_memory": 2 * 2**30, "quality": "best", "stopping": "sure", "noise": "poisson"}
    assert options == OPTIONS | chosen
    assert "0.5 (given)" in result.stdout
    np.testing.assert_array_equal(np.load("out.npy"), np.load("in.npy") / 2)


def test_options_of_pixels_are_passed_on(folder: Path, denoiser: Denoiser) -> None:
    run(
        "denoise", "in.png", "out.png", "--quality", "pixels", "--width", "12.5", "--patch-size", "5",
        "--search-radius", "7", "--fidelity", "0", "--steps", "3",
    )  # fmt: skip
    own = {"quality": "pixels", "width": 12.5, "patch_size": 5, "search_radius": 7, "fidelity": 0.0, "steps": 3}
    assert denoiser.calls[0][2] == OPTIONS | own


@pytest.mark.parametrize("option", ["--width", "--patch-size", "--search-radius", "--fidelity", "--steps"])
def test_options_of_pixels_are_refused_elsewhere(folder: Path, denoiser: Denoiser, option: str) -> None:
    result = run("denoise", "in.png", "out.png", option, "3", code=2)
    told = " ".join(result.stderr.split())
    assert f"{option}: only quality='pixels' has it, got quality='balanced'; leave it out, or choose pixels" in told
    assert denoiser.calls == []


def test_steps_are_a_rule_by_themselves(folder: Path, denoiser: Denoiser) -> None:
    result = run("denoise", "in.png", "out.png", "--quality", "pixels", "--steps", "3", "--stopping", "sure", code=2)
    assert "got 3 together with stopping='sure'; leave one of them out" in result.stderr


def test_counts(folder: Path, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def poisson(**words: float) -> str:
        given.append(words)
        return "Poisson"

    monkeypatch.setattr("nlflow.denoising.noise.Poisson", poisson, raising=False)
    run("denoise", "in.png", "a.png", "--noise", "poisson", "--gain", "2", "--read-noise", "3.5", "--offset", "100")
    run("denoise", "in.png", "b.png", "--noise", "poisson", "--gain", "2")
    assert given == [{"gain": 2, "sigma": 3.5, "offset": 100}, {"gain": 2}]
    assert [options["noise"] for _, _, options in denoiser.calls] == ["Poisson", "Poisson"]


def test_sigma_of_channels_and_pixels(folder: Path, denoiser: Denoiser) -> None:
    Image.fromarray(RNG.integers(0, 256, (5, 6, 3), dtype=np.uint8)).save("c.png")
    run("denoise", "c.png", "out.png", "--sigma", "10,12.5,9")
    assert denoiser.calls[0][1] == [10, 12.5, 9]
    levels = np.linspace(1, 9, IMAGE.size).reshape(IMAGE.shape)
    tifffile.imwrite("map.tif", levels.astype(np.float32))
    np.save("map.npy", levels)
    Image.fromarray(levels.astype(np.uint8)).save("map.png")
    for name, dtype in (("map.tif", np.float32), ("map.npy", np.float64), ("map.png", np.uint8)):
        report = json.loads(run("denoise", "in.png", f"{name}.out.png", "--sigma", name, "--json").stdout)
        np.testing.assert_array_equal(denoiser.calls[-1][1], levels.astype(dtype))
        assert report["sigma_given"] == name
    assert "(map map.npy)" in run("denoise", "in.png", "o.png", "--sigma", "map.npy").stdout
    assert "expected (5, 6), one number for each pixel" in fails("denoise", "c.png", "x.png", "--sigma", "map.tif")
    assert "expected (12, 16)" in fails("denoise", "in.png", "x.png", "--sigma", "c.png")


def test_masks(folder: Path, denoiser: Denoiser) -> None:
    where = RNG.random(IMAGE.shape) < 0.3
    Image.fromarray(where.astype(np.uint8) * 255).save("mask.png")
    np.save("keep.npy", ~where)
    result = run("denoise", "in.png", "out.png", "--mask", "mask.png", "--keep", "keep.npy", "--compare", "fig.svg")
    options = denoiser.calls[0][2]
    assert options["mask"].dtype == options["keep"].dtype == bool
    np.testing.assert_array_equal(options["mask"], where)
    np.testing.assert_array_equal(options["keep"], ~where)
    assert f"{where.sum()} sample(s)" in result.stdout
    assert Path("fig.svg").read_text().count("<image") == 4  # with one for what is missing


def test_a_photograph_on_its_side(folder: Path, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything fits as it is seen, the pixels go through as they are stored, and the figure is upright."""
    stored = RNG.integers(0, 256, (6, 10, 3), dtype=np.uint8)
    where = np.zeros((6, 10), bool)
    where[2, 3:5] = True
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(stored).save("photo.png", exif=exif)
    Image.fromarray(np.rot90(where, -1)).save("mask.png")
    Image.fromarray(np.rot90(stored, -1)).save("clean.png")
    drawn = {}

    def comparison(noisy: Any, result: Any, **words: Any) -> str:
        drawn.update(words, noisy=noisy, result=result)
        return "figure"

    monkeypatch.setattr("nlflow.plotting.comparison_figure", comparison)
    monkeypatch.setattr("nlflow.plotting.render", lambda figure, form: b"drawn")
    beside = ["--mask", "mask.png", "--keep", "mask.png", "--reference", "clean.png"]
    report = json.loads(run("denoise", "photo.png", "o.png", *beside, "--compare", "fig.png", "--json").stdout)
    image, _, options = denoiser.calls[0]
    np.testing.assert_array_equal(image, stored)
    np.testing.assert_array_equal(options["mask"], where)
    np.testing.assert_array_equal(options["keep"], where)
    assert (report["missing"], report["kept"]) == (6, 2)
    assert report["psnr_input"] is None  # infinite
    back = files.read("o.png")
    assert back.orientation == 6
    np.testing.assert_array_equal(back.data, np.rint(stored * 0.5))
    for name, expected in (("noisy", stored), ("result", stored * 0.5), ("clean", stored), ("kept", where)):
        np.testing.assert_array_equal(drawn[name], np.rot90(expected, -1))
    np.testing.assert_array_equal(drawn["missing"], np.rot90(np.dstack([where] * 3), -1))
    assert Path("fig.png").read_bytes() == b"drawn"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.npy", "a.tif", "a.csv"])
def test_missing_numbers(folder: Path, denoiser: Denoiser, name: str) -> None:
    values = RNG.standard_normal((12, 2)).astype(np.float32)
    values[3:5, 1] = np.nan
    np.save("a.npy", values)
    tifffile.imwrite("a.tif", values)
    np.savetxt("a.csv", values, delimiter=",")
    assert json.loads(run("denoise", name, f"nan-{name}", "--json").stdout)["missing"] == 2
    assert denoiser.calls.pop()[2]["mask"] is None
    report = json.loads(run("denoise", name, f"out-{name}", "--mask", "nan", "--json").stdout)
    assert denoiser.calls[0][2]["mask"] == "nan"
    assert report["missing"] == 2
    result = run("denoise", name, f"ref-{name}", "--mask", "nan", "--reference", f"out-{name}", "-q", "--json").stdout
    assert json.loads(result)["psnr_input"] is None
    assert json.loads(result)["psnr_output"] is None  # equal to its reference, an infinity that JSON lacks


def test_a_whole_file_has_nothing_missing(folder: Path, denoiser: Denoiser) -> None:
    assert json.loads(run("denoise", "in.png", "out.png", "--mask", "nan", "--json").stdout)["missing"] == 0


@pytest.mark.slow
def test_json(folder: Path, denoiser: Denoiser) -> None:
    Image.fromarray(IMAGE // 2).save("clean.png")
    denoiser.warning = "the window was shrunk"
    result = run("denoise", "in.png", "out.npy", "--json", "--compare", "fig.svg", "--reference", "clean.png")
    report = json.loads(result.stdout)
    assert report["input"] == "in.png"
    assert report["output"] == "out.npy"
    assert report["figure"] == "fig.svg"
    assert report["shape"] == [12, 16]
    assert report["dtype"] == "uint8"
    assert report["sigma_given"] is None
    assert report["denoise"]["sigma"] == 12.5
    assert report["denoise"]["residual"] is None
    assert report["denoise"]["levels"] == [1.0, 2.0]
    assert report["denoise"]["parameters"] == {"patch_size": 7}
    assert report["psnr_output"] > report["psnr_input"] > 0
    assert 0.99 < report["ssim_output"] <= 1
    assert report["warnings"] == ["the window was shrunk"]
    assert report["seconds_total"] >= 0
    assert report["version"]
    assert "nonlocal: warning: the window was shrunk" in result.stderr


@pytest.mark.slow
def test_comparison_and_reference(folder: Path, denoiser: Denoiser) -> None:
    result = run("denoise", "in.png", "out.png", "--compare", "fig.PNG", "--reference", "in.png")
    with Image.open("fig.PNG") as figure:
        assert figure.width > 500
    assert re.search(r"^PSNR +inf dB before", result.stdout, re.MULTILINE)
    assert re.search(r"^SSIM +1.0000 before", result.stdout, re.MULTILINE)
    assert "figure" in result.stdout
    assert listing() == ["fig.PNG", "in.npy", "in.png", "out.png"]
    np.save("t.npy", np.arange(9.0))
    result = run("denoise", "t.npy", "o.npy", "--reference", "t.npy")
    assert re.search(r"^SNR +inf dB before", result.stdout, re.MULTILINE)
    assert "SSIM" not in result.stdout


def test_reference_array(folder: Path, denoiser: Denoiser) -> None:
    values = RNG.standard_normal((5, 6, 7))
    np.save("a.npy", values)
    run("denoise", "a.npy", "b.npy", "--channel-axis", "0", "--reference", "a.npy")
    np.save("c.npy", values[:, :, 1:])
    message = fails("denoise", "a.npy", "d.npy", "--channel-axis", "0", "--reference", "c.npy")
    assert "--reference: got c.npy of shape (5, 6, 6), expected (5, 6, 7)" in message


def test_notes_and_quiet(folder: Path, denoiser: Denoiser) -> None:
    Path("in.csv").write_text("time,x\n" + "".join(f"{i},{i % 3}\n" for i in range(30)))
    denoiser.warning = "shrunk"
    result = run("denoise", "in.csv", "out.npy")
    assert "nonlocal: note: in.csv: column 'time' is kept as it is" in result.stderr
    assert "nonlocal: note: out.npy: column names and the first column are left out" in result.stderr
    assert "nonlocal: warning: shrunk" in result.stderr
    result = run("denoise", "in.csv", "out.csv", "--quiet")
    assert (result.stdout, result.stderr) == ("", "")
    assert Path("out.csv").read_text().startswith("time,x\n0,0.0\n1,0.5\n")
    assert "sigma" in json.loads(run("denoise", "in.csv", "o.csv", "-q", "--json").stdout)["denoise"]


def test_outputs_that_exist(folder: Path, denoiser: Denoiser) -> None:
    Path("out.png").write_text("old")
    assert "OUT: got out.png, already there" in fails("denoise", "in.png", "out.png")
    assert "give --existing overwrite" in fails("denoise", "in.png", "out.png", "--existing", "refuse")
    result = run("denoise", "in.png", "out.png", "--existing", "skip")
    assert "1 of 1 output(s) are there already" in result.stderr
    skipped = json.loads(run("denoise", "in.png", "out.png", "--existing", "skip", "--json").stdout)
    assert skipped == {"input": "in.png", "output": "out.png", "skipped": True}
    assert Path("out.png").read_text() == "old"
    assert denoiser.calls == []
    run("denoise", "in.png", "out.png", "--existing", "overwrite")
    assert files.read("out.png").data.shape == IMAGE.shape
    Path("fig.svg").write_text("old")
    assert "--compare: got fig.svg, already there" in fails("denoise", "in.png", "new.png", "--compare", "fig.svg")


# --- progress in a log -----------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let seconds pass."""
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_log_gets_a_line_every_half_minute(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    log = terminal.Log("a.png")
    for second in range(100):
        log(second / 100)
        clock(1)
    log.name = "b.png"
    log(0.999)
    lines = [f"nonlocal: a.png: {share} % done" for share in (30, 60, 90)]
    assert capsys.readouterr().err.splitlines() == lines
    clock(25)
    log(0.999)
    assert capsys.readouterr().err == "nonlocal: b.png: 99 % done\n"


def test_a_log_tells_how_many_minutes_are_left(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    log = terminal.Log("clip.mp4")
    for share in (0.02, 0.17, 0.17, 0.42, 0.8):  # the first share holds what comes before the work: it tells no pace
        clock(30)
        log(share)
    ends = [line.partition("% done")[2] for line in capsys.readouterr().err.splitlines()]
    assert ends == ["", ", about 3 min left", "", ", about 2 min left", ""]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "faster"),
    [
        ([], "; --quality fast is quicker"),
        (["--quality", "best"], ""),
        (["--quality", "fast"], ""),
        (["--json"], "; --quality fast is quicker"),
    ],
)
def test_a_log_says_at_once_what_takes_minutes(
    folder: Path, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch, options: list[str], faster: str
) -> None:
    quality = options[1] if "--quality" in options else "balanced"
    told = f"16 x 12 samples with --quality {quality} may take minutes; lines tell how far it is{faster}"
    said = f"nonlocal: note: in.png: {told}"
    assert said.partition(":")[2] not in run("denoise", "in.png", "small.png", *options).stderr
    monkeypatch.setattr(denoise_file, "_LARGE", IMAGE.size)
    if quality == "fast":  # which takes many more samples in the same time
        assert run("denoise", "in.png", "seconds.png", *options).stderr == ""
        monkeypatch.setattr(denoise_file, "_LARGE", IMAGE.size // denoise_file._IN_FAST)
    result = run("denoise", "in.png", "out.png", *options)
    assert result.stderr.splitlines() == [said]
    assert said not in result.stdout
    assert run("denoise", "in.png", "quiet.png", "-q", *options).stderr == ""
    np.save("long.npy", IMAGE.ravel())  # as long a recording takes more time
    monkeypatch.setattr(denoise_file, "_LARGE", 2 * IMAGE.size // (denoise_file._IN_FAST if quality == "fast" else 1))
    assert "take minutes" in run("denoise", "long.npy", "short.npy", *options).stderr
    assert "take minutes" not in run("denoise", "in.png", "again.png", *options).stderr


def test_a_log_of_a_real_run_tells_the_share_of_the_work(folder: Path, clock: Clock) -> None:
    real, shares = nlflow.denoise, []

    def slow(*args: Any, progress: Callable[[float], None], **words: Any) -> Any:
        def told(share: float) -> None:
            clock(terminal.PAUSE)
            shares.append(share)
            progress(share)

        return real(*args, progress=told, **words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nlflow.denoising.denoise", slow)
        words = ("--sigma", "20", "--quality", "pixels", "--search-radius", "3")
        lines = run("denoise", "in.png", "out.png", *words).stderr.splitlines()
    assert [line.partition(", about")[0] for line in lines] == [
        f"nonlocal: in.png: {math.floor(100 * share)} % done" for share in shares
    ]
    assert lines[-1] == "nonlocal: in.png: 100 % done"


def test_a_log_of_a_folder_names_files_and_begins_once(
    folder: Path, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(denoise_file, "_LARGE", 1)
    (folder / "in").mkdir()
    for name in ("a.png", "b.png"):
        files.write(folder / "in" / name, IMAGE, files.read("in.png"))
    assert run("denoise", "in", "out").stderr.count("take minutes") == 1


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.png", "out.png"], "missing.png: there is no such file"),
        (
            ["in.png", "out.gif"],
            "out.gif: a GIF file holds 256 colours",
        ),
        (["in.png", "out.wav"], "out.wav: WAV files cannot hold an image"),
        (["in.png", "nowhere/out.png"], "does not exist"),
        (
            ["in.png", "in.npy/out.png"],
            "in.npy, a file, as the folder, expected a file that can be written",
        ),
        (["x" * 300, "out.png"], "xxx...: File name too long; choose a shorter name"),
        (["in.png", "in.png"], "OUT: got in.png, the same file as IN"),
        (["in.png", "./x/../in.png"], "the same file as IN"),
        (["in.png", "link.png"], "the same file as IN"),
        (["in.png", "hard.png"], "the same file as IN"),
        (["in.png", "out.png", "--compare", "out.png"], "--compare: got out.png, the same file as OUT"),
        (["in.png", "out.png", "--compare", "in.png"], "the same file as IN"),
        (["in.png", "in.npy", "--reference", "in.npy"], "OUT: got in.npy, the same file as --reference"),
        (["in.png", "in.npy", "--mask", "in.npy"], "OUT: got in.npy, the same file as --mask"),
        (["in.png", "out.png", "--compare", "fig.jpg"], "--compare: got fig.jpg, expected a name that ends in .png"),
        (["in.png", "out.png", "--compare", "nowhere/fig.png"], "does not exist"),
        (["in.png", "out.png", "--reference", "in.npy"], "--reference: got in.npy of shape (40, 2)"),
        (["in.png", "out.png", "--reference", "missing.npy"], "--reference: missing.npy: there is no such file"),
        (["in.png", "out.png", "--mask", "missing.npy"], "--mask: missing.npy: there is no such file"),
        (["in.png", "out.png", "--mask", "in.npy"], "--mask: got in.npy of shape (40, 2), expected (12, 16)"),
        (["in.png", "out.png", "--keep", "in.npy"], "--keep: got in.npy of shape (40, 2), expected (12, 16)"),
        (["in.png", "out.png", "--sigma", "in.npy"], "--sigma: got in.npy of shape (40, 2), expected (12, 16)"),
        (["in.png", "out.png", "--sigma", "missing.tif"], "--sigma: missing.tif: there is no such file"),
        (["in.png", "out.png", "--kind", "signal"], "kind: got 'signal'"),
        (["in.png", "out.png", "--channel-axis", "2"], "channel_axis: got 2"),
    ],
)
def test_refused_before_any_work(folder: Path, denoiser: Denoiser, arguments: list[str], message: str) -> None:
    Path("link.png").symlink_to("in.png")
    Path("hard.png").hardlink_to("in.png")
    assert message in fails("denoise", *arguments)
    assert denoiser.calls == []


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (InputError("sigma: got -1.0,\nexpected a number >= 0"), "error: sigma: got -1.0, expected a number >= 0"),
        (MemoryError(), "out of memory"),
        (OSError(5, "Input/output error"), "Input/output error"),
    ],
)
def test_nothing_is_written_when_denoising_fails(
    folder: Path, denoiser: Denoiser, failure: Exception, message: str
) -> None:
    Path("out.png").write_text("old")
    denoiser.failures[-1] = failure
    arguments = ["--sigma", "9", "--compare", "fig.png", "--existing", "overwrite"]
    assert message in fails("denoise", "in.png", "out.png", *arguments)
    assert Path("out.png").read_text() == "old"


def test_nothing_is_written_when_drawing_fails(
    folder: Path, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise InputError("figure: got nothing")

    monkeypatch.setattr("nlflow.plotting.comparison_figure", fail)
    assert "figure: got nothing" in fails("denoise", "in.png", "out.png", "--compare", "fig.png")


def test_programming_errors_are_not_hidden(folder: Path, denoiser: Denoiser) -> None:
    denoiser.failures[-1] = ZeroDivisionError("a fault of ours")
    with pytest.raises(ZeroDivisionError):
        run("denoise", "in.png", "out.png")


def test_interrupt(folder: Path, denoiser: Denoiser) -> None:
    denoiser.failures[-1] = KeyboardInterrupt()
    result = run("denoise", "in.png", "out.png", "--compare", "fig.png", code=130)
    assert result.stderr == "nonlocal: interrupted\n"
    assert listing() == ["in.npy", "in.png"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["denoise"],
        ["denoise", "in.png"],
        ["denoise", "in.png", "out.png", "--sigma", "much"],
        ["denoise", "in.png", "out.png", "--sigma", "1,x"],
        ["denoise", "in.png", "out.png", "--sigma", ""],
        ["denoise", "in.png", "out.png", "--kind", "video"],
        ["denoise", "in.png", "out.png", "--quality", "perfect"],
        ["denoise", "in.png", "out.png", "--noise", "pink"],
        ["denoise", "in.png", "out.png", "--stopping", "never"],
        ["denoise", "in.png", "out.png", "--existing", "ask"],
        ["denoise", "in.png", "out.png", "--gain", "2"],
        ["denoise", "in.png", "out.png", "--read-noise", "2"],
        ["denoise", "in.png", "out.png", "--noise", "gaussian", "--offset", "2"],
        ["denoise", "in.png", "out.png", "--channel-axis", "x"],
        ["denoise", "in.png", "out.png", "--unknown"],
        ["denoise", "in.png", "out.png", "--sigma", "-3"],
        ["denoise", "in.png", "out.png", "--sigma", "3,-3"],
        ["denoise", "in.png", "out.png", "--sigma", "nan"],
        ["denoise", "in.png", "out.png", "--strength", "-1"],
        *(["denoise", "in.png", "out.png", "--max-memory", size] for size in ("0", "x", "2XB", "1.2.3", "-1", "1e99")),
    ],
)
def test_wrong_usage(folder: Path, denoiser: Denoiser, arguments: list[str]) -> None:
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert "Usage: nonlocal" in result.stderr
    assert denoiser.calls == []
    if arguments[3:4] and arguments[3] in ("--gain", "--read-noise"):
        assert f"{arguments[3]}: is a property of counts; give --noise poisson too" in result.stderr


def test_a_quality_that_is_none_is_told_the_others(folder: Path) -> None:
    said = "Error: Invalid value for '--quality': 'great' is not one of 'fast', 'balanced', 'best', 'pixels'."
    assert said in run("denoise", "in.png", "out.png", "--quality", "great", code=2).stderr


@pytest.mark.parametrize("words", [["photo.jpg"], ["photo.jpg", "--sigma", "10"], ["--quality", "fast", "photo.jpg"]])
def test_one_name_alone_lacks_out(folder: Path, words: list[str]) -> None:
    assert "OUT: got 'photo.jpg' alone, expected where to write too" in run("denoise", *words, code=2).stderr


@pytest.mark.parametrize("name", ["nowhere", "nowhere.txt", "nowhere.png"])
def test_what_is_not_there_is_not_judged_by_its_name(folder: Path, name: str) -> None:
    assert f"{name}: there is no such file" in fails("denoise", name, "out.png")


@pytest.mark.parametrize("words", [[], ["--quality", "fast"]])
def test_without_a_name_in_is_missing(folder: Path, words: list[str]) -> None:
    assert "Missing argument 'IN'" in run("denoise", *words, code=2).stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("1e9", 10**9),
        ("2GiB", 2**31),
        ("2g", 2**31),
        ("1.5 MB", 1500000),
        ("4kib", 4096),
        ("1TB", 10**12),
        ("7B", 7),
    ],
)
def test_sizes(folder: Path, denoiser: Denoiser, text: str, size: int) -> None:
    run("denoise", "in.png", "out.png", "--max-memory", text)
    assert denoiser.calls[0][2]["max_memory"] == size


@pytest.mark.skipif(os.name != "posix", reason="names of POSIX")
def test_names_that_are_no_text(folder: Path, denoiser: Denoiser) -> None:
    name = os.fsdecode(b"out-\xff.npy")
    result = run("denoise", "in.png", name)
    assert r"out-\udcff.npy" in result.stdout
    again = run("denoise", "in.png", name, "--json", "--existing", "overwrite")
    assert json.loads(again.stdout)["output"] == name


def test_verbose_is_about_one_printed_report(folder: Path, denoiser: Denoiser) -> None:
    for words in (("in.png", "out.png", "--json"), ("in.png", "out.png", "--quiet"), ("in.png", "in.npy", "out")):
        assert "--verbose" in run("denoise", *words, "--verbose", code=2).stderr
    assert not denoiser.calls
    assert "--verbose" in run("noise", "in.png", "--quiet", "--verbose", code=2).stderr


def test_counts_have_no_sigma_of_their_own() -> None:
    details = {
        "noise": "counts: 2 a count",
        "model": {"kind": "poisson"},
        "sigma": 1.0,
        "sigma_estimated": False,
        "residual": 3.0,
    }
    report = {"input": "in.tif", "kind": "image", "shape": (2, 3), "dtype": "float32", "denoise": details}
    report |= {"seconds_total": 1.0, "missing": 0, "kept": 0, "output": "out.tif", "figure": None, "sigma_given": None}
    rows = dict(reports.summary(report, verbose=True))
    assert "sigma" not in rows
    assert rows["removed"] == "3: root mean square of input minus result, in the units of the file"


def report_of(**details: Any) -> dict[str, Any]:
    about = {"noise": "white noise", "sigma": 2.0, "sigma_estimated": True, "quality": "pixels", "stopped_by": ""}
    return {"input": "a.png", "output": "b.png", "figure": None, "kind": "image", "shape": (4, 4, 3), "dtype": "uint8",
            "sigma_given": None, "missing": 0, "kept": 0, "seconds_total": 1.0, "denoise": about | details}  # fmt: skip


def test_a_report_says_what_it_rests_on_and_what_the_preset_works_with() -> None:
    doubtful = dict(summary(report_of(confidence="medium", reasons=("structure is everywhere",))))
    assert doubtful["because"] == "structure is everywhere"
    assert "--strength" in doubtful["doubt"]
    assert "--flat" in doubtful["doubt"]
    told = dict(summary(report_of(confidence="low", reasons=("structure is everywhere",))))
    assert told["because"] == "structure is everywhere"
    assert "doubt" not in told  # the warning of the denoiser has said it
    recording = report_of(confidence="medium", reasons=("few samples",)) | {"kind": "signal"}
    assert "--flat" not in dict(summary(recording))["doubt"]
    assert "because" not in dict(summary(report_of(confidence="high", reasons=("flat parts show it",))))
    cut = report_of(sigma_effective=3.9, model={"spectrum": [1.0]}, residual=1.0)
    assert dict(summary(cut))["sigma"].startswith("3.9 (estimated)")
    assert not {"taken for", "removed"} & set(dict(summary(cut)))
    balanced = dict(summary(report_of(sigma_effective=3.9, quality="balanced", model={"kind": "gaussian"})))
    assert balanced["sigma"].endswith("in grey levels; more than in quiet parts, where compression may have taken some")
    taken = dict(summary(cut, verbose=True))
    assert taken["taken for"] == "white noise of sigma 3.9: --quality pixels knows no correlated noise"
    assert dict(summary(report_of() | {"alpha": True}))["input"].endswith("uint8; its alpha channel is kept as it is")


def test_a_report_tells_of_several_sigmas_and_of_what_alpha_hides() -> None:
    several = dict(summary(report_of(sigma_estimated=False) | {"sigma_given": [15.0, 20.0, 25.0]}, verbose=True))
    assert several["sigma"].startswith("15, 20, 25 (given): standard deviation")
    less = dict(summary(report_of(sigma_estimated=False) | {"sigma_given": [15.0, 20.0], "strength": 0.5}))
    assert less["sigma"].startswith("7.5, 10 (given, times 0.5): ")
    seen = report_of() | {"hidden": 4, "missing": 12, "channel_axis": 2}
    assert dict(summary(seen))["hidden"] == "4 pixel(s) by the alpha channel, which stay as they are"
    assert "missing" not in dict(summary(seen))
    assert dict(summary(seen | {"missing": 15}))["missing"] == "3 sample(s)"


def test_what_alpha_hides_is_counted(folder: Path, denoiser: Denoiser) -> None:
    alpha = np.full((12, 16), 255, np.uint8)
    alpha[:2] = 0
    Image.fromarray(np.dstack([IMAGE] * 3 + [alpha])).save("alpha.png")
    for command in (("denoise", "alpha.png", "out.png"), ("noise", "alpha.png")):
        assert re.search(r"^hidden +32 pixel\(s\) by the alpha channel", run(*command).stdout, re.MULTILINE)


def test_figures_of_quality_are_those_of_what_is_written(folder: Path, denoiser: Denoiser) -> None:
    """What alpha hides is filled in on the way, and is not in the output."""
    alpha, clean = np.full((12, 16), 255, np.uint8), np.dstack([IMAGE // 2] * 3)
    alpha[:2] = 0
    for name, colours in (("alpha.png", np.dstack([IMAGE] * 3)), ("clean.png", clean)):
        Image.fromarray(np.dstack([colours, alpha])).save(name)
    report = json.loads(run("denoise", "alpha.png", "out.png", "--reference", "clean.png", "--json").stdout)
    written = np.where(alpha > 0, IMAGE / 2, IMAGE)[..., None] + np.zeros(3)
    assert report["psnr_output"] == pytest.approx(psnr(clean, written))
    assert files.read(Path("out.png")).data[0, 0, 0] == IMAGE[0, 0]


def test_the_residual_of_counts_has_colours_that_reach_as_far(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts have no sigma in the units of the file."""
    drawn: list[Any] = []
    monkeypatch.setattr(denoise_file, "_draw", lambda given, result, sigma, *_: drawn.append(sigma) or b"")
    tifffile.imwrite("counts.tif", np.random.default_rng(0).poisson(60, (24, 24)).astype(np.uint16) * 50)
    model = "gain.json"
    nlflow.Poisson(50.0).save(model)
    report = json.loads(
        run("denoise", "counts.tif", "out.tif", "--noise", model, "--compare", "a.png", "--json").stdout
    )
    assert drawn == [report["denoise"]["residual"]]
    assert drawn[0] > 100


def test_a_report_tells_of_the_strength() -> None:
    nothing = "returned unchanged: there is no noise to remove (sigma=0)"
    none = dict(summary(report_of(sigma=0.0, stopped_by=nothing) | {"strength": 0.0}))
    assert none["result"] == "strength 0: nothing was to be removed; OUT has the samples of IN"
    assert dict(summary(report_of() | {"strength": 1000.0}))["sigma"].startswith("2 (1000 times what was found)")


@pytest.mark.parametrize(
    ("noise", "told"),
    [
        ("white noise: sigma 1.2e-05", "white noise"),
        ("white noise: sigma 3 and 4 and 5 by channel", "white noise"),
        (
            "speckle of 3 looks; Rician noise: sigma 8.2 (confidence low)",
            "speckle of 3 looks; Rician noise (confidence low)",
        ),
        (
            "a camera: over 2 pixels, sigma 5 in dark parts to 7 in light parts",
            "a camera: over 2 pixels, stronger in light parts",
        ),
        (
            "a camera: over 2 pixels, sigma 5 to 7, depending on the brightness",
            "a camera: over 2 pixels, depending on the brightness",
        ),
    ],
)
def test_a_report_has_one_sigma(noise: str, told: str) -> None:
    lines = summary(report_of(noise=noise))
    assert dict(lines)["noise"] == told
    assert sum("sigma" in f"{name}{text}" for name, text in lines) == 1
    assert dict(summary(report_of(noise=noise), verbose=True))["measured"] == noise


def test_json_has_a_list_of_numbers_on_one_line() -> None:
    value = {"a": [[1.0, 2.5], [3.0, None]], "b": {}, "c": [{"d": "ü"}, []], "e": [], "f": True}
    text = json_text(value)
    assert json.loads(text) == value
    assert "    [1.0, 2.5]," in text.splitlines()


# --- finer settings, and former options ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("former", "now"),
    [
        ("--stopping sure", "--set stopping=sure"),
        ("--quality pixels --width 12 --patch-size 5", "--quality pixels --set width=12 --set patch-size=5"),
        (
            "--quality pixels --search-radius=4 --fidelity 0.5",
            "--quality pixels --set search_radius=4 --set fidelity=0.5",
        ),
        ("--quality pixels --steps 3", "--quality pixels --set steps=3"),
        ("--max-memory 2GiB --device auto", "--set max-memory=2GiB --set device=auto"),
        ("--kind signal", "--axes kind=signal"),
        ("--channel-axis -1", "--axes channel-axis=-1"),
    ],
)
def test_former_options_do_what_they_did(folder: Path, denoiser: Denoiser, former: str, now: str) -> None:
    for number, words in enumerate((former, now)):
        run("denoise", "in.npy", f"out{number}.npy", *words.split())
    (_, _, before), (_, _, after) = denoiser.calls
    assert before == after
    assert before != OPTIONS


def test_the_help_has_few_options_and_names_the_others() -> None:
    story = run("denoise", "--help-all").stdout
    assert len(re.findall(r"^  (?:-\w, )?--[a-z]", story.partition("\nOptions:\n")[2], re.MULTILINE)) <= 20
    for name, one in denoising_options.OPTIONS.items():
        known = name in ("strength", "separate") or re.search(rf"^  {name.replace('_', '-')}  ", story, re.MULTILINE)
        assert known, (name, one)
    for former in ("--width", "--gain", "--spacing", "--video-quality", "--scheduler"):
        assert former not in story


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "steps"), "--set: got 'steps', expected NAME=VALUE"),
        (("--set", "spacing=1"), "--set: got 'spacing=1', expected NAME=VALUE with a NAME of stopping, max-memory"),
        (("--set", "device=gpu"), "--set device: got 'gpu'"),
        (("--quality", "pixels", "--set", "patch-size=4"), "--set patch-size: got 4, expected an odd integer"),
        (("--patch-size", "4", "--quality", "pixels"), "--patch-size: got 4, expected an odd integer"),
        (("--width",), "--width: needs a value; it is now written --set width=VALUE"),
        (("--axes", "ZYX:5,a"), "--axes spacing: got '5,a', expected positive numbers"),
        (("--write", "quality=101"), "--write quality: got '101', expected lossless, or a whole number"),
        (("--write", "workers=0"), "--write workers: is for an OUT that ends in .zarr"),
    ],
)
def test_settings_are_refused_by_name(folder: Path, words: tuple[str, ...], said: str) -> None:
    assert f"Invalid value for {said}" in " ".join(run("denoise", "in.png", "out.png", *words, code=2).stderr.split())
    assert listing() == ["in.npy", "in.png"]


def test_quality_of_jpeg(folder: Path, denoiser: Denoiser) -> None:
    sizes = []
    for words in ((), ("--write", "quality=20")):
        run("denoise", "in.png", "out.jpg", "--existing", "overwrite", *words)
        sizes.append(Path("out.jpg").stat().st_size)
    assert sizes[1] < sizes[0]
    assert "expected a whole number from 1 to 100 for a JPEG file" in " ".join(
        run("denoise", "in.png", "more.jpg", "--write", "quality=lossless", code=2).stderr.split()
    )
