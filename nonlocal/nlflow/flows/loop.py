"""The only time loop."""

from __future__ import annotations

import hashlib
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Pending, check_untracked, fetch, is_numpy, namespace, told_of
from nlflow._looks import Doubt, doubting
from nlflow.backends.machine import provenance
from nlflow.backends.numba import loading
from nlflow.errors import FileFormatError, InputError, NumericalError, StabilityError, warn_caller
from nlflow.flows.checkpoints import (
    ANOTHER,
    EARLIER,
    FINGERPRINTS,
    MEMORY,
    State,
    fingerprint,
    incomplete,
    probe,
    unseeded,
)
from nlflow.flows.descent import Descent
from nlflow.flows.events import Event
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import StepFailureError
from nlflow.flows.integrators.base import SLACK, Integrator, check_admitted
from nlflow.flows.integrators.runge_kutta import FINITE, PIECES, Piece
from nlflow.flows.result import Solution, Status
from nlflow.flows.trackers import SAME, Checkpoint, Times, Tracker
from nlflow.store.checkpoints import Checkpoints
from nlflow.store.storage import Arrays, Meta

_PATIENCE = 64  # steps after which a device is asked whether the signal has overflowed


@dataclass
class _Look:
    """A state of a run on a device, and what the device has still to tell of it: whether it is finite, its energy."""

    flow: Flow
    state: State
    finite: Pending | None = None
    energy: Pending | float | None = None


