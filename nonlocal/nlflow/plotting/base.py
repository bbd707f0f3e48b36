"""What all figures share: matplotlib's object interface, without pyplot, a window or global state."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["new_figure", "render"]


def new_figure(width: float = 10.0, height: float = 4.0, dpi: float = 150.0) -> Figure:
    """Return an empty figure of this size in inches, with a layout that keeps labels apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=dpi)
    FigureCanvasAgg(figure)
    return figure


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
