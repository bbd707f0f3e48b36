"""Diversity of equilibria."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nlflow._array import Array, to_numpy
from nlflow.equilibria import diversity, diversity_bounds, equilibrium
from nlflow.errors import InputError, NumericalError
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import dense_operator, relaxation_rate
from nlflow.studies.contract import JUDGED, ROUNDING, Kind, Options, Row, columns, grouped
from nlflow.studies.fits import FEWEST, Fit, largest, no_fit, power_fit, regress
from nlflow.studies.options import DEVICE, GRID, OWN, check_sizes
from nlflow.studies.quantities import QUANTITIES
from nlflow.studies.settings import DENSE, build, build_flow, exact_course, exact_solution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SETTING = (*GRID, "metric")
_SMALL = 0.15  # of the spectral gap: below, diversity is proportional to the fidelity
_FOLDS = np.linspace(2, 16, 15)  # e-foldings of the slowest mode over which the rate is measured
_SMOOTHING, _CYCLES = 12.0, 6  # e-foldings of the slowest mode before, and how often
_MOST_CYCLES = 40  # until it rules: of a mode that falls 3 % faster 1e-6 is left
_SLACK = 1e-8  # relative: bounds are attained by some signals
_TURN = 0.01  # of a rate: faster turns change what is measured
_RATE_OFF = 0.03  # of a rate that is measured over finitely many e-foldings


class EquilibriumStudy(Kind):
    """Diversity |u* - mean| / |f - mean| between its bounds, and the rate of |u(t) - u*|."""

    name = "equilibrium"
    summary = "diversity of equilibria between their bounds, and the rate towards them"
    defaults = {  # noqa: RUF012
        **GRID,
        "fidelity": [float(f"{value:.3g}") for value in np.geomspace(1e-3, 1e3, 13)],
        "metric": ["l2", "degree"],
        **OWN,
        **DEVICE,
    }
    axes = setting = _SETTING
    columns = {  # noqa: RUF012
        "fidelity": float, "diversity": float, "low": float, "high": float, "within": bool,
        "rate": float, "rate_predicted": float, "rate_ratio": float, "gap": float, **JUDGED,
    }  # fmt: skip

    def check(self, options: Options, given: Any) -> None:
        del given
        if min(options["fidelity"]) <= 0:
            raise InputError("fidelity: got 0, expected numbers > 0: without fidelity the limit is the mean of u(0)")
        check_sizes("fidelity", options["fidelity"])

    def measure(self, options: Options, seed: np.random.SeedSequence) -> list[Row]:
        rng = np.random.default_rng(seed)
        problem = build(options, rng)
        free = build_flow(problem.affinity, problem.start, options["metric"], 0.0)
        turn = _turn(free)
        away = _slow(free, rng, turn)
        alone = not relaxation_rate(free) > 0  # of parts that do not see each other nothing was smoothed
        away = away.reshape(problem.start.shape) if problem.start.ndim < away.ndim else away
        rows = []
        for fidelity in sorted(options["fidelity"]):
            flow = build_flow(problem.affinity, problem.start, options["metric"], fidelity)
            before = diversity(flow, problem.start)
            if before <= ROUNDING * float(np.abs(to_numpy(problem.start)).max()):
                raise InputError("start: got a constant signal, which has no diversity; give another")
            dense = problem.domain.size <= DENSE
            limit = equilibrium(flow, method="direct" if dense else "auto", rtol=1e-11)
            if not limit.success:
                raise NumericalError(f"the equilibrium for fidelity={fidelity:g} was not found: {limit.message}")
            share = diversity(flow, limit.u) / before
            low, high = diversity_bounds(flow)
            predicted = relaxation_rate(flow)
            hidden = alone or turn > _TURN * predicted
            rate = math.nan if hidden else _rate(flow, limit.u, limit.u + before * away, predicted)
            gap = predicted - fidelity
            known = gap > ROUNDING * flow.spectral_bounds()[1]
            small = known and fidelity <= _SMALL * gap * (1 + _SLACK)
            rows.append(
                {
                    "fidelity": fidelity, "diversity": share, "low": low, "high": high,
                    "within": low * (1 - _SLACK) <= share <= high * (1 + _SLACK),
                    "rate": rate, "rate_predicted": predicted, "rate_ratio": rate / predicted, "gap": gap,
                    "used": small,
                    "note": "" if small else "not small beside the gap" if known else "the gap is rounding",
                }
            )  # fmt: skip
        return rows

    def fitted(self, name: str, rows: list[Row], options: Options) -> Iterator[Fit]:
        inside = sum(row["within"] for row in rows) / len(rows)
        what = "part of the fidelities with diversity within its bounds"
        yield Fit(name, what, inside, math.nan, math.nan, 1.0, points=len(rows))
        yield _worst_ratio(name, rows)
        what = "order of diversity in small fidelities"
        if sum(row["used"] for row in rows) < FEWEST:
            few = f"fewer than {FEWEST} fidelities below {_SMALL:g} times the spectral gap {rows[0]['gap']:.3g}"
            yield no_fit(name, what, few, 1.0)
        else:
            small = columns(rows, "fidelity", "diversity", "used")
            yield power_fit(name, what, *small, expected=1.0, tolerance=0.1)

    def figure(self, rows: list[Row], fits: list[Fit]) -> Figure:
        del fits
        from nlflow.plotting import bounds_figure
        from nlflow.studies.drawing import MOST_PANELS, told

        panels = {}
        for setting, members in grouped(rows, _SETTING)[:MOST_PANELS]:
            x, y, low, high = map(np.array, columns(members, "fidelity", "diversity", "low", "high"))
            panels[told(setting, rows)] = (x, y, low, high)
        return bounds_figure(
            panels,
            xlabel=_fidelity_label({row["metric"] for row in rows}),
            ylabel=QUANTITIES["diversity"].label,
            logy=True,
        )


def _fidelity_label(metrics: set[str]) -> str:
    """Return the label of the axis: a fidelity in the metric of degrees is one of the measure of degrees."""
    if len(metrics) > 1:
        return rf"{QUANTITIES['fidelity'].label}, $\tilde\lambda$ in the metric of degrees"
    return QUANTITIES["degree_fidelity" if metrics == {"degree"} else "fidelity"].label


def _slow(flow: LinearFlow, rng: np.random.Generator, turn: float = 0.0) -> Array:
    """Return a random perturbation of diversity 1, smoothed without fidelity until the slowest mode rules."""
    u = flow.affinity.as_signal(rng.standard_normal((*flow.affinity.domain.shape, 1)))
    rate = relaxation_rate(flow)
    rules = turn > 0  # of a mode that turns no decay is steady
    for cycle in range(_MOST_CYCLES if rate > 0 else 0):
        if rules and cycle >= _CYCLES:
            break
        u = u / diversity(flow, u)
        with np.errstate(over="ignore", invalid="ignore"):  # what rounding leaves of a rate may grow
            smooth, _ = exact_solution(flow, u, _SMOOTHING / rate)
        if not np.isfinite(to_numpy(smooth)).all():
            break
        # What is left of the mean would outgrow the rest.
        smooth = smooth - equilibrium(flow, smooth).u
        left = diversity(flow, smooth)
        if not 0 < left < math.inf:  # rounding has hidden the slowest mode
            break
        rules = turn > 0 or abs(math.log(left) / _SMOOTHING + 1) < _RATE_OFF / 2
        u = smooth
    return u / diversity(flow, u)


def _turn(flow: LinearFlow) -> float:
    """Return the angle a time by which the slowest mode turns, about whose exponential distances swing."""
    if flow.symmetric or flow.affinity.domain.size > DENSE:
        return 0.0
    values = np.linalg.eigvals(dense_operator(flow))
    values = np.delete(values, np.abs(values).argmin())  # of constants
    return float(abs(values[values.real.argmin()].imag)) if values.size else 0.0


def _rate(flow: LinearFlow, limit: Array, start: Array, predicted: float) -> float:
    """Return the rate at which |u(t) - u*|, means removed, decays late; NaN where rounding comes first."""
    if not _RATE_OFF * predicted > _FOLDS[-1] * ROUNDING * flow.spectral_bounds()[1]:
        return math.nan
    times = [float(t) for t in _FOLDS / predicted]
    distances = [diversity(flow, u - limit) for u in exact_course(flow, start, times)]
    floor = ROUNDING * diversity(flow, start)
    # In units of the predicted time: times themselves may be too small to square.
    kept = [(fold, math.log(d)) for fold, d in zip(_FOLDS, distances, strict=True) if d > floor]
    if len(kept) < FEWEST:
        return math.nan
    return -predicted * regress([fold for fold, _ in kept], [d for _, d in kept]).slope


def _worst_ratio(name: str, rows: list[Row]) -> Fit:
    """Return how far the ratio of measured and predicted rate is from 1, the largest over the fidelities."""
    what = "|rate measured / predicted - 1|, the largest over fidelities"
    ratios = [row["rate_ratio"] for row in rows if math.isfinite(row["rate_ratio"])]
    if not ratios:
        few = "rounding level is reached before the slowest mode rules, that mode turns, or parts do not see each other"
        return no_fit(name, what, few, _RATE_OFF, "<=")
    return largest(name, what, [abs(ratio - 1) for ratio in ratios], _RATE_OFF)
