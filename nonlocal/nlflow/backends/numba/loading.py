"""Compiling loops, or loading them from the cache, with the time that it takes kept."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any

from nlflow.backends.interrupts import delivered

__all__ = ["compiled", "loader", "one_thread", "seconds"]

seconds = 0.0
"""Time spent so far in this process on compiling loops or loading them from the cache."""

_LOCK = Lock()


def compiled(dispatcher: Any, signature: Any) -> Callable[..., None]:
    """Return a loop, compiled for a signature now or loaded from the cache; the time is added to `seconds`.

    Ctrl-C meanwhile ends it.
    """
    global seconds
    start = time.perf_counter()
    with delivered():
        dispatcher.compile(signature)
    seconds += time.perf_counter() - start
    function: Callable[..., None] = dispatcher
    return function


def loader(loops: Callable[[Any], dict[str, tuple[Any, ...]]]) -> Callable[..., Callable[..., None]]:
    """Return the function ``loop(name, dtype)`` of a module of loops, which compiles one or loads it from the cache.

    Parameters
    ----------
    loops : callable
        Numba's type of a float to {name: (loop, type of the first argument, ...)}.
    """

    @cache
    def loop(name: str, dtype: str = "float64") -> Callable[..., None]:
        from numba import types

        function, *arguments = loops(types.float32 if dtype == "float32" else types.float64)[name]
        return compiled(function, types.void(*arguments))

    return loop


@contextmanager
def one_thread() -> Iterator[None]:
    """Run loops in the calling thread alone, for callers that run many at a time in threads of their own."""
    import numba

    before = numba.get_num_threads()
    with ExitStack() as stack:
        if not _thread_safe():
            stack.enter_context(_LOCK)
        numba.set_num_threads(1)
        try:
            yield
        finally:
            numba.set_num_threads(before)


@cache
def _thread_safe() -> bool:
    """Tell whether loops may be started from several threads: numba's own pool of threads ends the process then."""
    import numba

    pools = {"tbb": ("tbbpool",), "omp": ("omppool",), "workqueue": ()}
    for pool in pools.get(numba.config.THREADING_LAYER, ("tbbpool", "omppool")):
        try:
            import_module(f"numba.np.ufunc.{pool}")
        except ImportError:
            continue
        return True
    return False
