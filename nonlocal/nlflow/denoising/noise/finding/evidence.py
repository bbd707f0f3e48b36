"""What at most 256 windows of 32 x 32 samples of a picture show of its noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise.models.gaussian import OPPONENT
from nlflow.domains.samples import range_of

Array = NDArray[Any]
SIDE: Final = 32  # of a window
MOST: Final = 256  # windows
SIZES: Final = (8, 16, 32)  # of the blocks
#: Bands of frequencies, in units of the highest, that blocks of each size tell, the highest first.
BANDS: Final = (
    (8, 0.9, 1.5), (8, 0.7, 0.9), (8, 0.5, 0.7), (8, 0.35, 0.5), (16, 0.25, 0.35), (16, 0.16, 0.25), (32, 0.1, 0.16),
    (32, 0.06, 0.1),
)  # fmt: skip
SHARES: Final = (0.04, 0.15, 0.5)  # of the blocks, the quietest
MEASURED: Final = 1  # the share by which powers are told
CLASSES: Final = 6  # of intensity, at most
_EACH: Final = 60  # blocks of an intensity, at least
_LEAST: Final = 12  # blocks that are measured, at least
_MOST_ENERGY: Final = 30.0  # of a coefficient, in units of its variance: outliers do not rule a mean
_FIRST: Final = 0.3  # of the blocks, those of least energy: they give the units in which coefficients are compared
_TIED: Final = 1e-6  # derived: rounding of sums of energies in single precision
_FINEST: Final = 1e-6  # of the range: finer steps are those of floats
_WHOLE: Final = 0.01  # of a step, by which multiples of it are off
_GREY: Final = 1e-3  # of the power of the luminance: with less in their colours channels hold one grey picture
_HIGH: Final = 0.5  # of the highest frequency: from here on the flatness of the quietest blocks is judged
_EVEN: Final = 0.15  # a relative difference of powers that does not matter: 0.6 dB
_ERRORS: Final = 4.0  # standard errors that tell a difference
_ROUNDING: Final = 1e-12  # of the power of a picture: less is rounding
_CLIPPED: Final = 9.0  # logarithms are within these bounds
#: Correlation of details of two channels, beyond two errors of chance: below it they are no colours of one picture.
#: Measured: 0 to 0.1 of three photographs or fields of spots, 0.7 and more of pieces of Kodak and PolyU.
_ALIKE: Final = 0.5
#: Fourth moment of details over the square of the second, beyond four errors of chance: structure has more.
#: Measured: 3 of Gaussian noise, 4.1 where its variance goes from 1 to 200, 5 to 80 of photographs and textures.
_STRUCTURED: Final = 4.5
_ALIKE_MOST: Final = 512  # samples along an axis that are looked at
_ALIKE_LEAST: Final = 8  # the same of the smallest size
_UNKNOWN: Final = 100.0  # of the spread: too few blocks to tell


@dataclass(frozen=True)
class Evidence:
    """Figures of blocks that are chosen by other coefficients (Colom et al. 2014, doi 10.1109/ICIP.2014.7025865)."""

    features: Array  # (F,) without units; F depends on whether there are colours
    powers: Array  # (P, B) of planes and bands: variances of orthonormal coefficients of the quietest blocks
    tables: list[Array]  # (P, n, n) the same for each coefficient of blocks of each size
    intensities: Array  # (K,) the mean of each class
    strengths: Array  # (K,) relative variance of its quietest blocks
    reference: float = 1.0  # standard deviation of the highest frequencies: the unit of features
    grey: bool = False  # three channels hold one grey picture
    tails: float = 0.0  # standard errors by which the fourth moment is above that of Gaussian noise
    span: float = 1.0  # range of the samples in the windows


def planes_of(channels: int) -> Array:
    """Return the rows along which planes are looked at: opponent colours, or the mean of channels."""
    return OPPONENT if channels == 3 else np.full((1, channels), 1 / math.sqrt(channels))


def are_unlike(samples: Array, missing: Array | None) -> bool:
    """Tell whether two channels of samples (H, W, C) hold structure, and their details are alike at no size.

    Those of colours are alike at some size; noise that hides them tells nothing. O(N C) and the middle of a large
    picture alone.
    """
    from scipy.ndimage import uniform_filter

    middle = tuple(slice(max(n - _ALIKE_MOST, 0) // 2, (n + _ALIKE_MOST) // 2) for n in samples.shape[:2])
    seen = samples[middle].astype(np.float64)
    seen = (seen - seen.mean(axis=(0, 1))) / range_of(samples)
    there = np.ones(seen.shape[:2]) if missing is None else (~missing[middle]).astype(np.float64)
    structured = False
    while min(there.shape) >= _ALIKE_LEAST:
        own = there * (uniform_filter(there, 3) > 1 - _ROUNDING)
        rest = (seen - uniform_filter(seen, (3, 3, 0))) * own[..., None]
        count = max(own.sum(), 1.0)
        products = np.einsum("ijc,ijd->cd", rest, rest)
        energies = np.diag(products)
        power = np.sqrt(energies)
        related = np.abs(products) / np.maximum(np.outer(power, power), _ROUNDING**2)
        np.fill_diagonal(related, 0.0)
        if related.max() > _ALIKE + 2 / math.sqrt(count):
            return False
        fourth = count * np.square(np.square(rest)).sum(axis=(0, 1)) / np.maximum(np.square(energies), _ROUNDING**4)
        structured |= bool(np.count_nonzero(fourth > _STRUCTURED + 4 * math.sqrt(24 / count)) > 1)
        height, width = (n // 2 for n in there.shape)
        seen = seen[: 2 * height, : 2 * width].reshape(height, 2, width, 2, -1).mean(axis=(1, 3))
        there = there[: 2 * height, : 2 * width].reshape(height, 2, width, 2).min(axis=(1, 3))
    return structured


def places(shape: tuple[int, int]) -> list[tuple[int, int]]:
    rows, columns = (n - SIDE + 1 for n in shape)
    down = min(max(round(math.sqrt(MOST * rows / columns)), 1), rows, MOST)
    along = min(max(MOST // down, 1), columns)
    corners = [
        np.unique(np.linspace(0, n - 1, count).round().astype(int)) for n, count in ((rows, down), (columns, along))
    ]
    # In all phases of the blocks of JPEG: those that lie on its grid show the zeros that it wrote.
    shifted = [np.unique(np.minimum(own + 3 * np.arange(len(own)) % 8, own[-1])) for own in corners]
    return [(int(top), int(left)) for top in shifted[0] for left in shifted[1]]


def windows(samples: Array, corners: list[tuple[int, int]]) -> Array:
    return np.stack([samples[top : top + SIDE, left : left + SIDE] for top, left in corners])


def blocks_of(planes: Array, size: int) -> Array:
    count = SIDE // size
    cut = planes.reshape(-1, count, size, count, size).swapaxes(2, 3)
    return cut.reshape(-1, size, size)


@lru_cache(maxsize=3)
def basis(size: int) -> Array:
    from scipy.fft import dct

    return np.asarray(dct(np.eye(size), norm="ortho", axis=0), np.float32)


def squares_of(blocks: Array) -> Array:
    size = blocks.shape[-1]
    return np.asarray(np.square(basis(size) @ blocks @ basis(size).T).reshape(len(blocks), size * size))


@lru_cache(maxsize=3)
def radius(size: int) -> Array:
    """Return the frequency of each coefficient, 1 the highest along an axis."""
    place = np.arange(size) / size
    return np.hypot(place[:, None], place).ravel()


@lru_cache(maxsize=16)
def in_band(band: int) -> NDArray[np.bool_]:
    size, low, high = BANDS[band]
    return np.asarray((radius(size) >= low) & (radius(size) < high))


@lru_cache(maxsize=3)
def _even(size: int) -> NDArray[np.bool_]:
    return np.asarray(np.add.outer(np.arange(size), np.arange(size)).ravel() % 2 == 0)


@lru_cache(maxsize=3)
def looked_at(size: int) -> NDArray[np.bool_]:
    low = min(low for n, low, _ in BANDS if n == size)
    return np.asarray((radius(size) >= low) & (radius(size) < (1.5 if size == 8 else 0.6 if size == 16 else 0.3)))


def look_at_all(rest: Array) -> Evidence:
    """Return the powers and tables of all blocks in windows of planes (H, W, P); the other arrays stay empty.

    The samples are taken to be noise alone.
    """
    planes = windows(rest, places(rest.shape[:2])).astype(np.float32)
    tables = [mean_table(planes, size) for size in SIZES]
    nothing = np.zeros(0)
    return Evidence(nothing, in_bands(tables), tables, nothing, nothing)


def mean_table(planes: Array, size: int) -> Array:
    each = [squares_of(blocks_of(plane, size)).mean(axis=0, dtype=np.float64) for plane in np.moveaxis(planes, -1, 0)]
    return np.stack(each).reshape(-1, size, size)


def in_bands(tables: list[Array]) -> Array:
    by_size = dict(zip(SIZES, (table.reshape(len(table), -1) for table in tables), strict=True))
    return np.stack([by_size[size][:, in_band(b)].mean(axis=1) for b, (size, _, _) in enumerate(BANDS)], axis=1)


def is_flat(found: Evidence, shape: tuple[int, int]) -> bool:
    counts = [max(shape[0] * shape[1] / size**2, 1.0) * in_band(b).sum() for b, (size, _, _) in enumerate(BANDS)]
    errors = np.sqrt(2 / (np.array(counts) * len(found.powers)))
    mean = found.powers.mean(axis=0)
    apart = np.abs(np.log(mean / np.average(mean, weights=errors**-2)))
    return bool((apart < np.maximum(_EVEN, _ERRORS * errors)).all())


def look(samples: Array, missing: NDArray[np.bool_] | None = None) -> Evidence | None:
    """Look at samples (H, W, C) of at least 32 along both axes; None where windows hold too little to tell."""
    corners = places(samples.shape[:2])
    if missing is not None:
        corners = [(t, c) for t, c in corners if not missing[t : t + SIDE, c : c + SIDE].any()]
    if not corners:
        return None
    seen = windows(samples, corners).astype(np.float64)
    low, span = float(seen.min()), range_of(seen)
    if span == 0:
        return None
    seen = (seen - low) / span
    planes = (seen @ planes_of(samples.shape[-1]).T).astype(np.float32)
    light = seen.mean(axis=-1).astype(np.float32)
    files = np.concatenate([[_step(samples, span)], _edges(samples, span), _equal(seen)])
    independent = samples.shape[0] * samples.shape[1] / 64
    found = _Looks(planes, light, independent).evidence(files)
    if found is None:
        return None
    if len(found.powers) == 3 and planes[..., 1:].var() < _GREY * planes[..., 0].var():
        grey = _Looks(planes[..., :1], light, independent).evidence(files)
        assert grey is not None
        found = replace(found, features=grey.features, grey=True)
    return replace(
        found, powers=found.powers * span**2, tables=[table * span**2 for table in found.tables],
        intensities=low + found.intensities * span, reference=found.reference * span, span=span,
    )  # fmt: skip


def _equal(seen: Array) -> Array:
    """Return in how many parts of a million neighbours are the same, along rows and columns, as logarithms."""
    same = [(np.diff(seen, axis=axis) == 0).all(axis=-1).mean() for axis in (2, 1)]
    return np.asarray(np.log10(np.array(same) + 1e-6))


def _step(samples: Array, span: float) -> float:
    """Return the step in parts of the range of which all samples are multiples apart; 0 where there is none."""
    part = samples[:: max(samples.shape[0] // 64, 1), :: max(samples.shape[1] // 64, 1)]
    apart = np.diff(np.unique(part)) / span
    if not len(apart) or apart.min() < _FINEST:
        return 0.0
    steps = apart / apart.min()
    return float(apart.min()) if np.abs(steps - np.rint(steps)).max() < _WHOLE else 0.0


def _edges(samples: Array, span: float) -> Array:
    """Return by how much steps are larger at every eighth place, along rows and columns, as JPEG leaves them."""
    found = []
    some = samples[:: max(samples.shape[0] // 128, 1)], samples[:, :: max(samples.shape[1] // 128, 1)].swapaxes(0, 1)
    for own in (lines.mean(axis=-1) for lines in some):
        steps = np.abs(np.diff(own, n=1, axis=1) / span)
        second = np.abs(2 * steps[:, 1:-1] - steps[:, :-2] - steps[:, 2:]).mean(axis=0)
        by_phase = np.array([second[k::8].mean() for k in range(8)]) + 1e-6
        found.append(float(np.log(by_phase.max() / np.median(by_phase))))
    return np.array(found)


class _Looks:
    """The measuring of one picture: planes (N, 32, 32, P) and their intensity (N, 32, 32), in parts of the range.

    `independent` blocks of 8 x 8 it has; windows of a small one overlap.
    """

    def __init__(self, planes: Array, light: Array, independent: float):
        self.count = planes.shape[-1]
        self.planes, self.light, self.independent = planes, light, independent
        self.variance = float(planes[..., 0].var(dtype=np.float64)) or 1.0

    def evidence(self, files: Array) -> Evidence | None:
        powers = np.empty((self.count, len(BANDS), len(SHARES)))
        tables: list[Array] = []
        shape: list[float] = []
        strengths: Array = np.ones(1)
        intensities: Array = np.zeros(1)
        flatness: list[float] = []
        by_window, tails = np.zeros(3), 0.0
        for size in SIZES:
            levels = blocks_of(self.light, size).mean(axis=(1, 2))
            table = np.empty((self.count, size * size))
            for p in range(self.count):
                squares = squares_of(blocks_of(self.planes[..., p], size))
                found = _quiet(squares, levels, size, _ROUNDING * self.variance)
                if found is None:
                    if p == 0:
                        return None
                    powers[p, [b for b, band in enumerate(BANDS) if band[0] == size]] = _ROUNDING * self.variance
                    table[p] = _ROUNDING * self.variance
                    shape += [0.0] * 6
                    flatness += [_UNKNOWN] * (size < SIDE)
                    continue
                own, each, means, figures = found
                table[p] = own[MEASURED]
                shape += figures
                for b, (n, _, _) in enumerate(BANDS):
                    if n == size:
                        powers[p, b] = own[:, in_band(b)].mean(axis=1)
                if size == SIDE:
                    continue
                flat = _flattest(squares, size)
                flatness.append(_spread(flat))
                if p == 0 and size == 8:
                    strengths, intensities = each / each.mean(), means
                    by_window, tails = self._windows(squares), _tails(flat, self.independent)
            tables.append(table.reshape(self.count, size, size))
        reference = powers[0, 1:3, MEASURED].mean()
        logs = 0.5 * np.log(np.maximum(powers, 1e-14 * self.variance) / reference)
        by_light = 0.5 * np.log(np.array([strengths.max() / strengths.min(), strengths[-1] / strengths[0]]))
        count = math.log(len(self.light))
        level = math.sqrt(reference)
        step = math.log(files[0] / level) if files[0] else -6.0
        scale = [math.log(level), math.log(level / math.sqrt(self.variance)), step]
        ends = [float(np.log10((self.light == v).mean() + 1e-6)) for v in (self.light.min(), self.light.max())]
        moments = _moments(blocks_of(self.planes[..., 0], 8)[::2])
        colours = self._relations() if self.count == 3 else np.zeros(0)
        parts = [
            logs.ravel(), shape, by_light, scale, ends, moments, files[1:], colours, [count, float(len(strengths))],
            np.log(flatness), by_window - math.log(level),
        ]  # fmt: skip
        features = np.clip(np.concatenate([np.asarray(part, np.float64) for part in parts]), -_CLIPPED, _CLIPPED)
        return Evidence(features, powers[..., MEASURED], tables, intensities, strengths, level, tails=tails)

    def _windows(self, squares: Array) -> Array:
        """Return the logarithm of the level of the quietest block of windows: of few, half and most of them."""
        power = squares[:, radius(8) > _HIGH].mean(axis=1)
        level = np.quantile(power.reshape(-1, (SIDE // 8) ** 2).min(axis=1), (0.1, 0.5, 0.9))
        return np.asarray(0.5 * np.log(np.maximum(level, _ROUNDING * self.variance)))

    def _relations(self) -> Array:
        """Return how alike the channels of the quietest blocks are: correlations at high and middle ones."""
        colours = self.planes.reshape(-1, 3) @ np.asarray(OPPONENT, np.float32)
        channels = colours.reshape(self.planes.shape)
        own = np.stack([blocks_of(channels[..., c], 8)[::2] for c in range(3)])
        return _alike(basis(8) @ own @ basis(8).T)


def _quiet(squares: Array, levels: Array, size: int, least: float) -> tuple[Array, Array, Array, list[float]] | None:
    """Return the powers of coefficients in the quietest blocks by share, those of classes, their intensity, figures."""
    seen = looked_at(size)
    there = np.flatnonzero(squares[:, 1:].sum(axis=1) > least * size * size)
    present = len(there) / len(squares)
    if len(there) < _LEAST:
        return None
    order = there[np.argsort(levels[there], kind="stable")]
    squares, levels = squares[np.ix_(order, np.flatnonzero(seen))], levels[order]
    parts = np.array_split(np.arange(len(levels)), max(min(CLASSES, len(levels) // _EACH), 1))
    even = _even(size)[seen]
    halves = np.stack([even, ~even]).astype(squares.dtype)
    high = radius(size)[seen] > 0.3
    total = np.zeros((len(SHARES), squares.shape[1]))
    each = np.empty(len(parts))
    kurtosis = 0.0
    energies = []
    for k, part in enumerate(parts):
        own = squares[part]
        raw = own.sum(axis=1)
        count = min(max(int(_FIRST * len(own)), _LEAST), len(own))
        unit = own[raw <= np.partition(raw, count - 1)[count - 1]].mean(axis=0) + least
        scaled = np.minimum(own / unit, _MOST_ENERGY)
        sums = halves @ scaled.T
        found = np.empty_like(total)
        last = [min(max(int(share * len(own)), _LEAST), len(own)) - 1 for share in SHARES]
        for measured, other in ((even, sums[1]), (~even, sums[0])):
            # With all that are as large but for rounding: none is preferred for its place.
            chosen = other <= (1 + _TIED) * np.partition(other, last)[last, None]
            shares = chosen / np.count_nonzero(chosen, axis=1)[:, None].astype(scaled.dtype)
            means = (shares @ scaled)[:, measured]
            found[:, measured] = means * unit[measured]
            fourth = (shares[MEASURED] @ np.square(scaled))[measured].mean()
            kurtosis += float(fourth / (3 * means[MEASURED].mean() ** 2 + 1e-12)) / (2 * len(parts))
        total += found / len(parts)
        each[k] = np.exp(np.mean(np.log(found[MEASURED, high] + 1e-30)) if high.any() else 0.0)
        both = sums.sum(axis=0)
        energies.append(both / max(float(np.median(both)), 1e-12))
    energy = np.concatenate(energies)
    first, low, middle, top = np.quantile(energy, (0.02, 0.15, 0.5, 0.9))
    figures = [
        math.log((first + 1e-6) / (low + 1e-6)), math.log((middle + 1e-6) / (low + 1e-6)),
        math.log((top + 1e-6) / (low + 1e-6)), math.log(kurtosis + 1e-6), math.log(present),
        0.5 * math.log((total[MEASURED, _across(size)[seen]].mean() + least)
                       / (total[MEASURED, _across(size, True)[seen]].mean() + least)),
    ]  # fmt: skip
    means = np.array([levels[part].mean() for part in parts])
    full = np.zeros((len(SHARES), size * size))
    full[:, seen] = total
    return full, each, means, figures


@lru_cache(maxsize=6)
def _across(size: int, other: bool = False) -> NDArray[np.bool_]:
    down, along = np.indices((size, size)).reshape(2, -1)
    return np.asarray(along > 2 * down if other else down > 2 * along)


def _flattest(squares: Array, size: int) -> Array:
    """Return high frequencies of the quietest blocks, chosen by their low ones; of too few blocks nothing."""
    high = radius(size) > _HIGH
    low = squares[:, ~high & (radius(size) > 0)].sum(axis=1)
    there = low > 1e-9 * float(low.mean())
    if np.count_nonzero(there) < _LEAST:
        return squares[:0, high]
    order = np.argsort(low[there], kind="stable")
    return np.asarray(squares[there][order[: max(int(SHARES[0] * len(order)), _LEAST)]][:, high])


def _spread(flat: Array) -> float:
    """Return the coefficient of variation of the power of blocks (M, K), over that of a chi-squared law."""
    if not len(flat):
        return _UNKNOWN
    power = flat.mean(axis=1, dtype=np.float64)
    return float(power.std() / max(power.mean(), 1e-30) / math.sqrt(2 / flat.shape[1])) + 1e-3


def _tails(flat: Array, independent: float) -> float:
    """Return by how many standard errors the fourth moment within blocks (M, K) is not that of Gaussian noise.

    An excess of kurtosis has the variance 24 over the number of coefficients.
    """
    if not len(flat):
        return math.inf
    own, count = flat.astype(np.float64), flat.shape[1]
    own /= np.maximum(own.mean(axis=0), 1e-30)  # white, whatever the spectrum
    fourth = np.square(own).mean(axis=1) / np.maximum(np.square(own.mean(axis=1)), 1e-30)
    error = math.sqrt(24 / (count * min(len(own), max(SHARES[0] * independent, _LEAST))))
    return float((fourth.mean() * (count + 2) / count - 3) / error)


def _moments(blocks: Array) -> list[float]:
    """Return skewness and excess of kurtosis of the quietest blocks, about planes."""
    rest = blocks - blocks.mean(axis=(1, 2), keepdims=True)
    slope = (np.arange(8) - 3.5) / 42
    rest = rest - ((rest * slope[:, None]).sum(axis=(1, 2)) / 8)[:, None, None] * (np.arange(8) - 3.5)[:, None]
    rest = rest - ((rest * slope).sum(axis=(1, 2)) / 8)[:, None, None] * (np.arange(8) - 3.5)
    variance = np.square(rest).mean(axis=(1, 2))
    order = np.sort(variance[variance > 1e-14])
    if len(order) < _LEAST:
        return [0.0, 0.0]
    chosen = (variance > order[int(0.02 * len(order))]) & (variance <= order[int(0.2 * len(order))])
    if not chosen.any():
        return [0.0, 0.0]
    own = rest[chosen] / np.sqrt(variance[chosen].mean())
    return [float((own**3).mean()), float(np.log((own**4).mean() / 3 + 1e-6))]


def _alike(coefficients: Array) -> Array:
    """Return correlations of coefficients (3, M, 8, 8) in the quietest blocks."""
    coefficients = coefficients.reshape(3, -1, 64)
    energy = np.square(coefficients[..., radius(8) > 0.3]).sum(axis=(0, 2))
    present = energy > 1e-12
    if np.count_nonzero(present) < _LEAST:
        return np.zeros(6)
    quiet = energy <= np.quantile(energy[present], 0.15)
    result = []
    for low, high in ((0.6, 1.5), (0.25, 0.6)):
        chosen = coefficients[:, quiet][..., (radius(8) >= low) & (radius(8) < high)].reshape(3, -1)
        spread = np.sqrt(np.square(chosen).mean(axis=1)) + 1e-9
        result += [float((chosen[i] * chosen[j]).mean() / (spread[i] * spread[j])) for i, j in ((0, 1), (1, 2), (0, 2))]
    return np.array(result)
