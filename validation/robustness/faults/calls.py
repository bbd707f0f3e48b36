"""Kill a program at each system call that writes, as the tests of SQLite do.

The program is a child of a process that has all modules in memory, so that a try takes a fraction of a second. It is
traced (ptrace): its calls are counted, whatever library makes them in whatever thread, and at the n-th it gets SIGKILL
before the call is done. Then the same command goes on with what is left.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Output", "possible", "strike", "traced"]

_TRACEME, _CONTINUE, _SETOPTIONS, _SYSCALL_INFO = 0, 7, 0x4200, 0x420E
_OPTIONS = 0x100080 | 0b1110  # calls that the filter names; threads and children too; they end with the tracer
_STOPPED = signal.SIGTRAP | 7 << 8  # at a call that the filter names
_ALL = 0x40000000  # waits for threads as well
_WRITES_FD = {1, 18, 20, 40, 74, 75, 77, 285, 296, 326}  # write, pwrite, fsync, ftruncate, fallocate and so on
_CHANGES_NAMES = {76, 82, 83, 84, 85, 86, 87, 88, 90, 91, 258, 263, 264, 265, 266, 268, 280, 316}
_OPENS = {2: 1, 257: 2}  # where the flags are among the arguments
_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
SAME = "resumed to the same bits"


def possible() -> bool:
    """Return whether calls can be counted and met here."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def _ptrace(request: int, pid: int, address: Any, data: Any) -> int:
    call = ctypes.CDLL(None).ptrace
    call.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    return int(call(request, pid, address, data))


def traced(work: Callable[[], object], folder: Path, at: int = 0) -> tuple[int, int]:
    """Run `work` in a child, which is killed at its `at`-th call that writes below a folder.

    Returns its status (negative for a signal), and how many such calls there were. What it says goes to ``said`` beside
    the folder.
    """
    pid = os.fork()
    if pid == 0:
        _child(work, folder.with_name(f"{folder.name}-said"))
    os.waitpid(pid, _ALL)
    _ptrace(_SETOPTIONS, pid, None, _OPTIONS)
    _ptrace(_CONTINUE, pid, None, None)
    buffer, count = ctypes.create_string_buffer(88), 0
    while True:
        task, status = os.waitpid(-pid, _ALL)
        if not os.WIFSTOPPED(status):
            if task == pid:
                return os.waitstatus_to_exitcode(status), count
            continue
        number = os.WSTOPSIG(status)
        if status >> 8 == _STOPPED:
            _ptrace(_SYSCALL_INFO, task, len(buffer), buffer)
            call, *arguments = struct.unpack("<24x7Q", buffer.raw[:80])
            if _writes(task, call, arguments, folder):
                count += 1
                if count == at:
                    os.killpg(pid, signal.SIGKILL)
                    continue
        _ptrace(_CONTINUE, task, None, 0 if number in (signal.SIGTRAP, signal.SIGSTOP) else number)


def _name_calls() -> None:
    """Let this process stop at calls that may write, and at no others: a filter of the kernel (seccomp)."""
    calls = sorted({*_WRITES_FD, *_CHANGES_NAMES, *_OPENS})
    rows = [(0x20, 0, 0, 0)]  # the number of the call; then to the last row where it is one of these
    rows += [(0x15, len(calls) - k, 0, call) for k, call in enumerate(calls)]
    rows += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x7FF00000)]  # go on, or stop
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = struct.pack("H6xP", len(rows), ctypes.addressof(filters))
    for request, value in ((38, 1), (22, 2)):
        if ctypes.CDLL(None).prctl(request, value, program if value == 2 else 0, 0, 0):
            raise OSError("no filter of system calls can be set here")


def _writes(task: int, call: int, arguments: list[int], folder: Path) -> bool:
    if call in _OPENS:
        return bool(arguments[_OPENS[call]] & _FOR_WRITING)
    if call not in _WRITES_FD:
        return call in _CHANGES_NAMES
    try:
        place = os.readlink(f"/proc/{task}/fd/{arguments[0 if call != 326 else 2]}")  # noqa: PTH115
    except OSError:
        return False
    return place.startswith(str(folder))


def _child(work: Callable[[], object], said: Path) -> None:
    code: Any = 70
    try:
        os.setpgid(0, 0)
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(out, 1)
        os.dup2(out, 2)
        _ptrace(_TRACEME, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        _name_calls()
        work()
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(int(code))


@dataclass(frozen=True)
class Output:
    """Something that is written, killed, and gone on with.

    Attributes
    ----------
    name : str
    begin, resume : callable
        Of a folder: what is killed, and what goes on. They raise, or `SystemExit` with another status than 0, when they
        fail.
    result : callable
        From a folder to what must be as after an undisturbed run.
    prepare : callable
        Puts inputs, or an old output, into an empty folder.
    check : callable
        From a folder after a kill, the state before and the result to what is lost, or None.
    """

    name: str
    begin: Callable[[Path], object]
    resume: Callable[[Path], object]
    result: Callable[[Path], Any]
    prepare: Callable[[Path], object] = lambda folder: None
    check: Callable[[Path, Any, Any], str | None] = lambda folder, before, after: None


def names(folder: Path) -> list[str]:
    """Return everything in a folder, hidden or not."""
    return sorted(os.fsdecode(path.relative_to(folder)) for path in folder.rglob("*"))


def strike(output: Output, folder: Path, most: int) -> tuple[Counter[str], list[str], list[str], int]:
    """Kill an output at each of its calls, or at so many that are spread over them.

    Returns how often it came to what, what was lost, what was wrong, and how many calls there are.
    """

    def fresh(name: str) -> Path:
        place = folder / name
        place.mkdir(parents=True)
        output.prepare(place)
        return place

    def attempt(work: Callable[[Path], object], place: Path, at: int = 0) -> tuple[int, int]:
        return traced(lambda: work(place), place, at)

    def said(place: Path) -> str:
        return place.with_name(f"{place.name}-said").read_text(errors="replace")[-600:]

    before = output.result(fresh("before"))
    quiet = fresh("undisturbed")
    status, count = attempt(output.begin, quiet)
    if status:
        raise RuntimeError(f"{output.name}: the undisturbed run failed: {said(quiet)}")
    expected, kept = output.result(quiet), names(quiet)
    outcomes, lost, wrong = Counter[str](), list[str](), list[str]()
    for at in np.unique(np.linspace(1, count, min(most, count)).round().astype(int)).tolist():
        place = fresh(f"{at}")
        killed, _ = attempt(output.begin, place, at)
        gone = output.check(place, before, expected)
        if gone is not None:
            lost.append(f"call {at}: {gone}")
        if killed not in (0, -9):
            wrong.append(f"call {at}: status {killed}: {said(place)}")
            continue
        status, _ = attempt(output.resume, place)
        if status:
            wrong.append(f"call {at}: it does not go on: status {status}: {said(place)}")
        elif output.result(place) != expected:
            wrong.append(f"call {at}: another result than that of an undisturbed run")
        elif names(place) != kept:
            wrong.append(f"call {at}: left behind or missing: {sorted({*names(place)} ^ {*kept})[:5]}")
        else:
            outcomes[SAME if killed == -9 else "had fewer calls"] += 1
    return outcomes, lost, wrong, count
