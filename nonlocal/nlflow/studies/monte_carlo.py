"""Averages over random nodes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nlflow.affinities import affinity
from nlflow.domains import Points
from nlflow.errors import InputError
from nlflow.kernels import Gaussian, Kernel
from nlflow.studies.continuum import continuum_average
from nlflow.studies.contract import JUDGED, Kind, Options, Row, columns, grouped, judged
from nlflow.studies.fits import Fit, power_fit
from nlflow.studies.options import check_continuum, check_sizes
from nlflow.studies.quantities import ERRORS
from nlflow.studies.settings import Floats, smooth, values_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TARGETS = np.array([[0.21, 0.62], [0.37, 0.28], [0.52, 0.45], [0.74, 0.81]])
_MOST_QUERIES = 8
_SETTING = ("kernel", "dimension", "channels")


class MonteCarlo(Kind):
    """Error at fixed targets, over independent draws of N nodes or tokens; expected: N^(-1/2)."""

    name = "monte-carlo"
    summary = "error of averages over random nodes"
    defaults = {  # noqa: RUF012
        "kernel": [Gaussian(0.25)],
        "nodes": [64, 128, 256, 512, 1024, 2048, 4096],
        "dimension": [1, 2],
        "channels": [1],
        "seeds": 200,
        "start": None,
        "keys": None,
        "queries": None,
        "values": None,
    }
    axes = (*_SETTING, "nodes")
    setting = _SETTING
    columns = {"draw": int, "error": float, **JUDGED}  # noqa: RUF012

    def check(self, options: Options, given: Any) -> None:
        check_sizes("nodes", options["nodes"])
        if options["keys"] is None:
            check_continuum(options)
            return
        for name in ("dimension", "start"):
            if name in given:
                raise InputError(f"{name}: got it beside keys, expected one of them: tokens are drawn from the keys")
            options[name] = None
        if options["values"] is None:
            options["values"] = options["keys"]
        options["channels"] = None

    def measure(self, options: Options, seed: np.random.SeedSequence) -> list[Row]:
        kernel, count = options["kernel"], options["nodes"]
        draw, exact, scale, floor = _over_box(options) if options["keys"] is None else _over_tokens(options)
        rows = []
        for number, stream in enumerate(seed.spawn(options["seeds"])):
            average = _average(kernel, *draw(np.random.default_rng(stream), count))
            error = float(np.sqrt(np.mean((average - exact) ** 2)))
            row = {"draw": number, "error": error, **judged(error, scale, floor)}
            if not np.isfinite(error):
                row["note"] = "no node near a target"
            rows.append(row)
        if any(not np.isfinite(row["error"]) for row in rows):
            # Draws that reach every target are not a fair sample of all draws.
            for row in rows:
                row["used"], row["note"] = False, row["note"] or "another draw of this size misses a target"
        return rows

    def fitted(self, name: str, rows: list[Row], options: Options) -> Iterator[Fit]:
        drawn = columns(rows, "nodes", "error", "used")
        yield power_fit(name, "order in N", *drawn, expected=-0.5, tolerance=0.05, sampled=True)

    def condensed(self, rows: list[Row]) -> list[Row]:
        lines = []
        for setting, members in grouped(rows, self.axes):
            errors = np.array([row["error"] for row in members])
            errors = errors[np.isfinite(errors)]
            low, middle, high = np.quantile(errors, [0.025, 0.5, 0.975]) if errors.size else [np.nan] * 3
            root = float(np.sqrt(np.mean(errors**2))) if errors.size else np.nan
            line = {"draws": len(members), "error_rms": root, "error_median": float(middle)}
            line |= {"low_95": float(low), "high_95": float(high)}
            line["used"] = sum(row["used"] for row in members)
            lines.append({**setting, **line, "note": next((row["note"] for row in members if row["note"]), "")})
        return lines

    def figure(self, rows: list[Row], fits: list[Fit]) -> Figure:
        from nlflow.studies.drawing import rate_panel

        lines = [{**line, "used": bool(line["used"])} for line in self.condensed(rows)]
        return rate_panel(
            lines, fits, _SETTING, x="nodes", y="error_median", split="dimension", xlabel="nodes $N$",
            ylabel=ERRORS[self.name], band=("low_95", "high_95"),
        )  # fmt: skip


def _average(kernel: Kernel, targets: Floats, nodes: Floats, u: Floats) -> Floats:
    """Return sum_j k(x, y_j) u_j / sum_j k(x, y_j) at targets x; NaN where no node is near."""
    logits = kernel.log_matrix(targets, nodes)
    highest = logits.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # -inf - -inf where no node is near: NaN is meant
        weights = np.exp(logits - highest)
    return np.asarray(weights @ u / weights.sum(axis=1, keepdims=True))


def _over_box(options: Options) -> tuple[Any, Floats, float, float]:
    """Return how to draw uniform nodes, the continuum's averages, the signal's size and the reference's error."""
    dimension = options["dimension"]
    signal = partial(values_at, options["start"] or smooth("isolated", options["channels"]))
    targets = _TARGETS[:, :dimension]
    exact, uncertain = continuum_average(options["kernel"], signal, targets, "isolated")

    def draw(rng: np.random.Generator, count: int) -> tuple[Floats, Floats, Floats]:
        nodes = rng.random((count, dimension))
        return targets, nodes, signal(nodes).reshape(count, -1)

    scale = float(np.sqrt(np.mean(exact**2)))
    return draw, exact, scale, 2 * uncertain / scale if scale > 0 else 0.0


def _over_tokens(options: Options) -> tuple[Any, Floats, float, float]:
    """Return how to draw tokens, the averages over all of them, the size of the values, and 0."""
    keys, given = options["keys"], options["queries"]
    count = len(keys)
    keys = keys.reshape(count, -1)
    values = options["values"].reshape(count, -1)
    queries = None if given is None else given.reshape(count, -1)
    whole = affinity(options["kernel"], Points(np.zeros(count)), keys, queries=queries)
    chosen = np.unique(np.linspace(0, count - 1, min(_MOST_QUERIES, count)).round().astype(int))
    exact = whole.average(values)[chosen]
    mapped, compared = options["kernel"].map_features(keys, queries)
    targets = mapped[chosen]

    def draw(rng: np.random.Generator, size: int) -> tuple[Floats, Floats, Floats]:
        tokens = rng.integers(count, size=size)
        return targets, compared[tokens], values[tokens]

    return draw, exact, float(np.sqrt(np.mean(values**2))), 0.0
