"""Before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.quality import psnr
from nlflow.domains.samples import check_axis
from nlflow.errors import InputError, check_floats, shortened
from nlflow.plotting.base import Array, check_shape, draw_line, new_figure, pair_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colorbar import Colorbar
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_NOISY, _RESULT, _CLEAN, _RESIDUAL = "0.72", "#0b5394", "#d1711c", "0.6"
MISSING, KEPT = (0.9, 0.0, 0.75, 1.0), "#009e73"
_MAX_ROWS = 3  # channels of a signal that are drawn
_LONG = 1200  # samples from which on a signal gets a magnified part
WIDE, _PART = 384, 160  # longest sides: from which on a picture gets a magnified part, and of that part
_FRAME = "#e6b800"


@dataclass(frozen=True)
class _Marks:
    """Which samples are drawn apart: those that were kept, and those that nobody sees (H, W)."""

    kept: Array
    hidden: Array


def comparison_figure(
    noisy: Array,
    result: Array,
    *,
    channel_axis: int | None,
    sigma: float | Sequence[float],
    clean: Array | None = None,
    missing: Array | None = None,
    kept: Array | None = None,
    hidden: Array | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the noisy data, the denoised result and their difference.

    Parameters
    ----------
    noisy, result : numpy.ndarray
        Image (H, W) or signal (N,), with an axis of channels if `channel_axis` says so.
    channel_axis : int or None
    sigma : float, or sequence of float
        Standard deviation of the noise in the units of the data; for a signal one for each channel if they differ.
    clean : numpy.ndarray, optional
        Reference without noise.
    missing, kept : numpy.ndarray, optional
        Where samples were missing, and where they were not changed (bool), in the shape of the data or without the
        axis of channels.
    hidden : numpy.ndarray, optional
        Pixels of an image that its opacity hides (H, W).
    title : str, optional
    """
    noisy, result = pair_of(noisy, result)
    for name, array in (("result", result), ("clean", clean)):
        if array is not None:
            check_shape(name, array, noisy.shape, "noisy")
    spatial = noisy.ndim - (channel_axis is not None)
    check_axis(noisy.ndim, channel_axis)
    if spatial not in (1, 2):
        raise InputError(f"noisy: got shape {noisy.shape}, expected an image or a signal; check channel_axis")
    given, denoised = channels_last(noisy, channel_axis), channels_last(result, channel_axis)
    levels = check_floats("sigma", sigma, ndim=(0, 1))
    if levels.min() < 0 or levels.size not in (1, given.shape[-1]):
        raise InputError(f"sigma: got {shortened(sigma)}, expected a number >= 0, or one for each channel")
    reference = None if clean is None else channels_last(clean, channel_axis)
    holes = over_channels("missing", missing, given, channel_axis)
    pixels = [
        np.asarray(over_channels(name, marked, given, channel_axis).any(axis=-1))
        for name, marked in (("kept", kept), ("hidden", hidden))
    ]
    marks = _Marks(*pixels)
    holes |= ~np.isfinite(given)
    quality = ["", ""]
    if clean is not None and levels.ndim == 0:  # channels of different noise have different units
        quality[0] = "" if holes.any() else f", PSNR {psnr(clean, noisy):.2f} dB"
        quality[1] = f", PSNR {psnr(clean, result):.2f} dB"
    figure = new_figure(title=title)
    shown = np.where(holes, np.nan, given)
    draw = _draw_images if spatial == 2 else _draw_signals
    draw(figure, shown, denoised, reference, marks, levels, quality)
    return figure


def over_channels(name: str, marked: Array | None, given: Array, channel_axis: int | None) -> Array:
    if marked is None:
        return np.zeros(given.shape, bool)
    flat = marked.ndim < given.ndim or (channel_axis is None)
    moved = marked[..., np.newaxis] if flat else np.moveaxis(marked, channel_axis or 0, -1)
    if moved.shape[:-1] != given.shape[:-1]:
        raise InputError(f"{name}: got shape {marked.shape}, expected {given.shape[:-1]} as in noisy")
    return np.array(np.broadcast_to(moved, given.shape), dtype=bool)


