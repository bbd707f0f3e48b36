"""Denoising: its symmetries, what it reports, how good it is, and the flow of pixels that is its fast preset."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import numpy as np
import pytest
from skimage import data
from skimage.restoration import denoise_nl_means

from nlflow import DenoiseInfo, InputError, NlflowWarning, denoise, estimate_sigma
from nlflow.denoising import Options, pixelwise
from nlflow.denoising.frame import Spread
from tests.covering import pairs
from tests.pictures import (
    GROUPS_SLOWLY,
    ON_GROUPS,
    QUALITIES,
    SLOWLY,
    Floats,
    noisy,
    picture,
    psnr,
    rms,
    steps_and_waves,
    waves,
)

SIGMA = 0.1
fast = functools.partial(denoise, quality="pixels")


@pytest.fixture(scope="module")
def image() -> Floats:
    return noisy(picture(48))


@pytest.fixture(scope="module")
def colour() -> Floats:
    side = picture(32)
    return noisy(np.stack([side, side[::-1], side.T], axis=-1))


# ---- symmetries of every preset


def assert_same(result: Floats, expected: Floats, sigma: float = SIGMA) -> None:
    """Equal within the rounding of single precision, in which near ties of patches may be broken otherwise."""
    assert np.median(np.abs(result - expected)) < 3e-4 * sigma
    assert rms(result, expected) < 2e-3 * sigma
    np.testing.assert_allclose(result, expected, atol=0.1 * sigma)


@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
def test_the_result_scales_and_shifts_with_the_input(image: Floats, quality: str):
    image = image[:36]
    expected = denoise(image, SIGMA, quality=quality)
    for scale, shift in ((1e6, 0.0), (1e-6, 0.0), (255.0, -70.0), (-1.0, 0.0), (1.0, 1e6)):
        result = denoise(scale * image + shift, abs(scale) * SIGMA, quality=quality)
        assert_same((result - shift) / scale, expected)
    # A power of two changes no bit, in any precision.
    for dtype, scale in ((np.float32, 2.0**20), (np.float64, 2.0**-20)):
        value = image.astype(dtype)
        result = denoise(value * dtype(scale), scale * SIGMA, quality=quality)
        np.testing.assert_array_equal(result, denoise(value, SIGMA, quality=quality) * dtype(scale))
    whole = np.rint(200 * image).astype(np.int32)
    expected = denoise(whole, 20.0, quality=quality, preserve_range=True)
    result = denoise(1000 * whole + 77, 20_000.0, quality=quality, preserve_range=True)
    assert_same((result - 77) / 1000, expected, 20.0)


@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
def test_the_result_turns_with_the_input(colour: Floats, quality: str):
    expected = denoise(colour, SIGMA, quality=quality, channel_axis=-1)
    for turn in (lambda a: np.swapaxes(a, 0, 1), np.rot90):
        result = denoise(turn(colour), SIGMA, quality=quality, channel_axis=-1)
        assert_same(result, turn(expected))
    grey = noisy(picture(36), seed=4)
    expected = denoise(grey, SIGMA, quality=quality)
    for turn in (np.flipud, np.fliplr, np.transpose):
        assert_same(denoise(turn(grey), SIGMA, quality=quality), turn(expected))


@pytest.mark.numerical
@pytest.mark.parametrize("quality", QUALITIES)
def test_a_signal_may_run_backwards(quality: str):
    signal = noisy(steps_and_waves(300))
    assert_same(denoise(signal[::-1], SIGMA, quality=quality)[::-1], denoise(signal, SIGMA, quality=quality))


@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
def test_single_and_double_precision_agree(image: Floats, quality: str):
    expected = denoise(image, SIGMA, quality=quality)
    assert rms(denoise(image.astype(np.float32), SIGMA, quality=quality), expected) < 1e-5


@pytest.mark.parametrize("quality", SLOWLY)
@pytest.mark.filterwarnings("ignore:the noise was hard to find out")  # of 48 x 48 samples
def test_a_call_repeats_itself(image: Floats, quality: str):
    results = [denoise(image, quality=quality) for _ in range(2)]
    np.testing.assert_array_equal(*results)


def test_balanced_is_the_default(image: Floats):
    result, info = denoise(image, SIGMA, return_info=True)
    assert info.quality == "balanced"
    np.testing.assert_array_equal(result, denoise(image, SIGMA, quality="balanced"))


# ---- what is reported


@pytest.mark.parametrize("quality", SLOWLY)
def test_the_report_is_in_the_units_of_the_input(image: Floats, quality: str):
    result, info = denoise(image, SIGMA, quality=quality, return_info=True)
    scaled, other = denoise(50 * image, 50 * SIGMA, quality=quality, return_info=True)
    assert isinstance(info, DenoiseInfo)
    assert info.sigma == SIGMA
    assert not info.sigma_estimated
    assert other.sigma == pytest.approx(50 * SIGMA)
    assert info.residual == pytest.approx(rms(result, image))
    assert other.residual == pytest.approx(rms(scaled, 50 * image))
    assert 0.5 * SIGMA < info.residual < 1.2 * SIGMA
    assert info.noise == "white noise"
    assert info.quality == quality
    assert info.functional.startswith(("E of ", "E on "))
    assert info.risk is None
    assert info.steps >= 1
    assert info.stopped_by
    assert info.tiles == 1
    assert info.memory_bytes > 8 * image.size
    assert info.seconds >= info.compile_seconds >= 0
    assert info.parameters.keys() == other.parameters.keys()


@pytest.mark.parametrize(("quality", "sigma", "rule"), pairs(QUALITIES, [None, 0, SIGMA, "map"], [None, "sure"]))
@pytest.mark.sampled(3)
def test_the_report_goes_into_json(image: Floats, quality: str, sigma: Any, rule: str | None):
    value = image[:32]
    level = np.linspace(0.05, 0.15, 48) + 0 * value if sigma == "map" else sigma
    info = denoise(value, level, quality=quality, stopping=rule, return_info=True)[1]
    told = info.as_dict()
    assert set(told) == set(DenoiseInfo.__dataclass_fields__)
    assert json.loads(json.dumps(told)) == told
    assert all(type(number) in (str, float, int) for number in told["parameters"].values())
    assert (info.risk is None) == (rule is None or sigma == 0)


def test_nothing_done_is_reported_as_such(image: Floats):
    for quality in QUALITIES:
        info = denoise(image, 0, quality=quality, return_info=True)[1]
        assert (info.steps, info.residual, info.functional, info.parameters) == (0, 0.0, "none", {})
        assert info.stopped_by.startswith("returned unchanged: there is no noise to remove")


@pytest.mark.slow
def test_groups_are_reported(image: Floats):
    for quality in ON_GROUPS:
        parameters = denoise(image, SIGMA, quality=quality, return_info=True)[1].parameters
        assert all(
            isinstance(parameters[name], int) for name in ("patch_size", "neighbours", "search_radius", "stride")
        )
        louder = denoise(noisy(picture(48), 0.6), 0.6, quality=quality, return_info=True)[1].parameters
        assert louder["patch_size"] >= parameters["patch_size"]


# ---- quality


@pytest.fixture(scope="module")
def scene() -> Floats:
    return data.camera()[40:168, 180:308].astype(np.float64)


@pytest.mark.numerical
@pytest.mark.slow
def test_more_time_buys_quality(scene: Floats):
    value = noisy(scene, 25.0)
    results = {quality: psnr(scene, denoise(value, 25.0, quality=quality)) for quality in QUALITIES}
    # Measured: 30.16, 30.48 and 30.64 dB.
    assert results["pixels"] > 30.01
    assert results["balanced"] > max(30.33, results["pixels"] + 0.16)
    assert results["best"] > max(30.49, results["balanced"])


@pytest.mark.numerical
@pytest.mark.parametrize("quality", GROUPS_SLOWLY)
@pytest.mark.parametrize("sigma", [0.04, 0.1, 0.2])
def test_groups_are_better_than_pixels_on_a_picture(quality: str, sigma: float):
    clean = picture(64)
    value = noisy(clean, sigma)
    assert rms(denoise(value, sigma, quality=quality), clean) < 0.95 * rms(fast(value, sigma), clean)


@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.6])
@pytest.mark.sampled(2)
def test_signals(quality: str, sigma: float):
    t = np.arange(1200)
    for clean in (np.sign(np.sin(t / 30)), np.sin(t / 12)):
        assert rms(denoise(noisy(clean, sigma), sigma, quality=quality), clean) < 0.6 * sigma


@pytest.mark.numerical
@pytest.mark.parametrize("quality", QUALITIES)
def test_low_noise_does_no_harm(quality: str):
    clean = picture(48)
    assert rms(denoise(noisy(clean, 0.005), 0.005, quality=quality), clean) < 0.005


@pytest.mark.numerical
@pytest.mark.parametrize("quality", QUALITIES)
def test_what_has_no_like_is_kept(quality: str):
    # One bright point in flat noise: averaging alone would spread it.
    clean = np.zeros((32, 32))
    clean[16, 16] = 20 * SIGMA
    assert denoise(noisy(clean), SIGMA, quality=quality)[16, 16] > 17 * SIGMA


# ---- the flow of pixels


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"width": -0.1}, "width: got -0.1"),
        ({"width": 0}, "width: got 0, .*> 0"),
        ({"fidelity": -1}, "fidelity: got -1"),
        ({"steps": 0}, "steps: got 0"),
        ({"steps": 1.5}, r"steps: got 1\.5"),
        ({"patch_size": 4}, "patch_size: got 4, expected an odd integer"),
        ({"patch_size": 0}, "patch_size: got 0"),
        ({"patch_size": -3}, "patch_size: got -3"),
        ({"patch_size": 100_001}, "patch_size: got 100001 for a shape of .*, expected at most"),
        ({"search_radius": 0}, "search_radius: got 0"),
        ({"search_radius": 2.5}, r"search_radius: got 2\.5"),
    ],
)
def test_unusable_keywords_are_refused_by_name(image: Floats, keywords: dict[str, Any], message: str):
    for value in (image, np.full((9, 9), 2.0)):  # even when there is nothing to do
        with pytest.raises(InputError, match=message):
            fast(value, SIGMA, **keywords)


def test_a_window_larger_than_the_image_is_shrunk_with_a_warning():
    tiny = noisy(picture(16))
    with pytest.warns(NlflowWarning, match="search window of 101 nodes .* shrunk to 15 x 15") as caught:
        result = fast(tiny, SIGMA, search_radius=50)
    assert len(caught) == 1
    assert rms(result, fast(tiny, SIGMA, search_radius=7)) < 0.2 * SIGMA


def test_a_default_window_is_shrunk_with_a_warning_too():
    with pytest.warns(NlflowWarning, match="shrunk to 5 x 7"):
        assert fast(noisy(np.zeros((5, 7))), SIGMA).shape == (5, 7)


def test_groups_shrink_without_a_warning():
    for quality in ON_GROUPS:
        assert denoise(noisy(np.zeros((5, 7))), SIGMA, quality=quality).shape == (5, 7)


@pytest.mark.numerical
def test_the_result_stays_in_the_range_of_the_input(image: Floats):
    for options in ({}, {"steps": 5}, {"fidelity": 0.5}, {"fidelity": 0.0}):
        result = fast(image, SIGMA, **options)
        assert image.min() - 1e-6 <= result.min() <= result.max() <= image.max() + 1e-6


@pytest.mark.numerical
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_that_do_not_fit_are_computed_anew(image: Floats, dtype: Any):
    value = image.astype(dtype)
    expected, stored = fast(value, SIGMA, return_info=True)
    result, info = fast(value, SIGMA, max_memory=300_000, return_info=True)
    np.testing.assert_allclose(result, expected, atol=1e-5)
    assert "computed anew" in info.method
    assert info.memory_bytes < 300_000 < stored.memory_bytes
    assert info.as_dict().keys() == stored.as_dict().keys()


def test_many_weights_are_not_stored(image: Floats, monkeypatch: pytest.MonkeyPatch):
    expected = fast(image, SIGMA)
    monkeypatch.setattr(pixelwise, "STORED", 300_000)
    result, info = fast(image, SIGMA, return_info=True)
    np.testing.assert_array_equal(result, expected)
    assert "weights take more than 0.3 MB and are computed anew" in info.method
    assert info.memory_bytes < 300_000


def test_a_shrunk_window_is_reported_once_when_weights_do_not_fit():
    value = noisy(picture(16))
    with pytest.warns(NlflowWarning) as caught:
        _, info = fast(value, SIGMA, search_radius=20, max_memory=50_000, return_info=True)
    assert "computed anew" in info.method
    assert len(caught) == 1


def test_progress_goes_to_stderr_alone(image: Floats, capsys: pytest.CaptureFixture[str]):
    quiet = fast(image, SIGMA, steps=3)
    assert capsys.readouterr() == ("", "")
    np.testing.assert_array_equal(fast(image, SIGMA, steps=3, progress=True), quiet)
    out, err = capsys.readouterr()
    assert out == ""
    assert err != ""


def test_an_interruption_passes_through(image: Floats, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(pixelwise.SemiImplicit, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fast(image, SIGMA)


def test_what_is_asked_for_is_done(image: Floats):
    options: dict[str, Any] = {"width": 0.07, "patch_size": 5, "search_radius": 3, "fidelity": 0.25, "steps": 4}
    info = fast(image, SIGMA, **options, return_info=True)[1]
    assert info.parameters["width"] == pytest.approx(0.07)
    assert (info.parameters["patch_size"], info.parameters["search_radius"], info.steps) == (5, 3, 4)
    assert info.parameters["fidelity_mean"] == pytest.approx(0.25)
    near, far = (rms(fast(image, SIGMA, fidelity=value), image) for value in (10.0, 0.0))
    assert near < 0.2 * far


def test_the_kernel_is_reported_in_the_units_of_the_input(image: Floats):
    info, other = (fast(s * image, s * SIGMA, return_info=True)[1] for s in (1, 50))
    assert other.parameters["width"] == pytest.approx(50 * info.parameters["width"])
    assert info.parameters["fidelity_mean"] > 0
    assert info.method.startswith("stencil: ")


def test_the_default_width_is_a_fixed_part_of_the_spread_of_patch_distances(image: Floats):
    widths = [fast(image, SIGMA, patch_size=p, return_info=True)[1].parameters["width"] for p in (3, 5, 9)]
    assert widths[0] / widths[2] == pytest.approx(math.sqrt(3))
    assert widths[0] > widths[1] > widths[2]


def test_larger_patches_for_more_noise_and_smaller_ones_for_more_channels():
    clean = picture(40)

    def size(value: Floats, sigma: float, **options: Any) -> int:
        return fast(value, sigma, return_info=True, **options)[1].parameters["patch_size"]

    assert [size(noisy(clean, s), s) for s in (0.03, 0.12, 0.4)] == [3, 5, 7]
    assert size(noisy(np.repeat(clean[..., None], 3, axis=-1), 0.12), 0.12, channel_axis=-1) == 3


@pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning")
def test_sigma_is_estimated_in_the_units_of_the_input(image: Floats):
    found = estimate_sigma(image)
    assert estimate_sigma(1000 * image + 5) == pytest.approx(1000 * found, rel=1e-6)
    bytes_of = np.clip(np.rint(255 * image), 0, 255).astype(np.uint8)
    assert estimate_sigma(bytes_of) == pytest.approx(255 * SIGMA, rel=0.3)  # in grey levels
    assert estimate_sigma(image[:1]) > 0
    assert estimate_sigma(np.ones((1, 1))) == estimate_sigma(np.ones((5, 5))) == 0


@pytest.mark.numerical
@pytest.mark.parametrize("sigma", [0.04, 0.1, 0.2])
def test_better_than_nonlocal_means_on_a_picture(sigma: float):
    clean = picture(96)
    value = noisy(clean, sigma)
    peer = min(
        rms(denoise_nl_means(value, patch_size=p, patch_distance=6, h=h * sigma, sigma=sigma), clean)
        for p in (5, 7) for h in (0.5, 0.6, 0.7, 0.8)
    )  # fmt: skip
    ours = rms(fast(value, sigma), clean)
    assert ours < peer
    assert ours < 0.5 * sigma


@pytest.mark.numerical
def test_noise_that_varies_is_met_at_levels_in_between():
    """Where the noise is uniform on large parts, each part gets what it would get on its own."""
    clean = 5 * waves(40, 80)
    level = np.where(np.arange(80) < 40, 0.5, 2.0) + 0 * clean
    value = noisy(clean, level)
    told = fast(value, level)
    for part, sigma in ((slice(0, 30), 0.5), (slice(50, 80), 2.0)):
        alone = fast(value, sigma)[:, part]
        assert rms(told[:, part], alone) < 0.1 * sigma


@pytest.mark.numerical
def test_what_is_told_of_a_map_is_that_of_the_strongest_noise():
    """Levels a factor of 1.5 apart; kernel, mean fidelity and course are those of the last of them."""
    level = np.geomspace(0.5, 0.5 * 1.5**3, 40)[:, None]
    value = noisy(5 * waves(40, 1), level)
    options = Options(patch_size=3, search_radius=5, steps=1)

    def solved(f: Any) -> pixelwise.Outcome:
        return pixelwise.solved(f, pixelwise.Pixels.of(Spread.of(f), 1, options))

    told = pixelwise.solved_by_level(value, level**2, options)
    last = solved(value / level.max())
    assert told.problem.told["parameters"]["fidelity_mean"] == pytest.approx(
        last.problem.told["parameters"]["fidelity_mean"], rel=1e-9
    )
    np.testing.assert_allclose(told.solution.final, last.solution.final, rtol=1e-9)
    first = solved(value / level.min())
    assert told.problem.told["parameters"]["fidelity_mean"] != pytest.approx(
        first.problem.told["parameters"]["fidelity_mean"], rel=1e-2
    )


@pytest.mark.numerical
def test_smoothed_patches_carry_the_noise_that_the_kernel_corrects_for():
    noise = np.random.default_rng(0).normal(size=(300, 300, 1))
    kernel = pixelwise.kernel_for(0.0, 2, 1, None, 3, 5)
    assert float(pixelwise._smoothed(noise).std()) == pytest.approx(kernel.sigma, rel=0.01)
    line = pixelwise.kernel_for(0.0, 1, 1, None, 3, 5)
    assert float(line.sigma) == pytest.approx(math.sqrt(kernel.sigma))
