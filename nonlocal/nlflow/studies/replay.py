"""The file of a study, from which it is repeated."""

from __future__ import annotations

import io
import json
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.backends.devices import CPU, choose_device
from nlflow.backends.machine import machine_name
from nlflow.errors import FileFormatError, InputError, NlflowError, shortened
from nlflow.kernels import Kernel
from nlflow.store.encoding import digest, encode
from nlflow.store.identity import describe
from nlflow.store.npy import read_array
from nlflow.store.records import VERSION, program
from nlflow.studies.contract import Row
from nlflow.studies.options import kernel_label, parse_kernel

FORMAT = 1
NAME = "study.toml"
ENDING = ".toml"
_LONGEST = 2**20  # bytes: the file holds words and numbers, arrays lie beside it
_PARTS = {"file_format": int, "study": str, "seed": int, "options": dict, "arrays": dict, "own": dict, "program": dict,
          "result": dict}  # fmt: skip


def current(options: Mapping[str, Any]) -> dict[str, str]:
    found = program(choose_device(options.get("device", CPU.name)))
    return {**{name.removeprefix(VERSION): value for name, value in found.items()}, "machine": machine_name()}


def rows_digest(rows: list[Row]) -> str:
    return digest(encode(rows))


# ---- writing


def study_files(kind: str, given: Mapping[str, Any], seed: int, rows: list[Row]) -> dict[str, bytes]:
    """Return ``study.toml`` and the arrays beside it.

    Functions and objects of one's own, which no file can hold, are named with their digests.
    """
    options, arrays, own, files = {}, {}, {}, {}
    for name, value in given.items():
        if isinstance(value, np.ndarray):
            stream = io.BytesIO()
            np.save(stream, value, allow_pickle=False)
            beside = f"study-{name}.npy"
            files[beside] = stream.getvalue()
            arrays[name] = {"file": beside, "sha256": digest(stream.getvalue())}
        elif (plain := _plain(value)) is not None:
            options[name] = plain
        else:
            own[name] = _identity(value)
    tables = {
        "options": options,
        **{f"arrays.{name}": about for name, about in arrays.items()},
        "own": own,
        "program": current(options),
        "result": {"rows": len(rows), "sha256": rows_digest(rows)},
    }
    head = {"file_format": FORMAT, "study": kind, "seed": seed}
    tables["result"]["asked"] = _asked({**head, **tables, "arrays": arrays})
    lines = ["# nonlocal study study.toml repeats this study, and says whether it gives the same bits."]
    lines += _lines(head)
    for table, content in tables.items():
        lines += ["", f"[{table}]", *_lines(content)]
    return {NAME: ("\n".join(lines) + "\n").encode(), **files}


def _asked(content: Mapping[str, Any]) -> str:
    """Return the digest of what a study is: whoever edits the file afterwards asks for another."""
    parts = [_value(content["study"]), _value(content["seed"]), *_lines(content["options"]), *_lines(content["own"])]
    parts += [f"{name} {about.get('sha256')}" for name, about in content["arrays"].items()]
    return digest("\n".join(parts).encode())


def _identity(value: Any) -> str:
    return digest(encode(describe(value)))


