"""Claims: a statement, its source, and an experiment that returns measured figures with their tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nlflow import MarkovChain
from nlflow.affinities import Affinity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = "arXiv 2312.00751"
"""Tam Nguyen, Tan M. Nguyen, Richard G. Baraniuk: Mitigating Over-smoothing in Transformers via Regularized Nonlocal
Functionals, NeurIPS 2023."""


@dataclass(frozen=True)
class Check:
    """One measured figure: at most its tolerance, at least it, or within it of what is expected."""

    what: str
    measured: float
    tolerance: float
    at_least: bool = False
    expected: float | None = None

    @property
    def strain(self) -> float:
        """How near the figure is to failing: it passes up to 1."""
        if math.isnan(self.measured):
            return math.inf
        if self.expected is not None:
            return _ratio(abs(self.measured - self.expected), self.tolerance)
        return _ratio(self.tolerance, self.measured) if self.at_least else _ratio(self.measured, self.tolerance)

    @property
    def passed(self) -> bool:
        return self.strain <= 1

    @property
    def relation(self) -> str:
        """The figure beside its tolerance, e.g. ``2.2e-16 <= 1e-13``."""
        if self.expected is not None:
            return f"{self.measured:.6g} = {self.expected:.6g} ± {self.tolerance:.2g}"
        return f"{_shown(self.measured)} {'>=' if self.at_least else '<='} {_shown(self.tolerance)}"


def _shown(number: float) -> str:
    """Return few digits of what is small or large, and enough of what may be compared with 1."""
    return f"{number:.9g}" if 0.5 < abs(number) < 2 else f"{number:.3g}"


def _ratio(part: float, whole: float) -> float:
    if whole <= 0:
        return 0.0 if part <= whole else math.inf
    return part / whole


def largest(*values: float) -> float:
    """Return the largest value; NaN if any is, which `max` may lose."""
    return math.nan if any(math.isnan(value) for value in values) else float(max(values))


def smallest(*values: float) -> float:
    """Return the smallest value; NaN if any is."""
    return -largest(*(-value for value in values))


def off(found: Any, wanted: Any, within: float = 1e-9) -> float:
    """Return the largest error over what it may be, relative to the largest number that is wanted."""
    wanted = np.asarray(wanted, np.float64)
    return float(np.abs(np.asarray(found, np.float64) - wanted).max() / (np.abs(wanted).max() or 1.0)) / within


def unless(right: Any) -> float:
    """Return 0 for what is right, otherwise infinity."""
    return 0.0 if right else math.inf


def chains_of(kernels: Mapping[str, tuple[Affinity, Any]]) -> dict[str, tuple[MarkovChain, Any]]:
    """Return the chain of each affinity with its matrix P, made of the kernel as it is written out."""
    return {
        name: (MarkovChain(weights), matrix / matrix.sum(axis=1, keepdims=True))
        for name, (weights, matrix) in kernels.items()
    }


FALSE_ALARM = 1e-3
"""Probability that a correct program fails one statistical check. Seeds are fixed, so it is decided once."""


def bonferroni(p_values: Sequence[float]) -> float:
    """Return the smallest p-value times their number, at most 1: the level at which a family of tests rejects."""
    return smallest(1.0, smallest(*p_values) * len(p_values))


@dataclass(frozen=True)
class Outcome:
    """What an experiment found: its checks, figures by caption, and numbers for `results.json`."""

    checks: Sequence[Check]
    figures: dict[str, Figure] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @property
    def worst(self) -> Check:
        return max(self.checks, key=lambda check: check.strain)


@dataclass(frozen=True)
class Context:
    """How an experiment is to be run."""

    quick: bool = False
    step: Callable[[str], None] = lambda text: None
    """Tells the progress bar what is being done."""
    data: Path | None = None
    """Folder with data sets, which some claims need."""

    def pick(self, full: Any, quick: Any) -> Any:
        """Return the second when time is short."""
        return quick if self.quick else full


def checks_of(
    context: Context, parts: Sequence[Callable[[np.random.Generator], Iterable[float]]], seed: int
) -> list[Check]:
    """Return a check for each part of a claim, which yields errors over what they may be, and says of what they are.

    That is what the first line of its docstring says after "errors of".
    """
    checks = []
    for number, part in enumerate(parts):
        context.step(part.__name__)
        worst = largest(*part(np.random.default_rng([seed, number])))
        what = (part.__doc__ or "").partition("errors of ")[2].rstrip(".")
        checks.append(Check(f"{what}, over what they may be", worst, 1.0))
    return checks


class CannotRunError(Exception):
    """The experiment needs something that is not installed; the message says what and how to get it."""


@dataclass(frozen=True)
class Claim:
    """A statement, where it comes from, and the experiment that holds it against the package.

    `statement` is plain text with Unicode mathematics; `source` names the paper and the equation.
    """

    name: str
    title: str
    statement: str
    source: str
    run: Callable[[Context], Outcome]
