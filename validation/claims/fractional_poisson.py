"""The fractional Poisson problem on the interval and the disc, and the local limit of a shrinking horizon."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.integrate import quad

from nlflow import FractionalLaplacian, Grid
from nlflow.plotting import new_figure
from validation.harness import Check, Claim, Context, Outcome, largest

ORDERS = (0.25, 0.5, 0.75)


def exact(ndim: int, s: float, squared: Any) -> Any:
    c = 4**-s * math.gamma(ndim / 2) / (math.gamma(ndim / 2 + s) * math.gamma(1 + s))
    return c * np.maximum(1 - squared, 0) ** s


def line_error(n: int, s: float, corrected: bool) -> float:
    operator = FractionalLaplacian(Grid(n, 2 / n, "isolated"), s, corrected=corrected)
    expected = exact(1, s, (operator.domain.nodes[:, 0] - 1) ** 2)
    return float(np.linalg.norm(operator.solve(1.0).u - expected) / np.linalg.norm(expected))


def disc_error(n: int, s: float) -> float:
    grid = Grid((n, n), 2 / n, "isolated")
    r = np.linalg.norm(grid.nodes - 1, axis=1).reshape(n, n)
    expected = exact(2, s, r[r < 1] ** 2)
    found = FractionalLaplacian(grid, s, inside=1 - r).solve(1.0).u
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def limit_error(n: int, s: float) -> float:
    """Return how far A u is from -u'' for a horizon of three spacings."""
    h = 2 * math.pi / n
    operator = FractionalLaplacian(Grid(n, h, "periodic"), s, horizon=3 * h, scaling="local")
    u = np.sin(operator.domain.nodes[:, 0])
    return float(np.linalg.norm(operator.apply(u) - u) / np.linalg.norm(u))


def tempered_error(n: int, s: float) -> float:
    """Return how far what A with tempering and a horizon does to a wave is from the integral, and solutions from it.

    (A sin)(x) = sin(x) ∫ (1 − cos r) C |r|^(−1−2s) exp(−λ|r|) dr; constants outside and inside alike give 0.
    """
    h, tempering, far, worst = 2 * math.pi / n, 1.7, 2.5, 0.0
    grid = Grid(n, h, "periodic")
    u = np.sin(grid.nodes[:, 0])

    def integral(of: Any) -> float:
        # r = t^(1/(2 − 2s)), in which the singular power is gone.
        power = 1 / (2 - 2 * s)
        return float(
            2 * power * quad(lambda t: of(t**power) * math.exp(-tempering * t**power), 0, far ** (1 / power))[0]
        )

    moved = integral(lambda r: (1 - math.cos(r)) / r**2 if r > 1e-6 else 0.5)
    constant = 4**s * s * math.gamma(0.5 + s) / (math.sqrt(math.pi) * math.gamma(1 - s))
    for scaling, factor in (("fractional", constant), ("local", 2 / integral(lambda r: 1.0))):
        operator = FractionalLaplacian(grid, s, horizon=far, tempering=tempering, scaling=scaling)
        symbol = factor * moved
        worst = max(worst, float(np.abs(operator.apply(u) / symbol - u).max()))
        worst = max(worst, float(np.abs(operator.solve(u).u * symbol - u).max()))
    bounded = FractionalLaplacian(Grid(n, h, "isolated"), s, tempering=tempering)
    return max(worst, float(np.abs(bounded.apply(np.ones(n), exterior=1.0)).max()))


def given_outside(s: float) -> float:
    """Return errors of A u, solutions and minimizers with values given outside, against rows of a matrix, relative.

    The operator inside a part of a grid has the rows of that of the grid, if there is nothing beyond; a constant
    everywhere is not moved.
    """
    rng, grid = np.random.default_rng(17), Grid(40, spacing=0.1, boundary="isolated")
    inside = (np.arange(40) > 8) & (np.arange(40) < 30) & (np.arange(40) != 17)
    matrix = FractionalLaplacian(grid, s, corrected=False).apply(np.eye(40))[inside]
    part, field, b = FractionalLaplacian(grid, s, inside=inside), rng.standard_normal(40), rng.standard_normal(20)
    applied = part.apply(field[inside], field)
    exact = np.linalg.solve(matrix[:, inside], b - matrix[:, ~inside] @ field[~inside])
    free = np.linalg.solve(matrix[:, inside], -matrix[:, ~inside] @ field[~inside])
    found, least = part.solve(b, field, rtol=1e-12), part.functional(field).minimizer(rtol=1e-12).u
    both = part.functional(field, rhs=b).minimizer(rtol=1e-12).u
    # Corrections at an edge are for u less what it is there: at the nearest node outside.
    away = 1.23 - np.abs(0.1 * np.arange(40) - 1.9)
    edge, plain = (FractionalLaplacian(grid, s, inside=away, corrected=kind) for kind in (True, False))
    places = np.flatnonzero(away > 0)
    near = np.where(places < 19.5, places[0] - 1, places[-1] + 1)
    extra = (edge.killing - plain.killing) * (field[places] - field[near])
    more = edge.apply(field[places], field) - plain.apply(field[places], field) - extra
    flat = edge.apply(np.full(edge.domain.shape, 1.7), 1.7)
    size = float(np.abs(edge.killing).max())
    return largest(float(np.abs(applied - matrix @ field).max() / np.abs(applied).max()),
                   float(np.abs(found.u - exact).max()), float(np.abs(least - free).max()),
                   float(np.abs(both - exact).max()), float(np.abs(more).max()) / size,
                   float(np.abs(flat).max()) / size)  # fmt: skip


def slope(sizes: list[int], errors: list[float]) -> float:
    return -float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


def run(context: Context) -> Outcome:
    checks, curves = [], {}
    sizes = context.pick([500, 1000, 2000, 4000, 8000], [500, 1000, 2000])
    sides = context.pick([62, 124, 248, 496], [62, 124])
    for s in ORDERS:
        context.step(f"s = {s:g}")
        corrected, plain = ([line_error(n, s, kind) for n in sizes] for kind in (True, False))
        checks += [
            Check(f"interval, s = {s:g}: order with the correction", slope(sizes, corrected), 0.1, expected=1 + s),
            Check(f"interval, s = {s:g}: order without", slope(sizes, plain), 0.1, expected=min(1, 0.5 + s)),
        ]
        found = [disc_error(n, s) for n in sides]
        checks.append(Check(f"disc, s = {s:g}: error at {sides[0]} nodes a diameter", found[0], 1e-3))
        checks.append(Check(f"disc, s = {s:g}: order", slope(sides, found), 0.7, at_least=True))
        local = [limit_error(n, s) for n in (50, 100, 200)]
        checks.append(
            Check(
                f"horizon of three spacings, s = {s:g}: order to -Laplace",
                slope([50, 100, 200], local),
                0.1,
                expected=2,
            )
        )
        checks.append(Check(f"tempered, s = {s:g}: waves against the integral", tempered_error(400, s), 1e-5))
        checks.append(Check(f"values outside, s = {s:g}: against matrices", given_outside(s), 1e-9))
        curves[s] = (corrected, plain, found)
    caption = (
        "Relative errors of solutions of (−Δ)ˢ u = 1 over the nodes a diameter. Left: the interval, with the "
        "correction (full lines) and without (dashed). Right: the disc."
    )
    return Outcome(checks, {caption: _figure(sizes, sides, curves)}, {"sizes": sizes, "sides": sides})


def _figure(sizes: list[int], sides: list[int], curves: dict[float, Any]) -> object:
    figure = new_figure(8, 3.4, dpi=110)
    left, right = figure.subplots(1, 2)
    for (s, (corrected, plain, disc)), marker in zip(curves.items(), "os^", strict=True):
        line = left.loglog(sizes, corrected, marker + "-", markersize=4, label=f"s = {s:g}")[0]
        left.loglog(sizes, plain, marker + "--", markersize=4, color=line.get_color())
        right.loglog(sides, disc, marker + "-", markersize=4, color=line.get_color(), label=f"s = {s:g}")
    for axis, title, ticks in ((left, "interval", sizes), (right, "disc", sides)):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("nodes a diameter", fontsize=9)
        axis.set_xticks(ticks, [str(n) for n in ticks])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=8, frameon=False)
    left.set_ylabel("relative error", fontsize=9)
    return figure


CLAIM = Claim(
    name="fractional-poisson",
    title="Solutions of the fractional Poisson problem, and the local limit",
    statement=(
        "On the unit ball of m dimensions (−Δ)ˢ u = 1 with u = 0 outside has the solution c (1 − |x|²)ˢ, "
        "c = 4⁻ˢ Γ(m/2) / (Γ(m/2 + s) Γ(1 + s)). On N nodes of the interval its error falls like N^−(1+s) where "
        "dist(x)ˢ, which (−Δ)ˢ makes 0 in a half space, is made exact, and like N^−min(1, 1/2+s), as for finite "
        "elements, where it is not. On the disc the edge cuts cells. With a horizon of three spacings and the "
        "constant of the second moment the operator tends to −Δ with the square of the spacing."
    ),
    source="Getoor 1961, doi 10.1090/S0002-9947-1961-0137148-5; orders derived",
    run=run,
)
