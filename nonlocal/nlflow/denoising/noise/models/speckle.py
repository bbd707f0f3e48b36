"""Speckle."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.denoising.noise import spectra
from nlflow.denoising.noise.figures import OfSpeckle
from nlflow.denoising.noise.models.base import Array, Noise, Reduction, refuse_negative
from nlflow.denoising.noise.models.gaussian import GaussianNoise, checked_spectrum
from nlflow.errors import check_number, checked_call

_INTENSITIES: Final = "intensities >= 0, as speckle is in proportion to them; subtract the offset of the detector first"

Floats = NDArray[np.float64]
_MOST: Final = math.log(np.finfo(np.float64).max) / 2  # whose exponential is a number


@checked_call
@underflowing
@dataclass(frozen=True)
class Speckle(Noise):
    """Intensities z = x g with g of a gamma law of mean 1 and variance 1 / looks; or amplitudes, roots of such.

    Parameters
    ----------
    looks : float
        Shape of the gamma law, > 0: of how many independent exponential intensities a sample is the mean. 1 for fully
        developed speckle.
    amplitude : bool
        Whether z is the root of an intensity: g is then the root of a gamma variable, of mean 1 too.
    spectrum : array of shape (h, w) or (C, h, w), for signals (n,) or (C, 1, n), optional
        Power of the noise by frequency, in the units of `reduce` and of any scale, as that of `GaussianNoise`; white
        where it is not given.

    Raises
    ------
    InputError
        For a number of looks that is not finite and > 0, and for a spectrum that `GaussianNoise` refuses.

    Notes
    -----
    With m the local mean, under a Gaussian of a few samples, `reduce` returns

        D = log m + ((z / m)^p / e - 1) / p + w (E[g^(p + 1)] / e - 1),      e = E[g^p],

    p = 1/3 for intensities and 2/3 for amplitudes. w is the weight of a sample in m; with a spectrum, the sum of all
    weights, each times its correlation with that sample. Where m is about x, D has a mean of about log x, and nearly
    Gaussian noise of standard deviation `stable_sigma`.

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

    looks: float = field(default=1.0, metadata={"minimum": 0, "strict": True, "hint": "1 / the variance of z / x"})
    amplitude: bool = False
    spectrum: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_spectrum(self)

    @property
    def stable_sigma(self) -> float:
        """Standard deviation of the noise after `reduce`."""
        if self.looks > OfSpeckle.many:
            return 1 / math.sqrt(self.looks) / self._root_of
        return math.sqrt(self._moment(2 * self._power) / self._moment(self._power) ** 2 - 1) / self._power

    @property
    def _root_of(self) -> int:
        return 2 if self.amplitude else 1

    @property
    def _power(self) -> float:
        return OfSpeckle.power * self._root_of

    def _moment(self, power: float) -> float:
        own = gamma_moment(self.looks, power / self._root_of)
        return float(own / gamma_moment(self.looks, 1 / self._root_of) ** power)

    def _noisy(self, samples: Array, rng: np.random.Generator) -> Array:
        """Return a picture with speckle; negative intensities are refused."""
        refuse_negative(samples, _INTENSITIES, "clean")
        law = _gamma(self.looks, self.spectrum, samples.shape, rng) ** (1 / self._root_of)
        return np.asarray(samples * law / gamma_moment(self.looks, 1 / self._root_of))

    def describe(self) -> str:
        of = "amplitudes, the roots of intensities, with " if self.amplitude else ""
        return f"{of}{_looks(self)}, in proportion to the intensity"

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """See the notes.

        Raises
        ------
        InputError
            For negative samples, and a spectrum that does not fit.
        """
        rest = _rest(GaussianNoise(self.stable_sigma, self.spectrum), samples)
        absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
        refuse_negative(samples[~absent], _INTENSITIES)
        z = np.where(absent[..., None], 0.0, samples.astype(np.float64))
        power, root = self._power, self._moment(self._power)
        mean = local_intensity(z, absent)
        own, _ = _own_weights(absent.shape, self.spectrum)
        where = np.log(mean)
        stable = where + ((z / mean) ** power / root - 1) / power + own * (self._moment(power + 1) / root - 1)
        scale = float(mean.max())
        relative = mean / scale

        def back(u: Array) -> Array:
            ratio = np.maximum(1 + power * (np.asarray(u, np.float64) - where), 0) ** (1 / power)
            return np.asarray(scale * (relative * ratio), dtype=u.dtype)

        return Reduction(stable.astype(samples.dtype), back, missing, rest)

    def scaled(self, factor: float) -> Self:
        """Return speckle of looks / factor²: `factor` times the standard deviation, of amplitudes approximately."""
        factor = check_number("factor", factor, minimum=0, strict=True, hint="speckle of infinitely many looks is none")
        return replace(self, looks=self.looks / factor / factor)


