"""One step of each integrator, and what moves a flow, against formulas with whole matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.polynomial.chebyshev import Chebyshev
from numpy.typing import NDArray
from scipy.integrate import RK45
from scipy.linalg import expm

from nlflow import (
    ETD2RK,
    ETD4RK,
    IMEX,
    Adaptive,
    AllenCahn,
    ConvexSplitting,
    E,
    ExplicitEuler,
    Exponential,
    GradientFlow,
    J,
    Points,
    RungeKutta,
    StoermerVerlet,
    WaveFlow,
    from_matrix,
    solve,
)
from nlflow.flows import (
    AverageVectorField,
    Lie,
    NeutrenoStep,
    Rosenbrock,
    SemiImplicit,
    Strang,
    SystemFlow,
)
from nlflow.flows.flow import difference
from nlflow.flows.integrators.exponential import chebyshev_coefficients
from nlflow.flows.linear import bound_of
from nlflow.flows.modes import phi as phi_of_numbers
from validation.flow_by_matrices import MASS, STRENGTH, H, N, Problem, T, apart, phi
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]
Formula = Callable[[Problem, Floats, float, float], Floats]


# ---- steps, each as its paper has it


def euler(p: Problem, u: Floats, t: float, h: float) -> Floats:
    return u + h * p.velocity(t, u)


def semi_implicit(p: Problem, u: Floats, t: float, h: float) -> Floats:
    right = u + h * (-p.a @ u + p.phi @ p.f.ravel())
    return np.asarray(np.linalg.solve(np.eye(2 * N) + h * p.phi, right))


def etd2(p: Problem, u: Floats, t: float, h: float) -> Floats:
    a, first = p.stiff, p.beside(t, u)
    middle = u + h * phi(1, -h * a) @ (first - a @ u)
    return np.asarray(middle + h * phi(2, -h * a) @ (p.beside(t + h, middle) - first))


def etd4(p: Problem, u: Floats, t: float, h: float) -> Floats:
    """Krogstad's stages, of Table 5.1 of Hochbruck and Ostermann."""
    a = p.stiff
    p1, p2, p3 = (phi(k, -h * a) for k in (1, 2, 3))
    h1, h2 = (phi(k, -h / 2 * a) for k in (1, 2))
    n1 = p.beside(t, u)
    n2 = p.beside(t + h / 2, expm(-h / 2 * a) @ u + h * (h1 / 2) @ n1)
    n3 = p.beside(t + h / 2, expm(-h / 2 * a) @ u + h * ((h1 / 2 - h2) @ n1 + h2 @ n2))
    n4 = p.beside(t + h, expm(-h * a) @ u + h * ((p1 - 2 * p2) @ n1 + 2 * p2 @ n3))
    end = (p1 - 3 * p2 + 4 * p3) @ n1 + (2 * p2 - 4 * p3) @ (n2 + n3) + (4 * p3 - p2) @ n4
    return np.asarray(expm(-h * a) @ u + h * end)


def imex(p: Problem, u: Floats, t: float, h: float) -> Floats:
    a, g = p.stiff, 1 - 1 / math.sqrt(2)
    d, implicit = 1 - 1 / (2 * g), np.eye(2 * N) + h * g * a
    middle: Any = np.linalg.solve(implicit, u + h * g * (p.driven(t, u) + p.pulled(t + g * h)))
    drive = d * p.driven(t, u) + (1 - d) * p.driven(t + g * h, middle)
    right = u + h * (1 - g) * (p.pulled(t + g * h) - a @ middle) + h * g * p.pulled(t + h) + h * drive
    return np.asarray(np.linalg.solve(implicit, right))


def convex(p: Problem, u: Floats, t: float, h: float) -> Floats:
    bound = STRENGTH * 11 if p.drives else 0.0  # of the slope 1 − 3 u² for |u| <= 2
    lifted = p.moving * np.outer(p.free, p.free)
    right = h * (p.pulled(t + h) + p.driven(t, u) - p.stiff @ u)
    return np.asarray(u + np.linalg.solve(np.eye(2 * N) + h * (p.stiff + bound * lifted), right))


