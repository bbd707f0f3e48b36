"""Strength of white noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.denoising.given import signals_of
from nlflow.denoising.noise.figures import MEDIAN_SQUARE, OfWindows
from nlflow.denoising.noise.models.base import check_samples
from nlflow.denoising.noise.models.gaussian import constant
from nlflow.domains.samples import range_of
from nlflow.errors import checked_call

#: How many samples around a part its windows look at.
PART_HALO: Final = max(OfWindows.sides[1]) - 1 + OfWindows.filled[1] // 2


def limits_of(size: int, at_low: int, at_high: int) -> tuple[float, float]:
    """Return the values that samples from 0 to 1 were clipped to, minus and plus infinity where they were not."""
    least = max(OfWindows.clipped * size, 2)
    return 0.0 if at_low > least else -math.inf, 1.0 if at_high > least else math.inf


def at_ends(present: NDArray[np.float64]) -> tuple[int, int, int]:
    return present.size, int(np.count_nonzero(present == 0)), int(np.count_nonzero(present == 1))


@dataclass(frozen=True)
class Windows:
    """Windows without gaps."""

    structure: NDArray[np.float64]  # energy at low frequencies
    high: NDArray[np.float32]  # coefficients at high frequencies (windows, frequencies)
    mean: NDArray[np.float64]
    repeats: float  # windows that count as one

    @property
    def first(self) -> int:
        frequencies = int(self.high.shape[1])
        return math.ceil(self.repeats / (2 * frequencies * OfWindows.first_error**2))


def from_windows(windows: Windows, limits: tuple[float, float], share: float) -> float:
    order = np.argsort(windows.structure)
    sigma = _while_consistent(windows, order, share)
    if len(order) == 0 or (math.isinf(limits[0]) and math.isinf(limits[1])):
        return sigma
    # Near the limits noise is cut off; how near depends on sigma, so that it takes two rounds. The means are
    # independent of what is measured.
    margin = np.minimum(windows.mean - limits[0], limits[1] - windows.mean)[order]
    farthest = np.sort(margin)[-min(windows.first, len(margin))]
    for _ in range(2):
        sigma = _while_consistent(windows, order[margin >= min(OfWindows.clipped_margin * sigma, farthest)], share)
    return sigma


def _while_consistent(windows: Windows, order: NDArray[np.intp], share: float) -> float:
    """Return sigma from the first windows and from ever more of them, as long as these agree with the fewer ones."""
    count = max(math.ceil(share * len(order)), windows.first)
    seen: list[tuple[float, float]] = []
    while len(order):
        part = windows.high[order[:count]]
        variance = float(np.median(np.square(part))) / MEDIAN_SQUARE
        error = 2 * windows.repeats / part.size  # variance of the estimate over its square
        if any(variance - v > v * math.sqrt(max(e - error, 0.0)) for v, e in seen):
            break
        seen.append((variance, error))
        if count >= len(order) or math.sqrt(error) / 2 < OfWindows.last_error:
            break
        count *= 2
    sigma = math.sqrt(seen[-1][0]) if seen else 0.0
    return sigma if sigma > OfWindows.rounding else 0.0


def sigma_of_volume(volume: NDArray[np.floating], absent: NDArray[np.bool_]) -> float:
    unit, span = in_unit(volume, absent)
    if span == 0:
        return 0.0
    empty = absent | constant(unit[..., None])
    for hidden in (empty, absent):  # of a drawing nothing else may be left
        for side in OfWindows.sides[3]:
            windows = blocks_of(unit, hidden, side)
            if len(windows.structure) >= windows.first / 2:
                return from_windows(windows, limits_of(*at_ends(unit[~hidden])), OfWindows.first[3]) * span
    return from_windows(windows, limits_of(*at_ends(unit[~absent])), OfWindows.first[3]) * span


def in_unit(volume: NDArray[np.floating], absent: NDArray[np.bool_]) -> tuple[NDArray[np.float64], float]:
    """Return samples from 0 to 1, 0 where they are absent, and their range; a range of 0 where there is none."""
    present = volume[~absent]
    span = range_of(present) if present.size else 0.0
    if span == 0 or math.isinf(span):
        return np.zeros(volume.shape), 0.0
    low = float(present.min())
    return np.where(absent, 0.0, (np.where(absent, low, volume).astype(np.float64) - low) / span), span


def blocks_of(
    unit: NDArray[np.float64], absent: NDArray[np.bool_], side: int = OfWindows.sides[3][0], *, every: bool = False
) -> Windows:
    """Put overlapping blocks of side³ (fewer along a shorter axis) through the orthonormal cosine transform."""
    from scipy.fft import dct

    shape = tuple(min(side, n) for n in unit.shape)
    step = max(1, math.ceil((unit.size / OfWindows.most_windows[3]) ** (1 / 3)))
    bases = [dct(np.eye(n), norm="ortho", axis=0) for n in shape]
    frequency = np.sum(np.meshgrid(*(np.arange(n) / (n - 1) / 3 for n in shape), indexing="ij"), axis=0).ravel()
    is_high = frequency >= OfWindows.high[3] - 1e-9
    is_low = (~is_high & (frequency > 0)).astype(float)
    whole = sliding_window_view(unit, shape)[::step, ::step, ::step]
    touched = np.asarray(sliding_window_view(absent, shape)[::step, ::step, ::step].any(axis=(-3, -2, -1)))
    samples = math.prod(shape)
    # One basis function a row; a block as one row of samples takes one product of matrices.
    basis = np.einsum("ai,bj,ck->abcijk", *bases).reshape(samples, samples).T
    planes = max(1, OfWindows.block[3] // math.prod(whole.shape[1:3]))
    structure, high, mean = [], [], []
    for first in range(0, len(whole), planes):
        near = slice(first, first + planes)
        values = whole[near][~touched[near]].reshape(-1, samples) @ basis
        structure.append(np.square(values) @ is_low)
        high.append((values if every else values[:, is_high]).astype(np.float32))
        mean.append(values[:, 0] / math.sqrt(samples))
    return Windows(np.concatenate(structure), np.concatenate(high), np.concatenate(mean), OfWindows.repeats * samples)


@checked_call
@underflowing
def estimate_sigma(image: Any, *, channel_axis: int | None = None, axes: str | None = None) -> float:
    """Estimate the standard deviation of white Gaussian noise, in the units of the input; the mean over channels.

    For white noise only: it is far too small for photographs of a camera, whose demosaicking and JPEG cut off high
    frequencies (use `estimate_noise`). Texture that fills the image counts as noise.

    Parameters
    ----------
    image : array_like
        1-D signal, 2-D image, or volume or clip of three axes, with a channel axis where there is one.
    channel_axis : int, optional
    axes : str, optional
        What each axis is, as `denoise` takes it: needed for a volume or clip of fewer than 8 samples along an axis.

    Returns
    -------
    float
        0 for constant input, for input of one sample, and where the range overflows.

    Raises
    ------
    InputError
        As `denoise`.

    Notes
    -----
    Windows of 8×8 samples (16 in 1-D, 4×4×4 in 3-D; smaller where few fit) are put through the cosine transform and
    sorted by the energy below a limiting frequency. Sigma² is the median of the squared coefficients above it, over
    0.4549, from the first 1 % of the windows (1-D: half), then twice as many, and so on while that does not raise it
    beyond its own uncertainty (the rule of Lepski 1991, doi 10.1137/1135065). O(N).

    References
    ----------
    N. Ponomarenko et al., "An automatic approach to lossy compression of AVIRIS images", IGARSS 2007, as analysed by
    Colom and Buades 2013 (doi 10.5201/ipol.2013.45); medians: Donoho and Johnstone 1994 (doi 10.1093/biomet/81.3.425).
    """
    signal, missing, _ = signals_of(image, channel_axis, axes)
    return float(np.mean(estimate_sigmas(signal, missing)))


def estimate_sigmas(signal: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """Return the estimate of `estimate_sigma` for each channel of finite samples.

    Parameters
    ----------
    signal : array of shape (..., C)
        One to three axes besides that of the channels; the values of missing samples do not matter, be they NaN.
    missing : bool array of shape (...), optional
        True where a sample is missing.

    Returns
    -------
    array of shape (C,), float64
        0 where there is nothing to measure.

    Raises
    ------
    InputError
        For other shapes and types.
    """
    check_samples(signal, missing, "signal")
    # An axis of one sample carries no detail; a 1-D signal is a row.
    shape = [n for n in signal.shape[:-1] if n > 1] or [1]
    dimension = len(shape)
    if dimension == 3:
        hidden = np.zeros(shape, bool) if missing is None else np.reshape(missing, shape)
        volumes = np.moveaxis(np.reshape(signal, (*shape, -1)), -1, 0)
        return np.array([sigma_of_volume(volume, hidden) for volume in volumes])
    rows, columns = (1, shape[0]) if dimension == 1 else shape
    absent = np.zeros((rows, columns), bool) if missing is None else np.reshape(missing, (rows, columns))
    planes = np.moveaxis(np.reshape(signal, (rows, columns, -1)), -1, 0)
    return np.array([_estimate(plane, absent, dimension) for plane in planes])


def sigmas_at_half(samples: NDArray[Any], missing: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """Return the strengths (C,) that white noise would have by means over 2, 2 x 2 or 2 x 2 x 2 samples."""
    whole = tuple(slice(0, n - n % 2) for n in samples.shape[:-1])
    shape = tuple(length for n in samples.shape[:-1] for length in (n // 2, 2))
    if min(shape[::2]) < 2:
        return np.full(samples.shape[-1], math.inf)
    pairs = tuple(range(1, len(shape), 2))
    halves = samples[whole].astype(np.float64).reshape(*shape, -1).mean(axis=pairs)
    absent = None if missing is None else np.asarray(missing[whole].reshape(shape).any(axis=pairs))
    return math.sqrt(2 ** len(pairs)) * estimate_sigmas(halves, absent)


def sigmas_of_sizes(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard deviation that each of `OfWindows.quantiles` of absolute Gaussian errors (M,) tells."""
    return np.asarray(np.quantile(sizes, OfWindows.quantiles) / _laws_of_sizes())


