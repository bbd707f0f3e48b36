"""The benchmarks: what they need and do not find, they tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import deblurring, flows, learning_pictures, particles, volumes
from benchmarks.harness import Row
from nlflow.errors import InputError


@pytest.mark.parametrize(
    ("module", "small", "run", "package"),
    [
        (
            particles,
            {"FEW": 64, "DENSE": 16, "_naive": particles._naive.py_func},
            lambda: particles.run(True),
            "pykeops",
        ),
        (flows, {}, flows.against_pygsp, "pygsp"),
    ],
    ids=["particles", "flows"],
)
def test_peers_that_are_not_installed_are_told(
    module: Any, small: dict[str, Any], run: Callable[[], list[Row]], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.harness.find_spec", lambda name: None)
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    rows = run()
    assert [row.peer for row in rows if not row.met and row.ours == "not measured"] == [f"{package}: not installed"]
    assert (len(rows) > 1) == bool(small)


@pytest.mark.parametrize(
    ("read", "lacks"),
    [
        (lambda data: volumes.brain(data, 8), r"volumes/mni152_t1\.nii\.gz"),
        (lambda data: list(volumes.clips(data, 8)), r"video/\*\.mp4"),
        (lambda data: list(deblurring.measured(data, "1")), r"Set12/.*\.png"),
        (learning_pictures.graphs, r"cifar10-test\.zip"),
    ],
)
def test_data_that_are_not_there_are_told(read: Callable[[Path], Any], lacks: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"^--data: got .*, expected a folder with {lacks}"):
        read(tmp_path)
