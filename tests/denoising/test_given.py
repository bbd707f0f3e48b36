"""Data as instruments give it: what is missing, "no data", opacity; what stays in the result, and what is told."""

from __future__ import annotations

import json
import warnings
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from nlflow import InputError, NlflowWarning, denoise, estimate_noise, estimate_sigma
from nlflow.denoising.given import Beside, find_nodata, refuse_unordered
from nlflow.denoising.large import denoise_array
from nlflow.denoising.large.arrays import denoised
from nlflow.denoising.large.stream import denoise_frames, surveyed
from nlflow.denoising.options import Options
from nlflow.desk.formats.tiff_pages import NODATA, no_data
from tests.commands import fails, run
from tests.pictures import Floats, noisy, waves

FAST = ("--quality", "pixels", "--json")
CLEAN = 40 + 60 * waves(64, 72)
NOISY = noisy(CLEAN, 5.0)
HOLE = np.zeros(CLEAN.shape, bool)
HOLE[20:34, 30:50] = True


def quiet(*arguments: Any, **words: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)
        return denoise(*arguments, **words)


def test_nan_is_missing_without_being_asked_and_stays() -> None:
    holes = np.where(HOLE, np.nan, NOISY)
    result, info = denoise(holes, 5.0, quality="pixels", return_info=True)
    np.testing.assert_array_equal(np.isnan(result), HOLE)
    # The others are what they are when the hole is filled in, as a mask asks for.
    filled = denoise(holes, 5.0, quality="pixels", mask="nan")
    np.testing.assert_array_equal(result[~HOLE], filled[~HOLE])
    assert np.isfinite(filled).all()
    assert info.given == ("280 samples (6.08%) are NaN, which counts as missing, and stay as they are",)
    assert estimate_sigma(holes) == pytest.approx(5, rel=0.15)
    assert info.given[0] in estimate_noise(holes).reasons


def test_without_noise_holes_that_stay_cost_nothing_and_filling_them_is_no_noise() -> None:
    image = np.add.outer(np.arange(24.0), np.arange(24.0) ** 2)
    image[5:9, 6:12] = np.nan
    same, info = denoise(image, 0.0, quality="fast", return_info=True)
    np.testing.assert_array_equal(same, image)
    assert (info.steps, info.sigma) == (0, 0.0)
    whole, info = denoise(image, 0.0, quality="fast", mask="nan", return_info=True)
    assert np.isfinite(whole).all()
    assert info.steps > 0
    assert info.sigma == 0


def test_a_mask_fills_in_what_it_names_alone() -> None:
    value, mask = NOISY.copy(), np.zeros(HOLE.shape, bool)
    value[3, 4] = value[40, 41] = np.nan
    mask[3, 4] = True
    result = denoise(value, 5.0, quality="pixels", mask=mask)
    np.testing.assert_array_equal(np.argwhere(np.isnan(result)), [[40, 41]])


@pytest.mark.parametrize("kind", [np.float32, np.uint8, np.int16])
def test_masked_arrays_stay_masked(kind: type) -> None:
    values = np.rint(NOISY).astype(kind)
    values[HOLE] = 7
    given = np.ma.array(values, mask=HOLE)
    result = denoise(given, 5.0, quality="pixels", preserve_range=True)
    assert isinstance(result, np.ma.MaskedArray)
    np.testing.assert_array_equal(result.mask, HOLE)
    np.testing.assert_array_equal(result.data[HOLE], 7)
    plain = denoise(values, 5.0, quality="pixels", preserve_range=True, mask=HOLE)
    np.testing.assert_array_equal(result.data[~HOLE], plain[~HOLE])
    assert not np.ma.getmaskarray(denoise(given, 5.0, quality="pixels", mask=HOLE)).any()  # filled in, as asked


