"""What the programs that are killed have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable

from nlflow.backends.interrupts import leave
from nlflow.errors import NlflowError

__all__ = ["program"]


def program(main: Callable[..., int]) -> None:
    """Run `main` with the arguments of the command line, and end with its status; 1 and a line for a user's error."""
    try:
        code = main(*sys.argv[1:])
        if code in (130, 143):
            leave(code)
        sys.exit(code)
    except NlflowError as error:
        print(error)
        sys.exit(1)
