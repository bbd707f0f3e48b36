"""How many threads compute: the one module that counts them, and holds them to one.

A sum that threads share changes its last bits with their number, and small steps wait longer for threads than they
compute. Each library has its own threads and its own way to set them: the compiled loops of Numba, BLAS (through
threadpoolctl, which knows its builds), and torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from threading import Lock, RLock
from typing import Any

__all__ = ["cores", "counts", "described", "one_blas_thread", "one_loop_thread", "one_torch_thread"]

_LOOPS = RLock()
_BLAS = Lock()
_inside: list[Any] = []  # the limits of those who hold BLAS to one thread, the first with the number from before
_POOLS = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def counts() -> dict[str, int]:
    """Return the threads of Numba and torch; of those alone that are loaded."""
    loaded = {name: sys.modules[name] for name in ("numba", "torch") if name in sys.modules}
    return {name: int(module.get_num_threads()) for name, module in loaded.items()}


def described() -> dict[str, Any]:
    """Return the cores, the threads of compiled loops and what starts them, by name."""
    import numba

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
    """Run compiled loops in the calling thread alone, for callers that run many at a time in threads of their own.

    Numba's own pool, the layer ``workqueue``, ends a process that starts loops from two threads: with it, callers wait
    for each other.
    """
    import numba

    before = numba.get_num_threads()
    with ExitStack() as stack:
        if described()["numba_threading_layer"] == "workqueue":
            stack.enter_context(_LOOPS)
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


@contextmanager
def one_blas_thread() -> Iterator[int]:
    """Hold BLAS to one thread, and tell how many it had; several callers may hold it at a time.

    The number belongs to the process: the last caller that leaves sets it as it was before the first.
    """
    controller = _blas()
    with _BLAS:
        threads = max((library.num_threads for library in controller.lib_controllers), default=1)
        _inside.append(controller.limit(limits=1))
    try:
        yield threads
    finally:
        with _BLAS:
            if len(_inside) == 1:
                _inside[0].restore_original_limits()
            _inside.pop()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch compute on one thread of the CPU."""
    torch = import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
