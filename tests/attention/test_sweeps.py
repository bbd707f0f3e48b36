"""Conjugate gradients over edges with Gauss-Seidel sweeps: dense solutions, how many iterations, and where they end."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array, diags_array

from nlflow import Constraint, E, Gaussian, InputError, J, Points, affinity, affinity_from_graph
from nlflow.functionals.preconditioners import choice
from tests.covering import pairs
from tests.functionals.test_elimination import balanced_source, constrained, islands, laplacian

pytestmark = pytest.mark.numerical


@pytest.fixture(scope="module")
def graph() -> Any:
    with pytest.warns(UserWarning, match="no edge to another node"):
        return affinity_from_graph(islands())


def random_graph(nodes: int, edges: int = 5) -> Any:
    """A path with random edges, which is far from a path: a few dozen iterations solve it."""
    rng = np.random.default_rng(0)
    ends = rng.integers(nodes, size=(2, edges * nodes))
    w = csr_array((rng.exponential(size=ends.shape[1]), tuple(ends)), shape=(nodes, nodes))
    w = w + w.T + diags_array([np.ones(nodes - 1)] * 2, offsets=[-1, 1])
    return csr_array(w - diags_array(w.diagonal()))


@pytest.mark.parametrize(
    ("labels", "strength", "channels", "dtype"), pairs([3, 80], [0.0, 0.5], [(), (4,), (17,)], ["f8", "f4"])
)
@pytest.mark.slow
def test_constraints_by_the_dense_system(graph: Any, labels: int, strength: float, channels: Any, dtype: str) -> None:
    dense = constrained(graph, labels, strength, channels, dtype)
    found = dense.energy.minimizer(constraint=dense.held, preconditioner="sweeps")
    assert found.success
    assert found.u.dtype == dense.f.dtype
    assert "sweeps" in found.message
    # The residual bounds the error by the inverse of the system, scaled to a diagonal of 1.
    root = np.sqrt(dense.system.diagonal())
    inverse = np.linalg.norm(np.linalg.inv(dense.system / root / root[:, None]), 2)
    rounding = 1e-10 if dtype == "f8" else 1e-5
    bound = 4 * inverse * root.max() / root.min() * rounding * np.linalg.norm(dense.expected)
    assert np.abs(found.u.reshape(131, -1)[dense.free] - dense.expected).max() < bound
    assert np.array_equal(found.u[dense.held.nodes], dense.held.values)


def test_sources_by_the_pseudo_inverse(graph: Any) -> None:
    w, source = islands(), balanced_source()
    found = J(graph.scaled(0.5)).potential(source, preconditioner="sweeps")
    assert found.success
    assert np.abs(laplacian(w) @ found.u - source).max() < 1e-9 * np.abs(source).max() * w.sum(axis=1).max()


def test_fidelities_without_a_constraint(graph: Any) -> None:
    f = np.random.default_rng(3).normal(size=(131, 2))
    found = [E(graph, f, 0.3, measure="degree").minimizer(preconditioner=name).u for name in ("sweeps", "direct")]
    assert np.abs(found[0] - found[1]).max() < 1e-8


def test_a_sweep_there_and_back_halves_the_iterations() -> None:
    graph = affinity_from_graph(random_graph(3000))
    held = Constraint([0, 7], [0.0, 1.0])
    options: dict[str, Any] = {"constraint": held, "rtol": 1e-4}
    counts = [J(graph).minimizer(**options, preconditioner=name).iterations for name in ("sweeps", "diagonal")]
    assert 4 < counts[0] <= 0.65 * counts[1]


def test_tolerances_are_no_closer_than_asked_for() -> None:
    """A second call has to reach the tolerance of the first residual, and not as small a part of its own."""
    graph = affinity_from_graph(random_graph(3000))
    held = Constraint([0, 7], [0.0, 1.0])
    options: dict[str, Any] = {"constraint": held, "preconditioner": "sweeps"}
    counts = [J(graph).minimizer(**options, rtol=rtol).iterations for rtol in (1e-4, 1e-6, 1e-8)]
    assert counts[0] < counts[1] < counts[2]


def test_maxiter_holds_for_them() -> None:
    path = affinity_from_graph(diags_array([np.ones(2999)] * 2, offsets=[-1, 1]).tocsr())
    held = Constraint([0, 2999], [0.0, 1.0])
    found = J(path).minimizer(constraint=held, preconditioner="sweeps", maxiter=40)
    assert not found.success
    assert found.iterations == 41  # with the one around them
    assert "raise maxiter" in found.message
    graph = affinity_from_graph(random_graph(3000))
    held = Constraint([0, 7], [0.0, 1.0])
    whole = J(graph).minimizer(constraint=held, preconditioner="sweeps").iterations  # of two calls
    assert J(graph).minimizer(constraint=held, preconditioner="sweeps", maxiter=whole - 6).iterations <= whole - 4


def test_slow_ones_go_on_with_multigrid(monkeypatch: Any) -> None:
    """On a path they would take hundreds of iterations; beside an edge of 1e-8 of others float32 has no digits."""
    monkeypatch.setattr(choice, "_SMALL", 100)
    path = affinity_from_graph(diags_array([np.ones(2999)] * 2, offsets=[-1, 1]).tocsr())
    found = J(path).minimizer(constraint=Constraint([0, 2999], [0.0, 1.0]), preconditioner="graph")
    assert "multigrid" in found.message
    assert np.abs(found.u - np.linspace(0, 1, 3000)).max() < 1e-8
    w = random_graph(300).toarray()
    tied = np.block([[w, np.zeros_like(w)], [np.zeros_like(w), w]])
    tied[0, 300] = tied[300, 0] = 1e-8
    source = np.zeros(600)
    source[[10, 400]] = 1, -1
    found = J(affinity_from_graph(tied)).potential(source, preconditioner="graph", rtol=1e-5)
    assert "multigrid" in found.message
    assert found.success
    assert found.u[10] - found.u[400] == pytest.approx(1e8 / 2, rel=1e-4)


def test_edges_are_kept_with_the_graph(graph: Any) -> None:
    source = np.zeros(131)
    source[[0, 1]] = 1, -1
    J(graph).potential(source, preconditioner="sweeps")
    kept = graph.kept.pop("sweeps")
    first = J(graph.scaled(4.0)).minimizer(
        constraint=Constraint([0, 95, 130], [0.0, 1.0, 2.0]), preconditioner="sweeps"
    )
    assert first.success
    again = graph.kept["sweeps"]  # of held nodes too: they only stay 0
    assert all(np.array_equal(a, b) for a, b in zip(again[0], kept[0], strict=True))
    J(graph).potential(source, preconditioner="sweeps")
    assert graph.kept["sweeps"] is again
    other = pickle.loads(pickle.dumps(copy.deepcopy(graph)))
    assert other.kept == {}
    found = [J(p).potential(source, preconditioner="sweeps").u for p in (other, graph)]
    assert np.abs(found[0] - found[1]).max() < 1e-8 * np.abs(found[1]).max()


def test_what_they_are_not_for() -> None:
    all_pairs = affinity(Gaussian(width=1.0), Points(np.linspace(0, 1, 5)), method="dense")
    wide = np.diag(np.logspace(-20, 20, 5), 1)
    for given in (all_pairs, affinity_from_graph(wide + wide.T)):
        with pytest.raises(InputError, match="degrees are within a factor of 1e30"):
            J(given).minimizer(constraint=Constraint([0], [1.0]), preconditioner="sweeps")
