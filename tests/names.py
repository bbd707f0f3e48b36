"""Public names, and from a dotted name on a page to the object of this name."""

from __future__ import annotations

import importlib
from typing import Any

import nlflow

__all__ = ["FOUND", "resolved"]

FOUND = sorted(nlflow.__all__)
"""The names of the root."""


def resolved(name: str) -> Any:
    """Return the object of a dotted name."""
    parts = name.split(".")
    found: Any = None
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{name}: nothing has this name")
