"""Time steps: the order that each declares, the formula of each layer, adaptivity, and what they refuse."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.linalg import expm

import nlflow as nl
from nlflow.errors import InputError
from nlflow.flows import AverageVectorField, integrators
from nlflow.flows.integrators import Integrator
from tests.problems import Floats, Problem, problem, random_chain, torch_on_one_thread

pytestmark = pytest.mark.numerical

METRICS = ("l2", "degree")
FIDELITIES = {"J": None, "E": 0.7, "E per node": np.linspace(0.0, 1.5, 24)}
EVERY_INTEGRATOR: list[Integrator] = [
    nl.ExplicitEuler(0.1), nl.SemiImplicit(0.1), nl.RungeKutta(), nl.RungeKutta(dt=0.1, adaptive=False),
    nl.AttentionStep(), nl.NeutrenoStep(), nl.Exponential(), nl.ETD2RK(0.1), nl.ETD4RK(0.1),
    nl.IMEX(0.1), nl.ConvexSplitting(0.1), nl.Adaptive(nl.ETD4RK(0.1)), AverageVectorField(0.1), nl.Lie(0.1),
    nl.Strang(0.1), nl.Rosenbrock(), nl.EulerMaruyama(0.1), nl.Milstein(0.1), nl.PlatenWeak2(0.1),
    nl.ExponentialEuler(0.1), nl.ExactGaussian(),
]  # fmt: skip


def observed_order(steps: list[float], errors: list[float]) -> float:
    """Slope of log error against log step."""
    return float(np.polyfit(np.log(steps), np.log(errors), 1)[0])


# --- exact -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("boundary", ["periodic", "reflect"])
def test_the_exponential_by_transforms_is_that_of_the_matrix(boundary: str, metric: str) -> None:
    n, width = 20, 2.5
    at = np.arange(n)
    mirrored = [at - 2 * n * i for i in (-1, 0, 1)] + [2 * n * i - 1 - at for i in (-1, 0, 1, 2)]
    images = [at + n * i for i in range(-3, 4)] if boundary == "periodic" else mirrored
    k = sum(np.exp(-((at[:, None] - place) ** 2) / (2 * width**2)) for place in images)
    laplacian = 2 * (np.diag(k.sum(axis=1)) - k)
    if metric == "degree":
        laplacian /= 2 * k.sum(axis=1)[:, None]
    weights = nl.affinity(nl.Gaussian(width), nl.Grid(n, boundary=boundary), method="convolution")
    u, f = np.random.default_rng(1).normal(size=(2, n, 2)) + 3
    for fidelity in (0.0, 0.3):
        a = laplacian + fidelity * np.eye(n)
        rest = np.linalg.solve(a, fidelity * f) if fidelity else np.zeros_like(f)
        functional = nl.E(weights, f, fidelity, measure=metric) if fidelity else nl.J(weights)
        for t in (0.7, 3000.0):
            found = nl.solve(nl.GradientFlow(functional, metric), u, t=t, integrator=nl.Exponential())
            np.testing.assert_allclose(found.final, rest + expm(-t * a) @ (u - rest), atol=1e-12)
            assert found.stats["applications"] <= 2


@pytest.mark.parametrize("boundary", ["periodic", "reflect"])
def test_one_fidelity_over_equal_degrees_goes_by_a_transform(boundary: str) -> None:
    f, domain = np.random.default_rng(1).normal(size=48), nl.Grid(48, boundary=boundary)
    found = []
    for method in ("stencil", "dense"):
        energy = nl.E(nl.affinity(nl.Gaussian(2.0), domain, method=method), f, fidelity=1.0)
        flow = nl.GradientFlow(energy, metric="degree")
        found.append(nl.solve(flow, f, t=10.0, integrator=nl.Exponential(tol=1e-14)).final)
        assert (flow.modes is not None) == (method == "stencil")
    np.testing.assert_allclose(*found, rtol=0, atol=1e-13)
    uneven = nl.E(nl.affinity(nl.Gaussian(2.0), domain), f, fidelity=1 + 1e-12 * np.arange(48))
    assert nl.GradientFlow(uneven, metric="degree").modes is None


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fidelity", FIDELITIES.values(), ids=FIDELITIES.keys())
@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (nl.ExplicitEuler, [32, 64, 128, 256]),
        (nl.SemiImplicit, [32, 64, 128, 256]),
        (lambda dt: nl.RungeKutta(dt=dt, adaptive=False), [20, 26, 34, 44]),
    ],
    ids=["ExplicitEuler", "SemiImplicit", "RungeKutta"],
)
def test_order(make: Callable[[float], Integrator], numbers: list[int], fidelity: Any, metric: str) -> None:
    p = problem(metric, fidelity, channels=2)
    # So many steps for each time 1 / rho: h rho << 1, where the power of h next to the leading one is small as well.
    steps = [1 / math.ceil(m * p.radius) for m in numbers]
    exact = p.exact(1.0)
    errors = [p.norm(nl.solve(p.flow, p.start, t=1.0, integrator=make(h)).final - exact) for h in steps]
    assert min(errors) > 200 * np.finfo(float).eps  # nothing here is rounding
    assert observed_order(steps, errors) == pytest.approx(make(0.1).order, abs=0.1)


def scaled_layers(p: Problem, step: float) -> nl.GradientFlow:
    """A flow whose layers are Euler steps of length `step` of the flow of `p`.

    Layers have no step size; the step hides in the kernel. P' = I + h (P - I) has the degrees of P when the affinity is
    K' = h K + (1 - h) diag(d / w), so u <- P'u + h lambda~ (f - u) is explicit Euler of length h.
    """
    weights = p.flow.affinity.domain.weights
    degree = p.measure / weights  # up to a factor, which averages do not see
    average = np.eye(len(degree)) + np.diag(p.fidelity) - p.matrix
    k = step * degree[:, None] * average / weights + (1 - step) * np.diag(degree / weights)
    affinity = nl.from_matrix((k + k.T) / 2, p.flow.affinity.domain)
    if p.flow.fidelity is None:
        return nl.GradientFlow(nl.J(affinity), "degree")
    return nl.GradientFlow(nl.E(affinity, p.observed, step * p.fidelity, measure="degree"), "degree")


@pytest.mark.parametrize(
    ("layer", "fidelity"),
    [
        (nl.AttentionStep(), None),
        (nl.NeutrenoStep(), None),
        (nl.NeutrenoStep(), 0.7),
        (nl.NeutrenoStep(), np.linspace(0.0, 1.5, 24)),
    ],
    ids=str,
)
def test_order_of_layers(layer: Integrator, fidelity: Any) -> None:
    p = problem("degree", fidelity)
    exact, numbers = p.exact(1.0), [64, 128, 256, 512]
    errors = [p.norm(nl.solve(scaled_layers(p, 1 / m), p.start, t=m, integrator=layer).final - exact) for m in numbers]
    assert observed_order([1 / m for m in numbers], errors) == pytest.approx(layer.order, abs=0.1)


# --- formulas --------------------------------------------------------------------------------------------------------


def test_layers_are_their_formulas() -> None:
    p = problem("degree", 0.4, channels=3)
    average = np.eye(24) + np.diag(p.fidelity) - p.matrix
    u, f = p.start, p.observed
    j_flow = problem("degree").flow
    np.testing.assert_allclose(
        nl.solve(j_flow, u, t=1, integrator=nl.AttentionStep()).final, average @ u, rtol=0, atol=1e-14
    )
    layer = nl.solve(p.flow, u, t=1, integrator=nl.NeutrenoStep()).final
    np.testing.assert_allclose(layer, average @ u + 0.4 * (f - u), rtol=0, atol=1e-14)
    euler = nl.solve(p.flow, u, t=1, integrator=nl.ExplicitEuler(1.0)).final
    np.testing.assert_allclose(layer, euler, rtol=0, atol=1e-14)
    implicit = nl.solve(p.flow, u, t=1, integrator=nl.SemiImplicit(1.0)).final
    np.testing.assert_allclose(implicit, (average @ u + 0.4 * f) / 1.4, rtol=0, atol=1e-14)


@pytest.mark.parametrize("metric", METRICS)
def test_fixed_steps_are_their_formulas(metric: str) -> None:
    fidelity = np.linspace(0.0, 2.0, 24)
    p = problem(metric, fidelity)
    diffusion = p.matrix - np.diag(p.fidelity)
    h, u = 0.17, p.start
    euler = nl.solve(p.flow, u, t=h, integrator=nl.ExplicitEuler(h)).final
    np.testing.assert_allclose(euler, u - h * (p.matrix @ u - p.fidelity * p.observed), rtol=0, atol=1e-14)
    implicit = nl.solve(p.flow, u, t=h, integrator=nl.SemiImplicit(h)).final
    expected = (u - h * diffusion @ u + h * p.fidelity * p.observed) / (1 + h * p.fidelity)
    np.testing.assert_allclose(implicit, expected, rtol=0, atol=1e-14)


def test_last_step_is_shortened_to_meet_its_target() -> None:
    p = problem()
    solution = nl.solve(p.flow, p.start, t_eval=[0.25, 0.6], integrator=nl.ExplicitEuler(0.1))
    u = p.start
    for h in (0.1, 0.1, 0.05, 0.1, 0.1, 0.1, 0.05):
        u = u - h * p.matrix @ u
    assert solution.t.tolist() == [0.25, 0.6]
    assert solution.stats["steps"] == 7
    np.testing.assert_allclose(solution.final, u, rtol=0, atol=1e-14)
    # 0.1 is no binary fraction; ten steps of it make 1 all the same.
    assert nl.solve(p.flow, p.start, t=1.0, integrator=nl.ExplicitEuler(0.1)).stats["steps"] == 10


# --- Runge-Kutta -----------------------------------------------------------------------------------------------------


def reference(p: Problem, t: float) -> Floats:
    """u(t) by SciPy's own integrator of order 8."""
    source = p.fidelity * p.observed
    result = solve_ivp(lambda _, u: source - p.matrix @ u, (0, t), p.start, method="DOP853", rtol=1e-13, atol=1e-14)
    return np.asarray(result.y[:, -1])


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("integrator", [nl.Exponential(), nl.RungeKutta(1e-12, 1e-13)], ids=str)
def test_against_scipy(integrator: Integrator, metric: str) -> None:
    p = problem(metric, np.linspace(0.0, 1.5, 24))
    final = nl.solve(p.flow, p.start, t=3.0, integrator=integrator).final
    np.testing.assert_allclose(final, reference(p, 3.0), rtol=0, atol=2e-11)


