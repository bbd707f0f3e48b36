"""Equilibria over parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nlflow._array import root_mean_square
from nlflow.equilibria import Branch, Cycle, find_equilibria, stability
from nlflow.errors import InputError, check_array, check_range
from nlflow.flows.flow import Flow, as_flow
from nlflow.plotting import base
from nlflow.plotting.base import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = {"fold": "v", "pitchfork": "o", "transcritical": "s", "branch point": "D", "hopf": "P"}
_NAMES = {"hopf": "Hopf point"}
_CELLS = 31  # places in each direction at which velocities are taken


def bifurcation_figure(
    branches: Branch | Sequence[Branch] | Mapping[str, Branch | Sequence[Branch]],
    *,
    axis: Axes | None = None,
    value: Callable[[Array], float] = root_mean_square,
    xlabel: str = "parameter",
    ylabel: str = "root mean square of u",
    title: str | None = None,
) -> Figure:
    """Draw branches of equilibria over their parameter: stable parts solid, others dashed, special points marked.

    Parameters
    ----------
    branches : Branch, sequence of them, or mapping of str to either
        Names are shown in the legend.
    axis : matplotlib.axes.Axes, optional
        By default that of a new figure.
    value : callable
        Maps a signal to the number that is drawn.
    xlabel, ylabel, title : str

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    InputError
        Without a branch, and for anything else in `branches`.
    """
    given = branches if isinstance(branches, Mapping) else {"": branches}
    named = {name: list(one) if isinstance(one, Iterable) else [one] for name, one in given.items()}
    base.check_groups("branches", named, "Branch")
    for one in (one for several in named.values() for one in several):
        if not isinstance(one, Branch):
            raise InputError(f"branches: got {type(one).__name__}, expected what continue_equilibria returns")
    figure, axis = _place(axis, 8.0, 5.0, title)
    entries: dict[str, Any] = {}
    for number, (name, several) in enumerate(named.items()):
        shade, marker = base.look(number)
        for branch in several:
            _draw_branch(axis, branch, value, shade, marker if name else "")
        if name:
            (entries[name],) = axis.plot([], [], color=shade, marker=marker, markersize=4, linewidth=1.6)
    seen: dict[str, Any] = {}
    for point in (point for several in named.values() for branch in several for point in branch.points):
        (mark,) = axis.plot(
            point.parameter, value(point.u), _MARKS[point.kind], color="white", markeredgecolor="black",
            markersize=8, zorder=4,
        )  # fmt: skip
        seen[_NAMES.get(point.kind, point.kind)] = mark
    for words, style in (("stable", "-"), ("unstable", "--")):
        entries[words] = axis.plot([], [], style, color="black", linewidth=2 if style == "-" else 1.3)[0]
    entries |= seen
    base.legend_below(axis, list(entries.values()), list(entries), ncols=min(len(entries), 4), columnspacing=1.4)
    base.finish(axis, axis.get_title(), xlabel, ylabel)
    return figure


def _place(axis: Axes | None, width: float, height: float, title: str | None) -> tuple[Figure, Axes]:
    if axis is None:
        figure = base.new_figure(width, height, 130, title)
        return figure, figure.subplots()
    if not hasattr(axis, "set_title"):
        raise InputError(f"axis: got {type(axis).__name__}, expected Axes of Matplotlib, or None for a new figure")
    base.check_title(title)
    if title is not None:
        axis.set_title(title)
    return axis.figure, axis  # type: ignore[return-value]  # a panel of a figure in a figure is drawn in it too


def _draw_branch(axis: Axes, branch: Branch, value: Callable[[Array], float], shade: str, marker: str) -> None:
    """Draw a branch in pieces that are stable or not; they meet where that changes."""
    p, y = branch.parameter, np.array([value(u) for u in branch.u])
    changes = {point.after + 1: (point.parameter, value(point.u)) for point in branch.points}
    cuts = [i for i in range(1, len(p)) if branch.stable[i] != branch.stable[i - 1]]
    every = max(len(p) // 6, 1)
    if marker:
        axis.plot(p[every // 2 :: every], y[every // 2 :: every], marker, color=shade, markersize=4)
    for begin, end in zip([0, *cuts], [*cuts, len(p)], strict=True):
        piece = [*zip(p[begin:end], y[begin:end], strict=True)]
        if begin:
            piece.insert(0, changes.get(begin, (p[begin - 1], y[begin - 1])))
        if end < len(p) and end in changes:
            piece.append(changes[end])
        firm = bool(branch.stable[min(begin + 1, end - 1)])
        axis.plot(*np.array(piece).T, "-" if firm else "--", color=shade, linewidth=2 if firm else 1.3)


def portrait_figure(
    flow: Flow | None,
    x: tuple[float, float],
    y: tuple[float, float],
    *,
    curves: Mapping[str, Array | Cycle] | None = None,
    axis: Axes | None = None,
    xlabel: str = "u₁",
    ylabel: str = "u₂",
    title: str | None = None,
) -> Figure:
    """Draw the phase portrait of a flow of two components at one node: its direction, nullclines, equilibria, curves.

    A search from five points of the window may miss equilibria. Stable ones are filled.

    Parameters
    ----------
    flow : Flow or None
        A flow of signals of shape (1, 2). With None only the curves are drawn.
    x, y : tuple of float
        Ends of the axes, (low, high).
    curves : mapping of str to array of shape (T, 2) or (T, 1, 2), or Cycle, optional
    axis : matplotlib.axes.Axes, optional
        By default that of a new figure.
    xlabel, ylabel, title : str

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    InputError
        For a flow of other signals, ends that do not increase, and curves of other shapes.
    """
    window = [check_range("x", x), check_range("y", y)]
    if flow is not None:
        flow = as_flow(flow, expected="or None for the curves alone")
    if not isinstance(curves, Mapping | None):
        raise InputError(f"curves: got {type(curves).__name__}, expected a mapping of names to arrays")
    figure, axis = _place(axis, 6.4, 5.6, title)
    if flow is not None:
        _draw_flow(axis, flow, window)
    for number, (name, curve) in enumerate((curves or {}).items()):
        points = curve.u if isinstance(curve, Cycle) else curve
        points = check_array(f"curves[{name!r}]", points, ndim=(2, 3), hint="two components over time")
        if points.shape not in ((len(points), 2), (len(points), 1, 2)):
            raise InputError(f"curves[{name!r}]: got shape {points.shape}, expected (T, 2), two components over time")
        shade, marker = base.look(number)
        axis.plot(*points.reshape(-1, 2).T, color=shade, linewidth=2.0, label=name, marker=marker, markevery=[0])
    axis.set_xlim(*window[0])
    axis.set_ylim(*window[1])
    base.finish(axis, axis.get_title(), xlabel, ylabel)
    axis.grid(visible=False)
    if axis.get_legend_handles_labels()[0]:
        base.legend_below(axis, ncols=3, columnspacing=1.4)
    return figure


def _draw_flow(axis: Axes, flow: Flow, window: list[tuple[float, float]]) -> None:
    across, up = (np.linspace(low, high, _CELLS) for low, high in window)
    try:
        signals = [flow.check_signal("flow", np.array([[a, b]])) for b in up for a in across]
    except InputError as error:
        raise InputError(
            f"flow: expected one of signals of shape (1, 2) that takes the whole window ({error})"
        ) from error
    slopes = np.array([np.asarray(flow.velocity(signal))[0] for signal in signals]).reshape(_CELLS, _CELLS, 2)
    axis.streamplot(across, up, slopes[..., 0], slopes[..., 1], color="0.75", linewidth=0.8, density=1.1, arrowsize=0.8)
    for part, style in enumerate((":", "-.")):
        if np.ptp(np.sign(slopes[..., part])) > 0:
            found = axis.contour(across, up, slopes[..., part], [0.0])
            pieces, label = found.allsegs[0], f"du{'₁₂'[part]}/dt = 0"
            found.remove()
            for number, piece in enumerate(pieces):
                axis.plot(*piece.T, style, color="0.3", linewidth=1.1, label=label if number == 0 else None)
    (left, right), (low, high) = window
    corners = [(0.5, 0.5), (0.2, 0.2), (0.8, 0.2), (0.2, 0.8), (0.8, 0.8)]
    starts = [np.array([[left + a * (right - left), low + b * (high - low)]]) for a, b in corners]
    for one in find_equilibria(flow, starts, most=9, maxiter=30):
        a, b = one.u[0]
        if left <= a <= right and low <= b <= high:
            firm = stability(flow, one.u).verdict == "stable"
            axis.plot(a, b, "o", color="black" if firm else "white", markeredgecolor="black", markersize=8, zorder=5)
