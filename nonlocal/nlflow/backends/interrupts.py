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
    before, again = sys.unraisablehook, _Again()

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            again.ask()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    except BaseException:
        again.withdraw()
        raise
    finally:
        sys.unraisablehook = before
    if again.withdraw():
        raise KeyboardInterrupt


class _Again:
    """One signal that is to come a moment later, and comes once or is taken back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = False

    def ask(self) -> None:
        """Let it come, unless it is on its way."""
        with self._lock:
            if self._waiting:
                return
            self._waiting = True
        timer = threading.Timer(_LATER, self._send)
        timer.daemon = True
        timer.start()

    def _send(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting = False
                _interrupt()

    def withdraw(self) -> bool:
        """Take it back, and return whether it was still to come."""
        with self._lock:
            waiting, self._waiting = self._waiting, False
        return waiting


def _interrupt() -> None:
    """Send Ctrl-C to the main thread; on POSIX a wait of the system ends for it."""
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()
