"""Multigrid for walks that end: sums over the moves of a chain, Gauss-Seidel sweeps, and aggregates of states.

State i has the moves ``starts[i] <= e < stops[i]`` to the states ``ends[e]``, not to itself, in the shares
``weights[e]`` of the rate at which it is left: systems are ``x_i - sum_e weights[e] x[ends[e]] = b_i``, one of them,
(N, 1), or 16 side by side, (N, 16). States are passed in their order by one thread: the bits do not depend on how many
there are.
"""

from numba import types

from nlflow.backends.numba.loading import loader, njit

COLUMNS = 16
"""Systems side by side: a cache line in float32."""
_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}


@njit(cache=True, fastmath=_FLAGS)
def sweep(starts, stops, ends, weights, b, x):
    """Solve the equation of each state for its x by some of its moves, one after another, in place."""
    if x.shape[1] == 1:
        for i in range(x.shape[0]):
            total = b[i, 0]
            for e in range(starts[i], stops[i]):
                total += weights[e] * x[ends[e], 0]
            x[i, 0] = total
        return
    for i in range(x.shape[0]):
        row = b[i].copy()
        for e in range(starts[i], stops[i]):
            j = ends[e]
            weight = weights[e]
            for c in range(COLUMNS):
                row[c] += weight * x[j, c]
        for c in range(COLUMNS):
            x[i, c] = row[c]


@njit(cache=True, fastmath=_FLAGS)
def left_over(starts, stops, ends, weights, b, x, r):
    """Write the residual ``r_i = b_i - x_i + sum_e weights[e] x[ends[e]]``."""
    if x.shape[1] == 1:
        for i in range(x.shape[0]):
            total = b[i, 0] - x[i, 0]
            for e in range(starts[i], stops[i]):
                total += weights[e] * x[ends[e], 0]
            r[i, 0] = total
        return
    for i in range(x.shape[0]):
        row = b[i] - x[i]
        for e in range(starts[i], stops[i]):
            j = ends[e]
            weight = weights[e]
            for c in range(COLUMNS):
                row[c] += weight * x[j, c]
        for c in range(COLUMNS):
            r[i, c] = row[c]


@njit(cache=True)
def aggregate(starts, ends, weights, strong, group):
    """Write to which aggregate each state belongs, 0, 1, ...

    A state without one, all of whose strong moves (from `strong` of its largest weight on) lead to others without one,
    makes one of them all. Those that are left join the one to which they move most, or stay alone.
    """
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
        "aggregate": (aggregate, _ROWS, _ENDS, f[::1], types.float64, _ENDS),
    }
)
"""Loop of a name, for ``float32`` or ``float64``."""
