"""Impulses: samples that were replaced by a lowest or a highest value, or by any value (salt and pepper, spikes)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.denoising.noise.base import Array, Noise, Reduction
from nlflow.denoising.noise.figures import OfImpulses
from nlflow.domains.samples import as_signal, range_of
from nlflow.errors import InputError, check_number


@underflowing
@dataclass(frozen=True)
class Impulses(Noise):
    """A part of the samples is replaced, each by itself: by `low` or `high`, or by any value between them.

    Parameters
    ----------
    density : float
        Part of the samples that is replaced, 0 <= density < 1.
    low, high : float
        Values that replace, in the units of the input, low <= high; each half of the time (salt and pepper). Equal
        where all impulses have one value.
    random : bool
        Any value from low to high, all equally likely.

    Raises
    ------
    InputError
        For a density outside [0, 1), for low > high, and numbers that are not finite.

    Notes
    -----
    Of an impulse nothing is known but that it is one: `reduce` says where they are, and the other samples stay as they
    are. With `random` False an impulse is a sample of value `low` or `high`, unless the picture itself has that value
    over an area: so many of its neighbours have it that impulses alone are hardly ever so close. With `random` True it
    is a sample that sticks out of its neighbours by far; impulses near the values around them stay.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import Impulses
    >>> clean = np.linspace(50.0, 200.0, 1000)
    >>> noisy = Impulses(0.1, 0.0, 255.0).sample(clean, rng=0)
    >>> found = Impulses(0.1, 0.0, 255.0).reduce(noisy[:, None])
    >>> bool(np.array_equal(found.missing, noisy != clean))
    True
    """

    kind: ClassVar[str] = "impulses"
    undone: ClassVar[bool] = True

    density: float
    low: float
    high: float
    random: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        density = check_number("density", self.density, minimum=0, below=1, hint="the part of samples replaced")
        low, high = check_number("low", self.low), check_number("high", self.high)
        if low > high:
            raise InputError(f"low: got {low:g}, expected at most high={high:g}; swap the two")
        if not isinstance(self.random, bool | np.bool_):
            raise InputError(f"random: got {self.random!r}, expected True or False")
        for name, value in (("density", density), ("low", low), ("high", high), ("random", bool(self.random))):
            object.__setattr__(self, name, value)

    def sample(self, clean: Any, *, rng: Any = None, channel_axis: int | None = None) -> Array:
        """Return a picture with impulses; each sample, and each channel of a pixel, is replaced by itself."""
        samples, restore = as_signal(clean, channel_axis)
        generator = np.random.default_rng(rng)
        replaced = generator.random(samples.shape) < self.density
        part = generator.random(samples.shape)
        share = part if self.random else part >= 0.5
        # Convex, so that the range of low and high does not overflow, and 0 and 1 give them exactly.
        values = self.low * (1 - share) + self.high * share
        return np.asarray(restore(np.where(replaced, values, samples.astype(np.float64))))

    def describe(self) -> str:
        """Return what this noise is, in a few words for people."""
        values = f"{self.low:g}" if self.low == self.high else f"{self.low:g} and {self.high:g}"
        if self.random:
            values = f"{self.low:g} to {self.high:g}"
        return f"impulses: {100 * self.density:.3g} % of the samples replaced by {values}"

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Say where impulses are: these samples are missing, the others stay as they are.

        A pixel is missing where any channel has an impulse, and where it was before. O(N).

        Parameters
        ----------
        samples : array of shape (..., C)
            Finite, in the units of the input; one to three axes besides that of the channels.
        missing : bool array of shape (...), optional
            Samples that are missing already; their values do not matter.

        Raises
        ------
        InputError
            Where no sample is left.
        """
        absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
        found = absent.copy()
        for channel, unknown in _planes(samples, absent):
            hit = self._among(channel, unknown) & ~unknown
            found |= hit.reshape(found.shape)
        if found.all():
            raise InputError(f"image: every sample is an impulse or missing by the model ({self.describe()})")
        return Reduction(samples, missing=found if found.any() else missing)

    def scaled(self, factor: float) -> Self:
        """Refuse: impulses have no standard deviation, and a part of the samples cannot be replaced more strongly.

        Raises
        ------
        InputError
            For any factor but 1.
        """
        if check_number("factor", factor, minimum=0, strict=True) == 1:
            return self
        raise InputError(f"factor: got {factor:g} for impulses, which have no strength; give another density")

    def _among(self, plane: Array, unknown: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if self.density == 0:
            return np.zeros(plane.shape, bool)
        if self.random:
            return _sticking_out(plane, unknown)
        low, high = plane.dtype.type(self.low), plane.dtype.type(self.high)
        sides = [plane == value for value in ({low} if low == high else {low, high})]
        hits = [side & ~_in_area(side, unknown, self.density / len(sides)) for side in sides]
        return np.asarray(np.logical_or.reduce(hits))


def find_impulses(samples: Array, missing: NDArray[np.bool_] | None = None) -> Impulses | None:
    """Find salt and pepper (or one of the two) without knowing the clean picture.

    A value counts where its neighbours are far from it. Impulses are there alike in all parts of the picture, they have
    hardly any neighbours of their value, and values between them and their neighbours are rare; light spots, letters,
    textures and clipped noise fail in one of the three. The density is the median over the parts of the picture.

    Parameters
    ----------
    samples : array of shape (..., C)
        Finite; one to three axes besides that of the channels. All channels have the same two values.
    missing : bool array of shape (...), optional
        Samples that are missing; their values do not matter.

    Returns
    -------
    Impulses or None
        None where there are no impulses: some dozen are needed, and a picture that is no mere drawing of two values.

    Notes
    -----
    Cost O(N log N). Clipped noise is looked at with them: a value counts only where it is 3 standard deviations from
    what is around it.
    """
    absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
    present = samples[~absent].ravel()
    if present.size == 0 or present.min() == present.max() or math.isinf(range_of(present)):
        return None
    values = _candidates(present)
    # float64, from 0 to 1: what is found does not depend on the units then.
    low, span = float(present.min()), range_of(present)
    views = [_View.of(plane, unknown, values, low, span) for plane, unknown in _planes(samples, absent)]
    found = {value: density for value in values if (density := _density(views, _unit(value, low, span)))}
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
    def of(cls, plane: Array, unknown: NDArray[np.bool_], values: list[Any], low: float, span: float) -> _View:
        """Look at a channel; candidates are no neighbours."""
        scaled = (np.where(unknown, low, plane).astype(np.float64) - low) / span
        median, spread = _surroundings(scaled, unknown | np.isin(plane, values))
        step = 1 / span if np.array_equal(plane[~unknown], np.rint(plane[~unknown])) else 0.0
        return cls(scaled, unknown, median, spread, step)


def _planes(samples: Array, absent: NDArray[np.bool_]) -> Iterator[tuple[Array, NDArray[np.bool_]]]:
    """Yield each channel as (rows, columns), a signal as one row, a volume as it is, with where it is missing."""
    long = [n for n in samples.shape[:-1] if n > 1]
    shape = long if len(long) > 1 else [1, *(long or [1])]
    for c in range(samples.shape[-1]):
        yield samples[..., c].reshape(shape), absent.reshape(shape)


def _candidates(present: Array) -> list[Any]:
    """Return the values that impulses may have: the ends of the range, where they are rare the most common values.

    Other noise may go beyond the impulses, but then hardly any sample is at the end of the range.
    """
    values, counts = np.unique(present, return_counts=True)
    half = int(np.clip(np.searchsorted(np.cumsum(counts), present.size / 2), 1, len(values) - 1))
    found = [values[0], values[-1]]
    for part, count, end in ((values[:half], counts[:half], 0), (values[half:], counts[half:], -1)):
        if count[end] < OfImpulses.least_count:
            found.append(part[np.argmax(count)])
    return sorted(set(found))


def _axes(shape: tuple[int, ...]) -> int:
    """Return how many axes a channel has; a signal is one row."""
    return 1 if len(shape) == 2 and shape[0] == 1 else len(shape)


def _reach(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (0, OfImpulses.reach[1]) if _axes(shape) == 1 else (OfImpulses.reach[len(shape)],) * len(shape)


def _surroundings(
    plane: NDArray[np.float64], excluded: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the median and the robust standard deviation of each sample's neighbours; NaN where they are too few."""
    reach = _reach(plane.shape)
    margins = [(r, r) for r in reach]
    padded = np.pad(np.where(excluded, np.nan, plane), margins, constant_values=np.nan)
    window = tuple(2 * r + 1 for r in reach)
    median, spread = np.empty_like(plane), np.empty_like(plane)
    rows = max(1, OfImpulses.piece // math.prod(plane.shape[1:]))
    for top in range(0, plane.shape[0], rows):
        part = sliding_window_view(padded[top : top + rows + 2 * reach[0]], window)
        part = np.delete(part.reshape(*part.shape[: plane.ndim], -1), math.prod(window) // 2, axis=-1)
        ordered = np.sort(part, axis=-1)  # NaN comes last
        count = np.isfinite(ordered).sum(axis=-1)
        low, mid, high = (_ranked(ordered, count, share) for share in (0.25, 0.5, 0.75))
        few = count < OfImpulses.least_neighbours * part.shape[-1]
        median[top : top + rows] = np.where(few, np.nan, mid)
        # Few neighbours may be alike by chance.
        sure = (high - low) / 1.349 * (1 + OfImpulses.unsure / np.maximum(count, 1))
        spread[top : top + rows] = np.where(few, np.nan, np.maximum(sure, OfImpulses.least_spread))
    return median, spread


def _ranked(ordered: NDArray[np.float64], count: NDArray[np.intp], share: float) -> NDArray[np.float64]:
    """Return the quantile of the first `count` entries along the last axis."""
    at = share * np.maximum(count - 1, 0)
    low, high = (np.take_along_axis(ordered, f(at).astype(np.intp)[..., None], -1)[..., 0] for f in (np.floor, np.ceil))
    return np.asarray(low + (at - np.floor(at)) * (high - low))


def _sticking_out(plane: Array, unknown: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return where samples are far from what is around them, in two passes: impulses are no neighbours."""
    found = np.zeros(plane.shape, bool)
    present = plane[~unknown]
    if present.size == 0 or present.min() == present.max() or math.isinf(range_of(present)):
        return found
    scaled = (np.where(unknown, present.min(), plane).astype(np.float64) - float(present.min())) / range_of(present)
    for _ in range(2):
        median, spread = _surroundings(scaled, unknown | found)
        found = np.abs(scaled - median) > OfImpulses.spike * spread  # False for NaN
    return found


def _equal_neighbours(side: NDArray[np.bool_], unknown: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return how many neighbours each sample has that are present, and how many of them are marked."""
    from scipy.ndimage import convolve

    window = np.ones([2 * r + 1 for r in _reach(side.shape)])
    window[tuple(n // 2 for n in window.shape)] = 0
    present, equal = (convolve(a.astype(np.float64), window, mode="constant") for a in (~unknown, side & ~unknown))
    return np.rint(present), np.rint(equal)


def _in_area(side: NDArray[np.bool_], unknown: NDArray[np.bool_], density: float) -> NDArray[np.bool_]:
    """Return where so many neighbours are marked as well that they are not strewn with this density."""
    from scipy.stats import binom

    present, equal = _equal_neighbours(side, unknown)
    return np.asarray(
        side & ((binom.sf(equal - 1, present, density) < OfImpulses.area) | _in_piece(side & ~unknown, density))
    )


def _in_piece(side: NDArray[np.bool_], density: float) -> NDArray[np.bool_]:
    """Return where marked samples hang together in a piece that is larger than impulses make.

    Of N samples about N (c p)^s begin a piece of s that were strewn with a density p, with c ways to go on from a
    sample. (A border or a thin line has few neighbours of its value, but is one piece.)
    """
    from scipy.ndimage import label

    on = density * OfImpulses.ways[_axes(side.shape)]
    if on >= 1:
        return np.zeros_like(side)
    most = max(math.log(side.size) / -math.log(on), OfImpulses.least_piece)
    pieces, _ = label(side, np.ones((3,) * side.ndim))
    large = np.bincount(pieces.ravel()) > most
    large[0] = False
    return np.asarray(large[pieces])


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
    return _even(visible, hits, count)


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


def _between(view: _View, visible: NDArray[np.bool_], value: float) -> NDArray[np.bool_]:
    """Return where a sample sticks out nearly as far as a value, and has another one."""
    off = np.abs(view.plane - value)
    return np.asarray(visible & (off > 0) & (off < np.abs(view.median - value) / 3))


def _clustered(views: list[_View], hits: list[NDArray[np.bool_]], value: float, density: float) -> bool:
    """Tell whether samples of a value have more neighbours of their value than samples that are strewn."""
    present = equal = 0.0
    for view, hit in zip(views, hits, strict=True):
        around, alike = _equal_neighbours(view.plane == value, view.unknown)
        present, equal = present + around[hit].sum(), equal + alike[hit].sum()
    return bool(equal > OfImpulses.clustered * density * present + 3 * math.sqrt(density * present))


def _even(visible: list[NDArray[np.bool_]], hits: list[NDArray[np.bool_]], count: int) -> float:
    """Return the median density over the parts of a picture, 0 where many parts have too few."""
    shape = visible[0].shape
    blocks = int(np.clip(round((count / OfImpulses.per_block) ** (1 / len(shape)), 9), 2, OfImpulses.blocks))
    cuts = (1, blocks**2) if _axes(shape) == 1 else (blocks,) * len(shape)
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
