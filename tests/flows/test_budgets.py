"""How often flows on a GPU wait for it: counted on a pretended one, on which results have the bits of the CPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow._array import Pending, fetch, numbers
from nlflow.errors import InputError, NumericalError
from nlflow.flows import Replayed, Status, derivatives, trackers
from nlflow.flows.integrators import FixedStep
from nlflow.testing import check_integrator

torch = pytest.importorskip("torch")

import tests.pretended as pretended  # noqa: E402

pytestmark = pytest.mark.on_cpu("puts tensors on the pretended GPU itself")

N = 48
POINTS = nl.Points(np.arange(float(N)))


def drawn(*shape: int, seed: int = 0, dtype: Any = None) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape)
    return torch.tensor(values, dtype=dtype or torch.float32)


def tiled(x: Any, kernel: Any = None) -> Any:
    return nl.affinity(kernel or nl.ExpDotProduct(), POINTS, x, method="tiled")


def j_flow(x: Any) -> Any:
    return nl.GradientFlow(nl.J(tiled(x)), "degree")


def attention_flow(x: Any) -> Any:
    heads, queries = nl.Batch(POINTS, 2), x.roll(1, 0)
    both = [torch.stack([one, one.flip(0)]) for one in (x, queries)]
    return nl.AttentionFlow(nl.affinity(nl.ExpDotProduct(), heads, both[0], queries=both[1]))


def masked_flow(x: Any) -> Any:
    present = np.ones((2, N), bool)
    present[1, N // 2 :] = False
    mask = nl.Mask(causal=True, present=present)
    both = torch.stack([x, x.flip(0)])
    return nl.AttentionFlow(nl.affinity(nl.ExpDotProduct(), nl.Batch(POINTS, 2), both, mask=mask))


def evolving_flow(x: Any) -> Any:
    return nl.AttentionFlow(tiled(x), evolving=True)


def reacting_flow(x: Any) -> Any:
    return nl.GradientFlow(nl.J(tiled(x)), "degree", reaction=nl.AllenCahn())


def sphere_flow(x: Any) -> Any:
    return nl.SphereFlow(nl.on_sphere(x), beta=1.0)


def counted(work: Callable[[Any], Any], *tensors: Any) -> tuple[Any, pretended.Counts]:
    """Return what comes of work on the pretended GPU, and its counts."""
    with pretended.gpu():
        there = [pretended.put(one) for one in tensors]
        with pretended.counting() as counts:
            found = work(*there)
    return found, counts


def run(make: Callable[[Any], Any], integrator: Any = None, t: float = 2.0, **options: Any) -> tuple[Any, Any]:
    """Return the solution of a flow that is built on the pretended GPU, and the counts of `solve` alone."""
    x = drawn(N, 4) / 4
    with pretended.gpu():
        there = pretended.put(x)
        flow = make(there)
        u = torch.stack([there, there.flip(0)]) if flow.affinity.domain.leading else there
        u = nl.on_sphere(there) if isinstance(flow, nl.SphereFlow) else u
        with pretended.counting() as counts:
            solution = nl.solve(flow, u, t=t, integrator=integrator, **options)
    assert solution.success, solution.message
    return solution, counts


STEPS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "J-flow, exact": (j_flow, lambda: None),
    "attention flow": (attention_flow, lambda: None),
    "masked items": (masked_flow, lambda: None),
    "kernel that follows": (evolving_flow, lambda: None),
    "sphere": (sphere_flow, lambda: None),
    "sphere, great circles": (sphere_flow, lambda: nl.GeodesicMidpoint(0.05)),
    "Euler": (j_flow, lambda: nl.ExplicitEuler(0.02)),
    "Runge-Kutta, one length": (attention_flow, lambda: nl.RungeKutta(dt=0.05, adaptive=False)),
    "exponential": (reacting_flow, lambda: nl.ETD2RK(0.02)),
    "exponential, of a mean": (j_flow, lambda: nl.ETD2RK(0.02)),
    "exponential, adaptive": (reacting_flow, lambda: nl.Adaptive(nl.ETD2RK(0.1), 1e-4, 1e-5)),
    "Euler, adaptive": (j_flow, lambda: nl.Adaptive(nl.ExplicitEuler(0.1), 1e-2, 1e-2)),
    "semi-implicit": (j_flow, lambda: nl.SemiImplicit(0.02)),
    "layers": (j_flow, lambda: nl.AttentionStep()),
}


SLOW = {"masked items", "sphere", "exponential", "exponential, adaptive", "Runge-Kutta, one length", "semi-implicit"}


def some(names: Any) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


@pytest.mark.parametrize("name", some(STEPS))
def test_the_device_is_asked_at_most_once_a_step(name: str) -> None:
    """By steps of one length once in 64; beside them twice: for the start, and at the end."""
    make, integrator = STEPS[name]
    solution, counts = run(make, integrator(), t=2.0)
    steps = solution.stats["steps"] + solution.stats["rejected"]
    method = integrator()
    each = steps if method is None or method.length is None else steps // 64
    beside = {"J-flow, exact": 1, "sphere": 5, "sphere, great circles": 4, "kernel that follows": 5}
    # For the start, and for the first step or the end; two for whether a reaction knows the values of the start.
    allowed = beside.get(name, 2) + (2 if make is reacting_flow else 0)
    assert counts.synchronizations <= each + allowed, str(counts)


@pytest.mark.parametrize("name", some(["attention flow", "exponential", "layers", "Euler", "Euler, adaptive"]))
def test_no_number_moves_from_step_to_step(name: str) -> None:
    make, integrator = STEPS[name]
    assert run(make, integrator(), t=1.0)[1].copies == run(make, integrator(), t=2.0)[1].copies <= 16


def system_flow(x: Any) -> Any:
    wide, narrow = (nl.J(tiled(x, nl.Gaussian(width))) for width in (0.3, 0.5))
    return nl.SystemFlow([wide, narrow, wide, narrow], np.diag([1.0, 2.0, 0.5, 1.0]))


def stretched_flow(x: Any) -> Any:
    stretched = nl.Anisotropic(nl.Gaussian(1.0), [1.0, 2.0, 1.0, 0.5])
    return nl.AttentionFlow(tiled(x, stretched), evolving=True)


# Flows that are made of what was given as NumPy arrays.
GIVEN: dict[str, Callable[[Any], Any]] = {
    "constraint": lambda x: nl.GradientFlow(nl.J(tiled(x)), "degree", constraint=nl.Constraint([0, 3], 0.5)),
    "matrices": lambda x: nl.GradientFlow(nl.E(tiled(x), x, pretended.put(torch.eye(4)).expand(N, 4, 4)), "degree"),
    "system": system_flow,
    "map of the kernel": stretched_flow,
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_flow_is_made_of_is_sent_once(name: str) -> None:
    integrator = nl.SemiImplicit(0.02) if name == "matrices" else nl.ExplicitEuler(0.02)
    short, long = (run(GIVEN[name], integrator, t=t)[1] for t in (0.1, 0.3))
    assert short.copies == long.copies <= 6, str(long)


def test_a_flow_that_is_solved_exactly_moves_nothing() -> None:
    solution, counts = run(j_flow, t=3.0)
    assert counts.synchronizations <= 2, str(counts)
    assert counts.copies == 0, str(counts)
    assert counts.operations <= 26 * solution.stats["applications"] + 60, str(counts)


def test_a_flow_and_its_affinity_look_at_a_device_once_each() -> None:
    """Whether features are finite, and how large logits are; then whether the start and the end are, and energies."""
    x = drawn(N, 4) / 4
    found, counts = counted(lambda x: nl.solve(j_flow(x), x.flip(0), t=3.0), x)
    assert found.success
    assert counts.synchronizations <= 2, str(counts)


@pytest.mark.parametrize("where", ["features", "start"])
def test_what_is_looked_at_late_is_named_as_it_was(where: str) -> None:
    x = drawn(N, 4) / 4
    spoiled = x.clone()
    spoiled[3, 2] = torch.nan
    features, start = (spoiled, x) if where == "features" else (x, spoiled)
    words = rf"^{where}: got 1 NaN or infinite value\(s\) \(the first at index \(3, 2\)\)"

    def run(make: Any, **options: Any) -> None:
        nl.solve(make(pretended.put(features)), pretended.put(start), t=1.0, **options)

    with pretended.gpu():
        for integrator in (None, nl.ExplicitEuler(0.1), nl.RungeKutta(), nl.SemiImplicit(0.1)):
            for watchers in ([], [trackers.Energy()]):
                with pytest.raises(InputError, match=words):
                    run(j_flow, integrator=integrator, trackers=watchers)
        with pytest.raises(InputError, match=words):
            run(evolving_flow)


def test_energies_and_distances_of_all_steps_come_in_one_copy() -> None:
    plain, without = run(j_flow, nl.ExplicitEuler(0.03), t=2.1)
    watchers = [trackers.Energy(), trackers.DistanceToConstant()]
    solution, counts = run(j_flow, nl.ExplicitEuler(0.03), t=2.1, trackers=watchers)
    assert len(solution.records["energy"]["t"]) == len(solution.records["distance"]["t"]) == 71
    # Once for each, and before they see the start, whether that is finite.
    assert counts.synchronizations == without.synchronizations + 3
    assert counts.copies == without.copies
    assert torch.equal(pretended.take(plain.final), pretended.take(solution.final))
    cpu = nl.solve(j_flow(drawn(N, 4) / 4), drawn(N, 4) / 4, t=2.1, integrator=nl.ExplicitEuler(0.03), trackers=[
        trackers.Energy(), trackers.DistanceToConstant()])  # fmt: skip
    for name in ("energy", "distance"):
        assert np.array_equal(cpu.records[name]["value"], solution.records[name]["value"])


def test_outputs_wait_for_the_end() -> None:
    _, few = run(j_flow, nl.ExplicitEuler(0.03), t=2.1)
    solution, many = run(j_flow, nl.ExplicitEuler(0.03), t=2.1, t_eval=np.linspace(0, 2.1, 8))
    assert many.synchronizations == few.synchronizations
    assert len(solution.t) == 8
    assert np.all(np.diff(solution.energy) < 0)


def test_a_minimizer_asks_once_an_iteration() -> None:
    def work(x: Any) -> Any:
        return nl.E(tiled(x), x, 0.05, measure="degree").minimizer()

    found, counts = counted(work, drawn(N, 4))
    assert found.success
    assert found.iterations > 5
    assert counts.synchronizations <= found.iterations + 9, str(counts)


def test_linear_systems_of_flows_that_are_not_symmetric_ask_once_an_iteration() -> None:
    from nlflow.functionals.krylov import Lanczos, gmres

    def inner(v: Any, w: Any) -> Any:
        return (v * w).sum(0, keepdim=True)

    matrix = torch.eye(N, dtype=torch.float64) + 0.05 * drawn(N, N, dtype=torch.float64)
    b = drawn(N, 3, seed=1, dtype=torch.float64)
    found, counts = counted(
        lambda a, b: gmres(lambda v: a @ v, b, 0 * b, rtol=1e-8, maxiter=60, inner=lambda v, w: (v * w).sum(0)),
        matrix, b,
    )  # fmt: skip
    assert found.residual <= 1e-8
    assert found.iterations > 5
    assert counts.synchronizations + counts.copies_to_host <= found.iterations + 3, str(counts)
    exact = torch.linalg.solve(matrix, b)
    assert torch.allclose(pretended.take(found.x), exact, rtol=1e-6, atol=1e-7)

    def steps(a: Any, b: Any) -> Any:
        lanczos = Lanczos(lambda v: (a + a.mT) @ v, b, inner, keep=True)
        for _ in range(12):
            lanczos.step()
        return lanczos

    lanczos, counts = counted(steps, matrix, b)
    assert counts.synchronizations + counts.copies <= 12 + 1, str(counts)
    assert abs(lanczos.eigen(0)[0][-1] - np.linalg.eigvalsh((matrix + matrix.mT).numpy())[-1]) < 0.05


# ---- what is found late is told


class Blown(FixedStep):
    """A step that is infinite from one on."""

    order = 1.0

    def __init__(self, dt: float, after: int) -> None:
        super().__init__(dt)
        self.after, self.count = after, 0

    def stability_limit(self, flow: Any) -> float:
        return np.inf

    def step(self, flow: Any, u: Any, dt: float) -> Any:
        self.count += 1
        return u + (torch.inf if self.count > self.after else dt) * flow.velocity(u)


@pytest.mark.parametrize("after", [3, 70])
def test_an_overflow_that_is_found_late_is_told_with_the_steps_between(after: int) -> None:
    x = drawn(N, 4) / 4
    energy = trackers.Energy()
    found = nl.solve(j_flow(x), x, t=10.0, t_eval=[0.0, 0.5, 10.0], integrator=Blown(0.1, after), trackers=[energy])
    assert found.status is Status.DIVERGED
    assert not found.success
    assert "overflowed between t=" in found.message
    low, high = (float(part.split("=")[1]) for part in found.message.split(":")[0].split("between ")[1].split(" and "))
    assert low <= 0.1 * after < high <= low + 6.41 + 1e-9
    assert bool(torch.isfinite(found.u).all())
    assert np.isfinite(found.energy).all()
    assert found.t[-1] == pytest.approx(low)
    assert found.records["energy"]["t"][-1] == pytest.approx(low)
    assert np.isfinite(found.records["energy"]["value"]).all()


def test_an_overflow_is_told_where_a_run_is_broken_off() -> None:
    x = drawn(N, 4) / 4

    class Stopped(Blown):
        def step(self, flow: Any, u: Any, dt: float) -> Any:
            if self.count == 9:
                raise KeyboardInterrupt
            return super().step(flow, u, dt)

    found = nl.solve(j_flow(x), x, t=10.0, integrator=Stopped(0.1, 4))
    assert found.status is Status.DIVERGED
    assert bool(torch.isfinite(found.final).all())
    found = nl.solve(j_flow(x), x, t=10.0, integrator=Stopped(0.1, 100))
    assert found.status is Status.INTERRUPTED
    assert found.t[-1] == pytest.approx(0.9)


def test_an_energy_that_rises_is_told_at_its_output_though_it_is_read_later() -> None:
    x = drawn(N, 4) / 4

    class Back(Blown):
        def step(self, flow: Any, u: Any, dt: float) -> Any:
            return u - dt * flow.velocity(u)

    outputs = [0.0, 0.5, 1.0, 1.5]
    tensors = nl.solve(j_flow(x), x, t_eval=outputs, integrator=Back(0.1, 0))
    array = nl.solve(nl.GradientFlow(nl.J(nl.affinity(nl.ExpDotProduct(), POINTS, x.numpy())), "degree"), x.numpy(),
                     t_eval=outputs, integrator=Back(0.1, 0))  # fmt: skip
    assert tensors.status is array.status is Status.DIVERGED
    assert tensors.t.tolist() == array.t.tolist()
    assert "energy rose" in tensors.message


def test_who_writes_a_signal_down_gets_one_that_is_finite() -> None:
    x, seen = drawn(N, 4) / 4, []
    watcher = trackers.Callback(lambda t, u, flow: seen.append(bool(torch.isfinite(u).all())) is not None and None)
    found = nl.solve(j_flow(x), x, t=2.0, integrator=Blown(0.1, 3), trackers=[watcher])
    assert found.status is Status.DIVERGED
    assert all(seen)
    assert len(seen) == 4


def test_numbers_that_wait_are_formed_once() -> None:
    calls = []

    def form(a: float, b: float) -> float:
        calls.append((a, b))
        return a + b

    waiting = [Pending(form, torch.tensor(1.5), 2.0), 3.0, Pending(form, np.float64(1.0), torch.tensor(True))]
    assert fetch(waiting) == [3.5, 3.0, 2.0]
    assert float(waiting[0]) == 3.5
    assert len(calls) == 2
    assert float(Pending(form, 1.0, 2.0) + Pending(form, 3.0, torch.tensor(4.0))) == 10.0
    assert numbers(torch.tensor(0.1), 2, np.float32(3)) == [float(torch.tensor(0.1)), 2.0, 3.0]


# ---- steps that are recorded


RECORDED = {
    "Euler": (j_flow, nl.ExplicitEuler(0.1)),
    "reaction": (reacting_flow, nl.ETD2RK(0.1)),
    "mean": (j_flow, nl.ETD2RK(0.1)),
    "heads": (attention_flow, nl.ExplicitEuler(0.1)),
    "semi-implicit": (j_flow, nl.SemiImplicit(0.1)),
    "layers": (j_flow, nl.AttentionStep()),
    "constraint": (GIVEN["constraint"], nl.ExplicitEuler(0.1)),
}


@pytest.mark.parametrize("name", some(RECORDED))
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_recorded_step_has_the_bits_of_the_step(where: str, name: str) -> None:
    make, integrator = RECORDED[name]
    x = drawn(N, 4) / 4
    u = torch.stack([x, x.flip(0)]) if make is attention_flow else x
    end = 3.0 if integrator.unit_steps else 1.03
    plain = nl.solve(make(x), u, t=end, integrator=integrator)
    if where == "cpu":
        found = nl.solve(make(x), u, t=end, integrator=Replayed(integrator))
    else:
        with pretended.gpu():
            found = nl.solve(make(pretended.put(x)), pretended.put(u), t=end, integrator=Replayed(integrator))
    assert torch.equal(pretended.take(found.u), plain.u)
    assert found.stats["steps"] == plain.stats["steps"]
    assert found.stats["applications"] == plain.stats["applications"]
    assert found.stats["order"] == plain.stats["order"]


class Rounding(FixedStep):
    """A step whose change has a mean of 1e30 once the signal is small."""

    order = 1.0

    def stability_limit(self, flow: Any) -> float:
        return np.inf

    def step(self, flow: Any, u: Any, dt: float) -> Any:
        return u + flow.kept_mean(u, dt * flow.velocity(u) + 1e30 * (u.abs().max() < 0.5))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("wrapped", [lambda method: method, Replayed, nl.Adaptive])
def test_steps_whose_rounding_moves_a_conserved_mean_are_told(wrapped: Any, where: str) -> None:
    x = drawn(N, 4, dtype=torch.float64) / 4
    with pretended.gpu():
        there = pretended.put(x) if where == "cuda" else x
        flow = j_flow(there)
        with pretended.counting() as counts:
            found = nl.solve(flow, there, t=3.0, integrator=wrapped(Rounding(0.05)))
    assert found.status is Status.STEP_FAILED
    assert "rounding of du/dt times the step moves the mean by 1e+30, of a signal of size 0." in found.message
    assert found.message.startswith("the step fell") == (wrapped is nl.Adaptive)
    assert bool(torch.isfinite(pretended.take(found.u)).all())
    assert found.t[-1] < 2.9  # not by the last step alone, which is not a recorded one
    assert wrapped is nl.Adaptive or counts.synchronizations <= 4, str(counts)


def test_a_conserved_mean_that_rounding_moves_is_told_of_steps_with_derivatives() -> None:
    x = drawn(N, 4, dtype=torch.float64) / 4
    flow = j_flow(x.requires_grad_())
    assert bool(torch.isfinite(derivatives.run(flow, x, Rounding(0.05), 3)).all())
    with pytest.raises(NumericalError, match="though the flow conserves it"):
        derivatives.run(flow, x, Rounding(0.05), 60)


def test_a_recorded_step_keeps_the_contract_of_its_method() -> None:
    x = drawn(20, 1, dtype=torch.float64)
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(20.0)), x)), "degree")
    check_integrator(Replayed(nl.ExplicitEuler(0.1)), flow, x)


def test_what_cannot_be_recorded_is_refused_by_name() -> None:
    x = drawn(N, 4) / 4
    for given in (nl.RungeKutta(), nl.Exponential(), Replayed(nl.ExplicitEuler(0.1)), "Euler"):
        with pytest.raises(InputError, match="integrator: got"):
            Replayed(given)  # type: ignore[arg-type]
    flows: list[tuple[Any, str]] = [
        (nl.GradientFlow(nl.J(tiled(x)), "degree", source=lambda t: 0 * x), "depends on time"),
        (evolving_flow(x), "follows the signal"),
        (nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), POINTS)), "degree"), "NumPy"),
    ]
    for flow, words in flows:
        start = x.numpy() if words == "NumPy" else x
        with pytest.raises(InputError, match=f"Replayed repeats one step, got a flow .*{words}"):
            nl.solve(flow, start, t=1.0, integrator=Replayed(nl.ExplicitEuler(0.1)))
    waits = "waits for the device within a step"
    with pytest.raises(InputError, match=waits):
        nl.solve(reacting_flow(x), x, t=1.0, integrator=Replayed(nl.IMEX(0.1)))
    with pretended.gpu():
        there = pretended.put(x)
        flow = reacting_flow(there)
        with pytest.raises(InputError, match=waits):
            nl.solve(flow, there, t=1.0, integrator=Replayed(nl.IMEX(0.1)))


def test_shapes_that_change_and_graphs_within_graphs_are_refused_by_name() -> None:
    from nlflow.backends.torch.graphs import Replay

    twice = Replay(lambda v: 2 * v, torch.ones(3), "doubled")
    assert torch.equal(twice(torch.arange(3.0)), 2 * torch.arange(3.0))
    for other in (torch.ones(4), torch.ones(3, dtype=torch.float64)):
        with pytest.raises(InputError, match=r"doubled: got a tensor of shape .*as it was recorded"):
            twice(other)
    with pretended.gpu():
        there = pretended.put(torch.ones(3))
        doubled = Replay(lambda v: 2 * v, there, "doubled")
        first, second = doubled(there), doubled(3 * there)  # what was returned is nobody's place
        assert pretended.take(first).tolist() == [2.0] * 3
        assert pretended.take(second).tolist() == [6.0] * 3
        with pretended.capturing(), pytest.raises(InputError, match="doubled: a CUDA graph is being recorded already"):
            Replay(lambda v: 2 * v, there, "doubled")
        for asks in (lambda v: v * float(v.sum()), lambda v: v * sum(v.tolist()), lambda v: v[v > 0].sum() * v):
            with pytest.raises(InputError, match="asks: it waits for the device"):
                Replay(asks, there, "asks")
    with pytest.raises(InputError, match="asks: it waits for the device"):
        Replay(lambda v: v * sum(v.tolist()), torch.ones(3), "asks")
