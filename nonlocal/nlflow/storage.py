"""Atomic checkpoints and results: npz archives with a JSON description, never pickles."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._atomic import write_atomic
from nlflow.errors import FileFormatError

__all__ = ["load_archive", "save_archive"]

FORMAT = 1
_META = "__meta__"


def save_archive(path: str | os.PathLike[str], arrays: dict[str, NDArray[Any]], meta: dict[str, Any]) -> None:
    """Write arrays and a JSON description to an npz archive, atomically.

    A file of that name is always whole, the old one or the new one.

    Raises
    ------
    FileFormatError
        When the folder is missing, not writable or full; nothing is left behind then.
    """
    text = json.dumps({"format": FORMAT, **meta})
    packed = {_META: np.frombuffer(text.encode(), dtype=np.uint8), **arrays}
    # numpy types the names of the arrays as if they were its own keywords.
    write_atomic(path, lambda file: np.savez(file, **packed))  # type: ignore[arg-type]


def load_archive(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Return the arrays and the description of an archive written by `save_archive`.

    Parameters
    ----------
    path : path
    kind : str
        What the description must say under ``kind``.

    Raises
    ------
    FileFormatError
        When the file is truncated, of another kind or of a newer format.
    """
    try:
        # Opened here, since numpy leaves the file open when it cannot read it.
        with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if name != _META}
            meta = json.loads(archive[_META].tobytes().decode())
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: there is no such file; check the path, or start afresh") from error
    except Exception as error:  # zipfile, zlib, numpy and json each have their own way to say 'damaged'
        raise FileFormatError(
            f"{path}: not a whole nlflow archive ({error}); use an earlier one, or start afresh"
        ) from error
    if not isinstance(meta, dict) or meta.get("kind") != kind:
        found = meta.get("kind") if isinstance(meta, dict) else None
        raise FileFormatError(f"{path}: got an archive of kind {found!r}, expected {kind!r}")
    if meta.get("format") != FORMAT:
        raise FileFormatError(
            f"{path}: got format {meta.get('format')!r}, this version reads {FORMAT}; use the version that wrote it"
        )
    return arrays, meta
