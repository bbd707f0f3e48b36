"""What denoising is told about the noise: one strength, a map, one a channel, counts; and where a rule stops it."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
import pytest

from nlflow import InputError, NlflowWarning, Poisson, denoise, estimate_sigma
from nlflow.denoising import frame
from nlflow.denoising.frame import Spread, channels_for
from nlflow.denoising.noise import GaussianNoise, Impulses, LogSpeckle, Mixture, NoncentralChi, Rician, Speckle
from tests.pictures import ON_GROUPS, QUALITIES, SLOWLY, Floats, noisy, picture, rms, steps_and_waves, waves


def levels(shape: tuple[int, ...], low: float = 0.3, high: float = 1.8) -> Floats:
    """Noise that grows from column to column."""
    return np.linspace(low, high, shape[-1]) * np.ones(shape)


# ---- maps


@pytest.mark.slow
@pytest.mark.numerical
@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("shape", [(56, 56), (700,)])
@pytest.mark.sampled(2)
def test_a_map_of_the_noise_helps_where_the_noise_varies(quality: str, shape: tuple[int, ...]):
    clean = 5 * waves(*shape) if len(shape) == 2 else 4 * steps_and_waves(*shape)
    level = levels(shape)
    value = noisy(clean, level)
    mean = float(np.sqrt(np.mean(level**2)))
    told, info = denoise(value, level, quality=quality, return_info=True)
    untold = denoise(value, mean, quality=quality)
    assert rms(told / level, clean / level) < 0.92 * rms(untold / level, clean / level)
    assert rms(told, clean) < 1.02 * rms(untold, clean)
    assert rms(told, clean) < 0.6 * mean
    assert info.sigma == pytest.approx(mean)
    assert "varying" in info.noise
    assert not info.sigma_estimated


@pytest.mark.parametrize("quality", SLOWLY)
def test_a_constant_map_is_its_number(quality: str):
    value = noisy(5 * waves(30, 33), 1.3)
    expected, info = denoise(value, 1.3, quality=quality, return_info=True)
    result, told = denoise(value, np.full(value.shape, 1.3), quality=quality, return_info=True)
    np.testing.assert_array_equal(result, expected)
    assert told.noise == info.noise
    colour = np.stack([value, value[::-1], value + 1], axis=-1)
    options: dict[str, Any] = {"quality": quality, "channel_axis": -1}
    expected = denoise(colour, 1.3, **options)
    for same in ([1.3] * 3, np.full(colour.shape, 1.3), np.full(value.shape, 1.3).tolist()):
        np.testing.assert_array_equal(denoise(colour, same, **options), expected)


@pytest.mark.parametrize("quality", SLOWLY)
def test_a_map_follows_scale_shift_and_channels(quality: str):
    value, level = noisy(5 * waves(30, 34), levels((30, 34))), levels((30, 34))
    expected = denoise(value, level, quality=quality)
    np.testing.assert_allclose(denoise(256 * value, 256 * level, quality=quality), 256 * expected, rtol=1e-9, atol=1e-9)
    colour = np.stack([value, -value], axis=1)
    each = np.stack([level, level], axis=1)
    options: dict[str, Any] = {"quality": quality, "channel_axis": 1}
    np.testing.assert_array_equal(denoise(colour, each, **options), denoise(colour, level, **options))


@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
@pytest.mark.parametrize("where", ["half", "dots", "all but one"])
@pytest.mark.sampled(2)
def test_samples_without_noise_are_kept_and_the_others_denoised(quality: str, where: str):
    clean, (y, x) = 4 * waves(48, 48), np.mgrid[:48, :48]
    free = {"half": x < 24, "dots": (x % 5 == 0) & (y % 4 == 0), "all but one": (x != 20) | (y != 20)}[where]
    level = np.where(free, 0.0, 1.0)
    value = noisy(clean, level)
    result = denoise(value, level, quality=quality)
    np.testing.assert_array_equal(result[free], value[free])
    assert rms(result[~free], clean[~free]) < (0.75 if where != "all but one" else 2)


@pytest.mark.parametrize("quality", QUALITIES)
def test_a_map_of_zeros_means_no_noise(quality: str):
    value = noisy(waves(12, 12))
    result, info = denoise(value, np.zeros((12, 12)), quality=quality, return_info=True)
    np.testing.assert_array_equal(result, value)
    assert "no noise" in info.stopped_by


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize(
    ("sigma", "axis", "message"),
    [
        (np.ones((9, 10)), None, r"sigma: got an array of shape \(9, 10\), expected a number, \(12, 10\) for a map$"),
        ([1.0, 2.0], None, r"sigma: got an array of shape \(2,\), expected a number, \(12, 10\) for a map$"),
        (np.ones(10), None, r"sigma: got an array of shape \(10,\)"),
        (np.ones((12, 10, 2)), None, r"sigma: got an array of shape \(12, 10, 2\)"),
        ([1.0] * 11, 0, r"sigma: got an array of shape \(11,\), .*\(10,\) for a map, \(12,\) for one number a channel"),
        (np.ones((10, 12)), 0, r"sigma: got an array of shape \(10, 12\)"),
        (-np.ones((12, 10)), None, "sigma: got -1, expected values >= 0, the noise in the units of the input"),
        ([1.0] * 11 + [-2.0], 0, "sigma: got -2, expected values >= 0"),
        (np.full((12, 10), np.nan), None, "sigma: got 120 NaN or infinite"),
        ([], None, "sigma: got an empty array"),
        ([[1.0], [1.0, 2.0]], None, "sigma: got"),
        ([["a"]], None, "sigma: got dtype"),
        (-1, None, r"sigma: got -1, .*>= 0; the noise in the units of the input"),
        (math.nan, None, "sigma: got nan"),
        (math.inf, None, "sigma: got inf"),
        ("25", None, "sigma: got '25'"),
        (True, None, "sigma: got True"),
    ],
)  # fmt: skip
def test_unusable_noise_is_refused(quality: str, sigma: Any, axis: int | None, message: str):
    with pytest.raises(InputError, match=message):
        denoise(noisy(waves(12, 10)), sigma, quality=quality, channel_axis=axis)


# ---- one number a channel


@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
@pytest.mark.parametrize("channels", [2, 3, 5])
@pytest.mark.sampled(2)
def test_channels_may_have_noise_of_their_own(quality: str, channels: int):
    clean = np.stack([(1 + c) * waves(40, 40) for c in range(channels)], axis=-1)
    sigma = np.linspace(0.1, 0.6, channels)
    value = noisy(clean, sigma)
    options: dict[str, Any] = {"quality": quality, "channel_axis": -1}
    told, info = denoise(value, sigma, return_info=True, **options)
    mean = float(np.sqrt(np.mean(sigma**2)))
    untold = denoise(value, mean, **options)
    # One fidelity for all channels, as the flow of pixels has it, gains little from it.
    share = 1.1 if quality == "pixels" else 0.9
    assert rms(told / sigma, clean / sigma) < share * rms(untold / sigma, clean / sigma)
    assert info.sigma == pytest.approx(mean)
    assert info.noise == "white noise"
    # Units of a channel are its own business: the same bits, since everything happens in units of the noise.
    units = 2.0 ** np.arange(channels)
    np.testing.assert_array_equal(denoise(units * value, units * sigma, **options), units * told)


@pytest.mark.numerical
@pytest.mark.parametrize("quality", QUALITIES)
def test_a_channel_without_noise_is_kept(quality: str):
    clean = np.stack([waves(30, 30)] * 3, axis=0)
    sigma = np.array([0.2, 0.0, 0.2])
    value = noisy(clean, sigma[:, None, None])
    result = denoise(value, sigma, quality=quality, channel_axis=0)
    np.testing.assert_array_equal(result[1], clean[1])
    # To the flow of pixels no two patches are alike then, and it leaves everything as it is.
    assert rms(result[::2], clean[::2]) < (0.21 if quality == "pixels" else 0.15)


@pytest.mark.numerical
@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_channels_are_turned_without_loss(channels: int):
    f = np.random.default_rng(0).normal(size=(7, 6, channels)) + np.arange(channels)
    turn = channels_for(channels, Spread.of(f).moments)
    np.testing.assert_allclose(turn @ turn.T, np.eye(channels), atol=1e-14)
    if channels == 3:
        np.testing.assert_allclose(np.abs(turn[0]), math.sqrt(1 / 3))
    else:
        power = np.mean((f @ turn.T) ** 2, axis=(0, 1))
        assert power.tolist() == sorted(power, reverse=True)


@pytest.mark.parametrize("quality", SLOWLY)
def test_channels_help_each_other(quality: str):
    grey = np.repeat(picture(48)[..., None], 3, axis=-1)
    value = noisy(grey)
    together = denoise(value, 0.1, quality=quality, channel_axis=-1)
    apart = np.stack([denoise(value[..., c], 0.1, quality=quality) for c in range(3)], axis=-1)
    assert rms(together, grey) < 0.9 * rms(apart, grey)


# ---- unknown noise


@pytest.mark.parametrize("quality", SLOWLY)
@pytest.mark.filterwarnings("ignore:the noise was hard to find out")  # of 48 x 48 samples
def test_the_noise_is_estimated_when_it_is_not_given(quality: str):
    value = noisy(picture(48))
    result, info = denoise(value, quality=quality, return_info=True)
    assert info.sigma_estimated
    assert info.sigma == estimate_sigma(value) == pytest.approx(0.1, rel=0.3)
    np.testing.assert_array_equal(result, denoise(value, info.sigma, quality=quality))


# ---- counts


def counted(scale: float, seed: int = 0, shape: tuple[int, int] = (56, 56)) -> tuple[Floats, Floats]:
    expected = scale * (1.2 + waves(*shape) - waves(*shape).min())
    return expected, np.random.default_rng(seed).poisson(expected)


@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
@pytest.mark.parametrize("scale", [1.0, 6.0, 80.0])
@pytest.mark.sampled(2)
def test_counts_come_back_with_their_mean_and_closer_than_when_taken_for_gaussian(quality: str, scale: float):
    expected, counts = counted(scale)
    result, info = denoise(counts, noise="poisson", quality=quality, preserve_range=True, return_info=True)
    assert np.mean(result) == pytest.approx(np.mean(expected), rel=0.03)
    assert result.min() >= 0
    spread = np.sqrt(expected)
    taken = denoise(counts, float(np.sqrt(np.mean(expected))), quality=quality, preserve_range=True)
    assert rms(result / spread, expected / spread) < rms(taken / spread, expected / spread)
    assert rms(result / spread, expected / spread) < (0.55 if quality == "pixels" else 0.5)
    assert info.noise.startswith("counts: 1 a count")
    assert info.model["kind"] == "poisson"
    assert info.sigma == pytest.approx(1)
    assert not info.sigma_estimated


@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
def test_a_camera_is_a_model_of_its_own(quality: str):
    expected, counts = counted(8.0)
    model = Poisson(gain=2.5, sigma=4.0, offset=100.0)
    value = noisy(2.5 * counts + 100, 4.0)
    result = denoise(value, noise=model, quality=quality)
    assert np.mean(result) == pytest.approx(np.mean(value), rel=0.01)
    assert rms(result, 2.5 * expected + 100) < 0.45 * rms(value, 2.5 * expected + 100)
    # The units do not matter.
    scaled = Poisson(gain=5.0, sigma=8.0, offset=-6.0)
    np.testing.assert_allclose(denoise(2 * value - 206, noise=scaled, quality=quality), 2 * result - 206, atol=1e-3)


def test_units_that_are_no_counts_are_doubted():
    """A camera's 16 bits have several units for each count: taken for counts, next to none of the noise goes."""
    expected, counts = counted(40.0)
    units = 16.0 * counts + 100
    with pytest.warns(NlflowWarning, match=r"'poisson' .* times the noise of such counts.*gain=") as told:
        denoise(units, noise="poisson", quality="fast")
    level = re.search(r"about ([\d.]+) times", str(told[0].message))
    assert level is not None
    even = np.std(2 * np.sqrt(units + 0.375) - 2 * np.sqrt(16 * expected + 100.375))  # 1 for counts
    assert float(level[1]) == pytest.approx(even, rel=0.15)
    denoise(units, noise=Poisson(gain=16, offset=100), quality="fast")  # which is told, and no warning says more
    denoise(counts.astype(float), noise="poisson", quality="fast")
    denoise(units, noise=Poisson(), quality="fast")  # who names the model has chosen its gain


