"""Allen–Cahn with a nonlocal diffusion, against py-pde: ``python -m benchmarks pde``, beside which py-pde is installed.

py-pde has no nonlocal operators, but a right-hand side may be written for it. Both solve one problem from its formula,
du/dt = Pu - u + u - u^3 on a periodic grid, where P averages over a Gaussian. There the term is two Fourier transforms
of NumPy. The exact solution is that of SciPy's DOP853 at 1e-12, which neither package has a part in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp

from benchmarks.harness import Row, interleaved, missing
from nlflow import ETD4RK, AllenCahn, Gaussian, GradientFlow, Grid, J, RungeKutta, affinity, solve

SIDE, WIDTH, END = 256, 3.0, 10.0
ERRORS = (2e-4, 2e-5)  # largest difference to the exact solution, whose values reach 1


def run() -> list[Row]:
    if (absent := missing("pde", "all rows", "pde", "none")) is not None:
        return [absent]
    import pde

    start = 0.1 * np.random.default_rng(0).standard_normal((SIDE, SIDE))
    line = sum(np.exp(-((np.arange(SIDE) + g * SIDE) ** 2) / (2 * WIDTH**2)) for g in range(-3, 4))
    kernel = np.outer(line, line)
    multiplier = np.fft.rfft2(kernel / kernel.sum())

    def rate(u: Any) -> Any:
        return np.fft.irfft2(multiplier * np.fft.rfft2(u), s=u.shape) - u + u - u**3

    class Nonlocal(pde.PDEBase):
        def evolution_rate(self, state: Any, t: float = 0) -> Any:
            return pde.ScalarField(state.grid, rate(state.data))

    grid = pde.CartesianGrid([[0, SIDE]] * 2, [SIDE] * 2, periodic=True)

    def peer(solver: str, **options: Any) -> Any:
        field = pde.ScalarField(grid, start)
        return Nonlocal().solve(field, t_range=END, solver=solver, tracker=None, backend="numpy", **options).data

    def ours(integrator: Any) -> Any:
        weights = affinity(Gaussian(WIDTH), Grid((SIDE, SIDE), boundary="periodic"))
        flow = GradientFlow(J(weights), "degree", reaction=AllenCahn())
        return solve(flow, start, t=END, integrator=integrator, energies=False).final

    exact = solve_ivp(lambda _, u: rate(u.reshape(start.shape)).ravel(), (0, END), start.ravel(), "DOP853",
                      rtol=1e-12, atol=1e-13).y[:, -1].reshape(start.shape)  # fmt: skip
    tolerances = 10.0 ** np.arange(-4, -9.5, -0.5)
    methods: dict[str, list[Callable[[], Any]]] = {
        "py-pde, runge-kutta": [lambda x=x: peer("runge-kutta", adaptive=True, tolerance=x) for x in tolerances],
        "py-pde, scipy": [lambda x=x: peer("scipy", rtol=x, atol=x / 100) for x in tolerances],
        "nlflow, RungeKutta": [lambda x=x: ours(RungeKutta(x, x / 100)) for x in tolerances],
        "nlflow, ETD4RK": [lambda dt=dt: ours(ETD4RK(dt)) for dt in (0.5, 0.35, 0.25, 0.18, 0.125, 0.09)],
    }
    rows = []
    for error in ERRORS:
        # Of each method the loosest setting that is exact enough.
        chosen = {name: next(f for f in ways if np.abs(f() - exact).max() <= error) for name, ways in methods.items()}
        seconds = interleaved(chosen, repeats=5, clock=time.process_time)
        best = min((name for name in seconds if name.startswith("nlflow")), key=seconds.__getitem__)
        for name in list(methods)[:2]:
            work = (
                f"nonlocal Allen–Cahn on {SIDE} × {SIDE} to t = {END:g}, error below {error:g}: {best}, against {name}"
            )
            texts = f"{seconds[name]:.2f} s", f"{seconds[best]:.3f} s"
            rows.append(Row.of("pde", work, *texts, seconds[name] / seconds[best]))
    return rows
