"""Maps of white noise."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import OfPlaces
from nlflow.denoising.noise.finding.sigma import channel_levels, estimate_sigmas
from nlflow.denoising.noise.models.base import Array
from nlflow.denoising.noise.models.gaussian import GaussianNoise, constant
from nlflow.domains.samples import range_of

Floats = NDArray[np.float64]


def find_places(samples: Array, missing: NDArray[np.bool_] | None = None) -> GaussianNoise | None:
    """Find white noise in samples (H, W, C) or (D, H, W, C) whose strength differs from place to place."""
    least = OfPlaces.side * (OfPlaces.parts if samples.ndim == 3 else OfPlaces.in_slice)
    if samples.ndim < 3 or min(samples.shape[-3:-1]) < least:
        return None
    span = range_of(samples if missing is None else samples[~missing])
    if not 0 < span < math.inf:
        return None
    if samples.ndim == 4:
        hidden = [None] * len(samples) if missing is None else list(missing)
        places = _of_slices([_parts(one, span, gone, 1) for one, gone in zip(samples, hidden, strict=True)])
    else:
        places = _of_surface(_parts(samples, span, missing, OfPlaces.parts))
    if places is None:
        return None
    even = samples / np.maximum(GaussianNoise(1.0, places=places).at(samples), np.finfo(np.float32).tiny)[..., None]
    areas = constant(samples) if missing is None else constant(samples) | missing
    levels = channel_levels(estimate_sigmas(even, areas))
    root = math.sqrt(float(np.square(places).mean()))
    return GaussianNoise(root * (levels if np.ptp(levels) else float(levels[0])), places=places / root)


def is_uneven(samples: Array, missing: NDArray[np.bool_] | None = None) -> bool:
    """Tell whether white noise of flat parts of an image (H, W, C) differs, and not as the intensity does."""
    span = range_of(samples if missing is None else samples[~missing])
    if min(samples.shape[:-1]) < OfPlaces.side * OfPlaces.parts or not 0 < span < math.inf:
        return False
    parts = _parts(samples, span, missing, OfPlaces.parts)
    parts = _Parts(*(values[parts.white >= OfPlaces.white] for values in parts))
    if len(parts.logs) < OfPlaces.least_parts:
        return False
    basis = _powers(parts.light)
    left = parts.logs - basis @ _fit(parts, basis)[0]
    return math.sqrt(float(np.square(left).mean())) > math.log(OfPlaces.uneven)


class _Parts(NamedTuple):
    """What the flattest windows of each part of a picture show, of those that have noise; each of shape (n,)."""

    logs: Floats  # of the strength
    errors: Floats
    white: Floats  # noise at the highest frequencies over that at the next lower ones
    light: Floats
    rows: Floats  # from -1 to 1
    columns: Floats


def _parts(samples: Array, span: float, missing: NDArray[np.bool_] | None, count: int) -> _Parts:
    """Look at the luminance of `count` x `count` parts of a picture (H, W, C)."""
    from scipy.fft import dct

    side, shape = OfPlaces.side, samples.shape[:2]
    starts = [np.unique(np.linspace(0, n - side, min(OfPlaces.windows, n // 2)).astype(int)) for n in shape]
    at = np.ix_(*starts)
    colours = sliding_window_view(samples, (side, side), axis=(0, 1))[at]
    windows = (colours.mean(axis=2, dtype=np.float64) / span).reshape(-1, side, side)
    # Areas of one value have no noise, as surroundings that somebody took away.
    used = (windows[..., 1:] == windows[..., :-1]).mean(axis=(1, 2)) < OfPlaces.constant
    if missing is not None:
        used &= ~sliding_window_view(missing, (side, side))[at].any(axis=(-1, -2)).ravel()
    basis = dct(np.eye(side), norm="ortho", axis=0)
    coefficients = windows.reshape(len(windows), -1) @ np.kron(basis, basis).T
    power, order = np.square(coefficients), np.maximum(*np.ogrid[:side, :side]).ravel()
    middle, high = ((order >= first) & (order <= last) for first, last in (OfPlaces.middle, OfPlaces.high))
    structure = power @ ((order > 0) & (order < OfPlaces.middle[0])).astype(float)
    rows, columns = ((start + side // 2) * count // n for start, n in zip(starts, shape, strict=True))
    own = (rows[:, None] * count + columns).ravel()
    found = []
    for part in range(count**2):
        inside = np.flatnonzero((own == part) & used)
        flat = inside[np.argsort(structure[inside])[: int(OfPlaces.flat * len(inside))]]
        if len(flat) < OfPlaces.least:
            continue
        seen = power[flat].mean(axis=0)
        level = float(seen[middle | high].mean())
        if level > 0:
            error = math.sqrt(OfPlaces.repeats / (2 * len(flat) * np.count_nonzero(middle | high)))
            white = math.sqrt(float(seen[high].mean() / max(seen[middle].mean(), np.finfo(np.float64).tiny)))
            place = [2 * (one + 0.5) / count - 1 for one in divmod(part, count)]
            found.append((math.log(level) / 2, error, white, float(coefficients[flat, 0].mean()), *place))
    return _Parts(*np.array(found, np.float64).reshape(-1, len(_Parts._fields)).T)


def _polynomials(rows: Floats, columns: Floats, degree: int) -> Floats:
    powers = [(i, j) for i in range(degree + 1) for j in range(degree + 1 - i)]
    return np.stack([rows**i * columns**j for i, j in powers], axis=-1)


def _powers(light: Floats) -> Floats:
    middle = (light - light.mean()) / (np.ptp(light) or 1.0)
    return np.asarray(middle[:, None] ** np.arange(OfPlaces.by_light))


def _fit(parts: _Parts, basis: Floats) -> tuple[Floats, float]:
    """Return coefficients of the logarithms of strengths, and how far they miss them, in errors, as a mean square."""
    weights = 1 / parts.errors
    found = np.linalg.lstsq(basis * weights[:, None], parts.logs * weights)[0]
    missed = np.square((basis @ found - parts.logs) * weights).sum() / max(len(weights) - basis.shape[1], 1)
    return np.asarray(found, np.float64), float(missed)


def _of_surface(parts: _Parts) -> Floats | None:
    """Return the strengths on a grid where a surface meets those of the parts, and nothing else does."""
    count = len(parts.logs)
    if count < OfPlaces.least_parts or np.median(parts.white) < OfPlaces.white:
        return None
    light = _powers(parts.light)
    others = [_fit(parts, light[:, :powers])[1] for powers in (1, OfPlaces.by_light)]
    for degree in OfPlaces.degrees:
        basis = _polynomials(parts.rows, parts.columns, degree)
        found, missed = _fit(parts, basis)
        if 2 * basis.shape[1] > count:
            return None
        if missed < OfPlaces.met and missed * OfPlaces.better < min(others):
            grid = (np.arange(OfPlaces.parts) + 0.5) / OfPlaces.parts * 2 - 1
            # Beyond the parts that were seen a surface is a guess.
            met = basis @ found
            values = np.exp(np.clip(_polynomials(grid[:, None], grid, degree) @ found, met.min(), met.max()))
            return np.asarray(values) if values.max() > OfPlaces.differ * values.min() else None
    return None


def _of_slices(slices: list[_Parts]) -> Floats | None:
    """Return the strengths of slices (D, 1, 1) where they differ, and their noise is white."""
    known = [k for k, one in enumerate(slices) if len(one.logs)]
    if len(known) < 2:
        return None
    parts = _Parts(*(np.concatenate(values) for values in zip(*(slices[k] for k in known), strict=True)))
    if parts.white.min() < OfPlaces.white or np.ptp(parts.logs) < math.log(OfPlaces.differ):
        return None
    if _fit(parts, np.ones((len(known), 1)))[1] < OfPlaces.met * OfPlaces.better:
        return None
    return np.exp(np.interp(np.arange(len(slices)), known, parts.logs))[:, None, None]
