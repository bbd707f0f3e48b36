"""What the tab "Flow" computes: J against E, on a line or in the plane, and the text that computes the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.affinities import affinity
from nlflow.backends.numba.loading import one_thread
from nlflow.domains import Grid
from nlflow.equilibria import diversity_bounds, equilibrium
from nlflow.errors import NumericalError, check_choice, check_number
from nlflow.explorer import signals
from nlflow.explorer.texts import shell
from nlflow.flows.linear import GradientFlow
from nlflow.flows.solver import solve
from nlflow.flows.spectrum import relaxation_rate
from nlflow.flows.trackers import Callback
from nlflow.functionals.quadratic import METRICS, E, J
from nlflow.kernels import Gaussian, Laplace, RadialKernel, TopHat

__all__ = [
    "BOUNDARIES",
    "COMMAND_NOTE",
    "KERNELS",
    "MOMENTS",
    "SIGNALS",
    "FlowResult",
    "FlowSettings",
    "as_command",
    "as_python",
    "compute",
    "predicted",
]

Floats = NDArray[np.float64]

_KERNELS: dict[str, Callable[[float], RadialKernel]] = {"Gaussian": Gaussian, "Laplace": Laplace, "TopHat": TopHat}
KERNELS = tuple(_KERNELS)
BOUNDARIES = ("reflect", "periodic", "isolated")
#: Each with its nodes along the axes.
_SIGNALS: dict[str, tuple[Callable[[Grid], Floats], tuple[int, ...]]] = {
    "steps": (signals.steps, (256,)),
    "waves": (signals.waves, (256,)),
    "disc": (signals.disc, (32, 32)),
    "photograph": (signals.photograph, (32, 32)),
}
SIGNALS = tuple(_SIGNALS)
MOMENTS = 41  # that are looked at, the start among them


@dataclass(frozen=True)
class FlowSettings:
    """What may be set.

    Attributes
    ----------
    signal : str
        One of `SIGNALS`; the domain is the unit interval or square.
    noise : float
        Standard deviation of what is added to it, of its range about 1.
    kernel : {'Gaussian', 'Laplace', 'TopHat'}
    width : float
        Of the kernel (radius of the top hat), as a share of the side of the domain.
    fidelity : float
        lambda~ in the degree metric, lambda in the L2 metric; > 0.
    metric : {'degree', 'l2'}
    boundary : {'reflect', 'periodic', 'isolated'}
    span : float
        End of the flow, in relaxation times 1/mu_2 of J.
    """

    signal: str = SIGNALS[0]
    noise: float = 0.2
    kernel: str = "Gaussian"
    width: float = 0.03
    fidelity: float = 0.5
    metric: str = "degree"
    boundary: str = "reflect"
    span: float = 8.0

    def __post_init__(self) -> None:
        check_choice("signal", self.signal, SIGNALS)
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("metric", self.metric, METRICS)
        check_choice("boundary", self.boundary, BOUNDARIES)
        check_number("noise", self.noise, minimum=0)
        check_number("width", self.width, minimum=0, strict=True)
        check_number("fidelity", self.fidelity, minimum=0, strict=True, hint="without it, E is J")
        check_number("span", self.span, minimum=0, strict=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """Nodes along each axis."""
        return _SIGNALS[self.signal][1]


@dataclass(frozen=True)
class FlowResult:
    """What was computed.

    Attributes
    ----------
    settings : FlowSettings
    observed : array
        The signal f that both flows start from.
    t : array of shape (T,)
        Output times.
    j, e : array of shape (T, ...)
        The states of the J-flow and of the E-flow.
    energy_j, energy_e : array of shape (T,)
        J and E along their flows.
    distance_j, distance_e : array of shape (T,)
        Distance to the constant.
    remaining : array of shape (T,)
        Distance of the E-flow to its equilibrium.
    rate : float
        mu_2, by which the J-flow forgets.
    rate_e : float
        mu_2 + fidelity, by which the E-flow comes to its equilibrium.
    equilibrium : array
        The minimiser of E.
    kept : float
        Its distance to the constant, over that of f.
    bounds : (float, float)
        Between which `kept` lies for every signal.
    """

    settings: FlowSettings
    observed: Floats
    t: Floats
    j: Floats
    e: Floats
    energy_j: Floats
    energy_e: Floats
    distance_j: Floats
    distance_e: Floats
    remaining: Floats
    rate: float
    rate_e: float
    equilibrium: Floats
    kept: float
    bounds: tuple[float, float]


def _grid(settings: FlowSettings) -> Grid:
    boundary: Any = settings.boundary
    return Grid(settings.shape, spacing=1 / settings.shape[0], boundary=boundary)


def compute(settings: FlowSettings, *, progress: Callable[[float], Any] | None = None) -> FlowResult:
    """Run both flows from the same signal.

    Parameters
    ----------
    settings : FlowSettings
    progress : callable, optional
        Gets the share done and may raise, which ends the call.
    """
    with one_thread():  # of these small problems a second one would take longer to start than to run
        return _compute(settings, progress or (lambda share: None))


def _compute(settings: FlowSettings, tell: Callable[[float], Any]) -> FlowResult:
    grid = _grid(settings)
    f = _SIGNALS[settings.signal][0](grid) + settings.noise * np.random.default_rng(0).normal(size=grid.shape)
    weights = affinity(_KERNELS[settings.kernel](settings.width), grid)
    smoothing = GradientFlow(J(weights), metric=settings.metric)
    functional = E(weights, f, settings.fidelity, measure=settings.metric)
    keeping = GradientFlow(functional, metric=settings.metric)
    tell(0.05)
    rate = relaxation_rate(smoothing)
    tell(0.3)
    end = settings.span / rate if rate > 0 else settings.span
    times = np.concatenate([[0.0], np.geomspace(end / 1000, end, MOMENTS - 1)])

    def run(flow: GradientFlow, low: float, high: float) -> Any:
        share = Callback(lambda t, u, flow: tell(low + (high - low) * t / end))
        solution = solve(flow, f, t_eval=times, trackers=[share])
        if not solution.success:
            raise NumericalError(f"flow: {solution.message}")
        return solution

    j, e = run(smoothing, 0.3, 0.6), run(keeping, 0.6, 0.9)
    limit = equilibrium(keeping).u
    distance = smoothing.distance_to_constant
    result = FlowResult(
        settings=settings,
        observed=f,
        t=times,
        j=j.u,
        e=e.u,
        energy_j=j.energy,
        energy_e=e.energy,
        distance_j=np.array([distance(u) for u in j.u]),
        distance_e=np.array([distance(u) for u in e.u]),
        remaining=np.array([keeping.norm(u - limit) for u in e.u]),
        rate=rate,
        rate_e=rate + settings.fidelity,
        equilibrium=limit,
        kept=distance(limit) / distance(f),
        bounds=diversity_bounds(keeping),
    )
    tell(1.0)
    return result


def as_python(settings: FlowSettings) -> str:
    """Return a program that makes the arrays and numbers of `FlowResult`, under the same names and to the same bits."""
    shape = settings.shape if len(settings.shape) > 1 else settings.shape[0]
    metric = repr(settings.metric)
    return f"""import numpy as np
