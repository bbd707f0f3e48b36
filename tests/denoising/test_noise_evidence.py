"""Structure that passes for noise is not taken out: letters, masks, channels that differ, colours that are alike."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter
from skimage import data

from benchmarks.blind.delicate import letters
from nlflow import NlflowWarning, denoise, estimate_noise
from nlflow.denoising.noise import Poisson, Speckle
from nlflow.denoising.noise.finding import evidence, pictures
from nlflow.denoising.noise.finding.sigma import channel_levels
from tests.pictures import Floats

pytestmark = pytest.mark.numerical


def page(side: int = 192) -> Floats:
    """Lines of letters of 18 px, a little blurred."""
    drawn = Image.new("L", (side + 80, side), 250)
    pen = ImageDraw.Draw(drawn)
    for row in range(0, side, 21):
        pen.text((row % 5, row), "know Caius Marcius is chief enemy", fill=25, font=ImageFont.load_default(18))
    return gaussian_filter(np.asarray(drawn, np.float64)[:, :side], 0.8)


def white(shape: tuple[int, ...], seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [3, 7])
def test_letters_are_no_noise(sigma: float) -> None:
    clean = page()
    found = estimate_noise(clean + sigma * white(clean.shape))
    assert found.model.is_white
    assert found.model.sigma == pytest.approx(sigma, rel=0.1)


@pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning")  # that they stay is told
def test_letters_without_noise_stay() -> None:
    """Letters are as strong at high frequencies as noise, and no flat part shows any."""
    clean = np.rint(page())
    assert np.array_equal(denoise(clean), clean)


@pytest.mark.parametrize("tails", [-160.0, 30.0, 160.0])
def test_the_law_of_compressed_noise_does_not_outweigh_its_spectrum(tails: float) -> None:
    """Pictures of PolyU, clean with probabilities up to 0.34 % by their spectra, are up to 160 standard errors off."""
    assert pictures.acts(pictures.revised({"clean": 0.0034, "correlated": 0.9966}, tails)["clean"])


@pytest.mark.parametrize(
    ("clean", "tails", "says"), [(0.03, 20.0, "not its law"), (0.9, 0.0, "clean with probability 90%")]
)
def test_a_verdict_that_all_stays_says_what_it_rests_on(
    clean: float, tails: float, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No picture is left as it is because it is clean "with probability 3 %"."""
    look, believe = pictures.look, pictures.believe
    odds = {"clean": clean, "white": 1 - clean, "correlated": 0.0}
    monkeypatch.setattr(pictures, "look", lambda *given: replace(look(*given), tails=tails))
    monkeypatch.setattr(pictures, "believe", lambda *given: replace(believe(*given), probabilities=odds))
    noisy = np.linspace(0, 400, 96) + 5 * white((96, 96))  # weak, so that the law counts
    found = estimate_noise(noisy)
    assert str(found) == f"no noise found (confidence {found.confidence})"
    assert found.confidence == ("low" if tails else "medium")
    assert says in found.reasons[0]
    assert found.measured["probabilities"]["clean"] > 1 / 3  # what the decision rests on
    assert sum(found.measured["probabilities"].values()) == pytest.approx(1)
    with pytest.warns(NlflowWarning, match="no noise found"):
        result, info = denoise(noisy, return_info=True)
    assert info.noise == "no noise"
    assert np.array_equal(result, noisy)


