"""The figure of a sweep: each end of an interval is in view, or an arrow says on which side it goes on."""

from __future__ import annotations

import numpy as np
import pytest

from nlflow.errors import InputError
from nlflow.plotting import cures_figure

NEAR = [(-0.01 * k, 0.02 * k) for k in range(1, 7)]


@pytest.mark.parametrize(
    ("ends", "arrows", "number"),
    [((-0.02, 0.03), "", False), ((-5.0, -4.0), "<", True), ((-5.0, 5.0), "<>", False), ((4.0, 5.0), ">", True),
     ((0.01, 5.0), ">", True), ((-5.0, 0.11), "<", True)],
)  # fmt: skip
def test_an_interval_that_leaves_the_view_has_an_arrow(ends: tuple[float, float], arrows: str, number: bool) -> None:
    """`number`: the gain lies outside as well, and is written."""
    rows = [
        {"cure": "explicit", "value": 0.1, "layers": "all", "gain": (low + high) / 2, "low": low, "high": high,
         "helps": low > 0, "harms": high < 0} for low, high in [*NEAR, ends]
    ]  # fmt: skip
    axis = cures_figure(rows, metric="accuracy").axes[0]
    low, high = axis.get_xlim()
    marks = {line.get_marker(): line for line in axis.lines if line.get_marker() in ("<", ">")}
    assert "".join(sorted(marks)) == arrows
    assert all(low < float(np.asarray(line.get_xdata())[0]) < high for line in marks.values())
    assert {float(np.asarray(line.get_ydata())[0]) for line in marks.values()} <= {len(NEAR)}
    for place, row in enumerate(rows):
        for end in (row["low"], row["high"]):
            assert low < end < high or (place == len(NEAR) and ("<" if end < low else ">") in arrows)
    assert [text.get_text() for text in axis.texts] == [f"{sum(ends) / 2:.2g}"] * number
    assert all(low < text.xy[0] < high for text in axis.texts)


def test_one_setting_and_none() -> None:
    row = {"cure": "explicit", "value": 0.1, "layers": "all", "gain": 0, "low": 0, "high": 0, "helps": 0, "harms": 0}
    low, high = cures_figure([row], metric="accuracy").axes[0].get_xlim()
    assert low < 0 < high
    with pytest.raises(InputError, match="rows"):
        cures_figure([], metric="accuracy")
