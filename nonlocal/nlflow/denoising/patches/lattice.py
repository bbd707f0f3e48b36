"""Patches of reference, and windows of their members."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow.backends.numba import RUN
from nlflow.errors import InputError, check_integer

Three = tuple[int, int, int]
Integers = NDArray[np.int64]


def reference_positions(last: int, step: int) -> NDArray[np.intp]:
    """Return where the patches of reference begin along an axis, from 0 to `last`, symmetric about the middle."""
    left = np.arange(0, last // 2 + 1, step)
    positions = np.union1d(left, last - left)
    if last - 2 * left[-1] > step:
        positions = np.union1d(positions, [last // 2, last - last // 2])
    return positions.astype(np.intp)


def nearest_offsets(radii: tuple[int, ...]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """Return the offsets within radii in C order, shape (n, m), and their order by length, C order among equals."""
    offsets = np.array(list(itertools.product(*(range(-r, r + 1) for r in radii))))
    return offsets, np.argsort((offsets**2).sum(axis=1), kind="stable").astype(np.int32)


def three(values: tuple[int, ...], fill: int = 1) -> Three:
    a, b, c = (fill,) * (3 - len(values)) + values
    return a, b, c


@dataclass(frozen=True)
class Grouping:
    """How groups are formed: the nearest patches in a window about each patch of reference.

    Attributes
    ----------
    patch, radius, stride : int or (int, int, int)
        Side of a patch, largest offset of a member, distance of references in samples: one number, or three along
        slices (frames), rows and columns, of which images and signals take the last ones. All are cut down to the
        image, and the stride to the patch.
    neighbours : int
        Members of a group, or as many as the window has.
    means : Grouping, optional
        Grouping of the means over 2 x 2 samples (2 of a signal), whose estimates are averaged with the means of the
        estimate. For images and signals with white noise that hold at least three of these patches along each axis.
    """

    patch: int | Three
    neighbours: int
    radius: int | Three
    stride: int | Three
    means: Grouping | None = None

    def __post_init__(self) -> None:
        for name, least in (("patch", 1), ("neighbours", 1), ("radius", 0), ("stride", 1)):
            value = getattr(self, name)
            if isinstance(value, tuple) and name != "neighbours":
                if len(value) != 3:
                    raise InputError(f"{name}: got {value}, expected one number, or three (slices, rows, columns)")
                for one in value:
                    check_integer(name, one, minimum=least)
            else:
                check_integer(name, value, minimum=least)

    def along(self, name: str) -> Three:
        """Return the patch, the radius or the stride along slices, rows and columns."""
        value: int | Three = getattr(self, name)
        return value if isinstance(value, tuple) else (value, value, value)

    @property
    def halo(self) -> Three:
        """How far from a sample the samples lie on which a step's result there depends."""
        own = [2 * (r + p - 1) for r, p in zip(self.along("radius"), self.along("patch"), strict=True)]
        if self.means is not None:  # of blocks of 2 samples, which reach a sample over two others
            own = [max(one, 2 * n) + 5 for one, n in zip(own, self.means.halo, strict=True)]
        a, b, c = own
        return a, b, c


