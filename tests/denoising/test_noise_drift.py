"""Drift: a baseline that is slower than a scale, sampled and taken out."""

import json
import math

import numpy as np
import pytest
from scipy.integrate import quad

from nlflow.denoising.noise import Drift
from nlflow.errors import InputError
from tests.recordings import demo_signals, heart

T = np.arange(4000)


def removed(values, scale, missing=None):
    return Drift(scale).reduce(values[:, None], missing).samples[:, 0]


# The longest scale goes by means of neighbours. Each scale and each ratio occurs in a case that is not slow.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "ratio"),
    [
        pytest.param(scale, ratio, marks=[] if i == j else pytest.mark.slow)
        for i, scale in enumerate([30, 100, 500])
        for j, ratio in enumerate([0.5, 1, 2])
    ],
)
def test_a_wave_keeps_the_share_of_the_formula(scale, ratio):
    wave = np.sin(2 * np.pi * T / (ratio * scale))
    noise = np.random.default_rng(0).normal(0, 30, (len(T), 40))  # beside which weights are independent of the wave
    with_wave = Drift(scale).reduce(wave[:, None] + noise).samples
    without = Drift(scale).reduce(noise).samples
    middle = slice(1000, 3000)  # whole periods
    left = (with_wave - without).mean(axis=1)[middle] @ wave[middle] / 1000
    # Weights below 1 let the penalty count more: the mean weight is 0.93.
    shares = [1 - weight / (weight + (1 / ratio) ** 4) for weight in (1.0, 0.85)]
    assert shares[0] - 0.02 < left < shares[1] + 0.02


def test_sampled_drift_has_its_strength_and_covariance():
    # 1600 recordings of which each tells of two samples 25 apart.
    drift = Drift(50, 2.0).sample(np.zeros((60, 1600)), rng=0, channel_axis=1)
    variance, lagged = np.mean(drift**2), np.mean(drift[:-25] * drift[25:])
    error = 4 * math.sqrt(2 / 1600)  # four standard deviations of a variance from independent draws
    assert variance == pytest.approx(4, rel=error)
    assert lagged == pytest.approx(4 * math.exp(-2 * 25**2 / 50**2), abs=4 * error)


@pytest.mark.slow
def test_sampled_drift_is_taken_out_but_for_what_is_fast():
    scale, size = 100, 20000
    drift = Drift(scale, 1.0).sample(np.zeros(size), rng=1)
    noise = np.random.default_rng(2).normal(size=(size, 20))  # beside which weights are independent of the drift
    both = Drift(scale / 2).reduce(drift[:, None] + noise).samples - Drift(scale / 2).reduce(noise).samples
    left = both.mean(axis=1)
    # The spectrum of the process times the square of what a wave loses, for equal weights.
    spectrum = lambda f: math.sqrt(2 * math.pi) * scale / 2 * math.exp(-((math.pi * f * scale) ** 2) / 2)  # noqa: E731
    loss = lambda f: 1 - 1 / (1 + (f * scale / 2) ** 4)  # noqa: E731
    expected = 2 * quad(lambda f: spectrum(f) * loss(f) ** 2, 0, 0.1)[0]
    assert 0.5 * expected < np.var(left[500:-500]) < 2 * expected  # 0.004 % of the drift, about as the weights are


def test_a_straight_line_goes_up_to_the_ends_and_the_mean_stays():
    noise = np.random.default_rng(0).normal(0, 0.01, 1000)
    line = 7 + 0.05 * np.arange(1000)
    left = removed(line + noise, 200)
    assert np.abs(left - line.mean() - noise).max() < 0.02  # at the ends too; the line spans 50
    assert left.mean() == pytest.approx((line + noise).mean(), abs=1e-9)
    # A scale far beyond the recording leaves the straight line that fits best.
    for scale in (1e5, 1e12):
        left = removed(line + noise, scale)
        assert np.abs(left - line.mean() - noise).max() < 0.005


@pytest.mark.parametrize("name", ["heart", "Bumps"])
def test_peaks_do_not_pull_the_baseline(name):
    clean = np.tile(heart() if name == "heart" else demo_signals()[name], 4)
    noisy = clean + np.std(clean) * 3 * np.sin(2 * np.pi * np.arange(len(clean)) / 4096)
    error = removed(noisy, 1024) - clean
    assert np.std(error - error.mean()) < 0.2 * np.std(clean)  # of 212 %


def test_missing_samples_do_not_matter_and_gaps_are_crossed():
    clean = np.random.default_rng(0).normal(0, 0.1, 2000)
    drift = np.sin(2 * np.pi * np.arange(2000) / 1500)
    missing = np.zeros(2000, bool)
    missing[700:800] = missing[::7] = True
    noisy = np.where(missing, 1e9, clean + drift)
    found = Drift(300).reduce(noisy[:, None], missing)
    error = (found.samples[:, 0] - clean)[~missing]
    assert np.std(error) < 0.05
    assert np.array_equal(found.missing, missing)
    assert removed(noisy, 300, np.ones(2000, bool)) == pytest.approx(noisy)  # nothing is known


def test_channels_are_apart_and_units_do_not_matter():
    values = np.random.default_rng(0).normal(size=(500, 2)).cumsum(axis=0)
    both = Drift(50).reduce(values).samples
    for c in range(2):
        assert both[:, c] == pytest.approx(removed(values[:, c], 50), abs=1e-12)
    large = Drift(50).reduce(1e200 * values).samples
    assert large == pytest.approx(1e200 * both, rel=1e-9)
    assert Drift(50).reduce(values.astype(np.float32)).samples.dtype == np.float32


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_short_recordings_lose_their_slope_at_most(size):
    left = removed(np.arange(size) * 1.0, 100)
    assert left.mean() == pytest.approx((size - 1) / 2)
    assert np.abs(left - left.mean()).max() <= (size - 1) / 2 + 1e-12


def test_what_is_written_down_can_be_read_back():
    drift = Drift(400, 2.0)
    told = json.loads(json.dumps(drift.as_dict()))
    assert told == {"kind": "drift", "scale": 400.0, "sigma": 2.0}
    assert drift.scaled(1.5) == Drift(400, 3.0)
    assert Drift(400).scaled(1.5) == Drift(400)
    assert drift.describe() == "drift slower than 400 samples, sigma 2"


def test_bad_input_is_refused():
    for scale in (7.9, -1, math.nan, math.inf, "a"):
        with pytest.raises(InputError, match=r"^scale: "):
            Drift(scale)
    with pytest.raises(InputError, match=r"^sigma: "):
        Drift(100, -1)
    with pytest.raises(InputError, match="sigma: got none"):
        Drift(100).sample(np.zeros(10))
    with pytest.raises(InputError, match="drift is a noise of recordings"):
        Drift(100).reduce(np.zeros((8, 8, 1)))
    with pytest.raises(InputError, match="drift is a noise of recordings"):
        Drift(100, 1.0).sample(np.zeros((8, 8)))
