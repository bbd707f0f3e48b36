"""What a study returns: measurements, fits, a table, a figure and files of them."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nlflow.errors import FileFormatError
from nlflow.store.atomic import make_folder, write_content
from nlflow.store.encoding import plain
from nlflow.studies.contract import Kind, Row
from nlflow.studies.fits import Fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class StudyResult:
    """The outcome of `run_study`.

    Attributes
    ----------
    kind : str
    rows : list of dict
        The measurements, one dict of plain values for each, in the order of the cases.
    fits : list of Fit
        What they say, beside what the theory expects.
    options : dict
        The options in plain data, arrays and objects by type and SHA-256.
    provenance : dict
        Versions, platform, and how many cases were computed now or read from the folder.
    """

    kind: str
    rows: list[Row]
    fits: list[Fit]
    options: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)
    _kind: Kind | None = field(default=None, repr=False, compare=False)

    def table(self) -> str:
        """Return the measurements as text; a kind with thousands of them shows their summary."""
        return render_rows(self.rows if self._kind is None else self._kind.condensed(self.rows))

    def report(self) -> str:
        """Return the table and, below it, the fits beside what is expected, as text."""
        return f"{self.table()}\n\n{render_fits(self.fits)}".rstrip()

    def figure(self) -> Figure:
        """Draw the measurements and return the matplotlib figure."""
        if self._kind is None:
            raise FileFormatError("figure: got a result that no study made, expected one from run_study()")
        return self._kind.figure(self.rows, self.fits)

    def as_dict(self) -> dict[str, Any]:
        """Return everything in JSON's types; NaN and infinities, which JSON lacks, become None."""
        content = {
            "kind": self.kind,
            "options": self.options,
            "rows": self.rows,
            "fits": [asdict(fit) for fit in self.fits],
            "provenance": self.provenance,
        }
        return dict(plain(content))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write ``table.csv``, ``result.json`` and ``figure.png`` to a folder, each complete or not at all.

        Parameters
        ----------
        folder : path
            Made if it is missing. The table has one line for each measurement, floats with all digits.

        Raises
        ------
        FileFormatError
            When the folder cannot be made or written to.
        """
        save_results(folder, self.rows, self.as_dict(), self.figure())


def save_results(folder: str | os.PathLike[str], rows: list[Row], report: dict[str, Any], figure: Any) -> None:
    """Write ``table.csv``, ``result.json`` and ``figure.png`` to a folder, which is made if it is missing."""
    from nlflow.plotting import render

    files = {
        "table.csv": render_csv(rows).encode(),
        "result.json": (json.dumps(plain(report), indent=1, allow_nan=False) + "\n").encode(),
        "figure.png": render(figure, "png"),
    }
    place = make_folder(folder)
    for name, content in files.items():
        write_content(place / name, content)


def _columns(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def render_csv(rows: list[Row]) -> str:
    """Return the rows as CSV text; what a row lacks is left empty."""
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, _columns(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def render_rows(rows: list[Row], *, factored: bool = True) -> str:
    """Return the rows as aligned text; with `factored` what all rows share stands above them."""
    names = [name for name in _columns(rows) if any(row.get(name) not in (None, "") for row in rows)]
    shared = {
        n: rows[0].get(n)
        for n in names
        if factored and len(rows) > 1 and len({_shown(row.get(n)) for row in rows}) == 1
    }
    names = [name for name in names if name not in shared] or names
    lines = [names, *([_shown(row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numeric = [all(not isinstance(row.get(name), str) for row in rows) for name in names]
    text = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    ]
    head = ", ".join(f"{name} {_shown(value)}" for name, value in shared.items())
    return "\n".join([head, *text] if head else text)


def render_fits(fits: list[Fit]) -> str:
    """Return the fits as aligned text; words that all names share are left out."""
    words = [fit.name.split() for fit in fits]
    shared = set.intersection(*map(set, words)) if len(words) > 1 else set()
    lines: list[Row] = []
    for fit, name in zip(fits, words, strict=True):
        expected = "" if fit.expected is None else f"{'>= ' if fit.relation == '>=' else ''}{fit.expected:.4g}"
        if fit.expected is not None and fit.relation == "=" and fit.tolerance:
            expected += f" ± {fit.tolerance:.2g}"
        verdict = "" if fit.passed is None else "as expected" if fit.passed else "DIFFERS"
        lines.append(
            {
                "setting": " ".join(word for word in name if word not in shared),
                "measured": fit.what,
                "value": f"{fit.slope:.4g}" if math.isfinite(fit.slope) else "not fitted",
                "interval": _interval(fit),
                "expected": expected,
                "result": verdict,
                "note": fit.reason,
            }
        )
    return render_rows(lines, factored=False)


def _interval(fit: Fit) -> str:
    if math.isnan(fit.high):
        return ""
    return f"up to {fit.high:.4g}" if math.isnan(fit.low) else f"[{fit.low:.4g}, {fit.high:.4g}]"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
