"""Simpler forms of expressions."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any, Final

from nlflow.errors import InputError
from nlflow.kernels.expressions import (
    Expression,
    Number,
    as_expression,
    as_float,
    is_even,
    is_whole,
    number,
    out_of_range,
)

_ZERO: Final = as_expression(0)
_ONE: Final = as_expression(1)
_FARTHEST: Final = 5000  # exponents of e beyond which no number is kept
_EXACT: Final = Context(prec=60, Emax=10**9, Emin=-(10**9), traps=[])
_POWERS: Final = 2048  # bits of powers of numbers that are exact


def simplified(a: Expression) -> Expression:
    known: dict[Expression, Expression] = {}

    def made(a: Expression) -> Expression:
        if a not in known:
            known[a] = _made(a, tuple(made(term) for term in a.terms))
        return known[a]

    return made(a)


def _made(a: Expression, terms: tuple[Expression, ...]) -> Expression:
    if a.operation == "power":
        return power(terms[0], a.value)
    rule = _RULES.get(a.operation)
    return rule(*terms) if rule else Expression(a.operation, terms, a.value)


def add(a: Expression, b: Expression) -> Expression:
    if a.is_number and b.is_number:
        return _folded(lambda x, y: x + y, a, b)
    if a.is_number:
        a, b = b, a
    if b.is_number and b.value == 0:
        return a
    if b.is_number and a.operation == "add" and a.terms[1].is_number:
        return add(a.terms[0], add(a.terms[1], b))
    if b.is_number and isinstance(b.value, Fraction):
        factor, rest = _scaled(a)
        if rest.operation == "add" and rest.terms[1].is_number and factor * rest.terms[1].value == -b.value:
            return multiply(rest.terms[0], number(factor))  # 1 - (1 - x)
    for one, other in ((a, b), (b, a)):
        found = _uncancelled(one, other)
        if found is not None:
            return found
    return Expression("add", (a, b))


def _uncancelled(a: Expression, b: Expression) -> Expression | None:
    """Return a + b, of which b is negative, in a form whose parts do not cancel; None where there is none.

    a - n/d is (a d - n)/d where d is proved to be > 0 and finite, and a difference of roots is that of their squares
    over their sum, where both are proved to be >= 0 and their sum to be > 0. Both only where what is left is a number:
    1 - r/(1 + r) is 1/(1 + r), and sqrt(1 + r^2) - r is 1/(sqrt(1 + r^2) + r).
    """
    factor, rest = _scaled(b)
    if factor >= 0 or not (a.finite and rest.finite):
        return None
    below = [power(f, Fraction(-1)) for f in _factors(rest) if _divides(f)]
    if not below:
        left = _difference(a, rest, factor)
        return _of_roots(a, rest, factor) if left is None else number(left)
    divisor, above = _product(below), _product([f for f in _factors(rest) if not _divides(f)])
    if not (a.is_number and divisor.positive and divisor.finite):
        return None
    whole = multiply(divisor, a)
    left = _difference(whole, above, factor)
    found = number(left) if left is not None else _of_roots(whole, above, factor)
    return None if found is None else multiply(found, power(divisor, Fraction(-1)))


def _of_roots(a: Expression, b: Expression, factor: Fraction) -> Expression | None:
    """Return a + factor b, factor < 0, as the difference of squares over the sum where that is proved."""
    if not any(_scaled(x)[1].operation == "power" and _scaled(x)[1].value == Fraction(1, 2) for x in (a, b)):
        return None
    total = Expression("add", (a, multiply(b, number(-factor))))
    if not (a.nonnegative and b.nonnegative and total.positive):
        return None
    left = _difference(power(a, Fraction(2)), power(b, Fraction(2)), -factor * factor)
    return None if left is None else multiply(power(total, Fraction(-1)), number(left))


def _divides(a: Expression) -> bool:
    return a.operation == "power" and a.value < 0


def _factors(a: Expression) -> list[Expression]:
    return [f for term in a.terms for f in _factors(term)] if a.operation == "multiply" else [a]


def _product(factors: list[Expression]) -> Expression:
    result = _ONE
    for factor in factors:
        result = multiply(result, factor)
    return result


def _scaled(a: Expression) -> tuple[Fraction, Expression]:
    """Return a finite factor and what it multiplies."""
    if a.operation == "multiply" and a.terms[1].is_number and isinstance(a.terms[1].value, Fraction):
        return a.terms[1].value, a.terms[0]
    return Fraction(1), a


def _difference(a: Expression, b: Expression, factor: Fraction) -> Fraction | None:
    """Return a + factor b where all their parts but numbers cancel; None elsewhere, and where nothing is left."""
    parts: dict[Any, Fraction] = {}
    for term, times in ((a, Fraction(1)), (b, factor)):
        for part, count in _parts(term, times):
            parts[part] = parts.get(part, Fraction(0)) + count
    left = parts.pop(None, Fraction(0))
    return None if left == 0 or any(parts.values()) else left


def _parts(a: Expression, times: Fraction) -> list[tuple[Any, Fraction]]:
    """Return what an expression is a sum of, and how often each; None stands for 1."""
    if a.operation == "add":
        return [part for term in a.terms for part in _parts(term, times)]
    if a.is_number and isinstance(a.value, Fraction):
        return [(None, times * a.value)]
    factor, rest = _scaled(a)
    return [(a.key, times)] if rest is a else _parts(rest, times * factor)


def multiply(a: Expression, b: Expression) -> Expression:
    # Numbers come last and become one, and powers of one thing become one where that is proved.
    if a.is_number and b.is_number:
        return _folded(lambda x, y: x * y, a, b)
    if a.is_number:
        a, b = b, a
    if b.is_number and b.value == 1:
        return a
    if b.is_number and b.value == 0 and a.finite:
        return _ZERO
    if a.operation == "multiply" and a.terms[1].is_number:
        if b.is_number:
            return multiply(a.terms[0], multiply(a.terms[1], b))
        return multiply(multiply(a.terms[0], b), a.terms[1])
    if b.operation == "multiply" and b.terms[1].is_number:
        return multiply(multiply(a, b.terms[0]), b.terms[1])
    (here, first), (there, second) = _base_and_power(a), _base_and_power(b)
    if here is there and _add_up(here, first, second):
        return power(here, first + second)
    return Expression("multiply", (a, b))


def _base_and_power(a: Expression) -> tuple[Expression, Fraction]:
    return (a.terms[0], Fraction(a.value)) if a.operation == "power" else (a, Fraction(1))


def _add_up(base: Expression, first: Fraction, second: Fraction) -> bool:
    """Whether base^first base^second is base^(first + second): not where it is 0/0, nor for roots of what is < 0."""
    same_sign = (first > 0) == (second > 0)
    defined = base.nonnegative or (is_whole(first) and is_whole(second))
    return base.positive or (same_sign and defined)


def power(a: Expression, exponent: Number) -> Expression:
    if isinstance(exponent, float):
        raise InputError("kernel: its formula has an infinite power")
    if exponent == 0:
        return _ONE
    if exponent == 1:
        return a
    if a.is_number:
        return number(_number_power(a.value, exponent))
    if a.operation == "abs" and is_even(exponent):
        return power(a.terms[0], exponent)
    if a.operation == "power":
        base, inner = a.terms[0], Fraction(a.value)
        if base.nonnegative or (is_whole(inner) and is_whole(exponent)):
            return power(base, inner * exponent)
        if is_even(inner):  # a root of a square is that of the absolute value
            return power(absolute(base), inner * exponent)
    if a.operation == "multiply" and a.terms[1].is_number and a.terms[1].value > 0:
        return multiply(power(a.terms[0], exponent), power(a.terms[1], exponent))
    return Expression("power", (a,), exponent)


def exponential(a: Expression) -> Expression:
    if not a.is_number:
        return Expression("exp", (a,))
    if isinstance(a.value, float):
        return number(Fraction(0) if a.value < 0 else math.inf)
    return number(_exponential(_decimal(a.value)))


def logarithm(a: Expression) -> Expression:
    if not a.is_number:
        return Expression("log", (a,))
    if a.value < 0:
        raise InputError(f"kernel: its formula has the logarithm of {as_float(a.value):g}, which is negative")
    if isinstance(a.value, float) or a.value == 0:
        return number(math.inf if a.value else -math.inf)
    return number(Fraction(_EXACT.ln(_decimal(a.value))))


def absolute(a: Expression) -> Expression:
    if a.nonnegative:
        return a
    return number(-a.value) if a.is_number else Expression("abs", (a,))


def where(condition: Expression, a: Expression, b: Expression) -> Expression:
    return a if a is b else Expression("where", (condition, a, b))


def _raised(a: Expression, b: Expression) -> Expression:
    return power(a, b.value) if b.is_number else exponential(multiply(b, logarithm(a)))


def _log1p(a: Expression) -> Expression:
    return logarithm(add(a, _ONE)) if a.is_number else Expression("log1p", (a,))


def _pair(operation: str) -> Callable[[Expression, Expression], Expression]:
    def of(a: Expression, b: Expression) -> Expression:
        if a.is_number and b.is_number:
            return a if (a.value < b.value) == (operation == "min") else b
        return a if a is b else Expression(operation, (a, b))

    return of


def _comparison(operation: str) -> Callable[[Expression, Expression], Expression]:
    """Compare the squared distance itself where it can be: c x with c > 0, and the root of what is >= 0."""

    def of(a: Expression, b: Expression) -> Expression:
        for here, there in ((a, b), (b, a)):
            if not there.is_number or isinstance(there.value, float):
                continue
            inner, first, least = None, here.terms[0] if here.terms else here, there.value
            if here.operation == "multiply" and here.terms[1].is_number and 0 < here.terms[1].value < math.inf:
                inner, least = first, there.value / Fraction(here.terms[1].value)
            elif here.operation == "power" and here.value == Fraction(1, 2) and least >= 0 and first.nonnegative:
                inner, least = first, least**2
            if inner is not None:
                pair = inner, number(least)
                return of(*(pair if here is a else pair[::-1]))
        return Expression(operation, (a, b))

    return of


def compared(operation: str, a: Expression, b: Expression) -> Expression:
    return _comparison(operation)(a, b)


_RULES: Final[dict[str, Callable[..., Expression]]] = {
    "add": add,
    "multiply": multiply,
    "pow": _raised,
    "exp": exponential,
    "log": logarithm,
    "log1p": _log1p,
    "abs": absolute,
    "min": _pair("min"),
    "max": _pair("max"),
    "where": where,
    "lt": _comparison("lt"),
    "le": _comparison("le"),
}


# ---- numbers


def _folded(compute: Callable[[Any, Any], Any], a: Expression, b: Expression) -> Expression:
    x, y = a.value, b.value
    if isinstance(x, float) or isinstance(y, float):  # beside an infinity the sign alone of a number counts
        x, y = (v if isinstance(v, float) else float((v > 0) - (v < 0)) for v in (x, y))
    return number(compute(x, y))


def _decimal(value: Number) -> Decimal:
    whole = Fraction(value)
    return _EXACT.divide(Decimal(whole.numerator), Decimal(whole.denominator))


def _exponential(exponent: Decimal) -> Fraction:
    if not abs(exponent) <= _FARTHEST:
        raise out_of_range()
    return Fraction(_EXACT.exp(exponent))


def _number_power(value: Number, exponent: Fraction) -> Number:
    """Return a power of a number: exact for whole powers that are short, else to 60 digits."""
    if isinstance(value, float):
        if value > 0 or exponent < 0:
            return value if exponent > 0 else Fraction(0)
        raise InputError("kernel: its formula has a power of -infinity")
    if value in (0, 1):
        return math.inf if value == 0 and exponent < 0 else value
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    if is_whole(exponent):
        if abs(exponent) * bits <= _POWERS:
            return value ** int(exponent)
    elif value < 0:
        raise InputError(
            f"kernel: its formula has the power {as_float(exponent):g} of {as_float(value):g}, which is negative"
        )
    sign = -1 if value < 0 and not is_even(exponent) else 1
    found = _decimal(abs(value))
    if exponent.denominator in (2, 4) and abs(exponent) * bits <= _POWERS:
        for _ in range(exponent.denominator.bit_length() - 1):
            found = _EXACT.sqrt(found)
        return Fraction(found) ** exponent.numerator
    return sign * _exponential(_EXACT.multiply(_decimal(exponent), _EXACT.ln(found)))
