"""Which noise a picture has: the kinds are told apart, their figures are near the truth, clean pictures stay clean."""

from __future__ import annotations

import io
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from scipy.ndimage import gaussian_filter
from skimage import data

from benchmarks.blind.delicate import dithered, grating
from benchmarks.blind.simulated_camera import Camera
from nlflow import denoise, estimate_noise
from nlflow.denoising.noise import GaussianNoise, Mixture, Poisson
from nlflow.denoising.noise.models.gaussian import OPPONENT
from nlflow.errors import NlflowWarning
from tests.pictures import Floats

pytestmark = pytest.mark.numerical


def grey() -> Floats:
    return data.camera()[100:356, 100:356].astype(np.float64)


def coloured(width: float, rms: float, shape: tuple[int, ...] = (256, 256), seed: int = 0) -> Floats:
    noise = gaussian_filter(np.random.default_rng(seed).standard_normal(shape), width, mode="wrap")
    return noise * (rms / noise.std())


def profile(powers: Floats) -> Floats:
    """Return root mean powers of a spectrum (h, w) in rings of middle frequencies."""
    share = 2 * np.abs(np.fft.fftfreq(len(powers)))
    radius = np.hypot(share[:, None], share)
    edges = [0.2, 0.3, 0.4, 0.5]
    return np.array([np.sqrt(powers[(radius >= a) & (radius < b)].mean()) for a, b in pairwise(edges)])


# ---- kinds of noise


def test_noise_that_jumps_between_halves_has_low_confidence() -> None:
    clean, noise = data.moon()[160:352, 160:352].astype(np.float64), coloured(0, 1.0, (192, 192))
    found = estimate_noise(clean + np.where(np.arange(192) < 96, 5.0, 15.0) * noise)
    assert found.confidence == "low"
    assert found.reasons[-1].startswith("what the flattest parts tell differs from place to place, and not as")
    even = estimate_noise(clean + 10 * noise)
    assert even.confidence == "high"
    assert even.model.white_sigma == pytest.approx(10, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [5, 20])
