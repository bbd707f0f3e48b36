"""Forces between all pairs of particles, in open space or to the nearest image in a periodic box."""

# Differences of a pair and of its reverse have the same bits, with opposite signs: what particles do to each other
# cancels but for the rounding of the sums.

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic

from nlflow.backends.numba.loading import loader, njit
from nlflow.backends.numba.pairwise import (
    LINE,
    VECTORS,
    add_weighted,
    address_of,
    call,
    data,
    nearest_image,
    scratch,
)
from nlflow.backends.numba.vectors import BYTES, Vectors, index


def _puller(periodic: bool, reflects: bool) -> Any:
    """Return an instruction that multiplies a table of weights with the differences of one coordinate."""
    # With `reflects`, what a group does to each source is subtracted from the sum of that.
    at_once = 2  # sources, whose sums are kept apart: an addition takes as long as eight can be begun

    @intrinsic
    def pull(typingctx, table, count, own, y, start, c, d, periods, weights, masses, sums, others):
        signature = types.void(table, count, own, y, start, c, d, periods, weights, masses, sums, others)

        def codegen(context, builder, signature, arguments):
            _, count, _, _, start, c, d, periods, *_ = arguments
            v = Vectors(builder, signature.args[0].dtype.bitwidth)
            table, own, y, weights, masses, sums, others = (
                data(context, builder, signature, arguments, i) for i in (0, 2, 3, 8, 9, 10, 11)
            )
            width, queries = index(VECTORS * v.lanes), [index(q * v.lanes) for q in range(VECTORS)]
            row = builder.mul(c, width)
            here = [v.load(own, builder.add(row, q)) for q in queries]
            mass = [v.load(masses, q) for q in queries] if reflects else []
            box = nearest_image(v, builder.inttoptr(periods, v.number.as_pointer()), c, d) if periodic else None

            def sources(j, state):
                result = []
                for k in range(at_once):
                    place = builder.add(j, index(k))
                    source = builder.add(start, place)
                    other = v.broadcast_from(y, builder.add(builder.mul(source, d), c))
                    weight, first, reflected = v.broadcast_from(weights, source), builder.mul(place, width), None
                    for i, q in enumerate(queries):
                        gap = builder.fsub(here[i], other)
                        gap = gap if box is None else box(gap)
                        force = builder.fmul(v.load(table, builder.add(first, q)), gap)
                        result.append(v.multiply_add(force, weight, state[k * VECTORS + i]))
                        if reflects and reflected is None:
                            reflected = builder.fmul(force, mass[i])
                        elif reflects:
                            reflected = v.multiply_add(force, mass[i], reflected)
                    if reflects:
                        total = (
                            builder.fpext(v.total(reflected), ir.DoubleType()) if v.size == 4 else v.total(reflected)
                        )
                        there = builder.gep(others, [builder.add(builder.mul(source, d), c)])
                        builder.store(builder.fsub(builder.load(there), total), there)
                return result

            found = v.repeat(count, at_once, [v.constant(0.0)] * (at_once * VECTORS), sources)
            for i, q in enumerate(queries):
                v.store(builder.fadd(found[i], found[VECTORS + i]), sums, builder.add(row, q))
            return context.get_dummy_value()

        return signature, codegen

    return pull


_pull, _pull_in_box = _puller(False, False), _puller(True, False)
_pull_both, _pull_both_in_box = _puller(False, True), _puller(True, True)


@njit(inline="always")
def _images_near(lows, highs, own, others_lows, others_highs, other, periods, limit):
    """Whether two boxes, or images of them, come within ``limit`` (squared) of each other."""
    square = 0.0
    for c in range(lows.shape[1]):
        middle = (lows[own, c] + highs[own, c] - others_lows[other, c] - others_highs[other, c]) / 2
        if periods[c] > 0:
            middle -= periods[c] * np.rint(middle / periods[c])
        sides = (highs[own, c] - lows[own, c] + others_highs[other, c] - others_lows[other, c]) / 2
        gap = max(abs(middle) - sides, 0.0)
        square += gap * gap
        if square > limit:
            return False
    return True


