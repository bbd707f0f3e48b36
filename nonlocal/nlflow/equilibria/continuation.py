"""Equilibria of a family of flows along a parameter: pseudo-arclength continuation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.equilibria.branches import Branch, BranchPoint, Point
from nlflow.equilibria.eigenvalues import Spectrum, eigenvectors
from nlflow.equilibria.equations import ALMOST, DENSE, NONE, Equations
from nlflow.equilibria.newton import Search
from nlflow.equilibria.tangents import Border, Tangent
from nlflow.errors import (
    InputError,
    NumericalError,
    check_integer,
    check_number,
    check_range,
    checked_call,
    kind_of,
)
from nlflow.flows.flow import Flow, as_flow
from nlflow.functionals.krylov import default_rtol

_DIFFERENCE = 1e-5  # of the range of the parameter
_INSIDE = 0.381966  # of the range: a parameter that is none of a kind
_SHORTEST = 1e-7  # of the longest step
_TURN = 0.9  # cosine between tangents at the two ends of a step
_ASTRAY = 0.5  # of a step: what the corrector may move
_CORRECTIONS = 10
_FLATTEST = 20.0  # one over the sine of the angle between branches that cross
_QUICK = 3  # corrections after which steps grow
_SAME = 1e-5  # of a step: events that are nearer are one
_ZERO = 1e-6  # of the Jacobian: an eigenvalue at a place where it crosses 0
_TRANSVERSAL = 1e-4  # of what F_p is: its part along the left null vector, at a fold
_FLAT = 1e-5  # of the Jacobian times the size: a slope F_p that is 0
_BENT = 1e-4  # of the Jacobian over the size: second derivatives that are 0 at a pitchfork


class LeftBranchError(ArithmeticError):
    """No step stays on the branch."""


@checked_call
@underflowing
def continue_equilibria(
    make_flow: Callable[[float], Flow],
    start: Any,
    parameter: float,
    bounds: tuple[float, float],
    *,
    direction: int = 1,
    size: float | None = None,
    step: float = 0.01,
    longest: float = 0.05,
    most: int = 500,
    k: int = 6,
    rtol: float | None = None,
) -> Branch:
    """Follow equilibria along a parameter, through folds, and find where their number or stability changes.

    Pseudo-arclength continuation (Keller 1977, in Applications of Bifurcation Theory; Doedel 2007, doi
    10.1007/978-1-4020-6356-5_1). Every solution has the conserved means of the start. Two eigenvalues that cross in
    opposite directions within one step are missed; a smaller `longest` helps.

    Parameters
    ----------
    make_flow : callable
        Returns the flow with a parameter.
    start : array
        Near an equilibrium of ``make_flow(parameter)``.
    parameter : float
        Where it begins, within the bounds.
    bounds : tuple of float
        Smallest and largest parameter.
    direction : {1, -1}
        Whether the parameter grows at first; from a bound it goes inwards in any case.
    size : float, optional
        Root mean square of a typical signal, the unit of steps of u; that of the start by default, 1 where it is 0.
    step, longest : float
        First and longest step, in the norm in which the range of the parameter and the size of u are 1.
    most : int
        Steps.
    k : int
        How many eigenvalues are kept.
    rtol : float, optional
        Of the residuals; see `find_equilibrium`.

    Returns
    -------
    Branch
        Up to 600 unknowns a step takes some factorizations and all eigenvalues, O(n^3); beyond, GMRES and Lanczos or
        Arnoldi iterations.

    Raises
    ------
    InputError
        For bounds the wrong way round, a parameter beyond them, a `make_flow` that returns no flow, and as
        `find_equilibrium`.
    NumericalError
        When no equilibrium is found from the start.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import AllenCahn, Gaussian, GradientFlow, Grid, J, affinity
    >>> from nlflow.equilibria import continue_equilibria
    >>> weights = affinity(Gaussian(width=0.5), Grid(2))  # two nodes: eigenvalues 0 and 1 - mu
    >>> def make_flow(r):
    ...     return GradientFlow(J(weights), "degree", reaction=AllenCahn(r))
    >>> branch = continue_equilibria(make_flow, np.zeros(2), 0.1, (0.1, 0.5))
    >>> [point.kind for point in branch.points]
    ['pitchfork']
    >>> bool(abs(branch.points[0].parameter - (1 - weights.average(np.array([1.0, -1.0]))[0])) < 1e-12)
    True
    >>> crossing = branch.switch(branch.points[0])
    >>> bool(crossing.u[-1, 0] * crossing.u[-1, 1] < 0)
    True
    """
    if not callable(make_flow):  # a class of flows makes them too
        raise InputError(f"make_flow: got {kind_of(make_flow)}, expected a function of the parameter")
    low, high = check_range("bounds", bounds, hint="; direction=-1 follows the branch down")
    parameter = check_number("parameter", parameter)
    if not low <= parameter <= high:
        raise InputError(f"parameter: got {parameter:g}, expected one within the bounds ({low:g}, {high:g})")
    if check_integer("direction", direction) not in (1, -1):
        raise InputError(f"direction: got {direction!r}, expected 1 or -1")
    longest = check_number("longest", longest, minimum=0, strict=True)
    step = min(check_number("step", step, minimum=0, strict=True), longest)
    equations = Equations(_flow_of(make_flow, parameter), "start", start)
    size = (
        equations.norm(equations.start) or 1.0 if size is None else check_number("size", size, minimum=0, strict=True)
    )
    if not 1e-150 < size < 1e150:
        raise InputError(f"size: got {size:g}, expected a size of u whose square a float can hold; change the unit")
    run = Continuation(
        Family(make_flow, equations, (low, high)), size, step, longest,
        check_integer("most", most, minimum=1), check_integer("k", k, minimum=1),
        default_rtol(equations.like) if rtol is None else check_number("rtol", rtol, minimum=0, strict=True),
    )  # fmt: skip
    return run.begun(parameter, direction if low < parameter < high else 1 if parameter == low else -1)


def _flow_of(make_flow: Callable[[float], Flow], p: float) -> Flow:
    return as_flow(make_flow(p), f"make_flow at {p:g}")


class Family:
    """F(x, p), with q = (p - low) / (high - low) in place of p."""

    def __init__(self, make_flow: Callable[[float], Flow], equations: Equations, bounds: tuple[float, float]) -> None:
        self.make_flow, self.first, self.bounds = make_flow, equations, bounds
        # Of all flows, not of one whose parameter happens to be 0.
        other = equations.of(_flow_of(make_flow, float(bounds[0] + _INSIDE * (bounds[1] - bounds[0]))))
        self._neutral = (
            min(equations.invariants, other.invariants, key=len),
            min(equations.shifts, other.shifts, key=len),
        )
        self.rate = 0.0  # about the largest norm of a Jacobian so far: at a fold of one unknown it is 0
        self._kept: dict[float, Equations] = {}

    def parameter(self, q: float) -> float:
        low, high = self.bounds
        return low if q == 0 else high if q == 1 else low + float(q) * (high - low)

    def place(self, p: float) -> float:
        low, high = self.bounds
        return (p - low) / (high - low)

    def at(self, q: float) -> Equations:
        if q not in self._kept:
            if len(self._kept) > 8:
                self._kept.pop(next(iter(self._kept)))
            flow = _flow_of(self.make_flow, self.parameter(q))
            if flow.affinity.domain.shape != self.first.flow.affinity.domain.shape:
                raise InputError(
                    f"make_flow: got a flow on nodes of shape {flow.affinity.domain.shape} at {self.parameter(q):g}, "
                    f"expected {self.first.flow.affinity.domain.shape} as at the start"
                )
            self._kept[q] = self.first.of(flow)
            vars(self._kept[q])["invariants"], vars(self._kept[q])["shifts"] = self._neutral
        equations = self._kept[q]
        if equations._linear is None:
            equations._linear = self.first._linear
        return equations

    def slope(self, x: Floats, q: float) -> Floats:
        h = _DIFFERENCE
        if q - h < 0 or q + h > 1:
            h = h if q - h < 0 else -h
            return np.asarray((4 * self.at(q + h)(x) - 3 * self.at(q)(x) - self.at(q + 2 * h)(x)) / (2 * h))
        return np.asarray((self.at(q + h)(x) - self.at(q - h)(x)) / (2 * h))


@dataclass
class Stand:
    """A branch's point."""

    x: Floats
    q: float
    tangent: Point
    values: NDArray[Any]
    signs: NDArray[np.intp]
    corrections: int = 0


