"""Counts: the transform, its exact unbiased inverse, and what is refused."""

import math

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter
from scipy.special import gamma, pbdv
from scipy.stats import poisson
from skimage import data

import nlflow
from nlflow import InputError, Poisson
from nlflow.denoising.noise import Impulses
from nlflow.denoising.noise.finding import counts as counts_of
from nlflow.denoising.noise.finding.counts import common_step, find_counts, find_whole_counts
from nlflow.denoising.noise.models.intensities import expected_transform

pytestmark = pytest.mark.numerical

SPREADS = [0.0, 1e-3, 0.3, 1.0, 4.0, 15.0, 40.0]  # of the Gaussian part, in counts
LEVELS = np.array([0.0, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 100, 290, 299, 301, 320, 1000, 3000, 10_000])


def counts(x, noise, size, seed=0):
    rng = np.random.default_rng(seed)
    return noise.gain * rng.poisson(x, size) + rng.normal(noise.offset, noise.sigma, size)


# ---- E[D(z)]


@pytest.mark.parametrize("x", [0.0, 0.1, 1.0, 7.0, 80.0])
def test_the_expected_transform_is_a_plain_sum_over_counts(x):
    expected = sum(poisson.pmf(k, x) * 2 * math.sqrt(k + 0.375) for k in range(250))
    assert expected_transform(np.array([x]), 0.0)[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("spread", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("x", [0.0, 0.4, 6.0])
@pytest.mark.sampled(2)
def test_the_expected_transform_is_a_plain_double_sum(x, spread):
    # The integrand has a kink where the root is cut off: the plain sum needs many terms.
    xi = np.linspace(-9, 9, 400_001)
    normal = np.exp(-(xi**2) / 2) / math.sqrt(2 * math.pi) * (xi[1] - xi[0])
    expected = 0.0
    for k in range(60):
        root = 2 * np.sqrt(np.maximum(k + spread * xi + 0.375 + spread**2, 0))
        expected += poisson.pmf(k, x) * float(np.sum(normal * root))
    assert expected_transform(np.array([x]), spread)[0] == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("spread", [0.4, 1.0, 3.0])
def test_without_counts_the_expectation_is_a_parabolic_cylinder_function(spread):
    b = (0.375 + spread**2) / spread
    moment = gamma(1.5) / math.sqrt(2 * math.pi) * math.exp(-(b**2) / 4) * pbdv(-1.5, -b)[0]
    assert expected_transform(np.array([0.0]), spread)[0] == pytest.approx(2 * math.sqrt(spread) * moment, rel=1e-9)


@pytest.mark.parametrize("noise", [Poisson(), Poisson(2.0, 3.0, 10.0), Poisson(0.5, 0.1, -1.0)])
@pytest.mark.parametrize("x", [0.2, 2.0, 25.0, 500.0])
def test_the_expected_transform_is_the_mean_of_many_draws(noise, x):
    stable = noise.stabilize(counts(x, noise, 400_000))
    error = np.std(stable) / math.sqrt(stable.size)
    spread = noise.sigma / noise.gain
    assert expected_transform(np.array([x]), spread)[0] == pytest.approx(np.mean(stable), abs=5 * error)


# ---- the transform


def test_the_transform_is_the_formula():
    noise = Poisson(gain=2.0, sigma=3.0, offset=10.0)
    z = np.array([-50.0, 4.0, 10.0, 30.0])
    argument = (z - 10) / 2 + 3 / 8 + (3 / 2) ** 2
    np.testing.assert_allclose(noise.stabilize(z), 2 * np.sqrt(np.maximum(argument, 0)), rtol=1e-14)
    np.testing.assert_allclose(Poisson().stabilize([0, 1, 4]), 2 * np.sqrt(np.array([0, 1, 4]) + 0.375), rtol=1e-14)


@pytest.mark.parametrize("noise", [Poisson(), Poisson(2.0, 3.0, 10.0), Poisson(0.01, 0.1, 0.5), Poisson(1e6, 0, 0)])
@pytest.mark.parametrize("x", [5.0, 40.0, 3000.0])
def test_the_noise_has_strength_1(noise, x):
    assert np.std(noise.stabilize(counts(x, noise, 200_000))) == pytest.approx(1, abs=0.05 if x < 10 else 0.01)


def test_the_variance_is_that_of_the_draws():
    noise = Poisson(gain=2.0, sigma=3.0, offset=10.0)
    for x in (0.0, 4.0, 100.0):
        drawn = counts(x, noise, 300_000)
        assert noise.variance(np.array([2 * x + 10]))[0] == pytest.approx(np.var(drawn), rel=0.02)
    np.testing.assert_allclose(noise.variance([10.0, 14.0, 0.0]), [9, 17, 9])


# ---- the inverse


@pytest.mark.parametrize("spread", SPREADS)
def test_the_inverse_of_the_expectation_is_the_count(spread):
    noise = Poisson(gain=3.0, sigma=3.0 * spread, offset=-7.0)
    back = noise.unstabilize(expected_transform(LEVELS, spread))
    np.testing.assert_allclose((back + 7) / 3, LEVELS, rtol=1e-7, atol=1e-5)


@pytest.mark.parametrize("noise", [Poisson(), Poisson(2.0, 3.0, 10.0)])
@pytest.mark.parametrize("x", [0.1, 0.5, 1.0, 3.0, 10.0, 100.0, 1000.0, 10_000.0])
@pytest.mark.sampled(4)
def test_the_mean_comes_back_unbiased(noise, x):
    z = counts(x, noise, 1_000_000)
    back = noise.unstabilize(np.mean(noise.stabilize(z), keepdims=True))[0]
    error = math.sqrt(noise.variance(np.array([noise.gain * x + noise.offset]))[0] / z.size)
    assert back == pytest.approx(noise.gain * x + noise.offset, abs=6 * error)


@pytest.mark.parametrize("sigma", [1e4, 1e9])
def test_read_noise_far_beyond_the_counts(sigma):
    noise = Poisson(sigma=sigma)
    z = counts(5 * sigma, noise, 10_000)
    back = noise.unstabilize(np.mean(noise.stabilize(z), keepdims=True))[0]
    assert back == pytest.approx(5 * sigma, abs=6 * sigma / 100)


def test_the_simple_inverse_would_be_biased():
    stable = Poisson().stabilize(counts(1.0, Poisson(), 100_000))
    simple = (np.mean(stable) / 2) ** 2 - 0.375
    assert abs(simple - 1) > 10 * abs(Poisson().unstabilize(np.mean(stable, keepdims=True))[0] - 1)


@pytest.mark.parametrize("spread", SPREADS)
def test_the_inverse_is_monotone_and_never_below_no_count(spread):
    noise = Poisson(gain=2.0, sigma=2.0 * spread, offset=5.0)
    d = np.linspace(-3, 200, 40_001)
    back = noise.unstabilize(d)
    assert (np.diff(back) >= 0).all()
    least = expected_transform(np.array([0.0]), spread)[0]
    np.testing.assert_allclose(back[d <= least], 5.0, atol=1e-4)  # the value of the input without any count
    assert (np.diff(back)[d[:-1] > least + 0.01] > 0).all()
    assert Poisson(sigma=spread).unstabilize(d).min() >= 0  # so that it can be put through the transform again
    assert back[-1] == pytest.approx(2 * (200**2 / 4 - 1 / 8 - spread**2) + 5, rel=1e-4)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_units_do_not_matter(scale):
    z = counts(6.0, Poisson(1.0, 2.0, 3.0), 500)
    one, other = Poisson(1.0, 2.0, 3.0), Poisson(scale, 2 * scale, 3 * scale)
    np.testing.assert_allclose(other.stabilize(scale * z), one.stabilize(z), rtol=1e-12)
    d = np.linspace(0, 50, 101)
    np.testing.assert_allclose(other.unstabilize(d), scale * one.unstabilize(d), rtol=1e-12)


@pytest.mark.parametrize(
    ("given", "kept"), [(np.float32, np.float32), (np.float64, np.float64), (np.int32, np.float64)]
)
@pytest.mark.parametrize("shape", [(7,), (4, 5), (3, 4, 2)])
def test_types_and_shapes(given, kept, shape):
    noise = Poisson(2.0, 1.0)
    z = np.random.default_rng(0).poisson(9.0, shape).astype(given)
    for function in (noise.stabilize, noise.unstabilize, noise.variance):
        result = function(z)
        assert result.dtype == kept
        assert result.shape == shape
        np.testing.assert_allclose(result, function(z.astype(np.float64)), rtol=1e-6)


def test_arrays_are_not_changed():
    z = np.arange(5.0)
    for function in (Poisson().stabilize, Poisson().unstabilize, Poisson().variance):
        function(z)
    np.testing.assert_array_equal(z, np.arange(5.0))


# ---- what is refused


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"gain": 0}, "gain: got 0, .*> 0; units of the input for each count"),
        ({"gain": -1}, "gain: got -1"),
        ({"gain": math.inf}, "gain: got inf"),
        ({"gain": "2"}, "gain: got '2'"),
        ({"sigma": -0.1}, r"sigma: got -0\.1, .*>= 0"),
        ({"sigma": math.nan}, "sigma: got nan"),
        ({"offset": math.inf}, "offset: got inf"),
        ({"offset": None}, "offset: got None"),
    ],
)
def test_unusable_parameters_are_refused(keywords, message):
    with pytest.raises(InputError, match=message):
        Poisson(**keywords)


