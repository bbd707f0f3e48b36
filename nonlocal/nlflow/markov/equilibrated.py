"""The stationary law of a chain, and the limit of averages."""

from __future__ import annotations

from functools import cached_property
from typing import Any
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, constant_like, mean_over_nodes, namespace, to_numpy, underflowing
from nlflow.affinities import Affinity, shown
from nlflow.errors import NumericalError
from nlflow.kernels import ExpDotProduct
from nlflow.markov.absorbing import REDUCED_STATES, balanced_law
from nlflow.markov.balance import ROUNDING, Balance, balance
from nlflow.markov.operator import Transitions
from nlflow.markov.stationary import (
    balanced,
    communicating_classes,
    dense,
    left_eigenvector,
    log_state_reduction,
    state_reduction,
    within,
)
from nlflow.store.notebook import card

# Up to this many states spectra come from the whole matrix, which takes a second or so.
DENSE_STATES = 1000
_LEAST = 1e-280  # of a law: below, its digits are not all there
# The laws of affinities that are not symmetric: an equilibrium, its diversity and their bounds each make a chain of
# their own, lazy or not, over many fidelities, and all of these have one law. By identity, for as long as the affinity
# lives: one of a user's own may say that others are equal to it, or have no hash.
_LAWS: dict[int, Floats] = {}


