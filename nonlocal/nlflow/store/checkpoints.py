"""Checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nlflow.backends.machine import environment
from nlflow.errors import FileFormatError, InputError, shortened, warn_caller
from nlflow.store.atomic import sync_folder, workshop, write_content
from nlflow.store.storage import Arrays, DamagedFileError, Meta, load_archive, save_archive

Fits = Callable[[Arrays, Meta], str | None]


def previous(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}.previous")


class Checkpoints:
    """A checkpoint at a path, and the one before it as ``<path>.previous``."""

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        self.path = Path(path)
        self.kind = kind
        self._known: set[tuple[int, ...] | None] = set()  # the files that this object wrote or read whole

    @property
    def places(self) -> tuple[Path, Path]:
        return self.path, previous(self.path)

    def __bool__(self) -> bool:
        """Whether there is a file to go on from, be it whole or not."""
        return any(place.is_file() for place in self.places)

    def save(self, arrays: Arrays, meta: Meta) -> None:
        """See `save_archive`."""
        # One that was damaged meanwhile must not push out the good one before it.
        if self.path.is_file() and (_identity(self.path) in self._known or self._sound(self.path)):
            _duplicate(self.path, previous(self.path))
        save_archive(self.path, arrays, {**meta, "kind": self.kind})
        self._known &= {_identity(previous(self.path))}
        self._known.add(_identity(self.path))

    def load(self, fits: Fits) -> tuple[Arrays, Meta]:
        """Return the newest checkpoint that is whole, of this version and of this run; else `FileFormatError`.

        `fits` gets arrays and description, and returns None, or why a run cannot go on from them.
        """
        reasons: list[str] = []
        for place in self.places:
            if reasons and not place.is_file():
                continue
            try:
                arrays, meta = load_archive(place, self.kind)
            except FileFormatError as error:
                reasons.append(str(error))
                continue
            reason = _other_version(meta) or fits(arrays, meta)
            if reason is not None:
                reasons.append(f"{place}: {reason}")
                continue
            if reasons:
                warn_caller(f"{reasons[0]}. {place}, the one before, is used")
            else:
                self._known = {_identity(place)}
            _tell_libraries(place, meta)
            return arrays, meta
        raise FileFormatError("; ".join(reasons))

    def check_replaceable(self, name: str, fits: Fits) -> None:
        newest, before = self.places
        for place, other in ((newest, before), (before, newest)):
            reason = self._lost(place, other, fits)
            if reason is not None:
                raise InputError(
                    f"{name}: got {place}, which would be lost ({shortened(reason)}); expected a new name, or a "
                    "checkpoint of this problem; choose another name, or remove the file"
                )

    def _lost(self, place: Path, other: Path, fits: Fits) -> str | None:
        """Return why a file is no state of this run, None where it is one or there is none."""
        if not place.is_file() or _identity(place) in self._known:
            return None
        try:
            return self._unfit(place, fits)
        except DamagedFileError as error:
            # What is damaged may be anything, unless the other is of this run.
            return None if self._sound(other, fits) else str(error)
        except FileFormatError as error:
            return str(error)

    def remove(self) -> None:
        for place in self.places:
            with suppress(OSError):
                place.unlink(missing_ok=True)

    def _unfit(self, place: Path, fits: Fits) -> str | None:
        arrays, meta = load_archive(place, self.kind)
        return _other_version(meta) or fits(arrays, meta)

    def _sound(self, place: Path, fits: Fits = lambda arrays, meta: None) -> bool:
        try:
            return self._unfit(place, fits) is None
        except FileFormatError:
            return False


def _other_version(meta: Meta) -> str | None:
    """Return what is wrong with the version that wrote a checkpoint: steps may have been other ones."""
    found = _versions(meta).get("nlflow")
    now = environment()["versions"]["nlflow"]
    if found == now:
        return None
    return f"nlflow {found} wrote the checkpoint, and this is {now}; use that version, or start afresh"


def _tell_libraries(place: Path, meta: Meta) -> None:
    found = _versions(meta)
    others = [f"{name} {found.get(name)}" for name, now in environment()["versions"].items() if found.get(name) != now]
    if others:
        warn_caller(
            f"{place}: was written with {', '.join(others)}, which is not what runs now; the last digits may differ "
            "from those of an uninterrupted run",
        )


def _versions(meta: Meta) -> dict[str, Any]:
    found = meta.get("versions")
    return found if isinstance(found, dict) else {}


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return what tells a file from others of its name, without reading it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _duplicate(source: Path, target: Path) -> None:
    """Give a file a second name, in the place of what has it; the first stays at any moment."""
    try:
        with workshop(source) as place:
            spare = place / "new"
            try:
                os.link(source, spare)
            except OSError:  # a file system without second names
                write_content(target, source.read_bytes())
            else:
                spare.replace(target)  # what has that name already, and is this file, stays
        sync_folder(target.parent)
    except OSError as error:
        raise FileFormatError(
            f"{target}: got {error.strerror or error}, expected a file that can be written; free some space or choose "
            "another place"
        ) from error
