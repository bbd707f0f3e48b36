"""Running studies: kept cases, interruptions, several processes, and folders that are not what they should be."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from joblib.externals.loky import get_reusable_executor

import nlflow
from nlflow import FileFormatError, Gaussian, InputError, Laplace, NlflowWarning, NumericalError, run_study
from nlflow.backends.devices import choose_device
from nlflow.backends.machine import arithmetic, environment, folder_digest, git_state, processor, source_digest
from nlflow.backends.progress import bar
from nlflow.flows.integrators import ExplicitEuler
from nlflow.store.encoding import encode
from nlflow.store.records import program
from nlflow.store.storage import FORMAT, load_record, save_record
from nlflow.studies.runner import KINDS
from validation.robustness.processors.settings import in_effect

OPTIONS: dict[str, Any] = {
    "nodes": [10, 12],
    "integrator": ["euler", "semi-implicit"],
    "metric": "degree",
    "fidelity": 0.5,
    "dt": [0.1, 0.05, 0.025],
}


def table(result: Any) -> str:
    return encode(result.rows)


def files(folder: Path) -> list[Path]:
    return sorted((folder / "cases").iterdir())


@pytest.fixture
def complete(tmp_path: Path) -> Path:
    run_study("time-order", out=tmp_path / "complete", **OPTIONS)
    return tmp_path / "complete"


@pytest.fixture
def workers() -> Iterator[None]:
    yield
    get_reusable_executor().shutdown(wait=True)


def test_a_folder_holds_the_study_and_one_file_a_case(complete: Path) -> None:
    assert sorted(path.name for path in complete.iterdir()) == ["cases", "study.json"]
    assert [path.name[:5] for path in files(complete)] == ["0000-", "0001-", "0002-", "0003-"]
    content = json.loads((complete / "study.json").read_text())
    assert (content["kind"], content["format"]) == ("study", FORMAT)
    assert content["versions"]["numpy"] == np.__version__
    assert content["content"]["study"] == "time-order"
    assert content["content"]["options"]["nodes"] == [10, 12]
    assert content["content"]["options"]["rng"] == 0


def test_a_second_run_reads_and_computes_nothing(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = run_study("time-order", **OPTIONS)
    monkeypatch.setattr("nlflow.studies.runner._execute", lambda *_: pytest.fail("computed again"))
    again = run_study("time-order", out=complete, **OPTIONS)
    assert again.provenance["cases"] == {"computed": 0, "read": 4}
    assert fresh.provenance["cases"] == {"computed": 4, "read": 0}
    assert table(again) == table(fresh)
    assert again.fits == fresh.fits
    assert again.report() == fresh.report()


@pytest.mark.slow
def test_every_case_has_a_seed_of_its_own(complete: Path) -> None:
    fresh = run_study("time-order", **OPTIONS)
    for number in range(4):
        part = complete.with_name(f"part-{number}")
        shutil.copytree(complete, part)
        files(part)[number].unlink()
        result = run_study("time-order", out=part, **OPTIONS)
        assert result.provenance["cases"] == {"computed": 1, "read": 3}
        assert table(result) == table(fresh)


def test_rows_are_plain_before_they_are_files(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"a": np.float64(0.1), "b": np.int64(2), "c": np.bool_(True), "d": float("nan")}]
    kind = KINDS["mixing"]
    monkeypatch.setattr(type(kind), "measure", lambda *_: rows)
    monkeypatch.setattr(type(kind), "fits", lambda *_: [])
    result = run_study("mixing", nodes=8, boundary="periodic")
    assert [type(result.rows[0][name]) for name in "abcd"] == [float, int, bool, float]


KILLED = """
import sys, time
from nlflow import run_study
from nlflow.store.encoding import digest, encode

def start(x):
    time.sleep(0.4)
    return x[:, 0] ** 2

result = run_study("time-order", out=sys.argv[1], nodes=[8, 9, 10, 11, 12, 13], integrator="euler", metric="l2",
                   fidelity=0.1, start=start, boundary="isolated")
