"""Packages that adapters are for, which are installed only on request."""

from __future__ import annotations

import importlib
from typing import Any

from nlflow.errors import InputError, shortened


def base(module: str, name: str, install: str) -> Any:
    """Return a class to derive an adapter from.

    Where its package is missing it is one that cannot be instantiated: that raises `InputError` with the command that
    installs the package. So adapters can be imported, and documented, without it.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        message = f"{module.partition('.')[0]}: it cannot be imported ({shortened(error)}); {install}"

    class Missing:
        def __new__(cls, *_: Any, **__: Any) -> Any:
            raise InputError(message)

    return Missing
