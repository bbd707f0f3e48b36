"""Curves of noise against samples of it and closed forms; what the figure shows."""

from __future__ import annotations

import numpy as np
import pytest

from nlflow.denoising.noise import Drift, GaussianNoise, Hum, Impulses, NoiseEstimate, Poisson, Speckle, estimate_noise
from nlflow.errors import InputError
from nlflow.plotting import noise_figure, render
from nlflow.plotting.noise import by_frequency, measured_curves, model_curves

RAMP = np.linspace(20, 220, 96)[:, None] + np.zeros(96)


def test_curves_of_gaussian_noise_are_those_of_its_samples() -> None:
    kernel = np.outer([1.0, 2.0, 1.0], [1.0, 2.0, 1.0])
    shape = GaussianNoise.from_kernel(kernel).spectrum
    noise = GaussianNoise(5.0, shape, [0.0, 200.0], [0.5, 1.5])
    curves = model_curves(noise, RAMP)
    rng = np.random.default_rng(0)
    for intensity in (50.0, 120.0, 200.0):
        drawn = np.std(noise.sample(np.full((512, 512), intensity), rng=rng))
        # The error of a standard deviation of 512² samples that are correlated over 3 x 3: 0.5 %.
        assert np.interp(intensity, curves.intensities, curves.sigmas) == pytest.approx(drawn, rel=0.02)
    # The power along a row of a separable kernel of mean power 1: (1 + cos 2πf)² squared, and its mean over circles.
    assert curves.plane is not None
    row = curves.plane[32, 32:]
    expected = (1 + np.cos(2 * np.pi * np.arange(32) / 64)) ** 2
    np.testing.assert_allclose(row / row[0], expected / 4, atol=1e-12)
    assert np.all(np.diff(curves.powers) < 0)


def test_the_mean_of_the_power_is_the_variance() -> None:
    curves = model_curves(GaussianNoise(3.0), RAMP)
    np.testing.assert_allclose(curves.powers, 9.0)
    np.testing.assert_allclose(curves.sigmas, 3.0)
    frequencies, powers, plane = by_frequency(np.full((1, 64), 4.0))
    assert plane is None
    np.testing.assert_allclose(powers, 4.0)
    np.testing.assert_allclose(frequencies, np.arange(1, 33) / 64)


def test_luminance_of_colours_is_drawn() -> None:
    spectrum = np.ones((3, 64, 64))
    noise = GaussianNoise([6.0, 2.0, 1.0], spectrum, opponent=True)
    colours = np.stack([RAMP] * 3, axis=-1)
    curves = model_curves(noise, colours, channel_axis=-1)
    np.testing.assert_allclose(curves.powers, 36.0)
    sample = noise.sample(np.zeros((256, 256, 3)), rng=1, channel_axis=-1)
    np.testing.assert_allclose(curves.sigmas, np.sqrt(np.mean(sample**2)), rtol=0.02)


def test_models_without_formulas_are_sampled() -> None:
    poisson = model_curves(Poisson(2.0, 3.0), RAMP)
    # 128² samples: a standard deviation is off by 0.6 %, the largest of 32 of them by less than 2.5 %.
    np.testing.assert_allclose(poisson.sigmas, np.sqrt(2.0 * poisson.intensities + 9.0), rtol=0.025)
    assert poisson.powers.mean() == pytest.approx(2 * np.median(RAMP) + 9, rel=0.05)
    speckle = model_curves(Speckle(4.0), RAMP)
    np.testing.assert_allclose(speckle.sigmas, speckle.intensities / 2, rtol=0.05)
    assert model_curves(Impulses(0.1, 0.0, 255.0), RAMP).sigmas.min() > 0
    wave = np.sin(np.arange(900) / 30)
    hum = model_curves(Hum((0.25,), (2.0,)), wave)
    assert hum.frequencies[np.argmax(hum.powers)] == 0.25
    for unknown in (Hum((0.1,)), Drift(400.0)):
        assert model_curves(unknown, wave).sigmas.size == 0


def test_what_was_measured_has_the_strength_of_the_model() -> None:
    model = GaussianNoise(5.0, None, [0.0, 200.0], [0.5, 1.5])
    curves = model_curves(model, RAMP)
    places = np.array([50.0, 100.0, 150.0])
    found = NoiseEstimate(model, "high", (), {"intensities": places, "strengths": 7 * model.relative(places)})
    measured = measured_curves(found, curves)
    np.testing.assert_allclose(measured.sigmas, 5.0 * model.relative(places), rtol=1e-3)
    assert measured.plane is None
    assert measured_curves(NoiseEstimate(model, "high"), curves).sigmas.size == 0


