"""Values that are held in a volume: what the nonlocal Dirichlet problem does, and what penalties do instead."""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

from nlflow import (
    ETD4RK,
    Constraint,
    E,
    Gaussian,
    GradientFlow,
    Grid,
    J,
    Points,
    RungeKutta,
    TopHat,
    affinity,
    affinity_from_graph,
    equilibrium,
    from_matrix,
    solve,
)
from nlflow.flows.spectrum import relaxation_rate
from validation.harness import Check, Claim, Context, Outcome, largest, smallest

Floats = NDArray[np.float64]


def collar(n: int, reach: int) -> NDArray[np.bool_]:
    """Return the nodes within `reach` of the ends, those that a kernel of that radius sees from inside."""
    mask = np.zeros(n, bool)
    mask[:reach] = mask[-reach:] = True
    return mask


def polynomials(n: int, reach: int) -> tuple[float, float]:
    """Return how far the solutions for linear and for quadratic values are from these, which solve them exactly.

    A kernel that is the same on both sides keeps x, and adds the sum of w k r² to x², which a source takes away.
    """
    grid = Grid(n, spacing=1 / n, boundary="isolated")
    x, mask = grid.nodes[:, 0], collar(n, reach)
    weights = affinity(TopHat(radius=reach / n), grid, method="dense")
    linear = J(weights).minimizer(constraint=Constraint(mask, x[mask]))
    second = float(2 * sum((r / n) ** 2 for r in range(1, reach + 1))) / (2 * reach + 1)  # of an average inside
    held = Constraint(mask, (x**2)[mask])
    flow = GradientFlow(J(weights), "degree", constraint=held, source=np.full(n, -second))
    quadratic = solve(flow, x, t=60 / relaxation_rate(flow), integrator=ETD4RK(20 / relaxation_rate(flow))).final
    return float(np.abs(linear.u - x).max()), float(np.abs(quadratic - x**2).max())


def dense() -> float:
    """Return how far minimizers of E between held nodes are from those of dense systems, relative."""
    rng, n, worst = np.random.default_rng(7), 81, 0.0
    k, w, f = rng.random((n, n)) ** 3, rng.uniform(0.5, 2, n) / n, rng.standard_normal(n)
    held, values = np.array([3, 17, 30]), np.array([2.0, -1.0, 0.5])
    free = np.setdiff1d(np.arange(n), held)
    # Neighbours on a square of 9 by 9 nodes, with random weights.
    index = np.arange(n).reshape(9, 9)
    ends = np.concatenate([[index[1:].ravel(), index[:-1].ravel()], [index[:, 1:].ravel(), index[:, :-1].ravel()]], 1)
    size = rng.uniform(0.5, 2, ends.shape[1])
    graph = affinity_from_graph(np.concatenate([ends, ends[::-1]], 1), edge_weight=np.tile(size, 2))
    near = np.zeros((n, n))
    near[ends[0], ends[1]] = near[ends[1], ends[0]] = size
    for weights, links, masses, names in (
        (from_matrix(k, Points(np.zeros(n), weights=w)), (k + k.T) * w[:, None] * w, w, ("auto", "diagonal")),
        (graph, 2 * near, np.ones(n), ("auto", "diagonal", "direct", "multigrid")),
    ):
        degree = links.sum(axis=1)
        for measure, fidelity in product(("l2", "degree"), (0.4, rng.uniform(0.1, 2, n))):
            pull = fidelity * (masses if measure == "l2" else degree)
            a = np.diag(degree + pull) - links
            exact = np.linalg.solve(a[np.ix_(free, free)], (pull * f)[free] - a[np.ix_(free, held)] @ values)
            for name, constraint in product(names, (Constraint(held, values), None)):
                if constraint is None and name == "auto":
                    continue
                found = E(weights, f, fidelity, measure=measure).minimizer(
                    rtol=1e-12, constraint=constraint, preconditioner=name
                )
                wanted = exact if constraint else np.linalg.solve(a, pull * f)[free]
                worst = largest(worst, float(np.abs(found.u[free] - wanted).max() / np.abs(wanted).max()))
    return worst


