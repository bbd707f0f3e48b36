"""Faults that really happen, in small numbers; ``make robustness`` has them in large ones."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from robustness.__main__ import main
from robustness.contract import Row
from robustness.faults import kills
from robustness.faults.disks import full_disk, mountable, read_only
from robustness.faults.kills import SAME, killed
from robustness.faults.others import clock_back, dead_workers, second_writer
from robustness.faults.processes import Running, problem_left, undisturbed
from robustness.faults.victims import FLOWS, FolderRun, Study, Victim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, mounts and /proc of Linux")

FOLDER = FolderRun()


@pytest.mark.parametrize("victim", [FLOWS[1], FOLDER], ids=["flow", "folder"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signals_at_random_times(victim: Victim, number: signal.Signals, tmp_path: Path) -> None:
    row = killed(victim, number, 2, tmp_path / "work", 7)
    assert row.good, row.details
    assert dict(row.outcomes) == {SAME: 2}


def test_killed_studies(tmp_path: Path) -> None:
    row = killed(Study(), signal.SIGKILL, 1, tmp_path / "work", 7)
    assert row.good, row.details


def test_the_campaign_sees_what_is_lost_and_what_is_done_again(tmp_path: Path) -> None:
    undisturbed(FOLDER, tmp_path / "work")
    place = tmp_path / "work"
    before = FOLDER.finished(place)
    assert len(before) == FOLDER.count
    assert problem_left(FOLDER, place, before) is None
    shutil.rmtree(place / "out" / ".nlflow")
    command = [part if part != "resume" else "overwrite" for part in FOLDER.command(place)]
    assert Running(command).end().code == 0
    assert str(problem_left(FOLDER, place, before)).startswith("done again: 00.png.json, 01")
    (place / "out" / ".nlflow" / "03.png.json").unlink()
    assert problem_left(FOLDER, place, before) == "no longer there: 03.png.json"
    (place / "out" / ".nlflow" / "04.png.json").write_text("{")
    assert str(problem_left(FOLDER, place, before)).startswith("what was done cannot be read")


def test_the_campaign_sees_other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "differs", lambda *_: "another result")
    row = killed(FOLDER, signal.SIGKILL, 1, tmp_path / "work", 7)
    assert not row.good
    assert row.wrong == 1


@pytest.mark.parametrize("victim", [FLOWS[1], FOLDER], ids=["flow", "folder"])
def test_full_disks(victim: Victim, tmp_path: Path) -> None:
    if not mountable(tmp_path):
        pytest.skip("mounting a small file system takes a superuser")
    row = full_disk(victim, [24576, 40960], tmp_path / "work")
    assert row.good, row.details


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    if not mountable(tmp_path):
        pytest.skip("mounting a folder read-only takes a superuser")
    row = read_only(FOLDER, tmp_path / "work")
    assert row.good, row.details


@pytest.mark.parametrize("victim", [FLOWS[0], FOLDER], ids=["flow", "folder"])
def test_a_second_process_is_refused(victim: Victim, tmp_path: Path) -> None:
    row = second_writer(victim, 1, tmp_path / "work")
    assert row.good, row.details


def test_clocks_that_go_back(tmp_path: Path) -> None:
    row = clock_back(FLOWS[1], tmp_path / "work")
    assert row.good, row.details


def test_dead_workers_of_a_pool(tmp_path: Path) -> None:
    row = dead_workers(False, 1, tmp_path / "work", 7)
    assert row.good, row.details


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("a fault", 3, {"well": 2, "badly": 1}, 0, 1, 0.1), Row("another", 1, {"well": 1}, 0, 0, 0.1)]

    def campaign(count: int, seed: int, tell: Any) -> None:
        assert (count, seed) == (5, 2)
        for row in rows:
            tell(row)

    monkeypatch.setattr("robustness.faults.campaign.campaign", campaign)
    assert main(["--only", "faults", "--kills", "5", "--seed", "2", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "robustness.md").read_text()
    assert "| a fault | 3 | 2 well; 1 badly | 0 | 1 | 0 |" in page
    assert "1 of 2 rows without loss or wrong result." in page
    found = json.loads((tmp_path / "robustness.json").read_text())
    assert [row["wrong"] for row in found["rows"]] == [1, 0]
    assert found["settings"] == {"kills": 5, "seed": 2}
    assert "BAD  a fault" in capsys.readouterr().out
    del rows[0]
    assert main(["--only", "faults", "--kills", "5", "--seed", "2", "--out", str(tmp_path)]) == 0
