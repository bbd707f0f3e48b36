"""Stationary laws of chains that need not be reversible, and the structure that decides whether there is just one."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import NumericalError

__all__ = ["communicating_classes", "left_eigenvector", "period_of", "state_reduction"]

Matrix = NDArray[np.float64]


def communicating_classes(matrix: Matrix) -> tuple[int, NDArray[np.int32]]:
    """Return the number of communicating classes and the class of each state.

    Two states communicate when each can be reached from the other by transitions of positive probability.
    """
    from scipy.sparse.csgraph import connected_components

    count, labels = connected_components(matrix > 0, directed=True, connection="strong")
    return int(count), labels


def period_of(matrix: Matrix) -> int:
    """Return the period of an irreducible chain: the greatest common divisor of the lengths of all round trips.

    From the levels of a breadth-first search: each transition i -> j closes trips whose length is level_i + 1 - level_j
    up to multiples of the period (Denardo 1977, doi 10.1287/moor.2.1.62). O(N^2).
    """
    if np.any(np.diagonal(matrix) > 0):
        return 1
    from scipy.sparse.csgraph import breadth_first_order

    graph = matrix > 0
    order, predecessors = breadth_first_order(graph, 0, directed=True)
    level = np.zeros(len(matrix), np.int64)
    for state in order[1:]:
        level[state] = level[predecessors[state]] + 1
    rows, columns = graph.nonzero()
    return int(np.gcd.reduce(np.abs(level[rows] + 1 - level[columns])))


def state_reduction(matrix: Matrix) -> Matrix:
    """Return the stationary law of an irreducible chain by removing one state after another.

    Nothing is subtracted, so every entry keeps its digits however slow the chain mixes (Grassmann, Taksar and Heyman
    1985, doi 10.1287/opre.33.5.1107; O'Cinneide 1993, doi 10.1007/BF01385740). O(N^3) time, one copy of the matrix.

    Raises
    ------
    NumericalError
        When probabilities underflow so that the chain falls apart in float64.
    """
    a = np.array(matrix, dtype=np.float64)
    n = len(a)
    for last in range(n - 1, 0, -1):
        leaving = float(a[last, :last].sum())
        if leaving == 0:
            raise NumericalError(
                f"affinity: the probabilities of leaving state {last} underflow, so the stationary law is not "
                "determined in float64; use a wider kernel or a smaller scale of the logits"
            )
        a[:last, last] /= leaving
        a[:last, :last] += np.outer(a[:last, last], a[last, :last])
    law = np.zeros(n)
    law[0] = 1.0
    for state in range(1, n):
        law[state] = law[:state] @ a[:state, state]
        if law[state] > 1e150:  # long before anything overflows
            law[: state + 1] /= law[state]
    return np.asarray(law / law.sum())


def left_eigenvector(push: Callable[[Matrix], Matrix], states: int) -> Matrix:
    """Return the left eigenvector at 1 as a law.

    Arnoldi iteration with p -> p P alone: matrix-free, a few dozen to a few hundred products. The error in total
    variation, estimated by the residual over the distance of the next eigenvalue from 1, is at most 1e-6.

    Raises
    ------
    NumericalError
        When the eigenvalue 1 is not separated from the next, or the law is not reached.
    """
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigs

    operator = LinearOperator((states, states), matvec=lambda p: push(np.ravel(p)), dtype=np.float64)
    advice = "the chain is reducible or mixes too slowly; use a wider kernel, or fewer states"
    try:
        # The eigenvalue 1 has the largest real part, also where a periodic chain has others of modulus 1.
        values, vectors = eigs(operator, k=2, which="LR", v0=np.full(states, 1 / states), tol=1e-12)
    except ArpackError as error:
        raise NumericalError(f"affinity: the stationary law was not found by Arnoldi iteration ({advice})") from error
    order = np.argsort(-values.real)
    gap = 1 - float(values[order[1]].real)
    if abs(values[order[0]] - 1) > 1e-8 or gap < 1e-9:
        raise NumericalError(f"affinity: the eigenvalue 1 is not separated from the next (gap {gap:.2g}): {advice}")
    law = np.abs(vectors[:, order[0]].real)
    law /= law.sum()
    for _ in range(3):  # moves of the chain take out what Arnoldi iteration left of the fast modes
        law = np.maximum(push(law), 0)
        law /= law.sum()
    distance = float(np.abs(push(law) - law).sum()) / 2 / gap
    if not math.isfinite(distance) or distance > 1e-6:
        raise NumericalError(
            f"affinity: the stationary law is uncertain by {distance:.2g} in total variation: {advice}"
        )
    return law
