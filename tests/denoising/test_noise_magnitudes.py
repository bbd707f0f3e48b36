"""Magnitudes: their law, a transform that makes their noise white, the way back, and how strong they are."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage as ndi
from scipy.integrate import quad
from scipy.special import eval_genlaguerre, i0e, i1e
from scipy.stats import ncx2, rice

from nlflow import InputError, denoise, estimate_noise
from nlflow.denoising.noise import (
    GaussianNoise,
    Impulses,
    Mixture,
    NoncentralChi,
    Poisson,
    Rician,
    find_rician,
    load_noise,
)
from nlflow.denoising.noise.finding.places import find_places
from nlflow.denoising.noise.finding.verdict import examine
from nlflow.denoising.noise.models import magnitudes
from nlflow.errors import FileFormatError
from tests.pictures import ellipsoids

COILS = [1.0, 2.5, 8.0, 64.0]
PLACES = np.array([0.0, 0.01, 0.3, 1.0, 2.0, 3.7, 6.0, 9.0, 30.0, 100.0])


def flat(level, sigma=1.0, side=200, coils=1.0, rng=0):
    return NoncentralChi(sigma, coils).sample(np.full((side, side), float(level)), rng=rng)


def ball(side=32, level=100.0, radius=0.4):
    """A volume with a background of nothing, and two tissues."""
    x = (np.indices((side, side, side)) / (side - 1) - 0.5) ** 2
    return np.where(x.sum(axis=0) < radius**2, level, 0.0) + np.where(x.sum(axis=0) < 0.25**2, level / 2, 0.0)


# ---- the law


@pytest.mark.parametrize("coils", COILS)
def test_the_density_is_that_of_the_root_of_a_noncentral_chi_squared_variable(coils):
    z = np.linspace(0.05, 40, 200)
    for a in (0.0, 0.3, 3.0, 20.0):
        law = ncx2(2 * coils, a**2).logpdf(z**2) + np.log(2 * z)
        near = np.isfinite(law) & (law > -200)  # scipy's own series is lost far out
        np.testing.assert_allclose(magnitudes.log_density(z, np.array(a), coils)[near], law[near], rtol=1e-7, atol=1e-9)


def test_the_mean_is_laguerres_and_that_of_scipy():
    a = np.linspace(0, 12, 40)
    x = a**2 / 4  # L_1/2(-2x) = e^-x ((1 + 2x) I0(x) + 2x I1(x))
    np.testing.assert_allclose(
        magnitudes.mean_magnitude(a, 1.0), math.sqrt(math.pi / 2) * ((1 + 2 * x) * i0e(x) + 2 * x * i1e(x)), rtol=1e-12
    )
    np.testing.assert_allclose(Rician(3.0).mean(3 * a), rice.mean(a) * 3, rtol=1e-10)
    np.testing.assert_allclose(
        magnitudes.mean_magnitude(a, 1.0), math.sqrt(math.pi / 2) * eval_genlaguerre(0.5, 0, -2 * x)
    )
    np.testing.assert_allclose(
        magnitudes.mean_magnitude(np.zeros(1), 4.0), math.sqrt(2) * math.gamma(4.5) / math.gamma(4)
    )


@pytest.mark.parametrize("coils", [1.0, 4.0])
def test_samples_are_magnitudes_of_complex_noise(coils):
    """The definition, written out, beside what `sample` draws."""
    rng, sigma, level = np.random.default_rng(1), 2.0, 3.0
    parts = rng.normal(0, sigma, (int(coils), 2, 200_000))
    parts[:, 0] += level / math.sqrt(coils)  # the root of the sum of squares over the coils is the level
    plain = np.sqrt((parts**2).sum(axis=(0, 1)))
    ours = flat(level, sigma, 450, coils)
    share = np.linspace(0.02, 0.98, 25)
    np.testing.assert_allclose(np.quantile(ours, share), np.quantile(plain, share), atol=0.05)  # 2.5 % of sigma
    assert ours.mean() == pytest.approx(float(NoncentralChi(sigma, coils).mean(np.array([level]))[0]), abs=0.02)


# ---- the transform and its inverse


def test_a_number_and_the_ends_of_the_range_of_sigma():
    noise = Rician(2.0)
    assert noise.unstabilize(noise.stabilize(7.0)) == noise.unstabilize(noise.stabilize([7.0]))[0]
    assert noise.unstabilize(0.1) == 0
    assert (Rician(1e150).sigma, Rician(1e-150).sigma) == (1e150, 1e-150)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("coils", "least", "most"), [(1.0, 0.957, 1.032), (2.0, 0.975, 1.019), (8.0, 0.991, 1.008), (64.0, 0.998, 1.002)]
)
@pytest.mark.sampled(2)
def test_the_spread_is_near_one_from_nothing_on(coils, least, most):
    spread = magnitudes.stabilizer(coils).spread(np.concatenate([np.linspace(0, 16, 81), [30.0, 100.0, 1e4]]))
    assert least < spread.min() < spread.max() < most
    # The first choice, with the slopes 1 / std(z | mean z) at infinity, stays far off.
    z = flat(0.0, coils=coils)
    assert z.std() < (0.72 if coils > 1 else 0.66)
    stable = NoncentralChi(1.0, coils).stabilize(z)
    assert stable.std() == pytest.approx(float(magnitudes.stabilizer(coils).spread(0.0)[0]), rel=0.01)


@pytest.mark.parametrize("coils", COILS)
def test_the_transform_grows(coils):
    law = magnitudes.stabilizer(coils)
    end = float(law.inner.x[-1])
    z = np.concatenate([np.linspace(0, end + 3, 20_001), [1e3, 1e10, 1e200]])
    assert (np.diff(law(z)) > 0).all()
    # One function across the joint, with a slope that has no step.
    below, at, above = law(np.array([end - 1e-4, end, end + 1e-4]))
    assert above - at == pytest.approx(at - below, rel=1e-3)
    assert law(np.array([1e8]))[0] == pytest.approx(1e8)


@pytest.mark.slow
@pytest.mark.parametrize("coils", [1.0, 8.0])
def test_means_are_integrals_over_the_density(coils):
    law = magnitudes.stabilizer(coils)
    for a in (0.0, 5.0):
        middle = math.sqrt(a**2 + 2 * coils)
        ends = (max(middle - 12, 0), middle + 12)
        knots = law.inner.x[(law.inner.x > ends[0]) & (law.inner.x < ends[1])]
        mean, _ = quad(lambda z, a=a: float(law(np.array([z]))[0]
                                            * np.exp(magnitudes.log_density(np.array([z]), np.array(a), coils))[0]),
                       *ends, points=knots, limit=400, epsabs=1e-10)  # fmt: skip
        assert law.mean(a)[0] == pytest.approx(mean, abs=1e-8)


@pytest.mark.parametrize("coils", COILS)
def test_the_inverse_is_exact_monotone_and_finite_everywhere(coils):
    law = magnitudes.stabilizer(coils)
    back = law.inverse(law.mean(PLACES))
    np.testing.assert_allclose(back[1:], PLACES[1:], atol=2e-6)
    assert back[0] ** 2 < 1e-6
    first, last = float(law.way.x[0]), float(law.way.x[-1])
    means = np.concatenate([[-1e300, -1.0, first], np.linspace(first, last + 2, 4001), [last + 50, 1e7, 1e300]])
    found = law.inverse(means)
    assert np.isfinite(found).all()
    assert (np.diff(found) >= 0).all()
    assert (found[:3] == 0).all()
    assert found[-1] == 1e300
    # Where the table ends and the series begins there is no step.
    low, high = law.inverse(np.array([last, np.nextafter(last, np.inf)]))
    assert high == pytest.approx(low, abs=1e-6)


def test_means_over_draws_come_back_without_bias():
    noise = Rician(2.0)
    for level in (2.0, 4.0, 10.0, 40.0):
        stable = noise.stabilize(flat(level, 2.0, 500))
        # The mean of so many has a standard error of 2 / 500; near 0 the law tells less of the level.
        assert noise.unstabilize(np.array([stable.mean()]))[0] == pytest.approx(
            level, abs=4 * 2 / 500 * (1 + 4 / level)
        )
    stable = noise.stabilize(flat(0.0, 2.0, 500))
    assert noise.unstabilize(np.array([stable.mean()]))[0] < 0.5


def test_a_flat_picture_is_unbiased_after_the_whole_pipeline():
    """White noise of that strength leaves the bias of the magnitudes in; at 1 sigma it is half of sigma."""
    for level, bias in ((1.0, 0.15), (2.0, 0.08), (4.0, 0.04), (10.0, 0.04)):
        z = flat(level, side=64).astype(np.float32)
        u = denoise(z, noise=Rician(1.0), quality="pixels")
        assert u.dtype == np.float32
        assert u.mean() == pytest.approx(level, abs=bias)
    assert denoise(flat(0.0, side=64), noise=Rician(1.0), quality="pixels").mean() < 0.4
    assert denoise(flat(0.0, side=64), 1.0, quality="pixels").mean() > 1.2


def test_one_coil_is_rician_and_units_do_not_matter():
    z = flat(3.0, side=40)
    one, other = Rician(1.0).reduce(z[..., None]), NoncentralChi(1.0).reduce(z[..., None])
    np.testing.assert_array_equal(one.samples, other.samples)
    for unit in (1e-12, 1e9):
        scaled = Rician(unit).reduce(unit * z[..., None])
        np.testing.assert_allclose(scaled.samples, unit * one.samples, rtol=1e-9, atol=1e-9 * unit)
        np.testing.assert_allclose(
            scaled.back(scaled.samples), unit * one.back(one.samples), rtol=1e-6, atol=1e-6 * unit
        )
        assert scaled.rest.sigma == unit


def test_missing_samples_do_not_matter():
    z = flat(3.0, side=40)[..., None]
    gone = np.zeros((40, 40), bool)
    gone[:10] = True
    first, second = (Rician(1.0).reduce(np.where(gone[..., None], v, z), gone) for v in (-5.0, 1e30))
    np.testing.assert_array_equal(first.samples, second.samples)
    assert first.missing is gone


# ---- the strength


@pytest.mark.slow
@pytest.mark.parametrize("coils", [1.0, 4.0])
@pytest.mark.parametrize("sigma", [3.0, 10.0, 20.0])
@pytest.mark.sampled(2)
def test_the_strength_is_found_with_a_background_and_without(sigma, coils):
    noise, clean = NoncentralChi(sigma, coils), ball()
    z = noise.sample(clean, rng=0)
    open_noise = NoncentralChi(None, coils)
    assert open_noise.completed(z[..., None]).sigma == pytest.approx(sigma, rel=0.03)
    assert open_noise.completed(np.where(clean == 0, 0, z)[..., None]).sigma == pytest.approx(sigma, rel=0.05)
    gone = np.indices(clean.shape)[0] > 24
    hidden = np.where(gone, -1e9, z)[..., None]
    assert open_noise.completed(hidden, gone).sigma == pytest.approx(sigma, rel=0.05)


def test_the_strength_of_pictures_is_found():
    z = Rician(12.0).sample(ball(64)[:, :, 32], rng=0)
    result, info = denoise(z, noise="rician", quality="pixels", return_info=True)
    assert info.sigma == pytest.approx(12, rel=0.06)
    assert "Rician" in info.noise
    np.testing.assert_allclose(result, denoise(z, info.sigma, noise="rician", quality="pixels"), rtol=1e-6)
    np.testing.assert_allclose(result, denoise(z, noise=Rician(info.sigma), quality="pixels"), rtol=1e-6)


@pytest.mark.slow
def test_volumes_with_a_background_are_known_by_it():
    clean, rng = ball(), np.random.default_rng(0)
    white = rng.standard_normal(clean.shape)
    z = Rician(8.0).sample(clean, rng=0)[..., None]
    assert find_rician(z).sigma == pytest.approx(8, rel=0.03)
    assert isinstance(examine(z).model, Rician)
    # Of the same ratio of mean and spread, without the law.
    even = clean + 10 * (1 + 1.811 * (rng.random(clean.shape) - 0.5))
    others = (
        clean, even, clean + 8 * white, np.abs(8 * white + clean), 19 + 10 * white + clean,
        rng.poisson(clean / 8 + 3.66), NoncentralChi(8.0, 4).sample(clean, rng=0), np.zeros((9, 9, 9)), clean * 1e-300,
    )  # fmt: skip
    for other in others:
        assert find_rician(np.asarray(other, float)[..., None]) is None


@pytest.mark.parametrize(("coils", "seed"), [(4.0, 4), (8.0, 4)])
def test_magnitudes_of_several_coils_behind_sharp_edges_are_no_counts(coils, seed):
    """Variances at edges lift the line of counts, which is far above those of bright parts then."""
    found = examine(NoncentralChi(4.0, coils).sample(ellipsoids(seed), rng=seed)[..., None])
    assert isinstance(found.model, NoncentralChi)
    assert found.model.sigma == pytest.approx(4, rel=0.05)


# ---- the interface


def test_models_come_back_from_files(tmp_path):
    for noise in (Rician(2.5), Rician(), NoncentralChi(0.1, 3.5), Mixture([Impulses(0.1, 0, 1), Rician(1.0)])):
        noise.save(tmp_path / "noise.json")
        assert load_noise(tmp_path / "noise.json").as_dict() == noise.as_dict()
    (tmp_path / "noise.json").write_text('{"kind": "rician", "sigma": -1}')
    with pytest.raises(FileFormatError, match="sigma: got -1"):
        load_noise(tmp_path / "noise.json")


def test_they_say_what_they_are():
    assert Rician(2.0).describe() == "Rician noise: sigma 2"
    assert NoncentralChi(2.0, 8).describe() == "noise of magnitudes of 8 coils: sigma 2"
    assert "to be found" in Rician().describe()
    assert "to be found" in NoncentralChi(None, 1).describe()
    assert Rician(2.0).scaled(1.5) == Rician(3.0)
    assert NoncentralChi(2.0, 4).scaled(0.5) == NoncentralChi(1.0, 4.0)
    assert Poisson().completed(np.ones((3, 1))) == Poisson()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Rician(0.0), "sigma: got 0"),
        (lambda: Rician(1e200), "sigma: got 1e"),
        (lambda: NoncentralChi(1.0, 0.5), "coils: got 0.5"),
        (lambda: NoncentralChi(1.0, 300), "coils: got 300, expected at most 256"),
        (lambda: Rician().sample(np.ones(4)), "sigma: got None"),
        (lambda: Rician().scaled(2.0), "sigma: got None"),
        (lambda: Rician(1.0).sample(-np.ones(4)), "clean: got 4 negative"),
        (lambda: Rician(1.0).reduce(-np.ones((4, 1))), "image: got 4 negative"),
        (lambda: Rician(1.0).stabilize(np.array([np.nan])), "image: "),
        (lambda: Rician(1.0).unstabilize(np.array([np.inf])), "stable: "),
        (lambda: Rician().completed(np.ones((30, 30, 1))), "no noise is seen"),
        (lambda: Rician().completed(-np.ones((30, 30, 1))), "image: got 900 negative"),
        (lambda: denoise(np.ones((20, 20)), np.ones((20, 20)), noise="rician"), "sigma: "),
    ],
)
def test_what_is_no_magnitude_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


# ---- noise that differs from place to place


def levels(side=200):
    rows, columns = (np.linspace(-1, 1, side) for _ in range(2))
    return 10 + 20 * np.exp(-2 * (rows[:, None] ** 2 + columns**2))


def test_a_map_of_the_noise_is_found_beside_an_intensity_that_does_not_tell_it():
    rng, level = np.random.default_rng(0), levels()
    clean = 100 + 60 * np.sin(np.arange(200) / 25) * np.ones((200, 1))
    found = find_places((clean + level * rng.normal(size=clean.shape))[..., None])
    np.testing.assert_allclose(found.along(clean[..., None])[..., 0], level, rtol=0.2)
    assert "from place to place" in found.describe()
    for other in (clean, clean + 15 * rng.normal(size=clean.shape), rng.poisson(clean).astype(float),
                  clean + level * ndi.gaussian_filter(rng.normal(size=clean.shape), 1)):  # fmt: skip
        assert find_places(other[..., None]) is None


@pytest.mark.parametrize(("side", "told"), [(100, False), (104, True)])
def test_maps_are_told_from_as_many_samples_on_as_the_page_says(side, told):
    level = np.linspace(4, 20, side)
    picture = 100 + level * np.random.default_rng(0).normal(size=(side, side))
    assert (find_places(picture[..., None]) is not None) == told
    page = Path(__file__).parents[2] / "docs" / "noise.md"
    assert "from place to place (from 104 samples a side on)" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_stripped_background_stays_as_it_is_under_a_map():
    rng, level = np.random.default_rng(1), levels()
    inside = np.hypot(*np.mgrid[-1:1:200j, -1:1:200j]) < 0.8
    clean = np.where(inside, 40.0, 0.0)
    noisy = np.where(inside, np.rint(clean + level * rng.normal(size=clean.shape)), 0.0)
    verdict = estimate_noise(noisy)
    assert verdict.confidence == "high"
    assert verdict.model.is_mapped
    result = denoise(noisy, quality="fast")
    assert np.abs(result[~ndi.binary_dilation(inside, iterations=3)]).max() == 0
    assert (result - clean)[inside].std() < 0.6 * (noisy - clean)[inside].std()


def test_maps_fit_the_axes_and_are_sampled():
    noise = GaussianNoise(2.0, places=[[1.0, 3.0]])
    z = noise.sample(np.zeros((200, 200)), rng=0)
    assert z[:, :50].std() == pytest.approx(2, rel=0.05)
    assert z[:, 150:].std() == pytest.approx(6, rel=0.05)
    assert noise.nearest_white(1, 2) == noise
    with pytest.raises(InputError, match=r"^noise: got places along 2 axes, and samples along 1"):
        noise.sample(np.zeros(50))
    with pytest.raises(InputError, match=r"^places: got 0"):
        GaussianNoise(2.0, places=[[0.0, 1.0]])
