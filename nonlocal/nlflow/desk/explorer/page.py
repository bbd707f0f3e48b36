"""The page: three tabs. Each starts to compute when it is first shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import panel as pn

from nlflow.desk.explorer.denoise_tab import DenoiseTab
from nlflow.desk.explorer.desk import Desk, Tab
from nlflow.desk.explorer.flow_tab import FlowTab
from nlflow.desk.explorer.layers_tab import LayersTab
from nlflow.desk.explorer.layers_view import LayersFile
from nlflow.desk.explorer.layout import markup
from nlflow.desk.explorer.sources import Source
from nlflow.desk.explorer.uploads import Limits
from nlflow.desk.explorer.widgets import TabBar
from nlflow.desk.explorer.worker import Worker

#: An addition to the page's head: without it telephones show the page for wide screens.
_HEAD = """{% block postamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
{% endblock %}"""
_TABS = ("Denoise", "Flow", "Layers")


@dataclass(frozen=True)
class Contents:
    """The content of a page when it opens.

    Attributes
    ----------
    source : Source
        To denoise.
    layers : LayersFile or None
    limits : Limits
        Of uploads.
    """

    source: Source
    layers: LayersFile | None = None
    limits: Limits = field(default_factory=Limits)


def build(contents: Contents, worker: Worker) -> Any:
    """Return a page for one session.

    Parameters
    ----------
    contents : Contents
    worker : Worker
        The thread that computes for all sessions.
    """
    if pn.state.curdoc is not None:
        pn.state.curdoc.template = _HEAD
        # The page says by itself that the server has gone. A new server knows nothing of an old page.
        pn.state.curdoc.config.update(reconnect_session=False, notify_connection_status=False)
    desk = Desk(worker, contents.limits, pn.state.curdoc)
    pn.state.on_session_destroyed(lambda context: desk.close())
    tabs: list[Tab] = [DenoiseTab(desk, contents.source), FlowTab(desk), LayersTab(desk, contents.layers)]
    first = 2 if contents.layers is not None and contents.source.built_in else 0
    # All tabs are part of the page from the start: a part that is added later can miss changes.
    places = [pn.Column(tab.panel, sizing_mode="stretch_width") for tab in tabs]
    seen, loaded = first, False

    def look(number: Any) -> None:
        nonlocal seen
        if number in range(len(tabs)):
            seen = number
        for other, place in enumerate(places):
            place.visible = other == seen
        if loaded and not tabs[seen].started:
            tabs[seen].started = True
            tabs[seen].start()

    def load() -> None:
        nonlocal loaded
        loaded = True
        look(seen)

    look(first)
    # Some changes are lost while the page loads, so the first tab starts a moment later.
    pn.state.onload(lambda: desk.later(load))
    title, bar = markup("<h1>nonlocal explore</h1>"), TabBar(look, names=list(_TABS), first=first)
    title.sizing_mode, bar.styles = None, {"flex": "1 1 280px"}
    return pn.Column(
        pn.FlexBox(title, bar, gap="0 24px", sizing_mode="stretch_width"),
        *places,
        sizing_mode="stretch_width",
        styles={"max-width": "2400px", "margin": "0 auto", "padding": "8px 12px"},
    )
