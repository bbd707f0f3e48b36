"""Tables of pandas and arrays of xarray come back as what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nlflow import denoise
from nlflow.errors import InputError

pandas = pytest.importorskip("pandas")
xarray = pytest.importorskip("xarray")

RNG = np.random.default_rng(4)
TIME = np.arange(200) / 30
NOISY = np.sin(TIME) + RNG.normal(0, 0.2, 200)
FAST = {"quality": "fast"}


def table() -> Any:
    counts = np.rint(100 * np.sin(TIME) + RNG.normal(0, 20, 200))
    found = pandas.DataFrame(
        {"time": TIME, "volt": NOISY, "single": NOISY.astype("f4"), "counts": counts.astype("i2"), "name": ["x"] * 200,
         "yes": [True, False] * 100, "day": pandas.date_range("2024", periods=200),
         "kind": pandas.Categorical([1, 2] * 100),
         "holes": pandas.array(counts, dtype="Int64")},
        index=pandas.Index(np.arange(200) * 2, name="row"),
    )  # fmt: skip
    found.attrs = {"units": "V"}
    found.loc[20:30, "volt"] = np.nan
    found.loc[40, "holes"] = pandas.NA
    return found


def test_a_table_keeps_labels_types_and_all_that_is_no_signal() -> None:
    given = table()
    found, info = denoise(given, return_info=True, **FAST)
    assert found.dtypes.equals(given.dtypes)
    assert found.index.equals(given.index)
    assert (found.index.name, found.attrs, list(found)) == ("row", {"units": "V"}, list(given))
    assert found.isna().equals(given.isna())
    changed = [name for name in given if not found[name].equals(given[name])]
    assert changed == ["volt", "single", "counts", "holes"]
    assert len(info.columns) == 4
    np.testing.assert_array_equal(found["single"], denoise(given["single"].to_numpy(), **FAST))
    assert float(np.std(found["volt"] - np.sin(TIME))) < 0.1
    twice = pandas.DataFrame(np.stack([NOISY, NOISY], 1), columns=["a", "a"])
    assert denoise(twice, **FAST).columns.tolist() == ["a", "a"]
    levels = denoise(given[["volt", "name", "single"]], {"volt": 0.2, "single": 0.0}, **FAST)
    assert levels["single"].equals(given["single"])


def test_a_series_is_a_signal_and_a_mask_fills_its_holes() -> None:
    given = table()["volt"]
    found = denoise(given, 0.2, **FAST)
    assert (found.name, found.attrs, found.index.equals(given.index)) == ("volt", {"units": "V"}, True)
    assert found.isna().equals(given.isna())
    assert not denoise(given, 0.2, mask="nan", **FAST).isna().any()


def test_a_table_with_axes_is_an_array() -> None:
    values = np.outer(np.sin(TIME[:40]), np.ones(30)) + RNG.normal(0, 0.1, (40, 30))
    found = denoise(pandas.DataFrame(values), 0.1, axes="YX", **FAST)
    np.testing.assert_array_equal(found, denoise(values, 0.1, **FAST))


def test_arrays_of_xarray_by_the_names_of_their_dimensions() -> None:
    values = RNG.normal(100, 5, (3, 24, 20)).astype("f4")
    given = xarray.DataArray(
        values, dims=("band", "y", "x"), coords={"y": np.arange(24)}, attrs={"units": "K"}, name="w"
    )
    found = denoise(given, 5.0, **FAST)
    xarray.testing.assert_identical(found, given.copy(data=denoise(values, 5.0, channel_axis=0, **FAST)))
    others = {"grey": (("y", "x"), np.rint(values[0]).astype("u1")), "text": ("q", ["a", "b"])}
    given[0, 3, 4] = np.nan
    dataset = xarray.Dataset({"w": given, **others}, attrs={"made": "here"})
    every = denoise(dataset, {"w": 5.0, "grey": 5.0}, **FAST)
    assert (every.attrs, every["grey"].dtype, every["text"].identical(dataset["text"])) == (
        {"made": "here"},
        "u1",
        True,
    )
    assert every["w"].isnull().identical(given.isnull())
    assert float(every["grey"].std()) < 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (pandas.DataFrame({"a": ["x"]}), "DataFrame of columns without numbers .'a'."),
        (pandas.Series(["x"]), "Series of .*, expected numbers"),
        (xarray.Dataset({"k": ("q", ["a"])}), "Dataset of 'k' without numbers"),
        (pandas.Series([np.nan] * 9), "no sample that is a number"),
    ],
)
def test_what_holds_no_numbers_is_refused_by_name(given: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        denoise(given)
