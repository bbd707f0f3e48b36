"""Time discretizations of a flow, one family a module. Each declares its `order` and its `stability_limit`.

`fixed_step`: explicit and semi-implicit Euler, layers as steps; `runge_kutta`: adaptive 5(4); `exponential`: Chebyshev
expansion of the exact solution.
"""

from nlflow.flows.integrators.base import Integrator, StepFailureError
from nlflow.flows.integrators.exponential import Exponential
from nlflow.flows.integrators.fixed_step import AttentionStep, ExplicitEuler, FixedStep, NeutrenoStep, SemiImplicit
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
