"""Where a walker comes first, and when: committors and hitting times."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, to_numpy, underflowing
from nlflow.errors import InputError, check_memory
from nlflow.functionals.constraint import Constraint
from nlflow.functionals.energies import J
from nlflow.markov.spectral import DENSE_STATES, Equilibrated
from nlflow.markov.stationary import dense, reaching, reduce_states

_RTOL = 1e-12


@underflowing
class Passages(Equilibrated):
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
            from the target; 1 - q for reversible chains.

        Returns
        -------
        array of shape ``domain.shape``
            float64. Up to 1000 states by state reduction: each entry keeps its digits, however small. Beyond, for
            symmetric k, by conjugate gradients to 1e-12, one average an iteration; for others O(N^3) time, or that of
            a sparse factorization for graphs.

        Raises
        ------
        InputError
            For nodes that do not exist, that are both source and target, and where walks from some node meet neither.
        """
        a, b = self._nodes("source", source), self._nodes("target", target)
        if np.any(a & b):
            raise InputError(
                f"target: node {int(np.argmax(a & b))} is a source too, expected sets without a common node"
            )
        if backward:
            if self.reversible:
                return 1 - self.committor(source, target)
            reverse = self._reversed()
            q = _absorbed(reverse, ~(a | b), reverse @ a.astype(np.float64), "source or target")
            return self._filled(q, a, ~(a | b))
        free = ~(a | b)
        if not self._iterates:
            moves = self._listed_moves
            return self._filled(_absorbed(moves, free, moves @ b.astype(np.float64), "source or target"), b, free)
        held = Constraint(np.flatnonzero(~free), b[~free].astype(np.float64))
        found = J(self.affinity).minimizer(constraint=held, rtol=_RTOL)
        return np.clip(np.asarray(to_numpy(found.u), np.float64), 0, 1)

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
        """
        b = self._nodes("target", target)
        shape, stay = self.affinity.domain.shape, 1 - self.laziness
        if self._iterates:
            constraint = Constraint(np.flatnonzero(b), 0.0)
            functional = J(self.affinity)
            degree = functional.affinity.degree
            found = functional.potential(degree, constraint=constraint, rtol=_RTOL)
            return np.asarray(to_numpy(found.u), np.float64) / stay
        moves = self._listed_moves
        edges = _graph_of(moves)
        lost = ~reaching(edges, b)  # from where no walk meets the target; walks that come there do not either
        lost = reaching(_graph_of(moves, ~b), lost) & ~b
        free = ~b & ~lost
        times = np.where(lost, math.inf, 0.0)
        times[free] = _absorbed(moves, free, np.ones(self.states), "target") / stay
        return times.reshape(shape)

    def mean_first_passage_time(self, source: Any, target: Any) -> float:
        """Return the mean number of moves to the target of walkers that start in the source as in the long run.

        sum_i pi_i h_i over the source, pi being restricted to it.
        """
        a = self._nodes("source", source)
        law, times = self.stationary.ravel()[a], self.hitting_times(target).ravel()[a]
        return float(law @ times / law.sum())

    def mean_first_passage_times(self) -> Floats:
        """Return the mean numbers of moves between all pairs of nodes, from row to column, shape (N, N).

        M_ij = (Z_jj - Z_ij) / pi_j, Z = (I - P + 1 pi^T)^-1 (Kemeny and Snell 1960, theorem 4.4.7). O(N^3) time, 32 N^2
        bytes.

        Raises
        ------
        InputError
            For a reducible chain.
        MemoryLimitError
        """
        self.require_unique("the mean first passage time")
        n = self.states
        check_memory(f"passage times of {n} states", 32 * n * n, "use hitting_times(target)", self._limit)
        law = self.stationary.ravel()
        if not law.min() > 0:
            raise InputError(
                "affinity: got a chain with transient states, to which no walk returns; use hitting_times()"
            )
        z = np.linalg.inv(np.eye(n) - self._moves + law)
        times = (np.diagonal(z) - z) / law
        np.fill_diagonal(times, 0.0)
        return np.asarray(times / (1 - self.laziness))

    # ---- how

    @property
    def _iterates(self) -> bool:
        return self.affinity.symmetric and self.states > DENSE_STATES

    def _nodes(self, name: str, given: Any) -> NDArray[np.bool_]:
        """Return a mask (N,) of nodes."""
        array = np.asarray(given)
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

    def _filled(self, inside: Floats, ends: NDArray[np.bool_], free: NDArray[np.bool_]) -> Floats:
        result = ends.astype(np.float64)
        result[free] = np.clip(inside, 0, 1)
        return result.reshape(self.affinity.domain.shape)

    def _reversed(self) -> Any:
        """Return the moves of the chain in reversed time, pi_j P_ji / pi_i."""
        law, moves = self.stationary.ravel(), self._listed_moves
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


def _absorbed(moves: Any, free: NDArray[np.bool_], b: Floats, where: str) -> Floats:
    """Return x = b + P x between free states, from which walks end outside; b is (N,), of which these count."""
    astray = free & ~reaching(_graph_of(moves), ~free)
    if astray.any():
        raise InputError(
            f"{where}: walks from {int(astray.sum())} nodes (the first is {int(np.argmax(astray))}) do not meet it; "
            "leave out or connect them"
        )
    inside = np.flatnonzero(free)
    if not len(inside):
        return np.zeros(0)
    rows = moves[inside]
    within = rows[:, inside]
    b = np.asarray(b, np.float64)[inside]
    if not isinstance(within, np.ndarray) and len(inside) > DENSE_STATES:
        from scipy.sparse import csc_array, eye_array
        from scipy.sparse.linalg import spsolve

        return np.asarray(spsolve(csc_array(eye_array(len(inside)) - within), b))
    from scipy.linalg import solve_triangular

    rates = np.array(dense(within), dtype=np.float64)
    np.fill_diagonal(rates, 0.0)
    killed = np.asarray(rows[:, np.flatnonzero(~free)].sum(axis=1), np.float64).ravel()
    left = reduce_states(rates, killed)
    upper, lower = -np.triu(rates, 1), np.diag(left) - np.tril(rates, -1)
    return np.asarray(solve_triangular(lower, solve_triangular(upper, b, unit_diagonal=True), lower=True))
