"""The flow on groups of alike patches: a local Wiener filter, iterated with an evolving kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.backends.threads import blas_limited
from nlflow.denoising.patches.search import nearest_offsets, reference_positions
from nlflow.denoising.presets import Grouping, GroupPreset

__all__ = [
    "FUNCTIONAL",
    "METHOD",
    "SINGLE",
    "Groups",
    "estimates",
    "from_planes",
    "halo",
    "margin",
    "parameters",
    "planar",
    "to_planes",
]

Array = NDArray[Any]
#: Groups are filtered in single precision where the range is below so many times the noise; covariances hold squares.
SINGLE = 90.0
FUNCTIONAL = (
    "E of groups of alike patches, fidelity matrix C/s^2 of each group; relaxed semi-implicit steps with an "
    "evolving kernel"
)
METHOD = "groups: nearest patches in a window, one Wiener filter for each group"
# Jobs whose windows are held at a time; enough to keep threads busy.
_JOBS = 64
# References in a run; `nlflow.backends.numba.groups.RUN`, which is not loaded before it is needed.
_RUN = 64


def halo(grouping: Grouping) -> int:
    """Return how far a sample of a step's result looks: to its groups' references, and on to their other members."""
    return 2 * (grouping.radius + grouping.patch - 1)


def margin(groupings: tuple[Grouping, Grouping], steps: int) -> int:
    """Return how far a sample of the last estimate looks, in samples along an axis."""
    first, later = groupings
    return halo(first) + steps * halo(later)


def parameters(groupings: tuple[Grouping, Grouping]) -> dict[str, Any]:
    """Return the parameters of the flow of groups."""
    first, later = groupings
    return {
        "patch_size": later.patch,
        "neighbours": later.neighbours,
        "search_radius": later.radius,
        "stride": later.stride,
        "first_patch_size": first.patch,
        "first_neighbours": first.neighbours,
    }


def planar(values: Array, precision: Any) -> Array:
    """Return samples (..., C) as planes (C, H, W); a signal is an image of one row."""
    grid = (1, *values.shape[:-1])[-2:]
    return np.ascontiguousarray(np.moveaxis(values.reshape(*grid, -1), -1, 0).astype(precision))


def to_planes(f: Array, colours: Array, precision: Any) -> Array:
    """Return the new channels (C, H, W) of samples (..., C); `colours` has them as rows."""
    return planar(f @ colours.T.astype(f.dtype), precision)


def from_planes(planes: Array, colours: Array, like: Array) -> Array:
    """Return samples of the shape and dtype of `like` from new channels."""
    mixed = np.moveaxis(planes, 0, -1) @ colours.astype(planes.dtype)
    return np.asarray(mixed.astype(like.dtype).reshape(like.shape))


class Groups:
    """Groups of alike patches of an image, found on a guide.

    Parameters
    ----------
    guide : array of shape (C, H, W)
    grouping : Grouping
        Cut down to the image where it is larger.
    rows, columns : array of int, optional
        Corners of the references; `reference_positions` by default.
    """

    def __init__(
        self, guide: Array, grouping: Grouping, rows: Array | None = None, columns: Array | None = None
    ) -> None:
        from nlflow.backends.numba import groups

        self._loops = groups
        shape = guide.shape[1:]
        self.patch = tuple(min(grouping.patch, n) for n in shape)
        corners = tuple(n - p for n, p in zip(shape, self.patch, strict=True))
        self.radii = tuple(min(grouping.radius, c) for c in corners)
        self.rows = reference_positions(corners[0], min(grouping.stride, self.patch[0])) if rows is None else rows
        self.columns = (
            reference_positions(corners[1], min(grouping.stride, self.patch[1])) if columns is None else columns
        )
        (ry, rx), count = self.radii, len(self.rows) * len(self.columns)
        most = min(grouping.neighbours, (2 * ry + 1) * (2 * rx + 1))
        self.members = np.zeros((count, most), np.int32)
        self.counts = np.zeros(count, np.int32)
        padded = np.pad(guide, ((0, 0), (ry, ry), (rx, rx)), mode="edge")
        groups.loop("find_groups", guide.dtype.name)(
            padded, self.rows, self.columns, shape, self.patch, self.radii, nearest_offsets(self.radii)[1],
            np.finfo(guide.dtype).eps, self.members, self.counts,
        )  # fmt: skip
        runs = -(-len(self.columns) // groups.RUN)
        self.jobs = len(self.rows) * runs
        last = np.minimum(np.arange(1, runs + 1) * groups.RUN, len(self.columns)) - 1
        self._width = int((self.columns[last] - self.columns[:: groups.RUN]).max()) + self.patch[1] + 2 * rx

    def step(
        self,
        state: Array,
        pilot: Array,
        observed: Array,
        variance: Array,
        *,
        leave: float = 0.0,
        factor: float = 1.0,
        shrink: float = 0.0,
        running: bool = True,
        advance: Callable[[int], Any] = lambda jobs: None,
    ) -> tuple[Array, Array]:
        """Return the estimate and the next state, (C, H, W) each; see `nlflow.backends.numba.groups.filter_groups`."""
        sums = np.zeros((3, *state.shape), state.dtype)
        (ry, _), (ph, _) = self.radii, self.patch
        windows = np.empty((min(_JOBS, self.jobs), 3, len(state), 2 * ry + ph, self._width), state.dtype)
        rounding = tuple(float(np.finfo(kind).eps) / self._loops.ERROR for kind in (state.dtype, np.float64))
        filter_groups = self._loops.loop("filter_groups", state.dtype.name)
        add_windows = self._loops.loop("add_windows", state.dtype.name)
        # An array that cannot be written to has a type of its own, for which the loop would be compiled again.
        variance = np.require(variance, requirements="W")
        with blas_limited():
            for first in range(0, self.jobs, _JOBS):
                jobs = (first, min(first + _JOBS, self.jobs))
                filter_groups(
                    state, pilot, observed, variance, self.members, self.counts, self.rows, self.columns, jobs,
                    self.patch, self.radii, leave, factor, shrink, running, rounding, windows,
                )  # fmt: skip
                add_windows(windows, self.rows, self.columns, jobs, self.radii, sums)
                advance(jobs[1] - jobs[0])
        estimate, following, weights = sums
        bare = weights == 0  # near the cut of a strip, where no reference reaches and nobody looks
        estimate[bare], following[bare], weights[bare] = state[bare], state[bare], 1
        return estimate / weights, following / weights


def estimates(
    planes: Array,
    preset: GroupPreset,
    groupings: tuple[Grouping, Grouping],
    variance: Array,
    missing: Array | None = None,
    *,
    origin: tuple[int, int] = (0, 0),
    whole: tuple[int, int] | None = None,
    advance: Callable[[float], Any] = lambda share: None,
) -> list[Array]:
    """Return the first estimate and that of each later step.

    Parameters
    ----------
    planes : array of shape (C, H, W)
        In units of the noise; what is missing is filled in.
    preset, groupings
        The flow, and its groups at this noise.
    variance : array of shape (C, H, W) or (C, 1, 1)
        Relative variance of the noise.
    missing : bool array of shape (H, W), optional
        Samples that carry no data: the fidelity is 0 there, so they follow the estimate.
    origin, whole : pair of int, optional
        Where these samples lie in a larger image, and its size: references are those of the larger image.
    advance : callable
        Told the share of the work that has been done since the last call.
    """
    whole = planes.shape[1:] if whole is None else whole
    first, later = groupings
    total = preset.steps + 1

    def groups(guide: Array, grouping: Grouping) -> Groups:
        corners = []
        for axis, (n, start, size) in enumerate(zip(planes.shape[1:], origin, whole, strict=True)):
            patch = min(grouping.patch, size)
            found = reference_positions(size - patch, min(grouping.stride, patch)).astype(np.int64) - start
            inside = np.flatnonzero((found >= 0) & (found <= n - patch))
            begin = int(inside[0])
            here = found[begin : inside[-1] + 1]
            if axis == 1:
                # Runs of references begin where those of the larger image do. The first stands in for those of its run
                # that lie outside: what they would add to lies near the cut, where nobody looks.
                here = np.concatenate([np.full(begin % _RUN, here[0]), here])
            corners.append(here)
        return Groups(guide, grouping, *corners)

    def step(found: Groups, state: Array, pilot: Array, **options: Any) -> tuple[Array, Array]:
        estimate, following = found.step(
            state, pilot, observed, variance, advance=lambda jobs: advance(jobs / found.jobs / total), **options
        )
        if missing is not None:
            for target in (observed, following):
                target[:, missing] = estimate[:, missing]
        return estimate, following

    observed = planes.copy() if missing is not None else planes
    found = groups(planes, first)
    estimate, _ = step(found, observed, observed, shrink=preset.shrink, running=False)
    state, result = observed.copy() if missing is not None else observed, [estimate]
    for k in range(preset.steps):
        if k % preset.search_every == 0:
            found = groups(state, later)
        leave = preset.leave * (1 - (k + 1) / preset.steps)
        estimate, state = step(found, state, estimate, leave=leave, factor=preset.factor)
        result.append(estimate)
    return result