def test_negative_counts_are_refused_with_their_number_unless_there_is_read_noise():
    z = np.array([3.0, -1.0, 0.0, -2.5])
    message = r"image: got 2 value\(s\) below offset=0, the smallest -2\.5, .*read noise .*Poisson\(gain=..., sigma="
    with pytest.raises(InputError, match=message):
        Poisson().stabilize(z)
    with pytest.raises(InputError, match=r"below offset=100, the smallest 99"):
        Poisson(offset=100).stabilize([100, 99])
    assert Poisson(sigma=1.0).stabilize(z).min() >= 0
    assert Poisson(offset=-2.5).stabilize(z).min() == pytest.approx(2 * math.sqrt(0.375))


def test_the_offset_in_single_precision_is_the_offset():
    for offset in (0.7, -0.1, 1e5 + 0.1, 1e5 + 0.2):
        stable = Poisson(offset=offset).stabilize(np.full(3, offset, np.float32))
        assert stable == pytest.approx(2 * math.sqrt(0.375), abs=0.01)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(bad):
    for name, function in (("image", Poisson().stabilize), ("stable", Poisson().unstabilize)):
        with pytest.raises(InputError, match=rf"{name}: got 1 NaN or infinite value"):
            function([1.0, bad])


def test_counts_beyond_all_numbers_are_refused():
    with pytest.raises(InputError, match=r"image: got values of more than 1e308 counts for gain=1e-300"):
        Poisson(gain=1e-300).stabilize([1e10])


