"""The time loop: output times, counts, statuses, interruption and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.backends.numba import loading
from nlflow.errors import InputError
from nlflow.flows import Lie
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import Integrator
from tests.problems import Floats, problem, random_chain, torch_on_one_thread, unchecked

INTEGRATORS = [nl.ExplicitEuler(0.25), nl.SemiImplicit(0.25), nl.RungeKutta(1e-9, 1e-12), nl.Exponential()]


def count_averages(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, during: Callable[[int], None] | None = None
) -> list[int]:
    """Have every average of the flow's affinity counted, whoever asks for it."""
    original, calls = flow.affinity._average, [0]

    def counted(u: Any) -> Any:
        calls[0] += 1
        if during is not None:
            during(calls[0])
        return original(u)

    monkeypatch.setattr(flow.affinity, "_average", counted)
    return calls


# --- output times ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("integrator", INTEGRATORS, ids=lambda i: type(i).__name__)
def test_snapshots_are_those_of_separate_runs(integrator: Integrator) -> None:
    p = problem("degree", 0.3, channels=2)
    solution = nl.solve(p.flow, p.start, t_eval=[0.0, 0.25, 1.0, 2.5], integrator=integrator)
    assert solution.t.tolist() == [0.0, 0.25, 1.0, 2.5]
    assert solution.u.shape == (4, 24, 2)
    assert np.array_equal(solution.u[0], p.start)
    assert np.array_equal(solution.final, solution.u[-1])
    tolerance = 1e-8 if isinstance(integrator, nl.RungeKutta) else 1e-11
    for t, u in zip(solution.t[1:], solution.u[1:], strict=True):
        alone = nl.solve(p.flow, p.start, t=t, integrator=integrator).final
        np.testing.assert_allclose(u, alone, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"t": 2.0}, [0.0, 2.0]),
        ({"t": 0.0}, [0.0]),
        ({"t": 0}, [0.0]),
        ({"t_eval": [0.5, 2.0]}, [0.5, 2.0]),
        ({"t_eval": (0, 1, 2)}, [0.0, 1.0, 2.0]),
        ({"t_eval": np.array([0.5, 1.0], dtype=np.float32), "t": 2.0}, [0.5, 1.0, 2.0]),
        ({"t_eval": [0.0]}, [0.0]),
        ({"t_eval": [0.5, 2.0], "t": 2.0}, [0.5, 2.0]),
    ],
)
@pytest.mark.parametrize("integrator", INTEGRATORS, ids=lambda i: type(i).__name__)
def test_output_times(times: dict[str, Any], expected: list[float], integrator: Integrator) -> None:
    p = problem()
    solution = nl.solve(p.flow, p.start, integrator=integrator, **times)
    assert solution.t.tolist() == expected
    assert (len(solution.u), len(solution.energy)) == (len(expected),) * 2
    assert (solution.status, solution.success) == (nl.Status.FINISHED, True)
    assert solution.message == f"reached t={expected[-1]:g}"


def test_times_too_close_for_the_step_are_met_one_by_one() -> None:
    p = problem()
    t_eval = np.cumsum(np.full(40, 0.01))
    for integrator in INTEGRATORS:
        assert nl.solve(p.flow, p.start, t_eval=t_eval, integrator=integrator).t.tolist() == t_eval.tolist()


def test_starts_at_the_observed_signal() -> None:
    p = problem("degree", 0.3)
    assert np.array_equal(nl.solve(p.flow, t_eval=[0.0, 1.0]).u[0], p.observed)
    assert np.array_equal(nl.solve(p.flow, p.start.tolist(), t=1.0).u[0], p.start)


