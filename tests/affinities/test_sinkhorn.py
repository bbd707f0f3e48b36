"""Doubly stochastic affinities: against plain scalings, what they are symmetric in, and what has no scaling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nlflow import (
    AttentionFlow,
    ExpDotProduct,
    Gaussian,
    GradientFlow,
    Grid,
    InputError,
    J,
    MarkovChain,
    Mask,
    MemoryLimitError,
    NumericalError,
    Points,
    sinkhorn,
    solve,
)

pytestmark = pytest.mark.numerical


def points(count: int, weights: Any = None) -> Points:
    return Points(np.arange(float(count)), np.ones(count) if weights is None else weights)


def plain(k: Any, w: Any, rounds: int = 3000) -> Any:
    """Return P of the scaled kernel, w_j a_i k_ij b_j, by scaling columns and rows in turn."""
    a, b = np.ones(len(k)), np.ones(len(k))
    for _ in range(rounds):
        b = 1 / (k.T @ (w * a))
        a = 1 / (k @ (w * b))
    return a[:, None] * k * (b * w)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_it_is_the_limit_of_plain_scalings(symmetric: bool, weighted: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((15, 3))
    q = x if symmetric else rng.standard_normal((15, 3))
    w = rng.random(15) + 0.2 if weighted else np.ones(15)
    found = sinkhorn(ExpDotProduct(), points(15, w), x, queries=None if symmetric else q)
    expected = plain(np.exp(q @ x.T / np.sqrt(3)), w)
    assert np.abs(found.matrix - expected).max() < 1e-11
    assert found.symmetric is symmetric
    assert np.abs(found.matrix.sum(axis=1) - 1).max() < 1e-14
    assert np.abs(w @ found.matrix / w - 1).max() < 2e-12
    assert found.residual < 2e-12
    assert np.abs(found.degree - 1).max() < 2e-12


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_sums_are_one_for_logits_of_any_size(scale: float) -> None:
    x = np.random.default_rng(1).standard_normal((30, 4))
    found = sinkhorn(ExpDotProduct(scale=scale), points(30), x)
    for axis in (0, 1):
        assert np.abs(found.matrix.sum(axis=axis) - 1).max() < 1e-11
    assert np.array_equal(found.matrix > 0, found.matrix.T > 0)


def test_symmetric_where_queries_are_keys() -> None:
    x = np.random.default_rng(2).standard_normal((12, 3))
    found = sinkhorn(ExpDotProduct(), points(12), x)
    assert found.symmetric
    assert found.positive_semidefinite
    assert np.abs(found.matrix - found.matrix.T).max() < 1e-12
    assert found.potentials[0] is found.potentials[1]
    assert np.linalg.eigvalsh((found.matrix + found.matrix.T) / 2).min() > -1e-14


def test_symmetric_p_is_a_gradient_flow_in_l2() -> None:
    """du/dt = Pu - u is half of -grad J in L2, conserves the mean, and J falls; softmax has another gradient."""
    rng = np.random.default_rng(3)
    x, u = rng.standard_normal((20, 3)), rng.standard_normal((20, 2))
    p = sinkhorn(ExpDotProduct(), points(20), x)
    velocity = AttentionFlow(p).velocity(u)
    assert np.abs(velocity + J(p).gradient(u) / 2).max() < 1e-11
    found = solve(GradientFlow(J(p), metric="l2"), u, t_eval=[0.0, 0.5, 1, 2, 4])
    assert np.all(np.diff(found.energy) < 0)
    assert np.abs(found.final.mean(axis=0) - u.mean(axis=0)).max() < 1e-11
    assert MarkovChain(p).stationary == pytest.approx(np.full(20, 1 / 20), abs=1e-12)


def test_queries_of_their_own() -> None:
    rng = np.random.default_rng(4)
    x, q, u = rng.standard_normal((3, 10, 3))
    p = sinkhorn(ExpDotProduct(), points(10), x, queries=q)
    assert not p.symmetric
    assert not p.evolves
    assert np.abs(p.push(np.full(10, 0.1)) - 0.1).max() < 1e-12  # the uniform law is stationary
    both = p.symmetrized()
    assert np.abs(both.average(u) - (p.matrix + p.matrix.T) @ u / 2).max() < 1e-11
    with pytest.raises(InputError, match="evolving"):
        AttentionFlow(p, evolving=True)


def test_it_evolves_with_the_signal() -> None:
    x = np.random.default_rng(5).standard_normal((10, 3))
    first, second = (sinkhorn(ExpDotProduct(), points(10), y) for y in (x, 2 * x))
    assert np.array_equal(first.update(2 * x).matrix, second.matrix)
    one, other = (sinkhorn(Gaussian(1.0), points(10), y) for y in (x[:, 0], x[:, 1]))  # signals without channels
    assert np.array_equal(one.update(x[:, 1]).matrix, other.matrix)


def test_positions_do_not_evolve() -> None:
    p = sinkhorn(Gaussian(1.0), points(10))
    assert not p.evolves
    with pytest.raises(InputError, match="it compares node positions"):
        p.update(np.zeros(10))


def test_kernels_of_positions_and_matrices() -> None:
    grid = Grid(9)
    found = sinkhorn(Gaussian(width=2.0), grid)
    k = np.exp(-((grid.nodes - grid.nodes.T) ** 2) / 8)
    assert np.abs(found.matrix - plain(k, grid.weights.ravel())).max() < 1e-11
    assert np.abs(sinkhorn(k).matrix - plain(k, np.ones(9))).max() < 1e-11
    assert sinkhorn(k).symmetric
    assert sinkhorn(Gaussian(width=2.0, amplitude=7.0), grid).log_degree == pytest.approx(0, abs=1e-11)
    ring = np.eye(5) + np.roll(np.eye(5), 1, axis=1)
    assert np.abs(sinkhorn(3 * ring).matrix - ring / 2).max() < 1e-12


def test_masks_that_have_a_scaling() -> None:
    x = np.random.default_rng(6).standard_normal((10, 2))
    found = sinkhorn(ExpDotProduct(), points(10), x, mask=Mask(window=2))
    apart = np.abs(np.subtract.outer(np.arange(10), np.arange(10))) > 2
    assert found.symmetric
    assert not found.matrix[apart].any()
    assert np.abs(found.matrix.sum(axis=0) - 1).max() < 1e-11


def test_float32_and_tensors() -> None:
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(7).standard_normal((12, 3))
    exact = sinkhorn(ExpDotProduct(), points(12), x).matrix
    single = sinkhorn(ExpDotProduct(), points(12), x.astype(np.float32))
    assert single.matrix.dtype == np.float32
    assert np.abs(single.matrix - exact).max() < 1e-6
    assert np.abs(single.matrix.sum(axis=0) - 1).max() < 1e-6
    tensor = sinkhorn(ExpDotProduct(), points(12), torch.from_numpy(x))
    assert np.abs(tensor.matrix.numpy() - exact).max() < 1e-13


def test_what_has_no_scaling() -> None:
    x = np.random.default_rng(8).standard_normal((6, 2))
    with pytest.raises(InputError, match="row 1 is zero"):
        sinkhorn(np.diag([1.0, 0.0, 1.0]))
    with pytest.raises(InputError, match="column 2 is zero"):
        sinkhorn(np.array([[1.0, 1, 0], [1, 1, 0], [1, 1, 0]]))
    with pytest.raises(InputError, match="leave 1 of 3 rows without a column of their own"):
        sinkhorn(np.array([[1.0, 0, 0], [1, 0, 0], [1, 1, 1]]))
    with pytest.raises(InputError, match="drives 15 other entries to 0"):
        sinkhorn(ExpDotProduct(), points(6), x, mask=Mask(causal=True))
    with pytest.raises(InputError, match="different weights with zeros"):
        sinkhorn(np.eye(3) + np.roll(np.eye(3), 1, axis=1), points(3, [1.0, 2.0, 3.0]))
    with pytest.raises(NumericalError, match=r"sums of columns are off by .* after 3 iterations"):
        sinkhorn(ExpDotProduct(scale=4.0), points(6), x, queries=x[::-1].copy(), iterations=3)
    with pytest.raises(InputError, match="entries down to -1"):
        sinkhorn(-np.ones((2, 2)))
    with pytest.raises(InputError, match=r"expected \(N, N\)"):
        sinkhorn(np.ones((2, 3)))
    with pytest.raises(InputError, match="expected 2, one for each row"):
        sinkhorn(np.ones((2, 2)), points(3))
    with pytest.raises(InputError, match="features: got none for ExpDotProduct"):
        sinkhorn(ExpDotProduct(), points(6))
    with pytest.raises(InputError, match="kernel: got ndarray beside features, expected a Kernel"):
        sinkhorn(np.ones((6, 6)), points(6), x)
    with pytest.raises(InputError, match="domain: got NoneType"):
        sinkhorn(Gaussian(width=1.0))
    for kernel in (Gaussian(width=1.0), np.ones((6, 6))):
        with pytest.raises(InputError, match="domain: got ndarray, expected a Grid or Points"):
            sinkhorn(kernel, x)
    with pytest.raises(InputError, match=r"features: got shape \(5, 2\)"):
        sinkhorn(ExpDotProduct(), points(6), x[:5])
    with pytest.raises(InputError, match="overflow"):
        sinkhorn(ExpDotProduct(scale=1e300), points(6), 1e10 * x)
    with pytest.raises(MemoryLimitError, match="doubly stochastic affinity of 6 nodes"):
        sinkhorn(ExpDotProduct(), points(6), x, memory_limit=1000)
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match="requires a gradient"):
        sinkhorn(ExpDotProduct(), points(6), torch.ones(6, 2, requires_grad=True))


def test_positions_and_features_of_a_grid_of_two_axes() -> None:
    grid, x = Grid((3, 4), spacing=0.5), np.random.default_rng(0).standard_normal((3, 4, 2))
    z = grid.nodes[:, None] - grid.nodes
    expected = plain(np.exp(-np.sum(z**2, axis=-1) / 2), np.full(12, 0.25))
    assert np.abs(sinkhorn(Gaussian(1.0), grid).matrix - expected).max() < 1e-11
    found = sinkhorn(ExpDotProduct(), grid, x, queries=x[::-1].reshape(12, 2))
    expected = plain(np.exp(x[::-1].reshape(12, 2) @ x.reshape(12, 2).T / np.sqrt(2)), np.full(12, 0.25))
    assert np.abs(found.matrix - expected).max() < 1e-11


def test_queries_of_other_nodes_are_refused() -> None:
    with pytest.raises(InputError, match=r"queries: got shape \(3, 4\)"):
        sinkhorn(ExpDotProduct(), points(6), np.ones((6, 2)), queries=np.ones((3, 4)))
