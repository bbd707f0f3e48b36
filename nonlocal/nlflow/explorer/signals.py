"""The signals of the tab "Flow", on grids of the unit interval and the unit square, with values about -1 to 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nlflow.domains import Grid

__all__ = ["disc", "photograph", "steps", "waves"]

Floats = NDArray[np.float64]


def steps(grid: Grid) -> Floats:
    """Return steps between -1 and 1, shape (N,)."""
    return np.sign(np.sin(4 * np.pi * grid.nodes[:, 0] + 0.3))


def waves(grid: Grid) -> Floats:
    """Return a long wave of height 1 and a short one of height 0.3, shape (N,)."""
    x = grid.nodes[:, 0]
    return np.sin(4 * np.pi * x) + 0.3 * np.sin(26 * np.pi * x)


def disc(grid: Grid) -> Floats:
    """Return 1 in a disc and 0 outside, shape (N, N)."""
    inside = np.hypot(*(grid.nodes - [0.45, 0.55]).T) < 0.28
    return np.asarray(inside.reshape(grid.shape), dtype=np.float64)


def photograph(grid: Grid) -> Floats:
    """Return a photograph with grey levels from 0 to 1, shape (N, N) where N divides 512."""
    from skimage import data

    camera: NDArray[np.uint8] = data.camera()  # type: ignore[no-untyped-call]
    side = len(camera) // grid.shape[0]
    blocks = camera.reshape(grid.shape[0], side, grid.shape[1], side)
    return np.asarray(blocks.mean(axis=(1, 3)) / 255)
