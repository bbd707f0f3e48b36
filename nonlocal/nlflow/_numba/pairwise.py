"""Weighted sums over all pairs of nodes, with the kernel computed anew for each pair: O(N) memory.

Arrays are planar: features are (d, N), values (C, N), best with rows that start at multiples of 64 bytes. Sources are
cut into blocks and queries into tiles, whatever the number of threads; a tile is summed by one thread, block after
block, so the bits do not depend on who does it. Within a block terms are added up in the precision of the features, in
the lanes of a vector, and blocks in float64: the rounding of a sum of a million terms in float32 stays near that of a
few dozen.

Kernels are numbers inside one loop, since a kernel that is passed as a function would be compiled anew in each
process: 0 Gaussian, 1 Laplace, 2 top hat, 3 exponential dot product. Their exponents are to the base 2: ``scale`` holds
what turns a squared distance (or a distance) into one; for the top hat it is the largest squared distance.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numba import njit, prange, types

from nlflow._numba.exponential import FLAGS, exp2, from_ordered_bits, ordered_bits, wide_vectors
from nlflow._numba.loading import compiled

__all__ = ["loop"]

_TILE = 64
_LEFT_OUT = -1.0e30  # the logarithm of a weight that is 0


@njit(fastmath=FLAGS)
def _squares(x, i, y, start, count, out):
    """Squared distances between query i and the sources of a block; four coordinates a pass over ``out``."""
    wide_vectors()
    d = x.shape[0]
    first = (d - 1) % 4 + 1
    x0, y0 = x[0, i], y[0, start : start + count]
    if first == 1:
        for j in range(count):
            out[j] = (x0 - y0[j]) * (x0 - y0[j])
    elif first == 2:
        x1, y1 = x[1, i], y[1, start : start + count]
        for j in range(count):
            out[j] = (x0 - y0[j]) * (x0 - y0[j]) + (x1 - y1[j]) * (x1 - y1[j])
    elif first == 3:
        x1, y1 = x[1, i], y[1, start : start + count]
        x2, y2 = x[2, i], y[2, start : start + count]
        for j in range(count):
            out[j] = (x0 - y0[j]) * (x0 - y0[j]) + (x1 - y1[j]) * (x1 - y1[j]) + (x2 - y2[j]) * (x2 - y2[j])
    else:
        x1, y1 = x[1, i], y[1, start : start + count]
        x2, y2 = x[2, i], y[2, start : start + count]
        x3, y3 = x[3, i], y[3, start : start + count]
        for j in range(count):
            here = (x0 - y0[j]) * (x0 - y0[j]) + (x1 - y1[j]) * (x1 - y1[j])
            out[j] = here + ((x2 - y2[j]) * (x2 - y2[j]) + (x3 - y3[j]) * (x3 - y3[j]))
    for c in range(first, d, 4):
        x0, y0 = x[c, i], y[c, start : start + count]
        x1, y1 = x[c + 1, i], y[c + 1, start : start + count]
        x2, y2 = x[c + 2, i], y[c + 2, start : start + count]
        x3, y3 = x[c + 3, i], y[c + 3, start : start + count]
        for j in range(count):
            here = (x0 - y0[j]) * (x0 - y0[j]) + (x1 - y1[j]) * (x1 - y1[j])
            out[j] += here + ((x2 - y2[j]) * (x2 - y2[j]) + (x3 - y3[j]) * (x3 - y3[j]))


@njit(fastmath=FLAGS)
def _eight_products(x, i, c, y, start, count, out):
    """Add the products of coordinates c ... c + 7 of query i and of the sources of a block to ``out``."""
    wide_vectors()
    x0, x1, x2, x3 = x[c, i], x[c + 1, i], x[c + 2, i], x[c + 3, i]
    x4, x5, x6, x7 = x[c + 4, i], x[c + 5, i], x[c + 6, i], x[c + 7, i]
    end = start + count
    y0, y1, y2, y3 = y[c, start:end], y[c + 1, start:end], y[c + 2, start:end], y[c + 3, start:end]
    y4, y5, y6, y7 = y[c + 4, start:end], y[c + 5, start:end], y[c + 6, start:end], y[c + 7, start:end]
    for j in range(count):
        first = (x0 * y0[j] + x1 * y1[j]) + (x2 * y2[j] + x3 * y3[j])
        out[j] += first + ((x4 * y4[j] + x5 * y5[j]) + (x6 * y6[j] + x7 * y7[j]))


@njit(fastmath=FLAGS)
def _four_products(x, i, c, y, start, count, out):
    wide_vectors()
    x0, x1, x2, x3 = x[c, i], x[c + 1, i], x[c + 2, i], x[c + 3, i]
    end = start + count
    y0, y1, y2, y3 = y[c, start:end], y[c + 1, start:end], y[c + 2, start:end], y[c + 3, start:end]
    for j in range(count):
        out[j] += (x0 * y0[j] + x1 * y1[j]) + (x2 * y2[j] + x3 * y3[j])


@njit(fastmath=FLAGS)
def _products(x, i, y, bias, start, count, out):
    """Logits ``bias_j + x_i . y_j`` of a block, as many coordinates a pass as there are registers for."""
    wide_vectors()
    d = x.shape[0]
    b = bias[start : start + count]
    for j in range(count):
        out[j] = b[j]
    c = 0
    while c + 8 <= d:
        _eight_products(x, i, c, y, start, count, out)
        c += 8
    if c + 4 <= d:
        _four_products(x, i, c, y, start, count, out)
        c += 4
    if c + 2 <= d:
        x0, x1 = x[c, i], x[c + 1, i]
        y0, y1 = y[c, start : start + count], y[c + 1, start : start + count]
        for j in range(count):
            out[j] += x0 * y0[j] + x1 * y1[j]
        c += 2
    if c < d:
        x0, y0 = x[c, i], y[c, start : start + count]
        for j in range(count):
            out[j] += x0 * y0[j]


@njit(fastmath=FLAGS)
def _largest(values, count):
    """Largest of the first ``count`` values."""
    wide_vectors()
    # The bits of floats, read as integers, have the order of the floats once those of negative ones are turned round.
    # LLVM vectorises a running maximum of integers, but not one of floats.
    highest = ordered_bits(values[0])
    for j in range(count):
        highest = max(highest, ordered_bits(values[j]))
    return from_ordered_bits(highest)


@njit(fastmath=FLAGS)
def _weigh(code, scale, highest, count, out):
    """Turn squared distances, or logits, into weights."""
    wide_vectors()
    if code == 0:
        for j in range(count):
            out[j] = exp2(out[j] * scale)
    elif code == 1:
        for j in range(count):
            out[j] = exp2(np.sqrt(out[j]) * scale)
    elif code == 2:
        one, zero = out.dtype.type(1), out.dtype.type(0)
        for j in range(count):
            out[j] = one if out[j] <= scale else zero
    else:
        for j in range(count):
            out[j] = exp2(out[j] - highest)


@njit(fastmath=FLAGS)
def _add_eight(weights, values, c, start, count, total):
    """Add the block's ``sum_j weights_j values_cj`` of channels c ... c + 7 to ``total``."""
    wide_vectors()
    end = start + count
    v0, v1, v2, v3 = values[c, start:end], values[c + 1, start:end], values[c + 2, start:end], values[c + 3, start:end]
    c += 4
    v4, v5, v6, v7 = values[c, start:end], values[c + 1, start:end], values[c + 2, start:end], values[c + 3, start:end]
    zero = weights.dtype.type(0)
    s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
    for j in range(count):
        s0 += weights[j] * v0[j]
        s1 += weights[j] * v1[j]
        s2 += weights[j] * v2[j]
        s3 += weights[j] * v3[j]
        s4 += weights[j] * v4[j]
        s5 += weights[j] * v5[j]
        s6 += weights[j] * v6[j]
        s7 += weights[j] * v7[j]
    total[c - 4] += s0
    total[c - 3] += s1
    total[c - 2] += s2
    total[c - 1] += s3
    total[c] += s4
    total[c + 1] += s5
    total[c + 2] += s6
    total[c + 3] += s7


