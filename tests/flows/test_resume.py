"""Checkpoints: resumed runs have the bits of whole ones, wherever they were cut, and only of the same problem."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.errors import FileFormatError, NlflowWarning
from nlflow.flows import loop
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import Integrator
from nlflow.flows.trackers import Tracker
from nlflow.store.storage import load_archive
from tests.covering import pairs
from tests.problems import Floats, problem, stop_after, torch_on_one_thread, unchecked

U = np.random.default_rng(8).standard_normal((20, 2))
EPS = float(np.finfo(float).eps)
T_EVAL = [0.0, 0.7, 1.5, 2.0]


def evolving(every: int = 3, width: float = 0.8) -> Flow:
    affinity = nl.affinity(nl.Gaussian(width=width), nl.Points(np.arange(20.0)), U)
    return nl.GradientFlow(nl.E(affinity, U, 0.3, measure="degree"), "degree", evolving=True, every=every)


def frozen(fidelity: float = 0.3, observed: Floats = U, metric: str = "degree") -> Flow:
    affinity = nl.affinity(nl.Gaussian(width=0.8), nl.Points(np.arange(20.0)), U)
    return nl.GradientFlow(nl.E(affinity, observed, fidelity, measure="degree"), metric)


# The first step of the adaptive runs is too long, so that some are rejected.
RUNS: dict[str, tuple[Callable[[], Flow], Callable[[], Integrator]]] = {
    "fixed step": (frozen, lambda: nl.SemiImplicit(0.13)),
    "Runge-Kutta": (frozen, lambda: nl.RungeKutta(1e-6, 1e-9, dt=2.0)),
    "exponential": (frozen, nl.Exponential),
    "evolving, fixed step": (evolving, lambda: nl.ExplicitEuler(0.1)),
    "evolving, Runge-Kutta": (evolving, lambda: nl.RungeKutta(1e-6, 1e-9, dt=2.0)),
    "evolving at every step": (lambda: evolving(1), lambda: nl.SemiImplicit(0.25)),
}


def same_solution(one: nl.Solution, two: nl.Solution) -> None:
    assert one.t.tolist() == two.t.tolist()
    assert np.array_equal(one.u, two.u)
    assert np.array_equal(one.energy, two.energy)
    assert (one.status, one.success, one.message) == (two.status, two.success, two.message)
    for name in ("steps", "rejected", "error_bound"):
        assert one.stats.get(name) == two.stats.get(name)


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "steps", "how"), pairs(list(RUNS), [0, 1, 2, 3, 4, 7], ["stop", "Ctrl-C"]))
@pytest.mark.sampled(8)
def test_resumed_runs_have_the_bits_of_whole_ones(run: str, steps: int, how: str, tmp_path: Path) -> None:
    make, integrator = RUNS[run]
    path = tmp_path / "checkpoint"
    start = 1.5 * U
    whole = nl.solve(make(), start, t_eval=T_EVAL, integrator=integrator(), trackers=[nl.Energy(2)])
    part = nl.solve(
        make(), start, t_eval=T_EVAL, integrator=integrator(),
        trackers=[nl.Energy(2), stop_after(steps, how), nl.Checkpoint(path)],
    )  # fmt: skip
    assert part.status in (nl.Status.STOPPED, nl.Status.INTERRUPTED, nl.Status.FINISHED)
    resumed = nl.solve(
        make(), start, t_eval=T_EVAL, integrator=integrator(), resume=path,
        trackers=[nl.Energy(2), nl.Callback(lambda *_: None), nl.Checkpoint(path)],
    )  # fmt: skip
    same_solution(resumed, whole)
    # Where a rule stopped the run everybody looked, as at any end.
    regular = [k for k, t in enumerate(resumed.records["energy"]["t"]) if t in whole.records["energy"]["t"]]
    assert set(resumed.records["energy"]["t"]) <= {
        *whole.records["energy"]["t"],
        *(part.t[-1:] if how == "stop" else ()),
    }
    for column in ("t", "value"):
        assert np.array_equal(resumed.records["energy"][column][regular], whole.records["energy"][column])
    # Once more from its end: nothing is left to do.
    again = nl.solve(make(), start, t_eval=T_EVAL, integrator=integrator(), resume=path)
    same_solution(again, whole)
    assert again.stats["applications"] == 0


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.sampled(4)
def test_runs_that_are_cut_again_and_again(run: str, steps: int, tmp_path: Path) -> None:
    make, integrator = RUNS[run]
    path = tmp_path / "checkpoint"

    def solve(**options: Any) -> nl.Solution:
        return nl.solve(make(), 1.5 * U, t_eval=T_EVAL, integrator=integrator(), **options)

    resume = None
    for _ in range(40):
        part = solve(trackers=[stop_after(steps, "Ctrl-C"), nl.Checkpoint(path)], resume=resume)
        resume = path
        if part.status == nl.Status.FINISHED:
            break
    same_solution(part, solve())


def test_resumed_torch_runs(tmp_path: Path) -> None:
    torch = torch_on_one_thread()
    x = torch.as_tensor(U)
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(width=0.8), nl.Points(np.arange(20.0)), x)), "degree")
    path = tmp_path / "checkpoint"
    whole = nl.solve(flow, x, t_eval=T_EVAL, integrator=nl.RungeKutta())
    nl.solve(flow, x, t_eval=T_EVAL, integrator=nl.RungeKutta(), trackers=[stop_after(4, "stop"), nl.Checkpoint(path)])
    resumed = nl.solve(flow, x, t_eval=T_EVAL, integrator=nl.RungeKutta(), resume=path)
    assert isinstance(resumed.u, torch.Tensor)
    assert torch.equal(resumed.u, whole.u)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_records_are_whole_wherever_the_trackers_stand(order: int, tmp_path: Path) -> None:
    """As after a power cut: the file that was written in the middle of step 3 is all there is."""
    path, kept = tmp_path / "checkpoint", tmp_path / "kept"

    def keep(t: float, u: Floats, flow: Flow) -> None:
        if 0.7 < t < 0.8 and path.exists():
            shutil.copy(path, kept)

    def trackers(watch: Callable[..., None]) -> list[Tracker]:
        result: list[Tracker] = [nl.Energy(), nl.Checkpoint(path, seconds=0), nl.Callback(watch)]
        return result[order:] + result[:order]

    def solve(watch: Callable[..., None], **options: Any) -> nl.Solution:
        return nl.solve(frozen(), t=2.0, integrator=nl.SemiImplicit(0.25), trackers=trackers(watch), **options)

    whole = solve(keep)
    resumed = solve(lambda *_: None, resume=kept)
    same_solution(resumed, whole)
    assert resumed.records["energy"]["t"].tolist() == whole.records["energy"]["t"].tolist()


def test_stopping_rules_stop_where_they_would_have(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def solve(callback: nl.Callback, **options: Any) -> nl.Solution:
        trackers = [nl.SteadyState(1e-2), callback, nl.Checkpoint(path)]
        return nl.solve(frozen(), 3 * U, t=500.0, integrator=nl.SemiImplicit(0.25), trackers=trackers, **options)

    whole = solve(stop_after(10**6, "stop"))
    assert whole.status == nl.Status.STOPPED
    solve(stop_after(3, "Ctrl-C"))
    resumed = solve(stop_after(10**6, "stop"), resume=path)
    same_solution(resumed, whole)
    same_solution(solve(stop_after(10**6, "stop"), resume=path), whole)  # a run that had stopped stays stopped


def test_trackers_that_the_checkpoint_does_not_know_begin_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    nl.solve(frozen(), t=2.0, integrator=nl.SemiImplicit(0.25), trackers=[stop_after(3, "stop"), nl.Checkpoint(path)])
    with pytest.warns(NlflowWarning, match=r"holds no records of the tracker 'energy', which begins at t=0.75"):
        resumed = nl.solve(frozen(), t=2.0, integrator=nl.SemiImplicit(0.25), trackers=[nl.Energy()], resume=path)
    assert resumed.records["energy"]["t"].tolist() == [0.75, 1.0, 1.25, 1.5, 1.75, 2.0]


def test_a_full_disk_costs_the_checkpoint_but_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    def fill(t: float, u: Floats, flow: Flow) -> None:
        if t == 1.0:
            monkeypatch.setattr(os, "fsync", full)

    with pytest.warns(NlflowWarning, match=r"checkpoint not written: .*No space left on device"):
        solution = nl.solve(
            frozen(), t=2.0, integrator=nl.SemiImplicit(0.25),
            trackers=[nl.Checkpoint(path, seconds=0), nl.Callback(fill)],
        )  # fmt: skip
    assert solution.status == nl.Status.FINISHED
    monkeypatch.undo()
    same_solution(nl.solve(frozen(), t=2.0, integrator=nl.SemiImplicit(0.25), resume=path), solution)


# --- interruption at any moment --------------------------------------------------------------------------------------


@contextmanager
def ctrl_c_at_line(number: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at the n-th line that the time loop runs, as a signal may at any."""
    lines, before = [0], sys.gettrace()

    def inside(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "_integrate":
                return True
            frame = frame.f_back
        return False

    def local(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            lines[0] += 1
            if lines[0] == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return local

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        return local if frame.f_code.co_filename == loop.__file__ and inside(frame) else None

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


@pytest.mark.slow
def test_ctrl_c_at_any_line_leaves_a_state_that_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"

    def solve(**options: Any) -> nl.Solution:
        return nl.solve(evolving(2), 2 * U, t_eval=[0.0, 0.5, 1.0], integrator=nl.SemiImplicit(0.25), **options)

    states: dict[float, Floats] = {}
    whole = solve(trackers=[nl.Callback(lambda t, u, flow: states.update({t: u}) or None)])
    with ctrl_c_at_line(0) as lines:
        solve(trackers=[nl.Checkpoint(path)])
    wrong: list[str] = []
    assert lines[0] > 80
    for number in range(1, lines[0] + 1):
        with ctrl_c_at_line(number):
            part = solve(trackers=[nl.Checkpoint(path)])
        assert part.status == nl.Status.INTERRUPTED
        if not len(part.t) == len(part.u) == len(part.energy):
            wrong.append(f"line event {number}: {len(part.t)} times, {len(part.energy)} energies")
        elif not all(np.array_equal(u, states[t]) for t, u in zip(part.t, part.u, strict=True)):
            wrong.append(f"line event {number}: a signal is returned with the time of another")
        resumed = solve(resume=path)
        if not (resumed.t.tolist() == whole.t.tolist() and np.array_equal(resumed.u, whole.u)):
            wrong.append(f"line event {number}: the resumed run differs")
        elif not np.array_equal(resumed.energy, whole.energy):
            wrong.append(f"line event {number}: the energies of the resumed run differ")
    assert not wrong, f"{len(wrong)} of {lines[0]}: {wrong[:8]}"


@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=pytest.mark.slow if run == "evolving, Runge-Kutta" else []) for run in RUNS]
)
@pytest.mark.sampled(2)
def test_ctrl_c_in_any_average_leaves_a_state_that_can_be_resumed(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, integrator = RUNS[run]
    path = tmp_path / "checkpoint"
    original = nl.affinities.DenseAffinity._average
    calls, at = [0], [-1]

    def average(self: nl.Affinity, u: Any) -> Any:
        calls[0] += 1
        if calls[0] == at[0]:
            raise KeyboardInterrupt
        return original(self, u)

    monkeypatch.setattr(nl.affinities.DenseAffinity, "_average", average)

    def solve(**options: Any) -> nl.Solution:
        calls[0] = 0
        return nl.solve(make(), 2 * U, t_eval=[0.0, 0.6, 1.2], integrator=integrator(), **options)

    whole = solve()
    total = calls[0]
    wrong = []
    for number in range(1, total, max(1, total // 40)):
        at[0] = number
        part = solve(trackers=[nl.Checkpoint(path)])
        at[0] = -1
        assert part.status == nl.Status.INTERRUPTED
        resumed = solve(resume=path)
        try:
            assert len(part.t) == len(part.u) == len(part.energy)
            same_solution(resumed, whole)
        except AssertionError:
            wrong.append(number)
    assert not wrong, f"interrupted in average {wrong} of {total}: not what an uninterrupted run gives"


def test_checkpoints_of_diverged_runs_hold_a_state_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    states: dict[float, Floats] = {}
    p = problem()
    watch = nl.Callback(lambda t, u, flow: states.update({t: u}) or None)
    with np.errstate(all="ignore"):
        nl.solve(p.flow, p.start, t=1e7, integrator=unchecked(nl.ExplicitEuler(1e3)), energies=False,
                 trackers=[watch, nl.Checkpoint(path)])  # fmt: skip
    arrays, meta = load_archive(path, "checkpoint")
    assert meta["t"] == max(states)
    assert np.array_equal(arrays["u"], states[meta["t"]])
    assert meta["steps"] == len(states) - 1


# --- whose checkpoint ------------------------------------------------------------------------------------------------


def grid_flow(boundary: Any = "periodic", spacing: float = 1.0, method: str = "auto") -> Flow:
    affinity = nl.affinity(
        nl.Gaussian(width=1.0 * spacing), nl.Grid(20, spacing=spacing, boundary=boundary), method=method
    )
    return nl.GradientFlow(nl.J(affinity), "degree")


def ring(shift: int) -> Flow:
    k = np.eye(20) + np.roll(np.eye(20), shift, axis=0) + np.roll(np.eye(20), -shift, axis=0)
    return nl.GradientFlow(nl.J(nl.from_matrix(k, nl.Points(np.arange(20.0)))), "degree")


BASE = {"flow": frozen(), "start": U, "t_eval": T_EVAL, "integrator": nl.SemiImplicit(0.25)}


def test_a_problem_is_recognized_when_sums_round_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do with another number of threads, or on another processor."""
    path = tmp_path / "checkpoint"
    nl.solve(**BASE, trackers=[stop_after(3, "stop"), nl.Checkpoint(path)])
    whole = nl.solve(**BASE)
    original = nl.affinities.DenseAffinity._average
    monkeypatch.setattr(nl.affinities.DenseAffinity, "_average", lambda self, u: original(self, u) * (1 + EPS))
    resumed = nl.solve(**BASE, resume=path)
    np.testing.assert_allclose(resumed.final, whole.final, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({}, {"start": U + 1e-15}),
        ({}, {"t_eval": [0.0, 0.7, 1.5, 2.5]}),
        ({}, {"t_eval": [2.0]}),
        ({}, {"integrator": nl.SemiImplicit(0.2)}),
        ({}, {"integrator": nl.ExplicitEuler(0.25)}),
        ({}, {"flow": frozen(0.2)}),
        ({}, {"flow": frozen(observed=U + 1)}),
        ({}, {"flow": frozen(metric="l2")}),
        ({"flow": evolving(2)}, {"flow": evolving(3)}),
        ({"flow": evolving(2)}, {"flow": evolving(2, width=0.9)}),
        ({"flow": evolving(2)}, {"flow": frozen()}),
        ({"flow": grid_flow()}, {"flow": grid_flow("reflect")}),
        ({"flow": grid_flow()}, {"flow": grid_flow(spacing=0.5)}),
        ({"flow": grid_flow(spacing=1.0)}, {"flow": grid_flow(spacing=1 + 1e-12)}),
        ({"flow": grid_flow()}, {"flow": grid_flow(method="dense")}),
        ({"flow": ring(1)}, {"flow": ring(2)}),
        ({"integrator": nl.RungeKutta()}, {"integrator": nl.RungeKutta(rtol=1e-5)}),
    ],
    ids=[
        "start", "end", "output times", "step", "method", "fidelity", "observed", "metric", "every", "kernel", "frozen",
        "boundary", "spacing", "last digits", "sums", "matrix", "tolerance",
    ],
)  # fmt: skip
def test_checkpoints_of_another_problem_are_refused(
    written: dict[str, Any], read: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint"

    def run(options: dict[str, Any], **more: Any) -> nl.Solution:
        given = {**BASE, **options}
        return nl.solve(given["flow"], given["start"], t_eval=given["t_eval"], integrator=given["integrator"], **more)

    run(written, trackers=[nl.Checkpoint(path)])
    run(written, resume=path)
    with pytest.raises(FileFormatError, match=r"belongs to another problem.*resume with the arguments that it was"):
        run({**written, **read}, resume=path)


# --- which checkpoint, and what may be replaced ----------------------------------------------------------------------


def run(path: Path, *more: Tracker, **options: Any) -> nl.Solution:
    trackers = [*more, nl.Checkpoint(path, seconds=0)]
    return nl.solve(frozen(), t=2.0, integrator=nl.SemiImplicit(0.25), trackers=trackers, **options)


def test_resume_true_takes_the_checkpoint_of_the_tracker_if_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    whole = run(tmp_path / "other")
    first = run(path, stop_after(3, "Ctrl-C"), resume=True)
    assert first.status == nl.Status.INTERRUPTED
    resumed = run(path, resume=True)
    same_solution(resumed, whole)
    assert run(path, resume=True).stats["applications"] == 0
    with pytest.raises(nl.InputError, match="resume: got True without a Checkpoint among the trackers"):
        nl.solve(frozen(), t=2.0, resume=True)
    with pytest.raises(nl.InputError, match="resume: got 5, expected the path of a checkpoint, or True"):
        nl.solve(frozen(), t=2.0, resume=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["cut", "emptied", "gone"])
def test_the_checkpoint_before_is_used_where_the_newest_is_damaged(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    whole = run(tmp_path / "other")
    run(path, stop_after(5, "Ctrl-C"))
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:200] if damage == "cut" else b"")
    with pytest.warns(NlflowWarning, match="the one before, is used"):
        resumed = run(path, resume=True)
    same_solution(resumed, whole)


def test_nothing_but_a_checkpoint_of_the_problem_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "holiday.jpg"
    path.write_bytes(b"a picture")
    with pytest.raises(nl.InputError, match=r"path: got .*holiday.jpg, which would be lost"):
        run(path)
    assert path.read_bytes() == b"a picture"
    checkpoint = tmp_path / "checkpoint"
    nl.solve(frozen(0.2), t=2.0, integrator=nl.SemiImplicit(0.25), trackers=[nl.Checkpoint(checkpoint)])
    before = checkpoint.read_bytes()
    with pytest.raises(nl.InputError, match=r"which would be lost .*belongs to another problem"):
        run(checkpoint)
    assert checkpoint.read_bytes() == before
    run(tmp_path / "own")
    run(tmp_path / "own")  # of this problem: begun afresh


def test_two_integrations_do_not_write_to_one_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    refused: list[str] = []

    def second(t: float, u: Floats, flow: Flow) -> None:
        if t == 1.0:
            with pytest.raises(nl.InputError) as error:
                run(path)
            refused.append(str(error.value))

    run(path, nl.Callback(second))
    assert "in which another process is writing" in refused[0]
    run(path)  # the lock is gone with the first
