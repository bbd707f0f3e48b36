"""Plain data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, TypeAlias, get_args

import numpy as np

from nlflow.errors import shortened

Column: TypeAlias = type | UnionType

_LARGEST = 2**63  # no whole number that is counted is beyond
_DEEPEST = 100
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, indent: int | None = 1) -> str:
    return json.dumps(tagged(value), allow_nan=False, indent=indent)


def decode(text: str) -> Any:
    """Return the plain data of a text of `encode`; `ValueError` where it is damaged, or nested more than 100 deep."""
    try:
        value = json.loads(text, object_hook=_untagged)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    level = [value]
    for _ in range(_DEEPEST):
        level = [entry for branch in level for entry in _branches(branch)]
        if not level:
            return value
    raise ValueError("nested too deeply")


def _branches(value: Any) -> Iterable[Any]:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (entry for entry in entries if isinstance(entry, dict | list))


def _untagged(entry: dict[str, Any]) -> Any:
    name = entry.get("float") if len(entry) == 1 else None
    return _FLOATS.get(name, entry) if isinstance(name, str) else entry


def tagged(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): tagged(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [tagged(entry) for entry in value]
    if isinstance(value, np.generic):
        return tagged(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def digest(text: str | bytes | memoryview) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text).hexdigest()


def misfit(entry: Any, columns: Mapping[str, Column]) -> str | None:
    """Return why decoded data is no mapping of these names, in this order, to values of these types; else None."""
    if not isinstance(entry, dict):
        return f"{shortened(repr(entry), 60)}, expected {', '.join(columns)}"
    if list(entry) != list(columns):
        return f"{shortened(', '.join(map(str, entry)), 200)}, expected {', '.join(columns)}"
    for name, kind in columns.items():
        if not _fits(entry[name], get_args(kind) or (kind,)):
            return f"{shortened(repr(entry[name]), 60)} as {name}"
    return None


def _fits(value: Any, kinds: tuple[Any, ...]) -> bool:
    if type(value) is int:
        return abs(value) < _LARGEST and (int in kinds or float in kinds)
    return type(value) in kinds  # exactly: to Python a bool is an int


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # NumPy's scalars and arrays
        return plain(value.tolist())
    return value if value is None or isinstance(value, bool | int | str) else str(value)
