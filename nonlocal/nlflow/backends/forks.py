"""Whether this process was forked from one that had loaded the package, where threads of the parent do not exist.

GNU OpenMP ends a child of `os.fork` that asks it for threads, and Numba's own pool waits for threads that are gone. A
child therefore runs compiled loops in one thread: see `nlflow.backends.numba.launch`.
"""

from __future__ import annotations

import os
from array import array

TYPE_CHECKING = False  # as that of typing, which takes a quarter of `import nlflow` to load
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_state = array("i", [0])
_answers: list[Callable[[], None]] = []


def address() -> int:
    """Return where compiled code reads the answer, an integer of 32 bits; the place stays the same."""
    return _state.buffer_info()[0]


def in_child(answer: Callable[[], None]) -> None:
    """Call `answer` in each child as soon as it is forked."""
    _answers.append(answer)


def renewed(lock: Any) -> Any:
    """Return the lock, which is free in each child: a thread of the parent that held it does not exist there."""
    in_child(lock._at_fork_reinit)
    return lock


def _mark() -> None:
    _state[0] = 1
    for answer in _answers:
        answer()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_mark)
