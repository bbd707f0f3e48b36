"""Pictures enlarged by repeating their samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import OfEnlarged, OfWindows
from nlflow.denoising.noise.finding.sigma import channel_levels
from nlflow.denoising.noise.models.base import Array
from nlflow.denoising.noise.models.gaussian import GaussianNoise


@dataclass(frozen=True)
class Enlarged:
    """A picture of cells (side, side), the first of them at a corner, and its noise; None where they are even."""

    side: int
    corner: tuple[int, int]
    noise: GaussianNoise | None

    def small(self, samples: Array) -> Array:
        return samples[self.corner[0] :: self.side, self.corner[1] :: self.side]


def find_enlarged(samples: Array, missing: NDArray[np.bool_] | None = None) -> Enlarged | None:
    """Return the cells of an image (H, W, C), whose samples differ by white noise or not at all."""
    if samples.ndim != 3 or missing is not None:
        return None
    starts = [max(n - OfEnlarged.most, 0) // 2 for n in samples.shape[:2]]
    planes = samples[tuple(slice(start, start + OfEnlarged.most) for start in starts)].astype(np.float64)
    along = [_steps(planes, axis) for axis in (0, 1)]
    best, side, place = 0.0, 0, (0, 0)
    for k in range(2, OfEnlarged.largest + 1):
        if min(planes.shape[:2]) < OfEnlarged.least * k:
            break
        (one, first), (other, second) = (_border(steps, k) for steps in along)
        if min(one, other) >= max(best, OfEnlarged.border):
            best, side, place = min(one, other), k, (first, second)
    if not side:
        return None
    corner = ((starts[0] + place[0]) % side, (starts[1] + place[1]) % side)
    if math.isinf(best):
        return Enlarged(side, corner, None)
    sigmas = [_within(planes[place[0] :, place[1] :, c], side) for c in range(planes.shape[-1])]
    if min(sigmas) == 0:
        return None
    levels = channel_levels(np.array(sigmas))
    return Enlarged(side, corner, GaussianNoise(float(levels[0]) if (levels == levels[0]).all() else levels))


def _steps(planes: Array, axis: int) -> Array:
    """Return the mean square difference of each line to the next one."""
    square = np.square(np.diff(planes, axis=axis))
    return np.asarray(square.mean(axis=(1 - axis, 2)))


def _border(steps: Array, side: int) -> tuple[float, int]:
    """Return how much larger steps between cells of a side are than within them, and where the first cell begins."""
    each = np.array([steps[k::side].mean() for k in range(side)])
    border = int(np.argmax(each))
    within = np.delete(each, border)
    if each[border] == 0 or within.max() > OfEnlarged.alike * within.min():
        return 0.0, 0
    ratio = float(each[border] / within.mean()) if within.any() else math.inf
    return ratio, (border + 1) % side


def _within(plane: Array, side: int) -> float:
    """Return the strength of white noise within cells of a plane (H, W); 0 where what differs there has another law."""
    from scipy.stats import chi2

    height, width = (n // side for n in plane.shape)
    shape = height, side, width, side
    cells = plane[: height * side, : width * side].reshape(shape).swapaxes(1, 2).reshape(-1, side, side)
    ends = [
        end for end in (plane.min(), plane.max()) if np.count_nonzero(plane == end) > OfWindows.clipped * plane.size
    ]
    cells = cells[~np.isin(cells, ends).any(axis=(1, 2))]
    if len(cells) < OfEnlarged.cells:
        return 0.0
    count = side**2 - 1
    law = chi2.ppf(OfEnlarged.quantiles, count) / count
    variances = np.quantile(cells.var(axis=(1, 2), ddof=1), OfEnlarged.quantiles) / law
    steps = (np.square(np.diff(cells, axis=1)).mean() + np.square(np.diff(cells, axis=2)).mean()) / 4
    told = np.array([*variances, steps])
    if not 0 < told.max() <= OfEnlarged.law * told.min():
        return 0.0
    return math.sqrt(float(np.median(told)))
