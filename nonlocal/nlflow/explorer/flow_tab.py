"""The tab "Flow"."""

from __future__ import annotations

from typing import Any

import numpy as np
import panel as pn

from nlflow.explorer import flow_view as view
from nlflow.explorer.charts import Lines
from nlflow.explorer.desk import Desk
from nlflow.explorer.flow_view import FlowResult, FlowSettings
from nlflow.explorer.parts import columns, heading, numbers
from nlflow.explorer.pictures import data_url, grey_scale, picture
from nlflow.explorer.texts import digits
from nlflow.explorer.widgets import Action, Chooser, Code, Knob, Markup, Pictures, Status
from nlflow.plotting.base import PALETTE

__all__ = ["FlowTab"]

_SIGNALS = {
    "steps": "steps, on a line",
    "waves": "two waves, on a line",
    "disc": "a disc, in the plane",
    "photograph": "a photograph, in the plane",
}
_KERNELS = {"Gaussian": "Gaussian", "Laplace": "Laplace (exponential)", "TopHat": "top hat"}
_METRICS = {"degree": "degree: du/dt = Pu − u", "l2": "L²: du/dt = −Lu"}
_BOUNDARIES = {"reflect": "mirrored", "periodic": "periodic", "isolated": "nothing outside"}
_PREDICTED = {"dash": "6 4", "width": 1.5}
_DISTANCES: dict[str, dict[str, Any]] = {"J": {}, "E": {}, "exp(−μ₂ t)": {**_PREDICTED, "color": "#1c2126"}}
_REMAINING: dict[str, dict[str, Any]] = {
    "E": {"color": PALETTE[1]},
    "exp(−(μ₂ + λ) t)": {**_PREDICTED, "color": "#1c2126"},
}
_ENERGIES: dict[str, dict[str, Any]] = {"J along its flow": {}, "E along its flow": {}}
_STATES: dict[str, dict[str, Any]] = {
    "f": {"color": "#8a949e", "width": 1},
    "J": {"color": PALETTE[0]},
    "E": {"color": PALETTE[1]},
    "equilibrium of E": {"dash": "2 3", "color": "#4d4d4d"},
}
_DEFAULT = FlowSettings()


