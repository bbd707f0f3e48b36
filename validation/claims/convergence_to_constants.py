"""Remark 1: the J-flow runs to a constant, exponentially and at the rate of the spectral gap."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nlflow import (
    Affinity,
    AttentionFlow,
    AttentionStep,
    E,
    ExpDotProduct,
    Exponential,
    Gaussian,
    GradientFlow,
    Grid,
    J,
    Laplace,
    Patch,
    Points,
    TopHat,
    affinity,
)
from nlflow.domains import Domain
from nlflow.flows.spectrum import relaxation_rate
from nlflow.kernels import Kernel
from nlflow.plotting import Course, decay_figure
from nlflow.studies.settings import solve_to_end
from validation.harness import PAPER, Check, Claim, Context, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

EXACT = Exponential(tol=1e-14)


@dataclass(frozen=True)
class Case:
    """An affinity of the package, beside the matrix k_ij and the weights written out plainly.

    Layers use the affinity that the package chooses. Flows use a dense one throughout: they take thousands of averages,
    and the start of a stencil's threads is what each of them would cost on so few nodes.
    """

    name: str
    kernel: Kernel
    domain: Domain
    features: Floats | None
    k: Floats
    w: Floats

    @cached_property
    def dense(self) -> Affinity:
        return affinity(self.kernel, self.domain, self.features, method="dense")

    @cached_property
    def chosen(self) -> Affinity:
        return affinity(self.kernel, self.domain, self.features)

    def mass(self, metric: str) -> Floats:
        """Return the measure in which the mean is conserved, w or w d, normalized."""
        m = self.w if metric == "l2" else self.w * (2 * self.k @ self.w)
        return np.asarray(m / m.sum())

    def modes(self, metric: str) -> tuple[Floats, Floats]:
        """Return eigenvalues of r (I − P), increasing, and its eigenvectors as columns."""
        d = 2 * self.k @ self.w
        root = np.sqrt(self.w) if metric == "l2" else np.sqrt(self.w * d)
        # √m A / √m is symmetric for A = D − 2kW and for A = I − D⁻¹ 2kW.
        scale = np.ones_like(d) if metric == "l2" else 1 / np.sqrt(d)
        weighted = scale * np.sqrt(self.w)
        matrix = np.diag(d * scale**2) - 2 * weighted[:, None] * self.k * weighted
        values, vectors = np.linalg.eigh(matrix)
        return values, vectors / root[:, None]

    def distance(self, u: Floats, mean: Floats, metric: str) -> float:
        return float(np.sqrt(np.sum(self.mass(metric)[:, None] * (u - mean) ** 2)))


def cases(rng: np.random.Generator) -> list[Case]:
    x = rng.random((70, 2)) * [1.0, 0.5]  # longer than wide, so that one mode is the slowest
    w = rng.uniform(0.3, 2.0, 70) / 70
    points = Points(x, weights=w)
    apart = np.sqrt(((x[:, None] - x[None]) ** 2).sum(axis=2))
    line = Grid(90, spacing=1 / 90, boundary="isolated")
    gap = np.abs(np.subtract.outer(np.arange(90), np.arange(90))) / 90
    tokens = rng.standard_normal((60, 4)) * [1.1, 0.8, 0.7, 0.6]
    signal = np.cumsum(rng.standard_normal(64)) * 0.3
    shift = np.arange(64)
    patches = np.stack([signal[(shift + o) % 64] for o in (-1, 0, 1)], axis=1)
    alike = np.exp(-((patches[:, None] - patches[None]) ** 2).mean(axis=2) / 1.5**2)
    around = np.abs(np.subtract.outer(shift, shift))
    near = np.minimum(around, 64 - around) <= 8
    even, token_points, circle = np.full(90, 1 / 90), Points(np.zeros(60)), Grid(64, boundary="periodic")
    return [
        Case("Gaussian", Gaussian(width=0.25), points, None, np.exp(-(apart**2) / 2 / 0.25**2), w),
        Case("Laplace", Laplace(width=0.15), line, None, np.exp(-gap / 0.15), even),
        Case("top-hat", TopHat(radius=0.2), line, None, (gap <= 0.2 + 1e-9).astype(float), even),
        Case("dot product", ExpDotProduct(), token_points, tokens, np.exp(tokens @ tokens.T / 2), np.full(60, 1 / 60)),
        Case("patch", Patch(width=1.5, patch_size=3, search_radius=8), circle, signal, alike * near, np.ones(64)),
    ]


def study_flow(case: Case, metric: str, start: Floats, points: int) -> dict[str, float]:
    """Follow the J-flow from `start` and from the slowest mode; return what is to be checked."""
    flow = GradientFlow(J(case.dense), metric)
    values, vectors = case.modes(metric)
    rate, channels = float(values[1]), start.shape[1]
    slowest = 3.0 + vectors[:, 1:2] / np.abs(vectors[:, 1]).max()
    both = np.concatenate([start, slowest], axis=1)
    means = case.mass(metric) @ both
    # Late: from where the slowest mode is all that is left, to where rounding begins (25 = log of 7e10).
    t = np.linspace(0, 25, points) / rate
    u = solve_to_end(flow, both, t_eval=t, integrator=EXACT, energies=False).u
    distance, shares = (
        np.array([case.distance(v[:, part], means[part], metric) for v in u])
        for part in (slice(channels), slice(channels, None))
    )
    told = abs(flow.distance_to_constant(start) / distance[0] - 1) + float(np.abs(flow.mean(both) - means).max())
    distance, shares = distance / distance[0], shares / shares[0]
    late, early = (distance < 1e-5) & (distance > 1e-10), t * rate <= 10
    slope = -float(np.polyfit(t[late], np.log(distance[late]), 1)[0]) if late.sum() > 2 else np.nan
    limit = solve_to_end(flow, start, t=60 / rate, integrator=EXACT, energies=False).final
    size = float(np.abs(start).max())
    return {
        "rate, fitted late, over the predicted one": slope / rate - 1,
        "relaxation_rate over the eigenvalue": relaxation_rate(flow) / rate - 1,
        "Flow.mean and Flow.distance_to_constant against plain sums": told,
        "limit less the conserved mean of u(0), over max |u(0)|": float(np.abs(limit - means[:channels]).max()) / size,
        "excess of the distance over exp(−μ₂ t)": float(np.maximum((distance * np.exp(rate * t) - 1)[early], 0).max()),
        "slowest mode: distance over exp(−μ₂ t)": float(np.abs(shares * np.exp(rate * t) - 1)[early].max()),
    }


def study_layers(case: Case, start: Floats, layers: int) -> dict[str, float]:
    """Follow u ← Pu; return what is to be checked."""
    flow = AttentionFlow(case.chosen)
    values, vectors = case.modes("degree")
    shrink = np.abs(1 - values[1:])
    second = float(shrink.max())
    slowest = 3.0 + vectors[:, [1 + int(shrink.argmax())]]
    layers = min(layers, int(np.log(1e-6) / np.log(second)) + 1)
    found = {"excess": 0.0, "equality": 0.0}
    for name, begin in (("excess", start), ("equality", slowest)):
        mean = case.mass("degree") @ begin
        u = solve_to_end(flow, begin, t_eval=np.arange(layers + 1.0), integrator=AttentionStep(), energies=False).u
        shares = np.array([case.distance(a, mean, "degree") for a in u]) / case.distance(begin, mean, "degree")
        ratio = shares / second ** np.arange(layers + 1.0) - 1
        found[name] = float(np.maximum(ratio, 0).max()) if name == "excess" else float(np.abs(ratio).max())
    return {
        "layers u ← Pu: excess of the distance over |μ₂|^k": found["excess"],
        "layers u ← Pu, slowest mode: distance over |μ₂|^k": found["equality"],
    }


TOLERANCES = {
    "rate, fitted late, over the predicted one": 1e-2,
    "relaxation_rate over the eigenvalue": 1e-9,
    "Flow.mean and Flow.distance_to_constant against plain sums": 1e-12,
    "limit less the conserved mean of u(0), over max |u(0)|": 1e-10,
    "excess of the distance over exp(−μ₂ t)": 1e-9,
    "slowest mode: distance over exp(−μ₂ t)": 1e-8,
    "layers u ← Pu: excess of the distance over |μ₂|^k": 1e-9,
    "layers u ← Pu, slowest mode: distance over |μ₂|^k": 1e-8,
}


def run(context: Context) -> Outcome:
    worst = dict.fromkeys(TOLERANCES, 0.0)
    details: dict[str, dict[str, float]] = {}
    for seed in range(context.pick(4, 1)):
        rng = np.random.default_rng(seed)
        for case in cases(rng):
            start = 1.0 + rng.standard_normal((len(case.w), 2))
            found = {}
            for metric in ("l2", "degree"):
                context.step(f"{case.name}, {metric}")
                found[metric] = study_flow(case, metric, start, context.pick(201, 101))
            found["layers"] = study_layers(case, start, 60)
            for name, figures in found.items():
                details[f"{case.name}, {name}, seed {seed}"] = figures
                for what, value in figures.items():
                    worst[what] = float(np.maximum(worst[what], abs(value)))  # NaN stays NaN
    checks = [Check(what, worst[what], tolerance) for what, tolerance in TOLERANCES.items()]
    figure, kept = draw()
    checks.append(Check("E-flow: share of the distance kept, over its lower bound", kept, 1.0, at_least=True))
    return Outcome(
        checks,
        {
            "Energy and distance to the constant of the J-flow fall along the predicted exponentials (dashed), 2μ₂ for "
            "the energy and μ₂ for the distance, in both metrics; those of the E-flows, which start from the same "
            "signal, come to rest where the fidelity holds them (time in units of one over the mean degree).": figure
        },
        details,
    )


def draw() -> tuple[Figure, float]:
    """Return the figure, and the least share of the distance that an E-flow keeps over the bound of that share."""
    rng = np.random.default_rng(0)
    case = cases(rng)[0]
    start = rng.standard_normal((len(case.w), 1)) + 3 * case.domain.nodes[:, :1]
    degree = 2 * case.k @ case.w
    fidelity, t = 0.1, np.linspace(0, 45, 181)
    energies, distances, shares = [], [], []
    for metric, label in (("l2", "L² metric"), ("degree", "degree metric")):
        unit = float(case.w @ degree / case.w.sum()) if metric == "l2" else 1.0
        values, _ = case.modes(metric)
        held = E(case.dense, start, fidelity * unit, measure=metric)
        for functional in (J(case.dense), held):
            found = solve_to_end(GradientFlow(functional, metric), start, t_eval=t / unit, integrator=EXACT)
            distance = np.array([case.distance(u, case.mass(metric) @ start, metric) for u in found.u])
            name, rate = f"{type(functional).__name__}, {label}", float(values[1]) / unit
            if functional is held:
                shares.append(float(distance[-1] / distance[0]) * (1 + float(values[-1]) / unit / fidelity))
            energies.append(Course(name, t, found.energy, None if functional is held else 2 * rate))
            distances.append(Course(name, t, distance, None if functional is held else rate))
    return decay_figure({"energy": energies, "distance to the constant": distances}), min(shares)


CLAIM = Claim(
    name="convergence-to-constants",
    title="The J-flow runs to a constant (over-smoothing)",
    statement=(
        "|u(t) − ū| ≤ exp(−μ₂ t) |u(0) − ū|, where μ₂ is the spectral gap of D − K in the L² metric and of I − P in "
        "the degree metric, ū the mean of u(0) in the measure w or w d, and after k layers u ← Pu it is at most "
        "|μ₂(P)|^k times what it was; both are met with equality by the slowest mode, and late distances fall at that "
        "rate. For Gaussian, Laplace, top-hat, dot-product and patch kernels, held against eigenvalues, eigenvectors "
        "and means that NumPy finds from matrices written out plainly. E-flows keep at least λ/(λ + μ_max) "
        "of it."
    ),
    source=f"{PAPER}, Remark 1; the rates derived",
    run=run,
)
