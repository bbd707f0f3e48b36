"""Derivatives through functionals, flows and equilibria, against differences and closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import autograd
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
N, D = 7, 2
RNG = np.random.default_rng(0)
X, Q, F, U = RNG.normal(size=(4, N, D))
WEIGHTS = RNG.uniform(0.5, 2, N)
KERNELS = {
    "gaussian": (nl.Gaussian(1.0), False),
    "laplace": (nl.Laplace(1.0), False),
    "dot product": (nl.DotProduct(), False),
    "queries": (nl.DotProduct(), True),
}


def tensors(*arrays: Any) -> list[Any]:
    return [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]


def build(name: str, method: str, x: Any, q: Any) -> nl.Affinity:
    kernel, asymmetric = KERNELS[name]
    return nl.affinity(
        kernel, nl.Points(np.arange(float(N)), weights=WEIGHTS), x, queries=q if asymmetric else None, method=method
    )


@pytest.mark.parametrize("method", ["dense", "tiled"])
@pytest.mark.parametrize("name", KERNELS)
def test_averages_and_degrees(name: str, method: str) -> None:
    def function(x: Any, q: Any, u: Any) -> Any:
        p = build(name, method, x, q)
        return p.average(u), p.log_degree

    assert torch.autograd.gradcheck(function, tensors(X, Q, U))


@pytest.mark.parametrize("method", ["dense", "tiled"])
@pytest.mark.parametrize("measure", ["l2", "degree"])
@pytest.mark.parametrize("name", KERNELS)
def test_values_of_functionals(name: str, measure: str, method: str) -> None:
    def function(x: Any, q: Any, u: Any, f: Any, strength: Any) -> Any:
        p = build(name, method, x, q)
        e = nl.E(p, f, strength, measure=measure)
        return autograd.value(nl.J(p), u), autograd.value(e, u)

    inputs = tensors(X, Q, U, F, np.linspace(0.1, 0.9, N))
    assert torch.autograd.gradcheck(function, inputs)
    p = build(name, method, *inputs[:2])
    e = nl.E(p, inputs[3], inputs[4], measure=measure)
    for functional in (nl.J(p), e):
        value = autograd.value(functional, inputs[2])
        assert float(value.detach()) == pytest.approx(functional.value(inputs[2].detach()), rel=1e-12)
        (gradient,) = torch.autograd.grad(value, inputs[2])
        expected = WEIGHTS[:, None] * functional.gradient(inputs[2].detach()).detach().numpy()
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=0, atol=1e-12)


INTEGRATORS = [nl.ExplicitEuler(0.1), nl.SemiImplicit(0.5), nl.NeutrenoStep()]


@pytest.mark.parametrize("integrator", INTEGRATORS, ids=repr)
@pytest.mark.parametrize("evolving", [False, True], ids=["frozen", "evolving"])
@pytest.mark.parametrize("method", ["dense", "tiled"])
def test_steps_of_a_flow(method: str, evolving: bool, integrator: Any) -> None:
    def function(x: Any, u: Any, f: Any, strength: Any) -> Any:
        p = build("gaussian", method, x, None)
        flow = nl.GradientFlow(nl.E(p, f, strength, measure="degree"), metric="degree", evolving=evolving, every=2)
        return autograd.run(flow, u, integrator, 5)

    inputs = tensors(X, U, F, np.linspace(0.1, 0.9, N))
    assert torch.autograd.gradcheck(function, inputs)


def test_steps_are_those_of_solve() -> None:
    x, u = tensors(X, U)
    flow = nl.AttentionFlow(build("queries", "tiled", x, torch.tensor(Q)), u, 0.3)
    with torch.no_grad():
        expected = nl.solve(flow, u, t=7.0, integrator=nl.NeutrenoStep()).final
    np.testing.assert_allclose(
        autograd.run(flow, u, nl.NeutrenoStep(), 7).detach().numpy(), expected.numpy(), rtol=0, atol=1e-14
    )


def test_memory_grows_with_the_root_of_the_steps() -> None:
    kept: list[int] = []
    (u,) = tensors(np.random.default_rng(1).normal(size=(400, 3)))
    x = torch.tensor(np.random.default_rng(2).normal(size=(400, 2)))
    flow = nl.GradientFlow(
        nl.J(nl.affinity(nl.Laplace(1.0), nl.Points(np.arange(400.0)), x, method="tiled")), metric="degree"
    )
    for steps in (16, 256):
        total = 0

        def pack(tensor: Any) -> Any:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            autograd.run(flow, u, nl.AttentionStep(), steps)
        kept.append(total)
    assert kept[1] <= 6 * kept[0]


@pytest.mark.parametrize("method", ["dense", "tiled"])
@pytest.mark.parametrize("measure", ["l2", "degree"])
@pytest.mark.parametrize("name", KERNELS)
def test_equilibria(name: str, measure: str, method: str) -> None:
    def function(x: Any, q: Any, f: Any, strength: Any) -> Any:
        e = nl.E(build(name, method, x, q), f, strength, measure=measure)
        return autograd.minimizer(e, rtol=1e-13)

    inputs = tensors(X, Q, F, np.linspace(0.1, 0.9, N))
    assert torch.autograd.gradcheck(function, inputs)
    e = nl.E(build(name, method, *inputs[:2]), inputs[2], inputs[3], measure=measure)
    with torch.no_grad():
        expected = e.minimizer().u
    np.testing.assert_allclose(autograd.minimizer(e).detach().numpy(), expected.numpy(), rtol=0, atol=1e-8)


def test_a_width_and_a_fidelity_are_learnt() -> None:
    # From one clean and noisy pair: a step that noise hides.
    n, rng = 60, np.random.default_rng(3)
    x = torch.linspace(0, 1, n, dtype=torch.float64)[:, None]
    clean = torch.from_numpy(np.where(np.arange(n) < n // 2, 0.0, 1.0))
    noisy = clean + 0.2 * torch.from_numpy(rng.normal(size=n))
    logs = torch.tensor([np.log(0.3), np.log(1.0)], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logs], lr=0.1)
    errors = []
    for _ in range(40):
        width, strength = logs.exp()
        p = nl.affinity(nl.Gaussian(1.0), nl.Points(np.arange(float(n))), x / width, method="tiled")
        restored = autograd.minimizer(nl.E(p, noisy, strength.expand(n), measure="degree"))
        error = ((restored - clean) ** 2).mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(float(error.detach()))
    assert errors[-1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e, u: autograd.value(e, u.detach().numpy()), "u: got dtype float64, expected torch"),
        (lambda e, u: autograd.run(nl.GradientFlow(e), u, nl.RungeKutta(), 3), "integrator: got RungeKutta"),
        (lambda e, u: autograd.run(nl.GradientFlow(e), u, nl.ExplicitEuler(100.0), 3), "dt: got 100"),
        (lambda e, u: autograd.run(nl.GradientFlow(e), u, nl.ExplicitEuler(0.1), -1), "steps: got -1"),
        (lambda e, u: autograd.minimizer(nl.J(e.given)), r"functional: got J, expected E"),
        (lambda e, u: autograd.minimizer(e, maxiter=1), "minimizer: "),
        (lambda e, u: e.minimizer(), "requires a gradient, expected one that does not; use nlflow.autograd.minimizer"),
        (lambda e, u: nl.solve(nl.GradientFlow(e), u, t=1.0), "requires a gradient, .* use nlflow.autograd.run"),
        (lambda e, u: nl.solve(nl.GradientFlow(e), U, t=1.0), "start: got dtype float64"),
    ],
    ids=["numpy", "adaptive", "unstable", "negative", "J", "unsolved", "plain minimizer", "plain solve", "mixed"],
)  # fmt: skip
def test_bad_input(call: Any, words: str) -> None:
    x, u, f = tensors(X, U, F)
    e = nl.E(build("gaussian", "tiled", x, None), f, 0.01)
    with pytest.raises(nl.NlflowError, match=words):
        call(e, u)
