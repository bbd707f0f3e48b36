"""Denoising by the preset ``fast``: what it takes, what it gives back, and that it removes noise.

What holds for every preset is in `test_denoise_presets`.
"""

import functools
import math
import time

import numba
import numpy as np
import pytest
from skimage.restoration import denoise_nl_means
from skimage.util import img_as_float

import nlflow
from nlflow import DenoiseInfo, InputError, MemoryLimitError, NlflowWarning, estimate_sigma
from nlflow.denoising import pixelwise

denoise = functools.partial(nlflow.denoise, quality="fast")
SIGMA = 0.1
SMALL = {"search_radius": 4, "patch_size": 3}


def picture(side=64):
    """A disc, stripes, a ramp and two flat areas, values 0...1."""
    y, x = np.mgrid[:side, :side] / side
    image = np.where((x - 0.3) ** 2 + (y - 0.35) ** 2 < 0.05, 0.9, 0.3)
    image = np.where(y > 0.7, 0.5 + 0.3 * np.sin(2 * np.pi * 12 * x), image)
    return np.where((x > 0.65) & (y < 0.7), y, image)


def noisy(clean, sigma=SIGMA, seed=0):
    return clean + np.random.default_rng(seed).normal(0, sigma, clean.shape)


def rms(a, b):
    return float(np.sqrt(np.mean((np.asarray(a, float) - np.asarray(b, float)) ** 2)))


@pytest.fixture(scope="module")
def image():
    return noisy(picture(48))


@pytest.fixture(scope="module")
def colour():
    clean = np.stack([picture(40), picture(40)[::-1], picture(40).T], axis=-1)
    return noisy(clean)


# ---- what is refused


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_with_their_number(image, bad):
    broken = image.copy()
    broken[3, 4] = broken[5, 6] = bad
    with pytest.raises(InputError, match=r"image: got 2 NaN or infinite value\(s\), expected finite ones; replace"):
        denoise(broken, SIGMA)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.empty((0, 5)), "image: got an empty array"),
        ([], "image: got an empty array"),
        (3.0, r"image: got 0 dimension\(s\)"),
        (np.zeros((4, 4), complex), "image: got complex values"),
        (np.array([["a", "b"]]), "image: got dtype <U1, expected a real numeric array"),
        (None, "image: got dtype object"),
        (np.ma.masked_array(np.zeros((4, 4))), "image: got a masked array"),
        (np.zeros((2, 3, 4, 5)), r"image: got 4 dimension\(s\)"),
        (np.zeros((8, 8, 3)), r"is the last axis colour\? then pass channel_axis=-1"),
    ],
)
def test_unusable_input_is_refused(value, message):
    for function in (lambda: denoise(value, SIGMA), lambda: estimate_sigma(value)):
        with pytest.raises(InputError, match=message):
            function()


def test_a_torch_tensor_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match=r"got Tensor, expected a NumPy array; convert it"):
        denoise(torch.zeros(8, 8), SIGMA)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"sigma": -1}, r"sigma: got -1, .*>= 0; the noise in the units of the input"),
        ({"sigma": math.nan}, "sigma: got nan"),
        ({"sigma": math.inf}, "sigma: got inf"),
        ({"sigma": "25"}, "sigma: got '25'"),
        ({"width": -0.1}, "width: got -0.1"),
        ({"width": 0}, "width: got 0, .*> 0"),
        ({"fidelity": -1}, "fidelity: got -1"),
        ({"steps": 0}, "steps: got 0"),
        ({"steps": 1.5}, r"steps: got 1\.5"),
        ({"patch_size": 4}, "patch_size: got 4, expected an odd integer"),
        ({"patch_size": 0}, "patch_size: got 0"),
        ({"patch_size": -3}, "patch_size: got -3"),
        ({"search_radius": 0}, "search_radius: got 0"),
        ({"search_radius": 2.5}, r"search_radius: got 2\.5"),
        ({"max_memory": -5}, "max_memory: got -5"),
        ({"channel_axis": 2}, "channel_axis: got 2, expected an axis of an array of 2 dimensions"),
        ({"channel_axis": -3}, "channel_axis: got -3"),
        ({"channel_axis": 0.5}, r"channel_axis: got 0\.5"),
    ],
)
def test_unusable_keywords_are_refused_by_name(image, keywords, message):
    with pytest.raises(InputError, match=message):
        denoise(image, **{"sigma": SIGMA, **keywords})


@pytest.mark.parametrize("keywords", [{"patch_size": 4}, {"search_radius": 0}, {"steps": 0}, {"max_memory": -5}])
def test_keywords_are_checked_even_when_there_is_nothing_to_do(keywords):
    with pytest.raises(InputError, match=next(iter(keywords))):
        denoise(np.full((9, 9), 2.0), SIGMA, **keywords)