@checked_call
@underflowing
@dataclass(frozen=True)
class LogSpeckle(Noise):
    """Logarithms of speckle, z = x + scale (log g - E[log g]), g of a gamma law: decibels, as ultrasound shows them.

    Parameters
    ----------
    scale : float
        Units of the input for a factor e of the intensity, > 0: 4.34 for decibels; 18.5 for 60 dB in 256 grey levels.
    looks : float
        Shape of the gamma law, > 0; 1 for fully developed speckle.
    spectrum : array of shape (h, w) or (C, h, w), for signals (n,) or (C, 1, n), optional
        As that of `Speckle`.

    Raises
    ------
    InputError
        As `Speckle`.

    Notes
    -----
    The noise is skewed: the logarithm of nearly nothing is a black dot. `reduce` makes such dots less deep. With
    y = z / scale, m its local mean under a Gaussian of a few samples, and M = m - E[log g],

        D = M + (exp(p (y - M)) / E[g^p] - 1) / p + E[log g] + b,      p = 1/3,

    has nearly Gaussian noise of standard deviation `Speckle.stable_sigma`, and the mean of y where x is constant; b
    makes up for the noise that m shares with y. `reduce` returns scale D. So x is the mean of what was recorded;
    the logarithm of the mean intensity is higher by -scale E[log g], 2.5 dB for one look.

    References
    ----------
    Goodman 1976 (doi 10.1364/JOSA.66.001145); Wilson and Hilferty 1931 (doi 10.1073/pnas.17.12.684).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import LogSpeckle
    >>> noisy = LogSpeckle(4.34).sample(np.full((100, 100), 50.0), rng=0)
    >>> even = LogSpeckle(4.34).reduce(noisy[..., None]).samples
    >>> bool(noisy.min() < even.min() - 10), bool(abs(np.mean(even) - 50) < 0.2)
    (True, True)
    """

    kind: ClassVar[str] = "log-speckle"

    amount: ClassVar[str] = "scale"

    scale: float = field(metadata={"minimum": 0, "strict": True, "hint": "units for a factor e of the intensity"})
    looks: float = field(default=1.0, metadata={"minimum": 0, "strict": True, "hint": "1 for a single look"})
    spectrum: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_spectrum(self)

    @property
    def _mean(self) -> float:
        from scipy.special import digamma

        return float(digamma(self.looks)) - math.log(self.looks)

    def _noisy(self, samples: Array, rng: np.random.Generator) -> Array:
        law = np.log(np.maximum(_gamma(self.looks, self.spectrum, samples.shape, rng), np.finfo(np.float64).tiny))
        return np.asarray(samples + self.scale * (law - self._mean))

    def describe(self) -> str:
        return f"logarithms of {_looks(self)}: sigma {self.scale * math.sqrt(_trigamma(self.looks)):.3g}"

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """See the notes of the class."""
        from scipy.special import digamma

        rest = _rest(GaussianNoise(self.scale * Speckle(self.looks).stable_sigma, self.spectrum), samples)
        power = OfSpeckle.power
        absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
        y = np.where(absent[..., None], 0.0, samples.astype(np.float64) / self.scale)
        own, shared = _own_weights(absent.shape, self.spectrum)
        bias = own * float(digamma(self.looks + power) - digamma(self.looks))
        bias -= shared * power / 2 * _trigamma(self.looks)
        level = _local_mean(y, absent) - self._mean
        ratio = np.exp(np.minimum(power * (y - level), _MOST)) / gamma_moment(self.looks, power)
        even = self.scale * (level + (ratio - 1) / power + self._mean + bias)
        return Reduction(even.astype(samples.dtype), missing=missing, rest=rest)


