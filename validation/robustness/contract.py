"""What a campaign does and tells: trials, each with one row of how often a fault was tried and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Row", "Trial", "rows_of"]


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


@dataclass(frozen=True)
class Trial:
    """One row that is still to be found.

    Attributes
    ----------
    key : str
        Tells it apart from all others, with how often and with which seed it is tried.
    run : callable
        Returns the row.
    """

    key: str
    run: Callable[[], Row]


def rows_of(trials: Iterable[Trial], jobs: int = 1) -> Iterator[tuple[Trial, Row]]:
    """Run trials, so many at a time, and yield each with its row as soon as it is known."""
    with ThreadPoolExecutor(jobs) as pool:
        calls = {pool.submit(trial.run): trial for trial in trials}
        try:
            for call in as_completed(calls):
                yield calls[call], call.result()
        finally:
            for call in calls:
                call.cancel()
