"""Presets of flows of groups, and their runs in parts that fit the memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import namespace, to_numpy
from nlflow.backends.numba import RUN
from nlflow.denoising.frame import Coloured, Frame, Spread, channels_for
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise.figures import OfSpectra
from nlflow.denoising.patches import GroupAffinity, GroupFlow, Grouping, RelaxedSemiImplicit, TensorFilter
from nlflow.denoising.patches.affinity import as_planes
from nlflow.denoising.patches.lattice import Three, three
from nlflow.denoising.runs import ALONE, Problem, Run, Watch, run, select, within
from nlflow.errors import InputError, MemoryLimitError, check_memory, format_bytes, memory_limit

Array = NDArray[Any]
#: Groups are filtered in single precision where the range is below so many times the noise; covariances hold squares.
SINGLE = 90.0
FUNCTIONAL = (
    "E on groups of alike patches; the fidelity of a group is the matrix C/s^2 (C: its covariance, s: the noise that "
    "is left); each step takes a part of the noise out, and patches are grouped anew in between"
)
FILLING_STEPS = 3  # of a flow that only fills in
_STRONGEST = 0.6  # noise assumed first where samples are missing, of the signal
_FALL = 0.7  # of the assumed noise from one flow to the next
_LEAST = 64  # samples of a strip without what it overlaps
_STRIP = 2**28  # bytes that a first estimate of an image works on at a time
_LEAST_BLOCK = 16  # of a block of a volume, along each axis
_ALL = "all steps of the preset were taken"
_AS_BALANCED = f"{_ALL}, those of 'balanced': on the noise of compressed photographs 'best' gains nothing"
# Noise of compressed photographs is met as white noise too, since the errors of that estimate are others; its time is
# that of one step, which is saved. By hand, on shots of PolyU that were not learned from and on simulated cameras.
_AS_WHITE = 0.3  # share of that estimate
_STRONGER = 2.5  # times the noise, as what lies at low frequencies is more than white noise has there
_WHITE_STEPS = 2
_WEAK = 0.15  # noise over signal, a channel: small patches lose little up to here (by hand, on one Kodak picture)
_SCALES = 4  # coarser recordings, at most
_LOOKED = 2**15  # samples of a recording in which the risk is estimated
_WIDEST = 1.4  # times the side of a cube


@dataclass(frozen=True)
class GroupPreset:
    """A quality's flow."""

    #: After the first estimate; with 0 that is the result.
    steps: int
    #: Groups of the first estimate and of the later steps, by limits: the first one counts whose limit the noise over
    #: the signal does not exceed.
    first: tuple[tuple[float, Grouping], ...]
    later: tuple[tuple[float, Grouping], ...]
    first_signal: Grouping | None = None
    later_signal: Grouping | None = None
    #: Multiple of the noise variance by which eigenvalues of the first covariances are lowered.
    shrink: float = 1.5
    #: Step k of n leaves at most the fraction ``leave (1 - k/n)`` of the noise in the state.
    leave: float = 0.75
    #: On the noise variance s^2 of the later steps; below 1 since the running estimate lacks some of the signal's.
    factor: float = 0.8
    #: Share of the step across the members in the estimates of the later steps.
    across: float = 0.0
    #: Added to the sides of the patches of the later steps, in turns.
    turns: tuple[int, ...] = (0,)
    #: Whether the means over 2 x 2 samples have groups of their own: those for half as much noise, in half as wide a
    #: window of means, so in the same window of samples.
    means: bool = False
    #: Groups are found anew every so many steps.
    search_every: int = 1
    #: Whether the first covariances count as diagonal in the cosines of a patch.
    cosine: bool = False
    #: Whether the search follows motion along the first axis.
    moving: bool = False
    #: Groups of the first estimate for weak noise where images have channels, which tell small patches apart.
    small: Grouping | None = None
    #: Those where the noise is correlated: covariances count as diagonal in cosines then, so that no matrix is
    #: inverted (0.1 dB better on PolyU), and coarser images see what small patches do not.
    correlated: Grouping | None = None

    def precision(self, extent: float) -> type[np.floating[Any]]:
        return np.float32 if self.steps == 0 or extent < SINGLE else np.float64

    def groupings(self, noise_over_signal: float, dimension: int) -> tuple[Grouping, ...]:
        if dimension == 1 and self.first_signal is not None and self.later_signal is not None:
            return self.first_signal, self.later_signal
        own = self._of_images(noise_over_signal)
        if not self.means:
            return own
        coarse = (replace(g, radius=g.along("radius")[2] // 2) for g in self._of_images(noise_over_signal / 2))
        return tuple(replace(g, means=c) for g, c in zip(own, coarse, strict=True))

    def _of_images(self, noise_over_signal: float) -> tuple[Grouping, ...]:
        """Return the groupings without means for images of so much noise."""
        first, later = (
            next(g for limit, g in table if noise_over_signal <= limit) for table in (self.first, self.later)
        )
        return first, *(_wider(later, more) for more in self.turns)

    def spaced(self, spacing: tuple[float, float, float]) -> GroupPreset:
        mean = math.prod(spacing) ** (1 / 3)
        shares = [min(mean / one, _WIDEST) for one in spacing]

        def thinned(grouping: Grouping) -> Grouping:
            def along(name: str) -> Three:
                a, b, c = (max(1, round(n * x)) for n, x in zip(grouping.along(name), shares, strict=True))
                return a, b, c

            return replace(grouping, patch=along("patch"), radius=along("radius"), stride=along("stride"))

        first, later = (tuple((limit, thinned(g)) for limit, g in table) for table in (self.first, self.later))
        return replace(self, first=first, later=later)


def _wider(grouping: Grouping, more: int) -> Grouping:
    """Return the grouping with wider patches, and more of them by a twelfth for each sample."""
    if more == 0:  # blocks are no cubes
        return grouping
    neighbours = round(grouping.neighbours * (1 + more / 12))
    return replace(grouping, patch=grouping.along("patch")[2] + more, neighbours=neighbours)


_SIGNAL_FIRST = Grouping(16, 60, 150, 2)
_SIGNAL_LATER = Grouping(16, 40, 150, 2)

PRESETS = {
    # One step costs the filter of the first covariances: groups are few, and large enough for these.
    "fast": GroupPreset(
        steps=0,
        first=((0.4, Grouping(6, 64, 10, 6)), (0.75, Grouping(6, 96, 10, 6)), (math.inf, Grouping(6, 128, 12, 6))),
        later=((math.inf, Grouping(6, 64, 10, 6)),),  # of flows that fill in
        first_signal=_SIGNAL_FIRST,
        later_signal=_SIGNAL_LATER,
        shrink=2.0,
        small=Grouping(4, 28, 5, 4),
        correlated=Grouping(6, 28, 6, 6),
    ),
    "balanced": GroupPreset(
        steps=5,
        first=((0.4, Grouping(5, 80, 18, 5)), (0.75, Grouping(6, 100, 18, 6)), (math.inf, Grouping(7, 140, 18, 6))),
        later=((0.4, Grouping(5, 48, 18, 5)), (0.75, Grouping(6, 48, 18, 5)), (math.inf, Grouping(7, 48, 18, 5))),
        first_signal=_SIGNAL_FIRST,
        later_signal=_SIGNAL_LATER,
        search_every=2,
    ),
    "best": GroupPreset(
        steps=8,
        first=((0.4, Grouping(5, 90, 18, 4)), (0.75, Grouping(6, 120, 18, 4)), (math.inf, Grouping(7, 160, 18, 4))),
        later=((0.4, Grouping(6, 50, 20, 3)), (0.75, Grouping(7, 56, 20, 3)), (math.inf, Grouping(8, 64, 20, 3))),
        first_signal=_SIGNAL_FIRST,
        later_signal=_SIGNAL_LATER,
        leave=0.9,
        across=0.45,
        turns=(1, -1),
        means=True,
    ),
}


def _blocks(steps: int, first: Grouping, later: Grouping, factor: float = 1.0, moving: bool = False) -> GroupPreset:
    """Return a flow on groups of blocks.

    A factor above 1: of a block with more samples than its group has members, the covariance of the estimate holds too
    much of the noise that is left, not too little of the signal.
    """
    return GroupPreset(
        steps, ((math.inf, first),), ((math.inf, later),), shrink=1.2, factor=factor, search_every=2, cosine=True,
        moving=moving,
    )  # fmt: skip


# Chosen on a part of a T1 template of the brain with white noise of 5 to 15 % of its peak, on counts of drawn cells,
# and on frames of two clips.
VOLUMES = {
    "fast": _blocks(0, Grouping(4, 48, 5, 4), Grouping(4, 48, 5, 4)),
    "balanced": _blocks(4, Grouping(4, 48, 5, 4), Grouping(5, 80, 5, 4), 1.3),
    "best": _blocks(6, Grouping(4, 48, 5, 3), Grouping(5, 80, 5, 4), 1.4),
}
_CLIP_FIRST = Grouping((3, 5, 5), 48, (3, 5, 5), (1, 5, 5))
CLIPS = {
    "fast": _blocks(0, Grouping((3, 5, 5), 32, (2, 4, 4), (1, 5, 5)), _CLIP_FIRST, moving=True),
    "balanced": _blocks(5, _CLIP_FIRST, Grouping((2, 6, 6), 60, (3, 5, 5), (1, 6, 6)), 1.2, moving=True),
    "best": _blocks(6, _CLIP_FIRST, Grouping((2, 6, 6), 60, (3, 5, 5), (1, 4, 4)), 1.2, moving=True),
}


def preset_for(quality: str, axes: Axes) -> GroupPreset:
    if len(axes.letters) < 3:
        return PRESETS[quality]
    if axes.moving:
        return CLIPS[quality]
    a, b, c = axes.spacing
    return VOLUMES[quality].spaced((a, b, c))


@dataclass(frozen=True)
class Groups:
    """An image's flow."""

    preset: GroupPreset
    groupings: tuple[Grouping, ...]
    colours: Array  # (C, C), the channels of the flow, which are not correlated, as rows
    precision: np.dtype[Any]
    ratio: float  # noise over signal, by which groupings were chosen
    dimension: int  # axes of more than one sample

    @classmethod
    def of(cls, preset: GroupPreset, spread: Spread, dimension: int, weakest: float = 1.0) -> Groups:
        precision = np.dtype(preset.precision(spread.extent / weakest))
        colours, ratio = channels_for(spread.channels, spread.moments), spread.ratio
        if preset.small is not None and spread.channels > 1:
            preset = replace(preset, first=((_WEAK, preset.small), *preset.first))
        return cls(preset, preset.groupings(ratio, dimension), colours, precision, ratio, dimension)

    @property
    def patch(self) -> tuple[int, ...]:
        return self.groupings[0].along("patch")[-self.dimension :]

    @property
    def halo(self) -> Three:
        return margins(self.groupings, self.preset.steps)

    def bytes_needed(self, shape: tuple[int, ...], channels: int) -> int:
        planes = (channels, *three(shape))
        return bytes_needed(planes, self.groupings, self.preset.steps, self.precision.itemsize)

    def told(self) -> dict[str, Any]:
        return {**described(self.groupings), "steps": self.preset.steps + 1, "stopped_by": _ALL}

    def signal(self, f: Array) -> Array:
        return channels_of(f, self.colours, self.precision)

    def of_part(self, f: Array, corner: tuple[int, ...], whole: tuple[int, ...], missing: Array | None = None) -> Array:
        options = {} if missing is None else {"missing": missing}
        made = problem(self.signal(f), self.preset, self.groupings, origin=corner, whole=whole, **options)
        return back_from(run(made, ALONE)[0][-1], self.colours, f)

    def whole_problem(self, f: Array, variance: Array | None) -> Problem:
        """Return the flow as one problem, or raise `MemoryLimitError`."""
        signal, shape = self.signal(f), f.shape[:-1]
        memory = self.bytes_needed(shape, signal.shape[-1])
        check_memory(f"the flow of {' x '.join(map(str, shape))} samples", memory, "use denoise(), which cuts them "
                     "into parts")  # fmt: skip
        options = {} if variance is None else {"variance": self._like(variance, signal)}
        made = problem(signal, self.preset, self.groupings, **options)
        told = {**described(self.groupings), "memory_bytes": memory}
        return replace(made, back=lambda u: back_from(u, self.colours, f), told=told)

    def _like(self, variance: Array, signal: Array) -> Array:
        return np.broadcast_to(variance[..., None].astype(self.precision), signal.shape)

    def run(self, f: Array, frame: Frame, watch: Watch) -> Run:
        preset, trail, missing = self.preset, watch.trail, frame.missing
        signal = self.signal(f)
        variance = None if frame.variance is None else self._like(frame.variance, signal)
        precision = signal.dtype.type
        levels = [1.0] if missing is None else filling_levels(f[~missing])
        for number, level in enumerate(levels):
            last = level == levels[-1]
            tell = within(watch.tell, number / len(levels), (number + 1) / len(levels))
            groupings = self.groupings if level == 1 else preset.groupings(self.ratio * level, self.dimension)
            every = (watch.every or trail is not None) and last
            path, tiles, memory = _path(
                signal / precision(level), preset if last else replace(preset, steps=FILLING_STEPS), groupings,
                variance, missing, problem, replace(watch, every=every, tell=tell, trail=None),
            )  # fmt: skip
            if not last and missing is not None:
                signal = np.where(missing[..., None], path[-1] * precision(level), signal)
        steps = preset.steps + 1 + (len(levels) - 1) * (FILLING_STEPS + 1)
        told = {**self.told(), "steps": steps, "tiles": tiles, "memory_bytes": memory}
        estimates = [back_from(u, self.colours, f) for u in path]
        if trail is not None and frame.variance is None:
            trail.course = _course([f, *estimates])
        return Run(estimates if watch.every else estimates[-1:], told)


def described(groupings: tuple[Grouping, ...]) -> dict[str, Any]:
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
    return np.asarray((f @ colours.T.astype(f.dtype)).astype(precision))


def back_from(u: Array, colours: Array, like: Array) -> Array:
    mixed = np.moveaxis(as_planes(u), 0, -1) @ colours.astype(u.dtype)
    return np.asarray(mixed.astype(like.dtype).reshape(like.shape))


def problem(
    f: Any, preset: GroupPreset, groupings: tuple[Grouping, ...], powers: Any = None, **options: Any
) -> Problem:
    if powers is not None:
        options["variance"] = options["variance"] * powers
    flow = GroupFlow(
        f, groupings, channels=True, moving=preset.moving, shrink=preset.shrink, cosine=preset.cosine,
        factor=preset.factor, across=preset.across, search_every=preset.search_every, **options,
    )  # fmt: skip
    return Problem(flow, RelaxedSemiImplicit(max(preset.steps, 1), preset.leave), preset.steps + 1.0)


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


def coloured(f: Array, frame: Frame, noise: Coloured, preset: GroupPreset, watch: Watch) -> Run:
    from nlflow.denoising.noise.spectra import coarse_to_fine, correlation, levels_within

    preset = replace(preset, means=False)  # coarser images come first here
    held = frame.quality == "best" and noise.compressed
    if held:  # -0.03 dB on PolyU, for ten times the time
        preset = PRESETS["balanced"]
    if preset.correlated is not None:
        table = ((math.inf, preset.correlated),)
        preset = replace(preset, first=table, later=table)
    if preset.correlated is not None or noise.compressed:  # as good there, in two thirds of the time
        preset = replace(preset, shrink=1.0, cosine=True)
    both = noise.compressed and preset.steps > 1
    if both:
        preset = replace(preset, steps=preset.steps - 1)
    count = levels_within(f.shape, noise.levels) + 1
    dimension = sum(n > 1 for n in f.shape[:-1])
    told: dict[str, Any] = {"tiles": 1, "memory_bytes": 0}
    shares = np.cumsum([0.0, *(0.25**level for level in reversed(range(count)))])
    shares /= shares[-1]

    def run(signal: Array, spectrum: Array, strength: Array, level: int) -> Array:
        powers, spread = spectrum.mean(axis=(1, 2)), Spread.of(signal)
        mean = float(powers.mean())
        precision = preset.precision(spread.extent / math.sqrt(mean))
        groupings = preset.groupings(replace(spread, variance=spread.variance / mean).ratio, dimension)
        turned, make = count - 1 - level, partial(problem, correlation=correlation(spectrum))
        variance, powers = strength.astype(precision, copy=False), powers.astype(precision)
        if watch.device.tensors:
            variance = variance * powers
        else:  # of each part by itself
            make = partial(make, powers=powers)
        path, tiles, memory = _path(
            signal.astype(precision, copy=False), preset, groupings, variance, frame.missing if level == 0 else None,
            make,
            replace(watch, every=False, tell=within(watch.tell, shares[turned], shares[turned + 1]), trail=None),
        )  # fmt: skip
        told.update(described(groupings))
        told["tiles"], told["memory_bytes"] = max(told["tiles"], tiles), max(told["memory_bytes"], memory)
        return path[-1]

    found = coarse_to_fine(channels_of(f, noise.axes, f.dtype), noise.spectrum, noise.strength, noise.levels, run)
    told |= {"steps": (preset.steps + 1) * count, "stopped_by": _AS_BALANCED if held else _ALL}
    told["parameters"] = {**told["parameters"], "coarser_images": count - 1}
    result = back_from(found, noise.axes, f)
    if both:
        white, tiles, memory = _as_white(f, frame, noise, watch)
        result = (result + _AS_WHITE * (white - result)).astype(f.dtype)
        told["parameters"]["as_white"] = _AS_WHITE
        told |= {"tiles": max(told["tiles"], tiles), "memory_bytes": max(told["memory_bytes"], memory)}
    return Run([result], told)


def at_scales(f: Array, frame: Frame, watch: Watch) -> Run:
    """Run on a recording, with and without coarser ones first; return the run of less risk."""
    flow, size, units = frame.flow, len(f), frame.level / frame.unit
    assert isinstance(flow, Groups)
    first = max(size - _LOOKED, 0) // 2
    look = slice(first, first + _LOOKED)
    held = frame if frame.missing is None else replace(frame, missing=frame.missing[look])
    flat = np.ones((len(flow.colours), 1, OfSpectra.frequencies))

    def alone(g: Array, frame: Frame, watch: Watch) -> Run:
        return flow.run(g, frame, watch)

    def coarse_first(g: Array, frame: Frame, watch: Watch) -> Run:
        white = Coloured(flow.colours, flat, np.ones((len(g), 1), g.dtype), _SCALES, flat)
        return coloured(g, frame, white, flow.preset, watch)

    def both(g: Array, start: float = 0.0, trail: Any = None) -> list[Run]:
        parts = (within(watch.tell, start + part, start + part + 0.25) for part in (0.0, 0.25))
        return [
            way(g, held, replace(watch, tell=tell, trail=trail))
            for way, tell in zip((alone, coarse_first), parts, strict=True)
        ]

    runs = both(f[look], trail=watch.trail)
    seen = slice(None) if held.missing is None else ~held.missing
    best, *_ = select("sure", f[look], [one.path[-1] for one in runs], lambda moved: [one.path[-1] for one in
                      both(moved, 0.5)], 1.0, seen, frame.options.seed, units)  # fmt: skip
    if watch.trail is not None and best == 1:
        watch.trail.course = {}  # that of the other way
    return runs[best] if size <= _LOOKED else (alone, coarse_first)[best](f, frame, replace(watch, tell=None))


def _as_white(f: Array, frame: Frame, noise: Coloured, watch: Watch) -> tuple[Array, int, int]:
    """Return the estimate as if noise were white and stronger, the number of tiles, and the bytes for one."""
    level = _STRONGER * math.sqrt(float(noise.strength.mean()))
    preset, part = replace(PRESETS["balanced"], steps=_WHITE_STEPS), f / level
    flow = Groups.of(preset, Spread.of(part), sum(n > 1 for n in f.shape[:-1]))
    quiet = replace(watch, every=False, tell=None, trail=None)
    path, tiles, memory = _path(flow.signal(part), preset, flow.groupings, None, frame.missing, problem, quiet)
    return level * back_from(path[-1], flow.colours, f), tiles, memory


def _course(states: list[Array]) -> dict[str, NDArray[np.float64]]:
    """Return times and distances to the constant of states (..., C): of all channels together, as flows have it."""
    axes = tuple(range(states[0].ndim - 1))
    distances = [np.sqrt(u.var(axis=axes, dtype=np.float64).sum()) for u in states]
    return {"t": np.arange(len(states), dtype=np.float64), "distance": np.array(distances)}


def filling_levels(f: NDArray[Any]) -> list[float]:
    """Return the noise levels at which holes are filled in, down to 1 (continuation)."""
    strongest = max(_STRONGEST * float(np.std(f, dtype=np.float64)), 1.0)
    count = math.ceil(math.log(strongest) / -math.log(_FALL))
    return [strongest ** (1 - k / count) for k in range(count)] + [1.0]


def margins(groupings: tuple[Grouping, ...], steps: int) -> Three:
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
    f: Any,
    preset: GroupPreset,
    groupings: tuple[Grouping, ...],
    variance: Any,
    missing: Any,
    make: Callable[..., Problem],
    watch: Watch,
    working: int | None = None,
) -> tuple[list[Any], int, int]:
    """Return the estimates of a flow of groups (the last alone, or all), the number of tiles and the bytes for one.

    Tiles overlap so that the parts of arrays have the bits of the whole. `f` and `variance` are (..., C), `missing` has
    the shape of nodes; `make` gives a problem for samples, preset, groupings, and the keywords of `GroupFlow`.
    """
    allowed = memory_limit() if watch.limit is None else watch.limit
    space = tuple(f.shape[:-1])
    whole, around = three(space), margins(groupings, preset.steps)

    def needed(core: Three) -> int:
        a, b, c = (min(n + 2 * m, length) for n, m, length in zip(core, around, whole, strict=True))
        return bytes_needed((f.shape[-1], a, b, c), groupings, preset.steps, f.itemsize, working)

    def path_of(part: tuple[slice, ...], part_watch: Watch) -> list[Any]:
        options: dict[str, Any] = {"origin": tuple(s.start for s in part), "whole": space}
        if variance is not None:
            options["variance"] = variance[part]
        if missing is not None:
            options["missing"] = missing[part]
        return run(make(f[part], preset, groupings, **options), part_watch)[0]

    if preset.steps == 0 and whole[0] == 1 and working is None:  # strips overlap by little
        allowed = min(allowed, max(_STRIP, needed((1, min(2 * _LEAST, whole[1]), whole[2]))))
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
            instead = " or take quality='pixels'" if whole[0] == 1 else "or denoise smaller parts"
            raise MemoryLimitError(
                f"max_memory: a {what} needs {format_bytes(bytes_)} ({bytes_} bytes), the limit is "
                f"{format_bytes(allowed)}; raise max_memory, {instead.strip()}"
            )
    return sides[0], sides[1], sides[2]
