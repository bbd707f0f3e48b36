"""Hum: what it is, how it is taken out, and when it is found."""

import json
import math

import numpy as np
import pytest
import pywt
from scipy.stats import chi2

from nlflow import estimate_noise
from nlflow.denoising.noise import Hum, find_hum
from nlflow.errors import InputError
from tests.recordings import demo_signals, heart

T = np.arange(4096)


def decibels(clean, seen):
    """Signal over error."""
    return 10 * np.log10(np.var(clean) / np.mean((seen - clean) ** 2))


def removed(values, hum):
    return hum.reduce(values[:, None]).samples[:, 0]


# ---- the model


def test_the_sum_is_that_of_cosines():
    hum = Hum([0.1, 0.237], [2.0, 0.5], [0.3, -1.0])
    t = np.arange(50)
    expected = 2 * np.cos(2 * np.pi * 0.1 * t + 0.3) + 0.5 * np.cos(2 * np.pi * 0.237 * t - 1.0)
    assert hum.sample(np.ones(50)) == pytest.approx(1 + expected, abs=1e-12)
    assert hum.scaled(3).sample(np.zeros(50)) == pytest.approx(3 * expected, abs=1e-12)


def test_unknown_phases_are_drawn_and_channels_share_the_hum():
    hum = Hum([0.1], [1.0])
    first = hum.sample(np.zeros((2, 300)), rng=1, channel_axis=0)
    assert first.shape == (2, 300)
    assert np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], hum.sample(np.zeros(300), rng=2))
    assert np.mean(first[0] ** 2) == pytest.approx(0.5)  # whole cycles


def test_a_known_hum_is_subtracted_to_rounding():
    clean = heart()[:, None]
    hum = Hum([0.1, 0.2], [30.0, 10.0], [1.0, 2.0])
    found = hum.reduce(hum.sample(clean, channel_axis=-1))
    assert found.samples == pytest.approx(clean, abs=1e-10)
    assert found.rest is None
    assert found.back(clean) is clean


@pytest.mark.slow
@pytest.mark.parametrize("frequencies", [[0.0613], [1 / 6, 2 / 6], [0.1, 0.2, 0.3001]])
def test_an_unknown_hum_in_white_noise_is_fitted_as_well_as_least_squares_can(frequencies):
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.3, (1024, 40))
    hum = Hum(frequencies, np.full(len(frequencies), 5.0), rng.uniform(-3, 3, len(frequencies)))
    left = Hum(frequencies).reduce(hum.sample(noise, channel_axis=-1)).samples - noise
    # Projections onto 2 m directions for each of 40 recordings; Huber's weights cost 5 % of the efficiency.
    energy = np.sum((left / 0.3) ** 2)
    unknowns = 2 * len(frequencies) * 40
    assert chi2.ppf(1e-4, unknowns) < energy < chi2.ppf(1 - 1e-4, unknowns) / 0.95


@pytest.mark.parametrize("name", ["Blocks", "Bumps", "HeaviSine", "Ramp", "Piece-Regular", "Piece-Polynomial"])
def test_jumps_do_not_pull_the_fit(name):
    clean = demo_signals()[name]
    hum = Hum([0.0613], [np.std(clean)], [0.7])
    noisy = hum.sample(clean)
    plain = np.linalg.lstsq(
        np.stack([np.cos(2 * np.pi * 0.0613 * T[:1024]), np.sin(2 * np.pi * 0.0613 * T[:1024])], 1), noisy, rcond=None
    )[0]
    assert decibels(clean, removed(noisy, Hum([0.0613]))) > 40
    assert abs(complex(plain[0], -plain[1]) / (np.std(clean) * np.exp(0.7j)) - 1) > 0.004  # of least squares alone


def test_missing_samples_do_not_matter():
    clean = demo_signals()["Bumps"]
    noisy = Hum([0.13], [1.0], [2.0]).sample(clean)
    for share in (0.02, 0.3):  # with the second no whole past of 16 samples is left
        missing = np.random.default_rng(3).random(1024) < share
        noisy[missing] = 1e6
        found = Hum([0.13]).reduce(noisy[:, None], missing)
        left = (found.samples[:, 0] - clean)[~missing]
        assert np.std(left) < 0.06
        assert np.array_equal(found.missing, missing)
        known = Hum([0.13]).completed(noisy[:, None], missing)
        assert (*known.amplitudes, *known.phases) == pytest.approx((1, 2), abs=0.1)
        assert np.array_equal(known.reduce(noisy[:, None], missing).samples, found.samples)


