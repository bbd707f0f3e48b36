"""Order of averages on grids."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from nlflow.affinities import affinity
from nlflow.kernels import Gaussian, Kernel, RadialKernel
from nlflow.studies.continuum import continuum_average
from nlflow.studies.contract import JUDGED, ROUNDING, Kind, Options, Row, columns, judged
from nlflow.studies.fits import FEWEST, Fit, no_fit, power_fit
from nlflow.studies.options import check_continuum, check_sizes
from nlflow.studies.quantities import ERRORS, QUANTITIES
from nlflow.studies.settings import Floats, grid, sampled, smooth, values_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TARGETS = np.array([[0.06, 0.62], [0.37, 0.18], [0.52, 0.45], [0.83, 0.91]])
_SETTING = ("kernel", "dimension", "boundary", "channels")
_SPECTRAL = "exponential rate per node (spectral)"
_STEEP = 6.0
"""A local order that no usual quadrature has: beyond it the convergence counts as spectral."""


class SpaceOrder(Kind):
    """Error of (Pu)(x) at nodes x of a grid against the continuum."""

    name = "space-order"
    summary = "order of grid averages in the number of nodes"
    defaults = {  # noqa: RUF012
        "kernel": [Gaussian(0.05)],
        "nodes": None,
        "dimension": [1, 2],
        "boundary": ["periodic", "reflect", "isolated"],
        "channels": [1],
        "start": None,
    }
    axes = setting = _SETTING
    columns = {"nodes": int, "spacing": float, "error": float, "law": str, **JUDGED}  # noqa: RUF012

    def check(self, options: Options, given: Any) -> None:
        check_continuum(options)
        if "nodes" in given:
            check_sizes("nodes", options["nodes"])

    def measure(self, options: Options, seed: np.random.SeedSequence) -> list[Row]:
        del seed  # nothing is drawn
        kernel, boundary, dimension = options["kernel"], options["boundary"], options["dimension"]
        signal = partial(values_at, options["start"] or smooth(boundary, options["channels"]))
        law = _law(kernel, boundary, dimension)
        sizes = options["nodes"] or _sizes(kernel, dimension, law)
        return [_error(kernel, boundary, dimension, signal, n, law) for n in sorted(sizes)]

    def fitted(self, name: str, rows: list[Row], options: Options) -> Iterator[Fit]:
        law = rows[0]["law"]
        if law != "spectral":
            yield _algebraic(name, law, rows)
            return
        yield power_fit(name, _SPECTRAL, *columns(rows, "nodes", "error", "used"), exponential=True)
        yield _steepness(name, rows)

    def figure(self, rows: list[Row], fits: list[Fit]) -> Figure:
        from nlflow.studies.drawing import rate_panel

        spectral = all(row["law"] == "spectral" for row in rows)
        what = _SPECTRAL if spectral else "order in 1/N"
        shown = [fit for fit in fits if fit.what == what]
        across = "nodes" if spectral else "spacing"
        return rate_panel(
            rows, shown, _SETTING, x=across, y="error", split="boundary", xlabel=QUANTITIES[across].label,
            ylabel=ERRORS[self.name],
            scale="semilogy" if spectral else "loglog",
        )  # fmt: skip


def _law(kernel: Kernel, boundary: str, dimension: int) -> str:
    """Return what theory says for smooth signals: an order, ``>=`` and an order, ``spectral`` or ``unknown``.

    Sums over a lattice are spectrally exact for smooth periodic functions, the midpoint rule has order 2 at an edge
    (Euler-Maclaurin), and a singularity |x - y| at a lattice point costs order 1 + m (Sidi and Navot for m = 1,
    generalized zeta functions for m = 2). Where an edge meets a singularity of higher order, both show.
    """
    if not isinstance(kernel, RadialKernel) or kernel.smoothness is None:
        return "unknown"
    inside = kernel.smoothness + dimension
    if boundary == "isolated":
        return ">=2" if 2 < inside < math.inf else "2"
    return "spectral" if inside == math.inf else f"{inside:g}"


def _sizes(kernel: RadialKernel, dimension: int, law: str) -> list[int]:
    """Return numbers of nodes that resolve the kernel: barely for spectral convergence, which rounding soon ends."""
    width = min(kernel.support(math.exp(-0.5)), 1.0)
    if law == "spectral":
        wanted = np.linspace(0.4, 1.3, 7) / width
    elif dimension == 1:
        wanted = np.geomspace(4, 64, 7) / width
    else:
        wanted = np.geomspace(3, 12, 5) / width
    return sorted({max(4, round(float(n))) for n in wanted})


def _error(
    kernel: RadialKernel, boundary: Any, dimension: int, signal: Callable[[Floats], Floats], nodes: int, law: str
) -> Row:
    box = grid(nodes, dimension, boundary)
    u = sampled(signal, box)
    average = affinity(kernel, box).average(u).reshape(box.size, -1)
    positions = box.nodes
    distance = ((positions[None] - _TARGETS[:, None, :dimension]) ** 2).sum(axis=2)
    targets = distance.argmin(axis=1)
    exact, uncertain = continuum_average(kernel, signal, positions[targets], boundary)
    error = float(np.sqrt(np.mean((average[targets] - exact) ** 2)))
    scale = float(np.sqrt(np.mean(u**2)))
    floor = 2 * uncertain / scale if scale > 0 else 0.0
    return {"nodes": nodes, "spacing": 1 / nodes, "error": error, "law": law, **judged(error, scale, floor)}


def _algebraic(name: str, law: str, rows: list[Row]) -> Fit:
    relation = ">=" if law.startswith(">=") else "="
    expected = None if law == "unknown" else float(law.removeprefix(">="))
    fit = power_fit(name, "order in 1/N", *columns(rows, "spacing", "error", "used"), expected=expected, tolerance=0.15)
    return replace(fit, relation=relation)


def _steepness(name: str, rows: list[Row]) -> Fit:
    """Return the order at the finest sizes above rounding, which must be beyond that of any usual rule."""
    what = "order in 1/N at the finest sizes above rounding [range between neighbours]"
    fine = [row for row in rows if row["used"]][-FEWEST:]
    if len(fine) == FEWEST:
        spacing, error = (np.log(column) for column in columns(fine, "spacing", "error"))
        between = np.diff(error) / np.diff(spacing)
        order = float((error[-1] - error[0]) / (spacing[-1] - spacing[0]))
        low, high = float(between.min()), float(between.max())
        return Fit(name, what, order, low, high, _STEEP, relation=">=", points=FEWEST)
    flat = [row["nodes"] for row in rows if row["note"] == "rounding level"]
    if not flat:
        return no_fit(name, what, f"only {len(fine)} size(s) can be used", _STEEP, ">=")
    # An error of the size of the signal at one node has fallen to rounding: no less than this order does that.
    least = -math.log(ROUNDING) / math.log(flat[0])
    return Fit(
        name, what, least, least, math.inf, _STEEP, relation=">=", points=1,
        reason=f"the least that reaches rounding level at N={flat[0]}",
    )  # fmt: skip