@njit(fastmath=FLAGS)
def _add_four(weights, values, c, start, count, total):
    wide_vectors()
    end = start + count
    v0, v1, v2, v3 = values[c, start:end], values[c + 1, start:end], values[c + 2, start:end], values[c + 3, start:end]
    zero = weights.dtype.type(0)
    s0, s1, s2, s3 = zero, zero, zero, zero
    for j in range(count):
        s0 += weights[j] * v0[j]
        s1 += weights[j] * v1[j]
        s2 += weights[j] * v2[j]
        s3 += weights[j] * v3[j]
    total[c] += s0
    total[c + 1] += s1
    total[c + 2] += s2
    total[c + 3] += s3


@njit(fastmath=FLAGS)
def _add(weights, values, start, count, total):
    """Add the block's ``sum_j weights_j values_cj`` to ``total_c``, as many channels a pass as there are registers."""
    wide_vectors()
    channels = values.shape[0]
    zero = weights.dtype.type(0)
    c = 0
    while c + 8 <= channels:
        _add_eight(weights, values, c, start, count, total)
        c += 8
    if c + 4 <= channels:
        _add_four(weights, values, c, start, count, total)
        c += 4
    if c + 2 <= channels:
        v0, v1 = values[c, start : start + count], values[c + 1, start : start + count]
        s0, s1 = zero, zero
        for j in range(count):
            s0 += weights[j] * v0[j]
            s1 += weights[j] * v1[j]
        total[c] += s0
        total[c + 1] += s1
        c += 2
    if c < channels:
        v0 = values[c, start : start + count]
        s0 = zero
        for j in range(count):
            s0 += weights[j] * v0[j]
        total[c] += s0


