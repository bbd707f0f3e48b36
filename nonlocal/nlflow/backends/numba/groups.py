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
from numba.extending import intrinsic

from nlflow.backends.numba.calls import Callee, caller
from nlflow.backends.numba.loading import loader
from nlflow.backends.numba.vectors import Vectors, index
from nlflow.backends.numba.wiener import ROWS, callee, padded, wiener

# Largest relative error that rounding may leave in the weights of a group of n tokens. They are inverse variances, of
# which the smallest is 1/n of the largest, so an error of the inverse of C + N counts n times. Its condition is at most
# kappa = (trace C + max N) / min N, and the error eps kappa.
ERROR = 0.1
_BAND = 32  # rows that a thread adds up
_SHORT = 32  # bytes of a vector that holds the row of a patch
_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}


def _data(context, builder, signature, arguments, place):
    return context.make_array(signature.args[place])(context, builder, arguments[place]).data


@intrinsic
def _take(typingctx, image, base, places, most, count, frames, step, rows, columns, tokens, width):
    """Copy patches to tokens, row by row.

    The one of member n begins at ``base + places[k, n]`` of the image in its frame k; `most` is how many n there are,
    `step` lies between two rows.
    """
    signature = types.void(image, base, places, most, count, frames, step, rows, columns, tokens, width)

    def codegen(context, builder, signature, arguments):
        _, base, _, most, count, frames, step, rows, columns, _, width = arguments
        v = Vectors(builder, signature.args[0].dtype.bitwidth, _SHORT)
        image, places, tokens = (_data(context, builder, signature, arguments, i) for i in (0, 2, 9))
        # What is left of a row gets the last vector in it; a row that is shorter than a vector gets zeros after it.
        lanes = index(v.lanes)
        narrow = builder.icmp_signed("<", columns, lanes)
        rest = builder.select(narrow, index(0), builder.sub(columns, lanes))
        inside = v.lanes_before(columns)

        def patch(n, state):
            def frame(k, state):
                place = builder.load(builder.gep(places, [builder.add(builder.mul(k, most), n)]))

                def row(r, state):
                    def block(b, nothing):
                        b = builder.select(builder.icmp_signed("<", b, rest), b, rest)
                        value = v.load_some(image, builder.add(state[0], b), inside)
                        v.store(value, tokens, builder.add(state[1], b))
                        return nothing

                    v.repeat(columns, v.lanes, [], block)
                    return [builder.add(state[0], step), builder.add(state[1], columns)]

                return v.repeat(rows, 1, [builder.add(base, place), *state], row)[1:]

            v.repeat(frames, 1, [builder.mul(n, width)], frame)
            return state

        v.repeat(count, 1, [], patch)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _put(
    typingctx,
    tokens,
    change,
    centre,
    weight,
    spread,
    keep,
    start,
    width,
    count,
    rows,
    columns,
    places,
    first,
    step,
    kind,
    out,
    base,
):
    """Add the rows of filtered patches to places in windows of sums, whose kinds are `kind` apart.

    Weights of patches are `spread` apart; 0 where all patches have the same.
    """
    signature = types.void(
        tokens, change, centre, weight, spread, keep, start, width, count, rows, columns, places, first, step, kind,
        out, base,
    )  # fmt: skip

    def codegen(context, builder, signature, arguments):
        _, _, _, _, spread, keep, start, width, count, rows, columns, _, first, step, kind, _, base = arguments
        v = Vectors(builder, signature.args[0].dtype.bitwidth, _SHORT)
        tokens, change, centre, weight, places, out = (
            _data(context, builder, signature, arguments, i) for i in (0, 1, 2, 3, 11, 15)
        )
        kept, nothing = v.broadcast(keep), v.constant(0.0)

        def block(b, state):
            inside, shift = v.lanes_before(builder.sub(columns, b)), builder.add(base, b)

            def patch(n, state):
                place = builder.add(builder.load(builder.gep(places, [builder.add(first, n)])), shift)
                own = builder.add(builder.mul(n, width), b)
                trust = builder.add(builder.mul(n, spread), b)

                def row(r, state):
                    target, common = state
                    here = builder.add(own, common)
                    taken = v.load(change, here)
                    share = v.where(inside, v.load(weight, builder.add(common, trust)), nothing)
                    now = builder.fadd(v.load(tokens, here), v.load(centre, builder.add(common, b)))
                    estimate = builder.fmul(share, builder.fsub(now, taken))
                    following = v.multiply_add(builder.fmul(share, kept), taken, estimate)
                    at = target
                    for value in (estimate, following, share):
                        v.store(builder.fadd(v.load(out, at), value), out, at)
                        at = builder.add(at, kind)
                    return [builder.add(target, step), builder.add(common, columns)]

                v.repeat(rows, 1, [place, start], row)
                return state

            v.repeat(count, 1, state, patch)
            return state

        v.repeat(columns, v.lanes, [], block)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _centre(typingctx, tokens, width, count, share, mean):
    """Take the mean token, which is written to `mean`, from tokens; `share` is 1 / count."""
    signature = types.void(tokens, width, count, share, mean)

    def codegen(context, builder, signature, arguments):
        _, width, count, share, _ = arguments
        v = Vectors(builder, signature.args[0].dtype.bitwidth)
        tokens, mean = (_data(context, builder, signature, arguments, i) for i in (0, 4))
        size = builder.mul(count, width)

        def block(b, state):
            def add(at, state):
                return [builder.fadd(state[0], v.load(tokens, builder.add(at, b)))]

            (total,) = v.repeat(size, width, [v.constant(0.0)], add)
            middle = builder.fmul(total, v.broadcast(share))
            v.store(middle, mean, b)

            def subtract(at, state):
                place = builder.add(at, b)
                v.store(builder.fsub(v.load(tokens, place), middle), tokens, place)
                return state

            v.repeat(size, width, [], subtract)
            return state

        v.repeat(width, v.lanes, [], block)
        return context.get_dummy_value()

    return signature, codegen


