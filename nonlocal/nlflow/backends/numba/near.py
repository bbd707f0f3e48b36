"""Pairs within a radius."""

# Squared distances are summed over the coordinates in their order, so those of (i, j) and (j, i) have the same bits.

import numpy as np
from numba import prange, types

from nlflow.backends.numba.loading import loader, njit

_BLOCK = 64
_FLAGS = {"contract", "nsz"}  # squares may overflow


@njit(inline="always")
def boxes_near(lows, highs, own, others_lows, others_highs, other, limit):
    # The axes that tell most come first.
    square = 0.0
    for c in range(lows.shape[1]):
        gap = max(max(others_lows[other, c] - highs[own, c], lows[own, c] - others_highs[other, c]), 0.0)
        square += gap * gap
        if square > limit:
            return False
    return True


@njit(fastmath=_FLAGS)
def _squares(columns, i, start, out):
    """Write the squared distances of node i from the block that begins with `start`."""
    for k in range(_BLOCK):
        out[k] = 0.0
    for c in range(columns.shape[0]):
        here = columns[c, i]
        there = columns[c, start : start + _BLOCK]
        for k in range(_BLOCK):
            out[k] += (here - there[k]) * (here - there[k])


@njit(fastmath=_FLAGS)
def _row(columns, i, start, limit, square, place, indices, squares, fill):
    """Return how many nodes of a block are within the radius of node i; they are written from `place` on."""
    _squares(columns, i, start, square)
    count = 0
    for k in range(_BLOCK):
        count += square[k] <= limit
    if fill and count:
        for k in range(_BLOCK):
            if square[k] <= limit:
                indices[place] = start + k
                squares[place] = square[k]
                place += 1
    return count


@njit(parallel=True, cache=True)
def near_pairs(columns, lows, highs, parents_lows, parents_highs, reach, limit, counts, indptr, indices, squares):
    """Count the nodes within a radius of each node, or list them in order of rows."""
    # - columns : (d, N); Coordinates of nodes in order; NaN, up to a multiple of 64, at the end.
    # - lows, highs : (blocks, axes); Boxes of blocks of 64 nodes.
    # - parents_lows, parents_highs : (parents, axes); Boxes of 64 blocks each.
    # - reach, limit : float; Squared distances up to which boxes may hold a pair, and of a pair.
    # - counts : (N,); Written where `indices` is empty.
    # - indptr : (N + 1,)
    # - indices, squares : (pairs,); Written: the nodes, and their squared distances.
    fill = len(indices) > 0
    for block in prange(len(lows)):
        square = np.empty(_BLOCK)
        first = block * _BLOCK
        last = min(first + _BLOCK, len(counts))
        places = np.zeros(_BLOCK, np.int64)
        for i in range(first, last):
            places[i - first] = indptr[i] if fill else 0
        for parent in range(len(parents_lows)):
            if not boxes_near(lows, highs, block, parents_lows, parents_highs, parent, reach):
                continue
            for other in range(parent * _BLOCK, min((parent + 1) * _BLOCK, len(lows))):
                if not boxes_near(lows, highs, block, lows, highs, other, reach):
                    continue
                for i in range(first, last):
                    here = places[i - first]
                    places[i - first] += _row(columns, i, other * _BLOCK, limit, square, here, indices, squares, fill)
        if not fill:
            for i in range(first, last):
                counts[i] = places[i - first]


_BOXES = types.float64[:, ::1]
loop = loader(
    lambda f: {
        "near_pairs": (
            near_pairs, *(_BOXES,) * 5, types.float64, types.float64, *(types.int64[::1],) * 2, types.int32[::1],
            types.float64[::1],
        ),
    }
)  # fmt: skip
"""Loop of a name."""