def labels(axis: object) -> list[str]:
    return axis.get_legend_handles_labels()[1]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_figure_of_a_picture() -> None:
    noisy = GaussianNoise(9.0).sample(RAMP, rng=0)
    found = estimate_noise(noisy)
    figure = noise_figure(noisy, found, channel_axis=None, title="a $file$.png")
    assert figure.get_suptitle() == f"a $file$.png\n{found}"
    assert [axis.get_title() for axis in figure.axes if axis.get_title()] == [
        "the picture", "σ of a sample by intensity", "power by frequency, mean over directions",
        "how likely each kind is: for the verdict, and against it", "power by both frequencies, model",
    ]  # fmt: skip
    assert labels(figure.axes[1]) == ["σ of the whole, interval", "model", "measured, rescaled"]
    assert render(figure, "png").startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [(1, 1), (30, 40, 5), *(pytest.param(s, marks=pytest.mark.slow) for s in ((5, 7), (40, 3), (200, 30, 3)))]
)
@pytest.mark.sampled(1)
def test_figures_of_odd_pictures(shape: tuple[int, ...]) -> None:
    axis = 2 if len(shape) == 3 else None
    values = np.random.default_rng(0).normal(100, 5, shape)
    found = NoiseEstimate(GaussianNoise(5.0), "medium")
    render(noise_figure(values, found, channel_axis=axis), "png")
    constant, missing = np.full(shape, 3.0), np.ones(shape, bool)
    render(noise_figure(constant, NoiseEstimate(GaussianNoise(0.0), "low"), channel_axis=axis, missing=missing), "png")


def test_figure_of_recordings() -> None:
    rng = np.random.default_rng(0)
    wave = np.sin(np.arange(900) / 30)[:, None] + rng.normal(0, [0.1, 0.2], (900, 2))
    wave[10:20, 0] = np.nan
    each = [NoiseEstimate(GaussianNoise(s), "high") for s in (0.1, 0.2)]
    figure = noise_figure(wave, each, channel_axis=-1, names=("a", "b"))
    assert [axis.get_title() for axis in figure.axes][::2] == [f"a: {each[0]}", f"b: {each[1]}"]
    recording, model = figure.axes[3].lines
    # The recording is noise alone at high frequencies: 0.04 for a σ of 0.2, of 6 windows and 64 frequencies to 10 %.
    assert np.mean(np.asarray(recording.get_ydata())[64:]) == pytest.approx(0.04, rel=0.15)
    np.testing.assert_allclose(np.asarray(model.get_ydata()), 0.04)
    together = noise_figure(wave[:, :1], each[:1], channel_axis=-1, title="x")
    assert together.get_suptitle() == f"x\n{each[0]}"
    hidden = noise_figure(wave[:, :1], each[:1], channel_axis=-1, title="x\u202e\n")
    assert hidden.get_suptitle() == f"x\\u202e\\n\n{each[0]}"
    with pytest.raises(InputError, match="expected an image or a signal"):
        noise_figure(np.zeros((2, 3, 4)), each, channel_axis=None)


def test_the_evidence_is_drawn_where_hypotheses_were_weighed() -> None:
    weighed = {"probabilities": {"white": 0.2, "camera": 0.7, "clean": 0.1}, "interval": (2.5, 3.5)}
    found = NoiseEstimate(GaussianNoise(3.0), "medium", ("flat parts show it",), weighed)
    noisy = RAMP + np.random.default_rng(0).normal(0, 3, RAMP.shape)
    figure = noise_figure(noisy, found, channel_axis=None)
    assert all(one.images or one.has_data() for one in figure.axes)  # no empty place where nothing was measured
    (axis,) = (one for one in figure.axes if "how likely" in one.get_title())
    assert [label.get_text() for label in axis.get_yticklabels()] == ["camera", "white", "clean"]
    assert [bar.get_width() for bar in axis.patches] == [0.7, 0.2, 0.1]
    assert any("because flat parts show it" in text.get_text() for text in axis.texts)
    (levels,) = (one for one in figure.axes if "by intensity" in one.get_title())
    assert "interval" in "".join(text.get_text() for text in levels.get_legend().get_texts())
    assert not [one for one in noise_figure(noisy, NoiseEstimate(found.model, "high"), channel_axis=None).axes
                if "how likely" in one.get_title()]  # fmt: skip
