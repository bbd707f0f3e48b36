"""Films."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nlflow._array import Array, to_numpy
from nlflow.errors import FileFormatError, InputError, check_integer, check_number, not_installed
from nlflow.flows.flow import Flow
from nlflow.flows.frames import Resumable, check_whole, taken
from nlflow.flows.trackers import About, Tracker
from nlflow.plotting.base import render_pixels
from nlflow.plotting.scene import Scene, check_limits, kind_of
from nlflow.plotting.video import check_video, comment_of, write_video
from nlflow.store.atomic import remove, write_content, write_folder
from nlflow.store.series.base import described


class Film(Resumable):
    """Make a film of the signal during a run.

    Pictures are written to the folder ``<path>.frames``, and joined to the film when the run ends. If it ends before
    its end time, the folder stays for a run that is resumed from a checkpoint.

    Parameters
    ----------
    path : path
        Ends with ``.mp4`` (extra ``film``) or ``.gif``. An older film of the same problem is replaced.
    every, interval, at
        Times of pictures; see `nlflow.flows.trackers.Tracker`.
    limits : (float, float), optional
        Values at both ends of the colours, or of the vertical axis of lines; by default from the first picture.
    rate : float
        Pictures a second, on average; at most 50 for a ``.gif``.
    size : (int, int), optional
        Width and height in pixels, 64 or more; odd numbers are raised by one. Small pictures have no words and axes.
    cmap : str
        Colour map of matplotlib for pictures and points.

    Raises
    ------
    InputError
        For a path that is taken, or in a folder that is missing or read-only, for a missing package, and for what has
        no picture.
    FileFormatError
        If a picture or the film cannot be written, or the pictures of a run that is resumed are missing.

    Notes
    -----
    Signals may live on a Grid of one to three dimensions (of three, middle slices are drawn) or Points of one or two,
    and have up to four channels, one in three dimensions. A ``.gif`` takes the memory of all pictures.
    """

    name = "film"

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int = 1,
        *,
        interval: float | None = None,
        at: ArrayLike | None = None,
        limits: tuple[float, float] | None = None,
        rate: float = 10.0,
        size: tuple[int, int] | None = None,
        cmap: str = "viridis",
    ) -> None:
        super().__init__(path, every, interval=interval, at=at)
        self.rate = check_number("rate", rate, minimum=0, strict=True)
        check_video(self.path, self.rate)
        self.limits = check_limits(limits)
        self.size = _check_size(size)
        self.cmap = _check_cmap(cmap)
        self.folder = self.path.with_name(f"{self.path.name}.frames")
        self._last: float | None = None
        self._end = 0.0
        self._about: dict[str, Any] = {}
        self._scene: Scene | None = None
        self._ready = False

    def start(self, flow: Flow, u: Array, t: float, end: float) -> None:
        """Check the film."""
        super().start(flow, u, t, end)
        kind_of(flow.affinity.domain, to_numpy(u))
        self._end, self._last, self._scene, self._about, self._ready = end, None, None, {}, False

    def record(self) -> dict[str, NDArray[np.float64]]:
        """Return the number of pictures and the time of the last."""
        return {**super().record(), "last": np.array([np.nan if self._last is None else self._last])}

    def restore(self, record: dict[str, NDArray[np.float64]]) -> None:
        """Go on after the pictures of a checkpoint."""
        super().restore(record)
        self._last = float(record["last"][0]) if self.count else None

    def begin(self, flow: Flow, u: Array, t: float, about: About) -> None:
        """Make room for the pictures."""
        problem = {name: about()[name] for name in ("problem", "kernel")}
        if self._resumed:
            self._continue(problem)
        else:
            self._make_room(problem)
        self._ready = True

    def _make_room(self, problem: dict[str, Any]) -> None:
        """Remove the film of an earlier run of the same problem; raise `InputError` where something would be lost."""
        for place, found in ((self.path, self._said()), (self.folder, self._noted())):
            if place.exists() and any(found.get(name) != value for name, value in problem.items()):
                raise taken(place, "a film")
        if self.folder.exists():
            remove(self.folder)
        self._about = problem
        write_folder(self.folder, self._note, replace=False)

    def _continue(self, problem: dict[str, Any]) -> None:
        self._about, said = self._noted(), self._said()
        lost = [place.name for place in self._pictures if not place.exists()]
        if (lost or not self._about) and said.get("count") == self.count:
            self._about, lost = said, []  # it came to its end, where the pictures go
            remove(self.folder)
        if self._about.get("problem") != problem["problem"]:
            raise FileFormatError(
                f"{self.folder}: got no pictures of this run, expected the {self.count} that there were at the "
                "checkpoint; restore the folder, resume without the film, or start afresh"
            )
        try:
            check_limits(self._about.get("limits"))
        except InputError as error:
            raise FileFormatError(f"{self.folder}: its description is damaged ({error}); start afresh") from error
        if lost:
            raise FileFormatError(
                f"{self.folder}: got no {lost[0]}, expected the {self.count} pictures that there were at the "
                "checkpoint; restore it, resume from an earlier checkpoint, or start afresh"
            )

    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        """Draw a picture."""
        if t == self._last:
            return None
        if not self.folder.exists():
            raise FileFormatError(
                f"{self.folder}: it is gone since the film was complete, and there is more to look at; resume without "
                "the film, or start afresh"
            )
        signal = to_numpy(u)
        if self._scene is None:
            limits = self.limits or self._about.get("limits")
            self._scene = Scene(flow.affinity.domain, signal, limits and tuple(limits), self.size, self.cmap)
            self._about = {**self._about, "limits": self._scene.limits}
            self._note(self.folder)
        write_content(self.folder / f"{self.count:06d}.png", render_pixels(self._scene.pixels(signal, t)))
        self.count, self._last = self.count + 1, t
        return None

    def finish(self) -> None:
        """Make the film."""
        try:
            if self._ready and self.count and self.folder.exists():
                write_video(self.path, self._pictures, self.rate, json.dumps({**self._about, "count": self.count}))
                if self._complete:
                    remove(self.folder)
        finally:
            self._scene, self._ready = None, False
            super().finish()

    @property
    def _complete(self) -> bool:
        last = 0.0 if self._last is None else self._last
        return self.times.after(last) > self._end if self.times.own else last >= self._end

    @property
    def _pictures(self) -> list[Path]:
        return [self.folder / f"{number:06d}.png" for number in range(self.count)]

    def _note(self, folder: Path) -> None:
        write_content(folder / "about.json", json.dumps(self._about).encode())

    def _noted(self) -> dict[str, Any]:
        try:
            return _mapping(described(self.folder / "about.json"))
        except (OSError, ValueError):
            return {}

    def _said(self) -> dict[str, Any]:
        return _mapping(comment_of(self.path) or "{}") if self.path.is_file() else {}


class Live(Tracker):
    """Show the signal in a notebook during a run, in a picture that is replaced.

    Parameters
    ----------
    every, interval, at
        Times of pictures; see `nlflow.flows.trackers.Tracker`.
    limits, size, cmap
        As those of `Film`.
    seconds : float
        Shortest time between two pictures; the last one is shown in any case.

    Raises
    ------
    InputError
        Outside a notebook, and for signals that `Film` does not draw.
    """

    name = "live"

    def __init__(
        self,
        every: int = 1,
        *,
        interval: float | None = None,
        at: ArrayLike | None = None,
        limits: tuple[float, float] | None = None,
        seconds: float = 0.5,
        size: tuple[int, int] | None = None,
        cmap: str = "viridis",
    ) -> None:
        super().__init__(every, interval=interval, at=at)
        self.limits = check_limits(limits)
        self.seconds = check_number("seconds", seconds, minimum=0)
        self.size = _check_size(size)
        self.cmap = _check_cmap(cmap)
        self._shown = -np.inf
        self._waiting: tuple[Array, float] | None = None
        self._scene: Scene | None = None
        self._handle: Any = None

    def start(self, flow: Flow, u: Array, t: float, end: float) -> None:
        """Refuse a terminal, which shows no pictures."""
        check_whole(self, flow)
        if not _in_notebook():
            raise InputError(
                "trackers: Live shows a flow in a notebook, and none runs here; use Film('run.gif'), or progress=True"
            )
        self._scene = Scene(flow.affinity.domain, to_numpy(u), self.limits, self.size, self.cmap)
        self._shown, self._waiting, self._handle = -np.inf, None, None

    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        """Show when due."""
        self._waiting = u, t
        if time.monotonic() - self._shown >= self.seconds:
            self._show()
        return None

    def finish(self) -> None:
        """Show the last."""
        if self._waiting is not None:
            self._show()
        self._scene = None

    def _show(self) -> None:
        from IPython.display import Image, display

        assert self._waiting is not None  # a look left it
        assert self._scene is not None  # made at the start
        u, t = self._waiting
        picture = Image(render_pixels(self._scene.pixels(to_numpy(u), t)))
        if self._handle is None:
            self._handle = display(picture, display_id=True)
        else:
            self._handle.update(picture)
        self._shown, self._waiting = time.monotonic(), None


def _in_notebook() -> bool:
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return getattr(get_ipython(), "kernel", None) is not None  # a shell in a terminal has none


def _check_size(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise InputError(f"size: got {size!r}, expected width and height in pixels, or None")
    width, height = (check_integer("size", value, minimum=64) for value in size)
    return width, height


def _check_cmap(cmap: Any) -> str:
    try:
        from matplotlib import colormaps
    except ImportError as error:
        raise not_installed("a film", "Matplotlib", "plots") from error
    if not isinstance(cmap, str) or cmap not in colormaps:
        raise InputError(f"cmap: got {cmap!r}, expected the name of colours in matplotlib, such as 'viridis'")
    return cmap


def _mapping(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
