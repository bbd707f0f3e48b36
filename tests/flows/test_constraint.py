"""Values held at nodes: exact to the last bit, orders in time, minimizers, checkpoints and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.linalg import expm

import nlflow as nl
from nlflow.errors import FileFormatError, InputError, NumericalError
from nlflow.flows import derivatives
from nlflow.flows.integrators import FixedStep
from nlflow.flows.spectrum import relaxation_rate
from nlflow.functionals.fidelity import MatrixFidelity
from tests.problems import Floats

N = 24
GRID = nl.Grid(N, spacing=1 / N, boundary="reflect")
X = GRID.nodes[:, 0]
WEIGHTS = nl.affinity(nl.Gaussian(width=0.1), GRID, method="dense")
P = np.array([WEIGHTS.average(row) for row in np.eye(N)]).T
D = np.exp(WEIGHTS.symmetrized().log_degree)
START = 0.5 + 0.4 * np.cos(5 * X**2)
F = np.sin(3 * X)
NODES = np.array([23, 0, 5])  # in an order that is not that of the domain
MASK = np.isin(np.arange(N), NODES)
VALUES = np.array([0.1, -1 / 3, 0.7])


def moving(t: float) -> Floats:
    return np.array([np.sin(3 * t), 0.5 + 0.3 * np.cos(2 * t), -np.cos(4 * t)])


def flow(metric: str = "degree", values: Any = VALUES, fidelity: float = 0.7, **terms: Any) -> nl.GradientFlow:
    functional = nl.E(WEIGHTS, F, fidelity, measure=metric) if fidelity else nl.J(WEIGHTS)
    return nl.GradientFlow(functional, metric, constraint=nl.Constraint(NODES, values), **terms)


def reference(problem: nl.GradientFlow, fidelity: float, strength: float = 0.0, t: float = 1.0) -> Floats:
    """Return the signal at t from the formulas and an integrator of SciPy."""
    rate = D if problem.metric == "l2" else 1.0
    values = problem.terms.constraint._given.values

    def whole(t: float, v: Floats) -> Floats:
        u = np.empty(N)
        u[~MASK], u[NODES] = v, values(t) if callable(values) else values
        return u

    def speed(t: float, v: Floats) -> Floats:
        u = whole(t, v)
        return np.asarray((rate * (P @ u - u) + fidelity * (F - u) + strength * (u - u**3))[~MASK])

    found = solve_ivp(speed, (0, t), START[~MASK], method="DOP853", rtol=3e-14, atol=1e-15)
    return whole(t, found.y[:, -1])


class Heun(FixedStep):
    """One's own, of stages that ask for velocities and know nothing of values."""

    order = 2.0
    takes_time = takes_constraint = True

    def stability_limit(self, flow: Any) -> float:
        return nl.ExplicitEuler(self.dt).stability_limit(flow)

    def step(self, flow: Any, u: Any, dt: float) -> Any:
        first = flow.velocity(u)
        return u + dt / 2 * (first + flow.when(flow.time + dt).velocity(u + dt * first))


INTEGRATORS: dict[str, tuple[Any, list[int]]] = {
    "own": (Heun, [64, 96, 128]),
    "euler": (nl.ExplicitEuler, [100, 150, 200]),
    "rk": (lambda dt: nl.RungeKutta(dt=dt, adaptive=False), [32, 48, 64]),
    "etd 2": (nl.ETD2RK, [64, 96, 128]),
    "etd 4": (nl.ETD4RK, [32, 48, 64]),
}


@pytest.mark.numerical
@pytest.mark.sampled(5)
@pytest.mark.parametrize("strength", [0.0, 2.0])
@pytest.mark.parametrize("name", INTEGRATORS)
def test_orders_with_values_that_depend_on_time(name: str, strength: float) -> None:
    """The free nodes see a source that changes with time, so no stage is off and no order is lost."""
    make, numbers = INTEGRATORS[name]
    terms = {"reaction": nl.AllenCahn(strength, interval=(-2, 2))} if strength else {}
    problem = flow(values=moving, **terms)
    expected = reference(problem, 0.7, strength)
    errors = [np.abs(nl.solve(problem, START, t=1.0, integrator=make(1 / n)).final - expected).max() for n in numbers]
    assert np.polyfit(np.log(numbers), np.log(errors), 1)[0] == pytest.approx(-make(1.0).order, abs=0.1)


