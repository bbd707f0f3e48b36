"""Decoders that misbehave, which the tests of `nlflow.desk.apart` run in a child."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.errors import InputError


def echo(path: Path, **words: Any) -> Any:
    """Return what it was given."""
    return path, words


def pid(path: Path) -> int:
    """Return whose process this is."""
    return os.getpid()


def modules(path: Path) -> list[str]:
    """Return what is loaded."""
    return sorted(sys.modules)


def place(path: Path) -> Path:
    """Return the working folder."""
    return Path.cwd()


def limit(path: Path) -> str:
    """Return the limit of memory for one array."""
    return os.environ["NLFLOW_MEMORY_LIMIT"]


def crash(path: Path, number: int) -> None:
    """End by a signal."""
    os.kill(os.getpid(), number)
    signal.pause()


def leave(path: Path) -> None:
    """End the process as a library may."""
    os._exit(3)


def hang(path: Path) -> int:
    """Compute for ever where no signal of Python is seen."""
    return int(pow(3, 10**10))


def hang_after_one(path: Path, told: str) -> Iterator[int]:
    """Yield once, write who hangs, and hang."""
    yield 1
    Path(told).write_text(str(os.getpid()))
    yield hang(path)


def greedy(path: Path, asked: int) -> int:
    """Ask for memory."""
    return int(np.ones(asked, np.uint8)[-1])


def noisy(path: Path) -> int:
    """Print where replies are written."""
    os.write(1, b"what a library says")
    print("and more", flush=True)
    return 1


def wrong(path: Path, named: bool) -> None:
    """Raise an error of the package, or another."""
    if named:
        raise InputError("file: got this, expected that; mend it")
    raise KeyError("x")


def strange(path: Path) -> Any:
    """Return what does not travel."""
    return object()


def several(path: Path, count: int) -> Iterator[Any]:
    """Yield arrays."""
    for number in range(count):
        yield number, np.full((300, 400), number, np.int32)
