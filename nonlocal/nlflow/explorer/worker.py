"""The one thread that computes: compiled loops may not be started from several threads at a time.

A page asks with a key, its session and its tab. A newer job of a key takes the place of an older one that waits, and
ends an older one that runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Cancelled", "Job", "Worker"]


class Cancelled(BaseException):  # no error, and nothing that catches errors may catch it
    """Raised inside a job that is not wanted any more, at its next report of progress."""


@dataclass(eq=False)
class Job:
    """A computation that was asked for.

    Attributes
    ----------
    work : callable
        Gets `progress`, a function of the share done, and returns a result.
    done : callable
        Gets this job when it has ended, whatever way, in the computing thread; not called for one that was cancelled.
    told : callable, optional
        Gets the share done, in the computing thread.
    result : object
        What `work` returned.
    error : Exception or None
        What it raised.
    cancelled : bool
        Whether it is not wanted any more. It ends at its next report of progress, without a result.
    """

    work: Callable[[Callable[[float], None]], Any]
    done: Callable[[Job], Any]
    told: Callable[[float], Any] = lambda share: None
    result: Any = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)

    def progress(self, share: float) -> None:
        """Report the share done; raise `Cancelled` where the job is not wanted any more."""
        if self.cancelled:
            raise Cancelled
        self.told(share)

    def run(self) -> None:
        """Do the work and report."""
        if self.cancelled:
            return
        try:
            self.result = self.work(self.progress)
        except Cancelled:
            return
        except Exception as error:  # the page shows it; the thread goes on for others
            self.error = error
        if not self.cancelled:
            self.done(self)


class Worker:
    """A thread with a queue in which each key has its newest job alone; keys take turns."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, Job] = {}  # in the order in which they were asked for
        self._running: tuple[Hashable, Job] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="nlflow-explorer", daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, job: Job) -> None:
        """Queue a job; older ones of its key are cancelled."""
        with self._changed:
            self._forget(lambda other: other == key)
            self._waiting[key] = job
            self._changed.notify_all()

    def cancel_all(self, belongs: Callable[[Hashable], bool]) -> None:
        """Cancel the jobs of all keys for which `belongs` holds: those of a tab, or of a session that has ended."""
        with self._changed:
            self._forget(belongs)

    def close(self, timeout: float = 5.0) -> None:
        """End the thread, after the job that it is at."""
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
            except Exception:  # in what a page does about a result: others want theirs all the same
                logging.getLogger(__name__).exception("the page could not take up a result")
            finally:
                with self._changed:
                    self._running = None
