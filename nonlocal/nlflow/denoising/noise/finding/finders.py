"""Finders of noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import (
    TO_SIGMA,
    OfHot,
    OfImpulses,
    OfLooks,
    OfMagnitudes,
    OfSharpness,
    OfSpectra,
    OfStripes,
    OfTransfer,
    OfVerdict,
)
from nlflow.denoising.noise.finding.sigma import estimate_sigmas
from nlflow.denoising.noise.finding.speckle import windows_of
from nlflow.denoising.noise.models.base import Array, check_samples
from nlflow.denoising.noise.models.magnitudes import Rician, mean_magnitude, stabilizer
from nlflow.denoising.noise.models.outliers import (
    HotPixels,
    Impulses,
    channels_of,
    count_axes,
    equal_neighbours,
    outliers_of,
    surroundings,
)
from nlflow.denoising.noise.models.sharpness import Outliers, share_near
from nlflow.denoising.noise.models.stripes import Stripes, differences, lines
from nlflow.domains.samples import range_of


def find_impulses(samples: Array, missing: NDArray[np.bool_] | None = None) -> Impulses | None:
    """Find salt and pepper, or one of the two, without knowing the clean picture.

    Parameters
    ----------
    samples : array of shape (..., C)
        Finite; one to three axes besides that of the channels.
    missing : bool array of shape (...), optional
        Samples that are missing; their values do not matter.

    Returns
    -------
    Impulses or None
        Of one or two values, the same in all channels. None where there are none; fewer than twelve samples of a value,
        and values in areas or on slopes, do not count.

    Raises
    ------
    InputError
        For other shapes and types.

    Notes
    -----
    O(N).
    """
    check_samples(samples, missing)
    absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
    present = (samples if missing is None else samples[~missing]).ravel()
    if present.size == 0 or present.min() == present.max() or math.isinf(range_of(present)):
        return None
    # What most samples have is the ground of a picture, such as paper, and a neighbour like any other.
    values = [value for value in _candidates(present) if 2 * np.count_nonzero(present == value) < present.size]
    # float64, from 0 to 1: what is found does not depend on the units then.
    low, span = float(present.min()), range_of(present)
    hinted = _hinted(samples, absent, values, low, span)
    if not hinted:
        return None
    views = [_View.of(plane, unknown, values, low, span) for plane, unknown in channels_of(samples, absent)]
    found = {value: density for value in hinted if (density := _density(views, _unit(value, low, span)))}
    if not found:
        return None
    middle = float(np.median(present))
    sides = [[v for v in found if v < middle], [v for v in found if v >= middle]]
    best = {max(side, key=lambda v: found[v]): found[max(side, key=lambda v: found[v])] for side in sides if side}
    if len(best) == 1:
        ((value, density),) = best.items()
        other = values[-1] if value < middle else values[0]
        if _follows(views, _unit(other, low, span), density):
            best[other] = density
    return Impulses(min(sum(best.values()), OfImpulses.most), float(min(best)), float(max(best)))


def _unit(value: Any, low: float, span: float) -> float:
    return (float(value) - low) / span


@dataclass(frozen=True)
class _View:
    """One channel in units of its range, and what is around each sample."""

    plane: NDArray[np.float64]
    unknown: NDArray[np.bool_]
    median: NDArray[np.float64]
    spread: NDArray[np.float64]
    step: float  # of integers; of other samples 0

    @classmethod
    def of(
        cls, plane: Array, unknown: NDArray[np.bool_], values: list[Any], low: float, span: float,
        places: NDArray[np.intp] | None = None,
    ) -> _View:  # fmt: skip
        """Look at a channel, or at places (n, axes) of it; candidates are no neighbours."""
        scaled = (np.where(unknown, low, plane).astype(np.float64) - low) / span
        median, spread = surroundings(scaled, unknown | np.isin(plane, values), places)
        step = 1 / span if np.array_equal(plane[~unknown], np.rint(plane[~unknown])) else 0.0
        at = ... if places is None else tuple(places.T)
        return cls(scaled[at], unknown[at], median, spread, step)


def _candidates(present: Array) -> list[Any]:
    """Return the values that impulses may have: the ends of the range, where they are rare the most common values.

    Other noise may go beyond the impulses, but then hardly any sample is at the end of the range.
    """
    found, middle = [present.min(), present.max()], np.median(present[:: max(1, present.size // OfImpulses.looked)])
    values, counts = np.unique(present[:: max(1, present.size // OfImpulses.looked)], return_counts=True)
    for end, side in ((found[0], values < middle), (found[1], values >= middle)):
        if side.any() and np.count_nonzero(present == end) < OfImpulses.least_count:
            found.append(values[side][np.argmax(counts[side])])
    return sorted(set(found))


def _hinted(samples: Array, absent: NDArray[np.bool_], values: list[Any], low: float, span: float) -> list[Any]:
    """Return the values that few samples do not rule out: some of them stick out of their neighbours.

    And not far too many others do so nearly as much, but for chance.
    """
    count, between = np.zeros(len(values)), np.zeros(len(values))
    every = max(2 * samples.size // OfImpulses.looked, 1) | 1
    for plane, unknown in channels_of(samples, absent):
        held = [np.flatnonzero((plane == value) & ~unknown) for value in values]
        few = [own[:: max(1, len(own) // OfImpulses.few)] for own in held]
        index = np.unravel_index(np.concatenate([*few, np.arange(0, plane.size, every)]), plane.shape)
        view = _View.of(plane, unknown, values, low, span, np.stack(index, axis=1))
        last = np.cumsum([len(own) for own in few])
        for k, unit in enumerate(_unit(value, low, span) for value in values):
            (visible,), (hits,) = _counted([view], unit)
            if len(few[k]):
                met = np.count_nonzero(hits[last[k] - len(few[k]) : last[k]])
                count[k] += len(held[k]) / len(few[k]) * (met + 2 * math.sqrt(met + 1) * (len(few[k]) < len(held[k])))
            between[k] += np.count_nonzero(_between(view, visible, unit)[last[-1] :])
    least = np.maximum(OfImpulses.least_count, OfImpulses.atom * every * (between - 2 * np.sqrt(between)))
    return [value for value, near in zip(values, count >= least, strict=True) if near]


def _density(views: list[_View], value: float) -> float:
    """Return the density of impulses of one value, 0 where its samples are no impulses."""
    visible, hits = _counted(views, value)
    count, seen = sum(map(np.count_nonzero, hits)), sum(map(np.count_nonzero, visible))
    size = sum(view.plane.size for view in views)
    if count < OfImpulses.least_count or seen < OfImpulses.least_visible * size:
        return 0.0
    between = sum(np.count_nonzero(_between(view, at, value)) for view, at in zip(views, visible, strict=True))
    if count < OfImpulses.atom * between or _clustered(views, hits, value, count / seen):
        return 0.0
    if count / seen < OfImpulses.most_drawn and any(map(_on_lattice, hits)):
        return 0.0
    return _even(visible, hits, count)


def _between(view: _View, visible: NDArray[np.bool_], value: float) -> NDArray[np.bool_]:
    """Return where a sample sticks out nearly as far as a value, and has another one."""
    off = np.abs(view.plane - value)
    return np.asarray(visible & (off > 0) & (off < np.abs(view.median - value) / 3))


def _follows(views: list[_View], value: float, density: float) -> bool:
    """Tell whether a value is about as frequent, where it sticks out, as impulses of the other value are."""
    visible, hits = _counted(views, value)
    expected = density * sum(map(np.count_nonzero, visible))
    return bool(expected >= OfImpulses.least_count and 0.5 <= sum(map(np.count_nonzero, hits)) / expected <= 2)


def _counted(views: list[_View], value: float) -> tuple[list[NDArray[np.bool_]], list[NDArray[np.bool_]]]:
    """Return where a value would stick out of its neighbours, and where it does."""
    visible = []
    for view in views:
        least = np.maximum(OfImpulses.out * view.spread, max(OfImpulses.least_step, OfImpulses.steps * view.step))
        visible.append(np.asarray((np.abs(value - view.median) > least) & ~view.unknown))  # not for NaN
    return visible, [seen & (view.plane == value) for view, seen in zip(views, visible, strict=True)]


def _clustered(views: list[_View], hits: list[NDArray[np.bool_]], value: float, density: float) -> bool:
    """Tell whether samples of a value have more neighbours of their value than samples that are strewn."""
    present = equal = 0.0
    for view, hit in zip(views, hits, strict=True):
        around, alike = equal_neighbours(view.plane == value, view.unknown)
        present, equal = present + around[hit].sum(), equal + alike[hit].sum()
    odds = OfImpulses.clustered * density
    return bool(equal > odds / (1 - density + odds) * present + 3 * math.sqrt(density * present))


def _on_lattice(hit: NDArray[np.bool_]) -> bool:
    """Tell whether samples of a picture or recording keep away from each other, as dots that are drawn do."""
    places = np.argwhere(hit)
    many = hit.ndim == 2 and len(places) >= OfSharpness.lattice
    return many and share_near(places, hit.shape, hit.size) < 0.5 - OfSharpness.by_chance


def _even(visible: list[NDArray[np.bool_]], hits: list[NDArray[np.bool_]], count: int) -> float:
    """Return the median density over the parts of a picture, 0 where many parts have too few."""
    shape = visible[0].shape
    blocks = int(np.clip(round((count / OfImpulses.per_block) ** (1 / len(shape)), 9), 2, OfImpulses.blocks))
    cuts = (1, blocks**2) if count_axes(shape) == 1 else (blocks,) * len(shape)
    parts = np.ix_(*(np.arange(n) * cut // n for n, cut in zip(shape, cuts, strict=True)))
    index = np.asarray(np.ravel_multi_index(parts, cuts))
    seen, met = (
        np.sum([np.bincount(index[a], minlength=math.prod(cuts)) for a in arrays], axis=0) for arrays in (visible, hits)
    )
    mean = met.sum() / seen.sum()
    telling = seen * mean >= OfImpulses.per_block / 2
    if np.count_nonzero(telling) < math.prod(cuts) / 4:
        return 0.0
    densities = met[telling] / seen[telling]
    return (
        float(np.median(densities)) if np.mean(densities >= OfImpulses.even * mean) >= OfImpulses.most_blocks else 0.0
    )


def find_hot_pixels(samples: Array, missing: NDArray[np.bool_] | None = None) -> HotPixels | None:
    """Find samples that are sharper than optics allow: hot and dead pixels, tracks of cosmic rays.

    In a clip or volume those that are the same in all frames are looked for first, then single samples. They count only
    if they are strewn over the picture.

    Parameters
    ----------
    samples : array of shape (D, H, W, C) or (H, W, C)
        Finite.
    missing : bool array of shape (D, H, W) or (H, W), optional
        Samples that are missing; their values do not matter.

    Returns
    -------
    HotPixels or None

    Raises
    ------
    InputError
        For other shapes and types.
    """
    check_samples(samples, missing)
    absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
    if samples.ndim < 3 or (samples.ndim == 3 and not _suspected(samples, absent)):
        return None
    for fixed in (True, False):
        if fixed and (samples.ndim == 3 or len(samples) < OfHot.least_frames):
            continue
        each = [outliers_of(samples[..., c], absent, fixed) for c in range(samples.shape[-1])]
        density = float(np.any([one.mask for one in each], axis=0).mean())
        if any(one.believed for one in each) and OfHot.least_share < density < OfHot.most_share:
            above = np.concatenate([one.above[one.found] for one in each])
            return HotPixels(density, max(float(above.mean()), 0.0), fixed)
    return None


def _suspected(samples: Array, absent: NDArray[np.bool_]) -> bool:
    """Tell whether a small image has outliers, or bands of rows of a large one."""
    count = max(OfLooks.most // (OfLooks.band * samples[0].size), 3)
    if len(samples) <= count * OfLooks.band:
        return True
    tops = np.arange(count) * (len(samples) - OfLooks.band) // (count - 1)
    index = (tops[:, None] + np.arange(OfLooks.band)).ravel()
    return any(Outliers.of(plane[index], absent[index], OfLooks.band).believed for plane in np.moveaxis(samples, -1, 0))


def find_stripes(samples: Array, missing: NDArray[np.bool_] | None = None) -> Stripes | None:
    """Find rows or columns with random offsets without knowing the clean picture.

    Parameters
    ----------
    samples : array of shape (..., C)
        Finite.
    missing : bool array of shape (...), optional
        Samples that are missing; their values do not matter.

    Returns
    -------
    Stripes or None
        Of rows or of columns, whichever are stronger; None where there are none, in signals and volumes, and in images
        of fewer than 24 rows or columns.

    Raises
    ------
    InputError
        For other shapes and types.

    Notes
    -----
    O(N).
    """
    check_samples(samples, missing)
    if samples.ndim != 3:
        return None
    present = samples if missing is None else samples[~missing]
    low = float(present.min()) if present.size else 0.0
    span = float(present.max()) - low if present.size else 0.0
    if span == 0 or math.isinf(span):
        return None
    found = []
    for axis in (0, 1):
        if samples.shape[axis] < OfStripes.least_rows or samples.shape[1 - axis] < OfStripes.least_rows:
            continue
        marks: list[_Marks] = []
        some = slice(None, None, math.ceil(samples[..., 0].size / OfVerdict.most))
        seen = (slice(None), some) if axis == 0 else (some, slice(None))
        for rows in lines(samples[seen], None if missing is None else missing[seen], Stripes(1, axis, False)):
            # From 0 to 1: what is found does not depend on the units then.
            marks.append(_Marks.of(((rows - low) / span).astype(np.float32)))
            if not marks[-1].striped:
                break
        else:
            sigma = span * float(np.mean([mark.sigma for mark in marks]))
            found.append((sigma, axis, _alike([mark.steps for mark in marks])))
    return Stripes(*max(found)) if found else None


def are_drawn(samples: Array, rest: Array, missing: NDArray[np.bool_] | None, axis: int) -> bool:
    """Tell whether offsets of lines, without which samples (H, W, C) are `rest`, are those of a drawing."""
    hidden = np.zeros(samples.shape, bool) if missing is None else np.broadcast_to(missing[..., None], samples.shape)
    picture = np.ma.array(rest, mask=hidden, dtype=np.float64)
    offsets = np.ma.array(samples, mask=hidden, dtype=np.float64) - picture
    beneath = picture - picture.mean(axis=0) - picture.mean(axis=1)[:, None] + picture.mean(axis=(0, 1))
    each = offsets.mean(axis=(1 - axis, 2)).compressed()
    each = (each - each.mean()) / each.std()
    kurtosis = (float((each**4).mean()) - 3) / math.sqrt(24 / len(each))  # in standard errors
    return bool(beneath.std() < OfStripes.beneath * offsets.std() or kurtosis < -OfStripes.bounded)


@dataclass(frozen=True)
class _Marks:
    steps: Array
    sigma: float
    striped: bool

    @classmethod
    def of(cls, rows: Array) -> _Marks:
        """Look at one channel (rows, samples of a row) of range 1."""
        (steps,), _ = differences(rows, 1e-3, 1)
        sizes = np.quantile(np.abs(steps), (0.25, 0.5, 0.75, 0.9))
        spread = float(sizes[1]) * TO_SIGMA
        if spread <= 1e-9:
            return cls(steps, 0.0, False)
        bounded = np.where(np.abs(steps) < 4 * spread, steps, 0)  # larger ones are edges
        correlations = [float(np.mean(bounded[k:] * bounded[:-k]) / np.mean(bounded**2)) for k in (1, 2, 3)]
        white = correlations[0] < OfStripes.opposite and max(map(abs, correlations[1:])) < OfStripes.unrelated
        gaussian = sizes[0] > OfStripes.least_ratio * sizes[2] and sizes[3] < OfStripes.most_ratio * sizes[1]
        if not (white and gaussian):
            return cls(steps, 0.0, False)
        parts = [differences(part, 1e-3, 1)[0][0] for part in np.array_split(rows, OfStripes.parts, axis=1)]
        middle = np.median(parts, axis=0)
        apart = TO_SIGMA * np.median(np.abs(parts - middle), axis=0)
        agreed = max(OfStripes.agreed, OfStripes.alone + OfStripes.by_chance / math.sqrt(len(rows)))
        agree = np.median(np.abs(middle)) > agreed * np.median(apart)
        error = np.pi / 2 * float(np.median(apart)) ** 2 / OfStripes.parts  # of a median of the parts
        sigma = math.sqrt(max(spread**2 - error, 0.0) / 2)
        return cls(steps, sigma, bool(agree and sigma > 0))


def _alike(steps: list[NDArray[np.float64]]) -> bool:
    if len(steps) == 1:
        return True
    related = np.asarray(np.corrcoef(np.stack([np.clip(s, *np.quantile(s, (0.05, 0.95))) for s in steps])))
    return bool(related[np.triu_indices(len(steps), 1)].min() > OfStripes.same)


def find_rician(samples: Array, missing: NDArray[np.bool_] | None = None) -> Rician | None:
    """Find Rician noise, and its strength, by a background in which magnitudes have Rayleigh's law.

    Parameters
    ----------
    samples : array of shape (..., C)
        Finite; one to three axes besides that of the channels.
    missing : bool array of shape (...), optional
        Samples that are missing; their values do not matter.

    Returns
    -------
    Rician or None
        None where a sample is negative, and where no background with that law is seen.

    Raises
    ------
    InputError
        For other shapes and types.
    """
    check_samples(samples, missing)
    from scipy.special import ndtr

    absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
    present = samples if missing is None else samples[~missing]
    if present.size == 0 or present.min() < 0 or present.min() == present.max() or not _dark_as_noise(samples, absent):
        return None
    seen = _Magnitudes.of(samples, absent, 1.0)
    found = None if seen is None else seen.background()
    if seen is None or found is None:
        return None
    sigma, inside = found
    background = np.sort(seen.values[inside].ravel().astype(np.float64) / sigma)
    mean, spread = _of_nothing(1.0)
    laws = -np.expm1(-np.square(background) / 2), ndtr((background - mean) / spread)
    # Both sides of a step: values that are whole numbers of something come in high steps.
    steps = [np.searchsorted(background, background, side) / len(background) for side in ("left", "right")]
    apart, from_gaussian = (max(float(np.abs(law - step).max()) for step in steps) for law in laws)
    return Rician(sigma) if apart < OfMagnitudes.law * from_gaussian else None


def strength_of(samples: Array, absent: NDArray[np.bool_], coils: float) -> float | None:
    """Return the strength of the noise in magnitudes (..., C) >= 0, None where no noise is seen."""
    seen = _Magnitudes.of(samples, absent, coils)
    found = None if seen is None else seen.background()
    return None if seen is None else found[0] if found is not None else seen.fixed_point()


def _dark_as_noise(samples: Array, absent: NDArray[np.bool_]) -> bool:
    """Tell whether mean and spread of the darkest windows are in the ratio of Rayleigh's law: a first look."""
    windows = windows_of(samples, absent, (-math.inf, 0.0))
    if not len(windows):
        return True
    level = windows.mean(axis=(1, 2))
    darkest = windows[np.argsort(level)[: max(int(OfTransfer.darkest * len(level)), 1)]]
    mean, spread = _of_nothing(1.0)
    return (
        abs(float(np.median(darkest.std(axis=(1, 2)) / darkest.mean(axis=(1, 2)))) * mean / spread - 1)
        < OfMagnitudes.first
    )


