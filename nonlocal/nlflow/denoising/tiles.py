"""Tiles: an image is cut into overlapping strips where its flow would take too much memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.backends.numba import groups as loops
from nlflow.denoising.groupwise import estimates, margin
from nlflow.denoising.presets import Grouping, GroupPreset
from nlflow.errors import MemoryLimitError, format_bytes, memory_limit

__all__ = ["bytes_needed", "in_tiles"]

Array = NDArray[Any]


def bytes_needed(shape: tuple[int, int, int], groupings: tuple[Grouping, Grouping], steps: int, itemsize: int) -> int:
    """Return the working memory of `estimates` for planes (C, H, W)."""
    channels, rows, columns = shape
    samples = rows * columns
    # State, estimate, the next two, three sums, padded guide, input and its copy; then the estimates of the path.
    planes = (10 + steps + 1) * channels * samples * itemsize
    most = 0
    for g in groupings:
        strides = (min(g.stride, rows), min(g.stride, columns))
        references = -(-rows // strides[0]) * -(-columns // strides[1])
        padding = 2 * g.radius * (rows + columns) * channels * itemsize
        width = min(loops.RUN * g.stride + 2 * g.radius + g.patch, columns)
        jobs = min(64, -(-references // loops.RUN) + rows // strides[0])
        windows = 3 * jobs * channels * min(2 * g.radius + g.patch, rows) * width * itemsize
        most = max(most, 4 * (g.neighbours + 1) * references + padding + windows)
    return planes + most


def in_tiles(
    planes: Array,
    preset: GroupPreset,
    groupings: tuple[Grouping, Grouping],
    variance: Array,
    missing: Array | None,
    *,
    keep_path: bool,
    limit: float | None,
    advance: Callable[[float], Any],
) -> tuple[list[Array], int, int]:
    """Return the path of `estimates` (its end alone, unless kept), the number of tiles and the bytes for the largest.

    Tiles are strips across the rows, or along a signal of one row. Each is wider than its part by all that the steps
    look at, so the parts have the bits of the whole.

    Raises
    ------
    MemoryLimitError
        When a strip of 64 samples does not fit the limit either.
    """
    allowed = memory_limit() if limit is None else limit
    shape = planes.shape
    axis = 1 if shape[1] > 1 else 2
    length = shape[axis]
    around = margin(groupings, preset.steps)
    steps = preset.steps if keep_path else 0

    def needed(core: int) -> int:
        size = min(core + 2 * around, length)
        return bytes_needed(
            (shape[0], size, shape[2]) if axis == 1 else (shape[0], 1, size), groupings, preset.steps, planes.itemsize
        )

    tiles = 1
    while needed(-(-length // tiles)) > allowed:
        tiles += 1
        if length // tiles < 64:
            least = needed(64)
            raise MemoryLimitError(
                f"max_memory: a strip of 64 samples of this image needs {format_bytes(least)} ({least} bytes), the "
                f"limit is {format_bytes(allowed)}; raise max_memory, or take quality='fast'"
            )
    core = -(-length // tiles)
    if tiles == 1:
        path = estimates(planes, preset, groupings, variance, missing, advance=advance)
        return (path if keep_path else path[-1:]), 1, needed(length)
    path = [np.empty_like(planes) for _ in range(steps + 1)]
    count = -(-length // core)
    for start in range(0, length, core):
        stop = min(start + core, length)
        low, high = max(start - around, 0), min(stop + around, length)
        part = (slice(None), slice(low, high)) if axis == 1 else (slice(None), slice(None), slice(low, high))
        inner = slice(start - low, stop - low)
        found = estimates(
            np.ascontiguousarray(planes[part]), preset, groupings,
            variance if variance.shape[1:] == (1, 1) else np.ascontiguousarray(variance[part]),
            None if missing is None else missing[part[1:]],
            origin=(low, 0) if axis == 1 else (0, low), whole=shape[1:],
            advance=lambda share: advance(share / count),
        )  # fmt: skip
        for target, estimate in zip(path, found if keep_path else found[-1:], strict=True):
            if axis == 1:
                target[:, start:stop] = estimate[:, inner]
            else:
                target[:, :, start:stop] = estimate[:, :, inner]
    return path, count, needed(core)
