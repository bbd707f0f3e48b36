"""The one writer."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import importlib
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from nlflow.errors import FileFormatError, InputError, check_path

fcntl: Any
try:
    import fcntl
except ImportError:
    fcntl = None

_WINDOWS = fcntl is None
_PATIENCE = 0.2  # seconds in which a look at a lock, which takes it for a moment, is over
_EXCHANGE = 2  # flag of renameat2 and of renameatx_np
_swept: set[str] = set()  # folders in which this process has written


def make_folder(path: str | os.PathLike[str]) -> Path:
    folder = check_path("folder", path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileFormatError(
            f"{folder}: got {error.strerror or error}, expected a folder that can be made; choose another place"
        ) from error
    return folder


# ---- who writes


def hold(path: Path, *, make: bool = True, sure: bool = False) -> int | None:
    """Return a descriptor that locks a file while it is open; None if another process has locked it.

    On a file system without locks the descriptor locks nothing; with `sure` the result is None there.
    """
    flags = os.O_RDWR | (os.O_CREAT if make else 0) | getattr(os, "O_NOFOLLOW", 0)
    while True:
        try:
            descriptor, kept = os.open(path, flags, 0o666), False
        except PermissionError:  # of another user
            descriptor, kept = os.open(path, flags & ~(os.O_RDWR | os.O_CREAT)), False
        try:
            if not _taken(descriptor, sure):
                return None
            with suppress(FileNotFoundError):  # who had it has removed the file meanwhile
                kept = os.path.samestat(os.fstat(descriptor), path.stat())
            if kept:
                return descriptor
        finally:
            if not kept:
                os.close(descriptor)


def _taken(descriptor: int, sure: bool) -> bool:
    if _WINDOWS:
        system: Any = importlib.import_module("msvcrt")
        with suppress(OSError):
            system.locking(descriptor, system.LK_NBLCK, 1)
            return True
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        return not sure
    return True


@contextmanager
def locked(path: str | os.PathLike[str], name: str, *, whole: bool = False) -> Iterator[None]:
    """Lock a file, which need not exist, or a folder within the context.

    The lock is a hidden empty file: beside a file or a folder that is replaced as a `whole`, else inside the folder.
    `InputError` names the argument if another process has the lock, `FileFormatError` if it cannot be written.
    """
    target = Path(os.path.realpath(path))
    inside = target.is_dir() and not whole
    lock = target / ".nlflow-.lock" if inside else target.parent / f"{_prefix(target)}.lock"
    try:
        descriptor = _hold_soon(lock)
    except OSError as error:
        raise FileFormatError(
            f"{name}: got {target} ({error.strerror or error}), expected a place that can be written; choose another"
        ) from error
    if descriptor is None:
        raise InputError(
            f"{name}: got {target}, in which another process is writing, expected a place of its own; wait for it, or "
            "choose another name"
        )
    try:
        with suppress(OSError):  # a folder that nobody may list
            sweep(lock.parent)
        yield
    finally:
        _let_go(lock, descriptor)


def _hold_soon(lock: Path) -> int | None:
    deadline = time.monotonic() + _PATIENCE
    while (descriptor := hold(lock)) is None and time.monotonic() < deadline:
        time.sleep(_PATIENCE / 20)
    return descriptor


def _let_go(path: Path, descriptor: int) -> None:
    """Remove a file that is held, and release it; Windows removes no file that is open."""
    if _WINDOWS:
        os.close(descriptor)
    with suppress(OSError):
        path.unlink()
    if not _WINDOWS:
        os.close(descriptor)


def sweep(folder: Path) -> None:
    """Remove what killed processes have left in a folder; a folder that they had moved away gets its name back."""
    _swept.add(os.fspath(folder))
    for entry in os.scandir(folder):
        if entry.name.startswith(".nlflow-") and entry.name.endswith((".tmp", ".lock")):
            place = Path(entry.path)
            with suppress(OSError):
                whole = entry.is_dir(follow_symlinks=False)
                descriptor = hold(place / "lock" if whole else place, make=whole, sure=True)
                if descriptor is not None and whole:
                    _dismantle(place, descriptor)
                elif descriptor is not None:
                    _let_go(place, descriptor)


# ---- what is written


def _prefix(target: Path) -> str:
    # Not the name itself: it may be as long as the file system allows.
    return f".nlflow-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:8]}-"


def _temporary_name(target: Path) -> Path:
    if os.fspath(target.parent) not in _swept:
        with suppress(OSError):  # of which the write itself tells
            sweep(target.parent)
    return target.with_name(f"{_prefix(target)}{secrets.token_hex(8)}.tmp")


@contextmanager
def workshop(target: Path) -> Iterator[Path]:
    """Make a hidden folder beside a target, locked by this process, and remove it at the end."""
    descriptor = None
    while descriptor is None:
        place = _temporary_name(target)
        place.mkdir()
        with suppress(FileNotFoundError):  # another process took it for a left one, before it was held
            descriptor = hold(place / "lock")
    try:
        yield place
    finally:
        _dismantle(place, descriptor)


def _dismantle(place: Path, descriptor: int) -> None:
    """Remove a workshop that is held; a folder that was set aside, and nothing came in its place, gets its name."""
    try:
        for old in (place / "old").glob("*"):
            if not os.path.lexists(place.parent / old.name):
                old.rename(place.parent / old.name)
    except BaseException:  # then it is kept
        os.close(descriptor)
        raise
    if _WINDOWS:
        os.close(descriptor)
    shutil.rmtree(place, ignore_errors=True)
    if not _WINDOWS:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, or a folder at once."""
    if path.is_dir() and not path.is_symlink():
        with workshop(path) as place:
            path.rename(place / "new")
    else:
        path.unlink(missing_ok=True)


