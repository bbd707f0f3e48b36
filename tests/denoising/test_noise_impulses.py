"""Impulses: sampling, where they are found, and pictures that have none."""

import math

import numpy as np
import pytest
from scipy.ndimage import maximum_filter, median_filter
from scipy.special import erf
from skimage import data

from nlflow import InputError, denoise
from nlflow.denoising.noise import HotPixels, Impulses, estimate_noise, find_hot_pixels, find_impulses
from nlflow.denoising.noise.finding import finders
from tests.pictures import ellipsoids, noisy, psnr, steps_and_waves, waves

CLEAN = {name: getattr(data, name)().astype(np.float32)[:256, :256] for name in ("camera", "coins", "brick", "grass",
                                                                                   "page", "text", "moon")}  # fmt: skip


def found(image):
    return find_impulses(np.asarray(image)[..., None])


# ---- the model


def test_a_part_of_the_samples_is_replaced_by_each_value_half_of_the_time():
    z = Impulses(0.3, -1.0, 2.0).sample(np.zeros((400, 400)), rng=0)
    error = np.sqrt(0.15 * 0.85 / z.size)
    for value in (-1.0, 2.0):
        assert np.mean(z == value) == pytest.approx(0.15, abs=5 * error)
    assert set(np.unique(z)) == {-1.0, 0.0, 2.0}


def test_random_values_are_uniform():
    z = Impulses(0.5, 2.0, 5.0, random=True).sample(np.zeros(200_000), rng=0)
    values = z[z != 0]
    assert values.mean() == pytest.approx(3.5, abs=0.02)
    assert values.std() == pytest.approx(3 / np.sqrt(12), abs=0.02)


def test_channels_are_replaced_by_themselves_and_a_pixel_is_missing_where_any_is():
    clean = np.full((3, 40, 50), 7.0)
    noise = Impulses(0.2, 0.0, 20.0)
    z = noise.sample(clean, rng=0, channel_axis=0)
    replaced = z != 7
    assert not np.array_equal(replaced[0], replaced[1])
    np.testing.assert_array_equal(noise.reduce(np.moveaxis(z, 0, -1)).missing, replaced.any(axis=0))


@pytest.mark.parametrize("units", [1 / 255, 1.0, 257.0])
def test_impulses_are_found_and_nothing_else_is(units):
    clean = (CLEAN["coins"] * units).clip(20 * units)
    noise = Impulses(0.2, 0.0, 255.0 * units)
    z = noise.sample(clean, rng=1)
    np.testing.assert_array_equal(noise.reduce(z[..., None]).missing, z != clean)


def test_areas_of_the_values_themselves_stay():
    clean = np.full((80, 80), 100.0)
    clean[20:60, 20:60] = 255.0
    noise = Impulses(0.1, 0.0, 255.0)
    z = noise.sample(clean, rng=0)
    missing = noise.reduce(z[..., None]).missing
    inside = np.s_[22:58, 22:58]
    assert np.mean(missing[inside][z[inside] == 255]) < 0.01
    assert missing[z == 0].all()
    assert np.mean(missing[:18][z[:18] == 255]) == 1


def test_what_is_missing_already_does_not_count_and_stays_missing():
    clean = np.full((60, 60), 100.0)
    noise = Impulses(0.1, 0.0, 255.0)
    z = noise.sample(clean, rng=0)
    gone = np.zeros(z.shape, bool)
    gone[10:30, 10:30] = True
    hidden = np.where(gone, 255.0, z)
    np.testing.assert_array_equal(noise.reduce(hidden[..., None], gone).missing, gone | (z != 100))
    assert find_impulses(hidden[..., None], gone).density == pytest.approx(0.1, abs=0.02)


def test_random_impulses_that_stick_out_are_found():
    clean = waves(80, 80)
    noise = Impulses(0.1, -6.0, 6.0, random=True)
    z = noise.sample(clean, rng=0)
    missing = noise.reduce(z[..., None]).missing
    assert missing[np.abs(z - clean) > 2.5].mean() > 0.98
    assert missing[z == clean].mean() < 0.01


