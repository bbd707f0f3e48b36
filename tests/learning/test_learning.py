"""Learning on graphs: each estimator against a solution that was not written here, and what it does with bad input."""

import itertools
import re
import warnings

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.spatial.distance import cdist

pytest.importorskip("sklearn", reason="scikit-learn is an extra: pip install 'nlflow[learning]'")

from sklearn.datasets import load_wine, make_moons
from sklearn.exceptions import ConvergenceWarning
from sklearn.semi_supervised import LabelSpreading as Theirs
from sklearn.utils.estimator_checks import check_estimator

import nlflow
from nlflow import (
    Gaussian,
    GradientFlow,
    InputError,
    Laplace,
    MemoryLimitError,
    NlflowWarning,
    Points,
    affinity_from_graph,
    solve,
)
from nlflow.learning import (
    DiffusionMap,
    HarmonicClassifier,
    HarmonicRegressor,
    LabelSpreading,
    PLaplacianClassifier,
    PLaplacianRegressor,
    PoissonClassifier,
    graphs,
)

CLASSIFIERS = [LabelSpreading, HarmonicClassifier, PoissonClassifier, PLaplacianClassifier]
REGRESSORS = [HarmonicRegressor, PLaplacianRegressor]


@pytest.fixture(scope="module")
def moons():
    """Points, all labels, and labels of which three of each class are left."""
    X, y = make_moons(120, noise=0.05, random_state=0)
    few = np.full(len(y), -1)
    for c in (0, 1):
        few[np.flatnonzero(y == c)[:3]] = c
    return X, y, few


def laplacian_of(X, gamma):
    w = np.exp(-gamma * cdist(X, X, "sqeuclidean"))
    np.fill_diagonal(w, 0)
    return np.diag(w.sum(axis=1)) - w


@pytest.mark.parametrize("kind", [LabelSpreading, *(pytest.param(k, marks=pytest.mark.slow) for k in
                                  [*CLASSIFIERS[1:], *REGRESSORS])])  # fmt: skip
def test_contract_of_scikit_learn(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checks with labels -1 and 1, and of an array interface that is not set
        check_estimator(kind())


@pytest.mark.parametrize("alpha", [0.2, 0.9, 0.99])
def test_label_spreading_is_that_of_scikit_learn(moons, alpha):
    X, _, few = moons
    theirs = Theirs(gamma=20, alpha=alpha, tol=1e-13, max_iter=100_000).fit(X, few)
    ours = LabelSpreading("rbf", gamma=20, alpha=alpha).fit(X, few)
    assert np.abs(ours.label_distributions_ - theirs.label_distributions_).max() < 1e-8
    new = X[:40] + 0.1
    assert np.abs(ours.predict_proba(new) - theirs.predict_proba(new)).max() < 1e-8
    assert (ours.predict(new) == theirs.predict(new)).all()


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.25])
def test_a_rough_tolerance_holds_for_each_probability(moons, alpha):
    X, _, few = moons
    exact = LabelSpreading("rbf", gamma=30.0, alpha=alpha).fit(X, few).label_distributions_
    for tol in (1e-1, 1e-2, 1e-4):
        found = LabelSpreading("rbf", gamma=30.0, alpha=alpha, tol=tol).fit(X, few).label_distributions_
        assert (np.abs(found - exact) <= tol * exact).all()


def test_label_spreading_of_an_affinity_with_weights_of_nodes(moons):
    X, _, few = moons
    some = np.concatenate([*(np.flatnonzero(few == c)[:1] for c in (0, 1)), np.flatnonzero(few < 0)[:58]])
    X, few = X[some], few[some]
    given = nlflow.affinity(Gaussian(width=0.4), Points(np.arange(60), np.linspace(0.2, 2.0, 60)), X)
    w = np.exp(-cdist(X, X, "sqeuclidean") / (2 * 0.4**2)) * np.outer(given.domain.weights, given.domain.weights)
    np.fill_diagonal(w, 0)
    s = w / np.sqrt(np.outer(w.sum(axis=1), w.sum(axis=1)))
    scores = np.linalg.inv(np.eye(60) - 0.5 * s)[:, [0, 1]]
    found = LabelSpreading(given, alpha=0.5).fit(X, few).label_distributions_
    assert np.abs(found - scores / scores.sum(axis=1, keepdims=True)).max() < 1e-9


