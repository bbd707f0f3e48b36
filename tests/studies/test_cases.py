"""The runner of studies, claims and campaigns: what is known, what is done, and what is kept of it."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nlflow import FileFormatError, NlflowWarning
from nlflow.store.records import Records
from nlflow.studies.cases import Case, run_cases


def square(number: int) -> int:
    return number**2


def records(folder: Path) -> Records[int]:
    def unpack(name: str, content: Any) -> int | None:
        if not isinstance(content, int):
            raise ValueError(f"{content!r}")
        return None if content < 0 else content

    return Records(folder, "square", lambda name, finding: finding, unpack)


def cases(count: int) -> list[Case]:
    return [Case(str(number), square, (number,)) for number in range(count)]


@pytest.mark.parametrize("threads", [False, True])
def test_what_is_known_comes_first_and_is_not_computed(tmp_path: Path, threads: bool) -> None:
    kept = records(tmp_path / "new")
    kept.write("1", 100)  # which shows that it is read
    kept.write("2", -1)  # which is to be computed again
    done = list(run_cases(cases(4), kept, threads=threads))
    assert [(one.case.name, one.finding, one.read) for one in done] == [
        ("1", 100, True), ("0", 0, False), ("2", 4, False), ("3", 9, False),
    ]  # fmt: skip
    assert all(one.read for one in run_cases(cases(4), kept))
    assert not any(one.read for one in run_cases(cases(4), kept, resume=False))
    assert kept.read("1") == 1


def test_each_finding_is_kept_before_it_is_told(tmp_path: Path) -> None:
    kept = records(tmp_path)
    with closing(run_cases(cases(3), kept)) as results:
        first = next(results)
    assert kept.read(first.case.name) == first.finding
    assert [kept.read(str(number)) for number in (1, 2)] == [None, None]

    def stopped() -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_cases([*cases(2), Case("stopped", stopped), Case("3", square, (3,))], kept))
    assert [kept.read(str(number)) for number in (0, 1, 3)] == [0, 1, None]


@pytest.mark.parametrize(
    ("text", "told"), [("{", "got a damaged file"), ('{"kind": "other"}', "got another record")], ids=str
)
def test_damaged_records_are_computed_again(tmp_path: Path, text: str, told: str) -> None:
    kept = records(tmp_path)
    kept.path("2").write_text(text)
    with pytest.warns(NlflowWarning, match=f"2.json: {told}.*; it is computed again"):
        found = list(run_cases(cases(3), kept))
    assert [one.finding for one in found] == [0, 1, 4]
    kept.write("2", "no number")  # type: ignore[arg-type]
    with pytest.warns(NlflowWarning, match="2.json: got 'no number', which is no square; it is computed again"):
        assert kept.read("2") is None


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileFormatError, match="expected a folder that can be made"):
        list(run_cases(cases(1), records(tmp_path / "file")))


def test_an_error_in_a_thread_ends_the_run_and_starts_no_more() -> None:
    started: list[int] = []
    gate = threading.Event()

    def call(number: int) -> int:
        started.append(number)
        if number == 0:
            raise RuntimeError("nothing goes")
        gate.wait(10)
        return number

    begun = time.monotonic()
    try:
        with pytest.raises(RuntimeError, match="nothing goes"):
            list(run_cases([Case(str(number), call, (number,)) for number in range(9)], jobs=2, threads=True))
        assert time.monotonic() - begun < 5  # what still runs is not waited for: its caller may have to end it
    finally:
        gate.set()
    assert len(started) <= 3
