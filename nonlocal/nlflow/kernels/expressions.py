"""Formulas of kernels as expressions of the squared distance, from which code is made."""

# A formula that is written for arrays takes an `Expression` in their place, which keeps what it does, as it is written.
# `structure` tells the form of an expression from the numbers in it, so that kernels which differ in their parameters
# alone share their code.

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from nlflow._array import Array, namespace, root
from nlflow.errors import InputError

Number = Fraction | float  # floats are infinities alone
_DIGITS: Final = 8192  # bits of a number's numerator and denominator; squares of widths have 2400
_KEPT: Final = 256  # bits of a number that would have more
_PARTS, _DEPTH = 2000, 150  # of an expression: parsers allow 200 parentheses within each other
NEGATIVE, ZERO, POSITIVE = 1, 2, 4
"""Signs that an expression can have, to be added up."""
_ANY: Final = NEGATIVE | ZERO | POSITIVE
_CONDITIONS: Final = ("lt", "le", "both")


@dataclass(frozen=True, eq=False)
class Expression:
    """A number, the squared distance, or an operation on expressions."""

    # It raises `InputError` if it is longer or deeper than code is made of.

    operation: str
    terms: tuple[Expression, ...] = ()
    value: Number = Fraction(0)
    parts: int = field(init=False, repr=False)
    depth: int = field(init=False, repr=False)

    __array_priority__ = 100

    def __post_init__(self) -> None:
        for name, count, most in (
            ("parts", 1 + sum(term.parts for term in self.terms), _PARTS),
            ("depth", 1 + max((term.depth for term in self.terms), default=0), _DEPTH),
        ):
            if count > most:
                what = "operations" if name == "parts" else "operations within each other"
                raise InputError(f"kernel: its formula has more than {most} {what}; write it shorter")
            object.__setattr__(self, name, count)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        return (self.operation, self.value, *(term.key for term in self.terms))

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
        return _joined("add", self, other)

    __radd__ = __add__

    def __mul__(self, other: Any) -> Expression:
        return _joined("multiply", self, other)

    __rmul__ = __mul__

    def __neg__(self) -> Expression:
        return self * -1

    def __pos__(self) -> Expression:
        return self

    def __sub__(self, other: Any) -> Expression:
        return self + -as_expression(other)

    def __rsub__(self, other: Any) -> Expression:
        return _joined("add", -self, other)

    def __truediv__(self, other: Any) -> Expression:
        return _joined("multiply", self, as_expression(other) ** Fraction(-1))

    def __rtruediv__(self, other: Any) -> Expression:
        return _joined("multiply", self ** Fraction(-1), other)

    def __pow__(self, other: Any) -> Expression:
        power, base = numeric(other), numeric(self)
        return Expression("power", (base,), power.value) if power.is_number else Expression("pow", (base, power))

    def __rpow__(self, other: Any) -> Expression:
        return as_expression(other) ** self

    def __abs__(self) -> Expression:
        return _joined("abs", self)

    def __lt__(self, other: Any) -> Expression:
        return _joined("lt", self, other)

    def __le__(self, other: Any) -> Expression:
        return _joined("le", self, other)

    def __gt__(self, other: Any) -> Expression:
        return _joined("lt", other, self)

    def __ge__(self, other: Any) -> Expression:
        return _joined("le", other, self)

    def __and__(self, other: Any) -> Expression:
        return Expression("both", (_condition(self), _condition(other)))

    __rand__ = __and__

    def __bool__(self) -> bool:
        raise InputError(
            "kernel: its formula decides by `if` on distances, of which there are many at a time; use where(condition, "
            "a, b), as for arrays"
        )

    def __float__(self) -> float:
        raise InputError("kernel: its formula takes distances as single numbers (math.exp?); use functions of arrays")

    @property
    def is_number(self) -> bool:
        return self.operation == "number"

    @cached_property
    def signs(self) -> int:
        """The signs that it can have where it is a number, as is proved from its parts."""
        return _signs(self)

    @property
    def positive(self) -> bool:
        return self.signs == POSITIVE

    @property
    def nonnegative(self) -> bool:
        return not self.signs & NEGATIVE

    @cached_property
    def finite(self) -> bool:
        return all(term.finite for term in self.terms) and _stays_finite(self)

    def __str__(self) -> str:
        """Return the expression in prefix form, with its numbers."""
        form, numbers = structure(self)
        return re.sub(r"\bc(\d+)\b", lambda found: repr(numbers[int(found[1])]), form)


SQUARED: Final = Expression("squared")


