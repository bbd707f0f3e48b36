"""What estimators share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, to_numpy
from nlflow.backends.threads import one_loop_thread
from nlflow.errors import (
    InputError,
    NlflowWarning,
    NumericalError,
    checked_call,
    listed,
    not_installed,
    shortened,
    warn_caller,
)
from nlflow.functionals.minimizer import Minimizer
from nlflow.learning.balance import counts_of, factors, quotas
from nlflow.learning.graphs import AtOthers, PointGraph, Recipe
from nlflow.learning.inputs import (
    AT_OTHERS,
    check_graph,
    check_parameters,
    check_signals,
    checked_points,
    classes_of,
    is_chunked,
    is_none,
    is_pairwise,
    loaded,
    values_of,
)

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, TransformerMixin
    from sklearn.utils.validation import check_is_fitted
except ImportError as error:
    raise not_installed("nlflow.learning", "scikit-learn", "learning") from error

__all__ = [
    "GivenPoints",
    "GraphClassifier",
    "GraphEstimator",
    "GraphRegressor",
    "PointEstimator",
    "ProbabilisticClassifier",
    "TransformerMixin",
    "by_chunks",
    "check_is_fitted",
]

_OF_GRAPHS = ("affinity", "gamma", "n_neighbors", "metric", "search", "keep", "accuracy", "memory_limit", "beta")
_CALLED = ("maxiter", "max_iter"), ("rtol", "tol"), ("equilibrium(flow, method='direct'), ", "")
"""Words of solvers, and what they are called here."""
_OF_SOLVERS = ("constraint:", "degree:")  # begin messages about weights, of whose words users know nothing here


def by_chunks(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method of points (M, d) take a Dask array, a chunk of rows at a time."""

    @wraps(method)
    def called(self: Any, X: Any) -> Any:
        if not is_chunked(X):
            return method(self, X)
        check_is_fitted(self)
        if X.ndim != 2 or X.shape[1] != self.n_features_in_:
            raise InputError(f"X: got a Dask array of shape {X.shape}, expected (samples, {self.n_features_in_})")
        like = method(self, self.X_[:1])

        def part(points: Any) -> Any:
            with one_loop_thread():  # Dask has threads of its own
                return method(self, points)

        rows = X.rechunk({1: -1})
        columns = [(size,) for size in like.shape[1:]]
        return rows.map_blocks(
            part, dtype=like.dtype, chunks=(rows.chunks[0], *columns), drop_axis=None if columns else 1, meta=like[:0]
        )

    return called


class PointEstimator(BaseEstimator):
    """What is learnt of points, with averages over them at other points."""

    affinity: Any  # parameters, which each subclass has in its own __init__
    n_neighbors: int | None
    memory_limit: float | None
    graph_: PointGraph

    def __init_subclass__(cls, **words: Any) -> None:
        super().__init_subclass__(**words)
        if "__init__" in vars(cls):
            checked_call(cls)

    @property
    def _weakest(self) -> float:
        """The least P_ij of all pairs by which labels reach a node: below, iterations do not see it for rounding."""
        precision = np.float32 if str(self.graph_.affinity.dtype).endswith("float32") else np.float64
        return 4 * self.graph_.size * float(np.finfo(precision).eps)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.pairwise = is_pairwise(self)
        return tags

    def _recipe(self, **more: Any) -> Recipe:
        """Return how the graph is made, by the parameters that this estimator has of it."""
        there = self.get_params(deep=False)
        return Recipe(**{name: there[name] for name in _OF_GRAPHS if name in there}, **more)

    def _check_room(self, X: Any, columns: int, found: str = "labels", usual: int = 10) -> None:
        """Raise `MemoryLimitError` before a graph that passes the limit, with its signals, is made."""
        edges = X.nnz if hasattr(X, "nnz") else 0
        if isinstance(self.affinity, str) and self.affinity == "knn":
            edges = X.shape[0] * min(usual if self.n_neighbors is None else int(self.n_neighbors), X.shape[0])
        check_graph(X.shape[0], edges, columns, self.memory_limit, found)

    def _say(self, text: str, start: float, name: str = "") -> None:
        if getattr(self, "verbose", False):
            spent = time.perf_counter() - start
            print(f"{name or type(self).__name__}: {text} ({spent:.2g} s)", file=sys.stderr, flush=True)

    def _points(self, X: Any, *, reset: bool) -> Any:
        if reset:
            check_parameters(self.get_params(deep=False))
        return checked_points(self, loaded(X), reset=reset)

    def _at(self, X: Any, values: Array, known: NDArray[np.bool_]) -> AtOthers:
        """Return averages over the known training points at others."""
        points = self._points(X, reset=False)
        check_signals(points.shape[0], values.shape[1], self.memory_limit, AT_OTHERS)
        found = self.graph_.average_at(points, values, known)
        if found.far.any():
            warn_caller(
                f"X: {int(found.far.sum())} points (the first is {int(np.argmax(found.far))}) are so far from all "
                "training points that their weights are 0 in floats; they get what the nearest has, which says little "
                "about them",
            )
        return found


