"""Fidelities chosen from the noisy signal alone are nearly as good as the best one, which the clean signal tells."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from nlflow import E, Gaussian, Grid, J, affinity
from nlflow.equilibria import choose_fidelity
from nlflow.equilibria.sums import spectral_sums
from nlflow.flows.functions import symmetric_flow
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

GRID = np.geomspace(1e-2, 1e2, 25)


def trace_off(side: int) -> tuple[float, float, int]:
    """Return how far tr S in 40 averages is from that of the transform, relative, and over its error; the averages."""
    grid = Grid((side, side), boundary="periodic")
    flow = symmetric_flow(J(affinity(Gaussian(2.0), grid, method="convolution")))
    known = spectral_sums(flow, method="transform", samples=8, averages=40, rng=0)
    drawn = spectral_sums(flow, method="lanczos", samples=16, averages=40, rng=1)
    high = flow.spectral_bounds()[1]
    off, over = 0.0, 0.0
    for strength in high * np.geomspace(1e-3, 1, 7):
        exact, found = (sums.trace(lambda a, s=strength: s / (a + s)) for sums in (known, drawn))
        off = largest(off, abs(found.value / exact.value - 1))
        over = largest(over, abs(found.value - exact.value) / found.error)
    return off, over, drawn.averages


def ratios(count: int) -> dict[str, Floats]:
    """Return the root mean square errors with the fidelities that are chosen, over that of the best."""
    grid = Grid(400, spacing=1 / 400, boundary="reflect")
    weights = affinity(Gaussian(3 / 400), grid, method="convolution")
    x = grid.nodes[:, 0]
    clean = np.sin(2 * math.pi * x) + np.cos(5 * math.pi * x) / 2
    found: dict[str, list[float]] = {name: [] for name in ("rgcv", "gcv", "sure", "discrepancy", "evidence", "lcurve")}
    # The oracle: the cosine transform written out, and the clean signal.
    frequencies = np.arange(400)
    modes = np.cos(math.pi * frequencies[:, None] * (np.arange(400) + 0.5) / 400)
    modes *= np.where(frequencies == 0, 1, math.sqrt(2))[:, None] / 20
    offsets = np.arange(-200, 201)
    kernel = np.exp(-((offsets / 3) ** 2) / 2) / 400
    eigenvalues = 2 * (kernel.sum() - np.cos(math.pi * frequencies[:, None] * offsets / 400) @ kernel)
    strengths = eigenvalues.max() * np.geomspace(1e-5, 10, 400)
    for seed in range(count):
        f = clean + np.random.default_rng(seed).normal(0, 0.5, 400)
        part, true = modes @ f, modes @ clean
        errors = [float(np.linalg.norm(s / (eigenvalues + s) * part - true)) for s in strengths]
        for name, of_method in found.items():
            chosen = choose_fidelity(
                E(weights, f, 1.0), method=name, sigma=None if name in ("gcv", "rgcv") else 0.5
            ).value
            error = float(np.linalg.norm(chosen / (eigenvalues + chosen) * part - true))
            of_method.append(error / min(errors))
    return {name: np.array(of_method) for name, of_method in found.items()}


def run(context: Context) -> Outcome:
    side = context.pick(1000, 200)
    context.step(f"trace of {side**2} nodes")
    off, over, averages = trace_off(side)
    context.step("choices")
    found = ratios(context.pick(200, 30))
    medians = {name: float(np.median(of_method)) for name, of_method in found.items()}
    checks = [
        Check(f"tr S of {side**2} nodes against the transform, relative", off, context.pick(0.01, 0.04)),
        Check("the same over half the width of its 95 % interval", over, 2.0),
        Check("averages of that", float(averages), 40),
        *(Check(f"{name}: median error over the best", medians[name], 1.06) for name in ("gcv", "sure")),
        Check("rgcv: median error over the best", medians["rgcv"], 1.12),
        Check("gcv: ninth decile of the error over the best", float(np.quantile(found["gcv"], 0.9)), 1.35),
    ]
    return Outcome(checks, {}, {"median error over the best": medians})


CLAIM = Claim(
    name="choice-of-fidelity",
    title="A fidelity is chosen from the noisy signal",
    statement=(
        "With u = S f, S = λ (L + λ)⁻¹, the λ of generalized cross-validation, N |f − u|² / (N − tr S)², and that of "
        "Stein's estimate have nearly the error of the best λ. "
        "For 10⁶ nodes tr S is found within 1 % in 40 averages, for all λ at once."
    ),
    source="G. H. Golub, M. Heath and G. Wahba 1979, doi 10.1080/00401706.1979.10489751; C. M. Stein 1981",
    run=run,
)
