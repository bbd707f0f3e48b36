"""The Markov chain of an affinity: how it mixes, and walks on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from nlflow._array import Array, Floats, constant_like, namespace, over_channels, power_of_two, scalar, underflowing
from nlflow.errors import InputError, NumericalError, check_integer, check_memory, check_number, checked_call
from nlflow.markov.metastable import Metastable
from nlflow.markov.stationary import states_without_end
from nlflow.markov.walks import AliasTables, EdgeTables, Positions, Tables, check_stop, generator_of, starting_states

_PATIENCE = 10**6
_SMALLEST_DISTANCE = 1e-12  # in total variation: the sum of N roundings stays below


@checked_call
@underflowing
class MarkovChain(Metastable):
    """The chain that moves from node i to node j with probability P_ij = w_j k_ij / d_i.

    The averaging operator of any affinity, as it is: symmetric or not, dense or matrix-free (arXiv 2312.00751,
    section 3: a self-attention layer averages values over the law of one move, ``(P^k v)_i = E[v(B_k) | B_0 = i]``,
    Lemma 1). States are the nodes of the domain, numbered in C order.

    Parameters
    ----------
    affinity : Affinity
        Used as it is, not symmetrized.
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
        if start is not None:
            return np.array([self._worst(law.reshape(1, -1)) for law in islice(self._laws(start), count + 1)])
        matrix, laws = self.matrix(), np.eye(self.states)
        result = [self._worst(laws)]
        for _ in range(count):
            laws = laws @ matrix
            result.append(self._worst(laws))
        return np.array(result)

    def _worst(self, laws: Floats) -> float:
        """Return the largest total-variation distance of laws, one a row, to pi."""
        return float(np.abs(laws - self.stationary.ravel()).sum(axis=1).max()) / 2

    def mixing_time(self, eps: float = 0.25, start: Any = None) -> int:
        """Return the smallest k at which the law is within `eps` of pi in total variation, up to rounding.

        Parameters
        ----------
        eps : float
            In (0, 1), at least 1e-12: smaller distances are rounding.
        start : int or array, optional
            Node number or law; matrix-free, up to a million moves. Without it the worst starting node, by squaring the
            matrix: O(N^3 log k).

        Raises
        ------
        InputError
            For a reducible or periodic chain, which never mixes.
        """
        eps = check_number("eps", eps, minimum=0, strict=True, below=1)
        if eps < _SMALLEST_DISTANCE:
            raise InputError(
                f"eps: got {eps:g}, expected at least {_SMALLEST_DISTANCE:g}, below which distances are rounding; use "
                "mixing_bounds()"
            )
        self.require_limit("the mixing time")
        within = eps + self._rounding(eps)
        if start is not None:
            for k, law in enumerate(islice(self._laws(start), _PATIENCE + 1)):
                if self._worst(law.reshape(1, -1)) <= within:
                    return k
            raise NumericalError(f"eps: {eps:g} was not reached in {_PATIENCE} moves; use mixing_bounds()")
        # The distance decreases with k: double until it is small enough, then add up the powers that keep it above.
        powers = [self.matrix()]
        if self._worst(np.eye(self.states)) <= within:
            return 0
        while self._worst(powers[-1]) > within:
            if len(powers) > 60:
                raise NumericalError(f"eps: {eps:g} was not reached in 2^60 moves; the chain hardly mixes")
            square = powers[-1] @ powers[-1]
            powers.append(square / square.sum(axis=1, keepdims=True))
        done, reached = 0, np.eye(self.states)
        for exponent in reversed(range(len(powers) - 1)):
            further = reached @ powers[exponent]
            if self._worst(further) > within:
                done, reached = done + 2**exponent, further
        return done + 1

    def _rounding(self, eps: float) -> float:
        """Return by how much distances may pass `eps` and still count as within it.

        Distances of small chains are often fractions of small numbers, and equal to an `eps` such as 1/4 before they
        are rounded.
        """
        single = "float32" in str(self.affinity.dtype)
        return min(1e-6 if single else _SMALLEST_DISTANCE, eps / 4)

    def mixing_bounds(self, eps: float = 0.25) -> tuple[float, float]:
        """Return lower and upper bounds of the worst-case mixing time from the spectral gap of a reversible chain.

        (t_rel - 1) log(1 / (2 eps)) <= t_mix(eps) <= t_rel log(1 / (eps min pi)), with t_rel = 1 / gap (Levin and
        Peres, Markov Chains and Mixing Times, 2nd ed. 2017, theorems 12.4 and 12.5).
        """
        eps = check_number("eps", eps, minimum=0, strict=True, below=1)
        self.require_limit("the mixing time")
        if not self.reversible:
            raise InputError(
                "affinity: got a chain that is not reversible, expected a reversible one, for which alone the spectral "
                "bounds hold; use mixing_time()"
            )
        gap, lowest = self.spectral_gap, float(self.stationary.min())
        unknown = self._gap_error * gap  # goes to the safe side
        upper = math.inf
        if gap > 0 and lowest > 0:
            upper = (math.log(1 / eps) - math.log(lowest)) / (gap - unknown)
        return max((1 / (gap + unknown) - 1) * math.log(1 / (2 * eps)), 0.0), upper

    def distance_to_limit(self, v: Any, steps: int) -> Floats:
        """Return the norm of P^k v - pi^T v in `norm_weights` for k = 0 ... `steps`; channels are added up.

        For reversible chains it is at most |mu_2|^k times its value at k = 0.
        """
        u = self.affinity.check_signal("v", v)
        distance, count = self._distance(u), check_integer("steps", steps, minimum=0)
        return np.array([distance(moved) for moved in islice(self._averages(u), count + 1)])

    def _distance(self, v: Array) -> Callable[[Array], float]:
        """Return the function that measures how far a signal is from the limit of `v`, in `norm_weights`."""
        limit, xp = self.limit(v), namespace(v)
        weights = over_channels(constant_like(self.norm_weights, xp.astype(v, xp.float64)), v)
        size = power_of_two(scalar(xp.max(xp.abs(v))))  # squares of very large and very small values have no float
        return lambda u: size * math.sqrt(float(xp.sum(weights * ((u - limit) / size) ** 2, dtype=xp.float64)))

    def steps_to_limit(self, v: Any, rtol: float = 1e-3) -> int:
        """Return the first k at which P^k v is constant up to `rtol`: its distance to pi^T v over that of v.

        In `norm_weights`. For reversible chains at most log(1 / rtol) / log(1 / |mu_2|).

        Parameters
        ----------
        v : array of shape ``domain.shape`` or ``domain.shape + (D,)``
        rtol : float
            In (0, 1).

        Raises
        ------
        NumericalError
            When a million moves, or the precision of `v`, do not suffice.
        """
        rtol = check_number("rtol", rtol, minimum=0, strict=True, below=1)
        u = self.affinity.check_signal("v", v)
        distance, xp = self._distance(u), namespace(u)
        target = rtol * distance(u)
        if target <= 4 * float(xp.finfo(u.dtype).eps) * float(xp.max(xp.abs(u))):
            raise NumericalError(
                f"rtol: {rtol:g} of the distance of v from a constant is below its rounding; use a larger one, or take "
                "the mean out of v"
            )
        for k, moved in enumerate(islice(self._averages(u), _PATIENCE + 1)):
            if distance(moved) <= target:
                return k
        raise NumericalError(f"rtol: {rtol:g} was not reached in {_PATIENCE} moves; the chain mixes too slowly")

    # ---- walks

    @cached_property
    def _tables(self) -> Tables:
        if self._sparse_moves is None:
            return AliasTables(self.matrix(), self._limit)
        from scipy.sparse import csr_array, eye_array

        return EdgeTables(csr_array(self._lazily(self._sparse_moves, eye_array(self.states))))

    def walk(self, start: Any, steps: int, walkers: int, *, rng: Any = None, record: bool = False) -> Positions:
        """Simulate independent walkers.

        Compiled and threaded, a few nanoseconds a move; the same `rng` gives the same walks for any number of threads.
        The first call builds the tables: 8 N^2 bytes, O(N^2) time. Of a graph (`affinity_from_graph`) only the edges
        are kept, and a move takes O(log edges of a node).

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
        states = starting_states(start, walkers, shape, self.states, generator, self._limit)
        if record:
            check_memory(
                f"the positions of {walkers} walkers", 16 * (steps + 1) * len(states), "use record=False", self._limit
            )
        return self._tables.walk(states, steps, generator, record)

    def stopped_walk(self, start: Any, stop: Any, walkers: int, *, rng: Any = None) -> Positions:
        """Simulate walkers that are stopped at random, and return where.

        With ``stop = lambda~ / (1 + lambda~)`` the mean of f over the positions is NeuTRENO's equilibrium at the start,
        u* = lambda~ ((1 + lambda~) I - P)^-1 f, as personalized PageRank is.

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
        states = starting_states(start, walkers, shape, self.states, generator, self._limit)
        if values.min() == 0:
            endless = states_without_end(self._listed_moves, states, values)
            if len(endless):
                raise InputError(
                    f"stop: got 0 at all nodes that can be reached from node {endless[0]}, where walkers come to and "
                    "would go on for ever; stop them somewhere there"
                )
        return self._tables.walk_stopped(states, values, generator)
