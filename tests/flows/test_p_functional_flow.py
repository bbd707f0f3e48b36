"""Flows of J_p and E_p: what they conserve and lower, against the matrix exponential, Runge-Kutta and closed forms."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.linalg import expm

from nlflow import (
    E,
    Energy,
    Ep,
    ExplicitEuler,
    Exponential,
    Gaussian,
    GradientFlow,
    Grid,
    InputError,
    J,
    Jp,
    LaggedDiffusivity,
    Patch,
    PFlow,
    Points,
    RungeKutta,
    SemiImplicit,
    Status,
    affinity,
    from_matrix,
    solve,
)
from nlflow.flows import p_flow

pytestmark = pytest.mark.numerical


def normal(shape: Any, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


POINTS = Points(np.linspace(0, 1, 9), weights=np.linspace(0.5, 1.5, 9))


def cloud() -> Any:
    return affinity(Gaussian(width=0.3), POINTS)


@pytest.mark.slow
@pytest.mark.parametrize("isotropic", [False, True])
@pytest.mark.parametrize("dt", [1e-3, 0.1, 100.0])
@pytest.mark.parametrize("p", [1, 1.3, 1.7, 2])
def test_every_step_lowers_the_functional(p: float, dt: float, isotropic: bool) -> None:
    f, start = normal((9, 2), 4), normal((9, 2), 5)
    w = POINTS.weights[:, None]
    for functional in (Jp(cloud(), p, isotropic=isotropic), Ep(cloud(), f, 0.5, p, isotropic=isotropic)):
        solution = solve(
            PFlow(functional), start, t=6 * dt, integrator=LaggedDiffusivity(dt), trackers=[Energy(every=1)]
        )
        assert solution.success, solution.message
        values = solution.records["energy"]["value"]
        assert len(values) == 7
        assert np.all(np.diff(values) <= 1e-9 * values[0])
        assert math.isclose(values[-1], functional.value(solution.final), rel_tol=1e-12)
        if functional.observed is None:
            np.testing.assert_allclose((w * solution.final).sum(axis=0), (w * start).sum(axis=0), rtol=0, atol=1e-9)
            assert start.min() <= solution.final.min()
            assert solution.final.max() <= start.max()
        else:
            both = np.concatenate([start, f])
            assert both.min() <= solution.final.min() <= solution.final.max() <= both.max()


def test_two_is_implicit_euler_of_the_linear_flow() -> None:
    k, u = cloud(), normal(9)
    gradient = np.stack([J(k).gradient(e) for e in np.eye(9)], axis=1)
    expected = np.linalg.solve(np.eye(9) + 0.1 * gradient, u)
    got = solve(PFlow(Jp(k, 2)), u, t=0.1, integrator=LaggedDiffusivity(0.1)).final
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)
    errors = []
    for n in (20, 40):
        got = solve(PFlow(Jp(k, 2)), u, t=0.2, integrator=LaggedDiffusivity(0.2 / n)).final
        errors.append(np.abs(got - expm(-0.2 * gradient) @ u).max())
    assert 1.8 < errors[0] / errors[1] < 2.2


@pytest.mark.slow
@pytest.mark.parametrize("isotropic", [False, True])
def test_first_order_against_runge_kutta(isotropic: bool) -> None:
    f, u = normal((9, 2), 4), normal((9, 2), 5)
    flow = PFlow(Ep(cloud(), f, 0.5, 1.5, isotropic=isotropic))
    exact = solve(flow, u, t=0.3, integrator=RungeKutta(rtol=1e-9, atol=1e-11))
    assert exact.success
    assert solve(flow, u, t=0.01).stats["integrator"].startswith("RungeKutta")  # the default
    errors = [
        np.abs(solve(flow, u, t=0.3, integrator=LaggedDiffusivity(0.3 / n, smoothing=1e-8)).final - exact.final).max()
        for n in (32, 64, 128)
    ]
    assert errors[2] < 0.01
    for coarse, fine in itertools.pairwise(errors):
        assert 1.6 < coarse / fine < 2.4


@pytest.mark.slow
@pytest.mark.parametrize("p", [1, 1.5])
@pytest.mark.sampled(1)
def test_two_nodes_meet_in_finite_time(p: float) -> None:
    """The difference y obeys y' = -2 W y^(p - 1): y^(2 - p) falls linearly, to 0 at y_0^(2 - p) / (2 W (2 - p))."""
    k = from_matrix([[0.0, 0.5], [0.5, 0.0]], Points([0.0, 1.0], weights=[1.0, 1.0]))  # W = 2 k = 1
    u = np.array([1.0, -1.0])
    end = 2 ** (2 - p) / (2 * (2 - p))
    times = [0.3 * end, 0.6 * end, 1.05 * end]
    solution = solve(PFlow(Jp(k, p)), u, t_eval=times, integrator=LaggedDiffusivity(end / 1000, smoothing=1e-6))
    gaps = solution.u[:, 0] - solution.u[:, 1]
    expected = [(2 ** (2 - p) * (1 - t / end)) ** (1 / (2 - p)) for t in times[:2]]
    np.testing.assert_allclose(gaps[:2], expected, rtol=1e-2)
    assert abs(gaps[2]) < 1e-2
    np.testing.assert_allclose(solution.u.sum(axis=1), 0, atol=1e-9)