def test_one_dimension_less_with_a_channel_axis():
    with pytest.raises(InputError, match=r"image: got 1 dimension\(s\)"):
        denoise(np.zeros(8), SIGMA, channel_axis=0)


# ---- sizes


def test_a_window_larger_than_the_image_is_shrunk_with_a_warning():
    tiny = noisy(picture(16))
    with pytest.warns(NlflowWarning, match="search window of 101 nodes .* shrunk to 15 x 15") as caught:
        result = denoise(tiny, SIGMA, search_radius=50)
    assert len(caught) == 1
    assert rms(result, denoise(tiny, SIGMA, search_radius=7)) < 0.2 * SIGMA


def test_a_default_window_is_shrunk_with_a_warning_too():
    with pytest.warns(NlflowWarning, match="shrunk to 5 x 7"):
        assert denoise(noisy(np.zeros((5, 7))), SIGMA).shape == (5, 7)


@pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning")
@pytest.mark.parametrize("shape", [(1, 40), (40, 1), (1, 2), (2, 1), (2, 2), (3, 3), (2, 50), (2,), (3,), (40,)])
@pytest.mark.parametrize("patch_size", [None, 9])
def test_thin_and_tiny_inputs(shape, patch_size):
    value = noisy(np.zeros(shape))
    result = denoise(value, SIGMA, patch_size=patch_size)
    assert result.shape == shape
    assert np.isfinite(result).all()
    assert value.min() - 1e-12 <= result.min() <= result.max() <= value.max() + 1e-12


@pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning")
def test_a_row_and_a_column_are_treated_as_the_signal():
    signal = noisy(np.sign(np.sin(np.arange(200) / 10)))
    flat = denoise(signal, SIGMA)
    np.testing.assert_allclose(denoise(signal[None], SIGMA)[0], flat, atol=1e-12)
    np.testing.assert_allclose(denoise(signal[:, None], SIGMA)[:, 0], flat, atol=1e-12)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1), (1, 1, 3)])
@pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning")
def test_one_node_is_returned_unchanged(shape):
    value = np.arange(1.0, 1 + math.prod(shape)).reshape(shape)
    result = denoise(value, SIGMA, channel_axis=-1 if len(shape) == 3 else None)
    np.testing.assert_allclose(result, value, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32, np.float64])
@pytest.mark.parametrize("sigma", [None, 0, 3.0])
def test_a_constant_is_returned_unchanged(dtype, sigma):
    value = np.full((12, 12), 100, dtype)
    result, info = denoise(value, sigma, preserve_range=True, return_info=True)
    np.testing.assert_array_equal(result, 100)
    assert result is not value
    assert not np.shares_memory(result, value)
    assert info.steps == 0
    assert info.stopped_by == "returned unchanged: the input is constant"


def test_no_noise_means_no_change(image):
    result, info = denoise(image, 0, return_info=True)
    np.testing.assert_array_equal(result, image)
    assert "no noise" in info.stopped_by
    np.testing.assert_array_equal(denoise(image, 1e-14), image)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_extreme_units_neither_overflow_nor_underflow(image, scale, dtype):
    expected = denoise(image.astype(dtype), SIGMA)
    result = denoise(image.astype(dtype) * dtype(scale), SIGMA * scale)
    np.testing.assert_allclose(result / dtype(scale), expected, atol=1e-6)


def test_a_range_that_overflows_is_left_alone():
    value = np.array([[-1.5e308, 1.5e308] * 4] * 8)
    np.testing.assert_array_equal(denoise(value, 1.0), value)
    assert estimate_sigma(value) == 0


# ---- types and ranges


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(np.float16, np.float32), (np.float32, np.float32), (np.float64, np.float64), (np.longdouble, np.float64)],
)
def test_floats_keep_their_precision_and_units(image, dtype, expected):
    result = denoise((200 * image).astype(dtype), 200 * SIGMA)
    assert result.dtype == expected
    np.testing.assert_allclose(result, 200 * denoise(image, SIGMA), atol=0.3 if dtype == np.float16 else 1e-3)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64])
