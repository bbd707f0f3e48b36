"""Models of noise."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.denoising.noise.names import NO_NOISE, verdict_of
from nlflow.domains.samples import as_signal
from nlflow.errors import InputError, check_flag, check_generator, check_number
from nlflow.store.atomic import write_content
from nlflow.store.encoding import encode

if TYPE_CHECKING:
    from nlflow.denoising.noise.models.gaussian import GaussianNoise
    from nlflow.denoising.noise.models.intensities import Poisson

Array = NDArray[Any]


def check_samples(samples: Any, missing: Any, name: str = "samples") -> None:
    """Raise `InputError` for anything but real samples (..., C) of NumPy and booleans (...); no value is read."""
    if not isinstance(samples, np.ndarray) or isinstance(samples, np.ma.MaskedArray | np.matrix):
        got, remedy = type(samples).__name__, "convert it, as with numpy.asarray"
        raise InputError(f"{name}: got {got}, expected a NumPy array of shape (..., C), channels last; {remedy}")
    if samples.dtype.kind not in "biuf":
        raise InputError(f"{name}: got dtype {samples.dtype}, expected real numbers")
    if not 2 <= samples.ndim <= 4 or not samples.size:
        raise InputError(
            f"{name}: got shape {samples.shape}, expected one to three axes and a last one for the channels, none "
            "empty; of a single channel that is samples[..., None]"
        )
    if missing is not None:
        check_missing(missing, samples.shape[:-1])


def check_missing(missing: Any, shape: tuple[int, ...]) -> None:
    if not isinstance(missing, np.ndarray) or missing.dtype.kind != "b" or missing.shape != shape:
        is_array = isinstance(missing, np.ndarray)
        got = f"{missing.dtype} of shape {missing.shape}" if is_array else type(missing).__name__
        raise InputError(f"missing: got {got}, expected booleans of shape {shape}, True where a sample is missing")


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of samples and missing ones that refuses what `check_samples` does."""

    @wraps(method)
    def of_samples(self: Noise, samples: Any, missing: Any = None) -> Any:
        check_samples(samples, missing)
        return method(self, samples, missing)

    return of_samples


def refuse_negative(samples: Array, expected: str, name: str = "image") -> None:
    if samples.size and samples.min() < 0:
        raise InputError(
            f"{name}: got {np.count_nonzero(samples < 0)} negative value(s), the smallest {float(samples.min()):g}, "
            f"expected {expected}"
        )


def same(u: Array) -> Array:
    return u


@dataclass(frozen=True)
class Reduction:
    """What is left after `Noise.reduce`, for a flow of E to go on with.

    Attributes
    ----------
    samples : array of shape (..., C)
        In units in which the remaining noise is additive and nearly Gaussian.
    back : callable
        Takes an estimate in these units back to the units of the input.
    missing : bool array of shape (...), or None
        Samples that tell nothing.
    rest : GaussianNoise or None
        The noise that remains; None where its strength is not known.
    few : Poisson or None
        Of pictures, the model where counts are too few for the transform to make their noise even; else None, as always
        for signals, volumes and clips.
    """

    samples: Array
    back: Callable[[Array], Array] = same
    missing: NDArray[np.bool_] | None = None
    rest: GaussianNoise | None = None
    few: Poisson | None = None

    @property
    def keeps_units(self) -> bool:
        """Whether `back` does nothing."""
        return self.back is same


