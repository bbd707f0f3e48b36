"""Flows of p-functionals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nlflow._array import Array, Floats, underflowing
from nlflow.errors import InputError, check_number, kind_of
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import FixedStep
from nlflow.flows.integrators.base import SLACK, StepFailureError
from nlflow.functionals.misfits import Misfit, Squares
from nlflow.functionals.variational.jp import Jp
from nlflow.functionals.variational.reweighted import quadratic_step

_REST = 1e-12  # of the signal's size: all of it is rounding
_ENOUGH = 1e-6  # residual of the linear problems, where rounding keeps them from their tolerance


@underflowing
class PFlow(Flow):
    """Gradient flow of J_p or E_p, du/dt = -grad, in the L2 metric: edge-preserving diffusion for p < 2.

    du_i/dt = sum_j w_j K_ij |u_j - u_i|^(p - 2) (u_j - u_i) [+ lambda_i (f_i - u_i)], the nonlocal p-Laplacian flow;
    with a misfit g the last term is -lambda_i g'(u_i, f_i). `LaggedDiffusivity` integrates it with any step for p <= 2,
    `ForwardBackward` for p >= 2, `RungeKutta` for p > 1 with small ones.

    Parameters
    ----------
    functional : Jp or Ep

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import Gaussian, Grid, Jp, LaggedDiffusivity, PFlow, affinity, solve
    >>> flow = PFlow(Jp(affinity(Gaussian(width=1.0), Grid(20), window=2), p=1.2))
    >>> step = np.where(np.arange(20) < 10, 0.0, 1.0)
    >>> solution = solve(flow, step, t=0.1, integrator=LaggedDiffusivity(dt=0.02))
    >>> solution.success, round(float(solution.final.mean()), 9)
    (True, 0.5)
    """

    advice = (
        "integrate it with LaggedDiffusivity(dt) for p <= 2, ForwardBackward(dt) for p >= 2, RungeKutta() for p > 1, "
        "and find its limit with Ep.minimizer()"
    )

    def __init__(self, functional: Jp) -> None:
        if not isinstance(functional, Jp):
            raise InputError(f"functional: got {kind_of(functional)}, expected Jp(affinity, p) or Ep(...)")
        affinity = functional.affinity.symmetrized()
        super().__init__(affinity, "l2", functional.observed, evolving=False, every=1)
        self._functional = functional

    @property
    def functional(self) -> Jp:
        return self._functional

    def velocity(self, u: Array) -> Array:
        self.applications += 1
        return -self._functional.gradient(u)

    def check_signal(self, name: str, value: Any) -> Array:
        u = super().check_signal(name, value)
        misfit = _misfit(self._functional)
        if misfit.floor(u) is not None and float(u.min()) < 0:
            raise InputError(f"{name}: got values down to {float(u.min()):g}, expected values >= 0 for {misfit!r}")
        return u

    def given(self) -> list[Any]:
        own = self._functional
        fidelity = None if self.observed is None else own.fidelity
        return ["", self.observed, fidelity, own.p, own.isotropic, _misfit(own)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._functional!r})"


def _misfit(functional: Jp) -> Misfit:
    return getattr(functional, "misfit", None) or Squares()


def _pulled(functional: Any, flat: Floats, dt: float) -> Floats:
    """Return a signal (N, D) after an implicit step of the fidelity alone, by the proximal map of its misfit."""
    if functional.observed is None:
        return flat
    step = dt * np.broadcast_to(np.asarray(functional.fidelity, dtype=np.float64), functional.affinity.domain.shape)
    step = step.reshape(-1, 1)
    moved = _misfit(functional).prox(flat, functional.flat(functional.observed), step)
    return np.where(step > 0, moved, flat)


@underflowing
class ForwardBackward(FixedStep):
    """Explicit diffusion, then the proximal map of the misfit: v = prox(u - dt grad J_p(u)); order 1, for p >= 2.

    (Lions and Mercier 1979, doi 10.1137/0716071.)

    Parameters
    ----------
    dt : float
        At most 1 / max_i sum_j w_j K_ij (p - 1) |u_i - u_j|^(p - 2), with any fidelity and misfit. For p > 2 a step
        above it fails.
    """

    order = 1.0
    longer = ""

    def stability_limit(self, flow: Flow) -> float:
        jp: Any = flow.functional
        spread = 1.0
        if jp.p > 2:
            if jp.observed is None:
                return math.inf
            spread = float(np.linalg.norm(np.ptp(jp.flat(jp.observed), axis=0)))
        steep = np.full_like(jp.measure, (jp.p - 1) * spread ** (jp.p - 2))
        if jp.isotropic and jp.p > 2:
            steep *= float(np.sqrt(jp.graph.degree / jp.measure).max()) ** (jp.p - 2)
        return self._limit(jp, steep)

    @staticmethod
    def _limit(jp: Any, curvature: Floats) -> float:
        slope = jp.graph.row_sums(jp.on_edges(curvature)) / jp.affinity.domain.weights.ravel()
        return 1 / float(slope.max()) if slope.max() > 0 else math.inf

    def surely_stable(self, flow: Flow) -> bool:
        return bool(flow.functional.p > 2)

    def check_kind(self, flow: Flow) -> None:
        if not isinstance(flow, PFlow):
            raise InputError(
                f"integrator: ForwardBackward is for a PFlow, got {kind_of(flow)}; use SemiImplicit() or Exponential()"
            )
        if flow.functional.p < 2:
            raise InputError(
                f"integrator: ForwardBackward needs p >= 2, got {flow.functional.p:g}, for which the diffusion has no "
                "bound where neighbours are equal; use LaggedDiffusivity(dt)"
            )

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        self.check_kind(flow)
        jp: Any = flow.functional
        flow.applications += 1
        if jp.p > 2:
            limit = self._limit(jp, (jp.p - 1) * jp.slopes(jp.flat(u)) ** (jp.p - 2))
            if dt > limit * SLACK:
                raise StepFailureError(f"dt: got {dt:g}, but this signal needs dt <= {limit:.6g}; reduce dt")
        moved = jp.flat(u) - dt * jp.flat(Jp.gradient(jp, u))
        return _pulled(jp, moved, dt).reshape(u.shape).astype(u.dtype)


@underflowing
class LaggedDiffusivity(FixedStep):
    """Implicit steps with the diffusivity of the step before, (1 + dt (L(u) + lambda)) v = u + dt lambda f; order 1.

    L(u) is the operator of the quadratic J reweighted by |u_i - u_j|^(p - 2), for 1 <= p <= 2. The smoothed J_p or E_p
    falls however long the step is. For another misfit its proximal map follows the diffusion: then E_p need not fall,
    and the limit is off by O(dt).

    Parameters
    ----------
    dt : float
    smoothing : float
        s in (|u_i - u_j|^2 + s^2)^(1/2), in units of the range of u; if isotropic |grad u|_i in place of
        |u_i - u_j|, and of s the slope of such differences.
    """

    order = 1.0

    def __init__(self, dt: float, smoothing: float = 1e-4) -> None:
        super().__init__(dt)
        self.smoothing = check_number("smoothing", smoothing, minimum=0, strict=True)

    def stability_limit(self, flow: Flow) -> float:
        del flow
        return math.inf

    def check_kind(self, flow: Flow) -> None:
        if not isinstance(flow, PFlow):
            raise InputError(
                f"integrator: LaggedDiffusivity is for a PFlow, got {kind_of(flow)}; use Exponential() or "
                "SemiImplicit()"
            )
        if flow.functional.p > 2:
            raise InputError(
                f"integrator: LaggedDiffusivity needs p <= 2, got {flow.functional.p:g}, for which no quadratic "
                "functional touches J_p from above; use ForwardBackward(dt) or RungeKutta()"
            )

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        self.check_kind(flow)
        jp: Any = flow.functional
        flow.applications += 1
        flat = jp.flat(u)
        size = float(np.ptp(flat))
        if size <= _REST * float(np.abs(flat).max()) and jp.observed is None:
            return u
        # Not below what has an inverse: a signal that comes to rest loses its range.
        smoothing = max(self.smoothing * (size or float(np.ptp(jp.observed)) or 1.0), 1e-200)
        fidelity = np.broadcast_to(np.asarray(jp.fidelity, dtype=np.float64), jp.affinity.domain.shape).ravel()
        split = not isinstance(_misfit(jp), Squares)
        if split:
            fidelity = 0 * fidelity
        drawn = flat if jp.observed is None else flat + dt * fidelity[:, None] * jp.flat(jp.observed)
        strength = 1 / dt + fidelity
        factors = jp.lagged(jp.slopes(flat), smoothing)
        # About its middle, of which a signal that is all but at rest would lose its digits.
        middle = flat[:1]
        target = drawn / (dt * strength)[:, None] - middle
        found = quadratic_step(jp, factors, target, strength, flat - middle)
        if found.residual > _ENOUGH:
            raise StepFailureError(f"conjugate gradients: {found.message}; or use a larger smoothing or a smaller dt")
        moved = jp.flat(found.u) + middle
        moved = _pulled(jp, moved, dt) if split else moved
        return moved.reshape(u.shape).astype(u.dtype)
