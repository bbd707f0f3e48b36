"""Widgets."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import panel as pn
import param
from numpy.typing import NDArray
from panel.custom import JSComponent
from panel.io import state

from nlflow.desk.explorer import address
from nlflow.errors import check_choice
from nlflow.plotting.base import PALETTE
from nlflow.store.encoding import plain

#: The script and style files of the page.
FOLDER = Path(__file__).parent / "components"
THEME = (FOLDER / "theme.css").read_text(encoding="utf-8")
STYLE = (FOLDER / "style.css").read_text(encoding="utf-8")


def _styled(part: Any, margin: int = 0, *, wide: bool = True) -> Any:
    part.param.update(stylesheets=[STYLE], sizing_mode="stretch_width" if wide else None, margin=(margin, 0))
    return part


def markup(html: str = "") -> Any:
    """Return HTML; the caller escapes texts from outside."""
    return _styled(pn.pane.HTML(html))


def heading(text: str) -> Any:
    return markup(f"<h2>{escape(text)}</h2>")


def button(label: str, pressed: Callable[[], Any], *, primary: bool = False) -> Any:
    color = "primary" if primary else "default"
    return _styled(pn.widgets.Button(label=label, color=color, on_click=lambda _: pressed()), 4, wide=False)


def choice(name: str, label: str, options: Mapping[str, str], moved: Callable[[], Any]) -> Any:
    one = _styled(pn.widgets.Select(label=label, css_classes=[f"choice-{name}"]), 3)
    offer(one, options)
    one.param.watch(lambda _: moved(), "value")
    return one


def offer(one: Any, options: Mapping[str, str]) -> None:
    value = one.value if one.value in options else next(iter(options), None)
    one.param.update(options={text: word for word, text in options.items()}, value=value)


def word_of(control: Any) -> str:
    return address.word_of(control.value) if isinstance(control, Knob | Player) else str(control.value)


def obey(name: str, control: Any, word: str) -> None:
    if isinstance(control, Knob | Player):
        control.obey(word)
    else:
        control.value = check_choice(name, word, tuple(control.options.values()))


def columns(*parts: Any, least: int = 300) -> Any:
    for part in parts:
        part.styles = {"flex": f"1 1 {least}px", "min-width": f"min({least}px, 100%)"}
    return pn.FlexBox(*parts, gap="0 16px", align_items="flex-start", sizing_mode="stretch_width")


#: The settings stand at the left of the views; on a narrow page the views come first, and stay while it is scrolled.
_PLACES = """
@media (max-width: 799px) {
  .views { position: sticky; top: 0; z-index: 2; background: var(--paper); }
}
@media (min-width: 800px) {
  :host {
    display: grid; gap: 0 20px; align-items: start;
    grid-template: "controls head" auto "controls views" auto "controls more" 1fr
      / clamp(260px, 24%, 400px) minmax(0, 1fr);
  }
  .head { grid-area: head; } .controls { grid-area: controls; } .views { grid-area: views; } .more { grid-area: more; }
}
"""
#: What is shown while something else is computed turns grey, but only where an answer is slow: else it would blink. The
#: wait is the same for both names, and begins again where one takes the place of the other.
_STALE = """
:host(.stale-0) { animation: late-0 0.3s linear 0.5s forwards; }
:host(.stale-1) { animation: late-1 0.3s linear 0.5s forwards; }
@keyframes late-0 { to { opacity: 0.5; } }
@keyframes late-1 { to { opacity: 0.5; } }
"""


def beside(head: Sequence[Any], views: Sequence[Any], controls: Sequence[Any], more: Sequence[Any]) -> Any:
    places = {"head": head, "views": views, "controls": controls, "more": more}
    parts = [column(*parts, css_classes=[name]) for name, parts in places.items()]
    return pn.Column(*parts, sizing_mode="stretch_width", stylesheets=[_PLACES])


def row(*parts: Any) -> Any:
    return pn.FlexBox(*parts, gap="0 8px", sizing_mode="stretch_width")


def column(*parts: Any, **words: Any) -> Any:
    return pn.Column(*parts, sizing_mode="stretch_width", stylesheets=[_STALE], **words)


def stale(part: Any, turn: int | None) -> None:
    kept = [name for name in part.css_classes if not name.startswith("stale-")]
    part.css_classes = kept if turn is None else [*kept, f"stale-{turn % 2}"]


def line_color(number: int) -> str:
    return f"var(--line-{number % len(PALETTE)})"


# ---- own parts


_SHADES = 64
COMPUTING = "computing"  # stands where a number or a chart is not computed yet
_NOTHING = "nothing to show"


class Part(JSComponent):
    """A script of ``components`` that draws `shown`; `heard` gets messages of the browser."""

    _stylesheets: ClassVar[list[str]] = [STYLE]
    __abstract = True
    shown = param.Dict(default={})

    def __init__(self, heard: Callable[[Any], Any] = lambda _: None, **shown: Any) -> None:
        self._heard = heard
        super().__init__(shown=shown, sizing_mode="stretch_width")

    def show(self, **shown: Any) -> None:
        self.shown = {**self.shown, **shown}

    def _handle_msg(self, data: Any) -> None:
        document = state.curdoc
        if document is None or document.session_context is None:
            self._heard(data)
        else:  # messages come without the lock of the document, which changes need
            document.add_next_tick_callback(partial(self._heard, data))


def _script(*names: str) -> str:
    """Return the script of a part: files joined into one, since the page loads no further files."""
    return "\n".join((FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in names)


class Knob(Part):
    """A slider with a field; `optional` adds a box for an automatic value, `whole` allows steps only."""

    _esm = _script("knob")

    def __init__(
        self,
        name: str,
        label: str,
        low: float,
        high: float,
        step: float,
        start: float,
        *,
        unit: str = "",
        optional: bool = True,
        whole: bool = False,
        moved: Callable[[], Any],
    ) -> None:
        self._start, self._moved = start, moved
        limits = {"low": low, "high": high, "step": step, "value": start}
        flags: dict[str, Any] = {"optional": optional, "automatic": optional, "whole": whole, "disabled": False}
        flags["word"] = COMPUTING if optional else ""
        super().__init__(self._take, name=name, label=label, unit=unit, move=0, **limits, **flags)

    @property
    def value(self) -> float | None:
        return None if self.shown["automatic"] else self.shown["value"]

    def _take(self, data: Any) -> None:
        low, step = self.shown["low"], self.shown["step"]
        value = min(max(float(data["value"]), low), self.shown["high"])
        if self.shown["whole"]:
            value = low + step * round((value - low) / step)
        automatic = bool(data["automatic"]) and self.shown["optional"]
        self._set(value, automatic, move=int(data["move"]))
        self._moved()

    def _set(self, value: float, automatic: bool, **shown: Any) -> None:
        self.show(value=value, automatic=automatic, word=COMPUTING if automatic else "", **shown)

    def obey(self, word: str) -> None:
        low, high, step, optional = (self.shown[name] for name in ("low", "high", "step", "optional"))
        whole = step if self.shown["whole"] else None
        value = address.number(self.shown["name"], word, low, high, step=whole, optional=optional)
        self._set(self._start if value is None else value, value is None)

    def show_automatic(self, value: float | None) -> None:
        if self.shown["automatic"]:
            number, word = (self._start, address.AUTOMATIC) if value is None else (value, "")
            self.show(value=float(number), word=word)

    def rescale(self, low: float, high: float, step: float, start: float, unit: str) -> None:
        self._start = start
        self.show(low=low, high=high, step=step, unit=unit)
        self.reset()

    def reset(self) -> None:
        self._set(self._start, self.shown["optional"])


class TabBar(Part):
    """The tabs."""

    _esm = _script("copy", "tabs")


class Pictures(Part):
    """Pictures."""

    _esm = _script("pictures")
    still = param.Dict(default={})

    def __init__(self) -> None:
        super().__init__(items=[], compare=False, serial=0, source=0, coarse=False)

    def draw(
        self,
        items: Sequence[Mapping[str, Any]],
        still: Mapping[str, str] | None = None,
        source: int = 0,
        *,
        coarse: bool = False,
    ) -> None:
        """Show pictures.

        Parameters
        ----------
        items : sequence of mapping
            ``src`` the address, ``name`` a short name, by which `still` finds it, ``alt`` what there is to see,
            ``caption`` the text beneath; instead of ``src``, ``size`` (rows, columns) and ``field`` of a picture that a
            `Player` runs.
        still : mapping of str to str, optional
            Addresses by names, for pictures whose own is empty; then the first two are compared.
        source : int
            The number of the file.
        coarse : bool
            Say that better ones follow.
        """
        if still is not None and still != self.still:
            self.still = dict(still)
        serial = self.shown["serial"] + 1  # by which those who wait know the new pictures
        plain = [dict(item) for item in items]
        self.show(items=plain, compare=still is not None, serial=serial, source=source, coarse=coarse)


class Player(Part):
    """Moments of a flow, which items of `Pictures` and lines of `Lines` with a ``field`` show."""

    _esm = _script("player")
    frames = param.Bytes(default=b"")

    def __init__(self, name: str, moments: int) -> None:
        self._last = moments - 1
        shown = {"times": [], "moment": self._last, "size": 0, "fields": 0, "pixels": False, "serial": 0}
        super().__init__(self._take, name=name, **shown)

    @property
    def value(self) -> float:
        return float(self.shown["moment"])

    def _take(self, data: Any) -> None:
        self.show(moment=min(max(int(data["moment"]), 0), self._last))

    def obey(self, word: str) -> None:
        value = address.number(self.shown["name"], word, 0, self._last, step=1, optional=False)
        self.show(moment=int(value or 0), serial=self.shown["serial"] + 1)

    def reset(self) -> None:
        self.show(moment=self._last, serial=self.shown["serial"] + 1)

    def draw(self, times: NDArray[np.float64], frames: NDArray[np.uint8] | NDArray[np.float32]) -> None:
        """Show moments with their values, of shape (fields, moments, nodes): grey levels, or heights of lines."""
        self.frames = frames.tobytes()
        pixels = frames.dtype == np.uint8
        self.show(times=times.tolist(), fields=len(frames), size=frames.shape[-1], pixels=pixels)


class Sounds(Part):
    """Sounds."""

    _esm = _script("sounds")
    files = param.Bytes(default=b"")

    def __init__(self) -> None:
        super().__init__(names=[], places=[])

    def draw(self, files: Mapping[str, bytes]) -> None:
        ends = np.cumsum([0, *map(len, files.values())]).tolist()
        self.files = b"".join(files.values())  # first: the names say that it is there
        self.show(names=list(files), places=list(pairwise(ends)))


class Overview(Part):
    """The whole picture in small; `heard` gets the place of a click, as shares."""

    _esm = _script("overview")

    def __init__(self, heard: Callable[[Any], Any]) -> None:
        super().__init__(heard, src="", place=None)


class Upload(Part):
    """An upload."""

    _esm = _script("upload")


class Status(Part):
    """Progress and *Cancel*."""

    _esm = _script("status")

    def __init__(self, heard: Callable[[Any], Any]) -> None:
        super().__init__(heard, words="", kind="idle", share=0.0, serial=0)

    def say(self, words: str, kind: str = "idle", share: float = 0.0) -> None:
        self.show(words=words, kind=kind, share=share, serial=self.shown["serial"] + 1)


class Download(Part):
    """A download."""

    _esm = _script("download")

    def save(self, name: str, content: bytes) -> None:
        self._send_msg({"name": name, "content": base64.b64encode(content).decode()})


class Code(Part):
    """Texts to copy."""

    _esm = _script("copy", "code")

    def __init__(self) -> None:
        super().__init__(python="", command="", note="")


class Lines(Part):
    """Lines with these `names`; `heard` gets ``{"shift": share}`` or ``{"factor": number}``."""

    _esm = _script("svg", "chart")

    def __init__(
        self,
        title: str,
        xlabel: str,
        ylabel: str,
        names: Mapping[str, Mapping[str, Any]],
        *,
        log: str = "",
        height: int = 230,
        markers: bool = False,
        heard: Callable[[Any], Any] | None = None,
    ) -> None:
        self._styles = {
            name: {"color": line_color(number), "width": 2, "dash": "none", "markers": markers, **style}
            for number, (name, style) in enumerate(names.items())
        }
        words: dict[str, Any] = {"title": title, "xlabel": xlabel, "ylabel": ylabel, "log": log}
        words |= {"height": height, "lines": [], "moves": heard is not None, "empty": COMPUTING}
        super().__init__(heard or (lambda _: None), **words)

    def draw(self, lines: Mapping[str, tuple[NDArray[Any], NDArray[Any]]], **words: str) -> None:
        drawn = []
        for name, places in lines.items():
            x, y = (plain(np.asarray(values, np.float64)) for values in places)
            drawn.append({"name": name, "x": x, "y": y, **self._styles[name]})
        self.show(lines=drawn, empty="" if drawn else _NOTHING, **words)


class Heatmap(Part):
    """Numbers in colours."""

    _esm = _script("svg", "heatmap")

    def __init__(self, xlabel: str, ylabel: str, height: int = 300) -> None:
        words: dict[str, Any] = {"title": "", "xlabel": xlabel, "ylabel": ylabel, "height": height}
        super().__init__(**words, palette=_cividis(), values=[], empty=COMPUTING)

    def draw(self, values: NDArray[np.float64], names: Sequence[str], title: str) -> None:
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        scale = {"low": low, "high": high if high > low else low + 1.0}
        drawn = plain(np.asarray(values, np.float64))
        self.show(title=title, values=drawn, names=list(names), empty="" if drawn else _NOTHING, **scale)


@cache
def _cividis() -> list[str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["cividis"](k / (_SHADES - 1))) for k in range(_SHADES)]
