"""Power spectra of stationary noise: on a grid of frequencies, on coarser images, and as correlations of patches.

A spectrum has the shape (C, h, w) and the order of `numpy.fft`; its mean over the frequencies is the variance of the
noise of a sample. A signal has h = 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import OfSpectra

Spectrum = NDArray[np.float64]


def on_grid(spectrum: NDArray[Any]) -> Spectrum:
    """Return a spectrum (C, h, w) on the grid of `FREQUENCIES`: the mean over the cells, or interpolated."""
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
    """Return the spectrum of the noise in an image of half the size (`pyramid.down`): its lower half of frequencies."""
    for axis in (1, 2):
        size = spectrum.shape[axis]
        if size > 1:
            quarter = size // 4
            shifted = np.fft.fftshift(spectrum, axes=axis)
            kept = np.take(shifted, np.arange(quarter, quarter + size // 2), axis=axis)
            spectrum = np.fft.ifftshift(kept, axes=axis) / 2
    return spectrum


def taken_over(size: int) -> NDArray[np.float64]:
    """Return for the frequencies of a fine image which share comes from the coarse one: 1 at the lowest, 0 from 1/2."""
    share = 4 * np.abs(np.fft.fftfreq(size))  # of the highest frequency of the coarse image
    return np.asarray(fade(share) if size > 1 else np.ones(1))


def fade(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return a weight that falls from 1 to 0 between `TAKEN` and 1."""
    return np.asarray(0.5 - 0.5 * np.cos(np.pi * np.clip((1 - share) / (1 - OfSpectra.taken), 0, 1)))


def remaining(spectrum: Spectrum) -> Spectrum:
    """Return the spectrum of what is left of the noise when low frequencies come from a coarser image."""
    gain = taken_over(spectrum.shape[1])[:, None] * taken_over(spectrum.shape[2])
    return np.asarray(spectrum * ((1 - gain) ** 2 + OfSpectra.left * gain**2))


def levels_for(spectrum: Spectrum, most: int) -> int:
    """Return how many coarser images it takes until noise is no longer stronger at low frequencies than at high ones.

    One more for each time that the lower half of the frequencies holds more than 0.65 of the power (white noise has a
    quarter of it there).
    """
    total, count = spectrum.sum(axis=0, keepdims=True), 0
    while count < most:
        half = coarser(total)
        if half.mean() < 0.65 ** (np.count_nonzero(np.array(total.shape[1:]) > 1) / 2) * total.mean():
            break
        total, count = half, count + 1
    return count


def correlation(spectrum: Spectrum) -> Spectrum:
    """Return the correlation (C, 2a+1, 2b+1) of two samples by their offset, 0 in the middle; constant for no noise."""
    values = np.real(np.fft.ifft2(spectrum))
    first = values[:, :1, :1]
    values = np.fft.fftshift(np.where(first > 0, values / np.where(first > 0, first, 1), 0), axes=(1, 2))
    # An even axis has an offset of half its length once only.
    return values[:, (values.shape[1] > 1) :, (values.shape[2] > 1) :]


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
