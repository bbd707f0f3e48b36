"""Decoders in a child: what they return comes back, and what they do wrong does not reach this process."""

from __future__ import annotations

import io
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlflow.desk import apart, files
from nlflow.desk.formats.media import Media
from nlflow.errors import FileFormatError, InputError, MemoryLimitError, NlflowError
from tests import decoders

ROOT = Path(__file__).resolve().parents[2]
FILE = Path("a file of no importance")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits and signals are those of Linux")


def call(name: str, memory: float = 2**28, **words: Any) -> Any:
    return apart.call(f"{decoders.__name__}:{name}", FILE, memory, **words)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("NLFLOW_DECODE", raising=False)
    yield
    assert all(child in apart._idle for child in apart._children)  # none is lent for ever


# --- what travels ----------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
VALUES = [
    None, True, 3, 10**30, -0.0, float("inf"), 1 / 3, "text \udcff\0", b"bytes\xff", bytearray(b""), (), [],
    (1, [2.5, (b"x",)]), {"a": {(1, 2): None}}, Path("a/\udcfe"), Fraction(-30000, 1001), np.dtype(">u2"),
    np.float32(0.1), np.bytes_(b"logical"), np.str_("s"), np.int64(-(2**63)),
]  # fmt: skip
ARRAYS = [
    RNG.random((3, 4)), RNG.integers(0, 9, (2, 3, 4), dtype=np.uint8)[:, ::-1].T, np.array(2.5), np.zeros((0, 3)),
    np.array([True, False]), np.array([1, 2], ">i2"), np.array([b"ab", b"c"]), np.array(["a", "bc"]),
    np.array([["x", "long"], ["", "é"]], object), np.ones(3, np.float16),
]  # fmt: skip


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype == b.dtype and a.shape == b.shape and bool(np.all(a == b))
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


def test_values_come_back_as_they_are() -> None:
    path, words = call("echo", values=VALUES, arrays=ARRAYS)
    assert path == FILE
    expected = [bytes(value) if isinstance(value, bytearray) else value for value in VALUES]
    assert same(words["values"], expected)
    assert same(words["arrays"], ARRAYS)
    assert words["arrays"][0].flags.writeable


def test_what_a_file_holds_comes_back(tmp_path: Path) -> None:
    media = Media(tmp_path, "webp", "image", ARRAYS[0], orientation=6, extras={"exif": b"x"}, notes=("one",), bits=12)
    found = call("echo", media=media)[1]["media"]
    assert same(found.data, media.data)
    assert {**vars(found), "data": 0} == {**vars(media), "data": 0}


def test_what_does_not_travel_is_an_error_and_no_end() -> None:
    before = call("pid")
    with pytest.raises((ValueError, NlflowError)):
        call("strange")
    with pytest.raises(TypeError, match="object"):
        call("echo", value=object())
    assert before != os.getpid()


