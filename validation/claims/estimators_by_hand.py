"""Estimators of points: prices, loops, parts, widths, other points and scores, against dense float64 programs."""

from __future__ import annotations

import copy
import importlib.util
import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp, softmax

from nlflow import Gaussian, Points, affinity, from_matrix
from nlflow.errors import NlflowWarning
from validation.harness import CannotRunError, Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]


def apart(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


def squares(a: Floats, b: Floats) -> Floats:
    """Return squared distances (M, N) of points."""
    return np.asarray(((a[:, None] - b) ** 2).sum(axis=-1))


# ---- shares of classes


def prices(rng: np.random.Generator) -> float:
    """Return errors of Newton's steps to prices, and of numbers of samples by the largest remainders.

    The value T Σ log Σ exp((s + b)/T) − a·b has the slope p − a and the curvature (diag p − Σ pᵀp)/T, p being shares.
    """
    from nlflow.learning.balance import _newton, _smoothed, factors, quotas

    worst, shortened, clipped = 0.0, 0, 0
    for temperature, far in ((2.0, 0.3), (0.5, 0.3), (2.0, 3.0), (1.0, 1.5), (0.5, 1.5), (0.3, 1.5), (0.2, 1.5)):
        draws = np.random.default_rng(0)  # prices of which some have too long a step
        s = draws.standard_normal((50, 4))
        s -= s.max(axis=1, keepdims=True)
        b, aims = far * draws.standard_normal(4), np.array([20.0, 15.0, 10.0, 5.0])

        def value(b: Floats, s: Floats = s, t: float = temperature, aims: Floats = aims) -> float:
            return float(t * logsumexp((s + b) / t, axis=1).sum() - aims @ b)

        shares = softmax((s + b) / temperature, axis=1)
        slope = shares.sum(axis=0) - aims
        curvature = (np.diag(shares.sum(axis=0)) - shares.T @ shares) / temperature
        step = -np.linalg.pinv(curvature, rcond=1e-9) @ slope
        most = 20 * temperature / np.abs(step).max()
        step, clipped = step * min(1, most), clipped + (most < 1)
        while value(b + step) > value(b) + 1e-4 * slope @ step:
            step, shortened = step / 4, shortened + 1
        told, calm = _newton(s, b, aims, temperature)
        worst = largest(worst, apart(told, b + step) / np.abs(step).max(), float(calm))
        worst = largest(worst, abs(_smoothed(s, b, aims, temperature)[0] / value(b) - 1))
        worst = largest(worst, apart(_smoothed(s, b, aims, temperature)[1], shares))
    share = np.array([3.0, 1.0, 2.2, 0.4])
    whole = np.floor(share / share.sum() * 23)
    for k in np.argsort(whole - share / share.sum() * 23)[: 23 - int(whole.sum())]:
        whole[k] += 1
    scores = rng.random((23, 4)) ** 3
    counts = np.bincount((scores * factors(scores, quotas(share, 23))).argmax(axis=1), minlength=4)
    return largest(worst, apart(quotas(share, 23), whole), apart(counts, whole), float(min(shortened, clipped) == 0))


# ---- graphs with loops, parts, tiny weights, and weights of a function


def laplacian(w: Floats) -> Floats:
    return np.asarray(np.diag(w.sum(axis=1)) - w)


def poisson(w: Floats, y: Floats, known: Any, parts: Any) -> Floats:
    """Return Poisson learning of one-hot labels y (N, C), on each part by itself, with mean 0 in its degrees."""
    u = np.zeros_like(y)
    kinds = []
    for part in np.unique(parts):
        there = np.flatnonzero(parts == part)
        own = np.intersect1d(there, known)
        source = np.zeros_like(y)
        source[own] = y[own] - y[own].mean(axis=0)
        degree = w[np.ix_(there, there)].sum(axis=1)
        found = np.linalg.pinv(laplacian(w[np.ix_(there, there)])) @ source[there]
        u[there] = found - degree @ found / degree.sum()
        if not source.any():
            kinds.append((there, y[own[0]]))
    size = float(np.sqrt((u**2).mean()))
    for there, kind in kinds:  # labels of one kind: that kind, which sums to 0, in the size of the others
        u[there] = (kind - 1 / y.shape[1]) * size
    return u


def graphs(rng: np.random.Generator) -> float:
    """Return errors of estimators of graphs with loops or parts, in any unit of the weights, by hand."""
    from nlflow.learning import HarmonicClassifier, LabelSpreading, PoissonClassifier

    n, worst = 18, 0.0
    parts, x = np.arange(n) % 3, rng.random((n, 2))
    labels = np.full(n, -1)
    labels[[0, 3, 6, 1, 4, 2, 5, 8]] = [0, 1, 2, 0, 2, 1, 1, 1]
    known, y = np.flatnonzero(labels >= 0), np.eye(3)[np.maximum(labels, 0)] * (labels >= 0)[:, None]
    w = np.exp(-squares(x, x) / 0.3) * (parts[:, None] == parts)
    np.fill_diagonal(w, 0)
    exact = poisson(w, y, known, parts)
    slight = w * (1 + 1e-11 * np.triu(np.ones((n, n))))
    for weights in (w, slight, 1e-150 * w):
        found = PoissonClassifier("precomputed", tol=1e-12).fit(weights, labels)
        told = found.label_distributions_
        told = told * (np.linalg.norm(exact) / np.linalg.norm(told) if weights.max() < 1e-9 else 1)
        worst = largest(worst, apart(told, exact) / np.abs(exact).max() / 1e2)
        worst = largest(worst, abs(found.spread_ / np.sqrt((found.label_distributions_**2).mean()) - 1))

    def one_sided(a: Floats, b: Floats) -> Floats:
        return np.asarray(np.exp(-squares(a, b) / 0.3) * (1 + 0.5 * np.tanh(a[:, None, 0] - b[None, :, 1])))

    both = (one_sided(x, x) + one_sided(x, x).T) / 2
    np.fill_diagonal(both, 0)
    model = PoissonClassifier(one_sided, tol=1e-12).fit(x, labels)
    exact = poisson(both, y, known, np.zeros(n))
    worst = largest(worst, apart(model.label_distributions_, exact) / np.abs(exact).max() / 1e2)
    others = rng.random((5, 2))
    rows = one_sided(x, others).T
    told = (rows / rows.sum(axis=1, keepdims=True)) @ exact
    size = float(np.sqrt((exact**2).mean()))
    worst = largest(worst, apart(model.predict_proba(others), softmax(told / size, axis=1)) / 1e2)
    model.spread_ = size / 2000  # of which exponentials of scores are no floats
    worst = largest(worst, apart(model.predict_proba(others), softmax(2000 * told / size, axis=1)) / 1e4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # shares that are missed are told
        shared = PoissonClassifier(one_sided, tol=1e-12, class_prior=[1, 1, 6]).fit(x, labels)
    worst = largest(worst, apart(shared.label_distributions_, exact + shared.class_shifts_) / 1e2)
    counts = np.bincount(shared.transduction_[labels < 0], minlength=3)
    worst = largest(worst, float(np.abs(counts - [1, 1, 8]).max() > 1))  # of ten
    # Loops: fidelity and spreading are those of the edges to others.
    k = np.exp(-squares(x, x) / 0.3) * rng.uniform(0.6, 1.4, n)[:, None]
    k = (k + k.T) / 2
    bare = k - np.diag(np.diag(k))
    degree = bare.sum(axis=1)
    wanted = PoissonClassifier("precomputed", tol=1e-12).fit(bare, labels).label_distributions_
    heavy = PoissonClassifier("precomputed", tol=1e-12).fit(bare + 1e17 * np.eye(n), labels).label_distributions_
    worst = largest(worst, apart(heavy, wanted) / np.abs(wanted).max() / 1e2)
    split = k * (parts[:, None] == parts)
    wanted = poisson(split - np.diag(np.diag(split)), y, known, parts)
    looped = PoissonClassifier(from_matrix(split, Points(x)), tol=1e-12).fit(x, labels).label_distributions_
    ratio = np.linalg.norm(looped) / np.linalg.norm(wanted)  # of the units of weights
    worst = largest(worst, apart(looped / ratio, wanted) / np.abs(wanted).max() / 1e2)
    near = HarmonicClassifier(from_matrix(k, Points(x)), fidelity=2.0, tol=1e-13).fit(x, labels).label_distributions_
    held = 2 * degree * (labels >= 0)
    wanted = np.linalg.solve(laplacian(bare) + np.diag(held), held[:, None] * y)
    worst = largest(worst, apart(near, wanted / wanted.sum(axis=1, keepdims=True)))
    for alpha in (0.3, 0.9):
        faint = LabelSpreading("precomputed", alpha=alpha).fit(1e-250 * bare, labels).label_distributions_
        spread = LabelSpreading(from_matrix(k, Points(x)), alpha=alpha).fit(x, labels).label_distributions_
        wanted = np.linalg.solve(np.eye(n) - alpha * bare / np.sqrt(np.outer(degree, degree)), y)
        wanted /= wanted.sum(axis=1, keepdims=True)
        worst = largest(worst, apart(spread, wanted), apart(faint, wanted))
    spread = LabelSpreading("rbf", gamma=1 / 0.3).fit(x, labels)  # other points average shares
    rows = np.exp(-squares(others, x) / 0.3)
    wanted = rows / rows.sum(axis=1, keepdims=True) @ spread.label_distributions_
    worst = largest(worst, apart(spread.predict_proba(others), wanted))
    path = np.diag(np.ones(59), 1) + np.diag(np.ones(59), -1)  # whose far end gets 1e-50 of a label
    ends = np.where(np.arange(60) < 2, np.arange(60), -1)
    one, other = (LabelSpreading("precomputed").fit(unit * path, ends).label_distributions_ for unit in (1.0, 1e290))
    worst = largest(worst, apart(other / one, 1) / 10)
    # Kernels without a matrix: a loop is 1 of the degree, and points that see nobody are parts of their own.
    far = np.concatenate([x, [[90.0, 0.0], [0.0, 90.0]]])
    graph, alone = copy.copy(model.graph_), Points(far, weights=np.ones(n + 2))
    graph.__dict__.pop("own", None)
    sums = np.exp(-squares(far, far) / 0.08).sum(axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # points that see nobody are told
        graph._kernel, graph.affinity = Gaussian(0.2), affinity(Gaussian(0.2), alone, far, method="pairwise")
        own, found_ = graph.own, graph.parts()
    wrong = sorted(np.bincount(found_)[np.unique(found_)].tolist()) != [1, 1, n] or found_.dtype.kind != "i"
    return largest(worst, apart(own, 1 / sums), float(wrong))


# ---- iterations, folds and evidence


def told(rng: np.random.Generator) -> float:
    """Return errors of what is still to come, of iterations that are counted, and of scores of hidden values."""
    from nlflow.learning import HarmonicRegressor, LabelSpreading
    from nlflow.learning.selection import _folds, choose, log_evidence
    from nlflow.learning.spreading import _still_to_come

    worst, u = 0.0, np.ones(3)
    for change, before, alpha in ((0.02, 0.05, 0.2), (0.02, 0.4, 0.3), (0.03, math.inf, 0.25), (1e-16, 0.1, 0.4)):
        ratio = max(change / before, alpha)
        exact = change * ratio / (1 - ratio) if change > 1e-15 else change / (1 - alpha)  # of rounding the last as well
        worst = largest(worst, abs(_still_to_come(change, before, alpha, u) / exact - 1))
    worst = largest(worst, float(_still_to_come(0.4, 0.3, 0.2, u) != math.inf))
    x = rng.random((40, 2))
    y = np.where(np.arange(40) < 12, np.sin(4 * x[:, 0]) + x[:, 1], np.nan)
    model, values = HarmonicRegressor("rbf", gamma=8.0, fidelity=1.0), [0.5, 4.0]
    curve = choose(model, x, y, "fidelity", values, folds=3, rng=4)
    w = np.exp(-8.0 * squares(x, x))
    np.fill_diagonal(w, 0)
    for row, strength in enumerate(values):
        for column, hidden in enumerate(_folds(y, np.arange(12), 3, 4, False)):
            held = strength * w.sum(axis=1) * (np.arange(40) < 12)
            held[hidden] = 0
            found = np.linalg.solve(laplacian(w) + np.diag(held), held * np.nan_to_num(y))
            worst = largest(worst, abs(curve.scores[row, column] + np.mean((found[hidden] - y[hidden]) ** 2)))
    worst = largest(worst, float((np.asarray(curve.iterations) < 3).any()))
    many = rng.random((120, 2))  # of which few edges decide
    labels = np.where(np.arange(120) < 6, np.arange(120) % 2, -1)
    spread = LabelSpreading("rbf", gamma=2000.0, alpha=0.2).fit(many, labels)
    steps = [int(word) for word in spread.message_.replace("further", "").split() if word.isdigit()]
    worst = largest(worst, float(spread.n_iter_ != steps[0] + steps[1] or min(steps[:2]) < 1))
    k, nodes = from_matrix(w + np.eye(40), Points(x)), np.arange(0, 40, 6)
    z = np.round(1024 * rng.standard_normal(7)) / 1024
    one, moved, wide = (log_evidence(k, nodes, v, fidelity=2.0) for v in (z, z + 2.0**33, 1e6 * z))
    return largest(worst, abs(moved - one), abs(one - wide - 6 * math.log(1e6)))


# ---- widths and maps


def widths(rng: np.random.Generator) -> float:
    """Return errors of widths of points and of others, of rates, and of densities over their mean, relative."""
    from nlflow.learning import DiffusionMap
    from nlflow.learning.embedding import _over_mean
    from nlflow.learning.widths import median_rate, width_curve

    x, others, worst = rng.standard_normal((40, 2)) * [1.0, 0.5], rng.standard_normal((6, 2)), 0.0
    pairs = squares(x, x)[np.triu_indices(40, 1)]
    for unit in (1.0, 3e3, 7e-4):
        worst = largest(worst, abs(median_rate(unit * x) * unit**2 * np.median(pairs) - 1))
        curve = width_curve(unit * x)
        sums = np.array([np.exp(-squares(x, x) / (2 * (w / unit) ** 2)).mean() for w in curve.widths])
        slopes = np.gradient(np.log(sums), np.log(curve.widths))
        worst = largest(worst, apart(curve.sums / sums, 1), abs(curve.dimension / slopes.max() - 1))
        worst = largest(worst, abs(curve.gamma * 2 * curve.widths[np.argmax(slopes)] ** 2 - 1))
        grid = np.sqrt(np.median(pairs)) * 2 ** np.linspace(-9, 4, 53)
        worst = largest(worst, apart(curve.widths / unit / grid, 1))
    numbers = _over_mean(np.array([-3.0, 0.5, 1.0]) + 900.0)
    exact = np.exp([-3.0, 0.5, 1.0])
    worst = largest(worst, apart(numbers / (exact / exact.mean()), 1))
    for gamma, beta in ((None, -0.5), (3.0, -0.3)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NlflowWarning)  # modes of few points
            model = DiffusionMap(2, "rbf", gamma=gamma, beta=beta, t=1.5, alpha=0.7).fit(x)
            small = DiffusionMap(2, "rbf", gamma=gamma, beta=beta).fit(1e-3 * x).graph_.widths
        found = model.graph_.widths
        if gamma is None:
            worst = largest(worst, apart(small.points / found.points / 1e-3, 1))
        d, q = found.dimension, []

        def near(far: Floats) -> Floats:
            return np.sqrt((np.sort(far, axis=1)[:, :8] ** 2).mean(axis=1))

        apart_ = np.sqrt(squares(x, x))
        own = near(apart_ + np.diag(np.full(40, np.inf)))
        for far, r in ((apart_, own), (np.sqrt(squares(others, x)), None)):
            at = near(np.sort(far, axis=1)[:, :39]) if r is None else r
            scaled = np.exp(-(far**2) / np.outer(at, own) / (2 * found._factor**2)).sum(axis=1)
            # Of other points the farthest is not one of as many neighbours as points have; each counts itself as well.
            if r is None:
                scaled += 1 - np.exp(-(far.max(axis=1) ** 2) / (at * own[far.argmax(axis=1)]) / (2 * found._factor**2))
            q.append(np.log(scaled) - d * np.log(at))
        r, there = (np.exp(beta * (one - q[0].mean())) for one in q)
        scale = 1 / math.sqrt(3.0) if gamma else math.sqrt(2) * found.curve.best
        worst = largest(worst, apart(found.points / (scale * r), 1))
        s, s_there = scale * r, scale * there
        # The generator L = 4 (P - I) / s², of weights (s s')^-(d/2 + 1) (q q')^-alpha k.
        k = np.exp(-squares(x, x) / np.outer(s, s))
        density = k.sum(axis=1) / s**d
        mass = s ** -(d / 2 + 1) * density**-0.7
        w = mass[:, None] * k * mass
        move = s.min() ** 2 / 4
        p = np.eye(40) + (w / w.sum(axis=1, keepdims=True) - np.eye(40)) * (s.min() / s[:, None]) ** 2
        values, vectors = np.linalg.eig(p)
        order = np.argsort(-values.real)[1:3]
        worst = largest(worst, apart(model.eigenvalues_ / values.real[order], 1))
        worst = largest(worst, apart(model.generator_ / ((values.real[order] - 1) / move), 1))
        worst = largest(worst, apart(model.density_ / (density / density.mean()), 1))
        law = np.linalg.svd(p.T - np.eye(40))[2][-1]
        law /= law.sum()
        modes = vectors.real[:, order]
        modes /= np.sqrt(law @ modes**2)
        worst = largest(worst, apart(np.abs(model.embedding_), np.abs(modes * values.real[order] ** 1.5)))
        worst = largest(worst, apart(model.participation_ * ((law[:, None] * modes**2) ** 2).sum(axis=0), 1))
        rows = np.exp(-squares(others, x) / np.outer(s_there, s)) * mass
        means = np.abs(rows / rows.sum(axis=1, keepdims=True) @ modes)
        kept = 1 + (values.real[order] - 1) * (s_there[:, None] / s.min()) ** 2
        seen = kept > 1e-3
        placed = np.abs(model.transform(others))
        wanted = means * values.real[order] ** 1.5 / kept
        worst = largest(worst, apart(placed[seen], wanted[seen]) / 10, float(seen.sum() < 2))
    return worst


def maps(rng: np.random.Generator) -> float:
    """Return errors of diffusion maps of all pairs and of neighbours, at points and at others."""
    from nlflow.affinities.nearest import nearest_neighbours
    from nlflow.learning import DiffusionMap
    from nlflow.learning.graphs import SELF_TUNING

    x, others, worst = rng.random((40, 2)) * [2.0, 1.0], rng.random((6, 2)) * [2.0, 1.0], 0.0
    search = nearest_neighbours(x, 9, "auto", None)
    near = search.graph(SELF_TUNING, "either", local=True).toarray() + np.eye(40)
    for name, k, rows, more in (
        ("rbf", np.exp(-2.0 * squares(x, x)), np.exp(-2.0 * squares(others, x)), {"gamma": 2.0}),
        ("knn", near, search.rows(others, SELF_TUNING)[0].toarray(), {"n_neighbors": 9}),
    ):
        model = DiffusionMap(3, name, alpha=0.6, t=2.5, **more).fit(x)  # type: ignore[arg-type]
        q = k.sum(axis=1)
        p = k * q**-0.6
        p /= p.sum(axis=1, keepdims=True)
        values, vectors = np.linalg.eig(p)
        order = np.argsort(-values.real)[1:4]
        law = np.linalg.svd(p.T - np.eye(40))[2][-1]
        modes = vectors.real[:, order] / np.sqrt(law / law.sum() @ vectors.real[:, order] ** 2)
        worst = largest(worst, apart(np.abs(model.embedding_), np.abs(modes * values.real[order] ** 2.5)))
        worst = largest(worst, apart(model.density_, q / q.mean()))
        there = rows * q**-0.6
        placed = there / there.sum(axis=1, keepdims=True) @ modes * values.real[order] ** 1.5
        worst = largest(worst, apart(np.abs(model.transform(others)), np.abs(placed)))
    return worst


def clusters(rng: np.random.Generator) -> float:
    """Return how many points are not in their cluster, of which the largest is the first."""
    from nlflow.learning import spectral_clustering

    sizes = (9, 21, 14)
    places = np.repeat([[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]], sizes, axis=0)
    found = spectral_clustering(places + 0.4 * rng.standard_normal((44, 2)), 3, affinity="rbf", gamma=1.0)
    return float(np.sum(found != np.repeat([2, 0, 1], sizes)))


def run(context: Context) -> Outcome:
    if importlib.util.find_spec("sklearn") is None:
        raise CannotRunError("scikit-learn is not installed: pip install 'nlflow[learning]'")
    rng = np.random.default_rng(10)
    return Outcome([
        Check("Newton's steps to prices of classes, and numbers by the largest remainders", prices(rng), 1e-4),
        Check("graphs with loops, parts, tiny weights or a function, against dense systems", graphs(rng), 1e-9),
        Check("what is still to come, is counted, is hidden, and evidence in other units", told(rng), 1e-6),
        Check("widths by density, their generator and its modes, at points and others", widths(rng), 1e-6),
        Check("diffusion maps with α = 0.6 and t = 2.5, at points and others", maps(rng), 1e-6),
        Check("points that are in no cluster of theirs", clusters(rng), 0),
    ])  # fmt: skip


CLAIM = Claim(
    name="estimators-by-hand",
    title="Each step of learning on graphs is the formula that it names",
    statement=(
        "Prices of classes take Newton's steps for T Σ log Σ exp((s + b)/T) − a·b. Loops have no part: fidelity and "
        "spreading are those of edges to others. Parts of a graph are learnt by themselves. With widths s the "
        "generator is 4(P − I)/s² of the weights (ss′)^−(d/2 + 1) (qq′)^−α k, and other points are placed by one "
        "average. Each is written out in dense float64 for some forty points."
    ),
    source="derived; Calder et al. 2020, arXiv 2006.11184; Berry, Harlim 2016, doi 10.1016/j.acha.2015.01.001",
    run=run,
)