@dataclass(frozen=True)
class Lattice:
    """Where patches of reference lie, and how far their members may lie from them.

    The work is cut into jobs: runs of references in a row, in C order.

    Attributes
    ----------
    shape, patch, radii : triple of int
        Shape of the image (Z, H, W) and of a patch, and the largest offsets of a member.
    slices, rows, columns : array of int
        First samples of the patches of reference along the three axes.
    most : int
        Members of a group, at most.
    run : int
        References of a job, at most.
    motion : int32 array of shape (jobs, frames, 2)
        Rows and columns by which the window of a job is moved in each frame that it reaches, from ``radii[0]`` frames
        earlier on; of shape (1, frames, 2) and 0 without motion.
    """

    shape: Three
    patch: Three
    radii: Three
    slices: Integers
    rows: Integers
    columns: Integers
    most: int
    run: int = RUN
    motion: NDArray[np.int32] = field(default_factory=lambda: np.zeros((1, 1, 2), np.int32))

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        grouping: Grouping,
        origin: tuple[int, ...] = (0, 0),
        whole: tuple[int, ...] | None = None,
        run: int = RUN,
    ) -> Lattice:
        """Return the lattice of a grouping, cut down to an image that is smaller.

        Parameters
        ----------
        shape : tuple of int
            (N,), (H, W) or (Z, H, W).
        grouping : Grouping
        origin, whole : tuple of int, optional
            Where these samples lie in a larger image, and its shape; references are those of the larger image.
        run : int
            References of a job, at most.

        Raises
        ------
        InputError
            For a part that does not lie within the whole or holds no reference.
        """
        own, start = three(shape), three(origin, 0)
        large = own if whole is None else three(whole)
        if any(o < 0 or o + n > w for o, n, w in zip(start, own, large, strict=True)):
            raise InputError(
                f"origin: got {origin} for samples of shape {shape}, expected a part that lies within whole={whole}"
            )
        patch = three(tuple(min(p, n) for p, n in zip(grouping.along("patch"), large, strict=True)))
        radii = three(tuple(min(r, n - p) for r, n, p in zip(grouping.along("radius"), own, patch, strict=True)))
        found = [
            _references(n, p, step, o, w)
            for n, p, step, o, w in zip(own, patch, grouping.along("stride"), start, large, strict=True)
        ]
        (_, slices), (_, rows), (before, columns) = found
        # Runs of references begin where those of the larger image do. The first stands in for those of its run that
        # lie outside: what they would add to is cut off afterwards.
        columns = np.concatenate([np.full(before % run, columns[0]), columns])
        most = min(grouping.neighbours, int(np.prod([2 * r + 1 for r in radii])))
        still = np.zeros((1, 2 * radii[0] + patch[0], 2), np.int32)
        return cls(own, patch, radii, slices, rows, columns, most, run, still)

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.slices) * len(self.rows) * len(self.columns)

    @property
    def fewest(self) -> int:
        """Number of patches in the smallest window."""
        ends = (n - p for n, p in zip(self.shape, self.patch, strict=True))
        along = zip((self.slices, self.rows, self.columns), self.radii, ends, strict=True)
        return math.prod(int((np.minimum(x, r) + np.minimum(end - x, r)).min()) + 1 for x, r, end in along)

    @property
    def jobs(self) -> int:
        """Number of jobs."""
        return len(self.slices) * len(self.rows) * -(-len(self.columns) // self.run)

    @property
    def window(self) -> Three:
        """Sides of the block to which a job adds."""
        last = np.minimum(np.arange(1, -(-len(self.columns) // self.run) + 1) * self.run, len(self.columns)) - 1
        length = int((self.columns[last] - self.columns[:: self.run]).max())
        a, b, c = (2 * r + p for r, p in zip(self.radii, self.patch, strict=True))
        return a, b, c + length

    def references(self) -> NDArray[np.int64]:
        """First samples of the patches of reference, shape (G, 3)."""
        found = np.meshgrid(self.slices, self.rows, self.columns, indexing="ij")
        return np.stack([i.ravel() for i in found], axis=1)


def _references(n: int, patch: int, stride: int, start: int, size: int) -> tuple[int, Integers]:
    """Return how many references of the larger image lie before this part, and those within it."""
    places = reference_positions(size - patch, min(stride, patch)).astype(np.int64) - start
    inside = np.flatnonzero((places >= 0) & (places <= n - patch))
    if not len(inside):
        raise InputError(
            f"shape: got a part of {n} samples at {start} of {size} that holds no reference of patches of {patch}, "
            "expected a larger part"
        )
    return int(inside[0]), places[inside[0] : inside[-1] + 1]


Array = NDArray[Any]
_STEP: Final = 8  # pixels between the middles of blocks
_SIDE: Final = 24  # of a block
_LEVELS: Final = 3  # pictures of half the size, the coarsest looked at first
_RADII: Final = (4, 2, 2)  # from the coarsest picture on: motions of up to 22 pixels a frame, of 10 in small pictures
_LEAST: Final = 0.2  # of the variance of a difference; noise alone changes that of 576 pixels by 0.06, rms


def follow(lattice: Lattice, frames: Array) -> Lattice:
    """Return a lattice whose jobs follow the motion of the block at their middle in a clip of frames (Z, H, W).

    References have to begin in each frame (a stride of 1).
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
    from nlflow.backends.numba import search

    match_blocks = search.loop("match_blocks", first[0].dtype.name)
    field = np.zeros((1, 1, 2), np.int32)
    for level in reversed(range(len(first))):
        shape = tuple(-(-n // _STEP) for n in first[level].shape)
        places = np.ix_(*(np.minimum(np.arange(n) // 2, m - 1) for n, m in zip(shape, field.shape, strict=False)))
        guess = np.ascontiguousarray(2 * field[places])
        field = np.empty_like(guess)
        radius = _RADII[len(first) - 1 - level]
        match_blocks(first[level], second[level], guess, _STEP, _SIDE, radius, _LEAST, field)
    return field
