"""dE/dt = −|∇E|²: what a flow loses in energy is the time integral of its squared speed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import ConvexHull

from nlflow import E, ExplicitEuler, Exponential, Gaussian, GradientFlow, J, Points, affinity, from_matrix
from nlflow.plotting import new_figure
from nlflow.plotting.base import finish
from nlflow.studies.settings import solve_to_end
from validation.harness import PAPER, Check, Claim, Context, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

EXACT = Exponential(tol=1e-14)
METRICS = {"l2": "L² metric", "degree": "degree metric"}


@dataclass(frozen=True)
class Plain:
    """The functional written out: k_ij as given (not symmetric), w, and a fidelity λ_i m_i (u_i − f_i)² / 2."""

    k: Floats
    w: Floats
    f: Floats
    pull: Floats  # λ_i times its measure, 0 for J

    def energy(self, u: Floats) -> float:
        """Return ½ Σ w_i w_j k_ij |u_i − u_j|² + ½ Σ pull_i |u_i − f_i|²."""
        squares = ((u[:, None] - u[None]) ** 2).sum(axis=2)
        pairs = float(np.sum(self.w[:, None] * self.w * self.k * squares)) / 2
        return pairs + float(self.pull @ ((u - self.f) ** 2).sum(axis=1)) / 2

    def mass(self, metric: str) -> Floats:
        return self.w if metric == "l2" else self.w * ((self.k + self.k.T) @ self.w)


@dataclass(frozen=True)
class Case:
    name: str
    flow: GradientFlow
    plain: Plain
    start: Floats


def cases(rng: np.random.Generator) -> list[Case]:
    """J and E in both metrics, with the fidelity weighted by w and by w d, uniform and with missing data."""
    n, channels = 40, 2
    k = rng.random((n, n)) ** 3
    w = rng.uniform(0.3, 2.0, n) / n
    start, f = rng.standard_normal((2, n, channels))
    sums = from_matrix(k, Points(np.zeros(n), weights=w))
    degree = (k + k.T) @ w
    found = []
    for metric, label in METRICS.items():
        plain = Plain(k, w, f, np.zeros(n))
        found.append(Case(f"J, {label}", GradientFlow(J(sums), metric), plain, start))
        for measure, weight in (("l2", w), ("degree", w * degree)):
            for fidelity, kind in ((0.4, "one λ"), (np.where(rng.random(n) < 0.4, 0.0, 0.7), "data missing")):
                functional = E(sums, f, fidelity, measure=measure)
                plain = Plain(k, w, f, fidelity * weight)
                name = f"E, {label}, {kind}, weighted by {'w' if measure == 'l2' else 'w d'}"
                found.append(Case(name, GradientFlow(functional, metric), plain, start))
    return found


def graded(fastest: float, panels: int, count: int) -> tuple[Floats, Floats, Floats]:
    """Return ends of panels that grow by √2, and Gauss-Legendre nodes and weights on them, shape (panels, count)."""
    ends = np.append(0.0, 2.0 ** (np.arange(panels) / 2)) / fastest
    x, weight = np.polynomial.legendre.leggauss(count)
    half = np.diff(ends)[:, None] / 2
    return ends, (ends[1:] + ends[:-1])[:, None] / 2 + half * x, half * weight


@dataclass(frozen=True)
class Balance:
    """Both sides of the balance at times t, and how well the package knows the energy."""

    t: Floats
    lost: Floats  # E(0) − E(t), from plain sums
    paid: Floats  # ∫ |∇E|² from 0 to t
    start: float
    energy_error: float  # over E(0)
    largest_rise: float  # of the package's energies from one time to the next, over E(0)

    @property
    def error(self) -> float:
        return float((np.abs(self.lost - self.paid)[1:] / self.lost[1:]).max())


def balance(case: Case) -> Balance:
    """Integrate the squared gradient along the flow."""
    metric, functional = case.flow.metric, case.flow.functional
    # The squared gradient falls no faster than with twice the largest eigenvalue, which is below this.
    fastest = 4 * float(case.flow.spectral_bounds()[1])
    ends, times, weights = graded(fastest, 21, 14)
    t = np.sort(np.concatenate([ends, times.ravel()]))
    found = solve_to_end(case.flow, case.start, t_eval=t, integrator=EXACT)
    mass = case.plain.mass(metric)[:, None]
    speeds = np.array([np.sum(mass * functional.gradient(u, metric) ** 2) for u in found.u])
    at_end = np.isin(t, ends)
    paid = np.append(0.0, np.cumsum((speeds[~at_end].reshape(times.shape) * weights).sum(axis=1)))
    plain = np.array([case.plain.energy(u) for u in found.u[at_end]])
    return Balance(
        ends, plain[0] - plain, paid, float(plain[0]),
        float(np.abs(found.energy[at_end] - plain).max() / plain[0]), float(np.diff(found.energy).max() / plain[0]),
    )  # fmt: skip


@dataclass(frozen=True)
class Evolution:
    """A flow with its kernel taken from u(t), or frozen, in small Euler steps."""

    t: Floats
    lost: Floats  # J(0) − J(t), J formed with the kernel of its time
    paid: Floats
    area: Floats  # of the convex hull
    residual: float  # of the steps, over the first signal
    growth: float  # largest growth of the hull in any direction from one step to the next, over its diameter

    @property
    def swelling(self) -> float:
        return float(np.diff(self.area).max() / self.area[0])

    @property
    def error(self) -> float:
        return float(abs(self.lost[-1] - self.paid[-1]) / self.paid[-1])


def evolve(evolving: bool, seed: int, step: float) -> Evolution:
    """Follow points in the plane that attract each other through a Gaussian kernel of their distance."""
    width, n, end = 0.8, 40, 6.0
    start = np.random.default_rng(seed).standard_normal((n, 2))
    sums = affinity(Gaussian(width=width), Points(np.zeros(n)), start)
    flow = GradientFlow(J(sums), "degree", evolving=evolving)
    t = np.linspace(0, end, round(end / step) + 1)
    u = solve_to_end(flow, start, t_eval=t, integrator=ExplicitEuler(dt=step), energies=False).u
    energies, speeds = np.empty((2, len(t)))
    averages = np.empty_like(u)
    for number, now in enumerate(u):
        seen = now if evolving else start
        k = np.exp(-((seen[:, None] - seen[None]) ** 2).sum(axis=2) / (2 * width**2))
        plain = Plain(k, np.full(n, 1 / n), now, np.zeros(n))
        averages[number] = k @ now / k.sum(axis=1, keepdims=True)
        energies[number] = plain.energy(now)
        speeds[number] = plain.mass("degree") @ ((now - averages[number]) ** 2).sum(axis=1)
    paid = np.append(0.0, np.cumsum((speeds[1:] + speeds[:-1]) / 2 * np.diff(t)))
    residual = np.abs(u[1:] - u[:-1] - step * (averages - u)[:-1]).max() / np.abs(start).max()
    angles = np.linspace(0, 2 * np.pi, 360, endpoint=False)
    reach = (u @ np.stack([np.cos(angles), np.sin(angles)])).max(axis=1)
    area = np.array([ConvexHull(now).volume for now in u])
    growth = float(np.diff(reach, axis=0).max() / reach[0].max())
    return Evolution(t, energies[0] - energies, paid, area, float(residual), growth)


def worst(values: Iterable[float]) -> float:
    """Return the largest; NaN stays NaN."""
    return float(np.max(list(values)))


def run(context: Context) -> Outcome:
    seeds = context.pick(5, 1)
    found: dict[str, list[Balance]] = {}
    for seed in range(seeds):
        for case in cases(np.random.default_rng(seed)):
            context.step(case.name)
            found.setdefault(case.name, []).append(balance(case))
    checks = []
    for metric in METRICS.values():
        for kind in "JE":
            chosen = [b for name, bs in found.items() if name.startswith(f"{kind}, {metric}") for b in bs]
            what = f"{kind}(0) − {kind}(t) against ∫ |∇{kind}|² dt, {metric}, relative"
            checks.append(Check(what, worst(b.error for b in chosen), 1e-11))
    everything = [b for bs in found.values() for b in bs]
    context.step("evolving kernel")
    step = context.pick(0.01, 0.02)
    moving = [evolve(True, seed, step) for seed in range(seeds)]
    still = [evolve(False, seed, step) for seed in range(seeds)]
    checks += [
        Check("energies against plain double sums, over E(0)", worst(b.energy_error for b in everything), 1e-13),
        Check("largest rise of an energy along a flow, over E(0)", worst(b.largest_rise for b in everything), 1e-14),
        Check("steps against plain Euler steps, evolving and frozen", worst(e.residual for e in moving + still), 1e-14),
        Check("evolving kernel: growth of the hull in any of 360 directions", worst(e.growth for e in moving), 1e-14),
        Check("evolving kernel: growth of the hull's area from step to step", worst(e.swelling for e in moving), 0.0),
        Check("evolving kernel: what the balance misses", min(e.error for e in moving), 0.1, at_least=True),
        Check("frozen kernel, the same Euler steps: what the balance misses", worst(e.error for e in still), 0.02),
    ]  # fmt: skip
    details = {
        "relative error of the balance": {name: worst(b.error for b in bs) for name, bs in found.items()},
        "evolving kernel: what the balance misses": [e.error for e in moving],
    }
    return Outcome(checks, {CAPTION: draw({name: bs[0] for name, bs in found.items()}, moving[0])}, details)


CAPTION = (
    "Left: what J and E have lost by the time t (markers, plain double sums) lies on the integral of the squared "
    "gradient (lines). Right: with a kernel that follows the signal the two sides part, and J even rises at first, "
    "since the affinities grow as the points draw together; the area of their convex hull still shrinks."
)


def draw(found: dict[str, Balance], moving: Evolution) -> Figure:
    figure = new_figure(11, 4.4, dpi=130)
    left, right = figure.subplots(1, 2)
    shown = {
        "J, L² metric": ("#b03a2e", "o"),
        "J, degree metric": ("#e69f00", "s"),
        "E, L² metric, one λ, weighted by w": ("#0b5394", "D"),
        "E, degree metric, one λ, weighted by w d": ("#009e73", "^"),
    }
    for name, (shade, marker) in shown.items():
        b = found[name]
        left.plot(b.t[1:], b.paid[1:] / b.start, color=shade, linewidth=2)
        left.plot(
            b.t[1:], b.lost[1:] / b.start, linestyle="none", marker=marker, markersize=6, markerfacecolor="none",
            color=shade, label=", ".join(name.split(", ")[:2]),
        )  # fmt: skip
    left.set_xscale("log")
    finish(left, "frozen kernel", "t", "share of the first energy that is lost")
    right.plot(moving.t, moving.paid, color="#4d4d4d", linewidth=2, label="∫ |∇J|² dt")
    right.plot(moving.t, moving.lost, color="#b03a2e", linewidth=2, linestyle="--", label="J(0) − J(t)")
    right.plot(
        moving.t, moving.area / moving.area[0], color="#0b5394", linewidth=2, label="area of the hull (1 at first)"
    )
    right.axhline(0, color="black", linewidth=0.8)
    finish(right, "evolving kernel", "t")
    for axis in (left, right):
        axis.legend(fontsize=9, frameon=False)
    return figure


CLAIM = Claim(
    name="energy-balance",
    title="What a flow loses in energy is its squared gradient over time",
    statement=(
        "Along a gradient flow E(0) − E(t) = ∫₀ᵗ |∇E|² ds, with |g|² = Σ wᵢ |gᵢ|² in the L² metric and Σ wᵢ dᵢ |gᵢ|² "
        "in the degree metric, so energies never rise. For J and E with kernels that were given without symmetry, the "
        "fidelity weighted by w or w d, uniform or with missing data, in either metric: the left side from plain "
        "double sums with k itself, the right side by Gauss–Legendre quadrature of the package's gradients along its "
        "exact exponential. When the kernel follows the signal this is no gradient flow of one J and the balance does "
        "not hold, but every step is an average, so the convex hull of the points still shrinks (maximum principle)."
    ),
    source=f"derived; {PAPER}, eq. 9 and 21",
    run=run,
)
