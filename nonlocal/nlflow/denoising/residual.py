"""Comparison of what was removed with the noise that was found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import OfFlat
from nlflow.denoising.noise.models.base import Mixture, Noise, NoiseEstimate, Strewn
from nlflow.denoising.noise.models.gaussian import GaussianNoise
from nlflow.denoising.noise.names import NO_NOISE
from nlflow.denoising.noise.spectra import autocorrelation, error_of_correlations

if TYPE_CHECKING:
    from nlflow.denoising.frame import Frame

Array = NDArray[Any]
_CROP: Final = {1: 4096, 2: 64, 3: 16}  # samples along each axis of a place that is looked at, by number of axes
_PLACES: Final = {1: 8, 2: 4, 3: 2}  # along each axis
_SIDE: Final = {1: 32, 2: 6, 3: 4}  # of the windows that are flat or steep; small enough to lie between lines of text
_FLAT: Final = 0.25  # of the windows, the flattest, and as many of the steepest
_GROUPS: Final = 3  # of intensities
_FEW: Final = 8  # windows of a group, which are too few to judge by
_CLIPPED: Final = 0.2  # of a window at an end of the range or missing; it does not count
_NOTHING: Final = 1 / 2000  # of the range of most samples: so little harms nothing, less than an eighth of a grey level
_PLAIN: Final = 0.3  # of the samples, which are at an end of the range
_WEAK: Final = 0.85  # share of the noise from which on another strength is none
_ERRORS: Final = 4.0  # standard errors that chance has in each figure: 3 in 100 000
_OF_MANY: Final = 6.0  # standard errors that chance has in the largest of some thousand correlations


@dataclass(frozen=True)
class Figures:
    """Figures of a residual, each less what chance explains.

    Attributes
    ----------
    level : float
        Logarithm of noise over residual in flat parts, at the intensity where it is largest.
    flat, steep : float
        Correlation of neighbours in flat and in steep parts, beyond that of the noise.
    skewness : float
        Skewness in steep parts beyond that in flat ones, absolute.
    clumps : float
        Correlation of neighbours in being missing, if the noise says which samples are.
    pattern : float
        Largest correlation of distant samples of an image.
    two : float
        Kurtosis of Gaussian noise less that of the residual of an image: 1.2 for a uniform law, 2 for two values.
    share : float or None
        Share of the noise that the highest frequencies in flat parts show; None without flat parts.
    """

    level: float = 0.0
    flat: float = 0.0
    steep: float = 0.0
    skewness: float = 0.0
    clumps: float = 0.0
    pattern: float = 0.0
    two: float = 0.0
    share: float | None = None


#: Above how far each figure goes where the noise is right; `python -m benchmarks.learn_residual` measures that.
LIMITS: Final = Figures(level=0.3, flat=0.03, steep=0.02, skewness=0.3, clumps=0.3, pattern=0.1, two=1.4)
#: Of recordings, whose coarser scales take out what is signal and far below the noise, such as the end of a sound: with
#: a correlation c of neighbours about c of what was removed is signal, and 1 - c the noise that has gone with it.
OF_RECORDINGS: Final = replace(LIMITS, flat=0.2)
_TOLD: Final = "what was removed is not"
WORDS: Final = {
    "clumps": "the samples taken for impulses lie in clumps, as structure does",
    "level": "flat parts show less noise than was taken out",
    "flat": "neighbours in it are more alike than under this noise",
    "steep": "lines and edges of the picture are in it",
    "skewness": "it is skewed near lines and edges, as structure is",
    "pattern": "it repeats, as halftone, weave and lines of print do",
    "two": "it has two values, as black and white do",
}


@dataclass(frozen=True)
class Looked:
    """A place's samples."""

    place: tuple[slice, ...]  # in the whole
    samples: Array  # (..., C)
    estimate: Array  # (..., C)
    missing: NDArray[np.bool_] | None = None  # (...)
    taken: NDArray[np.bool_] | None = None  # (...), of the missing ones those that the noise says are


def figures_of(f: Array, u: Array, frame: Frame) -> Figures | None:
    lost = frame.missing
    taken = lost if lost is None or frame.absent is None else lost & ~frame.absent
    places = (
        Looked(place, f[place], u[place], *(None if where is None else where[place] for where in (lost, taken)))
        for place in places_of(f.shape[:-1])
    )
    # By channels: over all but a last axis of three NumPy takes twenty times as long.
    low, high = (np.array([end(f[..., c]) for c in range(f.shape[-1])]) for end in (np.min, np.max))
    return figures_in(places, frame, low, high)


