"""Takes figures from the records of the benchmarks, so no figure on a page is typed by hand.

``.. measured:: pairwise.json`` shows the rows of a record as a table, with their machine, and says which sources have
changed since. With names of benchmarks after it, it shows those of its rows. ``:columns: mode, rate=Mpixel/s`` names
others than the usual columns, with their titles.

``:measured:`learning.json // digits, 1 labels a class, Poisson: one fit // ours``` is one figure of the row whose work
begins with these words; without the last part it is the ratio.

``docs/missed.md`` is written by the build: all rows of all records whose goal was not met. It is kept in the repository
as well, since the README links to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective, SphinxRole

from benchmarks.sources import told
from validation.tables import markdown

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
MISSED = Path(__file__).parents[1] / "missed.md"
_USUAL = "work, peer, ours=nlflow, ratio, target, met"
_WIDE = 46  # of the first column, and 12 of each other
_KNOWN: dict[str, str] = {}  # digests of the sources as they are


@cache
def content_of(name: str) -> dict[str, Any]:
    """Return what a record holds."""
    found = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    content: dict[str, Any] = found.get("content", found)
    return content


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return the rows of a record, in sections or not."""
    content = content_of(name)
    rows = list(content["rows"]) if "rows" in content else [content["row"]] if "row" in content else []
    rows += [row for section in content.get("sections", {}).values() for row in section if row not in rows]
    return rows


def figure(name: str, work: str, column: str = "ratio") -> str:
    """Return a figure of the one row of a record whose work begins with some words.

    Raises
    ------
    LookupError
        Where no row begins so, or several do.
    """
    rows = [row for row in rows_of(name) if str(row.get("work", row.get("mode", ""))).startswith(work)]
    if len(rows) != 1 or column not in rows[0]:
        raise LookupError(f"{name}: {len(rows)} rows begin with {work!r}, expected one with {column!r}")
    return _text(rows[0], column)


def missed() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of all records whose goal was not met, with the name of the record."""
    for path in sorted(FOLDER.glob("*.json")):
        for row in rows_of(path.name):
            if row.get("met") is False and row.get("target") not in (None, "none"):
                yield path.name, row


def missed_page() -> str:
    """Return the page of what was missed."""
    rows = list(missed())
    lines = [
        (f"`{name.removesuffix('.json')}`", *(_text(row, key) for key in ("work", "peer", "ours", "ratio", "target")))
        for name, row in rows
    ]
    every = sum(row.get("target") not in (None, "none") for path in FOLDER.glob("*.json") for row in rows_of(path.name))
    return (
        "# What was missed\n\n"
        f"{len(rows)} of the {every} goals in the records of `benchmarks/results` were not met. Where times, bytes or "
        "iterations are compared, a goal with >= is for theirs over ours, one with <= for ours over theirs.\n\n"
        + markdown(("record", "work", "peer", "nlflow", "figure", "goal"), lines)
        + "\n"
    )


def write_missed() -> None:
    """Write the page of what was missed, where it is another one now."""
    page = missed_page()
    if not MISSED.exists() or MISSED.read_text(encoding="utf-8") != page:
        MISSED.write_text(page, encoding="utf-8")


class Measured(SphinxDirective):
    """``.. measured:: FILE [BENCHMARK]...``, see the module."""

    required_arguments = 1
    optional_arguments = 20
    option_spec = {"columns": str}  # noqa: RUF012  # Sphinx's own way

    def run(self) -> list[nodes.Node]:
        name, *wanted = self.arguments
        self.env.note_dependency(str(FOLDER / name))
        rows = [row for row in rows_of(name) if not wanted or row["benchmark"] in wanted]
        if not rows:
            raise self.error(f"measured: got {' '.join(wanted)}, but {name} has no such rows")
        content = content_of(name)
        machine = content.get("machine") or rows[0]["machine"]
        versions = ", ".join(
            f"{package} {machine[package]}" for package in ("python", "numpy", "numba", "torch") if package in machine
        )
        about = nodes.paragraph(
            text=f"{machine['processor']}, {machine['cores']} cores; {versions}. "
            f"{told(content.get('sources', {}), _KNOWN)}"
        )
        about["classes"].append("equation-source")
        return [_table(rows, self.options.get("columns", _USUAL)), about]


class Figure(SphinxRole):
    """``:measured:`FILE // WORK // COLUMN```, see the module."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        parts = [part.strip() for part in self.text.split("//")]
        try:
            text = figure(*parts)
        except (LookupError, TypeError, OSError) as error:
            raise ExtensionError(f"{self.get_location()}: measured: got {self.text!r}: {error}") from error
        self.env.note_dependency(str(FOLDER / parts[0]))
        return [nodes.Text(text)], []


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if key == "met":
        return "–" if row.get("target") in (None, "none") else "yes" if value else "no"
    if value is None or value == "none":
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(rows: list[dict[str, Any]], columns: str) -> nodes.Node:
    pairs = [column.strip().partition("=") for column in columns.split(",")]
    titles, keys = [title or key for key, _, title in pairs], [key for key, _, _ in pairs]
    group = nodes.tgroup(cols=len(keys))
    group += [nodes.colspec(colwidth=12 if index else _WIDE) for index in range(len(keys))]
    head, body = nodes.thead(), nodes.tbody()
    for part, lines in ((head, [titles]), (body, [[_text(row, key) for key in keys] for row in rows])):
        for line in lines:
            entries = nodes.row()
            for text in line:
                entries += nodes.entry("", nodes.paragraph(text=text))
            part += entries
    group += [head, body]
    return nodes.table("", group, classes=["measured"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("measured", Measured)
    app.connect("builder-inited", lambda app: write_missed(), priority=100)
    app.add_role("measured", Figure())
    return {"parallel_read_safe": True, "parallel_write_safe": True}
