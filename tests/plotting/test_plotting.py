"""The comparison figure: what is drawn, in which range, and that nothing global is touched."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from nlflow import plotting
from nlflow.errors import InputError
from nlflow.plotting import comparison_figure, psnr, render

RNG = np.random.default_rng(5)


def panels(figure: Figure) -> list[Any]:
    return [axis for axis in figure.axes if axis.get_title() or axis.get_title(loc="left") or axis.lines]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "axis"), [((20, 30), None), ((20, 30, 3), 2), ((3, 20, 30), 0), ((20, 30, 2), -1)])
@pytest.mark.parametrize("with_clean", [False, True])
@pytest.mark.sampled(2)
def test_image_panels(shape: tuple[int, ...], axis: int | None, with_clean: bool) -> None:
    noisy = RNG.integers(10, 200, shape, dtype=np.uint8)
    result = noisy * 0.5 + 50
    clean = noisy if with_clean else None
    figure = comparison_figure(noisy, result, channel_axis=axis, sigma=7, clean=clean, title="a$b$.png")
    shown = [axes.images[0] for axes in panels(figure)]
    titles = [axes.get_title() for axes in panels(figure)]
    assert len(shown) == (4 if with_clean else 3)
    assert titles[0].startswith("noisy")
    assert ("PSNR inf dB" in titles[0]) == with_clean
    assert "σ = 7" in titles[-1]
    assert shown[-1].get_clim() == (-21, 21)
    residual = np.asarray(shown[-1].get_array())
    difference = noisy - result
    np.testing.assert_allclose(residual, difference if axis is None else difference.mean(axis=axis))
    if axis is None:
        assert shown[0].get_clim() == shown[1].get_clim() == (noisy.min(), noisy.max())
    assert render(figure, "png").startswith(b"\x89PNG")


def test_colours_share_the_range_of_the_noisy_image() -> None:
    noisy = np.zeros((8, 9, 3))
    noisy[0, 0], noisy[1, 1] = -10, 30
    figure = comparison_figure(noisy, noisy + 10, channel_axis=2, sigma=1)
    first, second = (np.asarray(axes.images[0].get_array()) for axes in panels(figure)[:2])
    assert first[4, 4] == pytest.approx(0.25)
    assert second[4, 4] == pytest.approx(0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "form", "start"),
    [
        ((6, 7), "png", b"\x89PNG"),
        ((6, 7, 3), "pdf", b"%PDF"),
        ((9,), "svg", b"<?xml"),
        ((1, 1), "svg", b"<?xml"),
        ((1,), "pdf", b"%PDF"),
    ],
)
@pytest.mark.sampled(2)
def test_constant_data_and_no_noise(shape: tuple[int, ...], form: str, start: bytes) -> None:
    noisy = np.zeros(shape)
    axis = 2 if noisy.ndim == 3 else None
    assert render(comparison_figure(noisy, noisy, channel_axis=axis, sigma=0), form).startswith(start)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "channels", "rows"), [(100, None, 2), (100, 2, 4), (100, 5, 6), (5000, None, 3), (50000, 2, 6)]
)
@pytest.mark.sampled(2)
def test_signal_panels(size: int, channels: int | None, rows: int) -> None:
    noisy = RNG.standard_normal((size,) if channels is None else (size, channels))
    figure = comparison_figure(noisy, noisy / 2, channel_axis=None if channels is None else 1, sigma=1, clean=noisy)
    assert len(figure.axes) == rows
    overlay = figure.axes[0]
    assert [line.get_label() for line in overlay.lines] == ["noisy, PSNR inf dB", "clean", overlay.lines[2].get_label()]
    # A long line is drawn by its envelope: same extremes, few points.
    drawn = np.asarray(overlay.lines[0].get_ydata())
    first = noisy if channels is None else noisy[:, 0]
    assert (drawn.min(), drawn.max()) == (first.min(), first.max())
    assert len(drawn) <= 8000
    assert figure.axes[-1].get_xlabel() == "sample"
    assert render(figure, "png").startswith(b"\x89PNG")


def test_the_magnified_part_is_where_the_result_changes() -> None:
    result = np.zeros(4000)
    result[3000:3100] = 100 * RNG.standard_normal(100)
    figure = comparison_figure(result + 1, result, channel_axis=None, sigma=1)
    low, high = figure.axes[1].get_xlim()
    assert low <= 3000 < 3100 <= high
    assert "shaded" in figure.axes[1].get_title(loc="left")


def test_the_magnified_part_of_an_image_has_noise_beside_edges() -> None:
    """Not noise alone, nor the densest texture, nor what opacity hides, which is white in every panel."""
    rows, columns = np.mgrid[:300, :400]
    result = np.where(columns < 200, 10.0, 20.0)  # one edge
    result[:, 280:] += 100 * (columns[:, 280:] % 2)  # texture, of which little is removed
    hidden = rows < 140
    removed = RNG.standard_normal(result.shape) * np.where(columns < 280, 3, 1) * np.where(hidden, 9, 1)
    figure = comparison_figure(result + removed, result, channel_axis=None, sigma=3, hidden=hidden)
    whole, part = figure.axes[:3], figure.axes[3:6]
    corner = [round(n + 0.5) for n in whole[0].patches[0].get_xy()]
    assert corner[0] < 200 < corner[0] + 160 <= 300
    assert corner[1] >= 140
    assert part[0].get_title(loc="left").startswith(f"rows {corner[1]}:{corner[1] + 120}, columns {corner[0]}:")
    inside = np.s_[corner[1] : corner[1] + 120, corner[0] : corner[0] + 160]
    np.testing.assert_array_equal(part[1].images[0].get_array(), result[inside])
    np.testing.assert_allclose(part[2].images[0].get_array(), removed[inside])
    assert part[0].images[0].get_clim() == part[1].images[0].get_clim()
    assert part[2].images[0].get_clim() == (-9, 9)
    for axis in whole:
        np.testing.assert_array_equal(np.asarray(axis.images[-1].get_array())[..., 3] == 1, hidden)
    assert "missing" not in whole[0].get_title()


@pytest.mark.slow
def test_images_without_a_telling_part() -> None:
    for image, sigma in ((np.zeros((400, 400)), 0), (np.full((400, 400), np.nan), 1), (np.ones((2, 500)), 1)):
        figure = comparison_figure(image, np.zeros_like(image), channel_axis=None, sigma=sigma)
        assert render(figure, "png").startswith(b"\x89PNG")


def test_psnr() -> None:
    clean = np.zeros((4, 4), np.uint8)
    assert psnr(clean, np.full((4, 4), 25.5)) == pytest.approx(20)
    assert psnr(np.array([0.0, 2.0]), np.array([0.2, 2.2])) == pytest.approx(20)
    assert psnr(clean, clean) == np.inf
    assert psnr(np.zeros(3), np.ones(3)) == -np.inf
    with pytest.raises(InputError, match="estimate: got shape"):
        psnr(clean, np.zeros(4))


def test_wrong_shapes() -> None:
    image = np.zeros((5, 6))
    with pytest.raises(InputError, match="result: got shape"):
        comparison_figure(image, image[:4], channel_axis=None, sigma=1)
    with pytest.raises(InputError, match="clean: got shape"):
        comparison_figure(image, image, channel_axis=None, sigma=1, clean=image[:4])
    with pytest.raises(InputError, match="channel_axis"):
        comparison_figure(np.zeros((5, 6, 3)), np.zeros((5, 6, 3)), channel_axis=None, sigma=1)
    with pytest.raises(InputError, match="channel_axis"):
        comparison_figure(image, image, channel_axis=2, sigma=1)
    for sigma in (-1, [1.0, 2.0], "one"):
        with pytest.raises(InputError, match="sigma: got"):
            comparison_figure(image, image, channel_axis=None, sigma=sigma)


@pytest.mark.parametrize("draw", [
    lambda wrong: plotting.comparison_figure(wrong, wrong, channel_axis=None, sigma=1),
    lambda wrong: plotting.stack_figure(wrong, wrong, axes="ZYX", sigma=1),
    lambda wrong: plotting.noise_figure(wrong, wrong, channel_axis=None),
    plotting.decay_figure, plotting.spacetime_figure, plotting.layers_figure, plotting.survey_figure,
    lambda wrong: plotting.bounds_figure(wrong, xlabel="x", ylabel="y"),
    lambda wrong: plotting.rate_figure(wrong, xlabel="x", ylabel="y"),
    lambda wrong: plotting.chain_figure(wrong, wrong),
    lambda wrong: plotting.cures_figure(wrong, metric="x"),
    lambda wrong: plotting.parts_figure(wrong, wrong, measure="x"),
])  # fmt: skip
def test_what_no_figure_takes_is_refused_by_name(draw: Any) -> None:
    for wrong in (None, object(), "a.png"):
        with pytest.raises(InputError, match="expected"):
            draw(wrong)


def test_a_result_in_other_units_is_refused() -> None:
    """As `denoise` gives it of integers: it would be black."""
    photo = RNG.integers(0, 255, (20, 30), dtype=np.uint8)
    with pytest.raises(InputError, match=r"result: got values up to .* up to 25\d.*preserve_range=True"):
        comparison_figure(photo, photo / 255, channel_axis=None, sigma=1)
    with pytest.raises(InputError, match="preserve_range=True"):
        plotting.stack_figure(photo[None], photo[None] / 255, axes="ZYX", sigma=1)


def test_a_title_beyond_the_font() -> None:
    assert render(comparison_figure(np.zeros(9), np.zeros(9), channel_axis=None, sigma=1, title="雑音.csv"), "png")


@pytest.mark.slow
def test_no_pyplot() -> None:
    code = (
        "import sys, numpy as np, nlflow.plotting as p; assert 'matplotlib' not in sys.modules;"
        "p.render(p.comparison_figure(np.eye(9), np.eye(9), channel_axis=None, sigma=1), 'png');"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- what was missing, what was kept ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "axis"), [((20, 30), None), ((20, 30, 3), 2), ((3, 20, 30), 0), ((20, 30, 2), -1)])
@pytest.mark.sampled(2)
def test_missing_pixels_are_seen(shape: tuple[int, ...], axis: int | None) -> None:
    noisy = RNG.standard_normal(shape)
    missing = np.zeros((20, 30), bool)
    missing[4:8, 5:15] = True
    full = missing if axis is None else np.broadcast_to(np.expand_dims(missing, axis), shape)
    holes = np.where(full, np.nan, noisy)
    for given, mask in ((noisy, missing), (noisy, full), (holes, None)):
        figure = comparison_figure(given, noisy / 2, channel_axis=axis, sigma=1, missing=mask, clean=noisy)
        first, *_, residual = panels(figure)
        cover = np.asarray(first.images[1].get_array())
        np.testing.assert_array_equal(cover[..., 3] > 0, missing)
        assert "6.7% missing (magenta)" in first.get_title()
        assert "PSNR" not in first.get_title()
        assert "missing: grey" in residual.get_title()
        shown = residual.images[0].get_array()
        np.testing.assert_array_equal(np.ma.getmaskarray(shown) | np.isnan(np.asarray(shown)), missing)
    assert render(figure, "png")


def test_kept_pixels_have_an_outline() -> None:
    noisy = RNG.standard_normal((20, 30))
    kept = np.zeros((20, 30), bool)
    kept[4:8, 5:15] = True
    figure = comparison_figure(noisy, noisy / 2, channel_axis=None, sigma=1, kept=kept)
    assert [len(axes.collections) for axes in panels(figure)] == [1, 0, 1]
    assert "kept: outlined" in panels(figure)[-1].get_title()
    for everything in (np.ones_like(kept), np.zeros_like(kept)):
        figure = comparison_figure(noisy, noisy, channel_axis=None, sigma=1, kept=everything)
        assert [len(axes.collections) for axes in panels(figure)] == [0, 0, 0]


def test_residuals_are_in_units_of_sigma() -> None:
    noisy = RNG.standard_normal((20, 30))
    figure = comparison_figure(noisy, noisy / 2, channel_axis=None, sigma=0.25)
    bar = figure.axes[-1]
    assert [label.get_text() for label in bar.get_yticklabels()] == ["−3σ", "−2σ", "−σ", "0", "σ", "2σ", "3σ"]
    np.testing.assert_allclose(bar.get_yticks(), 0.25 * np.arange(-3, 4))
    for factor in (1, 100):
        figure = comparison_figure(factor * noisy[0], noisy[0] * 0, channel_axis=None, sigma=0.25)
        axes = figure.axes[-1]
        low, high = axes.get_ylim()
        assert low == -high
        assert high >= max(0.75, np.abs(factor * noisy[0]).max())
        for place, label in zip(axes.get_yticks(), axes.get_yticklabels(), strict=True):
            text = label.get_text().replace("−", "-")
            assert place == pytest.approx(0.25 * float(text.removesuffix("σ")))


@pytest.mark.slow
@pytest.mark.parametrize("size", [100, 3000, 60000])
@pytest.mark.sampled(1)
def test_missing_samples_are_shaded(size: int) -> None:
    noisy = RNG.standard_normal((size, 2))
    missing = np.zeros((size, 2), bool)
    missing[0, 0] = missing[-3:, 0] = missing[40:60, 0] = True
    kept = np.arange(size) < 7
    figure = comparison_figure(noisy, noisy / 2, channel_axis=1, sigma=1, missing=missing, kept=kept)
    per_channel = len(figure.axes) // 2
    top, bottom = figure.axes[0], figure.axes[per_channel]
    assert [entry.get_label() for entry in top.collections] == ["missing", "kept"]
    assert [entry.get_label() for entry in bottom.collections] == ["kept"]
    spans = [path.vertices[:, 0] for path in top.collections[0].get_paths()]
    expected = [(-0.5, 0.5), (39.5, 59.5), (size - 3.5, size - 0.5)]
    assert [(low.min(), low.max()) for low in spans] == expected
    drawn = np.asarray(top.lines[0].get_ydata())
    assert np.isnan(drawn).any() == (size < 60000)  # an envelope goes over small gaps
    known = noisy[~missing[:, 0], 0]
    assert (np.nanmin(drawn), np.nanmax(drawn)) == (known.min(), known.max())
    assert render(figure, "png")


@pytest.mark.slow
def test_nothing_but_missing() -> None:
    for shape in ((9, 8), (9,), (5000,)):
        noisy = np.full(shape, np.nan)
        assert render(comparison_figure(noisy, np.zeros(shape), channel_axis=None, sigma=1), "png")


def test_masks_of_wrong_shapes() -> None:
    image = np.zeros((5, 6))
    with pytest.raises(InputError, match=r"missing: got shape \(6, 5\), expected \(5, 6\)"):
        comparison_figure(image, image, channel_axis=None, sigma=1, missing=np.zeros((6, 5), bool))
    with pytest.raises(InputError, match="kept: got shape"):
        comparison_figure(image, image, channel_axis=None, sigma=1, kept=np.zeros(5, bool))


def test_channels_with_own_noise_are_drawn_with_it() -> None:
    noisy = RNG.normal(size=(50, 2)) * [1, 100]
    figure = comparison_figure(noisy, 0 * noisy, channel_axis=1, sigma=[1, 100], clean=0 * noisy)
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert ["±1" in titles[1], "±100" in titles[3]] == [True, True]
    assert figure.axes[0].get_legend_handles_labels()[1] == ["noisy", "clean", "denoised"]  # no PSNR of mixed units
