"""What was removed is held against the noise that was found; isolated peaks keep their sum."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from skimage import data

from nlflow import NlflowWarning, denoise, estimate_noise
from nlflow.denoising.frame import observe
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise import GaussianNoise, Impulses, Mixture
from nlflow.denoising.noise.finding import verdict
from nlflow.denoising.noise.models.base import NoiseEstimate
from nlflow.denoising.options import Options
from nlflow.denoising.residual import LIMITS, Figures, _pattern, figures_of, milder, seen_in, with_peaks
from tests.denoising.test_noise_evidence import page, white
from tests.pictures import Floats

pytestmark = pytest.mark.numerical
CAMERA = np.asarray(data.camera(), np.float64)[100:228, 180:308]


def seen(noisy: Floats, estimate: Floats, noise: Any) -> tuple[str, ...]:
    """Return what the residual of an estimate shows under a noise."""
    frame, part = observe(noisy, None, noise, Axes.of(noisy.shape, None, None, None), "balanced", Options())
    figures = figures_of(part.f, ((estimate - frame.offset) / frame.level)[..., None], frame)
    return seen_in(figures, noisy.ndim)


@pytest.mark.parametrize(
    ("shape", "sigma"), [((128, 128), 7.0), ((128, 128), 20.0), ((4096,), 7.0), ((32, 32, 32), 7.0)]
)
def test_the_noise_itself_is_not_doubted(shape: tuple[int, ...], sigma: float) -> None:
    """One in 30 000 is, by four standard errors; twice the noise in all of its flat parts is."""
    clean = CAMERA if shape == CAMERA.shape else gaussian_filter(200 * white(shape, 3), 9)
    noisy = clean + sigma * white(shape)
    assert seen(noisy, clean, GaussianNoise(sigma)) == ()
    assert any("less noise" in text for text in seen(noisy, clean, GaussianNoise(2 * sigma)))


def test_correlated_noise_is_not_doubted_and_white_noise_in_its_place_is() -> None:
    noise = GaussianNoise.from_kernel(np.ones((2, 2)), 10.0)
    noisy = noise.sample(CAMERA, rng=0)
    assert seen(noisy, CAMERA, noise) == ()
    assert any("neighbours" in text for text in seen(noisy, CAMERA, GaussianNoise(10.0)))


def test_lines_in_the_residual_are_seen() -> None:
    clean = page(128)
    noisy = clean + 7 * white(clean.shape)
    assert seen(noisy, clean, GaussianNoise(7.0)) == ()
    said = seen(noisy, gaussian_filter(clean, 1.5), GaussianNoise(7.0))
    assert "lines and edges of the picture are in it" in said


ROWS, COLUMNS = np.mgrid[:160, :160]
BITS = np.random.default_rng(0).random((160, 160)) < 0.5


def halftone(angle: float) -> Floats:
    """Return dots of print of one size, some six pixels apart, as a scanner sees them."""
    turns = (ROWS * np.cos(a) + COLUMNS * np.sin(a) for a in (angle, angle + np.pi / 2))
    return gaussian_filter(np.where(sum(np.cos(one * 2 * np.pi / 7) for one in turns) > 0.3, 0.0, 255.0), 0.8)


@pytest.mark.parametrize(("period", "channels", "told"), [(2, 3, False), (2, 1, True), (4, 3, True)])
def test_of_colours_a_mosaic_does_not_repeat(period: int, channels: int, told: bool) -> None:
    """Noise that was clipped has a mean of its own at each place of the mosaic, which is no halftone."""
    rest = white((128, 128)) + np.where((ROWS % period == 0) & (COLUMNS % period == 0), 3.0, 0.0)[:128, :128]
    assert (_pattern([rest[:64], rest[64:]], channels) > LIMITS.pattern) == told


@pytest.mark.parametrize(
    ("picture", "said"), [(halftone(0.3), "it repeats"), (np.where(BITS, 100.0, 0.0), "it has two values")]
)
def test_patterns_in_the_residual_are_seen(picture: Floats, said: str) -> None:
    noisy = picture + 3 * white(picture.shape)
    assert seen(noisy, picture, GaussianNoise(3.0)) == ()
    even = np.full_like(picture, picture.mean())
    assert any(said in text for text in seen(noisy, even, GaussianNoise(float(picture.std()))))


@pytest.mark.parametrize("sigma", [0.0, 8.0])
def test_a_halftone_in_colours_is_no_noise(sigma: float) -> None:
    clean = np.stack([halftone(angle) for angle in (0.3, 0.8, 1.3)], axis=-1)
    noisy = clean + sigma * white(clean.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # told below
        result, info = denoise(noisy, quality="fast", channel_axis=-1, return_info=True)
    assert np.std(result - clean) <= 1.001 * sigma
    assert info.confidence == "low"


def fading(size: int = 16384, every: int = 4096) -> Floats:
    """Return sounds of four harmonics that fade below noise of 1, as syllables and strings do."""
    time, rng = np.arange(size), np.random.default_rng(0)
    loud, low = 30 * rng.uniform(0.02, 1, size // every), 0.02 * rng.uniform(0.7, 1.5, size // every)
    tones = sum(np.sin(k * low[time // every] * time) / k for k in range(1, 5))
    return np.asarray(loud[time // every] * np.exp(-(time % every) / 700) * tones)


def test_what_fades_below_the_noise_of_a_recording_may_go_with_it() -> None:
    clean = fading()
    noisy = clean + white(clean.shape)
    loud = gaussian_filter(np.abs(clean), 40)
    weak, half = (np.where(loud > level, clean, 0.0) for level in (1.2, 3.0))
    assert np.std(weak - clean) < 0.4
    assert seen(noisy, weak, GaussianNoise(1.0)) == ()
    assert any("neighbours" in text for text in seen(noisy, half, GaussianNoise(1.0)))


@pytest.mark.slow
def test_the_noise_that_is_found_in_a_recording_is_taken_out_of_it() -> None:
    """Coarser scales take the weak ends of tones for noise, which is no reason to leave the noise."""
    clean = fading()
    noisy = clean + white(clean.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, info = denoise(noisy, return_info=True)
    found = estimate_noise(noisy)
    assert info.sigma == found.model.white_sigma == pytest.approx(1.0, rel=0.05)
    assert info.confidence == found.confidence == "high"
    assert np.std(result - clean) < 0.2


def wrong(monkeypatch: pytest.MonkeyPatch, noise: Any) -> None:
    """Let the verdict be a noise, whatever the samples are."""
    monkeypatch.setattr(verdict, "examine", lambda *_: NoiseEstimate(noise, "high", ("a rule",)))


@pytest.mark.slow
def test_the_milder_noise_that_flat_parts_show_is_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = page(128)
    noisy = clean + 7 * white(clean.shape)
    wrong(monkeypatch, GaussianNoise(24.0, intensities=[0, 255], strengths=[0.2, 1.8]))
    with pytest.warns(NlflowWarning, match="flat parts show less noise than was taken out"):
        result, info = denoise(noisy, return_info=True)
    assert info.sigma == pytest.approx(7, rel=0.15)
    assert np.std(result - clean) < 0.7 * 7


def test_nothing_is_taken_out_of_clean_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = page(96)
    wrong(monkeypatch, GaussianNoise(24.0, intensities=[0, 255], strengths=[0.2, 1.8]))
    with pytest.warns(NlflowWarning, match=r"the result is the input.*nothing is taken out"):
        result, info = denoise(clean, return_info=True)
    np.testing.assert_array_equal(result, clean)
    assert info.sigma == 0
    assert info.confidence == "low"


@pytest.mark.parametrize(
    ("noise", "channel"),
    [(GaussianNoise([16.0, 24.0, 40.0]), -1), (GaussianNoise.from_kernel(np.ones((25, 25)), 24.0), None)],
    ids=["a strength for each channel", "correlated beyond a window"],
)
def test_noise_of_any_kind_is_doubted(noise: Any, channel: int | None) -> None:
    noisy = np.random.default_rng(0).normal(100, 20, (64, 64) if channel is None else (64, 64, 3))
    axes = Axes.of(noisy.shape, channel, None, None)
    frame, part = observe(noisy, None, "auto", axes, "fast", Options(), found=NoiseEstimate(noise, "high", ("a rule",)))
    smooth = gaussian_filter(part.f, (3, 3, 0))
    found = figures_of(part.f, smooth, frame)
    assert found is not None
    less = milder(frame, replace(found, skewness=1.0))
    assert less is not None
    assert less.confidence == "low"
    assert np.all(less.model.sigma <= np.asarray(noise.sigma))


def test_impulses_stay_replaced_where_the_noise_beside_them_is_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no part of the residual that is looked at, unless they lie in clumps as structure does."""
    clean, noise = CAMERA[:64, :64], Impulses(0.05, 0.0, 255.0)
    noisy = noise.sample(clean, rng=0)
    again = NoiseEstimate(Mixture([noise, GaussianNoise(40.0)]), "low", ("what was removed is not as strong",))
    monkeypatch.setattr(verdict, "examine", lambda *_: again)
    with pytest.warns(NlflowWarning, match=r"find out: impulses.*what was removed is not white.* alone is taken out"):
        result, info = denoise(noisy, quality="fast", return_info=True)
    hit = noise.hits(noisy[..., None])[..., 0]
    np.testing.assert_array_equal(result[~hit], noisy[~hit])
    assert np.std(result - clean) < 0.2 * np.std(noisy - clean)
    assert (info.sigma, info.confidence) == (0.0, "low")

    alone, axes = Mixture([noise, GaussianNoise(0.0)]), Axes.of(noisy.shape, None, None, None)
    frame, _ = observe(noisy, None, "auto", axes, "fast", Options(), found=again)
    for clumps, model in ((0.0, alone), (1.0, GaussianNoise(0.0))):
        less = milder(frame, Figures(skewness=1.0, clumps=clumps))
        assert less is not None
        assert less.model == model

    noisy[:, :30] = 255.0  # paper, which bears out no noise
    frame, part = observe(noisy, None, "auto", axes, "fast", Options(), found=replace(again, model=alone))
    assert seen_in(figures_of(part.f, part.f, frame), 2) == ()