def test_channels_of_a_pixel_stay_where_one_is_missing_and_empty_channels_count_for_nothing() -> None:
    value = np.stack([NOISY, NOISY[::-1], np.full(CLEAN.shape, np.nan), NOISY[:, ::-1]])
    value[0, 5, 6] = np.nan
    result = denoise(value, 5.0, quality="pixels", channel_axis=0)
    assert np.isnan(result[2]).all()
    np.testing.assert_array_equal(result[:, 5, 6], value[:, 5, 6])
    assert np.count_nonzero(np.isnan(result[[0, 1, 3]])) == 1
    each = denoise(value, 5.0, quality="pixels", channel_axis=0, separate=True)
    np.testing.assert_array_equal(np.isnan(each), np.isnan(value))


@pytest.mark.parametrize(
    ("value", "words", "message"),
    [
        (np.full((9, 9), np.nan), {}, "got no sample that is a number"),
        (np.ma.array(np.ones((9, 9)), mask=True), {}, "got no sample that is a number"),
        (np.where(HOLE, np.nan, NOISY), {"mask": ~HOLE}, "mask: hides every sample that is not missing already"),
        (np.where(HOLE[..., None] == [0, 1], np.nan, 1.0), {"channel_axis": -1}, "no pixel that all of its channels"),
        (np.ma.array(np.ones((9, 9)), mask=True), {"mask": np.ones((9, 9), bool)}, "mask: hides every sample"),
    ],
)
def test_what_leaves_nothing_is_refused(value: Any, words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        denoise(value, 1.0, **words)


# ---- "no data"


def elevation(kind: Any = np.float32) -> Floats:
    return (300 + 5 * NOISY).astype(kind)


@pytest.mark.parametrize(
    ("value", "nodata"),
    [(elevation(), -9999.0), (elevation(), 0.0), (elevation(), -3.4028234663852886e38), (elevation(np.int16), -32768),
     (elevation(np.uint16), 0), (elevation(np.uint16), 65535), (NOISY, 0.0), (NOISY, 100.0)],
)  # fmt: skip
def test_no_data_is_found_told_and_stays_to_the_bit(value: Any, nodata: float) -> None:
    given = np.where(HOLE, value.dtype.type(nodata), value)
    with pytest.warns(NlflowWarning, match="280 samples .* which counts as missing"):
        result, info = denoise(given, 5.0, quality="pixels", preserve_range=True, return_info=True)
    np.testing.assert_array_equal(result[HOLE], given[HOLE])
    assert len(info.given) == 1
    # As with a mask, which says that this is all that is missing.
    filled = denoise(given, 5.0, quality="pixels", preserve_range=True, mask=HOLE)
    np.testing.assert_array_equal(result[~HOLE], filled[~HOLE])
    none = quiet(given, 5.0, quality="pixels", preserve_range=True, mask=np.zeros(HOLE.shape, bool))
    assert not np.array_equal(none[~HOLE], result[~HOLE])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("value", [0.0, -2.0, 2.0])
def test_what_lies_beside_a_value_is_counted_pixel_by_pixel(value: float, channels: int) -> None:
    rng = np.random.default_rng(5)
    array = np.clip(np.round(rng.normal(0, 3, (9, 11, channels))), -2, 2)
    array[2:7, 3:9] = value
    absent = rng.random((9, 11)) < 0.1
    found = Beside.of(value, array if channels > 1 else array[..., 0], 2 if channels > 1 else None, absent)
    at = (array == value).all(axis=2) & ~absent
    away, whole, alone = [], 0, 0
    for y, x in np.ndindex(9, 11):
        near = [at[(y + dy) % 9, (x + dx) % 11] for dy, dx in ((0, 1), (0, -1), (1, 0), (-1, 0))]
        whole += at[y, x] and all(near)
        alone += not at[y, x] and all(near)
        if not at[y, x] and any(near):
            away += [abs(sample - value) for sample in array[y, x]]
    others = array[~(at | absent)]
    assert (found.size, found.count, found.others) == (99, at.sum(), others.size)
    assert (found.whole, found.alone) == (whole, alone)
    assert (found.low, found.high) == (others.min(), others.max())
    assert found.below == max(others[others < value], default=-np.inf)
    assert found.above == min(others[others > value], default=np.inf)
    np.testing.assert_array_equal(found.away, away)


def test_zeros_in_a_hole_are_told_from_samples_that_are_all_below_zero() -> None:
    at, why = find_nodata(np.where(HOLE, 0.0, -np.abs(NOISY)), None)
    np.testing.assert_array_equal(at, HOLE)
    assert why == "0, the only value that repeats"


def test_a_value_by_convention_may_be_alone() -> None:
    value = elevation()
    value[9, 9] = -9999
    at, _ = find_nodata(value, None)
    np.testing.assert_array_equal(np.argwhere(at), [[9, 9]])


def not_nodata() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    disc = np.hypot(*np.mgrid[-40:40, -40:40]) < 25
    return {
        "noise": NOISY,
        "clipped": np.clip(rng.normal(0, 1, (80, 80)), 0, None),
        "cut off below its mean": np.clip(rng.normal(-1, 1, (80, 80)), 0, None),
        "deep shadows": np.clip(noisy(CLEAN, 5.0) - 60, 0, None),
        "saturated": np.minimum(noisy(CLEAN, 5.0), 60),
        "counts": rng.poisson(0.05 + 3 * disc).astype(np.uint16),
        "impulses": np.where(rng.random((64, 72)) < 0.2, 255, np.rint(NOISY)).astype(np.uint8),
        "a mask": disc.astype(np.uint8) * 255,
        "three values": disc.astype(np.uint8) + 3 * np.roll(disc, 9).astype(np.uint8),
        "a drawing": np.where(disc, np.rint(np.linspace(0, 255, 80)), 255).astype(np.uint8),
        "a photograph on black": np.where(disc, 20 + np.rint(np.linspace(-20, 99, 80)), 0).astype(np.uint8),
        "steps": np.repeat(np.arange(8.0), 100),
    }


@pytest.mark.parametrize("name", not_nodata())
def test_values_that_are_data_are_none(name: str) -> None:
    assert find_nodata(not_nodata()[name], None)[0] is None


# ---- opacity


def test_an_alpha_channel_stays_and_what_it_hides_counts_as_missing() -> None:
    colours = np.clip(np.rint(noisy(np.stack([CLEAN, CLEAN[::-1], CLEAN[:, ::-1]], -1), 5.0)), 0, 255).astype(np.uint8)
    alpha = np.full(CLEAN.shape, 255, np.uint8)
    alpha[:, :20], alpha[:, 20] = 0, 90
    colours[:, :20] = 255
    picture = np.dstack([colours, alpha])
    result, info = denoise(picture, 5.0, quality="pixels", channel_axis=-1, preserve_range=True, return_info=True)
    np.testing.assert_array_equal(result[..., 3], alpha)
    np.testing.assert_array_equal(result[:, :20], picture[:, :20])
    assert info.given == ("channel 3 is an alpha channel, and stays as it is",)
    mask = np.broadcast_to(np.arange(72) < 20, CLEAN.shape)
    plain = denoise(colours, 5.0, quality="pixels", channel_axis=-1, preserve_range=True, mask=mask)
    np.testing.assert_array_equal(result[:, 20:, :3], plain[:, 20:])


# ---- what is too little


def test_fewer_samples_than_a_patch_are_refused_unless_their_noise_is_told() -> None:
    for value in (NOISY[:4, :4], NOISY.ravel()[:9]):
        with pytest.raises(InputError, match=f"got {value.size} samples, fewer than the .* of a patch"):
            denoise(value)
        assert denoise(value, 5.0).shape == value.shape


# ---- what has no order


def unordered() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:96, :96] / 10.0
    phases = np.angle(np.exp(1j * (columns**2 / 4 + rows + 0.2 * rng.normal(size=rows.shape))))
    seeds = rng.uniform(0, 9.6, (12, 2))
    return {
        "phases": phases,
        "phases from 0": phases % (2 * np.pi),
        "labels": np.argmin([np.hypot(rows - y, columns - x) for y, x in seeds], axis=0),
        "wrapped below 0": np.rint(8 * rng.normal(size=rows.shape) + np.sin(columns)).astype(int).astype(np.uint16),
        "wrapped above": np.rint(3e4 + 5e3 * np.sin(columns) + 300 * rng.normal(size=rows.shape))
        .astype(int)
        .astype(np.uint16)
        .view(np.int16),
    }


