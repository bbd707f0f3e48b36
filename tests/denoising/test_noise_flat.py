"""Flat parts: noise of pictures that are structure elsewhere, and of a part that is named as flat."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from skimage import data

from benchmarks.blind.simulated_camera import Camera
from nlflow import InputError, denoise, estimate_noise
from nlflow.denoising.noise import GaussianNoise
from tests.pictures import Floats

pytestmark = pytest.mark.numerical
PART = np.s_[20:84, 30:110]
WALL = np.s_[8:56, 8:312]


def noise(shape: tuple[int, ...], sigma: Any, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, 1, shape) * sigma


def shaded(shape: tuple[int, int] = (160, 180)) -> Floats:
    """Return light that falls off over a wall, with a dark thing in a corner: the range is no part's own."""
    picture = np.add.outer(np.linspace(90, 110, shape[0]), np.linspace(0, 15, shape[1])) + np.zeros(shape)
    picture[-40:, -40:] = 10
    return picture


# ---- parts that are found


@cache
def meadow() -> tuple[Any, Floats]:
    """Return a shot of grass below a wall by a simulated camera, and the noise of the wall in another one."""
    rng = np.random.default_rng(0)
    tint = np.clip(1 + 0.2 * np.sin(np.arange(320)[:, None] / 7 + np.arange(3)), 0, 2)
    scene = data.grass()[:320, :320, None] * tint[:, None]
    scene[:64] = 70, 62, 53
    shots = Camera(940, demosaicking="gradient-corrected", quality=95).shots(np.clip(scene, 3, 250), rng)
    first, second, *others = (next(shots).astype(np.float64) for _ in range(10))
    return first, ((second - np.mean(others, axis=0)) * np.sqrt(8 / 9))[WALL]


@pytest.mark.slow
def test_a_photograph_has_the_noise_of_its_wall() -> None:
    # Grass is at all intensities but one, and its quietest blocks are no noise.
    first, wall = meadow()
    found = estimate_noise(first, channel_axis=-1)
    assert found.model.describe().startswith("noise of a camera")
    assert np.sqrt(np.mean(np.square(found.model.sigma))) == pytest.approx(wall.std(), rel=0.45)


# ---- a part that is named


@pytest.mark.parametrize("sigma", [(6.0,), (4.0, 6.0, 9.0), (2.0, 5.0, 12.0)])
def test_white_noise_of_a_part_has_a_strength_in_each_channel(sigma: tuple[float, ...]) -> None:
    picture = shaded()[..., None] + noise((160, 180, len(sigma)), np.array(sigma))
    found = estimate_noise(picture, channel_axis=-1, flat=PART)
    assert found.model.is_white
    # 5120 samples: the standard deviation of sigma is 1 %.
    np.testing.assert_allclose(found.model.sigma, sigma, rtol=0.04)
    np.testing.assert_allclose(found.measured["sigma"], sigma, rtol=0.04)
    assert found.confidence == "high"
    np.testing.assert_allclose(found.measured["level"], shaded()[PART].mean(), atol=0.4)
    assert np.abs(found.measured["correlation"]).max() < 0.06  # 4 / sqrt(5120)
    assert "one level" in found.reasons[-1]


def test_correlated_noise_of_a_part_has_its_correlation() -> None:
    blurred = gaussian_filter(noise((160, 180), 1.0), 0.8)
    picture = shaded() + blurred * (7 / blurred.std())
    found = estimate_noise(picture, flat=PART)
    lag = np.exp(-1 / (4 * 0.8**2))  # of Gaussian blur of white noise
    np.testing.assert_allclose(found.measured["correlation"], lag, atol=0.06)
    assert found.confidence == "high"
    assert found.model.spectrum is not None
    assert found.model.sigma == pytest.approx(7, rel=0.12)


