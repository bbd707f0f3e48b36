"""Small chains of every structure, each with its affinity matrix k_ij written out independently of the package."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

import nlflow as nl
from nlflow.affinities import Affinity
from tests.problems import Floats, gaussian_matrix
from tests.reference import feature_matrix, patch_matrix, position_matrix

POINTS = nl.Points(np.arange(12.0), weights=np.linspace(0.5, 1.5, 12))
TOLERANCE = {"float64": 1e-11, "float32": 4e-6}


def normal(shape: Any, seed: int = 1, dtype: Any = "float64") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def given(k: Any, dtype: Any = "float64", domain: nl.Points | None = None) -> Affinity:
    """Return the affinity of a matrix on points of weight 1, so that P is k with rows divided by their sums."""
    n = len(k)
    return nl.from_matrix(
        np.asarray(k, dtype), nl.Points(np.arange(float(n)), np.ones(n)) if domain is None else domain
    )


def transitions(k: Floats, weights: Any) -> Floats:
    """Return P_ij = w_j k_ij / d_i."""
    rates = np.asarray(k, dtype=np.float64) * np.ravel(weights)
    return np.asarray(rates / rates.sum(axis=1, keepdims=True))


def lazily(p: Floats, laziness: float) -> Floats:
    """Return the moves of a walker who stays with this probability on top."""
    return np.asarray(laziness * np.eye(len(p)) + (1 - laziness) * p)


def ring(n: int, stay: float = 0.0) -> Floats:
    """Return the walk to either neighbour on a ring, or to stay: eigenvalues s + (1-s) cos(2 pi k/n)."""
    step = np.roll(np.eye(n), 1, axis=1)
    return np.asarray(stay * np.eye(n) + (1 - stay) / 2 * (step + step.T))


def directed_ring(n: int, stay: float = 0.0) -> Floats:
    """Return the walk around a ring in one direction: period n unless it may stay."""
    return np.asarray(stay * np.eye(n) + (1 - stay) * np.roll(np.eye(n), 1, axis=1))


def tilted(n: int = 12) -> Floats:
    """Return k_ij = a_i s_ij with symmetric s: not symmetric, but its chain is reversible."""
    s = np.random.default_rng(4).random((n, n))
    return np.asarray(np.linspace(0.2, 3.0, n)[:, None] * (s + s.T))


LINE, PLANE = (11,), (4, 5)
PATCH = nl.Patch(0.9, patch_size=3, search_radius=2)


def _position(kernel: Any, shape: Any, boundary: Any, method: str) -> tuple[Callable[[Any], Affinity], Any]:
    grid = nl.Grid(shape, 0.4 if len(shape) == 1 else (0.5, 0.8), boundary)
    return lambda dtype: nl.affinity(kernel, grid, method=method), lambda: position_matrix(kernel, grid)


CASES: dict[str, tuple[Callable[[Any], Affinity], Callable[[], Any]]] = {
    "positions": (
        lambda dtype: nl.affinity(nl.Gaussian(width=2.0), POINTS),
        lambda: gaussian_matrix(POINTS.nodes, 2.0),
    ),
    "queries": (
        lambda dtype: nl.affinity(
            nl.ExpDotProduct(), POINTS, normal((12, 3), 1, dtype), queries=normal((12, 3), 2, dtype)
        ),
        lambda: feature_matrix(nl.ExpDotProduct(), normal((12, 3), 2), normal((12, 3))),
    ),
    "keys": (
        lambda dtype: nl.affinity(nl.ExpDotProduct(), POINTS, normal((12, 3), 1, dtype)),
        lambda: feature_matrix(nl.ExpDotProduct(), normal((12, 3)), normal((12, 3))),
    ),
    "directed": (
        lambda dtype: given(directed_ring(12, 0.3) + 0.05 * np.eye(12, k=-2), dtype, POINTS),
        lambda: directed_ring(12, 0.3) + 0.05 * np.eye(12, k=-2),
    ),
    "tilted": (lambda dtype: given(tilted(), dtype, POINTS), tilted),
    "stencil": _position(nl.Gaussian(width=0.5), LINE, "reflect", "stencil"),
    "stencil 2-D": _position(nl.TopHat(radius=1.0), PLANE, "isolated", "stencil"),
    "dense grid": _position(nl.Laplace(width=0.4), PLANE, "reflect", "dense"),
    "periodic": _position(nl.TopHat(radius=0.9), LINE, "periodic", "convolution"),
    "reflect": _position(nl.Laplace(width=0.4), PLANE, "reflect", "convolution"),
    "isolated": _position(nl.Gaussian(width=0.7), PLANE, "isolated", "convolution"),
    "patch": (
        lambda dtype: nl.affinity(PATCH, nl.Grid((5, 5)), normal((5, 5), 3, dtype)),
        lambda: patch_matrix(PATCH, nl.Grid((5, 5)), normal((5, 5), 3)),
    ),
}
NOT_SYMMETRIC = ("queries", "directed", "tilted")


@cache
def built(name: str, dtype: str = "float64") -> tuple[Affinity, Floats]:
    """Return the affinity of a case, and its transition matrix P from the definitions."""
    build, matrix = CASES[name]
    affinity = build(dtype)
    return affinity, transitions(matrix(), affinity.domain.weights)


def stationary_law(p: Floats) -> Floats:
    """Return the left null vector of P - I by least squares with the sum as a further equation."""
    n = len(p)
    system = np.vstack([p.T - np.eye(n), np.ones(n)])
    return np.asarray(np.linalg.lstsq(system, np.append(np.zeros(n), 1.0))[0])


class MatrixFree(Affinity):
    """The walk to the 2 m nearest neighbours on a periodic grid (never to itself), known by its averages alone."""

    method = "shifts"

    def __init__(self, shape: tuple[int, ...], step: int = 1) -> None:
        super().__init__(nl.Grid(shape, boundary="periodic"), None, symmetric=True, positive_semidefinite=False)
        self._step = step

    def _average(self, u: Any) -> Any:
        axes = range(len(self.domain.shape))
        return np.mean([np.roll(u, s, axis) for axis in axes for s in (-self._step, self._step)], axis=0)

    def _log_degree(self) -> Any:
        return np.zeros(self.domain.shape)

    @property
    def memory_bytes(self) -> int:
        return 0