_SAID = {"phases": "phases that jump", "labels": "image of 12 labels", "wrapped": "from one end of its range"}


@pytest.mark.parametrize("name", unordered())
def test_what_has_no_order_is_refused_by_name_unless_told_otherwise(name: str) -> None:
    value = unordered()[name]
    for find in (estimate_noise, lambda image: denoise(image, preserve_range=True)):
        with pytest.raises(InputError, match=_SAID[name.partition(" ")[0]]):
            find(value)
    assert denoise(value, 0.5, quality="fast", preserve_range=True).shape == value.shape


def ordered() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:96, :96] / 10.0
    drawing = np.full((96, 96), 255, np.uint8)
    drawing[10:40, 20:60], drawing[50:80, 30:90], drawing[45:60, 5:35] = 60, 128, 0
    return {
        "angles that do not wrap": np.clip(3 * np.sin(columns) + 0.3 * rng.normal(size=rows.shape), -np.pi, np.pi),
        "uniform noise": rng.uniform(-np.pi, np.pi, (96, 96)),
        "two values": np.where(columns > 5, np.pi, -np.pi),
        "a drawing": drawing,
        "a clipped square wave": np.clip(
            32768 * np.sign(np.sin(columns)) + 300 * rng.normal(size=rows.shape), -32768, 32767
        ).astype(np.int16),
        "noisy letters": np.clip(
            np.where(np.sin(columns) > 0.5, 3e3, 6e4) + 1e3 * rng.normal(size=rows.shape), 0, 65535
        ).astype(np.uint16),
        "all values": rng.integers(0, 65536, rows.shape).astype(np.uint16),
        "few counts": rng.poisson(0.1, (96, 96)),
        "counts": rng.poisson(4, (96, 96)),
        "steps of grey": np.rint(4 + 3 * np.sin(columns) * np.sin(rows)).astype(int),
    }


