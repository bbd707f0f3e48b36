"""Steps of one length."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

from nlflow._array import Array, plus, underflowing
from nlflow.errors import InputError, check_number, checked_call
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.base import Integrator, check_made_of, explicit_limit, symmetry_of
from nlflow.flows.linear import LinearFlow, as_linear
from nlflow.flows.spectrum import euler_limit, is_told, largest_eigenvalue, limit_of, own_eigenvalues


class FixedStep(Integrator):
    """Base of integrators with steps of one length, shortened where they would pass a target.

    A subclass defines `step`, ``order`` and `stability_limit`. `step` gets the flow at the time where it begins; a
    stage at another time takes ``flow.when(flow.time + c * dt)``, and then ``takes_time`` may be True.

    Parameters
    ----------
    dt : float
        > 0.
    """

    def __init__(self, dt: float) -> None:
        self.dt = check_number("dt", dt, minimum=0, strict=True)

    @property
    def length(self) -> float:
        return self.dt

    @abstractmethod
    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        """Return the signal after one step of length dt."""

    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        flow = flow.when(t)
        remaining = target - t
        # A remainder within rounding of the step is the step, so that 0.1 + 0.1 + ... meets its target.
        if remaining <= self.dt * (1 + 1e-9):
            return self._moved(flow, u, remaining, memory), target
        return self._moved(flow, u, self.dt, memory), t + self.dt

    def _moved(self, flow: Flow, u: Array, dt: float, memory: dict[str, Any]) -> Array:
        """Return the signal after one step; overridden where steps remember something."""
        del memory
        return self.step(flow, u, dt)


class SplitStep(FixedStep):
    """Base of steps that treat A apart from the rest.

    Attributes
    ----------
    reach : float
        The step is stable up to reach / slope of the reaction where A = 0.
    self_adjoint : bool
        Whether A has to be.
    """

    takes_time = True
    takes_constraint = True
    reach: float
    self_adjoint = False

    def stability_limit(self, flow: Flow) -> float:
        linear = as_linear(flow)
        bound = linear.terms.bound
        if not is_told(linear):
            return math.nan
        if self.reach < math.inf and not linear.inner.by_nodes and (bound > 0 or linear.inner.varies):
            return math.nan
        return self.reach / bound if bound > 0 else math.inf

    def velocity_of(self, flow: Flow, u: Array) -> Array:
        linear = as_linear(flow)
        part = linear.free(u)
        return linear.drawn(part) - linear.on_free(part)

    def check_kind(self, flow: Flow) -> None:
        name, linear = type(self).__name__, as_linear(flow)
        if linear.evolving:
            raise InputError(f"integrator: {name} needs a frozen kernel; use RungeKutta()")
        by_transform = linear.modes is not None and linear.terms.constraint is None
        if self.self_adjoint and not (linear.symmetric or by_transform):
            advice = "" if linear.inner.by_nodes else " or IMEX(dt)"
            raise InputError(f"integrator: {name} needs {symmetry_of(linear)}; use RungeKutta(){advice}")
        if over := linear.overridden("linear"):
            raise InputError(
                f"integrator: {name} is made of the flow's linear() and its terms, got a {type(flow).__name__}, whose "
                f"{over}() says more and would be left out; use RungeKutta(), or give a Reaction"
            )


@checked_call
@underflowing
class ExplicitEuler(FixedStep):
    """Explicit Euler, ``u + dt du/dt``; order 1, for a self-adjoint A stable up to dt = 2 / (rho(A) + b).

    b is the bound of a reaction. In the L2 metric rho(A) <= lambda + 2 max d, and lambda + max d for positive definite
    kernels, with d as in `GradientFlow`.

    Parameters
    ----------
    dt : float
        Step; refused above the limit where that is known.
    """

    order = 1.0
    takes_time = True
    takes_constraint = True
    called = "explicit Euler"
    longer = "Exponential() or RungeKutta()"

    def stability_limit(self, flow: Flow) -> float:
        return explicit_limit(flow)

    def surely_stable(self, flow: Flow) -> bool:
        linear = as_linear(flow)
        return linear.has_own_bounds and self.dt <= explicit_limit(flow, free=True)

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        return plus(u, dt, flow.velocity(u))


@checked_call
@underflowing
class SemiImplicit(FixedStep):
    """Fidelity implicit, averaging explicit: ``(u + dt r (Pu - u) + dt phi f) / (1 + dt phi)``; order 1.

    With dt = 1 in the degree metric it is u <- (Pu + lambda~ f) / (1 + lambda~), which is stable.

    Parameters
    ----------
    dt : float
    """

    order = 1.0
    takes_constraint = True
    called = "the semi-implicit step"
    longer = "dt=1, which is always stable in the degree metric"

    def __init__(self, dt: float = 1.0) -> None:
        super().__init__(dt)

    def stability_limit(self, flow: Flow) -> float:
        """Return 2 / (rho(r (I - P)) - min phi), infinity when that is not positive; 1 for a non-symmetric P."""
        if not flow.symmetric:
            if not as_linear(flow).plainly_linear:
                return limit_of(own_eigenvalues(as_linear(flow), diffusion=True))
            # Eigenvalues of P lie in the unit disk: at dt = 1 the step is an average, and that is the safe bound.
            return 1.0
        flow = as_linear(flow)
        excess = largest_eigenvalue(flow, diffusion=True) - flow.spectral_bounds()[0]
        return 2 / excess if excess > 0 else math.inf

    def surely_stable(self, flow: Flow) -> bool:
        linear = as_linear(flow)
        return linear.plainly_linear and self.dt * linear.diffusion_bound() <= 2

    def check_kind(self, flow: Flow) -> None:
        check_made_of(flow, "diffusion", self)
        if not flow.inner.by_nodes:
            raise InputError(
                f"integrator: SemiImplicit solves for each node by itself, got the metric {flow.metric!r}; use IMEX(dt)"
            )

    def velocity_of(self, flow: Flow, u: Array) -> Array:
        linear = as_linear(flow)
        return _pulled_to(linear, u, -linear.diffusion(u))

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        flow = as_linear(flow)
        moved = u - dt * flow.diffusion(u)
        if flow.fidelity is None or flow.observed is None:
            return moved
        return flow.fidelity.implicit_step(moved, flow.observed, dt)


@underflowing
class NeutrenoStep(Integrator):
    """One NeuTRENO layer a step, ``u <- Pu + lambda~ (f - u)`` (arXiv 2312.00751, eq. 22-28); order 1.

    Explicit Euler of length 1 in the degree metric; stable where rho(P - lambda~ I) < 1, that is for
    0 < lambda~ < 1 + mu_min(P) when k is symmetric.
    """

    order = 1.0
    unit_steps = True
    _what: ClassVar[str] = "a NeuTRENO step"

    def stability_limit(self, flow: Flow) -> float:
        return euler_limit(as_linear(flow))

    def velocity_of(self, flow: Flow, u: Array) -> Array:
        linear = as_linear(flow)
        return _pulled_to(linear, u, linear.average(u) - u)

    def check_kind(self, flow: Flow) -> None:
        inner = as_linear(flow).inner
        if not (inner.by_nodes and inner.normalized):
            raise InputError(
                f"integrator: {self._what} divides by the degree, so the flow must be in the degree metric; build it "
                "with metric='degree'"
            )
        check_made_of(flow, "average", self)

    def surely_stable(self, flow: Flow) -> bool:
        linear = as_linear(flow)
        known = linear.safe_step > 1 or (linear.fidelity is None and linear.safe_step == 1)
        return known and linear.plainly_linear

    def unstable(self, flow: Flow, limit: float) -> str:
        linear = as_linear(flow)
        largest = linear.spectral_bounds()[0] if linear.fidelity is None else linear.fidelity.bounds()[1]
        bound = f"fidelity < {largest + 2 / limit * (limit - 1):.6g} (1 + mu_min(P))" if linear.symmetric else ""
        return (
            f"fidelity: got {largest:g}, which makes the NeuTRENO step unstable (the longest stable step is "
            f"{limit:.6g} < 1){'; it needs ' + bound if bound else ''}; reduce the fidelity or use SemiImplicit()"
        )

    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        del target, memory
        linear = as_linear(flow)
        return _pulled_to(linear, u, linear.average(u)), t + 1


@underflowing
class AttentionStep(NeutrenoStep):
    """One attention layer a step, ``u <- Pu``: explicit Euler of length 1 in the degree metric; order 1.

    (arXiv 2312.00751, Theorem 1.) For flows without fidelity.
    """

    _what = "an attention step"

    def stability_limit(self, flow: Flow) -> float:
        linear = as_linear(flow)
        return math.inf if linear.plainly_linear else euler_limit(linear)

    def surely_stable(self, flow: Flow) -> bool:
        del flow
        return False

    def unstable(self, flow: Flow, limit: float) -> str:
        del flow
        return f"flow: the longest stable step of its own average is {limit:.6g} < 1; use ExplicitEuler, which has a dt"

    def check_kind(self, flow: Flow) -> None:
        super().check_kind(flow)
        if as_linear(flow).fidelity is not None:
            raise InputError(
                "integrator: AttentionStep is for flows without fidelity; use NeutrenoStep or SemiImplicit"
            )


def _pulled_to(flow: LinearFlow, u: Array, moved: Array) -> Array:
    return moved if flow.fidelity is None or flow.observed is None else moved + flow.fidelity.times(flow.observed - u)
