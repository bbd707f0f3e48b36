"""The verdict on recordings: counts, spikes, hum, and the spectrum of noise against the one it was drawn from."""

import math

import numpy as np
import pytest
from scipy.signal import lfilter

from nlflow import denoise, estimate_noise
from nlflow.denoising.noise import Hum, Mixture, Poisson, Spikes, spectrum_of_signal
from nlflow.denoising.noise.finding.recordings import _counts_of
from nlflow.errors import InputError, NlflowWarning, NumericalError
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


def test_a_steep_spectrum_is_not_continued_beyond_what_was_measured() -> None:
    for seed in (0, 2):  # means of four samples, whose power falls to 0 and would be continued to 85 times the variance
        noise = np.convolve(np.random.default_rng(seed).normal(size=2003), np.full(4, 0.5), "valid")
        assert spectrum_of_signal(noise)[0].mean() == pytest.approx(np.var(noise), rel=0.3)


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


def test_steep_noise_is_not_surely_white():
    # Its highest frequencies agree with one another in all of the recording; they have a third of its strength.
    red = lfilter([1.0], [1.0, -0.8], np.random.default_rng(12).normal(size=8000))
    for signal_below in (np.zeros(8000), 20 * np.sign(np.sin(np.arange(8000) / 300))):
        found = estimate_noise(red + signal_below)
        assert found.confidence == "low"
        assert "not white" in found.reasons[0]
    assert estimate_noise(np.random.default_rng(12).normal(size=8000)).confidence == "high"


@pytest.mark.parametrize("level", [1.0, 20.0])
def test_a_machine_that_is_struck_again_and_again_is_no_noise(level):
    # No window is quiet, and what the resonance leaves of third differences has the law of noise.
    struck, ringing = np.zeros(16000), [1.0, -1.8 * np.cos(0.6 * np.pi), 0.81]
    struck[::20] = 300.0
    clean = lfilter([1.0], ringing, struck) + 300 * np.sin(np.arange(16000) * 0.0845)
    found = estimate_noise(clean + np.random.default_rng(3).normal(0, level, 16000))
    assert found.confidence == "low"
    assert level / 2 < found.model.sigma < 50  # 100 and more before all frequencies bounded it


def test_all_frequencies_tell_white_noise_between_the_calls_of_a_bird():
    # Calls fill most of the recording; their third differences are larger than those of the noise.
    t = np.arange(24000) / 16000
    calls = 4000 * np.sin(2 * np.pi * np.cumsum(3200 + 800 * np.sin(44 * t)) / 16000)
    calls *= np.clip(3 * np.sin(2 * np.pi * 3 * t + 1) + 1.5, 0, 1)
    found = estimate_noise(calls + np.random.default_rng(0).normal(0, 15, 24000))
    assert found.confidence == "medium"
    assert found.model.sigma == pytest.approx(15, rel=0.15)


def brain(seed=0, size=8000):
    """A process with the spectrum 1 / f up to a fifth of the samples' rate."""
    slow = coloured(lambda f: 1 / f / (1 + (f / 0.18) ** 16), size, np.random.default_rng(seed))
    return 20 * slow / np.std(slow)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_signal_with_the_law_of_noise_stays(seed):
    clean = brain(seed)
    noisy = clean + np.random.default_rng(1).normal(0, 12, len(clean))
    with pytest.warns(NlflowWarning, match="but may be the signal"):
        result = denoise(noisy)
    assert rms(result - clean) < 12  # 16 where all of it was noise of medium confidence


def test_fast_noise_is_told_beside_slow_parts_with_the_law_of_noise():
    # Noise at half the rate, as after resampling, is as strong as white noise at each of the frequencies that it has.
    rng = np.random.default_rng(0)
    noise = coloured(lambda f: 1 / (1 + (f / 0.25) ** 16), 8000, rng)
    slow = coloured(lambda f: f**-2 / (1 + (f / 0.06) ** 8), 8000, rng)
    found = estimate_noise(noise / np.std(noise) + 12 * slow / np.std(slow))
    assert found.confidence == "low"
    assert found.model.strength(noise[:, None], None) == pytest.approx(1, rel=0.25)  # 0 where it had to be white


