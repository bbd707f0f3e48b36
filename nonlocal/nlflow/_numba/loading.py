"""Compiling loops, or loading them from the cache, with the time that it takes kept."""

import time
from collections.abc import Callable
from typing import Any

from nlflow import _numba

__all__ = ["compiled"]


def compiled(dispatcher: Any, signature: Any) -> Callable[..., None]:
    """Return a loop, compiled for a signature now or loaded from the cache; the time is added to `_numba.seconds`."""
    start = time.perf_counter()
    dispatcher.compile(signature)
    _numba.seconds += time.perf_counter() - start
    function: Callable[..., None] = dispatcher
    return function
