"""Sums over all pairs with a radial kernel, in one kernel of Triton."""

# Squared distances are formed from differences, so that close points keep their digits; sums of tiles of keys are added
# up with what rounding takes from each (Kahan). The code of a kernel is made from its formula
# (`nlflow.kernels.RadialKernel.weight`), once for each form. With ``TRITON_INTERPRET=1`` it runs on the CPU.

from __future__ import annotations

import ast
import hashlib
import linecache
import math
import re
from contextlib import nullcontext
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nlflow.backends.triton.choice import why_not
from nlflow.errors import InputError
from nlflow.kernels import RadialKernel
from nlflow.kernels.expressions import structure

ROWS, KEYS = 64, 64
"""Queries and keys of a tile."""
MOST_COLUMNS = 64
"""Columns of values that are summed at a time; weights are formed anew for more."""
MOST_FEATURES = 64
"""Beyond, products of matrices form distances in less time than differences."""
_FACTORS = 9  # of a power that is a product
_LEAST_COLUMNS = 16  # what a product of tiles has at least

_SOURCE = """
def radial_sums({numbers}x, y, weights, values, sums, totals, m, n, width, columns, {arguments}):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    item = tl.program_id(2).to(tl.int64)
    x += item * width * m
    y += item * width * n
    weights += item * n
    values += item * columns * n
    here, there = rows < m, channels < columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    lost = tl.zeros((ROWS, COLUMNS), tl.float32)
    degree = tl.zeros((ROWS,), tl.float32)
    degree_lost = tl.zeros((ROWS,), tl.float32)
    for start in range(0, n, KEYS):
        keys = start + tl.arange(0, KEYS)
        inside = keys < n
        squared = tl.zeros((ROWS, KEYS), tl.float32)
        for column in range(0, width):
            own = tl.load(x + column * m + rows, mask=here, other=0.0)
            other = tl.load(y + column * n + keys, mask=inside, other=0.0)
            apart = own[:, None] - other[None, :]
            squared += apart * apart
{code}
        shares = tl.load(weights + keys, mask=inside, other=0.0)
        k = tl.where(inside[None, :], {result}, 0.0) * shares[None, :]
        places = keys.to(tl.int64)[:, None] * columns + channels[None, :]
        v = tl.load(values + places, mask=inside[:, None] & there[None, :], other=0.0)
        part = tl.dot(k, v, input_precision="ieee") - lost
        after = total + part
        lost = (after - total) - part
        total = after
        more = tl.sum(k, axis=1) - degree_lost
        grown = degree + more
        degree_lost = (grown - degree) - more
        degree = grown
    places = (item * m + rows)[:, None] * columns + channels[None, :]
    tl.store(sums + places, total, mask=here[:, None] & there[None, :])
    if tl.program_id(1) == 0:
        tl.store(totals + item * m + rows, degree, mask=here)
"""

_CALLS = {
    "add": "({} + {})", "multiply": "({} * {})", "max": "tl.maximum({}, {})", "min": "tl.minimum({}, {})",
    "lt": "({} < {})", "le": "({} <= {})", "both": "({} & {})", "where": "tl.where({}, {}, {})", "abs": "tl.abs({})",
    "log": "(tl.log2({}) * 0.6931471805599453)", "exp2": "tl.exp2({})", "exp2_up": "tl.exp2(tl.minimum({}, 127.99))",
    "pow": "tl.exp2({1} * tl.log2({0}))",
}  # fmt: skip


def written(form: str) -> tuple[list[str], str, int]:
    """Return the lines of a form, the name of the result, and its numbers."""
    tree = ast.parse(re.sub(r"power:([^(]*)", r"power['\1']", form), mode="eval").body
    known: dict[str, str] = {"squared": "squared"}
    lines: list[str] = []

    def name_of(node: ast.expr) -> str:
        text = ast.unparse(node)
        if isinstance(node, ast.Name):
            return node.id
        if text not in known:  # what occurs twice is computed once
            assert isinstance(node, ast.Call)
            terms = [name_of(term) for term in node.args]
            known[text] = f"t{len(lines)}"
            lines.append(f"{known[text]} = {_operation(node.func, terms)}")
        return known[text]

    result = name_of(tree)
    if not isinstance(tree, ast.Call):  # a number
        result = f"({result} + 0.0 * squared)"
    return lines, result, len(set(re.findall(r"\bc\d+\b", form)))


