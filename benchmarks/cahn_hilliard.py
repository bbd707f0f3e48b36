"""Nonlocal Cahn–Hilliard against SciPy and py-pde: ``python -m benchmarks cahn_hilliard``, py-pde beside it.

du/dt = -M mu, mu = M u + u^3 - u on a torus with nodes 1/2 apart, where M is the operator of the Gaussian kernel
4 / (pi d^4) exp(-|r|^2 / d^2) with d = 1/2, which tends to -Laplace as d falls (Du, Ju, Li and Qiao 2018, doi
10.1016/j.jcp.2018.02.023). Interfaces are a few units wide; phases separate and coarsen from noise. All solve one
problem from its formula: for SciPy M is two Fourier transforms of NumPy, and its explicit methods are those that fit
(implicit ones would ask for a Jacobian of 65536 x 65536); py-pde has no nonlocal operators, but takes a right-hand side
that is written for it. The loosest setting of each method counts whose error is small enough at an early time, when
phases have formed, against SciPy's DOP853 at 1e-10; the quickest of each package up to then makes the whole run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp

from benchmarks.harness import Row, interleaved, missing
from nlflow import (
    ETD2RK,
    ETD4RK,
    Adaptive,
    AllenCahn,
    ConvexSplitting,
    Gaussian,
    GradientFlow,
    Grid,
    J,
    affinity,
    solve,
)

SPACING, RANGE = 0.5, 0.5
EARLY, ERROR = 20.0, 1e-3  # when errors are measured, and the largest of u that is allowed


class Problem:
    """The equation on a grid of side x side nodes."""

    def __init__(self, side: int, end: float) -> None:
        self.side, self.end, h = side, end, SPACING
        self.start = 0.05 * np.random.default_rng(0).standard_normal((side, side))
        line = sum(np.exp(-(((np.arange(side) * h) + g * side * h) ** 2) / RANGE**2) for g in range(-3, 4))
        kernel = 4 / (np.pi * RANGE**4) * np.outer(line, line) * h * h
        image = np.fft.rfft2(kernel).real
        self.symbol = image[0, 0] - image

    def rate(self, u: Any) -> Any:
        mu = np.fft.rfft2(u**3 - u) + self.symbol * np.fft.rfft2(u)
        return -np.fft.irfft2(self.symbol * mu, s=u.shape)

    def flow(self) -> GradientFlow:
        grid = Grid((self.side, self.side), spacing=SPACING, boundary="periodic")
        # L of an affinity is that of k + k^T.
        strength = 2 / (np.pi * RANGE**4)
        weights = affinity(Gaussian(width=RANGE / np.sqrt(2), amplitude=strength), grid)
        reaction = AllenCahn(interval=(-1.1, 1.1))
        return GradientFlow(J(weights), "conserved", reaction=reaction)

    def scipy(self, method: str, tol: float, end: float) -> Any:
        found = solve_ivp(lambda _, u: self.rate(u.reshape(self.start.shape)).ravel(), (0, end), self.start.ravel(),
                          method, rtol=tol, atol=tol / 100, t_eval=[end])  # fmt: skip
        return found.y[:, -1].reshape(self.start.shape)

    def peer(self, tol: float, end: float) -> Any:
        import pde

        rate = self.rate

        class Nonlocal(pde.PDEBase):
            def evolution_rate(self, state: Any, t: float = 0) -> Any:
                return pde.ScalarField(state.grid, rate(state.data))

        grid = pde.CartesianGrid([[0, self.side * SPACING]] * 2, [self.side] * 2, periodic=True)
        field = pde.ScalarField(grid, self.start)
        options = {"solver": "runge-kutta", "adaptive": True, "tolerance": tol, "tracker": None, "backend": "numpy"}
        return Nonlocal().solve(field, t_range=end, **options).data

    def ours(self, integrator: Any, end: float) -> Any:
        return solve(self.flow(), self.start, t=end, integrator=integrator, energies=False).final


def laws(problem: Problem, steps: int) -> tuple[float, float]:
    """Return the change of the mean, and the largest rise of the energy over E(0), with convex splitting."""
    dt = problem.end / steps
    times = np.linspace(0, problem.end, steps + 1)
    found = solve(problem.flow(), problem.start, t_eval=times, integrator=ConvexSplitting(dt))
    change = abs(float(found.final.mean() - problem.start.mean()))
    return change, float(np.diff(found.energy).max() / found.energy[0])


def run(small: bool = False) -> list[Row]:
    problem = Problem(64, 30.0) if small else Problem(256, 100.0)
    early = min(EARLY, problem.end)
    exact = problem.scipy("DOP853", 1e-10, early)
    tolerances = 10.0 ** np.arange(-2, -8.0, -1.0)
    methods: dict[str, list[Callable[[float], Any]]] = {
        **{
            f"SciPy, {name}": [lambda end, x=x, name=name: problem.scipy(name, x, end) for x in tolerances]
            for name in ("RK23", "RK45", "DOP853")
        },
        "nlflow, ETD2RK": [lambda end, dt=dt: problem.ours(ETD2RK(dt), end) for dt in (0.5, 0.25, 0.125, 0.0625, 0.03)],
        "nlflow, ETD4RK": [
            lambda end, dt=dt: problem.ours(ETD4RK(dt), end) for dt in (1.0, 0.7, 0.5, 0.35, 0.25, 0.125)
        ],
        "nlflow, adaptive": [lambda end, x=x: problem.ours(Adaptive(ETD4RK(0.1), x, x), end) for x in tolerances],
    }
    size = f"{problem.side} × {problem.side} to t = {problem.end:g}"
    absent = missing("cahn_hilliard", f"nonlocal Cahn–Hilliard on {size}", "pde", ">= 10")
    if absent is None:
        methods["py-pde, runge-kutta"] = [lambda end, x=x: problem.peer(x, end) for x in tolerances]
    chosen: dict[str, Callable[[float], Any]] = {}
    for name, ways in methods.items():
        found = next((way for way in ways if np.abs(way(early) - exact).max() <= ERROR), None)
        if found is None:
            print(f"{name}: no setting has an error below {ERROR:g}")
        else:
            chosen[name] = found
    first = interleaved(
        {name: lambda way=way: way(early) for name, way in chosen.items()},
        repeats=3 if small else 1,
        warmup=0,
        clock=time.process_time,
    )
    print(", ".join(f"{name} {value:.2f} s to t = {early:g}" for name, value in first.items()))
    packages = ("nlflow", "SciPy", "py-pde")
    names = [[name for name in first if name.startswith(one)] for one in packages]
    quickest = [min(found, key=first.__getitem__) for found in names if found]
    tasks = {name: lambda name=name: chosen[name](problem.end) for name in quickest}
    seconds = interleaved(tasks, repeats=3 if small else 1, warmup=0, clock=time.process_time)
    best = quickest[0]
    rows = [] if absent is None else [absent]
    for name in quickest[1:]:
        work = f"nonlocal Cahn–Hilliard on {size}, error below {ERROR:g} at t = {early:g}: {best}, against {name}"
        texts = f"{seconds[name]:.2f} s", f"{seconds[best]:.3f} s"
        rows.append(Row.of("cahn_hilliard", work, *texts, seconds[name] / seconds[best], least=10))
    change, rise = laws(problem, 200)
    rows.append(
        Row.of(
            "cahn_hilliard", f"convex splitting on {size}, 200 steps: change of the mean", "", "", change, most=1e-13
        )
    )
    rows.append(
        Row.of("cahn_hilliard", f"convex splitting on {size}, 200 steps: rise of E over E(0)", "", "", rise, most=0)
    )
    return rows
