"""What came of mutants: a table for people, and JSON."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nlflow.backends.machine import environment
from nlflow.io.atomic import make_folder, write_atomic
from nlflow.io.storage import load_record, save_record
from validation.robustness.mutants.operators import SCOPE, part_of

__all__ = ["EQUIVALENT", "Result", "judged", "read", "table", "write"]

EQUIVALENT = Path(__file__).resolve().parents[1] / "results" / "equivalent.toml"
_KIND = "table of mutants"


@dataclass(frozen=True)
class Result:
    """A mutant and what came of it.

    Attributes
    ----------
    name, file, function, change : str
        Of the mutant.
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
    date, source, machine : str
    """

    name: str
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
    date: str
    source: str
    machine: str


def judged(path: Path = EQUIVALENT) -> dict[tuple[str, str], str]:
    """Return the reasons why mutants are equivalent, by name and change: a name may come to mean another change."""
    entries = tomllib.loads(path.read_text()).get("mutant", []) if path.exists() else []
    return {(entry["name"], entry["change"]): entry["reason"] for entry in entries}


def read(folder: Path) -> list[Result]:
    """Return the results that were written before; none if there are none."""
    path = folder / "mutants.json"
    return [Result(**entry) for entry in load_record(path, _KIND)["results"]] if path.exists() else []


def write(folder: Path, results: Sequence[Result], title: str, unsound: Sequence[str] = ()) -> None:
    """Write ``mutants.json`` and ``mutants.md``."""
    make_folder(folder)
    results = sorted(results, key=lambda result: (SCOPE.index(part_of(result.file)), result.file, result.line))
    save_record(folder / "mutants.json", _KIND,
                {"environment": environment(), "results": [asdict(result) for result in results]})  # fmt: skip
    page = table(results, title, judged(), unsound)
    write_atomic(folder / "mutants.md", lambda file: file.write(page.encode()))


def table(
    results: Sequence[Result], title: str, reasons: dict[tuple[str, str], str], unsound: Sequence[str] = ()
) -> str:
    """Return the counts and the survivors in Markdown."""
    counts: Counter[tuple[str, str]] = Counter()
    for result in results:
        verdict = "equivalent" if _open(result) and (result.name, result.change) in reasons else result.outcome
        for part in (part_of(result.file), "all"):
            counts[part, "drawn"] += 1
            counts[part, verdict] += 1
    heads = ("drawn", "killed", "timeout", "equivalent", "survived")
    dates = sorted({result.date for result in results})
    lines = ["# Mutants", "", f"{title} {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; "
             f"{'; '.join(sorted({result.machine for result in results}))}; "
             f"source {', '.join(sorted({result.source for result in results}))}.", "",
             f"| part | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]  # fmt: skip
    for part in (*SCOPE, "all"):
        if counts[part, "drawn"]:
            lines.append(f"| {part} | {' | '.join(str(counts[part, head]) for head in heads)} |")
    killed = Counter(result.how for result in results if result.outcome == "killed")
    hours = sum(result.seconds for result in results) / 3600
    lines += ["", f"Of those killed {killed['import']} could not be imported and {killed['process']} ended it. "
              f"All took {hours:.1f} hours of one process."]  # fmt: skip
    if unsound:
        lines += ["", f"Left out, since they fail without a change: {', '.join(unsound)}."]
    survivors = [result for result in results if _open(result)]
    for heading, wanted in (("Survivors", False), ("Equivalent", True)):
        chosen = [result for result in survivors if ((result.name, result.change) in reasons) is wanted]
        if chosen:
            lines += ["", f"## {heading}", "", "| where | what was changed | tests | seconds |", "|---|---|---:|---:|"]
        for result in chosen:
            change = _code(result.change) + (f": {reasons[result.name, result.change]}" if wanted else "")
            lines.append(f"| {result.file}:{result.line} {result.function} | {change} | "
                         f"{result.tried} of {result.selected} | {result.seconds:.0f} |")  # fmt: skip
    return "\n".join([*lines, ""])


def _open(result: Result) -> bool:
    return result.outcome == "survived"


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"
