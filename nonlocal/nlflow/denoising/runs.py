"""A flow that denoises: what `solve` needs to run it, and the way back to the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from nlflow.backends.devices import CPU, Device
from nlflow.denoising.progress import Follower, Tell, Trail
from nlflow.errors import NumericalError
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import Integrator
from nlflow.flows.result import Solution, Status
from nlflow.flows.solver import solve
from nlflow.flows.trackers import Callback, Tracker

Array = NDArray[Any]


@dataclass(frozen=True)
class Problem:
    """A flow that denoises, ready for `nlflow.solve`.

    Attributes
    ----------
    flow : GradientFlow or GroupFlow
        Its observed signal is the input in units of its noise, shape (..., C).
    integrator : Integrator
    t : float
        End time.
    rules : tuple of Tracker
        Where it stops earlier.
    back : callable
        From a signal of the flow to an estimate laid out as the input.
    told : dict
        What `DenoiseInfo` says of it.
    """

    flow: Flow
    integrator: Integrator
    t: float
    rules: tuple[Tracker, ...] = ()
    back: Callable[[Array], Array] = lambda u: u
    told: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Watch:
    """What a caller wants of a run beside its result: estimates, a limit of memory, and progress.

    Attributes
    ----------
    every : bool
        All estimates of the path, and no rule that ends it early.
    limit : float or None
        Bytes that it may use at most.
    tell : callable, optional
        Gets the share that is done.
    trail : Trail, optional
        Keeps the course of the flow.
    device : Device
        Where flows of groups of arrays run.
    """

    every: bool = False
    limit: float | None = None
    tell: Tell | None = None
    trail: Trail | None = None
    device: Device = CPU


ALONE = Watch()
"""Nothing beside the result."""


@dataclass
class Run:
    """A flow that was run: the estimates on its path, in units of the noise, and what is told about it."""

    path: list[Array]
    told: dict[str, Any] = field(default_factory=dict)


def run(problem: Problem, watch: Watch) -> tuple[list[Array], Solution]:
    """Solve a problem; return the signals after each step, or the last alone, and the solution.

    Raises
    ------
    NumericalError
        When the flow does not come to its end.
    KeyboardInterrupt
        On Ctrl-C, since half a result is none; and whatever the one who is told raises.
    """
    path: list[Array] = []
    trackers = list(problem.rules)
    if watch.every:
        trackers = [Callback(lambda t, u, flow: path.append(u) if t > 0 else None)]
    follower = Follower(watch.tell, watch.trail)
    if watch.tell is not None or watch.trail is not None:
        trackers.append(follower)
    try:
        solution = solve(problem.flow, t=problem.t, integrator=problem.integrator, trackers=trackers, energies=False)
    finally:
        if follower.raised is not None:
            raise follower.raised
    if solution.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    if not solution.success:
        raise NumericalError(f"image: {solution.message}")
    return path or [solution.final], solution


def unrolled(problem: Problem) -> list[Array]:
    """Return the signals after each step of a flow of tensors, with their derivatives; groups are constants.

    What `run` does without the time loop: no rules, and no progress.
    """
    flow: Flow = problem.flow
    u: Any = flow.observed
    memory: dict[str, Any] = {}
    path = []
    for step in range(round(problem.t)):
        u, _ = problem.integrator.advance(flow, u, float(step), step + 1.0, memory)
        flow = flow.following(u, memory)
        path.append(u)
    return path