@pytest.mark.parametrize("quality", SLOWLY)
def test_counts_of_every_type(quality: str):
    _, counts = counted(6.0, shape=(24, 24))
    expected = denoise(counts.astype(np.float64), noise="poisson", quality=quality)
    for dtype in (np.uint8, np.int16, np.uint16, np.int64, np.float32):
        result = denoise(counts.astype(dtype), noise="poisson", quality=quality, preserve_range=True)
        np.testing.assert_allclose(result, expected, atol=0.02)
    colour = np.stack([counts, counts[::-1]], axis=0)
    result = denoise(colour, noise="poisson", quality=quality, channel_axis=0, preserve_range=True)
    assert result.shape == colour.shape


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("value", [0, 1, 250])
def test_constant_counts_are_returned_unchanged(quality: str, value: int):
    counts = np.full((9, 9), value)
    np.testing.assert_array_equal(denoise(counts, noise="poisson", quality=quality, preserve_range=True), value)


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        ([[1.0, -3.0], [2.0, 0.0]], {"noise": "poisson"}, r"image: got 1 value\(s\) below offset=0, the smallest -3, "),
        ([[1.0, 5.0]], {"noise": Poisson(offset=2.0)}, r"image: got 1 value\(s\) below offset=2"),
        (
            [[1.0, 5.0]],
            {"noise": "poisson", "sigma": 1.0},
            "sigma: got a value with noise='poisson', where .* leave it",
        ),
        (
            [[1.0, 5.0]],
            {"noise": "speckle"},
            "noise: got 'speckle', expected one of 'auto', 'white', 'poisson', 'rician', 'impulses', 'hot' or a model",
        ),
        ([[1.0, 5.0]], {"noise": Poisson}, "noise: got <class"),
        ([[1.0, 5.0]], {"noise": None}, "noise: got None"),
    ],
)
def test_unusable_counts_are_refused(value: Any, options: dict[str, Any], message: str):
    for quality in QUALITIES:
        with pytest.raises(InputError, match=message):
            denoise(np.array(value), quality=quality, **options)


