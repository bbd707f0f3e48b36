"""What came of mutants: a table for people, and JSON."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from validation.robustness import ROOT
from validation.robustness.contract import when_and_where
from validation.robustness.mutants.operators import SCOPE, SOURCE, part_of
from validation.tables import Entry, Table, markdown

__all__ = ["EQUIVALENT", "Result", "judged", "mark", "render", "results_table", "survived"]

EQUIVALENT = ROOT / "validation" / "robustness" / "results" / "equivalent.toml"


@dataclass(frozen=True)
class Result:
    """A mutant and what came of it.

    Attributes
    ----------
    file, function, change : str
        Of the mutant; the key of the table's entry is its name.
    line : int
    outcome : str
        ``killed``, ``timeout`` or ``survived``.
    how : str
        What failed: ``test``, ``import``, ``process`` (it died); '' for a survivor.
    test : str
        The test that noticed; it passes without the change.
    tried, selected : int
        Tests that were run, and those that can see the mutant.
    seconds : float
    """

    file: str
    function: str
    line: int
    change: str
    outcome: str
    how: str
    test: str
    tried: int
    selected: int
    seconds: float

    @property
    def told(self) -> str:
        """The result as text."""
        by = f" by {self.how} {self.test}".rstrip() if self.how else f" {self.tried} of {self.selected} tests"
        return f"{self.outcome:<9}{self.seconds:4.0f} s  {self.file}:{self.line}{by}\n    {self.change}"


def judged(path: Path = EQUIVALENT) -> dict[tuple[str, str], str]:
    """Return the reasons why mutants are equivalent, by name and change: a name may come to mean another change."""
    entries = tomllib.loads(path.read_text()).get("mutant", []) if path.exists() else []
    return {(entry["name"], entry["change"]): entry["reason"] for entry in entries}


def mark(entry: Entry[Result]) -> tuple[str, str]:
    """Return what `judged` knows a mutant by."""
    return entry.key, entry.row.change


def survived(entry: Entry[Result]) -> bool:
    """Tell whether no test noticed a mutant."""
    return entry.row.outcome == "survived"


def results_table(
    folder: Path, title: str, unsound: Collection[str] = (), scope: Sequence[str] = SCOPE, name: str = "mutants"
) -> Table[Result]:
    """Return the table ``<name>.json`` and ``<name>.md`` of a folder."""

    def order(entry: Entry[Result]) -> tuple[int, str, int]:
        part = _part(entry.row, scope)
        return scope.index(part) if part in scope else len(scope), entry.row.file, entry.row.line

    def page(entries: Sequence[Entry[Result]]) -> str:
        return render(entries, title, judged(), sorted(unsound), scope)

    return Table(folder, name, "table of mutants", Result, page, order)


def render(
    entries: Sequence[Entry[Result]],
    title: str,
    reasons: dict[tuple[str, str], str],
    unsound: Sequence[str] = (),
    scope: Sequence[str] = SCOPE,
) -> str:
    """Return the counts and the survivors in Markdown."""
    counts: Counter[tuple[str, str]] = Counter()
    for entry in entries:
        verdict = "equivalent" if survived(entry) and mark(entry) in reasons else entry.row.outcome
        for part in (_part(entry.row, scope), "all"):
            counts[part, "drawn"] += 1
            counts[part, verdict] += 1
    heads = ("drawn", "killed", "timeout", "equivalent", "survived")
    former = sorted({_part(entry.row, scope) for entry in entries} - set(scope))
    parts_in_order = [part for part in (*scope, *former, "all") if counts[part, "drawn"]]
    lines = [(part, *(counts[part, head] for head in heads)) for part in parts_in_order]
    sources = ", ".join(sorted({entry.source for entry in entries}))
    killed = Counter(entry.row.how for entry in entries if entry.row.outcome == "killed")
    hours = sum(entry.row.seconds for entry in entries) / 3600
    parts = [
        "# Mutants",
        f"{title} {when_and_where(entries)}; source {sources}.",
        markdown(("part", *heads), lines, numbers=heads),
        f"Of those killed {killed['import']} could not be imported and {killed['process']} ended it. "
        f"All took {hours:.1f} hours of one process.",
    ]
    if unsound:
        parts.append(f"Left out, since they fail without a change: {', '.join(unsound)}.")
    for heading, wanted in (("Survivors", False), ("Equivalent", True)):
        if chosen := [entry for entry in entries if survived(entry) and (mark(entry) in reasons) is wanted]:
            heads = ("where", "what was changed", "tests", "seconds")
            lines = [_survivor(entry.row, reasons.get(mark(entry), "")) for entry in chosen]
            parts += [f"## {heading}", markdown(heads, lines, numbers=heads[2:])]
    return "\n\n".join(parts) + "\n"


def _part(row: Result, scope: Sequence[str]) -> str:
    """Return the entry of a scope that a result belongs to, or the module where that is no longer there."""
    return part_of(row.file, scope) or row.file.removeprefix(f"{SOURCE}/").removesuffix(".py")


def _survivor(row: Result, reason: str) -> tuple[str, ...]:
    change = f"`{row.change}`" + (f": {reason}" if reason else "")
    return f"{row.file}:{row.line} {row.function}", change, f"{row.tried} of {row.selected}", f"{row.seconds:.0f}"