@pytest.mark.slow
def test_a_part_of_a_compressed_photograph() -> None:
    first, wall = meadow()
    found = estimate_noise(first, channel_axis=-1, flat=WALL)
    np.testing.assert_allclose(found.measured["sigma"], wall.std(axis=(0, 1)), rtol=0.1)
    assert found.model.describe().startswith("noise of a camera")
    assert np.sqrt(np.mean(np.square(found.model.sigma))) == pytest.approx(wall.std(), rel=0.45)


def test_the_model_of_a_part_is_taken_by_denoise() -> None:
    clean = shaded()
    picture = clean + noise(clean.shape, 6.0)
    result = denoise(picture, noise=estimate_noise(picture, flat=PART).model)
    assert np.std(result - clean) < 2


def test_units_scale_what_a_part_shows() -> None:
    picture = shaded() + gaussian_filter(noise((160, 180), 20.0), 0.8)
    plain, scaled = (estimate_noise(picture * unit, flat=PART) for unit in (1.0, 1e-3))
    assert scaled.model.sigma == pytest.approx(plain.model.sigma * 1e-3, rel=1e-6)
    np.testing.assert_allclose(scaled.measured["sigma"], plain.measured["sigma"] * 1e-3, rtol=1e-6)


def _letters(picture: Floats) -> Floats:
    picture[40:60, 40:44] = 20
    return picture


def _texture(picture: Floats) -> Floats:
    return picture + 30 * np.sin(np.arange(180) / 4) * np.sin(np.arange(160) / 5)[:, None]


def _surface(picture: Floats) -> Floats:
    """Return a rough surface beside noise, as coins and bark are: alike over 3 px, and in coarser pictures too."""
    rough = gaussian_filter(noise(picture.shape, 1.0, 7), 3.0)
    return picture + 8 * rough / rough.std()


def _print(picture: Floats) -> Floats:
    """Return lines of small letters all over a picture: dark strokes at one place in three of each line."""
    ink = np.random.default_rng(5).random(picture.shape) < 0.2
    ink = np.kron(ink[: 160 // 4, : 180 // 2], np.ones((4, 2), bool))
    return picture - 60 * (ink & (np.arange(160) % 14 < 8)[:, None])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_letters, "an edge or letters"),
        (_print, "letters, spots"),
        (lambda picture: picture + 10 * np.sin(np.arange(180) / 4), "print, shades, stripes"),
        (_texture, "shades, letters or texture"),
        (_surface, "at half the size"),
        (lambda picture: np.minimum(picture, 102), "clipped or rounded away"),
        (lambda picture: np.round(picture / 60) * 60, "clipped or rounded away"),
    ],
)
def test_what_is_not_flat_is_refused(spoil: Any, said: str) -> None:
    with pytest.raises(InputError, match=f"flat: rows 20:84, columns 30:110: .*{said}"):
        estimate_noise(spoil(shaded() + noise((160, 180), 4.0)), flat=PART)


def test_a_part_of_grass_is_not_sure() -> None:
    # Its sigma is that of the grass, eight times that of the noise: no rule tells grass from compressed noise.
    picture = data.grass()[:128, :128] + noise((128, 128), 4.0)
    found = estimate_noise(picture, flat=np.s_[:, :])
    assert found.model.sigma > 20
    assert found.confidence == "medium"
    assert any("texture such as grass" in text for text in found.reasons)


def test_a_part_without_noise_is_refused() -> None:
    with pytest.raises(InputError, match="no noise at all"):
        estimate_noise(np.add.outer(np.arange(100.0), np.arange(100.0)), flat=np.s_[10:60, 10:60])


