"""The estimate of the noise's strength: what it is right about, and what must not mislead it."""

import numpy as np
import pytest
import pywt
from scipy.fft import dctn
from scipy.ndimage import maximum_filter, minimum_filter
from skimage import data
from skimage.restoration import estimate_sigma as median_of_wavelets

from nlflow import estimate_noise, estimate_sigma
from nlflow.denoising.noise import (
    estimate_sigmas,
    find_hot_pixels,
    find_impulses,
    find_rician,
    find_speckle,
    find_stripes,
)
from nlflow.denoising.noise.finding import sigma as estimation
from nlflow.errors import InputError

pytestmark = pytest.mark.numerical

PHOTOGRAPHS = {"camera": data.camera, "coins": data.coins, "moon": data.moon, "brick": data.brick, "cell": data.cell}


def white(shape, sigma=1.0, seed=0):
    return np.random.default_rng(seed).normal(0, sigma, shape)


def picture(side=128):
    """A ramp, two flat areas and a square wave, 0...1."""
    y, x = np.mgrid[:side, :side] / side
    image = np.where((x - 0.3) ** 2 + (y - 0.35) ** 2 < 0.05, 0.9, 0.3)
    image = np.where(y > 0.7, 0.5 + 0.3 * np.sign(np.sin(2 * np.pi * 12 * x)), image)
    return np.where((x > 0.65) & (y < 0.7), y, image)


# ---- the number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "seeds", "bias", "spread"),
    [
        ((256, 256), 4, 0.015, 0.02),
        ((64, 64), 20, 0.02, 0.05),
        ((16, 16), 100, 0.03, 0.13),
        ((5, 60), 60, 0.03, 0.10),
        ((2000,), 30, 0.015, 0.05),
        ((40,), 150, 0.06, 0.25),
    ],
)
def test_white_noise_alone(shape, seeds, bias, spread):
    values = [estimate_sigma(white(shape, 3.0, seed)) / 3 for seed in range(seeds)]
    assert np.mean(values) == pytest.approx(1, abs=bias)
    assert np.std(values) < spread


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [10, 25, 50])
@pytest.mark.parametrize("name", sorted(PHOTOGRAPHS))
@pytest.mark.sampled(3)
def test_photographs_within_four_percent(name, sigma):
    image = PHOTOGRAPHS[name]()[:256, :256].astype(float)
    noisy = image + white(image.shape, sigma)
    assert estimate_sigma(noisy) == pytest.approx(sigma, rel=0.04)


def test_texture_counts_for_less_than_with_wavelets():
    # Half of it woven, half of it flat: the median of all wavelets sees cloth.
    cloth = np.tile([[0.0, 1.0], [1.0, 0.0]], (64, 64)) * 20
    cloth[:, 64:] = 0
    noisy = cloth + white(cloth.shape, 5)
    assert median_of_wavelets(noisy) > 1.5 * 5
    assert estimate_sigma(noisy) == pytest.approx(5, rel=0.05)


@pytest.mark.slow
def test_more_windows_are_used_where_there_is_no_structure():
    # From the first 1 % of the windows alone the standard deviation would be 3 %.
    values = [estimate_sigma(white((200, 200), 1, seed)) for seed in range(12)]
    assert np.std(values) < 0.015


def signals():
    names = ["Blocks", "Bumps", "HeaviSine", "Doppler", "Ramp", "QuadChirp", "HypChirps", "Piece-Regular"]
    return {name: pywt.data.demo_signal(name, 1024) for name in names} | {"ecg": pywt.data.ecg().astype(float)}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(signals()))
def test_1d_signals_are_not_worse_than_with_wavelets(name):
    signal = signals()[name]
    for decibel in (5, 20):
        sigma = np.std(signal) / 10 ** (decibel / 20)
        noisy = [signal + white(signal.shape, sigma, seed) for seed in range(25)]
        ours = np.array([estimate_sigma(y) for y in noisy]) / sigma - 1
        wavelets = np.array([median_of_wavelets(y) for y in noisy]) / sigma - 1
        assert np.sqrt(np.mean(ours**2)) < 1.1 * np.sqrt(np.mean(wavelets**2))


# ---- invariances


@pytest.mark.parametrize("make", [lambda: picture() + white((128, 128), 0.1), lambda: white(500) + np.arange(500) / 50])
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 255.0, 1e30])
def test_scale_and_shift(make, scale):
    values = make()
    expected = estimate_sigma(values)
    assert estimate_sigma(scale * values) == pytest.approx(scale * expected, rel=1e-9)
    assert estimate_sigma(-scale * values) == pytest.approx(scale * expected, rel=1e-9)
    assert estimate_sigma(values + 1e6) == pytest.approx(expected, rel=1e-6)