@pytest.mark.parametrize(("tails", "found"), [(20.0, True), (-20.0, False)])
def test_heavy_tails_do_not_speak_against_strong_noise(
    tails: float, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edges in quiet parts make them; strokes and dither have light ones, however strong they are."""
    look, believe = pictures.look, pictures.believe
    odds = {"clean": 0.1, "white": 0.9, "correlated": 0.0}
    monkeypatch.setattr(pictures, "look", lambda *given: replace(look(*given), tails=tails))
    monkeypatch.setattr(pictures, "believe", lambda *given: replace(believe(*given), probabilities=odds))
    assert (estimate_noise(100 + 20 * white((96, 96))).model.strength(np.zeros((96, 96, 1))) > 15) == found


def test_blurred_noise_of_a_photograph_is_no_structure() -> None:
    """Its highest frequencies hold edges alone, whose law is not that of noise."""
    clean = data.camera()[100:356, 100:356].astype(np.float64)
    noise = gaussian_filter(white(clean.shape), 1, mode="wrap")
    found = estimate_noise(clean + noise * (20 / noise.std()))
    assert found.model.strength(clean[..., None]) == pytest.approx(20, rel=0.2)


# ---- how the spectrum of strong noise goes on

MIDDLES = np.array([math.sqrt(low * min(high, 1.2)) for _, low, high in evidence.BANDS])


def goes_on(noise: Floats, structure: Floats, limits: tuple[float, float, float], white: float = 0.0) -> Any:
    """Return what is told of a noise (B,) under structure, of which a half is learned below half the frequencies."""
    nothing = np.zeros(0)
    found = evidence.Evidence(nothing, np.hypot(noise, structure)[None] ** 2, [], nothing, nothing)
    learned = noise / np.hypot(noise, structure) * np.where(MIDDLES < 0.5, 0.5, 1.0)
    odds = {"clean": 0.0, "white": white, "correlated": 1 - white}
    belief = pictures.Belief(odds, learned[None], 0.0, np.array(limits), "low")
    told = pictures.Continued.of(found, belief)
    return told, told.shares[0] * np.hypot(noise, structure) / noise, learned * np.hypot(noise, structure) / noise


SURE, UNSURE = (0.7, 1.0, 1.3), (0.2, 1.0, 3.0)


def test_noise_of_a_power_of_the_frequency_goes_on_as_it() -> None:
    told, met, _ = goes_on(MIDDLES**-0.5, np.where(MIDDLES < 0.2, 9.0, 0.0), SURE)
    np.testing.assert_allclose(met, 1.0, rtol=1e-9)
    assert told.slope == pytest.approx(0.5)
    assert told.falls


def test_white_noise_goes_on_as_white_noise_under_any_structure() -> None:
    told, met, _ = goes_on(np.ones(len(MIDDLES)), 0.1 / MIDDLES**2, SURE)
    np.testing.assert_allclose(met, 1.0, rtol=1e-9)
    assert not told.falls
    assert told.slope == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("width", [1.0, 2.0])
def test_noise_that_a_filter_made_is_what_is_measured_where_it_falls(width: float) -> None:
    blurred = 20 * np.exp(-((np.pi * width * MIDDLES) ** 2) / 2)
    structure = np.full(len(MIDDLES), 1.0)
    _, met, learned = goes_on(blurred, structure, UNSURE)
    assert np.abs(np.log(met[4:])).max() < 0.05  # from where it is stronger than structure
    for limits, kind in ((SURE, 0.0), (UNSURE, 0.5)):  # what was learned stays where it is sure, or noise may be white
        np.testing.assert_allclose(goes_on(blurred, structure, limits, kind)[1], learned)


def test_correlated_noise_that_flat_parts_show_stays_correlated() -> None:
    clean = np.add.outer(np.linspace(0, 150, 192), np.where(np.arange(192) > 90, 80.0, 0.0))
    noise = gaussian_filter(white(clean.shape), 1.2, mode="wrap")
    found = estimate_noise(clean + noise * (10 / noise.std()))
    assert not found.model.is_white
    assert found.model.strength(clean[..., None]) == pytest.approx(10, rel=0.25)


@pytest.mark.slow
def test_correlated_noise_that_is_clipped_in_dark_parts_stays_correlated() -> None:
    clean = np.add.outer(np.linspace(0, 20, 192), np.where(np.arange(192) > 120, 120.0, 5.0))
    noise = gaussian_filter(white(clean.shape), 1, mode="wrap")
    found = estimate_noise(np.clip(np.rint(clean + noise * (20 / noise.std())), 0, 255).astype(np.uint8))
    assert not found.model.is_white
    assert found.model.strength(clean[..., None]) == pytest.approx(20, rel=1 / 3)  # a half of it is cut off


def test_the_steps_of_a_mosaic_of_colours_are_no_noise() -> None:
    drawn = gaussian_filter(white((160, 160)), 8)
    clean = 100 * np.exp(0.6 * drawn / drawn.std())
    for row, column, gain in ((0, 0, 0.2), (0, 1, 0.5), (1, 0, 0.5), (1, 1, 2.0)):
        clean[row::2, column::2] *= gain
    noisy = clean + np.sqrt(4 * clean + 25) * white(clean.shape, 1)
    found = estimate_noise(noisy)
    level = np.median(clean)
    variance = found.model.gain * (level - found.model.offset) + found.model.sigma**2
    assert 0.7 < np.sqrt(variance / (4 * level + 25)) < 1.2


@pytest.mark.parametrize("low_high", [(0, 255), (10, 240)])
@pytest.mark.parametrize("shape", [(600,), (120, 120), (10, 30, 30)])
def test_two_values_stay_and_that_is_told(shape: tuple[int, ...], low_high: tuple[int, int]) -> None:
    drawn = np.where(gaussian_filter(white(shape), 2) > 0, *low_high).astype(np.uint8)
    with pytest.warns(NlflowWarning, match="two values alone"):
        result, info = denoise(drawn, return_info=True, preserve_range=True)
    assert np.array_equal(result, drawn)
    assert info.confidence != "high"


def test_few_counts_are_no_impulses() -> None:
    clean = 0.2 + 1.5 * (gaussian_filter(white((160, 160)), 6) > 0)
    counts = np.random.default_rng(1).poisson(clean)
    found = estimate_noise(counts)
    assert isinstance(found.model, Poisson)
    assert found.model.gain == pytest.approx(1.0, rel=0.05)


# ---- channels


def test_levels_are_one_where_channels_are_alike() -> None:
    assert channel_levels(np.array([4.0, 5.0])).tolist() == [4.5, 4.5]
    assert channel_levels(np.array([4.0, 5.1])).tolist() == [4.0, 5.1]
    assert channel_levels(np.array([0.0, 5.0])).tolist() == [0.0, 5.0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning")  # of the wave, which is alike along an axis
@pytest.mark.parametrize("shape", [(2000,), (128, 128), (12, 24, 24)])
@pytest.mark.parametrize("noise", ["auto", "white"])
def test_each_channel_has_its_own_noise(shape: tuple[int, ...], noise: str) -> None:
    clean = 100 + 30 * np.sin(np.add.reduce(np.indices(shape)) / 15.0)
    noisy = np.stack([clean + 1 * white(shape, 1), clean + 20 * white(shape, 2)], -1)
    result = denoise(noisy, noise=noise, channel_axis=-1, quality="fast")
    assert np.std(result[..., 0] - clean) < 1
    assert np.std(result[..., 1] - clean) < 15


@pytest.mark.slow
@pytest.mark.parametrize("quality", ["pixels", "balanced"])
def test_an_opaque_alpha_channel_is_passed_through(quality: str) -> None:
    noisy = 100 + 20 * white((64, 64, 3)) + 50 * (np.arange(64) > 30)[:, None]
    alpha = np.concatenate([noisy, np.full((64, 64, 1), 255.0)], axis=-1)
    for words in ({}, {"sigma": 20.0}):
        result = denoise(alpha, channel_axis=-1, quality=quality, **words)
        assert np.array_equal(result[..., :3], denoise(noisy, channel_axis=-1, quality=quality, **words))
        assert (result[..., 3] == 255).all()


# ---- ranges


@pytest.mark.parametrize("colours", [((255, 0, 0),) * 2, ((255, 0, 0), (0, 255, 0)), ((255, 0, 0), (0, 0, 255))])
@pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning")  # that they stay is told
@pytest.mark.parametrize("blur", [0.0, 1.0])
def test_drawings_in_colours_that_are_equally_light_pass(colours: tuple[tuple[int, ...], ...], blur: float) -> None:
    inside = np.hypot(*(np.indices((100, 100)) - 50)) < 30
    drawn = np.where(inside[..., None], *colours).astype(np.float64)
    drawn = np.rint(gaussian_filter(drawn, (blur, blur, 0))).astype(np.uint8)
    result = denoise(drawn, channel_axis=-1, preserve_range=True)
    assert np.abs(result - drawn).max() < 3


@pytest.mark.filterwarnings("error")
def test_a_star_is_no_reason_to_say_that_nothing_was_removed() -> None:
    sky = np.full((100, 100), 100.0)
    sky[50:53, 50:53] = 8e4
    assert np.std((denoise(sky + 10 * white(sky.shape)) - sky)[:40]) < 3


def test_no_block_is_preferred_for_its_place() -> None:
    """Energies have a largest value: of blocks that reach it none is quieter than the others."""
    rng = np.random.default_rng(3)
    squares = (rng.uniform(1, 2, (400, 64)) * rng.choice([1.0, 1e3, 1e5], 400)[:, None]).astype(np.float32)
    order, levels = rng.permutation(400), rng.uniform(size=400)
    pairs = ((squares, levels), (squares[order], levels[order]))
    expected, shuffled = (evidence._quiet(own, light, 8, 1e-9) for own, light in pairs)
    assert expected is not None
    assert shuffled is not None
    np.testing.assert_allclose(shuffled[0], expected[0], rtol=1e-4)


@pytest.mark.slow
def test_counts_are_skewed_and_noise_all_the_same() -> None:
    """Some ten counts in the quietest parts have a skewness of 1/3."""
    clean = data.camera()[100:356, 150:406].astype(np.float64)
    found = estimate_noise(4.0 * np.random.default_rng(1).poisson(clean / 4))
    assert found.confidence == "high"
    assert found.model.gain == pytest.approx(4.0, rel=0.1)


def test_noise_that_is_stronger_in_a_part_is_noise_and_letters_are_not() -> None:
    """The quietest blocks of both differ more than blocks of white noise do."""
    uneven = 4 * white((192, 192)) * np.where(np.arange(192) < 12, 0.25, 1.0)
    assert estimate_noise(uneven).model.strength(uneven[..., None], None) == pytest.approx(4.0, rel=0.2)
    assert estimate_noise(letters(12)).model.strength(letters(12)[..., None], None) == 0


def test_noise_is_told_where_hardly_a_window_is_without_a_hole() -> None:
    rng = np.random.default_rng(5)
    lost = rng.random((128, 128)) < 0.04
    shades = np.add.outer(np.linspace(50, 200, 128), np.linspace(0, 100, 128))
    found = estimate_noise(np.where(lost, np.nan, shades * rng.gamma(9, 1 / 9, shades.shape)))
    assert isinstance(found.model, Speckle)
    assert found.model.looks == pytest.approx(9, rel=0.15)
