"""Stein's estimate of the risk and the discrepancy, against closed forms and against the truth."""

import math

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from nlflow import InputError
from nlflow.denoising.noise import discrepancy, perturbation, sure
from nlflow.errors import NumericalError

pytestmark = pytest.mark.numerical

SIGMA = 0.3


def clean(side=96):
    y, x = np.mgrid[:side, :side] / side
    return np.sin(6 * x) + (y > 0.5)


def noisy(seed=0, side=96, sigma=SIGMA):
    return clean(side) + np.random.default_rng(seed).normal(0, 1, (side, side)) * sigma


def risk(f, y, sigma=SIGMA, epsilon=0.1 * SIGMA, seed=1):
    b = perturbation(y.shape, rng=seed, dtype=y.dtype)
    return sure(y, f(y), f(y + y.dtype.type(epsilon) * b), b, epsilon, sigma)


def soft(y, threshold=0.4):
    return np.sign(y) * np.maximum(np.abs(y) - threshold, 0)


# ---- the probe


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_probe_is_random_signs(dtype):
    b = perturbation((200, 300), rng=3, dtype=dtype)
    assert b.dtype == dtype
    assert set(np.unique(b)) == {-1, 1}
    assert abs(float(b.mean())) < 0.02
    assert abs(float(np.mean(b[1:] * b[:-1]))) < 0.02
    np.testing.assert_array_equal(b, perturbation((200, 300), rng=3, dtype=dtype))
    assert (b != perturbation((200, 300), rng=4, dtype=dtype)).any()
    with pytest.raises(InputError, match="dtype: got uint8, expected float32 or float64"):
        perturbation((3,), dtype=np.uint8)
    with pytest.raises(InputError, match="dtype: got single32, expected float32 or float64"):
        perturbation((3,), dtype="single32")


# ---- closed forms


@pytest.mark.parametrize("gain", [0.0, 0.4, 1.0])
def test_a_multiple_of_the_input(gain):
    y = noisy()
    expected = (1 - gain) ** 2 * np.mean(y**2) + SIGMA**2 * (2 * gain - 1)
    assert risk(lambda v: gain * v, y) == pytest.approx(expected, rel=1e-9)


def test_the_identity_has_the_noise_as_its_risk():
    assert risk(lambda v: v, noisy()) == pytest.approx(SIGMA**2, rel=1e-9)


def test_a_linear_filter_with_a_known_trace():
    # In the mean over all 2^8 probes the products of different signs cancel: the divergence is exactly the trace.
    rng = np.random.default_rng(5)
    matrix, y = rng.normal(0, 1, (8, 8)), rng.normal(0, 1, 8)
    probes = 2.0 * ((np.arange(256)[:, None] >> np.arange(8)) & 1) - 1
    values = [sure(y, matrix @ y, matrix @ (y + 0.1 * b), b, 0.1, SIGMA) for b in probes]
    expected = np.mean((matrix @ y - y) ** 2) + SIGMA**2 * (2 * np.trace(matrix) / 8 - 1)
    assert np.mean(values) == pytest.approx(expected, rel=1e-9)


def test_a_map_of_sigma_weighs_the_derivative_of_each_sample():
    y = noisy(side=40)
    sigma = 0.1 + np.random.default_rng(2).random(y.shape)
    slope = np.random.default_rng(3).random(y.shape)
    expected = np.mean((slope * y - y) ** 2 + sigma**2 * (2 * slope - 1))
    assert risk(lambda v: slope * v, y, sigma=sigma) == pytest.approx(expected, rel=1e-9)
    assert risk(lambda v: slope * v, y, sigma=sigma[:1]) == pytest.approx(
        np.mean((slope * y - y) ** 2 + sigma[:1] ** 2 * (2 * slope - 1)), rel=1e-9
    )


# ---- the truth


@pytest.mark.parametrize("f", [lambda v: gaussian_filter(v, 1.0), lambda v: gaussian_filter(v, 3.0), soft])
def test_the_mean_over_noise_is_the_true_error(f):
    x = clean()
    errors = []
    for seed in range(30):
        y = noisy(seed)
        errors.append(risk(f, y, epsilon=1e-3, seed=100 + seed) - np.mean((f(y) - x) ** 2))
    assert abs(np.mean(errors)) < 4 * np.std(errors) / math.sqrt(len(errors))
    assert np.std(errors) < 0.1 * SIGMA**2


def test_the_best_filter_is_found():
    widths = np.linspace(0.4, 4, 10)
    y = noisy(side=160)
    truth = [np.mean((gaussian_filter(y, w) - clean(160)) ** 2) for w in widths]
    stein = [risk(lambda v, w=w: gaussian_filter(v, w), y) for w in widths]
    assert abs(int(np.argmin(truth)) - int(np.argmin(stein))) <= 1
    np.testing.assert_allclose(stein, truth, atol=0.08 * SIGMA**2)


