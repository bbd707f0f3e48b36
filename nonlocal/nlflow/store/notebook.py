"""Objects in notebooks."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from nlflow.errors import shortened

_MOST = 400  # characters of a text
_POINTS = 200  # of a curve
_PIXELS = 96  # of a picture, along each side
_WIDTH, _HEIGHT = 220, 80


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    names = "".join(f"<th scope='col'>{escape(name)}</th>" for name in head)
    lines = [f"<tr>{names}</tr>"] if head else []
    for name, *values in rows:
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        lines.append(f"<tr><th scope='row'>{escape(name)}</th>{cells}</tr>")
    return f'<table class="numbers">{"".join(lines)}</table>'


def card(title: str, rows: Iterable[tuple[str, Any]], *pictures: str) -> str:
    said = [(name, shortened(value, _MOST)) for name, value in rows if value not in (None, "")]
    return f"<div><b>{escape(title)}</b>{table(said)}{''.join(pictures)}</div>"


def picture(caption: str, values: Any, x: Any = None) -> str:
    array = np.asarray(values)
    if array.ndim not in (1, 2) or array.size == 0 or array.dtype.kind not in "biuf":
        return ""
    drawn = _grey(array) if array.ndim == 2 else _curve(array, np.arange(array.size) if x is None else np.asarray(x))
    note = f"<figcaption><small>{escape(shortened(caption, _MOST))}</small></figcaption>"
    return f'<figure style="display:inline-block;margin:4px 12px 4px 0">{drawn}{note}</figure>' if drawn else ""


def _curve(values: Any, x: Any) -> str:
    """Return a curve as SVG, with its smallest and largest value; an empty text where nothing is finite."""
    kept = np.unique(np.linspace(0, values.size - 1, min(values.size, _POINTS)).round().astype(int))
    kept = kept[np.isfinite(values[kept])]
    if not kept.size:
        return ""
    low, high = float(values[kept].min()), float(values[kept].max())
    across, up = _share(x[kept]) * _WIDTH, (1 - _share(values[kept])) * _HEIGHT
    places = " ".join(f"{one:.1f},{other:.1f}" for one, other in zip(across, up, strict=True))
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT + 28}" viewBox="-4 -14 {_WIDTH + 8} {_HEIGHT + 28}" '
        'font-size="10" fill="currentColor" role="img">'
        f'<text x="0" y="-4">{high:.4g}</text><text x="0" y="{_HEIGHT + 12}">{low:.4g}</text>'
        f'<polyline points="{places}" fill="none" stroke="#0b5394" stroke-width="1.5"/></svg>'
    )


def _grey(values: Any) -> str:
    """Return a picture as PNG within HTML, the largest value white; empty without Pillow or finite values."""
    try:
        from PIL import Image
    except ImportError:
        return ""
    rows, columns = (np.unique(np.linspace(0, n - 1, min(n, _PIXELS)).round().astype(int)) for n in values.shape)
    part = values[np.ix_(rows, columns)].astype(np.float64)
    if not np.isfinite(part).all():
        return ""
    stream = io.BytesIO()
    Image.fromarray((255 * _share(part)).round().astype(np.uint8)).save(stream, "PNG")
    content = base64.b64encode(stream.getvalue()).decode("ascii")
    height = max(round(_WIDTH / 2 * part.shape[0] / part.shape[1]), 1)
    size = f"width:{_WIDTH // 2}px;height:{min(height, _WIDTH)}px"
    return f'<img alt="" style="{size};image-rendering:pixelated" src="data:image/png;base64,{content}"/>'


def _share(values: Any) -> Any:
    """Return numbers as shares of their range, 1/2 where they are all the same."""
    wide = np.asarray(values, np.float64)
    span = wide.max() / 2 - wide.min() / 2  # halves, whose difference a float can hold
    return np.full(wide.shape, 0.5) if span == 0 else (wide / 2 - wide.min() / 2) / span
