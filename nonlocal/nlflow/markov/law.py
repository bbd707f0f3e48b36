"""The stationary law of a chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, to_numpy
from nlflow.affinities import Affinity
from nlflow.affinities.graph import Sparse
from nlflow.affinities.sparse import SparseAffinity
from nlflow.domains import Domain
from nlflow.errors import NumericalError
from nlflow.kernels import ExpDotProduct
from nlflow.markov.absorbing import REDUCED_STATES, balanced_law
from nlflow.markov.aggregation import needed_bytes
from nlflow.markov.moves import DENSE_STATES, Moves, communicating_classes, to_dense, within
from nlflow.markov.reduction import SMALLEST, log_state_reduction, state_reduction

LEAST = 1e-280
"""Of a law: below, its digits are not all there."""
PATIENCE = 10**6
SMALLEST_DISTANCE = 1e-12
"""In total variation: the sum of N roundings stays below."""
RESTARTS = 500
"""Of Arnoldi iteration."""
_LOST = 16 * float(np.finfo(np.float64).eps)  # of a distance, for each state
_ROUNDING = 1e-11  # relative difference of fluxes pi_i P_ij and pi_j P_ji that rounding of the moves may leave
_RANGE = 1e-280  # of fluxes: beyond, light ones have lost digits beside heavy ones
_WELL_BELOW = 0.05
# The laws of affinities that are not symmetric: an equilibrium, its diversity and their bounds each make a chain of
# their own, lazy or not, over many fidelities, and all of these have one law. By identity, for as long as the affinity
# lives: one of a user's own may say that others are equal to it, or have no hash.
_LAWS: dict[int, Floats] = {}


class StationaryLaw:
    """The long run of a walker, which no laziness changes."""

    def __init__(self, moves: Moves) -> None:
        self.moves, self.affinity, self.states = moves, moves.affinity, moves.states

    # ---- balance

    @cached_property
    def reversible(self) -> bool:
        """See `MarkovChain.reversible`."""
        if self.affinity.symmetric:
            return True
        rtol = 1e-5 if self.moves.single else 1e-8
        if self._balance is not None and (self._balance.misfit <= rtol or self.moves.sparse is not None):
            return self._balance.misfit <= rtol
        if sum(map(len, self.moves.closed)) < self.states:
            return False
        for inside in self.moves.closed:
            law = self.stationary if len(inside) == self.states else self._within(inside)
            if not balanced(within(self.moves.listed, inside), law, rtol, self.moves.least):
                return False
        return True

    @cached_property
    def _balance(self) -> Balance | None:
        """Detailed balance along a tree, of many states whose k is not symmetric."""
        if self.affinity.symmetric or self.states <= DENSE_STATES:
            return None
        return balance(self.moves.listed)

    @property
    def misfit(self) -> str:
        if self._balance is None:
            return ""
        return f" (pi_i P_ij and pi_j P_ji differ by up to {self._balance.misfit:.2g} relative)"

    @property
    def balanced(self) -> bool:
        return self._balance is not None and self._balance.misfit <= _ROUNDING

    @cached_property
    def symmetric_form(self) -> Affinity | None:
        """The affinity whose k is symmetric and whose chain this is, or None."""
        listed, domain = self.moves.sparse, self.affinity.domain
        if self.affinity.symmetric:
            if listed is None or self.moves.given is not None:
                return self.affinity
            return balance(listed).fluxes(listed, domain) or self.affinity
        if listed is None or self._balance is None or not self.balanced:
            return None
        return self._balance.fluxes(listed, domain)

    # ---- the law, of shape (N,)

    @property
    def mass(self) -> Floats:
        measure = self.affinity.measure("degree", self.affinity.log_degree)
        return np.asarray(to_numpy(measure), dtype=np.float64).ravel()

    @cached_property
    def stationary(self) -> Floats:
        """See `MarkovChain.stationary`."""
        self.moves.require_unique("the stationary law")
        if self.affinity.symmetric:
            return self.mass
        law = _LAWS.get(id(self.affinity))
        if law is None:
            law = _LAWS[id(self.affinity)] = self._found()
            finalize(self.affinity, _LAWS.pop, id(self.affinity), None).atexit = False
        return law.copy()

    def _found(self) -> Floats:
        if self.states <= DENSE_STATES and self._logs_of_moves is not None and self.log is not None:
            return np.exp(self.log)
        law = np.zeros(self.states)
        law[self.moves.closed[0]] = self._within(self.moves.closed[0])
        return law

    def _within(self, inside: NDArray[np.intp]) -> Floats:
        if self._balance is not None and self.balanced:
            law = np.exp(self._balance.logs[inside])
            return np.asarray(law / law.sum())
        moves = within(self.moves.listed, inside)
        if len(inside) <= REDUCED_STATES:
            self.moves.check_room("the stationary law", 24 * len(inside) ** 2)
            return state_reduction(to_dense(moves))
        self.moves.check_room("the stationary law", needed_bytes(getattr(moves, "nnz", moves.size), len(inside), 1))
        return balanced_law(moves, left_eigenvector(lambda p: np.asarray(p @ moves), len(inside)))

    @cached_property
    def of_parts(self) -> Floats:
        """Some stationary law where there are several."""
        if self.affinity.symmetric:
            return self.mass
        law, ends = np.zeros(self.states), sum(map(len, self.moves.closed))
        for inside in self.moves.closed:
            law[inside] = self._within(inside) * (len(inside) / ends)
        return law

    @cached_property
    def log(self) -> Floats | None:
        """See `MarkovChain.log_law`."""
        if self.affinity.symmetric:
            logs = np.asarray(to_numpy(self.affinity._log_degree_wide()), dtype=np.float64).ravel()
            logs = logs + np.log(self.affinity.domain.weights).ravel()
            return np.asarray(logs - np.logaddexp.reduce(logs))
        moves = self._logs_of_moves
        if moves is None:
            law = self.stationary
            if float(law.min()) > LEAST:
                return np.asarray(np.log(law))
            moves = self.affinity._log_transitions()
        if moves is None:
            # Moves of probability 0 as they were given; a dot product has none of its own.
            if not isinstance(self.affinity.kernel, ExpDotProduct) and len(self.moves.closed[0]) < self.states:
                return None
        elif communicating_classes(np.isfinite(moves))[0] > 1:  # by a mask, or in a matrix
            return None
        elif self.states <= DENSE_STATES:
            return log_state_reduction(moves)
        raise NumericalError(
            f"affinity: got method={self.affinity.method!r} on {self.states} nodes with a stationary law that "
            f"underflows, expected method='dense', 'pairwise' or 'tiled' on at most {DENSE_STATES} nodes, of which its "
            "logarithm is known; use one of these, or scale the logits down"
        )

    @cached_property
    def _logs_of_moves(self) -> Floats | None:
        """The logarithms of all moves where some underflow (not only such as cannot happen); None elsewhere."""
        if self.moves.sparse is not None:
            return None
        rare = self.moves.dense < self.moves.least
        if not np.any(rare):
            return None
        logs = self.affinity._log_transitions()
        return logs if logs is not None and np.any(np.isfinite(logs) & rare) else None

    def log_moves(self) -> Floats:
        """See `MarkovChain.log_moves`."""
        known = self._logs_of_moves
        with np.errstate(divide="ignore"):  # log 0 = -inf is meant
            return np.log(self.moves.dense) if known is None else known.copy()


# ---- how near laws are, in total variation


def _farthest(law: StationaryLaw, laws: Floats) -> float:
    return float(np.abs(laws - law.stationary).sum(axis=1).max()) / 2


def distances(law: StationaryLaw, steps: int, laws: Iterator[Floats] | None) -> Floats:
    if laws is not None:
        return np.array([_farthest(law, moved.reshape(1, -1)) for moved in islice(laws, steps + 1)])
    matrix, reached = law.moves.matrix(), np.eye(law.states)
    result = [_farthest(law, reached)]
    for _ in range(steps):
        reached = reached @ matrix
        result.append(_farthest(law, reached))
    return np.array(result)


def rounded(law: StationaryLaw, eps: float) -> float:
    """Return what rounding may make of a distance in total variation that is `eps`."""
    # Small chains have distances that equal an `eps` such as 1/4, which rounding must not keep above it.
    most = 1e-6 if law.moves.single else min(_LOST * law.states, SMALLEST_DISTANCE)
    return eps + min(most, eps / 4)


def mixing_time(law: StationaryLaw, eps: float, laws: Iterator[Floats] | None) -> int:
    """See `MarkovChain.mixing_time`."""
    within = rounded(law, eps)
    if laws is not None:
        for k, moved in enumerate(islice(laws, PATIENCE + 1)):
            if _farthest(law, moved.reshape(1, -1)) <= within:
                return k
        raise NumericalError(f"eps: {eps:g} was not reached in {PATIENCE} moves; use mixing_bounds()")
    # The distance decreases with k: double until it is small enough, then add up the powers that keep it above.
    powers = [law.moves.matrix()]
    if _farthest(law, np.eye(law.states)) <= within:
        return 0
    while _farthest(law, powers[-1]) > within:
        if len(powers) > 60:
            raise NumericalError(f"eps: {eps:g} was not reached in 2^60 moves; the chain hardly mixes")
        square = powers[-1] @ powers[-1]
        powers.append(square / square.sum(axis=1, keepdims=True))
    done, reached = 0, np.eye(law.states)
    for exponent in reversed(range(len(powers) - 1)):
        further = reached @ powers[exponent]
        if _farthest(law, further) > within:
            done, reached = done + 2**exponent, further
    return done + 1


# ---- how it is found


@dataclass(frozen=True)
class Balance:
    """The law that detailed balance gives to each communicating class, by its logarithm."""

    logs: Floats
    misfit: float  # largest relative difference of pi_i P_ij and pi_j P_ji, infinite where a move has no way back
    parts: NDArray[np.int32]

    def fluxes(self, moves: Sparse, domain: Domain) -> SparseAffinity | None:
        """Return pi_i P_ij as an affinity; None where it underflows."""
        from scipy.sparse import csr_array

        rows = np.repeat(np.arange(len(self.logs)), np.diff(moves.indptr))
        with np.errstate(divide="ignore"):
            logs = np.log(moves.data) + self.logs[rows]
        if logs.min() < math.log(_RANGE):
            return None
        flux = csr_array((np.exp(logs), moves.indices, moves.indptr), shape=moves.shape)
        flux = csr_array((flux + flux.T) / 2)
        return SparseAffinity(domain, flux)


def balance(moves: Any) -> Balance:
    """Follow log pi_j = log pi_i + log P_ij - log P_ji along a breadth-first tree of listed moves."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, connected_components

    listed = csr_array(moves)
    listed.sort_indices()
    back = listed.T.tocsr()
    back.sort_indices()
    size = listed.shape[0]
    parts = connected_components(listed, directed=True, connection="weak")[1]
    alike = np.array_equal(listed.indptr, back.indptr) and np.array_equal(listed.indices, back.indices)
    if not alike or not listed.nnz or min(listed.data.min(), back.data.min()) < SMALLEST:
        return Balance(np.zeros(size), math.inf, parts)
    rises = np.log(listed.data) - np.log(back.data)
    # One more state, tied to one of each class, makes a single tree.
    first = np.unique(parts, return_index=True)[1]
    starts = np.append(listed.indptr, listed.nnz + len(first))
    graph = csr_array(
        (np.ones(listed.nnz + len(first)), np.append(listed.indices, first), starts), shape=(size + 1, size + 1)
    )
    parents = np.append(breadth_first_order(graph, size, directed=True)[1][:size], size)
    inner = np.flatnonzero(parents[:size] < size)
    edge = csr_array((np.arange(1, listed.nnz + 1), listed.indices, listed.indptr), shape=listed.shape)
    logs = np.zeros(size + 1)
    logs[inner] = rises[np.asarray(edge[parents[inner], inner]).ravel().astype(np.int64) - 1]
    while np.any(parents != size):
        logs += logs[parents]
        parents = parents[parents]
    logs = logs[:size]
    highest = np.full(len(first), -np.inf)
    np.maximum.at(highest, parts, logs)
    logs -= highest[parts]
    logs += np.log(np.bincount(parts) / size / np.bincount(parts, np.exp(logs)))[parts]
    rows = np.repeat(np.arange(size), np.diff(listed.indptr))
    with np.errstate(over="ignore"):  # infinite where no float holds how far it is
        misfit = float(np.abs(np.expm1(rises + logs[rows] - logs[listed.indices])).max())
    return Balance(logs, misfit, parts)


def balanced(moves: Floats | Sparse, law: Floats, rtol: float, smallest: float) -> bool:
    """Tell whether law_i P_ij = law_j P_ji for all pairs; moves below `smallest` may have underflowed."""
    if not isinstance(moves, np.ndarray):
        there = moves.multiply(law[:, None]).tocsr()
        off = (abs(there - there.T) - rtol * there.maximum(there.T)).tocoo()
        return not np.any(off.data > smallest * np.maximum(law[off.row], law[off.col]))
    flux = law[:, None] * moves
    least = smallest * np.maximum(law[:, None], law)
    return not np.any(np.abs(flux - flux.T) > rtol * np.maximum(flux, flux.T) + least)


def left_eigenvector(push: Callable[[Floats], Floats], states: int) -> Floats:
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
    from scipy.sparse.linalg import LinearOperator, eigs

    operator = LinearOperator((states, states), matvec=lambda p: push(np.ravel(p)), dtype=np.float64)
    # The eigenvalue 1 has the largest real part, also where a periodic chain has others of modulus 1.
    start: Any = np.full(states, 1 / states)
    values, vectors = eigs(operator, k=count, which="LR", v0=start, tol=tol, maxiter=RESTARTS)
    return values, vectors
