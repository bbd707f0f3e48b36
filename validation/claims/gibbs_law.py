"""Noise of the strength (2 / beta)^1/2, white in the measure of the flow, keeps the law exp(-beta E)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from nlflow import (
    AllenCahn,
    E,
    Gaussian,
    GradientFlow,
    Grid,
    J,
    Points,
    affinity,
    from_matrix,
    solve,
)
from nlflow.flows import Ensemble, ExactGaussian, Noise, PlatenWeak2
from validation.harness import FALSE_ALARM, Check, Claim, Context, Outcome, bonferroni, largest

Floats = NDArray[np.float64]

BETA, FIDELITY, WIDTH = 5.0, 0.4, 3.0
SPANS = (0.05, 2.0, 300.0)
SIDE_BY_SIDE = 500


class Ring:
    """E on a periodic grid, with L + lambda and its spectrum from the kernel written out."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        grid = Grid(nodes, boundary="periodic")
        self.weights = affinity(Gaussian(width=WIDTH), grid, method="convolution")
        apart = np.minimum(np.arange(nodes), nodes - np.arange(nodes))
        k = np.exp(-(apart**2) / (2 * WIDTH**2))
        place = (np.arange(nodes)[:, None] - np.arange(nodes)) % nodes
        self.matrix = FIDELITY * np.eye(nodes) + 2 * (k.sum() * np.eye(nodes) - k[place])
        self.values, self.vectors = np.linalg.eigh(self.matrix)

    def flow(self, channels: int, seed: int, path: int) -> GradientFlow:
        energy = E(self.weights, np.zeros((self.nodes, channels)), FIDELITY)
        return GradientFlow(energy) + Noise(beta=BETA, rng=seed, path=path)

    def variances(self, span: float) -> Floats:
        """Return those of the modes at a time after 0: (1 - exp(-2 t a)) / (beta a)."""
        return np.asarray(-np.expm1(-2 * span * self.values) / (BETA * self.values))

    def deviation(self, found: Floats, draws: int, variances: Floats) -> float:
        """Return how far a sample covariance is from that of independent modes, as a p-value of both sides.

        Of white modes the sum of squares of all entries, times the draws, is about N (N + 1) on average: that of
        N (N + 1) / 2 independent normals, those of the diagonal with the variance 2 and the others counted twice.
        """
        white = self.vectors / np.sqrt(variances)
        off = white.T @ found @ white - np.eye(self.nodes)
        total = draws * float(np.sum(off**2)) / 2
        return 2 * min(stats.chi2.cdf(total, self.nodes * (self.nodes + 1) / 2), _above(total, self.nodes))


def _above(total: float, nodes: int) -> float:
    return float(stats.chi2.sf(total, nodes * (nodes + 1) / 2))


