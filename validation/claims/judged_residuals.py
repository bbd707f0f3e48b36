"""What is said of a residual, what follows from it, and how few counts are summed: each against a plain program."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from scipy.signal import correlate
from scipy.special import gammainc

from nlflow.denoising import cells, residual
from nlflow.denoising.frame import Frame
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise import Poisson
from nlflow.denoising.noise.figures import OfCounts, OfFlat, OfSpectra
from nlflow.denoising.noise.models.base import NoiseEstimate
from nlflow.denoising.noise.models.gaussian import GaussianNoise
from nlflow.denoising.options import Options
from nlflow.denoising.residual import Figures
from nlflow.denoising.runs import ALONE, Run
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]


def frame_of(shape: tuple[int, ...], kind: type[Frame] = Frame, **more: Any) -> Frame:
    """Return a frame of white noise of strength 1, about 0."""
    return kind(Axes.of(shape), "balanced", Options(), np.zeros(1), np.ones(1), **more)


# ---- figures of residuals


def plain_figures(f: Floats, u: Floats) -> dict[str, float]:
    """Return the figures of f - u (64, 64), in units of white noise, by loops over its windows of 6 x 6 samples."""
    side, many = 6, range(0, 60, 6)
    ends = [np.maximum(distance, 0) ** 2 / 2 for distance in (u - f.min(), f.max() - u)]
    # ∫ x² φ and ∫ φ over what lies between the ends, as incomplete gamma functions.
    level = np.sqrt(sum(gammainc(1.5, e) for e in ends) / sum(gammainc(0.5, e) for e in ends))
    away = (f <= f.min()) | (f >= f.max())
    bare = np.where(away, 0, f - u)
    rest = bare / level
    rows = []
    for i, j in itertools.product(many, many):
        w, d, a = np.s_[i : i + 6, j : j + 6], np.s_[i + 1 : i + 7, j : j + 6], np.s_[i : i + 6, j + 1 : j + 7]
        diagonal = (bare[w] - bare[d] - bare[a] + bare[i + 1 : i + 7, j + 1 : j + 7]) / 2
        parts = (rest[w] ** 2, rest[w] ** 3, diagonal**2, rest[w] * rest[d], rest[w] * rest[a])
        rows.append([u[w].std(), u[w].mean(), *(part.sum() / (~away[w]).sum() for part in parts)])
    steep, light, square, cube, mixed, *products = np.array(rows).T
    median = (1 - 2 / (9 * side**2)) ** 3  # of χ² over its degrees of freedom (Wilson and Hilferty 1931)
    level_, share, flat = 0.0, math.nan, []
    for group in np.array_split(np.argsort(light), 3):
        own = sorted(group, key=lambda k: steep[k])[: len(group) // 4]
        if np.median(steep[own]) > 0.5:
            continue
        flat += own
        error = 1.25 / math.sqrt(2 * side**2 * len(own))
        below = math.log(median / np.median(square[own])) / 2 - 4 * error
        if below > level_:
            level_, share = below, math.sqrt(np.median(mixed[own]) / median)
    if math.isnan(share):
        share = min(math.sqrt(np.median(mixed[flat]) / median), 1.0)
    edges = np.argsort(steep)[-25:]

    def alike(where: Any) -> float:
        total = square[where].sum()
        return float(max(one[where].sum() / total for one in products) - 4 / (side * math.sqrt(len(where))))

    def skew(where: Any) -> float:
        return float(abs(cube[where].mean()) / square[where].mean() ** 1.5)

    lags = np.abs(np.arange(-63, 64))
    far = np.maximum(lags[:, None], lags)
    sums = correlate(bare, bare, method="direct" if bare.size < 100 else "fft")
    seen = sums * bare.size / np.multiply.outer(64 - lags, 64 - lags) / sums[63, 63]
    error = math.sqrt((seen[far <= OfFlat.near] ** 2).sum() / bare.size)
    middle = (far >= OfFlat.far[0]) & (lags[:, None] < 32) & (lags < 32)
    return {
        "level": level_, "flat": alike(flat), "steep": alike(edges), "share": share,
        "skewness": skew(edges) - skew(flat) - 4 * math.sqrt(6 / (side**2 * len(edges))),
        "pattern": float(np.abs(seen[middle]).max()) - 6 * error,
        "two": 3 - float((bare**4).mean() / (bare**2).mean() ** 2),
    }  # fmt: skip


def figures(rng: np.random.Generator) -> float:
    """Return errors of figures of residuals that are too weak, or skewed in texture, or as they should be."""
    i, j = np.mgrid[:64, :64]
    u = 9.0 * (j // 20) + 0.003 * i**1.4 + 0.002 * j**1.5 + np.where(i >= 36, 3 * np.sin(1.3 * j + 0.4 * i), 0)
    worst = 0.0
    for weak, skewed in ((0.6, 0.05), (0.92, 0.01)):
        rest = weak * rng.standard_normal(u.shape) + skewed * np.where(i >= 36, np.sin(1.3 * j) ** 2 * 9, 0)
        found = residual.figures_of((u + rest)[..., None], u[..., None], frame_of(u.shape))
        worst = largest(worst, *(abs(getattr(found, name) - one) for name, one in plain_figures(u + rest, u).items()))
    return worst


def verdicts() -> float:
    """Return errors of milder levels, share of what was taken out without its strength, and of places looked at."""
    given = NoiseEstimate(GaussianNoise(6.0), "high", ("flat parts",))
    frame = replace(frame_of((64, 64)), level=np.array([6.0]), found=given, options=Options(strength=1.5))
    less = residual.milder(frame, Figures(level=0.9, share=0.4))
    worst = abs(less.model.sigma - 6.0 * 0.4 / 1.5) if less is not None else math.inf
    for shape, wanted in (
        ((300, 70), [(0, 0), (78, 0), (157, 0), (236, 0)]),  # places of 64 that end where the image ends
        ((16, 40, 33), [(0, 0, 0), (0, 0, 17), (0, 24, 0), (0, 24, 17)]),
    ):
        found = residual.places_of(shape)
        worst = largest(worst, float([tuple(s.start for s in one) for one in found] != wanted))
    return worst


# ---- few counts


@dataclass(frozen=True)
class Halving(Frame):
    """A frame whose flow halves its samples, about 0 in units of the noise, and adds a tenth of the noise."""

    def with_flow(self, spread: Any, weakest: float = 1.0) -> Frame:
        """Return the frame with that flow."""
        return replace(self, flow=_Half())  # type: ignore[arg-type]

    def run(self, f: Any, watch: Any) -> Run:
        """Run that flow."""
        return Run([0.5 * f + 0.1], {"steps": 1})


class _Half:
    def run(self, f: Floats, frame: Any, watch: Any) -> Run:
        return Run([0.5 * f + 0.1], {"steps": 1})


def halved(stable: Floats) -> Floats:
    """Return what `Halving` makes of samples with noise of strength 1."""
    return stable.mean() + 0.5 * (stable - stable.mean()) + 0.1


def counts_by_hand(z: Floats, read: float, rounds: list[tuple[float, int]]) -> Floats:
    """Return what Azzari and Foi's scheme makes of counts (H, W), of sides that cells divide, with `halved`."""
    y = z
    for number, (weight, k) in enumerate(rounds):
        mixed = weight * z + (1 - weight) * y
        if k and number == len(rounds) - 1:
            impulse = np.zeros((64, 64))
            impulse[32, 32] = 1
            width = 2.0**k / 2
            energy = float((gaussian_filter(impulse, width) ** 2).sum())  # of the weights; their sum is 1
            unit, sums = energy * weight**2, gaussian_filter(mixed, width)
            law = Poisson(1.0, read / math.sqrt(unit))
            y = law.unstabilize(halved(law.stabilize(sums / unit))) * unit
            continue
        n = 2**k
        sums = sum(mixed[i::n, j::n] for i in range(n) for j in range(n))
        law = Poisson(1.0, n * read / weight)
        y = law.unstabilize(halved(law.stabilize(sums / weight**2))) * weight**2 / n**2
        for axis in (0, 1):
            middle = (np.arange(z.shape[axis]) + 0.5) / n - 0.5
            y = np.apply_along_axis(lambda one, at=middle: np.interp(at, np.arange(len(one)), one), axis, y)
    return y


