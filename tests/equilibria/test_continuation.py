"""Branches of equilibria: against closed forms; what happens on the way; what leaves a branch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import nlflow as nl
from nlflow.affinities import Unlinked
from nlflow.equilibria import Branch, continue_equilibria
from nlflow.flows.flow import Flow

Floats = NDArray[np.float64]


class Own(Flow):
    """A flow of channels at one node, by its formula."""

    def __init__(self, formula: Callable[[Floats], Floats]) -> None:
        super().__init__(Unlinked(nl.Points([0.0])), "l2", None, evolving=False, every=1)
        self.formula = formula

    def velocity(self, u: Any) -> Any:
        return self.formula(u)


def along(formula: Callable[[Floats, float], Floats], start: float, p: float, bounds: Any, **options: Any) -> Branch:
    return continue_equilibria(lambda q: Own(lambda u: formula(u, q)), np.array([start]), p, bounds, **options)


def circle(width: float = 0.15, n: int = 64) -> tuple[Any, Floats]:
    """Return an affinity on a circle and the eigenvalues of I - P for waves 0, 1, ..., closed forms of sums."""
    grid = nl.Grid(n, spacing=1 / n, boundary="periodic")
    weights = nl.affinity(nl.Gaussian(width=width), grid)
    x = grid.nodes[:, 0]
    row = weights.average(np.eye(n)[0])  # P is symmetric and moves with its row
    waves = np.array([1 - np.sum(row * np.cos(2 * np.pi * k * (x - x[0]))) for k in range(6)])
    return weights, waves


def allen_cahn(weights: Any) -> Callable[[float], nl.GradientFlow]:
    def make_flow(r: float) -> nl.GradientFlow:
        reaction = nl.Reaction(lambda u: r * (u - u**3), (-2, 2), derivative=lambda u: r * (1 - 3 * u * u))
        return nl.GradientFlow(nl.J(weights), "degree", reaction=reaction)

    return make_flow


def test_pitchforks_of_allen_cahn_on_a_circle_are_at_the_eigenvalues() -> None:
    weights, waves = circle()
    branch = continue_equilibria(allen_cahn(weights), np.zeros(64), -0.1, (-0.1, 0.95))
    assert branch.status == "range"
    assert branch.success
    assert np.all(branch.u == 0)
    assert [point.kind for point in branch.points] == 3 * ["pitchfork"]
    assert [point.multiplicity for point in branch.points] == [1, 2, 2]
    found = np.array([point.parameter for point in branch.points])
    assert np.abs(found - waves[:3]).max() < 1e-12
    assert all(abs(p.parameter - wave) <= p.error for p, wave in zip(branch.points, waves, strict=False))
    # r - A_k are the eigenvalues: one for constants, two for each wave.
    counts = [sum((r > wave) * (1 + (k > 0)) for k, wave in enumerate(waves)) for r in branch.parameter]
    assert branch.unstable.tolist() == counts
    assert np.array_equal(branch.stable, branch.unstable == 0)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.sampled(2)
@pytest.mark.slow
def test_branches_of_waves_follow_from_a_double_pitchfork(sign: int) -> None:
    weights, waves = circle()
    make_flow = allen_cahn(weights)
    branch = continue_equilibria(make_flow, np.zeros(64), 0.3, (0.3, 0.6))
    wave = branch.switch(branch.points[0], sign=sign)
    assert wave.status == "range"
    assert np.all(wave.unstable == 1)  # constants grow
    for r, u in zip(wave.parameter[1:], wave.u[1:], strict=True):
        assert np.abs(make_flow(float(r)).velocity(u)).max() < 1e-9
    # Near the pitchfork r = A_1 + 3/4 A_1 a^2, a being the amplitude: the term of Lyapunov and Schmidt.
    amplitude = np.abs(np.fft.rfft(wave.u, axis=1)[:, 1]) * 2 / 64
    near = slice(1, 3)
    coefficient = (wave.parameter[near] - waves[1]) / amplitude[near] ** 2
    assert np.abs(coefficient / (0.75 * waves[1]) - 1).max() < 2e-3
    assert sign * wave.u[1, 0] > 0


def test_iterations_follow_the_same_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, waves = circle(n=32)
    options: dict[str, Any] = {"k": 4, "longest": 0.2, "step": 0.1}
    for module in ("equations", "eigenvalues", "continuation"):
        monkeypatch.setattr(f"nlflow.equilibria.{module}.DENSE", 4)
    branch = continue_equilibria(allen_cahn(weights), np.zeros(32), 0.3, (0.3, 0.5), **options)
    assert [point.kind for point in branch.points] == ["pitchfork"]
    assert abs(branch.points[0].parameter - waves[1]) < 1e-9
    wave = branch.switch(branch.points[0])
    assert wave.status == "range"
    assert np.all(wave.unstable == 1)


def test_folds_are_passed_and_located() -> None:
    branch = along(lambda u, p: p + u - u**3 / 3, -2.5, -2.0, (-2, 2))
    assert branch.status == "range"
    assert [point.kind for point in branch.points] == ["fold", "fold"]
    assert [point.parameter for point in branch.points] == pytest.approx([2 / 3, -2 / 3], abs=1e-10)
    u = branch.u[:, 0]
    assert np.abs(branch.parameter - (u**3 / 3 - u)).max() < 1e-8
    clear = np.abs(u**2 - 1) > 1e-6
    assert np.array_equal(branch.stable[clear], u[clear] ** 2 > 1)


def test_a_closed_branch_ends_where_it_began() -> None:
    branch = along(lambda u, p: 1 - u**2 - p**2, 1.0, 0.0, (-2, 2))
    assert branch.status == "closed"
    assert branch.success
    assert np.abs(branch.u[:, 0] ** 2 + branch.parameter**2 - 1).max() < 1e-8
    assert sorted(round(point.parameter, 8) for point in branch.of_kind("fold")) == [-1, 1]


def test_transcritical_points_and_branches_that_cross_them() -> None:
    branch = along(lambda u, p: p * u - u**2, 0.0, -1.0, (-1, 1))
    (point,) = branch.points
    assert point.kind == "transcritical"
    assert abs(point.parameter) < 1e-12
    for sign in (1, -1):
        other = branch.switch(point, sign=sign)
        assert np.abs(other.u[:, 0] - other.parameter).max() < 1e-9
        assert np.all(other.stable[1:] == (other.parameter[1:] > 0))
    assert branch.of_kind("branch point") == [point]


def test_a_switch_does_not_come_back_to_the_branch_that_it_leaves() -> None:
    # Both branches have a part along the null vector.
    branch = along(lambda u, p: (u - p) * (u - p / 3), -1.0, -1.0, (-1, 1))
    assert np.abs(branch.u[:, 0] - branch.parameter).max() < 1e-9
    (point,) = branch.points
    assert point.kind == "transcritical"
    other = branch.switch(point)
    assert np.abs(other.u[:, 0] - other.parameter / 3).max() < 1e-9


def test_no_step_jumps_to_a_branch_straight_ahead() -> None:
    # u = sqrt(p^2 + e) turns at p = 0, and -sqrt(p^2 + e) goes on where it came from.
    branch = along(lambda u, p: u**2 - p**2 - 1e-4, np.sqrt(1 + 1e-4), -1.0, (-1, 1), longest=1.0, step=1.0)
    assert branch.status == "range"
    assert np.all(branch.u > 0)
    assert branch.points == ()
    circle = along(lambda u, p: 1 - u**2 - p**2, 1.0, 0.0, (-2, 2), longest=2.0, step=2.0)
    assert circle.status == "closed"
    tangents = np.stack([-circle.parameter, circle.u[:, 0] / 4], axis=1)  # in the norm of steps
    tangents /= np.linalg.norm(tangents, axis=1)[:, None]
    assert np.sum(tangents[1:] * tangents[:-1], axis=1).min() >= 0.9 - 1e-6


@pytest.mark.slow
def test_a_branch_that_passes_a_pitchfork_on_its_own_parabola() -> None:
    branch = along(lambda u, p: p * u - u**3, 1.0, 1.0, (-1, 1))
    assert [point.kind for point in branch.points] == ["pitchfork"]
    assert abs(branch.points[0].parameter) < 1e-9
    assert np.abs(branch.parameter - branch.u[:, 0] ** 2).max() < 1e-8
    assert branch.u[-1, 0] == pytest.approx(-1)


def brusselator(a: float, diffusivity: Any = (1.0, 1.0)) -> Callable[[float], nl.SystemFlow]:
    weights, _ = circle(n=16)

    def make_flow(b: float) -> nl.SystemFlow:
        def formula(u: Any) -> Any:
            x, y = u[..., 0], u[..., 1]
            return np.stack([a - (b + 1) * x + x * x * y, b * x - x * x * y], axis=-1)

        reaction = nl.Reaction(formula, (0.0, 8.0), components=2, bound=300.0)
        return nl.SystemFlow(nl.J(weights), diffusivity, "degree", reaction=reaction)

    return make_flow


@pytest.mark.parametrize("a", [1.0, pytest.param(1.5, marks=pytest.mark.slow)])
def test_hopf_points_of_the_brusselator(a: float) -> None:
    branch = continue_equilibria(brusselator(a), np.tile([a, 1.0], (16, 1)), 1.2, (1.2, 1.3 + a**2), longest=0.2)
    point = branch.points[0]
    assert point.kind == "hopf"
    assert point.parameter == pytest.approx(1 + a**2, abs=1e-9)
    assert abs(point.parameter - 1 - a**2) <= point.error
    assert point.eigenvalue.imag == pytest.approx(a, abs=1e-8)
    assert point.multiplicity == 1
    exact = np.stack([a + 0 * branch.parameter, branch.parameter / a], axis=-1)[:, None]
    assert np.abs(branch.u - exact).max() < 1e-9
    start, period = point.cycle(0.1)
    assert period == pytest.approx(2 * np.pi / a)
    assert np.sqrt(np.mean(np.sum((start - point.u) ** 2, axis=1))) < 0.2
    with pytest.raises(nl.InputError, match="find_cycle"):
        branch.switch(point)


@pytest.mark.slow
def test_turing_points_of_the_brusselator() -> None:
    # With slow diffusion of x and fast of y the homogeneous state loses to a wave first: the determinant of
    # [[b - 1 - d1 m, a^2], [-b, -a^2 - d2 m]] is 0 at some eigenvalue m of I - P.
    a, slow, fast = 2.0, 0.5, 12.0
    m = circle(n=16)[1][1:]
    expected = np.min(((1 + slow * m) * (a**2 + fast * m)) / (fast * m))
    branch = continue_equilibria(
        brusselator(a, (slow, fast)), np.tile([a, 1.0], (16, 1)), 1.5, (1.5, 2.05), longest=0.2
    )
    point = branch.points[0]
    assert expected < 1 + a**2
    assert point.parameter == pytest.approx(expected, abs=1e-8)
    assert point.multiplicity == 2
    assert point.kind != "fold"


def test_steps_that_leave_a_branch_are_halved_or_named() -> None:
    bent = along(lambda u, p: 1e-3 + p * u - u**3, 0.0, -1.0, (-1, 1), longest=1.0, step=1.0)
    assert bent.status == "range"
    assert np.abs(1e-3 + bent.parameter * bent.u[:, 0] - bent.u[:, 0] ** 3).max() < 1e-9
    assert np.all(bent.u[:, 0] > 0)  # the other branch is below 0
    torn = along(lambda u, p: p + (p >= 0.5) - u, 0.0, 0.0, (0, 1))
    assert torn.status == "lost"
    assert not torn.success
    assert "no step from p = 0.4999" in torn.message
    assert torn.parameter[-1] < 0.5
    short = along(lambda u, p: p - u, 0.0, 0.0, (0, 1), most=3)
    assert (short.status, short.success) == ("steps", False)
    assert "raise most" in short.message


def test_a_class_of_flows_makes_flows() -> None:
    class Line(Own):
        def __init__(self, p: float) -> None:
            super().__init__(lambda u: p - u)

    branch = continue_equilibria(Line, np.zeros(1), 0.0, (0, 1))
    np.testing.assert_allclose(branch.u[:, 0], branch.parameter, atol=1e-12)


def test_refusals() -> None:
    def line(p: float) -> Own:
        return Own(lambda u: p - u)

    zero = np.zeros(1)
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("bounds: got (1, 0), expected low < high; direction=-1", (line, zero, 0.5, (1, 0)), {}),
        ("bounds: got 3, expected a pair", (line, zero, 0.5, 3), {}),
        ("parameter: got 2, expected one within the bounds (0, 1)", (line, zero, 2, (0, 1)), {}),
        ("make_flow: got int, expected a function", (3, zero, 0, (0, 1)), {}),
        ("make_flow at 0: got float, expected a flow", (lambda p: p, zero, 0, (0, 1)), {}),
        ("direction: got 0", (line, zero, 0.5, (0, 1)), {"direction": 0}),
        ("size: got 'x', expected a finite real number > 0", (line, zero, 0.5, (0, 1)), {"size": "x"}),
        ("longest", (line, zero, 0.5, (0, 1)), {"longest": -1}),
        ("shape", (line, np.zeros(3), 0.5, (0, 1)), {}),
        ("NaN", (line, np.array([np.nan]), 0.5, (0, 1)), {}),
    ]
    for message, given, options in cases:
        with pytest.raises(nl.InputError, match=re.escape(message)):
            continue_equilibria(*given, **options)
    with pytest.raises(nl.NumericalError, match="no equilibrium of make_flow"):
        along(lambda u, p: 1 + u**2, 0.0, 0.0, (0, 1))
    branch = along(lambda u, p: p * u - u**2, 0.0, -1.0, (-1, 1))
    with pytest.raises(nl.InputError, match="vector: got 1"):
        branch.switch(branch.points[0], vector=1)
    with pytest.raises(nl.InputError, match="sign"):
        branch.switch(branch.points[0], sign=0)
    down = along(lambda u, p: p - u, 1.0, 1.0, (0, 1))
    assert down.parameter[-1] == 0.0


@pytest.mark.slow
def test_cahn_hilliard_separates_where_the_second_variation_says() -> None:
    # -M (A - r (1 - 3 c^2)) is 0 on a wave where r (1 - 3 c^2) is its eigenvalue of A = d (I - P).
    n, mean = 12, 0.2
    weights = nl.affinity(nl.Gaussian(width=0.15), nl.Grid(n, spacing=1 / n, boundary="periodic"))
    mu = np.fft.fft(weights.average(np.eye(n)[0])).real
    expected = 2 * float(weights.degree[0]) * (1 - mu[1]) / (1 - 3 * mean**2)

    def make_flow(r: float) -> nl.GradientFlow:
        reaction = nl.Reaction(lambda u: r * (u - u**3), (-2, 2), derivative=lambda u: r * (1 - 3 * u * u))
        return nl.GradientFlow(nl.J(weights), nl.ConservedMetric(), reaction=reaction)

    bounds = (0.5 * expected, 1.2 * expected)
    branch = continue_equilibria(make_flow, np.full(n, mean), bounds[0], bounds, longest=0.2)
    assert [point.parameter for point in branch.points] == pytest.approx([expected], abs=1e-9)
    assert branch.points[0].multiplicity == 2
    assert branch.unstable.tolist() == [2 * (r > expected) for r in branch.parameter]
    wave = branch.switch(branch.points[0])
    assert np.abs(wave.u.mean(axis=1) - mean).max() < 1e-10
