"""Speckle: sampling, its transform and the way back, its looks, and pictures that have none."""

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from scipy.special import digamma, polygamma
from scipy.stats import gamma, skew
from skimage import data

from nlflow import InputError, denoise
from nlflow.denoising.noise import LogSpeckle, Speckle, find_speckle
from tests.pictures import psnr

LOOKS = [0.5, 1.0, 2.0, 4.0, 16.0, 300.0]
CLEAN = {name: getattr(data, name)().astype(np.float64)[:256, :256] for name in ("camera", "coins", "brick", "grass",
                                                                                   "page", "text", "moon")}  # fmt: skip


def found(image):
    return find_speckle(np.asarray(image, float)[..., None])


def flat(looks, level=50.0, side=300):
    return Speckle(looks).sample(np.full((side, side), level), rng=0)[..., None]


# ---- the model


@pytest.mark.parametrize("looks", LOOKS)
def test_samples_have_the_moments_of_a_gamma_law(looks):
    z = flat(looks)
    ratio = z / 50
    assert ratio.mean() == pytest.approx(1, abs=5 / np.sqrt(looks * z.size))
    assert ratio.var() == pytest.approx(1 / looks, rel=5 * np.sqrt((2 + 6 / looks) / z.size))


@pytest.mark.parametrize("looks", [*LOOKS, 9999.0, 10_001.0, 1e8])
@pytest.mark.sampled(2)
def test_the_stable_sigma_is_that_of_a_power_of_the_law(looks):
    law = gamma(looks, scale=1 / looks)
    # By quantiles, as the law itself is a needle at many looks.
    share = (np.arange(200_000) + 0.5) / 200_000
    power = np.cbrt(law.ppf(share))
    assert Speckle(looks).stable_sigma == pytest.approx(3 * power.std() / power.mean(), rel=1e-3)


@pytest.mark.parametrize("looks", LOOKS)
def test_the_noise_is_additive_nearly_gaussian_and_of_the_stable_sigma(looks):
    stable = Speckle(looks).reduce(flat(looks)).samples
    # Errors of the local mean take part in the noise to second order.
    assert stable.std() == pytest.approx(Speckle(looks).stable_sigma, rel=0.03)
    assert abs(skew(stable, axis=None)) < (0.3 if looks < 1 else 0.1) < abs(skew(np.log(flat(1.0)), axis=None))


@pytest.mark.slow
@pytest.mark.parametrize("looks", LOOKS)
@pytest.mark.parametrize("level", [1e-3, 50.0, 1e5])
def test_the_way_back_is_unbiased(looks, level):
    found = Speckle(looks).reduce(flat(looks, level))
    back = found.back(np.full(found.samples.shape, found.samples.mean()))
    # A quarter of a percent, and what the noise leaves of a mean over all samples.
    assert back.mean() / level == pytest.approx(1, abs=0.0025 + 3 / np.sqrt(looks * back.size))


def test_the_way_back_is_exact_where_intensities_vary():
    clean = np.where(np.arange(200)[:, None] < 100, 10.0, 100.0) * np.ones(200)
    noise = Speckle(1.0)
    means = []
    for seed in range(60):
        z = noise.sample(clean, rng=seed)[..., None]
        found = noise.reduce(z)
        means.append(found.samples)
    # With the mean over many draws in place of an estimate.
    expected = np.mean(means, axis=0)
    last = noise.reduce(z).back(expected)[..., 0]
    assert last[:90].mean() == pytest.approx(10, rel=0.03)
    assert last[110:].mean() == pytest.approx(100, rel=0.03)


def test_zeros_and_missing_samples_are_finite_and_do_not_matter():
    z = flat(1.0, side=60)
    z[20:40, 20:40] = 0
    gone = np.zeros(z.shape[:2], bool)
    gone[:20] = True
    first, second = (Speckle(1.0).reduce(np.where(gone[..., None], v, z), gone) for v in (0.0, 1e30))
    np.testing.assert_array_equal(first.samples[~gone], second.samples[~gone])
    assert np.isfinite(first.samples).all()
    back = first.back(first.samples)[..., 0]
    assert back[28:32, 28:32].max() < 1e-3
    assert np.isfinite(Speckle(1.0).reduce(np.zeros((30, 1))).samples).all()


