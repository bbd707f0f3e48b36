"""What "Flow" computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nlflow.affinities import affinity
from nlflow.backends.threads import one_loop_thread
from nlflow.desk.explorer.texts import shell
from nlflow.domains import Boundary, Grid
from nlflow.equilibria import diversity_bounds, equilibrium
from nlflow.errors import NumericalError, check_choice, check_number
from nlflow.flows.gradient import GradientFlow
from nlflow.flows.result import Solution
from nlflow.flows.solver import solve
from nlflow.flows.spectrum import relaxation_rate
from nlflow.flows.trackers import Callback
from nlflow.functionals.energies import E, J
from nlflow.functionals.metrics import METRICS
from nlflow.kernels import Gaussian, Laplace, Matern, RadialKernel, TopHat, Wendland

Floats = NDArray[np.float64]

_KERNELS: dict[str, Callable[[float], RadialKernel]] = {
    kind.__name__: kind for kind in (Gaussian, Laplace, TopHat, Matern, Wendland)
}
_BOUNDARIES = ("reflect", "periodic", "isolated")


def _disc(grid: Grid) -> Floats:
    return np.asarray((np.hypot(*(grid.nodes - [0.45, 0.55]).T) < 0.28).reshape(grid.shape), dtype=float)


def _waves(grid: Grid) -> Floats:
    x = grid.nodes[:, 0]
    return np.sin(4 * np.pi * x) + 0.3 * np.sin(26 * np.pi * x)


def _photograph(grid: Grid) -> Floats:
    from skimage import data

    camera: Floats = data.camera()
    return np.asarray(camera.reshape(128, 4, 128, 4).mean(axis=(1, 3)) / 255)


#: The nodes along the axes of the unit interval or square; ``clean``, about -1 to 1; and the program that makes it.
_SIGNALS: dict[str, tuple[tuple[int, ...], Callable[[Grid], Floats], str]] = {
    "steps": (
        (256,),
        lambda grid: np.sign(np.sin(4 * np.pi * grid.nodes[:, 0] + 0.3)),
        "clean = np.sign(np.sin(4 * np.pi * grid.nodes[:, 0] + 0.3))",
    ),
    "waves": ((256,), _waves, "x = grid.nodes[:, 0]\nclean = np.sin(4 * np.pi * x) + 0.3 * np.sin(26 * np.pi * x)"),
    "disc": (
        (128, 128),
        _disc,
        "clean = (np.hypot(*(grid.nodes - [0.45, 0.55]).T) < 0.28).reshape(grid.shape).astype(float)",
    ),
    "photograph": (
        (128, 128),
        _photograph,
        "from skimage import data\n\nclean = data.camera().reshape(128, 4, 128, 4).mean(axis=(1, 3)) / 255",
    ),
}
MOMENTS = 161  # that are looked at, the start among them
COMMAND_NOTE = "The command runs the Python text and saves its arrays as flow.npz, a new file."


@dataclass(frozen=True)
class FlowSettings:
    """Settings."""

    # {'steps', 'waves', 'disc', 'photograph'}: The first two on the unit interval, the others on the unit square.
    signal: str = "steps"
    noise: float = 0.2  # standard deviation of the noise that is added; the signal goes from about -1 to 1
    kernel: str = "Gaussian"  # {'Gaussian', 'Laplace', 'TopHat', 'Matern', 'Wendland'}
    width: float = 0.03  # of the kernel (radius of the top hat and of Wendland's), as a share of the side of the domain
    fidelity: float = 0.5  # lambda~ in the degree metric, lambda in the L2 metric; > 0
    metric: str = "degree"  # {'degree', 'l2'}
    boundary: str = "reflect"  # {'reflect', 'periodic', 'isolated'}
    span: float = 8.0  # end of the flow, in relaxation times 1/mu_2 of J

    def __post_init__(self) -> None:
        check_choice("signal", self.signal, tuple(_SIGNALS))
        check_choice("kernel", self.kernel, tuple(_KERNELS))
        check_choice("metric", self.metric, METRICS)
        check_choice("boundary", self.boundary, _BOUNDARIES)
        check_number("noise", self.noise, minimum=0)
        check_number("width", self.width, minimum=0, strict=True)
        check_number("fidelity", self.fidelity, minimum=0, strict=True, hint="without it, E is J")
        check_number("span", self.span, minimum=0, strict=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return _SIGNALS[self.signal][0]


#: The names that the program of `as_python` makes and that a result holds.
_NAMES = ("observed", "t", "j", "e", "energy_j", "energy_e", "distance_j", "distance_e", "remaining", "rate", "rate_e",
          "limit", "kept", "bounds")  # fmt: skip


def compute(settings: FlowSettings, *, progress: Callable[[float], Any] = lambda share: None) -> SimpleNamespace:
    with one_loop_thread():  # starting a second one takes longer than these small problems
        return _computed(settings, progress)


def _computed(settings: FlowSettings, progress: Callable[[float], Any]) -> SimpleNamespace:
    shape, made, _ = _SIGNALS[settings.signal]
    grid = Grid(shape, spacing=1 / shape[0], boundary=cast(Boundary, settings.boundary))
    observed = made(grid) + settings.noise * np.random.default_rng(0).normal(size=grid.shape)
    weights = affinity(_KERNELS[settings.kernel](settings.width), grid)
    smoothing = GradientFlow(J(weights), metric=settings.metric)
    keeping = GradientFlow(E(weights, observed, settings.fidelity, measure=settings.metric), metric=settings.metric)
    rate = relaxation_rate(smoothing)
    progress(0.3)
    end = settings.span / rate if rate > 0 else settings.span
    t = np.concatenate([[0.0], np.geomspace(end / 10000, end, MOMENTS - 1)])

    def followed(flow: GradientFlow, low: float, high: float) -> Solution[Any]:
        share = Callback(lambda t, u, flow: progress(low + (high - low) * t / end))
        solution = solve(flow, observed, t_eval=t, trackers=[share])
        if not solution.success:
            raise NumericalError(f"flow: {solution.message}")
        return solution

    j, e = followed(smoothing, 0.3, 0.6), followed(keeping, 0.6, 0.9)
    limit = equilibrium(keeping).u
    distance = smoothing.distance_to_constant
    progress(1.0)
    return SimpleNamespace(
        observed=observed, t=t, j=j.u, e=e.u, energy_j=j.energy, energy_e=e.energy,
        distance_j=np.array([distance(u) for u in j.u]), distance_e=np.array([distance(u) for u in e.u]),
        remaining=np.array([keeping.norm(u - limit) for u in e.u]), rate=rate, rate_e=rate + settings.fidelity,
        limit=limit, kept=distance(limit) / distance(observed), bounds=diversity_bounds(keeping),
    )  # fmt: skip


def as_python(settings: FlowSettings) -> str:
    (side, *others), _, clean = _SIGNALS[settings.signal]
    shape = settings.shape if others else side
    metric, fidelity, span = repr(settings.metric), repr(settings.fidelity), repr(settings.span)
    return f"""import numpy as np
