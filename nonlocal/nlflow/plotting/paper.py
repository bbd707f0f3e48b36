"""Figures for papers."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nlflow.errors import InputError, check_choice, check_number, not_installed, shortened, warn_caller
from nlflow.plotting import base

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

NARROWEST, WIDEST = 2.5, 40.0  # inches
_ROUNDS = 4  # of breaking labels, growing and leaving out ticks; each changes what the others see
_RATIO, _FLAT, _FEW = 0.62, 0.5, 2  # height of a panel over its width; where there are more than a few rows
_INSIDE = 0.78  # of the width that a panel has within its labels, about
_MARGIN = 0.06  # inches at the right of a panel
_BELOW = 3.0  # points between a panel's labels and its legend
_BAR = "<colorbar>"  # what matplotlib calls the axes of one
_GAP = 1.5  # pixels between labels, at least
_SETTINGS = {
    "font.size": 8.0,
    "axes.labelsize": 8.0,
    "xtick.labelsize": 7.0,
    "ytick.labelsize": 7.0,
    "axes.linewidth": 0.6,
    "lines.markersize": 4.0,
    "savefig.dpi": 300.0,
}
_SHEET = ".mplstyle"
_PIECES = re.compile(r"\([^()\s]+ [^()\s]+\)|(?:(?<!\\)\$.*?(?<!\\)\$|\\\$|[^\s$])+")


def drawn(draw: Callable[[], Figure], *, width: float, style: str | os.PathLike[str] | None = None) -> Figure:
    with _styled(style) as colours, base.on_paper(base.Paper(_checked_width(width), colours)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", base.COLLAPSED)  # it may fit when all labels are broken
            figure = draw()
            settle(figure)
        if not base.fits(figure):
            figure.set_layout_engine("none")
            warn_caller(
                f"width: got {width:g} inches, which leave no room for the panels beside their labels; use a wider "
                "figure, or a style with smaller letters"
            )
    return figure


def rendered(
    draw: Callable[[], Figure], formats: str | Sequence[str], *, style: str | os.PathLike[str] | None = None
) -> dict[str, bytes]:
    wanted = _checked_formats(formats)
    with _styled(style):
        figure = draw()
        return {f"figure.{form}": base.render(figure, form) for form in wanted}


def check_paper(
    formats: str | Sequence[str], width: float, style: str | os.PathLike[str] | None
) -> tuple[list[str], float]:
    wanted, wide = _checked_formats(formats), _checked_width(width)
    with _styled(style):
        return wanted, wide


def _checked_formats(formats: str | Sequence[str]) -> list[str]:
    wanted = [formats] if isinstance(formats, str) or not isinstance(formats, Iterable) else list(formats)
    if not wanted:
        raise InputError(f"format: got none, expected one or several of {', '.join(base.FORMATS)}")
    return list(dict.fromkeys(check_choice("format", form, base.FORMATS) for form in wanted))


def _checked_width(width: float) -> float:
    wide = check_number("width", width, minimum=NARROWEST, hint="give inches: a column of a journal has 3.3, a page 7")
    if wide > WIDEST:
        raise InputError(f"width: got {wide:g} inches, expected {WIDEST:g} at most")
    return wide


@contextmanager
def _styled(style: str | os.PathLike[str] | None) -> Iterator[tuple[str, ...] | None]:
    """Draw with the sizes of a paper, and above them a style sheet; yields its colours, if it has any."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise not_installed("a figure", "Matplotlib", "plots") from error

    sheet = {} if style is None else _sheet(style)
    with mpl.rc_context():
        settings: Any = mpl.rcParams  # a mapping whose keys are typed one by one
        settings.update({**_SETTINGS, **sheet})
        cycle = sheet.get("axes.prop_cycle")
        yield tuple(cycle.by_key()["color"]) if cycle is not None and "color" in cycle.keys else None


def _sheet(style: Any) -> dict[str, Any]:
    """Return the settings of a style sheet, by its name or in a file; nothing is fetched from a network."""
    import matplotlib as mpl
    import matplotlib.style

    name = os.fspath(style) if isinstance(style, str | os.PathLike) else None
    library: Any = mpl.style.library
    if name in library:
        return dict(library[name])
    if name is None or not name.endswith(_SHEET) or not Path(name).is_file():
        got = shortened(repr(style), 80)
        raise InputError(
            f"style: got {got}, expected a file NAME{_SHEET} or one of {', '.join(sorted(mpl.style.available))}"
        )
    return _read_sheet(name)


