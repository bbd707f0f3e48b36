"""When a tracker looks: after a number of steps, or at times of its own, at which steps end."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nlflow.errors import InputError, check_floats, check_integer, check_number

_SAME = 1e-12  # relative: times closer than this are one; far above their rounding, far below a step


class Times:
    """When a tracker looks.

    Parameters
    ----------
    every : int
        After this many steps, at the start and at the end. Only where neither of the others is given.
    interval : float, optional
        At 0, interval, 2 interval, ... up to the end.
    at : array_like, optional
        At these times, which increase.

    Raises
    ------
    InputError
    """

    def __init__(self, every: int = 1, interval: float | None = None, at: ArrayLike | None = None) -> None:
        self.every = check_integer("every", every, minimum=1)
        self.interval = None if interval is None else check_number("interval", interval, minimum=0, strict=True)
        self.at = None if at is None else _increasing(at)
        given = [name for name, value in (("interval", self.interval), ("at", self.at)) if value is not None]
        if len(given) == 2 or (given and every != 1):
            names = given if len(given) == 2 else ["every", *given]
            raise InputError(f"{names[0]}: got it together with {names[1]}, expected one of them; leave the other out")

    @property
    def own(self) -> bool:
        """Whether there are times of its own, rather than numbers of steps."""
        return self.interval is not None or self.at is not None

    def check(self, end: float, whole: str | None) -> None:
        """Raise `InputError` for times that a run to `end` does not reach.

        Parameters
        ----------
        end : float
        whole : str or None
            The name of an integrator whose steps have length 1.
        """
        if self.interval is not None:
            if self.interval < _SAME * end:
                raise InputError(
                    f"interval: got {self.interval:g}, expected more than {_SAME:g} of the end time {end:g}"
                )
            if whole and self.interval % 1:
                raise InputError(
                    f"interval: got {self.interval:g}, expected a whole number: steps of {whole} have length 1"
                )
        if self.at is not None:
            if self.at[-1] > end * (1 + _SAME):
                raise InputError(f"at: got {self.at[-1]:g} after the end time {end:g}; leave it out or raise t")
            if whole and np.any(self.at % 1):
                raise InputError(
                    f"at: got {self.at.tolist()[:6]}, expected whole numbers: steps of {whole} have length 1"
                )

    def after(self, t: float) -> float:
        """Return the first of its own times that is later than t; infinity where there is none."""
        least = t * (1 + _SAME)
        if self.interval is not None:
            number = math.floor(t / self.interval)
            return next(x for k in range(3) if (x := (number + k) * self.interval) > least)
        if self.at is None:
            return math.inf
        later = self.at[self.at > least]
        return float(later[0]) if later.size else math.inf

    def due(self, steps: int, t: float) -> bool:
        """Whether to look after so many steps, at time t."""
        if self.interval is not None:
            return abs(round(t / self.interval) * self.interval - t) <= _SAME * t
        if self.at is not None:
            return bool(np.any(np.abs(self.at - t) <= _SAME * t))
        return steps % self.every == 0

    def words(self) -> str:
        """Return its own times in words, which tell a run from others; empty where there are none."""
        if self.interval is not None:
            return f"interval={self.interval!r}"
        return "" if self.at is None else f"at={self.at.tolist()!r}"


def landing(own: list[Times], t: float, output: float) -> float:
    """Return where the step from t has to end at the latest: the next output time, or an earlier time of a tracker."""
    first = min((times.after(t) for times in own), default=math.inf)
    return output if output <= first * (1 + _SAME) else first


def _increasing(at: Any) -> NDArray[np.float64]:
    times = check_floats("at", at, ndim=1)
    if times[0] < 0 or np.any(np.diff(times) <= 0):
        raise InputError(f"at: got {times.tolist()[:6]}, expected increasing times >= 0")
    return times
