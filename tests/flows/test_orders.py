"""Which integrator takes which right-hand side, and with which order: one table. Tolerances, and energies that fall."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp

import nlflow as nl
from nlflow.errors import InputError, StabilityError
from tests.problems import Floats

pytestmark = pytest.mark.numerical

N = 20
GRID = nl.Grid(N, spacing=1 / N, boundary="isolated")
X = GRID.nodes[:, 0]
WEIGHTS = nl.affinity(nl.Gaussian(width=0.15), GRID, method="dense")
K = np.exp(-((X[:, None] - X) ** 2) / (2 * 0.15**2))
P = K / K.sum(axis=1, keepdims=True)
F = np.sin(4 * X)
START = 0.4 + 0.5 * np.cos(5 * X**2)
NODES = np.array([0, 7, N - 1])
FREE = ~np.isin(np.arange(N), NODES)
FIDELITY = 1.5


def moving(t: float) -> Floats:
    return F * np.cos(2 * t)


def wave(t: float) -> Floats:
    return np.sin(3 * t) * np.cos(3 * X)


def ends(t: float) -> Floats:
    return np.array([np.sin(2 * t), 0.3, np.cos(3 * t)])


REACTION = nl.AllenCahn(2.0, interval=(-1.5, 1.5))
KINDS: dict[str, dict[str, Any]] = {
    "linear": {},
    "reaction": {"reaction": REACTION},
    "source": {"source": wave},
    "observed": {"observed": moving},
    "values": {"constraint": nl.Constraint(NODES, [0.2, -0.4, 0.6])},
    "values(t)": {"constraint": nl.Constraint(NODES, ends)},
    "three": {"reaction": REACTION, "source": wave, "constraint": nl.Constraint(NODES, ends)},
}
EXACT, REFUSED = "exact", "refused"
ORDERS: dict[str, tuple[Any, list[int], dict[str, Any]]] = {
    "Euler": (nl.ExplicitEuler, [100, 200], {}),
    "SemiImplicit": (nl.SemiImplicit, [100, 200], {k: REFUSED for k in KINDS if k not in ("linear", "values")}),
    "RungeKutta": (lambda dt: nl.RungeKutta(dt=dt, adaptive=False), [48, 64], {}),
    "Exponential": (lambda dt: nl.Exponential(), [1], {
        **dict.fromkeys(KINDS, REFUSED), "linear": EXACT, "values": EXACT}),
    "ETD2RK": (nl.ETD2RK, [64, 128], {"linear": EXACT, "values": EXACT}),
    "ETD4RK": (nl.ETD4RK, [48, 80], {"linear": EXACT, "values": EXACT}),
    "IMEX": (nl.IMEX, [32, 64], {}),
    "ConvexSplitting": (nl.ConvexSplitting, [160, 320], {}),
}  # fmt: skip


def flow(kind: str) -> nl.GradientFlow:
    return nl.GradientFlow(nl.E(WEIGHTS, F, FIDELITY, measure="degree"), "degree", **KINDS[kind])


def reference(kind: str, t: float = 1.0) -> Floats:
    terms = KINDS[kind]
    constraint = terms.get("constraint")

    def whole(t: float, v: Floats) -> Floats:
        if constraint is None:
            return v
        u = np.empty(N)
        u[FREE], u[NODES] = v, ends(t) if constraint.timed else constraint.values
        return u

    def speed(t: float, v: Floats) -> Floats:
        u = whole(t, v)
        f = moving(t) if "observed" in terms else F
        result = P @ u - u + FIDELITY * (f - u)
        result = result + (2 * (u - u**3) if "reaction" in terms else 0) + (wave(t) if "source" in terms else 0)
        return np.asarray(result if constraint is None else result[FREE])

    start = START if constraint is None else START[FREE]
    return whole(t, solve_ivp(speed, (0, t), start, method="DOP853", rtol=3e-14, atol=1e-15).y[:, -1])


# That of convex splitting is among the promises of integrators too.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "ConvexSplitting" else []) for name in ORDERS]
)
def test_orders(name: str) -> None:
    make, numbers, exceptions = ORDERS[name]
    for kind in KINDS:
        problem, expected = flow(kind), exceptions.get(kind, make(1.0).order)
        if expected == REFUSED:
            with pytest.raises(InputError, match=type(make(1.0)).__name__):
                nl.solve(problem, START, t=1.0, integrator=make(0.1))
            continue
        exact = reference(kind)
        if expected == EXACT:
            assert np.abs(nl.solve(problem, START, t=1.0, integrator=make(0.5)).final - exact).max() < 1e-11
            continue
        errors = [np.abs(nl.solve(problem, START, t=1.0, integrator=make(1 / n)).final - exact).max() for n in numbers]
        found = -np.polyfit(np.log(numbers), np.log(errors), 1)[0]
        assert found == pytest.approx(expected, abs=0.1), (kind, errors)


@pytest.mark.parametrize(
    "make", [nl.ETD4RK, *(pytest.param(one, marks=pytest.mark.slow) for one in (nl.IMEX, nl.ETD2RK, nl.ExplicitEuler))]
)
def test_errors_follow_tolerances(make: Any) -> None:
    """Over decades, for each right-hand side that changes: the error at the end is the tolerance, times 20 at most."""
    order = make(1.0).order
    tolerances = 10.0 ** -np.arange(5, 10, 2) if order == 4 else 10.0 ** -np.arange(3, 7 if order == 2 else 5)
    for kind in ("reaction", "source", "values(t)"):
        exact, errors = reference(kind), []
        for tolerance in tolerances:
            found = nl.solve(flow(kind), START, t=1.0, integrator=nl.Adaptive(make(0.1), tolerance, tolerance))
            assert found.success
            errors.append(np.sqrt(np.mean((found.final - exact) ** 2)))
        ratio = np.array(errors) / tolerances
        assert ratio.max() < 20, (kind, ratio)
        # Local errors go with h^(p + 1), that at the end with h^p.
        slope = np.polyfit(np.log(tolerances), np.log(errors), 1)[0]
        assert slope == pytest.approx(order / (order + 1), abs=0.25), (kind, errors)


def test_steps_that_follow_the_error() -> None:
    """Rejected steps, steps within the limit, checkpoints' memory, and a flow that changes fast for a moment."""

    def burst(t: float) -> Floats:
        return np.asarray(50 * np.exp(-(((t - 0.5) / 0.01) ** 2)) * F)

    problem = nl.GradientFlow(nl.J(WEIGHTS), "degree", source=burst)
    found = nl.solve(problem, START, t=1.0, integrator=nl.Adaptive(nl.ETD4RK(0.01), 1e-7, 1e-7))
    assert found.stats["rejected"] > 0
    assert 20 < found.stats["steps"] < 200
    many = nl.solve(problem, START, t=1.0, integrator=nl.ETD4RK(2e-3)).final
    assert np.abs(found.final - many).max() < 2e-6
    steep = nl.GradientFlow(nl.J(WEIGHTS), "degree", reaction=nl.AllenCahn(50.0))
    rest = nl.solve(steep, np.ones(N), t=1.0, integrator=nl.Adaptive(nl.ETD2RK(0.001)))
    assert rest.stats["steps"] >= 1 / nl.ETD2RK(0.001).stability_limit(steep)
    p_flow = nl.PFlow(nl.Jp(WEIGHTS, 1.5))
    by_steps = nl.solve(p_flow, START, t=0.5, integrator=nl.Adaptive(nl.LaggedDiffusivity(0.01), 1e-4, 1e-5)).final
    by_error = nl.solve(p_flow, START, t=0.5, integrator=nl.RungeKutta(1e-8, 1e-10)).final
    assert np.abs(by_steps - by_error).max() < 1e-3
    with pytest.raises(InputError, match="integrator: got RungeKutta, expected one with steps of one length"):
        nl.Adaptive(nl.RungeKutta())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rtol: got 0 with atol 0"):
        nl.Adaptive(nl.ETD4RK(0.1), 0.0, 0.0)
    with pytest.raises(InputError, match=r"SemiImplicit is made of .*would leave out the observed signal"):
        nl.solve(flow("observed"), START, t=1.0, integrator=nl.Adaptive(nl.SemiImplicit(0.1)))
    failed = nl.solve(flow("reaction"), START, t=1.0, integrator=nl.Adaptive(nl.ETD4RK(0.1), 1e-18, 0.0))
    assert "no step can meet them" in failed.message


