"""Kernels that follow the signal: every integrator has its order, against SciPy's solution of u' = P(u) u - u."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.integrate import RK45, solve_ivp

import nlflow as nl
from nlflow.errors import InputError
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import FixedStep, Integrator
from tests.problems import Floats, gaussian_matrix, torch_on_one_thread, unchecked
from tests.reference import patch_matrix

N, WIDTH, STRENGTH, T = 12, 1.0, 0.1, 2.0
RNG = np.random.default_rng(0)
START, OBSERVED = RNG.standard_normal((2, N, 3))
WEIGHTS = RNG.uniform(0.05, 0.2, N)
QUERY, KEY = 0.3 * RNG.standard_normal((2, 3, 2))
POINTS = nl.Points(np.arange(float(N)), WEIGHTS)

Velocity = Callable[[Floats], Floats]


def gaussian(u: Any = START, domain: Any = POINTS, **options: Any) -> nl.Affinity:
    return nl.affinity(nl.Gaussian(width=WIDTH), domain, u, **options)


def plain_velocity(metric: str, measure: str | None = None) -> Velocity:
    """Return u -> d (P(u) u - u) + phi(u) (f - u) from a matrix that is written out; K = k + k^T = 2k."""

    def velocity(u: Floats) -> Floats:
        both = 2 * gaussian_matrix(u, WIDTH) * WEIGHTS
        degree = both.sum(axis=1, keepdims=True)
        moved = both @ u - degree * u
        if measure is not None:
            moved += STRENGTH * (degree if measure == "degree" else 1.0) * (OBSERVED - u)
        return np.asarray(moved if metric == "l2" else moved / degree)

    return velocity


def attention_velocity(u: Floats) -> Floats:
    k = np.exp((u @ QUERY) @ (u @ KEY).T / math.sqrt(2)) * WEIGHTS
    return np.asarray(k @ u / k.sum(axis=1, keepdims=True) - u + STRENGTH * (OBSERVED - u))


@dataclass(frozen=True)
class Case:
    make: Callable[..., Flow]
    velocity: Velocity

    @cache  # noqa: B019  # few cases, which live as long as the tests
    def exact(self, t: float = T) -> Floats:
        """u(t) by SciPy's integrator of order 8."""
        found = solve_ivp(
            lambda _, u: self.velocity(u.reshape(START.shape)).ravel(), (0, t), START.ravel(), method="DOP853",
            rtol=1e-13, atol=1e-14,
        )  # fmt: skip
        return np.asarray(found.y[:, -1].reshape(START.shape))

    def error(self, integrator: Integrator, t: float = T, **options: Any) -> float:
        found = nl.solve(self.make(**options), START, t=t, integrator=integrator, energies=False)
        assert found.success, found.message
        return float(np.abs(found.final - self.exact(t)).max())


def flow(metric: str, measure: str | None = None, **options: Any) -> nl.GradientFlow:
    functional = nl.J(gaussian()) if measure is None else nl.E(gaussian(), OBSERVED, STRENGTH, measure=measure)
    return nl.GradientFlow(functional, metric, **{"evolving": True, **options})


def attention(**options: Any) -> nl.AttentionFlow:
    kernel = nl.ExpDotProduct(query_map=QUERY, key_map=KEY)
    return nl.AttentionFlow(nl.affinity(kernel, POINTS, START), OBSERVED, STRENGTH, **{"evolving": True, **options})


CASES = {
    "J, L2": Case(lambda **o: flow("l2", **o), plain_velocity("l2")),
    "J, degree": Case(lambda **o: flow("degree", **o), plain_velocity("degree")),
    "E, L2": Case(lambda **o: flow("l2", "l2", **o), plain_velocity("l2", "l2")),
    "E, degree": Case(lambda **o: flow("degree", "degree", **o), plain_velocity("degree", "degree")),
    "E, degree, weighted by w": Case(lambda **o: flow("degree", "l2", **o), plain_velocity("degree", "l2")),
    "attention": Case(attention, attention_velocity),
}


def order(case: Case, make: Callable[[float], Integrator], numbers: list[int], **options: Any) -> float:
    errors = [case.error(make(T / n), **options) for n in numbers]
    return -float(np.polyfit(np.log(numbers), np.log(errors), 1)[0])


