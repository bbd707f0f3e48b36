"""Trackers and stopping rules."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nlflow._array import Array, Pending, fetch, is_tensor, namespace, root_mean_square, same_kind, scalar
from nlflow.backends.progress import bar
from nlflow.errors import (
    FileFormatError,
    InputError,
    NlflowError,
    check_array,
    check_detached,
    check_increasing,
    check_integer,
    check_number,
    check_path,
    is_function,
    kind_of,
    warn_caller,
)
from nlflow.flows.flow import Flow
from nlflow.functionals.krylov import default_rtol
from nlflow.store.atomic import locked
from nlflow.store.checkpoints import Checkpoints, Fits

SAME = 1e-12  # relative: times closer than this are one; far above their rounding, far below a step


class Times:
    """When a tracker looks."""

    def __init__(self, every: int = 1, interval: float | None = None, at: ArrayLike | None = None) -> None:
        self.every = check_integer("every", every, minimum=1)
        self.interval = None if interval is None else check_number("interval", interval, minimum=0, strict=True)
        self.at = None if at is None else check_increasing("at", at, "times", minimum=0)
        given = [name for name, value in (("interval", self.interval), ("at", self.at)) if value is not None]
        if len(given) == 2 or (given and every != 1):
            names = given if len(given) == 2 else ["every", *given]
            raise InputError(f"{names[0]}: got it together with {names[1]}, expected one of them; leave the other out")

    @property
    def own(self) -> bool:
        return self.interval is not None or self.at is not None

    def check(self, end: float, whole: str | None) -> None:
        """Raise `InputError` for times that no step of a run to `end` meets; `whole` names steps of length 1."""
        if self.interval is not None:
            if self.interval < SAME * end:
                raise InputError(
                    f"interval: got {self.interval:g}, expected more than {SAME:g} of the end time {end:g}"
                )
            if whole and self.interval % 1:
                raise InputError(
                    f"interval: got {self.interval:g}, expected a whole number: steps of {whole} have length 1"
                )
        if self.at is not None:
            if self.at[-1] > end * (1 + SAME):
                raise InputError(f"at: got {self.at[-1]:g} after the end time {end:g}; leave it out or raise t")
            if whole and np.any(self.at % 1):
                raise InputError(
                    f"at: got {self.at.tolist()[:6]}, expected whole numbers: steps of {whole} have length 1"
                )

    def after(self, t: float) -> float:
        least = t * (1 + SAME)
        if self.interval is not None:
            number = math.floor(t / self.interval)
            return next(x for k in range(3) if (x := (number + k) * self.interval) > least)
        if self.at is None:
            return math.inf
        later = self.at[self.at > least]
        return float(later[0]) if later.size else math.inf

    def due(self, steps: int, t: float) -> bool:
        if self.interval is not None:
            return abs(round(t / self.interval) * self.interval - t) <= SAME * t
        if self.at is not None:
            return bool(np.any(np.abs(self.at - t) <= SAME * t))
        return steps % self.every == 0

    def words(self) -> str:
        if self.interval is not None:
            return f"interval={self.interval!r}"
        return "" if self.at is None else f"at={self.at.tolist()!r}"


About = Callable[[], dict[str, Any]]

_STILL = 1e-2  # of the size of a signal: what one at rest may move by until the end


class Tracker(ABC):
    """Base of trackers and stopping rules.

    Parameters
    ----------
    every : int
        Look after this many steps, at the start and at the end.
    interval : float, optional
        Instead: look at 0, interval, 2 interval, ..., where steps then end.
    at : array_like, optional
        Instead: look at these times, increasing, at most the end time, where steps then end.

    Attributes
    ----------
    times : nlflow.flows.trackers.Times
    """

    name: str = ""
    times: Times = Times()

    def __init__(self, every: int = 1, *, interval: float | None = None, at: ArrayLike | None = None) -> None:
        self.times = Times(every, interval, at)

    def start(self, flow: Flow, u: Array, t: float, end: float) -> None:  # noqa: B027  # a hook
        """Prepare for an integration from t to `end`."""

    def begin(self, flow: Flow, u: Array, t: float, about: About) -> None:  # noqa: B027  # a hook
        """Set out from t, after `start` and `restore`; ``about()`` returns the provenance of the result."""

    @abstractmethod
    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        """Look at the signal; return a reason to stop, or None."""

    def at_once(self, flow: Flow) -> bool:
        """Whether the next look needs a signal that is known to be finite."""
        del flow
        return True

    def forget(self, t: float) -> None:  # noqa: B027  # a hook
        """Drop what was collected after t."""

    def during(self, t: float, share: float) -> None:  # noqa: B027  # a hook
        """Hear which share of the step from t is done."""

    def finish(self) -> None:  # noqa: B027  # a hook
        """Tidy up, however the integration ended."""

    def record(self) -> dict[str, NDArray[np.float64]]:
        """Return what was collected, for `Solution.records`."""
        return {}

    def restore(self, record: dict[str, NDArray[np.float64]]) -> None:  # noqa: B027  # a hook
        """Take up what was collected before a checkpoint."""


class _Series(Tracker):
    def __init__(self, every: int = 1, *, interval: float | None = None, at: ArrayLike | None = None) -> None:
        super().__init__(every, interval=interval, at=at)
        self._rows: list[tuple[float, Pending | float]] = []

    def start(self, flow: Flow, u: Array, t: float, end: float) -> None:
        self._rows = []

    def at_once(self, flow: Flow) -> bool:
        del flow
        return False

    def forget(self, t: float) -> None:
        """Drop the numbers after t."""
        self._rows = [row for row in self._rows if row[0] <= t]

    def _add(self, t: float, value: Pending | float) -> None:
        if not self._rows or self._rows[-1][0] != t:
            self._rows.append((t, value))

    def record(self) -> dict[str, NDArray[np.float64]]:
        """Return times and values."""
        times, values = [row[0] for row in self._rows], fetch([row[1] for row in self._rows])
        return {"t": np.array(times, np.float64), "value": np.array(values, np.float64)}

    def restore(self, record: dict[str, NDArray[np.float64]]) -> None:
        self._rows = list(zip(record["t"].tolist(), record["value"].tolist(), strict=True))


class Energy(_Series):
    """Collect the energy of a flow over time, as ``records['energy']``."""

    name = "energy"

    def start(self, flow: Flow, u: Array, t: float, end: float) -> None:
        if not flow.has_energy:
            raise InputError(
                f"trackers: Energy needs a flow that descends a functional, got {flow!r}, which has none, as where "
                "P is not symmetric or a reaction has no potential; leave it out"
            )
        super().start(flow, u, t, end)

    def at_once(self, flow: Flow) -> bool:
        return not flow.leaves_pending

    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        self._add(t, flow.pending_energy(u))
        return None


class DistanceToConstant(_Series):
    """Collect `Flow.distance_to_constant` over time, as ``records['distance']``."""

    name = "distance"

    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        self._add(t, flow.pending_distance(u))
        return None


class Callback(Tracker):
    """Call ``function(t, u, flow)``; a return value of True, or a text saying why, stops the integration."""

    name = "callback"

    def __init__(
        self,
        function: Callable[[float, Array, Flow], Any],
        every: int = 1,
        *,
        interval: float | None = None,
        at: ArrayLike | None = None,
    ) -> None:
        super().__init__(every, interval=interval, at=at)
        if not is_function(function):
            raise InputError(f"function: got {kind_of(function)}, expected a callable of (t, u, flow)")
        self.function = function

    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        answer = self.function(t, u, flow)
        if isinstance(answer, str):
            return answer or None
        # NumPy and torch have booleans of their own.
        true = answer is True or ("bool" in str(getattr(answer, "dtype", "")) and bool(answer))
        return "asked by the callback" if true else None


class Progress(Tracker):
    """Progress bar on stderr."""

    name = "progress"

    def __init__(self, label: str = "flow") -> None:
        super().__init__(1)
        self.label = label
        self._bar: Any = None

    def start(self, flow: Flow, u: Array, t: float, end: float) -> None:
        self._origin = t
        self._bar = bar(
            total=end - t, desc=self.label, unit="t", mininterval=1.0,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| t={n:.4g}/{total:.4g} [{elapsed}<{remaining}]",
        )  # fmt: skip

    def at_once(self, flow: Flow) -> bool:
        del flow
        return False

    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        self._bar.update(max(t - self._origin - self._bar.n, 0))
        return None

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.close()


def check_place(path: Path, *, folders: bool) -> None:
    """Raise `InputError` where a file cannot be written; `folders` says whether a folder may be there."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or (path.is_dir() and not folders):
        raise InputError(f"path: got {str(path)!r}, expected a file in a folder that exists and can be written")