@pytest.mark.numerical
@pytest.mark.parametrize("metric", ["l2", "degree"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_are_held_to_the_last_bit(dtype: Any, metric: str) -> None:
    seen = []

    class Watched(nl.GradientFlow):
        def average(self, u: Any) -> Any:
            seen.append(u)
            return super().average(u)

    exact = VALUES.astype(dtype)
    functional = nl.E(WEIGHTS, F.astype(dtype), 0.7)
    for integrator in (nl.ExplicitEuler(0.01), nl.SemiImplicit(0.01), nl.RungeKutta(), None, nl.ETD4RK(0.1)):
        problem = Watched(functional, metric, constraint=nl.Constraint(NODES, VALUES))
        seen.clear()
        found = nl.solve(problem, START.astype(dtype), t_eval=[0.0, 0.1, 0.35], integrator=integrator)
        assert found.success
        assert np.array_equal(found.u[:, NODES], np.broadcast_to(exact, (3, 3)))
        # A stage sees the values, or, where the linear part is taken alone, those and the free part apart.
        for stage in seen:
            assert np.array_equal(stage[NODES], exact) or not stage[NODES].any()
    timed = nl.GradientFlow(functional, metric, constraint=nl.Constraint(NODES, moving))
    found = nl.solve(timed, START.astype(dtype), t_eval=[0.0, 0.1, 0.35], integrator=nl.RungeKutta(1e-3, 1e-3))
    assert np.array_equal(found.u[:, NODES], np.array([moving(t) for t in found.t]).astype(dtype))


@pytest.mark.numerical
@pytest.mark.parametrize("metric", ["l2", "degree"])
@pytest.mark.parametrize("fidelity", [0.0, 0.7])
def test_exact_solution_and_limit(metric: str, fidelity: float) -> None:
    """Against the matrix exponential and a dense solution of the system between the free nodes."""
    problem = flow(metric, fidelity=fidelity)
    rate = D if metric == "l2" else np.ones(N)
    a = (rate[:, None] * (np.eye(N) - P) + fidelity * np.eye(N))[~MASK]
    u = np.empty(N)
    u[NODES] = VALUES
    u[~MASK] = np.linalg.solve(a[:, ~MASK], fidelity * F[~MASK] - a[:, MASK] @ u[MASK])
    limit = nl.equilibrium(problem, START)
    assert limit.success
    np.testing.assert_allclose(limit.u, u, atol=1e-8)  # residual 1e-10 over the smallest eigenvalue, about 0.04
    np.testing.assert_allclose(nl.equilibrium(problem, START, method="direct").u, u, atol=1e-12)
    assert np.array_equal(limit.u[NODES], VALUES)
    # Exponential() promises 1e-12 of the size of the signals; the direct formula rounds alike.
    expected = u.copy()
    expected[~MASK] += expm(-0.3 * a[:, ~MASK]) @ (START - u)[~MASK]
    found = nl.solve(problem, START, t=0.3)
    assert "Exponential" in found.stats["integrator"]
    np.testing.assert_allclose(found.final, expected, atol=1e-11)
    assert np.all(np.diff(nl.solve(problem, START, t_eval=np.arange(0, 2, 0.1)).energy) <= 1e-15)
    slowest = float(np.linalg.eigvals(a[:, ~MASK]).real.min())
    assert relaxation_rate(problem) == pytest.approx(slowest, rel=1e-9)


@pytest.mark.numerical
def test_harmonic_extension_on_images_and_graphs() -> None:
    """In channels, with a preconditioner, against a dense solution."""

    rng = np.random.default_rng(0)
    grid = nl.Grid((20, 22))
    weights = nl.affinity(nl.Gaussian(width=1.0), grid, window=3, method="stencil")
    mask = rng.random((20, 22)) < 0.05
    values = rng.standard_normal((int(mask.sum()), 2))
    k = weights.edges()  # w_i w_j K_ij, symmetric
    laplacian = (np.diag(np.asarray(k.sum(axis=1)).ravel()) - k.toarray())[~mask.ravel()]
    expected = np.zeros((440, 2))
    expected[mask.ravel()] = values
    expected[~mask.ravel()] = np.linalg.solve(laplacian[:, ~mask.ravel()], -laplacian[:, mask.ravel()] @ values)
    for name in ("auto", "diagonal", "multigrid"):
        found = nl.J(weights).minimizer(constraint=nl.Constraint(mask, values), preconditioner=name)
        assert found.success
        np.testing.assert_allclose(found.u.reshape(440, 2), expected, atol=1e-8)
        assert np.array_equal(found.u[mask], values)


@pytest.mark.numerical
def test_minimizers_of_e() -> None:
    """With a fidelity that vanishes, in both measures, with matrices, and in float32."""
    constraint = nl.Constraint(MASK, np.where(MASK, F**2, np.nan)[MASK])
    u = np.where(MASK, F**2, 0.0)
    for measure, weight in (("l2", 1 / D), ("degree", np.ones(N))):
        holes = np.where(X < 0.5, 0.4, 0.0)
        a = (np.eye(N) - P + np.diag(holes * weight))[~MASK]
        u[~MASK] = np.linalg.solve(a[:, ~MASK], (holes * weight * F)[~MASK] - a[:, MASK] @ u[MASK])
        found = nl.E(WEIGHTS, F, holes, measure=measure).minimizer(constraint=constraint)
        np.testing.assert_allclose(found.u, u, atol=1e-8)
        single = nl.E(WEIGHTS, F.astype(np.float32), holes, measure=measure).minimizer(constraint=constraint)
        assert single.u.dtype == np.float32
        np.testing.assert_allclose(single.u, u, atol=1e-3)
    both = np.stack([F, 2 * F], axis=1)
    matrices = MatrixFidelity(0.4 * np.eye(2)[None])
    double = nl.E(WEIGHTS, both, matrices, measure="degree").minimizer(constraint=nl.Constraint(MASK, both[MASK] ** 2))
    alone = nl.E(WEIGHTS, F, 0.4, measure="degree").minimizer(constraint=constraint)
    np.testing.assert_allclose(double.u[:, 0], alone.u, atol=1e-8)


@pytest.mark.numerical
def test_attention_that_is_not_symmetric() -> None:
    rng = np.random.default_rng(3)
    keys, queries = rng.standard_normal((2, 9, 2))
    weights = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(9.0)), keys, queries=queries)
    p = np.array([weights.average(row) for row in np.eye(9)]).T
    problem = nl.AttentionFlow(weights, constraint=nl.Constraint([1, 4], [2.0, -1.0]))
    held = np.isin(np.arange(9), [1, 4])
    u = np.zeros(9)
    u[[1, 4]] = 2.0, -1.0
    u[~held] = np.linalg.solve((np.eye(9) - p)[np.ix_(~held, ~held)], p[np.ix_(~held, held)] @ u[held])
    for method in ("auto", "iterative"):
        np.testing.assert_allclose(nl.equilibrium(problem, np.zeros(9), method=method).u, u, atol=1e-8)
    np.testing.assert_allclose(nl.solve(problem, np.zeros(9), t=80.0).final, u, atol=1e-5)


