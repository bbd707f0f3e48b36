"""Plain data as JSON text, to the last bit, and digests."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["decode", "digest", "encode", "tagged"]

_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any, indent: int | None = 1) -> str:
    """Return plain data as JSON text from which `decode` gets every float back to the last bit."""
    return json.dumps(tagged(value), allow_nan=False, indent=indent)


def decode(text: str) -> Any:
    """Return what `encode` was given.

    Raises
    ------
    ValueError
        For text that is no JSON, a truncated file for instance.
    """
    try:
        return json.loads(text, object_hook=_untagged)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _untagged(entry: dict[str, Any]) -> Any:
    name = entry.get("float") if len(entry) == 1 else None
    return _FLOATS.get(name, entry) if isinstance(name, str) else entry


def tagged(value: Any) -> Any:
    """Return `value` in JSON's types, NaN and infinities, which JSON lacks, as {"float": "nan"}."""
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
    """Return the SHA-256 of `text` in hexadecimal."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()