def test_noise_of_varying_strength():
    x, rng = clean(), np.random.default_rng(7)
    sigma = 0.1 + 0.5 * rng.random(x.shape)
    f = soft
    errors = []
    for seed in range(30):
        y = noisy(seed, sigma=sigma)
        errors.append(risk(f, y, sigma=sigma, epsilon=1e-3, seed=seed) - np.mean((f(y) - x) ** 2))
    assert abs(np.mean(errors)) < 4 * np.std(errors) / math.sqrt(len(errors))


def test_scale_squared_and_single_precision():
    y = noisy()
    f = lambda v: gaussian_filter(v, 1.5)  # noqa: E731
    expected = risk(f, y)
    assert risk(f, 255 * y + 1000, 255 * SIGMA, 25.5 * SIGMA) == pytest.approx(255**2 * expected, rel=1e-6)
    assert risk(f, y.astype(np.float32)) == pytest.approx(expected, rel=1e-3)


def test_sums_are_not_lost_in_single_precision():
    y = np.full(2**22, 1.0, np.float32)
    y[::2] = -1
    assert discrepancy(y, np.zeros_like(y), 0.1) == pytest.approx(10, rel=1e-12)


# ---- discrepancy


def test_the_discrepancy_knows_residuals_whose_squares_are_out_of_range():
    assert discrepancy(np.full(4, 1e200), np.zeros(4), 2.0) == 5e199


def test_the_discrepancy_of_the_truth_is_1():
    assert discrepancy(noisy(), clean(), SIGMA) == pytest.approx(1, abs=0.02)
    sigma = 0.1 + np.random.default_rng(2).random((96, 96))
    assert discrepancy(noisy(sigma=sigma), clean(), sigma) == pytest.approx(1, abs=0.02)


def test_the_discrepancy_is_the_root_mean_square():
    y, u = np.array([[3.0, 0.0], [0.0, 4.0]]), np.zeros((2, 2))
    assert discrepancy(y, u, 2.0) == pytest.approx(math.sqrt(25 / 4) / 2)
    assert discrepancy(y, u, np.array([1.0, 2.0])) == pytest.approx(math.sqrt((9 + 4) / 4))
    assert discrepancy(y, y, 1) == 0


# ---- what is refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"estimate": np.zeros(3)}, r"estimate: got shape \(3,\), expected that of noisy, \(4,\)"),
        ({"perturbed_estimate": np.zeros((4, 1))}, "perturbed_estimate: got shape"),
        ({"perturbation": np.zeros(5)}, "perturbation: got shape"),
        ({"noisy": np.array([1, 2, math.nan, 0])}, "noisy: got 1 NaN"),
        ({"epsilon": 0}, "epsilon: got 0, .*> 0; a tenth of sigma"),
        ({"epsilon": math.inf}, "epsilon: got inf"),
        ({"sigma": -1}, "sigma: got -1, expected numbers >= 0"),
        ({"sigma": np.ones(3)}, r"sigma: got shape \(3,\), expected one that is broadcast to \(4,\)"),
        ({"sigma": np.ones((2, 4))}, r"sigma: got shape \(2, 4\)"),
    ],
)
def test_unusable_input_of_the_risk_is_refused(changed, message):
    given = {name: np.zeros(4) for name in ("noisy", "estimate", "perturbed_estimate")}
    given |= {"perturbation": np.ones(4), "epsilon": 0.1, "sigma": 1.0}
    with pytest.raises(InputError, match=message):
        sure(**{**given, **changed})


@pytest.mark.parametrize("shape", [(-3, 4), (3, 1.5), "34", None, (2, None), [[3]], (1,) * 70, (2**40, 2**40), {3: 4}])
def test_signs_of_what_is_no_shape_are_refused_by_name(shape):
    with pytest.raises(InputError, match=r"^shape: got "):
        perturbation(shape)


def test_unusable_input_of_the_discrepancy_is_refused():
    with pytest.raises(InputError, match="sigma: got 0, expected numbers > 0"):
        discrepancy(np.zeros(3), np.zeros(3), 0)
    with pytest.raises(InputError, match="estimate: got shape"):
        discrepancy(np.zeros(3), np.zeros(4), 1)


def test_what_overflows_is_no_risk():
    far, signs = np.full(4, 1e200), np.ones(4)
    with pytest.raises(NumericalError, match="the risk overflows floats; divide samples, estimates and sigma by one"):
        sure(far, -far, -far, signs, 0.1, 1.0)
    with pytest.raises(NumericalError, match="the discrepancy overflows floats"):
        discrepancy(np.full(4, 1e300), np.zeros(4), 1e-300)
    assert discrepancy(far, -far, 1.0) == pytest.approx(2e200)  # whose square alone overflows
