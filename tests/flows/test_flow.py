"""Flows: the velocity is the formula, the limits and rates are those of the theory, evolving kernels are recomputed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.errors import InputError
from nlflow.flows.flow import Flow
from nlflow.flows.spectrum import relaxation_rate
from tests.problems import Floats, gaussian_matrix, operator, problem, random_chain, torch_on_one_thread
from tests.reference import position_matrix

pytestmark = pytest.mark.numerical

METRICS = ("l2", "degree")
FIDELITIES = {"J": None, "E": 0.7, "E per node": np.linspace(0.0, 1.5, 24)}


# --- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [None, 1, 3])
@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fidelity", FIDELITIES.values(), ids=FIDELITIES.keys())
def test_velocity_is_the_formula(fidelity: Any, metric: str, measure: str, channels: int | None) -> None:
    p = problem(metric, fidelity, measure=measure, channels=channels)
    node = p.fidelity.reshape(-1, *(1,) * (p.start.ndim - 1))
    np.testing.assert_allclose(p.flow.linear(p.start), p.matrix @ p.start, rtol=0, atol=1e-14)
    np.testing.assert_allclose(p.flow.diffusion(p.start), p.matrix @ p.start - node * p.start, rtol=0, atol=1e-14)
    np.testing.assert_allclose(
        p.flow.velocity(p.start), node * p.observed - p.matrix @ p.start, rtol=0, atol=1e-14
    )  # fmt: skip
    assert p.flow.applications == 3
    np.testing.assert_allclose(p.flow.velocity(p.start), -p.flow.functional.gradient(p.start, metric), atol=1e-14)


@pytest.mark.parametrize("metric", METRICS)
def test_measure_mean_distance_and_speed(metric: str) -> None:
    p = problem(metric, 0.4, channels=2)
    weights = p.measure / p.measure.sum()
    np.testing.assert_allclose(p.flow.measure(p.start), p.measure, rtol=1e-13)
    mean = weights @ p.start
    np.testing.assert_allclose(p.flow.mean(p.start), mean[None], rtol=0, atol=1e-15)
    assert p.flow.distance_to_constant(p.start) == pytest.approx(p.norm(p.start - mean), rel=1e-13)
    assert p.flow.speed(p.start) == pytest.approx(p.norm(p.flow.velocity(p.start)), rel=1e-13)


@pytest.mark.parametrize("boundary", ["periodic", "reflect", "isolated"])
@pytest.mark.parametrize("method", ["dense", "stencil", "convolution"])
def test_every_method_gives_the_same_flow(method: str, boundary: Any) -> None:
    grid = nl.Grid((6, 7), spacing=(0.3, 0.2), boundary=boundary)
    rng = np.random.default_rng(0)
    u, f = rng.standard_normal((2, 6, 7, 2))
    fidelity = rng.random((6, 7))

    def velocity(chosen: str) -> Floats:
        affinity = nl.affinity(nl.Gaussian(width=0.15), grid, method=chosen)
        return np.asarray(nl.GradientFlow(nl.E(affinity, f, fidelity), "l2").velocity(u))

    np.testing.assert_allclose(velocity(method), velocity("dense"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("definite", [True, False])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fidelity", FIDELITIES.values(), ids=FIDELITIES.keys())
def test_cheap_bounds_hold_the_spectrum(fidelity: Any, metric: str, definite: bool) -> None:
    p = problem(metric, fidelity)
    matrix, flow = p.matrix, p.flow
    if not definite:
        x = p.flow.affinity.domain.nodes
        k = np.sqrt(((x[:, None] - x[None]) ** 2).sum(axis=2))  # far nodes are the similar ones: indefinite
        affinity = nl.from_matrix(k, p.flow.affinity.domain)
        diffusion, degree = operator(k, p.flow.affinity.domain.weights, metric)
        flow = nl.GradientFlow(nl.J(affinity) if fidelity is None else nl.E(affinity, p.observed, fidelity), metric)
        matrix = diffusion + np.diag(np.broadcast_to(0 if fidelity is None else fidelity, 24)) / (
            1 if metric == "l2" else degree[:, None]
        )
    values = np.linalg.eigvals(matrix).real
    low, high = flow.spectral_bounds()
    assert low - 1e-12 <= values.min()
    assert values.max() <= high + 1e-12
    rate = flow.affinity.degree.max() if metric == "l2" else 1.0
    assert flow.diffusion_bound() == pytest.approx(rate if definite else 2 * rate, rel=1e-14)
    assert flow.applications == 0


# --- limits and rates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", METRICS)
def test_j_flow_tends_to_the_mean_of_its_metric_at_the_rate_of_the_gap(metric: str) -> None:
    p = problem(metric, channels=2)
    gap = p.eigenvalues()[1]
    t_eval = np.array([0.0, 5.0, 15.0, 25.0, 60.0]) / gap
    solution = nl.solve(p.flow, p.start, t_eval=t_eval)
    weights = p.measure / p.measure.sum()
    np.testing.assert_allclose(solution.final, np.broadcast_to(weights @ p.start, (24, 2)), rtol=0, atol=1e-10)
    distances = np.array([p.flow.distance_to_constant(u) for u in solution.u])
    # ||u(t) - mean|| <= exp(-mu_2 t) ||u(0) - mean||, and in the end exactly at that rate.
    assert np.all(distances <= np.exp(-gap * t_eval) * distances[0] + 1e-11)
    rate = np.log(distances[2] / distances[3]) / (t_eval[3] - t_eval[2])
    assert rate == pytest.approx(gap, rel=0.02)
    assert not np.allclose(weights, 1 / 24)


@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fidelity", [0.05, np.where(np.arange(24) % 4 == 0, 1.0, 0.0)], ids=["scalar", "inpainting"])
def test_e_flow_tends_to_the_minimizer(fidelity: Any, metric: str, measure: str) -> None:
    p = problem(metric, fidelity, measure=measure, channels=2)
    minimizer = p.flow.functional.minimizer()
    assert minimizer.success
    exact = np.linalg.solve(p.matrix, p.fidelity[:, None] * p.observed)
    np.testing.assert_allclose(minimizer.u, exact, rtol=0, atol=1e-8)
    slowest = p.eigenvalues()[0]
    final = nl.solve(p.flow, p.start, t=40 / slowest).final
    np.testing.assert_allclose(final, exact, rtol=0, atol=1e-10)
    assert np.ptp(exact, axis=0).min() > 1e-3  # not a constant


def test_neutreno_layers_tend_to_the_minimizer_in_the_degree_measure() -> None:
    p = problem("degree", 0.3, channels=2)
    final = nl.solve(p.flow, t=150, integrator=nl.NeutrenoStep()).final
    minimizer = nl.E(p.flow.functional.given, p.observed, 0.3, measure="degree").minimizer().u
    np.testing.assert_allclose(final, minimizer, rtol=0, atol=1e-9)
    # As a walk stopped with probability lambda~ / (1 + lambda~): u* = lambda~ ((1 + lambda~) I - P)^-1 f.
    np.testing.assert_allclose(final, np.linalg.solve(p.matrix, 0.3 * p.observed), rtol=0, atol=1e-12)


# --- evolving kernels ------------------------------------------------------------------------------------------------


def features() -> tuple[nl.Points, Floats]:
    rng = np.random.default_rng(4)
    return nl.Points(np.arange(15.0), weights=rng.uniform(0.2, 1.0, 15)), rng.standard_normal((15, 2))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("fidelity", [None, 0.3])
def test_evolving_gradient_flow_is_the_loop_by_hand(fidelity: float | None, every: int, metric: str) -> None:
    points, u = features()
    affinity, f = nl.affinity(nl.Gaussian(width=0.8), points, u), u + 1.0
    functional = nl.J(affinity) if fidelity is None else nl.E(affinity, f, fidelity)
    flow = nl.GradientFlow(functional, metric, evolving=True, every=every)
    solution = nl.solve(flow, u, t=0.4, integrator=nl.ExplicitEuler(0.05))
    by_hand = u
    for step in range(8):
        if step % every == 0:
            matrix, degree = operator(gaussian_matrix(by_hand, 0.8), points.weights, metric)
        phi = (fidelity or 0.0) / (1.0 if metric == "l2" else degree[:, None])
        by_hand = by_hand - 0.05 * (matrix @ by_hand + phi * (by_hand - f))
    np.testing.assert_allclose(solution.final, by_hand, rtol=0, atol=1e-13)
    assert solution.stats["applications"] == 8
    frozen = nl.solve(nl.GradientFlow(functional, metric), u, t=0.4, integrator=nl.ExplicitEuler(0.05))
    assert np.abs(frozen.final - solution.final).max() > 1e-3


@pytest.mark.parametrize("every", [1, 2])
def test_evolving_attention_layers_are_the_loop_by_hand(every: int) -> None:
    points, u = features()
    rng = np.random.default_rng(5)
    query_map, key_map = rng.standard_normal((2, 2, 3))
    kernel = nl.ExpDotProduct(scale=0.4, query_map=query_map, key_map=key_map)
    flow = nl.AttentionFlow(nl.affinity(kernel, points, u), u, 0.4, evolving=True, every=every)
    by_hand = u
    for step in range(6):
        if step % every == 0:
            k = np.exp(0.4 * (by_hand @ query_map) @ (by_hand @ key_map).T) * points.weights
            average = k / k.sum(axis=1, keepdims=True)
        by_hand = average @ by_hand + 0.4 * (u - by_hand)
    final = nl.solve(flow, t=6, integrator=nl.NeutrenoStep()).final
    np.testing.assert_allclose(final, by_hand, rtol=0, atol=1e-13)


@pytest.mark.parametrize("make", [nl.AttentionFlow, lambda a, **k: nl.GradientFlow(nl.J(a), **k)], ids=["A", "G"])
@pytest.mark.parametrize(
    "affinity",
    [
        nl.affinity(nl.Gaussian(width=1.0), nl.Grid(8)),
        nl.affinity(nl.Gaussian(width=1.0), nl.Points(np.arange(8.0))),
        nl.from_matrix(np.ones((8, 8)), nl.Points(np.arange(8.0))),
        nl.affinity(nl.ExpDotProduct(), nl.Points(np.arange(8.0)), np.ones(8), queries=np.arange(8.0)),
    ],
    ids=["grid", "points", "matrix", "queries"],
)
def test_kernels_that_no_signal_changes_do_not_evolve(affinity: nl.Affinity, make: Callable[..., Flow]) -> None:
    with pytest.raises(InputError, match=r"^evolving: .*build it from features, or leave evolving=False"):
        make(affinity, evolving=True)


# --- flows by attention ----------------------------------------------------------------------------------------------


def test_attention_flow_takes_a_non_symmetric_affinity_as_it_is() -> None:
    points = nl.Points(np.arange(9.0), weights=np.linspace(0.5, 1.5, 9))
    k = random_chain(9)
    flow = nl.AttentionFlow(nl.from_matrix(k, points), np.ones(9), 0.2)
    u = np.random.default_rng(0).standard_normal(9)
    average = k * points.weights / (k @ points.weights)[:, None]
    np.testing.assert_allclose(flow.velocity(u), average @ u - u + 0.2 * (1 - u), rtol=0, atol=1e-15)
    assert (flow.symmetric, flow.functional, flow.metric) == (False, None, "degree")
    assert np.isnan(nl.solve(flow, u, t=1.0).energy).all()
    with pytest.raises(InputError, match=r"^integrator: Exponential needs a symmetric affinity"):
        nl.solve(flow, u, t=1.0, integrator=nl.Exponential())
    with pytest.raises(InputError, match=r"^trackers: Energy needs a flow that descends a functional"):
        nl.solve(flow, u, t=1.0, trackers=[nl.Energy()])


@pytest.mark.parametrize("fidelity", [0.0, 0.6, np.linspace(0, 1, 15)], ids=["J", "E", "per node"])
def test_symmetric_attention_flow_is_the_gradient_flow_in_the_degree_metric(fidelity: Any) -> None:
    points, u = features()
    affinity = nl.affinity(nl.ExpDotProduct(), points, u)
    attention = nl.AttentionFlow(affinity, u, fidelity)
    gradient = nl.GradientFlow(nl.E(affinity, u, fidelity, measure="degree"), "degree")
    assert attention.symmetric
    one, two = (nl.solve(flow, 2 * u, t_eval=[0.5, 3.0]) for flow in (attention, gradient))
    np.testing.assert_allclose(one.u, two.u, rtol=0, atol=1e-12)
    np.testing.assert_allclose(one.energy, two.energy, rtol=1e-12)
    assert np.isfinite(one.energy).all()
    plain = nl.AttentionFlow(affinity)
    assert isinstance(plain.functional, nl.J)
    assert plain.functional.value(u) == pytest.approx(nl.J(affinity).value(u), rel=1e-14)


# --- dtypes and namespaces -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["stencil", "convolution"])
@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fidelity", [None, 0.5, np.linspace(0, 1, 32)], ids=["J", "E", "per node"])
def test_float32_stays_float32_on_grids(fidelity: Any, metric: str, measure: str, method: str) -> None:
    affinity = nl.affinity(nl.Gaussian(width=1.5), nl.Grid(32), method=method)
    u = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    functional = nl.J(affinity) if fidelity is None else nl.E(affinity, u, fidelity, measure=measure)
    flow = nl.GradientFlow(functional, metric)
    assert flow.velocity(u).dtype == np.float32
    for integrator in (nl.ExplicitEuler(0.01), nl.SemiImplicit(0.01), nl.RungeKutta(1e-3), nl.Exponential()):
        assert nl.solve(flow, u, t=0.1, integrator=integrator).u.dtype == np.float32


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fidelity", FIDELITIES.values(), ids=FIDELITIES.keys())
def test_torch_velocity(fidelity: Any, metric: str) -> None:
    torch = torch_on_one_thread()
    p = problem(metric, fidelity, channels=2)
    affinity = nl.affinity(
        nl.Gaussian(width=0.3), p.flow.affinity.domain, torch.as_tensor(p.flow.affinity.domain.nodes)
    )
    functional = nl.J(affinity)
    if fidelity is not None:
        given = torch.as_tensor(fidelity) if isinstance(fidelity, np.ndarray) else fidelity
        functional = nl.E(affinity, torch.as_tensor(p.observed), given, measure=metric)
    flow = nl.GradientFlow(functional, metric)
    velocity = flow.velocity(torch.as_tensor(p.start))
    assert velocity.dtype == torch.float64
    np.testing.assert_allclose(velocity.numpy(), p.flow.velocity(p.start), rtol=0, atol=1e-14)
    assert flow.speed(torch.as_tensor(p.start)) == pytest.approx(p.flow.speed(p.start), rel=1e-13)
    assert flow.spectral_bounds() == pytest.approx(p.flow.spectral_bounds(), rel=1e-13)


# --- what is refused -------------------------------------------------------------------------------------------------

A = nl.affinity(nl.Gaussian(width=1.0), nl.Points(np.arange(6.0)), np.arange(6.0))
F = np.arange(6.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nl.GradientFlow(A), r"^functional: got DenseAffinity, expected J\(affinity\) or E"),
        (lambda: nl.GradientFlow(None), r"^functional: got NoneType, expected"),
        (lambda: nl.GradientFlow(nl.J(A), "L2"), r"^metric: got 'L2', expected one of 'l2', 'degree'"),
        (lambda: nl.GradientFlow(nl.J(A), None), r"^metric: got None, expected one of"),
        (lambda: nl.GradientFlow(nl.J(A), every=0), r"^every: got 0, expected an integer >= 1"),
        (lambda: nl.GradientFlow(nl.J(A), every=1.5), r"^every: got 1.5, expected an integer >= 1"),
        (lambda: nl.GradientFlow(nl.J(A), every=2), r"^every: got 2 for a frozen kernel, expected evolving=True"),
        (lambda: nl.GradientFlow(nl.J(A), evolving="no"), r"^evolving: got 'no', expected True or False"),
        (lambda: nl.AttentionFlow(nl.J(A)), r"^affinity: got J, expected an Affinity"),
        (lambda: nl.AttentionFlow(A, fidelity=0.1), r"^observed: the signal f is needed when a fidelity is given"),
        (lambda: nl.AttentionFlow(A, fidelity=np.ones(6)), r"^observed: the signal f is needed"),
        (lambda: nl.AttentionFlow(A, F[:5]), r"^observed: got shape \(5,\), expected \(6,\) or \(6, 'D'\)"),
        (lambda: nl.AttentionFlow(A, F * np.nan), r"^observed: got 6 NaN or infinite value"),
        (lambda: nl.AttentionFlow(A, F.astype("f4")), r"^observed: got dtype float32, expected float64"),
        (lambda: nl.AttentionFlow(A, F, -0.1), r"^fidelity: got -0.1, expected a finite real number >= 0"),
        (lambda: nl.AttentionFlow(A, F, np.ones(5)), r"^fidelity: got shape \(5,\), expected a number or \(6,\)"),
        (lambda: nl.AttentionFlow(A, F, -F), r"^fidelity: got -5 at some node, expected values >= 0"),
        (lambda: nl.AttentionFlow(A, F, "much"), r"^fidelity: got 'much', expected"),
        (lambda: nl.AttentionFlow(A, F, every=True), r"^every: got True, expected an integer >= 1"),
    ],
)
def test_bad_arguments(make: Callable[[], Flow], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_reprs_tell_flows_apart() -> None:
    flows = [
        nl.GradientFlow(nl.J(A)),
        nl.GradientFlow(nl.J(A), "degree"),
        nl.GradientFlow(nl.E(A, F, 1)),
        nl.GradientFlow(nl.J(A), evolving=True),
        nl.AttentionFlow(A),
        nl.AttentionFlow(A, evolving=True),
    ]
    texts = {repr(flow) for flow in flows}
    assert len(texts) == 6
    assert all(re.fullmatch(r"(Gradient|Attention)Flow\(.*Gaussian.*6 nodes.*\)", text) for text in texts)


@pytest.mark.parametrize("boundary", ["periodic", "reflect", "isolated"])
@pytest.mark.parametrize(
    "integrator", [nl.ExplicitEuler(0.1), nl.SemiImplicit(0.1), nl.RungeKutta(), nl.Exponential()], ids=repr
)
def test_a_volume_flows_as_its_matrix_does(integrator: Any, boundary: Any) -> None:
    """Functionals, flows, limits and chains see a grid through its averages alone."""
    grid = nl.Grid((4, 3, 5), (0.5, 0.8, 0.6), boundary)
    matrix = position_matrix(nl.Gaussian(0.6), grid, 1)
    points = nl.Points(grid.nodes, grid.weights.ravel())
    f = np.random.default_rng(0).random(grid.shape)
    found = []
    for weights, u in ((nl.affinity(nl.Gaussian(0.6), grid, window=1), f), (nl.from_matrix(matrix, points), f.ravel())):
        e = nl.E(weights, u, 0.4, measure="degree")
        flow = nl.GradientFlow(e, "degree")
        run = nl.solve(flow, 1 - u, t=1.0, integrator=integrator)
        assert run.success
        chain = nl.MarkovChain(weights)
        results = [run.final, e.minimizer().u, chain.expectation(u, 3), chain.stationary, nl.equilibrium(flow).u]
        found.append([e.value(u), relaxation_rate(flow), *nl.diversity_bounds(flow), *results])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(np.ravel(ours), np.ravel(theirs), rtol=1e-6, atol=1e-9)


def test_a_wave_in_a_volume_decays_at_its_rate() -> None:
    """A Gaussian over the whole lattice: its eigenvalues are products of three sums of cosines."""
    shape, spacing, modes = (8, 6, 10), (0.5, 0.6, 0.4), (1, 2, 1)
    weights = nl.affinity(nl.Gaussian(1.0), nl.Grid(shape, spacing, "periodic"), method="convolution")
    wave = np.cos(2 * np.pi * sum(m * i / n for m, n, i in zip(modes, shape, np.indices(shape), strict=True)))
    lines = [np.exp(-((np.arange(-40, 41) * h) ** 2) / 2) for h in spacing]
    cosines = [np.cos(2 * np.pi * m * np.arange(-40, 41) / n) for m, n in zip(modes, shape, strict=True)]
    symbol = np.prod([(k * c).sum() / k.sum() for k, c in zip(lines, cosines, strict=True)])
    run = nl.solve(nl.GradientFlow(nl.J(weights), "degree"), wave, t=3.0, integrator=nl.Exponential())
    np.testing.assert_allclose(run.final, np.exp((symbol - 1) * 3.0) * wave, rtol=0, atol=1e-9)