@pytest.mark.parametrize("name", ordered())
def test_what_has_an_order_is_not_refused(name: str) -> None:
    value = ordered()[name]
    refuse_unordered(value[..., None].astype(np.float64), value.dtype)


# ---- the same by every road


@pytest.mark.sampled(3)
@pytest.mark.parametrize("nodata", [np.nan, -9999.0])
@pytest.mark.parametrize("road", ["blocks", "tensor", "film"])
def test_what_says_nothing_stays_by_every_road(road: str, nodata: float) -> None:
    """As in memory, but for the seams of what is filled in: to a part of the noise of 5."""
    value = np.where(HOLE, nodata, NOISY)
    words: dict[str, Any] = {"sigma": 5.0, "quality": "fast", "return_info": True}
    if road == "film":
        value = np.broadcast_to(value, (3, *value.shape)).copy()
        words["axes"] = "TYX"
    expected, told = quiet(value, **words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)
        if road == "blocks":
            dask = pytest.importorskip("dask.array")
            lazy, info = denoise_array(dask.from_array(value, chunks=32), **words)
            result = lazy.compute()
        elif road == "film":
            frame = surveyed(value, 5.0, quality="fast")
            result = np.stack([one for _, one in denoise_frames(((k, 1, one) for k, one in enumerate(value)), frame)])
            info = frame
        else:
            torch = pytest.importorskip("torch")
            result, info = denoise(torch.from_numpy(value), **words)
    result, hidden = np.asarray(result), np.broadcast_to(HOLE, value.shape)
    np.testing.assert_array_equal(result[hidden], value[hidden])
    assert np.sqrt(np.mean((result - expected)[~hidden] ** 2)) < 0.5
    assert [text.partition(")")[2] for text in info.given] == [text.partition(")")[2] for text in told.given] or (
        road == "film" and np.isnan(nodata)
    )


