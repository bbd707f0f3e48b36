"""Missing samples and samples to keep: what is hidden is never looked at, what is kept is never changed."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nlflow import DenoiseInfo, InputError, NlflowWarning, Poisson, denoise
from nlflow.denoising.frame import filled
from nlflow.denoising.groupwise import filling_levels
from nlflow.denoising.noise import Impulses
from tests.covering import pairs
from tests.pictures import GROUPS_SLOWLY, QUALITIES, SLOWLY, Floats, both, noisy, rms, steps_and_waves, waves


def hole(shape: tuple[int, ...], scattered: float = 0.03) -> Floats:
    """A block, an edge and a corner of the image, and single samples."""
    missing = np.random.default_rng(5).random(shape) < scattered
    missing[(slice(8, 14),) * len(shape)] = True
    missing[0] = missing[-1] = True
    return missing


@pytest.fixture(scope="module")
def image() -> Floats:
    return noisy(5 * waves(36, 32), 1.0)


HIDDEN: dict[str, Any] = {
    "0": 0.0, "1e30": 1e30, "nan": np.nan, "inf": np.inf, "-inf": -np.inf,
    "noise": np.random.default_rng(2).normal(size=(36, 32)) * 1e3,
}  # fmt: skip


# ---- what is hidden is never looked at


WAYS: list[dict[str, Any]] = [
    {"sigma": 1.0}, {}, {"sigma": 1.0, "stopping": "sure"}, {"sigma": 1.0, "stopping": "discrepancy"}, {"sigma": 0.0},
]  # fmt: skip


@functools.cache
def seen(quality: str, way: int) -> tuple[Floats, DenoiseInfo]:
    image = noisy(5 * waves(36, 32), 1.0)
    return denoise(image, mask=hole(image.shape), quality=quality, return_info=True, **WAYS[way])


@pytest.mark.parametrize(
    ("hidden", "way", "quality"), both(lambda presets: pairs(list(HIDDEN), range(len(WAYS)), presets))
)
@pytest.mark.sampled(6)
def test_the_values_under_a_mask_do_not_matter(image: Floats, hidden: str, way: int, quality: str):
    missing = hole(image.shape)
    expected, info = seen(quality, way)
    assert np.isfinite(expected).all()
    value = np.where(missing, HIDDEN[hidden], image)
    result, told = denoise(value, mask=missing, quality=quality, return_info=True, **WAYS[way])
    np.testing.assert_array_equal(result, expected)
    assert (told.sigma, told.residual, told.risk, told.steps) == (info.sigma, info.residual, info.risk, info.steps)


@pytest.mark.slow
@pytest.mark.parametrize("quality", SLOWLY)
@pytest.mark.sampled(1)
def test_nor_do_they_with_maps_channels_and_signals(image: Floats, quality: str):
    missing = hole(image.shape)
    ramp = np.linspace(0.5, 1.5, 32) + 0 * image
    colour = np.stack([image, image[::-1], -image], axis=0)
    signal = noisy(3 * steps_and_waves(300), 1.0)
    line = hole(signal.shape)
    counts = np.random.default_rng(0).poisson(np.exp(image / 5) + 2).astype(float)
    cases: list[tuple[Floats, Floats, dict[str, Any]]] = [
        (image, missing, {"sigma": ramp}),
        (colour, missing, {"sigma": [1.0, 2.0, 1.0], "channel_axis": 0}),
        (signal, line, {"sigma": 1.0}),
        (counts, missing, {"noise": "poisson"}),
        (counts + 50, missing, {"noise": Poisson(offset=50.0)}),
    ]
    for value, where, options in cases:
        expected = denoise(value, mask=where, quality=quality, **options)
        for hidden in (np.nan, -1e20):
            np.testing.assert_array_equal(
                denoise(np.where(where, hidden, value), mask=where, quality=quality, **options), expected
            )


def test_the_map_under_a_mask_does_not_matter(image: Floats):
    missing, level = hole(image.shape), 1 + 0.5 * np.cos(np.arange(32) / 9) + 0 * image
    for quality in ("pixels", "balanced"):
        expected = denoise(image, level, mask=missing, quality=quality)
        result = denoise(image, np.where(missing, 1e9, level), mask=missing, quality=quality)
        np.testing.assert_array_equal(result, expected)


def test_the_noise_is_estimated_from_what_is_there(image: Floats):
    missing = np.random.default_rng(6).random(image.shape) < 0.02
    info = denoise(image + 100, mask=missing, quality="pixels", return_info=True)[1]
    assert info.sigma_estimated
    assert info.sigma == pytest.approx(1, rel=0.35)


@pytest.mark.parametrize("quality", SLOWLY)
def test_what_is_not_finite_is_missing_when_asked_for(image: Floats, quality: str):
    missing = hole(image.shape)
    value = np.where(missing, np.nan, image)
    value[20, 20] = np.inf
    missing[20, 20] = True
    np.testing.assert_array_equal(
        denoise(value, 1.0, mask="nan", quality=quality), denoise(value, 1.0, mask=missing, quality=quality)
    )
    with pytest.raises(InputError, match="image: got 1 infinite"):
        denoise(value, 1.0, quality=quality)
    with pytest.raises(InputError, match="image: got 1 infinite"):
        denoise(value, 1.0, quality=quality, mask=missing & (value != np.inf))
    # Nothing is missing in what has no NaN.
    np.testing.assert_array_equal(
        denoise(image, 1.0, mask="nan", quality=quality), denoise(image, 1.0, quality=quality)
    )


@pytest.mark.parametrize("quality", SLOWLY)
def test_a_mask_that_hides_nothing_changes_nothing(image: Floats, quality: str):
    none = np.zeros(image.shape, bool)
    expected = denoise(image, 1.0, quality=quality)
    np.testing.assert_allclose(denoise(image, 1.0, mask=none, quality=quality), expected, atol=1e-12)
    np.testing.assert_array_equal(denoise(image, 1.0, keep=none, quality=quality), expected)


@pytest.mark.parametrize("quality", SLOWLY)
def test_a_pixel_is_missing_where_any_channel_is(image: Floats, quality: str):
    colour = np.stack([image, image[::-1]], axis=-1)
    each = np.zeros(colour.shape, bool)
    each[4, 5, 0] = each[9, 9, 1] = True
    options: dict[str, Any] = {"channel_axis": -1, "quality": quality}
    expected = denoise(colour, 1.0, mask=each.any(axis=-1), **options)
    np.testing.assert_array_equal(denoise(colour, 1.0, mask=each, **options), expected)
    np.testing.assert_array_equal(denoise(np.where(each, np.nan, colour), 1.0, mask="nan", **options), expected)


# ---- what is refused


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mask", np.ones((36, 32), bool), "mask: hides every sample; leave at least one"),
        ("mask", np.zeros((36, 31), bool), r"mask: got shape \(36, 31\), expected \(36, 32\), one boolean for each"),
        ("mask", np.zeros((36, 32, 1), bool), r"mask: got shape \(36, 32, 1\)"),
        ("mask", True, r"mask: got shape \(\)"),
        ("mask", np.zeros((36, 32), complex), r"mask: got values of type complex128, expected booleans, or numbers"),
        ("mask", np.full((36, 32), np.nan), "mask: got NaN or infinite values, expected numbers"),
        ("mask", "inf", "mask: got 'inf', expected booleans, True where a sample is missing, or 'nan'"),
        ("mask", [[True], [True, False]], "mask: got"),
        ("keep", np.zeros((32, 36), bool), r"keep: got shape \(32, 36\)"),
        ("keep", "nan", "keep: got values of type"),
    ],
)  # fmt: skip
def test_unusable_masks_are_refused(image: Floats, quality: str, name: str, value: Any, message: str):
    with pytest.raises(InputError, match=message):
        denoise(image, 1.0, quality=quality, **{name: value})


def test_a_mask_may_be_drawn_in_numbers_as_one_in_a_file(image: Floats) -> None:
    """What is not 0 is marked; more than two values are told, as soft edges are."""
    where = np.zeros((36, 32), bool)
    where[9:14, 8:20] = True
    expected = denoise(image, 1.0, quality="fast", mask=where, keep=~where)
    for kind, value in (("u1", 255), ("f4", 1), ("i2", -1)):
        drawn, kept = where * np.dtype(kind).type(value), ~where * np.dtype(kind).type(value)
        np.testing.assert_array_equal(denoise(image, 1.0, quality="fast", mask=drawn, keep=kept), expected)
    soft = np.where(where, 255, 0)
    soft[9, 8:20] = 80
    with pytest.warns(NlflowWarning, match="mask: got 3 different values; all but 0 count as marked"):
        np.testing.assert_array_equal(denoise(image, 1.0, quality="fast", mask=soft, keep=~where), expected)


def test_nan_everywhere_hides_everything():
    with pytest.raises(InputError, match="mask: hides every sample"):
        denoise(np.full((5, 5), np.nan), 1.0, mask="nan")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((4, 4), complex), "image: got complex values"),
        (np.zeros((0, 4)), "image: got an empty array"),
        ([[1.0, 2.0], [3.0]], "image: got"),
        ("text", "image: got dtype"),
        (
            "photo.jpg",
            "image: got the name of a file, 'photo.jpg', .*; read the file first, .*imread, or use the command",
        ),
        (Path("photo.jpg"), "image: got the name of a file, .*photo.jpg'"),
        (3.0, r"image: got 0 dimension\(s\)"),
    ],
)
def test_unusable_images_are_refused_as_without_a_mask(value: Any, message: str):
    for mask in ("nan", np.zeros((4, 4), bool)):
        with pytest.raises(InputError, match=message):
            denoise(value, 1.0, mask=mask)


# ---- what is filled in


@pytest.mark.parametrize("quality", QUALITIES)
def test_constants_are_filled_in_with_the_constant(quality: str):
    missing = hole((20, 20))
    for value, options in (
        (3.0, {"sigma": 1.0}),
        (3.0, {}),
        (4.0, {"noise": "poisson"}),
        (7.0, {"noise": Poisson(2, 1, 3)}),
    ):
        result = denoise(np.where(missing, 99.0, value), mask=missing, quality=quality, **options)
        np.testing.assert_array_equal(result, value)


@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
def test_observed_samples_without_noise_are_kept(quality: str):
    clean, missing = 5 * waves(36, 32), hole((36, 32))
    result, info = denoise(np.where(missing, np.nan, clean), 0.0, mask="nan", quality=quality, return_info=True)
    np.testing.assert_array_equal(result[~missing], clean[~missing])
    assert rms(result[missing], clean[missing]) < 0.4 * np.std(clean)
    assert info.residual == 0


@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
def test_a_little_that_is_missing_costs_little(quality: str):
    clean = 5 * waves(48, 48)
    value, missing = noisy(clean, 1.0), hole(clean.shape, 0.2)
    missing[0] = missing[-1] = False
    missing[8:14, 8:14] = False
    result = denoise(value, 1.0, mask=missing, quality=quality)
    assert rms(result[missing], clean[missing]) < 0.75
    signal = 3 * steps_and_waves(400)
    value, missing = noisy(signal, 1.0), np.arange(400) % 7 == 0
    result = denoise(value, 1.0, mask=missing, quality=quality)
    assert rms(result[missing], signal[missing]) < 1.1


@pytest.mark.numerical
@pytest.mark.parametrize("quality", GROUPS_SLOWLY)
def test_holes_are_filled_in_from_alike_patches(quality: str):
    """A hole in stripes: a smooth surface through its border knows nothing of them."""
    clean = 10 * np.sin(2 * np.pi * (np.arange(48)[:, None] + np.arange(48)) / 8)
    missing = np.zeros(clean.shape, bool)
    missing[20:26, 18:24] = True
    result = denoise(noisy(clean, 1.0), 1.0, mask=missing, quality=quality)
    smooth = filled(noisy(clean, 1.0)[..., None], missing)[..., 0]
    assert rms(result[missing], clean[missing]) < 0.4 * rms(smooth[missing], clean[missing])


@pytest.mark.numerical
def test_the_first_filling_is_harmonic():
    ramp = np.add.outer(np.arange(20.0), 0.5 * np.arange(16))[..., None]
    missing = np.zeros((20, 16), bool)
    missing[7:11, 6:9] = True
    found = filled(np.where(missing[..., None], 0, ramp), missing)
    np.testing.assert_array_equal(found[~missing], ramp[~missing])
    np.testing.assert_allclose(found, ramp, atol=0.05)


@pytest.mark.numerical
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0, 300.0])
def test_filling_begins_with_much_noise_and_ends_at_its_own(spread: float):
    levels = filling_levels(spread * np.random.default_rng(0).normal(size=(500, 1)))
    assert levels[-1] == 1
    assert all(a > b for a, b in itertools.pairwise(levels))
    assert levels[0] == pytest.approx(max(0.6 * spread, 1), rel=0.1)


# ---- what is kept


@pytest.mark.parametrize("quality", SLOWLY)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int16])
@pytest.mark.sampled(2)
def test_what_is_kept_is_the_input_exactly(image: Floats, quality: str, dtype: Any):
    value = np.rint(10 * image + 100).astype(dtype)
    keep = np.random.default_rng(0).random(value.shape) < 0.3
    result = denoise(value, 10.0, keep=keep, quality=quality, preserve_range=True)
    np.testing.assert_array_equal(result[keep], value[keep])
    free = denoise(value, 10.0, quality=quality, preserve_range=True)
    np.testing.assert_array_equal(result[~keep], free[~keep])
    counts = np.abs(value)
    result = denoise(counts, noise="poisson", keep=keep, quality=quality, preserve_range=True)
    np.testing.assert_array_equal(result[keep], counts[keep])


@pytest.mark.parametrize("noise", ["impulses", "hot", "auto", Impulses(0.1, 0.0, 255.0)])
def test_what_is_kept_is_the_input_though_it_is_an_impulse(image: Floats, noise: Any):
    value = np.rint(20 * image + 120).clip(1, 254)
    spikes = np.random.default_rng(1).random(image.shape) < (0.003 if noise == "hot" else 0.1)
    value[spikes] = np.where(np.random.default_rng(2).random(np.count_nonzero(spikes)) < 0.5, 0, 255)
    missing, keep = hole(image.shape), np.arange(image.shape[1]) % 2 == np.zeros((len(image), 1))
    words: dict[str, Any] = {"noise": noise, "mask": missing, "quality": "fast"}
    free, kept = denoise(value, **words), denoise(value, keep=keep, **words)
    assert np.any((free != value)[keep & ~missing])
    np.testing.assert_array_equal(kept, np.where(keep & ~missing, value, free))


@pytest.mark.parametrize("quality", SLOWLY)
def test_what_is_missing_cannot_be_kept(image: Floats, quality: str):
    missing, keep = hole(image.shape), np.ones(image.shape, bool)
    result = denoise(np.where(missing, np.nan, image), 1.0, mask="nan", keep=keep, quality=quality)
    np.testing.assert_array_equal(result[~missing], image[~missing])
    np.testing.assert_array_equal(result[missing], denoise(image, 1.0, mask=missing, quality=quality)[missing])


@pytest.mark.parametrize("quality", SLOWLY)
def test_channels_are_kept_together(image: Floats, quality: str):
    colour = np.stack([image, image[::-1]], axis=0)
    keep = np.zeros(colour.shape, bool)
    keep[0, 3, 4] = True
    result = denoise(colour, 1.0, channel_axis=0, keep=keep, quality=quality)
    np.testing.assert_array_equal(result[:, 3, 4], colour[:, 3, 4])
    np.testing.assert_array_equal(result, denoise(colour, 1.0, channel_axis=0, keep=keep.any(axis=0), quality=quality))
