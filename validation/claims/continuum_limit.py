"""Sums over nodes become integrals: at the order of the quadrature on grids, at N^(-1/2) for random nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow import Affinity, ExpDotProduct, Gaussian, Grid, Laplace, Points, affinity
from nlflow.plotting import Series, rate_figure
from validation.harness import Check, Claim, Context, Outcome

Floats = NDArray[np.float64]
Function = Callable[[Floats], Floats]  # of positions, shape (..., m)
Formula = Callable[[Floats, Floats], Floats]  # k(x, y), broadcasting over all but the last axis

NORMAL = 1.96  # 95 % of a normal law lie within so many standard deviations


def gauss_legendre(edges: Floats, count: int) -> tuple[Floats, Floats]:
    """Return nodes and weights of composite Gauss-Legendre quadrature on panels between `edges`, shape (..., Q)."""
    x, w = np.polynomial.legendre.leggauss(count)
    half = np.diff(edges)[..., None] / 2
    middle = (edges[..., 1:, None] + edges[..., :-1, None]) / 2
    shape = (*edges.shape[:-1], -1)
    return (middle + half * x).reshape(shape), (half * w).reshape(shape)


def continuum(k: Formula, v: Function, x: Floats, y: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Return ∫ K v / ∫ K and ∫ K, K = k, at x (N, m) from quadrature nodes (N or 1, Q, m), a block of x at a time."""
    average, degree = np.empty((2, len(x)))
    for begin in range(0, len(x), 256):
        rows = slice(begin, begin + 256)
        nodes = y[rows] if len(y) > 1 else y
        kw = k(x[rows, None, :], nodes) * (weights[rows] if len(weights) > 1 else weights)
        degree[rows] = kw.sum(axis=1)
        average[rows] = (kw * v(nodes)).sum(axis=1) / degree[rows]
    return average, degree


def misfit(sums: Affinity, v: Function, average: Floats, degree: Floats) -> float:
    """Return the largest relative error of the package's averages and degrees."""
    values = v(sums.domain.nodes).reshape(sums.domain.shape)
    errors = (sums.average(values).ravel() - average) / np.abs(average).max(), sums.degree.ravel() / degree - 1
    return float(np.abs(errors).max())


def on_circle(sizes: Floats) -> Floats:
    """Return the errors of the rectangle rule for a smooth function on the unit circle."""
    width = 0.06

    def v(x: Floats) -> Floats:
        return np.asarray(np.exp(np.sin(2 * np.pi * x[..., 0])))

    def k(x: Floats, y: Floats) -> Floats:
        return np.asarray(np.exp(-((x - y) ** 2).sum(axis=-1) / (2 * width**2)))

    errors = []
    for n in sizes.astype(int):
        grid = Grid(int(n), spacing=1 / n, boundary="periodic")
        x = grid.nodes
        # The kernel is not wrapped here: the function goes on periodically over the line instead.
        y, w = gauss_legendre(x + np.linspace(-12 * width, 12 * width, 9), 24)
        errors.append(misfit(affinity(Gaussian(width=width), grid), v, *continuum(k, v, x, y[..., None], w)))
    return np.array(errors)