def _read_sheet(name: str) -> dict[str, Any]:
    """Return the settings in a file, one line ``key: value`` each, as matplotlib reads them."""
    import matplotlib as mpl

    found: dict[str, Any] = {}
    settings: Any = mpl.rcParams
    try:
        lines = Path(name).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(
            f"style: got {name} ({shortened(error, 120)}), expected a style sheet of matplotlib"
        ) from error
    for number, line in enumerate(lines, 1):
        key, mark, value = (part.strip() for part in re.sub(r"(^|\s)#.*", "", line).partition(":"))
        if not key and not mark:
            continue
        if key not in settings or not mark or key == "text.usetex":
            raise InputError(
                f"style: got {shortened(line.strip(), 80)!r} in line {number} of {name}, expected a setting of "
                "matplotlib, KEY: VALUE; labels are set by matplotlib, without LaTeX"
            )
        with mpl.rc_context():
            try:
                settings[key] = value.strip("\"'")
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"style: got {key} in line {number} of {name}: {shortened(error, 160)}") from error
            found[key] = settings[key]
    return found


# ---- labels that do not meet


def settle(figure: Figure) -> None:
    _share(figure)
    columns, rows = _grid(figure)
    ratio = _RATIO if rows <= _FEW else _FLAT
    across = _INSIDE * figure.bbox.width / columns
    for axes in _panels(figure):  # what is not broken yet would leave no room for the panel
        _break_labels(axes, across, ratio * across)
        _break_legend(axes, across)
    for _ in range(_ROUNDS):
        figure.draw_without_rendering()
        for axes in _panels(figure):
            box = axes.get_window_extent()
            high = ratio * across
            _break_labels(axes, box.width, min(high, 0.85 * box.height) if axes.get_label() == _BAR else high)
            _break_legend(axes, _right(axes) - box.x0)
            _put_below(axes)
        figure.draw_without_rendering()
        before = figure.get_figheight()
        _level(figure, ratio, rows)
        if abs(figure.get_figheight() - before) < 1 / figure.dpi:
            break
    figure.draw_without_rendering()
    for axes in _panels(figure):
        _thin(axes)


def _panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.axison]


def _figure(axes: Axes) -> Figure:
    figure: Any = axes.get_figure(root=True)  # panels are in one
    return figure  # type: ignore[no-any-return]


def _extent(text: Text) -> Bbox:
    return text.get_window_extent()


def _share(figure: Figure) -> None:
    """Leave the same label only at the lowest panel of a column, and at the first of a row; a title of legends once."""
    seen: set[tuple[str, int, str]] = set()

    def first(*key: Any) -> bool:
        known = key in seen
        seen.add(key)
        return not known

    panels = [axes for axes in _panels(figure) if axes.get_subplotspec() is not None and axes.get_label() != _BAR]
    for axes in panels[::-1]:
        if not first("x", axes.get_subplotspec().colspan.start, axes.get_xlabel()):  # type: ignore[union-attr]
            axes.set_xlabel("")
    for axes in panels:
        if not first("y", axes.get_subplotspec().rowspan.start, axes.get_ylabel()):  # type: ignore[union-attr]
            axes.set_ylabel("")
        legend = axes.get_legend()
        if legend is not None and not first("legend", legend.get_title().get_text()):
            legend.set_title("")


def _right(axes: Axes) -> float:
    """Return where the room of a panel ends, in pixels; a legend that is wider would make the panel narrow."""
    figure, spec = _figure(axes), axes.get_subplotspec()
    if spec is None:
        return float(figure.bbox.width)
    return float(figure.bbox.width * spec.colspan.stop / spec.get_gridspec().ncols - _MARGIN * figure.dpi)


def _grid(figure: Figure) -> tuple[int, int]:
    grids = [axes.get_subplotspec().get_gridspec() for axes in _panels(figure) if axes.get_subplotspec() is not None]  # type: ignore[union-attr]
    return max((grid.ncols for grid in grids), default=1), max((grid.nrows for grid in grids), default=1)


def _break_labels(axes: Axes, width: float, height: float) -> None:
    """Break the labels of a panel of this size in pixels, each within the side that it stands at."""
    _broken(axes.title, width)
    _broken(axes.xaxis.label, width)
    _broken(axes.yaxis.label, height, upright=True)


def _break_legend(axes: Axes, width: float) -> None:
    """Break the entries of a legend within this width; those side by side become lines if need be."""
    legend = axes.get_legend()
    if legend is None:
        return
    if legend.get_window_extent().width > width:
        legend.set_ncols(1)
    letter = legend.prop.get_size_in_points() * _figure(axes).dpi / 72
    frame = 2 * legend.borderpad + legend.borderaxespad
    for text in legend.get_texts():
        _broken(text, width - (legend.handlelength + legend.handletextpad + frame) * letter)
    _broken(legend.get_title(), width - frame * letter)


