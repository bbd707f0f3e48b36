"""A disk that is full, and a folder that cannot be written."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from validation.robustness.contract import Row
from validation.robustness.faults.processes import Tally, differs, prepared, problem_left, run, tell_tale, undisturbed
from validation.robustness.faults.victims import Flow, Victim

__all__ = ["full_disk", "mountable", "read_only", "sizes_for"]


@contextmanager
def _small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a file system in memory of so many bytes."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


def _remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def mountable(folder: Path) -> bool:
    """Return whether file systems can be mounted here, which takes a superuser."""
    place = folder / "try"
    try:
        with _small_disk(place, 2**16):
            return True
    except (OSError, subprocess.CalledProcessError):
        shutil.rmtree(place, ignore_errors=True)
        return False


def full_disk(victim: Victim, sizes: list[int], folder: Path) -> Row:
    """Let a victim run on disks that are too small, then make room and let it go on.

    A flow is to warn and to go on without a checkpoint as far as the solution, which it cannot write; others are to end
    with the reason. What was done before is there, and with room they come to the result of an undisturbed run.

    Parameters
    ----------
    victim : Victim
    sizes : list of int
        In bytes; each is tried.
    folder : Path
    """
    tally = Tally(f"full disk (tmpfs): {victim.name}", folder)
    expected = undisturbed(victim, folder / "undisturbed")
    for size in sizes:
        inputs = prepared(victim, folder / f"{size}-inputs")
        with _small_disk(folder / f"{size}", size) as place:
            for entry in inputs.iterdir():  # inputs lie elsewhere
                (place / entry.name).symlink_to(entry.resolve())
            ended = run(victim, place)
            trouble = tell_tale(ended, (0, 1))
            if trouble is None and ended.code == 1 and "No space left on device" not in ended.text:
                trouble = f"it does not say why it ends: {ended.text[-300:]}"
            done = victim.finished(place) if trouble is None and victim.begun(place) else {}
            left = [entry.name for entry in place.rglob(".nlflow-*.tmp")]
            if trouble is None and left:
                trouble = f"half a file is left behind: {left[0]}"
            _remount(place, f"size={2**28}")
            more = run(victim, place)
            trouble = trouble or tell_tale(more, (0,))
            trouble = trouble or differs(victim, place, expected)
            gone = problem_left(victim, place, done) if trouble is None else None
        tally.note(trouble, gone, f"{size} bytes")
        said = "ended with the reason" if ended.code == 1 else "had room enough"
        tally.outcomes[f"{said}, went on to the same bits" if trouble is None else "not gone on"] += 1
    return tally.row(len(sizes), sizes=sizes)


def read_only(victim: Victim, folder: Path) -> Row:
    """Let a victim run in a folder that cannot be written, first empty, then with all that is done.

    It is to end with the reason, and nothing is to change.
    """
    tally = Tally(f"folder that cannot be written: {victim.name}", folder)
    expected = undisturbed(victim, folder / "undisturbed")
    for kind in ("empty", "done"):
        place = prepared(victim, folder / kind)
        if kind == "done":
            run(victim, place)
        with _not_writable(place):
            ended = run(victim, place)
        trouble = tell_tale(ended, (0, 1) if kind == "done" else (1,))
        if trouble is None and kind == "done":
            trouble = differs(victim, place, expected)
        good = tally.note(trouble, where=kind)
        tally.outcomes["refused with the reason, nothing changed" if good else "wrong"] += 1
    return tally.row(tally.outcomes.total())


@contextmanager
def _not_writable(folder: Path) -> Iterator[None]:
    """Take the right to write from a folder; from a superuser too, by mounting it over itself."""
    if os.geteuid() != 0:
        paths = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
        for path in paths:
            path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        try:
            yield
        finally:
            for path in paths:
                path.chmod(stat.S_IRWXU)
        return
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        _remount(folder, "bind,ro")
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def sizes_for(victim: Victim) -> list[int]:
    """Return sizes of disks between too small for anything and nearly enough."""
    pages = (2, 6, 12, 24) if isinstance(victim, Flow) else (4, 10, 20, 32)
    return [4096 * count for count in pages]
