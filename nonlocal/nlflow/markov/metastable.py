"""Sets of states in which walkers stay for long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Brief, Floats
from nlflow.errors import InputError, NumericalError
from nlflow.markov.law import StationaryLaw
from nlflow.markov.spectrum import Modes, constant_first

_STARTS = 10  # of the search for the crispest memberships, beside the simplex of the corners
_FEASIBLE = 1e-10  # how far memberships may be below 0 in the linear program, the least that it takes
_EMPTY = 1e-12  # the probability of a set that has no states
_CONSTANT = 1e-6  # what the constant may lack


@dataclass(frozen=True, repr=False)
class MetastableSets(Brief):
    """Sets of states, and how they were found.

    Attributes
    ----------
    memberships : array of shape (N, m)
        chi >= 0, rows summing to 1: how much of each state belongs to each set.
    sets : array of int of shape (N,)
        The set of the largest membership.
    coarse : array of shape (m, m)
        Moves between the sets, (chi^T D chi)^-1 chi^T D P chi with D = diag(weights); entries may be below 0.
    stationary : array of shape (m,)
        pi^T chi.
    crispness : float
        1/m sum_a <chi_a, chi_a> / <chi_a, 1> in the inner product of the weights, 1 where no state is shared.
    modes : Modes
        With GPCCA real Schur vectors, orthonormal in the weights, and complex values.
    weights : array of shape (N,)
        Of the inner product.
    """

    memberships: Floats
    sets: NDArray[np.intp]
    coarse: Floats
    stationary: Floats
    crispness: float
    modes: Modes
    weights: Floats


def metastable_sets(modes: Modes, stationary: StationaryLaw, weights: Floats) -> MetastableSets:
    """Return as many sets as there are modes, which are orthonormal in the weights and span the constants."""
    x, m = modes.vectors.copy(), len(modes.values)
    if modes.parted:
        raise InputError(
            f"count: got {m}, which parts equal eigenvalues ({modes.values[-1]:.6g}), so that sets are a "
            "choice of many; use a number that parts none"
        )
    constant = x.T @ weights
    if abs(np.linalg.norm(constant) - 1) > _CONSTANT:
        raise NumericalError(
            f"modes: the constant is a combination of {m} modes but for {abs(1 - np.linalg.norm(constant)):.2g}; use a "
            "smaller rtol, or another count"
        )
    x = constant_first(x, constant)
    x[:, 0] = 1.0
    chi = _crispest(x)
    mass = stationary.of_parts @ chi
    order = np.argsort(-mass, kind="stable")
    chi, mass = chi[:, order], mass[order]
    inner = chi.T @ (weights[:, None] * chi)
    coarse = np.asarray(np.linalg.solve(inner, chi.T @ (weights[:, None] * stationary.moves.apply(chi))), np.float64)
    crispness = float((np.diagonal(inner) / (weights @ chi)).sum() / m)
    return MetastableSets(chi, chi.argmax(axis=1), coarse, mass, crispness, modes, weights)


def _crispest(x: Floats) -> Floats:
    m, states = x.shape[1], _corners(x)
    a: Floats = np.asarray(np.linalg.inv(x[states]), np.float64)
    changes = np.random.default_rng(0).normal(1, 0.5, (_STARTS, m, m))
    starts = [_feasible(x, a), *(_feasible(x, a * change) for change in changes)]
    found = [_climbed(x, states, start) for start in starts]
    return np.maximum(x @ _feasible(x, max(found, key=_crispness)), 0)


def _feasible(x: Floats, a: Floats) -> Floats:
    """Return A from its entries beside the first row and column: rows of chi sum to 1, and the least chi is 0."""
    a = a.copy()
    a[1:, 0] = -a[1:, 1:].sum(axis=1)
    a[0] = -(x[:, 1:] @ a[1:]).min(axis=0)
    return np.asarray(a / a[0].sum())


def _crispness(a: Floats) -> float:
    # The modes are orthonormal in pi, so <chi_a, chi_a> is the square of a column, and <chi_a, 1> its first entry.
    return float(((a**2).sum(axis=0) / a[0]).mean())


def _climbed(x: Floats, states: list[int], a: Floats) -> Floats:
    """Return the vertex that is reached from A, each next one being the best by the slope at the last.

    A convex function is nowhere below its tangents, so each is crisper, and there are finitely many.
    """
    while True:
        slope = 2 * a / a[0]
        # But for a number that is the same in all columns, whose first entries sum to 1.
        slope[0] = -(a[1:] ** 2).sum(axis=0) / a[0] ** 2
        new = _vertex(x, states, slope)
        if new[0].min() <= _EMPTY or _crispness(new) <= _crispness(a) + 1e-14:
            return a
        a = new


def _vertex(x: Floats, states: list[int], slope: Floats) -> Floats:
    """Return the A with chi = X A >= 0, rows of which sum to 1, where <slope, A> is largest.

    Few states bound the linear program: to `states` those are added that the others leave below 0.
    """
    from scipy.optimize import linprog

    m = x.shape[1]
    one = np.eye(m)
    cost = -slope.ravel() / np.abs(slope).max()
    options = {"primal_feasibility_tolerance": _FEASIBLE, "dual_feasibility_tolerance": _FEASIBLE}
    program: Any = linprog
    while True:
        found = program(
            cost, A_ub=-np.kron(x[states], one), b_ub=np.zeros(len(states) * m), A_eq=np.kron(one, np.ones(m)),
            b_eq=one[0], bounds=(None, None), options=options,
        )  # fmt: skip
        if not found.success:
            raise NumericalError(f"modes: the linear program for the memberships failed ({found.message.strip()})")
        a = np.asarray(found.x.reshape(m, m), np.float64)
        chi = x @ a
        lowest = chi.argmin(axis=0)
        outside = [int(i) for i in lowest[chi.min(axis=0) < -_FEASIBLE] if i not in states]
        if not outside:
            return a
        states.extend(dict.fromkeys(outside))


def _corners(x: Floats) -> list[int]:
    """Return the states that span the largest simplex, one after another (the inner simplex algorithm)."""
    m = x.shape[1]
    first = int(np.argmax(np.linalg.norm(x, axis=1)))
    corners, rest = [first], x - x[first]
    for _ in range(1, m):
        lengths = np.linalg.norm(rest, axis=1)
        far = int(np.argmax(lengths))
        if not lengths[far] > 1e-12 * math.sqrt(m):
            raise NumericalError("modes: they span no simplex of so many corners; ask for fewer sets")
        corners.append(far)
        along = rest[far] / lengths[far]
        rest = rest - np.outer(rest @ along, along)
    return corners
