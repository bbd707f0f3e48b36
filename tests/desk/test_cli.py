"""The command `nonlocal`: its help, its version, and the commands that have no file of tests of their own."""

from __future__ import annotations

import importlib
import inspect
import json
import platform
import re
import socket
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image

import nlflow
from nlflow.backends.machine import folder_digest, git_state, source_digest
from nlflow.backends.numba import loading
from nlflow.denoising.info import doubts, if_wrong
from nlflow.denoising.noise import GaussianNoise, NoiseEstimate
from nlflow.denoising.noise.models import gaussian
from nlflow.desk import terminal
from nlflow.desk.commands import installed
from nlflow.desk.commands.main import app
from nlflow.desk.options import _RULES
from tests.commands import IMAGE, fails, run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(IMAGE).save("in.png")
    return tmp_path


def test_demo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run_demo(out: Path, progress: bool = True) -> str:
        calls.append((out, progress))
        return "table"

    module = types.ModuleType("nlflow.desk.commands.demonstration")
    module.run_demo = run_demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nlflow.desk.commands.demonstration", module)
    assert run("demo").stdout == "table\n"
    run("demo", "--out", "there", "--quiet")
    assert calls == [(Path("demo-output"), False), (Path("there"), False)]
    assert "--out: got in.png" in fails("demo", "--out", "in.png")


def test_every_command_tells_that_loops_are_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "tell", None)
    run("info")
    assert loading.tell is None  # nobody looks
    monkeypatch.setattr(terminal, "shows_progress", lambda quiet: not quiet)
    run("info")
    assert loading.tell is not None
    run("noise", "in.png", "--quiet")
    assert loading.tell is None


def test_info(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads(run("info", "--json").stdout)
    assert report["python"] == sys.version.split()[0]
    assert report["numpy"] == np.__version__
    assert report["cpu_threads"] >= 1
    assert report["numba_threads"] >= 1
    assert report["numba_threading_layer"] in ("tbb", "omp", "workqueue")
    assert report["numba_cache"]
    assert report["memory_limit"] > 0
    assert report["devices"][0] == "cpu"
    text = run("info").stdout
    assert "numba threading layer" in text
    assert "GiB" in text
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "1048576")
    assert "memory limit           1 MiB" in run("info").stdout
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "much")
    assert "NLFLOW_MEMORY_LIMIT: got 'much'" in fails("info")


def test_the_source_is_known() -> None:
    """The digest is that of the whole package, and the commit that of the checkout in which it lies."""
    package = Path(nlflow.__file__).parent
    assert source_digest() == folder_digest(package)
    state = git_state()
    if (package.parents[1] / ".git").exists():
        assert state is not None
        assert re.fullmatch("[0-9a-f]{40}", state["commit"])


