"""Fractional Laplacians on the interval and the disc, and what is exact there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nlflow import FractionalLaplacian, Grid


def interval(n: int, s: float, **options: Any) -> tuple[FractionalLaplacian, Any]:
    """Return the operator on (-1, 1), and the nodes."""
    a = FractionalLaplacian(Grid(n, 2 / n, "isolated"), s, **options)
    return a, (np.arange(n) + 0.5) * 2 / n - 1


def disc(n: int, s: float, **options: Any) -> tuple[FractionalLaplacian, Any]:
    """Return the operator on the unit disc, and the radii of the nodes inside."""
    grid = Grid((n, n), 2 / n, "isolated")
    r = np.linalg.norm(grid.nodes - 1, axis=1).reshape(n, n)
    return FractionalLaplacian(grid, s, inside=1 - r, **options), r[r < 1]


def ball_solution(ndim: int, s: float, squared: Any) -> Any:
    """Return the solution for f = 1 on the unit ball (Getoor 1961)."""
    c = 4**-s * math.gamma(ndim / 2) / (math.gamma(ndim / 2 + s) * math.gamma(1 + s))
    return c * np.maximum(1 - squared, 0) ** s


def error(u: Any, exact: Any) -> float:
    return float(np.linalg.norm(u - exact) / np.linalg.norm(exact))
