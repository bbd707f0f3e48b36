"""A layer beside the flow that it is a step of: against matrix exponentials, powers and an integrator of our own."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import expm

from nlflow import InputError

torch = pytest.importorskip("torch")

from nlflow.attention import Head, Layer, LayerTrace, discretize, extrapolate, mean_cosine  # noqa: E402
from nlflow.attention.probing.discretization import order_of  # noqa: E402
from nlflow.attention.probing.verdicts import random_stochastic  # noqa: E402

Array = NDArray[Any]
SUBSTEPS = (1, 2, 4, 8, 16, 32, 64)


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(weights / weights.sum(1, keepdims=True))


def head(seed: int = 0, causal: bool = False, count: int = 12) -> Head:
    q, k, v = np.random.default_rng(seed).normal(size=(3, count, 4)) * 1.5
    bias = np.where(np.tri(count, dtype=bool), 0.0, -math.inf) if causal else None
    return Head(q, k, v, 0.5, bias)


def matrix_of(one: Head, symmetric: bool = False) -> Array:
    logits = 0.5 * (one.k if symmetric else one.q) @ one.k.T
    return softmax(logits if one.bias is None else logits + one.bias)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["queries", "keys"])
def test_frozen_flow(symmetric: bool, causal: bool) -> None:
    one = head(causal=causal)
    p = matrix_of(one, symmetric)
    generator = p - np.eye(len(p))
    exact = expm(generator) @ one.v
    way = np.linalg.norm(exact - one.v)
    found = discretize(one, substeps=SUBSTEPS, symmetric=symmetric)
    for m, distance in zip(SUBSTEPS, found.distance, strict=True):
        steps = np.linalg.matrix_power(np.eye(len(p)) + generator / m, m) @ one.v
        assert distance == pytest.approx(np.linalg.norm(steps - exact) / way, rel=1e-8)
    assert found.layer == pytest.approx(np.linalg.norm(matrix_of(one) @ one.v - exact) / way, rel=1e-8)
    assert (found.layer == pytest.approx(found.distance[0])) == (not symmetric)
    assert found.order == pytest.approx(1, abs=0.05)
    assert math.isnan(found.random_order) == symmetric
    if not symmetric:  # Euler's method has its order with any P, and with the same mask
        drawn = random_stochastic(len(p), np.random.default_rng(0), p > 0) - np.eye(len(p))
        exact = expm(drawn) @ one.v
        steps = [np.linalg.matrix_power(np.eye(len(p)) + drawn / m, m) @ one.v for m in SUBSTEPS]
        errors = np.array([np.linalg.norm(each - exact) for each in steps])
        assert found.random_order == pytest.approx(order_of(SUBSTEPS, errors), rel=1e-5)


def runge_kutta(one: Head, symmetric: bool, steps: int) -> Array:
    """Return the values at time 1 by the classical method of order 4, keys (and queries) moving with them."""
    u = [one.q.copy(), one.k.copy(), one.v.copy()]

    def velocity(state: list[Array]) -> list[Array]:
        logits = 0.5 * (state[1] if symmetric else state[0]) @ state[1].T
        p = softmax(logits if one.bias is None else logits + one.bias)
        return [p @ part - part for part in state]

    h = 1 / steps
    for _ in range(steps):
        a = velocity(u)
        b = velocity([x + h / 2 * y for x, y in zip(u, a, strict=True)])
        c = velocity([x + h / 2 * y for x, y in zip(u, b, strict=True)])
        d = velocity([x + h * y for x, y in zip(u, c, strict=True)])
        u = [x + h / 6 * (i + 2 * j + 2 * k + e) for x, i, j, k, e in zip(u, a, b, c, d, strict=True)]
    return u[2]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("symmetric", [False, True], ids=["queries", "keys"])
def test_evolving_flow(symmetric: bool, causal: bool) -> None:
    one = head(1, causal)
    exact = runge_kutta(one, symmetric, 200)
    found = discretize(one, substeps=SUBSTEPS, symmetric=symmetric, evolving=True)
    way = np.linalg.norm(exact - one.v)
    q, k, v = one.q, one.k, one.v
    for _ in range(4):
        p = matrix_of(Head(q, k, v, 0.5, one.bias), symmetric)
        q, k, v = (x + (p @ x - x) / 4 for x in (q, k, v))
    assert found.distance[2] == pytest.approx(np.linalg.norm(v - exact) / way, rel=1e-6)
    assert found.layer == pytest.approx(np.linalg.norm(matrix_of(one) @ one.v - exact) / way, rel=1e-6)
    assert found.order == pytest.approx(1, abs=0.05)


def layer(name: str, *heads: Head) -> Layer:
    parts = [torch.from_numpy(np.stack([getattr(one, part) for one in heads]))[None] for part in "qkv"]
    return Layer(name, "encoder", False, 0.5, "softmax", *parts, None, torch.ones(1, len(heads[0].v), dtype=torch.bool))


def test_a_layer_is_all_its_heads() -> None:
    heads = [head(seed) for seed in (3, 4)]
    errors = np.zeros(2)
    way = 0.0
    for one in heads:
        p = matrix_of(one)
        exact = expm(p - np.eye(len(p))) @ one.v
        errors += [np.sum((np.linalg.matrix_power(np.eye(len(p)) + (p - np.eye(len(p))) / m, m) @ one.v - exact) ** 2)
                   for m in (1, 3)]  # fmt: skip
        way += np.sum((exact - one.v) ** 2)
    found = discretize(layer("one", *heads), substeps=(1, 3))
    np.testing.assert_allclose(found.distance, np.sqrt(errors / way), rtol=1e-8)
    assert math.isnan(found.order)  # two points are no line
    alone = discretize(heads[0], substeps=(1, 3))
    assert alone.distance[0] != found.distance[0]


def plain_likeness(matrices: list[Array], values: list[Array]) -> tuple[float, float]:
    energy = size = 0.0
    for a, v in zip(matrices, values, strict=True):
        energy += sum(a[i, j] * ((v[i] - v[j]) ** 2).sum() for i in range(len(v)) for j in range(len(v))) / 2 / len(v)
        size += (v**2).sum(1).mean()
    return float(mean_cosine(np.hstack(values))), energy / size


@pytest.mark.parametrize(("laziness", "fidelity"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.4), (0.3, 0.1)])
def test_depth(laziness: float, fidelity: float) -> None:
    """Powers of one layer's matrices, beside what the layers that follow have."""
    stack = [[head(10 * n + h) for h in range(2)] for n in range(4)]
    trace = LayerTrace([layer(f"layer.{n}", *heads) for n, heads in enumerate(stack)], "Model", {})
    found = extrapolate(trace, "layer.1", 5, laziness=laziness, fidelity=fidelity)
    assert found.layer == "layer.1"
    assert found.depth.tolist() == [0, 1, 2, 3, 4, 5]
    matrices = [matrix_of(one) for one in stack[1]]
    values = [one.v for one in stack[1]]
    first = [one.v for one in stack[0]]
    for n in range(6):
        expected = plain_likeness(matrices, values)
        assert (found.cosine[n], found.energy[n]) == pytest.approx(expected, rel=1e-10)
        if n < 3:
            own = plain_likeness([matrix_of(one) for one in stack[n + 1]], [one.v for one in stack[n + 1]])
            assert (found.measured_cosine[n], found.measured_energy[n]) == pytest.approx(own, rel=1e-10)
        values = [(1 - laziness) * a @ u + laziness * u + fidelity * (f - u)
                  for a, u, f in zip(matrices, values, first, strict=True)]  # fmt: skip
    assert np.isnan(found.measured_cosine[3:]).all()
    assert len(extrapolate(trace, 1).depth) == 3
    if fidelity == 0:
        assert extrapolate(trace, 0, 60).cosine[-1] == pytest.approx(1, abs=1e-6)  # smoothing without end


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: discretize(head(), substeps=()), "substeps: got none"),
        (lambda: discretize(head(), substeps=(0, 1)), "substeps: got 0, expected an integer >= 1"),
        (lambda: discretize(Head(head().q, head().k, np.ones((12, 2)), 0.5)), "values that the flow does not move"),
    ],
    ids=["none", "zero", "constant"],
)
def test_bad_input(call: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_bad_depth() -> None:
    trace = LayerTrace([layer("one", head())], "Model", {})
    for options, words in (
        ({"layer": "two"}, "layer: got 'two', expected one of one"),
        ({"laziness": 1.0}, "laziness: got 1.0"),
        ({"fidelity": -1}, "fidelity: got -1"),
        ({"depth": -1}, "depth: got -1"),
    ):
        with pytest.raises(InputError, match=words):
            extrapolate(trace, **options)  # type: ignore[arg-type]
