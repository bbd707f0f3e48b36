"""Ctrl-C where Python cannot raise it."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["delivered"]

_LATER = 0.01  # seconds


@contextmanager
def delivered() -> Iterator[None]:
    """Deliver Ctrl-C again that came in a callback of compiled code, of LLVM while it loads a loop for instance.

    Nothing can be raised there: Python would print a trace, and go on as if nobody had asked. Signals are answered in
    the main thread, so that in others there is nothing to do.

    Raises
    ------
    KeyboardInterrupt
        At the end, if it was not delivered before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = sys.unraisablehook
    waiting: list[threading.Timer] = []

    def again(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            before(unraisable)
            return
        timer = threading.Timer(_LATER, _interrupt)
        timer.daemon = True
        waiting.append(timer)
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    except BaseException:
        _withdrawn(waiting)
        raise
    finally:
        sys.unraisablehook = before
    if _withdrawn(waiting):
        raise KeyboardInterrupt


def _withdrawn(waiting: list[threading.Timer]) -> bool:
    """Take back what has not been sent yet, and return whether there was any."""
    left = [timer for timer in waiting if not timer.finished.is_set()]
    for timer in left:
        timer.cancel()
    return bool(left)


def _interrupt() -> None:
    """Send Ctrl-C to the main thread, which a wait of the system then ends for."""
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()
