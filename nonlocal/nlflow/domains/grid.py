"""Uniform grids."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.domains.base import Domain, check_count
from nlflow.errors import InputError, check_choice, check_integer, check_number, checked_call

Boundary = Literal["periodic", "reflect", "isolated"]
_PAD_MODES = {"periodic": "wrap", "reflect": "symmetric", "isolated": "constant"}


@checked_call
@dataclass(frozen=True)
class Grid(Domain):
    """A uniform grid in any number of dimensions.

    Parameters
    ----------
    shape : int or tuple of int
        Number of nodes along each axis.
    spacing : float or tuple of float
        Distance between neighbouring nodes along each axis, in units of length.
    boundary : {'reflect', 'periodic', 'isolated'}
        How the signal goes on beyond the edge. ``reflect``: mirrored half a cell outside the last node (``d c b a | a b
        c d | d c b a``); ``periodic``: repeated; ``isolated``: nothing is there.

    Notes
    -----
    The nodes are ``i h`` for a periodic grid (rectangle rule) and ``(i + 1/2) h`` otherwise (midpoint rule). A kernel
    of positions is summed over the images of each node on periodic and reflecting grids, K(x, y) = sum_g k(x - g y).

    Examples
    --------
    >>> grid = Grid((4,), spacing=0.25, boundary="periodic")
    >>> grid.nodes.ravel().tolist(), float(grid.weights.sum())
    ([0.0, 0.25, 0.5, 0.75], 1.0)
    >>> volume = Grid((64, 64, 20), spacing=(0.5, 0.5, 2.0))  # slices farther apart than pixels
    >>> volume.ndim, volume.nodes.shape, volume.cell
    (3, (81920, 3), 0.5)
    """

    shape: tuple[int, ...]
    spacing: tuple[float, ...] = field(default=(1.0,))
    boundary: Boundary = "reflect"

    def __init__(
        self, shape: int | tuple[int, ...], spacing: float | tuple[float, ...] = 1.0, boundary: Boundary = "reflect"
    ) -> None:
        sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        if not sizes:
            raise InputError(f"shape: got {shape!r}, expected one axis or more")
        object.__setattr__(self, "shape", tuple(check_integer("shape", n, minimum=1) for n in sizes))
        check_count("shape", self.shape)
        steps = tuple(spacing) if isinstance(spacing, tuple | list) else (spacing,) * len(sizes)
        if len(steps) != len(sizes):
            raise InputError(f"spacing: got {spacing!r}, expected one number or {len(sizes)}, one for each axis")
        object.__setattr__(self, "spacing", tuple(check_number("spacing", h, minimum=0, strict=True) for h in steps))
        longest = max(n * h for n, h in zip(self.shape, self.spacing, strict=True))
        if not 0 < self.cell < math.inf or longest == math.inf:
            raise InputError(
                f"spacing: got {spacing!r}, expected a cell whose volume, and sides whose lengths, a float can hold; "
                "change the unit"
            )
        object.__setattr__(self, "boundary", check_choice("boundary", boundary, tuple(_PAD_MODES)))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def cell(self) -> float:
        """Volume of one cell, the weight of each node."""
        return math.prod(self.spacing)

    @property
    def axes(self) -> tuple[Floats, ...]:
        """Node positions along each axis, in units of length."""
        shift = 0.0 if self.boundary == "periodic" else 0.5
        return tuple(
            (np.arange(n, dtype=np.float64) + shift) * h for n, h in zip(self.shape, self.spacing, strict=True)
        )

    @property
    def nodes(self) -> Floats:
        return np.stack([x.ravel() for x in np.meshgrid(*self.axes, indexing="ij")], axis=1)

    @property
    def weights(self) -> Floats:
        return np.full(self.shape, self.cell)

    def pad(self, array: NDArray[Any], margin: tuple[int, ...], *, isolated: str | None = None) -> NDArray[Any]:
        """Extend an array by `margin` nodes on both sides of each axis, beyond an isolated boundary by zeros.

        With `isolated` by that mode of `numpy.pad` instead.
        """
        widths = [(m, m) for m in margin] + [(0, 0)] * (array.ndim - len(margin))
        mode = _PAD_MODES[self.boundary]
        if self.boundary == "isolated" and isolated is not None:
            mode = isolated
        # numpy types `mode` as a union of literals, which a looked-up string cannot satisfy.
        return np.pad(array, widths, mode=mode)  # type: ignore[call-overload,no-any-return]
