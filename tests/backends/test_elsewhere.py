"""What POSIX has and Windows lacks is not needed."""

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nlflow.desk.terminal import nobody_reads
from nlflow.errors import physical_memory

PROGRAM = Path(__file__).parents[1] / "elsewhere.py"


def done(folder: Path, *options: str) -> Path:
    """Do the jobs of `elsewhere` in a folder, in a fresh process; return the folder."""
    folder.mkdir()
    ended = subprocess.run(
        [sys.executable, PROGRAM, folder, *options], capture_output=True, text=True, timeout=300,
        cwd=PROGRAM.parents[1],
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what is taken away is that of Linux")
@pytest.mark.parametrize("options", [["--one"], pytest.param([], marks=pytest.mark.slow)])
def test_without_posix_the_same_comes_out(tmp_path, options):
    bare = done(tmp_path / "bare", *options)
    usual = done(tmp_path / "usual", "--as-it-is", *options)
    listed = [{path.relative_to(one) for path in one.rglob("*")} for one in (bare, usual)]
    assert listed[0] == listed[1]
    assert {"out.npy"} if options else {"flow.npy", "strips.npy", "run.h5", "study"} <= {str(one) for one in listed[0]}
    for path in usual.rglob("*.npy"):
        np.testing.assert_array_equal(np.load(bare / path.relative_to(usual)), np.load(path))


class Kernel:
    """The call of Windows: it fills a structure that says its own length."""

    def __init__(self, memory: int) -> None:
        self.memory = memory

    def GlobalMemoryStatusEx(self, place: object) -> int:
        status = ctypes.cast(place, ctypes.POINTER(ctypes.c_uint64 * 8)).contents
        length = ctypes.cast(place, ctypes.POINTER(ctypes.c_uint32))[0]
        status[1] = self.memory
        return int(length == 64 and self.memory > 0)


def test_the_memory_of_windows(monkeypatch):
    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.setattr(ctypes, "windll", None, raising=False)
    assert physical_memory() is None
    for memory, found in ((48 * 2**30, 48 * 2**30), (0, None)):
        windll = type("windll", (), {"kernel32": Kernel(memory)})
        monkeypatch.setattr(ctypes, "windll", windll)
        assert physical_memory() == found


def test_nobody_reads(monkeypatch):
    ended = OSError(errno.EINVAL, "Invalid argument")
    assert nobody_reads(BrokenPipeError())
    assert not nobody_reads(ended)
    monkeypatch.setattr(os, "name", "nt")
    assert nobody_reads(ended)
    assert not nobody_reads(OSError(errno.EINVAL, "Invalid argument", "photo:1.png"))
    assert not nobody_reads(ValueError())
