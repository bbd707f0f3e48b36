"""Bars of progress."""

from __future__ import annotations

import os
import sys
from typing import Any


def bar(*args: Any, progress: Any = True, **words: Any) -> Any:
    from tqdm import tqdm

    from nlflow.errors import check_flag  # loads NumPy, and the command begins without

    hidden = not check_flag("progress", progress)
    return tqdm(*args, leave=False, file=sys.stderr, disable=hidden, **_size(), **words)


def _size() -> dict[str, int]:
    """Return the usual size for a terminal that does not know its own: in 0 rows tqdm draws nothing."""
    try:
        columns, lines = os.get_terminal_size(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # it is no terminal
        return {}
    return {} if columns and lines else {"ncols": 80, "nrows": 24}