def test_no_density_finds_nothing():
    z = CLEAN["camera"][..., None]
    assert Impulses(0.0, 0.0, 255.0).reduce(z).missing is None


# ---- found without being told


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.02, 0.2, 0.5])
@pytest.mark.parametrize("name", ["camera", "coins", "brick", "grass"])
def test_density_and_values_are_found(name, density):
    model = found(Impulses(density, 0.0, 255.0).sample(CLEAN[name], rng=0))
    assert (model.low, model.high) == (0.0, 255.0)
    # Five standard deviations of the share that was drawn, and what is not seen in dark and bright parts.
    assert model.density == pytest.approx(density, abs=5 * np.sqrt(density / CLEAN[name].size) + 0.1 * density)


def test_one_value_alone_is_found():
    model = found(Impulses(0.05, 255.0, 255.0).sample(CLEAN["coins"].clip(0, 200), rng=0))
    assert model.low == model.high == 255
    assert model.density == pytest.approx(0.05, abs=0.01)


def test_values_inside_the_range_of_other_noise_are_found():
    noisy = CLEAN["coins"] + np.random.default_rng(1).normal(0, 10, CLEAN["coins"].shape)
    noisy[0, :2] = -40, 300
    model = found(Impulses(0.2, 0.0, 255.0).sample(noisy, rng=0))
    assert (model.low, model.high) == (0, 255)


def test_impulses_of_signals_and_of_colours_are_found():
    signal = steps_and_waves(3000)
    model = found(Impulses(0.1, -9.0, 9.0).sample(signal, rng=0))
    assert (model.low, model.high) == (-9, 9)
    assert model.density == pytest.approx(0.1, abs=0.03)
    colours = data.astronaut()[:200, :200].astype(float)
    assert find_impulses(Impulses(0.1, 0.0, 255.0).sample(colours, rng=0, channel_axis=-1)).density == pytest.approx(
        0.1, abs=0.01
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("sigma", [0, 20, 200])
def test_clean_pictures_and_clipped_noise_have_none(name, sigma):
    noise = np.random.default_rng(0).normal(0, sigma, CLEAN[name].shape)
    assert found(np.clip(np.rint(CLEAN[name] + noise), 0, 255)) is None


@pytest.mark.parametrize("image", [np.zeros((9, 9)), np.eye(64), steps_and_waves(500), (data.horse() * 255.0)])
def test_flat_pictures_drawings_and_signals_have_none(image):
    assert found(image) is None


def test_the_paper_of_a_page_of_small_letters_is_no_impulses():
    page = np.full((150, 150), 235.0)
    rng = np.random.default_rng(0)
    page[::3, ::2] = rng.integers(30, 200, page[::3, ::2].shape)
    assert found(page) is None


def test_a_saturated_photograph_has_none():
    assert found(np.clip(2 * CLEAN["camera"] - 120, 0, 255)) is None


@pytest.mark.slow
def test_what_was_found_is_filled_in():
    clean = CLEAN["camera"][60:160, 60:160].astype(float)
    z = Impulses(0.2, 0.0, 255.0).sample(clean, rng=0)
    missing = found(z).reduce(z[..., None]).missing
    best = max(psnr(clean, median_filter(z, size)) for size in (3, 5, 7))
    assert psnr(clean, denoise(z, 0.0, mask=missing)) > best + 3


# ---- the interface


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((1.0, 0, 1), "density"), ((-0.1, 0, 1), "density"), ((0.1, 2, 1), "low"), ((0.1, 0, np.inf), "high"),
     ((0.1, 0, 1, 2), "random"), (("a", 0, 1), "density"), ((None, 0.0), "low"), ((None, math.nan, 255), "high"),
     ((None, math.nan, math.nan, True), "random")],
)  # fmt: skip
def test_bad_models_are_refused(arguments, name):
    with pytest.raises(InputError, match=f"^{name}: got"):
        Impulses(*arguments)