def number(value: Number) -> Expression:
    if isinstance(value, float):
        if math.isnan(value):
            raise InputError("kernel: its formula has a constant that is not a number")
        return Expression("number", value=value)
    bits = value.numerator.bit_length(), value.denominator.bit_length()
    if max(bits) > _DIGITS:
        value = _rounded(value, bits[0] - bits[1])
    return Expression("number", value=value)


def _rounded(value: Fraction, exponent: int) -> Fraction:
    """Return a number near 2^exponent, rounded to the digits that are kept."""
    if abs(exponent) > _DIGITS - _KEPT:
        raise out_of_range()
    shift = _KEPT - exponent
    over, under = (max(shift, 0), max(-shift, 0))
    digits = (value.numerator << over) // (value.denominator << under)
    return Fraction(digits << under, 1 << over)


def out_of_range() -> InputError:
    return InputError("kernel: its formula has a number that overflows, or is too small for one; scale it")


def as_float(value: Number) -> float:
    try:
        return float(value)
    except OverflowError:
        raise out_of_range() from None


def as_expression(value: Any) -> Expression:
    if isinstance(value, Expression):
        return value
    if isinstance(value, Fraction | int):
        return number(Fraction(value))
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"kernel: its formula uses {type(value).__name__}, expected numbers and distances") from error
    return number(found if math.isinf(found) or math.isnan(found) else Fraction(found))


def _unknown(name: str) -> str:
    return (
        f"kernel: its formula uses {name}, which compiled sums do not have; they have {', '.join(sorted(NAMES))}. "
        "A subclass of nlflow.kernels.RadialKernel may use any other: it is kept as a matrix (method='dense')"
    )


def numeric(value: Any) -> Expression:
    a = as_expression(value)
    return Expression("where", (a, number(Fraction(1)), number(Fraction(0)))) if a.operation in _CONDITIONS else a


def _condition(value: Any) -> Expression:
    a = as_expression(value)
    if a.operation not in _CONDITIONS:
        raise InputError("kernel: its formula has a condition that compares nothing; expected one such as r < 1")
    return a


def _joined(operation: str, *terms: Any) -> Expression:
    return Expression(operation, tuple(numeric(term) for term in terms))


# ---- what is proved of an expression


def _signs(a: Expression) -> int:
    if a.is_number:
        return NEGATIVE if a.value < 0 else ZERO if a.value == 0 else POSITIVE
    terms = [term.signs for term in a.terms]
    rule = _SIGNS.get(a.operation)
    return _ANY if rule is None else rule(a, *terms)


def _of_sum(a: Expression, one: int, other: int) -> int:
    both = one | other
    if not both & NEGATIVE:
        return POSITIVE if POSITIVE in (one, other) else both
    if not both & POSITIVE:
        return NEGATIVE if NEGATIVE in (one, other) else both
    return _ANY


def _of_product(a: Expression, one: int, other: int) -> int:
    found = ZERO if (one | other) & ZERO else 0
    if a.terms[0] is a.terms[1]:
        return found | (POSITIVE if one & (NEGATIVE | POSITIVE) else 0)
    if (one & POSITIVE and other & POSITIVE) or (one & NEGATIVE and other & NEGATIVE):
        found |= POSITIVE
    if (one & POSITIVE and other & NEGATIVE) or (one & NEGATIVE and other & POSITIVE):
        found |= NEGATIVE
    return found


def _of_power(a: Expression, base: int) -> int:
    if a.value == 0:
        return POSITIVE
    found = POSITIVE if base & POSITIVE else 0
    if base & ZERO:
        found |= ZERO if a.value > 0 else POSITIVE | NEGATIVE  # 1/-0 is -infinity
        found &= POSITIVE | ZERO if not base & NEGATIVE else _ANY
    if base & NEGATIVE and is_whole(a.value):
        found |= POSITIVE if is_even(a.value) else NEGATIVE
    return found or _ANY


def _of_least(a: Expression, one: int, other: int) -> int:
    found = NEGATIVE if (one | other) & NEGATIVE else 0
    if (one & ZERO and other & (ZERO | POSITIVE)) or (other & ZERO and one & (ZERO | POSITIVE)):
        found |= ZERO
    return found | (POSITIVE if one & other & POSITIVE else 0)


def _opposite(signs: int) -> int:
    return (signs & ZERO) | (POSITIVE if signs & NEGATIVE else 0) | (NEGATIVE if signs & POSITIVE else 0)


