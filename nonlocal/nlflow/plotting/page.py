"""HTML pages in one file, without network and scripts."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nlflow.plotting.base import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { --good: #1b7f4b; --bad: #b03a2e; --mute: #667; --line: #d9dce3; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2230; max-width: 62rem; margin: 0 auto; padding: 2rem 1.2rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 0; }
p { margin: .5rem 0; } .mute { color: var(--mute); font-size: .9rem; }
table { border-collapse: collapse; width: 100%; margin: .8rem 0; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--mute); } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
section { border-top: 2px solid var(--line); padding-top: 1.4rem; margin-top: 2rem; }
.mark { font-weight: 600; white-space: nowrap; } .pass { color: var(--good); }
.fail, .error { color: var(--bad); } .not-run { color: var(--mute); }
figure { margin: 1.2rem 0; }
figure img { width: 100%; height: auto; border: 1px solid var(--line); border-radius: 4px; }
figcaption { color: var(--mute); font-size: .9rem; }
blockquote { margin: .6rem 0; padding: .1rem 1rem; border-left: 3px solid var(--line); }
a { color: #0b5394; text-decoration: none; } a:hover { text-decoration: underline; }
pre { white-space: pre-wrap; background: #f5f6f8; padding: .6rem; border-radius: 4px; font-size: .85rem; }
@media print { body { max-width: none; padding: 0; font-size: 11pt; } figure, tr { break-inside: avoid; } }
"""


def text(value: object) -> str:
    return html.escape(str(value))


def page(title: str, body: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{text(title)}</title>
<style>{STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def image(data: bytes, caption: str, form: str = "png") -> str:
    kind = {"svg": "svg+xml"}.get(form, form)
    words = text(caption)
    shown = f'<img src="data:image/{kind};base64,{base64.b64encode(data).decode()}" alt="{words}">'
    return f"<figure>{shown}<figcaption>{words}</figcaption></figure>"


def picture(figure: Figure, caption: str, form: str = "svg") -> str:
    return image(render(figure, form, outlines=True), caption, form)


def download(name: str, content: str, words: str) -> str:
    data = base64.b64encode(content.encode()).decode()
    return f'<a download="{text(name)}" href="data:text/csv;base64,{data}">{text(words)}</a>'


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    head = "".join(f"<th>{text(heading)}</th>" for heading in columns.values())
    lines = []
    for row in rows:
        cells = []
        for name in columns:
            value = row.get(name, "")
            number = isinstance(value, int | float) and not isinstance(value, bool)
            shown = f"{value:.3g}" if isinstance(value, float) else str(value)
            cells.append(f'<td class="number">{text(shown)}</td>' if number else f"<td>{text(shown)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
