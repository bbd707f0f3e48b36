"""Numbers of threads."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any, TypeVar

from nlflow.backends import forks

Item = TypeVar("Item")
Made = TypeVar("Made")
_BLAS = forks.renewed(Lock())
_TORCH = forks.renewed(Lock())
_holders: list[int] = []  # the threads of torch that each caller of `one_torch_thread` has found
forks.in_child(_holders.clear)
_POOLS = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def counts() -> dict[str, int]:
    if "numba" in sys.modules:
        _numba()
    found = {name: getattr(sys.modules.get(name), "get_num_threads", None) for name in ("numba", "torch")}
    return {name: int(count()) for name, count in found.items() if count is not None}


def _numba() -> Any:
    """Return Numba, with threads that have started without a change of torch's."""
    import_module("nlflow.backends.numba.launch").start_threads()
    return import_module("numba")


def described() -> dict[str, Any]:
    numba = _numba()
    return {
        "cpu_threads": cores(),
        "numba_threads": numba.get_num_threads(),
        "numba_threading_layer": _pool(str(numba.config.THREADING_LAYER), tuple(numba.config.THREADING_LAYER_PRIORITY)),
    }


@cache
def _pool(layer: str, priority: tuple[str, ...]) -> str:
    """Return the threading layer of Numba: the first call of a loop takes the first that can be loaded."""
    choices = {"default": priority, "safe": ("tbb",), "threadsafe": ("tbb", "omp"), "forksafe": ("tbb", *_POOLS)}
    for name in choices.get(layer, ()):
        try:
            import_module(f"numba.np.ufunc.{_POOLS[name]}")
        except ImportError:
            continue
        return name
    return layer


@contextmanager
def one_loop_thread() -> Iterator[None]:
    numba = _numba()
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    try:
        yield
    finally:
        numba.set_num_threads(before)


@cache
def _blas() -> Any:
    import scipy.linalg  # noqa: F401 - brings a BLAS of its own, which has to be there to be found
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def blas_loops() -> str:
    """Return each BLAS that is loaded, with its version and the processor whose loops it has chosen."""
    parts = ("internal_api", "version", "architecture")
    return ", ".join(sorted({" ".join(str(one[part]) for part in parts if one.get(part)) for one in _blas().info()}))


@contextmanager
def one_blas_thread() -> Iterator[int]:
    """Hold BLAS to one thread, and yield how many it had; may not be nested."""
    # The number belongs to the process, so one caller at a time changes it. A thread cannot lower what another one has
    # set with threadpoolctl and still holds.
    _BLAS.acquire()
    try:
        controller = _blas()
        threads = max((library.num_threads for library in controller.lib_controllers), default=1)
        if threads > 1:
            with controller.limit(limits=1):
                yield threads
            return
    finally:
        _BLAS.release()
    yield 1


def blas_limited() -> AbstractContextManager[Any]:
    """Return a context with one thread of BLAS, which may be nested."""
    import scipy.linalg  # noqa: F401 - as above
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[Any] = threadpool_limits(1, user_api="blas")
    return limits


@contextmanager
def one_torch_thread() -> Iterator[None]:
    # Callers may overlap: the last one gives the threads back.
    torch = import_module("torch")
    with _TORCH:
        _holders.append(torch.get_num_threads())
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _TORCH:
            # What the first of them has found is left to the last; the others have found one thread.
            found = _holders.pop()
            if _holders:
                _holders[0] = max(_holders[0], found)
            else:
                torch.set_num_threads(found)


def in_order(work: Callable[[Item], Made], items: Iterable[Item], workers: int) -> Iterator[Made]:
    """Yield ``work(item)`` in the order of the items, computed in `workers` threads."""
    # The queue bounds what is held: two items a worker, and the one that is taken.
    if workers < 2:
        yield from map(work, items)
        return
    pool, waiting = ThreadPoolExecutor(workers), deque[Future[Made]]()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
