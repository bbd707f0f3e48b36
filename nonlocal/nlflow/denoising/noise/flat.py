"""Flat parts of a picture: tiles that show nothing but noise, found in the picture of half the size.

Blocks are judged by their energies alone; where few intensities of a picture have flat parts, the quietest blocks of the
other ones are structure. A tile of several blocks tells more: noise has the same strength all over it, and is hardly
stronger at low frequencies. An edge is in some of its blocks, shading and letters are at low frequencies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow.denoising.noise.blocks import SIDE

Array = NDArray[Any]

TILE: Final = 2 * SIDE  # samples along a side of a tile, in the picture of half the size
_STEP: Final = 4  # samples from one tile to the next, and from one of its blocks to the next
_LOW: Final = (1, 3)  # cosine frequencies of a tile along its axes, the greater of both
_MIDDLE: Final = (4, 10)
_OF_BLOCKS: Final = (2, 5)  # those of a block: the same share of the highest
_RED: Final = 3.0  # power at low frequencies over that at middle ones, at most: 91 % of tiles of noise blurred by 1 px
_UNEVEN: Final = 4.0  # power in the strongest block over that in the weakest, at most: 99.9 % of tiles of white noise
_QUIET: Final = 0.05  # of the flat tiles, below which their least noise is
_ALIKE: Final = 2.0  # noise of a tile over that, at most: it follows the light, and chance alone makes 1.4 of it
_LEAST: Final = (TILE // _STEP) ** 2  # tiles: as many as one overlaps with
_MOST: Final = 200_000  # samples at whose corners, every `_STEP`, tiles begin; fewer tiles in a larger picture


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

    Tiles are flat where the power of low frequencies is at most `_RED` times that of middle ones, and that of the
    strongest block at most `_UNEVEN` times that of the weakest. Those of nearly the least noise are alike.

    Parameters
    ----------
    half : array of shape (H, W)
    floor : float
        Standard deviation that noise must have at least: what is weaker was rounded away and tells nothing.
    absent : bool array of shape (H, W), optional
        Samples that tell nothing: tiles that touch one are left out.
    """
    if min(half.shape) < TILE:
        return None
    step = _STEP * math.ceil(math.sqrt(half.size / _MOST))
    tiles = sliding_window_view(half, (TILE, TILE))[::step, ::step]
    red, uneven, power = _figures(tiles.reshape(-1, TILE, TILE))
    flat = (red < _RED) & (uneven < _UNEVEN) & (power > floor**2)
    if absent is not None:
        flat &= ~sliding_window_view(absent, (TILE, TILE))[::step, ::step].any(axis=(2, 3)).ravel()
    if np.count_nonzero(flat) < _LEAST:
        return None
    alike = flat & (power <= _ALIKE**2 * np.quantile(power[flat], _QUIET))
    outside = np.ones(half.shape, bool)
    for row, column in step * np.argwhere(alike.reshape(tiles.shape[:2])):
        outside[row : row + TILE, column : column + TILE] = False
    return FlatParts(outside, float(np.count_nonzero(alike) / np.count_nonzero(flat)))


def _figures(tiles: Array) -> tuple[Array, Array, Array]:
    """Return for tiles (N, 16, 16) how red and how uneven they are, and their power at middle frequencies."""
    squares = _squares(tiles)
    slope = np.add.outer(np.arange(TILE), np.arange(TILE)) == 1  # of a plane: light that falls off is no structure
    power = squares[:, _band(TILE, _MIDDLE)].mean(axis=1)
    low = squares[:, _band(TILE, _LOW) & ~slope].mean(axis=1)
    corners = range(0, TILE - SIDE + 1, _STEP)
    blocks = np.stack([
        _squares(tiles[:, row : row + SIDE, column : column + SIDE])[:, _band(SIDE, _OF_BLOCKS)].mean(axis=1)
        for row, column in product(corners, corners)
    ])  # fmt: skip
    tiny = np.finfo(np.float64).tiny
    return low / np.maximum(power, tiny), blocks.max(axis=0) / np.maximum(blocks.min(axis=0), tiny), power


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
