"""The contract of an integrator."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from nlflow._array import Array, constant_like, namespace
from nlflow.errors import InputError, StabilityError
from nlflow.flows.flow import Flow
from nlflow.flows.linear import LinearFlow, as_linear
from nlflow.flows.spectrum import euler_limit, is_told

# A limit that comes from an eigenvalue is known up to rounding; a step this close to it is let through.
SLACK = 1 + 1e-9


class StepFailureError(ArithmeticError):
    """No step of any length meets the tolerance."""


class Integrator(ABC):
    """Contract of an integrator, which `nlflow.testing.check_integrator` checks.

    Attributes
    ----------
    order : float
        Order of accuracy in the step; infinity for an exact method.
    takes_time : bool
        Whether each stage takes the velocity at its own time (`Flow.when`).
    takes_constraint : bool
        Whether each stage sees the values that a constraint gives.
    takes_noise : bool
        Whether the method steps with the noise of a flow, `Flow.noise`, counting draws in ``memory["draws"]``.
    strong_order, weak_order : float
        Orders of paths, and of means of smooth functions of them, where the strength of noise depends on the signal.
    strong_order_additive : float
        Order of paths where the strength does not depend on the signal.
    unit_steps : bool
        Whether every step is one layer, and times are whole numbers.
    keeps_limit : bool
        Whether the method keeps its steps within its `stability_limit`; otherwise the time loop checks them.
    called : str
        What messages call the method; the name of its class by default.
    longer : str
        What messages advise in place of a step that is too long.
    """

    order: ClassVar[float]
    takes_time: ClassVar[bool] = False
    takes_constraint: ClassVar[bool] = False
    takes_noise: ClassVar[bool] = False
    strong_order: ClassVar[float] = 0.0
    strong_order_additive: ClassVar[float] = 0.0
    weak_order: ClassVar[float] = 0.0
    unit_steps: ClassVar[bool] = False
    keeps_limit: ClassVar[bool] = False
    called: ClassVar[str] = ""
    longer: ClassVar[str] = "RungeKutta()"

    @property
    def length(self) -> float | None:
        """The length of a step, None where the method chooses it."""
        return 1.0 if self.unit_steps else None

    def order_for(self, flow: Flow) -> float:
        """Return the order for `flow`: 1 at most where a kernel is held for ``every`` > 1 steps."""
        return min(self.order, 1.0) if flow.evolving and flow.every > 1 else self.order

    @abstractmethod
    def stability_limit(self, flow: Flow) -> float:
        """Return the largest stable step for `flow`; infinity when every step is stable, NaN when it is not known."""

    def surely_stable(self, flow: Flow) -> bool:
        """Whether the step is known to be stable at no cost."""
        del flow
        return False

    def unstable(self, flow: Flow, limit: float) -> str:
        """Return the message for a step above the limit."""
        del flow
        name = self.called or type(self).__name__
        more = f", or use {self.longer}" if self.longer else ""
        return (
            f"dt: got {self.length:g}, which is unstable for this flow: {name} needs dt < {limit:.6g}; reduce dt{more}"
        )

    def check_kind(self, flow: Flow) -> None:  # noqa: B027  # a hook: most methods have nothing to refuse
        """Raise `InputError` when the method cannot integrate `flow`, whatever its step."""

    def check(self, flow: Flow) -> None:
        """Do `check_kind`, and raise `StabilityError` when the step is too long."""
        self.check_kind(flow)
        check_stable(flow, self)

    def velocity_of(self, flow: Flow, u: Array) -> Array:
        """Return du/dt as the method takes it."""
        return flow.velocity(u)

    @abstractmethod
    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        """Return the signal after one step and the time reached, at most `target`.

        `memory` holds what the method remembers between steps. Names with an underscore before them are not written to
        checkpoints.
        """

    def __repr__(self) -> str:
        values = ", ".join(f"{k}={v!r}" for k, v in sorted(vars(self).items()) if v is not None)
        return f"{type(self).__name__}({values})"


class Around(Integrator):
    """An integrator around another one.

    Parameters
    ----------
    integrator : Integrator
    """

    integrator: Integrator

    @property
    def order(self) -> float:  # type: ignore[override]  # a field in the contract, that of the method here
        """That of the integrator."""
        return self.integrator.order

    @property
    def takes_time(self) -> bool:  # type: ignore[override]
        return self.integrator.takes_time

    @property
    def takes_constraint(self) -> bool:  # type: ignore[override]
        return self.integrator.takes_constraint

    def stability_limit(self, flow: Flow) -> float:
        return self.integrator.stability_limit(flow)

    def velocity_of(self, flow: Flow, u: Array) -> Array:
        return self.integrator.velocity_of(flow, u)


def check_stable(flow: Flow, integrator: Integrator) -> None:
    if integrator.length is None or integrator.surely_stable(flow):
        return
    limit = integrator.stability_limit(flow)
    if integrator.length > limit * SLACK:
        raise StabilityError(integrator.unstable(flow, limit))


def check_admitted(flow: Flow, integrator: Integrator) -> None:
    """Do `Integrator.check`, and raise `StabilityError` also where a method's own check does not look."""
    integrator.check(flow)
    if type(integrator).check is not Integrator.check:
        check_stable(flow, integrator)


