"""Flows over time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nlflow.errors import InputError, check_array, check_increasing, check_number
from nlflow.plotting import base
from nlflow.plotting.base import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# J has warm colours, E cold ones. Colour-blind people can tell the two families apart too.
_FAMILIES = {
    "J": ("#b03a2e", "#e69f00", "#cc79a7"),
    "E": ("#0b5394", "#009e73", "#56b4e9"),
    "": ("#5e3c99", "#8c6d31", "#4d4d4d", "#a6a600", "#d55e00", "#8da0cb"),
}
_FOOT = 0.05  # share of the logarithmic time axis for t = 0


@dataclass(frozen=True)
class Course:
    """A quantity over time.

    Attributes
    ----------
    name : str
        A name whose first word is J or E gets one of the colours of that flow.
    t, values : array of shape (T,)
        Times, and the quantity (>= 0) at each of them.
    rate : float, optional
        Predicted rate of the exponential decay exp(-rate t).
    """

    name: str
    t: Array
    values: Array
    rate: float | None = None


def spacetime_figure(
    panels: Mapping[str, tuple[Array, Array]],
    *,
    x: Array | None = None,
    title: str | None = None,
    logarithmic: bool = True,
) -> Figure:
    """Draw signals on a line over time, side by side in one scale of colours, with their profiles at start and end.

    Parameters
    ----------
    panels : mapping of str to (t, u)
        Increasing times of shape (T,), at least two of them above 0, and the signals at them, of shape (T, N).
    x : numpy.ndarray, shape (N,), optional
        Increasing coordinates of the nodes; by default their numbers.
    title : str, optional
    logarithmic : bool
        Draw the time on a logarithmic axis, with t = 0 as a strip at its foot.
    """
    base.check_named("panels", panels, "(t, u)")
    data = {name: _checked_panel(name, *panel) for name, panel in panels.items()}
    nodes = {u.shape[1] for _, u in data.values()}
    if len(nodes) > 1:
        raise InputError(f"panels: got signals on {sorted(nodes)} nodes, expected the same number in every panel")
    size = nodes.pop()
    where = np.arange(size, dtype=np.float64) if x is None else check_increasing("x", x, "coordinates")
    if where.shape != (size,):
        raise InputError(f"x: got shape {where.shape}, expected {size} coordinates, one for each node")

    figure = base.new_figure(3.9 * len(data) + 1.6, 6.2, 130, title)
    axes = figure.subplots(2, len(data), sharex="all", sharey="row", height_ratios=[3, 1.35], squeeze=False)
    style, shades = _scale_of([u for _, u in data.values()]), _shades(list(data))
    across, meshes = _edges(where), []
    times = [t for t, _ in data.values()]
    foot = _foot(times) if logarithmic else 0.0
    for column, (name, (t, u)) in enumerate(data.items()):
        picture, profile = axes[:, column]
        up = _time_edges(t, foot) if logarithmic else np.clip(_edges(t), t[0], t[-1])
        meshes.append(picture.pcolormesh(across, up, u, rasterized=True, **style))
        if logarithmic and t[0] == 0:
            picture.axhline(up[1], color="white", linewidth=2.5)
        picture.set_title(name, fontsize=12, color=shades[name], fontweight="bold")
        profile.plot(where, u[0], color="0.65", linewidth=1.0, label=f"t = {t[0]:.4g}")
        profile.plot(where, u[-1], color=shades[name], linewidth=1.8, label=f"t = {t[-1]:.4g}")
        profile.legend(fontsize=9, ncols=2, loc="lower left", bbox_to_anchor=(0, 0.98), frameon=False, borderpad=0.1)
        base.finish(profile, "", "node" if x is None else "x", "u" if column == 0 else "")
    if logarithmic:
        _logarithmic_times(axes[0, 0], times, foot)
    axes[0, 0].set_ylabel("time t")
    axes[1, 0].set_xlim(across[0], across[-1])
    bar = figure.colorbar(meshes[0], ax=list(axes[0]), fraction=0.04, pad=0.02, aspect=28)
    bar.set_label("u")
    return figure


def decay_figure(
    panels: Mapping[str, Sequence[Course]], *, title: str | None = None, logarithmic: bool = False, xlabel: str = "t"
) -> Figure:
    """Draw measured decays (pale lines) with the predicted exponentials (dashed) on a logarithmic axis.

    Parameters
    ----------
    panels : mapping of str to sequence of Course
        Values below 1e-15 of the largest are left out.
    title : str, optional
    logarithmic : bool
        Draw the time on a logarithmic axis, without t = 0.
    xlabel : str
    """
    base.check_groups("panels", panels, "Course in every panel")
    height = 4.2 + 0.2 * max(len(courses) for courses in panels.values())
    figure, axes = base.panel_grid(len(panels), 4.4, height, title)
    for axis, (name, courses) in zip(axes, panels.items(), strict=True):
        _draw_courses(axis, courses, logarithmic)
        base.finish(axis, name, xlabel)
    return figure


def _draw_courses(axis: Axes, courses: Sequence[Course], logarithmic: bool) -> None:
    axis.set_yscale("log")
    if logarithmic:
        axis.set_xscale("log")
    shades = _shades([course.name for course in courses])
    handles: list[Any] = []
    low, high = math.inf, 0.0
    for course in courses:
        t, values = _visible(course, logarithmic)
        shade = shades[course.name]
        (line,) = axis.plot(t, values, color=shade, alpha=0.4, linewidth=4, solid_capstyle="round", label=course.name)
        handles.append((line,))
        if not len(t):
            line.set_label(f"{course.name}: nothing above 0")
            continue
        low, high = min(low, float(values.min())), max(high, float(values.max()))
        if course.rate is None:
            continue
        rate = check_number(f"rate of {course.name!r}", course.rate)
        middle = base.middle_of(values)
        reach = base.REACH / abs(rate) if rate else math.inf
        ends = max(t[0], t[middle] - reach), min(t[-1], t[middle] + reach)
        shown = np.geomspace(*ends, 300) if logarithmic else np.linspace(*ends, 300)
        predicted = values[middle] * np.exp(-rate * (shown - t[middle]))
        (dashes,) = axis.plot(shown, predicted, color=shade, linewidth=1.4, linestyle="--")
        line.set_label(f"{course.name}, predicted rate {rate:.4g}")
        handles[-1] = (line, dashes)
    if high > 0:
        base.show_decades(axis, low, high, 3)
    title = "dashed: predicted exp(−rate · t)" if any(len(pair) > 1 for pair in handles) else None
    base.legend_below(axis, handles, [str(pair[0].get_label()) for pair in handles], down=0.13, title=title)


def _visible(course: Course, logarithmic: bool) -> tuple[Array, Array]:
    """Return the times and values that can be drawn: above rounding, and after 0 on a logarithmic axis."""
    t = check_increasing(f"t of {course.name!r}", course.t, "times")
    values = check_array(f"values of {course.name!r}", course.values, ndim=1)
    base.check_shape(f"t of {course.name!r}", t, values.shape, "values")
    if values.min() < 0:
        raise InputError(f"values of {course.name!r}: got {values.min():.4g}, expected values >= 0; pass distances")
    shown = (values > base.ROUNDING * values.max()) & ((t > 0) | (not logarithmic))
    return t[shown], values[shown].astype(np.float64)


def _checked_panel(name: str, t: Array, u: Array) -> tuple[Array, Array]:
    times = check_increasing(f"t of {name!r}", t, "times", minimum=0)
    signal = check_array(f"u of {name!r}", u, ndim=2, hint="one row for each time")
    if signal.shape[0] != len(times) or signal.shape[1] < 2:
        raise InputError(f"u of {name!r}: got shape {signal.shape}, expected ({len(times)}, N) with N >= 2 as in t")
    if np.count_nonzero(times > 0) < 2:
        raise InputError(f"t of {name!r}: got {times.tolist()}, expected two of them after 0, or more")
    return times, signal


def _shades(names: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        match = re.match(r"[JE]\b", name)
        family = _FAMILIES[match[0] if match else ""]
        found[name] = family[sum(shade in family for shade in found.values()) % len(family)]
    return found


def _scale_of(signals: list[Array]) -> dict[str, Any]:
    """Return one scale of colours: around 0 where signals reach about as far below 0 as above."""
    low, high = min(float(u.min()) for u in signals), max(float(u.max()) for u in signals)
    if low < 0 < high and max(-low, high) < 3 * min(-low, high):
        return {"cmap": "PuOr_r", "vmin": -max(-low, high), "vmax": max(-low, high)}
    return {"cmap": "viridis", "vmin": low, "vmax": high}


def _edges(centres: Array) -> Array:
    middles = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middles[0]], middles, [2 * centres[-1] - middles[-1]]])


def _foot(times: list[Array]) -> float:
    """Return where the logarithmic axis begins, with room for a visible strip for t = 0."""
    first = min(float(np.exp(_edges(np.log(t[t > 0])))[0]) for t in times)
    last = max(float(t[-1]) for t in times)
    return float(first * (first / last) ** _FOOT) if any(t[0] == 0 for t in times) else first


def _time_edges(t: Array, foot: float) -> Array:
    edges = np.exp(_edges(np.log(t[t > 0])))
    return np.concatenate([[foot], edges]) if t[0] == 0 else edges


def _logarithmic_times(axis: Axes, times: list[Array], foot: float) -> None:
    axis.set_yscale("log")
    first = min(float(t[t > 0][0]) for t in times)
    last = max(float(t[-1]) for t in times)
    decades = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
    steps = (1, 2, 5) if last < 100 * first else (1,)
    marks = [step * 10.0**k for k in decades for step in steps if first / 1.01 <= step * 10.0**k <= last * 1.01]
    started = any(t[0] == 0 for t in times)
    marks = [mark for mark in marks if not started or mark > foot * (last / foot) ** (_FOOT * 1.8)]  # clear of the 0
    marks = marks[:: -(-len(marks) // 8) or 1]
    labels = [f"{mark:g}" if 1e-3 < mark < 1e4 else f"$10^{{{round(math.log10(mark))}}}$" for mark in marks]
    if started:
        edge = min(float(_time_edges(t, foot)[1]) for t in times if t[0] == 0)
        marks, labels = [math.sqrt(foot * edge), *marks], ["0", *labels]
    axis.set_yticks(marks, labels)
    axis.minorticks_off()