# ---- rules to stop


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> list[list[Floats]]:
    """Paths that a rule chose from, in units of the noise."""
    seen: list[list[Floats]] = []
    select = frame.select

    def watched(rule: str, f: Floats, path: list[Floats], *rest: Any) -> Any:
        seen.append(path)
        return select(rule, f, path, *rest)

    monkeypatch.setattr(frame, "select", watched)
    return seen


@pytest.mark.slow
@pytest.mark.numerical
@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.sampled(2)
def test_sure_is_close_to_the_error_and_takes_the_least(quality: str, seed: int, paths: list[list[Floats]]):
    clean = 30 * waves(64, 64)
    value = noisy(clean, 10.0, seed)
    result, info = denoise(value, 10.0, quality=quality, stopping="sure", seed=seed, return_info=True)
    errors = [rms(10 * u[..., 0] + value.mean(), clean) ** 2 for u in paths[0]]
    assert len(errors) > 2
    assert rms(result, clean) ** 2 == pytest.approx(errors[info.steps - 1], rel=1e-6)
    # The standard deviation of the estimate is about sqrt(2/N) sigma^2 = 2.2.
    assert info.risk == pytest.approx(errors[info.steps - 1], abs=7)
    assert errors[info.steps - 1] < min(errors) + 7
    assert "SURE" in info.stopped_by


