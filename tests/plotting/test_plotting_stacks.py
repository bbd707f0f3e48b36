"""The figure of a stack: which slices or frames it shows, how high their pixels are, and what is marked in them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from nlflow.errors import InputError
from nlflow.plotting import render, stack_figure

RNG = np.random.default_rng(8)
VOLUME = RNG.normal(size=(6, 10, 16))


def rows(figure: Any, columns: int) -> list[list[Any]]:
    """Return the panels without the colour bar."""
    axes = figure.axes[:-1]
    return [axes[start : start + columns] for start in range(0, len(axes), columns)]


def shown(axis: Any) -> Any:
    return np.ma.filled(axis.images[0].get_array(), np.nan)


def test_slices_through_the_middle_in_three_directions() -> None:
    result = VOLUME * 0.5
    figure = stack_figure(VOLUME, result, axes="ZYX", sigma=0.5, title="a$b$.tif")
    panels = rows(figure, 3)
    middle = [VOLUME[3], VOLUME[:, 5], VOLUME[:, :, 8]]
    assert [row[0].get_ylabel() for row in panels] == [
        "Y and X\nZ = 4 of 6", "Z and X\nY = 6 of 10", "Z and Y\nX = 9 of 16"]  # fmt: skip
    for row, expected in zip(panels, middle, strict=True):
        for axis, factor in zip(row, (1, 0.5, 0.5), strict=True):
            np.testing.assert_allclose(shown(axis), factor * expected)
        assert row[2].images[0].get_clim() == (-1.5, 1.5)
        limits = {axis.images[0].get_clim() for axis in row[:2]}
        assert limits == {(min(one.min() for one in middle), max(one.max() for one in middle))}
    assert [axis.get_title() for axis in panels[0]] == ["noisy", "denoised", "noisy − denoised, σ = 0.5"]
    assert render(figure, "png").startswith(b"\x89PNG")


@pytest.mark.slow
def test_any_order_of_axes_shows_the_same() -> None:
    data = RNG.normal(size=(6, 10, 16, 3))
    first, second = (
        stack_figure(given, given * 0, axes=axes, sigma=1, spacing=spacing)
        for given, axes, spacing in (
            (data, "ZYXC", (3, 1, 2)),
            (data.transpose(3, 2, 0, 1), "CXZY", (2, 3, 1)),
        )
    )
    for one, two in zip(first.axes[:-1], second.axes[:-1], strict=True):
        np.testing.assert_array_equal(shown(one), shown(two))
        assert one.images[0].get_extent() == two.images[0].get_extent()


def test_pixels_are_as_high_and_wide_as_their_distances() -> None:
    figure = stack_figure(VOLUME, VOLUME, axes="ZYX", sigma=1, spacing=(2.5, 1, 0.5))
    figure.canvas.draw()
    for row, (height, width) in zip(rows(figure, 3), ((10, 8), (15, 8), (15, 10)), strict=True):
        left, right, bottom, top = row[0].images[0].get_extent()
        assert (right - left, bottom - top) == (width, height)
        box = row[0].transData.transform([(left, top), (right, bottom)])
        assert abs(box[1, 1] - box[0, 1]) / abs(box[1, 0] - box[0, 0]) == pytest.approx(height / width, rel=0.02)


def test_a_scan_is_upright() -> None:
    figure = stack_figure(VOLUME, VOLUME, axes="ZYX", sigma=1, upward="Z")
    panels = rows(figure, 3)
    np.testing.assert_array_equal(shown(panels[0][0]), VOLUME[3])
    np.testing.assert_array_equal(shown(panels[1][0]), VOLUME[::-1, 5])
    np.testing.assert_array_equal(shown(panels[2][0]), VOLUME[::-1, :, 8])


@pytest.mark.parametrize(("count", "frames"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (30, [6, 16, 25])])
def test_three_frames_of_a_clip(count: int, frames: list[int]) -> None:
    clip = RNG.normal(size=(count, 8, 12))
    panels = rows(stack_figure(clip, clip * 0, axes="TYX", sigma=1), 3)
    assert [row[0].get_ylabel() for row in panels] == [f"frame {n} of {count}" for n in frames]
    for row, number in zip(panels, frames, strict=True):
        np.testing.assert_array_equal(shown(row[0]), clip[number - 1])


def test_large_frames_get_a_magnified_part() -> None:
    noisy = np.random.default_rng(0).standard_normal((3, 300, 400))
    missing = np.zeros(noisy.shape, bool)
    missing[:, :150] = True
    figure = stack_figure(noisy, 0 * noisy, axes="TYX", sigma=1, missing=missing)
    first, second, residual = figure.axes[9:12]
    found = re.fullmatch(r"frame 2 of 3\nrows (\d+):(\d+)\ncolumns (\d+):(\d+)", first.get_ylabel())
    assert found is not None
    top, bottom, left, right = map(int, found.groups())
    assert (bottom - top, right - left) == (120, 160)
    part = np.where(missing, np.nan, noisy)[1, top:bottom, left:right]
    np.testing.assert_array_equal(np.asarray(first.images[0].get_array())[~np.isnan(part)], part[~np.isnan(part)])
    np.testing.assert_array_equal(np.ma.filled(residual.images[0].get_array(), np.nan), part)
    assert first.get_xlim() == second.get_xlim() == figure.axes[0].get_xlim()  # as wide as a frame


def test_the_time_in_the_middle_of_volumes() -> None:
    volumes = RNG.normal(size=(5, *VOLUME.shape))
    figure = stack_figure(volumes, volumes, axes="TZYX", sigma=1, title="h.tif")
    np.testing.assert_array_equal(shown(rows(figure, 3)[0][0]), volumes[2, 3])
    assert figure.get_suptitle() == "h.tif, time 3 of 5"


def test_channels() -> None:
    colours = np.stack([VOLUME] * 3, axis=-1)
    axis = rows(stack_figure(colours, colours * 0, axes="ZYXC", sigma=1), 3)[0][0]
    assert shown(axis).shape == (10, 16, 3)
    two = VOLUME[:, None] * np.array([1.0, 3.0])[:, None, None]
    panels = rows(stack_figure(two, two * 0, axes="ZCYX", sigma=1), 3)
    np.testing.assert_allclose(shown(panels[0][0]), 2 * VOLUME[3])
    assert "mean of 2 channels" in panels[0][0].get_title()
    assert "mean of 2 channels" in panels[0][2].get_title()


@pytest.mark.slow
def test_a_reference_gives_the_psnr_of_the_whole_stack() -> None:
    clean = np.zeros((6, 8, 9))
    clean[0, 0, 0] = 10
    figure = stack_figure(clean + 1, clean + 0.1, axes="ZYX", sigma=1, clean=clean)
    titles = [axis.get_title() for axis in rows(figure, 4)[0]]
    assert titles == ["noisy, PSNR 20.00 dB", "denoised, PSNR 40.00 dB", "clean", "noisy − denoised, σ = 1"]


def test_missing_and_kept_samples_are_marked() -> None:
    missing, kept = np.zeros(VOLUME.shape, bool), np.zeros(VOLUME.shape, bool)
    missing[3, 1, 2], kept[2:5, 4:7, 5:12] = True, True
    noisy = VOLUME.copy()
    noisy[missing] = np.nan
    figure = stack_figure(noisy, VOLUME, axes="ZYX", sigma=1, missing=missing, kept=kept, clean=VOLUME)
    panels = rows(figure, 4)
    assert np.isnan(shown(panels[0][3])).sum() == 1
    assert np.isnan(shown(panels[0][3])[1, 2])
    assert len(panels[0][0].images) == 2
    assert len(panels[1][0].images) == 1
    assert all(row[column].collections for row in panels for column in (0, 3))
    x, y = panels[0][0].collections[0].get_paths()[0].vertices.T
    assert (x.min(), x.max(), y.min(), y.max()) == (5, 12, 4, 7)
    assert "missing: magenta and grey; kept: outlined" in panels[0][3].get_title()
    assert panels[0][0].get_title() == "noisy"
    without = stack_figure(noisy, VOLUME, axes="ZYX", sigma=1, missing=missing)
    np.testing.assert_array_equal(shown(rows(without, 3)[0][2]), shown(panels[0][3]))


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "axes"), [((1, 1, 1), "ZYX"), ((2, 1, 30), "TYX"), ((300, 4, 5), "ZYX")])
def test_odd_shapes_and_no_noise(shape: tuple[int, ...], axes: str) -> None:
    figure = stack_figure(np.zeros(shape), np.zeros(shape), axes=axes, sigma=0)
    assert render(figure, "svg").startswith(b"<?xml")
    assert max(figure.get_size_inches()) < 25


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"axes": "YX"}, "axes: got 'YX'"),
        ({"axes": "ZZX"}, "axes: got 'ZZX'"),
        ({"axes": "CYX"}, "with Z, T or both"),
        ({"axes": "ZCYX"}, "one letter for each axis"),
        ({"spacing": (1, 1)}, "spacing: got 2 number(s), expected 3"),
        ({"spacing": (1, 0, 1)}, "spacing: got 0"),
        ({"upward": "T"}, "upward: got 'T'"),
        ({"result": VOLUME[1:]}, "result: got shape"),
        ({"clean": VOLUME[1:]}, "clean: got shape"),
        ({"missing": VOLUME[1:] > 0}, "missing: got shape"),
        ({"kept": VOLUME[1:] > 0}, "kept: got shape"),
    ],
)
def test_what_does_not_fit_is_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as told:
        stack_figure(VOLUME, **{"result": VOLUME, "axes": "ZYX", "sigma": 1.0, **words})
    assert message in str(told.value)