@underflowing
class Equilibrated(Transitions):
    """A chain with what decides its long run: see `nlflow.MarkovChain`."""

    def _repr_html_(self) -> str:
        """Return it for a notebook: what it says, and for up to 4096 states a row of P, pi and known eigenvalues."""
        return card(
            type(self).__name__,
            [("states", self.states), ("laziness", f"{self.laziness:g}"), *shown.said(self.affinity)],
            shown.row_pictured(self.affinity),
            shown.pictured(self.affinity, "stationary law pi", lambda: self._mass) if self.affinity.symmetric else "",
            shown.spectrum_pictured(self.affinity),
        )

    @cached_property
    def reversible(self) -> bool:
        """Whether pi_i P_ij = pi_j P_ji for some law pi > 0; then all eigenvalues are real.

        Always for symmetric k; otherwise checked for all transitions, to 1e-8 relative (1e-5 where the affinity is
        float32). Never with transient states, where no such law is positive. Beyond 1000 states pi is what detailed
        balance gives along a spanning tree, O(edges). Where all fluxes agree to 1e-11, what is nothing but rounding,
        the chain is solved in its symmetric form; a chain that is reversible to 1e-8 alone is solved as it is.
        """
        if self.affinity.symmetric:
            return True
        rtol = 1e-5 if "float32" in str(self.affinity.dtype) else 1e-8
        if self._balance is not None and (self._balance.misfit <= rtol or self._sparse_moves is not None):
            return self._balance.misfit <= rtol
        if sum(map(len, self._closed)) < self.states:
            return False
        for inside in self._closed:
            law = self.stationary.ravel() if len(inside) == self.states else self._law_within(inside)
            if not balanced(within(self._listed_moves, inside), law, rtol, self.least_move):
                return False
        return True

    @cached_property
    def _balance(self) -> Balance | None:
        """Detailed balance along a tree, of many states whose k is not symmetric."""
        if self.affinity.symmetric or self.states <= DENSE_STATES:
            return None
        return balance(self._listed_moves)

    @property
    def _unlike(self) -> str:
        """How far fluxes are from balance, in words."""
        if self._balance is None:
            return ""
        return f" (pi_i P_ij and pi_j P_ji differ by up to {self._balance.misfit:.2g} relative)"

    @property
    def _balanced(self) -> bool:
        """Whether the fluxes of `_balance` agree up to rounding."""
        return self._balance is not None and self._balance.misfit <= ROUNDING

    @cached_property
    def _symmetric_form(self) -> Affinity | None:
        """The affinity whose k is symmetric and whose chain this is; None where it has none that is listed."""
        if self.affinity.symmetric:
            if self._sparse_moves is None or self._given_moves is not None:
                return self.affinity
            return balance(self._sparse_moves).fluxes(self._sparse_moves, self.affinity.domain) or self.affinity
        if self._sparse_moves is None or self._balance is None or not self._balanced:
            return None
        return self._balance.fluxes(self._sparse_moves, self.affinity.domain)

    # ---- the stationary law

    @property
    def _mass(self) -> Floats:
        """w_i d_i / sum_j w_j d_j, in whose inner product P is self-adjoint when k is symmetric."""
        measure = self.affinity.measure("degree", self.affinity.log_degree)
        return np.asarray(to_numpy(measure), dtype=np.float64).reshape(self.affinity.domain.shape)

    @cached_property
    def stationary(self) -> Floats:
        """The stationary law pi = pi P, shape ``domain.shape``, float64, summing to 1 (Lemma 2).

        For symmetric k in closed form, pi_i = w_i d_i / sum_j w_j d_j; otherwise by state reduction, every entry to
        full precision. Beyond 1000 states by detailed balance, to 1e-11, where the chain is reversible up to rounding;
        beyond 4096 that are not by Arnoldi iteration and refinement, to 1e-10. Chains with transient
        states (causal attention) have pi = 0 there.

        Raises
        ------
        InputError
            For a reducible chain, of which there are several.
        NumericalError
            When it is not determined in float64.
        """
        self.require_unique("the stationary law")
        shape = self.affinity.domain.shape
        if self.affinity.symmetric:
            return self._mass
        law = _LAWS.get(id(self.affinity))
        if law is None:
            law = _LAWS[id(self.affinity)] = self._found_law()
            finalize(self.affinity, _LAWS.pop, id(self.affinity), None).atexit = False
        return law.reshape(shape).copy()

    def _found_law(self) -> Floats:
        if self.states <= DENSE_STATES and self._moves_that_underflow is not None and self.log_law is not None:
            return np.exp(self.log_law)
        law = np.zeros(self.states)
        law[self._closed[0]] = self._law_within(self._closed[0])
        return law

    def _law_within(self, inside: NDArray[np.intp]) -> Floats:
        """Return the stationary law of a closed class, one number for each of its states."""
        if self._balance is not None and self._balanced:
            law = np.exp(self._balance.logs[inside])
            return np.asarray(law / law.sum())
        if len(inside) <= REDUCED_STATES:
            return state_reduction(dense(within(self._listed_moves, inside)))
        moves = within(self._listed_moves, inside)
        return balanced_law(moves, left_eigenvector(lambda p: np.asarray(p @ moves), len(inside)))

    @cached_property
    def _law_of_parts(self) -> Floats:
        """A stationary law, shape (N,): of several classes one in which each has the share of its states."""
        if self.affinity.symmetric:
            return self._mass.ravel()
        law = np.zeros(self.states)
        for inside in self._closed:
            law[inside] = self._law_within(inside) * (len(inside) / self.states)
        return law

    @cached_property
    def log_law(self) -> Floats | None:
        """Log pi, shape (N,), finite where pi underflows; None with transient states, where pi is 0.

        Raises
        ------
        InputError
            As `stationary`.
        NumericalError
            Where pi underflows and the affinity does not know its moves in log space, or has more than 1000 states.
        """
        if self.affinity.symmetric:
            logs = np.asarray(to_numpy(self.affinity._log_degree_wide()), dtype=np.float64).ravel()
            logs = logs + np.log(self.affinity.domain.weights).ravel()
            return np.asarray(logs - np.logaddexp.reduce(logs))
        moves = self._moves_that_underflow
        if moves is None:
            law = self.stationary.ravel()
            if float(law.min()) > _LEAST:
                return np.asarray(np.log(law))
            moves = self.affinity._log_transitions()
        if moves is None:
            # Moves of probability 0 as they were given; a dot product has none of its own.
            if not isinstance(self.affinity.kernel, ExpDotProduct) and len(self._closed[0]) < self.states:
                return None
        elif communicating_classes(np.isfinite(moves))[0] > 1:  # by a mask, or in a matrix
            return None
        elif self.states <= DENSE_STATES:
            return log_state_reduction(moves)
        raise NumericalError(
            f"affinity: got method={self.affinity.method!r} on {self.states} nodes with a stationary law that "
            f"underflows, expected method='dense', 'pairwise' or 'tiled' on at most {DENSE_STATES} nodes, of which its "
            "logarithm is known; use one of these, or scale the logits down"
        )

    @cached_property
    def _moves_that_underflow(self) -> Floats | None:
        """The logarithms of all moves where some underflow (not only such as cannot happen); None elsewhere."""
        if self._sparse_moves is not None:
            return None
        rare = self._moves < self.least_move
        if not np.any(rare):
            return None
        logs = self.affinity._log_transitions()
        return logs if logs is not None and np.any(np.isfinite(logs) & rare) else None

    @property
    def log_moves(self) -> Floats:
        """Log P_ij without the laziness, shape (N, N), to full precision where P underflows and it is known."""
        known = self._moves_that_underflow
        with np.errstate(divide="ignore"):  # log 0 = -inf is meant
            return np.log(self._moves) if known is None else known.copy()

    @cached_property
    def norm_weights(self) -> Floats:
        """Weights of the nodes in the norm of a signal: pi, or w / sum w where transient states have pi = 0.

        In L2(pi) no average is longer than its signal; but it does not see the states in which no walk ends, which in
        causal attention are all but the first.
        """
        law = self.stationary
        if self.affinity.symmetric or len(self._closed[0]) == self.states:
            return law
        weights = np.asarray(self.affinity.domain.weights, dtype=np.float64)
        return np.asarray(weights / weights.sum())

    def limit(self, v: Any) -> Array:
        """Return pi^T v, the constant to which P^k v converges (arXiv 2312.00751, eq. 20), broadcastable to `v`.

        Raises
        ------
        InputError
            For a reducible or periodic chain, which has no such limit.
        """
        u = self.affinity.check_signal("v", v)
        self.require_limit("the limit of P^k v")
        xp = namespace(u)
        return mean_over_nodes(u, constant_like(self.stationary, xp.astype(u, xp.float64)))
