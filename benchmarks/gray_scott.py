"""Gray–Scott with a nonlocal diffusion, against py-pde and a loop of NumPy: ``python -m benchmarks gray_scott``.

py-pde is installed beside it; ``--small`` takes a sixteenth of the nodes. Two channels on a periodic square, with
Pearson's diffusivities and a diffusion by averages over a Gaussian as narrow as the grid allows, so that it is near
that of Laplace: its rates are then far above those of the reaction. Where they are not, as on a larger square, steps of
Runge-Kutta methods are as good. All solve one problem from its formula, du/dt = 2 D / w^2 (Pu - u) + R(u). For py-pde
and the loop P is a pair of real Fourier transforms of NumPy for each channel. The exact solution is that of SciPy's
DOP853 at 1e-12, which none of them has a part in. Of each method the loosest setting is timed that is exact enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

from benchmarks.harness import Row, interleaved, missing
from nlflow import ETD2RK, ETD4RK, Gaussian, Grid, J, RungeKutta, affinity, solve
from nlflow.flows import GrayScott, SystemFlow

Floats = NDArray[np.float64]

FEED, KILL = 0.04, 0.06
DIFFUSIVITY = np.array([2e-5, 1e-5])
LENGTH = 0.5  # of the square: spots and stripes are about 0.1 apart
WIDTH = 1.5 * LENGTH / 512  # of the kernel
ERRORS = (1e-3, 1e-4)  # largest difference to the exact solution, whose values reach 1


class Problem:
    """The problem on a grid of side x side, to a time."""

    def __init__(self, side: int, end: float) -> None:
        self.side, self.end = side, end
        self.length = LENGTH * side / 512  # of a part of the square, where the grid is small
        line = self.length * np.arange(-side, 2 * side) / side
        images = np.exp(-(line**2) / (2 * WIDTH**2)).reshape(3, side).sum(axis=0)
        kernel = np.outer(images, images)
        self.rates = 2 * DIFFUSIVITY / WIDTH**2
        self.multiplier = np.fft.rfft2(kernel / kernel.sum()).real - 1
        rng = np.random.default_rng(0)
        start = np.stack([np.ones((side, side)), np.zeros((side, side))])
        low, high = 3 * side // 8, 5 * side // 8
        start[:, low:high, low:high] = np.array([0.5, 0.25])[:, None, None]
        self.start = np.clip(start + 0.01 * rng.uniform(-1, 1, start.shape), 0, 1)

    def rate(self, u: Floats) -> Floats:
        """Return du/dt, channels first."""
        moved = np.fft.irfft2(self.multiplier * np.fft.rfft2(u), s=u.shape[1:]) * self.rates[:, None, None]
        eaten = u[0] * u[1] * u[1]
        moved[0] += FEED * (1 - u[0]) - eaten
        moved[1] += eaten - (FEED + KILL) * u[1]
        return moved

    def exact(self) -> Floats:
        found = solve_ivp(
            lambda _, u: self.rate(u.reshape(self.start.shape)).ravel(), (0, self.end), self.start.ravel(), "DOP853",
            rtol=1e-12, atol=1e-13,
        )  # fmt: skip
        return np.asarray(found.y[:, -1].reshape(self.start.shape))

    def loop(self, steps: int) -> Floats:
        """Return the solution by Kutta's method of order 4."""
        u, h = self.start, self.end / steps
        for _ in range(steps):
            first = self.rate(u)
            second = self.rate(u + h / 2 * first)
            third = self.rate(u + h / 2 * second)
            u = u + h / 6 * (first + 2 * (second + third) + self.rate(u + h * third))
        return u

    def flow(self) -> SystemFlow:
        grid = Grid((self.side, self.side), spacing=self.length / self.side, boundary="periodic")
        return SystemFlow(J(affinity(Gaussian(WIDTH), grid)), self.rates, reaction=GrayScott(FEED, KILL))

    def ours(self, integrator: Any) -> Floats:
        start = np.ascontiguousarray(self.start.transpose(1, 2, 0))
        final = solve(self.flow(), start, t=self.end, integrator=integrator, energies=False).final
        return np.asarray(final.transpose(2, 0, 1))

    def peer(self, solver: str, **options: Any) -> Floats:
        import pde

        problem = self

        class Nonlocal(pde.PDEBase):
            def evolution_rate(self, state: Any, t: float = 0) -> Any:
                fields = [pde.ScalarField(state.grid, values) for values in problem.rate(state.data)]
                return pde.FieldCollection(fields)

        grid = pde.CartesianGrid([[0, 1]] * 2, [self.side] * 2, periodic=True)
        state = pde.FieldCollection([pde.ScalarField(grid, values) for values in self.start])
        found = Nonlocal().solve(state, t_range=self.end, solver=solver, tracker=None, backend="numpy", **options)
        return np.asarray(found.data)


def _error(method: Callable[[], Any], exact: Floats) -> float:
    """Return the largest error; infinity for steps so large that the method blows up, which py-pde raises."""
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            off = float(np.abs(method() - exact).max())
    except RuntimeError:
        return np.inf
    return off if np.isfinite(off) else np.inf


def run(small: bool = False) -> list[Row]:
    problem = Problem(128 if small else 512, 20.0)
    exact, end = problem.exact(), problem.end
    tolerances = 10.0 ** np.arange(-2, -9.5, -0.5)
    steps = [round(end * x) for x in (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 6.8, 8.0, 9.6)]
    methods: dict[str, list[Callable[[], Any]]] = {
        "py-pde, runge-kutta": [
            lambda x=x: problem.peer("runge-kutta", adaptive=True, tolerance=x) for x in tolerances
        ],
        "py-pde, scipy": [lambda x=x: problem.peer("scipy", rtol=x, atol=x / 100) for x in tolerances],
        "NumPy, Runge-Kutta 4": [lambda n=n: problem.loop(n) for n in steps],
        "nlflow, RungeKutta": [lambda x=x: problem.ours(RungeKutta(x, x / 100)) for x in tolerances],
        "nlflow, ETD2RK": [lambda n=n: problem.ours(ETD2RK(end / n)) for n in steps],
        "nlflow, ETD4RK": [lambda n=n: problem.ours(ETD4RK(end / n)) for n in steps],
    }
    what = f"Gray–Scott with a nonlocal diffusion on {problem.side} × {problem.side} to t = {end:g}"
    absent = missing("gray_scott", what, "pde", "none")
    if absent is not None:
        methods = {name: ways for name, ways in methods.items() if not name.startswith("py-pde")}
    rows = [] if absent is None else [absent]
    off = cache(lambda way: _error(way, exact))
    for error in ERRORS:
        chosen = {}
        for name, ways in methods.items():
            chosen[name] = next((way for way in ways if off(way) <= error), None)
        seconds = interleaved(
            {name: f for name, f in chosen.items() if f is not None}, repeats=3, clock=time.process_time
        )
        best = min((name for name in seconds if name.startswith("nlflow")), key=seconds.__getitem__)
        for name in [name for name in seconds if not name.startswith("nlflow")]:
            work = f"{what}, error below {error:g}: {best}, against {name}"
            texts = f"{seconds[name]:.2f} s", f"{seconds[best]:.3f} s"
            rows.append(Row.of("gray_scott", work, *texts, seconds[name] / seconds[best]))
    return rows
