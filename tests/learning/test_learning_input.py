"""What every public name of nlflow.learning does with input of all kinds: a right answer, or an error that names it."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.sparse import coo_array, csr_array

pytest.importorskip("sklearn", reason="scikit-learn is an extra: pip install 'nlflow[learning]'")

from sklearn.metrics.pairwise import rbf_kernel

import nlflow.learning
from nlflow import (
    Gaussian,
    Laplace,
    MemoryLimitError,
    NlflowError,
    NlflowWarning,
    affinity_from_graph,
    neighbour_graph,
)
from nlflow.learning import (
    HarmonicClassifier,
    HarmonicRegressor,
    LabelSpreading,
    PLaplacianRegressor,
    PoissonClassifier,
    ask_next,
    choose,
    log_evidence,
    spectral_clustering,
)
from nlflow.learning.balance import counts_of, factors, quotas, shifts

rng = np.random.default_rng(5)
SIDE = np.repeat([0, 1], 10)
X = np.column_stack([3.0 * SIDE, np.zeros(20)]) + rng.normal(0, 0.3, (20, 2))
Y = np.where(np.arange(20) % 5 == 0, SIDE, -1)
VALUES = np.where(Y < 0, np.nan, 1.0 * SIDE)
NAMES = [
    name for name in nlflow.learning.__all__ if name not in ("Curve", "Question", "WidthCurve")
]  # which are what others return
GRAPH = affinity_from_graph(np.exp(-((X[:, None] - X) ** 2).sum(axis=-1)) - np.eye(20))


def labels_for(name: str) -> Any:
    return VALUES if name.endswith("Regressor") else Y


def call(name: str, points: Any, y: Any = None, **words: Any) -> Any:
    """Return what a public name makes of points and labels: a class or number for each, or scores."""
    public = getattr(nlflow.learning, name)
    y = labels_for(name) if y is None else y
    if name == "spectral_clustering":
        return public(points, 2, **{"n_neighbors": 12, **words})
    if name == "choose_width":
        return public(points).widths
    if name == "choose":
        return public(
            HarmonicClassifier("knn", n_neighbors=12).set_params(**words), points, y, "fidelity", [1.0], folds=2
        )
    if name == "ask_next":
        model = HarmonicClassifier("knn", n_neighbors=12).set_params(**words).fit(points, y)
        return public(model, np.flatnonzero(np.ravel(y) != -1))
    if name == "log_evidence":
        model = HarmonicRegressor("knn", n_neighbors=12).set_params(**words).fit(points, VALUES)
        return public(model.affinity_, np.flatnonzero(Y >= 0), SIDE[Y >= 0], fidelity=1.0)
    model = public(n_components=1) if name == "DiffusionMap" else public()
    return model.set_params(**{"affinity": "knn", "n_neighbors": 12, **words}).fit(points, y)


def answer(result: Any) -> Any:
    """Return the numbers of a result."""
    for attribute in ("transduction_", "embedding_", "scores"):
        if hasattr(result, attribute):
            return np.asarray(getattr(result, attribute), np.float64)
    return np.asarray(result, np.float64)


def frame(points: Any) -> Any:
    return pytest.importorskip("pandas", reason="pandas is a part of the development environment").DataFrame(points)


SAME: dict[str, Callable[[Any], Any]] = {
    "lists": lambda a: a.tolist(),
    "frame": frame,
    "rows": csr_array,
    "places": coo_array,
    "fortran": np.asfortranarray,
    "swapped": lambda a: a.astype(a.dtype.newbyteorder("S")),
    "object": lambda a: a.astype(object),
}
WRONG: dict[str, Any] = {
    "line": X[:, 0],
    "volume": X[:, :, None],
    "number": 3.0,
    "none": None,
    "nothing": X[:0],
    "no column": X[:, :0],
    "one": X[:1],
    "nan": np.where(X > 3, np.nan, X),
    "inf": np.where(X > 3, np.inf, X),
    "sparse nan": csr_array(np.where(X > 3, np.nan, X)),
    "complex": X + 1j,
    "words": np.full((20, 2), "left"),
    "dicts": np.full((20, 2), {}),
    "ragged": [[1.0], [1.0, 2.0]] * 10,
    "dict": {"a": 1},
    "masked": np.ma.masked_greater(X, 3.0),
    "dates": np.full((20, 2), np.datetime64("2024-01-01")),
}
PARAMETERS: dict[str, list[Any]] = {
    "affinity": ["tree", None, 3, {}, X, Laplace],
    "gamma": ["scale", {}, 0, -1.0, np.nan, np.inf, 1e300, 1e-300, X],
    "n_neighbors": [0, -3, 2.5, "many", 20, 10**9, {}],
    "metric": ["manhattan", None, 3, np.dot],
    "search": ["ball", None, 3],
    "keep": ["directed", None, 3],
    "missing": [0, "none", {}, [-1], 10**400, np.timedelta64(3, "s")],
    "accuracy": ["high", -1.0, 0.0, 1.0, np.nan, {}],
    "tol": ["small", -1.0, np.nan, {}],
    "verbose": [X, "yes", None],
    "max_iter": [0, 1.5, "many", None],
    "memory_limit": ["1 GB", 0, -1, {}, np.nan],
    "alpha": ["half", -0.5, 1.5, np.nan, {}, None],
    "class_prior": [
        "even",
        [1, 2, 3],
        [1],
        [0, 1],
        [-1, 2],
        [np.nan, 1],
        {},
        {"a": 1},
        ["a", "b"],
        ["1", "2"],
        np.complex64(1j),
        3,
        [[1, 2]],
        "mass",
    ],
    "balance": ["weight", None, 3],
    "fidelity": ["large", 0.0, -1.0, np.nan, {}],
    "p": ["two", 1.0, np.nan, None, 1e9],
    "t": ["long", -1.0, np.nan],
    "n_components": [0, 1.5, "knn", 19],
    "n_clusters": [0, 1.5, "two", 21],
}


def refused(made: Callable[[], Any], *names: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(NlflowError) as told:
            made()
    assert str(told.value).startswith(names)


@pytest.mark.parametrize("name", NAMES)
def test_points_of_every_kind_are_the_same_points(name: str) -> None:
    plain = answer(call(name, X))
    for kind, made in SAME.items():
        assert np.abs(answer(call(name, made(X))) - plain).max() < 1e-9, kind
    whole = np.rint(10 * X)
    assert np.abs(answer(call(name, whole.astype(np.int64))) - answer(call(name, whole))).max() < 1e-9


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("affinity", ["knn", "rbf", "precomputed"])
def test_points_that_are_none_are_refused_by_name(name: str, affinity: str) -> None:
    for value in WRONG.values():
        refused(lambda v=value: call(name, v, affinity=affinity), "X:", "y:", "n_clusters: got 2, expected at most 1")


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("DiffusionMap", "spectral_clustering", "choose_width")]
)
def test_labels_that_are_none_are_refused_by_name(name: str) -> None:
    labels = labels_for(name)
    wrong = [labels[:-1], [], 3, {}, np.stack([labels] * 2)[None], np.full(20, np.inf), labels + 1j, [None] * 20,
             np.full(20, "x") if name.endswith("Regressor") else np.full((20, 2), 1),
             np.ma.masked_equal(labels, 1), [[1], [1, 2]] * 10]  # fmt: skip
    if name == "log_evidence":
        for values in wrong[1:5]:
            refused(lambda v=values: log_evidence(GRAPH, [0, 5, 10, 15], v, fidelity=1.0), "values:")
        return
    for value in wrong:
        refused(lambda v=value: call(name, X, v), "y:")


@pytest.mark.parametrize("name", NAMES)
def test_parameters_that_are_none_are_refused_by_name(name: str) -> None:
    public = getattr(nlflow.learning, name)
    there = inspect.signature(public).parameters
    if "affinity" not in there or name == "log_evidence":
        there = inspect.signature(HarmonicClassifier).parameters if name == "choose" else {}
    for parameter, values in PARAMETERS.items():
        if parameter not in there:
            continue
        used = {"gamma": {"affinity": "rbf"}}.get(parameter, {})
        for value in values:
            if parameter == "n_clusters":
                refused(lambda v=value: spectral_clustering(X, v), "n_clusters:")
            elif not (parameter == "fidelity" and name == "choose"):
                made = {**used, parameter: value}
                refused(lambda m=made: call(name, X, **m), f"{parameter}:", "X: got n_samples")


def test_numbers_of_few_bits_and_tolerances_of_nothing() -> None:
    found = [HarmonicClassifier("knn", n_neighbors=k).fit(X, Y).transduction_ for k in (12, np.int8(12))]
    np.testing.assert_array_equal(*found)
    for name in ("LabelSpreading", "HarmonicClassifier", "PLaplacianRegressor"):
        refused(lambda n=name: call(n, X, tol=0), "tol: got 0, expected a finite real number > 0")
    refused(lambda: call("LabelSpreading", X, alpha=1e-320), "alpha: got 1e-320")


def test_what_functions_are_given_besides() -> None:
    for model in (None, 3, X, HarmonicClassifier(), "knn"):
        refused(lambda m=model: ask_next(m, [0]), "model:")
    for labelled in (None, [], [20], [-1], [0.5], "a", [[0]], {}, np.ones(19, bool), [[0], [1, 2]]):
        refused(lambda v=labelled: ask_next(GRAPH, v), "labelled:")
        refused(lambda v=labelled: log_evidence(GRAPH, v, [1.0], fidelity=1.0), "labelled:")
    for seed in ("a", -1, {}):
        refused(lambda v=seed: ask_next(GRAPH, [0], rng=v), "rng:")
        refused(
            lambda v=seed: choose(HarmonicClassifier("knn", n_neighbors=12), X, Y, "fidelity", [1.0], folds=2, rng=v),
            "rng:",
        )
    for affinity in (None, X, "knn"):
        refused(lambda v=affinity: log_evidence(v, [0, 1, 2], [1.0, 2.0, 3.0], fidelity=1.0), "affinity:")
    apart = HarmonicClassifier("knn", n_neighbors=3).fit(X, Y).affinity_
    refused(
        lambda: log_evidence(apart, [0, 5, 10], [1.0, 2.0, 3.0], fidelity=1.0), "affinity: got 2 connected components"
    )
    for values in (3, None):
        refused(lambda v=values: choose(HarmonicClassifier("rbf"), X, Y, "gamma", v), "values:")
    for given in ([1.0, np.nan, 2.0], [0.1, 0.1, 0.1]):
        refused(lambda v=given: log_evidence(GRAPH, [0, 5, 10], v, fidelity=1.0), "values:")
    refused(lambda: log_evidence(GRAPH, [0, 5, 10], [1.0, 3.0, 2.0], fidelity=1e-320), "fidelity:")
    for size in (1e-200, 1e200):  # a scale is learned, so that the unit adds the same to each
        at = [log_evidence(GRAPH, [0, 5, 10], [size, 3 * size, -size], fidelity=phi) for phi in (1.0, 8.0)]
        one = [log_evidence(GRAPH, [0, 5, 10], [1.0, 3.0, -1.0], fidelity=phi) for phi in (1.0, 8.0)]
        assert at[1] - at[0] == pytest.approx(one[1] - one[0], abs=1e-9)
        assert at[0] == pytest.approx(one[0] - 2 * np.log(size))


def test_a_row_with_some_values_is_no_row_without() -> None:
    both = np.column_stack([VALUES, VALUES])
    both[5, 1] = np.nan
    for kind in (HarmonicRegressor, PLaplacianRegressor):
        refused(
            lambda k=kind: k("knn", n_neighbors=12).fit(X, both),
            "y: got 1 rows with some NaN and some values (the first is 5)",
        )
    refused(
        lambda: choose(HarmonicRegressor("knn", n_neighbors=12), X, both, "fidelity", [1.0], folds=2), "y: got 1 rows"
    )
    both[5] = np.nan
    model = HarmonicRegressor("knn", n_neighbors=12)
    assert model.fit(X, both).labelled_.tolist() == (~np.isnan(both[:, 0])).tolist()
    assert choose(model, X, both, "fidelity", [1.0], folds=3).scores.shape == (1, 3)
    assert HarmonicClassifier("knn", n_neighbors=12).fit(X, Y).labelled_.tolist() == (Y >= 0).tolist()


# --- weights that are symmetric up to rounding -----------------------------------------------------------------------


@pytest.mark.parametrize("convert", [np.asarray, csr_array, lambda K: K.astype(np.float32)])
@pytest.mark.parametrize("far", [0.0, 300.0])
def test_kernels_of_scikit_learn_are_symmetric(convert: Any, far: float) -> None:
    K = convert(rbf_kernel(np.random.default_rng(1).normal(far, 2.0, (60, 5)), gamma=1.0 if far == 0 else 0.1))
    W = K.toarray() if hasattr(K, "toarray") else K
    assert far or W.dtype == np.float32 or (W != W.T).any()
    mean = (W.astype(np.float64) + W.T) / 2
    y = np.where(np.arange(60) < 20, np.arange(60) % 3, -1)
    given, exact = (HarmonicClassifier("precomputed").fit(k, y) for k in (K, mean))
    assert np.abs(given.label_distributions_ - exact.label_distributions_).max() < (
        1e-4 if W.dtype == np.float32 else 1e-9
    )
    assert spectral_clustering(K, 3, affinity="precomputed").shape == (60,)


def test_weights_that_are_not_symmetric_are_none() -> None:
    W = np.exp(-((X[:, None] - X) ** 2).sum(axis=-1))
    for place, factor in (((0, 1), 1 + 1e-6), ((0, 15), 1.1), ((0, 1), 0.0)):
        wrong = W.copy()
        wrong[place] *= factor
        for kind in (wrong, csr_array(wrong)):
            refused(lambda k=kind: HarmonicClassifier("precomputed").fit(k, Y), "X: got weights that are not symmetric")
    refused(lambda: HarmonicClassifier("precomputed").fit(-W, Y), "X: ")
    nearly, exact = W.copy(), HarmonicClassifier("precomputed").fit(W, Y).label_distributions_
    nearly[0, 1] *= 1 + 1e-9  # far points have kernels with so few digits
    assert np.abs(HarmonicClassifier("precomputed").fit(nearly, Y).label_distributions_ - exact).max() < 1e-7


# --- shares of classes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [LabelSpreading, HarmonicClassifier, PoissonClassifier])
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_as_many_samples_as_were_asked_for_have_each_class(kind: Any, classes: int) -> None:
    own = np.random.default_rng(classes)
    points = own.normal(size=(300, 2))
    y = np.full(300, -1)
    y[: 3 * classes] = np.arange(3 * classes) % classes
    for prior in (np.ones(classes), np.arange(1.0, classes + 1) ** 2, np.array([40.0, *[1.0] * (classes - 1)])):
        model = kind("knn", class_prior=prior).fit(points, y)
        counts = np.bincount(model.transduction_[y < 0], minlength=classes)
        assert np.abs(counts - prior / prior.sum() * (y < 0).sum()).max() <= 1
        assert np.allclose(model.class_shares_, counts / counts.sum())
    assert np.bincount(model.predict(points[y < 0]), minlength=classes)[0] > 200


def test_shares_that_cannot_be_reached_are_told() -> None:
    twins = np.repeat(X[[0, 5, 10, 15]], [2, 40, 2, 40], axis=0) + 1e-3 * np.eye(2)[0]
    y = np.full(len(twins), -1)
    y[[0, 42]] = 0, 1
    edges = np.zeros((84, 84))
    edges[:42, :42] = edges[42:, 42:] = 1.0
    edges[0, 42] = edges[42, 0] = 0.1
    with pytest.warns(NlflowWarning, match=r"^class_prior: asked for shares of 0\.9, 0\.1 among 82.*reached"):
        model = HarmonicClassifier("precomputed", class_prior=[0.9, 0.1]).fit(edges, y)
    assert model.class_shares_ == pytest.approx(np.bincount(model.transduction_[y < 0]) / 82)
    assert abs(model.class_shares_[0] - 0.9) > 1 / 82
    refused(lambda: PoissonClassifier("knn", n_neighbors=12, class_prior=[1, 1], balance="mass").fit(X, Y), "balance:")


def test_shares_end_where_scores_underflow() -> None:
    """Far from all labels nothing of them is left; these samples have no part in what is weighed."""
    scores = np.zeros((40, 2))
    scores[:30] = np.random.default_rng(0).random((30, 2))
    found = factors(scores, np.array([10, 30]))
    assert np.bincount((scores * found)[:30].argmax(axis=1), minlength=2).tolist() == [8, 22]
    assert factors(scores[30:], np.array([5, 5])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("classes", [2, 3, 6])
def test_shifts_are_prices_of_the_best_assignment(classes: int) -> None:
    from scipy.optimize import linear_sum_assignment

    own = np.random.default_rng(classes)
    scores = own.normal(size=(90, classes)) ** 3 * own.choice([1e-3, 1.0], (90, 1))
    wanted = quotas(own.random(classes) + 0.05, 90)
    b = shifts(scores, wanted)
    assert counts_of(scores + b).tolist() == wanted.tolist()
    seats = np.repeat(np.arange(classes), wanted)
    rows, places = linear_sum_assignment(-scores[:, seats])
    assert ((scores + b).argmax(axis=1)[rows] == seats[places]).all()


# --- neighbours, and memory -------------------------------------------------------------------------------------------


def test_neighbours_of_sparse_rows_are_those_of_dense_ones(monkeypatch: Any) -> None:
    own = np.random.default_rng(3)
    words = csr_array((own.random(1200), (np.repeat(np.arange(60), 20), own.integers(0, 3000, 1200))), shape=(60, 3000))
    y = np.where(np.arange(60) < 12, np.arange(60) % 2, -1)
    sparse, dense = (HarmonicClassifier("knn").fit(kind, y) for kind in (words, words.toarray()))
    assert np.abs(sparse.label_distributions_ - dense.label_distributions_).max() < 1e-9
    others = words[:7] * 0.9
    for given in (others, others.toarray()):
        assert np.abs(sparse.predict_proba(given) - dense.predict_proba(others.toarray())).max() < 1e-9
    monkeypatch.setattr("scipy.spatial.cKDTree", None)  # nothing asks a tree in 3000 dimensions
    HarmonicClassifier("knn").fit(words, y).predict(others)


def test_the_tree_is_built_once(monkeypatch: Any) -> None:
    import scipy.spatial

    built, tree = [], scipy.spatial.cKDTree
    monkeypatch.setattr("scipy.spatial.cKDTree", lambda *a, **k: built.append(1) or tree(*a, **k))
    model = HarmonicClassifier("knn", n_neighbors=12).fit(X, Y)
    for k in range(5):
        model.predict(X[k : k + 1])
    assert len(built) == 1
    big = HarmonicClassifier("knn", n_neighbors=12).fit(1e200 * X, Y)  # squares overflow
    assert np.array_equal(big.predict(1e200 * X), model.predict(X))


def test_a_limit_counts_what_each_class_takes() -> None:
    few = np.random.default_rng(0).normal(size=(400, 2))
    y = np.arange(400) % 200
    for model, target in ((HarmonicClassifier, y), (PoissonClassifier, y), (HarmonicRegressor, np.ones((400, 200)))):
        refused(
            lambda m=model, t=target: m("knn", memory_limit=5e6).fit(few, t),
            "a graph of 400 samples with 10 neighbours each and 200 signals on it",
        )
        assert model("knn", memory_limit=2e7).fit(few, target).memory_limit == 2e7
    with pytest.raises(MemoryLimitError):
        HarmonicClassifier("knn", memory_limit=1e9).fit(few, y).set_params(memory_limit=1e6).predict(few)


def test_each_small_probability_keeps_its_digits() -> None:
    own = np.random.default_rng(1)
    points = own.normal(size=(500, 3))
    side = (points[:, 0] > 0) + 2 * (points[:, 1] > 0)
    y = np.where(np.arange(500) < 40, side, -1)
    for affinity, alpha in (("knn", 0.2), ("rbf", 0.5)):
        model = LabelSpreading(affinity, gamma=5.0 if affinity == "rbf" else None, alpha=alpha).fit(points, y)
        W = rbf_kernel(points, gamma=5.0)
        if affinity == "knn":
            W = neighbour_graph(points, 10, Gaussian(width=0.5**0.5), local=True).toarray()
        np.fill_diagonal(W, 0)
        root = np.sqrt(W.sum(axis=1))
        S, term = W / np.outer(root, root), np.eye(4)[np.maximum(y, 0)] * (y >= 0)[:, None]
        total = term.copy()
        for _ in range(int(60 - 35 / np.log(alpha))):  # a series of numbers >= 0, in which nothing cancels
            term = alpha * (S @ term)
            total += term
        exact = total / total.sum(axis=1, keepdims=True)
        assert exact.min() < 1e-3
        assert np.abs(model.label_distributions_ / exact - 1).max() < 1e-9


def test_damaged_sparse_points_are_refused() -> None:
    """Loops would follow their indices out of memory."""
    points = csr_array(np.random.default_rng(0).random((60, 300)))
    damaged = points.copy()
    damaged.indices[5] = 10**6
    labels = np.repeat([0, 1, -1], 20)
    fitted = LabelSpreading().fit(points, labels)
    for call in (lambda: fitted.predict(damaged), lambda: LabelSpreading().fit(damaged, labels)):
        with pytest.raises(nlflow.InputError, match="X: got a csr array that is damaged"):
            call()
