"""Memory that is needed and that is free."""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nlflow.errors import MemoryLimitError, format_bytes, memory_limit

_MOST = 2**40  # what is counted
_RAN_OUT = ("out of memory", "can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class Need:
    """Memory that a computation needs."""

    # - of : callable; Bytes for a number of nodes (or samples, ...); must not fall.
    # - count : int; How many there are.
    # - what : str; For messages: "with 4 features in float32".
    # - remedy : str
    # - argument : str; The argument that is too large.
    # - unit : str; What is counted.

    of: Callable[[int], int]
    count: int
    what: str
    remedy: str
    argument: str = "device"
    unit: str = "nodes"

    def largest(self, free: float) -> int:
        return bisect_right(range(1, _MOST), free, key=self.of)

    def check(self, place: str, free: int) -> None:
        if self.of(self.count) > free:
            raise self.error(place, free)

    def error(self, place: str, free: int, most: int = _MOST) -> MemoryLimitError:
        fits = min(self.largest(free), most)
        return MemoryLimitError(
            f"{self.argument}: {self.count} {self.unit} {self.what} need about {format_bytes(self.of(self.count))} on "
            f"{place}, where {format_bytes(free)} are free; about {fits} {self.unit} fit at most: {self.remedy}"
        )

    @contextmanager
    def guarded(self, place: str, free: Callable[[], int]) -> Iterator[None]:
        # Estimates may be wrong, and other programs use the same device: no more than half is said to fit then.
        try:
            yield
        except RuntimeError as error:
            if not ran_out(error):
                raise
            raise self.error(place, free(), self.count // 2) from error


def ran_out(error: Exception) -> bool:
    return any(words in str(error).lower() for words in _RAN_OUT)


def free_bytes(device: Any) -> int:
    """Return the bytes that are free for a computation on a device of torch, or for NumPy (None)."""
    if getattr(device, "type", None) != "cuda" or "NLFLOW_MEMORY_LIMIT" in os.environ:
        return memory_limit()
    cuda = sys.modules["torch"].cuda
    with cuda.device(device):
        # What torch has taken from the device and does not use is free as well.
        return int(cuda.mem_get_info()[0]) + int(cuda.memory_reserved()) - int(cuda.memory_allocated())


def limit_for(like: Any, given: float | None) -> float | None:
    """Return the given limit, else what is free on the array's GPU, else None."""
    device = getattr(like, "device", None)
    return free_bytes(device) if given is None and getattr(device, "type", None) == "cuda" else given
