"""The local Wiener step on groups of alike patches.

Arrays are planar, (C, slices, rows, columns); an image has one slice, a signal one slice of one row. A patch is known
by its corner, the flat index ``(slice * rows + row) * columns + column``. The work is cut into jobs, each a run of
references in one row of them. A job sums the patches that it puts back into a window of its own, and the windows are
added in the order of the jobs: the result has the same bits for any number of threads, and, as runs start at fixed
references, for an image and for a strip of it.
"""

import math

import numpy as np
from numba import njit, prange, types

from nlflow.backends.numba.calls import Callee, caller
from nlflow.backends.numba.loading import loader
from nlflow.backends.numba.wiener import callee, wiener

# Largest relative error that rounding may leave in the weights of a group of n tokens. They are inverse variances, of
# which the smallest is 1/n of the largest, so an error of the inverse of C + N counts n times. Its condition is at most
# kappa = (trace C + max N) / min N. The error is eps kappa for LAPACK's inverse (backward stable) and eps kappa^2 for
# the fast one, whose Schur complement has passed through an explicit inverse.
ERROR = 0.1
_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}


@njit(fastmath=_FLAGS)
def _gather(volume, corners, count, patch, earliest, follow, out):
    """Copy the patches at `corners` to the rows of `out`; `follow` displaces frames, from the earliest on."""
    pz, ph, pw = patch
    H, W = volume.shape[1:]
    for n in range(count):
        z = corners[n] // (H * W)
        y = corners[n] // W % H
        x = corners[n] % W
        target = out[n]
        for k in range(pz):
            moved = follow[z + k - earliest]
            for r in range(ph):
                source = volume[z + k, y + r + moved[0]]
                at = x + moved[1]
                start = (k * ph + r) * pw
                for c in range(pw):
                    target[start + c] = source[at + c]


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
def _copy(values, out):
    """Copy a line; Numba's own assignment compiles the text of an error too, for seconds."""
    for j in range(out.shape[0]):
        out[j] = values[j]


_wiener = caller(wiener)


