"""Misfits g(u, f), convex in u and least at u = f."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.errors import InputError, all_digits, check_number


class Misfit(ABC):
    """Contract of a misfit g(u, f), element by element in float64.

    `degree` is that of `scaled`; `curvature` bounds the second derivative.
    """

    degree: int
    curvature: float = math.inf

    @abstractmethod
    def value(self, u: Any, f: Any, smoothing: float = 0.0) -> Floats:
        """Return g(u, f), or a smooth function near it."""

    @abstractmethod
    def slopes(self, u: Any, f: Any, smoothing: float = 0.0) -> tuple[Floats, Floats]:
        """Return first and second derivatives of `value`."""

    def bent(self, u: Any, f: Any, smoothing: float, dual: Floats) -> Floats:
        """Return the second derivative, or what Newton's method takes for it beside a dual field."""
        del dual
        return self.slopes(u, f, smoothing)[1]

    @abstractmethod
    def prox(self, v: Any, f: Any, step: Any) -> Floats:
        """Return argmin_z g(z, f) + (z - v)^2 / (2 step)."""

    @abstractmethod
    def best(self, pull: Any, f: Any, box: NDArray[Any]) -> Floats:
        """Return argmax_z pull z - g(z, f) over a pair of bounds that hold f."""

    def scaled(self, size: float, shift: Any) -> Misfit:
        """Return g' with g(size u + shift, size f + shift) = size^degree g'(u, f)."""
        del size, shift
        return self

    def floor(self, u: Floats) -> Floats | None:
        """Return what u may not be below, nor equal where g is infinite there, or None."""
        del u
        return None

    def check(self, f: NDArray[Any]) -> None:  # noqa: B027  # a hook: most take any signal
        """Raise `InputError` for a signal that it does not take."""

    def refusal(self) -> str:
        """Return why explicit steps do not take it, or an empty text."""
        return ""

    def __repr__(self) -> str:
        given = ", ".join(all_digits(value) for name, value in sorted(vars(self).items()) if not name.startswith("_"))
        return f"{type(self).__name__}({given})"


class Squares(Misfit):
    """Misfit (u - f)^2 / 2."""

    degree = 2
    curvature = 1.0

    def value(self, u: Any, f: Any, smoothing: float = 0.0) -> Floats:
        return np.asarray((u - f) ** 2 / 2)

    def slopes(self, u: Any, f: Any, smoothing: float = 0.0) -> tuple[Floats, Floats]:
        d = np.asarray(u - f, dtype=np.float64)
        return d, np.ones_like(d)

    def prox(self, v: Any, f: Any, step: Any) -> Floats:
        return np.asarray(v + (f - v) * (step / (1 + step)))

    def best(self, pull: Any, f: Any, box: NDArray[Any]) -> Floats:
        return np.asarray(np.clip(f + pull, box[0], box[1]))


@underflowing
class L1(Misfit):
    """Misfit |u - f|, channels added up.

    (Nikolova 2004, Journal of Mathematical Imaging and Vision 20, 99-120; with total variation Chan and Esedoglu 2005,
    doi 10.1137/040604297.)
    """

    degree = 1

    def value(self, u: Any, f: Any, smoothing: float = 0.0) -> Floats:
        return np.asarray(np.hypot(u - f, smoothing))

    def slopes(self, u: Any, f: Any, smoothing: float = 0.0) -> tuple[Floats, Floats]:
        d = np.asarray(u - f, dtype=np.float64)
        if smoothing == 0:
            return np.sign(d), np.zeros_like(d)
        length = np.hypot(d, smoothing)
        return d / length, (smoothing / length) ** 2 / length

    def bent(self, u: Any, f: Any, smoothing: float, dual: Floats) -> Floats:
        """Return (1 - q d / l) / l with d = u - f, l its smoothed length and q the dual field.

        (Chan, Golub and Mulet 1999, doi 10.1137/S1064827596299767.)
        """
        d = np.asarray(u - f, dtype=np.float64)
        length = np.hypot(d, smoothing)
        return np.asarray((1 - dual * (d / length)) / length)

    def prox(self, v: Any, f: Any, step: Any) -> Floats:
        return np.asarray(f + np.sign(v - f) * np.maximum(np.abs(v - f) - step, 0))

    def best(self, pull: Any, f: Any, box: NDArray[Any]) -> Floats:
        return np.asarray(np.where(np.abs(pull) <= 1, f, np.where(pull > 0, box[1], box[0])))

    def refusal(self) -> str:
        return "the slope of |u - f| jumps at u = f, which no explicit step is stable for"