def test_channels_have_each_a_hum_that_one_model_does_not_hold():
    assert Hum([0.1]).completed(np.random.default_rng(0).normal(size=(99, 2))) == Hum([0.1])


def test_what_is_written_down_can_be_read_back():
    hum = Hum([0.1, 0.2], [1.0, 2.0])
    told = json.loads(json.dumps(hum.as_dict()))
    assert told == {"kind": "hum", "frequencies": [0.1, 0.2], "amplitudes": [1.0, 2.0], "phases": None}
    del told["kind"]
    assert Hum(**told) == hum
    assert hum.describe() == "hum at 0.1, 0.2 cycles a sample, amplitude 2.236"


def test_single_precision_stays():
    values = demo_signals()["Bumps"].astype(np.float32)[:, None]
    assert Hum([0.1]).reduce(values).samples.dtype == np.float32


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (([],), "frequencies"),
        (([-0.1],), "frequencies"),
        (([0.0],), "frequencies"),
        (([0.5],), "frequencies"),
        (([math.nan],), "frequencies"),
        (([0.1, 0.1],), "frequencies"),
        ((0.1,), "frequencies"),
        ((["a"],), "frequencies"),
        (([0.1], [1.0, 2.0]), "amplitudes"),
        (([0.1], [-1.0]), "amplitudes"),
        (([0.1], None, [0.0]), "phases"),
        (([0.1], [1.0], [math.inf]), "phases"),
        (([0.1], [1.0], [0.0, 1.0]), "phases"),
    ],
)
def test_bad_numbers_are_refused(given, name):
    with pytest.raises(InputError, match=rf"^{name}: "):
        Hum(*given)


def test_what_is_no_recording_is_refused():
    hum = Hum([0.1], [1.0])
    with pytest.raises(InputError, match="hum is a noise of recordings"):
        hum.reduce(np.zeros((8, 8, 1)))
    with pytest.raises(InputError, match="hum is a noise of recordings"):
        hum.sample(np.zeros((8, 8)))
    with pytest.raises(InputError, match="channel_axis"):
        hum.sample(np.zeros(8), channel_axis=3)
    with pytest.raises(InputError, match="samples: got 5, expected 8"):
        hum.reduce(np.zeros((5, 1)))
    with pytest.raises(InputError, match="amplitudes: got none"):
        Hum([0.1]).sample(np.zeros(8))
    with pytest.raises(InputError, match="phases: got none"):
        hum.wave(8)
    with pytest.raises(InputError, match="missing: "):
        find_hum(np.zeros(300), np.zeros(299, bool))
    with pytest.raises(InputError, match="rate: "):
        find_hum(np.zeros(300), rate=0)
    with pytest.raises(InputError, match="samples: "):
        find_hum(np.zeros((300, 2)))
    with pytest.raises(InputError, match="samples: "):
        find_hum([math.nan] * 300)


# ---- the search


def test_the_mains_on_the_recording_of_a_heart_are_found():
    # Record 100 of the MIT-BIH data base, made in the United States at 360 samples a second.
    hum = find_hum(pywt.data.ecg())
    assert len(hum.frequencies) == 1
    assert hum.frequencies[0] * 360 == pytest.approx(60, abs=0.1)
    assert find_hum(pywt.data.ecg(), rate=360) == hum
    assert find_hum(pywt.data.ecg(), rate=500) is None  # 83 Hz are no mains
    assert find_hum(heart()) is None  # nothing is left of it


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heart", "Blocks", "Bumps", "Piece-Regular"])
@pytest.mark.parametrize("strength", [0.05, 0.1])
@pytest.mark.sampled(2)
def test_hum_is_found_off_the_grid_and_taken_out(name, strength):
    clean = heart() if name == "heart" else demo_signals()[name]
    gains, found = [], 0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        f = rng.uniform(0.14, 0.22)  # above the harmonics of heart beats
        level = strength * np.std(clean) * math.sqrt(2)
        hum = Hum([f, 2 * f], [0.95 * level, 0.3 * level], rng.uniform(-3, 3, 2))
        noisy = hum.sample(clean)
        seen = find_hum(noisy)
        if seen is not None:
            found += 1
            assert seen.frequencies[0] == pytest.approx(f, abs=0.1 / len(clean))
            assert seen.amplitudes[0] == pytest.approx(0.95 * level, rel=0.1)
            gains.append(decibels(clean, removed(noisy, seen)) - decibels(clean, noisy))
    assert found >= 4
    assert min(gains) > 12


