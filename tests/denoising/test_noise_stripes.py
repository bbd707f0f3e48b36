"""Stripes: sampling, how well they are taken out, and pictures that have none."""

import numpy as np
import pytest
from skimage import data

from nlflow import InputError, denoise, estimate_noise
from nlflow.denoising.noise import Stripes, find_stripes
from tests.pictures import rms

CLEAN = {name: getattr(data, name)().astype(np.float64)[:256, :256] for name in ("camera", "coins", "brick", "grass",
                                                                                   "page", "text", "moon")}  # fmt: skip


def found(image):
    return find_stripes(np.asarray(image)[..., None])


def reduced(noise, image):
    return noise.reduce(np.asarray(image)[..., None]).samples[..., 0]


# ---- the model


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.sampled(2)
def test_offsets_have_their_standard_deviation_and_are_the_same_along_a_line(axis, shared):
    z = Stripes(3.0, axis, shared).sample(np.zeros((2000, 2000, 2)), rng=0, channel_axis=-1)
    lines = np.moveaxis(z, axis, 0)
    assert np.ptp(lines, axis=1).max() == 0
    assert lines[:, 0, 0].std() == pytest.approx(3, rel=5 / np.sqrt(2 * 2000))
    assert np.array_equal(lines[:, 0, 0], lines[:, 0, 1]) == shared


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_offsets_of_a_flat_picture_are_taken_out_but_for_their_mean(axis, shared):
    noise = Stripes(5.0, axis, shared)
    better = noise.reduce(noise.sample(np.full((90, 120, 2), 50.0), rng=0, channel_axis=-1)).samples
    # The prior holds the lowest frequencies back by a part of the offsets' own size.
    assert np.max(np.std(better, axis=(0, 1))) < 0.05 * 5


@pytest.mark.parametrize("units", [1 / 255, 257.0])
def test_what_is_taken_out_scales_with_the_units(units):
    z = Stripes(20.0).sample(CLEAN["camera"], rng=0)
    np.testing.assert_allclose(reduced(Stripes(20.0 * units), z * units), units * reduced(Stripes(20.0), z), rtol=1e-7)


@pytest.mark.parametrize("name", ["camera", "coins", "moon"])
def test_most_of_the_noise_goes(name):
    clean = CLEAN[name]
    z = Stripes(20.0).sample(clean, rng=0)
    assert rms(reduced(Stripes(20.0), z), clean) < 0.4 * rms(z, clean)


def test_edges_along_the_stripes_stay():
    clean = np.full((120, 100), 50.0)
    clean[60:] = 200.0  # a horizon
    clean[20:40, 30:60] = 120.0
    z = Stripes(5.0).sample(clean, rng=0)
    better = reduced(Stripes(5.0), z)
    assert rms(better, clean) < 0.4 * 5
    assert np.mean(better[60:65]) - np.mean(better[55:60]) == pytest.approx(150, abs=5)


def test_a_clean_picture_is_hardly_changed():
    assert rms(reduced(Stripes(3.0), CLEAN["camera"]), CLEAN["camera"]) < 1.5


def test_missing_samples_do_not_matter():
    z = Stripes(10.0).sample(CLEAN["coins"], rng=0)
    gone = np.random.default_rng(0).random(z.shape) < 0.2
    gone[40:42] = True  # rows of which nothing is known
    first, second = (
        Stripes(10.0).reduce(np.where(gone, value, z)[..., None], gone).samples[..., 0][~gone] for value in (0.0, 1e9)
    )
    np.testing.assert_array_equal(first, second)
    assert rms(first, CLEAN["coins"][~gone]) < 0.5 * 10


def test_no_stripes_and_single_rows_change_nothing():
    for noise, image in ((Stripes(0.0), CLEAN["camera"]), (Stripes(3.0), CLEAN["camera"][:1])):
        np.testing.assert_array_equal(reduced(noise, image), image)


# ---- found without being told


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("sigma", "white"), [(3, 0), (20, 0), (10, 10)])
@pytest.mark.parametrize("name", ["camera", "coins", "brick", "grass", "page"])
@pytest.mark.sampled(6)
def test_stripes_are_found(name, sigma, white, axis):
    z = Stripes(sigma, axis).sample(CLEAN[name], rng=1) + np.random.default_rng(2).normal(0, white, (256, 256))[
        : CLEAN[name].shape[0]]  # fmt: skip
    model = found(z)
    assert model.axis == axis
    assert model.sigma == pytest.approx(sigma, rel=0.25)  # four standard errors of a median of 255 steps


