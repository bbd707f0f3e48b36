"""Noise that is strong at low frequencies is met on coarser images first, where it is nearly white.

An image of half the size holds the lower half of the frequencies. What its flow takes out as noise is taken out of the
finer image, frequencies near the limit less than lower ones, and the flow of the finer image removes the rest. Noise
whose low frequencies reach farther than a patch cannot be told from the picture within one.

Coarse to fine as in Lebrun, Colom and Morel, "The Noise Clinic", IPOL 2015 (doi 10.5201/ipol.2015.125); the gradual
recomposition follows Facciolo, Pierazzo and Morel, "Conservative scale recomposition for multiscale denoising", SIAM J.
Imaging Sci. 2017 (doi 10.1137/17M1111826).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise import spectra
from nlflow.denoising.noise.figures import OfSpectra

Array = NDArray[Any]


def down(image: Array) -> Array:
    """Return an image (..., C) of half the size: the lower half of its cosine frequencies. O(N log N)."""
    from scipy.fft import dctn, idctn

    axes = halved(image.shape)
    size = tuple((n + 1) // 2 if axis in axes else n for axis, n in enumerate(image.shape))
    lower = dctn(image, axes=axes, norm="ortho")[tuple(slice(0, n) for n in size)]
    scale = math.sqrt(math.prod(size) / math.prod(image.shape))
    return np.asarray(idctn(lower, axes=axes, norm="ortho") * scale)


def up(image: Array, shape: tuple[int, ...]) -> Array:
    """Return an image in the size of the finer one, its high frequencies faded out. O(N log N)."""
    from scipy.fft import dctn, idctn

    axes = halved(shape)
    spectrum = dctn(image, axes=axes, norm="ortho") * math.sqrt(math.prod(shape) / math.prod(image.shape))
    for axis in axes:
        gain = spectra.fade(np.arange(image.shape[axis]) / image.shape[axis])
        spectrum = spectrum * np.expand_dims(gain, tuple(a for a in range(image.ndim) if a != axis)).astype(image.dtype)
    return np.asarray(idctn(np.pad(spectrum, [(0, n - m) for n, m in zip(shape, image.shape, strict=True)]),
                            axes=axes, norm="ortho"))  # fmt: skip


def halved(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes of an image (..., C) that are halved: all but the channels and those of one sample."""
    return tuple(axis for axis, n in enumerate(shape[:-1]) if n > 1)


def coarse_to_fine(
    f: Array,
    spectrum: spectra.Spectrum,
    strength: Array,
    levels: int,
    run: Callable[[Array, spectra.Spectrum, Array, int], Array],
) -> Array:
    """Return the estimate of an image whose low frequencies come from coarser ones.

    Parameters
    ----------
    f : array of shape (..., C)
    spectrum : array of shape (C, h, w)
        Of its noise, see `nlflow.denoising.noise.spectra`.
    strength : array of shape (..., C) or (..., 1)
        Variance of the noise relative to its mean.
    levels : int
        Coarser images, at most; fewer for a small image.
    run : callable
        Returns the estimate of an image with the spectrum and the relative variance of its noise, and the number of its
        level (0 for the image itself).
    """
    return _estimate(f, spectrum, strength, (0, levels_within(f.shape, levels)), run)


def levels_within(shape: tuple[int, ...], levels: int) -> int:
    """Return how many times an image (..., C) can be halved, at most `levels`."""
    least = min((shape[axis] for axis in halved(shape)), default=0)
    return max(k for k in range(levels + 1) if k == 0 or least >= OfSpectra.least << k)


def _estimate(
    f: Array, spectrum: spectra.Spectrum, strength: Array, level: tuple[int, int],
    run: Callable[[Array, spectra.Spectrum, Array, int], Array],
) -> Array:  # fmt: skip
    now, last = level
    if now < last:
        half = down(f)
        weaker = np.maximum(down(strength), 0.05)  # the cosine transform rings below 0
        found = _estimate(half, spectra.coarser(spectrum), weaker, (now + 1, last), run)
        f = (f - up(half - found, f.shape)).astype(f.dtype)
        spectrum = spectra.remaining(spectrum)
    return run(f, spectrum, strength, now)
