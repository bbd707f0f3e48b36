"""Counts."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.denoising.noise.figures import OfCounts
from nlflow.denoising.noise.models.base import Array, Noise, Reduction
from nlflow.denoising.noise.models.gaussian import GaussianNoise
from nlflow.errors import InputError, check_numpy, checked_call

if TYPE_CHECKING:
    from scipy.interpolate import PchipInterpolator


class Evened(Noise):
    """Noise that a function of each sample makes nearly white, and of one strength."""

    dark: float

    @property
    @abstractmethod
    def even_sigma(self) -> float:
        """Sigma after it."""

    @abstractmethod
    def _even(self, values: Array) -> Floats:
        """Return the function of noisy samples."""

    @abstractmethod
    def _uneven(self, stable: Floats) -> Floats:
        """Return the samples without noise for which the function has this mean."""

    def stabilize(self, image: Any) -> Array:
        """Return samples whose noise has about the same strength everywhere.

        Parameters
        ----------
        image : array_like
            Any shape, in the units of the input.

        Returns
        -------
        array
            Same shape; float32 for float32, float64 for integers. Counts lose their units, and their noise is about 1;
            magnitudes keep them, and their noise is about `sigma`.

        Raises
        ------
        InputError
            For no samples, NaN and infinities, negative magnitudes, counts below `offset` where `sigma` is 0, and an
            unknown strength.
        """
        values = check_numpy("image", image)
        return np.asarray(self._even(values), dtype=values.dtype)

    def unstabilize(self, stable: Any) -> Array:
        """Return the samples without noise for expected values of the transform: the exact unbiased inverse.

        Parameters
        ----------
        stable : array_like
            Any shape: an estimate of the mean of `stabilize`.

        Returns
        -------
        array
            Same shape, in the units of the input; `offset` of counts, and 0 of magnitudes, where `stable` is below the
            mean of pure noise.

        Raises
        ------
        InputError
            For no samples, NaN and infinities, and an unknown strength.
        """
        values = check_numpy("stable", stable)
        return np.asarray(self._uneven(values.astype(np.float64)), dtype=values.dtype)

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Stabilize the samples."""
        known = self.completed(samples, missing)
        # What is missing may hold anything.
        values = samples if missing is None else np.where(missing[..., None], samples.dtype.type(known.dark), samples)

        def back(u: Array) -> Array:
            return np.asarray(known.unstabilize(u)).astype(samples.dtype)

        return Reduction(known.stabilize(values), back, missing, GaussianNoise(known.even_sigma))


