"""Links out of folders: what lies in a folder that somebody was given must not name other files of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from nlflow.errors import file_error


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether a name in a folder is a link to something outside."""
    return path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_links(folder: Path, entries: Iterable[Path], expected: str) -> None:
    """Refuse a folder of which an entry is a link that leads out: a reader takes what is there for a part of it."""
    for entry in entries:
        if leads_out(entry, folder):
            got = f"the link {os.path.relpath(entry, folder)!r} in it, which leads to {os.path.realpath(entry)}"
            raise file_error(folder, got, f"{expected} without links to other places", "copy what is meant into it")


def links_in(folder: Path) -> Iterator[Path]:
    """Yield the links in a folder and in those inside, which are not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                yield Path(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                yield from links_in(Path(entry.path))