def test_runge_kutta_error_follows_the_tolerance() -> None:
    p = problem("l2", 0.5)
    exact = p.exact(2.0)
    tolerances = [1e-3, 1e-5, 1e-7, 1e-9, 1e-11]
    solutions = [nl.solve(p.flow, p.start, t=2.0, integrator=nl.RungeKutta(tol, 0.1 * tol)) for tol in tolerances]
    errors = [p.norm(s.final - exact) for s in solutions]
    # Each step errs by at most rtol |u|, and the flow damps what was made: the sum stays within the number of steps.
    for tol, error, solution in zip(tolerances, errors, solutions, strict=True):
        assert error <= tol * solution.stats["steps"] * p.norm(p.start)
    assert observed_order(tolerances, errors) == pytest.approx(1.0, abs=0.15)
    steps = [s.stats["steps"] for s in solutions]
    assert steps == sorted(steps)


def test_runge_kutta_counts_what_it_rejects() -> None:
    p = problem("l2", 0.5)
    solution = nl.solve(p.flow, p.start, t=2.0, integrator=nl.RungeKutta(1e-9, 1e-12, dt=2.0))
    assert solution.stats["rejected"] >= 1
    # One slope at the start, then six averages for every step tried; the last slope of a step is the next one's first.
    assert solution.stats["applications"] == 1 + 6 * (solution.stats["steps"] + solution.stats["rejected"])
    assert p.norm(solution.final - p.exact(2.0)) < 1e-8
    assert nl.solve(p.flow, p.start, t=0.1, integrator=nl.RungeKutta(1e-3, 1e-3)).stats["rejected"] == 0


