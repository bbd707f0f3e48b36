"""Lines over time or place, and maps of numbers, drawn in the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import param
from numpy.typing import NDArray

from nlflow.explorer.widgets import Part, script
from nlflow.plotting.base import PALETTE

__all__ = ["Heatmap", "Lines"]

_SHADES = 64


class Lines(Part):
    """A panel of lines.

    Parameters
    ----------
    title, xlabel, ylabel : str
    names : mapping of str to dict
        The lines that there may be, as the legend calls them, each with its style (``color``, ``width``, ``dash``);
        colours go by their order.
    log : {'', 'y', 'xy'}
        The axes that are logarithmic.
    height : int
        Pixels.
    markers : bool
        Mark the points.
    """

    _esm = script("svg", "chart")
    shown = param.Dict(default={})

    def __init__(
        self,
        title: str,
        xlabel: str,
        ylabel: str,
        names: Mapping[str, Mapping[str, Any]],
        *,
        log: str = "",
        height: int = 230,
        markers: bool = False,
    ) -> None:
        self._styles = {
            name: {"color": PALETTE[number % len(PALETTE)], "width": 2, "dash": "none", "markers": markers, **style}
            for number, (name, style) in enumerate(names.items())
        }
        words = {"title": title, "xlabel": xlabel, "ylabel": ylabel, "log": log, "height": height}
        super().__init__(shown={**words, "lines": [], "serial": 0})

    def show(self, lines: Mapping[str, tuple[NDArray[Any], NDArray[Any]]], **words: str) -> None:
        """Show lines by their names.

        Parameters
        ----------
        lines : mapping of str to (array, array)
            Places and values; what is not finite is a gap.
        **words
            Another ``title``, ``xlabel`` or ``ylabel``.
        """
        drawn = [{"name": name, "x": _plain(x), "y": _plain(y), **self._styles[name]} for name, (x, y) in lines.items()]
        self.shown = {**self.shown, **words, "lines": drawn, "serial": self.shown["serial"] + 1}


class Heatmap(Part):
    """Numbers by layer and head, in colours that are even to the eye and the same for colour-blind eyes.

    Parameters
    ----------
    xlabel, ylabel : str
    height : int
        Pixels.
    """

    _esm = script("svg", "heatmap")
    shown = param.Dict(default={})

    def __init__(self, xlabel: str, ylabel: str, height: int = 300) -> None:
        words = {"title": "", "xlabel": xlabel, "ylabel": ylabel, "height": height, "palette": list(_cividis())}
        super().__init__(shown={**words, "values": [], "names": [], "low": 0.0, "high": 1.0, "serial": 0})

    def show(self, values: NDArray[np.float64], names: Sequence[str], title: str) -> None:
        """Show values of shape (layers, heads); what is not finite is left out."""
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        told = {"title": title, "values": [_plain(row) for row in values], "names": list(names)}
        scale = {"low": low, "high": high if high > low else low + 1.0}
        self.shown = {**self.shown, **told, **scale, "serial": self.shown["serial"] + 1}


def _plain(values: NDArray[Any]) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in np.asarray(values, dtype=np.float64).tolist()]


@cache
def _cividis() -> tuple[str, ...]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return tuple(to_hex(colormaps["cividis"](k / (_SHADES - 1))) for k in range(_SHADES))