@checked_call
@underflowing
@dataclass(frozen=True)
class Poisson(Evened):
    """Counts ``z = gain Poisson(x) + N(offset, sigma²)``: pure Poisson noise, or with a camera's read noise.

    Parameters
    ----------
    gain : float
        Units of the input for each count (an electron, a photon), > 0.
    sigma : float
        Standard deviation of the Gaussian part, in the units of the input; 0 for pure Poisson counts.
    offset : float
        Value of the input for no count (the dark level).

    Raises
    ------
    InputError
        For a gain that is not > 0, a negative sigma, and numbers that are not finite.

    Notes
    -----
    `stabilize` is the generalized Anscombe transform D(z) = 2 √(z' + 3/8 + σ'²)₊, with z' = (z - offset) / gain and
    σ' = sigma / gain; its noise has a standard deviation within 4 % of 1 from 4 counts on. `unstabilize` goes from
    E[D(z)], which is not D(E[z]).

    With fewer than 2 counts a sample on average `denoise` sums samples of a picture over cells first. It does not in
    signals, volumes and clips, whose levels come out too low: with 0.2 counts a sample by about 15 to 40 %. Sum samples
    of these before, or take ``quality="pixels"`` for signals.

    References
    ----------
    Anscombe 1948 (doi 10.1093/biomet/35.3-4.246); Mäkitalo and Foi 2011 (doi 10.1109/TIP.2010.2056693) and 2013
    (doi 10.1109/TIP.2012.2202675).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Poisson
    >>> counts = np.random.default_rng(0).poisson(3.0, 100_000)
    >>> noise = Poisson()
    >>> stable = noise.stabilize(counts)
    >>> bool(abs(np.std(stable) - 1) < 0.03)
    True
    >>> bool(abs(noise.unstabilize(np.mean(stable, keepdims=True))[0] - 3.0) < 0.03)
    True
    """

    kind: ClassVar[str] = "poisson"
    scalable: ClassVar[bool] = False
    in_blocks: ClassVar[bool] = True

    gain: float = field(
        default=1.0, metadata={"minimum": 0, "strict": True, "hint": "units of the input for each count"}
    )
    sigma: float = field(default=0.0, metadata={"minimum": 0, "hint": "the read noise in the units of the input"})
    offset: float = field(default=0.0, metadata={"hint": "the value of the input for no count"})

    def _noisy(self, samples: Array, rng: np.random.Generator) -> Array:
        """Return counts of these means; values below `offset` count as no light."""
        with np.errstate(over="ignore"):
            means = np.maximum(samples - self.offset, 0) / self.gain
        if not (means <= OfCounts.most).all():
            raise InputError(f"clean: got values of up to {means.max():.3g} counts for gain={self.gain:g}, expected at "
                             f"most {OfCounts.most:g}; give a larger gain")  # fmt: skip
        counts = rng.poisson(means)
        read = rng.normal(self.offset, self.sigma, counts.shape) if self.sigma else self.offset
        return np.asarray(self.gain * counts + read)

    def describe(self) -> str:
        read = f", read noise {self.sigma:.3g}" if self.sigma else ""
        return f"counts: {self.gain:.3g} a count{read}" + (f", {self.offset:.3g} in the dark" if self.offset else "")

    @property
    def dark(self) -> float:  # type: ignore[override]  # a number of the model
        """The value of a sample without counts, `offset`."""
        return self.offset

    @property
    def even_sigma(self) -> float:
        """1, the sigma after the stabilizer."""
        return 1.0

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Stabilize the samples, and tell whether counts of a picture are few."""
        present = samples if missing is None else samples[~missing]
        image = samples.ndim == 3 and present.size > 0
        few = image and self.are_few(float(present.mean(dtype=np.float64)))
        return replace(super().reduce(samples, missing), few=self if few else None)

    def are_few(self, mean: float) -> bool:
        """Tell whether samples of a mean are so few counts that the transform does not make their noise even."""
        return mean < self.offset + OfCounts.few * self.gain

    def with_sigma(self, sigma: Any) -> tuple[Self, Any]:
        """Raise `InputError` if a sigma is given, which counts do not have."""
        if sigma is not None:
            raise InputError(
                "sigma: got a value with noise='poisson', where the noise follows from the counts; leave it out, or "
                "give the read noise as Poisson(gain=..., sigma=...)"
            )
        return self, None

    def by_intensity(self, samples: NDArray[Any]) -> GaussianNoise:
        """Return Gaussian noise of the strength that counts have at the intensities of samples."""
        low, high = float(samples.min()), float(samples.max())
        places = low + (high - low) * np.linspace(0, 1, OfCounts.places) ** 2  # the root of the counts is what matters
        strengths = np.sqrt(np.maximum(self.variance(places), (OfCounts.least * self.gain) ** 2))
        return GaussianNoise(1.0, intensities=places, strengths=strengths)

    def scaled(self, factor: float) -> Self:
        """Raise `InputError`: the noise of counts follows from the samples."""
        raise InputError(f"strength: got {factor:g} with counts, whose noise follows from them; leave it at 1")

    def _even(self, values: Array) -> Floats:
        counts = values.astype(np.float64) - self.offset
        if self.sigma == 0:
            # An offset that is not a number of the input's precision is no reason to refuse the value nearest to it.
            rounding = 2 * float(np.finfo(values.dtype).eps) * abs(self.offset)
            below = counts < -rounding
            if below.any():
                raise InputError(
                    f"image: got {np.count_nonzero(below)} value(s) below offset={self.offset:g}, the smallest "
                    f"{float(values.min()):g}, expected counts that are not negative; a camera's read noise makes them "
                    "negative: give its strength, Poisson(gain=..., sigma=...), and its dark level as offset"
                )
        with np.errstate(over="ignore"):
            counts = counts / self.gain
        if not np.isfinite(counts).all():
            raise InputError(f"image: got values of more than 1e308 counts for gain={self.gain:g}; give a larger gain")
        return np.asarray(2 * np.sqrt(np.maximum(counts + (0.375 + self._spread**2), 0)))

    def _uneven(self, stable: Floats) -> Floats:
        # No count at all has a transform that is not negative; what is below it means no count.
        d = np.maximum(stable, 0)
        counts = _from_series(d, self._spread)
        if 0.375 + self._spread**2 < OfCounts.table_end:  # otherwise the series is right from no count on
            table = _table(self._spread)
            inside = d < table.x[-1]
            y = table(np.maximum(d[inside], table.x[0]))
            counts[inside] = y**2 / 4 - (0.125 + self._spread**2)
        return np.asarray(self.gain * np.maximum(counts, 0) + self.offset)

    def expected(self, mean: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the expected values of the transform where the input has these means."""
        dark = float(expected_transform(np.zeros(1), self._spread)[0])
        top = float(self._even(np.asarray(max(float(mean.max()), self.offset))))  # what its mean is below
        stable = np.linspace(dark, dark + top, max(OfCounts.expected, math.ceil(top / OfCounts.table_step)))
        return np.asarray(np.interp(mean, self.unstabilize(stable), stable))

    def variance(self, expected: Any) -> NDArray[Any]:
        """Return the variance of the input, gain (expected - offset) + sigma², where its mean is `expected`."""
        values = check_numpy("expected", expected)
        counted = np.maximum(values.astype(np.float64) - self.offset, 0)
        return np.asarray(self.gain * counted + self.sigma**2, dtype=values.dtype)

    @property
    def _spread(self) -> float:
        """Standard deviation of the Gaussian part in counts."""
        return self.sigma / self.gain


