"""Metrics of graphs of neighbours, and ways to find these, held against SciPy's distances."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.spatial.distance import cdist

import nlflow as nl
from nlflow import Gaussian, InputError
from nlflow.affinities import distances, nearest

POINTS = np.random.default_rng(0).normal(size=(150, 12)) * (np.random.default_rng(1).random((150, 12)) < 0.7)
WIDE = np.zeros((150, 200))
WIDE[np.repeat(np.arange(150), 15), np.random.default_rng(2).integers(0, 200, 2250)] = np.random.default_rng(3).random(
    2250
)
METRICS = ("euclidean", "cosine", "correlation", "jaccard")


def true_distances(x: Any, y: Any, metric: str) -> Any:
    return cdist(x != 0, y != 0, "jaccard") if metric == "jaccard" else cdist(x, y, metric)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("search", ["auto", "tree", "brute"])
@pytest.mark.parametrize("kind", [np.asarray, csr_array])
@pytest.mark.parametrize("x", [POINTS, WIDE], ids=["narrow", "wide"])
def test_the_nearest_are_those_of_scipy(metric: str, search: str, kind: Any, x: Any) -> None:
    if search == "tree" and (metric == "jaccard" or (kind is csr_array and x is WIDE)):
        with pytest.raises(InputError, match=r"^search: got 'tree' for .*, expected 'auto' or 'brute'"):
            nearest.nearest_neighbours(kind(x), 7, search, metric=metric)
        return
    near = nearest.nearest_neighbours(kind(x), 7, search, metric=metric)
    found, ends = near.found
    apart = true_distances(x, x, metric)
    np.fill_diagonal(apart, np.inf)
    unit = near._space.unit
    # By their distances, since sets have many ties; of unit rows these have the digits of squared differences.
    assert np.abs(found * unit - np.sort(apart, axis=1)[:, :7]).max() < 1e-13
    assert np.abs(found * unit - np.take_along_axis(apart, ends, axis=1)).max() < 1e-13
    assert (np.diff(np.sort(ends, axis=1), axis=1) > 0).all()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("x", [POINTS, WIDE], ids=["narrow", "wide"])
def test_others_meet_the_points_by_the_same_metric(metric: str, x: Any) -> None:
    new = np.where(x[:20] != 0, x[:20] + 0.1, 0)
    new[:, :3] = 0.5
    apart, scale = true_distances(new, x, metric), true_distances(x, x, metric)
    own, scales = np.sort(apart, axis=1)[:, 4], np.sort(scale, axis=1)[:, 5]
    for kind in (np.asarray, csr_array):
        weights, highest, _ = nearest.nearest_neighbours(kind(x), 5, metric=metric).rows(
            kind(new), Gaussian(width=0.5**0.5)
        )
        rows, columns = weights.nonzero()
        expected = np.exp(-(apart[rows, columns] ** 2) / own[rows] / scales[columns] - highest[rows])
        assert np.abs(np.asarray(weights[rows, columns]) - expected).max() < 1e-11


def test_near_points_of_far_ones_keep_their_digits() -> None:
    """Products of lengths 1 hide distances of 1e-9; differences do not."""
    rng = np.random.default_rng(4)
    x = np.repeat(rng.normal(size=(20, 30)), 5, axis=0) + 1e-9 * rng.normal(size=(100, 30))
    exact = np.sort(cdist(x, x), axis=1)[:, 1:4]
    for kind in (np.asarray, csr_array):
        near = nearest.nearest_neighbours(kind(x), 3, "brute")
        assert np.abs(near.found[0] * near._space.unit / exact - 1).max() < 1e-6


@pytest.mark.parametrize("size", [40, 700, 1001])
def test_the_smallest_of_rows(size: int) -> None:
    values = np.random.default_rng(size).integers(0, 500, (30, size)).astype(float)
    for count in (1, 7, 18, min(size, 60)):
        found = distances._smallest(values, count)
        assert (np.diff(np.sort(found, axis=1), axis=1) > 0).all()
        kept = np.sort(np.take_along_axis(values, found, axis=1), axis=1)
        assert np.array_equal(kept, np.sort(values, axis=1)[:, :count])


def test_distances_that_are_given() -> None:
    apart = cdist(POINTS, POINTS)
    expected = nl.neighbour_graph(POINTS, 6, Gaussian(width=0.5**0.5), local=True)
    stored = np.where(
        apart <= np.sort(apart, axis=1)[:, 9:10], apart, 0
    )  # of each row its nearest, one direction alone
    for given in (apart, csr_array(apart), csr_array(stored)):
        found = nl.neighbour_graph(given, 6, Gaussian(width=0.5**0.5), local=True, metric="precomputed")
        assert np.abs(found - expected).max() < 1e-12
    near = nearest.nearest_neighbours(apart, 6, metric="precomputed")
    points = nearest.nearest_neighbours(POINTS, 6)
    for given in (cdist(POINTS + 0.1, POINTS), csr_array(cdist(POINTS + 0.1, POINTS))):
        apart = near.rows(given, Gaussian(width=0.5**0.5))[0] - points.rows(POINTS + 0.1, Gaussian(width=0.5**0.5))[0]
        assert abs(apart).max() < 1e-11


SQUARE = cdist(POINTS[:9], POINTS[:9])


@pytest.mark.parametrize(
    ("given", "words", "told"),
    [
        (SQUARE, {"metric": "manhattan"}, "metric: got 'manhattan', expected one of"),
        (SQUARE[:5], {"metric": "precomputed"}, r"points: got shape \(5, 9\) .* expected a square matrix of distances"),
        (-SQUARE, {"metric": "precomputed"}, "points: got 72 negative, infinite or NaN entries"),
        (csr_array(-SQUARE), {"metric": "precomputed"}, "points: got 72 negative"),
        (SQUARE + np.triu(SQUARE), {"metric": "precomputed"}, "points: got distances that differ by up to"),
        (csr_array(SQUARE + np.triu(SQUARE)), {"metric": "precomputed"}, "points: got distances that differ by up to"),
        (np.exp(-SQUARE), {"metric": "precomputed"}, "points: got distances from 9 points to themselves .*weights are"),
        (csr_array(np.triu(SQUARE)), {"metric": "precomputed"}, r"points: got \d rows with fewer than 3 stored dist"),
        (SQUARE, {"metric": "precomputed", "search": "descent"}, "search: got 'descent' with metric='precomputed'"),
        (
            np.where(np.arange(9)[:, None] == 4, 0, SQUARE),
            {"metric": "cosine"},
            r"points: got 1 rows that are 0 in all",
        ),
        (SQUARE * 0 + 0.1, {"metric": "correlation"}, r"points: got 9 rows that are constant \(the first is 0\)"),
        (csr_array(np.tile(SQUARE * 0 + 0.1, 9)), {"metric": "correlation"}, r"points: got 9 rows that are constant"),
        (SQUARE + 1, {"metric": "jaccard"}, "points: got rows that are not 0 in the same columns, all of them"),
        (csr_array(SQUARE + 1), {"metric": "jaccard"}, "points: got rows that are not 0 in the same columns"),
        (SQUARE, {"search": "ball"}, "search: got 'ball'"),
    ],
)
def test_metrics_that_cannot_be_are_named(given: Any, words: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=f"^{told}"):
        nl.neighbour_graph(given, 3, **words)


def test_others_whose_distances_cannot_be_are_named() -> None:
    near = nearest.nearest_neighbours(SQUARE, 3, metric="precomputed")
    kernel = Gaussian(width=1.0)
    with pytest.raises(InputError, match=r"^X: got shape \(9, 8\), expected rows of distances to the points, \(M, 9\)"):
        near.rows(SQUARE[:, :8], kernel)
    with pytest.raises(InputError, match=r"^X: got 72 negative"):
        near.rows(-SQUARE, kernel)
    with pytest.raises(InputError, match=r"^X: got 1 rows that are 0"):
        nearest.nearest_neighbours(POINTS, 3, metric="cosine").rows(np.zeros((1, 12)), kernel)


def test_the_search_is_chosen_by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    flat = rng.normal(size=(300, 2)) @ rng.normal(size=(2, 40))
    for x, kind in ((flat, "tree"), (rng.normal(size=(300, 40)), "brute"), (csr_array(WIDE), "brute")):
        found = nearest.nearest_neighbours(x, 5)
        assert found._search == kind
        assert "effective dimensions" in found.reason or "sparse" in found.reason
    assert "as asked for" in nearest.nearest_neighbours(flat, 5, "brute").reason
    assert nearest.nearest_neighbours(WIDE, 5, metric="jaccard")._search == "brute"
    # Descent is taken where pairs are many and it is there.
    monkeypatch.setattr(distances, "_MANY", 100)
    monkeypatch.setitem(sys.modules, "pynndescent", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert nearest.nearest_neighbours(rng.normal(size=(300, 40)), 5)._search == "brute"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert nearest.nearest_neighbours(rng.normal(size=(300, 40)), 5)._search == "descent"


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("kind", [np.asarray, csr_array])
def test_descent_finds_most_of_the_nearest_by_any_metric(metric: str, kind: Any) -> None:
    pytest.importorskip("pynndescent", reason="pynndescent is optional")
    found = nearest.nearest_neighbours(kind(WIDE), 6, "descent", metric=metric).found[0]
    exact = nearest.nearest_neighbours(kind(WIDE), 6, metric=metric).found[0]
    assert (found <= exact[:, -1:] + 1e-12).mean() > 0.9
