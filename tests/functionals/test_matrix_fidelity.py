"""A fidelity with a matrix for each node: E, its flows and its limits against matrices of all nodes and channels."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.linalg import expm

import nlflow as nl
from nlflow.affinities import BlockAffinity
from nlflow.flows.integrators import Integrator
from nlflow.flows.spectrum import dense_operator, euler_limit, largest_eigenvalue, relaxation_rate
from nlflow.functionals.fidelity import Fidelity, MatrixFidelity, NodeFidelity
from nlflow.functionals.metrics import METRICS
from tests.problems import torch_on_one_thread
from tests.reference import feature_matrix, plain_dirichlet, position_matrix

pytestmark = pytest.mark.numerical

Floats = NDArray[np.float64]
CHANNELS = 3
POINTS = nl.Points(np.arange(8.0), weights=np.linspace(0.5, 1.5, 8))
PLANE = nl.Grid((3, 4), (0.5, 0.8), "periodic")
WEIGHTS = np.random.default_rng(8).uniform(0.3, 2, (2, 5))


def normal(shape: Any, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).normal(size=shape)


def matrices(nodes: tuple[int, ...], seed: int = 5, rank: int = CHANNELS) -> Floats:
    """Return random positive semidefinite matrices of a rank, of very different sizes."""
    roots = normal((*nodes, CHANNELS, rank), seed) * np.logspace(-1, 0.5, rank)
    return roots @ np.swapaxes(roots, -1, -2)


def block_matrix(weights: Floats) -> Floats:
    k = np.zeros((weights.size,) * 2)
    for group, own in enumerate(weights):
        place = slice(group * len(own), (group + 1) * len(own))
        k[place, place] = 1 / own.sum()
    return k


# Each: the affinity of k, k_ij by double sums, and the node axes of the matrices.
CASES: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "features": (
        lambda: nl.affinity(nl.Gaussian(1.2), POINTS, normal((8, 2))),
        lambda: feature_matrix(nl.Gaussian(1.2), normal((8, 2)), normal((8, 2))),
        (8,),
    ),
    "queries": (
        lambda: nl.affinity(nl.ExpDotProduct(amplitude=0.5), POINTS, normal((8, 2)), queries=normal((8, 2), 2)),
        lambda: feature_matrix(nl.ExpDotProduct(amplitude=0.5), normal((8, 2), 2), normal((8, 2))),
        (8,),
    ),
    "one for all": (
        lambda: nl.affinity(nl.Gaussian(0.6), POINTS),
        lambda: position_matrix_of_points(0.6),
        (1,),
    ),
    "rows share": (
        lambda: nl.affinity(nl.Laplace(0.4), PLANE),
        lambda: position_matrix(nl.Laplace(0.4), PLANE),
        (3, 1),
    ),
    "columns share": (
        lambda: nl.affinity(nl.Laplace(0.4), PLANE),
        lambda: position_matrix(nl.Laplace(0.4), PLANE),
        (1, 4),
    ),
    "groups": (lambda: BlockAffinity(2, 5, WEIGHTS), lambda: block_matrix(WEIGHTS), (2, 1)),
}


def position_matrix_of_points(width: float) -> Floats:
    return feature_matrix(nl.Gaussian(width), POINTS.nodes, POINTS.nodes)


class Plain:
    """E and its flows as matrices of nodes times channels, channels of a node side by side."""

    def __init__(self, name: str, measure: str, metric: str = "degree", rank: int = CHANNELS) -> None:
        build, matrix, nodes = CASES[name]
        self.k = build()
        self.given = matrices(nodes, rank=rank)
        domain = self.k.domain
        self.n, self.w = domain.size, domain.weights.ravel()
        self.shape = (*domain.shape, CHANNELS)
        self.f, self.u = normal(self.shape, 3), normal(self.shape, 4)
        kernel = matrix()
        self.kernel, both = kernel, kernel + kernel.T
        self.degree = both @ self.w
        own = np.broadcast_to(self.given, (*domain.shape, CHANNELS, CHANNELS)).reshape(-1, CHANNELS, CHANNELS)
        self.own = own
        self.m = self.w * (self.degree if measure == "degree" else 1)
        in_metric = own * (self.m / self.w / (self.degree if metric == "degree" else 1))[:, None, None]
        rate = self.degree if metric == "l2" else np.ones(self.n)
        average = both * self.w / self.degree[:, None]
        self.diffusion = np.kron(rate[:, None] * (np.eye(self.n) - average), np.eye(CHANNELS))
        self.phi = np.zeros((self.n, CHANNELS, self.n, CHANNELS))
        self.phi[np.arange(self.n), :, np.arange(self.n), :] = in_metric
        self.phi = self.phi.reshape(self.diffusion.shape)
        self.a = self.diffusion + self.phi
        self.e = nl.E(self.k, self.f, self.given, measure=measure)
        self.flow = nl.GradientFlow(self.e, metric)

    def value(self, u: Floats) -> float:
        misfit = (u - self.f).reshape(self.n, CHANNELS)
        own = math.fsum(m * d @ matrix @ d for m, d, matrix in zip(self.m, misfit, self.own, strict=True))
        return plain_dirichlet(self.kernel, self.w, u) + own / 2

    def limit(self) -> Floats:
        return np.linalg.solve(self.a, self.phi @ self.f.ravel()).reshape(self.shape)

    def exact(self, t: float) -> Floats:
        limit = self.limit().ravel()
        return (limit + expm(-t * self.a) @ (self.u.ravel() - limit)).reshape(self.shape)


# --- the functional --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient(name: str, measure: str) -> None:
    for metric in METRICS:
        p = Plain(name, measure, metric)
        expected = (p.diffusion @ p.u.ravel() + p.phi @ (p.u - p.f).ravel()).reshape(p.shape)
        np.testing.assert_allclose(p.e.gradient(p.u, metric), expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    assert math.isclose(p.e.value(p.u), p.value(p.u), rel_tol=1e-12)
    total = float((p.w * p.degree).sum())
    assert math.isclose(p.e.value(p.u, normalize=True), p.value(p.u) / total, rel_tol=1e-12)
    assert p.e.fidelity.shape == p.given.shape


@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("name", CASES)
def test_minimizer(name: str, measure: str) -> None:
    p = Plain(name, measure)
    found = p.e.minimizer(rtol=1e-12)
    assert found.success, found.message
    np.testing.assert_allclose(found.u, p.limit(), rtol=0, atol=1e-9)
    lift = np.array([1e6, 0, -1e6])
    lifted = nl.E(p.k, p.f + lift, p.given, measure=measure).minimizer(rtol=1e-12)
    np.testing.assert_allclose(lifted.u - lift, p.limit(), rtol=0, atol=1e-7)


def test_small_fidelities_leave_the_mean_that_they_weigh() -> None:
    p = Plain("features", "degree")
    mass = p.m[:, None, None] * p.own
    mean = np.linalg.solve(mass.sum(axis=0), np.einsum("nij,nj->i", mass, p.f))
    found = nl.E(p.k, p.f, 1e-12 * p.given, measure="degree").minimizer()
    assert found.success, found.message
    np.testing.assert_allclose(found.u, np.broadcast_to(mean, p.shape), rtol=0, atol=1e-9)


def test_directions_without_fidelity_stay_where_the_iteration_starts() -> None:
    """With one matrix of rank 2 for all, the third direction has every constant as a minimizer."""
    p = Plain("one for all", "degree", rank=2)
    found = p.e.minimizer(rtol=1e-12)
    assert found.success, found.message
    residual = p.a @ found.u.ravel() - p.phi @ p.f.ravel()
    np.testing.assert_allclose(residual, 0, rtol=0, atol=1e-9)
    free = np.linalg.eigh(p.own[0])[1][:, 0]
    np.testing.assert_allclose(np.ptp(found.u @ free), 0, atol=1e-9)
    with pytest.raises(nl.NumericalError, match="fidelity: the system is singular"):
        nl.equilibrium(p.flow)


@pytest.mark.parametrize("measure", METRICS)
def test_multiples_of_the_unit_matrix_are_numbers(measure: str) -> None:
    p = Plain("rows share", measure)
    numbers = np.random.default_rng(0).uniform(0, 2, PLANE.shape)
    one = nl.E(p.k, p.f, numbers, measure=measure)
    other = nl.E(p.k, p.f, numbers[..., None, None] * np.eye(CHANNELS), measure=measure)
    assert math.isclose(one.value(p.u), other.value(p.u), rel_tol=1e-13)
    for metric in METRICS:
        np.testing.assert_allclose(one.gradient(p.u, metric), other.gradient(p.u, metric), rtol=0, atol=1e-12)
        np.testing.assert_allclose(one.fidelity_in(metric).bounds(), other.fidelity_in(metric).bounds(), rtol=1e-13)
    np.testing.assert_allclose(one.minimizer().u, other.minimizer().u, rtol=0, atol=1e-8)


@pytest.mark.parametrize("nodes", [(2, 5), (2, 1), (1, 5), (1, 1)])
@pytest.mark.parametrize("scale", ["none", "number", "nodes"])
def test_operator(nodes: tuple[int, ...], scale: str) -> None:
    given = matrices(nodes)
    factor: Any = {"none": 1.0, "number": 0.3, "nodes": WEIGHTS}[scale]
    operator = MatrixFidelity(given) if scale == "none" else MatrixFidelity(given).scaled(factor)
    own = np.broadcast_to(np.asarray(factor)[..., None, None] * given, (2, 5, CHANNELS, CHANNELS))
    v, f = normal((2, 5, CHANNELS)), normal((2, 5, CHANNELS), 2)
    damping = np.linalg.inv(np.eye(CHANNELS) + 0.7 * own)

    def product(a: Floats, b: Floats) -> Floats:
        return np.asarray((a @ b[..., None])[..., 0])

    np.testing.assert_allclose(operator.times(v), product(own, v), rtol=0, atol=1e-13)
    np.testing.assert_allclose(operator.damped(v, 0.7), product(damping, v), rtol=0, atol=1e-13)
    expected = product(damping, v + 0.7 * product(own, f))
    np.testing.assert_allclose(operator.implicit_step(v, f, 0.7), expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(Fidelity.implicit_step(operator, v, f, 0.7), expected, rtol=0, atol=1e-13)
    both = np.concatenate([v, f], axis=-1)
    side_by_side = operator.times(both)
    np.testing.assert_allclose(side_by_side[..., CHANNELS:], product(own, f), rtol=0, atol=1e-13)
    np.testing.assert_allclose(operator.damped(both, 0.7)[..., CHANNELS:], product(damping, f), rtol=0, atol=1e-13)
    values = np.linalg.eigvalsh(own)
    np.testing.assert_allclose(operator.bounds(), (values.min(), values.max()), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(np.broadcast_to(operator.values, own.shape), own, rtol=1e-15)
    np.testing.assert_allclose(operator.scaled(2.0).scaled(WEIGHTS).times(v), 2 * WEIGHTS[..., None] * product(own, v))
    measure = np.random.default_rng(9).uniform(0.1, 1, (2, 5, 1))
    centre = operator.centre(f, measure, (0, 1))
    np.testing.assert_allclose((measure * product(own, f - centre)).sum(axis=(0, 1)), 0, atol=1e-10)
    assert operator.width == CHANNELS
    assert NodeFidelity(1.0).width == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("nodes", [(2, 5), (2, 1), (1, 1)])
@pytest.mark.parametrize("scale", ["number", "nodes"])
def test_steps_of_matrices_that_are_learnt_are_those_of_their_inverses(
    scale: str, nodes: tuple[int, ...], dtype: str
) -> None:
    torch = torch_on_one_thread()
    kind, factor = getattr(torch, dtype), 0.3 if scale == "number" else WEIGHTS
    given = torch.from_numpy(matrices(nodes)).to(kind).requires_grad_()
    operator = MatrixFidelity(given).scaled(factor if scale == "number" else torch.from_numpy(WEIGHTS).to(kind))
    v, f = (torch.from_numpy(normal((2, 5, CHANNELS), seed)).to(kind) for seed in (1, 2))
    assert operator._learnt
    own = np.asarray(factor)[..., None, None] * given.detach().double().numpy()
    damping = np.linalg.inv(np.eye(CHANNELS) + 0.7 * own)
    # A rounding of what is solved, times the condition number.
    rounding = 8 * torch.finfo(kind).eps * (1 + 0.7 * np.linalg.norm(own, 2, axis=(-2, -1)).max())
    for found, expected in (
        (operator.damped(v, 0.7), damping @ v.double().numpy()[..., None]),
        (operator.implicit_step(v, f, 0.7) - v, 0.7 * damping @ own @ (f - v).double().numpy()[..., None]),
    ):
        assert found.dtype == kind
        np.testing.assert_allclose(found.detach().double(), expected[..., 0], rtol=0, atol=rounding * 4)


@pytest.mark.parametrize("nodes", [(8,), (1,)])
@pytest.mark.parametrize("method", ["direct", "iterative"])
@pytest.mark.parametrize("metric", METRICS)
def test_matrices_of_one_channel_are_numbers(metric: str, method: str, nodes: tuple[int, ...]) -> None:
    f, strength = normal((8, 1)), normal(nodes) ** 2
    weights = nl.affinity(nl.Gaussian(1.2), POINTS)
    for given in (strength[:, None, None], MatrixFidelity(strength[:, None, None])):
        flow = nl.GradientFlow(nl.E(weights, f, given), metric)
        found = nl.equilibrium(flow, method=method)
        k = 2 * feature_matrix(nl.Gaussian(1.2), POINTS.nodes, POINTS.nodes) * POINTS.weights
        own = np.broadcast_to(strength, 8)
        expected = np.linalg.solve(np.diag(k.sum(axis=1) + own) - k, own[:, None] * f)
        assert found.success
        np.testing.assert_allclose(found.u, expected, atol=1e-8)
        np.testing.assert_array_equal(flow.functional.fidelity, own)


def test_implicit_step_keeps_its_digits_for_large_fidelities() -> None:
    """The eigenvalues are 0, 1 and 1e8: along the first the start stays, though f is there multiplied by rounding."""
    turn = np.linalg.qr(normal((CHANNELS, CHANNELS)))[0]
    operator = MatrixFidelity(((turn * [0, 1, 1e8]) @ turn.T)[None])
    v, f = normal((4, CHANNELS)) + 1e4, normal((4, CHANNELS), 2) + 1e4
    step = operator.implicit_step(v, f, 1.0)
    np.testing.assert_allclose((step - v) @ turn[:, 0], 0, atol=1e-6)
    np.testing.assert_allclose((step - f) @ turn[:, 2], 0, atol=1e-6)
    assert np.abs((Fidelity.implicit_step(operator, v, f, 1.0) - v) @ turn[:, 0]).max() > 1e-5


# --- flows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["features", "rows share", "groups"])
def test_steps(name: str, metric: str) -> None:
    p = Plain(name, "degree", metric)
    dt = 0.9 / np.linalg.eigvals(p.a).real.max()
    unit = np.eye(len(p.a))
    start, source = p.u.ravel(), p.phi @ p.f.ravel()

    def after(integrator: Integrator, t: float) -> Floats:
        return np.asarray(nl.solve(p.flow, p.u, t=t, integrator=integrator).final)

    explicit = start - dt * (p.a @ start - source)
    np.testing.assert_allclose(after(nl.ExplicitEuler(dt), dt), explicit.reshape(p.shape), rtol=0, atol=1e-12)
    implicit = np.linalg.solve(unit + dt * p.phi, start - dt * p.diffusion @ start + dt * source)
    np.testing.assert_allclose(after(nl.SemiImplicit(dt), dt), implicit.reshape(p.shape), rtol=0, atol=1e-12)
    np.testing.assert_allclose(after(nl.Exponential(), 3 * dt), p.exact(3 * dt), rtol=0, atol=1e-10)
    np.testing.assert_allclose(after(nl.RungeKutta(1e-10, 1e-12), 3 * dt), p.exact(3 * dt), rtol=0, atol=1e-8)


def test_layer() -> None:
    p = Plain("features", "degree")
    small = 0.9 / p.e.fidelity_in("degree").bounds()[1] * p.given
    flow = nl.GradientFlow(nl.E(p.k, p.f, small, measure="degree"), "degree")
    found = nl.solve(flow, p.u, t=1, integrator=nl.NeutrenoStep()).final
    expected = p.k.average(p.u) + (small @ (p.f - p.u)[..., None])[..., 0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    attention = nl.AttentionFlow(p.k, p.f, small)
    np.testing.assert_allclose(nl.solve(attention, p.u, t=1, integrator=nl.NeutrenoStep()).final, expected, atol=1e-13)
    assert math.isclose(attention.energy(p.u), nl.E(p.k, p.f, small, measure="degree").value(p.u), rel_tol=1e-12)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("name", ["features", "columns share", "groups"])
def test_limits_of_steps(name: str, metric: str) -> None:
    p = Plain(name, "degree", metric)
    values = np.sort(np.linalg.eigvals(p.a).real)
    np.testing.assert_allclose(dense_operator(p.flow), p.a, rtol=0, atol=1e-12 * values[-1])
    assert math.isclose(largest_eigenvalue(p.flow), values[-1], rel_tol=1e-10)
    assert math.isclose(relaxation_rate(p.flow), values[0], rel_tol=1e-8)
    low, high = p.flow.spectral_bounds()
    assert low <= values[0] * (1 + 1e-12)
    assert high >= values[-1] * (1 - 1e-12)
    with pytest.raises(nl.StabilityError, match="explicit Euler needs dt <"):
        nl.solve(p.flow, p.u, t=1, integrator=nl.ExplicitEuler(2.1 / values[-1]))
    # At twice the longest step that is safe for every matrix, what the step does to some signal grows or not: measured.
    longest = nl.SemiImplicit().stability_limit(p.flow)
    step = np.linalg.solve(
        np.eye(len(p.a)) + 0.999 * longest * p.phi, np.eye(len(p.a)) - 0.999 * longest * p.diffusion
    ) if math.isfinite(longest) else np.zeros_like(p.a)  # fmt: skip
    assert np.abs(np.linalg.eigvals(step)).max() <= 1 + 1e-12


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_extreme_eigenvalues_by_iteration(shared: bool) -> None:
    """More unknowns than are looked at densely: 3 channels on 340 nodes."""
    k = nl.affinity(nl.Gaussian(2.0), nl.Grid(340, boundary="isolated"))  # whose degrees halve towards the ends
    e = nl.E(k, normal((340, CHANNELS)), matrices((1 if shared else 340,)), measure="degree")
    flow = nl.GradientFlow(e, "degree")
    root = np.sqrt(np.repeat(k.degree, CHANNELS))
    values = np.linalg.eigvalsh(root[:, None] * dense_operator(flow) / root)
    assert math.isclose(largest_eigenvalue(flow), values[-1], rel_tol=1e-5)
    assert math.isclose(relaxation_rate(flow), values[0], rel_tol=1e-6)


def test_limits_of_a_flow_that_is_not_symmetric() -> None:
    p = Plain("queries", "degree")
    flow = nl.AttentionFlow(p.k, p.f, p.given)
    operator = dense_operator(flow)
    assert operator.shape == (p.n * CHANNELS,) * 2
    values = np.linalg.eigvals(operator)
    assert math.isclose(euler_limit(flow), (2 * values.real / np.abs(values) ** 2).min(), rel_tol=1e-9)
    assert math.isclose(relaxation_rate(flow), values.real.min(), rel_tol=1e-9)
    with pytest.raises(nl.InputError, match="fidelity: got matrices with a P that is not symmetric"):
        nl.equilibrium(flow)
    end = nl.solve(flow, p.u, t=400, integrator=nl.SemiImplicit()).final
    np.testing.assert_allclose(flow.velocity(end), 0, atol=1e-8)


def test_equilibrium() -> None:
    for metric in METRICS:
        p = Plain("features", "degree", metric)
        found = nl.equilibrium(p.flow, rtol=1e-12)
        assert found.success, found.message
        assert found.method == "conjugate gradients"
        np.testing.assert_allclose(found.u, p.limit(), rtol=0, atol=1e-9)
    with pytest.raises(nl.InputError, match="method: got 'direct', expected 'auto' or 'iterative'"):
        nl.equilibrium(p.flow, method="direct")
    with pytest.raises(nl.InputError, match=r"fidelity: got one value for each node \(or a matrix\)"):
        nl.diversity_bounds(p.flow)
    assert nl.diversity(p.flow, found.u) < nl.diversity(p.flow, p.f)
    with pytest.raises(nl.InputError, match="fidelity: got 0 at every node"):
        nl.E(p.k, p.f, 0 * p.given).minimizer()


def test_evolving_kernel() -> None:
    keys, f = normal((8, CHANNELS)), normal((8, CHANNELS), 2)
    given = matrices((8,))
    k = nl.affinity(nl.Gaussian(2.0), POINTS, keys)
    flow = nl.GradientFlow(nl.E(k, f, given, measure="degree"), "degree", evolving=True)
    found = nl.solve(flow, keys, t=2, integrator=nl.SemiImplicit()).final
    u = keys
    for _ in range(2):
        moved = nl.affinity(nl.Gaussian(2.0), POINTS, u).average(u) + (given @ f[..., None])[..., 0]
        u = np.linalg.solve(np.eye(CHANNELS) + given, moved[..., None])[..., 0]
    np.testing.assert_allclose(found, u, rtol=0, atol=1e-12)
    attention = nl.AttentionFlow(k, f, given, evolving=True)
    np.testing.assert_allclose(nl.solve(attention, keys, t=2, integrator=nl.SemiImplicit()).final, u, atol=1e-12)


def test_a_checkpoint_belongs_to_its_matrices(tmp_path: Path) -> None:
    p = Plain("features", "degree")
    path = tmp_path / "half.npz"
    options: dict[str, Any] = {"t": 4.0, "integrator": nl.SemiImplicit()}
    nl.solve(p.flow, p.u, trackers=[nl.Checkpoint(path, every=2)], **options)
    np.testing.assert_array_equal(
        nl.solve(p.flow, p.u, resume=path, **options).final, nl.solve(p.flow, p.u, **options).final
    )
    other = nl.GradientFlow(nl.E(p.k, p.f, p.given + np.eye(CHANNELS), measure="degree"), "degree")
    with pytest.raises(nl.FileFormatError, match="belongs to another problem"):
        nl.solve(other, p.u, resume=path, **options)


# --- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("measure", METRICS)
def test_single_precision(measure: str) -> None:
    keys, f, u = (normal((8, CHANNELS), seed).astype(np.float32) for seed in (1, 2, 3))
    given = matrices((8,))
    single = nl.E(nl.affinity(nl.Gaussian(1.2), POINTS, keys), f, given.astype(np.float32), measure=measure)
    k = nl.affinity(nl.Gaussian(1.2), POINTS, keys.astype(float))
    double = nl.E(k, f.astype(float), given, measure=measure)
    assert math.isclose(single.value(u), double.value(u.astype(float)), rel_tol=1e-5)
    flows = [nl.GradientFlow(e, metric) for e in (single, double) for metric in METRICS]
    assert all(
        nl.solve(flow, u, t=0.1, integrator=step).final.dtype == np.float32
        for flow in flows[:2]
        for step in (nl.SemiImplicit(0.05), nl.Exponential(), nl.RungeKutta(1e-3, 1e-5))
    )
    for metric in METRICS:
        assert single.gradient(u, metric).dtype == np.float32
        np.testing.assert_allclose(single.gradient(u, metric), double.gradient(u.astype(float), metric), atol=1e-4)
    mixed = nl.E(single.given, f, given, measure=measure)  # the signal decides
    assert mixed.fidelity.dtype == mixed.gradient(u).dtype == np.float32
    assert math.isclose(mixed.value(u), single.value(u), rel_tol=1e-6)
    found = single.minimizer()
    assert found.success, found.message
    assert found.u.dtype == np.float32
    np.testing.assert_allclose(found.u, double.minimizer().u, rtol=0, atol=1e-3)


@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_torch_gives_the_numbers_of_numpy(dtype: str, measure: str) -> None:
    torch = torch_on_one_thread()
    keys, f, u = (normal((8, CHANNELS), seed).astype(dtype) for seed in (1, 2, 3))
    given = matrices((8,)).astype(dtype)
    tolerance = 1e-10 if dtype == "float64" else 1e-4
    here, there = (
        nl.E(nl.affinity(nl.Gaussian(1.2), POINTS, to(keys)), to(f), to(given), measure=measure)
        for to in (np.asarray, torch.from_numpy)
    )
    assert math.isclose(there.value(torch.from_numpy(u)), here.value(u), rel_tol=tolerance)
    for metric in METRICS:
        gradient = there.gradient(torch.from_numpy(u), metric)
        assert gradient.dtype == getattr(torch, dtype)
        np.testing.assert_allclose(gradient.numpy(), here.gradient(u, metric), rtol=tolerance, atol=tolerance)
        flows = [nl.GradientFlow(e, metric) for e in (here, there)]
        for step in (nl.SemiImplicit(0.05), nl.Exponential()):
            results = [nl.solve(flow, to, t=0.1, integrator=step).final for flow, to in zip(
                flows, (u, torch.from_numpy(u)), strict=True)]  # fmt: skip
            assert results[1].dtype == getattr(torch, dtype)
            np.testing.assert_allclose(results[1].numpy(), results[0], rtol=0, atol=10 * tolerance)
    found = there.minimizer()
    assert found.success, found.message
    assert found.u.dtype == getattr(torch, dtype)
    np.testing.assert_allclose(found.u.numpy(), here.minimizer().u, rtol=0, atol=10 * tolerance)


# --- what is refused -------------------------------------------------------------------------------------------------

K = nl.affinity(nl.Laplace(0.4), PLANE)
F = normal((3, 4, CHANNELS))
GIVEN = matrices((3, 4))


def spoiled(entry: tuple[int, ...], by: float) -> Floats:
    given = GIVEN.copy()
    given[entry] += by
    return given


REFUSED: dict[str, tuple[Any, str]] = {
    "asymmetric": (
        lambda: nl.E(K, F, spoiled((1, 2, 0, 1), 0.5)),
        r"fidelity: got a matrix with an asymmetry of 0.5 \(entries up to .*\) at node \(1, 2\), expected symmetric",
    ),
    "indefinite": (
        lambda: nl.E(K, F, np.where(np.arange(4)[:, None, None] == 3, -0.25, 1.0) * np.eye(CHANNELS)[None, None]),
        r"a smallest eigenvalue of -0.25 at node \(0, 3\), expected symmetric positive semidefinite matrices; set neg",
    ),
    "NaN": (lambda: nl.E(K, F, spoiled((0, 0, 0, 0), np.nan)), "fidelity: got 1 NaN or infinite"),
    "other channels": (
        lambda: nl.E(K, F, matrices((3, 4))[..., :2, :2]),
        r"fidelity: got shape \(3, 4, 2, 2\), expected \(3, 4, 3, 3\), one matrix for each node",
    ),
    "other nodes": (
        lambda: nl.E(K, F, matrices((3, 2))),
        r"fidelity: got shape \(3, 2, 3, 3\), expected \(3, 4, 3, 3\)",
    ),
    "a matrix of no node": (
        lambda: nl.E(K, F, np.eye(3)),
        r"fidelity: got shape \(3, 3\), expected a number or \(3, 4\), one for each node, or \(3, 4, 'D', 'D'\)",
    ),
    "no channels": (
        lambda: nl.E(K, F[..., 0], GIVEN),
        r"fidelity: got matrices \(shape \(3, 4, 3, 3\)\) for a signal without channels",
    ),
    "operator of other nodes": (
        lambda: nl.E(K, F, MatrixFidelity(matrices((2, 4)))),
        r"fidelity: got shape \(2, 4, 3, 3\), expected \(3, 4, 3, 3\)",
    ),
    "operator of another precision": (
        lambda: nl.E(K, F.astype(np.float32), MatrixFidelity(GIVEN)),
        "fidelity: got ndarray of float64, expected ndarray of float32",
    ),
    "not square": (lambda: MatrixFidelity(GIVEN[..., :2]), r"fidelity: got shape \(3, 4, 3, 2\), expected node axes"),
    "no nodes": (lambda: MatrixFidelity(np.eye(3)), r"fidelity: got shape \(3, 3\), expected node axes"),
    "signal of other channels": (
        lambda: MatrixFidelity(GIVEN).times(F[..., :2]),
        r"v: got shape \(3, 4, 2\), expected 2 node axes and 3 channels",
    ),
    "signal of other axes": (lambda: MatrixFidelity(GIVEN).times(F[0]), r"v: got shape \(4, 3\), expected 2 node axes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(nl.InputError, match=message):
        call()


@pytest.mark.parametrize(("shape", "by"), [((20_000, 2, 2), 1e-12), ((1, 60, 60), 1e-13)])
def test_rounding_grows_with_the_matrix_and_not_with_their_number(shape: tuple[int, ...], by: float) -> None:
    """Sums over D rows round by up to D bits; how many matrices there are is another matter."""
    given = np.broadcast_to(np.eye(shape[-1]), shape).copy()
    given[-1, 0, 1] += by
    if shape[0] == 1:
        assert MatrixFidelity(given).bounds() == pytest.approx((1, 1))
        given[-1, 0, 1] += 9 * by
    with pytest.raises(nl.InputError, match="an asymmetry of 1e-12"):
        MatrixFidelity(given)


def test_rounding_is_not_refused() -> None:
    """Covariances of few vectors have eigenvalues of 0, which rounding makes negative."""
    vectors = 1e3 * normal((50, 4, 20))
    covariance = np.swapaxes(vectors, 1, 2) @ vectors
    for given in (covariance, covariance.astype(np.float32)):
        assert MatrixFidelity(given).bounds()[0] >= 0


def test_degrees_that_overflow() -> None:
    """lambda / d where d is as small as exp(-800): a number that no float holds."""
    far = nl.from_matrix(np.eye(8) * 1e-300, POINTS).scaled(1e-20)
    f = normal((8, CHANNELS))
    with pytest.raises(nl.NumericalError, match="degree: so small at some node"):
        nl.E(far, f, matrices((8,))).fidelity_in("degree")


def test_memory_is_asked_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "1000")
    with pytest.raises(nl.MemoryLimitError, match="the eigenvectors of 12 matrices of 3 x 3 needs"):
        MatrixFidelity(GIVEN)


def test_an_operator_is_shared_by_functionals() -> None:
    operator = MatrixFidelity(GIVEN)
    e = nl.E(K, F, operator, measure="degree")
    assert e.fidelity_in("degree") is operator
    assert e.with_affinity(K.scaled(3.0)).fidelity_in("degree") is operator
    given = GIVEN.copy()
    kept = nl.E(K, F, given)
    before = kept.value(2 * F)
    given[...] = 0
    assert kept.value(2 * F) == before