@pytest.mark.parametrize(("noise", "mean"), [(Poisson(1e-20), 1.0), (Poisson(), 1e300), (Poisson(1e-300), 1e300)])
def test_more_counts_than_can_be_drawn_are_refused(noise, mean):
    with pytest.raises(InputError, match=r"^clean: got values of up to .* counts for gain=.*; give a larger gain"):
        noise.sample([mean])


@pytest.mark.parametrize(("shape", "told"), [((64, 64), True), ((4096,), False), ((16, 16, 16), False)])
def test_few_counts_are_told_of_pictures_alone(shape, told):
    z = np.random.default_rng(0).poisson(0.5, (*shape, 1)).astype(float)
    assert Poisson().reduce(z).few == (Poisson() if told else None)
    assert Poisson().reduce(z + 10).few is None


def test_missing_counts_alone_are_no_few_ones():
    found = Poisson().reduce(np.ones((4, 4, 1)), np.ones((4, 4), bool))
    assert found.few is None
    assert found.missing.all()


def test_a_torch_tensor_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match=r"image: got Tensor, expected a NumPy array; convert it"):
        Poisson().stabilize(torch.ones(3))


def test_it_is_a_value():
    assert Poisson(2, 1) == Poisson(2.0, 1.0, 0.0)
    assert hash(Poisson(2)) == hash(Poisson(2.0))
    assert nlflow.Poisson is Poisson
    assert repr(Poisson(2)) == "Poisson(gain=2.0, sigma=0.0, offset=0.0)"


