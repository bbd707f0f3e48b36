"""Values of a formula as it is written, in 50 digits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Context, Decimal, Overflow, Underflow, localcontext
from fractions import Fraction
from typing import Any, Final

from nlflow.kernels.expressions import Expression, Number

_EXACT: Final = Context(prec=50, Emax=10**17, Emin=-(10**17), traps=[])
_ROUNDED: Final = Context(prec=25, Emax=10**17, Emin=-(10**17), traps=[])  # for what becomes a float
_ONE: Final = Decimal(1)
_NEAR_ONE: Final = (Decimal("0.5"), Decimal(2))
_FLOATS: Final = (Decimal("1e-300"), Decimal("1e300"))
_SMALL: Final = Decimal("1e-16")  # where the next term of the series of log(1 + x) is below 1e-32 of it


def values(a: Expression, squared: Sequence[float | Decimal]) -> list[Decimal | None]:
    """Return an expression's values at squared distances; NaN where it has none, None where digits do not tell."""
    with localcontext(_EXACT) as context:
        found = _found(a, squared)
        unknown: list[Decimal | None] = list(found)
        for i, s in enumerate(squared):
            if not found[i].is_finite():  # of infinities in between?
                context.clear_flags()
                _found(a, [s])
                if context.flags[Overflow] or context.flags[Underflow]:
                    unknown[i] = None
        return unknown


def logarithm(k: Decimal | None) -> float:
    if k is None or not k.is_finite() or k < 0:
        return math.nan
    # That of a float is rounded as much, in a twentieth of the time.
    if _NEAR_ONE[0] < k < _NEAR_ONE[1]:
        return math.log1p(float(_EXACT.subtract(k, _ONE)))
    return math.log(float(k)) if _FLOATS[0] < k < _FLOATS[1] else float(_ROUNDED.ln(k))


def _found(a: Expression, squared: Sequence[float | Decimal]) -> list[Any]:
    known: dict[Expression, list[Any]] = {}
    start = [Decimal(s) for s in squared]

    def found(a: Expression) -> list[Any]:
        if a not in known:
            known[a] = _applied(a, [found(term) for term in a.terms], start)
        return known[a]

    return found(a)


def _applied(a: Expression, terms: list[list[Any]], start: list[Decimal]) -> list[Any]:
    if a.operation == "squared":
        return start
    if a.operation == "number":
        return [_decimal(a.value)] * len(start)
    if a.operation == "power":
        raised = _power(a.value)
        return [raised(x) for x in terms[0]]
    return [_OPERATIONS[a.operation](*here) for here in zip(*terms, strict=True)]


def _decimal(value: Number) -> Decimal:
    if isinstance(value, float):
        return Decimal(value)
    return Decimal(value.numerator) / Decimal(value.denominator)


def _power(exponent: Number) -> Callable[[Decimal], Decimal]:
    if exponent == 0:
        return lambda x: _ONE
    if isinstance(exponent, float) or exponent.denominator not in (2, 4):
        whole = _decimal(exponent)
        return lambda x: x**whole
    if exponent == Fraction(1, 2):
        return lambda x: x.sqrt()
    # Roots of roots take a tenth of the time of logarithms; that of -0 is 0, as in other powers.
    times = Decimal(exponent.numerator)
    if exponent.denominator == 2:
        return lambda x: x.sqrt().copy_abs() ** times
    return lambda x: x.sqrt().sqrt().copy_abs() ** times


def _ordered(pick: Callable[[Decimal, Decimal], Decimal]) -> Callable[[Decimal, Decimal], Decimal]:
    return lambda x, y: x if x.is_nan() else y if y.is_nan() else pick(x, y)


_OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "add": lambda x, y: x + y,
    "multiply": lambda x, y: x * y,
    "pow": lambda x, y: _ONE if y == 0 else x**y,
    "exp": lambda x: x.exp(),
    "log": lambda x: x.ln(),
    "log1p": lambda x: x - x * x / 2 if abs(x) < _SMALL else (1 + x).ln(),
    "abs": lambda x: abs(x),
    "min": _ordered(min),
    "max": _ordered(max),
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "both": lambda x, y: x and y,
    "where": lambda condition, x, y: x if condition else y,
}
