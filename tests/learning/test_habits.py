"""What users of scikit-learn's label propagation, spectral clustering and spectral embedding count on."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import coo_array, csc_array, csc_matrix, csr_array, csr_matrix

pytest.importorskip("sklearn", reason="scikit-learn is an extra: pip install 'nlflow[learning]'")

from sklearn.cluster import KMeans
from sklearn.datasets import make_blobs, make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.manifold import SpectralEmbedding
from sklearn.metrics import adjusted_rand_score
from sklearn.metrics.pairwise import pairwise_distances, rbf_kernel
from sklearn.model_selection import train_test_split
from sklearn.neighbors import NearestNeighbors

from nlflow import InputError, NlflowWarning
from nlflow.learning import (
    DiffusionMap,
    HarmonicClassifier,
    HarmonicRegressor,
    LabelSpreading,
    PLaplacianClassifier,
    PoissonClassifier,
    choose,
    choose_width,
    spectral_clustering,
)

CLASSIFIERS = [LabelSpreading, HarmonicClassifier, PoissonClassifier, PLaplacianClassifier]
PROBABLE = [LabelSpreading, HarmonicClassifier]
DTYPES = [np.float32, np.float64]


def ways(gamma: float) -> list[dict[str, Any]]:
    return [
        {"affinity": "rbf", "gamma": gamma},
        {"affinity": "knn", "n_neighbors": 2},
        {"affinity": lambda x, y: rbf_kernel(x, y, gamma=gamma)},
    ]


# Sources and p-functionals do not converge where weights span more digits than floats have.
CASES = [
    (kind, way, dtype)
    for kind, dtype in itertools.product(CLASSIFIERS, DTYPES)
    for way in ways(20.0 if kind in PROBABLE else 1.0)
]
BLOBS = make_blobs(60, 2, centers=np.array([[1, 1], [-1, -1], [1, -1]]) + 10, cluster_std=0.4, random_state=0)
SPREAD = make_blobs(300, 5, centers=np.eye(5)[:3] * 5.0, random_state=42)


# ---- labels


@pytest.mark.parametrize(("kind", "way", "dtype"), CASES)
def test_the_nearer_label_wins(kind: Any, way: Any, dtype: Any) -> None:
    x = np.asarray([[1.0, 0.0], [0.0, 2.0], [1.0, 3.0]], dtype=dtype)
    for given in (x, csr_array(x), csr_matrix(x), csc_array(x), csc_matrix(x)):
        model = kind(**way).fit(given, [0, 1, -1])
        assert model.transduction_[2] == 1
        assert model.predict([[0.5, 2.5]]).tolist() == [1]
        assert model.label_distributions_.dtype == dtype


@pytest.mark.parametrize("kind", PROBABLE)
@pytest.mark.parametrize("way", ways(20.0)[::2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_as_far_from_both_is_half_of_each(kind: Any, way: Any, dtype: Any) -> None:
    """Weights of e^-20, beside which those of a point and itself would leave no digit in float32."""
    model = kind(**way).fit(np.array([[1, 0], [0, 1], [1, 1]], dtype), [0, 1, -1])
    assert model.label_distributions_[2] == pytest.approx([0.5, 0.5], abs=1e-12)
    assert model.predict_proba(np.array([[0.5, 0.5]], dtype))[0] == pytest.approx([0.5, 0.5], abs=1e-12)


@pytest.mark.parametrize("convert", [np.asarray, csr_array])
def test_loops_have_no_part(convert: Any) -> None:
    """Whatever a point weighs beside itself; what no weight can be is named there too."""
    W = rbf_kernel(BLOBS[0], gamma=1.0)
    y = np.where(np.arange(60) < 9, BLOBS[1], -1)
    found = []
    for loop in (0.0, 1.0, 1e9):
        np.fill_diagonal(W, loop)
        models = [kind("precomputed").fit(convert(W), y) for kind in PROBABLE]
        found.append([model.label_distributions_ for model in models])
        found[-1].append(spectral_clustering(convert(W), 3, affinity="precomputed"))
    assert all(np.array_equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    for bad in (-1.0, math.nan, math.inf):
        np.fill_diagonal(W, bad)
        with pytest.raises(InputError, match=r"^X: (got|Input X contains)"):
            LabelSpreading("precomputed").fit(convert(W), y)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("way", ["rbf", "callable", "precomputed"])
def test_label_spreading_is_its_closed_form(alpha: float, way: str) -> None:
    X, y = make_classification(n_classes=2, n_samples=200, random_state=0)
    y[::3] = -1
    W = rbf_kernel(X, gamma=0.1)
    np.fill_diagonal(W, 0)
    root = np.sqrt(W.sum(axis=1))
    expected = np.linalg.solve(np.eye(200) - alpha * W / np.outer(root, root), np.eye(2)[y] * (y >= 0)[:, None])
    expected /= expected.sum(axis=1, keepdims=True)
    given = {"rbf": {"affinity": "rbf", "gamma": 0.1}, "precomputed": {"affinity": "precomputed"},
             "callable": {"affinity": lambda a, b: rbf_kernel(a, b, gamma=0.1)}}[way]  # fmt: skip
    model = LabelSpreading(alpha=alpha, **given).fit(W if way == "precomputed" else X, y)
    assert np.abs(model.label_distributions_ - expected).max() < 1e-10


def test_propagation_is_its_closed_form() -> None:
    X, y = make_classification(n_classes=2, n_samples=200, random_state=0)
    y[::3] = -1
    W = rbf_kernel(X, gamma=0.1)
    T, free = W / W.sum(axis=1, keepdims=True), y < 0
    expected = np.linalg.solve(np.eye(free.sum()) - T[np.ix_(free, free)], T[np.ix_(free, ~free)] @ np.eye(2)[y[~free]])
    model = HarmonicClassifier(lambda a, b: rbf_kernel(a, b, gamma=0.1)).fit(X, y)
    assert np.abs(model.label_distributions_[free] - expected).max() < 1e-10


def test_few_iterations_do_and_too_few_are_told() -> None:
    X, y = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 2.5]]), [0, 1, -1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = LabelSpreading("rbf", gamma=20.0, max_iter=500).fit(X, y)
    assert model.n_iter_ < 20
    assert model.transduction_.tolist() == [0, 1, 1]
    grown = np.random.default_rng(0).normal(size=(80, 2))
    with pytest.warns(ConvergenceWarning, match="raise max_iter or tol, or use a smaller alpha"):
        model = LabelSpreading("rbf", gamma=1.0, alpha=0.7, max_iter=1).fit(grown, np.arange(80) % 4 - 1)
    assert model.n_iter_ == 1


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_twins_without_a_label_divide_nothing_by_zero(kind: Any) -> None:
    X = np.array([[100.0, 100.0], [100.0, 100.0], [0.0, 0.0], [0.0, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        warnings.simplefilter("ignore", NlflowWarning)  # of a part without a label
        found = kind(n_neighbors=1).fit(X, [0, 1, -1, -1]).transduction_
    assert found[2:].tolist() == [-1, -1]


@pytest.mark.parametrize("kind", [LabelSpreading, HarmonicClassifier])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_function_may_return_few_weights(kind: Any, dtype: Any) -> None:
    """Those of the ten nearest, as scikit-learn is given them: of shape (N, M), not symmetric."""

    def nearest(x: Any, y: Any) -> Any:
        W = NearestNeighbors(n_neighbors=10).fit(x).kneighbors_graph(y, mode="distance").power(2) * -1e-5
        np.exp(W.data, out=W.data)
        return W.T

    X, y = make_classification(
        n_classes=4, n_samples=500, n_features=20, n_informative=20, n_redundant=0, random_state=0
    )
    few, new, known, others = train_test_split(X.astype(dtype), y, test_size=10, random_state=0)
    model = kind(nearest).fit(few, known)
    assert model.score(new, others) >= 0.9
    assert model.predict_proba(new).dtype == dtype
    assert "weights of nearest" in model.reason_


BAD: dict[str, tuple[Any, str]] = {
    "negative": (lambda a, b: -rbf_kernel(a, b), "the function returned negative, NaN or infinite weights"),
    "nan": (lambda a, b: rbf_kernel(a, b) * np.nan, "the function returned negative, NaN or infinite weights"),
    "shape": (lambda a, b: rbf_kernel(a, b)[:-1], r"the function returned shape \(59, 60\) for 60 and 60 points"),
    "words": (lambda a, b: "near", "the function returned <U4, expected real numbers"),
    "complex": (lambda a, b: rbf_kernel(a, b) * 1j, "the function returned complex128"),
    "masked": (lambda a, b: np.ma.masked_less(rbf_kernel(a, b), 0.1), "got a masked array"),
}


@pytest.mark.parametrize("name", BAD)
def test_functions_without_weights_are_named(name: str) -> None:
    function, told = BAD[name]
    with pytest.raises(InputError, match=f"^affinity: {told}"):
        HarmonicClassifier(function).fit(BLOBS[0], np.where(np.arange(60) < 9, BLOBS[1], -1))


@pytest.mark.parametrize("kind", CLASSIFIERS)
@pytest.mark.parametrize("metric", ["cosine", "correlation", "jaccard", "precomputed"])
def test_metrics_in_estimators(kind: Any, metric: str) -> None:
    rng = np.random.default_rng(0)
    topic = np.arange(90) % 3
    X = rng.poisson(np.where(np.arange(40) // 14 == topic[:, None], 2.0, 0.1)).astype(float)
    X[:, :2] = rng.random((90, 2))  # so that no row is without words, or constant
    y = np.where(np.arange(90) < 9, topic, -1)
    given = pairwise_distances(X) if metric == "precomputed" else X
    model = kind(metric=metric, search="brute").fit(given, y)
    assert (model.transduction_ == topic).mean() > 0.9
    assert (model.predict(given) == topic).mean() > 0.9
    assert model.reason_.endswith("distances were given" if metric == "precomputed" else "as asked for")
    if metric != "precomputed":
        sparse = kind(metric=metric).fit(csr_array(X), y)
        assert np.abs(sparse.label_distributions_ - model.label_distributions_).max() < 1e-6


def test_distances_and_parameters_that_cannot_be_are_named() -> None:
    X, y = BLOBS[0], np.where(np.arange(60) < 9, BLOBS[1], -1)
    D = pairwise_distances(X)
    for given, words, told in (
        (D[:, :30], {"metric": "precomputed"}, r"X: got shape \(60, 30\) with metric='precomputed', .* of distances"),
        (-D, {"metric": "precomputed"}, "X: got 3540 negative, infinite or NaN entries with metric='precomputed'"),
        (X * 0, {"metric": "cosine"}, "X: got 60 rows that are 0 in all columns"),
        (X, {"affinity": "rbf", "metric": "cosine"}, "metric: got 'cosine' with affinity='rbf', in which it has no"),
        (X, {"gamma": 20.0}, "gamma: got 20.0 with affinity='knn', in which it has no part; leave it out, or pass"),
        (X, {"affinity": "rbf", "n_neighbors": 3}, "n_neighbors: got 3 with affinity='rbf', in which it has no part"),
        (X, {"affinity": "rbf", "keep": "both"}, "keep: got 'both' with affinity='rbf', in which it has no part"),
        (X, {"affinity": "rbf", "search": "tree"}, "search: got 'tree' with affinity='rbf', in which it has no part"),
        (X, {"balance": "mass"}, "balance: got 'mass' without class_prior, in which it has no part"),
        (X, {"missing": 0}, "missing: got 0, expected -1, or None, NaN or NA"),
    ):
        with pytest.raises(InputError, match=f"^{told}"):
            LabelSpreading(**words).fit(given, y)
    model = LabelSpreading(metric="precomputed").fit(D, y)
    with pytest.raises(
        InputError, match=r"^X: got shape \(3, 2\) with metric='precomputed', expected rows of distances"
    ):
        model.predict(X[:3])


@pytest.mark.parametrize("keep", ["either", "both"])
def test_union_and_mutual_neighbours(keep: str) -> None:
    X, y = SPREAD
    y = np.where(np.arange(300) < 30, y, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # points that nobody has among its nearest
        model = HarmonicClassifier(keep=keep).fit(X, y)
    W = model.affinity_.edges()
    there = NearestNeighbors(n_neighbors=10).fit(X).kneighbors_graph().toarray() > 0
    assert np.array_equal(W.toarray() > 0, there & there.T if keep == "both" else there | there.T)


def test_neighbours_are_all_others_where_these_are_few() -> None:
    assert LabelSpreading().fit(BLOBS[0][:5], [0, 1, -1, -1, -1]).affinity_.edges().nnz == 20
    assert DiffusionMap(1, "knn").fit(BLOBS[0][:5]).embedding_.shape == (5, 1)
    assert spectral_clustering(BLOBS[0][:5], 2).shape == (5,)


# ---- labels that are missing, scores, words


def test_samples_without_a_label_as_one_likes() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is an extra")
    X, names = BLOBS
    known = np.arange(60) < 9
    exact = HarmonicClassifier().fit(X, np.where(known, names, -1))
    words = np.array(["a", "b", "c"])[names]
    for mark in (None, math.nan, pandas.NA):
        objects = np.where(known, words.astype(object), None)
        for y in (
            np.where(known, names.astype(float), np.nan),
            np.where(known, names.astype(object), None),
            objects,
            np.where(known, words.astype(object), pandas.NA),
            pandas.Series(objects, dtype="category"),
            pandas.Series(objects, dtype="string"),
            pandas.Series(np.where(known, names, np.nan)).astype("Int64"),
        ):
            model = HarmonicClassifier(missing=mark).fit(X, y)
            assert np.array_equal(model.label_distributions_, exact.label_distributions_)
            assert np.array_equal(model.labelled_, known)
    signs = HarmonicClassifier(missing=None).fit(X, np.where(known, np.where(names == 0, -1.0, 1.0), np.nan))
    assert signs.classes_.tolist() == [-1, 1]  # without a warning
    curve = choose(HarmonicClassifier(missing=None), X, objects, "fidelity", [1.0], folds=2)
    plain = choose(HarmonicClassifier(), X, np.where(known, names, -1), "fidelity", [1.0], folds=2)
    assert np.array_equal(curve.scores, plain.scores)
    with pytest.raises(InputError, match=r"^y: got no labelled sample \(all are None, NaN or NA\)"):
        HarmonicClassifier(missing=None).fit(X, np.full(60, np.nan))


@pytest.mark.parametrize(
    ("missing", "y", "expected"),
    [
        (-1, [0, 1, -1, -1, -1, -1], -1),
        (None, [0.0, 1.0, *[math.nan] * 4], math.nan),
        (None, ["a", "b", *[None] * 4], None),
    ],
)
def test_what_no_label_reaches_gets_the_same_mark(missing: Any, y: Any, expected: Any) -> None:
    X = np.array([[0.0], [1.0], [0.4], [50.0], [51.0], [52.0]])
    with pytest.warns(NlflowWarning, match="3 samples .* they get no class or value"):
        found = PoissonClassifier(n_neighbors=2, missing=missing).fit(X, y)
    for value in (*found.transduction_[3:], found.predict([[50.5]])[0]):
        assert value is expected or value == expected or (expected != expected and value != value)


def test_probabilities_of_poisson_learning_have_the_order_of_its_scores() -> None:
    X, y = SPREAD
    model = PoissonClassifier().fit(X, np.where(np.arange(300) < 30, y, -1))
    shares, scores = model.predict_proba(X), model.decision_function(X)
    assert np.abs(shares.sum(axis=1) - 1).max() < 1e-14
    assert shares.min() > 0
    assert np.array_equal(np.argsort(shares, axis=1), np.argsort(scores, axis=1))
    assert np.array_equal(model.classes_[shares.argmax(axis=1)], model.predict(X))
    raised = np.exp(scores / np.sqrt((model.label_distributions_**2).mean()))
    assert np.abs(shares - raised / raised.sum(axis=1, keepdims=True)).max() < 1e-12
    W = model.affinity_.edges()
    heavy = PoissonClassifier("precomputed").fit(1e3 * W, np.where(np.arange(300) < 30, y, -1))
    light = PoissonClassifier("precomputed").fit(W, np.where(np.arange(300) < 30, y, -1))
    assert np.abs(heavy.predict_proba(W) - light.predict_proba(W)).max() < 1e-7


def test_verbose_says_how_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    X, y = SPREAD
    HarmonicClassifier().fit(X, np.where(np.arange(300) < 30, y, -1))
    assert capsys.readouterr() == ("", "")
    HarmonicClassifier(verbose=True).fit(X, np.where(np.arange(300) < 30, y, -1))
    DiffusionMap(verbose=True).fit(X)
    spectral_clustering(X, 2, verbose=True)
    out, told = capsys.readouterr()
    assert out == ""
    graph, solved, mapped, parted = told.splitlines()
    assert parted.startswith("spectral_clustering: 300 samples, sparse: ")
    assert graph.startswith("HarmonicClassifier: 300 samples, sparse: ")
    assert "neighbours by a tree" in graph
    assert solved.startswith("HarmonicClassifier: ")
    assert mapped.startswith("DiffusionMap: 300 samples, dense: ")


@pytest.mark.parametrize("kind", [*CLASSIFIERS, HarmonicRegressor, DiffusionMap])
def test_single_precision_stays(kind: Any) -> None:
    X = np.random.default_rng(0).normal(size=(300, 5))
    labels = np.where(np.arange(300) < 30, X[:, 0] > 0, -1)
    targets = np.where(labels < 0, np.nan, labels) if kind is HarmonicRegressor else labels
    way = {"affinity": "knn", "n_neighbors": 30}
    found, exact = kind(**way).fit(X.astype(np.float32), targets), kind(**way).fit(X, targets)
    for name in ("label_distributions_", "embedding_", "transduction_"):
        if hasattr(found, name) and not (name == "transduction_" and kind in CLASSIFIERS):
            single, double = getattr(found, name), getattr(exact, name)
            assert (single.dtype, double.dtype) == (np.float32, np.float64)
            turned = np.sign((single * double).sum(axis=0)) if kind is DiffusionMap else 1
            assert np.abs(single * turned - double).max() < 1e-3 * np.abs(double).max()
    for name in ("predict_proba", "transform", "decision_function"):
        if hasattr(found, name):
            assert getattr(found, name)(X[:9].astype(np.float32)).dtype == np.float32


def test_a_prediction_of_one_point_rebuilds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = SPREAD
    for search in ("tree", "brute"):
        model = HarmonicClassifier(search=search).fit(X, np.where(np.arange(300) < 30, y, -1))
        first = model.predict_proba(X[:1] + 0.1)
        with monkeypatch.context() as patch:
            patch.setattr("scipy.spatial.cKDTree", None)
            patch.setattr("nlflow.affinities.distances.Space.__init__", None)
            assert np.array_equal(model.predict_proba(X[:1] + 0.1), first)


# ---- clusters and coordinates


@pytest.mark.parametrize("convert", [np.asarray, csr_array, coo_array])
def test_two_cliques_with_a_bridge_are_two_clusters(convert: Any) -> None:
    S = np.zeros((7, 7))
    S[:3, :3] = S[3:, 3:] = 1.0
    S[:3, 3] = S[3, :3] = 0.2
    found = spectral_clustering(convert(S), 2, affinity="precomputed")
    assert adjusted_rand_score(found, [0, 0, 0, 1, 1, 1, 1]) == 1
    assert np.array_equal(found, spectral_clustering(convert(S), 2, affinity="precomputed"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", [0, 7])
def test_blobs_are_clusters_by_any_affinity(dtype: Any, seed: int) -> None:
    X, y = make_blobs(20, random_state=seed, centers=[[1, 1], [-1, -1]], cluster_std=0.01)
    X = X.astype(dtype)
    D = pairwise_distances(X)
    ways: list[tuple[Any, dict[str, Any]]] = [
        (X, {"affinity": "rbf", "gamma": 2.0}),
        (X, {}),  # whose parts are the clusters
        (np.maximum(rbf_kernel(X, gamma=1.0) - 1e-4, 0), {"affinity": "precomputed"}),
        (coo_array(np.maximum(rbf_kernel(X, gamma=1.0) - 1e-4, 0)), {"affinity": "precomputed"}),
        (D.max() - D, {"affinity": "precomputed"}),
        (X, {"affinity": lambda a, b: np.minimum(a[:, None] + 3, b + 3).sum(axis=-1)}),
        (D, {"metric": "precomputed"}),
    ]
    for given, way in ways:
        assert adjusted_rand_score(y, spectral_clustering(given, 2, **way)) == 1


def test_more_stored_neighbours_change_nothing() -> None:
    X, y = make_blobs(300, random_state=1, centers=[[5, 5, 5], [-5, -5, -5]], cluster_std=0.01)
    found = [
        spectral_clustering(
            NearestNeighbors(n_neighbors=n).fit(X).kneighbors_graph(mode="distance"), 2, metric="precomputed"
        )
        for n in (10, 20)
    ]
    assert np.array_equal(*found)
    assert adjusted_rand_score(y, found[0]) == 1


def test_a_graph_in_several_parts_is_told() -> None:
    X, _ = make_blobs(90, random_state=0, centers=[[0, 0], [50, 0], [0, 50]], cluster_std=0.1)
    with pytest.warns(NlflowWarning, match=r"^X: got points in 3 parts .* \(sizes 30, 30, 30\) for 2 clusters") as told:
        spectral_clustering(X, 2)
    assert told[0].filename == __file__
    spectral_clustering(X, 3)  # the parts are the clusters: nothing to say


@pytest.mark.parametrize("each", [30, 500])
def test_a_map_of_a_graph_in_several_parts_tells_them_apart(each: int) -> None:
    """By eigenvectors of 1, of which the constant is one: distances of parts are those of their probabilities."""
    X, y = make_blobs(3 * each, random_state=0, centers=[[0, 0], [50, 0], [0, 50]], cluster_std=0.1)
    with pytest.raises(InputError, match=r"^X: got points in 3 parts .* expected one; .*, n_components >= 2, or map"):
        DiffusionMap(1, "knn", n_neighbors=10).fit(X)
    with pytest.warns(NlflowWarning, match=r"^X: got points in 3 parts .*: the first 2 coordinates are") as told:
        model = DiffusionMap(3, "knn", n_neighbors=10).fit(X)
    assert told[0].filename == __file__
    places = model.embedding_[[np.argmax(y == part) for part in range(3)], :2]
    assert np.abs(model.embedding_[:, :2] - places[y]).max() < 1e-9
    assert model.eigenvalues_[:2] == pytest.approx([1, 1], abs=1e-12)
    assert model.eigenvalues_[2] < 1 - 1e-6
    law = model.affinity_.degree / model.affinity_.degree.sum()  # alpha = 1 has quadrature weights
    law = law * model.affinity_.domain.weights / (law @ model.affinity_.domain.weights)
    mass = np.bincount(y, law)
    # Functions of parts, orthonormal in the law: sum_k psi_k(a) psi_k(b) = [a = b] / mass_a, with psi_0 = 1.
    assert np.abs(places @ places.T + 1 - np.diag(1 / mass)).max() < 1e-9
    assert np.abs(model.transform(X[:9] + 0.01)[:, :2] - places[y[:9]]).max() < 1e-9


def test_clusters_that_are_a_choice_of_many_are_told() -> None:
    """All pairs alike: every eigenvalue but the first is the same."""
    with pytest.warns(NlflowWarning, match=r"^n_clusters: got 3, which parts equal eigenvalues") as told:
        spectral_clustering(np.ones((9, 9)), 3, affinity="precomputed")
    assert told[0].filename == __file__
    with pytest.raises(InputError, match=r"^tol: got None"):
        spectral_clustering(np.ones((9, 9)), 3, affinity="precomputed", tol=None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_embedding_is_that_of_scikit_learn(dtype: Any) -> None:
    """Up to a factor, coordinates of the plain walk (alpha = 0, t = 0) are its eigenvectors of I - D^-1 W."""
    X = SPREAD[0].astype(dtype)
    theirs = SpectralEmbedding(n_components=2, affinity="rbf", gamma=0.2, random_state=0).fit_transform(X)
    ways: list[tuple[Any, Any]] = [
        (X, {"affinity": "rbf", "gamma": 0.2}),
        (X, {"affinity": lambda a, b: rbf_kernel(a, b, gamma=0.2)}),
        (rbf_kernel(X, gamma=0.2), {"affinity": "precomputed"}),
        (csr_array(rbf_kernel(X, gamma=0.2)), {"affinity": "precomputed"}),
    ]
    for given, way in ways:
        ours = DiffusionMap(2, alpha=0.0, t=0.0, **way).fit_transform(given)
        assert ours.dtype == dtype
        scale = (ours * theirs).sum(axis=0) / (theirs**2).sum(axis=0)
        # scikit-learn takes the loops out of the walk, which moves its eigenvectors a little.
        assert np.abs(ours - scale * theirs).max() < 0.1 * np.abs(ours).max()
        assert np.array_equal(ours, DiffusionMap(2, alpha=0.0, t=0.0, **way).fit_transform(given))


def test_two_components_with_a_bridge_are_told_by_the_sign() -> None:
    rng = np.random.default_rng(0)
    W = np.zeros((40, 40))
    for part in (slice(0, 20), slice(20, 40)):
        W[part, part] = np.abs(rng.normal(size=(20, 20))) + 2
    W[0, 21] = W[21, 0] = 1
    np.fill_diagonal(W, 0)
    side = DiffusionMap(1, "precomputed").fit_transform((W + W.T) / 2)[:, 0] > 0
    assert adjusted_rand_score(side, np.arange(40) < 20) == 1


@pytest.mark.parametrize("way", [{"affinity": "rbf"}, {"affinity": "knn", "n_neighbors": 60}])
def test_clusters_of_coordinates(way: Any) -> None:
    X, y = make_blobs(300, 5, centers=np.eye(5)[:3] * 4.0, random_state=42)
    found = KMeans(3, n_init=10, random_state=0).fit_predict(DiffusionMap(2, **way).fit_transform(X))
    assert adjusted_rand_score(found, y) > 0.9


def test_models_are_sent_to_other_processes() -> None:
    X, y = SPREAD
    for kind in (*CLASSIFIERS, DiffusionMap):
        model = kind().fit(X, np.where(np.arange(300) < 30, y, -1))
        # An object of this process, in this process; files are never read so.
        again = pickle.loads(pickle.dumps(model))
        ask = "predict" if kind in CLASSIFIERS else "transform"
        assert np.array_equal(getattr(again, ask)(X[:9]), getattr(model, ask)(X[:9]))


# ---- the width


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_the_curve_of_widths_knows_the_dimension(dimension: int) -> None:
    x = np.random.default_rng(0).normal(size=(1000, dimension))
    curve = choose_width(np.column_stack([x, np.zeros((1000, 3))]))
    # Sums of Gaussians between normal points: (1 + 2 / sigma^2)^(-d / 2), and 1 / N for each point itself.
    exact = (1 + 2 / curve.widths**2) ** (-dimension / 2) * 999 / 1000 + 1 / 1000
    assert np.abs(curve.sums / exact - 1).max() < 0.15
    assert curve.dimension == pytest.approx(dimension, rel=0.2)
    assert np.diff(curve.widths).min() > 0
    assert curve.gamma == pytest.approx(1 / (2 * curve.best**2))
    model = LabelSpreading("rbf").fit(x, np.where(np.arange(1000) < 20, x[:, 0] > 0, -1))
    assert model.affinity_.kernel.width == pytest.approx(choose_width(x).best)


def test_widths_of_points_at_one_place() -> None:
    assert choose_width(np.ones((5, 2))).best > 0
    assert choose_width(np.repeat([[0.0], [1.0]], [30, 3], axis=0)).best < 3
    with pytest.raises(InputError, match=r"^samples: got 1"):
        choose_width(np.ones((5, 2)), samples=1)


@pytest.mark.parametrize("size", [1e-200, 1e-80, 1e80, 1e200])
def test_widths_whose_squares_are_no_floats_are_refused(size: float) -> None:
    X, y = size * BLOBS[0], np.where(np.arange(60) < 9, BLOBS[1], -1)
    for call in (lambda: choose_width(X), lambda: LabelSpreading("rbf").fit(X, y), lambda: DiffusionMap().fit(X)):
        with pytest.raises(InputError, match=r"^X: got points at distances of about .*scale them"):
            call()
    found = [LabelSpreading("rbf").fit(X / size * much, y).transduction_ for much in (1e50, 1.0)]
    assert np.array_equal(*found)


# ---- memory


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["neighbour_graph, all pairs", "HarmonicClassifier", "metastable_sets, all pairs", "stationary"]
)
def test_the_peak_stays_below_the_least_limit_that_is_accepted(what: str) -> None:
    """In a process of its own, which holds what it loaded before it begins; `python -m benchmarks.graphs` has all."""
    command = [sys.executable, "-m", "benchmarks.graphs", "--memory", what]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0.2 * found["limit"] < found["peak"] < 1.1 * found["limit"]
