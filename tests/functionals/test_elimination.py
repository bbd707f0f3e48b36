"""Sparse elimination on graphs: dense solutions, constraints and components, lost digits, what is kept."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest

from nlflow import Constraint, E, Gaussian, InputError, J, MemoryLimitError, Points, affinity, affinity_from_graph
from nlflow.functionals.preconditioners import choice
from nlflow.functionals.preconditioners.elimination import Elimination, LostDigitsError
from tests.covering import pairs

pytestmark = pytest.mark.numerical

SIZES = (90, 40, 1)


def islands(seed: int = 0) -> Any:
    """Random weights in three components, the last of which is a node without edges."""
    rng = np.random.default_rng(seed)
    w = np.zeros((sum(SIZES),) * 2)
    start = 0
    for size in SIZES:
        block = rng.exponential(size=(size, size)) * (rng.random((size, size)) < 0.1)
        block += np.diag(rng.random(size - 1), 1) if size > 1 else 0  # a path, so that it is connected
        w[start : start + size, start : start + size] = np.triu(block, 1)
        start += size
    return w + w.T


@pytest.fixture(scope="module")
def graph() -> Any:
    with pytest.warns(UserWarning, match="no edge to another node"):
        return affinity_from_graph(islands())


def laplacian(w: Any) -> Any:
    return np.diag(w.sum(axis=1)) - w


class Dense(NamedTuple):
    """A functional of the graph with values held at some nodes, and the dense system of the free ones, solved."""

    energy: Any
    held: Constraint
    f: Any
    free: Any
    system: Any
    expected: Any


def constrained(graph: Any, labels: int, strength: float, channels: Any, dtype: str = "f8") -> Dense:
    rng, w = np.random.default_rng(1), islands()
    nodes = np.concatenate([[130, 95], rng.permutation(90)[: labels - 2]])
    values = rng.normal(size=(labels, *channels)).astype(dtype)
    free = np.setdiff1d(np.arange(len(w)), nodes)
    phi = np.where(np.arange(len(w)) % 3 == 0, strength, 0.0)
    f = rng.normal(size=(len(w), *channels)).astype(dtype)
    d = w.sum(axis=1)
    system = laplacian(w) + np.diag(phi * d)
    right = ((phi * d)[:, None] * f.reshape(len(w), -1))[free]
    right -= system[np.ix_(free, nodes)] @ values.reshape(labels, -1)
    system = system[np.ix_(free, free)]
    energy = E(graph, f, phi, measure="degree") if strength else J(graph)
    return Dense(energy, Constraint(nodes, values), f, free, system, np.linalg.solve(system, right))


def balanced_source() -> Any:
    """A source whose sum over each component is 0."""
    source = np.random.default_rng(2).normal(size=(131, 3))
    for part in (slice(0, 90), slice(90, 130), slice(130, 131)):
        source[part] -= source[part].mean(axis=0)
    return source


@pytest.mark.parametrize(("labels", "strength", "channels"), pairs([3, 80], [0.0, 0.5], [(), (4,)]))
def test_constraints_by_the_dense_system(graph: Any, labels: int, strength: float, channels: Any) -> None:
    dense = constrained(graph, labels, strength, channels)
    found = dense.energy.minimizer(constraint=dense.held, preconditioner="direct")
    assert found.success
    assert found.iterations <= 2
    assert "direct" in found.message
    size = np.abs(dense.held.values).max()
    assert np.abs(found.u.reshape(131, -1)[dense.free] - dense.expected).max() < 1e-10 * size
    assert np.array_equal(found.u[dense.held.nodes], dense.held.values)


def test_sources_by_the_pseudo_inverse(graph: Any) -> None:
    w, source = islands(), balanced_source()
    found = J(graph.scaled(0.5)).potential(source, preconditioner="direct")
    assert found.iterations <= 2
    assert np.abs(laplacian(w) @ found.u - source).max() < 1e-10
    degree = w.sum(axis=1)
    for part in (slice(0, 90), slice(90, 130)):
        assert np.abs(degree[part] @ found.u[part]).max() < 1e-10 * np.abs(found.u).max() * degree[part].sum()


def test_fidelities_by_the_dense_system(graph: Any) -> None:
    w, f = islands(), np.random.default_rng(3).normal(size=131).astype(np.float32)
    phi = np.where(np.arange(131) % 5 == 0, 0.7, 0.0)
    d = np.where(np.arange(131) == 130, 1.0, w.sum(axis=1))
    expected = np.linalg.solve(laplacian(w) + np.diag(phi * d), phi * d * f)
    found = E(graph, f, phi, measure="degree").minimizer(preconditioner="direct")
    assert found.u.dtype == np.float32
    assert np.abs(found.u - expected).max() < 1e-5


@pytest.mark.parametrize("held", [None, 3, 70])
def test_self_adjoint_and_positive(graph: Any, held: int | None) -> None:
    out = None if held is None else np.isin(np.arange(131), np.r_[130, 129, np.arange(held - 2)])
    apply = Elimination(graph, np.zeros(131), out)
    measure = graph.measure("degree", np.empty(0))
    x, y = np.random.default_rng(4).normal(size=(2, 131))
    for part in (slice(0, 90), slice(90, 130), slice(130, 131)):  # what conjugate gradients give it
        for v in (x, y):
            v[part] -= measure[part] @ v[part] / measure[part].sum()
    if out is not None:
        x[out] = y[out] = 0
    left, right = (measure * apply(x)) @ y, (measure * x) @ apply(y)
    size = np.sqrt(((measure * apply(x)) @ x) * ((measure * apply(y)) @ y))
    assert abs(left - right) < 1e-11 * size
    assert size > 0


def test_factors_are_kept_with_the_graph(graph: Any) -> None:
    source = np.zeros(131)
    source[[0, 1]] = 1, -1
    J(graph).potential(source, preconditioner="direct")
    kept = graph.kept["elimination"]
    J(graph.scaled(3.0)).minimizer(constraint=Constraint([0, 95, 130], [0.0, 1.0, 2.0]), preconditioner="graph")
    assert graph.kept["elimination"] is kept
    assert graph.scaled(2.0).kept is graph.kept
    for other in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):  # factors cannot be copied
        assert other.kept == {}
        again = J(other).potential(source, preconditioner="direct").u
        assert np.array_equal(again, J(graph).potential(source, preconditioner="direct").u)


def test_weak_ties_are_refused_or_left_to_iterations() -> None:
    """Two paths, tied by an edge of 1e-14 of theirs: elimination has no digits of the tie."""
    w = np.diag(np.ones(39), 1)
    w[19, 20] = 1e-14
    tied = affinity_from_graph(w + w.T)
    source = np.zeros(40)
    source[[0, 10]] = 1, -1
    with pytest.raises(LostDigitsError, match="elimination loses its digits; use preconditioner='auto'"):
        J(tied).potential(source, preconditioner="direct")
    found = J(tied).potential(source, preconditioner="graph")
    assert "sweeps" in found.message
    assert not found.success  # nor has iteration
    assert "the error" in found.message


def test_which_one_a_graph_gets(graph: Any, monkeypatch: Any) -> None:
    source = np.zeros(131)
    source[[0, 1]] = 1, -1
    assert "direct" in J(graph).potential(source, preconditioner="graph").message
    monkeypatch.setattr(choice, "_SMALL", 130)
    assert "sweeps" in J(graph).potential(source, preconditioner="graph").message
    monkeypatch.setenv("NLFLOW_MEMORY_LIMIT", "1000")
    with pytest.raises(MemoryLimitError, match="if none of their entries is 0"):
        J(graph).potential(source, preconditioner="direct")


def test_all_pairs_have_no_factor() -> None:
    pairs_of = affinity(Gaussian(width=1.0), Points(np.linspace(0, 1, 5)), method="dense")
    with pytest.raises(InputError, match="it needs a symmetric graph of edges"):
        J(pairs_of).minimizer(constraint=Constraint([0], [1.0]), preconditioner="direct")


@pytest.mark.parametrize("given", [True, False])
def test_loops_hide_no_digits_of_light_edges(given: bool) -> None:
    """A path of equal edges, each 1e-10 of its node's loop: what is harmonic on it is a straight line."""
    count, light = 20, 1e-10
    order = np.random.default_rng(0).permutation(count)  # of the nodes along the path
    if given:
        path = np.eye(count) + light * (np.eye(count, k=1) + np.eye(count, k=-1))
        p = affinity_from_graph(path[np.ix_(order, order)])
    else:
        width = 1 / np.sqrt(-2 * np.log(light))
        p = affinity(Gaussian(width), Points(order[:, None] * 1.0), method="sparse", rtol=1e-13)
    ends = np.flatnonzero((order == 0) | (order == count - 1))
    found = J(p).minimizer(constraint=Constraint(ends, order[ends] / (count - 1.0)), preconditioner="direct")
    assert found.success, found.message
    np.testing.assert_allclose(found.u, order / (count - 1.0), rtol=0, atol=1e-13)
    one = p.average(np.cos(order))  # which has the loops still
    np.testing.assert_allclose(one, np.cos(order), rtol=0, atol=4 * light)