def covariances(ring: Ring, spans: list[float], draws: int, seed: int) -> tuple[list[Floats], Floats]:
    """Return covariances after each of the times, and that between the last two."""
    found = [np.zeros((ring.nodes, ring.nodes)) for _ in spans]
    between = np.zeros((ring.nodes, ring.nodes))
    start = np.zeros((ring.nodes, SIDE_BY_SIDE))
    for path in range(draws // SIDE_BY_SIDE):
        flow = ring.flow(SIDE_BY_SIDE, seed, path)
        us = solve(flow, start, t_eval=[0.0, *spans], integrator=ExactGaussian(), energies=False).u[1:]
        for total, u in zip(found, us, strict=True):
            total += u @ u.T / draws
        if len(spans) > 1:
            between += us[-1] @ us[-2].T / draws
    return found, between


def after_long(ring: Ring, draws: int, between: Floats, lag: float) -> float:
    """Return the p-value of <u(t) u(0)> = exp(-t A) / (beta A), from its modes (fluctuation and dissipation)."""
    modes = ring.vectors.T @ between @ ring.vectors
    variance = 1 / (BETA * ring.values)
    expected = np.exp(-lag * ring.values) * variance
    spread = np.sqrt((variance**2 + expected**2) / draws)
    total = float(np.sum(((np.diag(modes) - expected) / spread) ** 2))
    return float(2 * min(stats.chi2.cdf(total, ring.nodes), stats.chi2.sf(total, ring.nodes)))


class Pair:
    """Two nodes of unlike weights in a double well: E written out, and its moments by quadrature."""

    weights = np.array([0.6, 1.7])
    k = np.array([[1.0, 0.3], [0.3, 0.8]])
    strength = 1.5

    def __init__(self, metric: str, beta: float) -> None:
        self.metric, self.beta = metric, beta
        functional = J(from_matrix(self.k, Points([0.0, 1.0], weights=self.weights)))
        wells = AllenCahn(self.strength, interval=(-3.0, 3.0))
        self.flow = GradientFlow(functional, metric, reaction=wells) + Noise(beta=beta, rng=7)

    def density(self) -> tuple[Floats, Floats]:
        """Return places and exp(-beta E) there, of sum 1."""
        x = np.linspace(-4, 4, 801)
        a, b = x[:, None], x
        degrees = 2 * self.k @ self.weights
        mass = self.weights if self.metric == "l2" else self.weights * degrees
        well = self.strength / 4
        energy = self.weights.prod() * self.k[0, 1] * (a - b) ** 2
        energy = energy + well * (mass[0] * (a**2 - 1) ** 2 + mass[1] * (b**2 - 1) ** 2)
        found = np.exp(-self.beta * energy)
        return x, np.asarray(found / found.sum())

    def moments(self) -> Floats:
        """Return <u_1^2>, <u_2^2>, <u_1 u_2> and <u_1^4> by the trapezoidal rule."""
        x, density = self.density()
        a, b = np.meshgrid(x, x, indexing="ij")
        return np.array([(density * f).sum() for f in (a**2, b**2, a * b, a**4)])

    def sampled(self, paths: int, dt: float) -> tuple[Floats, Floats]:
        """Return the same of paths that start with this law and have moved since, and their standard errors."""
        rng = np.random.default_rng(3)
        x, density = self.density()
        cells = np.unravel_index(rng.choice(density.size, paths, p=density.ravel()), density.shape)
        start = np.stack([x[cell] for cell in cells]) + rng.uniform(-0.005, 0.005, (2, paths))
        start = np.clip(start, -3, 3)
        u = solve(self.flow, start, t=4.0, integrator=PlatenWeak2(dt), energies=False).final
        values = np.stack([u[0] ** 2, u[1] ** 2, u[0] * u[1], u[0] ** 4])
        return values.mean(axis=1), values.std(axis=1) / math.sqrt(paths)


def intervals() -> float:
    """Return errors of confidence intervals of paths against SciPy's, relative: Student's, and of the variance."""
    values = np.random.default_rng(6).gamma(2.0, size=(40, 3, 5))
    paths = Ensemble(np.arange(3.0), values, 0, {})
    worst = 0.0
    for level in (0.9, 0.99):
        exact = stats.t.interval(level, 39, loc=values.mean(axis=0), scale=stats.sem(values, axis=0))
        worst = largest(worst, float(np.abs(np.array(paths.interval(level)) / np.array(exact) - 1).max()))
        # Var s² = (μ₄ − σ⁴ (n − 3)/(n − 1)) / n.
        spread, fourth = values.var(axis=0, ddof=1), stats.moment(values, 4, axis=0)
        error = stats.norm.isf((1 - level) / 2) * np.sqrt((fourth - spread**2 * 37 / 39) / 40)
        low, high = paths.interval(level, "variance")
        worst = largest(worst, float(np.abs(low - np.maximum(spread - error, 0)).max()),
                        float(np.abs(high - spread - error).max()))  # fmt: skip
    return worst


def run(context: Context) -> Outcome:
    ring = Ring(context.pick(1000, 60))
    draws, few = context.pick(1_000_000, 10_000), context.pick(100_000, 10_000)
    spans = [*SPANS, SPANS[-1] + 0.3]
    context.step(f"{few} paths of {ring.nodes} nodes")
    found, between = covariances(ring, spans, few, seed=11)
    context.step(f"{draws} draws")
    whole = covariances(ring, [SPANS[-1]], draws, seed=12)[0][0]
    alike = [ring.deviation(c, few, ring.variances(t)) for c, t in zip(found, spans, strict=True)]
    alike.append(ring.deviation(whole, draws, ring.variances(SPANS[-1])))
    stationary = np.linalg.inv(ring.matrix) / BETA
    spread = np.sqrt((stationary**2 + np.outer(np.diag(stationary), np.diag(stationary))) / draws)
    entry = float(np.abs((whole - stationary) / spread).max())
    entries = ring.nodes * (ring.nodes + 1) / 2
    off = context.pick(0.01, 0.03)
    wrong = ring.deviation((1 + off) ** 2 * whole, draws, ring.variances(SPANS[-1]))
    worst, figures = 0.0, dict[str, Any]()
    for metric in ("l2", "degree"):
        context.step(f"two nodes in wells, {metric}")
        pair = Pair(metric, 2.0)
        mean, error = pair.sampled(context.pick(400_000, 10_000), context.pick(0.004, 0.01))
        worst = largest(worst, float(np.abs((mean - pair.moments()) / error).max()))
        figures[metric] = {"found": mean.tolist(), "expected": pair.moments().tolist(), "error": error.tolist()}
    most = float(stats.norm.isf(FALSE_ALARM / 2 / entries))
    checks = [
        Check("covariances at four times and of all draws, p-value", bonferroni(alike), FALSE_ALARM, at_least=True),
        Check("an entry of the stationary one, in standard errors", entry, most),
        Check(
            "⟨u(t) u(0)⟩ against exp(−tA) / βA, p-value",
            after_long(ring, few, between, spans[-1] - spans[-2]), FALSE_ALARM, at_least=True,
        ),
        Check(f"the same with a strength that is wrong by {off:.0%}, p-value", wrong, FALSE_ALARM),
        Check("confidence intervals of paths against SciPy's", intervals(), 1e-10),
        Check("moments of two nodes in wells, in standard errors", worst, float(stats.norm.isf(FALSE_ALARM / 16))),
    ]  # fmt: skip
    return Outcome(checks, {}, {"draws": draws, "nodes": ring.nodes, "p-values": alike, "wells": figures})


CLAIM = Claim(
    name="gibbs-law",
    title="Noise keeps the law exp(−βE)",
    statement=(
        "du = −∇E dt + (2/β)^½ dW with increments of variance dt / m_i at node i, m being the measure of the metric, "
        "has the stationary law exp(−βE): for the quadratic E of a kernel and a fidelity the covariance "
        "(L + λ)⁻¹ / (β w), after steps of any length (1 − exp(−2tA)) / (βA w), and ⟨u(t) u(0)⟩ = exp(−tA) / (βA w), "
        "the theorem of fluctuation and dissipation. L is written out, and covariances of draws are held against it by "
        "the law of Wishart matrices. Two nodes of unlike weights in double wells, drawn from exp(−βE) by quadrature, "
        "keep its moments, in the L² and the degree metric."
    ),
    source="G. A. Pavliotis 2014, Stochastic Processes and Applications, sections 4.5 and 9.3",
    run=run,
)
