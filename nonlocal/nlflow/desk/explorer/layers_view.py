"""What "Layers" shows."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from nlflow.attention.probing.columns import COLUMNS
from nlflow.errors import FileFormatError, InputError, command, format_bytes, shortened

Floats = NDArray[np.float64]

#: The quantities of a state, with their names on the page.
QUANTITIES = {one.name: one.label + (f", {one.reduce} of heads" if one.by_head else "") for one in COLUMNS if one.label}
#: The quantities of a head.
HEAD_QUANTITIES = {one.name: one.label for one in COLUMNS if one.by_head}
_EXAMPLE = "example.json"
_MOST_BYTES = 2**26
_MOST_ROWS, _MOST_HEADS, _MOST_TEXT = 20_000, 4096, 400
_MOST_NUMBERS = 2**20  # of a quantity of all heads


@dataclass(frozen=True)
class Run:
    """One run."""

    fidelity: float  # of NeuTRENO's term; that of the model itself, or 0
    layers: tuple[str, ...]  # names of the states: the input of each stack, then its layers
    index: NDArray[np.int64]  # number of the layer in its stack, 0 for the input
    columns: dict[str, Floats]  # by the names of `QUANTITIES`; NaN where there is no such number
    heads: dict[str, Floats]  # by the names of `HEAD_QUANTITIES`; NaN for inputs. Empty where the file tells of none


@dataclass(frozen=True)
class LayersFile:
    """A file's content."""

    name: str  # how the file is called
    # model, kind: the model's name or folder, and its class.
    model: str
    kind: str
    tokens: int  # of the input
    fidelity: float | None  # that of the comparison, if there is one
    runs: tuple[Run, ...]
    content: bytes  # the file itself
    built_in: bool = False  # whether it is the example


class _UnfitError(ValueError):
    def __init__(self, got: str, expected: str) -> None:
        super().__init__(f"got {got}, expected {expected}")


def example() -> LayersFile:
    return replace(read_layers(Path(__file__).parent / _EXAMPLE, _EXAMPLE), built_in=True)


def read_layers(path: str | os.PathLike[str], name: str | None = None) -> LayersFile:
    """Read the ``result.json`` of `nonlocal attention --out`; `FileFormatError` for anything else."""
    name = os.fspath(path) if name is None else name
    try:
        content = _content(Path(path))
        return _checked(name, _parsed(content), content)
    except _UnfitError as error:
        raise FileFormatError(
            f"{name}: {error}; write it anew with nonlocal attention MODEL --text TEXT --out DIR"
        ) from error


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
        why = "nested too deeply" if isinstance(error, RecursionError) else shortened(error)
        raise _UnfitError(f"no JSON ({why})", "result.json of nonlocal attention --out") from error


def _is_number(value: Any) -> bool:
    # Whole numbers of JSON may be too long for a float, and 1e999 is read as infinity.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


#: Kinds of values: a test, and the words for messages.
_TEXT = (lambda v: isinstance(v, str) and len(v) <= _MOST_TEXT, f"a text of at most {_MOST_TEXT} characters")
_ROWS = (lambda v: isinstance(v, list) and len(v) <= _MOST_ROWS, f"a list of at most {_MOST_ROWS} objects")
_HEADS = (lambda v: isinstance(v, list) and len(v) <= _MOST_HEADS, f"a list of at most {_MOST_HEADS} numbers")
_NUMBER = (_is_number, "a finite number")
_PERHAPS = (lambda v: v is None or _is_number(v), "a finite number or null")
_WHOLE = (lambda v: _is_number(v) and v == int(v) and 0 <= v < 2**31, "a whole number that is not negative")


def _of(entry: Any, key: str, kind: tuple[Callable[[Any], bool], str]) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise _UnfitError(f"{type(entry).__name__} without {key!r}", f"an object with {key!r}")
    return _fit(entry[key], key, kind)


