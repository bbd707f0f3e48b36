"""Where patches of reference lie in an image, a volume or a clip, and how far their members may."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nlflow.backends.numba import RUN
from nlflow.denoising.patches.search import reference_positions
from nlflow.errors import InputError, check_integer

Three = tuple[int, int, int]
Integers = NDArray[np.int64]


def three(values: tuple[int, ...], fill: int = 1) -> Three:
    """Return one number for each of three axes: an image has one slice, a signal one slice of one row."""
    a, b, c = (fill,) * (3 - len(values)) + values
    return a, b, c


@dataclass(frozen=True)
class Grouping:
    """How groups are formed: n nearest patches of a size, in a window, around references a stride apart.

    Attributes
    ----------
    patch, radius, stride : int or (int, int, int)
        Side of a patch, largest offset of a member, distance of references; in samples along each axis, or along slices
        (frames), rows and columns. Images and signals take what they have axes for.
    neighbours : int
        Members of a group.
    means : Grouping, optional
        Of the means over 2 x 2 samples (2 of a signal), whose estimates from groups of their own are averaged with the
        means of the estimate. For images and signals; images of less than three of these patches have none.
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
        """Return the patch, the radius or the stride along the three axes."""
        value: int | Three = getattr(self, name)
        return value if isinstance(value, tuple) else (value, value, value)

    @property
    def halo(self) -> Three:
        """How far a sample of a step's result looks: to its groups' references, and on to their other members."""
        own = [2 * (r + p - 1) for r, p in zip(self.along("radius"), self.along("patch"), strict=True)]
        if self.means is not None:  # of blocks of 2 samples, which reach a sample over two others
            own = [max(one, 2 * n) + 5 for one, n in zip(own, self.means.halo, strict=True)]
        a, b, c = own
        return a, b, c


@dataclass(frozen=True)
class Lattice:
    """Where patches of reference lie, and how far their members may.

    The work on them is cut into jobs: runs of references in a row, in C order.

    Attributes
    ----------
    shape, patch, radii : triple of int
        Of the image (Z, H, W), of a patch, and the largest offsets of a member.
    slices, rows, columns : array of int
        First samples of the patches of reference along the three axes.
    most : int
        Members of a group, at most.
    run : int
        References of a job, at most.
    motion : int32 array of shape (jobs, frames, 2)
        Rows and columns by which a job follows what moves, for each frame that its members reach, first the one
        ``radii[0]`` frames earlier; of shape (1, frames, 2) and 0 where nothing moves.
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
        """Return the lattice of a grouping, which is cut down to an image that is smaller.

        Parameters
        ----------
        shape : tuple of int
            (N,), (H, W) or (Z, H, W).
        grouping : Grouping
        origin, whole : tuple of int, optional
            Where these samples lie in a larger image, and its shape: references are those of the larger image.
        run : int
            References of a job, at most.
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
        """How many groups there are."""
        return len(self.slices) * len(self.rows) * len(self.columns)

    @property
    def jobs(self) -> int:
        """How many jobs there are."""
        return len(self.slices) * len(self.rows) * -(-len(self.columns) // self.run)

    @property
    def window(self) -> Three:
        """The sides of what a job adds to."""
        last = np.minimum(np.arange(1, -(-len(self.columns) // self.run) + 1) * self.run, len(self.columns)) - 1
        length = int((self.columns[last] - self.columns[:: self.run]).max())
        a, b, c = (2 * r + p for r, p in zip(self.radii, self.patch, strict=True))
        return a, b, c + length

    def references(self) -> NDArray[np.int64]:
        """Return the first samples of the patches of reference, shape (G, 3)."""
        found = np.meshgrid(self.slices, self.rows, self.columns, indexing="ij")
        return np.stack([i.ravel() for i in found], axis=1)


def _references(n: int, patch: int, stride: int, start: int, size: int) -> tuple[int, Integers]:
    """Return how many references of the larger image lie before this part, and those within it."""
    places = reference_positions(size - patch, min(stride, patch)).astype(np.int64) - start
    inside = np.flatnonzero((places >= 0) & (places <= n - patch))
    return int(inside[0]), places[inside[0] : inside[-1] + 1]
