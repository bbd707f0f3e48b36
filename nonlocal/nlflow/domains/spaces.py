"""Domains: where a signal lives, and the quadrature that turns integrals over it into sums.

A signal on a domain is an array whose leading axes are ``domain.shape``, followed by at most one channel axis. Nodes
are numbered in C order wherever a flat numbering is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nlflow._array import underflowing
from nlflow.errors import InputError, check_array, check_choice, check_integer, check_number

__all__ = ["Batch", "Boundary", "Domain", "Grid", "Points"]

Boundary = Literal["periodic", "reflect", "isolated"]
_PAD_MODES = {"periodic": "wrap", "reflect": "symmetric", "isolated": "constant"}


class Domain:
    """What `Grid`, `Points` and `Batch` share: a node shape, nodes and quadrature weights."""

    shape: tuple[int, ...]
    leading: tuple[int, ...] = ()
    """Shape of the batch that the domain is; () for one that is none."""

    @property
    def item(self) -> Domain:
        """The domain of one item of a batch; the domain itself where it is none."""
        return self

    @property
    def item_size(self) -> int:
        """Number of nodes of one item."""
        return self.item.size

    @property
    def item_weights(self) -> NDArray[np.float64]:
        """Quadrature weights of one item."""
        return self.item.weights

    @property
    def size(self) -> int:
        """Number of nodes N."""
        return math.prod(self.shape)

    @property
    def nodes(self) -> NDArray[np.float64]:
        """Node positions, shape (N, m)."""
        raise NotImplementedError  # pragma: no cover - abstract

    @property
    def weights(self) -> NDArray[np.float64]:
        """Quadrature weights w_i > 0, shape ``shape``; their sum is the volume."""
        raise NotImplementedError  # pragma: no cover - abstract

    def check_signal(self, name: str, value: Any) -> Any:
        """Return `value` as a finite floating-point array of shape ``shape`` or ``shape + (D,)``.

        Raises
        ------
        InputError
            Naming the argument, the shape that was got and the shapes that are expected.
        """
        array = check_array(name, value)
        got, n = tuple(array.shape), len(self.shape)
        if got[:n] != self.shape or len(got) > n + 1:
            raise InputError(
                f"{name}: got shape {got}, expected {self.shape} or {(*self.shape, 'D')}: "
                "the node axes of the domain first, then at most one channel axis"
            )
        return array


@dataclass(frozen=True)
class Grid(Domain):
    """A uniform grid in one or two dimensions.

    Parameters
    ----------
    shape : int or tuple of int
        Number of nodes along each axis, one or two axes.
    spacing : float or tuple of float
        Distance between neighbouring nodes along each axis, in units of length.
    boundary : {'reflect', 'periodic', 'isolated'}
        How the signal goes on beyond the edge. ``reflect``: mirrored half a cell outside the last node (``d c b a | a b
        c d | d c b a``); ``periodic``: repeated; ``isolated``: there is nothing outside, sums run over the grid alone.

    Notes
    -----
    The nodes are ``i h`` for a periodic grid (rectangle rule) and ``(i + 1/2) h`` otherwise (midpoint rule), so each
    weight is the cell's volume and the integral of a smooth function is exact to spectral or second order.

    A translation-invariant kernel on a bounded domain is summed over the images of each node: K(x, y) = sum_g k(x - g
    y) over the group of the boundary (translations, or reflections as well). The sum keeps K symmetric and makes the
    Fourier (cosine) transform diagonalise it.

    Examples
    --------
    >>> grid = Grid((4,), spacing=0.25, boundary="periodic")
    >>> grid.nodes.ravel().tolist(), float(grid.weights.sum())
    ([0.0, 0.25, 0.5, 0.75], 1.0)
    """

    shape: tuple[int, ...]
    spacing: tuple[float, ...] = field(default=(1.0,))
    boundary: Boundary = "reflect"

    def __init__(
        self,
        shape: int | tuple[int, ...],
        spacing: float | tuple[float, ...] = 1.0,
        boundary: Boundary = "reflect",
    ) -> None:
        sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        if len(sizes) not in (1, 2):
            raise InputError(f"shape: got {shape!r}, expected 1 or 2 axes; use Points for other domains")
        steps = tuple(spacing) if isinstance(spacing, tuple | list) else (spacing,) * len(sizes)
        if len(steps) != len(sizes):
            raise InputError(f"spacing: got {spacing!r}, expected one number or {len(sizes)}, one for each axis")
        object.__setattr__(self, "shape", tuple(check_integer("shape", n, minimum=1) for n in sizes))
        object.__setattr__(self, "spacing", tuple(check_number("spacing", h, minimum=0, strict=True) for h in steps))
        if not 0 < self.cell < math.inf:
            raise InputError(
                f"spacing: got {spacing!r}, expected a cell whose volume a float can hold; change the unit"
            )
        object.__setattr__(self, "boundary", check_choice("boundary", boundary, tuple(_PAD_MODES)))

    @property
    def ndim(self) -> int:
        """Number of axes, 1 or 2."""
        return len(self.shape)

    @property
    def cell(self) -> float:
        """Volume of one cell, the quadrature weight of every node."""
        return math.prod(self.spacing)

    @property
    def axes(self) -> tuple[NDArray[np.float64], ...]:
        """Node positions along each axis, in units of length."""
        shift = 0.0 if self.boundary == "periodic" else 0.5
        return tuple(
            (np.arange(n, dtype=np.float64) + shift) * h for n, h in zip(self.shape, self.spacing, strict=True)
        )

    @property
    def nodes(self) -> NDArray[np.float64]:
        """Node positions, shape (N, ndim), C order; O(N) memory."""
        return np.stack([x.ravel() for x in np.meshgrid(*self.axes, indexing="ij")], axis=1)

    @property
    def weights(self) -> NDArray[np.float64]:
        """Quadrature weights: the cell's volume at every node, shape ``shape``."""
        return np.full(self.shape, self.cell)

    def pad(self, array: NDArray[Any], margin: tuple[int, ...], *, isolated: str | None = None) -> NDArray[Any]:
        """Extend `array` beyond the edge as the boundary says.

        Parameters
        ----------
        array : array of shape ``shape`` or ``shape + (D,)``
        margin : tuple of int
            Nodes to add on both sides of each axis; may be larger than the grid.
        isolated : str, optional
            The `numpy.pad` mode for an isolated boundary; zeros by default.
        """
        widths = [(m, m) for m in margin] + [(0, 0)] * (array.ndim - len(margin))
        mode = _PAD_MODES[self.boundary]
        if self.boundary == "isolated" and isolated is not None:
            mode = isolated
        # numpy types `mode` as a union of literals, which a looked-up string cannot satisfy.
        return np.pad(array, widths, mode=mode)  # type: ignore[call-overload,no-any-return]