# ---- counts that are found, and few of them

LIGHT = np.clip(1 + np.cos(np.hypot(*np.mgrid[-8:9:128j, -8:9:128j])), 0.05, None)  # of mean about 1
LIGHT /= LIGHT.mean()


@pytest.mark.parametrize("mean", [50.0, 400.0, 1000.0])
@pytest.mark.parametrize("gain", [0.37, 1 / 255, 2.3e-4])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_the_step_of_many_levels_is_that_of_all_of_them(dtype, gain, mean):
    """The least difference of two of them has the rounding of both, which grows with the number of steps."""
    counts = np.random.default_rng(3).poisson(mean * (0.3 + 0.7 * LIGHT / LIGHT.max()))
    z = (gain * counts).astype(dtype)
    assert counts_of._lattice(z[..., None]) == pytest.approx(
        (gain, gain * counts.min()), rel=4 * float(np.finfo(dtype).eps)
    )
    assert common_step(np.unique(z).astype(float)) == pytest.approx(gain, rel=float(np.finfo(dtype).eps))


def test_levels_that_differ_by_rounding_alone_have_no_step():
    levels = [11.603846153846158, 30.89999999999999, 30.899999999999995, 50.0]  # less the first two of them are equal
    assert levels[2] - levels[0] == levels[1] - levels[0]
    z = np.random.default_rng(0).choice(levels, (40, 40))
    assert find_whole_counts(z[..., None]) is None


