"""The benchmark of volumes and clips: what is not measured again is kept, and its data are what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import volumes
from benchmarks.harness import KIND
from nlflow.store.storage import load_record


def test_sections_that_are_not_measured_keep_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = 1.0

    def section(data: Path, side: int) -> Iterator[Any]:
        yield volumes.row(f"side {side}", "peer", "ours", value, least=0.5, unit=" dB")

    monkeypatch.setattr(volumes, "SECTIONS", {"brain": section, "clips": section})

    def run(*more: str) -> dict[str, list[float]]:
        words = ["volumes", "--data", str(tmp_path), "--out", str(tmp_path), "--side", "8", *more]
        monkeypatch.setattr("sys.argv", words)
        volumes.main()
        found = load_record(tmp_path / "volumes.json", KIND)["sections"]
        return {name: [one["ratio"] for one in rows] for name, rows in found.items()}

    assert run() == {"brain": [1.0], "clips": [1.0]}
    value = 2.0
    assert run("--only", "clips") == {"brain": [1.0], "clips": [2.0]}
    page = (tmp_path / "volumes.md").read_text(encoding="utf-8")
    assert page.count("| side 8 | peer | ours |") == 2


def test_data_are_what_they_say(tmp_path: Path) -> None:
    cells = volumes.cells((6, 32, 32))
    assert cells.shape == (6, 32, 32)
    assert 0.05 < cells.min() < cells.max() <= 1
    clip = np.arange(2 * 10 * 12).reshape(2, 10, 12)
    np.testing.assert_array_equal(volumes._middle(clip, (4, 6)), clip[:, 3:7, 3:9])
    assert volumes._middle(clip).shape == clip.shape
    assert volumes.decibels(np.full(5, 0.1), np.zeros(5)) == pytest.approx(20)
    nibabel = pytest.importorskip("nibabel")
    (tmp_path / "volumes").mkdir()
    image = nibabel.Nifti1Image(np.arange(10.0**3).reshape(10, 10, 10), np.eye(4))
    nibabel.save(image, tmp_path / "volumes" / "mni152_t1.nii.gz")
    part = volumes.brain(tmp_path, 4)
    assert part.shape == (4, 4, 4)
    assert part[0, 0, 0] == 333 / 999
