"""Sweeps and causes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nlflow.plotting.base import PALETTE, check_groups, finish, legend_below, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]
_GOOD, _BAD, _NEITHER = PALETTE[2], PALETTE[1], PALETTE[5]
_NORMAL = 1.96


def cures_figure(rows: Rows, *, metric: str, title: str | None = None) -> Figure:
    """Draw what each setting of a sweep gains, with its simultaneous interval.

    `rows` are those of a `nlflow.attention.Sweep`. An arrow marks an interval that goes on beyond the view.
    """
    check_groups("rows", {"rows": rows}, "setting")
    figure = new_figure(8.2, 1.3 + 0.2 * len(rows), 130, title)
    axis = figure.subplots()
    axis.axvline(0, color="0.4", linewidth=1, linestyle="--")
    names = [f"{row['cure']} {row['value']:g}, {row['layers']}" for row in rows]
    # An interval far from the others would hide them: the view ends at three times the usual reach.
    ends = np.array([[row["low"], row["high"]] for row in rows])
    usual = 3 * float(np.quantile(np.abs(ends), 0.7)) or 1.0
    for place, row in enumerate(rows):
        shade = _GOOD if row["helps"] else _BAD if row["harms"] else _NEITHER
        axis.plot([row["low"], row["high"]], [place, place], color=shade, linewidth=1.8, solid_capstyle="butt")
        axis.plot(row["gain"], place, "o", color=shade, markersize=4)
        # An arrow where an interval goes on beyond the view, with its gain where that is not shown either.
        for end, beyond, mark in ((-usual, row["low"] < -usual, "<"), (usual, row["high"] > usual, ">")):
            if beyond:
                axis.plot(end, place, mark, color=shade, markersize=5)
        if abs(row["gain"]) > usual:
            side = math.copysign(1, row["gain"])
            axis.annotate(f"{row['gain']:.2g}", (side * usual, place), xytext=(-7 * side, 0), fontsize=7, color=shade,
                          textcoords="offset points", va="center", ha="left" if side < 0 else "right")  # fmt: skip
    low, high = max(float(ends.min()), -usual), min(float(ends.max()), usual)
    room = 0.05 * (high - low) or 0.1
    axis.set_xlim(low - room, high + room)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), names, fontsize=8)
    finish(
        axis, "gain beside the model as it is, intervals of all settings together", f"change of the score of {metric}"
    )
    return figure


def parts_figure(rows: Rows, parts: Sequence[str], *, measure: str, title: str | None = None) -> Figure:
    """Draw how each part of each block changes a measure of similarity, as bars that add up to the change.

    Each row has ``index``, ``change``, the parts by their names, and ``change_se`` if it is known.
    """
    check_groups("rows", {"rows": rows}, "block")
    figure = new_figure(9.0, 4.2, 130, title)
    axis = figure.subplots()
    place = np.arange(len(rows))
    above, below = np.zeros(len(rows)), np.zeros(len(rows))
    for number, part in enumerate(parts):
        values = np.array([float(row.get(part, math.nan)) for row in rows])
        values = np.nan_to_num(values)
        if not values.any():
            continue
        bottom = np.where(values >= 0, above, below)
        axis.bar(place, values, 0.72, bottom=bottom, color=PALETTE[number % len(PALETTE)], label=part)
        above, below = above + np.maximum(values, 0), below + np.minimum(values, 0)
    change = np.array([row["change"] for row in rows], dtype=float)
    error = np.nan_to_num(np.array([row.get("change_se", math.nan) for row in rows], dtype=float))
    axis.errorbar(place, change, _NORMAL * error, fmt="D", color="black", markersize=4, capsize=2, linewidth=1,
                  label="change of the block")  # fmt: skip
    axis.axhline(0, color="0.4", linewidth=1)
    axis.set_xticks(place, [str(row["index"]) for row in rows])
    finish(axis, f"what each part changes in {measure}; the bars of a block add up to its change", "block", "change")
    legend_below(axis, ncols=4, down=0.14)
    return figure
