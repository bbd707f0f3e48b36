"""Time discretisations of a flow, one family a module. Each declares its `order` and its `stability_limit`."""

from nlflow.integrators.base import Integrator, StepFailureError
from nlflow.integrators.exponential import Exponential
from nlflow.integrators.fixed import AttentionStep, ExplicitEuler, FixedStep, NeutrenoStep, SemiImplicit
from nlflow.integrators.runge_kutta import RungeKutta

__all__ = [
    "AttentionStep",
    "ExplicitEuler",
    "Exponential",
    "FixedStep",
    "Integrator",
    "NeutrenoStep",
    "RungeKutta",
    "SemiImplicit",
    "StepFailureError",
]
