"""Iteratively reweighted least squares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, power_of_two, underflowing
from nlflow.errors import InputError, check_integer, check_number, kind_of
from nlflow.functionals.constraint import Constraint, Held
from nlflow.functionals.energies import E, J
from nlflow.functionals.fidelity import NodeFidelity
from nlflow.functionals.minimizer import Minimizer, minimize_held
from nlflow.functionals.variational.certificate import bounding_box, fidelity_slack
from nlflow.functionals.variational.jp import Jp

_FIRST, _SHRINK, _LAST = 0.3, 0.5, 1e-9  # the smoothing, of the size of f
_START = 1e-2


@dataclass(frozen=True)
class Iterate:
    """A signal with its value, its smoothed value and its duality gap."""

    u: Floats
    value: float
    smoothed: float
    gap: float


def quadratic_step(jp: Jp, factors: Floats, f: Floats, fidelity: Floats, start: Floats) -> Minimizer:
    shape = (*jp.affinity.domain.shape, -1)
    e = E(jp.graph.affinity(jp.on_edges(factors)), f.reshape(shape), fidelity.reshape(shape[:-1]))
    return e.minimizer(start=start.reshape(shape))


def iterates(jp: Jp, f: Floats, fidelity: Floats, start: Floats | None) -> Iterator[Iterate]:
    """Yield better signals, (N, D), for an `f` of size about 1.

    The quadratic J with the factors x^(p - 2) touches J_p from above up to a constant (Vogel and Oman 1996, doi
    10.1137/0917016; Chan and Mulet 1999, doi 10.1137/S0036142997327075).
    """
    rigid = jp.affinity.domain.weights.ravel() * fidelity
    smoothing = _FIRST if start is None else _START
    u = f if start is None else start
    factors = np.ones_like(jp.measure) if start is None else jp.lagged(jp.slopes(start), smoothing)
    while True:
        found = quadratic_step(jp, factors, f, fidelity, u)
        u = found.u.reshape(f.shape)
        slopes = jp.slopes(u)
        misfit = 0.5 * float(np.sum(rigid[:, None] * (u - f) ** 2))
        # The flux of the linear problem leaves nothing of the fidelity's part but its residual. Where it is larger than
        # the p-th power allows the cells' part grows fast as p tends to 1, and a field that is cut there does better.
        cut = np.minimum(
            factors, np.maximum(slopes, smoothing * jp.steepness) ** (jp.p - 1) / np.maximum(slopes, 1e-300)
        )
        gap = min(_gap(jp, slopes, field, u, f, rigid) for field in (factors, cut))
        yield Iterate(u, jp.smoothed(slopes, 0.0) + misfit, jp.smoothed(slopes, smoothing) + misfit, gap)
        factors = jp.lagged(slopes, smoothing)
        if found.success:  # less smoothing makes the linear problems harder still
            smoothing = max(smoothing * _SHRINK, _LAST)


def _gap(jp: Jp, slopes: Floats, factors: Floats, u: Floats, f: Floats, rigid: Floats) -> float:
    """Return the duality gap of u and the field that is `factors` times its differences.

    The cells' part is 1/2 sum_c m_c (x^p / p + y^p' / p' - x y) >= 0, where y = factor x and 1/p + 1/p' = 1.
    """
    flow, dual = jp.graph.flux(jp.on_edges(factors), u), factors * slopes
    conjugate = jp.p / (jp.p - 1)
    with np.errstate(over="ignore", under="ignore"):
        terms = slopes**jp.p / jp.p + dual**conjugate / conjugate - slopes * dual
    cells = 0.5 * float(np.sum(jp.measure * np.maximum(terms, 0)))
    return cells + fidelity_slack(u, flow, rigid, f, bounding_box(u, f, rigid))


_GROWTH = 1.5  # of q - 1 from one stage to the next
_ROUGH, _INNER = 1e-2, 1e-3  # residuals of a stage before the last, and of a linear problem
_SMOOTHING = 1e-4, 1e-6  # of slopes beside the range of the values, for p > 2 and p < 2
_FINEST = 1e-13  # smoothing beside the range, to which it falls at p < 2
_HALVINGS = 40


@underflowing
def harmonic_extension(jp: Jp, constraint: Constraint, *, rtol: float = 1e-6, maxiter: int = 200) -> Minimizer:
    """Return the p-harmonic extension: the minimizer of J_p among the signals with the values of a constraint.

    Reweighted linear problems, q going from 2 to p (Flores, Calder and Lerman 2022, doi 10.1016/j.acha.2022.01.004,
    algorithm 3).

    Parameters
    ----------
    jp : Jp
        For 1 < p <= 10; below p = 1.4 rounding may keep the tolerance out of reach.
    constraint : Constraint
    rtol : float
        Of |sum_j y_ij| over sum_j |y_ij|, norms over the free nodes, y_ij = W_ij x_ij^(p - 2) (u_i - u_j) being the
        flow on an edge. `residual` of the result is that ratio.
    maxiter : int
        Linear problems; an iteration of each costs O(edges).

    Returns
    -------
    Minimizer

    Raises
    ------
    InputError
        For p = 1, values that depend on time, and where a part of the domain sees no constrained node.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Constraint, Jp, affinity_from_graph
    >>> from nlflow.functionals.variational import harmonic_extension
    >>> path = affinity_from_graph(np.array([[0, 1, 1, 2], [1, 0, 2, 1]]), edge_weight=[1.0, 1.0, 8.0, 8.0])
    >>> ends = Constraint([0, 2], [0.0, 3.0])
    >>> [round(float(harmonic_extension(Jp(path, p), ends).u[1]), 4) for p in (2, 4)]  # x^3 = 8 (3 - x)^3 for p = 4
    [2.6667, 2.0]
    """
    if not isinstance(jp, Jp):
        raise InputError(f"jp: got {kind_of(jp)}, expected a Jp")
    if not isinstance(constraint, Constraint):
        raise InputError(f"constraint: got {kind_of(constraint)}, expected Constraint(nodes, values)")
    if jp.p == 1:
        raise InputError("p: got 1, expected p > 1, for which the extension is unique; use p slightly above 1")
    rtol = check_number("rtol", rtol, minimum=0, strict=True)
    maxiter = check_integer("maxiter", maxiter, minimum=1)
    held = constraint.on(jp.affinity)
    like = held.zeros(jp.affinity)
    free = ~held.mask.ravel()[:, None]
    found = _linear(jp, np.ones_like(jp.measure), held, 1e-8)
    unit = power_of_two(float(np.abs(found).max()))  # powers of large and small values have no float
    u = jp.flat(found) / unit
    span = float(np.ptp(u)) or 1.0
    smoothing = _SMOOTHING[0 if jp.p > 2 else 1] * span
    done, left = 1, _residual(jp, u, free, jp.p)
    for q in _stages(jp.p):
        stage = type(jp).__new__(type(jp))
        stage.__dict__.update(jp.__dict__, p=q)
        target = rtol if q == jp.p else _ROUGH
        left = _residual(stage, u, free, q)
        while left > target and done < maxiter:
            v = jp.flat(_linear(jp, stage.lagged(stage.slopes(u), smoothing), held, min(_INNER, 0.1 * left))) / unit
            done += 1
            moved = _searched(stage, u, v - u, 1.0 if q < 2 else 1 / (q - 1), smoothing)
            stuck = moved is None
            if moved is not None:
                u, before, left = moved, left, _residual(stage, moved, free, q)
                stuck = left > 0.9 * before
            if stuck and q == jp.p < 2 and smoothing > _FINEST * span:
                smoothing *= 0.1
            elif moved is None:  # rounding is all that is left
                break
    success = left <= rtol
    advice = "" if success else f", above rtol={rtol:g}: raise maxiter or rtol, or take p nearer to 2"
    message = f"residual {left:.3g} after {done} linear problems{advice}"
    return Minimizer((u * unit).reshape(like.shape).astype(like.dtype), left, done, success, message)


def _stages(p: float) -> list[float]:
    count = int(np.ceil(abs(np.log(p - 1)) / np.log(_GROWTH)))
    return [*(1 + (p - 1) ** (np.arange(1, count) / count)).tolist(), p] if count else [p]


def _linear(jp: Jp, factors: Floats, held: Held, rtol: float) -> Floats:
    weighted = J(jp.graph.affinity(jp.on_edges(factors / factors.max())))
    found = minimize_held(
        weighted.affinity,
        NodeFidelity(0.0),
        held.zeros(jp.affinity),
        held,
        None,
        rtol=rtol,
        maxiter=10_000,
        name="graph",
    )
    return np.asarray(found.u)


def _searched(jp: Jp, u: Floats, way: Floats, length: float, smoothing: float) -> Floats | None:
    """Return the signal after the longest step that lowers the smoothed J_q: twice as long, or half, while it helps."""

    def value(step: float) -> float:
        return jp.smoothed(jp.slopes(u + step * way), smoothing)

    best, now = value(0.0), length
    tried = value(now)
    if tried < best:
        while now < 1 and (more := value(min(2 * now, 1.0))) < tried:
            now, tried = min(2 * now, 1.0), more
        return np.asarray(u + now * way)
    for _ in range(_HALVINGS):
        now /= 2
        if value(now) < best:
            return np.asarray(u + now * way)
    return None


def _residual(jp: Jp, u: Floats, free: NDArray[np.bool_], q: float) -> float:
    """Return what is left of the flows at free nodes, beside their moduli."""
    slopes = jp.slopes(u)
    rounding = 4 * float(np.finfo(u.dtype).eps) * float(np.abs(u).max())
    with np.errstate(divide="ignore"):
        factors = np.where(slopes > rounding, slopes ** (q - 2), 0.0)
    weights = jp.on_edges(factors)
    weights = weights / power_of_two(float(weights.max(initial=0.0)))
    flow = np.linalg.norm(np.where(free, jp.graph.flux(weights, u), 0.0))
    size = np.linalg.norm(jp.graph.row_sums(weights * jp.graph.lengths(u))[free[:, 0]])
    return float(flow / size) if size > 0 else 0.0
