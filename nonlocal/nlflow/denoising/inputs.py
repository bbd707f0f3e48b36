"""What a caller may say about an image: where samples are missing, how strong the noise is, which channels it has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import on_host
from nlflow.denoising.noise import GaussianNoise, Noise, spectra
from nlflow.denoising.noise.base import Reduction, same
from nlflow.denoising.noise.estimation import channel_levels, estimate_sigmas
from nlflow.denoising.noise.gaussian import OPPONENT, smoothed
from nlflow.domains.samples import as_signal, exact_means, range_of
from nlflow.errors import InputError, check_array, check_floats, check_number

Array = NDArray[Any]
LEVELS = 2  # coarser images, at most
TELL_MISSING = "tell with mask which samples are missing"  # ends messages about what is no number
Estimate = Callable[[Array, NDArray[np.bool_] | None], NDArray[np.float64]]
#: A sample that is told to be free of noise counts as one with this part of the mean variance, so that all is regular.
LEAST_VARIANCE = 1e-4
# Beyond this ratio of range to noise no two patches are ever alike, and squares would leave the range of float32.
_NOISELESS = 1e12
# Noise assumed for filling in where there is none, of the standard deviation of the samples.
_FILLING = 0.08


@dataclass(frozen=True)
class Coloured:
    """Noise that has a spectrum or follows the intensity, in units of `Observation.level`.

    Attributes
    ----------
    axes : array of shape (C, C)
        Channels along which the noise is independent, as rows.
    spectrum : array of shape (C, h, w)
        Its power along them.
    strength : array of shape (..., 1)
        Its variance relative to that of the spectrum.
    levels : int
        Coarser images on which low frequencies are met.
    """

    axes: Array
    spectrum: spectra.Spectrum
    strength: Array
    levels: int


@dataclass(frozen=True)
class Observation:
    """Samples in units of their noise, and the way back.

    Attributes
    ----------
    f : array of shape (..., C)
        About 0, channel by channel in units of its noise; what is missing holds 0.
    variance : array of shape (...), or None
        Relative variance of the noise where it varies, of mean 1.
    missing : bool array of shape (...), or None
    offset, level : array of shape (C,)
        What was subtracted, and the noise that was divided by.
    estimated : bool
        Whether the noise was estimated.
    idle : str
        Why there is nothing to do; empty when there is.
    exact : bool array, or None
        Where samples are known to be free of noise and are kept; of a shape that broadcasts to (..., C).
    coloured : Coloured, optional
        The noise, where it is not white.
    reduction : callable
        The way back from the units in which the noise is Gaussian.
    reduced : array of shape (..., C), or None
        The samples in these units, where a model changed them.
    """

    f: Array
    variance: Array | None
    missing: NDArray[np.bool_] | None
    offset: Array
    level: Array
    estimated: bool
    idle: str
    exact: NDArray[np.bool_] | None
    coloured: Coloured | None = None
    reduction: Callable[[Array], Array] = same
    reduced: Array | None = None

    def back(self, u: Array) -> Array:
        """Return an estimate in the units of the samples."""
        return self.reduction((u * self.level + self.offset).astype(self.f.dtype))


def check_patch(patch_size: int | None, spatial: tuple[int, ...]) -> None:
    """Refuse patches that hold no more of an image than smaller ones, before their margins are made."""
    most = 2 * max(spatial, default=1) - 1
    if patch_size is not None and patch_size > most:
        raise InputError(
            f"patch_size: got {patch_size} for a shape of {spatial}, expected at most {most}, which holds all of it"
        )


def spatial_shape(shape: tuple[int, ...], channel_axis: int | None) -> tuple[int, ...]:
    """Return the shape of an image without its channels."""
    return shape if channel_axis is None else tuple(np.delete(shape, channel_axis).tolist())


def shape_of(name: str, value: Any) -> tuple[int, ...]:
    """Return the shape of an array, or of a sequence that is one."""
    try:
        return np.shape(value)
    except ValueError:  # nested sequences of unequal lengths
        check_array(name, value)
        raise


def place(name: str, value: Any, shape: tuple[int, ...], channel_axis: int | None) -> NDArray[np.bool_]:
    """Return a mask as a bool array of the spatial shape; a sample counts where any channel does."""
    shape_of(name, value)
    mask, spatial = on_host(value), spatial_shape(shape, channel_axis)
    if mask.dtype.kind != "b":
        raise InputError(f"{name}: got values of type {mask.dtype}, expected booleans; compare first, e.g. mask > 0")
    if mask.shape == spatial:
        return mask
    if channel_axis is not None and mask.shape == shape:
        return np.asarray(mask.any(axis=channel_axis))
    raise InputError(f"{name}: got shape {mask.shape}, expected {spatial}, one boolean for each sample")


def opened(image: Any, channel_axis: int | None, mask: Any) -> tuple[Array, NDArray[np.bool_] | None, Any]:
    """Return the samples (..., C), where they are missing, and how a result gets the shape of the input."""
    missing = None
    given = image
    if mask is not None:
        given, missing = _without_missing(image, mask, channel_axis)
    samples, restore = as_signal(given, channel_axis, TELL_MISSING)
    return samples, missing, restore


def of_channels(sigma: Any, which: NDArray[np.bool_], channel_axis: int | None, shape: tuple[int, ...]) -> Any:
    """Return what `sigma` says of some of the channels of an image of a shape; one number, and a map, are of all."""
    given = () if sigma is None else shape_of("sigma", sigma)
    if given == (len(which),) and channel_axis is not None and given != spatial_shape(shape, channel_axis):
        return np.asarray(sigma)[which]
    return np.compress(which, np.asarray(sigma), channel_axis) if given == shape else sigma


def without_constant(
    samples: Array, missing: NDArray[np.bool_] | None, live: NDArray[np.bool_], restore: Callable[[Array], Any]
) -> tuple[Array, Callable[[Array], Any]]:
    """Return the channels of samples (..., C) that vary, and how a result of them gets the others and its shape."""
    present = samples.reshape(-1, len(live)) if missing is None else samples[~missing]
    constant = present[0]

    def whole(u: Array) -> Any:
        result = np.empty((*u.shape[:-1], len(live)), u.dtype)
        result[..., live], result[..., ~live] = u, constant[~live]
        return restore(result)

    return np.ascontiguousarray(samples[..., live]), whole


def observed(
    samples: Array,
    missing: NDArray[np.bool_] | None,
    sigma: Any,
    model: Noise | None,
    channel_axis: int | None,
    estimate: Estimate = estimate_sigmas,
) -> Observation:
    """Return the observation of samples (..., C) with white noise of a strength, or with a model of their noise."""
    model = None if model is None else model.separated()
    reduction = Reduction(samples, missing=missing) if model is None else model.reduce(samples, missing)
    signal, missing, rest = reduction.samples, reduction.missing, reduction.rest
    changed = None if signal is samples else signal
    if rest is not None:
        if sigma is not None:
            raise InputError(f"sigma: got a value beside {type(model).__name__}, which says how strong the noise is; "
                             "leave one of them out")  # fmt: skip
        if signal.ndim == 4 and not rest.is_white:
            rest.powers(signal.shape[-1], 3)  # correlated noise is refused
            sigma = rest.along(signal)
        elif not rest.is_white:
            return replace(_coloured(signal, missing, rest, reduction.back), reduced=changed)
        else:
            sigma = rest.sigma
    present = signal if missing is None else signal[~missing]
    levels, variance, exact = _levels(sigma, signal, missing, channel_axis, estimate)
    exact = exact if exact is not None and exact.any() else None
    present = present.reshape(-1, signal.shape[-1])
    spans = np.array([float(range_of(present[:, c])) for c in range(signal.shape[-1])])
    levels, exact = noiseless(levels, spans, exact)
    span, strongest = float(spans.max()), float(levels.max())
    idle = idle_for(span, strongest)
    if missing is not None and idle and span > 0:
        if math.isinf(span):
            raise InputError("image: got a range that overflows, with samples missing; divide it by a number first")
        idle, exact = "", np.ones(levels.shape, bool)
        with np.errstate(over="ignore"):
            spread = float(present.std(dtype=np.float64))
        if math.isinf(spread):
            raise InputError("image: got values whose squares overflow; divide it by a number first")
        levels = np.full_like(levels, spread * _FILLING)
    offset = np.zeros(len(levels)) if idle else exact_means(present)
    scale = scale_for(levels)
    f = np.zeros_like(signal) if idle else in_units(signal, offset, scale)
    if missing is not None:
        f[missing] = 0
    return Observation(
        f, variance, missing, offset, levels if idle else scale, sigma is None, idle, exact,
        reduction=reduction.back, reduced=changed,
    )  # fmt: skip


def _coloured(
    signal: Array, missing: NDArray[np.bool_] | None, noise: GaussianNoise, back: Callable[[Array], Array]
) -> Observation:
    """Return the observation of samples whose noise is not white, in units of its root mean square."""
    channels, dimension = signal.shape[-1], signal.ndim - 1
    counted = noise.counted(channels, dimension)
    unit = math.sqrt(float(noise.powers(channels, dimension).mean()))
    present = (signal if missing is None else signal[~missing]).reshape(-1, channels)
    span = range_of(present)
    offset, levels = exact_means(present), np.full(channels, unit)
    idle = idle_for(span, unit)
    if idle:
        return Observation(np.zeros_like(signal), None, missing, np.zeros(channels), levels, False, idle, None)
    f = in_units(signal, offset, levels)
    if missing is not None:
        f[missing] = 0
    axes = OPPONENT if noise.opponent else decorrelated(f)
    spectrum = (counted if noise.opponent else np.tensordot(axes**2, counted, axes=1)) / unit**2
    strength = np.square(noise.relative(smoothed(signal)))[..., None]
    levels_wanted = LEVELS if noise.compressed else spectra.levels_for(spectrum, LEVELS)
    found = Coloured(axes, spectrum, np.maximum(strength, LEAST_VARIANCE), levels_wanted)
    return Observation(f, None, missing, offset, levels, False, "", None, found, reduction=back)


def noiseless(
    levels: Array, spans: Array, exact: NDArray[np.bool_] | None = None
) -> tuple[Array, NDArray[np.bool_] | None]:
    """Return levels with 0 for channels whose noise no sample shows, and where samples are exact.

    In units of such a noise samples have squares that overflow.
    """
    with np.errstate(over="ignore"):
        none = (levels > 0) & (levels * _NOISELESS < spans)
    if not none.any() or none.all():
        return levels, exact
    return np.where(none, 0.0, levels), none if exact is None else exact | none


def idle_for(span: float, strongest: float) -> str:
    """Return why there is nothing to do about samples of a range and a strongest noise; empty when there is."""
    if span == 0:
        return "the input is constant"
    if strongest == 0 or strongest * _NOISELESS < span:
        return f"there is no noise to remove (sigma={strongest:g})"
    return ""


def scale_for(levels: Array) -> Array:
    """Return what channels of this noise are divided by; those without noise count as ones with little."""
    strongest = float(levels.max())
    return np.where(levels > 0, levels, 1.0 if strongest == 0 else strongest * math.sqrt(LEAST_VARIANCE))


def in_units(signal: Array, offset: Array, scale: Array) -> Array:
    """Return samples (..., C) about 0 in units of their noise."""
    # In double precision, since an offset or a scale may be no number of the samples' precision.
    return np.asarray(((signal - offset) / scale).astype(signal.dtype))


def _without_missing(image: Any, mask: Any, channel_axis: int | None) -> tuple[Array, NDArray[np.bool_]]:
    """Return the input with 0 in place of what is missing, and where that is."""
    array = np.asarray(image)
    foreign = isinstance(image, np.ma.MaskedArray) or type(image).__module__.startswith("torch")
    if foreign or array.dtype.kind not in "biuf" or not array.ndim > (channel_axis is not None) or array.size == 0:
        return image, np.zeros(array.shape, bool)  # refused as any input of this kind
    if not isinstance(mask, str):
        missing = place("mask", mask, array.shape, channel_axis)
    elif mask == "nan":
        missing = place("mask", ~np.isfinite(array), array.shape, channel_axis)
    else:
        raise InputError(f"mask: got {mask!r}, expected booleans, True where a sample is missing, or 'nan'")
    if missing.all():
        raise InputError("mask: hides every sample; leave at least one")
    hidden = missing if channel_axis is None else np.expand_dims(missing, channel_axis)
    return np.where(hidden, array.dtype.type(0), array), missing


def _levels(
    sigma: Any, signal: Array, missing: NDArray[np.bool_] | None, channel_axis: int | None, estimate: Estimate
) -> tuple[NDArray[np.float64], Array | None, NDArray[np.bool_] | None]:
    """Return the noise of each channel (root mean square), its relative variance where it varies, and where it is 0."""
    channels, spatial = signal.shape[-1], signal.shape[:-1]
    if sigma is None:
        levels = channel_levels(estimate(signal, missing))
        return levels, None, levels == 0 if levels.any() else None
    hint = "the noise in the units of the input"
    if shape_of("sigma", sigma) == ():
        return np.full(channels, check_number("sigma", sigma, minimum=0, hint=hint)), None, None
    levels = check_floats("sigma", sigma)
    if levels.min() < 0:
        raise InputError(f"sigma: got {levels.min():g}, expected values >= 0, {hint}")
    if levels.shape == spatial:
        levels = np.broadcast_to(levels[..., None], signal.shape)
    elif levels.shape == (channels,) and channel_axis is not None:
        return levels, None, levels == 0
    elif channel_axis is not None and levels.ndim == signal.ndim:
        levels = np.moveaxis(levels, channel_axis, -1)
    if levels.shape != signal.shape:
        each = f", ({channels},) for one number a channel" if channel_axis is not None else ""
        raise InputError(
            f"sigma: got an array of shape {np.shape(sigma)}, expected a number, {spatial} for a map{each}"
        )
    present = levels.reshape(-1, channels) if missing is None else levels[~missing]
    if present.min() == present.max():
        return present[0].astype(np.float64), None, present[0] == 0
    squares = (present.astype(np.float64) ** 2).mean(axis=0)
    relative = np.mean(levels**2 / np.where(squares > 0, squares, 1), axis=-1)
    if missing is not None:
        relative = np.where(missing, 1.0, relative)
    return np.sqrt(squares), np.maximum(relative, LEAST_VARIANCE), levels == 0


def decorrelated(f: Array) -> Array:
    """Return an orthonormal transform (C, C) of channels that are alike: rows are the new channels.

    Three channels take the opponent colours (luminance, red - blue, green - magenta); otherwise the principal axes of
    the signal are taken.
    """

    def moments() -> Array:
        flat = f.reshape(-1, f.shape[-1]).astype(np.float64)
        return np.asarray(flat.T @ flat)

    return channels_for(f.shape[-1], moments)


def channels_for(count: int, moments: Callable[[], Array]) -> Array:
    """Return the new channels of `decorrelated` as rows, from the second moments (C, C) of all samples."""
    if count == 3:
        return np.asarray(OPPONENT)
    return np.asarray(np.linalg.eigh(moments())[1].T[::-1])
