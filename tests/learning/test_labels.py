"""Labels of samples: which are classes, which stand for none, and what is refused."""

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="scikit-learn is an extra: pip install 'nlflow[learning]'")

from nlflow import InputError
from nlflow.learning import HarmonicClassifier, LabelSpreading, choose

X = np.array([[0.0], [0.1], [0.2], [1.0], [1.1]])
NAMES = np.array(["left", "left", "left", "right", "right"])
KNOWN = np.array([True, False, False, True, False])
HOW = (
    r"-1 marks samples without a label, .* np\.where\(known, names\.astype\(object\), -1\); "
    r"missing=None takes None, NaN and NA for it"
)


def test_strings_with_minus_one_are_as_numbers() -> None:
    found = LabelSpreading().fit(X, np.where(KNOWN, NAMES.astype(object), -1))
    numbers = LabelSpreading().fit(X, np.where(KNOWN, NAMES == "right", -1))
    assert found.transduction_.tolist() == NAMES.tolist()
    assert np.array_equal(found.label_distributions_, numbers.label_distributions_)


@pytest.mark.parametrize(
    ("y", "told"),
    [
        (np.array(["left", np.nan, np.nan, "right", np.nan], object), r"got nan for 3 samples \(the first is 1\)"),
        (np.array(["left", None, None, "right", -1], object), r"got None for 2 samples \(the first is 1\)"),
        (["left", "right", None, -1, -1], r"got None for 1 samples \(the first is 2\)"),
        ([0, 1, None, -1, -1], r"got None for 1 samples \(the first is 2\)"),
        (np.array([0, 1, -1, -1, np.nan]), r"got nan for 1 samples \(the first is 4\)"),
        # What NumPy makes of -1 and NaN among strings.
        (np.array(["left", -1, -1, "right", -1]), r"got '-1' for 3 samples \(the first is 1\)"),
        (np.array(["left", np.nan, "left", "right", "right"]), r"got 'nan' for 1 samples \(the first is 1\)"),
        (["left", "", "", "right", -1], r"got '' for 2 samples \(the first is 1\)"),
        (
            np.array(["2020", "NaT", "NaT", "2021", "NaT"], "datetime64[Y]"),
            r"got None for 3 samples \(the first is 1\)",
        ),
    ],
)
def test_what_stands_for_no_label_is_refused(y, told: str) -> None:
    with pytest.raises(InputError, match=rf"^y: {told}, expected the name of a class; {HOW}$"):
        HarmonicClassifier().fit(X, y)


def test_what_pandas_has_for_no_label_is_refused() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is an extra")
    strings = ["left", None, None, "right", None]
    for dtype in (object, "category", "string", None):
        with pytest.raises(InputError, match=rf"^y: got .* for 3 samples \(the first is 1\), .*; {HOW}$"):
            HarmonicClassifier().fit(X, pandas.Series(strings, dtype=dtype))
        with pytest.raises(InputError, match=HOW):
            choose(HarmonicClassifier("rbf"), X, pandas.Series(strings, dtype=dtype), "gamma", [1.0, 20.0], folds=2)
    with pytest.raises(InputError, match=r"^y: got nan for 3 samples"):
        HarmonicClassifier().fit(X, pandas.Series([0, None, None, 1, None], dtype="Int64"))
    whole = pandas.Series(strings, dtype="category").astype(object).where(pandas.Series(KNOWN), -1)
    assert HarmonicClassifier().fit(X, whole).transduction_.tolist() == NAMES.tolist()


def test_strings_among_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="got strings and numbers as names of classes"):
        HarmonicClassifier().fit(X, ["left", 1, -1, 1, -1])
