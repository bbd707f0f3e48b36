"""Limit cycles: against closed forms and integrations of SciPy at 1e-12."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp

import nlflow as nl
from nlflow.affinities import Unlinked
from nlflow.equilibria import continue_equilibria, find_cycle


def at_one_node(formula: Callable[[Any], Any], bound: float = 500.0) -> nl.SystemFlow:
    reaction = nl.Reaction(formula, (-6.0, 6.0), components=2, bound=bound)
    return nl.SystemFlow(nl.J(Unlinked(nl.Points([0.0]))), [1.0, 1.0], reaction=reaction)


def normal_form(mu: float, omega: float, sign: float = 1.0) -> Callable[[Any], Any]:
    """Return that of Hopf: a cycle of radius sqrt(mu), period 2 pi / omega and multiplier exp(-2 mu T sign)."""

    def formula(u: Any) -> Any:
        x, y = u[..., 0], u[..., 1]
        grow = sign * (mu - x * x - y * y)
        return np.stack([grow * x - omega * y, grow * y + omega * x], axis=-1)

    return formula


def brusselator(a: float, b: float) -> Callable[[Any], Any]:
    def formula(u: Any) -> Any:
        x, y = u[..., 0], u[..., 1]
        return np.stack([a - (b + 1) * x + x * x * y, b * x - x * x * y], axis=-1)

    return formula


@pytest.mark.parametrize("sign", [1.0, pytest.param(-1.0, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_the_normal_form_of_hopf(sign: float) -> None:
    mu, omega = 0.25, 3.0
    cycle = find_cycle(at_one_node(normal_form(mu, omega, sign)), np.array([[0.55, 0.02]]), 2.0)
    assert cycle.success
    assert cycle.period == pytest.approx(2 * np.pi / omega, rel=1e-8)
    assert np.sum(cycle.u**2, axis=-1).ravel() == pytest.approx(mu, rel=1e-7)
    assert cycle.multipliers == pytest.approx([np.exp(-2 * mu * sign * cycle.period)], rel=1e-4)
    assert cycle.verdict == ("stable" if sign > 0 else "unstable")
    assert cycle.t[-1] == cycle.period
    assert np.abs(cycle.u[-1] - cycle.u[0]).max() < 1e-8


@pytest.mark.slow
def test_the_smallest_period_is_told() -> None:
    cycle = find_cycle(at_one_node(normal_form(0.25, 3.0)), np.array([[0.5, 0.1]]), 4.2)
    assert cycle.period == pytest.approx(2 * np.pi / 3, rel=1e-8)


def of_scipy(formula: Callable[[Any], Any], start: list[float], level: float) -> float:
    def crossing(t: float, u: Any) -> float:
        return float(u[0] - level)

    crossing.direction = 1.0  # type: ignore[attr-defined]
    found = solve_ivp(lambda t, u: formula(u), (0, 80), start, method="DOP853", rtol=1e-12, atol=1e-13, events=crossing)
    return float(np.diff(found.t_events[0])[-1])


@pytest.mark.slow
def test_the_period_of_the_brusselator_is_that_of_scipy() -> None:
    formula = brusselator(1.0, 3.0)
    cycle = find_cycle(at_one_node(formula), np.array([[1.2, 3.0]]), settle=12.0)
    assert cycle.success
    assert cycle.verdict == "stable"
    assert cycle.period == pytest.approx(of_scipy(formula, [1.2, 3.0], 1.0), rel=1e-9)
    # Abel, Jacobi and Liouville: the product of multipliers is that of the divergence.
    x, y = cycle.u[:-1, 0, 0], cycle.u[:-1, 0, 1]
    divergence = np.mean(-4 + 2 * x * y - x * x) * cycle.period
    assert np.log(cycle.multipliers[0].real) == pytest.approx(divergence, rel=1e-5)


@pytest.mark.slow
def test_deviations_that_diffuse_decay_faster() -> None:
    # With one diffusivity a wave of eigenvalue m has the multipliers of the node alone times exp(-m T).
    weights = nl.affinity(nl.Gaussian(width=0.15), nl.Grid(6, spacing=1 / 6, boundary="periodic"))
    m = 1 - np.fft.fft(weights.average(np.eye(6)[0])).real
    alone = find_cycle(at_one_node(brusselator(1.0, 2.4)), np.array([[1.2, 2.4]]), settle=40.0)
    reaction = nl.Reaction(brusselator(1.0, 2.4), (0.0, 8.0), components=2, bound=300.0)
    flow = nl.SystemFlow(nl.J(weights), [0.3, 0.3], reaction=reaction)
    cycle = find_cycle(flow, np.tile([1.2, 2.4], (6, 1)), settle=40.0)
    assert cycle.period == pytest.approx(alone.period, rel=1e-8)
    decay = np.exp(-0.3 * m * cycle.period)
    expected = np.sort(np.concatenate([decay[1:], decay * alone.multipliers[0].real]))[::-1]
    assert np.abs(cycle.multipliers - expected).max() < 1e-5


@pytest.mark.slow
def test_cycles_begin_at_hopf_points() -> None:
    def make_flow(mu: float) -> nl.SystemFlow:
        return at_one_node(normal_form(mu, 2.0))

    branch = continue_equilibria(make_flow, np.zeros((1, 2)), -0.3, (-0.3, 0.3))
    (point,) = branch.points
    assert point.kind == "hopf"
    assert point.parameter == pytest.approx(0, abs=1e-9)
    cycle = find_cycle(make_flow(0.01), *point.cycle(0.1))
    assert cycle.period == pytest.approx(np.pi, rel=1e-8)
    assert np.sum(cycle.u**2, axis=-1).ravel() == pytest.approx(0.01, rel=1e-7)


@pytest.mark.slow
def test_refusals() -> None:
    flow = at_one_node(normal_form(0.25, 3.0))
    start = np.array([[0.5, 0.0]])
    for message, given, options in (
        ("period: needed without a time to settle", (flow, start), {}),
        ("period", (flow, start, -1.0), {}),
        ("shape", (flow, np.zeros(3), 2.0), {}),
        ("NaN", (flow, np.array([[np.nan, 0.0]]), 2.0), {}),
    ):
        with pytest.raises(nl.InputError, match=re.escape(message)):
            find_cycle(*given, **options)
    large = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Grid(601))), reaction=nl.AllenCahn())
    with pytest.raises(nl.InputError, match="601 unknowns"):
        find_cycle(large, np.zeros(601), 1.0)
    gone = at_one_node(normal_form(-0.25, 3.0))
    assert not find_cycle(gone, start, 2.0, maxiter=1).success
    with pytest.raises(nl.NumericalError, match="did not come back"):
        find_cycle(at_one_node(lambda u: -u), start, settle=5.0)
    short = find_cycle(flow, np.array([[0.9, 0.0]]), 2.0, maxiter=1)
    assert not short.success
    assert "maxiter" in short.message
