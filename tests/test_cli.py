"""The command `nonlocal`: what it passes on, prints, writes, and how it fails.

The denoiser is replaced by a stand-in, so that these tests see the command alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from nlflow import cli, files
from nlflow.errors import InputError, NlflowWarning

RNG = np.random.default_rng(11)
IMAGE = RNG.integers(0, 256, (12, 16), dtype=np.uint8)


@dataclasses.dataclass(frozen=True)
class Info:
    sigma: float
    sigma_estimated: bool
    kernel_width: float = 1.25
    steps: int = 4
    reason: str = "converged"
    energy: float = float("nan")
    levels: tuple[float, ...] = (1.0, 2.0)
    seconds: float = 0.125

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Denoiser:
    """Stand-in for the real one: halves its input and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[np.ndarray[Any, Any], float | None, dict[str, Any]]] = []
        self.failure: BaseException | None = None
        self.warning = ""

    def __call__(self, image: Any, sigma: float | None = None, **options: Any) -> tuple[Any, Info]:
        self.calls.append((image, sigma, options))
        if self.failure is not None:
            raise self.failure
        if self.warning:
            warnings.warn(self.warning, NlflowWarning, stacklevel=2)
        return image * 0.5, Info(12.5 if sigma is None else sigma, sigma is None)


@pytest.fixture
def denoiser(monkeypatch: pytest.MonkeyPatch) -> Denoiser:
    module = types.ModuleType("nlflow.denoising")
    stand_in = Denoiser()
    module.denoise = stand_in  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nlflow.denoising", module)
    return stand_in


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(IMAGE).save("in.png")
    np.save("in.npy", RNG.standard_normal((40, 2)))
    return tmp_path


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(cli.app, list(arguments), prog_name="nonlocal", catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result


def fails(*arguments: str) -> str:
    """Return the message of a run that fails with one line on stderr and nothing else."""
    before = listing()
    result = run(*arguments, code=1)
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("nonlocal: note:")]
    assert len(lines) == 1
    assert lines[0].startswith("nonlocal: error: ")
    assert listing() == before
    return lines[0]


def listing() -> list[str]:
    return sorted(path.name for path in Path.cwd().iterdir())


# --- denoise ---------------------------------------------------------------------------------------------------------


def test_image(folder: Path, denoiser: Denoiser) -> None:
    result = run("denoise", "in.png", "out.png")
    ((image, sigma, options),) = denoiser.calls
    np.testing.assert_array_equal(image, IMAGE)
    assert image.dtype == np.uint8
    assert sigma is None
    assert options == {
        "channel_axis": None,
        "preserve_range": True,
        "return_info": True,
        "progress": False,
        "memory_limit": None,
    }
    np.testing.assert_array_equal(files.read("out.png").data, np.rint(IMAGE * 0.5))
    assert result.stderr == ""
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines())
    table = {name.strip(): value.strip() for name, value in lines.items()}
    assert table == {
        "input": "in.png, image of 12 x 16, uint8",
        "sigma": "12.5 (estimated)",
        "kernel width": "1.25",
        "steps": "4",
        "reason": "converged",
        "energy": "nan",
        "seconds": "0.12",
        "written": "out.png",
    }
    assert listing() == ["in.npy", "in.png", "out.png"]


def test_options_are_passed_on(folder: Path, denoiser: Denoiser) -> None:
    result = run(
        "denoise", "in.npy", "out.npy", "--sigma", "0.5", "--kind", "signal", "--channel-axis", "1",
        "--memory-limit", "2GiB",
    )  # fmt: skip
    ((image, sigma, options),) = denoiser.calls
    assert image.shape == (40, 2)
    assert sigma == 0.5
    assert options["channel_axis"] == 1
    assert options["memory_limit"] == 2 * 2**30
    assert "sigma         0.5 (given)" in result.stdout
    np.testing.assert_array_equal(np.load("out.npy"), np.load("in.npy") / 2)


