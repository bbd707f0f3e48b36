"""Lemma 2: the stationary law, in several ways."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nlflow import ExpDotProduct, Gaussian, Grid, MarkovChain, Patch, Points, affinity
from nlflow.plotting import chain_figure
from validation.harness import PAPER, Check, Claim, Context, Outcome, largest, smallest

Floats = NDArray[np.float64]


def chains(context: Context) -> dict[str, MarkovChain]:
    """Return symmetric and non-symmetric chains, dense and matrix-free."""
    rng = np.random.default_rng(0)
    n = 120
    x = np.sort(rng.random(n))
    q, k = rng.standard_normal((2, n, 8))
    big = context.pick(2500, 1200)
    queries, keys = rng.standard_normal((2, big, 16))
    image = np.cumsum(rng.standard_normal((12, 12)), axis=1)
    return {
        "Gaussian, scattered points": MarkovChain(affinity(Gaussian(0.08), Points(x, rng.uniform(0.2, 1.8, n) / n))),
        "Gaussian, isolated grid": MarkovChain(affinity(Gaussian(6.0), Grid(n, boundary="isolated"))),
        "patches of an image": MarkovChain(affinity(Patch(2.0, patch_size=3, search_radius=3), Grid((12, 12)), image)),
        "attention, q = k": MarkovChain(affinity(ExpDotProduct(), Points(np.zeros(n)), k)),
        "attention, q ≠ k": MarkovChain(affinity(ExpDotProduct(), Points(np.zeros(n)), k, queries=q)),
        f"attention, q ≠ k, {big} tokens": MarkovChain(
            affinity(ExpDotProduct(), Points(np.zeros(big)), keys, queries=queries)
        ),
    }


def run(context: Context) -> Outcome:
    found: dict[str, dict[str, Floats]] = {}
    eigenvalue = fixed = spread = walked = 0.0
    positive, gap = np.inf, np.inf
    cases = chains(context)
    for name, chain in cases.items():
        context.step(name)
        matrix, law = chain.matrix(), chain.stationary.ravel()
        ways = {"MarkovChain.stationary": law}
        fixed = largest(fixed, float(np.abs(law @ matrix - law).sum()))
        if chain.states <= 200:
            values, vectors = np.linalg.eig(matrix.T)
            order = np.argsort(-values.real)
            left = np.abs(vectors[:, order[0]].real)
            ways["left eigenvector"] = left / left.sum()
            eigenvalue = largest(eigenvalue, float(np.abs(ways["left eigenvector"] - law).sum()))
            gap = smallest(gap, 1 - float(np.abs(values[order[1:]]).max()))
        power = matrix.copy()
        for _ in range(40):  # until all rows are the same
            power = power @ power
            power /= power.sum(axis=1, keepdims=True)
            if float(np.abs(power - power[0]).sum(axis=1).max()) < 1e-14:
                break
        ways["row of a high power of P"] = power[0]
        spread = largest(spread, float(np.abs(power - law).sum(axis=1).max()))
        if chain.states <= 200:
            walkers = context.pick(400_000, 100_000)
            ends = chain.walk(0, 4 * chain.mixing_time(1e-4), walkers, rng=5)
            counts = np.bincount(ends, minlength=chain.states) / walkers
            # In units of the standard error that independent draws from pi have.
            walked = largest(walked, float(np.sqrt(np.mean((counts - law) ** 2 / (law * (1 - law) / walkers)))))
        positive = smallest(positive, float(law.min()) * chain.states)
        found[name] = ways
    closed = _closed_form()
    checks = [
        Check("log π of a path that rises by e^500, against its closed form", _steep(), 1e-10),
        Check("modulus of all eigenvalues, above 1 by", _beyond_one(), float(np.finfo(float).eps)),
        Check("closed form w d / Σ w d, degrees written out, symmetric k", closed, 1e-14),
        Check("left eigenvector by NumPy, worst chain (L¹)", eigenvalue, 1e-11),
        Check("every row of a high power of P (L¹)", spread, 1e-11),
        Check("π P − π (L¹)", fixed, 1e-13),
        Check("π > 0: smallest entry times N", positive, 1e-12, at_least=True),
        Check("uniqueness: smallest 1 − |μ₂|", gap, 1e-6, at_least=True),
        Check("walkers after 4 mixing times, in standard errors (rms)", walked, 1.25),
    ]
    return Outcome(checks, _figures(cases, found))


def _closed_form() -> float:
    """Return how far the stationary law is from w d / sum w d with the degrees summed up here."""
    worst = 0.0
    for seed in range(5):
        rng = np.random.default_rng(seed)
        x, w = rng.random((50, 2)), rng.uniform(0.1, 2.0, 50)
        kernel = np.exp(-((x[:, None] - x[None]) ** 2).sum(axis=2) / 2 / 0.3**2)
        mass = w * (kernel @ w)
        law = MarkovChain(affinity(Gaussian(0.3), Points(x, w))).stationary
        worst = largest(worst, float(np.abs(law - mass / mass.sum()).sum()))
    return worst


def _steep() -> float:
    """Return how far log pi of a walk on a path is from that of detailed balance, a geometric law, either way round."""
    n, back = 60, 2e-4
    p = np.diag(np.full(n - 1, 1 - back), 1) + np.diag(np.full(n - 1, back), -1)
    p[0, 0], p[-1, -1] = back, 1 - back
    logs = np.arange(n) * np.log((1 - back) / back)
    logs -= np.logaddexp.reduce(logs)
    worst = 0.0
    for way in (1, -1):
        found = MarkovChain.from_transitions(p[::way, ::way], balance=1e-9).log_law
        worst = largest(worst, float(np.abs(found - logs[::way]).max()))
    return worst


def _beyond_one() -> float:
    """Return by how much an eigenvalue of some chain that is not reversible is above 1 in modulus, or 0."""
    worst = 0.0
    for seed in range(8):
        queries, keys = np.random.default_rng(seed).standard_normal((2, 30, 8))
        chain = MarkovChain(affinity(ExpDotProduct(), Points(np.zeros(30)), keys, queries=queries))
        worst = largest(worst, float(np.abs(chain.eigenvalues()).max()) - 1)
    return worst


def _figures(cases: dict[str, MarkovChain], found: dict[str, dict[str, Floats]]) -> dict[str, object]:
    figures = {}
    for name in ("Gaussian, scattered points", "attention, q ≠ k"):
        chain = cases[name]
        steps = 4 * chain.mixing_time(1e-3)
        figures[f"{name}: the stationary law in three ways, the spectrum of P, and the way to stationarity."] = (
            chain_figure(found[name], chain.eigenvalues(), decay={"worst start": chain.total_variation(steps)})
        )
    return figures


CLAIM = Claim(
    name="stationary-law",
    title="The stationary law",
    statement=(
        "Where every node can be reached (for K > 0, say) P has a unique stationary law π > 0. For symmetric k it is "
        "π ∝ w d; otherwise it is the left eigenvector of P at 1. MarkovChain.stationary is held against the closed "
        "form with degrees written out, against NumPy's eigenvectors, against every row of a high power of P, and "
        "against simulated walkers, for symmetric and non-symmetric kernels, dense and matrix-free."
    ),
    source=f"{PAPER}, Lemma 2 (eq. 18-19)",
    run=run,
)
