"""Noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nlflow.denoising.noise import GaussianNoise, Noise, NoiseEstimate, spectra
from nlflow.errors import InputError, visible
from nlflow.plotting.base import PALETTE, Array, check_numbers, draw_line, finish, new_figure, show_decades

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MODEL, _MEASURED, _PICTURE = PALETTE[0], PALETTE[1], "0.6"
_POINTS: Final = 32  # of a level function
_SAMPLED: Final = 128  # samples along an axis, from which models without formulas are drawn
_REPEATS: Final = 8
_MOST: Final = 512  # samples along an axis of a picture that are shown: the grain is to be seen
_MOST_ROWS: Final = 3  # channels of a recording
_RANGE: Final = (0.5, 99.5)  # percentiles of a picture that are black and white
_WIDTH: Final = 120  # of a heading
_REASON: Final = 56  # of a reason inside a panel
_HYPOTHESES: Final = 8  # the likeliest of them are drawn
_DECADES: Final = 6.0  # of a spectrum, at most: below, it was cut off


@dataclass(frozen=True)
class NoiseCurves:
    """Curves of noise, measured or of a model.

    Attributes
    ----------
    intensities, sigmas : array of shape (K,)
        Standard deviation of a sample by intensity, both in the units of the input; empty if unknown.
    frequencies, powers : array of shape (n,)
        Power, in squared units of the input, by frequency in cycles a sample; of images the mean over directions.
    plane : array of shape (h, w), or None
        Power of an image by both frequencies, with 0 in the middle.
    """

    intensities: Array
    sigmas: Array
    frequencies: Array
    powers: Array
    plane: Array | None


def model_curves(model: Noise, samples: Array, *, channel_axis: int | None = None) -> NoiseCurves:
    values = samples[..., None] if channel_axis is None else np.moveaxis(samples, channel_axis, -1)
    channels, dimension = values.shape[-1], values.ndim - 1
    seen = values.mean(axis=-1, dtype=np.float64)
    seen = seen[np.isfinite(seen)]
    low, middle, high = np.percentile(seen, [1, 50, 99]) if seen.size else (0.0, 0.5, 1.0)
    intensities = np.linspace(low, high, _POINTS) if high > low else np.array([low])
    if isinstance(model, GaussianNoise):
        powers = model.powers(channels, dimension)
        plane = powers[0] if model.opponent else powers.mean(axis=0)
        sigmas = math.sqrt(float(powers.mean())) * model.relative(intensities)
    else:
        size = (_SAMPLED,) * dimension if dimension == 2 else (16 * _SAMPLED,)
        shape = (*size, channels) if channel_axis is not None else size
        axis = None if channel_axis is None else dimension
        try:
            sigmas = np.array([np.std(model.sample(np.full(shape, x), rng=0, channel_axis=axis)) for x in intensities])
            plane = _sampled_power(model, np.full(shape, middle), axis)
        except InputError:  # it has no strength, or does not fit
            return NoiseCurves(np.empty(0), np.empty(0), np.empty(0), np.empty(0), None)
    return NoiseCurves(intensities, np.asarray(sigmas), *by_frequency(np.atleast_2d(plane)))


def _sampled_power(model: Noise, clean: Array, axis: int | None) -> Array:
    """Return the power of the noise on a constant picture, on the grid of frequencies: means over some samples."""
    total = 0.0
    for seed in range(_REPEATS):
        noise = np.asarray(model.sample(clean, rng=seed, channel_axis=axis)) - clean
        noise = noise[..., None] if axis is None else noise
        planes = np.moveaxis(noise, -1, 0).reshape(noise.shape[-1], *(1, *noise.shape[:-1])[-2:])
        total = total + (np.abs(np.fft.fft2(planes)) ** 2 / planes[0].size).mean(axis=0)
    grid = spectra.on_grid(np.asarray(total)[None] / _REPEATS)[0]
    return np.asarray(grid[0] if len(grid) == 1 else grid)


def by_frequency(plane: Array) -> tuple[Array, Array, Array | None]:
    """Return frequencies in (0, 1/2], the power there, and for images the power with frequency 0 in the middle.

    `plane` is in the order of `numpy.fft.fft2`; a recording has one row.
    """
    rows, columns = (np.abs(np.fft.fftfreq(n)) if n > 1 else np.zeros(1) for n in plane.shape)
    radius = np.hypot(rows[:, None], columns)
    step = 1 / plane.shape[1]
    ring = np.rint(radius / step).astype(int)
    last = plane.shape[1] // 2
    inside = (ring >= 1) & (ring <= last)
    count = np.bincount(ring[inside], minlength=last + 1)[1:]
    power = np.bincount(ring[inside], plane[inside], minlength=last + 1)[1:] / np.maximum(count, 1)
    frequencies = step * np.arange(1, last + 1)
    return frequencies, power, np.fft.fftshift(plane) if plane.shape[0] > 1 else None


def measured_curves(found: NoiseEstimate, model: NoiseCurves) -> NoiseCurves:
    """Return measured curves; strength by intensity is relative, and scaled to that of the model."""
    empty = np.empty(0)
    places = np.asarray(found.measured.get("intensities", empty), np.float64)
    strengths = np.asarray(found.measured.get("strengths", empty), np.float64)
    if places.size and places.shape == strengths.shape and model.sigmas.size and strengths.any():
        expected = np.interp(places, model.intensities, model.sigmas)
        sigmas = strengths * math.sqrt(float(np.mean(expected**2) / np.mean(strengths**2)))
    else:
        places, sigmas = empty, empty
    plane = found.measured.get("spectrum")
    if plane is None:
        return NoiseCurves(places, sigmas, empty, empty, None)
    return NoiseCurves(places, sigmas, *by_frequency(np.atleast_2d(plane)))


def noise_figure(
    image: Array,
    found: NoiseEstimate | Sequence[NoiseEstimate],
    *,
    channel_axis: int | None,
    names: Sequence[str] = (),
    missing: Array | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the noise of a picture or a recording, measured and by the model.

    Parameters
    ----------
    image : numpy.ndarray
        Image (H, W) or signal (N,), with an axis of channels if `channel_axis` says so; what is not finite is missing.
    found : NoiseEstimate, or a sequence of them
        Of all channels, or for a signal one for each channel.
    channel_axis : int or None
    names : sequence of str, optional
        Of the channels of a signal, of which three are drawn.
    missing : bool array of the shape of the data, optional
    title : str, optional
    """
    image = check_numbers("image", image)
    spatial = image.ndim - (channel_axis is not None)
    if spatial not in (1, 2):
        raise InputError(f"image: got shape {image.shape}, expected an image or a signal; check channel_axis")
    values = (image[..., None] if channel_axis is None else np.moveaxis(image, channel_axis, -1)).astype(np.float64)
    if missing is not None:
        holes = missing[..., None] if channel_axis is None else np.moveaxis(missing, channel_axis, -1)
        values = np.where(holes, np.nan, values)
    verdicts = [found] if isinstance(found, NoiseEstimate) else list(found)
    if spatial == 2:
        return _image_figure(values, verdicts[0], title)
    return _signal_figure(values, verdicts, names, title)


