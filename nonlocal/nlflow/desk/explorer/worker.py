"""The computing thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 1.0  # seconds that a superseded job may take to show something


class Cancelled(BaseException):  # not an error: code that catches errors must not catch it
    """Raised within a cancelled job."""


@dataclass(eq=False)
class Job:
    """One computation."""

    # Gets `progress`, a function of the share done, and returns a result.
    work: Callable[[Callable[[float], None]], Any]
    # Gets this job in the computing thread when it has a result or an error; not called if the job was cancelled.
    done: Callable[[Job], Any]
    told: Callable[[float], Any] = lambda share: None  # gets the share done, in the computing thread
    result: Any = field(default=None, init=False)  # what `work` returned
    error: Exception | None = field(default=None, init=False)  # what it raised
    # Set by the worker. The job then ends at its next report of progress, without a result.
    cancelled: bool = field(default=False, init=False)
    # Set by the worker: there is a newer job of the same key, so this one ends soon, with a result or without.
    superseded: bool = field(default=False, init=False)
    # Whether the job has shown something before its result; its owner says so.
    seen: bool = field(default=False, init=False)
    _begun: float = field(default=0.0, init=False)

    def progress(self, share: float) -> None:
        late = self.seen or time.monotonic() - self._begun > PATIENCE
        if self.cancelled or (self.superseded and late):
            raise Cancelled
        self.told(share)

    def run(self) -> None:
        if self.cancelled:
            return
        self._begun = time.monotonic()
        try:
            self.result = self.work(self.progress)
        except Cancelled:
            return
        except Exception as error:  # the page shows it; the thread goes on
            self.error = error
        if not self.cancelled:
            self.done(self)


class Worker:
    """A thread with a queue that holds the newest job of each key."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, Job] = {}  # in the order of arrival
        self._running: tuple[Hashable, Job] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="nlflow-explorer", daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, job: Job) -> None:
        """Queue a job; a waiting one of its key is cancelled, a running one is asked to end."""
        with self._changed:
            if key in self._waiting:
                self._waiting.pop(key).cancelled = True
            if self._running is not None and self._running[0] == key:
                self._running[1].superseded = True
            self._waiting[key] = job
            self._changed.notify_all()

    def cancel_all(self, belongs: Callable[[Hashable], bool]) -> None:
        with self._changed:
            self._forget(belongs)

    def close(self, timeout: float = 5.0) -> None:
        with self._changed:
            self._closed = True
            self._forget(lambda key: True)
            self._changed.notify_all()
        self._thread.join(timeout)

    def _forget(self, belongs: Callable[[Hashable], bool]) -> None:
        for key in [key for key in self._waiting if belongs(key)]:
            self._waiting.pop(key).cancelled = True
        if self._running is not None and belongs(self._running[0]):
            self._running[1].cancelled = True

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                key = next(iter(self._waiting))
                self._running = key, self._waiting.pop(key)
            try:
                self._running[1].run()
            except Exception:  # a page failed to show a result; the other pages go on
                logging.getLogger(__name__).exception("the page could not take up a result")
            finally:
                with self._changed:
                    self._running = None
