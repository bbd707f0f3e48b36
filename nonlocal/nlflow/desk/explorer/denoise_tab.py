"""The tab "Denoise"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from nlflow.denoising import Trail
from nlflow.denoising.noise.names import WORDS, has_sigma
from nlflow.denoising.options import OF_PIXELS
from nlflow.desk.explorer import address, sources
from nlflow.desk.explorer import denoising_view as view
from nlflow.desk.explorer.denoising_view import DenoiseResult, DenoiseSettings, NoiseFile
from nlflow.desk.explorer.desk import Desk, Report, Tab
from nlflow.desk.explorer.drawings import Drawn, Look, Stills, of_counts, plane_axes, remarks, rows, told_part, verdict
from nlflow.desk.explorer.pictures import full_range, stored_place
from nlflow.desk.explorer.sources import Source, preview, saved
from nlflow.desk.explorer.texts import note, refused
from nlflow.desk.explorer.uploads import SUFFIXES, received_noise, received_reference, received_source
from nlflow.desk.explorer.widgets import (
    Download,
    Knob,
    Lines,
    Overview,
    Pictures,
    Sounds,
    beside,
    button,
    choice,
    column,
    columns,
    heading,
    line_color,
    markup,
    offer,
    row,
)
from nlflow.desk.formats import axes, written_extension
from nlflow.errors import InputError, format_bytes, visible
from nlflow.store.notebook import table

# ---- a signal as lines: noisy and denoised, what was removed, and the window of samples that is drawn


ORIGINAL = {"color": "var(--given)", "width": 1}
RESULT = {"color": line_color(0), "width": 1.5}
_NAMES: dict[str, dict[str, Any]] = {"noisy": ORIGINAL, "result": RESULT, "clean": {"color": line_color(2)}}
_MOVES = {"Zoom in": 0.5, "Zoom out": 2.0, "All": math.inf}
_LEAST = 20  # samples
_WINDOW = ("from", "samples")  # what an address calls it


class _SignalView:
    """Lines of a signal, and buttons and a slider for the window that is drawn."""

    def __init__(self, moved: Callable[[], Any]) -> None:
        self._moved = moved
        self._drawn, self._part = (0, 1), (0, 1)
        self.window: tuple[int, int] | None = None
        self.lines = Lines("", "sample", "", _NAMES, height=340, heard=self.move)
        self.rest = Lines(
            "removed: input minus result", "sample", "", {"removed": ORIGINAL}, height=200, heard=self.move
        )
        zooms = (button(name, partial(self.move, {"factor": factor})) for name, factor in _MOVES.items())
        self.first = Knob("first", "shown from", 0, 1, 1, 0, optional=False, whole=True, moved=self._slide)
        self.sounds = Sounds()
        self.panel = column(self.sounds, columns(row(*zooms), self.first, least=240), self.lines)

    def draw(self, shown: Drawn, unit: str) -> None:
        self._drawn, self._part = shown.window, shown.part
        self.sounds.draw(shown.sounds)
        self.sounds.visible = bool(shown.sounds)
        self.lines.draw(shown.lines, xlabel=shown.axis, ylabel=unit)
        self.rest.draw(shown.rest, xlabel=shown.axis, ylabel=unit)
        (low, high), (first, count) = self._part, self._drawn
        self.first.visible = count < high - low
        unit = f"samples on, {count} of {high - low}"
        self.first.show(low=low, high=max(high - count, low + 1), value=first, unit=unit)

    def move(self, data: Any) -> None:
        """Zoom by a ``factor``, or move by a ``shift`` in shares of what is seen."""
        first, count = self._drawn
        wide = count * min(float(data.get("factor", 1.0)), float(self._part[1]))
        self._set(first + (count - wide) / 2 - count * float(data.get("shift", 0.0)), wide)

    def _slide(self) -> None:
        self._set(self.first.value or 0.0, self._drawn[1])

    def _set(self, first: float, count: float) -> None:
        low, high = self._part
        samples = round(min(max(count, _LEAST), high - low))
        self.window = round(min(max(first, low), high - samples)), samples
        self._moved()


_QUALITIES = {
    "pixels": "pixels: one by one, with settings",
    "fast": "fast: groups of patches, once",
    "balanced": "balanced: more steps",
    "best": "best: more groups and steps",
}
_OF_STACKS = {
    "fast": "fast: groups of blocks, once",
    "balanced": "balanced: more steps",
    "best": "best: more groups and steps",
}
_NOISES = {name: word.label for name, word in WORDS.items()}
_OF_FILE = "file"
_KINDS = "Images, TIFF stacks, WAV, CSV or NPY; or drop a file on a button. A reference is the same without noise."


class DenoiseTab(Tab):
    """The tab itself."""

    name = "denoise"

    def __init__(self, desk: Desk, source: Source) -> None:
        super().__init__(desk)
        self._source = source
        self._trail, self._stills = Trail(), Stills()  # used in the computing thread alone
        self._result: DenoiseResult | None = None
        self._model: NoiseFile | None = None
        self._opened = 0  # how many files were opened before
        self._refused = False  # the last file could not be read: there is nothing to compute
        self._make_settings()
        self._make_views()
        choices = {"quality": self.quality, "noise": self.noise_kind}
        looks = {"slice": self.slice, "black": self.black, "white": self.white}
        places = {f"place_{axis}": knob for axis, knob in enumerate(self.places)}
        self.controls = {**choices, **self.knobs, **places, **looks}
        undo = button("Undo to defaults", self.undo)
        self.full_button = button("Compute in full", partial(self.start, full=True), primary=True)
        self.kept = column(
            self.whole, *self.places, self.full_button, self.slice, self.quality, self.noise_kind, self.model,
            *self.knobs.values(), undo, self.contrast,
        )  # fmt: skip
        numbers, program = self.below()
        course = column(heading("Course of the flow"), columns(self.energies, self.distances))
        self.noise = columns(self.levels, self.powers)
        noise = column(heading("Noise"), self.noise_text, self.noise)
        self.shown = [
            column(self.pictures, self.signal.panel),
            column(
                self.signal.rest, columns(column(numbers, program, self.download), column(course, noise), least=360)
            ),
        ]
        files = columns(self.upload, self.reference, least=120), markup(note(_KINDS))
        self.panel = beside(
            [self.refusal, self.part], [self.status, self.shown[0]], [*files, self.kept], [self.shown[1]]
        )
        self._adapt()

    def _make_settings(self) -> None:
        moved: dict[str, Any] = {"moved": self.start}
        whole: dict[str, Any] = {"whole": True, **moved}
        self.quality = choice("quality", "quality", _QUALITIES, self.start)
        self.noise_kind = choice("noise", "noise", _NOISES, self.start)
        self.knobs = {
            "sigma": Knob("sigma", "noise σ", 0.5, 80, 0.5, 25, **moved),
            "strength": Knob(
                "strength", "strength", 0.25, 4, 0.05, 1, optional=False, unit="× the noise found", **moved
            ),
            "fidelity": Knob("fidelity", "fidelity λ̃", 0, 4, 0.05, 0.5, unit="a mean where automatic", **moved),
            "steps": Knob("steps", "time", 1, 20, 1, 1, unit="steps of length 1", **whole),
            "width": Knob("width", "kernel width", 0.5, 80, 0.5, 16, **moved),
            "patch_size": Knob("patch_size", "patch size", 1, 15, 2, 3, **whole),
            "search_radius": Knob("search_radius", "search window", 1, 15, 1, 8, **whole),
        }
        place: dict[str, Any] = {"optional": False, "unit": "%", **moved}
        self.places = [Knob(f"place_{axis}", "part", 0, 100, 1, 50, **place) for axis in range(2)]
        self.slice = Knob("slice", "slice", 1, 2, 1, 1, optional=False, whole=True, moved=self._look_again)
        self.black, self.white = (
            Knob(name, name, 0, 255, 1, start, moved=self._look_again) for name, start in (("black", 0), ("white", 255))
        )
        self.upload = self.open_button(
            "noisy", "Open noisy file", "", SUFFIXES, received_source, self._open, self._refuse, replaces=True
        )
        self.reference = self.open_button(
            "clean", "Add reference", "", SUFFIXES,
            lambda name, content, limits: received_reference(name, content, limits, self._source),
            self._open_reference, self._refuse_reference,
        )  # fmt: skip
        self.model = self.open_button(
            "model", "Use a noise model", "of nonlocal noise FILE --save model.json", (".json",), received_noise,
            self._open_model,
        )  # fmt: skip

    def _make_views(self) -> None:
        self.pictures, self.whole = Pictures(), Overview(self._move_part)
        self.part, self.signal = markup(), _SignalView(self._look_again)
        ends: dict[str, Any] = {"black": {"color": "var(--ink)"}, "white": {"color": "var(--edge)", "dash": "4 3"}}
        self.histogram = Lines("", "", "", {"noisy": ORIGINAL, "result": RESULT, **ends}, height=120)
        self.contrast = column(heading("Contrast"), self.histogram, self.black, self.white)
        self.energies = Lines(
            "energies of the flow", "time", "over the degrees, in σ²", {"E": {}, "J": {"dash": "6 4"}}, markers=True
        )
        self.distances = Lines("distance to the constant", "time (0: the input)", "", {"distance": {}}, markers=True)
        self.levels = Lines("noise by intensity", "intensity", "", {"σ": {}})
        self.powers = Lines("noise by frequency", "cycles a sample", "power", {"power": {}}, log="y")
        self.noise_text = markup()
        self.download = Download(lambda _: self._download(), label="")

    def settings(self, *, full: bool) -> DenoiseSettings:
        place = tuple((knob.value or 0.0) / 100 for knob in self.places[: len(plane_axes(self._source))])
        given: dict[str, Any] = {name: knob.value for name, knob in self.knobs.items()}
        for name in ("patch_size", "search_radius", "steps"):
            given[name] = None if given[name] is None else int(given[name])
        if not self._has_sigma():
            given["sigma"] = None
        if given["sigma"] is not None or given["strength"] == 1 or not self._has_strength():
            given["strength"] = None
        if not self._of_pixels():
            given |= dict.fromkeys(OF_PIXELS)
        kind: str | NoiseFile = self.noise_kind.value
        if self._model is not None and kind == _OF_FILE:
            kind = self._model
        crop = None if full else preview(self._source, place, self._at())
        return DenoiseSettings(quality=self.quality.value, noise=kind, crop=crop, **given)

    def start(self, *, full: bool = False) -> None:
        if self._refused:
            return
        for name in OF_PIXELS:
            self.knobs[name].visible = self._of_pixels()
        self.knobs["sigma"].visible, self.knobs["strength"].visible = self._has_sigma(), self._has_strength()
        self.knobs["strength"].show(disabled=self.knobs["sigma"].value is not None)
        settings, source, trail, stills = self.settings(full=full), self._source, self._trail, self._stills
        whole, look, known = settings.crop is None and preview(source) is not None, self._look(), self._result

        def work(report: Report) -> DenoiseResult:
            draw = partial(self._draw, report, source, stills, look)
            first = view.coarse(settings, source, look.at, known)
            if first is not None:
                draw(first)
                report(0.0)  # ends here where the slider has moved on
            return view.compute(settings, source, trail=trail, progress=report, seen=draw)

        self.ask(work, self._show, "computing in full …" if whole else "computing …")

    def _look_again(self) -> None:
        """Show the result in another way if it is that of the controls; else compute that."""
        result, source, stills, look = self._result, self._source, self._stills, self._look()
        if result is None or result.settings != self.settings(full=result.settings.crop is None):
            self.start()
        else:
            draw = partial(self._draw, source=source, stills=stills, look=look, result=result)
            self.ask(draw, lambda _: self._show(result), "drawing …")

    def _look(self) -> Look:
        return Look(self._at(), self.black.value, self.white.value, self.signal.window)

    def _at(self) -> int:
        return int(self.slice.shown["value"]) - 1

    def _of_pixels(self) -> bool:
        """Whether the flow of pixels runs, which has settings of its own."""
        return bool(self.quality.value == "pixels") and not self._source.media.stacked

    def _has_sigma(self) -> bool:
        return self.noise_kind.value != _OF_FILE and self._has_strength()

    def _has_strength(self) -> bool:
        return has_sigma(str(self.noise_kind.value))

    def reset(self) -> None:
        self.quality.value = next(iter(_OF_STACKS if self._source.media.stacked else _QUALITIES))
        self.noise_kind.value = next(iter(_NOISES))
        self.signal.window = None
        for knob in (self.slice, *self.knobs.values(), *self.places, self.black, self.white, self.signal.first):
            knob.reset()

    def words(self) -> dict[str, str]:
        window = self.signal.window if self.signal.panel.visible else None
        return super().words() | ({} if window is None else dict(zip(_WINDOW, map(str, window), strict=True)))

    def restore(self, words: Mapping[str, str]) -> list[str]:
        if not self.signal.panel.visible or not words.keys() & set(_WINDOW) or self._awaits(words):
            return super().restore(words)
        faults = super().restore({name: word for name, word in words.items() if name not in _WINDOW})
        try:
            self.signal.window = self._window(words)
        except InputError as error:
            faults.append(str(error))
        return faults

    def _window(self, words: Mapping[str, str]) -> tuple[int, int]:
        samples, ends = self._source.shape[0], []
        for name, low, high in zip(_WINDOW, (0, _LEAST), (samples - _LEAST, samples), strict=True):
            ends.append(int(address.number(name, words.get(name, ""), low, high, step=1, optional=False) or 0))
        return ends[0], min(ends[1], samples - ends[0])

    # ---- files

    @property
    def file(self) -> str:
        return PurePath(self._source.name).name

    def _open(self, source: Source) -> None:
        self._take(source)
        self._adapt()
        if not self.recall():
            self._set(self.reset)
        self.start()

    def _take(self, source: Source) -> None:
        self.drop("view")  # of the former file
        self._source, self._trail, self._stills, self._result = source, Trail(), Stills(), None
        self._refused, self.refusal.object = False, ""
        self._opened += 1

    def _refuse(self, message: str) -> str:
        self.drop("view")
        self._refused, self._result, self.refusal.object = True, None, ""
        for part in (*self.shown, self.kept, self.reference):
            part.visible = False
        return f"{message}. Nothing is shown: open another file."

    def _open_reference(self, source: Source) -> None:
        self._take(source)
        self.start()

    def _refuse_reference(self, message: str) -> str | None:
        self._take(replace(self._source, clean=None, clean_name=""))
        self.refusal.object = refused(f"{message}. The result has no reference.")
        self.start()
        return None

    def _open_model(self, model: NoiseFile) -> None:
        self._model = model
        offer(self.noise_kind, {**_NOISES, _OF_FILE: f"of {model.name}"})
        again = self.noise_kind.value == _OF_FILE
        self.noise_kind.value = _OF_FILE  # which starts
        if again:
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

    def _move_part(self, data: Any) -> None:
        """Show the part about a place of the whole picture, in shares of its height and width."""
        crop = preview(self._source)
        if crop is None:
            return
        middle = stored_place((float(data["y"]), float(data["x"])), self._source.media.orientation)
        for knob, axis, share in zip(self.places, plane_axes(self._source), middle, strict=True):
            n, size = self._source.shape[axis], crop[axis][1] - crop[axis][0]
            if size < n:
                knob.show(value=100 * min(max((share * n - size / 2) / (n - size), 0.0), 1.0))
        self.start()

    def _adapt(self) -> None:
        media, shape = self._source.media, self._source.shape
        span = full_range(media.data)
        image, eight = media.kind == "image" or media.stacked, media.data.dtype == np.uint8
        unit = "grey levels" if image and media.data.dtype.kind == "u" else "units of the file"
        step = 0.5 if eight else _tidy((span.high - span.low) / 500)
        for name in ("sigma", "width"):
            self.knobs[name].rescale(step, 80.0 if eight else step * 250, step, step * 20, unit)
        for knob, start in ((self.black, span.low), (self.white, span.high)):
            knob.rescale(span.low, max(span.high, span.low + step), 1 if eight else step, start, unit)
        nodes = "pixels" if image else "samples"
        self.knobs["patch_size"].rescale(1, 15 if image else 41, 2, 3 if image else 15, nodes)
        self.knobs["search_radius"].rescale(1, 15 if image else 150, 1, 8 if image else 60, f"{nodes} to each side")
        cut = preview(self._source)
        for part in (*self.shown, self.kept, self.reference):
            part.visible = True
        for knob in self.places:
            knob.visible = False
        ends = ("top", "left") if image else ("start",)
        for knob, axis, end in zip(self.places, plane_axes(self._source), ends, strict=False):  # a signal has one
            knob.visible = cut is not None and cut[axis][1] - cut[axis][0] < shape[axis]
            knob.show(label=f"part: from the {end}")
        self.slice.visible = media.stacked
        offer(self.quality, _OF_STACKS if media.stacked else _QUALITIES)
        if media.stacked:
            count = shape[axes.through(media)]
            self.slice.show(label=sources.picture_word(media))
            self.slice.rescale(1, count, 1, count // 2 + 1, f"of {count}")
        self.full_button.visible = cut is not None
        self.pictures.visible = self.contrast.visible = image
        self.signal.panel.visible = self.signal.rest.visible = not image
        self.whole.show(src="")
        self.signal.window = None
        suffix = "npy" if media.stacked else written_extension(Path(self._source.name)).lstrip(".")
        self.download.show(label=f"Download result ({suffix.upper()})")

    def _draw(self, report: Report, source: Source, stills: Stills, look: Look, result: DenoiseResult) -> None:
        """Draw a result in the computing thread; the page shows it before its numbers and curves."""
        shown = Drawn(result, source, stills, look)
        report.glimpse(partial(self._show_drawn, shown))

    def _show_drawn(self, shown: Drawn) -> None:
        unit = self.knobs["sigma"].shown["unit"]
        if not shown.result.coarse:
            self.part.object = told_part(shown.result, shown.source, shown.look)
        if not shown.items:
            self.signal.draw(shown, unit)
            return
        self.pictures.draw(shown.items, shown.still, self._opened, coarse=shown.result.coarse)
        self.histogram.draw(shown.levels, xlabel=unit)
        self.black.show_automatic(shown.fitted.low)
        self.white.show_automatic(shown.fitted.high)
        self.whole.show(src=shown.whole, place=shown.place)

    def _show(self, result: DenoiseResult) -> str:
        self._result, source = result, self._source
        info, course, settings = result.info, result.course, result.settings
        taken: dict[str, Any] = {"sigma": info.sigma, "steps": info.steps, **info.parameters}
        taken["fidelity"] = taken.get("fidelity_mean")
        for name, knob in self.knobs.items():
            # Blocks of a stack have a side for each axis, which one slider cannot show; the numbers have them.
            knob.show_automatic(taken[name] if isinstance(taken.get(name), int | float) else None)
        unit = self.knobs["sigma"].shown["unit"]
        self._show_noise(result, unit)
        time = course.get("t", np.empty(0))
        curves = {name: (time, values) for name, values in course.items() if name != "t"}
        self.energies.draw({name: curves[name] for name in ("E", "J") if name in curves})
        self.energies.visible = "E" in curves
        self.distances.draw(
            {name: curves[name] for name in ("distance",) if name in curves},
            ylabel="stabilized counts" if of_counts(info) else unit,
        )
        self.figures.object = table(rows(result, unit)) + note(*source.notes, *result.notes, *remarks(source, result))
        self.code.show(
            python=view.as_python(settings, source),
            command=view.as_command(settings, source),
            note=view.command_note(settings, source),
        )
        name = visible(PurePath(source.name).name)
        return f"{name}: {info.steps} step{'s' if info.steps != 1 else ''} in {info.seconds:.2f} s"

    def _show_noise(self, result: DenoiseResult, unit: str) -> None:
        curves, info = result.noise, result.info
        self.noise.visible = curves is not None
        told = "; ".join(dict.fromkeys(verdict(one) for one in info.columns or (info,)))
        self.noise_text.object = note(f"{'found' if info.sigma_estimated else 'given'}: {told}")
        if curves is not None:
            self.levels.draw({"σ": (curves.intensities, curves.sigmas)} if curves.sigmas.size else {}, ylabel=unit)
            self.powers.draw({"power": (curves.frequencies, curves.powers)} if curves.powers.size else {})


def _tidy(value: float) -> float:
    """Return a number near `value` with one digit, for steps of a slider."""
    return float(f"{value:.0e}") if value > 0 else 0.01
