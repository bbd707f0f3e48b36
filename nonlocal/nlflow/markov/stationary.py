"""Stationary laws of chains that need not be reversible, and the structure that decides whether there is just one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities.graph import Sparse
from nlflow.errors import NumericalError

_BLOCK = 64  # states that are removed before the rest of the matrix is brought up to date
SMALLEST = float(np.finfo(np.float64).tiny)
_WELL_BELOW = 0.05
RESTARTS = 500
"""Of Arnoldi iteration; where these do not help, more hardly ever do."""


def communicating_classes(matrix: Floats | Sparse) -> tuple[int, NDArray[np.int32]]:
    """Return the number of communicating classes and the class of each state.

    Two states communicate when each can be reached from the other by transitions of positive probability.
    """
    from scipy.sparse.csgraph import connected_components

    count, labels = connected_components(matrix > 0, directed=True, connection="strong")
    return int(count), labels


def closed_classes(matrix: Floats | Sparse) -> list[NDArray[np.intp]]:
    """Return the classes of states that communicate and are never left, each in increasing order."""
    count, labels = communicating_classes(matrix)
    if count == 1:
        return [np.arange(len(labels))]
    leaving = np.zeros(count, bool)
    if isinstance(matrix, np.ndarray):
        leaving[labels[((matrix > 0) & (labels[:, None] != labels)).any(axis=1)]] = True
    else:
        rows, columns = (matrix > 0).nonzero()
        leaving[labels[rows[labels[rows] != labels[columns]]]] = True
    ends = np.cumsum(np.bincount(labels))[:-1]
    members = np.split(np.argsort(labels, kind="stable"), ends)
    return [inside for inside, left in zip(members, leaving, strict=True) if not left]


def within(matrix: Floats | Sparse, inside: NDArray[np.intp]) -> Any:
    """Return the moves between some states, which are numbered in increasing order; the matrix itself for all."""
    if len(inside) == matrix.shape[0]:
        return matrix
    return matrix[np.ix_(inside, inside)] if isinstance(matrix, np.ndarray) else matrix[inside][:, inside]


def dense(matrix: Floats | Sparse) -> Floats:
    """Return a matrix of moves with all its zeros."""
    return matrix if isinstance(matrix, np.ndarray) else np.asarray(matrix.toarray())


def reaching(graph: Sparse, targets: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which states can reach one of `targets` (or are one) along the edges i -> j of a graph.

    O(edges) time for each move that the farthest of them is away.
    """
    seen, front = targets.copy(), targets
    while np.any(front):
        front = (graph @ front.astype(np.float64) > 0) & ~seen
        seen |= front
    return seen


def states_without_end(matrix: Floats | Sparse, start: NDArray[np.int64], stop: Floats) -> NDArray[np.intp]:
    """Return the states that walkers from `start` can come to and where none is ever stopped."""
    from scipy.sparse import csr_array, diags_array

    starting = np.zeros(matrix.shape[0], bool)
    starting[start] = True
    graph = csr_array(matrix > 0).astype(np.float64)
    going = csr_array(diags_array((stop < 1).astype(np.float64)) @ graph)  # nobody goes on from where all are stopped
    return np.flatnonzero(reaching(going.T.tocsr(), starting) & ~reaching(graph, stop > 0))


def balanced(moves: Floats | Sparse, law: Floats, rtol: float, smallest: float) -> bool:
    """Tell whether as much flows from i to j as back, law_i P_ij = law_j P_ji, for all pairs however rare.

    A probability below `smallest` may have underflowed to 0.
    """
    if not isinstance(moves, np.ndarray):
        there = moves.multiply(law[:, None]).tocsr()
        off = (abs(there - there.T) - rtol * there.maximum(there.T)).tocoo()
        return not np.any(off.data > smallest * np.maximum(law[off.row], law[off.col]))
    flux = law[:, None] * moves
    least = smallest * np.maximum(law[:, None], law)
    return not np.any(np.abs(flux - flux.T) > rtol * np.maximum(flux, flux.T) + least)


def period_of(matrix: Floats | Sparse) -> int:
    """Return the period of an irreducible chain: the greatest common divisor of the lengths of all round trips.

    From the levels of a breadth-first search: each transition i -> j closes trips whose length is level_i + 1 - level_j
    up to multiples of the period (Denardo 1977, doi 10.1287/moor.2.1.20). O(N^2), O(edges) for a sparse matrix.
    """
    if np.any(matrix.diagonal() > 0):
        return 1
    from scipy.sparse.csgraph import breadth_first_order

    graph = matrix > 0
    order, predecessors = breadth_first_order(graph, 0, directed=True)
    level = np.zeros(matrix.shape[0], np.int64)
    for state in order[1:]:
        level[state] = level[predecessors[state]] + 1
    rows, columns = graph.nonzero()
    return int(np.gcd.reduce(np.abs(level[rows] + 1 - level[columns])))


