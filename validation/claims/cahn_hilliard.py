"""The nonlocal Cahn-Hilliard equation: mass, the law of its energy, steps of any length, and how phases begin."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow import (
    ETD2RK,
    ETD4RK,
    IMEX,
    AllenCahn,
    ConservedMetric,
    ConvexSplitting,
    E,
    Gaussian,
    GradientFlow,
    Grid,
    J,
    Points,
    RungeKutta,
    affinity,
    equilibrium,
    from_matrix,
    solve,
)
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

STRENGTH = 4.0
MOBILITIES = ("own", "other", "m(x)", "m(u)")


def degenerate(u: Floats) -> Floats:
    return np.maximum(1.2 - u * u, 0.0)


class Problem:
    """A conserved flow between scattered nodes, and all that is said of it written out as double sums."""

    def __init__(self, mobility: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        n = 24
        k, other = rng.random((n, n)) ** 2, rng.random((n, n)) ** 2
        self.w, self.mobility = rng.uniform(0.3, 2.0, n) / n, mobility
        self.start, self.m = rng.uniform(-0.9, 0.9, n), rng.uniform(0.1, 2.0, n)
        self.both = k + k.T
        self.carrier = other + other.T if mobility == "other" else self.both
        nodes = Points(np.zeros(n), weights=self.w)
        metric = {
            "own": lambda: ConservedMetric(),
            "other": lambda: ConservedMetric(from_matrix(other, nodes)),
            "m(x)": lambda: ConservedMetric(mobility=self.m),
            "m(u)": lambda: ConservedMetric(mobility=degenerate, largest=1.2),
        }[mobility]()
        self.flow = GradientFlow(J(from_matrix(k, nodes)), metric, reaction=AllenCahn(STRENGTH))

    def mass(self, u: Floats) -> float:
        return float(self.w @ u)

    def energy(self, u: Floats) -> float:
        """Return ¼ Σ w_i w_j K_ij (u_i − u_j)² + Σ w_i s (u_i² − 1)² / 4."""
        pairs = float(np.sum(self.w[:, None] * self.w * self.both * (u[:, None] - u) ** 2)) / 4
        return pairs + STRENGTH / 4 * float(self.w @ (u**2 - 1) ** 2)

    def loss(self, u: Floats) -> float:
        """Return ½ Σ w_i w_j C_ij (m_i + m_j) / 2 (μ_i − μ_j)²."""
        mu = np.sum(self.w * self.both * (u[:, None] - u), axis=1) - STRENGTH * (u - u**3)
        m = {"m(x)": self.m, "m(u)": degenerate(u)}.get(self.mobility, np.ones_like(u))
        between = self.carrier * (m[:, None] + m) / 2
        return 0.5 * float(np.sum(self.w[:, None] * self.w * between * (mu[:, None] - mu) ** 2))

    def balance(self) -> float:
        """Return by how much E(0) − E(t) differs from the integral of the loss, relative."""
        x, weight = np.polynomial.legendre.leggauss(8)
        edges = np.linspace(0, 0.5, 11)
        half = np.diff(edges)[:, None] / 2
        times = ((edges[1:] + edges[:-1])[:, None] / 2 + half * x).ravel()
        found = solve(self.flow, self.start, t_eval=[*times, 0.5], integrator=RungeKutta(1e-11, 1e-13))
        losses = np.array([self.loss(u) for u in found.u[:-1]]).reshape(half.shape[0], -1)
        lost = self.energy(self.start) - self.energy(found.final)
        return abs(float(np.sum(half * weight * losses)) - lost) / lost


def drift(problem: Problem, integrator: Any, end: float) -> float:
    """Return by how much the mass has changed, over Σ w |u|; infinity for a run that failed."""
    found = solve(problem.flow, problem.start, t=end, integrator=integrator)
    if not found.success:
        return np.inf
    return abs(problem.mass(found.final) - problem.mass(problem.start)) / float(problem.w @ np.abs(problem.start))


def onset(nodes: int) -> float:
    """Return how far rates of growth on a circle are from m_k (s − l_k), relative to the fastest."""
    width, strength = 0.05, 3.0
    grid = Grid(nodes, spacing=1 / nodes, boundary="periodic")
    flow = GradientFlow(J(affinity(Gaussian(width=width), grid)), "conserved", reaction=AllenCahn(strength))
    x, found, expected = grid.nodes[:, 0], [], []
    for k in range(1, 9):
        wave = 2 * np.pi * k
        eigenvalue = 2 * width * np.sqrt(2 * np.pi) * (1 - np.exp(-((wave * width) ** 2) / 2))
        small, t = 1e-6 * np.cos(wave * x), 1.0
        moved = solve(flow, small, t=t, integrator=ETD4RK(0.02)).final
        found.append(np.log((moved @ np.cos(wave * x)) / (small @ np.cos(wave * x))) / t)
        expected.append(eigenvalue * (strength - eigenvalue))
    return float(np.abs(np.array(found) - expected).max() / np.max(expected))


def far_beyond(problem: Problem) -> float:
    """Return the largest rise with nothing beside the implicit part: (1 + h M L) (u' − u) = −h M μ, h = 100."""
    n, h = len(problem.w), 100.0
    a = np.diag((problem.both * problem.w).sum(axis=1)) - problem.both * problem.w
    u, energies = problem.start, [problem.energy(problem.start)]
    for _ in range(3):
        mu = a @ u - STRENGTH * (u - u**3)
        u = u - np.linalg.solve(np.eye(n) + h * a @ a, h * a @ mu)
        energies.append(problem.energy(u))
    return float(np.diff(energies).max())


def kept_mean() -> float:
    """Return errors of limits of E-flows that conserve Σ w u: L u + φ (u − f) is one constant there, a dense system."""
    rng, n = np.random.default_rng(31), 14
    k, w, (f, start) = rng.random((n, n)), rng.uniform(0.3, 2.0, n) / n, rng.standard_normal((2, n))
    links = (k + k.T) * w
    told = ConservedMetric(from_matrix(k, Points(np.zeros(n), weights=w))).force_bound(1.0)
    worst = abs(told / (2 * float(links.sum(axis=1).max())) - 1)  # by Gershgorin's circles
    for phi in (0.4, rng.uniform(0.1, 2.0, n)):
        flow = GradientFlow(E(from_matrix(k, Points(np.zeros(n), weights=w)), f, phi), "conserved")
        a = np.diag(links.sum(axis=1) + phi) - links
        exact = np.linalg.solve(
            np.block([[a, -np.ones((n, 1))], [w[None], np.zeros((1, 1))]]), np.append(phi * f, w @ start)
        )
        found = equilibrium(flow, start, rtol=1e-12).u
        potential = a @ start - phi * f  # μ = Lu + φ (u − f)
        moved = (links - np.diag(links.sum(axis=1))) @ potential
        worst = largest(worst, float(np.abs(found - exact[:n]).max()),
                        float(np.abs(flow.velocity(start) - moved).max() / np.abs(moved).max()))  # fmt: skip
    return worst


def run(context: Context) -> Outcome:
    missed, lost, rises, beyond = 0.0, 0.0, -np.inf, -np.inf
    lengths = context.pick([1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e4], [1.0, 1e4])
    for seed in range(context.pick(3, 1)):
        for mobility in MOBILITIES:
            context.step(f"{mobility}, seed {seed}")
            problem = Problem(mobility, seed)
            missed = largest(missed, problem.balance())
            methods = [RungeKutta(), IMEX(0.01), ConvexSplitting(0.01)]
            methods += [ETD2RK(0.01), ETD4RK(0.01)] if problem.flow.symmetric else []
            lost = largest(lost, *(drift(problem, method, context.pick(10.0, 0.1)) for method in methods))
            first = problem.energy(problem.start)
            for h in lengths:
                found = solve(problem.flow, problem.start, t_eval=h * np.arange(16), integrator=ConvexSplitting(h))
                energies = np.array([problem.energy(u) for u in found.u]) if found.success else np.array([0, np.inf])
                rises = largest(rises, float(np.diff(energies).max()) / first)
                lost = largest(lost, abs(problem.mass(found.final - problem.start)) / problem.w.sum())
            beyond = largest(beyond, far_beyond(problem) / first) if mobility == "own" else beyond
    context.step("rates of growth")
    checks = [
        Check("E(0) − E(t) against the integral of ½ Σ w w C m |μ_i − μ_j|², relative", missed, 1e-8),
        Check("limits of E-flows with the mean of the start, against dense systems", kept_mean(), 1e-9),
        Check("mass: largest change over Σ w |u|", lost, 1e-13),
        Check("ConvexSplitting: largest rise from step to step, over E(0)", rises, 1e-13),
        Check("the same without b, h = 100: largest rise", beyond, 1e-3, at_least=True),
        Check("rates of growth against m_k (s − l_k), relative", onset(256), 1e-6),
    ]
    return Outcome(checks)


CLAIM = Claim(
    name="cahn-hilliard",
    title="The nonlocal Cahn-Hilliard flow conserves mass and dissipates",
    statement=(
        "The flow du/dt = −M μ with μ = Lu + F'(u) conserves Σ w u and loses dE/dt = −½ Σ w_i w_j C_ij (m_i + m_j) / 2 "
        "|μ_i − μ_j|², for M = L, for another L, and for mobilities m(x) and m(u). Convex splitting, (1 + h M (L + b)) "
        "(u' − u) = −h M μ, lowers E for steps of any length, also where values leave [−1, 1]; all energies are double "
        "sums written out here. Without b long steps raise it. From u = 0 waves cos(kx) grow at the rate m_k (s − l_k) "
        "with l_k = 2 σ √(2π) (1 − exp(−k² σ² / 2)) for a Gaussian of width σ on the line."
    ),
    source="Gajewski and Zacharias 2003, doi 10.1016/S0022-247X(02)00425-0; D. J. Eyre 1998, doi 10.1557/PROC-529-39",
    run=run,
)
