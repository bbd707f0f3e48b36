"""Trackers: when they look, what they collect, when they stop, and where progress goes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import nlflow as nl
from nlflow.errors import InputError, NlflowError
from nlflow.flows import AveragingFlow, ParticleFlow
from nlflow.flows.trackers import Progress, Tracker
from nlflow.store.checkpoints import Checkpoints
from tests.problems import Floats, problem

EULER = nl.ExplicitEuler(0.125)


class Seen(Tracker):
    """Notes when it was called."""

    name = "seen"

    def __init__(self, every: int = 1) -> None:
        super().__init__(every)
        self.calls: list[Any] = []

    def start(self, flow: nl.GradientFlow, u: Floats, t: float, end: float) -> None:
        self.calls.append(("start", t, end))

    def look(self, flow: nl.GradientFlow, u: Floats, t: float) -> None:
        self.calls.append(t)

    def finish(self) -> None:
        self.calls.append("finish")


# --- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2, 3, 6, 100])
def test_trackers_look_every_so_many_steps_and_at_both_ends(every: int) -> None:
    p, seen = problem(), Seen(every)
    nl.solve(p.flow, p.start, t_eval=[0.3, 0.875], integrator=nl.ExplicitEuler(0.15), trackers=[seen])
    times = [0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.875]  # the last step is shortened
    assert seen.calls[0] == ("start", 0.0, 0.875)
    assert seen.calls[1:-1] == pytest.approx([t for k, t in enumerate(times) if k % every == 0 or k == 6], abs=1e-15)
    assert seen.calls[-1] == "finish"


@pytest.mark.parametrize("how", ["stop", "interrupt", "error"])
def test_trackers_finish_however_it_ends(how: str) -> None:
    def end(t: float, u: Floats, flow: nl.GradientFlow) -> bool:
        if t > 0.2 and how == "interrupt":
            raise KeyboardInterrupt
        if t > 0.2 and how == "error":
            raise RuntimeError("the callback's own")
        return t > 0.2

    p, seen = problem(), Seen()
    if how == "error":
        with pytest.raises(RuntimeError, match="the callback's own"):
            nl.solve(p.flow, p.start, t=1.0, integrator=EULER, trackers=[nl.Callback(end), seen])
    else:
        nl.solve(p.flow, p.start, t=1.0, integrator=EULER, trackers=[nl.Callback(end), seen])
    assert seen.calls[-1] == "finish"
    assert seen.calls.count("finish") == 1


def test_trackers_can_be_used_again() -> None:
    p, energy = problem(), nl.Energy()
    first = nl.solve(p.flow, p.start, t=1.0, integrator=EULER, trackers=[energy])
    second = nl.solve(p.flow, p.start, t=0.5, integrator=EULER, trackers=[energy])
    assert len(first.records["energy"]["t"]) == 9
    assert second.records["energy"]["t"].tolist() == [0.125 * k for k in range(5)]


def test_the_base_is_a_contract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Tracker()  # type: ignore[abstract]


# --- what ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["l2", "degree"])
def test_series(metric: str) -> None:
    p = problem(metric, 0.2, channels=2)
    states: list[Floats] = []
    keep = nl.Callback(lambda t, u, flow: states.append(u))
    solution = nl.solve(
        p.flow, p.start, t=1.0, integrator=EULER, trackers=[keep, nl.Energy(every=2), nl.DistanceToConstant()]
    )
    assert set(solution.records) == {"energy", "distance"}
    energy, distance = solution.records["energy"], solution.records["distance"]
    assert energy["t"].tolist() == [0.25 * k for k in range(5)]
    assert energy["value"].tolist() == [p.flow.functional.value(u) for u in states[::2]]
    assert distance["t"].tolist() == [0.125 * k for k in range(9)]
    assert distance["value"].tolist() == [p.flow.distance_to_constant(u) for u in states]
    assert np.array_equal(solution.energy, energy["value"][[0, -1]])


def test_trackers_of_one_kind_are_numbered() -> None:
    p = problem()
    trackers = [nl.Energy(), nl.DistanceToConstant(), nl.Energy(every=4)]
    records = nl.solve(p.flow, p.start, t=1.0, integrator=EULER, trackers=trackers).records
    assert set(records) == {"energy", "distance", "energy-2"}
    assert len(records["energy"]["t"]) == 9
    assert records["energy-2"]["t"].tolist() == [0.0, 0.5, 1.0]


def test_callbacks_get_time_signal_and_flow() -> None:
    p = problem()
    calls: list[Any] = []
    nl.solve(p.flow, p.start, t=0.25, integrator=EULER, trackers=[nl.Callback(lambda *given: calls.append(given))])
    assert [c[0] for c in calls] == [0.0, 0.125, 0.25]
    assert np.array_equal(calls[0][1], p.start)
    assert all(c[2].affinity is p.flow.affinity for c in calls)
    assert [c[2].time for c in calls] == [0.0, 0.125, 0.25]


# --- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [(True, "asked by the callback"), (np.True_, "asked by the callback"), ("far enough", "far enough")],
    ids=["True", "numpy's True", "text"],
)
def test_callbacks_stop(answer: Any, message: str) -> None:
    p = problem()
    callback = nl.Callback(lambda t, u, flow: answer if t >= 0.5 else None)
    solution = nl.solve(p.flow, p.start, t_eval=[0.25, 1.0], integrator=EULER, trackers=[callback])
    assert (solution.status, solution.success, solution.message) == (nl.Status.STOPPED, True, message)
    assert solution.t.tolist() == [0.25, 0.5]
    assert len(solution.energy) == len(solution.u) == 2
    assert solution.stats["steps"] == 4


@pytest.mark.parametrize("answer", [None, False, np.False_, 0, "", []], ids=repr)
def test_callbacks_that_do_not_stop(answer: Any) -> None:
    p = problem()
    solution = nl.solve(p.flow, p.start, t=0.5, integrator=EULER, trackers=[nl.Callback(lambda *_: answer)])
    assert solution.status == nl.Status.FINISHED


def test_a_rule_that_holds_at_the_start_stops_there() -> None:
    p = problem()
    solution = nl.solve(p.flow, p.start, t=1.0, trackers=[nl.Callback(lambda *_: True)])
    assert (solution.status, solution.t.tolist(), solution.stats["steps"]) == (nl.Status.STOPPED, [0.0], 0)
    assert np.array_equal(solution.final, p.start)
    constant = nl.solve(p.flow, np.ones(24), t=1.0, integrator=EULER, trackers=[nl.SteadyState(atol=1e-14)])
    assert (constant.status, constant.t.tolist()) == (nl.Status.STOPPED, [0.0])


@pytest.mark.parametrize(("rtol", "atol"), [(1e-2, 0.0), (0.0, 1e-3), (1e-4, 1e-2)])
@pytest.mark.parametrize("metric", ["l2", "degree"])
def test_stationary_stops_at_the_first_step_that_is_slow_enough(metric: str, rtol: float, atol: float) -> None:
    p = problem(metric, 0.3)
    speeds: list[float] = []
    watch = nl.Callback(lambda t, u, flow: speeds.append(p.norm(p.fidelity * p.observed - p.matrix @ u)))
    rule = nl.SteadyState(rtol=rtol, atol=atol)
    solution = nl.solve(p.flow, p.start, t=1e3, integrator=EULER, trackers=[watch, rule])
    threshold = max(rtol * speeds[0], atol)
    assert solution.status == nl.Status.STOPPED
    assert re.fullmatch(r"steady state: rms of du/dt is \S+", solution.message)
    assert speeds[-1] <= threshold < speeds[-2]
    assert solution.records["steady_state"]["threshold"][0] == pytest.approx(threshold, rel=1e-12)


def test_what_is_slow_is_at_rest_in_short_runs_alone() -> None:
    """Two halves that see each other by 1e-12: 1e11 later they are no longer what they were."""
    k = np.kron(np.array([[1.0, 1e-12], [1e-12, 1.0]]), np.ones((4, 4)))
    flow = nl.GradientFlow(nl.J(nl.from_matrix(k, nl.Points(np.arange(8.0)))), "degree")
    rule, u = nl.SteadyState(), np.repeat([0.0, 1.0], 4)
    stopped = []
    for end in (1e3, 1e11):
        rule.start(flow, u, 0.0, end)
        stopped.append(rule.look(flow, u, 0.0) is not None)
    assert stopped == [True, False]


def test_nodes_of_a_small_measure_that_move_are_not_at_rest() -> None:
    """A node of the degree 1e-30 beside two parts that stand still: it comes to the one that it sees."""
    k = np.kron(np.eye(3), np.ones((2, 2)))[:5, :5]
    k[4, :] = k[:, 4] = [1e-30, 1e-30, 0.0, 0.0, 1e-30]
    flow = nl.GradientFlow(nl.J(nl.from_matrix(k, nl.Points(np.arange(5.0)))), "degree")
    rule = nl.SteadyState()
    for start, ends in ((0.0, False), (1.0, True)):
        u = np.array([1.0, 1.0, -1.0, -1.0, start])
        rule.start(flow, u, 0.0, 10.0)
        assert (rule.look(flow, u, 0.0) is not None) is ends


def test_discrepancy_stops_at_the_first_step_that_leaves_the_noise() -> None:
    p = problem("degree", channels=2)
    residuals: list[float] = []
    watch = nl.Callback(lambda t, u, flow: residuals.append(float(np.sqrt(np.mean((u - p.start) ** 2)))))
    rule = nl.DiscrepancyPrinciple(p.start, sigma=0.5, factor=0.8)
    solution = nl.solve(p.flow, p.start, t=1e3, integrator=EULER, trackers=[watch, rule])
    assert solution.status == nl.Status.STOPPED
    assert residuals[-2] < 0.4 <= residuals[-1]
    assert re.fullmatch(r"discrepancy: rms residual \S+ reached 0.8 sigma = 0.4", solution.message)


def test_rules_look_as_often_as_they_are_told() -> None:
    p = problem("degree")
    solution = nl.solve(p.flow, p.start, t=1e3, integrator=EULER, trackers=[nl.SteadyState(1e-2, every=16)])
    assert solution.stats["steps"] % 16 == 0
    assert solution.stats["analysis_applications"] >= 2 + solution.stats["steps"] // 16


# --- progress --------------------------------------------------------------------------------------------------------


def test_progress_goes_to_stderr_alone(capsys: pytest.CaptureFixture[str]) -> None:
    p = problem()
    nl.solve(p.flow, p.start, t=1.0, integrator=EULER, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "flow:" in err
    assert "t=0/1" in err
    nl.solve(p.flow, p.start, t=1.0, integrator=EULER)
    assert capsys.readouterr() == ("", "")


def test_progress_is_closed_when_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(t: float, u: Floats, flow: nl.GradientFlow) -> None:
        if t > 0.3:
            raise KeyboardInterrupt

    p = problem()
    solution = nl.solve(p.flow, p.start, t=1.0, integrator=EULER, trackers=[nl.Callback(interrupt)], progress=True)
    assert solution.status == nl.Status.INTERRUPTED
    assert capsys.readouterr().err.endswith("\r")  # the bar was wiped
    Progress().finish()  # one that never started has nothing to close


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nl.Energy(every=0), r"^every: got 0, expected an integer >= 1"),
        (lambda: nl.DistanceToConstant(every=2.5), r"^every: got 2.5, expected an integer >= 1"),
        (lambda: nl.Callback("print"), r"^function: got str, expected a callable of \(t, u, flow\)"),
        (lambda: nl.Callback(print, every=-1), r"^every: got -1, expected an integer >= 1"),
        (lambda: nl.Checkpoint("x", seconds=-1), r"^seconds: got -1, expected a finite real number >= 0"),
        (lambda: nl.Checkpoint("x", every=True), r"^every: got True, expected an integer >= 1"),
        (lambda: nl.SteadyState(-1e-3), r"^rtol: got -0.001, expected a finite real number >= 0"),
        (lambda: nl.SteadyState(atol=np.nan), r"^atol: got nan, expected a finite real number >= 0"),
        (lambda: nl.SteadyState(every="2"), r"^every: got '2', expected an integer >= 1"),
        (lambda: nl.DiscrepancyPrinciple(np.ones(3), -1), r"^sigma: got -1, expected a finite real number >= 0"),
        (lambda: nl.DiscrepancyPrinciple(np.ones(3), "1"), r"^sigma: got '1', expected"),
        (lambda: nl.DiscrepancyPrinciple(np.ones(3), 1, factor=np.inf), r"^factor: got inf, expected"),
        (lambda: nl.DiscrepancyPrinciple(np.ones(3), 1, every=0), r"^every: got 0, expected an integer >= 1"),
    ],
)
def test_bad_arguments(make: Callable[[], Tracker], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    "observed",
    [np.ones((24, 1)), np.ones(5), np.full(24, np.nan), "f", torch.ones(24, dtype=torch.float64)],
    ids=["broadcasts", "wrong length", "not finite", "text", "tensor"],
)
def test_discrepancy_checks_its_signal(observed: Any) -> None:
    p = problem()
    with pytest.raises(InputError, match=r"^observed: got .*expected"):
        nl.solve(p.flow, p.start, t=1.0, trackers=[nl.DiscrepancyPrinciple(observed, 0.1)])


@pytest.mark.parametrize("path", ["missing/checkpoint", 5], ids=["missing folder", "number"])
def test_a_checkpoint_that_cannot_be_written_is_found_out_before_the_integration(path: Any, tmp_path: Path) -> None:
    p = problem()
    target = tmp_path / path if isinstance(path, str) else path
    with pytest.raises((NlflowError, OSError), match=r"got .*expected"):
        nl.solve(p.flow, p.start, t=1.0, trackers=[nl.Checkpoint(target)])
    assert p.flow.applications == 0


def test_energy_is_refused_where_a_flow_has_none() -> None:
    """Whatever the reason: particles that propel themselves have no kernel that could be symmetric."""
    x = np.random.default_rng(0).standard_normal((6, 2))
    weights = nl.affinity(nl.Gaussian(1.0), nl.Grid(6))
    flows: list[tuple[Any, Floats]] = [
        (ParticleFlow(x, friction=-1.0, drag=1.0), np.ones((6, 4))),
        (AveragingFlow(x, nl.Gaussian(1.0)), x),
        (nl.SystemFlow(nl.J(weights), [[1.0, 0.5], [0.2, 1.0]]), x),
        (nl.GradientFlow(nl.J(weights), reaction=nl.Reaction(lambda u: -u, (-9, 9), bound=1.0)), x),
    ]
    for flow, start in flows:
        with pytest.raises(InputError, match=r"^trackers: Energy needs .*, which has none"):
            nl.solve(flow, start, t=1.0, trackers=[nl.Energy()])


def test_checkpoints_take_at_most_a_fiftieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: a step takes a second, writing takes three."""
    now, written = [0.0], []
    monkeypatch.setattr("nlflow.flows.trackers.time.monotonic", lambda: now[0])
    original = Checkpoints.save

    def save(self: Checkpoints, arrays: Any, meta: Any) -> None:
        original(self, arrays, meta)
        written.append(now[0])
        now[0] += 3.0

    monkeypatch.setattr(Checkpoints, "save", save)

    def tick(*_: Any) -> None:
        now[0] += 1.0

    p = problem()
    trackers = [nl.Callback(tick), nl.Checkpoint(tmp_path / "checkpoint", seconds=30)]
    nl.solve(p.flow, p.start, t=500.0, integrator=nl.SemiImplicit(1.0), trackers=trackers)
    assert written[0] == 30.0
    assert np.diff(written)[:-1].tolist() == [3 + 150] * (len(written) - 2)  # the last one is that of the end
    assert 3 * (len(written) - 1) <= 0.02 * now[0] + 3
