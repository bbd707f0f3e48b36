"""Makes tables of measurements from the JSON files of the benchmarks, so no figure on a page is typed by hand.

``.. measured:: results.json pairwise scattered`` shows the rows of these benchmarks as a table, with their machine.
Without names it shows all rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
_COLUMNS = (
    ("work", "work"),
    ("peer", "peer"),
    ("ours", "nlflow"),
    ("ratio", "ratio"),
    ("target", "target"),
    ("met", "met"),
)


class Measured(SphinxDirective):
    """``.. measured:: FILE [BENCHMARK]...``, see the module."""

    required_arguments = 1
    optional_arguments = 20

    def run(self) -> list[nodes.Node]:
        path = FOLDER / self.arguments[0]
        self.env.note_dependency(str(path))
        found = json.loads(path.read_text(encoding="utf-8"))
        content = found.get("content", found)  # of a record
        wanted = self.arguments[1:]
        every = content["rows"] if "rows" in content else [content["row"]]
        rows = [row for row in every if not wanted or row["benchmark"] in wanted]
        if not rows:
            raise self.error(f"measured: got {' '.join(wanted)}, but {path.name} has no such rows")
        machine = content["machine"]
        versions = ", ".join(
            f"{name} {machine[name]}" for name in ("python", "numpy", "numba", "torch") if name in machine
        )
        about = nodes.paragraph(text=f"{machine['processor']}, {machine['cores']} cores; {versions}.")
        about["classes"].append("equation-source")
        return [_table([[_text(row, key) for key, _ in _COLUMNS] for row in rows]), about]


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if key == "met":
        return "–" if row.get("target") in (None, "none") else "yes" if value else "no"
    if value is None or value == "none":
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(rows: list[list[str]]) -> nodes.Node:
    group = nodes.tgroup(cols=len(_COLUMNS))
    group += [nodes.colspec(colwidth=width) for width in (46, 12, 12, 8, 10, 6)]
    head, body = nodes.thead(), nodes.tbody()
    for part, lines in ((head, [[title for _, title in _COLUMNS]]), (body, rows)):
        for line in lines:
            row = nodes.row()
            for text in line:
                row += nodes.entry("", nodes.paragraph(text=text))
            part += row
    group += [head, body]
    return nodes.table("", group, classes=["measured"])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.add_directive("measured", Measured)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
