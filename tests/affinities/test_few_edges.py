"""p-functionals on graphs with no edge, with one, and with isolated nodes: closed forms for all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.functionals.variational import harmonic_extension

POWERS = (1.0, 1.3, 2.0)
NOTHING = "the graph has no edges, so that J is 0 and the observed signal the minimizer"


def graph(nodes: int, edge: float = 0.0) -> nl.Affinity:
    """Nodes that see themselves; the first two see each other where `edge` > 0."""
    matrix = np.eye(nodes)
    if edge:
        matrix[0, 1] = matrix[1, 0] = edge
    return nl.from_matrix(matrix, nl.Points(np.arange(float(nodes)), weights=np.ones(nodes)))


@pytest.mark.parametrize("isotropic", [True, False])
@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_without_edges(nodes: int, p: float, isotropic: bool) -> None:
    f = np.random.default_rng(nodes).standard_normal(nodes)
    known = np.arange(nodes) != 1  # where there is such a node its value is missing
    functional = nl.Ep(graph(nodes), f, np.where(known, 2.0, 0.0), p, isotropic=isotropic)
    found = functional.minimizer()
    assert found.success
    assert (found.value, found.gap) == (0.0, 0.0)
    np.testing.assert_array_equal(found.u[known], f[known])
    assert nodes == 1 or found.u[1] == pytest.approx(f[known].mean(), abs=1e-15)
    if nodes > 2:
        assert found.message == NOTHING
    jp = nl.Jp(graph(nodes), p, isotropic=isotropic)
    assert jp.value(f) == 0
    assert p == 1 or not jp.gradient(f).any()
    solution = nl.solve(nl.PFlow(jp), f, t=0.2, integrator=nl.LaggedDiffusivity(0.1))
    np.testing.assert_allclose(solution.final, f, rtol=0, atol=1e-12)


@pytest.mark.parametrize("isotropic", [True, False])
@pytest.mark.parametrize("p", POWERS)
def test_what_is_missing_beside_isolated_nodes(p: float, isotropic: bool) -> None:
    """A missing node takes the value of its only neighbour, and the functional is 0, near which no gap is small."""
    f = np.array([9.0, -0.4, 0.7, 0.1, -0.5])
    found = nl.Ep(graph(5, 0.5), f, np.array([0.0, 1, 1, 1, 1]), p, isotropic=isotropic).minimizer()
    assert found.success
    assert (found.value, found.gap) == (0.0, 0.0)
    np.testing.assert_allclose(found.u, [-0.4, -0.4, 0.7, 0.1, -0.5], rtol=0, atol=1e-12)


def test_one_edge() -> None:
    """E_1 = W |u_1 - u_2| + 1/2 sum (u - f)^2 with W = K_12 = 1: both move by W until they meet."""
    for f, expected in (([3.0, 9.0], [4.0, 8.0]), ([3.0, 4.0], [3.5, 3.5])):
        found = nl.Ep(graph(2, 0.5), np.array(f), 1.0, 1).minimizer(rtol=1e-10)
        assert found.success
        np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("isotropic", [True, False])
@pytest.mark.parametrize("fidelity", [None, 2.0])
@pytest.mark.parametrize("values", [[3.0, 9.0], [[1.0, 2.0], [3.0, 5.0]]], ids=["signal", "image"])
def test_images_of_two_samples(values: Any, fidelity: float | None, isotropic: bool, dtype: str) -> None:
    image = np.array(values, dtype)
    with pytest.warns(nl.NlflowWarning, match="larger than the grid"):
        u, found, strength = nl.nonlocal_tv(image, sigma=1.0, fidelity=fidelity, isotropic=isotropic, return_info=True)
    np.testing.assert_allclose(u, image, rtol=1e-6)
    assert found.success
    assert found.message == NOTHING
    assert strength == (np.inf if fidelity is None else fidelity)


def test_more_than_half_of_the_nodes_isolated() -> None:
    """The first guess of the fidelity is of the nodes that have neighbours."""
    signal = 1e4 * np.arange(60.0) ** 2
    signal[:20] = np.random.default_rng(0).normal(scale=3.0, size=20)
    u, _, fidelity = nl.nonlocal_tv(signal, sigma=1.0, return_info=True)
    assert np.isfinite(u).all()
    assert fidelity > 0


@pytest.mark.parametrize("p", [1.5, 4.0])
def test_an_extension_that_is_constant_on_each_part_is_found(p: float) -> None:
    path = np.diag([1.0, 2.0], 1) + np.diag([1.0, 2.0], -1)
    apart = nl.affinity_from_graph(np.kron(np.eye(2), path))
    found = harmonic_extension(nl.Jp(apart, p), nl.Constraint([0, 4], [0.1, 0.3]))
    assert found.success, found.message
    np.testing.assert_allclose(found.u, [0.1, 0.1, 0.1, 0.3, 0.3, 0.3], rtol=1e-14)


def test_what_an_extension_is_not_of_is_named() -> None:
    ends, two = nl.Constraint([0], 1.0), graph(2, edge=1.0)
    for jp, constraint, words in (
        (nl.J(two), ends, "jp: got J, expected a Jp"),
        (nl.Jp(two, 3.0), {0: 1.0}, "constraint: got dict, expected Constraint"),
        (nl.Jp(two, 1.0), ends, "p: got 1, expected p > 1"),
    ):
        with pytest.raises(nl.InputError, match=words):
            harmonic_extension(jp, constraint)  # type: ignore[arg-type]


@pytest.mark.numerical
@pytest.mark.parametrize("channels", [1, 3])
def test_an_extension_near_total_variation_reaches_its_tolerance(channels: int) -> None:
    rng = np.random.default_rng(0)
    graph = nl.affinity_from_graph(nl.neighbour_graph(rng.random((120, 2)), 8, nl.Gaussian(1.0)))
    ends = nl.Constraint([0, 5, 9, 17], rng.random((4, channels)))
    found = harmonic_extension(nl.Jp(graph, 1.5), ends)
    assert found.success, found.message
    differences = found.u[:, None] - found.u[None]
    lengths = np.linalg.norm(differences, axis=-1)
    weights = graph.edges().toarray() / np.sqrt(np.where(lengths > 1e-14, lengths, np.inf))
    flow = np.einsum("ij,ijc->ic", weights, differences)
    flow[[0, 5, 9, 17]] = 0
    moduli = np.delete((weights * lengths).sum(axis=1), [0, 5, 9, 17])
    assert np.linalg.norm(flow) < 1.1e-6 * np.linalg.norm(moduli)