@pytest.mark.filterwarnings("ignore:the noise was hard to find out")  # the rest of these coins is that of JPEG
def test_offsets_on_a_clean_picture_are_taken_out_alone():
    clean = CLEAN["coins"]
    noise = Stripes(20.0)
    z = noise.sample(clean, rng=1)
    result, info = denoise(z, return_info=True)
    assert info.model["parts"][0]["kind"] == "stripes"
    assert info.sigma == 0
    assert rms(result, clean) < 0.4 * rms(z, clean)


STEPS = np.random.default_rng(0).normal(0, 20, (256, 1))
WAVES = 40 * np.sin(np.cumsum(np.linspace(0.05, np.pi, 256)))[:, None]


@pytest.mark.parametrize("image", [STEPS + np.arange(256.0), WAVES + CLEAN["coins"]], ids=["no picture", "no noise"])
def test_offsets_that_are_drawn_stay(image):
    """With nothing beneath them, or of a law that is not that of noise."""
    assert found(image) is not None
    assert estimate_noise(image).model.kind == "gaussian"
    assert any("are drawn" in reason for reason in estimate_noise(image).reasons)


def test_whether_channels_have_the_same_offsets_is_found():
    clean = data.astronaut()[:200, :200].astype(float)
    for shared in (True, False):
        z = Stripes(10.0, 1, shared).sample(clean, rng=0, channel_axis=-1)
        assert find_stripes(z).shared == shared


@pytest.mark.slow
@pytest.mark.parametrize("white", [0, 10, 40])
@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.sampled(5)
def test_clean_pictures_and_white_noise_have_none(name, white):
    assert found(CLEAN[name] + np.random.default_rng(0).normal(0, white, CLEAN[name].shape)) is None


def test_blinds_bricks_and_signals_have_none():
    rows = np.arange(200)[:, None] * np.ones(200)
    for image in (np.where(rows % 8 < 4, 50.0, 200.0), np.sin(rows), rows % 2, np.sin(rows / 3) * 100, rows**1.5):
        assert found(image) is None
        assert found(image + np.random.default_rng(0).normal(0, 1, image.shape)) is None
    assert find_stripes(np.random.default_rng(0).normal(size=(500, 1))) is None
    assert found(np.ones((50, 50))) is None


def test_rows_that_drift_are_no_stripes():
    # All parts of a row agree on its steps, but they are those of a random walk.
    drift = np.cumsum(np.random.default_rng(0).normal(0, 5, 256))[:, None] * np.ones(256)
    assert found(drift + np.random.default_rng(1).normal(0, 1, drift.shape)) is None


# ---- the interface


@pytest.mark.parametrize(
    ("arguments", "name"), [((-1.0, 0), "sigma"), ((np.nan, 0), "sigma"), ((1.0, 2), "axis"), ((1.0, 0.5), "axis"),
                            ((1.0, 0, 1), "shared")]
)  # fmt: skip
def test_bad_models_are_refused(arguments, name):
    with pytest.raises(InputError, match=f"^{name}: got"):
        Stripes(*arguments)


def test_signals_are_refused():
    for call in (lambda: Stripes(1.0).sample(np.zeros(9)), lambda: Stripes(1.0).reduce(np.zeros((9, 1)))):
        with pytest.raises(InputError, match=r"^(clean|image): got a signal"):
            call()


def test_a_model_is_scaled_told_and_written_down():
    assert Stripes(2.0, 1).scaled(1.5) == Stripes(3.0, 1)
    assert Stripes(2.0, 1).as_dict() == {"kind": "stripes", "sigma": 2.0, "axis": 1, "shared": True}
    assert "column" in Stripes(2.0, 1).describe()


def test_white_noise_of_few_rows_has_no_stripes():
    """Offsets of 24 rows agree by chance in 1 of 200 pictures; offsets as strong as the noise are found in most."""
    rng = np.random.default_rng(0)
    flat = rng.normal(100, 10, (60, 24, 32))
    assert sum(found(one) is not None for one in flat) <= 1
    striped = flat + rng.normal(0, 10, (60, 24, 1))
    assert sum(found(one) is not None for one in striped) > 30
