"""Diffusion maps, clusters, questions and the choice of parameters, against dense solutions and scikit-learn."""

import warnings

import numpy as np
import pytest
import scipy.linalg
from scipy.spatial.distance import cdist

pytest.importorskip("sklearn", reason="scikit-learn is an extra: pip install 'nlflow[learning]'")

from sklearn.cluster import SpectralClustering
from sklearn.datasets import make_moons, make_swiss_roll
from sklearn.metrics import adjusted_rand_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from nlflow import Gaussian, InputError, NlflowWarning, Points, TopHat, affinity, affinity_from_graph, neighbour_graph
from nlflow.learning import (
    DiffusionMap,
    HarmonicClassifier,
    HarmonicRegressor,
    LabelSpreading,
    PoissonClassifier,
    ask_next,
    choose,
    graphs,
    log_evidence,
    spectral_clustering,
)


@pytest.fixture(scope="module")
def roll():
    return make_swiss_roll(300, random_state=0)[0]


@pytest.mark.parametrize("t", [0.0, 1.0, 2.0, 2.5])
def test_negative_eigenvalues_have_coordinates_at_all_times(t):
    path = np.diag(np.ones(5), 1) + np.diag(np.ones(5), -1)
    found = DiffusionMap(4, "precomputed", alpha=0.0, t=t).fit(path)
    d = path.sum(axis=1)
    values, vectors = scipy.linalg.eigh(path / np.sqrt(np.outer(d, d)))
    values, vectors = values[-2:-6:-1], (vectors / np.sqrt(d / d.sum())[:, None])[:, -2:-6:-1]
    assert values.min() < -0.5
    assert np.abs(np.abs(found.embedding_) - np.abs(values) ** t * np.abs(vectors)).max() < 1e-12
    assert np.abs(found.transform(path) - found.embedding_).max() < 1e-12


@pytest.mark.slow
def test_contract_of_scikit_learn():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(DiffusionMap())


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("matrix", [True, False])
def test_diffusion_map_is_the_dense_one(roll, alpha, matrix, monkeypatch):
    if not matrix:
        monkeypatch.setattr(graphs, "DENSE_NODES", 10)
        monkeypatch.setattr("nlflow.affinities.pairs._DENSE_NODES", 10)
        monkeypatch.setattr("nlflow.markov.spectrum.DENSE_STATES", 10)
    k = np.exp(-0.05 * cdist(roll, roll, "sqeuclidean"))
    q = k.sum(axis=1)
    k /= np.outer(q, q) ** alpha
    d = k.sum(axis=1)
    values, vectors = scipy.linalg.eigh(k / np.sqrt(np.outer(d, d)))
    values, vectors = values[::-1][1:5], (vectors / np.sqrt(d / d.sum())[:, None])[:, ::-1][:, 1:5]
    found = DiffusionMap(4, gamma=0.05, alpha=alpha, t=2.0).fit(roll)
    assert (found.method_ == "dense") == matrix
    assert np.abs(found.eigenvalues_ - values).max() < 1e-7
    expected = vectors * values**2
    assert np.abs(np.abs(found.embedding_) - np.abs(expected)).max() < 1e-4
    assert found.residual_ < 1e-7
    assert np.abs(found.transform(roll[:20]) - found.embedding_[:20]).max() < 1e-5
    assert np.abs(found.density_ - q / q.mean()).max() < 1e-6


def test_diffusion_map_of_neighbours(roll):
    found = DiffusionMap(2, "knn", n_neighbors=12).fit(roll)
    assert found.method_ == "sparse"
    near = found.transform(roll[:50] + 1e-9)
    assert np.abs(near - found.embedding_[:50]).max() < 0.5 * np.abs(found.embedding_).max()
    with pytest.raises(InputError, match=r"in 2 parts .* \(sizes 200, 100\)"):
        DiffusionMap(2, "knn", n_neighbors=5, beta=-0.5).fit(np.concatenate([roll[:200], roll[:100] + 1e4]))
    with pytest.raises(InputError, match="alpha"):
        DiffusionMap(alpha=2.0).fit(roll)
    with pytest.raises(InputError, match="got an Affinity"):
        DiffusionMap(affinity=found.affinity_).fit(roll)


def unequal_circle(n):
    """Return points with the density 1 + 0.6 cos(angle), at its quantiles."""
    wanted = np.arange(n) / n * 2 * np.pi
    angle = wanted.copy()
    for _ in range(60):
        angle -= (angle + 0.6 * np.sin(angle) - wanted) / (1 + 0.6 * np.cos(angle))
    return np.column_stack([np.cos(angle), np.sin(angle)])


