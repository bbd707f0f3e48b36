"""Reactions and sources: exact solutions, orders, energies that fall, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp

import nlflow as nl
from nlflow.errors import InputError, StabilityError
from nlflow.flows import derivatives
from nlflow.flows.integrators import FixedStep
from tests.problems import Floats, torch_on_one_thread

GRID = nl.Grid(24, spacing=1 / 24, boundary="reflect")
X = GRID.nodes[:, 0]
WEIGHTS = nl.affinity(nl.Gaussian(width=0.1), GRID, method="dense")
START = 0.5 + 0.4 * np.cos(5 * X**2)
F = np.sin(3 * X)
ROUNDING = 1e-15  # of energies, which are of order 1


def wave(t: float, x: Floats) -> Floats:
    return np.sin(2 * t) * np.cos(3 * x[:, 0])


def moving(t: float) -> Floats:
    return F * np.cos(t)


def energy(fidelity: float = 0.4, measure: str = "degree") -> nl.E:
    return nl.E(WEIGHTS, F, fidelity, measure=measure)


FLOWS: dict[str, Callable[[], Any]] = {
    "reaction": lambda: nl.GradientFlow(energy(measure="l2"), "l2", reaction=nl.AllenCahn(3.0)),
    "reaction, degree": lambda: nl.GradientFlow(nl.J(WEIGHTS), "degree", reaction=nl.FisherKPP(6.0)),
    "array": lambda: nl.GradientFlow(energy(2.0), "degree", source=F),
    "source": lambda: nl.GradientFlow(energy(4.0), "degree", source=wave),
    "observed": lambda: nl.GradientFlow(energy(2.0), "degree", observed=moving),
    "all": lambda: nl.GradientFlow(energy(), "degree", reaction=nl.AllenCahn(2.0), source=wave, observed=moving),
    "attention": lambda: nl.AttentionFlow(WEIGHTS, moving, 0.5, reaction=nl.FisherKPP(4.0), source=lambda t: t * F),
}


def rates(flow: Any) -> Callable[[float, Floats], Floats]:
    """Return du/dt of (t, u), written from the formulas."""
    terms = flow.terms
    matrix = np.array([flow.affinity.average(row) for row in np.eye(24)]).T
    rate = np.exp(flow.affinity.log_degree) if flow.metric == "l2" else np.ones(24)

    def rate_of(t: float, u: Floats) -> Floats:
        result = rate * (matrix @ u - u)
        if flow.fidelity is not None:
            f = moving(t) if terms.observed is not None else F
            result = result + np.asarray(flow.fidelity.values) * (f - u)
        if isinstance(terms.reaction, nl.AllenCahn):
            result = result + terms.reaction.strength * (u - u**3)
        if isinstance(terms.reaction, nl.FisherKPP):
            result = result + terms.reaction.rate * (u - u**2)
        if terms.source is not None:
            g = F if not terms.source.timed else t * F if isinstance(flow, nl.AttentionFlow) else wave(t, X[:, None])
            result = result + g
        return np.asarray(result)

    return rate_of


def reference(flow: Any, t: float) -> Floats:
    found = solve_ivp(rates(flow), (0, t), START, method="DOP853", rtol=3e-14, atol=1e-16)
    return np.asarray(found.y[:, -1])


def slope(flow: Any, integrator: Callable[[float], Any], steps: list[float], expected: Floats) -> float:
    errors = [np.abs(nl.solve(flow, START, t=1.0, integrator=integrator(dt)).final - expected).max() for dt in steps]
    return float(np.polyfit(np.log(steps), np.log(errors), 1)[0])


# Numbers of steps at which the first term of the error outweighs the others, and rounding.
INTEGRATORS: dict[str, tuple[Callable[[float], Any], list[int]]] = {
    "euler": (nl.ExplicitEuler, [100, 150, 200]),
    "rk": (lambda dt: nl.RungeKutta(dt=dt, adaptive=False), [48, 56, 64]),
    "etd 2": (nl.ETD2RK, [64, 96, 128]),
    "etd 4": (nl.ETD4RK, [64, 80, 96]),
}


@pytest.mark.numerical
@pytest.mark.sampled(10)
@pytest.mark.parametrize("integrator", INTEGRATORS)
@pytest.mark.parametrize("name", FLOWS)
def test_orders(name: str, integrator: str) -> None:
    flow = FLOWS[name]()
    make, numbers = INTEGRATORS[integrator]
    if name == "array" and "etd" in integrator:  # nothing is left but the linear part, which is exact
        expected = reference(flow, 1.0)
        assert np.abs(nl.solve(flow, START, t=1.0, integrator=make(0.25)).final - expected).max() < 1e-12
        return
    assert slope(flow, make, [1 / n for n in numbers], reference(flow, 1.0)) == pytest.approx(make(1.0).order, abs=0.1)


@pytest.mark.numerical
@pytest.mark.parametrize("name", FLOWS)
def test_tolerances_are_met(name: str) -> None:
    flow = FLOWS[name]()
    found = nl.solve(flow, START, t=1.0, integrator=nl.RungeKutta(1e-9, 1e-11))
    assert found.success
    assert np.abs(found.final - reference(flow, 1.0)).max() < 1e-8
    # The slope at the end of a step is that at the start of the next, also where it depends on time.
    steps = found.stats["steps"] + found.stats["rejected"]
    assert found.stats["applications"] == 6 * steps + 1


@pytest.mark.slow
@pytest.mark.numerical
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.sampled(2)
def test_logistic_growth(kind: str, dtype: str) -> None:
    """Constants do not diffuse, so u' = u (1 - u), with the dtype and kind of the start."""
    start: Any = np.full(24, 0.1, dtype)
    weights, tolerance = WEIGHTS, 1e-6 if dtype == "float32" else 1e-10
    if kind == "torch":
        torch = torch_on_one_thread()
        start = torch.asarray(start)
        weights = nl.affinity(nl.Gaussian(width=0.1), nl.Points(X), torch.asarray(X[:, None], dtype=start.dtype))
    flow = nl.GradientFlow(nl.J(weights), "degree", reaction=nl.FisherKPP())
    exact = 1 / (1 + 9 * np.exp(-3.0))
    for integrator in (nl.RungeKutta(tolerance, tolerance), nl.ETD4RK(3e-2 if dtype == "float32" else 1e-2)):
        final = nl.solve(flow, start, t=3.0, integrator=integrator).final
        assert type(final) is type(start)
        assert final.dtype == start.dtype
        assert np.abs(np.asarray(final) - exact).max() < 20 * tolerance


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["l2", "degree"])
def test_allen_cahn_descends_and_keeps_its_range(metric: str) -> None:
    flow = nl.GradientFlow(nl.J(WEIGHTS), metric, reaction=nl.AllenCahn(4.0))
    start = np.random.default_rng(3).uniform(-1, 1, 24)
    times = np.linspace(0, 4, 40)
    # Theory asks for dt (d + 2 s) <= 1 for the range.
    step = 1 / (8.0 + (float(np.max(flow.affinity.degree)) if metric == "l2" else 1.0))
    for integrator in (nl.ExplicitEuler(step), nl.RungeKutta(1e-8, 1e-10), nl.ETD2RK(0.1), nl.ETD4RK(0.1)):
        found = nl.solve(flow, start, t_eval=times, integrator=integrator, trackers=[nl.Energy()])
        assert np.all(np.diff(found.energy) <= ROUNDING)
        assert found.energy[0] - found.energy[-1] > 0.1
        assert np.all(np.diff(found.records["energy"]["value"]) <= ROUNDING)
        assert np.abs(found.u).max() <= 1 + 1e-12