def test_integers_come_back_as_scikit_image_converts_them(image, dtype):
    top = float(np.iinfo(dtype).max)
    value = np.clip(np.rint(image * top / 2), np.iinfo(dtype).min, top / 2).astype(dtype)
    sigma = SIGMA * top / 2
    kept = denoise(value, sigma, preserve_range=True)
    scaled = denoise(value, sigma)
    assert kept.dtype == scaled.dtype == np.float64
    np.testing.assert_allclose(scaled, kept / top, rtol=1e-6)
    np.testing.assert_allclose(kept / top, denoise(img_as_float(value), sigma / top), atol=2e-6)
    # Without noise nothing but the conversion is left.
    np.testing.assert_allclose(denoise(value, 0), img_as_float(value), rtol=1e-7)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64])
def test_integer_limits_do_not_wrap(dtype):
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    value = np.full((24, 24), low, dtype)
    value[:, 12:] = high
    result = denoise(value, float(high) / 20)
    np.testing.assert_allclose(result, img_as_float(value), atol=1e-3)
    assert -1 <= result.min() <= result.max() <= 1 + 1e-5


def test_wide_integers_keep_small_noise_on_a_large_offset(image):
    counts = np.rint(image * 1000).astype(np.int64)
    expected = denoise(counts, 1000 * SIGMA, preserve_range=True)
    shifted = denoise(counts + 2**40, 1000 * SIGMA, preserve_range=True)
    np.testing.assert_allclose(shifted - 2**40, expected, atol=0.01)


def test_booleans_become_floats():
    value = picture(32) > 0.5
    value ^= np.random.default_rng(0).random(value.shape) < 0.05
    result = denoise(value, 0.2)
    assert result.dtype == np.float64
    assert 0 <= result.min() <= result.max() <= 1
    np.testing.assert_allclose(result, denoise(value.astype(np.float32), 0.2), atol=1e-6)


def test_lists_are_taken():
    assert denoise([[0.0, 1.0], [1.0, 0.5]], 0).tolist() == [[0.0, 1.0], [1.0, 0.5]]


@pytest.mark.parametrize("sigma", [0, SIGMA])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_the_input_is_never_modified_nor_shared(image, sigma, dtype):
    value = (100 * image + 50).astype(dtype)
    value.flags.writeable = False
    before = value.copy()
    result = denoise(value, 100 * sigma)
    np.testing.assert_array_equal(value, before)
    assert not np.shares_memory(result, value)
    assert result.flags.writeable


def test_memory_layout_and_byte_order_do_not_matter(image):
    expected = denoise(image, SIGMA)
    spread = np.zeros((96, 144))
    spread[::2, ::3] = image
    for value in (np.asfortranarray(image), spread[::2, ::3], image.astype(image.dtype.newbyteorder())):
        result = denoise(value, SIGMA)
        np.testing.assert_array_equal(result, expected)
        assert result.dtype.isnative
    swapped = (100 * image + 50).astype(np.uint16)
    np.testing.assert_array_equal(denoise(swapped.astype(">u2"), 10.0), denoise(swapped.astype("<u2"), 10.0))
    np.testing.assert_array_equal(denoise(image[::-1, ::-1].copy(), SIGMA), denoise(image[::-1, ::-1], SIGMA))


# ---- channels


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_the_position_of_the_channel_axis_does_not_matter(colour, axis):
    expected, info = denoise(colour, SIGMA, channel_axis=-1, return_info=True)
    moved = np.moveaxis(colour, -1, axis)
    result, moved_info = denoise(moved, SIGMA, channel_axis=axis, return_info=True)
    assert result.shape == moved.shape
    np.testing.assert_array_equal(np.moveaxis(result, axis, -1), expected)
    assert moved_info.parameters["width"] == info.parameters["width"]
    assert estimate_sigma(moved, channel_axis=axis) == pytest.approx(estimate_sigma(colour, channel_axis=-1))


def test_one_channel_is_no_channel(image):
    np.testing.assert_array_equal(denoise(image[None], SIGMA, channel_axis=0)[0], denoise(image, SIGMA))


def test_signals_with_channels():
    clean = np.stack([np.sin(np.arange(300) / 9), np.sign(np.sin(np.arange(300) / 15))], axis=-1)
    value = noisy(clean)
    result = denoise(value, SIGMA, channel_axis=-1)
    np.testing.assert_array_equal(denoise(value.T, SIGMA, channel_axis=0).T, result)
    assert rms(result, clean) < 0.7 * SIGMA


# ---- symmetries


def test_the_result_scales_and_shifts_with_the_input(image):
    expected = denoise(image, SIGMA)
    np.testing.assert_allclose(denoise(255 * image - 70, 255 * SIGMA), 255 * expected - 70, atol=1e-8)
    np.testing.assert_allclose(denoise(-image, SIGMA), -expected, atol=1e-12)
    np.testing.assert_allclose(denoise(image + 1e6, SIGMA), expected + 1e6, atol=1e-6)