print(digest(encode(result.rows)), result.provenance["cases"]["read"])
"""


@pytest.mark.slow
def test_killed_and_resumed(tmp_path: Path) -> None:
    def process(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", "-c", KILLED, str(tmp_path / name)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    killed = process("killed")
    deadline = time.monotonic() + 600
    cases = tmp_path / "killed" / "cases"
    while time.monotonic() < deadline and (not cases.exists() or len(list(cases.glob("0*.json"))) < 2):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    done = {path: path.stat().st_mtime_ns for path in cases.glob("0*.json")}
    assert 2 <= len(done) < 6
    resumed, whole = process("killed"), process("whole")
    words = [runner.communicate(timeout=600)[0].split() for runner in (resumed, whole)]
    assert words[0] == [words[1][0], str(len(done))]
    assert words[1][1] == "0"
    assert {path: path.stat().st_mtime_ns for path in done} == done


@pytest.mark.slow
def test_an_interruption_leaves_what_is_done(tmp_path: Path) -> None:
    calls = []

    def start(x: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return x[:, 0]

    def calm(x: Any) -> Any:
        return x[:, 0]

    options = {**OPTIONS, "nodes": [10, 11, 12, 13]}
    with pytest.raises(KeyboardInterrupt):
        run_study("time-order", out=tmp_path / "a", start=start, **options)
    assert len(files(tmp_path / "a")) == 2
    fresh = run_study("time-order", start=calm, **options)
    first = [row for row in fresh.rows if row["nodes"] == 10]
    assert [row for path in files(tmp_path / "a") for row in json.loads(path.read_text())["content"]["rows"]] == first


def test_ctrl_c_within_an_integration_is_no_measurement(tmp_path: Path) -> None:
    """The solver returns what it has reached; a study must not take that for an error at the end."""

    class Stopped(ExplicitEuler):
        def step(self, flow: Any, u: Any, dt: float) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study("time-order", out=tmp_path, nodes=8, integrator=Stopped)
    assert files(tmp_path) == []


def test_a_failed_integration_is_no_measurement() -> None:
    class Diverging(ExplicitEuler):
        def step(self, flow: Any, u: Any, dt: float) -> Any:
            return np.full_like(u, np.inf)

    with pytest.raises(NumericalError, match="the integration by Diverging"):
        run_study("time-order", nodes=8, integrator=Diverging)


# --- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_give_the_bits_of_one(tmp_path: Path, workers: None) -> None:
    """Matrices large enough for threads of their own, and functions that only cloudpickle can send."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 320, 8))
    options: dict[str, Any] = {"queries": q, "keys": k, "values": v, "integrator": "euler", "fidelity": [0.1, 0.5]}
    options["dt"], options["t"] = [0.2, 0.1, 0.05], 1.0
    one = run_study("time-order", **options)
    two = run_study("time-order", jobs=2, out=tmp_path / "two", **options)
    assert table(two) == table(one)
    assert len(files(tmp_path / "two")) == 2
    exponent = 2.0
    local: dict[str, Any] = {
        **OPTIONS,
        "start": lambda x: np.cos(x[:, 0]) ** exponent,
        "kernel": [Gaussian(0.1), Laplace(0.1)],
    }
    assert table(run_study("time-order", jobs=2, **local)) == table(run_study("time-order", **local))
    with pytest.raises(InputError, match="reducible"):
        run_study("mixing", jobs=2, kernel="tophat:radius=0.001")
    with joblib.parallel_config(backend="threading", n_jobs=2):
        assert table(run_study("monte-carlo", jobs=None, seeds=5)) == table(run_study("monte-carlo", seeds=5))


def test_progress_is_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nlflow.studies.runner.bar", partial(bar, mininterval=0))  # each case, however fast
    run_study("time-order", progress=True, **OPTIONS)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "time-order" in shown.err
    assert "4/4" in shown.err
    run_study("time-order", **OPTIONS)
    assert capsys.readouterr().err == ""


# --- folders that are not what they should be ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": [10, 13]}, r"nodes is \[ 10, 12 \] there and \[ 10, 13 \] here"),
        ({"kernel": Gaussian(0.2)}, r'kernel is .*"width": 0.1.* there and .*"width": 0.2'),
        ({"start": np.ones(10)}, "start is null there and .*sha256.* here|channels is"),
        ({"rng": 1}, "rng is 0 there and 1 here"),
        ({"t": 2.0}, "t is null there and 2.0 here"),
    ],
)
@pytest.mark.sampled(2)
def test_another_study_is_refused(complete: Path, change: dict[str, Any], message: str) -> None:
    before = {path: path.read_bytes() for path in complete.rglob("*.json")}
    with pytest.raises(FileFormatError, match=f"holds another study: (.|\n)*{message}(.|\n)*choose another folder"):
        run_study("time-order", out=complete, **{**OPTIONS, **change})
    assert {path: path.read_bytes() for path in complete.rglob("*.json")} == before
    with pytest.raises(FileFormatError, match='study is "time-order" there and "mixing" here'):
        run_study("mixing", out=complete)