def channels_last(array: Array, channel_axis: int | None) -> Array:
    moved = array[..., np.newaxis] if channel_axis is None else np.moveaxis(array, channel_axis, -1)
    return moved.astype(np.float64)


def range_of(noisy: Array, result: Array) -> tuple[float, float]:
    seen = noisy[np.isfinite(noisy)]
    seen = seen if seen.size else result
    return float(seen.min()), float(seen.max())


def show_values(axis: Axes, values: Array, low: float, high: float, **options: Any) -> None:
    if values.shape[-1] == 3:
        axis.imshow(np.nan_to_num(np.clip((values - low) / ((high - low) or 1), 0, 1)), **options)
    else:
        axis.imshow(values.mean(axis=-1), cmap="gray", vmin=low, vmax=high, **options)


def residual_limit(residual: Array, sigma: float) -> float:
    """Return the value at the ends of the colours of a residual."""
    return 3 * sigma if sigma > 0 else float(np.abs(residual[np.isfinite(residual)]).max(initial=0)) or 1.0


def show_residual(axis: Axes, residual: Array, limit: float, **options: Any) -> AxesImage:
    shown = axis.imshow(residual, cmap="RdBu_r", vmin=-limit, vmax=limit, **options)
    shown.set_cmap(shown.get_cmap().with_extremes(bad="0.35"))
    return shown


def residual_name(channels: int, sigma: float) -> str:
    return "noisy − denoised" + (f", mean of {channels} channels" if channels > 1 else "") + f", σ = {sigma:.4g}"


def in_sigmas(bar: Colorbar, sigma: float) -> None:
    if sigma > 0:
        bar.set_ticks([step * sigma for step in range(-3, 4)], labels=["−3σ", "−2σ", "−σ", "0", "σ", "2σ", "3σ"])
    bar.ax.tick_params(labelsize=8)