@dataclass(frozen=True)
class Continuation:
    """A branch z(s) = (x, q) of F(x, p) = 0 in the norm |x|^2 / size^2 + q^2, q being p over the width of its range."""

    family: Family
    size: float
    step: float
    longest: float
    most: int
    k: int
    rtol: float
    moved: bool = False

    # ---- the geometry

    def inner(self, v: Point, w: Point) -> float:
        return self.family.first.inner(v[0], w[0]) / self.size**2 + v[1] * w[1]

    def unit(self, v: Point) -> Point:
        length = math.sqrt(self.inner(v, v))
        return v[0] / length, v[1] / length

    def solved(self, x: Floats, q: float, row: Point, b: Floats, d: float, *, bordered: bool = True) -> Point:
        """Solve F_x v + F_q c = b, <row, (v, c)> = d, neutral directions left as they are."""
        equations = self.family.at(q)
        neutral = equations.neutral(x, ALMOST if bordered else NONE)
        border = Border.of(neutral).and_parameter(
            self.family.slope(x, q), equations.weights * row[0] / self.size**2, row[1]
        )
        answer = Tangent(equations, x).solve(b, border, np.append(np.zeros(neutral.count), d))
        if equations._linear is not None:
            self.family.first._linear = equations._linear
        return answer.v, float(answer.c[-1])

    def corrected(self, guess: Point, row: Point) -> tuple[Point, int]:
        for bordered in (True, False) if self.family.first.shifts else (True,):
            x, q = guess
            for count in range(_CORRECTIONS + 1):
                equations = self.family.at(q)
                value = equations(x)
                left = equations.norm(value)
                scale = max(equations.cancelling(x), self.family.rate * max(1e-3 * equations.norm(x), 1e-6 * self.size))
                if left == 0 or (left <= self.rtol * scale and count > 0):
                    return (x, q), count
                if not math.isfinite(left) or count == _CORRECTIONS:
                    break
                v, c = self.solved(x, q, row, -value, 0.0, bordered=bordered)
                if not np.isfinite(v).all() or not math.isfinite(c):
                    break
                x, q = x + v, min(max(q + c, 0.0), 1.0) if abs(row[1]) < 1 else q
        raise LeftBranchError

    def tangent(self, x: Floats, q: float, along: Point) -> Point:
        zero = np.zeros_like(x)
        found = self.solved(x, q, along, zero, 1.0)
        if not np.isfinite(found[0]).all():
            raise LeftBranchError
        found = self.unit(found)
        return found if self.inner(found, along) > 0 else (-found[0], -found[1])

    def spectrum(self, x: Floats, q: float, k: int) -> Spectrum:
        return Spectrum.of(self.family.at(q), x, k, moved=self.moved)

    def on(self, x: Floats, q: float) -> Continuation:
        equations = self.family.at(q)
        found = equations.neutral(x, ALMOST)
        return replace(self, moved=found.count > found.conserved)

    def stand(self, x: Floats, q: float, along: Point, before: Stand | None = None, corrections: int = 0) -> Stand:
        spectrum = self.spectrum(x, q, self.k)
        self.family.rate = max(self.family.rate, spectrum.size)
        signs = np.sign(spectrum.values.real) * (np.abs(spectrum.values.real) > spectrum.errors)
        if before is not None:  # within its error a value keeps the sign that it had
            common = min(len(signs), len(before.signs))
            unknown = signs[:common] == 0
            signs[:common][unknown] = before.signs[:common][unknown]
        tangent = self.tangent(x, q, along)
        return Stand(x, q, tangent, spectrum.values.copy(), signs.astype(np.intp), corrections)

    # ---- the walk

    def begun(self, parameter: float, direction: int) -> Branch:
        q = self.family.place(parameter)
        search = Search(self.family.first, self.rtol, self.family.first.start)
        if not search.newton(100) and not search.newton(100, bordered=False):
            raise NumericalError(
                f"start: no equilibrium of make_flow({parameter:g}) was found near it; take one of find_equilibrium "
                f"({search.result('newton').message})"
            )
        along = (np.zeros_like(search.x), float(direction))
        run = self.on(search.x, q)
        try:
            first = run.stand(search.x, q, along)
        except LeftBranchError as error:
            raise NumericalError(f"start: the branch has no tangent at {parameter:g}; begin at another") from error
        return run._walk(first, [])

    def switched(self, point: BranchPoint, null: Floats, step: float | None) -> Branch:
        x, q = point._place
        along = (null / self.family.first.norm(null) * self.size, 0.0)
        share = self.inner(along, point._tangent)
        along = self.unit((along[0] - share * point._tangent[0], along[1] - share * point._tangent[1]))
        length = self.step if step is None else step
        for _ in range(12):
            try:
                (x1, q1), corrections = self.corrected((x + length * along[0], q + length * along[1]), along)
                gap = (x1 - x, q1 - q)
                if math.sqrt(self.inner(gap, gap)) <= _FLATTEST * length:
                    run = replace(self.on(x1, q1), step=length)
                    first = run.stand(x1, q1, self.unit(gap), None, corrections)
                    origin = self.stand(x, q, self.unit(gap))
                    return run._walk(first, [origin])
            except LeftBranchError:
                pass
            length /= 2
        raise NumericalError(
            f"point: no other branch was found at {point.parameter:.6g} along this null vector; try another step, sign "
            "or vector"
        )

    def _walk(self, first: Stand, origin: list[Stand]) -> Branch:
        stands, events = [first], []
        length, status = self.step, "steps"
        reason = f"{self.most} steps were taken: raise most or longest"
        for _ in range(self.most):
            here = stands[-1]
            try:
                there, found, length = self._step(here, length, len(stands) + len(origin) - 1)
            except LeftBranchError:
                status = "lost"
                reason = (
                    f"no step from p = {self.family.parameter(here.q):.6g} stayed on the branch, down to "
                    f"{_SHORTEST * self.longest:.2g}: another branch is near, or the flow is not smooth there; a "
                    "smaller longest or another size may pass it"
                )
                break
            stands.append(there)
            events += found
            if there.q in (0.0, 1.0):
                status, reason = "range", "the end of the range"
                break
            if len(stands) > 8 and self._closes(stands, length):
                status, reason = "closed", "it came back to where it began"
                break
        stands = origin + stands
        families = self.family
        words = f"{len(stands)} points to p = {families.parameter(stands[-1].q):.6g}: {reason}"
        return Branch(
            np.array([families.parameter(one.q) for one in stands]),
            np.array([families.first.signal(one.x) for one in stands]),
            np.array([shown(one.values, self.k) for one in stands]),
            np.array([np.count_nonzero(one.signs > 0) for one in stands]),
            tuple(events), status, status in ("range", "closed"), words, self,
        )  # fmt: skip

    def _closes(self, stands: list[Stand], length: float) -> bool:
        first, last = stands[0], stands[-1]
        gap = (last.x - first.x, last.q - first.q)
        return math.sqrt(self.inner(gap, gap)) < length and self.inner(first.tangent, last.tangent) > _TURN

    def _step(self, here: Stand, length: float, after: int) -> tuple[Stand, list[BranchPoint], float]:
        """Return the next point, what happened between, and the length of the next step."""
        while True:
            if length < _SHORTEST * self.longest:
                raise LeftBranchError
            try:
                there, reached = self._tried(here, length)
                return there, self._events(here, there, reached, after), self._next(length, there)
            except LeftBranchError:
                length /= 2

    def _next(self, length: float, there: Stand) -> float:
        grown = 1.5 if there.corrections <= _QUICK else 1.0 if there.corrections <= 2 * _QUICK else 0.5
        return min(length * grown, self.longest)

    def _tried(self, here: Stand, length: float) -> tuple[Stand, float]:
        """Return the point at the end of a step, shortened to an end of the range, and its length."""
        t, end = here.tangent, None
        if not 0 < here.q + length * t[1] < 1 and t[1] != 0:
            end = 1.0 if t[1] > 0 else 0.0
            length = (end - here.q) / t[1]
            if length <= 0:  # it leaves the range where it begins
                raise LeftBranchError
        guess = (here.x + length * t[0], here.q + length * t[1] if end is None else end)
        row = t if end is None else (np.zeros_like(here.x), 1.0)
        (x, q), corrections = self.corrected(guess, row)
        off = (x - guess[0], q - guess[1])
        if math.sqrt(self.inner(off, off)) > _ASTRAY * length + 1e-12:
            raise LeftBranchError
        there = self.stand(x, q, t, here, corrections)
        if self.inner(there.tangent, t) < _TURN:
            raise LeftBranchError
        return there, length

    # ---- what happens on the way

    def _between(self, here: Stand, there: Stand, reached: float, s: float) -> Point:
        if s in (0.0, reached):
            return (here.x, here.q) if s == 0 else (there.x, there.q)
        t = here.tangent
        return self.corrected((here.x + s * t[0], here.q + s * t[1]), t)[0]

    def _root(self, function: Callable[[float], float], reached: float) -> float:
        from scipy.optimize import brentq

        low, high = function(0.0), function(reached)
        if low == 0 or low * high > 0:  # within its error at the first end
            return 0.0
        return float(brentq(function, 0.0, reached, xtol=1e-14 * max(reached, 1e-3), rtol=1e-14))

    def _events(self, here: Stand, there: Stand, reached: float, after: int) -> list[BranchPoint]:
        def real_part(j: int, s: float) -> float:
            if s == 0:
                return float(here.values[j].real)
            x, q = self._between(here, there, reached, s)
            return float(self.spectrum(x, q, len(here.values)).values[j].real)

        def turn(s: float) -> float:
            return self.tangent(*self._between(here, there, reached, s), here.tangent)[1]

        common = min(len(here.signs), len(there.signs))
        crossed = [j for j in range(common) if here.signs[j] * there.signs[j] < 0]
        roots = sorted((self._root(partial(real_part, j), reached), j) for j in crossed)
        groups: list[tuple[float, list[int]]] = []
        for s, j in roots:
            if groups and s - groups[-1][0] <= _SAME * reached:
                groups[-1][1].append(j)
            else:
                groups.append((s, [j]))
        if here.tangent[1] * there.tangent[1] < 0:
            s = self._root(turn, reached)
            if all(abs(s - other) > 1e-3 * reached for other, _ in groups):
                groups.append((s, []))
        return [self._told(here, there, reached, s, members, after) for s, members in sorted(groups)]

    def _told(self, here: Stand, there: Stand, reached: float, s: float, members: list[int], after: int) -> BranchPoint:
        """Return what happens at a place of a step.

        Raises
        ------
        LeftBranchError
            When the eigenvalue that crosses 0 is not 0 there: between the two ends is no branch.
        """
        x, q = self._between(here, there, reached, s)
        equations = self.family.at(q)
        spectrum = self.spectrum(x, q, len(here.values))
        values = spectrum.values
        if not members:
            members = [int(np.argmin(np.abs(values)))]
        size = self.family.rate
        leading = complex(values[members[0]])
        if abs(leading.real) > _ZERO * size + 10 * float(spectrum.errors[members[0]]):
            raise LeftBranchError
        slope = abs(float(there.values[members[0]].real - here.values[members[0]].real))
        moved = abs(there.q - here.q)
        off = (abs(leading.real) + float(spectrum.errors[members[0]])) / slope * moved if slope > 0 else 0.0
        # Where branches cross, two directions solve the equations of a tangent; that of the branch is between its ends.
        w, (a, b), (c, d) = s / reached, here.tangent, there.tangent
        tangent = self.unit(((1 - w) * a + w * c, (1 - w) * b + w * d))
        vectors = spectrum.vectors[:, members]
        width = self.family.bounds[1] - self.family.bounds[0]
        told: dict[str, Any] = {
            "parameter": self.family.parameter(q), "error": max(off, 1e-14) * width, "u": equations.signal(x),
            "eigenvalue": leading, "after": after, "_place": (x, q), "_tangent": tangent,
        }  # fmt: skip
        if abs(leading.imag) > _ZERO * size:
            vectors, _ = eigenvectors(equations, x, spectrum, members)
            waves = np.array([equations.shaped(v) for v in vectors.T[::2]])
            return BranchPoint(
                "hopf", multiplicity=max(len(members) // 2, 1), vectors=waves, _null=vectors.real, **told
            )
        null = _settled(equations, np.stack([_real(v) for v in vectors.T], axis=1))
        kind = self._kind(equations, x, q, spectrum, null, size, tangent)
        shaped = np.array([equations.shaped(v) for v in null.T])
        return BranchPoint(kind, multiplicity=len(members), vectors=shaped, _null=null, **told)

    def _kind(
        self, equations: Equations, x: Floats, q: float, spectrum: Spectrum, null: Floats, size: float, tangent: Point
    ) -> str:
        """Return the kind of a point with a real eigenvalue 0, from the left null vectors where they are known."""
        left = self._left(equations, x, spectrum, null)
        if left is None:
            return "fold" if abs(self.tangent(x, q, tangent)[1]) < _ZERO else "branch point"
        slope = self.family.slope(x, q)
        along = np.abs(left.T @ slope).max()
        root = equations.root
        if along > _TRANSVERSAL * float(np.linalg.norm(root * slope)) + _FLAT * size * self.size:
            return "fold"
        h = 1e-4 * self.size
        for direction in [*null.T, null.sum(axis=1)]:
            step = h * direction / equations.norm(direction)
            bent = (equations(x + step) + equations(x - step) - 2 * equations(x)) / h**2
            if np.abs(left.T @ bent).max() > _BENT * size / self.size:
                return "transcritical" if null.shape[1] == 1 else "branch point"
        return "pitchfork"

    @staticmethod
    def _left(equations: Equations, x: Floats, spectrum: Spectrum, null: Floats) -> Floats | None:
        """Return left null vectors, columns, as products with a vector are taken; None where they are not known."""
        if spectrum.symmetric:
            return np.asarray(equations.weights[:, None] * null)
        if len(x) > DENSE:
            return None
        root = equations.root
        columns, rows = root[:, None] * spectrum.neutral.columns, spectrum.neutral.rows / root
        matrix = root[:, None] * equations.matrix(x) / root
        matrix = matrix - 10 * np.abs(matrix).max() * columns @ rows
        left = np.linalg.svd(matrix)[0][:, -null.shape[1] :]
        return np.asarray(root[:, None] * left)


def _settled(equations: Equations, null: Floats) -> Floats:
    """Return a basis of the span of null vectors that does not depend on how they were found.

    The first is as large as it can be at one node. On a periodic grid it is then symmetric about that node, as patterns
    are that the grid holds in place.
    """
    if null.shape[1] == 1:
        return null
    root = equations.root
    basis = np.linalg.qr(root[:, None] * null)[0]
    sizes = np.sum(basis**2, axis=1)
    peak = int(np.argmax(sizes >= (1 - 1e-6) * sizes.max()))
    turned = np.linalg.qr(np.column_stack([basis[peak], np.eye(null.shape[1])]))[0]
    turned[:, 0] *= np.sign(basis[peak] @ turned[:, 0])
    return np.asarray(basis @ turned / root[:, None])


def shown(values: NDArray[Any], k: int) -> NDArray[np.complex128]:
    result = np.full(k, np.nan + 0j)
    result[: min(k, len(values))] = values[:k]
    return result


def _real(v: NDArray[Any]) -> Floats:
    """Return an eigenvector of a real eigenvalue as a real one."""
    v = v * np.exp(-1j * np.angle(v[np.argmax(np.abs(v))]))
    return np.asarray(v.real, dtype=np.float64)
