"""The step on groups of alike patches: its contract between arrays, and the compiled loops that compute it.

`nlflow.denoising.patches.plain` computes the same with the package's own objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nlflow.backends.numba import RUN
from nlflow.backends.threads import blas_limited
from nlflow.denoising.patches.correlation import Correlation
from nlflow.denoising.patches.search import nearest_offsets, reference_positions
from nlflow.errors import InputError, NumericalError, check_integer

Array = NDArray[Any]
_JOBS = 64  # runs whose windows are held at a time; enough to keep threads busy


@dataclass(frozen=True)
class Grouping:
    """How groups are formed: n nearest patches of a size, in a window, around references a stride apart.

    Attributes
    ----------
    patch, neighbours, radius, stride : int
        Side of a patch, members of a group, largest offset of a member, distance of references; in samples.
    """

    patch: int
    neighbours: int
    radius: int
    stride: int

    def __post_init__(self) -> None:
        for name, least in (("patch", 1), ("neighbours", 1), ("radius", 0), ("stride", 1)):
            check_integer(name, getattr(self, name), minimum=least)


@dataclass(frozen=True)
class Lattice:
    """Where patches of reference lie in an image, and how far their members may.

    Attributes
    ----------
    shape, patch, radii : pair of int
        Of the image (H, W), of a patch, and the largest offsets of a member.
    rows, columns : array of int
        First samples of the patches of reference along both axes.
    most : int
        Members of a group, at most.
    """

    shape: tuple[int, int]
    patch: tuple[int, int]
    radii: tuple[int, int]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    most: int

    @classmethod
    def of(
        cls,
        shape: tuple[int, int],
        grouping: Grouping,
        origin: tuple[int, int] = (0, 0),
        whole: tuple[int, int] | None = None,
    ) -> Lattice:
        """Return the lattice of a grouping, which is cut down to an image that is smaller.

        Parameters
        ----------
        shape : pair of int
            (H, W); a signal has one row.
        grouping : Grouping
        origin, whole : pair of int, optional
            Where these samples lie in a larger image, and its shape: references are those of the larger image.
        """
        whole = shape if whole is None else whole
        if any(o < 0 or o + n > w for o, n, w in zip(origin, shape, whole, strict=True)):
            raise InputError(
                f"origin: got {origin} for samples of shape {shape}, expected a part that lies within whole={whole}"
            )
        patch = (min(grouping.patch, whole[0]), min(grouping.patch, whole[1]))
        radii = (min(grouping.radius, shape[0] - patch[0]), min(grouping.radius, shape[1] - patch[1]))
        _, rows = _references(shape[0], patch[0], grouping.stride, origin[0], whole[0])
        before, columns = _references(shape[1], patch[1], grouping.stride, origin[1], whole[1])
        # Runs of references begin where those of the larger image do. The first stands in for those of its run that
        # lie outside: what they would add to is cut off afterwards.
        columns = np.concatenate([np.full(before % RUN, columns[0]), columns])
        most = min(grouping.neighbours, (2 * radii[0] + 1) * (2 * radii[1] + 1))
        return cls(shape, patch, radii, rows, columns, most)

    @property
    def count(self) -> int:
        """How many groups there are."""
        return len(self.rows) * len(self.columns)


def _references(n: int, patch: int, stride: int, start: int, size: int) -> tuple[int, NDArray[np.int64]]:
    """Return how many references of the larger image lie before this part, and those within it."""
    places = reference_positions(size - patch, min(stride, patch)).astype(np.int64) - start
    inside = np.flatnonzero((places >= 0) & (places <= n - patch))
    return int(inside[0]), places[inside[0] : inside[-1] + 1]


@dataclass(frozen=True)
class Groups:
    """Groups of alike patches.

    Attributes
    ----------
    lattice : Lattice
    members : int32 array of shape (G, n)
        First sample of each patch, numbered in C order; the patch of reference first.
    counts : int32 array of shape (G,)
        How many of the members there are; the others hold 0.
    """

    lattice: Lattice
    members: NDArray[np.int32]
    counts: NDArray[np.int32]


@dataclass(frozen=True)
class Images:
    """What a step looks at, as planes (C, H, W) of one floating-point type.

    Attributes
    ----------
    state, pilot, observed : array of shape (C, H, W)
        The running state z, the estimate from which covariances are taken, and the input.
    variance : array of shape (C, H, W) or (C, 1, 1)
        Variance of the noise in the input.
    correlation : array of shape (C, 2a+1, 2b+1), or None
        Correlation of the noise of two samples by their offset, 0 in the middle; None for white noise.
    """

    state: Array
    pilot: Array
    observed: Array
    variance: Array
    correlation: Array | None = None


@dataclass(frozen=True)
class Stage:
    """How far a step goes, and how strong it takes the noise to be.

    Attributes
    ----------
    leave : float
        Fraction of the noise that the next state keeps.
    factor : float
        On the variance of the noise.
    shrink : float
        Multiple of the noise that is taken from the eigenvalues of the covariance; 0 for a pilot free of noise.
    running : bool
        Whether noise has been taken out of the state already; how much is left is measured then.
    """

    leave: float = 0.0
    factor: float = 1.0
    shrink: float = 0.0
    running: bool = True


def _nobody(share: float) -> None:
    """Ignore the progress."""


class GroupFilter(Protocol):
    """What finds groups and computes a step on them.

    With a group's tokens z of mean m, their covariance C in the pilot and the noise N that z still holds, a step is
    z -> z - N (C + N)^-1 (z - m), a semi-implicit step of E with the fidelity matrix C N^-1. Sums for a sample are
    formed in the order of the references, so that the bits do not depend on threads and cuts.
    """

    def find(self, guide: Array, lattice: Lattice) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return `Groups.members` and `Groups.counts`, found on a guide (C, H, W)."""

    def step(
        self, groups: Groups, images: Images, stage: Stage, during: Callable[[float], Any] = _nobody
    ) -> tuple[Array, Array]:
        """Return the estimate and the next state, (C, H, W) each; `during` gets the share of the step that is done."""


