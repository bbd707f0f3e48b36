"""Stacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nlflow.denoising.quality import psnr
from nlflow.errors import InputError, check_number
from nlflow.plotting.base import Array, check_shape, new_figure, pair_of
from nlflow.plotting.comparison import (
    KEPT,
    MISSING,
    WIDE,
    in_sigmas,
    range_of,
    residual_limit,
    residual_name,
    show_residual,
    show_values,
    telling_part,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 3.0  # inches of a column
_FLATTEST, _TALLEST = 0.16, 1.8  # height of a row as a share of that


@dataclass(frozen=True)
class _Cut:
    """A picture out of a stack: where it lies, how high and wide its pixels are, which way its rows run."""

    name: str
    place: dict[str, int]
    height: float
    width: float
    upward: bool


def stack_figure(
    noisy: Array,
    result: Array,
    *,
    axes: str,
    sigma: float,
    spacing: Sequence[float] | None = None,
    upward: str = "",
    clean: Array | None = None,
    missing: Array | None = None,
    kept: Array | None = None,
    title: str | None = None,
) -> Figure:
    """Draw three pictures of a noisy stack, of the denoised one and of their difference.

    Of a volume they are the slices through its middle in three directions, of a clip three frames, of volumes at
    several times the slices of the one in the middle.

    Parameters
    ----------
    noisy, result : numpy.ndarray
        A stack with these axes.
    axes : str
        One letter for each axis, in any order: Y and X, with Z, T or both; C are channels.
    sigma : float
        Standard deviation of the noise in the units of the data.
    spacing : sequence of float, optional
        Distance of samples along each axis but C (and T, where there is Z), in the order of `axes`; equal by default.
    upward : str
        Letters of the axes that run from bottom to top where they are drawn as rows; others run downwards.
    clean : numpy.ndarray, optional
        Reference without noise.
    missing, kept : numpy.ndarray, optional
        Where samples were missing, and where they were not changed (bool), in the shape of the data or without the
        axis of channels.
    title : str, optional
    """
    noisy, result = pair_of(noisy, result)
    for name, array in (("result", result), ("clean", clean)):
        if array is not None:
            check_shape(name, array, noisy.shape, "noisy")
    space = _space(axes, noisy.shape, spacing)
    if set(upward) - set("XYZ"):
        raise InputError(f"upward: got {upward!r}, expected some of X, Y and Z")
    marks = [_mark(name, array, noisy, axes) for name, array in (("missing", missing), ("kept", kept))]
    quality = ["", ""]
    if clean is not None:
        quality[0] = f", PSNR {psnr(clean, noisy):.2f} dB" if np.isfinite(noisy).all() and missing is None else ""
        quality[1] = f", PSNR {psnr(clean, result):.2f} dB"
    cuts = _cuts(dict(zip(axes, noisy.shape, strict=True)), space, upward)
    rows = [[_picture(array, axes, cut) for array in (noisy, result, clean) if array is not None] for cut in cuts]
    holes, outlined = ([None if mark is None else _picture(*mark, cut) > 0 for cut in cuts] for mark in marks)
    if "Z" not in axes and max(rows[0][0].shape[:2]) > WIDE:
        _magnify(cuts, rows, [holes, outlined])
    if "T" in axes and "Z" in axes:
        count = noisy.shape[axes.index("T")]
        title = f"{title or ''}{', ' if title else ''}time {count // 2 + 1} of {count}"
    return _draw(cuts, rows, [holes, outlined], sigma, quality, title)


def _magnify(cuts: list[_Cut], rows: list[list[Array]], marks: list[list[Any]]) -> None:
    """Add a row with a part of the frame in the middle, as wide as a frame."""
    middle = len(cuts) // 2
    noisy, result = rows[middle][:2]
    hidden, cut = marks[0][middle], cuts[middle]
    seen = np.asarray(np.isfinite(noisy).all(axis=-1))
    seen = seen if hidden is None else seen & ~hidden.any(axis=-1)
    part = telling_part((noisy - result).mean(axis=-1), result, seen)
    down, along = part
    times = noisy.shape[1] / (along.stop - along.start)
    name = f"{cut.name}\nrows {down.start}:{down.stop}\ncolumns {along.start}:{along.stop}"
    cuts.append(replace(cut, name=name, height=cut.height * times, width=cut.width * times))
    rows.append([picture[part] for picture in rows[middle]])
    for each in marks:
        each.append(None if each[middle] is None else each[middle][part])


def _space(axes: str, shape: tuple[int, ...], spacing: Sequence[float] | None) -> dict[str, float]:
    letters = set(axes)
    if len(letters) != len(axes) or not {"Y", "X"} <= letters <= set("TZYXC") or not letters & set("TZ"):
        raise InputError(f"axes: got {axes!r}, expected Y and X, with Z, T or both, and C for channels, each once")
    if len(axes) != len(shape):
        raise InputError(f"axes: got {axes!r} for shape {shape}, expected one letter for each axis")
    run = [a for a in axes if a != "C" and not (a == "T" and "Z" in letters)]
    if spacing is None:
        return dict.fromkeys(run, 1.0)
    if len(spacing) != len(run):
        raise InputError(
            f"spacing: got {len(spacing)} number(s), expected {len(run)}, one for each of {', '.join(run)}"
        )
    numbers = [check_number("spacing", value, minimum=0, strict=True) for value in spacing]
    return dict(zip(run, numbers, strict=True))


def _mark(name: str, marked: Array | None, noisy: Array, axes: str) -> tuple[Array, str] | None:
    if marked is None:
        return None
    flat = tuple(n for n, a in zip(noisy.shape, axes, strict=True) if a != "C")
    if marked.shape not in (noisy.shape, flat):
        raise InputError(f"{name}: got shape {marked.shape}, expected {noisy.shape} as in noisy")
    return marked, axes if marked.shape == noisy.shape else axes.replace("C", "")


def _cuts(sizes: dict[str, int], space: dict[str, float], upward: str) -> list[_Cut]:
    if "Z" not in sizes:
        count = sizes["T"]
        frames = dict.fromkeys((count // 6, count // 2, count - 1 - count // 6))
        return [_Cut(f"frame {n + 1} of {count}", {"T": n}, space["Y"], space["X"], "Y" in upward) for n in frames]
    times = {"T": sizes["T"] // 2} if "T" in sizes else {}
    cuts = []
    for across, down, along in (("Z", "Y", "X"), ("Y", "Z", "X"), ("X", "Z", "Y")):
        n, count = sizes[across] // 2, sizes[across]
        name = f"{down} and {along}\n{across} = {n + 1} of {count}"
        cuts.append(_Cut(name, {across: n, **times}, space[down], space[along], down in upward))
    return cuts


def _picture(values: Array, axes: str, cut: _Cut) -> Array:
    """Return a picture (H, W, C) out of a stack, in double precision."""
    for letter, number in cut.place.items():
        values = values.take(number, axis=axes.index(letter))
        axes = axes.replace(letter, "")
    down, along = (letter for letter in "ZYX" if letter in axes)
    wanted = [axes.index(a) for a in (down, along, "C") if a in axes]
    values = values.transpose(wanted)[:: -1 if cut.upward else 1]
    return (values if "C" in axes else values[..., np.newaxis]).astype(np.float64)


def _draw(
    cuts: list[_Cut], rows: list[list[Array]], marks: list[list[Any]], sigma: float, quality: list[str],
    title: str | None,
) -> Figure:  # fmt: skip
    sizes = [(row[0].shape[0] * cut.height, row[0].shape[1] * cut.width) for cut, row in zip(cuts, rows, strict=True)]
    widest = max(width for _, width in sizes)
    heights = [_WIDTH * min(max(height / widest, _FLATTEST), _TALLEST) for height, _ in sizes]
    columns = len(rows[0]) + 1
    figure = new_figure(columns * (_WIDTH + 0.1) + 1.8, sum(heights) + 0.1 * len(rows) + 0.9, 130, title)
    panels = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
    shown_noisy, shown_result = (np.concatenate([row[k].ravel() for row in rows]) for k in (0, 1))
    low, high = range_of(shown_noisy, shown_result)
    channels = rows[0][0].shape[-1]
    mean = f"\nmean of {channels} channels" if channels not in (1, 3) else ""
    names = [f"noisy{quality[0]}{mean}", f"denoised{quality[1]}{mean}", f"clean{mean}"][: columns - 1]
    residuals = []
    for row, holes in zip(rows, marks[0], strict=True):
        residual = (row[0] - row[1]).mean(axis=-1)
        residuals.append(residual if holes is None else np.where(holes.any(axis=-1), np.nan, residual))
    limit = residual_limit(np.concatenate([one.ravel() for one in residuals]), sigma)
    lost = any(np.isnan(one).any() for one in residuals)
    outlined = [kept is not None and bool(kept.any() and not kept.all()) for kept in marks[1]]
    for r, (cut, axes) in enumerate(zip(cuts, panels, strict=True)):
        extent = (0.0, sizes[r][1], sizes[r][0], 0.0)
        for axis, picture in zip(axes, rows[r], strict=False):
            show_values(axis, picture, low, high, extent=extent)
        if np.isnan(residuals[r]).any():
            axes[0].imshow(np.isnan(residuals[r])[..., np.newaxis] * np.array(MISSING), extent=extent)
        shown = show_residual(axes[-1], residuals[r], limit, extent=extent)
        if outlined[r]:
            for axis in (axes[0], axes[-1]):
                axis.contour(marks[1][r].any(axis=-1), levels=[0.5], colors=[KEPT], linewidths=1.0, origin="upper",
                             extent=extent)  # fmt: skip
        for axis in axes:
            axis.set(xticks=[], yticks=[], xlim=((sizes[r][1] - widest) / 2, (sizes[r][1] + widest) / 2))
            axis.spines[:].set_visible(False)
        axes[0].set_ylabel(cut.name, fontsize=9, rotation=0, ha="right", va="center")
    told = [*(["missing: magenta and grey"] if lost else []), *(["kept: outlined"] if any(outlined) else [])]
    names.append("\n".join([residual_name(channels, sigma), *(["; ".join(told)] if told else [])]))
    for axis, name in zip(panels[0], names, strict=True):
        axis.set_title(name, fontsize=10)
    in_sigmas(figure.colorbar(shown, ax=panels[:, -1], fraction=0.046, pad=0.02, extend="both"), sigma)
    return figure