def _put_below(axes: Axes) -> None:
    """Put a legend right below what stands below its panel."""
    from matplotlib.transforms import ScaledTranslation

    legend, figure = axes.get_legend(), _figure(axes)
    if legend is None or legend.get_gid() != base.BELOW:
        return
    box = axes.xaxis.get_tightbbox()
    down = (axes.get_window_extent().y0 - box.y0) / figure.dpi if box is not None else 0.0
    shift = ScaledTranslation(0, -down - _BELOW / 72, figure.dpi_scale_trans)
    legend.set_bbox_to_anchor((-0.02, 0.0), transform=axes.transAxes + shift)


def _broken(text: Text, room: float, *, upright: bool = False) -> None:
    """Break a text at its spaces into lines of `room` pixels; mathematics and parentheses stay whole."""
    words = text.get_text()
    if not words:
        return

    def length(candidate: str) -> float:
        text.set_text(candidate)
        box = _extent(text)
        return float(box.height if upright else box.width)

    if length(words) <= room:
        return
    pieces = _PIECES.findall(words)
    lines = [pieces[0]]
    for piece in pieces[1:]:
        joined = f"{lines[-1]} {piece}"
        if length(joined) <= room:
            lines[-1] = joined
        else:
            lines.append(piece)
    text.set_text("\n".join(lines))


def _level(figure: Figure, ratio: float, rows: int) -> None:
    """Give a figure the height at which its lowest panel has its share of its width."""
    panels = [axes for axes in _panels(figure) if axes.get_subplotspec() is not None and axes.get_label() != _BAR]
    lacks = [ratio * axes.get_window_extent().width - axes.get_window_extent().height for axes in panels]
    if lacks:
        figure.set_figheight(figure.get_figheight() + rows * max(lacks) / figure.dpi)


def _thin(axes: Axes) -> None:
    """Leave out labels of ticks that would meet: round numbers stay, and of them every second, third, ..."""
    kept: list[Bbox] = []
    for axis in (axes.xaxis, axes.yaxis):
        shown = _labelled(axis)
        if not shown:
            continue
        chosen, boxes = _apart(shown, kept, logarithmic=axis.get_scale() == "log")
        kept += boxes
        if len(chosen) < len(shown):
            _set_ticks(axis, chosen)


_Tick = tuple[float, str, Any]


def _labelled(axis: Axis) -> list[_Tick]:
    """Return the ticks in view that have a label: place, label and box."""
    low, high = sorted(axis.get_view_interval())
    slack = 1e-9 * (high - low)
    return [
        (place, label.get_text(), _extent(label))
        for minor in (False, True)
        for place, label in zip(
            axis.get_ticklocs(minor=minor), axis.get_ticklabels(which="minor" if minor else "major"), strict=False
        )
        if low - slack <= place <= high + slack and label.get_visible() and label.get_text()
    ]


def _apart(shown: list[_Tick], others: list[Bbox], *, logarithmic: bool) -> tuple[list[_Tick], list[Bbox]]:
    """Return as many ticks as have room, evenly chosen among the round ones, and their boxes."""

    def meets(box: Any, boxes: list[Any]) -> bool:
        wide = box.padded(_GAP)
        return any(wide.overlaps(other) for other in boxes)

    groups = sorted({_roughness(place) for place, _, _ in shown}) if logarithmic else [0]
    chosen: list[_Tick] = []
    for group in groups:
        members = sorted(tick for tick in shown if not logarithmic or _roughness(tick[0]) == group)
        for step in range(1, len(members) + 1):
            # From the end that is not at the corner, where both axes have labels.
            some = members[::-1][::step]
            boxes = [tick[2] for tick in (*chosen, *some)]
            if not any(meets(box, [*boxes[:n], *others]) for n, box in enumerate(boxes)):
                chosen += some
                break
        if len(chosen) > 2:
            break
    if len(chosen) < 2 <= len(shown):
        chosen = _ends(shown, others, meets)
    return chosen, [box for _, _, box in chosen]


def _ends(shown: list[_Tick], others: list[Bbox], meets: Callable[[Any, list[Any]], bool]) -> list[_Tick]:
    """Return the first and the last tick, or the one that has room."""
    last, first = max(shown), min(shown)
    found = [] if meets(last[2], others) else [last]
    return found if meets(first[2], [*others, *(tick[2] for tick in found)]) else [*found, first]


def _roughness(place: float) -> int:
    """Return 0 for powers of ten, 1 for 2 and 5 times one, 2 for all else."""
    digits = f"{abs(place):.6e}".partition("e")[0].rstrip("0").rstrip(".")
    return {"1": 0, "2": 1, "5": 1}.get(digits, 2)


def _set_ticks(axis: Axis, chosen: list[_Tick]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter

    ordered = sorted(chosen)
    axis.set_major_locator(FixedLocator([place for place, _, _ in ordered]))
    axis.set_major_formatter(FixedFormatter([label for _, label, _ in ordered]))
    axis.set_minor_formatter(NullFormatter())
