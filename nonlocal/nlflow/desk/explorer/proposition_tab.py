"""The tab "Proposition"."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from nlflow.desk.explorer import proposition_view as view
from nlflow.desk.explorer.desk import Desk, Tab
from nlflow.desk.explorer.proposition_view import PropositionSettings
from nlflow.desk.explorer.texts import digits, note
from nlflow.desk.explorer.widgets import Knob, Lines, beside, button, choice, column, columns, line_color, markup
from nlflow.store.notebook import table

_CHOICES = {
    "domain": {"grid": "a grid on a line", "points": "points in a square"},
    "signal": {
        "step": "a step with noise",
        "noise": "noise",
        "slowest": "the slowest mode: meets the upper bound",
        "fastest": "the fastest mode: meets the lower bound",
    },
}
_ABOUT = (
    "The flow of E does not run to a constant: its equilibrium u* keeps a part of the diversity of f, its distance "
    "from its mean. For every f this part lies between two bounds, which follow from the fidelity λ and the "
    "spectrum alone."
)
_BOUND: dict[str, Any] = {"color": line_color(5), "dash": "6 4", "width": 1.5}
_HERE: dict[str, Any] = {"color": line_color(1), "width": 0, "markers": True}
_DEFAULT = PropositionSettings()
_EACH: dict[str, dict[str, Any]] = {"f": {"color": "var(--given)"}, "u*": {"color": line_color(0)}}


class PropositionTab(Tab):
    """The tab of bounds and kept diversity."""

    name = "proposition-1"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self._known: SimpleNamespace | None = None
        self.choices = {name: choice(name, name, words, self.start) for name, words in _CHOICES.items()}
        plain: dict[str, Any] = {"optional": False, "moved": self.start}
        self.fidelity = Knob(
            "fidelity", "fidelity λ", -3, 2, 0.01, math.log10(_DEFAULT.fidelity), unit="as 10 to the power", **plain
        )
        self.width = Knob("width", "kernel width", 0.02, 0.3, 0.005, _DEFAULT.width, unit="of the side", **plain)
        self.controls = {**self.choices, "fidelity": self.fidelity, "width": self.width}
        dots = {name: {**style, "width": 0, "markers": True} for name, style in _EACH.items()}
        self.line, self.dots = (
            Lines("the signal and its equilibrium", "place", "", one, height=280) for one in (_EACH, dots)
        )
        bounds: dict[str, dict[str, Any]] = {
            "upper bound": _BOUND,
            "kept of f": {"color": line_color(0)},
            "lower bound": _BOUND,
            "at λ": _HERE,
        }
        self.kept = Lines("part of the diversity that is kept", "fidelity λ", "", bounds, log="xy", height=280)
        spectrum = {"I − P": {"color": line_color(5)}, "I − P + λ": {"color": line_color(0)}}
        self.spectrum = Lines("spectrum: rates of the flows of J and E", "mode", "rate", spectrum)
        modes = {"f": {"color": "var(--given)"}, "u*": {"color": line_color(0)}}
        self.modes = Lines("size of each mode", "mode", "", modes, log="y")
        numbers, program = self.below()
        below = columns(self.spectrum, self.modes, least=320), columns(numbers, program, least=360)
        self.shown = [column(columns(self.line, self.dots, self.kept, least=320)), column(*below)]
        controls = [*self.choices.values(), self.fidelity, self.width, button("Undo to defaults", self.undo)]
        views = [self.refusal, markup(note(_ABOUT))]
        self.panel = beside(views, [self.status, self.shown[0]], controls, [self.shown[1]])

    def settings(self) -> PropositionSettings:
        words: dict[str, Any] = {name: one.value for name, one in self.choices.items()}
        power, width = float(self.fidelity.value or 0.0), float(self.width.value or 0.0)
        return PropositionSettings(**words, fidelity=float(f"{10**power:.4g}"), width=width)

    def reset(self) -> None:
        for name, one in self.choices.items():
            one.value = getattr(_DEFAULT, name)
        for knob in (self.fidelity, self.width):
            knob.reset()

    def start(self) -> None:
        settings, known = self.settings(), self._known
        self.ask(lambda tell: (settings, view.compute(settings, known)), self._show)

    def _show(self, shown: tuple[PropositionSettings, SimpleNamespace]) -> str:
        settings, result = shown
        self._known, fidelity = result, settings.fidelity
        flat = settings.domain == "grid"
        self.line.visible, self.dots.visible = flat, not flat
        place = result.domain.nodes[:, 0]
        chart = self.line if flat else self.dots
        words = {} if flat else {"xlabel": "first coordinate"}
        chart.draw({"f": (place, result.observed), "u*": (place, result.limit)}, **words)
        low, kept, high = result.curves
        here = np.array([result.bounds[0], result.kept, result.bounds[1]])
        self.kept.draw({"upper bound": (view.FIDELITIES, high), "kept of f": (view.FIDELITIES, kept),
                        "lower bound": (view.FIDELITIES, low), "at λ": (np.full(3, fidelity), here)})  # fmt: skip
        number = np.arange(len(result.rates))
        self.spectrum.draw({"I − P": (number, result.rates), "I − P + λ": (number, result.rates + fidelity)})
        sizes = {"f": result.observed, "u*": result.limit}
        self.modes.draw(
            {name: (number[1:], np.abs(result.modes.T @ (result.law * u))[1:]) for name, u in sizes.items()}
        )
        slowest, fastest = result.rates[1], result.rates[-1]
        rows = [
            ("fidelity λ", digits(fidelity)),
            ("kept of the diversity of f", digits(result.kept, ".6g")),
            ("bounds for every signal", f"{digits(result.bounds[0], '.6g')} to {digits(result.bounds[1], '.6g')}"),
            ("slowest rate μ₂", f"{digits(slowest)}: upper bound λ / (λ + μ₂)"),
            ("fastest rate", f"{digits(fastest)}: lower bound λ / (λ + fastest)"),
            ("diversity of f, of u*", " → ".join(map(digits, result.diversities))),
        ]
        self.figures.object = table(rows)
        self.code.show(python=view.as_python(settings), command=view.as_command(settings), note=view.COMMAND_NOTE)
        return f"λ = {digits(fidelity)}: {digits(result.kept)} is kept"
