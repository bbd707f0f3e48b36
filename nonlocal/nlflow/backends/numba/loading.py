"""Compiling loops, or loading them from the cache, with the time that it takes kept."""

import time
from collections.abc import Callable
from typing import Any

from nlflow.backends.interrupts import delivered

__all__ = ["compiled", "seconds"]

seconds = 0.0
"""Time spent so far in this process on compiling loops or loading them from the cache."""


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
