"""Files that appear complete or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from nlflow.errors import FileFormatError

__all__ = ["make_folder", "write_atomic"]


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


def write_atomic(path: str | os.PathLike[str], writer: Callable[[BinaryIO], object]) -> None:
    """Write a file so that it appears complete or not at all.

    `writer` fills a temporary file in the same folder, which is flushed to the disk and then takes the place of
    `path`. On any failure the temporary file is removed and a file that was there before stays as it was.

    Parameters
    ----------
    path : str or PathLike
        The file to create or replace; a symbolic link is followed.
    writer : callable
        Gets the open binary file.

    Raises
    ------
    FileFormatError
        If the operating system refuses: a full disk, missing permission.
    Exception
        Whatever `writer` raises.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".nlflow-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as stream:
            writer(stream)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            got, remedy = error.strerror or str(error), "free some space or choose another place"
            raise FileFormatError(f"{path}: got {got}, expected a file that can be written; {remedy}") from error
        raise
