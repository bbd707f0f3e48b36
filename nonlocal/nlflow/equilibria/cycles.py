"""Limit cycles of flows by shooting."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Brief, Floats, underflowing
from nlflow.affinities import Unlinked
from nlflow.domains import Points
from nlflow.equilibria.equations import DENSE, Equations
from nlflow.errors import InputError, NumericalError, check_integer, check_number, checked_call
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import RungeKutta
from nlflow.flows.solver import solve

_ROUGH, _FINE = 1e-7, 1e-10  # tolerances of integrations with the variations, and of the last ones without
_SINGLE = 1e-5  # of those in float32
_SAMPLES = 120
_NEAR = 1e-5  # residual from which on integrations are fine, and the derivative stays
_PARTS = (2, 3, 4, 5)  # of a period, after which a signal must not be back


class Variations(Flow):
    """The flow of unknowns x with deviations V, columns of one array."""

    def __init__(self, equations: Equations) -> None:
        super().__init__(Unlinked(Points(np.zeros(len(equations)))), "l2", None, evolving=False, every=1)
        self._equations = equations

    def velocity(self, u: Array) -> Array:
        x = np.asarray(u[:, 0])
        found = self._equations(x)[:, None]
        if u.shape[1] == 1:
            return found
        return np.concatenate([found, self._equations.matrix(x) @ u[:, 1:]], axis=1)


@dataclass(frozen=True, repr=False)
class Cycle(Brief):
    """A periodic solution of a flow.

    Attributes
    ----------
    period : float
        The smallest one.
    t : array of shape (T,)
        Times from 0 to the period.
    u : array of shape (T, ...)
        The signal at these times.
    multipliers : array of shape (k,), complex
        Floquet multipliers by decreasing modulus, without those that are 1 in any case: along the cycle, for what the
        flow conserves and for translations.
    verdict : {'stable', 'unstable', 'cannot tell'}
        Whether all moduli are below 1 by more than the error, or one is above 1 by more.
    error : float
        How far from 1 the multipliers were found that have to be 1.
    residual : float
        |u(period) - u(0)| over the root mean square of the deviation of the cycle from its mean.
    iterations : int
    success : bool
        Whether the residual is within `rtol`, and the cycle is no equilibrium.
    message : str
    """

    period: float
    t: Floats
    u: Array
    multipliers: NDArray[np.complex128]
    verdict: str
    error: float
    residual: float
    iterations: int
    success: bool
    message: str


@checked_call
@underflowing
def find_cycle(
    flow: Flow,
    start: Any,
    period: float | None = None,
    *,
    settle: float = 0.0,
    rtol: float = 1e-9,
    maxiter: int = 20,
) -> Cycle:
    """Return a limit cycle of a flow near a start, stable or not, by shooting.

    Newton's method for u(T) = u(0), T being unknown too; O(n^3) for each stage of a step of `RungeKutta`.

    Parameters
    ----------
    flow : Flow
        Of at most 600 unknowns, which does not depend on time.
    start : array
        Near the cycle: from a Hopf point ``point.cycle(amplitude)`` gives it with the period.
    period : float, optional
        Near the period; by default the time after which the flow comes back to where it is after `settle`.
    settle : float
        Time for which the flow is followed first, to come near a stable cycle.
    rtol : float
        Of the residual.
    maxiter : int

    Returns
    -------
    Cycle

    Raises
    ------
    InputError
        As `find_equilibrium`; for more than 600 unknowns; for no period and no time to settle.
    NumericalError
        Where the flow does not come back, ends at an equilibrium, or has no finite values.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Points, Reaction, SystemFlow, J
    >>> from nlflow.affinities import Unlinked
    >>> from nlflow.equilibria import find_cycle
    >>> def turn(u):
    ...     x, y = u[..., 0], u[..., 1]
    ...     r = x * x + y * y
    ...     return np.stack([x * (1 - r) - 2 * y, y * (1 - r) + 2 * x], axis=-1)
    >>> reaction = Reaction(turn, (-2.0, 2.0), components=2, bound=40.0)
    >>> flow = SystemFlow(J(Unlinked(Points([0.0]))), [1.0, 1.0], reaction=reaction)
    >>> cycle = find_cycle(flow, np.array([[0.9, 0.0]]), 3.0)
    >>> cycle.verdict, round(cycle.period / np.pi, 8), round(float(np.log(cycle.multipliers[0].real)) / np.pi, 5)
    ('stable', 1.0, -2.0)
    """
    settle = check_number("settle", settle, minimum=0)
    rtol = check_number("rtol", rtol, minimum=0, strict=True)
    maxiter = check_integer("maxiter", maxiter, minimum=1)
    equations = Equations(flow, "start", start)
    if len(equations) > DENSE:
        raise InputError(
            f"start: got {len(equations)} unknowns, expected at most {DENSE}, of which all deviations are followed; "
            "use a coarser grid, or follow the flow with solve()"
        )
    if period is None and settle == 0:
        raise InputError("period: needed without a time to settle, from which it could be found; give one of them")
    period = None if period is None else check_number("period", period, minimum=0, strict=True)
    shooting = Shooting(equations)
    x = equations.start
    if settle > 0:
        x = shooting.course(x, [0.0, settle], _ROUGH)[-1]
    if period is None:
        period = shooting.found_period(x, settle)
    return shooting.closed(x, period, rtol, maxiter)


class Shooting:
    """Newton's method for signals that come back."""

    def __init__(self, equations: Equations) -> None:
        self.equations = equations
        self.flow = Variations(equations)

    def course(self, x: Floats, times: Any, tolerance: float) -> Floats:
        return self._integrated(x[:, None], times, tolerance)[..., 0]

    def _integrated(self, columns: Floats, times: Any, tolerance: float) -> Floats:
        tolerance = max(tolerance, _SINGLE) if self.equations.single else tolerance
        size = float(np.abs(columns[:, 0]).max()) or 1.0
        integrator = RungeKutta(tolerance, tolerance * size)
        found = solve(self.flow, columns, t_eval=times, integrator=integrator, energies=False)
        if not found.success:
            raise NumericalError(f"start: the flow could not be followed for {times[-1]:.6g}: {found.message}")
        return np.asarray(found.u)

    def monodromy(self, x: Floats, period: float) -> tuple[Floats, Floats]:
        columns = np.column_stack([x, np.eye(len(x))])
        last = self._integrated(columns, [0.0, period], _ROUGH)[-1]
        return last[:, 0], last[:, 1:]

    def found_period(self, x: Floats, horizon: float) -> float:
        times = np.linspace(0.0, horizon, 401)
        gaps = self.course(x, times, 1e-6) - x
        normal = self.equations(x)
        heights = np.array([self.equations.inner(gap, normal) for gap in gaps])
        far = np.array([self.equations.norm(gap) for gap in gaps])
        spread = far.max()
        up = np.flatnonzero((heights[:-1] < 0) & (heights[1:] >= 0) & (far[1:] < 0.2 * spread))
        if not len(up) or spread == 0:
            raise NumericalError(
                f"period: the flow did not come back within {horizon:g} after as long; give a period, a longer settle, "
                "or a start nearer to the cycle"
            )
        i = int(up[0])
        share = heights[i] / (heights[i] - heights[i + 1])
        return float(times[i] + share * (times[i + 1] - times[i]))

    def _kept(self, x: Floats, along: Floats) -> Floats:
        """Return directions beside that of the flow in which a cycle may be moved, orthonormal columns."""
        found = [along / self.equations.norm(along)]
        for direction in self.equations.neutral(x, math.inf).columns.T:
            rest = direction - sum(self.equations.inner(one, direction) * one for one in found)
            if self.equations.norm(rest) > 1e-3:
                found.append(rest / self.equations.norm(rest))
        return np.stack(found, axis=1)

    def closed(self, x: Floats, period: float, rtol: float, maxiter: int) -> Cycle:
        equations, first = self.equations, period
        least = 1e-6 * equations.norm(equations(x)) * period
        residual, jacobian, course = math.inf, np.zeros((0, 0)), np.zeros((0, len(x)))
        for count in range(maxiter + 1):
            if residual > _NEAR:
                (end, jacobian), course = self.monodromy(x, period), course[:0]
            else:  # the derivative is good enough, and what counts is where the flow itself ends
                course = self.sampled(x, period)
                end = course[-1]
            along = equations(x)
            way = equations.norm(along) * period
            if not way > least:
                raise NumericalError(
                    "start: the search ended at an equilibrium, which is no cycle; start farther from it, with a "
                    "larger amplitude or after a longer settle"
                )
            residual = 2 * math.pi * equations.norm(end - x) / way
            if count == maxiter or (len(course) and residual <= rtol):
                break
            x, period = self._stepped(x, period, end, jacobian, along)
            if not (np.isfinite(x).all() and 0.1 * first < period < 10 * first):
                raise NumericalError(
                    f"period: Newton's method left the neighbourhood of period {first:.6g}; start nearer to the cycle, "
                    "for instance with a longer settle"
                )
        return self._told(course if len(course) else self.sampled(x, period), period, residual, rtol, count)

    def sampled(self, x: Floats, period: float) -> Floats:
        return self.course(x, np.linspace(0.0, period, _SAMPLES + 1), _FINE)

    def _stepped(self, x: Floats, period: float, end: Floats, jacobian: Floats, along: Floats) -> tuple[Floats, float]:
        n, kept = len(x), self._kept(x, along)
        k = kept.shape[1]
        whole = np.zeros((n + k, n + k))
        whole[:n, :n] = jacobian - np.eye(n)
        whole[:n, n:], whole[n:, :n] = kept, (self.equations.weights[:, None] * kept).T
        whole[:n, n] = self.equations(end)
        found = np.linalg.lstsq(whole, np.concatenate([x - end, np.zeros(k)]), rcond=1e-13)[0]
        return x + found[:n], period + float(found[n])

    def _told(self, course: Floats, period: float, residual: float, rtol: float, count: int) -> Cycle:
        equations, x, times = self.equations, course[0], np.linspace(0.0, period, _SAMPLES + 1)
        spread = max(equations.norm(one - course.mean(axis=0)) for one in course)
        back = [m for m in _PARTS if equations.norm(course[_SAMPLES // m] - x) < 1e-5 * spread]
        if back:  # it goes round several times
            return self.closed(x, period / max(back), rtol, 10)
        values = np.linalg.eigvals(self.monodromy(x, period)[1])
        error, others = 0.0, list(values)
        for _ in range(self._kept(x, equations(x)).shape[1]):
            one = min(others, key=lambda value: abs(value - 1))
            others.remove(one)
            error = max(error, abs(one - 1))
        error += _SINGLE * 10 if equations.single else 10 * _ROUGH
        multipliers = np.array(sorted(others, key=lambda value: -abs(value)), dtype=np.complex128)
        largest = float(np.abs(multipliers).max(initial=0.0))
        verdict = "stable" if largest < 1 - error else "unstable" if largest > 1 + error else "cannot tell"
        success = residual <= rtol and error < 1e-2
        words = f"period {period:.8g}, residual {residual:.2g}, largest other multiplier {largest:.4g}"
        if residual > rtol:
            words += f"; above rtol={rtol:g}: raise maxiter or rtol, or start nearer to the cycle"
        elif error >= 1e-2:
            words += f"; the multiplier along the cycle is off by {error:.2g}, so that no other is known: a stiff cycle"
        signals = np.array([equations.signal(one) for one in course])
        return Cycle(period, times, signals, multipliers, verdict, error, residual, count, success, words)
