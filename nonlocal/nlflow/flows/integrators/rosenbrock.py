"""Linearly implicit steps for any flow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from nlflow._array import Array, namespace, scalar, underflowing
from nlflow.errors import InputError, NumericalError
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.exponential import modes_of
from nlflow.flows.integrators.runge_kutta import Embedded, Tried, combine, weighted
from nlflow.flows.linear import LinearFlow
from nlflow.functionals.constraint import TermError, TermInputError
from nlflow.functionals.krylov import gmres

_MOST = 1000  # derivatives of the velocity for one linear system
_SHARE = 1e-3  # of the tolerances that a linear system may miss
_FIXED = 1e-10  # relative residuals of steps of one length; 1e-5 in float32
_NOISE = 1e-7  # relative residuals that derivatives by differences may leave; 1e-3 in float32


@dataclass(frozen=True)
class Rosenbrock4:
    """Coefficients of RODAS, in the form that needs no product with J."""

    gamma: float = 0.25
    shares: tuple[float, ...] = (0.0, 0.386, 0.21, 0.63, 1.0, 1.0)
    rates: tuple[float, ...] = (0.25, -0.1043, 0.1035, -0.0362, 0.0, 0.0)
    stages: tuple[tuple[float, ...], ...] = (
        (),
        (1.544,),
        (0.9466785280815826, 0.2557011698983284),
        (3.314825187068521, 2.896124015972201, 0.9986419139977817),
        (1.221224509226641, 6.019134481288629, 12.53708332932087, -0.6878860361058950),
        (1.221224509226641, 6.019134481288629, 12.53708332932087, -0.6878860361058950, 1.0),
    )
    couplings: tuple[tuple[float, ...], ...] = (
        (),
        (-5.6688,),
        (-2.430093356833875, -0.2063599157091915),
        (-0.1073529058151375, -9.594562251023355, -20.47028614809616),
        (7.496443313967647, -10.24680431464352, -33.99990352819905, 11.70890893206160),
        (8.083246795921522, -7.981132988064893, -31.52159432874371, 16.31930543123136, -6.058818238834054),
    )
    order: float = 4.0
    error: bool = True


@underflowing
class Rosenbrock(Embedded):
    """Linearly implicit step of order 4 for any flow, with an estimate of its error: RODAS.

    With J the derivative of the velocity f at u, each of six stages solves a linear system by GMRES (Hairer and Wanner
    1996, section IV.7, doi 10.1007/978-3-642-05221-7)::

        (I - h g J) k_i = g (h f(u + sum_j a_ij k_j, t + s_i h) + sum_j c_ij k_j + h^2 r_i df/dt)
        u' = u + sum_i m_i k_i

    L-stable, for stiff flows. Six velocities a step, two more with terms that depend on time, and a derivative for
    each iteration.

    Parameters
    ----------
    rtol, atol : float
        Tolerances of the local error, as in `RungeKutta`.
    dt : float, optional
        First step; with `adaptive` off, every step.
    adaptive : bool
        Whether the step follows the error.

    Examples
    --------
    Van der Pol's oscillator with m = 1000, whose jumps take a thousandth of its time.

    >>> import numpy as np
    >>> from nlflow import GradientFlow, J, Points, Reaction, solve
    >>> from nlflow.affinities import Unlinked
    >>> from nlflow.flows import Rosenbrock
    >>> def oscillator(u):
    ...     x, v = u[..., 0], u[..., 1]
    ...     return np.stack([1000 * v, 1000 * ((1 - x**2) * v * 1000 - x)], axis=-1)
    >>> term = Reaction(oscillator, ((-3, 3), (-2, 2)), components=2, bound=3e7)
    >>> flow = GradientFlow(J(Unlinked(Points([0.0]))), "degree", reaction=term)
    >>> found = solve(flow, np.array([[2.0, 0.0]]), t=0.5, integrator=Rosenbrock(rtol=1e-6, atol=1e-9))
    >>> found.success, found.stats["steps"] < 100
    (True, True)
    """

    tableau: ClassVar[Any] = Rosenbrock4()
    order = tableau.order
    takes_time = True
    takes_constraint = True
    keeps_limit = True
    longer = ""

    def stability_limit(self, flow: Flow) -> float:
        del flow
        return math.inf

    def _try(self, flow: Flow, u: Array, first: Array, h: float, t: float, end: float) -> Tried:
        table, slopes = self.tableau, list[Array]()
        try:
            rate = self._rate(flow, u, first, h) if flow.timed else None
            for row, coupling, share, r in zip(table.stages, table.couplings, table.shares, table.rates, strict=True):
                force = first
                if row:
                    here = flow.when(end if share == 1 else t + share * h)
                    stage = here.held(u + combine(row, slopes))
                    if not bool(namespace(stage).all(namespace(stage).isfinite(stage))):
                        raise NumericalError("the signal overflowed")
                    force = here.at(stage).velocity(stage) + combine(coupling, slopes) / h
                if rate is not None and r != 0:
                    force = force + (h * r) * rate
                slopes.append(self._solved(flow, u, h, force))
            moved = u + combine((*table.stages[-1], 1.0), slopes)
        except (TermError, TermInputError):
            raise
        except (InputError, NumericalError) as error:
            return Tried(flow, u, None, math.inf, str(error))
        over = scalar(self._control().measured(slopes[-1], u, moved))
        return Tried(flow.when(end), moved, None, over)

    @staticmethod
    def _rate(flow: Flow, u: Array, first: Array, h: float) -> Array:
        """Return df/dt of what depends on time, by differences of order 2 that stay within the step."""
        ahead = float(namespace(u).finfo(u.dtype).eps) ** (1 / 3) * h
        one, two = (flow.when(flow.time + k * ahead).velocity(u) for k in (1, 2))
        return (4 * one - 3 * first - two) / (2 * ahead)

    def _solved(self, flow: Flow, u: Array, h: float, force: Array) -> Array:
        """Return k with (I - h g J) k = h g force, or raise `NumericalError`."""
        xp, s = namespace(u), self.tableau.gamma * h
        now, single = flow.at(u), u.dtype == namespace(u).float32

        def kept(v: Array) -> Array:
            if isinstance(flow, LinearFlow) and flow.conserves_mean and not flow.evolving:
                return flow.without_mean(v)
            return v

        b = kept(s * force)
        if not bool(xp.all(xp.isfinite(b))):
            raise NumericalError("the velocity overflowed")
        # Over the tolerances, so that no value hides another one whose units are smaller.
        scale = self.atol + self.rtol * xp.abs(u)
        scale = xp.where(scale > 0, scale, xp.ones_like(scale))
        over = scalar(weighted(b, scale))
        if over == 0:
            return b
        rtol = 1e-5 if single else _FIXED
        if self.adaptive:
            rtol = max(min(_SHARE / over, 1e-2), 1e-6 if single else 1e-13)
        modes = modes_of(now, u) if isinstance(now, LinearFlow) else None

        def undone(v: Array) -> Array:
            w = scale * v
            return w if modes is None else modes.back(modes.inverse(s, 0.0, modes.forward(w)), w.dtype)

        def operator(v: Array) -> Array:
            w = undone(v)
            return (w - s * now.jacobian(u, w)) / scale

        count = math.prod(u.shape)
        restart = max(min(2**26 // count, 40, count), 1)
        right = b / (over * scale)
        found = gmres(operator, right, 0 * b, rtol=rtol, maxiter=_MOST, restart=restart, inner=_product)
        if not found.residual <= max(10 * rtol, 1e-3 if single else _NOISE):
            raise NumericalError(
                f"the linear system of a stage was solved to {found.residual:.3g} alone, expected {rtol:.3g}"
            )
        return kept(over * undone(found.x))


def _product(v: Array, w: Array) -> Array:
    xp = namespace(v)
    return xp.reshape(xp.sum(v * w, dtype=xp.float64), (1,))