def averaged(p: Problem, u: Floats, t: float, h: float) -> Floats:
    """Solve for the end by Newton's method, the mean of u − u³ along the way being known."""
    a, lifted, end = p.stiff, p.moving * np.outer(p.free, p.free), u.copy()
    rest = p.pulled(t + h / 2) + p.driven(t + h / 2, u) - np.where(p.free, p.moving @ p.reaction(p.whole(t, u)), 0.0)
    for _ in range(12):
        x, y = p.whole(t + h / 2, u), p.whole(t + h / 2, end)
        mean = STRENGTH * ((x + y) / 2 - (x**3 + x**2 * y + x * y**2 + y**3) / 4) if p.drives else 0 * u
        slope = STRENGTH * (1 / 2 - (x**2 + 2 * x * y + 3 * y**2) / 4) if p.drives else 0 * u
        off = end - u - h * (rest - a @ (u + end) / 2 + np.where(p.free, p.moving @ mean, 0.0))
        end = end - np.linalg.solve(np.eye(2 * N) + h * (a / 2 - lifted * slope), off)
    return np.asarray(end)


def relaxed(p: Problem, u: Floats, t: float, h: float) -> Floats:
    """Return the end of u' = −A u + F, F being that of the middle."""
    return np.asarray(u + h * phi(1, -h * p.stiff) @ (p.pulled(t + h / 2) - p.stiff @ u))


def reacted(p: Problem, u: Floats, t: float, h: float) -> Floats:
    """Kutta's step of order 4 for u' = R(u) + g(t)."""
    first = p.driven(t, u)
    second = p.driven(t + h / 2, u + h / 2 * first)
    third = p.driven(t + h / 2, u + h / 2 * second)
    return u + h * (first + 2 * second + 2 * third + p.driven(t + h, u + h * third)) / 6


def lie(p: Problem, u: Floats, t: float, h: float) -> Floats:
    return relaxed(p, reacted(p, u, t, h), t, h)


def strang(p: Problem, u: Floats, t: float, h: float) -> Floats:
    return relaxed(p, reacted(p, relaxed(p, u, t, h / 2), t, h), t + h / 2, h / 2)


def dormand(p: Problem, u: Floats, t: float, h: float) -> Floats:
    """SciPy's tableau."""
    slopes = np.zeros((6, 2 * N))
    for stage in range(6):
        slopes[stage] = p.velocity(t + RK45.C[stage] * h, u + h * RK45.A[stage, :stage] @ slopes[:stage])
    return np.asarray(u + h * RK45.B @ slopes)


def rosenbrock(p: Problem, u: Floats, t: float, h: float) -> Floats:
    """(I − h γ J) k_i = γ (h f(u + Σ a k, t + s h) + Σ c k + h² r df/dt)."""
    table, g = Rosenbrock.tableau, Rosenbrock.tableau.gamma
    slope = np.where(p.free, 1 - 3 * p.whole(t, u) ** 2, 0.0) * STRENGTH if p.drives else 0 * u
    jacobian = p.moving * np.outer(p.free, p.free) * slope - p.stiff
    moves = (p.velocity(t + 1e-5, u) - p.velocity(t - 1e-5, u)) / 2e-5
    ks: list[Floats] = []
    for row, coupling, share, rate in zip(table.stages, table.couplings, table.shares, table.rates, strict=True):
        at = u + sum((a * k for a, k in zip(row, ks, strict=True)), 0 * u)
        force = h * p.velocity(t + share * h, at) + sum((c * k for c, k in zip(coupling, ks, strict=True)), 0 * u)
        ks.append(np.linalg.solve(np.eye(2 * N) - h * g * jacobian, g * (force + h**2 * rate * moves)))
    return np.asarray(u + sum(a * k for a, k in zip((*table.stages[-1], 1.0), ks, strict=True)))


SPECTRAL: dict[Any, Formula] = {ETD2RK: etd2, ETD4RK: etd4, Lie: lie, Strang: strang}
OTHERS: dict[Any, Formula] = {ExplicitEuler: euler, IMEX: imex, ConvexSplitting: convex, AverageVectorField: averaged}


