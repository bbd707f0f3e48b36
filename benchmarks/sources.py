"""Which sources a record measured: a digest of each module that was loaded, without its comments and docstrings."""

from __future__ import annotations

import hashlib
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import nlflow

PACKAGE = Path(nlflow.__file__).parent
_SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
_BEFORE_A_STATEMENT = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


def measured() -> dict[str, str]:
    """Return the digests of the package's modules that this process has loaded, by their paths in the package."""
    files = [Path(module.__file__) for name, module in sorted(sys.modules.items())
             if name.partition(".")[0] == "nlflow" and getattr(module, "__file__", None)]  # fmt: skip
    return {path.relative_to(PACKAGE).as_posix(): digest(path.read_bytes()) for path in files if path.suffix == ".py"}


def digest(source: bytes) -> str:
    """Return ten digits that change with the code, but not with comments, docstrings and the way it is set."""
    found, before = hashlib.sha256(), tokenize.ENCODING
    for token in tokenize.tokenize(io.BytesIO(source).readline):
        docstring = token.type == tokenize.STRING and before in _BEFORE_A_STATEMENT
        if token.type not in _SILENT and not docstring:
            found.update(token.string.encode())
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return found.hexdigest()[:10]


def changed(sources: Mapping[str, str], known: dict[str, str] | None = None) -> list[str]:
    """Return the modules that are other ones now, or gone; `known` keeps what is read for the next call."""
    known = {} if known is None else known
    for name in sources:
        if name not in known:
            path = PACKAGE / name
            known[name] = digest(path.read_bytes()) if path.is_file() else ""
    return [name for name, was in sources.items() if known[name] != was]


def told(sources: Mapping[str, str], known: dict[str, str] | None = None) -> str:
    """Return a sentence about what has changed since a record was written."""
    if not sources:
        return "The record does not say which sources it measured."
    others = Counter(name.partition("/")[0].removesuffix(".py") for name in changed(sources, known))
    if not others:
        return f"The {len(sources)} modules that were measured have not changed since."
    rooms = ", ".join(f"{room} {count}" for room, count in others.most_common())
    return f"Of the {len(sources)} modules that were measured {sum(others.values())} have changed since: {rooms}."