def test_the_result_turns_with_the_input(colour):
    expected = denoise(colour, SIGMA, channel_axis=-1)
    for turn in (lambda a: a[::-1], lambda a: a[:, ::-1], lambda a: np.swapaxes(a, 0, 1), np.rot90):
        np.testing.assert_allclose(denoise(turn(colour), SIGMA, channel_axis=-1), turn(expected), atol=1e-12)
    signal = colour[20, :, 0]
    with pytest.warns(NlflowWarning):
        backwards = denoise(signal[::-1], SIGMA)
    with pytest.warns(NlflowWarning):
        np.testing.assert_allclose(backwards[::-1], denoise(signal, SIGMA), atol=1e-12)


def test_the_result_stays_in_the_range_of_the_input(image):
    for options in ({}, {"steps": 5}, {"fidelity": 0.5}, {"fidelity": 0.0}):
        result = denoise(image, SIGMA, **options)
        assert image.min() - 1e-12 <= result.min() <= result.max() <= image.max() + 1e-12


def test_single_and_double_precision_agree(image):
    np.testing.assert_allclose(denoise(image.astype(np.float32), SIGMA), denoise(image, SIGMA), atol=1e-5)


# ---- memory, threads, progress


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_that_do_not_fit_are_computed_anew(image, dtype):
    value = image.astype(dtype)
    expected, stored = denoise(value, SIGMA, return_info=True)
    result, info = denoise(value, SIGMA, max_memory=300_000, return_info=True)
    np.testing.assert_allclose(result, expected, atol=1e-5 if dtype == np.float32 else 1e-12)
    assert "computed anew" in info.method
    assert info.memory_bytes < 300_000 < stored.memory_bytes
    assert info.as_dict().keys() == stored.as_dict().keys()


def test_a_shrunk_window_is_reported_once_when_weights_do_not_fit():
    value = noisy(picture(16))
    with pytest.warns(NlflowWarning) as caught:
        _, info = denoise(value, SIGMA, search_radius=20, max_memory=50_000, return_info=True)
    assert "computed anew" in info.method
    assert len(caught) == 1


def test_too_little_memory_is_refused_before_anything_is_allocated():
    large = np.zeros((4000, 4000), np.float32)
    large[0, 0] = 1
    begun = time.perf_counter()
    with pytest.raises(MemoryLimitError, match=r"needs .* bytes\), the limit is .*memory_limit"):
        denoise(large, 0.1, max_memory=10_000)
    assert time.perf_counter() - begun < 5


def test_the_number_of_threads_does_not_matter(image):
    most = numba.get_num_threads()
    results = []
    try:
        for threads in {1, most}:
            numba.set_num_threads(threads)
            results.append(denoise(image, SIGMA))
            results.append(denoise(image, SIGMA, max_memory=300_000))
    finally:
        numba.set_num_threads(most)
    for result in results[2:]:
        assert any(np.array_equal(result, other) for other in results[:2])
    np.testing.assert_array_equal(denoise(image, SIGMA), denoise(image, SIGMA))


def test_progress_goes_to_stderr_alone(image, capsys):
    quiet = denoise(image, SIGMA, steps=3)
    assert capsys.readouterr() == ("", "")
    np.testing.assert_array_equal(denoise(image, SIGMA, steps=3, progress=True), quiet)
    out, err = capsys.readouterr()
    assert out == ""
    assert err != ""


# ---- what is reported


def test_the_report_is_in_the_units_of_the_input(image):
    result, info = denoise(image, SIGMA, return_info=True)
    scaled, other = denoise(50 * image, 50 * SIGMA, return_info=True)
    assert isinstance(info, DenoiseInfo)
    assert info.sigma == SIGMA
    assert not info.sigma_estimated
    assert other.sigma == pytest.approx(50 * SIGMA)
    assert other.parameters["width"] == pytest.approx(50 * info.parameters["width"])
    assert info.residual == pytest.approx(rms(result, image))
    assert other.residual == pytest.approx(rms(scaled, 50 * image))
    assert info.parameters["fidelity_mean"] > 0
    assert info.steps >= 1
    assert info.method.startswith("stencil: ")
    assert info.seconds >= info.compile_seconds >= 0
    assert set(info.as_dict()) == set(DenoiseInfo.__dataclass_fields__)
    plain = {**info.as_dict(), **info.as_dict().pop("parameters")}
    assert all(isinstance(v, str | bool | int | float | None) for k, v in plain.items() if k != "parameters")


