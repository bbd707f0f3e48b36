"""Pieces of HTML and of layout that the tabs share."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import panel as pn

from nlflow.explorer.widgets import Markup

__all__ = ["columns", "heading", "note", "numbers"]


def numbers(rows: Sequence[tuple[str, str]]) -> str:
    """Return a table of names and values."""
    lines = "".join(f"<tr><th scope='row'>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f'<table class="numbers">{lines}</table>'


def note(*texts: str) -> str:
    """Return notes, a paragraph each."""
    return "".join(f'<p class="note">{escape(text)}</p>' for text in texts if text)


def heading(text: str) -> Any:
    """Return a heading."""
    return Markup(shown=f"<h2>{escape(text)}</h2>")


def columns(*parts: Any, weights: Sequence[int] = (), least: int = 300) -> Any:
    """Return parts beside each other, below each other where one would have less than `least` pixels."""
    for part, weight in zip(parts, weights or [1] * len(parts), strict=True):
        least = 300
        part.styles = {
            "flex": f"{weight} 1 {least if weight == 1 else 2 * least}px",
            "min-width": f"min({least}px, 100%)",
        }
    return pn.FlexBox(*parts, gap="16px", align_items="flex-start", sizing_mode="stretch_width")
