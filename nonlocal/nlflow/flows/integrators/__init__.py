"""Time discretizations of a flow."""

from nlflow.flows.integrators.base import Integrator, StepFailureError
from nlflow.flows.integrators.exponential import ETD2RK, ETD4RK, Exponential
from nlflow.flows.integrators.fixed_step import AttentionStep, ExplicitEuler, FixedStep, NeutrenoStep, SemiImplicit
from nlflow.flows.integrators.imex import IMEX, AverageVectorField, ConvexSplitting
from nlflow.flows.integrators.rosenbrock import Rosenbrock
from nlflow.flows.integrators.runge_kutta import Adaptive, RungeKutta, Tableau
from nlflow.flows.integrators.splitting import Lie, Strang
from nlflow.flows.integrators.stochastic import (
    EulerMaruyama,
    ExactGaussian,
    ExponentialEuler,
    Milstein,
    NoisyStep,
    PlatenWeak2,
)
from nlflow.flows.integrators.verlet import StoermerVerlet

__all__ = [
    "ETD2RK",
    "ETD4RK",
    "IMEX",
    "Adaptive",
    "AttentionStep",
    "AverageVectorField",
    "ConvexSplitting",
    "EulerMaruyama",
    "ExactGaussian",
    "ExplicitEuler",
    "Exponential",
    "ExponentialEuler",
    "FixedStep",
    "Integrator",
    "Lie",
    "Milstein",
    "NeutrenoStep",
    "NoisyStep",
    "PlatenWeak2",
    "Rosenbrock",
    "RungeKutta",
    "SemiImplicit",
    "StepFailureError",
    "StoermerVerlet",
    "Strang",
    "Tableau",
]