@pytest.mark.slow
def test_the_frequency_is_found_to_the_bound_of_cramer_and_rao():
    clean = np.repeat(np.random.default_rng(8).normal(size=64), 64)  # steps
    errors = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        f = rng.uniform(0.1, 0.2)
        noisy = Hum([f], [0.2], [rng.uniform(-3, 3)]).sample(clean) + rng.normal(0, 0.1, 4096)
        errors.append(find_hum(noisy).frequencies[0] - f)
    # Var f >= 12 s² / ((2 pi)² (a² / 2) N³ / 2) / 2; jumps and Huber's weights cost a little.
    bound = math.sqrt(6 * 0.1**2 / (math.pi**2 * 0.2**2 * 4096.0**3))
    assert 0.7 * bound < np.sqrt(np.mean(np.square(errors))) < 1.5 * bound


def test_strong_mains_are_found_by_the_rate_or_where_usual_rates_have_them():
    clean = heart()
    noisy = Hum([50 / 345], [np.std(clean)], [1.0]).sample(clean)
    assert find_hum(noisy) is None  # as strong as the signal: who knows what it is
    hum = find_hum(noisy, rate=345)
    assert decibels(clean, removed(noisy, hum)) > 35
    usual = Hum([50 / 360], [np.std(clean)], [1.0]).sample(clean)
    assert decibels(clean, removed(usual, find_hum(usual))) > 35
    assert find_hum(np.sin(2 * np.pi * 50 / 360 * T), rate=360) is None  # a test tone


def test_mains_are_found_in_sound():
    t = np.arange(16000) / 8000
    sound = np.interp(t, np.arange(0, 2.1, 0.1), np.random.default_rng(0).uniform(0, 1, 21)) * np.sin(2600 * t + t * t)
    noisy = sound + 0.05 * np.random.default_rng(1).normal(size=16000) + 0.4 * np.cos(2 * np.pi * 50 * t + 1)
    hum = estimate_noise(noisy).model.parts[0]
    assert np.array(hum.frequencies) * 8000 == pytest.approx([50], abs=0.01)
    assert hum.amplitudes == pytest.approx([0.4], rel=0.02)


def test_mains_on_beats_that_are_even_are_found():
    t = np.arange(3000) / 250
    beat = t * 1.17 % 1
    clean = 1.2 * np.exp(-(((beat - 0.3) / 0.012) ** 2)) + 0.25 * np.exp(-(((beat - 0.55) / 0.05) ** 2))
    noisy = clean + 0.2 * np.cos(2 * np.pi * 60.02 * t) + 0.04 * np.random.default_rng(0).normal(size=3000)
    assert decibels(clean, removed(noisy, find_hum(noisy))) > decibels(clean, noisy) + 8
    tones = np.sin(2 * np.pi * 50 * t) + np.sin(2 * np.pi * 71 * t)  # a test signal
    assert find_hum(tones + 0.04 * np.random.default_rng(0).normal(size=3000)) is None


def test_harmonics_beyond_half_of_the_rate_are_found_where_they_are_folded_to():
    clean = heart()
    f = np.array([50, 150, 250]) / 360  # seen at 50, 150 and 110 Hz
    noisy = clean + sum(0.1 * np.std(clean) * np.cos(2 * np.pi * one * np.arange(len(clean)) + 1) for one in f)
    hum = find_hum(noisy)
    assert np.array(hum.frequencies) * 360 == pytest.approx([50, 110, 150], abs=0.05)
    assert decibels(clean, removed(noisy, hum)) > 30


def test_scale_missing_samples_and_precision():
    rng = np.random.default_rng(1)
    noisy = Hum([0.123], [0.3], [1.0]).sample(demo_signals()["Blocks"])
    hum = find_hum(noisy)
    large = find_hum(1e200 * noisy)
    assert large.frequencies == pytest.approx(hum.frequencies, rel=1e-9)
    assert large.amplitudes == pytest.approx([1e200 * a for a in hum.amplitudes], rel=1e-6)
    missing = rng.random(1024) < 0.01
    noisy[missing] = math.nan
    assert find_hum(noisy, missing).amplitudes == pytest.approx([0.3], rel=0.05)
    assert find_hum(noisy, np.ones(1024, bool)) is None


