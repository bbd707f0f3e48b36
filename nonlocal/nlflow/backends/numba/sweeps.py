"""Preconditioned conjugate gradients over the edges of a graph."""

# The system is ``(I - L - L^T) x = b``, scaled to a diagonal of 1, with L the edges to nodes of smaller numbers: node i
# has the edges ``indptr[i] <= e < middle[i]`` to those and ``middle[i] <= e < indptr[i + 1]`` to the others. Weights
# are >= 0, and both kinds come in even numbers, made up by edges of weight 0: pairs of them are summed in two
# registers. The preconditioner is (I - L)(I - L^T). Eisenstat (1981, doi 10.1137/0902001) applies ``(I - L)^-1 (I - L -
# L^T) (I - L^T)^-1`` to p as ``t + (I - L)^-1 (p - t)`` with ``t = (I - L^T)^-1 p``, so that an iteration passes each
# edge once.
#
# Signals are rows of one cache line, in float32: 16 systems side by side. Rows that are not free stay 0.

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from nlflow.backends.numba.loading import loader, njit
from nlflow.backends.numba.vectors import Vectors, index

COLUMNS = 16
"""Systems side by side."""
_BYTES = 4 * COLUMNS
_STRIP = 1024  # rows of which sums are taken in float32


class _Rows:
    """Write instructions on rows of one cache line."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.v = Vectors(builder, 32, _BYTES)
        self._own = context, signature, arguments
        self._steps = [index(k) for k in range(0, COLUMNS, self.v.lanes)]

    def data(self, place: int) -> Any:
        """Return where the numbers of an array argument lie."""
        context, signature, arguments = self._own
        return context.make_array(signature.args[place])(context, self.v.builder, arguments[place]).data

    def load(self, pointer: Any, row: Any) -> list[Any]:
        return [self.v.load(pointer, place) for place in self._places(row)]

    def store(self, values: list[Any], pointer: Any, row: Any) -> None:
        for value, place in zip(values, self._places(row), strict=True):
            self.v.store(value, pointer, place)

    def with_edges(self, values: list[Any], edges: tuple[Any, Any, Any, Any], signal: Any) -> list[Any]:
        """Return the values with ``sum_e weights[e] signal[indices[e]]`` over the edges from the first to the last."""
        builder, v = self.v.builder, self.v
        indices, weights, first, last = edges
        before, some = builder.block, builder.icmp_signed("<", first, last)
        with builder.if_then(some):

            def add(e: Any, state: list[Any]) -> list[Any]:
                row = builder.sext(builder.load(builder.gep(indices, [e])), e.type)
                weight = v.broadcast_from(weights, e)
                return [v.multiply_add(weight, x, s) for x, s in zip(self.load(signal, row), state, strict=True)]

            def pair(at: Any, state: list[Any]) -> list[Any]:
                e, half = builder.add(first, at), len(values)
                return add(e, state[:half]) + add(builder.add(e, index(1)), state[half:])

            nothing = [v.constant(0.0)] * len(values)
            sums = v.repeat(builder.sub(last, first), 2, [*values, *nothing], pair)
            total = [builder.fadd(*both) for both in zip(sums[: len(values)], sums[len(values) :], strict=True)]
            after = builder.block
        result = []
        for value, sum_ in zip(values, total, strict=True):
            either = builder.phi(value.type)
            either.add_incoming(value, before)
            either.add_incoming(sum_, after)
            result.append(either)
        return result

    def _places(self, row: Any) -> list[Any]:
        start = self.v.builder.mul(row, index(COLUMNS))
        return [self.v.builder.add(start, step) for step in self._steps]


@intrinsic
def _back(typingctx, indices, weights, first, last, row, r, beta, p, t):
    """Write ``p_i = r_i + beta p_i`` and ``t_i = p_i + sum_e weights[e] t[indices[e]]``."""
    signature = types.void(indices, weights, first, last, row, r, beta, p, t)

    def codegen(context, builder, signature, arguments):
        rows, row = _Rows(context, builder, signature, arguments), arguments[4]
        indices, weights, r, beta, p, t = (rows.data(i) for i in (0, 1, 5, 6, 7, 8))
        terms = zip(rows.load(beta, index(0)), rows.load(p, row), rows.load(r, row), strict=True)
        direction = [rows.v.multiply_add(*three) for three in terms]
        rows.store(direction, p, row)
        rows.store(rows.with_edges(direction, (indices, weights, arguments[2], arguments[3]), t), t, row)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _forth(typingctx, indices, weights, first, last, row, p, t, q, products):
    """Write ``q_i = p_i - t_i + sum_e weights[e] q[indices[e]]``, and add ``p_i (t_i + q_i)`` to the products."""
    signature = types.void(indices, weights, first, last, row, p, t, q, products)

    def codegen(context, builder, signature, arguments):
        rows, row = _Rows(context, builder, signature, arguments), arguments[4]
        indices, weights, p, t, q, products = (rows.data(i) for i in (0, 1, 5, 6, 7, 8))
        direction, there = rows.load(p, row), rows.load(t, row)
        begun = [builder.fsub(a, b) for a, b in zip(direction, there, strict=True)]
        ended = rows.with_edges(begun, (indices, weights, arguments[2], arguments[3]), q)
        rows.store(ended, q, row)
        terms = zip(direction, there, ended, rows.load(products, index(0)), strict=True)
        rows.store([rows.v.multiply_add(a, builder.fadd(b, c), s) for a, b, c, s in terms], products, index(0))
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _move(typingctx, first, last, alpha, x, t, r, q, squares):
    """Write ``x += alpha t`` and ``r -= alpha (t + q)`` for rows, at least one, and add ``r^2`` to the squares."""
    signature = types.void(first, last, alpha, x, t, r, q, squares)

    def codegen(context, builder, signature, arguments):
        rows, (first, last) = _Rows(context, builder, signature, arguments), arguments[:2]
        alpha, x, t, r, q, squares = (rows.data(i) for i in range(2, 8))
        v, step = rows.v, rows.load(alpha, index(0))

        def one(at, state):
            row = builder.add(first, at)
            there = rows.load(t, row)
            moved = [v.multiply_add(*three) for three in zip(step, there, rows.load(x, row), strict=True)]
            rows.store(moved, x, row)
            left = []
            for a, b, c, d in zip(step, there, rows.load(q, row), rows.load(r, row), strict=True):
                left.append(builder.fsub(d, builder.fmul(a, builder.fadd(b, c))))
            rows.store(left, r, row)
            return [v.multiply_add(a, a, s) for a, s in zip(left, state, strict=True)]

        rows.store(v.repeat(builder.sub(last, first), 1, rows.load(squares, index(0)), one), squares, index(0))
        return context.get_dummy_value()

    return signature, codegen


@njit()
def _moved(alpha, x, t, r, q, part, squares):
    """Move x and r, and write the sums of ``r^2`` to ``squares``, in float64."""
    squares[:] = 0
    for start in range(0, x.shape[0], _STRIP):
        part[:] = 0
        _move(start, min(start + _STRIP, x.shape[0]), alpha, x, t, r, q, part)
        for c in range(COLUMNS):
            squares[c] += part[c]


@njit()
def _swept(indptr, middle, indices, weights, free, p, t, q, part, products):
    """Write q from p and t, and the sums of ``p (t + q)`` to ``products``, in float64."""
    products[:] = 0
    for start in range(0, p.shape[0], _STRIP):
        part[:] = 0
        for i in range(start, min(start + _STRIP, p.shape[0])):
            if free[i]:
                _forth(indices, weights, indptr[i], middle[i], i, p, t, q, part)
        for c in range(COLUMNS):
            products[c] += part[c]


@njit(cache=True)
def begin(indptr, middle, indices, weights, free, b, x, r, squares):
    """Write ``r = (I - L)^-1 b``, ``x = 0`` and the sums of ``r^2``."""
    # - indptr, middle : (N + 1,), (N,)
    # - indices, weights : (edges,)
    # - free : (N,)
    # - b, x, r : (N, 16)
    # - squares : (16,)
    part, still = np.zeros((2, COLUMNS), np.float32)
    x[:] = 0
    _swept(indptr, middle, indices, weights, free, b, x, r, part, squares)
    _moved(still, x, x, r, x, part, squares)


@njit(cache=True)
def iterate(indptr, middle, indices, weights, free, x, r, p, t, q, squares, beta, count, least, taken):
    """Take up to ``count`` iterations, until all ``squares`` are below ``least``."""
    # - x, r, p, t, q : (N, 16); The solution, its residual times (I - L)^-1, the direction, and two that are 0 at
    #   first.
    # - squares, least : (16,); Of r, and those that are asked for.
    # - beta : (16,); Of the next direction; 0 at first.
    # - taken : (1,); Written: the number of iterations.
    part = np.zeros(COLUMNS, np.float32)
    alpha = np.zeros(COLUMNS, np.float32)
    products = np.zeros(COLUMNS)
    before = np.zeros(COLUMNS)
    for done in range(count):
        left = False
        for c in range(COLUMNS):
            left |= squares[c] > least[c]
        taken[0] = done
        if not left:
            return
        for i in range(x.shape[0] - 1, -1, -1):
            if free[i]:
                _back(indices, weights, middle[i], indptr[i + 1], i, r, beta, p, t)
        _swept(indptr, middle, indices, weights, free, p, t, q, part, products)
        for c in range(COLUMNS):
            before[c] = squares[c]
            # A system that is solved stays where it is.
            alpha[c] = squares[c] / products[c] if products[c] > 0 and squares[c] > least[c] else 0
        _moved(alpha, x, t, r, q, part, squares)
        for c in range(COLUMNS):
            beta[c] = squares[c] / before[c] if before[c] > 0 else 0
    taken[0] = count


_ROWS, _ENDS, _NUMBERS, _FREE = types.int64[::1], types.int32[::1], types.float64[::1], types.boolean[::1]
loop = loader(
    lambda f: {
        "begin": (begin, _ROWS, _ROWS, _ENDS, f[::1], _FREE, *(f[:, ::1],) * 3, _NUMBERS),
        "iterate": (
            iterate, _ROWS, _ROWS, _ENDS, f[::1], _FREE, *(f[:, ::1],) * 5, _NUMBERS, f[::1], types.int64, _NUMBERS,
            _ROWS,
        ),
    }
)  # fmt: skip
"""Loop of a name, for ``float32``."""