def figures_in(places: Iterable[Looked], frame: Frame, low: Array, high: Array) -> Figures | None:
    shape = frame.shape
    axes = tuple(k for k, n in enumerate(shape) if n > 1)
    spatial = len(axes)
    side = _SIDE.get(spatial, 0)
    by_pixels = (
        frame.coloured is None and frame.model is not None and frame.model.is_coloured and frame.variance is None
    )
    if not side or min(shape[k] for k in axes) < 2 * side or by_pixels:  # a flow of pixels counts other noise as white
        return None
    if frame.few is not None:  # so few counts are noise in no units that are even
        return None
    correlation, variance = _expected(frame, spatial)
    found: list[tuple[Array, ...]] = []
    hidden: list[Array] = []
    plain: list[float] = []
    rests: list[Array] = []
    for one in places:
        place, samples, estimate = one.place, one.samples.astype(np.float64), one.estimate.astype(np.float64)
        level = math.sqrt(variance) * np.broadcast_to(_strength(frame, place), samples.shape[:-1])
        level = level * np.sqrt(_cut_off(estimate - low, high - estimate, level[..., None]).mean(axis=-1))
        away = ended = ((samples <= low) | (samples >= high)).any(axis=-1)
        if (own := one.missing) is not None:
            if spatial > 1 and one.taken is not None:  # spikes of recordings are runs of a few samples
                hidden.append(one.taken)
            away, ended = away | own, ended & ~own
        if frame.exact is not None and frame.coloured is None:  # such as a background that was taken away
            away = away | np.broadcast_to(frame.exact, (*shape, len(low)))[place].any(axis=-1)
        light = estimate.sum(axis=-1) / math.sqrt(estimate.shape[-1])
        rest = np.where(away, 0.0, (samples - estimate).sum(axis=-1) / math.sqrt(samples.shape[-1]))
        size = tuple(n for n in rest.shape if n > 1)
        plain.append(float(ended.mean()))
        rests.append(rest.reshape(size))
        found.append(
            _windows_of(rest.reshape(size), light.reshape(size), away.reshape(size), side, level.reshape(size))
        )
    if frame.fills_alone:
        return Figures(clumps=_clumps(hidden))
    columns = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    judged = _judged(columns, correlation, hidden, side**spatial)
    whole = Figures(pattern=_pattern(rests, len(low)), two=_two(rests)) if spatial == 2 else Figures()
    # Where much is at an end of the range, as paper is, and no other part is flat, nothing bears the noise out.
    if (judged is None or judged.share is None) and float(np.mean(plain)) > _PLAIN:
        return Figures(level=math.inf, clumps=_clumps(hidden), share=0.0)
    if judged is None or (frame.model is not None and not frame.model.has_law):
        return whole
    return replace(judged, pattern=whole.pattern, two=whole.two)


