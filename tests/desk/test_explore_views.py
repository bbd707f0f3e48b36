"""The explorer without a browser: views, the texts that compute the same, hostile uploads, the computing thread."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from nlflow import FileFormatError, InputError, MemoryLimitError, denoise
from nlflow.denoising.noise import GaussianNoise, load_noise
from nlflow.denoising.quality import psnr, ssim
from nlflow.denoising.runs import Trail
from nlflow.desk.commands import main as cli
from nlflow.desk.explorer import (
    denoising_view,
    drawings,
    flow_view,
    layers_view,
    pictures,
    proposition_view,
    sources,
    uploads,
)
from nlflow.desk.explorer.denoising_view import DenoiseSettings
from nlflow.desk.explorer.flow_view import FlowSettings
from nlflow.desk.explorer.texts import call, decibels, digits
from nlflow.desk.explorer.worker import Cancelled, Job, Worker
from nlflow.desk.files import read
from tests import hostile

RNG = np.random.default_rng(5)


def executed(text: str) -> dict[str, Any]:
    """Return what a program makes that was copied from the page."""
    names: dict[str, Any] = {}
    exec(compile(text, "copied", "exec"), names)
    return names


def small_image(path: Path, shape: tuple[int, ...] = (40, 52)) -> Path:
    x = np.linspace(0, 4, shape[1])
    clean = 128 + 90 * np.sin(x) * np.cos(np.linspace(0, 3, shape[0]))[:, None]
    clean = clean[..., None] + np.arange(3) * 5 if len(shape) == 3 else clean
    noisy = clean + RNG.normal(0, 15, clean.shape)
    Image.fromarray(np.clip(np.rint(noisy), 0, 255).astype(np.uint8)).save(path)
    Image.fromarray(np.clip(np.rint(clean), 0, 255).astype(np.uint8)).save(path.with_name(f"clean-{path.name}"))
    return path


def small_sound(path: Path, samples: int = 900) -> Path:
    values = 9000 * np.sin(np.arange(samples) / 30) + RNG.normal(0, 900, samples)
    with wave.open(str(path), "wb") as stream:
        stream.setparams((1, 2, 8000, samples, "NONE", ""))
        stream.writeframes(values.astype("<i2").tobytes())
    return path


# ---- the tab "Denoise"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"sigma": 20.0},
        {"sigma": 25.0, "fidelity": 0.35, "steps": 3},
        {"sigma": 25.0, "width": 14.5, "patch_size": 7, "search_radius": 4},
        {"crop": ((10, 90), (20, 70)), "fidelity": 0.1},
        {"quality": "balanced", "crop": ((0, 64), (100, 164))},
    ],
)
@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:the noise was hard to find out")  # of a small part it is
def test_python_of_the_example_has_the_bits_of_the_view(words: dict[str, Any]) -> None:
    source, settings = sources.example(), DenoiseSettings(**words)
    result = denoising_view.compute(settings, source)
    copied = executed(denoising_view.as_python(settings, source))
    for name in ("noisy", "result", "clean"):
        assert np.array_equal(copied[name], getattr(result, name))
    assert set(copied["curves"]) == set(result.course)
    for name, values in result.course.items():
        assert np.array_equal(copied["curves"][name], values)
    assert copied["info"].sigma == result.info.sigma
    assert result.figures["psnr_output"] == psnr(result.clean, copied["result"])
    assert result.figures["ssim_output"] == ssim(result.clean, copied["result"])


def test_view_is_a_call_of_denoise() -> None:
    source = sources.example()
    shares: list[float] = []
    result = denoising_view.compute(
        DenoiseSettings(quality="pixels", sigma=30.0, steps=2), source, progress=shares.append
    )
    expected, info = denoise(source.media.data, 30.0, quality="pixels", steps=2, preserve_range=True, return_info=True)
    assert np.array_equal(result.result, expected)
    assert result.info.residual == info.residual
    assert np.array_equal(result.residual, source.media.data - expected)
    assert shares[-1] == 1.0


@pytest.mark.slow
def test_weights_are_kept_between_moves() -> None:
    source, trail = sources.example(), Trail()
    for fidelity in (0.1, 0.2, 0.3):
        settings = DenoiseSettings(quality="pixels", sigma=25.0, fidelity=fidelity)
        kept = denoising_view.compute(settings, source, trail=trail)
        assert np.array_equal(kept.result, denoising_view.compute(settings, source).result)
    assert trail.reused == 2


def test_what_a_quality_does_not_have_is_left_out() -> None:
    settings = DenoiseSettings(quality="balanced", sigma=5.0, width=3.0, steps=2, fidelity=0.5)
    assert settings.words() == {"quality": "balanced", "sigma": 5.0}


@pytest.mark.slow
def test_the_noise_that_was_found_is_drawn() -> None:
    source = sources.example()
    result = denoising_view.compute(DenoiseSettings(strength=2.0), source)
    assert result.noise is not None
    np.testing.assert_allclose(result.noise.sigmas, result.info.sigma)
    alone = denoising_view.compute(DenoiseSettings(), source)
    assert result.info.sigma == pytest.approx(2 * alone.info.sigma)
    assert "--strength" not in denoising_view.as_command(DenoiseSettings(), source)
    assert "strength=2.0" in denoising_view.as_python(DenoiseSettings(strength=2.0), source)
    assert denoising_view.compute(DenoiseSettings(sigma=25.0), source).noise is None


def test_the_noise_of_a_table_is_that_of_its_first_column(tmp_path: Path) -> None:
    values = np.stack([RNG.normal(0, s, 400) for s in (1.0, 5.0)], axis=1)
    np.savetxt(tmp_path / "a.csv", values, delimiter=",", header="a,b", comments="")
    source = sources.open_source(tmp_path / "a.csv")
    result = denoising_view.compute(DenoiseSettings(), source)
    assert source.media.separate
    assert result.noise is not None
    np.testing.assert_allclose(result.noise.sigmas, result.info.columns[0].sigma)


def test_noise_is_examined_once_for_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    from nlflow.denoising.noise.finding import verdict

    seen: list[int] = []
    real = verdict.examine
    monkeypatch.setattr(verdict, "examine", lambda *given: (seen.append(1), real(*given))[1])
    trail, picture = Trail(), RNG.normal(0, 3, (96, 96, 1))
    first = trail.examine(picture, None)
    assert trail.examine(picture.copy(), None) is first
    assert len(seen) == 1
    trail.examine(picture, np.zeros((96, 96), bool))
    assert trail.examine(picture + 1, None) is not first
    assert len(seen) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the noise was hard to find out")  # of 48 x 40 samples
def test_noise_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    counts = np.random.default_rng(0).poisson(20 + 15 * np.sin(np.arange(48) / 5)[:, None] * np.ones(40))
    np.save("counts.npy", counts.astype(np.uint16))
    GaussianNoise.from_kernel([[1, 2, 1]], sigma=3.0).save("model.json")
    model = uploads.received_noise("model.json", Path("model.json").read_bytes(), uploads.Limits())
    source = sources.open_source("counts.npy")
    results = []
    for noise in ("auto", "white", "poisson", "rician", model):
        settings = DenoiseSettings(noise=noise)
        result = denoising_view.compute(settings, source)
        results += [result.result] if noise != "auto" else []  # which may be white
        said = {} if noise == "auto" else {"noise": load_noise("model.json") if noise is model else noise}
        expected = denoise(source.media.data, quality="fast", preserve_range=True, **said)
        assert np.array_equal(result.result, expected)
        assert np.array_equal(executed(denoising_view.as_python(settings, source))["result"], expected)
        words = denoising_view.as_command(settings, source).split()
        assert words[words.index("--noise") + 1] == getattr(noise, "name", noise) if said else "--noise" not in words
        assert drawings.of_counts(result.info) == (noise == "poisson")
        done = CliRunner().invoke(cli.app, words[1:], prog_name="nonlocal", catch_exceptions=False)
        assert done.exit_code == 0, done.output
        np.testing.assert_array_equal(np.load("counts-denoised.npy"), expected)
        Path("counts-denoised.npy").unlink()
    assert not any(np.array_equal(one, other) for k, one in enumerate(results) for other in results[:k])


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"kind": "worst"}', b"\xff"])
def test_what_is_no_model_of_noise_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(FileFormatError, match=re.escape("model.json: ")):
        uploads.received_noise("model.json", content, uploads.Limits())


def test_a_window_lies_in_what_is_computed() -> None:
    assert drawings.window_in((0, 3000), None) == (0, 3000)  # short: all of it
    assert drawings.window_in((1000, 33_768), None) == (1000 + (32_768 - 2000) // 2, 2000)
    assert drawings.window_in((1000, 33_768), (5000, 70)) == (5000, 70)
    for outside in ((900, 200), (33_700, 100)):
        assert drawings.window_in((1000, 33_768), outside)[1] == 2000


def test_a_long_signal_is_opened_near(tmp_path: Path) -> None:
    source = sources.open_source(small_sound(tmp_path / "a.wav", 9000))
    result = denoising_view.compute(DenoiseSettings(), source)
    drawn = drawings.Drawn(result, source, drawings.Stills(), drawings.Look())
    places, heights = drawn.lines["result"]
    assert np.array_equal(heights, result.result[3500:5500])
    assert np.array_equal(places, np.arange(3500, 5500) / 8000)
    drawn = drawings.Drawn(result, source, drawings.Stills(), drawings.Look(window=(100, 40)))
    assert np.array_equal(drawn.rest["removed"][1], result.residual[100:140])


OWN = {"quality": "pixels", "patch_size": 5, "search_radius": 4, "fidelity": 0.25, "steps": 3}


@pytest.mark.slow
@pytest.mark.parametrize("own", [{}, {"width": 0.7, **OWN}], ids=["chosen", "own"])
@pytest.mark.parametrize(
    "name", ["grey.png", "colour.png", "sound.wav", "line.csv", "table.csv", "stack.npy", "channels.npy"]
)
@pytest.mark.sampled(3)
def test_python_and_command_of_files(
    name: str, own: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "grey.png":
        small_image(Path(name))
    elif name == "colour.png":
        small_image(Path(name), (36, 40, 3))
    elif name == "sound.wav":
        small_sound(Path(name))
    elif name == "line.csv":
        Path(name).write_text("t,a\n" + "".join(f"{k},{np.sin(k / 9) + RNG.normal(0, 0.1)}\n" for k in range(300)))
    elif name == "table.csv":
        rows = [f"{k},{np.sin(k / 9) + RNG.normal(0, 0.4)},{RNG.normal(900, 40)}" for k in range(300)]
        for one in (name, f"clean-{name}"):
            Path(one).write_text("\n".join(["depth,volt,pascal", *rows, ""]))
    elif name == "stack.npy":
        np.save(name, RNG.normal(size=(30, 34, 3)))
    else:
        np.save(name, RNG.normal(size=(33, 21)))
    source = sources.open_source(name)
    settings = DenoiseSettings(sigma=0.4 if name.endswith(("npy", "csv")) else 15.0, **own)
    if name.endswith(".png") or name == "table.csv":
        source = source.with_clean(f"clean-{name}", f"clean-{name}")
    result = denoising_view.compute(settings, source)
    copied = executed(denoising_view.as_python(settings, source))
    assert np.array_equal(copied["result"], result.result)
    words = denoising_view.as_command(settings, source).split()
    assert words[0] == "nonlocal"
    done = CliRunner().invoke(cli.app, [*words[1:], "--json"], prog_name="nonlocal", catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["denoise"]["residual"] == result.info.residual
    assert report["denoise"]["steps"] == own.get("steps", report["denoise"]["steps"])
    if source.clean is not None:
        assert report["psnr_output"] == result.figures["psnr_output"]
    # What is downloaded is what the command writes.
    called, content = sources.saved(source, None, result.result)
    assert Path(words[3]).name == called
    assert np.array_equal(read(words[3]).data, read(_written(tmp_path, called, content)).data)


def _written(folder: Path, name: str, content: bytes) -> Path:
    path = folder / f"downloaded-{name}"
    path.write_bytes(content)
    return path


def ran_in_a_shell(command: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(["sh", "-c", command], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again = subprocess.run(["sh", "-c", command], env={**os.environ, "PATH": path}, capture_output=True, text=True)
    assert "FileExistsError" in again.stderr  # nothing is replaced


def test_commands_of_a_file(tmp_path: Path) -> None:
    source = sources.open_source(small_image(tmp_path / "a.png"))
    assert denoising_view.command_note(DenoiseSettings(patch_size=5, quality="pixels"), source) == ""
    assert "--set patch-size=5" in denoising_view.as_command(DenoiseSettings(patch_size=5, quality="pixels"), source)
    assert "patch-size" not in denoising_view.as_command(DenoiseSettings(patch_size=5, quality="best"), source)


@pytest.mark.skipif(os.name == "nt", reason="the command is one of the shells of Unix")
@pytest.mark.parametrize("what", ["a part", pytest.param("the example", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_commands_of_a_part_and_of_the_example(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = "it's $HOME; `x`\nPYTHON\n.png"  # nothing that the shell may read
    if what == "a part":
        source = sources.open_source(small_image(Path(name)))
        settings = DenoiseSettings(sigma=15.0, crop=((3, 30), (2, 33)))
        saved = f"{Path(name).stem}-3-30-2-33-denoised.npy"
    else:
        source, settings, saved = (
            sources.example(),
            DenoiseSettings(quality="pixels", sigma=25.0, steps=1),
            "example-denoised.npy",
        )
    assert saved in denoising_view.command_note(settings, source)
    ran_in_a_shell(denoising_view.as_command(settings, source))
    assert np.array_equal(np.load(saved), denoising_view.compute(settings, source).result)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="the command is one of the shells of Unix")
def test_the_command_of_a_flow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = FlowSettings(signal="disc", width=0.08)
    ran_in_a_shell(flow_view.as_command(settings))
    assert "flow.npz" in flow_view.COMMAND_NOTE
    result = flow_view.compute(settings)
    with np.load("flow.npz") as saved:
        for name in saved:
            shown = getattr(result, name)
            assert np.array_equal(saved[name], shown), name
        assert {"t", "j", "e", "limit", "kept", "bounds", "rate"} <= set(saved)


def test_commands_quote_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = sources.open_source(small_image(Path("a b; rm -rf x.png")))
    text = denoising_view.as_command(DenoiseSettings(), source)
    assert "'a b; rm -rf x.png'" in text
    assert np.array_equal(executed(denoising_view.as_python(DenoiseSettings(), source))["noisy"], source.media.data)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((256, 256), None), ((300, 200), None), ((2000, 3000), (256, 256)), ((100, 5000), (100, 655)),
     ((5000, 100), (655, 100)), ((40000,), (32768,)), ((32768,), None)],
)  # fmt: skip
def test_previews_are_parts_in_full_resolution(
    shape: tuple[int, ...], sizes: tuple[int, ...] | None, tmp_path: Path
) -> None:
    np.save(tmp_path / "a.npy", np.zeros(shape, np.uint8))
    source = sources.open_source(tmp_path / "a.npy")
    crop = sources.preview(source)
    if sizes is None:
        assert crop is None
        return
    assert crop is not None
    assert tuple(high - low for low, high in crop) == sizes
    for (low, high), n in zip(crop, shape, strict=True):
        assert abs(low - (n - high)) <= 1  # in the middle
    first = sources.preview(source, (0.0,) * len(shape))
    last = sources.preview(source, (1.0,) * len(shape))
    assert first is not None
    assert last is not None
    assert all(low == 0 for low, _ in first)
    assert all(high == n for (_, high), n in zip(last, shape, strict=True))


def test_a_part_is_saved_with_its_part_of_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(RNG.integers(0, 255, (300, 400, 4), np.uint8)).save(path)
    source = sources.open_source(path)
    crop = ((10, 40), (20, 90))
    result = denoising_view.compute(DenoiseSettings(crop=crop, sigma=9.0), source)
    name, content = sources.saved(source, crop, result.result)
    assert name == "a-denoised.png"
    with Image.open(io.BytesIO(content)) as image:
        assert image.size == (70, 30)
        whole = np.asarray(Image.open(path))
        assert np.array_equal(np.asarray(image)[..., 3], whole[10:40, 20:90, 3])


# ---- the tab "Flow"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        {},
        {"signal": "waves", "kernel": "Laplace", "boundary": "periodic", "metric": "l2"},
        {"signal": "disc", "width": 0.08},
        {"boundary": "isolated", "width": 0.08},
        {"signal": "photograph", "kernel": "TopHat", "width": 0.1, "fidelity": 1.2, "noise": 0.0, "span": 3.0},
    ],
)
def test_python_of_a_flow_has_the_bits_of_the_view(words: dict[str, Any]) -> None:
    settings = FlowSettings(**words)
    shares: list[float] = []
    result = flow_view.compute(settings, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    copied = executed(flow_view.as_python(settings))
    for name in ("observed", "t", "j", "e", "energy_j", "energy_e", "distance_j", "distance_e", "remaining", "rate",
                 "rate_e", "limit", "kept", "bounds"):  # fmt: skip
        assert np.array_equal(copied[name], getattr(result, name)), name


def test_the_predicted_rate_is_that_of_the_flow() -> None:
    result = flow_view.compute(FlowSettings(span=12.0))
    late = result.t > 6 / result.rate
    slope = np.polyfit(result.t[late], np.log(result.distance_j[late]), 1)[0]
    assert slope == pytest.approx(-result.rate, rel=1e-3)
    line = flow_view.predicted(result.t, result.distance_j, result.rate)
    assert line[late] == pytest.approx(result.distance_j[late], rel=0.01)
    assert result.bounds[0] <= result.kept <= result.bounds[1]
    assert np.all(np.diff(result.energy_j) <= 1e-12)
    assert np.all(np.diff(result.energy_e) <= 1e-12)
    # J runs to a constant, E does not.
    assert result.distance_j[-1] < 1e-4 < 0.5 < result.distance_e[-1]


def test_nothing_is_predicted_of_a_constant() -> None:
    assert np.isnan(flow_view.predicted(np.arange(3.0), np.zeros(3), 1.0)).all()


@pytest.mark.parametrize(
    "words", [{"signal": "x"}, {"kernel": "Patch"}, {"width": 0.0}, {"fidelity": 0.0}, {"span": -1.0}, {"metric": ""}]
)
def test_flow_settings_are_checked(words: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(words))):
        FlowSettings(**words)


def test_a_flow_can_be_cancelled() -> None:
    def tell(share: float) -> None:
        if share > 0.4:
            raise Cancelled

    with pytest.raises(Cancelled):
        flow_view.compute(FlowSettings(), progress=tell)


# ---- the tab "Layers"


def layers_report() -> dict[str, Any]:
    rows, heads = [], []
    for fidelity in (0.0, 0.6):
        rows.append({"fidelity": fidelity, "layer": "encoder input", "index": 0, "cosine": 0.1})
        for k in range(3):
            name = f"layer.{k}"
            rows.append({"fidelity": fidelity, "layer": name, "index": k + 1, "cosine": 0.2 * k, "J": 1 / (k + 1),
                         "gap": 0.5, "stable": None if k == 1 else 0.9 + fidelity})  # fmt: skip
            heads.append({"fidelity": fidelity, "layer": name, "J": [1.0 * k, 2.0], "gap": [None, 0.25 * k]})
    return {"model": "m", "kind": "ViTModel", "tokens": 17, "fidelity": 0.6, "rows": rows, "by_head": heads}


def test_layers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("result.json").write_text(json.dumps(layers_report()))
    found = layers_view.read_layers("result.json")
    assert [run.fidelity for run in found.runs] == [0.0, 0.6]
    assert found.runs[1].layers == ("encoder input", "layer.0", "layer.1", "layer.2")
    assert found.runs[0].columns["cosine"].tolist() == [0.1, 0.0, 0.2, 0.4]
    assert np.isnan(found.runs[0].columns["stable"]).tolist() == [True, False, True, False]
    assert found.runs[0].heads["J"][1:].tolist() == [[0, 2], [1, 2], [2, 2]]
    assert np.isnan(found.runs[0].heads["J"][0]).all()
    assert layers_view.as_command(found) == "nonlocal explore --trace result.json"
    assert not found.built_in
    for quantity in ("cosine", "J", "gap", "stable"):
        copied = executed(layers_view.as_python(found, quantity))
        for run in found.runs:
            assert np.array_equal(copied["values"][run.fidelity], run.columns[quantity], equal_nan=True)
            if quantity in run.heads:
                own = copied["heads"][run.fidelity]
                assert np.array_equal(np.array(list(own.values())), run.heads[quantity][1:], equal_nan=True)
    with pytest.raises(InputError, match="quantity"):
        layers_view.as_python(found, "x'; import os #")


def test_the_example_of_layers_is_there() -> None:
    found = layers_view.example()
    assert found.built_in
    assert (found.tokens, len(found.runs), found.fidelity) == (65, 2, 0.6)
    assert all(set(run.heads) == set(layers_view.HEAD_QUANTITIES) for run in found.runs)
    copied = executed(layers_view.as_python(found, "cosine"))
    for run in found.runs:
        assert np.array_equal(copied["values"][run.fidelity], run.columns["cosine"])
    assert layers_view.as_command(found) == "nonlocal explore"


def broken(change: Callable[[dict[str, Any]], Any]) -> bytes:
    report = layers_report()
    change(report)
    return json.dumps(report).encode()


LAYERS = {
    "no json": b"\x00\xff",
    "a list": b"[1, 2]",
    "nothing": b"{}",
    "deep": hostile.DEEP,
    "nan": broken(lambda r: r["rows"][1].update(J=float("nan"))),
    "infinity": broken(lambda r: None).replace(b'"tokens": 17', b'"tokens": 1e999'),
    "a long number": broken(lambda r: None).replace(b'"tokens": 17', b'"tokens": ' + b"9" * 5000),
    "a number as text": broken(lambda r: r["rows"][1].update(J="1")),
    "a truth as number": broken(lambda r: r["rows"][1].update(J=True)),
    "rows of another kind": broken(lambda r: r.update(rows={"a": 1})),
    "a row of another kind": broken(lambda r: r["rows"].append(3)),
    "what --why wrote": broken(lambda r: r.update(findings=[], parts=[])),
    "what a sweep wrote": broken(lambda r: r.update(stock=0.5)),
    "no rows": broken(lambda r: r.update(rows=[])),
    "many heads": broken(lambda r: r["by_head"][0].update(J=[0.0] * 5000)),
    "heads of no layer": broken(lambda r: r["by_head"][0].update(layer="x")),
    "heads as a number": broken(lambda r: r["by_head"][0].update(J=1)),
    "a long name": broken(lambda r: r.update(model="m" * 1000)),
    "half a token": broken(lambda r: r.update(tokens=2.5)),
    "a layer below the first": broken(lambda r: r["rows"][0].update(index=-1)),
    "a layer beyond all numbers": broken(lambda r: r["rows"][0].update(index=1e200)),
    "many numbers": broken(
        lambda r: r.update(
            rows=[{**r["rows"][1], "layer": f"{k}"} for k in range(400)],
            by_head=[{"fidelity": 0.0, "layer": "7", "J": [0.5] * 4000}],
        )  # 400 x 4000
    ),
    "many rows": broken(lambda r: r.update(rows=r["rows"] * 3000)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_broken_layers_are_refused(name: str) -> None:
    with pytest.raises(FileFormatError, match=r"r\.json: got "):
        uploads.received_layers("r.json", LAYERS[name], uploads.Limits())


def test_large_layers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_view, "_MOST_BYTES", 100)
    (tmp_path / "r.json").write_text(json.dumps(layers_report()))
    with pytest.raises(FileFormatError, match="more than 100 B"):
        layers_view.read_layers(tmp_path / "r.json")
    with pytest.raises(FileFormatError, match="can be read"):
        layers_view.read_layers(tmp_path / "missing.json")


# ---- the texts that are copied


def imported(text: str) -> set[str]:
    """Return the names of this package that a program imports."""
    lines = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.ImportFrom | ast.Import)]
    assert not any(name.name.startswith("nlflow") for one in lines if isinstance(one, ast.Import) for name in one.names)
    found = [one for one in lines if isinstance(one, ast.ImportFrom) and (one.module or "").startswith("nlflow")]
    return {f"{one.module}.{name.name}" for one in found for name in one.names}


def test_copied_texts_use_names_that_the_manual_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    picture = sources.open_source(small_image(Path("a.png"))).with_clean("clean-a.png", "clean-a.png")
    sound = sources.open_source(small_sound(Path("a.wav"))).with_clean("a.wav", "a.wav")
    np.save("a.npy", RNG.normal(size=(9, 9)))
    all_sources = [sources.example(), picture, sound, sources.open_source("a.npy")]
    texts = [denoising_view.as_python(DenoiseSettings(), one) for one in all_sources]
    for signal in ("steps", "waves", "disc", "photograph"):
        for kernel in ("Gaussian", "Laplace", "TopHat"):
            texts.append(flow_view.as_python(FlowSettings(signal=signal, kernel=kernel)))
    for domain in ("grid", "points"):
        texts.append(proposition_view.as_python(proposition_view.PropositionSettings(domain=domain)))
    Path("result.json").write_text(json.dumps(layers_report()))
    texts.append(layers_view.as_python(layers_view.read_layers("result.json"), "cosine"))
    used = set.union(*map(imported, texts))
    assert {"nlflow.denoise", "nlflow.solve", "nlflow.desk.files.read"} <= used
    docs = Path(__file__).parents[2] / "docs"
    listed = {f"nlflow.{line.strip()}" for line in (docs / "reference" / "index.rst").read_text().splitlines()}
    listed |= set(re.findall(r"`(nlflow\.[\w.]+)`", (docs / "explorer.md").read_text()))
    # Names of rooms are found from the root too.
    rooms = {name.rsplit(".", 1)[1] for name in listed}
    assert {name for name in used - listed if name.removeprefix("nlflow.") not in rooms} == set()


# ---- uploads


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"name": "../x.png", "content": "***"}, "x.png: got content that is no base64"),
        ({"name": "x.png", "content": 3}, "x.png: got content that is no base64"),
        ({"name": "x.png", "content": "é"}, "x.png: got content that is no base64"),
        ({"name": "x.png", "size": 5e9}, "x.png: got 4.657 GiB, expected at most 64 MiB; start with a larger"),
        ({"name": "x.png"}, "x.png: got a file that the browser cannot read"),
    ],
)
def test_messages_without_a_file_are_refused(data: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=re.escape(expected)):
        uploads.unpacked(data, uploads.Limits())


def test_messages_with_a_file_are_unpacked() -> None:
    assert uploads.unpacked({"name": "C:\\x\\y.png", "content": "AAEC"}, uploads.Limits()) == ("y.png", b"\0\1\2")


@pytest.mark.parametrize(
    ("name", "shown"),
    [("a.png", "a.png"), ("../../etc/passwd.png", "passwd.png"), ("C:\\x\\y.wav", "y.wav"), ("a\0\n.png", "a.png"),
     ("", "upload"), ("..", "upload"), ("x" * 500 + ".csv", "x" * 76 + ".csv"), ("/", "upload"),
     ("a.measured-in-2024", "a.measured-in-2024")],
)  # fmt: skip
def test_names_of_senders_lose_their_folders(name: str, shown: str) -> None:
    assert uploads.shown_name(name) == shown


def test_what_was_sent_is_read_and_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    path = small_image(tmp_path / "a.png")
    source = uploads.received_source("../../x/a.png", path.read_bytes(), uploads.Limits())
    assert np.array_equal(source.media.data, read(path).data)
    assert source.name == "a.png"
    clean = (tmp_path / "clean-a.png").read_bytes()
    assert uploads.received_reference("c.png", clean, uploads.Limits(), source).clean_name == "c.png"
    sound = small_sound(tmp_path / "a.wav")
    assert uploads.received_source("a.wav", sound.read_bytes(), uploads.Limits()).media.sample_rate == 8000
    with pytest.raises(FileFormatError) as caught:
        uploads.received_source("a.png", b"no picture", uploads.Limits())
    assert "temporary" not in str(caught.value)
    assert str(caught.value).startswith("a.png: ")
    assert list((tmp_path / "temporary").iterdir()) == []


def bomb(mode: str, side: int) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (side, side)).save(stream, "TIFF", compression="tiff_deflate")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.png", hostile.png(60000, 60000, b"")),
        ("a.png", hostile.png(3000, 3000, b"")),
        ("a.tif", hostile.tiff(100000, 100000, bytes(100))),
        ("a.tif", bomb("L", 3000)),
        ("a.tif", b"II*\0\0\0\0\0"),
        ("a.npy", hostile.npy("'<f8'", "(1000000000000,)", bytes(80))),
        ("a.npy", hostile.npy("'|O'", "(3,)", bytes(80))),
        ("a.wav", hostile.wav(b"RIFF", 2**32 - 16)),
        ("a.csv", b"1," * 3_000_000),
        ("a.exe", b"MZ"),
        ("a", b"x"),
        ("a.json", b"{}"),
        ("a.png", b""),
        ("a.png", bytes(5_000_001)),
    ],
)
def test_hostile_uploads_are_refused(name: str, content: bytes, tmp_path: Path) -> None:
    limits = uploads.Limits(content=5_000_000, samples=1_000_000)
    with pytest.raises((InputError, FileFormatError, MemoryLimitError)) as caught:
        uploads.received_source(name, content, limits)
    message = str(caught.value)
    assert "expected" in message or "limit" in message
    assert tempfile.gettempdir() not in message
    assert "\n" not in message


def test_pictures_are_not_decoded_before_their_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.files, "read", lambda *words, **more: pytest.fail("decoded"))
    stream = io.BytesIO()
    Image.new("L", (1200, 1200)).save(stream, "PNG")
    with pytest.raises(InputError, match="1440000 samples"):
        uploads.received_source("a.png", stream.getvalue(), uploads.Limits(samples=1_000_000))


def test_references_of_another_size_are_refused(tmp_path: Path) -> None:
    source = sources.open_source(small_image(tmp_path / "a.png"))
    other = small_image(tmp_path / "b.png", (20, 20)).read_bytes()
    with pytest.raises(InputError, match="shape"):
        uploads.received_reference("b.png", other, uploads.Limits(), source)


# ---- pictures, lines, numbers


def test_pictures_hold_the_grey_levels() -> None:
    values = RNG.integers(0, 256, (30, 40), np.uint8)
    content, note = pictures.picture(values, pictures.grey_scale(values))
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), values)
    assert note == ""
    colours = RNG.integers(0, 256, (3, 30, 40), np.uint8)
    content, _ = pictures.picture(colours, pictures.grey_scale(colours), channel_axis=0)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(content))), np.moveaxis(colours, 0, -1))


def test_large_pictures_are_shown_reduced_and_say_so() -> None:
    values = RNG.integers(0, 256, (4200, 500), np.uint8)
    content, note = pictures.picture(values, pictures.Scale(0, 255))
    shown = np.asarray(Image.open(io.BytesIO(content)))
    assert shown.shape == (1400, 166)
    assert "1/3" in note
    assert shown[0, 0] == np.rint(values[:3, :3].mean())
    content, note = pictures.picture(np.zeros((4, 4, 2)), pictures.Scale(0, 1), channel_axis=2, orientation=6)
    assert "mean of 2 channels" in note


def test_contrast_is_fitted_to_the_data() -> None:
    values = RNG.integers(100, 4000, (200, 200)).astype(np.uint16)  # 12 bits in 16
    values[0, :3] = 65535  # hot pixels
    scale = pictures.grey_scale(values)
    assert 100 <= scale.low < 110
    assert 3990 < scale.high < 4000
    floats = values * 1e-3
    floats[5, 5] = np.nan
    assert pictures.grey_scale(floats).high == pytest.approx(scale.high * 1e-3, rel=1e-3)
    assert pictures.grey_scale(np.full((3, 3), 700, np.uint16)) == pictures.Scale(700.0, 700.0)
    assert pictures.grey_scale(np.zeros((0, 3), np.uint16)) == pictures.Scale(0.0, 1.0)
    truths = values > 2000  # an NPY file may hold them
    assert pictures.grey_scale(truths) == pictures.full_range(truths) == pictures.Scale(0.0, 1.0)
    assert pictures.histogram(truths, pictures.Scale(0.0, 1.0))[1].max() == 1
    full = pictures.Scale(0.0, 255.0)
    for usual in (RNG.integers(0, 70, (30, 40), np.uint8), np.zeros((3, 3), np.uint8)):
        assert pictures.grey_scale(usual) == full  # 8 bits are meant to be looked at as they are
    counts = RNG.poisson(8, (100, 100)).astype(np.uint8)  # but these would be black
    assert pictures.grey_scale(counts).high < 30
    assert pictures.full_range(counts) == full
    assert pictures.full_range(values) == pictures.Scale(float(values.min()), 65535.0)


def test_a_scale_of_many_samples_is_that_of_some() -> None:
    values = RNG.normal(size=(1500, 1300))
    some = pictures.sampled(values)
    assert 2**19 < some.size <= 2**20
    assert set(some[:100].tolist()) <= set(values.reshape(-1)[:400].tolist())
    whole = np.percentile(values, [0.1, 99.9])
    # A percentile of n samples of a normal law strays by sqrt(p (1 - p) / n) over the density there: 5 of these.
    density = np.exp(-0.5 * 3.0902**2) / np.sqrt(2 * np.pi)
    stray = 5 * np.sqrt(0.001 * 0.999 / some.size) / density
    scale = pictures.grey_scale(values)
    np.testing.assert_allclose([scale.low, scale.high], whole, rtol=0, atol=stray)


def test_histograms_count_every_sample_once() -> None:
    values = RNG.integers(0, 256, (64, 64), np.uint8)
    middles, shares = pictures.histogram(values, pictures.Scale(0.0, 255.0))
    counts = np.array([np.sum(np.abs(values - middle) <= 255 / 128) for middle in middles])
    np.testing.assert_array_equal(shares, counts / counts.max())
    assert counts.sum() == values.size
    middles, shares = pictures.histogram(np.full((3, 3), 7.0), pictures.Scale(7.0, 7.0))
    assert shares.max() == 1.0


@pytest.mark.parametrize("orientation", range(1, 9))
def test_places_of_a_turned_picture(orientation: int) -> None:
    stored = np.zeros((40, 60), np.uint8)
    stored[10:20, 45:60] = 255
    top, left, height, width = pictures.seen_box(((10 / 40, 20 / 40), (45 / 60, 1.0)), orientation)
    content = pictures.overview(stored, pictures.Scale(0, 255), orientation=orientation)
    seen = np.asarray(Image.open(io.BytesIO(content)))
    rows, columns = (np.flatnonzero(seen.any(axis=axis)) for axis in (1, 0))
    assert [rows[0], len(rows)] == pytest.approx([top * seen.shape[0], height * seen.shape[0]])
    assert [columns[0], len(columns)] == pytest.approx([left * seen.shape[1], width * seen.shape[1]])
    middle = pictures.stored_place((top + height / 2, left + width / 2), orientation)
    assert middle == pytest.approx((15 / 40, 52.5 / 60))


def test_an_overview_is_small_and_keeps_the_shape() -> None:
    large = np.broadcast_to(np.arange(3000, dtype=np.uint16)[:, None, None], (3000, 6000, 3))
    content = pictures.overview(large, pictures.Scale(0, 2999), channel_axis=2)
    assert np.asarray(Image.open(io.BytesIO(content))).shape == (180, 360, 3)


def test_residuals_have_grey_for_nothing() -> None:
    scale = pictures.residual_scale(10.0)
    assert scale.levels(np.array([-40.0, -30.0, 0.0, 30.0, 99.0])).tolist() == [0, 0, 128, 255, 255]
    assert pictures.residual_scale(0.0).low < 0
    assert pictures.grey_scale(np.full((2, 2), np.nan)) == pictures.Scale(0.0, 1.0)


def test_envelopes_lose_no_peak() -> None:
    values = RNG.normal(size=100_000)
    values[12345], values[77777] = 50, -60
    places, heights = pictures.envelope(values)
    assert len(places) == len(heights) == 4096  # more than a page has pixels
    assert heights.max() == 50
    assert heights.min() == -60
    assert abs(places[heights.argmax()] - 12345) < 100
    places, heights = pictures.envelope(values[:100])
    assert np.array_equal(heights, values[:100])


def test_numbers_for_people() -> None:
    assert [digits(None), digits(float("nan")), digits(1.23456), digits(float("inf"))] == ["–", "–", "1.235", "∞"]
    assert decibels(29.8712) == "29.87 dB"
    assert decibels(None) == "–"
    assert call("a", "f", "x", {"b": 1}) == "a = f(x, b=1)"
    assert call("a", "f", "x", {"b": "y" * 99}).count("\n") == 3


# ---- the computing thread


@pytest.fixture
def worker() -> Any:
    one = Worker()
    yield one
    one.close()


@pytest.mark.slow
def test_the_newest_job_of_a_key_wins(worker: Worker) -> None:
    gate, began, done = threading.Event(), threading.Event(), []

    def first(progress: Callable[[float], None]) -> str:
        began.set()
        gate.wait(30)
        while True:
            progress(0.5)

    worker.submit("tab", Job(first, lambda job: done.append(job.result)))
    assert began.wait(30)
    for name in ("second", "third", "fourth"):
        worker.submit("tab", Job(lambda progress, name=name: name, lambda job: done.append(job.result)))
    finished = threading.Event()
    worker.submit("other", Job(lambda progress: "other", lambda job: (done.append(job.result), finished.set())))
    gate.set()
    assert finished.wait(30)
    assert done == ["fourth", "other"]


@pytest.mark.parametrize("seen", [False, True])
def test_a_superseded_job_ends_once_it_has_shown_something(worker: Worker, seen: bool) -> None:
    """What is nearly done is shown, else a slider that is dragged would show nothing until it rests."""
    gate, began, done, finished = threading.Event(), threading.Event(), [], threading.Event()

    def first(progress: Callable[[float], None]) -> str:
        began.set()
        gate.wait(30)
        one.seen = seen
        progress(0.5)
        return "first"

    one = Job(first, lambda job: done.append((job.result, job.superseded)))
    worker.submit("tab", one)
    assert began.wait(30)
    last = Job(lambda progress: "second", lambda job: (done.append((job.result, job.superseded)), finished.set()))
    worker.submit("tab", last)
    one._begun = time.monotonic()  # however long the threads took
    gate.set()
    assert finished.wait(30)
    assert done == [("first", True)] * (not seen) + [("second", False)]


def test_all_jobs_run_in_one_thread(worker: Worker) -> None:
    names, finished = set(), threading.Semaphore(0)
    for key in range(20):
        worker.submit(key, Job(lambda progress: names.add(threading.get_ident()), lambda job: finished.release()))
    for _ in range(20):
        assert finished.acquire(timeout=30)
    assert len(names) == 1
    assert names != {threading.get_ident()}


def test_jobs_can_be_cancelled(worker: Worker) -> None:
    began, ended, done = threading.Event(), threading.Event(), []

    def endless(progress: Callable[[float], None]) -> None:
        try:
            while True:
                began.set()
                progress(0.1)
                time.sleep(0.001)
        finally:
            ended.set()

    worker.submit(("a", "tab"), Job(endless, lambda job: done.append("late")))
    assert began.wait(30)
    worker.cancel_all(lambda key: key == ("a", "tab"))
    assert ended.wait(30)
    began.clear()
    ended.clear()
    worker.submit(("b", "tab"), Job(endless, lambda job: done.append("late")))
    assert began.wait(30)
    worker.cancel_all(lambda key: key[0] == "b")
    assert ended.wait(30)
    assert done == []


def test_errors_are_reported_and_the_thread_goes_on(worker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Any] = []
    finished = threading.Event()

    def fail(progress: Callable[[float], None]) -> None:
        raise InputError("sigma: no")

    def clumsy(job: Job) -> None:
        raise RuntimeError("the page is gone")

    told: list[float] = []
    worker.submit(1, Job(fail, lambda job: errors.append(job.error)))
    worker.submit(2, Job(lambda progress: None, clumsy))
    worker.submit(3, Job(lambda progress: progress(0.25), lambda job: finished.set(), told.append))
    assert finished.wait(30)
    assert [str(error) for error in errors] == ["sigma: no"]
    assert told == [0.25]
    assert "could not take up" in caplog.text


def test_a_closed_worker_ends() -> None:
    one = Worker()
    began, done = threading.Event(), []

    def endless(progress: Callable[[float], None]) -> None:
        while True:
            began.set()
            progress(0.1)

    one.submit(1, Job(endless, done.append))
    one.submit(2, Job(endless, done.append))
    assert began.wait(30)
    one.close()
    assert not one._thread.is_alive()
    assert done == []


# ---- what is loaded


@pytest.mark.slow
def test_views_load_no_panel() -> None:
    program = (
        "import sys; "
        "from nlflow.desk.explorer import address, denoising_view, drawings, flow_view, layers_view, pictures, worker;"
        "from nlflow.desk.explorer import proposition_view, uploads;"
        "print({'panel', 'bokeh', 'param', 'tornado'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
