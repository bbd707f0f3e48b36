"""From log k to k and back, and from text to expressions."""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

from nlflow.errors import InputError, shortened
from nlflow.kernels import rewriting
from nlflow.kernels.expressions import NAMES, POSITIVE, SQUARED, Expression, Number, as_expression, is_even, number
from nlflow.kernels.rewriting import add, multiply, power, simplified

_LOG2E: Final = Fraction("1.4426950408889634073599246810018921374266459541530")
_ZERO: Final = as_expression(0)
_ONE: Final = as_expression(1)
_LONGEST: Final = 10_000  # characters of a text


def traced(log_profile: Callable[[Any], Any], unit: float = 1.0, squared: Expression = SQUARED) -> Expression:
    """Return log k as an expression of squared distances times unit^2; `InputError` if no expression can be it."""
    return called(
        log_profile, squared / unit / unit, "kernel: its formula cannot be compiled", "method='dense' takes any"
    )


def called(function: Callable[[Any], Any], symbol: Expression, refusal: str, remedy: str) -> Expression:
    try:
        return as_expression(function(symbol))
    except InputError:
        raise
    except Exception as error:  # it is anybody's code
        raise InputError(f"{refusal} ({type(error).__name__}: {shortened(error)}); {remedy}") from error


def weight(log: Expression) -> Expression:
    # Powers stand in place of exponentials of logarithms, and 2^x in place of exp(x).
    return base_two(_joined(*_factors(simplified(log))))


def _joined(factors: Expression, exponent: Expression) -> Expression:
    return multiply(factors, rewriting.exponential(exponent))


def _factors(log: Expression, times: Number = Fraction(1)) -> tuple[Expression, Expression]:
    """Return what exp(times log) is a product of: an expression, and the exponent of exp."""
    # A power of what is negative stands for that of its logarithm, which is no number: `RadialKernel.weight` compares.
    if log.operation == "add":
        (a, b), (c, d) = (_factors(term, times) for term in log.terms)
        return multiply(a, c), add(b, d)
    if log.operation == "multiply" and log.terms[1].is_number and isinstance(log.terms[1].value, Fraction):
        return _factors(log.terms[0], times * log.terms[1].value)
    if log.operation in ("log", "log1p"):
        inner = log.terms[0] if log.operation == "log" else add(log.terms[0], _ONE)
        return power(inner, times), _ZERO
    if log.operation == "where":
        condition, *others = log.terms
        return rewriting.where(condition, *(_joined(*_factors(other, times)) for other in others)), _ZERO
    return _ONE, multiply(log, number(times))


def base_two(a: Expression) -> Expression:
    # Powers that can be > 1 are another operation.
    terms = tuple(base_two(term) for term in a.terms)
    if a.operation == "exp":
        rising = bool(a.terms[0].signs & POSITIVE)
        return Expression("exp2_up" if rising else "exp2", (multiply(terms[0], number(_LOG2E)),))
    if a.operation == "log1p":
        return Expression("log", (add(terms[0], _ONE),))
    return Expression(a.operation, terms, a.value)


def logarithm(k: Expression) -> Expression:
    # The logarithm of a product is the sum of those of factors that are proved to be > 0, and that of all others
    # together: two of them may be negative. It is the sum of all where all are proved to be >= 0.
    if k.operation == "multiply":
        factors = _product(k)
        apart = factors if all(f.nonnegative for f in factors) else [f for f in factors if f.positive]
        together = [f for f in factors if f not in apart]
        logs = [logarithm(f) for f in apart]
        if together:
            rest = together[0]
            for factor in together[1:]:
                rest = multiply(rest, factor)
            logs.append(logarithm(rest) if len(together) == 1 else rewriting.logarithm(rest))
        total = logs[0]
        for log in logs[1:]:
            total = add(total, log)
        return total
    if k.operation == "power":
        base = rewriting.absolute(k.terms[0]) if is_even(k.value) else k.terms[0]
        return multiply(logarithm(base), number(k.value))
    if k.operation == "exp":
        return k.terms[0]
    if k.operation == "where":
        return rewriting.where(k.terms[0], logarithm(k.terms[1]), logarithm(k.terms[2]))
    return rewriting.logarithm(k)


def _product(k: Expression) -> list[Expression]:
    return [f for term in k.terms for f in _product(term)] if k.operation == "multiply" else [k]


def rate(k: Expression) -> float | None:
    if k.operation != "exp2" or k.terms[0].operation != "multiply":
        return None
    x, c = k.terms[0].terms
    return float(c.value) if x.operation == "squared" and c.is_number else None


# ---- formulas as text


def parsed(text: str, names: dict[str, Expression], argument: str = "k") -> Expression:
    if len(text) > _LONGEST:
        raise InputError(
            f"{argument}: got {len(text)} characters, expected at most {_LONGEST}; write it shorter, or as a function"
        )
    try:
        return _parsed(ast.parse(text.strip(), mode="eval").body, text, names, argument)
    except InputError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"{argument}: got {shortened(repr(text))}, which is no expression ({str(error) or 'too deep'})"
        ) from None


_BINARY: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b, ast.Pow: lambda a, b: a**b,
    ast.Lt: lambda a, b: a < b, ast.LtE: lambda a, b: a <= b, ast.Gt: lambda a, b: a > b, ast.GtE: lambda a, b: a >= b,
}  # fmt: skip


def _parsed(tree: ast.AST, text: str, names: dict[str, Expression], argument: str) -> Expression:
    def inner(part: ast.AST) -> Expression:
        return _parsed(part, text, names, argument)

    if isinstance(tree, ast.Constant) and type(tree.value) in (int, float):
        return as_expression(tree.value)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub) and isinstance(tree.operand, ast.Constant):
        return number(-inner(tree.operand).value)
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
            raise InputError(
                f"{argument}: got {shortened(repr(text))}, in which {tree.func.id} has {len(tree.args)} arguments"
            ) from None
    raise InputError(
        f"{argument}: got {shortened(repr(text))}, in which {shortened(ast.unparse(tree))!r} is not known; expected "
        f"numbers, {', '.join(names)}, + - * / **, < <= > >=, and {', '.join(NAMES)}"
    )