@pytest.mark.parametrize("mean", [0.05, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize(("gain", "offset"), [(1.0, 0.0), (7.0, 0.0), (0.37, 5.0)])
def test_whole_counts_of_any_mean_are_found(mean, gain, offset):
    z = gain * np.random.default_rng(3).poisson(mean * LIGHT) + offset
    found = find_whole_counts(z[..., None])
    assert (found.gain, found.sigma, found.offset) == pytest.approx((gain, 0, offset))


def test_counts_begin_at_the_least_of_all_samples_not_of_those_that_show_the_step():
    z = 20.0 + np.random.default_rng(4).poisson(np.kron(5 + 5 * LIGHT, np.ones((2, 2))))
    z.flat[1] = z.min() - 2  # the step is looked for at every other sample
    found = find_whole_counts(z[..., None])
    assert found is None or found.offset <= z.min()
    assert np.isfinite(nlflow.denoise(z, quality="fast", preserve_range=True)).all()


def test_a_background_without_light_tells_nothing_of_counts():
    light = 2 * LIGHT
    light[:, :50] = 0
    assert find_whole_counts(np.random.default_rng(0).poisson(light).astype("u1")[..., None]).gain == 1


@pytest.mark.parametrize("seed", [1, 2])
def test_counts_are_found_in_a_flat_sky_and_beside_darkness(seed):
    rng = np.random.default_rng(seed)
    stars = gaussian_filter((rng.random((384, 384)) < 0.001).astype(float), 1.5)
    dim = np.where(LIGHT > 1.5, 0.5, 0.0)
    dim[:60, :60] = 0.004  # next to no count in a level
    for light in (100 + 5000 * stars, 10 + 8000 * stars, dim):
        assert find_whole_counts(rng.poisson(light).astype("f4")[..., None]) == Poisson()


def test_amplified_counts_are_found_with_read_noise_and_offset():
    rng = np.random.default_rng(0)
    electrons = rng.poisson(np.kron(4 * LIGHT, np.ones((2, 2))))
    z = np.rint(rng.gamma(np.maximum(electrons, 1e-9), 15.0) + rng.normal(200, 4, electrons.shape))
    found = find_counts(z[..., None])
    assert found.gain == pytest.approx(30, rel=0.1)  # twice that of the register: its own noise is as strong again
    assert found.sigma < 12
    assert found.offset == pytest.approx(200, abs=5)


@pytest.mark.parametrize("sigma", [0.0, 3.0, 20.0])
def test_pictures_letters_and_white_noise_are_no_counts(sigma):
    for clean in (data.camera()[:200, :200], data.page(), np.rint(80 * LIGHT), data.text()[:, :170]):
        z = np.rint(clean + np.random.default_rng(0).normal(0, sigma, clean.shape))
        assert find_counts(z[..., None]) is None


@pytest.mark.parametrize("value", [(0.0, 255.0), (0.0, 0.0), (255.0, 255.0)])
def test_impulses_are_no_counts(value):
    z = Impulses(0.1, *value).sample(data.camera()[:200, :200], rng=0)
    assert find_counts(z[..., None]) is None


@pytest.mark.parametrize("law", [Poisson(), Poisson(2.0, 1.0, 10.0)])
def test_the_expected_transform_of_means_undoes_the_inverse(law):
    means = law.offset + law.gain * np.concatenate([[0.0], np.geomspace(0.01, 2000, 300)])
    np.testing.assert_allclose(law.unstabilize(law.expected(means)), means, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["u1", "u2", "f4"])
def test_few_counts_are_told_and_met_by_cells(kind):
    clean = 0.4 * LIGHT
    z = np.random.default_rng(1).poisson(clean).astype(kind)
    result, info = nlflow.denoise(z, preserve_range=True, return_info=True)
    assert info.model["kind"] == "poisson"
    blurred = min(np.mean((gaussian_filter(z.astype(float), s) - clean) ** 2) for s in (1, 1.5, 2, 3, 4))
    assert np.mean((result - clean) ** 2) < 1.05 * blurred
    assert result.mean() == pytest.approx(z.mean(), rel=0.03)
    with pytest.raises(InputError, match="cells of samples"):
        nlflow.denoising.problem(z, preserve_range=True)


def test_edges_under_few_counts_are_met_by_cells_that_overlap():
    clean = 0.15 * np.where(LIGHT > 1, 1.8, 0.2)
    z = np.random.default_rng(1).poisson(clean).astype(float)
    result = nlflow.denoise(z, noise="poisson")
    blurred = min(np.mean((gaussian_filter(z, s) - clean) ** 2) for s in (1, 1.5, 2, 3, 4))
    assert np.mean((result - clean) ** 2) < 0.6 * blurred  # 0.63 with cells side by side
    assert result.mean() == pytest.approx(z.mean(), rel=0.03)


def test_few_counts_with_read_noise_keep_their_mean():
    """Single samples are below the dark level half of the time; sums of them are not."""
    noise, clean = Poisson(3.0, 1.5, 2.0), 2.0 + 3 * 0.5 * LIGHT[:96, :96] / LIGHT[:96, :96].mean()
    z = noise.sample(clean, rng=1)
    result = nlflow.denoise(z, noise=noise)
    assert (result - 2.0).mean() == pytest.approx((z - 2.0).mean(), rel=0.1)  # 0.3 with samples cut off at 0


def test_few_counts_are_met_where_samples_are_missing():
    clean = 0.4 * LIGHT
    z = np.random.default_rng(1).poisson(clean).astype(float)
    gone = np.zeros(z.shape, bool)
    gone[40:44, 30:90] = True
    z[gone] = np.nan
    result = nlflow.denoise(z, noise="poisson", mask="nan")
    assert np.abs(result - clean)[gone].mean() < 2 * np.abs(result - clean)[~gone].mean() + 0.05