class Midpoint(FixedStep):
    """The explicit midpoint rule, which knows nothing of kernels."""

    order = 2.0

    def stability_limit(self, flow: Flow) -> float:
        return nl.ExplicitEuler(self.dt).stability_limit(flow)

    def step(self, flow: Flow, u: Any, dt: float) -> Any:
        return u + dt * flow.velocity(u + dt / 2 * flow.velocity(u))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(2)
def test_errors_stay_within_ten_times_the_tolerance(name: str) -> None:
    for rtol in (1e-3, 1e-6, 1e-9):
        assert CASES[name].error(nl.RungeKutta(rtol, rtol * 1e-3)) <= 10 * rtol


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("make", "numbers", "within"),
    [
        (lambda dt: nl.RungeKutta(dt=dt, adaptive=False), [48, 64], 0.2),
        (Midpoint, [64, 128], 0.1),
        (nl.ExplicitEuler, [64, 128], 0.1),
        (nl.SemiImplicit, [64, 128], 0.1),
    ],
    ids=["RungeKutta", "own", "ExplicitEuler", "SemiImplicit"],
)
def test_order(make: Callable[[float], Integrator], numbers: list[int], within: float, name: str) -> None:
    declared = make(0.1).order_for(CASES[name].make())
    assert order(CASES[name], make, numbers) == pytest.approx(declared, abs=within)


@pytest.mark.parametrize("make", [lambda dt: nl.RungeKutta(dt=dt, adaptive=False), nl.ExplicitEuler], ids=["RK", "Eu"])
def test_a_kernel_that_is_held_for_some_steps_is_of_order_1_and_says_so(make: Callable[[float], Integrator]) -> None:
    case = CASES["J, degree"]
    assert make(0.1).order_for(case.make(every=2)) == 1.0
    assert order(case, make, [64, 128], every=2) == pytest.approx(1.0, abs=0.1)


def test_solutions_say_the_order_that_they_have() -> None:
    def stated(flow: Flow, integrator: Integrator | None = None) -> float:
        return float(nl.solve(flow, START, t=1, integrator=integrator).stats["order"])

    assert stated(flow("degree")) == 5.0
    assert stated(flow("degree", every=2)) == 1.0
    assert stated(flow("degree", evolving=False)) == math.inf
    assert stated(flow("degree"), nl.AttentionStep()) == 1.0


def test_layers_are_euler_steps_of_length_one() -> None:
    for case, layer in ((CASES["J, degree"], nl.AttentionStep()), (CASES["attention"], nl.NeutrenoStep())):
        u = START
        for _ in range(3):
            u = u + case.velocity(u)
        got = nl.solve(case.make(), START, t=3, integrator=layer).final
        np.testing.assert_allclose(got, u, rtol=0, atol=1e-13)


def test_the_kernel_at_the_start_is_that_of_the_start() -> None:
    """Features only say what is compared: a flow built from others is the same flow."""
    other = nl.GradientFlow(nl.J(gaussian(START[::-1] + 1)), "degree", evolving=True)
    for integrator in (nl.RungeKutta(), nl.ExplicitEuler(0.1), nl.SemiImplicit(0.1), nl.AttentionStep()):
        one = nl.solve(other, START, t_eval=[0.0, 1.0], integrator=integrator)
        two = nl.solve(flow("degree"), START, t_eval=[0.0, 1.0], integrator=integrator)
        assert np.array_equal(one.u, two.u)
        assert np.array_equal(one.energy, two.energy)


def test_energies_and_speeds_are_those_of_the_signal() -> None:
    case = CASES["J, L2"]
    found = nl.solve(case.make(), START, t_eval=[0.0, 1.0, T], integrator=nl.RungeKutta(1e-3))
    for u, energy in zip(found.u, found.energy, strict=True):
        squares = ((u[:, None] - u[None]) ** 2).sum(axis=2)
        k = gaussian_matrix(u, WIDTH)
        assert energy == pytest.approx((WEIGHTS[:, None] * WEIGHTS * k * squares).sum() / 2, rel=1e-12)
        speed = np.sqrt((WEIGHTS[:, None] * case.velocity(u) ** 2).sum() / WEIGHTS.sum())
        assert case.make().speed(u) == pytest.approx(speed, rel=1e-12)


