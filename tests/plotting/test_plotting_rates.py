"""Rates and bounds: points, fits, expected slopes, what the legend says, and what lies outside of its bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex

from nlflow.errors import InputError
from nlflow.plotting import Series, bounds_figure, rate_figure, render

H = 2.0 ** -np.arange(3, 10)
LABELS = {"xlabel": "h", "ylabel": "error"}


def rates(axis: Any) -> list[Any]:
    return [line for line in axis.lines if line.get_linestyle() in ("-", "--")]


def legend(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_power_laws() -> None:
    series = Series("midpoint", H, 0.3 * H**1.9, slope=1.9, intercept=np.log(0.3), expected=2.0, half_width=0.004)
    figure = rate_figure([series], **LABELS, title="order")
    (axis,) = figure.axes
    assert (axis.get_xscale(), axis.get_yscale()) == ("log", "log")
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("h", "error")
    np.testing.assert_array_equal(axis.lines[0].get_data(), [H, 0.3 * H**1.9])
    fitted, expected = rates(axis)
    assert (fitted.get_linestyle(), expected.get_linestyle()) == ("-", "--")
    across, values = (np.asarray(part) for part in fitted.get_data())
    np.testing.assert_allclose(values, 0.3 * across**1.9)
    assert across[0] < H.min() < H.max() < across[-1]
    across, values = (np.asarray(part) for part in expected.get_data())
    assert np.diff(np.log(values)) / np.diff(np.log(across)) == pytest.approx(2)
    # The expected slope meets the points in their middle.
    middle = np.exp(np.log(H).mean())
    assert np.exp(np.interp(np.log(middle), np.log(across), np.log(values))) == pytest.approx(0.3 * middle**1.9)
    assert legend(axis) == ["midpoint: slope 1.900 ± 0.004 (expected 2)"]
    assert figure.get_suptitle() == "order"
    assert render(figure, "png").startswith(b"\x89PNG")


def test_exponentials_and_points_left_out_of_the_fit() -> None:
    n = np.arange(4.0, 24.0, 2)
    y = np.maximum(5 * np.exp(-1.5 * n), 1e-12)
    y[-1] = 0
    used = y > 1e-11
    series = Series("periodic", n, y, slope=-1.5, expected=-1.5, used=used)
    axis = rate_figure([series], xlabel="N", ylabel="error", scale="semilogy").axes[0]
    assert (axis.get_xscale(), axis.get_yscale()) == ("linear", "log")
    filled, hollow = axis.lines[:2]
    np.testing.assert_array_equal(filled.get_xdata(), n[used])
    np.testing.assert_array_equal(hollow.get_xdata(), n[~used & (y > 0)])
    assert (filled.get_markerfacecolor() == "none", hollow.get_markerfacecolor()) == (False, "none")
    for line in rates(axis):  # without an intercept both go through the fitted points
        across, values = (np.asarray(part) for part in line.get_data())
        np.testing.assert_allclose(values, 5 * np.exp(-1.5 * across))
        assert across[-1] < n[~used].min()
    assert legend(axis) == ["periodic: slope −1.5 (expected −1.5)"]


def test_zeros_are_left_out_of_the_fit() -> None:
    y = np.where(H < 0.01, 0, H**2)
    axis = rate_figure([Series("exact", H, y, slope=2.0, expected=2.0)], **LABELS).axes[0]
    np.testing.assert_array_equal(axis.lines[0].get_xdata(), H[y > 0])
    for line in rates(axis):
        across, values = (np.asarray(part) for part in line.get_data())
        np.testing.assert_allclose(values, across**2)


def test_intervals_about_the_points() -> None:
    axis = rate_figure([Series("a", H, H, low=0.5 * H, high=3 * H)], **LABELS).axes[0]
    (bars,) = axis.collections
    np.testing.assert_allclose([part[:, 1] for part in bars.get_segments()], np.stack([0.5 * H, 3 * H], axis=1))
    assert legend(axis) == ["a"]
    assert axis.get_legend().get_title().get_text() == ""


def test_points_without_a_fit_are_joined() -> None:
    axis = rate_figure([Series("plain", H, H), Series("fitted", H, 2 * H, expected=1)], **LABELS).axes[0]
    plain, _, fitted, _, _ = axis.lines
    assert (plain.get_linestyle(), fitted.get_linestyle()) == ("-", "None")
    assert to_hex(plain.get_color()) != to_hex(fitted.get_color())
    assert plain.get_marker() != fitted.get_marker()
    assert legend(axis) == ["plain", "fitted (expected 1)"]


@pytest.mark.parametrize(
    ("slope", "half_width", "told"),
    [
        (1.99812, 0.00412, "1.998 ± 0.004"),
        (0.5049, 0.0143, "0.505 ± 0.014"),  # 0.01 would be too narrow
        (-1.09997, 3e-5, "−1.09997 ± 0.00003"),
        (2.0, 0.0, "2.000000 ± 0.000000"),
        (2.04, 1.2, "2.0 ± 1.2"),
        (1.9981234, None, "1.998"),
    ],
)
def test_digits_of_a_slope(slope: float, half_width: float | None, told: str) -> None:
    axis = rate_figure([Series("a", H, H, slope=slope, half_width=half_width)], **LABELS).axes[0]
    assert legend(axis) == [f"a: slope {told}"]


def test_groups_are_panels() -> None:
    groups = {name: [Series("a", H, H)] for name in ("one", "two", "three", "four")}
    figure = rate_figure(groups, **LABELS)
    assert [axis.get_title() for axis in figure.axes] == ["one", "two", "three", "four", "", ""]
    assert [axis.axison for axis in figure.axes] == [True] * 4 + [False] * 2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "groups: got none"),
        ({"a": []}, "groups: got none or an empty one"),
        ([Series("a", H, H[1:])], "y of 'a': got shape"),
        ([Series("a", H, H, low=H)], "low of 'a': got one end"),
        ([Series("a", H, H, low=H, high=H[1:])], "high of 'a': got shape"),
        ([Series("a", H, -H)], "y of 'a': expected values >= 0"),
        ([Series("a", H, 0 * H)], "y of 'a': .* a positive one"),
        ([Series("a", H, H, used=np.ones(3, bool))], "shape of y"),
        ([Series("a", H - 1, H)], "x of 'a': got -"),
        ([Series("a", H, H, slope=np.nan)], "slope of 'a': got nan"),
        ([Series("a", H, H, slope=1.0, half_width=-1)], "half_width: got -1"),
    ],
)
def test_wrong_series(groups: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rate_figure(groups, **LABELS)


def test_wrong_scale() -> None:
    with pytest.raises(InputError, match="scale: got 'linear'"):
        rate_figure([Series("a", H, H)], **LABELS, scale="linear")
    assert rate_figure([Series("a", H - 1, H)], **LABELS, scale="semilogy").axes


def test_bounds() -> None:
    x = np.array([1.0, 0.01, 0.1])
    figure = bounds_figure({"all": (x, 2 * x, x, 3 * x), "some": (x, 5 * x, x, [3, 0.06, 0.3])}, **LABELS, title="b")
    inside, outside = figure.axes
    order = np.sort(x)
    low, high, measured = inside.lines
    for line, factor in ((low, 1), (high, 3), (measured, 2)):
        np.testing.assert_allclose(line.get_data(), [order, factor * order])
    band = inside.collections[0].get_paths()[0].vertices
    assert {tuple(np.round(point, 6)) for point in band} >= {(0.1, 0.1), (0.1, 0.3), (1, 3), (0.01, 0.01)}
    crosses = outside.lines[-1]
    assert crosses.get_marker() == "X"
    np.testing.assert_allclose(crosses.get_xdata(), [0.1, 1.0])
    assert legend(outside) == ["bounds", "measured", "outside (2)"]
    assert legend(inside) == ["bounds", "measured"]
    assert [axis.get_title() for axis in figure.axes] == ["all", "some"]
    assert {(axis.get_xscale(), axis.get_yscale()) for axis in figure.axes} == {("log", "linear")}
    assert inside.get_ylim() == outside.get_ylim()
    assert inside.get_ylabel() == "error"
    assert render(figure, "png").startswith(b"\x89PNG")


def test_a_value_on_its_bound_is_inside() -> None:
    x = np.array([1.0, 2.0])
    axis = bounds_figure({"": (x, x * (1 + 1e-12), x, x)}, **LABELS, logx=False, logy=True).axes[0]
    assert (axis.get_xscale(), axis.get_yscale()) == ("linear", "log")
    assert legend(axis) == ["bounds", "measured"]


def test_bounds_fill_rows_of_three() -> None:
    x = np.array([1.0, 2.0])
    figure = bounds_figure({str(number): (x, x, x, x) for number in range(4)}, **LABELS)
    assert [axis.axison for axis in figure.axes] == [True] * 4 + [False] * 2
    assert [axis.get_ylabel() for axis in figure.axes] == ["error", "", "", "error", "", ""]


def test_wrong_bounds() -> None:
    x = np.array([1.0, 2.0])
    with pytest.raises(InputError, match="series: got none"):
        bounds_figure({}, **LABELS)
    with pytest.raises(InputError, match="measured of 'a': got shape"):
        bounds_figure({"a": (x, x[1:], x, x)}, **LABELS)
    with pytest.raises(InputError, match="low of 'a': got a lower bound above"):
        bounds_figure({"a": (x, x, 2 * x, x)}, **LABELS)
    with pytest.raises(InputError, match="x of 'a': got -1"):
        bounds_figure({"a": (-x + 1, x, x, x)}, **LABELS)
    with pytest.raises(InputError, match=r"series 'a': got 3 array\(s\), expected four"):
        bounds_figure({"a": (x, x, x)}, **LABELS)
    with pytest.raises(InputError, match="high of 'a': got -1 at most"):
        bounds_figure({"a": (x, -x, -x, -x)}, logy=True, **LABELS)


def test_ticks_of_a_narrow_axis_are_the_abscissas():
    x = np.array([64.0, 128, 256, 512])
    (axis,) = rate_figure([Series("s", x, 1 / x)], xlabel="N", ylabel="error").axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["64", "128", "256", "512"]
    assert list(axis.get_xticks()) == x.tolist()
    assert axis.get_xticks(minor=True).size == 0
    wide = np.geomspace(1, 1e4, 9)
    (axis,) = rate_figure([Series("s", wide, 1 / wide)], xlabel="N", ylabel="error").axes
    assert axis.get_xticks(minor=True).size > 0
