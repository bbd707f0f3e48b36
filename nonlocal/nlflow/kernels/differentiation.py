"""Derivatives of expressions by the squared distance or by a parameter."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Final

from nlflow.kernels import rewriting
from nlflow.kernels.expressions import SQUARED, Expression, as_expression, number
from nlflow.kernels.rewriting import add, multiply, power

PARAMETER: Final = Expression("parameter")
"""A symbol for a number > 0 that a formula depends on."""
_ZERO: Final = as_expression(0)
_ONE: Final = as_expression(1)
_LOG2: Final = Fraction("0.69314718055994530941723212145817656807550013436026")


def derivative(a: Expression, by: Expression = SQUARED) -> Expression:
    # At a corner (of abs, minimum, maximum, where) it is the slope on one side. Each part is derived once.
    known: dict[Expression, Expression] = {}

    def found(a: Expression) -> Expression:
        if a not in known:
            known[a] = _ONE if a.operation == by.operation else _derived(a, [found(term) for term in a.terms])
        return known[a]

    return found(a)


def substituted(a: Expression, value: float) -> Expression:
    known: dict[Expression, Expression] = {}

    def made(a: Expression) -> Expression:
        if a not in known:
            known[a] = as_expression(value) if a.operation == "parameter" else Expression(
                a.operation, tuple(made(term) for term in a.terms), a.value
            )  # fmt: skip
        return known[a]

    return made(a)


def away_from_zero(a: Expression) -> Expression:
    return a if a.finite else rewriting.where(Expression("lt", (_ZERO, SQUARED)), a, _ZERO)


def _times(slope: Expression, factor: Callable[[], Expression]) -> Expression:
    """Return slope factor; 0 where the slope is, whatever the factor is there."""
    return _ZERO if _is_zero(slope) else multiply(slope, factor())


def _is_zero(a: Expression) -> bool:
    return a.is_number and a.value == 0


def _derived(a: Expression, slopes: list[Expression]) -> Expression:
    rule = _RULES.get(a.operation)
    return _ZERO if rule is None else rule(a, *slopes)


def _of_pow(a: Expression, base: Expression, exponent: Expression) -> Expression:
    b, p = a.terms
    by_base = _times(base, lambda: multiply(p, Expression("pow", (b, add(p, number(Fraction(-1)))))))
    return add(by_base, _times(exponent, lambda: multiply(a, rewriting.logarithm(b))))


def _of_exp2(a: Expression, slope: Expression) -> Expression:
    return _times(slope, lambda: multiply(a, number(_LOG2)))


def _of_abs(a: Expression, slope: Expression) -> Expression:
    return _chosen("lt", a.terms[0], _ZERO, multiply(slope, number(Fraction(-1))), slope)


def _chosen(comparison: str, x: Expression, y: Expression, a: Expression, b: Expression) -> Expression:
    if _is_zero(a) and _is_zero(b):
        return _ZERO
    return rewriting.where(rewriting.compared(comparison, x, y), a, b)


_RULES: Final[dict[str, Callable[..., Expression]]] = {
    "add": lambda a, x, y: add(x, y),
    "multiply": lambda a, x, y: add(_times(x, lambda: a.terms[1]), _times(y, lambda: a.terms[0])),
    "power": lambda a, x: _times(x, lambda: multiply(power(a.terms[0], Fraction(a.value) - 1), number(a.value))),
    "pow": _of_pow,
    "exp": lambda a, x: _times(x, lambda: a),
    "exp2": _of_exp2,
    "exp2_up": _of_exp2,
    "log": lambda a, x: _times(x, lambda: power(a.terms[0], Fraction(-1))),
    "log1p": lambda a, x: _times(x, lambda: power(add(a.terms[0], _ONE), Fraction(-1))),
    "abs": _of_abs,
    "min": lambda a, x, y: _chosen("lt", a.terms[0], a.terms[1], x, y),
    "max": lambda a, x, y: _chosen("lt", a.terms[0], a.terms[1], y, x),
    "where": lambda a, condition, x, y: _ZERO if _is_zero(x) and _is_zero(y) else rewriting.where(a.terms[0], x, y),
}
