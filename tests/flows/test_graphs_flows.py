"""Flows, minimizers and chains on given graphs against plain matrices, in one piece and in several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.sparse.csgraph import laplacian
from scipy.sparse.linalg import expm_multiply

import nlflow as nl
from nlflow import E, GradientFlow, InputError, J, MarkovChain, NlflowWarning, Points, affinity_from_graph
from tests.covering import pairs
from tests.graphs import KINDS, N, averaging, signal, weights

pytestmark = pytest.mark.numerical

# ---- nodes without edges, and several pieces


def pieces() -> Any:
    """Return two rings and a node alone."""
    return sparse.block_diag([weights(n=8), weights(n=5, seed=2), sparse.csr_array((1, 1))]).tocsr()


def test_nodes_without_edges_keep_their_value() -> None:
    with pytest.warns(NlflowWarning, match="1 of 14 nodes have no edge to another node"):
        a: Any = affinity_from_graph(pieces())
    assert "3 connected components (sizes 8, 5, 1)" in a.reason
    assert a.component_count == 3
    assert a.components.tolist() == [0] * 8 + [1] * 5 + [2]
    for u in (signal(14), signal((14, 2)) * 1e-10):
        assert np.array_equal(a.average(u)[-1], u[-1])
        assert np.array_equal(a.push(u)[-1], u[-1])
    k = pieces().toarray()
    assert a.degree[-1] == pytest.approx(k.sum() / 13)
    assert np.abs(a.laplacian("symmetric").toarray() - laplacian(k, normed=True)).max() <= 1e-14
    end = nl.solve(GradientFlow(J(a)), signal(14), t=100.0).final
    assert np.ptp(end[:8]) < 1e-9 < np.ptp(end)


def test_a_graph_without_edges_leaves_everything() -> None:
    with pytest.warns(NlflowWarning, match="3 of 3 nodes"):
        a = affinity_from_graph(sparse.csr_array((3, 3)))
    assert a.average(np.arange(3.0)).tolist() == [0, 1, 2]


@pytest.mark.parametrize("directed", [False, True])
def test_claims_that_need_one_piece_name_the_number_of_pieces(directed: bool) -> None:
    n, many = 3, 2000  # more than 4096 nodes in all
    ring = np.eye(n, k=1) + np.eye(n, k=1 - n) + np.eye(n)
    a = affinity_from_graph(sparse.kron(sparse.eye_array(many), ring if directed else ring + ring.T))
    assert f"{many} connected components (sizes 3, 3, 3, 3, 3, ...)" in a.reason
    chain, u = MarkovChain(a), signal(n * many)
    flow = nl.AttentionFlow(a) if directed else GradientFlow(J(a))
    for claim in (
        lambda: chain.stationary,
        lambda: chain.limit(u),
        lambda: chain.second_eigenvalue,
        lambda: chain.mixing_time(start=0),
        lambda: nl.equilibrium(flow, u),
    ):
        with pytest.raises(InputError, match=f"{many} classes of states"):
            claim()
    assert not chain.irreducible


# ---- flows and minimizers

INTEGRATORS: dict[str, tuple[Any, float]] = {
    "exponential": (nl.Exponential(tol=1e-10), 1e-8),
    "runge-kutta": (nl.RungeKutta(rtol=1e-9, atol=1e-11), 1e-7),
    "euler": (nl.ExplicitEuler(dt=1e-3), 2e-2),
    "semi-implicit": (nl.SemiImplicit(dt=1e-3), 2e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "metric", "fidelity", "integrator", "dtype", "channels"),
    pairs(KINDS, ["l2", "degree"], [None, 0.4], list(INTEGRATORS), [np.float64, np.float32], [(), (2,)]),
)
def test_flows_are_those_of_the_exponential(
    kind: str, metric: str, fidelity: float | None, integrator: str, dtype: Any, channels: Any
) -> None:
    k, t = weights(kind), 0.7
    a = affinity_from_graph(sparse.coo_array(k))
    u, f = signal((N, *channels), dtype), signal((N, *channels), dtype, seed=2)
    both = k + k.T
    operator = np.diag(both.sum(axis=1)) - both
    if metric == "degree":
        operator /= both.sum(axis=1)[:, None]
    phi = 0.0 if fidelity is None else fidelity
    operator += phi * np.eye(N)
    limit = np.linalg.solve(operator, phi * f) if phi else np.zeros_like(f)
    expected = limit + expm_multiply(-t * operator, (u - limit).astype(float), traceA=-t * np.trace(operator))
    functional = J(a) if fidelity is None else E(a, f, fidelity, measure=metric)
    solver, tolerance = INTEGRATORS[integrator]
    if integrator == "runge-kutta" and dtype == np.float32:
        solver = nl.RungeKutta(rtol=1e-6)
    found = nl.solve(GradientFlow(functional, metric), u, t=t, integrator=solver)
    assert found.success
    assert found.final.dtype == dtype
    assert np.abs(found.final - expected).max() <= max(tolerance, 0 if dtype == np.float64 else 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_averages(kind: str) -> None:
    k = weights(kind)
    a, u, f = affinity_from_graph(k), signal(N), signal(N, seed=2)
    p = averaging(k)[0]
    layer = nl.solve(nl.AttentionFlow(a), u, t=1.0, integrator=nl.AttentionStep()).final
    assert np.abs(layer - p @ u).max() <= 1e-14
    step = nl.solve(nl.AttentionFlow(a, f, 0.3), u, t=1.0, integrator=nl.NeutrenoStep()).final
    assert np.abs(step - p @ u - 0.3 * (f - u)).max() <= 1e-14
    limit = np.linalg.solve(1.3 * np.eye(N) - p, 0.3 * f)
    assert np.abs(nl.equilibrium(nl.AttentionFlow(a, f, 0.3)).u - limit).max() <= 1e-8


@pytest.mark.parametrize(
    ("kind", "preconditioner", "measure", "dtype"),
    pairs(KINDS, ["auto", "diagonal", "multigrid"], ["l2", "degree"], [np.float64, np.float32]),
)
def test_minimizers_solve_the_linear_system(kind: str, preconditioner: str, measure: str, dtype: Any) -> None:
    n = 200  # more than the coarsest grid of multigrid has
    k = weights(kind, n)
    a, f = affinity_from_graph(sparse.csr_array(k)), signal(n, dtype)
    both = k + k.T
    degree = both.sum(axis=1)
    phi = np.full(n, 0.2) if measure == "l2" else 0.2 * degree
    expected = np.linalg.solve(np.diag(degree + phi) - both, phi * f)
    found = E(a, f, 0.2, measure=measure).minimizer(preconditioner=preconditioner)
    assert found.success
    assert np.abs(found.u - expected).max() <= (1e-8 if dtype == np.float64 else 1e-4)


@pytest.mark.parametrize("p", [1.0, 1.5])
def test_p_functionals_take_the_edges(p: float) -> None:
    k = weights("directed")
    f = signal(N)
    here, there = (nl.Ep(a, f, 0.5, p=p) for a in (affinity_from_graph(k), _dense(k)))
    assert here.value(f[::-1]) == pytest.approx(there.value(f[::-1]), rel=1e-12)
    assert np.abs(here.minimizer().u - there.minimizer().u).max() <= 1e-2
    flow = nl.PFlow(nl.Jp(affinity_from_graph(k), p))
    assert nl.solve(flow, f, t=0.1, integrator=nl.LaggedDiffusivity(dt=0.05)).success


def _dense(k: Any) -> Any:
    return nl.from_matrix(k, Points(np.arange(len(k)), np.ones(len(k))))


# ---- chains


@pytest.mark.parametrize(("kind", "laziness"), pairs(KINDS, [0.0, 0.5]))
@pytest.mark.slow
def test_chains_are_those_of_the_matrix(kind: str, laziness: float) -> None:
    k = weights(kind)
    here, there = (MarkovChain(a, laziness=laziness) for a in (affinity_from_graph(k), _dense(k)))
    assert np.abs(here.matrix() - there.matrix()).max() <= 1e-14
    assert np.abs(here.stationary - there.stationary).max() <= 1e-13
    assert here.reversible == there.reversible == (kind != "directed")
    assert (here.period, here.mixing_time()) == (there.period, there.mixing_time())
    assert abs(here.second_eigenvalue) == pytest.approx(abs(there.second_eigenvalue), abs=1e-12)
    assert np.abs(here.law(3, 4) - there.law(3, 4)).max() <= 1e-14
    assert np.abs(here.log_law - there.log_law).max() <= 1e-12
    law = np.bincount(here.walk(3, 4, 20_000, rng=0), minlength=N) / 20_000
    assert np.abs(law - here.law(3, 4)).max() <= 5 * np.sqrt(0.25 / 20_000)


@pytest.mark.slow
@pytest.mark.parametrize("laziness", [0.0, 0.5])
def test_walks_of_many_states_follow_edges(laziness: float) -> None:
    n, walkers = 20_000, 40_000
    ends = np.stack([np.tile(np.arange(n), 2), np.concatenate([(np.arange(n) + 1) % n, (np.arange(n) + 7) % n])])
    values = np.repeat([1.0, 3.0], n)
    chain = MarkovChain(affinity_from_graph(ends, edge_weight=values), laziness=laziness, memory_limit=2**22)
    found = np.bincount(chain.walk(5, 4, walkers, rng=0), minlength=n) / walkers
    law = chain.law(5, 4)
    assert np.abs(found - law).max() <= 5 * np.sqrt(0.25 / walkers)
    assert not found[law == 0].any()
    assert np.array_equal(chain.walk(5, 4, 100, rng=1, record=True)[-1], chain.walk(5, 4, 100, rng=1))
    f = np.zeros(n)
    f[:40] = np.arange(40)
    stopped = f[chain.stopped_walk(5, 0.5, walkers, rng=0)]
    expected = sum(0.5 ** (k + 1) * (chain.law(5, k) @ f) for k in range(40))
    assert abs(stopped.mean() - expected) <= 5 * stopped.std() / np.sqrt(walkers)


@pytest.mark.slow
def test_transient_states_and_states_that_are_never_left() -> None:
    path = sparse.coo_array(np.eye(5, k=1))  # walkers end at node 4
    with_end = affinity_from_graph(path)
    chain = MarkovChain(with_end)
    assert chain.stationary.tolist() == [0, 0, 0, 0, 1]
    assert chain.law(0, 4).tolist() == [0, 0, 0, 0, 1]
    assert not chain.irreducible
    assert with_end.average(np.arange(5.0)).tolist() == [1, 2, 3, 4, 4]
    assert chain.stopped_walk(0, np.eye(5)[4], 10).tolist() == [4] * 10
    with pytest.raises(InputError, match="reached from node 1"):
        chain.stopped_walk(0, 0.5 * np.eye(5)[0], 10)


@pytest.mark.slow
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.sampled(1)
def test_large_directed_chains_are_matrix_free(period: int) -> None:
    """More states than a matrix is made of: the law against power iteration, the period from edges."""
    n, rng = 6000, np.random.default_rng(0)
    there = [(rng.integers(0, n, n) // period * period + (np.arange(n) + 1) % period) % n for _ in range(4)]
    there.append(np.roll(np.arange(n), -1))
    ends = np.stack([np.tile(np.arange(n), 5), np.concatenate(there)])
    values = rng.uniform(0.5, 1.5, ends.shape[1])
    chain = MarkovChain(affinity_from_graph(ends, edge_weight=values), memory_limit=2**25)
    assert chain.irreducible
    assert chain.period == period
    assert not chain.reversible
    law = chain.stationary
    p = sparse.csr_array((values, ends), shape=(n, n))
    p = sparse.diags_array(1 / p.sum(axis=1)) @ p
    assert np.abs(p.T @ law - law).sum() <= 1e-6
    reversible = affinity_from_graph(sparse.csr_array(sparse.diags_array(np.linspace(1, 2, n)) @ (p + p.T > 0)))
    assert not reversible.symmetric
    assert MarkovChain(reversible, memory_limit=2**25).reversible


@pytest.mark.slow
def test_a_million_edges_take_no_matrix() -> None:
    """Flow, minimizer, chain and limit of 200 000 nodes within the memory of their edges."""
    n = 200_000
    rng = np.random.default_rng(0)
    ring = np.stack([np.arange(n), np.roll(np.arange(n), 1)])
    ends = np.hstack([ring, rng.integers(0, n, (2, 4 * n // 2))])
    a = affinity_from_graph(np.hstack([ends, ends[::-1]]))
    assert a.component_count == 1
    u = signal(n, np.float32)
    end = nl.solve(GradientFlow(J(a), "degree"), u, t=2.0)
    assert end.success
    assert abs(end.energy[-1]) < abs(end.energy[0])
    assert E(a, u, 0.5, measure="degree").minimizer().success
    chain = MarkovChain(a)
    assert chain.irreducible
    assert chain.period == 1
    limit = float(nl.equilibrium(GradientFlow(J(a), "degree"), u).u[0])
    assert limit == pytest.approx(float(chain.stationary @ u), abs=1e-6)
