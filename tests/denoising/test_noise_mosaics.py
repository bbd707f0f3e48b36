"""Mosaics of colours, and what is taken for one: noise is measured between samples of one place in the pattern."""

from __future__ import annotations

import numpy as np
import pytest
import skimage.data
from numpy.typing import NDArray

from nlflow import Poisson, denoise, estimate_noise
from nlflow.denoising.noise import GaussianNoise
from nlflow.denoising.noise.finding.mosaics import find_mosaic
from nlflow.denoising.noise.finding.transfer import of_line
from tests.pictures import rms

BAYER = ((0, 1), (1, 2))
X_TRANS = ((1, 2, 1, 1, 0, 1), (0, 1, 0, 2, 1, 2), (1, 2, 1, 1, 0, 1), (1, 0, 1, 1, 2, 1), (2, 1, 2, 0, 1, 0),
           (1, 0, 1, 1, 2, 1))  # fmt: skip
GAIN, READ, OFFSET = 1.8, 7.0, 512.0


def mosaic(pattern: tuple[tuple[int, ...], ...], electrons: float = 1500.0, side: int = 240) -> NDArray[np.float64]:
    """Return the mean of a raw picture."""
    light = (skimage.data.coffee()[60 : 60 + side, 100 : 100 + side] / 255.0) ** 2.2 * np.array([0.5, 1, 0.6])
    period = len(pattern)
    which = np.tile(np.array(pattern), (side // period, side // period))
    return GAIN * electrons * np.take_along_axis(light, which[..., None], 2)[..., 0] + OFFSET


def recorded(clean: NDArray[np.float64], seed: int = 0) -> NDArray[np.uint16]:
    noisy = Poisson(GAIN, READ, OFFSET).sample(clean, rng=seed)
    return np.clip(np.rint(noisy), 0, 16383).astype(np.uint16)


@pytest.mark.parametrize("pattern", [BAYER, BAYER[::-1], X_TRANS])
def test_the_noise_of_a_mosaic_is_that_of_its_sensor(pattern: tuple[tuple[int, ...], ...]) -> None:
    clean = mosaic(pattern)
    model = find_mosaic(recorded(clean)[..., None].astype(np.float32))
    assert isinstance(model, Poisson)
    levels = np.quantile(clean, [0.1, 0.5, 0.9])
    variance = model.gain * (levels - model.offset) + model.sigma**2
    limits = (0.8, 1.25) if len(pattern) == 2 else (0.8, 1.7)  # samples of one colour are six apart there
    ratio = np.sqrt(variance / (GAIN * (levels - OFFSET) + READ**2))
    assert limits[0] < ratio.min() <= ratio.max() < limits[1]


def test_nothing_of_a_mosaic_is_darker_than_no_light() -> None:
    """A picture whose dark parts are small: they would all come back as what was taken for no light."""
    clean = mosaic(BAYER)
    clean[:24, :24] = OFFSET + 0.02 * (clean[:24, :24] - OFFSET)
    noisy = recorded(clean)
    model = find_mosaic(noisy[..., None].astype(np.float32))
    assert isinstance(model, Poisson)
    assert model.offset <= noisy.min()
    result = denoise(noisy, quality="fast", preserve_range=True)
    assert rms(result[:24, :24], clean[:24, :24]) < rms(noisy[:24, :24].astype(float), clean[:24, :24])


def test_a_mosaic_is_told_and_denoised() -> None:
    clean = mosaic(BAYER)[:121, :119]  # of odd sides
    noisy = recorded(clean)
    found = estimate_noise(noisy)
    assert "colours of a mosaic" in found.reasons[0]
    result = denoise(noisy, quality="fast", preserve_range=True)
    assert rms(result, clean) < 0.8 * rms(noisy.astype(float), clean)


def test_white_noise_of_a_mosaic_is_white() -> None:
    clean = mosaic(BAYER)
    model = find_mosaic((clean + np.random.default_rng(0).normal(0, 40, clean.shape))[..., None])
    assert isinstance(model, GaussianNoise)
    assert float(model.sigma) == pytest.approx(40, rel=0.15)


@pytest.mark.parametrize("sigma", [0.0, 10.0, 40.0])
@pytest.mark.parametrize("name", ["camera", "coins", "page", "brick", "grass"])
def test_pictures_are_no_mosaics(name: str, sigma: float) -> None:
    picture = np.asarray(getattr(skimage.data, name)(), np.float64)
    noisy = picture + np.random.default_rng(1).normal(0, 1, picture.shape) * sigma
    assert find_mosaic(noisy[..., None]) is None


def test_patterns_that_are_meant_stay() -> None:
    checks = np.full((128, 128), 200.0)
    checks[:100, :60] = np.kron(np.ones((50, 30)), [[0.0, 255], [255, 0]])
    order = np.tile(np.array([[0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]]) / 16, (32, 32))
    dithered = np.floor(skimage.data.camera()[:128, :128] / 255 * 7 + order) * 36.0
    for picture in (checks, dithered):
        np.testing.assert_array_equal(denoise(picture), picture)


def test_a_line_that_ends_in_darkness_is_one_whatever_is_rounded() -> None:
    """The variance there is the difference of two numbers that are all but the same: 1e-16 below 0 at times."""
    for gain, below in np.random.default_rng(0).uniform(0.1, 100, (500, 2)):
        assert of_line(gain, -below, 0.0).offset == pytest.approx(below / gain)


def test_impulses_in_each_block_leave_nothing_to_tell_the_noise_of_a_mosaic_from() -> None:
    rng = np.random.default_rng(0)
    noisy = 120 + 40 * np.sin(np.arange(40 * 44).reshape(40, 44) / 15) + rng.normal(0, 5, (40, 44))
    noisy[rng.random(noisy.shape) < 0.1] = 0.0
    noisy[rng.random(noisy.shape) < 0.1] = 255.0
    assert find_mosaic(noisy[..., None]) is None
    assert np.isfinite(denoise(noisy, quality="fast")).all()