@pytest.mark.numerical
def test_evolving_kernels_see_the_values() -> None:
    """The kernel of each stage is that of a signal with the values; order 5."""
    features = np.stack([X, F], axis=1)
    weights = nl.affinity(nl.Gaussian(width=0.4), nl.Points(X), features)

    def ends(t: float) -> Floats:
        return np.array([[0.0, np.sin(t)], [1.0, np.cos(t)]])

    problem = nl.GradientFlow(nl.J(weights), "degree", evolving=True, constraint=nl.Constraint([0, N - 1], ends))

    def speed(t: float, v: Floats) -> Floats:
        u = np.concatenate([ends(t)[:1], v.reshape(-1, 2), ends(t)[1:]])
        k = np.exp(-((u[:, None] - u[None]) ** 2).sum(axis=2) / (2 * 0.4**2))
        return np.asarray((k @ u / k.sum(axis=1, keepdims=True) - u)[1:-1].ravel())

    expected = solve_ivp(speed, (0, 1.0), features[1:-1].ravel(), method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
    found = nl.solve(problem, features, t=1.0, integrator=nl.RungeKutta(1e-9, 1e-11))
    assert np.abs(found.final[1:-1].ravel() - expected).max() < 1e-8
    assert np.array_equal(found.final[[0, -1]], ends(1.0))


@pytest.mark.numerical
def test_derivatives_leave_what_is_held_out() -> None:
    torch = pytest.importorskip("torch")
    weights = nl.affinity(nl.Gaussian(width=0.1), nl.Points(X), torch.from_numpy(X[:, None]))
    problem = nl.GradientFlow(nl.J(weights), "degree", constraint=nl.Constraint(NODES, VALUES))
    start = torch.from_numpy(START.copy()).requires_grad_()
    derivatives.run(problem, start, nl.ExplicitEuler(0.1), 3).sum().backward()
    k = np.exp(-((X[:, None] - X) ** 2) / (2 * 0.1**2))
    moves = k / k.sum(axis=1, keepdims=True) - np.eye(N)
    step = np.where(MASK[:, None], 0.0, np.eye(N) + 0.1 * moves)
    expected = (np.linalg.matrix_power(step, 3) * ~MASK).sum(axis=0)
    assert start.grad is not None
    np.testing.assert_allclose(start.grad.numpy(), expected, atol=1e-13)


def test_values_that_change_later_change_nothing() -> None:
    values = VALUES.copy()
    constraint = nl.Constraint(NODES, values)
    values[:] = 9
    np.testing.assert_array_equal(nl.J(WEIGHTS).minimizer(constraint=constraint).u[NODES], VALUES)


def test_values_in_many_forms() -> None:
    plane = nl.affinity(nl.Gaussian(width=1.0), nl.Grid((3, 4)))
    mask = np.zeros((3, 4), bool)
    mask[0, 1] = mask[2] = True
    whole = np.arange(12.0).reshape(3, 4)
    like = np.zeros((3, 4))
    expected = np.where(mask, whole, 0)
    forms: list[Any] = [whole, whole[mask], lambda t: whole[mask] + t, lambda t, x: (x - 0.5) @ [4.0, 1.0] + t]
    for form in forms:
        assert np.array_equal(nl.Constraint(mask, form).on(plane).at(0.0, like), expected)
    assert np.array_equal(nl.Constraint(mask, 2.0).on(plane).at(0.0, like), 2.0 * mask)
    numbers = nl.Constraint(np.flatnonzero(mask)[::-1], whole[mask][::-1]).on(plane)
    assert np.array_equal(numbers.held(like + 7, 0.0), np.where(mask, whole, 7))
    channels = nl.Constraint(mask, np.stack([whole, -whole], axis=-1)).on(plane)
    assert np.array_equal(channels.at(0.0, np.zeros((3, 4, 2)))[..., 1], -expected)
    given = np.array([True, False, True])
    kept = nl.Constraint(given, 1.0)
    given[:] = False
    assert kept.nodes.sum() == 2  # what was given is not looked at again


@pytest.mark.parametrize("tensors", [False, True])
def test_checkpoints_tell_constraints_apart(tensors: bool, tmp_path: Path) -> None:
    weights, start = WEIGHTS, START
    if tensors:
        torch = pytest.importorskip("torch")
        weights = nl.affinity(nl.Gaussian(width=0.1), nl.Points(X), torch.from_numpy(X[:, None]))
        start = torch.from_numpy(START)

    def run(values: Any, nodes: Any = NODES, end: float = 1.0, **options: Any) -> Any:
        problem = nl.GradientFlow(nl.J(weights), "degree", constraint=nl.Constraint(nodes, values))
        return nl.solve(problem, start, t_eval=[0.5, end], integrator=nl.ETD4RK(0.1), **options)

    path = tmp_path / "state.npz"
    for values, others in ((VALUES, VALUES[::-1]), (moving, lambda t: moving(t) * np.cos(t))):
        stop = nl.Callback(lambda t, u, flow: "enough" if t > 0.25 else None)
        run(values, trackers=[nl.Checkpoint(path, every=1), stop])
        whole, resumed = run(values), run(values, resume=path)
        assert np.array_equal(np.asarray(whole.u), np.asarray(resumed.u))
        assert resumed.stats["steps"] == whole.stats["steps"]
        for other in ((others, NODES), (values, [23, 0, 6])):
            with pytest.raises(FileFormatError, match="belongs to another problem"):
                run(*other, resume=path)
        path.unlink()
    here = START[NODES]
    run(here, trackers=[nl.Checkpoint(path, every=1), stop])
    with pytest.raises(FileFormatError, match="belongs to another problem"):  # the start alone does not tell
        run(START[[23, 0, 6]], [23, 0, 6], resume=path)


def test_what_is_refused() -> None:
    held = nl.Constraint(NODES, VALUES)
    degree, start = flow("degree"), START
    everywhere = nl.Constraint(np.ones(N, bool), 0.0)
    two = nl.affinity_from_graph(np.array([[0, 1, 2, 3, 4], [1, 2, 0, 4, 3]]), nl.Points(np.arange(5.0)))
    apart = nl.from_matrix(np.kron(np.eye(2), np.ones((2, 2))), nl.Points(np.arange(4.0)))
    nonsense: dict[str, Any] = {
        "nodes: got none": lambda: nl.Constraint([], 1.0),
        "nodes: got an array of float64": lambda: nl.Constraint([0.5], 1.0),
        "nodes: got .* the list has parts of uneven lengths": lambda: nl.Constraint([[1, 2], [3]], 1.0),
        "nodes: got a node twice": lambda: nl.Constraint([1, 1], 1.0).on(WEIGHTS),
        "nodes: got node 24, expected numbers below 24": lambda: nl.Constraint([24], 1.0).on(WEIGHTS),
        "nodes: got -1, expected an integer >= 0": lambda: nl.Constraint([-1], 1.0).on(WEIGHTS),
        r"nodes: got a mask of shape \(3,\)": lambda: nl.Constraint(np.array([True, False, True]), 1.0).on(WEIGHTS),
        "nodes: got all 24 of the domain": lambda: nl.GradientFlow(nl.J(WEIGHTS), constraint=everywhere),
        "values: got 1 NaN or infinite": lambda: nl.Constraint(NODES, [1.0, np.nan, 0.0]),
        r"values: got shape \(2,\), expected a number, \(3,\)": lambda: nl.solve(flow(values=[1.0, 2.0]), start, t=1),
        "values: got shape .* at t=0, expected": lambda: nl.solve(flow(values=lambda t: np.ones(4)), start, t=1),
        "values: got str at t=0": lambda: nl.solve(flow(values=lambda t: "one"), start, t=1),
        "values: got a callable of 3 arguments": lambda: flow(values=lambda t, x, y: 1.0),
        "constraint: got ndarray": lambda: nl.GradientFlow(nl.J(WEIGHTS), constraint=MASK),
        "AttentionStep is made of .*constraint": lambda: nl.solve(
            flow(fidelity=0), start, t=1, integrator=nl.AttentionStep()
        ),
        "NeutrenoStep is made of .*constraint": lambda: nl.solve(degree, start, t=1, integrator=nl.NeutrenoStep()),
        "SemiImplicit does not say that it takes terms that depend": lambda: nl.solve(
            flow(values=moving), start, t=1, integrator=nl.SemiImplicit()
        ),
        "Exponential does not say that it takes terms that depend": lambda: nl.solve(
            flow(values=moving), start, t=1, integrator=nl.Exponential()
        ),
        "constraint: got none, so every constant minimizes J": lambda: nl.J(WEIGHTS).minimizer(),
        "constraint: got values that depend on time": lambda: nl.J(WEIGHTS).minimizer(
            constraint=nl.Constraint(NODES, moving)
        ),
        "constraint: got values that depend on time, so": lambda: nl.equilibrium(flow(values=moving), start),
        "preconditioner: got 'transform'": lambda: nl.J(WEIGHTS).minimizer(constraint=held, preconditioner="transform"),
        r"constraint: 2 nodes \(the first is node 3\) see no": lambda: nl.J(two).minimizer(
            constraint=nl.Constraint([0], 1.0)
        ),
        r"constraint: 2 nodes \(the first is node 0\) see no": lambda: nl.equilibrium(
            nl.AttentionFlow(apart, constraint=nl.Constraint([3], 1.0)), np.ones(4), method="direct"
        ),
        "fidelity: .*constraint=Constraint": lambda: nl.E(WEIGHTS, F, np.inf),
        "expected one without, for which bounds": lambda: nl.diversity_bounds(degree),
    }
    for message, call in nonsense.items():
        with pytest.raises(InputError, match=message):
            call()

    class Silent(nl.ExplicitEuler):
        takes_constraint = False

    with pytest.raises(InputError, match="Silent does not say that it takes a constraint"):
        nl.solve(degree, start, t=1, integrator=Silent(0.1))
    with pytest.raises(NumericalError, match=r"values: NaN or infinite at t=0;"):
        nl.solve(flow(values=lambda t: np.nan), start, t=1)
    late = nl.solve(flow(values=lambda t: 1.0 if t < 0.5 else np.nan), start, t=1, integrator=nl.ETD2RK(0.1))
    assert not late.success
    assert "values: NaN or infinite at t=0.5" in late.message


@pytest.mark.parametrize("integrator", [nl.RungeKutta(), nl.Rosenbrock(), nl.ExplicitEuler(0.01)], ids=repr)
@pytest.mark.parametrize("name", ["values", "source", "observed"])
def test_no_shorter_step_is_tried_for_a_term_without_a_value(name: str, integrator: Any) -> None:
    """No tolerance and no precision helps."""
    size = len(NODES) if name == "values" else N

    def run(late: Any) -> nl.Solution:
        given = {name: lambda t: np.zeros(size) if t < 0.5 else late}
        built = flow(**given) if name == "values" else nl.GradientFlow(nl.E(WEIGHTS, F, 0.7), **given)
        return nl.solve(built, START, t=1, integrator=integrator, energies=False)

    failed = run(np.full(size, np.nan))
    assert not failed.success
    assert re.fullmatch(rf"{name}: NaN or infinite at t=0\.5\d*; expected finite values at all times", failed.message)
    with pytest.raises(InputError, match=rf"^{name}: got shape \(7,\) at t=0\.5\d*, expected"):
        run(np.zeros(7))


@pytest.mark.parametrize("measure", ["l2", "degree"])
@pytest.mark.parametrize("strength", [1e6, 1e9, 1e12])
def test_a_penalty_tends_to_the_constraint(strength: float, measure: Any) -> None:
    """The largest fidelity does not hide what is left of the equation elsewhere: before, f itself counted as solved."""
    grid = nl.Grid((20, 20), spacing=1 / 20)
    weights = nl.affinity(nl.Gaussian(0.1), grid)
    rng = np.random.default_rng(0)
    mask = rng.random(grid.shape) < 0.1
    f = np.where(mask, rng.normal(size=grid.shape), 0)
    held = nl.J(weights).minimizer(constraint=nl.Constraint(mask, f[mask]))
    found = nl.E(weights, f, strength * mask, measure=measure).minimizer()
    assert found.success
    # What a penalty leaves is below the largest degree over it; then there is the tolerance of both iterations.
    scale = float(weights.degree.max()) if measure == "l2" else 1.0
    assert np.abs(found.u - held.u).max() <= 40 * max(scale, 1.0) / strength + 1e-8


def test_a_weak_link_in_float32_is_one() -> None:
    # Two clusters see each other with 3e-4 of their weight. All terms are positive, so sums know it to the rounding of
    # a block of them, though it is less than the rounding of 3000 terms that were added up in float32.
    x = np.concatenate([np.zeros(1500), np.full(1500, 4.03)])[:, None] + np.linspace(0, 0.01, 3000)[:, None]
    k = nl.affinity(nl.Gaussian(1.0), nl.Points(np.arange(3000.0)), x.astype(np.float32), method="pairwise")
    fixed = np.arange(3000) == 0
    found = nl.J(k).minimizer(constraint=nl.Constraint(fixed, np.ones(1, np.float32)), rtol=1e-3)
    np.testing.assert_allclose(found.u, 1, atol=1e-3)
