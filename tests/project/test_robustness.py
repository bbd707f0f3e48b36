"""Faults that really happen, in small numbers; ``make robustness`` has them in large ones."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest

from nlflow.studies.cases import Case, run_cases
from validation.robustness.__main__ import main
from validation.robustness.contract import Row, campaign_table
from validation.robustness.faults import kills
from validation.robustness.faults.disks import full_disk, mountable, read_only
from validation.robustness.faults.kills import SAME, killed
from validation.robustness.faults.others import clock_back, dead_workers, second_writer
from validation.robustness.faults.processes import Running, problem_left, undisturbed
from validation.robustness.faults.victims import FLOWS, Claims, FolderRun, Study, Training, Victim
from validation.tables import Entry, markdown

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, mounts and /proc of Linux")

FOLDER = FolderRun()


class FewClaims(Claims):
    """Claims of a second or two; `make robustness` has longer ones."""

    claims = ("frechet-derivative", "killed-walk", "energy-balance")


@pytest.mark.parametrize(
    ("victim", "number", "times"),
    [
        pytest.param(FLOWS[1], signal.SIGKILL, 1, id="SIGKILL-flow-once"),
        *(
            pytest.param(victim, number, 2, id=f"{number.name}-{name}", marks=pytest.mark.slow)
            for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
            for name, victim in (("flow", FLOWS[1]), ("folder", FOLDER))
        ),
    ],
)
@pytest.mark.slow
def test_signals_at_random_times(victim: Victim, number: signal.Signals, times: int, tmp_path: Path) -> None:
    row = killed(victim, number, times, tmp_path / "work", 7)
    assert row.good, row.details
    assert dict(row.outcomes) == {SAME: times}


@pytest.mark.slow
def test_killed_studies(tmp_path: Path) -> None:
    row = killed(Study(), signal.SIGKILL, 1, tmp_path / "work", 7)
    assert row.good, row.details


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_campaign_sees_other_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kills, "differs", lambda *_: "another result")
    row = killed(FOLDER, signal.SIGKILL, 1, tmp_path / "work", 7)
    assert not row.good
    assert row.wrong == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", [FLOWS[1], FOLDER], ids=["flow", "folder"])
def test_full_disks(victim: Victim, tmp_path: Path) -> None:
    if not mountable(tmp_path):
        pytest.skip("mounting a small file system takes a superuser")
    row = full_disk(victim, [24576, 40960], tmp_path / "work")
    assert row.good, row.details


@pytest.mark.slow
def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    if not mountable(tmp_path):
        pytest.skip("mounting a folder read-only takes a superuser")
    row = read_only(FOLDER, tmp_path / "work")
    assert row.good, row.details


@pytest.mark.slow
@pytest.mark.parametrize("victim", [FLOWS[0], FOLDER], ids=["flow", "folder"])
def test_a_second_process_is_refused(victim: Victim, tmp_path: Path) -> None:
    row = second_writer(victim, 1, tmp_path / "work")
    assert row.good, row.details


@pytest.mark.slow
def test_clocks_that_go_back(tmp_path: Path) -> None:
    row = clock_back(FLOWS[1], tmp_path / "work")
    assert row.good, row.details


@pytest.mark.slow
def test_dead_workers_of_a_pool(tmp_path: Path) -> None:
    row = dead_workers(False, 1, tmp_path / "work", 7)
    assert row.good, row.details


def test_no_cell_of_a_table_ends_it() -> None:
    """|mu| would be two cells more, and a message of two lines two rows."""
    assert markdown(["rate", "n"], [["|mu_2|\nof P", 3]]) == "| rate | n |\n|---|---|\n| \\|mu_2\\| of P | 3 |"


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {"a fault": Row("a fault", 3, {"well": 2, "badly": 1}, 0, 1, 0.1),
            "another": Row("another", 1, {"well": 1}, 0, 0, 0.1)}  # fmt: skip
    ran: list[str] = []

    def written() -> list[Entry[Row]]:
        table = campaign_table(tmp_path)
        table.load()
        return table.entries

    def trials(kills: int, seed: int, folder: Path) -> list[Case]:
        assert folder.is_dir()

        def run(name: str) -> Row:
            ran.append(name)
            if name not in rows:
                raise KeyboardInterrupt
            return rows[name]

        return [Case(f"{name}, {kills} times, seed {seed}", run, (name,)) for name in ("a fault", "another")]

    monkeypatch.setattr("validation.robustness.faults.campaign.trials", trials)
    call = ["--only", "faults", "--seed", "2", "--out", str(tmp_path), "--kills"]
    assert main([*call, "5"]) == 1
    page = (tmp_path / "robustness.md").read_text()
    assert "| a fault | 3 | 2 well; 1 badly | 0 | 1 | 0 |" in page
    assert "1 of 2 rows without loss or wrong result." in page
    assert [(entry.key, entry.row) for entry in written()] == [
        (f"{name}, 5 times, seed 2", row) for name, row in rows.items()
    ]
    assert "BAD  a fault" in capsys.readouterr().out
    # What was tried as often and was good is kept; other settings are others.
    ran.clear()
    rows["a fault"] = Row("a fault", 3, {"well": 3}, 0, 0, 0.1)
    assert main([*call, "5", "--resume"]) == 0
    assert ran == ["a fault"]
    assert len(written()) == 2
    ran.clear()
    assert main([*call, "6"]) == 0
    assert ran == ["a fault", "another"]
    # What was known when it was interrupted is there.
    cut = rows.pop("another")
    with pytest.raises(KeyboardInterrupt):
        main([*call, "7"])
    rows["another"] = cut
    ran.clear()
    assert main([*call, "7", "--resume"]) == 0
    assert ran == ["another"]
    assert "2 of 2 rows" in (tmp_path / "robustness.md").read_text()


def test_trials_side_by_side() -> None:
    trials = [Case(str(number), Row, (str(number), 1, {}, 0, 0, 0.0)) for number in range(5)]
    assert {done.case.name: done.finding.fault for done in run_cases(trials, jobs=3, threads=True)} == {
        str(number): str(number) for number in range(5)
    }


@pytest.mark.slow
@pytest.mark.parametrize("victim", [Training(), FewClaims()], ids=lambda victim: victim.name)
def test_trainings_and_claims_go_on(victim: Victim, tmp_path: Path) -> None:
    row = killed(victim, signal.SIGTERM, 1, tmp_path / "work", 7)
    assert row.good, row.details
