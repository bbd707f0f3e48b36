"""`solve`, with its checks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from nlflow._array import ArrayT, check_untracked, underflowing
from nlflow._looks import look_now, looking_once
from nlflow.errors import InputError, check_increasing, check_number, checked_call, kind_of
from nlflow.flows.events import Event
from nlflow.flows.flow import Flow, as_flow, start_of
from nlflow.flows.integrators import ExactGaussian, Exponential, RungeKutta
from nlflow.flows.integrators.base import Integrator, check_admitted, check_same_flow, check_terms
from nlflow.flows.loop import Loop
from nlflow.flows.result import Solution
from nlflow.flows.trackers import Progress, Tracker


@overload
def solve(
    flow: Flow,
    start: ArrayT,
    *,
    t: float | None = ...,
    t_eval: Any = ...,
    integrator: Integrator | None = ...,
    trackers: Sequence[Tracker] = ...,
    progress: bool = ...,
    energies: bool = ...,
    resume: str | os.PathLike[str] | bool | None = ...,
    dense: bool = ...,
) -> Solution[ArrayT]: ...
@overload
def solve(
    flow: Flow,
    start: None = ...,
    *,
    t: float | None = ...,
    t_eval: Any = ...,
    integrator: Integrator | None = ...,
    trackers: Sequence[Tracker] = ...,
    progress: bool = ...,
    energies: bool = ...,
    resume: str | os.PathLike[str] | bool | None = ...,
    dense: bool = ...,
) -> Solution[Any]: ...
@checked_call
@underflowing
@looking_once()
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
    dense: bool = False,
) -> Solution[Any]:
    """Integrate a flow.

    Parameters
    ----------
    flow : Flow
    start : array of shape ``domain.shape`` or ``domain.shape + (D,)``, optional
        u(0), by default the observed signal f. Nodes with a constraint take its values.
    t : float, optional
        End time (number of layers for `AttentionStep` and `NeutrenoStep`); the last of `t_eval` by default.
    t_eval : array_like, optional
        Increasing output times; 0 and `t` by default.
    integrator : Integrator, optional
        By default `Exponential` for frozen symmetric flows that are linear (`ExactGaussian` with noise), and
        `RungeKutta` for others; needed for a flow of groups, and for noise in other flows.
    trackers : sequence of Tracker
    progress : bool
        Progress bar on stderr.
    energies : bool
        Compute the energy at the output times; otherwise ``Solution.energy`` is NaN. A run of a frozen linear flow
        whose energy rises without reason ends as ``diverged``.
    resume : path or True, optional
        A checkpoint of the same problem to go on from, with the bits of an uninterrupted run; True for that of the
        `Checkpoint` among the trackers, if there is one yet. Where the newest is missing, damaged or of another
        problem, the one before it is taken, with a warning.
    dense : bool
        Keep five signals a step, from which `Solution.at` knows the signal at all times; for `RungeKutta`, without
        `resume`.

    Returns
    -------
    Solution
        After Ctrl-C up to the last whole step, with status ``interrupted``.

    Raises
    ------
    InputError
        For unusable arguments; `StabilityError` for an unstable step, with the limit.
    FileFormatError
        When the checkpoint and the one before it are damaged or belong to another problem.
    """
    flow = as_flow(flow)
    flow = flow.when(0.0)
    u = start_of(flow, start)
    tracked = flow.tracked or getattr(u, "requires_grad", False)
    check_untracked("start, or what the flow is made of", tracked, flow.differentiated)
    times = _output_times(t, t_eval)
    if integrator is None and flow.needs_integrator:
        raise InputError(f"integrator: got none, expected one for a {type(flow).__name__}; {flow.advice}")
    if integrator is None and flow.noise is not None:
        integrator = _with_noise(flow)
    elif integrator is None:
        integrator = Exponential() if Exponential.knows(flow) else RungeKutta()
    if not isinstance(integrator, Integrator):
        raise InputError(f"integrator: got {kind_of(integrator)}, expected an instance such as RungeKutta()")
    if integrator.unit_steps and np.any(times != np.round(times)):
        raise InputError(
            f"t_eval: {type(integrator).__name__} takes steps of length 1, so times must be whole numbers; got "
            f"{times.tolist()}"
        )
    if not float(times[-1]) * np.finfo(np.float64).eps <= (integrator.length or np.inf):
        raise InputError(
            f"dt: got {integrator.length:g}, expected at least {times[-1] * np.finfo(np.float64).eps:.3g} for times up "
            f"to {times[-1]:g}: shorter steps do not move the time; take longer ones, or another unit of time"
        )
    if not isinstance(trackers, list | tuple):
        raise InputError(f"trackers: got {kind_of(trackers)}, expected a list of Tracker instances")
    for tracker in trackers:
        if not isinstance(tracker, Tracker):
            raise InputError(f"trackers: got {kind_of(tracker)}, expected Tracker instances such as Energy()")
        tracker.times.check(float(times[-1]), type(integrator).__name__ if integrator.unit_steps else None)
        if isinstance(tracker, Event) and integrator.unit_steps:
            raise InputError(
                f"trackers: the event {tracker.name!r} is located inside steps, and {type(integrator).__name__} takes "
                "whole ones of length 1; use a Callback"
            )
    if flow.evolving:
        flow = flow.rebuilt(u)
    check_admitted(flow, integrator)
    check_terms(flow, integrator)
    check_same_flow(flow, integrator, u)
    if flow.noise is not None:
        flow.noise.check_start(flow, u)
    watchers = [*trackers, Progress()] if progress else list(trackers)
    if dense:
        _check_dense(integrator, resume)
    if watchers or flow.evolving:
        look_now()  # who looks at the start gets one that is finite
    with flow.looking_at(u):
        return Loop(flow, u, times, integrator, watchers, energies, dense).run(resume)


def _check_dense(integrator: Integrator, resume: Any) -> None:
    if not getattr(integrator, "dense", False):
        raise InputError(
            f"dense: got True for {type(integrator).__name__}, whose steps are known at their ends alone; use "
            "RungeKutta(), or t_eval"
        )
    if resume is not None and resume is not False:
        raise InputError("dense: got True for a resumed run, whose first steps are not kept; leave one of them out")


def _with_noise(flow: Flow) -> Integrator:
    if ExactGaussian.knows(flow):
        return ExactGaussian()
    raise InputError(
        f"integrator: got none, expected one for a flow with {flow.noise!r} that is not linear, symmetric and frozen, "
        "with one strength; use ExponentialEuler(dt), EulerMaruyama(dt) or PlatenWeak2(dt)"
    )


def _output_times(t: float | None, t_eval: Any) -> NDArray[np.float64]:
    if t is None and t_eval is None:
        raise InputError("t: give an end time t, output times t_eval, or both")
    end = None if t is None else check_number("t", t, minimum=0)
    if t_eval is None:
        return np.array([0.0, end]) if end else np.array([0.0])
    times = check_increasing("t_eval", t_eval, "times", minimum=0)
    if end is not None and times[-1] > end:
        raise InputError(f"t_eval: got {times[-1]:g} after the end time t={end:g}; leave it out or raise t")
    return np.append(times, end) if end is not None and times[-1] < end else times
