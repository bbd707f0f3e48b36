"""Coarser images: means and cosines, the noise that they hold, what is left of it in the finer one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.fft import dct, dctn

from nlflow.denoising.noise import GaussianNoise, spectra
from nlflow.errors import InputError
from tests.pictures import Floats

pytestmark = pytest.mark.numerical

SHAPES = [(40, 52, 1), (41, 53, 2), (26, 27, 3), (2, 3, 1), (1, 60, 1), (60, 2), (61, 1), (1, 1, 1), (7, 1, 1)]
BLUR = np.outer([1.0, 2, 3, 2, 1], [1.0, 2, 3, 2, 1])


def ones(shape: tuple[int, ...]) -> Floats:
    return np.ones(shape)


def cosine(shape: tuple[int, ...], orders: tuple[int, ...]) -> Floats:
    """A product of cosines cos(pi k x) that are sampled in the middles of cells of [0, 1]."""
    result = np.ones(shape)
    for axis, (n, k) in enumerate(zip(shape[:-1], orders, strict=True)):
        line = np.cos(np.pi * k * (np.arange(n) + 0.5) / n)
        result = result * line.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return result


# ---- down and up


@pytest.mark.parametrize("shape", SHAPES)
def test_down_halves_what_has_several_samples_and_keeps_means(shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(0).normal(3, 1, shape)
    half = spectra.down(image)
    assert half.shape == (*((n + 1) // 2 for n in shape[:-1]), shape[-1])
    axes = tuple(range(len(shape) - 1))
    np.testing.assert_allclose(half.mean(axis=axes), image.mean(axis=axes), rtol=1e-13)
    np.testing.assert_allclose(spectra.down(7 * ones(shape)), 7 * ones(half.shape), rtol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
def test_cosines_below_the_limit_are_sampled_more_coarsely(shape: tuple[int, ...]) -> None:
    for share in (0.1, 0.3, 0.49):
        orders = tuple(int(share * n) for n in shape[:-1])
        half = spectra.down(cosine(shape, orders))
        np.testing.assert_allclose(half, cosine(half.shape, orders), atol=1e-13)
    above = tuple((n + 1) // 2 for n in shape[:-1])
    if any(n > 1 for n in shape[:-1]):  # none of these cosines is left
        image = cosine(shape, above)
        np.testing.assert_allclose(spectra.down(image), np.zeros_like(spectra.down(image)), atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
def test_up_is_fine_for_what_is_smooth_and_fades_the_rest(shape: tuple[int, ...]) -> None:
    for share in (0.0, 0.06, 0.12):
        orders = tuple(int(share * n) for n in shape[:-1])
        smooth = 5 + cosine(shape, orders)
        np.testing.assert_allclose(spectra.up(spectra.down(smooth), shape), smooth, atol=1e-12)
    # A cosine of the coarse image comes back with the gain of its share of the highest frequency there.
    rows = (shape[0] + 1) // 2
    for order in range(rows):
        orders = (order, *(0 for _ in shape[1:-1]))
        image = cosine(shape, orders)
        found = spectra.up(spectra.down(image), shape)
        share = order / rows
        gain = 1.0 if share <= 0.25 else 0.5 + 0.5 * np.cos(np.pi * (share - 0.25) / 0.75)
        np.testing.assert_allclose(found, gain * image, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_precision_is_that_of_the_input(dtype: Any) -> None:
    image = np.random.default_rng(0).normal(size=(31, 44, 2)).astype(dtype)
    half = spectra.down(image)
    assert half.dtype == spectra.up(half, image.shape).dtype == dtype
    exact = spectra.down(image.astype(np.float64))
    # The transform adds 31 x 44 terms of size 1 in log2 N rounds, each of which rounds once.
    np.testing.assert_allclose(half, exact, atol=2 * np.log2(image.size) * np.finfo(dtype).eps * np.abs(exact).max())


def test_no_smaller_than_a_search_can_use() -> None:
    assert spectra.levels_within((48, 48, 3), 5) == 1
    assert spectra.levels_within((47, 500, 3), 5) == 0
    assert spectra.levels_within((96, 1000, 1), 5) == 2
    assert spectra.levels_within((96, 1000, 1), 1) == 1
    assert spectra.levels_within((1, 1000, 1), 3) == spectra.levels_within((1000, 1), 3) == 3
    assert spectra.levels_within((1, 1, 1), 3) == 0


# ---- noise of coarser images


def power_by_cosine(image: Floats) -> Floats:
    """Power by cosine of order k along each axis, by SciPy's transform."""
    return np.asarray(np.square(dctn(image[..., 0], norm="ortho")))


