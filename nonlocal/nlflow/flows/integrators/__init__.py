"""Time discretizations of a flow, one family a module. Each declares its `order` and its `stability_limit`."""

from nlflow.flows.integrators.base import Integrator, StepFailureError
from nlflow.flows.integrators.exponential import Exponential
from nlflow.flows.integrators.fixed import AttentionStep, ExplicitEuler, FixedStep, NeutrenoStep, SemiImplicit
from nlflow.flows.integrators.runge_kutta import RungeKutta

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
