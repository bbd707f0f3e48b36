"""The memory that this process holds, and by how much it rises at most while a task runs."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")


def status(name: str) -> int:
    """Return a figure of /proc/self/status in bytes."""
    line = next(line for line in _STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def peak() -> int:
    """Return the most bytes that this process has held so far."""
    if _STATUS.exists():  # what the system calls ru_maxrss is handed down by the process that started this one
        return status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def peak_of(task: Callable[[], Any]) -> int:
    """Return by how many bytes the resident memory of this process rises while a task runs.

    Linux counts the peak anew on request. Elsewhere it is that of the whole life of the process, so the figure is too
    small when importing took more than the task.
    """
    try:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before and is used again would not count
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = status("VmRSS")
    except (OSError, AttributeError):
        before = peak()
    task()
    return peak() - before