@pytest.mark.parametrize(("way", "beta", "alpha"), [
    ({"gamma": 20.0}, -0.5, 1.0), ({"gamma": 20.0}, 0.0, 1.0), ({"gamma": 20.0}, -1.0, 0.5),
    ({"affinity": "knn", "n_neighbors": 40, "gamma": 60.0}, -0.5, 1.0),
])  # fmt: skip
def test_variable_widths_give_the_generator(way, beta, alpha):
    X = unequal_circle(200)
    found = DiffusionMap(4, beta=beta, alpha=alpha, **way).fit(X)
    s = found.widths_
    k = np.exp(-cdist(X, X, "sqeuclidean") / np.outer(s, s))
    if "affinity" in way:
        near = neighbour_graph(X, 40).toarray() + np.eye(200)
        k *= near > 0
    v = (k.sum(axis=1) / s) ** alpha * s**1.5
    k /= np.outer(v, v)
    d = k.sum(axis=1)
    dense = scipy.linalg.eigh(k - np.diag(d), np.diag(d * s**2 / 4), eigvals_only=True)[::-1][1:5]
    assert np.abs(found.generator_ / dense - 1).max() < 1e-9
    if beta:  # two kernels find the density
        assert np.corrcoef(np.log(s), np.log(found.density_))[0, 1] < -0.99
    if alpha == 1:
        assert np.abs(found.generator_ / [-1, -1, -4, -4] - 1).max() < 0.06
    assert found.dimension_ == 1
    mass = d * s**2 / (d * s**2).sum()
    np.testing.assert_allclose(
        found.participation_, 1 / ((mass[:, None] * found._vectors**2) ** 2).sum(axis=0), rtol=1e-6
    )
    assert np.abs(found.transform(X) - found.embedding_).max() < (0.05 if "affinity" in way else 1e-9)


def test_modes_of_lone_points_are_told():
    """Ornstein and Uhlenbeck's -1, -1, -2 of a random plane Gaussian come behind those of single points."""
    X = np.random.default_rng(0).standard_normal((1000, 2))
    with pytest.warns(
        NlflowWarning, match=r"beta: 3 of 3 modes, generator_\[\[0, 1, 2\]\], lie on fewer than 25 of 1000 points"
    ):
        found = DiffusionMap(3, beta=-0.5, alpha=0.5).fit(X)
    assert found.generator_[0] > -0.5
    assert found.participation_.max() < 3


