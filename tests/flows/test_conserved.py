"""Flows that conserve mass: the metric <a, M^-1 b>, its mobilities, and what the rest of the package makes of them."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp

import nlflow as nl
from nlflow.flows.spectrum import dense_operator, relaxation_rate
from nlflow.testing import check_flow, check_integrator

N = 20
RNG = np.random.default_rng(0)
START, OBSERVED, MOBILITY = RNG.uniform(-0.8, 0.8, N), RNG.uniform(-0.5, 0.5, N), RNG.uniform(0.1, 2.0, N)


def grid(width, boundary="periodic"):
    return nl.affinity(nl.Gaussian(width=width), nl.Grid(N, spacing=0.1, boundary=boundary))


SCATTERED = nl.Points(np.sort(RNG.random(N)), weights=RNG.uniform(0.5, 1.5, N) / N)


def points(width):
    return nl.affinity(nl.Gaussian(width=width), SCATTERED)


def degenerate(u):
    return np.maximum(1 - u * u, 0.0)


METRICS = {
    "own": lambda make: nl.ConservedMetric(mobility=0.7),
    "other": lambda make: nl.ConservedMetric(make(0.35), mobility=0.7),
    "m(x)": lambda make: nl.ConservedMetric(mobility=MOBILITY),
    "m(u)": lambda make: nl.ConservedMetric(mobility=degenerate, largest=1.0),
}


class Problem:
    """The conserved flow of E with a reaction, from the kernel alone."""

    def __init__(self, make, name, fidelity=0.3, strength=2.0):
        self.weights, self.name = make(0.2), name
        self.w = self.weights.domain.weights.ravel()
        self.lap = self.operator(self.weights)
        self.other = self.operator(make(0.35)) if name == "other" else self.lap
        self.fidelity, self.strength = fidelity, strength
        functional = nl.E(self.weights, OBSERVED, fidelity) if np.any(fidelity) else nl.J(self.weights)
        reaction = nl.AllenCahn(strength) if strength else None
        self.flow = nl.GradientFlow(functional, METRICS[name](make), reaction=reaction)

    @staticmethod
    def operator(weights):
        domain = weights.domain
        x, w = domain.nodes, domain.weights.ravel()
        # P and d of the affinity alone: w_j K_ij with K = 2 k.
        p = np.stack([weights.average(unit) for unit in np.eye(len(x))], axis=1)
        both = 2 * weights.degree.ravel()[:, None] * p
        assert np.allclose(both / w, (both / w).T)
        return np.diag(both.sum(axis=1)) - both

    def potential(self, u):
        return self.lap @ u + self.fidelity * (u - OBSERVED) - self.strength * (u - u**3)

    def rate(self, t, u):
        mu = self.potential(u)
        if self.name in ("own", "other"):
            return -0.7 * self.other @ mu
        m = MOBILITY if self.name == "m(x)" else degenerate(u)
        between = np.diag(np.diag(self.lap)) - self.lap
        return -np.sum(between * (m[:, None] + m) / 2 * (mu[:, None] - mu), axis=1)

    def energy(self, u):
        quadratic = u @ (self.w * (self.lap @ u)) / 2 + self.w @ (self.fidelity * (u - OBSERVED) ** 2) / 2
        return quadratic + self.strength / 4 * self.w @ (u**2 - 1) ** 2

    def exact(self, t):
        return solve_ivp(self.rate, (0, t), START, "DOP853", rtol=1e-12, atol=1e-13).y[:, -1]


CASES = [(make, name) for make in (grid, points) for name in METRICS]


@pytest.mark.parametrize(("make", "name"), CASES)
def test_the_velocity_is_that_of_the_formula(make, name):
    problem = Problem(make, name)
    check_flow(problem.flow, START)
    np.testing.assert_allclose(problem.flow.velocity(START), problem.rate(0, START), atol=1e-12)
    np.testing.assert_allclose(-problem.flow.force(START), problem.potential(START), atol=1e-12)
    np.testing.assert_allclose(problem.flow.energy(START), problem.energy(START), rtol=1e-13)
    assert abs(problem.w @ problem.flow.velocity(START)) < 1e-15
    along = np.cos(np.arange(N))
    h = 1e-6
    found = (problem.rate(0, START + h * along) - problem.rate(0, START - h * along)) / (2 * h)
    np.testing.assert_allclose(problem.flow.jacobian(START, along), found, atol=1e-7)


@pytest.mark.parametrize("number", [np.float32(0.5), np.array(0.5)], ids=repr)
def test_a_mobility_may_be_a_number_of_numpy(number):
    expected = nl.GradientFlow(nl.J(grid(0.2)), nl.ConservedMetric(mobility=0.5)).velocity(START)
    found = nl.GradientFlow(nl.J(grid(0.2)), nl.ConservedMetric(mobility=number)).velocity(START)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", METRICS)
def test_channels_move_by_themselves(name):
    flow = Problem(points, name, fidelity=0.0).flow
    pair = np.stack([START, 0.5 * START[::-1]], axis=-1)
    expected = np.stack([flow.velocity(pair[:, c].copy()) for c in range(2)], axis=-1)
    np.testing.assert_allclose(flow.velocity(pair), expected, atol=1e-13)


@pytest.mark.parametrize(("make", "name"), CASES)
@pytest.mark.sampled(4)
def test_orders_are_those_declared_and_mass_stays(make, name):
    problem = Problem(make, name)
    expected, mass = problem.exact(0.1), problem.w @ START
    methods = [nl.IMEX, nl.ConvexSplitting]
    if problem.flow.symmetric:
        methods += [nl.ETD2RK, nl.ETD4RK]
    for method in methods:
        counts = (4, 8) if method is nl.ETD4RK else (20, 40)
        errors = []
        for count in counts:
            found = nl.solve(problem.flow, START, t=0.1, integrator=method(0.1 / count))
            assert found.success
            assert abs(problem.w @ found.final - mass) < 1e-13 * (problem.w @ np.abs(START))
            errors.append(np.abs(found.final - expected).max())
        order = np.log2(errors[0] / errors[1])
        assert abs(order - method.order) < 0.1 or errors[1] < 1e-12, (method, errors)
    adaptive = nl.solve(problem.flow, START, t=0.1, integrator=nl.RungeKutta(1e-10, 1e-13))
    np.testing.assert_allclose(adaptive.final, expected, atol=1e-9)


@pytest.mark.parametrize("t", [10.0, 1e3, 1e5, 1e6])
@pytest.mark.parametrize("fidelity", [0.0, 0.3])
@pytest.mark.parametrize(("make", "name"), [(grid, "own"), (grid, "other"), (points, "own")])
def test_a_coarse_signal_keeps_its_mean_and_its_limit_for_any_time(make, name, fidelity, t):
    problem = Problem(make, name, fidelity, strength=0.0)
    start, observed = START.astype(np.float32), OBSERVED.astype(np.float32)
    functional = nl.E(problem.weights, observed, fidelity) if fidelity else nl.J(problem.weights)
    exact = start.astype(np.float64)
    values, vectors = np.linalg.eig(0.7 * problem.other @ (problem.lap + fidelity * np.eye(N)))
    source = np.linalg.solve(vectors, problem.rate(0, exact))
    z = t * np.where(values.real > 1e-9 * values.real.max(), values.real, 0.0)
    exact = exact + (vectors @ (t * np.where(z == 0, 0.0, -np.expm1(-z) / np.where(z == 0, 1.0, z)) * source)).real
    found = nl.solve(nl.GradientFlow(functional, METRICS[name](make)), start, t=t)
    assert found.success, found.message
    assert found.final.dtype == np.float32
    mass = problem.w.sum()
    assert abs(problem.w @ (found.final.astype(np.float64) - start)) < 1e-6 * mass
    assert np.abs(found.final - exact).max() < 5e-4


@pytest.mark.parametrize("metric", ["l2", "degree", "conserved"])
@pytest.mark.parametrize("make", [grid, points])
def test_long_coarse_steps_keep_a_mean(make, metric):
    weights, start = make(0.2), (START + 5).astype(np.float32)
    flow = nl.GradientFlow(nl.J(weights), metric)
    degrees = np.exp(np.asarray(flow.affinity.log_degree)) if metric == "degree" else np.ones(N)
    measure = weights.domain.weights * degrees / (weights.domain.weights @ degrees)
    rosenbrock = nl.Rosenbrock(dt=1e4, adaptive=False)
    for method in (nl.ETD2RK(1e4), nl.ETD4RK(1e4), nl.ConvexSplitting(1e4), nl.IMEX(1e4), rosenbrock):
        found = nl.solve(flow, start, t=4e4, integrator=method)
        assert found.final.dtype == np.float32
        assert abs(measure @ (found.final.astype(np.float64) - start)) < 5e-6, method


@pytest.mark.parametrize(("make", "name"), CASES)
@pytest.mark.sampled(3)
def test_convex_splitting_lowers_the_energy_in_any_step(make, name):
    problem = Problem(make, name, fidelity=0.0, strength=8.0)
    for h in (1e-3, 10.0, 1e4):
        found = nl.solve(problem.flow, START, t_eval=h * np.arange(6), integrator=nl.ConvexSplitting(h))
        assert found.success, found.message
        energies = np.array([problem.energy(u) for u in found.u])
        assert np.diff(energies).max() <= 1e-13 * energies[0]
        assert abs(problem.w @ (found.final - START)) < 1e-13 * (problem.w @ np.abs(START))


@pytest.mark.parametrize(("make", "name"), CASES)
@pytest.mark.sampled(4)
@pytest.mark.slow
def test_average_vector_fields_lose_energy_at_order_two(make, name):
    problem, method = Problem(make, name), nl.flows.AverageVectorField
    expected = problem.exact(0.1)
    found = [
        nl.solve(problem.flow, START, t_eval=np.linspace(0, 0.1, n + 1), integrator=method(0.1 / n)) for n in (5, 10)
    ]
    errors = [np.abs(run.final - expected).max() for run in found]
    assert abs(np.log2(errors[0] / errors[1]) - 2) < 0.1
    longer = nl.solve(problem.flow, START, t_eval=0.2 * np.arange(6), integrator=method(0.2))
    for run in (*found, longer):
        energies = np.array([problem.energy(u) for u in run.u])
        assert run.success
        assert np.diff(energies).max() <= 1e-13 * energies[0]
        assert abs(problem.w @ (run.final - START)) < 1e-15


def test_a_step_whose_equation_is_not_solved_is_refused():
    flow = Problem(grid, "own", fidelity=0.0, strength=8.0).flow
    found = nl.solve(flow, START, t=5.0, integrator=nl.flows.AverageVectorField(0.5))
    assert found.status is nl.Status.STEP_FAILED
    assert "ConvexSplitting" in found.message


@pytest.mark.slow
def test_the_average_vector_field_keeps_the_contract():
    check_integrator(nl.flows.AverageVectorField(0.1))


def test_a_signal_that_leaves_the_interval_is_taken_to_be_steeper_there():
    # Conserved flows have no maximum principle. Values just beyond 1 are steep: 3 u^2 - 1 > 2.
    start = np.where(np.arange(N) < 4, 1.0, -1.0)
    flow = nl.GradientFlow(nl.J(grid(0.2)), nl.ConservedMetric(mobility=5.0), reaction=nl.AllenCahn(0.05))
    found = nl.solve(flow, start, t_eval=0.1 * np.arange(30), integrator=nl.ConvexSplitting(0.1))
    assert np.all(np.diff(found.energy) <= 0)
    reaction = nl.AllenCahn(2.0)
    assert reaction.bound_between(-0.5, 1.0) == reaction.bound == 4.0
    np.testing.assert_allclose(reaction.bound_between(-1.5, 0.2), 2 * (3 * 1.5**2 - 1))
    bare = nl.flows.Reaction(lambda u: u - u**3, (-1.0, 1.0), bound=2.0)
    np.testing.assert_allclose(bare.bound_between(-1.5, 0.2), 3 * 1.5**2 - 1, rtol=1e-6)


@pytest.mark.parametrize("boundary", ["periodic", "reflect"])
def test_the_exponential_is_that_of_the_matrix(boundary):
    from scipy.linalg import expm

    weights, other = grid(0.2, boundary), grid(0.35, boundary)
    for functional, fidelity in ((nl.J(weights), 0.0), (nl.E(weights, OBSERVED, 0.3), 0.3)):
        for metric, own in ((nl.ConservedMetric(), weights), (nl.ConservedMetric(other), other)):
            flow = nl.GradientFlow(functional, metric)
            lap, mobile = Problem.operator(weights), Problem.operator(own)
            a = mobile @ (lap + fidelity * np.eye(N))
            rest = np.linalg.lstsq(a, mobile @ (fidelity * OBSERVED), rcond=None)[0]
            rest += START.mean() - rest.mean()
            found = nl.solve(flow, START, t=0.7)
            assert "Exponential" in found.stats["integrator"]
            np.testing.assert_allclose(found.final, rest + expm(-0.7 * a) @ (START - rest), atol=1e-13)
            np.testing.assert_allclose(nl.equilibrium(flow, START).u, rest, atol=1e-9)
            values = np.sort(np.linalg.eigvals(a).real)
            np.testing.assert_allclose(relaxation_rate(flow), values[1], rtol=1e-9)
            np.testing.assert_allclose(dense_operator(flow), a, atol=1e-12)
            np.testing.assert_allclose(nl.ExplicitEuler(1.0).stability_limit(flow), 2 / values[-1], rtol=1e-9)
    scattered = nl.GradientFlow(nl.E(points(0.2), OBSERVED, 0.3), "conserved")
    lap = Problem.operator(points(0.2))
    found = nl.solve(scattered, START, t=0.7).final
    exact = solve_ivp(lambda _, u: -lap @ (lap @ u + 0.3 * (u - OBSERVED)), (0, 0.7), START, "DOP853",
                      rtol=1e-12, atol=1e-13).y[:, -1]  # fmt: skip
    np.testing.assert_allclose(found, exact, atol=1e-10)


def test_limits_keep_the_mass_of_the_start():
    fidelity = RNG.uniform(0.2, 2.0, N)
    flow = nl.GradientFlow(nl.E(points(0.2), OBSERVED, fidelity), "conserved")
    found = nl.equilibrium(flow, START)
    assert found.success
    assert abs(flow.mean(found.u) - flow.mean(START)) < 1e-14
    assert np.ptp(flow.force(found.u)) < 1e-8
    assert np.abs(nl.equilibrium(flow).u - found.u).max() > 0.01  # that of the mean of f
    np.testing.assert_allclose(
        nl.equilibrium(nl.GradientFlow(nl.J(points(0.2)), "conserved"), START).u, flow.mean(START)[0]
    )


@pytest.mark.slow
def test_mass_stays_for_ten_thousand_steps():
    weights = grid(0.3)
    flow = nl.GradientFlow(nl.J(weights), "conserved", reaction=nl.AllenCahn(1.0))
    found = nl.solve(flow, START, t=500.0, integrator=nl.ConvexSplitting(0.05), energies=False)
    assert abs(found.final.mean() - START.mean()) < 1e-13 * np.abs(START).mean()


@pytest.mark.slow
def test_a_run_resumes_and_another_mobility_is_another_problem(tmp_path):
    def flow(mobility):
        return nl.GradientFlow(nl.J(grid(0.2)), nl.ConservedMetric(mobility=mobility), reaction=nl.AllenCahn())

    options = {"t": 1.0, "integrator": nl.IMEX(0.05)}
    whole = nl.solve(flow(MOBILITY), START, **options).final
    path = tmp_path / "run"
    nl.solve(flow(MOBILITY), START, t=0.5, integrator=nl.IMEX(0.05))
    nl.solve(flow(MOBILITY), START, **options, trackers=[nl.Checkpoint(path, every=7)])
    np.testing.assert_array_equal(nl.solve(flow(MOBILITY), START, **options, resume=path).final, whole)
    with pytest.raises(nl.NlflowError, match="another problem"):
        nl.solve(flow(2 * MOBILITY), START, **options, resume=path)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nl.ConservedMetric(mobility=-1.0), "mobility"),
        (lambda: nl.ConservedMetric(mobility=-MOBILITY), "mobility"),
        (lambda: nl.ConservedMetric(mobility=np.zeros(N)), "mobility"),
        (lambda: nl.ConservedMetric(mobility=degenerate), "largest"),
        (lambda: nl.ConservedMetric(largest=1.0), "largest"),
        (lambda: nl.GradientFlow(nl.J(grid(0.2)), nl.ConservedMetric(points(0.2))), "weights"),
        (lambda: nl.GradientFlow(nl.J(grid(0.2)), nl.ConservedMetric(mobility=MOBILITY[:-1])), "mobility"),
        (lambda: nl.GradientFlow(nl.J(grid(0.2)), "conserve"), "metric"),
    ],
)
def test_unusable_metrics_are_refused(make, match):
    with pytest.raises(nl.InputError, match=match):
        make()


def test_a_mobility_that_turns_out_negative_is_told():
    metric = nl.ConservedMetric(mobility=lambda u: 0.5 - u, largest=1.0)
    flow = nl.GradientFlow(nl.J(grid(0.2)), metric)
    with pytest.raises(nl.errors.NumericalError, match=r"mobility: got m\(u\) from -0\.\d+"):
        flow.velocity(START)
    with pytest.raises(nl.InputError, match="m\\(u\\) has the dtype complex128, expected real"):
        nl.GradientFlow(nl.J(grid(0.2)), nl.ConservedMetric(mobility=lambda u: 1j * u, largest=1.0)).velocity(START)
    with pytest.raises(nl.InputError, match="m\\(u\\) has another shape"):
        nl.GradientFlow(nl.J(grid(0.2)), nl.ConservedMetric(mobility=np.max, largest=1.0)).velocity(START)


def test_what_does_not_hold_in_the_metric_is_refused_by_name():
    held = nl.GradientFlow(nl.J(grid(0.2)), "conserved", constraint=nl.Constraint(np.array([0]), np.array([1.0])))
    assert not held.conserves_mean
    mobile = nl.GradientFlow(nl.J(grid(0.2)), nl.ConservedMetric(mobility=degenerate, largest=1.0))
    assert mobile.conserves_mean
    varied = nl.GradientFlow(nl.J(grid(0.2)), nl.ConservedMetric(mobility=MOBILITY))
    drawn = nl.GradientFlow(nl.E(grid(0.2), OBSERVED, 0.3), "conserved")
    gaps = nl.GradientFlow(nl.E(grid(0.2), OBSERVED, np.arange(N) % 2.0), "conserved")
    for ask, match in [
        (lambda: nl.equilibrium(held, START), "metric"),
        (lambda: nl.equilibrium(mobile, START), "mobility"),
        (lambda: nl.equilibrium(gaps, START), "fidelity"),
        (lambda: nl.diversity_bounds(drawn), "metric"),
        (lambda: nl.solve(drawn, START, t=1.0, integrator=nl.SemiImplicit(0.1)), "metric"),
        (lambda: nl.solve(drawn, START, t=1.0, integrator=nl.NeutrenoStep()), "metric"),
        (lambda: nl.solve(mobile, START, t=1.0, integrator=nl.Exponential()), "mobility"),
        (
            lambda: nl.solve(varied, START, t=1.0, integrator=nl.ETD2RK(0.1)),
            "self-adjoint in the metric of the flow",
        ),
        (lambda: nl.solve(drawn, START, t=1.0, integrator=nl.ExplicitEuler(2.0)), "unstable"),
    ]:
        with pytest.raises(nl.InputError, match=match):
            ask()


@pytest.mark.parametrize("fidelity", [0.0, 0.3, np.linspace(0.0, 1.0, N)], ids=["J", "E", "E per node"])
@pytest.mark.parametrize(("make", "name"), [case for case in CASES if case[1] != "m(u)"])
def test_explicit_steps_are_held_to_their_limit(make, name, fidelity):
    """Also where A is not self-adjoint in the measure, since of its parts both are: eigenvalues are real."""
    flow = Problem(make, name, fidelity, strength=0.0).flow
    limit = 2 / np.linalg.eigvals(dense_operator(flow)).real.max()
    assert 0 < flow.safe_step <= limit * (1 + 1e-9)
    assert nl.solve(flow, START, t=3 * limit, integrator=nl.ExplicitEuler(0.99 * limit)).success
    with pytest.raises(nl.StabilityError, match="unstable for this flow"):
        nl.solve(flow, START, t=3 * limit, integrator=nl.ExplicitEuler(1.01 * limit))