def few_counts(rng: np.random.Generator) -> tuple[float, float]:
    """Return errors of estimates of few counts with a flow that is known, and of weights and sizes of cells."""
    worst, rounded = 0.0, 0.0
    for mean, read, wanted in ((0.6, 0.7, 4), (0.05, 0.4, 4), (0.004, 0.3, 4)):
        law = Poisson(2.0, 2.0 * read, 5.0)
        z = law.sample(np.full((64, 96), 5.0 + 2 * mean), rng=rng)
        frame = replace(frame_of(z.shape, Halving), few=law, offset=np.array([1.3]), level=np.array([0.8]))
        found = cells.in_cells(((law.stabilize(z) - 1.3) / 0.8)[..., None], frame, ALONE).path[-1][..., 0] * 0.8 + 1.3
        counts = (z - 5.0) / 2.0
        held = np.square(law.stabilize(z) / 2) - 0.375 - read**2  # single ones that the transform cuts off
        rounds = cells._rounds(float(held.mean()), 64)
        exact = Poisson(1.0, read).expected(counts_by_hand(held, read, rounds))
        worst = largest(worst, float(np.abs(found - exact).max()))
        rounded = largest(rounded, float(abs(held.mean() - counts.mean()) > 0.2), float(len(rounds) != wanted))
        pairs = zip(np.ravel(rounds), np.ravel(plain_rounds(float(held.mean()), 64)), strict=True)
        rounded = largest(rounded, *(abs(a - b) for a, b in pairs))
    for mean, side in ((0.01, 2000), (0.0001, 5000), (0.5, 100), (0.2451, 500)):
        found_, plain = cells._rounds(mean, side), plain_rounds(mean, side)
        rounded = largest(rounded, float(len(found_) != len(plain)))
        rounded = largest(rounded, *(abs(a - b) for a, b in zip(np.ravel(found_), np.ravel(plain), strict=False)))
    return worst, rounded