class Loop:
    """A run of a flow."""

    def __init__(
        self,
        flow: Flow,
        u: Array,
        times: NDArray[np.float64],
        integrator: Integrator,
        watchers: list[Tracker],
        with_energies: bool,
        dense: bool = False,
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
        self._pieces: list[tuple[Flow, Piece]] | None = [] if dense else None
        self._events = [watcher for watcher in watchers if isinstance(watcher, Event)]
        self.tracker_seconds = 0.0
        self._descent = Descent(flow, integrator)
        self._limit: float | None = None
        self._open: list[_Look] = []
        self._doubts: list[Doubt] = []  # of the steps after it was last known that all are finite
        self._sound = _Look(flow, self.state)  # the last that is known to be finite

    def run(self, resume: str | os.PathLike[str] | bool | None) -> Solution[Any]:
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
            words = f"interrupted at t={self.state.t:.6g}; what was reached is returned"
            status, message = self._ended() or (Status.INTERRUPTED, words)
        except (StepFailureError, StabilityError, NumericalError) as failure:
            status, message = self._ended() or (Status.STEP_FAILED, told_of(self._doubts) or str(failure))
        finally:
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
        if (noise := self.flow.noise) is not None:
            step = self.integrator
            stats["strong_order"] = step.strong_order_additive if noise.additive else step.strong_order
            stats["weak_order"], stats["seed"] = step.weak_order, noise.seed
        records = {n: w.record() for n, w in zip(self.names, self.watchers, strict=True)}
        return Solution(
            t=np.array([output[0] for output in outputs]),
            u=xp.stack([output[1] for output in outputs]),
            energy=np.array(fetch([output[2] for output in outputs])),
            success=status in (Status.FINISHED, Status.STOPPED),
            status=status,
            message=message,
            stats=stats,
            records={name: record for name, record in records.items() if record},
            provenance=_provenance(self.flow, self.integrator, self.state.u),
            domain=self.flow.affinity.domain,
            between=None if self._pieces is None else self._between,
        )

    def _between(self, t: float) -> Array:
        """Return the signal at a time that the run has passed."""
        pieces = self._pieces or []
        if not pieces or t >= pieces[-1][1].end:
            return self.state.u
        flow, piece = pieces[bisect_right(pieces, t, key=lambda pair: pair[1].end)]
        return flow.when(t).held(piece.at(t))

    def _outputs_within(self, before: State, memory: dict[str, Any]) -> None:
        """Take the output times down that lie within the last step."""
        if self._pieces is None:
            return
        self._pieces += [(self.flow, piece) for piece in memory.pop(PIECES)]
        outputs = self.state.outputs
        for t in self.times[(self.times > before.t) & (self.times < self.state.t)]:
            u = self._between(float(t))
            energy = self._watching(self.flow.when(float(t)).pending_energy, u) if self.with_energies else math.nan
            outputs = (*outputs, (float(t), u, energy))
        self.state = replace(self.state, outputs=outputs)

    def _integrate(self) -> tuple[Status, str]:
        # A resumed run looks again where the checkpoint stands: what stopped there stops here.
        if reason := self._look():
            return Status.STOPPED, reason
        self._sound = _Look(self.flow, self.state)
        while True:
            now = self.state
            if now.t in self.times and (not now.outputs or now.outputs[-1][0] != now.t):
                energy = self._energy()
                self._open.append(_Look(self.flow, now, energy=energy))
                self.state = replace(self.state, outputs=(*now.outputs, (now.t, now.u, energy)))
                now = self.state
            ahead = self.times[self.times > now.t]
            if (ahead.size == 0 or is_numpy(now.u)) and (failed := self._settled()):
                return failed
            if ahead.size == 0:
                return Status.FINISHED, f"reached t={now.t:.6g}"
            if self.flow.evolving and now.steps > 0 and now.steps % self.flow.every == 0:
                check_admitted(self.flow, self.integrator)  # the stable range moves with the kernel
            memory, before = dict(now.memory), self.flow.applications
            if self._pieces is not None:
                memory[PIECES] = []
            target = _landing(self._own_times, now.t, float(ahead[0 if self._pieces is None else -1]))
            # What overflows is found below, and told.
            with self.flow.telling(self._during), doubting(self._doubts), np.errstate(over="ignore", invalid="ignore"):
                u, t = self.integrator.advance(self.flow, now.u, now.t, target, memory)
                u = self.flow.when(t).held(u)
                check_untracked("a term of the flow", getattr(u, "requires_grad", False), self.flow.differentiated)
                u, t, memory, events = self._until_event(u, t, memory)
            waits, told = self._waits(t), memory.pop(FINITE, None)
            seen = self._seen(u, t, told) if waits or t in self.times else None
            if waits:
                if failed := self._settled():
                    return failed
                self._doubts.clear()
            applications = now.applications + self.flow.applications - before
            kernel_signal = now.kernel_signal
            if self.flow.evolving and (now.steps + 1) % self.flow.every == 0:
                self.flow, kernel_signal = self.flow.following(u, memory), u
            self.flow = self.flow.when(t)
            self.state = replace(
                now, u=u, t=t, steps=now.steps + 1, memory=memory, kernel_signal=kernel_signal,
                applications=applications,
            )  # fmt: skip
            self._outputs_within(now, memory)
            if seen is not None:
                seen.flow, seen.state = self.flow, self.state
            if too_long := self._too_long(t - now.t):
                return Status.STEP_FAILED, too_long
            if reasons := [reason for event in events if (reason := self._happened(event))]:
                return Status.STOPPED, reasons[0]
            for one in self._events:
                one.arm(self.state.t, self.state.u, self.flow)
            if self.with_energies and self._descent.due(self.state.steps):
                self._open.append(_Look(self.flow, self.state, energy=self._energy()))
                if is_numpy(u) and (failed := self._settled()):
                    return failed
            if reason := self._look():
                return Status.STOPPED, reason

    def _until_event(
        self, u: Array, t: float, memory: dict[str, Any]
    ) -> tuple[Array, float, dict[str, Any], list[Event]]:
        """Return where the step ends, at the first of the events in it, or where it did; and all that happen there."""
        if not self._events:
            return u, t, memory, []  # a device is not asked
        now = self.state
        for event in self._events:
            if bool(namespace(u).all(namespace(u).isfinite(u))) and event.crossed(t, u):
                before = dict(now.memory)
                u, t, memory = event.located(self.integrator, self.flow, (now.u, now.t), (u, t, memory), before)
        if not bool(namespace(u).all(namespace(u).isfinite(u))):
            return u, t, memory, []
        # Resets come last: what others record and look at is the signal before.
        found = [event for event in self._events if event.crossed(t, u)]
        return u, t, memory, sorted(found, key=lambda event: callable(event.action))

    def _happened(self, event: Event) -> str | None:
        """Let an event happen; return why the run stops, if it does."""
        now = self.state
        reset = self._watching(event.happen, self.flow, now.u, now.t)
        if reset is None:
            return f"event {event.name!r} at t={now.t:.9g}" if event.action == "stop" else None
        memory = {key: value for key, value in now.memory.items() if not key.startswith("_")}
        kernel_signal = now.kernel_signal
        if self.flow.evolving:
            self.flow, kernel_signal = self.flow.rebuilt(reset).when(now.t), reset
        self.state = replace(now, u=reset, memory=memory, kernel_signal=kernel_signal)
        self._descent = Descent(self.flow, self.integrator)  # the energy may rise by a reset
        for one in self._events:
            one.disarm()
        return None

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
        for watcher in self.watchers:
            self._watching(watcher.during, self.state.t, share)

    def _see_end(self) -> None:
        """Let all look where a rule stopped, also those whose turn it was not; a checkpoint does not hold that."""
        for watcher in self.watchers:
            now = self.state
            if watcher.record() and not watcher.times.own and not watcher.times.due(now.steps, now.t):
                self._watching(watcher.look, self.flow, now.u, now.t)

    def _waits(self, t: float) -> bool:
        """Whether to wait for what is to be known after this step: a device that is asked waits for the host.

        Who writes a signal down, or stops a run by it, has to know that it is finite, and so has a kernel that is built
        from it. Others go on, and what came of a signal that was not finite is taken back.
        """
        flow, steps = self.flow, self.state.steps + 1
        follows = flow.evolving and not flow.affinity.takes_unsound
        if is_numpy(self.state.u) or follows or self._events or steps - self._sound.state.steps >= _PATIENCE:
            return True
        # All of them are asked, not up to the first that waits: processes have to ask together.
        waiting = [watcher.at_once(flow) for watcher in self.watchers if watcher.times.due(steps, t)]
        if any(waiting):
            return True
        measured = t in self.times or self._descent.due(steps) or self._pieces is not None
        return self.with_energies and measured and not flow.leaves_pending

    def _seen(self, u: Array, t: float, told: tuple[Array, bool] | None = None) -> _Look:
        """Take down what is to be known of the signal after this step, of which the integrator may have told."""
        xp, known = namespace(u), told is not None and told[0] is u
        if known or self.flow.checks_steps:
            finite = Pending(lambda: float(told is None or told[1]))
        else:
            finite = Pending(float, xp.all(xp.isfinite(u)))
        look = _Look(self.flow, replace(self.state, u=u, t=t, steps=self.state.steps + 1), finite)
        self._open.append(look)
        return look

    def _settled(self) -> tuple[Status, str] | None:
        """Ask for what is to be known, in one copy; return how the run ends if it overflowed or its energy rose."""
        fetch([one for look in self._open for one in (look.finite, look.energy) if one is not None])
        looks, self._open = self._open, []
        for look in looks:
            if look.finite is not None and not float(look.finite):
                if reason := told_of(self._doubts):
                    self._go_back(self._sound)
                    return Status.STEP_FAILED, reason
                return Status.DIVERGED, self._overflowed(look.state)
            if look.finite is not None:
                self._sound = look
            if look.energy is None:
                continue
            now = look.state
            if risen := self._descent.rose(look.flow, now.u, now.t, float(look.energy)):
                self._go_back(look)
                return Status.DIVERGED, risen
        return None

    def _overflowed(self, after: State) -> str:
        """Go back to the last signal that is known to be finite; return what to say."""
        self._go_back(self._sound)
        advice = self.flow.advice if self.flow.needs_integrator else "use a smaller dt, RungeKutta() or Exponential()"
        between = after.steps - self.state.steps > 1
        when = f"between t={self.state.t:.6g} and t={after.t:.6g}" if between else f"at t={after.t:.6g}"
        return (
            f"the signal overflowed {when}: the step is unstable for this flow; {advice}, or scale the signal down "
            "where it is very large already"
        )

    def _go_back(self, look: _Look) -> None:
        self.flow, self.state = look.flow, look.state
        for watcher in self.watchers:
            watcher.forget(self.state.t)

    def _ended(self) -> tuple[Status, str] | None:
        """Return how a run ends that was broken off, where its last steps overflowed and nobody had looked."""
        if is_numpy(self.state.u):
            return None
        self._seen(self.state.u, self.state.t).state = self.state
        return self._settled()

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

    def _energy(self) -> Pending | float:
        found: Pending | float = math.nan
        if self.with_energies:
            found = self._watching(self.flow.pending_energy, self.state.u)
        return found

    # ---- checkpoints

    @property
    def names(self) -> list[str]:
        names: list[str] = []
        for watcher in self.watchers:
            same = sum(name.split("-")[0] == watcher.name for name in names)
            names.append(f"{watcher.name}-{same + 1}" if same else watcher.name)
        return names

    @cached_property
    def fingerprint(self) -> str:
        # Steps end where trackers look at times of their own.
        looks = sorted({words for watcher in self.watchers if (words := watcher.times.words())})
        looks += [event.words() for event in self._events]
        return fingerprint(*self._start, self.times, self.integrator, looks)

    @cached_property
    def probe(self) -> NDArray[np.float64]:
        return probe(*self._start)

    def about(self) -> dict[str, Any]:
        kernel = hashlib.sha256(self.probe.astype(np.float32).tobytes()).hexdigest()
        made = _provenance(self.flow, self.integrator, self.state.u)
        return {**made, "problem": self.fingerprint, "kernel": kernel}

    def save(self, states: Checkpoints) -> None:
        now, whole = self.state, self.flow.affinity.whole
        writes = self.flow.affinity.writes(now.steps)
        arrays = {"u": whole(now.u), "probe": self.probe}
        if now.outputs:
            arrays["reached"] = np.array([output[0] for output in now.outputs])
            arrays["snapshots"] = np.stack([whole(output[1]) for output in now.outputs])
            arrays["energies"] = np.array(fetch([output[2] for output in now.outputs]))
        if now.kernel_signal is not None:
            arrays["kernel_signal"] = whole(now.kernel_signal)
        # What begins with an underscore is a convenience of this process, recomputed after a resume.
        kept = {key: value for key, value in now.memory.items() if not key.startswith("_")}
        signals = [key for key, value in kept.items() if getattr(value, "shape", ())]
        arrays.update({MEMORY + key: whole(kept[key]) for key in signals})
        for name, watcher in zip(self.names, self.watchers, strict=True):
            arrays.update({f"record/{name}/{key}": value for key, value in watcher.record().items()})
        meta = {
            "fingerprint": self.fingerprint,
            "t": now.t,
            "steps": now.steps,
            "memory": {key: value for key, value in kept.items() if key not in signals},
            "provenance": _provenance(self.flow, self.integrator, now.u),
        }
        if (noise := self.flow.noise) is not None:
            meta["seed"] = noise.seed
        if writes:
            states.save(arrays, meta)

    def _resume(self, resume: str | os.PathLike[str] | bool | None) -> None:
        own = [watcher for watcher in self.watchers if isinstance(watcher, Checkpoint)]
        states: Checkpoints | None = None
        if resume is True:
            if not own:
                raise InputError("resume: got True without a Checkpoint among the trackers, expected one, or a path")
            states = own[0].states if self.flow.affinity.agreed(bool(own[0].states)) else None
        elif resume is not None and resume is not False:
            if not isinstance(resume, str | os.PathLike):
                raise InputError(f"resume: got {resume!r}, expected the path of a checkpoint, or True")
            # Of a path that is written to as well, the same object: it knows what it has read.
            same = [watcher.states for watcher in own if watcher.path.absolute() == Path(resume).absolute()]
            states = same[0] if same else Checkpoints(resume, "checkpoint")
        if self.flow.affinity.agreed(states is not None or any(watcher.states for watcher in own)):
            # By all processes, since they compute them together; from here on one may look at files alone.
            _ = self.fingerprint, self.probe
        if states is not None:
            self._restore(states)
        for watcher in own:
            watcher.bind(self.flow, self.save, self._unlike)

    def _unlike(self, arrays: Arrays, meta: Meta) -> str | None:
        try:
            probe, fingerprint = arrays["probe"], meta["fingerprint"]
            rounding = 1e-4 if arrays["u"].dtype == np.float32 else 1e-9
        except KeyError as error:
            return f"the checkpoint has no {error}"
        if (reason := unseeded(meta, self.flow)) is not None:
            return reason
        same = probe.shape == self.probe.shape and probe.dtype.kind == "f"
        same = same and np.allclose(probe, self.probe, rtol=rounding, atol=rounding)
        if isinstance(fingerprint, str) and not fingerprint.startswith(FINGERPRINTS):
            return EARLIER
        if fingerprint != self.fingerprint or not bool(same):
            return ANOTHER
        if self.flow.evolving and "kernel_signal" not in arrays:
            return "the checkpoint has no kernel_signal"
        nodes = self.flow.affinity.whole_shape
        return incomplete(arrays, meta, (*nodes, *self.state.u.shape[len(nodes) :]), float(self.times[-1]))

    def _restore(self, states: Checkpoints) -> None:
        path = states.path

        def fits(arrays: Arrays, meta: Meta) -> str | None:
            # The first process alone has the whole problem to compare with.
            reason = self._unlike(arrays, meta)
            return None if self.flow.affinity.agreed(reason is None) else reason or ANOTHER

        arrays, meta = states.load(fits)
        like, own = self.state.u, self.flow.affinity.own
        columns = [arrays[name] for name in ("reached", "snapshots", "energies") if name in arrays]
        outputs = tuple((float(t), own(u, like), float(e)) for t, u, e in zip(*columns, strict=True))
        u, t, steps = own(arrays["u"], like), float(meta["t"]), int(meta["steps"])
        memory = dict(meta["memory"])
        memory.update({k.removeprefix(MEMORY): own(a, like) for k, a in arrays.items() if k.startswith(MEMORY)})
        signal = None
        if self.flow.evolving:
            signal = u if steps % self.flow.every == 0 else own(arrays["kernel_signal"], like)
            self.flow = self.flow.following(signal, memory)
        self.flow = self.flow.when(t)
        self.state = State(u, t, steps, memory, signal, outputs)
        for name, watcher in zip(self.names, self.watchers, strict=True):
            prefix = f"record/{name}/"
            record = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
            if record:
                try:
                    watcher.restore(record)
                except (KeyError, ValueError, TypeError, IndexError) as error:
                    raise FileFormatError(
                        f"{path}: holds records that the tracker {name!r} cannot take up ({error}); use an earlier "
                        "checkpoint, or start afresh"
                    ) from error
            elif watcher.record():
                warn_caller(f"{path}: holds no records of the tracker {name!r}, which begins at t={self.state.t:g}")


def _landing(own: list[Times], t: float, output: float) -> float:
    """Return where the step from t has to end at the latest: the next output time, or an earlier time of a tracker."""
    first = min((times.after(t) for times in own), default=math.inf)
    return output if output <= first * (1 + SAME) else first


def _provenance(flow: Flow, integrator: Integrator, u: Array) -> dict[str, Any]:
    device = "cpu" if is_numpy(u) else str(getattr(u, "device", "cpu"))
    return {
        **provenance(device, getattr(flow.affinity, "seed", None)),
        **({} if flow.noise is None else {"noise": repr(flow.noise)}),
        "flow": repr(flow),
        "integrator": repr(integrator),
    }
