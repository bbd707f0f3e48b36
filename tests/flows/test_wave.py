"""Flows of second order: against SciPy and matrices, their energy, their limits, and checkpoints."""

import numpy as np
import pytest
from scipy.integrate import solve_ivp

import nlflow as nl
from nlflow.flows.spectrum import dense_operator
from nlflow.testing import check_flow, check_integrator

N = 24
RNG = np.random.default_rng(0)
U, V, SOURCE, OBSERVED = RNG.standard_normal((4, N))
DENSITY, DAMPING = RNG.uniform(0.5, 2.0, N), RNG.uniform(0.0, 2.0, N)
GRID = nl.affinity(nl.Gaussian(width=0.1), nl.Grid(N, spacing=1 / N, boundary="periodic"))
SCATTERED = nl.affinity(nl.Gaussian(width=0.1), nl.Points(np.sort(RNG.random(N)), weights=RNG.uniform(0.5, 1.5, N) / N))


def operator(weights):
    return np.stack([nl.J(weights).gradient(unit) for unit in np.eye(N)], axis=1)


class Bar:
    """rho u'' = -Lu - lambda (u - f) + b - rho gamma u', from the matrix of L."""

    def __init__(self, weights=GRID, damping=0.0, density=1.0, fidelity=0.2, source=SOURCE):
        self.lap, self.damping, self.density = operator(weights), damping, density
        self.fidelity, self.source = fidelity, source
        functional = nl.E(weights, OBSERVED, fidelity) if fidelity else nl.J(weights)
        self.flow = nl.WaveFlow(nl.GradientFlow(functional, source=source), damping=damping, density=density)
        self.start = self.flow.state(U, V)

    def rate(self, t, y):
        u, v = y[:N], y[N:]
        force = -self.lap @ u - self.fidelity * (u - OBSERVED)
        if self.source is not None:
            force = force + (self.source(t) if callable(self.source) else self.source)
        return np.r_[v, force / self.density - self.damping * v]

    def exact(self, t):
        return solve_ivp(self.rate, (0, t), np.r_[U, V], "DOP853", rtol=1e-12, atol=1e-13).y[:, -1].reshape(2, N).T


CASES = [
    (weights, damping, density)
    for weights in (GRID, SCATTERED)
    for damping in (0.0, 0.3, 7.0, DAMPING)
    for density in (1.0, DENSITY)
]


@pytest.mark.parametrize(("weights", "damping", "density"), CASES)
@pytest.mark.slow
def test_steps_are_of_order_two_and_the_exponential_is_exact(weights, damping, density):
    bar = Bar(weights, damping, density)
    check_flow(bar.flow, bar.start)
    np.testing.assert_allclose(bar.flow.velocity(bar.start).T.ravel(), bar.rate(0, np.r_[U, V]), atol=1e-12)
    expected, errors = bar.exact(5.0), []
    for count, stride in ((100, 1), (200, 1), (200, 7), (200, 1000)):
        found = nl.solve(bar.flow, bar.start, t=5.0, integrator=nl.StoermerVerlet(5.0 / count, stride))
        assert found.success
        errors.append(np.abs(found.final - expected).max())
    assert abs(np.log2(errors[0] / errors[1]) - 2) < 0.1
    np.testing.assert_allclose(errors[2:], errors[1], rtol=1e-8)
    if np.ndim(damping) == 0:
        found = nl.solve(bar.flow, bar.start, t_eval=[0.0, 0.7, 5.0], integrator=nl.WaveExponential())
        np.testing.assert_allclose(found.final, expected, atol=1e-10)
    adaptive = nl.solve(bar.flow, bar.start, t=5.0, integrator=nl.RungeKutta(1e-9, 1e-12)).final
    np.testing.assert_allclose(adaptive, expected, atol=1e-6)


def test_a_source_that_changes_with_time_keeps_the_order():
    bar = Bar(source=lambda t: np.cos(3 * t) * SOURCE, damping=0.3)
    expected, errors = bar.exact(2.0), []
    for count in (40, 80):
        for stride in (1, 9):
            found = nl.solve(bar.flow, bar.start, t=2.0, integrator=nl.StoermerVerlet(2.0 / count, stride)).final
            errors.append(np.abs(found - expected).max())
    assert abs(np.log2(errors[0] / errors[2]) - 2) < 0.1
    np.testing.assert_allclose(errors[1::2], errors[::2], rtol=1e-9)
    with pytest.raises(nl.InputError, match="depend on time"):
        nl.solve(bar.flow, bar.start, t=1.0, integrator=nl.WaveExponential())


