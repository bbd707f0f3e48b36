"""Small pictures with noise, and small flows on groups of patches, that the tests of denoising share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nlflow.denoising import groupwise
from nlflow.denoising.groupwise import GroupPreset
from nlflow.denoising.patches import CompiledFilter, Grouping, Groups, Images, Lattice, Stage
from nlflow.denoising.patches.affinity import as_planes, as_signal
from nlflow.denoising.patches.filters import groups_of, removed
from nlflow.denoising.runs import Watch, run

Floats = NDArray[Any]
QUALITIES = ("pixels", "balanced", "best")
ON_GROUPS = QUALITIES[1:]
# For what one preset on groups shows as well as the other: `best` runs the same code, only longer.
_BEST = pytest.param("best", marks=pytest.mark.slow)
SLOWLY, GROUPS_SLOWLY = ("pixels", "balanced", _BEST), ("balanced", _BEST)

SMALL_IMAGE, SMALL_SIGNAL = Grouping(patch=4, neighbours=10, radius=4, stride=3), Grouping(6, 8, 12, 3)
# Its strips overlap by little, so that small images have several.
SMALL = GroupPreset(
    steps=2, first=((math.inf, SMALL_IMAGE),), later=((0.5, SMALL_IMAGE), (math.inf, Grouping(3, 12, 3, 2))),
    first_signal=SMALL_SIGNAL, later_signal=SMALL_SIGNAL,
)  # fmt: skip


def grouped(guide: Floats, grouping: Grouping) -> Groups:
    """The groups that the compiled loops find in planes (C, H, W)."""
    return groups_of(CompiledFilter(), guide, Lattice.of(guide.shape[1:], grouping))


def group_step(groups: Groups, *planes: Floats, **options: Any) -> tuple[Floats, Floats]:
    """A compiled step on groups: state, pilot, observed and variance to estimate and next state."""
    return CompiledFilter().step(groups, Images(*planes), Stage(**options))


def estimates(
    planes: Floats,
    preset: GroupPreset,
    groupings: tuple[Grouping, ...],
    variance: Floats,
    missing: Floats | None = None,
) -> list[Floats]:
    """The estimates of a preset on planes (C, H, W), by the flow and the time loop of the package."""
    signal = as_signal(planes, (*planes.shape[1:], len(planes)))
    levels = np.broadcast_to(np.moveaxis(variance, 0, -1), signal.shape)
    problem = groupwise.problem(signal, preset, groupings, variance=levels, missing=missing)
    return [as_planes(u).reshape(planes.shape) for u in run(problem, Watch(every=True))[0]]


def both(cases: Callable[[Sequence[str]], list[tuple[Any, ...]]]) -> list[Any]:
    """Cases of a test for the presets other than `best`, and those for `best`, marked as slow."""
    return [*cases(QUALITIES[:-1]), *(pytest.param(*case, marks=pytest.mark.slow) for case in cases(["best"]))]


def picture(side: int = 64) -> Floats:
    """A disc, stripes, a ramp and two flat areas, values 0...1."""
    y, x = np.mgrid[:side, :side] / side
    image = np.where((x - 0.3) ** 2 + (y - 0.35) ** 2 < 0.05, 0.9, 0.3)
    image = np.where(y > 0.7, 0.5 + 0.3 * np.sin(2 * np.pi * 12 * x), image)
    return np.where((x > 0.65) & (y < 0.7), y, image)


def waves(rows: int = 40, columns: int = 40) -> Floats:
    """Smooth waves of amplitude 1 on both sides of an edge."""
    y, x = np.mgrid[:rows, :columns]
    return np.asarray(np.sin(x / 3) * np.cos(y / 5) + 0.7 * (x > y))


def ellipsoids(seed: int, shape: tuple[int, int, int] = (24, 64, 64)) -> Floats:
    """Return a phantom of five levels within sharp borders."""
    rng = np.random.default_rng(seed)
    place = np.stack(np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij"), axis=-1)
    volume = np.zeros(shape)
    for k in range(5):
        centre, radii = rng.uniform(-0.4, 0.4, 3) * (k > 0), rng.uniform(0.25, 0.6, 3) if k else (0.9, 0.8, 0.75)
        volume[np.square((place - centre) / radii).sum(axis=-1) < 1] = rng.uniform(30, 250)
    return volume


def steps_and_waves(length: int = 400) -> Floats:
    t = np.arange(length)
    return np.asarray(np.sin(t / 20) + np.sign(np.sin(t / 33)))


def noisy(clean: Floats, sigma: Any = 0.1, seed: int = 0) -> Floats:
    return np.asarray(clean + sigma * np.random.default_rng(seed).normal(size=clean.shape))


def rms(a: Any, b: Any) -> float:
    return float(np.sqrt(np.mean((np.asarray(a, float) - np.asarray(b, float)) ** 2)))


def psnr(clean: Floats, estimate: Floats) -> float:
    """For grey levels up to 255."""
    return 20 * math.log10(255 / rms(clean, estimate))


def signal_in(variances: Floats, shrink: float) -> Floats:
    """What a step takes the variances of noisy patches for, without the noise: 1 / (1 + w) of a variance w goes."""
    share = 1 / (1 + np.maximum(variances, 0))
    return 1 / np.asarray(share * sum(c * (2 * share - 1) ** k for k, c in enumerate(removed(shrink)))) - 1
