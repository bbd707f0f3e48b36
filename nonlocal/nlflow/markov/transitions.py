"""P of an affinity as an operator."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import ArrayT, Floats, constant_like, mean_over_nodes, namespace, on_host, underflowing
from nlflow.affinities import Affinity, shown
from nlflow.affinities.checks import check_affinity
from nlflow.errors import InputError, all_digits, check_floats, check_integer, check_number
from nlflow.markov.law import StationaryLaw
from nlflow.markov.metastable import MetastableSets, metastable_sets
from nlflow.markov.moves import DENSE_STATES, Moves
from nlflow.markov.spectrum import Modes, Spectrum
from nlflow.markov.walks import check_law
from nlflow.store.notebook import card


@underflowing
class Transitions:
    """What a chain knows of P."""

    def __init__(self, affinity: Affinity, *, laziness: float = 0.0, memory_limit: float | None = None) -> None:
        self.affinity = check_affinity(affinity)
        self.laziness = check_number("laziness", laziness, minimum=0, below=1)
        if memory_limit is not None:
            check_number("memory_limit", memory_limit, minimum=1, finite=False)
        self._limit = memory_limit
        self._moves = Moves(self.affinity, self.laziness, memory_limit)
        self._law = StationaryLaw(self._moves)
        self._spectrum = Spectrum(self._law)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.affinity!r}, laziness={all_digits(self.laziness)})"

    def _repr_html_(self) -> str:
        law = ""
        if self.affinity.symmetric:
            law = shown.pictured(self.affinity, "stationary law pi", lambda: self._shaped(self._law.mass))
        return card(
            type(self).__name__,
            [("states", self.states), ("laziness", f"{self.laziness:g}"), *shown.said(self.affinity)],
            shown.row_pictured(self.affinity),
            law,
            shown.spectrum_pictured(self.affinity),
        )

    @property
    def states(self) -> int:
        """N."""
        return self._moves.states

    def _shaped(self, values: Floats) -> Floats:
        return values.reshape(self._moves.shape)

    # ---- moves

    def expectation(self, v: ArrayT, steps: int = 1) -> ArrayT:
        """Return E[v(B_k) | B_0 = i] = (P^k v)_i (Lemma 1).

        Parameters
        ----------
        v : array of shape ``domain.shape`` or ``domain.shape + (D,)``
        steps : int
            k >= 0.

        Returns
        -------
        array
            Like `v`.
        """
        u = self.affinity.check_signal("v", v)
        found: ArrayT = next(islice(self._moves.averages(u), check_integer("steps", steps, minimum=0), None))
        return found

    def law(self, start: Any, steps: int = 1) -> Floats:
        """Return the probabilities of the nodes after k moves, p P^k.

        Parameters
        ----------
        start : int or array of shape ``domain.shape``
            Node number, or probabilities of the nodes.
        steps : int
            k >= 0.

        Returns
        -------
        array of shape ``domain.shape``
            float64, summing to 1.
        """
        return next(islice(self._laws(start), check_integer("steps", steps, minimum=0), None))

    def _laws(self, start: Any) -> Iterator[Floats]:
        array = on_host(start, "start")
        if array.shape != () or array.dtype.kind not in "iu":
            return self._moves.laws(check_law(start, self._moves.shape))
        law = np.zeros(self.states)
        law[check_integer("start", int(array), minimum=0, below=self.states)] = 1.0
        return self._moves.laws(self._shaped(law))

    def matrix(self) -> Floats:
        """Return all transition probabilities, shape (N, N), float64.

        Raises
        ------
        MemoryLimitError
        """
        return self._moves.matrix()

    @property
    def log_moves(self) -> Floats:
        """Logarithms of P without the laziness, shape (N, N)."""
        return self._law.log_moves()

    # ---- structure

    @property
    def irreducible(self) -> bool:
        """Whether every state can be reached from every other."""
        return self._moves.irreducible

    @property
    def period(self) -> int:
        """Greatest common divisor of the lengths of all round trips in the class in which walks end.

        Raises
        ------
        InputError
            For a chain with several closed classes.
        """
        self.require_unique("the period")
        return self._moves.period

    @property
    def reversible(self) -> bool:
        """Whether pi_i P_ij = pi_j P_ji for some law pi > 0.

        True for symmetric k; otherwise checked to 1e-8 relative (1e-5 where the affinity is float32).
        """
        return self._law.reversible

    def require_unique(self, what: str) -> None:
        """Raise `InputError` when walks can end in several classes of states."""
        self._moves.require_unique(what)

    def require_limit(self, what: str) -> None:
        """Raise `InputError` when P^k does not converge to one law."""
        self.require_unique(what)
        if self.period > 1:
            raise InputError(
                f"affinity: got a periodic chain (period {self.period}), expected an aperiodic one: P^k does not "
                f"converge, so {what} does not exist; use laziness=0.5, or a kernel with k(x, x) > 0"
            )

    # ---- the stationary law

    @property
    def stationary(self) -> Floats:
        """The stationary law pi = pi P, shape ``domain.shape``, float64, summing to 1; 0 in transient states (Lemma 2).

        pi_i = w_i d_i / sum_j w_j d_j for symmetric k; otherwise found to 1e-10 relative, in O(N^3) time up to 1000
        states.

        Raises
        ------
        InputError
            For a chain with several closed classes.
        NumericalError
            When it is not determined in float64.
        """
        return self._shaped(self._law.stationary)

    @property
    def log_law(self) -> Floats | None:
        """Logarithm of pi, shape (N,), finite where pi underflows; None with transient states.

        Raises
        ------
        InputError
            For a chain with several closed classes whose k is not symmetric.
        NumericalError
            Where pi underflows and its logarithm is not known.
        """
        return self._law.log

    @cached_property
    def norm_weights(self) -> Floats:
        """Weights of `distance_to_limit`: pi, or w / sum w where some states are transient."""
        law = self.stationary
        if self.affinity.symmetric or len(self._moves.closed[0]) == self.states:
            return law
        weights = np.asarray(self.affinity.domain.weights, dtype=np.float64)
        return np.asarray(weights / weights.sum())

    def limit(self, v: ArrayT) -> ArrayT:
        """Return pi^T v, the constant to which P^k v converges (arXiv 2312.00751, eq. 20).

        Raises
        ------
        InputError
            For a chain with several closed classes, or a periodic one.
        """
        u = self.affinity.check_signal("v", v)
        self.require_limit("the limit of P^k v")
        xp = namespace(u)
        mean: ArrayT = mean_over_nodes(u, constant_like(self.stationary, xp.astype(u, xp.float64)))
        return mean

    # ---- the spectrum

    def eigenvalues(self) -> NDArray[Any]:
        """Return all eigenvalues by decreasing modulus: real for reversible chains, complex otherwise. O(N^3)."""
        self._moves.check_room("all eigenvalues", 32 * self.states**2, "use second_eigenvalue")
        return self._spectrum.eigenvalues()

    @property
    def second_eigenvalue(self) -> float | complex:
        """The eigenvalue mu_2 of second largest modulus, with the errors of `spectral_gap`; 0 for a single state."""
        return self._spectrum.second[1]

    @property
    def spectral_gap(self) -> float:
        """1 - |mu_2|, the absolute gap; 0 for periodic chains.

        The error relative to the gap is at most 1e-10 up to 1000 states, O(N^3), and for reversible graphs; else 1e-6
        (1e-3 in float32).

        Raises
        ------
        InputError
            For a chain with several closed classes.
        NumericalError
            When the digits are not determined in float64, or not reached.
        """
        return self._spectrum.second[0]

    @property
    def relaxation_time(self) -> float:
        """1 / spectral gap, in moves; infinity for periodic chains."""
        gap = self.spectral_gap
        return 1 / gap if gap > 0 else math.inf

    @property
    def smallest_eigenvalue(self) -> float:
        """mu_min; the NeuTRENO step is stable for 0 < lambda~ < 1 + mu_min.

        Raises
        ------
        InputError
            For a chain that is not reversible.
        """
        if not self.reversible:
            raise InputError(
                "affinity: got a chain that is not reversible, expected real eigenvalues; use eigenvalues() or "
                "largest_stable_fidelity()"
            )
        return self._spectrum.smallest()

    def modes(self, count: int, *, rtol: float | None = None) -> Modes:
        """Return the leading eigenpairs of a reversible chain.

        O(N^3) time up to 1000 states, one average a step beyond.

        Parameters
        ----------
        count : int
            At most N, and N - 1 beyond 1000 states.
        rtol : float, optional
            Largest residual; by default 1e-9, or 1e-5 where averages are in float32.

        Raises
        ------
        InputError
            For a chain that is not reversible.
        NumericalError
            Where the residual is not reached.
        """
        count = check_integer("count", count, minimum=1)
        rtol = self._residual_of_modes(rtol)
        most = self.states if self.states <= DENSE_STATES else self.states - 1
        if count > most:
            raise InputError(f"count: got {count}, expected at most {most} of {self.states} states")
        return self._spectrum.modes(count, rtol)

    def _residual_of_modes(self, given: float | None) -> float:
        usual = 1e-5 if self._moves.single else 1e-9
        return check_number("rtol", usual if given is None else given, minimum=0, strict=True)

    def metastable_sets(self, count: int, *, weights: Any = None, rtol: float | None = None) -> MetastableSets:
        """Return sets of states that walkers seldom leave, by robust Perron cluster analysis.

        Memberships are chi = X A >= 0 with rows that sum to 1; A makes the sets as crisp as several starts find. X has
        the leading modes of a reversible chain (PCCA+; Roeblitz and Weber 2013, doi 10.1007/s11634-013-0134-6), or the
        real Schur vectors of the eigenvalues with the largest real parts (GPCCA; Reuter et al. 2018, doi
        10.1021/acs.jctc.8b00079). O(N^3) time up to 1000 states.

        Parameters
        ----------
        count : int
            m >= 2, and for GPCCA at most N - 2.
        weights : array of shape ``domain.shape``, optional
            > 0, of the inner product in which sets are crisp; they make it GPCCA. By default pi, or the weights of the
            nodes where some states are transient.
        rtol : float, optional
            As of `MarkovChain.modes`.

        Returns
        -------
        MetastableSets
            Sets by decreasing stationary probability.

        Raises
        ------
        InputError
            For weights that are not positive, and a count that parts two conjugate or equal eigenvalues.
        NumericalError
            As `modes`.
        """
        m = check_integer("count", count, minimum=2)
        if weights is None and self.reversible:
            return metastable_sets(self.modes(m, rtol=rtol), self._law, self._law.of_parts)
        rtol = self._residual_of_modes(rtol)
        if m > self.states - 2:
            raise InputError(f"count: got {m}, expected at most {self.states - 2} of {self.states} states")
        inner = self._weights_of_sets(weights)
        return metastable_sets(self._spectrum.schur(m, rtol, inner), self._law, inner)

    def _weights_of_sets(self, given: Any) -> Floats:
        if given is None:
            law = self._law.of_parts
            if law.min() > 0:
                return law
            given = self.affinity.domain.weights
        weights, shape = check_floats("weights", given), self._moves.shape
        if weights.shape != shape or not weights.min() > 0:
            raise InputError(
                f"weights: got shape {weights.shape} and a minimum of {weights.min():g}, expected numbers > 0 of shape "
                f"{shape}, one for each node"
            )
        weights = weights.ravel() / weights.max()  # whose sum no float may hold
        return np.asarray(weights / weights.sum(), np.float64)
