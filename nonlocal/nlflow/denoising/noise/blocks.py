"""What blocks of a picture tell about its noise: the variance of each cosine coefficient, and how far to trust it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from nlflow.denoising.noise.figures import OfBlocks

Array = NDArray[Any]

# Coefficients are compared in four classes, by the parity of their frequencies.
_CLASSES: Final = (2 * (np.arange(64) // 8 % 2) + np.arange(64) % 2).astype(int)


@dataclass(frozen=True)
class BlockNoise:
    """The noise in blocks of 8 x 8 samples of one plane.

    Attributes
    ----------
    variances : array of shape (8, 8)
        Of the orthonormal cosine coefficients; that of the mean is continued from its neighbours.
    intensities, strengths : array of shape (K,)
        Relative variance of the noise at intensities, of mean 1.
    like_noise : float
        Width of the lowest part of the distribution of energies against that of Gaussian noise: near 1 for noise, low
        for structure.
    bulk : float
        Median energy of all blocks over that of the blocks that were measured: 1.2 in noise alone, large in a picture
        with much structure.
    present : float
        Share of the blocks that are not constant.
    """

    variances: Array
    intensities: Array
    strengths: Array
    like_noise: float
    bulk: float
    present: float

    def spread(self, rows: tuple[int, ...], columns: tuple[int, ...]) -> float:
        """Return the root mean variance of some coefficients."""
        return math.sqrt(float(np.mean([self.variances[i, j] for i in rows for j in columns])))


def block_noise(
    plane: Array, intensity: Array, floor: float, absent: NDArray[np.bool_] | None = None, share: float = OfBlocks.share
) -> BlockNoise | None:
    """Return the noise in the blocks of a plane that hold the least structure; None where there are too few.

    The blocks of each intensity are sorted by their energy in the coefficients of other classes, each in units of its
    noise, and the squares of a class are averaged over the first of them (`share`). In Gaussian noise the classes are
    independent, so that choosing by the ones does not bias the other. Repeated, since the units are what is looked for.
    O(N).

    After D. Colom, M. Lebrun, A. Buades and J.-M. Morel, "A non-parametric approach for the estimation of
    intensity-frequency dependent noise", ICIP 2014 (doi 10.1109/ICIP.2014.7025865), who compare pairs of blocks.

    Parameters
    ----------
    plane, intensity : array of shape (H, W)
    floor : float
        Standard deviation that coefficients need to be compared by: those below were rounded away.
    absent : bool array of shape (H, W), optional
        Samples that tell nothing: blocks that touch one are left out.
    share : float
        Of the blocks of an intensity, which are measured: `SHARE` or `OF_FLAT`.
    """
    squares, levels = _windows(plane, intensity, absent)
    there = squares[:, 1:].sum(axis=1) > 1e-3 * floor**2
    if np.count_nonzero(there) < OfBlocks.least:
        return None
    order = np.argsort(levels[there], kind="stable")
    squares, levels, present = squares[there][order], levels[there][order], float(there.mean())
    parts = np.array_split(np.arange(len(levels)), max(min(OfBlocks.intensities, len(levels) // OfBlocks.each), 1))
    tiny = 1e-4 * floor**2
    variances = np.quantile(squares, 0.2, axis=0) / OfBlocks.fifth + tiny
    strengths = np.ones(len(parts))
    for _ in range(OfBlocks.rounds):
        used = _used(variances, floor)
        found = np.stack(
            [_measured(squares[p] / s, variances, used, share) * s for p, s in zip(parts, strengths, strict=True)]
        )
        found += tiny
        strengths = np.exp(np.median(np.log(found / variances)[:, used], axis=1))
        strengths /= strengths.mean()
        variances = np.exp(np.mean(np.log(found) - np.log(strengths)[:, None], axis=0))
    used = _used(variances, floor)
    each = np.repeat(strengths, [len(p) for p in parts])
    energies = (np.minimum(squares / (variances * each[:, None]), OfBlocks.most_energy) * used).sum(axis=1)
    like, bulk = _shape_of(energies, int(used.sum()))
    variances[0] = math.sqrt(variances[1] * variances[OfBlocks.side])
    means = np.array([levels[p].mean() for p in parts])
    return BlockNoise(variances.reshape(OfBlocks.side, OfBlocks.side), means, strengths, like, bulk, present)


def noise_of_all(plane: Array, floor: float) -> BlockNoise | None:
    """Return the noise in all blocks of a plane that holds nothing else; None where there are too few. O(N).

    Parameters
    ----------
    plane : array of shape (H, W)
    floor : float
        As `block_noise` takes it.
    """
    squares, _ = _windows(plane, plane, None)
    if len(squares) < OfBlocks.least:
        return None
    variances = squares.mean(axis=0) + 1e-4 * floor**2
    used = _used(variances, floor)
    energies = (np.minimum(squares / variances, OfBlocks.most_energy) * used).sum(axis=1)
    like, bulk = _shape_of(energies, int(used.sum()))
    variances[0] = math.sqrt(variances[1] * variances[OfBlocks.side])
    return BlockNoise(variances.reshape(OfBlocks.side, OfBlocks.side), np.zeros(1), np.ones(1), like, bulk, 1.0)


def _windows(plane: Array, intensity: Array, absent: NDArray[np.bool_] | None) -> tuple[Array, Array]:
    """Return the squared coefficients (blocks, 64) and the mean intensities of overlapping blocks."""
    from scipy.fft import dct

    basis = dct(np.eye(OfBlocks.side), norm="ortho", axis=0)
    step = max(1, math.ceil(math.sqrt(plane.size / OfBlocks.most)))

    def blocks(values: Array) -> Array:
        return sliding_window_view(values, (OfBlocks.side, OfBlocks.side))[::step, ::step].reshape(
            -1, OfBlocks.side, OfBlocks.side
        )

    own, levels = blocks(plane), blocks(intensity)
    if absent is not None:
        there = ~blocks(absent).any(axis=(1, 2))
        own, levels = own[there], levels[there]
    return np.square(basis @ own @ basis.T).reshape(-1, OfBlocks.side * OfBlocks.side), levels.mean(axis=(1, 2))


def _used(variances: Array, floor: float) -> NDArray[np.bool_]:
    """Return by which coefficients blocks are compared."""
    used = variances > min(floor**2, float(variances[1:].max()) / 4)
    used[0] = False
    return np.asarray(used)


def _measured(squares: Array, variances: Array, used: NDArray[np.bool_], share: float) -> Array:
    """Return the variances of the coefficients in the blocks of least energy in the other classes."""
    energies = np.minimum(squares / variances, OfBlocks.most_energy) * used
    total, count = energies.sum(axis=1), max(int(share * len(squares)), min(20, len(squares)))
    result = np.empty(OfBlocks.side * OfBlocks.side)
    for k in range(4):
        own = k == _CLASSES
        others = total - energies[:, own].sum(axis=1)
        # With all that are as large but for rounding, as those at their largest value are: none is preferred.
        chosen = np.flatnonzero(others <= (1 + OfBlocks.same) * np.partition(others, count - 1)[count - 1])
        lower = max(int(OfBlocks.kept * len(chosen)), 1)
        squared = np.partition(squares[np.ix_(chosen, np.flatnonzero(own))], lower - 1, axis=0)[:lower]
        result[own] = squared.mean(axis=0) / OfBlocks.mean_of_kept
    return result


def _shape_of(energies: Array, count: int) -> tuple[float, float]:
    """Return `BlockNoise.like_noise` and `BlockNoise.bulk`."""
    from scipy.stats import chi2

    least, first, middle = np.quantile(energies, [OfBlocks.share / 8, OfBlocks.share, 0.5])
    degrees = OfBlocks.independent * max(count, 1)
    expected = chi2(degrees).ppf(OfBlocks.share / 8) / chi2(degrees).ppf(OfBlocks.share)
    return float(least / max(first, 1e-30) / expected), float(middle / max(first, 1e-30))