def test_widths_that_follow_the_density_refuse():
    X = unequal_circle(30)
    for words, message in (
        ({"beta": 0.5}, "beta: got 0.5, expected -1 to 0"), ({"beta": -2}, "beta"), ({"beta": "q"}, "beta"),
        ({"beta": -0.5, "affinity": Gaussian(width=1.0)}, "beta: got -0.5 with affinity=Gaussian"),
        ({"gamma": 1.0, "affinity": "knn"}, "gamma"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            DiffusionMap(**words).fit(X)
    with pytest.raises(InputError, match="X: got points that lie at one place"):
        DiffusionMap(beta=-0.5).fit(np.ones((9, 2)))
    with pytest.raises(InputError, match="in 2 parts that do not see each other"):
        DiffusionMap(beta=-0.5, gamma=1.0).fit(np.concatenate([X, X + 1e4]))


@pytest.mark.slow
def test_clusters_are_those_of_scikit_learn():
    X, _ = make_moons(300, noise=0.06, random_state=1)
    graph = neighbour_graph(X, 8, graphs.SELF_TUNING, local=True)
    for count in (2, 3, 5):
        theirs = SpectralClustering(count, affinity="precomputed", assign_labels="cluster_qr", random_state=0)
        assert adjusted_rand_score(theirs.fit_predict(graph), spectral_clustering(X, count, n_neighbors=8)) == 1
        assert np.array_equal(spectral_clustering(X, count, n_neighbors=8),
                              spectral_clustering(graph, count, affinity="precomputed"))  # fmt: skip
    with pytest.raises(InputError, match="at most 300"):
        spectral_clustering(X, 301)


def test_clusters_that_do_not_see_each_other():
    X = np.concatenate([np.zeros((5, 1)) + np.arange(5)[:, None] * 0.1, 9 + np.arange(3)[:, None] * 0.1])
    assert spectral_clustering(X, 2, n_neighbors=2).tolist() == [0] * 5 + [1] * 3


# ---- questions


@pytest.mark.parametrize("by", ["variance", "hitting time"])
def test_questions_by_the_dense_inverse(by):
    X = np.random.default_rng(0).normal(size=(60, 2))
    graph = affinity_from_graph(neighbour_graph(X, 6, Gaussian(width=1.0)))
    lap = graph.laplacian().toarray()
    known = [3, 7]
    asked = ask_next(graph, known, 3, by=by)
    for node, score in zip(asked.nodes, asked.scores, strict=True):
        free = np.setdiff1d(np.arange(60), known)
        inverse = np.linalg.inv(lap[np.ix_(free, free)])
        expected = np.diag(inverse) if by == "variance" else inverse @ np.diag(lap)[free]
        assert node == free[np.argmax(expected)]
        assert score == pytest.approx(expected.max(), rel=1e-5)
        known.append(int(node))
    model = HarmonicClassifier("precomputed").fit(graph.edges(), np.where(np.arange(60) % 2, 1, 0))
    assert ask_next(model, [3, 7], by=by).nodes[0] == asked.nodes[0]


@pytest.mark.parametrize(("labelled", "count", "message"), [
    ([], 1, "labelled: got"), ([99], 1, "expected 0 to 8"),
    ([1, *[0] * 8], 1, "got 9 integers that are 0 or 1"), (np.zeros(9, bool), 1, "no node"), ([0], 9, "count: got 9"),
])  # fmt: skip
def test_bad_questions(labelled, count, message):
    path = affinity_from_graph(np.diag(np.ones(8), 1) + np.diag(np.ones(8), -1))
    with pytest.raises(InputError, match=message):
        ask_next(path, labelled, count)


@pytest.mark.parametrize("by", ["variance", "hitting time"])
def test_questions_where_a_component_has_no_label(by):
    apart = affinity_from_graph(np.kron(np.eye(2), 1 - np.eye(3)))
    with pytest.raises(InputError, match="labelled: some component of the graph has no label"):
        ask_next(apart, [0], by=by)


def test_evidence_of_points_in_two_parts():
    apart = affinity(TopHat(1.2), Points(np.array([[0.0], [1.0], [9.0], [10.0]])))
    with pytest.raises(InputError, match="affinity: got parts that do not see each other"):
        log_evidence(apart, [0, 1, 2], [1.0, 2.0, 3.0], fidelity=1.0)


# ---- choices


@pytest.mark.slow
def test_a_curve_of_widths_and_fidelities():
    X, y = make_moons(150, noise=0.1, random_state=0)
    few = np.full(len(y), -1)
    for c in (0, 1):
        few[np.flatnonzero(y == c)[:6]] = c
    widths = choose(HarmonicClassifier("rbf"), X, few, "gamma", [0.01, 30.0], folds=3)
    assert widths.scores.shape == (2, 3)
    assert widths.best == 30.0
    strengths = choose(HarmonicClassifier("rbf", gamma=30.0), X, few, "fidelity", [1.0, 1.05, 1.1], folds=3)
    cold = [
        choose(HarmonicClassifier("rbf", gamma=30.0), X, few, "fidelity", [s], folds=3).iterations[0]
        for s in (1.05, 1.1)
    ]
    assert strengths.iterations[1] < cold[0]  # each begins with the one before
    assert strengths.iterations[2] < cold[1]
    assert choose(LabelSpreading("rbf", gamma=20.0), X, few, "alpha", [0.5], folds=2).scores.shape == (1, 2)
    # Among names in a list, too, -1 stays a number where labels are hidden.
    names = ["abc"[label] if label >= 0 else -1 for label in few]
    numbered, named = (choose(LabelSpreading("rbf", gamma=20.0), X, y, "alpha", [0.5], folds=2) for y in (few, names))
    np.testing.assert_array_equal(named.scores, numbered.scores)
    assert choose(PoissonClassifier("rbf"), X, few, "gamma", [20.0], folds=2).means[0] > 0.5
    values = np.where(few >= 0, X[:, 0], np.nan)
    regressions = choose(HarmonicRegressor("rbf"), X, values, "gamma", [0.01, 10.0], folds=3)
    assert regressions.best == 10.0
    with pytest.raises(InputError, match="parameter: got 'colour'"):
        choose(HarmonicClassifier(), X, few, "colour", [1])
    with pytest.raises(InputError, match="folds: got 13"):
        choose(HarmonicClassifier("rbf"), X, few, "gamma", [1.0], folds=13)


def test_evidence_is_that_of_the_dense_field():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 1))
    graph = affinity_from_graph(neighbour_graph(X, 5, Gaussian(width=1.0)))
    nodes, y = np.array([1, 5, 9, 20, 33]), rng.normal(size=5)
    lap = graph.laplacian().toarray()
    # The constant's eigenvalue of 1e-16 is zero, which NumPy does not see on every machine.
    covariance = np.linalg.pinv(lap, rcond=1e-12)[np.ix_(nodes, nodes)] + np.diag(1 / (2.0 * np.diag(lap)[nodes]))
    contrasts = scipy.linalg.null_space(np.ones((1, 5)))
    v = contrasts.T @ covariance @ contrasts
    z = contrasts.T @ y
    expected = -2 * np.log(z @ np.linalg.solve(v, z) / 4) - 0.5 * np.linalg.slogdet(v)[1]
    assert log_evidence(graph, nodes, y, fidelity=2.0) == pytest.approx(expected, rel=1e-8)
    # Quadrature weights are a part of the edges, W_ij = w_i w_j k_ij, and of the noise, s^2 / (fidelity w_i d_i).
    w = rng.uniform(0.2, 3.0, 40)
    weighted = affinity_from_graph(neighbour_graph(X, 5, Gaussian(width=1.0)), Points(X[:, 0], w))
    edges = w[:, None] * neighbour_graph(X, 5, Gaussian(width=1.0)).toarray() * w
    lap = np.diag(edges.sum(axis=1)) - edges
    covariance = np.linalg.pinv(lap, rcond=1e-12)[np.ix_(nodes, nodes)] + np.diag(1 / (2.0 * np.diag(lap)[nodes]))
    v = contrasts.T @ covariance @ contrasts
    expected = -2 * np.log(z @ np.linalg.solve(v, z) / 4) - 0.5 * np.linalg.slogdet(v)[1]
    assert log_evidence(weighted, nodes, y, fidelity=2.0) == pytest.approx(expected, rel=1e-8)
    # A field that is smooth on the graph prefers it to one that is not.
    smooth = np.sort(X[nodes, 0])
    order = nodes[np.argsort(X[nodes, 0])]
    assert log_evidence(graph, order, smooth, fidelity=2.0) > log_evidence(
        graph, order[[3, 0, 4, 1, 2]], smooth, fidelity=2.0
    )
    with pytest.raises(InputError, match="at least 3"):
        log_evidence(graph, [1, 2], [0.0, 1.0], fidelity=1.0)


