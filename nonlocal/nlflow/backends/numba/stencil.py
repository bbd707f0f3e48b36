"""Windowed sums over a grid neighbourhood, with weights from patch distances."""

# Arrays are planar: signals are (D, rows, columns), padded by the search radius; images are (C, rows, columns), padded
# by the search radius plus the reach of the patches. A one-dimensional signal is a grid of one row. `apply_table` takes
# grids of any dimension, whose outer axes are flattened into rows.
#
# Half of a symmetric stencil is kept: for the offsets s = (di, dj) with di > 0, or di = 0 and dj > 0, the weight
# w_s(x) = k(x, x + s) serves both x and x + s. It is needed for x in the domain and for x + s in the domain, so x runs
# over rows [-di, H) and over columns [-dj, W) or, when dj < 0, over [0, W - dj). In `store_weights` row i of the domain
# is row i + Ri, and column j is column j + max(dj, 0).
#
# The work is cut into tiles whose size does not depend on the number of threads, and each sum is formed by one tile in
# a fixed order: the result has the same bits for any number of threads.

from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.extending import intrinsic, overload

from nlflow.backends.numba.calls import Callee, caller
from nlflow.backends.numba.loading import loader, njit

FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}
"""Terms may be reordered and multiply-adds fused. Inputs are finite (checked above); no loop forms an infinity."""


def _bitcast(source: Any, target: Any, llvm_type: Any) -> Any:
    """Reinterpret the bits of a number; a bitcast vectorizes where a scalar view would not."""

    @intrinsic
    def cast(typingctx, value):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], llvm_type)

        return target(source), codegen

    return cast


float32_of = _bitcast(types.int32, types.float32, ir.FloatType())
float64_of = _bitcast(types.int64, types.float64, ir.DoubleType())


# exp(x) for x <= 0: x = (n + f) log 2 with |f| <= 1/2, a Taylor polynomial for 2^f = exp(f log 2), and n put into the
# exponent bits. There is no branch, so that the loop around it vectorizes. Degree 6 leaves 4e-7 relative in float32;
# degree 13 with a two-part log 2 leaves 2e-15 in float64 down to exp(-60), 2e-14 at exp(-700). Below the normal range
# the result is zero. Terms keep their order: n times the first part of log 2 is exact, and that is lost where the parts
# are added first (which compilers do for processors without fused multiply-add). So the functions have flags of their
# own, and are inlined by LLVM, which keeps them; Numba would give them those of the caller.
_ORDERED = FLAGS - {"reassoc"}


@njit(fastmath=_ORDERED, forceinline=True)
def _exp_float32(x):
    y = max(x, np.float32(-87.0))
    n = np.int32(y * np.float32(1.4426950408889634) - np.float32(0.5))
    f = (y - np.float32(n) * np.float32(0.693359375)) - np.float32(n) * np.float32(-2.12194440e-4)
    p = np.float32(1.0 / 720.0)
    p = p * f + np.float32(1.0 / 120.0)
    p = p * f + np.float32(1.0 / 24.0)
    p = p * f + np.float32(1.0 / 6.0)
    p = p * f + np.float32(0.5)
    p = p * f + np.float32(1.0)
    p = p * f + np.float32(1.0)
    value = p * float32_of(np.int32((n + np.int32(127)) << np.int32(23)))
    return value if x > np.float32(-87.0) else np.float32(0.0)