def _image_figure(values: Array, found: NoiseEstimate, title: str | None) -> Figure:
    model = model_curves(found.model, values, channel_axis=-1)
    measured = measured_curves(found, model)
    planes = [(name, one.plane) for name, one in (("measured", measured), ("model", model)) if one.plane is not None]
    weighed = found.measured.get("probabilities")
    figure = new_figure(14, 8.6 if weighed else 7.4, 110, _heading(title, str(found)))
    names = [name for name, _ in planes]
    below = ["evidence"] * (3 - len(names)) if weighed else ["picture", *["."] * (2 - len(names))]
    layout: Any = [["picture", "levels", "powers"], [*below, *names]]
    axes = figure.subplot_mosaic(layout, width_ratios=[1.35, 1, 1])
    _picture(axes["picture"], values)
    if weighed:
        _evidence(axes["evidence"], weighed, found.reasons)
    _levels(axes["levels"], model, measured, found.measured.get("interval"))
    _powers(axes["powers"], {"model": model, "measured": measured}, "power by frequency, mean over directions")
    if planes:
        _planes(figure, axes, planes)
    return figure


def _heading(title: str | None, verdict: str) -> str:
    shown = "\n".join(wrap(verdict, _WIDTH))
    return f"{visible(title)}\n{shown}" if title else shown


