"""The only time loop."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow import _numba
from nlflow._array import Array, constant_like, is_numpy, namespace
from nlflow._machine import environment
from nlflow.errors import FileFormatError, InputError, check_array, check_number
from nlflow.events import Checkpoint, Progress, Tracker
from nlflow.flow import Flow
from nlflow.integrators import Exponential, Integrator, RungeKutta, StepFailureError
from nlflow.result import Solution, Status
from nlflow.storage import load_archive, save_archive

__all__ = ["solve"]


def solve(
    flow: Flow,
    start: Any = None,
    *,
    t: float | None = None,
    t_eval: Any = None,
    integrator: Integrator | None = None,
    trackers: Sequence[Tracker] = (),
    progress: bool = False,
    energies: bool = True,
    resume: str | os.PathLike[str] | None = None,
) -> Solution:
    """Integrate a flow.

    Parameters
    ----------
    flow : GradientFlow or AttentionFlow
    start : array of shape ``domain.shape`` or ``domain.shape + (D,)``, optional
        u(0); the observed signal f by default where there is one.
    t : float, optional
        End time (number of layers for `AttentionStep` and `NeutrenoStep`); the last of `t_eval` by default.
    t_eval : array_like, optional
        Increasing output times; 0 and `t` by default.
    integrator : Integrator, optional
        `Exponential` for frozen symmetric flows and `RungeKutta` for others by default.
    trackers : sequence of Tracker
        Energies, distances, checkpoints, callbacks and stopping rules, in any number.
    progress : bool
        Progress bar on stderr.
    energies : bool
        Compute J or E at the output times, one average each; otherwise ``Solution.energy`` is NaN.
    resume : path, optional
        A checkpoint of the same problem to go on from. Deterministic: the result has the bits of an uninterrupted run.

    Returns
    -------
    Solution
        Ctrl-C ends the integration and returns what there is, with status ``interrupted``.

    Raises
    ------
    InputError
        For unusable arguments; `StabilityError` for an unstable step, with the limit.
    FileFormatError
        When the checkpoint is damaged or belongs to another problem.
    """
    if not isinstance(flow, Flow):
        raise InputError(f"flow: got {type(flow).__name__}, expected a GradientFlow or an AttentionFlow")
    if start is None:
        if flow.observed is None:
            raise InputError("start: needed, since the flow has no observed signal to start from")
        start = flow.observed
    u = flow.check_signal("start", start)
    times = _output_times(t, t_eval)
    if integrator is None:
        integrator = RungeKutta() if flow.evolving or not flow.symmetric else Exponential()
    if not isinstance(integrator, Integrator):
        raise InputError(f"integrator: got {type(integrator).__name__}, expected an instance such as RungeKutta()")
    if integrator.unit_steps and np.any(times != np.round(times)):
        raise InputError(
            f"t_eval: {type(integrator).__name__} takes whole layers, so times must be whole numbers; got "
            f"{times.tolist()}"
        )
    for tracker in trackers:
        if not isinstance(tracker, Tracker):
            raise InputError(f"trackers: got {type(tracker).__name__}, expected Tracker instances such as Energy()")
    integrator.check(flow)
    watchers = [*trackers, Progress()] if progress else list(trackers)
    return _Loop(flow, u, times, integrator, watchers, energies).run(resume)


def _output_times(t: float | None, t_eval: Any) -> NDArray[np.float64]:
    if t is None and t_eval is None:
        raise InputError("t: give an end time t, output times t_eval, or both")
    end = None if t is None else check_number("t", t, minimum=0)
    if t_eval is None:
        return np.array([0.0, end]) if end else np.array([0.0])
    times = np.asarray(check_array("t_eval", t_eval, ndim=1), dtype=np.float64)
    if times[0] < 0 or np.any(np.diff(times) <= 0):
        raise InputError(f"t_eval: got {times.tolist()[:6]}, expected increasing times >= 0")
    if end is not None and times[-1] > end:
        raise InputError(f"t_eval: got {times[-1]:g} after the end time t={end:g}; leave it out or raise t")
    return np.append(times, end) if end is not None and times[-1] < end else times


class _Loop:
    """State of one integration: what a checkpoint holds and what the solution is made of."""

    def __init__(
        self,
        flow: Flow,
        u: Array,
        times: NDArray[np.float64],
        integrator: Integrator,
        watchers: list[Tracker],
        with_energies: bool,
    ) -> None:
        self.flow = flow
        self.u = u
        self.t = 0.0
        self.times = times
        self.integrator = integrator
        self.watchers = watchers
        self.with_energies = with_energies
        self.memory: dict[str, Any] = {}
        self.steps = 0
        self.kernel_signal: Array | None = None  # what an evolving kernel was last taken from
        self._start = (flow, u)
        self.snapshots: list[Array] = []
        self.energies: list[float] = []
        self.reached: list[float] = []
        self.tracker_seconds = 0.0
        self.analysis = 0

    def run(self, resume: str | os.PathLike[str] | None) -> Solution:
        start, compiled = time.perf_counter(), _numba.seconds
        first = self.flow.applications
        for watcher in self.watchers:
            self._watching(watcher.start, self.flow, self.u, self.t, float(self.times[-1]))
            if isinstance(watcher, Checkpoint):
                watcher.bind(self.save)
        if resume is not None:
            self._restore(resume)
        try:
            status, message = self._integrate()
        except KeyboardInterrupt:
            status, message = Status.INTERRUPTED, f"interrupted at t={self.t:.6g}; what was reached is returned"
        except StepFailureError as failure:
            status, message = Status.STEP_FAILED, str(failure)
        finally:
            for watcher in self.watchers:
                watcher.finish()
        if not self.reached or self.reached[-1] != self.t:
            self._snapshot()
        compile_seconds = _numba.seconds - compiled
        xp = namespace(self.u)
        stats = {
            "steps": self.steps,
            "rejected": int(self.memory.get("rejected", 0)),
            "applications": self.flow.applications - first - self.analysis,
            "analysis_applications": self.analysis,
            "compile_seconds": compile_seconds,
            "solve_seconds": time.perf_counter() - start - compile_seconds - self.tracker_seconds,
            "tracker_seconds": self.tracker_seconds,
            "integrator": repr(self.integrator),
            "method": self.flow.affinity.method,
            "reason": self.flow.affinity.reason,
        }
        if "error_bound" in self.memory:
            stats["error_bound"] = self.memory["error_bound"]
        return Solution(
            t=np.array(self.reached),
            u=xp.stack(self.snapshots),
            energy=np.array(self.energies),
            success=status in (Status.FINISHED, Status.STOPPED),
            status=status,
            message=message,
            stats=stats,
            records={w.name: w.record() for w in self.watchers if w.record()},
            provenance=_provenance(self.flow, self.integrator),
        )

    def _integrate(self) -> tuple[Status, str]:
        if self.steps == 0 and (reason := self._look(always=True)):
            return Status.STOPPED, reason
        while True:
            if self.t in self.times and (not self.reached or self.reached[-1] != self.t):
                self._snapshot()
            ahead = self.times[self.times > self.t]
            if ahead.size == 0:
                return Status.FINISHED, f"reached t={self.t:.6g}"
            if self.flow.evolving and self.steps > 0 and self.steps % self.flow.every == 0:
                self.kernel_signal = self.u
                self.flow = self.flow.rebuilt(self.u)
            u, self.t = self.integrator.advance(self.flow, self.u, self.t, float(ahead[0]), self.memory)
            self.steps += 1
            xp = namespace(u)
            if not bool(xp.all(xp.isfinite(u))):
                return Status.DIVERGED, (
                    f"the signal overflowed at t={self.t:.6g}: the step is unstable for this flow; use a smaller dt, "
                    "RungeKutta() or Exponential()"
                )
            self.u = u
            if reason := self._look(always=self.t >= self.times[-1]):
                return Status.STOPPED, reason

    def _watching(self, function: Any, *arguments: Any) -> Any:
        """Call a watcher, its time and its averages kept apart from the integration's."""
        start, before = time.perf_counter(), self.flow.applications
        result = function(*arguments)
        self.analysis += self.flow.applications - before
        self.tracker_seconds += time.perf_counter() - start
        return result

    def _look(self, *, always: bool) -> str | None:
        reason = None
        for watcher in self.watchers:
            if always or self.steps % watcher.every == 0:
                reason = self._watching(watcher.look, self.flow, self.u, self.t) or reason
        return reason

    def _snapshot(self) -> None:
        functional = self.flow.functional if self.with_energies else None
        self.snapshots.append(self.u)
        self.reached.append(self.t)
        self.energies.append(float("nan") if functional is None else self._watching(_energy, functional, self.u))

    # ---- checkpoints

    @cached_property
    def fingerprint(self) -> str:
        """Identify the problem that the loop was started on; only checkpoints need it."""
        return _fingerprint(*self._start, self.times, self.integrator)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state of the loop to a checkpoint."""
        arrays = {"u": _numpy(self.u), "energies": np.array(self.energies), "reached": np.array(self.reached)}
        if self.snapshots:
            arrays["snapshots"] = np.stack([_numpy(s) for s in self.snapshots])
        if self.kernel_signal is not None:
            arrays["kernel_signal"] = _numpy(self.kernel_signal)
        for index, watcher in enumerate(self.watchers):
            arrays.update({f"record/{index}/{key}": value for key, value in watcher.record().items()})
        meta = {
            "kind": "checkpoint",
            "fingerprint": self.fingerprint,
            "t": self.t,
            "steps": self.steps,
            "memory": {k: v for k, v in self.memory.items() if not k.startswith("_")},
            "watchers": [type(w).__name__ for w in self.watchers],
            "provenance": _provenance(self.flow, self.integrator),
        }
        save_archive(path, arrays, meta)

    def _restore(self, path: str | os.PathLike[str]) -> None:
        arrays, meta = load_archive(path, "checkpoint")
        if meta["fingerprint"] != self.fingerprint:
            raise FileFormatError(
                f"{path}: the checkpoint belongs to another problem (signal, kernel, flow, times or integrator "
                "differ); "
                "resume with the arguments that it was written with, or start afresh"
            )
        self.u = constant_like(arrays["u"], self.u)
        self.t, self.steps, self.memory = float(meta["t"]), int(meta["steps"]), dict(meta["memory"])
        self.energies, self.reached = arrays["energies"].tolist(), arrays["reached"].tolist()
        self.snapshots = [constant_like(s, self.u) for s in arrays.get("snapshots", ())]
        if self.reached and self.reached[-1] not in self.times:
            # An interrupted run ends with a snapshot of where it stood, which is no output time.
            for column in (self.energies, self.reached, self.snapshots):
                column.pop()
        if "kernel_signal" in arrays:
            self.kernel_signal = constant_like(arrays["kernel_signal"], self.u)
            self.flow = self.flow.rebuilt(self.kernel_signal)
        names = [type(w).__name__ for w in self.watchers]
        if names == meta["watchers"]:
            for index, watcher in enumerate(self.watchers):
                prefix = f"record/{index}/"
                record = {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
                if record:
                    watcher.restore(record)


def _energy(functional: Any, u: Array) -> float:
    try:
        return float(functional.value(u))
    except ArithmeticError:  # the sum of degrees overflows: the energy exists, but no float holds it
        return float("inf")


def _numpy(array: Array) -> NDArray[Any]:
    return array if is_numpy(array) else np.asarray(array.detach().cpu().numpy())


def _fingerprint(flow: Flow, u: Array, times: NDArray[np.float64], integrator: Integrator) -> str:
    """Identify a problem: the same arguments give the same text."""
    digest = hashlib.sha256()
    for text in (repr(flow), repr(integrator), repr(flow.affinity.domain.shape)):
        digest.update(text.encode())
    pieces = [u, flow.affinity.log_degree]
    if flow.observed is not None:
        pieces.append(flow.observed)
    if flow.fidelity is not None:
        pieces.append(flow.fidelity.values)
    for piece in (times, *pieces):
        array = np.asarray(piece) if isinstance(piece, float) else _numpy(piece)
        digest.update(str((array.dtype, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _provenance(flow: Flow, integrator: Integrator) -> dict[str, Any]:
    return {**environment(), "flow": repr(flow), "integrator": repr(integrator)}
