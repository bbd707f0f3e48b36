"""The result of a study."""

from __future__ import annotations

import json
import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nlflow.errors import FileFormatError, check_choice
from nlflow.store.atomic import make_folder, write_content
from nlflow.store.encoding import plain
from nlflow.studies.contract import Kind, Row
from nlflow.studies.fits import VERDICTS, Fit
from nlflow.studies.tables import Formula, number_in_math, render_csv, render_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 7.0
"""Inches: both columns of a journal. One column has 3.3."""
TABLES = {"csv": "csv", "markdown": "md", "latex": "tex"}
"""The forms of a table that are files, and the endings of their names."""


@dataclass(frozen=True)
class StudyResult:
    """Result of `run_study`.

    Attributes
    ----------
    kind : str
    rows : list of dict
        The measurements in the order of the cases, a dict of plain values for each.
    fits : list of Fit
        Numbers that were fitted to them, beside what the theory expects.
    options : dict
        The options as plain data; of arrays and objects the type and a SHA-256.
    provenance : dict
        Versions, platform, and how many cases were computed and how many were read from `out`.
    """

    kind: str
    rows: list[Row]
    fits: list[Fit]
    options: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)
    _kind: Kind | None = field(default=None, repr=False, compare=False)
    _given: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def table(self, form: str = "text", *, what: str = "rows") -> str:
        """Return the measurements, or the fits, as a table.

        Parameters
        ----------
        form : {'text', 'csv', 'markdown', 'latex'}
            ``csv`` has every measurement with all digits; the others are rounded, and for some kinds a summary.
        what : {'rows', 'fits'}

        Raises
        ------
        InputError
            For an unknown `form` or `what`.
        """
        check_choice("what", what, ("rows", "fits"))
        if what == "fits":
            return render_table(fit_rows(self.fits, form), form, factored=False)
        return render_table(self.rows if form == "csv" or self._kind is None else self._kind.condensed(self.rows), form)

    def report(self) -> str:
        """Return measurements, fits and what the verdicts mean, as text."""
        meaning = textwrap.fill(" ".join(VERDICTS.split()), 118) if any(fit.verdict for fit in self.fits) else ""
        return "\n\n".join(filter(None, (self.table(), self.table(what="fits"), meaning)))

    def figure(self, *, width: float = WIDTH, style: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the measurements and return the matplotlib figure.

        Parameters
        ----------
        width : float
            Inches, 2.5 to 40.
        style : str or path, optional
            A style sheet of matplotlib: one of ``matplotlib.style.available``, or a file ``NAME.mplstyle``.

        Raises
        ------
        InputError
            For a width out of range or an unknown style.
        """
        from nlflow.plotting.paper import drawn

        if self._kind is None:
            raise FileFormatError("figure: got a result that no study made, expected one from run_study()")
        kind = self._kind
        return drawn(lambda: kind.figure(self.rows, self.fits), width=width, style=style)

    def cite(self) -> str:
        """Return BibTeX of the package and of the theory behind this kind of study."""
        from nlflow.studies.citing import bibtex

        return bibtex(self.kind)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it in the types of JSON; NaN and infinities become None."""
        content = {
            "kind": self.kind,
            "options": self.options,
            "rows": self.rows,
            "fits": [
                {**asdict(fit), "verdict": fit.verdict, "expectation": fit.expectation, "note": fit.note}
                for fit in self.fits
            ],
            "provenance": self.provenance,
        }
        return dict(plain(content))

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        formats: str | Sequence[str] = ("pdf", "png"),
        width: float = WIDTH,
        style: str | os.PathLike[str] | None = None,
    ) -> list[str]:
        """Write tables, figure and the study itself to a folder.

        The files are ``table`` and ``fits`` as ``.csv``, ``.md`` and ``.tex``, ``result.json``, ``figure`` in each
        format, and ``study.toml`` with the arrays that were given, from which `run_study` repeats the study.

        Parameters
        ----------
        folder : path
            Made if it is missing; files of these names are replaced.
        formats : sequence of {'pdf', 'svg', 'png'}
            Of the figure.
        width, style
            As for `figure`.

        Returns
        -------
        list of str
            The names of the files.

        Raises
        ------
        InputError
            For an unknown format or style, or a width out of range; nothing is written then.
        FileFormatError
            If the folder cannot be made or written to.
        """
        from nlflow.plotting.paper import rendered
        from nlflow.studies.replay import study_files

        figures = rendered(lambda: self.figure(width=width, style=style), formats, style=style)
        tables = {
            f"{name}.{ending}": self.table(form, what=what).encode()
            for name, what in (("table", "rows"), ("fits", "fits"))
            for form, ending in TABLES.items()
        }
        kept = study_files(self.kind, self._given, int(self.options["rng"]), self.rows)
        files = {**tables, "result.json": _json(self.as_dict()), **figures, **kept}
        write_files(folder, files)
        return list(files)


def _json(report: Any) -> bytes:
    return (json.dumps(plain(report), indent=1, allow_nan=False) + "\n").encode()


def write_files(folder: str | os.PathLike[str], files: Mapping[str, bytes]) -> None:
    place = make_folder(folder)
    for name, content in files.items():
        write_content(place / name, content)


def save_results(folder: str | os.PathLike[str], rows: list[Row], report: dict[str, Any], figure: Any) -> None:
    from nlflow.plotting import render

    files = {"table.csv": render_csv(rows).encode(), "result.json": _json(report), "figure.png": render(figure, "png")}
    write_files(folder, files)


def fit_rows(fits: Sequence[Fit], form: str = "text") -> list[Row]:
    """Return the fits as rows, without words that all names share except in CSV."""
    words = [fit.name.split() for fit in fits]
    shared = set.intersection(*map(set, words)) if len(words) > 1 and form != "csv" else set()
    lines: list[Row] = []
    for fit, name in zip(fits, words, strict=True):
        line: Row = {"setting": " ".join(word for word in name if word not in shared), "measured": fit.what}
        if form == "csv":
            line |= {"value": fit.slope, "low": fit.low, "high": fit.high, "expected": fit.expected}
            line |= {"relation": fit.relation, "tolerance": fit.tolerance, "points": fit.points}
        else:
            number = _plain_number if form == "text" else number_in_math
            line["value"] = number(fit.slope, 4) if math.isfinite(fit.slope) else "not fitted"
            line["interval"] = _interval(fit, number)
            if form != "text":
                line |= {name: Formula(line[name]) for name in ("value", "interval") if _is_formula(line[name])}
            line["expected"] = fit.expectation if form == "text" else re.sub(r"-(?=\d)", "−", fit.expectation)
        lines.append({**line, "result": fit.verdict, "note": fit.note})
    return lines


def _is_formula(cell: str) -> bool:
    return bool(cell) and cell != "not fitted"


def _plain_number(value: float, digits: int) -> str:
    return f"{value:.{digits}g}"


def _interval(fit: Fit, number: Any) -> str:
    if math.isnan(fit.high):
        return ""
    low = "" if math.isnan(fit.low) else number(fit.low, 4)
    if not low:
        return f"up to {number(fit.high, 4)}" if number is _plain_number else rf"\leq {number(fit.high, 4)}"
    return f"[{low}, {number(fit.high, 4)}]"
