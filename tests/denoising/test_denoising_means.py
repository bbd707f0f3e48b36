"""Groups of the means over blocks: the blocks, the step with them, parts of an image, and what they are good for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from skimage.data import camera
from skimage.measure import block_reduce

import nlflow as nl
from nlflow.denoising import groupwise
from nlflow.denoising.groupwise import PRESETS, GroupPreset, in_tiles, margins
from nlflow.denoising.patches import CompiledFilter, GroupFlow, Grouping, PlainFilter, RelaxedSemiImplicit
from nlflow.denoising.patches.means import Blocks
from nlflow.denoising.runs import Watch
from tests.pictures import Floats, group_step, grouped, noisy, psnr, steps_and_waves, waves

pytestmark = pytest.mark.numerical

MEANS = Grouping(3, 9, 3, 2)
GROUPING = Grouping(4, 10, 4, 3, MEANS)
PRESET = GroupPreset(2, ((math.inf, GROUPING),), ((math.inf, GROUPING),), across=0.4)


def run(f: Floats, **options: Any) -> Floats:
    flow = GroupFlow(f, GROUPING, across=0.4, **options)
    return np.asarray(nl.solve(flow, t=3, integrator=RelaxedSemiImplicit(2), energies=False).final)


@pytest.mark.parametrize("search", range(4))
@pytest.mark.parametrize("shape", [(26, 29), (1, 80)])
def test_means_are_those_of_blocks_and_are_spread_over_them(shape: tuple[int, int], search: int) -> None:
    blocks = Blocks.of(shape, MEANS, (0,) * 2, None, search)
    assert blocks is not None
    y, x = np.mgrid[: shape[0], : shape[1]]
    line = (0.3 * y - 0.7 * x)[None, None]
    top, left = blocks.start[1:]
    inside = line[0, 0, top:, left:]
    sides = min(shape[0], 2), 2
    whole = inside[: inside.shape[0] // sides[0] * sides[0], : inside.shape[1] // 2 * 2]
    found = blocks.mean(line)
    np.testing.assert_allclose(found[0, 0], block_reduce(whole, sides, np.mean), atol=1e-13)
    assert found.shape[1:] == blocks.lattice.shape
    assert blocks.size == math.prod(sides)
    # What is linear is kept where no block is missing beside.
    back, edge = blocks.spread(found, line)[0, 0], 5
    middle = (slice(edge, -edge) if shape[0] > 1 else slice(None), slice(edge, -edge))
    np.testing.assert_allclose(back[middle], line[0, 0][middle], atol=1e-12)


def test_blocks_of_a_part_are_those_of_the_whole() -> None:
    image = np.random.default_rng(0).normal(size=(1, 1, 41, 38))
    for search in range(4):
        whole = Blocks.of((41, 38), MEANS, (0, 0), None, search)
        part = Blocks.of((24, 38), MEANS, (7, 0), (41, 38), search)
        assert whole is not None
        assert part is not None
        first = (7 + part.start[1] - whole.start[1]) // 2
        mine = part.mean(image[:, :, 7:31])
        np.testing.assert_array_equal(mine, whole.mean(image)[:, :, first : first + mine.shape[2]])
        assert set((part.lattice.rows + first).tolist()) <= set(whole.lattice.rows.tolist())


def test_a_step_averages_the_means_with_what_their_groups_give() -> None:
    f = noisy(6 * waves(26, 29), 1.0)
    flow = GroupFlow(f, GROUPING)
    estimate, _ = flow.step(f)
    plane, one = f[None], np.ones((1, 1, 1))
    options = {"shrink": 1.5, "running": False}
    fine, _ = group_step(grouped(plane, GROUPING), plane, plane, plane, one, **options)
    blocks = Blocks.of(f.shape, MEANS, (0, 0), None)
    assert blocks is not None
    coarse = blocks.mean(plane[None])[0]
    found, _ = group_step(grouped(coarse, MEANS), coarse, coarse, coarse, one / 4, **options)
    change = blocks.spread((found - blocks.mean(fine[None])[0])[None], fine[None])[0, 0]
    np.testing.assert_allclose(estimate, fine[0] + change / 2, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "map", "missing", "signal"])
@pytest.mark.sampled(2)
def test_the_compiled_flow_is_the_readable_one(kind: str) -> None:
    f = noisy(6 * waves(26, 29), 1.0) if kind != "signal" else noisy(5 * steps_and_waves(90), 1.0)
    given: dict[str, Any] = {}
    if kind == "map":
        given["variance"] = np.linspace(0.5, 1.5, f.size).reshape(f.shape)
    elif kind == "missing":
        given["missing"] = np.random.default_rng(0).random(f.shape) < 0.05
    np.testing.assert_allclose(
        *(run(f, filter=filter, **given) for filter in (CompiledFilter(), PlainFilter())), atol=1e-9
    )


@pytest.mark.parametrize("shape", [(620, 24), (2600,)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.sampled(2)
def test_strips_have_the_bits_of_the_whole(shape: tuple[int, ...], dtype: Any) -> None:
    clean = waves(*shape) if len(shape) > 1 else steps_and_waves(*shape)
    f = noisy(4 * clean, 1.0).astype(dtype)[..., None]
    groupings = PRESET.groupings(0.3, len(shape))
    whole, one, memory = in_tiles(f, PRESET, groupings, None, None, groupwise.problem, Watch())
    parts, several, _ = in_tiles(f, PRESET, groupings, None, None, groupwise.problem, Watch(False, 0.75 * memory))
    assert one == 1
    assert several > 1
    np.testing.assert_array_equal(parts[0], whole[0])


def test_a_sample_looks_no_farther_than_the_halo() -> None:
    f = noisy(4 * steps_and_waves(600), 1.0)
    changed = f.copy()
    changed[300] += 50
    reach = np.abs(np.flatnonzero(run(changed) != run(f)) - 300).max()
    assert 50 < reach <= margins((GROUPING, GROUPING), 2)[2]


def test_what_has_no_means() -> None:
    assert Blocks.of((17, 40), MEANS, (0, 0), None) is None  # 8 means are less than three patches of 3
    assert Blocks.of((18, 40), MEANS, (0, 0), None) is not None
    for bad in ({"correlation": np.ones((1, 1))}, {"observed": np.zeros((4, 30, 30))}):
        with pytest.raises(nl.InputError, match="grouping: got means for a volume or for noise that is correlated"):
            GroupFlow(**{"observed": np.zeros((30, 30)), "grouping": GROUPING, **bad})  # type: ignore[arg-type]


def test_a_preset_gives_means_the_groups_for_half_the_noise() -> None:
    preset = replace(PRESETS["best"], turns=(1, -1), means=True)
    first, wide, narrow = preset.groupings(0.6, 2)
    plain = PRESETS["balanced"].groupings(0.6, 2)
    assert all(g.means is None for g in plain)
    assert (wide.patch, narrow.patch) == (8, 6)
    assert first.means is not None
    assert wide.means is not None
    assert first.means == replace(preset.first[0][1], radius=preset.first[0][1].radius // 2)  # type: ignore[operator]
    assert wide.means.patch == 7
    assert all(g.means is None for g in preset.groupings(0.6, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least"), [("photograph", 0.03), ("weave", 1.0), ("sand", -0.2)])
def test_best_is_not_below_balanced(kind: str, least: float) -> None:
    """What repeats gains most. Fine texture is lost by many steps, and by peaks given back: the price is bounded."""
    y, x = np.mgrid[:96, :96]
    if kind == "photograph":
        clean = camera()[60:156, 180:276].astype(np.float64)
    elif kind == "weave":
        clean = 128 + 25 * np.sin(2 * np.pi * x / 5.3) * np.sin(2 * np.pi * y / 6.1)
    else:
        grains = gaussian_filter(np.random.default_rng(5).normal(size=(96, 96)), 0.7)
        clean = 128 + 16 * grains / grains.std()
    image = noisy(clean, 25.0)
    best, balanced = (psnr(clean, nl.denoise(image, 25.0, quality=q)) for q in ("best", "balanced"))
    assert best >= balanced + least