@pytest.mark.numerical
@pytest.mark.parametrize("name", ["reaction", "reaction, degree", "array", "all", "attention"])
def test_velocity_is_minus_the_gradient_of_the_energy(name: str) -> None:
    flow = FLOWS[name]().when(0.3)
    measure = flow.functional.affinity.measure(flow.metric, START)
    if flow.metric == "degree":
        measure = measure * np.exp(flow.functional.affinity.log_total())
    v = np.random.default_rng(5).standard_normal(24)
    h = 1e-5
    change = (flow.energy(START + h * v) - flow.energy(START - h * v)) / (2 * h)
    assert change == pytest.approx(-np.sum(measure * flow.velocity(START) * v), rel=1e-7)


@pytest.mark.numerical
def test_energies_belong_to_their_time() -> None:
    found = nl.solve(FLOWS["observed"](), START, t_eval=[0.0, 0.5, 1.0])
    for t, u, value in zip(found.t, found.u, found.energy, strict=True):
        assert value == pytest.approx(nl.E(WEIGHTS, moving(t), 2.0, measure="degree").value(u), rel=1e-12)
    assert np.array_equal(nl.solve(FLOWS["observed"](), t=0.0).final, F)  # f(0) is where it starts


def test_evolving_kernels() -> None:
    """With a constant signal every kernel averages it to itself."""
    affinity = nl.affinity(nl.Gaussian(width=0.5), nl.Points(X), START[:, None])
    flow = nl.GradientFlow(nl.J(affinity), "degree", evolving=True, reaction=nl.FisherKPP(), source=lambda t: 0 * X)
    found = nl.solve(flow, np.full(24, 0.1), t=1.0, integrator=nl.RungeKutta(1e-9, 1e-11))
    assert found.final == pytest.approx(1 / (1 + 9 * np.exp(-1.0)), abs=1e-8)
    euler = nl.solve(flow, START, t=0.2, integrator=nl.ExplicitEuler(0.1)).final
    u = START
    for _ in range(2):
        averaged = affinity.update(u).symmetrized().average(u)
        u = u + 0.1 * (averaged - u + u * (1 - u))
    assert euler == pytest.approx(u, abs=1e-14)