def test_what_was_cut_off_is_no_quiet_part():
    clean = 6 * np.sin(np.arange(5000) / 230)
    noisy = np.clip(clean + np.random.default_rng(0).normal(0, 1, 5000), -5.5, 5.5)
    found = estimate_noise(noisy)
    assert found.confidence != "low"
    assert found.model.sigma == pytest.approx(1, rel=0.1)


def test_no_more_noise_is_found_than_a_quarter_of_a_recording_leaves_room_for():
    # All windows of a tone hold more of it than noise; between its crests third differences are those of the noise.
    tone = 16000 * np.sin(2 * np.pi * 450.3 / 8000 * np.arange(24000))
    found = estimate_noise(tone + np.random.default_rng(12).normal(0, 65, len(tone)))
    assert found.confidence == "low"
    assert found.model.sigma == pytest.approx(65, rel=0.2)


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
    for mask in (np.zeros(299, bool), np.zeros(300), [[True], [True, False]]):
        with pytest.raises(InputError, match=r"^missing: "):
            spectrum_of_signal(np.zeros(300), mask)
    with pytest.raises(NumericalError, match=r"^samples: got values up to .*e\+200, whose powers overflow"):
        spectrum_of_signal(1e200 * np.random.default_rng(0).normal(size=4096))


# ---- spikes


def lines(width, count=12, size=2000, seed=0, heights=(20, 5000)):
    """Lines of a spectrum, so many samples wide at half of their height, in units of the noise."""
    rng, t = np.random.default_rng(seed), np.arange(size)
    places = rng.uniform(10, size - 10, count)
    height = np.exp(rng.uniform(*np.log(heights), count))
    return np.sum(height * np.exp2(-4 * ((t[:, None] - places) / width) ** 2), axis=1)


def white(size=2000, seed=1):
    return np.random.default_rng(seed).normal(size=size)


def with_spikes(clean, seed=2):
    """Spikes of one to three samples, and where they are."""
    rng, noisy = np.random.default_rng(seed), clean + white(len(clean))
    for k, place in enumerate((60, 170, 500, 610, 900, 1030, 1400, 1650, 1990)):
        noisy[place : place + 1 + k % 3] += rng.uniform(20, 300) * rng.uniform(0.6, 1.0, 1 + k % 3)
    return noisy, np.abs(noisy - clean) > 6


@pytest.mark.parametrize("width", [2.0, 3.0, 8.0])
@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_spikes_are_missing_and_lines_stay(width, unit):
    noisy, places = with_spikes(lines(width) + np.arange(2000) / 50)
    found = Spikes(0.01).reduce((unit * noisy)[:, None]).missing
    assert np.array_equal(found & places, places)
    assert np.count_nonzero(found & ~places) <= 1
    single = Spikes(0.01).reduce(noisy[:, None].astype(np.float32))
    assert np.array_equal(single.missing, found)
    assert Spikes().completed(noisy[:, None]) == Spikes(float(found.mean()))


def test_spikes_side_by_side_are_found():
    clean = np.arange(2000) / 50
    noisy = clean + white()
    places = [300, 304, 900, 905, 1400]
    noisy[places] += [90, 60, 200, 45, 120]
    assert np.flatnonzero(Spikes(0.01).reduce(noisy[:, None]).missing).tolist() == places


def signals_with_narrow_parts():
    t, rng = np.arange(2000), np.random.default_rng(5)
    places = np.where(rng.random(2000) < 0.01, rng.exponential(50, 2000), 0)
    beat = t / 100 * 1.2 % 1
    return {
        "lines": lines(2.0) + 3,
        "lines sampled too rarely": lines(1.4) + t / 500,
        "beats": 30 * (np.exp(-(((beat - 0.3) / 0.012) ** 2)) + 0.2 * np.exp(-(((beat - 0.55) / 0.05) ** 2))),
        "pulses": 8.0 * (t % 97 < 1) + np.sin(t / 200),
        "digits": 5.0 * np.repeat(rng.integers(0, 2, 1000), 2),
        "steps": np.repeat(rng.normal(0, 5, 667), 3)[:2000],
        "square": 30 * np.sign(np.sin(t / 7)),
        "decays": np.convolve(places, np.exp(-np.arange(30) / 4))[:2000],
        "sticks": places,
    }


