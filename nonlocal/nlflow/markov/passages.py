"""Where a walker comes first, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Brief, Floats, on_host, to_numpy
from nlflow.errors import InputError, NumericalError, listed, warn_caller
from nlflow.functionals.constraint import Constraint
from nlflow.functionals.energies import J
from nlflow.markov.absorbing import REDUCED_STATES, Averaged, Found, Way, ended, refined
from nlflow.markov.aggregation import needed_bytes
from nlflow.markov.law import LEAST, StationaryLaw
from nlflow.markov.moves import DENSE_STATES, reaching, upstream
from nlflow.markov.reduction import eliminated, passage_times

_RTOL = 1e-9  # of a round of refinement
_ROUGH, _SINGLE = 1e-6, 1e-3  # relative errors of what averages alone give, in float64 and float32

Nodes = NDArray[np.bool_]
Order = NDArray[np.integer[Any]]


def node_numbers(name: str, given: Any, shape: tuple[int, ...]) -> NDArray[np.intp]:
    """Return the numbers of nodes of a domain, at least one.

    Zeros and ones, as many as there are nodes and two or more, could be a mask; they are refused.
    """
    array = on_host(given, name)
    states = math.prod(shape)
    if array.dtype == bool:
        if array.shape != shape:
            raise InputError(f"{name}: got a mask of shape {array.shape}, expected {shape}, that of the domain")
        array = np.flatnonzero(array)
    if not array.size:
        raise InputError(f"{name}: got no node, expected at least one")
    if array.dtype.kind not in "iu" or array.ndim > 1:
        raise InputError(
            f"{name}: got {array.dtype} of shape {array.shape}, expected node numbers or a mask of bool; of labels "
            "give labels == name"
        )
    low, high = int(array.min()), int(array.max())
    if not 0 <= low <= high < states:
        raise InputError(f"{name}: got nodes {low} to {high}, expected 0 to {states - 1}")
    if array.size == states > 1 and high <= 1:
        raise InputError(f"{name}: got {states} integers that are 0 or 1, expected node numbers, or a mask of bool")
    return np.asarray(array.reshape(-1), np.intp)


@dataclass(frozen=True, repr=False)
class Absorption(Brief):
    """Where walkers end, and when.

    Attributes
    ----------
    names : tuple
        Of the K targets.
    probabilities : array of shape ``domain.shape + (K,)``
        That a walker from a node comes to each target before the others; rows sum to 1.
    times : array of shape ``domain.shape``
        Mean number of moves until it comes to any.
    method : str
    error : float
        Bound of the error of probabilities relative to the largest of a target, and of times relative to the longest;
        0 for state reduction.
    residual : float
        The largest one of (I - P) x = b over the largest x; 0 for state reduction.
    """

    names: tuple[Any, ...]
    probabilities: Floats
    times: Floats
    method: str
    error: float
    residual: float


class Passages:
    """First passages between sets of nodes."""

    def __init__(self, law: StationaryLaw) -> None:
        self.law, self.moves, self.states = law, law.moves, law.states

    def committor(self, source: Nodes, target: Nodes, backward: bool) -> Floats:
        """See `MarkovChain.committor`."""
        ends = source | target
        if not backward:
            return self._met(self._passing, target, ends)
        if self.law.affinity.symmetric or self.law.balanced:
            return self._met(self._passing, source, ends)
        return self._met(self._reversed(), source, ends)

    def absorption(self, names: Sequence[Any], targets: Sequence[Nodes]) -> Absorption:
        """See `MarkovChain.absorption`."""
        moves, inside = self._passing, np.logical_or.reduce(targets)
        free = self._coming(self._passing, inside)
        if len(free) < self.states - int(inside.sum()):
            raise self._unmet(names, inside, free)
        ends = np.stack(targets, axis=1).astype(np.float64)
        b = self._moved(moves, ends)[free]
        for name, coming in zip(names, b.T, strict=True):
            if len(free) and not coming.any():
                warn_caller(
                    f"targets: no walk from another node ends in {name!r}, since none of its nodes is moved to from "
                    "outside of the targets; its probabilities are 0",
                )
        found = self._ended(moves, free, np.column_stack([b, np.ones(len(free))]))
        probabilities, times = ends, np.zeros(self.states)
        probabilities[free] = np.clip(found.x[:, :-1], 0, 1)
        times[free] = found.x[:, -1] / (1 - self.moves.laziness)
        return Absorption(tuple(names), probabilities, times, found.method, found.error, found.residual)

    def _unmet(self, names: Sequence[Any], ends: Nodes, free: Order) -> InputError:
        """Return what is wrong where walks come to some ends from the states `free` alone."""
        lost, where = ~ends, ""
        lost[free] = False
        if self._lists:
            others = [inside for inside in self.moves.closed if not ends[inside].any()]
            sizes = listed(map(len, others))
            where = (
                f"; they end in {len(others)} other classes of states that no walk leaves (sizes {sizes}, the first "
                f"with node {others[0][0]})"
            )
        return InputError(
            f"targets: walks from {int(lost.sum())} nodes (the first is {int(np.argmax(lost))}) meet none of "
            f"{len(names)} targets{where}; make targets of these too, or leave these nodes out"
        )

    def times(self, target: Nodes) -> Floats:
        """See `MarkovChain.hitting_times`."""
        free = self._sure(target)
        times = np.where(target, 0.0, math.inf)
        found = self._ended(self._passing, free, np.ones((len(free), 1)))
        times[free] = found.x[:, 0] / (1 - self.moves.laziness)
        return times

    def mean_time(self, source: Nodes, target: Nodes) -> float:
        """See `MarkovChain.mean_first_passage_time`."""
        times = self.times(target)[source]
        if len(times) == 1:
            return float(times[0])
        law = self.law.stationary[source]
        if law.max() < LEAST:
            logs = self.law.log
            if logs is None:
                raise InputError(
                    f"source: got {len(law)} transient nodes, where no walker is in the long run, expected a single "
                    "node or some that are visited; use hitting_times(target) for each"
                )
            law = np.exp(logs[source] - logs[source].max())
        seen = law > 0
        return float(law[seen] @ times[seen] / law.sum())

    def all_times(self) -> Floats:
        """See `MarkovChain.mean_first_passage_times`."""
        n, moves = self.states, self.moves.dense
        times = np.full((n, n), math.inf)
        np.fill_diagonal(times, 0.0)
        transient = np.ones(n, np.bool_)
        for inside in self.moves.closed:
            transient[inside] = False
            times[np.ix_(inside, inside)] = within = passage_times(moves[np.ix_(inside, inside)], np.ones(len(inside)))
            ends = np.zeros(n, np.bool_)
            ends[inside] = True
            coming = self._sure(ends)
            if len(coming):
                first = moves[np.ix_(coming, inside)]
                starts = np.column_stack([first, np.ones(len(coming))])
                ways = eliminated(moves[np.ix_(coming, coming)], first.sum(axis=1), starts)
                times[np.ix_(coming, inside)] = ways[:, :-1] @ within + ways[:, -1:]
        times /= 1 - self.moves.laziness
        for node in np.flatnonzero(transient):
            times[:, node] = self.times(np.arange(n) == node)
        return times

    # ---- how

    @property
    def _lists(self) -> bool:
        """Whether first passages look at all moves, and not at averages alone."""
        return self.moves.sparse is not None or not self.law.affinity.symmetric or self.states <= DENSE_STATES

    @property
    def _passing(self) -> Any:
        return self.moves.listed if self._lists else None

    def _coming(self, moves: Any, ends: Nodes) -> Order:
        """Return the states beside some ends from which walks may come to these, the nearest first where moves are."""
        if moves is None:  # which go both ways then
            return np.flatnonzero(self.moves.seeing(ends) & ~ends)
        return upstream(moves, ends)[int(ends.sum()) :]

    def _sure(self, targets: Nodes) -> Order:
        """Return those of them from which no walk ends without meeting the targets, in that order."""
        moves = self._passing
        coming = self._coming(moves, targets)
        lost = ~targets
        lost[coming] = False  # the states from which no walk meets them; walks that come there do not either
        if moves is None or not lost.any():
            return coming
        from scipy.sparse import csr_array, diags_array

        astray = reaching(csr_array(diags_array((~targets).astype(np.float64)) @ csr_array(moves)), lost)
        return np.asarray(coming[~astray[coming]])

    def _moved(self, moves: Any, values: Floats) -> Floats:
        return self.moves.average(values) if moves is None else np.asarray(moves @ values)

    def _met(self, moves: Any, target: Nodes, ends: Nodes) -> Floats:
        """Return the probability that walks meet a target first among some ends: 1 there, and 0 at the others."""
        free = self._coming(moves, ends)
        if len(free) < self.states - int(ends.sum()):
            astray = ~ends
            astray[free] = False
            raise InputError(
                f"source or target: walks from {int(astray.sum())} nodes (the first is {int(np.argmax(astray))}) do "
                "not meet it; leave out or connect them"
            )
        result = target.astype(np.float64)
        b = self._moved(moves, result)[free, None]
        result[free] = np.clip(self._ended(moves, free, b).x[:, 0], 0, 1)
        return result

    def _ended(self, moves: Any, free: Order, b: Floats) -> Found:
        """Return x = b + P x, (N, k), between free states, from which all walks end; by averages without moves."""
        if not len(free):
            return Found(b, "nothing to solve")
        if moves is None:
            return self._ended_by_averages(free, b)
        if not isinstance(moves, np.ndarray) and len(free) > DENSE_STATES:
            needed = needed_bytes(moves.nnz, *b.shape)
            self.moves.check_room(f"{b.shape[1]} columns", needed, "use fewer targets at a time, or raise memory_limit")
        rows, others = moves[free], np.ones(self.states, np.bool_)
        others[free] = False
        killed = np.asarray(rows[:, np.flatnonzero(others)].sum(axis=1), np.float64).ravel()
        inside = rows[:, free]
        del rows  # copies of the moves are most of the memory
        return ended(inside, killed, b, DENSE_STATES, partial(self.moves.check_room, "first passages"))

    def _ended_by_averages(self, free: Order, b: Floats) -> Found:
        """By the symmetric form, (I - P) x = r between free states being a potential of J."""
        functional, single = J(self.law.affinity), self.moves.single
        held, exact = Constraint(np.setdiff1d(np.arange(self.states), free), 0.0), _SINGLE if single else _ROUGH
        degree = np.asarray(to_numpy(functional.affinity.degree), np.float64).ravel()[free]

        def solve(r: Floats, rtol: float) -> Floats:
            source, size = np.zeros((self.states, r.shape[1])), np.abs(r).max(axis=0)
            size = np.where(size > 0, size, 1.0)
            source[free] = degree[:, None] * (r / size)
            signal = functional.affinity.as_signal(source.reshape(*self.moves.shape, -1))
            found = functional.potential(signal, constraint=held, rtol=_RTOL)
            return np.asarray(size * np.asarray(to_numpy(found.u), np.float64).reshape(self.states, -1)[free])

        a = Averaged(self.moves.average, self.states, free, single)
        found = refined(a, b, Way("conjugate gradients", solve), exact)
        if found is not None:
            return found
        if self.states > REDUCED_STATES:
            raise NumericalError(
                f"affinity: iteration did not reach {exact:g} relative for {self.states} states, as walks end too "
                f"seldom; use at most {REDUCED_STATES} states, where all digits are kept"
            )
        return self._ended(self.moves.dense, free, b)

    def _reversed(self) -> Any:
        """The moves of the chain in reversed time, pi_j P_ji / pi_i."""
        law, moves = self.law.of_parts, self.moves.listed
        if not law.min() > 0:
            raise InputError("affinity: got a chain with transient states, which are not visited in the long run")
        if isinstance(moves, np.ndarray):
            return moves.T * law / law[:, None]
        from scipy.sparse import diags_array

        return (diags_array(1 / law) @ moves.T @ diags_array(law)).tocsr()
