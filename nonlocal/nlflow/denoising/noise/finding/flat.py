"""Flat parts of a picture, and the noise of a part that is named."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import OfBlocks, OfFlat, OfRules
from nlflow.denoising.noise.finding.blocks import BlockNoise, Rules, in_units, noise_of_all, planes_of
from nlflow.denoising.noise.models.base import NoiseEstimate
from nlflow.denoising.noise.models.gaussian import GaussianNoise
from nlflow.denoising.noise.spectra import down
from nlflow.domains.samples import range_of
from nlflow.errors import InputError, shortened

Array = NDArray[Any]
_ONE_LEVEL: Final = "how noise follows the intensity cannot be told from one level: it counts as the same everywhere"


@dataclass(frozen=True)
class FlatParts:
    """Where a picture is flat.

    Attributes
    ----------
    outside : bool array of shape (H, W)
        Samples of the picture of half the size that lie in no flat tile.
    agreed : float
        Share of the flat tiles whose noise is alike; the others are stronger and may be texture.
    """

    outside: NDArray[np.bool_]
    agreed: float

    def at(self, level: int, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """Return the samples outside in the picture that was halved `level` times."""
        rows, columns = (
            np.minimum((np.arange(n) << level) // 2, m - 1) for n, m in zip(shape, self.outside.shape, strict=True)
        )
        return np.asarray(self.outside[np.ix_(rows, columns)])


def flat_parts(half: Array, floor: float, absent: NDArray[np.bool_] | None = None) -> FlatParts | None:
    """Return the flat parts of a picture from its luminance in half the size; None where there are too few. O(N).

    Tiles are flat where the power of low frequencies is at most `OfFlat.red` times that of middle ones, and that of the
    strongest block at most `OfFlat.uneven` times that of the weakest. Those of nearly the least noise are alike.

    Parameters
    ----------
    half : array of shape (H, W)
    floor : float
        Standard deviation that noise must have at least: what is weaker was rounded away and tells nothing.
    absent : bool array of shape (H, W), optional
        Samples that tell nothing: tiles that touch one are left out.
    """
    if min(half.shape) < OfFlat.tile:
        return None
    step = OfFlat.step * math.ceil(math.sqrt(half.size / OfFlat.most))
    tiles = sliding_window_view(half, (OfFlat.tile, OfFlat.tile))[::step, ::step]
    red, uneven, power = _figures(tiles.reshape(-1, OfFlat.tile, OfFlat.tile))
    flat = (red < OfFlat.red) & (uneven < OfFlat.uneven) & (power > floor**2)
    if absent is not None:
        flat &= ~sliding_window_view(absent, (OfFlat.tile, OfFlat.tile))[::step, ::step].any(axis=(2, 3)).ravel()
    if np.count_nonzero(flat) < OfFlat.least:
        return None
    alike = flat & (power <= OfFlat.alike**2 * np.quantile(power[flat], OfFlat.quiet))
    outside = np.ones(half.shape, bool)
    for row, column in step * np.argwhere(alike.reshape(tiles.shape[:2])):
        outside[row : row + OfFlat.tile, column : column + OfFlat.tile] = False
    return FlatParts(outside, float(np.count_nonzero(alike) / np.count_nonzero(flat)))


def checked_part(samples: Array, flat: Any) -> tuple[slice, slice]:
    """Return the rows and columns of a part of samples (H, W, C) that a user names.

    Raises
    ------
    InputError
        For anything but two slices inside an image.
    """
    if samples.ndim != 3 or min(samples.shape[:2]) < 2:
        raise InputError(f"flat: got a part of samples of shape {samples.shape[:-1]}, expected an image")
    if not (isinstance(flat, tuple) and len(flat) == 2 and all(isinstance(s, slice) for s in flat)):
        raise InputError(f"flat: got {shortened(flat)}, expected two slices, such as np.s_[20:84, 300:400]")
    limits = [
        (0 if one.start is None else one.start, size if one.stop is None else one.stop)
        for one, size in zip(flat, samples.shape, strict=False)
    ]
    whole = [type(end) is int or isinstance(end, np.integer) for pair in limits for end in pair]
    if not all(whole) or any(one.step not in (None, 1) for one in flat):
        raise InputError(f"flat: got {flat}, expected slices of whole numbers without a step")
    for name, (first, end), size in zip(("rows", "columns"), limits, samples.shape, strict=False):
        if not 0 <= first < end <= size:
            raise InputError(f"flat: got {name} {first}:{end} of an image of {samples.shape[0]} x {samples.shape[1]}, "
                             f"expected 0 <= first < end <= {size}")  # fmt: skip
    (top, bottom), (left, right) = limits
    return slice(top, bottom), slice(left, right)


def noise_of_part(samples: Array, part: tuple[slice, slice]) -> NoiseEstimate:
    """Return the noise of samples (H, W, C) as a part of them shows it that holds nothing but noise. O(N).

    All of its blocks are measured. What is white has a strength for each channel; what falls at high frequencies has
    the spectrum that was found, and that of a camera where compression cut them off. One level does not tell how noise
    follows the intensity.

    Raises
    ------
    InputError
        For a part that is too small or not flat: its samples lie at an end of their range, some of its blocks have much
        more power than others, or its level varies by more than the noise.
    """
    own = samples[part].astype(np.float64)
    place = f"flat: rows {part[0].start}:{part[0].stop}, columns {part[1].start}:{part[1].stop}"
    if min(own.shape[:2]) < OfFlat.smallest:
        raise InputError(f"{place}: got {own.shape[0]} x {own.shape[1]} samples, expected at least {OfFlat.smallest} x "
                         f"{OfFlat.smallest}; take a larger flat part")  # fmt: skip
    at_end = max(float(np.mean(own == end, axis=(0, 1)).max()) for end in (own.min((0, 1)), own.max((0, 1))))
    if at_end > OfFlat.at_end:
        raise InputError(f"{place}: got {at_end:.0%} of its samples at the least or greatest value, expected noise, "
                         "which was clipped or rounded away; take a part that is neither black nor white")  # fmt: skip
    span, level = range_of(samples), own.mean(axis=(0, 1))
    rest = _without_shading(own)
    colour = own.shape[2] == 3
    planes = rest / span @ planes_of(own.shape[2]).T
    if float(np.abs(planes).max()) < OfFlat.nothing:
        raise InputError(f"{place}: got no noise at all, expected some; take a part that has it")
    sigma, correlation = _moments(rest)
    _check_flat(planes[..., :1], place)
    spread = float(planes[..., 0].std())
    found: list[list[BlockNoise | None]] = []
    while len(found) < OfRules.levels and min(planes.shape[:2]) >= OfBlocks.side:
        blocks = [noise_of_all(planes[..., c], 1 / 255) for c in range(planes.shape[2])]
        if blocks[0] is None:
            break
        found.append(blocks)
        planes = down(planes)
    white = GaussianNoise(sigma / span if len(sigma) > 1 else float(sigma[0]) / span)
    verdict = Rules(white, found, colour, 1.0).estimate_flat()
    model: Any = verdict.model
    noise = float(np.sqrt(model.powers(own.shape[2], 2)[0 if colour else slice(None)].mean()))
    if spread > OfFlat.beyond * noise:
        raise InputError(f"{place}: got a level that varies by {spread * span:.3g} beside noise of {noise * span:.3g}, "
                         f"expected at most {OfFlat.beyond:g} times as much; it is not flat; take another "
                         "part")  # fmt: skip
    reason = f"measured in rows {part[0].start}:{part[0].stop}, columns {part[1].start}:{part[1].stop}"
    verdict = replace(verdict, reasons=(*verdict.reasons, reason, _ONE_LEVEL))
    measured = {"level": level, "sigma": sigma, "correlation": correlation}
    return replace(in_units(verdict, span), measured=measured, whole=False)


def _check_flat(plane: Array, place: str) -> None:
    """Refuse a part whose luminance (H, W, 1) has its power at some places, or changes too smoothly for noise."""
    half = down(plane)[..., 0]
    power = _powers(
        sliding_window_view(half, (OfBlocks.side, OfBlocks.side))[:: OfFlat.step, :: OfFlat.step].reshape(
            -1, OfBlocks.side, OfBlocks.side
        )
    )
    excess = float(power.mean() / np.median(power))
    if excess > OfFlat.excess:
        raise InputError(f"{place}: got blocks of {excess:.3g} times their median power on average, expected at "
                         f"most {OfFlat.excess:g} times; it is not flat (an edge or letters); take another "
                         "part")  # fmt: skip
    alike = float(_moments(plane)[1].min())
    if alike > OfFlat.smooth:
        raise InputError(f"{place}: got neighbours with a correlation of {alike:.2f}, expected at most "
                         f"{OfFlat.smooth:g} of noise; it is not flat (shades, letters or texture); take "
                         "another part")  # fmt: skip


def _without_shading(own: Array) -> Array:
    """Return samples (H, W, C) without the surface of second order that fits them best: light that falls off."""
    y, x = (axis.ravel() for axis in np.meshgrid(*(np.linspace(-1, 1, n) for n in own.shape[:2]), indexing="ij"))
    surface = np.stack([np.ones_like(y), y, x, y * y, y * x, x * x], axis=1)
    values = own.reshape(-1, own.shape[2])
    return np.asarray((values - surface @ np.linalg.lstsq(surface, values, rcond=None)[0]).reshape(own.shape))


def _moments(rest: Array) -> tuple[Array, Array]:
    """Return the standard deviation of each channel, and its correlation with the next row and column (C, 2)."""
    variance = np.square(rest).mean(axis=(0, 1))
    below, beside = (rest[1:] * rest[:-1]).mean(axis=(0, 1)), (rest[:, 1:] * rest[:, :-1]).mean(axis=(0, 1))
    return np.sqrt(variance), np.stack([below, beside], axis=1) / variance[:, None]


def _figures(tiles: Array) -> tuple[Array, Array, Array]:
    """Return for tiles (N, 16, 16) how red and how uneven they are, and their power at middle frequencies."""
    squares = _squares(tiles)
    slope = (
        np.add.outer(np.arange(OfFlat.tile), np.arange(OfFlat.tile)) == 1
    )  # of a plane: light that falls off is no structure
    power = squares[:, _band(OfFlat.tile, OfFlat.middle)].mean(axis=1)
    low = squares[:, _band(OfFlat.tile, OfFlat.low) & ~slope].mean(axis=1)
    corners = range(0, OfFlat.tile - OfBlocks.side + 1, OfFlat.step)
    blocks = np.stack([
        _powers(tiles[:, row : row + OfBlocks.side, column : column + OfBlocks.side])
        for row, column in product(corners, corners)
    ])  # fmt: skip
    tiny = np.finfo(np.float64).tiny
    with np.errstate(over="ignore"):  # beside nothing all is infinitely red and uneven, and no tile of noise
        return low / np.maximum(power, tiny), blocks.max(axis=0) / np.maximum(blocks.min(axis=0), tiny), power


def _powers(blocks: Array) -> Array:
    """Return the power of blocks (N, 8, 8) at middle frequencies."""
    return np.asarray(_squares(blocks)[:, _band(OfBlocks.side, OfFlat.of_blocks)].mean(axis=1))


def _squares(tiles: Array) -> Array:
    """Return the squared orthonormal cosine coefficients of squares (N, n, n)."""
    from scipy.fft import dct

    basis = dct(np.eye(tiles.shape[-1]), norm="ortho", axis=0)
    return np.asarray(np.square(basis @ tiles @ basis.T))


def _band(size: int, limits: tuple[int, int]) -> NDArray[np.bool_]:
    """Return which cosine coefficients of a square have a frequency within limits, the greater of both axes."""
    frequency = np.arange(size)
    greater = np.maximum(frequency[:, None], frequency)
    return np.asarray((greater >= limits[0]) & (greater <= limits[1]))
