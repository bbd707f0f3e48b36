"""Equilibria of any flow: Newton's method, pseudo-transient continuation, and deflation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nlflow._array import Brief, Floats, to_numpy, underflowing
from nlflow.equilibria.equations import ALMOST, NONE, Equations, Neutral
from nlflow.equilibria.limits import Equilibrium
from nlflow.equilibria.tangents import Answer, Border, Tangent, left_alone
from nlflow.errors import InputError, check_choice, check_integer, check_number, checked_call
from nlflow.flows.flow import Flow
from nlflow.flows.linear import LinearFlow
from nlflow.functionals.krylov import default_rtol, error_allowed, verdict

_METHODS = ("auto", "newton", "transient")
_SHORTEST = 2.0**-20  # share of a Newton step below which there is no descent
_GROWTH = 10.0  # of a pseudo-time step
_SMALL = 1e-3  # of what cancels at the start: what is left where the equilibrium is 0
_SAME = 1e-6  # of the size of an equilibrium: nearer ones are the same
_POWER, _SHIFT = 2, 1.0  # of the deflation, as Farrell, Birkisson and Funke take them


@dataclass(repr=False)
class Search(Brief):
    """A search for F(x) = 0."""

    equations: Equations
    rtol: float
    x: Floats
    iterations: int = 0
    singular: bool = False
    error: float = math.nan  # what one more Newton step would change, relative to the signal; NaN where nobody asked
    size: float = field(init=False)
    least: float = field(init=False)

    def __post_init__(self) -> None:
        self.size = _SMALL * self.equations.cancelling(self.x)
        self.least = _SMALL * self.equations.norm(self.x)

    def residual(self, x: Floats, value: Floats | None = None) -> float:
        left = self.equations.norm(self.equations(x) if value is None else value)
        if left == 0 or not math.isfinite(left):
            return left
        size = max(self.equations.cancelling(x), self.size)
        return left / size if size > 0 else math.inf

    def newton(
        self, maxiter: int, deflated: Deflation | None = None, *, bordered: bool = True, damped: bool = True
    ) -> bool:
        equations, x = self.equations, self.x
        value = equations(x)
        for _ in range(maxiter):
            answer = self._step(x, value, bordered)
            if self.residual(x, value) <= self.rtol and not self.error > error_allowed(self.rtol):
                break
            self.iterations += 1
            if not math.isfinite(self.error):
                break
            step = answer.v if deflated is None else deflated.factor(x, answer.v) * answer.v
            weight = (lambda y: 1.0) if deflated is None else deflated.value
            before, share = weight(x) * equations.norm(value), 1.0
            while True:
                there = x + share * step
                found = equations(there)
                after = weight(there) * equations.norm(found)
                if not damped or after <= (1 - 1e-4 * share) * before or share < _SHORTEST:
                    break
                share /= 2
            if not (after < before or (not damped and math.isfinite(after))):
                break
            x, value, self.error = there, found, math.nan
        self.x = x
        return self.residual(x, value) <= self.rtol

    def _step(self, x: Floats, value: Floats, bordered: bool = True) -> Answer:
        """Return a Newton step, and keep what it says: how far x is off, infinite where there is none."""
        equations = self.equations
        neutral = equations.neutral(x, ALMOST if bordered else NONE)
        answer = Tangent(equations, x).solve(-value, Border.of(neutral), np.zeros(neutral.count))
        self.singular = answer.singular
        # Of a singular matrix what is left may lie where it moves nothing; the solution of least squares counts.
        moved = equations.norm(answer.v) if answer.residual <= 0.9 or answer.singular else math.inf
        self.error = moved / max(equations.norm(x), self.least, min(moved, 1.0), 1e-300)
        return answer

    def _hidden(self, rounded: bool) -> float:
        """Return how far off x may be by what rounding hides of F there, relative, as far as the Jacobian tells."""
        equations, x, tangent = self.equations, self.x, Tangent(self.equations, self.x)
        length = math.sqrt(equations.rounding) * float(np.max(np.abs(x), initial=0.0))
        way = length * np.random.default_rng(4).uniform(-1, 1, len(x))
        noises = [equations(x + way) - equations(x) - equations.times(x + way / 2, way)] if rounded else []
        if tangent.dense:  # the matrix has digits that products lose
            lost = tangent.matrix @ x - equations.times(x, x)
            noises.append(np.where(np.abs(lost) > equations.rounding * (np.abs(tangent.matrix) @ np.abs(x)), lost, 0.0))
        if not np.isfinite(noises).all():
            return 0.0
        if self.singular:
            told = self._unknown_laws(tangent.matrix, np.abs(noises).sum(axis=0))
            return math.inf if told > error_allowed(self.rtol) else 0.0
        neutral = equations.neutral(x)
        border, none = Border.of(neutral), np.zeros(neutral.count)
        moved = max((equations.norm(tangent.solve(noise, border, none).v) for noise in noises), default=0.0)
        return moved / max(equations.norm(x), self.least, 1e-300)

    def _unknown_laws(self, matrix: Floats, noise: Floats) -> float:
        """Return the noise of means that only rounding conserves, over what moves them beside diffusion nearby."""
        laws, (_, slow) = np.abs(left_alone(matrix)), self.equations._moved
        if len(laws) <= len(self.equations.laws_of_diffusion):
            return 0.0
        size = float(np.max(laws @ np.abs(slow).reshape(len(slow), -1).T))
        return float(np.max(laws @ noise)) / size if size > 0 else 0.0

    def transient(self, maxiter: int) -> bool:
        equations, x = self.equations, self.x
        value = equations(x)
        probe = np.random.default_rng(0).standard_normal(len(x))
        rate = equations.norm(equations.times(x, probe)) / equations.norm(probe)
        step = 1 / rate if rate > 0 else 1.0
        none = Border.of(Neutral(np.zeros((len(x), 0)), np.zeros((0, len(x))), 0))
        for _ in range(maxiter):
            if self.residual(x, value) <= self.rtol:
                break
            answer = Tangent(equations, x, 1 / step).solve(-value, none, np.zeros(0))
            self.iterations += 1
            there = x + answer.v
            found = equations(there)
            before, after = equations.norm(value), equations.norm(found)
            if not math.isfinite(after) or after > 1e3 * before:
                step /= _GROWTH
                if step * rate < 1e-12:
                    break
                continue
            step *= min(max(before / after if after > 0 else _GROWTH, 0.3), _GROWTH)
            x, value = there, found
        self.x, self.error = x, math.nan
        return self.residual(x, value) <= self.rtol

    def result(self, method: str) -> Equilibrium:
        equations = self.equations
        u = equations.signal(self.x)
        residual = self.residual(equations._vector(u))
        small, _ = verdict(residual, self.rtol)
        if small and math.isnan(self.error):
            self._step(self.x, equations(self.x))
        if small and self.singular and equations.unbalanced(self.x) > error_allowed(self.rtol):
            self.error = math.inf  # beside a fast diffusion nothing is left of what moves the mean
        if small:
            self.error = max(self.error, self._hidden(residual > 0))
        success, _ = verdict(residual, self.rtol, self.error)
        how = "Newton's method" if method == "newton" else "pseudo-transient continuation"
        words = [f"residual {residual:.3g} by {how}"]
        if small and not success:
            known = f"by {self.error:.2g} of its size" if self.error < math.inf else "nobody can tell how far"
            words.append(
                f"but it may be off, {known}: the Jacobian is nearly singular, as beside a front that hardly moves or "
                "near a bifurcation; start nearer to an equilibrium, in float64, or lower rtol"
            )
        elif not success:
            words.append(
                f"above rtol={self.rtol:g}: start nearer to an equilibrium, for instance from the end of solve(flow, "
                "...), take method='transient', or raise maxiter or rtol"
            )
        neutral = equations.neutral(self.x)
        moved = max((abs(float(law @ (self.x - equations.start))) for law, _ in equations.invariants), default=0.0)
        if success and moved > 1e-6 * max(equations.norm(equations.start), equations.norm(self.x)):
            words.append(
                f"what the flow conserves has changed by {moved:.3g}: start from a signal with the mean wanted"
            )
        elif success and neutral.count:
            words.append(f"one of a family: it keeps the {neutral.words} of the start")
        elif success and self.singular:
            words.append("the Jacobian is singular: the equilibrium is not isolated, or a bifurcation")
        reaction = equations.flow.terms.reaction if isinstance(equations.flow, LinearFlow) else None
        if success and reaction is not None and bool(np.any(to_numpy(reaction.clipped(u) - u) != 0)):
            words.append(f"values leave the interval of the reaction {reaction!r}: give it one that holds them")
        if equations.flow.evolving:
            words.append("the Jacobian of an evolving kernel is by differences")
        return Equilibrium(u, residual, self.iterations, success, "; ".join(words), method)


@checked_call
@underflowing
def find_equilibrium(
    flow: Flow, start: Any, *, method: str = "auto", rtol: float | None = None, maxiter: int = 100
) -> Equilibrium:
    """Return a signal at which a flow is at rest, du/dt = 0, near a start; stable or not.

    Newton's method with steps that are shortened until |du/dt| falls; where it fails, pseudo-transient continuation by
    implicit Euler steps that grow (Kelley and Keyes 1998, doi 10.1137/S0036142996304796). The Jacobian is a matrix up
    to 600 unknowns; beyond, GMRES solves with it. The result has the conserved means of the start.

    Parameters
    ----------
    flow : Flow
        Any whose velocity depends on the signal alone; a kernel may be evolving, with ``every`` = 1.
    start : array
        At nodes with a constraint the values of the constraint count.
    method : {'auto', 'newton', 'transient'}
    rtol : float, optional
        |du/dt| relative to the size of what cancels in it (`Flow.tension`, or |J u|), or to a thousandth of that size
        at the start, for an equilibrium 0; 1e-10 in float64 and 1e-5 in float32 by default.
    maxiter : int
        Newton steps, and as many implicit Euler steps.

    Returns
    -------
    Equilibrium
        ``success`` says that the residual of ``u`` is within `rtol`, and that neither one more Newton step nor what
        rounding hides of du/dt would move it by 10^4 rtol of its size: a front that hardly moves has a small residual
        too.

    Raises
    ------
    InputError
        For a flow that depends on time or has noise, one on a sphere, a kernel that is held for some steps, and a start
        of another shape or with NaN.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import AllenCahn, Gaussian, GradientFlow, Grid, J, affinity
    >>> from nlflow.equilibria import find_equilibrium
    >>> weights = affinity(Gaussian(width=1.0), Grid(32))
    >>> flow = GradientFlow(J(weights), "degree", reaction=AllenCahn(0.5))
    >>> found = find_equilibrium(flow, np.tanh(np.arange(32) - 15.5))
    >>> found.success, round(float(found.u[0]), 6)
    (True, -1.0)
    """
    rtol, maxiter = _checked(rtol, maxiter)
    method = check_choice("method", method, _METHODS)
    equations = Equations(flow, "start", start)
    return _searched(equations, method, rtol, maxiter)


def _checked(rtol: float | None, maxiter: int) -> tuple[float | None, int]:
    rtol = None if rtol is None else check_number("rtol", rtol, minimum=0, strict=True)
    return rtol, check_integer("maxiter", maxiter, minimum=1)


def _searched(equations: Equations, method: str, rtol: float | None, maxiter: int) -> Equilibrium:
    search = Search(equations, default_rtol(equations.like) if rtol is None else rtol, equations.start)
    if method != "transient":
        if search.newton(maxiter) or method == "newton":
            return search.result("newton")
        if search.equations.shifts and search.newton(maxiter, bordered=False):  # a pattern that its grid holds
            return search.result("newton")
        search.x = equations.start
    if search.transient(maxiter) or method == "transient":
        return search.result("transient")
    return search.result("newton" if search.newton(maxiter, bordered=False) else "transient")


class Deflation:
    """What makes known equilibria and their translations repel a search, F times prod_k (|x - x_k|^-2 + 1)."""

    def __init__(self, equations: Equations, known: Sequence[Floats], size: float) -> None:
        self.equations, self.known, self.size = equations, known, size

    def nearest(self, x: Floats, other: Floats) -> Floats:
        axes = tuple(self.equations.shifts)
        if not axes:
            return other
        shape = self.equations.free.shape
        here, there = (np.fft.fftn(v.reshape(shape) / self.size, axes=axes) for v in (x, other))
        likeness = np.fft.ifftn(here * there.conj(), axes=axes).real
        likeness = likeness.sum(axis=tuple(i for i in range(len(shape)) if i not in axes))
        best = np.unravel_index(int(np.argmax(likeness)), likeness.shape)
        return np.roll(other.reshape(shape), best, axes).ravel()

    def _distances(self, x: Floats) -> list[tuple[float, Floats]]:
        gaps = [(x - self.nearest(x, other)) / self.size for other in self.known]
        return [(max(self.equations.norm(gap), 1e-150), gap) for gap in gaps]

    def value(self, x: Floats) -> float:
        return math.prod(far**-_POWER + _SHIFT for far, _ in self._distances(x))

    def factor(self, x: Floats, step: Floats) -> float:
        """Return by what a Newton step of F is multiplied to be one of the deflated F (Sherman and Morrison)."""
        slope = 0.0  # of the logarithm of the factor along the step
        for far, gap in self._distances(x):
            inner = self.equations.inner(gap, step / self.size)
            slope += -_POWER * far ** (-_POWER - 2) * inner / (far**-_POWER + _SHIFT)
        return 1 / (1 - slope) if slope != 1 else 1.0

    def is_new(self, x: Floats) -> bool:
        return all(far > _SAME for far, _ in self._distances(x))


@checked_call
@underflowing
def find_equilibria(
    flow: Flow, starts: Any, *, most: int = 20, rtol: float | None = None, maxiter: int = 100
) -> list[Equilibrium]:
    """Return several equilibria of a flow; there may be others.

    From each start Newton's method is run again and again on du/dt times prod_k (|u - u_k|^-2 + 1), with the u_k found
    before (Farrell, Birkisson and Funke 2015, doi 10.1137/140984798).

    Parameters
    ----------
    flow, rtol, maxiter
        As in `find_equilibrium`.
    starts : array, or sequence of arrays
    most : int
        Equilibria after which it ends.

    Returns
    -------
    list of Equilibrium
        In the order in which they were found; on a periodic grid one of each family of translations.

    Raises
    ------
    InputError
        As `find_equilibrium`, and for no start.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import AllenCahn, Gaussian, GradientFlow, Grid, J, affinity
    >>> from nlflow.equilibria import find_equilibria
    >>> flow = GradientFlow(J(affinity(Gaussian(width=9.0), Grid(4))), "degree", reaction=AllenCahn(0.1))
    >>> found = find_equilibria(flow, 0.3 * np.ones(4))
    >>> sorted(round(float(one.u[0]), 6) + 0.0 for one in found)
    [-1.0, 0.0, 1.0]
    """
    rtol, maxiter = _checked(rtol, maxiter)
    most = check_integer("most", most, minimum=1)
    given = list(starts) if isinstance(starts, list | tuple) else [starts]
    if not given:
        raise InputError("starts: got none, expected a signal, or a list of signals")
    several = [Equations(flow, "starts", start) for start in given]
    found: list[Equilibrium] = []
    known: list[Floats] = []
    for equations in several:
        tolerance = default_rtol(equations.like) if rtol is None else rtol
        size = max(*(equations.norm(one.start) for one in several), 0.0, 0.0) or 1.0
        while len(found) < most:
            search = Search(equations, tolerance, equations.start)
            if not _another(search, Deflation(equations, known, size), maxiter):
                break
            known.append(search.x)
            found.append(search.result("newton"))
    return found


def _another(search: Search, deflated: Deflation, maxiter: int) -> bool:
    """Return whether a search ends at an equilibrium that was not known, in one of the ways there are."""
    repelled, start = deflated if deflated.known else None, search.x
    for damped in (True, False):
        for bordered in (True, False) if search.equations.shifts else (True,):
            search.x = start
            if search.newton(maxiter, repelled, bordered=bordered, damped=damped) and deflated.is_new(search.x):
                return True
    return False
