"""What the tabs share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from panel.io import hold

from nlflow.desk.explorer.texts import note, refused
from nlflow.desk.explorer.uploads import Limits, shown_name, unpacked
from nlflow.desk.explorer.widgets import (
    COMPUTING,
    Code,
    Status,
    Upload,
    column,
    heading,
    markup,
    obey,
    stale,
    word_of,
)
from nlflow.desk.explorer.worker import Job, Worker
from nlflow.desk.terminal import mendable
from nlflow.errors import InputError, shortened

T = TypeVar("T")
Answer = Callable[[str], str | None]
"""Gets words and returns what the status says, or None if a further job was asked for."""

_PAUSE = 0.1  # seconds between two reports of progress


@dataclass
class Desk:
    """One page."""

    worker: Worker  # of all pages
    limits: Limits  # of uploads
    document: Any  # of this page
    loop: asyncio.AbstractEventLoop | None = None  # of the page's own thread, where there is a document

    def later(self, function: Callable[[], Any]) -> None:
        """Call a function in the thread of the page, with the lock of its document; any thread may call this."""
        if self.loop is None:
            function()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._ask, function)

    def _ask(self, function: Callable[[], Any]) -> None:
        if self.document.session_context is not None:  # the page is still there
            self.document.add_next_tick_callback(function)

    def close(self) -> None:
        self.worker.cancel_all(lambda key: isinstance(key, tuple) and key[0] == id(self))


class Report:
    """Functions that a job calls while it runs; `glimpse` gets one that draws in the thread of the page."""

    def __init__(self, tell: Callable[[float], Any], glimpse: Callable[[Callable[[], Any]], Any]) -> None:
        self._tell, self.glimpse = tell, glimpse

    def __call__(self, share: float) -> None:
        """Tell the share done."""
        self._tell(share)


class Tab:
    """A tab: `panel` holds controls, a status line, views, numbers and texts to copy."""

    name: ClassVar[str]
    panel: Any
    shown: Sequence[Any] = ()
    controls: Mapping[str, Any]

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.started = self._is_grey = False
        self._is_restored = False  # controls are being set: nothing is to be computed until all are
        self._turn = 0  # of answers: each begins the wait anew after which what is shown turns grey
        self.status = Status(lambda _: self._cancel())
        self._awaited: Mapping[str, str] = {}  # an address whose file is not open yet
        self.refusal = markup()  # what was not taken
        self.figures, self.code = markup(note(COMPUTING)), Code()

    def start(self) -> None:
        """Compute and show."""
        raise NotImplementedError

    def reset(self) -> None:
        """Reset the controls."""
        raise NotImplementedError

    def undo(self) -> None:
        self._set(self.reset)
        self.start()

    @property
    def file(self) -> str:
        """The shown file."""
        return ""

    def words(self) -> dict[str, str]:
        words = {name: word_of(one) for name, one in self.controls.items() if one.visible}
        return {"file": self.file, **words} if self.file else words

    def restore(self, words: Mapping[str, str]) -> list[str]:
        """Set the controls to what an address says, and return what they cannot be set to.

        What an address says of another file waits until that is opened.
        """
        if self._awaits(words):
            self._awaited = words
            self._set(self.reset)
            got, shown = repr(shortened(words["file"])), repr(self.file)
            return [f"file: got {got}, expected {shown}, which is open; open the other, and its settings are used"]
        faults: list[str] = []

        def take() -> None:
            self.reset()
            for name in filter(words.__contains__, self.controls):  # in the order of the controls
                try:
                    obey(name, self.controls[name], words[name])
                except InputError as error:
                    faults.append(str(error))

        self._set(take)
        known = tuple(self.words())
        for name in words.keys() - known:
            got, what = repr(shortened(words[name])), "this set-up" if name in self.controls else "this tab"
            faults.append(f"{shortened(name)}: got {got}, expected a setting that {what} has: {', '.join(known)}")
        return faults

    def _awaits(self, words: Mapping[str, str]) -> bool:
        return bool(self.file) and words.get("file", self.file) != self.file

    def recall(self) -> bool:
        if not self._awaited or self._awaited["file"] != self.file:
            return False
        words, self._awaited = self._awaited, {}
        self.refusal.object = refused(*self.restore(words))
        return True

    def _set(self, change: Callable[[], Any]) -> None:
        self._is_restored = True
        try:
            change()
            self.start()  # which adapts the controls to each other
        finally:
            self._is_restored = False

    def below(self) -> tuple[Any, Any]:
        return column(heading("Numbers"), self.figures), column(heading("The same from a program"), self.code)

    def ask(
        self,
        work: Callable[[Report], T],
        show: Callable[[T], str | None],
        words: str = "computing …",
        what: str = "view",
        failed: Answer = lambda message: message,
    ) -> None:
        """Compute something in the computing thread and show it; an older job for the same purpose is ended.

        `show`, or `failed` with the message of an error that a user can mend, runs in the thread of the page and
        returns a text for the status line, or None.
        """
        if self._is_restored:
            return
        told = 0.0

        def tell(share: float) -> None:
            nonlocal told
            now = time.monotonic()
            if now - told > _PAUSE:
                told = now
                self._desk.later(partial(self._busy, job, words, share))

        def glimpse(show: Callable[[], Any]) -> None:
            job.seen = True
            self._desk.later(partial(self._glimpse, job, show))

        job = Job(
            lambda tell: work(Report(tell, glimpse)),
            lambda job: self._desk.later(partial(self._finish, job, show, failed)),
            tell,
        )
        self.status.say(words, "busy")
        if what == "view":
            self._grey()
        if what != "view":
            self.drop(what)  # nobody wants the older file any more
        self._desk.worker.submit((id(self._desk), self.name, what), job)

    def open_button(
        self,
        name: str,
        label: str,
        hint: str,
        suffixes: tuple[str, ...],
        read: Callable[[str, bytes, Limits], T],
        show: Callable[[T], str | None],
        failed: Answer = lambda message: message,
        *,
        replaces: bool = False,
    ) -> Upload:
        limits = self._desk.limits

        def take(data: Any) -> None:
            called = shown_name(str(data["name"]))
            if replaces:
                self._grey()
            self.ask(lambda tell: read(*unpacked(data, limits), limits), show, f"reading {called} …", "file", failed)

        accept = ",".join(suffixes)
        return Upload(take, name=name, label=label, hint=hint, accept=accept, limit=limits.content)

    def drop(self, *what: str) -> None:
        mine = id(self._desk), self.name, *what
        self._desk.worker.cancel_all(lambda key: isinstance(key, tuple) and key[: len(mine)] == mine)

    def _cancel(self) -> None:
        self.drop()
        self.status.say("cancelled: what is grey is the last result" if self._is_grey else "cancelled")

    def _grey(self) -> None:
        """Let what is shown turn grey if nothing newer comes soon."""
        self._is_grey = True
        for part in self.shown:
            stale(part, self._turn)

    def _answered(self, job: Job, parts: Sequence[Any]) -> None:
        """Show some parts in full again; for a job that is superseded, until the next answer is late."""
        self._turn += 1
        for part in parts:
            stale(part, self._turn if job.superseded else None)

    def _glimpse(self, job: Job, show: Callable[[], Any]) -> None:
        if not job.cancelled:
            with hold(self._desk.document):
                self._answered(job, self.shown[:1])
                show()

    def _busy(self, job: Job, words: str, share: float) -> None:
        if not job.cancelled and self.status.shown["kind"] == "busy":
            self.status.say(words, "busy", share)

    def _finish(self, job: Job, show: Callable[[Any], str | None], failed: Answer) -> None:
        if job.cancelled:
            return
        with hold(self._desk.document):
            if job.error is None:
                self._is_grey = job.superseded
                self._answered(job, self.shown)
                words = show(job.result)
                if words is not None and not job.superseded:
                    self.status.say(words, "done", 1.0)
                return
            message = mendable(job.error)
            if message is None:
                self.status.say(f"internal error: {type(job.error).__name__}; please report it", "error")
                raise job.error  # for the log of the server
            words = None if job.superseded else failed(message)  # the newer job tells of its own
            if words is not None:
                self.status.say(words, "error")
