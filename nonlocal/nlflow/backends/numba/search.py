"""The search for groups of alike patches; see `nlflow.backends.numba.groups` for how images and patches lie."""

import math

import numpy as np
from numba import njit, prange, types

from nlflow.backends.numba import RUN
from nlflow.backends.numba.calls import Callee, caller
from nlflow.backends.numba.loading import loader

_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}


@njit(fastmath=_FLAGS)
def _kth_smallest(values, count, k):
    """Return the k-th smallest of the first `count` values, which are reordered (Hoare's selection)."""
    low = 0
    high = count - 1
    while low < high:
        a = values[low]
        b = values[(low + high) // 2]
        c = values[high]
        pivot = max(min(a, b), min(max(a, b), c))
        i = low
        j = high
        while i <= j:
            while values[i] < pivot:
                i += 1
            while values[j] > pivot:
                j -= 1
            if i <= j:
                kept = values[i]
                values[i] = values[j]
                values[j] = kept
                i += 1
                j -= 1
        if k <= j:
            high = j
        elif k >= i:
            low = i
        else:
            break
    return values[k]


@njit(fastmath=_FLAGS)
def _tied(guide, y, x, patch, radii, limit, rounding):
    """Return between which squared distances patches are as near to that at (y, x) as one at the distance `limit`.

    For m samples: (m + 3) roundings of the sum, and those of the samples, which change a difference by 4 of the largest
    sample at most, and a distance d by 2 sqrt(m d) of that (half of it counts here, `rounding` being twice the unit).
    """
    ph, pw = patch
    largest = 0 * limit
    for c in range(guide.shape[0]):
        for r in range(ph):
            for s in range(pw):
                largest = max(largest, abs(guide[c, y + r + radii[0], x + s + radii[1]]))
    m = guide.shape[0] * ph * pw
    root = math.sqrt(max(limit, 0 * limit))
    slack = rounding * ((m + 3) * limit + 4 * (largest + root) * math.sqrt(m) * root)
    return limit - slack, limit + slack


@njit(cache=True, fastmath=_FLAGS)
def find_job(guide, rows, columns, job, shape, patch, radii, order, rounding, members, counts):
    """Find the groups of one run of references; the others of the arguments are those of `find_groups`."""
    H, W = shape
    ph, pw = patch
    Ry, Rx = radii
    runs = (columns.shape[0] + RUN - 1) // RUN
    wanted = members.shape[1]
    offsets = (2 * Ry + 1) * (2 * Rx + 1)
    y = rows[job // runs]
    first = (job % runs) * RUN
    last = min(first + RUN, columns.shape[0])
    left = columns[first]
    length = columns[last - 1] - left + pw
    distance = np.empty((last - first, offsets), guide.dtype)
    squares = np.empty(length, guide.dtype)
    sums = np.empty(length, guide.dtype)
    candidates = np.empty(offsets, guide.dtype)
    for dy in range(-Ry, Ry + 1):
        outside = y + dy < 0 or y + dy > H - ph
        for dx in range(-Rx, Rx + 1):
            o = (dy + Ry) * (2 * Rx + 1) + dx + Rx
            if outside:
                for r in range(last - first):
                    distance[r, o] = -1
                continue
            squares[:] = 0
            for c in range(guide.shape[0]):
                for r in range(ph):
                    here = guide[c, y + r + Ry, left + Rx : left + Rx + length]
                    there = guide[c, y + r + dy + Ry, left + dx + Rx : left + dx + Rx + length]
                    for j in range(length):
                        squares[j] += (here[j] - there[j]) * (here[j] - there[j])
            sums[:] = 0
            for c in range(pw):
                for j in range(length - pw + 1):
                    sums[j] += squares[j + c]
            for r in range(last - first):
                x = columns[first + r] + dx
                distance[r, o] = sums[x - dx - left] if 0 <= x <= W - pw else -1
    for r in range(last - first):
        x = columns[first + r]
        reference = (job // runs) * columns.shape[0] + first + r
        chosen = members[reference]
        chosen[0] = y * W + x
        distance[r, Ry * (2 * Rx + 1) + Rx] = -1  # it is there already
        found = 0
        for o in range(offsets):
            if distance[r, o] >= 0:
                candidates[found] = distance[r, o]
                found += 1
        highest = np.inf
        if found >= wanted:
            limit = _kth_smallest(candidates, found, wanted - 2) if wanted > 1 else -1
            lowest, highest = _tied(guide, y, x, patch, radii, limit, rounding)
            spare = 1 - wanted
            for o in range(offsets):
                if 0 <= distance[r, o] <= highest:
                    spare += 1
            for k in range(offsets - 1, -1, -1):
                if spare <= 0:
                    break
                o = order[k]
                if lowest <= distance[r, o] <= highest:
                    distance[r, o] = -1
                    spare -= 1
        count = 1
        for o in range(offsets):
            if 0 <= distance[r, o] <= highest:
                chosen[count] = (y + o // (2 * Rx + 1) - Ry) * W + x + o % (2 * Rx + 1) - Rx
                count += 1
        counts[reference] = count


_find_job = caller(find_job)


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def find_groups(one, guide, rows, columns, shape, patch, radii, order, rounding, members, counts):
    """Find the patches nearest to each reference patch, itself first, in its window.

    Parameters
    ----------
    one : int
        Address of `find_job`.
    guide : (C, H + 2 Ry, W + 2 Rx)
        What is compared, padded by the search radii (with anything finite).
    rows, columns : (A,), (B,)
        Corners of the references.
    shape, patch, radii : (H, W), (ph, pw), (Ry, Rx)
    order : (offsets,) int32
        The offsets of a window (row by row), by their length: of patches that are equally near, within rounding, those
        are taken whose offset comes first.
    rounding : float
        Relative rounding of the guide.
    members : (A B, n) int32, output
        Corners of the members, the reference first, then row by row.
    counts : (A B,) int32, output
        How many there are: n, or fewer where the window holds fewer patches.
    """
    runs = (columns.shape[0] + RUN - 1) // RUN
    for job in prange(rows.shape[0] * runs):
        _find_job(
            one,
            (guide, rows, columns, np.int64(job), shape, patch, radii, order, rounding, members, counts),
        )


def _loops(real):
    places, two = types.Array(types.int64, 1, "C"), types.UniTuple(types.int64, 2)
    order, members = (types.Array(types.int32, dimensions, "C") for dimensions in (1, 2))
    inputs, options = (types.Array(real, 3, "C"), places, places), (two, two, two, order, real, members, order)
    job = Callee(find_job, (*inputs, types.int64, *options))
    return {"find_groups": (find_groups, job, *inputs, *options)}


loop = loader(_loops)
