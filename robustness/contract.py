"""What a campaign tells: one row for each fault, how often it was tried and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
