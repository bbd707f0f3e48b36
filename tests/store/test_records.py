"""Records that later runs go by: with the right checksum, and not what this package writes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from nlflow import FileFormatError, InputError
from nlflow.desk.commands.denoise_folder import Ledger
from nlflow.desk.commands.jobs import Job
from nlflow.store.encoding import misfit
from nlflow.store.storage import load_record, save_record

COLUMNS = {"n": int, "x": float, "y": float | None, "on": bool, "word": str, "list": list | None}
ENTRY = {"n": 3, "x": 0.5, "y": None, "on": True, "word": "", "list": [1]}


@pytest.mark.parametrize(
    "changed",
    [{}, {"x": 1}, {"x": math.nan}, {"y": 2}, {"y": -math.inf}, {"on": False}, {"list": None}, {"n": 2**63 - 1}],
    ids=str,
)
def test_what_has_the_names_and_types(changed: dict[str, Any]) -> None:
    assert misfit({**ENTRY, **changed}, COLUMNS) is None


@pytest.mark.parametrize(
    "changed",
    [{"n": True}, {"n": 1.0}, {"n": 2**63}, {"x": False}, {"x": "1"}, {"x": None}, {"x": 10**400}, {"y": []},
     {"on": 1}, {"on": None}, {"word": None}, {"list": {}}, {"more": 1}],
    ids=lambda changed: str(changed)[:40],
)  # fmt: skip
def test_what_has_not(changed: dict[str, Any]) -> None:
    trouble = misfit({**ENTRY, **changed}, COLUMNS)
    assert trouble is not None
    assert next(iter(changed)) in trouble
    assert len(trouble) < 300


@pytest.mark.parametrize("entry", [None, [], "x", 3, {}, {name: ENTRY[name] for name in reversed(ENTRY)}], ids=str)
def test_what_is_no_such_mapping(entry: Any) -> None:
    trouble = misfit(entry, COLUMNS)
    assert trouble is not None
    assert trouble.endswith("expected n, x, y, on, word, list")


@pytest.mark.parametrize(
    ("depth", "read"), [(90, True), (120, False), (480, False), (600, False), (900, False), (5000, False)]
)
def test_what_is_nested_too_deeply_is_damaged(tmp_path: Path, depth: int, read: bool) -> None:
    path = tmp_path / "record"
    save_record(path, "mine", 5)
    text = path.read_text()
    assert text.count(": 5") == 1
    path.write_text(text.replace(": 5", ": " + "[" * depth + "]" * depth))
    with pytest.raises(FileFormatError, match="does not have its checksum" if read else "nested too deeply"):
        load_record(path, "mine")


# ---- outputs of a folder


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, Job]:
    """A folder with one output and its record."""
    source, target = tmp_path / "in.png", tmp_path / "out" / "in.png"
    target.parent.mkdir()
    source.write_bytes(b"an input")
    job = Job(source, target, target.with_suffix(".svg"), {})
    ledger = Ledger(target.parent, {"sigma": 20.0})
    ledger.begin(job)
    target.write_bytes(b"an output")
    target.with_suffix(".svg").write_bytes(b"its figure")
    ledger.finish(job)
    return target.parent, job


def test_outputs_that_are_settled(written: tuple[Path, Job]) -> None:
    folder, job = written
    assert Ledger(folder, {"sigma": 20.0}).settled(job)
    assert not Ledger(folder, {"sigma": 21.0}).settled(job)
    job.target.write_bytes(b"another")
    with pytest.raises(InputError, match="was changed since it was written"):
        Ledger(folder, {"sigma": 20.0}).settled(job)


def test_a_folder_that_moves_keeps_its_record(written: tuple[Path, Job], tmp_path: Path) -> None:
    folder, job = written
    elsewhere = tmp_path / "elsewhere"
    shutil.move(folder, elsewhere)
    moved = Job(job.source, elsewhere / "in.png", elsewhere / "in.svg", {})
    assert Ledger(elsewhere, {"sigma": 20.0}).settled(moved)


@pytest.mark.parametrize("content", [None, [], "x", {"outputs": [1]}, {"outputs": "in.png"}, {"outputs": 3}], ids=str)
def test_foreign_records_of_outputs(written: tuple[Path, Job], content: Any) -> None:
    folder, job = written
    save_record(folder / ".nlflow" / "in.png.json", "output of a folder", content)
    with pytest.raises(InputError, match="of which the folder has no record"):
        Ledger(folder, {"sigma": 20.0}).settled(job)


# ---- blocks of an image


def test_foreign_records_of_blocks(tmp_path: Path) -> None:
    pytest.importorskip("dask")
    pytest.importorskip("zarr")
    from nlflow.desk.large import _KIND, _RECORD, _done_before

    digests = {"0/0": "a", "7/7": "b", "x": "c", "1/1": None, "0/1": 3}
    save_record(tmp_path / _RECORD, _KIND, {"problem": "p", "replace": False, "done": digests})
    assert _done_before(tmp_path, "p", (2, 2)) == {"0/0": "a"}
    known: dict[str, Any] = {"problem": "p", "replace": True, "done": digests}
    for content in (None, [], {"problem": "p"}, {**known, "done": []}, {**known, "problem": "q"}):
        save_record(tmp_path / _RECORD, _KIND, content)
        with pytest.raises(FileFormatError, match="blocks of another image"):
            _done_before(tmp_path, "p", (2, 2))


# ---- tables of campaigns


def test_the_tables_of_the_repository_are_whole_and_their_pages_say_the_same() -> None:
    from validation.robustness import ROOT
    from validation.robustness.contract import campaign_table
    from validation.robustness.mutants.results import results_table

    folder = ROOT / "validation" / "robustness" / "results"
    title = "Written by `make mutants`: 150 drawn with seed 0."
    for table in (
        campaign_table(folder),
        campaign_table(folder, "processors", "Other processors, played on this machine", "make portable"),
        results_table(folder, title),
    ):
        table.load()
        assert table.entries
        assert table.path.with_suffix(".md").read_text() == table.page()


def test_foreign_tables(tmp_path: Path) -> None:
    from validation.robustness.contract import campaign_table

    row = {"fault": "a", "tried": 1, "outcomes": {}, "lost": 0, "wrong": 0, "seconds": 1.0, "details": {}}
    entry = {"key": "a", "row": row, "date": "2026-11-22", "source": "b", "machine": "c"}
    table = campaign_table(tmp_path)
    table.load()
    assert table.entries == []
    for content in ({"entries": [{**entry, "row": {**row, "more": 1}}]}, {"entries": [{"key": "a"}]}, {}, [], None):
        save_record(table.path, table.kind, content)
        with pytest.raises(FileFormatError, match="got no table of faults"):
            table.load()
    save_record(table.path, table.kind, {"entries": [entry]})
    table.load(lambda entry: entry.key == "b")
    assert table.entries == []
    table.load()
    assert table.read("a") is not None


# ---- findings of claims


def test_foreign_findings(tmp_path: Path) -> None:
    from nlflow import NlflowWarning
    from validation.claims import all_claims
    from validation.finding import KIND, Finding, findings_in
    from validation.harness import Check, Outcome

    claim = all_claims()[0]
    records = findings_in(tmp_path, [claim], True)
    path = records.path(claim.name)

    def keep() -> Any:
        outcome = Outcome([Check("what", 0.1, 1.0), Check("order", 2.0, 0.1, expected=2.0)], {}, {"n": [1]})
        records.write(claim.name, Finding(claim, "pass", outcome, "", 1.0, {"picture": b"png"}).as_plain())
        return load_record(path, KIND)

    def change(content: Any, *places: Any, to: Any) -> None:
        *way, last = places
        for place in way:
            content = content[place]
        content[last] = to

    keep()
    found = records.read(claim.name)
    assert found is not None
    assert Finding.from_plain(claim, found).figures == {"picture": b"png"}
    for places, wrong in [
        (("finding",), []), (("finding", "status"), None), (("finding", "checks"), None), (("finding", "checks"), [1]),
        (("finding", "checks"), []), (("finding", "status"), "fail"),
        (("finding", "checks", 0, "measured"), "0.1"), (("finding", "checks", 1, "expected"), {}),
        (("finding", "checks", 1, "more"), 1), (("finding", "figures"), []), (("finding", "figures", "picture"), 5),
        (("finding", "figures", "picture"), "?"), (("finding", "seconds"), "1"), (("finding", "details"), None),
        (("finding", "checks", 0, "measured"), 1.5), (("program",), 1),
    ]:  # fmt: skip
        content = keep()
        change(content, *places, to=wrong)
        save_record(path, KIND, content)
        with pytest.warns(NlflowWarning, match=f"{claim.name}.*it is computed again"):
            assert records.read(claim.name) is None
    content = keep()
    content.update(program="of another state of the source", finding={"of": "another form"})
    save_record(path, KIND, content)
    assert records.read(claim.name) is None  # without a word
    records.write(claim.name, Finding(claim, "fail", Outcome([]), "", 1.0, {}).as_plain())
    found = records.read(claim.name)
    assert found is not None
    assert found["status"] == "fail"
    records.write(claim.name, Finding(claim, "error", None, "nothing goes", 1.0, {}).as_plain())
    assert records.read(claim.name) is None


# ---- trainings


def test_foreign_records_of_trainings(tmp_path: Path) -> None:
    from validation.training.record import RECORD, read_record, write_record

    path = tmp_path / RECORD
    first = {"epoch": 0.0, "step": 0, "training_loss": None, "diverged": False, "accuracy": 0.1}
    layers = {"cosine": [0.5], "t_sim": [0.4], "J": [1.0]}

    def write() -> Any:
        epochs = [{**first, "layers": layers}, {**first, "epoch": 1.0, "diverged": True, "layers": {}}]
        write_record(tmp_path, {"seed": 0}, {"step": 3, "seconds": 1.0, "epochs": epochs}, False)
        return load_record(path, "record of a training")

    assert write() == read_record(path, "accuracy")
    for change in (
        lambda record: record.pop("settings"),
        lambda record: record.update(finished=1),
        lambda record: record.update(epochs=[]),
        lambda record: record.update(epochs=[1]),
        lambda record: record["epochs"][0].pop("training_loss"),
        lambda record: record["epochs"][0].update(step="3"),
        lambda record: record["epochs"][1].update(accuracy=[1]),
        lambda record: record["epochs"][1].pop("accuracy"),
        lambda record: record["epochs"][0]["layers"].pop("J"),
        lambda record: record["epochs"][0]["layers"].update(J=[]),
        lambda record: record["epochs"][0]["layers"].update(J=["x"]),
        lambda record: record["epochs"][0]["layers"].update(J=3.0),
    ):
        record = write()
        change(record)
        save_record(path, "record of a training", record)
        with pytest.raises(FileFormatError, match="no record of a training"):
            read_record(path, "accuracy")
