"""Hot pixels: single samples that are far too bright, in one place of a volume or the same in all frames of a clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from nlflow._array import underflowing
from nlflow.denoising.noise.base import Array, Noise, Reduction
from nlflow.denoising.noise.estimation import estimate_sigmas
from nlflow.denoising.noise.figures import OfHot
from nlflow.domains.samples import as_signal
from nlflow.errors import InputError, check_number


@underflowing
@dataclass(frozen=True)
class HotPixels(Noise):
    """Single samples far brighter than what is around them: broken pixels, cosmic rays, sparks.

    Parameters
    ----------
    density : float
        Part of the pixels that is hot, 0 <= density < 1.
    level : float
        Mean of what hot pixels add, in the units of the input, >= 0; only `sample` uses it.
    fixed : bool
        Whether the same pixels are hot in all frames or slices, along the first axis of a volume or clip, as those of
        a camera are. Single images have no frames.

    Raises
    ------
    InputError
        For a density outside [0, 1), a negative level, and numbers that are not finite.

    Notes
    -----
    Of a hot pixel nothing is known but that it is one: `reduce` says where they are, and the other samples stay as they
    are. One is far above its neighbours, and none of these is: 12 standard deviations of what is around it, or 8 of the
    median over the frames with `fixed`. Warm pixels below that stay.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.denoising.noise import HotPixels
    >>> clip = np.random.default_rng(0).normal(100, 5, (10, 64, 64))
    >>> noise = HotPixels(0.002, level=500.0)
    >>> noisy = noise.sample(clip, rng=1)
    >>> found = noise.reduce(noisy[..., None])
    >>> bool(np.array_equal(found.missing, noisy != clip))
    True
    """

    kind: ClassVar[str] = "hot-pixels"
    undone: ClassVar[bool] = True

    density: float
    level: float = 0.0
    fixed: bool = True

    def __post_init__(self) -> None:
        """Check the numbers."""
        density = check_number("density", self.density, minimum=0, below=1, hint="the part of pixels that is hot")
        level = check_number("level", self.level, minimum=0, hint="the mean of what hot pixels add")
        if not isinstance(self.fixed, bool | np.bool_):
            raise InputError(f"fixed: got {self.fixed!r}, expected True or False")
        for name, value in (("density", density), ("level", level), ("fixed", bool(self.fixed))):
            object.__setattr__(self, name, value)

    def sample(self, clean: Any, *, rng: Any = None, channel_axis: int | None = None) -> Array:
        """Return a picture with hot pixels, each in one channel; they add an exponential variable of mean `level`."""
        samples, restore = as_signal(clean, channel_axis)
        self._check_frames(samples)
        generator = np.random.default_rng(rng)
        shape = (1, *samples.shape[1:]) if self.fixed else samples.shape
        added = np.where(generator.random(shape) < self.density, generator.exponential(self.level, shape), 0.0)
        return np.asarray(restore(samples.astype(np.float64) + added))

    def describe(self) -> str:
        """Return what this noise is, in a few words for people."""
        where = "pixels, the same in all frames" if self.fixed else "samples"
        return f"hot pixels: {100 * self.density:.3g} % of the {where}"

    def reduce(self, samples: Array, missing: NDArray[np.bool_] | None = None) -> Reduction:
        """Say where hot pixels are: these samples are missing, the others stay as they are.

        A pixel is missing where any channel is hot, and where it was before. O(N).

        Parameters
        ----------
        samples : array of shape (..., C)
            Finite, in the units of the input; one to three axes besides that of the channels.
        missing : bool array of shape (...), optional
            Samples that are missing already; their values do not matter.

        Raises
        ------
        InputError
            With `fixed` for what has no frames, and where no sample is left.
        """
        self._check_frames(samples)
        absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
        if self.density == 0:
            return Reduction(samples, missing=missing)
        found = absent.copy()
        for c in range(samples.shape[-1]):
            found |= _hot(samples[..., c], absent, self.fixed)
        if found.all():
            raise InputError(f"image: every sample is hot or missing by the model ({self.describe()})")
        return Reduction(samples, missing=found if found.any() else missing)

    def scaled(self, factor: float) -> Self:
        """Refuse: hot pixels have no standard deviation.

        Raises
        ------
        InputError
            For any factor but 1.
        """
        if check_number("factor", factor, minimum=0, strict=True) == 1:
            return self
        raise InputError(f"factor: got {factor:g} for hot pixels, which have no strength; give another density")

    def _check_frames(self, samples: Array) -> None:
        if self.fixed and (samples.ndim != 4 or len(samples) < OfHot.least_frames):
            raise InputError(
                f"image: got shape {samples.shape[:-1]} with hot pixels that are the same in all frames, expected a "
                f"clip or stack of at least {OfHot.least_frames} frames; for single ones "
                "HotPixels(density, fixed=False)"
            )


def find_hot_pixels(samples: Array, missing: NDArray[np.bool_] | None = None) -> HotPixels | None:
    """Find hot pixels of a clip or volume: those that are the same in all frames, or else single samples.

    Parameters
    ----------
    samples : array of shape (D, H, W, C)
        Finite.
    missing : bool array of shape (D, H, W), optional
        Samples that are missing; their values do not matter.

    Returns
    -------
    HotPixels or None
        None where there are none: five are needed, and 20 in a million.
    """
    absent = np.zeros(samples.shape[:-1], bool) if missing is None else missing
    for fixed in (True, False):
        if samples.ndim != 4 or (fixed and len(samples) < OfHot.least_frames):
            continue
        found = np.zeros(absent.shape, bool)
        for c in range(samples.shape[-1]):
            found |= _hot(samples[..., c], absent, fixed)
        count = np.count_nonzero(found[0] if fixed else found)
        size = found[0].size if fixed else found.size
        if count >= OfHot.least_count and OfHot.least_share < count / size < OfHot.most_share:
            hot = samples.astype(np.float64)[found].max(axis=-1)
            level = float(hot.mean() - np.median(samples[~(found | absent)]))
            return HotPixels(count / size, max(level, 0.0), fixed)
    return None


def _hot(values: Array, absent: NDArray[np.bool_], fixed: bool) -> NDArray[np.bool_]:
    """Return where one channel is hot."""
    present = values[~absent]
    if present.size == 0 or present.min() == present.max():
        return np.zeros(absent.shape, bool)
    # In units of the largest, so that no difference leaves the range of floats.
    unit = float(np.abs(present).max())
    scaled = np.where(absent, 0.0, values.astype(np.float64) / unit)
    if not fixed:
        return _alone(scaled, absent, OfHot.out[False])
    known = np.count_nonzero(~absent, axis=0)
    ordered = np.sort(np.where(absent, np.inf, scaled), axis=0)
    middle = np.take_along_axis(ordered, np.maximum(known - 1, 0)[None] // 2, axis=0)[0]
    unknown = known < OfHot.least_frames
    return np.broadcast_to(_alone(np.where(unknown, 0.0, middle), unknown, OfHot.out[True]), absent.shape) & ~absent


def _alone(values: NDArray[np.float64], unknown: NDArray[np.bool_], out: float) -> NDArray[np.bool_]:
    """Return where a sample is so many standard deviations above what is around it, and no neighbour is."""
    from scipy.ndimage import maximum_filter

    found = np.zeros(values.shape, bool)
    sigma = float(estimate_sigmas(values[..., None], unknown)[0])
    if sigma == 0:
        return found
    low, high = np.quantile(values[~unknown], [OfHot.ends, 1 - OfHot.ends])
    sigma = max(sigma, OfHot.least_step / out * float(high - low))
    ring = np.ones((3,) * values.ndim, bool)
    ring[(1,) * values.ndim] = False
    beside = maximum_filter(np.where(unknown, -np.inf, values), footprint=ring, mode="constant", cval=-np.inf)
    with np.errstate(invalid="ignore"):  # all unknown
        rough = ~unknown & (values - beside > out / 3 * sigma)
    places = np.argwhere(rough)
    reach = OfHot.reach[values.ndim]
    offsets = np.argwhere(np.ones((2 * reach + 1,) * values.ndim))
    padded = np.pad(np.where(unknown, np.nan, values), reach, constant_values=np.nan)
    for part in np.array_split(places, max(len(places) // 2**14, 1)):
        around = padded[tuple(np.moveaxis(part[:, None] + offsets, -1, 0))]
        around = np.delete(around, len(offsets) // 2, axis=1)
        known = np.isfinite(around).sum(axis=1) > len(offsets) // 4
        part, around = part[known], around[known]
        low, middle, high = np.nanquantile(around, [0.25, 0.5, 0.75], axis=1) if len(part) else np.empty((3, 0))
        at = tuple(part.T)
        above = values[at] - middle
        spread = np.maximum((high - low) / OfHot.quartiles, sigma)
        found[at] = (above > out * spread) & (above > OfHot.alone * (beside[at] - middle))
    return found
