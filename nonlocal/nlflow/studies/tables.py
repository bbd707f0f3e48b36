"""Tables as text, CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from nlflow.errors import check_choice
from nlflow.studies.quantities import QUANTITIES, in_math

Row = dict[str, Any]
FORMS = ("text", "csv", "markdown", "latex")
"""Forms of a table."""

_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "λ": r"$\lambda$", "μ": r"$\mu$",
    "π": r"$\pi$", "±": r"$\pm$", "−": "$-$", "≥": r"$\geq$", "≤": r"$\leq$", ">": "$>$", "<": "$<$", "|": r"$|$",
    "≠": r"$\neq$", "²": "$^2$", "∞": r"$\infty$", **{one: f"\\{one}" for one in "$&%#_{}"},
}  # fmt: skip


def render_table(rows: Sequence[Row], form: str = "text", *, factored: bool = True) -> str:
    """Return rows in one of `FORMS`; with `factored` columns with one value stand above the table, except in CSV."""
    check_choice("form", form, FORMS)
    if form == "text":
        return render_rows(list(rows), factored=factored)
    if form == "csv":
        return render_csv(list(rows))
    names, alike = _varying(rows) if factored else (_named(rows), [])
    return {"markdown": _markdown, "latex": _latex}[form](list(rows), names, alike)


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def render_csv(rows: list[Row]) -> str:
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, _columns(rows), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def render_rows(rows: list[Row], *, factored: bool = True) -> str:
    names, alike = _varying(rows) if factored else (_named(rows), [])
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
    head = ", ".join(f"{name} {_shown(rows[0].get(name))}" for name in alike)
    return "\n".join([head, *text] if head else text)


def _named(rows: Sequence[Row]) -> list[str]:
    """Return the columns in which something is."""
    return [name for name in _columns(rows) if any(row.get(name) not in (None, "") for row in rows)]


def _varying(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Return the columns that tell rows apart, and those in which all rows are alike."""
    names = _named(rows)
    alike = [n for n in names if len(rows) > 1 and len({_shown(row.get(n)) for row in rows}) == 1]
    return [name for name in names if name not in alike] or names, alike if len(alike) < len(names) else []


def _markdown(rows: list[Row], names: list[str], alike: list[str]) -> str:
    lines = [[_heading(name, rows) for name in names], ["---:" if _numeric(rows, name) else "---" for name in names]]
    lines += [[_math(row.get(name), _piped) for name in names] for row in rows]
    shared = ", ".join(f"{_heading(name, rows)} {_math(rows[0].get(name), _piped)}" for name in alike)
    head = f"All rows: {shared}\n\n" if alike else ""
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _latex(rows: list[Row], names: list[str], alike: list[str]) -> str:
    """Return rows as a tabular with the rules of booktabs; what all rows share is for the caption, in a comment."""
    heads = " & ".join(_outside_math(_heading(name, rows), latex_text) for name in names)
    body = [" & ".join(_math(row.get(name), latex_text) for name in names) for row in rows]
    columns = "".join("r" if _numeric(rows, name) else "l" for name in names)
    shared = ", ".join(
        f"{_outside_math(_heading(name, rows), latex_text)} {_math(rows[0].get(name), latex_text)}" for name in alike
    )
    lines = [r"% \usepackage{booktabs}", *([f"% All rows: {shared}"] if alike else [])]
    lines += [f"\\begin{{tabular}}{{{columns}}}", r"\toprule", f"{heads} \\\\", r"\midrule"]
    lines += [f"{line} \\\\" for line in body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def latex_text(words: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in words)


def _outside_math(text: str, shown: Callable[[str], str]) -> str:
    """Return a text of words and mathematics between dollar signs with its words as `shown` gives them."""
    parts = re.split(r"((?<!\\)\$.*?(?<!\\)\$)", text)
    return "".join(part if number % 2 else shown(part.replace(r"\$", "$")) for number, part in enumerate(parts))


class Formula(str):
    """Mathematics in a cell."""

    __slots__ = ()


def _math(value: Any, words: Callable[[str], str]) -> str:
    """Return a cell: numbers as mathematics, words with their mathematics."""
    if value is None or isinstance(value, bool):
        return _shown(value)
    if isinstance(value, Formula):
        return f"${value}$"
    if isinstance(value, int):
        return f"${value}$"
    if isinstance(value, float):
        return f"${number_in_math(value)}$"
    return _outside_math(in_math(str(value)), words)


def _piped(words: str) -> str:
    """Return words without what would end the cell of a table in Markdown."""
    return words.replace("|", "\\|")


def number_in_math(value: float, digits: int = 5) -> str:
    if not math.isfinite(value):
        return r"\mathrm{nan}" if math.isnan(value) else r"\infty" if value > 0 else r"-\infty"
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return rf"{mantissa} \times 10^{{{int(exponent)}}}" if exponent else mantissa


def _heading(name: str, rows: Sequence[Row]) -> str:
    if name == "fidelity" and all(row.get("metric") == "degree" or "growth_predicted" in row for row in rows):
        name = "degree_fidelity"
    return QUANTITIES[name].heading if name in QUANTITIES else name.replace("_", " ")


def _numeric(rows: list[Row], name: str) -> bool:
    return all(not isinstance(row.get(name), str) or isinstance(row.get(name), Formula) for row in rows)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
