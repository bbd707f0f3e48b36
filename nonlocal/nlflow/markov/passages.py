"""Where a walker comes first, and when: committors and hitting times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, on_host, to_numpy, underflowing
from nlflow.errors import InputError, NumericalError, check_memory
from nlflow.functionals.constraint import Constraint
from nlflow.functionals.energies import J
from nlflow.markov.absorbing import REDUCED_STATES, Averaged, Solver, eliminated, ended, passage_times, refined
from nlflow.markov.equilibrated import DENSE_STATES
from nlflow.markov.spectral import Spectral
from nlflow.markov.stationary import reaching

_RTOL = 1e-9  # of a round of refinement
_ROUGH, _SINGLE = 1e-6, 1e-3  # relative errors of what averages alone give, in float64 and float32
_LEAST = 1e-280  # of a law: below, its digits are not all there


@underflowing
class Passages(Spectral):
    """A chain with its first passages: see `nlflow.MarkovChain`."""

    def committor(self, source: Any, target: Any, *, backward: bool = False) -> Floats:
        """Return the probability that a walker from each node meets the target before the source.

        q = 0 on the source, 1 on the target, (Pq)_i = q_i elsewhere: where P is symmetric in the degree measure the
        minimizer of J with these values (E and Vanden-Eijnden 2006, doi 10.1007/s10955-005-9003-9).

        Parameters
        ----------
        source, target : int, array of int, or array of bool of shape ``domain.shape``
            Nodes, without one in common.
        backward : bool
            Return the probability that a walker who is at a node in the long run came from the source last, and not
            from the target.

        Returns
        -------
        array of shape ``domain.shape``
            float64. Up to 1000 states by state reduction: each entry keeps its digits, however small. Beyond, for
            graphs by iteration (in the symmetric form of a reversible chain; for others by GMRES with incomplete
            factors, then by elimination) until the error is proved to be at most 1e-10; for symmetric k whose moves are
            not listed by averages, to 1e-6 (1e-3 in float32). Errors are relative, for entries below 1e-3 of the
            largest to that. Others go by state reduction, O(N^3) time, as all moves of a matrix do.

        Raises
        ------
        InputError
            For nodes that do not exist, that are both source and target, and where walks from some node meet neither.
        NumericalError
            Where the digits are not reached for more than 4096 states.
        """
        a, b = self._nodes("source", source), self._nodes("target", target)
        if np.any(a & b):
            raise InputError(
                f"target: node {int(np.argmax(a & b))} is a source too, expected sets without a common node"
            )
        free = ~(a | b)
        if not backward:
            return self._met(self._passing, b, free)
        if self.affinity.symmetric or self._balanced:
            return self._met(self._passing, a, free)
        return self._met(self._reversed(), a, free)

    def hitting_times(self, target: Any) -> Floats:
        """Return the mean number of moves until a walker from each node comes to the target first.

        h = 0 on the target, h = 1 + Ph elsewhere; infinite where walks may end without meeting it.

        Parameters
        ----------
        target : int, array of int, or array of bool of shape ``domain.shape``

        Returns
        -------
        array of shape ``domain.shape``
            float64; computed as `committor` is.

        Raises
        ------
        InputError
            For nodes that do not exist.
        NumericalError
            As `committor`.
        """
        b = self._nodes("target", target)
        lost = self._astray(b)
        free = ~b & ~lost
        times = np.where(lost, math.inf, 0.0)
        times[free] = self._ended(self._passing, free, np.ones(int(free.sum()))) / (1 - self.laziness)
        return times.reshape(self.affinity.domain.shape)

    def mean_first_passage_time(self, source: Any, target: Any) -> float:
        """Return the mean number of moves to the target of walkers that start in the source as in the long run.

        sum_i pi_i h_i over the source, pi being restricted to it. From a single node it is the hitting time, in
        transient states and in reducible chains too. Infinite where walks may end without meeting the target.

        Raises
        ------
        InputError
            For several source nodes of a chain that is reducible, or which are all transient: no law tells where
            walkers start.
        """
        a = self._nodes("source", source)
        times = self.hitting_times(target).ravel()[a]
        if len(times) == 1:
            return float(times[0])
        law = self.stationary.ravel()[a]
        if law.max() < _LEAST:
            logs = self.log_law
            if logs is None:
                raise InputError(
                    f"source: got {len(law)} transient nodes, where no walker is in the long run, expected a single "
                    "node or some that are visited; use hitting_times(target) for each"
                )
            law = np.exp(logs[a] - logs[a].max())
        seen = law > 0
        return float(law[seen] @ times[seen] / law.sum())

    def mean_first_passage_times(self) -> Floats:
        """Return the mean numbers of moves between all pairs of nodes, from row to column, shape (N, N).

        By state reduction, so that each keeps its digits however slow the chain is; 0 on the diagonal. Infinite where
        walks may end without meeting the column's node. O(N^3) time, 32 N^2 bytes; O(N^4) with transient states.

        Raises
        ------
        MemoryLimitError
        NumericalError
            Where probabilities underflow, or times overflow.
        """
        n = self.states
        check_memory(f"passage times of {n} states", 32 * n * n, "use hitting_times(target)", self._limit)
        moves = self._moves
        times = np.full((n, n), math.inf)
        np.fill_diagonal(times, 0.0)
        transient = np.ones(n, np.bool_)
        for inside in self._closed:
            transient[inside] = False
            times[np.ix_(inside, inside)] = within = passage_times(moves[np.ix_(inside, inside)], np.ones(len(inside)))
            ends = np.zeros(n, np.bool_)
            ends[inside] = True
            coming = np.flatnonzero(~ends & ~self._astray(ends))
            if len(coming):
                first = moves[np.ix_(coming, inside)]
                starts = np.column_stack([first, np.ones(len(coming))])
                ways = eliminated(moves[np.ix_(coming, coming)], first.sum(axis=1), starts)
                times[np.ix_(coming, inside)] = ways[:, :-1] @ within + ways[:, -1:]
        times /= 1 - self.laziness
        for node in np.flatnonzero(transient):
            times[:, node] = self.hitting_times(node).ravel()
        return times

    # ---- how

    @property
    def _lists(self) -> bool:
        """Whether first passages look at all moves, and not at averages alone."""
        return self._sparse_moves is not None or not self.affinity.symmetric or self.states <= DENSE_STATES

    @property
    def _passing(self) -> Any:
        """All moves, or None where first passages take averages."""
        return self._listed_moves if self._lists else None

    def _astray(self, targets: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return the states beside some targets from where walks may end without meeting these."""
        if self._lists:
            moves = self._listed_moves
            lost = ~reaching(_graph_of(moves), targets)  # from where no walk meets them
            # Walks that come there do not either.
            return np.asarray(reaching(_graph_of(moves, ~targets), lost) & ~targets)
        return ~self._seeing(targets)  # all moves go both ways

    def _met(self, moves: Any, ends: NDArray[np.bool_], free: NDArray[np.bool_]) -> Floats:
        """Return the probability that walks from free states end in `ends`, 1 there, and 0 at the others."""
        astray = free & ~(self._seeing(~free) if moves is None else reaching(_graph_of(moves), ~free))
        if astray.any():
            raise InputError(
                f"source or target: walks from {int(astray.sum())} nodes (the first is {int(np.argmax(astray))}) do "
                "not meet it; leave out or connect them"
            )
        given = ends.astype(np.float64)
        moved = self._averaged(given) if moves is None else np.asarray(moves @ given)
        result = given.copy()
        result[free] = np.clip(self._ended(moves, free, moved[free]), 0, 1)
        return result.reshape(self.affinity.domain.shape)

    def _ended(self, moves: Any, free: NDArray[np.bool_], b: Floats) -> Floats:
        """Return x = b + P x between free states, from which all walks end at others; by averages without moves."""
        inside = np.flatnonzero(free)
        if not len(inside):
            return np.zeros(0)
        first = self._potentials(free) if moves is None or moves is self._sparse_moves else iter(())
        if moves is None:
            return self._ended_by_averages(free, b, first)
        rows = moves[inside]
        killed = np.asarray(rows[:, np.flatnonzero(~free)].sum(axis=1), np.float64).ravel()
        return ended(rows[:, inside], killed, b, first, DENSE_STATES)

    def _ended_by_averages(self, free: NDArray[np.bool_], b: Floats, first: Iterator[Solver]) -> Floats:
        single = "float32" in str(self.affinity.dtype)
        for solve in first:
            found = refined(Averaged(self._averaged, free, single), b, solve, _SINGLE if single else _ROUGH)
            if found is not None:
                return found
        if self.states > REDUCED_STATES:
            raise NumericalError(
                f"affinity: iteration did not reach {_SINGLE if single else _ROUGH:g} relative for {self.states} "
                f"states, as walks end too seldom; use at most {REDUCED_STATES} states, where all digits are kept"
            )
        return self._ended(self._moves, free, b)

    def _potentials(self, free: NDArray[np.bool_]) -> Iterator[Solver]:
        """Yield the solver of the symmetric form, (I - P) x = r between free states: a potential of J."""
        form = self._symmetric_form
        if form is None or self.states <= DENSE_STATES:
            return
        functional, held = J(form), Constraint(np.flatnonzero(~free), 0.0)
        degree = np.asarray(to_numpy(functional.affinity.degree), np.float64).ravel()[free]

        def solve(r: Floats) -> Floats:
            source = np.zeros(self.states)
            size = float(np.abs(r).max()) or 1.0
            source[free] = degree * (r / size)
            signal = form.as_signal(source.reshape(form.domain.shape))
            found = functional.potential(signal, constraint=held, rtol=_RTOL)
            return size * np.asarray(to_numpy(found.u), np.float64).ravel()[free]

        yield solve

    def _averaged(self, values: Floats) -> Floats:
        """Return P values, (N,), without the laziness, by an average."""
        signal = self.affinity.as_signal(values.reshape(self.affinity.domain.shape))
        return np.asarray(to_numpy(self.affinity._average(signal)), np.float64).ravel()

    def _nodes(self, name: str, given: Any) -> NDArray[np.bool_]:
        """Return a mask (N,) of nodes."""
        array = on_host(given)
        array = array if array.size else array.astype(np.intp)  # an empty list
        shape, inside = self.affinity.domain.shape, np.zeros(self.states, np.bool_)
        if array.dtype == bool:
            if array.shape != shape:
                raise InputError(f"{name}: got a mask of shape {array.shape}, expected {shape}, that of the domain")
            inside = array.reshape(-1).copy()
        elif array.dtype.kind in "iu" and array.ndim <= 1:
            if array.size and not 0 <= array.min() <= array.max() < self.states:
                raise InputError(f"{name}: got nodes {array.min()} to {array.max()}, expected 0 to {self.states - 1}")
            inside[array] = True
        else:
            raise InputError(
                f"{name}: got {array.dtype} of shape {array.shape}, expected node numbers or a mask of bool"
            )
        if not inside.any() or inside.all():
            raise InputError(f"{name}: got {int(inside.sum())} nodes, expected some and not all of {self.states}")
        return inside

    def _reversed(self) -> Any:
        """Return the moves of the chain in reversed time, pi_j P_ji / pi_i."""
        law, moves = self._law_of_parts, self._listed_moves
        if not law.min() > 0:
            raise InputError("affinity: got a chain with transient states, which are not visited in the long run")
        if isinstance(moves, np.ndarray):
            return moves.T * law / law[:, None]
        from scipy.sparse import diags_array

        return (diags_array(1 / law) @ moves.T @ diags_array(law)).tocsr()


def _graph_of(moves: Any, keep: NDArray[np.bool_] | None = None) -> Any:
    """Return the possible moves as ones in a sparse matrix; of states that are not kept none leave."""
    from scipy.sparse import csr_array, diags_array

    graph = csr_array(moves > 0).astype(np.float64)
    return graph if keep is None else csr_array(diags_array(keep.astype(np.float64)) @ graph)
