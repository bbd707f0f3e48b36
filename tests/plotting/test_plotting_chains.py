"""Chains and the phase diagram: what is drawn, the kind of spectrum, the predicted slope and the boundary."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from nlflow.errors import InputError
from nlflow.plotting import chain_figure, phase_figure, render

RNG = np.random.default_rng(4)
PI = np.linspace(1, 2, 40) / 60
REAL = np.array([0.3, 1.0, -0.9, 0.8, 0.1])
TURNING = np.array([1.0, 0.6 * np.exp(0.7j), 0.6 * np.exp(-0.7j), 0.2])


@pytest.mark.slow
def test_a_reversible_chain() -> None:
    k = np.arange(120)
    decay = 0.7 * 0.9**k + 0.3 * 0.2**k
    found = {"degree": PI, "eigenvector": PI * 1.01, "walkers": PI * 0.98}
    figure = chain_figure(found, REAL, x=np.linspace(0, 1, 40), decay=decay, title="chain")
    left, middle, right = figure.axes
    line, *markers = left.lines
    assert (line.get_linestyle(), line.get_marker()) == ("-", "None")
    np.testing.assert_array_equal(line.get_ydata(), PI)
    for other, pi in zip(markers, (PI * 1.01, PI * 0.98), strict=True):
        np.testing.assert_array_equal(other.get_ydata(), pi)
        assert (other.get_linestyle(), other.get_markerfacecolor()) == ("None", "none")
    assert "2.0e-02" in left.get_title()
    assert left.get_ylim()[0] == 0
    assert left.get_xlabel() == "x"

    spectrum = middle.lines[-1]
    np.testing.assert_array_equal(spectrum.get_ydata(), [1.0, 0.8, 0.3, 0.1, -0.9])
    np.testing.assert_array_equal(spectrum.get_xdata(), [1, 2, 3, 4, 5])
    dashed = [line for line in middle.lines if line.get_linestyle() == "--"]
    assert sorted(float(np.asarray(line.get_ydata())[0]) for line in dashed) == [-0.9, 0.9]  # the modulus decides
    assert "gap 1 − |μ₂| = 0.1" in middle.get_title()
    assert middle.get_xscale() == "linear"

    assert right.get_yscale() == "log"
    measured, predicted = right.lines
    np.testing.assert_array_equal(measured.get_ydata(), decay)
    np.testing.assert_allclose(np.diff(np.log(np.asarray(predicted.get_ydata()))), np.log(0.9))
    np.testing.assert_allclose(np.asarray(predicted.get_ydata())[50:], decay[50:], rtol=1e-6)
    assert predicted.get_linestyle() == "--"
    assert "0.9" in str(predicted.get_label())
    assert figure.get_suptitle() == "chain"
    assert render(figure, "png").startswith(b"\x89PNG")


def test_markers_of_different_series_take_turns() -> None:
    pi = np.full(300, 1 / 300)
    axis = chain_figure({"a": pi, "b": pi, "c": pi}, REAL).axes[0]
    starts = [line.get_markevery() for line in axis.lines[1:]]
    assert starts[0][0] != starts[1][0]
    assert 300 / starts[0][1] <= 40


def test_one_way_and_no_decay() -> None:
    figure = chain_figure({"degree": PI}, np.cos(np.linspace(0, 1, 80)))
    left, middle = figure.axes
    assert left.get_title() == "stationary distribution π"
    assert left.get_xlabel() == "node"
    assert middle.get_xscale() == "log"
    assert [line.get_linestyle() for line in middle.lines].count("--") == 1


def test_several_closed_classes_have_no_gap() -> None:
    figure = chain_figure({"pi": PI}, np.array([1.0, 1 - 1e-6, 0.5]))
    assert figure.axes[1].get_title().endswith("= 1e-06")
    assert chain_figure({"pi": PI}, np.array([1.0, 0.5, 1.0])).axes[1].get_title().endswith("= 0")


@pytest.mark.slow
def test_complex_eigenvalues_lie_in_the_plane() -> None:
    figure = chain_figure({"pi": PI}, TURNING)
    axis = figure.axes[1]
    unit, circle, points = axis.lines
    assert np.hypot(*unit.get_data()) == pytest.approx(1)
    assert np.hypot(*circle.get_data()) == pytest.approx(0.6)
    assert circle.get_linestyle() == "--"
    np.testing.assert_array_equal(points.get_xdata(), TURNING.real)
    np.testing.assert_array_equal(points.get_ydata(), TURNING.imag)
    assert axis.get_aspect() == 1
    assert render(figure, "png").startswith(b"\x89PNG")


def test_an_image_of_the_distribution() -> None:
    pi = PI.reshape(5, 8)
    figure = chain_figure({"degree": pi, "eigenvector": pi}, REAL)
    axis = figure.axes[0]
    np.testing.assert_array_equal(np.asarray(axis.images[0].get_array()), pi)
    assert axis.images[0].get_clim() == (0, pi.max())
    assert "0.0e+00" in axis.get_title()
    assert axis.get_xlabel() == "degree = eigenvector"
    assert render(figure, "png").startswith(b"\x89PNG")


def test_several_distances() -> None:
    k = np.arange(400)
    figure = chain_figure({"pi": PI}, TURNING, decay={"worst": 0.6**k, "other": 0.1 * 0.6**k})
    lines = figure.axes[2].lines
    labels = [str(line.get_label()) for line in lines]
    assert [label for label in labels if not label.startswith("_")] == ["worst", "|μ₂|ᵏ, |μ₂| = 0.6", "other"]
    assert np.asarray(lines[0].get_ydata()).min() > 1e-15
    assert np.asarray(lines[0].get_xdata())[-1] == 67  # the last above rounding: 0.6^67 > 1e-15 > 0.6^68
    assert lines[0].get_color() == lines[1].get_color() != lines[2].get_color() == lines[3].get_color()


@pytest.mark.slow
def test_a_chain_that_forgets_at_once() -> None:
    figure = chain_figure({"pi": PI}, np.array([1.0, 0, 0]), decay=np.array([0.7, 0.0, 0.0]))
    assert len(figure.axes[2].lines) == 1
    assert render(figure, "png").startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stationary": {}}, "stationary: got none"),
        ({"stationary": {"a": PI, "b": PI[1:]}}, "stationary: got shapes"),
        ({"stationary": {"a": PI.reshape(2, 4, 5)}}, "stationary: got 3 dimension"),
        ({"x": PI[1:]}, "x: got shape"),
        ({"stationary": {"a": PI.reshape(5, 8)}, "x": PI}, "x: got shape .*none for an image"),
        ({"eigenvalues": np.eye(3)}, "eigenvalues: got shape"),
        ({"eigenvalues": np.ones(1)}, "eigenvalues: got shape"),
        ({"eigenvalues": np.array([1, np.nan])}, "eigenvalues: got shape"),
        ({"eigenvalues": np.array([0.9, 0.5])}, "eigenvalues: got 0.9 as the nearest to 1, expected 1 among them"),
        ({"eigenvalues": TURNING[1:]}, "expected 1 among them"),
        ({"decay": np.eye(3)}, "decay: got 2 dimension"),
        ({"decay": {"a": -PI}}, "decay 'a': got values from"),
        ({"decay": np.zeros(3)}, "not all 0"),
        ({"decay": {}}, "decay: got none"),
    ],
)
def test_wrong_chains(changed: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"stationary": {"a": PI}, "eigenvalues": REAL} | changed
    with pytest.raises(InputError, match=message):
        chain_figure(**arguments)  # type: ignore[arg-type]


@pytest.mark.slow
def test_phase_diagram() -> None:
    mu_min, fidelity = RNG.uniform(-0.5, 0.5, 200), RNG.uniform(0, 2, 200)
    growth = np.maximum(np.abs(1 - fidelity), np.abs(mu_min - fidelity))
    figure = phase_figure(mu_min, fidelity, growth, title="step")
    axis, bar = figure.axes
    stable, unstable = axis.collections
    for drawn, chosen in ((stable, growth <= 1), (unstable, growth > 1)):
        np.testing.assert_array_equal(drawn.get_offsets(), np.stack([mu_min, fidelity], axis=1)[chosen])
        np.testing.assert_allclose(drawn.get_array(), np.clip(growth[chosen], 0.5, 2))
    for drawn, sign in ((stable, 1), (unstable, -1)):
        colours = drawn.to_rgba(drawn.get_array())[:, :3]
        assert np.all(sign * (colours[:, 2] - colours[:, 0]) > -0.01)  # bluer than red, or redder than blue
        edge = to_rgb(drawn.get_edgecolor()[0][:3])
        assert sign * (edge[2] - edge[0]) > 0.3
    assert not np.array_equal(stable.get_paths()[0].vertices, unstable.get_paths()[0].vertices)  # told apart by shape
    (boundary,) = axis.lines
    along, height = (np.asarray(values) for values in boundary.get_data())
    np.testing.assert_allclose(height, 1 + along)
    assert along[0] < mu_min.min() < mu_min.max() < along[-1]
    assert f"stable ({np.count_nonzero(growth <= 1)})" in [text.get_text() for text in axis.get_legend().get_texts()]
    assert "growth" in bar.get_ylabel()
    assert figure.get_suptitle() == "step"
    assert render(figure, "png").startswith(b"\x89PNG")


def test_phase_diagram_with_a_limit_of_ones_own_and_one_sort_of_points() -> None:
    figure = phase_figure(np.array([0.3, -0.2]), np.array([1.0, 1.5]), np.array([1.2, 1.1]), limit=np.array([0.9, 0.4]))
    axis, bar = figure.axes
    np.testing.assert_array_equal(axis.lines[0].get_data(), [[-0.2, 0.3], [0.4, 0.9]])
    stable, unstable = axis.collections
    assert (len(stable.get_offsets()), len(unstable.get_offsets())) == (0, 2)
    low, high = unstable.get_clim()
    assert low * high == pytest.approx(1)  # white is at 1
    assert [text.get_text() for text in bar.get_yticklabels()] == ["1"]
    assert render(figure, "png").startswith(b"\x89PNG")


def test_wrong_phases() -> None:
    one, two = np.ones(1), np.ones(2)
    with pytest.raises(InputError, match="fidelity: got shape"):
        phase_figure(two, one, two)
    with pytest.raises(InputError, match="growth: got shape"):
        phase_figure(two, two, one)
    with pytest.raises(InputError, match="limit: got shape"):
        phase_figure(two, two, two, limit=one)
    with pytest.raises(InputError, match="growth: got -1"):
        phase_figure(two, two, -two)
    with pytest.raises(InputError, match="mu_min: got 2 dimension"):
        phase_figure(np.eye(2), np.eye(2), np.eye(2))
