"""Weights from patch distances on a tile of a grid; see `nlflow.backends.numba.stencil` for how arrays lie."""

import numpy as np
from numba import njit, types
from numba.extending import overload

from nlflow.backends.numba.calls import Callee
from nlflow.backends.numba.exponential import FLAGS, float32_of, float64_of

# exp(x) for x <= 0: x = (n + f) log 2 with |f| <= 1/2, a Taylor polynomial for 2^f = exp(f log 2), and n put into the
# exponent bits. There is no branch, so that the loop around it vectorizes. Degree 6 leaves 4e-7 relative in float32;
# degree 13 with a two-part log 2 leaves 2e-15 in float64 down to exp(-60), 2e-14 at exp(-700). Below the normal range
# the result is zero. Terms keep their order: n times the first part of log 2 is exact, and that is lost where the parts
# are added first (which compilers do for processors without fused multiply-add). So the functions have flags of their
# own, and are inlined by LLVM, which keeps them; Numba would give them those of the caller.
_ORDERED = FLAGS - {"reassoc"}


@njit(types.float32(types.float32), fastmath=_ORDERED, forceinline=True)
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


@njit(types.float64(types.float64), fastmath=_ORDERED, forceinline=True)
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
    """Sum along a line: ``out[j] = line[j] + ... + line[j + width - 1]`` for j < columns; inputs are overwritten.

    Sums of 1, 2, 4 ... neighbours are formed and those that make up `width` in binary are added: about 2 log2(width)
    vectorized additions on a line that stays in the first cache.
    """
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
    """Weights k(x, x + s) of one offset on a tile, left in ``b[:rows, :columns]``.

    `place` has the row and column of the tile's corner in the padded `image`, and its rows and columns. The weight is
    ``spatial * exp(-max(scale * squared_patch_distance - offset, 0))``, averaged over the patch when `tokens` is set.
    The other arrays are work space.
    """
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
    """Return `tile_weights` in the precision of Numba's type `real`."""
    places, sizes = types.UniTuple(types.int64, 4), (types.int64,) * 4
    line, plane, planes = (types.Array(real, dimensions, "C") for dimensions in (1, 2, 3))
    numbers = (real, real, real, types.boolean)
    return Callee(tile_weights, (planes, places, *sizes, *numbers, plane, line, line))