def test_white_noise_is_white(sigma: float) -> None:
    found = estimate_noise(grey() + coloured(0, sigma))
    assert found.model.is_white
    assert found.model.sigma == pytest.approx(sigma, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("width", [0.8, 1.5])
def test_correlated_noise_has_its_spectrum(width: float) -> None:
    found = estimate_noise(grey() + coloured(width, 15))
    kernel = gaussian_filter(np.pad([[1.0]], 15), width)
    truth = GaussianNoise.from_kernel(kernel, 15.0)
    assert str(found).startswith("correlated noise")
    np.testing.assert_allclose(profile(found.model.powers(1, 2)[0]), profile(truth.powers(1, 2)[0]), rtol=1 / 3)


def test_noise_that_grows_with_the_light() -> None:
    clean = gaussian_filter(grey(), 3) * 10
    found = estimate_noise(np.random.default_rng(0).poisson(clean).astype(float))
    assert isinstance(found.model, Poisson)
    assert found.model.gain == pytest.approx(1.0, rel=0.25)


def test_stripes_are_found_beside_white_noise() -> None:
    rows = np.random.default_rng(1).normal(0, 8, (256, 1))
    found = estimate_noise(grey() + coloured(0, 10) + rows)
    assert isinstance(found.model, Mixture)
    stripes, rest = found.model.parts
    assert stripes.kind == "stripes"
    assert rest.sigma == pytest.approx(10, rel=0.1)


# ---- cameras


@cache
def shot(electrons: float, demosaicking: str, quality: int, picture: str = "astronaut") -> tuple[Any, Floats]:
    """Return one picture of a simulated camera, and the noise of another one, from the mean of 8."""
    camera = Camera(electrons, demosaicking=demosaicking, quality=quality)
    shots = camera.shots(getattr(data, picture)()[:320, :320, :3], np.random.default_rng(0))
    first, second, *others = (next(shots).astype(np.float64) for _ in range(10))
    return first, (second - np.mean(others, axis=0)) * np.sqrt(8 / 9)


@pytest.mark.parametrize(
    ("electrons", "demosaicking", "quality"),
    [
        (940, "gradient-corrected", 95),
        (940, "bilinear", 98),
        pytest.param(235, "bilinear", 90, marks=pytest.mark.slow),
        pytest.param(1880, "bilinear", 95, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(1)
def test_the_noise_of_a_camera_is_known_within_a_third(electrons: float, demosaicking: str, quality: int) -> None:
    picture, noise = shot(electrons, demosaicking, quality)
    found = estimate_noise(picture, channel_axis=-1)
    assert found.model.describe().startswith("noise of a camera")
    planes = np.moveaxis(noise @ OPPONENT.T, -1, 0)[:, :320, :320]
    truth = (np.abs(np.fft.fft2(planes)) ** 2 / planes[0].size).reshape(3, 64, 5, 64, 5).mean(axis=(2, 4))
    got, expected = profile(found.model.counted(3, 2)[0])[1:3].mean(), profile(truth[0])[1:3].mean()
    assert 3 / 4 < got / expected < 4 / 3


@pytest.mark.slow
def test_texture_under_weak_noise_of_a_camera_does_not_count_as_noise() -> None:
    # Without what the colours say, gravel has five times the noise.
    rng = np.random.default_rng(0)
    scene = np.stack([data.gravel()[:320, :320]] * 3, axis=-1)
    shots = Camera(940, quality=98, subsampling="4:4:4").shots(scene, rng)
    first, second, *others = (next(shots).astype(np.float64) for _ in range(10))
    noise = (second - np.mean(others, axis=0)).std()
    found = estimate_noise(first, channel_axis=-1)
    assert np.sqrt(found.model.counted(3, 2).mean() if not found.model.is_white else found.model.sigma**2) < 2 * noise


# ---- channels


def test_channels_of_unlike_pictures_are_looked_at_by_themselves() -> None:
    """As those of stains under a microscope, whose differences are no colours."""
    rng, clean = np.random.default_rng(1), np.zeros((128, 128, 3))
    places = rng.integers(0, 128, (3, 60, 2))
    for c in range(3):
        np.add.at(clean[..., c], (places[c, :, 0], places[c, :, 1]), rng.uniform(500, 4000, 60))
    clean = gaussian_filter(clean, (2, 2, 0), mode="wrap")
    assert np.all(estimate_noise(clean, channel_axis=-1).model.sigma == 0)
    noisy = clean + coloured(0, 5, clean.shape)
    found = estimate_noise(noisy, channel_axis=-1)
    assert found.model.white_sigma == pytest.approx(5, rel=0.1)
    assert any("not alike" in text for text in found.reasons)
    with pytest.warns(NlflowWarning, match="hard to find out"):
        assert np.std(denoise(noisy, quality="fast", channel_axis=-1) - clean) < 2.5


def test_colours_of_one_picture_are_looked_at_together() -> None:
    found = estimate_noise(data.astronaut()[:128, :128] + coloured(0, 10, (128, 128, 3)), channel_axis=-1)
    assert not any("not alike" in text for text in found.reasons)


def test_noise_that_hides_a_picture_tells_nothing_of_its_colours() -> None:
    """Each channel by itself has less evidence, and noise of a camera is no longer known as such."""
    blurred = gaussian_filter(coloured(0, 1, (128, 128, 3)), (0.7, 0.7, 0))
    found = estimate_noise(100 + 20 * blurred / blurred.std(), channel_axis=-1)
    assert found.confidence == "medium"
    assert found.model.opponent
    assert not any("not alike" in text for text in found.reasons)


# ---- small pictures


def letters(side: int) -> Floats:
    """Return a clean piece of a page of print."""
    page = np.full((side, side), 255.0)
    draw = ImageDraw.Draw(picture := Image.fromarray(page.astype(np.uint8)))
    for top, text in enumerate(["ae0scm8", "Bgy3kxz", "nw5uoea", "Rt4fQj6"]):
        draw.text((1, 10 * top), text, fill=0)
    return np.asarray(picture, np.float64)


@pytest.mark.parametrize("side", [12, 16, 24, 34])
@pytest.mark.parametrize(("width", "sure"), [(0, "medium"), (0.7, "low"), (1.5, "low")])
def test_noise_of_a_small_picture_is_white_where_it_is_as_strong_at_half_the_size(
    side: int, width: float, sure: str
) -> None:
    found = estimate_noise(100 + coloured(width, 10, (side, side), seed=side))
    assert found.confidence == sure
    if sure == "medium":
        assert found.model.white_sigma == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("shape", [(2, 2), (3, 3), (5, 6), (2, 300), (1, 40)])
def test_so_few_samples_or_rows_do_not_tell_that_noise_is_white(shape: tuple[int, int]) -> None:
    assert estimate_noise(np.random.default_rng(0).normal(100, 10, shape)).confidence == "low"


@pytest.mark.parametrize("side", [24, 28, 34])
def test_letters_of_a_small_picture_do_not_count_as_noise(side: int) -> None:
    clean = letters(side)
    assert estimate_noise(clean).model.sigma == 0
    noisy = clean + coloured(0, 10, (side, side), seed=side)
    assert estimate_noise(noisy).confidence == "low"
    with pytest.warns(NlflowWarning, match="noise"):
        result = denoise(noisy, quality="fast")
    assert ((result - clean) ** 2).mean() < ((noisy - clean) ** 2).mean()


# ---- what is clean


@pytest.mark.slow
@pytest.mark.parametrize("name", ["astronaut", "chelsea", "coins", "page"])
@pytest.mark.sampled(2)
def test_what_is_clean_stays(name: str) -> None:
    picture = getattr(data, name)()[:256, :256]
    found = estimate_noise(picture, channel_axis=-1 if picture.ndim == 3 else None)
    assert np.sqrt(np.mean(np.square(found.model.sigma))) < 2.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grass", "gravel"])
@pytest.mark.sampled(1)
def test_texture_that_looks_like_noise_from_afar_alone_is_none(name: str) -> None:
    assert estimate_noise(getattr(data, name)()).model.sigma < 4


@pytest.mark.parametrize("make", [partial(dithered, 4), grating])
def test_what_is_drawn_is_no_noise(make: Any) -> None:
    """The errors of four grey levels are bluer than counts; a grating has lines of offsets, and no other noise."""
    assert estimate_noise(make()).model.sigma == 0


@pytest.mark.parametrize(("shape", "sure"), [((1, 1), "low"), ((3, 5), "low"), ((1,), "low"), ((30, 30), "high")])
def test_a_few_samples_of_one_value_say_nothing_of_noise(shape: tuple[int, ...], sure: str) -> None:
    found = estimate_noise(np.full(shape, 7.0))
    assert found.model.sigma == 0
    assert found.confidence == sure


@pytest.mark.slow
def test_jpeg_of_a_clean_picture_is_no_camera() -> None:
    written = io.BytesIO()
    Image.fromarray(data.astronaut()[:256, :256]).save(written, "JPEG", quality=90)
    found = estimate_noise(np.asarray(Image.open(written)), channel_axis=-1)
    assert np.sqrt(np.mean(np.square(found.model.sigma))) < 1.6


@pytest.mark.slow
def test_compression_that_leaves_colours_nothing_leaves_the_noise_of_the_luminance() -> None:
    rng, written = np.random.default_rng(0), io.BytesIO()
    tint = gaussian_filter(rng.standard_normal((256, 256, 3)), (4, 4, 0))
    picture = (60 + 0.6 * gaussian_filter(grey(), 8) + coloured(1.2, 8))[..., None] + tint * (0.3 / tint.std())
    Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8)).save(written, "JPEG", quality=85)
    found = estimate_noise(np.asarray(Image.open(written)), channel_axis=-1)
    # Some of it is taken for texture: no flat part shows noise that JPEG has spared.
    assert 0.25 < np.sqrt(found.model.powers(3, 2)[0].mean()) / (8 * np.sqrt(3)) < 1.3


# ---- shapes, units and holes


@pytest.mark.slow
@pytest.mark.parametrize("channels", [2, 4])
@pytest.mark.sampled(1)
def test_any_number_of_channels(channels: int) -> None:
    clean = grey()[..., None] * np.ones(channels)
    noise = np.stack([coloured(0.7, 20, seed=k) for k in range(channels)], axis=-1)
    found = estimate_noise(np.round(clean + noise), channel_axis=-1)
    assert found.model.describe().startswith("correlated noise")
    # What all channels share counts together, so texture adds to it.
    assert 0.35 * 20 < np.sqrt(found.model.powers(channels, 2).mean()) < 1.6 * 20


@pytest.mark.parametrize("unit", [1e-6, pytest.param(1e6, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_units_scale_the_model(unit: float) -> None:
    picture, _ = shot(940, "bilinear", 98)
    plain, scaled = (estimate_noise(picture * u, channel_axis=-1) for u in (1.0, unit))
    # Not to the bit: where many blocks have equal energies, rounding decides which are taken.
    np.testing.assert_allclose(scaled.model.sigma, np.asarray(plain.model.sigma) * unit, rtol=1e-3)
    np.testing.assert_allclose(scaled.model.intensities, plain.model.intensities * unit, rtol=1e-6)
    assert scaled.confidence == plain.confidence


@pytest.mark.slow
def test_missing_samples_tell_nothing() -> None:
    noisy = grey() + coloured(1, 12)
    hidden = np.random.default_rng(2).random(noisy.shape) < 0.002
    plain = estimate_noise(noisy)
    found = estimate_noise(np.where(hidden, 1e4, noisy), mask=hidden)
    assert found.model.sigma == pytest.approx(plain.model.sigma, rel=0.15)


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (7, 200), (17, 17), (40, 40, 3), (90, 90, 3)])
def test_small_pictures_have_a_verdict(shape: tuple[int, ...]) -> None:
    noisy = 100 + np.random.default_rng(0).normal(0, 5, shape)
    found = estimate_noise(noisy, channel_axis=-1 if len(shape) == 3 else None)
    assert np.all(np.isfinite(found.model.sigma))


@pytest.mark.parametrize("value", [0, 128, 255])
def test_one_grey_level_has_no_noise(value: int) -> None:
    found = estimate_noise(np.full((96, 96, 3), value, np.uint8), channel_axis=-1)
    assert found.model.sigma == 0
    assert found.confidence == "high"
    assert "constant" in found.reasons[0]
