"""Flows with a reaction and a source: each integrator has the order that it declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import RK45, solve_ivp

from nlflow import (
    ETD2RK,
    ETD4RK,
    IMEX,
    Adaptive,
    AllenCahn,
    Constraint,
    ConvexSplitting,
    E,
    ExplicitEuler,
    Gaussian,
    GradientFlow,
    Grid,
    Points,
    RungeKutta,
    affinity,
    from_matrix,
    solve,
)
from nlflow.flows.integrators import AverageVectorField, Lie, Rosenbrock, SemiImplicit, Strang
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

N, END, STRENGTH, FIDELITY = 12, 1.0, 2.0, 0.7
WIDTH = 1.5
TOLERANCES = (1e-4, 1e-7, 1e-10)


@dataclass(frozen=True)
class Problem:
    """A flow, its velocity in plain sums, and where it begins."""

    name: str
    flow: GradientFlow
    velocity: Callable[[float, Floats], Floats]
    start: Floats

    @cached_property
    def exact(self) -> Floats:
        """u(END) by SciPy's DOP853, of order 8."""
        found = solve_ivp(self.velocity, (0, END), self.start, method="DOP853", rtol=1e-13, atol=1e-14)
        return np.asarray(found.y[:, -1])

    def error(self, integrator: Any) -> float:
        found = solve(self.flow, self.start, t=END, integrator=integrator, energies=False)
        return float(np.abs(found.final - self.exact).max())

    def order(self, make: Callable[[float], Any], steps: int, times: int = 2) -> float:
        """Return the order from the errors of so many steps and of some times as many."""
        errors = [self.error(make(END / number)) for number in (steps, times * steps)]
        return float(np.log(errors[0] / errors[1]) / np.log(times))


def problems(seed: int) -> list[Problem]:
    """In both metrics, on scattered nodes and on a grid; with a reaction and, where it is told, a source that moves."""
    rng = np.random.default_rng([90, seed])
    start, f, place = rng.uniform(-0.9, 0.9, (3, N))
    k, w = rng.random((N, N)) ** 2, rng.uniform(0.5, 2.0, N) / N
    points = from_matrix(k, Points(np.zeros(N), weights=w))
    apart = (np.subtract.outer(np.arange(N), np.arange(N)) + N / 2) % N - N / 2
    images = sum(np.exp(-((apart + N * turn) ** 2) / (2 * WIDTH**2)) for turn in range(-3, 4))
    grid = affinity(Gaussian(WIDTH), Grid(N, boundary="periodic"))
    found = []
    for where, weights, both in (("nodes", points, (k + k.T) * w), ("grid", grid, 2 * images)):
        for metric in ("l2", "degree"):
            for moves in (False, True):
                degree = both.sum(axis=1)
                scale = 1.0 if metric == "l2" else degree

                def velocity(
                    t: float, u: Floats, both: Any = both, degree: Any = degree, scale: Any = scale, moves: bool = moves
                ) -> Floats:
                    moved = (both @ u - degree * u) / scale + FIDELITY * (f - u) + STRENGTH * (u - u**3)
                    return np.asarray(moved + (np.cos(3 * t) * place if moves else 0))

                flow = GradientFlow(
                    E(weights, f, FIDELITY, measure=metric), metric, reaction=AllenCahn(STRENGTH),
                    source=(lambda t: np.cos(3 * t) * place) if moves else None,
                )  # fmt: skip
                found.append(Problem(f"{where}, {metric}{', with a source' if moves else ''}", flow, velocity, start))
    return found


# An integrator, how many steps are taken first, and whether a source may move and a reaction may be beside it.
STEPS: tuple[tuple[type[Any], int, bool], ...] = (
    (ExplicitEuler, 64, True), (ETD2RK, 32, True), (ETD4RK, 16, True), (IMEX, 32, True), (Lie, 64, True),
    (Strang, 32, True), (ConvexSplitting, 128, False), (AverageVectorField, 16, True),
)  # fmt: skip