def problems(*, few: bool = False) -> Iterator[tuple[Problem, bool]]:
    """Yield flows, and whether A is self-adjoint in their metric."""
    yield Problem("nodes", "l2", "matrices"), True
    yield Problem("nodes", "degree", "nodes", held=True), True
    yield Problem("ring", "degree", "number"), True
    yield Problem("ring", "conserved", "number"), True
    yield Problem("nodes", "conserved", "matrices"), False
    if few:
        return
    for metric in ("l2", "degree"):
        for fidelity in ("none", "number", "nodes", "matrices"):
            yield Problem("nodes", metric, fidelity), True
    yield Problem("nodes", "l2", "nodes", held=True), True
    yield Problem("ring", "l2", "number"), True
    yield Problem("ring", "conserved", "none"), True


def steps() -> dict[str, float]:
    """Return by how much one step of each integrator is off its formula, relative."""
    worst: dict[str, float] = {}
    for problem, adjoint in problems(few=True):
        u = np.where(problem.free, problem.start.ravel(), 0.0)
        flow = problem.flow.when(T)
        start = flow.held(u.reshape(N, 2))
        chosen = {**OTHERS, **(SPECTRAL if adjoint else {})}
        for step, formula in chosen.items():
            found = step(H).step(flow, start, H).ravel()
            off = apart(found[problem.free], formula(problem, u, T, H)[problem.free])
            worst[step.__name__] = largest(worst.get(step.__name__, 0.0), off)
        if problem.flow.inner.by_nodes:  # long steps, which leave hardly anything of what decays
            found = IMEX(30 * H).step(flow, start, 30 * H).ravel()
            off = apart(found[problem.free], imex(problem, u, T, 30 * H)[problem.free])
            worst["IMEX"] = largest(worst["IMEX"], off)
        for embedded, formula in ((RungeKutta, dormand), (Rosenbrock, rosenbrock)):
            found, _ = embedded(dt=H, adaptive=False).advance(flow, start, T, T + 2 * H, {})
            off = apart(found.ravel()[problem.free], formula(problem, u, T, H)[problem.free])
            worst[embedded.__name__] = largest(worst.get(embedded.__name__, 0.0), off)
        # Two halves beside a step: 2^p − 1 times the error that is told.
        whole, half = etd2(problem, u, T, H) if adjoint else imex(problem, u, T, H), etd2 if adjoint else imex
        twice = half(problem, half(problem, u, T, H / 2), T + H / 2, H / 2)
        told = Adaptive(ETD2RK(H) if adjoint else IMEX(H), 0.3, 0.1)._try(flow, start, T, H)[1]
        largest_there = np.maximum(np.abs(flow.held(start)).ravel(), np.abs(problem.whole(T + H, twice)))
        scale = 0.1 + 0.3 * largest_there
        error = np.where(problem.free, (twice - whole) / 3, 0.0) / scale
        worst["Adaptive"] = largest(worst.get("Adaptive", 0.0), abs(told / float(np.sqrt(np.mean(error**2))) - 1))
    worst["SemiImplicit"] = largest(layers(), counted())
    worst["systems"] = mixed()
    worst["ConvexSplitting"] = largest(worst["ConvexSplitting"], widened())
    worst["IMEX"] = largest(worst["IMEX"], 1e-9 * uneven())
    return worst


def counted() -> float:
    """Return how many averages are told wrongly: of a velocity a step, a first one, and one for each energy."""
    problem, wrong = Problem("nodes", "l2", "number"), 0
    for integrator, each, first in ((ExplicitEuler(H), 1, 0), (RungeKutta(dt=H, adaptive=False), 6, 1)):
        found = solve(problem.flow, problem.start, t_eval=[0.0, 2 * H, 4 * H], integrator=integrator)
        told = [found.stats[name] for name in ("steps", "applications", "analysis_applications")]
        wrong += told != [4, 4 * each + first, 3]
    # Strides of waves are products with a matrix, told as one average a step.
    wave = WaveFlow(GradientFlow(J(problem.weights)))
    at = wave.state(problem.start[:, 0])
    for stride in (1, 2):
        found = solve(wave, at, t=4 * H, integrator=StoermerVerlet(H, stride), energies=False)
        wrong += found.stats["applications"] != 4
    return float(wrong)