@pytest.mark.slow
def test_runge_kutta_settles_at_the_stability_limit_of_a_stiff_flow() -> None:
    fidelity = np.where(np.arange(24) % 2 == 0, 0.1, 500.0)
    p = problem("degree", fidelity)
    t = 20.0
    solution = nl.solve(p.flow, p.start, t=t, integrator=nl.RungeKutta(1e-5, 1e-8))
    assert solution.success
    assert p.norm(solution.final - p.exact(t)) < 1e-4
    needed = t * p.radius / 3.3
    assert 0.5 * needed < solution.stats["steps"] < 3 * needed


@pytest.mark.parametrize(
    ("tolerances", "dtype", "ends"),
    [
        ((1e-40, 0.0), "float64", True),
        ((0.0, 1e-30), "float64", True),
        ((0.9 * 2**-53, 0.0), "float64", True),
        ((1.1 * 2**-53, 0.0), "float64", False),
        ((1e-9, 1e-9), "float32", True),
        ((0.9 * 2**-24, 0.0), "float32", True),
        ((1.1 * 2**-24, 0.0), "float32", False),
    ],
    ids=str,
)
def test_tolerances_below_rounding_end_at_once(tolerances: tuple[float, float], dtype: str, ends: bool) -> None:
    """A step rounds each value by up to half an eps of it; whoever asks for less asks for what cannot be."""
    p = problem(dtype=dtype)
    solution = nl.solve(p.flow, p.start.astype(dtype), t=0.1, integrator=nl.RungeKutta(*tolerances))
    assert solution.success is not ends
    assert np.isfinite(solution.final).all()
    assert p.norm(solution.final - p.exact(solution.t[-1])) <= 64 * np.finfo(dtype).eps * p.norm(p.start)
    if ends:
        assert (solution.status, solution.stats["steps"]) == (nl.Status.STEP_FAILED, 0)
        said = (
            r"rtol=.*, atol=.*: no step can meet them at t=0, .* round the signal to float.*raise the tolerances \(rt"
        )
        assert re.search(said, solution.message)


