"""The fidelity up to which the NeuTRENO step is stable."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow import (
    AllenCahn,
    AttentionFlow,
    E,
    ExpDotProduct,
    ExplicitEuler,
    Gaussian,
    GradientFlow,
    Grid,
    NeutrenoStep,
    Points,
    SemiImplicit,
    StabilityError,
    Status,
    TopHat,
    affinity,
    from_matrix,
    largest_stable_fidelity,
)
from nlflow.plotting import new_figure, phase_figure
from nlflow.studies.settings import solve_to_end
from validation.harness import PAPER, Check, Claim, Context, Outcome, largest, smallest

Floats = NDArray[np.float64]


def symmetric_cases(n: int) -> dict[str, Any]:
    """Return symmetric affinities whose smallest eigenvalue runs from 0 down to nearly -1."""
    rng = np.random.default_rng(8)
    keys = rng.standard_normal((n, 8))
    ring = np.roll(np.eye(n), 1, axis=1) + np.roll(np.eye(n), -1, axis=1)
    points = Points(np.zeros(n))
    cases = {
        "Gaussian": affinity(Gaussian(2.0), Grid(n, boundary="periodic")),
        "attention, q = k": affinity(ExpDotProduct(), points, keys),
        "top-hat, radius 2": affinity(TopHat(2.0), Grid(n, boundary="periodic")),
        "top-hat, radius 8": affinity(TopHat(8.0), Grid(n, boundary="isolated")),
    }
    for loop in (2.0, 1.0, 0.5, 0.2, 0.05):
        cases[f"ring with self-weight {loop:g}"] = from_matrix(ring + loop * np.eye(n), points)
    return cases


def asymmetric_cases(n: int) -> dict[str, Any]:
    """Return chains with complex eigenvalues."""
    rng = np.random.default_rng(9)
    q, k = 1.5 * rng.standard_normal((2, n, 8))
    points = Points(np.zeros(n))
    one_way = np.roll(np.eye(n), 1, axis=1)
    return {
        "attention, q ≠ k": affinity(ExpDotProduct(), points, k, queries=q),
        "one-way ring with self-weight 1": from_matrix(one_way + np.eye(n), points),
        "one-way ring with self-weight 4": from_matrix(one_way + 4 * np.eye(n), points),
    }


def growth(matrix: Floats, fidelity: float, steps: int) -> float:
    """Return the measured growth of the distance to the equilibrium a step, over the second half of many steps."""
    rng = np.random.default_rng(10)
    v = rng.standard_normal(len(matrix))  # a disturbance: f drops out of the difference of two runs
    logs, total = [], 0.0
    for _ in range(steps):
        v = matrix @ v - fidelity * v
        size = float(np.linalg.norm(v))
        total += np.log(size)
        logs.append(total)
        v /= size
    half = steps // 2
    return float(np.exp((logs[-1] - logs[half - 1]) / (steps - half)))


def limits_of_steps() -> float:
    """Return relative errors of limits, 2 / (ρ(A) + b) and 2 / (ρ(r(I − P)) − φ), with a reaction of slopes up to b."""
    rng, n, worst = np.random.default_rng(17), 12, 0.0
    k, w, held = rng.random((n, n)) + 0.1, rng.uniform(0.5, 2, n) / n, rng.uniform(0.2, 1.5, n)
    weights = from_matrix(k, Points(np.zeros(n), weights=w))
    links = (k + k.T) * w
    degree = links.sum(axis=1)
    for metric in ("l2", "degree"):
        moved = np.eye(n) * degree[:, None] - links if metric == "l2" else np.eye(n) - links / degree[:, None]
        for fidelity in (0.6, held):
            phi = np.broadcast_to(fidelity, n) if metric == "l2" else fidelity / degree
            flow = GradientFlow(E(weights, np.zeros(n), fidelity), metric)
            rho = float(np.linalg.eigvals(moved + np.diag(phi)).real.max())
            least = float(np.linalg.eigvals(moved).real.max()) - float(np.min(phi))
            steep = flow + AllenCahn(0.7)  # slopes from −2 s to s
            worst = largest(
                worst,
                abs(ExplicitEuler(0.1).stability_limit(flow) * rho / 2 - 1),
                abs(ExplicitEuler(0.1).stability_limit(steep) * (rho + 1.4) / 2 - 1),
                abs(SemiImplicit(0.1).stability_limit(flow) * least / 2 - 1) if least > 0 else 0.0,
            )
    return worst


def run(context: Context) -> Outcome:
    n, steps = context.pick(64, 40), context.pick(20_000, 4_000)
    limit_error, above, below, wrong = 0.0, np.inf, 0.0, 0
    phase: list[tuple[float, float, float]] = []
    for name, weights in symmetric_cases(n).items():
        context.step(name)
        matrix = _matrix(weights)
        mu_min = float(np.linalg.eigvals(matrix).real.min())
        limit = largest_stable_fidelity(weights)
        limit_error = largest(limit_error, abs(limit - 1 - mu_min))
        above = smallest(above, growth(matrix, 1.01 * limit, steps))
        below = largest(below, growth(matrix, 0.99 * limit, steps))
        wrong += _refused_wrongly(weights, limit, n)
        for fidelity in np.linspace(0.05, 2.0, context.pick(40, 14)):
            phase.append((mu_min, float(fidelity), growth(matrix, float(fidelity), 400)))
    outside, inside, asymmetric_error = np.inf, 0.0, 0.0
    for name, weights in asymmetric_cases(n).items():
        context.step(name)
        matrix, limit = _matrix(weights), largest_stable_fidelity(weights)
        values = np.linalg.eigvals(matrix)
        radius = float(np.abs(values - limit).max())
        asymmetric_error = largest(asymmetric_error, abs(radius - 1))
        outside = smallest(outside, growth(matrix, 1.01 * limit, steps))
        inside = largest(inside, growth(matrix, 0.99 * limit, steps))
        wrong += _refused_wrongly(weights, limit, n)
    told = limits_of_steps()
    mu, fidelity, grown = map(np.array, zip(*phase, strict=True))
    predicted = np.maximum(np.abs(1 - fidelity), np.abs(mu - fidelity))
    far = np.abs(predicted - 1) > 0.02  # next to the boundary 400 steps do not tell
    misplaced = int(np.sum((grown[far] < 1) != (predicted[far] < 1)))
    checks = [
        Check("symmetric k: limit against 1 + μ_min by NumPy", limit_error, 1e-8),
        Check("1 % above: smallest growth a step", above, 1.0 + 1e-4, at_least=True),
        Check("1 % below: largest growth a step", below, 1.0 - 1e-4),
        Check("q ≠ k: ρ(P − λ̃I) at the limit, minus 1", asymmetric_error, 1e-8),
        Check("q ≠ k, 1 % above: smallest growth a step", outside, 1.0 + 1e-4, at_least=True),
        Check("q ≠ k, 1 % below: largest growth a step", inside, 1.0 - 1e-4),
        Check("limits of explicit and semi-implicit steps against 2 / (ρ + b), relative", told, 1e-8),
        Check("steps refused below the limit or run above it", wrong, 0),
        Check(f"points of the phase diagram on the wrong side (of {int(far.sum())})", misplaced, 0),
    ]
    figures = {
        "Measured growth of a disturbance in one NeuTRENO step; the line is the limit λ̃ = 1 + μ_min.": phase_figure(
            mu, fidelity, grown
        ),
        "Distance of tokens to their equilibrium after 12 and 24 NeuTRENO layers over λ̃, attention with q = k.": (
            _depth_figure(n)
        ),
    }
    return Outcome(checks, figures)


def _matrix(weights: Any) -> Floats:
    return np.asarray(weights.average(np.eye(weights.domain.size)))


def _refused_wrongly(weights: Any, limit: float, n: int) -> int:
    """Count steps of `solve` that are refused below the limit or let through above it."""
    f = np.random.default_rng(11).standard_normal(n)
    wrong = 0
    flow = AttentionFlow(weights, f, 0.99 * limit)
    wrong += solve_to_end(flow, t=50, integrator=NeutrenoStep(), energies=False).status is not Status.FINISHED
    try:
        solve_to_end(AttentionFlow(weights, f, 1.01 * limit), t=1, integrator=NeutrenoStep(), energies=False)
        wrong += 1
    except StabilityError:
        pass
    return wrong


def _depth_figure(n: int) -> object:
    rng = np.random.default_rng(12)
    keys, values = rng.standard_normal((n, 8)), rng.standard_normal((n, 16))
    weights = affinity(ExpDotProduct(), Points(np.zeros(n)), keys)
    matrix = _matrix(weights)
    fidelities = np.linspace(0.0, 1.6, 81)
    figure = new_figure(7.5, 3.8, dpi=110)
    axis = figure.subplots()
    for depth, colour in ((12, "#0b5394"), (24, "#d1711c")):
        sizes = []
        for fidelity in fidelities:
            u = values
            for _ in range(depth):
                u = matrix @ u + fidelity * (values - u)
            limit = np.linalg.solve((1 + fidelity) * np.eye(n) - matrix, fidelity * values) if fidelity else u.mean(0)
            sizes.append(np.linalg.norm(u - limit) / np.linalg.norm(values))
        axis.semilogy(fidelities, sizes, color=colour, label=f"{depth} layers")
    axis.axvline(
        largest_stable_fidelity(weights), color="#b03a2e", linestyle="--", linewidth=1, label="limit 1 + μ_min"
    )
    axis.set_xlabel("λ̃")
    axis.set_ylabel("distance to the equilibrium\nover the size of f")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    return figure


CLAIM = Claim(
    name="stability-limit",
    title="The NeuTRENO step is stable for λ̃ < 1 + μ_min(P)",
    statement=(
        "u ← Pu + λ̃ (f − u) converges exactly when ρ(P − λ̃I) < 1: for symmetric k, 0 < λ̃ < 1 + μ_min(P); for q ≠ k "
        "below the smallest Re μ + √(1 − (Im μ)²) over the eigenvalues. Disturbances are followed just above and just "
        "below the limit. The paper's ablation (Table 13) has its models collapse just above λ̃ = 1, which is the limit "
        "where μ_min is 0, as for exp(kᵀk/√d) with many tokens: there P has no negative eigenvalue."
    ),
    source=f"derived; {PAPER}, eq. 22-28 and Table 13",
    run=run,
)
