"""How a walker moves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, to_numpy
from nlflow.affinities import Affinity
from nlflow.affinities.base import MASS
from nlflow.affinities.graph import Sparse
from nlflow.errors import InputError, NumericalError, check_memory, listed

DENSE_STATES = 1000
"""Up to so many states spectra come from the whole matrix."""
# Up to this many states all moves are looked at; beyond, for matrix-free chains, they are followed by averages.
_GRAPH_STATES = 4096
# From this many states a matrix of which no more than a part is not 0 is listed as a graph is.
_MATRIX_STATES, _FEW = 1000, 0.05
# What transforms leave where nothing is.
_NOISE = 1e-14


class Moves:
    """The moves of a chain: `average` and `dense` are without the laziness, `apply` and `matrix` with it."""

    def __init__(self, affinity: Affinity, laziness: float, limit: float | None) -> None:
        self.affinity, self.laziness, self.limit = affinity, laziness, limit
        self.states, self.shape = affinity.domain.size, affinity.domain.shape
        self._widened = False  # whether `dense` has what float32 has lost

    @property
    def single(self) -> bool:
        return "float32" in str(self.affinity.dtype)

    def check_room(self, what: str, needed: int, remedy: str = "use fewer states, or raise memory_limit") -> None:
        check_memory(f"{what} of {self.states} states", needed, remedy, self.limit)

    # ---- the operator

    def lazily(self, moved: Any, before: Any) -> Any:
        return moved if self.laziness == 0 else self.laziness * before + (1 - self.laziness) * moved

    def average(self, values: Floats) -> Floats:
        signal = self.affinity.as_signal(values.reshape(*self.shape, *values.shape[1:]))
        return np.asarray(to_numpy(self.affinity._average(signal)), np.float64).reshape(values.shape)

    def apply(self, values: Floats) -> Floats:
        return np.asarray(self.lazily(self.average(values), values))

    def averages(self, u: Array) -> Iterator[Array]:
        while True:
            yield u
            u = self.lazily(self.affinity._average(u), u)

    def laws(self, law: Floats) -> Iterator[Floats]:
        while True:
            yield law
            law = self._push(law)

    def _transposed(self, v: Floats) -> Floats:
        return np.asarray(self.lazily(to_numpy(self.affinity._push(self.affinity.as_signal(v))), v), dtype=np.float64)

    def _push(self, law: Floats) -> Floats:
        moved = self._transposed(law)
        total = float(moved.sum())
        if not abs(total - 1) <= max(MASS, self.affinity.error_estimate):
            raise NumericalError(
                f"start: probability {1 - total:.3g} is lost, since the degrees of some nodes underflow beside the "
                "others, or are rounded; use float64 features, or scale the kernel's logits down"
            )
        moved = np.maximum(moved, 0)  # transforms leave roundings below 0
        return np.asarray(moved / moved.sum())  # rows of a float32 affinity sum to 1 up to 1e-7, which adds up

    # ---- all probabilities, without the laziness

    @cached_property
    def dense(self) -> Floats:
        n = self.states
        self.check_room("the matrix", 8 * n * n, "use fewer nodes or raise memory_limit")
        if self.given is not None:
            return to_dense(self.given)
        found = self._of_all()
        if not self.single or n > _GRAPH_STATES or not np.any(lost := found < self._lost):
            return found
        self.check_room("the moves that float32 has lost", 32 * n * n)
        logs = self.affinity._log_transitions()
        if logs is None or not np.any(np.isfinite(logs) & lost):
            return found
        self._widened = True
        return np.asarray(np.exp(logs))

    def _of_all(self) -> Floats:
        n = self.states
        known = getattr(self.affinity, "matrix", None)
        if known is not None:
            given = to_numpy(known)
            result = np.asarray(given, dtype=np.float64)
            return result if given.dtype == np.float64 else result / result.sum(axis=1, keepdims=True)
        result = np.empty((n, n))
        # Averages of unit signals are columns, laws after a move from one node are rows.
        by_rows = self.affinity.laws_have_more_digits
        apply, target = (self.affinity._push, result.T) if by_rows else (self.affinity._average, result)
        columns = max(1, 2**22 // n)
        for low in range(0, n, columns):
            high = min(low + columns, n)
            unit = np.zeros((n, high - low))
            unit[np.arange(low, high), np.arange(high - low)] = 1.0
            part = apply(self.affinity.as_signal(unit.reshape(*self.shape, high - low)))
            target[:, low:high] = to_numpy(part).reshape(n, high - low)
        if self._noise:
            result[result < self._noise] = 0.0
        result /= result.sum(axis=1, keepdims=True)
        return result

    def matrix(self) -> Floats:
        return np.asarray(self.lazily(self.dense, np.eye(self.states)) if self.laziness else self.dense.copy())

    @property
    def least(self) -> float:
        """Moves of smaller probability have lost digits to underflow, in `dense`."""
        return 1e-300 if self._widened else self._lost

    @property
    def _lost(self) -> float:
        if self.affinity.method == "pairwise":  # relative to a logit that is within 21 of the largest
            return 1e-27 if self.single else 1e-290
        return 1e-36 if self.single else 1e-300

    @property
    def _noise(self) -> float:
        """What averages may leave where no move is: loops over pairs take the smallest float for what underflows."""
        return {"convolution": _NOISE, "pairwise": self._lost}.get(self.affinity.method, 0.0)

    @cached_property
    def given(self) -> Sparse | None:
        return self.affinity._transitions()

    @cached_property
    def sparse(self) -> Sparse | None:
        """The moves where they are listed, or where a large matrix has few; None elsewhere."""
        if self.given is not None or self.states <= _MATRIX_STATES or not hasattr(self.affinity, "matrix"):
            return self.given
        if np.count_nonzero(self.dense) > _FEW * self.dense.size:
            return None
        from scipy.sparse import csr_array

        return csr_array(self.dense)

    @property
    def listed(self) -> Any:
        return self.dense if self.sparse is None else self.sparse

    # ---- which states see which

    @property
    def graph_known(self) -> bool:
        small = self.states <= _GRAPH_STATES or hasattr(self.affinity, "matrix") or not self.affinity.symmetric
        return small or self.sparse is not None

    def _neighbours(self, inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.asarray(self.average(inside.astype(np.float64)) > self._noise)

    def seeing(self, targets: NDArray[np.bool_]) -> NDArray[np.bool_]:
        seen, front = targets.copy(), targets
        while np.any(front):
            front = self._neighbours(front) & ~seen
            seen |= front
        return seen

    @cached_property
    def _search(self) -> tuple[int, bool]:
        """How many states can be reached from state 0, and whether moves only go between states of two colours."""
        colours = np.zeros((2, self.states), bool)
        colours[0, 0] = True
        front, level = colours[0].copy(), 0
        while np.any(front):
            level += 1
            front = self._neighbours(front) & ~colours.any(axis=0)
            colours[level % 2] |= front
        return int(colours.sum()), not any(np.any(self._neighbours(one) & one) for one in colours)

    @cached_property
    def closed(self) -> list[NDArray[np.intp]]:
        """Sets of states that communicate and are never left."""
        return closed_classes(self.listed)

    @cached_property
    def irreducible(self) -> bool:
        """See `MarkovChain.irreducible`."""
        if self.graph_known:
            return len(self.closed) == 1 and len(self.closed[0]) == self.states
        return self._search[0] == self.states

    @property
    def period(self) -> int:
        """See `MarkovChain.period`."""
        return 1 if self.laziness > 0 else self.own_period

    @cached_property
    def own_period(self) -> int:
        if self.graph_known:
            return period_of(within(self.listed, self.closed[0]))
        return 2 if self._search[1] else 1

    def require_unique(self, what: str) -> None:
        """See `MarkovChain.require_unique`."""
        if self.graph_known:
            if len(self.closed) == 1:
                return
            sizes = sorted((len(inside) for inside in self.closed), reverse=True)
            found = f"{len(sizes)} classes of states that no walk leaves (sizes {listed(sizes)})"
        elif self.irreducible:
            return
        else:
            found = f"several classes of states that no walk leaves (one of {self._search[0]} states)"
        raise InputError(
            f"affinity: got a reducible chain with {found}, expected one class, without which {what} is not unique; "
            "use a wider kernel or a larger radius, or treat each class as a chain of its own"
        )


def communicating_classes(matrix: Floats | Sparse) -> tuple[int, NDArray[np.int32]]:
    from scipy.sparse.csgraph import connected_components

    count, labels = connected_components(matrix > 0, directed=True, connection="strong")
    return int(count), labels


def closed_classes(matrix: Floats | Sparse) -> list[NDArray[np.intp]]:
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
    if len(inside) == matrix.shape[0]:
        return matrix
    return matrix[np.ix_(inside, inside)] if isinstance(matrix, np.ndarray) else matrix[inside][:, inside]


def to_dense(matrix: Floats | Sparse) -> Floats:
    return matrix if isinstance(matrix, np.ndarray) else np.asarray(matrix.toarray())


def upstream(moves: Floats | Sparse, ends: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the states from which walks may come to some ends, the nearest first."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order

    back: Any = csr_array(moves > 0).T.tocsr()
    n, first = len(ends), np.flatnonzero(ends)
    starts, size = np.append(back.indptr, back.nnz + len(first)), back.nnz + len(first)
    graph = csr_array((np.ones(size, np.int8), np.append(back.indices, first), starts), shape=(n + 1, n + 1))
    found = breadth_first_order(graph, n, directed=True, return_predecessors=False)[1:]
    return np.asarray(found, np.int32)


def reaching(moves: Floats | Sparse, ends: NDArray[np.bool_]) -> NDArray[np.bool_]:
    seen = np.zeros(len(ends), np.bool_)
    seen[upstream(moves, ends)] = True
    return seen


def states_without_end(matrix: Floats | Sparse, start: NDArray[np.int64], stop: Floats) -> NDArray[np.intp]:
    """Return the states that walkers from `start` can come to and where none is ever stopped."""
    from scipy.sparse import csr_array, diags_array

    starting = np.zeros(matrix.shape[0], bool)
    starting[start] = True
    # Nobody goes on from where all are stopped.
    going = diags_array((stop < 1).astype(np.float64)) @ csr_array(matrix)
    return np.flatnonzero(reaching(going.T, starting) & ~reaching(matrix, stop > 0))


def period_of(matrix: Floats | Sparse) -> int:
    """Return the greatest common divisor of the lengths of round trips of an irreducible chain.

    From the levels of a breadth-first search (Denardo 1977, doi 10.1287/moor.2.1.20).
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
