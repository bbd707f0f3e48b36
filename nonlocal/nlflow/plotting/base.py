"""What figures share."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import InputError, check_choice, check_text, not_installed, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec

Array: TypeAlias = NDArray[Any]

# Colour-blind people can tell these colours apart.
PALETTE = ("#0b5394", "#d1711c", "#009e73", "#cc79a7", "#56b4e9", "#4d4d4d")
MARKERS = "osD^vP"
COLUMNS = 3  # panels in a row
FORMATS = ("pdf", "svg", "png")
COLLAPSED = ".*axes sizes collapsed"  # what matplotlib warns of where it finds no layout
BELOW = "below"  # of legends below a panel
_SPARE = 1.5  # inches
_NARROWEST = 2.9  # inches of a panel on paper: its legend has a line that names and tells a slope
ROUNDING = 1e-15  # relative to the largest value: smaller ones are rounding
BINS = 2000  # columns of a line: more than this and only the envelope can be seen
_UNIT, _GREY = 1.5, 16  # the largest value of samples from 0 to 1, somewhat passed, and one that grey levels pass
REACH = 100.0  # exponent at which a predicted exponential ends: beyond any measured decay, and without overflow


@dataclass(frozen=True)
class Paper:
    """Width and colours."""

    width: float
    colours: tuple[str, ...] | None = None


_PAPER: ContextVar[Paper | None] = ContextVar("paper", default=None)


@contextmanager
def on_paper(paper: Paper) -> Iterator[None]:
    before = _PAPER.set(paper)
    try:
        yield
    finally:
        _PAPER.reset(before)


def new_figure(width: float = 10.0, height: float = 4.0, dpi: float = 150.0, title: str | None = None) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise not_installed("a figure", "Matplotlib", "plots") from error

    check_title(title)
    paper = _PAPER.get()
    if paper is not None:
        width, height = paper.width, height * min(1.0, paper.width / width)
    figure = Figure(figsize=(width, height), layout="constrained", dpi=dpi)
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(
            visible(title, keep="\n"), fontsize=points(13), parse_math=False
        )  # a file name may hold dollar signs
    return figure


def check_title(title: Any) -> None:
    if title is not None:
        check_text("title", title)


def panel_grid(
    count: int, width: float, height: float, title: str | None = None, *, most: int = COLUMNS, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels, at most `most` in a row; on paper fewer where they would be narrow."""
    columns, paper = min(count, most), _PAPER.get()
    if paper is not None:
        columns = min(columns, max(1, int(paper.width / _NARROWEST)))
        wide = paper.width / columns
        width, height = wide, height * wide / width + _SPARE  # what is too much goes when labels have their lines
    rows = -(-count // columns)
    figure = new_figure(
        paper.width if paper is not None else max(width * columns, 6.4) + 0.4, height * rows + 0.2, 130, title
    )
    axes = list(figure.subplots(rows, columns, squeeze=False, **options).ravel())
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def in_grid(axis: Axes) -> SubplotSpec:
    return axis.get_subplotspec()  # type: ignore[return-value]  # of `panel_grid`


def finish(axis: Axes, title: str, xlabel: str, ylabel: str = "") -> None:
    axis.set_title(title, fontsize=points(11))
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def legend_below(axis: Axes, *entries: Any, down: float = 0.14, **options: Any) -> None:
    legend = axis.legend(
        *entries, fontsize=points(9), title_fontsize=points(9), frameon=False, loc="upper left",
        bbox_to_anchor=(-0.02, -down), alignment="left", **options,
    )  # fmt: skip
    legend.set_gid(BELOW)


def points(size: float) -> float:
    import matplotlib as mpl

    return size * float(mpl.rcParams["font.size"]) / 10


def look(number: int) -> tuple[str, str]:
    paper = _PAPER.get()
    if paper is not None and paper.colours:
        return paper.colours[number % len(paper.colours)], MARKERS[number % len(MARKERS)]
    return PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)]


