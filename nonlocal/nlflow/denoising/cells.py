"""Flows on sums over cells, for few counts (Azzari and Foi 2016, doi 10.1109/LSP.2016.2580600)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.frame import Frame, Spread, with_colour
from nlflow.denoising.noise.figures import OfCounts, OfSpectra
from nlflow.denoising.noise.models.gaussian import GaussianNoise
from nlflow.denoising.noise.models.intensities import Poisson
from nlflow.denoising.runs import Run, Watch, within

Array = NDArray[Any]


def in_cells(f: Array, frame: Frame, watch: Watch) -> Run:
    """Run flows on stabilized sums over cells of samples, from large cells to small ones.

    For counts z and an estimate u, (w z + (1 - w) u) / w^2 has a variance like its mean, as counts have.
    """
    whole = frame.few
    assert whole is not None
    law = Poisson(1.0, whole.sigma / whole.gain)  # in counts
    counts = np.square((f * frame.level + frame.offset).astype(np.float64) / 2) - 0.375 - law.sigma**2
    if law.sigma == 0:  # rounding; read noise makes single ones negative, without which sums have a bias
        counts = np.maximum(counts, 0)
    rounds = _rounds(float(counts.mean()), min(counts.shape[:2]))
    estimate, told, steps = counts, {}, 0
    for number, (fresh, halvings) in enumerate(rounds):
        mixed = fresh * counts + (1 - fresh) * estimate
        tell = within(watch.tell, number / len(rounds), (number + 1) / len(rounds))
        quiet = replace(watch, tell=tell, trail=None)
        if halvings and number == len(rounds) - 1:
            estimate, found = _overlapping(mixed, fresh, law.sigma, 2.0 ** (halvings - 1), frame, quiet)
            told = {**found.told, "steps": steps + int(found.told["steps"])}
            continue
        own = Poisson(1.0, law.sigma * 2**halvings / fresh)
        stable = own.stabilize(_summed(mixed, halvings) / fresh**2)
        middle = float(stable.mean())
        signal = (stable - middle).astype(f.dtype)
        part = replace(frame, few=None, missing=None if halvings else frame.missing).with_flow(Spread.of(signal))
        assert part.flow is not None
        found = part.flow.run(signal, part, quiet)
        steps += int(found.told["steps"])
        told = {**found.told, "steps": steps}
        estimate = _spread(own.unstabilize(found.path[-1] + middle).astype(np.float64), halvings, counts.shape)
        estimate *= fresh**2
    expected = law.expected(estimate)
    return Run([((expected - frame.offset) / frame.level).astype(f.dtype)], told)


def _overlapping(
    mixed: Array, fresh: float, sigma: float, width: float, frame: Frame, watch: Watch
) -> tuple[Array, Run]:
    """Return the estimate from Gaussian cells about each sample, whose noise is correlated, and its run.

    A cell of a side has this width, half of it, once its sums are spread by lines. Sums with weights g over the sum of
    g^2 are as their variance is, too.
    """
    from scipy.ndimage import gaussian_filter

    single = np.zeros((OfSpectra.frequencies,) * 2)
    single[0, 0] = 1
    weights = gaussian_filter(single, width, mode="wrap")
    energy = float(np.sum(weights**2))
    power = np.square(np.abs(np.fft.fft2(weights)))
    own = Poisson(1.0, sigma / (fresh * math.sqrt(energy)))
    sums = gaussian_filter(mixed, (width, width, 0))
    stable = own.stabilize((sums if sigma else np.maximum(sums, 0)) / (energy * fresh**2))
    noise = GaussianNoise(1.0, power)
    part, signal = with_colour(replace(frame, few=None, missing=None, model=noise), stable, noise)  # in units of 1
    found = part.run(signal, watch)
    expected = found.path[-1].astype(np.float64) + part.offset
    return own.unstabilize(expected) * energy * fresh**2, found


def _rounds(mean: float, side: int) -> list[tuple[float, int]]:
    """Return for each flow the weight of the samples beside the estimate, and how often cells are halved after it."""
    most = max(int(math.log2(side / OfSpectra.least)), 0)
    first, last = (
        int(np.clip(math.ceil(math.log(least / max(mean, 1e-9), 4)), 0, most))
        for least in (OfCounts.at_first, OfCounts.at_last * OfCounts.fresh**2)
    )
    count = OfCounts.rounds  # enough for each halving, of which there are at most three
    weights, halvings = np.linspace(1, OfCounts.fresh, count), np.linspace(first, last, count)
    if last:  # cells that overlap have less noise
        weights[-1] = weights[-2]
    return [(float(w), math.floor(k + 0.5)) for w, k in zip(weights, halvings, strict=True)]


def _summed(counts: Array, halvings: int) -> Array:
    """Return sums over cells of 2^halvings samples along both axes."""
    side = 2**halvings
    rows, columns, channels = counts.shape
    padded = np.pad(counts, ((0, -rows % side), (0, -columns % side), (0, 0)), mode="symmetric")
    return np.asarray(padded.reshape(-(-rows // side), side, -1, side, channels).sum(axis=(1, 3)))


def _spread(sums: Array, halvings: int, shape: tuple[int, ...]) -> Array:
    """Return the counts of samples of a shape, from sums over cells by lines between their middles."""
    from scipy.ndimage import zoom

    if halvings == 0:
        return sums
    side = 2**halvings
    fine = zoom(sums / side**2, (side, side, 1), order=1, grid_mode=True, mode="nearest")
    return np.asarray(fine[: shape[0], : shape[1]])