@underflowing
@dataclass(frozen=True, eq=False)
class Points(Domain):
    """Scattered nodes with quadrature weights.

    Parameters
    ----------
    nodes : array_like of shape (N, m) or (N,)
        Node positions; a flat array is taken as N points on a line.
    weights : array_like of shape (N,), optional
        Quadrature weights, all > 0. By default each is ``volume / N``, the Monte-Carlo rule.
    volume : float, optional
        Total volume when no weights are given.
    """

    positions: NDArray[np.float64]
    quadrature: NDArray[np.float64]

    def __init__(self, nodes: ArrayLike, weights: ArrayLike | None = None, volume: float = 1.0) -> None:
        # Copies: a domain does not change when the arrays that it was made from do.
        x = np.array(check_array("nodes", nodes, ndim=(1, 2)), dtype=np.float64)
        x = x[:, None] if x.ndim == 1 else x
        if weights is None:
            w = np.full(len(x), check_number("volume", volume, minimum=0, strict=True) / len(x))
        else:
            w = np.array(check_array("weights", weights, ndim=1), dtype=np.float64)
            if w.shape != (len(x),):
                raise InputError(f"weights: got shape {w.shape}, expected ({len(x)},), one for each node")
            if w.min() <= 0:
                raise InputError(f"weights: got {w.min():g}, expected every weight > 0; leave such nodes out")
        object.__setattr__(self, "positions", x)
        object.__setattr__(self, "quadrature", w)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # a field in the base, derived here
        """Node shape, (N,)."""
        return (len(self.positions),)

    @property
    def nodes(self) -> NDArray[np.float64]:
        """Node positions, shape (N, m)."""
        return self.positions

    @property
    def weights(self) -> NDArray[np.float64]:
        """Quadrature weights, shape (N,)."""
        return self.quadrature


@dataclass(frozen=True, eq=False)
class Batch(Domain):
    """Copies of a domain side by side, whose nodes see those of their own copy alone: a batch of signals, heads.

    To every functional, flow and chain it is one domain with ``math.prod(leading)`` times as many nodes: J is the sum
    over the items, a norm goes over all of them. Means, and with them the distance to a constant, are those of each
    item (`Affinity.item` gives the affinity of one).

    Parameters
    ----------
    domain : Grid or Points
        Of one item.
    leading : int or tuple of int
        How many: 8, or (8, 12) for 8 sequences and 12 heads. Signals have these axes first.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Batch, Gaussian, Points, affinity
    >>> batch = Batch(Points([0.0, 1.0]), 2)
    >>> p = affinity(Gaussian(width=1.0), batch)
    >>> p.average(np.array([[1.0, 1.0], [5.0, 5.0]])).round(12).tolist()
    [[1.0, 1.0], [5.0, 5.0]]
    """

    one: Grid | Points
    leading: tuple[int, ...]

    def __init__(self, domain: Grid | Points, leading: int | tuple[int, ...]) -> None:
        if not isinstance(domain, Grid | Points):
            raise InputError(f"domain: got {type(domain).__name__}, expected a Grid or Points, the domain of one item")
        sizes = tuple(leading) if isinstance(leading, tuple | list) else (leading,)
        if not sizes:
            raise InputError("leading: got (), expected at least one axis")
        object.__setattr__(self, "one", domain)
        object.__setattr__(self, "leading", tuple(check_integer("leading", n, minimum=1) for n in sizes))

    @property
    def item(self) -> Domain:
        """The domain of one item."""
        return self.one

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]  # a field in the base, derived here
        """Node shape, ``leading + domain.shape``."""
        return (*self.leading, *self.one.shape)

    @property
    def nodes(self) -> NDArray[np.float64]:
        """Node positions, shape (N, m): those of an item, again and again."""
        return np.tile(self.one.nodes, (math.prod(self.leading), 1))

    @property
    def weights(self) -> NDArray[np.float64]:
        """Quadrature weights, shape ``shape``."""
        return np.array(np.broadcast_to(self.one.weights, self.shape))
