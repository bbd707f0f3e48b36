"""Counted normal numbers."""

# Philox4x32-10 (Salmon, Moraes, Dror and Shaw 2011, doi 10.1145/2063384.2063405) turns a key of 64 bits and a counter
# of four words into four random words. The counter says (pair of nodes, channel, step, stream), and the two normals of
# Box and Muller (1958, doi 10.1214/aoms/1177706645) that the words make are those of the two nodes. So a number does
# not depend on the array that it is asked for in: threads, blocks, processes and a run that goes on have the same ones.
#
# Logarithm, sine and cosine are series of products and sums that no option lets the compiler reorder or contract, so
# that numbers have the same bits on all processors; each step of the loops takes several of them at a time.

import math

import numpy as np
from numba import prange, types

from nlflow.backends.numba.loading import loader, njit

BLOCK = 512
"""Numbers that one thread makes at a time, which stay in its cache."""

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
_DROPPED, _ONE = np.uint64(12), np.uint64(0x3FF0000000000000)  # 52 bits of 64; the bits of 1.0
_ROOT = np.uint64(np.array(math.sqrt(0.5)).view(np.uint64))
_DIGITS, _BIAS = np.uint64(52), np.uint64(64)  # 64 more than any exponent here is below 0
_WHOLE = np.uint64(0x4330000000000000)  # the bits of 2^52, in whose last bits whole numbers stand
_TURN = 1.5 * 2.0**52
_FIRST, _SECOND = np.uint64(1), np.uint64(2)
_LOG_2 = math.log(2.0)
_LOG = tuple(2.0 / (2 * k + 1) for k in range(11, -1, -1))  # of 2 artanh s for |s| <= 3 - sqrt(8)
_SINE = tuple((-1.0) ** k * (math.pi / 2) ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(8, -1, -1))
_COSINE = tuple((-1.0) ** k * (math.pi / 2) ** (2 * k) / math.factorial(2 * k) for k in range(8, -1, -1))


@njit(inline="always")
def _words(a, b, c, d, key_0, key_1):
    """Return the four words of Philox4x32-10, each in 64 bits."""
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIER_0 * a, _MULTIPLIER_1 * c
        a, b, c, d = (right >> _HALF) ^ b ^ key_0, right & _LOW, (left >> _HALF) ^ d ^ key_1, left & _LOW
        key_0, key_1 = (key_0 + _WEYL_0) & _LOW, (key_1 + _WEYL_1) & _LOW
    return a, b, c, d


@njit(inline="always")
def _series(coefficients, x):
    total = coefficients[0]
    for k in range(1, len(coefficients)):
        total = total * x + coefficients[k]
    return total


@njit(cache=True)
def words(counters, key, out):
    key_0, key_1 = key & _LOW, key >> _HALF
    for i in range(len(counters)):
        own = _words(counters[i, 0], counters[i, 1], counters[i, 2], counters[i, 3], key_0, key_1)
        for k in range(4):
            out[i, k] = own[k]


@njit(parallel=True, cache=True)
def normals(key, step, stream, node, channel, out):
    """Write standard normals to ``out`` (N, D), the first of them of `node` and `channel`."""
    # `key` has 64 bits, `step` and `stream` have 32.
    count, width = out.shape
    key_0, key_1 = key & _LOW, key >> _HALF
    first, last = node // 2, (node + count - 1) // 2
    pairs = last - first + 1
    blocks = (pairs * width + BLOCK - 1) // BLOCK
    for block in prange(blocks):
        start = block * BLOCK
        size = min(BLOCK, pairs * width - start)
        places, channels = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
        pair, own = start // width, start % width
        for k in range(BLOCK):
            places[k], channels[k] = np.uint64(first + pair), np.uint64(channel + own)
            own += 1
            if own == width:
                pair, own = pair + 1, 0
        length, angle = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint64)
        for k in range(BLOCK):
            a, b, c, d = _words(places[k] & _LOW, channels[k], step, stream, key_0, key_1)
            length[k] = (((a << _HALF) | b) >> _DROPPED) | _ONE
            angle[k] = (((c << _HALF) | d) >> _DROPPED) | _ONE
        radius, sector, share = length.view(np.float64), angle.view(np.float64), places.view(np.float64)
        exponent = channels.view(np.float64)
        for k in range(BLOCK):
            radius[k] = 2.0 - radius[k]  # in (0, 1], exactly
        for k in range(BLOCK):
            # As 2^n m with m within sqrt(1/2) ... sqrt(2).
            n = ((length[k] - _ROOT + (_BIAS << _DIGITS)) >> _DIGITS) - _BIAS
            places[k] = length[k] - (n << _DIGITS)
            channels[k] = (n + _BIAS) | _WHOLE
        for k in range(BLOCK):
            m = share[k]
            s = (m - 1.0) / (m + 1.0)
            log = (exponent[k] - (2.0**52 + 64.0)) * _LOG_2 + s * _series(_LOG, s * s)
            radius[k] = math.sqrt(-2.0 * log)
        for k in range(BLOCK):
            t = 4.0 * (sector[k] - 1.0)
            z = t + _TURN
            share[k] = t - (z - _TURN)  # in quarters of a turn, from the nearest one
            exponent[k] = z
        for k in range(BLOCK):
            x = share[k] * share[k]
            sine, cosine = share[k] * _series(_SINE, x), _series(_COSINE, x)
            odd, back = channels[k] & _FIRST, channels[k] & _SECOND
            along = sine if odd else cosine
            across = cosine if odd else sine
            along = -along if odd else along
            share[k] = radius[k] * (-along if back else along)
            exponent[k] = radius[k] * (-across if back else across)
        pair, own = start // width, start % width
        for k in range(size):
            row = 2 * (first + pair) - node
            if row >= 0:
                out[row, own] = share[k]
            if row + 1 < count:
                out[row + 1, own] = exponent[k]
            own += 1
            if own == width:
                pair, own = pair + 1, 0


def _loops(real):
    word, array = types.uint64, types.Array
    return {
        "words": (words, array(word, 2, "C"), word, array(word, 2, "C")),
        "normals": (normals, word, word, word, types.int64, types.int64, array(types.float64, 2, "C")),
    }


loop = loader(_loops)
