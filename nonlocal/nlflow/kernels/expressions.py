"""Formulas of kernels as expressions of the squared distance, from which code is made.

A formula that is written for arrays takes an `Expression` in their place, which keeps what it does. `structure` tells
the form of an expression from the numbers in it, so that kernels which differ in their parameters alone share their
code. That is made by `nlflow.backends.numba.pairwise`.

Numbers are fractions: what a formula multiplies one after the other is rounded once, and nothing over- or underflows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from nlflow._array import Array, namespace, root
from nlflow.errors import InputError

_WHOLE: Final = 64  # powers of numbers that are exact
Number = Fraction | float  # floats are infinities alone


@dataclass(frozen=True, eq=False)
class Expression:
    """A number, the squared distance, or an operation on expressions; numbers and arrays mix with it as with arrays."""

    operation: str
    terms: tuple[Expression, ...] = ()
    value: Number = Fraction(0)

    __array_priority__ = 100

    def __array_namespace__(self, api_version: str | None = None) -> Any:
        """Return the functions that formulas may use."""
        return FUNCTIONS

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Expression:
        """Let functions of NumPy take expressions."""
        known = _UFUNCS.get(function.__name__)
        if known is None or method != "__call__" or options:
            raise InputError(_unknown(function.__name__))
        return known(*inputs)

    def __array_function__(self, function: Any, types: Any, inputs: Any, options: Any) -> Expression:
        """Let other functions of NumPy take expressions."""
        if options or not hasattr(FUNCTIONS, function.__name__):
            raise InputError(_unknown(function.__name__))
        result: Expression = getattr(FUNCTIONS, function.__name__)(*inputs)
        return result

    def __add__(self, other: Any) -> Expression:
        return _add(self, as_expression(other))

    __radd__ = __add__

    def __mul__(self, other: Any) -> Expression:
        return _multiply(self, as_expression(other))

    __rmul__ = __mul__

    def __neg__(self) -> Expression:
        return self * -1

    def __pos__(self) -> Expression:
        return self

    def __sub__(self, other: Any) -> Expression:
        return _add(self, -as_expression(other))

    def __rsub__(self, other: Any) -> Expression:
        return _add(-self, as_expression(other))

    def __truediv__(self, other: Any) -> Expression:
        return self * _power(as_expression(other), Fraction(-1))

    def __rtruediv__(self, other: Any) -> Expression:
        return _multiply(_power(self, Fraction(-1)), as_expression(other))

    def __pow__(self, other: Any) -> Expression:
        power = as_expression(other)
        return _power(self, power.value) if power.is_number else _exp(power * _log(self))

    def __rpow__(self, other: Any) -> Expression:
        return _exp(self * _log(as_expression(other)))

    def __abs__(self) -> Expression:
        return _pair("max", self, -self)

    def __lt__(self, other: Any) -> Expression:
        return _compare("lt", self, as_expression(other))

    def __le__(self, other: Any) -> Expression:
        return _compare("le", self, as_expression(other))

    def __gt__(self, other: Any) -> Expression:
        return _compare("lt", as_expression(other), self)

    def __ge__(self, other: Any) -> Expression:
        return _compare("le", as_expression(other), self)

    def __and__(self, other: Any) -> Expression:
        return Expression("both", (self, as_expression(other)))

    def __bool__(self) -> bool:
        raise InputError(
            "kernel: its formula decides by `if` on distances, of which there are many at a time; use where(condition, "
            "a, b), as for arrays"
        )

    def __float__(self) -> float:
        raise InputError("kernel: its formula takes distances as single numbers (math.exp?); use functions of arrays")

    @property
    def is_number(self) -> bool:
        """Whether it is a number."""
        return self.operation == "number"

    def __str__(self) -> str:
        """Return the expression in prefix form, with its numbers."""
        form, numbers = structure(self)
        return re.sub(r"\bc(\d+)\b", lambda found: repr(numbers[int(found[1])]), form)


SQUARED: Final = Expression("squared")
_ZERO: Final = Expression("number")
_ONE: Final = Expression("number", value=Fraction(1))


def number(value: Number) -> Expression:
    """Return a number."""
    return Expression("number", value=value)


def as_expression(value: Any) -> Expression:
    """Return a number as an expression, or an expression as it is."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, Fraction):
        return Expression("number", value=value)
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"kernel: its formula uses {type(value).__name__}, expected numbers and distances") from error
    if math.isnan(number):
        raise InputError("kernel: its formula has a constant that is not a number")
    return Expression("number", value=number if math.isinf(number) else Fraction(number))


