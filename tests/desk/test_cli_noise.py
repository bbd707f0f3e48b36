"""The command `nonlocal noise`, and what `nonlocal denoise` takes as noise: words, strengths and models in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nlflow.denoising import DenoiseInfo
from nlflow.denoising.noise import GaussianNoise, Poisson, estimate_noise, load_noise
from tests.commands import OPTIONS, Denoiser, fails, listing, run

SIGMA = 8.0


def noisy(shape: tuple[int, ...] = (96, 112)) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(3)
    ramp = np.linspace(60, 190, shape[0])[:, None] + np.zeros(shape[1])
    clean = ramp if len(shape) == 2 else ramp[..., None] + np.zeros(shape[2])
    return np.clip(np.rint(clean + rng.normal(0, SIGMA, shape)), 0, 255).astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(noisy()).save("in.png")
    Image.fromarray(noisy((96, 100, 3))).save("colour.png")
    rng = np.random.default_rng(4)
    wave = 50 * np.sin(np.arange(900) / 40)
    columns = np.stack([np.arange(900.0), wave + rng.normal(0, 5, 900), wave + rng.normal(0, 1, 900)], axis=1)
    np.savetxt("table.csv", columns, delimiter=",", header="time,a,b", comments="")
    np.savetxt("one.csv", columns[:, 1:2], delimiter=",", header="a", comments="")
    return tmp_path


def rows(text: str) -> list[tuple[str, str]]:
    pairs = (line.split("  ", 1) for line in text.splitlines())
    return [(name.strip(), value.strip()) for name, value in pairs]


@pytest.mark.slow
def test_the_verdict_in_words(folder: Path) -> None:
    result = run("noise", "in.png")
    found = estimate_noise(noisy())
    told = dict(rows(result.stdout))
    assert told["input"] == "in.png, image of 96 x 112, uint8"
    assert told["noise"] == found.model.describe()
    assert told["confidence"] == found.confidence
    assert told["because"] in found.reasons
    assert result.stderr == ""
    assert abs(float(told["noise"].rpartition(" ")[2]) - SIGMA) < 0.8  # the noise that was added, to 10 %
    assert listing() == ["colour.png", "in.png", "one.csv", "table.csv"]
    assert run("noise", "in.png", "--quiet").stdout == ""


def test_json_holds_the_model(folder: Path) -> None:
    report = json.loads(run("noise", "in.png", "--json").stdout)
    found = estimate_noise(noisy())
    assert report["model"] == json.loads(json.dumps(found.model.as_dict()))
    assert report["noise"] == found.model.describe()
    assert (report["confidence"], tuple(report["reasons"])) == (found.confidence, found.reasons)
    np.testing.assert_array_equal(report["measured"]["intensities"], found.measured["intensities"])
    assert report["written"] == {"figure": None, "model": None}
    assert report["version"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in.png", pytest.param("colour.png", marks=pytest.mark.slow), "one.csv"])
@pytest.mark.sampled(1)
def test_figure_and_model_are_written(folder: Path, name: str) -> None:
    before = listing()
    result = run("noise", name, "--figure", "noise.png", "--save", "model.json")
    assert listing() == sorted([*before, "model.json", "noise.png"])
    with Image.open("noise.png") as figure:
        assert figure.size[0] > 1000
    assert ("model", "model.json") in rows(result.stdout)
    report = json.loads(run("noise", name, "--json").stdout)
    model = report["columns"][0]["model"] if "columns" in report else report["model"]
    assert json.loads(json.dumps(load_noise("model.json").as_dict())) == model


@pytest.mark.slow
def test_a_line_for_each_column(folder: Path) -> None:
    told = dict(rows(run("noise", "table.csv", "--figure", "noise.svg").stdout))
    assert set(told) == {"input", "noise of a", "noise of b", "figure"}
    assert told["noise of a"].startswith(("white noise: sigma 4.", "white noise: sigma 5"))
    assert "(confidence " in told["noise of b"]
    report = json.loads(run("noise", "table.csv", "--json").stdout)
    assert [column["name"] for column in report["columns"]] == ["a", "b"]
    before = listing()
    result = run("noise", "table.csv", "--save", "model.json", code=2)
    assert "2 columns, each with noise of its own" in " ".join(result.stderr.split())
    assert listing() == before


@pytest.mark.slow
def test_samples_that_are_missing_do_not_count(folder: Path) -> None:
    values = noisy().astype(float)
    values[30:36, 40:46] = np.nan
    np.save("holes.npy", values)
    np.save("colours.npy", np.stack([values] * 3, axis=-1))
    hidden = np.isnan(values)
    Image.fromarray((255 * hidden).astype(np.uint8)).save("mask.png")
    np.save("filled.npy", np.where(hidden, 1e4, values))
    told = dict(rows(run("noise", "holes.npy", "--mask", "nan", "--figure", "holes.png").stdout))
    assert told["missing"] == "36 sample(s)"
    assert abs(float(told["noise"].rpartition(" ")[2]) - SIGMA) < 0.8
    other = dict(rows(run("noise", "filled.npy", "--mask", "mask.png").stdout))
    assert other["noise"] == told["noise"]
    report = json.loads(run("noise", "holes.npy", "--mask", "nan", "--json").stdout)
    found = estimate_noise(np.where(hidden, 0, values), mask=hidden)
    assert report["missing"] == 36
    assert report["measured"]["interval"] == list(found.measured["interval"])
    assert json.loads(run("noise", "holes.npy", "--json").stdout)["model"] == report["model"]  # NaN is missing unasked
    assert dict(rows(run("noise", "colours.npy", "--mask", "nan").stdout))["missing"] == "108 sample(s)"


@pytest.mark.parametrize("command", [("noise", "none.csv"), ("denoise", "none.csv", "out.csv")])
def test_a_file_without_a_number_is_named(folder: Path, command: tuple[str, ...]) -> None:
    Path("none.csv").write_text("v\n" + "nan\n" * 30)
    assert "error: none.csv: got no sample that is a number" in fails(*command)
    assert not Path("out.csv").exists()


@pytest.mark.slow
def test_bad_input_leaves_nothing_behind(folder: Path) -> None:
    (folder / "broken.png").write_bytes(b"no picture")
    np.save("cube.npy", np.zeros((4, 5, 6, 7)))
    outputs = ["--figure", "fig.png", "--save", "model.json"]
    assert "broken.png: got a text file, expected" in fails("noise", "broken.png", *outputs)
    assert "no such file" in fails("noise", "none.png", *outputs)
    assert "one to three dimensions" in fails("noise", "cube.npy", *outputs)
    assert "--figure: got fig.bmp" in fails("noise", "in.png", "--figure", "fig.bmp", "--save", "model.json")
    assert "nowhere" in fails("noise", "in.png", "--figure", "fig.png", "--save", "nowhere/model.json")
    assert "the same file as FILE" in fails("noise", "in.png", "--figure", "in.png")
    (folder / "taken.png").write_bytes(b"mine")
    assert "already there" in fails("noise", "in.png", "--figure", "taken.png")
    assert (folder / "taken.png").read_bytes() == b"mine"
    run("noise", "in.png", "--figure", "taken.png", "--existing", "overwrite")
    assert (folder / "taken.png").read_bytes().startswith(b"\x89PNG")
    result = run("noise", "in.png", "--save", "model.txt", code=2)
    assert "ends in .json" in " ".join(result.stderr.split())
    assert run("noise", code=2).stdout == ""


def test_a_folder_is_told_to_be_one(folder: Path) -> None:
    Path("photos").mkdir()
    said = "FILE: photos is a folder, and noise takes one file; name a file in it, or for frames"
    assert said in fails("noise", "photos")


def test_ctrl_c_ends_it_with_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **words: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nlflow.denoising.noise.estimate_noise", interrupted)
    before = listing()
    result = run("noise", "in.png", "--figure", "fig.png", code=130)
    assert result.stderr == "nonlocal: interrupted\n"
    assert listing() == before


# ---- what denoise takes


def test_noise_and_strength_are_passed_on(folder: Path, denoiser: Denoiser) -> None:
    run("denoise", "in.png", "a.png", "--strength", "1.5")
    run("denoise", "in.png", "b.png", "--noise", "white", "--strength", "0.5")
    assert [call[2] for call in denoiser.calls] == [
        OPTIONS | {"strength": 1.5},
        OPTIONS | {"noise": "white", "strength": 0.5},
    ]
    Poisson(2.5, 4.0, 100.0).save("counts.json")
    run("denoise", "in.png", "c.png", "--noise", "counts.json")
    assert denoiser.calls[2][2]["noise"] == Poisson(2.5, 4.0, 100.0)


@pytest.mark.slow
def test_a_model_of_one_picture_denoises_another(folder: Path) -> None:
    model = GaussianNoise.from_kernel(np.ones((2, 2)), 9.0)
    model.save("model.json")
    report = json.loads(run("denoise", "in.png", "out.png", "--noise", "model.json", "--json").stdout)
    assert report["denoise"]["noise"] == model.describe()
    assert report["denoise"]["model"] == json.loads(json.dumps(model.as_dict()))
    table = dict(rows(run("denoise", "in.png", "again.png", "--noise", "model.json").stdout))
    assert table["noise"] == model.describe().removesuffix(", sigma 9")
    assert table["sigma"].startswith("9 (of the model): ")
    np.testing.assert_array_equal(np.asarray(Image.open("out.png")), np.asarray(Image.open("again.png")))
    report = json.loads(
        run("denoise", "in.png", "more.png", "--noise", "model.json", "--strength", "2", "--json").stdout
    )
    assert report["denoise"]["sigma"] == pytest.approx(18.0)


@pytest.mark.slow
def test_what_was_found_is_printed(folder: Path) -> None:
    table = dict(rows(run("denoise", "in.png", "out.png", "--quality", "fast").stdout))
    found = estimate_noise(noisy())
    assert table["noise"].endswith(f"(confidence {found.confidence})")
    several = run("denoise", "in.png", "colour.png", "many", "--quality", "fast")
    assert all("(confidence " in line for line in several.stdout.splitlines()[:-1])
    assert "confidence" not in run("denoise", "in.png", "white.png", "--quality", "fast", "--noise", "white").stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--noise", "gaussian"], "is now called white; say --noise white"),
        (["--noise", "pink"], "expected auto, white, poisson, rician, impulses, hot or a file"),
        (["--noise", "model.json", "--sigma", "3"], "leave one of them out"),
        (["--noise", "model.json", "--sigma", "map.npy"], "leave one of them out"),
        (["--noise", "model.json", "--gain", "2"], "give --noise poisson too"),
        (["--noise", "poisson", "--strength", "2"], "is not for counts"),
        (["--noise", "counts.json", "--strength", "2"], "is not for counts"),
        (["--strength", "-1"], "expected a finite real number >= 0"),
        (["--strength", "nan"], "expected a finite real number >= 0"),
        (["--strength", "inf"], "expected a finite real number >= 0"),
        (["--strength", "much"], "a valid"),
    ],
)
def test_wrong_usage(folder: Path, denoiser: Denoiser, options: list[str], message: str) -> None:
    GaussianNoise(3.0).save("model.json")
    Poisson().save("counts.json")
    np.save("map.npy", np.ones((96, 112)))
    before = listing()
    result = run("denoise", "in.png", "out.png", *options, code=2)
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert denoiser.calls == []
    assert listing() == before


@pytest.mark.slow
def test_models_that_do_not_fit_leave_nothing_behind(folder: Path) -> None:
    GaussianNoise([3.0, 4.0, 5.0]).save("three.json")
    (folder / "cut.json").write_text((folder / "three.json").read_text()[:-9])
    (folder / "negative.json").write_text('{"kind": "gaussian", "sigma": 5, "spectrum": [[1, -1], [1, 1]]}')
    (folder / "picture.json").write_bytes((folder / "in.png").read_bytes())
    (folder / "hum.json").write_text('{"kind": "hum", "frequencies": [0.1]}')
    for name, message in (
        ("three.json", "noise: the model is of pictures with 3 channel(s), and this one has 1; measure one like it"),
        ("cut.json", "cut.json: got what is no JSON"),
        ("negative.json", "negative.json: noise: spectrum: got -1, expected powers >= 0"),
        ("picture.json", "picture.json: got what is no JSON"),
        ("none.json", "none.json: got no such file"),
        ("hum.json", "hum is a noise of recordings"),
    ):
        assert message in fails("denoise", "in.png", "out.png", "--noise", name)


@pytest.mark.slow
def test_zarr_says_that_noise_is_white(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dask")
    calls = []

    def store(source: Path, target: str, sigma: Any, *, progress: Any, **words: Any) -> Any:
        calls.append((sigma, words["noise"], words["options"].strength))
        return DenoiseInfo(1.0, sigma is None, "Gaussian", "balanced", "E"), {"blocks": 1, "kept": 0, "bytes": 1}

    monkeypatch.setattr("nlflow.desk.large.denoise_store", store)
    assert "note: the noise is taken to be white" in run("denoise", "in.tif", "out.zarr").stderr
    for words in (["--sigma", "3"], ["--noise", "white"], ["--quiet"], ["--noise", "poisson"]):
        assert run("denoise", "in.tif", "out.zarr", *words).stderr == ""
    run("denoise", "in.tif", "out.zarr", "--sigma", "3", "--strength", "2")
    assert calls[0] == (None, "auto", 1.0)
    assert calls[-1] == (3.0, "auto", 2.0)


@pytest.mark.slow
def test_the_noise_of_a_flat_part(folder: Path, denoiser: Denoiser) -> None:
    result = run("noise", "colour.png", "--flat", "20:84,10:90", "--save", "model.json")
    told = dict(rows(result.stdout))
    found = estimate_noise(noisy((96, 100, 3)), channel_axis=-1, flat=np.s_[20:84, 10:90])
    assert told["noise"] == found.model.describe()
    for number, name in enumerate(("red", "green", "blue")):
        level, sigma = (found.measured[which][number] for which in ("level", "sigma"))
        assert told[name].startswith(f"level {level:.4g}, sigma {sigma:.3g}, correlation with the next row ")
    assert abs(float(told["red"].split("sigma ")[1].split(",")[0]) - SIGMA) < 0.8
    assert "one level" in result.stdout
    np.testing.assert_allclose(load_noise("model.json").sigma, found.model.sigma)
    assert dict(rows(run("noise", "in.png", "--flat", "20:84,10:90").stdout))["flat part"].startswith("level ")
    report = json.loads(run("noise", "in.png", "--flat", "20:84,10:90", "--json").stdout)
    assert report["measured"]["sigma"][0] == pytest.approx(SIGMA, rel=0.1)
    run("denoise", "colour.png", "out.png", "--flat", "20:84,10:90")
    ((_, sigma, options),) = denoiser.calls
    assert sigma is None
    np.testing.assert_allclose(options["noise"].sigma, found.model.sigma)


def test_a_flat_part_is_named_as_the_picture_is_seen(folder: Path) -> None:
    picture = noisy((140, 180, 3))
    picture[100:, 150:] = 0  # no flat part may touch this corner
    exif = Image.Exif()
    exif[0x0112] = 6  # stored with its left side as its first row
    Image.fromarray(np.ascontiguousarray(np.rot90(picture))).save("turned.png", exif=exif)
    found = estimate_noise(picture, channel_axis=-1, flat=np.s_[10:90, 140:180])
    told = dict(rows(run("noise", "turned.png", "--flat", "10:90,140:180").stdout))
    assert told["noise"] == found.model.describe()
    assert told["red"].startswith(f"level {found.measured['level'][0]:.4g}, ")


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (("noise", "in.png", "--flat", "20:84"), "first:end,first:end", 2),
        (("noise", "in.png", "--flat", "20:84,a:90"), "first:end,first:end", 2),
        (("noise", "in.png", "--flat", "20:84,10:500"), "--flat: got columns 10:500 of an image of 96 x 112", 1),
        (("noise", "in.png", "--flat", "20:30,10:90"), "--flat: rows 20:30, columns 10:90: got 10 x 80 samples", 1),
        (("noise", "one.csv", "--flat", "20:84,10:90"), "expected an image", 1),
        (("noise", "in.png", "--flat", "20:84,10:90", "--mask", "nan"), "leave one of them out", 2),
        (("denoise", "in.png", "out.png", "--flat", "20:84,10:90", "--sigma", "3"), "leave --sigma and --noise out", 2),
        (("denoise", "in.png", "colour.png", "out", "--flat", "20:84,10:90"), "there are several", 2),
        (("denoise", "one.csv", "out.csv", "--flat", "20:84,10:90"), "expected an image", 1),
        (("denoise", "in.png", "out.zarr", "--flat", "20:84,10:90"), "--flat", 2),
    ],
)
@pytest.mark.sampled(6)
def test_wrong_flat_parts_are_refused(folder: Path, words: tuple[str, ...], said: str, code: int) -> None:
    before = listing()
    result = run(*words, code=code)
    assert said in " ".join(result.stderr.split())
    assert listing() == before
