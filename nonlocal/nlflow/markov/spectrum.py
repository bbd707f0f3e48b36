"""The spectrum of a chain."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Brief, Floats, to_numpy
from nlflow.affinities.graph import Sparse
from nlflow.errors import InputError, NumericalError, memory_limit
from nlflow.flows.spectrum import extreme
from nlflow.functionals.energies import J
from nlflow.functionals.preconditioners.choice import has_multigrid, setup_bytes
from nlflow.markov.absorbing import EXACT, REDUCED_STATES
from nlflow.markov.law import RESTARTS, StationaryLaw
from nlflow.markov.moves import DENSE_STATES, communicating_classes
from nlflow.markov.rates import all_rates, form_of, nearest_gap, slow_pairs

_FLOOR = 1e-280  # of pi, over the largest
_LITTLE = 1e-6  # of the largest of pi^1/2, and of pi^1/2 v: below, digits of v are lost
_VECTORS = 16  # of each column, at once in LOBPCG
_GUARD, _STEPS = 3, 60  # columns beside those that are asked for, and iterations, of LOBPCG
_APART = 5  # states for each of its columns, without which SciPy's takes the whole matrix, and no constraints
_PAIR_BYTES = 48  # of each pair of states, for vectors from the whole matrix
_EQUAL = 1e-10  # relative difference of rates up to which they are one
_BLOCK = 3  # modes of inverse iteration for the slowest rate
_START, _LOOSE = 1e-9, 1e-3  # residuals that modes have before these steps, and that suffice to rule an end out
_TRIES = 30  # restarts of Lanczos iteration before elimination takes over
_SHIFT = 1e-9  # of I + P, so that it has factors
_ROUGH, _SINGLE = 1e-6, 1e-3  # relative errors of the gap where moves are not listed, and in float32
_ARNOLDI = 1e-11, 1e-5  # residuals of its iteration, in float64 and float32
_TERMS, _EPS = 8, float(np.finfo(np.float64).eps)  # roundings in a Rayleigh quotient


@dataclass(frozen=True, repr=False)
class Modes(Brief):
    """Eigenpairs of P.

    Attributes
    ----------
    values : array of shape (k,)
        Decreasing; 1 once for each closed class.
    vectors : array of shape (N, k)
        Right eigenvectors, orthonormal in pi; the entry of largest modulus of each is positive.
    residual : float
        Largest norm of P v - mu v in pi.
    parted : bool
        Whether the next eigenvalue is known to equal the last: then the last vectors are not unique.
    """

    values: Floats
    vectors: Floats
    residual: float
    parted: bool = False


class Spectrum:
    """Eigenpairs of a chain."""

    def __init__(self, law: StationaryLaw) -> None:
        self.law, self.moves = law, law.moves
        self.affinity, self.states = law.affinity, law.states

    def eigenvalues(self) -> NDArray[Any]:
        """See `MarkovChain.eigenvalues`."""
        values: NDArray[Any]
        if self.law.reversible:
            # sqrt(pi_i) P_ij / sqrt(pi_j) without pi, which may underflow.
            root = np.sqrt(self.moves.dense)
            values = np.clip(np.linalg.eigvalsh(root * root.T), -1, 1)
        else:
            blocks = [self.moves.dense[np.ix_(inside, inside)] for inside in self._classes]
            values = np.concatenate([np.linalg.eigvals(block) for block in blocks]).astype(np.complex128)
            values /= np.maximum(np.abs(values), 1)
        values = self.moves.laziness + (1 - self.moves.laziness) * values
        return np.asarray(values[np.argsort(-np.abs(values), kind="stable")])

    @property
    def _classes(self) -> list[NDArray[np.intp]]:
        labels = communicating_classes(self.moves.listed)[1]
        return np.split(np.argsort(labels, kind="stable"), np.cumsum(np.bincount(labels))[:-1])

    @cached_property
    def second(self) -> tuple[float, float | complex]:
        """See `MarkovChain.spectral_gap`."""
        self.moves.require_unique("the second eigenvalue")
        if self.states == 1:
            return 1.0, 0.0
        if not self.law.reversible:
            return self._second_of_any()
        if self.moves.period > 1:
            return 0.0, -1.0
        slow = (1 - self.moves.laziness) * self._rate(1)
        fast = self._lowest(slow)
        if not min(slow, fast) > 0:
            raise NumericalError(
                "affinity: the gap is below 1e-20 of the fastest rate, where float64 does not determine it; leave out "
                "the lightest moves, or treat each metastable part as a chain of its own"
            )
        return (slow, 1 - slow) if slow <= fast * (1 + EXACT) else (fast, fast - 1)

    def smallest(self) -> float:
        """See `MarkovChain.smallest_eigenvalue`."""
        return float(self.eigenvalues().min()) if self.states <= DENSE_STATES else self._lowest(math.inf) - 1

    def _lowest(self, enough: float) -> float:
        """Return 1 + the smallest eigenvalue of a reversible chain; some lower bound where it is above `enough`."""
        laziness = self.moves.laziness
        return 2 * laziness + (1 - laziness) * self._rate(-1, (enough - 2 * laziness) / (1 - laziness))

    def _rate(self, sign: int, enough: float = math.inf) -> float:
        # 1 - sign mu of the slowest, without the laziness; some lower bound where it is above `enough`.
        if sign < 0 and self.moves.irreducible and self.moves.own_period == 2:
            return 0.0
        if self.states <= DENSE_STATES:
            return self._least_of_all(sign)
        spectrum = self.affinity.known_spectrum() if self.affinity.symmetric else None
        if spectrum is not None:
            return max(float((1 - sign * np.asarray(spectrum)[1 if sign > 0 else 0 :]).min()), 0.0)
        try:
            return self._polished_rate() if sign > 0 else self._fast_rate(enough)
        except NumericalError:
            if self.states > REDUCED_STATES or self.moves.single:
                raise
            return self._least_of_all(sign)

    def _least_of_all(self, sign: int) -> float:
        """Return the least rate from the whole matrix."""
        known = self._constants if sign > 0 else self._constants[:, :0]
        return float(all_rates(self.moves.dense, self._root, sign, known, self._balanced_roots)[0][0])

    def _second_of_any(self) -> tuple[float, complex]:
        moves = self.moves
        if self.states > DENSE_STATES:
            values = self._largest_eigenvalues()
            others = np.delete(values, np.argmin(np.abs(values - 1)))
            found = complex(others[np.argmax(np.abs(others))])
            found = found / max(abs(found), 1.0)
            gap, doubt, exact = 1 - abs(found), _ARNOLDI[moves.single], _SINGLE if moves.single else _ROUGH
        else:
            nearest, exact = [(1.0, 0j, 0.0)], EXACT
            for inside in self._classes:
                block = moves.lazily(moves.dense[np.ix_(inside, inside)], np.eye(len(inside)))
                closed = np.array_equal(inside, moves.closed[0])
                law = self.law.stationary[inside] if closed else None
                rest = np.delete(moves.dense[inside], inside, axis=1).sum(axis=1) * (1 - moves.laziness)
                nearest.append(nearest_gap(block, law, rest))
            gap, found, doubt = min(nearest, key=lambda one: one[0])
            # Of the other classes those that may have the least gap count alone.
            doubt = max(error for least, _, error in nearest if least - error <= gap + doubt)
        if moves.period > 1:
            return 0.0, found
        if not doubt <= exact * gap:
            raise NumericalError(
                f"affinity: the gap of a chain that is not reversible, {gap:.3g}, is known to {doubt:.1g} alone; use "
                "symmetrized(), laziness=0.5, or eigenvalues() for what float64 has of them"
            )
        return gap, found

    def _largest_eigenvalues(self) -> NDArray[Any]:
        def product(v: Floats) -> Floats:
            return self.moves.apply(v.reshape(-1, 1))[:, 0]

        allowed = _ARNOLDI[self.moves.single]
        try:
            return extreme(product, self.states, "LM", 4, tol=1e-12, maxiter=RESTARTS, rounding=allowed)
        except NumericalError as error:
            raise NumericalError(
                "affinity: the second eigenvalue was not found by Arnoldi iteration; use fewer nodes (up to 1000 all "
                "eigenvalues are computed), or eigenvalues()"
            ) from error

    # ---- rates of many states

    @cached_property
    def _root(self) -> Floats:
        """Square roots of pi, floored so that what underflows divides nothing by zero."""
        law = self.law.of_parts
        return np.asarray(np.sqrt(np.maximum(law, law.max() * _FLOOR)))

    @cached_property
    def _balanced_roots(self) -> Floats | None:
        """P^1/2 in detailed balance with pi, by logarithms; None where P is so up to its rounding in float64."""
        law, sure = self.law.of_parts, self.moves.dense >= self.moves.least
        if not self.moves.single and law.min() > law.max() * _FLOOR and np.array_equal(sure, sure.T):
            return None
        if not (self.affinity.symmetric or len(self.moves.closed) == 1) or self.law.log is None:
            return None
        logs = self.law.log[:, None]
        fluxes = logs + self.law.log_moves()
        fluxes = np.where(sure == sure.T, (fluxes + fluxes.T) / 2, np.where(sure, fluxes, fluxes.T))
        return np.asarray(np.exp((fluxes - logs) / 2))

    @cached_property
    def _constants(self) -> Floats:
        """The eigenvectors at 1 of pi^1/2 P pi^-1/2, orthonormal, one for each part that no move leaves."""
        if self.moves.graph_known:
            # Not all that communicate: where moves back underflow, walks leave a class that is none of the limit.
            parts = self.moves.closed
        else:
            self.moves.require_unique("the modes")
            parts = [np.arange(self.states)]
        known = np.zeros((self.states, len(parts)))
        for column, inside in zip(known.T, parts, strict=True):
            column[inside] = self._root[inside]
        return np.asarray(known / np.linalg.norm(known, axis=0))

    @property
    def gap_error(self) -> float:
        if self.moves.single and self.states > DENSE_STATES:
            return _SINGLE
        return EXACT if self.states <= DENSE_STATES or self.moves.sparse is not None else _ROUGH

    @cached_property
    def _fluxes(self) -> Sparse | None:
        """pi_i P_ij of listed moves, without the laziness."""
        moves = self.moves.sparse
        if moves is None:
            return None
        result = moves.copy()
        result.data *= np.repeat(self._root**2, np.diff(moves.indptr))
        return type(result)((result + result.T) / 2)

    @cached_property
    def _likes(self) -> Sparse | None:
        """pi^1/2 P pi^-1/2 of listed moves, without the laziness."""
        graph = self.moves.sparse
        if graph is None:
            return None
        scaled = graph.copy()
        scaled.data *= np.repeat(self._root, np.diff(graph.indptr)) / self._root[graph.indices]
        return scaled

    def _alike(self, columns: Floats) -> Floats:
        """Return pi^1/2 P pi^-1/2 times columns (N, k), without the laziness."""
        if self._likes is not None:
            return np.asarray(self._likes @ columns)
        root = self._root[:, None]
        return np.asarray(root * self.moves.average(columns / root))

    def _polished_rate(self) -> float:
        """Return 1 - mu_2 by the slow modes, and inverse iteration until its digits are there."""
        y = self._lanczos(_BLOCK + 1, _START)[1][:, 1:]
        form = None if self._fluxes is None else form_of(self._fluxes, 1)
        best = math.inf
        while True:
            if form is None:
                rest = y - self._alike(y)
                rates, turned = np.linalg.eigh((y.T @ rest + rest.T @ y) / 2)
                y = y @ turned
            else:
                rates, y = slow_pairs(form, self._root, y, self._constants)
            doubt = _doubt(y - self._alike(y) - rates * y, rates) + (_EPS * _TERMS if form is None else 0.0)
            if doubt <= self.gap_error * rates[0]:
                return float(rates[0])
            further = self._potential(y) if doubt < 0.9 * best else None
            if further is None:
                break
            best, y = doubt, further
        raise NumericalError(
            f"affinity: the slowest rate of {self.states} states, {rates[0]:.3g}, was reached to {doubt:.1g} alone; "
            f"use at most {DENSE_STATES} states, or treat each metastable part as a chain of its own"
        )

    def _potential(self, y: Floats) -> Floats | None:
        """Return the span of (I - P)^-1 y up to constants, orthonormal; None where nothing solves for it."""
        form, root, known = self.law.symmetric_form, self._root[:, None], self._constants
        if form is None:
            return None
        functional = J(form)
        degree = np.asarray(to_numpy(functional.affinity.degree), np.float64).reshape(-1, 1)
        source = degree * (y - known @ (known.T @ y)) / root
        try:
            found = functional.potential(form.as_signal(source.reshape(*form.domain.shape, -1)), rtol=_START)
        except NumericalError:
            return None
        solved = root * np.asarray(to_numpy(found.u), np.float64).reshape(y.shape)
        return np.asarray(np.linalg.qr(solved - known @ (known.T @ solved))[0])

    def _fast_rate(self, enough: float) -> float:
        """Return 1 + mu_min of many states, by Lanczos iteration, or by elimination where that is slow."""

        def product(v: Floats) -> Floats:
            # P + 2, of eigenvalues from 1 on: errors are relative to them, and many of P may lie about 0.
            return np.asarray(self._alike(v[:, None])[:, 0] + 2 * v)

        rough = -1 + float(extreme(product, self.states, "SA", symmetric=True, tol=_LOOSE, maxiter=RESTARTS)[0])
        least = rough - 2 * _LOOSE
        if least > enough:
            return least
        try:
            few = _TRIES if self._fluxes is not None else RESTARTS
            tol = max(1e-12, self.gap_error * least / 30)  # of eigenvalues from 1 to 3
            rate = -1 + float(extreme(product, self.states, "SA", symmetric=True, tol=tol, maxiter=few)[0])
        except NumericalError as error:
            if self._fluxes is None:
                raise NumericalError(
                    f"affinity: the smallest eigenvalue of {self.states} states was not found by iteration; use at "
                    f"most {REDUCED_STATES} states, where the whole matrix is taken, or laziness=0.5"
                ) from error
            rate = 0.0
        if self._fluxes is None or rate > 1e-4:
            return max(rate, 0.0)
        return self._eliminated_rate()

    def _eliminated_rate(self) -> float:
        """Return 1 + mu_min by inverse iteration with the factors of I + P, and sums of squares."""
        from scipy.sparse import csc_array, diags_array
        from scipy.sparse.linalg import ArpackError, eigsh

        root, fluxes, likes = self._root, self._fluxes, self._likes
        assert fluxes is not None
        assert likes is not None
        matrix = csc_array(diags_array(np.ones(self.states)) + (likes + likes.T) / 2)
        start = np.random.default_rng(0).standard_normal(self.states)
        try:
            vectors = eigsh(matrix, k=_BLOCK, sigma=-_SHIFT, which="LM", v0=start, tol=0)[1]
        except (ArpackError, RuntimeError) as error:
            raise NumericalError(
                f"affinity: the smallest eigenvalue of {self.states} states was not found; use laziness=0.5"
            ) from error
        rates, y = slow_pairs(form_of(fluxes, -1), root, vectors, self._constants[:, :0])
        doubt = _doubt(matrix @ y - rates * y, rates)
        if not doubt <= EXACT * rates[0]:
            raise NumericalError(
                f"affinity: 1 + mu_min, {rates[0]:.3g}, was reached to {doubt:.1g} alone; use laziness=0.5"
            )
        return float(rates[0])

    # ---- modes

    def modes(self, count: int, rtol: float) -> Modes:
        """See `MarkovChain.modes`."""
        if not self.law.reversible:
            raise InputError(
                f"affinity: got a chain that is not reversible{self.law.misfit}, expected one with real modes; use "
                "eigenvalues(), or affinity.symmetrized()"
            )
        law, root = self.law.of_parts, self._root
        found = self._dense_modes() if self.states <= DENSE_STATES else self._lanczos(count, rtol)
        rates, y = found[0], found[1][:, :count]
        parted = len(rates) > count and bool(rates[count] - rates[count - 1] <= max(_EQUAL, rtol) * rates[count])
        values = np.asarray(1 - (1 - self.moves.laziness) * rates[:count])
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # what has no float is told below
            vectors = y / root[:, None]
            if self.states <= DENSE_STATES:
                self._fill_in(vectors, 1 - rates[:count], y)
            vectors /= np.sqrt(law @ vectors**2)
            if not np.isfinite(to_numpy(self.affinity.as_signal(vectors))).all():
                raise NumericalError(
                    f"modes: some of {count} lie on states of a stationary probability that underflows, and have no "
                    "floats there; ask for fewer, or scale the logits down"
                )
        largest = np.abs(vectors).argmax(axis=0)
        vectors *= np.sign(vectors[largest, np.arange(count)])
        left = self.moves.apply(vectors) - values * vectors
        residual = float(np.sqrt(law @ left**2).max())
        if not residual <= rtol:
            raise NumericalError(
                f"modes: residual {residual:.2g} above rtol={rtol:g}; raise rtol, ask for fewer, or use a wider kernel"
            )
        return Modes(values, vectors, residual, parted)

    def _fill_in(self, vectors: Floats, values: Floats, y: Floats) -> None:
        """Set modes v = y / pi^1/2 where pi and y are so small that rounding decides: there v = P v / mu."""
        law, small = self.law.of_parts, np.abs(y) < _LITTLE * np.abs(y).max(axis=0)
        low, lost = law < _LITTLE**2 * law.max(), law < _FLOOR * law.max()
        vectors[lost[:, None] & ~small] = np.nan
        if len(self.moves.closed) > 1:  # their constants are 0 on the others
            small[np.concatenate(self.moves.closed), : len(self.moves.closed)] = False
        for v, mu, there in zip(vectors.T, values, (small & low[:, None]).T, strict=True):
            moves = self.moves.dense[there]
            with contextlib.suppress(np.linalg.LinAlgError):  # mu is an eigenvalue of these states alone
                v[there] = np.linalg.solve(mu * np.eye(len(moves)) - moves[:, there], moves[:, ~there] @ v[~there])

    def schur(self, count: int, rtol: float, weights: Floats) -> Modes:
        """Return real Schur vectors of the eigenvalues of largest real part, orthonormal in the weights."""
        root = np.sqrt(weights)[:, None]

        def product(v: Floats) -> Floats:
            return np.asarray(root * self.moves.apply(v.reshape(self.states, -1) / root))

        dense = self.states <= DENSE_STATES
        if dense:
            self.moves.check_room("Schur vectors", _PAIR_BYTES * self.states**2)
        values, q = _schur(product(np.eye(self.states)), count) if dense else self._subspace(product, count, rtol)
        block = q.T @ product(q)
        vectors = q / root
        left = self.moves.apply(vectors) - vectors @ block
        residual = float(np.sqrt(weights @ left**2).max())
        if not residual <= rtol:
            raise NumericalError(
                f"modes: residual {residual:.2g} of Schur vectors above rtol={rtol:g}; raise rtol, or ask for fewer"
            )
        return Modes(values, vectors, residual)

    def _subspace(self, product: Callable[[Floats], Floats], count: int, rtol: float) -> tuple[NDArray[Any], Floats]:
        """Return the eigenvalues of largest real part, and an orthonormal basis of their eigenvectors."""
        from scipy.sparse.linalg import ArpackError, LinearOperator, eigs

        n, most = self.states, min(count + 2, self.states - 2)
        kept = min(n, max(4 * most, 40))
        self.moves.check_room(f"{count} Schur vectors", 8 * n * (kept + 8 * most))
        operator = LinearOperator((n, n), matvec=lambda v: product(v)[:, 0], dtype=np.float64)
        start = np.random.default_rng(0).standard_normal(n)
        try:
            values, vectors = eigs(operator, k=most, which="LR", v0=start, tol=rtol / 10, maxiter=RESTARTS, ncv=kept)
        except ArpackError as error:
            raise NumericalError(
                f"modes: Arnoldi iteration did not find {count} of a chain that is not reversible; raise rtol, or ask "
                "for fewer"
            ) from error
        order = np.argsort(-values.real, kind="stable")
        values, vectors = values[order], vectors[:, order]
        _check_pairs(values, count)
        # The vectors of a pair are conjugate, so that twice the columns span the same space: count of them remain.
        whole = np.column_stack([vectors[:, :count].real, vectors[:, :count].imag])
        return values[:count], np.asarray(np.linalg.svd(whole, full_matrices=False)[0][:, :count])

    def _dense_modes(self) -> tuple[Floats, Floats]:
        """Return all rates 1 - mu without the laziness, increasing, and their vectors."""
        self.moves.check_room("modes", _PAIR_BYTES * self.states**2)
        known = self._constants
        rates, vectors = all_rates(self.moves.dense, self._root, 1, known, self._balanced_roots)
        return np.concatenate([np.zeros(known.shape[1]), rates]), np.concatenate([known, vectors], axis=1)

    def _lanczos(self, count: int, rtol: float) -> tuple[Floats, Floats]:
        """Return the least rates without the laziness, at least `count`, and as many vectors."""
        from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

        known = self._constants  # they are moved to the other end of the spectrum
        size = known.shape[1]
        rest = count - size
        if rest <= 0:
            return np.zeros(size), known
        if self._likes is not None:
            found = self._multigrid(self._likes, rest, rtol)
            if found is not None:
                return np.concatenate([np.zeros(size), found[0]]), np.concatenate([known, found[1]], axis=1)

        def product(v: Floats) -> Floats:
            v = np.ravel(v)
            return np.asarray(self._alike(v[:, None])[:, 0] - known @ (2 * (known.T @ v)))

        kept = min(self.states, max(4 * rest + 1, 40))
        # ARPACK copies its vectors as it gives them back; beside them lie three copies of the moves.
        listed = 0 if self._likes is None else 36 * self._likes.nnz
        self.moves.check_room(f"{count} modes", 8 * self.states * (2 * kept + 4 * rest) + listed)
        operator = LinearOperator((self.states, self.states), matvec=product, dtype=np.float64)
        start = np.random.default_rng(0).standard_normal(self.states)
        try:
            values, vectors = eigsh(operator, k=rest, which="LA", v0=start, tol=rtol / 10, maxiter=RESTARTS, ncv=kept)
        except ArpackError as error:
            raise NumericalError(
                f"modes: Lanczos iteration did not find {count}; raise rtol, ask for fewer, or use a wider kernel"
            ) from error
        order = np.argsort(-values)
        return np.concatenate([np.zeros(size), 1 - values[order]]), np.concatenate([known, vectors[:, order]], axis=1)

    def _multigrid(self, likes: Sparse, count: int, rtol: float) -> tuple[Floats, Floats] | None:
        """Return the modes beside the known ones by LOBPCG with multigrid, or None.

        (Knyazev 2001, doi 10.1137/S1064827500366124.)
        """
        from scipy.sparse.linalg import LinearOperator, lobpcg

        p, n, root = self.law.symmetric_form, self.states, self._root
        if p is None or not has_multigrid(p) or n - self._constants.shape[1] < _APART * (count + _GUARD):
            return None
        if setup_bytes(p) + 8 * n * _VECTORS * (count + _GUARD) > (self.moves.limit or memory_limit()):
            return None
        measure = p.measure("degree", np.empty(0)).ravel()
        from nlflow.functionals.preconditioners.multigrid import Multigrid

        cycle = Multigrid(p, lambda v: v - p._average(v), measure, np.zeros(n))

        def precondition(v: Floats) -> Floats:
            columns = v.reshape(n, -1)
            return np.asarray(root[:, None] * cycle(columns / root[:, None])).reshape(v.shape)

        def moved(v: Floats) -> Floats:
            return np.asarray(v - likes @ v)

        options: dict[str, Any] = {"shape": (n, n), "dtype": np.float64}
        rest = LinearOperator(matvec=moved, matmat=moved, **options)
        inverse = LinearOperator(matvec=precondition, matmat=precondition, **options)
        start = np.random.default_rng(0).standard_normal((n, count + _GUARD))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of columns that converge later, which are looked at below
            values, vectors = lobpcg(
                rest, start, M=inverse, Y=self._constants, largest=False, tol=0.3 * rtol, maxiter=_STEPS
            )[:2]
        order = np.argsort(values)[: count + 1]  # one more rate, to be compared with
        values, vectors = np.asarray(values)[order], np.asarray(vectors)[:, order[:count]]
        left = np.linalg.norm(rest @ vectors - vectors * values[:count], axis=0)
        if not left.max() <= rtol:
            return None
        return values, np.asarray(vectors, np.float64)


def constant_first(vectors: Floats, constant: Floats) -> Floats:
    m = vectors.shape[1]
    turned: Floats = vectors @ np.linalg.qr(np.column_stack([constant, np.eye(m)[:, 1:]]))[0]
    return turned


def _check_pairs(values: NDArray[Any], count: int) -> None:
    """Refuse to part conjugate eigenvalues, which are sorted by their real parts."""
    if count < len(values) and abs(values[count - 1].imag) > 0 and values[count] == values[count - 1].conjugate():
        raise InputError(
            f"count: got {count}, which parts the complex eigenvalues {values[count - 1]:.6g} and its conjugate, "
            f"expected {count - 1} or {count + 1}"
        )


def _schur(matrix: Floats, count: int) -> tuple[NDArray[Any], Floats]:
    """Return the eigenvalues of largest real part of a matrix, and the first columns of its sorted Schur form."""
    from scipy.linalg import LinAlgError, schur

    values = np.linalg.eigvals(matrix)
    # Of each pair the upper one first.
    values = values[np.lexsort((-values.imag, -values.real))].astype(np.complex128)
    _check_pairs(values, count)
    last = float(values[count - 1].real)
    least = (last + float(values[count].real)) / 2 if count < len(values) else -np.inf
    try:
        q, found = schur(matrix, output="real", sort=lambda re, im: re > least)[1:]
    except LinAlgError as error:
        raise NumericalError(f"modes: the Schur form of {len(matrix)} states was not sorted ({error})") from error
    if found != count:
        raise InputError(
            f"count: got {count}, but {int(np.sum(values.real >= last - 1e-12))} eigenvalues have a real part of "
            f"{last:.6g} or more, expected a number that parts none that are equal"
        )
    return values[:count], np.asarray(q[:, :count])


def _doubt(left: Floats, rates: Floats) -> float:
    """Return a bound of the error of the smallest rate from residuals: their square over the distance of the next."""
    size = float(np.linalg.norm(left[:, 0]))
    apart = float(rates[1] - rates[0]) if len(rates) > 1 else 0.0
    return size * min(size / apart, 1.0) if apart > 0 else size