class GivenPoints(PointEstimator):
    """Parameters, checked."""

    def __init__(
        self, affinity: Any = "rbf", gamma: Any = None, n_neighbors: Any = None, metric: Any = "euclidean",
        search: Any = "auto", keep: Any = "either", accuracy: Any = None, tol: Any = None, verbose: Any = False,
        memory_limit: Any = None,
    ) -> None:  # fmt: skip
        self.affinity = affinity
        self.gamma = gamma
        self.n_neighbors = n_neighbors
        self.metric = metric
        self.search = search
        self.keep = keep
        self.accuracy = accuracy
        self.tol = tol
        self.verbose = verbose
        self.memory_limit = memory_limit


class GraphEstimator(PointEstimator):
    """A signal on the graph of the training points, and its averages at others."""

    _values: Array
    _start: Array | None = None  # what iterations begin with
    _solved: bool
    minimizer_: Array
    reached_: NDArray[np.bool_]

    def _build(self, X: Any) -> PointGraph:
        start = time.perf_counter()
        self.graph_ = PointGraph(self._recipe(), X)
        p = self.graph_.affinity
        self.affinity_, self.method_, self.reason_, self.error_estimate_ = p, p.method, p.reason, p.error_estimate
        self._say(f"{self.graph_.size} samples, {p.method}: {p.reason}", start)
        return self.graph_

    def _solve(self, values: Array, labelled: NDArray[np.bool_]) -> Array:
        """Return the signal of these labels. What they do not reach is told in one message, an error or a warning."""
        self.reached_, lost = self._reached(labelled)
        start = time.perf_counter()
        try:
            found = self._learn(values, labelled)
        except (InputError, NumericalError) as error:
            if not str(error).startswith(_OF_SOLVERS):
                raise
            raise InputError(
                "affinity: got weights between samples that are too small to carry labels in floats, expected larger "
                f"ones; {self.graph_.remedy()}"
            ) from error
        self._say(self.message_, start)
        from sklearn.exceptions import ConvergenceWarning

        kind = NlflowWarning if self._solved else ConvergenceWarning
        unsolved = [] if self._solved else [f"{type(self).__name__}: {self.message_}"]
        if lost or unsolved:
            warn_caller("; ".join(lost + unsolved), kind)
        return found

    def _learn(self, values: Array, labelled: NDArray[np.bool_]) -> Array:
        """Return the signal of values (N, D) at labelled nodes, (N, D), 0 at nodes that no label reaches."""
        raise NotImplementedError

    @property
    def _better(self) -> str:
        """What makes a signal easier to find."""
        return "larger weights between samples"

    def _took(self, found: Minimizer) -> Array:
        self.n_iter_, self.residual_, self._solved = max(found.iterations, 1), found.residual, found.success
        self.message_ = found.message
        for word, here in (*_CALLED, ("a larger fidelity", self._better)):
            self.message_ = self.message_.replace(word, here)
        self.minimizer_ = found.u
        return found.u

    def _reached(self, labelled: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], list[str]]:
        """Return which nodes share a component with a label, and words about the others if there are any."""
        parts = self.graph_.parts(weakest=self._weakest)
        alive = np.zeros(int(parts.max()) + 1, bool)
        alive[parts[labelled]] = True
        reached = alive[parts]
        if reached.all():
            return reached, []
        sizes = np.sort(np.bincount(parts[~reached], minlength=len(alive))[~alive])[::-1]
        sizes = sizes[sizes > 0]
        return reached, [
            f"y: {int((~reached).sum())} samples (the first is {int(np.argmin(reached))}) lie in {len(sizes)} "
            f"components of the graph without a label (sizes {listed(sizes)}); they get no class or value. Label "
            f"one of each; or {self.graph_.remedy()}"
        ]