def _unknown(name: str) -> str:
    return (
        f"kernel: its formula uses {name}, which compiled sums do not have; they have {', '.join(sorted(NAMES))}. "
        "method='dense' takes any formula"
    )


# ---- operations, each in the simplest form


def _add(a: Expression, b: Expression) -> Expression:
    if a.is_number and b.is_number:
        return Expression("number", value=a.value + b.value)
    if a.is_number:
        a, b = b, a
    if b.is_number and b.value == 0:
        return a
    if b.is_number and a.operation == "add" and a.terms[1].is_number:
        return _add(a.terms[0], _add(a.terms[1], b))
    return Expression("add", (a, b))


def _multiply(a: Expression, b: Expression) -> Expression:
    if a.is_number and b.is_number:
        return Expression("number", value=a.value * b.value)
    if a.is_number:
        a, b = b, a
    if b.is_number and b.value in (0, 1):
        return a if b.value else _ZERO
    if a.operation == "multiply" and a.terms[1].is_number:  # numbers come last, and become one
        return _multiply(_multiply(a.terms[0], b) if not b.is_number else a.terms[0], _times(a.terms[1], b))
    if b.operation == "multiply" and b.terms[1].is_number:
        return _multiply(_multiply(a, b.terms[0]), b.terms[1])
    (here, first), (there, second) = _base_and_power(a), _base_and_power(b)
    if here is there:  # r r is the squared distance
        return _power(here, first + second)
    return Expression("multiply", (a, b))


def _base_and_power(a: Expression) -> tuple[Expression, Fraction]:
    return (a.terms[0], Fraction(a.value)) if a.operation == "power" else (a, Fraction(1))


def _times(number: Expression, other: Expression) -> Expression:
    return _multiply(number, other) if other.is_number else number


def _power(a: Expression, power: Number) -> Expression:
    if power == 0:
        return _ONE
    if power == 1:
        return a
    if isinstance(power, float):
        raise InputError("kernel: its formula has an infinite power")
    if a.is_number:
        return Expression("number", value=_number_power(a.value, power))
    if a.operation == "power":
        return _power(a.terms[0], Fraction(a.value) * power)
    if a.operation == "multiply" and a.terms[1].is_number and a.terms[1].value > 0:
        return _multiply(_power(a.terms[0], power), _power(a.terms[1], power))
    return Expression("power", (a,), power)