# --- what a step costs, rejected steps, and going on --------------------------------------------------------------


def test_averages_and_kernels_are_counted() -> None:
    """One average at the start and six a step, each with a kernel of its own; the last is the next step's first."""
    evolving, built = flow("degree"), []

    class Counted(nl.GradientFlow):
        def rebuilt(self, u: Any) -> Any:
            built.append(1)
            return super().rebuilt(u)

    counted = Counted(evolving.functional, "degree", evolving=True)
    stats = nl.solve(counted, START, t=T, integrator=nl.RungeKutta(1e-6, 1e-9, dt=T), energies=False).stats
    assert stats["rejected"] >= 1
    tried = stats["steps"] + stats["rejected"]
    assert stats["applications"] == 1 + 6 * tried == len(built)
    built.clear()
    assert nl.solve(counted, START, t=1.0, integrator=nl.ExplicitEuler(0.1), energies=False).stats["applications"] == 10
    assert len(built) == 11


def test_rejected_steps_leave_no_trace() -> None:
    one = nl.solve(flow("degree"), START, t=T, integrator=nl.RungeKutta(1e-6, dt=50.0))
    assert one.stats["rejected"] >= 1
    assert np.abs(one.final - CASES["J, degree"].exact()).max() <= 1e-5


def test_stages_without_a_kernel_are_rejected() -> None:
    """The stages of a step that is much too long have logits that overflow."""
    start = START.astype(np.float32)

    def velocity(u: Floats) -> Floats:
        k = np.exp(u @ u.T) * WEIGHTS
        return np.asarray(k @ u / k.sum(axis=1, keepdims=True) - u)

    far = nl.AttentionFlow(nl.affinity(nl.ExpDotProduct(scale=1.0), POINTS, start), evolving=True)
    stop = nl.Callback(lambda t, u, now: t > 0)
    found = nl.solve(far, start, t=1e9, integrator=nl.RungeKutta(1e-4, dt=1e9), trackers=[stop])
    assert found.success, found.message
    assert found.stats["rejected"] > 5
    assert np.abs(found.final - Case(lambda: far, velocity).exact(float(found.t[-1]))).max() <= 1e-3
    failed = nl.solve(far, start, t=1e9, integrator=unchecked(nl.RungeKutta(dt=1e9, adaptive=False)))
    assert failed.status is nl.Status.STEP_FAILED
    assert re.match(r"a stage of the step from t=0 failed: .*; reduce dt", failed.message)


@pytest.mark.parametrize("every", [1, 3])
def test_resumed_runs_have_the_same_bits(every: int, tmp_path: Path) -> None:
    def run(**options: Any) -> nl.Solution:
        integrator = nl.RungeKutta(1e-6, 1e-9, dt=1.0)
        return nl.solve(
            flow("degree", "degree", every=every), 2 * START, t_eval=[0.5, T], integrator=integrator, **options
        )

    whole, path = run(), tmp_path / "checkpoint"
    for steps in (1, 2, 4):
        calls = itertools.count()
        stop = nl.Callback(lambda t, u, now, calls=calls, last=steps: next(calls) >= last)
        run(trackers=[stop, nl.Checkpoint(path)], resume=path if path.exists() else None)
        resumed = run(resume=path)
        assert np.array_equal(resumed.u, whole.u)
        assert np.array_equal(resumed.energy, whole.energy)


# --- structures ------------------------------------------------------------------------------------------------------


def scipy_step(velocity: Velocity, u: Floats, h: float) -> Floats:
    """One step of Dormand and Prince's pair by SciPy, whose tolerance refuses nothing."""
    stepper = RK45(
        lambda _, y: velocity(y.reshape(u.shape)).ravel(), 0.0, u.ravel(), h, first_step=h, rtol=1e3, atol=1e3
    )
    stepper.step()
    assert stepper.t == h
    return np.asarray(stepper.y.reshape(u.shape))


def one_step(flow: Flow, u: Any, h: float) -> Any:
    return nl.solve(flow, u, t=h, integrator=nl.RungeKutta(dt=h, adaptive=False)).final


