"""Texts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from nlflow.errors import visible

_WIDTH = 100  # of a line of the texts that users copy


def digits(value: float | None, form: str = ".4g") -> str:
    if value is None or math.isnan(value):
        return "–"
    return format(value, form).replace("inf", "∞")


def decibels(value: float | None) -> str:
    return "–" if value is None else f"{digits(value, '.2f')} dB"


def note(*texts: str) -> str:
    return "".join(f'<p class="note">{escape(visible(text))}</p>' for text in texts if text)


def refused(*texts: str) -> str:
    return "".join(f'<p class="refused" role="alert">{escape(visible(text))}</p>' for text in texts)


def call(target: str, function: str, first: str, words: Mapping[str, Any]) -> str:
    given = [first, *(f"{name}={value!r}" for name, value in words.items())]
    line = f"{target} = {function}({', '.join(given)})"
    if len(line) <= _WIDTH:
        return line
    return f"{target} = {function}(\n" + "".join(f"    {one},\n" for one in given) + ")"


def shell(program: str, name: str, saving: str) -> str:
    """Return a command for POSIX shells that runs Python code and saves its result to a new file `name`."""
    # The quotes keep the shell from changing the text; a literal of Python never makes a line PYTHON that would end it.
    lines = [program, "import numpy as np", "", f"with open({name!r}, 'xb') as file:", f"    {saving}"]
    return "\n".join(["python - <<'PYTHON'", *lines, "PYTHON"])
