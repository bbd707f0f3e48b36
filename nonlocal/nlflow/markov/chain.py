"""The Markov chain of an affinity: laws, stationary law, spectrum, mixing and walks."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, constant_like, namespace, over_channels, to_numpy
from nlflow.errors import InputError, NumericalError, check_integer, check_memory, check_number
from nlflow.markov.operator import Floats, Transitions
from nlflow.markov.stationary import (
    balanced,
    largest_eigenvalues,
    left_eigenvector,
    state_reduction,
    states_without_end,
)
from nlflow.markov.walks import AliasTables, Positions, check_stop, generator_of, starting_states
from nlflow.spectrum import largest_eigenvalue, relaxation_rate

__all__ = ["MarkovChain"]

# Up to this many states spectra come from the whole matrix, which takes a second or so.
_DENSE_STATES = 1000
_REDUCED_STATES = 4096  # state reduction takes a few seconds
_PATIENCE = 10**6


class MarkovChain(Transitions):
    """The chain that moves from node i to node j with probability P_ij = w_j k_ij / d_i.

    The averaging operator of any affinity, as it is: symmetric or not, dense or matrix-free (arXiv 2312.00751,
    section 3: a self-attention layer averages values over the law of one move, ``(P^k v)_i = E[v(B_k) | B_0 = i]``,
    Lemma 1). States are the nodes of the domain, numbered in C order.

    Parameters
    ----------
    affinity : Affinity
        Used as it is, not symmetrised.
    laziness : float
        Probability in [0, 1) to stay at each move, on top of P: the operator is laziness I + (1 - laziness) P. With 0.5
        no chain is periodic.
    memory_limit : float, optional
        Bytes that a matrix of all transitions may take; half of the physical memory by default.

    Raises
    ------
    InputError
        For something else than an affinity, or a laziness outside [0, 1).

    Notes
    -----
    Applying the chain costs one average. Methods that need all transitions (`matrix`, `eigenvalues`, worst-case
    distances, walks) say so; they take O(N^2) memory and refuse beyond the limit. For matrix-free chains of more than
    4096 states irreducibility is found by following the moves from one node: one average for each move that the
    farthest node is away.

    Examples
    --------
    >>> from nlflow import Gaussian, Grid, MarkovChain, affinity
    >>> chain = MarkovChain(affinity(Gaussian(width=2.0), Grid(20, boundary="isolated")))
    >>> chain.reversible, chain.period, chain.mixing_time() > 1
    (True, 1, True)
    """

    @cached_property
    def reversible(self) -> bool:
        """Whether pi_i P_ij = pi_j P_ji for some law pi > 0; then all eigenvalues are real.

        Always for symmetric k; otherwise checked for all transitions, to 1e-8 relative (1e-5 where the affinity is
        float32 or has more than 4096 states). Never with transient states, where no such law is positive.
        """
        if self.affinity.symmetric:
            return True
        if sum(map(len, self._closed)) < self.states:
            return False
        single = "float32" in str(self.affinity.dtype)
        rtol = 1e-5 if single or self.states > _REDUCED_STATES else 1e-8
        for inside in self._closed:
            whole = len(inside) == self.states
            moves = self._moves if whole else self._moves[np.ix_(inside, inside)]
            law = self.stationary.ravel() if whole else state_reduction(moves)
            if not balanced(moves, law, rtol, 1e-36 if single else 1e-300):
                return False
        return True

    # ---- the stationary law

    @property
    def _mass(self) -> Floats:
        """w_i d_i / sum_j w_j d_j, in whose inner product P is self-adjoint when k is symmetric."""
        measure = self.affinity.measure("degree", self.affinity.log_degree)
        return np.asarray(to_numpy(measure), dtype=np.float64).reshape(self.affinity.domain.shape)

    @cached_property
    def stationary(self) -> Floats:
        """The stationary law pi = pi P, shape ``domain.shape``, float64, summing to 1 (Lemma 2).

        For symmetric k in closed form, pi_i = w_i d_i / sum_j w_j d_j; otherwise by state reduction (up to 4096 states,
        every entry to full precision) or as the left eigenvector at 1 by Arnoldi iteration. Chains with transient
        states (causal attention) have pi = 0 there.

        Raises
        ------
        InputError
            For a reducible chain, of which there are several.
        NumericalError
            When it is not determined in float64.
        """
        self._require_unique("the stationary law")
        shape = self.affinity.domain.shape
        if self.affinity.symmetric:
            return self._mass
        inside = self._closed[0]
        law = np.zeros(self.states)
        if len(inside) <= _REDUCED_STATES:
            law[inside] = state_reduction(self._moves[np.ix_(inside, inside)])
        else:
            law = left_eigenvector(lambda p: p @ self._moves, self.states)
            law[np.setdiff1d(np.arange(self.states), inside)] = 0
            law /= law.sum()
        return law.reshape(shape)

    def limit(self, v: Any) -> Array:
        """Return pi^T v, the constant to which P^k v converges (arXiv 2312.00751, eq. 20), broadcastable to `v`.

        Raises
        ------
        InputError
            For a reducible or periodic chain, which has no such limit.
        """
        u = self.affinity.check_signal("v", v)
        self._require_limit("the limit of P^k v")
        xp = namespace(u)
        weights = over_channels(constant_like(self.stationary, xp.astype(u, xp.float64)), u)
        axes = tuple(range(len(self.affinity.domain.shape)))
        return xp.astype(xp.sum(weights * u, axis=axes, keepdims=True, dtype=xp.float64), u.dtype)

    # ---- spectrum

    def eigenvalues(self) -> NDArray[Any]:
        """Return all eigenvalues by decreasing modulus: real for reversible chains, complex otherwise.

        O(N^3) time, all transitions in memory. Of reducible and periodic chains too.
        """
        check_memory(
            f"all eigenvalues of {self.states} states", 32 * self.states**2, "use second_eigenvalue", self._limit
        )
        values: NDArray[Any]
        if self.reversible:
            # sqrt(pi_i) P_ij / sqrt(pi_j) without pi, which may underflow.
            root = np.sqrt(self._moves)
            values = np.linalg.eigvalsh(root * root.T)
        else:
            values = np.linalg.eigvals(self._moves).astype(np.complex128)
        values = self.laziness + (1 - self.laziness) * values
        return np.asarray(values[np.argsort(-np.abs(values), kind="stable")])

    @cached_property
    def second_eigenvalue(self) -> float | complex:
        """The eigenvalue of second largest modulus mu_2; |mu_2| is the rate at which P^k v forgets v.

        From all transitions up to 1000 states, beyond that by Lanczos (1e-6 relative) or Arnoldi iteration. 0 for a
        single state.
        """
        self._require_unique("the second eigenvalue")
        if self.states == 1:
            return 0.0
        if self.states <= _DENSE_STATES:
            values = self.eigenvalues()
        elif self.affinity.symmetric:
            values = np.array([1 - relaxation_rate(self._flow), 1 - largest_eigenvalue(self._flow, diffusion=True)])
            values = np.append(self.laziness + (1 - self.laziness) * values, 1.0)
        else:
            values = largest_eigenvalues(self._moved, self.states)
            values = values.real if self.reversible else values
        others = np.delete(values, np.argmin(np.abs(values - 1)))
        found = others[np.argmax(np.abs(others))]
        return complex(found) if np.iscomplexobj(others) else float(found)

    def _moved(self, v: Floats) -> Floats:
        u = self._signal(v.reshape(self.affinity.domain.shape))
        return np.asarray(to_numpy(self._lazily(self.affinity._average(u), u)), dtype=np.float64).ravel()

    @property
    def smallest_eigenvalue(self) -> float:
        """mu_min of a reversible chain; the NeuTRENO step is stable for lambda~ < 1 + mu_min."""
        if not self.reversible:
            raise InputError(
                "affinity: got a chain that is not reversible, expected real eigenvalues; use eigenvalues() or "
                "neutreno_limit()"
            )
        if self.states <= _DENSE_STATES or not self.affinity.symmetric:
            return float(self.eigenvalues().min())
        return self.laziness + (1 - self.laziness) * (1 - largest_eigenvalue(self._flow, diffusion=True))

    @property
    def spectral_gap(self) -> float:
        """1 - |mu_2| (the absolute gap) to about 1e-15; 0 for periodic chains."""
        return max(1 - abs(self.second_eigenvalue), 0.0)

    @property
    def relaxation_time(self) -> float:
        """1 / spectral gap, in moves; infinity for periodic chains."""
        gap = self.spectral_gap
        return 1 / gap if gap > 1e-15 else math.inf

    # ---- mixing

    def total_variation(self, steps: int, start: Any = None) -> Floats:
        """Return the total-variation distance of the law after 0, 1, ... `steps` moves to pi, half the sum of moduli.

        Parameters
        ----------
        steps : int
        start : int or array, optional
            Node number or law; without it the largest distance over all starting nodes, O(N^3) a step.

        Returns
        -------
        array of shape (steps + 1,)
        """
        count = check_integer("steps", steps, minimum=0)
        stationary = self.stationary
        if start is not None:
            law = self._start_law(start)
            result = [float(np.abs(law - stationary).sum()) / 2]
            for _ in range(count):
                law = self._push(law)
                result.append(float(np.abs(law - stationary).sum()) / 2)
            return np.array(result)
        matrix, laws = self.matrix(), np.eye(self.states)
        result = [self._worst(laws)]
        for _ in range(count):
            laws = laws @ matrix
            result.append(self._worst(laws))
        return np.array(result)

    def _worst(self, laws: Floats) -> float:
        return float(np.abs(laws - self.stationary.ravel()).sum(axis=1).max()) / 2

    def mixing_time(self, eps: float = 0.25, start: Any = None) -> int:
        """Return the smallest k at which the law is within `eps` of pi in total variation.

        Parameters
        ----------
        eps : float
            In (0, 1).
        start : int or array, optional
            Node number or law; matrix-free, up to a million moves. Without it the worst starting node, by squaring the
            matrix: O(N^3 log k).

        Raises
        ------
        InputError
            For a reducible or periodic chain, which never mixes.
        """
        eps = _fraction("eps", eps)
        self._require_limit("the mixing time")
        if start is not None:
            law = self._start_law(start)
            for k in range(_PATIENCE + 1):
                if float(np.abs(law - self.stationary).sum()) / 2 <= eps:
                    return k
                law = self._push(law)
            raise NumericalError(f"eps: {eps:g} was not reached in {_PATIENCE} moves; use mixing_bounds()")
        # The distance decreases with k: double until it is small enough, then add up the powers that keep it above.
        powers = [self.matrix()]
        if self._worst(np.eye(self.states)) <= eps:
            return 0
        while self._worst(powers[-1]) > eps:
            if len(powers) > 60:
                raise NumericalError(f"eps: {eps:g} was not reached in 2^60 moves; the chain hardly mixes")
            square = powers[-1] @ powers[-1]
            powers.append(square / square.sum(axis=1, keepdims=True))
        done, reached = 0, np.eye(self.states)
        for exponent in reversed(range(len(powers) - 1)):
            further = reached @ powers[exponent]
            if self._worst(further) > eps:
                done, reached = done + 2**exponent, further
        return done + 1

    def mixing_bounds(self, eps: float = 0.25) -> tuple[float, float]:
        """Return lower and upper bounds of the worst-case mixing time from the spectral gap of a reversible chain.

        (t_rel - 1) log(1 / (2 eps)) <= t_mix(eps) <= t_rel log(1 / (eps min pi)), with t_rel = 1 / gap (Levin and
        Peres, Markov Chains and Mixing Times, 2nd ed. 2017, theorems 12.4 and 12.5).
        """
        eps = _fraction("eps", eps)
        self._require_limit("the mixing time")
        if not self.reversible:
            raise InputError("affinity: got a chain that is not reversible, for which the spectral bounds do not hold")
        gap, lowest = self.spectral_gap, float(self.stationary.min())
        # What is not known of the gap goes to the safe side.
        unknown = 1e-13
        if self.states > _DENSE_STATES:
            unknown += 1e-7 * gap if np.real(self.second_eigenvalue) > 0 else 4e-6
        upper = math.inf
        if gap > unknown and lowest > 0:
            upper = (math.log(1 / eps) - math.log(lowest)) / (gap - unknown)
        return max((1 / (gap + unknown) - 1) * math.log(1 / (2 * eps)), 0.0), upper

    def distance_to_limit(self, v: Any, steps: int) -> Floats:
        """Return the norm of P^k v - pi^T v in L2(pi) for k = 0 ... `steps`; channels are added up.

        For reversible chains it is at most |mu_2|^k times its value at k = 0.
        """
        u = self.affinity.check_signal("v", v)
        limit = self.limit(u)
        xp = namespace(u)
        law = over_channels(constant_like(self.stationary, xp.astype(u, xp.float64)), u)
        result = []
        for k in range(check_integer("steps", steps, minimum=0) + 1):
            if k:
                u = self._lazily(self.affinity._average(u), u)
            result.append(math.sqrt(float(xp.sum(law * (u - limit) ** 2, dtype=xp.float64))))
        return np.array(result)

    # ---- walks

    @cached_property
    def _tables(self) -> AliasTables:
        return AliasTables(self.matrix(), self._limit)

    def walk(self, start: Any, steps: int, walkers: int, *, rng: Any = None, record: bool = False) -> Positions:
        """Simulate independent walkers.

        Compiled and threaded, a few nanoseconds a move; the same `rng` gives the same walks for any number of threads.
        The first call builds the tables: 8 N^2 bytes, O(N^2) time.

        Parameters
        ----------
        start : int, array of int of shape (walkers,), or array of float of shape ``domain.shape``
            Node number for all, one for each, or the law to draw it from.
        steps, walkers : int
        rng : seed or numpy.random.Generator, optional
            Through `numpy.random.default_rng`.
        record : bool
            Return all positions.

        Returns
        -------
        array of int64 of shape (walkers,), or (steps + 1, walkers) with `record`
            Node numbers.
        """
        generator = generator_of(rng)
        steps = check_integer("steps", steps, minimum=0)
        shape = self.affinity.domain.shape
        states = starting_states(start, walkers, shape, self.states, generator)
        if record:
            check_memory(
                f"the positions of {walkers} walkers", 16 * (steps + 1) * len(states), "use record=False", self._limit
            )
        return self._tables.walk(states, steps, generator, record)

    def stopped_walk(self, start: Any, stop: Any, walkers: int, *, rng: Any = None) -> Positions:
        """Simulate walkers that are stopped at random, and return where.

        With ``stop = lambda~ / (1 + lambda~)`` the mean of f over the positions is NeuTRENO's equilibrium at the start,
        u* = lambda~ ((1 + lambda~) I - P)^-1 f, as personalised PageRank is.

        Parameters
        ----------
        start : int or array
            As in `walk`.
        stop : float or array of shape ``domain.shape``
            Probability in (0, 1] to be stopped before each move, one for all nodes or one for each (then 0 is allowed
            at some).
        walkers : int
        rng : seed or numpy.random.Generator, optional

        Returns
        -------
        array of int64 of shape (walkers,)
        """
        generator = generator_of(rng)
        shape = self.affinity.domain.shape
        values = check_stop("stop", stop, shape)
        states = starting_states(start, walkers, shape, self.states, generator)
        if values.min() == 0:
            endless = states_without_end(self._moves > 0, states, values)
            if len(endless):
                raise InputError(
                    f"stop: got 0 at all nodes that can be reached from node {endless[0]}, where walkers come to and "
                    "would go on for ever; stop them somewhere there"
                )
        return self._tables.walk_stopped(states, values, generator)


def _fraction(name: str, value: Any) -> float:
    number = check_number(name, value, minimum=0, strict=True)
    if number >= 1:
        raise InputError(f"{name}: got {number:g}, expected a number in (0, 1)")
    return number
