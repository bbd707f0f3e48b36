"""Harmonic functions, Poisson learning and p-Laplace learning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, constant_like, is_numpy, to_numpy
from nlflow.errors import InputError
from nlflow.functionals.constraint import Constraint
from nlflow.functionals.energies import E, J
from nlflow.functionals.minimizer import Minimizer
from nlflow.functionals.variational import Jp, harmonic_extension
from nlflow.learning.balance import shifts
from nlflow.learning.base import GraphClassifier, GraphEstimator, GraphRegressor, ProbabilisticClassifier, by_chunks

_SMALL = -30.0  # logarithm of a degree


class _Held(GraphEstimator):
    """Signals that are, or are drawn to, their values at labelled nodes."""

    fidelity: float | None
    tol: float | None
    max_iter: int

    @property
    def _better(self) -> str:
        return super()._better if self.fidelity is None else "a larger fidelity"

    def _learn(self, values: Array, labelled: NDArray[np.bool_]) -> Array:
        graph, fixed = self.graph_, labelled | ~self.reached_
        if self.fidelity is None:
            self.functional_ = J(graph.affinity)
            if fixed.all():
                return self._took(Minimizer(values, 0.0, 0, True, "all samples have a label"))
            constraint = Constraint(fixed, to_numpy(values)[fixed])
            return self._took(
                self.functional_.minimizer(
                    constraint=constraint, rtol=self.tol, maxiter=self.max_iter, preconditioner="graph"
                )
            )
        strength = float(self.fidelity)
        # Without the loops: lambda~ d, d being the sum of the edges to others.
        phi = np.where(fixed, strength * np.where(graph.own < 1, 1 - graph.own, 1.0), 0.0)
        self.functional_ = E(graph.affinity, values, graph.as_signal(phi), measure="degree")
        return self._took(
            self.functional_.minimizer(rtol=self.tol, maxiter=self.max_iter, start=self._start, preconditioner="graph")
        )


class HarmonicClassifier(_Held, ProbabilisticClassifier):
    """Harmonic functions: J is minimized with u = y at labelled nodes, so that Pu = u at the others.

    (Zhu, Ghahramani and Lafferty 2003, semi-supervised learning using Gaussian fields and harmonic functions.) The
    score of a class is the probability that a walker from the node meets a label of this class first.

    Parameters
    ----------
    fidelity : float or None
        lambda~ at labelled nodes, with which E is minimized; None holds the labels.
    affinity, gamma, n_neighbors, metric, search, keep, class_prior, balance, accuracy, tol, max_iter, missing, verbose,
    memory_limit
        See `LabelSpreading`, as for the attributes.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.learning import HarmonicClassifier
    >>> path = np.diag(np.ones(4), 1) + np.diag(np.ones(4), -1)
    >>> model = HarmonicClassifier("precomputed").fit(path, [0, -1, -1, -1, 1])
    >>> model.label_distributions_[:, 1].round(12).tolist()
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """

    def __init__(
        self, affinity: Any = "knn", *, gamma: float | None = None, n_neighbors: int | None = None,
        metric: str = "euclidean", search: str = "auto", keep: str = "either", fidelity: float | None = None,
        class_prior: Any = None, balance: str = "count", accuracy: float | None = 1e-6, tol: float | None = None,
        max_iter: int = 10_000, missing: Any = -1, verbose: bool | int = False,
        memory_limit: float | None = None,
    ) -> None:  # fmt: skip
        self.affinity = affinity
        self.gamma = gamma
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.search = search
        self.keep = keep
        self.fidelity = fidelity
        self.class_prior = class_prior
        self.balance = balance
        self.accuracy = accuracy
        self.tol = tol
        self.max_iter = max_iter
        self.missing = missing
        self.verbose = verbose
        self.memory_limit = memory_limit


class HarmonicRegressor(_Held, GraphRegressor):
    """Harmonic functions of values: J is minimized with u = y where y is known.

    Parameters
    ----------
    fidelity : float or None
        lambda~ where y is known, with which E is minimized; None holds the values.
    affinity, gamma, n_neighbors, metric, search, keep, accuracy, tol, max_iter, verbose, memory_limit
        See `LabelSpreading`.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.learning import HarmonicRegressor
    >>> path = np.diag(np.ones(4), 1) + np.diag(np.ones(4), -1)
    >>> known = [1.0, np.nan, np.nan, np.nan, 5.0]
    >>> HarmonicRegressor("precomputed").fit(path, known).transduction_.round(12).tolist()
    [1.0, 2.0, 3.0, 4.0, 5.0]
    """

    def __init__(
        self, affinity: Any = "knn", *, gamma: float | None = None, n_neighbors: int | None = None,
        metric: str = "euclidean", search: str = "auto", keep: str = "either", fidelity: float | None = None,
        accuracy: float | None = 1e-6, tol: float | None = None, max_iter: int = 10_000,
        verbose: bool | int = False,
        memory_limit: float | None = None,
    ) -> None:  # fmt: skip
        self.affinity = affinity
        self.gamma = gamma
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.search = search
        self.keep = keep
        self.fidelity = fidelity
        self.accuracy = accuracy
        self.tol = tol
        self.max_iter = max_iter
        self.verbose = verbose
        self.memory_limit = memory_limit


class PoissonClassifier(GraphClassifier):
    """Poisson learning: L u = sum over labelled nodes j of (y_j - mean y) delta_j, for a few labels in each class.

    (Calder, Cook, Thorpe and Slepcev 2020, arXiv 2006.11184.) The mean is that of each component.

    Parameters
    ----------
    affinity, gamma, n_neighbors, metric, search, keep, class_prior, balance, accuracy, tol, max_iter, missing, verbose,
    memory_limit
        See `LabelSpreading`, as for the attributes. ``class_prior`` sets ``class_shifts_``; ``balance`` is 'count'.

    Attributes
    ----------
    functional_ : J
        Of W, so that L = D - W; in other units where degrees are below 1e-13.
    source_ : array of shape (N, C)
        y_j - mean y at labelled nodes.
    label_distributions_ : array of shape (N, C)
        Scores, which are no probabilities: they sum to 0.
    spread_ : float
        Root mean square of the scores of reached samples, before ``class_shifts_``.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.learning import PoissonClassifier
    >>> X = np.array([[0.0], [0.1], [0.2], [1.0], [1.1]])
    >>> PoissonClassifier().fit(X, [0, -1, -1, 1, -1]).transduction_.tolist()
    [0, 0, 0, 1, 1]
    """

    def __init__(
        self, affinity: Any = "knn", *, gamma: float | None = None, n_neighbors: int | None = None,
        metric: str = "euclidean", search: str = "auto", keep: str = "either", class_prior: Any = None,
        balance: str = "count", accuracy: float | None = 1e-6, tol: float | None = None, max_iter: int = 10_000,
        missing: Any = -1, verbose: bool | int = False,
        memory_limit: float | None = None,
    ) -> None:  # fmt: skip
        self.affinity = affinity
        self.gamma = gamma
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.search = search
        self.keep = keep
        self.class_prior = class_prior
        self.balance = balance
        self.accuracy = accuracy
        self.tol = tol
        self.max_iter = max_iter
        self.missing = missing
        self.verbose = verbose
        self.memory_limit = memory_limit

    def _learn(self, one_hot: Array, labelled: NDArray[np.bool_]) -> Array:
        found = self._potential(one_hot, labelled)
        self.spread_ = _size(np.asarray(to_numpy(found), np.float64)[self.reached_])
        return found

    def _potential(self, one_hot: Array, labelled: NDArray[np.bool_]) -> Array:
        graph, y = self.graph_, np.asarray(to_numpy(one_hot), np.float64)
        source, parts = np.zeros_like(y), graph.parts(weakest=self._weakest)
        for part in np.unique(parts[labelled]):
            inside = labelled & (parts == part)
            source[inside] = y[inside] - y[inside].mean(axis=0)
        weights = np.asarray(to_numpy(graph.affinity.domain.weights), np.float64).reshape(-1, 1)
        # Half of W, of which J takes both directions. Where degrees are so small that scores would overflow, over that
        # of a labelled node, on which no class depends.
        least = float(np.asarray(to_numpy(graph.affinity._log_degree_wide()), np.float64).ravel()[labelled].min())
        unit = math.exp(-max(least, -600.0)) if least < _SMALL else 1.0
        self.functional_, self.source_ = J(graph.affinity.scaled(unit / 2)), graph.as_signal(source / weights)
        alone = np.zeros_like(y)  # scores, which sum to 0, where labels of one class are no source
        for inside, value in one_kind(y, labelled, parts):
            alone[inside] = value - 1 / y.shape[1]
        if not source.any():
            return self._took(Minimizer(graph.as_signal(alone), 0.0, 0, True, "one class in each component"))
        u = self._took(
            self.functional_.potential(self.source_, rtol=self.tol, maxiter=self.max_iter, preconditioner="graph")
        )
        # With mean 0 in the degrees without loops, on each component: the classes are compared with each other.
        mass = to_numpy(graph.affinity.measure("degree", u)).ravel() * (1 - graph.own)
        inside = (parts == np.arange(int(parts.max()) + 1)[:, None]) * mass
        total = inside.sum(axis=1, keepdims=True)
        means = inside @ np.asarray(to_numpy(u), np.float64) / np.where(total > 0, total, 1)
        centred = np.asarray(to_numpy(u), np.float64) - means[parts]
        return u - constant_like(means[parts] - alone * _size(centred[self.reached_]), u)

    def _prior(self, counts: NDArray[np.intp]) -> Floats | None:
        if self.class_prior is not None and self.balance != "count":
            raise InputError(
                f"balance: got {self.balance!r}, expected 'count': scores of Poisson learning sum to 0 and have no mass"
            )
        return super()._prior(counts)

    def _weigh(self, scores: Floats, prior: Floats, wanted: NDArray[np.intp]) -> None:
        self.class_shifts_ = shifts(scores, wanted)

    def _finish(self, scores: NDArray[Any], known: NDArray[np.bool_]) -> NDArray[Any]:
        return self._as_signal(np.where(known[:, None], scores, np.nan))

    @by_chunks
    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return ``exp(score / spread_)`` of the classes at points over their sum, (M, C); they are not calibrated."""
        scores = np.asarray(self._scores(X), np.float64) / self.spread_
        raised = np.exp(scores - scores.max(axis=1, keepdims=True))
        return self._as_signal(raised / raised.sum(axis=1, keepdims=True))

    @by_chunks
    def decision_function(self, X: Any) -> NDArray[Any]:
        """Return the scores of the classes at points, (M, C); of two classes the second less the first, (M,)."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores


def _size(scores: Floats) -> float:
    """Return the root mean square, or 1 for zeros; squares of large numbers would overflow."""
    top = float(np.abs(scores).max()) or 1.0
    return top * (float(np.sqrt(((scores / top) ** 2).mean())) or 1.0)


def one_kind(
    values: NDArray[Any], labelled: NDArray[np.bool_], parts: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.bool_], NDArray[Any]]]:
    for part in np.unique(parts[labelled]):
        inside = parts == part
        there = values[labelled & inside]
        if (there == there[0]).all():
            yield inside, there[0]


class _PHarmonic(GraphEstimator):
    p: float
    tol: float
    max_iter: int

    def _learn(self, values: Array, labelled: NDArray[np.bool_]) -> Array:
        if not is_numpy(values):
            raise InputError("X: got torch tensors, expected NumPy points for J_p, whose edges are listed")
        if self.graph_.affinity.method not in ("dense", "sparse"):
            raise InputError(
                f"affinity: got method {self.method_!r} of {self.graph_.size} points, expected a graph whose edges are "
                "listed; use affinity='knn'"
            )
        self.functional_ = Jp(self.graph_.affinity, self.p, memory_limit=self.memory_limit)
        fixed, held = labelled | ~self.reached_, np.array(values)
        for inside, value in one_kind(values, labelled, self.graph_.parts(weakest=self._weakest)):
            held[inside], fixed = value, fixed | inside
        if fixed.all():
            return self._took(Minimizer(held, 0.0, 0, True, "all samples have a label, or see labels of one kind"))
        constraint = Constraint(fixed, held[fixed])
        return self._took(harmonic_extension(self.functional_, constraint, rtol=self.tol, maxiter=self.max_iter))


class PLaplacianClassifier(_PHarmonic, ProbabilisticClassifier):
    """p-Laplace learning: J_p is minimized with u = y at labelled nodes, |u_i - u_j| being Euclidean over the classes.

    The p-Laplacian is the variational one (Flores, Calder and Lerman 2022, doi 10.1016/j.acha.2022.01.004). In the
    limit of many points p above the dimension of the data avoids spikes at labels (El Alaoui et al. 2016,
    arXiv 1603.00564).

    Parameters
    ----------
    p : float
        1 < p <= 10. Below 1.4 rounding may keep `tol` out of reach, of which a ``ConvergenceWarning`` tells.
    tol : float
        See `nlflow.functionals.variational.harmonic_extension`.
    max_iter : int
        Linear problems.
    affinity, gamma, n_neighbors, metric, search, keep, class_prior, balance, accuracy, missing, verbose, memory_limit
        See `LabelSpreading`, as for the attributes.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.learning import PLaplacianClassifier
    >>> X = np.array([[0.0], [0.1], [0.2], [1.0], [1.1]])
    >>> PLaplacianClassifier(p=3).fit(X, [0, -1, -1, 1, -1]).transduction_.tolist()
    [0, 0, 0, 1, 1]
    """

    def __init__(
        self, affinity: Any = "knn", *, gamma: float | None = None, n_neighbors: int | None = None,
        metric: str = "euclidean", search: str = "auto", keep: str = "either", p: float = 4.0,
        class_prior: Any = None, balance: str = "count", accuracy: float | None = 1e-6, tol: float = 1e-3,
        max_iter: int = 200, missing: Any = -1, verbose: bool | int = False,
        memory_limit: float | None = None,
    ) -> None:  # fmt: skip
        self.affinity = affinity
        self.gamma = gamma
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.search = search
        self.keep = keep
        self.p = p
        self.class_prior = class_prior
        self.balance = balance
        self.accuracy = accuracy
        self.tol = tol
        self.max_iter = max_iter
        self.missing = missing
        self.verbose = verbose
        self.memory_limit = memory_limit


class PLaplacianRegressor(_PHarmonic, GraphRegressor):
    """p-harmonic functions of values.

    Parameters
    ----------
    p, tol, max_iter
        See `PLaplacianClassifier`.
    affinity, gamma, n_neighbors, metric, search, keep, accuracy, verbose, memory_limit
        See `LabelSpreading`.
    """

    def __init__(
        self, affinity: Any = "knn", *, gamma: float | None = None, n_neighbors: int | None = None,
        metric: str = "euclidean", search: str = "auto", keep: str = "either", p: float = 4.0,
        accuracy: float | None = 1e-6, tol: float = 1e-3, max_iter: int = 200, verbose: bool | int = False,
        memory_limit: float | None = None,
    ) -> None:  # fmt: skip
        self.affinity = affinity
        self.gamma = gamma
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.search = search
        self.keep = keep
        self.p = p
        self.accuracy = accuracy
        self.tol = tol
        self.max_iter = max_iter
        self.verbose = verbose
        self.memory_limit = memory_limit