def groups_of(filter: GroupFilter, guide: Array, lattice: Lattice) -> Groups:
    """Return the groups that a filter finds on a guide.

    Raises
    ------
    InputError
        For members that are not those of the lattice's references and windows.
    """
    found: Any = filter.find(guide, lattice)
    if getattr(filter.find, "__func__", None) is not CompiledFilter.find:
        if not isinstance(found, tuple) or len(found) != 2:
            raise InputError(f"find: got {type(found).__name__}, expected a tuple of members and counts")
        _check_members(*found, lattice)
    members, counts = found
    return Groups(lattice, members, counts)


def _check_members(members: Any, counts: Any, lattice: Lattice) -> None:
    """Refuse members that somebody's own search found outside of the windows that sums are kept for."""
    shapes = np.shape(members), np.shape(counts)
    if len(shapes[0]) != 2 or shapes != ((lattice.count, shapes[0][1]), (lattice.count,)):
        raise InputError(
            f"find: got members of shape {shapes[0]} and counts of shape {shapes[1]}, expected ({lattice.count}, n) "
            f"and ({lattice.count},), a row for each patch of reference"
        )
    if members.dtype != np.int32 or counts.dtype != np.int32:
        raise InputError(f"find: got members of {members.dtype} and counts of {counts.dtype}, expected int32")
    if counts.min() < 1 or counts.max() > members.shape[1]:
        raise InputError(f"find: got counts from {counts.min()} to {counts.max()}, expected 1 to {members.shape[1]}")
    there = np.arange(members.shape[1]) < counts[:, None]
    references = np.stack([i.ravel() for i in np.meshgrid(lattice.rows, lattice.columns, indexing="ij")])
    for axis, places in enumerate(np.divmod(members, lattice.shape[1])):
        offsets = np.abs(places - references[axis][:, None])
        inside = (
            (offsets <= lattice.radii[axis]) & (places >= 0) & (places <= lattice.shape[axis] - lattice.patch[axis])
        )
        if not inside[there].all():
            raise InputError(
                f"find: got a member outside of the search window, expected offsets of at most {lattice.radii[axis]} "
                f"along axis {axis} and patches within the image; give the Grouping a larger radius"
            )