@pytest.mark.parametrize("shape", [(96, 110), (75, 61), (900,)])
def test_the_noise_of_a_coarser_image_is_the_lower_half_of_the_spectrum(shape: tuple[int, ...]) -> None:
    """The variance, by a mean of squares of which n are as good as independent: sqrt(2/n) is its deviation."""
    kernel = BLUR if len(shape) == 2 else np.array([1.0, 2, 3, 2, 1])
    for model in (GaussianNoise(2.0), GaussianNoise.from_kernel(kernel, 2.0)):
        rng, repeats = np.random.default_rng(0), 12
        spectrum = model.powers(1, len(shape))
        noise = [model.sample(np.zeros(shape), rng=rng)[..., None] for _ in range(repeats)]
        for _ in range(2):
            noise, spectrum = [spectra.down(z) for z in noise], spectra.coarser(spectrum)
            count = noise[0].size * repeats * spectrum.mean() ** 2 / np.square(spectrum).mean()
            measured = np.mean(np.square(noise))
            # And the power between the last frequency that is kept and the limit.
            edge = sum(1 / n for n in noise[0].shape[:-1])
            assert abs(measured / spectrum.mean() - 1) < 5 * np.sqrt(2 / count) + edge


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 12])
def test_spectra_of_any_size_are_halved_about_frequency_zero(size: int) -> None:
    far = np.abs(np.fft.fftfreq(size, 1 / size))  # 0, 1, 2, ... 2, 1
    half = np.abs(np.fft.fftfreq(size // 2, 1 / (size // 2)))
    np.testing.assert_allclose(2 * spectra.coarser(far[None, None])[0, 0], half)


@pytest.mark.parametrize("shape", [(1, 7), (1, 8), (5, 7), (6, 5)])
def test_correlations_of_any_size_are_those_of_both_signs_of_an_offset(shape: tuple[int, int]) -> None:
    draws = np.random.default_rng(0).normal(size=shape)
    power = np.abs(np.fft.fft2(draws)) ** 2
    found = spectra.correlation(power[None])[0]
    assert found.shape == tuple(n - 1 + n % 2 for n in shape)
    middle = tuple(n // 2 for n in found.shape)
    for offset in np.ndindex(found.shape):
        away = tuple(int(a - m) for a, m in zip(offset, middle, strict=True))
        expected = (draws * np.roll(draws, away, (0, 1))).sum() / (draws**2).sum()
        assert found[offset] == pytest.approx(expected, abs=1e-12)


def test_coarser_takes_the_lower_half() -> None:
    line = np.abs(np.fft.fftfreq(64))
    found = spectra.coarser(np.add.outer(line, line)[None])
    expected = np.abs(np.fft.fftfreq(32)) / 2
    np.testing.assert_allclose(found[0], np.add.outer(expected, expected) / 4)
    np.testing.assert_allclose(spectra.coarser(line[None, None])[0, 0], expected / 2)


@pytest.mark.slow
def test_what_remains_is_what_the_finer_image_holds_after_the_coarse_one() -> None:
    """Pure noise, of which the coarse flow leaves a tenth of the power: what is left by frequency."""
    model, size, repeats = GaussianNoise.from_kernel(BLUR), 128, 60
    rng, total = np.random.default_rng(0), np.zeros((size, size))
    for _ in range(repeats):
        f, other = (model.sample(np.zeros((size, size)), rng=rng)[..., None] for _ in range(2))
        half, left = spectra.down(f), np.sqrt(0.1) * spectra.down(other)
        total += power_by_cosine(f - spectra.up(half - left, f.shape)) / repeats
    # What the noise has at each cosine before: the covariance of the samples of a line, there and back.
    line = np.correlate([1.0, 2, 3, 2, 1], [1.0, 2, 3, 2, 1], "full") / 19
    covariance = sum(v * np.roll(np.eye(size), k - 4, axis=1) for k, v in enumerate(line))
    basis = dct(np.eye(size), norm="ortho", axis=0)
    before = np.diag(basis @ covariance @ basis.T)
    measured = total / np.multiply.outer(before, before)
    # Cosine k of 128 has the frequency k/256.
    wanted = spectra.remaining(np.ones((1, 2 * size, 2 * size)))[0, :size, :size]
    shares = (measured / wanted).reshape(32, 4, 32, 4).mean(axis=(1, 3))
    # Means of 16 x 60 squares of Gaussian numbers; the largest of 1024 is below 6 deviations.
    assert np.abs(shares - 1).max() < 6 * np.sqrt(2 / (16 * repeats))
    np.testing.assert_allclose(
        spectra.remaining(model.powers(1, 2))[0], model.powers(1, 2)[0] * spectra.remaining(np.ones((1, 64, 64)))[0]
    )
    np.testing.assert_allclose(spectra.remaining(np.ones((1, 64, 64)))[0, :32, :32], wanted[::4, ::4])


def test_what_remains_of_white_noise() -> None:
    white = np.ones((1, 64, 64))
    left = spectra.remaining(white)[0]
    assert left[0, 0] == pytest.approx(0.1)  # what the coarse flow leaves
    np.testing.assert_array_equal(left[16:49], np.ones((33, 64)))  # the coarse image does not hold these
    assert np.all((left > 0.09) & (left <= 1))
    signal = spectra.remaining(np.ones((1, 1, 64)))[0, 0]
    np.testing.assert_allclose(signal[[0, 4, 16, 32]], [0.1, 0.1, 1, 1])


# ---- how many


@pytest.mark.parametrize("dimension", [1, 2])
def test_noise_is_met_on_coarser_images_as_far_as_it_reaches(dimension: int) -> None:
    x = np.arange(-15, 16)
    wanted = []
    for width in (0.05, 1.0, 2.0, 4.0):
        line = np.exp(-np.square(x / width) / 2)
        kernel = line if dimension == 1 else np.outer(line, line)
        wanted.append(spectra.levels_for(GaussianNoise.from_kernel(kernel).powers(1, dimension), 4))
    assert wanted[0] == 0
    assert wanted == sorted(wanted)
    assert wanted[-1] >= 2
    assert len(set(wanted)) >= 3
    assert spectra.levels_for(GaussianNoise(1.0).powers(3, dimension), 4) == 0
    blue = GaussianNoise.from_kernel(np.array([1.0, -1]) if dimension == 1 else np.array([[1.0, -1], [-1, 1]]))
    assert spectra.levels_for(blue.powers(1, dimension), 4) == 0
    assert spectra.levels_for(GaussianNoise.from_kernel(kernel).powers(1, dimension), 1) == 1


# ---- the recomposition


def test_runs_are_told_the_noise_of_their_size() -> None:
    f = np.random.default_rng(0).normal(size=(100, 130, 2))
    spectrum = GaussianNoise.from_kernel(BLUR).powers(2, 2)
    strength = np.linspace(0.5, 1.5, 130) + np.zeros((100, 1))
    told: list[tuple[Any, ...]] = []

    def run(signal: Floats, own: Floats, relative: Floats, level: int) -> Floats:
        told.append((signal.shape, own, relative, level))
        return signal  # finds no noise: then nothing is taken out of the finer one

    result = spectra.coarse_to_fine(f, spectrum, strength[..., None], 2, run)
    np.testing.assert_array_equal(result, f)
    assert [(shape, level) for shape, _, _, level in told] == [((25, 33, 2), 2), ((50, 65, 2), 1), ((100, 130, 2), 0)]
    np.testing.assert_allclose(told[0][1], spectra.coarser(spectra.coarser(spectrum)))
    np.testing.assert_allclose(told[1][1], spectra.remaining(spectra.coarser(spectrum)))
    np.testing.assert_allclose(told[2][1], spectra.remaining(spectrum))
    for shape, _, relative, _ in told:
        assert relative.shape == (*shape[:2], 1)
        assert relative.mean() == pytest.approx(1, abs=1e-12)
        assert np.abs(np.diff(relative[..., 0], axis=0)).max() < 1e-12

    def nothing(signal: Floats, own: Floats, relative: Floats, level: int) -> Floats:
        return signal if level == 0 else 0 * signal  # all of the coarse image is noise

    low = spectra.coarse_to_fine(f, spectrum, strength[..., None], 1, nothing)
    np.testing.assert_allclose(low, f - spectra.up(spectra.down(f), f.shape), atol=1e-13)


def test_strength_that_rings_below_zero_counts_as_little() -> None:
    strength = np.where(np.arange(96) > 48, 1.9, 0.1) + np.zeros((96, 1))
    least: list[float] = []

    def run(signal: Floats, own: Floats, relative: Floats, level: int) -> Floats:
        least.append(float(relative.min()))
        return signal

    spectra.coarse_to_fine(np.zeros((96, 96, 1)), np.ones((1, 64, 64)), strength[..., None], 1, run)
    assert spectra.down(strength[..., None]).min() < 0.05
    assert min(least) >= 0.05


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: spectra.coarser(None), "spectrum: got None"),
        (lambda: spectra.remaining(np.ones((8, 8))), r"spectrum: got 2 dimension\(s\)"),
        (lambda: spectra.correlation([[[1, np.nan]]]), "spectrum: got 1 NaN"),
        (lambda: spectra.down(np.ones(8)), r"image: got 1 dimension\(s\)"),
        (lambda: spectra.down("picture"), "image: got dtype"),
        (lambda: spectra.up(np.ones((4, 4, 1)), (8, 8)), r"shape: got \(8, 8\), expected that of a finer image"),
        (lambda: spectra.up(np.ones((4, 4, 1)), (8, 2, 1)), r"shape: got \(8, 2, 1\)"),
        (lambda: spectra.up(np.ones((4, 4, 1)), 8), "shape: got 8"),
    ],
)
def test_what_is_no_spectrum_or_image_is_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        call()