def test_runge_kutta_says_when_no_step_is_good_enough() -> None:
    class Broken(nl.GradientFlow):
        def velocity(self, u: Any) -> Any:
            return np.where(u > 0.5, np.nan, 1.0)

    flow = Broken(problem().flow.functional)
    solution = nl.solve(flow, np.zeros(24), t=1.0, integrator=nl.RungeKutta())
    assert (solution.status, solution.success) == (nl.Status.STEP_FAILED, False)
    assert re.search(r"the step fell to .* at t=0.* rtol=1e-06.* raise the tolerances", solution.message)
    assert 0.4 < solution.t[-1] < 1.0
    assert np.isfinite(solution.final).all()


@pytest.mark.parametrize("t_eval", [[1.0], [1.0, 1.0 + 4e-15]], ids=["step ends an ulp early", "times lie close"])
def test_runge_kutta_reaches_targets_a_rounding_error_away(t_eval: list[float]) -> None:
    p = problem()
    integrator = nl.RungeKutta(1e-2, 1e-2, dt=math.nextafter(1.0, 0.0))
    solution = nl.solve(p.flow, p.start, t_eval=t_eval, integrator=integrator)
    assert solution.success, solution.message
    assert solution.t.tolist() == t_eval
    assert solution.stats["steps"] == len(t_eval)