@underflowing
class Huber(Misfit):
    """Misfit (u - f)^2 / 2 up to |u - f| = delta, and delta |u - f| - delta^2 / 2 beyond (Huber 1964).

    (doi 10.1214/aoms/1177703732.)

    Parameters
    ----------
    delta : float
        > 0, in the units of the signal.
    """

    degree = 2
    curvature = 1.0

    def __init__(self, delta: float) -> None:
        self.delta = check_number("delta", delta, minimum=0, strict=True)

    def value(self, u: Any, f: Any, smoothing: float = 0.0) -> Floats:
        d = np.abs(u - f)
        near = np.minimum(d, self.delta)
        return np.asarray(near * (d - near / 2))

    def slopes(self, u: Any, f: Any, smoothing: float = 0.0) -> tuple[Floats, Floats]:
        d = np.asarray(u - f, dtype=np.float64)
        return np.clip(d, -self.delta, self.delta), np.where(np.abs(d) <= self.delta, 1.0, smoothing)

    def prox(self, v: Any, f: Any, step: Any) -> Floats:
        d = v - f
        beyond = np.abs(d) > self.delta * (1 + step)
        return np.asarray(f + np.where(beyond, d - step * self.delta * np.sign(d), d / (1 + step)))

    def best(self, pull: Any, f: Any, box: NDArray[Any]) -> Floats:
        inside = np.clip(f + pull, box[0], box[1])
        return np.asarray(np.where(np.abs(pull) <= self.delta, inside, np.where(pull > 0, box[1], box[0])))

    def scaled(self, size: float, shift: Any) -> Huber:
        del shift
        return Huber(self.delta / size)


@underflowing
class KullbackLeibler(Misfit):
    """Misfit u - f + f log(f / u) of counts f >= 0 with means u > 0, for Poisson noise.

    (Le, Chartrand and Asaki 2007, doi 10.1007/s10851-007-0652-y.)
    """

    degree = 1

    def __init__(self) -> None:
        self._shift: Any = 0.0

    def value(self, u: Any, f: Any, smoothing: float = 0.0) -> Floats:
        v, c = np.asarray(u + self._shift, dtype=np.float64), f + self._shift + 0 * u
        count = np.maximum(c, 0) + smoothing
        ratio = np.where(count > 0, v, 1) / np.where(count > 0, count, 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            # v - c - c log(v / c) = c (x - log1p(x)) with x = v / c - 1, which does not cancel near v = c.
            g = np.where(count > 0, count * (ratio - 1 - np.log(ratio)), v)
        return np.asarray(np.where((v > 0) | ((v == 0) & (count == 0)), g, math.inf))

    def slopes(self, u: Any, f: Any, smoothing: float = 0.0) -> tuple[Floats, Floats]:
        v = np.asarray(u + self._shift, dtype=np.float64)
        count = np.maximum(f + self._shift, 0) + smoothing
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            part = np.where(count > 0, count / v, 0.0)
            return 1 - part, np.where(count > 0, part / v, 0.0)

    def prox(self, v: Any, f: Any, step: Any) -> Floats:
        moved, count = v + self._shift - step, np.maximum(f + self._shift, 0)
        root = np.hypot(moved, 2 * np.sqrt(step * count))
        # Of two forms the one that does not cancel.
        other = 2 * step * count / np.where(root - moved > 0, root - moved, 1.0)
        return np.asarray(np.where(moved >= 0, (moved + root) / 2, other) - self._shift)

    def best(self, pull: Any, f: Any, box: NDArray[Any]) -> Floats:
        count = np.maximum(f + self._shift, 0)
        found = count / np.where(pull < 1, 1 - pull, 1.0)
        return np.asarray(np.clip(np.where(pull < 1, found - self._shift, box[1]), box[0], box[1]))

    def scaled(self, size: float, shift: Any) -> KullbackLeibler:
        result = KullbackLeibler()
        result._shift = shift / size
        return result

    def floor(self, u: Floats) -> Floats | None:
        return np.asarray(0 * u - self._shift)

    def check(self, f: NDArray[Any]) -> None:
        if float(f.min()) < 0:
            raise InputError(
                f"observed: got {float(f.min()):g} somewhere, expected counts >= 0 for KullbackLeibler(); subtract no "
                "offset from counts, or use squares"
            )
