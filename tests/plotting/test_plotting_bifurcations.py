"""Bifurcation diagrams and phase portraits: what is solid, dashed, filled and marked; what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

import nlflow as nl
from nlflow.affinities import Unlinked
from nlflow.equilibria import Branch, continue_equilibria
from nlflow.flows.flow import Flow
from nlflow.plotting import bifurcation_figure, new_figure, portrait_figure, render


class Own(Flow):
    def __init__(self, formula: Callable[[Any], Any]) -> None:
        super().__init__(Unlinked(nl.Points([0.0])), "l2", None, evolving=False, every=1)
        self.formula = formula

    def velocity(self, u: Any) -> Any:
        return self.formula(u)


@pytest.fixture(scope="module")
def fold() -> Branch:
    return continue_equilibria(lambda p: Own(lambda u: p + u - u**3 / 3), np.array([-2.5]), -2.0, (-2, 2), longest=0.1)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_stable_pieces_are_solid_and_points_are_marked(fold: Branch) -> None:
    figure = bifurcation_figure(fold, value=lambda u: u[0], ylabel="u", title="a fold")
    lines = [line for line in figure.axes[0].lines if len(line.get_xdata()) > 1 and line.get_marker() == "None"]
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-"]
    for line in lines:
        u = np.asarray(line.get_ydata())
        assert np.all((u**2 > 1 - 1e-6) if line.get_linestyle() == "-" else (u**2 < 1 + 1e-6))
    ends = [(line.get_xdata()[0], line.get_xdata()[-1]) for line in lines]
    assert [ends[0][1], ends[1][0]] == pytest.approx([2 / 3, 2 / 3])  # pieces meet at the fold
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "v"]
    assert [mark.get_xdata()[0] for mark in marks] == pytest.approx([2 / 3, -2 / 3])
    assert texts(figure) == ["stable", "unstable", "fold"]
    assert figure.get_suptitle() == "a fold"
    assert render(figure, "png").startswith(b"\x89PNG")


def test_branches_of_one_name_have_one_colour(fold: Branch) -> None:
    figure = bifurcation_figure({"one": [fold, fold], "other": fold})
    drawn = [line for line in figure.axes[0].lines if len(line.get_xdata()) > 1]
    solid = [line.get_color() for line in drawn if line.get_marker() == "None"]
    assert len(set(solid[:6])) == 1
    assert solid[0] != solid[6]
    assert texts(figure)[:2] == ["one", "other"]
    axis = figure.axes[0]
    assert bifurcation_figure([fold], axis=axis) is figure


def test_a_portrait_shows_equilibria_and_curves() -> None:
    # du = u - u^3, dv = -v: two stable nodes and a saddle.
    flow = Own(lambda u: np.stack([u[..., 0] - u[..., 0] ** 3, -u[..., 1]], axis=-1))
    curve = np.stack([np.linspace(0.1, 1, 20), np.linspace(1, 0, 20)], axis=1)
    figure = portrait_figure(flow, (-2, 2), (-1.5, 1.5), curves={"course": curve}, title="two wells")
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "o" and line.get_linestyle() == "None"]
    filled = {round(float(m.get_xdata()[0])): m.get_color() for m in marks}
    assert filled == {-1: "black", 0: "white", 1: "black"}
    assert texts(figure) == ["du₁/dt = 0", "du₂/dt = 0", "course"]
    assert figure.axes[0].get_xlim() == (-2, 2)
    assert texts(portrait_figure(None, (0, 1), (0, 1), curves={"two projections": curve})) == ["two projections"]


def test_refusals() -> None:
    flow = Own(lambda u: -u)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("branches: got none or an empty one", lambda: bifurcation_figure([])),
        ("branches: got int, expected what continue_equilibria returns", lambda: bifurcation_figure([3])),  # type: ignore[list-item]
        ("branches: got NoneType, expected what continue_equilibria returns", lambda: bifurcation_figure(None)),  # type: ignore[arg-type]
        ("x: got (1, 0), expected low < high", lambda: portrait_figure(flow, (1, 0), (0, 1))),
        ("flow: got int, expected a flow, or None", lambda: portrait_figure(3, (0, 1), (0, 1))),  # type: ignore[arg-type]
        ("curves: got list", lambda: portrait_figure(None, (0, 1), (0, 1), curves=[1])),  # type: ignore[arg-type]
        ("y: got 3, expected a pair", lambda: portrait_figure(flow, (0, 1), 3)),  # type: ignore[arg-type]
        (
            "curves['a']: got shape (3, 3)",
            lambda: portrait_figure(None, (0, 1), (0, 1), curves={"a": np.zeros((3, 3))}),
        ),
        ("curves['a']: got 0 dimension(s)", lambda: portrait_figure(None, (0, 1), (0, 1), curves={"a": 1.0})),  # type: ignore[dict-item]
        ("title: got 3, expected text", lambda: portrait_figure(None, (0, 1), (0, 1), title=3)),  # type: ignore[arg-type]
        ("axis: got str, expected Axes of Matplotlib", lambda: portrait_figure(None, (0, 1), (0, 1), axis="left")),  # type: ignore[arg-type]
        (
            "flow: expected one of signals of shape (1, 2)",
            lambda: portrait_figure(nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Grid(4)))), (0, 1), (0, 1)),
        ),
    ]
    for message, call in cases:
        with pytest.raises(nl.InputError, match=re.escape(message)):
            call()


def test_an_axis_keeps_the_title_that_it_has() -> None:
    axis = new_figure().subplots()
    axis.set_title("mine")
    portrait_figure(None, (0, 1), (0, 1), curves={"a": np.eye(2)}, axis=axis)
    assert axis.get_title() == "mine"
    portrait_figure(None, (0, 1), (0, 1), curves={"a": np.eye(2)}, axis=axis, title="another")
    assert axis.get_title() == "another"
