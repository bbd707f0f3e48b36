"""Impulses and hot pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.denoising.noise.figures import QUARTILES, OfHot, OfImpulses
from nlflow.denoising.noise.models.base import Array, Strewn
from nlflow.denoising.noise.models.sharpness import Outliers
from nlflow.domains.samples import range_of
from nlflow.errors import InputError, check_number


@underflowing
@dataclass(frozen=True)
class Impulses(Strewn):
    """Single samples are replaced by `low` or `high`, or by any value between them.

    Parameters
    ----------
    density : float, optional
        Part of the samples that is replaced, 0 <= density < 1; where it is not given, all is found from the samples.
    low, high : float, optional
        Values that replace, in the units of the input, low <= high, each equally often (salt and pepper).
    random : bool
        Whether any value from low to high replaces, all equally likely.

    Raises
    ------
    InputError
        For a density outside [0, 1), and beside a density for low > high, and for a `low` or `high` that is missing or
        not finite.

    Notes
    -----
    `reduce` marks samples of value `low` or `high` as missing, unless the picture itself has that value over an area.
    With `random` it marks samples that are far from their neighbours; impulses near the values around them stay.

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

    low: float = field(default=math.nan, metadata={"minimum": -math.inf})
    high: float = field(default=math.nan, metadata={"minimum": -math.inf})
    random: bool = False

    def __post_init__(self) -> None:
        if self.density is None:
            for name in ("low", "high", "random"):
                if getattr(self, name) is not type(self).__dataclass_fields__[name].default:
                    raise InputError(f"{name}: got {getattr(self, name)!r} without a density, where all is found; give "
                                     "density too, or leave it out")  # fmt: skip
            return
        bounds = type(self).__dataclass_fields__["density"].metadata
        check_number("density", self.density, **bounds)
        for name in ("low", "high"):
            if getattr(self, name) is math.nan:
                raise InputError(f"{name}: got none beside density={self.density!r}, expected the value that replaces "
                                 "samples, such as 255; give both, or leave density out: all is found")  # fmt: skip
        super().__post_init__()
        if self.low > self.high:
            raise InputError(f"low: got {self.low:g}, expected at most high={self.high:g}; swap the two")

    def _noisy(self, samples: Array, rng: np.random.Generator) -> Array:
        replaced = rng.random(samples.shape) < self._known("density")
        part = rng.random(samples.shape)
        share = part if self.random else part >= 0.5
        # Convex, so that the range of low and high does not overflow, and 0 and 1 give them exactly.
        return np.where(replaced, self.low * (1 - share) + self.high * share, samples)

    def describe(self) -> str:
        if self.density is None:
            return "impulses, to be found"
        values = f"{self.low:g}" if self.low == self.high else f"{self.low:g} and {self.high:g}"
        if self.random:
            values = f"{self.low:g} to {self.high:g}"
        return f"impulses: {100 * self.density:.3g} % of the samples replaced by {values}"

    def _found(self, samples: Array, missing: NDArray[np.bool_] | None) -> Impulses:
        """Return impulses of two values, or what sticks out of its neighbours by far."""
        from nlflow.denoising.noise.finding.finders import find_impulses

        found = find_impulses(samples, missing)
        if found is not None:
            return found
        hits = Impulses(0.5, 0.0, 0.0, random=True).hits(samples, missing)
        values = samples[hits] if hits.any() else np.zeros(1)
        return Impulses(float(hits.mean()), float(values.min()), float(values.max()), random=True)

    def _hits(self, plane: Array, absent: NDArray[np.bool_]) -> NDArray[np.bool_]:
        values, unknown = next(channels_of(plane[..., None], absent))
        if self.random:
            return _sticking_out(values, unknown).reshape(plane.shape)
        kind = plane.dtype.type if plane.dtype.kind == "f" else float  # an integer type may not hold the value
        sides = [values == kind(value) for value in {self.low, self.high}]
        hits = [side & ~_in_area(side, unknown, self._known("density") / len(sides)) for side in sides]
        return np.asarray(np.logical_or.reduce(hits) & ~unknown).reshape(plane.shape)