def _picture(axis: Axes, values: Array) -> None:
    part = tuple(slice(max((n - _MOST) // 2, 0), max((n - _MOST) // 2, 0) + _MOST) for n in values.shape[:2])
    shown = values[part]
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, _RANGE) if finite.size else (0.0, 1.0)
    if shown.shape[-1] == 3:
        axis.imshow(np.nan_to_num(np.clip((shown - low) / ((high - low) or 1), 0, 1)), interpolation="nearest")
    else:
        axis.imshow(shown.mean(axis=-1), cmap="gray", vmin=low, vmax=high, interpolation="nearest")
    whole = shown.shape == values.shape
    size = " × ".join(str(n) for n in shown.shape[:2])
    axis.set_title("the picture" if whole else f"its middle, {size} pixels", fontsize=11)
    axis.set_axis_off()


def _evidence(axis: Axes, probabilities: Mapping[str, float], reasons: Sequence[str]) -> None:
    """Draw how likely hypotheses are, the likeliest above, and what the verdict rests on below."""
    likely = sorted(probabilities.items(), key=lambda item: -item[1])[:_HYPOTHESES]
    names, parts = [visible(str(name)) for name, _ in likely], [float(part) for _, part in likely]
    bars = axis.barh(names, parts, color=[_MEASURED, *[_PICTURE] * (len(likely) - 1)])
    axis.bar_label(bars, [f"{part:.2g}" if part >= 0.005 else "< 0.01" for part in parts], padding=3, fontsize=8)
    axis.invert_yaxis()
    finish(axis, "how likely each kind is: for the verdict, and against it", "probability")
    axis.set_xlim(0, 1.1)
    axis.tick_params(labelsize=9)
    because = "\n".join(line for reason in reasons for line in wrap(f"because {visible(reason)}", _REASON))
    axis.text(0.98, 0.04, because, transform=axis.transAxes, ha="right", va="bottom", fontsize=8, color="0.3")


def _levels(axis: Axes, model: NoiseCurves, measured: NoiseCurves, interval: tuple[float, float] | None = None) -> None:
    """Draw the standard deviation by intensity, and between which numbers it is all in all, where that is known."""
    if interval is not None:
        axis.axhspan(*interval, color=_MODEL, alpha=0.15, linewidth=0, label="σ of the whole, interval")
    if model.sigmas.size:
        axis.plot(model.intensities, model.sigmas, color=_MODEL, label="model")
    if measured.sigmas.size:
        axis.plot(measured.intensities, measured.sigmas, "o", color=_MEASURED, markersize=5, label="measured, rescaled")
    finish(axis, "σ of a sample by intensity", "intensity (units of the file)", "σ")
    axis.set_ylim(0, 1.25 * max([*model.sigmas, *measured.sigmas, *(interval or ()), 1e-12]))
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=9, frameon=False, loc="best")


def _powers(axis: Axes, curves: dict[str, NoiseCurves], title: str) -> None:
    styles: dict[str, dict[str, Any]] = {
        "model": {"color": _MODEL},
        "measured": {"color": _MEASURED, "linestyle": "--"},
        "recording": {"color": _PICTURE, "linewidth": 0.9},
    }
    highest, shown = 0.0, []
    for name, one in curves.items():
        if one.powers.size and one.powers.max() > 0:
            axis.plot(one.frequencies, np.where(one.powers > 0, one.powers, np.nan), label=name, **styles[name])
            highest = max(highest, float(one.powers.max()))
            shown.append(one.powers[one.powers > 0])
    finish(axis, title, "frequency (cycles a sample)", "power (units², mean: σ²)")
    if not shown:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", fontsize=10)
        return
    lowest = max(float(np.concatenate(shown).min()), highest * 10.0**-_DECADES)
    axis.set_yscale("log")
    show_decades(axis, lowest, highest, 2.0)
    axis.set_xlim(0, 0.5)
    axis.legend(fontsize=9, frameon=False, loc="best")


def _planes(figure: Figure, axes: dict[str, Axes], planes: list[tuple[str, Array]]) -> None:
    """Draw powers by both frequencies on one scale of decades."""
    highest = max(float(plane.max()) for _, plane in planes)
    if highest <= 0:
        return
    lowest = max(min(float(plane.min()) for _, plane in planes), highest * 10.0**-_DECADES)
    lowest = min(lowest, highest / 10)
    for name, plane in planes:
        axis = axes[name]
        logs = np.log10(np.maximum(plane, lowest))
        shown = axis.imshow(logs, cmap="cividis", vmin=math.log10(lowest), vmax=math.log10(highest),
                            extent=_extent(plane), interpolation="nearest")  # fmt: skip
        axis.set_title(f"power by both frequencies, {name}", fontsize=11)
        axis.set_xlabel("frequency along a row")
        axis.set_ylabel("along a column")
        axis.tick_params(labelsize=8)
    bar = figure.colorbar(shown, ax=[axes[name] for name, _ in planes], fraction=0.046, pad=0.02)
    bar.set_label("log₁₀ power", fontsize=9)
    bar.ax.tick_params(labelsize=8)


def _extent(plane: Array) -> tuple[float, float, float, float]:
    """Return where a plane ends: frequency 0 is the middle of a pixel."""
    rows, columns = (0.5 / n for n in plane.shape)
    return -0.5 - columns, 0.5 - columns, 0.5 - rows, -0.5 - rows


def _signal_figure(values: Array, found: list[NoiseEstimate], names: Sequence[str], title: str | None) -> Figure:
    channels = values.shape[-1]
    rows = min(channels, _MOST_ROWS)
    heading = _heading(title, str(found[0])) if len(found) == 1 else title
    figure = new_figure(12, 3.1 * rows + 0.8, 110, heading)
    axes = figure.subplots(rows, 2, squeeze=False, width_ratios=[1.5, 1])
    for c in range(rows):
        one = found[c if len(found) > 1 else 0]
        signal, (left, right) = values[:, c], axes[c]
        draw_line(left, signal, slice(0, len(signal)), color=_MODEL, linewidth=0.6)
        name = f"{names[c]}: " if c < len(names) else f"channel {c} of {channels}: " if channels > 1 else ""
        finish(left, f"{name}{one}" if len(found) > 1 else f"{name}the recording", "sample")
        left.title.set_wrap(True)
        left.margins(x=0)
        model = model_curves(
            one.model, signal if len(found) > 1 else values, channel_axis=None if len(found) > 1 else -1
        )
        curves = {"recording": _recording(signal), "model": model, "measured": measured_curves(one, model)}
        _powers(right, curves, "power by frequency: noise and recording")
    return figure


def _recording(signal: Array) -> NoiseCurves:
    """Return the power of a recording itself, noise and all: means over windows, gaps filled with the mean."""
    from scipy.signal import welch

    empty = np.empty(0)
    present = np.isfinite(signal)
    if not present.any():
        return NoiseCurves(empty, empty, empty, empty, None)
    filled = np.where(present, signal, signal[present].mean())
    frequencies, power = welch(filled, nperseg=min(256, len(filled)))
    return NoiseCurves(empty, empty, frequencies[1:], power[1:] / 2, None)  # both signs of a frequency: the mean is σ²
