"""What all figures share: matplotlib's object interface, without pyplot, a window or global state."""

from __future__ import annotations

import io
import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLUMNS",
    "MARKERS",
    "PALETTE",
    "REACH",
    "ROUNDING",
    "finish",
    "heading",
    "middle_of",
    "new_figure",
    "panel_grid",
    "render",
    "show_decades",
]

# Told apart by colour-blind eyes; a series has its colour and its marker by its number.
PALETTE = ("#0b5394", "#d1711c", "#009e73", "#cc79a7", "#56b4e9", "#4d4d4d")
MARKERS = "osD^vP"
COLUMNS = 3  # panels beside each other
ROUNDING = 1e-15  # of the largest value: what is below is noise of the arithmetic
REACH = 100.0  # exponent at which a predicted exponential ends: further than any course runs, and no overflow


def new_figure(width: float = 10.0, height: float = 4.0, dpi: float = 150.0) -> Figure:
    """Return an empty figure of this size in inches, with a layout that keeps labels apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=dpi)
    FigureCanvasAgg(figure)
    return figure


def panel_grid(count: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels of this size in inches, at most three beside each other.

    Further words go to ``Figure.subplots``.
    """
    columns = min(count, COLUMNS)
    rows = -(-count // columns)
    figure = new_figure(max(width * columns, 6.4) + 0.4, height * rows + 0.2, dpi=130)
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).ravel())
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def heading(figure: Figure, title: str | None) -> None:
    """Put a heading over a figure, if there is one."""
    if title:
        figure.suptitle(title, fontsize=13, parse_math=False)  # a file name may hold dollar signs


def finish(axis: Axes, title: str, xlabel: str, ylabel: str = "") -> None:
    """Give a panel its title and labels, a faint grid and no box."""
    axis.set_title(title, fontsize=11)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def middle_of(values: NDArray[np.float64]) -> int:
    """Return where a decay is in the middle of the decades that it passes: there a predicted slope is drawn through."""
    levels = np.log(values)
    return int(np.argmin(np.abs(levels - (levels.min() + levels.max()) / 2)))


def show_decades(axis: Axes, low: float, high: float, room: float) -> None:
    """Let a logarithmic axis reach from `low` to `high` with a factor of `room` beyond, two decades at least."""
    centre, half = math.sqrt(low * high), max(math.sqrt(high / low) * room, 10.0)
    axis.set_ylim(centre / half, centre * half)


def render(figure: Figure, form: str) -> bytes:
    """Return a figure as the content of a file.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        What to draw.
    form : {"png", "pdf", "svg"}
        The file format.

    Returns
    -------
    bytes
        Ready to be written; nothing is on the disk yet, so a failure leaves nothing behind.
    """
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a title in a script that the font lacks
        figure.savefig(stream, format=form)
    return stream.getvalue()
