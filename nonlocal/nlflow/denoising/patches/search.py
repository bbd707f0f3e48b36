"""Where patches are taken, and which are alike: the plain definition, offset by offset."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.intp]

_BLOCK_BYTES = 2**27


def reference_positions(last: int, step: int) -> Integers:
    """Return where the patches of reference begin along an axis, a set that looks the same from both ends.

    Multiples of the step from the left up to the middle, and from the right. Where the two leave a gap of more than a
    step in the middle, the middle itself is added (both of its sides where the axis has an even number of positions).

    Parameters
    ----------
    last : int
        The last position at which a patch fits; the first is 0.
    step : int
    """
    left = np.arange(0, last // 2 + 1, step)
    positions = np.union1d(left, last - left)
    if last - 2 * left[-1] > step:
        positions = np.union1d(positions, [last // 2, last - last // 2])
    return positions.astype(np.intp)


def fewest_candidates(references: Integers, last: tuple[int, ...], radius: int) -> int:
    """Return how many positions the smallest search window has; windows end where patches no longer fit."""
    ends = np.array(last)
    sides = np.minimum(references, radius) + np.minimum(ends - references, radius) + 1
    return int(sides.prod(axis=1).min())


def nearest_offsets(radii: tuple[int, ...]) -> tuple[Integers, NDArray[np.int32]]:
    """Return the offsets within radii, in C order, shape (n, m), and the order of their lengths (C order among equals).

    That order decides between patches that are equally near: another choice would be left to rounding.
    """
    offsets = np.array(list(itertools.product(*(range(-r, r + 1) for r in radii))))
    return offsets, np.argsort((offsets**2).sum(axis=1), kind="stable").astype(np.int32)


def nearest_patches(
    guide: NDArray[Any], patch_size: int, radius: int, references: Integers, members: int
) -> tuple[Integers, NDArray[np.float64]]:
    """Return the patches nearest to each patch of reference, itself first, and their squared Euclidean distances.

    Of patches that are equally near, within the rounding of the guide, those are taken that lie nearest to the patch of
    reference, and of these the first in C order. O(G (2 r + 1)^m D) time.

    Parameters
    ----------
    guide : array of shape (..., C)
        m axes of space, 1 or 2, and the channels, over which distances are summed.
    patch_size, radius : int
        Side of a patch and largest offset of a candidate along each axis, in samples.
    references : array of shape (G, m)
        First samples of the patches of reference.
    members : int
        n, at most `fewest_candidates`.

    Returns
    -------
    positions : array of shape (G, n, m)
    distances : array of shape (G, n)
    """
    axes = references.shape[1]
    side = (patch_size,) * axes
    patches = np.lib.stride_tricks.sliding_window_view(guide.astype(np.float64), side, axis=tuple(range(axes)))
    last = np.array(patches.shape[:axes]) - 1
    offsets, order = nearest_offsets((radius,) * axes)
    offsets = offsets[order]
    positions = np.empty((len(references), members, axes), np.intp)
    distances = np.empty((len(references), members))
    length = math.prod(patches.shape[axes:])
    block = max(1, _BLOCK_BYTES // (8 * (3 * length + 2 * len(offsets))))
    for start in range(0, len(references), block):
        own = references[start : start + block]
        centres = patches[tuple(own.T)]
        found = np.full((len(own), len(offsets)), np.inf)
        for column, offset in enumerate(offsets):
            places = own + offset
            inside = np.all((places >= 0) & (places <= last), axis=1)
            difference = (patches[tuple(places[inside].T)] - centres[inside]).reshape(-1, length)
            found[inside, column] = np.einsum("gd,gd->g", difference, difference)
        found[:, 0] = -1  # the patch itself comes before others that equal it
        largest = np.abs(centres).reshape(len(own), -1).max(axis=1)
        nearest = _chosen(found, members, largest, length, float(np.finfo(guide.dtype).eps))
        positions[start : start + block] = own[:, None] + offsets[nearest]
        distances[start : start + block] = np.maximum(np.take_along_axis(found, nearest, axis=1), 0)
    return positions, distances


def _chosen(found: NDArray[Any], members: int, largest: NDArray[Any], length: int, rounding: float) -> NDArray[np.intp]:
    """Return the columns of the least distances in each row, by distance; of those that are tied the first columns.

    `nlflow.backends.numba.groups` derives which are: those that rounding may have put on the wrong side of the last
    one taken.
    """
    limit = np.maximum(np.partition(found, members - 1, axis=1)[:, members - 1], 0)
    root = np.sqrt(limit)
    slack = (rounding * ((length + 3) * limit + 4 * (largest + root) * math.sqrt(length) * root))[:, None]
    below = found < limit[:, None] - slack
    tied = ~below & (found <= limit[:, None] + slack)
    below[:, 0], tied[:, 0] = True, False
    taken = below | (tied & (np.cumsum(tied, axis=1) <= members - below.sum(axis=1, keepdims=True)))
    return np.argsort(np.where(taken, found, np.inf), axis=1, kind="stable")[:, :members]