@pytest.mark.parametrize("metric", ["l2", "degree"])
def test_the_energy_is_the_sum_that_is_written_down_and_stays(metric):
    flow = nl.WaveFlow(nl.GradientFlow(nl.J(SCATTERED), metric, reaction=nl.AllenCahn(0.5, interval=(-3, 3))),
                       density=DENSITY)  # fmt: skip
    w, degree = SCATTERED.domain.weights.ravel(), 2 * SCATTERED.degree
    mass = w if metric == "l2" else w * degree
    expected = mass @ (DENSITY * V**2 / 2 + (U**2 - 1) ** 2 / 8) + U @ (w * (operator(SCATTERED) @ U)) / 2
    start = flow.state(U, V)
    np.testing.assert_allclose(flow.energy(start), expected, rtol=1e-13)
    found = nl.solve(flow, start, t_eval=np.linspace(0, 20, 41), integrator=nl.StoermerVerlet(0.01))
    assert np.abs(found.energy / found.energy[0] - 1).max() < 1e-4
    limit = nl.StoermerVerlet(1.0).stability_limit(flow)
    lost = nl.WaveFlow(flow.flow, density=DENSITY, damping=0.5)
    found = nl.solve(lost, start, t_eval=np.linspace(0, 20, 21), integrator=nl.StoermerVerlet(0.3 * limit))
    assert np.all(np.diff(found.energy) < 1e-6)


def test_a_mode_turns_by_two_arcsines_a_step():
    weights = GRID
    x = weights.domain.nodes[:, 0]
    flow, mode = nl.WaveFlow(nl.GradientFlow(nl.J(weights))), np.cos(2 * np.pi * 3 * x)
    omega = np.sqrt((operator(weights) @ mode)[0] / mode[0])
    h = 0.8 / omega
    for stride in (1, 500):
        found = nl.solve(flow, flow.state(mode), t=500 * h, integrator=nl.StoermerVerlet(h, stride)).final
        turned = 500 * 2 * np.arcsin(h * omega / 2)
        np.testing.assert_allclose(flow.displacement(found), np.cos(turned) * mode, atol=1e-10)


def test_ends_are_held():
    ends = nl.Constraint(np.array([0, N - 1]), np.array([0.5, -0.5]))
    lap, free = operator(SCATTERED), np.arange(1, N - 1)
    flow = nl.WaveFlow(nl.GradientFlow(nl.J(SCATTERED), constraint=ends), density=DENSITY)
    start = flow.state(U, V)
    u, v = flow.displacement(start), flow.speed_of(start)
    assert (u[0], u[-1], v[0], v[-1]) == (0.5, -0.5, 0.0, 0.0)

    def rate(_, y):
        return np.r_[y[N:], np.where(np.isin(np.arange(N), free), -lap @ y[:N] / DENSITY, 0.0)]

    exact = solve_ivp(rate, (0, 3), np.r_[u, v], "DOP853", rtol=1e-12, atol=1e-13).y[:, -1].reshape(2, N).T
    np.testing.assert_allclose(nl.solve(flow, start, t=3.0, integrator=nl.WaveExponential()).final, exact, atol=1e-10)
    steps = [nl.solve(flow, start, t=3.0, integrator=nl.StoermerVerlet(0.01, k)).final for k in (1, 50)]
    np.testing.assert_allclose(steps[0], exact, atol=1e-3)
    np.testing.assert_allclose(steps[1], steps[0], atol=1e-12)
    moved = nl.Constraint(np.array([0]), lambda t: np.array([np.sin(t)]))
    driven = nl.WaveFlow(nl.GradientFlow(nl.J(SCATTERED), constraint=moved))
    for stride in (1, 6):
        found = nl.solve(driven, driven.state(0 * U), t=1.0, integrator=nl.StoermerVerlet(0.02, stride)).final
        assert driven.displacement(found)[0] == np.sin(1.0)
        reference = nl.solve(driven, driven.state(0 * U), t=1.0, integrator=nl.RungeKutta(1e-9, 1e-12)).final
        np.testing.assert_allclose(found, reference, atol=1e-3)


def test_channels_move_by_themselves():
    flow = nl.WaveFlow(nl.GradientFlow(nl.J(SCATTERED)), damping=0.2)
    start = flow.state(np.stack([U, OBSERVED], axis=-1), np.stack([V, SOURCE], axis=-1))
    assert start.shape == (N, 4)
    for method in (nl.StoermerVerlet(0.02), nl.StoermerVerlet(0.02, 20), nl.WaveExponential()):
        whole = nl.solve(flow, start, t=1.0, integrator=method)
        alone = nl.solve(flow, flow.state(OBSERVED, SOURCE), t=1.0, integrator=method)
        np.testing.assert_allclose(flow.displacement(whole.u)[..., 1], flow.displacement(alone.u), atol=1e-12)
        np.testing.assert_allclose(flow.speed_of(whole.u)[..., 1], flow.speed_of(alone.u), atol=1e-12)


