"""Trackers at times of their own: steps end there, nothing else moves, and a resumed run keeps them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.errors import FileFormatError, InputError
from nlflow.flows.integrators import Integrator
from nlflow.flows.trackers import Times
from tests.problems import Floats, problem

EPS = float(np.finfo(float).eps)


class Seen:
    """Keeps what a callback gets."""

    def __init__(self, **when: Any) -> None:
        self.t: list[float] = []
        self.u: list[Floats] = []
        self.tracker = nl.Callback(self._keep, **when)

    def _keep(self, t: float, u: Floats, flow: Any) -> None:
        self.t.append(t)
        self.u.append(u)


INTEGRATORS: dict[str, tuple[Callable[[], Integrator], float]] = {
    # The error allowed: the order in dt = 0.05, or the tolerance of the method.
    "fixed step": (lambda: nl.ExplicitEuler(0.05), 0.1),
    "Runge-Kutta": (lambda: nl.RungeKutta(1e-10, 1e-12), 1e-8),
    "exponential": (nl.Exponential, 1e-11),
}


@pytest.mark.numerical
@pytest.mark.parametrize("name", INTEGRATORS)
def test_steps_end_at_the_times_of_a_tracker(name: str) -> None:
    make, allowed = INTEGRATORS[name]
    p, at = problem(fidelity=0.4), [0.0, 0.123, 0.77, 1.0]
    seen = Seen(at=at)
    nl.solve(p.flow, p.start, t=1.3, integrator=make(), trackers=[seen.tracker])
    assert seen.t == at  # these alone, to the bit
    for t, u in zip(seen.t, seen.u, strict=True):
        assert p.norm(u - p.exact(t)) <= allowed


def test_the_look_is_that_of_an_output_time() -> None:
    """Exact landing: the same steps, and so the same bits, as with the times among t_eval."""
    p, at = problem(fidelity=0.4), [0.2, 0.55]
    for integrator in (nl.ExplicitEuler(0.125), nl.RungeKutta()):
        seen = Seen(at=at)
        one = nl.solve(p.flow, p.start, t=1.0, integrator=integrator, trackers=[seen.tracker])
        two = nl.solve(p.flow, p.start, t_eval=[0.0, *at, 1.0], integrator=integrator)
        assert np.array_equal(np.stack(seen.u), two.u[1:3])
        assert np.array_equal(one.final, two.final)
        plain = nl.solve(p.flow, p.start, t=1.0, integrator=integrator, trackers=[Seen().tracker])
        assert np.array_equal(plain.final, nl.solve(p.flow, p.start, t=1.0, integrator=integrator).final)


@pytest.mark.parametrize(("interval", "count"), [(0.1, 11), (0.3, 4), (1 / 3, 4), (7.0, 1), (1.0, 2)])
def test_intervals_count_from_zero_and_add_no_sliver(interval: float, count: int) -> None:
    """3 * 0.1 is not the float 0.3; a step between the two would be of rounding alone."""
    p, seen, other = problem(), Seen(interval=interval), Seen(at=[0.3, 2 / 3])
    integrator = nl.Exponential()
    solution = nl.solve(p.flow, p.start, t_eval=np.arange(11) / 10, integrator=integrator,
                        trackers=[seen.tracker, other.tracker])  # fmt: skip
    expected = np.arange(count) * interval
    np.testing.assert_allclose(seen.t, expected, rtol=4 * EPS)
    assert len(other.t) == 2
    assert solution.stats["steps"] == 10 + 1 + (interval == 1 / 3)  # 2/3 is no output time, nor is 1/3


def test_own_times_are_seen_and_no_others_where_a_rule_stops() -> None:
    p, energy = problem(), nl.Energy(interval=0.25)
    stop = nl.Callback(lambda t, u, flow: t > 0.6)
    solution = nl.solve(p.flow, p.start, t=2.0, integrator=nl.ExplicitEuler(0.05), trackers=[energy, stop])
    assert solution.records["energy"]["t"].tolist() == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("make", [lambda: nl.ExplicitEuler(0.07), nl.RungeKutta], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("steps", [1, 4, 9])
def test_a_resumed_run_keeps_the_times(make: Callable[[], Integrator], steps: int, tmp_path: Path) -> None:
    p, path = problem(fidelity=0.3), tmp_path / "checkpoint"

    def run(interval: float, *more: Any, **options: Any) -> nl.Solution:
        trackers = [nl.Energy(interval=interval), *more]
        return nl.solve(p.flow, p.start, t_eval=[0.5, 2.0], integrator=make(), trackers=trackers, **options)

    whole, calls = run(0.15), iter(range(1000))

    def interrupt(*_: Any) -> None:
        if next(calls) == steps:
            raise KeyboardInterrupt

    run(0.15, nl.Callback(interrupt), nl.Checkpoint(path))
    with pytest.raises(FileFormatError, match="those of trackers"):
        run(0.2, resume=path)
    resumed = run(0.15, resume=path)
    assert np.array_equal(resumed.u, whole.u)
    for column in ("t", "value"):
        assert np.array_equal(resumed.records["energy"][column], whole.records["energy"][column])


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ({"interval": 0}, r"^interval: got 0, expected a finite real number > 0"),
        ({"interval": "1"}, r"^interval: got '1', expected"),
        ({"interval": np.inf}, r"^interval: got inf, expected"),
        ({"at": []}, r"^at: got an empty array"),
        ({"at": [0.2, 0.1]}, r"^at: got \[0.2, 0.1\], expected increasing times >= 0"),
        ({"at": [-1.0]}, r"^at: got \[-1.0\], expected increasing"),
        ({"at": 0.5}, r"^at: got 0 dimension"),
        ({"at": [0.1], "interval": 0.1}, r"^interval: got it together with at, expected one of them"),
        ({"every": 2, "interval": 0.1}, r"^every: got it together with interval"),
    ],
)
def test_bad_times(when: dict[str, Any], message: str) -> None:
    for make in (nl.Energy, nl.DistanceToConstant, nl.SteadyState, lambda **w: nl.Callback(print, **w)):
        with pytest.raises(InputError, match=message):
            make(**when)


def test_times_that_a_run_does_not_reach_are_refused() -> None:
    p = problem()
    with pytest.raises(InputError, match=r"^at: got 3 after the end time 2; leave it out or raise t"):
        nl.solve(p.flow, p.start, t=2.0, trackers=[nl.Energy(at=[1.0, 3.0])])
    with pytest.raises(InputError, match=r"^interval: got 1e-13, expected more than"):
        nl.solve(p.flow, p.start, t=2.0, trackers=[nl.Energy(interval=1e-13)])
    layers = nl.AttentionStep()
    for when in ({"interval": 0.5}, {"at": [0.5]}):
        with pytest.raises(InputError, match=r"expected .*whole number.*steps of AttentionStep have length 1"):
            nl.solve(p.flow, p.start, t=2, integrator=layers, trackers=[nl.Energy(**when)])
    seen = Seen(interval=2)
    nl.solve(p.flow, p.start, t=5, integrator=layers, trackers=[seen.tracker])
    assert seen.t == [0, 2, 4]


def test_times_over_a_long_run() -> None:
    """The next of many times is found without a list of them, and none is passed over."""
    times, t, found = Times(interval=0.1), 0.0, 0
    while t < 2000:
        t = times.after(t)
        found += 1
        assert times.due(0, t)
        assert not times.due(0, t + 0.04)
    assert found == 20000