def test_a_density_without_values_is_refused_by_name():
    for given in ({}, {"low": 0.0}):
        with pytest.raises(InputError, match=r"^(low|high): got none beside density=0.1, expected the value"):
            Impulses(0.1, **given)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.float32, np.float64])
def test_values_need_not_be_of_the_type_of_the_samples(kind):
    image = np.random.default_rng(0).integers(50, 200, (40, 40, 1)).astype(kind)
    image[7, 9], image[30, 30] = 100, 0
    hits = Impulses(0.01, 0.0, 1e6).hits(image)
    assert hits[30, 30]
    assert hits.sum() == 1
    assert not Impulses(0.01, -5.0, 300.5).hits(image).any()


def test_strength_cannot_be_scaled_and_every_sample_cannot_be_missing():
    noise = Impulses(0.1, 0.0, 0.0)
    assert noise.scaled(1.0) == noise
    with pytest.raises(InputError, match=r"^factor: got 2"):
        noise.scaled(2.0)
    with pytest.raises(InputError, match=r"^image: every sample"):
        Impulses(0.9, 0.0, 0.0).reduce(np.zeros((2, 2, 1)))


def test_a_model_is_told_and_written_down():
    noise = Impulses(np.float32(0.25), 0, 255)
    assert noise.as_dict() == {"kind": "impulses", "density": 0.25, "low": 0.0, "high": 255.0, "random": False}
    assert "25 %" in noise.describe()


# ---- asked for by a word, and found in the samples


@pytest.mark.parametrize(
    ("word", "noise"),
    [
        ("impulses", Impulses(0.1, 0.0, 255.0)), ("impulses", Impulses(0.03, -200.0, 500.0, random=True)),
        ("hot", HotPixels(0.003, 300.0, fixed=False)),
    ],
)  # fmt: skip
def test_outliers_that_a_word_asks_for_are_filled_in(word, noise):
    clean = CLEAN["camera"][:128, :128]
    z = noise.sample(clean + np.random.default_rng(0).normal(0, 5, clean.shape), rng=1)
    result, info = denoise(z, noise=word, quality="fast", strength=0.9, return_info=True)
    assert psnr(clean, result) > psnr(clean, denoise(z, 5.0, quality="fast")) + 5
    assert info.model["kind"] == noise.kind
    assert 0.2 * noise.density < info.model["density"] < 1.2 * noise.density


def test_where_there_are_none_a_word_changes_little():
    z = CLEAN["moon"][:96, :96] + np.random.default_rng(0).normal(0, 5, (96, 96))
    np.testing.assert_array_equal(denoise(z, noise="hot", quality="fast"), denoise(z, noise="white", quality="fast"))
    with pytest.raises(InputError, match="density: got None"):
        Impulses().sample(z)


# ---- outliers of images: what is sharper than the optics


def seen_through_optics(width, seed=0, count=50):
    """Return stars of 500 to 20 000 counts over a sky of 100, and where they are with their flux."""
    rng = np.random.default_rng(seed)
    edges, sky, stars = np.arange(129) - 0.5, np.full((128, 128), 100.0), []
    for row, column, flux in zip(*rng.uniform(6, 122, (2, count)), np.geomspace(500, 20_000, count), strict=True):
        across = [np.diff(erf((edges - at) / width / np.sqrt(2))) / 2 for at in (row, column)]
        sky += flux * np.multiply.outer(*across)
        stars.append((row, column, flux))
    return sky, stars


@pytest.mark.parametrize("width", [0.8, 1.0, 1.5])
@pytest.mark.parametrize("noisy", [False, True])
def test_stars_are_no_outliers(width, noisy):
    sky, _ = seen_through_optics(width)
    z = np.random.default_rng(0).poisson(sky) + noisy * np.random.default_rng(1).normal(0, 5, sky.shape)
    assert find_hot_pixels(z[..., None]) is None
    assert HotPixels(0.001, fixed=False).reduce(z[..., None].astype(float)).missing is None