def _plain(value: Any) -> Any:
    """Return a value in TOML's types; None for what has no text."""
    if isinstance(value, list):
        entries = [_plain(entry) for entry in value]
        return None if any(entry is None for entry in entries) else entries
    if isinstance(value, Kernel):
        text = kernel_label(value)
        try:
            return text if parse_kernel(text) == value else None
        except InputError:  # the repr of a kernel of one's own
            return None
    return value if isinstance(value, bool | int | float | str) else None


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(name)} = {_value(value)}" for name, value in table.items()]


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(entry) for entry in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else {"inf": "inf", "-inf": "-inf"}.get(repr(value), "nan")
    if isinstance(value, int):
        return str(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


# ---- reading


@dataclass(frozen=True)
class Recipe:
    """A study of a file; `own` are options that the file cannot hold, `edited` says that it was changed."""

    path: Path
    kind: str
    seed: int
    options: dict[str, Any]
    own: dict[str, str]
    program: dict[str, str]
    sha256: str
    edited: bool

    def with_own(self, given: Mapping[str, Any]) -> dict[str, Any]:
        for name in given:
            if name not in self.own:
                raise InputError(
                    f"{name}: got it beside {self.path}, which says what the study is; leave it out, or "
                    "run the study by its kind"
                )
        for name in self.own:
            if name not in given:
                raise InputError(
                    f"{name}: got none, expected what the study of {self.path} had, which a file cannot hold: repeat "
                    f"it in Python, by run_study({str(self.path)!r}, {name}=...)"
                )
        return {**self.options, **given}

    def compare(self, rows: list[Row], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return whether measurements have the same bits as those of the file, and what else differs."""
        here = current(self.options)
        names = dict.fromkeys([*self.program, *here])
        differs = [
            f"{name}: {shortened(there, 60)} there, {shortened(now, 60)} here"
            for name in names
            if (there := self.program.get(name, "none")) != (now := here.get(name, "none"))
        ]
        differs += ["the file was edited after it was written: it asks for another study"] if self.edited else []
        differs += [f"{name}: another object" for name, sha in self.own.items() if _identity(given[name]) != sha]
        return {"file": str(self.path), "same": rows_digest(rows) == self.sha256, "differs": differs}


def is_study_file(kind: Any) -> bool:
    return isinstance(kind, os.PathLike) or (isinstance(kind, str) and kind.endswith(ENDING))


def read_study(path: str | os.PathLike[str]) -> Recipe:
    place = Path(path)
    content = {"arrays": {}, **_load(place)}
    wrong = next((name for name, kind in _PARTS.items() if type(content.get(name)) is not kind), None)
    if content.get("file_format") not in (FORMAT, None):
        raise FileFormatError(
            f"{place}: got a study of format {shortened(repr(content['file_format']), 40)}, this version "
            f"reads {FORMAT}; use the version of nlflow that wrote it"
        )
    if wrong is not None:
        got = f"{shortened(repr(content[wrong]), 40)} as {wrong}" if wrong in content else f"no {wrong}"
        raise FileFormatError(f"{place}: got {got}, expected {NAME} as a study writes it")
    for part in ("own", "program"):
        if not all(isinstance(value, str) for value in content[part].values()):
            raise FileFormatError(f"{place}: got [{part}] with values that are no texts, expected {NAME} as written")
    arrays = {name: _array(place, name, about) for name, about in content["arrays"].items()}
    sha = content["result"].get("sha256")
    return Recipe(
        place, content["study"], content["seed"], {**content["options"], **arrays}, content["own"], content["program"],
        sha if isinstance(sha, str) else "", content["result"].get("asked") != _asked(content),
    )  # fmt: skip


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            text = stream.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise ValueError(f"more than {_LONGEST} bytes")
        return tomllib.loads(text.decode())
    except FileNotFoundError as error:
        raise FileFormatError(f"{path}: there is no such file, expected {NAME} of a study; check the path") from error
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(
            f"{path}: got {shortened(error, 120)}, expected a study in TOML, as a study writes it"
        ) from error


def _array(place: Path, name: str, about: Any) -> Any:
    """Return an array that lies beside the file, whose digest must be the one that the file tells."""
    beside = about.get("file") if isinstance(about, dict) else None
    if not isinstance(beside, str) or not beside or Path(beside).name != beside:
        raise FileFormatError(f"{place}: got no name of a file for {name}, expected one beside it")
    path = place.with_name(beside)
    try:
        data = path.read_bytes()
        if digest(data) != about.get("sha256"):
            raise ValueError("its SHA-256 is another")
        return read_array(io.BytesIO(data), len(data), what=f"{path}")
    except NlflowError:
        raise
    except (OSError, ValueError) as error:
        raise FileFormatError(
            f"{path}: got {shortened(error, 120)}, expected the {name} of {place}; restore it"
        ) from error
