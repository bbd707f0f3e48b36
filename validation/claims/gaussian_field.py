"""The field exp(-beta E) has the covariance ((L + Lambda)^-1)_ij / (beta w_j); intervals cover as they say."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from nlflow import E, Gaussian, Grid, Points, affinity, from_matrix
from nlflow.equilibria import GaussianField, Variances
from validation.harness import FALSE_ALARM, Check, Claim, Context, Outcome, bonferroni, largest

Floats = NDArray[np.float64]

BETA = 1.7


class Problem:
    """Weighted nodes in a square, with the matrices of J and of the fidelity written out."""

    def __init__(self, n: int, width: float, measure: str, fidelity: str, seed: int) -> None:
        rng = np.random.default_rng(seed)
        x, w = rng.random((n, 2)), rng.uniform(0.5, 2, n) / n
        squared = np.sum(x**2, axis=1)
        far = np.maximum(squared[:, None] + squared - 2 * x @ x.T, 0.0)
        k = 3 * np.exp(-far / (2 * width**2))
        strength: Any = 0.3 if fidelity == "number" else rng.uniform(0.05, 1, n)
        f = rng.standard_normal(n)
        self.field = GaussianField(E(from_matrix(k, Points(x, weights=w)), f, strength, measure=measure), beta=BETA)
        both = 2 * w[:, None] * k * w
        np.fill_diagonal(both, 0.0)
        degree = 2 * k @ w
        self.prior = BETA * (np.diag(both.sum(axis=1)) - both)
        self.noise = BETA * (w if measure == "l2" else w * degree) * strength
        self.precision = self.prior + np.diag(self.noise)
        self.mean = np.linalg.solve(self.precision, self.noise * f)


def p_value(problem: Problem, draws: int, method: str) -> float:
    """Return the p-value of two chi-squared statistics of samples: of all forms, and of white coordinates."""
    samples = problem.field.sample(draws, rng=1, method=method) - problem.mean
    white = samples @ np.linalg.cholesky(problem.precision)
    forms = np.sum(white**2, axis=1)
    n = white.shape[1]
    total = chi2.cdf(forms.sum(), forms.size * n)
    means = chi2.sf(draws * np.sum(white.mean(axis=0) ** 2), n)
    each = chi2.cdf(np.sum(white**2, axis=0), draws)
    return bonferroni([2 * min(total, 1 - total), means, bonferroni(list(2 * np.minimum(each, 1 - each)))])


def covered(found: Variances, exact: Floats) -> float:
    return float(np.mean((found.lower <= exact) & (exact <= found.upper)))


def band_share(nodes: int, repeats: int) -> tuple[float, float]:
    """Return which share of nodes, and of whole signals, is within 90 % bands when the prior is true.

    Signals are drawn from exp(-beta J) by all eigenvectors, their mean being 0, and observed with the noise of E.
    """
    x = np.linspace(0, 1, nodes)[:, None]
    weights = from_matrix(3 * np.exp(-((x - x.T) ** 2) / (2 * 0.05**2)), Points(x))
    first = GaussianField(E(weights, np.zeros(nodes), 0.3), beta=BETA)
    w = np.asarray(weights.domain.weights)
    both = 2 * w[:, None] * 3 * np.exp(-((x - x.T) ** 2) / (2 * 0.05**2)) * w
    values, vectors = np.linalg.eigh(BETA * (np.diag(both.sum(axis=1)) - both))
    rng = np.random.default_rng(5)
    variances = first.variance()
    factor = first.band(0.9, simultaneous=True, samples=4000, variances=variances).factor
    sd, each, whole = np.sqrt(variances.value), [], []
    for _ in range(repeats):
        u = vectors[:, 1:] @ (rng.standard_normal(nodes - 1) / np.sqrt(values[1:]))
        f = u + rng.standard_normal(nodes) / np.sqrt(BETA * w * 0.3)
        band = GaussianField(E(weights, f, 0.3), beta=BETA).band(0.9, variances=variances)
        each.append(np.mean((band.lower <= u) & (u <= band.upper)))
        middle = (band.lower + band.upper) / 2
        whole.append(bool(np.all(np.abs(u - middle) <= factor * sd)))
    return float(np.mean(each)), float(np.mean(whole))


def run(context: Context) -> Outcome:
    off = 0.0
    for measure in ("l2", "degree"):
        for fidelity in ("number", "nodes"):
            context.step(f"variances, {measure}, {fidelity}")
            problem = Problem(context.pick(2000, 300), context.pick(0.05, 0.1), measure, fidelity, 0)
            exact = np.diag(np.linalg.inv(problem.precision))
            off = largest(off, float(np.abs(problem.field.variance().value / exact - 1).max()))
    values = []
    for method in ("root", "perturbed"):
        context.step(f"samples, {method}")
        draws = context.pick(20000, 1000)
        values.append(p_value(Problem(60, 0.15, "degree", "nodes", 1), draws, method))
    side, repeats = context.pick(1000, 64), context.pick(100, 20)
    grid = Grid((side, side), boundary="periodic")
    weights = affinity(Gaussian(2.0), grid, method="convolution")
    field = GaussianField(E(weights, np.zeros(grid.shape), 0.5))
    exact = field.variance().value
    shares = []
    for seed in range(repeats):
        context.step(f"intervals of {grid.size} nodes, {seed + 1} of {repeats}")
        shares.append(covered(field.variance(method="samples", samples=16, rng=seed), exact))
    context.step("determinant")
    known = field.log_determinant().value
    found = field.log_determinant(method="lanczos", samples=8, averages=40, rng=2)
    context.step("bands")
    count = context.pick(2000, 150)
    each, whole = band_share(120, count)
    checks = [
        Check("variances against the diagonal of the dense inverse, relative", off, 1e-8),
        Check("p-value of samples, whitened by the dense precision", bonferroni(values), FALSE_ALARM, at_least=True),
        Check(f"share of 95 % intervals that cover, {grid.size} nodes and {repeats} repeats", float(np.mean(shares)),
              0.93, at_least=True),
        Check("log-determinant by quadrature in 40 averages: off, over its error",
              abs(found.value - known) / found.error, 2.0),
        Check("share of nodes within 90 % bands", each, 0.012, expected=0.9),
        Check("share of signals within simultaneous 90 % bands", whole, 4 * (0.09 / count) ** 0.5 + 0.015,
              expected=0.9),
    ]  # fmt: skip
    return Outcome(checks, {}, {"shares": shares, "determinant": [known, found.value, found.error]})


CLAIM = Claim(
    name="gaussian-field",
    title="The field of E has the covariance of its resolvent",
    statement=(
        "exp(−βE) is the law of a Gaussian field with the mean u* and the covariance ((L + Λ)⁻¹)ᵢⱼ / (β wⱼ). Samples, "
        "variances and determinants of the package agree with dense matrices. The 95 % intervals of sampled variances "
        "cover the exact ones of a transform in at least 93 of 100 cases. When J is the true prior and the noise has "
        "variance 1 / (β mᵢ λᵢ), credible bands hold what they say, for each node and for whole signals."
    ),
    source="H. Rue and L. Held 2005, Gaussian Markov Random Fields; P. Sidén et al. 2018, arXiv 1705.08656",
    run=run,
)
