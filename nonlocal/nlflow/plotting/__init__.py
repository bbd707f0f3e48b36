"""Figures, drawn with matplotlib's object interface: no pyplot, no window, no global state."""

from nlflow.plotting.base import new_figure, render
from nlflow.plotting.comparison import comparison_figure, psnr

__all__ = ["comparison_figure", "new_figure", "psnr", "render"]