def test_the_start_is_not_written_to() -> None:
    p = problem("l2", 0.3)
    before = p.start.copy()
    for integrator in INTEGRATORS:
        solution = nl.solve(p.flow, p.start, t=1.0, integrator=integrator, trackers=[nl.Energy()])
        assert np.array_equal(p.start, before)
        assert np.array_equal(solution.u[0], before)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: problem().flow, "Exponential"),
        (lambda: problem("l2", 0.3).flow, "Exponential"),
        (lambda: nl.AttentionFlow(nl.from_matrix(random_chain(24), problem().flow.affinity.domain)), "RungeKutta"),
        (lambda: nl.GradientFlow(problem().flow.functional, evolving=True), "RungeKutta"),
    ],
    ids=["frozen J", "frozen E", "not symmetric", "evolving"],
)
def test_default_integrator(make: Callable[[], Flow], expected: str) -> None:
    start = np.random.default_rng(0).standard_normal((24, 2))
    assert nl.solve(make(), start[:, 0], t=0.5).stats["integrator"].startswith(expected)


@pytest.mark.parametrize("metric", ["l2", "degree"])
@pytest.mark.parametrize("fidelity", [None, 0.4])
def test_energies_are_those_of_the_functional(fidelity: float | None, metric: str) -> None:
    p = problem(metric, fidelity, channels=2)
    solution = nl.solve(p.flow, p.start, t_eval=[0.0, 0.5, 3.0])
    assert solution.energy.tolist() == [p.flow.functional.value(u) for u in solution.u]
    assert np.all(np.diff(solution.energy) < 0)
    without = nl.solve(p.flow, p.start, t_eval=[0.0, 0.5, 3.0], energies=False)
    assert np.isnan(without.energy).all()
    assert np.array_equal(without.u, solution.u)