def test_phases_and_a_residual_that_is_no_noise_are_seen_in_blocks() -> None:
    dask = pytest.importorskip("dask.array")
    with pytest.raises(InputError, match="phases that jump"):
        denoise_array(dask.from_array(unordered()["phases"], chunks=96), quality="fast")
    with pytest.raises(InputError, match="no sample that is a number"):
        denoise_array(dask.from_array(np.full((40, 40), np.nan)), 1.0)


@pytest.mark.slow
def test_recordings_with_a_mask_of_their_samples_keep_their_leads() -> None:
    """A mask of samples has no axis of channels."""
    torch = pytest.importorskip("torch")
    value, mask = np.stack([NOISY.ravel(), NOISY[::-1].ravel()], -1), np.zeros(NOISY.size, bool)
    mask[40:60] = True
    words = {"channel_axis": 1, "quality": "fast"}
    found = denoise(torch.from_numpy(value), 5.0, mask=torch.from_numpy(mask), **words)
    np.testing.assert_allclose(found.numpy(), denoise(value, 5.0, mask=mask, **words), atol=1e-3)


def test_tensors_take_nan_as_arrays_do() -> None:
    torch = pytest.importorskip("torch")
    value = np.where(HOLE, np.nan, NOISY)
    result = denoise(torch.from_numpy(value[:40, :56]), 5.0)
    np.testing.assert_array_equal(np.isnan(result.numpy()), HOLE[:40, :56])
    with pytest.raises(InputError, match="missing samples"):
        denoise(torch.from_numpy(value).requires_grad_(), 5.0)


# ---- files


@pytest.mark.parametrize(
    ("kind", "told", "nodata"),
    [("f4", "-9999", -9999), ("f4", "-3.4028234663852886e+38", np.finfo("f4").min), ("i2", "-32768", -32768),
     ("u1", "0", 0), ("i8", "9223372036854775807", 2**63 - 1), ("f4", "-inf", -np.inf)],
)  # fmt: skip
def test_no_data_of_a_geotiff_stays_and_its_tag_stays_true(tmp_path: Any, kind: str, told: str, nodata: float) -> None:
    value = np.rint(NOISY).astype(kind)
    value[HOLE] = nodata
    tifffile.imwrite(tmp_path / "in.tif", value, extratags=[(42113, "s", 0, told, True)])
    report = json.loads(
        run("denoise", str(tmp_path / "in.tif"), str(tmp_path / "out.tif"), "--sigma", "5", *FAST).stdout
    )
    assert report["missing"] == np.count_nonzero(value == value.dtype.type(nodata))
    with tifffile.TiffFile(tmp_path / "out.tif") as out:
        assert out.pages[0].tags[42113].value == told
        written = out.asarray()
    np.testing.assert_array_equal(written == value.dtype.type(nodata), value == value.dtype.type(nodata))
    assert not np.array_equal(written, value)


@pytest.mark.parametrize(
    ("kind", "told", "meant", "data"),
    [
        ("i8", "9007199254740993", [2**53 + 1], [2**53, 2**53 + 2]),
        ("i8", "9223372036854775807", [2**63 - 1], [2**63 - 1024]),
        ("u8", b"18446744073709551615\0", [2**64 - 1], [2**64 - 2048]),
        ("u8", "18446744073709551616", [], [2**64 - 1]),
        ("i2", "-9.999e+03", [-9999], [-9998]),
        ("u1", "-1", [], [255]),
        ("u1", "0.5", [], [0, 1]),
        ("u1", "inf", [], [255]),
        ("f4", "inf", [np.inf], [-np.inf, 1]),
        ("f4", "-1.79769313486231e+308", [-np.inf, np.finfo("f4").min], [-3e38]),
        ("f8", "-1.79769313486232e+308", [-np.inf, np.finfo("f8").min], [np.inf, -1.79e308, np.nan]),
        ("f8", "nan", [], [np.nan, 0]),
        ("f8", "none", [], [np.nan, 0]),
        ("f8", -9999.0, [-9999], [np.nan, 0]),
    ],
)
def test_no_data_tags_mean_values_of_the_type_of_the_samples(kind: str, told: Any, meant: Any, data: Any) -> None:
    found = no_data([(NODATA, 2, 0, told, True)], np.array([*meant, *data], kind))
    assert np.flatnonzero(found if found is not None else []).tolist() == list(range(len(meant)))


