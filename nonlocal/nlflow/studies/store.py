"""The folder of a study: ``study.json`` says which study it is, ``cases`` holds a record for each case that is done."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nlflow.errors import FileFormatError, InputError, shortened
from nlflow.store.atomic import make_folder
from nlflow.store.encoding import encode, misfit
from nlflow.store.records import Records, program
from nlflow.store.storage import load_record, save_record
from nlflow.studies.contract import Kind, Row

_STUDY, _CASE = "study", "case of a study"
_ADVICE = "ask for the same study, or choose another folder"


def open_folder(
    path: str | os.PathLike[str], kind: Kind, options: dict[str, Any], labels: Mapping[str, Row]
) -> Records[list[Row]]:
    """Return the records of a study's cases, in a folder that holds this very study or none yet.

    Parameters
    ----------
    path : path
        Made if it is missing.
    kind : Kind
    options : dict
        In plain data, from `identity.describe`.
    labels : mapping of str to dict
        The labels of the cases, in plain data, by the names of their records.

    Raises
    ------
    FileFormatError
        When the folder holds another study, naming the first option that differs, or cannot be used.
    InputError
        For options that a later run could not recognize.
    """
    for name, value in options.items():
        if re.search(r" at 0x[0-9a-f]+", encode(value)):
            raise InputError(
                f"{name}: got an object that only its place in memory tells from others, so a later run could not "
                "know it again; give a function or a dataclass, or leave out= away"
            )
    folder = make_folder(path)
    cases, head = make_folder(folder / "cases"), folder / "study.json"
    # What computes a case decides its bits: a study is not continued by another program.
    content = {"study": kind.name, "program": program(), "options": options}
    if head.exists():
        _compare(head, content)
    elif any(cases.glob("*.json")):
        raise FileFormatError(
            f"{folder}: got cases without a study.json, expected both; restore it, or choose another folder"
        )
    else:
        save_record(head, _STUDY, content)

    def unpack(name: str, content: Any) -> list[Row]:
        trouble = misfit(content, {"case": dict, "rows": list}) or _foreign(content["rows"], labels[name], kind)
        if trouble is not None:
            raise ValueError(trouble)
        rows: list[Row] = content["rows"]
        return rows

    return Records(cases, _CASE, lambda name, rows: {"case": labels[name], "rows": rows}, unpack)


def _compare(head: Path, content: dict[str, Any]) -> None:
    """Raise `FileFormatError` unless the record of a folder describes this very study."""
    found = load_record(head, _STUDY)
    if encode(found) == encode(content):
        return
    trouble = misfit(found, {"study": str, "program": dict, "options": dict})
    if trouble is not None:
        raise FileFormatError(f"{head}: got {trouble}; it does not describe a study: restore it, or {_ADVICE}")
    there, here = ({"study": one["study"], **one["program"], **one["options"]} for one in (found, content))
    for name in dict.fromkeys([*there, *here]):
        if encode(there.get(name)) != encode(here.get(name)):
            raise FileFormatError(
                f"{head.parent}: holds another study: {name} is {shortened(encode(there.get(name)), 120)} there and "
                f"{shortened(encode(here.get(name)), 120)} here; {_ADVICE}"
            )


def _foreign(rows: list[Any], label: Row, kind: Kind) -> str | None:
    """Return why `rows` are not measurements of a case, its label before the columns of its kind; None if they are."""
    if not rows:
        return "no rows"
    whole = {**{name: type(value) for name, value in label.items()}, **kind.columns}
    for row in rows:
        trouble = misfit(row, whole)
        if trouble is None and encode({name: row[name] for name in label}) != encode(label):
            trouble = "another case"
        if trouble is not None:
            return f"{trouble} in a row"
    return None