def _operation(function: ast.expr, terms: list[str]) -> str:
    if isinstance(function, ast.Subscript):
        return _power(terms[0], ast.literal_eval(function.slice))
    return _CALLS[function.id].format(*terms)  # type: ignore[attr-defined]


def _power(base: str, exponent: str) -> str:
    """Return a power: by products and roots for small multiples of 1/4, otherwise by its logarithm."""
    value = Fraction(exponent)
    count = abs(value.numerator)
    if value.denominator not in (1, 2, 4) or count > _FACTORS:
        return f"tl.exp2({float(value)!r} * tl.log2({base}))"
    root = {1: base, 2: f"tl.sqrt_rn({base})", 4: f"tl.sqrt_rn(tl.sqrt_rn({base}))"}[value.denominator]
    power = "(" + " * ".join([root] * count) + ")"
    return f"(1.0 / {power})" if value < 0 else power


def source(form: str) -> str:
    lines, result, count = written(form)
    sizes = ", ".join(f"{name}: tl.constexpr" for name in ("ROWS", "KEYS", "COLUMNS"))
    return _SOURCE.format(
        numbers="".join(f"c{i}, " for i in range(count)), arguments=sizes, result=result,
        code="\n".join(" " * 8 + line for line in lines),
    )  # fmt: skip


def _joined(form: str, numbers: list[float]) -> tuple[str, list[float]]:
    """Return a form whose equal numbers have one name, so that what is made of them is computed once."""
    kept = list(dict.fromkeys(numbers))
    return re.sub(r"\bc(\d+)\b", lambda found: f"c{kept.index(numbers[int(found[1])])}", form), kept


@cache
def compiled(form: str) -> Any:
    import triton
    import triton.language as tl

    text = source(form)
    # Triton reads the source of what it compiles, and so does its cache.
    name = f"<radial sums {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"tl": tl, "__name__": __name__}
    exec(compile(text, name, "exec"), space)  # of our own text: forms have no names but those above
    return triton.jit(space["radial_sums"])


def refusal(kernel: RadialKernel, x: Tensor) -> str:
    """Return why sums of a kernel between such points cannot be computed here, or an empty text."""
    if x.dtype != torch.float32 or x.shape[-1] > MOST_FEATURES:
        return f"Triton kernels are for float32 and {MOST_FEATURES} features at most"
    try:
        kernel.weight()
    except InputError as error:
        return str(error)
    return why_not(x, None)


def radial_sums(kernel: RadialKernel, x: Tensor, y: Tensor, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return sum_j w_j k(x_i, y_j) v_j (..., M, D) and sum_j w_j k(x_i, y_j) (..., M), in float32."""
    # - kernel : RadialKernel; With k = 1 at r = 0.
    # - x, y : tensors of shape (..., M, d), (..., N, d)
    # - weights : tensor of shape (..., N)
    # - values : tensor of shape (..., N, D); D may be 0. All are float32, without derivatives, with the same leading
    #   axes.
    import triton

    form, numbers = _joined(*structure(kernel.weight()))
    leading, (m, width), (n, columns) = x.shape[:-2], x.shape[-2:], values.shape[-2:]
    items = math.prod(leading)
    # Features one after the other, so that those of neighbours are loaded together.
    rows, keys = (t.reshape(items, -1, width).mT.contiguous() for t in (x, y))
    sums, totals = x.new_empty(*leading, m, columns), x.new_empty(*leading, m)
    tile = min(max(_LEAST_COLUMNS, triton.next_power_of_2(max(columns, 1))), MOST_COLUMNS)
    grid = (triton.cdiv(m, ROWS), max(1, triton.cdiv(columns, tile)), items)
    arrays = rows, keys, weights.contiguous(), values.contiguous(), sums, totals
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        compiled(form)[grid](*numbers, *arrays, m, n, width, columns, ROWS=ROWS, KEYS=KEYS, COLUMNS=tile)
    return sums, totals