@pytest.mark.parametrize("zeros", [3, 24], ids=["some", "all"])
def test_runge_kutta_without_atol_takes_zeros(zeros: int) -> None:
    p = problem("degree", 0.3)
    start = p.start.copy()
    start[:zeros] = 0.0
    final = nl.solve(p.flow, start, t=1.0, integrator=nl.RungeKutta(1e-8, 0.0)).final
    exact = nl.solve(p.flow, start, t=1.0, integrator=nl.Exponential()).final
    np.testing.assert_allclose(final, exact, rtol=0, atol=1e-7)


def test_runge_kutta_of_a_constant() -> None:
    p = problem()
    solution = nl.solve(p.flow, np.full(24, 3.0), t=100.0, integrator=nl.RungeKutta(1e-8, 0.0))
    # Nothing moves, so the step grows until rounding does: the tolerance is what holds it.
    np.testing.assert_allclose(solution.final, 3.0, rtol=1e-8)
    assert solution.stats["steps"] < 100


# --- contract --------------------------------------------------------------------------------------------------------


def test_every_integrator_is_tested_here() -> None:
    concrete = {
        c for _, c in inspect.getmembers(integrators, inspect.isclass)
        if issubclass(c, Integrator) and not inspect.isabstract(c)
    }  # fmt: skip
    # Of flows with velocities, which test_wave.py and test_particles.py have.
    second_order = {integrators.StoermerVerlet}
    assert concrete == {type(i) for i in EVERY_INTEGRATOR} | second_order


@pytest.mark.parametrize("integrator", EVERY_INTEGRATOR, ids=str)
def test_declarations(integrator: Integrator) -> None:
    flow = problem("degree").flow
    orders = {"RungeKutta": 5.0, "Exponential": math.inf, "ETD2RK": 2.0, "ETD4RK": 4.0, "IMEX": 2.0, "Adaptive": 4.0}
    orders |= {
        "AverageVectorField": 2.0,
        "Strang": 2.0,
        "Rosenbrock": 4.0,
        "PlatenWeak2": 2.0,
        "ExactGaussian": math.inf,
    }
    expected = orders.get(type(integrator).__name__, 1.0)
    assert integrator.order == expected
    assert integrator.unit_steps == isinstance(integrator, nl.AttentionStep | nl.NeutrenoStep)
    assert integrator.stability_limit(flow) > 0
    integrator.check(flow)
    assert flow.applications == 0
    assert re.fullmatch(rf"{type(integrator).__name__}\(.*\)", repr(integrator))


