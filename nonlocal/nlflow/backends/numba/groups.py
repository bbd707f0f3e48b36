"""The local Wiener step on groups of alike patches.

Arrays are planar, (C, slices, rows, columns); an image has one slice, a signal one slice of one row. A patch is known
by its corner, the flat index ``(slice * rows + row) * columns + column``. The work is cut into jobs, each a run of
references in one row of them. A job sums the patches that it puts back into a window of its own, and the windows are
added in the order of the jobs: the result has the same bits for any number of threads, and, as runs start at fixed
references, for an image and for a strip of it.
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nlflow.backends.numba.calls import Callee, caller
from nlflow.backends.numba.loading import loader
from nlflow.backends.numba.vectors import Vectors
from nlflow.backends.numba.wiener import ROWS, callee, padded, wiener

# Largest relative error that rounding may leave in the weights of a group of n tokens. They are inverse variances, of
# which the smallest is 1/n of the largest, so an error of the inverse of C + N counts n times. Its condition is at most
# kappa = (trace C + max N) / min N, and the error eps kappa.
ERROR = 0.1
_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}


class _Rows:
    """Writes a loop over the rows of a patch, which lie one after the other in a token.

    `body` gets where a vector lies in the image and in the token, and which of its lanes are in the patch.
    """

    def __init__(self, builder, bits):
        self.vectors = Vectors(builder, bits)

    def each(self, rows, columns, step, body):
        v, builder = self.vectors, self.vectors.builder
        kind = ir.VectorType(ir.IntType(64), v.lanes)
        lanes = ir.Constant(kind, list(range(v.lanes)))

        def row(r, state):
            def block(b, state):
                left = builder.sub(columns, b)
                ends = builder.shuffle_vector(
                    builder.insert_element(ir.Constant(kind, ir.Undefined), left, ir.Constant(ir.IntType(32), 0)),
                    ir.Constant(kind, ir.Undefined),
                    ir.Constant(ir.VectorType(ir.IntType(32), v.lanes), [0] * v.lanes),
                )
                inside = builder.icmp_signed("<", lanes, ends)
                body(builder.add(builder.mul(r, step), b), builder.add(builder.mul(r, columns), b), inside)
                return state

            return v.repeat(columns, v.lanes, state, block)

        v.repeat(rows, 1, [], row)


@intrinsic
def _take(typingctx, image, place, step, rows, columns, token, start):
    """Copy the rows of a patch from an image to a token, and write zeros after them."""
    signature = types.void(image, place, step, rows, columns, token, start)

    def codegen(context, builder, signature, arguments):
        _, place, step, rows, columns, _, start = arguments
        loop = _Rows(builder, signature.args[0].dtype.bitwidth)
        v = loop.vectors
        image, token = (context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 5))

        def body(there, here, inside):
            v.store(v.load_some(image, builder.add(place, there), inside), token, builder.add(start, here))

        loop.each(rows, columns, step, body)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _put(typingctx, token, change, start, centre, weight, first, keep, rows, columns, window, place, step, kind):
    """Add the rows of a filtered patch to a window of sums, whose kinds are `kind` samples apart."""
    signature = types.void(
        token, change, start, centre, weight, first, keep, rows, columns, window, place, step, kind
    )  # fmt: skip

    def codegen(context, builder, signature, arguments):
        _, _, start, _, _, first, keep, rows, columns, _, place, step, kind = arguments
        loop = _Rows(builder, signature.args[0].dtype.bitwidth)
        v = loop.vectors
        token, change, centre, weight, window = (
            context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 1, 3, 4, 9)
        )
        kept, nothing = v.broadcast(keep), v.constant(0.0)

        def body(there, here, inside):
            own, common = builder.add(start, here), builder.add(first, here)
            taken = v.load(change, own)
            share = v.where(inside, v.load(weight, common), nothing)
            now = builder.fsub(builder.fadd(v.load(token, own), v.load(centre, common)), taken)
            estimate = builder.fmul(share, now)
            following = v.multiply_add(builder.fmul(share, kept), taken, estimate)
            target = builder.add(place, there)
            for value in (estimate, following, share):
                v.store(builder.fadd(v.load(window, target), value), window, target)
                target = builder.add(target, kind)

        loop.each(rows, columns, step, body)
        return context.get_dummy_value()

    return signature, codegen


@njit(fastmath=_FLAGS)
def _gather(volume, corners, count, patch, earliest, follow, out):
    """Copy the patches at `corners` to the rows of `out`; `follow` displaces frames, from the earliest on."""
    pz, ph, pw = patch
    D, H, W = volume.shape
    image = volume.reshape(volume.size)
    tokens = out.reshape(out.size)
    for n in range(count):
        corner = np.int64(corners[n])
        z = corner // (H * W) if D > 1 else 0
        for k in range(pz):
            moved = follow[z + k - earliest]
            place = corner + (k * H + moved[0]) * W + moved[1]
            _take(image, place, W, ph, pw, tokens, n * out.shape[1] + k * ph * pw)


@njit(fastmath=_FLAGS)
def _centre(tokens, count, mean):
    """Take the mean token, left in `mean`, from each of some tokens."""
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
    slices, rows, columns, job, patch, radii, run, motion, leave, factor, shrink, running, rounding, sums,
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
    zero, one, part, scale, lowered = real(0), real(1), real(leave), real(factor), real(shrink)
    first = (job % runs) * run
    last = min(first + run, columns.shape[0])
    earliest = slices[job // (runs * rows.shape[0])] - radii[0]
    top = rows[job // runs % rows.shape[0]] - radii[1]
    left = columns[first] - radii[2]
    sums[:] = 0
    wide = padded(size, state.itemsize)
    most = (members.shape[1] + ROWS - 1) // ROWS * ROWS
    source = np.zeros((most + 1, wide), state.dtype)
    tokens = np.zeros((most + 1, wide), state.dtype)
    given = np.zeros((most + 1, wide), state.dtype)
    change = np.zeros((most + 1, wide), state.dtype)
    room = np.zeros((5, wide, wide), state.dtype)
    mean = np.zeros(wide, state.dtype)
    centre = np.zeros(wide, state.dtype)
    noise = np.zeros(wide, state.dtype)
    weight = np.zeros(wide, state.dtype)
    wide_tokens = np.zeros((3, most, wide), np.float64)
    wide_room = np.zeros((5, wide, wide), np.float64)
    wide_mean = np.zeros(wide, np.float64)
    wide_noise = np.zeros(wide, np.float64)
    wide_weight = np.zeros(wide, np.float64)
    wide_correlation = correlation.astype(np.float64)
    wide_whitening = whitening.astype(np.float64)
    wide_basis = basis.astype(np.float64)
    flat_tokens, flat_change = tokens.reshape(tokens.size), change.reshape(change.size)
    window = sums.reshape(sums.size)
    kind = window.size // 3
    for reference in range(first, last):
        number = (job // runs) * columns.shape[0] + reference
        corners = members[number]
        count = np.int64(counts[number])
        share = real(1 / count)
        for c in range(planes):
            _gather(state[c], corners, count, patch, earliest, follow, tokens)
            # The noise of the group: in each sample of a patch the mean over its members.
            if uniform:
                for j in range(size):
                    noise[j] = variance[c, 0, 0, 0]
            else:
                _gather(variance[c], corners, count, patch, earliest, follow, given)
                for j in range(size):
                    noise[j] = 0
                for k in range(count):
                    for j in range(size):
                        noise[j] += given[k, j] * share
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
                    first_sum = zero
                    second_sum = zero
                    for j in range(wide):
                        removed = given[k, j] - tokens[k, j]
                        first_sum += removed
                        second_sum += removed * removed
                    shift += first_sum
                    power += second_sum
                shift /= count * size
                spread = max(power / (count * size) - shift * shift, 0.0)
                rest = real(max(1 - math.sqrt(spread / total), max(part, 1 / 1000)))
            lowest = noise[0] * rest * rest * scale
            highest = lowest
            for j in range(size):
                noise[j] *= rest * rest * scale
            _gather(pilot[c], corners, count, patch, earliest, follow, source)
            _centre(source, count, mean)
            _centre(tokens, count, centre)
            trace = zero
            for k in range(count):
                for j in range(wide):
                    trace += source[k, j] * source[k, j]
            trace *= share
            # Less noise than this drowns in rounding. It counts as so much; where that is more than the noise of
            # the input the group is left as it is.
            least = count * rounding[1] * trace
            if least > total:
                change[:] = 0
                for j in range(size):
                    weight[j] = 1 / total
            else:
                for j in range(size):
                    noise[j] = max(noise[j], least)
                    lowest = min(lowest if j > 0 else noise[j], noise[j])
                    highest = max(highest, noise[j])
                condition = (trace + highest * extremes[c, 1]) / (lowest * extremes[c, 0])
                if count * rounding[0] * condition < 1:
                    _wiener(
                        single,
                        (
                            tokens, source, count, size, noise, correlation[c], whitening[c], basis, lowered, room,
                            change, weight,
                        ),
                    )  # fmt: skip
                else:
                    _gather(state[c], corners, count, patch, earliest, follow, given)
                    for k in range(count):
                        _copy(given[k], wide_tokens[0, k])
                    _gather(pilot[c], corners, count, patch, earliest, follow, given)
                    for k in range(count):
                        _copy(given[k], wide_tokens[1, k])
                    _centre(wide_tokens[0], count, wide_mean)
                    _centre(wide_tokens[1], count, wide_mean)
                    _copy(noise, wide_noise)
                    _wiener(
                        double,
                        (
                            wide_tokens[0], wide_tokens[1], count, size, wide_noise, wide_correlation[c],
                            wide_whitening[c], wide_basis, shrink, wide_room, wide_tokens[2], wide_weight,
                        ),
                    )  # fmt: skip
                    for k in range(count):
                        _copy(wide_tokens[2, k], change[k])
                    _copy(wide_weight, weight)
            keep = real(part / rest)
            for k in range(count):
                corner = np.int64(corners[k])
                z = corner // (H * W) if state.shape[1] > 1 else 0
                y = (corner - z * H * W) // W
                x = corner - (z * H + y) * W - left
                for q in range(pz):
                    place = ((c * sums.shape[2] + z - earliest + q) * sums.shape[3] + y - top) * sums.shape[4] + x
                    skipped = q * ph * pw
                    _put(
                        flat_tokens, flat_change, k * wide + skipped, centre, weight, skipped, keep, ph, pw, window,
                        place, sums.shape[4], kind,
                    )  # fmt: skip


_filter_job = caller(filter_job)


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def filter_groups(
    one, single, double, state, pilot, observed, variance, correlation, whitening, extremes, basis, members,
    counts, slices, rows, columns, jobs, patch, radii, run, motion, leave, factor, shrink, running, rounding, out,
):  # fmt: skip
    r"""Filter the groups of some jobs and put the patches back.

    A token z of a group with mean m becomes ``z - N (C + N)^-1 (z - m)``: one semi-implicit step of E with the fidelity
    matrix C N^-1, C the covariance of the group's tokens in the pilot and N the noise that the state still holds.

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
    leave, factor, shrink, running
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
                factor, shrink, running, rounding, out[slot],
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
    options = (number, number, number, types.boolean, types.UniTuple(number, 2))
    job = Callee(filter_job, (*addresses, *inputs, types.int64, *along, *options, image))
    jobs = types.UniTuple(types.int64, 2)
    return {
        "filter_groups": (filter_groups, job, callee(real), callee(number), *inputs, jobs, *along, *options, windows),
        "add_windows": (add_windows, windows, places, places, places, jobs, sides, types.int64, motion, image),
    }


loop = loader(_loops)
