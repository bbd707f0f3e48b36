"""Names that pages write, and what they stand for."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["resolved"]


def resolved(name: str) -> Any:
    """Return what a dotted name stands for."""
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
    raise AssertionError(f"{name} is the name of nothing")
