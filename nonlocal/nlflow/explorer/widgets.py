"""The parts of the page: native controls of the browser, which keyboards and screen readers know, behind small objects.

Each part is a script in ``components``. What a user does comes as a message, what is shown goes out as one value.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import param
from panel.custom import JSComponent
from panel.io import state

__all__ = ["Action", "Chooser", "Code", "Knob", "Markup", "Part", "Pictures", "Status", "TabBar", "Upload", "script"]

_FOLDER = Path(__file__).parent / "components"
_STYLE = (_FOLDER / "style.css").read_text(encoding="utf-8")


def script(*names: str) -> str:
    """Return the script of a part: one or more files as one, for a page loads no file beside it."""
    return "\n".join((_FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in names)


class Part(JSComponent):
    """What all parts share: the style, and what a message of the browser is given to."""

    _stylesheets: ClassVar[list[str]] = [_STYLE]
    __abstract = True

    def __init__(self, heard: Callable[[Any], Any] | None = None, **params: Any) -> None:
        self._heard = heard
        super().__init__(**{"sizing_mode": "stretch_width", **params})

    def _handle_msg(self, data: Any) -> None:
        if self._heard is None:
            return
        document = state.curdoc
        if document is None or document.session_context is None:
            self._heard(data)
        else:  # messages come without the lock of the document, which changes of charts need
            document.add_next_tick_callback(partial(self._heard, data))


class Knob(Part):
    """A number: a slider with its value and unit and, where the program can choose it, a box that says that it does.

    Parameters
    ----------
    name_of, label, unit : str
    low, high, step : float
    start : float
        Shown first.
    choosable : bool
        Whether there is such a box, which is marked at first.
    moved : callable
        Called without arguments after a move.
    """

    _esm = script("knob")
    spec = param.Dict(default={})
    shown = param.Dict(default={})

    def __init__(
        self,
        name_of: str,
        label: str,
        low: float,
        high: float,
        step: float,
        start: float,
        *,
        unit: str = "",
        choosable: bool = True,
        moved: Callable[[], Any],
    ) -> None:
        self._moved = moved
        self._value, self._chosen, self._serial = start, choosable, 0
        self._initial = start
        spec = {"name": name_of, "label": label, "unit": unit, "choosable": choosable}
        super().__init__(
            heard=self._take,
            spec={**spec, **_range(low, high, step)},
            shown={"value": start, "chosen": choosable, "disabled": False, "serial": 0},
        )

    @property
    def value(self) -> float | None:
        """The number that is set; None where it is chosen."""
        return None if self._chosen else self._value

    def _take(self, data: Any) -> None:
        value, serial = float(data["value"]), int(data["serial"])
        self._value = min(max(value, self.spec["low"]), self.spec["high"])
        self._chosen, self._serial = bool(data["chosen"]) and self.spec["choosable"], serial
        self._moved()

    def show_chosen(self, value: float) -> None:
        """Show what was chosen, unless the user has set a number."""
        if self._chosen:
            self._value = float(value)
            self._show()

    def disable(self, disabled: bool) -> None:
        """Let it be out of use, or in use again."""
        if self.shown["disabled"] != disabled:
            self._show(disabled=disabled)

    def rescale(self, low: float, high: float, step: float, start: float, unit: str) -> None:
        """Give it another range, and its first value there."""
        self._initial = start
        self.spec = {**self.spec, "unit": unit, **_range(low, high, step)}
        self.reset()

    def reset(self) -> None:
        """Undo what the user has set."""
        self._value, self._chosen = self._initial, self.spec["choosable"]
        self._show()

    def _show(self, **more: Any) -> None:
        self.shown = {**self.shown, "value": self._value, "chosen": self._chosen, "serial": self._serial, **more}


def _range(low: float, high: float, step: float) -> dict[str, Any]:
    decimals = f"{step:.6f}".rstrip("0").partition(".")[2]
    return {"low": low, "high": high, "step": step, "digits": len(decimals)}


class Chooser(Part):
    """One of a few words.

    Parameters
    ----------
    name_of, label : str
    options : mapping of str to str
        From a word to what it is called on the page; the first is chosen at first.
    moved : callable
        Called without arguments after a choice.
    """

    _esm = script("chooser")
    name_of = param.String()
    label = param.String()
    options = param.Dict(default={})
    shown = param.Dict(default={})

    def __init__(self, name_of: str, label: str, options: Mapping[str, str], *, moved: Callable[[], Any]) -> None:
        self._moved = moved
        self.value = next(iter(options), "")
        shown = {"value": self.value, "serial": 0}
        super().__init__(heard=self._take, name_of=name_of, label=label, options=dict(options), shown=shown)

    def _take(self, data: Any) -> None:
        if data in self.options:
            self.value = str(data)
            self._moved()

    def offer(self, options: Mapping[str, str]) -> None:
        """Give other words to choose from; what is chosen stays where it can."""
        if list(options.items()) != list(self.options.items()):
            self.options = dict(options)
            self.choose(self.value if self.value in options else next(iter(options), ""))

    def choose(self, value: str) -> None:
        """Choose a word."""
        self.value = value
        # The number tells this from what was told before: the browser may show another by now.
        self.shown = {"value": value, "serial": self.shown["serial"] + 1}

    def reset(self) -> None:
        """Undo what the user has chosen."""
        self.choose(next(iter(self.options), ""))


class TabBar(Part):
    """The bar of tabs; `heard` gets the number of the one that is chosen."""

    _esm = script("tabs")
    names = param.List(default=[])
    shown = param.Integer(default=0)


class Pictures(Part):
    """Pictures beside each other, the first two in one frame with a divider where they are compared."""

    _esm = script("pictures")
    still = param.Dict(default={})
    shown = param.Dict(default={"items": [], "compare": False, "serial": 0})

    def show(
        self, items: Sequence[Mapping[str, str]], *, compare: bool = False, still: Mapping[str, str] | None = None
    ) -> None:
        """Show pictures.

        Parameters
        ----------
        items : sequence of mapping
            ``src`` the address, ``name`` one word, ``alt`` what there is to see, ``caption`` the text beneath; of two
            that are compared the caption of the first is shown.
        compare : bool
        still : mapping of str to str, optional
            Addresses by names, for pictures whose own is empty; sent only where they have changed.
        """
        if still is not None and still != self.still:
            self.still = dict(still)
        self.shown = {"items": [dict(item) for item in items], "compare": compare, "serial": self.shown["serial"] + 1}


class Upload(Part):
    """A file from the user's disk.

    Parameters
    ----------
    name_of, label, hint : str
    accept : str
        Suffixes, with commas.
    limit : int
        Bytes.
    received : callable
        Gets name and content.
    refused : callable
        Gets a text that says why nothing was sent.
    """

    _esm = script("upload")
    name_of = param.String()
    label = param.String()
    hint = param.String()
    accept = param.String()
    limit = param.Integer()

    def __init__(
        self, *, received: Callable[[str, bytes], Any], refused: Callable[[str], Any], **params: Any
    ) -> None:  # fmt: skip
        self._received, self._refused = received, refused
        super().__init__(heard=self._take, **params)

    def _take(self, data: Any) -> None:
        from nlflow.errors import format_bytes
        from nlflow.explorer.uploads import shown_name

        name = shown_name(str(data.get("name", "")))
        if "content" not in data:
            size = data.get("size")
            got = "a file that the browser cannot read" if size is None else format_bytes(float(size))
            most = format_bytes(self.limit)
            self._refused(f"{name}: got {got}, expected at most {most}; start with a larger --max-upload")
            return
        try:
            content = base64.b64decode(data["content"], validate=True)
        except (binascii.Error, TypeError, ValueError):
            self._refused(f"{name}: got content that is no base64, expected a file; send it again")
            return
        self._received(name, content)


class Status(Part):
    """What is going on, how far it is, and a button to end it; `heard` is called when that is pressed."""

    _esm = script("status")
    shown = param.Dict(default={"words": "", "kind": "idle", "share": 0.0, "serial": 0})

    def show(self, words: str, kind: str = "idle", share: float = 0.0) -> None:
        """Show a text.

        Parameters
        ----------
        words : str
        kind : {'idle', 'busy', 'done', 'error'}
        share : float
            Of the work that is done.
        """
        self.shown = {"words": words, "kind": kind, "share": share, "serial": self.shown["serial"] + 1}


class Markup(Part):
    """A piece of HTML in the style of the page; names and words from outside are escaped by who makes it."""

    _esm = script("markup")
    shown = param.String()


class Action(Part):
    """A button; `heard` is called when it is pressed."""

    _esm = script("action")
    label = param.String()
    primary = param.Boolean(default=False)
    file = param.Dict(default={})

    def save(self, name: str, content: bytes) -> None:
        """Let the browser save a file."""
        self.file = {
            "name": name,
            "content": base64.b64encode(content).decode(),
            "serial": self.file.get("serial", 0) + 1,
        }


class Code(Part):
    """The texts that compute what is seen, with buttons that copy them."""

    _esm = script("code")
    shown = param.Dict(default={"python": "", "command": "", "note": ""})

    def show(self, python: str, command: str, note: str = "") -> None:
        """Show a Python text and a command, with what is to be known of the command."""
        self.shown = {"python": python, "command": command, "note": note}
