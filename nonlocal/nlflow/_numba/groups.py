"""Groups of alike patches: their search, and the local Wiener step on each group.

Arrays are planar, (C, rows, columns); a one-dimensional signal is a grid of one row. A patch is known by its corner,
the flat index ``row * columns + column``. The work is cut into jobs, each a run of at most `RUN` references in one
row of them. A job sums the patches that it puts back into a window of its own, and the windows are added in the order
of the jobs: the result has the same bits for any number of threads, and, as runs start at fixed references, for an
image and for a strip of it.

Products of matrices and eigenvalues are left to BLAS and LAPACK, which beat compiled loops here by a factor of 4 to 10.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numba import njit, prange, types

from nlflow._numba.loading import compiled

RUN = 64
_WELL_CONDITIONED = 3e4  # up to here rounding costs the fast inverse in single precision well below the noise
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


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def find_groups(guide, rows, columns, shape, patch, radii, members, counts):
    """Find the patches nearest to each reference patch, itself first, in its window.

    Parameters
    ----------
    guide : (C, H + 2 Ry, W + 2 Rx)
        What is compared, padded by the search radii (with anything finite).
    rows, columns : (A,), (B,)
        Corners of the references.
    shape, patch, radii : (H, W), (ph, pw), (Ry, Rx)
    members : (A B, n) int32, output
        Corners of the members, the reference first, then row by row.
    counts : (A B,) int32, output
        How many there are: n, or fewer where the window holds fewer patches.
    """
    H, W = shape
    ph, pw = patch
    Ry, Rx = radii
    runs = (columns.shape[0] + RUN - 1) // RUN
    wanted = members.shape[1]
    offsets = (2 * Ry + 1) * (2 * Rx + 1)
    for job in prange(rows.shape[0] * runs):
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
            count = 1
            if found >= wanted:
                limit = _kth_smallest(candidates, found, wanted - 2) if wanted > 1 else -1
                below = 0
                for o in range(offsets):
                    if 0 <= distance[r, o] < limit:
                        below += 1
                ties = wanted - 1 - below
            else:
                limit = np.inf
                ties = 0
            for o in range(offsets):
                d = distance[r, o]
                if d < 0 or d > limit:
                    continue
                if d == limit:
                    if ties == 0:
                        continue
                    ties -= 1
                chosen[count] = (y + o // (2 * Rx + 1) - Ry) * W + x + o % (2 * Rx + 1) - Rx
                count += 1
            counts[reference] = count


@njit(fastmath=_FLAGS)
def _gather(plane, corners, count, ph, pw, out):
    """Copy the patches at `corners` to the rows of `out`."""
    W = plane.shape[1]
    for k in range(count):
        y = corners[k] // W
        x = corners[k] % W
        target = out[k]
        for r in range(ph):
            source = plane[y + r]
            for c in range(pw):
                target[r * pw + c] = source[x + c]


@njit(fastmath=_FLAGS)
def _centre(tokens, count, mean):
    """Take the mean token, left in `mean`, from each token."""
    mean[:] = 0
    for k in range(count):
        row = tokens[k]
        for j in range(mean.shape[0]):
            mean[j] += row[j]
    for j in range(mean.shape[0]):
        mean[j] /= count
    for k in range(count):
        row = tokens[k]
        for j in range(mean.shape[0]):
            row[j] -= mean[j]


@njit(fastmath=_FLAGS)
def _sweep(matrix):
    """Replace a symmetric positive definite matrix by its inverse (Gauss-Jordan, two pivots at a time)."""
    size = matrix.shape[0]
    for k in range(0, size - 1, 2):
        a = matrix[k]
        b = matrix[k + 1]
        p = a[k]
        q = a[k + 1]
        r = b[k + 1]
        scale = 1 / (p * r - q * q)
        p, q, r = r * scale, -q * scale, p * scale
        a[k] = 1
        a[k + 1] = 0
        b[k] = 0
        b[k + 1] = 1
        for j in range(size):
            x = a[j]
            y = b[j]
            a[j] = p * x + q * y
            b[j] = q * x + r * y
        for i in range(size):
            if i != k and i != k + 1:
                row = matrix[i]
                x = row[k]
                y = row[k + 1]
                row[k] = 0
                row[k + 1] = 0
                for j in range(size):
                    row[j] -= x * a[j] + y * b[j]
    if size % 2 == 1:
        last = matrix[size - 1]
        scale = 1 / last[size - 1]
        last[size - 1] = 1
        for j in range(size):
            last[j] *= scale
        for i in range(size - 1):
            row = matrix[i]
            x = row[size - 1]
            row[size - 1] = 0
            for j in range(size):
                row[j] -= x * last[j]


@njit(fastmath=_FLAGS)
def _spd_inverse(matrix):
    """Return the inverse of a symmetric positive definite matrix, through that of its halves and Schur's complement.

    At the sizes of patches it takes half the time of LAPACK's general inverse (which is all that Numba offers).
    """
    size = matrix.shape[0]
    half = size // 2
    upper = matrix[:half, :half].copy()
    side = matrix[half:, :half].copy()
    lower = matrix[half:, half:].copy()
    _sweep(upper)
    gain = np.dot(side, upper)
    taken = np.dot(gain, side.T)
    for i in range(size - half):
        for j in range(size - half):
            lower[i, j] -= taken[i, j]
    _sweep(lower)
    coupling = np.dot(lower, gain)
    added = np.dot(gain.T, coupling)
    inverse = np.empty_like(matrix)
    for i in range(half):
        for j in range(half):
            inverse[i, j] = upper[i, j] + added[i, j]
        for j in range(size - half):
            inverse[i, half + j] = -coupling[j, i]
    for i in range(size - half):
        for j in range(half):
            inverse[half + i, j] = -coupling[i, j]
        for j in range(size - half):
            inverse[half + i, half + j] = lower[i, j]
    return inverse


@njit
def _careful_inverse(matrix, out):
    """Write the inverse of a badly conditioned matrix: in double precision, by LAPACK."""
    wide = np.linalg.inv(matrix.astype(np.float64))
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[0]):
            out[i, j] = wide[i, j]


@njit(fastmath=_FLAGS)
def _clipped_inverse(noisy, noise, shrink):
    """Return (C' + N)^-1, N diagonal, where N^-1/2 C' N^-1/2 has the eigenvalues of N^-1/2 C N^-1/2 less `shrink`.

    C is the covariance of noisy tokens; eigenvalues are cut off at 0.
    """
    size = noisy.shape[0]
    for i in range(size):
        for j in range(size):
            noisy[i, j] /= math.sqrt(noise[i] * noise[j])
    values, vectors = np.linalg.eigh(noisy)
    scaled = np.empty_like(vectors)
    for k in range(size):
        gain = 1 / (max(values[k] - shrink, 0 * shrink) + 1)
        for i in range(size):
            scaled[i, k] = vectors[i, k] * gain
    inverse = np.ascontiguousarray(np.dot(scaled, vectors.T))
    for i in range(size):
        for j in range(size):
            inverse[i, j] /= math.sqrt(noise[i] * noise[j])
    return inverse


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def filter_groups(state, pilot, observed, variance, members, counts, rows, columns, jobs, patch, radii, numbers, out):
    r"""Filter the groups of some jobs and put the patches back.

    A token z of a group with mean m becomes ``z - N (C + N)^-1 (z - m)``: one semi-implicit step of E with the fidelity
    matrix C N^-1, C the covariance of the group's tokens in the pilot and N the noise that the state still holds.

    Parameters
    ----------
    state, pilot, observed : (C, H, W)
        The running state z, the estimate from which covariances are taken, and the input.
    variance : (C, H, W) or (C, 1, 1)
        Variance of the noise in the input.
    members, counts : from `find_groups`
    rows, columns : (A,), (B,)
    jobs : (first, last)
        Jobs in the order of `find_groups`.
    patch, radii : (ph, pw), (Ry, Rx)
    numbers : (5,)
        Fraction of the noise that the step leaves, factor on the noise variance, multiple of the noise taken from the
        eigenvalues of the covariance (0: the pilot is free of noise), whether noise has been taken out already, and the
        noise that rounding stands for, over the largest variance of a sample in a group.
    out : (jobs, 3, C, 2 Ry + ph, width), output
        Sums of weight x estimate, of weight x next state and of weights, from row ``rows[a] - Ry`` and column
        ``columns[first] - Rx`` on.
    """
    leave = numbers[0]
    factor = numbers[1]
    shrink = numbers[2]
    running = numbers[3] > 0
    uncertain = numbers[4]
    ph, pw = patch
    Ry, Rx = radii
    size = ph * pw
    planes, W = state.shape[0], state.shape[2]
    runs = (columns.shape[0] + RUN - 1) // RUN
    uniform = variance.shape[1] * variance.shape[2] == 1
    most = members.shape[1]
    zero = 0 * leave
    one = zero + 1
    for slot in prange(jobs[1] - jobs[0]):
        job = jobs[0] + slot
        first = (job % runs) * RUN
        last = min(first + RUN, columns.shape[0])
        top = rows[job // runs] - Ry
        left = columns[first] - Rx
        sums = out[slot]
        sums[:] = 0
        source = np.empty((most, size), state.dtype)
        tokens = np.empty((most, size), state.dtype)
        given = np.empty((most, size), state.dtype)
        change = np.empty((most, size), state.dtype)
        matrix = np.empty((size, size), state.dtype)
        mean = np.empty(size, state.dtype)
        centre = np.empty(size, state.dtype)
        noise = np.empty(size, state.dtype)
        weight = np.empty(size, state.dtype)
        for reference in range(first, last):
            number = (job // runs) * columns.shape[0] + reference
            corners = members[number]
            count = counts[number]
            share = one / count
            for c in range(planes):
                _gather(state[c], corners, count, ph, pw, tokens)
                # The noise of the group: in each sample of a patch the mean over its members.
                if uniform:
                    noise[:] = variance[c, 0, 0]
                else:
                    _gather(variance[c], corners, count, ph, pw, given)
                    noise[:] = 0
                    for k in range(count):
                        row = given[k]
                        for j in range(size):
                            noise[j] += row[j] * share
                total = zero
                for j in range(size):
                    total += noise[j] / size
                # How much of it is left in the state: 1 - std(input - state) / sigma.
                rest = one
                if running:
                    _gather(observed[c], corners, count, ph, pw, given)
                    shift = zero
                    power = zero
                    for k in range(count):
                        row = given[k]
                        token = tokens[k]
                        for j in range(size):
                            removed = row[j] - token[j]
                            shift += removed
                            power += removed * removed
                    shift /= count * size
                    spread = max(power / (count * size) - shift * shift, zero)
                    rest = max(1 - math.sqrt(spread / total), max(leave, one / 1000))
                for j in range(size):
                    noise[j] *= rest * rest * factor
                if shrink > 0:
                    for k in range(count):
                        for j in range(size):
                            source[k, j] = tokens[k, j]
                else:
                    _gather(pilot[c], corners, count, ph, pw, source)
                _centre(source, count, mean)
                np.dot(source[:count].T, source[:count], matrix)
                largest = zero
                for i in range(size):
                    for j in range(size):
                        matrix[i, j] *= share
                    largest = max(largest, matrix[i, i])
                _centre(tokens, count, centre)
                # Rounding leaves the filter uncertain by this much noise. It is no less than that, and where it is more
                # than the noise of the input the group is better left as it is.
                least = largest * uncertain
                if least > total:
                    change[:] = 0
                    weight[:] = 1 / total
                else:
                    for i in range(size):
                        noise[i] = max(noise[i], least)
                        if shrink == 0:
                            matrix[i, i] += noise[i]
                    if shrink > 0:
                        inverse = _clipped_inverse(matrix, noise, shrink)
                    elif size * largest > _WELL_CONDITIONED * noise.min():
                        inverse = np.empty_like(matrix)
                        _careful_inverse(matrix, inverse)
                    else:
                        inverse = _spd_inverse(matrix)
                    for i in range(size):
                        # Variance of a sample of the estimate: that of the filter, and that of the mean. Rounding may
                        # leave the first below 0, and with it a weight of the wrong sign.
                        kept = max(1 - noise[i] * inverse[i, i], zero)
                        weight[i] = 1 / (noise[i] * (kept * (1 - share) + share))
                        for j in range(size):
                            inverse[j, i] *= noise[i]  # N (C + N)^-1, transposed, to act on rows
                    np.dot(tokens[:count], inverse, change[:count])
                keep = leave / rest
                for k in range(count):
                    token = tokens[k]
                    taken = change[k]
                    y = corners[k] // W - top
                    x = corners[k] % W - left
                    for r in range(ph):
                        for s in range(pw):
                            j = r * pw + s
                            now = token[j] + centre[j]
                            sums[0, c, y + r, x + s] += weight[j] * (now - taken[j])
                            sums[1, c, y + r, x + s] += weight[j] * (now - (1 - keep) * taken[j])
                            sums[2, c, y + r, x + s] += weight[j]


@njit(cache=True)
def add_windows(windows, rows, columns, jobs, radii, out):
    """Add the windows of `filter_groups` to the image ``out`` (3, C, H, W), in the order of the jobs."""
    Ry, Rx = radii
    H, W = out.shape[2:]
    runs = (columns.shape[0] + RUN - 1) // RUN
    for slot in range(jobs[1] - jobs[0]):
        job = jobs[0] + slot
        top = rows[job // runs] - Ry
        left = columns[(job % runs) * RUN] - Rx
        start = max(-left, 0)
        stop = min(windows.shape[4], W - left)
        for kind in range(windows.shape[1]):
            for c in range(windows.shape[2]):
                for r in range(windows.shape[3]):
                    y = top + r
                    if 0 <= y < H:
                        target = out[kind, c, y]
                        source = windows[slot, kind, c, r]
                        for j in range(start, stop):
                            target[left + j] += source[j]


@cache
def loop(name: str, precision: str) -> Callable[..., None]:
    """Return a loop compiled for ``float32`` or ``float64``, for arrays as this module describes them."""
    real = types.float32 if precision == "float32" else types.float64

    def array(ndim):
        return types.Array(real, ndim, "C")

    corners, two = types.Array(types.int64, 1, "C"), types.UniTuple(types.int64, 2)
    members, counts = types.Array(types.int32, 2, "C"), types.Array(types.int32, 1, "C")
    images = array(3)
    if name == "find_groups":
        return compiled(find_groups, (images, corners, corners, two, two, two, members, counts))
    if name == "filter_groups":
        return compiled(
            filter_groups,
            (images, images, images, images, members, counts, corners, corners, two, two, two, array(1), array(5)),
        )
    return compiled(add_windows, (array(5), corners, corners, two, two, array(4)))
