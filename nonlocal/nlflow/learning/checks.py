"""What all estimators and functions of this room are given: each argument is checked in one place, by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from nlflow._array import is_tensor, namespace, to_numpy
from nlflow.affinities import Affinity
from nlflow.errors import (
    InputError,
    NlflowError,
    check_choice,
    check_detached,
    check_integer,
    check_memory,
    check_number,
    shortened,
)
from nlflow.kernels import RadialKernel

KINDS = ("rbf", "knn", "precomputed")
_SPARSE = ["csr", "csc", "coo"]
_ADVICE = re.compile(r"\n\w+ does not accept missing values")  # from here on about other estimators
_COPIES = 16
"""Arrays (N, C) that are there while signals are found, measured: 12 to 16 with those of the iterations."""
AT_OTHERS = 6
"""Such arrays while averages at other points are taken, measured: 4 to 5."""


class InputTypeError(InputError, TypeError):
    """An argument is of a kind that cannot be used; a `TypeError` where scikit-learn wants one."""


@contextmanager
def named(name: str) -> Iterator[None]:
    """Let what scikit-learn, NumPy and SciPy say about an argument be errors of this package, which name it."""
    try:
        yield
    except (NlflowError, MemoryError):
        raise
    except (TypeError, ValueError, OverflowError) as error:
        kind = InputTypeError if isinstance(error, TypeError) else InputError
        raise kind(f"{name}: {_ADVICE.split(str(error))[0]}") from error


def is_precomputed(affinity: Any) -> bool:
    """Tell whether weights are given in place of points."""
    return isinstance(affinity, str) and affinity == "precomputed"


# ---- parameters


def _check_affinity(name: str, value: Any) -> None:
    if not isinstance(value, Affinity | RadialKernel) and not (isinstance(value, str) and value in KINDS):
        raise InputError(
            f"{name}: got {shortened(repr(value), 60)}, expected one of {', '.join(map(repr, KINDS))}, a radial kernel "
            "such as Laplace(width=1.0), or an Affinity"
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


def _check_prior(name: str, value: Any) -> None:
    if value is None or (isinstance(value, str) and value == "labels"):
        return
    if isinstance(value, str):
        raise InputError(f"{name}: got {value!r}, expected None, 'labels' or numbers")
    with named(name):
        numbers = np.asarray(value, np.float64)
    if numbers.ndim != 1 or not (numbers > 0).all() or not np.isfinite(numbers).all():
        shown = shortened(repr(value), 60)
        raise InputError(f"{name}: got {shown}, expected None, 'labels' or numbers > 0, one for each class")


def _number(**words: Any) -> Callable[[str, Any], Any]:
    return lambda name, value: check_number(name, value, **words)


def _whole(name: str, value: Any) -> None:
    check_integer(name, value, minimum=1)


def _optional(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


_LEAST_RATE = 1e-150
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "affinity": _check_affinity,
    "gamma": _check_rate,
    "n_neighbors": _whole,
    "accuracy": _optional(_number(minimum=0)),
    "memory_limit": _optional(_number(minimum=1, finite=False)),
    "tol": _optional(_number(minimum=0)),
    "max_iter": _whole,
    "class_prior": _check_prior,
    "balance": lambda name, value: check_choice(name, value, ("count", "mass")),
    "fidelity": _optional(_number(minimum=0, strict=True, hint="or None for exact values")),
    "p": _number(minimum=1, strict=True),
    "t": _number(minimum=0),
}
"""What each parameter has to be, in whichever estimator or function; the rest is theirs alone."""


def check_parameters(given: Mapping[str, Any]) -> None:
    """Raise `InputError` for the first parameter with a value that no estimator takes."""
    for name, value in given.items():
        check_detached(name, value)  # also those that this graph has no use for
    for name, check in _CHECKS.items():
        if name in given:
            check(name, given[name])


# ---- points


def checked_points(estimator: Any, X: Any, *, reset: bool) -> Any:
    """Return points (N, d) for an estimator, NumPy, a tensor or sparse rows; weights (N, N) for 'precomputed'.

    Sparse rows stay so for neighbours and weights alone: sums over all pairs take dense ones.
    """
    from sklearn.utils.validation import validate_data

    check_plain("X", X)
    if getattr(getattr(X, "dtype", None), "kind", "f") in "mM":
        raise InputError(f"X: got {X.dtype}, expected real numbers; say from when and in which unit they count")
    if is_tensor(X):
        X = _checked_tensor(estimator, X, reset)
        _check_square(estimator, X, reset)
        return X
    pairwise = is_precomputed(estimator.affinity)
    with named("X"):
        if pairwise and not reset and np.shape(X)[1:] != (estimator.n_features_in_,):
            raise InputError(
                f"X: got shape {np.shape(X)} with affinity='precomputed', expected rows of weights to the training "
                f"samples, (M, {estimator.n_features_in_})"
            )
        X = validate_data(estimator, X, accept_sparse=_SPARSE, dtype=[np.float64, np.float32], reset=reset)
    takes_rows = isinstance(estimator.affinity, str) and estimator.affinity in ("knn", "precomputed")
    if hasattr(X, "toarray") and not takes_rows:
        check_memory(
            f"{X.shape} features out of a sparse matrix", 8 * X.shape[0] * X.shape[1],
            "reduce them first, or use affinity='knn'", getattr(estimator, "memory_limit", None),
        )  # fmt: skip
        X = X.toarray()
    _check_square(estimator, X, reset)
    return X


def _check_square(estimator: Any, X: Any, reset: bool) -> None:
    if reset and is_precomputed(estimator.affinity) and X.shape[0] != X.shape[1]:
        raise InputError(
            f"X: got shape {tuple(X.shape)} with affinity='precomputed', expected a square matrix of weights"
        )


def _checked_tensor(estimator: Any, X: Any, reset: bool) -> Any:
    xp = namespace(X)
    if X.ndim != 2 or not xp.isdtype(X.dtype, "real floating"):
        raise InputError(f"X: got a tensor of {X.dtype} of shape {tuple(X.shape)}, expected floats (samples, features)")
    if 0 in X.shape:
        raise InputError(f"X: got a tensor of shape {tuple(X.shape)}, expected at least one sample and feature")
    if not bool(xp.all(xp.isfinite(X))):
        raise InputError("X: got NaN or infinity, expected finite features")
    if reset:
        estimator.n_features_in_ = X.shape[1]
    elif X.shape[1] != estimator.n_features_in_:
        raise InputError(f"X: got {X.shape[1]} features, expected {estimator.n_features_in_}")
    return X.detach()


def on_host(points: Any) -> Any:
    """Return points as they are, and tensors as NumPy arrays."""
    return to_numpy(points) if hasattr(points, "detach") else points


def check_plain(name: str, value: Any) -> None:
    """Refuse masked arrays, whose masks scikit-learn leaves away without a word."""
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"{name}: got a masked array, expected a plain one; fill it, or leave rows out")


def symmetrized(weights: Any) -> Any:
    """Return weights (N, N), dense or sparse, symmetric to the last bit where they are so up to rounding.

    Kernels of points are sums and exponentials, whose order differs on both sides of the diagonal. What is left of the
    digits of either entry must be half of them at least, or the difference be rounding beside the largest of its row.
    Functionals see the mean of both sides in any case.

    Raises
    ------
    InputError
        Where they are not.
    """
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


_ROUNDINGS = 32  # of an entry that is a difference of larger numbers


# ---- memory


def check_signals(samples: int, columns: int, limit: float | None, copies: int = _COPIES) -> None:
    """Raise `MemoryLimitError` where signals of so many columns (classes, values, modes) pass the limit."""
    check_memory(
        f"signals of {samples} samples with {columns} columns each", 8 * copies * samples * columns,
        "use fewer samples or classes, or raise memory_limit", limit,
    )  # fmt: skip
