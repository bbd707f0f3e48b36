"""Volumes and clips: groups of blocks, motion, parts, and what axes may say."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.denoising import groupwise
from nlflow.denoising.groupwise import CLIPS, VOLUMES, GroupPreset, in_tiles
from nlflow.denoising.layout import Axes
from nlflow.denoising.patches import CompiledFilter, Grouping, Groups, Images, Lattice, PatchGroups, PlainFilter, Stage
from nlflow.denoising.patches.filters import groups_of
from nlflow.denoising.patches.lattice import follow
from nlflow.denoising.runs import Watch
from tests.pictures import Floats

pytestmark = pytest.mark.numerical

SMALL = Grouping((2, 3, 4), 9, (2, 3, 2), (2, 3, 3))
CUBE = (9, 14, 17)


def blobs(shape: tuple[int, ...] = CUBE, height: float = 6.0) -> Floats:
    """A smooth volume with an edge, in units of the noise."""
    z, y, x = np.meshgrid(*(np.arange(n) for n in shape), indexing="ij")
    return height * (np.sin(z / 3) + np.cos(y / 4) * np.sin(x / 5) + (x + y > sum(shape[1:]) // 2))


def noisy(clean: Floats, seed: int = 0) -> Floats:
    return np.asarray(clean + np.random.default_rng(seed).normal(size=clean.shape))


def moving(frames: int = 5, step: tuple[int, int] = (3, -5)) -> Floats:
    """A clip of a texture that moves by whole pixels a frame."""
    from scipy.ndimage import gaussian_filter

    wide = gaussian_filter(np.random.default_rng(4).normal(size=(260, 280)), 1.5)
    wide *= 8 / wide.std()
    return np.stack([wide[90 - k * step[0] :, 90 - k * step[1] :][:72, :80] for k in range(frames)])


def decibels(u: Any, clean: Any) -> float:
    return float(-10 * np.log10(np.mean((np.asarray(u) - clean) ** 2)))


# ---- groups


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_members_of_a_volume_are_those_of_patch_groups(dtype: Any) -> None:
    volume = noisy(blobs()).astype(dtype)
    found = PatchGroups(volume, patch_size=3, search_radius=2, members=8, step=2)
    lattice = Lattice.of(CUBE, Grouping(3, 8, 2, 2))
    groups = groups_of(CompiledFilter(), volume[None], lattice)
    corners = np.ravel_multi_index(tuple(np.moveaxis(found.positions, -1, 0)), CUBE)
    assert (np.sort(groups.members, axis=1) == np.sort(corners, axis=1)).mean() > 0.999
    assert (groups.members[:, 0] == corners[:, 0]).all()


def test_a_slice_of_a_volume_is_an_image() -> None:
    image = noisy(blobs((1, 40, 46)))
    whole = nl.denoise(image[0], 1.0)
    np.testing.assert_array_equal(nl.denoise(image, 1.0, axes="ZYX", quality="fast").shape, image.shape)
    grouping = Grouping((5, 5, 5), 20, (4, 6, 6), (3, 3, 3))
    flat, thick = (Lattice.of(shape, grouping) for shape in ((40, 46), (1, 40, 46)))
    assert flat.shape == thick.shape == (1, 40, 46)
    assert flat.patch == (1, 5, 5)
    assert flat.radii == (0, 6, 6)
    assert whole.shape == (40, 46)


# ---- the step


def images(shape: tuple[int, ...], channels: int, varying: bool) -> Images:
    rng = np.random.default_rng(2)
    clean = np.stack([blobs(shape) * (1 + c) for c in range(channels)])
    observed = clean + rng.normal(size=clean.shape)
    variance = rng.uniform(0.5, 1.5, clean.shape) if varying else np.full((channels, 1, 1, 1), 1.2)
    return Images(0.5 * (observed + clean), 0.2 * observed + 0.8 * clean, observed, variance)


STAGES = {
    "first": Stage(shrink=1.3, running=False),
    "cosine": Stage(shrink=1.3, running=False, cosine=True),
    "later": Stage(leave=0.4, factor=0.9),
    "across": Stage(leave=0.4, factor=0.9, across=0.3),
}


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize(("channels", "varying"), [(1, False), (2, True)])
def test_the_compiled_step_is_the_readable_one(stage: Stage, channels: int, varying: bool) -> None:
    given = images(CUBE, channels, varying)
    groups = groups_of(CompiledFilter(), given.observed, Lattice.of(CUBE, SMALL))
    for fast, plain in zip(*(filter.step(groups, given, stage) for filter in (CompiledFilter(), PlainFilter())),
                           strict=True):  # fmt: skip
        np.testing.assert_allclose(fast, plain, atol=1e-9)


@pytest.mark.slow
def test_a_step_that_follows_motion_is_the_readable_one() -> None:
    clip = noisy(moving())
    lattice = follow(Lattice.of(clip.shape, Grouping((2, 4, 4), 12, (2, 3, 3), (1, 4, 4)), run=4), clip)
    assert np.abs(lattice.motion).max() > 5
    groups = groups_of(CompiledFilter(), clip[None], lattice)
    given = Images(*(clip[None],) * 3, np.ones((1, 1, 1, 1)))
    fast, plain = (filter.step(groups, given, STAGES["cosine"])[0] for filter in (CompiledFilter(), PlainFilter()))
    np.testing.assert_allclose(fast, plain, atol=1e-9)


def test_noise_of_slices_is_correlated_within_them_alone() -> None:
    function = np.array([[0.0, 0.3, 0.0], [0.5, 1.0, 0.5], [0.0, 0.3, 0.0]])[None]
    given = images(CUBE, 1, False)
    given = Images(given.state, given.pilot, given.observed, given.variance, function)
    groups = groups_of(CompiledFilter(), given.observed, Lattice.of(CUBE, SMALL))
    for stage in STAGES.values():
        fast, plain = (filter.step(groups, given, stage)[0] for filter in (CompiledFilter(), PlainFilter()))
        np.testing.assert_allclose(fast, plain, atol=1e-8)


# ---- motion


@pytest.mark.parametrize("step", [(3, -5), (0, 0), (-7, 9), (1, 0)])
@pytest.mark.slow
def test_motion_is_found_under_noise(step: tuple[int, int]) -> None:
    clip = noisy(moving(4, step))
    lattice = follow(Lattice.of(clip.shape, Grouping((1, 5, 5), 10, (2, 2, 2), (1, 5, 5)), run=8), clip)
    motion = lattice.motion.reshape(len(lattice.slices), len(lattice.rows), -1, 5, 2)
    inside = motion[1, 3:-3, :, 1:5]  # frames 0 to 3 as seen from frame 1, away from the edge
    expected = np.array(step) * np.arange(-1, 3)[:, None]
    assert (inside == expected).all(axis=-1).mean() > 0.9


def test_a_brighter_frame_has_not_moved() -> None:
    clip = noisy(np.stack([moving(1)[0] * 0.2 + 3 * k for k in range(4)])).astype(np.float32)
    lattice = follow(Lattice.of(clip.shape, Grouping((1, 5, 5), 10, (2, 2, 2), (1, 5, 5)), run=8), clip)
    assert (lattice.motion == 0).mean() > 0.95


def test_every_pixel_of_a_moving_clip_belongs_to_a_patch() -> None:
    clip = noisy(moving(6))
    flow = groupwise.problem(clip[..., None], CLIPS["fast"], CLIPS["fast"].groupings(0.3, 3)).flow
    held: Any = flow
    groups: Groups = held.groups
    first = groups.places(slice(None), 1)
    assert len(np.unique(first)) == clip.size
    assert first.min() >= 0
    with pytest.raises(nl.InputError, match="stride of more than 1 along frames"):
        groupwise.problem(clip[..., None], CLIPS["fast"], (Grouping(4, 8, 4, 2),) * 2)


def test_motion_helps() -> None:
    clean = moving(6, (4, -7))
    f = noisy(clean)
    still, follows = (decibels(nl.denoise(f, 1.0, axes=axes, quality="fast"), clean) for axes in ("ZYX", "TYX"))
    assert follows > still + 0.5


# ---- parts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["volume", "map", "clip"])
@pytest.mark.sampled(1)
def test_parts_have_the_bits_of_the_whole(kind: str) -> None:
    clean = moving(24, (1, -2)) if kind == "clip" else blobs((100, 20, 24))
    f = noisy(clean).astype(np.float32)[..., None]
    grouping = Grouping((2, 3, 3), 8, (1, 2, 2), (1, 3, 3))
    preset = GroupPreset(1, ((math.inf, grouping),), ((math.inf, grouping),), cosine=True, moving=kind == "clip")
    variance = np.linspace(0.5, 1.5, f.size, dtype=np.float32).reshape(f.shape) if kind == "map" else None

    def cut(limit: float | None) -> Any:
        return in_tiles(f, preset, (grouping, grouping), variance, None, groupwise.problem, Watch(False, limit))

    whole, one, memory = cut(None)
    parts, several, less = cut(0.8 * memory)
    assert one == 1
    assert several >= 2
    assert less <= 0.8 * memory
    np.testing.assert_array_equal(parts[0], whole[0])
    with pytest.raises(nl.MemoryLimitError, match="max_memory: a part of"):
        cut(1e4)


def test_the_bits_do_not_depend_on_threads() -> None:
    from nlflow.backends.threads import one_loop_thread

    f = noisy(blobs((12, 30, 30)))
    with one_loop_thread():
        alone = nl.denoise(f, 1.0, quality="fast")
    np.testing.assert_array_equal(nl.denoise(f, 1.0, quality="fast"), alone)


def test_work_is_below_two_kilobytes_a_voxel() -> None:
    from nlflow.denoising.groupwise import bytes_needed

    for quality, preset in VOLUMES.items():
        assert bytes_needed((1, 96, 96, 96), preset.groupings(1.0, 3), preset.steps, 4) < 2000 * 96**3, quality


# ---- the call


@pytest.mark.parametrize("quality", ["fast", pytest.param("balanced", marks=pytest.mark.slow)])
def test_a_volume_is_denoised_better_than_its_slices(quality: str) -> None:
    clean = blobs((16, 32, 36))
    f = noisy(clean)
    slices = np.stack([nl.denoise(one, 1.0, quality=quality) for one in f])
    assert decibels(nl.denoise(f, 1.0, quality=quality), clean) > decibels(slices, clean) + 1.5


def test_axes_say_where_channels_are() -> None:
    clean = np.stack([blobs((8, 16, 18)), -blobs((8, 16, 18))], axis=-1)
    f = noisy(clean)
    last = nl.denoise(f, 1.0, quality="fast", channel_axis=-1)
    np.testing.assert_array_equal(nl.denoise(f, 1.0, quality="fast", axes="ZYXC"), last)
    first = nl.denoise(np.moveaxis(f, -1, 0), 1.0, quality="fast", axes="CZYX")
    np.testing.assert_array_equal(np.moveaxis(first, 0, -1), last)
    alone = nl.denoise(f, 1.0, quality="fast", axes="ZYXC", separate=True)
    np.testing.assert_array_equal(alone[..., 1], nl.denoise(f[..., 1], 1.0, quality="fast"))


def test_patches_are_thinner_where_slices_lie_apart() -> None:
    apart = VOLUMES["balanced"].spaced((2.0, 1.0, 1.0)).later[0][1]
    assert apart.along("patch") == (3, 6, 6)
    assert apart.along("radius") == (3, 6, 6)
    assert apart.along("stride") == (3, 5, 5)
    assert VOLUMES["best"].spaced((0.2, 0.2, 0.2)).later[0][1].along("patch") == (5, 5, 5)
    assert VOLUMES["balanced"].spaced((100.0, 1.0, 1.0)).later[0][1].along("patch") == (1, 7, 7)


def test_layouts() -> None:
    assert Axes.of((5, 6)).letters == "YX"
    assert Axes.of((9, 9, 9)).letters == "ZYX"
    found = Axes.of((3, 4, 5, 6), None, "CTYX", (2, 1, 1))
    assert (found.letters, found.moving, found.spacing, found.channel) == ("TYX", True, (2.0, 1.0, 1.0), 0)
    assert not Axes.of((3, 4), None, "TX").moving


@pytest.mark.parametrize(
    ("shape", "words", "message"),
    [
        ((9, 9, 3), {}, "then pass channel_axis=-1; for a volume of few slices give axes='ZYX'"),
        ((9, 9, 9), {"axes": "ZY"}, "axes: got 'ZY', expected one letter for each of the 3 axes"),
        ((9, 9, 9), {"axes": "ZZX"}, "axes: got 'ZZX'"),
        ((9, 9, 9), {"axes": "QYX"}, "axes: got 'QYX'"),
        ((9, 9, 9), {"axes": 3}, "axes: got 3"),
        ((2, 9, 9, 9), {"axes": "TZYX"}, "expected one to three of T, Z, Y and X"),
        ((9, 9, 9), {"axes": "YXT"}, "expected time before the axes of space"),
        ((9, 9, 9), {"axes": "YXC", "channel_axis": 0}, "which disagree"),
        ((9, 9, 9), {"axes": "ZYX", "channel_axis": 0}, "which disagree"),
        ((9, 9, 9), {"spacing": (1, 1)}, "spacing: got (1, 1), expected 3 number"),
        ((9, 9, 9), {"spacing": (1, 0, 1)}, "spacing: got"),
        ((9, 9, 9), {"quality": "fast", "width": 2.0}, "width: got 2.0 for a volume or a clip"),
        ((2, 9, 9, 9), {}, "expected one to three: a signal, an image or a volume"),
    ],
)
def test_axes_that_do_not_fit_are_refused(shape: tuple[int, ...], words: dict[str, Any], message: str) -> None:
    with pytest.raises(nl.InputError) as told:
        nl.denoise(np.random.default_rng(0).normal(size=shape), 1.0, **words)
    assert message in str(told.value)


@pytest.mark.parametrize(
    "bad", [{"patch": (1, 2)}, {"radius": (1, 2, -1)}, {"stride": (0, 1, 1)}, {"neighbours": (3,)}]
)
def test_groupings_of_wrong_numbers_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(nl.InputError, match=next(iter(bad))):
        Grouping(**{"patch": 3, "neighbours": 4, "radius": 2, "stride": 2, **bad})
