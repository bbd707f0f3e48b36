"""NeuTRENO's equilibrium as the expectation over a stopped walk."""

from __future__ import annotations

import numpy as np
from scipy import stats

from nlflow import AttentionFlow, ExpDotProduct, Gaussian, Grid, MarkovChain, Points, affinity, equilibrium, from_matrix
from nlflow.affinities import Affinity
from nlflow.functionals.accuracy import Rows
from nlflow.functionals.fidelity import NodeFidelity
from nlflow.functionals.krylov import Solved
from nlflow.plotting import new_figure
from validation.harness import FALSE_ALARM, Check, Claim, Context, Outcome, bonferroni, largest, smallest


def run(context: Context) -> Outcome:
    rng = np.random.default_rng(0)
    n = 50
    f = np.sign(np.sin(np.arange(n) / 4)) + 0.2 * rng.standard_normal(n)
    q, k = rng.standard_normal((2, n, 8))
    cases = {
        "Gaussian, isolated grid": affinity(Gaussian(2.0), Grid(n, boundary="isolated")),
        "attention, q = k": affinity(ExpDotProduct(), Points(np.zeros(n)), k),
        "attention, q ≠ k": affinity(ExpDotProduct(), Points(np.zeros(n)), k, queries=q),
    }
    walkers = context.pick(100_000, 20_000)
    resolvent, scores, curves = 0.0, [], {}
    for name, weights in cases.items():
        chain = MarkovChain(weights)
        matrix = chain.matrix()
        for fidelity in (0.05, 0.4, 3.0):
            context.step(f"{name}, λ̃ = {fidelity:g}")
            exact = np.linalg.solve((1 + fidelity) * np.eye(n) - matrix, fidelity * f)
            found = equilibrium(AttentionFlow(weights, f, fidelity), rtol=1e-13).u
            resolvent = largest(resolvent, float(np.abs(found - exact).max()))
            starts = np.repeat(np.arange(n), walkers)
            ends = chain.stopped_walk(starts, fidelity / (1 + fidelity), n * walkers, rng=7)
            samples = f[ends].reshape(n, walkers)
            means, errors = samples.mean(axis=1), samples.std(axis=1) / np.sqrt(walkers)
            scores.extend(((means - exact) / errors).tolist())
            curves[name, fidelity] = (exact, means, errors)
    varying = _varying_fidelity(cases["attention, q ≠ k"], f, walkers)
    scores.extend(varying)
    normal = bonferroni((2 * stats.norm.sf(np.abs(scores))).tolist())
    # Squares of independent standard normal numbers add up to chi-square: too small errors would show as well.
    total = float(np.sum(np.square(scores)))
    two_sided = 2 * smallest(stats.chi2.sf(total, len(scores)), stats.chi2.cdf(total, len(scores)))
    apart, beyond = _bounds()
    checks = [
        Check("bounds of errors against max |r| / k and max |r| max v / min A v, relative", apart, 1e-8),
        Check("errors over these bounds", beyond, 1.0),
        Check("equilibrium against the resolvent by NumPy", resolvent, 1e-11),
        Check("equilibria by GMRES against the resolvent", _iterated(weights, matrix), 1e-7),
        Check("gaps of walks that are hardly killed against (1 − a) e, relative", _gaps(), 1e-10),
        Check(f"{len(scores)} means over stopped walkers: smallest p × their number", normal, FALSE_ALARM, True),
        Check("sum of the squared scores: two-sided p of χ²", float(two_sided), FALSE_ALARM, True),
    ]
    caption = (
        "NeuTRENO's equilibrium (lines) and the means of f over the places where walkers are stopped (dots, with two "
        "standard errors); grey: f."
    )
    return Outcome(checks, {caption: _figure(f, curves)}, {"walkers": walkers, "scores": len(scores)})


