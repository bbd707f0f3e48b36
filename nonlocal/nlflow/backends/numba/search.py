"""Compiled searches for alike patches and for the motion of blocks."""

import math
from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from nlflow.backends.numba.calls import APART, EACH, HELPER, Callee, jobs
from nlflow.backends.numba.loading import loader, njit
from nlflow.backends.numba.vectors import BYTES, Vectors, index

_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}
_BLOCK = 64  # numbers that are counted at a time
COLUMNS = 4
"""Columns whose differences are summed at a time: so many more than it needs a guide has at the right."""


def lanes(dtype: Any) -> int:
    return BYTES // int(np.dtype(dtype).itemsize)


def _pointer(context, builder, signature, arguments, place):
    return context.make_array(signature.args[place])(context, builder, arguments[place]).data


@intrinsic
def _add_columns(typingctx, guide, own, other, width, rows, columns, blocks, sums):
    """Add to ``sums`` (columns, blocks of lanes) the squared differences of columns, each summed over some rows."""
    # Line x gets those between the column at ``own + x`` of the flat guide and those from ``other + x`` on, one a lane.
    signature = types.void(guide, own, other, width, rows, columns, blocks, sums)

    def codegen(context, builder, signature, arguments):
        _, own, other, width, rows, columns, blocks, _ = arguments
        v = Vectors(builder, signature.args[0].dtype.bitwidth)
        guide, sums = (_pointer(context, builder, signature, arguments, i) for i in (0, 7))
        lanes = index(v.lanes)
        line = builder.mul(blocks, lanes)

        def columns_from(x, state):
            def block(b, state):
                first = builder.add(builder.mul(x, line), b)
                targets = [builder.add(first, builder.mul(line, index(k))) for k in range(COLUMNS)]

                def row(at, totals):
                    result = []
                    for k in range(COLUMNS):
                        here = builder.add(builder.add(at, x), index(k))
                        one = v.broadcast_from(guide, builder.add(own, here))
                        gap = builder.fsub(v.load(guide, builder.add(builder.add(other, here), b)), one)
                        result.append(v.multiply_add(gap, gap, totals[k]))
                    return result

                totals = v.repeat(builder.mul(rows, width), width, [v.load(sums, t) for t in targets], row)
                for total, target in zip(totals, targets, strict=True):
                    v.store(total, sums, target)
                return state

            return v.repeat(line, lanes, state, block)

        v.repeat(columns, COLUMNS, [], columns_from)
        return context.get_dummy_value()

    return signature, codegen


@intrinsic
def _add_lines(typingctx, lines, first, count, blocks, out, start):
    """Write the sum of some lines (of blocks of lanes) to the flat ``out`` from ``start`` on."""
    signature = types.void(lines, first, count, blocks, out, start)

    def codegen(context, builder, signature, arguments):
        _, first, count, blocks, _, start = arguments
        v = Vectors(builder, signature.args[0].dtype.bitwidth)
        lines, out = (_pointer(context, builder, signature, arguments, i) for i in (0, 4))
        line = builder.mul(blocks, index(v.lanes))
        begin = builder.mul(first, line)

        def block(b, state):
            def one(at, total):
                return [builder.fadd(total[0], v.load(lines, builder.add(builder.add(begin, b), at)))]

            (total,) = v.repeat(builder.mul(count, line), line, [v.constant(0.0)], one)
            v.store(total, out, builder.add(start, b))
            return state

        v.repeat(line, index(v.lanes), [], block)
        return context.get_dummy_value()

    return signature, codegen


@njit(fastmath={"nnan", "nsz"}, **HELPER)
def _kth_smallest(values, blocks, k, most):
    """Return the k-th smallest of some blocks of numbers from 0 to `most`, by bisection."""
    half = values.dtype.type(0.5)
    low = values.dtype.type(0)
    high = most
    middle = low
    while True:
        below = 0
        for b in range(blocks):
            for i in range(_BLOCK):
                below += values[b, i] <= middle
        if below == k + 1:
            largest = low
            for b in range(blocks):
                for i in range(_BLOCK):
                    largest = max(largest, values[b, i] if values[b, i] <= middle else low)
            return largest
        if below > k:
            high = middle
        else:
            low = middle
        middle = low + half * (high - low)
        if not low < middle < high:
            return high


@njit(fastmath=_FLAGS, **HELPER)
def _tied(guide, z, y, x, patch, follow, limit, rounding):
    """Return the squared distances between which patches count as near to that at (z, y, x) as one at `limit`."""
    # For m samples: (m + 3) roundings of the sum, and those of the samples, which change a difference by 4 of the
    # largest sample at most, and a distance d by 2 sqrt(m d) of that (half of it counts here, `rounding` being twice
    # the unit).
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


