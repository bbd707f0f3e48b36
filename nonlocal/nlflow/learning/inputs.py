"""Checks of what estimators are given."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, is_tensor, to_numpy
from nlflow.affinities import Affinity
from nlflow.affinities.distances import METRICS, SEARCHES
from nlflow.affinities.graph import check_undamaged
from nlflow.errors import (
    InputError,
    NlflowError,
    check_array,
    check_choice,
    check_detached,
    check_flag,
    check_floats,
    check_integer,
    check_memory,
    check_number,
    check_tensor,
    check_unmasked,
    shortened,
    warn_caller,
)
from nlflow.kernels import RadialKernel

KINDS = ("knn", "rbf", "precomputed")
KEEPS = ("either", "both")
_SPARSE = ["csr", "csc", "coo"]
_ADVICE = re.compile(r"\n\w+ does not accept missing values")  # from here on about other estimators
_ROUNDINGS = 32  # of an entry that is a difference of larger numbers
_LEAST_RATE = 1e-150
UNLABELLED = -1
_NO_NAMES = ("", "-1", "nan", "<NA>")
"""What NumPy, pandas and tables make of a sample without a label where all labels are strings."""
_HOW = (
    "-1 marks samples without a label, among strings in an array of dtype object: np.where(known, "
    "names.astype(object), -1); missing=None takes None, NaN and NA for it"
)
_EDGE_BYTES = 120
"""Of each neighbour of each sample while a graph is made and a signal found on it, measured: 90 to 115."""
_NODE_BYTES = {"labels": 64, "modes": 700}
"""Of each sample besides, measured for up to a few modes: 30 and 600."""
_COPIES = 16
"""Arrays (N, C) that are there while signals are found, measured: 12 to 16 with those of the iterations."""
AT_OTHERS = 6
"""Such arrays while averages at other points are taken, measured: 4 to 5."""


class InputTypeError(InputError, TypeError):
    """An `InputError` that is a `TypeError` too, as scikit-learn wants."""


@contextmanager
def named(name: str) -> Iterator[None]:
    try:
        yield
    except (NlflowError, MemoryError):
        raise
    except (TypeError, ValueError, OverflowError) as error:
        kind = InputTypeError if isinstance(error, TypeError) else InputError
        raise kind(f"{name}: {_ADVICE.split(str(error))[0]}") from error


def is_precomputed(affinity: Any) -> bool:
    return isinstance(affinity, str) and affinity == "precomputed"


def is_pairwise(estimator: Any) -> bool:
    return is_precomputed(estimator.affinity) or getattr(estimator, "metric", "") == "precomputed"


# ---- parameters


def _check_affinity(name: str, value: Any) -> None:
    called = callable(value) and not isinstance(value, type)
    known = isinstance(value, str) and value in KINDS
    if not (called or known or isinstance(value, Affinity | RadialKernel)):
        raise InputError(
            f"{name}: got {shortened(repr(value), 60)}, expected one of {', '.join(map(repr, KINDS))}, a radial kernel "
            "such as Laplace(width=1.0), a function of two sets of points, or an Affinity"
        )


def _check_rate(name: str, value: Any) -> None:
    if value is not None:
        # Beyond these 1 / sqrt(2 gamma), its square or that of a distance over it are no normal floats.
        number = check_number(name, value, minimum=0, strict=True)
        if not _LEAST_RATE <= number <= 1 / _LEAST_RATE:
            raise InputError(
                f"{name}: got {number:g}, expected a number from {_LEAST_RATE:g} to {1 / _LEAST_RATE:g}; scale the "
                "points"
            )


def _check_exponent(name: str, value: Any) -> None:
    number = check_number(name, value, minimum=-1)
    if number > 0:
        raise InputError(f"{name}: got {number:g}, expected -1 to 0, such as -0.5: widths fall where the density grows")


def _check_prior(name: str, value: Any) -> None:
    if value is None or (isinstance(value, str) and value == "labels"):
        return
    if isinstance(value, str):
        raise InputError(f"{name}: got {value!r}, expected None, 'labels' or numbers")
    numbers = check_floats(name, value, hint="or None, or 'labels'")
    if numbers.ndim != 1 or not (numbers > 0).all():
        shown = shortened(repr(value), 60)
        raise InputError(f"{name}: got {shown}, expected None, 'labels' or numbers > 0, one for each class")


def _check_missing(name: str, value: Any) -> None:
    if not is_none(value) and not (isinstance(value, numbers.Real) and value == UNLABELLED):
        raise InputError(f"{name}: got {shortened(repr(value), 60)}, expected -1, or None, NaN or NA for any of these")


def _choice(*choices: str) -> Callable[[str, Any], Any]:
    return lambda name, value: check_choice(name, value, choices)


def _number(**words: Any) -> Callable[[str, Any], Any]:
    return lambda name, value: check_number(name, value, **words)


def _whole(name: str, value: Any) -> None:
    check_integer(name, value, minimum=1)


def _check_verbose(name: str, value: Any) -> None:
    if not isinstance(value, int):  # others of scikit-learn take numbers too
        check_flag(name, value)


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "affinity": _check_affinity,
    "gamma": _check_rate,
    "n_neighbors": _optional(_whole),
    "metric": _choice(*METRICS),
    "search": _choice(*SEARCHES),
    "keep": _choice(*KEEPS),
    "missing": _check_missing,
    "accuracy": _optional(_number(minimum=0, strict=True, below=1, hint="or None for exact sums")),
    "memory_limit": _optional(_number(minimum=1, finite=False)),
    "tol": _optional(_number(minimum=0)),
    "max_iter": _whole,
    "class_prior": _check_prior,
    "balance": _choice("count", "mass"),
    "fidelity": _optional(_number(minimum=0, strict=True, hint="or None for exact values")),
    "beta": _optional(_check_exponent),
    "p": _number(minimum=1, strict=True),
    "t": _number(minimum=0),
    "verbose": _check_verbose,
}
"""What each parameter has to be, in whichever estimator or function; the rest is theirs alone."""


def check_parameters(given: Mapping[str, Any]) -> None:
    """Raise `InputError` for a parameter with a value that no estimator takes."""
    for name, value in given.items():
        check_detached(name, value)  # also those that this graph has no use for
    for name, check in _CHECKS.items():
        if name in given:
            check(name, given[name])
    if "max_iter" in given and given.get("tol") is not None:  # of an eigenvalue 0 means all digits
        check_number("tol", given["tol"], minimum=0, strict=True)


# ---- points


def is_chunked(X: Any) -> bool:
    return type(X).__module__.split(".")[0] == "dask"


def loaded(X: Any) -> Any:
    if not is_chunked(X):
        return X
    if X.nbytes == X.nbytes:  # unknown chunks have no number
        check_memory(f"points {X.shape} of a Dask array", int(X.nbytes), "use fewer, or features of fewer dimensions")
    return X.compute()


def checked_points(estimator: Any, X: Any, *, reset: bool) -> Any:
    """Return points (N, d), NumPy, a tensor or sparse rows; weights (N, N) for 'precomputed'."""
    from sklearn.utils.validation import validate_data

    check_plain("X", X)
    if getattr(getattr(X, "dtype", None), "kind", "f") in "mM":
        raise InputError(f"X: got {X.dtype}, expected real numbers; say from when and in which unit they count")
    if is_tensor(X):
        X = _checked_tensor(estimator, X, reset)
        _check_square(estimator, X, reset)
        return X
    pairwise = is_pairwise(estimator)
    with named("X"):
        if pairwise and not reset and np.shape(X)[1:] != (estimator.n_features_in_,):
            how, what = _given_as(estimator)
            raise InputError(
                f"X: got shape {np.shape(X)} with {how}, expected rows of {what} to the training samples, (M, "
                f"{estimator.n_features_in_})"
            )
        check_undamaged("X", X)
        X = validate_data(estimator, X, accept_sparse=_SPARSE, dtype=[np.float64, np.float32], reset=reset)
    takes_rows = callable(estimator.affinity) and not isinstance(estimator.affinity, RadialKernel)
    takes_rows = takes_rows or (isinstance(estimator.affinity, str) and estimator.affinity in ("knn", "precomputed"))
    if hasattr(X, "toarray") and not takes_rows:
        check_memory(
            f"{X.shape} features out of a sparse matrix", 8 * X.shape[0] * X.shape[1],
            "reduce them first, or use affinity='knn'", getattr(estimator, "memory_limit", None),
        )  # fmt: skip
        X = X.toarray()
    _check_square(estimator, X, reset)
    return X


def _check_square(estimator: Any, X: Any, reset: bool) -> None:
    if reset and is_pairwise(estimator) and X.shape[0] != X.shape[1]:
        how, what = _given_as(estimator)
        raise InputError(f"X: got shape {tuple(X.shape)} with {how}, expected a square matrix of {what}")


def _given_as(estimator: Any) -> tuple[str, str]:
    if is_precomputed(estimator.affinity):
        return "affinity='precomputed'", "weights"
    return "metric='precomputed'", "distances"


def _checked_tensor(estimator: Any, X: Any, reset: bool) -> Any:
    X = check_array("X", X, ndim=2, hint="floats (samples, features)")
    if reset:
        estimator.n_features_in_ = X.shape[1]
    elif X.shape[1] != estimator.n_features_in_:
        raise InputError(f"X: got {X.shape[1]} features, expected {estimator.n_features_in_}")
    return X.detach()


def on_host(points: Any) -> Any:
    return to_numpy(points) if hasattr(points, "detach") else points


def check_plain(name: str, value: Any) -> None:
    """Refuse masked arrays, whose masks scikit-learn ignores, and tensors that cannot be read."""
    if is_tensor(value):
        check_tensor(name, value)
    check_unmasked(name, value, ", or leave rows out")


def weights_of(kernel: Any, x: Any, y: Any) -> Any:
    from scipy.sparse import csr_array

    weights = on_host(kernel(x, y))
    check_plain("affinity", weights)
    weights = csr_array(weights) if hasattr(weights, "toarray") else np.asarray(weights)
    if weights.dtype.kind not in "biuf":
        raise InputError(f"affinity: the function returned {weights.dtype}, expected real numbers")
    weights = weights.astype(np.float64)
    if weights.shape != (x.shape[0], y.shape[0]):
        raise InputError(
            f"affinity: the function returned shape {weights.shape} for {x.shape[0]} and {y.shape[0]} points, expected "
            f"weights of shape {(x.shape[0], y.shape[0])}"
        )
    data = np.asarray(weights.data if hasattr(weights, "toarray") else weights)
    if not np.isfinite(data).all() or data.min(initial=0.0) < 0:
        raise InputError("affinity: the function returned negative, NaN or infinite weights, expected finite ones >= 0")
    return weights


def symmetrized(weights: Any) -> Any:
    """Return weights (N, N) that are symmetric up to rounding as exactly symmetric ones."""
    back, precision, sparse = weights.T, np.finfo(weights.dtype), hasattr(weights, "toarray")
    differ = weights != back
    if not (differ.nnz if sparse else differ.any()):
        return weights
    apart, larger = abs(weights - back), weights.maximum(back) if sparse else np.maximum(weights, back)
    highest = np.asarray(weights.max(axis=1).toarray() if sparse else weights.max(axis=1), np.float64).ravel()
    if sparse:
        apart = apart.tocoo()
        rows, columns = apart.coords
        apart, larger = apart.data, np.asarray(larger.tocsr()[rows, columns]).ravel()
        beside = np.minimum(highest[rows], highest[columns])
    else:
        beside = np.minimum(highest[:, None], highest)
    if (apart > np.sqrt(precision.eps) * larger + _ROUNDINGS * precision.eps * beside).any():
        raise InputError(
            "X: got weights that are not symmetric with affinity='precomputed', expected W_ij = W_ji up to rounding; "
            "take the mean of both, (W + W.T) / 2"
        )
    return weights / 2 + back / 2


# ---- labels


class Classes(NamedTuple):
    """The classes, the class number of each labelled sample, and which samples are labelled."""

    names: NDArray[Any]
    numbers: NDArray[np.intp]
    labelled: NDArray[np.bool_]


class Values(NamedTuple):
    """Values (N, D), which samples have them, and whether they were given as (N,)."""

    values: Floats
    labelled: NDArray[np.bool_]
    flat: bool


def classes_of(y: Any, count: int, missing: Any = UNLABELLED) -> Classes:
    """See `Classes`."""
    from sklearn.utils import column_or_1d
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import assert_all_finite, check_consistent_length

    y = _given(y)
    if isinstance(y, list | tuple) and any(isinstance(v, str) for v in y):
        y = np.array(y, dtype=object)  # in which -1 stays a number
    with named("y"):
        y = column_or_1d(y, warn=True)
        if y.shape[0] != count:
            check_consistent_length(np.empty(count), y)
    none = is_none(missing)
    if none:
        labelled = ~np.isnan(y) if y.dtype.kind in "fmM" else np.array([not is_none(v) for v in y], np.bool_)
    elif y.dtype.kind == "O":
        labelled = np.array([not isinstance(v, numbers.Real) or float(v) != UNLABELLED for v in y], np.bool_)
    else:
        labelled = y != UNLABELLED if y.dtype.kind in "iuf" else np.ones(count, np.bool_)
    _check_named(y, labelled)
    given = np.array(y[labelled].tolist()) if y.dtype.kind == "O" else y[labelled]
    if not none and y.dtype.kind in "if" and set(np.unique(given)) == {1} and not labelled.all():
        warn_caller(
            "y: got -1 and 1 alone, which are taken for two classes; where there is one class and samples "
            "without a label, name it otherwise",
        )
        labelled, given = np.ones(count, np.bool_), y
    if not labelled.any():
        mark = "None, NaN or NA" if none else UNLABELLED
        raise InputError(f"y: got no labelled sample (all are {mark}), expected at least one of each class")
    with named("y"):
        if given.dtype.kind == "f":
            assert_all_finite(given, input_name="y")
        check_classification_targets(given)
    names, numbers_ = np.unique(given, return_inverse=True)
    return Classes(names, numbers_, labelled)


def values_of(y: Any, count: int) -> Values:
    """See `Values`."""
    from sklearn.utils import column_or_1d
    from sklearn.utils.validation import assert_all_finite, check_consistent_length

    with named("y"):
        y = np.asarray(_given(y))
        if y.dtype.kind not in "biuf":
            if y.dtype.kind not in "OSU":
                raise InputError(f"y: got {y.dtype}, expected real numbers")
            y = y.astype(np.float64)
        if y.ndim == 2 and y.shape[1] == 1:
            y = column_or_1d(y, warn=True)
        if y.ndim not in (1, 2) or 0 in y.shape[1:]:
            raise InputError(f"y: got shape {y.shape}, expected ({count},) or ({count}, D)")
        if len(y) != count:
            check_consistent_length(np.empty(count), y)
    values = y.reshape(len(y), -1).astype(np.float64)
    missing = np.isnan(values)
    labelled = ~missing.any(axis=1)
    part = ~labelled & ~missing.all(axis=1)
    if part.any():
        raise InputError(
            f"y: got {int(part.sum())} rows with some NaN and some values (the first is {int(np.argmax(part))}), "
            "expected rows of values, or of NaN alone for samples without; fit each column by itself, or set all of "
            "these rows to NaN"
        )
    if not labelled.any():
        raise InputError("y: got no value (all are NaN), expected at least one")
    with named("y"):
        assert_all_finite(values[labelled], input_name="y")
    return Values(values, labelled, y.ndim == 1)


def targets_of(y: Any, classifies: bool, missing: Any = UNLABELLED) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return labels as an array, in which -1 among strings stays a number, and which samples have them."""
    y = _given(y)
    with named("y"):
        targets = np.array(y, dtype=object if any(isinstance(v, str) for v in np.ravel(y)) else None)
    count = len(targets) if targets.ndim else 1
    if classifies and is_none(missing) and targets.dtype.kind in "iub":
        targets = targets.astype(object)  # which can be hidden
    return targets, classes_of(y, count, missing).labelled if classifies else values_of(y, count).labelled


