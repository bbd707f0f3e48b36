"""Figures of measurements and fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nlflow.plotting import Series, new_figure, rate_figure
from nlflow.studies.contract import Row, grouped, in_words
from nlflow.studies.fits import Fit
from nlflow.studies.quantities import setting_in_math

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats: TypeAlias = NDArray[np.float64]

MOST_PANELS = 12
"""Panels of one figure; what is beyond is in the table."""


def told(setting: Row, rows: Sequence[Row]) -> str:
    own = {name: value for name, value in setting.items() if len({row.get(name) for row in rows}) > 1}
    return setting_in_math(own or setting)


def rate_panel(
    rows: list[Row],
    fits: list[Fit],
    columns: Sequence[str],
    *,
    x: str,
    y: str,
    split: str,
    xlabel: str,
    ylabel: str = "error",
    scale: str = "loglog",
    band: tuple[str, str] | None = None,
) -> Figure:
    by_name = {fit.name: fit for fit in fits if math.isfinite(fit.slope)}
    panels: dict[str, list[Series]] = {}
    rest = [name for name in columns if name != split]
    for setting, members in grouped(rows, rest):
        entries = []
        for own, lines in grouped(members, columns):
            drawn = [row for row in lines if np.isfinite(row[y]) and row[y] > 0 and np.isfinite(row[x])]
            if drawn:
                across, *up = (
                    np.array([row[column] for row in drawn], dtype=float) for column in (x, y, *(band or ()))
                )
                fit = by_name.get(in_words(own))
                used = np.array([row.get("used", True) for row in drawn])
                entries.append(
                    _series(setting_in_math({split: own[split]}) if split in own else "", across, up, used, fit)
                )
        if entries:
            panels[told(setting, rows)] = entries
    if not panels:
        figure = new_figure(6, 2)
        figure.text(0.5, 0.5, "nothing to draw: every error is 0 or not finite", ha="center")
        return figure
    shown = dict(list(panels.items())[:MOST_PANELS])
    left = len(panels) - len(shown)
    heading = f"{left} more settings are in the table" if left else None
    return rate_figure(shown, xlabel=xlabel, ylabel=ylabel, title=heading, scale=scale)


def _series(name: str, x: Floats, up: list[Floats], used: NDArray[np.bool_], fit: Fit | None) -> Series:
    y, low, high = up if len(up) == 3 else (up[0], None, None)
    if fit is None or not used.any():
        return Series(name, x, y, low, high, used=used if used.any() else None)
    # The farther end of the interval, which need not be even; one of no width would only lengthen the legend.
    half = max(fit.high - fit.slope, fit.slope - fit.low)
    return Series(
        name, x, y, low, high, slope=fit.slope, intercept=fit.intercept,
        half_width=half if half > 1e-3 * abs(fit.slope) else None,
        expected=fit.expected if fit.relation == "=" else None, used=used,
    )  # fmt: skip