@pytest.mark.parametrize("name", sorted(signals_with_narrow_parts()))
def test_what_is_narrow_but_no_spike_stays(name):
    clean = signals_with_narrow_parts()[name]
    for level in (1.0, 0.1, 0.0):
        assert Spikes(0.01).reduce((clean + level * white())[:, None]).missing is None


def test_spikes_of_one_channel_are_interpolated_in_it_alone():
    clean = lines(6.0) + np.arange(2000) / 50
    noisy, _ = with_spikes(clean)
    both = np.stack([clean + white(seed=3), noisy], axis=1)
    found = Spikes(0.01).reduce(both)
    assert found.missing is None
    assert np.array_equal(found.samples[:, 0], both[:, 0])
    assert np.abs(found.samples - clean[:, None]).max() < 30 < np.abs(both - clean[:, None]).max()


def jumps(clean, count=8, seed=4, lengths=(1, 6)):
    """Jumps of a few samples that go both ways, and where they are; the clean recording with noise beside them."""
    rng, noisy = np.random.default_rng(seed), clean + white(len(clean))
    places = np.zeros(len(clean), bool)
    for start in rng.choice(np.arange(20, len(clean) - 20, 40), count, replace=False):
        run = slice(start, start + rng.integers(*lengths))
        noisy[run] += rng.choice([-1, 1]) * rng.uniform(15, 40)
        places[run] = True
    return noisy, places


def test_jumps_of_a_track_go_both_ways():
    noisy, places = jumps(20 * np.sin(np.arange(2000) / 150))
    assert np.array_equal(Spikes(0.01).reduce(noisy[:, None]).missing, places)


def test_clicks_on_tones_are_found_and_tones_that_begin_are_none():
    t = np.arange(4000)
    tones = 80 * np.sin(t * 0.17) + 50 * np.sin(t * 0.52 + 1)
    noisy, places = jumps(tones, 20, lengths=(1, 4))
    found = Spikes(0.01).hits(noisy[:, None])[:, 0]
    assert np.count_nonzero(found & places) > 0.5 * np.count_nonzero(places)
    assert np.count_nonzero(found & ~places) < 0.5 * np.count_nonzero(places)
    begins = tones * (t % 700 > 300) + white(4000)
    assert Spikes(0.01).reduce(begins[:, None]).missing is None


@pytest.mark.parametrize("value", [85.0, -40.0, 15.0])
def test_one_value_in_place_of_samples_is_missing(value):
    rng = np.random.default_rng(6)
    warm = np.round(15 + 6 * np.sin(np.arange(2000) / 200) + 0.1 * white(), 6)
    lost = rng.random(2000) < 0.03
    found = Spikes(0.01).reduce(np.where(lost, value, warm)[:, None]).missing
    assert not (found & ~lost).any()
    assert np.abs(warm - value)[lost & ~found].max(initial=0.0) < 0.6
    assert np.count_nonzero(found) > 0.7 * np.count_nonzero(lost)
    # Peaks that are cut off have flanks, and pulses at equal intervals are the signal.
    cut = np.minimum(lines(3.0, count=40, heights=(30, 300)) + white(), 20.0)
    assert Spikes(0.01).reduce(cut[:, None]).missing is None
    pulses = np.where(np.arange(2000) % 50 == 0, 85.0, warm)
    assert Spikes(0.01).reduce(pulses[:, None]).missing is None


def test_channels_are_looked_at_together():
    slow = 20 * np.sin(np.arange(2000) / 150)
    noisy, places = jumps(slow, lengths=(2, 3))
    few = slow + white(seed=9)
    few[[300, 301, 1200, 1201]] += 25.0  # by itself no more than narrow lines
    assert Spikes(0.01).reduce(few[:, None]).missing is None
    hits = Spikes(0.01).hits(np.stack([noisy, few], axis=1))
    assert np.array_equal(hits[:, 0], places)
    assert np.flatnonzero(hits[:, 1]).tolist() == [300, 301, 1200, 1201]


