"""Magnitudes of complex samples, as magnetic resonance gives them: Rician noise, and that of several coils."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.denoising.noise.backgrounds import rayleigh_of, strength_of
from nlflow.denoising.noise.base import Array, Noise, Reduction
from nlflow.denoising.noise.chi import Stabilizer, mean_magnitude, stabilizer
from nlflow.denoising.noise.figures import OfMagnitudes
from nlflow.denoising.noise.gaussian import GaussianNoise
from nlflow.domains.samples import as_signal
from nlflow.errors import InputError, check_array, check_number


@underflowing
@dataclass(frozen=True)
class Magnitudes(Noise):
    """What the noise of magnitudes does, of one coil or several: its strength, its law, the way to white noise."""

    sigma: float | None = None

    @property
    @abstractmethod
    def _coils(self) -> float:
        """How many complex samples the square of a magnitude sums up."""

    def _check(self) -> None:
        if self.sigma is None:
            return
        hint = "the standard deviation of the real and of the imaginary part, in the units of the input"
        sigma = check_number("sigma", self.sigma, minimum=0, strict=True, hint=hint)
        if not OfMagnitudes.smallest < sigma < OfMagnitudes.largest:
            raise InputError(
                f"sigma: got {sigma:g}, expected {OfMagnitudes.smallest:g} to {OfMagnitudes.largest:g}; take another "
                "unit"
            )
        object.__setattr__(self, "sigma", sigma)

    @property
    def _known(self) -> float:
        if self.sigma is None:
            raise InputError("sigma: got None, expected a number > 0; `completed` finds it from samples")
        return self.sigma

    @property
    def _law(self) -> Stabilizer:
        return stabilizer(self._coils)

    def sample(self, clean: Any, *, rng: Any = None, channel_axis: int | None = None) -> Array:
        """Return magnitudes of these means without noise; see `Noise.sample`. Negative ones are refused."""
        samples, restore = as_signal(clean, channel_axis)
        sigma = self._known
        _check_magnitudes(samples)
        generator = np.random.default_rng(rng)
        along = samples / sigma + generator.standard_normal(samples.shape)
        across = generator.chisquare(2 * self._coils - 1, samples.shape)
        return np.asarray(restore(sigma * np.sqrt(along**2 + across)))

    def stabilize(self, image: Any) -> Array:
        """Return magnitudes as samples with white noise of standard deviation `sigma`, nearly the same far above it.

        Parameters
        ----------
        image : array_like
            Any shape, in the units of the input, >= 0.

        Returns
        -------
        array
            Same shape and units; float32 for float32, float64 for integers.

        Raises
        ------
        InputError
            For NaN, infinities and negative values, and where `sigma` is None.
        """
        values = _floats("image", image)
        _check_magnitudes(values)
        sigma = self._known
        return np.asarray(sigma * self._law(values.astype(np.float64) / sigma), dtype=values.dtype)

    def unstabilize(self, stable: Any) -> Array:
        """Return the magnitudes without noise for expected values of the transform: the exact unbiased inverse.

        Parameters
        ----------
        stable : array_like
            Any shape: an estimate of the mean of `stabilize`, as a denoiser gives it.

        Returns
        -------
        array
            Same shape and units, >= 0: 0 for all that is below the mean of pure noise; float32 for float32.

        Raises
        ------
        InputError
            For NaN and infinities, and where `sigma` is None.
        """
        values = _floats("stable", stable)
        sigma = self._known
        return np.asarray(sigma * self._law.inverse(values.astype(np.float64) / sigma), dtype=values.dtype)

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Return the stabilized magnitudes, whose noise is white and of strength `sigma`; see `Noise.reduce`.

        Where `sigma` is None it is found first; see `completed`.
        """
        known = self.completed(samples, missing)
        # What is missing may hold anything.
        values = samples if missing is None else np.where(missing[..., None], samples.dtype.type(0), samples)

        def back(u: Array) -> Array:
            return np.asarray(known.unstabilize(u)).astype(samples.dtype)

        return Reduction(known.stabilize(values), back, missing, GaussianNoise(known._known))

    def with_sigma(self, sigma: Any) -> tuple[Self, Any]:
        """Return the same noise with the strength `sigma` of the complex samples, where it had none."""
        return (self, sigma) if sigma is None or self.sigma is not None else (replace(self, sigma=sigma), None)

    def completed(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Self:
        """Return the same noise with a strength that is found from the samples where none was given.

        Parameters
        ----------
        samples : array of shape (..., C)
            Finite magnitudes >= 0; one to three axes besides that of the channels.
        missing : bool array of shape (...), optional
            Samples that are missing; their values do not matter.

        Raises
        ------
        InputError
            For negative values, and where no noise is seen.

        Notes
        -----
        In a background without signal the law says the strength: mean and spread are in a known ratio there. Without
        a background the samples that are well above the noise are stabilized, and have noise of that strength when it
        is the right one: a fixed point (Foi 2011), sought by secants. The two are apart, as a background would
        stay consistent with ever smaller strengths: its law hardly changes with a little signal.
        A few times the cost of `estimate_sigma`.
        """
        if self.sigma is not None:
            return self
        absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
        _check_magnitudes(samples[~absent])
        found = strength_of(samples, absent, self._coils)
        if found is None:
            raise InputError("noise: got samples in which no noise is seen, so that its strength cannot be found; give "
                             f"it, {type(self).__name__}(sigma=...)")  # fmt: skip
        return replace(self, sigma=found)

    def scaled(self, factor: float) -> Self:
        """Return the same noise with `factor` times the strength of the complex samples."""
        factor = check_number("factor", factor, minimum=0, strict=True)
        return replace(self, sigma=self._known * factor)

    def mean(self, magnitude: Any) -> Array:
        """Return the mean of samples whose magnitude without noise is this: more than it, most of all near 0."""
        values, sigma = _floats("magnitude", magnitude), self._known
        _check_magnitudes(values)
        return np.asarray(sigma * mean_magnitude(values.astype(np.float64) / sigma, self._coils), dtype=values.dtype)


@underflowing
@dataclass(frozen=True)
class Rician(Magnitudes):
    """Magnitudes z = |x + sigma (n₁ + i n₂)| of complex samples with white Gaussian noise n₁, n₂ of strength 1.

    Parameters
    ----------
    sigma : float or None
        Standard deviation of the real and of the imaginary part, in the units of the input, > 0. None where it is to be
        found from the samples (`completed`), as `reduce` and `nlflow.denoise` do.

    Raises
    ------
    InputError
        For a sigma that is not a number > 0.

    Notes
    -----
    Where x = 0 the law is Rayleigh's, of mean 1.25 sigma and standard deviation 0.66 sigma; from x = 3 sigma on it is
    nearly Gaussian about √(x² + sigma²). `stabilize` takes a function f with a standard deviation f(z) of 0.96 to 1.03
    sigma for all x >= 0, which was made so by least squares: 16 slopes of a smooth growing function, √(z² - sigma²/2)
    above 7.4 sigma. (Steeper slopes near 0 would bring it to sigma within 1 %, but make outliers.) `unstabilize` goes
    from E[f(z)] to x by a table of the integral over the density, exact to 1e-6 sigma from x = 0.01 sigma on; what is
    below the mean of pure noise becomes 0. As the law hardly changes with x near 0, x is known there only as the root
    of what the noise leaves.

    References
    ----------
    Gudbjartsson and Patz 1995 (doi 10.1002/mrm.1910340618); stabilized noise and a fixed point for its strength: Foi
    2011 (doi 10.1109/ISBI.2011.5872758).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import Rician
    >>> noise = Rician(2.0)
    >>> stable = noise.stabilize(noise.sample(np.full((300, 300), 1.0), rng=0))
    >>> bool(abs(np.std(stable) - 2) < 0.04)
    True
    >>> bool(abs(noise.unstabilize(np.array([stable.mean()]))[0] - 1) < 0.1)
    True
    """

    kind: ClassVar[str] = "rician"

    def __post_init__(self) -> None:
        """Check the number."""
        self._check()

    @property
    def _coils(self) -> float:
        return 1.0

    def describe(self) -> str:
        """Return what this noise is, in a few words for people."""
        return "Rician noise" + (f": sigma {self.sigma:.3g}" if self.sigma is not None else ", sigma to be found")


@underflowing
@dataclass(frozen=True)
class NoncentralChi(Magnitudes):
    """Root of the sum of squares of several coils, z = √(Σ |x_c + sigma (n₁ + i n₂)|²), for x = √(Σ |x_c|²).

    Parameters
    ----------
    sigma : float or None
        Standard deviation of the real and of the imaginary part of each coil, in the units of the input, > 0. None
        where it is to be found from the samples (`completed`).
    coils : float
        From 1, where it is `Rician`, to 256. Correlated coils count as fewer ones, which need be no whole number.

    Raises
    ------
    InputError
        For numbers that are no such.

    Notes
    -----
    The transform is that of `Rician`; the more coils, the nearer to 1 is its spread.

    References
    ----------
    Constantinides, Atalar, McVeigh 1997 (doi 10.1002/mrm.1910380524); effective coils: Aja-Fernández and
    Tristán-Vega 2012 (doi 10.1002/mrm.23020).

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import NoncentralChi
    >>> z = NoncentralChi(1.0, coils=4).sample(np.zeros((300, 300)), rng=0)
    >>> bool(abs(np.mean(z**2) - 8) < 0.1)
    True
    """

    kind: ClassVar[str] = "noncentral-chi"

    coils: float = 1.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        self._check()
        hint = "how many coils were combined by the root of the sum of squares"
        coils = check_number("coils", self.coils, minimum=1, hint=hint)
        if coils > OfMagnitudes.most_coils:
            raise InputError(f"coils: got {coils:g}, expected at most {OfMagnitudes.most_coils:g}")
        object.__setattr__(self, "coils", coils)

    @property
    def _coils(self) -> float:
        return self.coils

    def describe(self) -> str:
        """Return what this noise is, in a few words for people."""
        sigma = f": sigma {self.sigma:.3g}" if self.sigma is not None else ", sigma to be found"
        return f"noise of magnitudes of {self.coils:.3g} coil{'s' if self.coils != 1 else ''}{sigma}"


def find_rician(samples: Array, missing: NDArray[np.bool_] | None = None) -> Rician | None:
    """Find Rician noise, and its strength, by a background in which magnitudes have Rayleigh's law.

    Parameters
    ----------
    samples : array of shape (..., C)
        Finite; one to three axes besides that of the channels. Negative values are no magnitudes.
    missing : bool array of shape (...), optional
        Samples that are missing; their values do not matter.

    Returns
    -------
    Rician or None
        None without a background (0.5 % of the samples), and where its law is another one: that of counts, of an
        offset with Gaussian noise, of several coils.
    """
    absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
    present = samples[~absent]
    if present.size == 0 or present.min() < 0 or present.min() == present.max():
        return None
    sigma = rayleigh_of(samples, absent)
    return None if sigma is None else Rician(sigma)


def _floats(name: str, value: Any) -> Array:
    array = check_array(name, value)
    if not isinstance(array, np.ndarray):
        raise InputError(f"{name}: got {type(array).__name__}, expected a NumPy array; convert it (.cpu().numpy())")
    return array


def _check_magnitudes(samples: Array) -> None:
    if samples.size and samples.min() < 0:
        raise InputError(
            f"image: got {np.count_nonzero(samples < 0)} negative value(s), the smallest {float(samples.min()):g}, "
            "expected magnitudes >= 0, as the root of a sum of squares is; for real or complex parts take white noise"
        )
