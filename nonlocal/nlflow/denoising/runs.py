"""Runs of flows, and what is told of them."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nlflow.backends.devices import CPU, Device
from nlflow.errors import NumericalError, check_flag, warn_caller
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.base import Integrator
from nlflow.flows.result import Solution, Status
from nlflow.flows.solver import solve
from nlflow.flows.trackers import Callback, Tracker
from nlflow.store.encoding import digest
from nlflow.store.identity import described

if TYPE_CHECKING:
    from nlflow.affinities import Affinity
    from nlflow.denoising.noise import NoiseEstimate
    from nlflow.domains import Grid
    from nlflow.kernels import Kernel

Array = NDArray[Any]
Tell = Callable[[float], Any]
"""Gets the share of the work that is done, in [0, 1]."""

EPSILON = 0.1
"""By how much of the noise samples are moved for a divergence."""
_KEPT = 2  # sets of weights
_MOST_BYTES = 2**28  # of the weights that are kept


def within(tell: Tell | None, low: float, high: float) -> Tell | None:
    if tell is None:
        return None
    # The last share of a part is its end exactly; sums of shares may pass it by rounding.
    return lambda share: tell(high if share >= 1 else low + share * (high - low))


def check_progress(progress: Any) -> bool:
    """Return whether progress is told."""
    return callable(progress) or check_flag("progress", progress, ", or a callable of the share that is done")


@contextmanager
def telling(progress: bool | Tell, label: str) -> Iterator[Tell | None]:
    if not check_progress(progress) or callable(progress):
        yield progress if callable(progress) else None
        return
    from nlflow.backends.progress import bar

    with bar(total=1.0, desc=label, bar_format="{l_bar}{bar}| {elapsed}<{remaining}") as shown:
        yield lambda share: shown.update(share - shown.n)


class Trail:
    """The course of the last call of `nlflow.denoise` that had it as ``progress``; work is kept for the next call.

    Parameters
    ----------
    tell : callable, optional
        Gets the share of the work that is done, from 0 to 1; what it raises ends the call.

    Attributes
    ----------
    course : dict of str to array
        Of the states of the last call, the input first: ``t``, the flow's time, and ``distance`` from the constant that
        the J-flow tends to. That is a root mean square over samples in the units of the input (of stabilized counts for
        counts), to which channels add in units of their noise. For ``pixels`` its squares are weighted by the degrees,
        and there are also ``J`` and ``E``, over the sum of the degrees, in units of the squared noise. Empty without
        noise, with `separate`, for noise that varies or, but for ``pixels``, is correlated, and for few counts and
        recordings that were denoised on several scales.
    reused : int
        How often weights of ``pixels`` were used again.

    Notes
    -----
    The last estimate of the noise is kept, and the weights of the last two flows of ``pixels`` while they take at most
    256 MiB, for calls with the same input. Use it in one thread at a time; it is refused for tensors.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import denoise
    >>> from nlflow.denoising import Trail
    >>> trail, noisy = Trail(), np.random.default_rng(0).normal(0, 1, (32, 32))
    >>> for fidelity in (0.1, 0.2):
    ...     result = denoise(noisy, 1, quality="pixels", fidelity=fidelity, steps=4, progress=trail)
    >>> trail.reused, trail.course["t"].tolist(), bool(np.all(np.diff(trail.course["E"]) < 0))
    (1, [0.0, 1.0, 2.0, 3.0, 4.0], True)
    """

    def __init__(self, tell: Tell | None = None) -> None:
        self.tell = tell
        self.course: dict[str, NDArray[np.float64]] = {}
        self.reused = 0
        self._kept: OrderedDict[str, tuple[Affinity, list[Warning | str]]] = OrderedDict()
        self._found: dict[str, tuple[str, Any]] = {}

    def __call__(self, share: float) -> None:
        """Pass the share on."""
        if self.tell is not None:
            self.tell(share)

    def estimate(self, signal: Array, missing: NDArray[np.bool_] | None) -> NDArray[np.float64]:
        """Return what `estimate_sigmas` finds."""
        from nlflow.denoising.noise.finding.sigma import estimate_sigmas

        return self._once("levels", estimate_sigmas, signal, missing)  # type: ignore[no-any-return]

    def examine(self, samples: Array, missing: NDArray[np.bool_] | None) -> NoiseEstimate:
        """Return what `nlflow.denoising.noise.finding.verdict.examine` finds."""
        from nlflow.denoising.noise.finding.verdict import examine

        return self._once("verdict", examine, samples, missing)  # type: ignore[no-any-return]

    def _once(self, name: str, look: Callable[..., Any], samples: Array, missing: NDArray[np.bool_] | None) -> Any:
        parts = [samples] if missing is None else [samples, missing]
        key = repr([(part.dtype.str, part.shape, digest(np.ascontiguousarray(part).data)) for part in parts])
        if self._found.get(name, ("",))[0] != key:
            self._found[name] = key, look(samples, missing)
        return self._found[name][1]

    def weights(
        self, build: Callable[[], Affinity], kernel: Kernel, grid: Grid, compared: Array, *settings: Any
    ) -> Affinity:
        """Return weights, built or kept; warnings of the building come again."""
        content = digest(np.ascontiguousarray(compared).data)
        key = described((kernel, grid, compared.dtype.str, compared.shape, settings, content))
        if key in self._kept:
            self.reused += 1
            self._kept.move_to_end(key)
        else:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                built = build()
            self._kept[key] = built, [one.message for one in caught]
        operator, told = self._kept[key]
        for message in told:
            warn_caller(message)  # a Warning keeps its category
        while len(self._kept) > _KEPT or sum(one.memory_bytes for one, _ in self._kept.values()) > _MOST_BYTES:
            self._kept.popitem(last=False)
        return operator


@dataclass(frozen=True)
class Problem:
    """A flow that denoises, for `nlflow.solve`.

    Attributes
    ----------
    flow : GradientFlow or GroupFlow
        Its observed signal, of shape (..., C), is in units of the noise.
    integrator : Integrator
    t : float
        End time.
    rules : tuple of Tracker
        Stopping rules.
    back : callable
        From a signal of the flow to an estimate in the units and the shape of the input.
    told : dict
        Entries of `DenoiseInfo`.
    """

    flow: Flow
    integrator: Integrator
    t: float
    rules: tuple[Tracker, ...] = ()
    back: Callable[[Array], Array] = lambda u: u
    told: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Watch:
    """A caller's wishes."""

    every: bool = False  # all estimates of the path, and no rule that ends it early
    limit: float | None = None  # bytes that it may use at most
    tell: Tell | None = None
    trail: Trail | None = None  # which keeps the course of the flow
    device: Device = CPU  # where flows of groups of arrays run