def _given(y: Any) -> Any:
    if y is None:
        raise InputError("y: This estimator requires y to be passed, but the target y is None.")
    check_plain("y", y)
    return on_host(loaded(y))


def _check_named(y: NDArray[Any], labelled: NDArray[np.bool_]) -> None:
    places = np.flatnonzero(labelled)
    if y.dtype.kind in "fmM":
        wrong = np.isnan(y[places])
    elif y.dtype.kind in "OUT":
        wrong = np.array([is_none(v) or (isinstance(v, str) and v in _NO_NAMES) for v in y[places]], np.bool_)
    else:
        return
    if wrong.any():
        first = int(places[np.argmax(wrong)])
        value = y[first].item() if hasattr(y[first], "item") else y[first]
        raise InputError(
            f"y: got {value!r} for {int(wrong.sum())} samples (the first is {first}), expected "
            f"the name of a class; {_HOW}"
        )
    if y.dtype.kind == "O" and len({isinstance(v, str) for v in y[places]}) > 1:
        raise InputError(f"y: got strings and numbers as names of classes, expected one kind; {_HOW}")


def is_none(value: Any) -> bool:
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, numbers.Real) and value != value


# ---- memory


def check_signals(samples: int, columns: int, limit: float | None, copies: int = _COPIES) -> None:
    check_memory(
        f"signals of {samples} samples with {columns} columns each", 8 * copies * samples * columns,
        "use fewer samples or classes, or raise memory_limit", limit,
    )  # fmt: skip


def check_graph(samples: int, edges: float, columns: int, limit: float | None, found: str = "labels") -> None:
    needed = _EDGE_BYTES * edges + samples * (_NODE_BYTES[found] + 8 * _COPIES * columns)
    check_memory(
        f"a graph of {samples} samples with {edges / samples:.3g} neighbours each and {columns} signals on it",
        int(needed), "use fewer neighbours, samples or classes, or raise memory_limit", limit,
    )  # fmt: skip
