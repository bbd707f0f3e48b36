"""Flat parts."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import OfFlat
from nlflow.denoising.noise.finding.evidence import is_flat, look_at_all, planes_of
from nlflow.denoising.noise.finding.pictures import coloured
from nlflow.denoising.noise.models.base import NoiseEstimate
from nlflow.denoising.noise.models.gaussian import GaussianNoise
from nlflow.denoising.noise.spectra import autocorrelation, down, error_of_correlations
from nlflow.domains.samples import range_of
from nlflow.errors import InputError, shortened

Array = NDArray[Any]
_UNEVEN: Final = (
    "its strength differs from place to place more than that of noise: compression does that, and so does texture such "
    "as grass, which counts as noise then"
)
_ONE_LEVEL: Final = "how noise follows the intensity cannot be told from one level: it counts as the same everywhere"


def checked_part(samples: Array, flat: Any) -> tuple[slice, slice]:
    if samples.ndim != 3 or min(samples.shape[:2]) < 2:
        raise InputError(f"flat: got a part of samples of shape {samples.shape[:-1]}, expected an image")
    if not (isinstance(flat, tuple) and len(flat) == 2 and all(isinstance(s, slice) for s in flat)):
        raise InputError(f"flat: got {shortened(flat)}, expected two slices, such as np.s_[20:84, 300:400]")
    limits = [
        (0 if one.start is None else one.start, size if one.stop is None else one.stop)
        for one, size in zip(flat, samples.shape, strict=False)
    ]
    whole = [type(end) is int or isinstance(end, np.integer) for pair in limits for end in pair]
    if not all(whole) or any(one.step not in (None, 1) for one in flat):
        raise InputError(f"flat: got {flat}, expected slices of whole numbers without a step")
    for name, (first, end), size in zip(("rows", "columns"), limits, samples.shape, strict=False):
        if not 0 <= first < end <= size:
            raise InputError(f"flat: got {name} {first}:{end} of an image of {samples.shape[0]} x {samples.shape[1]}, "
                             f"expected 0 <= first < end <= {size}")  # fmt: skip
    (top, bottom), (left, right) = limits
    return slice(top, bottom), slice(left, right)


def noise_of_part(samples: Array, part: tuple[slice, slice], missing: NDArray[np.bool_] | None = None) -> NoiseEstimate:
    """Return the noise of samples (H, W, C) as a part of them shows it; refuse a part that is not flat."""
    own = samples[part].astype(np.float64)
    place = f"flat: rows {part[0].start}:{part[0].stop}, columns {part[1].start}:{part[1].stop}"
    if min(own.shape[:2]) < OfFlat.smallest:
        raise InputError(f"{place}: got {own.shape[0]} x {own.shape[1]} samples, expected at least {OfFlat.smallest} x "
                         f"{OfFlat.smallest}; take a larger flat part")  # fmt: skip
    if missing is not None and missing[part].any():
        raise InputError(f"{place}: got {np.count_nonzero(missing[part])} missing sample(s), expected none; take "
                         "another part")  # fmt: skip
    at_end = max(float(np.mean(own == end, axis=(0, 1)).max()) for end in (own.min((0, 1)), own.max((0, 1))))
    if at_end > OfFlat.at_end:
        raise InputError(f"{place}: got {at_end:.0%} of its samples at the least or greatest value, expected noise, "
                         "which was clipped or rounded away; take a part that is neither black nor white")  # fmt: skip
    span, level = range_of(samples), own.mean(axis=(0, 1))
    rest = _without_shading(own)
    planes = rest / span @ planes_of(own.shape[2]).T
    if float(np.abs(planes).max()) < OfFlat.nothing:
        raise InputError(f"{place}: got no noise at all, expected some; take a part that has it")
    sigma, correlation = _moments(rest)
    _check_flat(planes[..., :1], place)
    _check_far(planes[..., 0], place)
    _check_coarser(planes[..., :1], place)
    spread = float(planes[..., 0].std())
    found = look_at_all(planes)
    reason = "noise is as strong at high frequencies as at low ones"
    model = GaussianNoise(sigma / span if len(sigma) > 1 else float(sigma[0]) / span)
    if not is_flat(found, own.shape[:2]):
        model, reason = coloured(found, np.ones_like(found.powers)), "it has the spectrum of noise that is not white"
    noise = float(np.sqrt(model.powers(own.shape[2], 2)[0 if model.opponent else slice(None)].mean()))
    if spread > OfFlat.beyond * noise:
        raise InputError(f"{place}: got a level that varies by {spread * span:.3g} beside noise of {noise * span:.3g}, "
                         f"expected at most {OfFlat.beyond:g} times as much; it is not flat; take another "
                         "part")  # fmt: skip
    where = f"measured in rows {part[0].start}:{part[0].stop}, columns {part[1].start}:{part[1].stop}"
    measured = {"level": level, "sigma": sigma, "correlation": correlation}
    uneven = _is_uneven(planes[..., 0])
    sure, reasons = ("medium", (reason, _UNEVEN)) if uneven else ("high", (reason,))
    return NoiseEstimate(model.scaled(span), sure, (*reasons, where, _ONE_LEVEL), measured, whole=False)


def _is_uneven(plane: Array) -> bool:
    """Tell whether 3 x 3 samples of a luminance (H, W) differ more in their variance than those of Gaussian noise.

    Of noise with the same covariance C of nine samples it has about a gamma law with tr(C)^2 / tr(C^2) degrees of
    freedom (Satterthwaite, 1946), of which two quantiles are compared. O(N).
    """
    from scipy.special import gammaincinv

    windows = sliding_window_view(plane, (3, 3)).reshape(-1, 9)
    windows = windows - windows.mean(axis=1, keepdims=True)
    covariance = windows.T @ windows
    freedom = np.trace(covariance) ** 2 / np.square(covariance).sum()
    low, high = np.quantile(np.square(windows).sum(axis=1), OfFlat.quantiles)
    first, second = gammaincinv(freedom / 2, OfFlat.quantiles)
    least, error = OfFlat.uneven
    return bool(high * first > low * second * math.exp(least + 4 * error / math.sqrt(plane.size)))


def _check_flat(plane: Array, place: str) -> None:
    """Refuse a part whose luminance (H, W, 1) has its power at some places, or changes too smoothly for noise."""
    from scipy.fft import dct

    half = down(plane)[..., 0]
    side, (low, high) = OfFlat.block, OfFlat.of_blocks
    blocks = sliding_window_view(half, (side, side))[:: OfFlat.step, :: OfFlat.step].reshape(-1, side, side)
    basis, greater = dct(np.eye(side), norm="ortho", axis=0), np.maximum(*np.ogrid[:side, :side])
    power = np.square(basis @ blocks @ basis.T)[:, (greater >= low) & (greater <= high)].mean(axis=1)
    excess = float(power.mean() / np.median(power))
    if excess > OfFlat.excess:
        raise InputError(f"{place}: got blocks of {excess:.3g} times their median power on average, expected at "
                         f"most {OfFlat.excess:g} times; it is not flat (an edge or letters); take another "
                         "part")  # fmt: skip
    skew = abs(float(np.mean((half - half.mean()) ** 3) / half.std() ** 3))
    if skew > OfFlat.skew:
        raise InputError(f"{place}: got samples of skewness {skew:.2g} at half the size, expected at most "
                         f"{OfFlat.skew:g} of noise; it is not flat (letters, spots or specks); take another "
                         "part")  # fmt: skip
    alike = float(_moments(plane)[1].min())
    if alike > OfFlat.smooth:
        raise InputError(f"{place}: got neighbours with a correlation of {alike:.2f}, expected at most "
                         f"{OfFlat.smooth:g} of noise; it is not flat (shades, letters or texture); take "
                         "another part")  # fmt: skip


def _check_far(plane: Array, place: str) -> None:
    """Refuse a part whose luminance (H, W) is alike at lags beyond those of noise: lines of print, waves of light.

    O(N log N).
    """
    reach, (alike, rows, columns) = OfFlat.far[0], autocorrelation([plane])
    lags, alike = np.maximum(rows, columns), alike / alike[0, 0]
    measured = (rows < min(plane.shape) // 2) & (columns < min(plane.shape) // 2)
    error = error_of_correlations(alike, lags <= OfFlat.near, plane.size)
    greatest = float(np.abs(alike[measured & (lags >= reach)]).max() / error)
    if greatest > OfFlat.far[1]:
        raise InputError(f"{place}: got samples {reach} px and more apart that are alike by {greatest:.3g} standard "
                         f"errors, expected at most {OfFlat.far[1]:g} of noise; it is not flat (print, shades, "
                         "stripes or a pattern); take another part")  # fmt: skip


def _check_coarser(plane: Array, place: str) -> None:
    """Refuse a part whose luminance (H, W, 1) is as alike in coarser pictures as surfaces are, and no noise is."""
    for size, most in zip(("half", "a quarter of"), OfFlat.coarser, strict=True):
        plane = down(plane)
        alike, limit = float(_moments(plane)[1].max()), most + 1 / math.sqrt(plane.size)
        if alike > limit:
            raise InputError(f"{place}: got neighbours with a correlation of {alike:.2f} at {size} the size, expected "
                             f"at most {limit:.2g} of noise; it is not flat (shades, letters or texture); take "
                             "another part")  # fmt: skip


def _without_shading(own: Array) -> Array:
    """Return samples (H, W, C) without the surface of second order that fits them best: light that falls off."""
    y, x = (axis.ravel() for axis in np.meshgrid(*(np.linspace(-1, 1, n) for n in own.shape[:2]), indexing="ij"))
    surface = np.stack([np.ones_like(y), y, x, y * y, y * x, x * x], axis=1)
    values = own.reshape(-1, own.shape[2])
    return np.asarray((values - surface @ np.linalg.lstsq(surface, values, rcond=None)[0]).reshape(own.shape))


def _moments(rest: Array) -> tuple[Array, Array]:
    """Return the standard deviation of each channel, and its correlation with the next row and column (C, 2)."""
    variance = np.square(rest).mean(axis=(0, 1))
    below, beside = (rest[1:] * rest[:-1]).mean(axis=(0, 1)), (rest[:, 1:] * rest[:, :-1]).mean(axis=(0, 1))
    return np.sqrt(variance), np.stack([below, beside], axis=1) / variance[:, None]