def places_of(shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    spatial = sum(n > 1 for n in shape)
    lines = []
    for n in shape:
        side = min(_CROP[spatial], n)
        starts = np.linspace(0, n - side, max(min(_PLACES[spatial], n // side), 1)).astype(int)
        lines.append([slice(int(start), int(start) + side) for start in dict.fromkeys(starts.tolist())])
    return list(itertools.product(*lines))


def _expected(frame: Frame, spatial: int) -> tuple[Array, float]:
    """Return the correlation of the noise of the luminance with its neighbours, along each axis, and its variance.

    The last entry is the sum of its squares, by which windows hold fewer independent samples.
    """
    coloured = frame.coloured
    if coloured is None:
        return np.array([0.0] * spatial + [1.0]), 1.0
    from nlflow.denoising.noise.spectra import correlation

    weights = np.square(coloured.axes.sum(axis=1)) / len(coloured.axes)
    power = np.tensordot(weights, coloured.shown, axes=1)
    values = correlation(power[None])[0]
    rows, columns = (n // 2 for n in values.shape)
    next_to = [values[rows, columns + 1]] if spatial == 1 else [values[rows + 1, columns], values[rows, columns + 1]]
    return np.array([*next_to, float(np.square(values).sum())]), float(power.mean())


def _strength(frame: Frame, place: tuple[slice, ...]) -> Any:
    """Return the relative standard deviation of the noise at a place."""
    if frame.coloured is not None:
        varies = frame.coloured.strength
        return np.sqrt(np.broadcast_to(varies, (*frame.shape, 1))[place][..., 0])
    return 1.0 if frame.variance is None else np.sqrt(frame.variance[place])


def _cut_off(above: Array, below: Array, level: Array) -> Array:
    """Return the mean square of Gaussian noise of a level whose samples beyond two ends of the range do not count.

    Over the squared level, at distances a and b of the signal from the ends in units of the level: 1 - (a phi(a) + b
    phi(b)) / (Phi(a) + Phi(b) - 1), the second moment of a Gaussian that is truncated there, about its mean before
    that. It is 1 but near an end: the ends of a range that nothing was clipped to are extremes of the noise.
    """
    from scipy.special import ndtr

    a, b = (np.maximum(side / level, 0.0) for side in (above, below))
    inside = np.maximum(ndtr(a) + ndtr(b) - 1, np.finfo(float).tiny)
    densities = (a * np.exp(-(a**2) / 2) + b * np.exp(-(b**2) / 2)) / math.sqrt(2 * math.pi)
    return np.asarray(np.clip(1 - densities / inside, np.finfo(np.float32).eps, 1.0))


def _windows_of(rest: Array, light: Array, away: NDArray[np.bool_], side: int, level: Any) -> tuple[Array, ...]:
    """Return of each window its steepness, intensity, share away, and means of the residual's products."""
    mixed, there = rest, (~away).astype(np.float64)
    rest = rest / level
    count = np.maximum(_cut(there, side).sum(axis=1), 1)
    lights = _cut(light, side)
    products = []
    for axis in range(rest.ndim):
        moved = np.roll(rest, -1, axis)
        last = tuple(slice(-1, None) if k == axis else slice(None) for k in range(rest.ndim))
        moved[last] = 0.0
        products.append(_cut(rest * moved, side).sum(axis=1) / count)
    for axis in range(rest.ndim):
        mixed = np.diff(mixed, axis=axis, append=0.0) / math.sqrt(2)
    inner = tuple(slice(0, -1) for _ in range(rest.ndim))
    edge = np.zeros_like(rest)
    edge[inner] = mixed[inner]
    values = _cut(rest, side)
    return (
        lights.std(axis=1), lights.mean(axis=1), 1 - _cut(there, side).mean(axis=1),
        np.square(values).sum(axis=1) / count, (values**3).sum(axis=1) / count,
        np.square(_cut(edge, side)).sum(axis=1) / count, *products,
    )  # fmt: skip


def _cut(values: Array, side: int) -> Array:
    """Return the windows of values as rows; what is left over at the ends is cut off."""
    whole = values[tuple(slice(0, n - n % side) for n in values.shape)]
    apart = whole.reshape([k for n in whole.shape for k in (n // side, side)])
    order = [*range(0, apart.ndim, 2), *range(1, apart.ndim, 2)]
    return np.asarray(apart.transpose(order).reshape(-1, side**values.ndim))


def _judged(columns: list[Array], correlation: Array, hidden: list[Array], size: int) -> Figures | None:
    seen = columns[2] <= _CLIPPED
    if np.count_nonzero(seen) < 4 * _FEW:
        return Figures(clumps=_clumps(hidden)) if hidden else None
    steep, light, _, square, cube, mixed, *products = (one[seen] for one in columns)
    low, high = np.quantile(light, [0.05, 0.95])
    if math.sqrt(float(square.mean())) < _NOTHING * float(high - low):
        return Figures(clumps=_clumps(hidden), share=1.0)
    flat: list[Array] = []
    level, share = 0.0, None
    alone = max(size / float(correlation[-1]), 1.0)  # independent samples of a window
    median = (1 - 2 / (9 * alone)) ** 3  # of their mean square (Wilson and Hilferty 1931)
    for group in np.array_split(np.argsort(light, kind="stable"), _GROUPS):
        own = group[np.argsort(steep[group], kind="stable")][: max(int(_FLAT * len(group)), 1)]
        if len(own) < _FEW or float(np.median(steep[own])) > 0.5:  # no flat parts
            continue
        flat.append(own)
        error = 1.25 / math.sqrt(2 * alone * len(own))  # of a median
        below = -0.5 * math.log(max(float(np.median(square[own])) / median, 1e-12)) - _ERRORS * error
        if below > level:
            level = below
            share = math.sqrt(float(np.median(mixed[own])) / median)
    every = np.concatenate(flat) if flat else np.zeros(0, int)
    edges = np.argsort(steep, kind="stable")[-max(int(_FLAT * len(steep)), 1) :]
    of_flat = _related(square, products, every, correlation, size)
    of_steep = _related(square, products, edges, correlation, size)
    skewed = abs(_skewness(square, cube, edges)) - abs(_skewness(square, cube, every))
    error = _ERRORS * math.sqrt(6 * correlation[-1] / (size * len(edges)))
    if share is None and len(every):
        share = min(math.sqrt(float(np.median(mixed[every])) / median), 1.0)
    return Figures(level, of_flat, of_steep, skewed - error, _clumps(hidden), share=share)


def _related(square: Array, products: list[Array], where: Array, correlation: Array, size: int) -> float:
    """Return how much more neighbours are alike than under the noise, along the axis where that is most."""
    total = float(square[where].sum()) if len(where) else 0.0
    if total == 0:
        return 0.0
    most = max(float(one[where].sum()) / total - float(own) for one, own in zip(products, correlation, strict=False))
    return most - _ERRORS * math.sqrt(correlation[-1] / (size * len(where)))


def _pattern(rests: list[Array], channels: int) -> float:
    """Return the largest correlation of samples of places (H, W) that lie far apart, beyond what chance makes of it.

    Of colours, what repeats every second sample does not count: noise that was clipped before a mosaic became a picture
    has a mean of its own at each of its places. O(N log N).
    """
    (height, width), far = rests[0].shape, OfFlat.far[0]
    if channels == 3:
        rests = [_without_mosaic(rest) for rest in rests]
    alike, rows, columns = autocorrelation(rests)
    if not alike[0, 0] > 0 or min(height, width) <= 2 * far:
        return 0.0
    lags = np.maximum(rows, columns)
    alike *= height * width / np.maximum((height - rows) * (width - columns), 1) / alike[0, 0]
    error = error_of_correlations(alike, lags <= OfFlat.near, len(rests) * height * width)
    seen = (lags >= far) & (rows < height // 2) & (columns < width // 2)
    return float(np.abs(alike[seen]).max()) - _OF_MANY * error


def _without_mosaic(rest: Array) -> Array:
    result = rest.copy()
    for place in itertools.product(range(2), repeat=2):
        own = result[place[0] :: 2, place[1] :: 2]
        own -= own.mean()
    return result


def _two(rests: list[Array]) -> float:
    values = np.concatenate([rest.ravel() for rest in rests])
    power = float(np.square(values).mean())
    return 3.0 - float((values**4).mean()) / power**2 if power > 0 else 0.0


def _skewness(square: Array, cube: Array, where: Array) -> float:
    power = float(square[where].mean()) if len(where) else 0.0
    return float(cube[where].mean()) / power**1.5 if power > 0 else 0.0


def _clumps(hidden: list[Array]) -> float:
    """Return the correlation of neighbours along the last axis in being missing."""
    if not hidden:
        return 0.0
    one, other = (np.concatenate([part[..., k].ravel() for part in hidden]) for k in (slice(0, -1), slice(1, None)))
    share = 0.5 * float(one.mean() + other.mean())
    if not 0 < share < 1:
        return 0.0
    related = (float((one & other).mean()) - share**2) / (share * (1 - share))
    return related - _ERRORS / math.sqrt(len(one))


def seen_in(found: Figures | None, axes: int) -> tuple[str, ...]:
    if found is None:
        return ()
    limits = OF_RECORDINGS if axes == 1 else LIMITS
    return tuple(text for name, text in WORDS.items() if getattr(found, name) > getattr(limits, name))


def milder(frame: Frame, found: Figures) -> NoiseEstimate | None:
    """Return a verdict for a residual that is not the noise found; None for one that is, and where noise was given.

    What it names is the white noise of the highest frequencies in flat parts, or half of what was taken out; at the
    second try no noise. Samples that were replaced stay so unless they lie in clumps. Noise that is neither Gaussian
    nor undone stays at the first try.
    """
    axes = sum(n > 1 for n in frame.shape)
    seen = seen_in(found, axes)
    if not seen or frame.found is None:
        return None
    model = frame.model if frame.model is not None else frame.found.model
    parts = model.parts if isinstance(model, Mixture) else (model,)
    again = bool(frame.found.reasons) and frame.found.reasons[0].startswith(_TOLD)
    share = 0.5 if found.share is None else found.share
    if share > _WEAK and frame.coloured is None:
        share = 0.5
    level = frame.level * share / frame.options.strength
    noise: Noise = GaussianNoise(float(level[0]) if np.ptp(level) == 0 else level)
    kept = [one for one in parts if one.undone]
    if found.clumps > LIMITS.clumps:
        noise, kept = GaussianNoise(0.0), []
    elif again or not level.any():
        noise, kept = GaussianNoise(0.0), [one for one in kept if isinstance(one, Strewn) and axes > 1]
    elif any(not one.undone and not isinstance(one, GaussianNoise) for one in parts):
        noise = frame.found.model
    if noise is frame.found.model:
        doubted, less = model, "it was taken out all the same, as nothing milder is known"
    else:
        doubted = Mixture([one for one in parts if one not in kept] or parts)
        noise = Mixture([*kept, noise]) if kept else noise
        left = noise.describe()
        less = "nothing is taken out" if left == NO_NOISE else f"{left} alone is taken out"
    reason = f"{_TOLD} {doubted.describe()}: {'; '.join(seen)}; {less}"
    return NoiseEstimate(noise, "low", (reason,), frame.found.measured, whole=False)


# ---- what is given back

_RADII: Final = (7, 10)  # of the discs about a peak, which hold two and more of its widths
_RING: Final = 0.75  # of a radius, beyond which the surroundings are
_PEAK: Final = 1.5  # noise by which a peak stands out
_CALM: Final = 1.0  # noise by which the surroundings of an isolated peak differ at most from their median
_SURE: Final = 5.0  # root of a peak's energy, in units of the noise, that chance does not reach
_APART: Final = 5  # samples between peaks
#: How far a sample looks for what is given back.
REACH: Final = 2 * max(_RADII) + _APART + 1


def with_peaks(f: Array, u: Array) -> Array:
    """Return an estimate u (H, W, 1) with what isolated peaks and dips have lost.

    The residual about each is fitted by its shape and a smoother one, by least squares, and given back.
    """
    if u.ndim != 3 or u.shape[-1] > 1 or min(u.shape[:2]) <= 2 * _RADII[0]:
        return u
    result = u
    for sign in (1.0, -1.0):
        plane = sign * u[..., 0]
        found = _peaks_of(plane)
        if len(found):
            result = result + (sign * _lost(sign * f[..., 0], plane, found)).astype(u.dtype)[..., None]
    return result


def _peaks_of(plane: Array) -> Array:
    """Return the rows and columns of local maxima that stand out from samples at the smaller radius."""
    r = _RADII[0]
    inner = plane[r:-r, r:-r]
    sides = plane[: -2 * r, r:-r], plane[2 * r :, r:-r], plane[r:-r, : -2 * r], plane[r:-r, 2 * r :]
    out = np.flatnonzero(inner > np.maximum.reduce(sides) + _PEAK)
    places = np.stack(np.unravel_index(out, inner.shape), axis=1) + r
    return np.array([(i, j) for i, j in places if plane[i, j] == plane[i - 2 : i + 3, j - 2 : j + 3].max()], int)


def _lost(f: Array, plane: Array, found: Array) -> Array:
    """Return what isolated peaks of a plane have lost of f."""
    from scipy.ndimage import gaussian_filter

    lost = np.zeros(plane.shape)
    done = np.zeros((0, 2), int)
    for radius in _RADII:
        distance = np.hypot(*np.mgrid[-radius : radius + 1, -radius : radius + 1])
        disc, inside = distance <= radius + 0.5, distance <= _RING * radius
        ring, own = disc & ~inside, []
        for i, j in found:
            window = np.s_[i - radius : i + radius + 1, j - radius : j + radius + 1]
            near = len(done) and bool((np.abs(done - (i, j)).max(axis=1) <= _APART).any())
            if near or i < radius or j < radius or plane[window].shape != disc.shape:
                continue
            here = plane[window].astype(np.float64)
            around = here[ring]
            level = np.median(around)
            shape = np.where(inside, here - level, 0.0)
            if np.abs(around - level).max() > _CALM or np.sum(shape**2) < _SURE**2:
                continue
            smoother = gaussian_filter(shape, radius / _RADII[0]) * disc
            basis = np.stack([shape[disc], smoother[disc]])
            rest = (f[window].astype(np.float64) - here)[disc]
            lost[window][disc] += np.linalg.solve(basis @ basis.T, basis @ rest) @ basis
            own.append((i, j))
        done = np.concatenate([done, np.array(own, int).reshape(-1, 2)])
    return lost