def potentials() -> float:
    """Return errors of potentials, Lu = s, with values held at some nodes or none, against dense systems, relative.

    Without any, source and potential have mean 0 on each component, the latter with the degrees as weights.
    """
    rng, n, worst = np.random.default_rng(18), 24, 0.0
    part, w = np.arange(n) // 9, rng.uniform(0.3, 2.0, n) / n
    k = np.where(part[:, None] == part, rng.random((n, n)), 0.0)
    held, values = np.array([1, 11, 20]), np.array([0.7, -1.0, 0.4])
    free = np.setdiff1d(np.arange(n), held)
    ends = np.argwhere(k > 0).T
    for weights, masses in (
        (affinity_from_graph(ends, edge_weight=(k + k.T)[tuple(ends)]), np.ones(n)),
        (from_matrix(k + 0.01, Points(np.zeros(n), weights=w)), w),
    ):
        graph = weights.domain.size == n and masses is not w
        links = 2 * (k + k.T) if graph else (k + k.T + 0.02) * w
        every, links = links.sum(axis=1), links - np.diag(np.diag(links))
        degree, label = links.sum(axis=1), part if graph else 0 * part
        source = rng.standard_normal((n, 2))
        lowered, exact = np.diag(degree) - links, np.zeros((n, 2))
        for one in np.unique(label):
            inside = label == one
            source[inside] -= (masses[inside] @ source[inside]) / masses[inside].sum()
            found = np.linalg.lstsq(lowered[np.ix_(inside, inside)], source[inside])[0]
            mass = (masses * every)[inside]
            exact[inside] = found - mass @ found / mass.sum()
        told = J(weights).potential(source, rtol=1e-12)
        between = np.zeros((n, 2))
        between[held] = np.stack([values, 2 * values], axis=1)
        between[free] = np.linalg.solve(
            lowered[np.ix_(free, free)], source[free] - lowered[np.ix_(free, held)] @ between[held]
        )
        other = J(weights).potential(source, constraint=Constraint(held, between[held]), rtol=1e-12)
        worst = largest(worst, float(np.abs(told.u - exact).max() / np.abs(exact).max()),
                        float(np.abs(other.u - between).max() / np.abs(between).max()))  # fmt: skip
    return worst


def run(context: Context) -> Outcome:
    n = context.pick(200, 60)
    context.step("polynomials")
    linear, quadratic = polynomials(n, n // 12)
    rng = np.random.default_rng(1)
    grid = Grid((n // 4, n // 5))
    weights = affinity(Gaussian(width=1.5), grid, window=5, method="stencil")
    mask = rng.random(grid.shape) < 0.1
    values = rng.uniform(-1, 1, grid.shape)

    def moving(t: float) -> Floats:
        return np.asarray(values[mask] * np.cos(t))

    context.step("flows")
    wrong, range_left, energies_rise = 0, 0.0, -np.inf
    times = np.linspace(0, 4, 9)
    for held in (values[mask], moving):
        flow = GradientFlow(J(weights), "degree", constraint=Constraint(mask, held))
        for integrator in (RungeKutta(), ETD4RK(0.2)):
            found = solve(flow, values[::-1].copy(), t_eval=times, integrator=integrator)
            exact = np.array([held(t) if callable(held) else held for t in times])
            wrong += int(np.count_nonzero(found.u[:, mask] != exact))
            range_left = largest(range_left, float(np.abs(found.u).max()) - 1)
            if not callable(held):
                energies_rise = largest(energies_rise, float(np.diff(found.energy).max() / found.energy[0]))
    context.step("decay")
    flow = GradientFlow(J(weights), "degree", constraint=Constraint(mask, values[mask]))
    limit = equilibrium(flow, values, rtol=1e-12)
    rate = relaxation_rate(flow)
    late = np.array([12.0, 20.0]) / rate
    sizes = [float(np.linalg.norm(u - limit.u)) for u in solve(flow, values, t_eval=late).u[-2:]]
    measured = float(np.log(sizes[0] / sizes[1]) / (late[1] - late[0]))
    context.step("penalties")
    penalties = 10.0 ** np.arange(2, 6)
    gaps = [
        float(np.abs(E(weights, values, p * mask, measure="degree").minimizer(rtol=1e-12).u - limit.u).max())
        for p in penalties
    ]
    slope = float(np.polyfit(np.log(penalties), np.log(gaps), 1)[0])
    checks = [
        Check("values x are continued by x, 1-D", linear, 1e-8),
        Check("values x² by x², with the source that belongs to it", quadratic, 1e-8),
        Check("potentials with held values and without against dense systems, relative", potentials(), 1e-9),
        Check("minimizers of E between held nodes against dense systems, relative", dense(), 1e-10),
        Check("held values that differ in any bit, of all times", wrong, 0),
        Check("signals beyond the range of the values and the start", range_left, 1e-6),
        Check("largest rise of J with fixed values, over J(0)", energies_rise, 1e-13),
        Check("rate of decay over the smallest eigenvalue between free nodes", measured / rate, 0.05, expected=1.0),
        Check("penalty λ̃ instead: error goes with λ̃ to the power", slope, 0.05, expected=-1.0),
        Check("penalty of 10⁵: what the values are off", smallest(*gaps), 1e-7, at_least=True),
    ]
    return Outcome(checks, {}, {"error of a penalty": dict(zip(map(str, penalties), gaps, strict=True))})


CLAIM = Claim(
    name="volume-constraint",
    title="Values held in a volume",
    statement=(
        "With u = g on a set of nodes and (Pu)_i = u_i (or the flow) at the others, the problem has one solution "
        "where each free node sees a held one: it lies in the range of g (maximum principle), continues polynomials "
        "of degree 1 and 2 exactly for kernels that are alike on both sides and a collar as wide as the kernel, and "
        "the flow tends to it with the smallest eigenvalue of A between free nodes, J falling. The package holds g to "
        "the last bit at all times, fixed or not. A large fidelity in its place is off by the inverse of the "
        "fidelity."
    ),
    source="Q. Du, M. Gunzburger, R. B. Lehoucq, K. Zhou 2012, doi 10.1137/110833294",
    run=run,
)
