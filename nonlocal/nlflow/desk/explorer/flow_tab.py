"""The tab "Flow"."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from nlflow.desk.explorer import flow_view as view
from nlflow.desk.explorer.desk import Desk, Report, Tab
from nlflow.desk.explorer.flow_view import FlowSettings
from nlflow.desk.explorer.pictures import data_url, grey_scale, picture
from nlflow.desk.explorer.texts import digits
from nlflow.desk.explorer.widgets import (
    Knob,
    Lines,
    Pictures,
    Player,
    beside,
    button,
    choice,
    column,
    columns,
    line_color,
)
from nlflow.store.notebook import table

_CHOICES = {
    "signal": {
        "steps": "steps, on a line",
        "waves": "two waves, on a line",
        "disc": "a disc, in the plane",
        "photograph": "a photograph, in the plane",
    },
    "kernel": {
        "Gaussian": "Gaussian",
        "Laplace": "Laplace (exponential)",
        "TopHat": "top hat",
        "Matern": "Matérn 3/2",
        "Wendland": "Wendland (compact)",
    },
    "metric": {"degree": "degree: du/dt = Pu − u", "l2": "L²: du/dt = −Lu"},
    "boundary": {"reflect": "mirrored", "periodic": "periodic", "isolated": "nothing outside"},
}
_TO_CONSTANT, _TO_EQUILIBRIUM = "exp(−μ₂ t)", "exp(−(μ₂ + λ) t)"
_PREDICTED = {"dash": "6 4", "width": 1.5, "color": "var(--ink)"}
_RUNS = {"runs": True}
_RUNS_E = {"color": line_color(1), **_RUNS}
_STATES: dict[str, dict[str, Any]] = {
    "f": {"color": "var(--given)", "width": 1},
    "J": {"color": line_color(0), "field": 0},
    "E": {"color": line_color(1), "field": 1},
    "equilibrium of E": {"dash": "2 3", "color": line_color(5)},
}
_DEFAULT = FlowSettings()


class FlowTab(Tab):
    """J beside E."""

    name = "flow"

    def __init__(self, desk: Desk) -> None:
        super().__init__(desk)
        self.choices = {name: choice(name, name, words, self.start) for name, words in _CHOICES.items()}
        plain: dict[str, Any] = {"optional": False, "moved": self.start}
        self.knobs = {
            "noise": Knob("noise", "noise σ", 0, 1, 0.05, _DEFAULT.noise, unit="of the height", **plain),
            "width": Knob("width", "kernel width", 0.01, 0.3, 0.005, _DEFAULT.width, unit="of the side", **plain),
            "fidelity": Knob("fidelity", "fidelity λ", 0.01, 3, 0.01, _DEFAULT.fidelity, **plain),
            "span": Knob("span", "length of the flow", 1, 30, 1, _DEFAULT.span, unit="times 1/μ₂", **plain),
        }
        self.player = Player("moment", view.MOMENTS)
        self.pictures = Pictures()
        self.state = Lines("the signal", "place", "", _STATES, height=300)
        self.energies = Lines(
            "energies", "time", "J and E", {"J along its flow": _RUNS, "E along its flow": _RUNS}, log="xy"
        )
        rms = "root mean square"
        self.distances = Lines(
            "distance to the constant", "time", rms, {"J": _RUNS, "E": _RUNS, _TO_CONSTANT: _PREDICTED}, log="y"
        )
        self.remaining = Lines(
            "distance of E to its equilibrium",
            "time",
            rms,
            {"E": {"color": line_color(1), **_RUNS}, _TO_EQUILIBRIUM: _PREDICTED},
            log="y",
        )
        self.controls = {**self.choices, **self.knobs, "moment": self.player}
        undo = button("Undo to defaults", self.undo)
        controls = [*self.choices.values(), *self.knobs.values(), undo]
        charts = columns(self.distances, self.remaining, self.energies)
        self.shown = [column(self.player, self.state, self.pictures), column(charts, columns(*self.below(), least=360))]
        self.panel = beside([self.refusal], [self.status, self.shown[0]], controls, [self.shown[1]])

    def settings(self) -> FlowSettings:
        words: dict[str, Any] = {name: one.value for name, one in self.choices.items()}
        words |= {name: float(knob.value or 0.0) for name, knob in self.knobs.items()}
        return FlowSettings(**words)

    def start(self) -> None:
        settings = self.settings()

        def work(report: Report) -> tuple[FlowSettings, SimpleNamespace, Any]:
            result = view.compute(settings, progress=report)
            return settings, result, _frames(settings, result)

        self.ask(work, self._show)

    def reset(self) -> None:
        for name, one in self.choices.items():
            one.value = getattr(_DEFAULT, name)
        for knob in (*self.knobs.values(), self.player):
            knob.reset()

    def _show(self, shown: tuple[FlowSettings, SimpleNamespace, Any]) -> str:
        settings, result, _ = shown
        self._draw_states(*shown)
        t, rate, rate_e = result.t, digits(result.rate), digits(result.rate_e)
        # The slopes are predicted; the heights are those of the last values above rounding.
        self.distances.draw({
            "J": (t, result.distance_j),
            "E": (t, result.distance_e),
            _TO_CONSTANT: (t, view.predicted(t, result.distance_j, result.rate)),
        })  # fmt: skip
        early = t <= 40 / result.rate_e  # then rounding is all that remains
        self.remaining.draw({
            "E": (t[early], result.remaining[early]),
            _TO_EQUILIBRIUM: (t[early], view.predicted(t, result.remaining, result.rate_e)[early]),
        })  # fmt: skip
        energies = {"J along its flow": result.energy_j, "E along its flow": result.energy_e}
        self.energies.draw({name: (t[1:], values[1:]) for name, values in energies.items()})
        low, high = result.bounds
        second = ("second eigenvalue 1 − μ₂ of P", 1 - result.rate)
        second = second if settings.metric == "degree" else ("μ₂, in the L² metric", result.rate)
        rows = [
            ("slowest rate μ₂ of J", f"{rate}: the distance falls as exp(−{rate} t)"),
            (second[0], digits(second[1], ".6g")),
            ("rate of E to its equilibrium", f"μ₂ + λ = {rate_e}"),
            ("distance to the constant, J, at the end", digits(result.distance_j[-1])),
            ("distance to the constant, E, at the end", digits(result.distance_e[-1])),
            ("kept in the equilibrium of E", f"{digits(result.kept)} of the distance of f"),
            ("bounds for every signal", f"{digits(low)} to {digits(high)}"),
        ]
        self.figures.object = table(rows)
        self.code.show(python=view.as_python(settings), command=view.as_command(settings), note=view.COMMAND_NOTE)
        return f"{len(t)} moments up to t = {digits(t[-1])}"

    def _draw_states(self, settings: FlowSettings, result: SimpleNamespace, frames: Any) -> None:
        flat = len(settings.shape) == 1
        self.state.visible, self.pictures.visible = flat, not flat
        self.player.draw(result.t, frames)
        if flat:
            x = (np.arange(settings.shape[0]) + 0.5) / settings.shape[0]
            k = int(self.player.value)
            states = {"f": result.observed, "J": result.j[k], "E": result.e[k], "equilibrium of E": result.limit}
            self.state.draw({name: (x, u) for name, u in states.items()})
            return
        scale = grey_scale(result.observed)
        captions = {"f": f"f; black is {digits(scale.low)}, white is {digits(scale.high)}", "J": "u under J",
                    "E": "u under E", "equilibrium of E": "equilibrium of E"}  # fmt: skip
        still = {"f": result.observed, "equilibrium of E": result.limit}
        seen: dict[str, dict[str, Any]] = {name: {"src": data_url(picture(u, scale)[0])} for name, u in still.items()}
        seen |= {name: {"src": "", "size": list(settings.shape), "field": k} for k, name in enumerate(("J", "E"))}
        self.pictures.draw([{"name": n, "alt": text, "caption": text, **seen[n]} for n, text in captions.items()])


def _frames(settings: FlowSettings, result: SimpleNamespace) -> Any:
    """Return what is seen of both flows at each moment: grey levels in the plane, values on a line."""
    states = (u.reshape(len(u), -1) for u in (result.j, result.e))
    if len(settings.shape) == 1:
        return np.stack([u.astype(np.float32) for u in states])
    scale = grey_scale(result.observed)
    return np.stack([scale.levels(u) for u in states])
