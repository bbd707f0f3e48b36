"""Drawings of results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nlflow.denoising import DenoiseInfo
from nlflow.denoising.noise.names import NO_NOISE, has_sigma, verdict_of
from nlflow.desk.explorer import sources
from nlflow.desk.explorer.denoising_view import DenoiseResult
from nlflow.desk.explorer.pictures import (
    Scale,
    data_url,
    envelope,
    full_range,
    grey_scale,
    histogram,
    overview,
    picture,
    residual_scale,
    seen_box,
)
from nlflow.desk.explorer.sources import Source
from nlflow.desk.explorer.texts import decibels, digits
from nlflow.desk.formats import axes
from nlflow.desk.formats.media import Array

_OPENED = 2000  # samples of a signal that are shown at first


@dataclass(frozen=True)
class Look:
    """The user's view."""

    at: int = 0  # of a stack, the number of the picture, from 0
    # black, white: the values that are drawn so; None where they are fitted to the data.
    black: float | None = None
    white: float | None = None
    # Of a signal, the first sample that is drawn, and how many; None for some in the middle.
    window: tuple[int, int] | None = None


def window_in(part: tuple[int, int], window: tuple[int, int] | None) -> tuple[int, int]:
    low, high = part
    if window is not None and low <= window[0] and sum(window) <= high:
        return window
    samples = high - low
    count = samples if samples <= 2 * _OPENED else _OPENED
    return low + (samples - count) // 2, count


@dataclass
class Stills:
    """What stays while settings change."""

    fitted: Scale | None = None
    part: Any = None
    items: dict[str, dict[str, str]] = field(default_factory=dict)
    whole: str = ""
    # sounds: WAV files of the result whose samples are `heard`.
    sounds: dict[str, bytes] = field(default_factory=dict)
    heard: Array | None = None


class Drawn:
    """A drawn result."""

    def __init__(self, result: DenoiseResult, source: Source, stills: Stills, look: Look) -> None:
        self.result, self.source, self.look = result, source, look
        self.items: list[dict[str, str]] = []
        if source.media.kind == "image" or source.media.stacked:
            self._pictures(stills)
        else:
            self._lines()
            if stills.heard is not result.result:
                stills.sounds, stills.heard = sources.sounds(source, result.settings.crop, result.result), result.result
            self.sounds = stills.sounds

    def _pictures(self, stills: Stills) -> None:
        result, media, crop, look = self.result, self.source.media, self.result.settings.crop, self.look
        if stills.fitted is None:
            stills.fitted = grey_scale(media.data)
        self.fitted = stills.fitted
        black = self.fitted.low if look.black is None else look.black
        self.scale = scale = Scale(black, max(black, self.fitted.high if look.white is None else look.white))
        counts = of_counts(result.info)
        rest = residual_scale(result.info.residual if counts else result.info.sigma)
        told = f"noisy and result: black is {digits(scale.low)}, white is {digits(scale.high)}"
        reach = "3 root mean squares" if counts else "3σ"
        removed = (
            f"removed: input minus result; grey is 0, black and white are −{reach} and +{reach}, ±{digits(rest.high)}"
        )

        def draw(name: str, values: Array, used: Scale, caption: str) -> dict[str, str]:
            content, more = picture(self._plane(values), used, self._channels(), media.orientation)
            caption = f"{caption}; {more}" if more else caption
            return {"src": data_url(content), "name": name, "alt": f"{name} picture", "caption": caption}

        part = id(self.source), self._across(crop), look.at, scale
        if stills.part != part:
            stills.part = part
            stills.items = {"noisy": draw("noisy", result.noisy, scale, told)}
            if result.clean is not None:
                stills.items["clean"] = draw("clean", result.clean, scale, "the clean reference")
            stills.whole = self._whole(scale)
        # Without their addresses, which are sent to the page once.
        still = {name: {**item, "src": ""} for name, item in stills.items.items()}
        changing = [draw("result", result.result, scale, told), draw("removed", result.residual, rest, removed)]
        self.items = [still.pop("noisy"), *changing, *still.values()]
        self.still = {name: item["src"] for name, item in stills.items.items()}
        self.whole = stills.whole
        range_ = full_range(media.data)
        shown = {"noisy": result.noisy, "result": result.result}
        self.levels = {name: histogram(self._plane(values), range_) for name, values in shown.items()}
        ends = (("black", scale.low), ("white", scale.high))
        self.levels |= {name: (np.full(2, value), np.array([0.0, 1.0])) for name, value in ends}

    def _plane(self, values: Array) -> Array:
        media, crop = self.source.media, self.result.settings.crop
        if not media.stacked:
            return values
        # The values are those of the part; a whole stack has more.
        axis = axes.through(media, channels=True)
        whole = values.shape[axis] == media.data.shape[axis]
        first = 0 if crop is None or whole else crop[axes.through(media)][0]
        return axes.plane(values, media, self.look.at - first)

    def _across(self, crop: Any) -> Any:
        """Return which part of one picture a crop is of; None for all of it."""
        axes = plane_axes(self.source)
        ends = tuple((0, self.source.shape[axis]) if crop is None else tuple(crop[axis]) for axis in axes)
        return None if all(end == (0, self.source.shape[axis]) for end, axis in zip(ends, axes, strict=True)) else ends

    def _channels(self) -> int | None:
        media = self.source.media
        return axes.plane_channels(media) if media.stacked else media.channel_axis

    def _whole(self, scale: Scale) -> str:
        """Return the address of the whole picture, small, where a part is shown; empty where all is shown."""
        if self.place is None:
            return ""
        media = self.source.media
        return data_url(overview(self._plane(media.data), scale, self._channels(), media.orientation))

    @property
    def place(self) -> tuple[float, float, float, float] | None:
        crop, media = self.result.settings.crop, self.source.media
        if crop is None:
            return None
        axes = plane_axes(self.source)
        shares = [(crop[axis][0] / self.source.shape[axis], crop[axis][1] / self.source.shape[axis]) for axis in axes]
        return None if shares == [(0.0, 1.0)] * 2 else seen_box(shares, media.orientation)

    def _lines(self) -> None:
        result, media = self.result, self.source.media
        crop = result.settings.crop
        self.part = (0, self.source.shape[0]) if crop is None else crop[0]
        self.window = first, count = window_in(self.part, self.look.window)
        first -= self.part[0]
        rate = media.sample_rate or 1
        self.axis = "time in seconds" if media.sample_rate else "sample"

        def line(values: Any) -> Any:
            one = values if media.channel_axis is None else np.moveaxis(values, media.channel_axis, 0)[0]
            places, heights = envelope(one[first : first + count])
            return (places + self.window[0]) / rate, heights

        given = {"noisy": result.noisy, "result": result.result, "clean": result.clean}
        self.lines = {name: line(values) for name, values in given.items() if values is not None}
        self.rest = {"removed": line(result.residual)}


