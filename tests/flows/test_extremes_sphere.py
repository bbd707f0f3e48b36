"""Flows on the sphere, doubly stochastic affinities and other terms at extremes, against 50 digits."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest
from extremes import exact

import nlflow as nl
from nlflow import attention

pytestmark = [pytest.mark.numerical, pytest.mark.usefixtures("strict")]

EPS = float(np.finfo(float).eps)
TOKENS = nl.on_sphere(np.random.default_rng(0).standard_normal((6, 3)))


def velocity(x: Any, beta: float, normalization: str) -> Any:
    """Return the velocity to 50 digits."""
    rows = [exact(row) for row in x]
    result = []
    for own in rows:
        k = [mpmath.exp(mpmath.mpf(beta) * mpmath.fdot(own, other)) for other in rows]
        total = mpmath.fsum(k) if normalization == "softmax" else len(rows)
        a = [mpmath.fdot(k, [row[c] for row in rows]) / total for c in range(3)]
        along = mpmath.fdot(own, a)
        result.append([float(a[c] - along * own[c]) for c in range(3)])
    return np.array(result)


@pytest.mark.parametrize("beta", [0.0, 1e-300, 1e-8, 30.0, 600.0, 1e6, 1e300])
def test_velocities_for_any_temperature(beta: float) -> None:
    flow = nl.SphereFlow(TOKENS, beta)
    expected = velocity(TOKENS, min(beta, 1e6), "softmax")
    # A logit is off by a few roundings of beta; beyond 1e6 each token sees itself alone, and is at rest.
    assert np.abs(flow.velocity(TOKENS) - expected).max() <= 40 * EPS * (1 + min(beta, 1e6))
    if beta <= 600:
        free = nl.SphereFlow(TOKENS, beta, normalization="none")
        expected = velocity(TOKENS, beta, "none")
        assert np.abs(free.velocity(TOKENS) - expected).max() <= 40 * EPS * (1 + beta) * np.exp(beta)
        assert np.isfinite(free.interaction(TOKENS)) == (beta > 0)


@pytest.mark.parametrize("beta", [1e-300, 1e-8, 600.0])
def test_energies_for_any_temperature(beta: float) -> None:
    flow = nl.SphereFlow(TOKENS, beta)
    rows = [exact(row) for row in TOKENS]
    pairs = [mpmath.exp(mpmath.mpf(beta) * mpmath.fdot(x, y)) for x in rows for y in rows]
    expected = mpmath.fsum(pairs) / (2 * mpmath.mpf(beta) * 36)
    assert abs(mpmath.mpf(flow.interaction(TOKENS)) / expected - 1) <= 40 * EPS * (1 + beta)
    assert flow.energy(TOKENS) == -flow.interaction(TOKENS)


def test_steps_for_tokens_at_rest_and_opposite() -> None:
    for x in (np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[1.0, 0.0], [-1.0, 0.0]])):
        for step in (nl.GeodesicEuler(1.0), nl.GeodesicMidpoint(1.0), nl.LayerStep(1.0), nl.LayerStep(1e300)):
            assert np.array_equal(nl.solve(nl.SphereFlow(x, 3.0), x, t=step.dt, integrator=step).final, x)
    near = nl.on_sphere([[1.0, 1e-160], [1.0, 0.0]])
    final = nl.solve(nl.SphereFlow(near), near, t=1.0, integrator=nl.GeodesicMidpoint(0.5)).final
    assert np.abs(final - near).max() < 1e-150


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e300])
def test_directions_of_any_length(size: float) -> None:
    assert np.abs(nl.on_sphere(TOKENS * size) - TOKENS).max() <= 4 * EPS


@pytest.mark.parametrize("logits", [1e-300, 1.0, 700.0, 1e4])
def test_sums_are_one_for_any_logits(logits: float) -> None:
    x = np.random.default_rng(1).standard_normal((6, 3))
    p = nl.sinkhorn(nl.ExpDotProduct(scale=logits), nl.Points(np.arange(6.0), np.ones(6)), x)
    with np.errstate(under="ignore"):
        k = mpmath.matrix([[mpmath.exp(logits * mpmath.fdot(exact(a), exact(b))) for b in x] for a in x])
        u = [mpmath.mpf(1) for _ in range(6)]
        for _ in range(200):  # symmetric scalings halve the error of the logarithms
            u = [mpmath.sqrt(u[i] / mpmath.fdot(k[i, :], u)) for i in range(6)]
        expected = np.array([[float(u[i] * k[i, j] * u[j]) for j in range(6)] for i in range(6)])
    assert np.abs(p.matrix - expected).max() <= 1e-11 + 100 * EPS * logits
    for axis in (0, 1):
        assert np.abs(p.matrix.sum(axis=axis) - 1).max() <= 1e-11 + 100 * EPS * logits


def test_other_terms_of_large_and_small_values() -> None:
    torch = pytest.importorskip("torch")
    for kind in ("value-residual", "laplacian", "gated", "differential"):
        torch.manual_seed(0)
        layer = attention.NeighbourAttention(8, 2, kind, bias=False).double()
        x = torch.randn(1, 5, 8, dtype=torch.float64)
        for size in (1e-100, 1e100):
            found, _ = layer(size * x)
            assert bool(torch.isfinite(found).all()), (kind, size)
