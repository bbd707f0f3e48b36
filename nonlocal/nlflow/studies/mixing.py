"""Mixing of chains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nlflow._array import Array, namespace, scalar, to_numpy
from nlflow.errors import check_memory, renamed
from nlflow.markov import MarkovChain
from nlflow.studies.contract import JUDGED, ROUNDING, Kind, Options, Row, columns, grouped
from nlflow.studies.fits import Fit, power_fit
from nlflow.studies.options import DEVICE, GRID, OWN
from nlflow.studies.settings import DENSE, Floats, build

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SETTING = tuple(GRID)
_MOST_STEPS = 5000
_FALLEN = math.log(1e-3)  # what the slowest mode has to fall by before it can be taken to rule
_TOO_SLOW = f"mixes too slowly for {_MOST_STEPS} steps"
_MOST_ROWS = 200
_CLEAR, _DECADES = 1000.0, 1e-8
_USUAL = 50.0  # units in the last place of the largest value: what rounding leaves of a distance, and well above
_WHOLE = 1e-6  # what is so near to a whole number of steps is one
_REAL = 1e-6  # of its modulus: below, an imaginary part may be the root of a rounding, which splits double eigenvalues
_MOST_WORK = 2e10  # of the products that follow the worst start, which cost N^3 each
_RATE_OFF = 0.02  # of a rate
_APART = 2.0  # e-foldings by which the next mode has to fall below the slowest, so that this one rules
_TWO = "another mode is nearly as slow"
_MARKERS = 25  # of one line in the figure
_NORM = "|P^k v - pi v|"
_RATE = f"log {_NORM} per step"


class Mixing(Kind):
    """Distances of P^k v and of the law of a walker to their limits; expected: slope log |mu_2| a step for large k."""

    name = "mixing"
    summary = "rate at which a chain mixes, and its mixing time"
    defaults = {  # noqa: RUF012
        **GRID,
        "nodes": [16, 32, 64],
        "boundary": ["periodic", "isolated"],
        "laziness": 0.0,
        "eps": 0.25,
        "origin": None,
        **OWN,
        **DEVICE,
    }
    axes = setting = _SETTING
    columns = {  # noqa: RUF012
        "k": int, "distance": float, "total_variation": float | None, **JUDGED,
        "mu_2": float, "rate": float, "complex": bool, "mixing_time": int, "lower": float | None, "upper": float | None,
    }  # fmt: skip

    def measure(self, options: Options, seed: np.random.SeedSequence) -> list[Row]:
        problem = build(options, np.random.default_rng(seed))
        chain = MarkovChain(problem.affinity, laziness=options["laziness"])
        origin, eps = options["origin"], options["eps"]
        if origin is None:
            check_memory("following every first node", 24 * chain.states**2, "use fewer nodes, or give one as origin")
        chain.limit(problem.start)  # raises for chains that have none
        second = chain.second_eigenvalue
        rate = -math.log1p(-chain.spectral_gap) if second != 0 else math.inf  # |mu_2| may be 1 to rounding
        steps = max(8, math.ceil(min(math.log(50 / ROUNDING) / rate - _WHOLE, _MOST_STEPS)))
        distance = chain.distance_to_limit(problem.start, steps)
        far = steps if origin is not None else int(min(steps, max(1, _MOST_WORK / chain.states**3)))
        with renamed("start", "origin"):
            variation = chain.total_variation(far, origin)
        low, high = chain.mixing_bounds(eps) if chain.reversible else (None, None)
        shared = {
            "mu_2": abs(second), "rate": rate,
            "complex": isinstance(second, complex) and abs(second.imag) > _REAL * abs(second),
            "mixing_time": chain.mixing_time(eps, origin),
            # The lower bound is one of the worst start.
            "lower": low if origin is None else None, "upper": high,
        }  # fmt: skip
        kept = np.unique(np.linspace(0, steps, min(steps + 1, _MOST_ROWS)).round().astype(int))
        others = partial(_others, chain, to_numpy(problem.start))
        slow = steps == _MOST_STEPS and -rate * steps > _FALLEN
        judgement = (
            [{"used": False, "note": _TOO_SLOW}] * (steps + 1)
            if slow
            else _late(distance, _unit(problem.start), _lead(chain, rate), others)
        )
        return [
            {
                "k": int(k),
                "distance": float(distance[k]),
                "total_variation": float(variation[k]) if k <= far else None,
                **judgement[k],
                **shared,
            }
            for k in kept
        ]

    def fitted(self, name: str, rows: list[Row], options: Options) -> Iterator[Fit]:
        first = rows[0]
        expected = -float(first["rate"]) if math.isfinite(first["rate"]) else None
        fit = power_fit(
            name, _RATE, *columns(rows, "k", "distance", "used"),
            expected=expected, tolerance=_RATE_OFF * abs(expected or 0.0), exponential=True,
            rounding=_USUAL / _CLEAR,
            sampled=bool(first["complex"]),  # a complex mu_2 makes the distance swing about its exponential
        )  # fmt: skip
        reason = first["note"] if first["note"] in (_TOO_SLOW, _TWO) else fit.reason
        yield replace(fit, reason="" if math.isfinite(fit.slope) else reason)
        yield _time(name, first, options["eps"])

    def condensed(self, rows: list[Row]) -> list[Row]:
        shown = ("mu_2", "rate", "mixing_time", "lower", "upper")
        return [
            {**setting, **{column: members[0][column] for column in shown}, "steps": members[-1]["k"]}
            for setting, members in grouped(rows, _SETTING)
        ]

    def figure(self, rows: list[Row], fits: list[Fit]) -> Figure:
        from nlflow.studies.drawing import rate_panel

        lines = []
        for _, members in grouped(rows, _SETTING):
            for row in members[:: max(1, len(members) // _MARKERS)]:
                own = {column: row[column] for column in _SETTING if column in row}
                lines.append({**own, "k": row["k"], "what": _NORM, "y": row["distance"], "used": row["used"]})
                if row["total_variation"]:
                    lines.append({**own, "k": row["k"], "what": "total variation", "y": row["total_variation"]})
        rates = [replace(fit, name=f"{fit.name} {_NORM}") for fit in fits if fit.what == _RATE]
        return rate_panel(
            lines, rates, (*_SETTING, "what"), x="k", y="y", split="what", xlabel="steps $k$",
            ylabel="distance to the limit", scale="semilogy",
        )  # fmt: skip


def _unit(v: Array) -> float:
    xp = namespace(v)
    return float(xp.finfo(v.dtype).eps) * scalar(xp.max(xp.abs(v)))


def _lead(chain: MarkovChain, rate: float) -> float:
    """Return by how much the rate of the next mode is larger; infinity where that is not known, or hides nothing."""
    if chain.states > DENSE or not math.isfinite(rate):
        return math.inf
    moduli = np.sort(np.abs(chain.eigenvalues()))[::-1]
    slower = moduli[1:][moduli[1:] < moduli[1] * (1 - _REAL * min(rate, 1.0))]
    lead = -math.log(slower[0]) - rate if slower.size and slower[0] > 0 else math.inf
    return lead if lead > _RATE_OFF * rate else math.inf


def _others(chain: MarkovChain, start: Floats, first: int, last: int) -> float:
    """Return by what part other modes raise the rate from one step to another, of a reversible chain; 0 for others."""
    law = chain.stationary
    if chain.states > DENSE or not chain.reversible or not law.min() > 0:
        return 0.0
    root = np.sqrt(law)[:, None]
    form = root * chain.matrix() / root.T
    mu, vectors = np.linalg.eigh((form + form.T) / 2)
    parts = np.square(vectors.T @ (root * start.reshape(len(law), -1))).sum(axis=1)
    order = np.argsort(-np.abs(mu))[1:]  # without constants
    mu, parts = np.abs(mu[order]), parts[order]
    rate = -math.log(mu[0]) if 0 < mu[0] < 1 else 0.0
    slow = mu >= mu[0] * math.exp(-_RATE_OFF * rate)
    if not rate > 0 or not parts[slow].sum() > 0:
        return 0.0
    mu = mu / mu[0]
    beside = [math.log1p(float(parts[~slow] @ mu[~slow] ** (2 * k) / parts[slow].sum())) for k in (first, last)]
    return (beside[0] - beside[1]) / (2 * (last - first) * rate)


def _late(
    distance: Floats, unit: float, lead: float = math.inf, others: Callable[[int, int], float] | None = None
) -> list[Row]:
    """Say which steps show the rate: the second half of those above rounding, where one eigenvalue rules."""
    lowest, first = float(distance.min()), float(distance[0])
    floor = max(_CLEAR * unit, 20 * ROUNDING * first)
    if _USUAL * unit < lowest < _DECADES * first:
        # An affinity that approximates ends higher; well above that the two do not mix.
        floor = max(_CLEAR * lowest, floor)
    above = np.flatnonzero(distance > floor)
    last = int(above[-1]) if above.size else 0
    hidden = others is not None and last > 1 and others(last // 2, last) > _RATE_OFF
    if hidden or lead * last < _APART:
        return [{"used": False, "note": _TWO}] * distance.size
    notes = ["early" if 2 * k < last else "" if k <= last else "rounding level" for k in range(distance.size)]
    return [{"used": not note, "note": note} for note in notes]


def _time(name: str, row: Row, eps: float) -> Fit:
    """Return the mixing time between its spectral bounds, in whole steps: they hold for real times."""
    low, high = (math.nan if row[side] is None else float(np.ceil(row[side])) for side in ("lower", "upper"))
    return Fit(
        name, f"mixing time in steps (eps={eps:g}) [its spectral bounds]", float(row["mixing_time"]), low, high,
        relation="in", points=1, reason="a chain that is not reversible has no bounds" if math.isnan(high) else "",
    )  # fmt: skip
