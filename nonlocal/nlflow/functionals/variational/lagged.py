"""Lagged diffusivity: E_p for 1 < p <= 2 by a sequence of linear problems.

x^p <= x_0^p + p/2 x_0^(p - 2) (x^2 - x_0^2): at every u the quadratic J of the affinity reweighted by the factors
x(u)^(p - 2) touches J_p from above (up to a constant), so its minimizer, which conjugate gradients find, never raises
E_p. The factors are smoothed, (x^2 + s^2)^(p/2 - 1), which makes the same true of the smoothed energy, and s shrinks.
(Vogel and Oman 1996, doi 10.1137/0917016; Chan and Mulet 1999, doi 10.1137/S0036142997327075.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nlflow._array import Floats
from nlflow.functionals.energies import E
from nlflow.functionals.minimizer import Minimizer
from nlflow.functionals.variational.certificate import bounding_box, fidelity_slack
from nlflow.functionals.variational.jp import Jp

_FIRST, _SHRINK, _LAST = 0.3, 0.5, 1e-9  # the smoothing, of the size of f
_START = 1e-2


@dataclass(frozen=True)
class Iterate:
    """A signal with its value, its smoothed value (which never rises) and its duality gap, relative to nothing."""

    u: Floats
    value: float
    smoothed: float
    gap: float


def quadratic_step(jp: Jp, factors: Floats, f: Floats, fidelity: Floats, start: Floats) -> Minimizer:
    """Return the minimizer of the reweighted J + 1/2 sum_i w_i fidelity_i |u_i - f_i|^2.

    `factors` are the cells'; signals are (N, D), but that of the result has the shape of the domain.
    """
    shape = (*jp.affinity.domain.shape, -1)
    e = E(jp.graph.affinity(jp.on_edges(factors)), f.reshape(shape), fidelity.reshape(shape[:-1]))
    return e.minimizer(start=start.reshape(shape))


def iterates(jp: Jp, f: Floats, fidelity: Floats, start: Floats | None) -> Iterator[Iterate]:
    """Yield better and better signals, (N, D), for an `f` of size about 1; from J's own minimizer by default."""
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
        cut = np.minimum(factors, np.maximum(slopes, smoothing) ** (jp.p - 1) / np.maximum(slopes, 1e-300))
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
