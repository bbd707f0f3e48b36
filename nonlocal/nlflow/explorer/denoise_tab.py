"""The tab "Denoise"."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.denoising import DenoiseInfo, Trail
from nlflow.denoising.inputs import OF_FAST
from nlflow.errors import format_bytes
from nlflow.explorer import denoising_view as view
from nlflow.explorer import stacks
from nlflow.explorer.denoising_view import DenoiseResult, DenoiseSettings
from nlflow.explorer.desk import Desk, Tab
from nlflow.explorer.pictures import Scale, data_url, envelope, grey_scale, picture, residual_scale
from nlflow.explorer.sources import Source, preview, saved
from nlflow.explorer.texts import decibels, digits, note
from nlflow.explorer.uploads import SUFFIXES, received_reference, received_source
from nlflow.explorer.widgets import (
    Download,
    Knob,
    Lines,
    Pictures,
    beside,
    button,
    choice,
    columns,
    heading,
    markup,
    offer,
)
from nlflow.io.formats import written_extension
from nlflow.io.notebook import table

_QUALITIES = {
    "fast": "fast: pixels, answers at once",
    "balanced": "balanced: groups of patches",
    "best": "best: more groups and steps",
}
_OF_STACKS = {
    "fast": "fast: groups of blocks, once",
    "balanced": "balanced: groups of blocks, more steps",
    "best": "best: more groups and steps",
}
_ORIGINAL = {"color": "#8a949e", "width": 1}


class DenoiseTab(Tab):
    """Settings at the side, pictures or lines in the middle, curves, numbers and texts below."""

    name = "denoise"

    def __init__(self, desk: Desk, source: Source) -> None:
        super().__init__(desk)
        self._source = source
        self._trail, self._stills = Trail(), _Stills()  # used in the computing thread alone
        self._result: DenoiseResult | None = None
        moved: dict[str, Any] = {"moved": self.start}
        self.quality = choice("quality", "quality", _QUALITIES, self.start)
        self.knobs = {
            "sigma": Knob("sigma", "noise σ", 0.5, 80, 0.5, 25, **moved),
            "strength": Knob(
                "strength", "strength", 0.25, 4, 0.05, 1, choosable=False, unit="× the noise found", **moved
            ),
            "fidelity": Knob("fidelity", "fidelity λ̃", 0, 4, 0.05, 0.5, unit="mean, where chosen", **moved),
            "steps": Knob("steps", "time", 1, 20, 1, 1, unit="steps of length 1", **moved),
            "width": Knob("width", "kernel width", 0.5, 80, 0.5, 16, **moved),
            "patch_size": Knob("patch_size", "patch size", 1, 15, 2, 3, **moved),
            "search_radius": Knob("search_radius", "search window", 1, 15, 1, 8, **moved),
        }
        place: dict[str, Any] = {"choosable": False, "unit": "%", **moved}
        self.places = [
            Knob("place_0", "part: from the top", 0, 100, 1, 50, **place),
            Knob("place_1", "part: from the left", 0, 100, 1, 50, **place),
        ]
        self.slice = Knob("slice", "slice", 1, 2, 1, 1, choosable=False, moved=self._slide)
        self.pictures, self.part = Pictures(), markup()
        names: dict[str, dict[str, Any]] = {"noisy": _ORIGINAL, "result": {}, "clean": {"color": "#009e73"}}
        self.lines = Lines("", "sample", "", names, height=300)
        self.rest = Lines("removed: input minus result", "sample", "", {"removed": _ORIGINAL}, height=200)
        self.energies = Lines(
            "energies of the flow", "time", "over the degrees, in σ²", {"E": {}, "J": {}}, markers=True
        )
        self.distances = Lines("distance to the constant", "time (0: the input)", "", {"distance": {}}, markers=True)
        self.levels = Lines("noise by intensity", "intensity", "", {"σ": {}})
        self.powers = Lines("noise by frequency", "cycles a sample", "power", {"power": {}}, log="y")
        self.full_button = button("Compute in full", partial(self.start, full=True), primary=True)
        self.download = Download(lambda _: self._download(), label="")
        suffixes = SUFFIXES
        kinds = "PNG, JPEG, TIFF, WebP, BMP or NPY image; WAV, CSV or NPY signal; TIFF volume or clip"
        self.upload = self.open_button(
            "noisy", "Open a noisy file", f"or drop it here: {kinds}", suffixes, received_source, self._open
        )
        self.reference = self.open_button(
            "clean", "Clean reference (optional)", "of the same size: shows PSNR and SSIM or SNR", suffixes,
            lambda name, content, limits: received_reference(name, content, limits, self._source), self._open_reference,
        )  # fmt: skip
        undo = button("Undo to defaults", self.undo)
        controls = [self.upload, self.reference, self.slice, self.quality, *self.knobs.values(), *self.places,
                    columns(undo, self.full_button, least=120)]  # fmt: skip
        self.noise = columns(self.levels, self.powers)
        self.noise_text = markup()
        noise = heading("Noise"), self.noise_text, self.noise
        course = heading("Course of the flow"), columns(self.energies, self.distances)
        below = self.below(*course, *noise)
        views = [self.status, self.part, self.pictures, self.lines, self.rest, *below, self.download]
        self.panel = beside(controls, views)
        self._adapt()

    def settings(self, *, full: bool) -> DenoiseSettings:
        """Return what the controls say."""
        place = tuple((knob.value or 0.0) / 100 for knob in self.places[: len(self._plane())])
        given: dict[str, Any] = {name: knob.value for name, knob in self.knobs.items()}
        for name in ("patch_size", "search_radius", "steps"):
            given[name] = None if given[name] is None else int(given[name])
        if given["sigma"] is not None or given["strength"] == 1:
            given["strength"] = None
        if not self._of_pixels():
            given |= dict.fromkeys(OF_FAST)
        crop = None if full else preview(self._source, place, self._at())
        return DenoiseSettings(quality=self.quality.value, crop=crop, **given)

    def start(self, *, full: bool = False) -> None:
        """Compute what the controls say."""
        for name in OF_FAST:
            self.knobs[name].show(disabled=not self._of_pixels())
        self.knobs["strength"].show(disabled=self.knobs["sigma"].value is not None)
        settings, source, trail, stills = self.settings(full=full), self._source, self._trail, self._stills
        whole, at = settings.crop is None and preview(source) is not None, self._at()
        self.ask(
            lambda tell: _Shown(view.compute(settings, source, trail=trail, progress=tell), source, stills, at),
            self._show,
            "computing in full …" if whole else "computing …",
        )

    def _slide(self) -> None:
        """Show another picture of a stack: of the result if that is of the whole stack, else compute around it."""
        result, source, stills, at = self._result, self._source, self._stills, self._at()
        if result is None or result.settings != self.settings(full=True):
            self.start()
        else:
            self.ask(lambda tell: _Shown(result, source, stills, at), self._show, "drawing …")

    def _at(self) -> int:
        """Return the number of the picture of a stack that is shown, from 0."""
        return int(self.slice.shown["value"]) - 1

    def _of_pixels(self) -> bool:
        """Whether the flow of pixels runs, which has settings of its own."""
        return bool(self.quality.value == "fast") and not self._source.media.stacked

    def _plane(self) -> tuple[int, ...]:
        """Return the numbers of the axes along which the part that is shown can be moved."""
        media = self._source.media
        own = stacks.through(media) if media.stacked else None
        return tuple(axis for axis in range(len(self._source.shape)) if axis != own)

    def undo(self) -> None:
        """Take back what the user has set."""
        self.quality.value = next(iter(_QUALITIES))
        for knob in (self.slice, *self.knobs.values(), *self.places):
            knob.reset()
        self.start()

    def _open(self, source: Source) -> None:
        self._source, self._trail, self._stills = source, Trail(), _Stills()
        self._result = None
        self._adapt()
        self.undo()

    def _open_reference(self, source: Source) -> None:
        self._source, self._stills = source, _Stills()
        self._result = None
        self.start()

    def _download(self) -> None:
        result, source = self._result, self._source
        if result is not None:
            self.ask(lambda tell: saved(source, result.settings.crop, result.result), self._save,
                     "writing the file …", "file")  # fmt: skip

    def _save(self, file: tuple[str, bytes]) -> str:
        self.download.save(*file)
        return f"{file[0]}: {format_bytes(len(file[1]))}"

    # ---- what is shown

    def _adapt(self) -> None:
        """Give the controls the ranges and units of a source."""
        media, shape = self._source.media, self._source.shape
        samples = media.data[np.isfinite(media.data)]
        span = float(np.ptp(samples.astype(np.float64))) if samples.size else 1.0
        image, eight = media.kind == "image" or media.stacked, media.data.dtype == np.uint8
        unit = "grey levels" if image and media.data.dtype.kind == "u" else "units of the file"
        step = 0.5 if eight else _tidy(span / 500)
        for name in ("sigma", "width"):
            self.knobs[name].rescale(step, 80.0 if eight else step * 250, step, step * 20, unit)
        nodes = "pixels" if image else "samples"
        self.knobs["patch_size"].rescale(1, 15 if image else 41, 2, 3 if image else 15, nodes)
        self.knobs["search_radius"].rescale(1, 15 if image else 150, 1, 8 if image else 60, f"{nodes} to each side")
        cut = preview(self._source)
        for knob in self.places:
            knob.visible = False
        for knob, axis in zip(self.places, self._plane(), strict=False):  # a signal has one
            knob.visible = cut is not None and cut[axis][1] - cut[axis][0] < shape[axis]
        self.slice.visible = media.stacked
        offer(self.quality, _OF_STACKS if media.stacked else _QUALITIES)
        if media.stacked:
            count = shape[stacks.through(media)]
            self.slice.show(label=stacks.word(media))
            self.slice.rescale(1, count, 1, count // 2 + 1, f"of {count}")
        self.full_button.visible = cut is not None
        self.pictures.visible, self.lines.visible, self.rest.visible = image, not image, not image
        suffix = "npy" if media.stacked else written_extension(Path(self._source.name)).lstrip(".")
        self.download.show(label=f"Download result ({suffix.upper()})")

    def _show(self, shown: _Shown) -> str:
        result, source = shown.result, shown.source
        self._result = result
        info, course, settings = result.info, result.course, result.settings
        chosen: dict[str, Any] = {"sigma": info.sigma, "steps": info.steps, **info.parameters}
        chosen["fidelity"] = chosen.get("fidelity_mean")
        for name, knob in self.knobs.items():
            # Blocks of a stack have a side for each axis, which one slider cannot show; the numbers have them.
            if isinstance(chosen.get(name), int | float):
                knob.show_chosen(float(chosen[name]))
        unit = self.knobs["sigma"].shown["unit"]
        self.part.object = _part(result, source, shown.at)
        if shown.items:
            self.pictures.draw(shown.items, shown.still)
        else:
            self.lines.draw(shown.lines, xlabel=shown.axis, ylabel=unit)
            self.rest.draw(shown.rest, xlabel=shown.axis, ylabel=unit)
        self._show_noise(result, unit)
        time = course.get("t", np.empty(0))
        curves = {name: (time, values) for name, values in course.items() if name != "t"}
        self.energies.draw({name: curves[name] for name in ("E", "J") if name in curves})
        self.energies.visible = "E" in curves
        self.distances.draw({name: curves[name] for name in ("distance",) if name in curves}, ylabel=unit)
        self.figures.object = table(_rows(result, unit)) + note(*source.notes, *result.notes, *_remarks(source))
        self.code.show(
            python=view.as_python(settings, source),
            command=view.as_command(settings, source),
            note=view.command_note(settings, source),
        )
        return f"{source.name}: {info.steps} step{'s' if info.steps != 1 else ''} in {info.seconds:.2f} s"

    def _show_noise(self, result: DenoiseResult, unit: str) -> None:
        """Show what the noise was found to be; nothing where the user has said it."""
        curves, info = result.noise, result.info
        self.noise.visible = curves is not None
        told = "; ".join(dict.fromkeys(_verdict(one) for one in info.columns or (info,)))
        self.noise_text.object = note(f"{'found' if info.sigma_estimated else 'given'}: {told}")
        if curves is not None:
            self.levels.draw({"σ": (curves.intensities, curves.sigmas)} if curves.sigmas.size else {}, ylabel=unit)
            self.powers.draw({"power": (curves.frequencies, curves.powers)} if curves.powers.size else {})


@dataclass
class _Stills:
    """Pictures that do not change while settings move, and the source and part that they show."""

    part: Any = None
    items: dict[str, dict[str, str]] = field(default_factory=dict)


class _Shown:
    """A result as the page shows it; made in the computing thread, since drawing takes time too."""

    def __init__(self, result: DenoiseResult, source: Source, stills: _Stills, at: int = 0) -> None:
        self.result, self.source, self.at = result, source, at
        self.items: list[dict[str, str]] = []
        if source.media.kind == "image" or source.media.stacked:
            self._pictures(stills)
        else:
            self._lines()

    def _pictures(self, stills: _Stills) -> None:
        result, media, crop = self.result, self.source.media, self.result.settings.crop
        first = 0 if crop is None or not media.stacked else crop[stacks.through(media)][0]
        scale, rest = grey_scale(media.data), residual_scale(result.info.sigma)
        told = f"black is {scale.low:g}, white is {scale.high:g}"
        removed = f"removed: input minus result; grey is 0, black and white are ∓3σ = ∓{digits(rest.high)}"

        def draw(name: str, values: Any, used: Scale, caption: str) -> dict[str, str]:
            channels = media.channel_axis
            if media.stacked:
                values, channels = stacks.plane(values, media, self.at - first), stacks.plane_channels(media)
            content, more = picture(values, used, channels, media.orientation)
            caption = f"{caption}; {more}" if more else caption
            return {"src": data_url(content), "name": name, "alt": f"{name} picture", "caption": caption}

        part = id(self.source), crop, self.at
        if stills.part != part:
            stills.part = part
            stills.items = {"noisy": draw("noisy", result.noisy, scale, told)}
            if result.clean is not None:
                stills.items["clean"] = draw("clean", result.clean, scale, "the clean reference")
        # Without their addresses, which are sent to the page once.
        still = {name: {**item, "src": ""} for name, item in stills.items.items()}
        changing = [draw("result", result.result, scale, told), draw("removed", result.residual, rest, removed)]
        self.items = [still.pop("noisy"), *changing, *still.values()]
        self.still = {name: item["src"] for name, item in stills.items.items()}

    def _lines(self) -> None:
        result, media = self.result, self.source.media
        start = 0 if result.settings.crop is None else result.settings.crop[0][0]
        rate = media.sample_rate or 1
        self.axis = "time in seconds" if media.sample_rate else "sample"

        def line(values: Any) -> Any:
            first = values if media.channel_axis is None else np.moveaxis(values, media.channel_axis, 0)[0]
            places, heights = envelope(first)
            return (places + start) / rate, heights

        given = {"noisy": result.noisy, "result": result.result, "clean": result.clean}
        self.lines = {name: line(values) for name, values in given.items() if values is not None}
        self.rest = {"removed": line(result.residual)}


def _tidy(value: float) -> float:
    """Return a number near `value` with one digit, for steps of a slider."""
    return float(f"{value:.0e}") if value > 0 else 0.01


def _remarks(source: Source) -> tuple[str, ...]:
    """Return what is different for a stack."""
    if not source.media.stacked:
        return ()
    return (
        "The numbers are of all that was denoised, not of the one picture that is shown. Fidelity, time, kernel width, "
        "patch size and search window belong to the flow of pixels: a stack is denoised through groups of blocks.",
    )


def _part(result: DenoiseResult, source: Source, at: int) -> str:
    crop = result.settings.crop
    if source.media.stacked:
        return f'<p class="part">{stacks.told(source.media, at, crop)}</p>'
    if crop is None:
        return ""
    ranges = " × ".join(f"{low}–{high - 1}" for low, high in crop)
    size = " × ".join(map(str, source.shape))
    what = "pixels" if source.media.kind == "image" else "samples"
    return f'<p class="part">A part is shown and computed, in full resolution: {what} {ranges} of {size}.</p>'


def _verdict(info: DenoiseInfo) -> str:
    """Return the model of the noise in words, and how sure it is."""
    if not info.confidence:
        return f"{info.noise} noise, σ {digits(info.sigma)}" if info.model is None else info.noise
    words = info.noise if info.model is not None else f"white noise, σ {digits(info.sigma)}"
    return f"{words} (confidence {info.confidence})"


def _words(value: Any) -> str:
    """Return a parameter for people: a number, or one for each axis of a stack."""
    return " × ".join(digits(float(one)) for one in (value if isinstance(value, tuple) else (value,)))


def _rows(result: DenoiseResult, unit: str) -> list[tuple[str, str]]:
    info, figures = result.info, result.figures
    each = info.columns or (info,)  # the columns of a table have units of their own
    levels = ", ".join(digits(one.sigma) for one in each)
    rows = [("noise σ", f"{levels} {unit} ({'estimated' if info.sigma_estimated else 'given'})")]
    for name, title in (("psnr", "PSNR"), ("snr", "SNR")):
        if f"{name}_output" in figures:
            rows.append((title, f"{decibels(figures[f'{name}_input'])} → {decibels(figures[f'{name}_output'])}"))
    if "ssim_output" in figures:
        before, after = (digits(figures[f"ssim_{name}"], ".4f") for name in ("input", "output"))
        rows.append(("SSIM", f"{before} → {after}"))
    rows.append(("removed, rms", f"{', '.join(digits(one.residual) for one in each)} {unit}"))
    rows.append(("steps", f"{info.steps}; {info.stopped_by}"))
    rows += [(name.replace("_", " "), _words(value)) for name, value in info.parameters.items()]
    rows.append(("functional", info.functional))
    return rows
