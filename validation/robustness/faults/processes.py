"""Starting a victim, doing something to it, and looking at what is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nlflow.errors import NlflowError
from validation.robustness import ROOT
from validation.robustness.contract import Row
from validation.robustness.faults.victims import Victim

__all__ = [
    "LIMIT",
    "Ended",
    "Running",
    "Tally",
    "differs",
    "prepared",
    "problem_left",
    "run",
    "tell_tale",
    "undisturbed",
]

LIMIT = 600.0  # seconds after which a process hangs


class Tally:
    """What comes of one fault while it is tried: how calls ended, what was lost, and what was wrong.

    Parameters
    ----------
    fault : str
        What is done.
    folder : Path
        For the files of the calls; removed at the end.
    """

    def __init__(self, fault: str, folder: Path) -> None:
        self.fault, self.folder, self._began = fault, folder, time.monotonic()
        self.outcomes: Counter[str] = Counter()
        self.lost: list[str] = []
        self.wrong: list[str] = []

    def note(self, trouble: str | None, gone: str | None = None, where: str = "") -> bool:
        """Keep what was wrong and what was lost in a call; return whether nothing was."""
        before = f"{where}: " if where else ""
        if trouble is not None:
            self.wrong.append(before + trouble)
        if gone is not None:
            self.lost.append(before + gone)
        return trouble is None and gone is None

    def row(self, tried: int, **details: Any) -> Row:
        """Return the row of so many calls."""
        shutil.rmtree(self.folder)
        found = {**details, "wrong": self.wrong, "lost": self.lost}
        spent = time.monotonic() - self._began
        return Row(self.fault, tried, dict(self.outcomes), len(self.lost), len(self.wrong), spent, found)


@dataclass(frozen=True)
class Ended:
    """How a process ended: exit status (negative for a signal) and what it said."""

    code: int
    text: str


def _listen() -> None:
    """Let Ctrl-C reach the program: what a shell starts in the background inherits that it is ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Running:
    """A process of a victim; what it says goes to a file, so that it never waits for a reader."""

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        paths = [str(ROOT / "nonlocal"), str(ROOT)]
        known = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # closed when the process has ended
        self.process = subprocess.Popen(
            command, stdout=self._said, stderr=subprocess.STDOUT, env=known, cwd=ROOT, preexec_fn=_listen
        )

    def wait_until(self, condition: Any) -> bool:
        """Wait for a condition, and return whether it came before the end of the process."""
        deadline = time.monotonic() + LIMIT
        while self.process.poll() is None and time.monotonic() < deadline:
            if condition():
                return True
            time.sleep(0.002)
        return bool(condition())

    def ended_within(self, seconds: float) -> bool:
        """Wait so long for the end, and return whether it came."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: int) -> bool:
        """Send a signal; return whether the process was still there to get it."""
        if self.process.poll() is not None:
            return False
        self.process.send_signal(number)
        return True

    def end(self, limit: float = LIMIT) -> Ended:
        """Wait for the end, at most so many seconds."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = 999
        text = self.said()
        self._said.close()
        return Ended(code, text)

    def said(self) -> str:
        """Return what the process has said so far."""
        number = self._said.fileno()  # whose place is that of the process, too: it must not move
        return os.pread(number, os.fstat(number).st_size, 0).decode(errors="replace")


def run(victim: Victim, folder: Path, environment: Mapping[str, str] | None = None) -> Ended:
    """Call a victim and wait for its end."""
    return Running(victim.command(folder), environment).end()


def prepared(victim: Victim, place: Path) -> Path:
    """Return a new folder with the inputs of a victim."""
    place.mkdir(parents=True)
    victim.prepare(place)
    return place


def undisturbed(victim: Victim, place: Path) -> Any:
    """Return the result of a run that nobody disturbs."""
    trouble = tell_tale(run(victim, prepared(victim, place)), (0,))
    if trouble is not None:
        raise RuntimeError(f"{victim.name}: the undisturbed run failed: {trouble}")
    return victim.result(place)


def tell_tale(ended: Ended, codes: tuple[int, ...]) -> str | None:
    """Return what is wrong with how a process ended; None if nothing is."""
    if ended.code == 999:
        return "it hangs"
    if "Traceback" in ended.text:
        return f"a stack trace: {ended.text[-600:]}"
    if ended.code not in codes:
        return f"exit status {ended.code}, expected one of {codes}: {ended.text[-600:]}"
    return None


def differs(victim: Victim, folder: Path, expected: object) -> str | None:
    """Return how a result is not that of an undisturbed run; None if it is."""
    try:
        found = victim.result(folder)
    except (OSError, ValueError, KeyError) as error:
        return f"no result that can be read: {error}"
    return None if found == expected else "another result than that of an undisturbed run"


def problem_left(victim: Victim, folder: Path, before: Mapping[str, Any]) -> str | None:
    """Return what was lost of what was done; None if nothing was."""
    try:
        done = victim.finished(folder)
    except (NlflowError, OSError, ValueError, KeyError) as error:
        return f"what was done cannot be read: {error}"
    if "steps" in before:  # a flow: it must not stand at an earlier step
        return None if done.get("steps", -1) >= before["steps"] else f"from step {before['steps']} back to {done}"
    lost = sorted(name for name in before if name not in done)
    if lost:
        return f"no longer there: {', '.join(lost)}"
    again = sorted(name for name, mark in before.items() if done[name] != mark)
    return f"done again: {', '.join(again)}" if again else None
