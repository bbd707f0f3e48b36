"""Short fuzzing of every reader, and the fuzzer itself: what it lets pass, what it finds, what it keeps."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nlflow import FileFormatError, InputError
from nlflow.desk import files
from nlflow.desk.terminal import read_tokens
from nlflow.errors import NlflowError
from nlflow.store.npy import read_array
from nlflow.store.storage import load_archive
from nlflow.studies.options import kernel_label, parse_kernel
from tests import hostile
from validation.robustness.fuzz import campaign, engine, mutate, seeds
from validation.robustness.fuzz.targets import TARGETS
from validation.robustness.fuzz.watch import ENDED, READ, REFUSED, BrokenPropertyError, Guard, judge, place_of

ROOT = Path(__file__).resolve().parents[2]
#: How many mutated inputs each reader gets here; `make robustness` gives it half an hour.
ROUNDS = {"command": 15, "model": 40, "study": 20, "state": 40, "archive": 60, "pictures": 60}


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Guard:
    # One for all: a hook of the interpreter stays until its end.
    return Guard(tmp_path_factory.mktemp("fuzz"))


# --- every reader ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.sampled(4)
def test_mutated_inputs_are_read_or_refused_by_name(name: str, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("model", "state", "command"):
        pytest.importorskip("transformers", minversion="5")
        # No name of a model is looked up: the variable HF_HUB_OFFLINE is read once, perhaps long ago.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if name in (libraries := {"raw": "rawpy", "hdf5": "h5py", "parquet": "pyarrow"}):
        pytest.importorskip(libraries[name])
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", str(2**27))
    target = TARGETS[name]
    with tempfile.TemporaryDirectory(dir=guard.folder) as work:
        reader = target.make(Path(work))
        contents = target.seeds()
        outcomes = [judge(reader, content) for content in contents]
        assert READ in outcomes
        rng = random.Random(11)
        words = [word.encode() for word in target.words]
        for _ in range(ROUNDS.get(name, 100)):
            data = engine.mutated(target, rng.choice(contents), words, rng)
            outcomes.append(judge(reader, data, guard))
    assert {READ, REFUSED} <= set(outcomes) <= {READ, REFUSED, ENDED}


@pytest.mark.parametrize("name", ["png", "tiff", "npy", "wav", "csv"])
def test_files_cut_anywhere_are_refused_or_read(name: str, guard: Guard) -> None:
    with tempfile.TemporaryDirectory(dir=guard.folder) as work:
        reader = TARGETS[name].make(Path(work))
        for content in TARGETS[name].seeds()[:4]:
            for length in range(0, len(content), max(1, len(content) // 40)):
                judge(reader, content[:length], guard)


# --- with Hypothesis -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.text(max_size=60) | st.from_regex(r"(gaussian|laplace|tophat|dot|Gaussian )(:[a-z]*=[-+0-9.e_naif ]*,?)*"))
@example("gaussian:width=1_0")
@example("gaussian:width=٣")
@example("gaussian:width=1e-400")
@settings(max_examples=60)
def test_kernels_by_name(text: str) -> None:
    try:
        kernel = parse_kernel(text)
    except InputError:
        return
    assert type(parse_kernel(kernel_label(kernel))) is type(kernel)


_SIZES = (
    st.integers(-(2**70), 2**70) | st.integers(0, 5) | st.booleans() | st.floats() | st.none() | st.text(max_size=3)
)
_DTYPES = st.sampled_from(["<f8", ">i4", "|u1", "|O", "<U3", "|S0", "|V0", "<c16", "<M8[s]", "?", "", "|V1000000000"])


@pytest.mark.slow
@given(
    descr=_DTYPES | st.text(max_size=6) | st.lists(st.tuples(st.text(max_size=2), _DTYPES), max_size=3),
    shape=st.lists(_SIZES, max_size=4).map(tuple) | st.lists(_SIZES, max_size=2),
    order=st.booleans() | st.none(),
    content=st.binary(max_size=64),
)
@settings(max_examples=400)
def test_headers_of_arrays(descr: Any, shape: Any, order: Any, content: bytes) -> None:
    header = repr({"descr": descr, "fortran_order": order, "shape": shape}).encode("utf-8", "surrogatepass")
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content
    try:
        array = read_array(io.BytesIO(data), len(data))
    except (ValueError, NlflowError):
        return
    assert array.nbytes <= len(content)
    assert not array.dtype.hasobject
    np.testing.assert_array_equal(array, np.load(io.BytesIO(data), allow_pickle=False))


_CELLS = st.floats(allow_nan=True, allow_infinity=True, width=64)


@pytest.mark.slow
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(_CELLS, min_size=n, max_size=n), min_size=1, max_size=6)))
@settings(max_examples=100)
def test_tables_come_back_to_the_last_bit(rows: list[list[float]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "a.csv", Path(folder) / "b.csv"
        first.write_text("\n".join(",".join(map(repr, row)) for row in rows))
        table = files.read(first, first_column="denoise")  # one that increases counts as time otherwise
        np.testing.assert_array_equal(table.data.reshape(len(rows), -1), rows)
        files.write(second, table.data, table)
        np.testing.assert_array_equal(files.read(second, first_column="denoise").data, table.data)


@given(st.binary(max_size=300))
@settings(max_examples=200)
def test_any_bytes_are_refused_by_every_reader_of_arrays(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.npy"
        path.write_bytes(data)
        for read in (lambda: read_tokens("--keys", path), lambda: load_archive(path, "checkpoint")):
            with pytest.raises(FileFormatError, match=r"data\.npy"):
                read()


# --- the fuzzer finds what it is to find -----------------------------------------------------------------------------


def _unpickles(data: bytes) -> None:
    pickle.loads(b"cos\ngetpid\n(tR.")


def _writes(data: bytes) -> None:
    (Path(tempfile.gettempdir()) / "nlflow-escaped").write_bytes(data)


def _hides(data: bytes) -> None:
    try:
        subprocess.run(["true"], check=True)
    except BaseException as error:
        raise InputError("refused") from error


def _asks_first(data: bytes) -> None:
    try:
        raise MemoryError
    except MemoryError as error:
        raise FileFormatError("too large") from error


def _is_silent(data: bytes) -> None:
    raise FileFormatError


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        (_unpickles, "pickle.find_class"),
        (_writes, "open"),
        (_hides, "subprocess.Popen"),
        (_asks_first, "memory was asked for"),
        (_is_silent, "without a message"),
        (lambda data: os.remove("/nowhere/at-all"), "os.remove"),  # noqa: PTH107
        (lambda data: os.system("true"), "os.system"),
    ],
    ids=["pickle", "file", "hidden-program", "late", "silent", "removal", "shell"],
)
def test_broken_readers_are_found(reader: Any, words: str, guard: Guard) -> None:
    with pytest.raises(BrokenPropertyError, match=words):
        judge(reader, b"x", guard)
    assert judge(lambda data: (guard_file(guard)).write_bytes(data), b"x", guard) == READ


def guard_file(guard: Guard) -> Path:
    return Path(guard.folder) / "inside"


def test_readers_that_fill_the_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # The peak of a process never falls: what other tests took would hide what this one takes.
    peaks = iter([2**30, 2**30 + 2**29 + 1])
    monkeypatch.setattr("validation.robustness.fuzz.watch.peak", lambda: next(peaks))
    with pytest.raises(BrokenPropertyError, match=r"peak of memory grew by 536870913 bytes for an input of 3 bytes"):
        judge(lambda data: None, b"abc")


def test_unnamed_errors_pass_through_and_have_a_place() -> None:
    def reader(data: bytes) -> None:
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        judge(reader, b"")
    assert place_of(caught.value).startswith("KeyError at test_fuzz.py:")


def _changes(structure: str, content: bytes, count: int = 200) -> Iterator[bytes]:
    rng = random.Random(3)
    for _ in range(count):
        yield mutate.MUTATORS[structure](content, 4096, rng, mutate.random_bytes)


def test_mutations_keep_the_crc_of_png() -> None:
    found = set()
    for data in _changes("png", hostile.png(3, 3, zlib.compress(bytes(12)))):
        place = 8
        while place < len(data):
            size = int.from_bytes(data[place : place + 4], "big")
            assert zlib.crc32(data[place + 4 : place + 8 + size]) == int.from_bytes(
                data[place + 8 + size : place + 12 + size], "big"
            )
            place += 12 + size
        found.add(data)
    assert len(found) > 100


def test_mutations_get_past_the_checksum_of_archives(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    read, other = 0, set()
    for data in _changes("npz", seeds.archives()[0], 300):
        path.write_bytes(data)
        try:
            arrays, meta = load_archive(path, "checkpoint")
        except FileFormatError:
            continue
        read += 1
        other.add(str((arrays, meta)))
    assert read > 60
    assert len(other) > 30


def test_mutations_get_past_the_lengths_of_headers() -> None:
    arrays = [data for data in _changes("npy", seeds.npy()[0]) if data[:6] == b"\x93NUMPY"]
    whole = [data for data in arrays if len(data) >= 10 + int.from_bytes(data[8:10], "little")]
    assert len(whole) > 190
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    lengths = set()
    for data in _changes("state", len(header).to_bytes(8, "little") + header + bytes(4)):
        size = int.from_bytes(data[:8], "little")
        assert size <= len(data)
        lengths.add(size)
    assert len(lengths) > 20


def test_mutations_get_past_the_checksum_of_cases() -> None:
    from nlflow.store.storage import load_record, save_record

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "record"
        save_record(path, "case of a study", {"rows": [{"a": 1.0}]})
        record = json.loads(path.read_text())
        record["content"]["rows"] = [5]
        path.write_text(json.dumps(record))
        with pytest.raises(FileFormatError, match="checksum"):
            load_record(path, "case of a study")
        path.write_bytes(mutate.sealed_case(path.read_bytes()))
        assert load_record(path, "case of a study") == {"rows": [5]}


def test_same_seed_same_mutations() -> None:
    target, content = TARGETS["npy"], seeds.npy()[0]
    for number in range(20):
        assert engine.mutated(target, content, [], random.Random(number)) == engine.mutated(
            target, content, [], random.Random(number)
        )


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_without_atheris_counts_and_keeps(tmp_path: Path) -> None:
    row = campaign.run_target("npy", 0.07, tmp_path, guided=False)
    assert row.good
    assert row.tried > 20
    assert sum(row.outcomes.values()) == row.tried
    assert row.outcomes[REFUSED] > 0
    assert "pip install" in row.details["fuzzer"]
    assert row.fault == "hostile input: NPY arrays and tokens"


@pytest.mark.slow
def test_a_reader_that_fails_hangs_or_dies_is_told(tmp_path: Path) -> None:
    # The engine as it is, with a reader in the place of that of kernels.
    broken = """