_SIGNS: Final[dict[str, Callable[..., int]]] = {
    "squared": lambda a: ZERO | POSITIVE,
    "parameter": lambda a: POSITIVE,
    "add": _of_sum,
    "multiply": _of_product,
    "power": _of_power,
    "pow": lambda a, base, power: POSITIVE if base == POSITIVE else _ANY if base & NEGATIVE else ZERO | POSITIVE,
    "exp": lambda a, power: POSITIVE if a.terms[0].finite else ZERO | POSITIVE,
    "log1p": lambda a, one: one if not one & NEGATIVE else _ANY,
    "abs": lambda a, one: (one & ZERO) | (POSITIVE if one & (NEGATIVE | POSITIVE) else 0),
    "min": _of_least,
    "max": lambda a, one, other: _opposite(_of_least(a, _opposite(one), _opposite(other))),
    "where": lambda a, condition, one, other: one | other,
}


def is_whole(power: Number) -> bool:
    return isinstance(power, Fraction) and power.denominator == 1


def is_even(power: Number) -> bool:
    return isinstance(power, Fraction) and power.denominator == 1 and power.numerator % 2 == 0


def _stays_finite(a: Expression) -> bool:
    """Return whether an operation on finite numbers gives finite ones."""
    if a.operation == "number":
        return isinstance(a.value, Fraction)
    if a.operation == "power":
        base = a.terms[0].signs
        return (is_whole(a.value) or not base & NEGATIVE) and (a.value > 0 or not base & ZERO)
    if a.operation in ("pow", "log"):
        return a.terms[0].positive
    if a.operation == "log1p":
        return a.terms[0].nonnegative
    return True


# ---- names


def _where(condition: Any, a: Any, b: Any) -> Expression:
    return Expression("where", (_condition(condition), numeric(a), numeric(b)))


NAMES: Final[dict[str, Callable[..., Expression]]] = {
    "sqrt": lambda a: as_expression(a) ** Fraction(1, 2),
    "square": lambda a: as_expression(a) ** 2,
    "pow": lambda a, b: as_expression(a) ** b,
    "exp": lambda a: _joined("exp", a),
    "log": lambda a: _joined("log", a),
    "log1p": lambda a: _joined("log1p", a),
    "abs": lambda a: _joined("abs", a),
    "minimum": lambda a, b: _joined("min", a, b),
    "maximum": lambda a, b: _joined("max", a, b),
    "where": _where,
}
_LIKE: Final[dict[str, Callable[..., Expression]]] = {
    "zeros_like": lambda a, **options: as_expression(0),
    "ones_like": lambda a, **options: as_expression(1),
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
    """Return an expression in prefix notation, with numbers as c0, c1, ..., and these numbers."""
    numbers: list[float] = []

    def written(a: Expression) -> str:
        if a.is_number:
            numbers.append(as_float(a.value))
            return f"c{len(numbers) - 1}"
        name = f"power:{a.value}" if a.operation == "power" else a.operation
        return f"{name}({','.join(map(written, a.terms))})" if a.terms else name

    return written(a), numbers


def value(a: Expression, squared: Array) -> Array:
    # 1/0 is infinite, and the branch of `where` that is not taken may be no number.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return _value(a, squared, namespace(squared))


def _value(a: Expression, squared: Array, xp: Any) -> Array:
    if a.is_number:
        return xp.full_like(squared, as_float(a.value))
    if a.operation == "squared":
        return squared
    terms = [_value(term, squared, xp) for term in a.terms]
    if a.operation == "power":
        return _raised(terms[0], a.value)
    result: Array = {
        "add": lambda: terms[0] + terms[1], "multiply": lambda: terms[0] * terms[1], "pow": lambda: xp.pow(*terms),
        "exp": lambda: xp.exp(terms[0]), "log": lambda: xp.log(terms[0]), "log1p": lambda: xp.log1p(terms[0]),
        "lt": lambda: terms[0] < terms[1], "le": lambda: terms[0] <= terms[1], "both": lambda: terms[0] & terms[1],
        "min": lambda: xp.minimum(*terms), "max": lambda: xp.maximum(*terms), "where": lambda: xp.where(*terms),
        "abs": lambda: xp.abs(terms[0]),
        **dict.fromkeys(("exp2", "exp2_up"), lambda: xp.exp(math.log(2) * terms[0])),
    }[a.operation]()  # fmt: skip
    return result


def _raised(base: Array, power: Number) -> Array:
    if isinstance(power, Fraction) and power.denominator == 2:
        return root(base) if power == Fraction(1, 2) else root(base) ** as_float(power.numerator)
    return root(base, as_float(power)) if 0 < power < 1 else base ** as_float(power)