@pytest.mark.parametrize("unit", [1e-200, 1e-70, 1e200])
def test_p_harmonic_values_in_any_unit(moons, unit):
    X = moons[0][:60]
    values = np.where(np.arange(60) % 20 == 0, X[:, 0], np.nan)
    one = PLaplacianRegressor().fit(X, values).transduction_
    other = PLaplacianRegressor().fit(X, values * unit).transduction_
    assert np.abs(other / unit - one).max() < 1e-12
    k = np.exp(-3 * cdist(X, X, "sqeuclidean"))
    one = PLaplacianRegressor("precomputed").fit(k, values).transduction_
    other = PLaplacianRegressor("precomputed").fit(k * unit, values).transduction_
    assert np.abs(other - one).max() < 1e-10


def test_weak_probabilities_keep_their_digits():
    # A chain in which each sample sees the next with 1e-8 of what it sees of the one before it.
    X = np.cumsum(np.sqrt(np.arange(12) * 0.92))[::-1, None].copy()
    y = np.full(len(X), -1)
    y[0], y[-1] = 0, 1
    for alpha in (0.2, 0.95):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            theirs = Theirs(gamma=20, alpha=alpha, tol=0, max_iter=3000)
            warnings.simplefilter("ignore", ConvergenceWarning)
            theirs.fit(X, y)
        ours = LabelSpreading("rbf", gamma=20, alpha=alpha).fit(X, y)
        known = np.isfinite(theirs.label_distributions_).all(axis=1)
        assert known.sum() > 6
        assert np.abs(ours.label_distributions_ - theirs.label_distributions_)[known].max() < 1e-8


def test_the_functional_and_its_flow(moons):
    X, _, few = moons
    model = LabelSpreading("rbf", gamma=20.0, alpha=0.5).fit(X, few)
    energy = model.functional_
    kept = solve(GradientFlow(energy, metric="degree"), t=60.0).final
    assert np.abs(kept - energy.minimizer().u).max() < 1e-8 * np.abs(kept).max()
    assert model.residual_ <= 1e-9
    assert model.n_iter_ >= 1


@pytest.mark.parametrize("gamma", [5.0, 20.0])
def test_harmonic_functions_solve_the_dense_system(moons, gamma):
    X, _, few = moons
    free, lap = few < 0, laplacian_of(X, gamma)
    y = np.eye(2)[few[~free]]
    expected = np.linalg.solve(lap[np.ix_(free, free)], -lap[np.ix_(free, ~free)] @ y)
    model = HarmonicClassifier("rbf", gamma=gamma).fit(X, few)
    assert np.abs(model.label_distributions_[free] - expected).max() < 1e-7
    assert (model.transduction_[~free] == few[~free]).all()
    values = np.where(free, np.nan, X[:, 0])
    regressor = HarmonicRegressor("rbf", gamma=gamma).fit(X, values)
    expected = np.linalg.solve(lap[np.ix_(free, free)], -lap[np.ix_(free, ~free)] @ X[~free, 0])
    assert np.abs(regressor.transduction_[free] - expected).max() < 1e-7


def test_a_large_fidelity_tends_to_harmonic_functions(moons):
    X, _, few = moons
    exact = HarmonicClassifier("rbf", gamma=20.0).fit(X, few).label_distributions_
    apart = [
        np.abs(HarmonicClassifier("rbf", gamma=20.0, fidelity=s).fit(X, few).label_distributions_ - exact).max()
        for s in (10.0, 1e3, 1e5)
    ]
    assert apart[0] > 5 * apart[1] > 25 * apart[2]
    assert apart[2] < 1e-3


