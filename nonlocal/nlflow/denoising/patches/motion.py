"""The motion of a clip: where each job of a lattice finds its patches in the frames around it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.patches.lattice import Lattice

Array = NDArray[Any]
_STEP: Final = 8  # pixels between the middles of blocks
_SIDE: Final = 24  # of a block
_LEVELS: Final = 3  # pictures of half the size, the coarsest looked at first
_RADII: Final = (4, 2, 2)  # from the coarsest picture on: motions of up to 22 pixels a frame, of 10 in small pictures
_LEAST: Final = 0.2  # of the variance of a difference; noise alone changes that of 576 pixels by 0.06, rms


def follow(lattice: Lattice, frames: Array) -> Lattice:
    """Return the lattice whose jobs follow what moves in a clip.

    The motion from each frame to its neighbours is that of blocks (coarse to fine, where the difference varies least).
    A job takes the motion of the block at its middle, from frame to frame, so that its window and the frames of its
    patches go along.
    References have to begin in each frame (a stride of 1): patches that move leave pixels to others.

    Parameters
    ----------
    lattice : Lattice
    frames : array of shape (Z, H, W)

    Returns
    -------
    Lattice
        Of the same references; clips of one frame stay as they are.
        O(Z H W (2 r + 1)^2 (side / step)^2) time for the largest radius r of a level.
    """
    radius, depth = lattice.radii[0], lattice.patch[0]
    if max(radius, depth - 1) == 0 or lattice.shape[0] == 1:
        return lattice
    pyramids = [_pyramid(frame) for frame in frames]
    forward = [_field(a, b) for a, b in pairwise(pyramids)]
    backward = [_field(b, a) for a, b in pairwise(pyramids)]
    starts = lattice.columns[:: lattice.run]
    ends = lattice.columns[np.minimum(np.arange(1, len(starts) + 1) * lattice.run, len(lattice.columns)) - 1]
    ends = ends + lattice.patch[2]
    tops = lattice.rows
    middles = np.stack(np.broadcast_arrays((tops + lattice.patch[1] // 2)[:, None], (starts + ends) // 2), axis=-1)
    motion = np.zeros((len(lattice.slices), len(tops), len(starts), 2 * radius + depth, 2), np.int32)
    for number, z in enumerate(lattice.slices.tolist()):
        for fields, way, last in ((forward, 1, radius + depth - 1), (backward, -1, radius)):
            now = np.zeros_like(middles)
            for k in range(1, last + 1):
                source = z + way * (k - 1)
                if not 0 <= source + way < lattice.shape[0]:
                    break
                field = fields[source if way > 0 else source - 1]
                a, b = (np.clip((middles + now)[..., i] // _STEP, 0, field.shape[i] - 1) for i in (0, 1))
                now = now + field[a, b]
                motion[number, :, :, radius + way * k] = now
    own = motion[..., radius : radius + depth, :]  # the frames of the references themselves stay in the picture,
    own[-1] = 0  # and those of the last ones where they are, so that each pixel belongs to a patch
    height, width = lattice.shape[1] - lattice.patch[1], lattice.shape[2]
    np.clip(own[..., 0], -tops[:, None, None], (height - tops)[:, None, None], out=own[..., 0])
    np.clip(own[..., 1], -starts[:, None], (width - ends)[:, None], out=own[..., 1])
    return replace(lattice, motion=motion.reshape(-1, *motion.shape[3:]))


def _pyramid(frame: Array) -> list[Array]:
    """Return a frame and pictures of a half, a fourth, ... of its size, the smallest last."""
    levels = [np.ascontiguousarray(frame)]
    for _ in range(1, _LEVELS):
        fine = levels[-1]
        if min(fine.shape) < 2 * _SIDE:
            break
        even = fine[: fine.shape[0] // 2 * 2, : fine.shape[1] // 2 * 2]
        levels.append(np.ascontiguousarray((even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]) / 4))
    return levels


def _field(first: list[Array], second: list[Array]) -> NDArray[np.int32]:
    """Return the motion of the blocks of a frame, shape (A, B, 2), from two pyramids."""
    from nlflow.backends.numba import motion

    match_blocks = motion.loop("match_blocks", first[0].dtype.name)
    field = np.zeros((1, 1, 2), np.int32)
    for level in reversed(range(len(first))):
        shape = tuple(-(-n // _STEP) for n in first[level].shape)
        places = np.ix_(*(np.minimum(np.arange(n) // 2, m - 1) for n, m in zip(shape, field.shape, strict=False)))
        guess = np.ascontiguousarray(2 * field[places])
        field = np.empty_like(guess)
        radius = _RADII[len(first) - 1 - level]
        match_blocks(first[level], second[level], guess, _STEP, _SIDE, radius, _LEAST, field)
    return field
