"""The only time loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, check_untracked, is_numpy, namespace, underflowing
from nlflow.backends.numba import loading
from nlflow.errors import (
    InputError,
    NumericalError,
    StabilityError,
    check_array,
    check_number,
    checked_call,
)
from nlflow.flows.checkpoints import Checkpointed, State, provenance_of
from nlflow.flows.descent import Descent
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import Exponential, Integrator, RungeKutta, StepFailureError
from nlflow.flows.integrators.base import SLACK, check_admitted, check_same_flow, check_terms
from nlflow.flows.result import Solution, Status
from nlflow.flows.times import landing
from nlflow.flows.trackers import Checkpoint, Progress, Tracker

_PATIENCE = 64  # steps after which a device is asked whether the signal has overflowed


@checked_call
@underflowing
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
    resume: str | os.PathLike[str] | bool | None = None,
) -> Solution:
    """Integrate a flow.

    Parameters
    ----------
    flow : GradientFlow, AttentionFlow, PFlow or GroupFlow
    start : array of shape ``domain.shape`` or ``domain.shape + (D,)``, optional
        u(0); the observed signal f by default where there is one. At nodes with a constraint its values count.
    t : float, optional
        End time (number of layers for `AttentionStep` and `NeutrenoStep`); the last of `t_eval` by default.
    t_eval : array_like, optional
        Increasing output times; 0 and `t` by default.
    integrator : Integrator, optional
        By default `Exponential` for frozen symmetric flows that are linear, and `RungeKutta` for others; a flow of
        groups needs one.
    trackers : sequence of Tracker
        Energies, distances, checkpoints, files, films, callbacks and stopping rules, in any number. Where one looks at
        times of its own (``interval``, ``at``), steps end at these times as they do at `t_eval`: nothing is
        interpolated, and a fixed step is shortened before such a time.
    progress : bool
        Progress bar on stderr.
    energies : bool
        Compute J or E at the output times, one average each; otherwise ``Solution.energy`` is NaN. After a resume the
        outputs before the checkpoint keep what they had. A run whose energy rises without reason ends as ``diverged``;
        it is looked at after 16, 32, 64, ... steps too.
    resume : path or True, optional
        A checkpoint of the same problem to go on from; True for that of the `Checkpoint` among the trackers, if there
        is one yet. Deterministic: the result has the bits of an uninterrupted run. Where the newest checkpoint is
        damaged or of another problem, the one before it is used, with a warning.

    Notes
    -----
    The kernel of an evolving flow is that of u(0) at the start. With ``every`` = 1 it then follows the signal, and the
    flow is integrated with the order of the integrator. With ``every`` = n it is taken from the signal after each n
    steps, which is of order 1; ``Solution.stats["order"]`` says which order the result has.

    Returns
    -------
    Solution
        Ctrl-C ends the integration and returns what there is, with status ``interrupted``.

    Raises
    ------
    InputError
        For unusable arguments; `StabilityError` for an unstable step, with the limit.
    FileFormatError
        When the checkpoint is damaged or belongs to another problem, and the one before it too.
    """
    if not isinstance(flow, Flow):
        raise InputError(
            f"flow: got {type(flow).__name__}, expected a flow, such as a GradientFlow or an AttentionFlow"
        )
    flow = flow.when(0.0)
    if start is None:
        if flow.observed is None:
            raise InputError("start: needed, since the flow has no observed signal to start from")
        start = flow.observed
    u = flow.check_signal("start", start)
    tracked = flow.affinity.tracked or getattr(u, "requires_grad", False)
    check_untracked("start or features", tracked, flow.differentiated)
    times = _output_times(t, t_eval)
    if integrator is None and flow.needs_integrator:
        raise InputError(f"integrator: got none, expected one for a {type(flow).__name__}; {flow.advice}")
    if integrator is None:
        integrator = Exponential() if Exponential.knows(flow) else RungeKutta()
    if not isinstance(integrator, Integrator):
        raise InputError(f"integrator: got {type(integrator).__name__}, expected an instance such as RungeKutta()")
    if integrator.unit_steps and np.any(times != np.round(times)):
        raise InputError(
            f"t_eval: {type(integrator).__name__} takes steps of length 1, so times must be whole numbers; got "
            f"{times.tolist()}"
        )
    if not isinstance(trackers, list | tuple):
        raise InputError(f"trackers: got {type(trackers).__name__}, expected a list of Tracker instances")
    for tracker in trackers:
        if not isinstance(tracker, Tracker):
            raise InputError(f"trackers: got {type(tracker).__name__}, expected Tracker instances such as Energy()")
        tracker.times.check(float(times[-1]), type(integrator).__name__ if integrator.unit_steps else None)
    if flow.evolving:
        flow = flow.rebuilt(u)
    check_admitted(flow, integrator)
    check_terms(flow, integrator)
    check_same_flow(flow, integrator, u)
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


class _Loop(Checkpointed):
    """One integration: its state, its watchers and its checkpoints."""

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
        self.times = times
        self.integrator = integrator
        # Checkpoints last: they hold what the others have seen.
        self.watchers = sorted(watchers, key=lambda watcher: isinstance(watcher, Checkpoint))
        self._own_times = [watcher.times for watcher in watchers if watcher.times.own]
        self.with_energies = with_energies
        self.state = State(u, kernel_signal=u if flow.evolving else None)
        self._start = (flow, u)
        self.tracker_seconds = 0.0
        self._descent = Descent(flow, integrator)
        self._limit: float | None = None

    def run(self, resume: str | os.PathLike[str] | bool | None) -> Solution:
        start, compiled = time.perf_counter(), loading.seconds
        status: Status | None = None
        try:
            for watcher in self.watchers:
                self._watching(watcher.start, self.flow, self.state.u, self.state.t, float(self.times[-1]))
            self._resume(resume)
            for watcher in self.watchers:
                self._watching(watcher.begin, self.flow, self.state.u, self.state.t, self.about)
            status, message = self._integrate()
        except KeyboardInterrupt:
            status, message = Status.INTERRUPTED, f"interrupted at t={self.state.t:.6g}; what was reached is returned"
        except (StepFailureError, StabilityError, NumericalError) as failure:
            status, message = Status.STEP_FAILED, str(failure)
        finally:
            for flow in (self.flow, self._start[0]):
                vars(flow).pop("during", None)  # what was watched is not kept with a flow that lives on
            with ExitStack() as stack:  # all of them finish, also when one fails; the last that is named here is first
                last = [watcher for watcher in self.watchers if isinstance(watcher, Checkpoint)]
                for watcher in [watcher for watcher in reversed(self.watchers) if watcher not in last]:
                    stack.callback(watcher.finish)
                if status is Status.STOPPED:
                    stack.callback(self._see_end)
                for watcher in reversed(last):
                    stack.callback(watcher.finish)
        outputs = self.state.outputs
        if not outputs or outputs[-1][0] != self.state.t:
            outputs = (*outputs, (self.state.t, self.state.u, self._energy()))
        compile_seconds = loading.seconds - compiled
        state, xp = self.state, namespace(self.state.u)
        stats = {
            "steps": state.steps,
            "rejected": int(state.memory.get("rejected", 0)),
            "applications": state.applications,
            "analysis_applications": state.analysis,
            "compile_seconds": compile_seconds,
            "solve_seconds": time.perf_counter() - start - compile_seconds - self.tracker_seconds,
            "tracker_seconds": self.tracker_seconds,
            "integrator": repr(self.integrator),
            "order": self.integrator.order_for(self.flow),
            "method": self.flow.affinity.method,
            "reason": self.flow.affinity.reason,
            "error_estimate": self.flow.affinity.error_estimate,
        }
        if "error_bound" in state.memory:
            stats["error_bound"] = state.memory["error_bound"]
        records = {n: w.record() for n, w in zip(self.names, self.watchers, strict=True)}
        return Solution(
            t=np.array([output[0] for output in outputs]),
            u=xp.stack([output[1] for output in outputs]),
            energy=np.array([output[2] for output in outputs]),
            success=status in (Status.FINISHED, Status.STOPPED),
            status=status,
            message=message,
            stats=stats,
            records={name: record for name, record in records.items() if record},
            provenance=provenance_of(self.flow, self.integrator, self.state.u),
            domain=self.flow.affinity.domain,
        )

    def _integrate(self) -> tuple[Status, str]:
        # A resumed run looks again where the checkpoint stands: what stopped there stops here.
        if reason := self._look():
            return Status.STOPPED, reason
        sound = self.state  # the last that is known to be finite
        while True:
            now = self.state
            if now.t in self.times and (not now.outputs or now.outputs[-1][0] != now.t):
                energy = self._energy()
                if risen := self._descent.rose(self.flow, now.u, now.t, energy):
                    return Status.DIVERGED, risen
                self.state = replace(self.state, outputs=(*now.outputs, (now.t, now.u, energy)))
                now = self.state
            ahead = self.times[self.times > now.t]
            if ahead.size == 0:
                return Status.FINISHED, f"reached t={now.t:.6g}"
            if self.flow.evolving and now.steps > 0 and now.steps % self.flow.every == 0:
                check_admitted(self.flow, self.integrator)  # the stable range moves with the kernel
            memory, before = dict(now.memory), self.flow.applications
            self.flow.during = self._during
            with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found below, and told
                target = landing(self._own_times, now.t, float(ahead[0]))
                u, t = self.integrator.advance(self.flow, now.u, now.t, target, memory)
            u = self.flow.when(t).held(u)
            xp = namespace(u)
            asked = self._asked(u, t)
            if asked and not bool(xp.all(xp.isfinite(u))):
                self.state = sound
                advice = "use a smaller dt, RungeKutta() or Exponential()"
                if self.flow.needs_integrator:
                    advice = self.flow.advice
                return Status.DIVERGED, (
                    f"the signal overflowed at t={t:.6g}: the step is unstable for this flow; {advice}, or scale the "
                    "signal down where it is very large already"
                )
            applications = now.applications + self.flow.applications - before
            kernel_signal = now.kernel_signal
            if self.flow.evolving and (now.steps + 1) % self.flow.every == 0:
                self.flow, kernel_signal = self.flow.following(u, memory), u
            self.flow = self.flow.when(t)
            self.state = replace(
                now, u=u, t=t, steps=now.steps + 1, memory=memory, kernel_signal=kernel_signal,
                applications=applications,
            )  # fmt: skip
            if asked:
                sound = self.state
            if too_long := self._too_long(t - now.t):
                return Status.STEP_FAILED, too_long
            if self.with_energies and self._descent.due(self.state.steps):
                energy = self._energy()
                if risen := self._descent.rose(self.flow, u, t, energy):
                    return Status.DIVERGED, risen
            if reason := self._look():
                return Status.STOPPED, reason

    def _too_long(self, step: float) -> str | None:
        """Return what to say of a step above the limit, of a method that chooses its steps and declares a limit."""
        if self.integrator.length is not None or self.integrator.keeps_limit:
            return None
        if self._limit is None or self.flow.evolving:
            self._limit = self.integrator.stability_limit(self.flow)
        if not step > self._limit * SLACK:
            return None
        return (
            f"{type(self.integrator).__name__} took a step of {step:.6g}, above the limit of stable ones that it "
            f"declares, {self._limit:.6g}; let advance() take shorter steps"
        )

    def _during(self, share: float) -> None:
        """Let the watchers know how much of a long step is done."""
        for watcher in self.watchers:
            self._watching(watcher.during, self.state.t, share)

    def _see_end(self) -> None:
        """Let all look where a rule stopped, also those whose turn it was not; a checkpoint does not hold that."""
        for watcher in self.watchers:
            now = self.state
            if watcher.record() and not watcher.times.own and not watcher.times.due(now.steps, now.t):
                self._watching(watcher.look, self.flow, now.u, now.t)

    def _asked(self, u: Array, t: float) -> bool:
        """Whether to look for an overflow after this step: a device that is asked at every step waits for the host."""
        steps = self.state.steps + 1
        due = t in self.times or any(watcher.times.due(steps, t) for watcher in self.watchers)
        looked_at = due or self.flow.evolving
        return is_numpy(u) or looked_at or steps % _PATIENCE == 0

    def _watching(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a watcher; its time and its averages are kept apart from the integration's."""
        start, compiled, before = time.perf_counter(), loading.seconds, self.flow.applications
        result = function(*arguments)
        self.state = replace(self.state, analysis=self.state.analysis + self.flow.applications - before)
        self.tracker_seconds += time.perf_counter() - start - (loading.seconds - compiled)
        return result

    def _look(self) -> str | None:
        """Let the watchers whose turn it is look; who counts steps looks at the start and at the end as well."""
        now = self.state
        always = now.steps == 0 or now.t >= self.times[-1]
        reason = None
        for watcher in self.watchers:
            times = watcher.times
            if (always and not times.own) or times.due(now.steps, now.t):
                reason = self._watching(watcher.look, self.flow, now.u, now.t) or reason
        return reason

    def _energy(self) -> float:
        return float(self._watching(self.flow.energy, self.state.u)) if self.with_energies else float("nan")