def test_derivatives_and_float32():
    flow = nl.WaveFlow(nl.GradientFlow(nl.J(GRID), reaction=nl.AllenCahn(interval=(-4, 4))), damping=0.3, density=2.0)
    y, along = flow.state(U, V), flow.state(OBSERVED, SOURCE)
    h = 1e-6
    found = (flow.velocity(y + h * along) - flow.velocity(y - h * along)) / (2 * h)
    np.testing.assert_allclose(flow.jacobian(y, along), found, atol=1e-7)
    plain = nl.WaveFlow(nl.GradientFlow(nl.J(GRID)))
    single = plain.state(U.astype(np.float32))
    for method in (nl.StoermerVerlet(0.02, 10), nl.WaveExponential()):
        found = nl.solve(plain, single, t=1.0, integrator=method).final
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, nl.solve(plain, plain.state(U), t=1.0, integrator=method).final, atol=1e-4)


@pytest.mark.parametrize("stride", [1, 8])
def test_a_run_resumes_with_the_same_bits(tmp_path, stride):
    bar = Bar(damping=0.1)
    options = {"t": 2.0, "integrator": nl.StoermerVerlet(0.01, stride)}
    path = tmp_path / "run"
    whole = nl.solve(bar.flow, bar.start, **options, trackers=[nl.Checkpoint(path, every=11), nl.Energy()])
    np.testing.assert_array_equal(nl.solve(bar.flow, bar.start, **options, resume=path).final, whole.final)
    other = nl.WaveFlow(bar.flow.flow, damping=0.2)
    with pytest.raises(nl.NlflowError, match="another problem"):
        nl.solve(other, bar.start, **options, resume=path)


@pytest.mark.parametrize(("density", "held"), [(1.0, False), (DENSITY, False), (DENSITY, True)])
def test_the_limit_of_steps_is_where_they_grow(density, held):
    ends = nl.Constraint(np.array([0, 5]), np.zeros(2)) if held else None
    flow = nl.WaveFlow(nl.GradientFlow(nl.J(SCATTERED), constraint=ends), density=density)
    rows = np.ones(N, bool)
    if held:
        rows[[0, 5]] = False
    matrix = (operator(SCATTERED) / np.reshape(density, (-1, 1)))[np.ix_(rows, rows)]
    limit = nl.StoermerVerlet(1.0).stability_limit(flow)
    np.testing.assert_allclose(limit, 2 / np.sqrt(np.linalg.eigvals(matrix).real.max()), rtol=1e-9)
    check_integrator(nl.StoermerVerlet(0.9 * limit), flow, flow.state(U, V))
    start = flow.state(U)  # at rest: with a velocity a free bar drifts off
    grown = nl.solve(flow, start, t=200 * limit, integrator=nl.StoermerVerlet(0.99 * limit)).final
    assert np.abs(flow.displacement(grown)).max() < 20
    with pytest.raises(nl.errors.StabilityError, match=r"dt: got .* Störmer"):
        nl.solve(flow, flow.state(U, V), t=10.0, integrator=nl.StoermerVerlet(1.01 * limit))
    check_integrator(nl.WaveExponential(), flow, flow.state(U, V))