def _rest(noise: GaussianNoise, samples: Array) -> GaussianNoise:
    """Return the noise that is left in samples (..., C), or refuse samples of which it is not."""
    noise.powers(samples.shape[-1], samples.ndim - 1)
    return noise


def _check_spectrum(noise: Speckle | LogSpeckle) -> None:
    if noise.spectrum is not None:
        object.__setattr__(noise, "spectrum", checked_spectrum(noise.spectrum))


def _looks(noise: Speckle | LogSpeckle) -> str:
    """Return the words for its looks and its neighbours."""
    far = "" if noise.spectrum is None else f" over about {GaussianNoise(1.0, noise.spectrum).range():.0f} pixels"
    return f"speckle of {noise.looks:.3g} look{'s' if noise.looks != 1 else ''}{far}"


def _gamma(looks: float, spectrum: Any, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Return samples (..., C) of a gamma law of mean 1; correlated ones by way of normal ones of this spectrum."""
    from scipy.special import gammaincinv, ndtr

    if spectrum is None:
        return rng.gamma(looks, 1 / looks, shape)
    normal = GaussianNoise(1.0, spectrum).sample(np.zeros(shape), rng=rng, channel_axis=-1)
    return np.asarray(gammaincinv(looks, ndtr(normal)) / looks)


def _trigamma(looks: float) -> float:
    from scipy.special import polygamma

    return float(polygamma(1, looks))


def gamma_moment(looks: float, power: float) -> float:
    from scipy.special import gammaln

    if looks > OfSpeckle.many:
        return 1 - power * (1 - power) / (2 * looks)
    return math.exp(float(gammaln(looks + power) - gammaln(looks)) - power * math.log(looks))


def _width(shape: tuple[int, ...]) -> tuple[list[int], float]:
    """Return the long axes of a picture, and the width of the Gaussian of a local mean."""
    long = [axis for axis, n in enumerate(shape) if n > 1]
    return long, OfSpeckle.width[max(len(long), 1)]


def _local_mean(z: Floats, absent: NDArray[np.bool_]) -> Floats:
    """Return the local mean of samples (..., C) that are not absent, which are 0."""
    from scipy.ndimage import gaussian_filter

    long, width = _width(absent.shape)
    widths = [width if axis in long else 0.0 for axis in range(z.ndim)]
    known = np.where(absent, 0.0, 1.0)[..., None]
    total, share = (gaussian_filter(a, widths, mode="reflect") for a in (z, known))
    return np.asarray(total / np.maximum(share, OfSpeckle.dark**2))


def local_intensity(z: Floats, absent: NDArray[np.bool_]) -> Floats:
    """Local mean, > 0."""
    scale = float(z.max()) or 1.0
    present = float((z / scale).sum()) / max(np.count_nonzero(~absent) * z.shape[-1], 1)
    floor = max(OfSpeckle.dark * present, np.finfo(np.float64).tiny)
    return np.asarray(scale * np.maximum(_local_mean(z / scale, absent), floor))


def _own_weights(shape: tuple[int, ...], spectrum: Any) -> tuple[float, float]:
    """Return the covariance of a sample with its local mean, and the variance of that, relative to its own."""
    long, width = _width(shape)
    each = 1 / (width * math.sqrt(2 * math.pi))
    if spectrum is None:
        return each ** len(long), (each / math.sqrt(2)) ** len(long)
    related = spectra.correlation(spectrum).mean(axis=0)
    places = [np.arange(n) - n // 2 for n in related.shape]

    def share(spread: float) -> float:
        rows, columns = (np.exp(-np.square(one / spread) / 2) for one in places)
        weights = rows[:, None] * columns
        return float((weights * related).sum()) / (spread * math.sqrt(2 * math.pi)) ** len(long)

    return share(width), share(math.sqrt(2) * width)