def conjugate_steps(matrix: Floats, x: Floats) -> int:
    """Return after how many steps conjugate gradients, rows over their diagonal, leave 1e-13 of A x."""
    b, diagonal = matrix @ x, np.diag(matrix)
    left, found = b.copy(), 0 * b
    way = left / diagonal
    size = float(left @ (left / diagonal))
    for count in range(1, 999):
        moved = matrix @ way
        share = size / float(way @ moved)
        found, left = found + share * way, left - share * moved
        before, size = size, float(left @ (left / diagonal))
        way = left / diagonal + size / before * way
        if np.abs(left / diagonal).max() <= 1e-13 * np.abs(b / diagonal).max():
            return count
    return 999


def uneven() -> float:
    """Return errors of implicit steps whose rows span twelve decades, relative at each node, over 1e-6.

    Rows are divided by their diagonal, with which conjugate gradients take few averages: hardly more than one where
    nodes hardly see each other.
    """
    rng, n, worst = np.random.default_rng(3), 40, 0.0
    size = np.geomspace(1e-3, 1e3, n)
    k, shares = rng.random((n, n)) * size[:, None] * size, rng.uniform(0.2, 1, n) * np.geomspace(1e3, 1e-3, n)
    f, u = rng.standard_normal((2, n))
    reaction = AllenCahn(STRENGTH, interval=(-4.0, 4.0))
    for h, seen, more in ((0.1, 1.0, 8), (10.0, 1.0, 8), (0.1, 1e-14, 3), (10.0, 1e-14, 3)):
        links = seen * (k + k.T) / n
        a = np.diag(links.sum(axis=1) + shares) - links
        flow = GradientFlow(E(from_matrix(seen * k, Points(np.zeros(n))), f, shares))
        for step, systems in ((IMEX, 2), (ConvexSplitting, 1)):
            g = 1 - math.sqrt(0.5) if step is IMEX else 1.0
            whole = np.eye(n) * (1.0 if step is IMEX else 1 + h * STRENGTH * 47) + h * g * a  # |1 − 3 u²| up to 4
            if step is IMEX:
                middle: Any = np.linalg.solve(whole, u + h * g * shares * f)
                wanted = np.linalg.solve(whole, u + h * (1 - g) * (shares * f - a @ middle) + h * g * shares * f)
            else:
                wanted = u + np.linalg.solve(whole, h * (shares * f + STRENGTH * (u - u**3) - a @ u))
            now = flow if step is IMEX else flow + reaction
            before = now.applications
            found = step(h).step(now, u, h)
            # With the averages of the plain method, and a residual that is looked at anew.
            most = systems * (conjugate_steps(whole, wanted) + more)
            worst = largest(worst, float(np.abs(found / wanted - 1).max()) / 1e-6, (now.applications - before) / most)
    return worst


def widened() -> float:
    """Return the error of a convex splitting from beyond the interval of its reaction, relative.

    The slope that bounds it is then the steepest one between the values of both ends, and 1 in 1000 more.
    """
    problem = Problem("nodes", "l2", "number", drives=False)
    flow = problem.flow + AllenCahn(STRENGTH, interval=(-0.5, 0.5))
    u, bound = 1.5 * problem.start.ravel(), STRENGTH
    end = u
    right = H * (problem.phi @ problem.f.ravel() + STRENGTH * (u - u**3) - problem.stiff @ u)
    for _ in range(9):
        end = u + np.linalg.solve(np.eye(2 * N) + H * (problem.stiff + bound * np.eye(2 * N)), right)
        far = max(float(np.abs([u, end]).max()), 0.5)
        steep = STRENGTH * max(1.0, 3 * far**2 - 1)
        if steep <= bound:
            break
        bound = steep * 1.001
    return apart(ConvexSplitting(H).step(flow, 1.5 * problem.start, H).ravel(), end)


