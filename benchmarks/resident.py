"""The memory that a process holds, and by how much it rises at most while a task runs."""

from __future__ import annotations

import ctypes
import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_OWN = Path("/proc/self")


def figures(place: Path = _OWN, file: str = "status") -> dict[str, int]:
    """Return the figures that Linux gives in kB of a process, in bytes: VmRSS and VmHWM, or Pss of ``smaps_rollup``."""
    lines = (line.split() for line in (place / file).read_text(encoding="utf-8", errors="replace").splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[2:] == ["kB"]}


def peak() -> int:
    """Return the most bytes that this process has held so far, or since `begin_anew`."""
    if (_OWN / "status").exists():  # ru_maxrss is handed down by the process that started this one
        return figures()["VmHWM"]
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def begin_anew() -> None:
    """Let Linux forget the peak of this process."""
    (_OWN / "clear_refs").write_text("5", encoding="ascii")


def peak_of(task: Callable[[], Any]) -> int:
    """Return by how many bytes the resident memory of this process rises while a task runs.

    Linux counts the peak anew on request. Elsewhere it is that of the whole life of the process, so the figure is too
    small when importing took more than the task.
    """
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before and is used again would not count
        begin_anew()
        before = figures()["VmRSS"]
    except (OSError, AttributeError):
        before = peak()
    task()
    return peak() - before


class Taken:
    """The most bytes that Python and NumPy held at once, from the beginning of `traced` to its end."""

    bytes: int


@contextmanager
def traced() -> Iterator[Taken]:
    taken = Taken()
    tracemalloc.start()
    try:
        yield taken
    finally:
        taken.bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
