"""The folder of a study: what it is, and every case that is done, each in a file of its own."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nlflow.backends.machine import environment, source_digest
from nlflow.errors import FileFormatError, InputError, NlflowWarning, shortened
from nlflow.io.atomic import make_folder
from nlflow.io.encoding import Column, encode, misfit
from nlflow.io.storage import load_record, save_record
from nlflow.studies.contract import Row

__all__ = ["Folder"]

_STUDY, _CASE = "study", "case of a study"
_ADVICE = "ask for the same study, or choose another folder"


class Folder:
    """``study.json`` and ``cases/NNNN-<id>.json`` in a folder.

    Parameters
    ----------
    path : path
        Made if it is missing.
    kind : str
    options : dict
        In plain data, from `identity.describe`.

    Raises
    ------
    FileFormatError
        When the folder holds another study, naming the first option that differs, or cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], kind: str, options: dict[str, Any]) -> None:
        for name, value in options.items():
            if re.search(r" at 0x[0-9a-f]+", encode(value)):
                raise InputError(
                    f"{name}: got an object that only its place in memory tells from others, so a later run could not "
                    "know it again; give a function or a dataclass, or leave out= away"
                )
        self.path = make_folder(path)
        self.cases = make_folder(self.path / "cases")
        # What computes a case decides its bits: a study is not continued by another program.
        program = {f"version of {name}": value for name, value in environment()["versions"].items()}
        program["source of nlflow"] = source_digest()
        self.content = {"study": kind, "program": program, "options": options}
        head = self.path / "study.json"
        if head.exists():
            self._compare(head)
        elif any(self.cases.glob("*.json")):
            raise FileFormatError(
                f"{self.path}: got cases without a study.json, expected both; restore it, or choose another folder"
            )
        else:
            save_record(head, _STUDY, self.content)

    def _compare(self, head: Path) -> None:
        """Raise `FileFormatError` unless the folder holds this very study."""
        found = load_record(head, _STUDY)
        if encode(found) == encode(self.content):
            return
        trouble = misfit(found, {"study": str, "program": dict, "options": dict})
        if trouble is not None:
            raise FileFormatError(f"{head}: got {trouble}; it does not describe a study: restore it, or {_ADVICE}")
        options, known = found["options"], {"study": found["study"], **found["program"]}
        own: Any = self.content["options"]
        program: Any = self.content["program"]
        now = {"study": self.content["study"], **program}
        for name in dict.fromkeys([*known, *options, *own]):
            there, here = (encode(found.get(name)) for found in ({**known, **options}, {**now, **own}))
            if there != here:
                raise FileFormatError(
                    f"{self.path}: holds another study: {name} is {shortened(there, 120)} there and "
                    f"{shortened(here, 120)} here; {_ADVICE}"
                )

    def _file(self, number: int, name: str) -> Path:
        return self.cases / f"{number:04d}-{name}.json"

    def read(self, number: int, name: str, label: Row, columns: Mapping[str, Column]) -> list[Row] | None:
        """Return the rows of a case, or None when it is not done.

        Warns
        -----
        NlflowWarning
            When its file is damaged, or holds other rows than those with this label and these columns; the case is
            computed again then.
        """
        path = self._file(number, name)
        if not path.exists():
            return None
        try:
            # The right checksum says that a program wrote it as it is, not that this one did.
            content = load_record(path, _CASE)
            trouble = misfit(content, {"case": dict, "rows": list}) or _foreign(content["rows"], label, columns)
            if trouble is not None:
                raise FileFormatError(f"{path}: got {trouble}; it does not hold the measurements of its case")
            rows: list[Row] = content["rows"]
            return rows
        except FileFormatError as error:
            warnings.warn(f"{error}; its case is computed again", NlflowWarning, stacklevel=3)
            return None

    def write(self, number: int, name: str, label: Row, rows: list[Row]) -> None:
        """Write the rows of a case, so that its file appears complete or not at all."""
        save_record(self._file(number, name), _CASE, {"case": label, "rows": rows})


def _foreign(rows: list[Any], label: Row, columns: Mapping[str, Column]) -> str | None:
    """Return why `rows` are not measurements of a case, its label before the columns of its kind; None if they are."""
    if not rows:
        return "no rows"
    whole = {**{name: type(value) for name, value in label.items()}, **columns}
    for row in rows:
        trouble = misfit(row, whole)
        if trouble is None and encode({name: row[name] for name in label}) != encode(label):
            trouble = "another case"
        if trouble is not None:
            return f"{trouble} in a row"
    return None
