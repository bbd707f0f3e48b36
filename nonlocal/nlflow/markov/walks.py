"""Monte-Carlo walks on a chain."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, on_host
from nlflow.affinities.graph import Sparse
from nlflow.errors import InputError, NumericalError, check_floats, check_generator, check_integer, check_memory
from nlflow.markov.moves import Moves, states_without_end

Positions = NDArray[np.int64]
_CALL = 2**24  # walkers a key: their numbers must not meet
_MOST_MOVES = 2**39


class Walks:
    """Walks, whose tables are kept."""

    def __init__(self, moves: Moves) -> None:
        self.moves = moves

    @cached_property
    def _tables(self) -> Tables:
        moves = self.moves
        if moves.sparse is None:
            return AliasTables(moves.matrix(), moves.limit)
        from scipy.sparse import csr_array, eye_array

        return EdgeTables(csr_array(moves.lazily(moves.sparse, eye_array(moves.states))))

    def walk(self, start: Any, steps: Any, walkers: Any, rng: Any, record: bool) -> Positions:
        generator = check_generator(rng)
        steps = check_integer("steps", steps, minimum=0)
        states = self._starts(start, walkers, generator)
        if record:
            size = 16 * (steps + 1) * len(states)
            check_memory(f"the positions of {walkers} walkers", size, "use record=False", self.moves.limit)
        return self._tables.walk(states, steps, generator, record)

    def stopped(self, start: Any, stop: Any, walkers: Any, rng: Any) -> Positions:
        """See `MarkovChain.stopped_walk`."""
        generator = check_generator(rng)
        values = self._chances(stop)
        states = self._starts(start, walkers, generator)
        if values.min() == 0:
            endless = states_without_end(self.moves.listed, states, values)
            if len(endless):
                raise InputError(
                    f"stop: got 0 at all nodes that can be reached from node {endless[0]}, where walkers come to and "
                    "would go on for ever; stop them somewhere there"
                )
        return self._tables.walk_stopped(states, values, generator)

    def _chances(self, stop: Any) -> Floats:
        """Return the probability to be stopped at each node, shape (N,)."""
        values, shape = check_floats("stop", stop), self.moves.shape
        if values.shape not in ((), shape):
            raise InputError(f"stop: got shape {values.shape}, expected a number or {shape}, one for each node")
        if values.min() < 0 or values.max() > 1 or values.max() == 0:
            raise InputError(
                f"stop: got {values.min():g} to {values.max():g}, expected probabilities in [0, 1], not all 0; "
                "a fidelity lambda~ stops with lambda~ / (1 + lambda~)"
            )
        return np.array(np.broadcast_to(values, shape)).ravel()

    def _starts(self, start: Any, walkers: Any, rng: np.random.Generator) -> Positions:
        count, states = check_integer("walkers", walkers, minimum=1), self.moves.states
        check_memory(
            f"a start for each of {count} walkers", 16 * count, "use fewer, in several calls", self.moves.limit
        )
        array = on_host(start, "start")
        if array.dtype.kind not in "iu":
            return rng.choice(states, size=count, p=check_law(start, self.moves.shape).ravel()).astype(np.int64)
        if array.shape not in ((), (count,)):
            raise InputError(f"start: got shape {array.shape}, expected one node number or {count}, one a walker")
        if array.min() < 0 or array.max() >= states:
            raise InputError(f"start: got {int(array.min())} to {int(array.max())}, expected nodes 0 to {states - 1}")
        return np.array(np.broadcast_to(array, (count,)), dtype=np.int64)


class Tables:
    """Arrays that draw the next states, and the compiled loops that read them."""

    kind: str  # of the chain, as the loops call it
    _drawn: tuple[NDArray[Any], ...]
    _loop: Any

    def walk(self, states: Positions, steps: int, rng: np.random.Generator, record: bool) -> Positions:
        if steps > 2 * _MOST_MOVES:
            raise InputError(f"steps: got {steps}, expected at most 2^40, the numbers that there are for one walker")
        keys = rng.integers(0, 2**64, size=-(-len(states) // _CALL), dtype=np.uint64)
        history = [states.copy()] if record else []
        move, done = self._loop(f"walk along {self.kind}"), 0
        while done < steps:
            count = 1 if record else steps
            for part, key in enumerate(keys):
                move(self._drawn, key, count, done, states[part * _CALL : (part + 1) * _CALL])
            done += count
            if record:
                history.append(states.copy())
        return np.stack(history) if record else states

    def walk_stopped(self, states: Positions, stop: Floats, rng: np.random.Generator) -> Positions:
        # 2^-60 of all walkers are missed where stopping is uniform; elsewhere a walker needs its time to come by.
        expected = 60 * np.log(2) / max(float(stop.mean()), 1e-300)
        most = int(min(max(1000 * expected, 10**6), _MOST_MOVES))
        keys = rng.integers(0, 2**64, size=-(-len(states) // _CALL), dtype=np.uint64)
        move = self._loop(f"walk along {self.kind} until stopped")
        for part, key in enumerate(keys):
            piece = states[part * _CALL : (part + 1) * _CALL]
            moves = np.empty_like(piece)
            move(self._drawn, key, stop, most, piece, moves)
            if np.any(moves < 0):
                raise NumericalError(
                    f"stop: {int(np.sum(moves < 0))} walkers were not stopped within {most} moves; use a larger "
                    "probability, or reach the expectation by equilibrium()"
                )
        return states


class AliasTables(Tables):
    """Tables that draw the next state at constant cost, to 2^-32 (Walker 1977, doi 10.1145/355744.355749)."""

    kind = "tables"

    def __init__(self, rows: Floats, memory_limit: float | None = None) -> None:
        from nlflow.backends.numba.walks import loop

        self._loop, states = loop, len(rows)
        check_memory(
            f"drawing moves between {states} states", 8 * states**2, "use fewer nodes or raise memory_limit",
            memory_limit,
        )  # fmt: skip
        tables = np.empty((states, states), np.uint64)
        loop("build_tables")(np.ascontiguousarray(rows), tables)
        self._drawn = (tables,)


class EdgeTables(Tables):
    """Sums of probabilities along the edges: O(edges) memory, O(log edges of a state) a move."""

    kind = "edges"

    def __init__(self, moves: Sparse) -> None:
        from nlflow.backends.numba.walks import loop

        self._loop = loop
        moves.eliminate_zeros()
        starts, shares = moves.indptr.astype(np.int64), np.empty(moves.nnz)
        loop("add_up")(starts, np.ascontiguousarray(moves.data), shares)
        self._drawn = starts, moves.indices.astype(np.int32), shares


def check_law(value: Any, shape: tuple[int, ...]) -> Floats:
    law = check_floats("start", value)
    if law.shape != shape:
        raise InputError(f"start: got shape {law.shape}, expected a node number or probabilities of shape {shape}")
    with np.errstate(over="ignore"):
        total = float(law.sum())
    if law.min() < 0 or abs(total - 1) > 1e-6:
        raise InputError(
            f"start: got probabilities with minimum {law.min():g} and sum {total:g}, expected values >= 0 with sum 1; "
            "divide by the sum"
        )
    return law / total
