"""The command `nonlocal study`: options, tables, files, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from nlflow import run_study
from nlflow.studies.runner import KINDS
from tests import commands

SMALL = ["time-order", "--nodes", "10,12", "--integrator", "euler", "--metric", "degree", "--fidelity", "0,0.5",
         "--dt", "0.1,0.05,0.025"]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, array in zip("qkv", np.random.default_rng(0).normal(size=(3, 20, 3)), strict=True):
        np.save(f"{name}.npy", array)
    return tmp_path


run, fails = partial(commands.run, "study"), partial(commands.fails, "study")


@pytest.mark.slow
def test_table_and_fits(folder: Path) -> None:
    result = run(*SMALL)
    dt = [0.1, 0.05, 0.025]
    expected = run_study("time-order", nodes=[10, 12], integrator="euler", metric="degree", fidelity=[0, 0.5], dt=dt)
    assert result.stdout.startswith(expected.report())
    assert result.stdout.endswith("\n4 agrees\n")
    assert result.stderr == ""
    assert sorted(path.name for path in folder.iterdir()) == ["k.npy", "q.npy", "v.npy"]


def test_json(folder: Path) -> None:
    report = json.loads(run(*SMALL, "--json", "--seed", "3").stdout)
    assert report["kind"] == "time-order"
    assert report["options"]["rng"] == 3
    assert [fit["expected"] for fit in report["fits"]] == [1, 1, 1, 1]
    assert len(report["rows"]) == 12


@pytest.mark.slow
def test_folder_is_written_and_read_again(folder: Path) -> None:
    first = run(*SMALL, "--out", "results", "--quiet")
    assert first.stdout == ""
    names = {path.name for path in (folder / "results").iterdir()}
    tables = {f"{name}.{ending}" for name in ("table", "fits") for ending in ("csv", "md", "tex")}
    assert names == {"cases", "study.json", "study.toml", "result.json", "figure.pdf", "figure.png", *tables}
    table = (folder / "results" / "table.csv").read_bytes()
    again = run(*SMALL, "--out", "results")
    assert again.stdout.endswith("result.json, figure.pdf, figure.png, study.toml in results\n")
    assert (folder / "results" / "table.csv").read_bytes() == table
    assert "holds another study: nodes is" in fails("time-order", "--nodes", "9", "--out", "results")
    case = next((folder / "results" / "cases").iterdir())
    case.write_text("{")
    assert f"nonlocal: warning: results/cases/{case.name}: got a damaged file" in run(*SMALL, "--out", "results").stderr
    assert (folder / "results" / "table.csv").read_bytes() == table


@pytest.mark.slow
def test_tokens_from_files(folder: Path) -> None:
    report = json.loads(
        run("time-order", "--queries", "q.npy", "--keys", "k.npy", "--values", "v.npy", "--json").stdout
    )
    assert report["options"]["queries"]["array"] == [20, 3]
    assert {row["metric"] for row in report["rows"]} == {"degree"}
    q, k, v = (np.load(f"{name}.npy") for name in "qkv")
    expected = run_study("time-order", queries=q, keys=k, values=v)
    assert report["rows"] == expected.rows


@pytest.mark.parametrize(
    "arguments",
    [
        ["space-order", "--kernel", "gaussian:width=0.1", "--kernel", "laplace:width=0.2", "--dimension", "1"],
        ["monte-carlo", "--nodes", "64,128,256", "--seeds", "20", "--dimension", "1,2", "--channels", "1,2"],
        [
            "samples",
            "--nodes",
            "64,128,256",
            "--seeds",
            "100",
            "--dimension",
            "4",
            "--kernel",
            "dot:scale=0.4",
        ],
        ["mixing", "--nodes", "12", "--laziness", "0.25", "--boundary", "reflect"],
        ["equilibrium", "--nodes", "12", "--fidelity", "0.01,1,10"],
        ["stability", "--kernel", "tophat:radius=0.2", "--nodes", "12"],
        ["time-order", "--nodes", "12", "--integrator", "euler", "--dt", "0.1,0.05,0.025"],
    ],
    ids=lambda arguments: arguments[0],
)
@pytest.mark.slow
def test_every_kind(folder: Path, arguments: list[str]) -> None:
    out = run(*arguments, "--out", "results").stdout
    assert out.split("\n")[-3].partition(" ")[2].startswith(("agrees", "cannot tell"))
    assert "disagrees" not in out.rpartition("agrees: the interval")[0]
    assert (folder / "results" / "figure.png").stat().st_size > 5000


def test_what_differs_is_said_and_is_no_error(folder: Path) -> None:
    steps = ["--dt", "1.9,1.8,1.7,1.6,1.5,1.4"]  # too long for the asymptotic order
    out = run(
        "time-order", *steps, "--integrator", "euler", "--fidelity", "0", "--metric", "degree", "--nodes", "16"
    ).stdout
    assert "1, to within 0.05  disagrees" in out
    assert out.endswith("\n1 disagrees\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["time-order", "--nodes", "ten"], "--nodes: got 'ten', expected whole numbers with commas"),
        (["time-order", "--fidelity", "1,,2"], "--fidelity: got '1,,2', expected numbers"),
        (["time-order", "--kernel", "box"], "--kernel: got 'box', expected one of gaussian"),
        (["time-order", "--seeds", "3"], "--seeds: the study 'time-order' has no such option"),
        (["space-order", "--nodes", "8,16"], "--nodes: got 2 different value(s)"),
        (["mixing", "--laziness", "3"], "--laziness: got 3.0, expected"),
        (["time-order", "--jobs", "0"], "--jobs: got 0"),
        (["time-order", "--format", "gif", "--out", "r"], "--format: got 'gif', expected one of 'pdf'"),
        (["time-order", "--width", "1", "--out", "r"], "--width: got 1.0, expected"),
    ],
)
def test_wrong_values_of_options_are_wrong_usage(folder: Path, arguments: list[str], message: str) -> None:
    assert commands.misused("study", *arguments).startswith(f"Invalid value for {message}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["time-order", "--keys", "none.npy"], "--keys: got none.npy (No such file or directory)"),
        (["time-order", "--keys", "."], "--keys: got . (Is a directory)"),
        (["time-order", "--keys", "text.npy"], "--keys: got text.npy, which is no .npy file of numbers"),
        (["time-order", "--keys", "empty.npy"], "--keys: got empty.npy, which is no .npy file of numbers"),
        (["time-order", "--keys", "cut.npy"], "--keys: got cut.npy, which is no .npy file of numbers"),
        (["time-order", "--keys", "objects.npy"], "--keys: got objects.npy, which is no .npy file of numbers"),
        (["time-order", "--keys", "archive.npz"], "--keys: got archive.npz, an archive of arrays"),
        (["time-order", "--keys", "complex.npy"], "keys: got complex values"),
        (["time-order", "--keys", "scalar.npy"], "keys: got 0 dimension(s) (shape ()), expected 1 or 2"),
        (["time-order", "--keys", "huge.npy"], "--keys: got huge.npy, which is no .npy file of numbers"),
        (["time-order", "--values", "v.npy"], "values: got an array without keys"),
        (["time-order", "--keys", "k.npy", "--values", "short.npy"], "values: got 5 rows, expected 20"),
        (["time-order", "--out", "k.npy"], "k.npy: got File exists, expected a folder"),
        (["mixing", "--kernel", "tophat:radius=0.001"], "affinity: got a reducible chain"),
    ],
)
def test_failures(folder: Path, arguments: list[str], message: str) -> None:
    Path("text.npy").write_text("1 2 3")
    Path("empty.npy").write_bytes(b"")
    Path("cut.npy").write_bytes(Path("k.npy").read_bytes()[:200])
    np.save("objects.npy", np.array([{}, None]), allow_pickle=True)
    np.savez("archive.npz", a=np.ones(3))
    np.save("complex.npy", np.ones((4, 2), complex))
    np.save("scalar.npy", np.float64(3))
    with Path("huge.npy").open("wb") as stream:  # a header that promises more than there is room for
        np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": (10**17,)})
    np.save("short.npy", np.ones((5, 3)))
    assert message in fails(*arguments)


def test_nothing_to_judge_is_said(folder: Path) -> None:
    np.save("one.npy", np.ones((1, 2)))
    out = run("monte-carlo", "--keys", "one.npy", "--nodes", "8,16,32", "--seeds", "2").stdout
    assert out.endswith("\n1 cannot tell; see the notes above\n")


def test_usage() -> None:
    assert "space-order" in run("--help").stdout
    assert "nonlocal study mixing --kernel tophat:radius=0.2" in run("--help-all").stdout
    assert "is not one of" in run("speed", code=2).stderr
    assert "'--seed': Input should be greater than or equal to 0" in run("mixing", "--seed", "-1", code=2).stderr


@pytest.mark.slow
def test_ctrl_c_leaves_what_is_done_for_the_next_run(folder: Path) -> None:
    code = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background has it ignored
from nlflow.studies.runner import KINDS
from tests import commands
kind = type(KINDS["time-order"])
measure, calls = kind.measure, []
def interrupted(self, options, seed):
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGINT)
    return measure(self, options, seed)
kind.measure = interrupted
from nlflow.desk.commands.main import main
main()
"""
    command = [sys.executable, "-W", "error", "-c", code, "study", *SMALL, "--out", "results"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "nonlocal: interrupted\n")
    assert len(list((folder / "results" / "cases").iterdir())) == 2
    resumed = run(*SMALL, "--out", "results").stdout
    assert resumed.split("written:")[0] == run(*SMALL).stdout


def test_help_names_the_options_of_every_kind() -> None:
    from nlflow.desk.commands.study import HELP

    common = {"kernel", "nodes", "dimension", "channels"}
    lines = HELP.split("which all have\n")[1].splitlines()[: len(KINDS)]
    told = {line.split()[0]: {word.strip(",") for word in line.split()[1:]} for line in lines}
    # What only Python can give: objects, and what few need.
    hidden = {"domain", "start", "t", "eps", "origin"}
    assert told == {name: set(kind.defaults) - common - hidden for name, kind in KINDS.items()}
    assert all(common <= set(kind.defaults) for kind in KINDS.values())