from nlflow import E, {settings.kernel}, GradientFlow, Grid, J, affinity, diversity_bounds, equilibrium, solve
from nlflow.flows.spectrum import relaxation_rate

grid = Grid({shape!r}, spacing={1 / side!r}, boundary={settings.boundary!r})
{clean}
observed = clean + {settings.noise!r} * np.random.default_rng(0).normal(size=grid.shape)
weights = affinity({settings.kernel}({settings.width!r}), grid)
smoothing = GradientFlow(J(weights), metric={metric})
keeping = GradientFlow(E(weights, observed, {fidelity}, measure={metric}), metric={metric})

rate = relaxation_rate(smoothing)  # mu_2: the J-flow goes to a constant as exp(-mu_2 t)
rate_e = rate + {fidelity}  # the E-flow to its equilibrium

end = {span} / rate if rate > 0 else {span}
t = np.concatenate([[0.0], np.geomspace(end / 10000, end, {MOMENTS - 1})])
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


def as_command(settings: FlowSettings) -> str:
    given = ", ".join(f"{name}={name}" for name in _NAMES)
    return shell(as_python(settings), "flow.npz", f"np.savez(file, {given})")


def predicted(t: Floats, values: Floats, rate: float) -> Floats:
    above = np.flatnonzero(values > 1e-10 * values[0])
    if values[0] <= 0 or not above.size:
        return np.full_like(t, np.nan)
    last = int(above[-1])
    exponent = np.minimum(rate * (t[last] - t), 300.0)
    line = values[last] * np.exp(exponent)
    return np.where((line <= 3 * values[0]) & (t <= t[last]), line, np.nan)