def _fit(value: Any, key: str, kind: tuple[Callable[[Any], bool], str]) -> Any:
    fits, expected = kind
    if not fits(value):
        size = f" of length {len(value)}" if isinstance(value, list | str) else ""
        got = repr(value) if isinstance(value, float) else f"{type(value).__name__}{size}"
        raise _UnfitError(f"{got} as {key!r}", expected)
    return value


def _checked(name: str, report: Any, content: bytes) -> LayersFile:
    for option, key in (("--why", "parts"), ("--sweep or --report", "stock")):
        if isinstance(report, dict) and key in report:
            raise _UnfitError(f"result.json of nonlocal attention {option}", "that of a run without this option")
    runs: dict[float, list[Mapping[str, Any]]] = {}
    for row in _of(report, "rows", _ROWS):
        runs.setdefault(float(_of(row, "fidelity", _NUMBER)), []).append(row)
    if not runs:
        raise _UnfitError("no rows", "one for each layer")
    fidelity, by_head = report.get("fidelity"), _fit(report.get("by_head", []), "by_head", _ROWS)
    return LayersFile(
        name=name,
        model=_of(report, "model", _TEXT),
        kind=_of(report, "kind", _TEXT),
        tokens=int(_of(report, "tokens", _WHOLE)),
        fidelity=None if fidelity is None else float(_fit(fidelity, "fidelity", _NUMBER)),
        runs=tuple(_run(value, found, by_head) for value, found in runs.items()),
        content=content,
    )


def _run(fidelity: float, rows: list[Mapping[str, Any]], by_head: list[Any]) -> Run:
    layers = tuple(_of(row, "layer", _TEXT) for row in rows)
    index = np.array([_of(row, "index", _WHOLE) for row in rows], dtype=np.int64)
    known = [key for key in QUANTITIES if any(row.get(key) is not None for row in rows)]
    columns = {key: _numbers([row.get(key) for row in rows], key) for key in known}
    places = {layer: number for number, layer in enumerate(layers)}
    found: dict[str, dict[int, Floats]] = {}
    for entry in by_head:
        if _of(entry, "fidelity", _NUMBER) != fidelity:
            continue
        layer = _of(entry, "layer", _TEXT)
        if layer not in places:
            raise _UnfitError(f"heads of {layer!r}, which is no layer", "those of layers among the rows")
        for key in entry.keys() & HEAD_QUANTITIES.keys():
            found.setdefault(key, {})[places[layer]] = _numbers(_of(entry, key, _HEADS), key)
    heads = {key: _filled(found[key], len(layers)) for key in HEAD_QUANTITIES if key in found}
    return Run(fidelity, layers, index, columns, heads)


def _numbers(values: list[Any], key: str) -> Floats:
    return np.array([math.nan if _fit(one, key, _PERHAPS) is None else float(one) for one in values])


def _filled(lines: dict[int, Floats], states: int) -> Floats:
    """Return the values of heads by state, shape (states, heads); NaN where there are none."""
    most = max(map(len, lines.values()))
    if most * states > _MOST_NUMBERS:
        raise _UnfitError(f"{most} heads of {states} states", f"at most {_MOST_NUMBERS} numbers in all")
    filled = np.full((states, most), math.nan)
    for place, values in lines.items():
        filled[place, : len(values)] = values
    return filled


def as_python(found: LayersFile, quantity: str) -> str:
    if quantity not in QUANTITIES | HEAD_QUANTITIES:
        raise InputError(f"quantity: got {quantity!r}, expected one of {', '.join(QUANTITIES | HEAD_QUANTITIES)}")
    imports, path = "import json\n", repr(found.name)
    if found.built_in:
        imports += "from importlib.resources import files\n"
        path = f'files("nlflow.desk.explorer") / {found.name!r}'
    return f"""{imports}
import numpy as np

with open({path}) as stream:
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
    if found.built_in:
        return "nonlocal explore"
    return command("nonlocal", "explore", "--trace", Path(found.name))
