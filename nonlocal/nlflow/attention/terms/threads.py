"""Values that each thread has for itself, in models that several threads run."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch


def thread_number() -> int:
    """Return the number of this thread; compiled code has one."""
    return 0 if torch.compiler.is_compiling() else get_ident()


class OfThread:
    """A value that each thread has for itself."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}

    def get(self) -> Any:
        """Return the value of this thread, None where it has none."""
        return self._values.get(thread_number())

    def set(self, value: Any) -> None:
        """Keep a value for this thread; None keeps nothing."""
        if value is None:
            self._values.pop(thread_number(), None)
        else:
            self._values[thread_number()] = value

    def take(self) -> Any:
        """Return the value of this thread, and keep it no longer."""
        return self._values.pop(thread_number(), None)