def channels_of(samples: Array, absent: NDArray[np.bool_]) -> Iterator[tuple[Array, NDArray[np.bool_]]]:
    """Yield each channel as (rows, columns), a signal as one row, a volume as it is, with where it is missing."""
    long = [n for n in samples.shape[:-1] if n > 1]
    shape = long if len(long) > 1 else [1, *(long or [1])]
    for c in range(samples.shape[-1]):
        yield samples[..., c].reshape(shape), absent.reshape(shape)


def count_axes(shape: tuple[int, ...]) -> int:
    """Return how many axes a channel has; a signal is one row."""
    return 1 if len(shape) == 2 and shape[0] == 1 else len(shape)


def _reach(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (0, OfImpulses.reach[1]) if count_axes(shape) == 1 else (OfImpulses.reach[len(shape)],) * len(shape)


def surroundings(
    plane: NDArray[np.float64], excluded: NDArray[np.bool_], places: NDArray[np.intp] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return median and robust spread of the neighbours of samples, or of those at places (n, axes)."""
    reach = _reach(plane.shape)
    margins = [(r, r) for r in reach]
    padded = np.pad(np.where(excluded, np.nan, plane), margins, constant_values=np.nan)
    window = tuple(2 * r + 1 for r in reach)
    if places is not None:
        return _of_windows(sliding_window_view(padded, window)[tuple(places.T)], 1)
    median, spread = np.empty_like(plane), np.empty_like(plane)
    rows = max(1, OfImpulses.piece // math.prod(plane.shape[1:]))
    for top in range(0, plane.shape[0], rows):
        part = sliding_window_view(padded[top : top + rows + 2 * reach[0]], window)
        median[top : top + rows], spread[top : top + rows] = _of_windows(part, plane.ndim)
    return median, spread


def _of_windows(part: NDArray[np.float64], axes: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return median and robust standard deviation of windows, of which the first axes count, without their middle."""
    flat = part.reshape(*part.shape[:axes], -1)
    flat = np.delete(flat, flat.shape[-1] // 2, axis=-1)
    ordered = np.sort(flat, axis=-1)  # NaN comes last
    count = np.isfinite(ordered).sum(axis=-1)
    low, mid, high = (_ranked(ordered, count, share) for share in (0.25, 0.5, 0.75))
    few = count < OfImpulses.least_neighbours * flat.shape[-1]
    # Few neighbours may be alike by chance.
    sure = (high - low) / QUARTILES * (1 + OfImpulses.unsure / np.maximum(count, 1))
    return np.where(few, np.nan, mid), np.where(few, np.nan, np.maximum(sure, OfImpulses.least_spread))


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
        median, spread = surroundings(scaled, unknown | found)
        found = np.abs(scaled - median) > OfImpulses.spike * spread  # False for NaN
    return found


def equal_neighbours(side: NDArray[np.bool_], unknown: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
    from scipy.ndimage import convolve

    window = np.ones([2 * r + 1 for r in _reach(side.shape)])
    window[tuple(n // 2 for n in window.shape)] = 0
    present, equal = (convolve(a.astype(np.float64), window, mode="constant") for a in (~unknown, side & ~unknown))
    return np.rint(present), np.rint(equal)


def _in_area(side: NDArray[np.bool_], unknown: NDArray[np.bool_], density: float) -> NDArray[np.bool_]:
    """Return where so many neighbours are marked as well that they are not strewn with this density."""
    from scipy.stats import binom

    present, equal = equal_neighbours(side, unknown)
    return np.asarray(
        side & ((binom.sf(equal - 1, present, density) < OfImpulses.area) | _in_piece(side & ~unknown, density))
    )


def _in_piece(side: NDArray[np.bool_], density: float) -> NDArray[np.bool_]:
    """Return where marked samples hang together in a piece that is larger than impulses make.

    Of N samples about N (c p)^s begin a piece of s that were strewn with a density p, with c ways to go on from a
    sample. (A border or a thin line has few neighbours of its value, but is one piece.)
    """
    from scipy.ndimage import label

    on = density * OfImpulses.ways[count_axes(side.shape)]
    if on >= 1:
        return np.zeros_like(side)
    most = max(math.log(side.size) / -math.log(on), OfImpulses.least_piece)
    pieces, _ = label(side, np.ones((3,) * side.ndim))
    large = np.bincount(pieces.ravel()) > most
    large[0] = False
    return np.asarray(large[pieces])


@underflowing
@dataclass(frozen=True)
class HotPixels(Strewn):
    """Single samples far brighter or darker than what is around them: broken pixels, cosmic rays.

    Parameters
    ----------
    density : float, optional
        Part of the pixels that is hot, 0 <= density < 1; found with `level` and `fixed` where it is not given.
    level : float
        Mean of what hot pixels add in `sample`, in the units of the input, >= 0; `reduce` ignores it.
    fixed : bool
        Whether the same pixels are hot in all frames or slices, which lie along the first axis; there must be at least
        4. Give False for images and signals.

    Raises
    ------
    InputError
        For a density outside [0, 1), a negative level, and numbers that are not finite.

    Notes
    -----
    `reduce` marks as missing points and short tracks that are sharper than optics allow: in each frame, or with `fixed`
    in the median over the frames; in a signal, `Spikes`. Hot pixels that are no brighter than noise may be stay.

    References
    ----------
    van Dokkum 2001 (doi 10.1086/323894).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import HotPixels
    >>> clip = np.random.default_rng(0).normal(100, 5, (10, 64, 64))
    >>> noise = HotPixels(0.002, level=500.0)
    >>> noisy = noise.sample(clip, rng=1)
    >>> found = noise.reduce(noisy[..., None])
    >>> bool(np.array_equal(found.missing, noisy != clip))
    True
    """

    kind: ClassVar[str] = "hot-pixels"

    level: float = field(default=0.0, metadata={"minimum": 0, "hint": "the mean of what hot pixels add"})
    fixed: bool = True

    def _noisy(self, samples: Array, rng: np.random.Generator) -> Array:
        """Make pixels hot, each in one channel: they add an exponential variable of mean `level`."""
        shape = (1, *samples.shape[1:]) if self.fixed else samples.shape
        hot = rng.random(shape) < self._known("density")
        return np.asarray(samples + np.where(hot, rng.exponential(self.level, shape), 0.0))

    def describe(self) -> str:
        if self.density is None:
            return "hot pixels, to be found"
        where = "pixels, the same in all frames" if self.fixed else "samples"
        return f"hot pixels: {100 * self.density:.3g} % of the {where}"

    def _found(self, samples: Array, missing: NDArray[np.bool_] | None) -> HotPixels:
        """Return hot pixels of all frames, where there are such, or single ones."""
        from nlflow.denoising.noise.finding.finders import find_hot_pixels

        found = find_hot_pixels(samples, missing)
        if found is not None:
            return found
        return HotPixels(float(HotPixels(0.5, fixed=False).hits(samples, missing).any(axis=-1).mean()), fixed=False)

    def _hits(self, plane: Array, absent: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if plane.ndim == 1:
            from nlflow.denoising.noise.models.spikes import spikes_in

            return spikes_in(plane.astype(np.float64)[:, None], ~absent)[0][:, 0]
        mask = outliers_of(plane, absent, self.fixed).mask
        return np.broadcast_to(mask if self.fixed else mask.reshape(plane.shape), plane.shape) & ~absent

    def _check(self, samples: Array, name: str = "image") -> None:
        if self.fixed and (samples.ndim != 4 or len(samples) < OfHot.least_frames):
            raise InputError(
                f"{name}: got shape {samples.shape[:-1]} with hot pixels that are the same in all frames, expected a "
                f"clip or stack of at least {OfHot.least_frames} frames; for single ones "
                "HotPixels(density, fixed=False)"
            )


def outliers_of(values: Array, absent: NDArray[np.bool_], fixed: bool) -> Outliers:
    """Return what is sharper than optics allow in a channel (..., H, W): in each frame, or in their median."""
    if values.ndim == 2:
        return Outliers.of(values, absent)
    if not fixed:
        wide = values.shape[-1]
        return Outliers.of(values.reshape(-1, wide), absent.reshape(-1, wide), values.shape[-2])
    known = np.count_nonzero(~absent, axis=0)
    ordered = np.sort(np.where(absent, np.inf, values), axis=0)
    middle = np.take_along_axis(ordered, np.maximum(known - 1, 0)[None] // 2, axis=0)[0]
    unknown = known < OfHot.least_frames
    return Outliers.of(np.where(unknown, 0.0, middle), unknown)
