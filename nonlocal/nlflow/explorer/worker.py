"""The one thread that computes: compiled loops may not be started from several threads at a time.

A page asks with a key, its session and its tab. A newer job of a key takes the place of an older one that waits, and
ends an older one that runs.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

__all__ = ["Cancelled", "Job", "Worker"]


class Cancelled(BaseException):  # no error, and nothing that catches errors may catch it
    """Raised inside a job that is not wanted any more, at its next report of progress."""


class Job:
    """A computation that was asked for.

    Parameters
    ----------
    work : callable
        Gets `progress`, a function of the share done, and returns a result.
    done : callable
        Gets this job when it has ended, whatever way, in the computing thread; not called for one that was cancelled.
    told : callable, optional
        Gets the share done, in the computing thread.

    Attributes
    ----------
    result : object
        What `work` returned.
    error : Exception or None
        What it raised.
    """

    def __init__(
        self,
        work: Callable[[Callable[[float], None]], Any],
        done: Callable[[Job], Any],
        told: Callable[[float], Any] | None = None,
    ) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self._work, self._done, self._told = work, done, told
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """Whether it is not wanted any more."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Let it end at its next report of progress, without a result."""
        self._cancelled.set()

    def progress(self, share: float) -> None:
        """Report the share done; raise `Cancelled` where the job is not wanted any more."""
        if self.cancelled:
            raise Cancelled
        if self._told is not None:
            self._told(share)

    def run(self) -> None:
        """Do the work and report."""
        if self.cancelled:
            return
        try:
            self.result = self._work(self.progress)
        except Cancelled:
            return
        except Exception as error:  # the page shows it; the thread goes on for others
            self.error = error
        if not self.cancelled:
            self._done(self)


class Worker:
    """A thread with a queue in which each key has its newest job alone; keys take turns."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Hashable, Job] = OrderedDict()
        self._running: tuple[Hashable, Job] | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="nlflow-explorer", daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, job: Job) -> Job:
        """Queue a job; older ones of its key are cancelled."""
        with self._changed:
            self._forget(key)
            self._waiting[key] = job
            self._changed.notify_all()
        return job

    def cancel(self, key: Hashable) -> None:
        """Cancel the jobs of a key."""
        with self._changed:
            self._forget(key)

    def cancel_all(self, belongs: Callable[[Hashable], bool]) -> None:
        """Cancel the jobs of all keys for which `belongs` holds: those of a session that has ended."""
        with self._changed:
            running = [] if self._running is None else [self._running[0]]
            for key in [key for key in (*self._waiting, *running) if belongs(key)]:
                self._forget(key)

    def close(self, timeout: float = 5.0) -> None:
        """End the thread, after the job that it is at."""
        with self._changed:
            self._closed = True
            for job in self._waiting.values():
                job.cancel()
            self._waiting.clear()
            if self._running is not None:
                self._running[1].cancel()
            self._changed.notify_all()
        self._thread.join(timeout)

    def _forget(self, key: Hashable) -> None:
        older = self._waiting.pop(key, None)
        if older is not None:
            older.cancel()
        if self._running is not None and self._running[0] == key:
            self._running[1].cancel()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                key, job = self._waiting.popitem(last=False)
                self._running = key, job
            try:
                job.run()
            except Exception:  # in what a page does about a result: others want theirs all the same
                logging.getLogger(__name__).exception("the page could not take up a result")
            finally:
                with self._changed:
                    self._running = None
