"""Stable range of the NeuTRENO step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nlflow._array import Array, constant_like, namespace, over_channels
from nlflow.affinities import Affinity
from nlflow.equilibria import largest_stable_fidelity
from nlflow.errors import InputError
from nlflow.flows.gradient import AttentionFlow
from nlflow.flows.integrators import NeutrenoStep
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import dense_operator
from nlflow.kernels import Gaussian, Laplace, TopHat
from nlflow.studies.contract import JUDGED, Kind, Options, Row, columns
from nlflow.studies.fits import FEWEST, Fit, largest, no_fit, regress
from nlflow.studies.options import DEVICE, GRID, check_sizes
from nlflow.studies.settings import build

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SETTING = tuple(GRID)
# Of the predicted limit: close about it, and wide.
_FIDELITIES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 0.97, 0.98, 0.99, 1.01, 1.02, 1.03, 1.05, 1.2, 1.5, 2.0)
_PERTURBATIONS = 4
_DENSE = 1000
_FIRST_WINDOW, _LAST_WINDOW = 64, 2048
_MARGINAL = 1e-9  # relative: what is so near to the limit is at it, where nothing decays
_SETTLED = 1e-4  # change of log growth from one window to the next
_ALMOST = 1e-3  # the same after the last window: what a crowd of close eigenvalues may leave
_GROWTH_OFF = 0.005  # of a growth whose last windows still differ a little
_NEAR = 0.1  # of growth 1: what the measured limit is read from


class Stability(Kind):
    """Growth a step of perturbations under u <- Pu + lambda~ (f - u); expected: rho(P - lambda~ I)."""

    name = "stability"
    summary = "growth under NeuTRENO steps, and the largest stable fidelity"
    defaults = {  # noqa: RUF012
        **GRID,
        "kernel": [Gaussian(0.1), Laplace(0.1), TopHat(0.1)],
        "fidelity": None,
        "domain": None,
        "start": None,
        "keys": None,
        "queries": None,
        **DEVICE,
        "dtype": "float64",
    }
    axes = setting = _SETTING
    columns = {  # noqa: RUF012
        "fidelity": float, "growth": float, "growth_predicted": float | None, "stable": bool,
        "stable_predicted": bool, "limit": float, **JUDGED,
    }  # fmt: skip

    def check(self, options: Options, given: Any) -> None:
        if "fidelity" in given:
            if min(options["fidelity"]) <= 0:
                raise InputError("fidelity: got 0, expected numbers > 0: without fidelity constants do not decay")
            check_sizes("fidelity", options["fidelity"])

    def measure(self, options: Options, seed: np.random.SeedSequence) -> list[Row]:
        rng = np.random.default_rng(seed)
        problem = build(options, rng)
        weights = problem.affinity
        limit = largest_stable_fidelity(weights)
        chosen = options["fidelity"] or [value * (limit if limit > 1e-3 else 1.0) for value in _FIDELITIES]
        spectrum = _spectrum(weights, limit)
        start = constant_like(rng.standard_normal((*weights.domain.shape, _PERTURBATIONS)), problem.start)
        rows = []
        for fidelity in sorted(chosen):
            flow = AttentionFlow(weights, 0 * start, fidelity)
            growth, settled = _growth(flow, start)
            predicted = None if spectrum is None else float(np.abs(spectrum - fidelity).max())
            rows.append(
                {
                    "fidelity": fidelity, "growth": growth, "growth_predicted": predicted,
                    "stable": growth < 1 - _MARGINAL, "stable_predicted": fidelity < limit * (1 - _MARGINAL),
                    "limit": limit, "used": settled,
                    "note": "" if settled else "not settled",
                }
            )  # fmt: skip
        return rows

    def fitted(self, name: str, rows: list[Row], options: Options) -> Iterator[Fit]:
        yield _limit(name, rows)
        errors = [abs(row["growth"] - row["growth_predicted"]) for row in rows if row["growth_predicted"] is not None]
        if errors:
            yield largest(name, "|growth measured - predicted|, the largest over fidelities", errors, _GROWTH_OFF)

    def figure(self, rows: list[Row], fits: list[Fit]) -> Figure:
        del fits
        from nlflow.plotting import phase_figure

        limit, fidelity, growth = map(np.array, columns(rows, "limit", "fidelity", "growth"))
        return phase_figure(limit - 1, fidelity, growth, limit=limit)


def _spectrum(weights: Affinity, limit: float) -> Any:
    """Return the eigenvalues of P, or those that can be the largest of P - lambda~ I; None where they are not known."""
    if weights.domain.size <= _DENSE:
        return 1 - np.linalg.eigvals(dense_operator(AttentionFlow(weights)))
    return np.array([1.0, limit - 1]) if weights.symmetric else None


def _growth(flow: LinearFlow, start: Array) -> tuple[float, bool]:
    """Return the factor by which a perturbation grows in one step, late, and whether it has settled.

    The mean over a window of k steps after the first k, k doubled until it changes no more: where two eigenvalues of
    the same modulus compete, or a complex pair, single steps keep changing, and their mean does not.
    """
    layer, xp = NeutrenoStep(), namespace(start)
    root = over_channels(xp.sqrt(flow.measure(start)), start)

    def norm(e: Array) -> float:
        return float(xp.linalg.vector_norm(root * e))

    e, logs = start / norm(start), [0.0]
    window, before = _FIRST_WINDOW, math.nan
    while True:
        while len(logs) <= 2 * window:
            e, _ = layer.advance(flow, e, 0.0, 1.0, {})
            largest = float(xp.max(xp.abs(e)))
            if largest == 0:
                return 0.0, True
            e = e / largest  # squares may overflow
            size = norm(e)
            e = e / size
            logs.append(logs[-1] + math.log(largest) + math.log(size))
        mean = (logs[2 * window] - logs[window]) / window
        settled = abs(mean - before) <= _SETTLED
        if settled or window >= _LAST_WINDOW:
            return math.exp(mean), abs(mean - before) <= _ALMOST
        before, window = mean, 2 * window


def _limit(name: str, rows: list[Row]) -> Fit:
    """Return the fidelity at which growth passes 1, by regression of the fidelity on growth about that point."""
    what, expected = "largest stable fidelity [between the neighbours]", rows[0]["limit"]
    rows = sorted((row for row in rows if row["used"]), key=lambda row: row["fidelity"])
    if not rows:
        return no_fit(name, what, "no growth has settled", expected)
    # Growth falls with the fidelity, while constants are slowest, then rises: the limit lies on the rising side.
    lowest = min(range(len(rows)), key=lambda index: rows[index]["growth"])
    rising = rows[lowest:]
    below, above = [row for row in rising if row["growth"] < 1], [row for row in rising if row["growth"] >= 1]
    if not below or not above:
        return no_fit(name, what, "all fidelities are on one side of it", expected)
    # It lies between the last fidelity at which perturbations decay and the first at which they grow.
    left, right = below[-1], above[0]
    low, high = left["fidelity"], right["fidelity"]
    near = [row for row in rising if abs(row["growth"] - 1) <= _NEAR]
    if len(near) >= FEWEST:
        line = regress([row["growth"] - 1 for row in near], [row["fidelity"] for row in near])
        value, reason = line.intercept, ""
        low, high = min(low, value - line.intercept_half), max(high, value + line.intercept_half)
    else:
        share = (1 - left["growth"]) / (right["growth"] - left["growth"])
        value, reason = low + share * (high - low), "interpolated between neighbours"
    return Fit(
        name, what, value, low, high, expected, tolerance=0.01 * expected, points=max(len(near), 2), reason=reason
    )
