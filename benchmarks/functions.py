"""Functions of an operator against SciPy's expm_multiply and funm_multiply_krylov, each at the same achieved error."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.linalg import expm, fractional_matrix_power, sqrtm
from scipy.sparse.linalg import LinearOperator, expm_multiply, funm_multiply_krylov

from benchmarks.harness import Row, interleaved
from nlflow import Gaussian, GradientFlow, J, Points, affinity
from nlflow.flows import function_of

ERROR = 1e-8
KAPPA = 0.3  # of the Matérn function, squared and relative to the largest eigenvalue

# Of our operator and of SciPy's, which takes a function of the small matrix of its Krylov space.
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "heat": (lambda a: np.exp(-100 * a), lambda h: expm(-100 * h)),
    "root": (np.sqrt, lambda h: sqrtm(h)),
    "Matern": (
        lambda a: (KAPPA**2 + a) ** -0.8,
        lambda h: fractional_matrix_power(h + KAPPA**2 * np.eye(len(h)), -0.8),
    ),
}  # fmt: skip


def run(nodes: int = 2000, repeats: int = 5) -> list[Row]:
    rng = np.random.default_rng(0)
    flow = GradientFlow(J(affinity(Gaussian(width=0.05), Points(rng.uniform(size=(nodes, 2))))), "degree")
    # In the coordinates in which the operator is symmetric in the Euclidean product; SciPy gets it as a matrix.
    root = np.sqrt(flow.measure(np.zeros(nodes)))
    matrix = root[:, None] * (np.eye(nodes) - flow.affinity.matrix) / root
    matrix = (matrix + matrix.T) / 2
    values, vectors = np.linalg.eigh(matrix)
    values[0] = 0.0
    v = rng.standard_normal(nodes)
    v -= flow.mean(v)
    rows = []
    for name, (function, of_matrix) in FUNCTIONS.items():
        exact = vectors @ (function(np.maximum(values, 0.0)) * (vectors.T @ (root * v))) / root
        rows += _rows(name, flow, matrix, root, v, exact, function, of_matrix, repeats)
    return rows


def _rows(
    name: str, flow: GradientFlow, matrix: Any, root: Any, v: Any, exact: Any, function: Any, of_matrix: Any,
    repeats: int,
) -> list[Row]:  # fmt: skip
    count = [0]

    def product(x: Any) -> Any:
        count[0] += 1 if np.ndim(x) == 1 else x.shape[1]
        return matrix @ x

    peer_operator = LinearOperator(matrix.shape, matvec=product, matmat=product, rmatvec=product, dtype=np.float64)

    def ours(tol: float) -> tuple[Any, int]:
        method = "chebyshev" if name == "heat" else "lanczos"
        found = function_of(flow, function, tol=tol, method=method).evaluate(v)
        return found.u, found.applications

    def krylov(size: int, tol: float) -> tuple[Any, int]:
        count[0] = 0
        u = funm_multiply_krylov(of_matrix, peer_operator, root * v, assume_a="her", rtol=tol, restart_every_m=size)
        return u / root, count[0]

    def expm_peer(tol: float) -> tuple[Any, int]:
        count[0] = 0
        scaled = LinearOperator(matrix.shape, matvec=lambda x: -100 * product(x), matmat=lambda x: -100 * product(x),
                                rmatvec=lambda x: -100 * product(x), dtype=np.float64)  # fmt: skip
        return expm_multiply(scaled, root * v, traceA=-100 * float(np.trace(matrix))) / root, count[0]

    # SciPy's restarts after a number of steps that one has to know.
    krylovs = {f"funm_multiply_krylov, {size} steps": partial(krylov, size) for size in (20, 30, 50)}
    solvers: dict[str, Callable[[float], tuple[Any, int]]] = {"nlflow": ours, **krylovs}
    if name == "heat":
        solvers["expm_multiply"] = expm_peer
    counts: dict[str, int] = {}
    tasks: dict[str, Callable[[], Any]] = {}
    for who, solver in solvers.items():
        for tol in 10.0 ** np.arange(-6.0, -13.5, -0.5):
            u, used = solver(float(tol))
            if np.linalg.norm(root * (u - exact)) <= ERROR * np.linalg.norm(root * v):
                counts[who], tasks[who] = used, partial(solver, float(tol))
                break
        else:
            print(f"{who} does not reach {ERROR:g} for {name}")
    times = interleaved(tasks, repeats=repeats, clock=time.process_time)
    rows = []
    for who in tasks:
        if who == "nlflow":
            continue
        work = f"{name}, {len(v)} nodes: products to an error of {ERROR:g}, against {who}"
        rows.append(Row.of("functions", work, str(counts[who]), str(counts["nlflow"]), counts[who] / counts["nlflow"]))
        work = f"{name}, {len(v)} nodes: time, against {who}"
        peer, mine = f"{times[who] * 1e3:.1f} ms", f"{times['nlflow'] * 1e3:.1f} ms"
        rows.append(Row.of("functions", work, peer, mine, times[who] / times["nlflow"]))
    return rows
