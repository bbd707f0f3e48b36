"""What a campaign tells: a row for each fault, of how often it was tried and what came of it, and the table of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nlflow.studies.cases import Case, run_cases
from validation.tables import Entry, Table, markdown

__all__ = ["Row", "campaign_table", "run_trials"]


@dataclass(frozen=True)
class Row:
    """One fault, tried many times.

    Attributes
    ----------
    fault : str
        What was done, e.g. ``SIGKILL at a random time, flow``.
    tried : int
        How many times.
    outcomes : mapping of str to int
        How often it ended how, in words, e.g. ``{'resumed to the same bits': 100}``; they sum to `tried`.
    lost : int
        Times at which results of before were gone or could not be read.
    wrong : int
        Times at which a result was not the right one, or the program ended otherwise than by a result or a named error.
    seconds : float
    details : dict
        Numbers and texts for the JSON; what went wrong, to be run again.
    """

    fault: str
    tried: int
    outcomes: Mapping[str, int]
    lost: int
    wrong: int
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Whether nothing was lost and nothing wrong, and it was tried at all."""
        return self.tried > 0 and self.lost == 0 and self.wrong == 0

    @property
    def line(self) -> str:
        """The row as text, with what failed below it."""
        verdict = "good" if self.good else "BAD"
        came = f"{self.counted(', ')}; lost {self.lost}, wrong {self.wrong}"
        text = f"{verdict:<5}{self.fault}: {self.tried} times: {came}"
        return "\n".join([text, *(f"     {failure}" for failure in self.details.get("failed", []))])

    def counted(self, between: str) -> str:
        """Return how often it ended how."""
        return between.join(f"{count} {what}" for what, count in self.outcomes.items() if count)


def run_trials(trials: Sequence[Case], table: Table[Row], *, jobs: int = 1, threads: bool = False) -> None:
    """Run the trials that the table does not have, and print each row as soon as it is known and written."""
    with closing(run_cases(trials, table, jobs=jobs, threads=threads)) as results:
        for done in results:
            if not done.read:
                tqdm.write(done.finding.line)


def campaign_table(
    folder: Path,
    name: str = "robustness",
    title: str = "Faults and hostile files",
    command: str = "make robustness",
    order: Callable[[Entry[Row]], Any] | None = None,
) -> Table[Row]:
    """Return the table ``<name>.json`` and ``<name>.md`` of a folder, with a title and the command that writes it."""
    return Table(folder, name, "table of faults", Row, lambda entries: _page(entries, title, command), order)


def _page(entries: Sequence[Entry[Row]], title: str, command: str) -> str:
    heads = ("fault", "tried", "outcome", "lost", "wrong", "seconds", "processor seconds", "source")
    lines = []
    for entry in entries:
        row = entry.row
        spent = f"{row.seconds:.0f}", row.details.get("processor seconds", "")
        lines.append((row.fault, row.tried, row.counted("; "), row.lost, row.wrong, *spent, entry.source))
    table = markdown(heads, lines, numbers=("tried", "lost", "wrong", "seconds", "processor seconds"))
    good = sum(entry.row.good for entry in entries)
    verdict = f"{good} of {len(entries)} rows without loss or wrong result."
    return "\n\n".join([f"# {title}", f"Written by `{command}`. {when_and_where(entries)}.", table, verdict]) + "\n"


def when_and_where(entries: Sequence[Entry[Any]]) -> str:
    """Return the dates and the machines of a table."""
    dates = sorted({entry.date for entry in entries})
    machines = "; ".join(sorted({entry.machine for entry in entries}))
    return f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}; {machines}"