def mixed() -> float:
    """Return errors of steps of systems, in which A moves a channel by another, relative."""
    worst = 0.0
    for where, metric, couplings in (
        ("ring", "l2", [[0.9, 0.3], [-0.4, 1.4]]), ("ring", "degree", [[0.9, 0.0], [0.0, 1.4]]),
        ("nodes", "l2", [[0.9, 0.3], [0.3, 1.4]]),
    ):  # fmt: skip
        problem = Problem(where, metric, "none")
        problem.a = np.kron(problem.a[::2, ::2], couplings)
        terms: dict[str, Any] = {"reaction": AllenCahn(STRENGTH, interval=(-2.0, 2.0)), "source": problem.source}
        flow = SystemFlow(J(problem.weights), couplings, metric, **terms).when(T)
        u = problem.start.ravel()
        worst = largest(worst, apart(flow.velocity(problem.start).ravel(), problem.velocity(T, u)))
        for step, formula in {ExplicitEuler: euler, IMEX: imex, **SPECTRAL}.items():
            found = step(H).step(flow, problem.start, H).ravel()
            worst = largest(worst, apart(found, formula(problem, u, T, H)) / (1e2 if step is IMEX else 1.0))
    # Of kernels that may be indefinite the bound is twice the largest rate, of others less by what they are off.
    for definite, error, wanted in ((True, 0.1, 1.1 * 3.0), (True, 4.0, 6.0), (False, 0.0, 6.0)):
        kind: Any = SimpleNamespace(symmetric=True, positive_semidefinite=definite, error_estimate=error)
        worst = largest(worst, abs(bound_of(kind, 3.0) / wanted - 1))
    return largest(worst, functions())


def functions() -> float:
    """Return errors of φ_k against rational numbers, and of differences, over what they may be, times 1e-11."""
    worst = 0.0
    for k in range(1, 5):
        for z in (0.011, 0.6, 0.99, 1.01, 30.0):
            terms = [Fraction(-z) ** j / math.factorial(j + k) for j in range(150)]
            worst = largest(worst, abs(float(phi_of_numbers(k, np.array(z))) / float(sum(terms)) - 1) / 8e-15)
    # Central differences, to two thirds of the digits.
    u, v = np.array([0.3, -1.1, 2.0]), np.array([0.7, 0.0, -2.3])
    worst = largest(worst, apart(difference(np.sin, u, v), np.cos(u) * v) / 1e-8)
    return 1e-11 * worst


def layers() -> float:
    """Return errors of semi-implicit steps and layers, of what steps move by, of times and of limits, relative."""
    worst = 0.0
    for metric in ("l2", "degree"):
        for fidelity in ("none", "number", "nodes", "matrices"):
            problem = Problem("nodes", metric, fidelity, drives=False)
            flow, start, u = problem.flow, problem.start, problem.start.ravel()
            v = problem.velocity(T, u)
            half = SemiImplicit(H).step(flow, start, H)
            worst = largest(
                worst, apart(half.ravel(), semi_implicit(problem, u, T, H)),
                *(apart(step.velocity_of(flow, start).ravel(), v) for step in (SemiImplicit(H), Exponential())),
            )  # fmt: skip
            # A step from one time to another, and one that is cut short.
            for target, length in ((T + 5 * H, H), (T + 0.4 * H, 0.4 * H)):
                moved, reached = ExplicitEuler(H).advance(flow, start, T, target, {})
                worst = largest(worst, apart(moved.ravel(), u + length * v), abs(reached - T - length))
            if metric == "degree":
                layer, reached = NeutrenoStep().advance(flow, start, T, 9.0, {})
                worst = largest(worst, apart(layer.ravel(), u + v), abs(reached - T - 1),
                                apart(NeutrenoStep().velocity_of(flow, start).ravel(), v))  # fmt: skip
            # Stable up to 2 over the largest eigenvalue; where the fidelity is implicit, of it less the smallest one.
            high = float(np.linalg.eigvals(problem.a + problem.phi).real.max())
            rough = float(np.linalg.eigvals(problem.a).real.max())
            steep = flow + AllenCahn(STRENGTH, interval=(-2.0, 2.0))
            bound = STRENGTH * 11  # of the slope 1 − 3 u² up to 2
            worst = largest(
                worst, abs(ExplicitEuler(H).stability_limit(steep) * (high + bound) / 2 - 1),
                abs(RungeKutta(dt=H, adaptive=False).stability_limit(steep) * (high + bound) / 3.3 - 1),
                abs(ETD2RK(H).stability_limit(steep) * bound / 2 - 1),
            )  # fmt: skip
            least, most = np.linalg.eigvalsh(problem.phi)[[0, -1]]
            gershgorin = 2 * float(problem.degree.max() if metric == "l2" else 1.0)
            if fidelity != "matrices":
                worst = largest(worst, abs(flow.safe_step * (gershgorin + most) / 2 - 1))
            worst = largest(worst, abs(SemiImplicit(H).stability_limit(flow) * (rough - least) / 2 - 1))
    return worst