def test_poisson_learning_solves_its_equation(moons):
    X, y, few = moons
    model = PoissonClassifier("knn", n_neighbors=8).fit(X, few)
    lap = model.affinity_.laplacian().toarray()
    there = few >= 0
    source = np.zeros((len(X), 2))
    source[there] = np.eye(2)[few[there]] - np.eye(2)[few[there]].mean(axis=0)
    expected = np.linalg.lstsq(lap, source, rcond=None)[0]
    found = model.label_distributions_
    d = np.diag(lap)
    expected -= (d @ expected) / d.sum()
    assert np.abs(found - expected).max() < 1e-8 * np.abs(found).max()
    assert (model.transduction_ == y).mean() > 0.9


def test_p_laplacian_is_the_minimizer(moons):
    X, _, few = moons
    X, few = X[::4], np.where(np.arange(30) % 6 == 0, (X[::4, 1] > 0.2).astype(int), -1)
    free = few < 0
    w = np.exp(-2 * cdist(X, X, "sqeuclidean"))
    np.fill_diagonal(w, 0)
    for p in (1.5, 3.0, 5.0):

        def energy(inside, p=p):
            u = np.where(free, 0.0, few)
            u[free] = inside
            d = u[:, None] - u
            return (w * np.abs(d) ** p).sum() / p, (2 * (w * np.abs(d) ** (p - 1) * np.sign(d)).sum(axis=1))[free]

        expected = minimize(energy, np.full(free.sum(), 0.5), jac=True, method="BFGS", options={"gtol": 1e-10}).x
        values = np.where(free, np.nan, few)
        found = PLaplacianRegressor("rbf", gamma=2.0, p=p, tol=1e-5).fit(X, values).transduction_
        assert np.abs(found[free] - expected).max() < 1e-4
        both = PLaplacianClassifier("rbf", gamma=2.0, p=p, tol=1e-5).fit(X, few).label_distributions_
        assert np.abs(both[free, 1] - expected).max() < 1e-4  # u and 1 - u: one function


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_beyond_the_matrix_nothing_changes(moons, kind, monkeypatch):
    X, _, few = moons
    whole = kind(**({} if kind is PLaplacianClassifier else {"affinity": "rbf", "gamma": 20.0})).fit(X, few)
    monkeypatch.setattr(graphs, "DENSE_NODES", 20)
    monkeypatch.setattr("nlflow.affinities.pairs._DENSE_NODES", 20)
    if kind is PLaplacianClassifier:
        with pytest.raises(InputError, match="use affinity='knn'"):
            kind("rbf", gamma=20.0).fit(X, few)
        return
    for accuracy in (None, 1e-8):
        model = kind("rbf", gamma=20.0, accuracy=accuracy).fit(X, few)
        assert model.method_ != "dense"
        size = np.abs(whole.label_distributions_).max()
        assert np.abs(model.label_distributions_ - whole.label_distributions_).max() < 1e-5 * size
        assert (model.predict(X) == whole.predict(X)).all()


def test_other_points_by_one_average(moons):
    X, _, few = moons
    new = X[:7] + 0.05
    model = HarmonicClassifier("rbf", gamma=10.0).fit(X, few)
    k = np.exp(-10.0 * cdist(new, X, "sqeuclidean"))
    assert np.abs(model.predict_proba(new) - k @ model.label_distributions_ / k.sum(axis=1)[:, None]).max() < 1e-12
    with pytest.warns(NlflowWarning, match="^X: 2 points"):
        far = model.predict_proba(X[:2] + 1e3)  # where the kernel underflows the nearest points still count
    assert np.abs(far.sum(axis=1) - 1).max() < 1e-12
    near = HarmonicClassifier("knn", n_neighbors=5).fit(X, few)
    distances = np.sort(cdist(X, X), axis=1)[:, 5]
    d = cdist(new, X)
    order = np.argsort(d, axis=1)[:, :5]
    k = np.zeros_like(d)
    rows = np.arange(7)[:, None]
    k[rows, order] = np.exp(-(d[rows, order] ** 2) / (np.sort(d, axis=1)[:, 4:5] * distances[order]))
    assert np.abs(near.predict_proba(new) - k @ near.label_distributions_ / k.sum(axis=1)[:, None]).max() < 1e-12


