"""Matrix products of tiles in threads, with bits that do not depend on their number."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

__all__ = ["TILE", "one_thread", "over_tiles"]

T = TypeVar("T")

TILE = 2048
"""Points of one piece of work; sums over points are cut here whatever the number of threads."""
_LOCK = threading.Lock()


@cache
def _blas() -> Any:
    import scipy.linalg  # noqa: F401 - brings a BLAS of its own, which has to be there to be found
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


@contextmanager
def one_thread() -> Iterator[int]:
    """Hold BLAS to one thread, with more of which products change their last bits, and tell how many it had.

    The number belongs to the process, so one caller at a time changes it; where it is 1 already nobody waits. (A thread
    cannot lower what another thread has set with threadpoolctl and still holds.) Not to be nested.
    """
    _LOCK.acquire()
    try:
        controller = _blas()
        threads = max((library.num_threads for library in controller.lib_controllers), default=1)
        if threads > 1:
            with controller.limit(limits=1):
                yield threads
            return
    finally:
        _LOCK.release()
    yield 1


def over_tiles(function: Callable[[slice], T], size: int, tile: int = TILE) -> list[T]:
    """Return `function` of each tile of `size` points, in order; tiles share the threads, each is computed by one."""
    tiles = [slice(start, min(start + tile, size)) for start in range(0, size, tile)]
    with one_thread() as threads:
        workers = min(threads, len(tiles) // 4)  # to start a thread costs more than a few tiles
        if workers < 2:
            return [function(tile) for tile in tiles]
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(function, tiles))
