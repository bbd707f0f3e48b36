"""Files of several arrays: which one is meant, and what is said where nobody can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.desk.formats.media import Array, Media
from nlflow.errors import command, file_error

#: More members of a file are not looked at.
MOST = 10_000
_SHOWN = 12


@dataclass(frozen=True)
class Entry:
    """One array of a file.

    Attributes
    ----------
    shape : tuple of int
    kind : str
        Its dtype, or what else it is.
    numbers : bool
        Whether it holds real numbers.
    """

    shape: tuple[int, ...]
    kind: str
    numbers: bool

    @property
    def signal(self) -> bool:
        """Whether this is more than a single number, and so perhaps what is meant."""
        return self.numbers and len(self.shape) > 0 and any(size > 1 for size in self.shape) and 0 not in self.shape

    def __str__(self) -> str:
        return f"{' x '.join(map(str, self.shape)) or 'one value'} {self.kind}"


def entry_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Entry:
    """Return the entry of an array of NumPy."""
    return Entry(shape, str(dtype) if dtype.kind != "O" else "objects", dtype.kind in "biuf")


def choose(path: Path, array: str | None, found: Mapping[str, Entry], remedy: str) -> str:
    """Return the name of the array that is meant.

    Parameters
    ----------
    path : Path
    array : str or None
        The name that the user gives; None where there is no choice.
    found : mapping of str to Entry
        What the file holds.
    remedy : str
        What to do where there is no array of numbers.

    Raises
    ------
    FileFormatError
        If there is none of this name, if it holds no numbers, or if several may be meant. The message lists them.
    """
    listed = ", ".join(f"{name} ({entry})" for name, entry in list(found.items())[:_SHOWN])
    listed += f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    if array is not None:
        if array not in found:
            raise file_error(path, f"no array {array!r}; it holds {listed or 'none'}", "one of them", "correct --array")
        if not found[array].numbers:
            raise file_error(path, f"{array!r}, which holds {found[array].kind}", "real numbers", remedy)
        return array
    signals = [name for name, entry in found.items() if entry.signal]
    if not signals:
        raise file_error(path, f"no array of numbers ({listed or 'it is empty'})", "at least one", remedy)
    if len(signals) > 1:
        got = f"{len(signals)} arrays: {listed}"
        way = f"say: {command('nonlocal', 'denoise', path, 'OUT', '--array', signals[0])}, or save one alone as .npy"
        raise file_error(path, got, "the name of one", way)
    return signals[0]


def media_of(path: Path, form: str, name: str, data: Array, found: Mapping[str, Entry], *, keeps: bool = True) -> Media:
    """Return an array as what a file holds; a note says its name where there are others.

    Parameters
    ----------
    path, form, name, data, found
        The file and its format, the array in it, and all of them.
    keeps : bool
        Whether an output of this format has the other arrays as well.
    """
    note = f"{path}: the array {name} is read, one of {len(found)}"
    lost = len(found) > 1 and not keeps
    about = {"name": name, "shape": found[name].shape, "others": len(found) > 1, "lost": lost}
    return Media(path, form, "image", data, extras={"array": about}, notes=(note,) if len(found) > 1 else ())


def name_of(media: Media) -> str:
    """Return under which name a result is written."""
    return str(media.extras.get("array", {"name": "data"})["name"])
