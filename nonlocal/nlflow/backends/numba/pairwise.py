"""Weighted sums over all pairs of nodes, with the kernel computed anew for each pair: O(N) memory."""

# A group is summed by one thread, line after line of sources, so that the bits do not depend on the number of threads.
# Within a line terms are added up in the precision of the features, lines in float64. The weights are written by a
# function of each kernel's form, which the loop calls by its address.

import ast
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nlflow.backends.numba import vectors
from nlflow.backends.numba.calls import Callee, caller
from nlflow.backends.numba.loading import compiled, loader, njit
from nlflow.backends.numba.near import boxes_near
from nlflow.backends.numba.vectors import AVX512, BYTES, Vectors, index

DOT_PRODUCT = "exp2(x.y)"
"""The form of a kernel that is 2 to the product of what is compared."""
PERIODIC = "periodic "
"""What the form of a kernel of the distance in a periodic box begins with."""
LINE = 128
"""Sources that a group of queries meets at a time."""
SOURCES = 4
"""Sources that are taken at a time; their number has to be a multiple of it."""
# Vectors of queries at a time: with 32 registers 16 sums are held, with 16 of them 8.
VECTORS = 4 if AVX512 else 2

# Logits are taken relative to a reference that is kept while it serves: weights up to 2^_ABOVE lose nothing, and a sum
# whose largest weight is 2^-_BELOW is as exact as one of which it is 1.
_ABOVE, _BELOW = 8.0, 30.0
_HIGHEST = {4: 100.0, 8: 1000.0}  # powers of two that are taken


