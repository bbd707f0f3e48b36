"""Layers of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nlflow.plotting.base import check_groups, finish, in_grid, legend_below, look, panel_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

# Column, title, label of the axis, and the columns with the ends of the range of the heads.
_PANELS = (
    ("cosine", "mean cosine of tokens", "cos", ()),
    ("J", "energy J of the values, per token and head", "J", ()),
    ("gap", "spectral gap, mean and range of heads", "1 − |μ₂|", ("gap_least", "gap_most")),
    ("stable", "stable fidelity, median head (dotted: least)", "λ̃", ("stable_least", "stable_least")),
)
# The same of a survey, whose ranges are made from standard errors.
_SURVEYED = tuple(
    (column, name, label, (f"{column}_low", f"{column}_high"))
    for column, name, label in (
        ("cosine", "mean cosine of the tokens of an input", "cos"),
        ("isotropy", "mean cosine of two inputs, pooled", "cos"),
        ("J", "energy J of the values, per token and head", "J"),
        ("gradient", "cosine with the gradient of J", "cos"),
    )
)
_NORMAL = 1.96  # standard errors on each side of a mean: 95 % of a normal law


def layers_figure(runs: Mapping[str, Rows], *, fidelity: float | None = None, title: str | None = None) -> Figure:
    """Draw mean cosine, J, spectral gap and stable fidelity of a model's layers over depth.

    Parameters
    ----------
    runs : mapping of str to sequence of mappings
        Name of a run and its rows, as ``LayerTrace.rows`` returns them.
    fidelity : float, optional
        A line in the last panel.
    title : str, optional
    """
    check_groups("runs", runs, "run with rows")
    return _figure(runs, _PANELS, fidelity, title)


def survey_figure(runs: Mapping[str, Rows], *, title: str | None = None) -> Figure:
    """Draw the measures of a model's layers for many inputs, as means with bands of 95 %, over depth.

    Parameters
    ----------
    runs : mapping of str to sequence of mappings
        Name of a run and its rows, as ``Survey.rows`` returns them.
    title : str, optional
    """
    check_groups("runs", runs, "run with rows")
    return _figure({run: [_with_bands(row) for row in rows] for run, rows in runs.items()}, _SURVEYED, None, title)


def _with_bands(row: Mapping[str, Any]) -> dict[str, Any]:
    ends = dict(row)
    for column, *_ in _SURVEYED:
        mean, error = (float(row.get(name, np.nan)) for name in (column, f"{column}_se"))
        ends[f"{column}_low"], ends[f"{column}_high"] = mean - _NORMAL * error, mean + _NORMAL * error
    return ends


def _figure(runs: Mapping[str, Rows], panels: Any, fidelity: float | None, title: str | None) -> Figure:
    figure, axes = panel_grid(4, 5.0, 3.5, title, most=2, sharex=True)
    for axis, (column, name, label, between) in zip(axes, panels, strict=True):
        drawn = [_draw(axis, rows, column, between, run, *look(i)) for i, (run, rows) in enumerate(runs.items())]
        if column == "stable" and fidelity is not None:
            axis.axhline(fidelity, color="0.35", linewidth=1.2, linestyle="--", label=f"λ̃ = {fidelity:g}")
        if not any(drawn):
            axis.text(0.5, 0.5, "not computed", transform=axis.transAxes, ha="center", va="center", color="0.4")
        elif column in ("J", "gap", "stable"):
            axis.set_ylim(bottom=0)
        finish(axis, name, "layer (0: input)" if in_grid(axis).is_last_row() else "", label)
        axis.locator_params(axis="x", integer=True)
    corner = next(axis for axis in axes if in_grid(axis).is_last_row())
    legend_below(corner, *axes[-1].get_legend_handles_labels())
    return figure


def _draw(axis: Axes, rows: Rows, column: str, between: tuple[str, ...], run: str, shade: str, marker: str) -> bool:
    """Draw one run in one panel, its stacks one after another; return whether there was anything to draw."""
    values = _column(rows, column)
    place = np.arange(len(rows), dtype=np.float64)
    breaks = [i for i, row in enumerate(rows) if i and row.get("index") == 0]
    for start in breaks:
        axis.axvline(start - 0.5, color="0.8", linewidth=1, linestyle=":")
    for number, (low, high) in enumerate(zip([0, *breaks], [*breaks, len(rows)], strict=True)):
        part = slice(low, high)
        axis.plot(place[part], values[part], color=shade, marker=marker, markersize=5, linewidth=1.6,
                  label=run if number == 0 else None)  # fmt: skip
        if between:
            least, most = (_column(rows, name)[part] for name in between)
            if between[0] == between[1]:
                axis.plot(place[part], least, color=shade, linewidth=1.2, linestyle=":")
            else:
                axis.fill_between(place[part], least, most, color=shade, alpha=0.14, linewidth=0)
    return bool(np.isfinite(values).any())


def _column(rows: Rows, name: str) -> NDArray[np.float64]:
    return np.array([row.get(name, np.nan) for row in rows], dtype=np.float64)