@pytest.mark.slow
@pytest.mark.on_cpu("Poisson classifiers, spectra and their maps solve on the host, with copies that nobody counts")
@pytest.mark.parametrize("affinity", ["rbf", "knn"])
@pytest.mark.parametrize("tensors", [False, True])
def test_points_that_see_nothing_are_told_of(moons, affinity, tensors):
    X, _, few = moons
    new = np.concatenate([X[:3], X[:2] + 1e4])
    if tensors:
        torch = pytest.importorskip("torch", reason="torch is an extra")
        X, new = torch.as_tensor(X), torch.as_tensor(new)
    for kind in (HarmonicClassifier, PoissonClassifier, HarmonicRegressor):
        model = kind(affinity).fit(X, np.where(few < 0, np.nan, few) if kind is HarmonicRegressor else few)
        with pytest.warns(NlflowWarning, match=r"^X: 2 points \(the first is 3\) are so far from all tra") as told:
            model.predict(new)
        assert told[0].filename == __file__
        model.predict(new[:3])  # without a warning, which would be an error
    mapped = DiffusionMap(2, affinity, gamma=20.0 if affinity == "rbf" else None).fit(X)
    with pytest.warns(NlflowWarning, match=r"^X: 2 points \(the first is 3\)") as told:
        mapped.transform(new)
    assert told[0].filename == __file__


def test_a_weight_that_a_float_holds_is_no_warning():
    X, y = np.array([[0.0], [1.0]]), [0, 1]
    model = LabelSpreading("rbf", gamma=1.0).fit(X, y)
    # exp(-27.2^2) = exp(-739.8) is a float, exp(-27.4^2) = exp(-750.8) is none: the least is exp(-744.4).
    model.predict([[-27.2]])
    with pytest.warns(NlflowWarning, match="^X: 1 points"):
        model.predict([[-27.4]])


def test_rows_of_weights_are_asked_for(moons):
    X, _, few = moons
    model = HarmonicClassifier("precomputed").fit(np.exp(-cdist(X, X)) - np.eye(len(X)), few)
    with pytest.raises(InputError, match=r"^X: got shape \(3, 2\) with .*, expected rows of weights .*, \(M, 120\)$"):
        model.predict(X[:3])


def test_self_tuning_weights():
    from nlflow import neighbour_graph

    x = np.array([[0.0], [1.0], [3.0], [3.0]])
    graph = neighbour_graph(x, 1, graphs.SELF_TUNING, local=True).toarray()
    # The scales are 1, 1, and the least of these for both at 3, whose neighbour is at their place.
    assert graph[0, 1] == pytest.approx(np.exp(-1))
    assert graph[2, 3] == 1
    points = np.random.default_rng(0).normal(size=(20, 2))
    distances = cdist(points, points)
    scales = np.sort(distances, axis=1)[:, 4]
    graph = neighbour_graph(points, 4, graphs.SELF_TUNING, local=True).toarray()
    expected = np.exp(-(distances**2) / np.outer(scales, scales))
    assert np.abs(graph - expected)[graph > 0].max() < 1e-14
    with pytest.raises(InputError, match="local: got widths without a kernel"):
        neighbour_graph(x, 1, local=True)
    given = np.linspace(1, 2, 20)
    graph = neighbour_graph(points, 4, graphs.SELF_TUNING, local=given).toarray()
    assert np.abs(graph - np.exp(-(distances**2) / np.outer(given, given)))[graph > 0].max() < 1e-14
    for wrong, message in ((given[:3], "got 3 widths, expected 20"), (given - 1, "width of 0"), ("s", "local")):
        with pytest.raises(InputError, match=message):
            neighbour_graph(points, 4, graphs.SELF_TUNING, local=wrong)