@pytest.mark.parametrize("step", [nl.IMEX, nl.ConvexSplitting])
def test_implicit_steps_of_all_kinds(step: Any) -> None:
    """By transforms, with one fidelity for each node or a matrix, in the L2 metric, of attention: each its own way."""
    rng = np.random.default_rng(2)
    periodic = nl.affinity(nl.Gaussian(width=0.15), nl.Grid(N, spacing=1 / N), method="convolution")
    matrix = np.array([periodic.average(row) for row in np.eye(N)]).T
    d = np.exp(periodic.symmetrized().log_degree)
    both = np.stack([F, F[::-1]], axis=1)
    keys, queries = rng.standard_normal((2, N, 2))
    attention = nl.affinity(nl.ExpDotProduct(), nl.Points(X), keys, queries=queries)
    attending = np.array([attention.average(row) for row in np.eye(N)]).T
    varied, pair = rng.uniform(0.1, 3, N), np.array([[2.0, 1.0], [1.0, 3.0]])
    cases: list[tuple[Any, Any, Any]] = [
        (nl.GradientFlow(nl.E(periodic, F, 2.0)), F, d[:, None] * (np.eye(N) - matrix) + 2 * np.eye(N)),
        (nl.GradientFlow(nl.E(periodic, F, varied)), F, d[:, None] * (np.eye(N) - matrix) + np.diag(varied)),
        (nl.AttentionFlow(attention, F, 0.6), F, 1.6 * np.eye(N) - attending),
    ]
    h = 0.7
    g = 1 - np.sqrt(0.5) if step is nl.IMEX else 1.0
    for problem, f, a in cases:
        phi = a @ np.ones(N)
        inverse = np.linalg.inv(np.eye(N) + h * g * a)
        expected = inverse @ (START + h * phi * f)
        if step is nl.IMEX:
            stage = inverse @ (START + h * g * phi * f)
            expected = inverse @ (START - h * (1 - g) * a @ stage + h * phi * f)
        found = nl.solve(problem, START, t=h, integrator=step(h))
        np.testing.assert_allclose(found.final, expected, atol=1e-9)
    mixed = nl.GradientFlow(nl.E(periodic, both, np.broadcast_to(pair, (N, 2, 2)), measure="degree"), "degree")
    fine = nl.solve(mixed, both[::-1].copy(), t=0.1).final
    close = nl.solve(mixed, both[::-1].copy(), t=0.1, integrator=nl.Adaptive(step(0.01), 1e-5, 1e-5)).final
    assert np.abs(close - fine).max() < 2e-3
    single = nl.solve(mixed, both[::-1].astype(np.float64), t=0.1, integrator=step(0.1)).final
    assert single.dtype == np.float64