def test_another_version_is_refused(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {**environment()["versions"], "numpy": "99.0"}
    monkeypatch.setattr("nlflow.store.records.environment", lambda: {"versions": versions})
    with pytest.raises(FileFormatError, match=r'version of numpy is .* there and "99.0" here'):
        run_study("time-order", out=complete, **OPTIONS)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"NUMBA_CPU_NAME": "generic"}, r'processor of numba is ".*" there and "generic, features .*" here'),
        ({"NUMBA_CPU_FEATURES": "-fma"}, r'processor of numba is ".*, features .*" there and ".*, features .*" here'),
        ({"OPENBLAS_CORETYPE": "Nehalem"}, r'processor of BLAS is ".*" there and ".* Nehalem" here'),
    ],
)
@pytest.mark.slow
def test_another_processor_is_refused(tmp_path: Path, changed: dict[str, str], told: str) -> None:
    """As `validation.robustness.processors` plays them, in an interpreter of its own."""
    run_study("mixing", nodes=12, out=tmp_path / "mixing")
    words = "from nlflow import run_study; run_study('mixing', nodes=12, out='mixing')"
    done = subprocess.run(
        [sys.executable, "-c", words], cwd=tmp_path,
        env={**os.environ, **changed}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert re.search(f"FileFormatError: .*holds another study: {told}; .*choose another folder", done.stderr)


def test_the_processor_belongs_to_the_program(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = in_effect()
    found = program()
    assert found["processor of numba"].startswith(f"{played['numba']}, features ")
    assert all(core in found["processor of BLAS"] for core in played["blas"])
    monkeypatch.setattr("nlflow.store.records.arithmetic", lambda: {**arithmetic(), "processor of BLAS": "another"})
    with pytest.raises(FileFormatError, match=r'processor of BLAS is ".*" there and "another" here'):
        run_study("time-order", out=complete, **OPTIONS)
    device = choose_device("cpu-tensors")
    own = set(program(device).items()) - set(program().items())
    assert own == {("version of torch", torch.__version__), ("processor of torch", f"{played['torch']}, {processor()}")}


def test_another_state_of_the_source_is_refused(complete: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert source_digest() == folder_digest(Path(nlflow.__file__).parent)  # all of it, not one room
    monkeypatch.setattr("nlflow.store.records.source_digest", lambda: "0" * 64)
    with pytest.raises(FileFormatError, match=r'source of nlflow is .* there and "0000'):
        run_study("time-order", out=complete, **OPTIONS)


def test_a_result_names_its_commit() -> None:
    root = Path(nlflow.__file__).parents[2]
    if not (root / ".git").exists():
        pytest.skip("not a checkout of git")
    state = git_state()
    assert state is not None
    assert len(state["commit"]) == 40


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "emptied", "changed", "binary", "other"])
@pytest.mark.sampled(2)
def test_damaged_cases_are_computed_again(complete: Path, damage: str) -> None:
    fresh = run_study("time-order", **OPTIONS)
    path = files(complete)[2]
    text = path.read_text()
    found = json.loads(text)
    error = repr(found["content"]["rows"][0]["error"])
    assert text.count(error) == 1
    wrong = {
        "truncated": text[: len(text) // 2],
        "emptied": "",
        "changed": text.replace(error, error.replace("0", "1") if "0" in error[2:] else "9" + error),
        "binary": "\x00\x01",
        "other": "[1, 2]",
    }[damage]
    assert wrong != text
    path.write_text(wrong)
    with pytest.warns(NlflowWarning, match=f"{path.name}: .*it is computed again"):
        result = run_study("time-order", out=complete, **OPTIONS)
    assert table(result) == table(fresh)
    assert path.read_text() == text
    assert result.provenance["cases"] == {"computed": 1, "read": 3}


_CRAFTED = {"mixing": {"nodes": [8], "boundary": "periodic"}, "space-order": {"nodes": [8, 16, 32]}}


def craft(folder: Path, kind: str, change: Callable[[list[dict[str, Any]]], Any]) -> list[dict[str, Any]]:
    """Return the rows of a study and change them in its folder: the right case, the right checksum."""
    fresh = run_study(kind, out=folder, **_CRAFTED[kind])
    for path in files(folder):
        content = load_record(path, "case of a study")
        change(content["rows"])
        save_record(path, "case of a study", content)
    return fresh.rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "column", "wrong"),
    [
        *(("mixing", "distance", wrong) for wrong in ("periodic", None, [1], {}, True, 10**400)),
        *(("mixing", column, wrong) for column in ("upper", "mixing_time", "used", "k") for wrong in ({}, "x")),
        ("mixing", "mixing_time", 1.5),
        ("mixing", "used", 1),
        ("mixing", "nodes", 8.0),
        ("space-order", "law", 1.0),
        ("mixing", "mu_2", "left out"),
        ("mixing", "another", 1.0),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.sampled(4)
def test_foreign_rows_are_computed_again(tmp_path: Path, kind: str, column: str, wrong: Any) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if wrong == "left out":
                del row[column]
            else:
                row[column] = wrong

    fresh = craft(tmp_path, kind, change)
    with pytest.warns(NlflowWarning, match="which is no case of a study; it is computed again"):
        again = run_study(kind, out=tmp_path, **_CRAFTED[kind])
    assert again.rows == fresh
    assert again.provenance["cases"]["read"] == 0


def test_no_rows_and_other_orders_are_foreign(tmp_path: Path) -> None:
    for name, change in {"none": list.clear, "turned": lambda rows: rows[0].update(k=rows[0].pop("k"))}.items():
        fresh = craft(tmp_path / name, "mixing", change)
        with pytest.warns(NlflowWarning, match=r"it is computed again"):
            assert run_study("mixing", out=tmp_path / name, **_CRAFTED["mixing"]).rows == fresh


@pytest.mark.parametrize(("kind", "column", "wrong"), [("mixing", "distance", -1.0), ("space-order", "law", "second")])
def test_numbers_that_nobody_measures_are_refused(tmp_path: Path, kind: str, column: str, wrong: Any) -> None:
    craft(tmp_path, kind, lambda rows: [row.update({column: wrong, "used": True}) for row in rows])
    with pytest.raises(FileFormatError, match="numbers that no study measures"):
        run_study(kind, out=tmp_path, **_CRAFTED[kind])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("time-order", {"nodes": 12, "integrator": "euler", "dt": [1, 0.5, 0.25], "t": 2, "boundary": "reflect"}),
        ("space-order", {"nodes": [8, 16, 32]}),
        ("monte-carlo", {"nodes": [8, 16, 32], "seeds": 3, "kernel": "tophat:radius=0.05"}),
        ("mixing", {"nodes": [8, 9], "kernel": "dot:scale=2"}),
        ("mixing", {"nodes": [8], "origin": 0, "boundary": "isolated"}),
        ("equilibrium", {"nodes": 12, "fidelity": [1, 0.1, 0.01], "boundary": "reflect"}),
        ("stability", {"nodes": 12, "kernel": "laplace:width=0.1", "boundary": "reflect"}),
    ],
    ids=str,
)
@pytest.mark.sampled(2)
def test_what_every_kind_measures_is_what_it_declares(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    fresh = run_study(kind, out=tmp_path, **options)
    again = run_study(kind, out=tmp_path, **options)
    assert again.provenance["cases"] == {"computed": 0, "read": fresh.provenance["cases"]["computed"]}
    assert encode(again.rows) == encode(fresh.rows)
    assert again.report() == fresh.report()


def test_damaged_folders(complete: Path, tmp_path: Path) -> None:
    head = complete / "study.json"
    text = head.read_text()
    for wrong in (text[:30], "", "[]", text.replace('"nodes"', '"Nodes"')):
        head.write_text(wrong)
        with pytest.raises(FileFormatError, match=r"study.json: got (a damaged file .*|no) (expected a )?record"):
            run_study("time-order", out=complete, **OPTIONS)
    head.unlink()
    with pytest.raises(FileFormatError, match=r"got cases without a study.json"):
        run_study("time-order", out=complete, **OPTIONS)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFormatError, match="expected a folder that can be made"):
        run_study("time-order", out=tmp_path / "file", **OPTIONS)


def test_objects_that_cannot_be_known_again_are_refused_in_folders(tmp_path: Path) -> None:
    class Opaque:
        __slots__ = ()

        def __call__(self, x: Any) -> Any:
            return x[:, 0]

    assert run_study("time-order", start=Opaque(), **OPTIONS).fits[0].passed is True
    with pytest.raises(InputError, match="start: got an object that only its place in memory tells"):
        run_study("time-order", start=Opaque(), out=tmp_path, **OPTIONS)