_SHARE = 0.02  # of the time of a run, at most, goes into checkpoints


class Checkpoint(Tracker):
    """Write a checkpoint from which ``solve(..., resume=path)`` goes on to the same result.

    The one before it is kept as ``<path>.previous``.

    Parameters
    ----------
    path : path
        A new name, or a checkpoint of the same problem (signal, kernel, flow, end and output times, integrator, times
        of trackers), which is replaced atomically.
    seconds : float
        Least time between two checkpoints, longer where writing them would take over 2 % of the run; with 0 one is
        written at each look. The end of the run writes one too.
    every, interval, at
        When it looks; see `Tracker`.
    """

    name = "checkpoint"

    def __init__(
        self,
        path: str | os.PathLike[str],
        seconds: float = 30.0,
        every: int = 1,
        *,
        interval: float | None = None,
        at: ArrayLike | None = None,
    ) -> None:
        super().__init__(every, interval=interval, at=at)
        self.path = check_path("path", path)
        self.seconds = check_number("seconds", seconds, minimum=0)
        self.states = Checkpoints(self.path, "checkpoint")
        self._last = time.monotonic()
        self._cost = 0.0
        self._due: bool | None = None  # whether it is time, where `at_once` has found that out for the next look
        self._write: Callable[[Checkpoints], None] | None = None
        self._lock = ExitStack()

    def start(self, flow: Flow, u: Array, t: float, end: float) -> None:
        check_place(self.path, folders=False)
        self._together(flow, lambda: self._lock.enter_context(locked(self.path, "path")))

    def bind(self, flow: Flow, write: Callable[[Checkpoints], None], fits: Fits) -> None:
        """Take the function that writes a state, and what tells whether a checkpoint fits; see `path`."""
        self._together(flow, lambda: self.states.check_replaceable("path", fits))
        self._write = write

    def _together(self, flow: Flow, action: Callable[[], object]) -> None:
        """Act in the process that writes files; when it fails, all processes raise."""
        failure: NlflowError | None = None
        if flow.affinity.writes(0):
            try:
                action()
            except NlflowError as error:
                failure = error
        if not flow.affinity.agreed(failure is None):
            raise failure or InputError(f"path: the process that writes files cannot write to {str(self.path)!r}")

    def at_once(self, flow: Flow) -> bool:
        self._due = self._is_time(flow)
        return self._due

    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        due, self._due = self._due, None
        if self._is_time(flow) if due is None else due:
            self._save()
        return None

    def _is_time(self, flow: Flow) -> bool:
        return flow.affinity.agreed(time.monotonic() - self._last >= self._pause)  # clocks differ between processes

    def finish(self) -> None:
        try:
            self._save()
        finally:
            self._write = None  # a later run has a state of its own
            self._lock.close()

    @property
    def _pause(self) -> float:
        return max(self.seconds, self._cost / _SHARE) if self.seconds else 0.0

    def _save(self) -> None:
        if self._write is None:
            return
        start = time.monotonic()
        try:
            self._write(self.states)
        except FileFormatError as error:  # a full disk is no reason to lose the run; the last checkpoint stands
            warn_caller(f"checkpoint not written: {error}")
        self._last = time.monotonic()
        self._cost = self._last - start


