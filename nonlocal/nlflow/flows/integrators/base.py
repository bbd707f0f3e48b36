"""The contract of an integrator.

An integrator does one thing, `advance`: take the signal from t towards a target time and say where it arrived. What it
remembers between steps (a step size, an error bound) it keeps in the dictionary handed to it, which goes
into checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from nlflow._array import Array
from nlflow.errors import InputError
from nlflow.flows.flow import Flow
from nlflow.flows.linear import LinearFlow, as_linear

# A limit that comes from an eigenvalue is known up to rounding; a step this close to it is let through.
SLACK = 1 + 1e-9


class StepFailureError(ArithmeticError):
    """No step of any length meets the tolerance; the message says what to change. `solve` turns it into a status."""


class Integrator(ABC):
    """Contract of an integrator.

    Attributes
    ----------
    order : float
        Order of accuracy in the step, for frozen kernels and for kernels that follow the signal; infinity for the exact
        exponential. See `order_for`.
    takes_time : bool
        Whether the method asks for the velocity of each stage at its own time (`Flow.when`), as a source that changes
        with time needs it.
    takes_constraint : bool
        Whether values that a constraint gives are those that every stage sees: where velocities are asked of the flow
        they are, and where its linear pieces are used they are split (`LinearFlow.free`, `LinearFlow.drawn`). The time
        loop sets them at the end of a step.
    unit_steps : bool
        Whether the method has no step size: every step is one layer, and times are whole numbers.
    """

    order: ClassVar[float]
    takes_time: ClassVar[bool] = False
    takes_constraint: ClassVar[bool] = False
    unit_steps: ClassVar[bool] = False

    def order_for(self, flow: Flow) -> float:
        """Return the order that the method has for `flow`.

        That is `order`, but 1 at most for an evolving kernel that is held for ``every`` > 1 steps: there it is the
        order in the time between two kernels, and a tolerance holds for each piece but not for the splitting.
        """
        return min(self.order, 1.0) if flow.evolving and flow.every > 1 else self.order

    @abstractmethod
    def stability_limit(self, flow: Flow) -> float:
        """Return the largest stable step for `flow`; infinity when every step is stable."""

    def check(self, flow: Flow) -> None:  # noqa: B027  # a hook: most methods have nothing to refuse
        """Raise `InputError` (or `StabilityError`) when the method cannot integrate `flow`."""

    @abstractmethod
    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        """Return the signal after one step and the time reached, at most `target`."""

    def __repr__(self) -> str:
        values = ", ".join(f"{k}={v!r}" for k, v in sorted(vars(self).items()) if v is not None)
        return f"{type(self).__name__}({values})"


def check_made_of(flow: Flow, piece: str, integrator: Integrator) -> None:
    """Raise `InputError` where an integrator that is made of a linear piece would leave out a part of the flow."""
    linear = as_linear(flow)
    beside = linear.terms.moving if integrator.takes_constraint else linear.terms.words
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


def check_terms(flow: Flow, integrator: Integrator) -> None:
    """Raise `InputError` where a flow depends on time or has a constraint, and an integrator would not see it."""
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


def with_bound(flow: Flow, limit: float) -> float:
    """Return a limit of explicit steps for the linear part, 2 / rho, shortened by a reaction: 2 / (rho + bound)."""
    bound = as_linear(flow).terms.bound
    return limit if bound == 0 else 1 / (1 / limit + bound / 2)