def test_transposition_and_flips():
    values = picture() + white((128, 128), 0.1)
    expected = estimate_sigma(values)
    for moved in (values.T, values[::-1], values[:, ::-1]):
        assert estimate_sigma(moved) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "dtype", [np.float16, np.float32, np.float64, np.uint8, np.int16, np.uint16, np.int32, np.int64]
)
def test_any_type_of_number(dtype):
    values = (100 + 100 * picture() + white((128, 128), 10)).astype(dtype)
    assert estimate_sigma(values) == pytest.approx(10, rel=0.04)


@pytest.mark.parametrize("offset", [1e10, -1e12])
def test_an_offset_that_leaves_the_digits_of_the_noise_leaves_the_verdict(offset):
    rows, columns = np.mgrid[:256, :256]
    clean = 128 + 60 * np.sin(columns / 20) * np.cos(rows / 31) + 40 * (columns > 128)
    noisy = clean + 25 * np.random.default_rng(0).standard_normal(clean.shape)
    found, shifted = estimate_noise(noisy), estimate_noise(noisy + offset)
    assert (type(shifted.model), shifted.confidence) == (type(found.model), found.confidence)
    np.testing.assert_allclose(shifted.model.white_sigma, found.model.white_sigma, rtol=1e-4)


def test_a_large_offset_in_wide_integers_leaves_the_noise():
    values = np.rint(white((100, 100), 30)).astype(np.int64)
    assert estimate_sigma(values + 2**45) == pytest.approx(estimate_sigma(values), rel=1e-6)


def test_one_hot_sample_does_not_hide_the_noise():
    values = white((64, 64))
    values[20, 30] = 1e9
    assert estimate_sigma(values) == pytest.approx(estimate_sigma(white((64, 64))), rel=0.05)


def test_channels_one_by_one_and_their_mean():
    values = white((96, 96, 3)) * [1, 2, 6]
    each = estimate_sigmas(values)
    assert each.shape == (3,)
    assert each.dtype == np.float64
    np.testing.assert_array_equal(each, [estimate_sigma(values[..., c]) for c in range(3)])
    assert estimate_sigma(values, channel_axis=-1) == pytest.approx(each.mean())
    assert estimate_sigma(np.moveaxis(values, -1, 0), channel_axis=0) == pytest.approx(each.mean())


def test_a_row_and_a_column_are_signals():
    values = white(300)
    expected = estimate_sigma(values)
    assert estimate_sigma(values[None]) == expected
    assert estimate_sigma(values[:, None]) == expected


# ---- what must not mislead it


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 4)])
def test_one_sample_has_no_noise(shape):
    assert estimate_sigma(np.full(shape, 3.0), channel_axis=-1 if len(shape) == 3 else None) == 0


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2), (3, 3), (1, 2), (2, 50), (7, 9), (9, 300)])
def test_small_shapes_give_a_finite_number(shape):
    assert 0 <= estimate_sigma(white(shape)) < 10


@pytest.mark.parametrize("value", [0, 7.5, -1e300])
def test_a_constant_has_no_noise(value):
    assert estimate_sigma(np.full((40, 40), value)) == 0


def test_where_most_was_set_to_zero_the_rest_tells_the_noise():
    image = np.zeros((128, 128))
    image[32:96, 32:96] = 1 + 0.1 * np.random.default_rng(0).standard_normal((64, 64))
    assert estimate_sigma(image) == pytest.approx(0.1, rel=0.1)


def test_what_is_drawn_has_no_noise():
    drawn = np.zeros((128, 128))
    drawn[30:60, 20:90] = 0.5
    drawn[80:] = 1
    assert estimate_sigma(drawn) == 0
    assert estimate_sigma(drawn > 0) == 0
    assert estimate_sigma(np.kron([[0, 1], [1, 0]], np.ones((40, 40)))) == 0
    # A fine pattern on paper: where most is constant, the rest is no noise.
    drawn[90:120, 60:110] = 0.2 + 0.5 * np.random.default_rng(0).integers(0, 2, (30, 50))
    assert estimate_sigma(drawn) == 0


def test_a_range_that_overflows_gives_0():
    assert estimate_sigma(np.array([[-1.5e308, 1.5e308] * 4] * 8)) == 0


@pytest.mark.parametrize("level", [0.0, 0.4, 1.0])
def test_areas_that_were_filled_in_do_not_count(level):
    noisy = picture() + white((128, 128), 0.1)
    noisy[:50] = level
    assert estimate_sigma(noisy) == pytest.approx(0.1, rel=0.06)
    line = white(1000)
    line[200:600] = level
    assert estimate_sigma(line) == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("shape", [(40, 37), (1, 300)])
