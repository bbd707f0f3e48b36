"""What was given, what came out and their difference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import InputError
from nlflow.plotting.base import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["comparison_figure", "psnr"]

Array: TypeAlias = NDArray[Any]

_NOISY, _RESULT, _CLEAN, _RESIDUAL = "0.72", "#0b5394", "#d1711c", "0.6"
_MAX_ROWS = 3  # channels of a signal that are drawn
_LONG = 1200  # samples from which on a signal gets a magnified part
_BINS = 2000  # columns of a line: more than this and only the envelope can be seen


def psnr(clean: Array, estimate: Array) -> float:
    """Return the peak signal-to-noise ratio in decibels.

    The peak is the range of the dtype of `clean` where that is an unsigned integer, and the range of its values
    otherwise.

    Parameters
    ----------
    clean, estimate : numpy.ndarray
        Reference and estimate, of the same shape.

    Returns
    -------
    float
        ``10 log10(peak² / mean((clean - estimate)²))``; infinite for equal arrays.

    Raises
    ------
    InputError
        If the shapes differ.
    """
    if clean.shape != estimate.shape:
        raise InputError(f"estimate: got shape {estimate.shape}, expected {clean.shape} as in clean")
    reference = clean.astype(np.float64)
    error = float(np.mean((reference - estimate) ** 2))
    peak = float(np.iinfo(clean.dtype).max) if clean.dtype.kind == "u" else float(np.ptp(reference))
    if error == 0:
        return math.inf
    return 10 * math.log10(peak**2 / error) if peak > 0 else -math.inf


def comparison_figure(
    noisy: Array,
    result: Array,
    *,
    channel_axis: int | None,
    sigma: float,
    clean: Array | None = None,
    title: str | None = None,
) -> Figure:
    """Draw what was given, the denoised result and their difference.

    Images are shown side by side in one grey scale, that of the noisy data, and the residual about 0 in colours that
    end at 3 `sigma`. Signals are drawn over each other with the residual below; a long one gets a magnified part
    where the result changes most.

    Parameters
    ----------
    noisy, result : numpy.ndarray
        Image (H, W) or signal (N,), with an axis of channels if `channel_axis` says so.
    channel_axis : int or None
        Axis of the channels.
    sigma : float
        Standard deviation of the noise in the units of the data.
    clean : numpy.ndarray, optional
        Reference without noise; it is drawn too and the titles give the PSNR.
    title : str, optional
        Heading of the figure.

    Returns
    -------
    matplotlib.figure.Figure
        Save it with its ``savefig``.

    Raises
    ------
    InputError
        If the shapes differ or are neither those of an image nor of a signal.
    """
    for name, array in (("result", result), ("clean", clean)):
        if array is not None and array.shape != noisy.shape:
            raise InputError(f"{name}: got shape {array.shape}, expected {noisy.shape} as in noisy")
    spatial = noisy.ndim - (channel_axis is not None)
    if spatial not in (1, 2):
        raise InputError(f"noisy: got shape {noisy.shape}, expected an image or a signal; check channel_axis")
    quality = ["", ""]
    if clean is not None:
        quality = [f", PSNR {psnr(clean, array):.2f} dB" for array in (noisy, result)]
    figure = new_figure()
    given, denoised = _channels_last(noisy, channel_axis), _channels_last(result, channel_axis)
    reference = None if clean is None else _channels_last(clean, channel_axis)
    draw = _draw_images if spatial == 2 else _draw_signals
    draw(figure, given, denoised, reference, sigma, quality)
    if title:
        figure.suptitle(title, fontsize=12, parse_math=False)  # a file name may hold dollar signs
    return figure


def _channels_last(array: Array, channel_axis: int | None) -> Array:
    moved = array[..., np.newaxis] if channel_axis is None else np.moveaxis(array, channel_axis, -1)
    return moved.astype(np.float64)


def _draw_images(
    figure: Figure, noisy: Array, result: Array, clean: Array | None, sigma: float, quality: list[str]
) -> None:
    height, width, channels = noisy.shape
    count = 3 if clean is None else 4
    # One row for upright and square images, one column for panoramas, two by two when a fourth panel squares it.
    columns = 1 if width > 2.2 * height else (2 if count == 4 else 3)
    rows = -(-count // columns)
    panel = 4.2 if columns > 1 else 8.0
    figure.set_size_inches(columns * panel + 0.9, rows * (panel * min(max(height / width, 0.12), 2.0) + 0.45) + 0.2)
    low, high = float(noisy.min()), float(noisy.max())
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    panels = [(f"noisy{quality[0]}", noisy), (f"denoised{quality[1]}", result)]
    panels += [] if clean is None else [("clean", clean)]
    for axis, (name, array) in zip(axes, panels, strict=False):
        if channels == 3:
            axis.imshow(np.clip((array - low) / ((high - low) or 1), 0, 1))
        else:
            axis.imshow(array.mean(axis=-1), cmap="gray", vmin=low, vmax=high)
            name += f" (mean of {channels} channels)" if channels > 1 else ""
        axis.set_title(name, fontsize=10)
    residual = (noisy - result).mean(axis=-1)
    # The mean of several channels has less noise, but its size is what the eye should compare with sigma.
    limit = 3 * sigma if sigma > 0 else float(np.abs(residual).max()) or 1.0
    axis = axes[len(panels)]
    shown = axis.imshow(residual, cmap="RdBu_r", vmin=-limit, vmax=limit)
    name = "noisy − denoised" + (f", mean of {channels} channels" if channels > 1 else "")
    axis.set_title(f"{name}, σ = {sigma:.4g}", fontsize=10)
    bar = figure.colorbar(shown, ax=axis, fraction=0.046, pad=0.02, extend="both")
    bar.ax.tick_params(labelsize=8)
    for axis in axes:
        axis.set_axis_off()


def _draw_signals(
    figure: Figure, noisy: Array, result: Array, clean: Array | None, sigma: float, quality: list[str]
) -> None:
    size, channels = noisy.shape
    shown = min(channels, _MAX_ROWS)
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
            _line(group[0], array[:, channel], slice(0, size), color=colour, linewidth=thickness, label=name)
            if part:
                _line(group[1], array[:, channel], part, color=colour, linewidth=thickness)
        if channel == 0:
            group[0].legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(lines), fontsize=9, frameon=False)
        if part:
            group[0].axvspan(part.start, part.stop - 1, color=_RESULT, alpha=0.15, linewidth=1.5)
            group[1].set_title(f"the shaded part, samples {part.start} to {part.stop - 1}", fontsize=9, loc="left")
        _line(group[-1], (noisy - result)[:, channel], slice(0, size), color=_RESIDUAL, linewidth=0.6)
        for level in (-sigma, sigma):
            group[-1].axhline(level, color="black", linewidth=0.8, linestyle="--")
        group[-1].set_title(f"noisy − denoised, dashed: ±σ = ±{sigma:.4g}", fontsize=9, loc="left")
        if channels > 1:
            more = f" of {channels}" if channels > shown else ""
            group[0].set_ylabel(f"channel {channel}{more}", fontsize=9)
    for axis in axes:
        axis.margins(x=0)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("sample", fontsize=9)


def _lively_part(result: Array) -> slice:
    """Return a tenth of the signal (200 to 1000 samples) in which `result` varies most."""
    size = len(result)
    width = min(max(size // 10, 200), 1000)
    starts = np.arange(0, size - width + 1, max(width // 4, 1))
    first = np.vstack([np.zeros((1, result.shape[1])), np.cumsum(np.abs(np.diff(result, axis=0)), axis=0)])
    start = int(starts[np.argmax((first[starts + width - 1] - first[starts]).sum(axis=1))])
    return slice(start, start + width)


def _line(axis: Axes, values: Array, part: slice, **style: Any) -> None:
    """Draw `values[part]`; a long line as its envelope, which looks the same and takes no time."""
    x, y = np.arange(part.start, part.stop), values[part]
    step = len(y) // _BINS
    if step > 2:
        full = len(y) // step * step
        blocks = y[:full].reshape(-1, step)
        x = np.concatenate([np.repeat(x[:full:step], 2), x[full:]])
        y = np.concatenate([np.stack([blocks.min(axis=1), blocks.max(axis=1)], axis=1).ravel(), y[full:]])
    axis.plot(x, y, **style)