class GraphClassifier(ClassifierMixin, GraphEstimator):
    """A classifier by one signal for each class."""

    class_prior: Any
    balance: str
    missing: Any

    def fit(self, X: Any, y: Any) -> Any:
        """Fit the classifier.

        Parameters
        ----------
        X : array or tensor of shape (N, d)
            Points; Dask arrays are loaded. With ``affinity='precomputed'`` weights (N, N), symmetric up to rounding;
            with ``metric='precomputed'`` distances (N, N), sparse where only those to near points are known.
        y : array of shape (N,)
            Labels, of dtype object for strings of which some are missing; -1 where there is none (but -1 and 1 alone
            are two classes). With ``missing=None`` None, NaN and NA mark these, and -1 is a class. The strings '',
            '-1', 'nan' and '<NA>' are refused.

        Returns
        -------
        self
        """
        X = self._points(X, reset=True)
        self.classes_, labels, labelled = classes_of(y, X.shape[0], self.missing)
        prior = self._prior(np.bincount(labels))
        self._check_room(X, len(self.classes_))
        self.X_, graph = X, self._build(X)
        one_hot = np.zeros((graph.size, len(self.classes_)))
        one_hot[np.flatnonzero(labelled), labels] = 1
        self.labelled_ = labelled
        self._values = self._solve(graph.as_signal(one_hot), labelled)
        self.class_factors_, self.class_shifts_ = np.ones(len(self.classes_)), np.zeros(len(self.classes_))
        if prior is not None:
            self._balance(prior)
        scores = self._weighed(self._values)
        self.label_distributions_ = self._finish(scores, self.reached_)
        self.transduction_ = self._decide(self.label_distributions_)
        return self

    def _finish(self, scores: NDArray[Any], known: NDArray[np.bool_]) -> NDArray[Any]:
        scores = np.maximum(scores, 0)
        total = scores.sum(axis=1, keepdims=True)
        known = known & (total[:, 0] > 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = np.where(known[:, None], scores / np.where(total > 0, total, 1), np.nan)
        return self._as_signal(shares)

    def _as_signal(self, scores: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(scores, to_numpy(self._values[:0]).dtype)

    def _decide(self, scores: NDArray[Any]) -> NDArray[Any]:
        known = ~np.isnan(scores[:, 0])
        chosen = np.asarray(self.classes_[np.where(known[:, None], scores, 0).argmax(axis=1)])
        if known.all():
            return chosen
        if chosen.dtype.kind not in ("f" if is_none(self.missing) else "if"):
            chosen = chosen.astype(object)
        chosen[~known] = np.nan if is_none(self.missing) and chosen.dtype.kind == "f" else self.missing
        return np.asarray(chosen)

    # ---- priors

    def _prior(self, counts: NDArray[np.intp]) -> Floats | None:
        if self.class_prior is None:
            if self.balance != "count":
                raise InputError(f"balance: got {self.balance!r} without class_prior, in which it has no part")
            return None
        given = counts if isinstance(self.class_prior, str) else self.class_prior
        prior = np.asarray(given, np.float64)
        if len(prior) != len(self.classes_):
            raise InputError(
                f"class_prior: got {shortened(repr(self.class_prior), 60)}, expected {len(self.classes_)} numbers > 0, "
                f"one for each class of the labels ({listed(self.classes_)})"
            )
        return np.asarray(prior / prior.sum(), np.float64)

    def _balance(self, prior: Floats) -> None:
        """Weigh the scores so that unlabelled samples have the shares that were asked for; say so where they do not."""
        free = self.reached_ & ~self.labelled_
        scores = np.asarray(to_numpy(self._values), np.float64)[free]
        if not len(scores):
            return
        wanted = quotas(prior, len(scores))
        self._weigh(scores, prior, wanted)
        counts = counts_of(self._weighed(to_numpy(self._values)[free]))
        self.class_shares_ = counts / len(scores)
        if (np.abs(counts - wanted) > 1).any():
            asked, got = (listed(shares, form=".3g") for shares in (prior, self.class_shares_))
            warn_caller(
                f"class_prior: asked for shares of {asked} among {len(scores)} unlabelled samples, reached {got} "
                f"(class_shares_); {self._why_missed()}",
            )

    def _weigh(self, scores: Floats, prior: Floats, wanted: NDArray[np.intp]) -> None:
        if self.balance == "mass":
            mass = np.maximum(scores, 0).sum(axis=0)
            self.class_factors_ = np.where(mass > 0, prior / np.where(mass > 0, mass, 1), 1.0) * mass.sum()
        else:
            self.class_factors_ = factors(scores, wanted)

    def _why_missed(self) -> str:
        if self.balance == "mass":
            return "balance='mass' gives them to the sums of scores; balance='count' counts samples"
        return "samples with the same scores, or a score of 0 for a class, cannot be told apart by weights of classes"

    # ---- other points

    @by_chunks
    def predict(self, X: Any) -> NDArray[Any]:
        """Return the classes of points, by one average over the training points; `missing` where none is seen.

        Parameters
        ----------
        X : array, tensor or Dask array of shape (M, d)

        Returns
        -------
        array of shape (M,)
            A Dask array for one.

        Warns
        -----
        NlflowWarning
            Where all weights of a point are 0 in floats: it gets what the nearest training point has.
        """
        return self._decide(self._scores(X))

    def _scores(self, X: Any) -> NDArray[Any]:
        check_is_fitted(self)
        found = self._at(X, self._values, self.reached_)
        return self._finish(self._weighed(found.averages), found.seen)

    def _weighed(self, values: Array) -> NDArray[Any]:
        # In double precision, which holds the factors.
        return np.asarray(np.asarray(to_numpy(values), np.float64) * self.class_factors_ + self.class_shifts_)


class ProbabilisticClassifier(GraphClassifier):
    """With probabilities."""

    @by_chunks
    def predict_proba(self, X: Any) -> NDArray[Any]:
        """Return the probabilities of the classes at points, (M, C); NaN where no class is seen."""
        return self._scores(X)


class GraphRegressor(RegressorMixin, GraphEstimator):
    """A regressor; NaN marks samples without a value."""

    def fit(self, X: Any, y: Any) -> Any:
        """Fit the regressor.

        Parameters
        ----------
        X : array or tensor of shape (N, d)
            As for a classifier.
        y : array of shape (N,) or (N, D)
            NaN where there is no value, in all columns of a row.

        Returns
        -------
        self
        """
        X = self._points(X, reset=True)
        values, labelled, self._flat = values_of(y, X.shape[0])
        self._check_room(X, values.shape[1])
        self.labelled_ = labelled
        self.X_, graph = X, self._build(X)
        self._values = self._solve(graph.as_signal(np.where(labelled[:, None], values, 0.0)), labelled)
        self.transduction_ = self._shaped(to_numpy(self._values), self.reached_)
        return self

    def _shaped(self, values: NDArray[Any], known: NDArray[np.bool_]) -> NDArray[Any]:
        values = np.where(known[:, None], values, np.nan).astype(values.dtype)
        return values[:, 0] if self._flat else values

    @by_chunks
    def predict(self, X: Any) -> NDArray[Any]:
        """Return values at points, by one average over the training points; NaN where none with a value is seen."""
        check_is_fitted(self)
        found = self._at(X, self._values, self.reached_)
        return self._shaped(to_numpy(found.averages), found.seen)
