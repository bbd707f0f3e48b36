"""What every model of noise can do: be sampled from, described, written down, made stronger, and undone in part."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from nlflow.store.atomic import write_content
from nlflow.store.encoding import encode

if TYPE_CHECKING:
    from nlflow.denoising.noise.gaussian import GaussianNoise

Array = NDArray[Any]


def same(u: Array) -> Array:
    """Return an estimate whose units are those of the input already."""
    return u


@dataclass(frozen=True)
class Reduction:
    """Samples whose noise is Gaussian, or of which some are missing: what a flow of E can go on with.

    Reductions follow each other: what one leaves, the next one takes (`Mixture.reduce`).

    Attributes
    ----------
    samples : array of shape (..., C)
        In units in which the remaining noise is additive and Gaussian.
    back : callable
        From an estimate in these units to one in the units of the input, without bias; `same` where they are the same.
    missing : bool array of shape (...), or None
        Samples that tell nothing: no fidelity binds the flow to them.
    rest : GaussianNoise or None
        The noise that remains; None where the model does not say how strong it is.
    """

    samples: Array
    back: Callable[[Array], Array] = same
    missing: NDArray[np.bool_] | None = None
    rest: GaussianNoise | None = None

    @property
    def keeps_units(self) -> bool:
        """Whether the samples are in the units of the input, so that they can be given back as they are."""
        return self.back is same


class Noise(ABC):
    """A model of noise: a frozen dataclass whose fields are numbers and arrays.

    A subclass says how a picture is sampled with it, how it is told to people, how a denoiser meets it (`reduce`), and
    what the same noise is with another strength. All else has an answer here that is right for most models. A model of
    the package is entered in `nlflow.denoising.noise.names`.
    """

    kind: ClassVar[str]
    """Name in files and on the command line."""
    scalable: ClassVar[bool] = True
    """Whether it may be stronger or weaker; not where its strength follows from the samples, as that of counts does."""
    undone: ClassVar[bool] = False
    """Whether `reduce` leaves nothing of it to a flow: it is subtracted, or where it is samples are missing."""
    in_blocks: ClassVar[bool] = False
    """Whether arrays in blocks know it: `reduce` looks at each sample alone, and leaves white noise of strength 1."""

    def __init_subclass__(cls, **words: Any) -> None:
        """Give a model the comparison of models, which knows arrays; that of dataclasses does not."""
        super().__init_subclass__(**words)
        for name in ("__eq__", "__hash__"):
            if name not in vars(cls):
                setattr(cls, name, getattr(Noise, name))

    def __eq__(self, other: object) -> bool:
        """Tell whether another model is of the same class and has the same numbers, to the last bit."""
        if type(other) is not type(self):
            return NotImplemented
        return all(_same(getattr(self, one.name), getattr(other, one.name)) for one in fields(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        """Return a number that is the same for models that are equal."""
        return hash((type(self), repr(self.as_dict())))

    @abstractmethod
    def sample(self, clean: Any, *, rng: Any = None, channel_axis: int | None = None) -> Array:
        """Return a picture with noise of this kind, in the units of the clean one; float64, not clipped or rounded.

        Parameters
        ----------
        clean : array_like
            Signal, image, or volume or clip of three axes, with a channel axis where there is one.
        rng : seed or numpy.random.Generator, optional
        channel_axis : int, optional
        """

    @abstractmethod
    def describe(self) -> str:
        """Return what this noise is, in a few words for people."""

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
            For a model that does not fit the samples: their shape, their channels, their values.
        """

    def completed(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Self:
        """Return the same noise with what it leaves open found from samples (..., C); itself where nothing is open."""
        return self

    def of_channels(self, which: NDArray[np.bool_]) -> Noise:
        """Return the same noise for some of the channels alone, True in `which`; itself where it is alike in all."""
        return self

    def with_sigma(self, sigma: Any) -> tuple[Self, Any]:
        """Return the same noise with what a `sigma` that is given beside it says of it, and what is left of `sigma`."""
        return self, sigma

    @property
    def white_sigma(self) -> Any:
        """The strength of noise that is white and Gaussian, one number or one a channel; None for all other noise."""
        return None

    @property
    def is_coloured(self) -> bool:
        """Whether it is Gaussian in the units of the input, but not white: `strength` is its root mean square then."""
        return False

    def strength(
        self, samples: Array, missing: NDArray[np.bool_] | None = None, *, counted: bool = False
    ) -> float | None:
        """Return the root mean square over samples (..., C), or of what a denoiser counts; None where none is known."""
        return None

    def nearest_white(self, channels: int, dimension: int) -> Noise:
        """Return the white noise that comes nearest to coloured one; other noise itself."""
        return self

    def by_intensity(self, samples: Array) -> Noise:
        """Return noise that is scalable: in place of counts Gaussian noise that follows the intensity of samples."""
        return self

    def separated(self) -> Noise:
        """Return the same noise with what reaches farther than patches, as stripes do, as a part of its own."""
        return self

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """Return the same noise with a standard deviation that is `factor` times as large."""

    def as_dict(self) -> dict[str, Any]:
        """Return the kind and the fields as plain numbers, lists and texts, ready for JSON."""
        return {"kind": self.kind} | {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a file, from which `load_noise` reads it to the last bit.

        Parameters
        ----------
        path : path
            JSON; a file that is there is replaced. It appears complete or not at all.

        Raises
        ------
        FileFormatError
            If the file cannot be written.
        """
        write_content(path, f"{encode(self.as_dict(), indent=None)}\n".encode())


def _same(one: Any, other: Any) -> bool:
    """Tell whether the values of a field are equal: arrays as a whole, tuples one by one."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


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
        Of the noise.
    confidence : {'high', 'medium', 'low'}
        High where flat parts show nothing but this noise, low where structure is everywhere.
    reasons : tuple of str
        What the verdict rests on, one sentence each.
    measured : dict
        By name: the spectrum of the luminance before it was shaped into a model, and figures of the blocks.
    whole : bool
        Whether the strength is that of the whole picture. False where its flat parts alone tell it.
    """

    model: Noise
    confidence: str
    reasons: tuple[str, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    whole: bool = True

    @property
    def is_white(self) -> bool:
        """Whether the noise is white in the whole picture, so that its strength is estimated there."""
        return self.whole and self.model.white_sigma is not None

    def __str__(self) -> str:
        """Return the verdict for people."""
        return f"{self.model.describe()} (confidence {self.confidence})"
