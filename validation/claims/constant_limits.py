"""The equilibrium is constant if and only if f is."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from nlflow import (
    AttentionFlow,
    E,
    ExpDotProduct,
    Gaussian,
    GradientFlow,
    Grid,
    J,
    Patch,
    Points,
    TopHat,
    affinity,
    diversity,
    diversity_bounds,
    equilibrium,
    fidelity_for_diversity,
    from_matrix,
)
from nlflow.errors import NlflowWarning
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


def guarantees(trials: int) -> tuple[float, float, float]:
    """Return how `fidelity_for_diversity` keeps its word, and how the bounds for q ≠ k agree, by NumPy's matrices.

    Of a symmetric K the mode that falls fastest keeps the share exactly. Of another P the fidelity and the bounds come
    from the singular values of I − P in L²(π), and the signal that keeps least keeps at least the share.
    """
    exact, least, apart = 0.0, np.inf, 0.0
    n = 30
    for seed in range(trials):
        rng = np.random.default_rng([7, seed])
        k, w, share = rng.random((n, n)) ** 3, rng.uniform(0.3, 2.0, n) / n, float(rng.uniform(0.2, 0.9))
        both = (k + k.T) * w
        degree = both.sum(axis=1)
        for metric in ("l2", "degree"):
            lowered = np.diag(degree) - both
            lowered = lowered if metric == "l2" else lowered / degree[:, None]
            values, vectors = np.linalg.eig(lowered)
            f = vectors[:, int(np.argmax(values.real))].real
            weights = from_matrix(k, Points(np.zeros(n), weights=w))
            flow = GradientFlow(E(weights, f, 1.0, measure=metric), metric)
            fidelity = _fidelity(flow, share)
            u = np.linalg.solve(lowered + fidelity * np.eye(n), fidelity * f)
            exact = largest(exact, abs(float(np.linalg.norm(u) / np.linalg.norm(f)) - share))
        layer = AttentionFlow(from_matrix(k, Points(np.zeros(n))), f, share)
        p = k / k.sum(axis=1, keepdims=True)
        values, vectors = np.linalg.eig(p.T)
        law = np.abs(vectors[:, int(np.argmax(values.real))].real)
        root = np.sqrt(law / law.sum())
        # An orthonormal basis of what is orthogonal to the root: signals of mean 0 in L²(π).
        basis = np.linalg.svd(root[None])[2][1:].T
        moved = basis.T @ (root[:, None] * (np.eye(n) - p) / root) @ basis
        fidelity = _fidelity(layer, share)
        apart = largest(apart, abs(fidelity * (1 - share) / share / np.linalg.norm(moved, 2) - 1))
        kept = np.linalg.inv(moved + fidelity * np.eye(n - 1)) * fidelity
        least = smallest(least, float(np.linalg.svd(kept, compute_uv=False)[-1]) / share)
        singular = np.linalg.svd(moved + share * np.eye(n - 1), compute_uv=False)
        wanted = share / singular[0], share / singular[-1]
        apart = largest(apart, *(abs(a / b - 1) for a, b in zip(diversity_bounds(layer), wanted, strict=True)))
    return exact, least, apart


def _fidelity(flow: Any, share: float) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # of layers that are unstable: an equilibrium is not
        return fidelity_for_diversity(flow, share)


def digits() -> float:
    """Return by how much a constant of 2^46 beside a signal changes what is told of its diversity, relative.

    Values are whole numbers, so that adding the constant rounds nothing.
    """
    rng, n = np.random.default_rng(12), 20
    u: Any = np.round(8 * rng.standard_normal(n))
    worst = 0.0
    for power in (1, 6):
        k = rng.random((n, n)) ** power
        apart, alike = (from_matrix(one, Points(np.zeros(n))) for one in (k, k + k.T))
        for flow in (AttentionFlow(apart), GradientFlow(J(alike), "degree")):
            worst = largest(worst, abs(float(diversity(flow, u + 2.0**46) / diversity(flow, u)) - 1))
    return worst


def warned() -> int:
    """Return for how many shares a warning of layers that are unstable, from 1 + μ_min on, comes wrongly or not at all.

    A layer with q = k that keeps the share φ has the fidelity φ/(1 − φ) (1 − μ_min).
    """
    k = np.random.default_rng(9).random((20, 20)) ** 3
    k += k.T
    least = float(np.linalg.eigvals(k / k.sum(axis=1, keepdims=True)).real.min())
    limit, wrong = (1 + least) / 2, 0  # of the share
    for share in (0.5 * limit, 0.999 * limit, 1.001 * limit, (1 + limit) / 2):
        weights, f = from_matrix(k, Points(np.zeros(20))), np.arange(20.0)
        for flow in (AttentionFlow(weights, f, 1.0), GradientFlow(E(weights, f, 1.0, measure="degree"), "degree")):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always", NlflowWarning)
                fidelity_for_diversity(flow, share)
            wrong += bool(found) != (share > limit)
    return wrong


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
    guaranteed, enough, apart = guarantees(context.pick(4, 2))
    checks = [
        Check(
            "fidelity for a share of the diversity: what the fastest mode keeps of it, less the share",
            guaranteed,
            1e-12,
        ),
        Check("the same for q ≠ k: least that any signal keeps over the share", enough, 1 - 1e-12, at_least=True),
        Check("q ≠ k: fidelity and bounds against singular values by NumPy, relative", apart, 1e-10),
        Check("diversity of a signal with a constant of 2^46 beside it, relative", digits(), 1e-11),
        Check("shares for which a warning of unstable layers comes wrongly, or not at all", warned(), 0),
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
        "that the lower bound λ/(λ + μ_max) tells; so λ = φ/(1 − φ) μ_max keeps the share φ of any. For symmetric and "
        "non-symmetric kernels of every structure, both metrics, λ over five decades."
    ),
    source=f"derived from {PAPER}, Proposition 1",
    run=run,
)