class Noise(ABC):
    """A model of noise: a frozen dataclass.

    A subclass defines `kind`, `describe`, `reduce`, and `sample` or `_noisy`; the metadata of a field bound its number,
    as arguments of `nlflow.errors.check_number`.
    """

    kind: ClassVar[str]
    """Name in files and on the command line."""
    scalable: ClassVar[bool] = True
    """Whether it may be stronger or weaker; not where its strength follows from the samples, as that of counts does."""
    undone: ClassVar[bool] = False
    """Whether `reduce` leaves nothing of it to a flow: it is subtracted, or where it is samples are missing."""
    in_blocks: ClassVar[bool] = False
    """Whether arrays in blocks know it: `reduce` looks at each sample alone, and leaves white noise of strength 1."""
    amount: ClassVar[str] = "sigma"
    """The field that `scaled` multiplies."""

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            value = getattr(self, one.name)
            if isinstance(one.default, bool):
                object.__setattr__(self, one.name, check_flag(one.name, value))
            elif one.metadata and not (value is None and one.default is None):
                object.__setattr__(self, one.name, check_number(one.name, value, **one.metadata))

    def __init_subclass__(cls, **words: Any) -> None:
        """Give a model the comparison of models, which knows arrays, and methods that look at the samples first."""
        super().__init_subclass__(**words)
        for name in ("__eq__", "__hash__"):
            if name not in vars(cls):
                setattr(cls, name, getattr(Noise, name))
        for name in ("completed", "hits", "reduce", "strength"):
            if name in vars(cls):
                setattr(cls, name, _checked(vars(cls)[name]))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, one.name), getattr(other, one.name)) for one in fields(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        # 0.0 and -0.0 are equal, and have other texts.
        return hash((type(self), repr(self.as_dict()).replace("-0.0", "0.0")))

    @underflowing
    def sample(self, clean: Any, *, rng: Any = None, channel_axis: int | None = None) -> Array:
        """Return a picture with noise of this kind, in the units of the clean one; float64, not clipped or rounded.

        Parameters
        ----------
        clean : array_like
            1-D signal, 2-D image, or volume or clip of three axes, with a channel axis where there is one.
        rng : seed or numpy.random.Generator, optional
        channel_axis : int, optional

        Raises
        ------
        InputError
            For samples that the noise cannot have, and for a model whose strength is open.
        """
        samples, restore = as_signal(clean, channel_axis, name="clean")
        self._check(samples, "clean")
        return np.asarray(restore(self._noisy(samples.astype(np.float64), check_generator(rng))))

    def _noisy(self, samples: Array, rng: np.random.Generator) -> Array:
        """Return samples (..., C) in double precision with noise, as `sample` asks for them."""
        raise NotImplementedError

    def _check(self, samples: Array, name: str = "image") -> None:
        """Refuse samples (..., C), an argument of this name, of which there is no such noise."""
        return  # most noise is everywhere

    @abstractmethod
    def describe(self) -> str:
        """Return the noise in words."""

    @abstractmethod
    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Undo what can be undone without a flow.

        Parameters
        ----------
        samples : array of shape (..., C)
            Finite, in the units of the input; one to three axes besides that of the channels.
        missing : bool array of shape (...), optional
            Samples that are missing already; their values do not matter.

        Raises
        ------
        InputError
            For samples whose shape, channels or values do not fit the model.
        """

    def completed(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Self:
        """Return the model with what `reduce` needs found from samples (..., C) where it was left open."""
        return self

    def of_channels(self, which: NDArray[np.bool_]) -> Noise:
        """Return the noise of the channels that are True in `which`."""
        return self

    def with_sigma(self, sigma: Any) -> tuple[Self, Any]:
        """Return the model with a `sigma` given beside it, and None; or itself and `sigma` if it has no use for it."""
        return self, sigma

    @property
    def white_sigma(self) -> Any:
        """The strength of white Gaussian noise, a number or one a channel; None for other noise."""
        return None

    @property
    def has_law(self) -> bool:
        """Whether the strength is known at each place."""
        return True

    @property
    def is_coloured(self) -> bool:
        """Whether it is Gaussian in the units of the input, but not white."""
        return False

    def strength(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> float | None:
        """Return the root mean square of Gaussian noise over samples (..., C); None for other noise."""
        return None

    def nearest_white(self, channels: int, dimension: int) -> Noise:
        """Return the nearest white noise for coloured noise; other noise itself."""
        return self

    def by_intensity(self, samples: Array) -> Noise:
        """Return Gaussian noise of the strength of counts, which `scaled` refuses; other noise itself."""
        return self

    def separated(self) -> Noise:
        """Return the noise with stripes as a part of their own."""
        return self

    def scaled(self, factor: float) -> Self:
        """Return the same noise with `factor` times the standard deviation.

        Raises
        ------
        InputError
            For a factor < 0, a strength out of range, counts, impulses, hot pixels and spikes (these unless the factor
            is 1), and a `sigma` that is to be found.
        """
        factor, value = check_number("factor", factor, minimum=0), getattr(self, self.amount)
        if value is None and self.undone:
            return self
        more = tuple(factor * one for one in value) if isinstance(value, tuple) else factor * self._known(self.amount)
        return replace(self, **{self.amount: more})  # type: ignore[type-var]  # all models are dataclasses

    def _known(self, name: str) -> Any:
        """Return the value of a field that may be left open."""
        if getattr(self, name) is None:
            raise InputError(f"{name}: got None, expected a number; `completed` finds it from samples")
        return getattr(self, name)

    def as_dict(self) -> dict[str, Any]:
        """Return what `noise_of` reads."""
        return {"kind": self.kind} | {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a JSON file that `load_noise` reads.

        Parameters
        ----------
        path : path
            A file that is there is replaced.

        Raises
        ------
        FileFormatError
            If the file cannot be written.
        """
        write_content(path, f"{encode(self.as_dict(), indent=None)}\n".encode())


@dataclass(frozen=True)
class Strewn(Noise):
    """Noise that replaces samples."""

    undone: ClassVar[bool] = True

    density: float | None = field(
        default=None, metadata={"minimum": 0, "below": 1, "hint": "the part of samples that is hit"}
    )

    def _hits(self, plane: Array, absent: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return where one channel (...) is hit."""
        raise NotImplementedError

    def _found(self, samples: Array, missing: NDArray[np.bool_] | None) -> Strewn:
        """Return what samples (..., C) show of it."""
        raise NotImplementedError

    def completed(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Self:
        if self.density is not None:
            return self
        found = self._found(samples, missing)
        return replace(self, **{one.name: getattr(found, one.name) for one in fields(found)})

    def hits(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
        """Return where samples are hit."""
        absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
        if self.density == 0:
            return np.zeros(samples.shape, bool)
        return np.stack([self._hits(samples[..., c], absent) for c in range(samples.shape[-1])], axis=-1)

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Mark a pixel as missing where one of its channels is hit."""
        if self.density is None:
            return self.completed(samples, missing).reduce(samples, missing)
        self._check(samples)
        found = np.asarray(self.hits(samples, missing).any(axis=-1))
        if missing is not None:
            found |= missing
        if found.all():
            raise InputError(f"image: every sample is hit or missing by the model ({self.describe()})")
        return Reduction(samples, missing=found if found.any() else missing)

    def scaled(self, factor: float) -> Self:
        """Refuse a factor other than 1: a replaced sample has no strength."""
        if check_number("factor", factor, minimum=0, strict=True) != 1:
            kind = self.kind.replace("-", " ")
            raise InputError(f"factor: got {factor:g} for {kind}, which have no strength; give another density")
        return self


class Subtracted(Noise):
    """Noise that is subtracted."""

    undone: ClassVar[bool] = True

    def _lies_on(self, samples: Array, missing: NDArray[np.bool_] | None) -> Array:
        """Return what lies on samples (..., C) in double precision."""
        raise NotImplementedError

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Subtract it; missing samples stay."""
        self._check(samples)
        found = self._lies_on(samples.astype(np.float64), missing)
        if missing is not None:
            found = np.where(missing[..., None], 0.0, found)
        return Reduction((samples - found).astype(samples.dtype), missing=missing)


def _same(one: Any, other: Any) -> bool:
    """Tell whether the values of a field are equal: arrays as a whole, tuples one by one."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other or (one != one and other != other))  # NaN stands for what is open


def _plain(value: Any) -> Any:
    if isinstance(value, Noise):
        return value.as_dict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return np.asarray(value).tolist() if isinstance(value, np.ndarray | np.generic) else value


@dataclass(frozen=True)
class NoiseEstimate:
    """What `estimate_noise` found.

    Attributes
    ----------
    model : Noise
    confidence : {'high', 'medium', 'low'}
    reasons : tuple of str
        What the verdict rests on.
    measured : dict
        What was measured, by name.
    whole : bool
        Whether the strength is that of the whole picture.
    """

    model: Noise
    confidence: str
    reasons: tuple[str, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    whole: bool = True

    @property
    def is_white(self) -> bool:
        """Whether the noise of the whole picture is white."""
        return self.whole and self.model.white_sigma is not None

    def __str__(self) -> str:
        """Return the verdict for people."""
        return verdict_of(self.model.describe(), self.confidence)


@dataclass(frozen=True)
class Mixture(Noise):
    """Several kinds of noise, in the order in which they are undone: what was added last comes first.

    Parameters
    ----------
    parts : list or tuple of Noise
        Such as ``[Impulses(0.05, 0, 255), Stripes(3.0), GaussianNoise(10.0)]``.

    Raises
    ------
    InputError
        For an empty list, and for entries that are no models or are mixtures.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import GaussianNoise, Impulses, Mixture
    >>> noise = Mixture([Impulses(0.1, 0, 255), GaussianNoise(5.0)])
    >>> z = noise.sample(np.full((64, 64), 100.0), rng=0)
    >>> bool(0.05 < np.mean((z == 0) | (z == 255)) < 0.15)
    True
    """

    kind: ClassVar[str] = "mixture"
    parts: Any

    def __post_init__(self) -> None:
        parts = tuple(self.parts) if isinstance(self.parts, list | tuple) else ()
        if not parts or not all(isinstance(part, Noise) and not isinstance(part, Mixture) for part in parts):
            raise InputError(f"parts: got {self.parts!r}, expected a list of models of noise, none of them "
                             "a mixture; put the parts of a mixture into the list")  # fmt: skip
        object.__setattr__(self, "parts", parts)

    def sample(self, clean: Any, *, rng: Any = None, channel_axis: int | None = None) -> Array:
        generator, picture = check_generator(rng), clean
        for part in reversed(self.parts):
            picture = part.sample(picture, rng=generator, channel_axis=channel_axis)
        return np.asarray(picture)

    @property
    def has_law(self) -> bool:
        return all(part.has_law for part in self.parts)

    def describe(self) -> str:
        told = [text for part in self.parts if (text := part.describe()) != NO_NOISE]
        return "; ".join(told) or NO_NOISE

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Undo the parts one after the other.

        Raises
        ------
        InputError
            As the parts, and for a `GaussianNoise` beside `Poisson`, `Rician`, `NoncentralChi` or `Speckle`.
        """
        result = Reduction(samples, missing=missing)
        for part in self.parts:
            result = _after(result, part.reduce(result.samples, result.missing), part)
        return result

    def with_sigma(self, sigma: Any) -> tuple[Self, Any]:
        parts = []
        for one in self.parts:
            part, sigma = one.with_sigma(sigma)
            parts.append(part)
        return replace(self, parts=parts), sigma

    def completed(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Self:
        """Find each part from what the parts before it leave."""
        parts, left = list(self.parts), Reduction(samples, missing=missing)
        asked = [n for n, part in enumerate(parts) if type(part).completed is not Noise.completed]
        for n, part in enumerate(parts[: max(asked, default=-1) + 1]):
            parts[n] = part.completed(left.samples, left.missing)
            if n < asked[-1]:
                left = parts[n].reduce(left.samples, left.missing)
        return replace(self, parts=parts)

    def of_channels(self, which: NDArray[np.bool_]) -> Self:
        return replace(self, parts=[part.of_channels(which) for part in self.parts])

    def by_intensity(self, samples: Array) -> Self:
        return replace(self, parts=[part.by_intensity(samples) for part in self.parts])

    def scaled(self, factor: float) -> Self:
        """Scale the parts that are left to a flow."""
        return replace(self, parts=[part if part.undone else part.scaled(factor) for part in self.parts])


def _after(first: Reduction, second: Reduction, part: Noise) -> Reduction:
    """Return two reductions as one, the second that of a part."""
    before, after, rest = first.back, second.back, second.rest
    if first.rest is not None and not second.keeps_units:
        raise InputError(f"noise: got {part.kind} after a Gaussian noise in a mixture, expected it before: its units "
                         "are others; give the Gaussian noise to it where it has one (Poisson(sigma=...))")  # fmt: skip
    if rest is not None and not first.keeps_units:
        raise InputError(f"noise: got {part.kind} in a mixture after a part that changes the units, expected it "
                         "not to say how strong it is; give that part the noise (Poisson(sigma=...))")  # fmt: skip
    if first.rest is not None:
        channels, dimension = second.samples.shape[-1], second.samples.ndim - 1
        rest = first.rest if rest is None else first.rest.beside(rest, channels, dimension)
    back = after if first.keeps_units else before if second.keeps_units else lambda u: before(after(u))
    return replace(second, back=back, rest=rest)
