"""A signal as lines: noisy and denoised, what was removed, and the window of samples that is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from nlflow.desk.explorer.drawings import Drawn
from nlflow.desk.explorer.layout import button, column, columns, row
from nlflow.desk.explorer.widgets import Knob, Lines

ORIGINAL = {"color": "#aab3bc", "width": 1}
RESULT = {"color": "#0b5394", "width": 1.5}
_NAMES: dict[str, dict[str, Any]] = {"noisy": ORIGINAL, "result": RESULT, "clean": {"color": "#009e73"}}
_MOVES = {"Zoom in": 0.5, "Zoom out": 2.0, "All": math.inf}
_LEAST = 20  # samples


class SignalView:
    """Lines of a signal, and buttons and a slider for the window that is drawn.

    Parameters
    ----------
    moved : callable
        Called without arguments when the user has chosen another window.

    Attributes
    ----------
    panel : column
    rest : Lines
        What was removed; not part of the panel.
    window : tuple of int, or None
        The first sample that is drawn, and how many; None until the user has chosen.
    """

    def __init__(self, moved: Callable[[], Any]) -> None:
        self._moved = moved
        self._drawn, self._part = (0, 1), (0, 1)
        self.window: tuple[int, int] | None = None
        self.lines = Lines("", "sample", "", _NAMES, height=340, heard=self.move)
        self.rest = Lines(
            "removed: input minus result", "sample", "", {"removed": ORIGINAL}, height=200, heard=self.move
        )
        zooms = (button(name, partial(self.move, {"factor": factor})) for name, factor in _MOVES.items())
        self.first = Knob("first", "shown from", 0, 1, 1, 0, optional=False, whole=True, moved=self._slide)
        self.panel = column(columns(row(*zooms), self.first, least=240), self.lines)

    def draw(self, shown: Drawn, unit: str) -> None:
        """Draw a result."""
        self._drawn, self._part = shown.window, shown.part
        self.lines.draw(shown.lines, xlabel=shown.axis, ylabel=unit)
        self.rest.draw(shown.rest, xlabel=shown.axis, ylabel=unit)
        (low, high), (first, count) = self._part, self._drawn
        self.first.visible = count < high - low
        unit = f"samples on, {count} of {high - low}"
        self.first.show(low=low, high=max(high - count, low + 1), value=first, unit=unit)

    def move(self, data: Any) -> None:
        """Show more or fewer samples, by a ``factor``, or others, by a ``shift`` in shares of what is seen."""
        first, count = self._drawn
        wide = count * min(float(data.get("factor", 1.0)), float(self._part[1]))
        self._set(first + (count - wide) / 2 - count * float(data.get("shift", 0.0)), wide)

    def _slide(self) -> None:
        self._set(self.first.value or 0.0, self._drawn[1])

    def _set(self, first: float, count: float) -> None:
        low, high = self._part
        samples = round(min(max(count, _LEAST), high - low))
        self.window = round(min(max(first, low), high - samples)), samples
        self._moved()
