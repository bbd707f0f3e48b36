"""The spectrum of the noise of a recording, against the one it was drawn from."""

import math

import numpy as np
import pytest

from nlflow.denoising.noise import spectrum_of_signal
from nlflow.errors import InputError
from tests.recordings import SIZE, coloured, demo_signals, heart

POWERS = {
    "pink": lambda f: 1 / f,
    "low": lambda f: 1 / (1 + (f / 0.2) ** 8) + 1e-4,  # as after a filter
    "blue": lambda f: f,
}
KINDS = sorted(POWERS)
QUIET = ["Blocks", "Bumps", "HeaviSine", "Doppler", "Ramp", "Piece-Regular", "heart"]
FIRST = 2  # step from which a spectrum is measured


def signal(name):
    return heart() if name == "heart" else demo_signals()[name]


def decibels_wrong(found, kind):
    """Ratio of estimate to truth at the frequencies that are measured; the truth is a mean over each step."""
    power, size = found[0], len(found[0])
    steps = np.arange(FIRST, size // 2)
    near = (steps[:, None] + np.linspace(-0.5, 0.5, 21)) / size
    return 10 * np.log10(power[FIRST : size // 2] / POWERS[kind](near).mean(axis=1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("Blocks", "Doppler", "heart") else pytest.mark.slow) for name in QUIET],
)
@pytest.mark.parametrize("decibel", [5, 15])
@pytest.mark.sampled(4)
def test_the_spectrum_is_found_on_signals(kind, name, decibel):
    clean = signal(name)
    wrong, missed = [], 0
    for seed in range(6):
        noise = coloured(POWERS[kind], SIZE, np.random.default_rng(seed))
        level = np.std(clean) / np.std(noise) / 10 ** (decibel / 20)
        found = spectrum_of_signal(clean + level * noise)
        if found is None:
            missed += 1
        else:
            wrong.append(decibels_wrong((found[0] / level**2, found[1]), kind))
    assert missed <= 2
    # The noise that the recording of the heart has itself stands above a filtered noise at high frequencies.
    most = 4.0 if (name, kind) == ("heart", "low") else 2.0
    assert np.sqrt(np.mean(np.square(wrong))) < most
    assert abs(np.mean(wrong)) < most / 1.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_long_recordings_tell_more(kind):
    found = spectrum_of_signal(coloured(POWERS[kind], 2**16, np.random.default_rng(0)))
    power, sure = found
    assert power.shape == (64,)
    assert np.array_equal(power[1:], power[:0:-1])
    # 0.3 dB is the error of a median of a thousand windows; the rest is what the taper blurs at the cliff.
    assert np.sqrt(np.mean(decibels_wrong(found, kind) ** 2)) < (1.5 if kind == "low" else 0.5)
    assert sure > (0.5 if kind == "pink" else 0.9)  # a steep rise may be structure


@pytest.mark.slow
def test_the_mean_is_the_variance():
    for kind in ("low", "blue"):
        noise = coloured(POWERS[kind], 2**16, np.random.default_rng(1))
        assert spectrum_of_signal(noise)[0].mean() == pytest.approx(np.var(noise), rel=0.1)


@pytest.mark.slow
def test_white_noise_is_none():
    rng = np.random.default_rng(0)
    assert all(spectrum_of_signal(rng.normal(size=SIZE)) is None for _ in range(50))
    assert spectrum_of_signal(rng.normal(size=2**15)) is None
    for name in QUIET:
        clean = signal(name)
        for decibel in (0, 10, 20):
            level = np.std(clean) / 10 ** (decibel / 20)
            assert spectrum_of_signal(clean + level * rng.normal(size=SIZE)) is None, (name, decibel)


@pytest.mark.slow
def test_clean_signals_have_almost_no_noise():
    # Riemann's function is a sum of waves of all frequencies, and looks like noise of the spectrum 1 / f².
    for name, values in (demo_signals() | {"heart": heart()}).items():
        found = spectrum_of_signal(values)
        limit = {"Riemann": 4.0, "heart": 0.1}.get(name, 0.0)  # that of the heart has noise of its own
        assert found is None or found[0].mean() < limit * np.var(values), name


def test_missing_samples_do_not_matter():
    noise = coloured(POWERS["pink"], 4000, np.random.default_rng(0))
    missing = np.zeros(4000, bool)
    missing[1000:1400] = missing[::400] = True
    noisy = np.where(missing, np.nan, noise)
    found = spectrum_of_signal(noisy, missing)
    assert np.sqrt(np.mean(decibels_wrong(found, "pink") ** 2)) < 1.0
    assert spectrum_of_signal(noisy, np.ones(4000, bool)) is None


@pytest.mark.parametrize("scale", [1e-150, 1e-6, 1e6, 1e150])
def test_units_do_not_matter(scale):
    noise = coloured(POWERS["pink"], 3000, np.random.default_rng(0))
    power, sure = spectrum_of_signal(noise)
    other = spectrum_of_signal(scale * noise)
    assert other[0] == pytest.approx(scale**2 * power, rel=1e-9)
    assert other[1] == pytest.approx(sure)


def test_what_cannot_be_measured_is_none():
    assert spectrum_of_signal(np.zeros(1000)) is None
    assert spectrum_of_signal(np.full(1000, 3.0)) is None
    assert spectrum_of_signal(coloured(POWERS["pink"], 255, np.random.default_rng(0))) is None
    assert spectrum_of_signal(np.arange(1000.0)) is None


def test_bad_input_is_refused():
    for bad in (np.zeros((9, 9)), [], [math.nan] * 300, [1j] * 300, ["a"]):
        with pytest.raises(InputError, match=r"^samples: "):
            spectrum_of_signal(bad)
    for mask in (np.zeros(299, bool), np.zeros(300)):
        with pytest.raises(InputError, match=r"^missing: "):
            spectrum_of_signal(np.zeros(300), mask)
