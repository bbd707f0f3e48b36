"""u(t) of a frozen flow to about rounding: what integrators are held against."""

from __future__ import annotations

import numpy as np
import scipy.linalg

from nlflow._array import Array, constant_like, to_numpy
from nlflow.errors import check_memory
from nlflow.flows.integrators import Exponential
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import dense_operator
from nlflow.studies.settings import integrate

__all__ = ["exact_solution"]


def exact_solution(flow: LinearFlow, start: Array, t: float) -> tuple[Array, float]:
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
    flat = to_numpy(start).reshape(n, -1)
    size = n + flat.shape[1]
    check_memory("the exponential of a dense matrix", 10 * 8 * size**2, "use fewer nodes")
    matrix = np.zeros((size, size))
    matrix[:n, :n] = -t * dense_operator(flow)
    if flow.fidelity is not None and flow.observed is not None:
        matrix[:n, n:] = t * to_numpy(flow.fidelity.times(flow.observed)).reshape(n, -1)
    moved = scipy.linalg.expm(matrix)
    result = moved[:n, :n] @ flat + moved[:n, n:]
    return constant_like(result.reshape(tuple(start.shape)), start), 0.0
