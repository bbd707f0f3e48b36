"""Time discretizations of a flow, one family a module. Each declares its `order` and its `stability_limit`.

`fixed_step`: explicit and semi-implicit Euler, layers as steps; `runge_kutta`: adaptive 5(4); `exponential`: Chebyshev
expansion of the exact solution; `etd`: exponential time differencing, for what is more than linear; `imex`: implicit in
the linear part; `adaptive`: any of those of one length with steps that follow their error.
"""

from nlflow.flows.integrators.adaptive import Adaptive
from nlflow.flows.integrators.base import Integrator, StepFailureError
from nlflow.flows.integrators.exponential import ETD2RK, ETD4RK, Exponential
from nlflow.flows.integrators.fixed_step import AttentionStep, ExplicitEuler, FixedStep, NeutrenoStep, SemiImplicit
from nlflow.flows.integrators.imex import IMEX, ConvexSplitting
from nlflow.flows.integrators.runge_kutta import RungeKutta

__all__ = [
    "ETD2RK",
    "ETD4RK",
    "IMEX",
    "Adaptive",
    "AttentionStep",
    "ConvexSplitting",
    "ExplicitEuler",
    "Exponential",
    "FixedStep",
    "Integrator",
    "NeutrenoStep",
    "RungeKutta",
    "SemiImplicit",
    "StepFailureError",
]