def plain_rounds(mean: float, side: int) -> list[tuple[float, int]]:
    """Return weights that fall evenly, and halvings that end where cells hold enough, one flow a halving at least."""
    most = int(math.log2(side / OfSpectra.least))

    def halvings(enough: float) -> int:
        k = 0
        while mean * 4**k < enough and k < most:
            k += 1
        return k

    first, last = halvings(OfCounts.at_first), halvings(OfCounts.at_last * OfCounts.fresh**2)
    n = max(OfCounts.rounds, first - last + 1)
    found = [(1 + (OfCounts.fresh - 1) * k / (n - 1), math.floor(first + (last - first) * k / (n - 1) + 0.5))
             for k in range(n)]  # fmt: skip
    return [*found[:-1], (found[-2][0], found[-1][1])] if last else found


def run(context: Context) -> Outcome:
    rng = np.random.default_rng(56)
    estimates, rounds = few_counts(rng)
    return Outcome([
        Check("figures of residuals against loops over windows", figures(rng), 1e-8),
        Check("milder levels, and places that are looked at", verdicts(), 1e-12),
        Check("few counts under a flow that is known, against the scheme written out", estimates, 1e-8),
        Check("weights and cells of its rounds", rounds, 1e-9),
    ])  # fmt: skip


CLAIM = Claim(
    name="judged-residuals",
    title="Residuals are judged by windows, and few counts are summed in cells, as they say",
    statement=(
        "A figure of a residual is a sum over windows less four standard errors: how far flat parts are below the "
        "median of χ², how alike neighbours are, how skewed steep parts are, the largest correlation far away. Few "
        "counts z are mixed with an estimate y, wz + (1 − w)y, summed in cells of n samples, and stabilized as counts "
        "over w², with the read noise √n σ/w; sums with weights g are counts over w²Σg². Under a map that is known in "
        "place of the flow both are held against plain programs."
    ),
    source="derived; Wilson, Hilferty 1931; Azzari, Foi 2016, doi 10.1109/LSP.2016.2580600",
    run=run,
)
