"""The signal between the ends of steps: its error, and that outputs shorten no step."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.errors import InputError
from tests.flows.test_events import FLOW, MODE, OSCILLATOR, RATE

pytestmark = pytest.mark.numerical

START = np.array([[0.0, 1.0]])
TIMES = np.linspace(0, 6, 61)


def exact(times: Any) -> Any:
    return np.stack([np.sin(times), np.cos(times)], axis=-1)[:, None, :]


def test_order_between_steps() -> None:
    """A polynomial of degree 4 leaves h^5, as much as steps of order 5 add up to."""
    errors = []
    for n in (30, 60):
        integrator = nl.RungeKutta(dt=6 / n, adaptive=False)
        found = nl.solve(OSCILLATOR, START, t=6.0, integrator=integrator, dense=True)
        errors.append(float(np.abs(found.at(TIMES) - exact(TIMES)).max()))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(5.0, abs=0.1)


def test_outputs_shorten_no_step() -> None:
    plain = nl.solve(OSCILLATOR, START, t=6.0, integrator=nl.RungeKutta(1e-8, 1e-10))
    found = nl.solve(OSCILLATOR, START, t_eval=TIMES, integrator=nl.RungeKutta(1e-8, 1e-10), dense=True)
    assert found.stats["steps"] == plain.stats["steps"]
    assert found.stats["applications"] == plain.stats["applications"]
    assert np.array_equal(found.final, plain.final)
    assert np.array_equal(found.t, TIMES)
    assert found.u == pytest.approx(exact(TIMES), abs=1e-6)
    assert np.array_equal(found.at(TIMES), found.u)
    assert np.array_equal(found.at(TIMES[7]), found.u[7])


def test_energies_and_held_values_are_those_of_their_time() -> None:
    found = nl.solve(FLOW, MODE, t_eval=TIMES, integrator=nl.RungeKutta(1e-8, 1e-10), dense=True)
    assert found.energy == pytest.approx(found.energy[0] * np.exp(-2 * RATE * TIMES), rel=1e-5)
    held = nl.Constraint(np.array([0]), lambda t: np.array([np.sin(t)]))
    flow = nl.GradientFlow(FLOW.functional, "degree", constraint=held)
    found = nl.solve(flow, MODE, t=6.0, integrator=nl.RungeKutta(), dense=True)
    assert found.at(TIMES)[:, 0] == pytest.approx(np.sin(TIMES), abs=1e-15)


def test_events_in_dense_runs() -> None:
    event = nl.Event(lambda t, u: u[0, 0], action=lambda t, u: -2 * u)
    found = nl.solve(OSCILLATOR, START, t=4.0, integrator=nl.RungeKutta(1e-9, 1e-11), trackers=[event], dense=True)
    first = float(found.records["event"]["t"][0])
    assert first == pytest.approx(math.pi, abs=1e-7)
    for t in (0.5, 2.0, 3.1):
        assert found.at(t) == pytest.approx(exact(np.array([t]))[0], abs=1e-6)
    assert found.at(3.5) == pytest.approx(-2 * exact(np.array([3.5]))[0], abs=1e-6)


def test_refusals(tmp_path: Any) -> None:
    with pytest.raises(InputError, match="dense: got True for ETD4RK, whose steps are known at their ends alone"):
        nl.solve(FLOW, MODE, t=1.0, integrator=nl.ETD4RK(0.1), dense=True)
    with pytest.raises(InputError, match="dense: got True for a resumed run"):
        nl.solve(FLOW, MODE, t=1.0, integrator=nl.RungeKutta(), dense=True, resume=tmp_path / "a.npz")
    with pytest.raises(InputError, match=r"ask for solve\(..., dense=True\)"):
        nl.solve(FLOW, MODE, t=1.0).at(0.5)
    found = nl.solve(FLOW, MODE, t=1.0, integrator=nl.RungeKutta(), dense=True)
    with pytest.raises(InputError, match=r"t: got times from 0.5 to 2, expected them in \[0, 1\]"):
        found.at([0.5, 2.0])


def test_a_dense_solution_is_freed_with_its_last_name() -> None:
    """Its steps hold five signals each, which must not wait for the collector of cycles."""
    found = nl.solve(OSCILLATOR, START, t=6.0, integrator=nl.RungeKutta(), dense=True)
    assert found.between is not None
    run = weakref.ref(found.between.__self__)  # type: ignore[attr-defined]
    gc.disable()
    try:
        del found
        assert run() is None
    finally:
        gc.enable()
