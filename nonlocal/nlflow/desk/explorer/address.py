"""The state of a page in its address, such as ``#tab=flow&width=0.05``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote_to_bytes

from nlflow.errors import InputError, check_choice, shortened

AUTOMATIC = "automatic"  # the word of a number that the program chooses
_TAB = "tab"
_MOST = 4000  # characters
_ROUNDING = 1e-9  # steps by which a number may be off, relative
_BROKEN = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True)
class Address:
    """What it says."""

    tab: str  # empty where it names none
    words: dict[str, str]  # by the names of controls
    faults: tuple[str, ...]  # what of it cannot be read, in words


def written(tab: str, words: Mapping[str, str]) -> str:
    return "&".join(f"{quote(name)}={quote(word, safe='')}" for name, word in {_TAB: tab, **words}.items())


def read(text: str, tabs: Sequence[str]) -> Address:
    text = text.removeprefix("#")
    if len(text) > _MOST:
        return Address("", {}, (f"address: got {len(text)} characters after #, expected at most {_MOST}",))
    words: dict[str, str] = {}
    faults: list[str] = []
    for pair in filter(None, text.split("&")):
        try:
            name, word = _parted(pair)
            if name in words:
                raise InputError(f"{shortened(name)}: got it twice in the address, expected it once; the first counts")
            words[name] = check_choice(_TAB, word, tuple(tabs)) if name == _TAB else word
        except InputError as error:
            faults.append(str(error))
    return Address(words.pop(_TAB, ""), words, tuple(faults))


def _parted(pair: str) -> tuple[str, str]:
    name, equals, word = pair.partition("=")
    try:
        if not name or not equals or _BROKEN.search(pair):
            raise ValueError(pair)
        return unquote_to_bytes(name).decode(), unquote_to_bytes(word).decode()
    except ValueError as error:
        got = repr(shortened(pair))
        raise InputError(f"address: got {got} after #, expected name=value; copy the whole address") from error


def number(name: str, word: str, low: float, high: float, *, step: float | None, optional: bool) -> float | None:
    if optional and word == AUTOMATIC:
        return None
    try:
        value = float(word) if word.isascii() and "_" not in word else float("nan")
    except ValueError:
        value = float("nan")
    count = 0.0 if step is None or not low <= value <= high else (value - low) / step
    if not low <= value <= high or abs(count - round(count)) > _ROUNDING * max(1.0, count):
        steps = "" if step is None else f" in steps of {step:g}"
        other = f", or {AUTOMATIC}" if optional else ""
        raise InputError(
            f"{shortened(name)}: got {shortened(word)!r}, expected a number from {low:g} to {high:g}{steps}{other}"
        )
    return value


def word_of(value: float | None) -> str:
    return AUTOMATIC if value is None else repr(float(value)).removesuffix(".0")
