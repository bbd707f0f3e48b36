"""Conditions on tensors that a device is asked for once, along with numbers that somebody needs anyway."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a torch tensor, without loading torch."""
    return any(kind.__module__.split(".")[0] == "torch" for kind in type(value).__mro__)


class _Looks:
    def __init__(self) -> None:
        self.waiting: list[tuple[Any, Callable[[], object]]] = []
        self.wrong: Exception | None = None

    def take(self, answers: Iterable[float]) -> None:
        """Take the device's answers; the first that is no calls what raises."""
        asked, self.waiting = self.waiting, []
        for (_, look), holds in zip(asked, answers, strict=True):
            try:
                if not holds:
                    look()
            except Exception as error:
                self.wrong = error
                raise

    def ask(self) -> None:
        """Ask for all that waits, in one copy; what was wrong before is raised again."""
        if self.wrong is not None:
            raise self.wrong
        if self.waiting:
            self.take(sys.modules["torch"].stack([holds for holds, _ in self.waiting]).tolist())


_looks: ContextVar[_Looks | None] = ContextVar("looks", default=None)


@contextmanager
def looking_once() -> Iterator[None]:
    """Let what is assured of tensors inside wait for the next numbers that a device is asked for, or for the end.

    A device that is asked waits for the host, and the host for it. What was not as assured explains an error inside,
    and is raised in its place.
    """
    looks = _Looks()
    token = _looks.set(looks)
    try:
        yield
        looks.ask()
    except Exception as error:
        if looks.wrong is not error:
            looks.ask()
        raise
    finally:
        _looks.reset(token)


def assure(holds: Any, look: Callable[[], object]) -> None:
    """Call `look`, which raises, unless a condition holds: at once, or of a device later; see `looking_once`."""
    looks = _looks.get()
    if looks is None or getattr(getattr(holds, "device", None), "type", "cpu") == "cpu":
        if not bool(holds):
            look()
    else:
        looks.waiting.append((holds, look))


def waiting_looks(device: Any) -> list[Any]:
    """Return the conditions that wait for a device: whoever asks it takes them along, and calls `take_answers`."""
    looks = _looks.get()
    found = [] if looks is None else [holds for holds, _ in looks.waiting]
    return found if all(holds.device == device for holds in found) else []


def take_answers(answers: Sequence[float]) -> None:
    """Take the answers to what `waiting_looks` gave."""
    looks = _looks.get()
    if answers and looks is not None:
        looks.take(answers)


def look_now() -> None:
    """Ask for all that waits: before something is done that cannot be undone."""
    looks = _looks.get()
    if looks is not None:
        looks.ask()


@dataclass(frozen=True)
class Doubt:
    """Numbers that may lie on a device, and what of them says why a step failed, or None."""

    tell: Callable[..., str | None]
    parts: tuple[Any, ...]


_doubts: ContextVar[list[Doubt] | None] = ContextVar("doubts", default=None)


@contextmanager
def doubting(doubts: list[Doubt]) -> Iterator[None]:
    """Take down what steps on tensors may fail by: a step that fails is not finite, and whoever finds that asks why."""
    token = _doubts.set(doubts)
    try:
        yield
    finally:
        _doubts.reset(token)


def doubt(tell: Callable[..., str | None], *parts: Any) -> None:
    """Leave numbers of a step for who asks why it failed."""
    doubts = _doubts.get()
    if doubts is not None:
        doubts.append(Doubt(tell, parts))