def chance_of_sizes(count: int) -> float:
    """Return the relative error of the first of `sigmas_of_sizes` for so many independent errors."""
    q, law = OfWindows.quantiles[0], float(_laws_of_sizes()[0])
    density = math.sqrt(2 / math.pi) * math.exp(-(law**2) / 2)
    return math.sqrt(q * (1 - q) / count) / (density * law)


def _laws_of_sizes() -> NDArray[np.float64]:
    from scipy.special import ndtri

    return np.asarray(ndtri((1 + np.array(OfWindows.quantiles)) / 2))


def channel_levels(sigmas: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the noise of channels from their estimates (C,): the mean where they are alike, or each its own."""
    alike = float(sigmas.max()) <= OfWindows.apart * float(sigmas.min())
    return np.full_like(sigmas, sigmas.mean()) if alike else sigmas


def _estimate(plane: NDArray[Any], absent: NDArray[np.bool_], dimension: int) -> float:
    present = plane[~absent] if absent.any() else plane
    span = range_of(present) if present.size else 0.0
    if span == 0 or math.isinf(span):
        return 0.0
    # float64, from 0 to 1: the estimate does not depend on the units then.
    low = float(present.min())
    known = plane if present is plane else np.where(absent, low, plane)
    scaled = (known.astype(np.float64) - low) / span
    filled = absent | constant_areas(scaled, dimension)
    sides = [side for side in OfWindows.sides[dimension] if side <= min(plane.shape[-dimension:])]

    def windows_of(side: int, hidden: NDArray[np.bool_]) -> Windows:
        return _transform(scaled, hidden, (side if dimension == 2 else 1, side), _steps(scaled.shape, dimension))

    counts = int(np.count_nonzero(filled & ~absent)), int(np.count_nonzero(~absent))
    if _few(*counts) or _noisy(windows_of(sides[0], filled), _repeated(scaled, filled), counts[1] - counts[0]):
        absent = filled
    limits = limits_of(*at_ends(scaled[~absent] if absent.any() else scaled))
    for side in sides:
        windows = windows_of(side, absent)
        if len(windows.structure) >= windows.first / 2:
            break  # otherwise smaller windows, down to the smallest
    return from_windows(windows, limits, OfWindows.first[dimension]) * span


def constant_areas(scaled: NDArray[np.float64], dimension: int) -> NDArray[np.bool_]:
    if not (np.diff(scaled, axis=-1) == 0).any():
        return np.zeros(scaled.shape, bool)
    side = OfWindows.filled[dimension]
    down, along = (side // 2 if dimension == 2 else 0), side // 2
    margins = [(down, down), (along, along)]
    varied = _any_in(np.pad(scaled[:, 1:] != scaled[:, :-1], margins), (2 * down + 1, side - 1))
    if down:
        varied |= _any_in(np.pad(scaled[1:] != scaled[:-1], margins), (side - 1, side))
    return ~varied


def _any_in(marked: NDArray[np.bool_], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Tell of each window of a shape, by its corner, whether it holds a marked sample."""
    for axis, size in enumerate(shape):
        lines, wide = np.moveaxis(marked, axis, 0), 1
        while wide < size:
            step = min(wide, size - wide)
            lines, wide = lines[:-step] | lines[step:], wide + step
        marked = np.moveaxis(lines, 0, axis)
    return marked


def _few(filled: int, present: int) -> bool:
    """Tell whether so few samples are filled in that the others have noise."""
    return 2 * filled < present


def _repeated(scaled: NDArray[np.float64], filled: NDArray[np.bool_]) -> int:
    """Return how many samples outside of what is filled in are like the next one."""
    return int(np.count_nonzero((scaled[:, 1:] == scaled[:, :-1]) & ~filled[:, :-1]))


def _noisy(windows: Windows, repeated: int, others: int) -> bool:
    """Tell whether what is not filled in has noise where most is: many windows, of many values, unlike a drawing."""
    return len(windows.structure) >= windows.first and repeated < OfWindows.repeated * others


def _steps(size: tuple[int, ...], dimension: int) -> tuple[int, int]:
    """Return how far apart windows begin, so that there are about `OfWindows.most_windows` of them at most."""
    step = math.ceil((math.prod(size) / OfWindows.most_windows[dimension]) ** (1 / dimension))
    step += step % 4 == 0  # in many phases of the grid of JPEG
    return (step if dimension == 2 else 1), step


def _transform(
    scaled: NDArray[np.float64], absent: NDArray[np.bool_], shape: tuple[int, int], steps: tuple[int, int]
) -> Windows:
    """Put overlapping windows through the orthonormal cosine transform."""
    from scipy.fft import dct

    down, along = (dct(np.eye(n), norm="ortho", axis=0).T for n in shape)
    samples = math.prod(shape)
    dimension = 2 if shape[0] > 1 else 1
    frequency = np.add.outer(np.arange(shape[1]), np.arange(shape[0])).ravel()
    is_high = frequency >= math.ceil(OfWindows.high[dimension] * frequency[-1] - 1e-9)
    is_low = (~is_high & (frequency > 0)).astype(float)

    tops = range(0, scaled.shape[0] - shape[0] + 1, steps[0])
    lines = max(1, OfWindows.block[2] // (1 + (scaled.shape[1] - shape[1]) // steps[1]))
    parts = []
    for first in range(0, len(tops), lines):
        rows = slice(tops[first], tops[min(first + lines, len(tops)) - 1] + shape[0])
        # Along the rows, then down the columns, one large product each: (windows, frequency along × frequency down).
        half = np.ascontiguousarray(sliding_window_view(scaled[rows], shape[1], axis=1)[:, :: steps[1]]) @ along
        both = np.ascontiguousarray(sliding_window_view(half, shape[0], axis=0)[:: steps[0]]) @ down
        values = both.reshape(-1, samples)
        if absent[rows].any():
            values = values[~_touched(absent[rows], shape, steps).ravel()]
        high = values[:, is_high].astype(np.float32)
        parts.append((np.square(values) @ is_low, high, values[:, 0] / math.sqrt(samples)))
    structure, high, mean = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Windows(structure, high, mean, _repeats(shape, steps))


def _repeats(shape: tuple[int, int], steps: tuple[int, int]) -> float:
    """Return how many windows count as one: the fewer, the farther apart they begin."""
    return max(OfWindows.repeats * math.prod(shape) / math.prod(steps), 1.0)


def _touched(absent: NDArray[np.bool_], shape: tuple[int, int], steps: tuple[int, int]) -> NDArray[np.bool_]:
    return _any_in(absent, shape)[:: steps[0], :: steps[1]]


@dataclass(frozen=True)
class PartWindows:
    """Windows (a, b) that begin in a part of a channel, on the lattice of the whole."""

    first: tuple[int, int]  # number of the first window, along the rows and the columns of windows
    structure: NDArray[np.float64]  # energy at low frequencies
    mean: NDArray[np.float64]
    touched: NDArray[np.bool_]  # by a sample that was filled in
    absent: NDArray[np.bool_]  # a sample is missing
    high: NDArray[np.float32]  # (a, b, k) coefficients at high frequencies
    #: How many samples there are, and how many are the lowest and the highest of the whole: of all, and of those that
    #: were not filled in.
    ends: tuple[tuple[int, int, int], tuple[int, int, int]]
    repeated: int  # samples that were not filled in and are like the next one of the whole


def window_sides(whole: tuple[int, ...]) -> tuple[int, ...]:
    shape = _axes(whole)
    return tuple(side for side in OfWindows.sides[len(shape)] if side <= min(shape))


def _axes(whole: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without axes of one sample, which carry no detail."""
    return tuple(n for n in whole if n > 1) or (1,)


def _as_rows(values: tuple[int, ...], whole: tuple[int, ...], default: int) -> tuple[int, int]:
    """Return one number for each axis as numbers of rows and columns; a 1-D signal is a row."""
    kept = tuple(v for v, n in zip(values, whole, strict=True) if n > 1) or (default,)
    return (default, kept[0]) if len(kept) == 1 else (kept[0], kept[1])


@underflowing
def windows_of_part(
    part: NDArray[Any],
    corner: tuple[int, ...],
    inner: tuple[slice, ...],
    whole: tuple[int, ...],
    limits: tuple[float, float],
    side: int,
    missing: NDArray[np.bool_] | None = None,
) -> PartWindows:
    """Return what a part adds to the estimate of a channel of shape `whole`, with samples between `limits`.

    `part` begins at `corner` of the channel; its own samples are `inner`, with up to `PART_HALO` more around them.
    """
    dimension = len(_axes(whole))
    low, span = limits[0], limits[1] - limits[0]
    scaled = (np.reshape(part, _as_rows(part.shape, whole, 1)).astype(np.float64) - low) / span
    absent = np.zeros(scaled.shape, bool) if missing is None else np.reshape(missing, scaled.shape)
    scaled = scaled if missing is None else np.where(absent, 0.0, scaled)
    begin = _as_rows(tuple(c + s.start for c, s in zip(corner, inner, strict=True)), whole, 0)
    around = _as_rows(tuple(s.start for s in inner), whole, 0)
    own = _as_rows(tuple(s.stop - s.start for s in inner), whole, 1)
    mine = tuple(slice(b, b + n) for b, n in zip(around, own, strict=True))
    filled = absent | constant_areas(scaled, dimension)
    ends = (at_ends(scaled[mine][~absent[mine]]), at_ends(scaled[mine][~filled[mine]]))
    wider = mine[0], slice(mine[1].start, mine[1].stop + 1)  # with the next sample, where there is one
    repeated = _repeated(scaled[wider], filled[wider])
    shape, rows = (side if dimension == 2 else 1, side), _as_rows(whole, whole, 1)
    steps = _steps(rows, dimension)
    cut, first = [], []
    for o, n, b, step, length, w in zip(begin, own, around, steps, shape, rows, strict=True):
        start, end = -(-o // step), min(o + n - 1, w - length) // step
        first.append(start)
        cut.append((start * step - o + b, end * step - o + b + length, max(end - start + 1, 0)))
    counts = (cut[0][2], cut[1][2])
    if 0 in counts:
        nothing = np.empty(counts)
        return PartWindows(
            (first[0], first[1]), nothing, nothing, nothing > 0, nothing > 0, np.empty((*counts, 0), np.float32), ends,
            repeated,
        )  # fmt: skip
    lattice = tuple(slice(start, stop) for start, stop, _ in cut)
    windows = _transform(scaled[lattice], np.zeros_like(filled[lattice]), shape, steps)
    return PartWindows(
        (first[0], first[1]), windows.structure.reshape(counts), windows.mean.reshape(counts),
        _touched(filled[lattice], shape, steps), _touched(absent[lattice], shape, steps),
        windows.high.reshape(*counts, -1), ends, repeated,
    )  # fmt: skip


@underflowing
def sigma_of_parts(
    parts: list[PartWindows], whole: tuple[int, ...], limits: tuple[float, float], side: int
) -> float | None:
    """Return the estimate for a channel from all its parts; None where smaller windows should be tried."""
    dimension = len(_axes(whole))
    rows = _as_rows(whole, whole, 1)
    steps = _steps(rows, dimension)
    shape = (side if dimension == 2 else 1, side)
    counts = tuple((n - length) // step + 1 for n, length, step in zip(rows, shape, steps, strict=True))
    structure, mean = np.empty(counts), np.empty(counts)
    touched, absent = np.zeros(counts, bool), np.zeros(counts, bool)
    high = np.empty((*counts, max(part.high.shape[-1] for part in parts)), np.float32)
    for part in parts:
        if part.structure.size:
            place = tuple(slice(f, f + n) for f, n in zip(part.first, part.structure.shape, strict=True))
            structure[place], mean[place], high[place] = part.structure, part.mean, part.high
            touched[place], absent[place] = part.touched, part.absent
    every, unfilled = (
        [sum(numbers) for numbers in zip(*(part.ends[k] for part in parts), strict=True)] for k in (0, 1)
    )

    def windows_of(used: Any) -> Windows:
        values = (structure.ravel()[used], high.reshape(touched.size, -1)[used], mean.ravel()[used])
        return Windows(*values, _repeats(shape, steps))

    windows = windows_of(~touched.ravel())
    few = _few(every[0] - unfilled[0], every[0])
    if not few and side == window_sides(whole)[0]:
        few = _noisy(windows, sum(part.repeated for part in parts), unfilled[0])
    windows = windows if few else windows_of(~absent.ravel())
    if side != window_sides(whole)[-1] and len(windows.structure) < windows.first / 2:
        return None
    return from_windows(windows, limits_of(*(unfilled if few else every)), OfWindows.first[dimension]) * (
        limits[1] - limits[0]
    )
