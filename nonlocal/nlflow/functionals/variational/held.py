"""Minimizers of J_p among signals with given values at some nodes, for p > 1: p-harmonic extensions.

Iteratively reweighted least squares: with the factors x^(q - 2) of u the quadratic J is minimized under the same
constraint, and u goes 1 / (q - 1) of the way to its minimizer (all of it for q < 2), which for one channel is Newton's
step. A line search makes J_q fall, and q goes from 2 to p (Flores, Calder and Lerman 2022, doi
10.1016/j.acha.2022.01.004, algorithm 3).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.errors import InputError, check_integer, check_number
from nlflow.functionals.constraint import Constraint, Held
from nlflow.functionals.energies import J
from nlflow.functionals.fidelity import NodeFidelity
from nlflow.functionals.minimizer import Minimizer, minimize_held
from nlflow.functionals.variational.jp import Jp

_GROWTH = 1.5  # of q - 1 from one stage to the next
_ROUGH, _INNER = 1e-2, 1e-3  # residuals of a stage before the last, and of a linear problem
_SMOOTHING = 1e-4, 1e-6  # of slopes beside the range of the values, for p > 2 and p < 2
_HALVINGS = 40


@underflowing
def harmonic_extension(jp: Jp, constraint: Constraint, *, rtol: float = 1e-6, maxiter: int = 200) -> Minimizer:
    """Return the p-harmonic extension: the minimizer of J_p among the signals with the values of a constraint.

    Parameters
    ----------
    jp : Jp
        For 1 < p <= 10.
    constraint : Constraint
    rtol : float
        Of |sum_j y_ij| over sum_j |y_ij|, norms over the free nodes, y_ij = W_ij x_ij^(p - 2) (u_i - u_j) being the
        flow on an edge. `residual` of the result is that ratio.
    maxiter : int
        Linear problems, each of which conjugate gradients solve in O(edges) an iteration: some 10 for p = 4, 30 for
        p = 10.

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
    if jp.p == 1:
        raise InputError("p: got 1, expected p > 1, for which the extension is unique; use p slightly above 1")
    rtol = check_number("rtol", rtol, minimum=0, strict=True)
    maxiter = check_integer("maxiter", maxiter, minimum=1)
    held = constraint.on(jp.affinity)
    like = held.zeros(jp.affinity)
    free = ~held.mask.ravel()[:, None]
    found = _linear(jp, np.ones_like(jp.measure), held, 1e-8)
    u = jp.flat(found)
    span = float(np.ptp(u)) or 1.0
    smoothing = _SMOOTHING[0 if jp.p > 2 else 1] * span
    done, left = 1, _residual(jp, u, free, jp.p)
    for q in _stages(jp.p):
        stage = type(jp).__new__(type(jp))
        stage.__dict__.update(jp.__dict__, p=q)
        target = rtol if q == jp.p else _ROUGH
        left = _residual(stage, u, free, q)
        while left > target and done < maxiter:
            v = jp.flat(_linear(jp, stage.lagged(stage.slopes(u), smoothing), held, min(_INNER, 0.1 * left)))
            done += 1
            moved = _searched(stage, u, v - u, 1.0 if q < 2 else 1 / (q - 1), smoothing)
            if moved is None:  # rounding is all that is left
                break
            u, left = moved, _residual(stage, moved, free, q)
    success = left <= rtol
    advice = "" if success else f", above rtol={rtol:g}: raise maxiter or rtol, or take p nearer to 2"
    message = f"residual {left:.3g} after {done} linear problems{advice}"
    return Minimizer(u.reshape(like.shape).astype(like.dtype), left, done, success, message)


def _stages(p: float) -> list[float]:
    """Return the exponents on the way from 2 to p."""
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
    with np.errstate(divide="ignore"):
        factors = np.where(slopes > 0, slopes ** (q - 2), 0.0)
    weights = jp.on_edges(factors)
    flow = np.linalg.norm(np.where(free, jp.graph.flux(weights, u), 0.0))
    size = np.linalg.norm(jp.graph.row_sums(weights * jp.graph.lengths(u))[free[:, 0]])
    return float(flow / size) if size > 0 else 0.0
