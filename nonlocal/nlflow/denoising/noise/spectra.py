"""Spectra of noise, and noise of low frequencies met on coarser images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.backends.threads import cores
from nlflow.denoising.noise import spectra
from nlflow.denoising.noise.figures import OfSpectra
from nlflow.errors import InputError, check_floats, check_integer, check_numpy

Spectrum = NDArray[np.float64]
Array = NDArray[Any]


def on_grid(spectrum: NDArray[Any]) -> Spectrum:
    """Return a spectrum (C, h, w) on the grid of 64 frequencies: the mean over the cells, or interpolated."""
    result = np.asarray(spectrum, np.float64)
    for axis in (1, 2):
        result = _axis_on_grid(result, axis)
    return result


def _axis_on_grid(spectrum: Spectrum, axis: int) -> Spectrum:
    size = spectrum.shape[axis]
    if size in (1, OfSpectra.frequencies):
        return spectrum
    moved = np.moveaxis(spectrum, axis, -1)
    if size < OfSpectra.frequencies:  # linear and periodic
        places = np.arange(OfSpectra.frequencies) * size / OfSpectra.frequencies
        below = places.astype(int)
        part = places - below
        mixed = moved[..., below] * (1 - part) + moved[..., (below + 1) % size] * part
    else:
        cells = np.rint(np.arange(size) * OfSpectra.frequencies / size).astype(int) % OfSpectra.frequencies
        mixed = np.stack([moved[..., cells == k].mean(axis=-1) for k in range(OfSpectra.frequencies)], axis=-1)
    return np.ascontiguousarray(np.moveaxis(mixed, -1, axis))


def coarser(spectrum: Spectrum) -> Spectrum:
    """Return the spectrum (C, h, w) of the noise in an image of half the size: its lower half of frequencies."""
    spectrum = check_floats("spectrum", spectrum, ndim=3)
    for axis in (1, 2):
        size = spectrum.shape[axis]
        if size > 1:
            first = size // 2 - size // 4
            shifted = np.fft.fftshift(spectrum, axes=axis)
            kept = np.take(shifted, np.arange(first, first + size // 2), axis=axis)
            spectrum = np.fft.ifftshift(kept, axes=axis) / 2
    return spectrum


def taken_over(size: int) -> NDArray[np.float64]:
    """Return for the frequencies of a fine image which share comes from the coarse one."""
    share = 4 * np.abs(np.fft.fftfreq(size))  # of the highest frequency of the coarse image
    return np.asarray(fade(share) if size > 1 else np.ones(1))


def fade(share: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(0.5 - 0.5 * np.cos(np.pi * np.clip((1 - share) / (1 - OfSpectra.taken), 0, 1)))


def remaining(spectrum: Spectrum) -> Spectrum:
    """Return the spectrum (C, h, w) of what is left of the noise when low frequencies come from a coarser image."""
    spectrum = check_floats("spectrum", spectrum, ndim=3)
    gain = taken_over(spectrum.shape[1])[:, None] * taken_over(spectrum.shape[2])
    return np.asarray(spectrum * ((1 - gain) ** 2 + OfSpectra.left * gain**2))


def levels_for(spectrum: Spectrum, most: int) -> int:
    """Return how many coarser images it takes until noise is not stronger at low frequencies than at high ones."""
    total, count = spectrum.sum(axis=0, keepdims=True), 0
    while count < most:
        half = coarser(total)
        if half.mean() < 0.65 ** (np.count_nonzero(np.array(total.shape[1:]) > 1) / 2) * total.mean():
            break
        total, count = half, count + 1
    return count


def correlation(spectrum: Spectrum) -> Spectrum:
    """Return the correlation (C, 2a+1, 2b+1) of two samples by their offset, 0 in the middle; 0 for no noise."""
    values = np.real(np.fft.ifft2(check_floats("spectrum", spectrum, ndim=3)))
    first = values[:, :1, :1]
    values = np.fft.fftshift(np.where(first > 0, values / np.where(first > 0, first, 1), 0), axes=(1, 2))
    # An even axis has an offset of half its length once only.
    return values[:, 1 - values.shape[1] % 2 :, 1 - values.shape[2] % 2 :]


def autocorrelation(planes: Sequence[Array]) -> tuple[Array, Array, Array]:
    """Return sums of products of samples of planes (H, W), 0 beyond their edges, with those farther on."""
    from scipy.fft import irfft2, next_fast_len, rfft2

    whole = [next_fast_len(2 * size, real=True) for size in planes[0].shape]
    sums = np.asarray(sum(irfft2(np.square(np.abs(rfft2(plane, whole))), whole) for plane in planes))
    rows, columns = (np.abs(np.fft.fftfreq(size, 1 / size)) for size in whole)
    return sums, rows[:, None], columns


def error_of_correlations(alike: Array, near: NDArray[np.bool_], size: int) -> float:
    """Return the standard error of correlations of noise beyond its reach `near` (Bartlett, 1946)."""
    return float(np.sqrt(np.square(alike[near]).sum() / size))


def sampled(spectrum: Spectrum, shape: tuple[int, int], rng: np.random.Generator) -> Spectrum:
    """Return noise (C, H, W) with this spectrum, periodic in the image."""
    white = rng.standard_normal((len(spectrum), *shape))
    full = np.real(np.fft.ifft2(spectrum))
    # The covariance as a function of the offset, laid out for the larger image.
    covariance = np.zeros((len(spectrum), *shape))
    offsets = [np.rint(np.fft.fftfreq(n) * n).astype(int) for n in full.shape[1:]]
    rows, columns = (o[np.abs(o) <= n // 2] for o, n in zip(offsets, shape, strict=True))
    covariance[:, rows[:, None] % shape[0], columns % shape[1]] = full[:, rows[:, None], columns]
    power = np.maximum(np.real(np.fft.fft2(covariance)), 0)
    wanted, got = spectrum.mean(axis=(1, 2)), power.mean(axis=(1, 2))
    power *= (wanted / np.where(got > 0, got, 1))[:, None, None]
    return np.real(np.fft.ifft2(np.fft.fft2(white) * np.sqrt(power)))


def down(image: Array) -> Array:
    """Return an image (..., C) of half the size: the lower half of its cosine frequencies. O(N log N)."""
    from scipy.fft import dctn, idctn

    image = check_numpy("image", image, ndim=(2, 3, 4), hint="channels last")
    axes = halved(image.shape)
    size = tuple((n + 1) // 2 if axis in axes else n for axis, n in enumerate(image.shape))
    lower = dctn(image, axes=axes, norm="ortho", workers=cores())[tuple(slice(0, n) for n in size)]
    scale = math.sqrt(math.prod(size) / math.prod(image.shape))
    return np.asarray(idctn(lower, axes=axes, norm="ortho", workers=cores()) * scale)


def up(image: Array, shape: tuple[int, ...]) -> Array:
    """Return an image in the size of the finer one, its high frequencies faded out. O(N log N)."""
    from scipy.fft import dctn, idctn

    image = check_numpy("image", image, ndim=(2, 3, 4), hint="channels last")
    given: Any = shape
    known = isinstance(given, tuple) and len(given) == image.ndim
    if not known or any(check_integer("shape", n) < m for n, m in zip(shape, image.shape, strict=True)):
        raise InputError(f"shape: got {shape!r}, expected that of a finer image than one of shape {image.shape}")
    axes = halved(shape)
    spectrum = dctn(image, axes=axes, norm="ortho", workers=cores()) * math.sqrt(
        math.prod(shape) / math.prod(image.shape)
    )
    for axis in axes:
        gain = spectra.fade(np.arange(image.shape[axis]) / image.shape[axis])
        spectrum = spectrum * np.expand_dims(gain, tuple(a for a in range(image.ndim) if a != axis)).astype(image.dtype)
    wide = np.pad(spectrum, [(0, n - m) for n, m in zip(shape, image.shape, strict=True)])
    return np.asarray(idctn(wide, axes=axes, norm="ortho", overwrite_x=True, workers=cores()))


def halved(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis for axis, n in enumerate(shape[:-1]) if n > 1)


def coarse_to_fine(
    f: Array,
    spectrum: spectra.Spectrum,
    strength: Array,
    levels: int,
    run: Callable[[Array, spectra.Spectrum, Array, int], Array],
    level: tuple[int, int] | None = None,
) -> Array:
    """Return the estimate of an image whose low frequencies come from coarser ones.

    Parameters
    ----------
    f : array of shape (..., C)
    spectrum : array of shape (C, h, w)
        Of its noise, in the order of `numpy.fft`; the mean over the frequencies is the variance of a sample.
    strength : array of shape (..., C) or (..., 1)
        Variance of the noise relative to its mean.
    levels : int
        Coarser images, at most; fewer for a small image.
    run : callable
        Returns the estimate of an image with the spectrum and the relative variance of its noise, and the number of its
        level (0 for the image itself).
    level : pair of int, optional
        That of f, where f is one of the coarser images, and the last one.

    References
    ----------
    Lebrun, Colom and Morel 2015 (doi 10.5201/ipol.2015.125); gradual recomposition: Facciolo, Pierazzo and Morel 2017
    (doi 10.1137/17M1111826).
    """
    now, last = (0, levels_within(f.shape, levels)) if level is None else level
    if now < last:
        half = down(f)
        weaker = np.maximum(down(strength), 0.05)  # the cosine transform rings below 0
        found = coarse_to_fine(half, spectra.coarser(spectrum), weaker, levels, run, (now + 1, last))
        change = up(half - found, f.shape)
        f = np.subtract(f, change, out=change).astype(f.dtype, copy=False)  # the only one that is held from here on
        spectrum = spectra.remaining(spectrum)
    return run(f, spectrum, strength, now)


def levels_within(shape: tuple[int, ...], levels: int) -> int:
    least = min((shape[axis] for axis in halved(shape)), default=0)
    return max(k for k in range(levels + 1) if k == 0 or least >= OfSpectra.least << k)
