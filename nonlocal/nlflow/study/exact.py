"""u(t) of a frozen flow to about rounding: what integrators are held against."""

from __future__ import annotations

import numpy as np
import scipy.linalg

from nlflow.errors import check_memory
from nlflow.flow import Flow
from nlflow.integrators import Exponential
from nlflow.study.settings import Floats, integrate

__all__ = ["exact_solution"]


def exact_solution(flow: Flow, start: Floats, t: float) -> tuple[Floats, float]:
    """Return u(t) to about rounding, and a bound of its error relative to the signal.

    By the exact exponential for symmetric flows, by `scipy.linalg.expm` of [[-A, phi f], [0, 0]] for others.

    Raises
    ------
    MemoryLimitError
        When the dense matrix would pass the limit.
    """
    if flow.symmetric:
        solution = integrate(flow, start, t, Exponential(tol=1e-13))
        return solution.final, 2 * float(solution.stats["error_bound"])
    n = flow.affinity.domain.size
    flat = start.reshape(n, -1)
    size = n + flat.shape[1]
    check_memory("the exponential of a dense matrix", 10 * 8 * size**2, "use fewer nodes")
    matrix = np.zeros((size, size))
    matrix[:n, :n] = -t * flow.linear(np.eye(n).reshape(*flow.affinity.domain.shape, n)).reshape(n, n)
    if flow.fidelity is not None and flow.observed is not None:
        matrix[:n, n:] = t * flow.fidelity.times(flow.observed).reshape(n, -1)
    moved = scipy.linalg.expm(matrix)
    result = moved[:n, :n] @ flat + moved[:n, n:]
    return np.asarray(result.reshape(start.shape)), 0.0