def message(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


BROKEN = {
    "nothing": b"",
    "no text": message(b""),
    "too long": b"\xff" * 8,
    "half": message(b"[[], 1]")[:-1],
    "no JSON": message(b"[[]"),
    "no pair": message(b"nul"),
    "no mapping": message(b"[[], 3]"),
    "another mapping": message(b'[[], {"dict": [["kind", "item"]]}]'),
    "unknown": message(b'[[], {"os": "system"}]'),
    "too large": message(b'[[0], {"array": ["|u1", [99999999999999999]]}]'),
    "negative": message(b'[[0], {"array": ["|u1", [-1, -1]]}]'),
    "objects": message(b'[[0], {"array": ["|O", [1]]}]'),
    "nowhere": message(b'[[8], {"array": ["|u1", [70000]]}]'),
    "deep": message(b"[" * 100_000),
}


QUICK = ("half", "another mapping", "too large", "objects", "deep")  # a child each takes a fifth of a second


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in BROKEN]
)
def test_a_broken_reply_is_no_reply(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    child = apart._Child()
    own = child.replies
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(BROKEN[case])
        file.seek(0)
        child.greet()
        child.replies = file
        monkeypatch.setattr(apart, "_Child", lambda: child)
        apart._end_all()
        with pytest.raises(FileFormatError, match="a decoder that ended"):
            call("echo")
    own.close()


def test_arrays_come_through_the_pipe_where_memory_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.random.default_rng(0).random((300, 400))
    apart._end_all()
    monkeypatch.setattr(apart, "_take", None)
    assert same(call("echo", a=array)[1]["a"], array)
    assert [child.direct for child in apart._idle] == [False]
    apart._end_all()


@LINUX
def test_large_arrays_are_taken_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.random.default_rng(0).random((300, 400))
    assert same(call("echo", a=array, b=array[:, :3], c=np.zeros((0, 2)))[1]["a"], array)
    if not apart._idle[-1].direct:
        pytest.skip("the system does not let a parent read the memory of its child")
    taken: list[int] = []
    take = apart._take
    monkeypatch.setattr(
        apart, "_take", lambda owner, address, place: (taken.append(place.nbytes), take(owner, address, place))
    )
    call("echo", a=array, b=array[:, :3], c=np.zeros((0, 2)))
    assert taken == [array.nbytes]


# --- what goes wrong -------------------------------------------------------------------------------------------------


@LINUX
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL, signal.SIGFPE])
def test_a_crash_is_an_error_that_names_the_file(number: signal.Signals) -> None:
    with pytest.raises(FileFormatError, match=rf"^a file of no importance: got a decoder that ended by signal "
                       rf"{number.value} \({number.name}\).*copy or export it again"):  # fmt: skip
        call("crash", number=int(number))
    assert call("echo") == (FILE, {})


def test_an_end_without_a_word_is_told() -> None:
    with pytest.raises(FileFormatError, match="ended with the code 3"):
        call("leave")


@LINUX
def test_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NLFLOW_DECODE_SECONDS", "0.3")
    start = time.monotonic()
    with pytest.raises(FileFormatError, match=r"took over 0 s.*NLFLOW_DECODE_SECONDS"):
        call("hang")
    assert 0.25 < time.monotonic() - start < 20
    for text in ("0", "soon", "-1", "nan"):
        monkeypatch.setenv("NLFLOW_DECODE_SECONDS", text)
        with pytest.raises(InputError, match="NLFLOW_DECODE_SECONDS"):
            call("echo")


@LINUX
def test_memory_is_bounded_and_the_bound_is_lifted_again() -> None:
    first = call("pid")
    room = apart._ROOM
    with pytest.raises(MemoryLimitError, match=r"a file of no importance: its decoder needed over .*iB"):
        call("greedy", memory=2**20, asked=room + 2**24)
    assert call("greedy", memory=2**28, asked=room + 2**24) == 1
    assert call("pid") == first


def test_errors_keep_their_names() -> None:
    with pytest.raises(InputError, match=r"^file: got this, expected that; mend it$"):
        call("wrong", named=True)
    with pytest.raises(ValueError, match="its parts contradict each other") as caught:
        call("wrong", named=False)
    assert not isinstance(caught.value, NlflowError)
    assert call("noisy") == 1


def test_a_child_that_was_ended_meanwhile_is_replaced() -> None:
    first = call("pid")
    apart._idle[-1].process.kill()
    apart._idle[-1].process.wait()
    assert call("pid") != first


def test_where_no_python_starts_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    apart._end_all()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "blender"))
    with pytest.raises(FileFormatError, match=r"none starts \(this program is no Python\).*NLFLOW_DECODE=here"):
        call("echo")
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    with pytest.raises(FileFormatError, match=r"none starts \(Python does not answer\)"):
        call("echo")
    monkeypatch.setenv("NLFLOW_DECODE", "here")
    assert call("pid") == os.getpid()


# --- how it lives ----------------------------------------------------------------------------------------------------


