"""The Brusselator with nonlocal diffusion: where it begins to oscillate, its limit cycle, and where patterns begin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

from nlflow import Gaussian, Grid, J, Points, Reaction, SystemFlow, affinity
from nlflow.affinities import Unlinked
from nlflow.equilibria import continue_equilibria, find_cycle
from nlflow.equilibria.cycles import Shooting
from nlflow.equilibria.equations import Equations
from nlflow.flows import Brusselator
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

NODES, WIDTH = 12, 0.15


def family(functional: J, a: float, diffusivity: tuple[float, float]) -> Callable[[float], SystemFlow]:
    def make_flow(b: float) -> SystemFlow:
        return SystemFlow(functional, diffusivity, reaction=Brusselator(a, b))

    return make_flow


def eigenvalues() -> Floats:
    """Return those of I − P on the circle, written out."""
    turns = np.arange(-6, 7)[:, None]
    row = np.exp(-((np.arange(NODES) / NODES + turns) ** 2) / (2 * WIDTH**2)).sum(axis=0)
    return 1 - np.fft.fft(row / row.sum()).real


def period_of_scipy(a: float, b: float) -> float:
    def crossing(t: float, u: Floats) -> float:
        return float(u[0] - a)

    crossing.direction = 1.0  # type: ignore[attr-defined]

    def rates(t: float, u: Floats) -> Floats:
        x, y = u
        return np.array([a - (b + 1) * x + x * x * y, b * x - x * x * y])

    found = solve_ivp(rates, (0, 100), [a, b / a + 0.5], method="DOP853", rtol=1e-12, atol=1e-13, events=crossing)
    assert found.t_events is not None
    return float(np.diff(found.t_events[0])[-1])


def spiral(u: Floats, z: float = 0.3) -> Floats:
    """A cycle x² + y² = 1 of period π that others come to like exp(−2 t), beside z' = −0.3 z."""
    x, y = u[..., 0], u[..., 1]
    r = x * x + y * y
    return np.stack([x * (1 - r) - 2 * y, y * (1 - r) + 2 * x, -z * u[..., 2]], axis=-1)


class Begun(Shooting):
    """A search of which the first end is known, and that tells its residual alone."""

    def __init__(self, equations: Equations, first: tuple[Floats, Floats]) -> None:
        super().__init__(equations)
        self.first = first

    def monodromy(self, x: Floats, period: float) -> tuple[Floats, Floats]:
        return self.first

    def sampled(self, x: Floats, period: float) -> Floats:
        return x[None]

    def _told(self, course: Floats, period: float, residual: float, rtol: float, count: int) -> Any:
        return residual


def spiralling() -> float:
    """Return errors of what shooting takes for a period, a step of Newton's, and a cycle, over what they may be."""
    reaction = Reaction(spiral, (-3.0, 3.0), components=3, bound=80.0)
    flow = SystemFlow(J(Unlinked(Points([0.0], weights=[0.7]))), [1.0, 1.0, 1.0], reaction=reaction)

    def after(x: Floats, period: float) -> Floats:
        whole = solve_ivp(lambda t, y: spiral(y), (0, period), x, method="DOP853", rtol=1e-12, atol=1e-13)
        return np.asarray(whole.y[:, -1])

    on = np.array([0.6, 0.8, 0.0])
    equations = Equations(flow, "start", on[None])
    shooting = Shooting(equations)
    # Between samples heights are a sine, so nearly a line: h² / 8 of it is bent.
    dt = 8.3 / 400
    worst = abs(shooting.found_period(on, 8.3) - np.pi) / dt**3
    # The end of a period and its derivative, and the step that they lead to.
    x, period = np.array([0.7, 0.75, 0.05]), 3.05
    end, jacobian = shooting.monodromy(x, period)
    slopes = np.stack([(after(x + h, period) - after(x - h, period)) / 2e-5 for h in 1e-5 * np.eye(3)], axis=1)
    worst = largest(
        worst, float(np.abs(end - after(x, period)).max()) / 1e-6, float(np.abs(jacobian - slopes).max()) / 1e-5
    )
    along = equations(x)
    kept = along / math.sqrt(float(np.mean(along**2)) * 3)  # of the measure, whose sum over nodes is 1
    worst = largest(worst, float(np.abs(shooting._kept(x, along)[:, 0] - kept).max()) / 1e-12)
    whole = np.block([[slopes - np.eye(3), spiral(end)[:, None]], [along[None], np.zeros((1, 1))]])
    step = np.linalg.solve(whole, np.append(x - end, 0.0))
    moved, longer = shooting._stepped(x, period, end, jacobian, along)
    worst = largest(worst, float(np.abs(moved - x - step[:3]).max()) / 1e-5, abs(longer - period - step[3]) / 1e-5)
    # What is told of the residual: how far the end is from the start, over the way along the cycle.
    left = 2 * np.pi * np.linalg.norm(end - x) / (np.linalg.norm(along) * period)
    begun: Any = Begun(equations, (end, jacobian)).closed(x, period, 1e-9, 0)
    worst = largest(worst, abs(left / begun - 1) / 1e-9)
    # Twice round the cycle is found out.
    turned = np.linspace(0, 4 * np.pi, 121)
    course = np.stack([np.cos(turned), np.sin(turned), 0 * turned], axis=1)
    found = shooting._told(course, 2 * np.pi, 0.0, 1e-9, 1)
    others = np.exp([-0.3 * np.pi, -2 * np.pi])
    return largest(
        worst, abs(found.period - np.pi) / 1e-8, float(np.abs(found.multipliers.real - others).max()) / 1e-5,
        float(found.verdict != "stable" or not found.success), found.error / 1.2e-6, 0.99e-6 / found.error,
    )  # fmt: skip