def on_interval(name: str, sizes: Floats) -> Floats:
    """Return the errors of the midpoint rule on the unit interval (or square), beyond which there is nothing."""
    dim = 2 if "square" in name else 1

    def v(x: Floats) -> Floats:
        return np.asarray(np.exp(x[..., 0]) + (0 if dim == 1 else np.sin(2 * x[..., 1] + x[..., 0])))

    def k(x: Floats, y: Floats) -> Floats:
        squared = ((x - y) ** 2).sum(axis=-1)
        if name.startswith("Gaussian"):
            return np.asarray(np.exp(-squared / (2 * 0.2**2)))
        return np.asarray(np.exp(-np.sqrt(squared) / 0.3) if name.startswith("Laplace") else np.exp(2 * x * y)[..., 0])

    errors = []
    for n in sizes.astype(int):
        grid = Grid((int(n),) * dim, spacing=1 / n, boundary="isolated")
        x = grid.nodes
        if name.startswith("dot"):
            sums = affinity(ExpDotProduct(scale=2.0), grid, x)
        else:
            sums = affinity(Laplace(width=0.3) if name.startswith("Laplace") else Gaussian(width=0.2), grid)
        # Panels end at x, where the Laplace kernel has its kink.
        edges = np.stack([0 * x[:, 0], x[:, 0], 0 * x[:, 0] + 1], axis=1) if dim == 1 else np.array([[0.0, 1.0]])
        y, w = gauss_legendre(edges, 32)
        if dim == 2:
            y = np.stack([a.ravel() for a in np.meshgrid(y[0], y[0], indexing="ij")], axis=1)[None]
            w = np.outer(w[0], w[0]).reshape(1, -1)
        else:
            y = y[..., None]
        errors.append(misfit(sums, v, *continuum(k, v, x, y, w)))
    return np.array(errors)


def with_random_nodes(context: Context, sizes: Floats, fewest: int) -> tuple[Floats, Floats, float]:
    """Return root mean square errors, the standard errors of their logarithms, and their level over the predicted one.

    Nodes are uniform on the unit square. Small numbers of nodes get more trials, since they cost less.
    """
    width, probes = 0.25, 32

    def v(x: Floats) -> Floats:
        return np.asarray(np.sin(3 * x[..., 0]) + x[..., 1] ** 2)

    def k(x: Floats, y: Floats) -> Floats:
        return np.asarray(np.exp(-((x - y) ** 2).sum(axis=-1) / (2 * width**2)))

    line, weight = gauss_legendre(np.array([0.0, 1.0]), 20)
    y = np.stack([a.ravel() for a in np.meshgrid(line, line, indexing="ij")], axis=1)[None]
    w = np.outer(weight, weight).reshape(1, -1)
    errors, spreads, expected = [], [], []
    for n in sizes.astype(int):
        squares, variances = [], []
        for trial in range(int(fewest * sizes[-1] / n)):
            context.step(f"{n} random nodes, trial {trial + 1}")
            x = np.random.default_rng([n, trial]).random((n, 2))
            mean, degree = continuum(k, v, x[:probes], y, w)
            found = affinity(Gaussian(width=width), Points(x)).average(v(x))[:probes]
            squares.append(float(np.mean((found - mean) ** 2)))
            kw = k(x[:probes, None, :], y) ** 2 * (v(y) - mean[:, None]) ** 2 * w
            variances.append(float(np.mean(kw.sum(axis=1) / degree**2)) / n)
        errors.append(np.sqrt(np.mean(squares)))
        expected.append(np.sqrt(np.mean(variances)))
        spreads.append(np.std(squares, ddof=1) / np.mean(squares) / np.sqrt(len(squares)) / 2)
    ratio = np.average(np.log(np.array(errors) / expected), weights=np.array(spreads) ** -2.0)
    return np.array(errors), np.array(spreads), float(np.exp(ratio))


def line_of(sizes: Floats, errors: Floats, spreads: Floats | None = None) -> tuple[float, float, float]:
    """Return slope, intercept and 95 % half width of log error over log N, by weighted least squares."""
    x, y = np.log(sizes), np.log(errors)
    weight = np.ones_like(x) if spreads is None else spreads**-2.0
    centre, level = np.average(x, weights=weight), np.average(y, weights=weight)
    spread = float(np.sum(weight * (x - centre) ** 2))
    slope = float(np.sum(weight * (x - centre) * (y - level)) / spread)
    return slope, float(level - slope * centre), NORMAL / np.sqrt(spread)


