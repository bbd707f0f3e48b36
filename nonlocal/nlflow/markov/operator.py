"""The transition operator of a chain, and the graph of its moves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, on_host, to_numpy, underflowing
from nlflow.affinities import Affinity
from nlflow.affinities.base import MASS, check_affinity
from nlflow.affinities.graph import Sparse
from nlflow.errors import (
    InputError,
    NumericalError,
    all_digits,
    check_detached,
    check_integer,
    check_memory,
    check_number,
)
from nlflow.flows.linear import AttentionFlow
from nlflow.markov.stationary import closed_classes, dense, period_of, within
from nlflow.markov.walks import check_law

# Up to this many states all moves are looked at; beyond, for matrix-free chains, they are followed by averages.
_GRAPH_STATES = 4096
# From this many states a matrix of which no more than a part is not 0 is listed as a graph is.
_MATRIX_STATES, _FEW = 1000, 0.05
# What transforms leave where nothing is.
_NOISE = 1e-14


@underflowing
class Transitions:
    """What moves a walker: P of an affinity with some laziness, forwards on laws and backwards on signals.

    See `nlflow.MarkovChain` for the parameters.
    """

    def __init__(self, affinity: Affinity, *, laziness: float = 0.0, memory_limit: float | None = None) -> None:
        self.affinity = check_affinity(affinity)
        self.laziness = check_number("laziness", laziness, minimum=0, below=1)
        check_detached("memory_limit", memory_limit)
        self._limit = memory_limit
        self._flow = AttentionFlow(affinity)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.affinity!r}, laziness={all_digits(self.laziness)})"

    @property
    def states(self) -> int:
        """Number of states N."""
        return self.affinity.domain.size

    # ---- the operator

    def _lazily(self, moved: Array, before: Array) -> Array:
        return moved if self.laziness == 0 else self.laziness * before + (1 - self.laziness) * moved

    def _transposed(self, v: Floats) -> Floats:
        return np.asarray(self._lazily(to_numpy(self.affinity._push(self.affinity.as_signal(v))), v), dtype=np.float64)

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

    def expectation(self, v: Any, steps: int = 1) -> Array:
        """Return E[v(B_k) | B_0 = i] = (P^k v)_i, the values after k attention layers (Lemma 1).

        Parameters
        ----------
        v : array of shape ``domain.shape`` or ``domain.shape + (D,)``
        steps : int
            k >= 0; one average each.

        Returns
        -------
        array
            Like `v`.
        """
        u = self.affinity.check_signal("v", v)
        return next(islice(self._averages(u), check_integer("steps", steps, minimum=0), None))

    def _averages(self, u: Array) -> Iterator[Array]:
        """Yield P^k u for k = 0, 1, ..."""
        while True:
            yield u
            u = self._lazily(self.affinity._average(u), u)

    def law(self, start: Any, steps: int = 1) -> Floats:
        """Return the law of the walker after k moves, p P^k.

        Parameters
        ----------
        start : int or array of shape ``domain.shape``
            Node number, or probabilities of the nodes.
        steps : int
            k >= 0; each costs as much as an average.

        Returns
        -------
        array of shape ``domain.shape``
            float64 (to the precision of the affinity), summing to 1.
        """
        return next(islice(self._laws(start), check_integer("steps", steps, minimum=0), None))

    def _laws(self, start: Any) -> Iterator[Floats]:
        """Yield p P^k for k = 0, 1, ..."""
        law = self._start_law(start)
        while True:
            yield law
            law = self._push(law)

    def _start_law(self, start: Any) -> Floats:
        shape = self.affinity.domain.shape
        array = on_host(start)
        if array.shape == () and array.dtype.kind in "iu":
            node = check_integer("start", int(array), minimum=0)
            if node >= self.states:
                raise InputError(f"start: got node {node}, expected one of 0 to {self.states - 1}")
            law = np.zeros(self.states)
            law[node] = 1.0
            return law.reshape(shape)
        return check_law("start", start, shape)

    @cached_property
    def _moves(self) -> Floats:
        """All transition probabilities without the laziness, shape (N, N)."""
        n = self.states
        check_memory(
            f"the matrix of {n} states", 8 * n * n, "use fewer nodes or raise memory_limit", self._limit
        )  # fmt: skip
        if self._given_moves is not None:
            return dense(self._given_moves)
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
            part = apply(self.affinity.as_signal(unit.reshape(*self.affinity.domain.shape, high - low)))
            target[:, low:high] = to_numpy(part).reshape(n, high - low)
        if self.affinity.method == "convolution":
            result[result < _NOISE] = 0.0
        if self.affinity.method == "pairwise":  # its loops take the smallest float for what underflows
            result[result < self.least_move] = 0.0
        result /= result.sum(axis=1, keepdims=True)
        return result

    @property
    def least_move(self) -> float:
        """A probability below which moves have lost digits to underflow."""
        single = "float32" in str(self.affinity.dtype)
        if self.affinity.method == "pairwise":  # relative to a logit that is within 21 of the largest
            return 1e-27 if single else 1e-290
        return 1e-36 if single else 1e-300

    def matrix(self) -> Floats:
        """Return all transition probabilities, shape (N, N), rows summing to 1; a copy, float64, 8 N^2 bytes.

        Raises
        ------
        MemoryLimitError
            Before anything is allocated.
        """
        return np.asarray(self._lazily(self._moves, np.eye(self.states)) if self.laziness else self._moves.copy())

    # ---- structure

    @cached_property
    def _given_moves(self) -> Sparse | None:
        return self.affinity._transitions()

    @cached_property
    def _sparse_moves(self) -> Sparse | None:
        """The possible moves with their probabilities, without the laziness; None where they are not listed.

        Of a large matrix with few entries too.
        """
        if self._given_moves is not None or self.states <= _MATRIX_STATES or not hasattr(self.affinity, "matrix"):
            return self._given_moves
        if np.count_nonzero(self._moves) > _FEW * self._moves.size:
            return None
        from scipy.sparse import csr_array

        return csr_array(self._moves)

    @property
    def _listed_moves(self) -> Any:
        """All moves, as a sparse matrix where there is one."""
        return self._moves if self._sparse_moves is None else self._sparse_moves

    @property
    def _graph_known(self) -> bool:
        small = self.states <= _GRAPH_STATES or hasattr(self.affinity, "matrix") or not self.affinity.symmetric
        return small or self._sparse_moves is not None

    def _neighbours(self, inside: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the states with a move into `inside`, by an average."""
        # Loops over pairs take the smallest float for what underflows.
        noise = {"convolution": _NOISE, "pairwise": self.least_move}.get(self.affinity.method, 0.0)
        signal = self.affinity.as_signal(inside.reshape(self.affinity.domain.shape).astype(np.float64))
        return np.asarray(to_numpy(self.affinity._average(signal)).ravel() > noise)

    def _seeing(self, targets: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the states from which walks may come to some targets, and these, by averages."""
        seen, front = targets.copy(), targets
        while np.any(front):
            front = self._neighbours(front) & ~seen
            seen |= front
        return seen

    @cached_property
    def _search(self) -> tuple[int, bool]:
        """How many states can be reached from state 0, and whether moves only go between states of two colours.

        Breadth first by averages, as many as there are levels; for symmetric k, where all moves go both ways.
        """
        colours = np.zeros((2, self.states), bool)
        colours[0, 0] = True
        front, level = colours[0].copy(), 0
        while np.any(front):
            level += 1
            front = self._neighbours(front) & ~colours.any(axis=0)
            colours[level % 2] |= front
        return int(colours.sum()), not any(np.any(self._neighbours(one) & one) for one in colours)

    @cached_property
    def _closed(self) -> list[NDArray[np.intp]]:
        """Closed classes: sets of states that communicate and are never left. From one on, limits are unique."""
        return closed_classes(self._listed_moves)

    @cached_property
    def irreducible(self) -> bool:
        """Whether every state can be reached from every other."""
        if self._graph_known:
            return len(self._closed) == 1 and len(self._closed[0]) == self.states
        return self._search[0] == self.states

    @cached_property
    def period(self) -> int:
        """Greatest common divisor of the lengths of all round trips; P^k converges when it is 1.

        For chains with transient states (causal attention, say) that of the class in which all walks end.

        Raises
        ------
        InputError
            For a chain with several closed classes.
        """
        self.require_unique("the period")
        return 1 if self.laziness > 0 else self._own_period

    @cached_property
    def _own_period(self) -> int:
        """The period without the laziness."""
        if self._graph_known:
            return period_of(within(self._listed_moves, self._closed[0]))
        return 2 if self._search[1] else 1

    def require_unique(self, what: str) -> None:
        """Raise `InputError` when walks can end in several classes of states, where `what` is not unique."""
        if self._graph_known:
            if len(self._closed) == 1:
                return
            sizes = sorted((len(inside) for inside in self._closed), reverse=True)
            shown = ", ".join(map(str, sizes[:5])) + (", ..." if len(sizes) > 5 else "")
            found = f"{len(sizes)} classes of states that no walk leaves (sizes {shown})"
        elif self.irreducible:
            return
        else:
            found = f"several classes of states that no walk leaves (one of {self._search[0]} states)"
        raise InputError(
            f"affinity: got a reducible chain with {found}, expected one class, without which {what} is not unique; "
            "use a wider kernel or a larger radius, or treat each class as a chain of its own"
        )

    def require_limit(self, what: str) -> None:
        """Raise `InputError` when P^k does not converge to one law, so that `what` does not exist."""
        self.require_unique(what)
        if self.period > 1:
            raise InputError(
                f"affinity: got a periodic chain (period {self.period}), expected an aperiodic one: P^k does not "
                f"converge, so {what} does not exist; use laziness=0.5, or a kernel with k(x, x) > 0"
            )
