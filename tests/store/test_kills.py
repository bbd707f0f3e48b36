"""Whatever is written is whole after a kill at any call that writes, and the next run leaves nothing behind."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlflow.backends.machine import environment
from nlflow.store import atomic
from nlflow.store.atomic import locked, write_content, write_folder
from nlflow.store.checkpoints import Checkpoints
from validation.robustness.faults.calls import SAME, Output, possible, strike
from validation.robustness.faults.outputs import contents, old_or_new

if not possible():
    pytest.skip("calls of other systems are not counted", allow_module_level=True)


def file(folder: Path) -> None:
    with locked(folder / "out", "OUT"):
        write_content(folder / "out", b"new")


def store(folder: Path, exchange: bool) -> None:
    if not exchange:
        atomic._exchanged = lambda *_: False  # of a child that ends soon
    write_folder(folder / "out", lambda place: [(place / name).write_text(name) for name in "abc"])


def old_store(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "old").write_text("old")


def restored(folder: Path, before: Any, after: Any) -> str | None:
    if not (folder / "out").exists():
        atomic.sweep(folder)
    return old_or_new("out", folder, before, after)


def asked(folder: Path) -> None:
    """Ask for the versions, which a process does once, by calls of their own."""
    environment()


def checkpoints(folder: Path) -> None:
    states = Checkpoints(folder / "state", "mine")
    first = states.load(lambda arrays, meta: None)[1]["number"] + 1 if states else 0
    for number in range(first, 3):
        states.save({"u": np.full(3, number)}, {"number": number})


def checkpoint(folder: Path) -> Any:
    states = Checkpoints(folder / "state", "mine")
    return states.load(lambda arrays, meta: None)[1]["number"] if states else None


def whole(folder: Path, before: Any, after: Any) -> None:
    checkpoint(folder)  # raises where none is


NEW_OR_OLD = partial(old_or_new, "out")
OUTPUTS = {
    "file": (file, lambda folder: (folder / "out").write_text("old"), NEW_OR_OLD),
    "folder": (partial(store, exchange=True), old_store, NEW_OR_OLD),
    "folder without exchange": (partial(store, exchange=False), old_store, restored),
    "checkpoints": (checkpoints, asked, whole),
}


ALL = [pytest.param(name, 1000, marks=pytest.mark.slow) for name in OUTPUTS]


@pytest.mark.parametrize(("name", "most"), [("file", 4), ("folder without exchange", 9), *ALL])
def test_it_is_killed_and_goes_on(name: str, most: int, tmp_path: Path) -> None:
    go, prepare, check = OUTPUTS[name]
    look: Any = checkpoint if name == "checkpoints" else lambda folder: contents(folder / "out")
    outcomes, lost, wrong, count = strike(Output(name, go, go, look, prepare, check), tmp_path, most)
    assert (lost, wrong) == ([], [])
    assert outcomes == {SAME: min(most, count)}
    assert count >= 7
