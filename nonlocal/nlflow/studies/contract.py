"""The contract of a kind of study."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from nlflow.store.encoding import Column
from nlflow.studies.fits import Fit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row: TypeAlias = dict[str, Any]
Options: TypeAlias = dict[str, Any]

JUDGED: Mapping[str, Column] = {"used": bool, "note": str}
"""The columns of `judged`, which every kind has."""

_ROUNDINGS = 50
ROUNDING = _ROUNDINGS * float(np.finfo(np.float64).eps)
"""Errors below this, relative to the signal, are rounding: they say nothing about a rate."""


@dataclass(frozen=True)
class Setting:
    """A case: the columns that name it, and the options for its measurement."""

    label: Row
    options: Options


class Kind(ABC):
    """Contract of a kind of study.

    Attributes
    ----------
    name, summary : str
    defaults : dict
        The options with their defaults; None stands for a value that depends on other options.
    axes : tuple of str
        Options that may be lists; each combination of their values is a case.
    setting : tuple of str
        Axes whose values are fitted separately.
    columns : dict
        Columns of a row of `measure` with their types.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    axes: ClassVar[tuple[str, ...]]
    setting: ClassVar[tuple[str, ...]]
    columns: ClassVar[Mapping[str, Column]]

    def check(self, options: Options, given: Mapping[str, Any]) -> None:  # noqa: B027  # a hook
        """Fill in options that depend on others, and raise `InputError` for what cannot be studied."""

    @abstractmethod
    def measure(self, options: Options, seed: np.random.SeedSequence) -> list[Row]:
        """Measure one case."""

    def fits(self, rows: list[Row], options: Options) -> list[Fit]:
        settings = grouped(rows, self.setting)
        return [fit for setting, members in settings for fit in self.fitted(in_words(setting), members, options)]

    @abstractmethod
    def fitted(self, name: str, rows: list[Row], options: Options) -> Iterator[Fit]: ...

    @abstractmethod
    def figure(self, rows: list[Row], fits: list[Fit]) -> Figure:
        """Draw the measurements."""

    def condensed(self, rows: list[Row]) -> list[Row]:
        return rows


def judged(error: float, scale: float, floor: float = 0.0, dtype: str = "float64") -> Row:
    if not np.isfinite(error):
        return {"used": False, "note": "not finite"}
    if error <= (_ROUNDINGS * float(np.finfo(dtype).eps) + floor) * scale:
        return {"used": False, "note": "rounding level"}
    return {"used": True, "note": ""}


def columns(rows: Sequence[Row], *names: str) -> list[list[Any]]:
    return [[row[name] for row in rows] for name in names]


def grouped(rows: Sequence[Row], columns: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(column) for column in columns), []).append(row)
    return [
        ({column: value for column, value in zip(columns, key, strict=True) if value is not None}, members)
        for key, members in groups.items()
    ]


_BARE = ("kernel", "metric", "integrator", "boundary", "what")  # their values need no name


def in_words(setting: Row) -> str:
    words = []
    for name, value in setting.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        if name in _BARE:
            words.append(shown)
        elif name == "dimension":
            words.append(f"{shown}-D")
        else:
            words.append(f"{'N' if name == 'nodes' else name}={shown}")
    return " ".join(words)
