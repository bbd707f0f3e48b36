"""J_p and E_p for 1 < p <= 2: edges, value, gradient, minimizer, against double sums, differences and the linear E."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import E, Ep, Gaussian, Grid, InputError, J, Jp, MemoryLimitError, NumericalError, Patch, Points, affinity
from nlflow.affinities import SparseAffinity, TableStencil
from nlflow.functionals import variational
from nlflow.functionals.fidelity import MatrixFidelity
from nlflow.functionals.variational import reweighted
from nlflow.functionals.variational.jp import Graph
from tests.covering import pairs
from tests.problems import torch_on_one_thread
from tests.reference import check_affinity, feature_matrix, patch_matrix, position_matrix

pytestmark = pytest.mark.numerical

POINTS = Points(np.arange(8.0), weights=np.linspace(0.5, 1.5, 8))
LINE, PLANE = Grid(9, 0.3, "isolated"), Grid((5, 6), (0.5, 0.8), "periodic")
MIRROR = Grid((6, 5), (0.5, 0.3), "reflect")
KERNEL = Patch(0.8, patch_size=3, search_radius=2, tokens="patch", spatial_width=1.5, amplitude=0.3)


def normal(shape: Any, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


# Each: the affinity of k, and k_ij by double sums. The first two are not symmetric.
CASES: dict[str, tuple[Any, Any]] = {
    "queries": (
        lambda: affinity(nl.ExpDotProduct(amplitude=0.5), POINTS, normal((8, 3)), queries=normal((8, 3), 2)),
        lambda: feature_matrix(nl.ExpDotProduct(amplitude=0.5), normal((8, 3), 2), normal((8, 3))),
    ),
    "matrix": (lambda: nl.from_matrix(_holes(), POINTS), lambda: _holes()),
    "table": (
        lambda: affinity(Gaussian(width=0.5, amplitude=2.0), LINE, method="stencil"),
        lambda: position_matrix(Gaussian(width=0.5, amplitude=2.0), LINE),
    ),
    "table, images": (
        lambda: affinity(Gaussian(width=0.5), MIRROR, method="stencil", window=4),
        lambda: position_matrix(Gaussian(width=0.5), MIRROR, 4),
    ),
    "patches": (
        lambda: affinity(KERNEL, MIRROR, normal((6, 5))),
        lambda: patch_matrix(KERNEL, MIRROR, normal((6, 5))),
    ),
    "patches, recomputed": (
        lambda: affinity(KERNEL, PLANE, normal((5, 6)), store=False),
        lambda: patch_matrix(KERNEL, PLANE, normal((5, 6))),
    ),
    "patches, isolated": (
        lambda: affinity(Patch(0.8, patch_size=3, search_radius=2), LINE, normal(9)),
        lambda: patch_matrix(Patch(0.8, patch_size=3, search_radius=2), LINE, normal(9)),
    ),
    "sparse": (lambda: SparseAffinity(LINE, affinity(Gaussian(width=0.5), LINE, window=2, method="stencil").edges()),
               lambda: 2 * position_matrix(Gaussian(width=0.5), LINE, 2)),
}  # fmt: skip


def _holes() -> Any:
    rng = np.random.default_rng(2)
    return rng.random((8, 8)) * (rng.random((8, 8)) < 0.4) + np.eye(8)


def graph_weights(name: str) -> tuple[Any, Any, Any]:
    """Return an affinity, w and W_ij = w_i w_j (k_ij + k_ji) without diagonal."""
    k, k_ij = CASES[name][0](), CASES[name][1]()
    w = k.domain.weights.ravel()
    W = w[:, None] * w * (k_ij + k_ij.T)
    np.fill_diagonal(W, 0)
    return k, w, W


def plain_value(w: Any, W: Any, u: Any, p: float, isotropic: bool) -> float:
    """Return J_p by a double sum over nodes."""
    values = np.asarray(u, dtype=np.float64).reshape(len(w), -1)
    total = 0.0
    for i in range(len(w)):
        squares = [math.fsum((values[i] - values[j]) ** 2) for j in range(len(w))]
        if isotropic:
            total += w[i] * math.sqrt(math.fsum(W[i] * squares) / w[i]) ** p
        else:
            total += math.fsum(W[i, j] * math.sqrt(squares[j]) ** p for j in range(len(w)))
    return total / (2 * p)


# ---- the graph


@pytest.mark.parametrize("name", CASES)
def test_edges_are_those_of_the_double_sum(name: str) -> None:
    k, _, W = graph_weights(name)
    edges = k.edges()
    np.testing.assert_allclose(edges.toarray(), W, rtol=1e-12, atol=1e-14 * W.max())
    assert (edges != edges.T).nnz == 0, "not symmetric to the last bit"
    assert edges.data.min() > 0
    assert edges.diagonal().max() == 0
    assert edges.has_canonical_format
    assert edges.dtype == np.float64


def test_edges_keep_single_precision_and_the_affinity() -> None:
    image = normal((12, 10)).astype(np.float32)
    k = affinity(KERNEL, Grid((12, 10)), image)
    before = k.average(image)
    assert k.edges().dtype == np.float32
    np.testing.assert_array_equal(k.average(image), before)
    np.testing.assert_allclose(
        k.edges().toarray(), affinity(KERNEL, Grid((12, 10)), image.astype(float)).edges().toarray(), rtol=1e-5
    )


def test_reverse_edges() -> None:
    graph = Graph(CASES["patches"][0]())
    heads = np.repeat(np.arange(30), np.diff(graph.starts))
    np.testing.assert_array_equal(heads[graph.reverse], graph.ends)
    np.testing.assert_array_equal(graph.ends[graph.reverse], heads)


def test_affinities_without_a_list_of_edges() -> None:
    with pytest.raises(InputError, match=r"'convolution' .*; build it with method='stencil' and a window"):
        Jp(affinity(Gaussian(width=0.3), Grid(64), method="convolution"), 1.5)
    torch = torch_on_one_thread()
    with pytest.raises(InputError, match="NumPy features only; convert"):
        affinity(Gaussian(width=0.3), POINTS, torch.ones(8, 2)).edges()


def test_memory_is_checked_before_edges_are_listed() -> None:
    k = affinity(KERNEL, MIRROR, normal((6, 5)))
    for make in (k.edges, lambda memory_limit: Jp(k, 1.5, memory_limit=memory_limit)):
        with pytest.raises(
            MemoryLimitError, match=r"up to 720 edges between 30 nodes needs 47.81 KiB .* smaller window"
        ):
            make(memory_limit=40_000)
    assert k.edges(memory_limit=60_000).nnz > 0
    e = Ep(k, normal((6, 5)), 1.0, 1.5, memory_limit=50_000)
    e._memory_limit = 10_000
    with pytest.raises(MemoryLimitError, match="the reweighting of"):
        e.minimizer()


@pytest.mark.parametrize("boundary", ["periodic", "reflect"])
def test_a_wide_stencil_asks_for_memory_before_it_sums_at_all_nodes(
    boundary: nl.domains.Boundary, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = affinity(Gaussian(width=0.7), Grid((9, 7), boundary=boundary), method="stencil")
    np.testing.assert_allclose(narrow.average(np.ones((9, 7))), 1, rtol=0, atol=1e-14)
    monkeypatch.delattr(TableStencil, "_average")
    monkeypatch.delattr("nlflow.affinities.stencil._Stencil._weighted_sums")
    wide = affinity(Gaussian(width=9.0), Grid((900, 900), boundary=boundary), method="stencil")
    with pytest.raises(MemoryLimitError, match=r"up to \d+ edges between 810000 nodes needs"):
        Jp(wide, 1.5)


def test_weights_that_overflow() -> None:
    k = affinity(nl.ExpDotProduct(scale=1.0), POINTS, np.full(8, 40.0))
    with pytest.raises(NumericalError, match=r"edges: weights .* overflow; scale"):
        k.edges()


def test_sparse_affinity_keeps_the_contract() -> None:
    k, _, W = graph_weights("table")
    w = k.domain.weights.ravel()
    check_affinity(SparseAffinity(LINE, k.edges()), W / (w[:, None] * w))


def test_nodes_without_edges_stay() -> None:
    far = Points([0.0, 1.0, 50.0], weights=[1.0, 2.0, 3.0])
    sparse = SparseAffinity(far, affinity(nl.TopHat(radius=2.0), far).edges())
    check_affinity(sparse)
    np.testing.assert_allclose(sparse.average(np.array([1.0, 3.0, 7.0])), [3.0, 1.0, 7.0], rtol=1e-15)
    for p in (1, 1.5):
        found = Ep(affinity(nl.TopHat(radius=2.0), far), np.array([1.0, 3.0, 7.0]), 0.1, p).minimizer()
        assert found.success
        assert math.isclose(found.u[2], 7.0, rel_tol=1e-9)


# ---- value and gradient


@pytest.mark.slow
@pytest.mark.parametrize("isotropic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_value_is_the_double_sum(name: str, isotropic: bool) -> None:
    k, w, W = graph_weights(name)
    for shape, p in itertools.product((k.domain.shape, (*k.domain.shape, 3)), (1, 1.3, 2)):
        u = normal(shape, 5)
        expected = plain_value(w, W, u, p, isotropic)
        assert math.isclose(Jp(k, p, isotropic=isotropic).value(u), expected, rel_tol=1e-12)
        lam, f = np.linspace(0, 2, k.domain.size).reshape(k.domain.shape), normal(shape, 6)
        misfit = 0.5 * ((w * lam.ravel())[:, None] * (u - f).reshape(len(w), -1) ** 2).sum()
        assert math.isclose(Ep(k, f, lam, p, isotropic=isotropic).value(u), expected + misfit, rel_tol=1e-12)


@pytest.mark.parametrize("isotropic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_two_is_the_quadratic_functional(name: str, isotropic: bool) -> None:
    k = CASES[name][0]()
    u, f = normal((*k.domain.shape, 2), 3), normal((*k.domain.shape, 2), 4)
    assert math.isclose(Jp(k, 2, isotropic=isotropic).value(u), J(k).value(u), rel_tol=1e-12)
    np.testing.assert_allclose(Jp(k, 2, isotropic=isotropic).gradient(u), J(k).gradient(u), rtol=0, atol=1e-12)
    found, linear = Ep(k, f, 0.3, 2, isotropic=isotropic).minimizer(rtol=1e-12), E(k, f, 0.3).minimizer()
    assert found.success
    assert found.iterations == 1
    np.testing.assert_allclose(found.u, linear.u, rtol=0, atol=1e-9)
    assert math.isclose(found.value, E(k, f, 0.3).value(linear.u), rel_tol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "p", "isotropic"), pairs(list(CASES), [1.1, 1.5, 1.9], [False, True]))
def test_gradient_is_the_derivative(name: str, p: float, isotropic: bool) -> None:
    """Along random directions, by central differences of the double sum in the inner product of w."""
    k, w, W = graph_weights(name)
    u, f = normal((*k.domain.shape, 2), 3), normal((*k.domain.shape, 2), 4)
    gradient = Jp(k, p, isotropic=isotropic).gradient(u)
    drawn = Ep(k, f, 0.7, p, isotropic=isotropic).gradient(u)
    np.testing.assert_allclose(drawn - gradient, 0.7 * (u - f), rtol=0, atol=1e-12)
    for seed in range(3):
        v = normal(u.shape, 10 + seed)
        ahead, behind = (plain_value(w, W, u + s * v, p, isotropic) for s in (1e-5, -1e-5))
        slope = float((w[:, None] * (gradient * v).reshape(len(w), -1)).sum())
        assert math.isclose(slope, (ahead - behind) / 2e-5, rel_tol=1e-6, abs_tol=1e-8)
    # Homogeneous of degree p: <grad, u> = p J_p.
    inner = float((w[:, None] * (gradient * u).reshape(len(w), -1)).sum())
    assert math.isclose(inner, p * plain_value(w, W, u, p, isotropic), rel_tol=1e-12)


@pytest.mark.parametrize("isotropic", [False, True])
def test_gradient_where_neighbours_are_equal(isotropic: bool) -> None:
    k = CASES["patches"][0]()
    u = np.zeros((6, 5))
    assert np.all(Jp(k, 1.01, isotropic=isotropic).gradient(u) == 0)
    u[0, 0] = 1e-200
    assert np.isfinite(Jp(k, 1.01, isotropic=isotropic).gradient(u)).all()
    assert Jp(k, 1.5, isotropic=isotropic).gradient(u.astype(np.float32) if k.dtype is None else u).dtype == u.dtype


# ---- the minimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "p", "isotropic"), pairs(["queries", "patches", "table"], [1.2, 1.5, 1.8], [False, True])
)
def test_minimizer_has_no_gradient(name: str, p: float, isotropic: bool) -> None:
    k, w, W = graph_weights(name)
    f = normal((*k.domain.shape, 2), 4)
    lam = np.linspace(0.5, 1, k.domain.size).reshape(k.domain.shape)
    e = Ep(k, f, lam, p, isotropic=isotropic)
    found = e.minimizer(rtol=1e-9)
    assert found.success, found.message
    # The energy is 0.5-convex: no signal is farther from the minimizer than its gradient, and values by its square.
    bound = math.sqrt(2 * found.gap * found.value / 0.5)
    assert np.sqrt((w[:, None] * e.gradient(found.u).reshape(len(w), -1) ** 2).sum()) < 1e-2
    misfit = 0.5 * ((w * lam.ravel())[:, None] * (found.u - f).reshape(len(w), -1) ** 2).sum()
    value = plain_value(w, W, found.u, p, isotropic) + misfit
    assert math.isclose(found.value, value, rel_tol=1e-9)
    better = e.minimizer(rtol=1e-12, start=found.u)
    distance = np.sqrt((w[:, None] * (better.u - found.u).reshape(len(w), -1) ** 2).sum())
    assert distance <= 2 * bound + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("isotropic", [False, True])
@pytest.mark.parametrize("p", [1.1, 1.5, 2])
def test_lagged_diffusivity_never_raises_the_energy(p: float, isotropic: bool) -> None:
    k = CASES["patches"][0]()
    jp, f = Jp(k, p, isotropic=isotropic), normal((30, 2), 4)
    best = Ep(k, f.reshape(6, 5, 2), 0.5, p, isotropic=isotropic).minimizer(rtol=1e-10, maxiter=1000)
    assert best.success
    course = list(itertools.islice(reweighted.iterates(jp, f, np.full(30, 0.5), None), 40))
    smoothed = [step.smoothed for step in course]
    assert np.all(np.diff(smoothed) <= 1e-12 * smoothed[0])
    for step in course:
        assert step.value <= step.smoothed
        # The gap is what it says: at least what is left to gain.
        assert step.value - best.value <= step.gap + 1e-9 * best.value
        assert step.gap >= 0
    assert course[-1].gap < 1e-3 * course[0].gap or p == 2


@pytest.mark.slow
@pytest.mark.parametrize("isotropic", [False, True])
@pytest.mark.parametrize("p", [1, 1.3, 1.7])
def test_missing_data_is_filled_in_and_certified(p: float, isotropic: bool) -> None:
    """A ramp with a hole: the fill stays in the range of what is observed, and the gap holds there too."""
    grid = Grid(24)
    f = np.linspace(-1, 1, 24) + 0.1 * normal(24)
    lam = np.full(24, 3.0)
    lam[8:14] = 0
    f[8:14] = 1e3  # never looked at
    e = Ep(affinity(Gaussian(width=1.0), grid, window=2, method="stencil"), f, lam, p, isotropic=isotropic)
    found, better = e.minimizer(rtol=1e-4, maxiter=3000), e.minimizer(rtol=1e-8, maxiter=100_000)
    assert found.success, found.message
    assert better.success, better.message
    assert found.value - better.value <= found.gap * found.value
    assert better.value * (1 - 1e-8) <= found.value
    known = f[lam > 0]
    assert known.min() <= better.u.min() and better.u.max() <= known.max()  # noqa: PT018
    assert np.all(np.diff(better.u[6:16]) > -0.2)
    other = f.copy()
    other[8:14] = -5
    again = Ep(e.affinity, other, lam, p, isotropic=isotropic).minimizer(rtol=1e-8, maxiter=100_000)
    np.testing.assert_allclose(again.u, better.u, rtol=0, atol=1e-6)


@pytest.mark.parametrize("p", [1, 1.4, 2])
def test_units_do_not_matter(p: float) -> None:
    """E_p(c u + b) for data c f + b and the fidelity lambda c^(p - 2) is c^p E_p(u), whatever the size of c."""
    k, f = CASES["patches"][0](), normal((6, 5), 4)
    found = Ep(k, f, 0.5, p).minimizer()
    for c, b in ((1e-6, 0.0), (2.0**20, 3.0), (1e100, 0.0)):
        other = Ep(k, c * f + b, 0.5 * c ** (p - 2), p).minimizer()
        assert other.success, other.message
        np.testing.assert_allclose((other.u - b) / c, found.u, rtol=0, atol=1e-6)
        assert math.isclose(other.value, found.value * c**p, rel_tol=1e-6)
    shifted = Ep(k, f + 1000, 0.5, p).minimizer()
    np.testing.assert_allclose(shifted.u - 1000, found.u, rtol=0, atol=1e-6)


@pytest.mark.parametrize("p", [1, 1.2, 1.5, 4])
def test_the_unit_of_length_does_not_matter(p: float) -> None:
    """Isotropic slopes have it: w = c^2 w' and lambda = c^p lambda' give c^(2 + p) E_p."""
    f, ends = normal((6, 5), 4), nl.Constraint([0, 17], [0.0, 1.0])

    def solved(c: float) -> Any:
        k = affinity(Gaussian(c), Grid((6, 5), c, "isolated"), window=2)
        e = Ep(k, f, 0.5 * c**p, p, isotropic=True)
        extension = variational.harmonic_extension(e, ends) if p > 1.4 else e.minimizer()
        flow = nl.PFlow(e)
        steps = [nl.LaggedDiffusivity(c**-p).step(flow, f, c**-p)] if p <= 2 else []
        return e.minimizer(), extension, steps

    found, extension, steps = solved(1.0)
    for c in (1e-8, 1e4):
        other, again, moved = solved(c)
        assert other.success, other.message
        assert again.success, again.message
        assert other.iterations <= 1.2 * found.iterations
        np.testing.assert_allclose(other.u, found.u, rtol=0, atol=1e-5)
        np.testing.assert_allclose(again.u, extension.u, rtol=0, atol=1e-5)
        np.testing.assert_allclose(moved, steps, rtol=0, atol=1e-8)


@pytest.mark.parametrize("p", [1, 1.2, 1.5])
def test_a_fidelity_that_is_nothing_beside_differences_or_all_there_is(p: float) -> None:
    """Then each part of the graph has its mean, and u is f; the value is that of the functional."""
    part = np.ones((4, 4)) - np.eye(4)
    k, f = nl.affinity_from_graph(np.kron(np.eye(2), part)), normal((8,), 4)
    means = np.repeat(f.reshape(2, 4).mean(axis=1), 4)
    for c, expected in ((1e-100, means), (1e150, f)):
        e = Ep(k, c * f, 0.3, p)
        found = e.minimizer()
        assert found.success, found.message
        np.testing.assert_allclose(found.u / c, expected, rtol=0, atol=1e-12)
        assert math.isclose(found.value, e.value(c * expected), rel_tol=1e-9)


@pytest.mark.parametrize("misfit", [nl.L1(), nl.Huber(0.5), nl.KullbackLeibler()])
def test_a_misfit_that_is_nothing_beside_differences_is_solved_or_told(misfit: Any) -> None:
    f = np.abs(normal((8,), 4)) + 0.1
    k = nl.affinity_from_graph(np.ones((8, 8)) - np.eye(8))
    e = Ep(k, f, 1e-30, 1, misfit=misfit)
    found = e.minimizer(maxiter=500)
    best = min(e.value(np.full(8, c)) for c in (*f, f.mean()))
    assert not found.success or found.value <= best * (1 + 1e-9)
    assert math.isclose(found.value, e.value(found.u), rel_tol=1e-9)
    strong = Ep(k, f, 1e100, 1, misfit=misfit).minimizer()
    assert np.array_equal(strong.u, f)
    assert math.isclose(strong.value, Jp(k, 1).value(f), rel_tol=1e-12)


@pytest.mark.parametrize("p", [1, 1.5])
def test_single_precision(p: float) -> None:
    f = normal((6, 7, 3), 4).astype(np.float32)
    k = affinity(KERNEL, Grid((6, 7)), f)
    found, exact = Ep(k, f, 1.0, p).minimizer(), Ep(k, f, 1.0, p).minimizer(rtol=1e-6)
    assert found.u.dtype == np.float32
    assert found.success, found.message
    np.testing.assert_allclose(found.u, exact.u, rtol=0, atol=2e-2)
    assert Jp(k, 1.5).gradient(f).dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize("isotropic", [False, True])
def test_p_next_to_one(isotropic: bool) -> None:
    """The linear problems are hard there, and the tolerance is met all the same; the limit is total variation."""
    f = normal((9, 8), 4)
    k = affinity(Patch(0.8, patch_size=3, search_radius=2), Grid((9, 8)), f)
    found, limit = (
        Ep(k, f, 1.0, 1.05, isotropic=isotropic).minimizer(),
        Ep(k, f, 1.0, 1, isotropic=isotropic).minimizer(),
    )
    assert found.success, found.message
    distances = [
        np.abs(Ep(k, f, 1.0, p, isotropic=isotropic).minimizer(rtol=1e-4).u - limit.u).mean() for p in (1.8, 1.4, 1.2)
    ]
    distances.append(np.abs(found.u - limit.u).mean())
    assert np.all(np.diff(distances) < 0)
    assert distances[-1] < 0.03


def test_what_is_constant_stays() -> None:
    k = CASES["patches"][0]()
    lam = np.ones((6, 5))
    lam[1, 1] = 0
    f = np.full((6, 5), 3.5)
    f[1, 1] = -7
    for p in (1, 1.5):
        found = Ep(k, f, lam, p).minimizer()
        assert found.success
        assert found.gap == 0
        assert np.all(found.u == 3.5)


def test_a_tolerance_that_is_not_met_is_told() -> None:
    k, f = CASES["patches"][0](), normal((6, 5), 4)
    for p, iterations in ((1, 7), (1.2, 3)):
        found = Ep(k, f, 0.1, p).minimizer(rtol=1e-12, maxiter=iterations)
        assert not found.success
        assert found.iterations == iterations
        assert "above rtol=1e-12: raise maxiter or rtol, or use a larger fidelity" in found.message
        assert ("or p = 1" in found.message) == (p > 1)
    started = Ep(k, f, 0.5, 1.5).minimizer()
    assert Ep(k, f, 0.5, 1.5).minimizer(start=started.u).iterations < started.iterations


# ---- what is refused


def test_bad_arguments() -> None:
    k, f = CASES["patches"][0](), normal((6, 5), 4)
    for p in (0.5, 10.5, -1, math.nan, "1", True):
        with pytest.raises(InputError, match=r"^p: got"):
            Jp(k, p)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"affinity: got ndarray, expected an Affinity"):
        Jp(f, 1.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^p: got 1, for which J_p has no gradient .*minimizer.* or p slightly above"):
        Jp(k, 1).gradient(f)
    with pytest.raises(InputError, match=r"^u: got shape \(5, 6\)"):
        Jp(k, 1.5).value(f.T)
    with pytest.raises(InputError, match=r"^u: got shape \(6, 5, 2\), expected \(6, 5\), that of the observed"):
        Ep(k, f, 1.0, 1.5).value(np.stack([f, f], axis=-1))
    with pytest.raises(InputError, match=r"^observed: got 1 NaN"):
        Ep(k, np.where(f == f.max(), np.nan, f), 1.0, 1.5)
    with pytest.raises(InputError, match=r"^fidelity: got -1"):
        Ep(k, f, -1.0, 1.5)
    for wrong in (np.ones((6, 5, 1, 1)), np.ones(5)):
        with pytest.raises(InputError, match=r"^fidelity: got shape .*, expected .* or \(6, 5\), one for each node$"):
            Ep(k, f[..., None], wrong, 1.5)
    with pytest.raises(InputError, match=r"^fidelity: got MatrixFidelity, expected a number or one for each node"):
        Ep(k, np.stack([f, f], axis=-1), MatrixFidelity(np.eye(2) * np.ones((6, 5, 1, 1))), 1.5)
    for p in (1, 1.5):
        with pytest.raises(InputError, match=r"^fidelity: got 0 at every node"):
            Ep(k, f, 0.0, p).minimizer()
        with pytest.raises(InputError, match=r"^start: got shape \(6, 5, 1\)"):
            Ep(k, f, 1.0, p).minimizer(start=f[..., None])
        with pytest.raises(InputError, match=r"^rtol: got 0"):
            Ep(k, f, 1.0, p).minimizer(rtol=0)
        with pytest.raises(InputError, match=r"^maxiter: got 0"):
            Ep(k, f, 1.0, p).minimizer(maxiter=0)
    with pytest.raises(NumericalError, match=r"^value: .* overflow"):
        Jp(k, 1.9).value(1e200 * f)
    with pytest.raises(NumericalError, match=r"^value: .* overflow"):
        Ep(k, f, 1.0, 1).value(1e200 * f)
    with pytest.raises(NumericalError, match=r"^fidelity: overflows"):
        Ep(k, 1e300 * f, 1e20, 1).minimizer()


def test_the_observed_signal_is_kept() -> None:
    f = normal((6, 5), 4)
    e = Ep(CASES["patches"][0](), f, 1.0, 1.5)
    before = e.value(np.zeros((6, 5)))
    f += 1
    assert e.value(np.zeros((6, 5))) == before
    assert "p=1.5, anisotropic" in repr(e)