def _bounds() -> tuple[float, float]:
    """Return how far bounds of errors are from max |r_i| / k_i and v max |r_i|, relative, and the errors over them."""
    rng, n = np.random.default_rng(8), 30
    k = rng.random((n, n)) ** 3
    p, phi, held = k / k.sum(axis=1, keepdims=True), rng.uniform(0.1, 3, n), np.arange(n) < 4
    apart, beyond = 0.0, 0.0
    for fidelity in (NodeFidelity(0.3), NodeFidelity(phi)):
        given = fidelity.times(np.ones(n))
        a = np.eye(n) - p + np.diag(given)
        rows = Rows.of(lambda v, pull=fidelity: v - p @ v + pull.times(v), fidelity, phi, (0,))
        b = given * rng.standard_normal(n)
        exact = np.linalg.solve(a, b)
        for size in (1e-3, 0.1):
            x = exact + size * rng.standard_normal(n)
            told = rows.judged(Solved(x, 1e-3, 3), None, b, 0.0, np.inf).error
            wanted = float((np.abs(b - a @ x) / given).max() / np.abs(x).max())
            apart = largest(apart, abs(told / wanted - 1))
            beyond = largest(beyond, float(np.abs(x - exact).max() / np.abs(x).max()) / told)
    # Where nobody is stopped but at held nodes, v solves A v = D 1 there roughly, or to all digits.
    inside = np.where(held, 0.0, 1.0)
    a = inside[:, None] * (np.eye(n) - p) * inside + np.diag(1 - inside)
    rows = Rows.of(lambda v: inside * (v - p @ v), None, phi, (0,), free=lambda v: inside * v)
    b = inside * rng.standard_normal(n)
    exact = np.linalg.solve(a, b)
    x = exact + 1e-3 * inside * rng.standard_normal(n)

    def rough(right: np.ndarray, start: np.ndarray, rtol: float) -> Solved:
        return Solved(np.linalg.solve(a, right) * rough_by, 0.0, 1)

    rough_by = inside * rng.uniform(0.97, 1.03, n)
    v = np.linalg.solve(a, inside) * rough_by
    left = inside * (b - (x - p @ x))
    told = rows.judged(Solved(x, 1e-3, 3), rough, b, 0.0, 0.0).error
    wanted = np.abs(left).max() / np.abs(x).max() * v.max() / (v - p @ v)[~held].min()
    return largest(apart, abs(told / wanted - 1)), largest(
        beyond, float(np.abs(x - exact).max() / np.abs(x).max()) / told
    )


def _iterated(weights: Affinity, matrix: np.ndarray) -> float:
    """Return the largest error of equilibria by GMRES, over the signal, in units from tiny to huge."""
    f, worst = np.random.default_rng(3).standard_normal(len(matrix)), 0.0
    exact = np.linalg.solve(1.4 * np.eye(len(matrix)) - matrix, 0.4 * f)
    for unit in (1e-6, 1.0, 1e6):
        found = equilibrium(AttentionFlow(weights, unit * f, 0.4), rtol=1e-8, method="iterative")
        worst = largest(worst, float(np.abs(found.u / unit - exact).max()), float(not found.success))
    return worst


def _gaps() -> float:
    """Return by how much gaps of classes that are left once in a very long time differ from (1 − a) e, relative.

    Two states that exchange and leave with probability e, in a chain that stays with probability a on top.
    """
    worst = 0.0
    for leaves in (1e-3, 1e-8, 1e-13):
        stays = (1 - leaves) / 2
        weights = from_matrix(
            np.array([[stays, stays, leaves], [stays, stays, leaves], [0, 0, 1.0]]), Points(np.zeros(3))
        )
        for laziness in (0.0, 0.3):
            gap = MarkovChain(weights, laziness=laziness).spectral_gap
            worst = largest(worst, abs(gap / ((1 - laziness) * leaves) - 1))
    return worst


def _varying_fidelity(weights: object, f: np.ndarray, walkers: int) -> list[float]:
    """Return the scores for a fidelity of its own at each node, 0 at some: stopping varies with the place."""
    n = len(f)
    fidelity = np.where(np.arange(n) % 5 == 0, 0.0, np.linspace(0.1, 2.0, n))
    exact = equilibrium(AttentionFlow(weights, f, fidelity), rtol=1e-13).u
    ends = MarkovChain(weights).stopped_walk(
        np.repeat(np.arange(n), walkers), fidelity / (1 + fidelity), n * walkers, rng=8
    )
    samples = f[ends].reshape(n, walkers)
    return list((samples.mean(axis=1) - exact) / (samples.std(axis=1) / np.sqrt(walkers)))


def _figure(f: np.ndarray, curves: dict[tuple[str, float], tuple[np.ndarray, ...]]) -> object:
    names = list(dict.fromkeys(name for name, _ in curves))
    figure = new_figure(11, 3.6, dpi=110)
    axes = figure.subplots(1, len(names), sharey=True)
    for axis, name in zip(axes, names, strict=True):
        axis.plot(f, color="0.75", linewidth=1)
        for (case, fidelity), (exact, means, errors) in curves.items():
            if case == name:
                line = axis.plot(exact, linewidth=1.2, label=f"λ̃ = {fidelity:g}")[0]
                axis.errorbar(
                    np.arange(len(f)), means, 2 * errors, fmt=".", markersize=3, linewidth=0.8, color=line.get_color()
                )
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("node", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=8, frameon=False, loc="upper right")
    return figure


CLAIM = Claim(
    name="killed-walk",
    title="NeuTRENO's equilibrium is an expectation over a stopped walk",
    statement=(
        "u* = λ̃ ((1 + λ̃) I − P)⁻¹ f is the expectation of f where a walker from i is stopped, with probability "
        "λ̃/(1 + λ̃) before each move (personalized PageRank). Means over simulated walkers from every node are held "
        "against the resolvent by NumPy, for symmetric and asymmetric attention, and for a fidelity that varies from "
        f"node to node; false-alarm rate {FALSE_ALARM:g} for each of the two tests (seeds are fixed)."
    ),
    source="derived; arXiv 2312.00751, eq. 15-22",
    run=run,
)