def group(dtype: Any) -> int:
    return int(VECTORS * BYTES // np.dtype(dtype).itemsize)


def data(context: Any, builder: Any, signature: Any, arguments: Any, place: int) -> Any:
    return context.make_array(signature.args[place])(context, builder, arguments[place]).data


@intrinsic
def address_of(typingctx, array):
    def codegen(context, builder, signature, arguments):
        return builder.ptrtoint(data(context, builder, signature, arguments, 0), cgutils.intp_t)

    return types.intp(array), codegen


@intrinsic(prefer_literal=True)
def _weigh(typingctx, form, kind, d, count, x, y, table, reference, numbers, top):
    """Write the weights between a group of queries and a line of sources, at addresses of numbers of a kind."""
    # `form` is the structure of k as an expression of the squared distance (`nlflow.kernels.expressions`), whose
    # numbers are in `numbers`; or `DOT_PRODUCT`, for 2^(x.y - reference), of which `top` gets the largest exponents.
    # After `PERIODIC` distances are those to the nearest image: at `reference` are the periods, and their inverses.
    signature = types.void(form, kind, d, count, x, y, table, reference, numbers, top)
    written = form.literal_value
    dots, periodic = written == DOT_PRODUCT, written.startswith(PERIODIC)

    def codegen(context, builder, signature, arguments):
        _, _, d, count, *addresses = arguments
        v = Vectors(builder, kind.literal_value)
        x, y, table, reference, numbers, top = (builder.inttoptr(a, v.number.as_pointer()) for a in addresses)
        queries = [index(q * v.lanes) for q in range(VECTORS)]
        width = index(VECTORS * v.lanes)
        if dots:
            first = [builder.fneg(v.load(reference, q)) for q in queries] * SOURCES
            highest = [v.constant(-1e30)] * VECTORS
            weight: Any = partial(map, v.exp2)
        else:
            first, highest = [v.constant(0.0)] * (VECTORS * SOURCES), []
            weight = _Written(v, written.removeprefix(PERIODIC), numbers)

        def sources(j, highest):
            rows = [builder.mul(builder.add(j, index(k)), d) for k in range(SOURCES)]

            def coordinate(c, terms):
                own = [v.load(x, builder.add(builder.mul(c, width), q)) for q in queries]
                result, terms = [], iter(terms)
                box = nearest_image(v, reference, c, d) if periodic else None
                for row in rows:
                    other = v.broadcast_from(y, builder.add(row, c))
                    for here in own:
                        gap = here if dots else builder.fsub(here, other)
                        gap = gap if box is None else box(gap)
                        result.append(v.multiply_add(gap, other if dots else gap, next(terms)))
                return result

            terms = v.repeat(d, 1, first, coordinate)
            weights = iter(weight(terms))
            for k in range(SOURCES):
                row = builder.mul(builder.add(j, index(k)), width)
                for i, q in enumerate(queries):
                    if dots:
                        highest = [*highest[:i], v.larger(terms[k * VECTORS + i], highest[i]), *highest[i + 1 :]]
                    v.store(next(weights), table, builder.add(row, q))
            return highest

        for q, value in zip(queries, v.repeat(count, SOURCES, highest, sources), strict=False):
            v.store(value, top, q)
        return context.get_dummy_value()

    return signature, codegen


def nearest_image(v: Vectors, periods: Any, c: Any, d: Any) -> Callable[[Any], Any]:
    """Return what turns a difference of coordinates into that to the nearest image; a period of 0 means none."""
    # At `periods` are those of the d coordinates, and then their inverses.
    less = v.builder.fneg(v.broadcast_from(periods, c))
    inverse = v.broadcast_from(periods, v.builder.add(d, c))

    def nearest(gap: Any) -> Any:
        return v.multiply_add(v.rounded(v.builder.fmul(gap, inverse)), less, gap)

    return nearest


class _Written:
    """Writes the instructions of an expression of the squared distance; its numbers are loaded at once."""

    # - v : Vectors
    # - form : str; In prefix notation.
    # - numbers : pointer

    def __init__(self, v: Vectors, form: str, numbers: Any) -> None:
        tree = ast.parse(re.sub(r"power:([^(]*)", r"power['\1']", form), mode="eval").body
        self._v, self._tree = v, tree
        self._inverse = "power:-1/2" in form  # then roots come of it
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and re.fullmatch(r"c\d+", node.id)}
        self._numbers = {name: v.broadcast_from(numbers, index(int(name[1:]))) for name in sorted(names)}

    def __call__(self, squared: list[Any]) -> Iterator[Any]:
        """Yield the value at each of the squared distances, which is to be stored before the next is asked for.

        What takes long, or is short and comes first, is written for all of them before: so they overlap.
        """
        known = [dict(self._numbers, squared=t) for t in squared]
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                for one in known:
                    self._value(node, one)
        if isinstance(self._tree, ast.Call) and ast.unparse(self._tree.func) == "exp2":
            for one in known:
                self._value(self._tree.args[0], one)
        return (self._value(self._tree, one) for one in known)

    def _value(self, node: ast.expr, known: dict[str, Any]) -> Any:
        name = ast.unparse(node)
        if name not in known:  # what occurs twice is written once
            assert isinstance(node, ast.Call)
            known[name] = self._operation(node.func, [self._value(term, known) for term in node.args])
        return known[name]

    def _operation(self, function: ast.expr, terms: list[Any]) -> Any:
        v = self._v
        if isinstance(function, ast.Subscript):
            power = Fraction(ast.literal_eval(function.slice))
            if self._inverse and abs(power) == Fraction(1, 2):
                inverse = v.inverse_root(terms[0])
                return inverse if power < 0 else v.builder.fmul(terms[0], inverse)
            return v.power(terms[0], power)
        known: dict[str, Callable[..., Any]] = {
            "add": v.builder.fadd, "multiply": v.builder.fmul, "exp2": v.exp2, "where": v.where, "max": v.larger,
            "min": v.smaller, "both": v.builder.and_, "lt": partial(v.compare, "<"), "le": partial(v.compare, "<="),
            "log": self._logarithm, "abs": v.magnitude,
            "exp2_up": lambda t: v.exp2(v.smaller(t, v.constant(_HIGHEST[v.size]))),
        }  # fmt: skip
        return known[function.id](*terms)  # type: ignore[attr-defined]

    def _logarithm(self, a: Any) -> Any:
        """Return log a, -infinity for what is not above the least normal number."""
        v = self._v
        log = v.builder.fmul(v.constant(math.log(2)), v.log2(a))
        return v.where(v.compare(">", a, v.constant(float(np.finfo(f"f{v.size}").tiny))), log, v.constant(-math.inf))


