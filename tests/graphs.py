"""Small graphs as plain matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

N = 30
KINDS = ("undirected", "loops", "directed")


def weights(kind: str = "undirected", n: int = N, seed: int = 0) -> Any:
    """Return k_ij of a connected graph as a plain matrix."""
    rng = np.random.default_rng(seed)
    k = rng.random((n, n)) * (rng.random((n, n)) < 0.15)
    np.fill_diagonal(k, 0)
    k += np.eye(n, k=1) + np.eye(n, k=1 - n)  # a ring
    if kind != "directed":
        k += k.T
    if kind == "loops":
        k[::3, ::3] += np.diag(rng.random(len(k[::3])))
    return k


def signal(shape: Any, dtype: Any = np.float64, seed: int = 1) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def averaging(k: Any, w: Any = 1.0) -> tuple[Any, Any]:
    """Return P and d by their definition."""
    d = (k * w).sum(axis=1)
    return k * w / d[:, None], d