@pytest.mark.parametrize("metric", ["l2", "degree"])
def test_energies_fall_for_any_step_of_convex_splitting(metric: str) -> None:
    """And those of the others up to their limits; |u| <= 1 stays."""
    start = np.random.default_rng(0).uniform(-1, 1, N)
    terms: dict[str, Any] = {"reaction": nl.AllenCahn(4.0)}
    for held in (None, nl.Constraint(NODES, [1.0, -1.0, 0.5])):
        problem = nl.GradientFlow(nl.J(WEIGHTS), metric, constraint=held, **terms)
        for h in (1e-3, 0.1, 10.0, 1e4):
            found = nl.solve(problem, start, t_eval=h * np.arange(12), integrator=nl.ConvexSplitting(h))
            assert np.all(np.diff(found.energy) <= 1e-13), h
            assert np.abs(found.u).max() <= 1 + 1e-9
        for make in (nl.ETD2RK, nl.ETD4RK, nl.IMEX):
            h = 0.9 * make(1e-9).stability_limit(problem)
            found = nl.solve(problem, start, t_eval=h * np.arange(40), integrator=make(h))
            assert np.all(np.diff(found.energy) <= 1e-13), make
            with pytest.raises(StabilityError, match=f"{make.__name__} needs dt <"):
                nl.solve(problem, start, t=1.0, integrator=make(1.2 * h))


def test_what_implicit_steps_refuse() -> None:
    features = np.random.default_rng(1).standard_normal((N, 2))
    evolving = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Points(X), features)), "degree", evolving=True)

    class More(nl.GradientFlow):
        def velocity(self, u: Any) -> Any:
            return super().velocity(u) + u

    for step in (nl.IMEX, nl.ConvexSplitting):
        with pytest.raises(InputError, match=f"{step.__name__} needs a frozen kernel"):
            nl.solve(evolving, features, t=1.0, integrator=step(0.1))
        with pytest.raises(InputError, match=r"whose velocity\(\) says more"):
            nl.solve(More(nl.J(WEIGHTS)), START, t=1.0, integrator=step(0.1))