def run(context: Context) -> Outcome:
    context.step("smooth and periodic")
    circle = np.array([4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128.0])
    periodic = on_circle(circle)
    # A power law has the same order at every doubling of N; here each doubling must bring a higher one.
    doubled = periodic[np.isin(circle, [4, 8, 16, 32])]
    doublings = np.log2(doubled[:-1] / doubled[1:])
    checks = [
        Check("smooth and periodic: relative error at N = 128", float(periodic[-1]), 1e-13),
        Check(
            "smooth and periodic: least growth of the order from one doubling of N to the next (4, 8, 16, 32)",
            float((doublings[1:] / doublings[:-1]).min()),
            1.5,
            at_least=True,
        ),
    ]
    groups: dict[str, list[Series]] = {
        "rectangle rule, circle": [Series("Gaussian kernel", circle, periodic)],
        "midpoint rule": [],
    }
    found: dict[str, Any] = {"order of each doubling, circle": doublings}
    for name in ("Gaussian", "Laplace", "dot product", "Gaussian, square"):
        context.step(f"midpoint rule: {name}")
        sizes = 2.0 ** np.arange(4.0, 7 if "square" in name else 10)
        errors = on_interval(name, sizes)
        slope, intercept, _ = line_of(sizes, errors)
        checks.append(Check(f"midpoint rule, {name}: fitted order", -slope, 0.05, expected=2.0))
        groups["midpoint rule"].append(Series(name, sizes, errors, slope=slope, intercept=intercept, expected=-2.0))
    sizes = 2.0 ** np.arange(6.0, context.pick(11, 10))
    errors, spreads, level = with_random_nodes(context, sizes, fewest=context.pick(200, 300))
    slope, intercept, half = line_of(sizes, errors, spreads)
    checks += [
        Check("random nodes: slope (its 95 % confidence interval must hold −1/2)", slope, half, expected=-0.5),
        Check("random nodes: half width of that interval", half, 0.02),
        Check("random nodes: error over the one predicted for a mean of independent terms", level, 0.05, expected=1.0),
    ]
    groups["random nodes, square"] = [
        Series(
            "root mean square, 95 %", sizes, errors, low=errors * np.exp(-NORMAL * spreads), slope=slope,
            high=errors * np.exp(NORMAL * spreads), intercept=intercept, expected=-0.5, half_width=half,
        )
    ]  # fmt: skip
    found |= {"random nodes: N": sizes, "random nodes: error": errors, "random nodes: slope": [slope, half]}
    figure = rate_figure(groups, xlabel="nodes N (along each axis on grids)", ylabel="error")
    for axis, group in zip(figure.axes, groups.values(), strict=True):
        numbers = [n for n in np.asarray(group[0].x, dtype=int) if n & (n - 1) == 0]  # powers of two
        axis.set_xticks(numbers, [str(n) for n in numbers])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    return Outcome(
        checks,
        {
            "The error of the package's averages and degrees against the integrals: for a smooth periodic function it "
            "falls faster than any power until only rounding is left, with the midpoint rule like N⁻², and with random "
            "nodes like the inverse square root of their number.": figure
        },
        found,
    )


CLAIM = Claim(
    name="continuum-limit",
    title="From sums over nodes to integrals",
    statement=(
        "The average over N nodes, Σⱼ wⱼ K(xᵢ, xⱼ) v(xⱼ) / Σⱼ wⱼ K(xᵢ, xⱼ), converges to ∫ K v / ∫ K at the order of "
        "the quadrature: faster than any power for smooth periodic functions, N⁻² (N nodes along each axis) with "
        "the midpoint rule on an interval and on a square, N^(−1/2) for uniform random nodes; so do the degrees on "
        "grids. Held against integrals by composite Gauss–Legendre quadrature of the formulas of k, and for random "
        "nodes against the variance ∫ K² (v − ∫Kv/∫K)² / (N (∫K)²) of a mean of independent terms as well."
    ),
    source="derived; quadrature of the integrals in arXiv 2312.00751, eq. 9",
    run=run,
)