def run(context: Context) -> Outcome:
    short: dict[str, float] = {}
    kept: dict[str, float] = {}
    between = 0.0
    for seed in range(context.pick(3, 1)):
        for problem in problems(seed)[:: context.pick(1, 3)]:
            context.step(f"{problem.name}, seed {seed}")
            moves = problem.flow.timed
            for step, steps, takes in STEPS:
                if takes or not moves:
                    missed = abs(problem.order(step, steps) - step.order)
                    short[step.__name__] = largest(short.get(step.__name__, 0.0), missed)
            for step, steps in ((RungeKutta, 8), (Rosenbrock, 4)):
                # The errors of these are small beside those of the next order, so that more is measured.
                missed = step.order - problem.order(lambda h, step=step: step(dt=h, adaptive=False), steps, 4)
                short[step.__name__] = largest(short.get(step.__name__, 0.0), missed)
            error, order = _within(problem)
            between = largest(between, error / 1e-6, 4.8 / order)
            for make in (RungeKutta, Rosenbrock, lambda *each: Adaptive(ETD4RK(0.05), *each)):
                for tolerance in context.pick(TOLERANCES, TOLERANCES[:2]):
                    name = getattr(make, "__name__", "").replace("<lambda>", "Adaptive(ETD4RK)")
                    kept[name] = largest(kept.get(name, 0.0), problem.error(make(tolerance, tolerance)) / tolerance)
        for step, missed in _held(seed).items():
            short[f"{step}, held nodes"] = largest(short.get(f"{step}, held nodes", 0.0), missed)
        short["SemiImplicit"] = largest(short.get("SemiImplicit", 0.0), abs(_plain(seed) - 1))
    checks = [Check(f"{name}: measured order less the declared one", missed, 0.15) for name, missed in short.items()]
    checks += [Check(f"{name}: error at the end over the tolerance", ratio, 40) for name, ratio in kept.items()]
    checks.append(
        Check("steps that follow their error against the rule written out", _controlled(problems(0)[0]), 1e-10)
    )
    checks.append(Check("within steps of Runge-Kutta: error over 1e-6, and 4.8 over its order", between, 1.0))
    return Outcome(checks)


def _held(seed: int) -> dict[str, float]:
    """Return by how much orders of steps that take held nodes are off, where what these hold moves."""
    rng = np.random.default_rng([92, seed])
    k, f, start, gain = rng.random((N, N)), *rng.standard_normal((2, N)), np.array([2.0, -1.0])
    both = (k + k.T) / N

    def value(t: float) -> Floats:
        return np.asarray(gain * np.sin(2 * t))

    def velocity(t: float, u: Floats) -> Floats:
        u = np.concatenate([value(t), u])
        return np.asarray((both @ u - both.sum(axis=1) * u + FIDELITY * (f - u) + u - u**3)[2:])

    exact = solve_ivp(velocity, (0, END), start[2:], method="DOP853", rtol=1e-13, atol=1e-14).y[:, -1]
    flow = GradientFlow(
        E(from_matrix(k, Points(np.zeros(N))), f, FIDELITY), reaction=AllenCahn(interval=(-4.0, 4.0)),
        constraint=Constraint(np.arange(2), value),
    )  # fmt: skip
    missed = {}
    for step in (ExplicitEuler, ETD2RK, IMEX, Lie, Strang):
        errors = [
            float(
                np.abs(solve(flow, start, t=END, integrator=step(END / steps), energies=False).final[2:] - exact).max()
            )
            for steps in (64, 128)
        ]
        missed[step.__name__] = abs(float(np.log2(errors[0] / errors[1])) - step.order)
    return missed


def _within(problem: Problem) -> tuple[float, float]:
    """Return errors of what is told within Runge-Kutta's steps, over those at their ends, and the order of them."""
    errors = []
    for steps in (8, 16):
        times = (np.arange(steps)[:, None] + np.array([0.2, 0.5, 0.9])).ravel() * END / steps
        found = solve(problem.flow, problem.start, t=END, integrator=RungeKutta(dt=END / steps, adaptive=False),
                      energies=False, dense=True)  # fmt: skip
        exact = solve_ivp(problem.velocity, (0, END), problem.start, method="DOP853", rtol=1e-13, atol=1e-14,
                          t_eval=times).y.T  # fmt: skip
        errors.append(float(np.abs(found.at(times) - exact).max()))
    return errors[1], float(np.log2(errors[0] / errors[1]))


