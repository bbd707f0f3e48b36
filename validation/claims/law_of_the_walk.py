"""Lemma 1: averages are expectations over a random walk."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from nlflow import ExpDotProduct, Gaussian, Grid, MarkovChain, Points, TopHat, affinity
from nlflow.plotting import Series, new_figure, rate_figure
from validation.harness import FALSE_ALARM, PAPER, Check, Claim, Context, Outcome, bonferroni, chains_of, largest

Floats = NDArray[np.float64]


def written_out() -> dict[str, tuple[MarkovChain, Floats]]:
    """Return chains of the package with their transition matrices, written out from the kernels."""
    rng = np.random.default_rng(1)
    n = 60
    x = rng.random((n, 2))
    w = rng.uniform(0.2, 1.8, n) / n
    q, k = rng.standard_normal((2, n, 8))
    square = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    line = np.arange(n) + 0.5
    kernels = {
        "Gaussian, scattered points": (
            affinity(Gaussian(0.2), Points(x, w)),
            np.exp(-square / 2 / 0.2**2) * w,
        ),
        "attention, q ≠ k": (
            affinity(ExpDotProduct(), Points(np.zeros(n)), k, queries=q),
            np.exp(q @ k.T / np.sqrt(8)),
        ),
        "top-hat, isolated grid": (
            affinity(TopHat(3.0), Grid(n, boundary="isolated")),
            (np.abs(line[:, None] - line[None]) <= 3).astype(float),
        ),
    }
    return chains_of(kernels)


def run(context: Context) -> Outcome:
    walkers = context.pick(1_000_000, 200_000)
    values = np.random.default_rng(2).standard_normal((60, 3))
    exact = expectation = 0.0
    p_values, scores, observed = [], [], {}
    for name, (chain, matrix) in written_out().items():
        for steps in (1, 3, 10, 50):
            context.step(f"{name}, {steps} moves")
            power = np.linalg.matrix_power(matrix, steps)
            start = 7
            exact = largest(exact, float(np.abs(chain.law(start, steps) - power[start]).max()))
            expectation = largest(expectation, float(np.abs(chain.expectation(values, steps) - power @ values).max()))
            ends = chain.walk(start, steps, walkers, rng=steps)
            counts = np.bincount(ends, minlength=60)
            observed[name, steps] = (counts / walkers, power[start])
            p_values.append(_chi_square(counts, power[start] * walkers))
            mean, error = values[ends].mean(axis=0), values[ends].std(axis=0) / np.sqrt(walkers)
            scores.extend(((mean - (power @ values)[start]) / error).tolist())
    series, fit = _monte_carlo_rate(context)
    chi_square = bonferroni(p_values)
    normal = bonferroni((2 * stats.norm.sf(np.abs(scores))).tolist())
    checks = [
        Check("law of k moves against the matrix power", exact, 1e-13),
        Check("Pᵏv against the matrix power", expectation, 1e-13),
        Check(f"χ² of {len(p_values)} histograms: smallest p × their number", chi_square, FALSE_ALARM, at_least=True),
        Check(f"means of {len(scores)} samples: smallest p × their number", normal, FALSE_ALARM, at_least=True),
        Check("Monte-Carlo error: slope over the number of walkers", fit.slope, 0.05, expected=-0.5),
        Check("distance of −1/2 in half widths of the 95 % interval", abs(fit.slope + 0.5) / _half(fit), 1.0),
    ]
    figures = {
        "Where the walkers of one node are after k moves (bars) and the law (Pᵏ)ᵢ, written out with NumPy (dots).": (
            _histograms(observed)
        ),
        "Root mean square error of the Monte-Carlo estimate of (P¹⁰v)ᵢ over repetitions.": rate_figure(
            [series], xlabel="walkers", ylabel="error"
        ),
    }
    details = {"walkers": walkers, "p_values": p_values, "slope": fit.slope, "half_width": _half(fit)}
    return Outcome(checks, figures, details)


def _chi_square(counts: NDArray[np.int64], expected: Floats) -> float:
    """Return the p-value; states that are expected less than ten times count as one."""
    rare = expected < 10
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 10:  # hardly anybody is expected in all the rare states together
        counts, expected = counts[:-1], expected[:-1]
        expected = expected * counts.sum() / expected.sum()
    return float(stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue)


def _monte_carlo_rate(context: Context) -> tuple[Series, Any]:
    chain, matrix = written_out()["attention, q ≠ k"]
    v = np.random.default_rng(3).standard_normal(60)
    exact = (np.linalg.matrix_power(matrix, 10) @ v)[0]
    sizes = 4 ** np.arange(3, context.pick(9, 8))
    repeats = context.pick(200, 50)
    errors = np.empty(len(sizes))
    logs = []
    for i, size in enumerate(sizes):
        context.step(f"{size} walkers")
        ends = chain.walk(0, 10, int(size) * repeats, rng=100 + i).reshape(repeats, size)
        deviations = v[ends].mean(axis=1) - exact
        errors[i] = np.sqrt(np.mean(deviations**2))
        # The root mean square of groups of ten: ten independent points a size for the regression.
        groups = np.sqrt(np.mean(deviations.reshape(10, -1) ** 2, axis=1))
        logs.append(np.log(groups))
    x = np.repeat(np.log(sizes), 10)
    fit = stats.linregress(x, np.concatenate(logs))
    series = Series(
        "attention, q ≠ k", sizes.astype(float), errors, slope=fit.slope, expected=-0.5, half_width=_half(fit)
    )
    return series, fit


def _half(fit: Any) -> float:
    """Return the half width of the slope's 95 % interval."""
    return float(stats.norm.ppf(0.975) * fit.stderr)


def _histograms(observed: dict[tuple[str, int], tuple[Floats, Floats]]) -> object:
    names = list(dict.fromkeys(name for name, _ in observed))
    shown = (1, 3, 10)
    figure = new_figure(11, 6.4, dpi=110)
    axes = figure.subplots(len(names), len(shown), squeeze=False)
    for row, name in zip(axes, names, strict=True):
        for axis, steps in zip(row, shown, strict=True):
            counts, law = observed[name, steps]
            axis.bar(np.arange(len(law)), counts, width=1.0, color="#9db8d6", label="walkers")
            axis.plot(law, ".", color="#0b5394", markersize=4, label="law")
            axis.set_title(f"{name}: k = {steps}", fontsize=9)
            axis.tick_params(labelsize=8)
            axis.margins(x=0)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(fontsize=8, frameon=False)
    for axis in axes[-1]:
        axis.set_xlabel("node", fontsize=8)
    return figure


CLAIM = Claim(
    name="law-of-the-walk",
    title="Averages are expectations over a walk",
    statement=(
        "(Pᵏv)ᵢ = E[v(Bₖ) | B₀ = i]: the values after k attention layers are expectations of the first values at a "
        "walker that moves from i to j with probability Pᵢⱼ. Laws and expectations are held against powers of matrices "
        "written out from the kernels; simulated walkers against the laws by χ² tests and against the expectations by "
        f"normal tests, each family with a false-alarm rate of {FALSE_ALARM:g} (Bonferroni; seeds are fixed, so it is "
        "decided once); the Monte-Carlo error falls like the number of walkers to the power −1/2."
    ),
    source=f"{PAPER}, Lemma 1 (eq. 15-17)",
    run=run,
)