def test_one_child_is_kept_and_is_light() -> None:
    assert call("pid") == call("pid")
    heavy = {"numba", "torch", "scipy", "matplotlib", "llvmlite", "dask", "zarr", "PIL", "h5py", "av"}
    found = subprocess.run(
        [sys.executable, "-c", "from nlflow.desk import apart; from pathlib import Path; "
         "print(*apart.call('tests.decoders:modules', Path('x'), 2**28))"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        check=True,
    ).stdout.split()  # fmt: skip
    assert "numpy" in found
    assert heavy & set(found) == set()


def test_it_works_where_the_caller_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    call("pid")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "12345678")
    assert call("place") == Path.cwd()
    assert call("limit") == "12345678"


def test_threads_read_at_the_same_time() -> None:
    found: list[Any] = []

    def read(number: int) -> None:
        for _ in range(3):
            stream = apart.stream(f"{decoders.__name__}:several", FILE, 2**28, count=number)
            found.append((number, [int(array.sum()) // 120000 for _, array in stream]))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted((number, list(range(number))) for number in range(1, 7) for _ in range(3))
    assert len(apart._idle) <= apart._IDLE


def test_a_stream_that_is_left_leaves_nothing() -> None:
    stream = apart.stream(f"{decoders.__name__}:several", FILE, 2**28, count=100)
    next(stream)
    lent = apart._children - set(apart._idle)
    stream.close()  # type: ignore[attr-defined]
    assert [child.process.returncode is not None for child in lent] == [True]
    assert call("echo") == (FILE, {})


def run(program: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"from pathlib import Path\nfrom nlflow.desk import apart, files\n{program}", *words],
        cwd=options.pop("cwd", ROOT), env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True, text=True, timeout=120, check=False, **options,
    )  # fmt: skip


READ = "def pid(*_): return apart.call('tests.decoders:pid', Path('x'), 2**28)\n"


@LINUX
def test_forked_children_have_children_of_their_own() -> None:
    done = run(
        READ
        + """
import os
first = pid()
child = os.fork()
if not child:
    os._exit(0 if pid() not in (first, os.getpid()) and pid() == pid() else 7)
print(os.waitpid(child, 0)[1], pid() == first)
"""
    )
    assert (done.stdout, done.stderr) == ("0 True\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_pool_read(method: str, tmp_path: Path) -> None:
    if method != "spawn" and os.name != "posix":
        pytest.skip("there is no fork")
    program = tmp_path / "program.py"
    program.write_text(
        f"from pathlib import Path\nfrom nlflow.desk import apart\n{READ}"
        "if __name__ == '__main__':\n    import multiprocessing\n    pid()\n"
        f"    with multiprocessing.get_context('{method}').Pool(2) as pool: print(len(set(pool.map(pid, range(8)))))\n"
    )
    done = subprocess.run([sys.executable, str(program)], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}, check=False)  # fmt: skip
    assert done.stdout.strip() in ("1", "2"), done.stderr
    assert done.stderr == ""


@LINUX
def test_it_works_with_closed_streams_and_without_a_folder(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = run(READ + """
import os, sys
os.rmdir(sys.argv[1])
os.close(0); os.close(1)
Path(sys.argv[2]).write_text(str(pid() != os.getpid()))
""", str(gone), str(tmp_path / "told"), cwd=gone)  # fmt: skip
    assert (tmp_path / "told").read_text() == "True", done.stderr


def alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@LINUX
@pytest.mark.parametrize("busy", [False, True])
def test_it_ends_with_its_parent(busy: bool, tmp_path: Path) -> None:
    told = tmp_path / "told"
    program = (
        READ
        + """
import sys, time
if sys.argv[2] == 'busy':
    for _ in apart.stream('tests.decoders:hang_after_one', Path('x'), 2**28, told=sys.argv[1]): pass
Path(sys.argv[1]).write_text(str(pid()))
time.sleep(60)
"""
    )
    start = f"from pathlib import Path\nfrom nlflow.desk import apart\n{program}"
    process = subprocess.Popen([sys.executable, "-c", start, str(told), "busy" if busy else "idle"], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])})  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not (told.exists() and told.read_text()) and time.monotonic() < end:
            time.sleep(0.02)
        if busy:
            time.sleep(0.2)  # the child computes, and sees nothing but signals
        child = int(told.read_text())
        assert alive(child)
        open_ = [str(entry.readlink()) for entry in Path(f"/proc/{child}/fd").iterdir()]
        assert [name for name in open_ if "shm" in name or "memfd" in name] == []  # nothing that could be left behind
    finally:
        process.kill()
        process.wait()
    end = time.monotonic() + 20
    while alive(child) and time.monotonic() < end:
        time.sleep(0.02)
    assert not alive(child)