# ---- the verdict


def rms(values):
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.slow
def test_spikes_are_found_told_and_filled_in():
    clean = lines(8.0) + np.arange(2000) / 50
    noisy, _ = with_spikes(clean)
    result, info = denoise(noisy, return_info=True)
    assert rms(result - clean) < 0.5
    assert "spikes" in info.noise
    assert any("stick out" in reason for reason in info.reasons)
    assert info.sigma == pytest.approx(1.0, rel=0.15)


def test_what_looks_like_spikes_and_stays_is_told():
    verdict = estimate_noise(signals_with_narrow_parts()["pulses"] + 0.1 * white())
    assert "spikes" not in verdict.model.describe()
    assert any("alike" in reason for reason in verdict.reasons)


def test_mains_are_found_without_being_asked():
    clean = 100 * demo_signals()["Piece-Regular"] / np.std(demo_signals()["Piece-Regular"])
    noisy = Hum([50 / 360, 100 / 360], [60.0, 20.0], [1.0, 2.0]).sample(clean)
    verdict = estimate_noise(noisy)
    assert "hum at 0.138" in verdict.model.describe()
    assert rms(denoise(noisy) - clean) < 0.2 * rms(noisy - clean)
    # Another line may be the signal, however steady it is.
    assert "hum" not in estimate_noise(Hum([0.1333], [10.0], [1.0]).sample(clean)).model.describe()


@pytest.mark.parametrize("step", [1, 0.25, 1 / 60])
def test_counts_have_their_law_at_any_mean(step):
    for mean in (0.3, 3, 300):
        counts = np.random.default_rng(0).poisson(mean * (0.3 + lines(9.0) / lines(9.0).max()))
        verdict = estimate_noise(counts * step)
        assert isinstance(verdict.model, Poisson), mean
        assert verdict.model.gain == pytest.approx(step)
        assert estimate_noise((counts * step).astype(np.float32)).model.kind == "poisson"


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("gain", [1.0, 0.37])
def test_counts_of_several_channels_have_one_step(gain: float, dtype: str) -> None:
    """Of each channel alone the rounding is another."""
    light = 30 * (1 + 0.5 * np.sin(np.arange(4000)[:, None] / 200 + np.arange(2)))
    found, _ = _counts_of((gain * np.random.default_rng(1).poisson(light)).astype(dtype), None)
    assert isinstance(found, Poisson)
    assert found.gain == pytest.approx(gain, rel=float(np.finfo(dtype).eps))


