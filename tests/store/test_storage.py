"""Archives and results: files are whole or refused, writes are atomic, nothing is unpickled."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import pickle
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from benchmarks.resident import traced
from nlflow.backends.machine import environment
from nlflow.errors import FileFormatError, InputError, MemoryLimitError, NlflowWarning
from nlflow.flows.flow import Flow
from nlflow.store import atomic
from nlflow.store.atomic import locked, sweep, workshop, write_atomic, write_folder
from nlflow.store.checkpoints import Checkpoints, previous
from nlflow.store.storage import (
    FORMAT,
    load_archive,
    load_record,
    save_archive,
    save_record,
)
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
    previous(path).unlink(missing_ok=True)  # of the same state, written where the run ended
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


def altered(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Write an archive anew with other content and its old checksum: every member is whole, what they say is not."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    meta = json.loads(arrays.pop("__meta__").tobytes())
    change(arrays, meta)
    with path.open("wb") as file:
        np.savez(file, **{"__meta__": np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays})


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays, meta: arrays.update(u=arrays["u"] + 1e-16),
        lambda arrays, meta: arrays.update(u=arrays["u"].reshape(2, 20)),
        lambda arrays, meta: arrays.update(u=arrays["u"].view("u8")),
        lambda arrays, meta: arrays.update(more=arrays["u"]),
        lambda arrays, meta: arrays.pop("probe"),
        lambda arrays, meta: meta.update(t=meta["t"] / 2),
        lambda arrays, meta: meta.pop("sha256"),
    ],
    ids=["last bit", "shape", "type", "one more", "one less", "time", "no checksum"],
)
def test_altered_content_is_refused(change: Any, checkpoint: Path) -> None:
    altered(checkpoint, lambda arrays, meta: None)
    resume(checkpoint)  # writing it anew is not what is refused
    altered(checkpoint, change)
    with pytest.raises(FileFormatError, match="its content does not have its checksum"):
        resume(checkpoint)


def test_descriptions_name_versions_and_parameters(checkpoint: Path) -> None:
    _, meta = load_archive(checkpoint, "checkpoint")
    assert meta["format"] == FORMAT
    assert meta["versions"]["numpy"] == np.__version__
    assert meta["versions"]["nlflow"]
    assert "Gaussian" in meta["provenance"]["flow"]
    assert meta["provenance"]["integrator"] == "Exponential()"


def test_other_kinds_and_formats_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "solution"
    nl.solve(flow(), t=1.0).save(other)
    with pytest.raises(
        FileFormatError, match=r"got another archive of nlflow \(solution\), expected one of kind 'checkpoint'"
    ):
        resume(other)
    with pytest.raises(
        FileFormatError, match=r"got another archive of nlflow \(checkpoint\), expected one of kind 'solution'"
    ):
        nl.Solution.load(checkpoint)
    arrays, meta = load_archive(checkpoint, "checkpoint")
    save_archive(checkpoint, arrays, {**meta, "format": 1})
    with pytest.raises(FileFormatError, match=r"got format 1, this version reads 2; use the version that wrote it"):
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
    meta = np.frombuffer(json.dumps({"kind": "checkpoint", "format": FORMAT}).encode(), dtype=np.uint8)
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
    assert sorted(entry.name for entry in checkpoint.parent.iterdir()) == ["checkpoint"]
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
    assert (meta["kind"], meta["format"], meta["number"]) == ("mine", FORMAT, 0.1)
    assert np.isnan(meta["nan"])
    with pytest.raises(InputError, match=r"^a: got an array of object, expected numbers, booleans or text"):
        save_archive(tmp_path / "objects", {"a": np.array([None])}, {"kind": "mine"})  # would be a pickle
    assert not (tmp_path / "objects").exists()


# --- what is not what it says ----------------------------------------------------------------------------------------


def crafted(path: Path, header: bytes, content: bytes = b"", *, compression: int = zipfile.ZIP_STORED) -> None:
    meta = io.BytesIO()
    np.save(meta, np.frombuffer(json.dumps({"kind": "mine", "format": FORMAT}).encode(), np.uint8))
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("u.npy", member)
        archive.writestr("__meta__.npy", meta.getvalue())


@pytest.mark.parametrize(
    ("header", "content"),
    [
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }", b""),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", b""),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -8), }", b"\0" * 64),
        ("{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }", b"\0" * 24),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"\0" * 8),
        ("{'descr': '|V8', 'fortran_order': False, 'shape': (1,), }", b"\0" * 8),
        ("{'descr': '<U0', 'fortran_order': False, 'shape': (1000000000000,), }", b""),
        ("{'descr': __import__('os').getcwd(), 'fortran_order': False, 'shape': (1,), }", b""),
        ("", b""),
    ],
    ids=["absurd", "overflowing", "negative", "too long", "objects", "raw", "empty text", "code", "no header"],
)
def test_shapes_are_held_against_lengths_before_there_are_arrays(header: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "archive"
    crafted(path, header.encode(), content)
    with traced() as taken, pytest.raises(FileFormatError, match="not a whole nlflow archive"):
        load_archive(path, "mine")
    assert taken.bytes < 2**22


def test_bombs_and_absurd_sizes_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "archive"
    crafted(path, b"", bytes(2**26), compression=zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2**18
    with pytest.raises(FileFormatError, match="it is compressed"):
        load_archive(path, "mine")
    save_archive(path, {"u": np.zeros(2**17)}, {"kind": "mine"})
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "1000000")
    with pytest.raises(MemoryLimitError, match=r"the archive needs .* move it to a larger machine"):
        load_archive(path, "mine")


def test_members_that_lie_on_top_of_each_other_are_refused(tmp_path: Path) -> None:
    """The same bytes under many names: an archive of a megabyte would be read as a thousand of them."""
    path = tmp_path / "archive"
    member = io.BytesIO()
    np.save(member, np.zeros(1000))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.npy", member.getvalue())
        first = archive.infolist()[0]
        for number in range(50):
            other = copy.copy(first)
            other.filename = f"b{number}.npy"
            archive.filelist.append(other)
            archive.NameToInfo[other.filename] = other
        archive._didModify = True  # type: ignore[attr-defined]  # so that the table at the end is written with all names
    with pytest.raises(FileFormatError, match="lie on top of each other"):
        load_archive(path, "mine")


def test_deep_descriptions_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    deep = b"[" * 100_000 + b"]" * 100_000
    with path.open("wb") as file:
        np.savez(file, __meta__=np.frombuffer(deep, np.uint8))
    with pytest.raises(FileFormatError, match="nested too deeply"):
        load_archive(path, "mine")
    path.write_bytes(deep)
    with pytest.raises(FileFormatError, match="nested too deeply"):
        load_record(path, "mine")


# --- records ---------------------------------------------------------------------------------------------------------

CONTENT = {"a": [0.1, math.nan, -math.inf], "b": {"float": "nan", "c": None}, "text": "ü", "float": [1]}


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "record"
    save_record(path, "mine", CONTENT)
    found = load_record(path, "mine")
    assert repr(found) == repr(CONTENT)
    assert json.loads(path.read_text())["versions"]["numpy"] == np.__version__


def test_records_that_are_not_as_they_were_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "record"
    with pytest.raises(FileFormatError, match="no such file"):
        load_record(path, "mine")
    save_record(path, "mine", CONTENT)
    text = path.read_text()
    for wrong, message in (
        (text[:-20], "damaged file"),
        (text.replace("0.1", "0.2"), "does not have its checksum"),
        ("", "damaged file"),
        ("[]", "no record"),
        ("\x00", "damaged file"),
        (text.replace(f'"format": {FORMAT}', '"format": 99'), "got format 99"),
    ):
        path.write_text(wrong)
        with pytest.raises(FileFormatError, match=message):
            load_record(path, "mine")
    save_record(path, "mine", None)
    assert load_record(path, "mine") is None
    path.write_text(path.read_text().replace('"content"', '"contents"'))  # whose checksum is that of None
    with pytest.raises(FileFormatError, match="does not have its checksum"):
        load_record(path, "mine")
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"another record of nlflow \(mine\)"):
        load_record(path, "yours")


# --- checkpoints and the one before ----------------------------------------------------------------------------------


def fits(arrays: dict[str, Any], meta: dict[str, Any]) -> str | None:
    return None if meta["problem"] == "this" else "it is of another problem"


def state(number: int, problem: str = "this") -> tuple[dict[str, Any], dict[str, Any]]:
    return {"u": np.full(3, float(number))}, {"number": number, "problem": problem}


def test_the_one_before_is_kept_and_used(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    states = Checkpoints(path, "mine")
    assert not states
    for number in range(4):
        states.save(*state(number))
    assert states
    assert load_archive(previous(path), "mine")[1]["number"] == 2
    for damage in (path.read_bytes()[:50], b"", b"holiday"):
        path.write_bytes(damage)
        with pytest.warns(
            NlflowWarning, match=r"not a whole nlflow archive.*checkpoint.previous, the one before, is used"
        ):
            arrays, meta = Checkpoints(path, "mine").load(fits)
        assert (meta["number"], arrays["u"][0]) == (2, 2.0)
    path.unlink()
    with pytest.warns(NlflowWarning, match="no such file"):
        assert Checkpoints(path, "mine").load(fits)[1]["number"] == 2
    previous(path).write_bytes(b"")
    with pytest.raises(FileFormatError, match=r"no such file.*; .*previous: not a whole nlflow archive"):
        Checkpoints(path, "mine").load(fits)


def test_a_damaged_one_does_not_push_out_the_good_one_before_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    states = Checkpoints(path, "mine")
    for number in range(2):
        states.save(*state(number))
    path.write_bytes(path.read_bytes()[:-1])
    states.save(*state(2))
    assert load_archive(path, "mine")[1]["number"] == 2
    assert load_archive(previous(path), "mine")[1]["number"] == 0


def test_what_this_process_wrote_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a checkpoint would cost as much again as it does."""
    states = Checkpoints(tmp_path / "checkpoint", "mine")
    states.save(*state(0))
    monkeypatch.setattr("nlflow.store.checkpoints.load_archive", lambda *_: pytest.fail("read"))
    states.save(*state(1))
    states.check_replaceable("path", fits)