@pytest.mark.parametrize(
    ("flat", "said"),
    [
        (np.s_[20:84, 30:200], r"columns 30:200 of an image of 160 x 180, expected 0 <= first < end <= 180"),
        (np.s_[84:20, 30:110], "rows 84:20"),
        (np.s_[-5:40, 30:110], "rows -5:40"),
        (np.s_[20:40, 30:110], "got 20 x 80 samples, expected at least 32 x 32"),
        (np.s_[20:84], "expected two slices"),
        ("20:84,30:110", "expected two slices"),
        (np.s_[20:84, 0.5:110], "slices of whole numbers"),
        (np.s_[20:84:2, 30:110], "without a step"),
    ],
)
def test_wrong_parts_are_refused(flat: Any, said: str) -> None:
    with pytest.raises(InputError, match=f"flat: .*{said}"):
        estimate_noise(shaded() + noise((160, 180), 4.0), flat=flat)


def test_a_part_is_of_an_image_and_has_no_mask() -> None:
    with pytest.raises(InputError, match="expected an image"):
        estimate_noise(noise((500,), 1.0), flat=PART)
    holed = shaded() + noise((160, 180), 4.0)
    holed[30, 40] = np.nan
    with pytest.raises(InputError, match="flat: rows 20:84, columns 30:110: got 1 missing sample"):
        estimate_noise(holed, flat=PART)
    with pytest.raises(InputError, match="mask: got one beside flat"):
        estimate_noise(shaded(), flat=PART, mask=np.zeros((160, 180), bool))


# ---- pictures that are too small


def part_of_photograph() -> Floats:
    """Return noise with hardly anything at high frequencies, as demosaicking and JPEG leave it."""
    return np.rint(100 + 8 * gaussian_filter(noise((64, 64), 1.0), 1.0) / 0.28)


def test_a_small_part_of_a_photograph_is_doubted_and_its_advice_works() -> None:
    part = part_of_photograph()
    found = estimate_noise(part)
    assert found.confidence == "low"
    assert any("structure is everywhere" in one for one in found.reasons)
    with pytest.warns(UserWarning, match=r"hard to find out: .*is everywhere.* without print or edges.*flat="):
        denoise(part, quality="pixels", steps=1)
    whole = estimate_noise(part, flat=np.s_[:, :])
    assert whole.model.sigma == pytest.approx(part.std(), rel=0.15)
    assert whole.model.sigma == estimate_noise(part, flat=np.s_[0:64, 0:64]).model.sigma


def test_a_small_picture_with_white_noise_is_not_doubted() -> None:
    assert estimate_noise(np.add.outer(np.arange(48.0), np.arange(48.0)) + noise((48, 48), 3.0)).confidence == "medium"


# ---- one sigma with one meaning


@pytest.mark.slow
def test_sigma_is_that_of_the_noise_whatever_the_quality() -> None:
    rng = np.random.default_rng(0)
    model = GaussianNoise.from_kernel(np.ones((3, 3)), 5.0)
    z = model.sample(np.full((64, 64), 100.0), rng=rng)
    infos = [denoise(z, noise=model, quality=q, return_info=True)[1] for q in ("pixels", "balanced")]
    assert [info.sigma for info in infos] == pytest.approx([5.0, 5.0])
    # White noise of the mean power at low frequencies: 3 times as strong at the lowest, that of a mean of 9 samples.
    assert 5 < infos[0].sigma_effective < 15
    assert infos[1].sigma_effective is None
    light = GaussianNoise(5.0, intensities=[90, 100, 110], strengths=[0.5, 1.0, 2.0])
    _, info = denoise(z, noise=light, return_info=True)
    assert info.sigma == pytest.approx(np.sqrt(np.mean(light.along(z[..., None]) ** 2)))
    assert 2.5 < info.sigma < 10


def test_no_strength_and_too_much_of_it() -> None:
    z = noise((64, 64), 5.0) + 100
    model = GaussianNoise.from_kernel(np.ones((3, 3)), 5.0)
    same, info = denoise(z, noise=replace(model, compressed=0.5), strength=0, return_info=True)
    np.testing.assert_array_equal(same, z)
    assert info.sigma == 0
    with pytest.warns(UserWarning, match="more than the range of the samples"):
        denoise(z, noise=GaussianNoise(5.0), strength=1000)
