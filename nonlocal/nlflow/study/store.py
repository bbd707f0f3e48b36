"""The folder of a study: what it is, and every case that is done, each in a file of its own."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

from nlflow._atomic import make_folder, write_atomic
from nlflow._machine import environment, source_digest
from nlflow.errors import FileFormatError, InputError, NlflowWarning
from nlflow.study.contract import Row
from nlflow.study.identity import decode, digest, encode

__all__ = ["Folder"]

FORMAT = 1
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
        self.content = {"format": FORMAT, "study": kind, "program": program, "options": options}
        self.content["fingerprint"] = digest(encode(self.content))
        head = self.path / "study.json"
        if head.exists():
            self._compare(head)
        elif any(self.cases.glob("*.json")):
            raise FileFormatError(
                f"{self.path}: got cases without a study.json, expected both; restore it, or choose another folder"
            )
        else:
            _write(head, self.content)

    def _compare(self, head: Path) -> None:
        """Raise `FileFormatError` unless the folder holds this very study."""
        try:
            found = decode(head.read_text(encoding="utf-8"))
            if found["fingerprint"] == self.content["fingerprint"]:
                return
            options = dict(found["options"])
            known = {"format": found["format"], "study": found["study"], **found["program"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FileFormatError(
                f"{head}: got a damaged file ({type(error).__name__}: {error}), expected the description of a study; "
                "restore it, or choose another folder"
            ) from error
        own: Any = self.content["options"]
        program: Any = self.content["program"]
        now = {"format": FORMAT, "study": self.content["study"], **program}
        for name in dict.fromkeys([*known, *options, *own]):
            there, here = ({**known, **options}.get(name), {**now, **own}.get(name))
            if encode(there) != encode(here):
                raise FileFormatError(
                    f"{self.path}: holds another study: {name} is {_brief(there)} there and {_brief(here)} here; "
                    f"{_ADVICE}"
                )
        raise FileFormatError(f"{head}: got a fingerprint that does not fit its options; restore it, or {_ADVICE}")

    def _file(self, number: int, name: str) -> Path:
        return self.cases / f"{number:04d}-{name}.json"

    def read(self, number: int, name: str) -> list[Row] | None:
        """Return the rows of a case, or None when it is not done.

        Warns
        -----
        NlflowWarning
            When its file is damaged; it is computed again then.
        """
        path = self._file(number, name)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            _warn(path, error)
            return None
        try:
            found = decode(text)
            rows = found["rows"]
            if found["sha256"] != digest(encode(rows)):
                raise ValueError("its rows do not have its checksum")
            return list(rows)
        except (ValueError, KeyError, TypeError) as error:
            _warn(path, error)
            return None

    def write(self, number: int, name: str, label: Row, rows: list[Row]) -> None:
        """Write the rows of a case, so that its file appears complete or not at all."""
        _write(self._file(number, name), {"case": label, "rows": rows, "sha256": digest(encode(rows))})


def _write(path: Path, content: Any) -> None:
    data = (encode(content) + "\n").encode()
    write_atomic(path, lambda stream: stream.write(data))


def _warn(path: Path, error: Exception) -> None:
    warnings.warn(f"{path}: the file is damaged ({error}); its case is computed again", NlflowWarning, stacklevel=4)


def _brief(value: Any) -> str:
    text = " ".join(encode(value).split())
    return text if len(text) <= 120 else text[:117] + "..."