class CompiledFilter:
    """The compiled loops (`nlflow.backends.numba.groups`), threaded; a subclass may find other groups.

    Groups are filtered in single precision where the noise is strong enough for it, whatever the type of the planes.
    """

    def find(self, guide: Array, lattice: Lattice) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return the nearest patches of each reference, by the squared distance over all channels."""
        from nlflow.backends.numba import search

        # The loops order distances, and leave their arrays where one is not finite.
        most = math.sqrt(float(np.finfo(guide.dtype).max) / (8 * len(guide) * math.prod(lattice.patch)))
        if not float(np.abs(guide).max()) < most:
            raise NumericalError(
                "guide: got NaN, infinity or values whose squares overflow, expected a signal in units of its noise; "
                "divide it by the standard deviation of the noise first"
            )
        members = np.zeros((lattice.count, lattice.most), np.int32)
        counts = np.zeros(lattice.count, np.int32)
        ry, rx = lattice.radii
        padded = np.pad(guide, ((0, 0), (ry, ry), (rx, rx)), mode="edge")
        search.loop("find_groups", guide.dtype.name)(
            padded, lattice.rows, lattice.columns, lattice.shape, lattice.patch, lattice.radii,
            nearest_offsets(lattice.radii)[1], np.finfo(guide.dtype).eps, members, counts,
        )  # fmt: skip
        return members, counts

    def step(
        self, groups: Groups, images: Images, stage: Stage, during: Callable[[float], Any] = _nobody
    ) -> tuple[Array, Array]:
        """Return the estimate and the next state; see `GroupFilter`."""
        from nlflow.backends.numba import groups as loops

        state, lattice, runs = images.state, groups.lattice, -(-len(groups.lattice.columns) // RUN)
        total = len(lattice.rows) * runs
        sums = np.zeros((3, *state.shape), state.dtype)
        windows = np.empty((min(_JOBS, total), 3, len(state), *_window(lattice)), state.dtype)
        rounding = tuple(float(np.finfo(kind).eps) / loops.ERROR for kind in (state.dtype, np.float64))
        filter_groups = loops.loop("filter_groups", state.dtype.name)
        add_windows = loops.loop("add_windows", state.dtype.name)
        # An array that cannot be written to has a type of its own, for which the loop would be compiled again.
        variance = np.require(images.variance, requirements="W")
        found = Correlation.of(images.correlation, lattice.patch, len(state))
        matrices = tuple(
            np.ascontiguousarray(m, state.dtype) for m in (found.matrices, found.whitening, found.extremes)
        )
        with blas_limited():
            for first in range(0, total, _JOBS):
                jobs = (first, min(first + _JOBS, total))
                filter_groups(
                    state, images.pilot, images.observed, variance, *matrices, groups.members, groups.counts,
                    lattice.rows, lattice.columns, jobs, lattice.patch, lattice.radii, stage.leave, stage.factor,
                    stage.shrink, stage.running, rounding, windows,
                )  # fmt: skip
                add_windows(windows, lattice.rows, lattice.columns, jobs, lattice.radii, sums)
                during(jobs[1] / total)
        estimate, next_state, weights = sums
        bare = weights == 0  # near the cut of a strip, which is cut off afterwards
        estimate[bare], next_state[bare], weights[bare] = state[bare], state[bare], 1
        return estimate / weights, next_state / weights


def _window(lattice: Lattice) -> tuple[int, int]:
    """Return the sides of what a run of references adds to."""
    last = np.minimum(np.arange(1, -(-len(lattice.columns) // RUN) + 1) * RUN, len(lattice.columns)) - 1
    width = int((lattice.columns[last] - lattice.columns[::RUN]).max()) + lattice.patch[1] + 2 * lattice.radii[1]
    return 2 * lattice.radii[0] + lattice.patch[0], width