def test_kernels_and_affinities_as_objects(moons):
    X, _, few = moons
    by_kernel = HarmonicClassifier(Laplace(width=0.3)).fit(X, few)
    w = np.exp(-cdist(X, X) / 0.3)
    np.fill_diagonal(w, 0)
    given = HarmonicClassifier("precomputed").fit(w, few)
    assert np.abs(by_kernel.label_distributions_ - given.label_distributions_).max() < 1e-8
    own = HarmonicClassifier(by_kernel.affinity_).fit(X, few)
    assert np.abs(by_kernel.label_distributions_ - own.label_distributions_).max() < 1e-8
    with pytest.raises(InputError, match="says nothing about other points"):
        own.predict(X)
    rows = w[:5]
    assert np.abs(given.predict_proba(rows) - rows @ given.label_distributions_ / rows.sum(1)[:, None]).max() < 1e-12


def test_precisions_and_tensors(moons):
    torch = pytest.importorskip("torch", reason="torch is an extra")
    X, _, few = moons
    single = LabelSpreading("rbf", gamma=20.0).fit(X.astype(np.float32), few)
    double = LabelSpreading("rbf", gamma=20.0).fit(X, few)
    assert single.label_distributions_.dtype == np.float32
    assert np.abs(single.label_distributions_ - double.label_distributions_).max() < 2e-4
    for kind, affinity in itertools.product((LabelSpreading, HarmonicClassifier, PoissonClassifier), ("rbf", "knn")):
        tensor, plain = kind(affinity).fit(torch.as_tensor(X), few), kind(affinity).fit(X, few)
        size = np.abs(plain.label_distributions_).max()
        assert np.abs(tensor.label_distributions_ - plain.label_distributions_).max() < 1e-7 * size
        assert (tensor.predict(torch.as_tensor(X[:9] + 0.1)) == plain.predict(X[:9] + 0.1)).all()


# ---- components, priors, bad input


def islands():
    """Three points in a row, three others far away, and labels on the first three alone."""
    X = np.array([[0.0], [1.0], [2.0], [50.0], [51.0], [52.0]])
    return X, np.array(["a", -1, "b", -1, -1, -1], dtype=object)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_components_without_a_label_get_no_class(kind):
    X, y = islands()
    with pytest.warns(NlflowWarning, match=r"3 samples \(the first is 3\) lie in 1 components .* \(sizes 3\)"):
        model = kind("knn", n_neighbors=2).fit(X, y)
    assert model.transduction_.tolist()[::2][:2] == ["a", "b"]
    assert model.transduction_[3:].tolist() == [-1, -1, -1]
    assert np.isnan(model.label_distributions_[3:]).all()
    assert model.predict([[0.1], [51.2]]).tolist() == ["a", -1]
    numbers = np.where(y == "a", 0, np.where(y == "b", 1, -1)).astype(int)
    with pytest.warns(NlflowWarning, match="without a label"):
        assert kind("knn", n_neighbors=2).fit(X, numbers).transduction_[3:].tolist() == [-1, -1, -1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, how) for kind in CLASSIFIERS for how in ("matrix", "neighbours")),
        *((kind, "sums") for kind in CLASSIFIERS if kind is not PLaplacianClassifier),  # which lists its edges
    ],
)
def test_parts_without_a_label_are_counted(kind, how, monkeypatch):
    """Groups of samples so far apart that their kernels underflow; labels in the first alone."""
    if how == "sums":
        monkeypatch.setattr(graphs, "DENSE_NODES", 5)
        monkeypatch.setattr("nlflow.affinities.pairs._DENSE_NODES", 5)
    # Of sums single samples are told; of a matrix they belong to the nearest ones, since rows sum to 1.
    sizes = [5, 1, 1, 1] if how == "sums" else [5, 3, 2, 4, 2, 2, 2]
    X = np.concatenate([100.0 * i + 0.05 * np.arange(n) for i, n in enumerate(sizes)])[:, None]
    y = np.full(len(X), -1)
    y[0], y[4] = 0, 1
    if how == "neighbours":
        given = affinity_from_graph(np.where(cdist(X, X) < 1, 1.0, 0.0) - np.eye(len(X)))
    told = r"15 samples \(the first is 5\) lie in 6 components .* \(sizes 4, 3, 2, 2, 2, \.\.\.\)"
    if how == "sums":
        told = r"3 samples \(the first is 5\) lie in 3 components .* \(sizes 1, 1, 1\)"
    with warnings.catch_warnings(record=True) as caught:  # sums warn of such samples too
        warnings.simplefilter("always")
        model = (kind(given) if how == "neighbours" else kind("rbf", gamma=1.0)).fit(X, y)
    assert any(re.search(told, str(one.message)) for one in caught), [str(one.message) for one in caught]
    assert (model.method_ in ("dense", "sparse")) == (how != "sums")
    assert set(model.transduction_[:5].tolist()) == {0, 1}
    assert (model.transduction_[5:] == -1).all()
    assert np.isnan(model.label_distributions_[5:]).all()
    assert np.isfinite(model.label_distributions_[:5]).all()