def _controlled(problem: Problem) -> float:
    """Return how far steps that follow their error are from the rule written out, and how many more or fewer they are.

    A step of the error e, over the tolerances and of the order k in h, is followed by one of 0.9 e^(−0.7/k) e'^(0.4/k)
    times its length, e' being the error before, or repeated with 0.9 e^(−1/k). Of SciPy's tableau of Dormand and
    Prince, and of Euler's steps by halves. (Hairer, Norsett and Wanner 1993, II.4; Gustafsson 1991.)
    """

    def pair(u: Floats, h: float) -> tuple[Floats, Floats]:
        slopes = np.zeros((7, N))
        for stage in range(6):
            slopes[stage] = problem.velocity(0.0, u + h * RK45.A[stage, :stage] @ slopes[:stage])
        moved = u + h * RK45.B @ slopes[:6]
        slopes[6] = problem.velocity(0.0, moved)
        return moved, h * RK45.E @ slopes

    def halves(u: Floats, h: float) -> tuple[Floats, Floats]:
        half = u + h / 2 * problem.velocity(0.0, u)
        twice = half + h / 2 * problem.velocity(0.0, half)
        return twice, twice - (u + h * problem.velocity(0.0, u))

    worst, rtol, atol = 0.0, 1e-5, 3e-7
    speed = problem.velocity(0.0, problem.start) / (atol + rtol * np.abs(problem.start))
    size = problem.start / (atol + rtol * np.abs(problem.start))
    first = 0.01 * float(np.linalg.norm(size) / np.linalg.norm(speed))
    for integrator, step, k, h in (
        (RungeKutta(rtol, atol, dt=3.0), pair, 5, 3.0),
        (RungeKutta(rtol, atol), pair, 5, first),
        (Adaptive(ExplicitEuler(0.05), rtol, atol), halves, 2, 0.05),
    ):
        u, t, before, taken = problem.start, 0.0, 1.0, 0
        while t < END:
            length = min(h, END - t)
            moved, off = step(u, length)
            error = float(np.sqrt(np.mean((off / (atol + rtol * np.maximum(np.abs(u), np.abs(moved)))) ** 2)))
            if error > 1:
                h = length * min(0.9, max(0.1, 0.9 * error ** (-1 / k)))
                continue
            h = length * min(5.0, max(0.2, 0.9 * max(error, 1e-10) ** (-0.7 / k) * before ** (0.4 / k)))
            u, t, before, taken = moved, t + length, max(error, 1e-4), taken + 1
        found = solve(problem.flow, problem.start, t=END, integrator=integrator, energies=False)
        worst = largest(worst, abs(found.stats["steps"] - taken), float(np.abs(found.final - u).max()))
    return worst


def _plain(seed: int) -> float:
    """Return the order of semi-implicit steps, which take no reaction, from the closed form exp(-tA)."""
    rng = np.random.default_rng([91, seed])
    k, w, f, start = rng.random((N, N)), rng.uniform(0.5, 2.0, N) / N, *rng.standard_normal((2, N))
    both = (k + k.T) * w
    a = np.eye(N) * (1 + FIDELITY) - both / both.sum(axis=1, keepdims=True)
    values, vectors = np.linalg.eig(a)
    rest = np.linalg.solve(a, FIDELITY * f)
    exact = rest + (vectors * np.exp(-END * values) @ np.linalg.solve(vectors, start - rest)).real
    flow = GradientFlow(E(from_matrix(k, Points(np.zeros(N), weights=w)), f, FIDELITY, measure="degree"), "degree")
    errors = [
        float(np.abs(solve(flow, start, t=END, integrator=SemiImplicit(END / steps)).final - exact).max())
        for steps in (64, 128)
    ]
    return float(np.log2(errors[0] / errors[1]))


CLAIM = Claim(
    name="order-of-steps",
    title="Integrators have their declared order for frozen kernels",
    statement=(
        "For du/dt = r (Pu − u) + λ (f − u) + s (u − u³) + g(t), halving the step divides the error at the end by "
        "2^order (or more): 1 for explicit, semi-implicit and Lie steps and for convex splitting, 2 for ETD2RK, IMEX, "
        "Strang and the averaged vector field, 4 for ETD4RK and Rosenbrock, 5 for Runge-Kutta. Steps that follow "
        "the error meet their tolerance up to a factor. The solution is SciPy's DOP853 of the right-hand side."
    ),
    source="Hairer, Norsett and Wanner 1993; Cox and Matthews 2002; Krogstad 2005",
    run=run,
)
