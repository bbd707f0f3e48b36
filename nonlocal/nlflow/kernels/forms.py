"""From log k to k and back, and from text to expressions.

`traced` calls a formula with a symbol in place of squared distances. `weight` turns log k into k: products of powers
and of one exponential, without logarithms where there need be none.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

from nlflow.errors import InputError
from nlflow.kernels.expressions import NAMES, SQUARED, Expression, Number, as_expression, number

_LOG2E: Final = Fraction("1.4426950408889634073599246810018921374266459541530")
_ZERO: Final = as_expression(0)
_ONE: Final = as_expression(1)


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
    return factors * NAMES["exp"](exponent)


def _factors(log: Expression, power: Number = Fraction(1)) -> tuple[Expression, Expression]:
    """Return what exp(power log) is a product of: an expression, and the exponent of exp."""
    if log.operation == "add":
        (a, b), (c, d) = (_factors(term, power) for term in log.terms)
        return a * c, b + d
    if log.operation == "multiply" and log.terms[1].is_number and isinstance(log.terms[1].value, Fraction):
        return _factors(log.terms[0], power * log.terms[1].value)
    if log.operation == "log":
        return NAMES["pow"](log.terms[0], number(power)), _ZERO
    if log.operation == "where":
        condition, *others = log.terms
        return NAMES["where"](condition, *(_joined(*_factors(other, power)) for other in others)), _ZERO
    return _ONE, log * number(power)


def _base_two(a: Expression) -> Expression:
    terms = tuple(_base_two(term) for term in a.terms)
    if a.operation == "exp":
        return Expression("exp2", (terms[0] * number(_LOG2E),))
    return Expression(a.operation, terms, a.value)


def logarithm(k: Expression) -> Expression:
    """Return the logarithm of an expression, taken of factors and powers one by one, so that it does not underflow."""
    if k.operation == "multiply":
        return logarithm(k.terms[0]) + logarithm(k.terms[1])
    if k.operation == "power":
        return logarithm(k.terms[0]) * number(k.value)
    if k.operation == "exp":
        return k.terms[0]
    if k.operation == "where":
        return NAMES["where"](k.terms[0], logarithm(k.terms[1]), logarithm(k.terms[2]))
    return NAMES["log"](k)


def rate(k: Expression) -> float | None:
    """Return c where k is 2^(c x) of the squared distance x, a Gaussian; None for others."""
    if k.operation != "exp2" or k.terms[0].operation != "multiply":
        return None
    x, c = k.terms[0].terms
    return float(c.value) if x.operation == "squared" and c.is_number else None


# ---- formulas as text


def parsed(text: str, names: dict[str, Expression]) -> Expression:
    """Return the expression that a text stands for: numbers, `names`, + - * / **, comparisons, and functions.

    Raises
    ------
    InputError
        For a text that is something else. Nothing of it is run.
    """
    try:
        return _parsed(ast.parse(text.strip(), mode="eval").body, text, names)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"k: got {text!r}, which is no expression ({error})") from None


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
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in NAMES and not tree.keywords:
        try:
            return NAMES[tree.func.id](*map(inner, tree.args))
        except TypeError:
            raise InputError(f"k: got {text!r}, in which {tree.func.id} has {len(tree.args)} arguments") from None
    raise InputError(
        f"k: got {text!r}, in which {ast.unparse(tree)!r} is not known; expected numbers, {', '.join(names)}, "
        f"+ - * / **, < <= > >=, and {', '.join(NAMES)}"
    )