def test_many_nodes_have_the_limit_of_their_largest_eigenvalue():
    n = 500
    weights = nl.affinity(nl.Gaussian(width=0.02), nl.Points(np.linspace(0, 1, n)))
    density = np.linspace(1.0, 3.0, n)
    flow = nl.WaveFlow(nl.GradientFlow(nl.J(weights)), density=density)
    matrix = np.stack([nl.J(weights).gradient(unit) for unit in np.eye(n)], axis=1) / density[:, None]
    expected = np.sqrt(np.linalg.eigvals(matrix).real.max())
    assert expected <= flow.largest_frequency() <= expected * (1 + 1e-5)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nl.WaveFlow(nl.J(GRID)), "flow: got J"),
        (lambda: nl.WaveFlow(nl.GradientFlow(nl.J(GRID)), damping=-1.0), "damping"),
        (lambda: nl.WaveFlow(nl.GradientFlow(nl.J(GRID)), density=0.0), "density"),
        (lambda: nl.WaveFlow(nl.GradientFlow(nl.J(GRID)), density=DENSITY[:-1]), "density"),
        (lambda: nl.WaveFlow(nl.GradientFlow(nl.J(GRID)), damping=-DAMPING), "damping"),
        (lambda: nl.StoermerVerlet(0.1, 0), "stride"),
        (lambda: nl.solve(nl.GradientFlow(nl.J(GRID)), U, t=1.0, integrator=nl.StoermerVerlet(0.1)), "WaveFlow"),
        (lambda: nl.solve(Bar().flow, U, t=1.0, integrator=nl.StoermerVerlet(0.1)), r"flow\.state"),
        (lambda: nl.solve(Bar().flow, np.ones((N, 3)), t=1.0, integrator=nl.StoermerVerlet(0.1)), r"flow\.state"),
        (lambda: Bar().flow.state(U, np.ones((N, 2))), "velocity"),
        (lambda: Bar().flow.displacement(np.ones((N, 3))), "^state: got shape"),
        (lambda: Bar().flow.speed_of(U), "^state: got shape"),
        (lambda: Bar().flow.speed_of(np.ones((N, 2)) * 1j), "^state: got dtype complex128"),
        (lambda: nl.solve(Bar().flow, Bar().start, t=1.0, integrator=nl.ETD4RK(0.1)), "StoermerVerlet"),
        (lambda: nl.solve(Bar().flow, Bar().start, t=1.0, integrator=nl.Exponential()), "WaveExponential"),
        (lambda: nl.solve(Bar(damping=DAMPING).flow, Bar().start, t=1.0, integrator=nl.WaveExponential()), "damping"),
        (lambda: nl.equilibrium(Bar().flow), "WaveFlow"),
    ],
)
def test_what_does_not_go_together_is_refused(make, match):
    with pytest.raises(nl.InputError, match=match):
        make()


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_no_rounding_pushes_a_wave_that_is_free(damping):
    """Its mean moves by v t, or by v / gamma where it is damped, for all of t."""
    flow = nl.WaveFlow(nl.GradientFlow(nl.J(GRID)), damping=damping)
    start = flow.state(U, V)
    for t in (1e8, 1e16, 1e290):
        found = nl.solve(flow, start, t=t, integrator=nl.WaveExponential()).final
        assert np.mean(flow.displacement(found)) == pytest.approx(
            U.mean() + V.mean() * (1 / damping if damping else t), rel=1e-9
        )
        assert np.mean(flow.speed_of(found)) == pytest.approx(0.0 if damping else V.mean(), abs=1e-9)


@pytest.mark.parametrize("density", [np.ones(N), DENSITY])
def test_averages_of_the_exponential_grow_with_the_turns_alone(density):
    """Of thousands of turns, the roundings of whose samples are above the tolerance."""
    flow = nl.WaveFlow(nl.GradientFlow(nl.J(SCATTERED)), density=density)
    phase = 6000.0
    t = phase / flow.surely_below()
    found = nl.solve(flow, flow.state(U), t=t, integrator=nl.WaveExponential(), energies=False)
    assert found.success
    assert 0.5 * phase < found.stats["applications"] < 0.55 * phase
    root = np.sqrt(SCATTERED.domain.weights * density)
    values, modes = np.linalg.eigh(root[:, None] * operator(SCATTERED) / density[:, None] / root)
    exact = modes @ (np.cos(np.sqrt(np.maximum(values, 0.0)) * t) * (modes.T @ (root * U))) / root
    bound = 8 * np.finfo(float).eps * phase**2 / 2 * found.stats["applications"]  # of all that is dropped
    assert np.abs(flow.displacement(found.final) - exact).max() < bound


@pytest.mark.parametrize("boundary", ["periodic", "isolated"])
@pytest.mark.parametrize(("damping", "t"), [(2.0, 1e3), (8.0, 70.0), (30.0, 10.0), (200.0, 1e4)])
def test_an_overdamped_wave_creeps_for_long(damping, t, boundary):
    """Modes a move as exp(-2 a t / (gamma + (gamma^2 - 4 a)^1/2)), and towards f."""
    f, start, speed = np.random.default_rng(0).normal(size=(3, 7))
    flow = nl.GradientFlow(nl.E(nl.affinity(nl.Gaussian(1.4), nl.Grid(7, boundary=boundary)), f, 0.01), "l2")
    wave = nl.WaveFlow(flow, damping=damping, density=50.0)
    found = nl.solve(wave, wave.state(start, speed), t=t, integrator=nl.WaveExponential())
    assert found.success, found.message
    values, vectors = np.linalg.eigh(dense_operator(flow) / 50)
    rest = np.linalg.solve(dense_operator(flow), 0.01 * f)
    root = np.sqrt(damping**2 - 4 * values)
    slow, fast = -2 * values / (damping + root), -(damping + root) / 2
    u, v = vectors.T @ (start - rest), vectors.T @ speed
    share = (v - fast * u) / root
    exact = rest + vectors @ (share * np.exp(slow * t) + (u - share) * np.exp(fast * t))
    np.testing.assert_allclose(wave.displacement(found.final), exact, atol=1e-10)
