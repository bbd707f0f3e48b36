"""Photon transfer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.denoising.noise.figures import TO_SIGMA, OfMagnitudes, OfTransfer
from nlflow.denoising.noise.finding.sigma import Windows, at_ends, blocks_of, in_unit, limits_of
from nlflow.denoising.noise.models.base import Array
from nlflow.denoising.noise.models.gaussian import constant
from nlflow.denoising.noise.models.intensities import Poisson
from nlflow.denoising.noise.models.magnitudes import Magnitudes, NoncentralChi, Rician, mean_magnitude
from nlflow.domains.samples import as_signal, check_axis
from nlflow.errors import InputError, check_array, check_number

_Points = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], float]


@dataclass(frozen=True)
class PhotonTransfer:
    """What `photon_transfer` found: variance = gain (mean - offset) + sigma², in the units of the input.

    Attributes
    ----------
    model : Poisson
        Counts of this gain and sigma, and the offset.
    gain, gain_error : float
        Units of the input for each count, and its standard error.
    intercept, intercept_error : float
        Variance where the mean is 0, sigma² - gain offset, and its standard error.
    sigma, sigma_error : float
        Read noise for `model.offset`, and its standard error, infinite for a sigma of 0.
    offset_known : bool
        Whether the offset was given.
    means, variances, errors : array of shape (bins,)
        The points of the line, and the standard errors of the variances.
    """

    model: Poisson
    gain: float
    gain_error: float
    intercept: float
    intercept_error: float
    sigma: float
    sigma_error: float
    offset_known: bool
    means: NDArray[np.float64] = field(repr=False)
    variances: NDArray[np.float64] = field(repr=False)
    errors: NDArray[np.float64] = field(repr=False)

    def __str__(self) -> str:
        """Return the figures for people."""
        gain, read = f"gain {self.gain:.4g} ± {self.gain_error:.2g} a count", f"read noise {self.sigma:.3g}"
        if not self.offset_known:
            return (f"{gain}, variance {self.intercept:.4g} ± {self.intercept_error:.2g} where the mean is 0; it does "
                    f"not tell how much of that is read noise, and how much the dark level: {read} and "
                    f"{self.model.offset:.4g} are one pair of many")  # fmt: skip
        error = f" ± {self.sigma_error:.2g}" if math.isfinite(self.sigma_error) else ""
        return f"{gain}, {read}{error}, offset {self.model.offset:.4g} (given)"


@underflowing
def photon_transfer(
    stack: Any, *, offset: float | None = None, channel_axis: int | None = None, mask: Any = None
) -> PhotonTransfer:
    """Estimate gain and read noise of a camera from a stack or clip, without calibration frames.

    Parameters
    ----------
    stack : array_like
        Volume or clip of three axes, of one channel.
    offset : float, optional
        Value of the input for no light, such as the mean of a dark frame. The stack cannot tell it from read noise:
        without it an offset is assumed for which sigma² >= 0.
    channel_axis : int, optional
        An axis of one sample.
    mask : array_like of bool, optional
        True where samples are missing; their values do not matter, be they NaN.

    Returns
    -------
    PhotonTransfer

    Raises
    ------
    InputError
        Where the stack does not determine the gain, with the reason; for several channels; and for an offset with which
        the read noise would be imaginary.

    Notes
    -----
    A line is fitted to the variance over the mean, at high frequencies of those blocks of 4×4×4 that have the least
    energy at low ones; points above it count as structure and lose weight. O(N).

    References
    ----------
    Janesick, Klaasen and Elliott 1987 (doi 10.1117/12.7974183); Foi, Trimeche, Katkovnik and Egiazarian 2008
    (doi 10.1109/TIP.2008.2001399), from pictures themselves.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import Poisson, photon_transfer
    >>> light = np.linspace(5, 200, 64)[:, None] * np.ones((24, 64, 64))
    >>> found = photon_transfer(Poisson(2.0, 3.0, 100.0).sample(2 * light + 100, rng=0), offset=100)
    >>> bool(abs(found.gain - 2) < 0.1), bool(abs(found.sigma - 3) < 1)
    (True, True)
    """
    missing = None if mask is None else np.asarray(check_array("mask", mask)).astype(bool)
    samples, _ = as_signal(_known(stack, missing, channel_axis), channel_axis, name="stack")
    if samples.ndim != 4:
        raise InputError(f"stack: got shape {samples.shape[:-1]}, expected a volume or clip of three axes")
    if missing is not None and missing.shape != samples.shape[:-1]:
        raise InputError(f"mask: got shape {missing.shape}, expected {samples.shape[:-1]}, one boolean for each sample")
    if offset is not None:
        offset = check_number("offset", offset, hint="the value of the input for no light")
    return transfer_of(samples, missing, offset)


def _known(stack: Any, missing: NDArray[np.bool_] | None, channel_axis: int | None) -> Any:
    """Return a stack with 0 in place of what is missing, where the shapes fit."""
    if missing is None or not isinstance(stack, np.ndarray) or stack.dtype.kind != "f":
        return stack
    axis = check_axis(stack.ndim, channel_axis)
    gone = missing if axis is None else np.expand_dims(missing, axis)
    fits = gone.ndim == stack.ndim and all(n in (1, m) for n, m in zip(gone.shape, stack.shape, strict=True))
    return np.where(gone, stack.dtype.type(0), stack) if fits else stack


def transfer_of(
    samples: Array, missing: NDArray[np.bool_] | None = None, offset: float | None = None
) -> PhotonTransfer:
    """See `photon_transfer`."""
    if samples.shape[-1] != 1:
        raise InputError(f"stack: got {samples.shape[-1]} channels, expected one; each has a gain of its own, so take "
                         "them one by one")  # fmt: skip
    shape = tuple(n for n in samples.shape[:-1] if n > 1)
    if len(shape) != 3:
        raise InputError(f"stack: got shape {samples.shape[:-1]}, expected more than one sample along each axis")
    absent = np.zeros(shape, bool) if missing is None else missing
    unit, span = in_unit(samples[..., 0], absent)
    if span == 0:
        raise InputError("stack: got equal values, or a range that overflows, expected a stack with noise")
    low = float(samples[..., 0][~absent].min())
    empty = absent | constant(unit[..., None])
    limits = limits_of(*at_ends(unit[~empty]))
    points = _points(blocks_of(unit, empty), limits[1])
    slope, at_zero, covariance = line_through(*points)
    # Many counts are 0; other noise is cut off there, and looks weaker in the dark than it is.
    means, variances, spread, dark = points
    bright = means > limits[0] + OfTransfer.cut * np.sqrt(variances)
    if OfTransfer.least_bins <= np.count_nonzero(bright) < len(means):
        without = means[bright], variances[bright], spread[bright], dark
        again = line_through(*without)
        if abs(again[0] - slope) > OfTransfer.consistent * math.sqrt(again[2][0, 0]):
            points, (slope, at_zero, covariance) = without, again
    _check_line(slope, at_zero, math.sqrt(covariance[0, 0]), points)
    gain = slope * span
    # From the units in which `low` is 0.
    intercept, intercept_error = at_zero * span**2 - gain * low, span**2 * _error(covariance, -low / span)
    darkest = low + span * float(points[3])
    if offset is None:
        offset, known = _assumed(gain, intercept, intercept_error, darkest), False
    else:
        known = True
    at_offset = span**2 * _error(covariance, (offset - low) / span)
    model = _model(gain, intercept, offset, at_offset, low)
    sigma_error = at_offset / (2 * model.sigma) if model.sigma > 0 else math.inf
    return PhotonTransfer(
        model, gain, span * math.sqrt(covariance[0, 0]), intercept, intercept_error, model.sigma, sigma_error, known,
        low + span * points[0], span**2 * points[1], span**2 * points[2],
    )  # fmt: skip


def magnitudes_of(found: PhotonTransfer) -> tuple[Magnitudes, bool] | None:
    """Return noise of magnitudes, and whether its law meets variances far better than the line; None if less well."""
    means, variances = found.means, found.variances
    relative = np.maximum(found.errors / variances, OfTransfer.sure)

    def off(expected: NDArray[np.float64]) -> float:
        errors = (variances / np.maximum(expected, 1e-3 * variances.max()) - 1) / relative
        return float(np.minimum(errors**2, OfTransfer.outlier**2).sum())

    low, high, count = OfMagnitudes.strengths
    counted = found.gain * means + found.intercept
    largest = float(min(variances.max(), counted.max()))  # structure lies above the line
    strengths = np.geomspace(low * math.sqrt(float(variances.min())), high * math.sqrt(largest), count)
    without = np.linspace(0, OfMagnitudes.far, 10 * int(OfMagnitudes.far) + 1)
    tried = []
    for coils in OfMagnitudes.coils:
        middle = mean_magnitude(without, coils)
        spread = without**2 + 2 * coils - middle**2
        for sigma in strengths.tolist():
            expected = sigma**2 * np.interp(means / sigma, middle, spread)
            expected[means < (middle[0] - OfMagnitudes.below) * sigma] = 0
            tried.append((off(expected), coils, sigma))
    least, coils, sigma = min(tried)
    line = off(counted)
    if least >= line:
        return None
    by_far = least < OfMagnitudes.nearer * line and line - least > OfTransfer.outlier**2
    return Rician(sigma) if coils == 1 else NoncentralChi(sigma, coils), by_far


def of_line(gain: float, intercept: float, low: float) -> Poisson:
    return _model(gain, intercept, _assumed(gain, intercept, 0.0, low), 0.0, low)


def _points(windows: Windows, limit: float) -> _Points:
    """Return means, variances and their errors in bins of the mean, and the mean of the darkest blocks."""
    order = np.argsort(windows.mean)
    count = min(OfTransfer.bins, len(order) // OfTransfer.in_bin)
    if count < OfTransfer.least_bins:
        raise InputError(f"stack: got {len(order)} blocks of 4 x 4 x 4 without missing samples, expected at least "
                         f"{OfTransfer.least_bins * OfTransfer.in_bin}; give a larger stack")  # fmt: skip
    found = []
    for part in np.array_split(order, count):
        near = part[np.argsort(windows.structure[part], kind="stable")]
        mean, variance, error = _of_bin(windows, near)
        if variance > 0 and mean < limit - 3 * math.sqrt(variance):  # where noise is cut off there is less of it
            found.append((mean, variance, error))
    if len(found) < OfTransfer.least_bins:
        raise InputError("stack: got hardly any part with noise that is not cut off at the upper end; expected "
                         "values that are not clipped")  # fmt: skip
    means, variances, errors = np.array(found).T
    return means, variances, errors, float(windows.mean[order[: max(int(OfTransfer.darkest * len(order)), 1)]].mean())


def _of_bin(windows: Windows, order: NDArray[np.intp]) -> tuple[float, float, float]:
    """Return the mean, the variance and its error, from blocks in the order of their structure.

    Mean squares and not medians, as counts are no Gaussian noise.
    """
    squares = np.square(windows.high[order], dtype=np.float64).mean(axis=1)
    size = max(int(OfTransfer.share * len(order)), OfTransfer.in_bin // 2)
    seen: list[tuple[int, float, float]] = []
    while True:
        size = min(size, len(order))
        variance = float(squares[:size].mean())
        error = math.sqrt(windows.repeats * float(squares[:size].var()) / size)
        if any(variance - v > 2 * math.sqrt(max(e**2 - error**2, 0.0)) for _, v, e in seen):
            break
        seen.append((size, variance, error))
        if size == len(order) or error < OfTransfer.sure * variance:
            break
        size *= 2
    size, variance, error = seen[-1]
    return float(windows.mean[order[:size]].mean()), variance, max(error, 1e-3 * variance)


def line_through(
    means: NDArray[np.float64], variances: NDArray[np.float64], errors: NDArray[np.float64], _: float
) -> tuple[float, float, NDArray[np.float64]]:
    """Return slope and value at 0 of a line, and their covariance."""
    # About the middle of the means: with a large offset the columns of the design are otherwise alike to all digits.
    middle = float(means.mean())
    design = np.stack([means - middle, np.ones_like(means)], axis=1)
    relative = errors / variances
    expected, weights = variances, np.ones_like(means)
    for _sweep in range(OfTransfer.sweeps):
        # Errors in proportion to the expected variance: those of points that are low by chance are too small.
        spread = relative * np.maximum(expected, 1e-3 * variances.max())
        normal = design.T @ (design * (weights / spread**2)[:, None])
        slope, level = np.linalg.solve(normal, design.T @ (variances * weights / spread**2))
        expected = design @ np.array([slope, level])
        off = (variances - expected) / spread
        scale = max(TO_SIGMA * float(np.median(np.abs(off))), 1.0)
        # Structure makes variances larger, hardly anything makes them smaller.
        weights = (OfTransfer.outlier * scale / np.maximum(off, OfTransfer.outlier * scale)) ** 2
    inflation = max(float((weights * off**2).sum() / max(len(means) - 2, 1)), 1.0)
    to_zero = np.array([[1.0, 0.0], [-middle, 1.0]])
    covariance = to_zero @ (np.linalg.inv(normal) * inflation) @ to_zero.T
    return float(slope), float(level - slope * middle), covariance


def _check_line(slope: float, at_zero: float, error: float, points: _Points) -> None:
    """Refuse a line that is none, or does not rise for certain."""
    means, variances, _, _ = points
    span = float(means.max() - means.min())
    if slope <= OfTransfer.significant * error:
        grown = f"{slope * span / float(np.median(variances)):.2g} ± {error * span / float(np.median(variances)):.2g}"
        why = "the noise does not follow the light" if error * span < 0.2 * float(np.median(variances)) else (
            "the flat parts are too few, or differ too little in intensity, to tell")  # fmt: skip
        raise InputError(f"stack: got variances that grow by {grown} of their median from the darkest to the brightest "
                         f"part, expected growth beyond doubt: {why}; give Poisson(gain=...)")  # fmt: skip
    expected = slope * means + at_zero
    if is_square(*points):
        raise InputError("stack: got variances that grow with the square of the intensity, expected a line, as counts "
                         "have; is this speckle? Then find_speckle tells how much")  # fmt: skip
    off = float(np.median(np.abs(variances / np.maximum(expected, 1e-3 * variances.max()) - 1))) * TO_SIGMA
    if off > OfTransfer.off:
        raise InputError(f"stack: got variances {off:.0%} off any line over the mean, expected a line, as counts have; "
                         "is this noise of another kind, or structure everywhere? Give Poisson(gain=...)")  # fmt: skip


def is_square(
    means: NDArray[np.float64], variances: NDArray[np.float64], errors: NDArray[np.float64], _: float
) -> bool:
    """Tell whether most of what variances grow by is a parabola, and that for certain."""
    centred = means - means.min()
    spread = np.maximum(errors, OfTransfer.sure * variances)
    design = np.stack([centred**2, centred, np.ones_like(means)], axis=1) / spread[:, None]
    normal = np.linalg.inv(design.T @ design)
    fitted = normal @ design.T @ (variances / spread)
    away = design @ fitted - variances / spread
    error = math.sqrt(float(normal[0, 0]) * max(float((away**2).mean()), 1.0))
    span = float(centred.max())
    return bool(fitted[0] > OfTransfer.significant * error and fitted[0] * span > fitted[1])


def _error(covariance: NDArray[np.float64], place: float) -> float:
    """Return the standard error of a line at a place."""
    at = np.array([place, 1.0])
    return math.sqrt(max(float(at @ covariance @ at), 0.0))


def _assumed(gain: float, intercept: float, error: float, darkest: float) -> float:
    """Return an offset for which the read noise is no imaginary number."""
    return 0.0 if intercept >= -2 * error else max(-intercept / gain, darkest)


def _model(gain: float, intercept: float, offset: float, error: float, low: float) -> Poisson:
    """Return the model, with the standard error of sigma² and the lowest sample."""
    read = intercept + gain * offset
    rounding = 4 * np.finfo(np.float64).eps * abs(intercept)  # of the sum, whose terms nearly cancel
    if read < -OfTransfer.significant * error - rounding:
        raise InputError(f"offset: got {offset:g}, with which the variance in the dark were {read:.3g} ± {error:.2g}, "
                         f"expected an offset of about {-intercept / gain:.4g} or more")  # fmt: skip
    if read <= error and low >= offset:
        return Poisson(gain, 0.0, offset)
    # Samples below the offset are no counts: there is some read noise then.
    return Poisson(gain, math.sqrt(max(read, error, (0.1 * gain) ** 2)), offset)
