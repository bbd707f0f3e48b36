"""Learning on graphs: each estimator is the minimizer, or the limit of minimizers, that it says."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.stats import multivariate_normal

from nlflow import Constraint, E, J, Jp, MarkovChain, Points, affinity_from_graph, from_matrix, neighbour_graph
from nlflow.errors import NlflowWarning
from nlflow.functionals.variational import harmonic_extension
from nlflow.plotting import Series, rate_figure
from validation.harness import CannotRunError, Check, Claim, Context, Outcome, largest


def _evidence() -> float:
    """Return errors of the evidence of values at some nodes, against SciPy's density of their contrasts."""
    from nlflow.learning.selection import log_evidence

    rng, n, nodes, worst = np.random.default_rng(3), 30, np.array([0, 4, 7, 12, 20, 25]), 0.0
    x, w, y = rng.random((n, 2)), rng.uniform(0.5, 2, n) / n, rng.standard_normal((6, 2))
    k = np.exp(-((x[:, None] - x) ** 2).sum(axis=2) / 0.1)
    inverse = np.linalg.pinv(w[:, None] * (np.diag(k @ w) - k * w))[np.ix_(nodes, nodes)]
    contrasts = np.linalg.svd(np.ones((1, 6)))[2][1:].T
    z = contrasts.T @ y
    for fidelity in (0.3, 2.0):
        spread = contrasts.T @ (inverse + np.diag(1 / (fidelity * w * (k @ w))[nodes])) @ contrasts
        scale = sum(float(one @ np.linalg.solve(spread, one)) for one in z.T) / z.size  # the likeliest
        exact = sum(multivariate_normal.logpdf(one, cov=scale * spread) for one in z.T)
        told = log_evidence(from_matrix(k, Points(x, weights=w)), nodes, y, fidelity=fidelity)
        worst = largest(worst, abs(told - exact - z.size / 2 * (np.log(2 * np.pi) + 1)))
    return worst


def _prices() -> float:
    """Return how far classes of so many rows are from the best assignment that SciPy finds: their counts and sum."""
    from nlflow.learning.balance import counts_of, shifts

    rng, worst, wanted = np.random.default_rng(5), 0.0, np.array([30, 20, 10])
    for scores in (rng.random((60, 3)), np.log(rng.random((60, 3))) - 2, 4 * rng.standard_normal((60, 3))):
        moved = scores + shifts(scores, wanted)
        slots = scores[:, np.repeat(np.arange(3), wanted)]
        best = float(slots[linear_sum_assignment(slots, maximize=True)].sum())
        found = float(scores[np.arange(60), moved.argmax(axis=1)].sum())
        worst = largest(worst, float(np.abs(counts_of(moved) - wanted).max()), abs(found - best))
    return worst


def _slowed() -> float:
    """Return errors of averages of I + (P − I)/t on a graph of neighbours, of nodes with and without weights."""
    from nlflow.learning import LabelSpreading

    rng, n, worst = np.random.default_rng(6), 40, 0.0
    labels = np.where(np.arange(n) < 4, np.arange(n) % 2, -1)
    graph, times = LabelSpreading("knn", n_neighbors=6).fit(rng.random((n, 2)), labels).graph_, rng.uniform(1, 5, n)
    for plain in (graph, graph.weighted(rng.uniform(0.5, 2, n))):
        before, after = (one.affinity.average(np.eye(n)) for one in (plain, plain.slowed(times)))
        worst = largest(worst, float(np.abs(after - np.eye(n) - (before - np.eye(n)) / times[:, None]).max()))
    return worst


