"""Several kinds of noise at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square
from nlflow.denoising.noise.base import Array, Noise, Reduction
from nlflow.denoising.noise.figures import OfStripes
from nlflow.denoising.noise.gaussian import GaussianNoise
from nlflow.denoising.noise.stripes import Stripes
from nlflow.errors import InputError


@dataclass(frozen=True)
class Mixture(Noise):
    """Several kinds of noise, in the order in which they are undone: what came last comes first.

    Parameters
    ----------
    parts : sequence of Noise
        Such as ``[Impulses(0.05, 0, 255), Stripes(3.0), GaussianNoise(10.0)]``.

    Raises
    ------
    InputError
        For anything else.

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
        """Check the parts."""
        parts = tuple(self.parts) if isinstance(self.parts, list | tuple) else ()
        if not parts or not all(isinstance(part, Noise) and not isinstance(part, Mixture) for part in parts):
            raise InputError(f"parts: got {self.parts!r}, expected a list of models of noise")
        object.__setattr__(self, "parts", parts)

    def sample(self, clean: Any, *, rng: Any = None, channel_axis: int | None = None) -> Array:
        """Return a picture with all of them; see `Noise.sample`."""
        generator, picture = np.random.default_rng(rng), clean
        for part in reversed(self.parts):
            picture = part.sample(picture, rng=generator, channel_axis=channel_axis)
        return np.asarray(picture)

    def describe(self) -> str:
        """Return what this noise is, in a few words."""
        return "; ".join(part.describe() for part in self.parts)

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Undo one after the other; see `Noise.reduce`. What Gaussian parts leave adds up.

        Raises
        ------
        InputError
            As the parts; and for a Gaussian noise before or after a part that changes the units, in which nobody knows
            how strong it is.
        """
        result = Reduction(samples, missing=missing)
        for part in self.parts:
            result = _after(result, part.reduce(result.samples, result.missing), part)
        return result

    def of_channels(self, which: NDArray[np.bool_]) -> Self:
        """Return the noise of some channels; see `Noise.of_channels`."""
        return replace(self, parts=[part.of_channels(which) for part in self.parts])

    def by_intensity(self, samples: Array) -> Self:
        """Return the parts with noise that is scalable; see `Noise.by_intensity`."""
        return replace(self, parts=[part.by_intensity(samples) for part in self.parts])

    def scaled(self, factor: float) -> Self:
        """Return the same with `factor` times the noise that is left to a flow; what is undone before stays.

        Raises
        ------
        InputError
            For counts among the parts, whose noise follows from them.
        """
        return replace(self, parts=[part if part.undone else part.scaled(factor) for part in self.parts])


def with_stripes(noise: GaussianNoise) -> Noise:
    """Return noise whose spectrum has a line of no extent along an axis as stripes and the rest.

    Such noise is the same along whole rows or columns, much farther than a patch reaches.
    """
    if noise.spectrum is None or noise.spectrum.shape[1] == 1 or noise.opponent or noise.intensities is not None:
        return noise
    for axis in (0, 1):
        power = np.moveaxis(noise.spectrum, axis + 1, 1)  # frequencies across the stripes, then along them
        line, beside = power[:, :, 0], (power[:, :, 1] + power[:, :, -1]) / 2
        share = float((line - beside).sum() / power.sum())
        if share < OfStripes.line or beside.sum() > OfStripes.beside * line.sum():
            continue
        rest = power.copy()
        rest[:, :, 0] = beside
        level = root_mean_square(np.atleast_1d(noise.sigma))
        stripes = Stripes(level * math.sqrt(share), axis=axis, shared=False)
        sigma = level * math.sqrt(max(1 - share, 0.0))
        left = (
            GaussianNoise(sigma, np.moveaxis(rest, 1, axis + 1))
            if sigma > OfStripes.weak * level
            else GaussianNoise(0.0)
        )
        return Mixture([stripes, left])
    return noise


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
        rest = first.rest.beside(rest or GaussianNoise(0.0), second.samples.shape[-1], second.samples.ndim - 1)
    back = after if first.keeps_units else before if second.keeps_units else lambda u: before(after(u))
    return replace(second, back=back, rest=rest)
