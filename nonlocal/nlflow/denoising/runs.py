"""The two kinds of flow that `denoise` runs, from samples in units of the noise to estimates and what is told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising import groupwise, pixelwise
from nlflow.denoising.following import Tell, Trail
from nlflow.denoising.groupwise import from_planes, planar, to_planes
from nlflow.denoising.inpainting import FILLING_STEPS, filling_levels
from nlflow.denoising.inputs import Observation, decorrelated
from nlflow.denoising.presets import PRESETS, noisiness
from nlflow.denoising.tiles import in_tiles

__all__ = ["Run", "Watch", "fast", "on_groups"]

Array = NDArray[Any]


@dataclass
class Run:
    """A flow that was run: the estimates on its path, in units of the noise, and what is told about it."""

    path: list[Array]
    told: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Watch:
    """What is wanted of a run beside its end: estimates, a bar, a limit of memory, and somebody who is told.

    Attributes
    ----------
    every : bool
        All estimates of the path.
    bar : bool
    limit : float or None
        Bytes that it may use at most.
    tell : callable, optional
        Gets the share that is done.
    trail : Trail, optional
        Keeps the course of the flow.
    """

    every: bool
    bar: bool
    limit: float | None
    tell: Tell | None
    trail: Trail | None = None


def fast(f: Array, seen: Observation, options: dict[str, Any], unit: float, watch: Watch) -> Run:
    """Run the flow of pixels; see `nlflow.denoising.pixelwise`."""
    dtype = f.dtype
    if float(np.ptp(f)) < pixelwise.SINGLE:
        f = f.astype(np.float32)
    given = {**options, "missing": seen.missing, "keep_path": watch.every, "progress": watch.bar,
             "memory_limit": watch.limit, "tell": watch.tell}  # fmt: skip
    if given["width"] is not None:
        given["width"] /= unit
    if seen.variance is None:
        outcome = pixelwise.run(f, trail=watch.trail, **given)
    else:
        outcome = pixelwise.run_map(f, seen.variance, **given)
    kernel = outcome.kernel
    told = {
        "functional": pixelwise.FUNCTIONAL,
        "parameters": {**pixelwise.parameters(kernel, unit), "fidelity_mean": outcome.fidelity_mean},
        "steps": int(outcome.solution.stats["steps"]),
        "stopped_by": outcome.solution.message,
        "method": f"{outcome.operator.method}: {outcome.operator.reason}",
        "memory_bytes": outcome.operator.memory_bytes,
    }
    return Run([u.astype(dtype, copy=False) for u in outcome.path], told)


def on_groups(f: Array, seen: Observation, quality: str, watch: Watch) -> Run:
    """Run the flow of groups of alike patches, in strips where it must be; see `nlflow.denoising.groupwise`."""
    from tqdm import tqdm

    preset, trail = PRESETS[quality], watch.trail
    spatial = f.shape[:-1]
    weakest = 1.0 if seen.variance is None else float(np.sqrt(seen.variance.min()))
    precision = np.float32 if float(np.ptp(f)) < groupwise.SINGLE * weakest else np.float64
    colours = decorrelated(f)
    planes = to_planes(f, colours, precision)
    variance = np.ones((len(planes), 1, 1), precision)
    if seen.variance is not None:
        variance = np.ascontiguousarray(np.broadcast_to(planar(seen.variance[..., None], precision), planes.shape))
    missing = None if seen.missing is None else seen.missing.reshape(planes.shape[1:])
    levels = [1.0] if seen.missing is None else filling_levels(f[~seen.missing])
    dimension = sum(n > 1 for n in spatial)
    bar_format = "{l_bar}{bar}| {elapsed}<{remaining}"
    with tqdm(total=1.0, desc=quality, disable=not watch.bar, leave=False, bar_format=bar_format) as shown:
        done = 0.0

        def advance(share: float) -> None:
            nonlocal done
            done += share / len(levels)
            shown.update(share / len(levels))
            if watch.tell is not None:
                watch.tell(min(done, 1.0))

        for level in levels:
            last = level == levels[-1]
            groupings = preset.groupings(noisiness(f) * level, dimension)
            path, tiles, memory = in_tiles(
                planes / precision(level), preset if last else replace(preset, steps=FILLING_STEPS), groupings,
                variance, missing, keep_path=(watch.every or trail is not None) and last, limit=watch.limit,
                advance=advance,
            )  # fmt: skip
            if not last and missing is not None:
                planes = np.where(missing, path[-1] * precision(level), planes)
    told = {
        "functional": groupwise.FUNCTIONAL,
        "parameters": groupwise.parameters(groupings),
        "steps": preset.steps + 1 + (len(levels) - 1) * (FILLING_STEPS + 1),
        "stopped_by": "all steps of the preset were taken",
        "method": groupwise.METHOD,
        "tiles": tiles,
        "memory_bytes": memory,
    }
    estimates = [from_planes(u, colours, f) for u in path]
    if trail is not None and seen.variance is None:
        states = [f, *estimates]
        trail.course = {
            "t": np.arange(len(states), dtype=np.float64),
            # Of all channels together, as `Flow.distance_to_constant` has it.
            "distance": np.array(
                [np.sqrt(u.var(axis=tuple(range(u.ndim - 1)), dtype=np.float64).sum()) for u in states]
            ),
        }
    return Run(estimates if watch.every else estimates[-1:], told)
