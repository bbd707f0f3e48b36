"""Derivatives through functionals, flows and equilibria, against differences and closed forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.flows import derivatives
from nlflow.functionals.fidelity import MatrixFidelity
from tests.covering import pairs
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()
N, D = 7, 2
RNG = np.random.default_rng(0)
X, Q, F, U = RNG.normal(size=(4, N, D))
WEIGHTS = RNG.uniform(0.5, 2, N)
ROOTS = 0.3 * RNG.normal(size=(N, D, D))
KERNELS = {
    "gaussian": (nl.Gaussian(1.0), False),
    "laplace": (nl.Laplace(1.0), False),
    "dot product": (nl.ExpDotProduct(), False),
    "queries": (nl.ExpDotProduct(), True),
}


def tensors(*arrays: Any) -> list[Any]:
    return [torch.tensor(a, dtype=torch.float64, requires_grad=True) for a in arrays]


def build(name: str, method: str, x: Any, q: Any) -> nl.Affinity:
    kernel, asymmetric = KERNELS[name]
    return nl.affinity(
        kernel, nl.Points(np.arange(float(N)), weights=WEIGHTS), x, queries=q if asymmetric else None, method=method
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dense", "tiled"])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.sampled(2)
def test_averages_and_degrees(name: str, method: str) -> None:
    def function(x: Any, q: Any, u: Any) -> Any:
        p = build(name, method, x, q)
        return p.average(u), p.log_degree

    assert torch.autograd.gradcheck(function, tensors(X, Q, U))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "measure", "method"), pairs(list(KERNELS), ["l2", "degree"], ["dense", "tiled"]))
@pytest.mark.sampled(2)
def test_values_of_functionals(name: str, measure: str, method: str) -> None:
    def function(x: Any, q: Any, u: Any, f: Any, strength: Any) -> Any:
        p = build(name, method, x, q)
        e = nl.E(p, f, strength, measure=measure)
        return derivatives.value(nl.J(p), u), derivatives.value(e, u)

    inputs = tensors(X, Q, U, F, np.linspace(0.1, 0.9, N))
    assert torch.autograd.gradcheck(function, inputs)
    p = build(name, method, *inputs[:2])
    e = nl.E(p, inputs[3], inputs[4], measure=measure)
    for functional in (nl.J(p), e):
        value = derivatives.value(functional, inputs[2])
        assert float(value.detach()) == pytest.approx(functional.value(inputs[2].detach()), rel=1e-12)
        (gradient,) = torch.autograd.grad(value, inputs[2])
        expected = WEIGHTS[:, None] * functional.gradient(inputs[2].detach()).detach().numpy()
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=0, atol=1e-12)


WHOLE = ("queries", "degree", "dense")
INTEGRATORS = [nl.ExplicitEuler(0.1), nl.SemiImplicit(0.5), nl.NeutrenoStep()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("integrator", "evolving", "method"), pairs(INTEGRATORS, [False, True], ["dense", "tiled"]), ids=repr
)
@pytest.mark.sampled(2)
def test_steps_of_a_flow(integrator: Any, evolving: bool, method: str) -> None:
    def function(x: Any, u: Any, f: Any, strength: Any) -> Any:
        p = build("gaussian", method, x, None)
        kernel = {"evolving": True, "every": 2} if evolving else {}
        flow = nl.GradientFlow(nl.E(p, f, strength, measure="degree"), metric="degree", **kernel)
        return derivatives.run(flow, u, integrator, 5)

    inputs = tensors(X, U, F, np.linspace(0.1, 0.9, N))
    assert torch.autograd.gradcheck(function, inputs)


def test_steps_are_those_of_solve() -> None:
    x, u = tensors(X, U)
    flow = nl.AttentionFlow(build("queries", "tiled", x, torch.tensor(Q)), u, 0.3)
    with torch.no_grad():
        expected = nl.solve(flow, u, t=7.0, integrator=nl.NeutrenoStep()).final
    np.testing.assert_allclose(
        derivatives.run(flow, u, nl.NeutrenoStep(), 7).detach().numpy(), expected.numpy(), rtol=0, atol=1e-14
    )


@pytest.mark.slow
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
            derivatives.run(flow, u, nl.AttentionStep(), steps)
        kept.append(total)
    assert kept[1] <= 6 * kept[0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "measure", "method"), pairs(list(KERNELS), ["l2", "degree"], ["dense", "tiled"]))
def test_equilibria(name: str, measure: str, method: str) -> None:
    def function(x: Any, q: Any, f: Any, strength: Any) -> Any:
        e = nl.E(build(name, method, x, q), f, strength, measure=measure)
        return derivatives.minimizer(e, rtol=1e-13)

    inputs = tensors(X, Q, F, np.linspace(0.1, 0.9, N))
    # Along random directions, but entry by entry once: every entry asks for two solutions.
    assert torch.autograd.gradcheck(function, inputs, fast_mode=(name, measure, method) != WHOLE)
    e = nl.E(build(name, method, *inputs[:2]), inputs[2], inputs[3], measure=measure)
    with torch.no_grad():
        expected = e.minimizer().u
    np.testing.assert_allclose(derivatives.minimizer(e).detach().numpy(), expected.numpy(), rtol=0, atol=1e-8)


def attention_matrix(q: Any, k: Any, weights: Any) -> Any:
    logits = q @ k.T / np.sqrt(k.shape[1])
    sums = weights * np.exp(logits - logits.max(axis=1, keepdims=True))
    return sums / sums.sum(axis=1, keepdims=True)


FLOWS = {
    "attention": lambda p, f, strength: nl.AttentionFlow(p, f, strength),
    "l2": lambda p, f, strength: nl.GradientFlow(nl.E(p, f, strength), metric="l2"),
    "degree": lambda p, f, strength: nl.GradientFlow(nl.E(p, f, strength, measure="degree"), metric="degree"),
}


@pytest.mark.parametrize("method", ["dense", "tiled"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("queries", kind) for kind in FLOWS]
    + [("gaussian", "attention"), ("dot product", "l2"), ("dot product", "degree")],
)
@pytest.mark.sampled(3)
def test_equilibria_of_flows(name: str, kind: str, method: str) -> None:
    def function(x: Any, q: Any, f: Any, strength: Any) -> Any:
        return derivatives.equilibrium(FLOWS[kind](build(name, method, x, q), f, strength), rtol=1e-13)

    inputs = tensors(X, Q, F, np.linspace(0.1, 0.9, N))
    assert torch.autograd.gradcheck(
        function, inputs, fast_mode=(name, kind, method) != ("queries", "attention", "dense")
    )
    flow = FLOWS[kind](build(name, method, *(t.detach() for t in inputs[:2])), *(t.detach() for t in inputs[2:]))
    expected = nl.equilibrium(flow).u
    np.testing.assert_allclose(function(*inputs).detach().numpy(), expected.numpy(), rtol=0, atol=1e-8)


@pytest.mark.parametrize(("dtype", "error"), [("float64", 1e-9), ("float32", 2e-4)])
def test_equilibria_of_attention_are_resolvents(dtype: str, error: float) -> None:
    # A sharp attention with a weak fidelity, so that bases are restarted.
    rng, n, strength = np.random.default_rng(4), 150, 0.02
    (q, k), (f, g) = 3 * rng.normal(size=(2, n, 6)), rng.normal(size=(2, n, 3))
    weights = rng.uniform(0.5, 2, n)
    attention = attention_matrix(q, k, weights)
    # Each channel is a system of its own: a large one that is solved at once, an eigenvector, does not end the others.
    eigenvalues, vectors = np.linalg.eig(attention)
    (real,) = np.nonzero((eigenvalues.imag == 0) & (eigenvalues.real < 0.999))
    f[:, 1] = 1e6 * vectors[:, real[0]].real
    resolvent = strength * np.linalg.inv((1 + strength) * np.eye(n) - attention)
    features, queries, observed, outer = (torch.tensor(a).to(getattr(torch, dtype)) for a in (k, q, f, g))
    number = torch.tensor(strength, dtype=observed.dtype, requires_grad=True)
    observed.requires_grad_()
    p = nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(float(n)), weights=weights), features, queries=queries)
    u = derivatives.equilibrium(nl.AttentionFlow(p, observed, number))
    assert u.dtype == observed.dtype
    scale = np.abs(f).max(axis=0)
    np.testing.assert_allclose(u.detach().numpy() / scale, resolvent @ f / scale, rtol=0, atol=error)
    u.backward(outer)
    np.testing.assert_allclose(
        observed.grad.numpy(), resolvent.T @ g, rtol=0, atol=error * np.abs(resolvent.T @ g).max()
    )
    # A du* = f - u*, divided by what it is a sum of, which cancels in part.
    parts = (resolvent.T @ g) * (f - resolvent @ f) / strength
    assert abs(float(number.grad) - parts.sum()) <= error * np.abs(parts).sum()


def test_a_constant_is_its_own_equilibrium() -> None:
    x, q, f = tensors(X, Q, np.full((N, D), 3.0))
    u = derivatives.equilibrium(nl.AttentionFlow(build("queries", "tiled", x, q), f, 1e-3))
    np.testing.assert_allclose(u.detach().numpy(), 3.0, rtol=1e-14)
    u.sum().backward()  # u* is a mean of f in which all weights add up to 1
    assert float(f.grad.sum()) == pytest.approx(N * D, rel=1e-8)


def matrices(roots: Any) -> Any:
    """Symmetric positive definite matrices; at a root of 0 all their eigenvalues are the same."""
    return roots @ roots.mT + 0.05 * torch.eye(roots.shape[-1], dtype=torch.float64)


MATRICES = {
    "value": lambda p, f, u, given: derivatives.value(nl.E(p, f, given), u),
    "minimizer l2": lambda p, f, u, given: derivatives.minimizer(nl.E(p, f, given), rtol=1e-13),
    "minimizer": lambda p, f, u, given: derivatives.minimizer(nl.E(p, f, given, measure="degree"), rtol=1e-13),
    "equilibrium": lambda p, f, u, given: derivatives.equilibrium(nl.AttentionFlow(p, f, given), rtol=1e-13),
    "implicit steps": lambda p, f, u, given: derivatives.run(nl.AttentionFlow(p, f, given), u, nl.SemiImplicit(), 3),
    "layers": lambda p, f, u, given: derivatives.run(nl.AttentionFlow(p, f, given), u, nl.NeutrenoStep(), 3),
    "scaled": lambda p, f, u, given: derivatives.run(
        nl.GradientFlow(nl.E(p, f, given), metric="degree"), u, nl.SemiImplicit(0.5), 3
    ),
}  # fmt: skip


@pytest.mark.parametrize("given", ["own", "shared", "alike"])
@pytest.mark.parametrize("what", MATRICES)
@pytest.mark.sampled(5)
def test_matrix_fidelities(what: str, given: str) -> None:
    def function(x: Any, q: Any, f: Any, u: Any, roots: Any) -> Any:
        return MATRICES[what](build("queries", "tiled", x, q), f, u, matrices(roots))

    roots = {"own": ROOTS, "shared": ROOTS[:1], "alike": 0.5 * np.eye(D)[None]}[given]
    inputs = tensors(X, Q, F, U, roots)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    # The same numbers as without derivatives, for which eigenvectors serve.
    expected = function(*(t.detach() for t in inputs))
    np.testing.assert_allclose(function(*inputs).detach().numpy(), expected.numpy(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shape", [(3, 4), (3, 1), (1, 1)])
def test_operators_of_matrices(shape: tuple[int, ...], dtype: str) -> None:
    # Two vectors of D channels side by side, multiples of its own for each node.
    rng = np.random.default_rng(5)
    roots, v, f, factor = tensors(
        rng.normal(size=(*shape, D, D)), *rng.normal(size=(2, 3, 4, 2 * D)), rng.uniform(size=(3, 4))
    )

    def function(roots: Any, v: Any, f: Any, factor: Any) -> Any:
        own = MatrixFidelity(matrices(roots), dtype=v.dtype)
        return [
            part for one in (own, own.scaled(factor))
            for part in (one.times(v), one.damped(v, 0.7), one.implicit_step(v, f, 0.7))
        ]  # fmt: skip

    if dtype == "float64":
        assert torch.autograd.gradcheck(function, (roots, v, f, factor), fast_mode=True)
    v, f, factor = (t.detach().to(getattr(torch, dtype)) for t in (v, f, factor))
    for learnt, constant in zip(function(roots, v, f, factor), function(roots.detach(), v, f, factor), strict=True):
        assert learnt.dtype == v.dtype
        assert learnt.requires_grad
        rounding = 1e-12 if dtype == "float64" else 1e-5
        np.testing.assert_allclose(learnt.detach().numpy(), constant.numpy(), rtol=0, atol=rounding)


def test_matrix_fidelities_against_a_whole_system() -> None:
    x, q, f, roots = tensors(X, Q, F, ROOTS)
    u = derivatives.equilibrium(nl.AttentionFlow(build("queries", "dense", x, q), f, matrices(roots)), rtol=1e-13)
    given = matrices(roots).detach().numpy()
    fidelity = np.zeros((N, D, N, D))
    fidelity[np.arange(N), :, np.arange(N), :] = given
    fidelity = fidelity.reshape(N * D, N * D)
    system = np.kron(np.eye(N) - attention_matrix(Q, X, WEIGHTS), np.eye(D)) + fidelity
    np.testing.assert_allclose(u.detach().numpy().ravel(), np.linalg.solve(system, fidelity @ F.ravel()), atol=1e-12)
    u.backward(torch.tensor(U))
    adjoint = np.linalg.solve(system.T, U.ravel())
    np.testing.assert_allclose(f.grad.numpy().ravel(), fidelity.T @ adjoint, atol=1e-12)


def test_a_hole_has_a_slope() -> None:
    # Where the fidelity is 0 it can only grow; its derivative is that from above.
    strength = np.linspace(0.0, 0.9, N)
    x, f, given = tensors(X, F, strength)
    p = build("gaussian", "tiled", x.detach(), None)
    derivatives.minimizer(nl.E(p, f, given)).square().sum().backward()
    with torch.no_grad():
        values = [
            float(nl.E(p, f, given + s * torch.eye(N)[0].double()).minimizer(rtol=1e-13).u.square().sum())
            for s in (0, 1e-4, 2e-4)
        ]
    assert float(given.grad[0]) == pytest.approx((4 * values[1] - values[2] - 3 * values[0]) / 2e-4, rel=1e-5)


def test_second_derivatives_are_refused() -> None:
    x, q, f = tensors(X, Q, F)
    for u in (
        derivatives.equilibrium(nl.AttentionFlow(build("queries", "dense", x, q), f, 0.5)),
        derivatives.minimizer(nl.E(build("gaussian", "dense", x, None), f, 0.5)),
    ):
        with pytest.raises(nl.InputError, match="create_graph: got True"):
            torch.autograd.grad(u.square().sum(), f, create_graph=True)


@pytest.mark.slow
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
        restored = derivatives.minimizer(nl.E(p, noisy, strength, measure="degree"))
        error = ((restored - clean) ** 2).mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(float(error.detach()))
    assert errors[-1] < 0.5 * errors[0]


U_PLAIN = torch.tensor(U)


def learnt(strength: float) -> Any:
    return torch.tensor(strength, dtype=torch.float64, requires_grad=True)


def attention(f: Any, strength: Any, x: Any = None) -> nl.AttentionFlow:
    x = torch.tensor(X) if x is None else x
    return nl.AttentionFlow(build("queries", "tiled", x, torch.tensor(Q)), f, strength)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e, u: derivatives.value(e, u.detach().numpy()), "u: got dtype float64, .*give a tensor"),
        (lambda e, u: derivatives.run(nl.GradientFlow(e), u, nl.RungeKutta(), 3), "integrator: got RungeKutta"),
        (lambda e, u: derivatives.run(nl.GradientFlow(e), u, nl.ExplicitEuler(100.0), 3), "dt: got 100"),
        (lambda e, u: derivatives.run(nl.GradientFlow(e), u, nl.ExplicitEuler(0.1), -1), "steps: got -1"),
        (lambda e, u: derivatives.run(e, u, nl.ExplicitEuler(0.1), 1), "flow: got E, expected a flow, such as"),
        (lambda e, u: derivatives.value(e.given, u), "functional: got .*Affinity, expected J"),
        (lambda e, u: derivatives.minimizer(nl.J(e.given)), r"functional: got J, expected E"),
        (lambda e, u: derivatives.minimizer(e, maxiter=1), "minimizer: "),
        (lambda e, u: derivatives.equilibrium(e), "flow: got E, expected a GradientFlow or an AttentionFlow"),
        (lambda e, u: derivatives.equilibrium(nl.GradientFlow(e, evolving=True)), "flow: got an evolving kernel"),
        (lambda e, u: derivatives.equilibrium(nl.AttentionFlow(e.given)), "flow: got one without fidelity"),
        (lambda e, u: derivatives.equilibrium(nl.GradientFlow(e, "conserved")), "flow: got the metric 'conserved'"),
        (lambda e, u: derivatives.equilibrium(attention(u, 0.0)), "fidelity: got 0 at every node"),
        (lambda e, u: derivatives.equilibrium(attention(u, 0.1), maxiter=1), "equilibrium: its residual .* raise maxi"),
        (lambda e, u: derivatives.equilibrium(attention(u, 0.1), rtol=0), "rtol: got 0, expected"),
        (lambda e, u: derivatives.equilibrium(attention(u, 0.1), maxiter=0), "maxiter: got 0, expected"),
        (
            lambda e, u: derivatives.equilibrium(attention(torch.ones_like(u), 0.1, u), maxiter=1).sum().backward(),
            "equilibrium: the residual of its derivative is",
        ),
        (lambda e, u: e.minimizer(), "requires a gradient, .* use nlflow.flows.derivatives.minimizer"),
        (lambda e, u: nl.E(attention(u, 0.1).affinity, U_PLAIN, learnt(0.1)).minimizer(), "a gradient, .*minimi"),
        (lambda e, u: nl.equilibrium(attention(U_PLAIN, learnt(0.1))), "a gradient, .*derivatives.equili"),
        (lambda e, u: nl.solve(nl.GradientFlow(e), u, t=1.0), "a gradient, .* use nlflow.flows.derivatives.run"),
        (lambda e, u: nl.solve(nl.GradientFlow(e), U, t=1.0), "start: got dtype float64"),
    ],
    ids=["numpy", "adaptive", "unstable", "negative", "no flow to run", "no functional",
         "J", "unsolved", "no flow", "evolving", "without",
         "conserved", "zero", "attention", "rtol", "maxiter", "adjoint", "plain minimizer", "learnt minimizer",
         "learnt equilibrium", "plain solve", "mixed"],
)  # fmt: skip
def test_bad_input(call: Any, words: str) -> None:
    x, u, f = tensors(X, U, F)
    e = nl.E(build("gaussian", "tiled", x, None), f, 0.01)
    with pytest.raises(nl.NlflowError, match=words):
        call(e, u)


MADE_OF = "start, or what the flow is made of: got a tensor that requires a gradient"
A_TERM = "a term of the flow: got a tensor that requires a gradient"


@pytest.mark.parametrize(
    ("call", "words"),
    {
        "first guess": (lambda p, w: nl.E(p, U_PLAIN, 1.0).minimizer(start=w), "start: got a tensor that requires"),
        "potential": (lambda p, w: nl.J(p).potential(w), "source or features: got a tensor that requires"),
        "values": (lambda p, w: nl.Constraint([0], lambda t: w[0]).on(p).at(0.0, U_PLAIN), "values: got a tensor that"),
        "observed": (lambda p, w: nl.solve(nl.GradientFlow(nl.E(p, w, 1.0)), U_PLAIN, t=0.1), MADE_OF),
        "fidelity": (lambda p, w: nl.solve(nl.GradientFlow(nl.E(p, U_PLAIN, w[0, 0].exp())), t=0.1), MADE_OF),
        "source": (lambda p, w: nl.solve(nl.GradientFlow(nl.J(p), source=w), U_PLAIN, t=0.1), MADE_OF),
        "timed source": (lambda p, w: nl.solve(nl.GradientFlow(nl.J(p), source=lambda t: w), U_PLAIN, t=0.1), A_TERM),
    }.values(),
)
def test_a_derivative_is_recorded_where_somebody_uses_it(call: Any, words: str) -> None:
    p = build("gaussian", "tiled", torch.tensor(X), None)
    with pytest.raises(nl.InputError, match=words):
        call(p, tensors(U)[0])