def plane_axes(source: Source) -> tuple[int, ...]:
    own = axes.through(source.media) if source.media.stacked else None
    return tuple(axis for axis in range(len(source.shape)) if axis != own)


# ---- words


def told_part(result: DenoiseResult, source: Source, look: Look) -> str:
    crop, told = result.settings.crop, ""
    if source.media.stacked:
        told = sources.told_stack(source.media, look.at, crop)
    elif crop is not None:
        ranges = " × ".join(f"{low}–{high - 1}" for low, high in crop)
        size = " × ".join(map(str, source.shape))
        what = "pixels" if source.media.kind == "image" else "samples"
        told = f"A part is computed, in full resolution: {what} {ranges} of {size}."
    return f'<p class="part">{told}</p>' if told else ""


def of_counts(info: DenoiseInfo) -> bool:
    return not has_sigma(info.model)


def verdict(info: DenoiseInfo) -> str:
    white = info.model is None and info.noise != NO_NOISE
    return verdict_of(f"{info.noise}, σ {digits(info.sigma)}" if white else info.noise, info.confidence)


def _words(value: Any) -> str:
    return " × ".join(digits(float(one)) for one in (value if isinstance(value, tuple) else (value,)))


def rows(result: DenoiseResult, unit: str) -> list[tuple[str, str]]:
    info, figures = result.info, result.figures
    each = info.columns or (info,)  # the columns of a table have units of their own
    levels = ", ".join(digits(one.sigma) for one in each)
    how = "found" if info.sigma_estimated else "given"
    found = [("noise σ", "that of counts" if of_counts(info) else f"{levels} {unit} ({how})")]
    for name, title in (("psnr", "PSNR"), ("snr", "SNR")):
        if f"{name}_output" in figures:
            found.append((title, f"{decibels(figures[f'{name}_input'])} → {decibels(figures[f'{name}_output'])}"))
    if "ssim_output" in figures:
        before, after = (digits(figures[f"ssim_{name}"], ".4f") for name in ("input", "output"))
        found.append(("SSIM", f"{before} → {after}"))
    found.append(("removed, rms", f"{', '.join(digits(one.residual) for one in each)} {unit}"))
    found.append(("steps", f"{info.steps}; {info.stopped_by}"))
    found += [(name.replace("_", " "), _words(value)) for name, value in info.parameters.items()]
    found.append(("functional", info.functional))
    return found


def remarks(source: Source, result: DenoiseResult) -> tuple[str, ...]:
    if source.media.format == "wav" and result.result.size > sources.MOST_HEARD:
        return (f"A sound of more than {sources.MOST_HEARD} samples is not played here: download it.",)
    if not source.media.stacked:
        return ()
    return (
        "The numbers are of all that was denoised, not of the one picture that is shown. A stack is denoised through "
        "groups of blocks in all qualities, so it has no settings of the flow of pixels.",
    )
