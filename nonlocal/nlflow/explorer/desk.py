"""What the tabs of one page share: the way to the computing thread and back, and how errors are shown."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from panel.io import hold

from nlflow.explorer.uploads import Limits
from nlflow.explorer.widgets import Status
from nlflow.explorer.worker import Job, Worker
from nlflow.io.terminal import mendable

__all__ = ["Desk"]

_PAUSE = 0.1  # seconds between two reports of progress


@dataclass
class Desk:
    """One page.

    Attributes
    ----------
    worker : Worker
        Of all pages.
    limits : Limits
        Of uploads.
    document : bokeh Document
        Of this page.
    """

    worker: Worker
    limits: Limits
    document: Any

    def ask(
        self,
        name: str,
        status: Status,
        work: Callable[[Callable[[float], None]], Any],
        show: Callable[[Any], str | None],
        words: str = "computing …",
    ) -> None:
        """Let something be computed and shown; what was asked for before under this name is not wanted any more.

        Parameters
        ----------
        name : str
            What waits for its turn under one name: the tab.
        status : Status
            Where progress and errors are shown.
        work : callable
            Runs in the computing thread; gets a function of the share done, which may raise.
        show : callable
            Gets the result, in the page's own thread. Returns the words for the status, None where it has asked for
            more.
        words : str
            Shown meanwhile.
        """
        told = 0.0

        def tell(share: float) -> None:
            nonlocal told
            now = time.monotonic()
            if now - told > _PAUSE:
                told = now
                self.later(partial(self._busy, job, status, words, share))

        def done(job: Job) -> None:
            self.later(partial(self._finish, job, status, show))

        job = Job(work, done, tell)
        status.show(words, "busy", 0.0)
        self.worker.submit((id(self), name), job)

    def cancel(self, name: str, status: Status) -> None:
        """End what was asked for under a name."""
        self.worker.cancel((id(self), name))
        status.show("cancelled", "idle")

    def close(self) -> None:
        """End all that this page has asked for."""
        self.worker.cancel_all(lambda key: isinstance(key, tuple) and key[0] == id(self))

    def later(self, function: Callable[[], Any]) -> None:
        """Call a function in the page's own thread, with the lock of its document; from any thread."""
        if self.document is None:
            function()
        elif self.document.session_context is not None:  # the page is still there
            self.document.add_next_tick_callback(function)

    def _busy(self, job: Job, status: Status, words: str, share: float) -> None:
        if not job.cancelled and status.shown["kind"] == "busy":
            status.show(words, "busy", share)

    def _finish(self, job: Job, status: Status, show: Callable[[Any], str | None]) -> None:
        if job.cancelled:
            return
        with hold(self.document):
            if job.error is None:
                words = show(job.result)
                if words is not None:
                    status.show(words, "done", 1.0)
                return
            message = mendable(job.error)
            if message is None:
                status.show(f"internal error: {type(job.error).__name__}; please report it", "error")
                raise job.error  # for the log of the server
            status.show(message, "error")