def run(context: Context) -> Outcome:
    if importlib.util.find_spec("sklearn") is None:
        raise CannotRunError("scikit-learn is not installed: pip install 'nlflow[learning]'")
    from nlflow.learning import (
        DiffusionMap,
        HarmonicClassifier,
        LabelSpreading,
        PLaplacianClassifier,
        PoissonClassifier,
    )
    from nlflow.learning.graphs import SELF_TUNING

    n = context.pick(600, 200)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, 2)) + 3 * rng.integers(0, 2, (n, 1))
    y = (x.sum(axis=1) > 3).astype(int)
    known = rng.choice(n, 12, replace=False)
    few = np.full(n, -1)
    few[known] = y[known]
    graph = affinity_from_graph(neighbour_graph(x, 10, SELF_TUNING, local=True))
    w = graph.edges().toarray() / 2  # of K = k + k^T
    d = w.sum(axis=1)
    one_hot = np.zeros((n, 2))
    one_hot[known, y[known]] = 1

    context.step("label spreading")
    spread = LabelSpreading(graph, alpha=0.9).fit(x, few)
    f = np.linalg.solve(np.eye(n) - 0.9 * w / np.sqrt(np.outer(d, d)), one_hot)
    shares = largest(0.0, float(np.abs(spread.label_distributions_ - f / f.sum(axis=1, keepdims=True)).max()))
    slope = spread.functional_.gradient(spread.minimizer_, "degree")
    steep = float(np.abs(slope).max() / np.abs(spread.functional_.observed).max())

    other = LabelSpreading(graph, alpha=0.5).fit(x, few)  # by iteration, each probability to its own digits
    half = np.linalg.solve(np.eye(n) - 0.5 * w / np.sqrt(np.outer(d, d)), one_hot)
    half /= half.sum(axis=1, keepdims=True)
    relative = float(np.abs(other.label_distributions_ / half - 1)[half > 1e-12].max())
    most = float(other.n_iter_)

    looped = w + np.diag(rng.random(n) * d)  # a sample is no neighbour of itself
    alone = LabelSpreading("precomputed", alpha=0.9).fit(looped, few).label_distributions_
    loops = float(np.abs(alone - f / f.sum(axis=1, keepdims=True)).max())

    context.step("harmonic functions")
    harmonic = HarmonicClassifier(graph, tol=1e-12).fit(x, few).label_distributions_
    laplacian, free = np.diag(d) - w, few < 0
    inside = np.linalg.solve(laplacian[np.ix_(free, free)], w[np.ix_(free, ~free)] @ one_hot[~free])
    extension = float(np.abs(harmonic[free] - inside).max())
    committor = MarkovChain(graph).committor(known[y[known] == 0], known[y[known] == 1])
    first = float(np.abs(harmonic[:, 1] - committor).max())
    strengths = np.geomspace(10, 1e5, 5)
    apart = [
        float(
            np.abs(
                HarmonicClassifier(graph, fidelity=float(s), tol=1e-12).fit(x, few).label_distributions_ - harmonic
            ).max()
        )
        for s in strengths
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # masses are no counts, which is told
        weighed = HarmonicClassifier(graph, tol=1e-12, class_prior=[3, 1], balance="mass").fit(x, few)
    masses = harmonic[free].sum(axis=0)
    mass = float(np.abs(weighed.class_factors_ / (np.array([0.75, 0.25]) * masses.sum() / masses) - 1).max())
    counted = HarmonicClassifier(graph, tol=1e-12, class_prior=[3, 1]).fit(x, few).transduction_[free]
    asked = abs(int(np.sum(counted == 0)) - 0.75 * int(free.sum()))
    drawn = 0.0  # to their labels, with loops or without: the fidelity is that of the edges to others
    for given, name in ((graph, graph), (looped, "precomputed")):
        near = HarmonicClassifier(name, fidelity=2.0, tol=1e-12).fit(x if given is graph else looped, few)
        held = 2.0 * d * ~free
        wanted = np.linalg.solve(laplacian + np.diag(held), held[:, None] * one_hot)
        wanted /= wanted.sum(axis=1, keepdims=True)
        drawn = largest(drawn, float(np.abs(near.label_distributions_ - wanted).max()))
    rate = float(np.polyfit(np.log(strengths[1:]), np.log(apart[1:]), 1)[0])

    context.step("Poisson learning")
    poisson = PoissonClassifier(graph, tol=1e-12).fit(x, few)
    source = np.zeros((n, 2))
    source[known] = one_hot[known] - one_hot[known].mean(axis=0)
    u = np.linalg.lstsq(laplacian, source, rcond=None)[0]
    u -= d @ u / d.sum()
    potential = float(np.abs(poisson.label_distributions_ - u).max() / np.abs(u).max())
    small = 1e-6  # the fidelity, whose minimizers with f = s / lambda tend to the potential
    limit = E(graph.scaled(0.5), source / small, small).minimizer(rtol=1e-13).u
    limit = limit - d @ limit / d.sum()
    towards = float(np.abs(limit - u).max() / np.abs(u).max())

    context.step("p-Laplace learning")
    learnt = PLaplacianClassifier(graph, p=3.0, tol=1e-6).fit(x, few).label_distributions_
    jp = Jp(graph, 3.0)
    least = jp.value(learnt)
    nearby = min(jp.value(learnt + 1e-3 * free[:, None] * rng.normal(size=(n, 2))) for _ in range(20))
    square = harmonic_extension(Jp(graph, 2.0), Constraint(known, one_hot[known])).u
    two = float(np.abs(square - J(graph).minimizer(constraint=Constraint(known, one_hot[known])).u).max())

    context.step("diffusion maps")
    mapped = DiffusionMap(4, gamma=0.5, alpha=1.0).fit(x)
    k = np.exp(-0.5 * ((x[:, None] - x[None]) ** 2).sum(axis=2))
    k /= np.outer(k.sum(axis=1), k.sum(axis=1))
    spectrum = np.sort(np.linalg.eigvals(k / k.sum(axis=1, keepdims=True)).real)[::-1][1:5]

    checks = [
        Check("label spreading against (I − αS)⁻¹ Y, probabilities", shares, 1e-8),
        Check("for α = ½ each probability above 1e−12, relative", relative, 1e-7),
        Check("iterations of that", most, 100),
        Check("the same with loops, which do not count", loops, 1e-8),
        Check("label spreading: slope of E at its minimizer, relative", steep, 1e-8),
        Check("harmonic functions against the dense system", extension, 1e-8),
        Check("harmonic functions against committors", first, 1e-8),
        Check("E with the fidelity 2 at the labels, with loops and without, against the dense system", drawn, 1e-8),
        Check("factors of class masses in the ratio 3 to 1, against q / Σ f, relative", mass, 1e-8),
        Check("samples of a class off 3/4 of those without a label", asked, 1.0),
        Check("E with fidelity λ at the labels: slope of its distance to them over λ", rate, 0.05, expected=-1.0),
        Check("Poisson learning against the pseudo-inverse, relative", potential, 1e-8),
        Check("E with f = s/λ, λ = 1e−6, against Poisson learning, relative", towards, 1e-3),
        Check("p-Laplace learning: least J₃ of 20 signals around, over its own", nearby / least, 1.0, at_least=True),
        Check("p = 2 against harmonic functions", two, 1e-7),
        Check("classes of given sizes against SciPy's assignment", _prices(), 1e-9),
        Check("chains that are slowed down at each node", _slowed(), 1e-12),
        Check("evidence of values at some nodes against SciPy's density of contrasts, in log", _evidence(), 1e-8),
        Check("diffusion map against dense eigenvalues", float(np.abs(mapped.eigenvalues_ - spectrum).max()), 1e-10),
    ]  # fmt: skip
    series = Series("harmonic functions", strengths, np.array(apart), slope=rate, expected=-1.0, half_width=0.05)
    figures: dict[str, Any] = {
        "Distance of the minimizers of E, with a fidelity at the labels, from harmonic functions.": rate_figure(
            [series], xlabel="fidelity", ylabel="distance"
        )
    }
    return Outcome(checks, figures, {"nodes": n, "distances": apart})


CLAIM = Claim(
    name="learning-on-graphs",
    title="Learning on graphs is minimization of J, E and Jₚ",
    statement=(
        "Label spreading is D^(1/2) times the minimizer of E with the fidelity (1 − α)/α in the degree measure and f = "
        "D^(−1/2) Y. Harmonic functions minimize J with the labels held; they are committors, and the limit of "
        "minimizers of E as the fidelity of the labels grows (the distance goes like its inverse). Poisson learning "
        "solves Lu = s and is the limit of minimizers of E with f = s/λ as λ falls. p-Laplace learning minimizes Jₚ. "
        "Diffusion maps are eigenvectors of P. Each is held against dense linear algebra."
    ),
    source="Zhou et al. 2004; Zhu et al. 2003; Calder et al. 2020, arXiv 2006.11184; Flores et al. 2022; Coifman 2006",
    run=run,
)