def test_a_regression_has_no_value_there():
    X, y = islands()
    values = np.where(y == "a", 1.0, np.where(y == "b", 3.0, np.nan))
    with pytest.warns(NlflowWarning, match="without a label"):
        found = HarmonicRegressor("knn", n_neighbors=2).fit(X, values)
    assert found.transduction_[:3].tolist() == pytest.approx([1, 2, 3])
    assert np.isnan(found.transduction_[3:]).all()
    assert np.isnan(found.predict([[51.0]]))[0]


def test_poisson_learning_of_two_components():
    X, _ = islands()
    y = np.array([0, -1, 1, 1, 1, 0])  # means of 1/2 and 2/3
    model = PoissonClassifier("knn", n_neighbors=2).fit(X, y)
    assert model.transduction_[[0, 2, 3, 5]].tolist() == [0, 1, 1, 0]


def test_priors(moons):
    X, y, _ = moons
    rare = np.full(len(y), -1)
    rare[np.flatnonzero(y == 0)[:6]], rare[np.flatnonzero(y == 1)[0]] = 0, 1
    plain = HarmonicClassifier("rbf", gamma=3.0).fit(X, rare)
    with pytest.warns(NlflowWarning, match="balance='mass' gives them to the sums of scores"):
        mass = HarmonicClassifier("rbf", gamma=3.0, class_prior=[1, 1], balance="mass").fit(X, rare)
    count = HarmonicClassifier("rbf", gamma=3.0, class_prior=[1, 1], balance="count").fit(X, rare)
    assert (plain.transduction_ == 1).mean() < 0.2
    free = rare < 0
    shares = mass.class_factors_ * np.maximum(plain.label_distributions_, 0)[free].sum(axis=0)
    assert shares[0] == pytest.approx(shares[1])  # class mass normalization
    assert abs((count.transduction_[free] == 1).mean() - 0.5) < 0.02
    assert (count.transduction_ == y).mean() > (plain.transduction_ == y).mean()
    assert HarmonicClassifier("rbf", gamma=20.0, class_prior="labels").fit(X, rare).class_factors_.shape == (2,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class_prior": [1, 1, 1]}, "expected 2 numbers > 0"),
        ({"class_prior": "even"}, "class_prior: got 'even'"),
        ({"balance": "weight"}, "balance: got 'weight'"),
        ({"affinity": "tree"}, "affinity: got 'tree'"),
        ({"gamma": -1.0}, "gamma: got -1.0"),
        ({"fidelity": 0.0}, "fidelity: got 0"),
        ({"affinity": "knn", "n_neighbors": 0}, "^n_neighbors: got 0, expected an integer >= 1"),
        ({"affinity": "knn", "n_neighbors": 2.5}, r"^n_neighbors: got 2\.5, expected an integer"),
        ({"affinity": "knn", "n_neighbors": 120}, "^n_neighbors: got 120 for 120 samples, expected at most 119"),
    ],
)
def test_bad_parameters(moons, change, message):
    X, _, few = moons
    with pytest.raises(InputError, match=message):
        HarmonicClassifier(**change).fit(X, few)


