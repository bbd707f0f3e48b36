"""Limits of flows against dense solves in rational and double arithmetic, closed forms and long integrations."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import AttentionFlow, E, GradientFlow, J, equilibrium
from tests.chains import CASES, NOT_SYMMETRIC, TOLERANCE, built, directed_ring, given, normal, ring, stationary_law
from tests.covering import pairs
from tests.problems import Floats, problem, torch_on_one_thread

pytestmark = pytest.mark.numerical

METRICS = ("l2", "degree")
METHODS = ("auto", "direct", "iterative")
FIDELITIES: dict[str, Any] = {
    "1e-3": 1e-3,
    "1": 1.0,
    "1e3": 1e3,
    "per node": np.linspace(0.1, 2.0, 24),
    "with holes": np.where(np.arange(24) % 3 == 0, 0.7, 0.0),
    "one node": np.where(np.arange(24) == 5, 0.5, 0.0),
}


def dense(matrix: Floats, phi: Any, f: Floats) -> Floats:
    """Solve (r (I - P) + phi) u = phi f."""
    n = len(f)
    values = np.broadcast_to(phi, (n,))
    source = values.reshape(n, *[1] * (f.ndim - 1)) * f
    return np.asarray(np.linalg.solve(matrix + np.diag(values), source))


def chain_flow(name: str, phi: Any, channels: tuple[int, ...] = (), dtype: str = "float64") -> Any:
    affinity, p = built(name, dtype)
    f = normal((*affinity.domain.shape, *channels), 7, dtype)
    phi = phi.astype(dtype).reshape(affinity.domain.shape) if isinstance(phi, np.ndarray) else phi
    return AttentionFlow(affinity, f, phi), np.eye(len(p)) - p, f


# --- with fidelity ---------------------------------------------------------------------------------------------------


# The system that is solved is another one for each metric, measure and method; the other two take turns.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "measure", "method", "name", "channels"),
    [
        (*way, *turn)
        for i, way in enumerate(itertools.product(METRICS, METRICS, METHODS))
        for turn in pairs(list(FIDELITIES), [None, 3])[i % 3 :: 3]
    ],
)
def test_gradient_flows(metric: str, measure: str, method: str, name: str, channels: int | None) -> None:
    fidelity = FIDELITIES[name]
    p = problem(metric, fidelity, measure=measure, channels=channels)
    found = equilibrium(p.flow, method=method)
    n = len(p.start)
    expected = np.linalg.solve(p.matrix, p.fidelity[:, None] * p.observed.reshape(n, -1)).reshape(p.observed.shape)
    directly = method == "direct" or (method == "auto" and np.min(fidelity) == 0)
    assert found.method == ("direct" if directly else "conjugate gradients")
    np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-12 if directly else 1e-8)
    assert found.success, found.message
    assert found.residual <= 1.001e-10
    assert found.iterations == 0 or not directly
    assert p.flow.applications == 0
    # Nothing moves there.
    assert p.flow.speed(found.u) < 1e-8 * max(1.0, p.radius)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "phi"), pairs(list(CASES), METHODS, [1e-3, 1e-1, 1.0, 1e3, "per node", "holes"])
)
def test_attention_flows(name: str, method: str, phi: Any) -> None:
    n = built(name)[0].domain.size
    values = {"per node": np.linspace(0.0, 2.0, n) + 0.1, "holes": np.where(np.arange(n) % 3 == 0, 0.7, 0.0)}
    phi = values[phi] if isinstance(phi, str) else phi
    flow, matrix, f = chain_flow(name, phi, (2,))
    found = equilibrium(flow, method=method)
    expected = dense(matrix, phi, f.reshape(n, 2)).reshape(f.shape)
    np.testing.assert_allclose(found.u, expected, rtol=0, atol=3e-8 if found.iterations else 1e-10)
    assert found.success, found.message
    assert flow.applications == 0
    if name in NOT_SYMMETRIC:
        assert found.method == ("gmres" if method == "iterative" else "direct")
        # The residual is that of what is returned.
        rest = np.reshape(phi, (-1, 1)) * (f - found.u) - matrix @ found.u
        assert np.abs(rest).max() <= 2e-10 * np.abs(np.reshape(phi, (-1, 1)) * f).max() * (1 + np.max(phi)) + 1e-14


@pytest.mark.parametrize(
    ("phi", "method", "name"), pairs([1e-3, 0.5, 50.0, "holes"], METHODS, ["queries", "isolated", "patch"])
)
def test_float32(phi: Any, method: str, name: str) -> None:
    n = built(name)[0].domain.size
    phi = np.where(np.arange(n) % 3 == 0, 0.7, 0.0) if phi == "holes" else phi
    flow, matrix, f = chain_flow(name, phi, (2,), "float32")
    found = equilibrium(flow, method=method)
    assert found.u.dtype == np.float32
    assert found.success, found.message
    expected = dense(matrix, phi, f.reshape(n, 2).astype(float)).reshape(f.shape)
    np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-4 if method == "iterative" else 1e-5)


def test_torch() -> None:
    torch = torch_on_one_thread()
    keys, queries, f = (normal((12, 3), seed) for seed in (1, 2, 3))
    points = nl.Points(np.arange(12.0), weights=np.linspace(0.5, 1.5, 12))
    for q in (None, queries):
        tensor = None if q is None else torch.as_tensor(q)
        affinity = nl.affinity(nl.ExpDotProduct(), points, torch.as_tensor(keys), queries=tensor)
        twin = nl.affinity(nl.ExpDotProduct(), points, keys, queries=q)
        for method in METHODS:
            found = equilibrium(AttentionFlow(affinity, torch.as_tensor(f), 0.3), method=method)
            assert isinstance(found.u, torch.Tensor)
            np.testing.assert_allclose(found.u.numpy(), equilibrium(AttentionFlow(twin, f, 0.3)).u, rtol=0, atol=1e-8)
        mean = equilibrium(AttentionFlow(affinity), torch.as_tensor(f)).u
        np.testing.assert_allclose(mean.numpy(), equilibrium(AttentionFlow(twin), f).u, rtol=0, atol=1e-12)


def rational(p: Floats, phi: Any, f: Floats) -> Floats:
    """Solve ((phi + sum of moves) u - moves to others = phi f) in rational numbers, from the off-diagonal of `p`."""
    n = len(p)
    rows = []
    for i in range(n):
        moves = [Fraction(float(p[i, j])) if j != i else Fraction(0) for j in range(n)]
        row = [-m for m in moves]
        row[i] = sum(moves) + Fraction(float(phi[i]))
        rows.append([*row, Fraction(float(phi[i])) * Fraction(float(f[i]))])
    for k in range(n):
        rows[k] = [a / rows[k][k] for a in rows[k]]
        for r in range(n):
            if r != k:
                rows[r] = [a - rows[r][k] * b for a, b in zip(rows[r], rows[k], strict=True)]
    return np.array([float(row[n]) for row in rows])


@pytest.mark.parametrize("coupling", [1e-8, 1e-12, 1e-17, 1e-100])
@pytest.mark.parametrize("symmetric", [True, False])
def test_parts_that_hardly_see_a_fidelity(symmetric: bool, coupling: float) -> None:
    """Five nodes without fidelity take over what the nodes that they hardly see have, whatever little that is."""
    rng = np.random.default_rng(0)
    k = rng.random((9, 9))
    k[:4, 4:] *= coupling
    k[4:, :4] *= coupling
    k = k + k.T if symmetric else k
    f, phi = rng.standard_normal(9), np.where(np.arange(9) < 4, [0.5, 1.0, 0.0, 2.0, 0, 0, 0, 0, 0], 0.0)
    flow = AttentionFlow(given(k), f, phi)
    expected = rational(k / k.sum(axis=1, keepdims=True), phi, f)
    for method in ("auto", "direct"):
        found = equilibrium(flow, method=method)
        np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-13)
        assert found.success
    if coupling < 1e-15:
        with pytest.raises(nl.NumericalError, match="fidelity: the system is singular, or so nearly"):
            equilibrium(flow, method="iterative")


@pytest.mark.parametrize("name", ["queries", "tilted", "keys", "stencil", "isolated", "dense grid"])
@pytest.mark.parametrize("phi", [1e-6, 1e-9, 1e-12])
def test_small_fidelities_keep_their_digits(phi: float, name: str) -> None:
    """u* is the mean of f and a deviation of the size of lambda, of which the leading digits are right."""
    flow, matrix, f = chain_flow(name, phi)
    n = len(matrix)
    law = stationary_law(np.eye(n) - matrix)
    # u = pi f + lambda (I - P + lambda + 1 pi)^-1 (f - pi f): a system that is well conditioned.
    mean = law @ f.ravel()
    deviation = np.linalg.solve(matrix + phi * np.eye(n) + law, phi * (f.ravel() - mean))
    for method in METHODS:
        found = equilibrium(flow, method=method)
        assert found.success, found.message
        np.testing.assert_allclose(found.u.ravel(), mean + deviation, rtol=0, atol=3e-15)
        np.testing.assert_allclose(found.u.ravel() - mean, deviation, rtol=0, atol=1e-8 * phi + 5e-15)


@pytest.mark.parametrize("phi", 10.0 ** np.arange(-3, 4))
@pytest.mark.parametrize("boundary", ["periodic", "reflect"])
def test_fourier_modes_in_two_dimensions(boundary: Any, phi: float) -> None:
    """10^4 nodes, matrix-free: a cosine is damped by lambda / (lambda + 1 - symbol)."""
    n, width = 100, 3.0
    grid = nl.Grid((n, n), boundary=boundary)
    affinity = nl.affinity(nl.Gaussian(width=width), grid, method="convolution")
    unit = 2 * math.pi / n if boundary == "periodic" else math.pi / n
    modes = [(0, 0, 2.0), (1, 0, 1.0), (2, 5, -0.7)]
    x, y = np.meshgrid(*grid.axes, indexing="ij")
    f, expected = np.zeros((2, n, n))
    for a, b, size in modes:
        symbol = math.exp(-0.5 * (width * unit) ** 2 * (a * a + b * b))
        wave = size * np.cos(a * unit * x) * np.cos(b * unit * y)
        f += wave
        expected += wave * phi / (phi + 1 - symbol)
    found = equilibrium(GradientFlow(E(affinity, f, phi, measure="degree"), "degree"))
    assert found.success, found.message
    assert found.method == "conjugate gradients"
    np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-8)


def test_more_nodes_than_are_solved_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nlflow.equilibria.limits._DENSE_NODES", 10)
    flow, matrix, f = chain_flow("queries", 0.3)
    found = equilibrium(flow)
    assert found.method == "gmres"
    np.testing.assert_allclose(found.u, dense(matrix, 0.3, f), rtol=0, atol=1e-9)
    holes = np.where(np.arange(12) < 4, 1.0, 0.0)
    flow, matrix, f = chain_flow("keys", holes)
    assert equilibrium(flow).method == "conjugate gradients"
    np.testing.assert_allclose(equilibrium(flow).u, dense(matrix, holes, f), rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["queries", "keys"])
def test_too_few_iterations(name: str) -> None:
    """The residual that is told is that of what is returned, and no success."""
    flow, matrix, f = chain_flow(name, 0.01)
    found = equilibrium(flow, method="iterative", maxiter=3)
    assert not found.success
    assert found.iterations == 3
    assert "raise maxiter" in found.message
    rest = 0.01 * (f - found.u) - matrix @ found.u
    assert np.abs(rest).max() > 1e-6 * np.abs(0.01 * f).max()
    assert 0.1 < np.abs(rest).max() / np.abs(0.01 * f).max() / found.residual < 10
    assert equilibrium(flow, method="iterative", maxiter=1000).success
    loose = equilibrium(flow, method="iterative", rtol=1e-3)
    assert loose.success
    assert 1e-10 < loose.residual < 1.001e-3
    exact = equilibrium(flow, rtol=1e-30, method="direct")
    assert not exact.success
    assert exact.residual < 1e-13


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shift", [0.0, 50.0])
def test_direct_residuals_are_those_of_what_is_returned(dtype: str, shift: float) -> None:
    """With the rounding of `u`, in rows over 2 a_ii max|u| + |b_i|."""
    for phi in (0.3, np.where(np.arange(12) < 4, 0.01, 0.0)):
        flow, matrix, f = chain_flow("queries", phi, dtype=dtype)
        flow = AttentionFlow(flow.affinity, f + f.dtype.type(shift), flow.fidelity)
        found = equilibrium(flow, method="direct")
        assert found.success
        assert found.u.dtype == dtype
        whole, u = matrix + np.diag(np.broadcast_to(phi, 12)).astype(dtype).astype(float), found.u.astype(float)
        b = np.broadcast_to(phi, 12).astype(dtype).astype(float) * (f + f.dtype.type(shift)).astype(float)
        rest = np.abs(b - whole @ u) / (2 * np.diag(whole) * np.abs(u).max() + np.abs(b))
        assert found.residual == pytest.approx(rest.max(), rel=0.1, abs=4e-16)
        strict = equilibrium(flow, method="direct", rtol=1e-14)
        assert strict.success == (dtype == "float64")
        assert ("float32 does not reach" in strict.message) == (dtype == "float32")


def test_too_few_iterations_with_holes() -> None:
    """What was not reached says nothing about whether the fidelity determines the limit."""
    flow, _, _ = chain_flow("queries", np.where(np.arange(12) % 3 == 0, 0.01, 0.0))
    found = equilibrium(flow, method="iterative", maxiter=3)
    assert not found.success
    assert "raise maxiter" in found.message
    assert equilibrium(flow, method="iterative").success


def test_constant_channels_stay() -> None:
    for method in METHODS:
        affinity, _ = built("queries")
        f = np.stack([normal(12), np.full(12, 4.0), np.zeros(12)], axis=-1)
        found = equilibrium(AttentionFlow(affinity, f, 0.2), method=method)
        np.testing.assert_allclose(found.u[:, 1:], f[:, 1:], rtol=1e-14, atol=1e-15)
        alone = equilibrium(AttentionFlow(affinity, np.full(12, 4.0), 0.2), method=method)
        np.testing.assert_allclose(alone.u, 4.0, rtol=1e-14)
        assert alone.success


def test_one_node() -> None:
    affinity = given([[2.0]])
    assert equilibrium(AttentionFlow(affinity, np.array([3.0]), 0.1)).u.tolist() == [3.0]
    assert equilibrium(AttentionFlow(affinity, np.array([3.0]), 0.1), method="direct").u.tolist() == [3.0]
    assert equilibrium(AttentionFlow(affinity), np.array([3.0])).u.tolist() == [3.0]


# --- parts without fidelity ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("metric", [*METRICS, "attention", "attention, symmetric"])
def test_a_part_that_sees_no_fidelity_has_no_limit_of_its_own(metric: str, method: str) -> None:
    rng = np.random.default_rng(0)
    k = np.zeros((8, 8))
    k[:3, :3], k[3:, 3:] = rng.random((3, 3)), rng.random((5, 5))
    k = k if metric == "attention" else k + k.T
    order = rng.permutation(8)
    k, holes = k[np.ix_(order, order)], np.where(order < 3, 1.0, 0.0)
    flows = []
    for fidelity in (holes, 0.5 * holes + 0.1):
        f = rng.standard_normal((8, 2))
        if metric in METRICS:
            flows.append(GradientFlow(E(given(k), f, fidelity, measure=metric), metric))
        else:
            flows.append(AttentionFlow(given(k), f, fidelity))
    with pytest.raises(nl.NumericalError, match=r"fidelity: the system is singular.*give each part one"):
        equilibrium(flows[0], method=method)
    assert equilibrium(flows[1], method=method).success


@pytest.mark.parametrize("method", METHODS)
def test_causal_attention_needs_a_fidelity_at_the_first_token(method: str) -> None:
    p = np.tril(np.random.default_rng(0).random((6, 6)) + 0.1)
    f = normal(6)
    late = np.where(np.arange(6) > 0, 1.0, 0.0)
    with pytest.raises(nl.NumericalError, match="fidelity: the system is singular"):
        equilibrium(AttentionFlow(given(p), f, late), method=method)
    first = np.where(np.arange(6) == 0, 1.0, 0.0)
    np.testing.assert_allclose(equilibrium(AttentionFlow(given(p), f, first), method=method).u, f[0], atol=1e-8)
    both = equilibrium(AttentionFlow(given(p), f, 0.5), method=method)
    assert both.u[0] == pytest.approx(f[0], abs=1e-9)
    expected = dense(np.eye(6) - p / p.sum(axis=1, keepdims=True), 0.5, f)
    np.testing.assert_allclose(both.u, expected, rtol=0, atol=1e-9)


# --- without fidelity ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [None, 2])
@pytest.mark.parametrize("metric", METRICS)
def test_the_limit_of_the_flow_of_j(metric: str, channels: int | None) -> None:
    p = problem(metric, channels=channels)
    found = equilibrium(p.flow, p.start)
    weights = p.measure / p.measure.sum()
    expected = np.broadcast_to(weights @ p.start.reshape(24, -1), (24, channels or 1)).reshape(p.start.shape)
    np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-13)
    assert (found.method, found.iterations, found.residual, found.success) == ("mean", 0, 0.0, True)
    late = nl.solve(p.flow, p.start, t=40 / p.eigenvalues()[1])
    np.testing.assert_allclose(found.u, late.u[-1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_the_limit_of_attention(name: str, dtype: str) -> None:
    affinity, p = built(name, dtype)
    start = normal((*affinity.domain.shape, 2), 3, dtype)
    found = equilibrium(AttentionFlow(affinity), start)
    assert found.u.dtype == start.dtype
    assert found.u.shape == start.shape
    mean = stationary_law(p) @ start.reshape(len(p), 2).astype(float)
    np.testing.assert_allclose(found.u, np.broadcast_to(mean, start.shape), rtol=0, atol=3 * TOLERANCE[dtype])


@pytest.mark.parametrize("metric", [*METRICS, "attention"])
def test_limits_agree_with_the_flow_at_a_late_time(metric: str) -> None:
    start = normal(12, 3)
    if metric == "attention":
        flow: Any = AttentionFlow(built("queries")[0], normal(12, 4), 0.2)
    else:
        flow = GradientFlow(E(built("keys")[0], normal(12, 4), 0.2, measure=metric), metric)
    late = nl.solve(flow, start, t=120.0)
    np.testing.assert_allclose(equilibrium(flow).u, late.u[-1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(equilibrium(flow, start).u, equilibrium(flow).u, rtol=0, atol=1e-14)


def test_continuous_time_knows_no_period() -> None:
    start = np.arange(4.0)
    for k in (ring(4), directed_ring(4)):
        np.testing.assert_allclose(equilibrium(AttentionFlow(given(k)), start).u, 1.5, rtol=1e-14)
    for metric in METRICS:
        flow = GradientFlow(J(given(ring(4))), metric)
        np.testing.assert_allclose(equilibrium(flow, start).u, 1.5, rtol=1e-14)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_what_has_no_limit() -> None:
    split = given(np.kron(np.eye(2), np.ones((3, 3))))
    start = normal(6)
    for flow in (AttentionFlow(split), *(GradientFlow(J(split), metric) for metric in METRICS)):
        with pytest.raises(nl.InputError, match=r"affinity: got a reducible chain with 2 classes"):
            equilibrium(flow, start)
    features = normal((6, 2))
    evolving = AttentionFlow(nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(6.0)), features), evolving=True)
    with pytest.raises(nl.InputError, match=r"flow: got an evolving kernel.*solve\(\)"):
        equilibrium(evolving, features)


def test_arguments() -> None:
    affinity, _ = built("queries")
    f = normal(12)
    flow = AttentionFlow(affinity, f, 0.1)
    free = AttentionFlow(affinity)
    with pytest.raises(nl.InputError, match="flow: got ndarray, expected a GradientFlow or an AttentionFlow"):
        equilibrium(f)  # type: ignore[arg-type]
    with pytest.raises(nl.InputError, match="start: needed"):
        equilibrium(free)
    with pytest.raises(nl.InputError, match=r"start: got shape \(5,\), expected \(12,\)"):
        equilibrium(free, np.ones(5))
    with pytest.raises(nl.InputError, match=r"start: got shape \(5,\), expected \(12,\)"):  # though it does not matter
        equilibrium(flow, np.ones(5))
    with pytest.raises(nl.InputError, match="start: got 1 NaN"):
        equilibrium(free, np.where(np.arange(12) == 3, np.nan, 1.0))
    for zero in (0.0, np.zeros(12)):
        with pytest.raises(nl.InputError, match="fidelity: got 0 at every node"):
            equilibrium(AttentionFlow(affinity, f, zero))
    with pytest.raises(nl.InputError, match="method: got 'pixels', expected one of 'auto', 'direct', 'iterative'"):
        equilibrium(flow, method="pixels")
    for rtol in (0.0, -1e-3, math.nan):
        with pytest.raises(nl.InputError, match="rtol: got"):
            equilibrium(flow, rtol=rtol)
    for maxiter in (0, 2.5):
        with pytest.raises(nl.InputError, match="maxiter: got"):
            equilibrium(flow, maxiter=maxiter)  # type: ignore[arg-type]
    with pytest.raises(nl.MemoryLimitError, match=r"direct solution for 12 nodes needs .*method='iterative'"):
        equilibrium(flow, memory_limit=6000)
    assert equilibrium(flow, memory_limit=7000).success


def test_limits_and_minimizers_are_told_alike() -> None:
    """One record serves them all; what one of them tells besides comes after it."""
    f = np.array([0.0, 1.0, 3.0, 2.0])
    k = nl.from_matrix(np.ones((4, 4)), nl.Grid(4))
    found = [E(k, f, 0.5).minimizer(), equilibrium(GradientFlow(E(k, f, 0.5))), nl.Ep(k, f, 0.5, 2).minimizer()]
    for one in found:
        assert list(vars(one))[:5] == ["u", "residual", "iterations", "success", "message"]
        assert one.success
        np.testing.assert_allclose(one.u, found[0].u, rtol=0, atol=2e-3)
    _, limit, certified = found
    assert isinstance(limit, nl.Equilibrium)
    assert limit.method == "conjugate gradients"
    assert isinstance(certified, nl.CertifiedMinimizer)
    assert certified.gap == certified.residual
    assert certified.value == pytest.approx(E(k, f, 0.5).value(found[0].u), rel=1e-4)
