"""Kernels from formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from typing import Any, ClassVar, Final

import numpy as np

from nlflow._array import Array, Floats, constant_like, namespace, to_numpy, underflowing
from nlflow.errors import InputError, check_flag, is_function, kind_of, shortened
from nlflow.kernels import written
from nlflow.kernels.base import RadialKernel
from nlflow.kernels.expressions import SQUARED, Expression, Number, as_float, numeric, value
from nlflow.kernels.forms import called, logarithm, parsed
from nlflow.kernels.rewriting import simplified

# Of float32, whose squares are exact in float64: distances at which k is compared with what is written, and at which it
# has to have a value.
_COMPARED: Final = np.float32(np.concatenate([[0], np.geomspace(1e-12, 1e12, 49), np.linspace(0.07, 5, 40)]))
_SEEN: Final = np.float32(np.concatenate([[0], np.geomspace(1e-12, 1e12, 1201), np.linspace(0, 16, 2001)]))
_BESIDE: Final = (1 - 1e-3, 1 + 1e-3)  # numbers of the formula, where it may have corners
_CONSTANTS: Final = 40  # numbers beside which it is compared
_AGREES: Final = 1e-8  # of log k, beside 1: more digits are lost
_VANISHING: Final = -690.0  # log k, beside which no weight counts
_BEYOND: Final = tuple(Decimal(10) ** digits for digits in (309, 400, 1000, 10_000))  # squared distances
_NOTHING: Final = -69.0  # log k: 1e-30
_MOST: Final = 4096  # distances at which floats fail and digits are taken
_REMEMBERED: Final = 512  # formulas


@underflowing
@dataclass(frozen=True)
class Formula(RadialKernel):
    r"""A kernel ``k(|x - y| / width)``, given as text or as a function.

    Parameters
    ----------
    k : str or callable
        As a function of r, the distance over the width; 1 at r = 0. Text has numbers, ``r``, + - * / \*\*,
        < <= > >=, and sqrt, square, pow, exp, log, log1p, abs, minimum, maximum and where. A function gets a symbol in
        place of an array, and may use the same functions of NumPy.
    width : float
        In the units of what is compared; > 0.
    definite : bool
        Whether you know that the kernel is positive semidefinite.

    Raises
    ------
    InputError
        For a formula that is found negative, infinite or no number, is not 1 at r = 0, is too long, or loses its digits
        in floats.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Formula, Points, affinity
    >>> p = affinity(Formula("exp(-r**1.5)", width=0.2), Points(np.linspace(0, 1, 5)))
    >>> round(float(p.average(np.arange(5.0))[0]), 4)
    0.2271
    """

    k: str | Callable[[Any], Any]
    width: float = 1.0
    definite: bool = field(default=False, kw_only=True)
    _written: Expression = field(init=False, repr=False, compare=False)
    _log: Expression = field(init=False, repr=False, compare=False)
    positive: ClassVar[tuple[str, ...]] = ("width",)
    formula: ClassVar[str] = "k(|x-y| / width)"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("positive_semidefinite", check_flag("definite", self.definite))
        r = SQUARED**0.5
        if isinstance(self.k, str):
            found = parsed(self.k, {"r": r})
        elif is_function(self.k):
            refusal = "k: the function failed on a symbol for distances"
            found = called(self.k, r, refusal, "use arithmetic and functions of NumPy")
        else:
            raise InputError(f"k: got {kind_of(self.k)}, expected text or a function of r")
        found = numeric(found)
        known = _known(found.key)
        if not known:
            self._set("_written", found)
            self._set("_log", logarithm(simplified(found)))
            self._compare()
            self.check_unit()
            known.extend((self._written, self._log))
        self._set("_written", known[0])
        self._set("_log", known[1])

    def __repr__(self) -> str:
        """Return the formula as text; of a function what it does, so that runs can be resumed."""
        k = repr(self.k) if isinstance(self.k, str) else f"<log k: {self._log}>"
        own = f"k={k}, width={self.width!r}, definite={self.definite!r}, amplitude={self.amplitude!r}"
        return f"Formula({own})"

    def log_profile(self, squared: Array) -> Array:
        """Return log k as a function of the squared distance; `InputError` where k is no finite number >= 0."""
        # Where floats give no number, the formula is computed as it is written, with more digits; of a squared distance
        # over the width that no float holds, the limit is taken where k has one.
        with np.errstate(over="ignore", invalid="ignore"):  # far beyond narrow widths
            scaled = squared / self.width / self.width
        log = value(self._log, scaled)
        return log if isinstance(log, Expression) else self._defined(log, scaled)

    def _defined(self, log: Array, scaled: Array) -> Array:
        """Return log k with the values that floats do not give."""
        xp = namespace(log)
        wrong = xp.isnan(log) | (log == math.inf)
        if not bool(xp.any(wrong)):
            return log
        places = to_numpy(wrong)
        distances, where = np.unique(to_numpy(scaled)[places].astype(np.float64), return_inverse=True)
        if len(distances) > _MOST or getattr(log, "requires_grad", False):
            raise self._undefined(distances[0], None)
        finite = np.isfinite(distances)
        logs = np.append(self._exactly(distances[finite]), [self._limit() for _ in distances[~finite]])
        filled = np.where(places, 0.0, to_numpy(log))
        filled[places] = logs[where]
        return constant_like(filled, log)

    def _limit(self) -> float:
        """Return log k beyond all floats, or raise `InputError` where more digits do not tell what it becomes."""
        logs = [written.logarithm(k) for k in written.values(self._written, _BEYOND)]
        if max(logs) <= _NOTHING:  # beside k(0), which is 1
            return -math.inf
        if max(logs) - min(logs) <= _AGREES * (1 + abs(logs[0])):
            return logs[0]
        raise InputError(
            f"kernel: {shortened(repr(self))} is not told at distances over the width whose squares overflow, expected "
            "less than 1e154; use a wider one, or bring nodes nearer"
        )

    def _exactly(self, scaled: Floats, instead: Floats | None = None) -> Floats:
        """Return log k as it is written, or raise `InputError` where it has no value."""
        # Where digits do not tell, `instead`: floats of a form that was proved.
        found = written.values(self._written, [float(s) for s in scaled])
        logs = np.array([written.logarithm(k) for k in found])
        for i in np.flatnonzero(np.isnan(logs)):
            k = found[i]
            if k is not None or instead is None or math.isnan(instead[i]):
                raise self._undefined(scaled[i], None if k is None else float(k))
            logs[i] = instead[i]
        return logs

    def _undefined(self, scaled: float, k: float | None) -> InputError:
        """Return the refusal for a value k, or for one that nobody told: None."""
        what = "no number in floats" if k is None else "infinite" if k == math.inf else "negative, or no number,"
        remedy = "; bound it near 0, as TruncatedPower does" if k == math.inf and scaled == 0 else ""
        remedy = "; write it so that no part of it overflows" if k is None else remedy
        distance = math.sqrt(scaled) * self.width
        return InputError(
            f"kernel: {shortened(repr(self))} is {what} at the distance {distance:.4g}, expected a finite number >= 0"
            + remedy
        )

    def _compare(self) -> None:
        """Raise `InputError` unless log k is what is written: near all its numbers, and from 0 to 1e12 widths."""
        sizes = {abs(as_float(c)) for c in _numbers(self._written)}
        numbers = sorted(size for size in sizes if 1e-12 < size < 1e12)[:_CONSTANTS]
        corners = np.array([c * near for c in numbers for near in _BESIDE], np.float32)
        squared = np.concatenate([_COMPARED, corners]).astype(np.float64) ** 2
        log = np.asarray(value(self._log, squared))
        expected = self._exactly(squared, log)
        log = np.asarray(self._defined(log, squared))
        with np.errstate(invalid="ignore"):  # -inf - -inf
            same = np.abs(log - expected) <= _AGREES * (1 + np.abs(expected))
        wrong = np.flatnonzero(~(same | ((log < _VANISHING) & (expected < _VANISHING))))
        if len(wrong):
            distance = math.sqrt(squared[wrong[0]]) * self.width
            raise InputError(
                f"kernel: {shortened(repr(self))} loses its digits in floats at the distance {distance:.4g}: log k is "
                f"{log[wrong[0]]:.9g} there, and {expected[wrong[0]]:.9g} with more digits; write it so that large "
                "numbers do not cancel"
            )
        self._defined(value(self._log, _SEEN.astype(np.float64) ** 2), _SEEN.astype(np.float64) ** 2)


def _numbers(a: Expression) -> set[Number]:
    own: set[Number] = {a.value} if a.is_number else set()
    return own.union(*(_numbers(term) for term in a.terms))


@lru_cache(_REMEMBERED)
def _known(key: tuple[Any, ...]) -> list[Expression]:
    """Return what is kept of a formula: as it is written, and log k; nothing until these have been compared."""
    return []