def check_same_flow(flow: Flow, integrator: Integrator, u: Array) -> None:
    """Raise `InputError` where a flow's pieces do not make its `velocity`, at a signal like `u`."""
    if not isinstance(flow, LinearFlow) or (flow.plain and flow.inner.by_nodes):
        return
    counted = flow.applications
    probe = _like(flow, u)
    with np.errstate(over="ignore", invalid="ignore"):  # found out in the first step
        expected, found = flow.velocity(probe), integrator.velocity_of(flow, probe)
        off, size = flow.norm(flow.free(found - expected)), flow.norm(flow.linear(probe)) + flow.norm(expected)
    flow.applications = counted
    if off > (1e-3 if expected.dtype == namespace(expected).float32 else 1e-7) * size:
        raise InputError(
            f"integrator: {type(integrator).__name__} is made of pieces of the flow, got a {type(flow).__name__} whose "
            f"pieces give another du/dt than its velocity(), off by {off:.3g} where du/dt and A u are of {size:.3g}; "
            "override velocity() and linear() together and leave pulled() and driven() to follow, or use RungeKutta()"
        )


def _like(flow: LinearFlow, u: Array) -> Array:
    """Return a signal that varies as noise does, with values near those of `u` at which the reaction is known."""
    xp = namespace(u)
    noise = constant_like(np.random.default_rng(0).uniform(-1, 1, tuple(u.shape)), u)
    size = float(xp.max(xp.abs(u))) or 1.0
    probe = u + 0.1 * size * noise
    if flow.terms.reaction is not None:
        probe = flow.terms.reaction.clipped(probe)
    return flow.held(probe)


def check_made_of(flow: Flow, piece: str, integrator: Integrator) -> None:
    """Raise `InputError` where an integrator made of a linear piece would leave out a part of the flow."""
    linear = as_linear(flow)
    beside = linear.moving + ([] if integrator.takes_constraint else linear.terms.words[len(linear.terms.moving) :])
    if beside:
        raise InputError(
            f"integrator: {type(integrator).__name__} is made of the flow's {piece}() and would leave out the "
            f"{' and the '.join(beside)}; use RungeKutta(), ETD4RK(dt) or "
            "ExplicitEuler(dt)"
        )
    name = linear.overridden(piece)
    if name is not None:
        raise InputError(
            f"integrator: {type(integrator).__name__} is made of the flow's {piece}(), got a {type(flow).__name__}, "
            f"whose {name}() says more and would be left out; use RungeKutta() or ExplicitEuler(dt), or override "
            f"{piece}() too"
        )


def symmetry_of(flow: LinearFlow) -> str:
    """Return what has to be symmetric, and is not, in words."""
    if not flow.affinity.symmetric:
        return "a symmetric affinity"
    return f"a linear part that is self-adjoint in the metric of the flow, which it is not in {flow.inner.name!r}"


def check_terms(flow: Flow, integrator: Integrator) -> None:
    if flow.noise is not None and not integrator.takes_noise:
        raise InputError(
            f"integrator: {type(integrator).__name__} takes no noise and would leave it out, got a flow with "
            f"{flow.noise!r}; use ExactGaussian() for a linear flow, ExponentialEuler(dt), EulerMaruyama(dt) or "
            "PlatenWeak2(dt)"
        )
    constrained = isinstance(flow, LinearFlow) and flow.terms.constraint is not None
    if constrained and not integrator.takes_constraint:
        raise InputError(
            f"integrator: {type(integrator).__name__} does not say that it takes a constraint, got {flow!r}; use "
            "RungeKutta() or ETD4RK(dt), or set takes_constraint where its stages ask for flow.velocity alone"
        )
    if flow.timed and not integrator.takes_time:
        raise InputError(
            f"integrator: {type(integrator).__name__} does not say that it takes terms that depend on time, got "
            f"{flow!r}; use RungeKutta() or ETD4RK(dt), or ask for flow.when(t) in each stage and set takes_time"
        )


def explicit_limit(flow: Flow, *, free: bool = False) -> float:
    """Return the limit of explicit Euler, or with `free` a lower one at no cost; NaN where it is not known."""
    linear = as_linear(flow)
    if not is_told(linear):
        return math.nan
    limit, bound = linear.safe_step if free else euler_limit(linear), linear.driving_bound()
    return limit if bound == 0 else 1 / (1 / limit + bound / 2)