def run(context: Context) -> Outcome:
    circle = J(affinity(Gaussian(width=WIDTH), Grid(NODES, spacing=1 / NODES, boundary="periodic")))
    values = eigenvalues()
    misplaced, frequency, misnamed, turing, period, divergence = 0.0, 0.0, 0, 0.0, 0.0, 0.0
    for a in context.pick((0.8, 1.0, 1.5), (1.0,)):
        context.step(f"a = {a}")
        make_flow = family(circle, a, (1.0, 1.0))
        start = np.tile([a, 1.0 / a], (NODES, 1))
        branch = continue_equilibria(make_flow, start, 1.0, (1.0, 1.2 + a**2), longest=0.2)
        first = branch.points[0]
        misnamed += int(first.kind != "hopf" or first.multiplicity != 1)
        misplaced = largest(misplaced, abs(first.parameter - 1 - a**2))
        frequency = largest(frequency, abs(abs(first.eigenvalue.imag) - a))
    for a, slow, fast in context.pick(((2.0, 0.5, 12.0), (2.0, 0.4, 20.0)), ()):
        context.step(f"diffusivities {slow} and {fast}")
        waves = values[1 : NODES // 2 + 1]
        expected = float(np.min((1 + slow * waves) * (a**2 + fast * waves) / (fast * waves)))
        bounds = (expected - 0.5, expected + 0.02)
        start = np.tile([a, bounds[0] / a], (NODES, 1))
        branch = continue_equilibria(family(circle, a, (slow, fast)), start, bounds[0], bounds, longest=0.2)
        turing = largest(turing, abs(branch.points[0].parameter - expected))
        misnamed += int(branch.points[0].kind in ("hopf", "fold"))
    alone = J(Unlinked(Points([0.0])))
    for a, b in context.pick(((1.0, 2.2), (1.0, 3.0)), ((1.0, 2.5),)):
        context.step(f"cycle of a = {a}, b = {b}")
        cycle = find_cycle(family(alone, a, (1.0, 1.0))(b), np.array([[a, b / a + 0.5]]), settle=15.0)
        misnamed += int(not cycle.success or cycle.verdict != "stable")
        period = largest(period, abs(cycle.period / period_of_scipy(a, b) - 1))
        x, y = cycle.u[:-1, 0, 0], cycle.u[:-1, 0, 1]
        mean = float(np.mean(-(b + 1) + 2 * x * y - x * x))
        divergence = largest(divergence, abs(np.log(abs(cycle.multipliers[0])) / (mean * cycle.period) - 1))
    checks = [
        Check("Hopf points against 1 + a²", misplaced, 1e-6),
        Check("frequencies there against a", frequency, 1e-6),
        Check("Turing points against the determinant, written out", turing, 1e-6),
        Check("periods against SciPy's DOP853 at 1e-12, relative", period, 1e-8),
        Check("logarithms of multipliers against the mean divergence along the cycle, relative", divergence, 1e-4),
        Check("points and cycles of another kind", misnamed, 0),
        Check("what shooting does of a cycle in closed form, over what it may be off", spiralling(), 1.0),
    ]
    return Outcome(checks)


CLAIM = Claim(
    name="hopf",
    title="The Brusselator oscillates beyond b = 1 + a²",
    statement=(
        "With one nonlocal diffusivity the equilibrium (a, b/a) loses stability at b = 1 + a², in the homogeneous "
        "mode, to oscillations of frequency a. With slow diffusion of x and fast diffusion of y a pattern comes first, "
        "at the least (1 + d₁ m)(a² + d₂ m) / (d₂ m) over the eigenvalues m of I − P. Continuation locates both. The "
        "limit cycle that shooting finds has the period of an independent integration, and the product of its "
        "multipliers is that of the mean divergence (Abel, Jacobi and Liouville). Of x' = x (1 − r²) − 2 y, y' = y (1 "
        "− r²) + 2 x periods, derivatives, steps and multipliers are those written out."
    ),
    source="I. Prigogine and R. Lefever 1968, doi 10.1063/1.1668896",
    run=run,
)