def exact() -> tuple[float, float]:
    """Return errors of `Exponential` against matrix exponentials, relative, and what it tells of them over its tol."""
    off, told = 0.0, 0.0
    for where, metric, fidelity, held in (
        ("nodes", "l2", "none", False), ("nodes", "degree", "none", False), ("nodes", "l2", "number", False),
        ("nodes", "degree", "nodes", False), ("nodes", "l2", "matrices", False), ("nodes", "l2", "nodes", True),
        ("nodes", "degree", "none", True), ("ring", "l2", "none", False), ("ring", "degree", "number", False),
        ("ring", "conserved", "number", False), ("ring", "conserved", "none", False),
    ):  # fmt: skip
        problem = Problem(where, metric, fidelity, held=held, drives=False)
        u = np.where(problem.free, problem.start.ravel(), 0.0)
        for span in (1e-9, 0.4, 5.0):
            memory: dict[str, Any] = {}
            start = problem.flow.held(u.reshape(N, 2))
            found, end = Exponential(1e-9).advance(problem.flow, start, T, T + span, memory)
            a = problem.stiff
            wanted = u + span * phi(1, -span * a) @ (problem.pulled(0.0) - a @ u)
            change = found.ravel()[problem.free] - start.ravel()[problem.free]
            off = largest(off, apart(found.ravel()[problem.free], wanted[problem.free]) / 1e-9, abs(end - T - span))
            if span == 1e-9:  # hardly more than a step of Euler's
                off = largest(off, apart(change / span, ((wanted - u) / span)[problem.free]) / 1e-6)
            told = largest(told, memory["error_bound"] / 1e-9)
    return off, told


def expansions() -> float:
    """Return errors of Chebyshev coefficients against those of NumPy, over what is left out."""
    worst = 0.0
    for function, low, high in ((np.exp, -1.3, 2.2), (lambda a: np.exp(-40 * a), 0.1, 3.0), (np.cos, 0.5, 30.0)):
        found, left = chebyshev_coefficients(function, low, high, 1e-9)
        known: Any = Chebyshev.interpolate(function, 60, [low, high]).coef
        kept, rest = len(found), float(np.abs(known[len(found) :]).sum())
        worst = largest(worst, float(np.abs(found - known[:kept]).max()) / 1e-13, abs(left / rest - 1) / 0.1)
        # As few as there may be: without the last one more would be left out than was asked for.
        worst = largest(worst, left / 1e-9, 1e-9 / (rest + abs(known[kept - 1])))
        # Coefficients that were dropped at the rounding of samples are part of what is told.
        worst = largest(worst, float(not chebyshev_coefficients(function, low, high, 1e-15)[1] > 0))
    return worst


# ---- what moves a flow, and what is told of it


