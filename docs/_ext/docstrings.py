"""Prepares docstrings, which are written for readers of the source, for reStructuredText."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from typing import Any

from sphinx.application import Sphinx

_LITERAL = re.compile(r"(``.*?``|:[\w:]+:`[^`]*`)")


def own_members(module: str, name: str) -> tuple[list[str], list[str]]:
    """Return the properties and methods that this package defines, without the fifty of torch's modules."""
    cls = getattr(importlib.import_module(module), name)
    properties, functions = [], []
    for member in sorted(vars_of(cls)):
        value = inspect.getattr_static(cls, member)
        if member.startswith("_") or not any(getattr(vars(base).get(member), "__doc__", None) for base in cls.__mro__):
            continue  # an override has the docstring of what it overrides
        if isinstance(value, property | functools.cached_property):
            properties.append(member)
        elif isinstance(value, staticmethod | classmethod) or inspect.isfunction(value):
            functions.append(member)
    return properties, functions


def vars_of(cls: type) -> set[str]:
    """Return the names that classes of this package define, inherited ones too."""
    return {name for base in cls.__mro__ if base.__module__.startswith("nlflow") for name in vars(base)}


def _escape_bars(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape the bars of norms: between bars reStructuredText would look for a substitution."""
    literal: int | None = None  # indentation of the paragraph that a literal block belongs to
    for number, line in enumerate(lines):
        indentation = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indentation <= literal:
            literal = None
        if literal is None and not line.lstrip().startswith(">>>"):
            parts = _LITERAL.split(line)
            lines[number] = "".join(part if place % 2 else part.replace("|", r"\|") for place, part in enumerate(parts))
        if literal is None and line.rstrip().endswith("::"):
            literal = indentation


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("autodoc-process-docstring", _escape_bars, priority=100)  # before numpydoc
    app.config.autosummary_context = {"own_members": own_members}
    return {"parallel_read_safe": True, "parallel_write_safe": True}