from nlflow import E, {settings.kernel}, GradientFlow, Grid, J, affinity, diversity_bounds, equilibrium, solve
from nlflow.explorer.signals import {settings.signal}
from nlflow.flows.spectrum import relaxation_rate

grid = Grid({shape!r}, spacing={1 / settings.shape[0]!r}, boundary={settings.boundary!r})
observed = {settings.signal}(grid) + {settings.noise!r} * np.random.default_rng(0).normal(size=grid.shape)
weights = affinity({settings.kernel}({settings.width!r}), grid)
smoothing = GradientFlow(J(weights), metric={metric})
keeping = GradientFlow(E(weights, observed, {settings.fidelity!r}, measure={metric}), metric={metric})

rate = relaxation_rate(smoothing)  # mu_2: the J-flow goes to a constant as exp(-mu_2 t)
rate_e = rate + {settings.fidelity!r}  # the E-flow to its equilibrium
end = {settings.span!r} / rate if rate > 0 else {settings.span!r}
t = np.concatenate([[0.0], np.geomspace(end / 1000, end, {MOMENTS - 1})])
solution_j, solution_e = solve(smoothing, observed, t_eval=t), solve(keeping, observed, t_eval=t)
j, e = solution_j.u, solution_e.u
energy_j, energy_e = solution_j.energy, solution_e.energy

limit = equilibrium(keeping).u
distance_j = np.array([smoothing.distance_to_constant(u) for u in j])
distance_e = np.array([smoothing.distance_to_constant(u) for u in e])
remaining = np.array([keeping.norm(u - limit) for u in e])
kept = smoothing.distance_to_constant(limit) / smoothing.distance_to_constant(observed)
bounds = diversity_bounds(keeping)
print("kept", kept, "between", bounds)
"""


_SAVED = ("observed", "t", "j", "e", "energy_j", "energy_e", "distance_j", "distance_e", "remaining", "rate", "rate_e",
          "limit", "kept", "bounds")  # fmt: skip
COMMAND_NOTE = "The command runs the Python text and saves its arrays as flow.npz, a new file."


def as_command(settings: FlowSettings) -> str:
    """Return a command that saves what `as_python` makes as ``flow.npz``."""
    given = ", ".join(f"{name}={name}" for name in _SAVED)
    # Opened for a new file alone: what is there is not replaced.
    return shell(as_python(settings), f"with open('flow.npz', 'xb') as file:\n    np.savez(file, {given})")


def predicted(t: Floats, values: Floats, rate: float) -> Floats:
    """Return the exponential of a rate through the last of positive `values` that are above rounding; NaN without any.

    Its slope is what the spectrum says; its height is fitted. Where it would pass the first value it is cut off.
    """
    above = np.flatnonzero(values > 1e-10 * values[0])
    if values[0] <= 0 or not above.size:
        return np.full_like(t, np.nan)
    last = int(above[-1])
    exponent = np.minimum(rate * (t[last] - t), 300.0)
    line = values[last] * np.exp(exponent)
    return np.where((line <= 3 * values[0]) & (t <= t[last]), line, np.nan)