@pytest.mark.parametrize("units", [1e-12, 257.0])
def test_units_do_not_matter(units):
    z, estimate = flat(2.0, side=50), np.full((50, 50, 1), 4.0)
    first, second = Speckle(2.0).reduce(z), Speckle(2.0).reduce(z * units)
    np.testing.assert_allclose(second.samples, first.samples + np.log(units), rtol=1e-9)
    np.testing.assert_allclose(second.back(estimate + np.log(units)), units * first.back(estimate), rtol=1e-9)


@pytest.mark.slow
def test_it_denoises_better_than_the_logarithm():
    clean = CLEAN["camera"][60:160, 60:160].clip(1)
    for looks in (1.0, 4.0):
        noise = Speckle(looks)
        z = noise.sample(clean, rng=0)
        found = noise.reduce(z[..., None])
        ours = found.back(denoise(found.samples, noise.stable_sigma, channel_axis=-1))[..., 0]
        plain = np.exp(denoise(np.log(z), float(np.sqrt(polygamma(1, looks)))))
        assert psnr(clean, ours) > psnr(clean, plain) + 0.5
        if looks == 1:
            assert psnr(clean, ours) > psnr(clean, plain * np.exp(np.log(looks) - digamma(looks))) + 0.3


# ---- found without being told


@pytest.mark.slow
@pytest.mark.parametrize("looks", [1.0, 4.0, 16.0])
@pytest.mark.parametrize("units", [1 / 255, 257.0])
@pytest.mark.parametrize("name", ["camera", "coins"])
@pytest.mark.sampled(3)
def test_looks_are_found(name, units, looks):
    z = Speckle(looks).sample(CLEAN[name] * units, rng=0)
    assert found(z).looks == pytest.approx(looks, rel=0.15)


@pytest.mark.slow
def test_looks_of_signals_and_of_colours_are_found():
    signal = 50 * np.exp(np.sin(np.arange(6000) / 300))
    assert found(Speckle(4.0).sample(signal, rng=0)).looks == pytest.approx(4, rel=0.3)
    colours = data.astronaut()[:200, :200].astype(float)
    gone = np.zeros((200, 200), bool)
    gone[:, ::37] = True
    z = Speckle(4.0).sample(colours, rng=0, channel_axis=-1)
    z[gone] = 1e9
    assert find_speckle(z, gone).looks == pytest.approx(4, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("camera", "page") else pytest.mark.slow) for name in CLEAN]
)
@pytest.mark.sampled(1)
def test_other_noise_and_clean_pictures_are_no_speckle(name):
    clean, rng = CLEAN[name], np.random.default_rng(0)
    white, read = rng.normal(size=(2, *clean.shape))
    for image in (clean, np.maximum(clean + 10 * white, 0), np.clip(clean + 60 * white, 0, 255), rng.poisson(clean / 8),
                  np.maximum(rng.poisson(clean) + 4 * read, 0), clean + 300 + 40 * white):  # fmt: skip
        assert found(image) is None


@pytest.mark.parametrize("image", [np.ones((90, 90)), np.zeros((5, 5)), np.eye(90), -np.eye(90), np.arange(50.0)])
def test_drawings_and_negative_values_are_no_speckle(image):
    assert found(image) is None


def correlated(side=256, seed=0, width=1.0):
    """Intensities of a field that neighbours share, of one look and mean 1."""
    field = gaussian_filter(np.random.default_rng(seed).normal(size=(2, side, side)), (0, width, width))
    return np.square(field / field.std()).sum(axis=0) / 2


@pytest.mark.parametrize("looks", [1.0, 4.0])
def test_the_law_tells_speckle_where_intensities_hardly_vary(looks):
    clean = 100 + 10 * np.sin(np.arange(160) / 20) * np.ones((160, 1))
    assert found(Speckle(looks).sample(clean, rng=0)).looks == pytest.approx(looks, rel=0.1)
    amplitudes = found(Speckle(1.0, amplitude=True).sample(clean, rng=0))
    assert amplitudes.amplitude
    assert amplitudes.looks == pytest.approx(1, rel=0.1)
    rng = np.random.default_rng(0)
    for other in (clean + 40 * rng.normal(size=clean.shape), rng.poisson(clean / 10), rng.poisson(clean / 4) / 0.37):
        assert found(np.maximum(other, 0.01)) is None