@njit(cache=True, fastmath=_FLAGS)
def filter_job(
    single, double, state, pilot, observed, variance, correlation, whitening, extremes, basis, members, counts,
    slices, rows, columns, job, patch, radii, run, motion, leave, factor, shrink, across, running, rounding, sums,
):  # fmt: skip
    """Do one of the jobs of `filter_groups`, which see; `sums` is what it writes."""
    pz, ph, pw = patch
    size = pz * ph * pw
    planes, H, W = state.shape[0], state.shape[2], state.shape[3]
    runs = (columns.shape[0] + run - 1) // run
    follow = motion[min(job, motion.shape[0] - 1)]
    uniform = variance[0].size == 1
    most = members.shape[1]
    real = state.dtype.type  # floats of Python come in double precision; what meets the samples is in theirs
    zero, one, part, scale = real(0), real(1), real(leave), real(factor)
    lowered, mixed = real(shrink), real(across)
    first = (job % runs) * run
    last = min(first + run, columns.shape[0])
    earliest = slices[job // (runs * rows.shape[0])] - radii[0]
    top = rows[job // runs % rows.shape[0]] - radii[1]
    left = columns[first] - radii[2]
    sums[:] = 0
    source = np.empty((most, size), state.dtype)
    tokens = np.empty((most, size), state.dtype)
    given = np.empty((most, size), state.dtype)
    change = np.empty((most, size), state.dtype)
    mean = np.empty(size, state.dtype)
    squares = np.empty(size, state.dtype)
    centre = np.empty(size, state.dtype)
    noise = np.empty(size, state.dtype)
    weight = np.empty((most, size), state.dtype)
    wide = np.empty((4, most, size), np.float64)
    wide_mean = np.empty(size, np.float64)
    wide_noise = np.empty(size, np.float64)
    wide_correlation = correlation.astype(np.float64)
    wide_whitening = whitening.astype(np.float64)
    wide_basis = basis.astype(np.float64)
    for reference in range(first, last):
        number = (job // runs) * columns.shape[0] + reference
        corners = members[number]
        count = counts[number]
        share = real(1 / count)
        for c in range(planes):
            _gather(state[c], corners, count, patch, earliest, follow, tokens)
            # The noise of the group: in each sample of a patch the mean over its members.
            if uniform:
                noise[:] = variance[c, 0, 0, 0]
            else:
                _gather(variance[c], corners, count, patch, earliest, follow, given)
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
                _gather(observed[c], corners, count, patch, earliest, follow, given)
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
            _gather(pilot[c], corners, count, patch, earliest, follow, source)
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
                if across > 0:
                    condition = max(condition, 1 + count * trace / noise.sum())
                if count * rounding[0] * condition * condition < 1:
                    _wiener(
                        single,
                        (
                            tokens[:count], source[:count], noise, correlation[c], whitening[c], basis, lowered,
                            mixed, True, change[:count], weight[:count],
                        ),
                    )  # fmt: skip
                else:
                    _gather(state[c], corners, count, patch, earliest, follow, wide[0])
                    _gather(pilot[c], corners, count, patch, earliest, follow, wide[1])
                    _centre(wide[0, :count], wide_mean)
                    _centre(wide[1, :count], wide_mean)
                    _copy(noise, wide_noise)
                    fast = count * rounding[1] * condition * condition < 1
                    _wiener(
                        double,
                        (
                            wide[0, :count], wide[1, :count], wide_noise, wide_correlation[c],
                            wide_whitening[c], wide_basis, shrink, across, fast, wide[2, :count],
                            wide[3, :count],
                        ),
                    )  # fmt: skip
                    for k in range(count):
                        _copy(wide[2, k], change[k])
                        _copy(wide[3, k], weight[k])
            keep = part / rest
            for k in range(count):
                token = tokens[k]
                taken = change[k]
                trust = weight[k]
                z = corners[k] // (H * W) - earliest
                y = corners[k] // W % H - top
                x = corners[k] % W - left
                for q in range(pz):
                    for r in range(ph):
                        for s in range(pw):
                            j = (q * ph + r) * pw + s
                            now = token[j] + centre[j]
                            sums[0, c, z + q, y + r, x + s] += trust[j] * (now - taken[j])
                            sums[1, c, z + q, y + r, x + s] += trust[j] * (now - (one - keep) * taken[j])
                            sums[2, c, z + q, y + r, x + s] += trust[j]


_filter_job = caller(filter_job)


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def filter_groups(
    one, single, double, state, pilot, observed, variance, correlation, whitening, extremes, basis, members,
    counts, slices, rows, columns, jobs, patch, radii, run, motion, leave, factor, shrink, across, running, rounding,
    out,
):  # fmt: skip
    r"""Filter the groups of some jobs and put the patches back.

    A token z of a group with mean m becomes ``z - N (C + N)^-1 (z - m)``: one semi-implicit step of E with the fidelity
    matrix C N^-1, C the covariance of the group's tokens in the pilot and N the noise that the state still holds. The
    step across the members may have a share of it, see `nlflow.denoising.patches.filters.GroupFilter`.

    Parameters
    ----------
    one, single, double : int
        Addresses of `filter_job`, and of `wiener` in the precision of the state and in double precision.
    state, pilot, observed : (C, Z, H, W)
        The running state z, the estimate from which covariances are taken, and the input.
    variance : (C, Z, H, W) or (C, 1, 1, 1)
        Variance of the noise in the input.
    correlation, whitening, extremes, basis
        Matrices of the noise, see `nlflow.denoising.patches.correlation`; a basis as in `wiener`.
    members, counts : from `nlflow.backends.numba.search.find_groups`
    slices, rows, columns : (A,), (B,), (E,)
    jobs : (first, last)
        Jobs in the order of `find_groups`.
    patch, radii, run, motion
        As in `find_groups`.
    leave, factor, shrink, across, running
        As in `nlflow.denoising.patches.filters.Stage`.
    rounding : (single, double)
        Relative rounding over `ERROR`: of the precision of the state, in which a group is filtered where that is
        enough, and of double precision, in which the others are.
    out : (jobs, 3, C, 2 Rz + pz, 2 Ry + ph, width), output
        Sums of weight x estimate, of weight x next state and of weights, from slice ``slices[a] - Rz``, row
        ``rows[b] - Ry`` and column ``columns[first] - Rx`` on, each slice displaced by its motion.
    """
    for slot in prange(jobs[1] - jobs[0]):
        _filter_job(
            one,
            (
                single, double, state, pilot, observed, variance, correlation, whitening, extremes, basis,
                members, counts, slices, rows, columns, np.int64(jobs[0] + slot), patch, radii, run, motion, leave,
                factor, shrink, across, running, rounding, out[slot],
            ),
        )  # fmt: skip


@njit(cache=True)
def add_windows(windows, slices, rows, columns, jobs, radii, run, motion, out):
    """Add the windows of `filter_groups` to the image ``out`` (3, C, Z, H, W), in the order of the jobs."""
    D, H, W = out.shape[2:]
    runs = (columns.shape[0] + run - 1) // run
    for slot in range(jobs[1] - jobs[0]):
        job = jobs[0] + slot
        follow = motion[min(job, motion.shape[0] - 1)]
        earliest = slices[job // (runs * rows.shape[0])] - radii[0]
        top = rows[job // runs % rows.shape[0]] - radii[1]
        for q in range(max(0, -earliest), min(windows.shape[3], D - earliest)):
            left = columns[(job % runs) * run] - radii[2] + follow[q, 1]
            start = max(-left, 0)
            stop = min(windows.shape[5], W - left)
            for kind in range(windows.shape[1]):
                for c in range(windows.shape[2]):
                    for r in range(windows.shape[4]):
                        y = top + follow[q, 0] + r
                        if 0 <= y < H:
                            target = out[kind, c, earliest + q, y]
                            source = windows[slot, kind, c, q, r]
                            for j in range(start, stop):
                                target[left + j] += source[j]


def _loops(real):
    places, sides = types.Array(types.int64, 1, "C"), types.UniTuple(types.int64, 3)
    counts, members, motion = (types.Array(types.int32, dimensions, "C") for dimensions in (1, 2, 3))
    plane, matrices, volumes, image, windows = (types.Array(real, dimensions, "C") for dimensions in (2, 3, 4, 5, 6))
    number, addresses = types.float64, (types.intp, types.intp)
    inputs = (*(volumes,) * 4, matrices, matrices, plane, plane, members, counts, places, places, places)
    along = (sides, sides, types.int64, motion)
    options = (*(number,) * 4, types.boolean, types.UniTuple(number, 2))
    job = Callee(filter_job, (*addresses, *inputs, types.int64, *along, *options, image))
    jobs = types.UniTuple(types.int64, 2)
    return {
        "filter_groups": (filter_groups, job, callee(real), callee(number), *inputs, jobs, *along, *options, windows),
        "add_windows": (add_windows, windows, places, places, places, jobs, sides, types.int64, motion, image),
    }


loop = loader(_loops)
