"""The Markov chain of an affinity."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from nlflow._array import Array, Floats, constant_like, namespace, over_channels, power_of_two, scalar, underflowing
from nlflow.errors import InputError, NumericalError, check_flag, check_integer, check_number, checked_call, kind_of
from nlflow.markov.given import of_counts, of_graph, of_transitions
from nlflow.markov.law import LEAST, PATIENCE, SMALLEST_DISTANCE, distances, mixing_time, rounded
from nlflow.markov.moves import DENSE_STATES
from nlflow.markov.passages import Absorption, Nodes, Passages, node_numbers
from nlflow.markov.pseudotime import Pseudotime, pseudotime
from nlflow.markov.transitions import Transitions
from nlflow.markov.walks import Positions, Walks


@checked_call
@underflowing
class MarkovChain(Transitions):
    """The chain that moves from node i to node j with probability P_ij = w_j k_ij / d_i.

    States are the nodes of the domain, numbered in C order (arXiv 2312.00751, section 3).

    Parameters
    ----------
    affinity : Affinity
        Not symmetrized.
    laziness : float
        In [0, 1): the operator is laziness I + (1 - laziness) P.
    memory_limit : float, optional
        Bytes; by default that of `nlflow.errors.memory_limit`.

    Examples
    --------
    >>> from nlflow import Gaussian, Grid, MarkovChain, affinity
    >>> chain = MarkovChain(affinity(Gaussian(width=2.0), Grid(20, boundary="isolated")))
    >>> chain.reversible, chain.period, chain.mixing_time() > 1
    (True, 1, True)
    """

    # ---- ways in

    @classmethod
    def from_transitions(
        cls, transitions: Any, key: str | None = None, *, rtol: float = 1e-6, balance: float | None = None,
        laziness: float = 0.0, memory_limit: float | None = None,
    ) -> MarkovChain:  # fmt: skip
        """Return the chain of a transition matrix P.

        Parameters
        ----------
        transitions : array or scipy.sparse array of shape (N, N), or annotated data
            P_ij >= 0 from row to column.
        key : str, optional
            Name of a matrix in ``obsp`` of annotated data.
        rtol : float
            By how much the sum of a row may differ from 1; rows are divided by their sums.
        balance : float, optional
            Largest relative difference of pi_i P_ij and pi_j P_ji, which are then replaced by their mean; without it
            the chain is taken as it is.
        laziness, memory_limit : float
            As of the class.

        Raises
        ------
        InputError
            For rows that do not sum to 1, for negative or non-finite entries, and where fluxes differ by more than
            `balance`.
        NumericalError
            Where fluxes to be balanced span more than floats hold.
        """
        detailed = None if balance is None else check_number("balance", balance, minimum=0)
        made = of_transitions(transitions, key, check_number("rtol", rtol, minimum=0, below=1), detailed, memory_limit)
        return cls(made, laziness=laziness, memory_limit=memory_limit)

    @classmethod
    def from_counts(
        cls, counts: Any, key: str | None = None, *, reversible: bool = True, laziness: float = 0.0,
        memory_limit: float | None = None,
    ) -> MarkovChain:  # fmt: skip
        """Return the likeliest chain of counts c_ij of moves from i to j.

        With ``reversible=True`` it is the likeliest in detailed balance (Prinz et al. 2011, doi 10.1063/1.3565032;
        Trendelkamp-Schroer et al. 2015, doi 10.1063/1.4934536); else P_ij = c_ij / sum_j c_ij.

        Parameters
        ----------
        counts : array or scipy.sparse array of shape (N, N), or annotated data
            >= 0.
        key, laziness, memory_limit
            As `from_transitions`.
        reversible : bool

        Raises
        ------
        InputError
            For negative or non-finite counts, a state that no move leaves, and with ``reversible=True`` for states that
            do not all communicate.
        NumericalError
            Where the maximum is not reached.
        """
        made = of_counts(counts, key, check_flag("reversible", reversible), memory_limit)
        return cls(made, laziness=laziness, memory_limit=memory_limit)

    @classmethod
    def from_graph(
        cls, graph: Any, key: str | None = None, *, laziness: float = 0.0, memory_limit: float | None = None
    ) -> MarkovChain:
        """Return the chain that moves along the edges of a graph: P_ij = k_ij / sum_j k_ij.

        Parameters
        ----------
        graph : Affinity, annotated data, or what `affinity_from_graph` takes
        key : str, optional
            Name of a matrix in ``obsp`` of annotated data, "connectivities" by default, or of the attribute of
            networkx' edges that has the weight.
        laziness, memory_limit : float
            As of the class.

        Raises
        ------
        InputError
            As `affinity_from_graph`.
        """
        return cls(of_graph(graph, key, memory_limit), laziness=laziness, memory_limit=memory_limit)

    def pseudotime(
        self, root: int, *, modes: int = 10, branching: bool = False, rtol: float | None = None
    ) -> Pseudotime:
        """Return diffusion pseudotime of each node from a root, and the branches on the way.

        dpt(i, j)^2 = sum_{l >= 1} (mu_l / (1 - mu_l))^2 (psi_l(i) - psi_l(j))^2 with the eigenpairs of pi^1/2 P
        pi^-1/2, the constant mode left out (Haghverdi et al. 2016, doi 10.1038/nmeth.3971).

        Parameters
        ----------
        root : int
            Node number.
        modes : int
            How many of the leading modes are summed, the constant one counted; of larger numbers all that there are.
        branching : bool
            Find three tips and their branches.
        rtol : float, optional
            As of `MarkovChain.modes`.

        Returns
        -------
        Pseudotime

        Raises
        ------
        InputError
            For a chain that is not reversible, or not irreducible, a root that does not exist, and for branches of
            fewer than 3 states.
        """
        root = check_integer("root", root, minimum=0, below=self.states)
        self.require_unique("pseudotime")
        if check_flag("branching", branching) and self.states < 3:
            raise InputError(f"branching: got a chain of {self.states} states, expected at least 3, one for each tip")
        most = self.states if self.states <= DENSE_STATES else self.states - 1  # see `modes`
        count = min(check_integer("modes", modes, minimum=2), most)
        found = pseudotime(self.modes(count, rtol=rtol), self._law.of_parts, root, branching)
        branches = None if found.branches is None else found.branches.reshape(self._moves.shape)
        distances = found.distances.reshape(-1, *self._moves.shape)
        return replace(found, times=self._shaped(found.times), distances=distances, branches=branches)

    # ---- first passages

    @cached_property
    def _passages(self) -> Passages:
        return Passages(self._law)

    def committor(self, source: Any, target: Any, *, backward: bool = False) -> Floats:
        """Return the probability that a walker from each node meets the target before the source.

        q = 0 on the source, 1 on the target, (Pq)_i = q_i elsewhere (E and Vanden-Eijnden 2006, doi
        10.1007/s10955-005-9003-9). O(N^3) up to 1000 states, and beyond for k that is neither symmetric nor a graph's.
        Else relative errors are at most 1e-10 for graphs and 1e-6 for other k (1e-3 in float32), where q is above 1e-3.

        Parameters
        ----------
        source, target : int, array of int, or array of bool of shape ``domain.shape``
            Nodes, without one in common.
        backward : bool
            Return the probability that a walker in the long run who is at a node came from the source last, not from
            the target.

        Returns
        -------
        array of shape ``domain.shape``
            float64.

        Raises
        ------
        InputError
            For nodes that do not exist or are both source and target, where walks from some node meet neither, and with
            `backward` for a chain with transient states.
        NumericalError
            Where the digits are not reached.
        """
        a, b = self._nodes("source", source), self._nodes("target", target)
        if np.any(a & b):
            raise InputError(
                f"target: node {int(np.argmax(a & b))} is a source too, expected sets without a common node"
            )
        return self._shaped(self._passages.committor(a, b, check_flag("backward", backward)))

    def absorption(self, targets: Mapping[Any, Any] | Sequence[Any]) -> Absorption:
        """Return the probabilities that walkers from each node end in each of K targets (fates), and when they end.

        X = R + Q X and t = 1 + Q t, with the moves Q between the other nodes and R to the targets.

        Parameters
        ----------
        targets : mapping of names to nodes, or sequence of nodes
            Nodes are an int, an array of int, or an array of bool of shape ``domain.shape``.

        Returns
        -------
        Absorption

        Raises
        ------
        InputError
            For targets with a common node, for nodes that do not exist, and where walks from some node meet no target.
        NumericalError
            As `committor`.
        MemoryLimitError

        Warns
        -----
        NlflowWarning
            For a target that no node outside of all targets moves to.
        """
        given: Any = targets
        if not isinstance(given, Mapping | Sequence | np.ndarray) or getattr(given, "ndim", 1) == 0:
            raise InputError(
                f"targets: got {kind_of(targets)}, expected a mapping of names to nodes, or a sequence of nodes; "
                "for labels pass {name: labels == name, ...}, and put a single target in a list"
            )
        named = targets if isinstance(targets, Mapping) else dict(enumerate(targets))
        names, inside = tuple(named), [self._nodes(f"targets[{name!r}]", nodes) for name, nodes in named.items()]
        if not inside:
            raise InputError("targets: got none, expected at least one")
        shared = np.sum(inside, axis=0) > 1
        if shared.any():
            node = int(np.argmax(shared))
            both = [repr(name) for name, some in zip(names, inside, strict=True) if some[node]]
            raise InputError(
                f"targets: {' and '.join(both)} share {int(shared.sum())} nodes (the first is {node}), expected sets "
                "without a common node"
            )
        found = self._passages.absorption(names, inside)
        shape = self._moves.shape
        return replace(found, probabilities=found.probabilities.reshape(*shape, -1), times=found.times.reshape(shape))

    def hitting_times(self, target: Any) -> Floats:
        """Return the mean number of moves until a walker from each node first meets the target.

        h = 0 on the target, h = 1 + Ph elsewhere; infinite where walks may end without meeting it.

        Parameters
        ----------
        target : int, array of int, or array of bool of shape ``domain.shape``

        Returns
        -------
        array of shape ``domain.shape``
            float64.

        Raises
        ------
        InputError
            For nodes that do not exist, and for all nodes.
        NumericalError
            As `committor`.
        """
        return self._shaped(self._passages.times(self._nodes("target", target)))

    def mean_first_passage_time(self, source: Any, target: Any) -> float:
        """Return the mean of `hitting_times` over the source nodes, weighted by pi.

        Raises
        ------
        InputError
            For several source nodes that are all transient, or of a chain with several closed classes.
        """
        starts = self._nodes("source", source, every=True)
        return self._passages.mean_time(starts, self._nodes("target", target))

    def mean_first_passage_times(self) -> Floats:
        """Return the mean numbers of moves between all pairs of nodes, from row to column, shape (N, N).

        0 on the diagonal; infinite where walks may end without meeting the column's node. O(N^3) time by state
        reduction, and as much again for each transient state.

        Raises
        ------
        MemoryLimitError
        NumericalError
            Where probabilities underflow, or times overflow.
        """
        self._moves.check_room("passage times", 48 * self.states**2, "use hitting_times(target)")
        return self._passages.all_times()

    def _nodes(self, name: str, given: Any, *, every: bool = False) -> Nodes:
        """Return a mask (N,) of nodes; of all of them for `every` alone."""
        inside = np.zeros(self.states, np.bool_)
        inside[node_numbers(name, given, self._moves.shape)] = True
        if inside.all() and not every:
            raise InputError(f"{name}: got all {self.states} nodes, expected some and not all")
        return inside

    # ---- mixing

    def total_variation(self, steps: int, start: Any = None) -> Floats:
        """Return the distance to pi in total variation (half the sum of moduli) after 0, 1, ... `steps` moves.

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
        return distances(self._law, count, None if start is None else self._laws(start))

    def mixing_time(self, eps: float = 0.25, start: Any = None) -> int:
        """Return the smallest k at which the law is within `eps` of pi in total variation, up to rounding.

        Parameters
        ----------
        eps : float
            In (0, 1), at least 1e-12.
        start : int or array, optional
            Node number or law; one average a move. Without it the worst starting node, O(N^3 log k).

        Raises
        ------
        InputError
            For a chain with several closed classes, or a periodic one.
        NumericalError
            Where a million moves from a start do not suffice.
        """
        eps = check_number("eps", eps, minimum=0, strict=True, below=1)
        if eps < SMALLEST_DISTANCE:
            raise InputError(
                f"eps: got {eps:g}, expected at least {SMALLEST_DISTANCE:g}, below which distances are rounding; use "
                "mixing_bounds()"
            )
        self.require_limit("the mixing time")
        return mixing_time(self._law, eps, None if start is None else self._laws(start))

    def mixing_bounds(self, eps: float = 0.25) -> tuple[float, float]:
        """Return lower and upper bounds of the worst-case mixing time of a reversible chain.

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
        gap, lowest = self.spectral_gap, float(self._law.stationary.min())
        unknown = self._spectrum.gap_error * gap  # goes to the safe side
        least = math.log(lowest) if lowest > LEAST else self._least_log()
        upper = (math.log(1 / eps) - least) / (gap - unknown)
        return max((1 / (gap + unknown) - 1) * math.log(1 / (2 * rounded(self._law, eps))), 0.0), upper

    def _least_log(self) -> float:
        """Return the logarithm of the least probability of the stationary law, -infinity where it is not known."""
        try:
            logs = self.log_law
        except NumericalError:
            return -math.inf
        return -math.inf if logs is None else float(logs.min())

    def distance_to_limit(self, v: Any, steps: int) -> Floats:
        """Return the norm of P^k v - pi^T v in `norm_weights`, over all channels, for k = 0 ... `steps`."""
        u = self.affinity.check_signal("v", v)
        distance, count = self._distance(u), check_integer("steps", steps, minimum=0)
        return np.array([distance(moved) for moved in islice(self._moves.averages(u), count + 1)])

    def _distance(self, v: Array) -> Callable[[Array], float]:
        limit, xp = self.limit(v), namespace(v)
        weights = over_channels(constant_like(self.norm_weights, xp.astype(v, xp.float64)), v)
        size = power_of_two(scalar(xp.max(xp.abs(v))))  # squares of very large and very small values have no float
        return lambda u: size * math.sqrt(float(xp.sum(weights * ((u - limit) / size) ** 2, dtype=xp.float64)))

    def steps_to_limit(self, v: Any, rtol: float = 1e-3) -> int:
        """Return the first k at which `distance_to_limit` is at most `rtol` of what it is for v.

        Parameters
        ----------
        v : array of shape ``domain.shape`` or ``domain.shape + (D,)``
        rtol : float
            In (0, 1).

        Raises
        ------
        NumericalError
            When a million moves, or the precision of `v`, do not suffice, and for a constant `v`.
        """
        rtol = check_number("rtol", rtol, minimum=0, strict=True, below=1)
        u = self.affinity.check_signal("v", v)
        distance, xp = self._distance(u), namespace(u)
        target = rtol * distance(u)
        known = xp.finfo(u.dtype)
        if target <= 4 * float(known.eps) * max(float(xp.max(xp.abs(u))), float(known.smallest_normal)):
            raise NumericalError(
                f"rtol: {rtol:g} of the distance of v from a constant is below its rounding; use a larger one, or take "
                "the mean out of v"
            )
        for k, moved in enumerate(islice(self._moves.averages(u), PATIENCE + 1)):
            if distance(moved) <= target:
                return k
        raise NumericalError(f"rtol: {rtol:g} was not reached in {PATIENCE} moves; the chain mixes too slowly")

    # ---- walks

    @cached_property
    def _walks(self) -> Walks:
        return Walks(self._moves)

    def walk(self, start: Any, steps: int, walkers: int, *, rng: Any = None, record: bool = False) -> Positions:
        """Simulate independent walkers.

        The same seed gives the same walks for any number of threads. The first call builds tables: O(edges) for a
        graph, otherwise O(N^2) memory, and up to O(N^3) time where the affinity stores no matrix.

        Parameters
        ----------
        start : int, array of int of shape (walkers,), or array of float of shape ``domain.shape``
            Node number for all, one for each, or probabilities of the nodes.
        steps, walkers : int
        rng : seed or numpy.random.Generator, optional
        record : bool
            Return all positions.

        Returns
        -------
        array of int64 of shape (walkers,), or (steps + 1, walkers) with `record`
            Node numbers.
        """
        return self._walks.walk(start, steps, walkers, rng, check_flag("record", record))

    def stopped_walk(self, start: Any, stop: Any, walkers: int, *, rng: Any = None) -> Positions:
        """Simulate walkers that are stopped at random, and return where.

        With ``stop = lambda~ / (1 + lambda~)`` the expectation of f there is NeuTRENO's equilibrium at the start,
        u* = lambda~ ((1 + lambda~) I - P)^-1 f.

        Parameters
        ----------
        start : int or array
            As in `walk`.
        stop : float or array of shape ``domain.shape``
            Probability in (0, 1] to be stopped before each move; of an array some may be 0.
        walkers : int
        rng : seed or numpy.random.Generator, optional

        Returns
        -------
        array of int64 of shape (walkers,)
        """
        return self._walks.stopped(start, stop, walkers, rng)