import os, sys, time
from dataclasses import replace
from validation.robustness.fuzz import engine
def make(folder):
    def read(data):
        if len(data) > 60: raise KeyError('long')
        if b'\\n' in data: (os._exit(3) if sys.argv[-3] == '1' else time.sleep(60))
    return read
engine.PATIENCE = 1
kernel = engine.TARGETS['kernel']
engine.TARGETS['kernel'] = replace(kernel, make=make, seeds=lambda: [b'x'])
engine.main()
"""
    for seed, expected in ((1, 3), (2, 1)):
        out = tmp_path / str(seed)
        out.mkdir()
        command = [sys.executable, "-c", broken, "kernel", "20", str(out), str(out), str(seed), "--unguided", "99999"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
        assert done.returncode == expected, done.stderr
        counts = engine.Counts(out / "counts").as_dict()
        assert counts["tried"] == counts["read"] + counts["refused"] + counts["wrong"] + 1
        content = (out / "current").read_bytes()
        assert b"\n" in content[8 : 8 + int.from_bytes(content[:8], "little")]


@pytest.mark.slow
def test_command_lists_its_readers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "validation.robustness.fuzz", "--list"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(TARGETS)


def test_seeds_of_folders_travel_as_zips() -> None:
    with zipfile.ZipFile(io.BytesIO(seeds.packed({"a/b": b"1"}))) as archive:
        assert archive.namelist() == ["a/b"]