def _largest(values: Array) -> float:
    xp = namespace(values)
    return scalar(xp.max(xp.abs(values)))


class SteadyState(Tracker):
    """Stop when the rms of du/dt is at most ``rtol`` times that at the start, or ``atol``; one velocity a look."""

    name = "steady_state"

    def __init__(
        self,
        rtol: float = 1e-6,
        atol: float = 0.0,
        every: int = 1,
        *,
        interval: float | None = None,
        at: ArrayLike | None = None,
    ) -> None:
        super().__init__(every, interval=interval, at=at)
        self.rtol = check_number("rtol", rtol, minimum=0)
        self.atol = check_number("atol", atol, minimum=0)
        self._speed = 0.0

    def start(self, flow: Flow, u: Array, t: float, end: float) -> None:
        self._speed = flow.speed(u)
        # What is slow is not at rest: a chain of a small gap is there at the end of a long run only, and nodes of a
        # small measure, which are not seen in a norm, may move fast.
        if self.rtol > 0 and (
            self._speed == 0
            or (
                self._speed <= default_rtol(u) * flow.tension(u)
                and _largest(flow.velocity(u)) * (end - t) <= _STILL * _largest(u)
            )
        ):
            # The threshold, which a resumed run takes up, is this speed; raised, since a product may be rounded down.
            self._speed *= (1 + 1e-9) / self.rtol

    @property
    def _threshold(self) -> float:
        return max(self.rtol * self._speed, self.atol)

    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        speed = flow.speed(u)
        return f"steady state: rms of du/dt is {speed:.3g}" if speed <= self._threshold else None

    def record(self) -> dict[str, NDArray[np.float64]]:
        return {"threshold": np.array([self._threshold]), "speed": np.array([self._speed])}

    def restore(self, record: dict[str, NDArray[np.float64]]) -> None:
        self._speed = float(record["speed"][0])


class DiscrepancyPrinciple(Tracker):
    """Stop when the residual reaches the noise: rms of u - f >= factor * sigma (Morozov's discrepancy principle).

    Parameters
    ----------
    observed : array
        The noisy signal f.
    sigma : float
        Standard deviation of its noise.
    factor : float
    """

    name = "discrepancy"

    def __init__(
        self,
        observed: Array,
        sigma: float,
        factor: float = 1.0,
        every: int = 1,
        *,
        interval: float | None = None,
        at: ArrayLike | None = None,
    ) -> None:
        super().__init__(every, interval=interval, at=at)
        check_detached("observed", observed)
        self.observed = check_array("observed", observed)
        self.sigma = check_number("sigma", sigma, minimum=0)
        self.factor = check_number("factor", factor, minimum=0)

    def start(self, flow: Flow, u: Array, t: float, end: float) -> None:
        if is_tensor(self.observed) is not is_tensor(u):
            same_kind("observed", self.observed, u)
        if tuple(self.observed.shape) != tuple(u.shape):
            raise InputError(f"observed: got shape {tuple(self.observed.shape)}, expected {tuple(u.shape)}, that of u")

    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        residual = root_mean_square(u - self.observed)
        if residual < self.factor * self.sigma:
            return None
        return (
            f"discrepancy: rms residual {residual:.4g} reached {self.factor:g} sigma = {self.factor * self.sigma:.4g}"
        )