@njit(fastmath=FLAGS)
def _gaussian_sum(x, i, y, scale, values, start, count):
    """The sum over a block of a Gaussian in up to three dimensions and one channel, all in registers."""
    wide_vectors()
    d = x.shape[0]
    end = start + count
    v = values[0, start:end]
    x0, y0 = x[0, i], y[0, start:end]
    total = v.dtype.type(0)
    if d == 1:
        for j in range(count):
            total += v[j] * exp2(scale * ((x0 - y0[j]) * (x0 - y0[j])))
        return total
    x1, y1 = x[1, i], y[1, start:end]
    if d == 2:
        for j in range(count):
            total += v[j] * exp2(scale * ((x0 - y0[j]) * (x0 - y0[j]) + (x1 - y1[j]) * (x1 - y1[j])))
        return total
    x2, y2 = x[2, i], y[2, start:end]
    for j in range(count):
        square = (x0 - y0[j]) * (x0 - y0[j]) + (x1 - y1[j]) * (x1 - y1[j]) + (x2 - y2[j]) * (x2 - y2[j])
        total += v[j] * exp2(scale * square)
    return total


@njit
def _lines(size, dtype_like):
    """A line of scratch that starts where a vector does: loads across two lines of the cache cost twice as much."""
    room = np.empty(size + 64 // dtype_like.itemsize, dtype_like.dtype)
    first = (-room.ctypes.data % 64) // dtype_like.itemsize
    return room[first : first + size]


@njit(inline="always")
def _near(low, high, lows, highs, block, limit):
    """Whether the box of a tile and that of a block come within ``limit`` (squared) of each other."""
    square = 0.0
    for c in range(len(low)):
        gap = max(max(lows[block, c] - high[c], low[c] - highs[block, c]), 0.0)
        square += gap * gap
    return square <= limit


@njit(parallel=True, cache=True, fastmath=FLAGS)
def pair_sums(code, scale, limit, size, sources, x, y, bias, lows, highs, values, sums, peaks):
    """Sums ``sum_j k(x_i, y_j) values_cj`` for every query.

    Parameters
    ----------
    code : int
        Which kernel.
    scale : float
    limit : float
        Blocks of sources all of which are farther away than that (squared) are left out; radial kernels.
    size, sources : int
        Of a block of sources; their number N. Rows of ``y``, ``bias`` and ``values`` may be longer.
    x : (d, M)
        Queries; for the dot product times the kernel's scale times log2(e).
    y : (d, N)
        Sources.
    bias : (N,)
        Added to the logits of the dot product; of any length for radial kernels.
    lows, highs : (blocks, d)
        Boxes around the blocks of sources, float64.
    values : (C, N)
        Times the quadrature weights.
    sums : (M, C)
        Written, float64; for the dot product over 2^peaks.
    peaks : (M,)
        Written, float64: the largest logit of each row to the base 2; 0 for radial kernels.
    """
    wide_vectors()
    d, queries = x.shape
    channels = values.shape[0]
    radial = code != 3
    for tile in prange((queries + _TILE - 1) // _TILE):
        first, last = tile * _TILE, min((tile + 1) * _TILE, queries)
        low, high = np.empty(d), np.empty(d)
        for c in range(d):
            low[c] = high[c] = x[c, first]
            for i in range(first + 1, last):
                low[c] = min(low[c], x[c, i])
                high[c] = max(high[c], x[c, i])
        weights = _lines(size, x)
        for i in range(first, last):
            peaks[i] = 0.0 if radial else _LEFT_OUT
            for c in range(channels):
                sums[i, c] = 0.0
        for block in range((sources + size - 1) // size):
            if radial and not _near(low, high, lows, highs, block, limit):
                continue
            start = block * size
            count = min(size, sources - start)
            if code == 0 and d <= 3 and channels == 1:
                for i in range(first, last):
                    sums[i, 0] += _gaussian_sum(x, i, y, scale, values, start, count)
                continue
            for i in range(first, last):
                highest = x.dtype.type(0)
                if radial:
                    _squares(x, i, y, start, count, weights)
                else:
                    _products(x, i, y, bias, start, count, weights)
                    highest = _largest(weights, count)
                    if highest > peaks[i]:
                        # 2^t by the library: once a block, and t may be anything.
                        shrink = np.exp2(peaks[i] - highest)
                        for c in range(channels):
                            sums[i, c] *= shrink
                        peaks[i] = highest
                    highest = x.dtype.type(peaks[i])
                _weigh(code, scale, highest, count, weights)
                _add(weights, values, start, count, sums[i])


@njit(nogil=True, cache=True, fastmath=FLAGS)
def square_table(x, y, start, table):
    """Squared distances between queries (d, M) and the sources (d, N) from `start` on, into ``table`` (M, count).

    This loop and the next have no threads of their own: they are called from many, each with a table of its own.
    """
    wide_vectors()
    for i in range(table.shape[0]):
        _squares(x, i, y, start, table.shape[1], table[i])


@njit(nogil=True, cache=True, fastmath=FLAGS)
def weigh_table(code, scale, size, table, masses, total, peaks, shrink):
    """Turn a table of squared distances or logits (queries, sources) into weights, in place, as `pair_sums` does.

    ``total`` gets each row's sum of weights times ``masses`` added, `size` terms at a time, and ``shrink`` what sums
    over earlier tables have to be multiplied with, since the weights are now over 2^peaks.
    """
    wide_vectors()
    count = table.shape[1]
    for i in range(table.shape[0]):
        row = table[i]
        shrink[i] = 1.0
        highest = table.dtype.type(0)
        if code == 3:
            highest = _largest(row, count)
            if highest > peaks[i]:
                shrink[i] = np.exp2(peaks[i] - highest)
                total[i] *= shrink[i]
                peaks[i] = highest
            highest = table.dtype.type(peaks[i])
        else:  # differences of large squares may come out below 0
            for j in range(count):
                row[j] = max(row[j], table.dtype.type(0))
        _weigh(code, scale, highest, count, row)
        for start in range(0, count, size):
            _add(row[start:], masses, start, min(size, count - start), total[i : i + 1])


_LOOPS = {"pair_sums": pair_sums, "square_table": square_table, "weigh_table": weigh_table}


@cache
def loop(name: str, dtype: str) -> Callable[..., None]:
    """Return a loop for ``float32`` or ``float64``, compiled now or loaded from the cache."""
    f = types.float32 if dtype == "float32" else types.float64
    table, line = f[:, ::1], f[::1]
    boxes, column = types.float64[:, ::1], types.float64[::1]
    signature = {
        "pair_sums": (
            types.int64, f, types.float64, types.int64, types.int64, table, table, line, boxes, boxes, table, boxes,
            column,
        ),
        "square_table": (table, table, types.int64, table),
        "weigh_table": (types.int64, f, types.int64, table, table, column, column, column),
    }[name]  # fmt: skip
    return compiled(_LOOPS[name], types.void(*signature))
