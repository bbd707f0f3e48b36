"""What calls itself solved is right: one node of a large fidelity hides no other, and what rounding hides is told."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.flows.integrators.base import StepFailureError
from nlflow.functionals.accuracy import Rows
from nlflow.functionals.fidelity import MatrixFidelity, NodeFidelity
from nlflow.functionals.krylov import Solved, error_allowed, verdict
from validation.robustness import systems

pytestmark = pytest.mark.numerical

N = 40
LARGE = [1e3, 1e6, 1e9, 1e12]
F = np.random.default_rng(0).normal(size=N)
Q, K = np.random.default_rng(1).normal(size=(2, N, 3))


@cache
def line() -> Any:
    return nl.affinity(nl.Gaussian(1.5), nl.Grid(N))


@cache
def attention_weights() -> Any:
    return nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(float(N))), K, queries=Q)


def fidelity(large: float) -> Any:
    """Return 0.3 at each node but one."""
    phi = np.full(N, 0.3)
    phi[10] = large
    return phi


def limit(affinity: Any, phi: Any, held: Any = None) -> Any:
    """Return the solution of ((I - P) + phi) u = phi f, u being 2 at the nodes `held`, by LU factors with pivots."""
    matrix, b = np.eye(N) - affinity.average(np.eye(N)) + np.diag(phi), phi * F
    if held is not None:
        matrix[held], b[held] = np.eye(N)[held], 2.0
    return np.linalg.solve(matrix, b)


@pytest.mark.parametrize("large", LARGE)
def test_a_large_fidelity_hides_no_other_node(large: float) -> None:
    phi = fidelity(large)
    functional, constraint = nl.E(line(), F, phi, measure="degree"), nl.Constraint([0, 5], 2.0)
    held = nl.GradientFlow(functional, "degree", constraint=constraint)
    attention = nl.AttentionFlow(attention_weights(), F, phi, constraint=constraint)
    for found, expected in (
        (functional.minimizer(), limit(line(), phi)),
        (functional.minimizer(constraint=constraint), limit(line(), phi, [0, 5])),
        (nl.equilibrium(held, method="iterative"), limit(line(), phi, [0, 5])),
        (nl.equilibrium(held, method="direct"), limit(line(), phi, [0, 5])),
        (nl.equilibrium(attention, method="iterative"), limit(attention_weights(), phi, [0, 5])),
        (
            nl.equilibrium(nl.AttentionFlow(attention_weights(), F, phi), method="iterative"),
            limit(attention_weights(), phi),
        ),
    ):
        assert found.success, found.message
        np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("name", ["line", "attention"])
def test_a_large_fidelity_hides_no_other_node_from_implicit_steps(name: str, large: float) -> None:
    phi, affinity = fidelity(large), line() if name == "line" else attention_weights()
    flow: Any = nl.GradientFlow(nl.E(line(), F, phi, measure="degree"), "degree")
    flow = flow if name == "line" else nl.AttentionFlow(attention_weights(), F, phi)
    matrix = np.eye(N) - affinity.average(np.eye(N)) + np.diag(phi)
    expected = np.linalg.solve(np.eye(N) + 2 * matrix, F + 1 + 2 * phi * F)
    np.testing.assert_allclose(nl.ConvexSplitting(2.0).step(flow, F + 1, 2.0), expected, rtol=0, atol=1e-8)
    rest = limit(affinity, phi)
    np.testing.assert_allclose(nl.IMEX(1.0).step(flow, rest, 1.0), rest, rtol=0, atol=1e-8)


@pytest.mark.parametrize("large", LARGE)
def test_a_large_matrix_hides_no_other_node(large: float) -> None:
    rng = np.random.default_rng(2)
    roots = rng.normal(size=(N, 2, 2))
    given = roots @ np.swapaxes(roots, 1, 2) + 0.1 * np.eye(2)
    given[10] *= large
    f = rng.normal(size=(N, 2))
    a = np.kron(np.eye(N) - line().average(np.eye(N)), np.eye(2))
    for i in range(N):
        a[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] += given[i]
    b = np.einsum("ncd,nd->nc", given, f).ravel()
    functional = nl.E(line(), f, given, measure="degree")
    found, expected = functional.minimizer(), np.linalg.solve(a, b).reshape(N, 2)
    assert found.success, found.message
    np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-8)
    step = nl.ConvexSplitting(0.5).step(nl.GradientFlow(functional, "degree"), f + 1, 0.5)
    expected = np.linalg.solve(np.eye(2 * N) + 0.5 * a, (f + 1).ravel() + 0.5 * b).reshape(N, 2)
    np.testing.assert_allclose(step, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("name", ["line", "attention"])
def test_derivatives_where_one_fidelity_is_large(name: str, large: float) -> None:
    """The derivative of <c, u> by f is phi A^-T c."""
    torch = pytest.importorskip("torch")
    from nlflow.flows import derivatives

    phi, c = fidelity(large), np.random.default_rng(3).normal(size=N)
    f = torch.tensor(F, requires_grad=True)
    if name == "line":
        k = nl.affinity(nl.Gaussian(1.5), nl.Points(np.arange(float(N))), torch.arange(float(N), dtype=torch.float64))
        flow: Any = nl.GradientFlow(nl.E(k, f, torch.tensor(phi), measure="degree"), "degree")
        averages = k.symmetrized().average(torch.eye(N, dtype=torch.float64)).numpy()
    else:
        k = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(float(N))), torch.tensor(K), queries=torch.tensor(Q))
        flow, averages = nl.AttentionFlow(k, f, torch.tensor(phi)), attention_weights().average(np.eye(N))
    matrix = np.eye(N) - averages + np.diag(phi)
    u = derivatives.equilibrium(flow)
    np.testing.assert_allclose(u.detach().numpy(), np.linalg.solve(matrix, phi * F), rtol=0, atol=1e-8)
    (u * torch.tensor(c)).sum().backward()
    np.testing.assert_allclose(f.grad.numpy(), phi * np.linalg.solve(matrix.T, c), rtol=0, atol=1e-7)


@pytest.mark.parametrize("tie", [1e-4, 1e-12])
def test_what_rounding_hides_is_told(tie: float) -> None:
    """Ten nodes without a fidelity that see the others by a tie alone; the source of one half flows over it."""
    k = np.random.default_rng(4).random((20, 20)) + 0.1
    k[:10, 10:] *= tie
    k = np.triu(k) + np.triu(k, 1).T
    k[10:, :10] = k[:10, 10:].T
    affinity = nl.from_matrix(k, nl.Points(np.arange(20.0)))
    f, phi = np.linspace(0.0, 1.0, 20) + 5.0 * (np.arange(20) >= 10), np.where(np.arange(20) < 10, 0.5, 0.0)
    functional, source = nl.E(affinity, f, phi, measure="degree"), np.where(np.arange(20) < 10, 1.0, -1.0)
    found = [functional.minimizer(), nl.J(affinity).minimizer(constraint=nl.Constraint([0, 1], [1.0, 2.0]))]
    graph = nl.affinity_from_graph(k - np.diag(np.diag(k)))
    found.append(nl.J(graph).potential(source))
    assert [one.success for one in found] == [tie > 1e-8] * 3
    assert tie > 1e-8 or "the error" in found[0].message
    limit = nl.equilibrium(nl.GradientFlow(functional, "degree"))
    assert limit.success
    assert limit.method == "direct"


@pytest.mark.parametrize("tie", [0.0, 1e-4, 1e-12])
def test_potentials_of_far_parts_in_a_matrix(tie: float) -> None:
    """Two parts with a source of their own each: how they compare is known from the tie alone, if there is one."""
    k = np.random.default_rng(4).random((20, 20)) + 0.1
    k = k + k.T
    k[:10, 10:] *= tie
    k[10:, :10] *= tie
    source = np.random.default_rng(5).normal(size=20)
    source -= np.repeat([source[:10].mean(), source[10:].mean()], 10)
    found = nl.J(nl.from_matrix(k, nl.Points(np.arange(20.0), np.ones(20)))).potential(source)
    assert found.success == (tie != 1e-12)
    assert found.success or "the error" in found.message
    if not found.success:
        return
    degree = 2 * k.sum(axis=1)
    exact = np.linalg.pinv(np.diag(degree) - 2 * k, rcond=1e-9) @ source
    for part in [slice(0, 10), slice(10, 20)] if tie == 0 else [slice(None)]:
        exact[part] -= degree[part] @ exact[part] / degree[part].sum()
    np.testing.assert_allclose(found.u, exact, rtol=0, atol=1e-8 * np.abs(exact).max())


@pytest.mark.parametrize("boundary", ["isolated", "reflect", "periodic"])
def test_potentials_of_a_convolution_in_parts(boundary: Any) -> None:
    grid, kernel = nl.Grid((6, 5), spacing=(1.0, 2.0), boundary=boundary), nl.TopHat(radius=1.0)
    source = np.random.default_rng(5).normal(size=(6, 5))
    source -= source.mean(axis=0)
    found, exact = (
        nl.J(nl.affinity(kernel, grid, method=method)).potential(source) for method in ("convolution", "stencil")
    )
    assert found.success, found.message
    np.testing.assert_allclose(found.u, exact.u, rtol=0, atol=1e-9 * np.abs(exact.u).max())
    source[0] += 1
    with pytest.raises(nl.InputError, match="source: its sum over part 0"):
        nl.J(nl.affinity(kernel, grid, method="convolution")).potential(source)


def test_a_bound_of_what_has_a_gradient_says_nothing_about_it() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones((N, 2), dtype=torch.float64, requires_grad=True)
    rows = Rows.of(lambda v: 2 * v, None, x, (0,), stopped=1.0)
    assert rows.judged(Solved(x / 2, 0.0, 1), None, torch.ones_like(x), 0.0, 1e-6).error < 1e-6


def test_a_direct_factor_that_loses_its_digits_says_so() -> None:
    rng = np.random.default_rng(5)
    k = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(8.0)), 6 * rng.normal(size=(8, 4)))
    flow = nl.GradientFlow(nl.E(k, rng.normal(size=8), 1e-12, measure="degree"), "degree")
    found, exact = flow.functional.minimizer(preconditioner="direct"), nl.equilibrium(flow, method="direct")
    assert np.abs(found.u - exact.u).max() > 1e-6 * np.abs(exact.u).max()
    assert not found.success
    assert "the error" in found.message


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("phi", [1e-7, 1e-3, 10.0])
def test_a_direct_factor_has_the_residual_of_what_it_returns(phi: float, dtype: Any) -> None:
    f = (F + 100).astype(dtype)
    found = nl.E(nl.affinity(nl.Gaussian(1.0), nl.Points(np.arange(float(N)))), f, phi, measure="degree").minimizer(
        preconditioner="direct", rtol=1e-4
    )
    k = np.exp(-((np.arange(N)[:, None] - np.arange(N)) ** 2) / 2)
    p, u = k / k.sum(axis=1, keepdims=True), found.u.astype(np.float64)
    left = np.abs((1 + phi) * u - p @ u - phi * f.astype(np.float64))
    diagonal = 1 + phi - np.diag(p)
    residual = np.max(left / diagonal / (2 * np.abs(u).max(axis=0) + phi * np.abs(f) / diagonal))
    assert abs(found.residual - residual) < 8 * np.finfo(dtype).eps
    assert found.success


def test_a_direct_factor_in_float64_is_judged_as_such() -> None:
    x, w, f = np.linspace(0, 8, 12), np.logspace(-6, 6, 12), (F[:12] + 100).astype(np.float32)
    found = nl.E(nl.affinity(nl.Laplace(1.0), nl.Points(x, weights=w)), f, 1.0).minimizer(preconditioner="direct")
    k = 2 * np.exp(-np.abs(x[:, None] - x)) * w * (1 - np.eye(12))
    np.testing.assert_allclose(found.u, np.linalg.solve(np.diag(k.sum(axis=1) + 1) - k, f.astype(float)), rtol=1e-6)
    assert found.success, found.message


def test_a_step_that_is_too_long_for_rounding_ends_the_run() -> None:
    weights = 1e14 * (np.ones((6, 6)) + np.diag(np.arange(6.0)))
    flow = nl.GradientFlow(nl.J(nl.from_matrix(weights, nl.Points(np.arange(6.0)))), "l2")
    with pytest.raises(StepFailureError, match="with an error of up to"):
        nl.ConvexSplitting(1.0).step(flow, F[:6], 1.0)


@pytest.mark.parametrize("phi", [0.5, "per node", "holes", "large"])
def test_the_bound_bounds(phi: Any) -> None:
    """Of any x, however far off, and of one that is nearly right."""
    rng = np.random.default_rng(6)
    values = {"per node": 10.0 ** rng.uniform(-3, 3, N), "holes": 1.0 * (np.arange(N) < 4), "large": fidelity(1e9)}
    values = values[phi] if isinstance(phi, str) else np.full(N, phi)
    averages = line().average(np.eye(N))
    matrix = np.eye(N) - averages + np.diag(values)

    def operator(v: Any) -> Any:
        return v - averages @ v + values.reshape(-1, *(1,) * (v.ndim - 1)) * v

    def run(b: Any, start: Any, rtol: float) -> Solved:
        return Solved(np.linalg.solve(matrix, b), 0.0, 1)

    rows, exact = Rows.of(operator, NodeFidelity(values), F, (0,)), np.linalg.solve(matrix, values * F)
    for size in (1.0, 1e-3, 1e-9):
        x = exact + size * rng.normal(size=N)
        told = rows.judged(Solved(x, 0.0, 1), run, values * F, 0.0, 0.0).error
        error = np.abs(x - exact).max() / np.abs(x).max()
        assert error <= told <= 1e4 * error + 1e-12


def test_the_bound_bounds_what_is_weighted() -> None:
    """The error of w x relative to the largest w x, where the largest weight is far above the least."""
    rng, weight = np.random.default_rng(7), np.geomspace(1.0, 1e-4, N)
    matrix = np.eye(N) - line().average(np.eye(N)) + 0.5 * np.eye(N)
    rows = replace(Rows.of(lambda v: matrix @ v, NodeFidelity(np.full(N, 0.5)), F, (0,)), weight=weight)
    exact = np.linalg.solve(matrix, F)
    x = exact + 1e-3 * rng.normal(size=N)
    told = rows.judged(Solved(x, 0.0, 1), None, F, 0.0, 0.0).error
    assert told >= np.abs(weight * (x - exact)).max() / np.abs(weight * x).max()


def test_the_bound_is_relative_whatever_the_unit_of_the_weights() -> None:
    weight = np.linspace(0.1, 2.0, N)
    matrix = np.eye(N) - line().average(np.eye(N)) + 0.5 * np.eye(N)
    plain = Rows.of(lambda v: matrix @ v, NodeFidelity(np.full(N, 0.5)), F, (0,))
    found = Solved(np.linalg.solve(matrix, F) + 1e-3, 0.0, 1)
    told, more = (replace(plain, weight=c * weight).judged(found, None, F, 0.0, 0.0).error for c in (1.0, 8.0))
    assert told == pytest.approx(more, rel=1e-12)
    # Of data a million times as large a hundredth counts as large.
    beside = plain.judged(found, None, F, 1e6, math.inf).error
    alone = plain.judged(found, None, F, 0.0, math.inf).error
    assert beside == pytest.approx(alone * np.abs(found.x).max() / 1e4, rel=1e-12)


def test_the_bound_bounds_where_channels_are_mixed() -> None:
    """A constant error is pulled back by the fidelity alone, so that the bound is sharp."""
    phi, f = np.tile(0.5 * np.eye(2), (N, 1, 1)), np.random.default_rng(8).normal(size=(N, 2))
    averages = line().average(np.eye(N))
    rows = Rows.of(lambda v: 1.5 * v - averages @ v, MatrixFidelity(phi), f, (0,))
    exact = np.linalg.solve(1.5 * np.eye(N) - averages, f)
    x = exact + 1e-3
    told = rows.judged(Solved(x, 0.0, 1), None, f, 0.0, math.inf).error
    assert told >= 0.999 * np.linalg.norm(x - exact, axis=1).max() / np.linalg.norm(x, axis=1).max()


def test_nothing_is_solved_by_nothing() -> None:
    rows = Rows.of(lambda v: v - line().average(v), None, F, (0,))
    assert rows.judged(Solved(0 * F, 0.0, 1), None, 0 * F, 0.0, 0.0).error == 0


def test_the_verdict_looks_at_residual_and_error() -> None:
    assert verdict(1e-10, 1e-10, 1e-6) == (True, "")
    assert not verdict(2e-10, 1e-10)[0]
    assert not verdict(math.nan, 1e-10)[0]
    assert not verdict(0.0, 1e-10, 2e-6)[0]
    assert "has no bound" in verdict(0.0, 1e-10, math.inf)[1]
    assert error_allowed(1e-3) == math.inf  # nobody asks for digits there


@pytest.mark.parametrize("name", [name for name, _, _ in systems.solvers()])
def test_random_systems_in_extended_precision(name: str) -> None:
    """The short form of ``python -m validation.robustness.systems``."""
    row = systems.tried(name, 12, 7)
    assert row.wrong == 0, row.details["failed"]


def test_the_campaign_sees_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = systems.System.solved
    monkeypatch.setattr(systems.System, "solved", lambda *given: exact(*given) * (1 + 1e-5))
    assert systems.tried("equilibrium, auto", 3, 0).wrong == 3
