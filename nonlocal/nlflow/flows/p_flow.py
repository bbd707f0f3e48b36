"""The gradient flow of a p-functional, and the step that suits it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nlflow._array import Array, underflowing
from nlflow.errors import InputError, check_number
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import FixedStep
from nlflow.flows.integrators.base import StepFailureError
from nlflow.functionals.variational.jp import Jp
from nlflow.functionals.variational.lagged import quadratic_step

_REST = 1e-12  # of the signal's size: all of it is rounding
_ENOUGH = 1e-6  # residual of the linear problems, where rounding keeps them from their tolerance


@underflowing
class PFlow(Flow):
    """Gradient flow of J_p or E_p, du/dt = -grad, in the L2 metric: edge-preserving diffusion for p < 2.

    du_i/dt = sum_j w_j K_ij |u_j - u_i|^(p - 2) (u_j - u_i) [+ lambda_i (f_i - u_i)], the nonlocal p-Laplacian flow. It
    conserves sum_i w_i u_i (without fidelity) and keeps the range of u; for p < 2 it comes to rest in finite time.
    `LaggedDiffusivity` integrates it with any step, `RungeKutta` for p > 1 with small ones.

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
        "integrate it with LaggedDiffusivity(dt), or RungeKutta() for p > 1, and find its limit with Ep.minimizer()"
    )

    def __init__(self, functional: Jp) -> None:
        if not isinstance(functional, Jp):
            raise InputError(f"functional: got {type(functional).__name__}, expected Jp(affinity, p) or Ep(...)")
        affinity = functional.affinity.symmetrized()
        super().__init__(affinity, "l2", functional.observed, evolving=False, every=1)
        self._functional = functional

    @property
    def functional(self) -> Jp:
        """The functional that the flow descends."""
        return self._functional

    def velocity(self, u: Array) -> Array:
        """Return du/dt at `u`, for p > 1; see `Jp.gradient`."""
        self.applications += 1
        return -self._functional.gradient(u)

    def given(self) -> list[Any]:
        """Return what the flow was given beside its kernel: the observed signal and the fidelity."""
        return ["", self.observed, None if self.observed is None else self._functional.fidelity]

    def __repr__(self) -> str:
        return f"PFlow({self._functional!r})"


@underflowing
class LaggedDiffusivity(FixedStep):
    """Implicit steps with the diffusivity of the step before, (1 + dt (L(u) + lambda)) v = u + dt lambda f; order 1.

    L(u) is the operator of the quadratic J reweighted by |u_i - u_j|^(p - 2), which touches J_p from above at u. So
    J_p (E_p) falls in every step however long it is, the range is kept and the mean conserved. Each step is the
    minimizer of an `E`, by conjugate gradients in float64, whatever the dtype of u. Also for p = 1, total variation
    flow.

    Parameters
    ----------
    dt : float
    smoothing : float
        What |u_i - u_j| is smoothed with, (|u_i - u_j|^2 + s^2)^(1/2), in units of the range of u: differences below
        it count as none.
    """

    order = 1.0

    def __init__(self, dt: float, smoothing: float = 1e-4) -> None:
        super().__init__(dt)
        self.smoothing = check_number("smoothing", smoothing, minimum=0, strict=True)

    def stability_limit(self, flow: Flow) -> float:
        """Return infinity: every step lowers the functional."""
        del flow
        return math.inf

    def check(self, flow: Flow) -> None:
        """Raise `InputError` for a flow that is linear."""
        if not isinstance(flow, PFlow):
            raise InputError(
                f"integrator: LaggedDiffusivity is for a PFlow, got {type(flow).__name__}; use Exponential() or "
                "SemiImplicit()"
            )

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        """Minimize the quadratic functional that touches J_p at u."""
        self.check(flow)
        jp: Any = flow.functional
        flow.applications += 1
        flat = jp.flat(u)
        size = float(np.ptp(flat))
        if size <= _REST * float(np.abs(flat).max()) and jp.observed is None:
            return u
        # Not below what has an inverse: a signal that comes to rest loses its range.
        smoothing = max(self.smoothing * (size or float(np.ptp(jp.observed)) or 1.0), 1e-200)
        fidelity = np.broadcast_to(np.asarray(jp.fidelity, dtype=np.float64), jp.affinity.domain.shape).ravel()
        drawn = flat if jp.observed is None else flat + dt * fidelity[:, None] * jp.flat(jp.observed)
        strength = 1 / dt + fidelity
        factors = jp.lagged(jp.slopes(flat), smoothing)
        found = quadratic_step(jp, factors, drawn / (dt * strength)[:, None], strength, flat)
        if found.residual > _ENOUGH:
            raise StepFailureError(f"conjugate gradients: {found.message}; or use a larger smoothing or a smaller dt")
        return found.u.reshape(u.shape).astype(u.dtype)
