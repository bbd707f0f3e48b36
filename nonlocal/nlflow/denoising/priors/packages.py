"""Packages that adapters need, which are installed only on request."""

from __future__ import annotations

import importlib
from typing import Any

from nlflow.errors import InputError, shortened


def needed(module: str, install: str) -> Any:
    """Return a module, or raise `InputError` with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise InputError(
            f"{name}: this adapter needs it, and it cannot be imported ({shortened(error)}); {install}"
        ) from error
