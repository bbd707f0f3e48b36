"""Tiles: an image or a volume is cut into overlapping parts where its flow of groups would take too much memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nlflow._array import Array, namespace
from nlflow.backends.numba import RUN
from nlflow.denoising.patches import Grouping
from nlflow.denoising.patches.lattice import Three, three
from nlflow.denoising.presets import GroupPreset
from nlflow.denoising.progress import within
from nlflow.denoising.runs import Problem, Watch, run
from nlflow.errors import MemoryLimitError, format_bytes, memory_limit

_LEAST = 64  # samples of a strip without what it overlaps
_LEAST_BLOCK = 16  # of a block of a volume, along each axis


def margins(groupings: tuple[Grouping, ...], steps: int) -> Three:
    """Return how far a sample of the last estimate looks, in samples along slices, rows and columns."""
    first, *later = (one.halo for one in groupings)
    a, b, c = (one + steps * max(two) for one, two in zip(first, zip(*later, strict=True), strict=True))
    return a, b, c


def bytes_needed(
    shape: tuple[int, ...],
    groupings: tuple[Grouping, ...],
    steps: int,
    itemsize: int,
    working: int | None = None,
) -> int:
    """Return the working memory of a flow of groups on planes (C, H, W) or (C, Z, H, W).

    `working` are the bytes of chunks of tensors, which take the place of the windows of compiled loops.
    """
    channels, space = shape[0], three(shape[1:])
    # State, estimate, the next two, three sums, guide, input and its copy; then the estimates of the path.
    planes = (10 + steps + 1) * channels * math.prod(space) * itemsize
    most = 0
    for g in groupings:
        # The groups of means, a fourth as many, come after those of samples, whose windows are free again.
        members = g.neighbours + 1 + (0 if g.means is None else (g.means.neighbours + 1) / 2)
        counts = [-(-n // min(step, n)) for n, step in zip(space, g.along("stride"), strict=True)]
        along = zip(space, g.along("radius"), g.along("patch"), strict=True)
        sides = [min(2 * r + p, n) for n, r, p in along]
        sides[2] = min(RUN * g.along("stride")[2] + sides[2], space[2])
        jobs = min(64, counts[0] * counts[1] * -(-counts[2] // RUN))
        windows = 3 * jobs * channels * math.prod(sides) * itemsize if working is None else working
        most = max(most, math.ceil(4 * members * math.prod(counts)) + windows)
    return planes + most


def in_tiles(
    f: Array,
    preset: GroupPreset,
    groupings: tuple[Grouping, ...],
    variance: Array | None,
    missing: Array | None,
    problem: Callable[..., Problem],
    watch: Watch,
    working: int | None = None,
) -> tuple[list[Array], int, int]:
    """Return the estimates of a flow of groups (the last alone, or all), the number of tiles and the bytes for one.

    Tiles are strips across the rows, or along a signal or an image of one row; those of a volume are blocks, those of a
    clip some frames. Each is wider than its part by all that the steps look at, so the parts have the bits of
    the whole.

    Parameters
    ----------
    f : array or tensor of shape (N, C), (H, W, C) or (Z, H, W, C)
    preset, groupings
    variance : array of the shape of `f`, optional
    missing : bool array of the shape of the nodes, optional
    problem : callable
        Makes a problem from samples, preset, groupings, and the keywords of `GroupFlow`.
    watch : Watch
    working : int, optional
        Of `bytes_needed`. Parts of tensors agree with the whole to rounding.

    Raises
    ------
    MemoryLimitError
        When the smallest tile does not fit the limit either.
    """
    allowed = memory_limit() if watch.limit is None else watch.limit
    space = tuple(f.shape[:-1])
    whole, around = three(space), margins(groupings, preset.steps)

    def needed(core: Three) -> int:
        a, b, c = (min(n + 2 * m, length) for n, m, length in zip(core, around, whole, strict=True))
        return bytes_needed((f.shape[-1], a, b, c), groupings, preset.steps, f.itemsize, working)

    def path_of(part: tuple[slice, ...], part_watch: Watch) -> list[Array]:
        options: dict[str, Any] = {"origin": tuple(s.start for s in part), "whole": space}
        if variance is not None:
            options["variance"] = variance[part]
        if missing is not None:
            options["missing"] = missing[part]
        return run(problem(f[part], preset, groupings, **options), part_watch)[0]

    core = _core(whole, preset.moving, needed, allowed)
    if core == whole:
        return path_of(tuple(slice(0, n) for n in space), watch), 1, needed(whole)
    path = [namespace(f).empty_like(f) for _ in range(preset.steps + 1 if watch.every else 1)]
    lines = [range(0, n, c) for n, c in zip(whole, core, strict=True)]
    count = math.prod(map(len, lines))
    for number, corner in enumerate(itertools.product(*lines)):
        tell = within(watch.tell, number / count, (number + 1) / count)
        own, wide, inner = [], [], []
        for start, side, length, m in list(zip(corner, core, whole, around, strict=True))[-len(space) :]:
            stop, low = min(start + side, length), max(start - m, 0)
            own.append(slice(start, stop))
            wide.append(slice(low, min(stop + m, length)))
            inner.append(slice(start - low, stop - low))
        for target, estimate in zip(path, path_of(tuple(wide), replace(watch, tell=tell)), strict=True):
            target[tuple(own)] = estimate[tuple(inner)]
    return path, count, needed(core)


def _core(whole: Three, moving: bool, needed: Callable[[Three], int], allowed: float) -> Three:
    """Return the sides of tiles without what they overlap, or raise `MemoryLimitError`.

    Images are cut across their rows, clips between frames (their motion is one of whole frames), volumes along the axis
    along which tiles are longest.
    """
    sides, least = list(whole), _LEAST_BLOCK
    cut: tuple[int, ...] = (0, 1, 2)
    if whole[0] == 1:
        least, cut = _LEAST, (1,) if whole[1] > 1 else (2,)
    elif moving:
        least, cut = 1, (0,)
    tiles = [1, 1, 1]
    while needed((sides[0], sides[1], sides[2])) > allowed:
        axis = max(cut, key=lambda k: sides[k])
        tiles[axis] += 1
        sides[axis] = -(-whole[axis] // tiles[axis])
        if whole[axis] // tiles[axis] < min(least, whole[axis]):
            smallest = three(tuple(min(least, n) if k in cut else n for k, n in enumerate(whole)))
            bytes_ = needed(smallest)
            what = "strip of 64 samples of this image" if whole[0] == 1 else f"part of {' x '.join(map(str, smallest))}"
            instead = " or take quality='fast'" if whole[0] == 1 else "or denoise smaller parts"
            raise MemoryLimitError(
                f"max_memory: a {what} needs {format_bytes(bytes_)} ({bytes_} bytes), the limit is "
                f"{format_bytes(allowed)}; raise max_memory, {instead.strip()}"
            )
    return sides[0], sides[1], sides[2]