def _of_nothing(coils: float) -> tuple[float, float]:
    """Return mean and standard deviation of pure noise of strength 1."""
    mean = float(mean_magnitude(0.0, coils))
    return mean, math.sqrt(2 * coils - mean**2)


@dataclass(frozen=True)
class _Magnitudes:
    """Magnitudes (..., C) without what was cut out, and a first guess of how strong their noise seems to be."""

    values: Array
    absent: NDArray[np.bool_]
    near: NDArray[np.float64]  # local means
    first: float
    coils: float

    @classmethod
    def of(cls, samples: Array, absent: NDArray[np.bool_], coils: float) -> _Magnitudes | None:
        absent = absent | _cut_out(samples, absent)
        values = np.where(absent[..., None], samples.dtype.type(0), samples)
        first = float(np.mean(estimate_sigmas(values, absent)))
        if not 1 / OfSpectra.largest < first < OfSpectra.largest:
            return None
        return cls(values, absent, _local_mean(values, absent), first, coils)

    def background(self) -> tuple[float, NDArray[np.bool_]] | None:
        """Return the strength where there is a background of nothing but noise, and where that is."""
        mean, spread = _of_nothing(self.coils)
        sigma = self.first / spread
        for _ in range(OfMagnitudes.rounds):
            inside = ~self.absent & (np.abs(self.near / (mean * sigma) - 1) < OfMagnitudes.alike)
            if np.count_nonzero(inside) < OfMagnitudes.few * inside.size:
                return None
            before, sigma = sigma, float(np.median(self.near[inside])) / mean
            if abs(sigma / before - 1) < OfMagnitudes.agreed:
                break
        noise = float(np.mean(estimate_sigmas(self.values, ~inside)))
        return (sigma, inside) if abs(noise / (spread * sigma) - 1) < OfMagnitudes.same_ratio else None

    def fixed_point(self) -> float:
        """Return the strength that stabilized samples have again, by secants between logarithms."""
        mean, spread = _of_nothing(self.coils)
        absent = self.absent | (self.near < OfMagnitudes.above * (mean / spread) * self.first)
        if np.count_nonzero(~absent) <= OfMagnitudes.few * absent.size:
            absent = self.absent
        law = stabilizer(self.coils)

        def excess(log_sigma: float) -> float:
            # In units of the strength that is tried, in which the noise should have strength 1.
            noise = float(np.mean(estimate_sigmas(law(self.values / math.exp(log_sigma)), absent)))
            return math.log(max(noise, 1 / OfSpectra.largest))

        before, here = math.log(self.first), math.log(1.05 * self.first)
        last, rest = excess(before), excess(here)
        for _ in range(OfMagnitudes.rounds):
            slope = (rest - last) / (here - before) if here != before else -1.0
            slope = min(max(slope, -2.0), -0.2)
            here, before, last = here - min(max(rest / slope, -0.3), 0.3), here, rest
            if abs(here - before) < OfMagnitudes.agreed:
                break
            rest = excess(here)
        return math.exp(here)


def _local_mean(values: Array, absent: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the mean over the neighbourhood and the channels, of what is not absent; infinity where all is."""
    from scipy.ndimage import uniform_filter

    size = [OfMagnitudes.local[max(sum(n > 1 for n in absent.shape), 1)] if n > 1 else 1 for n in absent.shape]
    total = uniform_filter(np.where(absent, 0.0, values.mean(axis=-1, dtype=np.float64)), size)
    share = uniform_filter((~absent).astype(np.float64), size)
    return np.asarray(np.where(share > 0.5 / math.prod(size), total / np.maximum(share, 1e-12), np.inf))


def _cut_out(samples: Array, absent: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return where areas are 0, as surroundings that somebody took away: noise has no such areas."""
    from scipy.ndimage import maximum_filter

    size = [3 if n > 1 else 1 for n in absent.shape]
    nothing = maximum_filter(np.where(absent, 0, samples.max(axis=-1)), size) == 0
    return np.asarray(maximum_filter(nothing, size))
