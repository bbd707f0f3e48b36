"""``balanced`` and ``best``: the flow of E on groups of alike patches, whose steps are local Wiener filters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import to_numpy
from nlflow.denoising.inpainting import FILLING_STEPS, filling_levels
from nlflow.denoising.inputs import Coloured, Observation, decorrelated
from nlflow.denoising.noise.pyramid import coarse_to_fine, levels_within
from nlflow.denoising.noise.spectra import correlation
from nlflow.denoising.patches import GroupAffinity, GroupFlow, Grouping, RelaxedSemiImplicit, TensorFilter
from nlflow.denoising.patches.affinity import as_planes
from nlflow.denoising.patches.lattice import three
from nlflow.denoising.presets import GroupPreset, noisiness
from nlflow.denoising.progress import within
from nlflow.denoising.runs import Problem, Run, Watch
from nlflow.denoising.tiles import bytes_needed, in_tiles
from nlflow.errors import InputError, check_memory

Array = NDArray[Any]
#: Groups are filtered in single precision where the range is below so many times the noise; covariances hold squares.
SINGLE = 90.0
FUNCTIONAL = (
    "E on groups of alike patches; the fidelity of a group is the matrix C/s^2 (C: its covariance, s: the noise that "
    "is left); each step takes a part of the noise out, and patches are grouped anew in between"
)


def described(groupings: tuple[Grouping, ...]) -> dict[str, Any]:
    """Return what `DenoiseInfo` says of every flow of groups; of several later groupings the last is told."""
    first, *_, later = groupings
    parameters = {
        "patch_size": later.patch,
        "neighbours": later.neighbours,
        "search_radius": later.radius,
        "stride": later.stride,
        "first_patch_size": first.patch,
        "first_neighbours": first.neighbours,
    }
    method = f"{GroupAffinity.method}: {GroupAffinity.reason}"
    return {"functional": FUNCTIONAL, "parameters": parameters, "method": method}


def channels_of(f: Array, colours: Array, precision: Any) -> Array:
    """Return samples (..., C) in new channels, which `colours` has as rows."""
    return np.asarray((f @ colours.T.astype(f.dtype)).astype(precision))


def back_from(u: Array, colours: Array, like: Array) -> Array:
    """Return samples of the dtype of `like` from new channels; the bits are those of any layout in memory."""
    mixed = np.moveaxis(as_planes(u), 0, -1) @ colours.astype(u.dtype)
    return np.asarray(mixed.astype(like.dtype).reshape(like.shape))


def problem(f: Any, preset: GroupPreset, groupings: tuple[Grouping, ...], **options: Any) -> Problem:
    """Return the flow of a preset on samples (..., C); `options` go to `GroupFlow`."""
    flow = GroupFlow(
        f, groupings, channels=True, moving=preset.moving, shrink=preset.shrink, cosine=preset.cosine,
        factor=preset.factor, across=preset.across, search_every=preset.search_every, **options,
    )  # fmt: skip
    return Problem(flow, RelaxedSemiImplicit(max(preset.steps, 1), preset.leave), preset.steps + 1.0)


def _prepared(f: Array, variance: Array | None) -> tuple[Array, Array, Array | None]:
    """Return samples in channels that are not correlated, those channels, and the variance as an array like them."""
    weakest = 1.0 if variance is None else float(np.sqrt(variance.min()))
    precision = np.float32 if float(np.ptp(f)) < SINGLE * weakest else np.float64
    colours = decorrelated(f)
    signal = channels_of(f, colours, precision)
    if variance is None:
        return signal, colours, None
    return signal, colours, np.broadcast_to(variance[..., None].astype(precision), signal.shape)


def whole_problem(f: Array, variance: Array | None, preset: GroupPreset) -> Problem:
    """Return the flow of a preset on all of an image (..., C) in units of its noise.

    Raises
    ------
    MemoryLimitError
        When the image does not fit the memory as a whole.
    """
    signal, colours, varying = _prepared(f, variance)
    groupings = preset.groupings(noisiness(f), sum(n > 1 for n in f.shape[:-1]))
    shape = signal.shape[:-1]
    memory = bytes_needed((signal.shape[-1], *three(shape)), groupings, preset.steps, signal.itemsize)
    check_memory(f"the flow of {' x '.join(map(str, shape))} samples", memory, "use denoise(), which cuts them into "
                 "parts")  # fmt: skip
    options = {} if varying is None else {"variance": varying}
    made = problem(signal, preset, groupings, **options)
    told = {**described(groupings), "memory_bytes": memory}
    return replace(made, back=lambda u: back_from(u, colours, f), told=told)


def _path(
    f: Array, preset: GroupPreset, groupings: tuple[Grouping, ...], variance: Array | None, missing: Array | None,
    make: Callable[..., Problem], watch: Watch,
) -> tuple[list[Array], int, int]:  # fmt: skip
    """Return what `in_tiles` does for arrays; their flow may run on another device, which gives arrays back."""
    if not watch.device.tensors:
        return in_tiles(f, preset, groupings, variance, missing, make, watch)
    if preset.moving:
        raise InputError(f"device: got {watch.device.name!r} for a clip, whose search follows motion on the CPU alone, "
                         "expected 'cpu'; or name its first axis Z")  # fmt: skip
    signal, varying, absent = (None if one is None else watch.device.place(one) for one in (f, variance, missing))
    limit = watch.device.free_bytes() if watch.limit is None else watch.limit
    chunked, working = TensorFilter.within(signal, limit)
    path, tiles, memory = in_tiles(
        signal, preset, groupings, varying, absent, partial(make, filter=chunked), replace(watch, limit=limit), working
    )
    return [to_numpy(u) for u in path], tiles, memory


def denoised(f: Array, seen: Observation, preset: GroupPreset, watch: Watch) -> Run:
    """Run the flow of groups on samples (..., C) in units of their noise, in parts where it must be."""
    if seen.coloured is not None:
        return _coloured(f, seen, seen.coloured, preset, watch)
    trail = watch.trail
    signal, colours, variance = _prepared(f, seen.variance)
    precision = signal.dtype.type
    levels = [1.0] if seen.missing is None else filling_levels(f[~seen.missing])
    dimension = sum(n > 1 for n in f.shape[:-1])
    for number, level in enumerate(levels):
        last = level == levels[-1]
        tell = within(watch.tell, number / len(levels), (number + 1) / len(levels))
        groupings = preset.groupings(noisiness(f) * level, dimension)
        every = (watch.every or trail is not None) and last
        path, tiles, memory = _path(
            signal / precision(level), preset if last else replace(preset, steps=FILLING_STEPS), groupings, variance,
            seen.missing, problem, replace(watch, every=every, tell=tell, trail=None),
        )  # fmt: skip
        if not last and seen.missing is not None:
            signal = np.where(seen.missing[..., None], path[-1] * precision(level), signal)
    told = {
        **described(groupings),
        "steps": preset.steps + 1 + (len(levels) - 1) * (FILLING_STEPS + 1),
        "stopped_by": "all steps of the preset were taken",
        "tiles": tiles,
        "memory_bytes": memory,
    }
    estimates = [back_from(u, colours, f) for u in path]
    if trail is not None and seen.variance is None:
        trail.course = _course([f, *estimates])
    return Run(estimates if watch.every else estimates[-1:], told)


def _coloured(f: Array, seen: Observation, noise: Coloured, preset: GroupPreset, watch: Watch) -> Run:
    """Run the flow for noise that is not white, on coarser images first."""
    preset = replace(preset, means=False)  # coarser images come first here
    count = levels_within(f.shape, noise.levels) + 1
    dimension = sum(n > 1 for n in f.shape[:-1])
    told: dict[str, Any] = {"tiles": 1, "memory_bytes": 0}
    shares = np.cumsum([0.0, *(0.25**level for level in reversed(range(count)))])
    shares /= shares[-1]

    def run(signal: Array, spectrum: Array, strength: Array, level: int) -> Array:
        powers = spectrum.mean(axis=(1, 2))
        precision = np.float32 if float(np.ptp(signal)) < SINGLE * math.sqrt(float(powers.mean())) else np.float64
        groupings = preset.groupings(noisiness(signal / math.sqrt(float(powers.mean()))), dimension)
        turned = count - 1 - level
        path, tiles, memory = _path(
            signal.astype(precision), preset, groupings, (strength * powers).astype(precision),
            seen.missing if level == 0 else None, partial(problem, correlation=correlation(spectrum)),
            replace(watch, every=False, tell=within(watch.tell, shares[turned], shares[turned + 1]), trail=None),
        )  # fmt: skip
        told.update(described(groupings))
        told["tiles"], told["memory_bytes"] = max(told["tiles"], tiles), max(told["memory_bytes"], memory)
        return path[-1]

    planes = channels_of(f, noise.axes, np.float64)
    found = coarse_to_fine(planes, noise.spectrum, noise.strength, noise.levels, run)
    told |= {"steps": (preset.steps + 1) * count, "stopped_by": "all steps of the preset were taken"}
    told["parameters"] = {**told["parameters"], "coarser_images": count - 1}
    return Run([back_from(found, noise.axes, f)], told)


def _course(states: list[Array]) -> dict[str, NDArray[np.float64]]:
    """Return times and distances to the constant of states (..., C): of all channels together, as flows have it."""
    axes = tuple(range(states[0].ndim - 1))
    distances = [np.sqrt(u.var(axis=axes, dtype=np.float64).sum()) for u in states]
    return {"t": np.arange(len(states), dtype=np.float64), "distance": np.array(distances)}
