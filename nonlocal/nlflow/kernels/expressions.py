"""Formulas of kernels as expressions of the squared distance, from which code is made.

`traced` calls a formula, which is written for arrays, with a symbol in their place, and keeps what it does. `weight`
turns log k into k: products of powers and of one exponential, without logarithms where there need be none. `structure`
tells the form of an expression from the numbers in it, so that kernels which differ in their parameters alone share
their code. The code itself is made by `nlflow.backends.numba.pairwise`.

Numbers are fractions: what a formula multiplies one after the other is rounded once, and nothing over- or underflows.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from nlflow._array import Array, namespace, root
from nlflow.errors import InputError

_LOG2E: Final = Fraction("1.4426950408889634073599246810018921374266459541530")
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
        """Return the expression in prefix form."""
        return structure(self)[0]


SQUARED: Final = Expression("squared")
_ZERO: Final = Expression("number")
_ONE: Final = Expression("number", value=Fraction(1))


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
        f"kernel: its formula uses {name}, which compiled sums do not have; they have {', '.join(sorted(_NAMES))}. "
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


_NAMES: Final[dict[str, Callable[..., Expression]]] = {
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
FUNCTIONS: Final = SimpleNamespace(
    __name__=__name__,
    **_NAMES,
    **_LIKE,
    power=_NAMES["pow"],
    absolute=_NAMES["abs"],
    inf=math.inf,
    pi=math.pi,
    e=math.e,
)
"""What formulas may use of a namespace of arrays."""
_UFUNCS: Final[dict[str, Callable[..., Expression]]] = {
    **_NAMES,
    "power": _NAMES["pow"],
    "absolute": _NAMES["abs"],
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


# ---- from log k to k and back


def traced(log_profile: Callable[[Any], Any], unit: float = 1.0, squared: Expression = SQUARED) -> Expression:
    """Return log k as an expression of squared distances that were multiplied by unit^2.

    Raises
    ------
    InputError
        When the formula does what no expression can.
    """
    try:
        return as_expression(log_profile(squared / unit / unit))
    except (AttributeError, TypeError) as error:
        raise InputError(f"kernel: its formula cannot be compiled ({error}); method='dense' takes any") from error


def weight(log: Expression) -> Expression:
    """Return exp of an expression, with powers in place of exponentials of logarithms, and 2^x in place of exp(x)."""
    return _base_two(_joined(*_factors(log)))


def _joined(factors: Expression, exponent: Expression) -> Expression:
    return factors * _exp(exponent)


def _factors(log: Expression, power: Number = Fraction(1)) -> tuple[Expression, Expression]:
    """Return what exp(power log) is a product of: an expression, and the exponent of exp."""
    if log.operation == "add":
        (a, b), (c, d) = (_factors(term, power) for term in log.terms)
        return a * c, b + d
    if log.operation == "multiply" and log.terms[1].is_number and isinstance(log.terms[1].value, Fraction):
        return _factors(log.terms[0], power * log.terms[1].value)
    if log.operation == "log":
        return _power(log.terms[0], power), _ZERO
    if log.operation == "where":
        condition, *others = log.terms
        return _where(condition, *(_joined(*_factors(other, power)) for other in others)), _ZERO
    return _ONE, log * Expression("number", value=power)


def _base_two(a: Expression) -> Expression:
    terms = tuple(_base_two(term) for term in a.terms)
    if a.operation == "exp":
        return Expression("exp2", (terms[0] * Expression("number", value=_LOG2E),))
    return Expression(a.operation, terms, a.value)


def logarithm(k: Expression) -> Expression:
    """Return the logarithm of an expression, taken of factors and powers one by one, so that it does not underflow."""
    if k.operation == "multiply":
        return logarithm(k.terms[0]) + logarithm(k.terms[1])
    if k.operation == "power":
        return logarithm(k.terms[0]) * Expression("number", value=k.value)
    if k.operation == "exp":
        return k.terms[0]
    if k.operation == "where":
        return _where(k.terms[0], logarithm(k.terms[1]), logarithm(k.terms[2]))
    return _log(k)


def rate(k: Expression) -> float | None:
    """Return c where k is 2^(c x) of the squared distance x, a Gaussian; None for others."""
    if k.operation != "exp2" or k.terms[0].operation != "multiply":
        return None
    x, c = k.terms[0].terms
    return float(c.value) if x.operation == "squared" and c.is_number else None


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


# ---- formulas as text


def parsed(text: str, names: dict[str, Expression]) -> Expression:
    """Return the expression that a text stands for: numbers, `names`, + - * / **, comparisons, and functions.

    Raises
    ------
    InputError
        For a text that is something else. Nothing of it is run.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"k: got {text!r}, which is no expression ({error})") from None
    return _parsed(tree, text, names)


_BINARY: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b, ast.Pow: lambda a, b: a**b,
    ast.Lt: lambda a, b: a < b, ast.LtE: lambda a, b: a <= b, ast.Gt: lambda a, b: a > b, ast.GtE: lambda a, b: a >= b,
}  # fmt: skip


def _parsed(tree: ast.AST, text: str, names: dict[str, Expression]) -> Expression:
    def inner(part: ast.AST) -> Expression:
        return _parsed(part, text, names)

    if isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
        return as_expression(tree.value)
    if isinstance(tree, ast.Name) and tree.id in names:
        return names[tree.id]
    if isinstance(tree, ast.BinOp) and type(tree.op) in _BINARY:
        result: Expression = _BINARY[type(tree.op)](inner(tree.left), inner(tree.right))
        return result
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub | ast.UAdd):
        return -inner(tree.operand) if isinstance(tree.op, ast.USub) else inner(tree.operand)
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and type(tree.ops[0]) in _BINARY:
        result = _BINARY[type(tree.ops[0])](inner(tree.left), inner(tree.comparators[0]))
        return result
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in _NAMES and not tree.keywords:
        try:
            return _NAMES[tree.func.id](*map(inner, tree.args))
        except TypeError:
            raise InputError(f"k: got {text!r}, in which {tree.func.id} has {len(tree.args)} arguments") from None
    raise InputError(
        f"k: got {text!r}, in which {ast.unparse(tree)!r} is not known; expected numbers, {', '.join(names)}, "
        f"+ - * / **, < <= > >=, and {', '.join(_NAMES)}"
    )
