"""What denoising takes and refuses: types, ranges, sizes, layouts, channels, and images that are hard on it."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
from skimage.util import img_as_float

from nlflow import InputError, NlflowWarning, denoise, estimate_sigma, nonlocal_tv
from nlflow.denoising import problem
from nlflow.denoising.info import doubts
from nlflow.denoising.noise import GaussianNoise
from nlflow.denoising.noise.models.base import NoiseEstimate
from tests.covering import pairs
from tests.pictures import ON_GROUPS, QUALITIES, SLOWLY, Floats, both, noisy, picture, rms, waves

SIGMA = 0.1
INTEGERS = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64)
BAD_IMAGES: list[tuple[Any, str]] = [
    (np.empty((0, 5)), "image: got an empty array"),
    ([], "image: got an empty array"),
    (3.0, r"image: got 0 dimension\(s\)"),
    (np.zeros((4, 4), complex), "image: got complex values"),
    (np.array([["a", "b"]]), "image: got dtype <U1, expected a real numeric array"),
    (None, "image: got None, expected a real numeric array"),
    ([[1.0, 2.0], [3.0]], r"image: got \[\[1\.0, 2\.0\], \[3\.0\]\], expected a real numeric array"),
    (np.zeros((2, 3, 4, 5)), r"image: got 4 dimension\(s\)"),
    (np.zeros((8, 8, 3)), r"is the last axis colour\? then pass channel_axis=-1"),
]


@pytest.fixture(scope="module")
def image() -> Floats:
    return noisy(picture(40))


@pytest.fixture(scope="module")
def colour() -> Floats:
    side = picture(28)
    return noisy(np.stack([side, side[::-1], side.T], axis=-1))


# ---- what is refused


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("bad", [np.inf, -np.inf])
def test_infinity_is_refused_with_its_number(image: Floats, bad: float, quality: str):
    broken = image.copy()
    broken[3, 4] = broken[5, 6] = bad
    with pytest.raises(
        InputError,
        match=r"image: got 2 infinite value\(s\) \(the first at index \(3, 4\)\), expected numbers, or NaN where",
    ):
        denoise(broken, SIGMA, quality=quality)


@pytest.mark.parametrize(("value", "message"), BAD_IMAGES)
def test_unusable_input_is_refused(value: Any, message: str):
    for quality in QUALITIES:
        with pytest.raises(InputError, match=message):
            denoise(value, SIGMA, quality=quality)
    with pytest.raises(InputError, match=message):
        estimate_sigma(value)


@pytest.mark.parametrize("beside", ["mask", "keep"])
@pytest.mark.parametrize("value", [None, "photo", True, 3.0, [], ["a"], np.zeros((0, 3)), np.array([None, 1])], ids=str)
def test_what_is_no_image_is_told_before_what_lies_beside_it(value: Any, beside: str):
    with pytest.raises(InputError, match=r"^image: got"):
        denoise(value, 1.0, **{beside: np.zeros((9, 9), bool)})


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"quality": "better"}, "quality: got 'better', expected one of 'fast', 'balanced', 'best', 'pixels'"),
        ({"quality": None}, "quality: got None"),
        ({"channel_axis": 2}, "channel_axis: got 2, expected an axis of an array of 2 dimensions"),
        ({"channel_axis": -3}, "channel_axis: got -3"),
        ({"channel_axis": 0.5}, r"channel_axis: got 0\.5"),
        ({"width": 0.1}, "width: only quality='pixels' has it, got quality='balanced'; leave it out, or choose pixels"),
        ({"patch_size": 5, "quality": "best"}, "patch_size: only quality='pixels' has it, got quality='best'"),
        ({"search_radius": 5}, "search_radius: only"),
        ({"fidelity": 0.0}, "fidelity: only"),
        ({"steps": 2}, "steps: only"),
    ],
)
def test_unusable_keywords_are_refused_by_name(image: Floats, keywords: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        denoise(image, **{"sigma": SIGMA, **keywords})
    # Even when there is nothing to do.
    if "channel_axis" not in keywords:
        with pytest.raises(InputError, match=message):
            denoise(np.full((9, 9), 2.0), **{"sigma": SIGMA, **keywords})


def test_one_dimension_less_with_a_channel_axis():
    with pytest.raises(InputError, match=r"image: got 1 dimension\(s\)"):
        denoise(np.zeros(8), SIGMA, channel_axis=0)


# ---- sizes


def denoised_or_refused(value: Floats, sigma: float | None, quality: str) -> Floats:
    """Return the result, or what was given where it has too few samples to find out their noise."""
    try:
        return denoise(value, sigma, quality=quality)
    except InputError as error:
        if sigma is None and "samples, fewer than the" in str(error):
            return value
        raise


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning")
@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 40),
        (40, 1),
        (1, 2),
        (2, 1),
        (2, 2),
        (2, 3),
        (3, 3),
        (2, 50),
        (3, 200),
        (2,),
        (3,),
        (5,),
        (16,),
        (17,),
        (40,),
    ],
)
@pytest.mark.sampled(9)
def test_thin_and_tiny_inputs(shape: tuple[int, ...], quality: str):
    value = noisy(np.zeros(shape))
    for sigma in (SIGMA, None):
        result = denoised_or_refused(value, sigma, quality)
        assert result.shape == shape
        assert np.isfinite(result).all()
        assert np.abs(result).max() <= 2 * np.abs(value).max()
    numbers = np.rint(1000 * value).astype(np.int16)
    result = denoise(numbers, 1000 * SIGMA, quality=quality, preserve_range=True)
    np.testing.assert_allclose(result, 1000 * denoise(value, SIGMA, quality=quality), atol=2)


@pytest.mark.numerical
@pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning")
@pytest.mark.parametrize("quality", QUALITIES)
def test_a_row_and_a_column_are_treated_as_the_signal(quality: str):
    signal = noisy(np.sign(np.sin(np.arange(200) / 10)))
    flat = denoise(signal, SIGMA, quality=quality)
    np.testing.assert_allclose(denoise(signal[None], SIGMA, quality=quality)[0], flat, atol=1e-4)
    np.testing.assert_allclose(denoise(signal[:, None], SIGMA, quality=quality)[:, 0], flat, atol=0.02 * SIGMA)


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1), (1, 1, 3)])
@pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning")
def test_one_node_is_returned_unchanged(shape: tuple[int, ...], quality: str):
    value = np.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    result = denoise(value, SIGMA, quality=quality, channel_axis=-1 if len(shape) == 3 else None)
    np.testing.assert_allclose(result, value, rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "sigma", "quality"),
    pairs([np.uint8, np.int16, np.int32, np.float32, np.float64], [None, 0, 3.0], QUALITIES),
)
def test_a_constant_is_returned_unchanged(dtype: Any, sigma: Any, quality: str):
    value = np.full((12, 12), 100, dtype)
    result, info = denoise(value, sigma, quality=quality, preserve_range=True, return_info=True)
    np.testing.assert_array_equal(result, 100)
    assert result is not value
    assert not np.shares_memory(result, value)
    assert info.steps == 0
    assert info.stopped_by == "returned unchanged: the input is constant"


# ---- types and ranges


@pytest.mark.parametrize("quality", QUALITIES)
def test_no_noise_means_no_change(image: Floats, quality: str):
    result, info = denoise(image, 0, quality=quality, return_info=True)
    np.testing.assert_array_equal(result, image)
    assert "no noise" in info.stopped_by
    np.testing.assert_array_equal(denoise(image, 1e-14, quality=quality), image)


@pytest.mark.numerical
@pytest.mark.parametrize(
    ("scale", "quality", "dtype"),
    both(lambda quality: pairs([1e-30, 1e-6, 1e6, 1e30], quality, [np.float32, np.float64])),
)
def test_units_do_not_matter(image: Floats, scale: float, dtype: Any, quality: str):
    expected = denoise(image.astype(dtype), SIGMA, quality=quality)
    result = denoise(image.astype(dtype) * dtype(scale), SIGMA * scale, quality=quality)
    np.testing.assert_allclose(result / dtype(scale), expected, atol=1e-2 * SIGMA)
    assert rms(result / dtype(scale), expected) < 1e-4 * SIGMA


@pytest.mark.numerical
@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("top", [1e6, 1e-6])
@pytest.mark.sampled(2)
def test_a_huge_dynamic_range(quality: str, top: float):
    """Values 0...1 with noise of strength 1e-6, in other units."""
    clean = top * np.where(np.arange(32) < 15, 0, 0.3 + 0.7 * waves(32, 32) / waves(32, 32).max())
    value, sigma = noisy(clean, 1e-6 * top), 1e-6 * top
    result = denoise(value, sigma, quality=quality)
    assert rms(result, clean) < 0.9 * sigma
    np.testing.assert_allclose(denoise(value / top, 1e-6, quality=quality), result / top, atol=1e-8)


@pytest.mark.parametrize("quality", QUALITIES)
def test_a_range_that_overflows_is_left_alone(quality: str):
    value = np.array([[-1.5e308, 1.5e308] * 4] * 8)
    np.testing.assert_array_equal(denoise(value, 1.0, quality=quality), value)
    assert estimate_sigma(value) == 0
    with pytest.raises(InputError, match="image: got a range that overflows, with samples missing"):
        denoise(value, 1.0, quality=quality, mask=np.eye(8, dtype=bool))


@pytest.mark.numerical
@pytest.mark.parametrize("quality", QUALITIES)
def test_the_ends_of_single_precision(quality: str):
    large = np.where(np.arange(24) % 4 == 0, -3e38, 3e38).astype(np.float32) * np.ones((20, 1), np.float32)
    np.testing.assert_allclose(denoise(large, 1e37, quality=quality), large, rtol=0.1)
    small = (np.random.default_rng(0).normal(size=(20, 20)) * 1e-41).astype(np.float32)
    assert np.isfinite(denoise(small, 1e-47, quality=quality)).all()


@pytest.mark.parametrize("quality", SLOWLY)
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64), (np.longdouble, np.float64)],
)
def test_floats_keep_their_precision_and_units(image: Floats, dtype: Any, expected: Any, quality: str):
    result = denoise((200 * image).astype(dtype), 200 * SIGMA, quality=quality)
    assert result.dtype == expected
    same = 200 * denoise(image, SIGMA, quality=quality)
    np.testing.assert_allclose(result, same, atol=2 if dtype == np.float16 else 0.05)
    assert rms(result, same) < (0.1 if dtype == np.float16 else 1e-3)


# Integers become floats before a preset sees them, so that one preset shows every type.
@pytest.mark.parametrize(
    ("quality", "dtype"),
    [
        *(("pixels", t) for t in INTEGERS),
        *(("balanced", np.uint8), ("balanced", np.int64), ("best", np.int16)),
    ],
)
@pytest.mark.sampled(3)
def test_integers_come_back_as_scikit_image_converts_them(image: Floats, dtype: Any, quality: str):
    top = float(np.iinfo(dtype).max)
    value = np.clip(np.rint(image * top / 2), np.iinfo(dtype).min, top / 2).astype(dtype)
    sigma = SIGMA * top / 2
    kept = denoise(value, sigma, quality=quality, preserve_range=True)
    scaled = denoise(value, sigma, quality=quality)
    assert kept.dtype == scaled.dtype == np.float64
    np.testing.assert_allclose(scaled, kept / top, rtol=1e-6)
    same = denoise(img_as_float(value), sigma / top, quality=quality)
    assert rms(kept / top, same) < 2e-6
    # Without noise nothing but the conversion is left.
    np.testing.assert_allclose(denoise(value, 0, quality=quality), img_as_float(value), rtol=1e-7)


@pytest.mark.parametrize("values", [[1, 2, 3, 4], np.full((8, 8), 2**16 - 1), np.array([-(2**16), 5], np.int32)])
def test_wide_integers_with_the_values_of_narrow_ones_are_refused(values: Any):
    """scikit-image divides them by 2^63 or 2^31, so that next to nothing would be left."""
    assert np.abs(img_as_float(np.asarray(values))).max() < 2**-14
    for call in (denoise, problem, nonlocal_tv):
        with pytest.raises(InputError, match=r"image: got values from .* as int.*; convert them to float, uint8 or"):
            call(values)


@pytest.mark.parametrize("channels", [None, 3])
def test_wide_integers_that_are_hidden_do_not_make_the_others_pass(channels: int | None):
    values = np.arange(400).reshape(20, 20) % 50
    hidden = np.zeros((20, 20), bool)
    hidden[3, 3] = True
    values = np.where(hidden, 2**60, values)
    words: dict[str, Any] = {}
    if channels is not None:
        values, words = np.stack([values] * channels, axis=-1), {"channel_axis": -1}
    with pytest.raises(InputError, match=r"image: got values from 0 to 49 as int64"):
        denoise(values, 3.0, mask=hidden, **words)
    masked = np.ma.array(values, mask=hidden if channels is None else np.stack([hidden] * channels, axis=-1))
    for call in (denoise, problem):
        with pytest.raises(InputError, match=r"image: got values from 0 to 49 as int64"):
            call(masked, 3.0, **words)


def test_wide_integers_on_their_own_scale_pass():
    for values in (np.zeros(8, int), np.arange(8) << 16):
        assert denoise(values, 0).max() == img_as_float(values).max()
    np.testing.assert_array_equal(denoise([1, 2, 3, 4], 0, preserve_range=True), [1, 2, 3, 4])


@pytest.mark.parametrize("strength", [1, 2])
def test_a_word_for_sigma_is_refused_with_what_to_do(strength: float):
    with pytest.raises(InputError, match=r"sigma: got 'auto', expected a number, .*; leave it out to have"):
        denoise(np.eye(8), "auto", strength=strength)


@pytest.mark.parametrize("strength", [1, 2])
@pytest.mark.parametrize("sigma", [True, -1.0, b"1", [1, [2]]])
def test_a_sigma_that_is_none_is_refused_as_it_was_given(sigma: Any, strength: float):
    with pytest.raises(InputError, match=f"^sigma: got {re.escape(repr(sigma))}, expected"):
        denoise(np.eye(8), sigma, strength=strength)


@pytest.mark.parametrize("sigma", [10.0, [10.0, 1.0]])
def test_a_strength_with_which_sigma_overflows_is_named(sigma: Any):
    with pytest.raises(InputError, match=r"^strength: got 1e\+308, with which sigma overflows; give a smaller one"):
        denoise(np.ones((8, 8, np.size(sigma))), sigma, strength=1e308, channel_axis=-1)


@pytest.mark.parametrize("sigma", [0.1, [0.1, 0.02]])
def test_a_sigma_for_values_from_0_to_1_is_doubted_for_integers(sigma: Any):
    """Other functions of scikit-image convert integers first, and take sigma on the scale from 0 to 1."""
    grey = np.arange(24 * 24 * 2, dtype=np.uint8).reshape(24, 24, 2)[..., : np.size(sigma)]
    with pytest.warns(NlflowWarning, match=r"sigma: got 0\.1 for integers.*0\.1 of the range of uint8 is 25\.5"):
        denoise(grey, sigma, channel_axis=-1, quality="pixels")
    for value, level in ((grey, 0.3), (grey, 0), (grey / 255, 0.1), (grey > 99, 0.1)):  # none of these is doubted
        denoise(value, level, channel_axis=-1, quality="pixels")


@pytest.mark.parametrize(
    ("quality", "dtype"),
    [
        *(("pixels", t) for t in INTEGERS if t is not np.uint32),
        *(("balanced", np.uint8), ("balanced", np.int64), ("best", np.int16)),
    ],
)
def test_integer_limits_do_not_wrap(dtype: Any, quality: str):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    value = np.full((24, 24), low, dtype)
    value[:, 12:] = high
    result = denoise(value, float(high) / 20, quality=quality)
    np.testing.assert_allclose(result, img_as_float(value), atol=5e-3)
    assert result.min() >= -1
    # Noise about the limits, clipped: what comes back is where it was.
    spread = np.clip(noisy(value.astype(float), float(high) / 20), low, float(high) * (1 - 2**-24)).astype(dtype)
    result = denoise(spread, float(high) / 20, quality=quality)
    assert rms(result, img_as_float(value)) < 0.05


@pytest.mark.parametrize("quality", SLOWLY)
def test_wide_integers_keep_small_noise_on_a_large_offset(image: Floats, quality: str):
    counts = np.rint(image * 1000).astype(np.int64)
    expected = denoise(counts, 1000 * SIGMA, quality=quality, preserve_range=True)
    shifted = denoise(counts + 2**40, 1000 * SIGMA, quality=quality, preserve_range=True)
    np.testing.assert_allclose(shifted - 2**40, expected, atol=2)
    assert rms(shifted - 2**40, expected) < 0.02


@pytest.mark.parametrize("quality", SLOWLY)
def test_booleans_become_floats(quality: str):
    clean = picture(32) > 0.5
    value = clean ^ (np.random.default_rng(0).random(clean.shape) < 0.05)
    result = denoise(value, 0.2, quality=quality)
    assert result.dtype == np.float64
    assert rms(result, clean) < rms(value, clean)
    np.testing.assert_allclose(result, denoise(value.astype(np.float32), 0.2, quality=quality), atol=1e-6)


@pytest.mark.parametrize("quality", QUALITIES)
def test_lists_are_taken(quality: str):
    assert denoise([[0.0, 1.0], [1.0, 0.5]], 0, quality=quality).tolist() == [[0.0, 1.0], [1.0, 0.5]]
    rows = noisy(waves(12, 12))
    np.testing.assert_array_equal(denoise(rows.tolist(), 0.1, quality="balanced"), denoise(rows, 0.1))


@pytest.mark.parametrize(
    ("dtype", "quality", "sigma"), pairs([np.float32, np.float64, np.uint8], QUALITIES, [0, SIGMA])
)
@pytest.mark.sampled(2)
def test_the_input_is_never_modified_nor_shared(image: Floats, sigma: float, dtype: Any, quality: str):
    value = (100 * image + 50).astype(dtype)
    mask = np.zeros(value.shape, bool)
    mask[3:5, 3:5] = True
    for array in (value, mask):
        array.flags.writeable = False
    before = value.copy()
    result = denoise(value, 100 * sigma, quality=quality)
    denoise(value, 100 * sigma, quality=quality, mask=mask, keep=mask)
    np.testing.assert_array_equal(value, before)
    assert not np.shares_memory(result, value)
    assert result.flags.writeable


@pytest.mark.parametrize("quality", SLOWLY)
def test_memory_layout_and_byte_order_do_not_matter(image: Floats, quality: str):
    expected = denoise(image, SIGMA, quality=quality)
    spread = np.zeros((80, 120))
    spread[::2, ::3] = image
    for value in (np.asfortranarray(image), spread[::2, ::3], image.astype(image.dtype.newbyteorder())):
        result = denoise(value, SIGMA, quality=quality)
        np.testing.assert_array_equal(result, expected)
        assert result.dtype.isnative
    swapped = (100 * image + 50).astype(np.uint16)
    results = [denoise(swapped.astype(order), 10.0, quality=quality) for order in (">u2", "<u2")]
    np.testing.assert_array_equal(*results)


# ---- channels


@pytest.mark.parametrize(
    ("channels", "quality", "dtype", "dimension"),
    both(lambda presets: pairs([1, 2, 3, 5], presets, [np.uint8, np.float32, np.float64], [1, 2])),
)
@pytest.mark.sampled(3)
def test_types_channels_and_their_place(quality: str, dtype: Any, channels: int, dimension: int):
    shape = (26, 23) if dimension == 2 else (120,)
    clean = waves(*shape) if dimension == 2 else np.sin(np.arange(120) / 9)
    value = (
        noisy(np.stack([60 + (40 - 5 * c) * clean for c in range(channels)], axis=-1), 8.0).clip(0, 255).astype(dtype)
    )
    options: dict[str, Any] = {
        "quality": quality,
        "preserve_range": True,
        "search_radius": 6 if quality == "pixels" else None,
    }
    expected = denoise(value, 8.0, channel_axis=-1, **options)
    assert expected.shape == value.shape
    assert expected.dtype == (np.float32 if dtype == np.float32 else np.float64)
    assert np.std(np.diff(expected, axis=0)) < 0.8 * np.std(np.diff(value.astype(float), axis=0))
    for axis in (*range(-dimension - 1, -1), 0):
        moved = np.moveaxis(value, -1, axis)
        result = denoise(moved, 8.0, channel_axis=axis, **options)
        np.testing.assert_array_equal(np.moveaxis(result, axis, -1), expected)
    if channels == 1:
        np.testing.assert_array_equal(expected[..., 0], denoise(value[..., 0], 8.0, **options))


@pytest.mark.parametrize("quality", SLOWLY)
def test_the_estimate_of_the_noise_follows_the_channel_axis(colour: Floats, quality: str):
    found = [
        denoise(np.moveaxis(colour, -1, axis), quality=quality, channel_axis=axis, return_info=True)[1].sigma
        for axis in (0, 1, -1)
    ]
    assert found[0] == found[1] == found[2] == estimate_sigma(colour, channel_axis=-1)


# ---- images that are hard on it


@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
def test_saturated_regions_stay_saturated(quality: str):
    clean = np.full((32, 40), 255.0)
    clean[:, 20:] = 100
    value = np.clip(noisy(clean, 20.0), 0, 255)
    value[:, :20] = 255
    result = denoise(value, 20.0, quality=quality)
    np.testing.assert_allclose(result[:, :15], 255, atol=1)
    assert rms(result[:, 22:], 100) < 8
    bits = np.clip(noisy(300 * waves(40, 40), 20.0), 0, 255).astype(np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # so small a picture, clipped, may be doubted
        result = denoise(bits, quality=quality, preserve_range=True)
    assert rms(result, np.clip(300 * waves(40, 40), 0, 255)) < 20


@pytest.mark.filterwarnings("ignore:the noise was hard to find out")  # waves are no white noise
@pytest.mark.numerical
@pytest.mark.parametrize("quality", SLOWLY)
@pytest.mark.parametrize("kind", ["waves", "chequers", "lines"])
@pytest.mark.sampled(2)
def test_exactly_periodic_images(quality: str, kind: str):
    """Distances tie exactly, and groups hold copies of the same patch."""
    y, x = np.mgrid[:40, :40]
    clean = {
        "waves": np.sin(2 * np.pi * x / 8) * np.sin(2 * np.pi * y / 8),
        "chequers": ((x // 4 + y // 4) % 2).astype(float),
        "lines": (x % 8 < 4).astype(float),
    }[kind]
    assert rms(denoise(clean, 0.1, quality=quality), clean) < 0.1
    assert rms(denoise(noisy(clean), 0.1, quality=quality), clean) < 0.07
    signal = clean[5]
    assert np.isfinite(denoise(signal, 0.1, quality=quality, search_radius=9 if quality == "pixels" else None)).all()
    whole = (255 * (clean > 0.4)).astype(np.uint8)
    assert rms(denoise(whole, 25.0, quality=quality, preserve_range=True), whole) < 3
    with pytest.warns(NlflowWarning, match="two values alone"):
        np.testing.assert_array_equal(denoise(whole, quality=quality, preserve_range=True), whole)


@pytest.mark.parametrize(
    ("found", "text"), [(1e-15, "the result is the input: "), (0.02, "the result is nearly the input: ")]
)
def test_a_picture_that_comes_back_unchanged_is_doubted(found: float, text: str):
    samples = np.random.default_rng(0).uniform(0, 255, (40, 40, 1))
    estimate = NoiseEstimate(GaussianNoise(found), "medium")
    (said,) = doubts(samples, found, estimate, 2)
    assert said.startswith(text)
    assert "estimate_noise(image, flat=np.s_[20:84, 300:400]).model" in said
    assert "estimate_noise(other).model" in said
    assert doubts(np.round(samples / 64), 0.0, estimate, 2) == []  # a drawing of five values
    assert doubts(samples, 0.0, NoiseEstimate(GaussianNoise(found), "high"), 2) == []


@pytest.mark.numerical
@pytest.mark.parametrize("quality", ON_GROUPS)
def test_two_values_and_a_single_point(quality: str):
    point = np.zeros((24, 24))
    point[12, 12] = 100.0
    result = denoise(point, 1.0, quality=quality)
    assert result[12, 12] == pytest.approx(100, abs=3)
    assert rms(result, point) < 0.3
