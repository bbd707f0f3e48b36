"""Batches: many domains side by side, each seeing itself alone, against its items one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import Batch, Mask
from nlflow.affinities import Unlinked
from tests.affinities.test_tiled import host
from tests.covering import pairs
from tests.problems import torch_on_one_thread

torch = torch_on_one_thread()

from nlflow.flows import derivatives  # noqa: E402  # needs torch

ITEMS, HEADS, N, WIDTH, CHANNELS = 2, 3, 24, 4, 5
LEADING = (ITEMS, HEADS)
RNG = np.random.default_rng(0)
POINTS = nl.Points(np.arange(float(N)), weights=RNG.uniform(0.5, 2, N))
BATCH = Batch(POINTS, LEADING)
SIGNAL = RNG.normal(size=(*LEADING, N, CHANNELS))
PRESENT = RNG.uniform(size=(ITEMS, 1, N)) > 0.2
SHAPES = {
    "each its own": (ITEMS, HEADS, N, WIDTH),
    "by head": (HEADS, N, WIDTH),
    "by sequence": (ITEMS, 1, N, WIDTH),
    "shared": (N, WIDTH),
    "shared by ones": (1, 1, N, WIDTH),
}
MASKS = {
    "none": None,
    "causal": Mask(causal=True),
    "padding": Mask(present=PRESENT),
    "window padding": Mask(window=5, present=PRESENT[:, 0][:, None]),
    "rule": Mask(rule=lambda i, j: (i + j) % 3 != 0),
}


def normal(shape: Any) -> Any:
    return np.random.default_rng(1).normal(size=shape)


def one(array: Any, index: tuple[int, ...]) -> Any:
    """The part of features that an item has."""
    return np.broadcast_to(array, (*LEADING, *array.shape[-2:]))[index]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "shape", "kernel"),
    pairs(list(MASKS), list(SHAPES), [nl.ExpDotProduct(amplitude=3.0), nl.Laplace(1.0)]),
    ids=str,
)
@pytest.mark.sampled(5)
def test_items_are_what_they_are_alone(kernel: Any, shape: str, mask: str) -> None:
    x, q = normal((2, *SHAPES[shape]))
    queries = q if isinstance(kernel, nl.ExpDotProduct) else None
    given = MASKS[mask]
    batch = nl.affinity(kernel, BATCH, x, queries=queries, mask=given)
    tensors = nl.affinity(
        kernel, BATCH, torch.from_numpy(x), queries=None if queries is None else torch.from_numpy(q), mask=given
    )
    assert tensors.method == "tiled"
    u = torch.from_numpy(SIGNAL)
    energy = 0.0
    for index in np.ndindex(*LEADING):
        own = None if given is None else given.item(index, LEADING)
        alone = nl.affinity(kernel, POINTS, one(x, index), queries=None if queries is None else one(q, index), mask=own)
        for p, values in ((batch, SIGNAL), (tensors, u)):
            for whole, single in ((p, alone), (p.symmetrized(), alone.symmetrized())):
                part = whole.item(*index)
                for got in (whole.average(values)[index], part.average(values[index])):
                    np.testing.assert_allclose(np.asarray(got), single.average(SIGNAL[index]), rtol=0, atol=1e-13)
                for got in (whole.push(values)[index], part.push(values[index])):
                    np.testing.assert_allclose(np.asarray(got), single.push(SIGNAL[index]), rtol=0, atol=1e-12)
                for got in (whole.log_degree[index], part.log_degree):
                    np.testing.assert_allclose(np.asarray(got), single.log_degree, rtol=0, atol=1e-13)
        energy += nl.J(alone).value(SIGNAL[index])
    assert nl.J(batch).value(SIGNAL) == pytest.approx(energy, rel=1e-12)
    assert nl.J(tensors).value(u) == pytest.approx(energy, rel=1e-12)


@pytest.mark.parametrize("kind", ["numpy", "tensors"])
def test_flows_of_a_batch_are_the_flows_of_its_items(kind: str) -> None:
    x = normal((*LEADING, N, WIDTH))
    u = SIGNAL
    features, start = (x, u) if kind == "numpy" else (torch.from_numpy(x), torch.from_numpy(u))
    p = nl.affinity(nl.Gaussian(1.5), BATCH, features)
    for flow, single in (
        (nl.AttentionFlow(p), lambda p, f: nl.AttentionFlow(p)),
        (nl.GradientFlow(nl.E(p, start, 0.5)), lambda p, f: nl.GradientFlow(nl.E(p, f, 0.5))),
    ):
        got = nl.solve(flow, start, t=2.0).final
        for index in np.ndindex(*LEADING):
            alone = nl.solve(single(p.item(*index), start[index]), start[index], t=2.0).final
            np.testing.assert_allclose(np.asarray(got[index]), np.asarray(alone), rtol=0, atol=1e-9)
    limit = nl.equilibrium(nl.GradientFlow(nl.E(p, start, 0.5)))
    for index in np.ndindex(*LEADING):
        alone = nl.equilibrium(nl.GradientFlow(nl.E(p.item(*index), start[index], 0.5)))
        np.testing.assert_allclose(np.asarray(limit.u[index]), np.asarray(alone.u), rtol=0, atol=1e-8)


def test_each_item_runs_to_a_constant_of_its_own() -> None:
    p = nl.affinity(nl.Gaussian(4.0), BATCH, torch.from_numpy(normal((*LEADING, N, WIDTH))))
    u = torch.from_numpy(SIGNAL)
    run = nl.solve(nl.AttentionFlow(p), u, t=60.0, trackers=[nl.DistanceToConstant()])
    means = p.mean(u, "degree")
    assert means.shape == (*LEADING, 1, CHANNELS)
    np.testing.assert_allclose(host(run.final), host(means.expand_as(u)), rtol=0, atol=1e-9)
    assert run.records["distance"]["value"][-1] < 1e-9
    for index in np.ndindex(*LEADING):
        np.testing.assert_allclose(host(means[index]), host(p.item(*index).mean(u[index], "degree")), atol=1e-14)


def test_features_that_are_shared_are_kept_once() -> None:
    x = torch.from_numpy(normal((N, WIDTH)))
    shared = nl.affinity(nl.ExpDotProduct(), BATCH, x)
    apart = nl.affinity(nl.ExpDotProduct(), BATCH, x.expand(*LEADING, N, WIDTH))
    assert 4 * shared.memory_bytes < apart.memory_bytes
    u = torch.from_numpy(SIGNAL)
    torch.testing.assert_close(shared.average(u), apart.average(u), rtol=0, atol=1e-14)
    matrices = nl.affinity(nl.ExpDotProduct(), BATCH, x.numpy())
    assert matrices.memory_bytes == nl.affinity(nl.ExpDotProduct(), POINTS, x.numpy()).memory_bytes


@pytest.mark.parametrize("method", ["dense", "sparse", "nufft", "pairwise", "stencil"])
def test_the_memory_limit_is_one_of_all_items(method: str) -> None:
    kernel: Any = nl.Gaussian(1.0)
    domain, x = Batch(POINTS, 12), normal((12, N, 2))
    if method == "nufft":
        pytest.importorskip("finufft")
    if method == "stencil":
        kernel, domain = nl.Patch(width=0.5, patch_size=3, search_radius=1), Batch(nl.Grid((6, 4)), 12)
        x = x[..., :1].reshape(12, 6, 4, 1)
    whole = nl.affinity(kernel, domain, x, method=method)
    whole.average(x[..., 0])
    kept = whole.memory_bytes
    for limit in (kept // 12, kept // 2, kept - 1):
        with pytest.raises(nl.MemoryLimitError, match="a batch of 12 different items") as caught:
            nl.affinity(kernel, domain, x, method=method, memory_limit=limit)
        told = int(str(caught.value).split("(")[1].split(" ")[0])
        assert told > limit
        if method != "nufft":  # whose first item tells what it needs meanwhile, not what it keeps
            assert 0.8 * kept < told < 1.4 * kept + 2**14
    assert nl.affinity(kernel, domain, x, method=method, memory_limit=4 * kept).memory_bytes <= kept
    shared = nl.affinity(kernel, domain, x[:1], method=method, memory_limit=kept)  # its items are one
    assert shared.memory_bytes <= kept // 6


def test_the_method_of_a_batch_fits_the_memory_limit() -> None:
    domain, x = Batch(POINTS, 12), normal((12, N, 2))
    matrices = nl.affinity(nl.Gaussian(1.0), domain, x)
    assert matrices.method == "dense"
    for rtol in (None, 1e-8):
        p = nl.affinity(nl.Gaussian(1.0), domain, x, rtol=rtol, memory_limit=45_000)
        assert p.method == "pairwise"
        assert "memory limit allows no other method" in p.reason
        u = x[..., 0]
        np.testing.assert_allclose(p.average(u), matrices.average(u), rtol=0, atol=1e-7 if rtol else 1e-13)
        assert p.memory_bytes <= 45_000
        updated = p.update(x + 1)
        assert (updated.method, updated.reason) == (p.method, p.reason)
        assert p.item(11).update(x[0]).method == "pairwise"
    with pytest.raises(nl.MemoryLimitError, match=r"a batch of 12 different items, each a dense affinity of 24 nodes"):
        nl.affinity(nl.Gaussian(1.0), domain, x, memory_limit=20_000)
    with pytest.raises(nl.MemoryLimitError, match="a dense affinity of 24 nodes"):  # masks are kept as a matrix
        nl.affinity(nl.Gaussian(1.0), domain, x, mask=Mask(causal=True), memory_limit=45_000)
    alone = nl.affinity(nl.Gaussian(1.0), POINTS, x[0], memory_limit=5000)
    assert alone.method == "pairwise"


def test_items_of_a_batch_whose_nodes_see_only_themselves() -> None:
    for like in (None, torch.ones(1, dtype=torch.float32)):
        p = Unlinked(BATCH, like).scaled(3.0)
        part, whole = p.item(1, -1), p.domain
        assert part.domain is whole.item
        assert (part.method, part.dtype, part.device) == (p.method, p.dtype, p.device)
        np.testing.assert_allclose(np.asarray(part.log_degree), np.asarray(p.log_degree)[1, 2], rtol=1e-7)
        u = SIGNAL[0, 0] if like is None else torch.from_numpy(SIGNAL[0, 0]).float()
        np.testing.assert_array_equal(np.asarray(part.average(u)), np.asarray(u))


class OfMine(nl.affinities.Affinity):
    def _average(self, u: Any) -> Any:
        return u.copy()

    def _log_degree(self) -> Any:
        return np.zeros(self.domain.shape)


def test_an_affinity_of_ones_own_says_that_it_has_no_items() -> None:
    p = OfMine(BATCH, None, symmetric=True, positive_semidefinite=True)
    with pytest.raises(nl.InputError, match=r"item: OfMine does not tell the items of its Batch apart"):
        p.item(0, 0)


def test_edges_of_a_batch_join_nodes_of_one_item() -> None:
    x = normal((*LEADING, N, WIDTH))
    p = nl.affinity(nl.Gaussian(1.0, amplitude=2.0), BATCH, x)
    edges = p.edges().toarray().reshape(ITEMS * HEADS, N, ITEMS * HEADS, N)
    for a in range(ITEMS * HEADS):
        for b in range(ITEMS * HEADS):
            own = p.item(*np.unravel_index(a, LEADING)).edges().toarray() if a == b else 0
            np.testing.assert_allclose(edges[a, :, b], own, rtol=1e-13)


@pytest.mark.parametrize("make", [np.asarray, torch.as_tensor], ids=["NumPy", "torch"])
def test_potentials_of_a_batch_are_those_of_its_items(make: Any) -> None:
    batch, x = Batch(nl.Points(np.arange(9.0)), 2), normal((2, 9, 3))
    p = nl.affinity(nl.Gaussian(1.0), batch, make(x))
    source = normal((2, 9))
    with pytest.raises(nl.InputError, match="over part 0"):
        nl.J(p).potential(make(source - source.mean()))
    source -= source.mean(axis=1, keepdims=True)
    found = nl.J(p).potential(make(source))
    assert found.success
    for i in range(2):
        own = nl.affinity(nl.Gaussian(1.0), nl.Points(np.arange(9.0)), x[i])
        np.testing.assert_allclose(np.asarray(found.u)[i], nl.J(own).potential(source[i]).u, rtol=0, atol=1e-9)


def test_kernels_of_a_batch_evolve_item_by_item() -> None:
    x = normal((*LEADING, N, WIDTH))
    later = 2 * normal((*LEADING, N, WIDTH))
    for features, signal in ((x, later), (torch.from_numpy(x), torch.from_numpy(later))):
        updated = nl.affinity(nl.ExpDotProduct(), BATCH, features).update(signal)
        expected = nl.affinity(nl.ExpDotProduct(), BATCH, signal)
        np.testing.assert_array_equal(np.asarray(updated.log_degree), np.asarray(expected.log_degree))
    scalar = nl.affinity(nl.Gaussian(1.0), BATCH, x[..., :1]).update(x[..., 0])
    np.testing.assert_array_equal(scalar.log_degree, nl.affinity(nl.Gaussian(1.0), BATCH, x[..., :1]).log_degree)


@pytest.mark.slow
def test_the_measured_error_is_the_largest_of_the_items() -> None:
    rng = np.random.default_rng(3)
    points = nl.Points(np.zeros(300), weights=rng.uniform(0.5, 2, 300))
    x, u = rng.uniform(size=(3, 300, 2)), rng.normal(size=(3, 300, 2)) * np.array([1.0, 1e3, 1.0])[:, None, None]
    u[2] = 7.0  # an average keeps it, whatever the weights
    p = nl.affinity(nl.Gaussian(0.1), Batch(points, 3), x, method="nufft", rtol=1e-3)
    found = []
    for i in range(2):
        weights = points.weights * np.exp(-((x[i][:, None] - x[i]) ** 2).sum(axis=-1) / (2 * 0.1**2))
        exact = weights @ u[i] / weights.sum(axis=1, keepdims=True)
        deviation = np.abs(u[i] - (u[i].min(axis=0) + u[i].max(axis=0)) / 2).max()
        found.append(np.abs(p.average(u)[i] - exact).max() / deviation)
    measured = p.measure_error(u, samples=300)
    assert measured == pytest.approx(max(found), rel=1e-6)
    assert 0 < measured <= p.error_estimate <= 1e-3
    assert p.measure_error(u[:, :, 0].tolist(), samples=300) > 0
    assert p.measure_error(rng=5) == p.measure_error(rng=5) != p.measure_error(rng=6)
    assert p.scaled(3.0).measure_error(u, samples=300) == measured
    item = p._items[1]
    average = item._average
    item._average = lambda part: average(part) + 1.0
    assert p.measure_error(u, samples=300) > 10 * measured
    with pytest.raises(nl.InputError, match="u: got a constant signal"):
        p.measure_error(np.ones((3, 300)))
    with pytest.raises(nl.InputError, match="method 'dense' is exact to rounding"):
        nl.affinity(nl.Gaussian(0.1), Batch(points, 3), x).measure_error(u)


def test_grids_side_by_side_have_the_methods_of_grids() -> None:
    grid = nl.Grid((6, 5), spacing=0.5)
    u = normal((3, 6, 5))
    p = nl.affinity(nl.Gaussian(0.6), Batch(grid, 3))
    alone = nl.affinity(nl.Gaussian(0.6), grid)
    assert p.method == alone.method
    for i in range(3):
        np.testing.assert_allclose(p.average(u)[i], alone.average(u[i]), rtol=0, atol=1e-15)
    patch = nl.Patch(0.5, patch_size=3, search_radius=1)
    images = normal((3, 6, 5, 1))
    p = nl.affinity(patch, Batch(grid, 3), images)
    for i in range(3):
        expected = nl.affinity(patch, grid, images[i]).average(u[i])
        np.testing.assert_array_equal(p.average(u)[i], expected)


def test_derivatives_of_shared_features() -> None:
    small = Batch(nl.Points(np.arange(6.0)), (2, 2))
    x = torch.from_numpy(normal((2, 1, 6, 3))).requires_grad_()
    u = torch.from_numpy(normal((2, 2, 6, 2))).requires_grad_()

    def of(x: Any, u: Any) -> Any:
        p = nl.affinity(nl.ExpDotProduct(), small, x, mask=Mask(causal=True))
        return p.average(u), p.log_degree

    assert torch.autograd.gradcheck(of, (x, u), fast_mode=True)


def spoiled() -> Any:
    x = normal((*LEADING, N, WIDTH))
    x[1, 0, 7, 2] = np.nan
    return x


FULL = normal((*LEADING, N, WIDTH))
P = nl.affinity(nl.ExpDotProduct(), BATCH, FULL)
BAD = {
    "leading": (lambda: Batch(POINTS, ()), r"leading: got \(\), expected at least one axis"),
    "count": (lambda: Batch(POINTS, (2, 0)), r"leading: got 0, expected an integer >= 1"),
    "nested": (lambda: Batch(BATCH, 2), r"domain: got Batch, expected a Grid or Points"),
    "no channels": (
        lambda: nl.affinity(nl.ExpDotProduct(), BATCH, FULL[..., 0]),
        r"features: got shape \(2, 3, 24\), expected \(2, 3, 24, 'd'\): the axes of the batch",
    ),
    "no channels of tensors": (
        lambda: nl.affinity(nl.ExpDotProduct(), BATCH, torch.from_numpy(FULL[..., 0])),
        r"features: got shape \(2, 3, 24\), expected \(2, 3, 24, 'd'\): the axes of the batch",
    ),
    "other batch": (
        lambda: nl.affinity(nl.ExpDotProduct(), BATCH, FULL[:, :2]),
        r"features: got shape \(2, 2, 24, 4\), expected \(2, 3, 24, 'd'\)",
    ),
    "NaN": (
        lambda: nl.affinity(nl.ExpDotProduct(), BATCH, spoiled()),
        r"features: got 1 NaN or infinite value\(s\) \(the first at index \(1, 0, 7, 2\)\)",
    ),
    "NaN in tensors": (
        lambda: nl.affinity(nl.ExpDotProduct(), BATCH, torch.from_numpy(spoiled())),
        r"features: got 1 NaN or infinite value\(s\) \(the first at index \(1, 0, 7, 2\)\)",
    ),
    "width": (
        lambda: nl.affinity(nl.ExpDotProduct(), BATCH, torch.from_numpy(FULL), queries=torch.from_numpy(FULL[..., :3])),
        r"queries: got width 3, expected 4, the width of the keys",
    ),
    "present": (
        lambda: nl.affinity(nl.ExpDotProduct(), BATCH, torch.from_numpy(FULL), mask=Mask(present=PRESENT[:, :, :9])),
        r"mask: present has shape \(2, 1, 9\), expected \(2, 3, 24\)",
    ),
    "present of NumPy": (
        lambda: nl.affinity(nl.ExpDotProduct(), BATCH, FULL, mask=Mask(present=np.ones((4, 1, N), bool))),
        r"mask: present has shape \(4, 1, 24\), expected \(2, 3, 24\)",
    ),
    "matrix": (lambda: nl.from_matrix(np.eye(ITEMS * HEADS * N), BATCH), r"domain: got a Batch, expected a Grid or P"),
    "item": (lambda: P.item(2, 0), r"item: got \(2, 0\), expected 2 numbers within \(2, 3\), of a Batch"),
    "item of none": (lambda: P.item(0, 0).item(0), r"item: got \(0,\), expected 0 numbers within \(\), of a Batch"),
    "signal": (lambda: P.average(SIGNAL[0]), r"u: got shape \(3, 24, 5\), expected \(2, 3, 24\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_batches(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(nl.InputError, match=f"^{message}"):
        call()


def test_logits_of_one_item_may_be_out_of_the_range_of_anothers() -> None:
    x = normal((N, WIDTH))
    apart = np.stack([np.concatenate([x, np.full((N, 1), c)], axis=1) for c in (0.0, 40.0)])  # degrees e^1600 apart
    batch, kernel = Batch(POINTS, 2), nl.ExpDotProduct(scale=1.0)
    u = normal((2, N, CHANNELS))
    for features, signal in ((apart, u), (torch.from_numpy(apart), torch.from_numpy(u))):
        p = nl.affinity(kernel, batch, features)
        found = p.mean(signal, "degree"), nl.E(p, signal, 0.3, measure="degree").minimizer().u
        run = nl.solve(nl.AttentionFlow(p, signal, 0.3), signal, t=2.0)
        for i in range(2):
            own = p.item(i)
            expected = nl.E(own, signal[i], 0.3, measure="degree").minimizer().u
            np.testing.assert_allclose(np.asarray(found[0][i]), np.asarray(own.mean(signal[i], "degree")), atol=1e-14)
            np.testing.assert_allclose(np.asarray(found[1][i]), np.asarray(expected), rtol=0, atol=1e-8)
            alone = nl.solve(nl.AttentionFlow(own, signal[i], 0.3), signal[i], t=2.0)
            np.testing.assert_allclose(np.asarray(run.final[i]), np.asarray(alone.final), rtol=0, atol=1e-6)
    f = torch.from_numpy(u).requires_grad_()
    derivatives.minimizer(nl.E(p, f, 0.3, measure="degree")).sum().backward()
    f2 = torch.from_numpy(u[0]).requires_grad_()
    derivatives.minimizer(nl.E(p.item(0), f2, 0.3, measure="degree")).sum().backward()
    np.testing.assert_allclose(f.grad[0].numpy(), f2.grad.numpy(), rtol=0, atol=1e-8)


def test_rules_and_padding_that_differ_by_item() -> None:
    present = np.ones((2, 1, N), bool)
    present[1, 0, 0] = False
    first = Mask(rule=lambda i, j: (j == 0) | (i == 0), present=present)  # all but the first see the first alone
    x, u = torch.from_numpy(FULL), torch.from_numpy(SIGNAL)
    with pytest.warns(nl.NlflowWarning, match=r"mask: 23 of 48 nodes see no node \(the first is \(1, 0, 1\)\)"):
        p = nl.affinity(nl.ExpDotProduct(), BATCH, x, mask=first)
    torch.testing.assert_close(p.average(u)[1], u[1], rtol=0, atol=1e-15)
    torch.testing.assert_close(p.average(u)[0, :, 1:], u[0, :, :1].expand(-1, N - 1, -1), rtol=0, atol=1e-14)
    both = p.symmetrized()
    torch.testing.assert_close(both.average(u)[1], u[1], rtol=0, atol=1e-15)
    torch.testing.assert_close(both.item(0, 2).average(u[0, 2]), both.average(u)[0, 2], rtol=0, atol=1e-14)


def test_equal_queries_and_keys_have_derivatives_of_their_own() -> None:
    q, k = (torch.from_numpy(FULL[0, 0]).clone().requires_grad_() for _ in range(2))
    nl.affinity(nl.ExpDotProduct(), POINTS, k, queries=q, method="tiled").average(torch.from_numpy(SIGNAL[0, 0])).sum(
        dim=-1
    ).pow(2).sum().backward()
    assert float(q.grad.abs().max()) > 0
    assert float((q.grad - k.grad).abs().max()) > 1e-6


def test_an_item_without_nodes_is_named() -> None:
    present = np.ones((ITEMS, 1, N), bool)
    present[1] = False
    with pytest.warns(nl.NlflowWarning, match=r"mask: no node of item \(1, 0\) is present"):
        p = nl.affinity(nl.ExpDotProduct(), BATCH, torch.from_numpy(FULL), mask=Mask(present=present))
    u = torch.from_numpy(SIGNAL)
    assert torch.equal(p.average(u)[1], u[1])