def check_shape(name: str, array: Array, shape: tuple[int, ...], like: str) -> None:
    if array.shape != shape:
        raise InputError(f"{name}: got shape {array.shape}, expected {shape} as in {like}")


def check_named(name: str, groups: Any, expected: str) -> None:
    if groups is not None and not isinstance(groups, Mapping):
        raise InputError(f"{name}: got {type(groups).__name__}, expected a mapping from a name to {expected}")
    if not groups:
        raise InputError(f"{name}: got none, expected at least one {expected}")


def check_groups(name: str, groups: Mapping[str, Sequence[Any]], expected: str) -> None:
    if groups:
        check_named(name, groups, expected)
    for group in groups.values() if groups else ():
        if isinstance(group, str) or not hasattr(group, "__len__"):
            raise InputError(f"{name}: got {type(group).__name__}, expected a sequence: at least one {expected}")
    if not groups or not all(len(group) for group in groups.values()):
        raise InputError(f"{name}: got none or an empty one, expected at least one {expected}")


def check_numbers(name: str, value: Any) -> Array:
    array = value if isinstance(value, np.ndarray) else np.asarray(value)
    if array.dtype.kind not in "biuf" or not array.ndim:
        raise InputError(f"{name}: got {type(value).__name__}, expected an array of real numbers")
    return array


def pair_of(noisy: Any, result: Any) -> tuple[Array, Array]:
    """Return noisy samples and a result as arrays in the same units."""
    before, after = check_numbers("noisy", noisy), check_numbers("result", result)
    if before.dtype.kind in "iu" and after.dtype.kind == "f" and after.size and before.size:
        most = float(np.nanmax(after)) if np.isfinite(after).any() else 0.0
        if 0 < most <= _UNIT and before.max() > _GREY:
            raise InputError(
                f"result: got values up to {most:.3g} beside noisy ones up to {before.max()}, expected the units of "
                "noisy; give preserve_range=True to denoise"
            )
    return before, after


def middle_of(values: NDArray[np.float64]) -> int:
    levels = np.log(values)
    return int(np.argmin(np.abs(levels - (levels.min() + levels.max()) / 2)))


def show_decades(axis: Axes, low: float, high: float, room: float) -> None:
    """Let a logarithmic axis reach a factor of `room` beyond `low` and `high`, over at least two decades."""
    centre, half = math.sqrt(low * high), max(math.sqrt(high / low) * room, 10.0)
    axis.set_ylim(centre / half, centre * half)


def draw_line(axis: Axes, values: Array, part: slice, **style: Any) -> None:
    x, y = np.arange(part.start, part.stop), values[part]
    step = len(y) // BINS
    if step > 2:
        full = len(y) // step * step
        blocks = y[:full].reshape(-1, step)
        x = np.concatenate([np.repeat(x[:full:step], 2), x[full:]])
        ends = [np.fmin.reduce(blocks, axis=1), np.fmax.reduce(blocks, axis=1)]  # without what is missing
        y = np.concatenate([np.stack(ends, axis=1).ravel(), y[full:]])
    axis.plot(x, y, **style)


def fits(figure: Figure) -> bool:
    """Lay out a figure, and return whether there is room for axes beside their words."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", COLLAPSED)
        try:
            figure.draw_without_rendering()
        except UserWarning:
            return False
    return True


def render(figure: Figure, form: str, *, outlines: bool = False) -> bytes:
    """Return a figure as ``pdf``, ``svg`` or ``png``; with `outlines` the letters of an SVG are shapes."""
    import matplotlib as mpl

    check_choice("form", form, FORMATS)
    dates: dict[str, dict[str, Any]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
    fonts: dict[Any, Any] = {
        "pdf.fonttype": 42,
        "svg.fonttype": "path" if outlines else "none",
        "svg.hashsalt": "nlflow",
    }
    stream = io.BytesIO()
    with warnings.catch_warnings(), mpl.rc_context(fonts):
        warnings.filterwarnings("ignore", message="Glyph")  # a title in a script that the font lacks
        figure.savefig(stream, format=form, metadata=dates[form])
    return stream.getvalue()


def render_pixels(pixels: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()