@pytest.mark.slow
@pytest.mark.parametrize("width", [0.8, 1.2])
def test_bright_stars_keep_their_flux_when_outliers_are_looked_for(width):
    sky, stars = seen_through_optics(width, count=12)
    z = np.random.default_rng(0).poisson(sky) + np.random.default_rng(1).normal(0, 2, sky.shape)
    result = denoise(z, noise=HotPixels(0.001, fixed=False))
    aperture = 11 * 10.2  # the noise of the sky in 11 x 11 samples
    for row, column, flux in stars:
        near = np.s_[max(round(row) - 5, 0) : round(row) + 6, max(round(column) - 5, 0) : round(column) + 6]
        assert np.sum(result[near] - z[near]) == pytest.approx(0, abs=0.03 * flux + 3 * aperture)


def test_hot_and_dead_pixels_and_tracks_of_cosmic_rays_are_missing():
    sky, _ = seen_through_optics(1.2)
    z = np.random.default_rng(0).poisson(sky).astype(float)
    strange = np.zeros(z.shape, bool)
    strange[tuple(np.random.default_rng(2).integers(2, 126, (2, 20)))] = True
    strange[40, 60:66] = strange[range(80, 85), range(20, 25)] = True
    z[strange] += np.random.default_rng(3).uniform(200, 4000, np.count_nonzero(strange))
    z[100, 100] = z[20, 110] = 0
    strange[100, 100] = strange[20, 110] = True
    found = find_hot_pixels(z[..., None])
    assert found.density == pytest.approx(strange.mean(), rel=0.2)
    assert found.level == pytest.approx(float((z - sky)[strange].mean()), rel=0.2)  # in units of the image
    missing = found.reduce(z[..., None]).missing
    assert missing[strange].mean() > 0.85  # not those beside a star
    assert np.count_nonzero(missing & ~strange) <= 1
    told = estimate_noise(z).model
    assert told.parts[0].kind == "hot-pixels"


@pytest.mark.parametrize("sigma", [1.0, 7.0])
def test_the_points_of_sharp_borders_in_all_slices_are_no_hot_pixels(sigma):
    assert find_hot_pixels(noisy(ellipsoids(1), sigma)[..., None]) is None


def test_hot_pixels_of_a_sharp_photograph_are_found_where_they_are_strewn():
    clean = CLEAN["camera"]
    z = clean + np.random.default_rng(0).normal(0, 5, clean.shape)
    assert find_hot_pixels(z[..., None]) is None
    at = tuple(np.random.default_rng(1).integers(0, 256, (2, 80)))
    z[at] += 300
    missing = find_hot_pixels(z[..., None]).reduce(z[..., None]).missing
    assert missing[at].mean() > 0.9
    assert np.count_nonzero(missing) < 84


def test_clipped_noise_of_a_camera_is_ruled_out_by_a_look_at_few(monkeypatch: pytest.MonkeyPatch):
    clean = data.camera()[:256, :256].astype(float)
    z = np.clip(np.rint(np.random.default_rng(0).normal(clean, np.sqrt(40 + clean))), 0, 255)
    monkeypatch.setattr(finders, "_density", lambda *_: pytest.fail("all samples were looked at"))
    assert find_impulses(z[..., None]) is None


@pytest.mark.parametrize("sigma", [0, 8])
def test_strokes_and_single_pixels_of_drawings_stay(sigma):
    page = np.full((120, 120), 235.0)
    page[10::12, 5:115] = 30  # strokes of a pixel
    page[range(20, 100), range(20, 100)] = 60
    page[4::12, 8:110:9] = 20  # dots
    z = page + np.random.default_rng(0).normal(0, sigma, page.shape)
    for picture in (z, data.text()[:, :170] + np.random.default_rng(0).normal(0, sigma, (172, 170))):
        assert find_hot_pixels(picture[..., None]) is None


