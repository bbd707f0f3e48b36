"""Space-time pictures and decays: what is drawn, on which axes, and with which predicted slope."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from matplotlib.colors import to_hex

from nlflow.errors import InputError
from nlflow.plotting import Course, decay_figure, render, spacetime_figure

RNG = np.random.default_rng(3)
T = np.concatenate([[0.0], np.logspace(-2, 3, 26)])
X = np.linspace(0, 1, 30)
START = np.sin(2 * np.pi * X) + 0.1 * RNG.standard_normal(30)
FADING = np.exp(-T)[:, None] * START
KEPT = (0.5 + 0.5 * np.exp(-T))[:, None] * START


@pytest.mark.slow
def test_pictures_share_one_scale_and_stand_above_their_profiles() -> None:
    figure = spacetime_figure({"J-flow": (T, FADING), "E-flow": (T, KEPT)}, x=X, title="both")
    left, right, under_left, under_right, bar = figure.axes
    for axis, u in ((left, FADING), (right, KEPT)):
        mesh = axis.collections[0]
        np.testing.assert_array_equal(np.asarray(mesh.get_array()).reshape(u.shape), u)
        assert mesh.get_clim() == (-np.abs(START).max(), np.abs(START).max())
        assert axis.get_yscale() == "log"
    assert left.collections[0].get_cmap().name == right.collections[0].get_cmap().name
    assert left.get_ylim() == right.get_ylim()
    assert [axis.get_title() for axis in (left, right)] == ["J-flow", "E-flow"]
    for axis, u, colour in ((under_left, FADING, "#b03a2e"), (under_right, KEPT, "#0b5394")):
        first, last = axis.lines
        np.testing.assert_array_equal(first.get_ydata(), START)
        np.testing.assert_array_equal(last.get_ydata(), u[-1])
        np.testing.assert_array_equal(last.get_xdata(), X)
        assert to_hex(last.get_color()) == colour
        assert [line.get_label() for line in axis.lines] == ["t = 0", "t = 1000"]
        assert axis.get_xlabel() == "x"
    assert under_left.get_ylim() == under_right.get_ylim()
    assert bar.get_ylabel() == "u"
    assert figure.get_suptitle() == "both"
    assert render(figure, "png").startswith(b"\x89PNG")


def test_time_runs_upwards_from_zero_at_the_foot() -> None:
    picture = spacetime_figure({"J": (T, FADING)}).axes[0]
    edges = np.asarray(picture.collections[0].get_coordinates())[:, 0, 1]
    assert np.all(np.diff(edges) > 0)
    # Every later row lies about its own time, and the foot, for t = 0, below all of them.
    assert np.all((edges[1:-1] < T[1:]) & (T[1:] < edges[2:]))
    assert edges[0] == pytest.approx(picture.get_ylim()[0])
    labels = [label.get_text() for label in picture.get_yticklabels()]
    marks = picture.get_yticks()
    assert labels[0] == "0"
    assert edges[0] < marks[0] < edges[1]
    assert all(float(label) == pytest.approx(mark) for label, mark in zip(labels[1:], marks[1:], strict=True))
    assert marks[-1] == pytest.approx(1000)
    # No two labels closer than a label is high.
    place = np.log(marks) / np.ptp(np.log(picture.get_ylim()))
    assert np.diff(place).min() > 0.05


def test_times_without_zero_and_without_a_whole_decade() -> None:
    t = np.linspace(1.5, 6, 10)
    picture, profile, _ = spacetime_figure({"any": (t, 7 + KEPT[:10])}).axes
    assert [label.get_text() for label in picture.get_yticklabels()] == ["2", "5"]
    assert picture.get_xlim() == (-0.5, 29.5)
    assert profile.get_xlabel() == "node"
    # Values of one sign: a scale from the smallest to the largest.
    mesh = picture.collections[0]
    assert mesh.get_clim() == ((7 + KEPT[:10]).min(), (7 + KEPT[:10]).max())
    assert not picture.lines


def test_many_decades_get_powers() -> None:
    t = np.logspace(-6, 9, 40)
    picture = spacetime_figure({"J": (t, RNG.standard_normal((40, 4)))}).axes[0]
    labels = [label.get_text() for label in picture.get_yticklabels()]
    assert len(labels) <= 8
    assert labels[0] == "$10^{-6}$"
    assert picture.get_yticks()[0] == pytest.approx(1e-6)


def test_linear_time() -> None:
    t = np.array([0.0, 1.0, 3.0])
    picture = spacetime_figure({"J": (t, FADING[:3])}, logarithmic=False).axes[0]
    assert picture.get_yscale() == "linear"
    edges = np.asarray(picture.collections[0].get_coordinates())[:, 0, 1]
    np.testing.assert_allclose(edges, [0, 0.5, 2, 3])


@pytest.mark.parametrize(
    ("panels", "x", "message"),
    [
        ({}, None, "panels: got none"),
        ({"J": (T, FADING[:, 0])}, None, "u of 'J': got 1 dimension"),
        ({"J": (T[:-1], FADING)}, None, "u of 'J': got shape"),
        ({"J": (T, FADING[:, :1])}, None, "N >= 2"),
        ({"J": (T, FADING), "E": (T, KEPT[:, :9])}, None, r"on \[9, 30\] nodes"),
        ({"J": (T, FADING)}, X[:-1], "x: got shape"),
        ({"J": (T, FADING)}, X[::-1], r"^x: got \[.*\], expected increasing coordinates$"),
        ({"J": (T[::-1], FADING)}, None, r"^t of 'J': got \[.*\], expected increasing times >= 0$"),
        ({"J": (T - 1, FADING)}, None, r"^t of 'J': got \[-1.0, .*\], expected increasing times >= 0$"),
        ({"J": (T[:2], FADING[:2])}, None, "two of them after 0"),
    ],
)
def test_wrong_panels(panels: dict[str, tuple[np.ndarray, np.ndarray]], x: np.ndarray | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        spacetime_figure(panels, x=x)


def test_decay_with_its_predicted_slope() -> None:
    t = np.linspace(0, 100, 201)
    values = 3 * np.exp(-0.2 * t) + 40 * np.exp(-2 * t)
    figure = decay_figure({"rates": [Course("J-flow", t, values, 0.2), Course("E-flow", t, 0 * t + 2)]}, title="decay")
    (axis,) = figure.axes
    assert (axis.get_xscale(), axis.get_yscale()) == ("linear", "log")
    measured, dashed, kept = axis.lines
    np.testing.assert_array_equal(measured.get_ydata(), values)
    assert (measured.get_linestyle(), dashed.get_linestyle(), kept.get_linestyle()) == ("-", "--", "-")
    assert to_hex(measured.get_color()) == to_hex(dashed.get_color()) == "#b03a2e"
    assert to_hex(kept.get_color()) == "#0b5394"
    slope = np.diff(np.log(np.asarray(dashed.get_ydata()))) / np.diff(np.asarray(dashed.get_xdata()))
    np.testing.assert_allclose(slope, -0.2)
    # It meets the course after the fast start, which its level must not follow.
    np.testing.assert_allclose(np.interp(50, *dashed.get_data()), 3 * np.exp(-10), rtol=1e-3)
    texts = [text.get_text() for text in axis.get_legend().get_texts()]
    assert texts == ["J-flow, predicted rate 0.2", "E-flow"]
    assert "dashed" in axis.get_legend().get_title().get_text()
    assert axis.get_title() == "rates"
    assert render(figure, "png").startswith(b"\x89PNG")


def test_rounding_is_not_drawn() -> None:
    t = np.linspace(0, 50, 101)
    values = 5 * np.exp(-t) + 1e-18
    axis = decay_figure({"": [Course("J", t, values, 1.0)]}).axes[0]
    measured = axis.lines[0]
    assert np.asarray(measured.get_ydata()).min() > 5e-15
    assert np.asarray(measured.get_xdata()).max() == t[values > 5e-15].max()
    # A prediction that runs far out of the picture does not stretch it.
    axis = decay_figure({"": [Course("J", 1e4 * t, 1 / (1 + t), 9.0)]}).axes[0]
    assert axis.get_ylim()[0] > 1e-3
    np.testing.assert_allclose(np.diff(np.log(axis.lines[1].get_ydata())).sum(), -9 * np.ptp(axis.lines[1].get_xdata()))


@pytest.mark.slow
def test_constant_courses_stay_flat_to_the_eye() -> None:
    t = np.linspace(0, 9, 10)
    noise = 2 * (1 + 1e-14 * RNG.standard_normal(10))
    figure = decay_figure({"kept": [Course("E-flow", t, noise, 0.0)], "zero": [Course("none", t, 0 * t)]})
    kept, zero = figure.axes
    low, high = kept.get_ylim()
    assert high / low == pytest.approx(100)
    assert low * high == pytest.approx(4)
    np.testing.assert_allclose(np.asarray(kept.lines[1].get_ydata()), 2)
    assert zero.get_legend().get_texts()[0].get_text() == "none: nothing above 0"
    assert zero.get_legend().get_title().get_text() == ""
    assert render(figure, "png").startswith(b"\x89PNG")


def test_logarithmic_time_leaves_zero_out() -> None:
    values = np.exp(-0.01 * T)
    axis = decay_figure({"": [Course("J", T, values, 0.01)]}, logarithmic=True).axes[0]
    assert axis.get_xscale() == "log"
    measured, dashed = axis.lines
    np.testing.assert_array_equal(measured.get_xdata(), T[1:])
    np.testing.assert_allclose(np.log(dashed.get_ydata()), -0.01 * np.asarray(dashed.get_xdata()), atol=1e-12)


def test_courses_of_one_flow_differ_in_colour() -> None:
    names = ["J", "E, λ = 1", "E, λ = 2", "Euler", "Jacobi"]
    t = np.arange(3.0)
    axis = decay_figure({"": [Course(name, t, t + 1) for name in names]}).axes[0]
    colours = [to_hex(line.get_color()) for line in axis.lines]
    assert len(set(colours)) == len(names)
    assert colours[:2] == ["#b03a2e", "#0b5394"]
    assert colours[3] == to_hex(decay_figure({"": [Course("RK", t, t + 1)]}).axes[0].lines[0].get_color())


def test_panels_fill_rows_of_three() -> None:
    t = np.arange(3.0)
    figure = decay_figure({str(number): [Course("J", t, t + 1)] for number in range(4)})
    assert [axis.axison for axis in figure.axes] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("panels", "message"),
    [
        ({}, "panels: got none"),
        ({"": []}, "panels: got none or an empty one"),
        ({"": [Course("a", T, T[:-1])]}, "t of 'a': got shape"),
        ({"": [Course("a", T[::-1], T)]}, r"^t of 'a': got \[.*\], expected increasing times$"),
        ({"": [Course("a", T, -T)]}, "values of 'a': got -1000, expected values >= 0"),
        ({"": [Course("a", T, T, np.inf)]}, "rate of 'a': got inf"),
        ({"": [Course("a", T, FADING)]}, "values of 'a': got 2 dimension"),
    ],
)
def test_wrong_courses(panels: dict[str, list[Course]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decay_figure(panels)


@pytest.mark.slow
def test_no_pyplot() -> None:
    code = (
        "import sys, numpy as np, nlflow.plotting as p; assert 'matplotlib' not in sys.modules;"
        "t = np.arange(1.0, 5.0); o = np.ones((4, 4));"
        "p.render(p.spacetime_figure({'J': (t, o)}), 'png');"
        "p.render(p.decay_figure({'': [p.Course('J', t, t, 1.0)]}), 'png');"
        "p.render(p.chain_figure({'a': t, 'b': t}, t / 4, decay=1 / t), 'png');"
        "p.render(p.phase_figure(t, t, t), 'png');"
        "p.render(p.rate_figure([p.Series('a', t, t, slope=1.0, expected=1.0)], xlabel='', ylabel=''), 'png');"
        "p.render(p.bounds_figure({'': (t, t, t, t)}, xlabel='', ylabel=''), 'png');"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
