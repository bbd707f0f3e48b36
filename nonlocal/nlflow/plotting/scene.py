"""Signals that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nlflow.domains import Domain, Grid
from nlflow.errors import InputError, check_range
from nlflow.plotting import base
from nlflow.plotting.base import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 100
_CHANNELS = 4  # panels, or lines, that can still be told apart
_MARGIN = 0.05  # above and below lines
_LARGEST = 1e100  # matplotlib takes squares and sums of what it draws


def check_limits(limits: Any) -> tuple[float, float] | None:
    if limits is None:
        return None
    if not isinstance(limits, tuple | list) or len(limits) != 2:
        raise InputError(f"limits: got {limits!r}, expected two numbers (low, high), or None for those at the start")
    return check_range("limits", limits)


class Scene:
    """A picture of a signal that is drawn again at each moment, with fixed limits."""

    def __init__(
        self,
        domain: Domain,
        u: Array,
        limits: tuple[float, float] | None = None,
        size: tuple[int, int] | None = None,
        cmap: str = "viridis",
    ) -> None:
        panels, lines = kind_of(domain, u)
        if limits is None:
            limits = _range_of(u, _MARGIN if lines else 0.0)
        self.limits = limits
        u = self._shown(u)
        width, height = size or ((640, 420) if panels == 1 else (320 * panels + 80, 360))
        self._figure = base.new_figure((width + width % 2) / _DPI, (height + height % 2) / _DPI, _DPI)
        axes = list(self._figure.subplots(1, panels, squeeze=False).ravel())
        draw = _lines if lines else _cloud if not isinstance(domain, Grid) else _pictures
        self._update = draw(axes, domain, u, limits, cmap)
        if not lines:
            self._figure.colorbar(axes[0].collections[0] if axes[0].collections else axes[0].images[0], ax=axes)
        self._figure.suptitle("t = 0")
        self._titled = base.fits(self._figure)
        self._figure.set_layout_engine("none")  # nothing moves from picture to picture
        if not self._titled:
            self._make_bare(axes)

    def _make_bare(self, axes: list[Axes]) -> None:
        self._figure.suptitle("")
        for axis in self._figure.axes:
            if axis not in axes:
                axis.remove()  # the bar of colours
        for number, axis in enumerate(axes):
            axis.set_axis_off()
            axis.set_title("")
            axis.set_position((number / len(axes), 0.0, 1 / len(axes), 1.0))
            if (legend := axis.get_legend()) is not None:
                legend.remove()

    def _shown(self, u: Array) -> Array:
        """Return values that matplotlib can take: those far beyond the limits look as those a little beyond."""
        low, high = self.limits
        reach = min(10 * (high - low), _LARGEST)
        return np.clip(u, low - reach, high + reach)

    def pixels(self, u: Array, t: float) -> NDArray[np.uint8]:
        """Return the picture of a signal at time t, of shape (height, width, 3)."""
        self._update(self._shown(u))
        if self._titled:
            self._figure.suptitle(f"t = {t:.4g}")
        canvas: Any = self._figure.canvas
        canvas.draw()
        return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def kind_of(domain: Domain, u: Array) -> tuple[int, bool]:
    """Return the number of panels and whether they show lines; `InputError` for signals that cannot be drawn."""
    dimensions = len(domain.shape) if isinstance(domain, Grid) else domain.nodes.shape[1]
    most = 3 if isinstance(domain, Grid) else 2
    if domain.leading or dimensions > most:
        got = "a batch" if domain.leading else f"{type(domain).__name__} of {dimensions} dimensions"
        raise InputError(
            f"trackers: got {got} to draw, expected a Grid of one to three dimensions or Points of one or two; write "
            "Frames, and draw what you need"
        )
    channels = u.shape[-1] if u.ndim > len(domain.shape) else 1
    if channels > (1 if dimensions == 3 else _CHANNELS):
        raise InputError(
            f"trackers: got {channels} channels in {dimensions} dimensions to draw, expected at most "
            f"{1 if dimensions == 3 else _CHANNELS}; write Frames, and draw what you need"
        )
    return (1 if dimensions == 1 else 3 if dimensions == 3 else channels), dimensions == 1


def _by_channel(domain: Domain, u: Array) -> list[Array]:
    return list(np.moveaxis(u, -1, 0)) if u.ndim > len(domain.shape) else [u]


def _range_of(u: Array, margin: float) -> tuple[float, float]:
    low, high = float(u.min()), float(u.max())
    if max(-low, high) > _LARGEST:
        raise InputError(
            f"limits: got none for values from {low:.3g} to {high:.3g}, which cannot be drawn; give limits, or scale "
            "the signal down"
        )
    more = margin * (high - low) if high > low else 0.5 * max(1.0, abs(high))
    return low - more, high + more


_Update = Callable[[Array], None]


def _lines(axes: list[Axes], domain: Domain, u: Array, limits: tuple[float, float], cmap: str) -> _Update:
    del cmap
    (axis,), x = axes, domain.nodes[:, 0]
    order = np.argsort(x, kind="stable")
    lines = [
        axis.plot(x[order], one[order], color=base.look(k)[0], label=f"channel {k}")[0]
        for k, one in enumerate(_by_channel(domain, u))
    ]
    axis.set_ylim(*limits)
    if len(lines) > 1:
        axis.legend(loc="upper right", frameon=False)
    base.finish(axis, "", "x", "u")

    def update(u: Array) -> None:
        for line, one in zip(lines, _by_channel(domain, u), strict=True):
            line.set_ydata(one[order])

    return update


def _cloud(axes: list[Axes], domain: Domain, u: Array, limits: tuple[float, float], cmap: str) -> _Update:
    x, y = domain.nodes.T
    style: dict[str, Any] = {"cmap": cmap, "vmin": limits[0], "vmax": limits[1], "s": max(4.0, 4000 / len(x))}
    drawn = [axis.scatter(x, y, c=one, **style) for axis, one in zip(axes, _by_channel(domain, u), strict=True)]
    for number, axis in enumerate(axes):
        axis.set_aspect("equal")
        base.finish(axis, f"channel {number}" if len(axes) > 1 else "", "x", "y" if number == 0 else "")

    def update(u: Array) -> None:
        for cloud, one in zip(drawn, _by_channel(domain, u), strict=True):
            cloud.set_array(one)

    return update


def _pictures(axes: list[Axes], domain: Domain, u: Array, limits: tuple[float, float], cmap: str) -> _Update:
    assert isinstance(domain, Grid)
    cuts = _cuts(domain)

    def parts(u: Array) -> list[Array]:
        if not cuts:
            return _by_channel(domain, u)
        flat = u[..., 0] if u.ndim > 3 else u
        return [flat[(slice(None),) * axis + (middle,)] for axis, middle, _, _ in cuts]

    about = cuts or [(0, 0, (0, 1), f"channel {k}" if len(axes) > 1 else "") for k in range(len(axes))]
    style: dict[str, Any] = {"cmap": cmap, "vmin": limits[0], "vmax": limits[1], "interpolation": "nearest"}
    drawn = []
    for axis, part, (_, _, (down, right), title) in zip(axes, parts(u), about, strict=True):
        height, width = (domain.shape[k] * domain.spacing[k] for k in (down, right))
        drawn.append(axis.imshow(part, extent=(0, width, height, 0), **style))
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("xyz"[right])
        axis.set_ylabel("xyz"[down])

    def update(u: Array) -> None:
        for picture, part in zip(drawn, parts(u), strict=True):
            picture.set_data(part)

    return update


def _cuts(grid: Grid) -> list[tuple[int, int, tuple[int, int], str]]:
    """Return the middle slices of a volume: the axis, the number, the axes that are left, a title."""
    if grid.ndim < 3:
        return []
    others = {0: (1, 2), 1: (0, 2), 2: (0, 1)}
    return [
        (axis, n // 2, others[axis], f"{'xyz'[axis]} = {grid.axes[axis][n // 2]:.3g}")
        for axis, n in reversed(list(enumerate(grid.shape)))
    ]
