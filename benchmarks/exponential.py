"""The Chebyshev exponential against scipy's solve_ivp on one J-flow, each at the same achieved error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.integrate import solve_ivp

from benchmarks.harness import Row, interleaved
from nlflow import Exponential, Gaussian, GradientFlow, J, Points, affinity, solve

ERROR = 1e-8
NODES = 600


def run() -> list[Row]:
    rows = []
    for span in (30, 100, 300):
        rows += _rows(span, *_solvers(span))
    return rows


def _solvers(span: float) -> tuple[dict[str, Callable[[float], tuple[Any, int]]], Callable[[Any], float]]:
    """Return the solvers of one J-flow to t = span / rho as functions of their tolerance, and the error of a result."""
    rng = np.random.default_rng(0)
    points = Points(rng.uniform(size=(NODES, 2)))
    u0 = rng.standard_normal(NODES)
    flow = GradientFlow(J(affinity(Gaussian(width=0.1), points)))
    # The same operator as a matrix: with weights 1/N it is symmetric.
    degree = flow.affinity.degree
    matrix = np.diag(degree) - degree[:, None] * flow.affinity.matrix
    matrix = (matrix + matrix.T) / 2
    values, vectors = np.linalg.eigh(matrix)
    t = span / float(values[-1])
    exact = vectors @ (np.exp(-t * values) * (vectors.T @ u0))

    def ours(tol: float) -> tuple[Any, int]:
        found = solve(flow, u0, t=t, integrator=Exponential(tol=tol), energies=False)
        return found.final, found.stats["applications"]

    def peer(method: str) -> Callable[[float], tuple[Any, int]]:
        def run_peer(tol: float) -> tuple[Any, int]:
            extra = {"jac": -matrix} if method == "BDF" else {}
            found = solve_ivp(lambda _, u: -(matrix @ u), (0, t), u0, method, rtol=tol, atol=tol, **extra)
            return found.y[:, -1], found.nfev

        return run_peer

    def error(u: Any) -> float:
        return float(np.linalg.norm(u - exact) / np.linalg.norm(u0))

    return {"nlflow": ours, **{method: peer(method) for method in ("RK45", "DOP853", "BDF")}}, error


def _rows(
    span: float, solvers: dict[str, Callable[[float], tuple[Any, int]]], error: Callable[[Any], float]
) -> list[Row]:
    counts: dict[str, int] = {}
    tasks: dict[str, Callable[[], Any]] = {}
    for name, solver in solvers.items():
        # Each solver runs at its loosest tolerance, in steps of half a decade, that still reaches the error.
        for tol in 10.0 ** np.arange(-6.5, -13.5, -0.5):
            u, count = solver(float(tol))
            if error(u) <= ERROR:
                counts[name], tasks[name] = count, partial(solver, float(tol))
                break
        else:
            raise RuntimeError(f"{name} does not reach {ERROR:g}")
    times = interleaved(tasks, repeats=5)
    rows = []
    for name, target in (("RK45", 10.0), ("DOP853", 4.0)):
        ratio = counts[name] / counts["nlflow"]
        work = f"t rho = {span}: applications of the operator, against {name}"
        rows.append(Row.of("exponential", work, str(counts[name]), str(counts["nlflow"]), ratio, least=target))
    fastest = min(("RK45", "DOP853", "BDF"), key=times.__getitem__)
    ratio = times[fastest] / times["nlflow"]
    work = f"t rho = {span}: time, against the fastest of RK45, DOP853, BDF ({fastest})"
    mine = f"{times['nlflow'] * 1e3:.1f} ms"
    return [*rows, Row.of("exponential", work, f"{times[fastest] * 1e3:.1f} ms", mine, ratio, least=5)]