@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
def test_sure_knows_channels_and_maps(quality: str):
    # Nothing can be done about the noise of the first channel, and much about that of the second.
    clean = np.stack([100 * np.random.default_rng(9).normal(size=(48, 48)), 60 * waves(48, 48)], axis=-1)
    sigma = np.array([3.0, 30.0])
    options: dict[str, Any] = {"quality": quality, "stopping": "sure", "return_info": True}
    result, info = denoise(noisy(clean, sigma), sigma, channel_axis=-1, **options)
    deviation = np.sqrt(np.sum(sigma**4) / clean.size)
    assert info.risk == pytest.approx(rms(result, clean) ** 2, abs=4 * deviation)
    clean, level = 5 * waves(56, 56), levels((56, 56))
    result, info = denoise(noisy(clean, level), level, **options)
    deviation = np.sqrt(2 * np.mean(level**4) / clean.size)
    assert info.risk == pytest.approx(rms(result, clean) ** 2, abs=4 * deviation)


@pytest.mark.numerical
@pytest.mark.parametrize("quality", QUALITIES)
def test_discrepancy_takes_the_residual_nearest_to_the_noise(quality: str, paths: list[list[Floats]]):
    clean = 5 * waves(48, 48)
    value = noisy(clean, 1.0)
    result, info = denoise(value, 1.0, quality=quality, stopping="discrepancy", return_info=True)
    residuals = [rms(u[..., 0] + value.mean(), value) for u in paths[0]]
    best = int(np.argmin(np.abs(np.array(residuals) - 1)))
    np.testing.assert_allclose(result, paths[0][best][..., 0] + value.mean(), atol=1e-6)
    assert info.residual == pytest.approx(residuals[best], rel=1e-5)
    assert info.steps == best + 1
    assert info.risk is None
    assert info.stopped_by.startswith("discrepancy: rms residual of ")