def test_patch_kernels() -> None:
    grid, kernel = nl.Grid((4, 5), boundary="reflect"), nl.Patch(1.0, patch_size=3, search_radius=1, spatial_width=2.0)
    image = RNG.standard_normal(grid.shape)

    def velocity(u: Floats) -> Floats:
        k = patch_matrix(kernel, grid, u)
        return np.asarray((k @ u.ravel() / k.sum(axis=1)).reshape(u.shape) - u)

    evolving = nl.GradientFlow(nl.J(nl.affinity(kernel, grid, image)), "degree", evolving=True)
    np.testing.assert_allclose(one_step(evolving, image, 0.5), scipy_step(velocity, image, 0.5), rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", ["dense", "tiled"])
def test_tensors_with_masks(method: str) -> None:
    torch = torch_on_one_thread()
    u = torch.from_numpy(START)
    causal = nl.affinity(nl.ExpDotProduct(), POINTS, u, mask=nl.Mask(causal=True), method=method)

    def velocity(v: Floats) -> Floats:
        k = np.tril(np.exp(v @ v.T / math.sqrt(3))) * WEIGHTS
        return np.asarray(k @ v / k.sum(axis=1, keepdims=True) - v)

    got = one_step(nl.AttentionFlow(causal, evolving=True), u, 0.5)
    assert isinstance(got, torch.Tensor)
    np.testing.assert_allclose(got.numpy(), scipy_step(velocity, START, 0.5), rtol=0, atol=1e-13)


def test_items_of_a_batch_are_flows_of_their_own() -> None:
    batch, u = nl.Batch(POINTS, 2), np.stack([START, OBSERVED])
    evolving = nl.GradientFlow(nl.J(gaussian(u, batch)), "degree", evolving=True)
    got = one_step(evolving, u, 0.5)
    for item, start in zip(got, u, strict=True):
        expected = scipy_step(plain_velocity("degree"), start, 0.5)
        np.testing.assert_allclose(item, expected, rtol=0, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("integrator", [Midpoint(0.2), nl.SemiImplicit(0.2)], ids=["own", "SemiImplicit"])
def test_derivatives_are_those_of_the_steps_of_solve(integrator: Integrator, every: int) -> None:
    torch = torch_on_one_thread()
    from nlflow.flows import derivatives

    def final(u: Any) -> Any:
        functional = nl.E(nl.affinity(nl.Gaussian(width=WIDTH), POINTS, u.detach()), torch.from_numpy(OBSERVED), 0.4)
        return derivatives.run(nl.GradientFlow(functional, "degree", evolving=True, every=every), u, integrator, 4)

    u = torch.from_numpy(START).clone().requires_grad_()
    arrays = nl.GradientFlow(nl.E(gaussian(), OBSERVED, 0.4), "degree", evolving=True, every=every)
    expected = nl.solve(arrays, START, t=0.8, integrator=integrator).final
    np.testing.assert_allclose(final(u).detach().numpy(), expected, rtol=0, atol=1e-13)
    assert torch.autograd.gradcheck(final, (u,), fast_mode=True)


# --- a velocity that is more -----------------------------------------------------------------------------------------


class Reaction(nl.GradientFlow):
    """The E-flow with a reaction, du/dt = P u - u + lambda (f - u) + u - u^3."""

    def velocity(self, u: Any) -> Any:
        return super().velocity(u) + u - u**3


class Drift(nl.AttentionFlow):
    """An attention flow with the wind, said in both ways that integrators ask for."""

    def velocity(self, u: Any) -> Any:
        return -self.at(u).diffusion(u)

    def diffusion(self, v: Any) -> Any:
        return self._times_rate(v - self.average(v)) - 0.1 * (np.roll(v, 1, axis=0) - v)


def reaction(evolving: bool, fidelity: bool = True) -> Reaction:
    functional = nl.E(gaussian(), OBSERVED, STRENGTH, measure="degree") if fidelity else nl.J(gaussian())
    return Reaction(functional, "degree", evolving=evolving)


@pytest.mark.slow
@pytest.mark.parametrize("evolving", [False, True])
@pytest.mark.parametrize("integrator", [None, nl.RungeKutta(1e-9, 1e-12)], ids=["default", "RungeKutta"])
def test_reactions_are_integrated(integrator: Integrator | None, evolving: bool) -> None:
    frozen = 2 * gaussian_matrix(START, WIDTH) * WEIGHTS

    def velocity(u: Floats) -> Floats:
        if evolving:
            return np.asarray(plain_velocity("degree", "degree")(u) + u - u**3)
        linear = frozen @ u / frozen.sum(axis=1, keepdims=True) - u + STRENGTH * (OBSERVED - u)
        return np.asarray(linear + u - u**3)

    solution = nl.solve(reaction(evolving), START, t=T, integrator=integrator, energies=False)
    assert solution.stats["integrator"].startswith("RungeKutta")
    exact = Case(lambda: None, velocity).exact()
    np.testing.assert_allclose(solution.final, exact, rtol=0, atol=1e-8 if integrator else 1e-5)
    euler = Case(lambda: reaction(evolving), velocity)
    assert order(euler, nl.ExplicitEuler, [64, 128]) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("integrator", "fidelity", "piece"),
    [
        (nl.Exponential(), True, "linear"),
        (nl.SemiImplicit(0.1), True, "diffusion"),
        (nl.NeutrenoStep(), True, "average"),
        (nl.AttentionStep(), False, "average"),
    ],
    ids=str,
)
def test_integrators_refuse_what_they_would_leave_out(integrator: Integrator, fidelity: bool, piece: str) -> None:
    message = (
        rf"^integrator: {type(integrator).__name__} is made of .*{piece}\(\), got a Reaction, whose velocity\(\) .*"
    )
    with pytest.raises(InputError, match=message + r"use RungeKutta\(\) or ExplicitEuler\(dt\)"):
        nl.solve(reaction(False, fidelity), START, t=1, integrator=integrator)
    own = nl.GradientFlow(nl.J(gaussian()), "degree")
    vars(own)["velocity"] = lambda u: 0 * u
    with pytest.raises(InputError, match=r"whose velocity\(\) says more"):
        integrator.check(own)


def test_limits_of_reactions_are_refused() -> None:
    with pytest.raises(InputError, match=r"^flow: got a Reaction whose velocity\(\) is overridden"):
        nl.equilibrium(reaction(False))


def test_pieces_that_are_overridden_together_are_taken() -> None:
    drift = Drift(gaussian())
    assert [drift.more_than(piece) for piece in ("average", "diffusion", "linear")] == ["velocity", None, "velocity"]
    nl.SemiImplicit(0.1).check(drift)
    assert flow("degree").more_than("average") is None


def test_a_method_on_the_object_goes_before_those_of_its_class() -> None:
    class Doubled(nl.GradientFlow):
        def linear(self, v: Any) -> Any:
            return 2 * super().linear(v)

    own = Doubled(nl.J(gaussian()))
    assert own.more_than("linear") is None
    own.velocity = lambda u: -own.linear(u)  # type: ignore[method-assign]
    assert own.more_than("linear") == "velocity"


class Decay(nl.GradientFlow):
    """du/dt = P u - u - u / 2, said where the operator is."""

    def diffusion(self, v: Any) -> Any:
        return super().diffusion(v) + v / 2

    def spectral_bounds(self) -> tuple[float, float]:
        low, high = super().spectral_bounds()
        return low + 0.5, high + 0.5


def test_operators_of_ones_own_are_exponentiated_with_their_mean() -> None:
    decay = Decay(nl.J(gaussian()), "degree")
    assert not decay.conserves_mean
    k = gaussian_matrix(START, WIDTH) * WEIGHTS
    moves = k / k.sum(axis=1, keepdims=True)
    exact = Case(lambda: decay, lambda u: moves @ u - 1.5 * u).exact()
    for integrator in (None, nl.RungeKutta(1e-11, 1e-13)):
        found = nl.solve(decay, START, t=T, integrator=integrator, energies=False)
        assert found.stats["order"] == (5.0 if integrator else math.inf)
        np.testing.assert_allclose(found.final, exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("make", [lambda: reaction(True), lambda: Drift(gaussian(), evolving=True)])
def test_subclasses_stay_what_they_are_when_their_kernel_is_rebuilt(make: Callable[[], Any]) -> None:
    one = make()
    one.note = "kept"
    two = one.rebuilt(2 * START)
    assert type(two) is type(one)
    assert two.note == "kept"
    two.average(START)
    assert one.applications == two.applications == 1
