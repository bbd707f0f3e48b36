"""Compiling and loading loops."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from nlflow.backends.interrupts import delivered
from nlflow.errors import shortened, warn_caller

seconds = 0.0
"""Time spent so far in this process on compiling loops or loading them from the cache."""

uncached = False
"""Whether a loop was met that no cache keeps."""

tell: Callable[[], None] | None = None
"""Called once, when the first loop is compiled that the cache lacks: that takes long."""


def njit(*signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return Numba's decorator, without a cache if no folder for it can be written."""
    import numba

    cache = options.pop("cache", False)

    def decorate(function: Callable[..., Any]) -> Any:
        with _always():
            dispatcher = numba.njit(*signature, **options)(function)
        if cache:
            try:
                dispatcher.enable_caching()
            except (RuntimeError, OSError) as error:
                _without_cache(dispatcher, error)
        return dispatcher

    return decorate


@contextmanager
def _always() -> Iterator[None]:
    """Compile under ``NUMBA_DISABLE_JIT`` too, which is meant for the caller's functions, in one thread at a time.

    What is called by its address has no form in Python.
    """
    from numba.core import config
    from numba.core.compiler_lock import global_compiler_lock

    with global_compiler_lock:  # the setting, and the symbol that `linked` sets, are those of all threads
        before, config.DISABLE_JIT = config.DISABLE_JIT, 0
        try:
            yield
        finally:
            config.DISABLE_JIT = before


def _without_cache(dispatcher: Any, error: Exception) -> None:
    from numba.core.caching import NullCache

    global uncached
    dispatcher._cache = NullCache()
    if not uncached:
        uncached = True
        warn_caller(
            f"compiled loops cannot be kept ({shortened(error)}): every process compiles those that it needs, some "
            "seconds each; let NUMBA_CACHE_DIR name a folder that can be written",
        )


def compiled(dispatcher: Any, signature: Any) -> Callable[..., None]:
    """Compile a loop for a signature or load it from the cache; the time is added to `seconds`."""
    global seconds
    from nlflow.backends.numba.launch import linked

    start = time.perf_counter()
    with delivered(), _always(), _told(), linked():
        try:
            dispatcher.compile(signature)
        except Exception as error:  # Numba keeps loops as pickles, and raises whatever a broken one does
            if not isinstance(error, (OSError, EOFError)) and type(error).__name__ != "UnpicklingError":
                raise
            _without_cache(dispatcher, error)
            dispatcher.compile(signature)
    seconds += time.perf_counter() - start
    function: Callable[..., None] = dispatcher
    return function


@contextmanager
def _told() -> Iterator[None]:
    """Have Numba say when it compiles, which it does not where it finds a loop in the cache."""
    if tell is None:
        yield
        return
    from numba.core import event

    class Told(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            global tell
            said, tell = tell, None
            if said is not None:
                said()

        def on_end(self, event: Any) -> None:
            pass

    with event.install_listener("numba:compile", Told()):
        yield


def loader(loops: Callable[[Any], dict[str, tuple[Any, ...]]]) -> Callable[..., Callable[..., None]]:
    """Return the function ``loop(name, dtype)`` of a module of loops, which compiles one or loads it from the cache."""
    # `loops` takes Numba's type of a float to {name: (loop, type of the first argument, ...)}. The first arguments may
    # be what the loop calls by address (`nlflow.backends.numba.calls.Callee`), the last of them compiled first; who
    # calls the loop leaves them out.

    @cache
    def loop(name: str, dtype: str = "float64") -> Callable[..., None]:
        from numba import types

        from nlflow.backends.numba.calls import Callee

        function, *arguments = loops(types.float32 if dtype == "float32" else types.float64)[name]
        called = [argument for argument in arguments if isinstance(argument, Callee)]
        for callee in reversed(called):
            compiled(callee.function, types.void(*callee.arguments))
        addresses = [callee.address() for callee in called]
        ready = compiled(function, types.void(*[types.intp] * len(called), *arguments[len(called) :]))
        return partial(ready, *addresses) if called else ready

    return loop