def test_json(folder: Path, denoiser: Denoiser) -> None:
    Image.fromarray(IMAGE // 2).save("clean.png")
    denoiser.warning = "the window was shrunk"
    result = run("denoise", "in.png", "out.npy", "--json", "--compare", "fig.svg", "--clean", "clean.png")
    report = json.loads(result.stdout)
    assert report["input"] == "in.png"
    assert report["output"] == "out.npy"
    assert report["figure"] == "fig.svg"
    assert report["shape"] == [12, 16]
    assert report["dtype"] == "uint8"
    assert report["sigma_given"] is None
    assert report["denoise"]["sigma"] == 12.5
    assert report["denoise"]["energy"] is None
    assert report["denoise"]["levels"] == [1.0, 2.0]
    assert report["psnr_output"] > report["psnr_input"] > 0
    assert report["warnings"] == ["the window was shrunk"]
    assert report["seconds_total"] >= 0
    assert "nonlocal: warning: the window was shrunk" in result.stderr


def test_comparison_and_clean(folder: Path, denoiser: Denoiser) -> None:
    result = run("denoise", "in.png", "out.png", "--compare", "fig.PNG", "--clean", "in.png")
    with Image.open("fig.PNG") as figure:
        assert figure.width > 500
    assert "dB before" in result.stdout
    assert "figure" in result.stdout
    assert listing() == ["fig.PNG", "in.npy", "in.png", "out.png"]


def test_clean_array(folder: Path, denoiser: Denoiser) -> None:
    values = RNG.standard_normal((5, 6, 7))
    np.save("a.npy", values)
    run("denoise", "a.npy", "b.npy", "--channel-axis", "0", "--clean", "a.npy")
    np.save("c.npy", values[:, :, 1:])
    message = fails("denoise", "a.npy", "b.npy", "--channel-axis", "0", "--clean", "c.npy")
    assert "--clean: got c.npy of shape (5, 6, 6), expected (5, 6, 7)" in message


def test_notes_and_quiet(folder: Path, denoiser: Denoiser) -> None:
    Path("in.csv").write_text("time,x\n" + "".join(f"{i},{i % 3}\n" for i in range(30)))
    denoiser.warning = "shrunk"
    result = run("denoise", "in.csv", "out.npy")
    assert "nonlocal: note: in.csv: column 'time' is kept as it is" in result.stderr
    assert "nonlocal: note: out.npy: column names and times are left out" in result.stderr
    assert "nonlocal: warning: shrunk" in result.stderr
    result = run("denoise", "in.csv", "out.csv", "--quiet")
    assert (result.stdout, result.stderr) == ("", "")
    assert Path("out.csv").read_text().startswith("time,x\n0,0.0\n1,0.5\n")
    assert "sigma" in json.loads(run("denoise", "in.csv", "out.csv", "-q", "--json").stdout)["denoise"]


def test_existing_output_is_replaced(folder: Path, denoiser: Denoiser) -> None:
    Path("out.png").write_text("old")
    run("denoise", "in.png", "out.png")
    assert files.read("out.png").data.shape == IMAGE.shape


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.png", "out.png"], "missing.png: got no such file"),
        (["in.png", "out.gif"], "out.gif: got the extension '.gif'"),
        (["in.png", "out.wav"], "out.wav: got an image to write"),
        (["in.png", "nowhere/out.png"], "does not exist"),
        (["in.png", "in.png"], "OUT: got in.png, the same file as IN"),
        (["in.png", "./x/../in.png"], "the same file as IN"),
        (["in.png", "link.png"], "the same file as IN"),
        (["in.png", "out.png", "--compare", "out.png"], "--compare: got out.png, the same file as OUT"),
        (["in.png", "out.png", "--compare", "in.png"], "the same file as IN"),
        (["in.png", "in.npy", "--clean", "in.npy"], "OUT: got in.npy, the same file as --clean"),
        (["in.png", "out.png", "--compare", "fig.jpg"], "--compare: got fig.jpg, expected a name that ends in .png"),
        (["in.png", "out.png", "--compare", "nowhere/fig.png"], "does not exist"),
        (["in.png", "out.png", "--clean", "in.npy"], "--clean: got in.npy of shape (40, 2)"),
        (["in.png", "out.png", "--clean", "missing.npy"], "no such file"),
        (["in.png", "out.png", "--kind", "signal"], "kind: got 'signal'"),
        (["in.png", "out.png", "--channel-axis", "2"], "channel_axis: got 2"),
    ],
)
def test_refused_before_any_work(folder: Path, denoiser: Denoiser, arguments: list[str], message: str) -> None:
    Path("link.png").symlink_to("in.png")
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
    denoiser.failure = failure
    assert message in fails("denoise", "in.png", "out.png", "--sigma", "-1", "--compare", "fig.png")
    assert Path("out.png").read_text() == "old"