ALONE = Watch()
"""Nothing beside the result."""


@dataclass
class Run:
    """Estimates and notes."""

    path: list[Array]
    told: dict[str, Any] = field(default_factory=dict)


class _Follower(Tracker):
    """Tell how far a flow is, and write its course down.

    What telling raises is kept as `raised`: the time loop would answer some exceptions with a result that ends early.
    """

    name = "follower"

    def __init__(self, tell: Tell | None, trail: Trail | None) -> None:
        super().__init__()
        self.raised: BaseException | None = None
        self._tell, self._trail = tell, trail
        self._rows: list[tuple[float, ...]] = []

    def start(self, flow: Flow, u: Array, t: float, end: float) -> None:
        self._end, self._rows = end, []

    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        """Tell the share of the time that has passed."""
        if self._trail is not None:
            self._note(flow, u, t)
        if self._tell is None:
            return None
        try:
            self._tell(t / self._end)
        except BaseException as error:
            self.raised = error
            return "ended by the caller"
        return None

    def _note(self, flow: Flow, u: Array, t: float) -> None:
        from nlflow.flows.linear import LinearFlow
        from nlflow.functionals.energies import J

        functional = flow.functional
        if functional is not None and isinstance(flow, LinearFlow):
            average = flow.average(u)
            values = [one.value(u, normalize=True, average=average) for one in (functional, J(functional.given))]
            self._rows.append((t, *values, flow.distance_to_constant(u)))

    def during(self, t: float, share: float) -> None:
        """Tell the share of the time that has passed within a long step, and end it with what telling raises."""
        if self._tell is not None:
            try:
                self._tell((t + share) / self._end)
            except BaseException as error:
                self.raised = error
                raise

    def finish(self) -> None:
        """Leave the course to the trail."""
        if self._trail is not None and self._rows:
            columns = np.array(self._rows).reshape(-1, 4).T
            self._trail.course = dict(zip(("t", "E", "J", "distance"), columns.copy(), strict=True))


def run(problem: Problem, watch: Watch) -> tuple[list[Array], Solution[Any]]:
    path: list[Array] = []
    trackers = list(problem.rules)
    if watch.every:
        trackers = [Callback(lambda t, u, flow: path.append(u) if t > 0 else None)]
    follower = _Follower(watch.tell, watch.trail)
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
    flow: Flow = problem.flow
    u: Any = flow.observed
    memory: dict[str, Any] = {}
    path = []
    for step in range(round(problem.t)):
        u, _ = problem.integrator.advance(flow, u, float(step), step + 1.0, memory)
        flow = flow.following(u, memory)
        path.append(u)
    return path


def select(
    rule: str,
    f: Array,
    path: list[Array],
    rerun: Callable[[Array], list[Array]],
    sigma: Array | float,
    seen: Any,
    seed: int,
    units: Array,
) -> tuple[int, float | None, str]:
    """Return which estimate of a path to take, its estimated mean squared error, and why.

    `rerun` gives the path of f (..., C) with its samples moved. `sigma` is the relative noise, `seen` marks samples
    with data, and `units` (C,) are the noise of each channel in the unit of the risk.
    """
    from nlflow.denoising.noise.risk import discrepancy, perturbation, sure

    relative = np.broadcast_to(sigma, f.shape)[seen]
    if rule == "discrepancy":
        residuals = [discrepancy(f[seen], u[seen], relative) for u in path]
        best = int(np.argmin(np.abs(np.array(residuals) - 1)))
        return best, None, f"discrepancy: rms residual of {residuals[best]:.4g} sigma, the nearest to sigma"
    signs = perturbation(f.shape, rng=seed, dtype=f.dtype)
    moved = rerun(f + np.copysign(f.dtype.type(EPSILON), signs))

    def risk(u: Array, v: Array) -> float:
        """Return the mean over the channels, each in its own units of noise."""
        arrays = (f[seen], u[seen], v[seen], signs[seen])
        each = []
        for c in range(len(units)):
            y, estimate, perturbed, b = (x[..., c] for x in arrays)
            each.append(sure(y, estimate, perturbed, b, EPSILON, relative[..., c]))
        return float(np.mean(units**2 * each))

    risks = [risk(u, v) for u, v in zip(path, moved, strict=True)]
    best = int(np.argmin(risks))
    return best, risks[best], f"SURE: least estimated risk, of {len(path)} estimates the number {best + 1}"
