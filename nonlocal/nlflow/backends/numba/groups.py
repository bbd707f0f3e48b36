"""The local Wiener step, compiled."""

# Arrays are planar, (C, slices, rows, columns); an image has one slice, a signal one slice of one row. A patch is known
# by its corner, the flat index ``(slice * rows + row) * columns + column``. The work is cut into jobs, each a run of
# references in one row of them. A job sums the patches that it puts back into a window of its own, and the windows are
# added in the order of the jobs: the result has the same bits for any number of threads, and, as runs start at fixed
# references, for an image and for a strip of it.

import math
from functools import cache

import numpy as np
from numba import types
from numba.extending import intrinsic

from nlflow.backends.numba.calls import APART, EACH, HELPER, Callee, caller, jobs
from nlflow.backends.numba.loading import compiled, loader, njit
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
    more,
    out,
    base,
):
    """Add the rows of filtered patches to places in windows of sums, whose kinds are `kind` apart.

    Those of the next state, the last kind, are left out unless `more`. Weights of patches are `spread` apart; 0 where
    all patches have the same.
    """
    signature = types.void(
        tokens, change, centre, weight, spread, keep, start, width, count, rows, columns, places, first, step, kind,
        more, out, base,
    )  # fmt: skip

    def codegen(context, builder, signature, arguments):
        _, _, _, _, spread, keep, start, width, count, rows, columns, _, first, step, kind, more, _, base = arguments
        v = Vectors(builder, signature.args[0].dtype.bitwidth, _SHORT)
        tokens, change, centre, weight, places, out = (
            _data(context, builder, signature, arguments, i) for i in (0, 1, 2, 3, 11, 16)
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
                    after = builder.add(target, kind)
                    for value, at in ((estimate, target), (share, after)):
                        v.store(builder.fadd(v.load(out, at), value), out, at)
                    with builder.if_then(more):
                        at = builder.add(after, kind)
                        following = v.multiply_add(builder.fmul(share, kept), taken, estimate)
                        v.store(builder.fadd(v.load(out, at), following), out, at)
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


@njit(fastmath=_FLAGS, **HELPER)
def _gather(volume, c, places, count, patch, tokens):
    """Copy the patches at some places of a channel to the rows of `tokens`."""
    _, D, H, W = volume.shape
    pz, ph, pw = patch
    _take(volume, c * D * H * W, places, places.shape[1], count, pz, W, ph, pw, tokens, tokens.shape[1])


@njit(fastmath=_FLAGS, **HELPER)
def _copy(values, out):
    """Copy a line; Numba's own assignment compiles the text of an error too, for seconds."""
    for j in range(out.shape[0]):
        out[j] = values[j]


_wiener = caller(wiener)
_wide_wiener = caller()  # in double precision
_wide = caller()  # `filter_wide`, which is not compiled yet; its arguments are those of `double`
_padded = njit(**HELPER)(padded)


@njit(fastmath=_FLAGS, **APART)
def filter_wide(
    double, state, pilot, c, places, count, patch, noise, correlation, whitening, basis, shrink, powers, across, room,
    among, spare, given, change, weight,
):  # fmt: skip
    most, wide, line = weight.shape[0] - 1, weight.shape[1], noise.shape[0]
    first, second, third = 4 * most * wide, 4 * most * wide + room.size, 4 * most * wide + room.size + among.size
    held = spare[:first].reshape(4, most, wide)
    wide_room, wide_among = spare[first:second].reshape(room.shape), spare[second:third].reshape(among.shape)
    mean, wide_noise = spare[third : third + line], spare[third + line :]
    tokens, source, own_change, own_weight = held[0], held[1], held[2], held[3]
    _gather(state, c, places, count, patch, given)
    for k in range(count):
        _copy(given[k], tokens[k])
    _gather(pilot, c, places, count, patch, given)
    for k in range(count):
        _copy(given[k], source[k])
    _centre(tokens, wide, count, 1 / count, mean)
    _centre(source, wide, count, 1 / count, mean)
    _copy(noise, wide_noise)
    _wide_wiener(
        double,
        (
            tokens, source, count, patch[0] * patch[1] * patch[2], wide_noise, correlation[c].astype(np.float64),
            whitening[c].astype(np.float64), basis[c].astype(np.float64), shrink, powers.astype(np.float64), across,
            wide_room, wide_among, own_change, own_weight,
        ),
    )  # fmt: skip
    for k in range(count):
        _copy(own_change[k], change[k])
    for k in range(count if across > 0 else 1):
        _copy(own_weight[k], weight[k])


@njit(fastmath=_FLAGS, **APART)
def filter_job(
    slot, single, double, state, pilot, observed, variance, correlation, whitening, extremes, basis, members, counts,
    slices, rows, columns, begun, patch, radii, run, motion, leave, factor, shrink, powers, across,
    running, rounding, lost, windows,
):  # fmt: skip
    job = begun + slot
    sums = windows[slot]
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
    alike = pilot.ctypes.data == state.ctypes.data
    tokens = np.zeros((most + 1, wide), state.dtype)
    source = tokens if alike else np.zeros((most + 1, wide), state.dtype)
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
    # What `filter_wide` needs, and keeps from group to group; its arrays are made there.
    spare = np.zeros(4 * most * wide + room.size + among.size + 2 * line if double[0] != 0 else 0)
    flat_tokens = tokens.reshape(tokens.size)
    flat_source = source.reshape(source.size)
    flat_given = given.reshape(given.size)
    # Where the patches of a group lie in a channel, frame by frame, and in the window.
    places = np.empty((pz, most), np.int64)
    there = np.empty((pz, most), np.int64)
    kind = sums.size // sums.shape[0]
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
            if not alike:
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
                # A first estimate inverts 1 + N^-1/2 C N^-1/2, and its errors do not grow with the members; one along
                # a basis inverts nothing, and rounds coefficients alone.
                errors = rounding[0] * condition * (1 if shrink > 0 else count)
                if basis.size:
                    errors = rounding[0] * math.sqrt(condition)
                if errors >= 1 and double[0] == 0:
                    lost[slot] = True
                    return
                if errors < 1:
                    _wiener(
                        single,
                        (
                            tokens, source, count, size, noise, correlation[c], whitening[c], basis[c], lowered, powers,
                            mixed, room, among, change, weight,
                        ),
                    )  # fmt: skip
                else:
                    _wide(
                        double[0],
                        (
                            double[1], state, pilot, c, places, count, patch, noise, correlation, whitening, basis,
                            shrink, powers, across, room, among, spare, given, change, weight,
                        ),
                    )  # fmt: skip
            keep = real(part / rest)
            for q in range(pz):
                _put(
                    tokens, change, centre, weight, apart, keep, q * ph * pw, wide, count, ph, pw, there, q * most,
                    sums.shape[4], kind, sums.shape[0] == 3, sums, c * (kind // planes),
                )  # fmt: skip


_filter_jobs = jobs(filter_job)


@njit(cache=True, no_cfunc_wrapper=True)
def filter_groups(
    each, one, single, double, state, pilot, observed, variance, correlation, whitening, extremes, basis, members,
    counts, slices, rows, columns, begun, patch, radii, run, motion, leave, factor, shrink, powers, across,
    running, rounding, lost, windows, count,
):  # fmt: skip
    """Filter the groups of some jobs and put the patches back."""
    # A token z of a group with mean m becomes ``z - N (C + N)^-1 (z - m)``: C is the covariance of its tokens in the
    # pilot, N the noise that the state still holds.
    # - each, one, single : addresses of `nlflow.backends.numba.calls.each`, of `filter_job`, and of `wiener` in the
    #   precision of the state
    # - double : (int, int), from `double`; 0 and 0 where that is not compiled yet
    # - state, pilot, observed : (C, Z, H, W); the running state z, the estimate from which covariances are taken, and
    #   the input
    # - variance : (C, Z, H, W) or (C, 1, 1, 1), of the noise in the input
    # - correlation, whitening, extremes, basis : as in `nlflow.denoising.patches.filters`; a basis as in `wiener`
    # - members, counts : from `nlflow.backends.numba.search.find_groups`, as slices, rows, columns, patch, radii, run
    #   and motion
    # - begun : the first of the jobs, in the order of `find_groups`
    # - leave, factor, shrink, across, running : as in `nlflow.denoising.patches.filters.Stage`; powers as in `wiener`
    # - rounding : relative rounding over `ERROR`, of the precision of the state and of double precision
    # - lost : (jobs,) bool, written: jobs that met a group which asks for double precision where there is none, and
    #   have to be done again
    # - windows : (jobs, 2 or 3, C, 2 Rz + pz, 2 Ry + ph, width), written: sums of weight x estimate, of weights and,
    #   where there are three, of weight x next state, from slice ``slices[a] - Rz``, row ``rows[b] - Ry`` and column
    #   ``columns[first] - Rx`` on, each slice displaced by its motion
    # - count : of the jobs
    _filter_jobs(
        each, one, count,
        (
            single, double, state, pilot, observed, variance, correlation, whitening, extremes, basis, members, counts,
            slices, rows, columns, begun, patch, radii, run, motion, leave, factor, shrink, powers, across, running,
            rounding, lost, windows,
        ),
    )  # fmt: skip


@njit(error_model="numpy", **APART)
def add_band(band, windows, slices, rows, columns, begun, last, radii, run, motion, out):
    D, H, W = out.shape[2:]
    runs = (columns.shape[0] + run - 1) // run
    kinds, planes, deep, high, wide = windows.shape[1:]
    source, target = windows.reshape(windows.size), out.reshape(out.size)
    for slot in range(last - begun):
        job = begun + slot
        follow = motion[min(job, motion.shape[0] - 1)]
        earliest = slices[job // (runs * rows.shape[0])] - radii[0]
        top = rows[job // runs % rows.shape[0]] - radii[1]
        for q in range(max(0, -earliest), min(deep, D - earliest)):
            left = columns[(job % runs) * run] - radii[2] + follow[q, 1]
            start, stop = max(-left, 0), min(wide, W - left)
            above = top + follow[q, 0]
            for plane in range(kinds * planes):
                for r in range(max(band * _BAND - above, 0), min(min((band + 1) * _BAND, H) - above, high)):
                    here = (((slot * kinds * planes + plane) * deep + q) * high + r) * wide
                    there = ((plane * D + earliest + q) * H + above + r) * W + left
                    for j in range(start, stop):
                        target[there + j] += source[here + j]


_add_bands = jobs(add_band)


@njit(cache=True, no_cfunc_wrapper=True)
def add_windows(each, one, windows, slices, rows, columns, begun, last, radii, run, motion, out):
    """Add the windows of `filter_groups` to the image ``out`` (2 or 3, C, Z, H, W), in the order of the jobs."""
    bands = (out.shape[3] + _BAND - 1) // _BAND
    _add_bands(each, one, bands, (windows, slices, rows, columns, begun, last, radii, run, motion, out))


def _loops(real):
    places, sides = types.Array(types.int64, 1, "C"), types.UniTuple(types.int64, 3)
    counts, members, motion = (types.Array(types.int32, dimensions, "C") for dimensions in (1, 2, 3))
    plane, matrices, volumes, image, windows = (types.Array(real, dimensions, "C") for dimensions in (2, 3, 4, 5, 6))
    number, whole = types.float64, types.int64
    inputs = (*(volumes,) * 4, matrices, matrices, plane, volumes, members, counts, places, places, places, whole)
    options = (*(number,) * 3, types.Array(real, 1, "C"), number, types.boolean, types.UniTuple(number, 2))
    along = (sides, whole, motion)
    job = (*inputs, sides, *along, *options, types.Array(types.boolean, 1, "C"), windows)
    band = (windows, places, places, places, whole, whole, *along, image)
    double = types.UniTuple(types.intp, 2)
    filtered = Callee(filter_job, (whole, types.intp, double, *job))
    return {
        "filter_groups": (filter_groups, EACH, filtered, callee(real), double, *job, whole),
        "add_windows": (add_windows, EACH, Callee(add_band, (whole, *band)), *band),
    }


loop = loader(_loops)


@cache
def double(dtype: str) -> tuple[int, int]:
    real = types.float32 if dtype == "float32" else types.float64
    line, plane, room, image = (types.Array(real, dimensions, "C") for dimensions in (1, 2, 3, 4))
    whole, number, places = types.int64, types.float64, types.Array(types.int64, 2, "C")
    group = (image, image, whole, places, whole, types.UniTuple(whole, 3), line)
    matrices = (room, room, image, number, line, number, room, room, types.Array(number, 1, "C"), plane, plane, plane)
    found = callee(number), Callee(filter_wide, (types.intp, *group, *matrices))
    for one in found:
        compiled(one.function, types.void(*one.arguments))
    return found[1].address(), found[0].address()