def test_bad_input(moons):
    X, y, few = moons
    for affinity in ("rbf", "knn"):
        with pytest.raises(InputError, match=r"^X: got 1 sample, expected at least 2"):
            PoissonClassifier(affinity).fit(X[:1], [0])
    with pytest.raises(InputError, match="no labelled sample"):
        HarmonicClassifier("rbf", gamma=20.0).fit(X, np.full(len(X), -1))
    with pytest.raises(InputError, match="no value"):
        HarmonicRegressor("rbf", gamma=20.0).fit(X, np.full(len(X), np.nan))
    with pytest.raises(ValueError, match="NaN"):
        HarmonicClassifier("rbf", gamma=20.0).fit(np.where(X > 1.5, np.nan, X), few)
    with pytest.raises(ValueError, match="inconsistent"):
        HarmonicClassifier("rbf", gamma=20.0).fit(X, few[:-1])
    with pytest.raises(InputError, match="symmetric"):
        HarmonicClassifier("precomputed").fit(np.triu(np.ones((4, 4))), [0, 1, -1, -1])
    with pytest.raises(InputError, match=r"^affinity: got weights between samples that are too small to carry"):
        LabelSpreading("rbf", gamma=20.0).fit([[0.0], [0.01], [10.0], [40.0]], [0, 1, -1, -1])
    with pytest.raises(InputError, match="alpha"):
        LabelSpreading("rbf", gamma=20.0, alpha=1.0).fit(X, few)
    with pytest.raises(InputError, match="one of 120 nodes for 119 points"):
        LabelSpreading(LabelSpreading("rbf", gamma=20.0).fit(X, few).affinity_).fit(X[1:], few[1:])
    with pytest.warns(NlflowWarning, match="taken for two classes"):
        signs = HarmonicClassifier("rbf", gamma=20.0).fit(X, 2 * y - 1)
    assert signs.classes_.tolist() == [-1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("affinity", ["rbf", "knn"])
def test_dask_arrays_are_loaded_to_learn_and_met_by_chunks(moons, monkeypatch, affinity):
    dask = pytest.importorskip("dask.array", reason="Dask is an extra")
    X, _, few = moons
    there, more = dask.from_array(X, chunks=(50, 1)), np.concatenate([X, X + 0.01])
    blocks = dask.from_array(more, chunks=(60, 2))
    for kind in CLASSIFIERS:
        plain, chunked = kind(affinity).fit(X, few), kind(affinity).fit(there, dask.from_array(few))
        assert np.array_equal(plain.label_distributions_, chunked.label_distributions_)
        asked = ["predict", "decision_function" if kind is PoissonClassifier else "predict_proba"]
        for name in asked:
            later = getattr(chunked, name)(blocks)
            expected = getattr(plain, name)(more)
            assert later.chunks[0] == blocks.chunks[0]
            assert (later.shape, later.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_allclose(later.compute(), expected, rtol=0, atol=1e-12)
    with pytest.raises(InputError, match=r"got a Dask array of shape \(240, 1\), expected \(samples, 2\)"):
        chunked.predict(blocks[:, :1])
    mapped = DiffusionMap(2, affinity).fit(there)
    np.testing.assert_allclose(mapped.transform(blocks).compute(), mapped.transform(more), rtol=0, atol=1e-12)
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "1000")
    with pytest.raises(MemoryLimitError, match="of a Dask array"):
        kind(affinity).fit(there, few)


def test_duplicates_one_class_and_sparse_features(moons):
    from scipy.sparse import csr_array

    X, _, few = moons
    twice, labels = np.repeat(X, 2, axis=0), np.repeat(few, 2)
    assert np.isfinite(HarmonicClassifier("knn").fit(twice, labels).label_distributions_).all()
    for kind in CLASSIFIERS:
        one = np.where(few == 0, 7, -1)
        assert set(kind("rbf", gamma=20.0).fit(X, one).transduction_.tolist()) == {7}
        dense, sparse = kind("rbf", gamma=20.0).fit(X, few), kind("rbf", gamma=20.0).fit(csr_array(X), few)
        assert np.array_equal(dense.label_distributions_, sparse.label_distributions_)
    with pytest.warns(ConvergenceWarning, match="raise max_iter or tol, or use larger weights between samples"):
        HarmonicClassifier("rbf", gamma=5.0, max_iter=1).fit(X, few)


# --- what is said about points whose unit does not suit the kernel --------------------------------------------------


@pytest.fixture(scope="module")
def far():
    """Three clouds in a large unit, one label in each."""
    rng = np.random.default_rng(0)
    X = np.concatenate([rng.normal(centre, 20.0, (30, 2)) for centre in ((0, 0), (300, 0), (0, 300))])
    y = np.full(90, -1)
    y[[0, 30, 60]] = 0, 1, 2
    return X, y


def one_message(model, X, y):
    """Return what a fit is refused or warned with, which is one message."""
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model.fit(X, y)
        except InputError as error:
            told.append(str(error))
    told += [str(one.message) for one in caught]
    assert len(told) == 1, told
    assert all(one.filename == __file__ for one in caught)
    return told[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        *(kind("rbf", gamma=20.0) for kind in CLASSIFIERS),
        HarmonicClassifier("rbf", gamma=20.0, fidelity=10.0),
        *(kind("rbf", gamma=20.0) for kind in REGRESSORS),
    ],
    ids=str,
)
def test_defaults_on_features_in_other_units_end_in_one_message(model):
    X, names = load_wine(return_X_y=True)
    y = np.full(len(names), -1.0)
    for name in range(3):
        y[np.flatnonzero(names == name)[:2]] = name
    told = one_message(model, X, np.where(y < 0, np.nan, y) if type(model) in REGRESSORS else y)
    assert "pass affinity='knn', whose widths are local, or gamma=0.00013" in told
    assert not re.search("constraint|degree|maxiter|rtol|amplitude", told)


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_gaussian_too_narrow_for_the_points_is_told_with_what_to_pass(kind, far):
    X, y = far
    advice = r"the Gaussian of gamma=20 has the width 0\.16, and the median distance of two points is 2\.9e\+02"
    told = one_message(kind("rbf", gamma=20.0), X, y)
    assert re.search(advice, told), told
    gamma = float(re.findall(r"or gamma=([\d.e-]+), a width of a quarter of that", told)[0])
    truth = np.repeat([0, 1, 2], 30)
    # What it says to pass is what helps.
    assert np.array_equal(kind("rbf", gamma=gamma).fit(X, y).transduction_, truth)
    # The clouds are components of the graph of neighbours, with labels of one class each.
    assert np.array_equal(kind("knn").fit(X, y).transduction_, truth)