def test_integers_of_another_law_are_no_counts():
    t, rng = np.arange(3000), np.random.default_rng(0)
    wave = 300 + 200 * np.sin(t / 90)
    for values in (wave, wave + rng.normal(0, 5, 3000), 4 * rng.poisson(wave) // 3, rng.poisson(wave) - 300, t % 7):
        assert estimate_noise(np.rint(values)).model.kind != "poisson"


def test_spikes_among_counts_are_found_too():
    t = np.arange(2000)
    mean = 20 + 200 * np.exp(-(((t - 900) / 60) ** 2))
    counts = np.random.default_rng(0).poisson(mean)
    counts[[100, 500, 1500]] += [900, 500, 1500]
    model = estimate_noise(counts).model
    assert isinstance(model, Mixture)
    assert [part.kind for part in model.parts] == ["poisson", "spikes"]
    assert np.flatnonzero(model.reduce(counts[:, None].astype(float)).missing).tolist() == [100, 500, 1500]


def test_each_channel_has_its_own_noise():
    clean = np.sin(np.arange(3000) / 40)
    blue = coloured(POWERS["blue"], 3000, np.random.default_rng(0))
    levels = 0.1, 0.4
    model = estimate_noise(
        np.stack([clean + 0.1 * white(3000), clean + 0.4 * blue / blue.std()], 1), channel_axis=1
    ).model
    assert model.sigma == pytest.approx(levels, rel=0.25)
    assert np.ptp(model.spectrum[0]) < 1e-9 < np.ptp(model.spectrum[1])


def test_missing_samples_of_a_recording_are_no_spikes():
    noisy, places = with_spikes(lines(8.0) + np.arange(2000) / 50)
    missing = places.copy()
    assert "spikes" not in estimate_noise(np.where(missing, 1e9, noisy), mask=missing).model.describe()


def test_images_are_refused():
    with pytest.raises(InputError, match="spikes is a noise of recordings"):
        Spikes(0.1).reduce(np.zeros((8, 8, 1)))
    for bad in ((-0.1,), (1.0,), (0.1, -1.0), (math.nan,)):
        with pytest.raises(InputError, match=r"^(density|level): "):
            Spikes(*bad)
    with pytest.raises(InputError, match=r"^factor: got 2 for spikes"):
        Spikes(0.1).scaled(2)


@pytest.mark.parametrize("name", ["Bumps", "Piece-Regular", "HeaviSine"])
def test_white_noise_is_told_with_confidence_where_all_of_the_recording_tells_it(name):
    clean = demo_signals()[name]
    verdict = estimate_noise(clean + 0.05 * np.ptp(clean) * white(SIZE))
    assert verdict.confidence == "high"
    assert verdict.model.sigma == pytest.approx(0.05 * np.ptp(clean), rel=0.15)


def test_fast_structure_takes_the_confidence():
    chirps = demo_signals()["WernerSorrows"]
    assert estimate_noise(chirps).confidence != "high"


def test_values_that_are_held_and_peaks_of_one_height_stay():
    rng = np.random.default_rng(0)
    held = np.repeat(rng.normal(size=700), 3)
    with pytest.warns(NlflowWarning, match="the result is the input"):
        assert np.array_equal(denoise(held), held)
    outlying = np.repeat(np.random.default_rng(3).normal(size=250), 4)
    assert estimate_noise(outlying).model.white_sigma == 0
    beat = np.arange(2000) / 60 * 1.2 % 1
    peaks = np.rint(1000 * np.exp(-(((beat - 0.3) / 0.012) ** 2)) + 100 * np.sin(2 * np.pi * beat))
    assert "impulses" not in estimate_noise(peaks).model.describe()


@pytest.mark.filterwarnings("error")
def test_weak_noise_beside_high_peaks_is_taken_out_without_a_warning():
    t = np.arange(3000)
    clean = 50 + 1e5 * np.exp(-(((t - 800) / 30) ** 2)) + 2e4 * np.exp(-(((t - 1900) / 90) ** 2))
    result = denoise(clean + 12 * white(3000))
    assert rms(result - clean) < 5


def _walk(size=1500):
    """A slow signal, and the same number of samples of steps, both under white noise of strength 1."""
    t, rng = np.arange(size) / size, np.random.default_rng(3)
    slow = 20 * np.sin(2 * np.pi * 3 * t) + 10 * np.sin(2 * np.pi * 11 * t + 1)
    steps = 6.0 * np.cumsum(np.where(rng.random(size) < 0.01, rng.choice([-1, 1], size), 0))
    return slow, steps, rng.normal(size=size)


def test_slow_recordings_are_seen_on_coarser_scales():
    slow, _, noise = _walk()
    blind, info = denoise(slow + noise, return_info=True)
    assert np.std(blind - slow) < 0.5 * np.std(denoise(slow + noise, info.sigma) - slow)


@pytest.mark.slow
def test_scales_are_chosen_by_risk(monkeypatch):
    slow, steps, noise = _walk()
    blind, info = denoise(steps + noise, return_info=True)
    np.testing.assert_array_equal(blind, denoise(steps + noise, info.sigma))
    # A look at the middle of what is long chooses the same.
    whole, missing = denoise(slow + noise), np.zeros(len(slow), bool)
    missing[700:720] = True
    gap = denoise(slow + noise, mask=missing)
    monkeypatch.setattr("nlflow.denoising.groupwise._LOOKED", 700)
    np.testing.assert_array_equal(denoise(slow + noise), whole)
    np.testing.assert_array_equal(denoise(slow + noise, mask=missing), gap)
    both = denoise(np.stack([slow + noise, slow + noise[::-1]], axis=1), channel_axis=1)
    assert max(np.std(both[:, 0] - slow), np.std(gap[~missing] - slow[~missing])) < 2 * np.std(whole - slow)
