"""The simulated camera: its noise, its mosaic and demosaicking, and that it gives back what it sees without noise."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from skimage.color import rgb2xyz

from benchmarks.blind.simulated_camera import DEMOSAICKING, Camera, gradient_corrected, mosaic, to_light, to_srgb


def smooth(side: int = 128) -> np.ndarray:
    """Waves of grey with a slight tint, at most 2.5 levels from pixel to pixel."""
    y, x = np.mgrid[:side, :side] / side
    waves = 0.5 + 0.2 * np.sin(2 * np.pi * x) + 0.2 * np.cos(2 * np.pi * y)
    return np.rint(255 * waves[..., None] * np.array([1.0, 0.9, 0.8])).astype(np.uint8)


def test_light_is_that_of_scikit_image_and_the_tone_curve_its_inverse() -> None:
    srgb = np.random.default_rng(0).random((9, 7, 3))
    to_xyz = rgb2xyz(np.eye(3)[None])[0]  # primaries, which have the light 1
    assert np.allclose(to_light(srgb) @ to_xyz, rgb2xyz(srgb), atol=1e-12)
    assert np.allclose(to_srgb(to_light(srgb)), srgb, atol=1e-6)  # the standard rounds where its two parts meet
    assert np.array_equal(to_srgb(np.array([-1.0, 2.0])), np.array([0.0, 1.0 * to_srgb(np.array([1.0]))[0]]))


def test_the_first_samples_are_red_green_green_blue() -> None:
    colours = np.broadcast_to([1.0, 2.0, 3.0], (4, 6, 3))
    assert np.array_equal(mosaic(colours), np.tile([[1.0, 2.0], [2.0, 3.0]], (2, 3)))


@pytest.mark.parametrize("electrons", [3750.0, 235.0])
@pytest.mark.parametrize("level", [0, 40, 200])
def test_noise_of_the_mosaic_has_its_mean_and_variance(electrons: float, level: int) -> None:
    camera = Camera(electrons)
    raw = camera.raw(np.full((400, 400, 3), level, np.uint8))
    shot = camera.exposed(raw, np.random.default_rng(1))
    for row, column, gain in ((0, 0, 2.0), (0, 1, 1.0), (1, 1, 1.6)):
        light = ((level / 255 + 0.055) / 1.055) ** 2.4 / gain if level else 0.0
        expected = (light * electrons + 9.0) / electrons**2
        samples = shot[row::2, column::2]
        # Four standard errors: of a mean of n samples, and of a variance, sqrt(2 / n) of it for nearly normal ones.
        assert abs(samples.mean() - light) < 4 * np.sqrt(expected / samples.size)
        assert samples.var() == pytest.approx(expected, rel=4 * np.sqrt(2 / samples.size))
        assert camera.variance(raw)[row, column] == pytest.approx(expected)


@pytest.mark.parametrize("name", DEMOSAICKING)
def test_demosaicking_keeps_samples_and_is_exact_where_light_is_linear(name: str) -> None:
    y, x = np.mgrid[:16, :18]
    linear = np.stack([0.2 + 0.01 * (y + 2 * x)] * 3, axis=-1) + np.array([0.0, 0.1, 0.3])
    raw = mosaic(linear)
    found = DEMOSAICKING[name](raw)
    assert np.allclose(mosaic(found), raw, atol=1e-14)
    assert np.allclose(found[2:-2, 2:-2], linear[2:-2, 2:-2], atol=1e-12)


def test_gradient_correction_has_the_gains_of_its_paper() -> None:
    raw = np.random.default_rng(3).random((12, 12))
    found = gradient_corrected(raw)

    def mean(row: int, column: int, *steps: tuple[int, int]) -> float:
        return float(np.mean([raw[row + a, column + b] for a, b in steps]))

    cross, far = ((0, 1), (0, -1), (1, 0), (-1, 0)), ((0, 2), (0, -2), (2, 0), (-2, 0))
    corners = ((1, 1), (1, -1), (-1, 1), (-1, -1))
    green_at_red = mean(4, 6, *cross) + 1 / 2 * (raw[4, 6] - mean(4, 6, *far))
    red_at_blue = mean(5, 7, *corners) + 3 / 4 * (raw[5, 7] - mean(5, 7, *far))
    # At green: the corners and the two along the row count 1/5 each, the two across -1/10.
    around = (sum(raw[4 + a, 5 + b] for a, b in (*corners, (0, 2), (0, -2))) - (raw[2, 5] + raw[6, 5]) / 2) / 5
    red_at_green = mean(4, 5, (0, 1), (0, -1)) + 5 / 8 * (raw[4, 5] - around)
    assert found[4, 6, 1] == pytest.approx(green_at_red)
    assert found[5, 7, 0] == pytest.approx(red_at_blue)
    assert found[4, 5, 0] == pytest.approx(red_at_green)
    # The mosaic turned by half a turn has red and blue in each other's places.
    turned = gradient_corrected(raw[::-1, ::-1])[::-1, ::-1, ::-1]
    assert np.allclose(found, turned)


@pytest.mark.parametrize("name", DEMOSAICKING)
def test_without_noise_a_smooth_picture_comes_back(name: str) -> None:
    camera = Camera(np.inf, demosaicking=name, quality=100, subsampling="4:4:4")
    picture = smooth()
    truth = camera.developed(camera.raw(picture))
    file = np.asarray(Image.open(io.BytesIO(camera.file(truth))))
    # The picture is rounded, 1/12. JPEG rounds luma, chroma and their coefficients, each 1/12, which for blue counts
    # 1 + 1.77^2 times, and the 8 bits before and after, so 0.9 levels at most.
    assert np.sqrt(np.mean((truth - picture) ** 2)) < 0.5
    assert np.sqrt(np.mean((file - truth) ** 2)) < 0.9


@pytest.mark.slow
def test_a_pair_repeats_with_its_seed_and_is_worse_with_less_light() -> None:
    picture, errors = smooth(48), []
    for electrons in (30000.0, 3750.0, 235.0):
        noisy, truth = Camera(electrons).pair(picture, np.random.default_rng(0))
        again, _ = Camera(electrons).pair(picture, np.random.default_rng(0))
        assert noisy.dtype == np.uint8
        assert np.array_equal(noisy, again)
        errors.append(np.mean((noisy - truth) ** 2))
    assert errors[0] < errors[1] < errors[2]


def test_the_truth_is_what_noise_without_clipping_leaves_out() -> None:
    camera = Camera(940.0, quality=100, subsampling="4:4:4")
    picture = np.full((48, 48, 3), 128, np.uint8)
    noisy, truth = camera.pair(picture, np.random.default_rng(0))
    variance = np.mean((noisy - truth) ** 2)
    # One percent of the variance is left, and a bend of the tone curve of a few hundredths of a level.
    assert np.mean((truth - camera.developed(camera.raw(picture))) ** 2) == pytest.approx(variance / 100, rel=0.3)
    # Linear interpolation averages: of green at others a quarter of the variance is left.
    green = camera.developed(camera.exposed(camera.raw(picture), np.random.default_rng(1)))[..., 1]
    assert green[0::2, 0::2].var() == pytest.approx(green[0::2, 1::2].var() / 4, rel=0.3)


def test_a_lens_of_no_width_blurs_nothing() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    sharp, soft = (Camera(np.inf, lens=width).raw(picture) for width in (0.0, 0.7))
    assert sharp[0, 0] == pytest.approx(to_light(picture[0, 0, 0] / 255) / 2)
    assert soft.var() < 0.6 * sharp.var()