# --- files -----------------------------------------------------------------------------------------------------------


def crashing_hdf5() -> bytes:
    """Return an HDF5 file of which a chunk is shorter than its checksum: its decoder reads far behind the end."""
    h5py = pytest.importorskip("h5py")
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.create_dataset("a", data=np.arange(64.0).reshape(8, 8), chunks=(8, 8), fletcher32=True)
    return buffer.getvalue().replace(struct.pack("<I", 8 * 64 + 4), struct.pack("<I", 1), 1)


def test_a_file_whose_decoder_crashes_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(crashing_hdf5())
    with pytest.raises(FileFormatError, match=r"a\.h5: got a decoder that ended"):
        files.read(path)


@pytest.mark.slow
def test_a_folder_goes_on_after_a_crash(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    data = np.random.default_rng(0).normal(100, 9, (24, 24))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.h5").write_bytes(crashing_hdf5())
    with h5py.File(tmp_path / "in/b.h5", "w") as file:
        file["a"] = data
    done = run("from nlflow.desk.commands.main import main; main()", "denoise", str(tmp_path / "in"),
               str(tmp_path / "out"), "--quality", "fast")  # fmt: skip
    assert done.returncode == 1
    assert "a.h5: got a decoder that ended by signal" in done.stderr
    assert [path.name for path in sorted((tmp_path / "out").glob("*.h5"))] == ["b.h5"]


def test_formats_without_need_start_no_child(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, (16, 16), dtype=np.uint8)
    media = files.read(_saved(tmp_path / "a.npy", data))
    for name in ("a.png", "a.tif", "a.bmp", "a.pgm", "a.jpg"):
        files.write(tmp_path / name, data, media)
    done = run("import sys\nfor p in sys.argv[1:]: files.read(p)\nprint(len(apart._children))",
               *map(str, sorted(tmp_path.iterdir())))  # fmt: skip
    assert (done.stdout, done.stderr) == ("0\n", "")


def _saved(path: Path, data: Any) -> Path:
    np.save(path, data)
    return path


@pytest.mark.parametrize("words", [
    {}, {"chunks": (4, 5)}, {"chunks": (7, 3), "compression": "gzip", "shuffle": True}, {"chunks": (30, 20)},
    {"fletcher32": True},
], ids=["plain", "chunks", "packed", "one-chunk", "checksum"])  # fmt: skip
@pytest.mark.parametrize("dtype", ["<f4", ">i2", "u1", "?", "<f8"])
def test_datasets_are_read_as_h5py_reads_them(
    words: dict[str, Any], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    h5py = pytest.importorskip("h5py")
    monkeypatch.setattr("nlflow.desk.formats.hdf5._BLOCK", 64)  # of the child that is this process
    data = (np.random.default_rng(0).random((30, 20)) * 200).astype(dtype)
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", userblock_size=512) as file:
        file.create_dataset("a", data=data, **words)
    for where in ("", "here"):
        monkeypatch.setenv("NLFLOW_DECODE", where)
        np.testing.assert_array_equal(files.read(path, kind="image").data, data)


def test_datasets_of_odd_layouts_are_read(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("filled", (5, 6), "f4", fillvalue=2.5)  # has no place in the file
        small = h5py.h5t.STD_U16LE.copy()
        small.set_precision(12)
        space = h5py.h5s.create_simple((2, 3))
        h5py.h5d.create(file.id, b"bits", small, space).write(h5py.h5s.ALL, h5py.h5s.ALL, np.full((2, 3), 4095, "u2"))
        file.create_dataset("compact", data=np.arange(4.0), dtype=">f8")
        file["a"] = np.ones((0, 3))
        file["compact"].attrs["none"] = h5py.Empty("f4")
        file["compact"].attrs["texts"] = ["a", "bc"]
    read = {name: files.read(tmp_path / "a.h5", array=name) for name in ("filled", "bits", "compact")}
    assert (read["filled"].data == 2.5).all()
    assert (read["bits"].data == 4095).all()
    np.testing.assert_array_equal(read["compact"].data, np.arange(4.0))
    files.write(tmp_path / "b.h5", read["compact"].data, read["compact"])
    with h5py.File(tmp_path / "b.h5") as file:
        assert isinstance(file["compact"].attrs["none"], h5py.Empty)
        assert list(file["compact"].attrs["texts"]) == ["a", "bc"]


@pytest.mark.slow
def test_a_chunk_that_unfolds_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(tmp_path / "a.zarr", shape=(64, 64), chunks=(32, 32), dtype="u1",
                              compressors=zarr.codecs.GzipCodec())  # fmt: skip
    array[...] = np.random.default_rng(0).integers(0, 256, (64, 64))
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = bytes(2**24)
    unfolds = b"".join(packer.compress(block) for _ in range(128)) + packer.flush()  # 2 GiB in 2 MB
    (tmp_path / "a.zarr/c/0/0").write_bytes(unfolds)
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", str(2**26))
    with pytest.raises(NlflowError, match=r"a\.zarr: its decoder needed over .*iB"):
        files.load(tmp_path / "a.zarr")
    from nlflow.desk.large import open_image

    image, _ = open_image(tmp_path / "a.zarr", block=32)
    assert image.blocks[1, 1].compute(scheduler="synchronous").shape == (32, 32)
    with pytest.raises(NlflowError, match=r"a\.zarr: its decoder needed over .*iB"):
        image.blocks[0, 0].compute(scheduler="synchronous")
    (tmp_path / "a.zarr/c/0/0").write_bytes(b"no gzip")
    with pytest.raises(FileFormatError, match=r"a\.zarr: got a damaged block at 0:32 x 0:32 \(Not a gzipped file"):
        image.blocks[0, 0].compute(scheduler="synchronous")


def test_a_child_is_begun_before_it_is_needed_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nlflow.desk.formats import prepare

    apart._end_all()
    prepare([tmp_path / "a.png", tmp_path / "b.tif", tmp_path / "c"])
    monkeypatch.setenv("NLFLOW_DECODE", "here")
    prepare([tmp_path / "a.h5"])
    assert apart._idle == []
    monkeypatch.delenv("NLFLOW_DECODE")
    prepare([tmp_path / "a.png", tmp_path / "a.h5"])
    (child,) = apart._idle
    prepare([tmp_path / "a.mkv"])
    assert (call("pid"), apart._idle) == (child.process.pid, [child])
    assert "h5py" in call("modules")


def test_large_files_have_more_time(tmp_path: Path) -> None:
    assert (apart.seconds_for(0), apart.seconds_for(2**30)) == (60, 60 + 4096)
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").write_bytes(bytes(300))
    (tmp_path / "a/d").write_bytes(bytes(20))
    (tmp_path / "a/up").symlink_to(tmp_path)  # which is not followed
    assert (apart.size_of(tmp_path / "a"), apart.size_of(tmp_path / "none")) == (320, 0)