@pytest.mark.slow
def test_edges_stay_where_the_linear_flow_blurs_them() -> None:
    grid = Grid(60)
    clean = np.where(np.arange(60) < 30, 0.0, 1.0)
    noisy = clean + 0.05 * normal(60)
    k = affinity(Gaussian(width=1.0), grid, window=2, method="stencil")
    jumps, roughness = {}, {}
    for p, t in ((1.0, 0.3), (1.2, 0.5), (2.0, 2.0)):
        u = solve(PFlow(Jp(k, p)), noisy, t=t, integrator=LaggedDiffusivity(t / 20)).final
        jumps[p], roughness[p] = u[32] - u[27], u[5:25].std()
    assert all(value < 0.4 * noisy[5:25].std() for value in roughness.values())
    assert jumps[1.0] > 0.9
    assert jumps[1.2] > 0.75
    assert jumps[2.0] < 0.65


def test_long_flows_of_e_end_at_its_minimizer() -> None:
    f = normal((6, 7), 4)
    k = affinity(Patch(0.8, patch_size=3, search_radius=2), Grid((6, 7)), f)
    lam = np.ones((6, 7))
    lam[2, 3] = 0
    e = Ep(k, f, lam, 1.4)
    solution = solve(PFlow(e), t=400.0, integrator=LaggedDiffusivity(10.0, smoothing=1e-7))
    np.testing.assert_allclose(solution.final, e.minimizer(rtol=1e-10, maxiter=2000).u, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("p", "dt"), [(1.0, 100.0), (1.2, 300.0)])
def test_steps_of_any_length_come_to_rest(p: float, dt: float) -> None:
    f = np.where(np.arange(40) < 17, 0.0, 1.0) + 0.05 * normal(40, 1)
    flow = PFlow(Jp(affinity(Gaussian(1.5), Grid(40), window=3), p))
    solution = solve(flow, f, t=6 * dt, integrator=LaggedDiffusivity(dt))
    assert solution.success, solution.message
    np.testing.assert_allclose(solution.final, f.mean(), rtol=0, atol=1e-12)


def test_single_precision_and_constants() -> None:
    f = normal((6, 7), 4).astype(np.float32)
    k = affinity(Patch(0.8, patch_size=3, search_radius=2), Grid((6, 7)), f)
    assert solve(PFlow(Jp(k, 1.2)), f, t=0.1, integrator=LaggedDiffusivity(0.05)).final.dtype == np.float32
    flat = np.full((6, 7), 2.5, np.float32)
    np.testing.assert_array_equal(solve(PFlow(Jp(k, 1)), flat, t=1.0, integrator=LaggedDiffusivity(0.5)).final, flat)
    drawn = solve(PFlow(Ep(k, f, 1.0, 1)), flat, t=1.0, integrator=LaggedDiffusivity(0.5)).final
    assert np.abs(drawn - flat).max() > 0.1


def test_what_is_refused() -> None:
    k, u = cloud(), normal(9)
    flow = PFlow(Jp(k, 1.5))
    with pytest.raises(InputError, match=r"^functional: got J, expected Jp"):
        PFlow(J(k))  # type: ignore[arg-type]
    for integrator in (ExplicitEuler(0.1), SemiImplicit(0.1)):
        with pytest.raises(InputError, match=r"flow: PFlow.* is not linear; integrate it with LaggedDiffusivity"):
            solve(flow, u, t=1.0, integrator=integrator)
    with pytest.raises(InputError, match="symmetric"):
        solve(flow, u, t=1.0, integrator=Exponential())
    with pytest.raises(InputError, match=r"^integrator: LaggedDiffusivity is for a PFlow, got GradientFlow"):
        solve(GradientFlow(E(k, u, 1.0)), u, t=1.0, integrator=LaggedDiffusivity(0.1))
    with pytest.raises(InputError, match=r"^p: got 1, .* LaggedDiffusivity steps"):
        solve(PFlow(Jp(k, 1)), u, t=1.0)
    with pytest.raises(InputError, match=r"^smoothing: got 0"):
        LaggedDiffusivity(0.1, smoothing=0)
    with pytest.raises(InputError, match=r"^dt: got -1"):
        LaggedDiffusivity(-1)
    assert LaggedDiffusivity(0.1).stability_limit(flow) == math.inf


def test_linear_problems_that_are_too_hard_end_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    solve_linear = p_flow.quadratic_step
    monkeypatch.setattr(p_flow, "quadratic_step", lambda *a: replace(solve_linear(*a), residual=1e-3, message="far"))
    solution = solve(PFlow(Jp(cloud(), 1)), normal(9), t=1.0, integrator=LaggedDiffusivity(0.5))
    assert not solution.success
    assert solution.status is Status.STEP_FAILED
    assert solution.message == "conjugate gradients: far; or use a larger smoothing or a smaller dt"