@pytest.mark.parametrize("quality", ON_GROUPS)
def test_a_rule_chooses_from_the_path_of_the_preset(quality: str, paths: list[list[Floats]]):
    value = noisy(5 * waves(36, 36), 1.0)
    expected, info = denoise(value, 1.0, quality=quality, return_info=True)
    denoise(value, 1.0, quality=quality, stopping="discrepancy")
    assert len(paths[0]) == info.steps
    np.testing.assert_allclose(paths[0][-1][..., 0] + value.mean(), expected, atol=1e-6)


@pytest.mark.parametrize("quality", SLOWLY)
def test_only_the_probe_of_sure_is_random(quality: str):
    value = noisy(5 * waves(30, 30), 1.0)
    for options in ({"stopping": "sure"}, {"stopping": "discrepancy"}, {}):
        results = [denoise(value, 1.0, quality=quality, seed=s, return_info=True, **options) for s in (3, 3, 4)]
        np.testing.assert_array_equal(results[0][0], results[1][0])
        assert results[0][1].risk == results[1][1].risk
        if options.get("stopping") == "sure":
            assert results[0][1].risk != results[2][1].risk
        else:
            np.testing.assert_array_equal(results[0][0], results[2][0])


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("rule", ["sure", "discrepancy"])
def test_rules_with_nothing_to_do(quality: str, rule: str):
    for value, sigma in ((np.full((9, 9), 2.0), 1.0), (noisy(waves(9, 9)), 0.0)):
        result, info = denoise(value, sigma, quality=quality, stopping=rule, return_info=True)
        np.testing.assert_array_equal(result, value)
        assert info.risk is None
        assert info.steps == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stopping": "never"}, "stopping: got 'never', expected one of 'discrepancy', 'sure'"),
        ({"seed": -1}, "seed: got -1"),
        ({"seed": 0.5}, r"seed: got 0\.5"),
        (
            {"quality": "pixels", "steps": 3, "stopping": "sure"},
            "steps: got 3 together with stopping='sure'; leave one",
        ),
    ],
)
def test_unusable_rules_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        denoise(noisy(waves(9, 9)), 0.1, **options)


@pytest.mark.parametrize("quality", SLOWLY)
def test_a_channel_whose_noise_no_sample_shows_is_kept(quality: str) -> None:
    clean = 5 * waves(30, 33)
    image = np.stack([clean, noisy(clean, 1.0)], axis=-1)
    result = denoise(image, [1e-170, 1.0], channel_axis=-1, quality=quality)
    np.testing.assert_array_equal(result[..., 0], clean)
    assert np.isfinite(result).all()
    assert rms(result[..., 1], clean) < rms(image[..., 1], clean)


def test_a_sigma_beside_an_open_model_is_its_strength() -> None:
    magnitudes = Rician(5.0).sample(np.full((40, 40), 60.0), rng=0)
    expected = denoise(magnitudes, noise=Rician(5.0), quality="pixels")
    assert np.array_equal(denoise(magnitudes, 5.0, noise=Rician(), quality="pixels"), expected)
    assert np.array_equal(denoise(magnitudes, 5.0, noise="rician", quality="pixels"), expected)
    with pytest.raises(InputError, match="sigma"):
        denoise(magnitudes, 5.0, noise=Rician(4.0), quality="pixels")


def test_what_a_mixture_leaves_open_is_found_part_by_part() -> None:
    noisy = Mixture([Impulses(0.05, 0, 255), Rician(10.0)]).sample(np.pad(np.full((40, 40), 100.0), 30), rng=0)
    noise = Mixture([Impulses(), Rician()])
    known = noise.completed(noisy[..., None])
    density, sigma = known.parts[0].density, known.parts[1].sigma
    assert known == Mixture([Impulses(density, 0.0, 255.0), Rician(sigma)])
    assert (density, sigma) == (pytest.approx(0.05, abs=0.01), pytest.approx(10, rel=0.03))
    assert np.array_equal(known.reduce(noisy[..., None]).samples, noise.reduce(noisy[..., None]).samples)
    result, info = denoise(noisy, noise=noise, strength=1.3, quality="pixels", return_info=True)
    assert info.noise == known.scaled(1.3).describe()
    assert np.array_equal(result, denoise(noisy, noise=known.scaled(1.3), quality="pixels"))
    given = Mixture([Impulses(), Rician(9.0)])
    assert np.array_equal(
        denoise(noisy, 9.0, noise=noise, quality="pixels"), denoise(noisy, noise=given, quality="pixels")
    )
    with pytest.raises(InputError, match="sigma: got a value"):
        denoise(noisy, 9.0, noise=given, quality="pixels")