def signals_of_tones():
    notes = (0.02, 0.03, 0.025, 0.02, 0.04, 0.03, 0.02, 0.03)
    return {
        "one": np.sin(0.3 * T),
        "two": np.sin(0.3 * T) + 0.2 * np.sin(0.71 * T),
        "three": np.sin(0.05 * T) + 0.3 * np.sin(0.3 * T) + 0.1 * np.sin(0.6 * T),
        "square": np.sign(np.sin(0.05 * T)),
        "pulses": (T % 97 < 5) * 1.0,
        "few pulses": (T % 701 < 20) * 1.0,
        "seasons": T / 100 + 3 * np.cos(2 * np.pi * T / 12) + 0.8 * np.cos(2 * np.pi * T / 6),
        "chord": sum(np.sin(2 * np.pi * f * T) for f in (0.01, 0.0126, 0.015)),
        "note": sum(np.sin(2 * np.pi * 0.011 * k * T) / k**2 for k in range(1, 9)),
        "melody": np.concatenate([np.sin(2 * np.pi * f * np.arange(512)) for f in notes]),
        "beats": np.tile(heart()[:292], 15)[: len(T)],
    }


SLOW = ("pulses", "few pulses", "note", "three", "seasons", "chord")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in sorted(signals_of_tones())]
)
@pytest.mark.sampled(2)
def test_tones_that_are_the_signal_are_kept(name):
    values = signals_of_tones()[name]
    rng = np.random.default_rng(0)
    for level in (0, 0.01, 0.2):
        assert find_hum(values + level * np.std(values) * rng.normal(size=len(T))) is None


@pytest.mark.slow
def test_nothing_is_found_on_clean_and_on_noisy_signals():
    clean = demo_signals() | {"heart": heart(), "nino": pywt.data.nino()[1]}
    for name, values in clean.items():
        assert find_hum(values) is None, name
        for decibel in (40, 20, 10, 0):
            noise = np.random.default_rng(decibel).normal(0, np.std(values) / 10 ** (decibel / 20), len(values))
            assert find_hum(values + noise) is None, (name, decibel)


def test_nothing_is_found_in_noise_in_constants_and_in_short_recordings():
    rng = np.random.default_rng(0)
    # Chance allows for one in a thousand before the rest is asked whether it is a signal.
    assert all(find_hum(rng.normal(size=1024)) is None for _ in range(100))
    assert all(find_hum(np.cumsum(rng.normal(size=1024))) is None for _ in range(100))
    assert find_hum(np.full(1024, 3.0)) is None
    assert find_hum(np.zeros(1)) is None
    assert find_hum((demo_signals()["Blocks"] + 0.3 * np.sin(T[:1024]))[:200]) is None


@pytest.mark.parametrize("rate", [None, 500])
def test_hum_with_nothing_else_beside_it_may_be_the_signal_at_the_rate_too(rate):
    rng = np.random.default_rng(0)
    t = np.arange(2000) / 500
    tone, noise = 0.5 * np.sin(2 * np.pi * 50 * t), 0.1 * rng.normal(size=len(t))
    for beside in (0 * t, noise, np.sin(2 * np.pi * t) + noise, np.sin(20 * np.pi * t) + noise):
        assert find_hum(tone + beside, rate=rate) is None
    walk = 0.1 * np.cumsum(rng.normal(size=len(t)))
    assert find_hum(tone + walk + noise, rate=rate).amplitudes == pytest.approx([0.5], rel=0.1)


def test_a_line_that_moves_grows_or_begins_late_is_kept():
    clean, t = demo_signals()["Blocks"], T[:1024]
    assert find_hum(clean + 0.2 * np.sin(1.0 * t)) is not None
    assert find_hum(clean + 0.2 * np.sin(1.0 * t + 1e-4 * t**2)) is None
    assert find_hum(clean + 0.2 * np.sin(1.0 * t) * (t > 512)) is None
    assert find_hum(clean + 0.2 * np.sin(1.0 * t) * t / 1024) is None