class FlowTab:
    """The same noisy signal under J, which makes it constant, and under E, which keeps it."""

    name = "flow"

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._result: FlowResult | None = None
        self.started = False
        self.status = Status(lambda _: desk.cancel(self.name, self.status))
        moved: dict[str, Any] = {"moved": self._ask}
        self.choices = {
            "signal": Chooser("signal", "signal", _SIGNALS, **moved),
            "kernel": Chooser("kernel", "kernel", _KERNELS, **moved),
            "metric": Chooser("metric", "metric", _METRICS, **moved),
            "boundary": Chooser("boundary", "boundary", _BOUNDARIES, **moved),
        }
        plain: dict[str, Any] = {"choosable": False, "moved": self._ask}
        self.knobs = {
            "noise": Knob("noise", "noise σ", 0, 1, 0.05, _DEFAULT.noise, unit="of the height", **plain),
            "width": Knob("width", "kernel width", 0.01, 0.3, 0.005, _DEFAULT.width, unit="of the side", **plain),
            "fidelity": Knob("fidelity", "fidelity λ", 0.01, 3, 0.01, _DEFAULT.fidelity, **plain),
            "span": Knob("span", "length of the flow", 1, 30, 1, _DEFAULT.span, unit="times 1/μ₂", **plain),
        }
        last = view.MOMENTS - 1
        self.frame = Knob("frame", "time shown", 0, last, 1, last, unit=f"of {last} moments", choosable=False,
                          moved=self._draw_state)  # fmt: skip
        self.pictures = Pictures()
        self.state = Lines("", "place", "", _STATES, height=300)
        self.energies = Lines("energies", "time", "J and E", _ENERGIES, log="xy")
        self.distances = Lines("distance to the constant", "time", "root mean square", _DISTANCES, log="y")
        self.remaining = Lines("distance of E to its equilibrium", "time", "root mean square", _REMAINING, log="y")
        self.figures = Markup()
        self.code = Code()
        self.undo_button = Action(lambda _: self._undo(), label="Undo to defaults")
        controls = pn.Column(
            *self.choices.values(), *self.knobs.values(), self.undo_button, sizing_mode="stretch_width"
        )
        main = pn.Column(
            self.status, self.frame, self.state, self.pictures,
            columns(self.distances, self.remaining, self.energies),
            heading("Numbers"), self.figures,
            heading("The same from a program"), self.code, sizing_mode="stretch_width",
        )  # fmt: skip
        self.panel = columns(controls, main, weights=(1, 3))

    def start(self) -> None:
        """Compute for the first time."""
        self._ask()

    def settings(self) -> FlowSettings:
        """Return what the controls say."""
        words: dict[str, Any] = {name: one.value for name, one in self.choices.items()}
        words |= {name: float(knob.value or 0.0) for name, knob in self.knobs.items()}
        return FlowSettings(**words)

    def _ask(self) -> None:
        settings = self.settings()
        self._desk.ask(self.name, self.status, lambda tell: view.compute(settings, progress=tell), self._show)

    def _undo(self) -> None:
        for one in (*self.choices.values(), *self.knobs.values(), self.frame):
            one.reset()
        self._ask()

    def _show(self, result: FlowResult) -> str:
        self._result = result
        self._draw_state()
        t = result.t
        # The slopes are predicted; the heights are those of the last values above rounding.
        self.distances.show({
            "J": (t, result.distance_j),
            "E": (t, result.distance_e),
            "exp(−μ₂ t)": (t, view.predicted(t, result.distance_j, result.rate)),
        })  # fmt: skip
        early = t <= 40 / result.rate_e  # then rounding is all that remains
        self.remaining.show({
            "E": (t[early], result.remaining[early]),
            "exp(−(μ₂ + λ) t)": (t[early], view.predicted(t, result.remaining, result.rate_e)[early]),
        })  # fmt: skip
        self.energies.show(
            {"J along its flow": (t[1:], result.energy_j[1:]), "E along its flow": (t[1:], result.energy_e[1:])}
        )
        low, high = result.bounds
        self.figures.shown = numbers(
            [
                ("slowest rate μ₂ of J", f"{digits(result.rate)}: the distance falls as exp(−{digits(result.rate)} t)"),
                ("second eigenvalue 1 − μ₂ of P" if result.settings.metric == "degree" else "μ₂, in the L² metric",
                 digits(1 - result.rate if result.settings.metric == "degree" else result.rate, ".6g")),
                ("rate of E to its equilibrium", f"μ₂ + λ = {digits(result.rate_e)}"),
                ("distance to the constant, J, at the end", digits(result.distance_j[-1])),
                ("distance to the constant, E, at the end", digits(result.distance_e[-1])),
                ("kept in the equilibrium of E", f"{digits(result.kept)} of the distance of f"),
                ("bounds for every signal", f"{digits(low)} to {digits(high)}"),
            ]
        )  # fmt: skip
        self.code.show(view.as_python(result.settings), view.as_command(result.settings), view.COMMAND_NOTE)
        return f"{len(t)} moments up to t = {digits(t[-1])}"

    def _draw_state(self) -> None:
        result = self._result
        if result is None:
            return
        k = min(int(self.frame.value or 0), len(result.t) - 1)
        flat = len(result.settings.shape) == 1
        self.state.visible, self.pictures.visible = flat, not flat
        time = f"t = {digits(result.t[k])}"
        if flat:
            x = (np.arange(result.settings.shape[0]) + 0.5) / result.settings.shape[0]
            lines = {"f": (x, result.observed), "J": (x, result.j[k]), "E": (x, result.e[k]),
                     "equilibrium of E": (x, result.equilibrium)}  # fmt: skip
            self.state.show(lines, title=f"the signal at {time}")
            return
        scale = grey_scale(result.observed)
        told = f"black is {digits(scale.low)}, white is {digits(scale.high)}"
        pictures = [
            ("f", result.observed, f"f; {told}"),
            ("J", result.j[k], f"J at {time}"),
            ("E", result.e[k], f"E at {time}"),
            ("equilibrium", result.equilibrium, "equilibrium of E"),
        ]
        self.pictures.show(
            [{"src": data_url(picture(u, scale)[0]), "name": n, "alt": c, "caption": c} for n, u, c in pictures]
        )