@cache
def _writer() -> bytes:
    return Path(vectors.__file__).read_bytes()


@cache
def weigher(form: str, dtype: str) -> int:
    """Return the address of the function that writes the weights of a formula."""
    bits = 32 if dtype == "float32" else 64

    # Addresses, since an array is seven arguments, and there are thousands of calls.
    def weigh(d, count, x, y, table, reference, numbers, top):
        _weigh(form, bits, d, count, x, y, table, reference, numbers, top)

    # Symbols and files of the cache are named after the form, and after what writes the code: Numba looks for changes
    # in this file alone.
    weigh.__name__ = weigh.__qualname__ = f"weigh_{bits}_{hashlib.sha256(form.encode() + _writer()).hexdigest()[:16]}"
    weigh.__module__ = __name__
    callee = Callee(njit(cache=True)(weigh), (types.intp,) * 8)
    compiled(callee.function, types.void(*callee.arguments))
    _kept.append(callee)
    return callee.address()


_kept: list[Callee] = []  # what is called by address has to stay
call = caller()
"""Call what `weigher` compiled, by its address."""


def _adder(channels: int, at_once: int) -> Any:
    """Return an instruction that multiplies a table of weights with a few channels of the values.

    `at_once` sources go to sums of their own, where there are few channels: an addition takes as long as eight can be
    begun.
    """

    @intrinsic
    def add(typingctx, table, count, values, start, first, every, sums):
        signature = types.void(table, count, values, start, first, every, sums)

        def codegen(context, builder, signature, arguments):
            _, count, _, start, first, every, _ = arguments
            v = Vectors(builder, signature.args[0].dtype.bitwidth)
            table, values, sums = (data(context, builder, signature, arguments, i) for i in (0, 2, 6))
            queries, width = [index(q * v.lanes) for q in range(VECTORS)], index(VECTORS * v.lanes)

            def sources(j, state):
                result, state = [], iter(state)
                for k in range(at_once):
                    here = builder.add(j, index(k))
                    weights = [v.load(table, builder.add(builder.mul(here, width), q)) for q in queries]
                    row = builder.add(builder.mul(builder.add(start, here), every), first)
                    for c in range(channels):
                        value = v.broadcast_from(values, builder.add(row, index(c)))
                        result += [v.multiply_add(w, value, next(state)) for w in weights]
                return result

            zero = v.constant(0.0)
            state = v.repeat(count, at_once, [zero] * (at_once * channels * VECTORS), sources)
            part = channels * VECTORS
            for c in range(channels):
                row = builder.mul(builder.add(first, index(c)), width)
                for i, q in enumerate(queries):
                    total = state[c * VECTORS + i]
                    for k in range(1, at_once):
                        total = builder.fadd(total, state[k * part + c * VECTORS + i])
                    v.store(total, sums, builder.add(row, q))
            return context.get_dummy_value()

        return signature, codegen

    return add


_add_one, _add_two, _add_four = _adder(1, 4), _adder(2, 2), _adder(4, 1)


@njit()
def add_weighted(table, count, values, start, apart, sums):
    """Write ``sum_j table_jq values_(start + j)c``, j < count, to ``sums`` (C, group).

    `count` is a multiple of `SOURCES`. The last channel goes by itself where `apart` is 1.
    """
    # In which order terms are added up depends on how many channels go together, so that one which is there now and
    # then has to go alone: the others keep their bits.
    channels = values.shape[1]
    together = channels - apart
    c = 0
    while c + 4 <= together:
        _add_four(table, count, values, start, c, channels, sums)
        c += 4
    if c + 2 <= together:
        _add_two(table, count, values, start, c, channels, sums)
        c += 2
    while c < channels:
        _add_one(table, count, values, start, c, channels, sums)
        c += 1


