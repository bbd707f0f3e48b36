"""Stability limits: refused just above, decaying just below, and as sharp as they claim to be."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.errors import InputError, StabilityError
from nlflow.flows import spectrum
from nlflow.flows.integrators import Integrator
from tests.problems import Floats, Problem, problem, random_chain, unchecked

pytestmark = pytest.mark.numerical

METRICS = ("l2", "degree")
FIDELITIES = {"J": None, "E": 0.7, "E per node": np.linspace(0.0, 1.5, 24)}


def distances(p: Problem, integrator: Integrator, steps: int, dt: float = 1.0) -> Floats:
    """Distance to the limit of the flow, step by step, from a start that excites every mode."""
    if p.fidelity.any():
        limit = np.linalg.solve(p.matrix, p.fidelity * p.observed)
    else:
        limit = np.full(24, p.measure @ p.start / p.measure.sum())
    seen: list[float] = []
    watch = nl.Callback(lambda t, u, flow: seen.append(p.norm(u - limit)))
    nl.solve(p.flow, p.start, t=steps * dt, integrator=integrator, trackers=[watch], energies=False)
    return np.array(seen)


def refuse(p: Problem, integrator: Integrator, limit: float) -> None:
    with pytest.raises(StabilityError) as caught:
        nl.solve(p.flow, p.start, t=10.0, integrator=integrator)
    message = str(caught.value)
    assert message.startswith(f"dt: got {vars(integrator)['dt']:g}, which is unstable for this flow")
    number = float(re.findall(r"dt < ([\d.]+\d(?:e[+-]\d+)?)", message)[0])
    assert number == pytest.approx(limit, rel=1e-5)
    assert "reduce dt" in message
    assert isinstance(caught.value, InputError)
    assert isinstance(caught.value, ValueError)
    assert p.flow.applications == 0


def limit_of(kind: str, p: Problem) -> float:
    if kind == "euler":
        return 2 / p.radius
    return float(2 / (p.eigenvalues(diffusion=True)[-1] - p.fidelity.min()))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fidelity", FIDELITIES.values(), ids=FIDELITIES.keys())
@pytest.mark.parametrize(
    ("make", "kind"), [(nl.ExplicitEuler, "euler"), (nl.SemiImplicit, "semi-implicit")], ids=["euler", "semi-implicit"]
)
@pytest.mark.slow
def test_limit_of_fixed_steps(make: Callable[[float], Integrator], kind: str, fidelity: Any, metric: str) -> None:
    # Few, unequal nodes, so that the bound that costs nothing is not the limit.
    p = problem(metric, fidelity, width=0.15, volume=6.0)
    limit = limit_of(kind, p)
    assert make(1.0).stability_limit(p.flow) == pytest.approx(limit, rel=1e-12)
    refuse(p, make(limit * (1 + 1e-6)), limit)
    make(limit * (1 - 1e-6)).check(p.flow)
    below = distances(p, make(0.98 * limit), 600, 0.98 * limit)
    assert np.all(np.diff(below) <= 1e-13 * below[0])
    assert below[-1] < 1e-2 * below[0]
    if kind == "euler" or not isinstance(fidelity, np.ndarray):  # with uneven fidelity the second is a safe bound
        above = distances(p, unchecked(make(1.02 * limit)), 600, 1.02 * limit)
        assert above[-1] > 10 * above[0]


@pytest.mark.parametrize("metric", METRICS)
def test_semi_implicit_is_always_stable_under_strong_fidelity(metric: str) -> None:
    p = problem(metric, 50.0, width=0.15)
    assert nl.SemiImplicit(1.0).stability_limit(p.flow) == np.inf
    assert np.all(np.diff(distances(p, nl.SemiImplicit(1e3), 5, 1e3)) <= 1e-13)


@pytest.mark.parametrize("metric", METRICS)
def test_limit_of_fixed_runge_kutta_steps(metric: str) -> None:
    p = problem(metric, 0.3, width=0.15)
    limit = 3.3 / p.radius
    refuse(p, nl.RungeKutta(dt=limit * (1 + 1e-6), adaptive=False), limit)
    below = distances(p, nl.RungeKutta(dt=0.98 * limit, adaptive=False), 200, 0.98 * limit)
    assert below[-1] < 1e-6 * below[0]
    above = distances(p, unchecked(nl.RungeKutta(dt=1.05 * limit, adaptive=False)), 200, 1.05 * limit)
    assert above[-1] > 10 * above[0]
    # Steps that follow the error need no limit.
    nl.RungeKutta(dt=100 * limit).check(p.flow)
    assert nl.RungeKutta(dt=100 * limit).stability_limit(p.flow) == np.inf


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("make", [nl.ExplicitEuler, nl.SemiImplicit])
def test_limits_by_iteration(make: Callable[[float], Integrator], metric: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectrum, "_DENSE_NODES", 30)
    p = problem(metric, 0.2, n=80, width=0.1, volume=20.0)
    limit = limit_of("euler" if make is nl.ExplicitEuler else "semi-implicit", p)
    refuse(p, make(limit * (1 + 1e-5)), limit)
    make(limit * (1 - 1e-5)).check(p.flow)


def test_steps_that_the_cheap_bound_allows_cost_no_eigenvalue(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("l2", 0.5)
    bound = p.flow.spectral_bounds()[1]

    def fail(*_: Any) -> None:
        raise AssertionError("the affinity was asked for an average")

    monkeypatch.setattr(p.flow.affinity, "_average", fail)
    nl.ExplicitEuler(1.999 / bound).check(p.flow)
    nl.SemiImplicit(1.999 / p.flow.diffusion_bound()).check(p.flow)
    nl.RungeKutta(dt=3.29 / bound, adaptive=False).check(p.flow)


def test_the_limit_moves_with_an_evolving_kernel() -> None:
    """Values that draw together raise the degree, until a step that was stable at the start is refused."""
    u = np.linspace(0.0, 6.0, 20)

    def flow(v: Floats) -> nl.GradientFlow:
        affinity = nl.affinity(nl.Gaussian(width=0.8), nl.Points(np.arange(20.0), np.ones(20)), v)
        return nl.GradientFlow(nl.J(affinity), evolving=True)

    limit = nl.ExplicitEuler(1.0).stability_limit(flow(u))
    dt = 0.9 * limit
    solution = nl.solve(flow(u), u, t=1000 * dt, integrator=nl.ExplicitEuler(dt))
    assert (solution.status, solution.success) == (nl.Status.STEP_FAILED, False)
    assert re.match(rf"dt: got {dt:g}, which is unstable for this flow", solution.message)
    assert solution.stats["steps"] >= 1
    assert nl.ExplicitEuler(1.0).stability_limit(flow(solution.final)) < dt
    assert u.min() <= solution.final.min() <= solution.final.max() <= u.max()


# --- NeuTRENO layers -------------------------------------------------------------------------------------------------


def indefinite(fidelity: Any) -> Problem:
    """Mostly far nodes averaged, so that mu_min(P) is clearly negative."""
    p = problem("degree", fidelity)
    x = p.flow.affinity.domain.nodes
    k = 0.02 + ((x[:, None] - x[None]) ** 2).sum(axis=2)
    weights = p.flow.affinity.domain.weights
    degree = k @ weights
    average = k * weights / degree[:, None]
    flow = nl.GradientFlow(
        nl.E(nl.from_matrix(k, p.flow.affinity.domain), p.observed, fidelity, measure="degree"), "degree"
    )
    matrix = (1 + fidelity) * np.eye(24) - average
    return Problem(flow, p.start, matrix, np.ones(24), np.full(24, fidelity), p.observed, weights * degree)


@pytest.mark.parametrize("make", [lambda x: problem("degree", x), indefinite], ids=["definite", "indefinite"])
def test_neutreno_limit_is_one_plus_the_smallest_eigenvalue(make: Callable[[float], Problem]) -> None:
    limit = 2 - make(0.0).radius  # A = I - P at fidelity 0
    for above in (limit * (1 + 1e-6), 1.7 * limit):
        with pytest.raises(StabilityError, match=r"reduce the fidelity or use SemiImplicit") as caught:
            nl.solve(make(above).flow, t=2, integrator=nl.NeutrenoStep())
        assert str(caught.value).startswith(f"fidelity: got {above:g}, which makes the NeuTRENO step unstable")
        number = float(re.findall(r"fidelity < ([\d.]+(?:e[+-]?\d+)?) \(1 \+ mu_min\(P\)\)", str(caught.value))[0])
        assert number == pytest.approx(limit, rel=1e-5)
    below = distances(make(0.98 * limit), nl.NeutrenoStep(), 600)
    assert np.all(np.diff(below) <= 1e-13 * below[0])
    assert below[-1] < 1e-2 * below[0]
    beyond = distances(make(1.02 * limit), unchecked(nl.NeutrenoStep()), 600)
    assert beyond[-1] > 10 * beyond[0]


def test_neutreno_with_a_definite_kernel_is_safe_up_to_one() -> None:
    nl.NeutrenoStep().check(problem("degree", 1 - 1e-9).flow)
    p = problem("degree", 1.5)
    with pytest.raises(StabilityError):
        nl.NeutrenoStep().check(p.flow)


def test_neutreno_limit_with_one_fidelity_a_node() -> None:
    fidelity = np.linspace(0.5, 1.0, 24)

    def scaled(factor: float) -> Problem:
        return problem("degree", factor * fidelity)

    low, high = 0.5, 4.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if scaled(middle).radius < 2 else (low, middle)
    nl.NeutrenoStep().check(scaled(low * (1 - 1e-6)).flow)
    with pytest.raises(StabilityError, match=rf"^fidelity: got {high * (1 + 1e-6):g}, .*unstable"):
        nl.NeutrenoStep().check(scaled(high * (1 + 1e-6)).flow)


def asymmetric(fidelity: float, asymmetry: float) -> tuple[nl.AttentionFlow, Floats, Floats]:
    rng = np.random.default_rng(3)
    k = random_chain(11, asymmetry=asymmetry)
    observed = rng.standard_normal(11)
    flow = nl.AttentionFlow(nl.from_matrix(k, nl.Points(np.arange(11.0))), observed, fidelity)
    return flow, k / k.sum(axis=1, keepdims=True), observed


@pytest.mark.parametrize("asymmetry", [0.3, 1.0, 5.0])
@pytest.mark.slow
def test_neutreno_limit_of_an_asymmetric_average_with_complex_eigenvalues(asymmetry: float) -> None:
    average = asymmetric(0.5, asymmetry)[1]
    values = np.linalg.eigvals(average)
    assert np.abs(values.imag).max() > 0.1

    def radius(fidelity: float) -> float:
        return float(np.abs(values - fidelity).max())

    low, high = 1e-3, 2.0
    assert radius(low) < 1 < radius(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if radius(middle) < 1 else (low, middle)
    below, above = 0.97 * low, 1.03 * low
    with pytest.raises(StabilityError, match=rf"^fidelity: got {above:g}, .*the longest stable step is 0\.9"):
        nl.solve(asymmetric(above, asymmetry)[0], t=2, integrator=nl.NeutrenoStep())
    nl.NeutrenoStep().check(asymmetric(low * (1 - 1e-6), asymmetry)[0])
    flow, _, observed = asymmetric(below, asymmetry)
    limit = np.linalg.solve((1 + below) * np.eye(11) - average, below * observed)
    steps = int(np.ceil(np.log(1e-10) / np.log(radius(below))))
    final = nl.solve(flow, 10 * observed, t=steps, integrator=nl.NeutrenoStep()).final
    np.testing.assert_allclose(final, limit, rtol=0, atol=1e-6)
    wild = nl.solve(asymmetric(above, asymmetry)[0], t=2000, integrator=unchecked(nl.NeutrenoStep())).final
    assert np.abs(wild).max() > 1e3


def test_semi_implicit_with_an_asymmetric_average() -> None:
    flow, average, observed = asymmetric(0.5, 5.0)
    assert nl.SemiImplicit(1.0).stability_limit(flow) == 1.0
    with pytest.raises(StabilityError, match=r"^dt: got 1.01, .*dt < 1; reduce dt"):
        nl.SemiImplicit(1.01).check(flow)
    final = nl.solve(flow, t=100, integrator=nl.SemiImplicit(1.0)).final
    np.testing.assert_allclose(final, np.linalg.solve(1.5 * np.eye(11) - average, 0.5 * observed), rtol=0, atol=1e-13)


@pytest.mark.parametrize("fidelity", [0.0, 0.5])
@pytest.mark.slow
def test_explicit_steps_with_an_asymmetric_average(fidelity: float) -> None:
    flow, average, observed = asymmetric(fidelity, 5.0)
    values = np.linalg.eigvals((1 + fidelity) * np.eye(11) - average)
    values = values[np.abs(values) > 1e-12]
    limit = float((2 * values.real / np.abs(values) ** 2).min())
    with pytest.raises(StabilityError, match=rf"dt < {limit:.6g}"):
        nl.ExplicitEuler(limit * (1 + 1e-6)).check(flow)
    final = nl.solve(flow, observed, t=5000.0, integrator=nl.ExplicitEuler(0.9 * limit), energies=False).final
    assert np.abs(final).max() <= np.abs(observed).max() * 3
    assert np.linalg.norm(flow.velocity(final)) < 1e-6
    # The fixed Runge-Kutta step is allowed the same disc, stretched to its reach on the real axis.
    with pytest.raises(StabilityError, match=rf"dt < {1.65 * limit:.6g}"):
        nl.RungeKutta(dt=1.65 * limit * (1 + 1e-6), adaptive=False).check(flow)
    pair = nl.RungeKutta(dt=1.64 * limit, adaptive=False)
    assert np.linalg.norm(flow.velocity(nl.solve(flow, observed, t=5000.0, integrator=pair).final)) < 1e-6