def test_what_is_asked_for_is_done(image):
    _, info = denoise(image, SIGMA, width=0.07, patch_size=5, search_radius=3, fidelity=0.25, steps=4, return_info=True)
    assert info.parameters["width"] == pytest.approx(0.07)
    assert (info.parameters["patch_size"], info.parameters["search_radius"], info.steps) == (5, 3, 4)
    assert info.parameters["fidelity_mean"] == pytest.approx(0.25)
    near, far = (rms(denoise(image, SIGMA, fidelity=value), image) for value in (10.0, 0.0))
    assert near < 0.2 * far


def test_the_default_width_is_a_fixed_part_of_the_spread_of_patch_distances(image):
    widths = [denoise(image, SIGMA, patch_size=p, return_info=True)[1].parameters["width"] for p in (3, 5, 9)]
    assert widths[0] / widths[2] == pytest.approx(math.sqrt(3))
    assert widths[0] > widths[1] > widths[2]


def test_larger_patches_for_more_noise_and_smaller_ones_for_more_channels():
    clean = picture(40)
    sizes = [denoise(noisy(clean, s), s, return_info=True)[1].parameters["patch_size"] for s in (0.03, 0.12, 0.4)]
    assert sizes == [3, 5, 7]
    tripled = np.repeat(clean[..., None], 3, axis=-1)
    assert denoise(noisy(tripled, 0.12), 0.12, channel_axis=-1, return_info=True)[1].parameters["patch_size"] == 3


@pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning")
def test_sigma_is_estimated_when_it_is_not_given(image):
    result, info = denoise(image, return_info=True)
    assert info.sigma_estimated
    assert info.sigma == estimate_sigma(image) == pytest.approx(SIGMA, rel=0.3)
    np.testing.assert_array_equal(result, denoise(image, info.sigma))
    assert estimate_sigma(1000 * image + 5) == pytest.approx(1000 * info.sigma, rel=1e-6)
    bytes_of = np.clip(np.rint(255 * image), 0, 255).astype(np.uint8)
    assert estimate_sigma(bytes_of) == pytest.approx(255 * SIGMA, rel=0.3)  # in grey levels
    assert estimate_sigma(image[:1]) > 0
    assert estimate_sigma(np.ones((1, 1))) == estimate_sigma(np.ones((5, 5))) == 0


# ---- quality


@pytest.mark.parametrize("sigma", [0.04, 0.1, 0.2])
def test_better_than_nonlocal_means_on_a_picture(sigma):
    clean = picture(96)
    value = noisy(clean, sigma)
    peer = min(
        rms(denoise_nl_means(value, patch_size=p, patch_distance=6, h=h * sigma, sigma=sigma), clean)
        for p in (5, 7) for h in (0.5, 0.6, 0.7, 0.8)
    )  # fmt: skip
    ours = rms(denoise(value, sigma), clean)
    assert ours < peer
    assert ours < 0.5 * sigma


def test_colours_help_each_other(colour):
    clean = np.stack([picture(40), picture(40)[::-1], picture(40).T], axis=-1)
    assert rms(denoise(colour, SIGMA, channel_axis=-1), clean) < 0.7 * SIGMA
    grey = np.repeat(picture(40)[..., None], 3, axis=-1)
    together = denoise(noisy(grey), SIGMA, channel_axis=-1)
    apart = np.stack([denoise(noisy(grey)[..., c], SIGMA) for c in range(3)], axis=-1)
    assert rms(together, grey) < 0.9 * rms(apart, grey)


@pytest.mark.parametrize("sigma", [0.1, 0.3, 0.6])
def test_signals(sigma):
    t = np.arange(1500)
    for clean in (np.sign(np.sin(t / 30)), np.sin(t / 12)):
        assert rms(denoise(noisy(clean, sigma), sigma), clean) < 0.6 * sigma


def test_low_noise_does_no_harm():
    clean = picture(64)
    assert rms(denoise(noisy(clean, 0.005), 0.005), clean) < 0.005


def test_the_local_fidelity_keeps_what_has_no_like():
    # One bright point in flat noise: averaging alone would spread it.
    clean = np.zeros((32, 32))
    clean[16, 16] = 20 * SIGMA
    assert denoise(noisy(clean), SIGMA)[16, 16] > 17 * SIGMA


def test_smoothed_patches_carry_the_noise_that_the_kernel_corrects_for():
    noise = np.random.default_rng(0).normal(size=(300, 300, 1))
    kernel = pixelwise._kernel(noise, None, 3, 5)
    assert float(pixelwise._smoothed(noise).std()) == pytest.approx(kernel.sigma, rel=0.01)
    line = pixelwise._kernel(noise[:, :1], None, 3, 5)
    assert float(line.sigma) == pytest.approx(math.sqrt(kernel.sigma))
