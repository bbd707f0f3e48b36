"""The fractional Poisson problem with f = 1: errors, iterations and time versus the number of unknowns.

Held against PyNucleus, a package of finite elements, by the errors that its tests store for P1 elements (repository
sandialabs/PyNucleus, tests/cache_runFractional.py--domain..., commit 547fa40). The numbers of unknowns belong to its
default meshes: 2 cells refined 6 times, 127 nodes inside; 6 triangles refined 5 times, 2977 nodes inside. P1 elements
on the interval are computed here too, by their Toeplitz matrix, to see that the stored errors belong to 127 unknowns.

"At nodes" is the error of the values at nodes; "as functions" that of piecewise linear functions, and of ours the
values over dist^s, piecewise linear, times dist^s.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from scipy import linalg

from benchmarks.harness import Row
from nlflow import FractionalLaplacian, Grid

SIZES = (10**3, 10**4, 10**5, 10**6)
ORDERS = (0.25, 0.5, 0.75)
RTOL = 1e-6
STORED = {  # domain, s: the unknowns, the relative error of the interpolated solution, and of the solution
    ("interval", 0.25): (127, 0.00567676, 0.01884816),
    ("interval", 0.75): (127, 0.00133413, 0.00178627),
    ("disc", 0.25): (2977, 0.01406249, 0.04647237),
    ("disc", 0.75): (2977, 0.00289783, 0.00480878),
}


def exact(ndim: int, s: float, squared: Any) -> Any:
    """Return the solution on the unit ball (Getoor 1961, doi 10.1090/S0002-9947-1961-0137148-5)."""
    c = 4**-s * math.gamma(ndim / 2) / (math.gamma(ndim / 2 + s) * math.gamma(1 + s))
    return c * np.maximum(1 - squared, 0) ** s


def problem(domain: str, unknowns: int) -> tuple[Grid, dict[str, Any], Any]:
    """Return a grid, what is inside, and |x|^2 at the nodes inside; at most so many unknowns."""
    if domain == "interval":
        grid = Grid(unknowns, 2 / unknowns, "isolated")
        return grid, {}, (grid.nodes[:, 0] - 1) ** 2
    n = math.floor(math.sqrt(unknowns / (math.pi / 4)))
    while True:
        grid = Grid((n, n), 2 / n, "isolated")
        r = np.linalg.norm(grid.nodes - 1, axis=1).reshape(n, n)
        if (r < 1).sum() <= unknowns:
            return grid, {"inside": 1 - r}, r[r < 1] ** 2
        n -= 1


def solved(domain: str, s: float, unknowns: int) -> dict[str, Any]:
    """Return error, iterations and seconds of one case, the median of three where it takes less than a second."""
    grid, options, squared = problem(domain, unknowns)
    seconds: list[float] = []
    while len(seconds) < 3 and sum(seconds) < 1:
        start = time.perf_counter()
        operator = FractionalLaplacian(grid, s, **options)
        found = operator.solve(1.0, rtol=RTOL)
        seconds.append(time.perf_counter() - start)
    expected = exact(grid.ndim, s, squared)
    error = float(np.linalg.norm(found.u - expected) / np.linalg.norm(expected))
    return {
        "unknowns": operator.domain.size, "error": error, "iterations": found.iterations,
        "seconds": float(np.median(seconds)), "residual": found.residual, "u": found.u,
    }  # fmt: skip


def elements(s: float, unknowns: int) -> tuple[Any, Any]:
    """Return the nodes, with the ends, and the values of P1 elements on the interval, by their Toeplitz matrix."""
    h = 2 / (unknowns + 1)
    k = np.arange(unknowns)
    powers = [np.abs(k + j) ** (3 - 2 * s) for j in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    column = powers[0] - 4 * powers[1] + 6 * powers[2] - 4 * powers[3] + powers[4]
    column *= h ** (1 - 2 * s) / (2 * math.cos(math.pi * s) * math.gamma(4 - 2 * s))
    u = linalg.solve_toeplitz(column, np.full(unknowns, h))
    return np.linspace(-1, 1, unknowns + 2), np.concatenate([[0.0], u, [0.0]])


def as_function(x: Any, values: Any, s: float, weight: Any) -> float:
    """Return the relative error on (-1, 1) of weight(y) times the piecewise linear function of values."""
    points, weights = np.polynomial.legendre.leggauss(30)
    graded = (1 - np.cos(math.pi * (np.arange(20_001) / 20_000))) - 1
    y = (graded[:-1, None] + graded[1:, None]) / 2 + np.diff(graded)[:, None] / 2 * points
    part = np.diff(graded)[:, None] / 2 * weights
    v, expected = weight(y) * np.interp(y, x, values), exact(1, s, y * y)
    return float(np.sqrt(np.sum(part * (v - expected) ** 2) / np.sum(part * expected**2)))


def run() -> list[Row]:
    rows = [row for case in STORED for row in against_elements(*case)]
    for domain in ("interval", "disc"):
        for s in ORDERS:
            rows += growth(domain, s)
    return rows


def against_elements(domain: str, s: float) -> list[Row]:
    """Return the errors beside those that PyNucleus stores, at no more unknowns."""
    unknowns, at_nodes, as_functions = STORED[domain, s]
    ours = solved(domain, s, unknowns)
    what = f"{domain}, s = {s:g}, {ours['unknowns']} unknowns (PyNucleus {unknowns})"
    rows = [
        Row.of("fractional", f"{what}: relative L2 error at nodes", f"{at_nodes:.3g}", f"{ours['error']:.3g}",
               at_nodes / ours["error"], least=1.0),
    ]  # fmt: skip
    if domain == "interval":
        x = (np.arange(unknowns) + 0.5) * 2 / unknowns - 1
        v = ours["u"] / np.minimum(1 - x, 1 + x) ** s
        # Linear up to the ends.
        ends = 1.5 * v[[0, -1]] - 0.5 * v[[1, -2]]
        error = as_function(
            np.concatenate([[-1.0], x, [1.0]]), np.concatenate([ends[:1], v, ends[1:]]), s,
            lambda y: np.minimum(1 - y, 1 + y) ** s,
        )  # fmt: skip
        here = as_function(*elements(s, unknowns), s, np.ones_like)
        rows += [
            Row.of("fractional", f"{what}: as functions", f"{as_functions:.3g}", f"{error:.3g}",
                   as_functions / error, least=1.0),
            Row.of("fractional", f"{what}: P1 elements computed here, against the stored error", f"{as_functions:.3g}",
                   f"{here:.3g}", as_functions / here),
        ]  # fmt: skip
    return rows


def growth(domain: str, s: float) -> list[Row]:
    """Return errors, iterations and times from 10^3 to 10^6 unknowns."""
    cases = [solved(domain, s, n) for n in SIZES]
    rows = [
        Row.of("fractional", f"{domain}, s = {s:g}, {c['unknowns']} unknowns: {c['iterations']} iterations, "
               f"residual {c['residual']:.1g}, error {c['error']:.2e}", "none", f"{c['seconds']:.3g} s", c["seconds"])
        for c in cases
    ]  # fmt: skip
    first, last = cases[0], cases[-1]
    size = math.log(last["unknowns"] / first["unknowns"])
    slope = math.log(last["seconds"] / first["seconds"]) / size
    decade = math.log10(last["seconds"] / cases[-2]["seconds"])
    more = last["iterations"] / first["iterations"]
    return [
        *rows,
        Row.of("fractional", f"{domain}, s = {s:g}: iterations at 10^6 over those at 10^3", str(first["iterations"]),
               str(last["iterations"]), more, most=1.3),
        Row.of("fractional", f"{domain}, s = {s:g}: exponent of time over unknowns", "none", f"{slope:.3g}", slope,
               most=1.15),
        Row.of("fractional", f"{domain}, s = {s:g}: the same from 10^5, where caches end", "none", f"{decade:.3g}",
               decade),
    ]  # fmt: skip
