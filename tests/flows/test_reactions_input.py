"""Reactions and sources that are refused, each by its name; and what only looks like a mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.errors import InputError, NumericalError
from tests.flows.test_reactions import START, WEIGHTS, F, energy, moving

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: nl.Reaction(lambda u: u.sum(), (0, 1), bound=1), r"returns shape \(\), expected shape \(128,\)"),
    "type": (lambda: nl.Reaction(lambda u: 1.0, (0, 1), bound=1), "returns float, expected shape"),
    "dtype": (lambda: nl.Reaction(lambda u: u.astype(float), (0, 1), bound=1), "float64, expected ndarray of float32"),
    "in place": (lambda: nl.Reaction(lambda u: np.multiply(u, 2, out=u), (0, 1), bound=2), "changes its argument"),
    "derivative": (
        lambda: nl.Reaction(np.sin, (0, 1), derivative=lambda u: -np.cos(u)),
        r"derivative: it disagrees with the function of sin\(0, 1\): at u = .* got -.*, expected about 0",
    ),
    "potential": (
        lambda: nl.Reaction(np.sin, (0, 1), bound=1, potential=lambda u: -np.cos(u)),
        "potential: it disagrees with the function",
    ),
    "potential of nothing": (
        lambda: nl.Reaction(np.sin, (0, 1), bound=1, potential=lambda u: None),
        "^potential: .* returns NoneType",
    ),
    "average": (lambda: nl.Reaction(np.sin, (0, 1), bound=1, average=3), "^average: got int, expected an Affinity"),  # type: ignore[arg-type]
    "competition": (lambda: nl.PredatorPrey(nl.Gaussian), "^competition: got the class Gaussian, expected an Aff"),  # type: ignore[arg-type]
    "bound": (lambda: nl.Reaction(np.sin, (0, 1), bound=0.5), "bound: got 0.5, but sin.* has a slope of 1 on"),
    "no bound": (lambda: nl.Reaction(np.sin, (0, 1)), "bound: got none without a derivative"),
    "infinite": (lambda: nl.Reaction(np.log, (-1, 1), bound=1), "function: log.* is not finite on its interval"),
    "interval": (lambda: nl.Reaction(np.sin, (1, 1), bound=1), "expected low < high"),
    "pair": (lambda: nl.Reaction(np.sin, 3, bound=1), r"interval: got 3, expected a pair"),  # type: ignore[arg-type]
    "function": (lambda: nl.Reaction(3, (0, 1), bound=1), "function: got int, expected a callable"),  # type: ignore[arg-type]
    "name": (lambda: nl.Reaction(np.sin, (0, 1), bound=1, name=np.zeros(2)), "name: got array.*, expected text"),  # type: ignore[arg-type]
    "strength": (lambda: nl.AllenCahn(0.0), "strength: got 0.0, expected"),
    "no reaction": (lambda: nl.GradientFlow(nl.J(WEIGHTS), reaction=np.sin), "reaction: got ufunc, expected a Reac"),  # type: ignore[arg-type]
    "source": (lambda: nl.GradientFlow(nl.J(WEIGHTS), source=np.ones(5)), "source: got shape"),
    "arguments": (lambda: nl.GradientFlow(nl.J(WEIGHTS), source=lambda t, x, u: u), "source: got a callable of 3"),
    "observed": (lambda: nl.GradientFlow(nl.J(WEIGHTS), observed=moving), "observed: got a signal without a fidelity"),
    "fixed": (lambda: nl.GradientFlow(energy(), observed=F), "observed: got ndarray, expected a callable"),  # type: ignore[arg-type]
    "f(0)": (lambda: nl.GradientFlow(energy(), observed=lambda t: F[:3]), r"observed: got shape \(3,\) at t=0, expec"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_terms(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(InputError, match=message):
        make()


def test_a_corner_is_no_disagreement() -> None:
    corner = nl.Reaction(lambda u: np.maximum(u, 0), (-1, 1), derivative=lambda u: 1.0 * (u > 0))
    assert corner.bound == 1.0


SOURCES: dict[str, tuple[Any, str]] = {
    "shape": (lambda t: F[:3], r"source: got shape \(3,\) at t=0, expected \(24,\)"),
    "channels": (np.ones((24, 2)), r"source: got shape \(24, 2\), expected \(24,\), that of the signal"),
    "number": (lambda t: 1.0, "source: got float at t=0, expected"),
    "dtype": (lambda t: F.astype(np.float32), "source: got ndarray of float32, expected ndarray of float64"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_sources_unlike_the_signal_are_refused(name: str) -> None:
    source, message = SOURCES[name]
    with pytest.raises(InputError, match=message):
        nl.solve(nl.GradientFlow(nl.J(WEIGHTS), source=source), START, t=1.0)


def test_sources_on_grids_and_channels() -> None:
    """A callable of the nodes returns a value, or a row of channels, for each of them."""
    grid = nl.Grid((4, 6))
    weights = nl.affinity(nl.Gaussian(width=1.0), grid)
    for shape in ((4, 6), (4, 6, 2)):
        rows = lambda t, x, shape=shape: np.ones((24, *shape[2:])) * (1 + t)  # noqa: E731
        found = nl.solve(nl.GradientFlow(nl.J(weights), source=rows), np.zeros(shape), t=2.0)
        assert found.final == pytest.approx(np.full(shape, 4.0), rel=1e-6)


def test_a_start_outside_the_interval_is_refused() -> None:
    flow = nl.GradientFlow(nl.J(WEIGHTS), reaction=nl.AllenCahn())
    with pytest.raises(InputError, match=r"start: got values from 0.* to 1\.8, expected them in \[-1.0, 1.0\]"):
        nl.solve(flow, START * 2 / START.max() * 0.9, t=1.0)
    wider = nl.AllenCahn(interval=(-2, 2))
    assert wider.bound == 11.0
    assert nl.solve(nl.GradientFlow(nl.J(WEIGHTS), reaction=wider), 2 * START, t=1.0).success


def test_a_reaction_that_overflows_is_named() -> None:
    def blow(u: Any) -> Any:
        return np.exp(u)

    reaction = nl.Reaction(blow, (0, 50), derivative=blow)
    with pytest.raises(NumericalError, match=r"reaction: blow\(0, 50\) is not finite at u = 1000"):
        reaction(np.array([1.0, 1000.0]))
    flow = nl.GradientFlow(nl.J(WEIGHTS), "degree", reaction=nl.Reaction(blow, (0, 1), derivative=blow))
    euler = nl.solve(flow, np.ones(24), t=10.0, integrator=nl.ExplicitEuler(0.4))
    adaptive = nl.solve(flow, np.ones(24), t=10.0)
    for failed in (euler, adaptive):  # the solution runs to infinity at t = exp(-1)
        assert failed.status is nl.Status.STEP_FAILED
        assert not failed.success
    assert "reaction: blow(0, 1) is not finite at u = " in euler.message
    assert adaptive.t[-1] == pytest.approx(np.exp(-1), abs=1e-6)
    nowhere = nl.GradientFlow(nl.J(WEIGHTS), source=lambda t: F / max(1 - t, 0) if t < 1 else F * np.inf)
    failed = nl.solve(nowhere, START, t=2.0, integrator=nl.ExplicitEuler(0.25))
    assert failed.status is nl.Status.STEP_FAILED
    assert "source: NaN or infinite at t=1" in failed.message


def test_no_energy_without_a_potential() -> None:
    flow = nl.GradientFlow(nl.J(WEIGHTS), reaction=nl.Reaction(np.sin, (-1, 1), bound=1.0))
    assert not flow.has_energy
    assert np.isnan(nl.solve(flow, START, t=0.1).energy).all()
    with pytest.raises(InputError, match="a reaction has no potential"):
        nl.solve(flow, START, t=0.1, trackers=[nl.Energy()])