# --- statistics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("integrator", "expected"),
    [(nl.ExplicitEuler(0.25), 12), (nl.SemiImplicit(0.5), 6), (nl.NeutrenoStep(), 3), (nl.AttentionStep(), 3)],
    ids=lambda value: type(value).__name__,
)
def test_applications_of_steps(integrator: Integrator, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("degree", None if isinstance(integrator, nl.AttentionStep) else 0.3, channels=3)
    calls = count_averages(p.flow, monkeypatch)
    stats = nl.solve(p.flow, p.start, t=3, integrator=integrator, energies=False).stats
    assert (stats["applications"], stats["steps"], stats["rejected"]) == (expected, expected, 0)
    assert stats["analysis_applications"] == 0
    assert calls == [expected]
    # A second integration of the same flow counts from zero.
    assert nl.solve(p.flow, p.start, t=3, integrator=integrator).stats["applications"] == expected


@pytest.mark.parametrize("integrator", INTEGRATORS, ids=lambda i: type(i).__name__)
def test_every_average_is_counted_once(integrator: Integrator, monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("degree", 0.3)
    plain = nl.solve(p.flow, p.start, t_eval=[0.5, 2.0], integrator=integrator, energies=False).stats["applications"]
    calls = count_averages(p.flow, monkeypatch)
    trackers = [nl.Energy(), nl.SteadyState(0.0), nl.DistanceToConstant()]
    stats = nl.solve(p.flow, p.start, t_eval=[0.5, 2.0], integrator=integrator, trackers=trackers).stats
    assert stats["applications"] == plain
    # Energies at two output times; energy and speed at the start and after each step; the speed to compare with.
    assert stats["analysis_applications"] == 2 + 2 * (stats["steps"] + 1) + 1
    assert calls == [stats["applications"] + stats["analysis_applications"]]


def test_what_the_statistics_say() -> None:
    p = problem("degree", 0.3)
    stats = nl.solve(p.flow, p.start, t=1.0).stats
    assert stats["integrator"] == "Exponential()"
    assert (stats["method"], stats["reason"]) == ("dense", "no more than 2048 nodes, all pairs")
    assert stats["error_estimate"] == 0
    assert 0 < stats["error_bound"] < 1e-12
    assert "error_bound" not in nl.solve(p.flow, p.start, t=1.0, integrator=nl.RungeKutta()).stats


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"energies": False}, {}, {"trackers": [nl.SteadyState(0.0)]}],
    ids=["in a step", "in an energy", "in a tracker"],
)
def test_compile_and_solve_time_are_apart(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem()

    def compile_at_first(call: int) -> None:
        if call == 1:
            time.sleep(0.3)
            loading.seconds += 0.3

    monkeypatch.setattr(loading, "seconds", 5.0)  # what was compiled before does not count
    count_averages(p.flow, monkeypatch, compile_at_first)
    start = time.perf_counter()
    stats = nl.solve(p.flow, p.start, t=1.0, **options).stats
    wall = time.perf_counter() - start
    assert stats["compile_seconds"] == pytest.approx(0.3, abs=1e-9)
    assert 0 <= stats["solve_seconds"] <= wall - 0.3
    assert 0 <= stats["tracker_seconds"] <= wall - 0.3


def test_tracker_time_is_apart() -> None:
    p = problem()
    slow = nl.Callback(lambda t, u, flow: time.sleep(0.05))
    stats = nl.solve(p.flow, p.start, t=1.0, trackers=[slow], energies=False).stats
    assert stats["tracker_seconds"] >= 0.1
    assert 0 <= stats["solve_seconds"] < stats["tracker_seconds"]


def test_provenance_is_plain_text() -> None:
    p = problem("l2", 0.5)
    provenance = nl.solve(p.flow, t=1.0).provenance
    assert json.loads(json.dumps(provenance)) == provenance
    assert set(provenance["versions"]) >= {"python", "numpy", "scipy", "numba", "nlflow"}
    assert provenance["flow"] == repr(p.flow)
    assert provenance["integrator"] == "Exponential()"


def test_solutions_are_frozen_and_say_what_happened() -> None:
    p = problem()
    solution = nl.solve(p.flow, p.start, t=1.0)
    with pytest.raises(AttributeError):
        solution.success = False  # type: ignore[misc]
    assert re.fullmatch(r"<Solution finished at t=1 after 1 steps, energy \S+: reached t=1>", repr(solution))


# --- statuses --------------------------------------------------------------------------------------------------------


def test_diverging_flows_end_with_the_last_finite_signal() -> None:
    p = problem()
    seen: dict[float, Floats] = {}
    watch = nl.Callback(lambda t, u, flow: seen.update({t: u}) or None)
    with np.errstate(all="ignore"):
        solution = nl.solve(
            p.flow, p.start, t=1e7, integrator=unchecked(nl.ExplicitEuler(1e3)), trackers=[watch], energies=False
        )
    assert (solution.status, solution.success) == (nl.Status.DIVERGED, False)
    assert re.search(r"overflowed at t=.*: the step is unstable.*use a smaller dt, RungeKutta", solution.message)
    assert np.isfinite(solution.final).all()
    assert solution.t[-1] == max(seen)
    assert np.array_equal(solution.final, seen[solution.t[-1]])


def test_a_callback_interrupts() -> None:
    p = problem("degree", 0.3)
    seen: dict[float, Floats] = {}

    def interrupt(t: float, u: Floats, flow: Flow) -> None:
        seen[t] = u
        if t >= 1.0:
            raise KeyboardInterrupt

    solution = nl.solve(
        p.flow, p.start, t_eval=[0.0, 0.5, 2.0], integrator=nl.ExplicitEuler(0.25), trackers=[nl.Callback(interrupt)]
    )
    assert (solution.status, solution.success) == (nl.Status.INTERRUPTED, False)
    assert solution.message == "interrupted at t=1; what was reached is returned"
    assert solution.t.tolist() == [0.0, 0.5, 1.0]
    for t, u in zip(solution.t, solution.u, strict=True):
        assert np.array_equal(u, seen[t])
    assert solution.energy.tolist() == [p.flow.functional.value(u) for u in solution.u]


SCRIPT = """
import signal, sys, time
import nlflow as nl
from tests.problems import problem

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it

def watch(t, u, flow):
    if t == 0.5:
        print("ready", flush=True)
    time.sleep(0.02)

p = problem("degree", 0.3)
solution = nl.solve(
    p.flow, p.start, t=100.0, integrator=nl.ExplicitEuler(0.25),
    trackers=[nl.Callback(watch), nl.Checkpoint(sys.argv[1])],
)
print(solution.status.value, solution.t[-1], flush=True)
solution.save(sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGINT can be sent to a process on POSIX only")
def test_ctrl_c_returns_what_there_is_and_can_be_resumed(tmp_path: Path) -> None:
    checkpoint, result = tmp_path / "checkpoint", tmp_path / "result"
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(checkpoint), str(result)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert out.startswith("interrupted ")
    reached = nl.Solution.load(result)
    assert reached.status == nl.Status.INTERRUPTED
    assert 0.5 <= reached.t[-1] < 100.0
    p = problem("degree", 0.3)
    whole = nl.solve(p.flow, p.start, t=100.0, integrator=nl.ExplicitEuler(0.25))
    resumed = nl.solve(p.flow, p.start, t=100.0, integrator=nl.ExplicitEuler(0.25), resume=checkpoint)
    assert np.array_equal(resumed.u, whole.u)
    alone = nl.solve(p.flow, p.start, t=reached.t[-1], integrator=nl.ExplicitEuler(0.25))
    assert np.array_equal(reached.final, alone.final)


# --- what is refused -------------------------------------------------------------------------------------------------

J_FLOW, E_FLOW = problem().flow, problem("degree", 0.3).flow
GRID_FLOW = nl.GradientFlow(nl.E(nl.affinity(nl.Gaussian(width=1.0), nl.Grid(24)), np.zeros(24), 0.3), "degree")
U = np.linspace(0.0, 1.0, 24)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((J_FLOW.functional, U), {"t": 1}, r"^flow: got J, expected a flow, such as a GradientFlow"),
        ((J_FLOW,), {"t": 1}, r"^start: needed, since the flow has no observed signal"),
        ((J_FLOW, U[:5]), {"t": 1}, r"^start: got shape \(5,\), expected \(24,\) or \(24, 'D'\)"),
        ((J_FLOW, np.ones((24, 2, 2))), {"t": 1}, r"^start: got shape \(24, 2, 2\), expected"),
        ((E_FLOW, np.ones((24, 2))), {"t": 1}, r"^start: got shape \(24, 2\), expected \(24,\), that of the observed"),
        (
            (J_FLOW, U * np.nan),
            {"t": 1},
            r"^start: got 24 NaN or infinite value\(s\) \(the first at index .*\), expected finite ones",
        ),
        ((J_FLOW, U.astype("f4")), {"t": 1}, r"^start: got dtype float32, expected float64"),
        ((GRID_FLOW, U.astype("f4")), {"t": 1}, r"^start: got .*float32, expected .*float64"),
        ((J_FLOW, U * 1j), {"t": 1}, r"^start: got complex values \(complex128\), expected real ones"),
        ((J_FLOW, ["a"] * 24), {"t": 1}, r"^start: got dtype <U1, expected a real numeric array"),
        ((J_FLOW, U), {}, r"^t: give an end time t, output times t_eval, or both"),
        ((J_FLOW, U), {"t": -1}, r"^t: got -1, expected a finite real number >= 0"),
        ((J_FLOW, U), {"t": np.inf}, r"^t: got inf, expected"),
        ((J_FLOW, U), {"t": "1"}, r"^t: got '1', expected"),
        ((J_FLOW, U), {"t": [1.0, 2.0]}, r"^t: got \[1.0, 2.0\], expected"),
        ((J_FLOW, U), {"t_eval": [1.0, 0.5]}, r"^t_eval: got \[1.0, 0.5\], expected increasing times >= 0"),
        ((J_FLOW, U), {"t_eval": [1.0, 1.0]}, r"^t_eval: got \[1.0, 1.0\], expected increasing times >= 0"),
        ((J_FLOW, U), {"t_eval": [-1.0, 1.0]}, r"^t_eval: got \[-1.0, 1.0\], expected increasing times >= 0"),
        ((J_FLOW, U), {"t_eval": [0.0, np.nan]}, r"^t_eval: got 1 NaN"),
        ((J_FLOW, U), {"t_eval": []}, r"^t_eval: got an empty array"),
        ((J_FLOW, U), {"t_eval": 3.0}, r"^t_eval: got 0 dimension\(s\) \(shape \(\)\), expected 1"),
        ((J_FLOW, U), {"t": 1, "t_eval": [0.5, 2.0]}, r"^t_eval: got 2 after the end time t=1"),
        ((J_FLOW, U), {"t": 1, "integrator": nl.RungeKutta}, r"^integrator: got .*expected an instance such as Run"),
        ((J_FLOW, U), {"t": 1, "integrator": "euler"}, r"^integrator: got str, expected an instance such as"),
        (
            (J_FLOW, U),
            {"t": 1.5, "integrator": nl.AttentionStep()},
            r"^t_eval: AttentionStep takes steps of leng.*got",
        ),
        ((J_FLOW, U), {"t": 1, "integrator": nl.SemiImplicit(1e-308)}, r"^dt: got 1e-308, expected at least 2.22e-16"),
        ((J_FLOW, U), {"t": 2.0**63, "integrator": nl.SemiImplicit(0.5)}, r"^dt: got 0.5, expected at least 2.05e\+03"),
        ((J_FLOW, U), {"t": 1, "trackers": [print]}, r"^trackers: got .*expected Tracker instances such as Energy"),
        ((J_FLOW, U), {"t": 1, "trackers": [nl.Energy]}, r"^trackers: got .*expected Tracker instances such as Energy"),
        ((J_FLOW, U), {"t": 1, "trackers": nl.Energy()}, r"^trackers: got Energy, expected"),
        ((J_FLOW, U), {"t": 1, "trackers": None}, r"^trackers: got None\w*, expected"),
        ((J_FLOW, U), {"t": 1, "energies": "no"}, r"^energies: got 'no', expected True or False"),
        ((J_FLOW, U), {"t": 1, "dense": U}, r"^dense: got .*, expected True or False"),
    ],
)
def test_bad_arguments(arguments: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        nl.solve(*arguments, **options)


@pytest.mark.parametrize("flow", [J_FLOW, nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(width=1.0), nl.Grid(24))))])
def test_tensors_are_refused_where_arrays_are_needed(flow: Flow) -> None:
    torch = torch_on_one_thread()
    with pytest.raises(InputError, match=r"^start: got .*expected"):
        nl.solve(flow, torch.ones(24, dtype=torch.float64), t=1.0)


@pytest.mark.parametrize("kind", [Lie, nl.IMEX, nl.ETD2RK, nl.ConvexSplitting])
def test_steps_whose_rounding_moves_a_conserved_mean_keep_it_or_are_told(kind: Any) -> None:
    """At a = 0 a step adds h times what rounding leaves of the mean of du/dt."""
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(width=2.0), nl.Grid(40, boundary="periodic"))))
    start = np.sin(np.arange(40.0))
    for dt in (1e6, 1e18, 1e290):
        found = nl.solve(flow, start, t=dt, integrator=kind(dt))
        assert found.success == (dt < 1e290)
        assert found.success or "though the flow conserves it" in found.message
        assert not found.success or np.abs(found.final - start.mean()).max() < 1e-5
    exact = nl.solve(flow, start, t=1e290).final
    np.testing.assert_allclose(exact, start.mean(), atol=1e-14)


class Straying(nl.ETD2RK):
    def step(self, flow: Any, u: Any, dt: float) -> Any:
        return super().step(flow, u, dt) + 1.0


def test_a_step_of_ones_own_that_moves_a_conserved_mean_is_told() -> None:
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(width=2.0), nl.Grid(40, boundary="periodic"))))
    found = nl.solve(flow, np.sin(np.arange(40.0)), t=1e18, integrator=Straying(1e18))
    assert not found.success
    assert "the mean moved by 1 up to" in found.message
