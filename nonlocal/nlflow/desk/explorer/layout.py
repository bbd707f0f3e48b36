"""Parts of the page that are Panel's, and how they are laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import panel as pn

#: The script and style files of the page.
FOLDER = Path(__file__).parent / "components"
STYLE = (FOLDER / "style.css").read_text(encoding="utf-8")


def _styled(part: Any, margin: int = 0, *, wide: bool = True) -> Any:
    """Give a part of Panel's the style and the width of the page's own."""
    part.param.update(stylesheets=[STYLE], sizing_mode="stretch_width" if wide else None, margin=(margin, 0))
    return part


def markup(html: str = "") -> Any:
    """Return a piece of HTML, its ``object``. The caller escapes texts from outside."""
    return _styled(pn.pane.HTML(html))


def heading(text: str) -> Any:
    """Return a heading."""
    return markup(f"<h2>{escape(text)}</h2>")


def button(label: str, pressed: Callable[[], Any], *, primary: bool = False) -> Any:
    """Return a button; `pressed` is called without arguments."""
    color = "primary" if primary else "default"
    return _styled(pn.widgets.Button(label=label, color=color, on_click=lambda _: pressed()), 4, wide=False)


def choice(name: str, label: str, options: Mapping[str, str], moved: Callable[[], Any]) -> Any:
    """Return a choice of one of a few words, its ``value``; at first it is the first word.

    Parameters
    ----------
    name, label : str
        The name in the page's HTML, as a class, and the label that users see.
    options : mapping of str to str
        From a word to its text on the page.
    moved : callable
        Called without arguments when the user or the program has changed the value.
    """
    one = _styled(pn.widgets.Select(label=label, css_classes=[f"choice-{name}"]), 3)
    offer(one, options)
    one.param.watch(lambda _: moved(), "value")
    return one


def offer(one: Any, options: Mapping[str, str]) -> None:
    """Give a choice other words; the value stays if it is among them."""
    value = one.value if one.value in options else next(iter(options), None)
    one.param.update(options={text: word for word, text in options.items()}, value=value)


def columns(*parts: Any, least: int = 300) -> Any:
    """Return parts beside each other, or below each other if one would have less than `least` pixels."""
    for part in parts:
        part.styles = {"flex": f"1 1 {least}px", "min-width": f"min({least}px, 100%)"}
    return pn.FlexBox(*parts, gap="0 16px", align_items="flex-start", sizing_mode="stretch_width")


#: The settings stand at the left of the views; on a narrow page the views come first, and stay while it is scrolled.
_PLACES = """
@media (max-width: 799px) {
  .views { position: sticky; top: 0; z-index: 2; background: #fff; }
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
    """Return controls with a head, views and more at their right; on a narrow page all of it, in this order."""
    places = {"head": head, "views": views, "controls": controls, "more": more}
    parts = [column(*parts, css_classes=[name]) for name, parts in places.items()]
    return pn.Column(*parts, sizing_mode="stretch_width", stylesheets=[_PLACES])


def row(*parts: Any) -> Any:
    """Return parts beside each other, each as wide as it needs."""
    return pn.FlexBox(*parts, gap="0 8px", sizing_mode="stretch_width")


def column(*parts: Any, **words: Any) -> Any:
    """Return parts below each other; see `stale`."""
    return pn.Column(*parts, sizing_mode="stretch_width", stylesheets=[_STALE], **words)


def stale(part: Any, turn: int | None) -> None:
    """Grey a `column` that shows what no longer is so, after a while that begins with each turn; None undoes that."""
    kept = [name for name in part.css_classes if not name.startswith("stale-")]
    part.css_classes = kept if turn is None else [*kept, f"stale-{turn % 2}"]