def test_reprs_tell_integrators_apart() -> None:
    assert repr(nl.ExplicitEuler(0.1)) == "ExplicitEuler(dt=0.1)"
    assert repr(nl.RungeKutta(1e-3)) != repr(nl.RungeKutta(1e-4))
    assert repr(nl.Exponential()) == "Exponential()"


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("integrator", EVERY_INTEGRATOR, ids=str)
def test_dtype_is_kept(integrator: Integrator, dtype: str) -> None:
    p = problem("degree", None if isinstance(integrator, nl.AttentionStep) else 0.3, dtype=dtype, channels=2)
    solution = nl.solve(p.flow, p.start.astype(dtype), t_eval=[1, 2], integrator=integrator)
    assert solution.u.dtype == dtype
    exact = nl.solve(problem("degree", p.flow.fidelity and 0.3, channels=2).flow, p.start, t=2, integrator=integrator)
    # RungeKutta() asks for 1e-6 a step, the others for nothing but rounding.
    np.testing.assert_allclose(solution.final, exact.final, rtol=0, atol=2e-5 if dtype == "float32" else 1e-8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("integrator", EVERY_INTEGRATOR, ids=str)
@pytest.mark.sampled(5)
def test_torch_tensors_stay_tensors(integrator: Integrator, dtype: str) -> None:
    torch = torch_on_one_thread()
    p = problem("degree", None if isinstance(integrator, nl.AttentionStep) else 0.3, dtype=dtype, channels=2)
    points = p.flow.affinity.domain
    kind = getattr(torch, dtype)
    affinity = nl.affinity(nl.Gaussian(width=0.3), points, torch.as_tensor(points.nodes, dtype=kind))
    functional = nl.J(affinity)
    if p.flow.fidelity is not None:
        functional = nl.E(affinity, torch.as_tensor(p.observed, dtype=kind), 0.3, measure="degree")
    flow = nl.GradientFlow(functional, "degree")
    solution = nl.solve(flow, torch.as_tensor(p.start, dtype=kind), t_eval=[1, 2], integrator=integrator)
    assert isinstance(solution.u, torch.Tensor)
    assert (solution.u.dtype, solution.u.device.type) == (kind, "cpu")
    expected = nl.solve(p.flow, p.start.astype(dtype), t_eval=[1, 2], integrator=integrator).u
    np.testing.assert_allclose(solution.u.numpy(), expected, rtol=0, atol=2e-5 if dtype == "float32" else 1e-13)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nl.ExplicitEuler(0), r"^dt: got 0, expected a finite real number > 0"),
        (lambda: nl.ExplicitEuler(-1.0), r"^dt: got -1.0, expected"),
        (lambda: nl.ExplicitEuler(math.nan), r"^dt: got nan, expected"),
        (lambda: nl.ExplicitEuler("0.1"), r"^dt: got '0.1', expected"),
        (lambda: nl.ExplicitEuler(None), r"^dt: got None, expected"),
        (lambda: nl.ExplicitEuler(np.array([0.1, 0.2])), r"^dt: got array.*expected"),
        (lambda: nl.SemiImplicit(math.inf), r"^dt: got inf, expected"),
        (lambda: nl.SemiImplicit(True), r"^dt: got True, expected"),
        (lambda: nl.RungeKutta(-1e-3), r"^rtol: got -0.001, expected a finite real number >= 0"),
        (lambda: nl.RungeKutta(1e-3, math.inf), r"^atol: got inf, expected"),
        (lambda: nl.RungeKutta(0, 0), r"^rtol: got 0 with atol 0, expected at least one of them > 0"),
        (lambda: nl.RungeKutta(dt=0), r"^dt: got 0, expected"),
        (lambda: nl.RungeKutta(adaptive=False), r"^dt: needed when adaptive=False"),
        (lambda: nl.Exponential(0), r"^tol: got 0, expected a finite real number > 0"),
        (lambda: nl.Exponential("small"), r"^tol: got 'small', expected"),
    ],
)
def test_bad_arguments(make: Callable[[], Integrator], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def asymmetric() -> nl.AttentionFlow:
    return nl.AttentionFlow(nl.from_matrix(random_chain(8), nl.Points(np.arange(8.0))))


def evolving() -> nl.GradientFlow:
    u = np.arange(8.0)
    return nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(width=1.0), nl.Points(u), u)), "degree", evolving=True)


@pytest.mark.parametrize(
    ("integrator", "make", "message"),
    [
        (nl.Exponential(), asymmetric, r"^integrator: Exponential needs a symmetric affinity; use RungeKutta"),
        (nl.Exponential(), evolving, r"^integrator: Exponential needs a frozen kernel; use RungeKutta"),
        (nl.AttentionStep(), lambda: problem("l2").flow, r"^integrator: an attention step .* metric='degree'"),
        (nl.NeutrenoStep(), lambda: problem("l2", 0.1).flow, r"^integrator: a NeuTRENO step .* metric='degree'"),
        (nl.AttentionStep(), lambda: problem("degree", 0.1).flow, r"^integrator: .*use NeutrenoStep or SemiImplicit"),
    ],
)
def test_flows_that_do_not_fit(integrator: Integrator, make: Callable[[], nl.GradientFlow], message: str) -> None:
    with pytest.raises(InputError, match=message):
        nl.solve(make(), np.ones(make().affinity.domain.shape), t=1, integrator=integrator)
