"""Gaussian noise."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square, underflowing
from nlflow.denoising.noise import spectra
from nlflow.denoising.noise.figures import OfSpectra
from nlflow.denoising.noise.models.base import Array, Noise, Reduction
from nlflow.denoising.noise.names import NO_NOISE
from nlflow.errors import InputError, check_floats, check_increasing, check_integer, check_number, checked_call

_ROWS: Final = np.array([[1, 1, 1], [1, 0, -1], [1, -2, 1]], np.float64)
#: Luminance, red - blue and magenta - green as orthonormal rows: noise of a camera is nearly independent along them.
OPPONENT: Final = _ROWS / np.linalg.norm(_ROWS, axis=1, keepdims=True)
_NO_SUM: Final = (
    "noise: got two Gaussian noises whose sum no model says, since one follows the intensity, or opponent colours, and "
    "the other is correlated, or differs from channel to channel; expected white ones; give one model of their sum"
)


@checked_call
@underflowing
@dataclass(frozen=True)
class GaussianNoise(Noise):
    """Additive Gaussian noise, z = x + s(x) n, with n stationary of a power spectrum.

    Parameters
    ----------
    sigma : float or array of shape (C,)
        Standard deviation of a sample, in the units of the input: of all channels, or one a channel.
    spectrum : array of shape (h, w) or (C, h, w), for signals (n,) or (C, 1, n), optional
        Power by frequency in the order of `numpy.fft.fft2`, >= 0, of any scale and size; white where it is not given.
    intensities : array of shape (K,), optional
        Increasing, in the units of the input; of colours the mean of the channels counts.
    strengths : array of shape (K,), optional
        Standard deviation at these intensities, relative to `sigma`; linear between them, constant beyond.
    opponent : bool
        Whether `sigma` and `spectrum` are those of luminance, red - blue and magenta - green (`OPPONENT`) of a colour
        picture, rather than those of its channels.
    compressed : float from 0 to 1
        How much of the weak high frequencies was cut off afterwards, as JPEG does: a denoiser counts a power p,
        relative to the strongest, as p^(1 - compressed).
    places : array of shape (a,), (a, b) or (a, b, c), optional
        Standard deviation from place to place, relative to `sigma`: at the middles of so many equal parts along each
        axis, linear between them, constant beyond. With it a denoiser takes constant areas to be free of noise.

    Raises
    ------
    InputError
        For negative or NaN values, a spectrum without power or of width 1, intensities that do not increase, and
        lengths that do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import GaussianNoise
    >>> noise = GaussianNoise.from_kernel(np.ones((3, 3)), sigma=5.0)
    >>> z = noise.sample(np.zeros((256, 256)), rng=0)
    >>> bool(abs(z.std() - 5) < 0.2), bool(abs(np.mean(z[:, 1:] * z[:, :-1]) / 25 - 2 / 3) < 0.05)
    (True, True)
    """

    kind: ClassVar[str] = "gaussian"
    sigma: Any
    spectrum: Any = None
    intensities: Any = None
    strengths: Any = None
    opponent: bool = False
    compressed: float = 0.0
    places: Any = None

    def __post_init__(self) -> None:
        sigma = check_floats("sigma", self.sigma, ndim=(0, 1))
        if sigma.min() < 0:
            raise InputError(f"sigma: got {sigma.min():g}, expected numbers >= 0")
        if self.opponent and sigma.shape not in ((), (3,)):
            raise InputError(f"opponent: got sigma of shape {sigma.shape}, expected one number, or three")
        object.__setattr__(self, "sigma", float(sigma) if sigma.ndim == 0 else sigma)
        if self.spectrum is not None:
            object.__setattr__(self, "spectrum", checked_spectrum(self.spectrum))
            count = len(self.spectrum)
            most = 3 if self.opponent else len(sigma) if sigma.ndim else count
            if count not in (1, most):
                of = "of opponent colours" if self.opponent else "those of sigma"
                raise InputError(f"spectrum: got {count} channels, expected 1 or {most}, {of}")
        lost = check_number("compressed", self.compressed, minimum=0)
        if lost > 1:
            raise InputError(f"compressed: got {lost:g}, expected a number from 0 (nothing was cut off) to 1")
        object.__setattr__(self, "compressed", lost)
        if (self.intensities is None) != (self.strengths is None):
            raise InputError("strengths: give them together with intensities, or leave both out")
        if self.intensities is not None:
            places = check_increasing("intensities", self.intensities)
            values = check_floats("strengths", self.strengths, ndim=1)
            if places.shape != values.shape:
                got = f"{places.size} numbers for {values.size} strengths"
                raise InputError(f"intensities: got {got}, expected as many")
            if values.min() < 0 or values.max() == 0:
                raise InputError("strengths: got negative numbers or zeros alone, expected numbers >= 0, some > 0")
            object.__setattr__(self, "intensities", places)
            object.__setattr__(self, "strengths", values)
        if self.places is not None:
            object.__setattr__(self, "places", check_floats("places", self.places, ndim=(1, 2, 3)))
            if not self.places.min() > 0:
                raise InputError(f"places: got {self.places.min():g}, expected numbers > 0, relative to sigma")

    @classmethod
    def from_kernel(cls, kernel: Any, sigma: Any = 1.0) -> Self:
        """Return white noise that was convolved with a kernel, and has the standard deviation `sigma` after that.

        Parameters
        ----------
        kernel : array of shape (a, b), for signals (a,)
            At most 32 samples along an axis.
        sigma : float or array of shape (C,)
        """
        values = check_floats("kernel", kernel, ndim=(1, 2))
        if max(values.shape) > OfSpectra.frequencies // 2:  # farther offsets would alias
            raise InputError(
                f"kernel: got shape {values.shape}, expected at most {OfSpectra.frequencies // 2} samples along an axis"
            )
        size, largest = (OfSpectra.frequencies,) * values.ndim, float(np.abs(values).max())
        if largest > 0 and not 1 / OfSpectra.largest < largest * values.size < math.sqrt(OfSpectra.largest):
            values = values / largest  # of any unit
        return cls(sigma, np.abs(np.fft.fftn(values, s=size, axes=tuple(range(values.ndim)))) ** 2)

    def of_channels(self, which: NDArray[np.bool_]) -> Self:
        sigma = self.sigma[which] if np.ndim(self.sigma) and len(self.sigma) == len(which) else self.sigma
        own = self.spectrum is not None and len(self.spectrum) == len(which) > 1
        return replace(self, sigma=sigma, spectrum=self.spectrum[which] if own else self.spectrum)

    @property
    def is_white(self) -> bool:
        """Whether the noise has one strength a channel of the input, everywhere, and no correlation."""
        of_input = not self.opponent or np.ndim(self.sigma) == 0
        return self.spectrum is None and self.intensities is None and self.places is None and of_input

    @property
    def has_law(self) -> bool:
        return not self.opponent

    @property
    def is_mapped(self) -> bool:
        """Whether neighbours are independent, and a map tells the strength."""
        return self.places is not None and self.spectrum is None and not self.opponent

    @property
    def white_sigma(self) -> Any:
        return self.sigma if self.is_white else None

    @property
    def is_coloured(self) -> bool:
        return not self.is_white

    def powers(self, channels: int, dimension: int) -> spectra.Spectrum:
        """Return the spectra (channels, h, w) whose means are the variances; a signal has h = 1."""
        channels = check_integer("channels", channels, minimum=1)
        dimension = check_integer("dimension", dimension, minimum=1)
        sigma = np.broadcast_to(np.asarray(self.sigma), (channels,)) if np.ndim(self.sigma) == 0 else self.sigma
        self._check_places(dimension)
        if len(sigma) != channels or (self.opponent and channels != 3):
            expected = 3 if self.opponent else len(sigma)
            raise InputError(_of_others(expected, channels))
        if float(np.max(sigma)) > OfSpectra.largest:
            raise InputError(f"sigma: got {np.max(sigma):g}, whose square overflows; take another unit of the samples")
        shape = np.ones((1, 1, 1)) if self.spectrum is None else self.spectrum
        if len(shape) not in (1, channels):
            raise InputError(_of_others(len(shape), channels))
        if dimension == 3 and self.spectrum is not None:
            raise InputError("noise: got a volume, but correlated noise, which is for images and signals; give white "
                             "noise (sigma), or denoise slice by slice")  # fmt: skip
        if dimension == 1 and shape.shape[1] > 1:
            raise InputError(f"noise: got a signal, but a spectrum of {shape.shape[1]} x {shape.shape[2]} frequencies")
        if dimension == 2 and self.spectrum is not None and shape.shape[1] == 1:
            raise InputError("noise: got an image, but the spectrum of a signal; give power by both frequencies")
        rows = 1 if dimension == 1 else OfSpectra.frequencies
        full = np.broadcast_to(shape, (channels, rows, OfSpectra.frequencies)) if self.spectrum is None else shape
        return np.asarray(sigma[:, None, None] ** 2 * full / full.mean(axis=(1, 2), keepdims=True))

    def counted(self, channels: int, dimension: int) -> spectra.Spectrum:
        """Return `powers`, with weak ones raised by `compressed`."""
        powers = self.powers(channels, dimension)
        if self.compressed:
            strongest = powers.max(axis=(1, 2), keepdims=True)
            share = np.divide(powers, strongest, out=np.zeros_like(powers), where=strongest > 0)
            powers = strongest * share ** (1 - self.compressed)
        return np.asarray(powers)

    def white(self, channels: int, dimension: int) -> float:
        """Return the root mean power at the lower half of the frequencies, as the strength of nearby white noise."""
        half = spectra.coarser(self.counted(channels, dimension))
        return math.sqrt(float(half.mean()) * 2 ** np.count_nonzero(np.array(half.shape[1:]) > 1))

    def nearest_white(self, channels: int, dimension: int) -> GaussianNoise:
        return self if self.is_white else GaussianNoise(self.white(channels, dimension), places=self.places)

    def relative(self, intensity: Array) -> Array:
        """Return the relative standard deviation at an intensity."""
        if self.intensities is None:
            return np.ones_like(intensity, np.float64)
        return np.asarray(np.interp(intensity, self.intensities, self.strengths))

    def at(self, samples: Array) -> Array:
        """Return the relative standard deviation (...) at noisy samples (..., C), by smoothed intensity and place."""
        relative = self.relative(smoothed(samples))
        return relative if self.places is None else relative * self._placed(samples.shape[:-1]) * ~constant(samples)

    def along(self, samples: Array) -> Array:
        """Return the standard deviation at each of the noisy samples (..., C)."""
        return np.asarray(self.at(samples)[..., None] * np.broadcast_to(self.sigma, samples.shape[-1]))

    def _check_places(self, dimension: int) -> None:
        if self.places is not None and self.places.ndim != dimension:
            raise InputError(f"noise: got places along {self.places.ndim} axes, and samples along {dimension}, "
                             "expected as many; measure the noise of this picture")  # fmt: skip

    def _placed(self, shape: tuple[int, ...]) -> Array:
        self._check_places(len(shape))
        values = self.places
        for axis, (parts, n) in enumerate(zip(values.shape, shape, strict=True)):
            where = np.clip((np.arange(n) + 0.5) * parts / n - 0.5, 0, parts - 1)
            below = where.astype(int)
            share = np.expand_dims(where - below, tuple(a for a in range(len(shape)) if a != axis))
            above = np.minimum(below + 1, parts - 1)
            values = values.take(below, axis) * (1 - share) + values.take(above, axis) * share
        return np.asarray(values)

    def strength(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> float:
        powers = self.powers(samples.shape[-1], samples.ndim - 1)
        relative = self.at(samples)
        return math.sqrt(float(powers.mean())) * root_mean_square(relative if missing is None else relative[~missing])

    def _noisy(self, samples: Array, rng: np.random.Generator) -> Array:
        channels = samples.shape[-1]
        grid = (1, *samples.shape[:-1])[-2:] if samples.ndim < 4 else samples.shape[:-1]
        powers = self.powers(channels, samples.ndim - 1)
        if self.spectrum is None:
            noise = rng.standard_normal((channels, *grid)) * np.sqrt(powers[:, 0, 0].reshape(-1, *[1] * len(grid)))
        else:
            noise = spectra.sampled(powers, grid, rng)
        if self.opponent:
            noise = np.tensordot(OPPONENT.T, noise, axes=1)
        added = np.moveaxis(noise, 0, -1).reshape(samples.shape)
        if self.places is not None:
            added *= self._placed(samples.shape[:-1])[..., None]
        return np.asarray(samples + added * self.relative(samples.mean(axis=-1, keepdims=True)))

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Leave the samples as they are."""
        self.powers(samples.shape[-1], samples.ndim - 1)
        return Reduction(samples, missing=missing, rest=self)

    def beside(self, other: GaussianNoise, channels: int, dimension: int) -> GaussianNoise:
        """Return the sum of two independent noises; refuse one that is no `GaussianNoise`."""
        if not isinstance(other, GaussianNoise):
            raise InputError(f"other: got {type(other).__name__}, expected a GaussianNoise; put others in a Mixture")
        if other.is_white and not np.any(other.sigma):
            return self
        if self.is_white and not np.any(self.sigma):
            return other
        powers = [one.powers(channels, dimension) for one in (self, other)]
        colours = self.opponent or other.opponent
        for one, power in zip((self, other), powers, strict=True):
            if one.places is not None or (
                one.opponent != colours and not (one.spectrum is None and np.ptp(power[:, 0, 0]) == 0)
            ):
                raise InputError(_NO_SUM)
        total = powers[0] + powers[1]
        sigma = np.sqrt(total.mean(axis=(1, 2)))
        shape = None if self.spectrum is None and other.spectrum is None else total
        places, strengths = self.intensities, self.strengths
        if places is not None or other.intensities is not None:
            if shape is not None or np.ptp(sigma) > 0:
                raise InputError(_NO_SUM)
            places = np.union1d(*(one.intensities if one.intensities is not None else [] for one in (self, other)))
            places = np.interp(
                np.arange(OfSpectra.finer * (len(places) - 1) + 1) / OfSpectra.finer, np.arange(len(places)), places
            )
            shares = [
                np.square(one.relative(places)) * power.mean() for one, power in zip((self, other), powers, strict=True)
            ]
            strengths = np.sqrt(sum(shares)) / sigma[0]
        level = float(sigma[0]) if np.ptp(sigma) == 0 and not colours else sigma
        return GaussianNoise(level, shape, places, strengths, colours, max(self.compressed, other.compressed))

    def separated(self) -> Noise:
        from nlflow.denoising.noise.models.stripes import with_stripes

        return with_stripes(self)

    def range(self) -> float:
        """Return the distance in samples at which the correlation first is below 0.2, along the axis of the longest."""
        if self.spectrum is None:
            return 0.0
        far = 0
        for values in spectra.correlation(self.spectrum[:1] if self.opponent else self.spectrum):
            rows, columns = (n // 2 for n in values.shape)
            for along in (values[rows:, columns], values[rows, columns:]):
                far = max(far, int(np.append(np.flatnonzero(along < 0.2), len(along))[0]))
        return float(far)

    def describe(self) -> str:
        level = root_mean_square(np.atleast_1d(self.sigma))
        if level == 0:
            return NO_NOISE
        far = self.range()
        if self.spectrum is None or far > 1:
            words = "noise of a camera" if self.opponent else "correlated noise" if far else "white noise"
        else:  # the noise of neighbours is nearly independent, and by frequency it differs little
            words = "nearly white noise"
        reach = ""
        if self.places is not None:
            least, most = level * self.places.min(), level * self.places.max()
            words += f", from place to place {least:.3g} to {most:.3g}"
        if self.spectrum is not None and far > 1:
            samples = "samples" if self.spectrum.shape[1] == 1 else "pixels"
            reach = f"neighbouring {samples} share their noise, over about {far:.0f} {samples}, "
        if self.strengths is None:
            each = np.ndim(self.sigma) and not self.opponent and np.ptp(self.sigma) > 0
            levels = " and ".join(f"{one:.3g}" for one in self.sigma) + " by channel" if each else f"{level:.3g}"
            return f"{words}: {reach}sigma {levels}"
        low, high = level * self.strengths.min(), level * self.strengths.max()
        steps = np.diff(self.strengths)
        where = ("in dark parts", "in light parts")
        if (steps >= 0).all():
            return f"{words}: {reach}sigma {low:.3g} {where[0]} to {high:.3g} {where[1]}"
        if (steps <= 0).all():
            return f"{words}: {reach}sigma {high:.3g} {where[0]} to {low:.3g} {where[1]}"
        return f"{words}: {reach}sigma {low:.3g} to {high:.3g}, depending on the brightness"

    def __repr__(self) -> str:
        fields = [f"{np.round(self.sigma, 4).tolist()}"]
        if self.spectrum is not None:
            fields.append(f"spectrum of {' x '.join(map(str, self.spectrum.shape))}")
        if self.intensities is not None:
            fields.append(f"{len(self.intensities)} intensities")
        if self.places is not None:
            fields.append(f"places {' x '.join(map(str, self.places.shape))}")
        fields += ["opponent"] if self.opponent else []
        fields += [f"compressed {self.compressed:g}"] if self.compressed else []
        return f"GaussianNoise({', '.join(fields)})"


def smoothed(samples: Array) -> Array:
    from scipy.ndimage import gaussian_filter

    intensity = samples[..., 0].astype(np.float64)
    for c in range(1, samples.shape[-1]):  # over a last axis of three NumPy takes ten times as long
        intensity += samples[..., c]
    intensity /= samples.shape[-1]
    widths = [OfSpectra.smoothing if n > 1 else 0 for n in intensity.shape]
    return np.asarray(gaussian_filter(intensity, widths, mode="reflect"))


def constant(samples: Array) -> NDArray[np.bool_]:
    """Return where samples (..., C) lie in a constant area of 3 along each axis."""
    from scipy.ndimage import maximum_filter, minimum_filter

    size = [3 if n > 1 else 1 for n in samples.shape[:-1]]
    same = np.ones(samples.shape[:-1], bool)
    for plane in np.moveaxis(samples, -1, 0):
        if not (np.diff(plane, axis=-1) == 0).any():
            return np.zeros_like(same)
        same &= maximum_filter(plane, size) == minimum_filter(plane, size)
    return np.asarray(maximum_filter(same, size))


def checked_spectrum(spectrum: Any) -> spectra.Spectrum:
    """Return a spectrum as (C, h, w) on the grid of frequencies, of mean 1."""
    values = check_floats("spectrum", spectrum, ndim=(1, 2, 3))
    if values.min() < 0:
        raise InputError(f"spectrum: got {values.min():g}, expected powers >= 0")
    planes = values[None, None] if values.ndim == 1 else values[None] if values.ndim == 2 else values
    if planes.shape[2] == 1:
        raise InputError(f"spectrum: got shape {values.shape}, expected power by both frequencies; of an image (h, w), "
                         "of a signal (n,)")  # fmt: skip
    peaks = planes.max(axis=(1, 2), keepdims=True)
    grid = spectra.on_grid(planes / np.where(peaks > OfSpectra.largest, peaks, 1.0))  # of any scale
    means = grid.mean(axis=(1, 2), keepdims=True)
    if not (means > 0).all():
        raise InputError("spectrum: got zeros alone in a channel, expected some power; leave it out for white noise")
    # One that has been here before keeps its bits, so that a model comes back from a file as it was.
    return np.asarray(grid / np.where(np.abs(means - 1) < OfSpectra.rounding, 1.0, means))


def _of_others(expected: int, channels: int) -> str:
    return (
        f"noise: the model is of pictures with {expected} channel(s), and this one has {channels}; measure one like it "
        "(estimate_noise(image).model), or leave noise out"
    )
