"""Archives and results: files are whole or refused, writes are atomic, nothing is unpickled."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.errors import FileFormatError
from nlflow.flow import Flow
from nlflow.storage import load_archive, save_archive
from tests.problems import problem, torch_on_one_thread

U = np.random.default_rng(8).standard_normal((20, 2))


def flow() -> Flow:
    affinity = nl.affinity(nl.Gaussian(width=0.8), nl.Points(np.arange(20.0)), U)
    return nl.GradientFlow(nl.E(affinity, U, 0.3, measure="degree"), "degree")


# --- archives --------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    nl.solve(flow(), t=1.0, trackers=[nl.Checkpoint(path)])
    return path


def resume(path: Path) -> nl.Solution:
    return nl.solve(flow(), t=1.0, resume=path)


def test_truncated_files_are_refused(checkpoint: Path) -> None:
    whole = checkpoint.read_bytes()
    resume(checkpoint)
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        checkpoint.write_bytes(whole[:length])
        with pytest.raises(FileFormatError, match=r"checkpoint: not a whole nlflow archive.*use an earlier one"):
            resume(checkpoint)
    middle = whole.index(U.tobytes()[:64]) + 8
    checkpoint.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(FileFormatError, match=r"not a whole nlflow archive"):
        resume(checkpoint)


def test_other_kinds_and_formats_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "solution"
    nl.solve(flow(), t=1.0).save(other)
    with pytest.raises(FileFormatError, match=r"got an archive of kind 'solution', expected 'checkpoint'"):
        resume(other)
    with pytest.raises(FileFormatError, match=r"got an archive of kind 'checkpoint', expected 'solution'"):
        nl.Solution.load(checkpoint)
    arrays, meta = load_archive(checkpoint, "checkpoint")
    save_archive(checkpoint, arrays, {**meta, "format": 2})
    with pytest.raises(FileFormatError, match=r"got format 2, this version reads 1; use the version that wrote it"):
        resume(checkpoint)
    np.savez(tmp_path / "plain.npz", u=U)
    for name in ("plain.npz", "array.npy", "text"):
        target = tmp_path / name
        if name == "array.npy":
            np.save(target, U)
        if name == "text":
            target.write_text("no archive")
        with pytest.raises(FileFormatError, match=r"not a whole nlflow archive"):
            resume(target)
    with pytest.raises(FileFormatError, match="no such file"):
        resume(tmp_path / "missing")


class Trap:
    """An object whose unpickling is seen."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("form", ["object array", "raw pickle", "meta"])
def test_nothing_is_unpickled(form: str, tmp_path: Path) -> None:
    path, touched = tmp_path / "trap", tmp_path / "touched"
    trap = Trap(touched)
    meta = np.frombuffer(json.dumps({"kind": "checkpoint", "format": 1}).encode(), dtype=np.uint8)
    if form == "raw pickle":
        path.write_bytes(pickle.dumps(trap))
    else:
        member = io.BytesIO()
        np.save(member, np.array([trap], dtype=object), allow_pickle=True)
        plain = io.BytesIO()
        np.save(plain, meta)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("u.npy", member.getvalue())
            archive.writestr("__meta__.npy", (member if form == "meta" else plain).getvalue())
    with pytest.raises(FileFormatError, match="not a whole nlflow archive"):
        load_archive(path, "checkpoint")
    assert not touched.exists()
    pickle.loads(pickle.dumps(trap))
    assert touched.exists()  # the trap works


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("own")])
@pytest.mark.parametrize("where", ["savez", "fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    where: str, error: BaseException, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = checkpoint.read_bytes()

    def fail(*given: Any, **arrays: Any) -> None:
        if where == "savez":
            given[0].write(b"half of it")
        raise error

    monkeypatch.setattr(*{"savez": (np, "savez"), "fsync": (os, "fsync"), "replace": (Path, "replace")}[where], fail)
    with pytest.raises((FileFormatError, OSError) if isinstance(error, OSError) else type(error)):
        save_archive(checkpoint, {"u": U}, {"kind": "checkpoint"})
    monkeypatch.undo()
    assert checkpoint.read_bytes() == before
    assert [entry.name for entry in checkpoint.parent.iterdir()] == ["checkpoint"]
    resume(checkpoint)


def test_a_file_that_was_not_there_is_not_there_after_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((FileFormatError, OSError), match="No space left on device"):
        nl.solve(flow(), t=1.0).save(tmp_path / "solution")
    assert list(tmp_path.iterdir()) == []


def test_archives_keep_arrays_as_they_are(tmp_path: Path) -> None:
    arrays = {"a": U, "b/c": U.astype("f4"), "empty": np.empty((0, 3)), "n": np.array(3)}
    save_archive(str(tmp_path / "archive"), arrays, {"kind": "mine", "number": 0.1, "nan": float("nan")})
    loaded, meta = load_archive(tmp_path / "archive", "mine")
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        assert np.array_equal(loaded[name], array)
    assert (meta["kind"], meta["format"], meta["number"]) == ("mine", 1, 0.1)
    assert np.isnan(meta["nan"])


# --- solutions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_solutions_come_back_as_they_were(dtype: str, tmp_path: Path) -> None:
    p = problem("degree", 0.3, channels=2, dtype=dtype)
    solution = nl.solve(
        p.flow, p.start.astype(dtype), t_eval=[0.0, 0.7, 2.0], integrator=nl.RungeKutta(1e-3),
        trackers=[nl.Energy(2), nl.Stationary(), nl.DistanceToConstant()],
    )  # fmt: skip
    solution.save(tmp_path / "solution")
    loaded = nl.Solution.load(tmp_path / "solution")
    assert (loaded.status, loaded.success, loaded.message) == (solution.status, solution.success, solution.message)
    for name in ("t", "u", "energy"):
        assert np.array_equal(getattr(loaded, name), getattr(solution, name))
    assert loaded.u.dtype == dtype
    assert isinstance(loaded.status, nl.Status)
    assert (loaded.stats, loaded.provenance) == (solution.stats, solution.provenance)
    assert set(loaded.records) == set(solution.records) == {"energy", "stationary", "distance"}
    for name, record in solution.records.items():
        assert set(loaded.records[name]) == set(record)
        for key, values in record.items():
            assert np.array_equal(loaded.records[name][key], values)
    assert repr(loaded) == repr(solution)


def test_solutions_without_energies_and_of_tensors(tmp_path: Path) -> None:
    torch = torch_on_one_thread()
    x = torch.as_tensor(U)
    attention = nl.AttentionFlow(nl.affinity(nl.DotProduct(), nl.Points(np.arange(20.0)), x, queries=2 * x))
    solution = nl.solve(attention, x, t=1.0)
    solution.save(tmp_path / "solution")
    loaded = nl.Solution.load(tmp_path / "solution")
    assert isinstance(loaded.u, np.ndarray)
    assert np.array_equal(loaded.u, solution.u.numpy())
    assert np.isnan(loaded.energy).all()