def _number_power(value: Number, power: Fraction) -> Number:
    """Return a power of a number; whole powers and square roots of fractions stay in range whatever the number."""
    if isinstance(value, float):
        return value if power > 0 else Fraction(0)
    if value == 0 and power < 0:
        return math.inf
    if power.denominator == 1 and abs(power) <= _WHOLE:
        return value ** int(power)
    if value < 0:
        raise InputError(f"kernel: its formula has the power {float(power):g} of {float(value):g}, which is negative")
    if power.denominator == 2 and abs(power) <= _WHOLE:
        digits = 2 ** (2 * max(0, 160 - (value.numerator.bit_length() - value.denominator.bit_length()) // 2))
        rooted = Fraction(math.isqrt(value.numerator * digits // value.denominator), math.isqrt(digits))
        return rooted**power.numerator
    if power.denominator == 4:
        return _number_power(_number_power(value, Fraction(1, 2)), 2 * power)
    try:
        return Fraction(float(value) ** float(power))
    except OverflowError as error:
        raise InputError(f"kernel: its formula has the power {float(power):g} of a number, which overflows") from error


def _exp(a: Expression) -> Expression:
    if a.is_number:
        return Expression("number", value=Fraction(0) if a.value == -math.inf else Fraction(math.exp(a.value)))
    return Expression("exp", (a,))


def _log(a: Expression) -> Expression:
    if not a.is_number:
        return Expression("log", (a,))
    if a.value < 0:
        raise InputError(f"kernel: its formula has the logarithm of {float(a.value):g}, which is negative")
    value = -math.inf if a.value == 0 else math.log(a.value)
    return Expression("number", value=value if math.isinf(value) else Fraction(value))


def _pair(operation: str, a: Expression, b: Expression) -> Expression:
    if a.is_number and b.is_number:
        return a if (a.value < b.value) == (operation == "min") else b
    return Expression(operation, (a, b))


def _compare(operation: str, a: Expression, b: Expression) -> Expression:
    """Return a < b or a <= b, of the squared distance itself where it can be: of c x with 1, and of the root of x."""
    for here, there in ((a, b), (b, a)):
        if not there.is_number or isinstance(there.value, float):
            continue
        if here.operation == "multiply" and here.terms[1].is_number and here.terms[1].value > 0:
            pair = here.terms[0], Expression("number", value=there.value / here.terms[1].value)
            return _compare(operation, *(pair if here is a else pair[::-1]))
        if here.operation == "power" and here.value == Fraction(1, 2) and there.value >= 0:
            pair = here.terms[0], Expression("number", value=there.value**2)
            return _compare(operation, *(pair if here is a else pair[::-1]))
    return Expression(operation, (a, b))


def _where(condition: Any, a: Any, b: Any) -> Expression:
    return Expression("where", (as_expression(condition), as_expression(a), as_expression(b)))


NAMES: Final[dict[str, Callable[..., Expression]]] = {
    "sqrt": lambda a: _power(as_expression(a), Fraction(1, 2)),
    "square": lambda a: as_expression(a) ** 2,
    "pow": lambda a, b: as_expression(a) ** b,
    "exp": lambda a: _exp(as_expression(a)),
    "log": lambda a: _log(as_expression(a)),
    "log1p": lambda a: _log(1 + as_expression(a)),
    "abs": lambda a: abs(as_expression(a)),
    "minimum": lambda a, b: _pair("min", as_expression(a), as_expression(b)),
    "maximum": lambda a, b: _pair("max", as_expression(a), as_expression(b)),
    "where": _where,
}
_LIKE: Final[dict[str, Callable[..., Expression]]] = {
    "zeros_like": lambda a, **options: _ZERO,
    "ones_like": lambda a, **options: _ONE,
    "full_like": lambda a, value, **options: as_expression(value),
}


class _Functions(SimpleNamespace):
    """A namespace that can be an element of a set, where array-api-compat < 1.15 puts it."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # None in the base class


FUNCTIONS: Final = _Functions(
    __name__=__name__,
    **NAMES,
    **_LIKE,
    power=NAMES["pow"],
    absolute=NAMES["abs"],
    inf=math.inf,
    pi=math.pi,
    e=math.e,
)
"""What formulas may use of a namespace of arrays."""
_UFUNCS: Final[dict[str, Callable[..., Expression]]] = {
    **NAMES,
    "power": NAMES["pow"],
    "absolute": NAMES["abs"],
    "add": lambda a, b: as_expression(a) + b,
    "subtract": lambda a, b: as_expression(a) - b,
    "multiply": lambda a, b: as_expression(a) * b,
    "divide": lambda a, b: as_expression(a) / b,
    "negative": lambda a: -a,
    "less": lambda a, b: as_expression(a) < b,
    "less_equal": lambda a, b: as_expression(a) <= b,
    "greater": lambda a, b: as_expression(a) > b,
    "greater_equal": lambda a, b: as_expression(a) >= b,
    "logical_and": lambda a, b: as_expression(a) & b,
}


# ---- the form and the numbers; values


def structure(a: Expression) -> tuple[str, list[float]]:
    """Return the form of an expression in prefix notation, numbers as c0, c1, ..., and these numbers."""
    numbers: list[float] = []

    def written(a: Expression) -> str:
        if a.is_number:
            numbers.append(float(a.value))
            return f"c{len(numbers) - 1}"
        name = f"power:{a.value}" if a.operation == "power" else a.operation
        return f"{name}({','.join(map(written, a.terms))})" if a.terms else name

    return written(a), numbers


def value(a: Expression, squared: Array) -> Array:
    """Return an expression's values at squared distances, an array of any namespace."""
    xp = namespace(squared)
    if a.is_number:
        return xp.full_like(squared, float(a.value))
    if a.operation == "squared":
        return squared
    if a.operation == "power":
        base = value(a.terms[0], squared)
        power = Fraction(a.value)
        if power.denominator == 2:
            return root(base) if power == Fraction(1, 2) else root(base) ** power.numerator
        return root(base, float(power)) if 0 < power < 1 else base ** float(power)
    terms = [value(term, squared) for term in a.terms]
    with np.errstate(divide="ignore", invalid="ignore"):  # log 0 is -inf; the branch of `where` not taken may be NaN
        result: Array = {
            "add": lambda: terms[0] + terms[1], "multiply": lambda: terms[0] * terms[1],
            "exp": lambda: xp.exp(terms[0]), "log": lambda: xp.log(terms[0]), "both": lambda: terms[0] & terms[1],
            "lt": lambda: terms[0] < terms[1], "le": lambda: terms[0] <= terms[1],
            "min": lambda: xp.minimum(*terms), "max": lambda: xp.maximum(*terms), "where": lambda: xp.where(*terms),
        }[a.operation]()  # fmt: skip
    return result
