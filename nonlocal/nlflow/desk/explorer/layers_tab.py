"""The tab "Layers"."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

import numpy as np

from nlflow.desk.explorer import layers_view as view
from nlflow.desk.explorer.desk import Desk, Tab
from nlflow.desk.explorer.layers_view import LayersFile, Run
from nlflow.desk.explorer.texts import digits, note
from nlflow.desk.explorer.uploads import received_layers
from nlflow.desk.explorer.widgets import Download, Heatmap, Lines, choice, column, columns, heading, markup, offer
from nlflow.errors import visible
from nlflow.store.notebook import table

_OVERVIEW = ("cosine", "J", "gap", "stable")
_RUNS: dict[str, dict[str, str]] = {"as it is": {}, "with NeuTRENO's term": {}}
_EXAMPLE = (
    "An example: a vision transformer of 12 layers and 4 heads, trained on CIFAR-10, looks at a photograph of 32 × 32 "
    "pixels, once as it is and once with NeuTRENO's term. For your own model run nonlocal attention MODEL --out DIR, "
    "and open DIR/result.json here."
)


class LayersTab(Tab):
    """Layers and heads."""

    name = "layers"

    def __init__(self, desk: Desk, found: LayersFile | None = None) -> None:
        super().__init__(desk)
        self._found = found
        hint = "result.json of nonlocal attention MODEL --out DIR, or drop it here"
        self.upload = self.open_button(
            "trace", "Open a layer trace", hint, (".json",), received_layers, self._open, self._refuse
        )
        self.quantity = choice("quantity", "by head", view.HEAD_QUANTITIES, self._draw_heads)
        self.run = choice("run", "run", {}, self._draw_heads)
        charts = [Lines(view.QUANTITIES[name], "layer (0: input)", "", _RUNS, markers=True) for name in _OVERVIEW]
        self.charts = dict(zip(_OVERVIEW, charts, strict=True))
        self.heads, self.no_heads = Heatmap("layer (0: input)", "head"), markup()
        self.controls = {"quantity": self.quantity, "run": self.run}
        self.download = Download(lambda _: self._download(), label="Download the trace")
        self.about = markup()
        numbers, program = self.below()
        heads = column(heading("Heads"), columns(self.quantity, self.run), self.no_heads, self.heads)
        self.shown = [column(self.about, columns(*charts, least=440), heads, numbers, column(program, self.download))]
        self.panel = column(self.refusal, self.upload, self.status, *self.shown)

    def reset(self) -> None:
        for one in self.controls.values():
            one.value = next(iter(one.options.values()), None)

    def restore(self, words: Mapping[str, str]) -> list[str]:
        self.start()  # the file says which there are
        return super().restore(words)

    def start(self) -> None:
        self.status.say(self._show(self._found or view.example()), "done")

    @property
    def file(self) -> str:
        return "" if self._found is None else PurePath(self._found.name).name

    def _open(self, found: LayersFile) -> str:
        words, self.refusal.object = self._show(found), ""
        self.recall()
        return words

    def _refuse(self, message: str) -> str:
        self._found, self.shown[0].visible = None, False
        return f"{message}. Nothing is shown: open another file."

    def _download(self) -> None:
        if self._found is not None:
            self.download.save("result.json", self._found.content)

    def _show(self, found: LayersFile) -> str:
        self._found = None  # while the choices change, there is nothing to draw
        self.shown[0].visible, self.about.object = True, note(_EXAMPLE) if found.built_in else ""
        for name, chart in self.charts.items():
            known = [(called, run.columns.get(name)) for called, run in zip(_RUNS, found.runs, strict=False)]
            chart.draw({called: (np.arange(len(u)), u) for called, u in known if u is not None})
        offer(self.run, {str(number): _called(found, run) for number, run in enumerate(found.runs)})
        there = {name for run in found.runs for name in run.heads}
        offer(self.quantity, {name: text for name, text in view.HEAD_QUANTITIES.items() if name in there})
        missing = "The file tells nothing of heads: write it anew with this version."
        self.no_heads.object = "" if there else note(missing)
        self._found = found
        self._draw_heads()
        return f"{visible(found.name)}: {found.kind}, {len(found.runs)} run(s), {found.tokens} tokens"

    def _draw_heads(self) -> None:
        found = self._found
        if found is None:
            return
        run, quantity = found.runs[int(self.run.value)], self.quantity.value
        if quantity in run.heads:
            title = f"{view.HEAD_QUANTITIES[quantity]}, {_called(found, run)}"
            self.heads.draw(run.heads[quantity], run.layers, title)
        rows = [
            [layer, *(digits(column[number]) for column in run.columns.values())]
            for number, layer in enumerate(run.layers)
        ]
        # The table scrolls where it is wider than the page.
        self.figures.object = f"""<div class="wide" tabindex="0" role="region" aria-label="figures by layer">
            {table(rows, ["layer", *run.columns])}</div>"""
        self.code.show(python=view.as_python(found, quantity or "cosine"), command=view.as_command(found))


def _called(found: LayersFile, run: Run) -> str:
    return "as it is" if run is found.runs[0] else f"NeuTRENO, λ̃ = {run.fidelity!r}"