def test_the_folder_is_flushed_after_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[bool] = []
    original = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (flushed.append(stat.S_ISDIR(os.fstat(fd).st_mode)), original(fd)))
    save_archive(tmp_path / "archive", {"u": U}, {"kind": "mine"})
    assert flushed == [False, True]


@pytest.mark.parametrize("where", ["link", "replace", "savez", "fsync"])
def test_a_good_one_is_there_after_a_failure_at_any_place(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    states = Checkpoints(path, "mine")
    for number in range(3):
        states.save(*state(number))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    target = {"link": (os, "link"), "replace": (Path, "replace"), "savez": (np, "savez"), "fsync": (os, "fsync")}[where]
    monkeypatch.setattr(*target, fail)
    if where == "link":  # a file system without second names: a copy is made
        states.save(*state(3))
        monkeypatch.undo()
        assert load_archive(previous(path), "mine")[1]["number"] == 2
        return
    for _ in range(2):  # the second time it is the same file that has both names already
        with pytest.raises(FileFormatError, match="No space left on device"):
            states.save(*state(3))
    monkeypatch.undo()
    assert Checkpoints(path, "mine").load(fits)[1]["number"] == 2
    assert load_archive(previous(path), "mine")[1]["number"] in (1, 2)
    assert not list(tmp_path.glob(".nlflow*"))


def test_another_problem_and_another_version_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    states = Checkpoints(path, "mine")
    states.save(*state(0))
    states.save(*state(1, "that"))
    with pytest.warns(NlflowWarning, match="it is of another problem.*the one before, is used"):
        assert Checkpoints(path, "mine").load(fits)[1]["number"] == 0
    arrays, meta = state(2)
    save_archive(path, arrays, {**meta, "kind": "mine", "versions": {"nlflow": "9.9"}})
    with pytest.warns(NlflowWarning, match=r"nlflow 9.9 wrote the checkpoint, and this is"):
        Checkpoints(path, "mine").load(fits)
    previous(path).unlink()
    with pytest.raises(FileFormatError, match=r"nlflow 9.9 wrote the checkpoint.*; use that version, or start afresh"):
        Checkpoints(path, "mine").load(fits)
    versions = {**environment()["versions"], "numpy": "1.0"}
    save_archive(path, arrays, {**meta, "kind": "mine", "versions": versions})
    with pytest.warns(NlflowWarning, match=r"was written with numpy 1.0, which is not what runs now"):
        assert Checkpoints(path, "mine").load(fits)[1]["number"] == 2


def test_nothing_else_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    states = Checkpoints(path, "mine")
    states.check_replaceable("path", fits)
    path.write_text("holiday")
    with pytest.raises(
        InputError, match=r"path: got .*checkpoint, which would be lost .*choose another name, or remove"
    ):
        states.check_replaceable("path", fits)
    path.unlink()
    states.save(*state(0))
    Checkpoints(path, "mine").check_replaceable("path", fits)
    states.save(*state(1, "that"))
    with pytest.raises(InputError, match="it is of another problem"):
        Checkpoints(path, "mine").check_replaceable("path", fits)
    save_archive(path, {}, {"kind": "yours"})
    with pytest.raises(InputError, match="another archive"):
        Checkpoints(path, "mine").check_replaceable("path", fits)
    path.write_text("cut short")  # and the one before it is of this problem
    Checkpoints(path, "mine").check_replaceable("path", fits)
    path.unlink()
    states.save(*state(0, "that"))
    path.rename(previous(path))
    arrays, meta = load_archive(previous(path), "mine")
    for _ in ("alone", "beside one of this problem"):
        with pytest.raises(InputError, match=r"checkpoint.previous, which would be lost .*it is of another problem"):
            Checkpoints(path, "mine").check_replaceable("path", fits)
        save_archive(path, arrays, {**meta, "problem": "this"})
    previous(path).write_text("cut short")
    Checkpoints(path, "mine").check_replaceable("path", fits)
    path.unlink()
    with pytest.raises(InputError, match=r"checkpoint.previous, which would be lost .*not a whole"):
        Checkpoints(path, "mine").check_replaceable("path", fits)


# --- one writer ------------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from nlflow.store.atomic import locked
with locked(sys.argv[1], "OUT"):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("what", ["file", "folder"])
def test_two_processes_do_not_write_to_one_place(what: str, tmp_path: Path) -> None:
    place = tmp_path / "place"
    if what == "folder":
        place.mkdir()
    command = [sys.executable, "-c", HOLDER, str(place)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(InputError, match=r"OUT: got .*place, in which another process is writing"),
            locked(place, "OUT"),
        ):
            pytest.fail("both have it")
        holder.kill()
        holder.wait()
        with locked(place, "OUT"):  # the lock of a killed process is gone
            pass
        assert left(tmp_path) == (["place"] if what == "folder" else [])
    finally:
        holder.kill()
        holder.communicate()


def left(folder: Path) -> list[str]:
    """Return what is in a folder, hidden or not, links to nothing too."""
    return sorted(entry.name for entry in os.scandir(folder))


def test_what_killed_processes_left_is_swept_and_what_lives_is_not(tmp_path: Path) -> None:
    (tmp_path / ".nlflow-1234-0.tmp").write_bytes(b"half")
    (tmp_path / ".nlflow-1234-.lock").write_bytes(b"")
    (tmp_path / ".nlflow-1234-1.tmp" / "new" / "c").mkdir(parents=True)
    (tmp_path / ".nlflow-of-another").write_bytes(b"")

    def writer(stream: Any) -> None:
        with locked(tmp_path / "other", "OUT"), workshop(tmp_path / "store") as place:
            (place / "new").mkdir()
            before = left(tmp_path)
            sweep(tmp_path)
            assert left(tmp_path) == before
            assert len(before) == 4  # that of another program, a file, a lock, a folder
            assert left(place) == ["lock", "new"]
        stream.write(b"whole")

    write_atomic(tmp_path / "film", writer)
    assert (tmp_path / "film").read_bytes() == b"whole"
    assert left(tmp_path) == [".nlflow-of-another", "film"]


@pytest.mark.parametrize("folder", [False, True])
def test_what_was_made_meanwhile_stays_unless_it_may_be_replaced(folder: bool, tmp_path: Path) -> None:
    target = tmp_path / "out"

    def other() -> None:
        target.mkdir() if folder else target.write_text("theirs")
        if folder:
            (target / "theirs").write_text("theirs")

    def writer(place: Any) -> None:
        other()
        (place / "mine").write_text("mine") if folder else place.write(b"mine")

    write: Any = write_folder if folder else write_atomic
    with pytest.raises(FileFormatError, match="made while this one was computed, expected none; choose another name"):
        write(target, writer, replace=False)
    assert left(tmp_path) == ["out"]
    assert left(target) == ["theirs"] if folder else target.read_text() == "theirs"
    shutil.rmtree(target) if folder else target.unlink()
    write(target, writer)
    assert left(target) == ["mine"] if folder else target.read_text() == "mine"
    assert left(tmp_path) == ["out"]


def test_a_folder_set_aside_by_a_killed_process_gets_its_name_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file system cannot exchange two names, there is a moment without the name."""
    monkeypatch.setattr(atomic, "_exchanged", lambda *_: False)
    target = tmp_path / ".store"
    write_folder(target, lambda place: (place / "old").write_text(""))
    write_folder(target, lambda place: (place / "new").write_text(""))
    assert (left(target), left(tmp_path)) == (["new"], [".store"])
    aside = tmp_path / ".nlflow-1234-0.tmp" / "old"
    for there in (False, True):
        aside.mkdir(parents=True)
        write_folder(aside / target.name, lambda place, there=there: (place / f"{there}").write_text(""))
        if not there:
            target.rename(tmp_path / "elsewhere")
        sweep(tmp_path)
        assert left(target) == ["False"]  # what has its name is not replaced by what was set aside
        assert left(tmp_path) == [".store", "elsewhere"]


# --- solutions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_solutions_come_back_as_they_were(dtype: str, tmp_path: Path) -> None:
    p = problem("degree", 0.3, channels=2, dtype=dtype)
    solution = nl.solve(
        p.flow, p.start.astype(dtype), t_eval=[0.0, 0.7, 2.0], integrator=nl.RungeKutta(1e-3),
        trackers=[nl.Energy(2), nl.SteadyState(), nl.DistanceToConstant()],
    )  # fmt: skip
    solution.save(tmp_path / "solution")
    loaded = nl.Solution.load(tmp_path / "solution")
    assert (loaded.status, loaded.success, loaded.message) == (solution.status, solution.success, solution.message)
    for name in ("t", "u", "energy"):
        assert np.array_equal(getattr(loaded, name), getattr(solution, name))
    assert loaded.u.dtype == dtype
    assert isinstance(loaded.status, nl.Status)
    assert (loaded.stats, loaded.provenance) == (solution.stats, solution.provenance)
    assert set(loaded.records) == set(solution.records) == {"energy", "steady_state", "distance"}
    for name, record in solution.records.items():
        assert set(loaded.records[name]) == set(record)
        for key, values in record.items():
            assert np.array_equal(loaded.records[name][key], values)
    assert repr(loaded) == repr(solution)


@pytest.mark.parametrize(
    ("arrays", "about", "got"),
    [
        ({"u": None}, {}, "no array of floats u"),
        ({"energy": np.zeros(5)}, {}, r"energy of shape \(5,\) beside t of shape \(2,\)"),
        ({"t": np.zeros((2, 2))}, {}, r"t of shape \(2, 2\) beside .*"),
        ({}, {"status": "bogus"}, "'bogus' as status"),
        ({}, {"stats": 3}, "3 as stats"),
    ],
)
def test_archives_that_are_no_solution_are_named(
    arrays: dict[str, Any], about: dict[str, Any], got: str, tmp_path: Path
) -> None:
    whole = {"t": np.zeros(2), "u": np.zeros((2, 3)), "energy": np.zeros(2), **arrays}
    meta = {"success": True, "status": "finished", "message": "", "stats": {}, "provenance": {}, **about}
    kept = {name: array for name, array in whole.items() if array is not None}
    save_archive(tmp_path / "run.npz", kept, {"kind": "solution", **meta})
    with pytest.raises(FileFormatError, match=rf"run\.npz: got {got}, which is no solution; check the path"):
        nl.Solution.load(tmp_path / "run.npz")


@pytest.mark.parametrize("path", [7, None, "", "a\0b", "n" * 256, "\ud800"])
def test_what_is_no_path_is_named(path: Any) -> None:
    for call in (nl.Solution.load, nl.solve(flow(), t=1.0).save, lambda one: save_record(one, "mine", 1)):
        with pytest.raises(InputError, match=r"^path: got .*, expected the path of a file"):
            call(path)


def test_solutions_without_energies_and_of_tensors(tmp_path: Path) -> None:
    torch = torch_on_one_thread()
    x = torch.as_tensor(U)
    attention = nl.AttentionFlow(nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(20.0)), x, queries=2 * x))
    solution = nl.solve(attention, x, t=1.0)
    solution.save(tmp_path / "solution")
    loaded = nl.Solution.load(tmp_path / "solution")
    assert isinstance(loaded.u, np.ndarray)
    assert np.array_equal(loaded.u, solution.u.numpy())
    assert np.isnan(loaded.energy).all()
