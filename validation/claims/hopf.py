"""The Brusselator with nonlocal diffusion: where it begins to oscillate, its limit cycle, and where patterns begin."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

from nlflow import Gaussian, Grid, J, Points, SystemFlow, affinity
from nlflow.affinities import Unlinked
from nlflow.equilibria import continue_equilibria, find_cycle
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
        "multipliers is that of the mean divergence (Abel, Jacobi and Liouville)."
    ),
    source="I. Prigogine and R. Lefever 1968, doi 10.1063/1.1668896",
    run=run,
)