def test_areas_are_those_whose_extremes_are_equal(shape):
    values = np.repeat(np.random.default_rng(0).integers(0, 2, (shape[0], -(-shape[1] // 11))), 11, axis=1)
    values = np.repeat(values[: -(-shape[0] // 7)], 7, axis=0)[: shape[0], : shape[1]].astype(float)
    side = (5, 5) if shape[0] > 1 else (1, 9)
    expected = maximum_filter(values, side) == minimum_filter(values, side)
    assert 0 < expected.mean() < 1
    assert (estimation.constant_areas(values, 2 if shape[0] > 1 else 1) == expected).all()


@pytest.mark.parametrize(("length", "left_out"), [(8, False), (9, True)])
def test_nine_equal_samples_in_a_row_were_filled_in(length, left_out):
    line = white(400)
    for start in range(10, 400, 40):
        line[start : start + length] = line[start]
    middles = np.zeros(400, bool)
    middles[14::40] = True
    told = estimate_sigmas(line[:, None], missing=middles)
    assert (estimate_sigmas(line[:, None]) == told).all() == left_out


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [25, 50])
@pytest.mark.sampled(1)
def test_clipped_samples_do_not_count(sigma):
    image = PHOTOGRAPHS["camera"]().astype(float)
    clipped = np.clip(image + white(image.shape, sigma), 0, 255)
    assert median_of_wavelets(clipped) < 0.98 * sigma
    assert estimate_sigma(clipped) == pytest.approx(sigma, rel=0.04)
    assert estimate_sigma(np.rint(clipped).astype(np.uint8)) == pytest.approx(sigma, rel=0.04)


def test_only_the_dark_half_is_clipped():
    dark = np.concatenate([np.full((128, 64), 5.0), np.full((128, 64), 60.0)], axis=1)
    clipped = np.maximum(dark + white((128, 128), 10), 0)
    assert estimate_sigma(clipped) == pytest.approx(10, rel=0.04)
    assert estimate_sigma(-clipped) == pytest.approx(10, rel=0.04)


def test_most_of_the_image_is_overexposed():
    bright = np.concatenate([np.full((128, 96), 255.0), np.full((128, 32), 100.0)], axis=1)
    assert estimate_sigma(np.minimum(bright + white((128, 128), 20), 255)) == pytest.approx(20, rel=0.04)


def test_clipped_at_both_ends_everywhere_there_is_still_noise():
    # No window is two sigma away from both ends: those in the middle have lost the least.
    ramp = np.broadcast_to(np.linspace(0, 1, 128), (128, 128))
    assert estimate_sigma(np.clip(ramp + white(ramp.shape, 0.3), 0, 1)) == pytest.approx(0.3, rel=0.1)


def test_limits_without_any_window():
    # Every other sample is missing, and the others are at the ends of the range.
    missing = np.indices((20, 20)).sum(axis=0) % 2 == 0
    values = np.where(np.indices((20, 20))[0] < 10, 0.0, 1.0)
    assert estimate_sigmas(values[..., None], missing) == [0]


@pytest.mark.slow
@pytest.mark.parametrize(("share", "tolerance"), [(0.01, 0.04), (0.1, 0.08), (0.3, 0.08), (0.7, 0.12)])
def test_missing_samples_do_not_matter(share, tolerance):
    image = PHOTOGRAPHS["camera"]()[:256, :256].astype(float)
    noisy = image + white(image.shape, 20)
    missing = np.random.default_rng(1).random(noisy.shape) < share
    hidden = np.where(missing, np.nan, noisy)
    found = estimate_sigmas(hidden[..., None], missing)
    assert found == pytest.approx([20], rel=tolerance)
    np.testing.assert_array_equal(found, estimate_sigmas(np.where(missing, 1e9, noisy)[..., None], missing))


def test_a_missing_block_changes_nothing_elsewhere():
    noisy = white((64, 100))
    missing = np.zeros(noisy.shape, bool)
    missing[:, 60:] = True
    noisy[:, 60:] = 55
    assert estimate_sigmas(noisy[..., None], missing) == pytest.approx(estimate_sigma(noisy[:, :60]))
    assert estimate_sigmas(noisy[..., None], np.ones_like(missing)) == [0]
    assert estimate_sigmas(noisy[0][:, None], missing[0]) == pytest.approx(estimate_sigma(noisy[0, :60]))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "window"), [((1, 600_000), (1, 16)), ((1100, 1500), (8, 8))])
def test_large_input_is_thinned_out_evenly(shape, window, monkeypatch):
    values = white(shape)
    assert estimate_sigma(values) == pytest.approx(1, rel=0.03)
    steps = estimation._steps(shape, 1 if shape[0] == 1 else 2)
    assert max(steps) > 1
    whole = estimation._transform(values, np.zeros(shape, bool), window, steps)
    assert 2**14 < len(whole.structure) <= 2**16
    # In blocks of any size the windows are the same.
    monkeypatch.setattr(estimation.OfWindows, "block", {2: 1000})
    blocks = estimation._transform(values, np.zeros(shape, bool), window, steps)
    np.testing.assert_allclose(blocks.mean, whole.mean, atol=1e-12)
    np.testing.assert_allclose(blocks.high, whole.high, atol=1e-5)


def test_the_windows_are_those_of_the_cosine_transform():
    values = white((30, 20))
    windows = estimation._transform(values, np.zeros((30, 20), bool), (8, 8), (1, 1))
    assert len(windows.structure) == 23 * 13
    first = dctn(values[4:12, 7:15], norm="ortho")  # down, along
    i, j = np.indices((8, 8))
    place = 4 * 13 + 7
    assert windows.mean[place] == pytest.approx(values[4:12, 7:15].mean())
    assert windows.structure[place] == pytest.approx(np.sum(first[(i + j > 0) & (i + j < 11)] ** 2))
    np.testing.assert_allclose(np.sort(windows.high[place]), np.sort(first[i + j >= 11]), rtol=1e-5)


@pytest.mark.parametrize(("rise", "accepted"), [(0.6, True), (0.85, False)])
def test_where_more_windows_are_not_taken(rise: float, accepted: bool) -> None:
    """The variance from twice as many windows may be higher by the root of the difference of both uncertainties.

    With e and e / 2 for their squares that is (e / 2)^(1/2) = 0.71 e^(1/2), not (3 e / 2)^(1/2) = 1.22 e^(1/2).
    """
    count, frequencies, repeats = 40, 8, 4.0
    error = 2 * repeats / (count * frequencies)
    # Of so many squares, one half 1, the other half with the wanted mean of both in the middle: that is their median.
    second = 1 + 2 * rise * np.sqrt(error)
    high = np.sqrt(np.repeat([1.0, second], count))[:, None] * np.ones((1, frequencies))
    windows = estimation.Windows(np.arange(2.0 * count), high.astype(np.float32), np.zeros(2 * count), repeats)
    assert windows.first <= count
    found = estimation._while_consistent(windows, np.arange(2 * count), 0.5)
    variance = (1 + rise * np.sqrt(error) if accepted else 1.0) / 0.4549364231195724
    assert found == pytest.approx(np.sqrt(variance), rel=1e-6)


# ---- what is refused


@pytest.mark.parametrize(
    "find", [estimate_sigmas, find_hot_pixels, find_impulses, find_rician, find_speckle, find_stripes]
)
@pytest.mark.parametrize(
    ("samples", "missing", "message"),
    [
        ([[1.0, 2.0]], None, "{name}: got list, expected a NumPy array"),
        (None, None, "{name}: got NoneType"),
        (np.ma.masked_less(np.ones((5, 5, 1)), 0), None, "{name}: got MaskedArray"),
        (np.ones((5, 5, 1), complex), None, "{name}: got dtype complex128"),
        (np.array([["a"]]), None, "{name}: got dtype <U1"),
        (np.float64(3) * np.ones(()), None, r"{name}: got float64|{name}: got shape \(\)"),
        (np.ones(5), None, r"{name}: got shape \(5,\), expected one to three axes and a last one"),
        (np.ones((2, 2, 2, 2, 1)), None, "{name}: got shape"),
        (np.ones((0, 5, 1)), None, r"{name}: got shape \(0, 5, 1\), .*none empty"),
        (np.ones((5, 5, 0)), None, r"{name}: got shape \(5, 5, 0\), .*none empty"),
        (np.ones((5, 5)).view(np.matrix), None, "{name}: got matrix, expected a NumPy array"),
        (np.ones((5, 5, 1)), [[False] * 5] * 5, r"missing: got list, expected booleans of shape \(5, 5\)"),
        (np.ones((5, 5, 1)), np.zeros((5, 5), int), r"missing: got int64 of shape \(5, 5\)"),
        (np.ones((5, 5, 1)), np.zeros((5, 5, 1), bool), r"missing: got bool of shape \(5, 5, 1\)"),
    ],
)
def test_finders_refuse_by_name_what_they_cannot_read(find, samples, missing, message):
    name = "signal" if find is estimate_sigmas else "samples"
    with pytest.raises(InputError, match=message.replace("{name}", name)):
        find(samples, missing)