def test_a_map_whose_first_argument_is_an_affinity(roll):
    for given in ("knn", Gaussian(1.0)):
        with pytest.raises(InputError, match=r"^n_components: got .*; affinity is the second argument, as in Diff"):
            DiffusionMap(given).fit(roll)
    with pytest.raises(InputError, match=r"^n_components: got 0, expected an integer >= 1$"):
        DiffusionMap(0).fit(roll)


@pytest.mark.parametrize(
    ("model", "parameter", "told"),
    [
        (
            make_pipeline(StandardScaler(), HarmonicClassifier("rbf")),
            "gamma",
            r"^model: got Pipeline, .* its last step",
        ),
        (DiffusionMap(), "gamma", "^model: got DiffusionMap, expected an estimator of labels"),
        (HarmonicClassifier(), "alpha", "^parameter: got 'alpha', expected one of those of HarmonicClassifier: acc"),
        (HarmonicClassifier("knn"), "gamma", "^parameter: got 'gamma', which has no part in affinity='knn', expected"),
        (HarmonicClassifier(Gaussian(1.0)), "gamma", r"has no part in affinity=Gaussian\(.*affinity='rbf'"),
        (
            HarmonicRegressor("rbf"),
            "n_neighbors",
            "has no part in affinity='rbf', expected a model with affinity='knn'",
        ),
        (HarmonicClassifier(), "balance", "^parameter: got 'balance', which has no part without a class_prior"),
    ],
)
def test_what_decides_nothing_is_not_chosen(model, parameter, told):
    with pytest.raises(InputError, match=told):
        choose(model, np.arange(6.0)[:, None], [0, 0, 1, 1, -1, -1], parameter, [1.0, 2.0], folds=2)