def test_a_sigma_of_other_units_is_told() -> None:
    """Grey levels for samples from 0 to 1, of which nothing is left, and the other way round."""
    image = noisy(0.3 * waves(32, 33), 0.02)
    with pytest.warns(NlflowWarning, match=r"sigma: got 20, more than the range .* 20 of 255 grey levels is 0\.0784"):
        denoise(image, 20, quality="fast")
    with pytest.warns(NlflowWarning, match="sigma: got 20, more than the range"):
        denoise(image, noise=GaussianNoise(20.0), quality="fast")
    with pytest.warns(NlflowWarning, match="sigma: got 0.08 for integers"):
        denoise(np.uint8(100 * waves(32, 33) % 200), 0.08, quality="fast")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        denoise(0.01 * np.random.default_rng(0).poisson(40 + 9 * waves(32, 33)), noise=Poisson(0.01), quality="fast")


def test_a_strength_counts_for_what_is_left_to_the_flow() -> None:
    noise = Mixture([Impulses(0.1, 0, 255), Speckle(4.0)])
    assert noise.scaled(2.0) == Mixture([Impulses(0.1, 0, 255), Speckle(1.0)])


@pytest.mark.parametrize(
    "noise", ["rician", Rician(5.0), Speckle(4.0), LogSpeckle(4.34), NoncentralChi(5.0, 4), "white"], ids=str
)
def test_with_no_strength_nothing_is_taken_out(noise: Any) -> None:
    image = 60 + 20 * waves(32, 33)
    result, info = denoise(image, noise=noise, strength=0, return_info=True)
    np.testing.assert_array_equal(result, image)
    assert info.sigma == 0


def test_impulses_are_replaced_whatever_the_strength_and_counts_have_none() -> None:
    image = 60 + 20 * waves(32, 33)
    mixture = Mixture([Impulses(0.05, 0, 255), Speckle(4.0)])
    assert denoise(mixture.sample(image, rng=0), noise=mixture, strength=0).min() > 0
    with pytest.raises(InputError, match="strength: got 0 with counts"):
        denoise(image, noise=Poisson(1.0), strength=0)


@pytest.mark.parametrize("mask", [None, "nan"])
def test_pixels_take_what_a_mixture_leaves_for_white_noise_of_its_strength(mask: str | None) -> None:
    noise = Mixture([Impulses(0.02, 0, 255), GaussianNoise.from_kernel(np.ones((3, 3)), 12.0)])
    noisy = noise.sample(np.full((40, 40), 100.0), rng=0)
    if mask is not None:
        noisy[3, 5:9] = np.nan
    result, info = denoise(noisy, noise=noise, quality="pixels", mask=mask, return_info=True)
    assert info.sigma == pytest.approx(12)
    assert np.std(result) < 0.8 * 12


@pytest.mark.parametrize("sigma", [[0.0, 5.0, 0.0], [5.0, 0.0], [0.0, 5.0, 3.0]])
def test_channels_without_correlated_noise_stay_as_they_are(sigma: list[float]) -> None:
    spectrum = GaussianNoise.from_kernel(np.ones((3, 3)), 1.0).spectrum
    noise = GaussianNoise(sigma, np.repeat(spectrum, len(sigma), axis=0))
    clean = 100 + 30 * np.stack([waves(), waves().T, waves()[::-1]], axis=-1)[..., : len(sigma)]
    z = noise.sample(clean, rng=0, channel_axis=-1)
    result = denoise(z, noise=noise, quality="fast", channel_axis=-1)
    for c, level in enumerate(sigma):
        if level:
            assert rms(result[..., c], clean[..., c]) < 0.9 * rms(z[..., c], clean[..., c])
        else:
            np.testing.assert_array_equal(result[..., c], z[..., c])