@njit()
def scratch(rows, columns, like):
    """Return scratch memory aligned to vectors."""
    room = np.empty(rows * columns + 64 // like.itemsize, like.dtype)
    first = (-room.ctypes.data % 64) // like.itemsize
    return room[first : first + rows * columns].reshape(rows, columns)


@njit()
def _refer(reference, top, first, total):
    """Move references to the largest logit where they do not serve; whether any was moved."""
    moved = False
    for i in range(len(reference)):
        if top[i] > _ABOVE or (first and top[i] < -_BELOW):
            before = np.float64(reference[i])
            reference[i] += top[i]
            # 2^t by the library: t may be anything. There are no sums yet at first, when it may overflow.
            shrink = 0.0 if first else np.exp2(before - reference[i])
            for c in range(total.shape[0]):
                total[c, i] *= shrink
            moved = True
    return moved


@njit(parallel=True, cache=True)
def pair_sums(
    weigh, products, numbers, size, x, y, lows, highs, limits, others_lows, others_highs, others_limits, values, apart,
    sums, peaks,
):  # fmt: skip
    """Sums ``sum_j k(x_i, y_j) values_jc`` for each query."""
    # - weigh : int; Address of what writes the weights (`weigher`).
    # - products : bool; Whether they are those of `DOT_PRODUCT`.
    # - numbers : (n,); Of the kernel's formula.
    # - size : int; Of a block, a multiple of `group`.
    # - x : (d, M); Queries, M a multiple of `group`; for the dot product times the kernel's scale times log2(e).
    # - y : (N, d); Sources, N a multiple of `SOURCES`.
    # - lows, highs : (blocks, axes); Boxes around the blocks of queries, float64.
    # - limits : (blocks,); Two blocks are left out where their boxes are farther apart (squared) than the limits of
    #   both; float64.
    # - others_lows, others_highs, others_limits: Of the sources.
    # - values : (N, C); Times the quadrature weights.
    # - apart : int; 1 where the last channel is that of the degree, which is not always there; else 0.
    # - sums : (M, C); Written, float64; for the dot product over 2^peaks.
    # - peaks : (M,); Written, float64: for the dot product a number near the largest logit of the row, to the base 2,
    #   or between it and 0; 0 for radial kernels.
    d, queries = x.shape
    sources, channels = values.shape
    width, known = VECTORS * BYTES // x.itemsize, address_of(numbers)
    for tile in prange(queries // width):
        begin = tile * width
        own, table = scratch(d, width, x), scratch(LINE, width, x)
        for c in range(d):
            for i in range(width):
                own[c, i] = x[c, begin + i]
        part, total = scratch(channels, width, x), np.zeros((channels, width))
        reference, top = np.zeros(width, x.dtype), np.empty(width, x.dtype)
        here, weights, at, most = address_of(own), address_of(table), address_of(reference), address_of(top)
        mine, first = begin // size, True
        for block in range((sources + size - 1) // size):
            limit = max(limits[mine], others_limits[block])
            if not boxes_near(lows, highs, mine, others_lows, others_highs, block, limit):
                continue
            end = min((block + 1) * size, sources)
            for start in range(block * size, end, LINE):
                count = min(LINE, end - start)
                there = address_of(y) + start * d * y.itemsize
                call(weigh, (d, count, here, there, weights, at, known, most))
                if products and _refer(reference, top, first, total):
                    call(weigh, (d, count, here, there, weights, at, known, most))
                first = False
                add_weighted(table, count, values, start, apart, part)
                for c in range(channels):
                    for i in range(width):
                        total[c, i] += part[c, i]
        for i in range(width):
            peaks[begin + i] = reference[i]
            for c in range(channels):
                sums[begin + i, c] = total[c, i]


_BOXES, _LIMITS = types.float64[:, ::1], types.float64[::1]
loop = loader(
    lambda f: {
        "pair_sums": (
            pair_sums, types.intp, types.boolean, f[::1], types.int64, f[:, ::1], f[:, ::1], _BOXES, _BOXES, _LIMITS,
            _BOXES, _BOXES, _LIMITS, f[:, ::1], types.int64, _BOXES, _LIMITS,
        ),
    }
)  # fmt: skip
"""Loop of a name, for ``float32`` or ``float64``."""
