"""Choice of parameters."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Brief, Floats, power_of_two, to_numpy
from nlflow.affinities import Affinity, SparseAffinity
from nlflow.affinities.checks import check_affinity
from nlflow.errors import (
    InputError,
    NlflowWarning,
    check_array,
    check_generator,
    check_integer,
    check_number,
    checked_call,
    kind_of,
    shortened,
)
from nlflow.functionals.energies import J
from nlflow.learning.base import GivenPoints, GraphClassifier, GraphEstimator, ProbabilisticClassifier
from nlflow.learning.inputs import check_parameters, check_signals, is_none, named, targets_of
from nlflow.learning.widths import SAMPLES, WidthCurve, width_curve
from nlflow.markov.passages import node_numbers

_STRENGTHS = ("fidelity", "alpha")  # parameters that leave the graph as it is
_ONLY_WITH = {
    "gamma": "rbf",
    **dict.fromkeys(("n_neighbors", "metric", "search", "keep"), "knn"),
}  # parameters of one affinity alone
_MADE = {"gamma": None, "n_neighbors": None, "metric": "euclidean", "search": "auto", "keep": "either"}  # of a graph


@dataclass(frozen=True, repr=False)
class Curve(Brief):
    """Scores over values of a parameter.

    Attributes
    ----------
    parameter : str
    values : list
    scores : array of shape (values, folds)
        Higher is better.
    iterations : array of int of shape (values,)
        Of all folds together.
    best : object
        The first value of the highest mean score.
    """

    parameter: str
    values: list[Any]
    scores: Floats
    iterations: NDArray[np.intp]

    @property
    def means(self) -> Floats:
        """Mean scores."""
        return np.asarray(self.scores.mean(axis=1))

    @property
    def best(self) -> Any:
        """See `Curve`."""
        return self.values[int(np.argmax(self.means))]


@checked_call
def choose(model: Any, X: Any, y: Any, parameter: str, values: Any, *, folds: int = 5, rng: Any = 0) -> Curve:
    """Return how well an estimator finds labels that are held out, for each value of a parameter.

    Each fold hides a part of the labels, and no points. For classifiers the score is the mean logarithm of the
    probability of the hidden label, at least 0.001 (of `PoissonClassifier` the share of right classes), for regressors
    minus the mean squared error.

    Parameters
    ----------
    model : estimator of this package
    X, y
        As for its `fit`.
    parameter : str
        One of its parameters: 'gamma', 'n_neighbors', 'fidelity', 'alpha', 'p', ...
    values : sequence
    folds : int
        At least 2, at most the number of labels.
    rng : seed or numpy.random.Generator

    Returns
    -------
    Curve

    Raises
    ------
    InputError
        For another model, such as a pipeline, and a parameter that it does not have or use.
    """
    from sklearn.base import clone

    _check_has_part(model, parameter)
    check_parameters(model.get_params(deep=False))
    with named("values"):
        given = list(values)
    if not given:
        raise InputError("values: got none, expected at least one")
    classifies = isinstance(model, GraphClassifier)
    mark = getattr(model, "missing", math.nan)
    targets, labels = targets_of(y, classifies, mark)
    missing: Any = math.nan if is_none(mark) and targets.dtype.kind == "f" else mark
    parts = _folds(targets, np.flatnonzero(labels), check_integer("folds", folds, minimum=2), rng, classifies)
    scores, done = np.empty((len(given), len(parts))), np.zeros(len(given), np.intp)
    starts: list[Any] = [None] * len(parts)
    base: Any = None
    for row, value in enumerate(given):
        for column, hidden in enumerate(parts):
            shown = targets.copy() if classifies else targets.astype(np.float64)
            shown[hidden] = missing
            trial = clone(model).set_params(**{parameter: value})
            if parameter in _STRENGTHS:
                trial._start = starts[column]
            if base is not None and (parameter in _STRENGTHS or column):
                trial.set_params(affinity=base, **_MADE)
            with warnings.catch_warnings():  # where labels reach less is seen in the score
                warnings.simplefilter("ignore", NlflowWarning)
                trial.fit(X, shown)
            if parameter in _STRENGTHS or not column:
                base = trial.affinity_
            starts[column] = trial.minimizer_
            done[row] += trial.n_iter_
            scores[row, column] = _score(trial, targets, hidden)
    return Curve(parameter, given, scores, done)


def _check_has_part(model: Any, parameter: str) -> None:
    """Raise `InputError` where a parameter decides nothing about a model."""
    if not isinstance(model, GraphEstimator):
        raise InputError(
            f"model: got {kind_of(model)}, expected an estimator of labels of nlflow.learning; of a pipeline "
            "pass its last step, and the points as the steps before it leave them (pipeline[:-1].fit_transform(X))"
        )
    there = model.get_params()
    if parameter not in there:
        raise InputError(
            f"parameter: got {parameter!r}, expected one of those of {type(model).__name__}: {', '.join(there)}"
        )
    given, needed = there["affinity"], _ONLY_WITH.get(parameter)
    if needed is not None and not (isinstance(given, str) and given == needed):
        raise InputError(
            f"parameter: got {parameter!r}, which has no part in affinity={shortened(repr(given), 60)}, expected a "
            f"model with affinity={needed!r}, or another parameter"
        )
    if parameter == "balance" and there["class_prior"] is None:
        raise InputError("parameter: got 'balance', which has no part without a class_prior; give the model one")


def _folds(targets: Any, labelled: NDArray[np.intp], folds: int, rng: Any, classifies: bool) -> list[NDArray[np.intp]]:
    if folds > len(labelled):
        raise InputError(f"folds: got {folds}, expected at most {len(labelled)}, the number of labels")
    order = check_generator(rng).permutation(labelled)
    if classifies:
        order = order[np.argsort(np.unique(targets[order].astype(str), return_inverse=True)[1], kind="stable")]
    return [order[start::folds] for start in range(folds)]


def _score(trial: Any, targets: Any, hidden: NDArray[np.intp]) -> float:
    if not isinstance(trial, GraphClassifier):
        errors = np.ravel((trial.transduction_[hidden] - targets[hidden].astype(float)) ** 2)
        return -float(np.where(np.isnan(errors), np.nanvar(targets.astype(float)), errors).mean())
    if not isinstance(trial, ProbabilisticClassifier):
        return float(np.mean([bool(a == b) for a, b in zip(trial.transduction_[hidden], targets[hidden], strict=True)]))
    places = {name: number for number, name in enumerate(trial.classes_.tolist())}
    columns = [places.get(name, -1) for name in targets[hidden].tolist()]
    found = [trial.label_distributions_[i, c] if c >= 0 else 0.0 for i, c in zip(hidden, columns, strict=True)]
    return float(np.log(np.clip(np.nan_to_num(found), 1e-3, 1)).mean())


@checked_call
def choose_width(X: Any, *, samples: int = SAMPLES) -> WidthCurve:
    """Return how sums of Gaussians between points grow with their width, and where they grow most.

    (Coifman, Shkolnisky, Sigworth and Singer 2008, doi 10.1109/TIP.2008.2002305; Berry and Harlim 2016, doi
    10.1016/j.acha.2015.01.001.)

    Parameters
    ----------
    X : array, data frame, tensor or sparse array of shape (N, d)
        Points.
    samples : int
        Points, evenly spread over their numbers, whose pairs are looked at; O(samples^2 d) time.

    Returns
    -------
    WidthCurve

    Raises
    ------
    InputError
        For fewer than two points.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.learning import choose_width
    >>> curve = choose_width(np.random.default_rng(0).random((500, 2)))
    >>> round(curve.dimension, 1)
    1.8
    """
    count = check_integer("samples", samples, minimum=2)
    points = GivenPoints()._points(X, reset=True)
    if points.shape[0] < 2:
        raise InputError("X: got 1 sample, expected at least 2")
    return width_curve(points, count)


@checked_call
def log_evidence(affinity: Affinity, labelled: Any, values: Any, *, fidelity: float) -> float:
    """Return the restricted log marginal likelihood of values at some nodes under the Gaussian field of E.

    A priori u has the density exp(-J(u) / (2 s^2)) and an unknown mean, and values are u + noise of variance s^2 /
    (fidelity w_i d_i), with the s^2 of maximum likelihood (Patterson and Thompson 1971). Higher is better, among
    widths, graphs and fidelities for the same values.

    Parameters
    ----------
    affinity : Affinity
        Symmetric and connected.
    labelled : array of int of shape (M,)
        At least 3 nodes, each once.
    values : array of shape (M,) or (M, D)
        Columns are fields of their own, with one s^2.
    fidelity : float
        lambda~ > 0.

    Returns
    -------
    float
        Up to a constant that depends on the shape of values. Costs M - 1 potentials.
    """
    check_affinity(affinity)
    if not affinity.symmetric or affinity.domain.leading:
        raise InputError("affinity: got one that is not symmetric, or of a batch; take its symmetrized()")
    pieces = affinity.component_count if isinstance(affinity, SparseAffinity) else 1
    if pieces > 1:
        raise InputError(f"affinity: got {pieces} connected components, expected one; take the graph of each by itself")
    nodes, strength = (
        node_numbers("labelled", labelled, (affinity.domain.size,)),
        check_number("fidelity", fidelity, minimum=0, strict=True),
    )
    count = len(nodes)
    if count < 3 or len(np.unique(nodes)) < count:
        raise InputError(f"labelled: got {count} nodes, expected at least 3, each once")
    y = np.asarray(check_array("values", values, ndim=(1, 2)), np.float64)
    if len(y) != count:
        raise InputError(f"values: got shape {y.shape}, expected ({count},) or ({count}, D), a row for each node")
    y = y.reshape(count, -1)
    unit = power_of_two(float(np.abs(y).max()))  # of which squares could overflow, and be 0
    y = y / unit
    y = y - y[0]
    if not y.any():
        raise InputError("values: got the same at all nodes, expected some that differ, of which a scale is learned")
    check_signals(affinity.domain.size, count, None)
    weights = np.asarray(affinity.domain.weights, np.float64).ravel()
    # Contrasts: an orthonormal basis of what sums to 0. Potentials of contrasts are known up to a constant.
    basis = np.linalg.svd(np.ones((1, count)))[2][1:].T
    source = np.zeros((affinity.domain.size, count - 1))
    source[nodes] = basis / weights[nodes][:, None]
    signal = affinity.as_signal(source.reshape(*affinity.domain.shape, -1))
    try:
        found = J(affinity.scaled(0.5)).potential(signal).u
    except InputError as error:  # contrasts have no sum, unless over parts
        raise InputError("affinity: got parts that do not see each other, expected one; take each by itself") from error
    u = np.asarray(to_numpy(found), np.float64).reshape(source.shape)
    degree = np.asarray(to_numpy(affinity.degree), np.float64).ravel()
    with np.errstate(over="ignore", divide="ignore"):
        noise = 1 / (strength * weights[nodes] * degree[nodes])
    if not np.isfinite(noise).all():
        raise InputError(f"fidelity: got {strength:g}, whose inverse is no float beside the degrees; use a larger one")
    variance = basis.T @ u[nodes] + basis.T @ (noise[:, None] * basis)
    root = np.linalg.cholesky(variance)  # which reads one of its halves
    seen = np.linalg.solve(root, basis.T @ y)
    free = seen.size
    size = 0.5 * math.log(float((seen**2).sum()) / free) + math.log(unit)
    return float(-free * size - y.shape[1] * np.log(np.diagonal(root)).sum())
