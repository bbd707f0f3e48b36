"""What changes in a forked process."""

# Threads of the parent do not exist in a child. GNU OpenMP ends a child that asks it for threads, and Numba's own pool
# waits for them, so a child runs compiled loops in one thread (`nlflow.backends.numba.launch`).

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
    """Return the address of an int32, which is 0 in the first process and not in a fork, for compiled code."""
    return _state.buffer_info()[0]


def in_child(answer: Callable[[], None]) -> None:
    _answers.append(answer)


def renewed(lock: Any) -> Any:
    in_child(lock._at_fork_reinit)
    return lock


def _mark() -> None:
    _state[0] = 1
    for answer in _answers:
        answer()


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_mark)
