"""Rates and bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nlflow.errors import InputError, check_array, check_choice, check_number
from nlflow.plotting import base
from nlflow.plotting.base import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OUTSIDE = "#b03a2e"
_NARROW, _TICKS = 40.0, 7
_ROUNDING = 1e-9  # relative: a measured value may be equal to its bound


@dataclass(frozen=True)
class Series:
    """Values with a fitted power law or exponential.

    Attributes
    ----------
    name : str
    x, y : array of shape (M,)
        Abscissas and values (>= 0; zeros cannot be drawn and are left out).
    low, high : array of shape (M,), optional
        Ends of an interval about each value; both or none.
    slope : float, optional
        Fitted slope: of log y over log x, or of the natural log y over x on semi-logarithmic axes.
    intercept : float, optional
        Natural logarithm of the fit at x = 1 (x = 0 on semi-logarithmic axes); by default through the mean of the
        points.
    expected : float, optional
        Predicted slope.
    half_width : float, optional
        Half width of the confidence interval of `slope`.
    used : array of bool, shape (M,), optional
        Points of the fit; the others are drawn open.
    """

    name: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None
    slope: float | None = None
    intercept: float | None = None
    expected: float | None = None
    half_width: float | None = None
    used: Array | None = None


def rate_figure(
    groups: Mapping[str, Sequence[Series]] | Sequence[Series],
    *,
    xlabel: str,
    ylabel: str,
    title: str | None = None,
    scale: str = "loglog",
) -> Figure:
    """Draw measured values over a parameter with fitted (pale) and expected (dashed) slopes.

    Parameters
    ----------
    groups : mapping of str to sequence of Series, or sequence of Series
        Panel title and what is drawn in it. A sequence is a single panel.
    xlabel, ylabel, title : str
    scale : {"loglog", "semilogy"}
        Power laws y = C x^slope, or exponentials y = C exp(slope x).
    """
    check_choice("scale", scale, ("loglog", "semilogy"))
    panels = dict(groups) if isinstance(groups, Mapping) else {"": groups}
    base.check_groups("groups", panels, "Series in every panel")
    height = 4.2 + 0.26 * max(len(group) for group in panels.values())
    figure, axes = base.panel_grid(len(panels), 4.5, height, title)
    for axis, (name, group) in zip(axes, panels.items(), strict=True):
        axis.set_yscale("log")
        if scale == "loglog":
            axis.set_xscale("log")
        entries = [_draw_series(axis, series, scale, *base.look(number)) for number, series in enumerate(group)]
        if scale == "loglog":
            _mark_abscissas(axis, np.concatenate([np.asarray(series.x, dtype=np.float64) for series in group]))
        told = "pale: fitted, dashed: expected slope" if any(one.expected is not None for one in group) else None
        base.legend_below(axis, *zip(*entries, strict=True), title=told)
        base.finish(axis, name, xlabel, ylabel)
    return figure


def bounds_figure(
    series: Mapping[str, tuple[Array, Array, Array, Array]],
    *,
    xlabel: str,
    ylabel: str,
    title: str | None = None,
    logx: bool = True,
    logy: bool = False,
) -> Figure:
    """Draw quantities within a band of bounds; those outside have a red cross.

    Parameters
    ----------
    series : mapping of str to (x, measured, low, high)
        One panel each; four arrays of shape (M,), in any order of x.
    xlabel, ylabel, title : str
    logx, logy : bool
        Logarithmic axes.
    """
    base.check_named("series", series, "(x, measured, low, high)")
    figure, axes = base.panel_grid(len(series), 4.4, 4.6, title, sharex=True, sharey=True)
    for number, (axis, (name, arrays)) in enumerate(zip(axes, series.items(), strict=True)):
        if len(arrays) != 4:
            raise InputError(f"series {name!r}: got {len(arrays)} array(s), expected four: x, measured, low, high")
        x, y, low, high = _alike(name, dict(zip(("x", "measured", "low", "high"), arrays, strict=True)), logx)
        if np.any(low > high):
            raise InputError(f"low of {name!r}: got a lower bound above the upper one, expected low <= high")
        if logy and high.max() <= 0:
            raise InputError(f"high of {name!r}: got {high.max():.4g} at most, expected some > 0 on a logarithmic axis")
        order, (shade, _) = np.argsort(x), base.look(number)
        x, y, low, high = x[order], y[order], low[order], high[order]
        axis.fill_between(x, low, high, color=shade, alpha=0.18, linewidth=0)
        for bound, label in ((low, None), (high, "bounds")):
            axis.plot(x, bound, color=shade, linewidth=1.2, linestyle="--", label=label)
        axis.plot(x, y, color=shade, linewidth=1.2, marker="o", markersize=base.points(5), label="measured")
        slack = _ROUNDING * np.maximum(np.abs(low), np.abs(high))
        outside = (y < low - slack) | (y > high + slack)
        if outside.any():
            axis.plot(x[outside], y[outside], linestyle="none", marker="X", markersize=10, color=_OUTSIDE,
                      label=f"outside ({np.count_nonzero(outside)})")  # fmt: skip
        axis.set_xscale("log" if logx else "linear")
        axis.set_yscale("log" if logy else "linear")
        base.legend_below(axis, ncols=3, columnspacing=1.2)
        base.finish(axis, name, xlabel, ylabel if base.in_grid(axis).is_first_col() else "")
        axis.tick_params(labelbottom=True)
    return figure


def _mark_abscissas(axis: Axes, x: Array) -> None:
    """Put the ticks at the abscissas if they span little more than a decade: its own ticks would touch each other.

    Abscissas that are no whole numbers say little; 1, 2 and 5 times a power of ten take their place.
    """
    from matplotlib.ticker import NullLocator

    marks = np.unique(x)
    if marks[-1] < _NARROW * marks[0]:
        if np.all(marks == np.round(marks)):
            marks = marks[:: -(-marks.size // _TICKS)]
        else:
            decades = 10.0 ** np.arange(np.floor(np.log10(marks[0])), np.ceil(np.log10(marks[-1])) + 1)
            rounded = np.outer(decades, [1.0, 2.0, 5.0]).ravel()
            marks = rounded[(rounded >= 0.9 * marks[0]) & (rounded <= 1.1 * marks[-1])]
        axis.set_xticks(marks, [f"{mark:.3g}" for mark in marks])
        axis.xaxis.set_minor_locator(NullLocator())


def _draw_series(axis: Axes, series: Series, scale: str, shade: str, marker: str) -> tuple[Any, str]:
    given = {"x": series.x, "y": series.y, "low": series.low, "high": series.high}
    if (series.low is None) != (series.high is None):
        raise InputError(f"low of {series.name!r}: got one end of the interval, expected both low and high or none")
    arrays = {key: array for key, array in given.items() if array is not None}
    x, y, *interval = _alike(series.name, arrays, scale == "loglog")
    used = np.ones(x.shape, bool) if series.used is None else np.asarray(series.used, dtype=bool)
    if used.shape != x.shape or y.min() < 0 or not (used & (y > 0)).any():
        raise InputError(f"y of {series.name!r}: expected values >= 0, a positive one among those `used` (shape of y)")
    if interval:
        low, high = interval
        axis.errorbar(
            x, y, yerr=np.maximum([y - low, high - y], 0), fmt="none", ecolor=shade, elinewidth=1.1, capsize=2.5
        )
    used = used & (y > 0)
    joined = "-" if series.slope is None and series.expected is None else "none"
    style: Any = {
        "linestyle": joined,
        "linewidth": 1,
        "color": shade,
        "marker": marker,
        "markersize": base.points(5.5),
        "zorder": 3,
    }
    handles = axis.plot(x[used], y[used], markerfacecolor=shade, **style)
    others = ~used & (y > 0)
    axis.plot(x[others], y[others], markerfacecolor="none", **style)
    label = series.name
    place = np.log(x) if scale == "loglog" else x
    centre, level = float(place[used].mean()), float(np.log(y[used]).mean())
    ends = np.array([place[used].min(), place[used].max()])
    ends += np.array([-0.04, 0.04]) * np.ptp(ends)
    across = np.exp(ends) if scale == "loglog" else ends
    if series.slope is not None:
        slope = check_number(f"slope of {series.name!r}", series.slope)
        height = level - slope * centre if series.intercept is None else series.intercept
        handles += axis.plot(across, np.exp(height + slope * ends), color=shade, alpha=0.4, linewidth=base.points(4))
        label += f": slope {_told(slope, series.half_width)}"
    if series.expected is not None:
        expected = check_number(f"expected of {series.name!r}", series.expected)
        dashed = np.exp(level + expected * (ends - centre))
        handles += axis.plot(across, dashed, color=shade, linestyle="--", linewidth=1.4)
        label += f" (expected {_number(expected)})"
    return tuple(handles), label


def _told(slope: float, half_width: float | None) -> str:
    """Return a slope with the digits that mean something beside its interval."""
    if half_width is None:
        return _number(slope)
    width = check_number("half_width", half_width, minimum=0)
    # Two digits of the width if the first is 1 (0.01 for 0.014 would be too narrow), otherwise one.
    digits = min(max(-int(np.floor(np.log10(width / 2))), 1), 8) if width > 0 else 6
    return _number(slope, f".{digits}f") + f" ± {width:.{digits}f}"


def _number(value: float, form: str = ".4g") -> str:
    return format(value, form).replace("-", "−")


def _alike(name: str, arrays: dict[str, Array], logarithmic: bool) -> list[Array]:
    """Return arrays of the shape of x; on a logarithmic axis x is > 0."""
    found = {key: check_array(f"{key} of {name!r}", array, ndim=1) for key, array in arrays.items()}
    for key, array in found.items():
        base.check_shape(f"{key} of {name!r}", array, found["x"].shape, "x")
    if logarithmic and (least := found["x"].min()) <= 0:
        raise InputError(f"x of {name!r}: got {least:.4g}, expected values > 0 on a logarithmic axis")
    return list(found.values())