def expected_transform(x: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    """Return E[D(z)] for x counts with Gaussian noise of standard deviation `spread`, by summing over the counts."""
    from scipy.stats import poisson

    top = float(np.max(x))
    k = np.arange(math.ceil(top + OfCounts.tail * math.sqrt(top) + 3 * OfCounts.tail))
    return np.asarray(poisson.pmf(k, x[:, None]) @ _transform_of_counts(k.astype(np.float64), spread))


def _transform_of_counts(k: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    """Return g(k) = E[2 √(k + spread ξ + 3/8 + spread²)₊], ξ normal."""
    centre = k + 0.375 + spread**2
    if spread == 0:
        return np.asarray(2 * np.sqrt(centre))
    # In s = √(...) the integrand has no kink, so that Gauss's rule converges at once: ∫ 2 s φ((s² - centre) / spread)
    # 2 s ds / spread. (Gauss-Hermite nodes in ξ meet the kink where the root is cut off, and stop at three digits.)
    nodes, weights = np.polynomial.legendre.leggauss(OfCounts.nodes)
    low = np.sqrt(np.maximum(centre - OfCounts.tail * spread, 0))
    half = (np.sqrt(centre + OfCounts.tail * spread) - low) / 2
    s = low[:, None] + half[:, None] * (nodes + 1)
    density = np.exp(-0.5 * ((s**2 - centre[:, None]) / spread) ** 2) / (math.sqrt(2 * math.pi) * spread)
    return np.asarray(half * ((4 * s**2 * density) @ weights))


@lru_cache(maxsize=16)
def _table(spread: float) -> PchipInterpolator:
    """Return y = 2 √(x + 1/8 + spread²) as a monotone function of E[D(z)], from no count to `OfCounts.table_end`.

    The two are nearly equal, so that the interpolation is exact to 1e-5 counts.
    """
    from scipy.interpolate import PchipInterpolator

    shift = 0.125 + spread**2
    y = np.arange(
        2 * math.sqrt(shift), 2 * math.sqrt(OfCounts.table_end + shift) + OfCounts.table_step, OfCounts.table_step
    )
    return PchipInterpolator(expected_transform(np.maximum(y**2 / 4 - shift, 0), spread), y)


def _from_series(d: NDArray[np.float64], spread: float) -> NDArray[np.float64]:
    """Return the counts x for which the first terms of E[D(z)], in moments of z about its mean, are d.

    With m = x + 3/8 + spread² and the central moments v, t, q of z: E = 2 √m (1 - v/8m² + t/16m³ - 5q/128m⁴).
    """
    shift = 0.375 + spread**2
    m = np.maximum(d**2 / 4 + 0.25, shift)
    for _ in range(2):  # each gains a factor of m, which is large
        variance = m - 0.375
        third = m - shift
        fourth = third + 3 * variance**2
        ratio = 1 - variance / (8 * m**2) + third / (16 * m**3) - 5 * fourth / (128 * m**4)
        m = np.maximum((d / (2 * ratio)) ** 2, shift)
    return np.asarray(m - shift)
