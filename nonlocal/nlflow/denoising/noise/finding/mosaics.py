"""Mosaics of colours."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import OfMosaics
from nlflow.denoising.noise.finding.transfer import of_line
from nlflow.denoising.noise.models.base import Array, Noise
from nlflow.denoising.noise.models.gaussian import GaussianNoise

_PERIODS: Final = {2: 2, 3: 6}  # at which the pattern shows, and at which colours repeat: Bayer's, and X-Trans


def find_mosaic(samples: Array, missing: NDArray[np.bool_] | None = None) -> Noise | None:
    """Return the noise of an image (H, W, 1) that is a mosaic of colours; None where it is none."""
    if samples.ndim != 3 or samples.shape[-1] != 1 or missing is not None:
        return None
    plane = samples[..., 0].astype(np.float64)
    for shown, period in _PERIODS.items():
        if min(plane.shape) >= OfMosaics.least * period and _differs(plane, shown):
            return _noise_of(plane, period)
    return None


def _differs(plane: Array, period: int) -> bool:
    """Tell whether places in a pattern differ in their means by more than samples of the same place do, all over.

    In blocks, by the ratio of variances of a one-way analysis.
    """
    side = OfMosaics.block * period
    height, width = (n // side for n in plane.shape)
    rows = plane[: height * side, : width * side].reshape(height, side, -1)[:: math.ceil(plane.size / OfMosaics.most)]
    blocks = rows.reshape(len(rows), OfMosaics.block, period, width, -1, period)
    means = blocks.mean(axis=(1, 4), keepdims=True)
    count, places = OfMosaics.block**2, period**2
    within = np.square(blocks - means).sum(axis=(1, 2, 4, 5)) / (places * (count - 1))
    about = means - means.mean(axis=(2, 5), keepdims=True)
    between = count * np.square(about).sum(axis=(1, 2, 4, 5)) / (places - 1)
    return float(np.mean(between > OfMosaics.ratio * within)) > OfMosaics.share


def _noise_of(plane: Array, period: int) -> Noise | None:
    """Return the noise of a mosaic, None where no block tells it.

    Its variance is a line over the intensity, the same for all colours of a sensor. Structure adds to what blocks show,
    and noise does not fall below it: the line lies below nearly all points (a regression of quantiles, Koenker and
    Bassett 1978, doi 10.2307/1913643).
    """
    from scipy.optimize import linprog

    means, variances = _points(plane, period)
    if not len(means):
        return None
    unit, low, span = float(np.median(variances)), float(means[0]), float(np.ptp(means))
    if unit == 0 or span == 0:
        return GaussianNoise(math.sqrt(float(variances.min())))
    # Deviations above and below in parts of each variance, and what they are from: a dark and a bright end of the line.
    count, place = len(means), (means - low) / span
    line = np.stack([1 - place, place], axis=1) * (unit / variances)[:, None]
    cost = np.concatenate([[0, 0], np.full(count, OfMosaics.below), np.full(count, 1 - OfMosaics.below)])
    found = linprog(cost, A_eq=np.hstack([line, np.eye(count), -np.eye(count)]), b_eq=np.ones(count), bounds=(0, None))
    dark, bright = unit * np.asarray(found.x)[:2]
    if bright <= OfMosaics.growing * dark:
        return GaussianNoise(math.sqrt(float((dark + bright) / 2)))
    gain = float(bright - dark) / span
    return of_line(gain, float(dark) - gain * low, float(plane.min()))


def _points(plane: Array, period: int) -> tuple[Array, Array]:
    """Return intensities, and the variance of noise there: at high frequencies of blocks that hold least at low ones.

    Blocks are those of samples of one place in the pattern; such as touch an end of the range are left out.
    """
    from scipy.fft import dctn

    side = OfMosaics.side
    frequency = np.add.outer(np.arange(side), np.arange(side))
    is_low, is_high = (frequency > 0) & (frequency < side - 1), frequency >= OfMosaics.high * side
    step = max(2, math.ceil(math.sqrt(plane.size / OfMosaics.most)))
    ends = [value for value in (plane.min(), plane.max()) if np.count_nonzero(plane == value) > OfMosaics.least]
    each = []
    for place in np.ndindex(period, period):
        own = plane[place[0] :: period, place[1] :: period]
        blocks = sliding_window_view(own, (side, side))[::step, ::step].reshape(-1, side, side)
        blocks = blocks[~np.isin(blocks, ends).any(axis=(1, 2))] if ends else blocks
        powers = np.square(dctn(blocks, axes=(1, 2), norm="ortho"))
        each.append([blocks.mean(axis=(1, 2)), powers[:, is_low].mean(axis=1), powers[:, is_high].mean(axis=1)])
    means, lows, highs = np.concatenate(each, axis=1)
    points = []
    for part in np.array_split(np.argsort(means, kind="stable"), max(min(OfMosaics.bins, len(means)), 1)):
        quiet = part[np.argsort(lows[part], kind="stable")][: max(math.ceil(OfMosaics.quiet * len(part)), 8)]
        if len(quiet):
            points.append((means[quiet].mean(), highs[quiet].mean()))
    found, variances = np.reshape(points, (-1, 2)).T
    return found, np.maximum(variances, 1e-6 * variances.max(initial=0.0))