@njit(parallel=True, cache=True)
def pair_fields(
    weigh, pulls, periodic, numbers, periods, axes, size, x, y, lows, highs, others_lows, others_highs, limit, values,
    sums,
):  # fmt: skip
    """Sums ``sum_j g_ij values_jc``, or with `pulls` ``sum_j g_ij values_j0 (x_i - y_j)``, for each query."""
    # - weigh : int; Address of what writes g of the squared distance (`nlflow.backends.numba.pairwise.weigher`).
    # - pulls, periodic : bool; Whether differences are summed, and whether they are those to the nearest image.
    # - numbers : (n,); Of the formula.
    # - periods : (2 d,); Of the coordinates, 0 for none, and their inverses.
    # - axes : (axes,); Periods along the axes of the boxes, float64.
    # - size : int; Of a block, a multiple of `group`.
    # - x : (d, M); Queries, M a multiple of `group`.
    # - y : (N, d); Sources, N a multiple of `SOURCES`.
    # - lows, highs, others_lows, others_highs : (blocks, axes); Boxes around blocks of queries and sources, float64.
    # - limit : float; Squared distance beyond which two boxes are left out.
    # - values : (N, C); 0 for sources that fill up.
    # - sums : (M, C) or (M, d); Written, float64.
    d, queries = x.shape
    sources, columns = len(y), sums.shape[1]
    width, known, box = VECTORS * BYTES // x.itemsize, address_of(numbers), address_of(periods)
    for tile in prange(queries // width):
        begin = tile * width
        own, table = scratch(d, width, x), scratch(LINE, width, x)
        for c in range(d):
            for i in range(width):
                own[c, i] = x[c, begin + i]
        part, total, top = scratch(columns, width, x), np.zeros((columns, width)), np.empty(width, x.dtype)
        here, weights, most = address_of(own), address_of(table), address_of(top)
        mine = begin // size
        for block in range((sources + size - 1) // size):
            if not _images_near(lows, highs, mine, others_lows, others_highs, block, axes, limit):
                continue
            end = min((block + 1) * size, sources)
            for start in range(block * size, end, LINE):
                count = min(LINE, end - start)
                there = address_of(y) + start * d * y.itemsize
                call(weigh, (d, count, here, there, weights, box, known, most))
                if pulls:
                    for c in range(d):
                        if periodic:
                            _pull_in_box(table, count, own, y, start, c, d, box, values, top, part, sums)
                        else:
                            _pull(table, count, own, y, start, c, d, box, values, top, part, sums)
                else:
                    add_weighted(table, count, values, start, 0, part)
                for c in range(columns):
                    for i in range(width):
                        total[c, i] += part[c, i]
        for i in range(width):
            for c in range(columns):
                sums[begin + i, c] = total[c, i]


@njit(parallel=True, cache=True)
def mutual_fields(weigh, periodic, numbers, periods, axes, size, x, y, lows, highs, limit, weights, sums):
    """Sums ``sum_j g_ij weights_j (y_i - y_j)`` for each point; g of a pair is computed once for both its points."""
    # - weigh, periodic, numbers, periods, axes, size, lows, highs, limit: See `pair_fields`; `size` is at most `LINE`.
    # - x : (d, N)
    # - y : (N, d); The same points, N a multiple of `size`.
    # - weights : (N, 1); 0 for points that fill up.
    # - sums : (P, N, d); Parts of the sums, 0 before, float64.
    d, count = x.shape
    blocks = count // size
    width, known, box = VECTORS * BYTES // x.itemsize, address_of(numbers), address_of(periods)
    for number in prange(len(sums)):
        result = sums[number]
        own, table = scratch(d, width, x), scratch(LINE, width, x)
        part, total, mass = scratch(d, width, x), np.zeros((d, width)), np.empty(width, x.dtype)
        here, at = address_of(own), address_of(table)
        for mine in range(number, blocks, len(sums)):
            for begin in range(mine * size, (mine + 1) * size, width):
                for i in range(width):
                    mass[i] = weights[begin + i, 0]
                    for c in range(d):
                        own[c, i] = x[c, begin + i]
                        total[c, i] = 0
                for block in range(mine, blocks):
                    if not _images_near(lows, highs, mine, lows, highs, block, axes, limit):
                        continue
                    start = block * size
                    call(weigh, (d, size, here, address_of(y) + start * d * y.itemsize, at, box, known, here))
                    for c in range(d):
                        if block == mine:
                            if periodic:
                                _pull_in_box(table, size, own, y, start, c, d, box, weights, mass, part, result)
                            else:
                                _pull(table, size, own, y, start, c, d, box, weights, mass, part, result)
                        elif periodic:
                            _pull_both_in_box(table, size, own, y, start, c, d, box, weights, mass, part, result)
                        else:
                            _pull_both(table, size, own, y, start, c, d, box, weights, mass, part, result)
                        for i in range(width):
                            total[c, i] += part[c, i]
                for i in range(width):
                    for c in range(d):
                        result[begin + i, c] += total[c, i]


_BOXES, _BOX = types.float64[:, ::1], types.float64[::1]
loop = loader(
    lambda f: {
        "pair_fields": (
            pair_fields, types.intp, types.boolean, types.boolean, f[::1], f[::1], _BOX, types.int64, f[:, ::1],
            f[:, ::1], _BOXES, _BOXES, _BOXES, _BOXES, types.float64, f[:, ::1], _BOXES,
        ),
        "mutual_fields": (
            mutual_fields, types.intp, types.boolean, f[::1], f[::1], _BOX, types.int64, f[:, ::1], f[:, ::1], _BOXES,
            _BOXES, types.float64, f[:, ::1], types.float64[:, :, ::1],
        ),
    }
)  # fmt: skip
"""Loop of a name, for ``float32`` or ``float64``."""
