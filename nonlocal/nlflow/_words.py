"""How values, words and commands are told."""

from __future__ import annotations

import os
import re
import shlex
import sys
import unicodedata
from collections.abc import Iterable
from itertools import islice
from pathlib import PurePath

_IGNORED = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def visible(text: str, keep: str = "") -> str:
    r"""Return a text with escapes such as ``\x1b`` for characters that are not seen, except those of `keep`."""
    return "".join(one if one in keep or _is_seen(one) else one.encode("unicode_escape").decode() for one in text)


def _is_seen(letter: str) -> bool:
    return (letter.isprintable() and not _IGNORED.match(letter)) or unicodedata.category(letter) == "Zs"


def quoted(word: object) -> str:
    """Quote a word for POSIX shells, in one line, with escapes for characters that are not seen.

    A word that ends with a newline needs bash, ksh or zsh. A path that begins with a dash gets ``./`` in front.
    """
    text = str(word)
    text = f"./{text}" if isinstance(word, PurePath) and text.startswith("-") else text
    if all(map(_is_seen, text)):
        return shlex.quote(text)
    form = "".join(one if _is_seen(one) and one not in "-%'\\" else _bytes_of(one) for one in text)
    # $(...) takes newlines from the end; not all shells know the other form, which keeps them.
    return f"$'{form}'" if text.endswith("\n") else f"\"$(printf '{form}')\""


def _bytes_of(letter: str) -> str:
    try:
        found = os.fsencode(letter)
    except UnicodeEncodeError:  # half of a pair, which names inside files may hold, and no name of a file
        found = letter.encode("utf-8", "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in found)


def command(*words: object) -> str:
    return " ".join(map(quoted, words))


def shortened(value: object, most: int = 160) -> str:
    text = visible(" ".join(str(value).split())) or type(value).__name__
    return text if len(text) <= most else text[: most - 3] + "..."


def listed(values: Iterable[object], most: int = 5, form: str = "") -> str:
    first = [f"{value:{form}}" for value in islice(values, most + 1)]
    return ", ".join(first[:most]) + ", ..." * (len(first) > most)


def all_digits(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


def shown(value: object) -> str:
    return shortened(repr(value), 60)


def kind_of(value: object) -> str:
    """Return the name of the type of a value; of a class, given where an instance is expected, its own."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def format_bytes(count: float) -> str:
    count = min(count, sys.float_info.max)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def install_command(extra: str) -> str:
    """Return the command that installs what an extra needs for this Python."""
    return command(sys.executable or "python", "-m", "pip", "install", f"nlflow[{extra}]")
