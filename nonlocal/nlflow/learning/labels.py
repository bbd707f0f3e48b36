"""Labels of samples: which of them there are, and what is refused because nobody can tell whether it is one."""

from __future__ import annotations

import numbers
import warnings
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.errors import InputError, NlflowWarning
from nlflow.learning.checks import check_plain, named, on_host

UNLABELLED = -1
_NO_NAMES = ("", "-1", "nan", "<NA>")
"""What NumPy, pandas and tables make of a sample without a label where all labels are strings."""
_HOW = (
    "-1 marks samples without a label, among strings in an array of dtype object: np.where(known, "
    "names.astype(object), -1)"
)


class Classes(NamedTuple):
    """The classes, the number of that of each labelled sample, and which samples are labelled."""

    names: NDArray[Any]
    numbers: NDArray[np.intp]
    labelled: NDArray[np.bool_]


class Values(NamedTuple):
    """Values (N, D), which samples have them, and whether there was one column without an axis of its own."""

    values: Floats
    labelled: NDArray[np.bool_]
    flat: bool


def classes_of(y: Any, count: int) -> Classes:
    """Return the classes of labels of so many samples.

    Raises
    ------
    InputError
        For None and NaN, for strings that stand for them (of NumPy, where -1 or NaN were among strings), for strings
        among numbers, and where no sample has a label.
    """
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
    if y.dtype.kind == "O":
        labelled = np.array([not isinstance(v, numbers.Real) or float(v) != UNLABELLED for v in y], np.bool_)
    else:
        labelled = y != UNLABELLED if y.dtype.kind in "iuf" else np.ones(count, np.bool_)
    _check_named(y, labelled)
    given = np.array(y[labelled].tolist()) if y.dtype.kind == "O" else y[labelled]
    if y.dtype.kind in "if" and set(np.unique(given)) == {1} and not labelled.all():
        warnings.warn(
            "y: got -1 and 1 alone, which are taken for two classes; where there is one class and samples "
            "without a label, name it otherwise",
            NlflowWarning,
            stacklevel=3,
        )
        labelled, given = np.ones(count, np.bool_), y
    if not labelled.any():
        raise InputError("y: got no labelled sample (all are -1), expected at least one of each class")
    with named("y"):
        if given.dtype.kind == "f":
            assert_all_finite(given, input_name="y")
        check_classification_targets(given)
    names, numbers_ = np.unique(given, return_inverse=True)
    return Classes(names, numbers_, labelled)


def values_of(y: Any, count: int) -> Values:
    """Return the values of so many samples, of shape (N,) or (N, D); a row of NaN is a sample without.

    Raises
    ------
    InputError
        For rows of which some are NaN and some are not, infinity, what is not real, and where no sample has a value.
    """
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


def nodes_of(labelled: Any, size: int) -> NDArray[np.intp]:
    """Return the numbers of nodes below `size`, at least one, given so or as an array of bool of shape (size,)."""
    with named("labelled"):
        given = np.asarray(labelled)
    if given.dtype == bool and given.shape == (size,):
        given = np.flatnonzero(given)
    if not given.size:
        raise InputError("labelled: got no node, expected at least one; choose the first at random")
    if given.dtype.kind not in "iu" or given.ndim != 1 or not 0 <= given.min() <= given.max() < size:
        raise InputError(f"labelled: got {given.dtype} of shape {given.shape}, expected numbers of nodes below {size}")
    return given.astype(np.intp)


def _given(y: Any) -> Any:
    """Return labels or values as they are, of a tensor as an array."""
    if y is None:
        raise InputError("y: This estimator requires y to be passed, but the target y is None.")
    check_plain("y", y)
    return on_host(y)


def _check_named(y: NDArray[Any], labelled: NDArray[np.bool_]) -> None:
    """Raise `InputError` for labels of which nobody can tell whether they are one."""
    places = np.flatnonzero(labelled)
    if y.dtype.kind in "fmM":
        wrong = np.isnan(y[places])
    elif y.dtype.kind in "OUT":
        wrong = np.array([_is_none(v) or (isinstance(v, str) and v in _NO_NAMES) for v in y[places]], np.bool_)
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


def _is_none(value: Any) -> bool:
    """Tell whether this is None, NaN, or what pandas has for them."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, numbers.Real) and value != value
