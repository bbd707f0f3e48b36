"""Tiles: an image is cut into overlapping strips where its flow of groups would take too much memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.backends.numba import RUN
from nlflow.denoising.patches import Grouping
from nlflow.denoising.presets import GroupPreset
from nlflow.denoising.progress import within
from nlflow.denoising.runs import Problem, Watch, run
from nlflow.errors import MemoryLimitError, format_bytes, memory_limit

Array = NDArray[Any]


def halo(grouping: Grouping) -> int:
    """Return how far a sample of a step's result looks: to its groups' references, and on to their other members."""
    return 2 * (grouping.radius + grouping.patch - 1)


def margin(groupings: tuple[Grouping, Grouping], steps: int) -> int:
    """Return how far a sample of the last estimate looks, in samples along an axis."""
    first, later = groupings
    return halo(first) + steps * halo(later)


def bytes_needed(shape: tuple[int, int, int], groupings: tuple[Grouping, Grouping], steps: int, itemsize: int) -> int:
    """Return the working memory of a flow of groups on planes (C, H, W)."""
    channels, rows, columns = shape
    samples = rows * columns
    # State, estimate, the next two, three sums, padded guide, input and its copy; then the estimates of the path.
    planes = (10 + steps + 1) * channels * samples * itemsize
    most = 0
    for g in groupings:
        strides = (min(g.stride, rows), min(g.stride, columns))
        references = -(-rows // strides[0]) * -(-columns // strides[1])
        padding = 2 * g.radius * (rows + columns) * channels * itemsize
        width = min(RUN * g.stride + 2 * g.radius + g.patch, columns)
        jobs = min(64, -(-references // RUN) + rows // strides[0])
        windows = 3 * jobs * channels * min(2 * g.radius + g.patch, rows) * width * itemsize
        most = max(most, 4 * (g.neighbours + 1) * references + padding + windows)
    return planes + most


def in_tiles(
    f: Array,
    preset: GroupPreset,
    groupings: tuple[Grouping, Grouping],
    variance: Array | None,
    missing: Array | None,
    problem: Callable[..., Problem],
    watch: Watch,
) -> tuple[list[Array], int, int]:
    """Return the estimates of a flow of groups (the last alone, or all), the number of tiles and the bytes for one.

    Tiles are strips across the rows, or along a signal or an image of one row. Each is wider than its part by all that
    the steps look at, so the parts have the bits of the whole.

    Parameters
    ----------
    f : array of shape (N, C) or (H, W, C)
    preset, groupings
    variance : array of the shape of `f`, optional
    missing : bool array of shape (N,) or (H, W), optional
    problem : callable
        Makes a problem from samples, preset, groupings, and the keywords of `GroupFlow`.
    watch : Watch

    Raises
    ------
    MemoryLimitError
        When a strip of 64 samples does not fit the limit either.
    """
    allowed = memory_limit() if watch.limit is None else watch.limit
    whole = (1, *f.shape[:-1])[-2:]
    axis = f.ndim - 3 if whole[0] > 1 else f.ndim - 2  # of f: across rows, or along the one row
    length = f.shape[axis]
    around = margin(groupings, preset.steps)

    def needed(core: int) -> int:
        size = min(core + 2 * around, length)
        plane = (size, whole[1]) if whole[0] > 1 else (1, size)
        return bytes_needed((f.shape[-1], *plane), groupings, preset.steps, f.itemsize)

    def path_of(low: int, high: int, part_watch: Watch) -> list[Array]:
        part = (slice(None),) * axis + (slice(low, high),)
        options: dict[str, Any] = {"origin": (low, 0) if whole[0] > 1 else (0, low), "whole": whole}
        if variance is not None:
            options["variance"] = variance[part]
        if missing is not None:
            options["missing"] = missing[part]
        return run(problem(f[part], preset, groupings, **options), part_watch)[0]

    core = _core(length, needed, allowed)
    if core == length:
        return path_of(0, length, watch), 1, needed(length)
    path = [np.empty_like(f) for _ in range(preset.steps + 1 if watch.every else 1)]
    count = -(-length // core)
    for number, start in enumerate(range(0, length, core)):
        stop = min(start + core, length)
        low, high = max(start - around, 0), min(stop + around, length)
        tell = within(watch.tell, number / count, (number + 1) / count)
        own = (slice(None),) * axis + (slice(start, stop),)
        inner = (slice(None),) * axis + (slice(start - low, stop - low),)
        for target, estimate in zip(path, path_of(low, high, replace(watch, tell=tell)), strict=True):
            target[own] = estimate[inner]
    return path, count, needed(core)


def _core(length: int, needed: Callable[[int], int], allowed: float) -> int:
    """Return how wide tiles are without what they overlap, or raise `MemoryLimitError`."""
    tiles = 1
    while needed(-(-length // tiles)) > allowed:
        tiles += 1
        if length // tiles < 64:
            least = needed(64)
            raise MemoryLimitError(
                f"max_memory: a strip of 64 samples of this image needs {format_bytes(least)} ({least} bytes), the "
                f"limit is {format_bytes(allowed)}; raise max_memory, or take quality='fast'"
            )
    return -(-length // tiles)
