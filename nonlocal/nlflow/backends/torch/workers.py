"""Threads that compute chunks of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from nlflow.backends.threads import one_torch_thread

_held: ContextVar[int] = ContextVar("held", default=0)  # workers that a caller has counted already

# Numbers that a worker holds at a time, about: what caches hold on the CPU, and what keeps a GPU busy.
_CPU, _GPU = 2**22, 2**27


def chunk_for(device: torch.device) -> int:
    return _CPU if device.type == "cpu" else _GPU


def bytes_of_chunks(device: torch.device) -> int:
    return 16 * (_held.get() or torch.get_num_threads() if device.type == "cpu" else 1)


def share(items: int, most: int, workers: int) -> int:
    """Return how many items a chunk holds, at most `most`, so that workers get about equally many chunks."""
    chunks = -(-items // most)
    return max(1, -(-items // (chunks + -chunks % workers)))


@contextmanager
def workers_for(device: torch.device) -> Iterator[int]:
    if device.type != "cpu":
        yield 1
        return
    count = _held.get()
    if count:
        yield count
        return
    count = torch.get_num_threads()
    token = _held.set(count)
    try:
        with one_torch_thread():
            yield count
    finally:
        _held.reset(token)


def exact_products(device: torch.device) -> AbstractContextManager[None]:
    before = torch.get_float32_matmul_precision()
    if before == "highest" and not torch.is_autocast_enabled(device.type):
        return nullcontext()  # it is entered at each velocity
    return _exact_products(device, before)


@contextmanager
def _exact_products(device: torch.device, before: str) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
