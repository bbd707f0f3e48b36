"""Whole flows on scattered nodes, from nodes to solution, against SciPy's integrators and PyGSP's heat filter."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.integrate import solve_ivp

from benchmarks.harness import Row, interleaved, missing
from nlflow import Exponential, Gaussian, GradientFlow, J, Points, affinity, solve
from nlflow.affinities import SparseAffinity

NODES, ERROR = 4096, 1e-8
GRAPH_NODES, ORDER = 20_000, 30


def run() -> list[Row]:
    return [*against_integrators(30), *against_integrators(300), *against_pygsp()]


def against_integrators(span: float) -> list[Row]:
    """A J-flow to t rho = span, all to an error of 1e-8 in the Euclidean norm, relative to the start."""
    rng = np.random.default_rng(0)
    points, u0 = Points(rng.uniform(size=(NODES, 2))), rng.standard_normal(NODES)
    kernel = Gaussian(0.1)
    x = points.nodes
    square = (x[:, None, 0] - x[None, :, 0]) ** 2 + (x[:, None, 1] - x[None, :, 1]) ** 2
    matrix = 2 / NODES * np.exp(-square / (2 * kernel.width**2))  # K = 2 k, weights 1 / N
    degree = matrix.sum(axis=1)
    t = span / float(degree.max())  # the kernel is positive definite: rho(L) <= max d

    def peer(method: str, tol: float) -> Any:
        return solve_ivp(lambda _, u: matrix @ u - degree * u, (0, t), u0, method, rtol=tol, atol=tol).y[:, -1]

    def ours() -> Any:
        flow = GradientFlow(J(affinity(kernel, points, rtol=1e-10)))
        return solve(flow, u0, t=t, integrator=Exponential(tol=1e-9), energies=False)

    exact = peer("DOP853", 1e-13)

    def error(u: Any) -> float:
        return float(np.linalg.norm(u - exact) / np.linalg.norm(u0))

    tolerance = next(tol for tol in 10.0 ** np.arange(-7, -13, -0.5) if error(peer("RK45", tol)) <= ERROR)
    solution = ours()
    found = error(solution.final)
    times = interleaved({"RK45": lambda: peer("RK45", tolerance), "nlflow": ours}, repeats=5)
    peer_time, our_time = times["RK45"], times["nlflow"]
    stats = solution.stats
    work = (
        f"J-flow of {NODES} scattered nodes to t rho = {span:g}, nodes to solution ({stats['method']}, "
        f"{stats['applications']} averages, error {found:.0e}), against RK45 on the dense matrix"
    )
    texts = f"{peer_time:.2f} s", f"{our_time:.3f} s"
    return [Row.of("flows", work, *texts, peer_time / our_time, least=20, also=found <= ERROR)]


def against_pygsp() -> list[Row]:
    """The heat semigroup of one graph: PyGSP's Chebyshev filter of order 30, ours to the same accuracy."""
    work = f"heat semigroup of a graph of {GRAPH_NODES} nodes"
    if (absent := missing("flows", work, "pygsp", "none")) is not None:
        return [absent]
    from pygsp import filters, graphs

    rng = np.random.default_rng(0)
    points = Points(rng.uniform(size=(GRAPH_NODES, 2)), weights=np.ones(GRAPH_NODES))
    edges = affinity(Gaussian(0.006), points, method="sparse", rtol=1e-3).edges()
    graph = graphs.Graph(edges.tocsc())
    graph.estimate_lmax()
    u0 = rng.standard_normal(GRAPH_NODES)
    scale = 20.0
    heat = filters.Heat(graph, scale=scale, normalize=False)  # exp(-scale lambda / lambda_max)
    # J symmetrizes to K = 2 k, so half the edges give the graph's own Laplacian.
    flow = GradientFlow(J(SparseAffinity(points, edges * 0.5)))
    t = scale / float(graph.lmax)

    def ours(tol: float) -> Any:
        return solve(flow, u0, t=t, integrator=Exponential(tol=tol), energies=False)

    def peer() -> Any:
        return heat.filter(u0, method="chebyshev", order=ORDER)

    exact = ours(1e-13).final
    apart = float(np.abs(peer() - exact).max() / np.abs(u0).max())
    tol = min(max(apart, 1e-12), 1e-3)
    solution = ours(tol)
    times = interleaved({"PyGSP": peer, "nlflow": lambda: ours(tol)}, repeats=5)
    ratio = times["PyGSP"] / times["nlflow"]
    work = (
        f"{work} and {edges.nnz} edges, {solution.stats['applications']} "
        f"averages to the error {apart:.0e} of PyGSP's filter of order {ORDER}"
    )
    return [Row.of("flows", work, f"{times['PyGSP'] * 1e3:.0f} ms", f"{times['nlflow'] * 1e3:.0f} ms", ratio)]