def write_atomic(path: str | os.PathLike[str], writer: Callable[[BinaryIO], object], *, replace: bool = True) -> None:
    """Write a file that appears complete or not at all; symbolic links are followed.

    Without `replace`, an existing file raises `FileFormatError`.
    """
    target = Path(os.path.realpath(check_path("path", path)))
    with _told(path, "file"):
        temporary, stream, descriptor = _begun(target)
        try:
            with stream:
                writer(stream)
                stream.flush()
                os.fsync(stream.fileno())
            if target.exists():
                temporary.chmod(stat.S_IMODE(target.stat().st_mode))
            if replace:
                temporary.replace(target)
            else:
                _name_anew(temporary, target)
            sync_folder(target.parent)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _begun(target: Path) -> tuple[Path, BinaryIO, int | None]:
    """Make a temporary file; return its name, a stream, and what holds it: on Windows the stream that is open."""
    while True:
        temporary = _temporary_name(target)
        descriptor = None if _WINDOWS else hold(temporary)
        if descriptor is not None or _WINDOWS:
            return temporary, temporary.open("wb"), descriptor


def _name_anew(temporary: Path, target: Path) -> None:
    """Give a file its name, unless there is one of that name: `FileExistsError`."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError as error:  # a file system without second names
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        temporary.replace(target)
    else:
        temporary.unlink()


def write_folder(path: str | os.PathLike[str], writer: Callable[[Path], object], *, replace: bool = True) -> None:
    target = Path(os.path.realpath(path))
    with _told(path, "folder"), workshop(target) as place:
        fresh = place / "new"
        fresh.mkdir()
        writer(fresh)
        put_folder(fresh, target, replace=replace)


def put_folder(fresh: Path, target: Path, *, replace: bool) -> None:
    """Give a complete folder its name; a folder of that name is removed, or moved to the place of the new one."""
    for file in fresh.rglob("*"):
        if file.is_file():
            _sync(file)
    if not replace or not target.exists():
        fresh.rename(target)
    elif not _exchanged(fresh, target):
        with workshop(target) as place:
            (place / "old").mkdir()
            target.rename(place / "old" / target.name)
            fresh.rename(target)
    sync_folder(target.parent)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange the names of two folders at once; return whether that was possible."""
    name, here = {"linux": ("renameat2", -100), "darwin": ("renameatx_np", -2)}.get(sys.platform, ("", 0))
    try:
        rename = getattr(ctypes.CDLL(None), name)
    except (AttributeError, TypeError):  # none such; and Windows loads no library without a name
        return False
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE) == 0)


def write_content(path: str | os.PathLike[str], content: bytes, *, replace: bool = True) -> None:
    """See `write_atomic`."""
    write_atomic(path, lambda stream: stream.write(content), replace=replace)


@contextmanager
def _told(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            got = f"a {what} that was made while this one was computed, expected none"
            raise FileFormatError(f"{path}: got {got}; choose another name, or let it be replaced") from error
        got, remedy = error.strerror or f"a write that failed ({error})", "free some space or choose another place"
        raise FileFormatError(f"{path}: got {got}, expected a {what} that can be written; {remedy}") from error


def _sync(path: Path) -> None:
    # Not every system opens folders, and not every file system flushes them; the file itself is safe without.
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_folder(folder: Path) -> None:
    _sync(folder)
