"""Multigrid for chains whose walks end."""

# State i has the moves ``starts[i] <= e < stops[i]`` to the states ``ends[e]``, not to itself, in the shares
# ``weights[e]`` of the rate at which it is left. The systems are ``x_i - sum_e weights[e] x[ends[e]] = b_i``, 1, 4 or
# 16 of them side by side, (N, 1), (N, 4) or (N, 16). One thread passes the states in their order, so that the bits do
# not depend on the number of threads.

import numpy as np
from numba import types

from nlflow.backends.numba.loading import loader, njit

COLUMNS, _FEW = 16, 4
"""Systems side by side: a cache line in float32."""
_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}


def width_of(columns: int) -> int:
    """Return how many systems a loop solves at once for a number of columns: 1, 4 or 16."""
    return 1 if columns == 1 else _FEW if columns <= _FEW else COLUMNS


@njit(inline="always")
def _add_moves(first, last, ends, weights, x, row, columns):
    """Add ``sum_e weights[e] x[ends[e]]``, four moves a turn, so that `row` is read and written once for four."""
    e = first
    while e + 4 <= last:
        i, j, k, m = ends[e], ends[e + 1], ends[e + 2], ends[e + 3]
        p, q, r, s = weights[e], weights[e + 1], weights[e + 2], weights[e + 3]
        for c in range(columns):
            row[c] += (p * x[i, c] + q * x[j, c]) + (r * x[k, c] + s * x[m, c])
        e += 4
    while e < last:
        i, p = ends[e], weights[e]
        for c in range(columns):
            row[c] += p * x[i, c]
        e += 1


@njit(inline="always")
def _sweep(starts, stops, ends, weights, b, x, columns):
    row = np.empty(columns, x.dtype)
    for i in range(x.shape[0]):
        for c in range(columns):
            row[c] = b[i, c]
        _add_moves(starts[i], stops[i], ends, weights, x, row, columns)
        for c in range(columns):
            x[i, c] = row[c]


@njit(cache=True, fastmath=_FLAGS)
def sweep(starts, stops, ends, weights, b, x):
    if x.shape[1] == COLUMNS:
        _sweep(starts, stops, ends, weights, b, x, COLUMNS)
    elif x.shape[1] == _FEW:
        _sweep(starts, stops, ends, weights, b, x, _FEW)
    else:
        for i in range(x.shape[0]):
            total = b[i, 0]
            for e in range(starts[i], stops[i]):
                total += weights[e] * x[ends[e], 0]
            x[i, 0] = total


@njit(inline="always")
def _left_over(starts, stops, ends, weights, b, x, r, columns):
    row = np.empty(columns, x.dtype)
    for i in range(x.shape[0]):
        for c in range(columns):
            row[c] = b[i, c] - x[i, c]
        _add_moves(starts[i], stops[i], ends, weights, x, row, columns)
        for c in range(columns):
            r[i, c] = row[c]


@njit(cache=True, fastmath=_FLAGS)
def left_over(starts, stops, ends, weights, b, x, r):
    """Write the residual ``r_i = b_i - x_i + sum_e weights[e] x[ends[e]]``."""
    if x.shape[1] == COLUMNS:
        _left_over(starts, stops, ends, weights, b, x, r, COLUMNS)
    elif x.shape[1] == _FEW:
        _left_over(starts, stops, ends, weights, b, x, r, _FEW)
    else:
        for i in range(x.shape[0]):
            total = b[i, 0] - x[i, 0]
            for e in range(starts[i], stops[i]):
                total += weights[e] * x[ends[e], 0]
            r[i, 0] = total


@njit(cache=True, fastmath=_FLAGS)
def products(v, w, out):
    out[:] = 0.0
    for i in range(v.shape[0]):
        for c in range(v.shape[1]):
            out[c] += np.float64(v[i, c]) * np.float64(w[i, c])


@njit(cache=True, fastmath=_FLAGS)
def subtract(w, shares, v):
    for i in range(v.shape[0]):
        for c in range(v.shape[1]):
            w[i, c] -= shares[c] * v[i, c]


@njit(cache=True, fastmath=_FLAGS)
def spread(group, coarse, x):
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            x[i, c] += coarse[group[i], c]


@njit(cache=True)
def aggregate(starts, ends, weights, strong, group):
    # A state without one, all of whose strong moves (from `strong` of its largest weight on) lead to others without
    # one, makes one of them all. Those that are left join the one to which they move most, or stay alone.
    size, count = group.shape[0], 0
    group[:] = -1
    for i in range(size):
        if group[i] >= 0:
            continue
        largest = weights.dtype.type(0)
        for e in range(starts[i], starts[i + 1]):
            largest = max(largest, weights[e])
        free = True
        for e in range(starts[i], starts[i + 1]):
            if weights[e] >= strong * largest and group[ends[e]] >= 0:
                free = False
        if free:
            group[i] = count
            for e in range(starts[i], starts[i + 1]):
                if weights[e] >= strong * largest:
                    group[ends[e]] = count
            count += 1
    found = group.copy()
    for i in range(size):
        most = weights.dtype.type(0)
        for e in range(starts[i], starts[i + 1]):
            if found[i] < 0 and found[ends[e]] >= 0 and weights[e] > most:
                most = weights[e]
                group[i] = found[ends[e]]
        if group[i] < 0:
            group[i] = count
            count += 1


_ROWS, _ENDS = types.int64[::1], types.int32[::1]
loop = loader(
    lambda f: {
        "sweep": (sweep, _ROWS, _ROWS, _ENDS, f[::1], *(f[:, ::1],) * 2),
        "left_over": (left_over, _ROWS, _ROWS, _ENDS, f[::1], *(f[:, ::1],) * 3),
        "products": (products, *(f[:, ::1],) * 2, types.float64[::1]),
        "subtract": (subtract, f[:, ::1], f[::1], f[:, ::1]),
        "spread": (spread, _ENDS, *(f[:, ::1],) * 2),
        "aggregate": (aggregate, _ROWS, _ENDS, f[::1], types.float64, _ENDS),
    }
)
"""Loop of a name, for ``float32`` or ``float64``."""