def marked(rows, columns):
    drawn = np.zeros((256, 256))
    drawn[rows, columns] = 120
    return drawn


COUNT = np.arange(256)
GENTLE, STEEP = ((128 + a * np.sin(COUNT / b)).astype(int) for a, b in ((60, 30), (115, 20)))
DRAWN = {
    "a short line": marked(20 + COUNT[:60], 40 + COUNT[:60]),
    "a dotted line": marked(128, np.arange(20, 236, 6)),
    "points in a corner": marked(*np.s_[40:80:8, 40:80:8]),
    "points on a lattice": marked(*np.s_[25::51, 25::51]),
    "a curve": marked(GENTLE, COUNT),
    "a steep curve": marked(STEEP, COUNT),
    "ends of lines": np.maximum(marked(100, COUNT[30:220]), marked(COUNT[40:200], 77)),
}


@pytest.mark.parametrize("name", DRAWN)
def test_lines_and_points_on_smooth_ground_stay(name):
    """Nothing else of the picture tells that it is as sharp as a pixel."""
    clean = 100 + 25 * np.sin(COUNT / 17)[:, None] + 20 * np.cos(COUNT / 23)
    drawn, rng = DRAWN[name], np.random.default_rng(0)
    z = clean + drawn + rng.normal(0, 3, clean.shape)
    assert find_hot_pixels(z[..., None]) is None


@pytest.mark.parametrize("step", [6, 12, 51])
def test_dots_of_one_value_on_a_lattice_are_no_impulses(step):
    z = np.rint(100 + 25 * np.sin(COUNT / 17)[:, None] + np.random.default_rng(0).normal(0, 3, (256, 256)))
    share = 1 / step**2
    strewn = np.where(np.random.default_rng(1).random(z.shape) < share, 255, z)
    assert found(strewn).density == pytest.approx(share, rel=0.4)
    z[step // 2 :: step, step // 2 :: step] = 255
    assert found(z) is None


def test_hot_pixels_beside_lines_are_found_and_the_lines_stay():
    clean = 100 + 25 * np.sin(COUNT / 17)[:, None] + DRAWN["a short line"] + DRAWN["a curve"]
    rng = np.random.default_rng(0)
    hot = (rng.random(clean.shape) < 0.0015) & (maximum_filter(clean, 7) < 130)
    z = (clean + 150 * hot + rng.normal(0, 3, clean.shape))[..., None]
    assert np.array_equal(find_hot_pixels(z).reduce(z).missing, hot)


def test_few_hot_pixels_of_a_smooth_picture_are_found_wherever_they_are():
    clean, rng = 100 + 25 * np.sin(COUNT[:128] / 17)[:, None] + np.zeros(128), np.random.default_rng(0)
    count = 0
    for k in (5, 8, 12, 20) * 10:
        z = clean + rng.normal(0, 3, clean.shape)
        z.flat[rng.choice(z.size, k, replace=False)] += 200
        count += find_hot_pixels(z[..., None]) is not None
    assert count >= 39


def test_outliers_of_one_corner_of_a_frame_are_no_hot_pixels():
    z = np.random.default_rng(0).normal(100, 3, (12, 64, 64))
    z[5, :20, :20] += 150 * (np.random.default_rng(1).random((20, 20)) < 0.1)
    assert find_hot_pixels(z[..., None]) is None


@pytest.mark.parametrize("mean", [0.05, 0.3, 1.0])
def test_single_counts_are_no_outliers(mean):
    z = np.random.default_rng(0).poisson(mean * waves(160, 160).clip(0.1)).astype("u1")
    assert estimate_noise(z).model.kind == "poisson"


def test_a_density_out_of_range_is_named_before_values_that_are_missing():
    with pytest.raises(InputError, match=r"^density: got 1\.5"):
        Impulses(1.5)