def _draw_images(
    figure: Figure, noisy: Array, result: Array, clean: Array | None, marks: _Marks, levels: Array, quality: list[str]
) -> None:
    height, width, channels = noisy.shape
    sigma = float(levels.max())
    count = 3 if clean is None else 4
    residual = (noisy - result).mean(axis=-1)
    seen = np.isfinite(noisy).all(axis=-1) & ~marks.hidden
    part = telling_part(residual, result, seen) if max(height, width) > WIDE else None
    # One row for upright and square images, one column for panoramas, two by two for four panels without a part.
    columns = 1 if width > 2.2 * height else (2 if count == 4 and part is None else count)
    rows = -(-count // columns) * (1 if part is None else 2)
    side = 4.2 if columns > 1 else 8.0
    figure.set_size_inches(columns * side + 0.9, rows * (side * min(max(height / width, 0.12), 2.0) + 0.45) + 0.2)
    low, high = range_of(noisy, result)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    missing = ~(seen | marks.hidden)
    share = f", {missing.mean():.1%} missing (magenta)" if missing.any() else ""
    panels = [(f"noisy{quality[0]}{share}", noisy), (f"denoised{quality[1]}", result)]
    panels += [] if clean is None else [("clean", clean)]
    for axis, (name, array) in zip(axes, panels, strict=False):
        show_values(axis, array, low, high)
        name += f" (mean of {channels} channels)" if channels not in (1, 3) else ""
        axis.set_title(name, fontsize=10)
    axis = axes[count - 1]
    shown = show_residual(axis, residual, residual_limit(residual, sigma))
    told = ["missing: grey"] if missing.any() else []
    if marks.kept.any() and not marks.kept.all():
        told.append("kept: outlined")
        for panel in (axes[0], axis):
            panel.contour(marks.kept, levels=[0.5], colors=[KEPT], linewidths=1.0)
    axis.set_title("\n".join([residual_name(channels, sigma), *([", ".join(told)] if told else [])]), fontsize=10)
    if part is not None:
        pictures = [array[part] for _, array in panels]
        _draw_part(axes, part, pictures, residual[part], (low, high), residual_limit(residual, sigma))
    for panels_of, shown_of in ((axes[:count], np.s_[:, :]), (axes[-count:], part)):
        if shown_of is not None:
            _cover(panels_of, missing[shown_of], marks.hidden[shown_of])
    ends = axis if part is None else [axis, axes[-1]]
    in_sigmas(figure.colorbar(shown, ax=ends, fraction=0.046, pad=0.02, extend="both"), sigma)
    for axis in axes:
        axis.set_axis_off()


def _draw_part(
    axes: NDArray[Any],
    part: tuple[slice, slice],
    pictures: list[Array],
    residual: Array,
    limits: tuple[float, float],
    far: float,
) -> None:
    """Frame a part in the first half of some panels, and show it in the second half, the residual last."""
    rows, columns = part
    corner, size = (columns.start, rows.start), (columns.stop - columns.start, rows.stop - rows.start)
    whole, magnified = axes[: len(axes) // 2], axes[len(axes) // 2 :]
    for axis in whole:
        axis.add_patch(_frame(corner, size))
    low, high = _contrast(pictures[0], limits)
    for axis, picture in zip(magnified, pictures, strict=False):
        show_values(axis, picture, low, high, interpolation="nearest")
    show_residual(magnified[len(pictures)], residual, far, interpolation="nearest")
    times = (limits[1] - limits[0]) / (high - low)
    stronger = f", contrast × {times:.1f}" if times > 1.1 else ""
    name = f"rows {rows.start}:{rows.stop}, columns {columns.start}:{columns.stop}{stronger}"
    magnified[0].set_title(name, fontsize=9, loc="left")


def _cover(axes: NDArray[Any], missing: Array, hidden: Array) -> None:
    """Colour what is missing in the first of some panels, and what nobody sees in all."""
    if missing.any():
        axes[0].imshow(missing[..., np.newaxis] * np.array(MISSING))
    if hidden.any():
        for axis in axes:
            axis.imshow(hidden[..., np.newaxis] * np.ones(4))


def _frame(corner: tuple[int, int], size: tuple[int, int]) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((corner[0] - 0.5, corner[1] - 0.5), *size, fill=False, edgecolor=_FRAME, linewidth=1.2)


def _contrast(picture: Array, limits: tuple[float, float]) -> tuple[float, float]:
    """Return the range in which a part of a picture is shown: most of its samples, but at least a quarter of all."""
    seen = picture[np.isfinite(picture)]
    if not seen.size or not limits[1] > limits[0]:
        return limits[0], max(limits[1], limits[0] + 1.0)
    low, high = (float(value) for value in np.quantile(seen, [0.002, 0.998]))
    more = max((limits[1] - limits[0]) / 4 - (high - low), 0.0) / 2
    low = min(max(low - more, limits[0]), limits[1] - (high - low) - 2 * more)
    return low, min(max(high + more, low + (limits[1] - limits[0]) / 4), limits[1])


def telling_part(residual: Array, result: Array, seen: Array) -> tuple[slice, slice]:
    """Return rows and columns of a part where much was removed beside edges that are kept."""
    shape = residual.shape
    sides = [max(min(round(n * _PART / max(shape)), n), 1) for n in shape]
    steps = [max(n // 2, 1) for n in sides]
    slopes = np.zeros(shape)
    for axis in (0, 1):
        change = np.abs(np.diff(result, axis=axis)).mean(axis=-1)
        slopes[tuple(slice(0, n) for n in change.shape)] += change
    removed, kept = (_sums(np.where(seen, values, 0.0), sides, steps) for values in (residual**2, slopes))
    row, column = np.unravel_index(np.argmax(removed * np.minimum(kept, 2 * np.median(kept))), removed.shape)
    first = (int(row) * steps[0], int(column) * steps[1])
    return slice(first[0], first[0] + sides[0]), slice(first[1], first[1] + sides[1])


def _sums(values: Array, sides: list[int], steps: list[int]) -> Array:
    for axis, (side, step) in enumerate(zip(sides, steps, strict=True)):
        total = np.insert(np.cumsum(values, axis=axis), 0, 0.0, axis=axis)
        starts = np.arange(0, values.shape[axis] - side + 1, step)
        values = total.take(starts + side, axis) - total.take(starts, axis)
    return values


def _draw_signals(
    figure: Figure, noisy: Array, result: Array, clean: Array | None, marks: _Marks, levels: Array, quality: list[str]
) -> None:
    size, channels = noisy.shape
    whole, shown = slice(0, size), min(channels, _MAX_ROWS)
    part = _lively_part(result) if size > _LONG else None
    heights = [2.4, *([2.4] if part else []), 1.3] * shown
    figure.set_size_inches(10, sum(heights) + 0.6 * len(heights))
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False).ravel()
    per_channel = len(heights) // shown
    for channel in range(shown):
        group = axes[channel * per_channel : (channel + 1) * per_channel]
        lines = [(noisy, f"noisy{quality[0]}", _NOISY, 0.8)]
        lines += [] if clean is None else [(clean, "clean", _CLEAN, 1.6)]
        lines.append((result, f"denoised{quality[1]}", _RESULT, 1.1))
        for array, name, colour, thickness in lines:
            draw_line(group[0], array[:, channel], whole, color=colour, linewidth=thickness, label=name)
            if part:
                draw_line(group[1], array[:, channel], part, color=colour, linewidth=thickness)
        missing = np.isnan(noisy[:, channel])
        for axis, span in zip(group[:-1], (whole, part), strict=False):
            _shade(axis, missing, span or whole, (0, 1), color=MISSING, alpha=0.3, label="missing")
            _shade(axis, marks.kept, span or whole, (0, 0.03), color=KEPT, label="kept")
        if channel == 0:
            names = group[0].get_legend_handles_labels()[1]
            group[0].legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(names), fontsize=9, frameon=False)
        if part:
            group[0].axvspan(part.start, part.stop - 1, color=_RESULT, alpha=0.15, linewidth=1.5)
            group[1].set_title(f"the shaded part, samples {part.start} to {part.stop - 1}", fontsize=9, loc="left")
        draw_line(group[-1], (noisy - result)[:, channel], whole, color=_RESIDUAL, linewidth=0.6)
        own = float(np.broadcast_to(levels, channels)[channel])
        for level in (-own, own):
            group[-1].axhline(level, color="black", linewidth=0.8, linestyle="--")
        group[-1].set_title(f"noisy − denoised, dashed: ±σ = ±{own:.4g}", fontsize=9, loc="left")
        if own > 0:
            _in_units_of(group[-1], own)
        if channels > 1:
            more = f" of {channels}" if channels > shown else ""
            group[0].set_ylabel(f"channel {channel}{more}", fontsize=9)
    for axis in axes:
        axis.margins(x=0)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("sample", fontsize=9)


def _shade(axis: Axes, marked: Array, part: slice, heights: tuple[float, float], **style: Any) -> None:
    """Shade the marked samples, half a sample to each side, between two heights of a panel."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], marked[part], [False]]).astype(np.int8))) + part.start - 0.5
    if edges.size:
        x = np.repeat(edges, 2)
        where = np.tile([False, True, True, False], len(edges) // 2)
        axis.fill_between(x, *heights, where=where, transform=axis.get_xaxis_transform(), linewidth=0.5, **style)


def _in_units_of(axis: Axes, sigma: float) -> None:
    """Give a residual a range around 0 of at least three sigma, with ticks at multiples of sigma."""
    reach = max(*map(abs, axis.get_ylim()), 3 * sigma)
    step = max(math.floor(reach / sigma * 2 / 3), 2)
    axis.set_ylim(-reach, reach)
    axis.set_yticks([-step * sigma, 0, step * sigma], [f"−{step}σ", "0", f"{step}σ"])


def _lively_part(result: Array) -> slice:
    """Return a tenth of the signal (200 to 1000 samples) in which `result` varies most."""
    size = len(result)
    width = min(max(size // 10, 200), 1000)
    starts = np.arange(0, size - width + 1, max(width // 4, 1))
    first = np.vstack([np.zeros((1, result.shape[1])), np.cumsum(np.abs(np.diff(result, axis=0)), axis=0)])
    start = int(starts[np.argmax((first[starts + width - 1] - first[starts]).sum(axis=1))])
    return slice(start, start + width)
