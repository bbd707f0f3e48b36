"""Ctrl-C and SIGTERM, which end a command."""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

_LATER = 0.01  # seconds


@contextmanager
def handling(number: signal.Signals, handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Let `handler` answer a signal within the context; does nothing outside the main thread."""
    try:
        before = signal.signal(number, handler)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def terminable() -> Iterator[Callable[[], bool]]:
    """Treat SIGTERM as Ctrl-C within the context; a second SIGTERM ends the process."""
    # Yields a function that tells whether SIGTERM came.
    outer = signal.getsignal(signal.SIGTERM)
    if isinstance(outer, _End):
        yield outer.has_come
        return
    end = _End()
    with handling(signal.SIGTERM, end):
        yield end.has_come


class _End:
    """The answer to SIGTERM, which remembers that it came."""

    def __init__(self) -> None:
        self._came = False

    def __call__(self, number: int, frame: Any) -> None:
        self._came = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if callable(signal.getsignal(signal.SIGINT)):
            signal.raise_signal(signal.SIGINT)
        else:  # shells ignore it for what runs in the background
            signal.default_int_handler(number, frame)

    def has_come(self) -> bool:
        """Return whether SIGTERM came."""
        return self._came


def leave(code: int) -> NoReturn:
    # Python would end with SIGINT, or with 1 if the interruption struck inside of an import or of its own end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    atexit._run_exitfuncs()  # temporary folders
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or nobody reads
            stream.flush()
    os._exit(code)


@contextmanager
def stopping() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C end a command even if a flow catches it to return what it has reached."""
    # Yields a function that raises `KeyboardInterrupt` if there was one.
    stopped = False

    def remember(number: int, frame: Any) -> None:
        nonlocal stopped
        stopped = True
        signal.default_int_handler(number, frame)

    def look() -> None:
        if stopped:
            raise KeyboardInterrupt

    with handling(signal.SIGINT, remember):
        yield look
    look()


@contextmanager
def delivered() -> Iterator[None]:
    """Send Ctrl-C again if it came while compiled code called Python, where nothing can be raised."""
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
    """A signal that is sent a moment later; it comes once, or is withdrawn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting = False

    def ask(self) -> None:
        """Send the signal later, unless it is waiting already."""
        with self._lock:
            if self._waiting:
                return
            self._waiting = True
            threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        with self._lock:
            pass  # who asks is where nothing can be raised, and may wait there for this thread to start
        time.sleep(_LATER)
        with self._lock:
            if self._waiting:
                self._waiting = False
                _interrupt()

    def withdraw(self) -> bool:
        """Cancel the signal, and return whether it was still waiting."""
        with self._lock:
            waiting, self._waiting = self._waiting, False
        return waiting


def _interrupt() -> None:
    """Send Ctrl-C to the main thread. On POSIX this ends a system call that waits."""
    main = threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, signal.SIGINT)
    else:
        _thread.interrupt_main()