def parts() -> dict[str, float]:
    """Return errors of forces, velocities, derivatives, sizes of parts and energies, relative."""
    worst = dict.fromkeys(("velocity", "told"), 0.0)
    for problem, _ in problems():
        flow, u = problem.flow.when(T), problem.start.ravel()
        start, v = problem.start, np.cos(1.0 + np.arange(2.0 * N))
        at = problem.whole(T, u)
        force = problem.force(T, at)
        f = problem.seen(T).ravel()
        driving = problem.reaction(at) + problem.source(T).ravel()
        slope = STRENGTH * (1 - 3 * at**2)
        freed = np.where(problem.free, v, 0.0)
        moved = np.where(problem.free, problem.moving @ (slope * freed - (problem.a + problem.phi) @ freed), 0.0)
        worst["velocity"] = largest(
            worst["velocity"],
            apart(flow.velocity(start).ravel(), problem.velocity(T, u)),
            apart(flow.force(start).ravel(), force),
            apart(flow.beside(flow.held(start)).ravel(), problem.phi @ f + driving),
            apart(flow.linear(start).ravel(), problem.moving @ (problem.a + problem.phi) @ u),
            apart(flow.diffusion(start).ravel(), problem.moving @ problem.a @ u),
            apart(flow.jacobian(start, v.reshape(N, 2)).ravel(), moved),
            apart(ExplicitEuler(H).velocity_of(flow, start).ravel(), problem.velocity(T, u)),
            apart(IMEX(H).velocity_of(flow, start).ravel(), problem.velocity(T, u)),
        )
        m = problem.m
        mean = (m.reshape(N, 2) * problem.start).sum(axis=0) / m[::2].sum()

        def norm(v: Floats, m: Floats = m) -> float:
            return float(np.sqrt(m @ v**2 / m[::2].sum()))

        gaps = problem.start - mean
        rate = problem.degree[:, None] ** (1 - MASS[problem.metric])
        tension = norm((rate * gaps).ravel()) + norm(problem.phi @ (f - u)) + norm(driving)
        steepest = 1.0
        if problem.metric == "conserved":
            definite = 1 if problem.m[0] == problem.m[2] else 2  # a Gaussian kernel
            steepest = problem.largest * definite * float(problem.degree.max())
            tension *= steepest
        pairs = problem.links * problem.w[:, None]
        apart_by = ((problem.start[:, None] - problem.start) ** 2).sum(axis=2)
        energy = float((pairs * apart_by).sum()) / 4 + float(m @ ((u - f) * (problem.phi @ (u - f)))) / 2
        energy += float(m @ (STRENGTH / 4 * (u**2 - 1) ** 2 - problem.source(T).ravel() * u))
        worst["told"] = largest(
            worst["told"],
            abs(flow.tension(start) / tension - 1),
            abs(flow.distance_to_constant(start) / norm(gaps.ravel()) - 1),
            abs(float(flow.pending_distance(start)) / norm(gaps.ravel()) - 1),
            abs(flow.energy(start) / energy - 1),
            abs(flow.driving_bound() / (STRENGTH * 11 * steepest) - 1),
            apart(flow.without_mean(start).ravel(), gaps.ravel()),
        )
    return worst


def run(context: Context) -> Outcome:
    context.step("steps")
    found = {f"a step of {name} against its formula, relative": error for name, error in steps().items()}
    context.step("parts and exact solutions")
    off, told = exact()
    found |= {f"{name}: what is told of flows against sums, relative": error for name, error in parts().items()}
    # Linear systems are solved to a tolerance in some, and a derivative by time is that of differences.
    loose = {"IMEX": 1e-9, "ConvexSplitting": 1e-9, "Rosenbrock": 1e-7, "Adaptive": 1e-8}
    checks = [Check(what, error, loose.get(what.split()[3], 1e-11)) for what, error in found.items()]
    return Outcome([
        *checks,
        Check("Exponential against exponentials of matrices, over its tolerance of 1e-9", off, 5.0),
        Check("the error that it tells of, over that", told, 1.0),
        Check("Chebyshev coefficients against NumPy's, and how many there are", expansions(), 1.0),
    ])  # fmt: skip


CLAIM = Claim(
    name="steps-by-formula",
    title="One step of each integrator is its formula with whole matrices",
    statement=(
        "u' = B (r (Pu − u) + φ (f(t) − u) + R(u) + g(t)) in three metrics, with one fidelity, one for each node or "
        "matrices of channels, on nodes and on a ring, with held nodes or without: forces, derivatives, the sizes of "
        "parts that cancel, and energies are double sums. One step of Euler, IMEX-ARS(2,2,2), convex splitting, the "
        "averaged vector field, ETD2RK, Krogstad's ETD4RK, Lie, Strang, Dormand and Prince and RODAS is the formula of "
        "its paper with matrix functions; what `Exponential` leaves out is what it tells."
    ),
    source=(
        "arXiv 2312.00751, eq. 9 and 21; Ascher, Ruuth and Spiteri 1997, doi 10.1016/S0168-9274(97)00056-1; Hochbruck "
        "and Ostermann 2010, doi 10.1017/S0962492910000048; Hairer and Wanner 1996, doi 10.1007/978-3-642-05221-7"
    ),
    run=run,
)
