"""What all figures share: matplotlib's object interface, without pyplot, a window or global state."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLUMNS", "MARKERS", "PALETTE", "finish", "heading", "new_figure", "panel_grid", "render"]

# Told apart by colour-blind eyes; a series has its colour and its marker by its number.
PALETTE = ("#0b5394", "#d1711c", "#009e73", "#cc79a7", "#56b4e9", "#4d4d4d")
MARKERS = "osD^vP"
COLUMNS = 3  # panels beside each other


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
