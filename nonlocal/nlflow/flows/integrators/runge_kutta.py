"""Runge-Kutta methods."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nlflow._array import Array, is_numpy, namespace, numbers, plus, scalar, told_of, underflowing
from nlflow._looks import Doubt, doubting
from nlflow.errors import InputError, NumericalError, StabilityError, check_flag, check_number, kind_of
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.base import Around, Integrator, StepFailureError, explicit_limit
from nlflow.flows.integrators.fixed_step import FixedStep
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import is_told
from nlflow.functionals.constraint import TermError, TermInputError

PIECES = "_pieces"
"""Under which name the memory of a step holds a list that takes its pieces, where somebody asks for them."""


FINITE = "_finite"
"""Under which name it holds a signal, and whether it is finite, where a device was asked for that with the error."""


class Tolerances:
    """Tolerances of a local error of O(h^power)."""

    def __init__(self, rtol: float, atol: float, power: float, *, needed: bool = True) -> None:
        self.rtol = check_number("rtol", rtol, minimum=0)
        self.atol = check_number("atol", atol, minimum=0)
        self.power = power
        if needed and self.rtol == 0 and self.atol == 0:
            raise InputError("rtol: got 0 with atol 0, expected at least one of them > 0")

    def measured(self, error: Array, before: Array, after: Array) -> Array:
        xp = namespace(error)
        scale = self.atol + self.rtol * xp.maximum(xp.abs(before), xp.abs(after))
        return weighted(error, scale, positive=self.atol >= float(xp.finfo(error.dtype).smallest_normal))

    def check(self, u: Array, t: float) -> None:
        """Raise `StepFailureError` where rounding is above the tolerances."""
        xp = namespace(u)
        unit = float(xp.finfo(u.dtype).eps) / 2
        if self.rtol >= unit:
            return  # then rounding is allowed whatever the signal is
        rounding = scalar(weighted(unit * xp.abs(u), self.atol + self.rtol * xp.abs(u)))
        if rounding > 1:
            raise StepFailureError(
                f"rtol={self.rtol:g}, atol={self.atol:g}: no step can meet them at t={t:.6g}, where to round the "
                f"signal to {u.dtype} is an error of {rounding:.3g} times the tolerances; raise the tolerances "
                f"(rtol={unit:.2g} is enough), or use float64"
            )

    def check_step(self, h: float, t: float, target: float, failure: str) -> None:
        if h < 1e-14 * max(abs(t), abs(target)) or not math.isfinite(h):
            raise StepFailureError(
                f"the step fell to {h:.3g} at t={t:.6g} without meeting rtol={self.rtol:g}, atol={self.atol:g}: "
                "raise the tolerances, use float64, or check the signal for values that overflow"
                + (f"; the last stage that failed: {failure}" if failure else "")
            )

    def accepted(self, memory: dict[str, Any], h: float, clipped: float, error: float) -> None:
        """Remember the next step after one of length `clipped`, which a target may have cut short from h."""
        factor = 0.9 * max(error, 1e-10) ** (-0.7 / self.power) * memory.get("error", 1.0) ** (0.4 / self.power)
        grown = clipped * min(5.0, max(0.2, factor))
        # A step cut short by a target says little about the step to come.
        memory["h"] = max(grown, h) if clipped < h else grown
        memory["error"] = max(error, 1e-4)

    def rejected(self, memory: dict[str, Any], clipped: float, error: float) -> float:
        memory["rejected"] = memory.get("rejected", 0) + 1
        shrink = 0.9 * error ** (-1 / self.power) if math.isfinite(error) else 0.1
        return clipped * min(0.9, max(0.1, shrink))


def weighted(error: Array, scale: Array, *, positive: bool = False) -> Array:
    xp = namespace(error)
    if not positive:
        # A scale of 0 belongs to a value that is 0 before and after: it has no error either.
        error = xp.where(scale > 0, error, 0 * scale)
        scale = xp.where(scale > 0, scale, xp.ones_like(scale))
    return xp.sqrt(xp.mean((error / scale) ** 2))


@dataclass(frozen=True)
class Tableau:
    """Coefficients of an explicit or diagonally implicit Runge-Kutta method.

    Attributes
    ----------
    stages : tuple of tuple of float
        What each stage but the first takes of the slopes before it; the last stage is the end of the step.
    shares : tuple of float
        Times of these stages, in units of the step; the last is 1.
    order : float
    reach : float
        How far the step is stable along the negative real axis.
    error : tuple of float, optional
        Of an embedded pair: weights of all slopes, of that at the end too, whose sum times h is the error, O(h^order).
    dense : tuple of float, optional
        Weights of the same slopes in the last term of a polynomial that is known between ends of steps.
    implicit : tuple of tuple of float, optional
        Of a diagonally implicit method: what each stage takes of the slopes of the linear part, its own last; 0 for a
        last stage that only adds up. The first stage is a step of implicit Euler.
    """

    stages: tuple[tuple[float, ...], ...]
    shares: tuple[float, ...]
    order: float
    reach: float
    error: tuple[float, ...] | None = None
    implicit: tuple[tuple[float, ...], ...] = ()
    dense: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Piece:
    """A step as a polynomial of degree 4 (Hairer, Norsett and Wanner 1993, II.6, doi 10.1007/978-3-540-78862-1)."""

    t: float
    end: float
    parts: tuple[Array, ...]

    @classmethod
    def of(cls, table: Tableau, t: float, end: float, u: Array, after: Array, slopes: list[Array]) -> Piece:
        assert table.dense is not None
        h, moved = end - t, after - u
        bend = h * slopes[0] - moved
        return cls(t, end, (u, moved, bend, moved - h * slopes[-1] - bend, h * combine(table.dense, slopes)))

    def at(self, t: float) -> Array:
        x = (t - self.t) / (self.end - self.t)
        start, moved, bend, twist, last = self.parts
        return start + x * (moved + (1 - x) * (bend + x * (twist + (1 - x) * last)))


@dataclass(frozen=True)
class Tried:
    """What a step came to."""

    flow: Flow
    u: Array
    slope: Array | None
    error: float
    failure: str = ""
    slopes: tuple[Array, ...] = ()
    finite: bool | None = None  # of the signal, where a device was asked for it beside the error


class Embedded(Integrator):
    """Base of methods whose steps follow an estimate of their error."""

    tableau: ClassVar[Any]

    def __init__(
        self, rtol: float = 1e-6, atol: float = 1e-9, *, dt: float | None = None, adaptive: bool = True
    ) -> None:
        self.rtol, self.atol = rtol, atol
        self.adaptive = check_flag("adaptive", adaptive)
        tolerances = self._control()
        self.rtol, self.atol = tolerances.rtol, tolerances.atol
        self.dt = None if dt is None else check_number("dt", dt, minimum=0, strict=True)
        if self.adaptive and self.tableau.error is None:
            raise InputError(
                f"adaptive: got True for {type(self).__name__}, whose tableau has no estimate of the error, expected "
                "adaptive=False with a dt"
            )
        if not self.adaptive and self.dt is None:
            raise InputError("dt: needed when adaptive=False")

    @property
    def length(self) -> float | None:
        return None if self.adaptive else self.dt

    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        # The slope at the end of the last step is the one at the start of this, unless the kernel changed between.
        kept_for, slope = memory.pop("_flow", None), memory.pop("_slope", None)
        flow = flow.when(t)
        first = slope if flow.is_like(kept_for) and slope is not None else flow.velocity(u)
        remaining = target - t
        if not self.adaptive:
            h = min(float(self.dt or remaining), remaining)
            h = remaining if remaining - h < 1e-9 * h else h
            end = target if h == remaining else t + h
            tried = self._try(flow, u, first, h, t, end)
            if tried.failure:
                raise StepFailureError(f"a stage of the step from t={t:.6g} failed: {tried.failure}; reduce dt")
            self._keep(tried, u, t, end, memory)
            return tried.u, end
        control = self._control()
        control.check(u, t)
        h = memory["h"] if "h" in memory else self._first_step(u, first)
        failure = ""
        while True:
            # A remainder within rounding of the step is the step.
            clipped = remaining if remaining <= h * (1 + 1e-9) else h
            control.check_step(h, t, target, failure)
            end = target if clipped == remaining else t + clipped
            tried = self._try(flow, u, first, clipped, t, end)
            error, failure = tried.error, tried.failure or failure
            if math.isfinite(error) and error <= 1:
                control.accepted(memory, h, clipped, error)
                self._keep(tried, u, t, end, memory)
                return tried.u, end
            h = control.rejected(memory, clipped, error)

    def _keep(self, tried: Tried, u: Array, t: float, end: float, memory: dict[str, Any]) -> None:
        memory.update(_flow=tried.flow, _slope=tried.slope)
        if tried.finite is not None:
            memory[FINITE] = tried.u, tried.finite
        if PIECES in memory:
            memory[PIECES].append(Piece.of(self.tableau, t, end, u, tried.u, list(tried.slopes)))

    @property
    def dense(self) -> bool:
        """Whether steps are known between their ends."""
        return getattr(self.tableau, "dense", None) is not None

    def _control(self) -> Tolerances:
        return Tolerances(self.rtol, self.atol, self.tableau.order, needed=self.adaptive)

    def _first_step(self, u: Array, slope: Array) -> float:
        if self.dt is not None:
            return self.dt
        xp = namespace(u)
        scale = self.atol + self.rtol * xp.abs(u)
        highest = xp.max(scale)
        scale = xp.where(scale > 0, scale, xp.where(highest > 0, highest, 1.0) * xp.ones_like(scale))
        size, speed, most = numbers(*(xp.sqrt(xp.mean((v / scale) ** 2)) for v in (u, slope)), highest)
        if most == 0:
            return 1e-3
        return 0.01 * size / speed if speed > 0 and size > 0 else 1e-3

    def _try(self, flow: Flow, u: Array, first: Array, h: float, t: float, end: float) -> Tried:
        """Return what a step of length h from t to `end` comes to, `first` being the velocity at u."""
        raise NotImplementedError  # pragma: no cover - abstract


@underflowing
class RungeKutta(Embedded):
    """Embedded Runge-Kutta pair of order 5 with an error estimate of order 4; six velocities a step.

    (Dormand and Prince 1980, doi 10.1016/0771-050X(80)90013-3.) For stiff flows the step settles at the stability
    limit.

    Parameters
    ----------
    rtol, atol : float
        Tolerances of the local error, root mean square over values. Below the rounding of the signal they end the run
        with status ``step failed``.
    dt : float, optional
        First step; with `adaptive` off, every step.
    adaptive : bool
        Whether the step follows the error.
    """

    tableau: ClassVar[Tableau] = Tableau(
        stages=(
            (1 / 5,),
            (3 / 40, 9 / 40),
            (44 / 45, -56 / 15, 32 / 9),
            (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
            (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
            (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
        ),
        shares=(1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0),
        order=5.0,
        reach=3.3,
        error=(71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40),
        dense=(
            -12715105075 / 11282082432,
            0.0,
            87487479700 / 32700410799,
            -10690763975 / 1880347072,
            701980252875 / 199316789632,
            -1453857185 / 822651844,
            69997945 / 29380423,
        ),
    )
    order = tableau.order
    takes_time = True
    takes_constraint = True
    keeps_limit = True
    longer = ""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.order = cls.tableau.order

    def stability_limit(self, flow: Flow) -> float:
        """Return infinity when the step adapts, else reach / (rho(A) + b) with b the bound of a reaction, or NaN."""
        if self.adaptive:
            return math.inf
        if not isinstance(flow, LinearFlow):
            return math.nan
        return self.tableau.reach / 2 * explicit_limit(flow)

    def surely_stable(self, flow: Flow) -> bool:
        if not isinstance(flow, LinearFlow):
            return False
        linear = flow
        known = linear.symmetric and linear.plainly_linear and is_told(linear)
        highest = linear.spectral_bounds()[1] + linear.driving_bound()
        return known and (self.dt or 0.0) * highest <= self.tableau.reach

    def _try(self, flow: Flow, u: Array, first: Array, h: float, t: float, end: float) -> Tried:
        slopes = [first]
        stage, here = u, flow
        for row, share in zip(self.tableau.stages, self.tableau.shares, strict=True):
            stage = plus(u, h, combine(row, slopes))
            moment = end if share == 1 else t + share * h
            try:
                here = flow.when(moment)
                stage = here.held(stage)
                here = _at(here, stage)
                slopes.append(here.velocity(stage))
            except (TermError, TermInputError):
                raise
            except (InputError, NumericalError) as error:
                return Tried(flow, u, first, math.inf, str(error))
        if not self.adaptive or self.tableau.error is None:
            return Tried(here, stage, slopes[-1], 0.0, slopes=tuple(slopes))
        over = self._control().measured(h * combine(self.tableau.error, slopes), u, stage)
        told, finite = _told(over, stage)
        return Tried(here, stage, slopes[-1], told, slopes=tuple(slopes), finite=finite)


def _told(over: Array, after: Array) -> tuple[float, bool | None]:
    """Return an error, and of a tensor whether the signal after the step is finite, for which the loop would ask."""
    if is_numpy(after):
        return scalar(over), None
    error, finite = numbers(over, namespace(after).all(namespace(after).isfinite(after)))
    return error, bool(finite)


def _at(flow: Flow, stage: Array) -> Flow:
    """Return the flow with the kernel of a stage; raise `NumericalError` where a step was so long that it has none."""
    checks = flow.evolving and not flow.affinity.takes_unsound  # else the error of the step tells
    if checks and not bool(namespace(stage).all(namespace(stage).isfinite(stage))):
        raise NumericalError("the signal overflowed")
    return flow.at(stage)


def combine(weights: tuple[float, ...], arrays: list[Array]) -> Array:
    total = weights[0] * arrays[0]
    for weight, array in zip(weights[1:], arrays[1:], strict=True):
        if weight != 0:
            total = plus(total, weight, array)
    return total


@underflowing
class Adaptive(Around):
    """A method of order p whose steps follow an estimate of their error.

    A step h gives u, two steps h / 2 give v, and (v - u) / (2^p - 1) is the estimate; the run goes on with v (Hairer,
    Norsett and Wanner 1993, section II.4, doi 10.1007/978-3-540-78862-1).

    Parameters
    ----------
    integrator : FixedStep
        Such as ``ETD4RK(dt)``, whose dt is the first step.
    rtol, atol : float
        Tolerances of the error of each step, root mean square over values.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import ETD4RK, Adaptive, AllenCahn, Gaussian, GradientFlow, Grid, J, affinity, solve
    >>> flow = GradientFlow(J(affinity(Gaussian(width=2.0), Grid(40))), reaction=AllenCahn())
    >>> found = solve(flow, np.sin(np.arange(40.0)), t=5.0, integrator=Adaptive(ETD4RK(0.1), rtol=1e-6))
    >>> found.success, found.stats["order"]
    (True, 4.0)
    """

    integrator: FixedStep
    keeps_limit = True

    def __init__(self, integrator: FixedStep, rtol: float = 1e-6, atol: float = 1e-9) -> None:
        if not isinstance(integrator, FixedStep):
            raise InputError(
                f"integrator: got {kind_of(integrator)}, expected one with steps of one length, such as "
                "ETD4RK(dt); RungeKutta() follows its error itself"
            )
        self.integrator = integrator
        tolerances = Tolerances(rtol, atol, integrator.order + 1)
        self.rtol, self.atol, self._tolerances = tolerances.rtol, tolerances.atol, tolerances

    def check_kind(self, flow: Flow) -> None:
        with suppress(StabilityError):
            self.integrator.check(flow)

    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        flow, remaining = flow.when(t), target - t
        self._tolerances.check(u, t)
        if "_limit" not in memory or flow.evolving:
            limit = self.stability_limit(flow)
            memory["_limit"] = math.inf if math.isnan(limit) else 0.99 * limit
        h, failure = min(memory.get("h", self.integrator.dt), memory["_limit"]), ""
        while True:
            clipped = remaining if remaining <= h * (1 + 1e-9) else h
            self._tolerances.check_step(h, t, target, failure)
            doubts: list[Doubt] = []
            try:
                with doubting(doubts):
                    after, error = self._try(flow, u, t, clipped)
                if not math.isfinite(error):
                    failure = told_of(doubts) or failure
            except (TermError, TermInputError):
                raise
            except (InputError, NumericalError, StepFailureError) as refusal:
                after, error, failure = u, math.inf, str(refusal)
            if math.isfinite(error) and error <= 1:
                self._tolerances.accepted(memory, h, clipped, error)
                return after, target if clipped == remaining else t + clipped
            h = self._tolerances.rejected(memory, clipped, error)

    def _try(self, flow: Flow, u: Array, t: float, h: float) -> tuple[Array, float]:
        step, middle, end = self.integrator.step, flow.when(t + h / 2), flow.when(t + h)
        with np.errstate(over="ignore", invalid="ignore"):
            whole = step(flow, u, h)
            half = middle.held(step(flow, u, h / 2))
            twice = end.held(step(middle.at(half), half, h / 2))
            change = (twice - end.held(whole)) / (2**self.order - 1)
            over = self._tolerances.measured(change, u, twice)
        error, finite = numbers(over, namespace(twice).all(namespace(twice).isfinite(twice)))
        return twice, error if finite else math.inf

    def __repr__(self) -> str:
        return f"Adaptive({self.integrator!r}, rtol={self.rtol!r}, atol={self.atol!r})"
