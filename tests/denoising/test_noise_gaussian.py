"""Gaussian noise that is correlated or follows the intensity: samples against closed forms, grids, words, bad input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import signal, stats

import nlflow as nl
from nlflow.denoising.noise import GaussianNoise, Impulses, Mixture, spectra
from nlflow.denoising.noise.models.gaussian import OPPONENT
from nlflow.errors import InputError
from tests.pictures import Floats

pytestmark = pytest.mark.numerical

# Statistical bounds are five standard deviations of what is measured: a right program fails one in 10^6 times.
DEVIATIONS = 5.0
KERNELS: dict[str, Floats] = {
    "box": np.ones((3, 3)),
    "streaks": np.ones((1, 5)),
    "slanted": np.eye(4) + 0.5 * np.eye(4, k=1),
    "zigzag": np.array([[1.0, -0.9], [0.2, 0.0]]),
}


def correlation_of(kernel: Floats) -> Floats:
    """Correlation of white noise after a convolution, by its offset: an autocorrelation (SciPy)."""
    full = signal.correlate(kernel, kernel, mode="full", method="direct")
    return np.asarray(full / full.max())


def deviation_of_variance(correlation: Floats, count: int) -> float:
    """Return the standard deviation of the mean square of so many samples, relative to the variance.

    Var(mean z^2) = 2/N^2 sum_ij c(i - j)^2 = 2/N sum_h c(h)^2 for periodic Gaussian noise.
    """
    return float(np.sqrt(2 / count * np.sum(correlation**2)))


def power_of(kernel: Floats, shape: tuple[int, ...]) -> Floats:
    """Power spectrum of white noise after a convolution, its mean 1: the cosine sum of its correlation."""
    total = np.zeros(shape)
    middle = [n // 2 for n in correlation_of(kernel).shape]
    places = np.meshgrid(*(np.fft.fftfreq(n) for n in shape), indexing="ij")
    for index, value in np.ndenumerate(correlation_of(kernel)):
        phase = sum(f * (i - m) for f, i, m in zip(places, index, middle, strict=True))
        total += value * np.cos(2 * np.pi * phase)
    return np.maximum(total, 0)


# ---- samples


@pytest.mark.parametrize("shape", [(96, 80), (61, 33), (7, 9), (128, 3), (1, 40), (40, 1), (5, 5)])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.sampled(6)
def test_samples_have_the_variance_and_the_correlation_of_a_kernel(name: str, shape: tuple[int, int]) -> None:
    kernel, repeats = KERNELS[name], max(1, 4000 // (shape[0] * shape[1]))
    model, rng = GaussianNoise.from_kernel(kernel, 3.0), np.random.default_rng(0)
    z = np.stack([model.sample(np.zeros(shape), rng=rng) for _ in range(repeats)])
    expected = correlation_of(kernel)
    bound = DEVIATIONS * deviation_of_variance(expected, z.size)
    if min(shape) >= 2 * max(kernel.shape):  # noise is periodic in the picture, which a narrow one cannot hold
        assert abs(np.mean(z**2) / 9 - 1) < bound
        for index, value in np.ndenumerate(expected):
            offset = [i - n // 2 for i, n in zip(index, expected.shape, strict=True)]
            measured = np.mean(z * np.roll(z, offset, axis=(1, 2))) / 9
            assert abs(measured - value) < np.sqrt(2) * bound  # Var(mean z_i z_j) <= 2/N sum_h c(h)^2, twice that
    else:
        assert abs(np.mean(z**2) / 9 - 1) < DEVIATIONS * np.sqrt(2 * max(shape) / z.size)


def test_one_row_of_a_picture_is_correlated_along_it() -> None:
    """Covariances of rows that a picture does not have stay out of it."""
    line = correlation_of(KERNELS["slanted"])[3]
    bound = 2 * DEVIATIONS * deviation_of_variance(correlation_of(KERNELS["slanted"]), 4001)
    z = GaussianNoise.from_kernel(KERNELS["slanted"]).sample(np.zeros((1, 4001)), rng=0)
    for offset in range(4):
        assert abs(np.mean(z * np.roll(z, offset, axis=1)) - line[len(line) // 2 + offset]) < bound


@pytest.mark.parametrize("shape", [(128, 128), (150, 87)])
@pytest.mark.parametrize("name", KERNELS)
def test_the_periodogram_is_the_power_times_an_exponential_number(name: str, shape: tuple[int, int]) -> None:
    kernel = KERNELS[name]
    z = GaussianNoise.from_kernel(kernel).sample(np.zeros(shape), rng=1)
    power = power_of(kernel, shape)
    half = np.zeros(shape, bool)  # one of each pair f, -f, and none that is its own opposite
    half[1 : (shape[0] + 1) // 2] = True
    there = half & (power > 1e-6)
    ratios = (np.abs(np.fft.fft2(z)) ** 2 / z.size)[there] / power[there]
    assert stats.kstest(ratios, "expon").pvalue > 1e-6


def test_the_power_of_a_box_has_a_closed_form() -> None:
    f = np.fft.fftfreq(64)[1:]
    ratio = (np.sin(3 * np.pi * f) / np.sin(np.pi * f)) ** 2
    model = GaussianNoise.from_kernel(np.ones((3, 3)), 2.0)
    np.testing.assert_allclose(
        model.powers(1, 2)[0, 1:, 1:], 4 * np.multiply.outer(ratio, ratio) / 9, rtol=1e-12, atol=1e-12
    )
    assert model.powers(1, 2).mean() == pytest.approx(4)


def test_the_correlation_of_a_spectrum_is_that_of_its_kernel() -> None:
    for kernel in KERNELS.values():
        expected = correlation_of(kernel)
        found = spectra.correlation(GaussianNoise.from_kernel(kernel).powers(1, 2))[0]
        assert found.shape == (63, 63)
        rows, columns = (slice(31 - n // 2, 32 + n // 2) for n in expected.shape)
        np.testing.assert_allclose(found[rows, columns], expected, atol=1e-14)
        assert np.abs(found).sum() == pytest.approx(np.abs(expected).sum())  # and 0 beyond it


@pytest.mark.parametrize("length", [700, 64, 21])
def test_signals(length: int) -> None:
    kernel = np.array([1.0, 2, 1])
    model = GaussianNoise.from_kernel(kernel, 0.5)
    rng, repeats = np.random.default_rng(3), 20
    z = np.stack([model.sample(np.zeros(length), rng=rng) for _ in range(repeats)])
    assert z.shape == (repeats, length)
    expected = correlation_of(kernel)
    bound = np.sqrt(2) * DEVIATIONS * deviation_of_variance(expected, z.size)
    for offset, value in zip(range(-2, 3), expected, strict=True):
        assert abs(np.mean(z * np.roll(z, offset, axis=1)) / 0.25 - value) < bound
    # A spectrum by rows of channels: two channels of their own.
    both = GaussianNoise([1.0, 2.0], np.stack([np.ones((1, 64)), model.spectrum[0]]))
    z = both.sample(np.zeros((2, 4000)), rng=0, channel_axis=0)
    assert abs(np.mean(z[0] * np.roll(z[0], 1))) < DEVIATIONS / np.sqrt(4000)
    assert abs(np.mean(z[1] * np.roll(z[1], 1)) / 4 - 2 / 3) < np.sqrt(2) * DEVIATIONS * deviation_of_variance(
        expected, 4000
    )


def test_strength_follows_the_intensity_relative_to_sigma() -> None:
    clean = np.add.outer(np.linspace(-20, 140, 400), np.zeros(300))
    model = GaussianNoise(4.0, intensities=[0, 50, 100], strengths=[0.5, 1.0, 2.0])
    z = model.sample(clean, rng=0) - clean
    for low, high, wanted in ((-20, 0, 0.5), (24.9, 25.1, 0.75), (49.9, 50.3, 1.0), (100, 140, 2.0)):
        there = (clean >= low) & (clean <= high)
        relative = np.mean(np.square(z[there])) / (4 * wanted) ** 2
        # Beside five deviations of a mean square, what the strength grows by within the bin: 0.02 / 0.5 an intensity.
        slack = 2 * 0.3 * 0.02 / 0.5
        assert abs(relative - 1) < DEVIATIONS * np.sqrt(2 / np.count_nonzero(there)) + slack
    # Of colours the mean of the channels counts.
    colours = np.stack([clean - 30, clean, clean + 30], axis=-1)
    noise = model.sample(colours, rng=0, channel_axis=-1) - colours
    np.testing.assert_allclose(
        model.relative(colours.mean(axis=-1)), np.interp(clean, [0, 50, 100], [0.5, 1, 2]), rtol=1e-12
    )
    there = clean > 100
    assert abs(np.mean(noise[there] ** 2) / 64 - 1) < DEVIATIONS * np.sqrt(2 / noise[there].size)


def test_opponent_colours_have_three_spectra_or_one() -> None:
    with pytest.raises(InputError, match=r"^spectrum: got 2 channels, expected 1 or 3"):
        GaussianNoise(1.0, np.ones((2, 4, 4)), opponent=True)


def test_opponent_channels_mix_to_a_covariance_of_colours() -> None:
    sigma = np.array([1.0, 3.0, 2.0])
    expected = OPPONENT.T @ np.diag(sigma**2) @ OPPONENT
    np.testing.assert_allclose(OPPONENT @ OPPONENT.T, np.eye(3), atol=1e-15)
    for spectrum in (None, np.ones((8, 8)), GaussianNoise.from_kernel(KERNELS["box"]).spectrum[0]):
        z = GaussianNoise(sigma, spectrum, opponent=True).sample(np.zeros((150, 140, 3)), rng=2, channel_axis=-1)
        found = np.cov(z.reshape(-1, 3).T, bias=True)
        # Var(mean z_i z_j) = (c_ii c_jj + c_ij^2)/N times the sum of the squared correlation.
        spread = 1.0 if spectrum is None or len(spectrum) == 8 else np.sum(correlation_of(KERNELS["box"]) ** 2)
        each = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) * spread / (150 * 140))
        assert np.all(np.abs(found - expected) < DEVIATIONS * each)
    moved = GaussianNoise(sigma, opponent=True).sample(np.zeros((3, 20, 30)), rng=0, channel_axis=0)
    usual = GaussianNoise(sigma, opponent=True).sample(np.zeros((20, 30, 3)), rng=0, channel_axis=-1)
    np.testing.assert_array_equal(np.moveaxis(moved, 0, -1), usual)


def test_a_seed_gives_the_same_noise_again() -> None:
    model = GaussianNoise.from_kernel(KERNELS["box"])
    first, again, other = (model.sample(np.zeros((9, 9)), rng=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


# ---- spectra of any size


@pytest.mark.parametrize("size", [1, 2, 16, 32, 64, 65, 100, 256, 500])
def test_a_spectrum_of_any_size_keeps_its_power(size: int) -> None:
    """The plain mean over at least as many frequencies as offsets is c(0) = 1 exactly, on the grid as well.

    Averaged over cells 1/64 wide each value moves by at most L/128 along an axis, where L = 2 pi sum |h c(h)| bounds
    the slope of the power. Fewer frequencies that divide 64 are interpolated with equal weights.
    """
    kernel = stats.norm.pdf(np.arange(-3, 4), scale=1.0)
    correlation = correlation_of(kernel)
    slope = 2 * np.pi * np.sum(np.abs(np.arange(-6, 7) * correlation))
    line = power_of(kernel, (size,))
    for spectrum in (line[None, None], np.multiply.outer(line, line)[None]):
        found = spectra.on_grid(spectrum)
        axes = np.count_nonzero(np.array(spectrum.shape[1:]) > 1)
        assert found.shape[1:] == tuple(64 if n > 1 else 1 for n in spectrum.shape[1:])
        if size <= 64:
            assert found.mean() == pytest.approx(spectrum.mean(), rel=1e-13)
        else:
            assert spectrum.mean() == pytest.approx(1, abs=1e-12)
            assert abs(found.mean() - 1) < (1 + slope / 128) ** axes - 1
            exact = power_of(kernel, (64,))
            wanted = exact if spectrum.shape[1] == 1 else np.multiply.outer(exact, exact)
            assert np.abs(found[0] - wanted).max() < (exact.max() + slope / 128) ** axes - exact.max() ** axes
        opposite = np.roll(found[:, ::-1, ::-1], (found.shape[1] > 1, found.shape[2] > 1), axis=(1, 2))
        np.testing.assert_allclose(found, opposite, atol=1e-12)  # power at f and -f stays equal


@pytest.mark.parametrize(
    ("channels", "dimension", "name"), [(0, 2, "channels"), (-1, 2, "channels"), (1, 0, "dimension")]
)
def test_powers_are_of_some_channels(channels: int, dimension: int, name: str) -> None:
    with pytest.raises(InputError, match=f"^{name}: got {channels if name == 'channels' else dimension}, expected"):
        GaussianNoise(1.0).powers(channels, dimension)


def test_the_scale_and_size_of_a_spectrum_do_not_matter() -> None:
    line = power_of(np.array([1.0, 2, 1]), (64,))
    coarse = power_of(np.array([1.0, 2, 1]), (256,))
    one = GaussianNoise(2.0, np.multiply.outer(line, line))
    other = GaussianNoise(2.0, 1e7 * np.multiply.outer(line, line))
    np.testing.assert_allclose(one.powers(1, 2), other.powers(1, 2), rtol=1e-14)
    larger = GaussianNoise(2.0, np.multiply.outer(coarse, coarse))
    assert larger.powers(1, 2).mean() == pytest.approx(4)
    white = GaussianNoise(2.0, np.full((5, 5), 3.0))
    np.testing.assert_allclose(white.powers(2, 2), 4 * np.ones((2, 64, 64)))
    for unit in (1e-250, 1e305):
        far = GaussianNoise(2.0, unit * np.multiply.outer(line, line))
        np.testing.assert_allclose(one.powers(1, 2), far.powers(1, 2), rtol=1e-14)


@pytest.mark.parametrize("unit", [1e-310, 1e-200, 1e-80, 1e90, 1e200, 1e307])
def test_the_unit_of_a_kernel_does_not_matter(unit: float) -> None:
    kernel = np.array([[1.0, 2, 1], [0, 4, 0]])
    found = GaussianNoise.from_kernel(unit * kernel).spectrum
    np.testing.assert_allclose(found, GaussianNoise.from_kernel(kernel).spectrum, rtol=1e-12, atol=1e-12)


def test_the_range_is_that_of_the_channel_that_is_correlated_farthest() -> None:
    white, wide = np.ones((64, 64)), GaussianNoise.from_kernel(np.ones((9, 9))).spectrum[0]
    far = GaussianNoise(1.0, wide).range()
    assert far == 8  # the correlation over an offset of 8 of a box of 9 is 1/9
    assert GaussianNoise(1.0, np.stack([white, wide])).range() == far
    assert "over about 8 pixels" in GaussianNoise(1.0, np.stack([white, wide])).describe()
    assert GaussianNoise(1.0, np.stack([white, wide, wide]), opponent=True).range() == GaussianNoise(1.0, white).range()


def test_what_compression_cut_off_counts_as_a_plateau() -> None:
    line = power_of(np.array([1.0, 2, 1]), (64,))
    model = GaussianNoise(2.0, np.multiply.outer(line, line), compressed=0.5)
    powers, counted = model.powers(1, 2), model.counted(1, 2)
    assert (counted >= powers).all()
    np.testing.assert_allclose(counted, np.sqrt(powers * powers.max()))
    np.testing.assert_allclose(replace(model, compressed=1).counted(1, 2), powers.max())
    plain = GaussianNoise(2.0, np.multiply.outer(line, line))
    np.testing.assert_array_equal(plain.counted(1, 2), powers)
    # The white noise that comes nearest: the power of the lower half.
    assert replace(model, compressed=1).white(1, 2) == pytest.approx(np.sqrt(powers.max()))
    assert GaussianNoise(2.0).white(3, 2) == pytest.approx(2)
    assert GaussianNoise(2.0).white(1, 1) == pytest.approx(2)
    lower = np.concatenate([line[:16], line[48:]])
    assert plain.white(1, 2) == pytest.approx(2 * lower.mean())


def test_opponent_colours_of_different_noise_are_not_channels_of_the_input() -> None:
    noise = GaussianNoise([0.5, 9.0, 9.0], opponent=True)
    assert not noise.is_white
    assert noise.white_sigma is None
    assert GaussianNoise(2.0, opponent=True).is_white


def test_the_noise_of_a_camera_has_no_law_by_place() -> None:
    noise = GaussianNoise(2.0, opponent=True)
    assert not noise.has_law
    assert not Mixture([Impulses(0.1, 0, 255), noise]).has_law
    assert Mixture([Impulses(0.1, 0, 255), GaussianNoise(2.0)]).has_law


# ---- words, files, other strengths


def test_words() -> None:
    white, varying = GaussianNoise(0.1), GaussianNoise(2.0, intensities=[0, 1], strengths=[0.5, 1.5])
    assert white.describe() == "white noise: sigma 0.1"
    nothing = GaussianNoise(np.zeros(3))
    assert nothing.describe() == Mixture([nothing, nothing]).describe() == "no noise"
    assert Mixture([Impulses(0.1, 0, 255), nothing]).describe() == Impulses(0.1, 0, 255).describe()
    assert varying.describe() == "white noise: sigma 1 in dark parts to 3 in light parts"
    assert white.is_white
    assert not varying.is_white
    box = GaussianNoise.from_kernel(np.ones((3, 3)), 5.0)
    assert box.describe() == "correlated noise: neighbouring pixels share their noise, over about 3 pixels, sigma 5"
    hardly = GaussianNoise.from_kernel(np.array([[0, 0.05, 0], [0.05, 1, 0.05], [0, 0.05, 0]]), 5.0)
    for alike in (hardly, GaussianNoise(5.0, hardly.spectrum, opponent=True)):  # nobody's neighbour shares its noise
        assert alike.describe() == "nearly white noise: sigma 5"
    camera = GaussianNoise(2.0, box.spectrum, [0, 1], [1, 2], opponent=True, compressed=0.5)
    assert camera.describe() == (
        "noise of a camera: neighbouring pixels share their noise, over about 3 pixels, "
        "sigma 2 in dark parts to 4 in light parts"
    )
    assert repr(white) == "GaussianNoise(0.1)"
    assert repr(camera) == "GaussianNoise(2.0, spectrum of 1 x 64 x 64, 2 intensities, opponent, compressed 0.5)"
    assert GaussianNoise.from_kernel(np.ones((7, 1))).range() == GaussianNoise.from_kernel(np.ones((1, 7))).range() == 6


def test_a_stronger_one_and_one_from_a_file_are_the_same_noise() -> None:
    model = GaussianNoise(
        [1.0, 2.0, 3.0], GaussianNoise.from_kernel(KERNELS["slanted"]).spectrum, [0, 1], [1, 2], opponent=True
    )
    twice = model.scaled(2.0)
    np.testing.assert_allclose(twice.powers(3, 2), 4 * model.powers(3, 2))
    zeros = np.zeros((8, 9, 3))
    samples = [m.sample(zeros, rng=0, channel_axis=-1) for m in (model, twice)]
    np.testing.assert_allclose(samples[1], 2 * samples[0], rtol=1e-12)
    assert np.ptp(model.scaled(0.0).sample(zeros, rng=0, channel_axis=-1)) == 0
    assert model.is_white is twice.is_white is False


def test_a_model_changes_no_array_that_it_was_given() -> None:
    spectrum, places = np.full((64, 64), 7.0), np.array([0.0, 1.0])
    GaussianNoise(1.0, spectrum, places, [1, 2])
    assert np.all(spectrum == 7)
    assert places.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GaussianNoise(-1.0), "sigma: got -1, expected numbers >= 0"),
        (lambda: GaussianNoise(np.nan), "sigma: got .*NaN"),
        (lambda: GaussianNoise("much"), "sigma: "),
        (lambda: GaussianNoise([[1.0]]), "sigma: "),
        (lambda: GaussianNoise(True), "sigma: got True, expected a real numeric array"),
        (lambda: GaussianNoise([1.0, 2.0], opponent=True), r"opponent: got sigma of shape \(2,\)"),
        (lambda: GaussianNoise(1.0, -np.ones((8, 8))), "spectrum: got -1, expected powers >= 0"),
        (lambda: GaussianNoise(1.0, np.zeros((8, 8))), "spectrum: got zeros alone"),
        (lambda: GaussianNoise(1.0, [np.ones((8, 8)), np.zeros((8, 8))]), "spectrum: got zeros alone in a channel"),
        (lambda: GaussianNoise(1.0, np.full((8, 8), np.nan)), "spectrum: got .*NaN"),
        (lambda: GaussianNoise(1.0, np.full((8, 8), np.inf)), "spectrum: got .*inf"),
        (lambda: GaussianNoise(1.0, np.ones((8, 1))), r"spectrum: got shape \(8, 1\), expected power by both"),
        (lambda: GaussianNoise(1.0, 1.0), "spectrum: "),
        (lambda: GaussianNoise([1.0, 2.0], np.ones((3, 8, 8))), "spectrum: got 3 channels, expected 1 or 2"),
        (lambda: GaussianNoise(1.0, intensities=[0, 1]), "strengths: give them together with intensities"),
        (lambda: GaussianNoise(1.0, strengths=[0, 1]), "strengths: give them together with intensities"),
        (lambda: GaussianNoise(1.0, intensities=[0, 1, 1], strengths=[1, 1, 1]), "intensities: .*increasing"),
        (lambda: GaussianNoise(1.0, intensities=[1, 0], strengths=[1, 1]), "intensities: .*increasing"),
        (lambda: GaussianNoise(1.0, intensities=[0, 1], strengths=[1, 1, 1]), "got 2 numbers for 3 strengths"),
        (lambda: GaussianNoise(1.0, intensities=[0, np.nan], strengths=[1, 1]), "intensities: got .*NaN"),
        (lambda: GaussianNoise(1.0, intensities=[0, 1], strengths=[1, -1]), "strengths: got negative"),
        (lambda: GaussianNoise(1.0, intensities=[0, 1], strengths=[0, 0]), "strengths: got .*zeros alone"),
        (lambda: GaussianNoise.from_kernel(np.zeros((3, 3))), "spectrum: got zeros alone"),
        (lambda: GaussianNoise.from_kernel(np.ones(33)), r"kernel: got shape \(33,\), expected at most 32"),
        (lambda: GaussianNoise.from_kernel(np.ones((2, 2, 2))), "kernel: "),
        (lambda: GaussianNoise(1.0).scaled(-1), "factor: got -1"),
        (lambda: GaussianNoise([1.0, 2.0]).sample(np.zeros((8, 8))), r"with 2 channel.* has 1"),
        (lambda: GaussianNoise(1.0, opponent=True).sample(np.zeros((8, 8))), r"with 3 channel.* has 1"),
        (lambda: GaussianNoise(1.0, np.ones((2, 8, 8))).powers(3, 2), r"with 2 channel.* has 3"),
        (lambda: GaussianNoise(1.0, np.ones(8)).sample(np.zeros((8, 8))), "got an image, but the spectrum of a signal"),
        (lambda: GaussianNoise(1.0, np.ones((8, 8))).sample(np.zeros(8)), "got a signal, but a spectrum of 64 x 64"),
        (lambda: GaussianNoise(1.0, places=[1, 2]).reduce(np.ones((8, 8, 1))), "places along 1 axes, and samples"),
        (lambda: nl.denoise(np.zeros((9, 9)), noise=GaussianNoise(1.0, np.ones(8))), "but the spectrum of a signal"),
        (lambda: nl.denoise(np.eye(9), 1.0, noise=GaussianNoise(1.0)), "sigma: got a value beside GaussianNoise"),
    ],
)  # fmt: skip
def test_bad_input(make: Any, message: str) -> None:
    with pytest.raises(nl.InputError, match=message):
        make()
