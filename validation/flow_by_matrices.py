"""A linear flow with a reaction, a source and held nodes, as the package has it and as whole matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag, expm

from nlflow import (
    AllenCahn,
    ConservedMetric,
    Constraint,
    E,
    Gaussian,
    GradientFlow,
    Grid,
    J,
    Points,
    affinity,
    from_matrix,
)

Floats = NDArray[np.float64]

N, T, H, STRENGTH = 6, 0.3, 0.11, 0.4
MASS = {"l2": 0.0, "degree": 1.0, "conserved": 0.0}  # the power of the degree in the measure


def apart(found: Any, wanted: Any) -> float:
    wanted = np.asarray(wanted)
    return float(np.abs(np.asarray(found) - wanted).max() / max(float(np.abs(wanted).max()), 1e-3))


def phi(k: int, z: Floats) -> Floats:
    """Return φ_k(z) of a matrix: a block of the exponential of a larger one (Sidje 1998, doi 10.1145/285861.285868)."""
    n = len(z)
    whole = np.kron(np.eye(k + 1, k=1), np.eye(n))
    whole[:n, :n] = z
    return np.asarray(expm(whole)[:n, k * n :])


class Problem:
    """A flow of two channels and its parts as matrices of node and channel: u' = B (−A u + F(t) + R(u) + g(t)).

    `measure` is that of each unknown; `free` says which of them move.
    """

    def __init__(self, where: str, metric: str, fidelity: str, *, held: bool = False, drives: bool = True) -> None:
        rng = np.random.default_rng([17, len(where), len(metric), len(fidelity)])
        k, w = rng.random((N, N)) ** 2, rng.uniform(0.5, 2.0, N) / N
        weights: Any = from_matrix(3.1 * k, Points(np.zeros(N), weights=w))
        links = 3.1 * (k + k.T) * w
        if where == "ring":
            weights, w = (
                affinity(Gaussian(0.9, amplitude=3.1), Grid(N, spacing=0.7, boundary="periodic")),
                np.full(N, 0.7),
            )
            apart = 0.7 * (np.arange(N)[:, None] - np.arange(N)).astype(float)
            turns = [np.exp(-((apart + 0.7 * N * turn) ** 2) / (2 * 0.81)) for turn in range(-5, 6)]
            links = 6.2 * 0.7 * np.sum(turns, axis=0)
        self.weights, self.w, self.links = weights, w, links
        degree = links.sum(axis=1)
        self.degree = degree
        lowered = np.diag(degree) - links
        self.start, self.f, self.place = rng.uniform(-0.9, 0.9, (3, N, 2))
        strengths: Any = {"none": 0.0, "number": 0.7, "nodes": rng.uniform(0.2, 1.0, N)}.get(fidelity)
        if fidelity == "matrices":
            roots = rng.uniform(-1, 1, (N, 2, 2))
            strengths = roots @ roots.transpose(0, 2, 1) + 0.1 * np.eye(2)
        blocks = strengths if fidelity == "matrices" else np.multiply.outer(np.broadcast_to(strengths, N), np.eye(2))
        self.a = np.kron(lowered if MASS[metric] == 0 else lowered / degree[:, None], np.eye(2))
        self.phi = block_diag(*blocks)
        self.moving: Any = np.eye(2 * N)
        self.largest = 1.0
        inner: Any = metric
        if metric == "conserved":
            m: Floats = np.full(N, 0.6) if where == "ring" else rng.uniform(0.3, 1.0, N)
            both = links * (m[:, None] + m) / 2
            self.moving = np.kron(np.diag(both.sum(axis=1)) - both, np.eye(2))
            self.largest = float(m.max())
            inner = ConservedMetric(mobility=0.6 if where == "ring" else m)
        self.m = np.repeat(w * degree ** MASS[metric], 2)
        self.free = np.repeat(np.arange(N) % 3 != 1, 2) if held else np.ones(2 * N, bool)
        self.held_at = rng.uniform(-0.9, 0.9, (np.count_nonzero(~self.free) // 2, 2))
        self.drives, self.timed, self.metric = drives, drives, metric
        measure = "degree" if metric == "degree" else "l2"
        energy = J(weights) if fidelity == "none" else E(weights, self.f, strengths, measure=measure)
        terms: dict[str, Any] = {}
        if drives:
            terms = {"reaction": AllenCahn(STRENGTH, interval=(-2.0, 2.0)), "source": self.source}
            if fidelity != "none":
                terms["observed"] = self.seen
        if held:
            values = self.values if drives else self.held_at
            terms["constraint"] = Constraint(~self.free[::2], values)
        self.flow = GradientFlow(energy, inner, **terms)

    # ---- what depends on time

    def source(self, t: float) -> Floats:
        return np.asarray(np.cos(3 * t + 0.2) * self.place)

    def seen(self, t: float) -> Floats:
        return np.asarray((1 + 0.5 * np.sin(2 * t)) * self.f)

    def values(self, t: float) -> Floats:
        return np.asarray((1 + t) * self.held_at)

    # ---- its parts, of vectors

    def whole(self, t: float, u: Floats) -> Floats:
        """Return a vector with the values that are held."""
        u = u.copy()
        u[~self.free] = (self.values(t) if self.drives else self.held_at).ravel()
        return u

    def reaction(self, u: Floats) -> Floats:
        return STRENGTH * (u - u**3) if self.drives else 0 * u

    def force(self, t: float, u: Floats) -> Floats:
        """Return −dE/du in the densities of the measure."""
        f = (self.seen(t) if self.drives else self.f).ravel()
        push = self.source(t).ravel() if self.drives else 0.0
        return np.asarray(-self.a @ u + self.phi @ (f - u) + self.reaction(u) + push)

    def velocity(self, t: float, u: Floats) -> Floats:
        return np.where(self.free, self.moving @ self.force(t, self.whole(t, u)), 0.0)

    @property
    def stiff(self) -> Floats:
        """A between free nodes."""
        return np.asarray((self.moving @ (self.a + self.phi)) * np.outer(self.free, self.free))

    def pulled(self, t: float) -> Floats:
        """Return φ f, and what held values do."""
        f = (self.seen(t) if self.drives else self.f).ravel()
        held = self.whole(t, np.zeros(2 * N))
        return np.where(self.free, self.moving @ (self.phi @ f - (self.a + self.phi) @ held), 0.0)

    def driven(self, t: float, u: Floats) -> Floats:
        push = self.source(t).ravel() if self.drives else 0 * u
        return np.where(self.free, self.moving @ (self.reaction(self.whole(t, u)) + push), 0.0)

    def beside(self, t: float, u: Floats) -> Floats:
        return self.pulled(t) + self.driven(t, u)
