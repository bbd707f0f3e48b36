"""Equation 20: averages, repeated, run to the constant pi^T v, at the rate of the second eigenvalue."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nlflow import ExpDotProduct, Gaussian, Grid, Laplace, MarkovChain, Points, TopHat, affinity
from nlflow.plotting import Course, decay_figure
from validation.harness import PAPER, Check, Claim, Context, Outcome, chains_of, largest, smallest

Floats = NDArray[np.float64]


def chains(n: int) -> dict[str, tuple[MarkovChain, Floats]]:
    """Return chains with their transition matrices, written out from the kernels."""
    rng = np.random.default_rng(4)
    line = np.arange(n) + 0.5
    distance = np.abs(line[:, None] - line[None])
    q, k = rng.standard_normal((2, n, 16))
    grid, points = Grid(n, boundary="isolated"), Points(np.zeros(n))
    kernels = {
        "Gaussian": (affinity(Gaussian(n / 12), grid), np.exp(-((distance / (n / 12)) ** 2) / 2)),
        "Laplace": (affinity(Laplace(n / 20), grid), np.exp(-distance / (n / 20))),
        "top-hat": (affinity(TopHat(n / 8), grid), (distance <= n / 8).astype(float)),
        "attention, q = k": (affinity(ExpDotProduct(), points, k), np.exp(k @ k.T / 4)),
        "attention, q ≠ k": (affinity(ExpDotProduct(), points, k, queries=q), np.exp(q @ k.T / 4)),
    }
    return chains_of(kernels)


def run(context: Context) -> Outcome:
    n = context.pick(197, 96)
    v = np.random.default_rng(5).standard_normal((n, 8)) + 3.0
    limit = excess = eigenvalue = rate = 0.0
    mixing, courses = [], []
    for name, (chain, matrix) in chains(n).items():
        context.step(name)
        values, vectors = np.linalg.eig(matrix.T)
        order = np.argsort(-np.abs(values))
        law = np.abs(vectors[:, order[0]].real)
        law /= law.sum()
        second = float(np.abs(values[order[1]]))
        eigenvalue = largest(eigenvalue, abs(second - abs(chain.second_eigenvalue)))
        # Powers of P by NumPy, far beyond the time at which all rows are the same.
        steps = int(np.ceil(np.log(1e-14) / np.log(second)))
        reached = np.linalg.matrix_power(matrix, 2 * steps) @ v
        limit = largest(limit, float(np.abs(reached - chain.limit(v)).max()))
        distance = chain.distance_to_limit(v, steps)
        if chain.reversible:
            bound = second ** np.arange(steps + 1) * distance[0]
            above = distance > 1e-12 * distance[0]
            excess = largest(excess, float((distance[above] / bound[above]).max()) - 1)
        rate = largest(rate, abs(_measured_rate(chain, v) / np.log(second) - 1))
        if chain.reversible:
            low, high = chain.mixing_bounds(0.25)
            mixing.append((low, _mixing_time(matrix, law), high, chain.mixing_time(0.25)))
        courses.append(Course(name, np.arange(steps + 1.0), distance / distance[0], -float(np.log(second))))
    inside = smallest(*(end for low, brute, high, _ in mixing for end in (brute - low, high - brute)))
    checks = [
        Check("Pᵏv for k → ∞ (NumPy) against πᵀv", limit, 1e-11),
        Check("|μ₂| against NumPy", eigenvalue, 1e-11),
        Check("‖Pᵏv − πᵀv‖_π over |μ₂|ᵏ ‖v − πᵀv‖_π, minus 1, reversible chains", excess, 1e-9),
        Check("measured rate over log |μ₂|, minus 1", rate, 0.01),
        Check("mixing time: distance inside its spectral bounds, in moves", inside, 0.0, at_least=True),
        Check("mixing time against step-by-step search", max(abs(b - m) for _, b, _, m in mixing), 0.0),
    ]
    caption = "Distance of Pᵏv to the constant πᵀv (lines) and the predicted slopes |μ₂|ᵏ (dashed)."
    return Outcome(checks, {caption: decay_figure({"": courses}, xlabel="k")}, {"mixing": mixing})


def _measured_rate(chain: MarkovChain, v: Floats) -> float:
    """Return the mean logarithmic growth of the deviation from the limit a move, late on its way."""
    u, logs = v[:, 0] - float(chain.limit(v)[0, 0]), []
    for _ in range(1000):
        u = chain.expectation(u)
        u = u - chain.limit(u)  # what rounding has put back
        size = float(np.sqrt(np.mean(u**2)))
        logs.append(np.log(size))
        u = u / size
    return float(np.mean(logs[500:]))


def _mixing_time(matrix: Floats, law: Floats) -> int:
    """Return the first k at which the worst row is within 1/4 of the stationary law, looked for step by step."""
    power, k = np.eye(len(matrix)), 0
    while np.abs(power - law).sum(axis=1).max() / 2 > 0.25:
        power, k = power @ matrix, k + 1
    return k


CLAIM = Claim(
    name="limit-of-averages",
    title="Averages, repeated, run to a constant",
    statement=(
        "Pᵏv → πᵀv, the same constant at every node, as k → ∞: over-smoothing. The rate is |μ₂|; for reversible "
        "chains ‖Pᵏv − πᵀv‖_π ≤ |μ₂|ᵏ ‖v − πᵀv‖_π at every k, and the time to be within 1/4 of π in total variation "
        "lies between (t_rel − 1) log 2 and t_rel log(4/π_min), t_rel = 1/(1 − |μ₂|). Held against powers and "
        "eigenvalues of matrices written out from the kernels."
    ),
    source=f"{PAPER}, eq. 20; Levin and Peres, Markov Chains and Mixing Times, theorems 12.4, 12.5",
    run=run,
)
