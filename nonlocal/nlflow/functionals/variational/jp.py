"""The nonlocal p-Dirichlet energy J_p, a functional of edges or of nodes."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.affinities import Affinity, SparseAffinity
from nlflow.affinities.checks import check_affinity
from nlflow.domains import Domain
from nlflow.errors import InputError, NumericalError, all_digits, check_flag, check_number
from nlflow.functionals.misfits import KullbackLeibler, Misfit, Squares


def edge_loop(name: str, dtype: Any = np.float64) -> Any:
    from nlflow.backends.numba.edges import loop

    return loop(name, np.dtype(dtype).name)


class Graph:
    """Edges i -> j with weights W_ij = w_i w_j K_ij, each kept at both of its ends; `starts` as in CSR."""

    def __init__(self, affinity: Affinity, memory_limit: float | None = None) -> None:
        self.domain: Domain = affinity.domain
        self._sparse = affinity.edges(memory_limit)
        self.starts = self._sparse.indptr.astype(np.int64)
        self.ends = self._sparse.indices.astype(np.int32, copy=False)
        self.weights: NDArray[Any] = self._sparse.data

    def __len__(self) -> int:
        return len(self.ends)

    @cached_property
    def heads(self) -> NDArray[Any]:
        return np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))

    @cached_property
    def reverse(self) -> NDArray[np.int64]:
        return np.asarray(self._with(np.arange(len(self))).T.tocsr().data)

    @cached_property
    def degree(self) -> Floats:
        return np.asarray(self._sparse.sum(axis=1, dtype=np.float64)).ravel()

    def lengths(self, u: Floats) -> Floats:
        out = np.empty(len(self))
        edge_loop("edge_lengths")(self.starts, self.ends, u, out)
        return out

    def flux(self, weights: Floats, u: Floats) -> Floats:
        """Return sum_j weights_ij (u_i - u_j), (N, D)."""
        out = np.empty_like(u)
        edge_loop("edge_flux")(self.starts, self.ends, weights, u, out)
        return out

    def row_sums(self, values: Floats) -> Floats:
        return np.asarray(self._with(values).sum(axis=1)).ravel()

    def summation(self, dtype: Any = np.float64) -> Any:
        """Matrix of `row_sums`."""
        from scipy.sparse import csr_array

        edges = len(self)
        return csr_array((np.ones(edges, dtype), np.arange(edges), self.starts), shape=(len(self.starts) - 1, edges))

    def means(self, values: Floats, weights: Floats) -> Floats:
        from scipy.sparse.csgraph import connected_components

        count, part = connected_components(self._sparse, directed=False)
        weights = weights / weights.max()
        total = np.bincount(part, weights, minlength=count)
        sums = np.stack([np.bincount(part, weights * v, minlength=count) for v in values.T], axis=1)
        return np.asarray((sums / np.where(total > 0, total, 1.0)[:, None])[part])

    def over_edges(self, values: Floats) -> Floats:
        return np.asarray((np.repeat(values, np.diff(self.starts)) + values[self.ends]) / 2)

    def affinity(self, weights: Floats) -> SparseAffinity:
        """Return the affinity k with w_i w_j (k_ij + k_ji) = weights_ij."""
        return SparseAffinity(self.domain, self._with(weights / 2))

    def _with(self, values: NDArray[Any]) -> Any:
        return type(self._sparse)((values, self._sparse.indices, self._sparse.indptr), shape=self._sparse.shape)


MOST = 10.0
"""The largest p."""


@underflowing
class Jp:
    """Nonlocal p-Dirichlet energy, J_p(u) = 1/(2p) sum_ij w_i w_j K_ij |u_i - u_j|^p with K = k + k^T, 1 <= p <= 10.

    With ``isotropic=True`` it is 1/(2p) sum_i w_i |grad u|_i^p of the nonlocal gradient
    |grad u|_i^2 = sum_j w_j K_ij |u_i - u_j|^2 (Gilboa and Osher 2008, doi 10.1137/070698592; Elmoataz, Lezoray and
    Bougleux 2008, doi 10.1109/TIP.2008.924284). Norms are Euclidean over channels.

    Parameters
    ----------
    affinity : Affinity
        Of k; see `Affinity.edges` for those that have edges.
    p : float
        J_1 is nonlocal total variation, J_2 is `J`.
    isotropic : bool
    memory_limit : float, optional
        Bytes for the list of edges.

    Raises
    ------
    InputError
        For p outside of [1, 10], and for an affinity whose edges are not listed.
    MemoryLimitError
        If the edges would pass the limit.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Gaussian, J, Jp, Points, affinity
    >>> k, u = affinity(Gaussian(width=1.0), Points([0.0, 1.0], weights=[1.0, 1.0])), np.array([0.0, 2.0])
    >>> round(Jp(k, p=2).value(u) / J(k).value(u), 12), round(Jp(k, p=1).value(u), 6)
    (1.0, 2.426123)
    """

    def __init__(
        self, affinity: Affinity, p: float, *, isotropic: bool = False, memory_limit: float | None = None
    ) -> None:
        self.affinity = check_affinity(affinity)
        self.p = check_number("p", p, minimum=1, hint="1 is total variation, 2 the quadratic J")
        if self.p > MOST:
            raise InputError(
                f"p: got {self.p:g}, expected 1 <= p <= {MOST:g}; 1 is total variation, 2 the quadratic J, and beyond "
                "the powers of differences leave the range of floats"
            )
        self.isotropic = check_flag("isotropic", isotropic)
        self.graph = Graph(affinity, memory_limit)

    # ---- cells

    def flat(self, u: NDArray[Any]) -> Floats:
        """Return a signal as (N, D) in float64."""
        return np.ascontiguousarray(u.reshape(self.affinity.domain.size, -1), dtype=np.float64)

    @property
    def measure(self) -> Floats:
        """The measure m: W of edges, or w of nodes if isotropic."""
        if self.isotropic:
            return self.affinity.domain.weights.ravel()
        return np.asarray(self.graph.weights, dtype=np.float64)

    def slopes(self, u: Floats) -> Floats:
        """Return the slopes x of a signal (N, D): |u_i - u_j| of edges, or |grad u|_i of nodes if isotropic."""
        lengths = self.graph.lengths(u)
        if not self.isotropic:
            return lengths
        return np.asarray(np.sqrt(self.graph.row_sums(self.graph.weights * lengths * lengths) / self.measure))

    def on_edges(self, factors: Floats) -> Floats:
        """Return the weights of the edges times their factors, or the mean of those of both nodes."""
        return np.asarray(self.graph.weights * (self.graph.over_edges(factors) if self.isotropic else factors))

    @property
    def steepness(self) -> float:
        """About the slope of differences of 1: 1 on edges; if isotropic it depends on the unit of length."""
        if not self.isotropic or not len(self.graph):
            return 1.0
        return math.sqrt(float(self.graph.degree.sum()) / float(self.measure.sum()))

    def smooth(self, slopes: Floats, smoothing: float) -> Floats:
        """Return (x^2 + s^2)^(1/2), where s is the slope of differences of `smoothing`."""
        return np.asarray(np.hypot(slopes, smoothing * self.steepness))

    def smoothed(self, slopes: Floats, smoothing: float) -> float:
        """Return 1/(2p) sum m (x^2 + s^2)^(p/2); see `smooth`."""
        powers = self.smooth(slopes, smoothing) ** self.p
        return float(np.sum(self.measure * powers)) / (2 * self.p)

    def rounding(self, rigid: Floats, dtype: Any) -> float:
        """Bound of the rounding of E_p."""
        eps = float(np.finfo(dtype).eps)
        steepest = np.sqrt(self.graph.degree / self.measure) if self.isotropic else np.ones(len(self.graph))
        return self.smoothed(eps * steepest, 0.0) + eps * eps * float(rigid.sum()) / 2

    def plain(self, f: Floats, rigid: Floats, misfit: Misfit, dtype: Any) -> tuple[Floats, float] | None:
        """Return f or its means on the parts of the graph, and the value, if that is nothing beside rounding."""
        floor, known = self.rounding(rigid, dtype), rigid[:, None] > 0
        for u in (f, self.graph.means(f, rigid)):
            with np.errstate(over="ignore"):
                terms = np.where(known, rigid[:, None] * misfit.value(u, f), 0.0)
                value = self.smoothed(self.slopes(u), 0.0) + float(np.sum(terms))
            if value <= (floor if u is f or isinstance(misfit, Squares | KullbackLeibler) else 0.0):  # the mean is best
                return u, value
        return None

    def lagged(self, slopes: Floats, smoothing: float) -> Floats:
        """Return the factors (x^2 + s^2)^((p - 2)/2); see `smooth`."""
        return np.asarray(self.smooth(slopes, smoothing) ** (self.p - 2))

    # ---- what users call

    def value(self, u: Any) -> float:
        """Return J_p(u).

        Parameters
        ----------
        u : array of shape ``domain.shape`` or ``domain.shape + (D,)``

        Raises
        ------
        InputError
            For a wrong shape or dtype, NaN or infinity.
        NumericalError
            When the value overflows.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            value = self.smoothed(self.slopes(self.flat(self.affinity.check_signal("u", u))), 0.0)
        if not math.isfinite(value):
            raise NumericalError("value: the powers of the differences overflow; scale the signal down")
        return value

    def gradient(self, u: Any) -> NDArray[Any]:
        """Return the gradient in the inner product sum_i w_i a_i . b_i, the nonlocal p-Laplacian of u, for p > 1.

        (grad J_p)_i = sum_j w_j K_ij |u_i - u_j|^(p - 2) (u_i - u_j), or with (|grad u|_i^(p - 2) + |grad u|_j^(p - 2))
        / 2 in place of the power.

        Raises
        ------
        InputError
            For p = 1, where J_p has no gradient at equal neighbours.
        """
        if self.p == 1:
            raise InputError(
                "p: got 1, for which J_p has no gradient where neighbours are equal; use Ep(...).minimizer(), the "
                "LaggedDiffusivity steps of a PFlow, or p slightly above 1"
            )
        signal = self.affinity.check_signal("u", u)
        flat = self.flat(signal)
        slopes = self.slopes(flat)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            factors = np.where(slopes > 0, slopes ** (self.p - 2), 0.0)
        flux = self.graph.flux(self.on_edges(factors), flat)
        gradient = flux / self.affinity.domain.weights.ravel()[:, None]
        if not np.isfinite(gradient).all():
            raise NumericalError("gradient: the powers of the differences overflow; scale the signal down")
        return gradient.reshape(signal.shape).astype(signal.dtype, copy=False)

    @property
    def observed(self) -> NDArray[Any] | None:
        """None for J_p."""
        return None

    @property
    def fidelity(self) -> NDArray[Any] | float:
        """0 for J_p."""
        return 0.0

    def __repr__(self) -> str:
        cells = "isotropic" if self.isotropic else "anisotropic"
        return f"{type(self).__name__}(p={all_digits(self.p)}, {cells}, {self.affinity!r})"
