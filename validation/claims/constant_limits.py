"""The equilibrium is constant if and only if f is."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow import (
    AttentionFlow,
    E,
    ExpDotProduct,
    Gaussian,
    GradientFlow,
    Grid,
    Patch,
    Points,
    TopHat,
    affinity,
    diversity,
    diversity_bounds,
    equilibrium,
)
from validation.harness import PAPER, Check, Claim, Context, Outcome, largest, smallest


def affinities() -> dict[str, Any]:
    """Return affinities of every structure."""
    rng = np.random.default_rng(6)
    q, k = rng.standard_normal((2, 80, 8))
    image = np.cumsum(rng.standard_normal((10, 10)), axis=0)
    return {
        "Gaussian, scattered": affinity(Gaussian(0.2), Points(rng.random((80, 2)), rng.uniform(0.2, 1.8, 80))),
        "Gaussian, FFT": affinity(Gaussian(4.0), Grid((12, 10)), method="convolution"),
        "top-hat, isolated": affinity(TopHat(4.0), Grid(90, boundary="isolated")),
        "patches": affinity(Patch(2.0, patch_size=3, search_radius=2), Grid((10, 10)), image),
        "attention, q = k": affinity(ExpDotProduct(), Points(np.zeros(80)), k),
        "attention, q ≠ k": affinity(ExpDotProduct(), Points(np.zeros(80)), k, queries=q),
    }


def flows(weights: Any, f: Any, fidelity: float) -> list[Any]:
    """Return the flows that an affinity has: both metrics, and attention."""
    if not weights.symmetric:
        return [AttentionFlow(weights, f, fidelity)]
    return [
        GradientFlow(E(weights, f, fidelity, measure="l2"), "l2"),
        GradientFlow(E(weights, f, fidelity, measure="degree"), "degree"),
        AttentionFlow(weights, f, fidelity),
    ]


def run(context: Context) -> Outcome:
    rng = np.random.default_rng(7)
    only_if, least, small = 0.0, np.inf, np.inf
    for name, weights in affinities().items():
        context.step(name)
        shape = weights.domain.shape
        for fidelity in (1e-3, 1e-1, 1.0, 1e2):
            for flow in flows(weights, np.full(shape, -2.7), fidelity):
                u = equilibrium(flow, rtol=1e-13).u
                only_if = largest(only_if, float(np.abs(u + 2.7).max()))
            # Constants but for one node, by a lot and by very little.
            for size in (1.0, 1e-6):
                f = np.full(shape, 5.0)
                f.ravel()[int(rng.integers(f.size))] += size
                for flow in flows(weights, f, fidelity):
                    kept = diversity(flow, equilibrium(flow, rtol=1e-13).u) / diversity(flow, f)
                    low = diversity_bounds(flow)[0]
                    if size == 1.0:
                        least = smallest(least, kept / low)
                    else:
                        small = smallest(small, kept / low)
    checks = [
        Check("f constant: largest deviation of u* from it", only_if, 1e-13),
        Check("f constant but for one node: diversity kept, over its lower bound", least, 1 - 1e-9, at_least=True),
        Check(
            "f constant but for 1e-6 at one node: diversity kept, over its lower bound", small, 1 - 1e-6, at_least=True
        ),
    ]
    return Outcome(checks)


CLAIM = Claim(
    name="constant-limits",
    title="The equilibrium is constant if and only if f is",
    statement=(
        "For λ > 0 the limit of the E-flow is constant exactly when f is: a constant f passes through every averaging "
        "operator unchanged, and a deviation of f at a single node, however small, leaves at least the fraction of it "
        "that the lower bound λ/(λ + μ_max) tells. For symmetric and non-symmetric kernels of every structure, both "
        "metrics, λ over five decades."
    ),
    source=f"derived from {PAPER}, Proposition 1",
    run=run,
)
