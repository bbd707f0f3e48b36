"""Numbers, Python texts and commands as the explorer shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["call", "decibels", "digits", "shell"]

_WIDTH = 100  # of a line of the texts that users copy


def digits(value: float | None, form: str = ".4g") -> str:
    """Return a number for people; a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return format(value, form).replace("inf", "∞")


def decibels(value: float | None) -> str:
    """Return a number of decibels for people."""
    return "–" if value is None else f"{digits(value, '.2f')} dB"


def call(target: str, function: str, first: str, words: Mapping[str, Any]) -> str:
    """Return an assignment of a call as Python text, over several lines where it is long."""
    given = [first, *(f"{name}={value!r}" for name, value in words.items())]
    line = f"{target} = {function}({', '.join(given)})"
    if len(line) <= _WIDTH:
        return line
    return f"{target} = {function}(\n" + "".join(f"    {one},\n" for one in given) + ")"


def shell(program: str, saving: str) -> str:
    """Return a command for the shells of Unix that runs a Python text and then saves what it made."""
    # Quoted, so that the shell changes nothing in it; names are literals of Python, in which no line ends the text.
    return f"python - <<'PYTHON'\n{program}\n{saving}\nPYTHON"