def test_nothing_is_written_when_drawing_fails(
    folder: Path, denoiser: Denoiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise InputError("figure: got nothing")

    monkeypatch.setattr("nlflow.plotting.comparison_figure", fail)
    assert "figure: got nothing" in fails("denoise", "in.png", "out.png", "--compare", "fig.png")


def test_programming_errors_are_not_hidden(folder: Path, denoiser: Denoiser) -> None:
    denoiser.failure = ZeroDivisionError("a fault of ours")
    with pytest.raises(ZeroDivisionError):
        run("denoise", "in.png", "out.png")


def test_interrupt(folder: Path, denoiser: Denoiser) -> None:
    denoiser.failure = KeyboardInterrupt()
    result = run("denoise", "in.png", "out.png", "--compare", "fig.png", code=130)
    assert result.stderr == "nonlocal: interrupted\n"
    assert listing() == ["in.npy", "in.png"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["denoise"],
        ["denoise", "in.png"],
        ["denoise", "in.png", "out.png", "more"],
        ["denoise", "in.png", "out.png", "--sigma", "much"],
        ["denoise", "in.png", "out.png", "--kind", "video"],
        ["denoise", "in.png", "out.png", "--channel-axis", "x"],
        ["denoise", "in.png", "out.png", "--unknown"],
        ["sharpen"],
        *(
            ["denoise", "in.png", "out.png", "--memory-limit", size]
            for size in ("0", "x", "2XB", "1.2.3", "-1", "1e99")
        ),
    ],
)
def test_wrong_usage(folder: Path, denoiser: Denoiser, arguments: list[str]) -> None:
    result = run(*arguments, code=2)
    assert result.stdout == ""
    assert "Usage: nonlocal" in result.stderr
    assert denoiser.calls == []


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
    run("denoise", "in.png", "out.png", "--memory-limit", text)
    assert denoiser.calls[0][2]["memory_limit"] == size


@pytest.mark.skipif(os.name != "posix", reason="names of POSIX")
def test_names_that_are_no_text(folder: Path, denoiser: Denoiser) -> None:
    name = os.fsdecode(b"out-\xff.npy")
    result = run("denoise", "in.png", name)
    assert r"out-\udcff.npy" in result.stdout
    assert json.loads(run("denoise", "in.png", name, "--json").stdout)["output"] == name


# --- the other commands ----------------------------------------------------------------------------------------------


def test_demo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run_demo(out: Path, progress: bool = True) -> str:
        calls.append((out, progress))
        return "table"

    module = types.ModuleType("nlflow.demo")
    module.run_demo = run_demo  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nlflow.demo", module)
    assert run("demo").stdout == "table\n"
    run("demo", "--out", "there", "--quiet")
    assert calls == [(Path("demo-output"), False), (Path("there"), False)]
    assert "--out: got in.png" in fails("demo", "--out", "in.png")


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


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("nlflow ")
    story = run("--help").stdout
    for word in ("denoise", "demo", "info", "Exit codes", "--sigma 20"):
        assert word in story
    for command in ("denoise", "demo", "info"):
        assert "Examples:\n" in run(command, "-h").stdout
        assert f"\n    nonlocal {command}" in run(command, "--help").stdout
    assert "denoise" in run(code=2).output
