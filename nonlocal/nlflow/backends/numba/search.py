"""The search for groups of alike patches; see `nlflow.backends.numba.groups` for how images and patches lie."""

import math

import numpy as np
from numba import njit, prange, types

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
def _tied(guide, z, y, x, patch, follow, limit, rounding):
    """Return between which squared distances patches are as near to that at (z, y, x) as one at the distance `limit`.

    For m samples: (m + 3) roundings of the sum, and those of the samples, which change a difference by 4 of the largest
    sample at most, and a distance d by 2 sqrt(m d) of that (half of it counts here, `rounding` being twice the unit).
    """
    pz, ph, pw = patch
    largest = 0 * limit
    for c in range(guide.shape[0]):
        for k in range(pz):
            for r in range(ph):
                for s in range(pw):
                    largest = max(largest, abs(guide[c, z + k, y + r + follow[k, 0], x + s + follow[k, 1]]))
    m = guide.shape[0] * pz * ph * pw
    root = math.sqrt(max(limit, 0 * limit))
    slack = rounding * ((m + 3) * limit + 4 * (largest + root) * math.sqrt(m) * root)
    return limit - slack, limit + slack


@njit(fastmath=_FLAGS)
def _ends(follow, axis, last, size):
    """Return between which places along an axis all frames of a patch are inside, before and after they have moved."""
    low = 0
    high = last
    for k in range(size):
        low = max(low, -follow[k, axis])
        high = min(high, last - follow[k, axis])
    return low, high


@njit(cache=True, fastmath=_FLAGS)
def find_job(
    guide, slices, rows, columns, job, shape, patch, radii, run, motion, order, rounding, members, counts
):  # fmt: skip
    """Find the groups of one run of references; the others of the arguments are those of `find_groups`."""
    D, H, W = shape
    pz, ph, pw = patch
    Rz, Ry, Rx = radii
    runs = (columns.shape[0] + run - 1) // run
    wanted = members.shape[1]
    side = 2 * Rx + 1
    layer = (2 * Ry + 1) * side
    offsets = (2 * Rz + 1) * layer
    z = slices[job // (runs * rows.shape[0])]
    y = rows[job // runs % rows.shape[0]]
    follow = motion[min(job, motion.shape[0] - 1)]
    first = (job % runs) * run
    last = min(first + run, columns.shape[0])
    left = columns[first]
    length = columns[last - 1] - left + pw
    distance = np.empty((last - first, offsets), guide.dtype)
    squares = np.empty(length, guide.dtype)
    sums = np.empty(length, guide.dtype)
    candidates = np.empty(offsets, guide.dtype)
    for dz in range(-Rz, Rz + 1):
        there = follow[dz + Rz :]
        top, bottom = _ends(there, 0, H - ph, pz)
        begin, end = _ends(there, 1, W - pw, pz)
        for dy in range(-Ry, Ry + 1):
            o = (dz + Rz) * layer + (dy + Ry) * side
            if not (0 <= z + dz <= D - pz and top <= y + dy <= bottom):
                for r in range(last - first):
                    for dx in range(side):
                        distance[r, o + dx] = -1
                continue
            for dx in range(-Rx, Rx + 1):
                squares[:] = 0
                for c in range(guide.shape[0]):
                    for k in range(pz):
                        own = left + follow[Rz + k, 1]
                        other = left + dx + there[k, 1]
                        start = max(0, -own, -other)
                        stop = min(length, W - own, W - other)
                        for r in range(ph):
                            here = guide[c, z + k, y + r + follow[Rz + k, 0], own + start : own + stop]
                            seen = guide[c, z + dz + k, y + r + dy + there[k, 0], other + start : other + stop]
                            target = squares[start:stop]
                            for j in range(stop - start):
                                target[j] += (here[j] - seen[j]) * (here[j] - seen[j])
                sums[:] = 0
                for c in range(pw):
                    for j in range(length - pw + 1):
                        sums[j] += squares[j + c]
                for r in range(last - first):
                    x = columns[first + r]
                    distance[r, o + dx + Rx] = sums[x - left] if begin <= x + dx <= end else -1
    middle = Rz * layer + Ry * side + Rx
    for r in range(last - first):
        x = columns[first + r]
        reference = (job // runs) * columns.shape[0] + first + r
        chosen = members[reference]
        chosen[0] = (z * H + y) * W + x
        distance[r, middle] = -1  # it is there already
        found = 0
        for o in range(offsets):
            if distance[r, o] >= 0:
                candidates[found] = distance[r, o]
                found += 1
        highest = np.inf
        if found >= wanted:
            limit = _kth_smallest(candidates, found, wanted - 2) if wanted > 1 else -1
            lowest, highest = _tied(guide, z, y, x, patch, follow[Rz:], limit, rounding)
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
                there_z = z + o // layer - Rz
                there_y = y + o % layer // side - Ry
                chosen[count] = (there_z * H + there_y) * W + x + o % side - Rx
                count += 1
        counts[reference] = count


_find_job = caller(find_job)


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def find_groups(
    one, guide, slices, rows, columns, shape, patch, radii, run, motion, order, rounding, members, counts
):  # fmt: skip
    """Find the patches nearest to each reference patch, itself first, in its window.

    Parameters
    ----------
    one : int
        Address of `find_job`.
    guide : (C, Z, H, W)
        What is compared.
    slices, rows, columns : (A,), (B,), (E,)
        Corners of the references.
    shape, patch, radii : (Z, H, W), (pz, ph, pw), (Rz, Ry, Rx)
    run : int
        References of a job, at most.
    motion : (jobs, 2 Rz + pz, 2) int32
        See `nlflow.denoising.patches.lattice.Lattice`. Frames of a patch, and windows, are displaced by it.
    order : (offsets,) int32
        The offsets of a window (in C order), by their length: of patches that are equally near, within rounding, those
        are taken whose offset comes first.
    rounding : float
        Relative rounding of the guide.
    members : (A B E, n) int32, output
        Corners of the members, the reference first, then in C order. Where windows are displaced, a corner is told
        without the displacement of its frame.
    counts : (A B E,) int32, output
        How many there are: n, or fewer where the window holds fewer patches.
    """
    runs = (columns.shape[0] + run - 1) // run
    for job in prange(slices.shape[0] * rows.shape[0] * runs):
        _find_job(
            one,
            (
                guide, slices, rows, columns, np.int64(job), shape, patch, radii, run, motion, order, rounding,
                members, counts,
            ),
        )  # fmt: skip


def _loops(real):
    places, sides = types.Array(types.int64, 1, "C"), types.UniTuple(types.int64, 3)
    order, members, motion = (types.Array(types.int32, dimensions, "C") for dimensions in (1, 2, 3))
    inputs = (types.Array(real, 4, "C"), places, places, places)
    options = (sides, sides, sides, types.int64, motion, order, real, members, order)
    job = Callee(find_job, (*inputs, types.int64, *options))
    return {"find_groups": (find_groups, job, *inputs, *options)}


loop = loader(_loops)