@njit(fastmath=_ORDERED, forceinline=True)
def _exp_float64(x):
    y = max(x, -708.0)
    n = np.int64(y * 1.4426950408889634 - 0.5)
    f = (y - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    p = 1.0 / 6227020800.0
    p = p * f + 1.0 / 479001600.0
    p = p * f + 1.0 / 39916800.0
    p = p * f + 1.0 / 3628800.0
    p = p * f + 1.0 / 362880.0
    p = p * f + 1.0 / 40320.0
    p = p * f + 1.0 / 5040.0
    p = p * f + 1.0 / 720.0
    p = p * f + 1.0 / 120.0
    p = p * f + 1.0 / 24.0
    p = p * f + 1.0 / 6.0
    p = p * f + 0.5
    p = p * f + 1.0
    p = p * f + 1.0
    value = p * float64_of((n + np.int64(1023)) << np.int64(52))
    return value if x > -708.0 else 0.0


def _exp(x):
    """Exponential of x <= 0 in the precision of x; only called from compiled code."""
    return np.exp(x)


@overload(_exp, jit_options={"fastmath": FLAGS}, inline="always")
def _exp_by_type(x):
    if x == types.float32:
        return lambda x: _exp_float32(x)
    return lambda x: _exp_float64(x)


# Sums over the patch. Nothing is ever subtracted, so the relative error stays at a few roundings (a running sum that
# adds the next term and subtracts the last would lose small distances beside large ones). The order of the additions
# is the same for every node, wherever its tile begins: a part of an image has the bits of the whole, and weights that
# are computed anew have those of stored ones.
@njit(fastmath=FLAGS)
def _row_sums(rows, first, width, columns, line):
    """Sum `width` rows, an odd number, from `first` on: two at a time, since that many loads and one store balance."""
    top = rows[first]
    for j in range(columns):
        line[j] = top[j]
    for i in range(first + 1, first + width, 2):
        here = rows[i]
        next_ = rows[i + 1]
        for j in range(columns):
            line[j] += here[j] + next_[j]


@njit(fastmath=FLAGS)
def _box_line(line, spare, out, columns, width):
    """Sum along a line: ``out[j] = line[j] + ... + line[j + width - 1]`` for j < columns; inputs are overwritten."""
    # Sums of 1, 2, 4 ... neighbours are formed and those that make up `width` in binary are added: about 2 log2(width)
    # vectorized additions on a line that stays in the first cache.
    done = 0
    size = 1
    rest = width
    length = columns + width - 1
    while rest > 0:
        if rest & 1:
            if done == 0:
                for j in range(columns):
                    out[j] = line[j]
            else:
                for j in range(columns):
                    out[j] += line[j + done]
            done += size
        rest >>= 1
        if rest > 0:
            # Out of place: a shifted sum within one array would not vectorize.
            length -= size
            for j in range(length):
                spare[j] = line[j] + line[j + size]
            line, spare = spare, line
            size *= 2


@njit(cache=True, fastmath=FLAGS)
def tile_weights(image, place, di, dj, ri, rj, offset, scale, spatial, tokens, b, line, spare):
    """Write weights k(x, x + s) of one offset on a tile to ``b[:rows, :columns]``."""
    # They are ``spatial * exp(-max(scale * squared_patch_distance - offset, 0))``, averaged over the patch if `tokens`.
    # `place` has the row and column of the tile's corner in the padded `image`, and its rows and columns. The other
    # arrays are work space.
    row, column, rows, columns = place
    ei = 2 * ri if tokens else ri
    ej = 2 * rj if tokens else rj
    channels = image.shape[0]
    height = rows + 2 * ei
    length = columns + 2 * ej
    for i in range(height):
        target = b[i]
        for c in range(channels):
            here = image[c, row - ei + i, column - ej : column - ej + length]
            there = image[c, row - ei + i + di, column - ej + dj : column - ej + dj + length]
            if c == 0:
                for j in range(length):
                    target[j] = (here[j] - there[j]) * (here[j] - there[j])
            else:
                for j in range(length):
                    target[j] += (here[j] - there[j]) * (here[j] - there[j])
    zero = offset - offset
    share = (zero + 1) / ((2 * ri + 1) * (2 * rj + 1))
    for step in range(2 if tokens else 1):
        height -= 2 * ri
        for i in range(height):
            top = b[i]
            _row_sums(b, i, 2 * ri + 1, length, line)
            _box_line(line, spare, top, length - 2 * rj, 2 * rj + 1)
            if step == 0:
                for j in range(length - 2 * rj):
                    top[j] = spatial * _exp(-max(scale * top[j] - offset, zero))
            else:
                for j in range(length - 2 * rj):
                    top[j] *= share
        length -= 2 * rj


def callee(real):
    places, sizes = types.UniTuple(types.int64, 4), (types.int64,) * 4
    line, plane, planes = (types.Array(real, dimensions, "C") for dimensions in (1, 2, 3))
    numbers = (real, real, real, types.boolean)
    return Callee(tile_weights, (planes, places, *sizes, *numbers, plane, line, line))


_TILE_ROWS = 32
_TILE_COLUMNS = 512

_tile_weights = caller(tile_weights)


@njit(inline="always")
def _tiles(rows, columns):
    """Number of tiles along columns and in all, for a range of rows and columns."""
    across = (columns + _TILE_COLUMNS - 1) // _TILE_COLUMNS
    return across, across * ((rows + _TILE_ROWS - 1) // _TILE_ROWS)


@njit(cache=True, fastmath=FLAGS)
def store_tile(tile_of, tile, image, offsets, spatial, reach, offset, scale, tokens, isolated, weights):
    Ri, Rj, ri, rj = reach
    ei = 2 * ri if tokens else ri
    ej = 2 * rj if tokens else rj
    H = weights.shape[0] - Ri
    W = weights.shape[2] - Rj
    across, _ = _tiles(H + Ri, W + Rj)
    top = (tile // across) * _TILE_ROWS
    left = (tile % across) * _TILE_COLUMNS
    rows = min(_TILE_ROWS, H + Ri - top)
    columns = min(_TILE_COLUMNS, W + Rj - left)
    b = np.empty((rows + 2 * ei, columns + 2 * ej), image.dtype)
    line = np.empty(b.shape[1], image.dtype)
    spare = np.empty_like(line)
    for s in range(offsets.shape[0]):
        di = offsets[s, 0]
        dj = offsets[s, 1]
        shift = max(dj, 0)
        # Only rows from -di on are ever used, and columns up to W + |dj|.
        skip = min(max(Ri - di - top, 0), rows)
        used = max(min(columns, W + abs(dj) - left), 0)
        if used > 0 and skip < rows:
            place = (top + skip + ri + (ei - ri), left - shift + Rj + ej, rows - skip, used)
            _tile_weights(tile_of, (image, place, di, dj, ri, rj, offset, scale, spatial[s], tokens, b, line, spare))
        for i in range(rows):
            target = weights[top + i, s, left : left + columns]
            y = top + i - Ri
            outside = i < skip or (isolated and (y < 0 or y + di >= H))
            if outside:
                target[:] = 0
                continue
            target[used:] = 0
            source = b[i - skip]
            for j in range(used):
                target[j] = source[j]
            if isolated:
                for j in range(used):
                    x = left + j - shift
                    if x < 0 or x >= W or x + dj < 0 or x + dj >= W:
                        target[j] = 0


_store_tile = caller(store_tile)


@njit(parallel=True, cache=True, fastmath=FLAGS)
def store_weights(body, tile_of, image, offsets, spatial, reach, offset, scale, tokens, isolated, weights):
    """Fill ``weights[row, offset, column]`` with half of a symmetric stencil."""
    # - body, tile_of : int; Addresses of `store_tile` and `tile_weights`.
    # - image : (C, H + 2 m_i, W + 2 m_j); Padded by m = search radius + patch radius (twice the patch radius for
    #   `tokens`).
    # - offsets, spatial : (S, 2), (S,); Half of the stencil and the factor that each offset carries.
    # - reach : (Ri, Rj, ri, rj); Search and patch radii.
    # - weights : (H + Ri, S, W + Rj), output
    for tile in prange(_tiles(weights.shape[0], weights.shape[2])[1]):
        _store_tile(
            body, (tile_of, np.int64(tile), image, offsets, spatial, reach, offset, scale, tokens, isolated, weights)
        )


@njit(cache=True, fastmath=FLAGS)
def apply_line(tile, weights, offsets, centre, signal, out):
    D, H, W = out.shape
    Ri = weights.shape[0] - H
    Rj = weights.shape[2] - W
    across = (W + _TILE_COLUMNS - 1) // _TILE_COLUMNS
    i = tile // across
    left = (tile % across) * _TILE_COLUMNS
    columns = min(_TILE_COLUMNS, W - left)
    # Partial sums over one row of the window, then their total: the error grows like the window's side, not its
    # area.
    part = np.zeros((D, columns), out.dtype)
    for d in range(D):
        here = signal[d, i + Ri, left + Rj : left + Rj + columns]
        target = out[d, i, left : left + columns]
        for j in range(columns):
            target[j] = centre * here[j]
    for s in range(offsets.shape[0]):
        di = offsets[s, 0]
        dj = offsets[s, 1]
        forward = weights[i + Ri, s, left + max(dj, 0) : left + max(dj, 0) + columns]
        backward = weights[i + Ri - di, s, left + max(-dj, 0) : left + max(-dj, 0) + columns]
        for d in range(D):
            ahead = signal[d, i + Ri + di, left + Rj + dj : left + Rj + dj + columns]
            behind = signal[d, i + Ri - di, left + Rj - dj : left + Rj - dj + columns]
            line = part[d]
            for j in range(columns):
                line[j] += forward[j] * ahead[j] + backward[j] * behind[j]
        if s + 1 == offsets.shape[0] or offsets[s + 1, 0] != di:
            for d in range(D):
                line = part[d]
                target = out[d, i, left : left + columns]
                for j in range(columns):
                    target[j] += line[j]
                    line[j] = 0


_apply_line = caller(apply_line)


@njit(parallel=True, cache=True, fastmath=FLAGS)
def apply_weights(body, weights, offsets, centre, signal, out):
    """Weighted sums ``out(x) = centre u(x) + sum_s w_s(x) u(x + s) + w_s(x - s) u(x - s)``."""
    # - weights : (H + Ri, S, W + Rj); From `store_weights`.
    # - signal : (D, H + 2 Ri, W + 2 Rj); Padded by the search radius.
    # - out : (D, H, W), output
    for tile in prange(out.shape[1] * ((out.shape[2] + _TILE_COLUMNS - 1) // _TILE_COLUMNS)):
        _apply_line(body, (np.int64(tile), weights, offsets, centre, signal, out))


@njit(cache=True, fastmath=FLAGS)
def apply_tile(tile_of, tile, image, offsets, spatial, reach, offset, scale, tokens, isolated, centre, signal, out):
    Ri, Rj, ri, rj = reach
    ei = 2 * ri if tokens else ri
    ej = 2 * rj if tokens else rj
    D, H, W = out.shape
    across, _ = _tiles(H, W)
    top = (tile // across) * _TILE_ROWS
    left = (tile % across) * _TILE_COLUMNS
    rows = min(_TILE_ROWS, H - top)
    columns = min(_TILE_COLUMNS, W - left)
    b = np.empty((rows + Ri + 2 * ei, columns + Rj + 2 * ej), image.dtype)
    line = np.empty(b.shape[1], image.dtype)
    spare = np.empty_like(line)
    part = np.zeros((D, rows, columns), out.dtype)
    for d in range(D):
        for i in range(rows):
            here = signal[d, top + i + Ri, left + Rj : left + Rj + columns]
            target = out[d, top + i, left : left + columns]
            for j in range(columns):
                target[j] = centre * here[j]
    for s in range(offsets.shape[0]):
        di = offsets[s, 0]
        dj = offsets[s, 1]
        shift = max(dj, 0)
        back = max(-dj, 0)
        place = (top - di + Ri + ei, left - shift + Rj + ej, rows + di, columns + abs(dj))
        _tile_weights(tile_of, (image, place, di, dj, ri, rj, offset, scale, spatial[s], tokens, b, line, spare))
        if isolated:
            for i in range(rows + di):
                y = top + i - di
                masked = b[i]
                if y < 0 or y + di >= H:
                    masked[: columns + abs(dj)] = 0
                else:
                    for j in range(columns + abs(dj)):
                        x = left + j - shift
                        if x < 0 or x >= W or x + dj < 0 or x + dj >= W:
                            masked[j] = 0
        for d in range(D):
            for i in range(rows):
                forward = b[i + di, shift : shift + columns]
                backward = b[i, back : back + columns]
                ahead = signal[d, top + i + Ri + di, left + Rj + dj : left + Rj + dj + columns]
                behind = signal[d, top + i + Ri - di, left + Rj - dj : left + Rj - dj + columns]
                partial = part[d, i]
                for j in range(columns):
                    partial[j] += forward[j] * ahead[j] + backward[j] * behind[j]
        if s + 1 == offsets.shape[0] or offsets[s + 1, 0] != di:
            for d in range(D):
                for i in range(rows):
                    partial = part[d, i]
                    target = out[d, top + i, left : left + columns]
                    for j in range(columns):
                        target[j] += partial[j]
                        partial[j] = 0


_apply_tile = caller(apply_tile)


@njit(parallel=True, cache=True, fastmath=FLAGS)
def apply_recomputed(
    body, tile_of, image, offsets, spatial, reach, offset, scale, tokens, isolated, centre, signal, out
):
    """The sums of `apply_weights` with weights computed on the way: O(1) memory a tile."""
    for tile in prange(_tiles(out.shape[1], out.shape[2])[1]):
        _apply_tile(
            body,
            (
                tile_of, np.int64(tile), image, offsets, spatial, reach, offset, scale, tokens, isolated, centre,
                signal, out,
            ),
        )  # fmt: skip


@njit(fastmath=FLAGS)
def _add_plane(table, steps, signal, start, left, part, target):
    """Add the sums over one plane of the window to a line; first those over each of its rows, as in `apply_line`."""
    columns = len(target)
    for di in range(table.shape[0]):
        part[:] = 0
        line = signal[start + steps[di]]
        weights = table[di]
        for dj in range(len(weights)):
            weight = weights[dj]
            source = line[left + dj : left + dj + columns]
            for j in range(columns):
                part[j] += weight * source[j]
        for j in range(columns):
            target[j] += part[j]


@njit(parallel=True, cache=True, fastmath=FLAGS)
def apply_table(table, starts, steps, signal, out):
    # - table : (planes, rows, 2 Rj + 1); One plane in two dimensions, and one row in one.
    # - starts : (H,); The row of `signal` at which the window of each row of `out` begins.
    # - steps : (planes, rows); The rows of a window from there.
    # - signal : (D, padded rows, W + 2 Rj)
    # - out : (D, H, W), output
    D, H, W = out.shape
    planes = table.shape[0]
    across = (W + _TILE_COLUMNS - 1) // _TILE_COLUMNS
    for tile in prange(D * H * across):
        d = tile // (H * across)
        i = (tile // across) % H
        left = (tile % across) * _TILE_COLUMNS
        columns = min(_TILE_COLUMNS, W - left)
        part = np.empty(columns, out.dtype)
        target = out[d, i, left : left + columns]
        target[:] = 0
        if planes == 1:
            _add_plane(table[0], steps[0], signal[d], starts[i], left, part, target)
            continue
        plane = np.empty(columns, out.dtype)
        for k in range(planes):
            plane[:] = 0
            _add_plane(table[k], steps[k], signal[d], starts[i], left, part, plane)
            for j in range(columns):
                target[j] += plane[j]


_PAIRS, _REACH, _FLAG = types.int64[:, ::1], types.UniTuple(types.int64, 4), types.boolean


def _loops(f):
    """Return the loops for Numba's type of a float."""
    line, planes = f[::1], f[:, :, ::1]
    inputs = (planes, _PAIRS, line, _REACH, f, f, _FLAG, _FLAG)
    stored = (planes, _PAIRS, f, planes, planes)
    store, apply = (
        Callee(body, (types.intp, types.int64, *inputs, *rest))
        for body, rest in ((store_tile, (planes,)), (apply_tile, (f, planes, planes)))
    )
    return {
        "store_weights": (store_weights, store, callee(f), *inputs, planes),
        "apply_weights": (apply_weights, Callee(apply_line, (types.int64, *stored)), *stored),
        "apply_recomputed": (apply_recomputed, apply, callee(f), *inputs, f, planes, planes),
        "apply_table": (apply_table, planes, types.int64[::1], types.int64[:, ::1], planes, planes),
    }


loop = loader(_loops)
"""Loop of a name, for ``float32`` or ``float64``."""
