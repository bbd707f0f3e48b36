"""Speckle: noise of coherent light, sound and radar, in proportion to the intensity."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.denoising.noise.base import Array, Noise, Reduction
from nlflow.denoising.noise.estimation import estimate_sigmas
from nlflow.denoising.noise.figures import OfSpeckle
from nlflow.denoising.noise.gaussian import GaussianNoise
from nlflow.domains.samples import as_signal
from nlflow.errors import InputError, check_number


@underflowing
@dataclass(frozen=True)
class Speckle(Noise):
    """Intensities z = x g with g of a gamma law of mean 1 and variance 1 / looks.

    Parameters
    ----------
    looks : float
        Shape of the gamma law, > 0: of how many independent exponential intensities a sample is the mean. 1 for fully
        developed speckle.

    Raises
    ------
    InputError
        For a number that is not finite and > 0.

    Notes
    -----
    The plain way is the logarithm, which makes the noise additive, of standard deviation √(ψ'(looks)), and needs the
    correction exp(log looks - ψ(looks)). At few looks the logarithm of g has a heavy lower tail, so that an average of
    logarithms has up to 1.6 times the variance that it could have. `reduce` takes the logarithm of the local mean m
    alone (a Gaussian of a few samples) and a power of the ratio to it,

        D = log m + ((z / m)^p / e - 1) / p + p w / looks,      p = 1/3, e = E[g^p] = Γ(looks + p) / (Γ(looks) looks^p),

    w the weight of a sample in m. D is log x on average where m is about x, its noise is nearly Gaussian, of standard
    deviation `stable_sigma`, and errors of m count to second order only; their bias is the last term. With m known,
    x = m (1 + p (E[D] - log m))^(1/p) is exact, edges included.

    References
    ----------
    Goodman 1976 (doi 10.1364/JOSA.66.001145); Wilson and Hilferty 1931 (doi 10.1073/pnas.17.12.684).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import Speckle
    >>> noisy = Speckle(4).sample(np.full((100, 100), 50.0), rng=0)
    >>> found = Speckle(4).reduce(noisy[..., None])
    >>> bool(abs(np.std(found.samples) / Speckle(4).stable_sigma - 1) < 0.05)
    True
    >>> mean = np.full(found.samples.shape, np.mean(found.samples))
    >>> bool(abs(np.mean(found.back(mean)) - 50) < 1)
    True
    """

    kind: ClassVar[str] = "speckle"

    looks: float = 1.0

    def __post_init__(self) -> None:
        """Check the number."""
        looks = check_number("looks", self.looks, minimum=0, strict=True, hint="1 / the variance of z / x")
        object.__setattr__(self, "looks", looks)

    @property
    def stable_sigma(self) -> float:
        """Standard deviation of the noise in the units of `reduce`, without units."""
        return self._sigma

    @property
    def _root(self) -> float:
        """E[g^p]."""
        return _moment(self.looks, OfSpeckle.power)

    @property
    def _sigma(self) -> float:
        if self.looks > OfSpeckle.many:
            return 1 / math.sqrt(self.looks)
        return math.sqrt(_moment(self.looks, 2 * OfSpeckle.power) / self._root**2 - 1) / OfSpeckle.power

    def sample(self, clean: Any, *, rng: Any = None, channel_axis: int | None = None) -> Array:
        """Return a picture with speckle, each sample and channel by itself; negative intensities are refused."""
        samples, restore = as_signal(clean, channel_axis)
        _check_intensities(samples)
        law = np.random.default_rng(rng).gamma(self.looks, 1 / self.looks, samples.shape)
        return np.asarray(restore(samples.astype(np.float64) * law))

    def describe(self) -> str:
        """Return what this noise is, in a few words for people."""
        return f"speckle of {self.looks:.3g} look{'s' if self.looks != 1 else ''}, in proportion to the intensity"

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Make the noise additive and nearly Gaussian, of standard deviation `stable_sigma`.

        Parameters
        ----------
        samples : array of shape (..., C)
            Finite intensities >= 0, in the units of the input; one to three axes besides that of the channels.
        missing : bool array of shape (...), optional
            Samples that are missing already; their values do not matter.

        Returns
        -------
        Reduction
            `back` takes an estimate of the same shape.

        Raises
        ------
        InputError
            For negative intensities.
        """
        absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
        _check_intensities(samples[~absent])
        z = np.where(absent[..., None], 0.0, samples.astype(np.float64))
        mean, weight = _about(z, absent)
        shift = OfSpeckle.power * weight / self.looks
        stable = _transform(z, mean, self._root) + shift
        where = np.log(mean)
        scale = float(mean.max())
        relative = mean / scale

        def back(u: Array) -> Array:
            ratio = np.maximum(1 + OfSpeckle.power * (np.asarray(u, np.float64) - where), 0) ** (1 / OfSpeckle.power)
            return np.asarray(scale * (relative * ratio), dtype=u.dtype)

        return Reduction(stable.astype(samples.dtype), back, missing, GaussianNoise(self.stable_sigma))

    def scaled(self, factor: float) -> Self:
        """Return speckle of looks / factor², whose standard deviation is `factor` times as large."""
        factor = check_number("factor", factor, minimum=0, strict=True, hint="speckle of infinitely many looks is none")
        return replace(self, looks=self.looks / factor**2)


def _check_intensities(samples: Array) -> None:
    if samples.size and samples.min() < 0:
        raise InputError(
            f"image: got {np.count_nonzero(samples < 0)} negative value(s), the smallest {float(samples.min()):g}, "
            "expected intensities >= 0, as speckle is in proportion to them; subtract the offset of the detector first"
        )


def _moment(looks: float, power: float) -> float:
    """Return E[g^power] for a gamma law of mean 1."""
    from scipy.special import gammaln

    if looks > OfSpeckle.many:
        return 1 - power * (1 - power) / (2 * looks)
    return math.exp(float(gammaln(looks + power) - gammaln(looks)) - power * math.log(looks))


def _about(z: NDArray[np.float64], absent: NDArray[np.bool_]) -> tuple[NDArray[np.float64], float]:
    """Return the local mean of intensities (..., C), > 0, and the weight that a sample has in its own."""
    from scipy.ndimage import gaussian_filter

    long = [axis for axis, n in enumerate(absent.shape) if n > 1]
    width = OfSpeckle.width[max(len(long), 1)]
    scale = float(z.max()) or 1.0
    known: NDArray[np.float64] = np.where(absent, 0.0, 1.0)[..., None]
    widths = [width if axis in long else 0.0 for axis in range(z.ndim)]
    total, share = (np.asarray(gaussian_filter(a, widths, mode="reflect"), np.float64) for a in (z / scale, known))
    mean = total / np.maximum(share, 1e-6)
    floor = max(OfSpeckle.dark * float((z / scale).mean()) / float(known.mean()), np.finfo(np.float64).tiny)
    return scale * np.maximum(mean, floor), (1 / (width * math.sqrt(2 * math.pi))) ** len(long)


def _transform(z: NDArray[np.float64], mean: NDArray[np.float64], root: float) -> NDArray[np.float64]:
    """Return log x + noise: a power of the ratio to the local mean."""
    return np.asarray(np.log(mean) + ((z / mean) ** OfSpeckle.power / root - 1) / OfSpeckle.power)


def find_speckle(samples: Array, missing: NDArray[np.bool_] | None = None) -> Speckle | None:
    """Find speckle, and its looks, without knowing the clean picture.

    The noise of flat parts, in the units of `Speckle.reduce`, is the same at all intensities, and white. White noise
    falls there as 1 / intensity, counts as its root, a camera's noise between the two; the structure of clean pictures
    is neither the same nor white.

    Parameters
    ----------
    samples : array of shape (..., C)
        Finite; one to three axes besides that of the channels. Negative values are no intensities.
    missing : bool array of shape (...), optional
        Samples that are missing; their values do not matter.

    Returns
    -------
    Speckle or None
        None where there is none, and where intensities differ too little (by a factor of 1.7) or are too few (60 blocks
        of 8 x 8, of 16 in a signal) to know.

    Notes
    -----
    Cost O(N log N): a few times that of `estimate_sigma`.
    """
    absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
    present = samples[~absent]
    if present.size == 0 or present.min() < 0 or present.min() == present.max() or not np.isfinite(np.ptp(present)):
        return None
    z = np.where(absent[..., None], 0.0, samples.astype(np.float64)) / float(present.max())
    mean, _ = _about(z, absent)
    looks = 1.0
    for _ in range(OfSpeckle.passes):  # the transform hardly depends on the looks
        stable = np.where(absent[..., None], np.nan, _transform(z, mean, _moment(looks, OfSpeckle.power)))
        sigma = float(np.mean(estimate_sigmas(stable, absent)))
        if not _least_sigma() < sigma < Speckle(OfSpeckle.looks[0]).stable_sigma:
            return None
        looks = _looks_of(sigma)
    blocks = _Blocks.of(stable, np.where(absent[..., None], np.nan, mean))
    factor = blocks.factor(sigma)
    return None if factor is None else Speckle(_looks_of(sigma * factor))


def _least_sigma() -> float:
    return Speckle(OfSpeckle.looks[1]).stable_sigma


def _looks_of(sigma: float) -> float:
    """Return the looks whose noise has this standard deviation in the units of `reduce`; it falls with them."""
    from scipy.optimize import brentq

    ends = (math.log(OfSpeckle.looks[0]) - 1, math.log(OfSpeckle.looks[1]) + 1)
    return math.exp(brentq(lambda t: math.log(Speckle(math.exp(t)).stable_sigma / sigma), *ends))


@dataclass(frozen=True)
class _Blocks:
    """Blocks of an image: what they hold at three scales, a white noise the same at all, and their intensity."""

    high: NDArray[np.float64]
    middle: NDArray[np.float64]
    low: NDArray[np.float64]
    mean: NDArray[np.float64]

    @classmethod
    def of(cls, stable: NDArray[np.float64], mean: NDArray[np.float64]) -> _Blocks:
        """Cut samples (..., C) into blocks; those with a missing sample (NaN), and dark ones, are left out."""
        shape = [n for n in stable.shape[:-1] if n > 1]
        size = (1, OfSpeckle.side[1]) if len(shape) < 2 else (OfSpeckle.side[2], OfSpeckle.side[2])
        rows, columns = shape[-2:] if len(shape) > 1 else (1, math.prod(shape))
        # Slices and channels of a volume are pictures.
        planes = [np.moveaxis(a.reshape(-1, rows, columns, a.shape[-1]), -1, 0) for a in (stable, mean)]
        parts = [_cut(a.reshape(-1, rows, columns), size).reshape(-1, *size) for a in planes]
        fine, coarse = _haar(parts[0])
        coarser, coarsest = _haar(coarse)
        if size[0] == 1:
            energies = [(a**2).mean(axis=(1, 2)) for a in (fine[0], coarser[0], _haar(coarsest)[0][0])]
        else:
            energies = [sum((a**2).mean(axis=(1, 2)) for a in group) / len(group)
                        for group in (fine[2:], fine[:2], coarser)]  # fmt: skip
        level = parts[1].mean(axis=(1, 2))
        known = np.isfinite(energies[0]) & (level > OfSpeckle.dim * np.nanmean(mean))
        return cls(*(a[known] for a in (*energies, level)))

    def factor(self, sigma: float) -> float | None:
        """Return the noise of flat blocks in units of sigma, None where it is no speckle."""
        if len(self.mean) < OfSpeckle.least_blocks:
            return None
        noise, levels, ratios = [], [], []
        for part in np.array_split(np.argsort(self.mean), OfSpeckle.bins):
            # Chosen by their low frequencies, which in noise have nothing to do with the high ones.
            flat = part[np.argsort(self.low[part])[: max(len(part) // 5, 5)]]
            energy = float(self.high[flat].mean())
            if energy <= 0:
                return None
            noise.append(math.sqrt(energy) / sigma)
            levels.append(float(np.log(self.mean[flat]).mean()))
            ratios.append(math.sqrt(float(self.middle[flat].mean()) / energy))
        slope = np.polyfit(levels, np.log(noise), 1)[0] if levels[-1] > levels[0] else math.inf
        wide, even = levels[-1] - levels[0] > math.log(OfSpeckle.range), max(noise) < OfSpeckle.even * min(noise)
        if wide and even and abs(slope) < OfSpeckle.slope and float(np.median(ratios)) < OfSpeckle.white:
            return min(float(np.median(noise)), 1.0)
        return None


def _cut(planes: NDArray[np.float64], size: tuple[int, int]) -> NDArray[np.float64]:
    """Return planes (C, H, W) as blocks (n, *size); what is left over at the ends is left out."""
    count = [planes.shape[1] // size[0], planes.shape[2] // size[1]]
    whole = planes[:, : count[0] * size[0], : count[1] * size[1]]
    return whole.reshape(len(planes), count[0], size[0], count[1], size[1]).swapaxes(2, 3)


def _haar(blocks: NDArray[np.float64]) -> tuple[list[NDArray[np.float64]], NDArray[np.float64]]:
    """Return the details of one orthonormal Haar step (the diagonal one last), and the averages."""
    if blocks.shape[1] == 1:
        a, b = blocks[..., ::2], blocks[..., 1::2]
        return [(a - b) / math.sqrt(2)], (a + b) / math.sqrt(2)
    a, b, c, d = (blocks[:, i::2, j::2] for i in (0, 1) for j in (0, 1))
    return [(a + b - c - d) / 2, (a - b + c - d) / 2, (a - b - c + d) / 2], (a + b + c + d) / 2