def test_nothing_is_doubted_where_nothing_was_to_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No advice to measure a flat part where the strength is 0."""
    clean = page(64)
    monkeypatch.setattr(verdict, "examine", lambda *_: NoiseEstimate(GaussianNoise(9.0), "low", ("a rule",)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for samples in (clean, np.stack([clean] * 9)):
            result, info = denoise(samples, strength=0, return_info=True)
            assert np.array_equal(result, samples)
            assert info.noise == "white noise: sigma 9"  # it was found, and is left


def test_noise_that_was_told_is_not_held_against_the_residual() -> None:
    clean = page(64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result, info = denoise(clean, 24.0, quality="fast", return_info=True)
    assert info.sigma == 24
    assert np.any(result != clean)


def star(flux: float, width: float, place: tuple[float, float] = (20.3, 20.6), side: int = 41) -> Floats:
    rows, columns = np.mgrid[:side, :side]
    squares = (rows - place[0]) ** 2 + (columns - place[1]) ** 2
    return np.asarray(flux / (2 * np.pi * width**2) * np.exp(-squares / (2 * width**2)))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_lone_peak_gets_back_what_the_residual_holds_of_it(sign: float) -> None:
    """A filter that kept three quarters of it, and too little of its wings."""
    clean = sign * star(60.0, 1.4)
    kept = 0.75 * clean * (np.abs(clean) > 0.05 * np.abs(clean).max())
    sums = [
        with_peaks((clean + white(clean.shape, seed))[..., None], kept[..., None]).sum() / clean.sum()
        for seed in range(60)
    ]
    assert np.mean(sums) == pytest.approx(1.0, abs=0.05)
    assert kept.sum() / clean.sum() < 0.75
    lively = kept + gaussian_filter(40 * white(clean.shape, 5), 2)  # a texture is not calm
    assert np.array_equal(with_peaks(clean[..., None], lively[..., None])[..., 0], lively)