@njit(fastmath=_FLAGS)
def _gather(volume, c, places, count, patch, tokens):
    """Copy the patches at some places of a channel to the rows of `tokens`."""
    _, D, H, W = volume.shape
    pz, ph, pw = patch
    _take(volume, c * D * H * W, places, places.shape[1], count, pz, W, ph, pw, tokens, tokens.shape[1])


@njit(fastmath=_FLAGS)
def _copy(values, out):
    """Copy a line; Numba's own assignment compiles the text of an error too, for seconds."""
    for j in range(out.shape[0]):
        out[j] = values[j]


_wiener = caller(wiener)
_padded = njit(padded)


@njit(cache=True, fastmath=_FLAGS)
def filter_job(
    single, double, state, pilot, observed, variance, correlation, whitening, extremes, basis, members, counts,
    slices, rows, columns, job, patch, radii, run, motion, leave, factor, shrink, powers, across,
    running, rounding, sums,
):  # fmt: skip
    """Do one of the jobs of `filter_groups`, which see; `sums` is what it writes."""
    pz, ph, pw = patch
    size = pz * ph * pw
    planes, H, W = state.shape[0], state.shape[2], state.shape[3]
    runs = (columns.shape[0] + run - 1) // run
    follow = motion[min(job, motion.shape[0] - 1)]
    uniform = variance[0].size == 1
    real = state.dtype.type  # floats of Python come in double precision; what meets the samples is in theirs
    zero, one, part, scale = real(0), real(1), real(leave), real(factor)
    lowered, mixed = real(shrink), real(across)
    first = (job % runs) * run
    last = min(first + run, columns.shape[0])
    earliest = slices[job // (runs * rows.shape[0])] - radii[0]
    top = rows[job // runs % rows.shape[0]] - radii[1]
    left = columns[first] - radii[2]
    sums[:] = 0
    wide = _padded(size, state.itemsize)
    most = (members.shape[1] + ROWS - 1) // ROWS * ROWS
    source = np.zeros((most + 1, wide), state.dtype)
    tokens = np.zeros((most + 1, wide), state.dtype)
    given = np.zeros((most + 1, wide), state.dtype)
    change = np.zeros((most + 1, wide), state.dtype)
    weight = np.zeros((most + 1, wide), state.dtype)
    apart = wide if across > 0 else 0
    breadth = _padded(most, state.itemsize)
    room = np.zeros((6, max(wide, most), wide), state.dtype)
    among = np.zeros((4, max(wide, breadth), breadth), state.dtype)
    line = wide + _SHORT // state.itemsize  # the last row of a patch may be shorter than a vector
    mean = np.zeros(line, state.dtype)
    centre = np.zeros(line, state.dtype)
    noise = np.zeros(line, state.dtype)
    wide_tokens = np.zeros((4, most, wide), np.float64)
    wide_room = np.zeros(room.shape, np.float64)
    wide_among = np.zeros(among.shape, np.float64)
    wide_mean = np.zeros(line, np.float64)
    wide_noise = np.zeros(line, np.float64)
    wide_correlation = correlation.astype(np.float64)
    wide_whitening = whitening.astype(np.float64)
    wide_basis = basis.astype(np.float64)
    wide_powers = powers.astype(np.float64)
    flat_tokens = tokens.reshape(tokens.size)
    flat_source = source.reshape(source.size)
    flat_given = given.reshape(given.size)
    # Where the patches of a group lie in a channel, frame by frame, and in the window.
    places = np.empty((pz, most), np.int64)
    there = np.empty((pz, most), np.int64)
    kind = sums.size // 3
    for reference in range(first, last):
        number = (job // runs) * columns.shape[0] + reference
        count = np.int64(counts[number])
        share = real(1 / count)
        for k in range(count):
            corner = np.int64(members[number, k])
            z = corner // (H * W) if state.shape[1] > 1 else 0
            y = (corner - z * H * W) // W
            x = corner - (z * H + y) * W
            for q in range(pz):
                moved = follow[z - earliest + q, 0] * W + follow[z - earliest + q, 1]
                places[q, k] = corner + q * H * W + moved
                there[q, k] = ((z - earliest + q) * sums.shape[3] + y - top) * sums.shape[4] + x - left
        for c in range(planes):
            _gather(state, c, places, count, patch, tokens)
            # The noise of the group: in each sample of a patch the mean over its members.
            if uniform:
                for j in range(size):
                    noise[j] = variance[c, 0, 0, 0]
            else:
                _gather(variance, c, places, count, patch, given)
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
                _gather(observed, c, places, count, patch, given)
                shift = zero
                power = zero
                for i in range(count * wide):
                    removed = flat_given[i] - flat_tokens[i]
                    shift += removed
                    power += removed * removed
                shift /= count * size
                spread = max(power / (count * size) - shift * shift, 0.0)
                rest = real(max(1 - math.sqrt(spread / total), max(part, 1 / 1000)))
            for j in range(size):
                noise[j] *= rest * rest * scale
            _gather(pilot, c, places, count, patch, source)
            _centre(source, wide, count, share, mean)
            _centre(tokens, wide, count, share, centre)
            trace = zero
            for i in range(count * wide):
                trace += flat_source[i] * flat_source[i]
            trace *= share
            # Less noise than this drowns in rounding. It counts as so much; where that is more than the noise of
            # the input the group is left as it is.
            least = count * rounding[1] * trace
            if least > total:
                change[:] = 0
                for k in range(count if across > 0 else 1):
                    for j in range(size):
                        weight[k, j] = 1 / total
            else:
                lowest = highest = max(noise[0], real(least))
                ridge = zero
                for j in range(size):
                    noise[j] = max(noise[j], real(least))
                    lowest = min(lowest, noise[j])
                    highest = max(highest, noise[j])
                    ridge += noise[j]
                condition = (trace + highest * extremes[c, 1]) / (lowest * extremes[c, 0])
                if across > 0:
                    condition = max(condition, 1 + count * trace / ridge)
                if count * rounding[0] * condition < 1:
                    _wiener(
                        single,
                        (
                            tokens, source, count, size, noise, correlation[c], whitening[c], basis, lowered, powers,
                            mixed, room, among, change, weight,
                        ),
                    )  # fmt: skip
                else:
                    _gather(state, c, places, count, patch, given)
                    for k in range(count):
                        _copy(given[k], wide_tokens[0, k])
                    _gather(pilot, c, places, count, patch, given)
                    for k in range(count):
                        _copy(given[k], wide_tokens[1, k])
                    _centre(wide_tokens[0], wide, count, 1 / count, wide_mean)
                    _centre(wide_tokens[1], wide, count, 1 / count, wide_mean)
                    _copy(noise, wide_noise)
                    _wiener(
                        double,
                        (
                            wide_tokens[0], wide_tokens[1], count, size, wide_noise, wide_correlation[c],
                            wide_whitening[c], wide_basis, shrink, wide_powers, across, wide_room, wide_among,
                            wide_tokens[2], wide_tokens[3],
                        ),
                    )  # fmt: skip
                    for k in range(count):
                        _copy(wide_tokens[2, k], change[k])
                    for k in range(count if across > 0 else 1):
                        _copy(wide_tokens[3, k], weight[k])
            keep = real(part / rest)
            for q in range(pz):
                _put(
                    tokens, change, centre, weight, apart, keep, q * ph * pw, wide, count, ph, pw, there, q * most,
                    sums.shape[4], kind, sums, c * (kind // planes),
                )  # fmt: skip


_filter_job = caller(filter_job)


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def filter_groups(
    one, single, double, state, pilot, observed, variance, correlation, whitening, extremes, basis, members,
    counts, slices, rows, columns, jobs, patch, radii, run, motion, leave, factor, shrink, powers, across,
    running, rounding, out,
):  # fmt: skip
    r"""Filter the groups of some jobs and put the patches back.

    A token z of a group with mean m becomes ``z - N (C + N)^-1 (z - m)``: one semi-implicit step of E with the fidelity
    matrix C N^-1, C the covariance of the group's tokens in the pilot and N the noise that the state still holds. A
    share of it may be replaced by the step across the members, see `nlflow.denoising.patches.filters.GroupFilter`.

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
    powers : (9,) or (0,)
        As in `wiener`.
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
                factor, shrink, powers, across, running, rounding, out[slot],
            ),
        )  # fmt: skip


@njit(parallel=True, cache=True)
def add_windows(windows, slices, rows, columns, jobs, radii, run, motion, out):
    """Add the windows of `filter_groups` to the image ``out`` (3, C, Z, H, W), in the order of the jobs.

    Each thread has some rows of the image.
    """
    D, H, W = out.shape[2:]
    runs = (columns.shape[0] + run - 1) // run
    for band in prange((H + _BAND - 1) // _BAND):
        for slot in range(jobs[1] - jobs[0]):
            job = jobs[0] + slot
            follow = motion[min(job, motion.shape[0] - 1)]
            earliest = slices[job // (runs * rows.shape[0])] - radii[0]
            top = rows[job // runs % rows.shape[0]] - radii[1]
            for q in range(max(0, -earliest), min(windows.shape[3], D - earliest)):
                left = columns[(job % runs) * run] - radii[2] + follow[q, 1]
                start, stop = max(-left, 0), min(windows.shape[5], W - left)
                above = top + follow[q, 0]
                first = max(band * _BAND - above, 0)
                last = min(min((band + 1) * _BAND, H) - above, windows.shape[4])
                for kind in range(windows.shape[1]):
                    for c in range(windows.shape[2]):
                        for r in range(first, last):
                            for j in range(start, stop):
                                out[kind, c, earliest + q, above + r, left + j] += windows[slot, kind, c, q, r, j]


def _loops(real):
    places, sides = types.Array(types.int64, 1, "C"), types.UniTuple(types.int64, 3)
    counts, members, motion = (types.Array(types.int32, dimensions, "C") for dimensions in (1, 2, 3))
    plane, matrices, volumes, image, windows = (types.Array(real, dimensions, "C") for dimensions in (2, 3, 4, 5, 6))
    number, addresses = types.float64, (types.intp, types.intp)
    inputs = (*(volumes,) * 4, matrices, matrices, plane, plane, members, counts, places, places, places)
    along = (sides, sides, types.int64, motion)
    line = types.Array(real, 1, "C")
    options = (*(number,) * 3, line, number, types.boolean, types.UniTuple(number, 2))
    job = Callee(filter_job, (*addresses, *inputs, types.int64, *along, *options, image))
    jobs = types.UniTuple(types.int64, 2)
    return {
        "filter_groups": (filter_groups, job, callee(real), callee(number), *inputs, jobs, *along, *options, windows),
        "add_windows": (add_windows, windows, places, places, places, jobs, sides, types.int64, motion, image),
    }


loop = loader(_loops)
