"""Events of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, namespace, scalar
from nlflow.errors import (
    InputError,
    NumericalError,
    check_flag,
    check_integer,
    check_number,
    check_text,
    is_function,
    kind_of,
)
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.base import Integrator, StepFailureError
from nlflow.flows.integrators.runge_kutta import PIECES
from nlflow.flows.trackers import Tracker

_CROWD = 20  # resets of one event within its tolerance from each other, after which they have no end
_DIGITS = 4e-16  # of a time: what two moments are apart at least


class Event(Tracker):
    """Locate the moments at which g(t, u) changes its sign; a step ends there, and an action follows.

    An even number of changes within one step is not seen: take shorter steps.

    Parameters
    ----------
    function : callable
        g of (t, u), a number, continuous along the flow.
    direction : {0, 1, -1}
        1: only where g rises through 0, -1: only where it falls.
    action : {'record', 'stop'} or callable
        What follows beside the record: nothing, the end of the run, or a reset ``action(t, u)``, which returns the
        signal to go on with.
    tol : float, optional
        Absolute tolerance of the time, beside the error of the steps; 1e-10 of the end time by default.
    signals : bool
        Keep the signal at each event, before a reset.
    name : str
        Key in ``Solution.records``, for times ``t`` and, with `signals`, ``u``.

    Raises
    ------
    InputError
        In `solve`, for a g that is no finite number at the start, steps that are layers, noise, and a reset to another
        shape or dtype.

    Examples
    --------
    A ball that bounces: (x, v) with x' = v and v' = -1, which comes down at t = 2 and 4 and loses nothing.

    >>> import numpy as np
    >>> from nlflow import GradientFlow, J, Points, Reaction, solve
    >>> from nlflow.affinities import Unlinked
    >>> from nlflow.flows import Event
    >>> fall = Reaction(lambda u: np.stack([u[..., 1], 0 * u[..., 1] - 1], -1), (-9, 9), components=2, bound=1)
    >>> flow = GradientFlow(J(Unlinked(Points([0.0]))), "degree", reaction=fall)
    >>> ground = Event(lambda t, u: u[0, 0], direction=-1, action=lambda t, u: np.array([[0.0, -u[0, 1]]]))
    >>> found = solve(flow, np.array([[0.0, 1.0]]), t=5.0, trackers=[ground])
    >>> np.round(found.records["event"]["t"], 8).tolist(), np.round(found.final, 6).tolist()
    ([2.0, 4.0], [[0.5, 0.0]])
    """

    def __init__(
        self,
        function: Callable[[float, Array], Any],
        *,
        direction: int = 0,
        action: str | Callable[[float, Array], Array] = "record",
        tol: float | None = None,
        signals: bool = False,
        name: str = "event",
    ) -> None:
        super().__init__(1)
        if not is_function(function):
            raise InputError(f"function: got {kind_of(function)}, expected a callable of (t, u)")
        given: Any = action
        if not is_function(given) and not (isinstance(given, str) and given in ("record", "stop")):
            raise InputError(f"action: got {action!r}, expected 'record', 'stop' or a callable of (t, u)")
        if check_integer("direction", direction) not in (-1, 0, 1):
            raise InputError(f"direction: got {direction}, expected -1, 0 or 1")
        self.function, self.direction, self.action = function, int(direction), action
        self.tol = None if tol is None else check_number("tol", tol, minimum=0, strict=True)
        self.signals, self.name = check_flag("signals", signals), check_text("name", name)
        self._tol, self._end, self._sign, self._crowd = 0.0, 0.0, 0.0, 0
        self._found: list[tuple[float, Array]] = []

    # ---- as a tracker

    def start(self, flow: Flow, u: Array, t: float, end: float) -> None:
        self._found, self._crowd = [], 0
        self._tol, self._end = 1e-10 * end if self.tol is None else self.tol, end
        if flow.noise is not None:
            raise InputError(
                f"trackers: the event {self.name!r} is located by shorter steps, got a flow with noise, of which they "
                "are another path; use a Callback"
            )
        try:
            self._value(t, u)
        except NumericalError as error:
            raise InputError(f"{error}; start where it has one") from error

    def begin(self, flow: Flow, u: Array, t: float, about: Any) -> None:
        self.arm(t, u, flow)

    def look(self, flow: Flow, u: Array, t: float) -> str | None:
        return None

    def record(self) -> dict[str, NDArray[np.float64]]:
        record = {"t": np.array([t for t, _ in self._found], dtype=np.float64)}
        if self.signals and self._found:
            record["u"] = np.stack([np.asarray(u) for _, u in self._found])
        return record

    def restore(self, record: dict[str, NDArray[np.float64]]) -> None:
        signals = record["u"] if "u" in record else [np.empty(0)] * len(record["t"])
        self._found = list(zip(record["t"].tolist(), signals, strict=True))

    def words(self) -> str:
        """Return what tells the event from others."""
        kind = self.action if isinstance(self.action, str) else getattr(self.action, "__qualname__", "reset")
        return f"event {self.name!r} {self.direction} {kind} {self.tol!r}"

    # ---- what the time loop asks

    def _value(self, t: float, u: Array) -> float:
        value = self.function(t, u)
        kind, shape = str(getattr(value, "dtype", type(value).__name__)), tuple(getattr(value, "shape", ()))
        if math.prod(shape) != 1 or "complex" in kind or isinstance(value, str | bytes | list | tuple):
            got = f"shape {shape} of {kind}" if hasattr(value, "shape") else kind
            raise InputError(f"function: the event {self.name!r} returns {got} at t={t:.6g}, expected a number")
        try:
            number = scalar(value.reshape(())) if hasattr(value, "reshape") else float(value)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"function: the event {self.name!r} returns {type(value).__name__} at t={t:.6g}, expected a number"
            ) from error
        if not math.isfinite(number):
            raise NumericalError(
                f"function: the event {self.name!r} is {number} at t={t:.6g}, expected a finite number"
            )
        return number

    def arm(self, t: float, u: Array, flow: Flow) -> None:
        """Keep the sign of g at t, where it is 0 the sign that it is about to have."""
        value = self._value(t, u)
        if value == 0 and self._sign == 0:
            ahead = math.sqrt(self._tol * self._end) / 10
            now = flow.when(t)
            value = self._value(t + ahead, u + ahead * now.velocity(u))
        if value != 0:
            self._sign = math.copysign(1.0, value)

    def disarm(self) -> None:
        """Forget the sign of g, after a reset."""
        self._sign = 0.0

    def crossed(self, t: float, u: Array) -> bool:
        """Whether g has reached or crossed 0 in its direction since it was armed."""
        value = self._value(t, u)
        if self._sign == 0 or value * self._sign > 0:
            return False
        return self.direction in (0, -self._sign)

    def located(
        self, integrator: Integrator, flow: Flow, now: tuple[Array, float], end: tuple[Array, float, dict[str, Any]],
        memory: dict[str, Any],
    ) -> tuple[Array, float, dict[str, Any]]:  # fmt: skip
        """Return signal, time and memory of the step that ends where g has just crossed 0, by the Illinois method."""
        u, low = now
        below, best, high = self._value(low, u), end, end[1]
        above = self._value(high, end[0])
        if below * self._sign < 0:  # it has jumped by a reset of another event
            below = 0.0
        width = max(self._tol, _DIGITS * max(abs(low), abs(high)))
        side = 0
        while high - low > width:
            if below == 0:  # nothing is known of where g comes back to 0, not even how far away
                ahead = math.sqrt(width * (high - low))
            else:
                ahead = below / (below - above) * (high - low)
            # Not nearer to an end than half of what is asked for: then the interval is one of them.
            t = min(max(low + ahead, low + 0.5 * width), high - 0.5 * width)
            trial = {**memory, PIECES: []} if PIECES in end[2] else dict(memory)
            v, reached = u, now[1]
            while reached < t:
                v, reached = integrator.advance(flow, v, reached, t, trial)
            v = flow.when(t).held(v)
            value = self._value(t, v)
            if value * self._sign > 0:
                above = above / 2 if side == -1 else above
                low, below, side = t, value, -1
            else:
                below = below / 2 if side == 1 else below
                high, above, side, best = t, value, 1, (v, t, trial)
        return best

    def happen(self, flow: Flow, u: Array, t: float) -> Array | None:
        """Record the event; return the signal of a reset, or None."""
        crowded = bool(self._found) and t - self._found[-1][0] <= 2 * max(self._tol, _DIGITS * abs(t))
        self._crowd = self._crowd + 1 if crowded else 0
        if self._crowd >= _CROWD:
            raise StepFailureError(
                f"the event {self.name!r} happened {_CROWD} times in a row within its tolerance {self._tol:.3g} at "
                f"t={t:.6g}: resets follow each other without end; let the reset end them, or stop there"
            )
        self._found.append((t, u if self.signals else u[:0]))
        self._sign = -self._sign  # also where g is 0 there
        if isinstance(self.action, str):
            return None
        reset = self.action(t, namespace(u).asarray(u, copy=True))
        if tuple(getattr(reset, "shape", ())) != tuple(u.shape) or getattr(reset, "dtype", None) != u.dtype:
            got = f"shape {tuple(reset.shape)} of {reset.dtype}" if hasattr(reset, "shape") else type(reset).__name__
            raise InputError(
                f"action: the event {self.name!r} returns {got}, expected a signal of shape {tuple(u.shape)} and "
                f"{u.dtype}"
            )
        return flow.check_signal(f"action of the event {self.name!r}", reset)
