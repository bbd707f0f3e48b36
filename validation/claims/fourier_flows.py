"""Equations 9 and 21: the flows of J and E on the torus, mode by mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nlflow import E, Exponential, Gaussian, GradientFlow, Grid, J, RungeKutta, affinity
from nlflow.plotting import Course, decay_figure, spacetime_figure
from nlflow.studies.settings import solve_to_end
from validation.harness import PAPER, Check, Claim, Context, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

AMPLITUDE = 0.7  # of k: the L² flow depends on it
EXACT = Exponential(tol=1e-14)
FIDELITY = 0.3  # over K̂₀ in the L² metric
ATOL, RTOL = 1e-12, 1e-10  # of the Runge–Kutta steps


@dataclass(frozen=True)
class Torus:
    """The unit torus with a grid on it, and the exact flow of a trigonometric polynomial."""

    shape: tuple[int, ...]
    width: float
    highest: int  # largest frequency along each axis

    @property
    def grid(self) -> Grid:
        return Grid(self.shape, spacing=tuple(1 / n for n in self.shape), boundary="periodic")

    @property
    def modes(self) -> Floats:
        """Frequencies m, shape (M, dim)."""
        line = np.arange(-self.highest, self.highest + 1.0)
        return np.stack([axis.ravel() for axis in np.meshgrid(*[line] * len(self.shape), indexing="ij")], axis=1)

    @property
    def transform(self) -> Floats:
        """K̂_m of K = 2k, the Gaussian summed over its periods: an integral over all of space, in closed form."""
        total = 2 * AMPLITUDE * (self.width * np.sqrt(2 * np.pi)) ** len(self.shape)
        return np.asarray(total * np.exp(-2 * np.pi**2 * self.width**2 * (self.modes**2).sum(axis=1)))

    @property
    def degree(self) -> float:
        return float(self.transform.max())

    def random(self, rng: np.random.Generator, channels: int) -> NDArray[np.complex128]:
        """Coefficients of a rich real signal, shape (M, channels)."""
        size = (1 + (self.modes**2).sum(axis=1))[:, None] ** -0.5
        real, imaginary = rng.standard_normal((2, len(size), channels))
        c = size * (real + 1j * imaginary)
        return np.asarray((c + c[::-1].conj()) / 2)  # -m is m in reverse order

    @cached_property
    def waves(self) -> NDArray[np.complex128]:
        """exp(2πi m·x) at the nodes, shape (N, M)."""
        axes = [np.arange(n) / n for n in self.shape]
        x = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
        return np.asarray(np.exp(2j * np.pi * x @ self.modes.T))

    def signal(self, coefficients: NDArray[np.complex128]) -> Floats:
        """Σ c_m exp(2πi m·x) at the nodes, as a plain sum."""
        return (self.waves @ coefficients).real.reshape(*self.shape, -1)

    def rates(self, metric: str) -> Floats:
        """Decay rates of the modes, shape (M, 1)."""
        k = self.transform[:, None]
        return self.degree - k if metric == "l2" else 1 - k / self.degree


@dataclass(frozen=True)
class Problem:
    """A flow with its exact solution u_m(t) = u*_m + (u0_m − u*_m) exp(−rate t)."""

    name: str
    flow: GradientFlow
    start: NDArray[np.complex128]
    limit: NDArray[np.complex128]
    rate: Floats

    def exact(self, t: float) -> NDArray[np.complex128]:
        return self.limit + (self.start - self.limit) * np.exp(-self.rate * t)


def problems(torus: Torus, method: str, channels: int, seed: int) -> Iterator[Problem]:
    """Yield J and E in both metrics, the fidelity given as λ and as λ̃, from f and from another start."""
    rng = np.random.default_rng(seed)
    start, observed = torus.random(rng, channels), torus.random(rng, channels)
    k = affinity(Gaussian(width=torus.width, amplitude=AMPLITUDE), torus.grid, method=method)
    still = (torus.modes == 0).all(axis=1)[:, None]
    for metric in ("l2", "degree"):
        mu = torus.rates(metric)
        yield Problem(f"J, {metric}", GradientFlow(J(k), metric), start, start * still, mu)
        for measure in ("l2", "degree"):
            # λ = λ̃ d throughout, so one strength is meant by all four.
            given = FIDELITY * (torus.degree if measure == "l2" else 1)
            strength = FIDELITY * (torus.degree if metric == "l2" else 1)
            flow = GradientFlow(E(k, torus.signal(observed), given, measure=measure), metric)
            limit = observed * strength / (mu + strength)
            for begin, which in ((start, "elsewhere"), (observed, "f")):
                yield Problem(f"E, {metric}, measure {measure}, from {which}", flow, begin, limit, mu + strength)


def largest_error(torus: Torus, problem: Problem, times: Floats, integrator: Exponential | RungeKutta) -> float:
    """Return the largest difference from the exact solution over nodes, channels and times, over the largest value."""
    start = torus.signal(problem.start)
    found = solve_to_end(problem.flow, start, t_eval=times, integrator=integrator, energies=False)
    size = float(np.abs(start).max())
    exact = [torus.signal(problem.exact(t)) for t in times]
    return float(np.abs(found.u - np.stack(exact)).max()) / size


def run(context: Context) -> Outcome:
    tori = {
        1: Torus((context.pick(96, 64),), width=0.06, highest=12), 2: Torus((20, 18), 0.1, 4),
        3: Torus((14, 12, 11), 0.16, 2),
    }  # fmt: skip
    worst: dict[str, float] = {}
    details: dict[str, float] = {}
    for seed, (dim, torus), method in product(range(context.pick(3, 1)), tori.items(), ("convolution", "dense")):
        if dim == 3 and (method == "dense" or seed > 0):
            continue  # minutes that would show nothing new
        for problem in problems(torus, method, channels=3, seed=seed):
            context.step(f"{dim}-D, {method}: {problem.name}")
            times = np.array([0.3, 1.0, 3.0, 9.0]) / (torus.degree if problem.flow.metric == "l2" else 1)
            for integrator in (EXACT, RungeKutta(rtol=RTOL, atol=ATOL)):
                if integrator is not EXACT and problem.name.endswith("from f"):
                    continue  # hundreds of steps that would show nothing new
                error = largest_error(torus, problem, times, integrator)
                means = type(integrator).__name__
                what = f"{problem.name[0]}-flow in {dim}-D, {means}: error over max |u(0)|"
                worst[what] = float(np.maximum(worst.get(what, 0.0), error))  # NaN stays NaN
                which = f"{dim}-D, {method}, {problem.name}, {means}"
                details[which] = float(np.maximum(details.get(which, 0.0), error))
    checks = [Check(what, error, 1e-13 if "Exponential" in what else RTOL) for what, error in worst.items()]
    figures, fitted = draw()
    checks.append(Check("decay rates of the modes of J and E, relative", fitted, 1e-9))
    return Outcome(checks, figures, {"largest errors": details})


def draw() -> tuple[dict[str, Figure], float]:
    """Return the figures, and how far the decay rates that they show are from the prediction."""
    torus = Torus((240,), width=0.06, highest=24)
    x, rng = torus.grid.nodes[:, 0], np.random.default_rng(3)
    start = torus.random(rng, 1)
    signal = torus.signal(start)
    k = affinity(Gaussian(width=torus.width, amplitude=AMPLITUDE), torus.grid)
    mu, strength = torus.rates("l2"), FIDELITY * torus.degree
    flows = {
        "J": (GradientFlow(J(k)), mu, start * (mu == 0)),
        "E": (GradientFlow(E(k, signal, strength)), mu + strength, start * strength / (mu + strength)),
    }
    long, short = np.append(0.0, np.geomspace(0.05, 1500, 120)), np.linspace(0, 12, 61)
    panels, decays, worst = {}, {}, 0.0
    for name, (flow, rates, limit) in flows.items():
        found = solve_to_end(flow, signal, t_eval=long / torus.degree, energies=False)
        panels[f"{name}-flow"] = (long, found.u[..., 0])
        # The modes of the solved flow, by plain sums over the nodes.
        solved = solve_to_end(flow, signal, t_eval=short / torus.degree, integrator=EXACT, energies=False).u[..., 0]
        courses = []
        for m in (1, 2, 4):
            number = int(np.flatnonzero(torus.modes[:, 0] == m)[0])
            left = np.abs((solved * np.exp(-2j * np.pi * m * x)).mean(axis=1) - limit[number, 0])
            rate = float(rates[number, 0]) / torus.degree
            seen = left > 1e-4 * left[0]
            slope = -float(np.polyfit(short[seen], np.log(left[seen]), 1)[0])
            worst = float(np.maximum(worst, abs(slope - rate) / rate))
            courses.append(Course(f"{name}, m = {m}", short, left / left[0], rate))
        decays["modes of the J-flow" if name == "J" else "modes of the E-flow, less their limit"] = courses
    return {
        "From the same rich signal the J-flow (left) forgets one mode after the other until a constant is left, while "
        "the E-flow (right) keeps a smoothed copy of it for ever (time in units of 1/d).": (
            spacetime_figure(panels, x=x, title="Flows on the torus in the L² metric")
        ),
        "Each Fourier mode of the solved flows decays along its predicted exponential (dashed), exp(−t (K̂₀ − K̂ₘ)) "
        "for J and exp(−t (K̂₀ − K̂ₘ + λ)) for E (time in units of 1/d).": decay_figure(decays),
    }, worst


CLAIM = Claim(
    name="fourier-flows",
    title="The flows of J and E on the torus",
    statement=(
        "On the unit torus du/dt = ∫ (u(y) − u(x)) K(x, y) dy [+ λ (f − u)] acts on every Fourier mode by itself. For "
        "the periodic Gaussian of width h and height a the coefficients of K = 2k are "
        "K̂ₘ = 2 a (h √(2π))ⁿ exp(−2π² h² |m|²), so uₘ(t) = u*ₘ + (uₘ(0) − u*ₘ) exp(−(μₘ + λ) t) with "
        "u*ₘ = λ fₘ/(μₘ + λ), where μₘ = K̂₀ − K̂ₘ in the L² metric, and μₘ = 1 − K̂ₘ/K̂₀ with λ̃ = λ/K̂₀ for λ in the "
        "degree metric. Solved on grids in 1-D, 2-D and 3-D (Fourier sums, and dense ones in 1-D and 2-D, exact "
        "exponential and Runge–Kutta "
        "steps, three channels, started from f and from elsewhere) and held against these formulas of the continuum, "
        "summed mode by mode without any transform."
    ),
    source=f"{PAPER}, eq. 9 and 21; the modes derived",
    run=run,
)