@pytest.mark.parametrize("convert", [lambda z: 10 * np.log10(z), lambda z: np.rint(255 * (10 * np.log10(z) + 45) / 60)])
def test_decibels_are_told_by_their_law(convert):
    units = convert(10.0) - convert(1.0)
    clean = 0.1 + CLEAN["camera"] / 255
    for ratio in (correlated(), np.random.default_rng(0).exponential(size=clean.shape)):
        noise = found(convert(clean * ratio + 1e-9))
        assert isinstance(noise, LogSpeckle)
        assert noise.looks == 1
        assert noise.scale == pytest.approx(units / np.log(10), rel=0.06)
        assert (noise.spectrum is None) == (np.corrcoef(ratio[:, 1:].ravel(), ratio[:, :-1].ravel())[0, 1] < 0.1)


def test_neighbours_that_share_their_speckle_are_told():
    noise = found(CLEAN["coins"] * correlated(width=1.2))
    assert noise.looks == pytest.approx(1, rel=0.1)
    power = noise.spectrum[0]
    assert power[2, 2] > 10 * power[24, 24]
    again = noise.sample(np.full((256, 256), 50.0), rng=1)
    assert np.corrcoef(again[1:].ravel(), again[:-1].ravel())[0, 1] > 0.4


def test_logarithms_become_even_without_bias():
    noise = LogSpeckle(18.5, 1.0)
    z = noise.sample(np.full((256, 256), 100.0), rng=0)
    assert z.mean() == pytest.approx(100, abs=0.3)
    even = noise.reduce(z[..., None])
    assert even.samples.mean() == pytest.approx(100, abs=0.3)
    assert even.samples.std() == pytest.approx(even.rest.sigma, rel=0.02)
    assert abs(skew(even.samples, axis=None)) < 0.35 < 1 < -skew(z, axis=None)
    gone = np.zeros(z.shape, bool)
    gone[:50] = True
    first, second = (noise.reduce(np.where(gone, v, z)[..., None], gone).samples[~gone] for v in (0.0, -1e30))
    np.testing.assert_array_equal(first, second)
    assert noise.scaled(2.0) == LogSpeckle(37.0, 1.0)
    assert noise.describe() == "logarithms of speckle of 1 look: sigma 23.7"


@pytest.mark.slow
def test_ultrasound_is_denoised_as_its_mean():
    clean = 60 + 0.5 * CLEAN["camera"]
    z = np.clip(np.rint(clean + 18.5 * (np.log(correlated()) + np.euler_gamma)), 0, 255)
    result, info = denoise(z, return_info=True)
    assert psnr(clean, result) > psnr(clean, gaussian_filter(z, 1.5)) + 1.0
    assert abs(np.mean(result - clean)) < 1.5
    assert "logarithms of speckle" in info.noise


# ---- the interface


@pytest.mark.parametrize("looks", [0, -1, np.inf, "a", None])
def test_bad_looks_are_refused(looks):
    with pytest.raises(InputError, match=r"^looks: got"):
        Speckle(looks)


def test_negative_intensities_are_refused():
    for call in (lambda: Speckle().sample(-np.ones(9)), lambda: Speckle().reduce(-np.ones((9, 1)))):
        with pytest.raises(InputError, match=r"^(clean|image): got 9 negative"):
            call()
    gone = np.arange(9) < 3
    Speckle().reduce(np.where(gone, -1.0, 1.0)[:, None], gone)


@pytest.mark.parametrize("model", [Speckle(1.0, spectrum=np.ones((8, 8))), LogSpeckle(4.0, spectrum=np.ones((8, 8)))])
def test_a_spectrum_of_other_samples_is_refused(model):
    for shape, message in (((40,), "got a signal"), ((8, 8, 8), "got a volume")):
        for call in (lambda z: model.sample(z), lambda z: model.reduce(z[..., None])):
            with pytest.raises(InputError, match=message):
                call(np.ones(shape))


def test_a_model_is_scaled_told_and_written_down():
    assert Speckle(4.0).scaled(2.0) == Speckle(1.0)
    with pytest.raises(InputError, match=r"^factor: got 0"):
        Speckle(4.0).scaled(0.0)
    for factor in (1e200, 1e-200):
        with pytest.raises(InputError, match=r"^looks: got"):
            Speckle(4.0).scaled(factor)
    assert Speckle(4).as_dict() == {"kind": "speckle", "looks": 4.0, "amplitude": False, "spectrum": None}
    assert Speckle(4.0).describe().startswith("speckle of 4 looks")
