"""Ctrl-C in callbacks of compiled code, in which Python can raise nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from nlflow.backends.interrupts import delivered
from nlflow.backends.numba.loading import compiled

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals can be sent to a process on POSIX only")


@pytest.fixture(autouse=True)
def _python_answers_signals() -> Any:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background has it ignored
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def ignored(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Python could not raise, and nobody took care of."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: found.append(unraisable.exc_type))
    return found


def strike() -> None:
    """Let a signal come while compiled code calls Python."""

    def struck() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.002)

    ctypes.CFUNCTYPE(None)(struck)()


def test_python_alone_loses_it(ignored: list[Any]) -> None:
    strike()
    time.sleep(0.05)
    assert ignored == [KeyboardInterrupt]


def test_it_is_delivered_again(ignored: list[Any]) -> None:
    def work() -> None:
        strike()
        time.sleep(30)

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), delivered():
        work()
    assert time.monotonic() - began < 20
    assert ignored == []


def test_it_is_delivered_at_the_end(ignored: list[Any]) -> None:
    with pytest.raises(KeyboardInterrupt):
        compiled(SimpleNamespace(compile=lambda signature: strike()), None)
    time.sleep(0.05)  # it would come twice
    assert ignored == []


def test_two_come_as_one(ignored: list[Any]) -> None:
    cleaned = False

    def work() -> None:
        nonlocal cleaned
        try:
            strike()
            strike()
            time.sleep(30)
        finally:
            time.sleep(0.05)
            cleaned = True

    with pytest.raises(KeyboardInterrupt), delivered():
        work()
    assert cleaned
    assert ignored == []


def test_another_error_takes_its_place(ignored: list[Any]) -> None:
    def fail() -> None:
        strike()
        raise ValueError("no such loop")

    with pytest.raises(ValueError, match="no such loop"), delivered():
        fail()
    time.sleep(0.05)
    assert ignored == []


def test_other_errors_and_threads_are_left_alone(ignored: list[Any]) -> None:
    def fail() -> None:
        raise ValueError

    hook = sys.unraisablehook
    with delivered():
        assert sys.unraisablehook is not hook
        ctypes.CFUNCTYPE(None)(fail)()
    assert ignored == [ValueError]
    assert sys.unraisablehook is hook
    seen: list[Any] = []

    def elsewhere() -> None:
        with delivered():
            seen.append(sys.unraisablehook)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [hook]
