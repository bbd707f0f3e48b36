"""The tab "Layers"."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import panel as pn

from nlflow.explorer import layers_view as view
from nlflow.explorer.charts import Heatmap, Lines
from nlflow.explorer.desk import Desk
from nlflow.explorer.layers_view import LayersFile, Run
from nlflow.explorer.parts import columns, heading, note
from nlflow.explorer.texts import digits
from nlflow.explorer.uploads import received_layers
from nlflow.explorer.widgets import Action, Chooser, Code, Markup, Status, Upload

__all__ = ["LayersTab"]

_OVERVIEW = ("cosine", "J", "gap", "stable")
_RUN_NAMES = ("as it is", "with NeuTRENO's term")
_RUNS: dict[str, dict[str, str]] = {name: {} for name in _RUN_NAMES}
_EMPTY = "Open the file result.json that `nonlocal attention MODEL --out DIR` has written."


class LayersTab:
    """Figures of a transformer over its layers, and by layer and head."""

    name = "layers"

    def __init__(self, desk: Desk, found: LayersFile | None = None) -> None:
        self._desk, self._found = desk, found
        self.started = False
        self.status = Status(lambda _: desk.cancel(self.name, self.status))
        self.upload = Upload(
            name_of="trace", label="Open a layer trace", accept=".json", limit=desk.limits.content,
            hint="result.json of nonlocal attention MODEL --out DIR, or drop it here",
            received=self._receive, refused=lambda words: self.status.show(words, "error"),
        )  # fmt: skip
        self.quantity = Chooser("quantity", "by head", dict(view.HEAD_QUANTITIES), moved=self._draw_heads)
        self.run = Chooser("run", "run", {}, moved=self._draw_heads)
        self.charts = {
            name: Lines(view.QUANTITIES[name], "layer (0: input)", "", _RUNS, markers=True) for name in _OVERVIEW
        }
        self.heads = Heatmap("layer (0: input)", "head")
        self.no_heads = Markup()
        self.table = Markup()
        self.code = Code()
        self.download = Action(lambda _: self._download(), label="Download the trace")
        self.panel = pn.Column(self.upload, self.status, *self._layout(), sizing_mode="stretch_width")

    def start(self) -> None:
        """Show the file of the command line, or say what to open."""
        if self._found is None:
            self.status.show(_EMPTY)
        else:
            self.status.show(self._show(self._found), "done")

    def _receive(self, name: str, content: bytes) -> None:
        limits = self._desk.limits
        self._desk.ask(self.name, self.status, lambda tell: received_layers(name, content, limits), self._show,
                       f"reading {name} …")  # fmt: skip

    def _download(self) -> None:
        if self._found is not None:
            self.download.save("result.json", self._found.content)

    def _show(self, found: LayersFile) -> str:
        self._found = found
        self._draw(found)
        return f"{found.name}: {found.kind}, {len(found.runs)} run(s), {found.tokens} tokens"

    def _draw(self, found: LayersFile) -> None:
        for name, chart in self.charts.items():
            known = {_RUN_NAMES[k]: run.columns[name] for k, run in enumerate(found.runs[:2]) if name in run.columns}
            chart.show({called: (np.arange(len(values)), values) for called, values in known.items()})
        self.run.offer({str(number): _called(found, run) for number, run in enumerate(found.runs)})
        there = {name for run in found.runs for name in run.heads}
        known_heads = {name: text for name, text in view.HEAD_QUANTITIES.items() if name in there}
        self.quantity.offer(known_heads)
        missing = "The file tells nothing of heads: write it anew with this version."
        self.no_heads.shown = "" if known_heads else note(missing)
        self._draw_heads()

    def _layout(self) -> list[Any]:
        return [
            columns(*(self.charts[name] for name in _OVERVIEW[:2])),
            columns(*(self.charts[name] for name in _OVERVIEW[2:])),
            heading("Heads"),
            columns(self.quantity, self.run),
            self.no_heads,
            self.heads,
            heading("Numbers"),
            self.table,
            heading("The same from a program"),
            self.code,
            self.download,
        ]

    def _draw_heads(self) -> None:
        found = self._found
        if found is None:
            return
        run = found.runs[int(self.run.value or 0)]
        quantity = self.quantity.value
        if quantity in run.heads:
            title = f"{view.HEAD_QUANTITIES[quantity]}, {_called(found, run)}"
            self.heads.show(run.heads[quantity], run.layers, title)
        self.table.shown = _table(run)
        self.code.show(view.as_python(found, quantity or "cosine"), view.as_command(found))


def _called(found: LayersFile, run: Run) -> str:
    return "as it is" if run is found.runs[0] else f"NeuTRENO, λ̃ = {run.fidelity:g}"


def _table(run: Run) -> str:
    """Return the figures of a run by layer; the table scrolls where it is wider than the page."""
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in run.columns)
    lines = []
    for number, layer in enumerate(run.layers):
        cells = "".join(f"<td>{digits(column[number])}</td>" for column in run.columns.values())
        lines.append(f"<tr><th scope='row'>{escape(layer)}</th>{cells}</tr>")
    table = f'<table class="numbers"><tr><th scope="col">layer</th>{head}</tr>{"".join(lines)}</table>'
    return f'<div class="wide" tabindex="0" role="region" aria-label="figures by layer">{table}</div>'
