"""Order of integrators."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nlflow._array import to_numpy
from nlflow.errors import InputError
from nlflow.flows.integrators import ExplicitEuler, Integrator, RungeKutta, SemiImplicit
from nlflow.flows.linear import LinearFlow
from nlflow.studies.contract import JUDGED, Kind, Options, Row, columns, judged
from nlflow.studies.fits import Fit, power_fit
from nlflow.studies.options import DEVICE, GRID, INTEGRATORS, OWN, check_sizes
from nlflow.studies.quantities import ERRORS, QUANTITIES
from nlflow.studies.settings import build, build_flow, exact_solution, integrate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The first step times the bound of the spectrum, and the ratio of steps: small enough for the leading term of the error
# to rule; high orders fall fast, so closer steps keep them above rounding.
_FIRST, _RATIO = 1 / 16, 2.0
_FIRST_HIGH, _RATIO_HIGH, _HIGH = 1 / 4, math.sqrt(2), 3
_STEPS = 6
_MOST_STEPS = 2_000_000
_DRIFT = 8  # times the rounding of all steps, in float32: beyond, an order is off by less than its tolerance
_SETTING = (*GRID, "metric", "fidelity", "integrator")


class TimeOrder(Kind):
    """Error at time t against the exact exponential, over decreasing steps; expected: ``integrator.order``."""

    name = "time-order"
    summary = "order of integrators in the step"
    defaults = {  # noqa: RUF012  # declared as such in the contract
        **GRID,
        "fidelity": [0.0, 0.5],
        "metric": ["l2", "degree"],
        "integrator": list(INTEGRATORS),
        "dt": None,
        "t": None,
        **OWN,
        **DEVICE,
        "dtype": "float64",
    }
    axes = setting = _SETTING
    columns = {"t": float, "dt": float, "error": float, "order": float, **JUDGED}  # noqa: RUF012

    def check(self, options: Options, given: Any) -> None:
        if "dt" in given:
            check_sizes("dt", options["dt"])

    def measure(self, options: Options, seed: np.random.SeedSequence) -> list[Row]:
        dtype = options["dtype"]
        problem = build(options, np.random.default_rng(seed))
        flow = build_flow(problem.affinity, problem.start, options["metric"], options["fidelity"])
        precise, reference = problem, flow
        if dtype != "float64":
            precise = build(options, np.random.default_rng(seed), exact=True)
            reference = build_flow(precise.affinity, precise.start, options["metric"], options["fidelity"])
        t, steps = _steps(options, reference)
        exact, floor = exact_solution(reference, precise.start, t)
        scale = reference.norm(precise.start)
        rows = []
        for dt in steps:
            integrator = _make(options["integrator"], dt)
            # What was asked for is the order of fixed steps; an own integrator declares its order.
            order = float(integrator.order)
            reached = integrate(flow, problem.start, t, integrator).final
            drift = 0.0 if dtype == "float64" else _DRIFT * float(np.finfo(dtype).eps) * t / dt
            error = reference.norm(precise.affinity.as_signal(to_numpy(reached)) - exact)
            rows.append(
                {"t": t, "dt": dt, "error": error, "order": order, **judged(error, scale, floor + drift, dtype)}
            )
        return rows

    def fitted(self, name: str, rows: list[Row], options: Options) -> Iterator[Fit]:
        order = rows[0]["order"]
        expected = order if math.isfinite(order) else None
        fitted = columns(rows, "dt", "error", "used")
        yield power_fit(name, "order in dt", *fitted, expected=expected, tolerance=0.05 * order)

    def figure(self, rows: list[Row], fits: list[Fit]) -> Figure:
        from nlflow.studies.drawing import rate_panel

        return rate_panel(
            rows, fits, _SETTING, x="dt", y="error", split="integrator", xlabel=QUANTITIES["dt"].label,
            ylabel=ERRORS[self.name],
        )  # fmt: skip


def _make(name: Any, dt: float) -> Integrator:
    if name == "euler":
        return ExplicitEuler(dt)
    if name == "semi-implicit":
        return SemiImplicit(dt)
    if name == "runge-kutta":
        return RungeKutta(dt=dt, adaptive=False)
    own = name(dt)
    if not isinstance(own, Integrator):
        raise InputError(
            f"integrator: got a function that returns {type(own).__name__}, expected an Integrator with that step"
        )
    return own


def _steps(options: Options, flow: LinearFlow) -> tuple[float, list[float]]:
    """Return the end time and the steps, by default decreasing from a fraction of the stability limit."""
    bound = flow.spectral_bounds()[1]
    end = options["t"] or 4 / bound
    if options["dt"] is not None:
        steps = sorted(options["dt"], reverse=True)
    else:
        high = _make(options["integrator"], 1.0).order >= _HIGH
        first, ratio = (_FIRST_HIGH, _RATIO_HIGH) if high else (_FIRST, _RATIO)
        count = math.ceil(end * bound / first)
        steps = [end / round(count * ratio**power) for power in range(_STEPS)]
    if sum(end / dt for dt in steps) > _MOST_STEPS:
        raise InputError(
            f"t: got {end:g}, which takes {sum(end / dt for dt in steps):.3g} steps, expected at most {_MOST_STEPS}; "
            "choose a shorter time or longer steps"
        )
    if steps[0] > end:
        raise InputError(f"dt: got {steps[0]:g}, expected no step longer than the time t={end:g}")
    return end, steps
