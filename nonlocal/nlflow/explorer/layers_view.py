"""What the tab "Layers" shows: the figures of a transformer's layers, as `nonlocal attention --out` wrote them."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import FileFormatError, InputError, format_bytes, shortened

__all__ = ["HEAD_QUANTITIES", "QUANTITIES", "LayersFile", "Run", "as_command", "as_python", "read_layers"]

Floats = NDArray[np.float64]

#: What rows hold for a state, and how it is called on the page.
QUANTITIES = {
    "cosine": "mean cosine of two tokens",
    "J": "energy J of the values, per token, mean of heads",
    "gap": "spectral gap 1 − |μ₂|, mean of heads",
    "stable": "stable fidelity λ̃, median of heads",
    "mixing": "mixing time in moves, median of heads",
    "share": "share of attention in the layer's way",
    "t_sim": "share of the mean token",
    "rank": "participation rank",
}
#: What is known of each head.
HEAD_QUANTITIES = {
    "J": "energy J of the values, per token",
    "gap": "spectral gap 1 − |μ₂|",
    "stable": "stable fidelity λ̃",
    "mixing": "mixing time in moves",
    "gradient": "cosine with the gradient of J",
}
_MOST_BYTES = 2**26
_MOST_ROWS, _MOST_HEADS, _MOST_TEXT = 20_000, 4096, 400
_MOST_NUMBERS = 2**20  # of a quantity of all heads


@dataclass(frozen=True)
class Run:
    """One run of the model.

    Attributes
    ----------
    fidelity : float
        Of NeuTRENO's term; that of the model itself, or 0.
    layers : tuple of str
        Names of the states: the input of each stack, then its layers.
    index : array of shape (S,)
        Number of the layer in its stack, 0 for the input.
    columns : dict of str to array of shape (S,)
        By the names of `QUANTITIES`; NaN where there is no such number.
    heads : dict of str to array of shape (S, H)
        By the names of `HEAD_QUANTITIES`; NaN for inputs. Empty where the file tells of none.
    """

    fidelity: float
    layers: tuple[str, ...]
    index: NDArray[np.int64]
    columns: dict[str, Floats]
    heads: dict[str, Floats]


@dataclass(frozen=True)
class LayersFile:
    """What a file holds.

    Attributes
    ----------
    name : str
        How the file is called.
    model, kind : str
        The model's name or folder, and its class.
    tokens : int
        Of the input.
    fidelity : float or None
        That of the comparison, if there is one.
    runs : tuple of Run
    content : bytes
        The file itself.
    """

    name: str
    model: str
    kind: str
    tokens: int
    fidelity: float | None
    runs: tuple[Run, ...]
    content: bytes


def read_layers(path: str | os.PathLike[str], name: str | None = None) -> LayersFile:
    """Read ``result.json`` of `nonlocal attention --out`; nothing in it is trusted.

    Parameters
    ----------
    path : path
    name : str, optional
        How the file is called in messages and texts; the path by default.

    Raises
    ------
    FileFormatError
        For a missing or large file, for what is no such JSON, and for numbers that are not finite.
    """
    name = os.fspath(path) if name is None else name
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise _wrong(name, str(error.strerror or error), "a file that can be read") from error
    if len(content) > _MOST_BYTES:
        raise _wrong(name, f"more than {format_bytes(_MOST_BYTES)}", "less")

    def constant(text: str) -> NoReturn:
        raise ValueError(f"the number {text}")

    try:
        report = json.loads(content.decode(), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else shortened(error)
        raise _wrong(name, f"no JSON ({why})", "result.json of nonlocal attention --out") from error
    return _checked(name, report, content)


def _wrong(name: str, got: str, expected: str) -> FileFormatError:
    return FileFormatError(f"{name}: got {got}, expected {expected}; write it anew with nonlocal attention --out DIR")


def _checked(name: str, report: Any, content: bytes) -> LayersFile:
    rows = _list(name, _of(name, report, "rows"), "rows", _MOST_ROWS)
    if not rows:
        raise _wrong(name, "no rows", "one for each layer")
    by_head = _list(name, report.get("by_head", []), "by_head", _MOST_ROWS)
    runs: dict[float, list[Mapping[str, Any]]] = {}
    for row in rows:
        runs.setdefault(_number(name, _of(name, row, "fidelity"), "fidelity"), []).append(row)
    fidelity = report.get("fidelity")
    return LayersFile(
        name=name,
        model=_text(name, _of(name, report, "model"), "model"),
        kind=_text(name, _of(name, report, "kind"), "kind"),
        tokens=_whole(name, _of(name, report, "tokens"), "tokens"),
        fidelity=None if fidelity is None else _number(name, fidelity, "fidelity"),
        runs=tuple(_run(name, value, found, by_head) for value, found in runs.items()),
        content=content,
    )


def _run(name: str, fidelity: float, rows: list[Mapping[str, Any]], by_head: list[Any]) -> Run:
    layers = tuple(_text(name, _of(name, row, "layer"), "layer") for row in rows)
    index = [_whole(name, _of(name, row, "index"), "index") for row in rows]
    known = [key for key in QUANTITIES if any(row.get(key) is not None for row in rows)]
    columns = {key: np.array([_perhaps(name, row.get(key), key) for row in rows]) for key in known}
    places = {layer: number for number, layer in enumerate(layers)}
    found: dict[str, dict[int, list[float]]] = {}
    for entry in by_head:
        if _number(name, _of(name, entry, "fidelity"), "fidelity") != fidelity:
            continue
        layer = _text(name, _of(name, entry, "layer"), "layer")
        if layer not in places:
            raise _wrong(name, f"heads of {layer!r}, which is no layer", "those of layers among the rows")
        for key in HEAD_QUANTITIES:
            if key in entry:
                values = _list(name, entry[key], key, _MOST_HEADS)
                found.setdefault(key, {})[places[layer]] = [_perhaps(name, value, key) for value in values]
    heads = {}
    for key, lines in found.items():
        most = max(map(len, lines.values()))
        if most * len(layers) > _MOST_NUMBERS:
            raise _wrong(name, f"{most} heads of {len(layers)} states", f"at most {_MOST_NUMBERS} numbers in all")
        heads[key] = np.full((len(layers), most), math.nan)
        for place, values in lines.items():
            heads[key][place, : len(values)] = values
    return Run(fidelity, layers, np.array(index, dtype=np.int64), columns, heads)


def _of(name: str, entry: Any, key: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise _wrong(name, f"{type(entry).__name__} without {key!r}", f"an object with {key!r}")
    return entry[key]


def _list(name: str, value: Any, key: str, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        got = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
        raise _wrong(name, f"{got} as {key!r}", f"a list of at most {most}")
    return value


def _text(name: str, value: Any, key: str) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise _wrong(name, f"{type(value).__name__} as {key!r}", f"a text of at most {_MOST_TEXT} characters")
    return value


def _number(name: str, value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, f"{type(value).__name__} as {key!r}", "a number")
    # Whole numbers of JSON may be too long for a float, and 1e999 is read as infinity.
    if not -1e300 < value < 1e300:
        raise _wrong(name, f"a number beyond all bounds as {key!r}", "a finite one")
    return float(value)


def _whole(name: str, value: Any, key: str) -> int:
    found = _number(name, value, key)
    if found != int(found) or not 0 <= found < 2**31:
        raise _wrong(name, f"{found:g} as {key!r}", "a whole number that is not negative")
    return int(found)


def _perhaps(name: str, value: Any, key: str) -> float:
    return math.nan if value is None else _number(name, value, key)


def as_python(found: LayersFile, quantity: str) -> str:
    """Return a program that makes ``values``, and ``heads`` where the file tells of them: a dictionary by fidelity.

    Parameters
    ----------
    found : LayersFile
    quantity : str
        One of `QUANTITIES` or of `HEAD_QUANTITIES`.
    """
    if quantity not in QUANTITIES | HEAD_QUANTITIES:
        raise InputError(f"quantity: got {quantity!r}, expected one of {', '.join(QUANTITIES | HEAD_QUANTITIES)}")
    return f"""import json

import numpy as np

with open({found.name!r}) as stream:
    report = json.load(stream)

quantity = {quantity!r}
values, heads = {{}}, {{}}  # by the fidelity of the run; NaN where there is no such number
for row in report["rows"]:
    values.setdefault(row["fidelity"], []).append(row.get(quantity))
for row in report.get("by_head", []):
    if quantity in row:
        heads.setdefault(row["fidelity"], {{}})[row["layer"]] = np.array(row[quantity], dtype=float)
values = {{fidelity: np.array(column, dtype=float) for fidelity, column in values.items()}}
print(values, heads)
"""


def as_command(found: LayersFile) -> str:
    """Return the command that shows the file again."""
    return shlex.join(["nonlocal", "explore", "--trace", found.name])
