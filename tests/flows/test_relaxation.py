"""The slowest rate of a flow, against dense eigenvalues and against what the flow does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.linalg import eigvals

import nlflow as nl
from nlflow import AttentionFlow, GradientFlow, J, equilibrium
from nlflow.flows.spectrum import dense_operator, largest_eigenvalue, relaxation_rate
from tests.chains import CASES, TOLERANCE, built, given, normal, ring
from tests.problems import problem

pytestmark = pytest.mark.numerical

METRICS = ("l2", "degree")
FIDELITIES: dict[str, Any] = {
    "J": None,
    "E": 0.7,
    "E weak": 1e-6,
    "E per node": np.linspace(0.1, 1.5, 60),
    "E with holes": np.where(np.arange(60) % 4 == 0, 1.0, 0.0),
}


@pytest.fixture(params=[False, True], ids=["dense", "iterated"])
def iterated(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        monkeypatch.setattr("nlflow.flows.spectrum._DENSE_RATE_NODES", 5)
        monkeypatch.setattr(np.linalg, "eigvals", None)  # the whole matrix is not looked at
    return bool(request.param)


@pytest.mark.parametrize("fidelity", FIDELITIES.values(), ids=FIDELITIES.keys())
@pytest.mark.parametrize("metric", METRICS)
def test_symmetric_flows(metric: str, fidelity: Any, iterated: bool) -> None:
    p = problem(metric, fidelity, n=60)
    values = p.eigenvalues()
    # Constants do not count where one fidelity holds them back everywhere alike.
    expected = values[1] if np.ndim(fidelity) == 0 else values[0]
    assert relaxation_rate(p.flow) == pytest.approx(expected, rel=1e-6 if iterated else 1e-11)
    assert p.flow.applications == 0


@pytest.mark.slow
@pytest.mark.parametrize("phi", [None, 0.4, "per node"])
@pytest.mark.parametrize("name", CASES)
def test_attention_flows(name: str, phi: Any, iterated: bool) -> None:
    affinity, p = built(name)
    n = len(p)
    values = np.linspace(0.1, 1.0, n).reshape(affinity.domain.shape)
    phi = values if phi == "per node" else phi
    flow = AttentionFlow(affinity) if phi is None else AttentionFlow(affinity, np.zeros(affinity.domain.shape), phi)
    matrix = np.eye(n) - p + np.diag(np.broadcast_to(0.0 if phi is None else np.ravel(phi), (n,)))
    expected = np.sort(eigvals(matrix).real)[0 if isinstance(phi, np.ndarray) else 1]
    assert relaxation_rate(flow) == pytest.approx(expected, rel=1e-6 if iterated else 1e-10)


@pytest.mark.parametrize("name", ["queries", "isolated", "patch"])
def test_float32(name: str, iterated: bool) -> None:
    affinity, p = built(name, "float32")
    expected = np.sort(eigvals(np.eye(len(p)) - p).real)[1]
    assert relaxation_rate(AttentionFlow(affinity)) == pytest.approx(expected, rel=20 * TOLERANCE["float32"])
    assert iterated in (True, False)


@pytest.mark.parametrize("metric", METRICS)
def test_flows_decay_at_this_rate(metric: str) -> None:
    for fidelity in (None, np.linspace(0.1, 1.5, 24)):
        p = problem(metric, fidelity)
        rate = relaxation_rate(p.flow)
        limit = equilibrium(p.flow, p.start).u
        t = 12 / rate
        distances = [p.norm(p.exact(time) - limit) for time in (t, t + 1 / rate)]
        assert math.log(distances[0] / distances[1]) == pytest.approx(1.0, abs=0.05)


def test_closed_forms() -> None:
    assert relaxation_rate(AttentionFlow(given(ring(9)))) == pytest.approx(1 - math.cos(2 * math.pi / 9), rel=1e-13)
    # In L2 the rates are degrees: K = 2k.
    assert relaxation_rate(GradientFlow(J(given(np.ones((4, 4)))), "l2")) == pytest.approx(8.0, rel=1e-13)
    assert relaxation_rate(AttentionFlow(given([[2.0]]))) == 0.0
    assert relaxation_rate(AttentionFlow(given([[2.0]]), np.ones(1), 0.3)) == 0.3


def test_parts_that_do_not_see_each_other_never_agree(iterated: bool) -> None:
    split = np.kron(np.eye(2), np.random.default_rng(0).uniform(1, 2, (8, 8)))
    for k in (split, split + split.T):
        assert relaxation_rate(AttentionFlow(given(k))) == pytest.approx(0.0, abs=1e-12)
        assert relaxation_rate(AttentionFlow(given(k), np.zeros(16), 0.25)) == pytest.approx(0.25, rel=1e-11)
        holes = np.where(np.arange(16) < 8, 1.0, 0.0)
        assert relaxation_rate(AttentionFlow(given(k), np.zeros(16), holes)) == pytest.approx(0.0, abs=1e-12)
    assert iterated in (True, False)


@pytest.mark.parametrize("spread", [5.0, 30.0, 60.0])
def test_weights_that_underflow(spread: float) -> None:
    """Softmax of keys of very different lengths: pi spans e^900 and more, and P has its eigenvalues all the same."""
    keys = np.array([spread, 1.0, 0.5, 0.3, 0.1, 2.0])
    affinity = nl.affinity(nl.ExpDotProduct(scale=1.0), nl.Points(np.arange(6.0), np.ones(6)), keys)
    logits = np.outer(keys, keys)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    values = np.sort(np.linalg.eigvals(p / p.sum(axis=1, keepdims=True)).real)
    flow = AttentionFlow(affinity)
    assert relaxation_rate(flow) == pytest.approx(1 - values[-2], rel=1e-9)
    assert largest_eigenvalue(flow) == pytest.approx(1 - values[0], rel=1e-9)
    np.testing.assert_allclose(np.sort(nl.MarkovChain(affinity).eigenvalues()), values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["queries", "isolated", "patch"])
def test_dense_operator(name: str, dtype: str) -> None:
    affinity, p = built(name, dtype)
    n = len(p)
    phi = np.linspace(0.1, 1.0, n).reshape(affinity.domain.shape).astype(dtype)
    flow = AttentionFlow(affinity, normal(affinity.domain.shape, 1, dtype), phi)
    diffusion = np.eye(n) - p
    assert dense_operator(flow).dtype == np.float64
    np.testing.assert_allclose(dense_operator(flow, diffusion=True), diffusion, rtol=0, atol=TOLERANCE[dtype])
    np.testing.assert_allclose(dense_operator(flow), diffusion + np.diag(phi.ravel()), rtol=0, atol=TOLERANCE[dtype])
    assert flow.applications == 0


def test_a_rate_that_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy.sparse.linalg import ArpackError

    def fails(*args: Any, **options: Any) -> None:
        raise ArpackError(-9999)

    monkeypatch.setattr("nlflow.flows.spectrum._DENSE_RATE_NODES", 5)
    monkeypatch.setattr("scipy.sparse.linalg.eigs", fails)
    flow = AttentionFlow(built("queries")[0])
    with pytest.raises(nl.NumericalError, match="flow: the slowest rate was not found by iteration; use at most 5"):
        relaxation_rate(flow)
    assert flow.applications == 0


@pytest.mark.parametrize("queries", [False, True], ids=["symmetric", "queries"])
@pytest.mark.parametrize("phi", [0.0, 0.4])
def test_a_batch_is_as_slow_as_its_slowest_item(queries: bool, phi: float, iterated: bool) -> None:
    """Each item has a constant of its own, which nothing has to forget."""
    keys, f = normal((3, 8, 2), 1), normal((3, 8), 3)
    seeing = {"queries": normal((3, 8, 2), 2)} if queries else {}
    batch = nl.affinity(nl.ExpDotProduct(), nl.Batch(nl.Points(np.arange(8.0)), 3), keys, **seeing)
    rates = [float(np.sort(eigvals(dense_operator(AttentionFlow(batch.item(i)))).real)[1]) + phi for i in range(3)]
    flow = AttentionFlow(batch, f, phi)
    assert relaxation_rate(flow) == pytest.approx(min(rates), rel=1e-6 if iterated else 1e-10)
    if not queries and phi and not iterated:
        items = [nl.diversity_bounds(AttentionFlow(batch.item(i), f[i], phi)) for i in range(3)]
        expected = min(low for low, _ in items), max(high for _, high in items)
        assert nl.diversity_bounds(flow) == pytest.approx(expected, rel=1e-10)