@njit(fastmath=_FLAGS, **HELPER)
def _within(distances, reach, near):
    """Write to `near` which distances are within reach, and return how many."""
    found = 0
    for o in range(distances.shape[0]):
        near[found] = o
        found += distances[o] <= reach
    return found


@njit(fastmath=_FLAGS, **HELPER)
def _ends(follow, last, size):
    """Return between which places along an axis all frames of a patch are inside, before and after they have moved."""
    low = 0
    high = last
    for k in range(size):
        low = max(low, -follow[k])
        high = min(high, last - follow[k])
    return low, high


@njit(fastmath=_FLAGS, error_model="numpy", **APART)
def find_job(
    job, guide, edge, slices, rows, columns, shape, patch, radii, run, motion, order, moves, rounding, members, counts
):  # fmt: skip
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
    real = guide.dtype.type
    far = real(np.finfo(guide.dtype).max)  # where no patch is; distances are at most half of it
    flat, width, lane = guide.reshape(guide.size), guide.shape[3], BYTES // guide.itemsize
    blocks = (side + lane - 1) // lane
    # Offsets along a row lie in the lanes of vectors; a column of samples is compared once for all patches with it.
    sums = np.empty((length + COLUMNS, blocks * lane), guide.dtype)
    distance = np.empty((last - first, offsets + lane), guide.dtype)
    room = distance.reshape(distance.size)
    for dz in range(-Rz, Rz + 1):
        there = follow[dz + Rz :]
        top, bottom = _ends(there[:, 0], H - ph, pz)
        begin, end = _ends(there[:, 1], W - pw, pz)
        for dy in range(-Ry, Ry + 1):
            o = (dz + Rz) * layer + (dy + Ry) * side
            inside = 0 <= z + dz <= D - pz and top <= y + dy <= bottom
            if inside:
                sums[:] = 0
                for c in range(guide.shape[0]):
                    for k in range(pz):
                        here = ((c * D + z + k) * H + y + follow[Rz + k, 0]) * width + follow[Rz + k, 1]
                        seen = ((c * D + z + dz + k) * H + y + dy + there[k, 0]) * width + there[k, 1] - Rx
                        _add_columns(flat, here + edge + left, seen + edge + left, width, ph, length, blocks, sums)
            for r in range(last - first):
                x = columns[first + r]
                if inside:
                    _add_lines(sums, x - left, pw, blocks, room, r * distance.shape[1] + o)
                for dx in range(-Rx, min(begin - x, Rx + 1) if inside else Rx + 1):
                    distance[r, o + Rx + dx] = far
                for dx in range(max(end - x + 1, -Rx), Rx + 1):
                    distance[r, o + Rx + dx] = far
    blocked = np.empty((offsets // _BLOCK + 1, _BLOCK), guide.dtype)
    candidates = blocked.reshape(blocked.size)
    near = np.empty(offsets + 1, np.int32)
    everything = real(0.75) * far
    guess = everything
    for r in range(last - first):
        x = columns[first + r]
        reference = (job // runs) * columns.shape[0] + first + r
        own = distance[r, :offsets]
        own[offsets // 2] = far  # it is there already
        # Hardly more are looked at than the last group has reached, unless they prove too few.
        found, lowest, highest = 0, guess, guess
        for attempt in range(3):
            reach = everything if attempt == 2 else guess
            highest = reach
            found = _within(own, reach, near)
            if found >= wanted:
                for i in range(found):
                    candidates[i] = own[near[i]]
                filled = (found + _BLOCK - 1) // _BLOCK
                for i in range(found, filled * _BLOCK):
                    candidates[i] = far
                limit = _kth_smallest(blocked, filled, wanted - 2, reach) if wanted > 1 else real(-1)
                lowest, highest = _tied(guide, z, y, edge + x, patch, follow[Rz:], limit, rounding)
                if highest <= reach:
                    break
            guess = min(guess, everything / real(4)) * real(4)
        guess = min(real(highest), everything / real(2)) * real(1.2)
        spare = 1 - wanted
        for i in range(found):
            spare += own[near[i]] <= highest
        for k in range(offsets - 1, -1, -1):
            if spare <= 0:
                break
            if lowest <= own[order[k]] <= highest:
                own[order[k]] = far
                spare -= 1
        chosen = members[reference]
        chosen[0] = (z * H + y) * W + x
        count = 0
        for i in range(found):
            near[count] = near[i]
            count += own[near[i]] <= highest
        for i in range(count):
            chosen[1 + i] = chosen[0] + moves[near[i]]
        counts[reference] = 1 + count


_find_jobs = jobs(find_job)


@njit(cache=True, no_cfunc_wrapper=True)
def find_groups(
    each, one, guide, edge, slices, rows, columns, shape, patch, radii, run, motion, order, moves, rounding, members,
    counts,
):  # fmt: skip
    """Find the patches in a window that are nearest to each reference patch, which comes first."""
    # - each, one : int; Addresses of `nlflow.backends.numba.calls.each` and of `find_job`.
    # - guide : (C, Z, H, edge + W + more); What is compared, within anything finite: at its left as many samples as a
    #   row is displaced at most (by `motion` and `radii`), at its right also those of a vector and `COLUMNS`.
    # - edge : int
    # - slices, rows, columns : (A,), (B,), (E,); Corners of the references.
    # - shape, patch, radii : (Z, H, W), (pz, ph, pw), (Rz, Ry, Rx)
    # - run : int; References of a job, at most.
    # - motion : (jobs, 2 Rz + pz, 2) int32; Displacement of the frames of a patch, and of windows; see
    #   `nlflow.denoising.patches.lattice.Lattice`.
    # - order : (offsets,) int32; The offsets of a window (in C order), by their length: of patches that are equally
    #   near, within rounding, those are taken whose offset comes first.
    # - moves : (offsets,) int32; How far the offsets of a window lead in an image whose samples are numbered in C
    #   order.
    # - rounding : float; Relative rounding of the guide.
    # - members : (A B E, n) int32, output; Corners of the members, the reference first, then in C order, without the
    #   displacement of frames.
    # - counts : (A B E,) int32, output; How many there are: n, or fewer where the window holds fewer patches.
    runs = (columns.shape[0] + run - 1) // run
    _find_jobs(
        each, one, slices.shape[0] * rows.shape[0] * runs,
        (
            guide, edge, slices, rows, columns, shape, patch, radii, run, motion, order, moves, rounding, members,
            counts,
        ),
    )  # fmt: skip


@njit(fastmath=_FLAGS)
def _difference(first, second, top, left, side, dy, dx):
    """Return the variance of the difference of a block and a displaced one over what lies in both frames, or -1.

    A variance, as the light may change from frame to frame.
    """
    H, W = first.shape
    up = max(top, -dy, 0)
    down = min(top + side, H - dy, H)
    start = max(left, -dx, 0)
    stop = min(left + side, W - dx, W)
    if down - up < side // 2 or stop - start < side // 2:
        return -1.0
    total = 0.0
    shift = 0.0
    for y in range(up, down):
        here = first[y, start:stop]
        there = second[y + dy, start + dx : stop + dx]
        squares = first.dtype.type(0)
        sums = first.dtype.type(0)
        for x in range(stop - start):
            squares += (here[x] - there[x]) * (here[x] - there[x])
            sums += here[x] - there[x]
        total += squares
        shift += sums
    count = (down - up) * (stop - start)
    return max(total / count - (shift / count) ** 2, 0.0)


@njit(parallel=True, cache=True, fastmath=_FLAGS)
def match_blocks(first, second, guess, step, side, radius, least, moved):
    """Find where blocks of a frame have moved to in another."""
    # - first, second : (H, W)
    # - guess : (A, B, 2) int32; Expected displacements, in rows and columns.
    # - step, side, radius : int; Distance of the middles of blocks, the first at half of it; side of a block; how far
    #   from the guess is looked.
    # - least : float; A displacement is preferred to the guess and to none if it lowers the variance of the difference
    #   by this part.
    # - moved : (A, B, 2) int32, output
    for a in prange(guess.shape[0]):
        for b in range(guess.shape[1]):
            top = a * step + step // 2 - side // 2
            left = b * step + step // 2 - side // 2
            best_y = 0
            best_x = 0
            lowest = _difference(first, second, top, left, side, 0, 0)
            found = _difference(first, second, top, left, side, guess[a, b, 0], guess[a, b, 1])
            if 0 <= found < lowest:
                lowest = found
                best_y = guess[a, b, 0]
                best_x = guess[a, b, 1]
            lowest *= 1 - least
            for dy in range(guess[a, b, 0] - radius, guess[a, b, 0] + radius + 1):
                for dx in range(guess[a, b, 1] - radius, guess[a, b, 1] + radius + 1):
                    found = _difference(first, second, top, left, side, dy, dx)
                    if 0 <= found < lowest:
                        lowest = found
                        best_y = dy
                        best_x = dx
            moved[a, b, 0] = best_y
            moved[a, b, 1] = best_x


def _loops(real):
    whole, places, sides = types.int64, types.Array(types.int64, 1, "C"), types.UniTuple(types.int64, 3)
    order, members, motion = (types.Array(types.int32, dimensions, "C") for dimensions in (1, 2, 3))
    inputs = (types.Array(real, 4, "C"), whole, places, places, places)
    options = (sides, sides, sides, whole, motion, order, order, real, members, order)
    frame = types.Array(real, 2, "C")
    return {
        "find_groups": (find_groups, EACH, Callee(find_job, (whole, *inputs, *options)), *inputs, *options),
        "match_blocks": (match_blocks, frame, frame, motion, whole, whole, whole, types.float64, motion),
    }


loop = loader(_loops)