@pytest.mark.parametrize("nodata", [np.int64(2**63 - 1), np.finfo("f4").min])
def test_blocks_keep_the_largest_values_where_they_stand_for_no_data(nodata: Any) -> None:
    dask = pytest.importorskip("dask.array")
    value = np.rint(NOISY).astype(nodata.dtype)
    value[HOLE] = nodata if value.dtype.kind == "i" else -np.inf
    found, info, _ = denoised(dask.from_array(value), 5.0, Options(), quality="pixels", nodata=nodata)
    result = found.compute()
    np.testing.assert_array_equal(result[HOLE], value[HOLE])
    assert f"{np.count_nonzero(HOLE)} samples" in info.given[0]
    filled = denoise(np.where(HOLE, 0, value).astype(float), 5.0, quality="pixels", mask=HOLE)
    assert np.abs(result - filled)[~HOLE].max() <= 0.51


def test_a_pixel_lacks_data_where_a_file_says_so_of_one_channel_whole_and_in_blocks(tmp_path: Any) -> None:
    dask = pytest.importorskip("dask.array")
    value = np.clip(np.rint(np.stack([NOISY, NOISY[::-1], NOISY[:, ::-1]], -1)), 1, 255).astype(np.uint8)
    value[HOLE] = value[2:6, 3:9, 2] = value[50, 7, 0] = 0
    lacking = (value == 0).any(axis=-1)
    tifffile.imwrite(tmp_path / "in.tif", value, photometric="rgb", extratags=[(NODATA, "s", 0, "0", True)])
    report = json.loads(
        run("denoise", str(tmp_path / "in.tif"), str(tmp_path / "out.tif"), "--sigma", "5", *FAST).stdout
    )
    assert report["missing"] == 3 * np.count_nonzero(lacking)
    whole = tifffile.imread(tmp_path / "out.tif")
    found, info, _ = denoised(
        dask.from_array(value), 5.0, Options(), quality="pixels", channel_axis=-1, nodata=np.uint8(0)
    )
    result = found.compute()
    assert f"{np.count_nonzero(lacking)} samples" in info.given[0]
    np.testing.assert_array_equal(whole[lacking], value[lacking])
    np.testing.assert_array_equal(result[lacking], value[lacking])
    assert np.abs(result.astype(int) - whole).max() <= 1
    assert not np.array_equal(result, value)


def test_what_is_transparent_counts_for_nothing(tmp_path: Any) -> None:
    colours = np.clip(np.rint(np.stack([NOISY, NOISY[::-1], NOISY[:, ::-1]], -1)), 0, 255).astype(np.uint8)
    alpha = np.where(HOLE, 0, 255).astype(np.uint8)
    written = []
    for hidden in (0, 255):
        colours[HOLE] = hidden
        Image.fromarray(np.dstack([colours, alpha])).save(tmp_path / "in.png")
        run(
            "denoise",
            str(tmp_path / "in.png"),
            str(tmp_path / "out.png"),
            "--sigma",
            "5",
            "--existing",
            "overwrite",
            *FAST,
        )
        written.append(np.asarray(Image.open(tmp_path / "out.png")))
        np.testing.assert_array_equal(written[-1][HOLE], [[hidden] * 3 + [0]] * np.count_nonzero(HOLE))
    np.testing.assert_array_equal(written[0][~HOLE], written[1][~HOLE])


def test_a_file_without_data_is_refused_and_nothing_is_written(tmp_path: Any) -> None:
    tifffile.imwrite(tmp_path / "in.tif", np.full((9, 9), 7, np.uint8), extratags=[(42113, "s", 0, "7", True)])
    assert "none of whose samples hold data" in fails("denoise", str(tmp_path / "in.tif"), str(tmp_path / "out.tif"))
    assert not (tmp_path / "out.tif").exists()