def test_steps_above_the_limit_are_refused() -> None:
    plain = nl.GradientFlow(nl.J(WEIGHTS), "degree")
    flow = nl.GradientFlow(nl.J(WEIGHTS), "degree", reaction=nl.AllenCahn(50.0))
    rho = 2 / nl.ExplicitEuler(1.0).stability_limit(plain)
    limit = nl.ExplicitEuler(1.0).stability_limit(flow)
    assert limit == pytest.approx(2 / (rho + 100.0), rel=1e-12)
    ends = np.full(24, 0.999)
    stable = nl.solve(flow, ends, t=200 * limit, integrator=nl.ExplicitEuler(0.999 * limit)).final
    assert np.abs(stable - 1).max() < 1e-3
    fixed = nl.RungeKutta(dt=1.7 * limit, adaptive=False)
    for integrator in (nl.ExplicitEuler(1.01 * limit), fixed):
        with pytest.raises(StabilityError, match="dt: got"):
            nl.solve(flow, ends, t=1.0, integrator=integrator)


@pytest.mark.parametrize("name", ["array", "reaction, degree", "observed"])
@pytest.mark.parametrize(
    "integrator", [nl.SemiImplicit(), nl.AttentionStep(), nl.NeutrenoStep(), nl.Exponential()], ids=repr
)
def test_integrators_refuse_terms_by_name(name: str, integrator: Any) -> None:
    flow = FLOWS[name]() if name != "observed" else nl.GradientFlow(energy(), "degree", observed=moving)
    words = {"array": "source g", "reaction, degree": "reaction FisherKPP.0, 1", "observed": "observed signal f.t"}
    kind = type(integrator).__name__
    with pytest.raises(InputError, match=rf"integrator: {kind} .* would leave out the {words[name]}.*use RungeKutta"):
        nl.solve(flow, START, t=1.0, integrator=integrator)


def test_integrators_that_do_not_know_time_refuse_it() -> None:
    class Midpoint(FixedStep):
        order = 2.0

        def stability_limit(self, flow: Any) -> float:
            return 1.0

        def step(self, flow: Any, u: Any, dt: float) -> Any:
            return u + dt * flow.when(flow.time + dt / 2).velocity(u + dt / 2 * flow.velocity(u))

    flow = FLOWS["all"]()
    with pytest.raises(InputError, match="Midpoint does not say that it takes terms that depend on time"):
        nl.solve(flow, START, t=1.0, integrator=Midpoint(0.1))
    assert nl.solve(FLOWS["reaction"](), START, t=0.2, integrator=Midpoint(0.1)).success
    Midpoint.takes_time = True
    assert slope(flow, Midpoint, [1 / 8, 1 / 12, 1 / 16], reference(flow, 1.0)) == pytest.approx(2, abs=0.1)


