"""Files that appear complete or not at all."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nlflow.errors import FileFormatError


def make_folder(path: str | os.PathLike[str]) -> Path:
    """Return `path` as an existing folder, or raise `FileFormatError`."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileFormatError(
            f"{folder}: got {error.strerror or error}, expected a folder that can be made; choose another place"
        ) from error
    return folder


def temporary_name(target: Path) -> Path:
    """Return a new name beside `target`, from which `sweep` knows that it was meant for this file."""
    return target.with_name(f"{_prefix(target)}{secrets.token_hex(8)}.tmp")


def _prefix(target: Path) -> str:
    # Not the name itself: it may be as long as the file system allows.
    return f".nlflow-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:8]}-"


def sweep(path: Path) -> None:
    """Remove what killed processes left half written, for a file or in a folder; the caller must hold its lock.

    What another process is writing, which takes no lock of the folder for a single file, stays.
    """
    folder, prefix = (path, ".nlflow-") if path.is_dir() else (path.parent, _prefix(path))
    for entry in folder.glob(f"{prefix}*.tmp"):
        with suppress(OSError), _held(entry):
            entry.unlink()


@contextmanager
def _held(path: Path) -> Iterator[None]:
    """Hold a file that is being written; `BlockingIOError` where another process holds it."""
    try:
        import fcntl
    except ImportError:  # Windows, where nobody can remove a file that is open
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush the list of files in a folder to the disk, so that a new name survives a loss of power."""
    # Not every system opens folders, and not every file system flushes them; the file itself is safe without.
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomic(path: str | os.PathLike[str], writer: Callable[[BinaryIO], object]) -> None:
    """Write a file so that it appears complete or not at all; a symbolic link is followed.

    `writer` fills a temporary file in the same folder, which is flushed to the disk and then takes the place of
    `path`. On any failure, of which `FileFormatError` tells where the system refuses, the temporary file is removed and
    a file that was there before stays as it was.
    """
    target = Path(os.path.realpath(path))
    temporary = temporary_name(target)
    try:
        stream = temporary.open("xb")
        with _held(temporary):
            with stream:
                writer(stream)
                stream.flush()
                os.fsync(stream.fileno())
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            temporary.replace(target)
        sync_folder(target.parent)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            got, remedy = error.strerror or str(error), "free some space or choose another place"
            raise FileFormatError(f"{path}: got {got}, expected a file that can be written; {remedy}") from error
        raise


def write_folder(path: str | os.PathLike[str], writer: Callable[[Path], object]) -> None:
    """Write a folder so that it appears complete or not at all; as `write_atomic`.

    `writer` fills a new folder beside `path`, which then takes its place; a folder that was there before is removed
    after that.
    """
    target = Path(os.path.realpath(path))
    fresh, old = temporary_name(target), temporary_name(target)
    try:
        fresh.mkdir()
        writer(fresh)
        if target.exists():
            target.replace(old)
        fresh.replace(target)
        sync_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if old.exists() and not target.exists():
            old.replace(target)
        if isinstance(error, OSError):
            got, remedy = error.strerror or str(error), "free some space or choose another place"
            raise FileFormatError(f"{path}: got {got}, expected a folder that can be written; {remedy}") from error
        raise


def write_content(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file of this content so that it appears complete or not at all; see `write_atomic`."""
    write_atomic(path, lambda stream: stream.write(content))
