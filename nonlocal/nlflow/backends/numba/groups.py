"""The local Wiener step on groups of alike patches.

Arrays are planar, (C, rows, columns); a one-dimensional signal is a grid of one row. A patch is known by its corner,
the flat index ``row * columns + column``. The work is cut into jobs, each a run of at most `RUN` references in one
row of them. A job sums the patches that it puts back into a window of its own, and the windows are added in the order
of the jobs: the result has the same bits for any number of threads, and, as runs start at fixed references, for an
image and for a strip of it.

Products of matrices and eigenvalues are left to BLAS and LAPACK, which beat compiled loops here by a factor of 4 to 10.
"""

import math

import numpy as np
from numba import njit, prange, types

from nlflow.backends.numba import RUN
from nlflow.backends.numba.loading import loader

# Largest relative error that rounding may leave in the weights of a group of n tokens. They are inverse variances, of
# which the smallest is 1/n of the largest, so an error of the inverse of C + N counts n times. Its condition is at most
# kappa = (trace C + max N) / min N. The error is eps kappa for LAPACK's inverse (backward stable) and eps kappa^2 for
# the fast one, whose Schur complement has passed through an explicit inverse.
ERROR = 0.1
_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}


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
def _centre(tokens, mean):
    """Take the mean token, left in `mean`, from each token."""
    count = tokens.shape[0]
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

    At the sizes of patches it takes half the time of LAPACK's general inverse (which is all that Numba offers), and it
    loses the square of the condition where that loses the condition.
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


@njit(fastmath=_FLAGS)
def _clipped_inverse(noisy, noise, whitening, shrink):
    """Return (C' + N)^-1, where N^-1/2 C' N^-1/2 has the eigenvalues of N^-1/2 C N^-1/2 less `shrink`.

    C is the covariance of noisy tokens; eigenvalues are cut off at 0. N^-1/2 is the `whitening` (none, when it is
    empty) of samples that were divided by the root of their noise.
    """
    size = noisy.shape[0]
    for i in range(size):
        for j in range(size):
            noisy[i, j] /= math.sqrt(noise[i] * noise[j])
    if whitening.size:
        noisy = np.dot(np.dot(whitening, noisy), whitening)
    values, vectors = np.linalg.eigh(noisy)
    if whitening.size:
        vectors = np.asfortranarray(np.dot(whitening, np.ascontiguousarray(vectors)))
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