def reduce_states(rates: Floats, killed: Floats) -> Floats:
    """Remove states one after another, the last first, in place, and return the rates at which each was left.

    Row i of `rates` holds the rates of moving from i to j (the diagonal does not count), ``killed[i]`` >= 0 the rate at
    which the walk ends in i. Below the diagonal stay the rates to the states that are left, above it the shares
    rate_ik / left_k of the removed ones. Nothing is subtracted, so every number keeps its digits however slow the walk
    is (Grassmann, Taksar and Heyman 1985, doi 10.1287/opre.33.5.1107; O'Cinneide 1993, doi 10.1007/BF01385743). O(N^3)
    time, most of it in matrix products.

    Raises
    ------
    NumericalError
        When a state other than 0 cannot be left: rates underflow, or nothing that can be reached ends the walk.
    """
    n = len(rates)
    left = np.empty(n)
    for high in range(n, 0, -_BLOCK):
        low = max(high - _BLOCK, 0)
        for k in range(high - 1, low - 1, -1):
            left[k] = killed[k] + rates[k, :k].sum()
            if k == 0:
                break
            if left[k] < SMALLEST:
                raise NumericalError(f"affinity: the probabilities of leaving state {k} underflow")
            rates[:k, k] /= left[k]
            killed[:k] += rates[:k, k] * killed[k]
            rates[low:k, :k] += np.outer(rates[low:k, k], rates[k, :k])
            rates[:low, low:k] += np.outer(rates[:low, k], rates[k, low:k])
        rates[:low, :low] += rates[:low, low:high] @ rates[low:high, :low]
    return left


def state_reduction(matrix: Floats) -> Floats:
    """Return the stationary law of an irreducible chain by `reduce_states`: every entry to full precision.

    O(N^3) time, one copy of the matrix.

    Raises
    ------
    NumericalError
        When probabilities underflow so that the chain falls apart in float64.
    """
    a = np.array(matrix, dtype=np.float64)
    n = len(a)
    advice = "so the stationary law is not determined in float64; use a wider kernel or a smaller scale of the logits"
    try:
        reduce_states(a, np.zeros(n))
    except NumericalError as error:
        raise NumericalError(f"{error}, {advice}") from error
    # pi_k = sum of pi_i rate_ik / left_k over i < k, as mantissas and exponents: between two states of some size there
    # may lie some whose probability no float can hold.
    law, power = np.ones(n), np.zeros(n, np.int64)
    for k in range(1, n):
        shares, powers = np.frexp(a[:k, k])
        powers = powers + power[:k]
        inside = shares > 0
        if not np.any(inside):
            raise NumericalError(f"affinity: the probabilities of reaching state {k} underflow, {advice}")
        highest = int(powers[inside].max())
        total = law[:k] @ (shares * np.exp2(np.where(inside, powers - highest, 0).astype(np.float64)))
        law[k], exponent = np.frexp(total)
        power[k] = highest + exponent
    law *= np.exp2((power - power.max()).astype(np.float64))
    return np.asarray(law / law.sum())


def log_state_reduction(logs: Floats) -> Floats:
    """Return the logarithm of the stationary law of an irreducible chain from those of its moves.

    As `state_reduction`, where moves and law are below what a float holds. O(N^3) time, 30 times as long.
    """
    a = np.array(logs, dtype=np.float64)
    n = len(a)
    for k in range(n - 1, 0, -1):
        a[:k, k] -= np.logaddexp.reduce(a[k, :k])
        a[:k, :k] = np.logaddexp(a[:k, :k], a[:k, k, None] + a[k, :k])
    law = np.zeros(n)
    for k in range(1, n):
        law[k] = np.logaddexp.reduce(law[:k] + a[:k, k])
    return np.asarray(law - np.logaddexp.reduce(law))


def left_eigenvector(push: Callable[[Floats], Floats], states: int) -> Floats:
    """Return the left eigenvector at 1 as a law.

    Arnoldi iteration with p -> p P alone: matrix-free, a few dozen to a few hundred products. The error in total
    variation, estimated by the residual over the distance of the next eigenvalue from 1, is at most 1e-6.

    Raises
    ------
    NumericalError
        When the eigenvalue 1 is not separated from the next, or the law is not reached.
    """
    from scipy.sparse.linalg import ArpackError, ArpackNoConvergence

    advice = "the chain is reducible or mixes too slowly; use a wider kernel, or fewer states"
    try:
        try:
            values, vectors = _leading(push, states, 2, 1e-12)
        except ArpackNoConvergence:
            # Where the others lie densely none of them is found sharply. That they are well below 1 is enough.
            rough = np.sort(_leading(push, states, 2, 1e-3)[0].real)[0]
            if rough > 1 - _WELL_BELOW:
                raise
            values, vectors = _leading(push, states, 1, 1e-12)
            values = np.append(values, rough)
    except ArpackError as error:
        raise NumericalError(f"affinity: the stationary law was not found by Arnoldi iteration ({advice})") from error
    order = np.argsort(-values.real)
    gap = 1 - float(values[order[1]].real)
    if abs(values[order[0]] - 1) > 1e-8 or gap < 1e-9:
        raise NumericalError(f"affinity: the eigenvalue 1 is not separated from the next (gap {gap:.2g}): {advice}")
    law: Floats = np.abs(vectors[:, order[0]].real)
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


def _leading(push: Callable[[Floats], Floats], states: int, count: int, tol: float) -> tuple[Any, Any]:
    """Return the eigenvalues of p -> p P with the largest real parts, and their vectors."""
    from scipy.sparse.linalg import LinearOperator, eigs

    operator = LinearOperator((states, states), matvec=lambda p: push(np.ravel(p)), dtype=np.float64)
    # The eigenvalue 1 has the largest real part, also where a periodic chain has others of modulus 1.
    start: Any = np.full(states, 1 / states)
    values, vectors = eigs(operator, k=count, which="LR", v0=start, tol=tol, maxiter=RESTARTS)
    return values, vectors
