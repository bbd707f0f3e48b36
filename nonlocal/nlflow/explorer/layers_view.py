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

from nlflow.errors import FileFormatError, InputError, format_bytes

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


class _UnfitError(ValueError):
    """What a file holds in place of what is expected."""

    def __init__(self, got: str, expected: str) -> None:
        super().__init__(f"got {got}, expected {expected}")


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
        content = _content(Path(path))
        return _checked(name, _parsed(content), content)
    except _UnfitError as error:
        raise FileFormatError(f"{name}: {error}; write it anew with nonlocal attention --out DIR") from error


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise _UnfitError(str(error.strerror or error), "a file that can be read") from error
    if len(content) > _MOST_BYTES:
        raise _UnfitError(f"more than {format_bytes(_MOST_BYTES)}", "less")
    return content


def _parsed(content: bytes) -> Any:
    def constant(text: str) -> NoReturn:
        raise ValueError(f"the number {text}")

    try:
        return json.loads(content.decode(), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:160]
        raise _UnfitError(f"no JSON ({why})", "result.json of nonlocal attention --out") from error


def _checked(name: str, report: Any, content: bytes) -> LayersFile:
    runs: dict[float, list[Mapping[str, Any]]] = {}
    for row in _list(report, "rows", _MOST_ROWS):
        runs.setdefault(_number(row, "fidelity"), []).append(row)
    if not runs:
        raise _UnfitError("no rows", "one for each layer")
    by_head = _list(report, "by_head", _MOST_ROWS) if "by_head" in report else []
    return LayersFile(
        name=name,
        model=_text(report, "model"),
        kind=_text(report, "kind"),
        tokens=_whole(report, "tokens"),
        fidelity=None if report.get("fidelity") is None else _number(report, "fidelity"),
        runs=tuple(_run(value, found, by_head) for value, found in runs.items()),
        content=content,
    )


def _run(fidelity: float, rows: list[Mapping[str, Any]], by_head: list[Any]) -> Run:
    layers = tuple(_text(row, "layer") for row in rows)
    index = np.array([_whole(row, "index") for row in rows], dtype=np.int64)
    known = [key for key in QUANTITIES if any(row.get(key) is not None for row in rows)]
    columns = {key: np.array([_finite(row.get(key), key) for row in rows]) for key in known}
    places = {layer: number for number, layer in enumerate(layers)}
    found: dict[str, dict[int, list[float]]] = {}
    for entry in by_head:
        if _number(entry, "fidelity") != fidelity:
            continue
        layer = _text(entry, "layer")
        if layer not in places:
            raise _UnfitError(f"heads of {layer!r}, which is no layer", "those of layers among the rows")
        for key in HEAD_QUANTITIES:
            if key in entry:
                values = [_finite(value, key) for value in _list(entry, key, _MOST_HEADS)]
                found.setdefault(key, {})[places[layer]] = values
    heads = {key: _filled(lines, len(layers)) for key, lines in found.items()}
    return Run(fidelity, layers, index, columns, heads)


def _filled(lines: dict[int, list[float]], states: int) -> Floats:
    """Return the values of heads by state, shape (states, heads); NaN where there are none."""
    most = max(map(len, lines.values()))
    if most * states > _MOST_NUMBERS:
        raise _UnfitError(f"{most} heads of {states} states", f"at most {_MOST_NUMBERS} numbers in all")
    filled = np.full((states, most), math.nan)
    for place, values in lines.items():
        filled[place, : len(values)] = values
    return filled


def _of(entry: Any, key: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise _UnfitError(f"{type(entry).__name__} without {key!r}", f"an object with {key!r}")
    return entry[key]


def _list(entry: Any, key: str, most: int) -> list[Any]:
    value = _of(entry, key)
    if not isinstance(value, list) or len(value) > most:
        got = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
        raise _UnfitError(f"{got} as {key!r}", f"a list of at most {most}")
    return value


def _text(entry: Any, key: str) -> str:
    value = _of(entry, key)
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise _UnfitError(f"{type(value).__name__} as {key!r}", f"a text of at most {_MOST_TEXT} characters")
    return value


def _number(entry: Any, key: str) -> float:
    value = _of(entry, key)
    if value is None:
        raise _UnfitError(f"null as {key!r}", "a number")
    return _finite(value, key)


def _whole(entry: Any, key: str) -> int:
    found = _number(entry, key)
    if found != int(found) or not 0 <= found < 2**31:
        raise _UnfitError(f"{found:g} as {key!r}", "a whole number that is not negative")
    return int(found)


def _finite(value: Any, key: str) -> float:
    """Return a number of the file; NaN for none."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _UnfitError(f"{type(value).__name__} as {key!r}", "a number")
    # Whole numbers of JSON may be too long for a float, and 1e999 is read as infinity.
    if not -1e300 < value < 1e300:
        raise _UnfitError(f"a number beyond all bounds as {key!r}", "a finite one")
    return float(value)


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
