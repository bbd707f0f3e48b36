"""Extreme problems with answers of 50 digits: everything here is written from the formulas with mpmath.

Tolerances are counted in units of the rounding of a dtype and derived from how a quantity depends on its logits; see
`Case.tolerance`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import mpmath
import numpy as np
from mpmath import mp

import nlflow as nl

Floats = np.ndarray[Any, np.dtype[np.float64]]

mp.dps = 50
GUARD = 8
"""Roundings of the last steps of any result: a quotient, a conversion, a product with a scale."""


def exact(values: Any) -> list[Any]:
    """Return the numbers of an array of floats, exactly."""
    return [mpmath.mpf(float(value)) for value in np.ravel(values)]


def distance(x: Any, y: Any) -> Any:
    return mpmath.sqrt(mpmath.fsum((a - b) ** 2 for a, b in zip(x, y, strict=True)))


def logit(kernel: Any, x: list[Any], y: list[Any]) -> Any:
    """Return log k(x, y) without the amplitude, to 50 digits; None where k is 0."""
    if isinstance(kernel, nl.ExpDotProduct):
        scale = 1 / mpmath.sqrt(len(x)) if kernel.scale is None else mpmath.mpf(kernel.scale)
        return scale * mpmath.fdot(x, y)
    r = distance(x, y)
    if isinstance(kernel, nl.Gaussian):
        return -((r / mpmath.mpf(kernel.width)) ** 2) / 2
    if isinstance(kernel, nl.Laplace):
        return -r / mpmath.mpf(kernel.width)
    assert isinstance(kernel, nl.TopHat)
    return mpmath.mpf(0) if r <= mpmath.mpf(kernel.radius) * (1 + mpmath.mpf("1e-12")) else None


@dataclass(frozen=True)
class Case:
    """A kernel between nodes, far out in one way, and what it does to signals to 50 digits."""

    name: str
    kernel: Any
    features: Any
    queries: Any = None
    weights: Any = None
    dtype: Any = np.float64
    tags: frozenset[str] = field(default_factory=frozenset)

    def of(self, dtype: Any) -> Case:
        return replace(self, dtype=np.dtype(dtype))

    def __str__(self) -> str:
        return f"{self.name}-{np.dtype(self.dtype).name}"

    @property
    def n(self) -> int:
        return len(self.features)

    @property
    def w(self) -> Floats:
        return np.full(self.n, 1 / self.n) if self.weights is None else np.asarray(self.weights, dtype=float)

    def table(self, name: str = "features") -> Any:
        """Return features (or queries) in the dtype of the case, shape (N, d)."""
        values = getattr(self, name)
        if values is None:
            return None
        with np.errstate(over="ignore", under="ignore"):
            return np.asarray(values, dtype=float).reshape(self.n, -1).astype(self.dtype)

    @property
    def fits(self) -> bool:
        """Whether the dtype can hold the features at all; in half precision 1e-12 is 0 and 1e12 infinite."""
        wanted, held = np.asarray(self.features, dtype=float).reshape(self.n, -1), self.table().astype(float)
        return bool(np.all(np.isfinite(held)) and np.all((held != 0) == (wanted != 0)))

    @property
    def domain(self) -> nl.Points:
        return nl.Points(np.arange(float(self.n)), self.w)

    def affinity(self, method: str = "dense", **options: Any) -> Any:
        return nl.affinity(
            self.kernel, self.domain, self.table(), queries=self.table("queries"), method=method, **options
        )

    # ---- to 50 digits

    @cached_property
    def logits(self) -> list[list[Any]]:
        """log k_ij with the amplitude; None for -inf."""
        keys = [exact(row) for row in self.table()]
        queries = keys if self.queries is None else [exact(row) for row in self.table("queries")]
        amplitude = mpmath.log(mpmath.mpf(self.kernel.amplitude))
        rows = [[logit(self.kernel, x, y) for y in keys] for x in queries]
        return [[None if value is None else value + amplitude for value in row] for row in rows]

    @cached_property
    def k(self) -> Any:
        """The affinities k_ij; numbers of mpmath have exponents of any size."""
        return mpmath.matrix([[0 if value is None else mpmath.exp(value) for value in row] for row in self.logits])

    def degrees(self, k: Any) -> list[Any]:
        w = exact(self.w)
        return [mpmath.fdot(w, k[i, :]) for i in range(self.n)]

    def log_degree(self) -> Floats:
        return np.array([float(mpmath.log(d)) for d in self.degrees(self.k)])

    def transitions(self, k: Any = None) -> Any:
        """P of an affinity, of k itself by default."""
        k = self.k if k is None else k
        w, d = exact(self.w), self.degrees(k)
        return mpmath.matrix([[w[j] * k[i, j] / d[i] for j in range(self.n)] for i in range(self.n)])

    def average(self, u: Any) -> Floats:
        return floats(self.transitions() * columns(u)).reshape(np.shape(u))

    @property
    def symmetrized(self) -> Any:
        return self.k + self.k.T

    def dirichlet(self, u: Any) -> Any:
        """J(u) = 1/4 sum w_i w_j K_ij |u_i - u_j|^2, a number of mpmath."""
        w, both, v = exact(self.w), self.symmetrized, columns(u)
        terms = (
            w[i] * w[j] * both[i, j] * sum((v[i, c] - v[j, c]) ** 2 for c in range(v.cols))
            for i in range(self.n)
            for j in range(self.n)
        )
        return mpmath.fsum(terms) / 4

    # ---- what float arithmetic may lose

    @property
    def steepness(self) -> float:
        """How many roundings of 1 a logit that counts is off.

        A dot product of d terms is off by (d + 2) roundings of its largest possible size. A radial logit l is off by a
        few of its own, |l| eps, and its weight exp(l) is at most that of the node itself, exp(0): |l| exp(l) < 1.
        """
        if not isinstance(self.kernel, nl.ExpDotProduct):
            return float(self.n * GUARD)
        keys = self.table().astype(float)
        queries = keys if self.queries is None else self.table("queries").astype(float)
        scale = 1 / math.sqrt(keys.shape[1]) if self.kernel.scale is None else abs(self.kernel.scale)
        size = scale * np.linalg.norm(keys, axis=1).max() * np.linalg.norm(queries, axis=1).max()
        return float((keys.shape[1] + 2) * 2 * size)

    def tolerance(self, dtype: Any = None) -> float:
        """Return the relative error that is allowed: logits in float64, sums of N terms and results in `dtype`."""
        eps = float(np.finfo(self.dtype if dtype is None else dtype).eps)
        return float(np.finfo(float).eps) * self.steepness + eps * (self.n + GUARD)


def columns(u: Any) -> Any:
    values = np.asarray(u, dtype=float)
    return mpmath.matrix([exact(row) for row in values.reshape(len(values), -1)])


def floats(matrix: Any) -> Floats:
    return np.array([[float(matrix[i, j]) for j in range(matrix.cols)] for i in range(matrix.rows)])


# ---- the cases

_LINE = [[0.0], [1.0], [2.5], [2.75], [4.0]]
_PLANE = [[100.0, 0.0], [0.0, 100.0], [70.0, -70.0], [-100.0, 0.0], [99.5, 1.0], [0.0, 0.0]]
_OTHER = [[-100.0, 3.0], [100.0, 100.0], [1.0, 0.0], [50.0, -100.0], [0.0, -99.0], [100.0, 0.0]]


def _scaled(points: Any, factor: float) -> Any:
    return (np.asarray(points) * factor).tolist()


CASES = (
    Case("logits", nl.ExpDotProduct(scale=1.0), _PLANE, tags=frozenset({"wide range"})),
    Case("queries", nl.ExpDotProduct(scale=1.0), _PLANE, _OTHER, tags=frozenset({"wide range"})),
    Case("negative", nl.ExpDotProduct(scale=-1.0), _PLANE, tags=frozenset({"wide range"})),
    Case("narrow", nl.Gaussian(width=1e-12), _LINE, tags=frozenset({"isolated"})),
    Case("wide", nl.Gaussian(width=1e12), _LINE),
    Case("tiny units", nl.Gaussian(width=1e-12), _scaled(_LINE, 1e-12)),
    Case("huge units", nl.Gaussian(width=1e12), _scaled(_LINE, 1e12)),
    Case("narrow Laplace", nl.Laplace(width=1e-12), _LINE, tags=frozenset({"isolated"})),
    Case("wide Laplace", nl.Laplace(width=1e12), _LINE),
    Case("narrow top hat", nl.TopHat(radius=1e-12), _LINE, tags=frozenset({"isolated"})),
    Case("wide top hat", nl.TopHat(radius=1e12), _LINE),
    Case("subnormal weights", nl.Gaussian(width=1.0), _LINE, weights=[1e-310] * 5),
    Case("one subnormal weight", nl.Gaussian(width=1.0), _LINE, weights=[1.0, 1.0, 1e-310, 2.0, 0.5]),
    Case("light node", nl.Gaussian(width=1.0), [[0.0], [0.5], [1000.0]], weights=[1.0, 1.0, 1e-139]),
    Case("subnormal affinities", nl.Gaussian(width=1.0), [[0.0], [0.5], [38.0], [37.75], [38.5]]),
    Case("tiny amplitude", nl.Gaussian(width=1.0, amplitude=1e-300), _LINE),
    Case("huge amplitude", nl.Gaussian(width=1.0, amplitude=1e300), _LINE),
    Case("one node", nl.Gaussian(width=1.0), [[3.0]], tags=frozenset({"isolated"})),
    Case("one token", nl.ExpDotProduct(scale=1.0), [[100.0, 0.0]], tags=frozenset({"isolated"})),
    Case("two nodes", nl.Gaussian(width=1.0), [[0.0], [1.0]]),
    Case("two tokens", nl.ExpDotProduct(scale=1.0), [[100.0, 0.0], [0.0, -100.0]], tags=frozenset({"wide range"})),
    Case("duplicates", nl.Gaussian(width=1e-12), [[1.0], [1.0], [2.0], [2.0], [2.0]], tags=frozenset({"apart"})),
    Case("all alike", nl.Laplace(width=1e-12), [[7.0]] * 4),
    Case("two clusters", nl.Gaussian(width=1.0), [[0.0], [0.5], [1e4], [10000.5]], tags=frozenset({"apart"})),
    Case("compact", nl.TopHat(radius=1.0), [[0.0], [1.0], [5.0], [5.5], [6.0]], tags=frozenset({"apart"})),
)


def case(name: str, dtype: Any = np.float64) -> Case:
    return next(item for item in CASES if item.name == name).of(dtype)


def signals(n: int, dtype: Any) -> dict[str, Any]:
    """Return signals of all sizes that a dtype holds, as a table with a channel for each."""
    info = np.finfo(dtype)
    shape = np.random.default_rng(3).standard_normal(n)
    huge = 1e300 if np.dtype(dtype) == np.float64 else 1e37
    with np.errstate(under="ignore"):  # the smallest are subnormal
        return {
            "usual": shape.astype(dtype),
            "constant": np.full(n, 0.1, dtype=dtype),
            "zero": np.zeros(n, dtype=dtype),
            "huge": (shape * huge).astype(dtype),
            "tiny": (shape / huge).astype(dtype),
            "subnormal": (shape * float(info.smallest_normal) / 1024).astype(dtype),
        }