def test_a_report_holds_no_name_and_no_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the home nor the user nor the machine, wherever they are written."""
    for name in ("HOME", "USERPROFILE", "NUMBA_CACHE_DIR", "NLFLOW_SECRET"):
        monkeypatch.setenv(name, str(folder / "mallory"))
    monkeypatch.setenv("USER", "mallory")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(socket, "gethostname", lambda: "mallorys-laptop")
    monkeypatch.setattr(platform, "node", lambda: "mallorys-laptop")
    monkeypatch.setattr(platform, "release", lambda: "6.1.0-mallory")
    monkeypatch.setattr("numba.config.CACHE_DIR", str(folder / "mallory"))
    text, report = run("info", "--support").stdout, json.loads(run("info", "--support", "--json").stdout)
    assert "mallory" not in text + json.dumps(report)
    assert not any(str(place) in text for place in (folder, Path(nlflow.__file__).parents[1], Path(sys.prefix)))
    assert report["environment"]["OMP_NUM_THREADS"] == "3"
    assert report["environment"]["NLFLOW_SECRET"] == "set"
    assert report["versions"]["numpy"] == np.__version__
    assert {"desk", "plots"} <= set(report["extras"]["complete"])
    assert report["numba_threading_layer"] in ("tbb", "omp", "workqueue")
    assert report["loop cache"] == {"folder of": "NUMBA_CACHE_DIR", "writable": True, "files": 0, "bytes": 0}


def test_licences_are_those_of_the_metadata(folder: Path) -> None:
    found = {one["name"]: one for one in json.loads(run("info", "--licenses", "--json").stdout)["packages"]}
    assert {"numpy", "numba", "llvmlite", "typer", "nlflow"} <= set(found)
    assert not {"pytest", "ruff", "Sphinx"} & set(found)  # tools of those who work on the package
    assert found["nlflow"]["license"] == "BSD-3-Clause"
    assert all(one["license"] not in ("", "not told") for one in found.values())
    if "av" in found:
        import av

        holds = [word for word in ("x264", "x265") if f"lib{word}" in av.codecs_available]
        assert [word for word in ("x264", "x265") if word in found["av"]["inside"]] == holds
    assert re.search(r"^numpy \S+ +BSD", run("info", "--licenses").stdout, re.MULTILINE)
    assert "both were given; leave one out" in run("info", "--licenses", "--support", code=2).stderr


def test_packages_that_are_too_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = installed._found
    old = types.SimpleNamespace(version="0.1")
    monkeypatch.setattr(installed, "_found", lambda name: found(name) if name == "nlflow" else old)
    state = installed._state_of_extras()
    assert any(line.startswith("typer>=") and line.endswith(", has 0.1") for line in state["too old"])
    assert "desk" not in state["complete"]


def test_info_without_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert json.loads(run("info", "--json").stdout)["devices"] == ["cpu"]


def test_info_with_accelerators(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda index: f"card {index}"
        ),
        backends=types.SimpleNamespace(mps=types.SimpleNamespace(is_available=lambda: True)),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert "devices                cpu, cuda:0 card 0, cuda:1 card 1, mps" in run("info").stdout


@pytest.mark.parametrize("command", ["denoise", "attention", "study"])
def test_the_help_is_short_and_names_the_whole(command: str) -> None:
    short, whole = run(command, "--help").stdout, run(command, "--help-all").stdout
    assert len(short.splitlines()) <= 60  # a screen and a half
    assert len(whole.splitlines()) > len(short.splitlines()) + 20
    assert f"nonlocal {command} --help-all" in short
    module = importlib.import_module(f"nlflow.desk.commands.{command}")
    parameters = inspect.signature(getattr(module, command)).parameters
    assert set(module.USUAL) <= set(parameters)
    options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", short, re.MULTILINE))
    assert len(options) == len(module.USUAL) + 2  # and the two of the help
    assert options < set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", whole, re.MULTILINE))


@pytest.mark.slow
def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("nlflow ")
    story = run("--help").stdout
    for word in ("denoise", "demo", "info", "Exit codes", "--sigma 20"):
        assert word in story
    for command in ("denoise", "demo", "info"):
        assert "Examples:\n" in run(command, "-h").stdout
        assert f"\n    nonlocal {command}" in run(command, "--help").stdout
    assert "denoise" in run(code=2).output


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("denoise in.png out.png --video-quality 4", "--video-quality"),
        ("denoise in.png more.png out --video-quality 4", "--video-quality"),
        ("denoise in.png out.png --jobs 2", "--jobs"),
        ("denoise in.png out.png --block 64", "--block"),
        ("denoise in.zarr out.zarr --jobs 2 --scheduler tcp://127.0.0.1:1", "--jobs"),
        ("denoise in.png out.png --format png", "--format"),
        ("denoise in.png out.png --width 3", "--width"),
        ("denoise in.png out.png --set width=3", "--set width"),
        ("denoise in.png out.png --write quality=4", "--write quality"),
        ("denoise in.png out.png --write workers=2", "--write workers"),
        ("denoise in.zarr out.zarr --write workers=2 --write workers=tcp://127.0.0.1:1", "--write workers"),
        ("noise in.png --existing overwrite", "--existing"),
        ("attention model --text a --words 48", "--words"),
        ("attention model --why --text a --items 3", "--items"),
        ("attention model --sweep --images a --words 48", "--words"),
        ("attention model --sweep --texts a --size 32", "--size"),
        ("attention model --text a --metric auto", "--metric"),
        ("attention model --text a --explicit", "--explicit"),
        ("attention model --sweep --texts a --no-spectra", "--spectra"),
        ("explore --axes ZYX", "--axes"),
        ("study mixing --jobs 2 --scheduler tcp://127.0.0.1:1", "--jobs"),
        ("validate --list --quick", "--quick"),
    ],
)
def test_options_without_effect_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("in.png", "more.png"):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(name)
    result = run(*arguments.split(), code=2)
    assert f"Invalid value for {option}: " in result.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


@pytest.mark.parametrize(
    ("words", "before"),
    [
        (["denoise", "", "out"], "denoise"),
        (["denoise", "in.png", ""], "in.png"),
        (["denoise", "in.png", "out.png", "--mask", ""], "--mask"),
        (["denoise", "in.png", "out.png", "--mask="], "--mask"),
        (["noise", ""], "noise"),
        (["explore", ""], "explore"),
    ],
)
def test_an_empty_word_is_no_name_of_the_working_folder(folder: Path, words: list[str], before: str) -> None:
    told = " ".join(run(*words, code=2).stderr.split())
    assert f"got an empty word after '{before}', expected a name or a value; a variable of the shell may be" in told


def test_what_is_no_command_is_answered_with_the_one_that_is_meant(folder: Path) -> None:
    Path("in.png").write_bytes(b"")
    for words, meant in (
        (("denoize", "in.png"), "; did you mean denoise?\n"),
        (("in.png", "out.png", "--verbose"), "; say nonlocal denoise in.png out.png\n"),
        (("",), "validate, info\n"),
        (("gone",), "got 'gone', expected a command: denoise, noise, demo, study, attention, explore, cite, validate, "
                    "info\n"),
    ):  # fmt: skip
        assert run(*words, code=2).stderr.endswith(meant)


def test_the_table_of_options_names_options() -> None:
    commands: Any = typer.main.get_command(app)
    for name, rules in _RULES.items():
        known = {param.name for param in commands.get_command(None, name).params}
        for rule in rules:
            assert set(rule.options.split()) <= known


# --- what the library says, said in the shell ------------------------------------------------------------------------


def test_the_library_names_no_options_of_commands() -> None:
    """It is told in Python; the desk says it in the words of the shell. Properties of style sheets begin alike."""
    others = {"--no-optional-locks", "--porcelain", "--untracked-files", "--nproc-per-node"}  # of git and torchrun
    room = Path(nlflow.__file__).parent
    found = {
        (path.name, option)
        for path in room.rglob("*.py")
        if "desk" not in path.relative_to(room).parts
        for option in re.findall(r"(?<![\w(-])--[a-z][a-z-]+(?![a-z:-])", path.read_text(encoding="utf-8"))
        if option not in others
    }
    assert found == set()


def test_advice_of_the_library_is_given_in_words_of_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    samples = np.random.default_rng(0).uniform(0, 255, (40, 40, 1))
    estimate = NoiseEstimate(GaussianNoise(0.02), "medium")
    for text, command in (
        (if_wrong(2), "--strength 0.5 keeps more; or measure it in a flat part without print or edges"),
        (doubts(samples, 0.02, estimate, 2)[0], "(nonlocal denoise IN OUT --flat 20:84,300:400)"),
        (
            doubts(samples, 0.02, estimate, 2)[0],
            "(nonlocal noise OTHER --save camera.json, then --noise camera.j",
        ),
        (gaussian._of_others(1, 3), "(nonlocal noise FILE --save MODEL.json)"),
    ):
        terminal.say("note", text)
        assert command in capsys.readouterr().err
    terminal.echo("such as flat=np.s_[20:84, 300:400]")  # which is no message: it may be the name of a file
    assert capsys.readouterr().out == "such as flat=np.s_[20:84, 300:400]\n"
