"""Curves over the layers of a model, which most claims about transformers draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nlflow.plotting.base import MARKERS, PALETTE, finish, panel_grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Curves = Mapping[str, Sequence[float]]


def depth_figure(panels: Mapping[str, Curves], label: str, *, first: int = 1, width: float = 3.7,
                 together: bool = False) -> Figure:  # fmt: skip
    """Draw one panel for each title, with curves by name; the value at index i belongs to layer `first` + i.

    With `together` all panels have the same scale, which includes 0.

    Curves of the same name have one look in all panels; the legend stands below.
    """
    figure, axes = panel_grid(len(panels), width, 3.4, sharey=together)
    looks: dict[str, int] = {}
    lines: dict[str, Line2D] = {}
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for name, values in curves.items():
            number = looks.setdefault(name, len(looks))
            (line,) = axis.plot(
                first + np.arange(len(values)), values, color=PALETTE[number % len(PALETTE)], linewidth=1.6,
                marker=MARKERS[number % len(MARKERS)], markersize=4.5, label=name,
            )  # fmt: skip
            lines.setdefault(name, line)
        finish(axis, title, "layer", label)
        axis.locator_params(axis="x", integer=True)
    if together:
        low, high = axes[0].get_ylim()
        axes[0].set_ylim(min(low, 0), high)
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", ncols=min(4, len(panels) + 1),
                  fontsize=9, frameon=False)  # fmt: skip
    return figure
