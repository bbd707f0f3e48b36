"""Graphs as users have them, and of nearest neighbours: what is read and refused, averages and Laplacians."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from scipy import sparse
from scipy.sparse.csgraph import laplacian

import nlflow as nl
from nlflow import GradientFlow, Grid, InputError, J, MarkovChain, NlflowWarning, Points, affinity_from_graph
from nlflow.affinities import SparseAffinity, nearest
from tests.covering import pairs
from tests.graphs import KINDS, N, averaging, signal, weights
from tests.problems import torch_on_one_thread

pytestmark = pytest.mark.numerical

FORMATS = ("csr", "csc", "coo", "bsr", "dia", "dok", "lil")


# ---- what is read


def as_networkx(k: Any, kind: str) -> Any:
    nx = pytest.importorskip("networkx", reason="networkx is optional")
    graph = nx.DiGraph() if kind == "directed" else nx.Graph()
    graph.add_nodes_from(f"node {i}" for i in range(len(k)))
    for i, j in zip(*np.nonzero(k), strict=True):
        graph.add_edge(f"node {i}", f"node {j}", weight=k[i, j])
    return graph


def as_edges(k: Any, tensor: bool) -> tuple[Any, Any]:
    ends = np.stack(np.nonzero(k))
    if not tensor:
        return ends, k[tuple(ends)]
    torch = torch_on_one_thread()
    return torch.from_numpy(ends), torch.from_numpy(k[tuple(ends)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [*FORMATS, "spmatrix", "networkx", "edges", "tensors", "matrix", "tensor"])
def test_every_kind_of_graph_has_the_same_weights(given: str, kind: str) -> None:
    k = weights(kind)
    if given in FORMATS:
        a = affinity_from_graph(sparse.coo_array(k).asformat(given))
    elif given == "spmatrix":
        a = affinity_from_graph(sparse.csr_matrix(k))
    elif given == "networkx":
        a = affinity_from_graph(as_networkx(k, kind))
    elif given in ("edges", "tensors"):
        ends, values = as_edges(k, given == "tensors")
        a = affinity_from_graph(ends, edge_weight=values)
    else:
        a = affinity_from_graph(k if given == "matrix" else torch_on_one_thread().from_numpy(k))
    assert a.symmetric == (kind != "directed")
    p, d = averaging(k)
    assert np.abs(a.degree - d).max() <= 1e-13 * d.max()
    u = signal((N, 2))
    assert np.abs(a.average(u) - p @ u).max() <= 1e-13
    assert "1 connected component" in a.reason
    assert f"{np.count_nonzero(k)} edges" in a.reason


@pytest.mark.slow
def test_networkx_is_not_loaded_for_other_graphs() -> None:
    code = (
        "import sys, numpy as np, nlflow\n"
        "nlflow.affinity_from_graph(np.ones((3, 3)))\n"
        "print([name for name in ('networkx', 'torch', 'pynndescent') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_what_was_given_is_neither_changed_nor_shared() -> None:
    given = sparse.csr_array(weights() * 1e200)  # beyond the range in which weights are taken as they are
    before = given.copy()
    a = affinity_from_graph(given, Points(np.arange(N), np.linspace(1, 2, N)))
    assert (given != before).nnz == 0
    u = signal(N)
    average = a.average(u)
    given.data[:] = 1.0
    assert np.array_equal(a.average(u), average)


def test_repeated_edges_add_up_in_any_order() -> None:
    rng = np.random.default_rng(3)
    ends = rng.integers(0, 12, (2, 400))
    values = rng.random(400)
    order = rng.permutation(400)
    both = np.hstack([ends, ends[::-1, order]]), np.concatenate([values, values[order]])
    k = np.zeros((12, 12))
    np.add.at(k, tuple(both[0]), both[1])
    a = affinity_from_graph(both[0], edge_weight=both[1])
    assert a.symmetric, "sums in another order differ by rounding alone"
    assert (a.edges() != a.edges().T).nnz == 0
    assert np.abs(a._edges().toarray() - k).max() <= 1e-13


def test_attributes_of_networkx_edges() -> None:
    nx = pytest.importorskip("networkx", reason="networkx is optional")
    graph = nx.MultiGraph()
    graph.add_edge("a", "b", length=2.0)
    graph.add_edge("a", "b", length=0.5)
    graph.add_edge("b", "c", length=1.0)
    graph.add_edge("c", "c", length=4.0)
    assert affinity_from_graph(graph, attribute="length").degree.tolist() == pytest.approx([2.5, 3.5, 5.0])
    assert affinity_from_graph(graph).degree.tolist() == pytest.approx([2, 3, 2])
    assert affinity_from_graph(graph, attribute=None).degree.tolist() == pytest.approx([2, 3, 2])
    graph.add_edge("a", "c")
    with pytest.raises(InputError, match="1 of 5 edges have no 'length'"):
        affinity_from_graph(graph, attribute="length")
    with pytest.raises(InputError, match="5 of 5 edges have no 'lenght'"):
        affinity_from_graph(graph, attribute="lenght")
    graph.add_edge("a", "c", length="far")
    with pytest.raises(InputError, match="that is no number"):
        affinity_from_graph(nx.Graph([("a", "b", {"length": "far"})]), attribute="length")
    with pytest.raises(InputError, match="without nodes"):
        affinity_from_graph(nx.Graph())


def test_a_grid_of_nodes_has_signals_of_its_shape() -> None:
    grid = Grid((5, 6), spacing=0.5, boundary="isolated")
    k = weights()
    u = signal((5, 6))
    expected = averaging(k)[0] @ u.ravel()
    assert np.abs(affinity_from_graph(k, grid).average(u).ravel() - expected).max() <= 1e-14
    assert affinity_from_graph(k, grid).degree.max() == pytest.approx(0.25 * k.sum(axis=1).max())


PAIR = np.array([[0, 1, 1], [1, 0, 2]])
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "negative": (sparse.coo_array(-weights()), {}, "negative weights .* expected finite weights >= 0; take abs"),
    "negative, hidden": (PAIR[:, [0, 0]], {"edge_weight": [2.0, -1.0], "nodes": 2}, "1 negative weights"),
    "nan": (sparse.csr_array(np.diag([1.0, np.nan])), {}, r"1 NaN or infinite weights \(the first, nan, from node 1"),
    "infinite": (PAIR, {"edge_weight": [1, np.inf, 1]}, "from node 1 to 0"),
    "overflow": (PAIR[:, [0, 0]], {"edge_weight": [1e308, 1e308], "nodes": 2}, "repeated edges added up"),
    "span": (PAIR, {"edge_weight": [1e-300, 1e300, 1]}, "expected a ratio below"),
    "complex": (sparse.csr_array(np.eye(2) * 1j), {}, "graph: got complex128, expected real"),
    "not square": (sparse.csr_array((2, 3)), {}, r"got shape \(2, 3\), expected \(N, N\)"),
    "no matrix": (np.ones((3, 4)), {}, "expected a matrix"),
    "words": ("graph", {}, "expected a SciPy sparse array, a networkx graph"),
    "ambiguous": (PAIR[:, :2], {}, "two edges or a matrix"),
    "no such node": (PAIR, {"nodes": 2}, "between nodes 0 to 2, expected 0 to 1"),
    "negative node": (PAIR - 1, {}, "between nodes -1 to 1"),
    "no edges": (PAIR[:, :0], {}, "got no edges"),
    "weights": (PAIR, {"edge_weight": [1.0]}, r"edge_weight: got shape \(1,\), expected \(3,\)"),
    "weights of a matrix": (np.ones((3, 3)), {"edge_weight": [1.0]}, "with edge_weight"),
    "weights of a graph": (sparse.csr_array(np.eye(2)), {"edge_weight": [1.0]}, "has its own"),
    "domain": (weights(), {"domain": Points(np.arange(4.0))}, "got 30 nodes, expected 4"),
    "batch": (weights(), {"domain": nl.Batch(Points(np.arange(4.0)), 2)}, "domain: got Batch"),
    "nodes of a matrix": (np.ones((3, 3)), {"nodes": 9}, "nodes: got 9, but the graph has 3"),
    "attribute of a matrix": (np.ones((3, 3)), {"attribute": None}, "expected it for networkx alone"),
    "attribute": (np.ones((3, 3)), {"attribute": ["a"]}, r"attribute: got \['a'\], expected text"),
    "nodes": (PAIR, {"domain": Points(np.arange(4.0)), "nodes": 5}, "nodes: got 5, expected 4"),
    "light": (
        PAIR,
        {"edge_weight": [1e-100, 1e-100, 1], "domain": Points(np.arange(3.0), [1e-110, 1e-110, 1])},
        "light edges",
    ),
    "masked": (np.ma.masked_array(np.eye(2)), {}, "masked array"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_graphs_are_refused_by_name(name: str) -> None:
    graph, options, words = REFUSED[name]
    with pytest.raises(InputError, match=words):
        affinity_from_graph(graph, **options)


def test_a_damaged_array_does_not_reach_compiled_loops() -> None:
    damaged = sparse.csc_array(np.eye(3))
    damaged.indices[1] = 10**6
    with pytest.raises(InputError, match="graph: got a csc array that is damaged"):
        affinity_from_graph(damaged)
    with pytest.raises(InputError, match="points: got a csc array that is damaged"):
        nl.neighbour_graph(damaged, 1)
    with pytest.raises(InputError, match="transitions: got a csc array that is damaged"):
        MarkovChain.from_transitions(damaged)


def test_tensors_that_cannot_be_read_are_refused() -> None:
    torch = torch_on_one_thread()
    with pytest.raises(InputError, match="layout"):
        affinity_from_graph(torch.eye(3).to_sparse())
    with pytest.raises(InputError, match="from_matrix"):
        affinity_from_graph(torch.eye(3, requires_grad=True))


def test_memory_is_asked_for_beforehand() -> None:
    with pytest.raises(nl.MemoryLimitError, match="a graph of"):
        affinity_from_graph(weights(), memory_limit=1000)


# ---- averages and Laplacians


@pytest.mark.parametrize(
    ("kind", "uneven", "dtype", "channels", "size"),
    pairs(KINDS, [False, True], [np.float64, np.float32], [(), (3,)], [1.0, 1e-30, 1e30]),
)
def test_averages_are_those_of_the_matrix(kind: str, uneven: bool, dtype: Any, channels: Any, size: float) -> None:
    k, w = weights(kind), np.linspace(0.5, 2, N) if uneven else np.ones(N)
    domain = Points(np.arange(N), w)
    p, d = averaging(k, w)
    tolerance = 1e-13 if dtype == np.float64 else 2e-7
    for scale in (1.0, 1e-200, 1e200):
        a = affinity_from_graph(k * scale, domain)
        u = signal((N, *channels), dtype) * dtype(size)
        assert a.average(u).dtype == dtype
        assert np.abs(a.average(u) - p @ u).max() <= 4 * tolerance * size
        assert np.abs(a.push(u) - p.T @ u).max() <= 8 * tolerance * size
        assert np.abs(a.log_degree - np.log(d) - np.log(scale)).max() <= 1e-12
        both = affinity_from_graph(k * scale, domain).symmetrized()
        assert np.abs(both.average(u) - averaging(k + k.T, w)[0] @ u).max() <= 4 * tolerance * size
        edges = w[:, None] * w * (k + k.T) * scale
        np.fill_diagonal(edges, 0)
        assert np.abs(a.edges().toarray() - edges).max() <= 1e-12 * scale
        assert np.abs(MarkovChain(a).matrix() - p).max() <= 1e-14


@pytest.mark.parametrize("dtype", [np.float32, np.dtype(np.float32)])
def test_a_precision_is_a_type_or_its_dtype(dtype: Any) -> None:
    k = SparseAffinity(Points(np.arange(3.0)), sparse.csr_array(np.eye(3)[::-1]), dtype=dtype)
    assert k.average(np.ones(3, np.float32)).dtype == np.float32
    with pytest.raises(InputError, match="u: got dtype float64, expected float32"):
        k.average(np.ones(3))


def test_laplacians_are_those_of_scipy() -> None:
    k = weights()
    a = affinity_from_graph(k)
    for name, expected in (
        ("combinatorial", laplacian(k)),
        ("symmetric", laplacian(k, normed=True)),
        ("random walk", laplacian(k) / k.sum(axis=1)[:, None]),
    ):
        assert np.abs(a.laplacian(name).toarray() - expected).max() <= 1e-13, name
    u, root = signal(N), np.sqrt(k.sum(axis=1))
    gradient = J(a).gradient(u)
    assert np.abs(gradient - 2 * (laplacian(k) @ u)).max() <= 1e-12
    assert np.abs(J(a.scaled(0.5)).gradient(u) - laplacian(k) @ u).max() <= 1e-12
    assert J(a).value(u) == pytest.approx(u @ laplacian(k) @ u, rel=1e-13)
    walk = -GradientFlow(J(a), metric="degree").velocity(u)
    assert np.abs(walk - laplacian(k) @ u / k.sum(axis=1)).max() <= 1e-13
    assert np.abs(root * walk - laplacian(k, normed=True) @ (root * u)).max() <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_laplacians_of_loops_directions_and_weights(kind: str) -> None:
    k, w = weights(kind), np.linspace(0.5, 2, N)
    a: Any = affinity_from_graph(k, Points(np.arange(N), w))
    p, d = averaging(k, w)
    assert np.abs(a.laplacian("random walk").toarray() - (np.eye(N) - p)).max() <= 1e-14
    assert np.abs(a.laplacian().toarray() - (np.diag(d) - k * w)).max() <= 1e-13
    if kind == "directed":
        with pytest.raises(InputError, match="symmetrized"):
            a.laplacian("symmetric")
        a, (p, d) = a.symmetrized(), averaging(k + k.T, w)
    root = np.sqrt(w * d)
    found = a.laplacian("symmetric").toarray()
    assert np.abs(found - root[:, None] * (np.eye(N) - p) / root).max() <= 1e-13
    assert np.abs(found - found.T).max() <= 1e-14
    with pytest.raises(InputError, match="normalization"):
        a.laplacian("normed")


# ---- nearest neighbours


@pytest.mark.parametrize(
    ("keep", "kernel", "dimensions"),
    pairs(["either", "both", "directed"], [None, nl.Gaussian(width=0.3, amplitude=2.0)], [1, 2, 5]),
)
def test_neighbours_are_the_nearest(keep: str, kernel: Any, dimensions: int) -> None:
    x = np.random.default_rng(0).random((60, dimensions))
    distance = np.linalg.norm(x[:, None] - x, axis=2)
    chosen = np.zeros((60, 60), bool)
    np.put_along_axis(chosen, np.argsort(distance, axis=1)[:, 1:5], True, axis=1)
    chosen = {"either": chosen | chosen.T, "both": chosen & chosen.T, "directed": chosen}[keep]
    expected = chosen * (1.0 if kernel is None else 2 * np.exp(-(distance**2) / 2 / 0.3**2))
    found = nl.neighbour_graph(x, 4, kernel, keep=keep)
    assert np.abs(found.toarray() - expected).max() <= 1e-14
    assert found.has_sorted_indices
    if keep == "either":
        a = affinity_from_graph(found, Points(x))
        assert a.symmetric
        assert np.abs(a.average(x) - expected @ x / expected.sum(axis=1)[:, None]).max() <= 1e-14


def test_neighbours_at_one_place_are_no_loops() -> None:
    found = nl.neighbour_graph(np.zeros((7, 2)), 3, keep="directed").toarray()
    assert found.sum(axis=1).tolist() == [3] * 7
    assert np.all(np.diag(found) == 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"neighbours": 5}, "expected at most 4"),
        ({"neighbours": 0}, "neighbours"),
        ({"keep": "all"}, "keep"),
        ({"search": "ball"}, "search"),
        ({"kernel": nl.ExpDotProduct()}, "expected a radial one"),
        ({"memory_limit": 10}, "nearest of each"),
    ],
)
def test_neighbours_that_there_are_not(options: dict[str, Any], words: str) -> None:
    with pytest.raises((InputError, nl.MemoryLimitError), match=words):
        nl.neighbour_graph(np.arange(5.0), **{"neighbours": 2, **options})
    with pytest.warns(NlflowWarning, match="0 for 2 of 8 edges"):
        nl.neighbour_graph([0.0, 1.0, 2.0, 3.0, 1e9], 1, nl.Gaussian(width=1.0))


def test_descent_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynndescent", None)
    with pytest.raises(InputError, match=r"pip install 'nlflow\[neighbours\]'"):
        nl.neighbour_graph(np.arange(9.0), 2, search="descent")


@pytest.mark.slow
def test_descent_finds_most_of_the_nearest() -> None:
    pytest.importorskip("pynndescent", reason="pynndescent is optional")
    x = np.random.default_rng(0).random((300, 3))
    exact, found = nl.neighbour_graph(x, 6), nl.neighbour_graph(x, 6, search="descent")
    assert exact.minimum(found).sum() >= 0.95 * exact.sum()
    assert (found != nl.neighbour_graph(x, 6, search="descent")).nnz == 0


def test_types_are_those_that_are_public() -> None:
    assert isinstance(affinity_from_graph(weights()), SparseAffinity)
    assert set(nearest.KEPT) == {"either", "both", "directed"}
