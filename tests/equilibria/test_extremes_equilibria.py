"""Equilibria of nonlinear flows and fields about them, far out, while any floating-point exception is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.affinities import Unlinked

pytestmark = [
    pytest.mark.numerical,
    pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning"),
    pytest.mark.usefixtures("strict"),
]

WEIGHTS = nl.affinity(nl.Gaussian(width=2.0), nl.Grid(8, boundary="periodic"))
ONE = nl.J(Unlinked(nl.Points([0.0])))
U = np.sin(np.arange(8.0))
UNITS = (1e-290, 1e290)


@pytest.mark.parametrize("unit", UNITS)
def test_equilibria_in_any_unit(unit: float) -> None:
    """u - u^3 in another unit: at rest at 0 and at +-1."""
    bistable = nl.Reaction(
        lambda u: u - u * (u / unit) * (u / unit), (-2 * unit, 2 * unit), derivative=lambda u: 1 - 3 * (u / unit) ** 2
    )
    flow = nl.GradientFlow(nl.J(WEIGHTS), "degree", reaction=bistable)
    for method in ("newton", "transient"):
        found = nl.find_equilibrium(flow, np.full(8, 0.7 * unit), method=method)
        assert found.success, found.message
        np.testing.assert_allclose(found.u / unit, 1.0, rtol=1e-9)
    told = nl.stability(flow, np.full(8, unit))
    assert told.verdict == "stable"
    assert told.margin == pytest.approx(2, abs=1e-9)
    several = nl.find_equilibria(nl.GradientFlow(ONE, "degree", reaction=bistable), np.full(1, 0.3 * unit))
    np.testing.assert_allclose(sorted(one.u[0] / unit for one in several), [-1, 0, 1], rtol=0, atol=1e-9)


def line(p: float, rate: float, unit: float) -> Any:
    reaction = nl.Reaction(lambda u: rate * (p - u), (-3 * unit, 3 * unit), derivative=lambda u: 0 * u - rate)
    return nl.GradientFlow(ONE, "degree", reaction=reaction)


@pytest.mark.parametrize("rate", [1e-140, 1e140])
def test_branches_at_any_rate(rate: float) -> None:
    start = np.array([0.1])
    branch = nl.continue_equilibria(lambda p: line(p, rate, 1.0), start, 0.1, (0.0, 1.0), step=0.1, longest=0.5)
    assert branch.success, branch.message
    np.testing.assert_allclose(branch.u[:, 0], branch.parameter, rtol=0, atol=1e-9)


@pytest.mark.parametrize("unit", UNITS)
def test_branches_say_what_no_float_holds(unit: float) -> None:
    with pytest.raises(nl.InputError, match="size: got"):
        nl.continue_equilibria(lambda p: line(p, 1.0, unit), np.array([0.1 * unit]), 0.1 * unit, (0.0, unit))


@pytest.mark.slow
def turning(rate: float, unit: float) -> Any:
    """Return the flow that turns to the circle of radius `unit`, and around it in 2 pi / rate."""

    def turn(u: Any) -> Any:
        a, b = u[..., 0] / unit, u[..., 1] / unit
        rest = 1 - a * a - b * b
        return rate * unit * np.stack([a * rest - b, b * rest + a], axis=-1)

    reaction = nl.Reaction(turn, (-2 * unit, 2 * unit), components=2, bound=30 * rate)
    return nl.GradientFlow(ONE, "degree", reaction=reaction)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "unit"), [(1e-6, 1.0), (1e6, 1.0), (1.0, 1e-6), (1.0, 1e6)])
def test_cycles_in_other_units(rate: float, unit: float) -> None:
    found = nl.find_cycle(turning(rate, unit), np.array([[1.1 * unit, 0.0]]), 6 / rate)
    assert found.success, found.message
    assert found.period * rate == pytest.approx(2 * np.pi, rel=1e-7)


def test_cycles_say_what_they_cannot_follow() -> None:
    with pytest.raises(nl.NumericalError, match="start: the flow could not be followed"):
        nl.find_cycle(turning(1.0, 1e-100), np.array([[1.1e-100, 0.0]]), 6.0)


@pytest.mark.parametrize("unit", UNITS)
def test_fields_and_choices_in_any_unit(unit: float) -> None:
    def energy(f: Any) -> nl.E:
        return nl.E(WEIGHTS, f, 1.0, measure="degree")

    expected = nl.GaussianField(energy(U), beta=1.0)
    found = nl.GaussianField(energy(U * unit), beta=1.0)
    np.testing.assert_allclose(found.mean / unit, expected.mean, rtol=0, atol=1e-12)
    cold = nl.GaussianField(energy(U), beta=unit).deviations(2, np.random.default_rng(1)) * unit**0.5
    usual = expected.deviations(2, np.random.default_rng(1))
    np.testing.assert_allclose(cold, usual, rtol=0, atol=1e-12 * np.abs(usual).max())
    with pytest.raises(nl.InputError, match="sigma: got"):
        nl.GaussianField(energy(U), sigma=unit)
    for method in ("rgcv", "evidence", "lcurve"):
        with pytest.raises(nl.InputError, match="square a float can hold"):
            nl.choose_fidelity(energy(U * unit), method=method)
    with pytest.raises(nl.InputError, match="square a float can hold"):
        nl.choose_parameter(lambda width: energy(U * unit), [1.0, 2.0, 3.0])
    for size in (1e-100, 1e100):
        assert nl.choose_fidelity(energy(U * size)).value == pytest.approx(nl.choose_fidelity(energy(U)).value)