def test_limits_and_derivatives_refuse_terms() -> None:
    flow = FLOWS["reaction, degree"]()
    with pytest.raises(InputError, match="GradientFlow"):
        nl.equilibrium(flow, START)
    assert not flow.conserves_mean
    torch = torch_on_one_thread()
    points = torch.asarray(X[:, None])
    weights = nl.affinity(nl.Gaussian(width=0.1), nl.Points(X), points)
    u = torch.asarray(START).requires_grad_()
    flow = nl.GradientFlow(nl.J(weights), "degree", reaction=nl.FisherKPP())
    derivatives.run(flow, u, nl.ExplicitEuler(0.1), 3).sum().backward()
    h = torch.zeros_like(u).detach()
    h[4] = 1e-6
    ends = [derivatives.run(flow, u.detach() + s * h, nl.ExplicitEuler(0.1), 3).sum() for s in (1, -1)]
    assert float(u.grad[4]) == pytest.approx(float(ends[0] - ends[1]) / 2e-6, rel=1e-6)
    timed = nl.GradientFlow(nl.J(weights), "degree", source=lambda t: torch.asarray(START) * t)
    with pytest.raises(InputError, match="depend on time"):
        derivatives.run(timed, u, nl.ExplicitEuler(0.1), 3)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "integrator", [nl.ExplicitEuler(0.1), nl.RungeKutta(1e-6, 1e-9, dt=0.7), nl.ETD4RK(0.1)], ids=repr
)
def test_resumed_runs_have_the_bits_of_whole_ones(integrator: Any, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    times = [0.0, 0.35, 1.1]
    seen: list[tuple[float, float]] = []

    def look(t: float, u: Floats, flow: Any) -> None:
        seen.append((t, flow.time))  # what watches gets the flow of its moment

    whole = nl.solve(FLOWS["all"](), START, t_eval=times, integrator=integrator, trackers=[nl.Callback(look)])
    calls = iter(range(9))
    stop = nl.Callback(lambda *_: next(calls) == 3)
    nl.solve(FLOWS["all"](), START, t_eval=times, integrator=integrator, trackers=[stop, nl.Checkpoint(path)])
    again = {"t_eval": times, "integrator": integrator, "resume": path, "trackers": [nl.Callback(look)]}
    resumed = nl.solve(FLOWS["all"](), START, **again)
    assert all(t == time for t, time in seen)
    assert np.array_equal(resumed.u, whole.u)
    assert np.array_equal(resumed.energy, whole.energy)


OTHERS: dict[str, Callable[[], Any]] = {
    "another strength": lambda: nl.GradientFlow(nl.J(WEIGHTS), reaction=nl.AllenCahn(2.0), source=wave),
    "another reaction": lambda: nl.GradientFlow(nl.J(WEIGHTS), reaction=nl.FisherKPP(interval=(-1, 1)), source=wave),
    "no reaction": lambda: nl.GradientFlow(nl.J(WEIGHTS), source=wave),
    "another source": lambda: nl.GradientFlow(
        nl.J(WEIGHTS), reaction=nl.AllenCahn(), source=lambda t, x: 2 * wave(t, x)
    ),
    "a fixed source": lambda: nl.GradientFlow(nl.J(WEIGHTS), reaction=nl.AllenCahn(), source=F),
}


@pytest.mark.parametrize("other", OTHERS)
def test_checkpoints_of_other_terms_are_refused(other: str, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    flow = nl.GradientFlow(nl.J(WEIGHTS), reaction=nl.AllenCahn(), source=wave)
    nl.solve(flow, START, t=0.1, trackers=[nl.Checkpoint(path)])
    with pytest.raises(nl.FileFormatError, match="another problem"):
        nl.solve(OTHERS[other](), START, t=0.1, resume=path)


def test_checkpoints_of_another_fixed_source_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    nl.solve(nl.GradientFlow(nl.J(WEIGHTS), source=F), START, t=0.1, trackers=[nl.Checkpoint(path)])
    with pytest.raises(nl.FileFormatError, match="another problem"):
        nl.solve(nl.GradientFlow(nl.J(WEIGHTS), source=F + 1e-12), START, t=0.1, resume=path)


def test_a_step_belongs_to_its_own_time() -> None:
    """Also where nobody has brought the flow to that moment."""
    flow = FLOWS["source"]()
    for integrator in (nl.ExplicitEuler(0.1), nl.RungeKutta(dt=0.1, adaptive=False), nl.ETD2RK(0.1)):
        there = integrator.advance(flow.when(0.7), START, 0.7, 1.0, {})
        found = integrator.advance(flow, START, 0.7, 1.0, {})
        assert np.array_equal(found[0], there[0])
        assert found[1] == pytest.approx(0.8)
        assert not np.array_equal(found[0], integrator.advance(flow, START, 0.0, 1.0, {})[0])


def test_checkpoints_of_another_observed_signal_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    nl.solve(FLOWS["observed"](), START, t=0.1, trackers=[nl.Checkpoint(path)])
    other = nl.GradientFlow(energy(), "l2", observed=lambda t: F * np.cos(t + 1e-9 * t))
    with pytest.raises(nl.FileFormatError, match="another problem"):
        nl.solve(other, START, t=0.1, resume=path)