@njit(fastmath=_FLAGS)
def _wiener(tokens, source, noise, correlation, whitening, shrink, fast, change, weight):
    """Filter the tokens of a group, all in one precision.

    Parameters
    ----------
    tokens : (n, size)
        z - m.
    source : (n, size)
        What the covariance C is taken from, about its mean.
    noise : (size,)
        The diagonal of N.
    correlation, whitening : (size, size)
        R with N_ij = R_ij (N_ii N_jj)^1/2, and R^-1/2; both are empty for noise that is not correlated.
    shrink : float
        Multiple of the noise that is taken from the eigenvalues of C.
    fast : bool
        Whether the fast inverse of C + N is good enough.
    change : (n, size), output
        N (C + N)^-1 (z - m).
    weight : (size,), output
        Inverse variance of each sample of the estimate.
    """
    count, size = tokens.shape
    real = noise.dtype.type
    zero, share = real(0), real(1 / count)
    matrix = np.empty((size, size), noise.dtype)
    np.dot(source.T, source, matrix)
    full = np.empty_like(correlation)
    for i in range(correlation.shape[0]):
        for j in range(size):
            full[i, j] = correlation[i, j] * math.sqrt(noise[i] * noise[j])
    for i in range(size):
        for j in range(size):
            matrix[i, j] *= share
        if shrink == 0 and full.size == 0:
            matrix[i, i] += noise[i]
    if shrink == 0 and full.size:
        matrix += full
    if shrink > 0:
        inverse = _clipped_inverse(matrix, noise, whitening, shrink)
    elif fast:
        inverse = _spd_inverse(matrix)
    else:
        inverse = np.ascontiguousarray(np.linalg.inv(matrix))
    # N (C + N)^-1, transposed, to act on rows.
    if full.size:
        inverse = np.dot(inverse, full)
    else:
        for i in range(size):
            for j in range(size):
                inverse[j, i] *= noise[i]
    for i in range(size):
        # Variance of a sample of the estimate: that of the filter, and that of the mean. The first cannot be negative,
        # whatever rounding leaves of it.
        kept = max(1 - inverse[i, i], zero)
        of_mean = share
        if full.size:
            kept = correlation[i, i]  # 1, or a little more: eigenvalues were raised
            of_mean = share * kept
            for j in range(size):
                kept -= full[i, j] * inverse[j, i] / noise[i]
            kept = max(kept, zero)
        weight[i] = 1 / (noise[i] * (kept * (1 - share) + of_mean))
    np.dot(tokens, inverse, change)


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def filter_groups(
    state, pilot, observed, variance, correlation, whitening, extremes, members, counts, rows, columns, jobs, patch,
    radii, leave, factor, shrink, running, rounding, out,
):  # fmt: skip
    r"""Filter the groups of some jobs and put the patches back.

    A token z of a group with mean m becomes ``z - N (C + N)^-1 (z - m)``: one semi-implicit step of E with the fidelity
    matrix C N^-1, C the covariance of the group's tokens in the pilot and N the noise that the state still holds.

    Parameters
    ----------
    state, pilot, observed : (C, H, W)
        The running state z, the estimate from which covariances are taken, and the input.
    variance : (C, H, W) or (C, 1, 1)
        Variance of the noise in the input.
    members, counts : from `nlflow.backends.numba.search.find_groups`
    rows, columns : (A,), (B,)
    jobs : (first, last)
        Jobs in the order of `find_groups`.
    patch, radii : (ph, pw), (Ry, Rx)
    leave, factor, shrink, running
        As in `nlflow.denoising.patches.filters.Stage`.
    rounding : (single, double)
        Relative rounding over `ERROR`: of the precision of the state, in which a group is filtered where that is
        enough, and of double precision, in which the others are.
    out : (jobs, 3, C, 2 Ry + ph, width), output
        Sums of weight x estimate, of weight x next state and of weights, from row ``rows[a] - Ry`` and column
        ``columns[first] - Rx`` on.
    """
    ph, pw = patch
    Ry, Rx = radii
    size = ph * pw
    planes, W = state.shape[0], state.shape[2]
    runs = (columns.shape[0] + RUN - 1) // RUN
    uniform = variance.shape[1] * variance.shape[2] == 1
    most = members.shape[1]
    real = state.dtype.type  # floats of Python come in double precision; what meets the samples is in theirs
    zero, one, part, scale, lowered = real(0), real(1), real(leave), real(factor), real(shrink)
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
        mean = np.empty(size, state.dtype)
        squares = np.empty(size, state.dtype)
        centre = np.empty(size, state.dtype)
        noise = np.empty(size, state.dtype)
        weight = np.empty(size, state.dtype)
        wide = np.empty((3, most, size), np.float64)
        wide_mean = np.empty(size, np.float64)
        wide_noise = np.empty(size, np.float64)
        wide_weight = np.empty(size, np.float64)
        wide_correlation = correlation.astype(np.float64)
        wide_whitening = whitening.astype(np.float64)
        for reference in range(first, last):
            number = (job // runs) * columns.shape[0] + reference
            corners = members[number]
            count = counts[number]
            share = real(1 / count)
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
                    shift = 0.0
                    power = 0.0
                    for k in range(count):
                        row = given[k]
                        token = tokens[k]
                        first_sum = zero
                        second_sum = zero
                        for j in range(size):
                            removed = row[j] - token[j]
                            first_sum += removed
                            second_sum += removed * removed
                        shift += first_sum
                        power += second_sum
                    shift /= count * size
                    spread = max(power / (count * size) - shift * shift, 0.0)
                    rest = max(real(1 - math.sqrt(spread / total)), max(part, one / 1000))
                for j in range(size):
                    noise[j] *= rest * rest * scale
                _gather(pilot[c], corners, count, ph, pw, source)
                _centre(source[:count], mean)
                _centre(tokens[:count], centre)
                squares[:] = 0
                for k in range(count):
                    row = source[k]
                    for j in range(size):
                        squares[j] += row[j] * row[j]
                trace = squares.sum() * share
                # Less noise than this drowns in rounding. It counts as so much; where that is more than the noise of
                # the input the group is left as it is.
                least = count * rounding[1] * trace
                if least > total:
                    change[:] = 0
                    weight[:] = 1 / total
                else:
                    for j in range(size):
                        noise[j] = max(noise[j], least)
                    condition = (trace + noise.max() * extremes[c, 1]) / (noise.min() * extremes[c, 0])
                    if count * rounding[0] * condition * condition < 1:
                        _wiener(
                            tokens[:count], source[:count], noise, correlation[c], whitening[c], lowered, True,
                            change[:count], weight,
                        )  # fmt: skip
                    else:
                        _gather(state[c], corners, count, ph, pw, wide[0])
                        _gather(pilot[c], corners, count, ph, pw, wide[1])
                        _centre(wide[0, :count], wide_mean)
                        _centre(wide[1, :count], wide_mean)
                        wide_noise[:] = noise
                        fast = count * rounding[1] * condition * condition < 1
                        _wiener(
                            wide[0, :count], wide[1, :count], wide_noise, wide_correlation[c], wide_whitening[c],
                            shrink, fast, wide[2, :count], wide_weight,
                        )  # fmt: skip
                        change[:] = wide[2]
                        weight[:] = wide_weight
                keep = part / rest
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
                            sums[1, c, y + r, x + s] += weight[j] * (now - (one - keep) * taken[j])
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


def _loops(real):
    places, two = types.Array(types.int64, 1, "C"), types.UniTuple(types.int64, 2)
    counts, members = (types.Array(types.int32, dimensions, "C") for dimensions in (1, 2))
    plane, planes, image, windows = (types.Array(real, dimensions, "C") for dimensions in (2, 3, 4, 5))
    number = types.float64
    return {
        "filter_groups": (filter_groups, planes, planes, planes, planes, planes, planes, plane, members, counts, places,
                          places, two, two, two, number, number, number, types.boolean, types.UniTuple(number, 2),
                          windows),
        "add_windows": (add_windows, windows, places, places, two, two, image),
    }  # fmt: skip


loop = loader(_loops)