@pytest.mark.parametrize(
    ("given", "neighbours", "advice"),
    [
        ("knn", 2, "pass more neighbours: n_neighbors=4 in place of 2"),
        (Laplace(width=1e-3), None, "pass a kernel with a larger width, or affinity='knn'"),
    ],
)
def test_the_remedy_is_that_of_the_affinity(given, neighbours, advice):
    X = np.concatenate([np.arange(4.0), 100 + np.arange(4.0)])[:, None]
    y = np.array([0, 1, *[-1] * 6])
    with pytest.warns(NlflowWarning, match=re.escape(advice)):
        PoissonClassifier(given, n_neighbors=neighbours).fit(X, y)


def test_poisson_learning_gives_a_component_of_one_class_that_class():
    X = np.concatenate([np.arange(10.0), 100 + np.arange(5.0), 200 + np.arange(5.0)])[:, None]
    y = np.full(20, -1)
    y[[0, 9, 10, 15]] = 0, 1, 1, 2
    found = PoissonClassifier("knn", n_neighbors=2).fit(X, y)
    assert found.transduction_.tolist() == [0] * 5 + [1] * 10 + [2] * 5
    # Sums of 20 scores below 1, and of as many products of the solver's means.
    assert np.abs(found.label_distributions_.sum(axis=1)).max() < 100 * np.finfo(float).eps
